"""The gate: may a chunk take the sparse path? Decided from replicated facts, so that every rank decides alike."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import check_int


@dataclasses.dataclass(frozen=True)
class GateDecision:
    """What the gate said; truthy if the sparse path may run.

    Attributes:
      sparse: the decision.
      reason: why, for logs.
    """

    sparse: bool
    reason: str

    def __bool__(self) -> bool:
        return self.sparse


def can_use_sparse_prefill(
    q_num_rows: int,
    extend_lens: Sequence[int] | None,
    *,
    is_cp_round_robin: bool,
    cp_num_rows: int | None = None,
    cp_size: int | None = None,
) -> GateDecision:
    """Whether a chunk may take the sparse path, on the host.

    Under round-robin CP: one request, cp_num_rows == q_num_rows, and sum(extend_lens) % cp_size == 0 (no padding rows).
    Without CP: sum(extend_lens) == q_num_rows (no padding rows). An empty chunk and unknown lengths: no.

    Args:
      q_num_rows: query rows of this rank; compared with cp_num_rows, not with the tokens.
      extend_lens: new tokens of every live request, zero-length ones too; None: unknown.
      is_cp_round_robin: whether the rows are split round robin over cp_size ranks.
      cp_num_rows: rows that the CP metadata says each rank holds.
      cp_size: number of ranks; needed under round robin.

    Returns:
      GateDecision.

    Raises:
      ValueError: round robin without an int `cp_size` >= 1; lengths that are no sequence of ints >= 0.

    Source: the rule of SGLang pull request 27276.
    """
    ranks = check_int("cp_size", cp_size) if is_cp_round_robin else 1
    q_num_rows = check_int("q_num_rows", q_num_rows, 0)
    cp_num_rows = None if cp_num_rows is None else check_int("cp_num_rows", cp_num_rows, 0)
    if extend_lens is not None and not isinstance(extend_lens, (Sequence, np.ndarray)):
        raise ValueError(f"`extend_lens` must be a sequence of lengths, or None, got {extend_lens!r}.")
    if extend_lens is None or any(length is None for length in extend_lens):
        return GateDecision(False, "extend lengths are not known")
    n = sum(check_int(f"extend_lens[{i}]", length, 0) for i, length in enumerate(extend_lens))
    if n == 0:
        return GateDecision(False, "no new tokens")
    if not is_cp_round_robin:
        if n != q_num_rows:
            return GateDecision(False, f"padded: {q_num_rows} query rows for {n} tokens")
        return GateDecision(True, f"no context parallelism, {n} unpadded tokens")
    if len(extend_lens) != 1:
        return GateDecision(False, f"{len(extend_lens)} requests under round-robin CP")
    if cp_num_rows is None:
        return GateDecision(False, "CP metadata gives no row count")
    if n % ranks:
        return GateDecision(False, f"padded: {n} tokens are no multiple of cp_size={ranks}")
    if cp_num_rows != q_num_rows:
        return GateDecision(False, f"padded: {q_num_rows} query rows, CP metadata says {cp_num_rows}")
    return GateDecision(True, f"one request, {n} tokens over cp_size={ranks}")


def sparse_prefill_predicate(num_reqs, num_tokens, *, cp_size: int) -> jax.Array:
    """The gate's rule under round-robin CP, traced: num_reqs == 1 and num_tokens > 0 and num_tokens % cp_size == 0.

    Args:
      num_reqs: int32 scalar, live requests (zero-length ones too).
      num_tokens: int32 scalar, new tokens of the chunk. Static capacity and slack rows play no part.
      cp_size: number of ranks.

    Returns:
      bool scalar.

    Raises:
      ValueError: cp_size < 1.
    """
    cp_size = check_int("cp_size", cp_size)
    num_reqs, num_tokens = jnp.asarray(num_reqs), jnp.asarray(num_tokens)
    return (num_reqs == 1) & (num_tokens > 0) & (num_tokens % cp_size == 0)

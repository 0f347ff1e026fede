"""The gate's truth table, host and traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_cp_jax import can_use_sparse_prefill, sparse_prefill_predicate

TABLE = [
    (32, [128], True, 32, 4, True, "one request"),
    (33, [130], True, 33, 4, False, "padded"),
    (8, [4, 4], True, 8, 1, False, "2 requests"),
    (6, [2, 4], False, None, None, True, "no context parallelism"),
    (8, [2, 4], False, None, None, False, "padded"),
    (8, [32], True, None, 4, False, "no row count"),
    (0, [0], True, 0, 4, False, "no new tokens"),
    (8, [32, 0], True, 8, 4, False, "2 requests"),
    (8, None, True, 8, 4, False, "not known"),
    (8, None, False, None, None, False, "not known"),
    (33, [128], True, 32, 4, False, "padded"),
    (1, [4], True, 1, 4, True, "one request"),
    (0, [], True, 0, 4, False, "no new tokens"),
    (8, [None], True, 8, 4, False, "not known"),
]


@pytest.mark.parametrize("rows, lens, cp, cp_rows, size, sparse, reason", TABLE)
def test_truth_table(rows, lens, cp, cp_rows, size, sparse, reason):
    decision = can_use_sparse_prefill(rows, lens, is_cp_round_robin=cp, cp_num_rows=cp_rows, cp_size=size)
    assert bool(decision) is sparse and reason in decision.reason
    if lens is not None and None not in lens:
        as_array = np.asarray(lens, np.int32)
        assert decision == can_use_sparse_prefill(
            rows, as_array, is_cp_round_robin=cp, cp_num_rows=cp_rows, cp_size=size
        )


@pytest.mark.parametrize("size", [None, 0, -1])
@pytest.mark.parametrize("lens", [[128], None, [0]])
def test_cp_size_is_needed_first(size, lens):
    with pytest.raises(ValueError, match=f"`cp_size` must be an int >= 1, got {size}"):
        can_use_sparse_prefill(32, lens, is_cp_round_robin=True, cp_num_rows=32, cp_size=size)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(cp_size=2.5), "`cp_size` must be an int >= 1, got 2.5"),
        (dict(q_num_rows=None), "`q_num_rows` must be an int >= 0, got None"),
        (dict(cp_num_rows="16"), "`cp_num_rows` must be an int >= 0, got '16'"),
        (dict(cp_size="4"), "`cp_size` must be an int >= 1, got '4'"),
        (dict(extend_lens=128), "`extend_lens` must be a sequence of lengths, or None, got 128"),
        (dict(extend_lens=[1.5]), r"`extend_lens\[0\]` must be an int >= 0, got 1.5"),
    ],
)
def test_what_is_no_number(change, message):
    with pytest.raises(ValueError, match=message):
        can_use_sparse_prefill(**(dict(q_num_rows=32, extend_lens=[128], is_cp_round_robin=True, cp_size=4) | change))


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_traced_rule_is_the_host_rule(cp):
    """For every length: the traced predicate = the host gate with consistent row counts."""
    predicate = jax.jit(lambda reqs, n: sparse_prefill_predicate(reqs, n, cp_size=cp))
    for reqs in (0, 1, 2):
        for n in range(0, 3 * cp + 2):
            rows = -(-n // cp)
            lens = [n] + [0] * (reqs - 1) if reqs else []
            host = can_use_sparse_prefill(rows, lens, is_cp_round_robin=True, cp_num_rows=rows, cp_size=cp)
            assert bool(predicate(jnp.int32(reqs), jnp.int32(n if reqs else 0))) == bool(host)
    with pytest.raises(ValueError, match="`cp_size` must be an int >= 1, got 0"):
        sparse_prefill_predicate(1, 8, cp_size=0)
    with pytest.raises(ValueError, match=r"`extend_lens\[1\]` must be an int >= 0, got -4"):
        can_use_sparse_prefill(8, [12, -4], is_cp_round_robin=True, cp_num_rows=8, cp_size=cp)

"""Runs requests of a decoder chunk by chunk: what the main job's arms are made of."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsa_cp_jax.attention import dsa_prefill_attention_local
from dsa_cp_jax.chunk import ChunkPlan, PrefillChunk, make_plan
from dsa_cp_jax.config import LAYER_KINDS
from dsa_cp_jax.gate import GateDecision, can_use_sparse_prefill
from dsa_cp_jax.model import Decoder
from dsa_cp_jax.modules import shard_over_cp
from dsa_cp_jax.round_robin import merge_round_robin, split_round_robin
from pallas_kernels import KVLayout
from pallas_kernels.common import cdiv

CP_AXIS = "cp"


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to run the same model. Arms of one cp_size share their compiled program: they differ in data only.

    Attributes:
      name: what reports call it.
      cp_size: ranks; 1 is no context parallelism.
      allow_sparse: False: every chunk takes the dense path, whatever the gate says.
      contiguous: the naive geometry (the bug): the sparse path takes local row k for position prefix + k.
    """

    name: str
    cp_size: int
    allow_sparse: bool = True
    contiguous: bool = False


def contiguous_query_pos(plan: ChunkPlan) -> jax.Array:
    """The bug that this project is about: positions in chunk order if a rank's rows were contiguous in the sequence.

    Row k of rank r, chunk row r + cp_size * k, is taken for position prefix + k. For a chunk of one request.
    """
    row = jnp.arange(plan.token_capacity, dtype=jnp.int32) // plan.cp_size
    return jnp.where(plan.query_req >= 0, plan.query_pos[0] + row, 0)


def page_map(pages: int, page_size: int, seed: int) -> np.ndarray:
    """A slot for each of pages * page_size positions, the pages in random order."""
    order = np.random.default_rng(seed).permutation(pages)
    return (order[:, None] * page_size + np.arange(page_size)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class ChunkResult:
    """What a chunk gave.

    Attributes:
      logits: [requests, vocab] float32 of each request's last token; without tokens in the chunk, anything.
      num_tokens: tokens of the chunk.
      gate: what the host's gate says about it.
      ran_sparse: which branch ran, as the device reports it.
    """

    logits: np.ndarray
    num_tokens: int
    gate: GateDecision
    ran_sparse: bool


class Engine:
    """A decoder over FP8 (V4) pools on the devices of a CP mesh, and on the first of them alone for cp_size 1."""

    def __init__(
        self, model: Decoder, *, devices: Sequence[jax.Device], token_capacity: int, pages: int, attention_dtype,
        requests: int = 1, gate: str = "seed",
    ):  # fmt: skip
        """Sets up tables and programs; nothing is compiled before it is used.

        Args:
          model: the decoder, the same in every process.
          devices: one per rank; with several processes, those of all of them. The arm without CP runs on the first
            device of its own process, in each.
          token_capacity: most tokens of a chunk, divisible by the number of devices.
          pages: room in the pools for each request, in SWA pages.
          attention_dtype: what q is cast to for the attention; the kernels take bfloat16.
          requests: most requests of a chunk.
          gate: of `make_plan`.
        """
        self.model, self.pages, self.token_capacity = model, pages, token_capacity
        self.attention_dtype, self.requests, self.gate = attention_dtype, requests, gate
        self.config = config = model.layers[0].attention.config
        alone = next(device for device in devices if device.process_index == jax.process_index())
        self.mesh = {n: Mesh(np.array(group), (CP_AXIS,)) for n, group in {1: [alone], len(devices): devices}.items()}
        self.placed_model = {n: self._place(n, model) for n in self.mesh}
        positions = pages * config.swa_page_size  # of a request
        kinds = {kind: ratio for kind, ratio in LAYER_KINDS.items() if ratio}
        tables = {kind: cdiv(positions // ratio, config.compressed_page_size(kind)) for kind, ratio in kinds.items()}
        self.compressed_pages = {kind: requests * width for kind, width in tables.items()}
        rng = np.random.default_rng(0)
        self.tables = dict(
            req_to_token=page_map(requests * pages, config.swa_page_size, seed=1).reshape(requests, positions),
            full_to_swa=page_map(requests * pages, config.swa_page_size, seed=2),
        )
        self.page_tables = {
            ratio: rng.permutation(self.compressed_pages[kind]).reshape(requests, -1) for kind, ratio in kinds.items()
        }
        self.step = jax.jit(self._step, static_argnames=("cp_size", "path"), donate_argnames="caches")

    def _replicated(self, cp_size: int) -> NamedSharding:
        return NamedSharding(self.mesh[cp_size], PartitionSpec())

    def _place(self, cp_size: int, tree):
        """Replicates what every process holds alike; `device_put` would compare it between the processes each time."""
        sharding = self._replicated(cp_size)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree)

    def _step(self, model, tokens, chunk, caches, allow_sparse, contiguous, *, cp_size: int, path: str):
        plan = make_plan(chunk, self.config, cp_size=cp_size, gate=self.gate)
        plan = dataclasses.replace(plan, use_sparse=plan.use_sparse & allow_sparse)

        def attend(q, plan, *args, **kwargs):
            query_pos = jnp.where(contiguous, contiguous_query_pos(plan), plan.query_pos)
            plan = dataclasses.replace(plan, query_pos=query_pos)
            out = dsa_prefill_attention_local(q.astype(self.attention_dtype), plan, *args, **kwargs)
            return out.astype(q.dtype)

        if cp_size == 1:
            logits, caches, ran_sparse = model(tokens, plan, caches, cp_axis=None, path=path, attend=attend)
        else:
            fn = functools.partial(Decoder.__call__, cp_axis=CP_AXIS, path=path, attend=attend)
            run = shard_over_cp(fn, self.mesh[cp_size], CP_AXIS)
            logits, caches, ran_sparse = run(model, split_round_robin(tokens, cp_size), plan, caches)
            logits = merge_round_robin(logits, cp_size, tokens.shape[0])
        # Every process reads it, so every device has to have it.
        last = logits[jnp.maximum(jnp.cumsum(chunk.extend_lens) - 1, 0)]
        return lax.with_sharding_constraint(last, self._replicated(cp_size)), caches, ran_sparse

    def start(self, arm: Arm, rows: Sequence[int] = (0,)) -> "Session":
        """Empty sequences of some requests, which arm reads together: their rows in the engine's tables."""
        caches = self.model.init_caches(
            layout=KVLayout.V4, swa_pages=self.requests * self.pages, compressed_pages=self.compressed_pages,
            state_rows=self.requests, dtype=jnp.float32,
        )  # fmt: skip
        return Session(self, arm, rows, self._place(arm.cp_size, caches))


class Session:
    """Sequences under way in an arm."""

    def __init__(self, engine: Engine, arm: Arm, rows: Sequence[int], caches):
        self.engine, self.arm, self.rows, self.caches = engine, arm, list(rows), caches
        self.lengths = np.zeros(len(rows), np.int32)

    def feed(self, *pieces: np.ndarray) -> ChunkResult:
        """Runs a chunk: the next tokens of each request, none or some, at most `token_capacity` together.

        Three kinds of programs: without CP every chunk is sparse; under CP the gate is taken inside, but where it keeps
        the short chunks of decoding steps from the sparse path, their program has the dense branch alone.
        """
        engine, arm = self.engine, self.arm
        lengths = np.array([len(piece) for piece in pieces], np.int32)
        n, spare = int(lengths.sum()), engine.requests - len(pieces)
        rows = cdiv(n, arm.cp_size)
        if engine.gate == "wide":
            gate = GateDecision(n > 0, f"wide gate: {len(pieces)} requests, {n} tokens over cp_size={arm.cp_size}")
        else:
            gate = can_use_sparse_prefill(
                rows, lengths.tolist(), is_cp_round_robin=arm.cp_size > 1, cp_num_rows=rows, cp_size=arm.cp_size
            )
        small = cdiv(engine.requests, arm.cp_size) * arm.cp_size
        short = n < small or n <= engine.requests
        capacity = small if short else engine.token_capacity
        if arm.cp_size == 1:
            path = "sparse" if arm.allow_sparse else "dense"
        else:
            path = "dense" if short and not gate else "auto"

        self.lengths += lengths
        order = self.rows + [0] * spare
        page_tables = {ratio: table[order] for ratio, table in engine.page_tables.items()}
        chunk = PrefillChunk.build(
            seq_lens=np.pad(self.lengths, (0, spare)), extend_lens=np.pad(lengths, (0, spare)), num_reqs=len(pieces),
            req_pool_indices=order, token_capacity=capacity, cp_size=arm.cp_size,
            page_tables=page_tables, **engine.tables,
        )  # fmt: skip
        args = (jnp.asarray(np.pad(np.concatenate(pieces), (0, capacity - n)), jnp.int32), chunk)
        flags = (jnp.bool_(arm.allow_sparse), jnp.bool_(arm.contiguous))
        args, flags = engine._place(arm.cp_size, (args, flags))
        logits, self.caches, ran_sparse = engine.step(
            engine.placed_model[arm.cp_size], *args, self.caches, *flags, cp_size=arm.cp_size, path=path
        )
        return ChunkResult(np.asarray(logits)[: len(pieces)], n, gate, bool(ran_sparse))

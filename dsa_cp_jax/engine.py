"""Runs one request of a decoder chunk by chunk: what the main job's arms are made of."""

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
from dsa_cp_jax.config import compress_ratio
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
      logits: [vocab] float32 of the last token.
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
        self, model: Decoder, *, devices: Sequence[jax.Device], token_capacity: int, pages: int, attention_dtype
    ):
        """Sets up tables and programs; nothing is compiled before it is used.

        Args:
          model: the decoder, the same in every process.
          devices: one per rank; with several processes, those of all of them. The arm without CP runs on the first
            device of its own process, in each.
          token_capacity: most tokens of a chunk, divisible by the number of devices.
          pages: size of the pools, in SWA pages.
          attention_dtype: what q is cast to for the attention; the kernels take bfloat16.
        """
        self.model, self.pages, self.token_capacity = model, pages, token_capacity
        self.attention_dtype = attention_dtype
        self.config = config = model.layers[0].attention.config
        alone = next(device for device in devices if device.process_index == jax.process_index())
        self.mesh = {n: Mesh(np.array(group), (CP_AXIS,)) for n, group in {1: [alone], len(devices): devices}.items()}
        self.placed_model = {n: self._place(n, model) for n in self.mesh}
        self.num_positions = pages * config.swa_page_size
        self.compressed_pages = {
            kind: cdiv(self.num_positions // compress_ratio(kind), config.compressed_page_size(kind))
            for kind in ("c4", "c128")
        }
        rng = np.random.default_rng(0)
        self.tables = dict(
            req_pool_indices=[0],
            req_to_token=page_map(pages, config.swa_page_size, seed=1)[None],
            full_to_swa=page_map(pages, config.swa_page_size, seed=2),
            page_tables={4: rng.permutation(self.compressed_pages["c4"])[None],
                         128: rng.permutation(self.compressed_pages["c128"])[None]},
        )  # fmt: skip
        self.step = jax.jit(self._step, static_argnames=("cp_size", "path"), donate_argnames="caches")

    def _replicated(self, cp_size: int) -> NamedSharding:
        return NamedSharding(self.mesh[cp_size], PartitionSpec())

    def _place(self, cp_size: int, tree):
        """Replicates what every process holds alike; `device_put` would compare it between the processes each time."""
        sharding = self._replicated(cp_size)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree)

    def _step(self, model, tokens, chunk, caches, allow_sparse, contiguous, *, cp_size: int, path: str):
        plan = make_plan(chunk, self.config, cp_size=cp_size)
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
        last = lax.with_sharding_constraint(logits[plan.num_tokens - 1], self._replicated(cp_size))
        return last, caches, ran_sparse

    def start(self, arm: Arm) -> "Session":
        """An empty sequence."""
        compressed_pages = self.compressed_pages
        caches = self.model.init_caches(
            layout=KVLayout.V4, swa_pages=self.pages, compressed_pages=compressed_pages, state_rows=1, dtype=jnp.float32
        )
        return Session(self, arm, self._place(arm.cp_size, caches))


class Session:
    """One sequence under way in an arm."""

    def __init__(self, engine: Engine, arm: Arm, caches):
        self.engine, self.arm, self.caches, self.length = engine, arm, caches, 0

    def feed(self, tokens: np.ndarray) -> ChunkResult:
        """Runs a chunk of at most `token_capacity` tokens.

        Three kinds of programs: without CP every chunk is sparse; under CP the gate is taken inside, but a chunk of
        fewer tokens than ranks (a decoding step) always pads, so its program has the dense branch alone.
        """
        engine, arm, n = self.engine, self.arm, len(tokens)
        short = n < arm.cp_size or n == 1
        capacity = arm.cp_size if short else engine.token_capacity
        path = "sparse" if arm.cp_size == 1 else "dense" if short else "auto"
        chunk = PrefillChunk.build(
            seq_lens=[self.length + n], extend_lens=[n], token_capacity=capacity, cp_size=arm.cp_size, **engine.tables
        )
        args = (jnp.asarray(np.pad(tokens, (0, capacity - n)), jnp.int32), chunk)
        flags = (jnp.bool_(arm.allow_sparse), jnp.bool_(arm.contiguous))
        args, flags = engine._place(arm.cp_size, (args, flags))
        logits, self.caches, ran_sparse = engine.step(
            engine.placed_model[arm.cp_size], *args, self.caches, *flags, cp_size=arm.cp_size, path=path
        )
        self.length += n
        rows = cdiv(n, arm.cp_size)
        gate = can_use_sparse_prefill(
            rows, [n], is_cp_round_robin=arm.cp_size > 1, cp_num_rows=rows, cp_size=arm.cp_size
        )
        return ChunkResult(np.asarray(logits), n, gate, bool(ran_sparse))

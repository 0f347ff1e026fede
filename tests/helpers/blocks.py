"""An attention block with its tables: runs schedules of chunks of several requests, any cp_size, on poisoned caches."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dsa_cp_jax import (
    DSAConfig,
    PrefillChunk,
    dsa_prefill_attention_local,
    make_plan,
    merge_round_robin,
    split_round_robin,
)
from dsa_cp_jax.modules import DSAAttention, shard_over_cp
from pallas_kernels import KVLayout
from tests.helpers.world import cpu_mesh, traced_once

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"
SMALL = dataclasses.replace(DSAConfig.tiny(), h_q=2, topk=8, hidden_size=32, index_heads=2, yarn_original_len=4096)
NUM_REQS = 3
MAX_LEN = 640


def load_golden(name: str):
    """(block with the golden weights, the golden arrays) of transformers' attention layer "swa", "csa" or "hca"."""
    facts = json.loads((GOLDEN / f"attention_{name}.json").read_text())
    arrays = dict(np.load(GOLDEN / f"attention_{name}.npz"))
    yarn = facts["rope_parameters"]["compress"]
    config = dataclasses.replace(
        DSAConfig.tiny(), h_q=facts["num_attention_heads"], topk=facts["index_topk"], hidden_size=facts["hidden_size"],
        q_lora_rank=facts["q_lora_rank"], o_groups=facts["o_groups"], o_lora_rank=facts["o_lora_rank"],
        index_heads=facts["index_n_heads"], index_head_dim=facts["index_head_dim"], norm_eps=facts["rms_norm_eps"],
        rope_theta=facts["rope_theta"], compress_rope_theta=yarn["rope_theta"], yarn_factor=yarn["factor"],
        yarn_original_len=yarn["original_max_position_embeddings"], yarn_beta_fast=yarn["beta_fast"],
        yarn_beta_slow=yarn["beta_slow"],
    )  # fmt: skip
    block = DSAAttention(config, {"swa": "c0", "csa": "c4", "hca": "c128"}[name], rngs=nnx.Rngs(0))
    weights = {key[2:]: value for key, value in arrays.items() if key.startswith("w/")}

    def put(parameter, value):
        assert parameter[...].shape == value.shape
        parameter[...] = jnp.asarray(value)

    def put_compressor(compressor, prefix):
        put(compressor.kv_proj.kernel, weights.pop(f"{prefix}.kv_proj.weight").T)
        put(compressor.gate_proj.kernel, weights.pop(f"{prefix}.gate_proj.weight").T)
        put(compressor.position_bias, weights.pop(f"{prefix}.position_bias"))
        put(compressor.kv_norm.weight, weights.pop(f"{prefix}.kv_norm.weight"))

    for projection in ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj"):
        put(getattr(block, projection).kernel, weights.pop(f"{projection}.weight").T)
    put(block.q_a_norm.weight, weights.pop("q_a_norm.weight"))
    put(block.kv_norm.weight, weights.pop("kv_norm.weight"))
    put(block.sinks, weights.pop("sinks"))
    grouped = weights.pop("o_a_proj.weight").reshape(config.o_groups, config.o_lora_rank, -1)
    put(block.o_a_proj, grouped.swapaxes(1, 2))
    if name != "swa":
        put_compressor(block.compressor, "compressor")
    if name == "csa":
        put_compressor(block.indexer.compressor, "compressor.indexer")
        put(block.indexer.q_b_proj.kernel, weights.pop("compressor.indexer.q_b_proj.weight").T)
        put(block.indexer.weights_proj.kernel, weights.pop("compressor.indexer.scorer.weights_proj.weight").T)
    assert not weights, f"left over: {list(weights)}"
    return block, arrays


def poison(tree):
    """Every byte 0xFF, every number NaN: nothing of it may ever reach a result."""
    return jax.tree.map(lambda x: jnp.full_like(x, 255 if x.dtype == jnp.uint8 else jnp.nan), tree)


@dataclasses.dataclass
class Seen:
    """What a schedule gave, per request in order of position: output, the attention's q and output, selected entries."""

    output: list[np.ndarray]
    q: list[np.ndarray]
    core: list[np.ndarray]
    topk: list[np.ndarray]


class BlockRunner:
    """Runs a block of one capacity and cp_size; refuses to be traced twice."""

    def __init__(
        self,
        block: DSAAttention,
        *,
        cp_size: int,
        token_capacity: int,
        num_reqs: int = NUM_REQS,
        layout=KVLayout.F32,
        gate: str = "seed",
    ):
        self.block, self.cp_size, self.layout, self.gate = block, cp_size, layout, gate
        self.token_capacity, self.num_reqs = -(-token_capacity // cp_size) * cp_size, num_reqs
        self.config, rng = block.config, np.random.default_rng(7)
        slots = num_reqs * MAX_LEN
        self.req_to_token = rng.permutation(slots).reshape(num_reqs, MAX_LEN)
        self.full_to_swa = rng.permutation(slots)
        self.pages = {
            4: MAX_LEN // 4 // self.config.c4_page_size,
            128: -(-MAX_LEN // 128 // self.config.c128_page_size),
        }
        self.tables = {m: rng.permutation(num_reqs * n).reshape(num_reqs, n) for m, n in self.pages.items()}
        self.mesh = cpu_mesh((cp_size,))
        self.step = jax.jit(traced_once(self._step))

    def _rank_local(self, block, x, plan, cache, *, cp_axis):
        seen = {}

        def attend(q, plan, swa, compressed, topk, sinks, **kwargs):
            seen["core"] = dsa_prefill_attention_local(q, plan, swa, compressed, topk, sinks, **kwargs)
            seen["q"], seen["topk"] = q, jnp.zeros((len(q), 0), jnp.int32) if topk is None else topk
            return seen["core"]

        output, cache = block(x, plan, cache, cp_axis=cp_axis, attend=attend)
        return seen | dict(output=output), cache

    def _step(self, block, x, chunk, cache):
        plan = make_plan(chunk, self.config, cp_size=self.cp_size, gate=self.gate)
        if self.cp_size == 1:
            return self._rank_local(block, x, plan, cache, cp_axis=None)
        run = shard_over_cp(functools.partial(self._rank_local, cp_axis="cp"), self.mesh)
        rows, cache = run(block, split_round_robin(x, self.cp_size), plan, cache)
        return jax.tree.map(lambda y: merge_round_robin(y, self.cp_size, self.token_capacity), rows), cache

    def chunk(self, order, prefix_lens, extend_lens) -> PrefillChunk:
        """A chunk of the requests `order`, each of which owns its row of every table."""
        unused = [i for i in range(self.num_reqs) if i not in order]
        rows, none = [*order, *unused], [0] * len(unused)
        return PrefillChunk.build(
            seq_lens=[*np.add(prefix_lens, extend_lens), *none], extend_lens=[*extend_lens, *none], req_pool_indices=rows,
            req_to_token=self.req_to_token, full_to_swa=self.full_to_swa, num_reqs=len(order), cp_size=self.cp_size,
            page_tables={m: table[rows] for m, table in self.tables.items()}, token_capacity=self.token_capacity,
        )  # fmt: skip

    def cache(self):
        """A poisoned cache, placed as it comes back (another placement would be another trace)."""
        cache = self.block.init_cache(
            layout=self.layout,
            swa_pages=self.num_reqs * MAX_LEN // self.config.swa_page_size,
            compressed_pages=self.num_reqs * self.pages[4 if self.block.kind == "c4" else 128],
            state_rows=self.num_reqs,
        )
        return jax.device_put(poison(cache), NamedSharding(self.mesh, PartitionSpec()))

    def run(self, inputs, schedule) -> Seen:
        """Runs chunks of requests.

        Args:
          inputs: per request, [its tokens, hidden_size].
          schedule: chunks, each a list of (request, new tokens).
        """
        cache, done = self.cache(), [0] * len(inputs)
        parts = [{name: [] for name in ("output", "q", "core", "topk")} for _ in inputs]
        for chunk_requests in schedule:
            order, extend_lens = zip(*chunk_requests)
            rows = [inputs[i][done[i] : done[i] + n] for i, n in chunk_requests]
            x = np.concatenate(rows)
            slack = np.full((self.token_capacity - len(x), x.shape[1]), np.nan, np.float32)
            chunk = self.chunk(order, [done[i] for i in order], extend_lens)
            seen, cache = self.step(self.block, jnp.asarray(np.concatenate([x, slack])), chunk, cache)
            start = 0
            for i, n in chunk_requests:
                for name, value in seen.items():
                    parts[i][name].append(np.asarray(value[start : start + n]))
                start, done[i] = start + n, done[i] + n
        return Seen(**{name: [np.concatenate(p[name]) if p[name] else None for p in parts] for name in parts[0]})

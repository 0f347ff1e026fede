"""What is communicated, and how much memory it takes: read in programs for H200s that need not be there."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsa_cp_jax import DSAConfig, KVPool, PrefillChunk, dsa_prefill_attention, make_plan
from dsa_cp_jax.model import Decoder
from dsa_cp_jax.modules import DSAAttention, shard_over_cp
from pallas_kernels import KVLayout
from tests.helpers.aot import h200_mesh

pytestmark = pytest.mark.aot
FLASH = DSAConfig.deepseek_v4_flash()
COMPRESSOR_NUMBERS = dict(c0=0, c4=2 * 2 * (512 + 128), c128=2 * 512)
"""What a token sends beside its KV: values and gates, of two series in c4 layers, those of the indexer too."""
COLLECTIVES = r" (all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter)(-start)?\("


def plan_for(mesh, config, prefix: int, token_capacity: int):
    """The abstract plan of a chunk."""
    total = prefix + token_capacity
    chunk = PrefillChunk.build(
        seq_lens=[total], extend_lens=[token_capacity], req_pool_indices=[0], req_to_token=np.arange(total)[None],
        full_to_swa=np.arange(total), page_tables={m: np.arange(total // 256)[None] for m in (4, 128)},
        token_capacity=token_capacity, cp_size=mesh.size,
    )  # fmt: skip
    return jax.eval_shape(functools.partial(make_plan, config=config, cp_size=mesh.size), chunk)


def on_mesh(mesh, tree, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_for(mesh, run, module, rows, config, caches, *, token_capacity):
    """The text of the program for `run(module, rows, plan, caches)` of a chunk behind a prefix of its own length."""
    args = module, rows, plan_for(mesh, config, token_capacity, token_capacity), caches
    args = [on_mesh(mesh, arg, spec) for arg, spec in zip(args, (P(), P("cp"), P(), P()))]
    return jax.jit(shard_over_cp(run, mesh), donate_argnums=3).lower(*args).compile().as_text()


@pytest.mark.parametrize("kind, gpus", [("c0", 2), ("c128", 2), ("c4", 1), ("c4", 2), ("c4", 4)])
def test_two_blocks(kind, gpus):
    """V4-Flash: an exchange a layer, of 584 bytes a token and what the compressors need, while the queries are made."""
    capacity = 4096
    block = nnx.eval_shape(lambda: DSAAttention(FLASH, kind, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    pages = dict(swa_pages=capacity // 128, compressed_pages=capacity // 128)
    cache = jax.eval_shape(lambda: block.init_cache(layout=KVLayout.V4, state_rows=1, dtype=jnp.bfloat16, **pages))

    def run(block, x, plan, caches):
        written = []
        for cache in caches:
            y, cache = block(x, plan, cache, cp_axis="cp", path="sparse", implementation="mosaic_gpu")
            x = x + y
            written.append(cache)
        return x, written

    x = jax.ShapeDtypeStruct((capacity, FLASH.hidden_size), jnp.bfloat16)
    text = compile_for(h200_mesh((gpus,), ("cp",)), run, block, x, FLASH, [cache] * 2, token_capacity=capacity)
    assert text.count("mosaic_gpu") >= 2 * 3
    lines = text.splitlines()
    found = [i for i, line in enumerate(lines) if re.search(COLLECTIVES, line)]
    assert len(found) == (2 if gpus > 1 else 0), [lines[i] for i in found]
    for start in found:
        assert " all-gather-start(" in lines[start]
        arrays = re.findall(r"(u8|bf16|f32)\[([\d,]+)\]", lines[start].split(" all-gather-start(")[0])
        widths = {"u8": 1, "bf16": 2, "f32": 4}
        num_bytes = sum(widths[dtype] * math.prod(map(int, dims.split(","))) for dtype, dims in arrays)
        sent = num_bytes // (1 + gpus)  # its type holds what goes in and what comes out
        assert sent == capacity // gpus * (584 + 2 * COMPRESSOR_NUMBERS[kind])
        done = next(i for i in range(start, len(lines)) if " all-gather-done(" in lines[i])
        # Meanwhile 64 heads of 512 are projected (in c4 layers with the indexer's queries), or turned by RoPE.
        queries = rf"= bf16\[{capacity // gpus},(32768|40960|64,512)\]\S* fusion\("
        assert [line for line in lines[start:done] if re.search(queries, line)], "not hidden"


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_decoder(gpus):
    """A stack of all layer kinds, the gate around it: one all-gather a layer in each branch, and nothing else."""
    config = dataclasses.replace(DSAConfig.tiny(), swa_page_size=256, c4_page_size=64)
    kinds, capacity = ("c0", "c4", "c128"), 256
    model = nnx.eval_shape(
        lambda: Decoder(config, kinds, vocab_size=256, mlp_size=64, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )
    pages = dict(swa_pages=2, compressed_pages=dict(c4=2, c128=2))
    caches = jax.eval_shape(lambda: model.init_caches(layout=KVLayout.V4, state_rows=1, **pages))
    tokens = jax.ShapeDtypeStruct((capacity,), jnp.int32)
    run = functools.partial(Decoder.__call__, cp_axis="cp", path="auto", implementation="mosaic_gpu")
    text = compile_for(
        h200_mesh((gpus,), ("cp",)), run, model, tokens, config, caches, token_capacity=capacity,
    )  # fmt: skip
    assert text.count("mosaic_gpu") >= (3 + 1) * len(kinds)
    found = [match[1] for match in re.finditer(COLLECTIVES, text)]
    assert found == ["all-gather"] * (2 * len(kinds) if gpus > 1 else 0)


@pytest.mark.parametrize("kind", ["c4", "c128"])
def test_memory_behind_a_million_tokens(kind):
    """Of the temporaries of the sparse path, the workspace grows with the prefix; in c128 layers, index rows do."""
    prefix, capacity, mesh = 1 << 20, 4096, h200_mesh((2,), ("cp",))
    page_size = FLASH.compressed_page_size(kind)
    pages = (prefix + capacity) // 256
    pools = [
        jax.eval_shape(lambda n=n, size=size: KVPool.zeros(n, layout=KVLayout.V4, page_size=size))
        for n, size in ((capacity // 128, FLASH.swa_page_size), (pages, page_size))
    ]
    q = jax.ShapeDtypeStruct((capacity, FLASH.h_q, 512), jnp.bfloat16)
    topk = jax.ShapeDtypeStruct((capacity, FLASH.topk), jnp.int32) if kind == "c4" else None
    args = q, plan_for(mesh, FLASH, prefix, capacity), *pools, topk
    args = [on_mesh(mesh, arg, spec) for arg, spec in zip(args, (P("cp"), P(), P(), P(), P("cp")))]

    def run(*args):
        how = dict(path="sparse", implementation="mosaic_gpu")
        return dsa_prefill_attention(*args, kind=kind, config=FLASH, mesh=mesh, **how)

    memory = jax.jit(run).lower(*args).compile().memory_analysis()
    workspace = 1024 * (pages * page_size + capacity + FLASH.swa_window - 1)
    columns = FLASH.swa_window + (FLASH.topk if kind == "c4" else pages * page_size)
    index_rows = capacity // 2 * 4 * (-(-columns // 128) * 128)
    assert 0 <= memory.temp_size_in_bytes - workspace - index_rows < 4 << 20

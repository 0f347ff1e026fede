"""What the entry refuses, and how it says so."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from dsa_cp_jax import KVPool, dsa_prefill_attention, dsa_prefill_attention_local, split_round_robin
from pallas_kernels import KVLayout
from tests.helpers.world import CONFIG, World, cpu_mesh, plan_of

FULL, PADDED = ([600], [48]), ([300], [47])  # seq_lens, extend_lens


@pytest.fixture(scope="module")
def world():
    return World.build(np.random.default_rng(1))


def test_forced_sparse_on_a_refused_chunk(world, rng):
    seq, extend = PADDED
    q, topk, _ = world.queries(rng, seq, extend)
    plan = plan_of(world.chunk(seq, extend, 4), config=CONFIG, cp_size=4)
    message = r"`path='sparse'` must not be forced.*num_reqs=1, num_tokens=47, cp_size=4"
    with pytest.raises(ValueError, match=message):
        dsa_prefill_attention(
            split_round_robin(q, 4), plan, *world.arguments("c0", topk), kind="c0", config=CONFIG,
            mesh=cpu_mesh((4,)), path="sparse",
        )  # fmt: skip


BF16_POOL = KVPool.zeros(4, layout=KVLayout.BF16.with_d(576), page_size=16)
BAD = [
    ("c4", dict(topk_indices=None), r"`topk_indices` must be given for a c4 layer, got None"),
    ("c4", dict(compressed_pool=None), r"`compressed_pool` must be given for a c4 layer, got None"),
    ("c128", dict(topk_indices=jnp.zeros((48, 16), jnp.int32)), r"`topk_indices` must be None for a c128 layer"),
    ("c0", dict(topk_indices=jnp.zeros((48, 16), jnp.int32)), r"`topk_indices` must be None for a c0 layer"),
    ("c2", {}, r"`kind` must be one of 'c0', 'c4', 'c128', got 'c2'"),
    ("c0", dict(path="fast"), r"`path` must be one of 'auto', 'sparse', 'dense', got 'fast'"),
    ("c0", dict(q=jnp.zeros((130, 2, 512))), r"`q` must have 48 rows .*got 130"),
    ("c0", dict(q=jnp.zeros((48, 3, 512))), r"`q` must have shape \[rows, h_q=2, d_qk=512\], got \(48, 3, 512\)"),
    ("c0", dict(q=jnp.zeros((48, 2, 512), jnp.float16)), r"`q` must have dtype bfloat16 or float32, got float16"),
    ("c4", dict(topk_indices=jnp.zeros((47, 16), jnp.int32)), r"`topk_indices` must have shape \[rows=48, topk\]"),
    ("c4", dict(topk_indices=jnp.zeros((48, 16))), r"`topk_indices` must have dtype int32, got float32"),
    ("c0", dict(attn_sink=jnp.zeros(3)), r"`attn_sink` must have shape \[h_q=2\], got \(3,\)"),
    ("c0", dict(cp_axis="ranks"), r"`cp_axis` must be an axis of `mesh` \('cp',\), got 'ranks'"),
    ("c0", dict(head_axis="tp"), r"`head_axis` must be an axis of `mesh` \('cp',\), got 'tp'"),
    ("c0", dict(mesh=(2,)), r"`plan` must be made for cp_size=2 \(`mesh`\), got cp_size=4"),
    ("c0", dict(swa_pool=BF16_POOL), r"`swa_pool` must have page_size=16 and rows of d_qk=512"),
    ("c0", dict(swa_pool=BF16_POOL.pages), r"`swa_pool` must be a KVPool, got "),
    ("c4", dict(compressed_pool="c128"), r"`compressed_pool` must have page_size=8 .*got page_size=2"),
    ("c0", dict(implementation="cuda"), r"`implementation` of .* must be None, 'xla' or 'mosaic_gpu', got 'cuda'"),
    ("c0", dict(head_axis="cp"), r"`head_axis` must be another axis than `cp_axis`, got 'cp' for both"),
    ("c0", dict(q=[1.0]), r"`q` must be an array, got list"),
    ("c0", dict(q=jnp.zeros(())), r"`q` must have shape \[rows, h_q=2, d_qk=512\], got \(\)"),
    ("c0", dict(plan=None), r"`plan` must be a ChunkPlan, got NoneType"),
    ("c0", dict(config=None), r"`config` must be a DSAConfig, got NoneType"),
    (
        "c0",
        dict(config=dataclasses.replace(CONFIG, c4_page_size=16, swa_window=64)),
        r"`config` must be the one that `plan` was made with, they differ in: swa_window, c4_page_size\.",
    ),
    ("c0", dict(mesh=None), r"`mesh` must be a Mesh or AbstractMesh, got NoneType"),
    (["c0"], {}, r"`kind` must be one of 'c0', 'c4', 'c128', got \['c0'\]"),
]


@pytest.mark.parametrize(
    "kind, change, message", BAD, ids=[f"{k}-{next(iter(c), 'kind')}-{i}" for i, (k, c, _) in enumerate(BAD)]
)
def test_bad_arguments(world, rng, kind, change, message):
    """Every mistake is a ValueError that names the argument, before anything runs."""
    q, topk, _ = world.queries(rng, *FULL)
    plan = plan_of(world.chunk(*FULL, 4), config=CONFIG, cp_size=4)
    swa, compressed, topk, sink = world.arguments(kind if isinstance(kind, str) and kind in world.pools else "c0", topk)
    kwargs = dict(
        q=q, plan=plan, swa_pool=swa, compressed_pool=compressed, topk_indices=topk, attn_sink=sink, kind=kind,
        config=CONFIG, mesh=cpu_mesh((4,)),
    ) | change  # fmt: skip
    if isinstance(kwargs["mesh"], tuple):
        kwargs["mesh"] = cpu_mesh(kwargs["mesh"])
    if isinstance(kwargs["compressed_pool"], str):
        kwargs["compressed_pool"] = world.pools[kwargs["compressed_pool"]]
    with pytest.raises(ValueError, match=message):
        dsa_prefill_attention(**kwargs)


def test_more_tokens_than_the_pools_hold(world, rng):
    """With a concrete plan the entry sees that a pool is too small, or that the chunk overflows; nothing is computed."""
    q, topk, _ = world.queries(rng, *FULL)
    swa, c4, topk, sink = world.arguments("c4", topk)
    small = KVPool.zeros(2, layout=KVLayout.V4, page_size=16)
    run = functools.partial(dsa_prefill_attention, kind="c4", config=CONFIG, mesh=cpu_mesh((4,)))
    plan = plan_of(world.chunk(*FULL, 4), config=CONFIG, cp_size=4)
    with pytest.raises(ValueError, match=r"`swa_pool` must hold slot \d+ of the chunk's KV, got 32 slots"):
        run(q, plan, small, c4, topk, sink)
    with pytest.raises(ValueError, match=r"`compressed_pool` must hold slot \d+ of the chunk's KV, got 8 slots"):
        run(q, plan, swa, KVPool.zeros(1, layout=KVLayout.V4, page_size=8), topk, sink)
    narrow = world.chunk(*FULL, 4, page_tables={4: world.page_tables[4][:, :3]})
    with pytest.raises(ValueError, match=r"`plan` must fit its capacities.*got plan.overflow=True"):
        run(q, plan_of(narrow, config=CONFIG, cp_size=4), swa, c4, topk, sink)


def test_local_form_without_its_axis(world, rng):
    q, topk, _ = world.queries(rng, *FULL)
    plan = plan_of(world.chunk(*FULL, 4), config=CONFIG, cp_size=4)
    with pytest.raises(ValueError, match="`cp_axis` must be a manual axis of a surrounding shard_map, got 'cp'"):
        dsa_prefill_attention_local(q, plan, *world.arguments("c0", topk), kind="c0", config=CONFIG)


def test_a_kind_without_page_table(world, rng):
    q, topk, _ = world.queries(rng, *FULL)
    chunk = world.chunk(*FULL, 4, page_tables={4: world.page_tables[4]})
    plan = plan_of(chunk, config=CONFIG, cp_size=4)
    with pytest.raises(ValueError, match=r"`plan` must be made from page_tables\[128\] for a c128 layer"):
        dsa_prefill_attention(q, plan, *world.arguments("c128", topk), kind="c128", config=CONFIG, mesh=cpu_mesh((4,)))

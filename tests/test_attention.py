"""The entry and both paths on virtual devices: against a float64 oracle, the gate by observation, bad input."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dsa_cp_jax import (
    DSAConfig,
    KVPool,
    PrefillChunk,
    attention,
    dsa_prefill_attention,
    dsa_prefill_attention_local,
    make_plan,
    merge_round_robin,
    split_round_robin,
    write_kv,
)
from pallas_kernels import KVLayout
from tests.helpers.aot import h200_mesh
from tests.helpers.oracles import assert_close
from tests.helpers.world import CONFIG, World, cpu_mesh, entry, plan_of, traced_once

KINDS = ("c0", "c4", "c128")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
# seq_lens, extend_lens and whether round-robin CP takes the sparse path. Capacity 48 rows.
FULL, SHORT, PADDED, MULTI = ([600], [48]), ([127 + 24], [24]), ([300], [47]), ([140, 9, 600], [12, 9, 20])
CASES = {
    "full": (*FULL, True),
    "short": (*SHORT, True),
    "padded": (*PADDED, False),
    "multi": (*MULTI, False),
    "fresh": ([48], [48], True),
    "a chunk after a chunk": ([151 + 48], [48], True),
    "last token in the padding row": ([8], [7], False),
    "zero-length request": ([200, 50], [24, 0], False),
    "nothing": ([], [], False),
}


@pytest.fixture(scope="module")
def world():
    return World.build(np.random.default_rng(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp", [1, slow(2), slow(3), 4, slow(8)])
def test_every_chunk_and_cp_size(world, rng, kind, cp):
    """All cases in one compiled function = the float64 oracle, slack rows 0, whatever path the gate takes."""
    for seq, extend, _ in CASES.values():
        q, topk, where = world.queries(rng, seq, extend)
        plan = plan_of(world.chunk(seq, extend, cp), config=CONFIG, cp_size=cp)
        out = np.asarray(entry(kind, cp)(q, plan, *world.arguments(kind, topk)))
        assert_close("out", out, world.oracle(kind, q, topk, where), abs_tol=1e-5, rel_tol=0)
        assert (out[len(where) :] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp", [slow(2), 8])
def test_arms_agree(world, rng, kind, cp):
    """sparse + CP = dense + CP = cp 1, within float32 rounding; sparse + CP is right for padded chunks too."""
    for seq, extend, _ in (CASES["full"], CASES["padded"], CASES["multi"]):
        q, topk, _ = world.queries(rng, seq, extend)
        arms = [("sparse", cp), ("dense", cp), ("sparse", 1)]
        outs = []
        for path, size in arms:
            plan = plan_of(world.chunk(seq, extend, size), config=CONFIG, cp_size=size)
            outs.append(entry(kind, size, path)(q, plan, *world.arguments(kind, topk)))
        np.testing.assert_allclose(outs[0], outs[1], atol=1e-5)
        np.testing.assert_allclose(outs[0], outs[2], atol=1e-5)


def test_a_plan_from_outside_the_jit(world, rng):
    """A plan that the jitted function, or a gradient or loop in it, closes over: as one that is an argument."""
    q, topk, _ = world.queries(rng, *FULL)
    plan = make_plan(world.chunk(*FULL, 4), CONFIG, cp_size=4)
    want = entry("c4", 4)(q, plan, *world.arguments("c4", topk))
    swa_pool, pool, topk, sink = world.arguments("c4", topk)
    how = dict(kind="c4", config=CONFIG, mesh=cpu_mesh())
    args = swa_pool, pool, split_round_robin(topk, 4), sink

    def run(q, path="auto"):
        return dsa_prefill_attention(split_round_robin(q, 4), plan, *args, path=path, **how)

    for path in ("auto", "sparse"):
        out = jax.jit(functools.partial(run, path=path))(q)
        np.testing.assert_allclose(merge_round_robin(out, 4, 48), want, atol=1e-6)
    looped = jax.lax.fori_loop(0, 2, lambda i, x: run(q), jnp.zeros_like(q))
    np.testing.assert_allclose(merge_round_robin(looped, 4, 48), want, atol=1e-6)
    assert np.isfinite(jax.jit(jax.grad(lambda q: run(q).sum()))(q)).all()


def test_a_selection_stands_first(world, rng):
    """Of a row the first min((pos + 1) // 4, topk) columns count, in any order; the others may hold anything."""
    seq, extend = [40], [40]
    q, topk, where = world.queries(rng, seq, extend)
    plan = plan_of(world.chunk(seq, extend, 4), config=CONFIG, cp_size=4)
    swa_pool, pool, topk, sink = world.arguments("c4", topk)
    visible = np.array([(pos + 1) // 4 for _, pos in where])[:, None]
    columns = np.arange(CONFIG.topk)
    first = np.full((48, CONFIG.topk), -1, np.int32)
    first[: len(where)] = np.where(columns < visible, columns, -1)
    order = first.copy()
    order[: len(where)] = np.where(columns < visible, visible - 1 - columns, 7)
    outs = [entry("c4", 4)(q, plan, swa_pool, pool, jnp.asarray(x), sink) for x in (first, order)]
    np.testing.assert_allclose(*outs, atol=1e-6)
    np.testing.assert_allclose(outs[0], world.oracle("c4", q, jnp.asarray(first), where), atol=1e-5)


def test_bfloat16(world, rng):
    seq, extend, _ = CASES["full"]
    q, topk, where = world.queries(rng, seq, extend, jnp.bfloat16)
    plan = plan_of(world.chunk(seq, extend, 4), config=CONFIG, cp_size=4)
    out = entry("c4", 4, dtype=jnp.bfloat16)(q, plan, *world.arguments("c4", topk))
    assert out.dtype == jnp.bfloat16
    assert_close("out", out, world.oracle("c4", q, topk, where), abs_tol=8e-4, rel_tol=3.01 / 128)


def test_gate_by_observation(world, rng, monkeypatch, fresh_caches):
    """Padded, multi-request, full and shorter chunks of one capacity: dense, dense, sparse, sparse, one trace."""
    for name in ("sparse_prefill", "dense_prefill"):
        mark = 1.0 if name == "sparse_prefill" else 2.0
        monkeypatch.setattr(
            attention, name, lambda q, *args, mark=mark, **kw: jnp.full((*q.shape[:2], 512), mark, q.dtype)
        )
    mesh = cpu_mesh((4,))

    @jax.jit
    @traced_once
    def run(q, plan, *args):
        return dsa_prefill_attention(q, plan, *args, kind="c0", config=CONFIG, mesh=mesh)

    for name in ("padded", "multi", "full", "short", "fresh", "zero-length request", "nothing"):
        seq, extend, sparse = CASES[name]
        q, topk, _ = world.queries(rng, seq, extend)
        out = run(q, plan_of(world.chunk(seq, extend, 4), config=CONFIG, cp_size=4), *world.arguments("c0", topk))
        assert (out == (1.0 if sparse else 2.0)).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_slack_and_future_rows_influence_nothing(world, rng, kind):
    """Bit-equal results when slack rows of q and topk, and every later position's KV, are NaN or rubbish."""
    seq, extend = [150], [24]
    q, topk, where = world.queries(rng, seq, extend)
    plan = plan_of(world.chunk(seq, extend, 4), config=CONFIG, cp_size=4)
    for path in ("sparse", "dense"):
        want = entry(kind, 4, path)(q, plan, *world.arguments(kind, topk))
        bad = jnp.arange(48) >= len(where)
        q_bad = jnp.where(bad[:, None, None], jnp.nan, q)
        topk_bad = jnp.where(bad[:, None], 2**31 - 1, topk)
        np.testing.assert_array_equal(entry(kind, 4, path)(q_bad, plan, *world.arguments(kind, topk_bad)), want)
        # Causality: the KV of the chunk's last token is poison for its own row only.
        swa = world.pools["c0"]
        last = world.full_to_swa[world.req_to_token[world.pool_rows[0], seq[0] - 1]]
        pages = np.asarray(swa.pages).copy()
        page, t = divmod(int(last), swa.page_size)
        pages[page, t * 576 : t * 576 + 576] = 0xFF
        poisoned = dataclasses.replace(swa, pages=jnp.asarray(pages))
        out = entry(kind, 4, path)(q, plan, poisoned, *world.arguments(kind, topk)[1:])
        np.testing.assert_array_equal(out[: len(where) - 1], want[: len(where) - 1])
        assert np.isnan(out[len(where) - 1]).any()


def test_pool_slot_0_is_poison(rng):
    """Hard case 2: 130 tokens, cp 4, ranks 2 and 3 end in a padding row; nothing of slot 0 reaches an output."""
    world = World.build(rng, num_reqs=1, max_len=400, token_capacity=132)
    assert (world.pools["c0"].pages[0] == 0xFF).all() and (world.pools["c128"].pages[0] == 0xFF).all()
    q, topk, where = world.queries(rng, [130], [130])
    for cp in (1, 4):
        plan = plan_of(world.chunk([130], [130], cp), config=CONFIG, cp_size=cp)
        assert bool(plan.use_sparse) == (cp == 1)
        for kind, path in (("c0", "auto"), ("c128", "sparse"), ("c128", "dense")):
            out = entry(kind, cp, path, capacity=132)(q, plan, *world.arguments(kind, topk))
            assert np.isfinite(out).all() and (out[len(where) :] == 0).all()


def test_the_naive_geometry_is_wrong(world, rng, monkeypatch, fresh_caches):
    """Positive control: positions as prefix + k, as in the original sparse path, are far from right."""
    seq, extend, _ = CASES["full"]
    q, topk, where = world.queries(rng, seq, extend)
    plan = plan_of(world.chunk(seq, extend, 4), config=CONFIG, cp_size=4)
    right = world.oracle("c0", q, topk, where)
    monkeypatch.setattr(attention, "rank_rows", lambda x, cp, rank: x[: x.shape[0] // cp])
    args = split_round_robin(q, 4), plan, *world.arguments("c0", topk)
    out = dsa_prefill_attention(*args, kind="c0", config=CONFIG, mesh=cpu_mesh((4,)))
    assert np.abs(merge_round_robin(out, 4, 48) - right).max() > 0.1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "shape, names, reverse",
    [((2, 4), ("dp", "cp"), False), ((4, 2), ("cp", "tp"), True), ((2, 2, 2), ("cp", "dp", "tp"), True)],
)
def test_meshes(world, rng, shape, names, reverse, axis_type):
    """Other mesh axes, heads over tp, reversed device order, Auto and Explicit axes."""
    mesh = cpu_mesh(shape, names, axis_types=(axis_type,) * len(shape), reverse=reverse)
    cp = mesh.shape["cp"]
    seq, extend, _ = CASES["full"]
    q, topk, where = world.queries(rng, seq, extend)
    plan = plan_of(world.chunk(seq, extend, cp), config=CONFIG, cp_size=cp)
    swa, c4, topk_, sink = world.arguments("c4", topk)
    args = split_round_robin(q, cp), plan, swa, c4, split_round_robin(topk_, cp), sink
    head_axis = "tp" if "tp" in names else None
    run = jax.jit(lambda *args: dsa_prefill_attention(*args, kind="c4", config=CONFIG, mesh=mesh, head_axis=head_axis))
    out = run(*args)
    assert out.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("cp", head_axis)), 3)
    out = merge_round_robin(out, cp, 48)
    assert_close("out", out, world.oracle("c4", q, topk, where), abs_tol=1e-5, rel_tol=0)
    hlo = run.lower(*args).compile().as_text()
    assert not [op for op in COLLECTIVES if f" {op}(" in hlo]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("path", ["auto", "sparse", "dense"])
def test_local_form_in_the_callers_shard_map(world, rng, check_vma, path):
    seq, extend, _ = CASES["full"]
    q, topk, where = world.queries(rng, seq, extend)
    plan = plan_of(world.chunk(seq, extend, 4), config=CONFIG, cp_size=4)
    local = functools.partial(dsa_prefill_attention_local, kind="c128", config=CONFIG, cp_axis="rank", path=path)
    specs = (P("rank"), P(), P(), P(), P(), P())
    f = jax.shard_map(local, mesh=cpu_mesh((4,), ("rank",)), in_specs=specs, out_specs=P("rank"), check_vma=check_vma)
    out = jax.jit(f)(split_round_robin(q, 4), plan, *world.arguments("c128", None))
    out = merge_round_robin(out, 4, 48)
    assert_close("out", out, world.oracle("c128", q, topk, where), abs_tol=1e-5, rel_tol=0)


def test_no_cp_axis(world, rng):
    """cp_axis None: no mesh at all."""
    seq, extend, _ = CASES["multi"]
    q, topk, where = world.queries(rng, seq, extend)
    plan = plan_of(world.chunk(seq, extend, 1), config=CONFIG, cp_size=1)
    out = dsa_prefill_attention_local(q, plan, *world.arguments("c4", topk), kind="c4", config=CONFIG, cp_axis=None)
    assert_close("out", out, world.oracle("c4", q, topk, where), abs_tol=1e-5, rel_tol=0)


@pytest.mark.parametrize("path", ["auto", "sparse", "dense"])
def test_gradient_through_the_entry(world, rng, path):
    """Gradients of q and the sink through shard_map, with and without the cond, equal those of cp 1 without a mesh."""
    seq, extend, _ = CASES["full"]
    q, topk, _ = world.queries(rng, seq, extend)
    swa, c4, topk, sink = world.arguments("c4", topk)

    def loss(q, sink, cp):
        plan = plan_of(world.chunk(seq, extend, cp), config=CONFIG, cp_size=cp)
        if cp == 1:
            args = (q, plan, swa, c4, topk, sink)
            out = dsa_prefill_attention_local(*args, kind="c4", config=CONFIG, cp_axis=None, path=path)
        else:
            args = (split_round_robin(q, cp), plan, swa, c4, split_round_robin(topk, cp), sink)
            out = dsa_prefill_attention(*args, kind="c4", config=CONFIG, mesh=cpu_mesh((cp,)), path=path)
        return (out**2).sum()

    got, want = (jax.grad(functools.partial(loss, cp=cp), (0, 1))(q, sink) for cp in (4, 1))
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_x64(world, rng):
    seq, extend, _ = CASES["full"]
    with jax.enable_x64(True):
        q, topk, where = world.queries(rng, seq, extend)
        plan = plan_of(world.chunk(seq, extend, 4), config=CONFIG, cp_size=4)
        swa, _, _, sink = world.arguments("c0", topk)
        out = dsa_prefill_attention(
            split_round_robin(q, 4), plan, swa, attn_sink=sink, kind="c0", config=CONFIG, mesh=cpu_mesh((4,))
        )
        assert plan.query_pos.dtype == jnp.int32 and out.dtype == jnp.float32
    want = world.oracle("c0", q, topk, where)
    assert_close("out", merge_round_robin(out, 4, 48), want, abs_tol=1e-5, rel_tol=0)


@pytest.mark.parametrize("path", ["sparse", "dense"])
def test_entries_that_a_query_must_not_see(world, rng, path):
    """Top-k entries past the query's position, of any size, are none: bit-equal to -1."""
    seq, extend, _ = CASES["full"]
    q, topk, where = world.queries(rng, seq, extend)
    plan = plan_of(world.chunk(seq, extend, 4), config=CONFIG, cp_size=4)
    visible = jnp.array([(pos + 1) // 4 for _, pos in where])
    holes = jnp.where(jnp.arange(CONFIG.topk) % 3 == 0, -1, topk)
    future = jnp.where(holes == -1, visible[:, None] + rng.integers(0, 2**30, topk.shape), holes).astype(jnp.int32)
    swa, c4, _, sink = world.arguments("c4", topk)
    a, b = (entry("c4", 4, path)(q, plan, swa, c4, x, sink) for x in (holes, future))
    np.testing.assert_array_equal(a, b)


def test_empty_shapes_under_shard_map(world, rng):
    """No page of a kind, no top-k, no entries: XLA's CPU compiler crashes on the gathers that these would make."""
    q, topk, where = world.queries(rng, [8], [8])
    swa, c128, _, sink = world.arguments("c128", topk)
    for tables in ({128: np.zeros((3, 0), int)}, {128: world.page_tables[128]}):
        chunk = world.chunk([8], [8], 4, page_tables=tables, entry_capacities={128: 0})
        plan = plan_of(chunk, config=CONFIG, cp_size=4)
        assert not plan.overflow
        for path in ("auto", "sparse", "dense"):
            run = functools.partial(dsa_prefill_attention, kind="c128", config=CONFIG, mesh=cpu_mesh((4,)), path=path)
            out = merge_round_robin(run(split_round_robin(q, 4), plan, swa, c128, None, sink), 4, 48)
            assert_close("out", out, world.oracle("c128", q, topk, where), abs_tol=1e-5, rel_tol=0)
    plan = plan_of(world.chunk([300], [8], 4), config=CONFIG, cp_size=4)
    q, topk, where = world.queries(rng, [300], [8])
    for path in ("auto", "sparse", "dense"):
        run = functools.partial(dsa_prefill_attention, kind="c4", config=CONFIG, mesh=cpu_mesh((4,)), path=path)
        none = jnp.zeros((48, 0), jnp.int32)
        out = merge_round_robin(run(split_round_robin(q, 4), plan, *world.arguments("c4", none)), 4, 48)
        assert_close("out", out, world.oracle("c0", q, topk, where), abs_tol=1e-5, rel_tol=0)


def test_one_hot_rows_at_cp_8(rng):
    """Hard case 1: prefix 1000, extend 64, cp 8, one-hot KV, q = 0: outputs count the selected keys, exactly, as at cp 1."""
    world = World.build(rng, num_reqs=1, max_len=1152, layout=KVLayout.F32, token_capacity=64)
    one_hot = {"c0": np.eye(512, dtype=np.float32)[np.arange(1152) % 512]}
    for kind, rows in world.entry_rows.items():
        one_hot[kind] = np.eye(512, dtype=np.float32)[(7 * np.arange(rows.shape[1]) + 3) % 512]
    slots = {"c0": world.full_to_swa[world.req_to_token[world.pool_rows[0]]]}
    for kind, ratio in (("c4", 4), ("c128", 128)):
        page_size, e = world.pools[kind].page_size, np.arange(len(one_hot[kind]))
        slots[kind] = world.page_tables[ratio][0, e // page_size] * page_size + e % page_size
    for kind, pool in world.pools.items():
        world.pools[kind] = write_kv(pool, jnp.asarray(slots[kind], jnp.int32), jnp.asarray(one_hot[kind]))
    _, topk, where = world.queries(rng, [1064], [64])
    q = jnp.zeros((64, 2, 512))
    for kind in KINDS:
        outs = []
        for cp, path in ((8, "sparse"), (8, "dense"), (1, "sparse")):
            plan = plan_of(world.chunk([1064], [64], cp), config=CONFIG, cp_size=cp)
            swa, pool, topk_, _ = world.arguments(kind, topk)
            run = functools.partial(dsa_prefill_attention, kind=kind, config=CONFIG, mesh=cpu_mesh((cp,)), path=path)
            topk_ = None if topk_ is None else split_round_robin(topk_, cp)
            outs.append(np.asarray(merge_round_robin(run(split_round_robin(q, cp), plan, swa, pool, topk_), cp, 64)))
        for g, (_, pos) in enumerate(where):
            keys = list(one_hot["c0"][pos - 127 : pos + 1])
            if kind == "c4":
                keys += [one_hot["c4"][e] for e in np.asarray(topk[g]) if e >= 0]
            if kind == "c128":
                keys += list(one_hot["c128"][: (pos + 1) // 128])
            np.testing.assert_allclose(outs[0][g], np.broadcast_to(np.sum(keys, 0) / len(keys), (2, 512)), rtol=1e-6)
        np.testing.assert_array_equal(outs[0], outs[2])
        np.testing.assert_allclose(outs[1], outs[2], rtol=1e-6)


@pytest.mark.parametrize("cp", [2, 4])
def test_one_row_per_rank(rng, cp):
    """extend == cp_size after a prefix of 4093: the chunk's tokens complete c4 and c128 windows."""
    world = World.build(rng, num_reqs=1, max_len=4160, token_capacity=cp)
    seq, extend = [4093 + cp], [cp]
    q, topk, where = world.queries(rng, seq, extend)
    plan = plan_of(world.chunk(seq, extend, cp), config=CONFIG, cp_size=cp)
    for kind in KINDS:
        run = functools.partial(dsa_prefill_attention, kind=kind, config=CONFIG, mesh=cpu_mesh((cp,)))
        swa, pool, topk_, sink = world.arguments(kind, topk)
        topk_ = None if topk_ is None else split_round_robin(topk_, cp)
        out = merge_round_robin(run(split_round_robin(q, cp), plan, swa, pool, topk_, sink), cp, cp)
        assert_close("out", out, world.oracle(kind, q, topk, where), abs_tol=1e-5, rel_tol=0)


@pytest.mark.aot
@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_path_compiles_for_h200s(kind, gpus):
    """The sharded entry with its kernels, V4-Flash sizes, for GPUs that need not be there: no collective in it."""
    config, capacity = DSAConfig.deepseek_v4_flash(), 1024
    mesh = h200_mesh((gpus,), ("cp",))
    chunk = PrefillChunk.build(
        seq_lens=[4096], extend_lens=[capacity], req_pool_indices=[0], req_to_token=np.arange(4096)[None],
        full_to_swa=np.arange(4096), page_tables={4: np.arange(16)[None], 128: np.arange(16)[None]},
        token_capacity=capacity, cp_size=gpus,
    )  # fmt: skip
    plan = jax.eval_shape(functools.partial(make_plan, config=config, cp_size=gpus), chunk)
    pools = [jax.eval_shape(lambda p=p: KVPool.zeros(16, layout=KVLayout.V4, page_size=p)) for p in (256, 64, 2)]
    args = [
        jax.ShapeDtypeStruct((capacity, 64, 512), jnp.bfloat16),
        plan,
        pools[0],
        {"c0": None, "c4": pools[1], "c128": pools[2]}[kind],
        jax.ShapeDtypeStruct((capacity, 512), jnp.int32) if kind == "c4" else None,
        jax.ShapeDtypeStruct((64,), jnp.float32),
    ]
    specs = [P("cp"), P(), P(), P(), P("cp"), P()]
    args = [
        jax.tree.map(lambda x, s=s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, s)), arg)
        for arg, s in zip(args, specs)
    ]

    def run(*args):
        return dsa_prefill_attention(
            *args, kind=kind, config=config, mesh=mesh, path="sparse", implementation="mosaic_gpu"
        )

    text = jax.jit(run).lower(*args).compile().as_text()
    assert text.count("mosaic_gpu") >= 3  # gather, combine, attention
    assert not [op for op in COLLECTIVES if f" {op}(" in text or f" {op}-start(" in text]


def test_presets_lower_at_full_size():
    """V4-Flash and V4-Pro sizes trace without a device of that size: shapes, dtypes and statics only."""
    config = DSAConfig.deepseek_v4_flash()
    chunk = PrefillChunk.build(
        seq_lens=[4096], extend_lens=[4096], req_pool_indices=[0], req_to_token=np.arange(8192)[None],
        full_to_swa=np.arange(8192), page_tables={4: np.arange(32)[None], 128: np.arange(32)[None]},
        token_capacity=4096, cp_size=4,
    )  # fmt: skip
    plan = jax.eval_shape(functools.partial(plan_of, config=config, cp_size=4), chunk)
    pools = jax.eval_shape(
        lambda: (
            KVPool.zeros(32, layout=KVLayout.V4, page_size=256),
            KVPool.zeros(32, layout=KVLayout.V4, page_size=64),
        )
    )
    q = jax.ShapeDtypeStruct((4096, 64, 512), jnp.bfloat16)
    topk = jax.ShapeDtypeStruct((4096, 512), jnp.int32)
    run = functools.partial(dsa_prefill_attention, kind="c4", config=config, mesh=cpu_mesh((4,)))
    assert jax.eval_shape(run, q, plan, *pools, topk).shape == (4096, 64, 512)

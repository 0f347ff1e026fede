"""gate="wide": sparse prefill of several requests and of padded chunks, ragged compressed region, overflow."""

import dataclasses
import functools

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from dsa_cp_jax import dsa_prefill_attention, make_plan, merge_round_robin, split_round_robin
from dsa_cp_jax.config import LAYER_KINDS
from pallas_kernels import combine_swa_indices
from tests.helpers.oracles import assert_close
from tests.helpers.world import CONFIG, World, cpu_mesh, plan_of
from tests.helpers.world import entry as world_entry

CAPACITY = 240
KINDS = ("c0", "c4", "c128")
entry = functools.partial(world_entry, capacity=CAPACITY)
wide_plan = functools.partial(plan_of, config=CONFIG, gate="wide")


@pytest.fixture(scope="module")
def world():
    return World.build(np.random.default_rng(2), num_reqs=8, max_len=2304, token_capacity=CAPACITY)


@st.composite
def batches(draw, capacity=CAPACITY):
    """1..8 requests, prefixes 0..2000, 0..700 new tokens each, together at most the capacity."""
    lengths, left = [], capacity
    for _ in range(draw(st.integers(1, 8))):
        extend = draw(st.integers(0, min(left, 700)))
        left -= extend
        lengths.append((draw(st.integers(0, 2000)), extend))
    return [p + e for p, e in lengths], [e for _, e in lengths]


CP_SIZES = [4, *(pytest.param(cp, marks=pytest.mark.slow) for cp in (1, 2, 3, 8))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp", CP_SIZES)
def test_equals_the_oracle_and_dense(world, kind, cp):
    """Any batch, one compiled function: sparse = dense = the float64 oracle, slack rows 0."""

    @given(batches())
    @settings(max_examples=6)
    def check(batch):
        seq, extend = batch
        rng = np.random.default_rng(sum(seq))
        q, topk, where = world.queries(rng, seq, extend)
        plan = wide_plan(world.chunk(seq, extend, cp), cp_size=cp)
        assert bool(plan.use_sparse) == (len(where) > 0)
        args = q, plan, *world.arguments(kind, topk)
        sparse, dense = entry(kind, cp)(*args), entry(kind, cp, "dense")(*args)
        assert_close("sparse", sparse, world.oracle(kind, q, topk, where), abs_tol=1e-5, rel_tol=0)
        np.testing.assert_allclose(sparse, dense, atol=1e-5)
        assert (sparse[len(where) :] == 0).all()

    check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_long_batches(kind):
    """Up to 700 new tokens a request, 2,400 in all: sparse = dense, slack rows 0."""
    capacity = 2400
    world = World.build(np.random.default_rng(3), num_reqs=8, max_len=2752, token_capacity=capacity)

    @given(batches(capacity))
    @settings(max_examples=3)
    def check(batch):
        q, topk, where = world.queries(np.random.default_rng(sum(batch[0])), *batch)
        plan = wide_plan(world.chunk(*batch, 4), cp_size=4)
        assert bool(plan.use_sparse) == (len(where) > 0)
        args = q, plan, *world.arguments(kind, topk)
        sparse, dense = (world_entry(kind, 4, path, capacity=capacity)(*args) for path in ("auto", "dense"))
        np.testing.assert_allclose(sparse, dense, atol=1e-5)
        assert (sparse[len(where) :] == 0).all() and np.isfinite(sparse).all()

    check()


@given(batches(), st.sampled_from([2, 3, 4, 8]))
@settings(max_examples=15)
def test_selected_positions_do_not_depend_on_cp_or_neighbours(world, batch, cp):
    """Bitwise: which (request, position) and (request, entry) a row selects, for cp and for 1, alone and in the batch."""
    seq, extend = batch
    rng = np.random.default_rng(0)
    _, topk, where = world.queries(rng, seq, extend)

    def selections(seq, extend, topk, cp):
        plan = wide_plan(world.chunk(seq, extend, cp), cp_size=cp)
        region = plan.compressed["c4"]
        rows = [split_round_robin(x, cp) for x in (topk, plan.query_pos, plan.query_req)]
        row, _ = combine_swa_indices(
            *rows, region.base, plan.swa.base + region.slots.shape[0], plan.swa_first_pos, compress_ratio=4
        )
        row = np.asarray(merge_round_robin(row, cp, CAPACITY))
        slots = np.concatenate([region.slots, -2 - plan.swa.slots])  # which slot, and of which pool
        return np.where(row >= 0, slots[row], -1)[: sum(extend)]

    whole = selections(seq, extend, topk, cp)
    np.testing.assert_array_equal(whole, selections(seq, extend, topk, 1))
    for i in range(len(seq)):
        mine = [g for g, (req, _) in enumerate(where) if req == i]
        if not mine:
            continue
        # Request i alone: the others are there, empty and without a prefix.
        alone = [s if j == i else 0 for j, s in enumerate(seq)], [e if j == i else 0 for j, e in enumerate(extend)]
        padded = jnp.zeros_like(topk).at[: len(mine)].set(topk[jnp.array(mine)])
        np.testing.assert_array_equal(whole[mine], selections(*alone, padded, cp))


BATCH = [700, 3, 128, 1500, 64], [100, 3, 1, 60, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_poisoned_neighbour_changes_no_bit(world, rng, kind):
    """All KV of request 3 is NaN, in both pools: the rows of the others are bit-equal, its own are NaN."""
    q, topk, where = world.queries(rng, *BATCH)
    plan = wide_plan(world.chunk(*BATCH, 4), cp_size=4)
    swa, compressed, topk, sink = world.arguments(kind, topk)
    want = np.asarray(entry(kind, 4)(q, plan, swa, compressed, topk, sink))
    slots = world.full_to_swa[world.req_to_token[world.pool_rows[3]]]
    pages = np.asarray(swa.pages).copy()
    for slot in slots:
        page, t = divmod(int(slot), swa.page_size)
        pages[page, t * 576 : t * 576 + 576] = 0xFF
    swa = dataclasses.replace(swa, pages=jnp.asarray(pages))
    if compressed is not None:
        own_pages = world.page_tables[LAYER_KINDS[kind]][3, :-1]
        compressed = dataclasses.replace(compressed, pages=compressed.pages.at[own_pages].set(0xFF))
    got = np.asarray(entry(kind, 4)(q, plan, swa, compressed, topk, sink))
    own = np.array([req == 3 for req, _ in where] + [False] * (CAPACITY - len(where)))
    np.testing.assert_array_equal(got[~own], want[~own])
    assert np.isnan(got[own]).any(axis=(1, 2)).all()


def test_swapping_requests_permutes_rows(world, rng):
    """The same requests in another order: the same rows, bitwise, at other places."""
    q, topk, where = world.queries(rng, *BATCH)
    plan = wide_plan(world.chunk(*BATCH, 4), cp_size=4)
    swa, c4, _, sink = world.arguments("c4", topk)
    want = np.asarray(entry("c4", 4)(q, plan, swa, c4, topk, sink))
    order = [3, 1, 0, 4, 2]
    swapped = world.chunk(
        *([x[i] for i in order] for x in BATCH),
        4,
        req_pool_indices=[*world.pool_rows[order], *world.pool_rows[5:]],
        page_tables={r: t[[*order, 5, 6, 7]] for r, t in world.page_tables.items()},
    )
    rows = np.array([g for i in order for g, (req, _) in enumerate(where) if req == i])
    moved = jnp.zeros_like(q).at[: len(rows)].set(q[rows])
    moved_topk = jnp.zeros_like(topk).at[: len(rows)].set(topk[rows])
    got = entry("c4", 4)(moved, wide_plan(swapped, cp_size=4), swa, c4, moved_topk, sink)
    np.testing.assert_array_equal(got[: len(rows)], want[rows])


@given(cuts=st.sets(st.integers(1, 199), max_size=5))
@settings(max_examples=5)
def test_cutting_a_prompt_changes_nothing(world, cuts):
    """One chunk, or cut at any places: the same attention, row for row."""
    start, n = 900, 200
    q, topk, where = world.queries(np.random.default_rng(0), [start + n], [n])
    whole = world.oracle("c4", q, topk, where)
    swa, c4, _, sink = world.arguments("c4", topk)
    done = 0
    for size in np.diff([0, *sorted(cuts), n]).tolist():
        plan = wide_plan(world.chunk([start + done + size], [size], 4), cp_size=4)
        part = [jnp.zeros_like(x).at[:size].set(x[done : done + size]) for x in (q, topk)]
        out = entry("c4", 4)(part[0], plan, swa, c4, part[1], sink)
        assert_close("out", out[:size], whole[done : done + size], abs_tol=1e-5, rel_tol=0)
        done += size
    assert done == n


def test_entry_capacity(world, rng):
    """Room for the batch's own entries is enough; less is an error on the host, and dense with overflow if traced."""
    entries = sum(s // 4 for s in BATCH[0])
    tight = world.chunk(*BATCH, 4, entry_capacities={4: entries})
    plan = wide_plan(tight, cp_size=4)
    assert plan.use_sparse and not plan.overflow and plan.compressed["c4"].slots.shape == (entries,)
    q, topk, where = world.queries(rng, *BATCH)
    swa, c4, _, sink = world.arguments("c4", topk)
    out = dsa_prefill_attention(
        split_round_robin(q, 4),
        plan,
        swa,
        c4,
        split_round_robin(topk, 4),
        sink,
        kind="c4",
        config=CONFIG,
        mesh=cpu_mesh(),
    )
    out = merge_round_robin(out, 4, CAPACITY)
    assert_close("out", out, world.oracle("c4", q, topk, where), abs_tol=1e-5, rel_tol=0)

    message = rf"`entry_capacities\[4\]` must be >= the batch's {entries} entries, got {entries - 1}"
    with pytest.raises(ValueError, match=message):
        world.chunk(*BATCH, 4, entry_capacities={4: entries - 1})
    with pytest.raises(ValueError, match=r"`entry_capacities` must have keys of page_tables \[4, 128\], got 8"):
        world.chunk(*BATCH, 4, entry_capacities={8: 100})
    longer = dataclasses.replace(tight, seq_lens=tight.seq_lens.at[0].add(4))
    overflowing = wide_plan(longer, cp_size=4)
    assert overflowing.overflow and not overflowing.use_sparse


def test_unknown_gate(world):
    with pytest.raises(ValueError, match="`gate` must be 'seed' or 'wide', got 'all'"):
        make_plan(world.chunk([9], [9], 4), CONFIG, cp_size=4, gate="all")

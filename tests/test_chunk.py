"""PrefillChunk and ChunkPlan: host checks, slots, bases, positions, capacities; KVPool."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from dsa_cp_jax import DSAConfig, KVPool, make_plan, validate_chunk, write_kv
from pallas_kernels import KVLayout, combine_swa_indices
from tests.helpers.oracles import GOLDEN, golden
from tests.helpers.world import CONFIG, World, plan_of, traced_once


@pytest.fixture(scope="module")
def world():
    return World.build(np.random.default_rng(0))


LENGTHS = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 16)), min_size=1, max_size=3)


@given(lengths=LENGTHS, cp=st.sampled_from([1, 2, 3, 4, 8]))
@settings(max_examples=60)
def test_plan_matches_a_loop(world, lengths, cp):
    extend = [e for _, e in lengths]
    seq = [p + e for p, e in lengths]
    plan = plan_of(world.chunk(seq, extend, cp), config=CONFIG, cp_size=cp)
    n = sum(extend)
    assert plan.num_tokens == n and not plan.overflow
    assert bool(plan.use_sparse) == (n > 0 and (cp == 1 or (len(seq) == 1 and n % cp == 0)))
    where = [(i, s - e + j) for i, (s, e) in enumerate(zip(seq, extend)) for j in range(e)]
    np.testing.assert_array_equal(plan.query_req, [i for i, _ in where] + [-1] * (48 - n))
    np.testing.assert_array_equal(plan.query_pos, [p for _, p in where] + [0] * (48 - n))

    first = [max(0, p - 127) for p, _ in lengths]
    np.testing.assert_array_equal(plan.swa_first_pos[: len(seq)], first)
    slots, base = [], []
    for i, (a, b) in enumerate(zip(first, seq)):
        base.append(len(slots))
        slots += list(world.full_to_swa[world.req_to_token[world.pool_rows[i], a:b]])
    assert plan.swa.count == len(slots)
    np.testing.assert_array_equal(plan.swa.base[: len(seq)], base)
    np.testing.assert_array_equal(plan.swa.slots[: len(slots)], slots)
    assert (plan.swa.slots[len(slots) :] == -1).all()

    for kind, ratio in (("c4", 4), ("c128", 128)):
        page_size, table = CONFIG.compressed_page_size(kind), world.page_tables[ratio]
        slots = [
            table[i, e // page_size] * page_size + e % page_size for i, s in enumerate(seq) for e in range(s // ratio)
        ]
        region = plan.compressed[kind]
        assert region.count == len(slots)
        np.testing.assert_array_equal(region.slots[: len(slots)], slots)
        assert (region.slots[len(slots) :] == -1).all()


def test_one_trace_for_all_lengths(world):
    counted = jax.jit(traced_once(make_plan), static_argnames=("config", "cp_size"))
    for seq, extend in (([48], [48]), ([300, 20], [9, 4]), ([600], [2])):
        counted(world.chunk(seq, extend, 4), config=CONFIG, cp_size=4)


@pytest.mark.parametrize("path", sorted(p.name for p in (GOLDEN / "index").glob("*.npz")))
def test_sglang_geometry(path):
    """SGLang's gathered window slots and combined rows out of our plan, for the rank that the file is of."""
    from dsa_cp_jax import PrefillChunk
    from dsa_cp_jax.round_robin import rank_rows

    z = golden(f"index/{path}")
    cp, rank, ratio = int(z["cp_size"]), int(z["cp_rank"]), int(z["compress_ratio"])
    seq, extend = z["seq_lens"], z["extend_lens"]
    capacity = -(-int(extend.sum()) // cp) * cp
    entries = max(int(seq.max()) // max(ratio, 1), 1)
    chunk = PrefillChunk.build(
        seq_lens=seq, extend_lens=extend, req_pool_indices=z["req_pool_indices"], req_to_token=z["req_to_token"],
        full_to_swa=z["full_to_swa"], token_capacity=capacity, cp_size=cp,
        page_tables={4: np.zeros((len(seq), entries), int)},
    )  # fmt: skip
    plan = make_plan(chunk, DSAConfig(h_q=1, topk=512), cp_size=cp)
    live = int(plan.swa.count)
    np.testing.assert_array_equal(plan.swa.slots[:live], z["swa_token_ids"][:live])
    assert live == z["gather_lens"].sum()
    np.testing.assert_array_equal(plan.swa.base, z["swa_offsets"][:-1])
    np.testing.assert_array_equal(plan.swa_first_pos, z["swa_first_pos"])
    pos, req = rank_rows(plan.query_pos, cp, rank), rank_rows(plan.query_req, cp, rank)
    live_rows = np.flatnonzero(np.asarray(req) >= 0)
    np.testing.assert_array_equal(pos[live_rows], z["query_pos"][: len(live_rows)])
    c_max = max(int(seq.max()) // ratio, 1) if int(z["topk"]) else 0
    rows = combine_swa_indices(
        jnp.asarray(z["topk_indices"][:, : int(z["topk"])]),
        jnp.asarray(z["query_pos"], jnp.int32),
        jnp.asarray(z["query_req"], jnp.int32),
        jnp.arange(len(seq), dtype=jnp.int32) * c_max,
        plan.swa.base + len(seq) * c_max,
        plan.swa_first_pos,
        compress_ratio=ratio,
    )
    np.testing.assert_array_equal(rows.indices, z["combined_indices"])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(extend_lens=[9, 9]), r"`extend_lens` must have shape \[R=3\], got \(2,\)"),
        (dict(seq_lens=[[1, 2, 3]]), r"`seq_lens` must have shape \[R\]"),
        (dict(seq_lens=[10.0, 2.0, 1.0]), r"`seq_lens` must have dtype int32 or int64, got float64"),
        (dict(extend_lens=[-1, 0, 0]), r"`extend_lens\[0\]` must be in 0..seq_lens\[0\]=40, got -1"),
        (dict(extend_lens=[41, 0, 0]), r"`extend_lens\[0\]` must be in 0..seq_lens\[0\]=40, got 41"),
        (dict(seq_lens=[-1, 9, 9], extend_lens=[0, 9, 0]), r"`seq_lens\[0\]` must be >= 0, got -1"),
        (dict(seq_lens=[[1], [2, 3]]), r"`seq_lens` must be an array of integers, got \[\[1\], \[2, 3\]\]"),
        (dict(seq_lens=[641, 9, 9]), r"`seq_lens\[0\]` must be <= max_len=640 \(req_to_token\), got 641"),
        (dict(req_pool_indices=[4, 0, 0]), r"`req_pool_indices\[0\]` must be in 0..3, got 4"),
        (dict(extend_lens=[40, 9, 0]), r"`extend_lens` must sum to at most token_capacity=48, got 49"),
        (dict(token_capacity=130), r"`token_capacity` must be a multiple of cp_size=4, got 130"),
        (dict(token_capacity=2**31), r"`token_capacity` must be at most 1073741824, got 2147483648"),
        (dict(entry_capacities=[8]), "`entry_capacities` must map compress ratios to entries, got list"),
        (dict(cp_size=0), r"`cp_size` must be an int >= 1, got 0"),
        (dict(token_capacity=48.0), r"`token_capacity` must be an int >= 1, got 48.0"),
        (dict(page_tables=None), r"`page_tables` must map compress ratios to tables, got NoneType"),
        (dict(num_reqs=4), r"`num_reqs` must be in 0..R=3, got 4"),
        (dict(page_tables={8: np.zeros((3, 4), int)}), r"compress ratios 4 or 128 as keys, got 8"),
        (dict(page_tables={4: np.zeros((2, 4), int)}), r"`page_tables\[4\]` must have shape \[R=3, pages\], got \(2, 4\)"),
        (dict(full_to_swa=np.full(9000, -1)), r"`full_to_swa` must give a slot to every new token; request 0 .*position 31"),
        (dict(full_to_swa=np.full(9000, 2**40)), r"`full_to_swa` must fit into int32"),
        (
            dict(full_to_swa=np.full(9000, 7)),
            r"`full_to_swa` must give every .*; position 31 of request 0 and position 32 of request 0 share slot 7\.",
        ),
        (
            dict(full_to_swa=np.arange(9000), req_to_token=np.tile(np.arange(640), (4, 1)), extend_lens=[1, 0, 9],
                 seq_lens=[8, 9, 9], req_pool_indices=[3, 0, 1]),
            r"position 7 of request 0 and position 7 of request 2 share slot 7",
        ),
        (dict(req_pool_indices=[1, 1, 0]), r"`req_pool_indices\[1\]` must not be that of request 0, got 1 for both"),
    ],
)  # fmt: skip
def test_bad_chunks(world, change, message):
    kwargs = dict(seq_lens=[40, 9, 9], extend_lens=[9, 9, 0], num_reqs=3) | change
    seq, extend, cp = kwargs.pop("seq_lens"), kwargs.pop("extend_lens"), kwargs.pop("cp_size", 4)
    with pytest.raises(ValueError, match=message):
        world.chunk([], [], cp, seq_lens=seq, extend_lens=extend, **kwargs)


def test_plan_checks_cp_size(world):
    with pytest.raises(ValueError, match="`cp_size` must divide token_capacity=48, got 5"):
        make_plan(world.chunk([9], [9], 4), CONFIG, cp_size=5)
    with pytest.raises(ValueError, match="`config` must be a DSAConfig, got NoneType"):
        make_plan(world.chunk([9], [9], 4), None, cp_size=4)
    with pytest.raises(ValueError, match="`chunk` must be a PrefillChunk, got dict"):
        make_plan({}, CONFIG, cp_size=4)
    for none in ([], np.zeros(0, int)):
        with pytest.raises(ValueError, match="`seq_lens` must have at least one request slot"):
            world.chunk([], [], 4, seq_lens=none)


def test_validate_chunk_says_how_many_pages(world):
    chunk = world.chunk([600], [8], 4)
    pools = {kind: world.pools[kind] for kind in ("c4", "c128")}
    validate_chunk(chunk, CONFIG, world.pools["c0"], pools)
    small = KVPool.zeros(3, layout=KVLayout.V4, page_size=16)
    with pytest.raises(ValueError, match=r"`swa_pool` must hold the window of request 0: .*pages\), got 48 slots"):
        validate_chunk(chunk, CONFIG, small, pools)
    with pytest.raises(ValueError, match=r"`page_tables\[4\]\[0, 0\]` must name a page in 0..2 of the c4 pool"):
        validate_chunk(chunk, CONFIG, world.pools["c0"], {"c4": KVPool.zeros(3, layout=KVLayout.V4, page_size=8)})
    narrow = world.chunk([600], [8], 4, page_tables={4: world.page_tables[4][:, :3]})
    with pytest.raises(ValueError, match="`compressed_pools` must have kinds that the chunk has page tables for"):
        validate_chunk(narrow, CONFIG, world.pools["c0"], {"c128": world.pools["c128"]})
    with pytest.raises(
        ValueError, match=r"`page_tables\[4\]` must have 19 pages for the 600 tokens of request 0, got 3"
    ):
        validate_chunk(narrow, CONFIG, world.pools["c0"], {})
    evicted = world.full_to_swa.copy()
    evicted[world.req_to_token[world.pool_rows[0], 500]] = -1
    unmapped = world.req_to_token.copy()
    unmapped[world.pool_rows[0], 500] = -1
    for change in (dict(full_to_swa=evicted), dict(req_to_token=unmapped)):
        with pytest.raises(ValueError, match=r"`full_to_swa` must .* sees; request 0 has none at position 500"):
            validate_chunk(world.chunk([600], [8], 4, **change), CONFIG, world.pools["c0"], pools)
    for arguments, message in [
        ((make_plan(chunk, CONFIG, cp_size=4), CONFIG, small, pools), "`chunk` must be a PrefillChunk, got ChunkPlan"),
        ((chunk, None, small, pools), "`config` must be a DSAConfig, got NoneType"),
        ((chunk, CONFIG, small.pages, pools), "`swa_pool` must be a KVPool, got "),
        ((chunk, CONFIG, small, small), "`compressed_pools` must be a Mapping, got KVPool"),
        ((chunk, CONFIG, small, {"c4": small}), r"`compressed_pools\['c4'\]` must have page_size=8 .* got page_size=16"),
        ((chunk, CONFIG, pools["c4"], pools), "`swa_pool` must have page_size=16 .* got page_size=8"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            validate_chunk(*arguments)


def test_a_key_without_a_slot_overflows(world):
    """Traced, nothing can raise: plan.overflow is True and the gate says dense.

    A table that is too narrow, a page of it that is none, and a position of the window whose slot was given away.
    """
    table = world.page_tables[4]
    no_page = np.where(np.arange(table.shape[1]) == 2, -1, table)
    evicted = world.full_to_swa.copy()
    full = world.req_to_token[world.pool_rows[0]]
    first = 600 - 8 - 127  # the first position that a row of the chunk can see
    evicted[full[first]] = -1
    for change in (dict(page_tables={4: table[:, :3]}), dict(page_tables={4: no_page}), dict(full_to_swa=evicted)):
        plan = make_plan(world.chunk([600], [8], 4, **change), CONFIG, cp_size=4)
        assert plan.overflow and not plan.use_sparse
        if "page_tables" not in change or change["page_tables"][4] is no_page:
            beside = make_plan(world.chunk([600, 8], [0, 8], 4, **change), CONFIG, cp_size=4, gate="wide")
            assert beside.use_sparse and not beside.overflow  # nobody reads keys of a request without new tokens
    evicted = world.full_to_swa.copy()
    evicted[full[:first]] = -1  # behind every window: fine
    assert not make_plan(world.chunk([600], [8], 4, full_to_swa=evicted), CONFIG, cp_size=4).overflow


def test_pool_writes(rng):
    """Encoded and plain rows are the same write; -1 writes nothing; shapes are checked before anything is written."""
    pool = KVPool.zeros(3, layout=KVLayout.V4, page_size=4)
    assert pool.num_slots == 12
    rows = jnp.asarray(rng.standard_normal((3, 512)), jnp.bfloat16)
    slots = jnp.array([11, -1, 0], jnp.int32)
    from pallas_kernels import gather_dequant, quantize_rows

    a = write_kv(pool, slots, rows)
    b = write_kv(pool, slots, quantize_rows(rows, layout=KVLayout.V4))
    np.testing.assert_array_equal(a.pages, b.pages)
    back = gather_dequant(a.pages, jnp.arange(12), layout=KVLayout.V4, page_size=4).astype(jnp.float32)
    assert (back[1:11] == 0).all()
    np.testing.assert_allclose(back[jnp.array([11, 0])], rows[jnp.array([0, 2])].astype(jnp.float32), atol=0.13)
    for bad, message in [
        (rows[:, :511], r"`rows` must have shape \[n=3, d=512\], got \(3, 511\)"),
        (rows.astype(jnp.float16), r"`rows` must have dtype bfloat16 or float32, got float16"),
        (rows[:2], r"`rows` must have shape \[n=3, d=512\], got \(2, 512\)"),
        (jnp.zeros((3, 583), jnp.uint8), r"`rows` must have shape \[n=3, bytes_per_token=584\]"),
        ([[1.0]], r"`rows` must be an array, got list"),
    ]:
        with pytest.raises(ValueError, match=message):
            write_kv(pool, slots, bad)
    with pytest.raises(ValueError, match="`pool` must be a KVPool, got "):
        write_kv(pool.pages, slots, rows)
    for make in (KVPool, lambda _, **statics: KVPool.zeros(3, **statics)):
        with pytest.raises(ValueError, match="`layout` must be a KVLayout, got 'V4'"):
            make(pool.pages, layout="V4", page_size=4)
        with pytest.raises(ValueError, match=r"`page_size` must be an int >= 1, got 4.0"):
            make(pool.pages, layout=KVLayout.V4, page_size=4.0)
    with pytest.raises(ValueError, match="`num_pages` must be an int >= 1, got 0"):
        KVPool.zeros(0, layout=KVLayout.V4, page_size=4)


def test_config():
    flash, pro = DSAConfig.deepseek_v4_flash(), DSAConfig.deepseek_v4_pro()
    assert (flash.h_q, flash.topk, pro.h_q, pro.topk) == (64, 512, 128, 1024)
    assert flash.sm_scale == 512**-0.5 and hash(flash) != hash(pro)
    assert [flash.compressed_page_size(k) for k in ("c4", "c128")] == [64, 2]
    with pytest.raises(ValueError, match="`kind` must be 'c4' or 'c128', a c0 layer has no compressed pool"):
        flash.compressed_page_size("c0")
    for wrong in (0, True, np.array(4), 4.0):
        with pytest.raises(ValueError, match="`h_q` must be an int >= 1, got "):
            DSAConfig(h_q=wrong, topk=1)
    with pytest.raises(ValueError, match=r"`sm_scale` must be a finite number .* got nan"):
        DSAConfig(h_q=1, topk=1, sm_scale=float("nan"))
    with pytest.raises(ValueError, match=r"`d_rope` must be even .* got 63"):
        DSAConfig(h_q=1, topk=1, d_rope=63)
    with pytest.raises(ValueError, match="`d_v` and `d_rope` must be <= d_qk=512"):
        DSAConfig(h_q=1, topk=1, d_v=576)

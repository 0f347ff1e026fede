import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dsa_cp_jax import DSAConfig, make_plan, merge_round_robin, split_round_robin
from dsa_cp_jax.compressor import Compressor
from dsa_cp_jax.layers import apply_rope, rope_angles, rope_frequencies
from dsa_cp_jax.modules import DSAAttention, shard_over_cp
from pallas_kernels import KVLayout
from tests.helpers.blocks import MAX_LEN, NUM_REQS, SMALL, BlockRunner, load_golden
from tests.helpers.world import cpu_mesh


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["swa", "csa", "hca"])
def test_golden_transformers(name, cp_size):
    block, golden = load_golden(name)
    x, n = golden["hidden_states"], len(golden["hidden_states"])
    np.testing.assert_array_equal(golden["positions"], np.arange(n))
    runner = BlockRunner(block, cp_size=cp_size, token_capacity=n, num_reqs=1)
    for lens in ([n], [1, 130, 3, 125, 2, n - 261], [4, 132, 3, 125, 8, n - 272]):
        seen = runner.run([x], [[(0, length)] for length in lens])
        np.testing.assert_allclose(seen.output[0], golden["output"], rtol=0, atol=2e-5)
        angles = rope_angles(jnp.arange(0, n, 8), rope_frequencies(block.config, block.kind))
        core = apply_rope(jnp.asarray(seen.core[0][::8]), -angles)
        np.testing.assert_allclose(
            core.reshape(golden["core_out_every_8th"].shape), golden["core_out_every_8th"], rtol=0, atol=2e-5
        )
        if name == "csa":
            for ours, theirs in zip(seen.topk[0], golden["topk_indices"]):
                assert set(ours[ours >= 0]) == set(theirs[theirs >= 0])


@functools.cache
def small_block(kind: str) -> DSAAttention:
    return DSAAttention(SMALL, kind, rngs=nnx.Rngs(3))


@functools.cache
def small_runner(kind: str, cp_size: int, gate: str = "seed") -> BlockRunner:
    return BlockRunner(small_block(kind), cp_size=cp_size, token_capacity=300, gate=gate)


@functools.cache
def tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((MAX_LEN, SMALL.hidden_size)).astype(np.float32)


@functools.cache
def alone(kind: str, request: int) -> np.ndarray:
    """What the request gives on its own, without CP, in few chunks."""
    inputs = [np.zeros((0, SMALL.hidden_size), np.float32)] * NUM_REQS
    inputs[request] = tokens(request)
    return (
        small_runner(kind, 1)
        .run(inputs, [[(request, 300)], [(request, 300)], [(request, MAX_LEN - 600)]])
        .output[request]
    )


@st.composite
def schedules(draw):
    """Chunks of up to three requests in any order; a request of a chunk may bring no token."""
    chunk = st.lists(
        st.tuples(st.integers(0, NUM_REQS - 1), st.integers(0, 100)), min_size=1, unique_by=lambda pair: pair[0]
    )
    chunks = [[pair for pair in c if pair] for c in draw(st.lists(chunk, min_size=1, max_size=5))]
    return [c for c in chunks if sum(n for _, n in c)]


@pytest.mark.parametrize("kind", ["c0", "c4", "c128"])
@settings(max_examples=8, phases=(Phase.reuse, Phase.generate))  # shrinking would take minutes
@given(schedule=schedules(), how=st.sampled_from([(1, "seed"), (4, "seed"), (4, "wide")]))
def test_any_schedule_of_chunks_gives_what_each_request_gives_alone(kind, schedule, how):
    totals = [sum(n for chunk in schedule for i, n in chunk if i == request) for request in range(NUM_REQS)]
    seen = small_runner(kind, *how).run([tokens(i)[:n] for i, n in enumerate(totals)], schedule)
    for request, n in enumerate(totals):
        if n:
            np.testing.assert_allclose(seen.output[request], alone(kind, request)[:n], rtol=0, atol=2e-5)


def test_fp8_pools_agree_between_cp_sizes():
    """The records are quantised before the all-gather; what is read back is the same for every cp_size."""
    outputs = []
    for cp_size in (1, 4):
        runner = BlockRunner(small_block("c128"), cp_size=cp_size, token_capacity=200, num_reqs=1, layout=KVLayout.V4)
        outputs.append(runner.run([tokens(0)[:330]], [[(0, 200)], [(0, 130)]]).output[0])
    assert np.abs(outputs[0] - outputs[1]).max() < 1e-3  # a rounding may flip: one step of 6% in one value of one key
    assert np.median(np.abs(outputs[0] - outputs[1])) < 1e-5


def test_later_tokens_change_nothing():
    """NaN in the tokens from 200 on: the rows before are bit for bit the same, compressed entries included."""
    for kind in ("c4", "c128"):
        x = tokens(0)[:280].copy()
        clean = small_runner(kind, 4).run([x, x[:0], x[:0]], [[(0, 280)]]).output[0]
        x[200:] = np.nan
        spoilt = small_runner(kind, 4).run([x, x[:0], x[:0]], [[(0, 280)]]).output[0]
        np.testing.assert_array_equal(spoilt[:200], clean[:200])
        assert np.isnan(spoilt[200:]).all()


def test_rope_is_by_position_under_cp():
    """q of every row is rotated by its absolute position, in a second chunk on four ranks."""
    seen = small_runner("c4", 4).run([tokens(0)[:166], tokens(1)[:0], tokens(2)[:0]], [[(0, 37)], [(0, 129)]])
    block = small_block("c4")
    latent = block.q_a_norm(block.q_a_proj(jnp.asarray(tokens(0)[:166])))
    q = np.asarray(block.q_b_proj(latent), np.float64).reshape(166, SMALL.h_q, SMALL.d_qk)
    q /= np.sqrt((q**2).mean(-1, keepdims=True) + SMALL.norm_eps)
    turn = np.exp(1j * np.arange(166)[:, None] * rope_frequencies(SMALL, "c4").astype(np.float64))[:, None]
    pairs = (q[..., -64::2] + 1j * q[..., -63::2]) * turn
    q[..., -64::2], q[..., -63::2] = pairs.real, pairs.imag
    np.testing.assert_allclose(seen.q[0], q, rtol=0, atol=5e-5)


def test_rope_frequencies():
    """c0: plain. Compressed layers: fast pairs kept, slow ones 16 times slower, a ramp between; here for V4-Flash."""
    config = DSAConfig.deepseek_v4_flash()
    i = np.arange(32)
    np.testing.assert_allclose(rope_frequencies(config, "c0"), 1e4 ** (-i / 32), rtol=1e-6)
    plain, yarn = 1.6e5 ** (-i / 32), rope_frequencies(config, "c128")
    turns = plain * 65536 / (2 * np.pi)
    np.testing.assert_allclose(yarn[turns > 45], plain[turns > 45], rtol=1e-6)
    np.testing.assert_allclose(yarn[turns < 0.7], plain[turns < 0.7] / 16, rtol=1e-6)
    slowed = (1 - yarn / plain)[(turns < 25) & (turns > 1.3)] / (1 - 1 / 16)
    assert len(slowed) > 6 and slowed.min() > 0 and slowed.max() < 1
    np.testing.assert_allclose(np.diff(slowed), np.diff(slowed)[0], rtol=1e-4)
    np.testing.assert_array_equal(yarn, rope_frequencies(config, "c4"))


def test_rope_inverse(rng):
    x = jnp.asarray(rng.standard_normal((9, 3, 512)), jnp.float32)
    angles = rope_angles(jnp.asarray(rng.integers(0, 100_000, 9), jnp.int32), rope_frequencies(SMALL, "c4"))
    turned = apply_rope(x, angles)
    np.testing.assert_array_equal(turned[..., :448], x[..., :448])
    assert np.abs(turned[..., 448:] - x[..., 448:]).max() > 1
    np.testing.assert_allclose(apply_rope(turned, -angles), x, atol=1e-6)


def pooled_entries(compressor: Compressor, inputs: np.ndarray) -> np.ndarray:
    """The entries of a whole sequence, in float64 by the formula, one after another."""
    m, d, series = compressor.ratio, compressor.d, compressor.series
    bias = np.asarray(compressor.position_bias[...], np.float64).reshape(m, series, d)
    entries = []
    for e in range(len(inputs) // m):
        values, gates = [], []
        for pos in range((e + 1 - series) * m, (e + 1) * m):
            if pos >= 0:
                s = series - 1 if pos >= e * m else 0
                values.append(inputs[pos, 0, s])
                gates.append(inputs[pos, 1, s] + bias[pos % m, s])
        weights = np.exp(np.array(gates) - np.max(gates, axis=0))
        entry = (np.array(values) * weights).sum(0) / weights.sum(0)
        entry /= np.sqrt((entry**2).mean() + SMALL.norm_eps)
        turn = np.exp(1j * e * m * np.asarray(compressor.frequencies, np.float64))
        pairs = (entry[-64::2] + 1j * entry[-63::2]) * turn
        entry[-64::2], entry[-63::2] = pairs.real, pairs.imag
        entries.append(entry)
    return np.array(entries)


@pytest.mark.parametrize(
    "kind, borders", [("c4", [1, 2, 5, 7, 8, 14, 15, 19, 30]), ("c128", [1, 127, 130, 255, 256, 300])]
)
def test_compressor_state_over_chunk_borders(kind, borders, rng):
    """Borders before, inside and right behind a window: the tokens of a window that is not full wait in the ring."""
    compressor, n, capacity = Compressor(SMALL, kind, 64, param_dtype=jnp.float32, rngs=nnx.Rngs(0)), 390, 130
    inputs = rng.standard_normal((n, 2, compressor.series, 64)).astype(np.float32)
    runner = small_runner(kind, 1)
    state = jnp.full_like(compressor.init_state(NUM_REQS, jnp.float32), jnp.nan)
    borders = borders + list(range(borders[-1] + capacity, n, capacity)) + [n]

    @jax.jit
    def pool(inputs, state, chunk):
        return compressor(inputs, state, make_plan(chunk, SMALL, cp_size=1))

    entries, start = [], 0
    for end in borders:
        chunk = dataclasses.replace(runner.chunk([1], [start], [end - start]), token_capacity=capacity)
        rows = np.pad(inputs[start:end], ((0, capacity - (end - start)), *[(0, 0)] * 3), constant_values=np.nan)
        new, state = pool(jnp.asarray(rows), state, chunk)
        entries.append(new[: end // compressor.ratio - start // compressor.ratio])
        start = end
    np.testing.assert_allclose(np.concatenate(entries), pooled_entries(compressor, inputs), rtol=0, atol=5e-5)
    assert np.isnan(state[0]).all() and np.isnan(state[2]).all(), "another request's ring was written"


def test_indexer_ties_and_missing_entries():
    """Equal scores: the lowest entries win, in order. Fewer than topk visible: -1. Padding rows: all -1."""
    block, runner = small_block("c4"), small_runner("c4", 1)
    plan = make_plan(runner.chunk([2, 0], [50, 3], [7, 5]), SMALL, cp_size=1)
    rows = plan.token_capacity
    x, latent = jnp.ones((rows, SMALL.hidden_size)), jnp.ones((rows, SMALL.q_lora_rank))
    keys = jnp.ones((NUM_REQS * runner.pages[4] * SMALL.c4_page_size, SMALL.index_head_dim))
    angles = jnp.zeros((rows, 32))
    topk = np.asarray(block.indexer(x, latent, angles, plan.query_pos, plan.query_req, plan, keys))
    for row, pos in enumerate([*range(50, 57), *range(3, 8)]):
        n = min((pos + 1) // 4, SMALL.topk)
        np.testing.assert_array_equal(topk[row], [*range(n), *[-1] * (SMALL.topk - n)])
    assert (topk[12:] == -1).all()


def test_collectives_of_the_block():
    """One all-gather per kind of row, the KV as bytes; nothing else is communicated."""
    for kind, count in (("c0", 1), ("c128", 2), ("c4", 3)):
        runner = BlockRunner(small_block(kind), cp_size=4, token_capacity=16, num_reqs=1, layout=KVLayout.V4)
        args = (runner.block, jnp.zeros((16, SMALL.hidden_size)), runner.chunk([0], [0], [16]), runner.cache())
        text = runner.step.lower(*args).as_text()
        gathers = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
        assert len(gathers) == count
        assert sum("x584xui8>" in line for line in gathers) == 1
        for other in ("all_reduce", "all_to_all", "collective_permute", "reduce_scatter"):
            assert f"stablehlo.{other}" not in text


def test_mesh_with_other_and_explicit_axes():
    """Replicas along another mesh axis, all axes Explicit, devices in reverse order: the same rows."""
    mesh = cpu_mesh((2, 2), ("dp", "cp"), axis_types=(AxisType.Explicit,) * 2, reverse=True)
    runner = small_runner("c0", 1)
    chunk = dataclasses.replace(runner.chunk([0], [0], [60]), token_capacity=60)
    plan = jax.jit(make_plan, static_argnames=("config", "cp_size"))(chunk, config=SMALL, cp_size=2)
    x = jax.device_put(split_round_robin(jnp.asarray(tokens(0)[:60]), 2), NamedSharding(mesh, PartitionSpec("cp")))
    block, plan, cache = jax.device_put((small_block("c0"), plan, runner.cache()), NamedSharding(mesh, PartitionSpec()))
    run = jax.jit(shard_over_cp(functools.partial(DSAAttention.__call__, cp_axis="cp"), mesh))
    out, _ = run(block, x, plan, cache)
    assert out.sharding.spec == PartitionSpec("cp", None)
    out = merge_round_robin(jnp.asarray(np.asarray(out)), 2, 60)
    np.testing.assert_allclose(out, alone("c0", 0)[:60], rtol=0, atol=2e-5)


def test_bfloat16_block():
    block = DSAAttention(SMALL, "c4", param_dtype=jnp.bfloat16, rngs=nnx.Rngs(3))
    assert block.sinks[...].dtype == jnp.float32
    runner = BlockRunner(block, cp_size=1, token_capacity=80, num_reqs=1, layout=KVLayout.V4)
    chunk, x = runner.chunk([0], [0], [80]), jnp.asarray(tokens(0)[:80], jnp.bfloat16)
    seen, _ = runner.step(block, x, chunk, runner.cache())
    assert seen["output"].dtype == seen["q"].dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(seen["output"], np.float32)).all()


def test_presets_and_errors():
    flash, pro = DSAConfig.deepseek_v4_flash(), DSAConfig.deepseek_v4_pro()
    facts = ("hidden_size", "h_q", "q_lora_rank", "o_groups", "o_lora_rank", "index_heads", "index_head_dim", "topk")
    assert [getattr(flash, f) for f in facts] == [4096, 64, 1024, 8, 1024, 64, 128, 512]
    assert [getattr(pro, f) for f in facts] == [7168, 128, 1536, 16, 1024, 64, 128, 1024]
    assert (flash.rope_theta, flash.compress_rope_theta, flash.yarn_factor, flash.yarn_original_len) == (
        1e4,
        1.6e5,
        16,
        65536,
    )
    assert hash(flash) == hash(DSAConfig.deepseek_v4_flash()) != hash(pro)
    with pytest.raises(ValueError, match="`o_groups` must divide h_q=3, got 2"):
        DSAAttention(dataclasses.replace(SMALL, h_q=3), "c0", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`d_v` must be d_qk=512"):
        DSAAttention(dataclasses.replace(SMALL, d_v=448), "c0", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`index_head_dim` must be >= d_rope=64, got 32"):
        DSAAttention(dataclasses.replace(SMALL, index_head_dim=32), "c4", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`kind` must be one of"):
        DSAAttention(SMALL, "c8", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`config` must be a DSAConfig, got NoneType"):
        DSAAttention(None, "c0", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`rngs` must be a Rngs, got int"):
        DSAAttention(SMALL, "c0", rngs=0)


def test_bad_calls():
    """Mistakes are named before anything is computed."""
    block = small_block("c4")
    runner = BlockRunner(block, cp_size=1, token_capacity=8)
    plan = make_plan(runner.chunk([0], [0], [8]), SMALL, cp_size=1)
    x, cache = jnp.zeros((8, SMALL.hidden_size)), runner.cache()

    def call(x=x, plan=plan, cache=cache, cp_axis=None):
        jax.eval_shape(lambda: block(x, plan, cache, cp_axis=cp_axis))

    with pytest.raises(ValueError, match=rf"`x` must have shape \[rows=8, hidden_size={SMALL.hidden_size}\]"):
        call(x=x[:6])
    with pytest.raises(ValueError, match="`x` must have dtype bfloat16 or float32, got int32"):
        call(x=x.astype(jnp.int32))
    with pytest.raises(ValueError, match="`cp_axis` must be a manual axis"):
        call(cp_axis="cp")
    with pytest.raises(ValueError, match=r"`plan` must be made for cp_size=1 \(axis None\), got cp_size=2"):
        call(plan=make_plan(runner.chunk([0], [0], [8]), SMALL, cp_size=2))
    with pytest.raises(ValueError, match="`cache` must be a LayerCache, got NoneType"):
        call(cache=None)
    for kind, message in (
        ("c0", "its `compressed` is None"),
        ("c128", r"has shape \(3, 128, .*, not \[state rows, 8, "),
    ):
        other = DSAAttention(SMALL, kind, rngs=nnx.Rngs(0))
        other = other.init_cache(layout=KVLayout.F32, swa_pages=1, compressed_pages=1, state_rows=3)
        with pytest.raises(ValueError, match=f"`cache` must be of a c4 block.*{message}"):
            call(cache=other)
    with pytest.raises(ValueError, match="`state_rows` must be an int >= 1, got 0"):
        block.init_cache(layout=KVLayout.F32, swa_pages=1, compressed_pages=1, state_rows=0)
    with pytest.raises(ValueError, match=r"`layout` must have rows of d_qk=512 values, got KVLayout.V32"):
        block.init_cache(layout=KVLayout.V32, swa_pages=1, compressed_pages=1, state_rows=1)
    few = block.init_cache(layout=KVLayout.F32, swa_pages=1, compressed_pages=1, state_rows=1)
    with pytest.raises(ValueError, match=f"`cache` must have state_rows={NUM_REQS} or more .*got 1"):
        call(cache=few)
    no_table = dataclasses.replace(plan, compressed={})
    with pytest.raises(ValueError, match=r"`plan` must be made from page_tables\[4\] for a c4 block"):
        call(plan=no_table)

"""Context parallelism on the GPUs of one host, at every size from 2 to their number, with the Hopper kernels."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsa_cp_jax import (
    DSAConfig,
    KVPool,
    PrefillChunk,
    dsa_prefill_attention,
    make_plan,
    merge_round_robin,
    split_round_robin,
    validate,
    write_kv,
)
from dsa_cp_jax.engine import Arm, Engine
from pallas_kernels import KVLayout
from tests.helpers.oracles import assert_close
from tests.helpers.processes import run_processes
from tests.helpers.world import World, plan_of

pytestmark = pytest.mark.multi_gpu
CONFIG = DSAConfig(h_q=4, topk=64, swa_page_size=16, c4_page_size=8, c128_page_size=2)
KINDS = ("c0", "c4", "c128")
ROWS = 24  # rows of a rank


def cases(cp: int) -> dict:
    """seq_lens, extend_lens of chunks of up to ROWS * cp tokens, and whether CP takes the sparse path."""
    full = ROWS * cp
    return {
        "full": ([600], [full], True),
        "short": ([127 + 8 * cp], [8 * cp], True),
        "fresh": ([full], [full], True),
        "ragged tail": ([300], [full - 1], False),
        "two requests": ([140, 600], [cp, cp], False),
    }


@pytest.fixture(scope="module")
def world():
    return World.build(np.random.default_rng(1), config=CONFIG)


def kernels(devices) -> str | None:
    """What to run: the kernels, without a way out, on GPUs."""
    return None if devices[0].platform == "cpu" else "mosaic_gpu"


@functools.cache
def entry(mesh: Mesh, kind: str, path: str, head_axis: str | None = None):
    """The sharded entry, chunk order in and out."""
    cp, implementation = mesh.shape["cp"], kernels(list(mesh.devices.flat))

    @jax.jit
    def run(q, plan, swa_pool, compressed_pool, topk, sink):
        topk = None if topk is None else split_round_robin(topk, cp)
        args = (split_round_robin(q, cp), plan, swa_pool, compressed_pool, topk, sink)
        how = dict(path=path, head_axis=head_axis, implementation=implementation)
        out = dsa_prefill_attention(*args, kind=kind, config=CONFIG, mesh=mesh, **how)
        return merge_round_robin(out, cp, q.shape[0])

    return run


def truth(world: World, *args) -> tuple[np.ndarray, np.ndarray]:
    """The outputs, and the sums of p |v|."""
    return world.oracle(*args), world.oracle(*args, absolute=True)


def assert_right(got, truth):
    """Each number within what bfloat16 probabilities and output round, 2^-8 each of the sum of p |v|; all by FlashMLA's
    cosine difference, which sees small errors of one sign."""
    want, magnitude = truth
    wrong = ~(np.abs(np.asarray(got, np.float64) - want) <= 1.02 * 2.0**-7 * magnitude)  # 2%: float32 sums, exp2
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} outputs, the first at {np.argwhere(wrong)[0]}"
    assert_close("out", got, want, abs_tol=np.inf, rel_tol=0.0, cosine=5e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_arms_agree(world, rng, devices, cp, kind):
    """sparse + CP = dense + CP = cp 1 = the float64 oracle, in every kind of chunk; the gate takes the path it should."""
    world = dataclasses.replace(world, token_capacity=ROWS * cp)
    arms = [(cp, "auto"), (cp, "dense"), (1, "sparse")]
    for name, (seq, extend, sparse) in cases(cp).items():
        q, topk, where = world.queries(rng, seq, extend, jnp.bfloat16)
        want = truth(world, kind, q, topk, where)
        for size, path in arms:
            plan = plan_of(world.chunk(seq, extend, size), config=CONFIG, cp_size=size)
            assert bool(plan.use_sparse) == (sparse or size == 1), name
            out = entry(Mesh(np.array(devices[:size]), ("cp",)), kind, path)(q, plan, *world.arguments(kind, topk))
            assert len(out.sharding.device_set) == size
            assert_right(out, want)
            assert (np.asarray(out)[len(where) :] == 0).all(), "slack rows"


@pytest.mark.parametrize("kind", KINDS)
def test_chunk_after_chunk(devices, cp, kind, monkeypatch):
    """A layer reads chunks, full ones and a ragged one, then single tokens, through caches that it writes itself."""
    monkeypatch.setattr(validate, "KINDS", (kind,))
    dtype = jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16
    capacity, tokens = ROWS * cp, np.random.default_rng(cp).integers(0, 256, 600).astype(np.int32)
    with jax.default_matmul_precision("highest"):
        engine = Engine(
            validate.build_model(), devices=devices[:cp], token_capacity=capacity, pages=3, attention_dtype=dtype
        )
        arms = [
            Arm("cp 1", 1),
            Arm("sparse", cp),
            Arm("dense", cp, allow_sparse=False),
            Arm("naive", cp, contiguous=True),
        ]
        sessions, start = [engine.start(arm) for arm in arms], 0
        for n in (capacity, capacity, capacity - cp, capacity - 1, 1, 1):
            alone, sparse, dense, naive = [session.feed(tokens[start : start + n]) for session in sessions]
            start += n
            assert alone.ran_sparse and not dense.ran_sparse and sparse.ran_sparse == (n % cp == 0)
            bound = validate.BOUNDS[jnp.dtype(dtype).name]
            for other in (sparse, dense):
                np.testing.assert_allclose(other.logits, alone.logits, rtol=0, atol=bound)
            if n == capacity:
                assert np.abs(naive.logits - alone.logits).max() > 3 * bound, "the comparison sees nothing"


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("names", [("dp", "cp"), ("cp", "tp")])
def test_meshes(world, rng, devices, names, axis_type):
    """Replicas beside the ranks; heads over a second axis; devices in reverse order."""
    shape = (max(len(devices) // 2, 1), 2)
    mesh = Mesh(np.array(devices[::-1][: 2 * shape[0]]).reshape(shape), names, axis_types=(axis_type,) * 2)
    cp, head_axis = mesh.shape["cp"], "tp" if "tp" in names else None
    world = dataclasses.replace(world, token_capacity=ROWS * cp)
    for seq, extend, _ in (cases(cp)["full"], cases(cp)["ragged tail"]):
        q, topk, where = world.queries(rng, seq, extend, jnp.bfloat16)
        plan = plan_of(world.chunk(seq, extend, cp), config=CONFIG, cp_size=cp)
        out = entry(mesh, "c4", "auto", head_axis)(q, plan, *world.arguments("c4", topk))
        assert_right(out, truth(world, "c4", q, topk, where))


def test_one_process_per_gpu(devices, port, tmp_path):
    """The main job, with c4 layers alone, and a process for each device."""
    virtual = devices[0].platform == "cpu"
    n = 2 if virtual else len(devices)
    arguments = [f"--cp={n}", "--quick", f"--json={tmp_path / 'report.json'}"]
    if virtual:
        (tmp_path / "text.txt").write_text("sparse attention " * 2 * n)
        arguments[1] = f"--prompt-file={tmp_path / 'text.txt'}"

    def env(i):
        if virtual:
            return dict(JAX_PLATFORMS="cpu", XLA_FLAGS="")
        flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "host_platform" not in flag]
        return dict(CUDA_VISIBLE_DEVICES=str(i), XLA_FLAGS=" ".join(flags))

    # With the job's own gain a single layer moves the logits too little for the positive control.
    setup = 'validate.KINDS, validate.ATTENTION_GAIN = ("c4",), 0.05'
    done = run_processes(port, n, arguments, setup=setup, env=env)
    assert [code for code, _, _ in done] == [0] * n, "".join(out + err for _, out, err in done)
    assert "passed:" in done[0][1] and not any("passed" in out for _, out, _ in done[1:])


@pytest.mark.parametrize("kind", ["c128", "c4"])  # the peak of a process is that of all its tests
def test_a_million_tokens(devices, kind, rng, request):
    """cp 2 behind 1,048,576 cached tokens, q = 0, one-hot rows: every output counts the keys of its row.

    Memory: what XLA's analysis says, which `test_memory_behind_a_million_tokens` explains.
    """
    virtual = devices[0].platform == "cpu"
    prefix, capacity = (1 << 14, 128) if virtual else (1 << 20, 4096)
    config = DSAConfig.deepseek_v4_flash()
    if virtual:
        config = dataclasses.replace(config, h_q=2)
    ratio, page_size = (4, config.c4_page_size) if kind == "c4" else (128, config.c128_page_size)
    total, mesh = prefix + capacity, Mesh(np.array(devices[:2]), ("cp",))
    num_entries, layout = total // ratio, KVLayout.V4
    pages = -(-num_entries // page_size)
    table = rng.permutation(pages).astype(np.int32)
    hot_entry = (np.arange(num_entries) * 7 + np.arange(num_entries) // 512 + 3) % 512
    hot_token = np.arange(total) * 5 % 512

    def pool_of(num_pages, page_size, slots, hot):
        """One-hot rows in these slots, 0xFF in all other bytes: NaN as a value."""
        pool = KVPool.zeros(num_pages, layout=layout, page_size=page_size)
        pool = dataclasses.replace(pool, pages=jnp.full_like(pool.pages, 0xFF))
        rows = jax.nn.one_hot(jnp.asarray(hot), 512, dtype=jnp.bfloat16)
        return jax.jit(write_kv, donate_argnums=0)(pool, jnp.asarray(slots, jnp.int32), rows)

    e = np.arange(num_entries)
    compressed = pool_of(pages, page_size, table[e // page_size] * page_size + e % page_size, hot_entry)
    window = np.arange(prefix - 127, total)  # the only tokens whose KV may be read
    full_to_swa = np.full(total, -1, np.int32)
    full_to_swa[window] = rng.permutation(len(window))
    swa = pool_of(-(-len(window) // 256), 256, full_to_swa[window], hot_token[window])

    chunk = PrefillChunk.build(
        seq_lens=[total], extend_lens=[capacity], req_pool_indices=[0], req_to_token=np.arange(total)[None],
        full_to_swa=full_to_swa, page_tables={ratio: table[None]}, token_capacity=capacity, cp_size=2,
    )  # fmt: skip
    plan = jax.jit(make_plan, static_argnames=("config", "cp_size"))(chunk, config=config, cp_size=2)
    assert plan.use_sparse and not plan.overflow
    pos = prefix + np.arange(capacity)
    topk = None
    if kind == "c4":
        topk = rng.integers(0, (pos[:, None] + 1) // 4, (capacity, config.topk)).astype(np.int32)
        topk[:, 0] = (pos + 1) // 4 - 1  # the last one that may be seen

    def run(q, plan, swa, compressed, topk):
        return dsa_prefill_attention(
            q, plan, swa, compressed, topk, kind=kind, config=config, mesh=mesh, path="sparse",
            implementation=kernels(devices),
        )  # fmt: skip

    def place(tree, spec):
        return jax.device_put(tree, NamedSharding(mesh, spec))

    q = place(jnp.zeros((capacity, config.h_q, 512), jnp.bfloat16), P("cp"))
    ranked = None if topk is None else place(split_round_robin(jnp.asarray(topk), 2), P("cp"))
    args = q, place(plan, P()), place(swa, P()), place(compressed, P()), ranked
    program = jax.jit(run).lower(*args).compile()
    before = 0 if virtual else devices[1].memory_stats()["bytes_in_use"]
    out = jax.block_until_ready(program(*args))
    peak = 0 if virtual else devices[1].memory_stats()["peak_bytes_in_use"]
    out = np.asarray(out).reshape(2, capacity // 2, -1, 512).swapaxes(0, 1).reshape(capacity, -1, 512)
    out = out.astype(np.float32)

    seen = np.zeros((capacity, 512), np.int64)
    for row in range(capacity):
        if kind == "c4":
            seen[row] = np.bincount(hot_entry[topk[row]], minlength=512)
        else:
            seen[row] = np.bincount(hot_entry[: (pos[row] + 1) // 128], minlength=512)
        seen[row] += np.bincount(hot_token[pos[row] - 127 : pos[row] + 1], minlength=512)
    want = (seen / seen.sum(1, keepdims=True)).astype(np.float32)
    assert (seen.sum(1) == 128 + (config.topk if kind == "c4" else (pos + 1) // 128)).all()
    np.testing.assert_allclose(out, np.broadcast_to(want[:, None], out.shape), rtol=2.01 / 256, atol=0)

    if not virtual:
        memory = program.memory_analysis()
        planned = memory.temp_size_in_bytes + memory.output_size_in_bytes
        grown = peak - before
        print(f"{kind} behind {prefix} tokens: {grown / 1e6:.0f} MB on the second GPU, planned {planned / 1e6:.0f} MB")
        # The allocator splits a free block only where 128 MiB or more would be left.
        assert grown < planned + (128 << 20)

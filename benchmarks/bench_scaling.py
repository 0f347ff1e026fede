"""Times layers over several GPUs: python -m benchmarks.bench_scaling {layers,blocks} [--cp 1 2 4] [--out FILE]

The workload of bench_prefill.py, with the exchange of the chunk's KV (584 bytes a token) and its write to the pools:
`layers` is the attention alone; `blocks` is the whole attention block with its projections, which exchanges what the
compressors need as well (c0 and c128: in c4 blocks plain JAX makes the top-k, which takes most of the time).

A program has four layers, each waiting for the one before, on pools (and with a top-k) of its own. For that waiting
a bit enters each row that is sent: two short kernels that a real layer does not have, and cp 1 only in part. Time per
layer: host time of 10 calls in a row / 40, median of 5. The slowest GPU counts, and a call is enqueued while the one
before it runs. A profiler trace of four further calls says what the kernels took: the largest time of a stage over the
GPUs; of NCCL's kernels the least, because the other GPUs wait in theirs. (No ceiling is measured here: its timer and
the profiler exclude one another.)
"""

import functools
import itertools
import pathlib
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import _harness as harness
from benchmarks import bench_prefill as prefill
from dsa_cp_jax import dsa_prefill_attention_local, split_round_robin, write_kv
from dsa_cp_jax.modules import CompressedCache, DSAAttention, LayerCache, gather_rows, in_chunk_order, shard_over_cp
from pallas_kernels import KVLayout, quantize_rows

LAYERS, CALLS, REPEATS, TRACED_CALLS = 4, 10, 5, 4
CHECKED_ROWS = 48  # divisible by every cp_size up to 4


def chained_layers(workload: prefill.Workload, mesh: Mesh):
    """(program, arguments): layers one after another; each exchanges the chunk's KV, writes it, and attends."""
    how = dict(
        kind=workload.kind, config=workload.config, cp_axis="cp", path="sparse", implementation=prefill.IMPLEMENTATION
    )

    @jax.jit  # its kernels are lowered once, not for every layer
    def layer(q, topk, records, sink, plan, swa, compressed):
        with jax.named_scope("exchange"):
            chunk_records = in_chunk_order(gather_rows(records, "cp"))
        swa = write_kv(swa, plan.chunk.swa_slots(plan.query_req, plan.query_pos), chunk_records)
        return dsa_prefill_attention_local(q, plan, swa, compressed, topk, sink, **how), swa

    def local(sink, rows, plan, pools):
        q, topks, records = rows
        out, written = q, []
        for topk, (swa, compressed) in zip(topks, pools):
            out, swa = layer(q, topk, records, sink, plan, swa, compressed)
            records = records ^ jnp.isinf(out[0, 0, 0]).astype(jnp.uint8)  # the next layer waits for this one
            written.append((swa, compressed))
        return out, written

    topks = [None if workload.topk is None else jnp.roll(workload.topk, i, axis=1) for i in range(len(workload.pools))]
    rows = workload.q, topks, quantize_rows(workload.q[:, 0], layout=KVLayout.V4)
    rows = jax.tree.map(functools.partial(split_round_robin, cp_size=mesh.size), rows)
    return shard_over_cp(local, mesh), (workload.sink, rows, workload.plan, workload.pools)


def chained_blocks(workload: prefill.Workload, mesh: Mesh):
    """(program, arguments): whole attention blocks, one after another."""
    config, kind = workload.config, workload.kind
    block = nnx.jit(lambda: DSAAttention(config, kind, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))()

    def cache(pools):
        compressed = None
        if pools[1] is not None:
            compressed = CompressedCache(entries=pools[1], state=block.compressor.init_state(1, jnp.bfloat16))
        return LayerCache(swa=pools[0], compressed=compressed)

    @jax.jit
    def layer(block, x, plan, cache):
        y, cache = block(x, plan, cache, cp_axis="cp", path="sparse", implementation=prefill.IMPLEMENTATION)
        return x + y, cache

    def local(block, x, plan, caches):
        written = []
        for cache in caches:
            x, cache = layer(block, x, plan, cache)
            written.append(cache)
        return x, written

    x = jax.random.normal(jax.random.key(1), (workload.extend, config.hidden_size), jnp.bfloat16)
    args = (block, split_round_robin(x, mesh.size), workload.plan, [cache(pools) for pools in workload.pools])
    return shard_over_cp(local, mesh), args


def device_kernels(run: Callable[[], object]) -> dict[str, list]:
    """{device: [(kernel, microseconds)]} of what `run` does, from a profiler trace."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        profiles = [jax.profiler.ProfileData.from_file(str(file)) for file in pathlib.Path(folder).rglob("*.xplane.pb")]
    kernels = {
        plane.name: [
            (event.name, event.duration_ns / 1e3)
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
        for profile in profiles
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
    }
    return {device: events for device, events in kernels.items() if events}  # others of the host are idle


def compiled(build: Callable, workloads: list[prefill.Workload]):
    """(workload, program, arguments on its GPUs) of each; compiled side by side."""
    specs = PartitionSpec(), PartitionSpec("cp"), PartitionSpec(), PartitionSpec()
    jobs = []
    for workload in workloads:
        mesh = Mesh(np.array(jax.devices()[: workload.cp_size]), ("cp",))
        run, args = build(workload, mesh)
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs)]
        jobs.append((jax.jit(run, donate_argnums=3), args))
    return list(zip(workloads, harness.compile_all(jobs), [args for _, args in jobs]))


def time_per_layer(program, args: list) -> tuple[tuple[float, float], dict[str, float]]:
    """Microseconds per layer of a chained program (median, minimum), and those of its stages."""

    def run(calls: int):
        out = None
        for _ in range(calls):
            out, args[3] = program(*args)
        return out

    jax.block_until_ready(run(2))
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(run(CALLS))
        times.append((time.perf_counter() - begin) / (CALLS * LAYERS) * 1e6)
    of_gpus = []
    for kernels in device_kernels(lambda: run(TRACED_CALLS)).values():
        us = {
            stage: sum(us for name, us in kernels if word in name.lower()) / (TRACED_CALLS * LAYERS)
            for stage, word in prefill.STAGES.items()
        }
        us["other"] = sum(us for _, us in kernels) / (TRACED_CALLS * LAYERS) - sum(us.values())
        of_gpus.append(us)
    stages = {
        stage: round((min if stage == "collective" else max)(us[stage] for us in of_gpus), 2)
        for stage in (of_gpus[0] if of_gpus else ())
    }
    return (float(np.median(times)), min(times)), {stage: us for stage, us in stages.items() if us}


def first_rows(out: jax.Array, cp: int) -> np.ndarray:
    """Chunk rows 0..CHECKED_ROWS - 1 of an array in rank order over the GPUs of this process."""
    shards = sorted(out.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    rows = [np.asarray(shard.data[: CHECKED_ROWS // cp].astype(jnp.float32)) for shard in shards]
    return np.stack(rows, axis=1).reshape(-1, *out.shape[1:])


def scaling(results, what: str, config, extend: int, cp_sizes):
    """Rows of every layer kind at every cp_size; ratio and error are to the first."""
    build = dict(layers=chained_layers, blocks=chained_blocks)[what]
    kinds = [kind for kind in prefill.MIX if what == "layers" or kind != "c4"]
    make = functools.partial(prefill.make_workload, config, prefix=prefill.PREFIX, extend=extend, layers=LAYERS)
    programs = iter(compiled(build, [make(kind, cp_size=cp) for cp in cp_sizes for kind in kinds]))
    first: dict[str, float] = {}
    first_out: dict[str, np.ndarray] = {}
    for cp in cp_sizes:
        us, flop, case = {}, {}, ""
        for workload, program, args in itertools.islice(programs, len(kinds)):
            kind, case = workload.kind, workload.case
            out, args[3] = program(*args)
            out = first_rows(out, cp)
            error = float(np.abs(out - first_out.setdefault(kind, out)).max())
            times, stages = time_per_layer(program, args)
            us[kind], flop[kind] = times[0], workload.flop()
            baseline = dict(baseline_us=round(first.setdefault(kind, times[0]), 2), baseline=f"cp {cp_sizes[0]}")
            row = harness.flop_row(
                f"prefill_{what}", case, prefill.IMPLEMENTATION, times, flop[kind], max_abs_err=error, stages=stages,
                ceiling=False, **baseline,
            )  # fmt: skip
            results.add(**row)
        if what == "layers":
            total = first.setdefault("mix", sum(prefill.MIX[kind] * us[kind] for kind in us))
            baseline = dict(baseline_us=round(total, 2), baseline=f"cp {cp_sizes[0]}", ceiling=False)
            prefill.add_mix(results, f"prefill_{what}", case, us, flop, **baseline)


def main():
    parser = harness.parser(__doc__, parts=False)
    parser.add_argument("what", choices=("layers", "blocks"))
    prefill.add_arguments(parser)
    args = parser.parse_args()
    gpus = len(jax.devices())
    cp_sizes = [cp for cp in args.cp if cp <= gpus]
    if not cp_sizes:
        parser.error(f"--cp {' '.join(map(str, args.cp))}: there are {gpus} devices")
    results = harness.Results(args.out)
    for name in args.models:
        for extend in args.extends:
            scaling(results, args.what, prefill.MODELS[name], extend, cp_sizes)


if __name__ == "__main__":
    main()

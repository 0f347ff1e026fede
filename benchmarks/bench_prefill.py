"""Times the attention of a layer in a serving workload: python -m benchmarks.bench_prefill WHAT ... [--out FILE]

A prefix of 61,440 tokens and a chunk of 4,096 or 16,384; DeepSeek-V4-Flash (64 heads, topk 512) and V4-Pro (128, 1024);
layer kinds c0, c4, c128, and their mix of 2, 21 and 20 in the 43 layers of V4-Flash. WHAT is one of

  stages   one rank's share on one GPU, for cp 1, 2 and 4: gather, combine, attention and total of the sparse path, and
           the dense path; no exchange. Device time (CUPTI): the kernels of a call added up, median of 24 calls, each
           after 2 GiB were written. With --flashmla FILE (see bench_sparse_mla.py) FlashMLA's kernels beside them.
  batches  the same two paths for 4, 8 and 16 requests that share the chunk and the prefix equally. The default gate
           sends several requests to the dense path under CP, the wide gate to the sparse one.
  growth   both paths on one GPU, 4,096 rows, behind prefixes of 8k to 1M tokens. (--extends and --cp say nothing here.)
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _harness as harness
from dsa_cp_jax import (
    DSAConfig,
    KVPool,
    PrefillChunk,
    make_plan,
    paths,
)
from dsa_cp_jax.attention import hide_unseen
from dsa_cp_jax.config import compress_ratio
from dsa_cp_jax.engine import page_map
from dsa_cp_jax.paths import dense_prefill, sparse_prefill
from dsa_cp_jax.round_robin import rank_rows
from pallas_kernels import KVLayout, quantize_pages
from pallas_kernels.common import cdiv

PREFIX, EXTENDS, CP_SIZES = 61_440, (4_096, 16_384), (1, 2, 4)
MODELS = dict(flash=DSAConfig.deepseek_v4_flash(), pro=DSAConfig.deepseek_v4_pro())
MIX = dict(c0=2, c4=21, c128=20)
REQUESTS = (4, 8, 16)
GROWTH = (8_192, 32_768, 131_072, 524_288, 1_048_576)
LAUNCHES, CHECKED_ROWS = 24, 64
IMPLEMENTATION = "mosaic_gpu"
STAGES = dict(
    gather="gather_dequant", combine="combine_swa_indices", attention="sparse_mla_attention",
    paged="paged_mla_attention", collective="nccl",
)  # fmt: skip
"""Stage -> what the names of its kernels contain."""
PIPELINE = "FlashMLA and SGLang kernels, H200, 2026-11-29, measured apart from this run"
BARS = {  # (extend, cp, h_q) -> {kind: (sparse, dense)}, microseconds of PIPELINE
    (4_096, 1, 64): dict(c0=(267, 372), c4=(651, 1_047), c128=(633, 1_033)),
    (4_096, 2, 64): dict(c0=(141, 186), c4=(348, 531), c128=(335, 520)),
    (16_384, 1, 64): dict(c0=(1_014, 1_433), c4=(2_509, 4_204), c128=(2_773, 4_339)),
    (16_384, 2, 64): dict(c0=(522, 727), c4=(1_257, 2_063), c128=(1_382, 2_141)),
    (16_384, 1, 128): dict(c0=(1_992, 2_672), c4=(8_535, 11_480), c128=(5_539, 7_407)),
    (16_384, 2, 128): dict(c0=(1_010, 1_350), c4=(4_208, 5_725), c128=(2_742, 3_714)),
}


@dataclasses.dataclass
class Workload:
    """Inputs of layers of one kind for a chunk, rows in chunk order; `pools`: (SWA, other or None) of each layer.

    `prefix` and `extend` are tokens of all requests together.
    """

    kind: str
    config: DSAConfig
    prefix: int
    extend: int
    cp_size: int
    requests: int
    plan: Any
    q: jax.Array
    topk: jax.Array | None
    sink: jax.Array
    pools: list[tuple]

    @property
    def case(self) -> str:
        batch = f"_b{self.requests}" if self.requests > 1 else ""
        model = f"h{self.config.h_q}_k{self.config.topk}"
        return f"{self.kind}_p{self.prefix}_e{self.extend}{batch}_cp{self.cp_size}_{model}"

    def of_rank(self, cp_rank: int = 0) -> tuple:
        """What `run_path` takes."""
        split = functools.partial(rank_rows, cp_size=self.cp_size, cp_rank=cp_rank)
        q, pos, req = map(split, (self.q, self.plan.query_pos, self.plan.query_req))
        return q, pos, req, self.plan, *self.pools[0], None if self.topk is None else split(self.topk), self.sink

    def flop(self) -> int:
        """Of the products of one rank's attention."""
        pos = np.asarray(self.plan.query_pos)[:: self.cp_size].astype(np.int64)
        entries = {"c0": 0 * pos, "c4": np.minimum((pos + 1) // 4, self.config.topk), "c128": (pos + 1) // 128}
        keys = np.minimum(pos + 1, self.config.swa_window) + entries[self.kind]
        return int(2 * self.config.h_q * keys.sum() * (self.config.d_qk + self.config.d_v))


@functools.partial(jax.jit, static_argnames=("num_pages", "page_size"))
def random_pool(key, num_pages: int, page_size: int) -> KVPool:
    rows = jax.random.normal(key, (num_pages, page_size, 512), jnp.bfloat16)
    return KVPool(
        quantize_pages(rows, layout=KVLayout.V4, page_size=page_size), layout=KVLayout.V4, page_size=page_size
    )


def make_workload(
    config, kind: str, prefix: int, extend: int, cp_size: int, *, requests: int = 1, layers: int = 1
) -> Workload:
    """Random numbers, pages in random order. The SWA pool holds what the chunk can still see."""
    ratio, keys = compress_ratio(kind), jax.random.split(jax.random.key(0), 4 + 2 * layers)
    old, new = prefix // requests, extend // requests
    slots = np.arange(requests * (old + new)).reshape(requests, -1)
    window = slots[:, max(0, old - config.swa_window + 1) :].reshape(-1)
    swa_pages, tables = cdiv(len(window), config.swa_page_size), {}
    full_to_swa = np.full(slots.size, -1)
    full_to_swa[window] = page_map(swa_pages, config.swa_page_size, seed=1)[: len(window)]
    page_size = config.compressed_page_size(kind) if ratio else 0
    if ratio:
        pages = cdiv((old + new) // ratio, page_size)
        tables[ratio] = np.random.default_rng(2).permutation(requests * pages).reshape(requests, pages)
    chunk = PrefillChunk.build(
        seq_lens=[old + new] * requests, extend_lens=[new] * requests, req_pool_indices=np.arange(requests),
        req_to_token=slots, full_to_swa=full_to_swa, page_tables=tables, token_capacity=extend, cp_size=cp_size,
    )  # fmt: skip
    plan = jax.jit(make_plan, static_argnames=("config", "cp_size"))(chunk, config=config, cp_size=cp_size)
    topk = None
    if kind == "c4":
        visible = (plan.query_pos[:, None] + 1) // 4
        topk = (jax.random.uniform(keys[0], (extend, config.topk)) * visible).astype(jnp.int32)
        topk = jnp.where(jnp.arange(config.topk) < visible, jnp.minimum(topk, visible - 1), -1)
    pools: list[tuple] = [
        (
            random_pool(keys[4 + 2 * i], swa_pages, config.swa_page_size),
            random_pool(keys[5 + 2 * i], tables[ratio].size, page_size) if ratio else None,
        )
        for i in range(layers)
    ]
    q = jax.random.normal(keys[1], (extend, config.h_q, config.d_qk), jnp.bfloat16)
    sink = jax.random.normal(keys[2], (config.h_q,))
    jax.block_until_ready((q, topk, pools))
    return Workload(kind, config, prefix, extend, cp_size, requests, plan, q, topk, sink, pools)


def by_stage(names: list[str], times: np.ndarray) -> dict[str, float]:
    """Median microseconds of each stage, of rows of kernel times; `other` is what no stage claims."""
    stages = [next((s for s, word in STAGES.items() if word in name.lower()), "other") for name in names]
    mine = {stage: [other == stage for other in stages] for stage in dict.fromkeys(stages)}
    return {stage: round(float(np.median(times[:, columns].sum(1))), 2) for stage, columns in mine.items()}


PATHS = dict(sparse=sparse_prefill, dense=dense_prefill)


def run_path(path: str, q, pos, req, plan, swa_pool, pool, topk, sink, *, kind: str, **how) -> jax.Array:
    """One path of `dsa_prefill_attention_local`, for one rank's rows."""
    topk = None if topk is None else hide_unseen(topk, pos, kind)
    return PATHS[path](q, pos, req, plan, swa_pool, pool, topk, sink, kind=kind, **how)


def compiled(workloads: list[Workload], with_arguments: bool) -> list[tuple[Workload, dict[str, Callable]]]:
    """Programs of each workload: the paths, one rank's share, and "plain", the reference of the first rows.

    `with_arguments`: "sparse arguments" and "dense arguments" as well, see `kernel_arguments`.
    """
    jobs: dict[tuple, tuple] = {}
    for i, workload in enumerate(workloads):
        args, how = workload.of_rank(), dict(kind=workload.kind, config=workload.config)
        few = [x[:CHECKED_ROWS] if j in (0, 1, 2, 6) and x is not None else x for j, x in enumerate(args)]
        plain = functools.partial(run_path, "dense", **how, implementation="xla")
        jobs[i, "plain"] = jax.jit(plain, compiler_options=harness.UNTUNED), few
        for path in PATHS:
            jobs[i, path] = jax.jit(functools.partial(run_path, path, **how, implementation=IMPLEMENTATION)), args
            if with_arguments:
                jobs[i, f"{path} arguments"] = jax.jit(functools.partial(kernel_arguments, path, workload)), args
    calls: list[dict[str, Callable]] = [{} for _ in workloads]
    for (i, name), program in zip(jobs, harness.compile_all(list(jobs.values()))):
        calls[i][name] = functools.partial(program, *jobs[i, name][1])
    return list(zip(workloads, calls))


def measure(results, programs, flashmla: Callable | None) -> dict[str, dict[str, float]]:
    """Rows of both paths of everything that is compiled. Returns {path: {kind: microseconds}}."""
    us: dict[str, dict[str, float]] = {path: {} for path in PATHS}
    for workload, call in programs:
        beside = flashmla(results, workload, call) if flashmla is not None else {}
        want = call["plain"]().astype(jnp.float32)
        like_bars = workload.prefix == PREFIX and workload.requests == 1
        bars = BARS.get((workload.extend, workload.cp_size, workload.config.h_q)) if like_bars else None
        for path in PATHS:
            error = float(jnp.abs(call[path]()[:CHECKED_ROWS].astype(jnp.float32) - want).max())
            names, times = harness.kernel_records(
                lambda _, run=call[path]: jax.block_until_ready(run()), LAUNCHES, harness.flush_l2,
                jax.block_until_ready,
            )  # fmt: skip
            names, times = names[1:], times[:, 1:]
            more: dict[str, Any] = dict(max_abs_err=error, stages=by_stage(names, times), **beside)
            if bars is not None:
                more |= dict(baseline_us=bars[workload.kind][path == "dense"], bar=1.0, baseline=PIPELINE)
            total = float(np.median(times.sum(1))), float(times.sum(1).min())
            row = harness.flop_row(f"prefill_{path}", workload.case, IMPLEMENTATION, total, workload.flop(), **more)
            results.add(**row)
            us[path][workload.kind] = total[0]
    return us


def make_and_measure(results, make: Callable[[], list[Workload]], flashmla: Callable | None):
    """Workloads and their times, {path: {kind: microseconds}}; compiles while other processes measure."""
    with harness.alone():
        workloads = make()
    programs = compiled(workloads, flashmla is not None)
    with harness.alone():
        return workloads, measure(results, programs, flashmla)


def add_mix(results, op: str, case: str, us: dict[str, float], flop: dict[str, int], **more) -> None:
    """The row of the 43 layers, from the times of each kind."""
    total, products = (sum(MIX[kind] * of_kind[kind] for kind in MIX) for of_kind in (us, flop))
    case = f"mix_{case.partition('_')[2]}"
    results.add(**harness.flop_row(op, case, IMPLEMENTATION, (total, total), products, max_abs_err=None, **more))


def stages(results, config, extend: int, cp: int, flashmla: Callable | None, requests: int = 1):
    def make():
        return [make_workload(config, kind, PREFIX, extend, cp, requests=requests) for kind in MIX]

    workloads, us_of_paths = make_and_measure(results, make, flashmla)
    flop = {workload.kind: workload.flop() for workload in workloads}
    bars = BARS.get((extend, cp, config.h_q)) if requests == 1 else None
    for path, us in us_of_paths.items():
        more: dict[str, Any] = {}
        if bars is not None:
            pipeline = sum(MIX[kind] * bars[kind][path == "dense"] for kind in MIX)
            more = dict(baseline_us=pipeline, bar=1.0, baseline=PIPELINE)
        add_mix(results, f"prefill_{path}", workloads[0].case, us, flop, **more)


def kernel_arguments(path: str, workload: Workload, *args):
    """What a path hands to its attention kernel. sparse: q, workspace, indices, lengths; dense: slots and lengths."""
    seen: list = []

    def kernel(*args, **kwargs):
        seen.extend((args, kwargs))
        return SimpleNamespace(out=args[0])

    name = dict(sparse="sparse_mla_attention", dense="paged_mla_attention")[path]
    with mock.patch.object(paths, name, kernel):
        run_path(path, *args, kind=workload.kind, config=workload.config, implementation=IMPLEMENTATION)
    arrays, named = seen
    return arrays[:4] if path == "sparse" else (*arrays[2:4], *map(named.get, ("extra_indices", "extra_topk_length")))


def load_flashmla(library: str):
    """A function that times FlashMLA's two kernels on a workload's own arrays, adds rows, and returns the times."""
    import torch

    torch.ops.load_library(library)
    ops = torch.ops.flash_mla_legacy

    def tensors(*arrays) -> list[Any]:
        return [None if x is None else torch.from_dlpack(jax.block_until_ready(x)) for x in arrays]

    def paged(pool: KVPool):
        (pages,), token = tensors(pool.pages), KVLayout.V4.bytes_per_token
        return pages.as_strided((pages.shape[0], pool.page_size, 1, token), (pages.shape[1], token, token, 1))

    def run(results, workload: Workload, call: dict[str, Callable]) -> dict[str, float]:
        def add(op, launch):
            times = harness.device_us(launch, launches=LAUNCHES, ready=lambda _: torch.cuda.synchronize())
            results.add(**harness.flop_row(op, workload.case, "flashmla", times, workload.flop(), max_abs_err=None))
            return round(times[0], 2)

        scale, (sink,) = workload.config.sm_scale, tensors(workload.sink)
        q, workspace, indices, lengths = tensors(*call["sparse arguments"]())
        sparse = (q, workspace[:, None], indices[:, None], scale, 512, sink, lengths, False, True)
        attention_us = add("prefill_attention", lambda i: ops.sparse_prefill_fwd(*sparse))

        slots, length, more, more_length = call["dense arguments"]()
        extra: list = [None] * 3
        if more is not None:  # it takes multiples of 128 columns, and lengths that are no longer than that
            more_length = jnp.minimum(more_length, more.shape[1])
            more = jnp.pad(more, ((0, 0), (0, -more.shape[1] % 128)), constant_values=-1)
            more, more_length = tensors(more, more_length)
            extra = [paged(workload.pools[0][1]), more[:, None], more_length]
        slots, length = tensors(slots, length)
        dense = (q[:, None], paged(workload.pools[0][0]), slots[:, None], length, sink)
        schedule: list = [None, None]

        def launch(i):  # the schedule is computed in the first call, and used again
            out, _, *schedule[:] = ops.sparse_decode_fwd(*dense, *schedule, *extra, 512, scale, None)
            return out

        launch(0)
        return dict(flashmla_sparse_us=attention_us, flashmla_paged_us=add("prefill_dense", launch))

    return run


def growth(results, config, kind: str):
    def make():
        return [make_workload(config, kind, prefix, EXTENDS[0], 1) for prefix in GROWTH]

    make_and_measure(results, make, None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--extends", nargs="+", type=int, default=EXTENDS, help="tokens of the chunk")
    parser.add_argument("--cp", nargs="+", type=int, default=CP_SIZES, help="numbers of ranks")


def main():
    parser = harness.parser(__doc__)
    parser.add_argument("what", choices=("stages", "batches", "growth"))
    add_arguments(parser)
    parser.add_argument("--flashmla", help="shared library of sgl-flash-mla 1.0.0, _C_legacy.abi3.so")
    args = parser.parse_args()
    results, models = harness.Results(args.out), [MODELS[name] for name in args.models]
    chunks = itertools.product(models, args.extends, args.cp)
    if args.what == "stages":
        flashmla = load_flashmla(args.flashmla) if args.flashmla else None
        for config, extend, cp in harness.of_part(chunks, args.part):
            stages(results, config, extend, cp, flashmla)
    elif args.what == "batches":
        for (config, extend, cp), requests in harness.of_part(itertools.product(chunks, REQUESTS), args.part):
            stages(results, config, extend, cp, None, requests)
    else:
        for config, kind in harness.of_part(itertools.product(models, ("c4", "c128")), args.part):
            growth(results, config, kind)


if __name__ == "__main__":
    main()

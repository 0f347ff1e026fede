"""Runs every op at a small size on the CPU: python -m benchmarks.small [--out FILE]

Host time: for seeing that everything runs, and what plain JAX costs on a CPU (median of five calls). A kernel in the
interpreter of Pallas is timed, too (one call), but has no rate: the time is the interpreter's.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _harness as harness
from pallas_kernels import (
    KVLayout,
    combine_swa_indices,
    gather_dequant,
    paged_mla_attention,
    quantize_pages,
    sparse_mla_attention,
)

CALLS = dict(xla=5, interpreter=1)
SIZES = dict(xla=dict(rows=64, h_q=8), interpreter=dict(rows=2, h_q=64))
"""Implementation -> rows of the attention, 32 times as many of the others, and heads."""


def ops(rows: int, h_q: int) -> dict[str, tuple[str, Callable, tuple]]:
    """Op -> (case, function of arrays and `implementation` or `interpret`, arrays)."""
    rng, topk, page_size, many = np.random.default_rng(0), 128, 64, 32 * rows
    pages = quantize_pages(
        jnp.asarray(rng.standard_normal((8, page_size, 512), np.float32)), layout=KVLayout.V4, page_size=page_size
    )

    def integers(high: int, *shape: int):
        return jnp.asarray(rng.integers(0, high, shape), jnp.int32)

    def bf16(*shape: int):
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    q, slots, pool = bf16(rows, h_q, 512), integers(512, rows, topk), dict(layout=KVLayout.V4, page_size=page_size)
    pos, zeros = integers(10_000, many), jnp.zeros(1, jnp.int32)
    return dict(
        gather_dequant=(
            f"V4_n{many}_p{page_size}", functools.partial(gather_dequant, **pool), (pages, integers(512, many)),
        ),
        combine_swa_indices=(
            f"c4_{many}x({topk}+128)", functools.partial(combine_swa_indices, compress_ratio=4),
            (integers(2_500, many, topk), pos, 0 * pos, zeros, zeros + 2_500, zeros),
        ),
        sparse_mla_attention=(
            f"d512_h{h_q}_k{topk}_s{rows}_kv512", functools.partial(sparse_mla_attention, sm_scale=512**-0.5),
            (q, bf16(512, 512), slots),
        ),
        paged_mla_attention=(
            f"V4_h{h_q}_k{topk}_b{rows}_p{page_size}",
            functools.partial(paged_mla_attention, **pool, sm_scale=512**-0.5), (q, pages, slots),
        ),
    )  # fmt: skip


def host_us(run: Callable[[], Any], calls: int) -> tuple[float, float]:
    """(median, minimum) in microseconds."""

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return (time.perf_counter() - start) * 1e6

    once()
    times = [once() for _ in range(calls)]
    return statistics.median(times), min(times)


def measure(results: pathlib.Path | None) -> list[dict]:
    rows = []
    for implementation, sizes in SIZES.items():
        how = dict(implementation="xla") if implementation == "xla" else dict(interpret=True)
        for op, (case, function, arrays) in ops(**sizes).items():
            run = jax.jit(functools.partial(function, **how))
            us, us_min = host_us(lambda run=run, arrays=arrays: run(*arrays), CALLS[implementation])
            row = dict(op=op, case=case, implementation=implementation, us=round(us), us_min=round(us_min))
            rows.append(row | dict(size="small", clock="host") | harness.about_this_run())
            print(f"small size, CPU  {op:20s} {case:24s} {implementation:12s} {us:12.0f} us host time", flush=True)
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSONL file to append to")
    # Before JAX starts: threads for the interpreter's warpgroups on a machine of few cores.
    os.environ.setdefault("NPROC", "16")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    jax.config.update("jax_platforms", "cpu")
    measure(parser.parse_args().out)


if __name__ == "__main__":
    main()

"""What the benchmarks share: device times, ceilings measured in the same run, and the rows of results.

Most of a benchmark's time goes into compiling. With `--part I/N` it runs every Nth case, so that N processes compile
side by side; what runs on the GPU does so in `alone`.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import fcntl
import functools
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes, and torch, use the same GPU
FLUSH_BYTES = 2 << 30
UNTUNED = dict(xla_gpu_autotune_level=0)
"""Compiler options of what is compared with, not timed: XLA tunes matrix products on the GPU, where others measure."""


@contextlib.contextmanager
def alone() -> Generator[None]:
    """One process at a time, of those that see the same GPUs, is in here."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    with open(pathlib.Path(tempfile.gettempdir()) / f"dsa-cp-benchmark-{gpus}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.partial(jax.jit, static_argnums=1)
def _fill(value, size):
    return jnp.full((size // 4,), value, jnp.int32)


def flush_l2(i: int) -> jax.Array:
    """Writes 2 GiB, in one kernel."""
    return jax.block_until_ready(_fill(i, FLUSH_BYTES))


def kernel_records(
    launch: Callable[[int], object], launches: int, before: Callable, ready: Callable
) -> tuple[list[str], np.ndarray]:
    """Names and device times in microseconds of the kernels of `before(i)` and `launch(i)`: a row of times per call."""
    from jax._src.lib import mosaic_gpu as lib  # the only device timer inside JAX

    profiler = lib._mosaic_gpu_ext
    result = launch(0)
    ready((result, before(0)))
    profiler._cupti_init()
    try:
        for i in range(launches):
            before(i)
            result = launch(i)
        ready(result)
    finally:
        kernels = profiler._cupti_get_timings(True)
    times = np.array([ms for _, ms in kernels]).reshape(launches, -1) * 1e3
    return [name for name, _ in kernels[: times.shape[1]]], times


def kernel_times(launch: Callable[[int], object], launches: int, before: Callable, ready: Callable) -> np.ndarray:
    """The times of `kernel_records`."""
    return kernel_records(launch, launches, before, ready)[1]


def device_us(
    launch: Callable[[int], object], *, launches: int = 25, flush: bool = True, ready: Callable = jax.block_until_ready
) -> tuple[float, float]:
    """Device time of `launch(i)`, the kernels of one call added up: (median, minimum) in microseconds, by CUPTI.

    With `flush`, 2 GiB are written before every call: nothing of the inputs is left in L2, and what is there is dirty.
    `ready` waits for a result (another framework's, say).
    """

    def before(i):
        if flush:
            return flush_l2(i)

    times = kernel_times(lambda i: (ready(x := launch(i)), x)[1], launches, before, ready)[:, int(flush) :].sum(1)
    return float(np.median(times)), float(times.min())


def back_to_back_us(
    launch: Callable[[int], object], *, launches: int = 60, ready: Callable = jax.block_until_ready
) -> float:
    """Mean device time of calls that follow one another at once: hot, and at the clock that the power limit leaves."""
    return float(kernel_times(launch, launches, lambda i: None, ready).sum(1).mean())


def compile_all(jobs: Sequence[tuple[Any, Sequence]]) -> list:
    """Compiles jitted functions for arguments, side by side."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return [job.result() for job in [pool.submit(run.lower(*args).compile) for run, args in jobs]]


def as_torch(*arrays: jax.Array) -> list:
    """The arrays as torch tensors over the same device memory."""
    import torch

    return [torch.from_dlpack(jax.block_until_ready(x)) for x in arrays]


def torch_device_us(launch: Callable[[], object], **kwargs) -> tuple[float, float]:
    """`device_us` of a call that launches kernels through torch."""
    import torch

    return device_us(lambda _: launch(), ready=lambda _: torch.cuda.synchronize(), **kwargs)


@functools.cache
def copy_gbps() -> float:
    """Bytes read and written per second by an elementwise kernel over 2 GiB, in GB/s: the ceiling of data movement."""
    x = jnp.ones((2 << 30) // 4, jnp.int32)
    copy = jax.jit(lambda x: x ^ 1)
    return 2 * x.nbytes / device_us(lambda i: copy(x), launches=9, flush=False)[0] / 1e3


@functools.cache
def matmul_tflops() -> float:
    """TFLOP/s of an 8192^3 bf16 matrix product, back to back: the ceiling of matrix arithmetic."""
    a, b = jax.random.normal(jax.random.key(0), (2, 8192, 8192), jnp.bfloat16)
    return 2 * 8192**3 / back_to_back_us(lambda i: _product(a, b), launches=20) / 1e6


_product = jax.jit(jnp.dot)


@functools.cache
def about_this_run() -> dict:
    def say(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except FileNotFoundError:
            return ""

    commit = say("git", "rev-parse", "--short", "HEAD")
    changed = say("git", "status", "--porcelain", "--untracked-files=no", ":/", ":!/benchmarks/results", ":!/docs")
    return dict(
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        driver=say("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or None,
        commit=(commit + "-dirty" * bool(changed)) or None,
        date=datetime.date.today().isoformat(),
    )


def row(op, case, implementation, times, num_bytes, *, max_abs_err, baseline_us=None, bar=None, **more) -> dict:
    us, us_min = times
    gbps = num_bytes / us / 1e3
    return dict(
        op=op, case=case, implementation=implementation, us=round(us, 2), us_min=round(us_min, 2), bytes=num_bytes,
        gbps=round(gbps), ceiling_gbps=round(copy_gbps()), ceiling_share=round(gbps / copy_gbps(), 3),
        max_abs_err=max_abs_err, baseline_us=baseline_us, ratio=baseline_us and round(baseline_us / us, 2), bar=bar,
        **more, **about_this_run(),
    )  # fmt: skip


def flop_row(
    op, case, implementation, times, flop, *, max_abs_err, baseline_us=None, bar=None, ceiling=True, **more
) -> dict:
    """A row of an op that is bound by matrix arithmetic; `ceiling` False leaves that measurement out."""
    us, us_min = times
    tflops, top = flop / us / 1e6, matmul_tflops() if ceiling else None
    return dict(
        op=op, case=case, implementation=implementation, us=round(us, 2), us_min=round(us_min, 2), flop=flop,
        tflops=round(tflops, 1), ceiling_tflops=top and round(top), ceiling_share=top and round(tflops / top, 3),
        max_abs_err=max_abs_err, baseline_us=baseline_us, ratio=baseline_us and round(baseline_us / us, 3), bar=bar,
        **more, **about_this_run(),
    )  # fmt: skip


class Results:
    """Prints each row and appends it to a JSONL file."""

    def __init__(self, path: str | None):
        about = about_this_run()
        name = f"{about['date']}-{about['device'].removeprefix('NVIDIA ').lower().replace(' ', '-')}.jsonl"
        self.path = pathlib.Path(path) if path else pathlib.Path(__file__).parent / "results" / name

    def add(self, **row):
        share, ratio = row["ceiling_share"], row["ratio"]
        rate = f"{row['gbps']:5d} GB/s" if "gbps" in row else f"{row['tflops']:5.0f} TFLOP/s"
        rate += f" {share:6.1%} of a {'copy' if 'gbps' in row else 'matmul'}" if share else ""
        print(
            f"{row['op']:20s} {row['case']:34s} {row['implementation']:10s} {row['us']:9.1f} us {rate}"
            + (f", {ratio:.3f} x baseline" if ratio else ""),
            flush=True,
        )
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def parser(doc: str, *, parts: bool = True) -> argparse.ArgumentParser:
    """A parser with --out, and with --part, whose value `of_part` takes."""
    new = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("--out", help="JSONL file to append to (default: benchmarks/results/<date>-<device>.jsonl)")
    if parts:
        new.add_argument("--part", type=_part, default=(0, 1), metavar="I/N", help="every Nth case, from the Ith (0..)")
    return new


def _part(text: str) -> tuple[int, int]:
    first, step = (int(number) for number in text.split("/"))
    if not 0 <= first < step:
        raise ValueError
    return first, step


def of_part(cases: Iterable, part: tuple[int, int]) -> list:
    """The cases of a part, (first, step)."""
    first, step = part
    return list(cases)[first::step]

"""What the warpgroups of a block do, and when: python -m benchmarks.profile_kernel [--h-q N] [--topk N] ...

Runs the sparse attention kernel with Mosaic's profiler, which notes the clock at the start and end of every named scope
of the kernel, and prints as a markdown table what one item of the first block is made of, from the end of an output to
the end of the next one. Between its scopes a warpgroup does what has no name; noting the clock takes time itself. The
trace of all blocks can be kept for Perfetto. (The paged kernel leaves no shared memory for the profiler.)
"""

import argparse
import functools
import json
import pathlib
import tempfile
from unittest import mock

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.bench_sparse_mla import Case, arrays
from pallas_kernels import sparse_mla_attention

SCOPES = 120
"""Scopes that a warpgroup notes, from the start of the kernel; they take 16 bytes of shared memory each."""
WARPGROUPS = 3
ITEM = 2


def profiler(folder: pathlib.Path, scopes: int = SCOPES):
    """While it is entered, compiled kernels note their scopes and leave a trace in the folder with every run."""
    how = dict(profile_space=scopes, profile_dir=str(folder), profile_bounds_check=True)
    return mock.patch.object(plgpu, "CompilerParams", functools.partial(plgpu.CompilerParams, **how))


def scopes_of_block(trace: dict, block: int = 0) -> list[tuple[int, str, float, float]]:
    """(warpgroup, name, start, duration) in microseconds, in the order of their starts, of a trace of Mosaic's."""
    scopes, begun = [], {}
    for event in trace["traceEvents"]:
        of_block, warpgroup = divmod(event["tid"] - 1, WARPGROUPS)
        if of_block == block:
            key = warpgroup, event["name"]
            if event["ph"] == "B":
                begun[key] = event["ts"]
            else:
                scopes.append((*key, begun[key], event["ts"] - begun.pop(key)))
    return sorted(scopes, key=lambda scope: scope[2])


def one_item(scopes: list[tuple[int, str, float, float]], number: int) -> str:
    """A markdown table of what happens between two ends of warpgroup 0's outputs."""
    ends = [start + duration for warpgroup, name, start, duration in scopes if (warpgroup, name) == (0, "output")]
    if len(ends) <= number:
        raise SystemExit(f"The trace holds {len(ends)} outputs, too few for item {number}: raise --scopes.")
    begin, end = ends[number - 1], ends[number]
    lines = ["| starts at, µs | takes, µs | warpgroup 0 | warpgroup 1 | warpgroup 2 |", "|---|---|---|---|---|"]
    for warpgroup, name, start, duration in scopes:
        if begin <= start < end:
            cells = [name if warpgroup == w else "" for w in range(WARPGROUPS)]
            lines.append(f"| {start - begin:.2f} | {duration:.2f} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"| {end - begin:.2f} | | end | | |"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--h-q", type=int, default=64)
    parser.add_argument("--topk", type=int, default=640)
    parser.add_argument("--scopes", type=int, default=SCOPES, help=f"that a warpgroup notes (default: {SCOPES})")
    parser.add_argument("--trace", type=pathlib.Path, help="folder to keep the trace in")
    args = parser.parse_args()
    given = arrays(Case(512, args.h_q, args.topk))
    run = jax.jit(functools.partial(sparse_mla_attention, sm_scale=512**-0.5, implementation="mosaic_gpu"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.trace or pathlib.Path(temporary)
        folder.mkdir(exist_ok=True)
        with profiler(folder, args.scopes):
            jax.block_until_ready(run(*given))
        jax.effects_barrier()
        (file,) = sorted(folder.glob("*.json"))[-1:]
        trace = json.loads(file.read_text())
    print(f"{args.h_q} heads, {args.topk} columns, {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(one_item(scopes_of_block(trace), ITEM))


if __name__ == "__main__":
    main()

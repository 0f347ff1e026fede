"""What the warpgroups of a block do, and when: python -m benchmarks.profile_kernel [--h-q N] [--topk N] [--scopes N]

Runs the sparse attention kernel with Mosaic's profiler, which notes the clock of the SM at the start and end of every
named scope of the kernel, and prints as a markdown table, in clocks, what one item of the first block is made of, from
the end of an output to the end of the next one. Between its scopes a warpgroup does what has no name; noting the clock
takes time itself. (The paged kernel leaves no shared memory for the profiler.)
"""

import argparse
import contextlib
import functools
import json
import pathlib
import tempfile
from collections.abc import Generator
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.experimental.mosaic.gpu.profiler import ProfilerSpec
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.bench_sparse_mla import Case, arrays
from pallas_kernels import sparse_mla_attention

SCOPES = 120
"""Scopes that a warpgroup notes, from the start of the kernel; they take 16 bytes of shared memory each."""
WARPGROUPS = 3
ITEM = 2


class Scope(NamedTuple):
    warpgroup: int
    name: str
    start: int  # clocks of the SM
    end: int


def write_scopes(spec: ProfilerSpec, buffer, file, grid, block) -> None:
    """Writes the scopes of the first block as JSON, in the order of their starts.

    In the place of `ProfilerSpec.dump`, which takes clocks for nanoseconds, and the first scope of each warpgroup for
    the start of the kernel: as warpgroups of a block share the SM's clock, their scopes can be compared as they are.
    """
    names = {number: name for name, number in spec.interned_names.items()}
    scopes = []
    for warpgroup, row in enumerate(np.asarray(buffer).reshape(-1, spec.entries_per_warpgroup)[:WARPGROUPS].tolist()):
        begun = {}
        for tag, clock in zip(row[3 : 3 + row[2] : 2], row[4 : 3 + row[2] : 2]):
            name = names[tag & ~ProfilerSpec.EXIT]
            if tag & ProfilerSpec.EXIT:
                scopes.append(Scope(warpgroup, name, begun.pop(name), clock))
            else:
                begun[name] = clock
    json.dump(sorted(scopes, key=lambda scope: scope.start), file)


@contextlib.contextmanager
def profiler(folder: pathlib.Path, scopes: int = SCOPES) -> Generator[None]:
    """In here, kernels note their scopes, and write them to a file in the folder with every run."""
    how = dict(profile_space=scopes, profile_dir=str(folder), profile_bounds_check=True)
    jax.clear_caches()  # what was traced without the profiler
    with (
        mock.patch.object(plgpu, "CompilerParams", functools.partial(plgpu.CompilerParams, **how)),
        mock.patch.object(ProfilerSpec, "dump", write_scopes),
    ):
        yield
        jax.effects_barrier()
    jax.clear_caches()


def one_item(scopes: list[Scope], number: int) -> str:
    """A markdown table of what begins between two ends of warpgroup 0's outputs."""
    ends = [scope.end for scope in scopes if (scope.warpgroup, scope.name) == (0, "output")]
    if len(ends) <= number:
        raise SystemExit(f"There are {len(ends)} outputs, too few for item {number}: raise --scopes.")
    begin, end = ends[number - 1], ends[number]
    lines = ["| starts at | takes, clocks | warpgroup 0 | warpgroup 1 | warpgroup 2 |", "|---|---|---|---|---|"]
    for scope in scopes:
        if begin <= scope.start < end:
            cells = [scope.name if scope.warpgroup == w else "" for w in range(WARPGROUPS)]
            lines.append(f"| {scope.start - begin} | {scope.end - scope.start} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"| {end - begin} | | end | | |"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--h-q", type=int, default=64)
    parser.add_argument("--topk", type=int, default=640)
    parser.add_argument("--scopes", type=int, default=SCOPES, help=f"that a warpgroup notes (default: {SCOPES})")
    args = parser.parse_args()
    given = arrays(Case(512, args.h_q, args.topk))
    with tempfile.TemporaryDirectory() as folder:
        with profiler(pathlib.Path(folder), args.scopes):
            run = jax.jit(functools.partial(sparse_mla_attention, sm_scale=512**-0.5, implementation="mosaic_gpu"))
            jax.block_until_ready(run(*given))
        (file,) = pathlib.Path(folder).glob("*.json")
        scopes = [Scope(*scope) for scope in json.loads(file.read_text())]
    print(f"{args.h_q} heads, {args.topk} columns, {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(one_item(scopes, ITEM))


if __name__ == "__main__":
    main()

"""Profiles the attention of a prefill layer: python -m benchmarks.profile_layer [--kind KIND] [--cp N] [--trace FOLDER]

The workload of bench_prefill.py: a prefix of 61,440 tokens, a chunk of 4,096, DeepSeek-V4-Flash, with the exchange of
the chunk's KV and its write to the pools. Prints, as a markdown table, each kernel of one call on the first GPU in the
order of their starts, with its stream and its stage. The trace can be kept for Perfetto or XProf.
"""

import argparse
import pathlib
import tempfile

import jax

from benchmarks import bench_prefill as prefill
from benchmarks import bench_scaling as scaling

CALLS = 5


def stage_of(kernel: str) -> str:
    return next((stage for stage, word in prefill.STAGES.items() if word in kernel.lower()), "")


def timeline(events: list[tuple[str, str, float, float]]) -> str:
    """A markdown table of (stream, kernel, start, duration) in microseconds."""
    events = sorted(events, key=lambda event: event[2])
    begin = events[0][2]
    lines = ["| starts at, µs | takes, µs | stage | stream | kernel |", "|---|---|---|---|---|"]
    for stream, kernel, start, duration in events:
        lines.append(f"| {start - begin:.1f} | {duration:.1f} | {stage_of(kernel)} | {stream} | `{kernel[:60]}` |")
    end = max(start + duration for _, _, start, duration in events)
    return "\n".join([*lines, f"| {end - begin:.1f} | | end | | |"])


def events_of(folder: pathlib.Path) -> list[tuple[str, str, float, float]]:
    """(stream, kernel, start, duration) of the first GPU in a folder with a trace."""
    file = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    planes = {plane.name: plane for plane in jax.profiler.ProfileData.from_file(str(file)).planes}
    device = min((name for name in planes if name.startswith("/device:GPU")), default=None)
    if device is None:
        raise SystemExit(f"The trace has no GPU in it, only {', '.join(planes)}.")
    return [
        (line.name.split("(")[0], event.name, event.start_ns / 1e3, event.duration_ns / 1e3)
        for line in planes[device].lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*prefill.MIX], default="c4")
    parser.add_argument("--cp", type=int, help="GPUs (default: all)")
    parser.add_argument("--trace", type=pathlib.Path, help="folder to keep the trace in")
    args = parser.parse_args()
    cp = args.cp or len(jax.devices())
    workload = prefill.make_workload(prefill.MODELS["flash"], args.kind, prefill.PREFIX, prefill.EXTENDS[0], cp)
    ((_, program, arrays),) = scaling.compiled(scaling.chained_layers, [workload])

    def call():
        out, arrays[3] = program(*arrays)
        jax.block_until_ready(out)

    call()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.trace or pathlib.Path(temporary)
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                call()
        events = sorted(events_of(folder), key=lambda event: event[2])
    print(f"{workload.case} on {cp} x {jax.devices()[0].device_kind}, jax {jax.__version__}: the last of {CALLS} calls")
    print(timeline(events[-(len(events) // CALLS) :]))


if __name__ == "__main__":
    main()

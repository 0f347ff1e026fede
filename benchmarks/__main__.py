"""Runs every benchmark that this machine allows, into one JSONL file, and draws the plots: make bench

On Hopper GPUs the rows go to benchmarks/results/<date>-<device>.jsonl (or --out FILE). FlashMLA is timed beside our
kernels where the package flash_mla (sgl-flash-mla 1.0.0, extra `compare`) is installed; what needs several GPUs runs
where there are several. Benchmarks that mostly compile run as several processes, one of which measures at a time;
batches, growth and blocks are those of V4-Flash alone. On any other machine small sizes run on the CPU, into
build/<date>-cpu-small.jsonl: they tell that the code works, not how fast it is.
"""

import argparse
import datetime
import importlib.util
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PARTS = 4
"""Processes for each GPU."""
IN_PARTS = {"benchmarks.bench_sparse_mla", "benchmarks.bench_paged_mla", "benchmarks.bench_prefill"}


def hopper_gpus() -> list[str]:
    """GPUs of compute capability 9.0, as CUDA_VISIBLE_DEVICES names them, of those that it lets us see.

    Without starting JAX, which would open them all.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid,compute_cap", "--format=csv,noheader"]
    try:
        found = [line.split(", ") for line in subprocess.run(query, capture_output=True, text=True).stdout.splitlines()]
    except FileNotFoundError:
        return []
    hopper = [gpu for gpu in found if gpu[-1] == "9.0"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(index for index, *_ in found))
    return [name for name in visible.split(",") if any(name in gpu[:2] for gpu in hopper)]


def flashmla_library() -> list[str]:
    """The option that names FlashMLA's library, if it is installed."""
    spec = importlib.util.find_spec("flash_mla")
    folders = spec.submodule_search_locations or [] if spec else []
    files = [file for folder in folders for file in sorted(pathlib.Path(folder).glob("_C_legacy.*so"))]
    return ["--flashmla", str(files[0])] if files else []


def commands(gpus: int, flashmla: list[str], out: list[str]) -> list[list[str]]:
    """Arguments of `python -m` for a machine with so many Hopper GPUs."""
    if not gpus:
        return [["benchmarks.small", *out]]
    one = [
        ["bench_gather_dequant"], ["bench_swa_combine"], ["bench_sparse_mla", *flashmla],
        ["bench_paged_mla", *flashmla], ["bench_prefill", "stages", *flashmla],
        ["bench_prefill", "batches", "--models", "flash", "--extends", "16384"],
        ["bench_prefill", "growth", "--models", "flash"],
    ]  # fmt: skip
    several = []
    if gpus > 1:
        several = [["bench_scaling", "layers"], ["bench_scaling", "blocks", "--models", "flash", "--extends", "16384"]]
    without_rows = [["benchmarks.compare_flashmla"], ["benchmarks.profile_kernel"], ["benchmarks.profile_layer"]]
    return [[f"benchmarks.{name}", *more, *out] for name, *more in one + several] + without_rows


def processes(command: list[str], gpus: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Arguments of `python -m` and what to add to the environment, for each process of a command."""
    if command[0] not in IN_PARTS:
        return [(command, {})]
    n = PARTS * len(gpus)
    return [([*command, "--part", f"{i}/{n}"], dict(CUDA_VISIBLE_DEVICES=gpus[i % len(gpus)])) for i in range(n)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSONL file to append to")
    parser.add_argument("--list", action="store_true", help="print the commands only")
    args = parser.parse_args()
    gpus, out = hopper_gpus(), args.out
    if out is None and not gpus:
        out = ROOT / "build" / f"{datetime.date.today().isoformat()}-cpu-small.jsonl"
        out.parent.mkdir(exist_ok=True)
    flashmla = flashmla_library()
    of_rows = ["--results", str(out)] if out and gpus else []  # the times of a CPU are not drawn
    todo = [*commands(len(gpus), flashmla, ["--out", str(out)] if out else []), ["benchmarks.plots", *of_rows]]
    print(f"{len(gpus)} Hopper GPUs, FlashMLA {'installed' if flashmla else 'not installed'}")
    failed = []
    for command in todo:
        print("$ python -m", *command, flush=True)
        if args.list:
            continue
        running = [
            subprocess.Popen([sys.executable, "-m", *part], cwd=ROOT, env=os.environ | more)
            for part, more in processes(command, gpus)
        ]
        if any([process.wait() for process in running]):
            failed.append(" ".join(command))
    if failed:
        print("failed:", *failed, sep="\n  ")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

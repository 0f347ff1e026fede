"""The main job in several processes."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def run_processes(port: int, num_processes: int, arguments: list[str], *, setup: str = "", env=lambda i: {}):
    """`dsa-cp validate` in several processes; returns their (exit code, stdout, stderr)."""
    code = f"import sys\nfrom dsa_cp_jax import validate\n{setup}\nsys.exit(validate.main(sys.argv[1:]))"
    where = ["--coordinator", f"localhost:{port}", "--num-processes", str(num_processes), "--process-id"]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code, "validate", *arguments, *where, str(i)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | env(i),
        )
        for i in range(num_processes)
    ]  # fmt: skip
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            outputs = list(pool.map(lambda job: job.communicate(timeout=400), jobs))
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, *output) for job, output in zip(jobs, outputs)]

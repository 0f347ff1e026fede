"""The code of the README and the docs runs as it stands, in a fresh process; every public name is in the docs."""

import inspect
import json
import pathlib
import re
import subprocess
import sys

import pytest

import dsa_cp_jax
import pallas_kernels
from dsa_cp_jax.compat import flash_mla

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_block(block):
    if "torch" in block:
        pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    if "sparse path:" in block:
        assert "sparse path: True" in done.stdout
        assert float(done.stdout.split()[-1]) < 1e-5


def test_links():
    """Every relative link of the README and the docs leads to a file."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("module", [dsa_cp_jax, pallas_kernels, flash_mla], ids=lambda m: m.__name__)
def test_public_names_are_in_the_docs(module):
    """docs/api.md has every name with the first line of its docstring, in the order of `__all__`."""
    section = (ROOT / "docs" / "api.md").read_text().split(f"## `{module.__name__}`")[1].split("##")[0]
    first_lines = {name: inspect.getdoc(getattr(module, name)).splitlines()[0] for name in module.__all__}
    lines = [f"| `{name}` | {line.replace('|', r'\|')} |" for name, line in first_lines.items()]
    assert re.findall(r"^\| `.*", section, re.M) == lines


def test_every_page_can_be_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            todo += [(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
    assert reached == set(PAGES), set(PAGES) - reached


def test_measured_figures_are_recorded():
    """Every line of the README's tables is a row, of the commits named there: time, rate, baseline and ratio, rounded."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    section = (ROOT / "README.md").read_text().split("## Measured")[1].split("##")[0]
    commits = re.findall(r"\b[0-9a-f]{7}\b", section)
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    rows = [row for row in rows if row["commit"] in commits]
    lines = [line.strip("| ").split("|") for line in re.findall(r"^\|.*µs.*", section, re.M)]
    assert len(lines) >= 8 and len(re.findall(r"µs", section)) == sum("".join(line).count("µs") for line in lines)

    def says(cell: str, *values: float | None) -> bool:
        """Whether the numbers in a cell are these, rounded as they are there."""
        numbers = re.findall(r"\d[\d,]*(?:\.(\d+))?", cell), re.findall(r"\d[\d,]*(?:\.\d+)?", cell)
        return len(numbers[0]) == len(values) and all(
            value is not None and round(value, len(decimals)) == float(number.replace(",", ""))
            for decimals, number, value in zip(*numbers, values)
        )

    us = {(row["op"], row["case"]): row["us"] for row in rows if row["implementation"] == "mosaic_gpu"}
    batches = [case for op, case in us if op == "prefill_sparse" and re.match(r"mix_p61440_e16384_b\d+_cp2_h64", case)]
    gains = [us["prefill_dense", case] / us["prefill_sparse", case] for case in batches]
    assert f"{min(gains):.2f} to {max(gains):.2f} times as fast" in section and len(gains) >= 3

    for name, ours, xla, baseline, ratio in lines:
        found = []
        for row in rows:
            rate = row["tflops"] if "tflops" in row else row["gbps"] / 1e3
            time = says(ours, row["us"]) or says(ours, row["us"], rate)
            if row["implementation"] == "mosaic_gpu" and time and says(baseline, row["baseline_us"]):
                found += [row] * says(ratio, row["baseline_us"] / row["us"])
        assert len({row["case"] for row in found}) == 1, name
        plain = [row for row in rows if row["implementation"] == "xla" and row["case"] == found[0]["case"]]
        assert not xla.strip() or any(says(xla, row["us"]) for row in plain), name

"""`make bench`: what it runs where, the small sizes of a CPU, and the plots of recorded rows."""

import concurrent.futures
import io
import itertools
import json
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from jax.experimental.mosaic.gpu.profiler import ProfilerSpec
from matplotlib.figure import Figure

from benchmarks import __main__ as bench
from benchmarks import _harness as harness
from benchmarks import (
    bench_paged_mla,
    bench_prefill,
    bench_scaling,
    bench_sparse_mla,
    plots,
    profile_kernel,
    profile_layer,
    small,
)
from dsa_cp_jax import DSAConfig

ROOT = pathlib.Path(__file__).parents[1]


def test_every_benchmark_is_run():
    files = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
    on_two = [module.removeprefix("benchmarks.") for module, *_ in bench.commands(2, [], [])]
    assert files | {path.stem for path in (ROOT / "benchmarks").glob("[cp]*_*.py")} == set(on_two)
    for name in files:  # and every part of it
        parts = re.search(r'add_argument\("what", choices=\(([^)]*)\)', (ROOT / f"benchmarks/{name}.py").read_text())
        run = {more[0] for module, *more in bench.commands(2, [], []) if module == f"benchmarks.{name}" and more}
        assert run == set(re.findall(r"\w+", parts[1]) if parts else ())
    on_one = bench.commands(1, ["--flashmla", "lib"], ["--out", "rows"])
    assert all(command[-2:] == ["--out", "rows"] for command in on_one if ".bench_" in command[0])
    assert sum("--flashmla" in command for command in on_one) == 3 and "benchmarks.bench_scaling" not in str(on_one)
    assert bench.commands(0, [], []) == [["benchmarks.small"]]


def test_parts_cover_all_cases_once():
    parts = bench.processes(["benchmarks.bench_sparse_mla", "--quick"], ["0", "3"])
    assert parts[1] == (["benchmarks.bench_sparse_mla", "--quick", "--part", "1/8"], dict(CUDA_VISIBLE_DEVICES="3"))
    parser = harness.parser("")
    cases = [harness.of_part(range(11), parser.parse_args(command[2:]).part) for command, _ in parts]
    assert sorted(itertools.chain(*cases)) == list(range(11))
    command = ["benchmarks.bench_scaling", "layers"]
    assert bench.processes(command, ["0", "3"]) == [(command, {})]
    for wrong in ("2/2", "-1/2", "0", "a/b"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--part={wrong}"])


@pytest.mark.parametrize("visible, gpus", [(None, ["0", "2"]), ("2,1", ["2"]), ("GPU-c", ["GPU-c"]), ("", [])])
def test_only_hopper_gpus_that_may_be_seen(monkeypatch, visible, gpus):
    said = "0, GPU-a, 9.0\n1, GPU-b, 8.0\n2, GPU-c, 9.0\n"
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 0, said))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert bench.hopper_gpus() == gpus


def test_only_one_measures(monkeypatch, tmp_path):
    monkeypatch.setattr(harness.tempfile, "gettempdir", lambda: str(tmp_path))
    inside = []

    def measure(i):
        with harness.alone():
            inside.append(i)
            time.sleep(0.05)
            assert inside[-1] == i

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(measure, range(4)))
    assert sorted(inside) == [0, 1, 2, 3]


@pytest.fixture
def without_gpu(monkeypatch, tmp_path):
    """Small inputs, plain jnp for the kernels and no clock: runs a benchmark's `main` and returns its rows."""

    def plainly(function):
        return lambda *args, implementation, **kwargs: function(*args, implementation="xla", **kwargs)

    for module, name in ((bench_sparse_mla, "sparse_mla_attention"), (bench_paged_mla, "paged_mla_attention")):
        monkeypatch.setattr(module, name, plainly(getattr(module, name)))
    monkeypatch.setattr(bench_prefill, "IMPLEMENTATION", "xla")
    monkeypatch.setattr(harness, "device_us", lambda launch, **_: (launch(0), (2.0, 1.0))[1])
    monkeypatch.setattr(harness, "back_to_back_us", lambda launch, **_: (launch(0), 2.0)[1])
    names = ["fill", "sparse_mla_attention", "fusion"]
    monkeypatch.setattr(harness, "kernel_records", lambda launch, n, *_: (launch(0), (names, np.ones((n, 3))))[1])
    monkeypatch.setattr(harness, "matmul_tflops", lambda: 800.0)

    def run(module, *arguments):
        out = tmp_path / "rows.jsonl"
        monkeypatch.setattr(sys, "argv", [module.__name__, "--out", str(out), *arguments])
        module.main()
        return [json.loads(line) for line in out.read_text().splitlines()]

    return run


def test_sparse_benchmark(without_gpu, monkeypatch):
    monkeypatch.setattr(bench_sparse_mla, "S_Q", 8)
    monkeypatch.setattr(bench_sparse_mla, "cases", lambda quick: [bench_sparse_mla.Case(512, 2, 130, "uniform length")])
    (row,) = without_gpu(bench_sparse_mla)
    assert row["case"] == "d512_h2_k130_s8_kv32768" and row["max_abs_err"] < 0.02


def test_paged_benchmark(without_gpu, monkeypatch):
    monkeypatch.setattr(bench_paged_mla, "SLOTS", 512)
    monkeypatch.setattr(bench_paged_mla, "cases", lambda quick: [bench_paged_mla.Case(8, 2, 40, "uniform length")])
    (row,) = without_gpu(bench_paged_mla)
    assert row["case"] == "d512_h2_k128+40_b8" and row["max_abs_err"] == 0


def test_prefill_benchmark(without_gpu, monkeypatch):
    monkeypatch.setattr(bench_prefill, "PREFIX", 256)
    monkeypatch.setattr(bench_prefill, "MIX", dict(c4=43))
    rows = without_gpu(bench_prefill, "stages", "--models", "flash", "--extends", "32", "--cp", "2")
    kinds = [(row["op"], row["case"].split("_")[0], row["us"]) for row in rows]
    assert kinds == [(f"prefill_{p}", k, us) for k, us in (("c4", 2), ("mix", 86)) for p in ("sparse", "dense")]
    assert rows[0]["stages"] == dict(attention=1, other=1) and max(row["max_abs_err"] or 0 for row in rows) < 0.01


@pytest.mark.parametrize("what", ["layers", "blocks"])
def test_scaling_benchmark(without_gpu, monkeypatch, what):
    """cp 2 on virtual devices gives the rows of cp 1."""
    for name, value in dict(LAYERS=2, CALLS=1, REPEATS=1, TRACED_CALLS=1).items():
        monkeypatch.setattr(bench_scaling, name, value)
    monkeypatch.setattr(bench_prefill, "MODELS", dict(flash=DSAConfig.tiny()))
    monkeypatch.setattr(bench_prefill, "PREFIX", 256)
    monkeypatch.setattr(bench_prefill, "MIX", dict(c4=21, c128=20))
    rows = without_gpu(bench_scaling, what, "--models", "flash", "--extends", "128", "--cp", "1", "2")
    kinds = ["c4", "c128", "mix"] if what == "layers" else ["c128"]
    assert [row["case"].split("_")[0] for row in rows] == kinds * 2
    assert [row["ratio"] for row in rows[: len(kinds)]] == [1.0] * len(kinds)
    errors = [row["max_abs_err"] for row in rows if row["max_abs_err"] is not None]
    assert max(errors) < dict(layers=0.02, blocks=0.1)[what], errors  # blocks: bfloat16 of larger values


def test_more_ranks_than_gpus(without_gpu):
    with pytest.raises(SystemExit):
        without_gpu(bench_scaling, "layers", "--cp", "16")


def test_list_on_this_machine():
    command = [sys.executable, "-m", "benchmarks", "--list"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert said.strip().endswith("$ python -m benchmarks.plots")
    assert ("benchmarks.small" in said) == said.startswith("0 Hopper GPUs")


def test_small_sizes_are_called_so_and_have_no_rates(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(small, "SIZES", {key: dict(rows=2, h_q=1) for key in ("xla", "interpreter")})
    small.measure(tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["op"] for row in rows} == {
        "gather_dequant", "combine_swa_indices", "sparse_mla_attention", "paged_mla_attention",
    }  # fmt: skip
    assert all(row["size"] == "small" and row["us"] > 0 and row["clock"] == "host" for row in rows)
    assert not any({"tflops", "gbps", "ceiling_share"} & set(row) for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(line.startswith("small size, CPU") and "FLOP" not in line for line in lines)


def rows_of_every_kind() -> list[dict]:
    ours = dict(implementation="mosaic_gpu")
    sparse = dict(
        ours, op="sparse_mla_attention", case="d512_h64_k640_s4096_kv32768", features="plain", us=600, tflops=570,
        ceiling_tflops=800, baseline_us=640, ratio=1.07, baseline="sgl-flash-mla 1.0.0, same run",
    )  # fmt: skip
    gather = dict(
        ours, op="gather_dequant", case="V4", us=100, bytes=4e8, gbps=4000, ceiling_gbps=4300, baseline_us=120,
        ratio=1.2, baseline="SGLang",
    )  # fmt: skip
    layers = [dict(ours, op="prefill_layers", case=f"c4_p1_e2_cp{n}_h64_k512", us=100 / n) for n in (1, 2)]
    growth = [dict(ours, op="prefill_sparse", case=f"c4_p{n}_e2_cp1_h64_k512", us=n) for n in (1024, 2048)]
    return [sparse, gather, *layers, *growth]


def test_curves_of_growth():
    """A panel for each kind, a curve for each path; what has another shape, or one prefix only, is left out."""
    ours = dict(implementation="mosaic_gpu", us=3)
    drawn = [f"c128_p{n}_e2_cp1_h64_k512" for n in (2048, 1024, 4096)]
    rows = [dict(ours, op=f"prefill_{path}", case=case) for path in ("sparse", "dense") for case in drawn]
    rows += [dict(ours, op="prefill_sparse", case=f"c4_p{n}_e2_cp1_h64_k512") for n in (1024, 2048)]
    others = ["c128_p8_e2_cp2_h64_k512", "c128_p8_e2_b4_cp1_h64_k512", "c0_p8_e2_cp1_h64_k512", "c4_p8_e4_cp1_h64_k512"]
    rows += [dict(ours, op="prefill_sparse", case=case) for case in others]
    rows += [dict(ours, op="prefill_dense", case="c4_p8_e2_cp1_h64_k512", implementation="flashmla")]
    figure = Figure()
    assert plots.growth(rows, figure)
    curves = {
        (axes.get_title(), line.get_label()): list(line.get_xdata())
        for axes in figure.axes
        for line in axes.get_lines()
    }
    assert curves == {
        ("c4, 2 rows, 64 heads", "sparse"): [1024, 2048],
        ("c128, 2 rows, 64 heads", "sparse"): [1024, 2048, 4096],
        ("c128, 2 rows, 64 heads", "dense"): [1024, 2048, 4096],
    }


def test_plots(tmp_path):
    (tmp_path / "2026-01-01-gpu.jsonl").write_text("\n".join(json.dumps(row) for row in rows_of_every_kind()))
    assert plots.draw(tmp_path, tmp_path / "out") == ["roofline", "flashmla", "growth", "scaling"]
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 200_000


@pytest.mark.parametrize(
    "gone, left",
    [
        (0, ["roofline", "growth", "scaling"]),
        (3, ["roofline", "flashmla", "growth"]),
        (5, ["roofline", "flashmla", "scaling"]),
    ],
)
def test_only_what_has_rows_is_drawn(tmp_path, gone, left):
    rows = rows_of_every_kind()
    del rows[gone]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert plots.draw(tmp_path, tmp_path / "out") == left


def test_the_last_row_of_a_case_counts(tmp_path):
    for name, us in (("2026-01-02-gpu", 2), ("2026-01-01-gpu", 1)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(rows_of_every_kind()[0] | dict(us=us)))
    (row,) = plots.load(tmp_path)
    assert row["us"] == 2


def test_intensity():
    row = dict(case="d512_h64_k640_s4096_kv32768", us=1.0, tflops=2 * 64 * 4096 * 640 * 1024 / 1e6)
    want = 2 * 64 * 640 * 1024 / (2 * 64 * 1024 + 4 * 640)
    assert plots.flop_per_byte(row) == pytest.approx(want)
    assert plots.flop_per_byte(row | dict(case="d512_h64_k128+512_b4096")) == pytest.approx(want)
    assert plots.flop_per_byte(row | dict(case="d512_h64_k128+512_b64")) is None
    assert plots.flop_per_byte(dict(case="c4_p1")) is None


def test_numbers_in_pictures():
    assert sorted(["h64_k640", "h128_k512", "h64_k1152"], key=plots.natural) == ["h64_k640", "h64_k1152", "h128_k512"]
    assert [plots.number(x) for x in (14.29, 99.94, 1234.5)] == ["14.3", "99.9", "1,234"]


def test_timeline_of_a_trace():
    events = [
        ("Stream #1", "sparse_mla_attention_d512", 150.0, 600.0), ("Stream #1", "gather_dequant_V4", 105.0, 12.0),
        ("Stream #2", "ncclDevKernel_AllGather", 100.0, 40.0), ("Stream #1", "loop_add_fusion", 104.0, 1.0),
    ]  # fmt: skip
    assert profile_layer.timeline(events).splitlines()[2:] == [
        "| 0.0 | 40.0 | collective | Stream #2 | `ncclDevKernel_AllGather` |",
        "| 4.0 | 1.0 |  | Stream #1 | `loop_add_fusion` |",
        "| 5.0 | 12.0 | gather | Stream #1 | `gather_dequant_V4` |",
        "| 50.0 | 600.0 | attention | Stream #1 | `sparse_mla_attention_d512` |",
        "| 650.0 | | end | | |",
    ]


def test_item_of_a_kernel_trace():
    """Two blocks of three warpgroups; the second output of the first block's warpgroup 0 ends item 1."""
    spec = ProfilerSpec(entries_per_warpgroup=3 + 4 * 3)
    notes = [
        [("output", 0, 10), ("softmax", 13, 15), ("output", 15, 20)], [("logits", 12, 16)], [],
        [("output", 0, 99)], [], [],
    ]  # fmt: skip
    buffer = np.zeros((6, 15), np.uint32)
    for row, scopes in zip(buffer, notes):
        words = [
            w
            for name, *ends in scopes
            for flag, t in zip((0, spec.EXIT), ends)
            for w in (spec.intern_name(name) | flag, t)
        ]
        row[2], row[3 : 3 + len(words)] = len(words), words
    file = io.StringIO()
    profile_kernel.write_scopes(spec, buffer.reshape(-1), file, (2,), (384,))
    scopes = [profile_kernel.Scope(*scope) for scope in json.loads(file.getvalue())]
    assert profile_kernel.one_item(scopes, 1).splitlines()[2:] == [
        "| 2 | 4 |  | logits |  |",
        "| 3 | 2 | softmax |  |  |",
        "| 5 | 5 | output |  |  |",
        "| 10 | | end | | |",
    ]
    with pytest.raises(SystemExit, match="There are 2 outputs"):
        profile_kernel.one_item(scopes, 2)

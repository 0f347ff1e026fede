import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsa_cp_jax import DSAConfig, show_bug, validate
from dsa_cp_jax.engine import Arm, Engine, contiguous_query_pos
from dsa_cp_jax.model import Decoder
from dsa_cp_jax.prompts import DEFAULT_PROMPTS, Prompt, PromptError, default_prompts
from dsa_cp_jax.report import PromptReport, compare_logits, find_failures, write_json
from dsa_cp_jax.validate import cut, main
from tests.helpers.world import traced_once


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b"caf\xe9", r"is not UTF-8 text \(byte 3\)"),
        (
            b"x" * 3000,
            r"3000 tokens \(and 16 new ones\) needs 12 pages of 256 tokens, the pool has 11; pass --pages 12",
        ),
    ],
)
def test_prompt_file_errors(tmp_path, capsys, content, message):
    """They are found before anything is computed or written."""
    file, report = tmp_path / "text.txt", tmp_path / "report.json"
    if content is not None:
        file.write_bytes(content)
    assert main(["validate", "--prompt-file", str(file), "--pages", "11", "--json", str(report)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not report.exists()


def test_default_prompts():
    for cp_size in (2, 3, 4, 8):
        prompts = default_prompts(cp_size, quick=False)
        assert [abs(len(p) - 10_600) < 60 and len(p) % cp_size == 0 for p in prompts] == [True] * 2 + [False] * 8
        padded = [len(p) % cp_size != 0 for p in prompts]
        assert padded == [purpose == "padded" for _, _, purpose in DEFAULT_PROMPTS]
        assert sum(padded) >= 4 and len(prompts) == 10 and sum(len(p) < 1024 for p in prompts) >= 4
    assert b"doctest" in bytes(prompts[0].tokens.astype(np.uint8))
    assert [len(p) for p in default_prompts(4, quick=True)] == [2600, 384, 129, 21]


def test_stripped_documentation_is_an_error(monkeypatch):
    monkeypatch.setattr("dsa_cp_jax.prompts.documentation", lambda module: b"")
    with pytest.raises(PromptError, match=r"doctest.*--prompt-file"):
        default_prompts(4, quick=True)


def test_write_json_is_all_or_nothing(tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    write_json(file, dict(a=1))
    assert json.loads(file.read_text()) == dict(a=1)

    def interrupted(data, handle, **kwargs):
        handle.write('{"a": ')
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json(file, dict(a=2))
    assert json.loads(file.read_text()) == dict(a=1)
    assert os.listdir(tmp_path) == ["report.json"]


def test_ctrl_c_leaves_no_json(tmp_path):
    """A real interrupt of a real run, in the middle of it."""
    file = tmp_path / "report.json"
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background starts with it ignored
        "from dsa_cp_jax.validate import main\n"
        "print('ready', flush=True)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, "validate", "--quick", "--json", str(file)]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout.readline() == "ready\n"
        time.sleep(2)
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=300)  # it comes through when XLA is done with what it compiles
    finally:
        job.kill()
    assert job.returncode == 130 and "interrupted" in err, err
    assert os.listdir(tmp_path) == []


def test_a_lost_interrupt_comes_through():
    """An interrupt that is swallowed where it is raised (as in a callback) ends the job at its next step."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), validate.Progress(4) as bar:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        bar.advance("next")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cp", "1"],
        ["--pages", "0"],
        ["--batch", "0"],
        ["--gate", "narrow"],
        ["--json", "/no/such/place/r.json"],
        ["--json", "."],
        ["--show-bug", "/no/such/place/x.png"],
        ["--show-bug", "x.foo"],
        ["--show-bug", "x.png", "--cp", "17"],
        ["--num-processes", "0", "--process-id", "0", "--coordinator", "localhost:1"],
    ],
)
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(["validate", *arguments])
    assert error.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_too_few_devices(capsys):
    assert main(["validate", "--cp", "64"]) == 2
    assert "--cp 64 needs 64 devices" in capsys.readouterr().err


def test_default_prompts_that_do_not_fit(capsys):
    assert main(["validate", "--quick", "--pages", "4"]) == 2
    assert "needs 11 pages of 256 tokens, the pool has 4; pass --pages 11" in capsys.readouterr().err


def test_nan_logits_do_not_pass():
    nan = np.array([[0.0, np.nan, 1.0]])
    difference, _, _ = compare_logits({"ref": np.array([[0.0, 3.0, 1.0]]), "b": nan}, "ref")
    assert np.isnan(difference)


def test_compare_logits():
    """The largest difference is 0.1: step 1 is a tie (gap 0.3) and differs, the others are not (gaps 2 and 0.5)."""
    ours = np.array([[0.0, 1, 3], [2, 2.3, 0], [0, 2, 2.5]])
    theirs = np.array([[0.1, 1, 3], [2.1, 2.2, 0], [0, 2, 2.5]])
    third = ours.copy()
    difference, ties, differs = compare_logits({"ref": ours, "b": theirs, "c": third}, "ref")
    assert difference == pytest.approx(0.1)
    np.testing.assert_array_equal(ties, [False, True, False])
    np.testing.assert_array_equal(differs, [False, False, False])
    third[1, 0] = 2.35
    difference, ties, differs = compare_logits({"ref": ours, "b": theirs, "c": third}, "ref")
    assert difference == pytest.approx(0.35)
    np.testing.assert_array_equal(ties, [False, True, True])
    np.testing.assert_array_equal(differs, [False, True, False])


REPORT = PromptReport(
    name="text", tokens=8, chunks=[dict(tokens=8, path="sparse", reason="")], must_be_sparse=True, generated=[1] * 100,
    steps=100, ties=2, mismatches=0, tied_mismatches=1, max_logit_difference=9e-4, gate_ok=True, seconds={},
)  # fmt: skip
DENSE = [dict(tokens=8, path="dense", reason="")]


@pytest.mark.parametrize(
    "change, control, failure",
    [
        ({}, 1.1e-2, None),
        (dict(mismatches=1), 1.1e-2, "1 of 100 tokens differ"),
        (dict(max_logit_difference=1e-3), 1.1e-2, "the bound is"),
        (dict(max_logit_difference=float("nan")), 1.1e-2, "the bound is"),
        (dict(ties=3), 1.1e-2, "3 of 100 steps are ties"),
        (dict(gate_ok=False), 1.1e-2, "the path that the gate says"),
        (dict(chunks=DENSE), 1.1e-2, "a chunk ran dense, all must run sparse"),
        (dict(must_be_sparse=False), 1.1e-2, "the last chunk ran sparse, it must run dense"),
        (dict(must_be_sparse=False, chunks=DENSE), 1.1e-2, None),
        ({}, 9.9e-3, "positive control"),
        ({}, float("nan"), "positive control"),
    ],
)
def test_exit_code_rule(change, control, failure):
    failures = find_failures([dataclasses.replace(REPORT, **change)], dict(max_logit_difference=control), 1e-3)
    if failure is None:
        assert failures == []
    else:
        assert len(failures) == 1 and failure in failures[0]


@functools.cache
def tiny_engine(cp_size: int, requests: int = 1, gate: str = "seed") -> Engine:
    config = dataclasses.replace(DSAConfig.tiny(), topk=8, swa_page_size=64)
    model = Decoder(config, ("c4",), vocab_size=256, mlp_size=32, rngs=nnx.Rngs(0))
    return Engine(
        model, devices=jax.devices("cpu")[:cp_size], token_capacity=64, pages=5, attention_dtype=jnp.float32,
        requests=requests, gate=gate,
    )  # fmt: skip


def test_arms_agree_and_the_table_says_so(capsys, monkeypatch):
    """The whole comparison with one small layer: two chunks unpadded, one padded, one prompt shorter than the ranks."""
    text = np.random.default_rng(0).integers(0, 256, 300).astype(np.int32)
    prompts = [Prompt("long", text[:96]), Prompt("padded", text[100:171]), Prompt("short", text[200:201])]
    monkeypatch.setattr(validate, "NEW_TOKENS", 4)
    engine = tiny_engine(2)
    report = validate.validate(engine, prompts, bound=1e-2)
    printed = capsys.readouterr().out
    assert report["passed"], printed
    json.dumps(report)
    for expected in (
        "    1 x sparse: one request, 64 tokens over cp_size=2\n    1 x sparse: one request, 32 tokens over cp_size=2\n",
        "    1 x dense: padded: 7 tokens are no multiple of cp_size=2\n",
        "passed: 3 prompts, 1 at a time, seed gate, arms cp 1, sparse + cp 2, dense + cp 2: 12 steps, 0 ties",
    ):
        assert expected in printed
    paths = {p["name"]: [c["path"] for c in p["chunks"]] for p in report["prompts"]}
    assert paths == dict(long=["sparse", "sparse"], padded=["sparse", "dense"], short=["dense"])
    assert report["control"]["max_logit_difference"] > 0.1 and report["control"]["tokens"] == 96


def test_cut():
    assert cut([5], 3) == [[3], [2]] and cut([1, 7, 0], 6) == [[1, 3, 0], [0, 4, 0]] and cut([0, 0], 4) == []


def test_prompts_read_together(capsys, monkeypatch):
    """Four prompts of any length in one chunk, each read alone by the reference; a fifth has the last batch to itself."""
    monkeypatch.setattr(validate, "NEW_TOKENS", 3)
    text = np.random.default_rng(1).integers(0, 256, 400).astype(np.int32)
    prompts = [Prompt(str(n), text[n : n + n]) for n in (90, 33, 1, 64, 51)]
    report = validate.validate(tiny_engine(2, requests=4, gate="wide"), prompts, bound=1e-2)
    assert report["passed"], capsys.readouterr().out
    chunks = [[(c["tokens"], c["path"]) for c in prompt["chunks"]] for prompt in report["prompts"]]
    assert chunks[0] == [(16, "sparse"), (21, "sparse"), (32, "sparse"), (21, "sparse")] and chunks[4] == [
        (51, "sparse")
    ]
    assert {path for prompt in chunks for _, path in prompt} == {"sparse"}


def test_control_of_a_prompt_that_pads(capsys, monkeypatch):
    """The control needs the sparse path: it reads the longest prompt without the last tokens."""
    monkeypatch.setattr(validate, "NEW_TOKENS", 1)
    text = np.random.default_rng(0).integers(0, 256, 39).astype(np.int32)
    report = validate.validate(tiny_engine(2), [Prompt("odd", text)], bound=1e-2)
    assert report["passed"] and report["control"]["tokens"] == 38
    with pytest.raises(PromptError, match="No prompt has cp_size=2 tokens"):
        validate.validate(tiny_engine(2), [Prompt("tiny", text[:1])], bound=1e-2)


def test_one_trace_for_all_lengths_and_arms():
    engine = tiny_engine.__wrapped__(2)
    engine.step = jax.jit(traced_once(engine._step), static_argnames=("cp_size", "path"), donate_argnames="caches")
    arms = [Arm("sparse", 2), Arm("dense", 2, allow_sparse=False), Arm("naive", 2, contiguous=True)]
    tokens = np.arange(64, dtype=np.int32)
    results = [[session.feed(tokens[:n]) for n in (64, 2, 33)] for session in map(engine.start, arms)]
    assert [[r.ran_sparse for r in chunk] for chunk in results] == [
        [True, True, False],
        [False] * 3,
        [True, True, False],
    ]
    assert [bool(r.gate) for r in results[1]] == [True, True, False]
    np.testing.assert_allclose(results[0][1].logits, results[1][1].logits, atol=1e-2)
    assert np.abs(results[0][1].logits - results[2][1].logits).max() > 0.1


def test_naive_positions():
    plan = show_bug.bug_plan(4)
    naive = np.asarray(contiguous_query_pos(plan))
    assert naive[4 * 7 + 3] == show_bug.PREFIX + 7 and plan.query_pos[4 * 7 + 3] == show_bug.PREFIX + 31


def test_show_bug(tmp_path, capsys, monkeypatch):
    text = show_bug.describe(show_bug.bug_plan(4))
    assert "   3   20      383   256..383       193..320                 misses the 63 nearest tokens" in text
    assert text.endswith("The naive geometry is wrong in 159 of 160 rows.")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["validate", "--show-bug", str(tmp_path / "bug.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_show_bug_picture(tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["validate", "--show-bug", str(tmp_path / "bug.png")]) == 0
    assert (tmp_path / "bug.png").read_bytes().startswith(b"\x89PNG")


def test_progress_bar(capsys, monkeypatch):
    bar = validate.Progress(4)
    bar.advance("silent where it is no terminal")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = validate.Progress(4)
    bar.advance("text: sparse")
    bar.advance("text: dense")
    shown = capsys.readouterr().err
    assert "[###############...............]  50% text: dense" in shown
    bar.clear()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [[], ["--gate", "wide", "--batch", "4"]])
def test_quick_run(batch, tmp_path):
    file = tmp_path / "report.json"
    assert main(["validate", "--quick", "--cp", "4", "--json", str(file), *batch]) == 0
    report = json.loads(file.read_text())
    assert report["passed"] and report["steps"] == 64 and len(report["prompts"]) == 4
    assert report["bound"] == 1e-3 and report["control"]["max_logit_difference"] > 5e-2
    if batch:
        assert {chunk["path"] for prompt in report["prompts"] for chunk in prompt["chunks"]} == {"sparse"}

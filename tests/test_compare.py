"""The comparison with FlashMLA: what it says where FlashMLA cannot run, and its code on our drop-in as the FlashMLA."""

import importlib.metadata
import json
import math
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compare_flashmla as compare
from dsa_cp_jax.compat import flash_mla


def test_says_what_is_missing_and_compares_with_stored_outputs(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    assert compare.main(["--json", str(tmp_path / "rows.json")]) == 0
    said = capsys.readouterr().out
    for words in (
        "torch: ",
        "(extra `compare`)",
        "sgl-flash-mla, flash-mla",
        "sglang-kernel",
        "vllm",
        "instead, without",
    ):
        assert words in said
    assert "us" not in said.split("flash_mla_sparse_fwd")[1].split()  # no times
    report = json.loads((tmp_path / "rows.json").read_text())
    assert report["against"] == "stored outputs" and any("torch" in reason for reason in report["missing"])
    assert {op: len(rows) for op, rows in report["ops"].items()} == {
        "flash_mla_sparse_fwd": 6, "flash_mla_with_kvcache": 3,
    }  # fmt: skip
    assert all(row["agrees"] for rows in report["ops"].values() for row in rows)


def test_disagreement_is_seen():
    out, lse = jnp.ones((2, 3, 4)), jnp.array([[1.0, jnp.inf, 2.0]] * 2)
    assert compare.differences(out, lse, out, lse)["agrees"]
    for change in (
        (out.at[0, 0].set(jnp.nan), lse), (out.at[0, 0, 0].add(0.1), lse), (out, lse.at[0, 0].add(2e-4)),
        (out, lse.at[0, 1].set(3.0)), (out, lse.at[0, 0].set(jnp.inf)), (out, lse.at[0, 0].set(jnp.nan)),
        (out, lse * math.log2(math.e)),
    ):  # fmt: skip
        assert not compare.differences(*change, out, lse)["agrees"]


def test_a_disagreement_makes_the_exit_code(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    row = dict(case="a", features="b", implementation="xla", max_abs=1.0, cosine_difference=1.0, max_lse_difference=0.0)
    monkeypatch.setattr(compare, "compare_golden", lambda: {"op": [row | dict(agrees=False)]})
    assert compare.main([]) == 1 and "NO" in capsys.readouterr().out


@pytest.mark.parametrize("module, distribution", [("sgl_kernel.flash_mla", "sgl-kernel"), ("flash_mla", "flash-mla")])
def test_finds_what_is_installed(monkeypatch, module, distribution):
    fake = types.ModuleType(module)
    fake.flash_mla_sparse_fwd = lambda q, kv, indices, sm_scale, d_v=512: None
    if module == "flash_mla":
        fake.flash_mla_sparse_fwd = flash_mla.flash_mla_sparse_fwd
    monkeypatch.setitem(sys.modules, module.split(".")[0], fake)
    monkeypatch.setitem(sys.modules, module, fake)

    def version(name):
        if name != distribution:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found, reasons = compare.find_flashmla()
    assert (found.module, found.package, found.version, reasons) == (fake, distribution, "1.2.3", [])
    assert found.options == (dict(use_legacy=True) if module == "flash_mla" else {})
    assert found.takes("flash_mla_sparse_fwd", "topk_length") == (module == "flash_mla")


# ---------------------------------------------------------------------------------------------------- with torch
@pytest.fixture
def ours(monkeypatch):
    """Our drop-in in FlashMLA's place, and sizes for a CPU."""
    pytest.importorskip("torch")
    monkeypatch.setattr(compare, "S_Q", 5)
    monkeypatch.setattr(compare, "S_KV", 300)
    monkeypatch.setattr(compare, "PAGES", {256: 2, 64: 3})
    monkeypatch.setattr(compare, "time_both", lambda ours, theirs: dict(flashmla_us=2.0, us=1.0, ratio=2.0))
    return compare.FlashMLA(flash_mla, "our own", "0", {})


def test_same_inputs_through_both(ours, capsys, monkeypatch):
    monkeypatch.setattr(compare, "SPARSE", [c._replace(h_q=3, topk=40) for c in compare.SPARSE])
    monkeypatch.setattr(compare, "PAGED", [c._replace(h_q=3, b=4, topk=20) for c in compare.PAGED])
    rows = compare.compare(ours, quick=False)
    assert [len(some) for some in rows.values()] == [5, 4]
    assert all(row["agrees"] and row["max_abs"] == 0 for some in rows.values() for row in some)
    assert "its sparse lse is natural" in capsys.readouterr().out
    assert "2.000" in compare.table("op", rows["flash_mla_sparse_fwd"])


def test_log_base_is_measured(ours, monkeypatch, capsys):
    """A FlashMLA of 2025: base 2, d 576 only, neither sinks nor lengths, another decoding interface."""

    def sparse_fwd(q, kv, indices, sm_scale, d_v=512):
        assert q.shape[-1] == kv.shape[-1] == 576
        return flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale, return_log2_lse=True)

    old = types.SimpleNamespace(
        flash_mla_sparse_fwd=sparse_fwd,
        flash_mla_with_kvcache=lambda q, k_cache: None, __name__="old",
    )  # fmt: skip
    ours = compare.FlashMLA(old, "old", "0", {})
    monkeypatch.setattr(compare, "SPARSE", [c._replace(h_q=3, topk=40) for c in compare.SPARSE])
    ours.log_base = compare.measure_log_base(ours)
    assert ours.log_base == 2.0
    for quick in (False, True):
        rows = compare.compare(ours, quick)
        said = capsys.readouterr().out
        assert "base 2 (converted" in said and said.count("left out") == 2
        assert list(rows) == ["flash_mla_sparse_fwd"] and len(rows["flash_mla_sparse_fwd"]) == 1
        assert all(row["agrees"] and row["max_lse_difference"] < 1e-5 for row in rows["flash_mla_sparse_fwd"])


def test_one_that_does_not_run_is_a_reason(ours, monkeypatch, capsys):
    """vLLM's module can be imported without its kernels."""

    def sparse_fwd(q, kv, indices, sm_scale):
        raise RuntimeError("_flashmla_C is not available")

    ours.module = types.SimpleNamespace(flash_mla_sparse_fwd=sparse_fwd)
    monkeypatch.setattr(compare, "missing", lambda: (ours, []))
    monkeypatch.setattr(compare, "compare_golden", lambda: {"op": []})
    assert compare.main([]) == 1  # nothing was compared
    assert "our own 0 does not run: RuntimeError: _flashmla_C is not available" in capsys.readouterr().out


def test_another_module_of_that_name_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", types.ModuleType("flash_mla"))
    found, reasons = compare.find_flashmla()
    assert found is None and any(reason.startswith("flash_mla (") and "AttributeError" in reason for reason in reasons)


@pytest.mark.gpu
def test_against_flashmla(capsys):
    found, reasons = compare.missing()
    if found is None or reasons:
        pytest.skip("; ".join(reasons))
    assert compare.main(["--quick"]) == 0
    assert np.isfinite(compare.measure_log_base(found)) and "ratio" in capsys.readouterr().out

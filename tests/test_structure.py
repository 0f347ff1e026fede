"""The shape of the code base: who imports whom, what is public, what must not appear."""

import ast
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import dsa_cp_jax
import pallas_kernels
from dsa_cp_jax.compat import flash_mla

ROOT = pathlib.Path(__file__).parents[1]
OPS = ("gather_dequant", "swa_combine", "sparse_mla", "paged_mla")
SOURCES = sorted((ROOT / "dsa_cp_jax").rglob("*.py")) + sorted((ROOT / "pallas_kernels").rglob("*.py"))


def imports(path: pathlib.Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_data_flow(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    names = set(imports(path))
    tops = {name.split(".")[0] for name in names}
    assert "chex" not in tops
    if parts[0] == "pallas_kernels":
        assert not tops & {"dsa_cp_jax", "flax"}
        if len(parts) > 2:
            others = [op for op in OPS if op != parts[1]]
            assert not [n for n in names for op in others if n.startswith(f"pallas_kernels.{op}")], (
                "ops import one another"
            )
    else:
        used = [n for n in names if n.startswith("pallas_kernels.")]
        allowed = tuple(f"pallas_kernels.{n}" for n in ("common", *pallas_kernels.__all__))
        assert not [n for n in used if not n.startswith(allowed)], "kernels come from the package pallas_kernels"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_hidden_state_and_no_long_files(path):
    text = path.read_text()
    assert not re.search(r"os\.environ|getenv", text) or path.name == "validate.py", "environment variable"
    assert not [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Global)], "module global"
    lines = text.count("\n")
    assert lines <= 400 or "lines" in ast.get_docstring(ast.parse(text)), f"{lines} lines without a reason"


def test_check_vma_is_off_in_one_place_at_most():
    places = [
        path
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "check_vma" and ast.unparse(node.value) == "False"
    ]
    assert len(places) <= 1, places


def test_imports_are_light():
    """Importing loads neither flax nor Mosaic nor Pallas nor torch, touches no device, and reads no GPU."""
    code = (
        "import sys, dsa_cp_jax.compat.flash_mla, pallas_kernels, jax._src.xla_bridge as bridge\n"
        "assert not bridge._backends, bridge._backends\n"
        "bad = [m for m in sys.modules if m.startswith(('flax', 'torch', 'jax.experimental.pallas', 'jax.experimental.mosaic'))]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("module", [dsa_cp_jax, pallas_kernels, flash_mla], ids=lambda m: m.__name__)
def test_public_names_are_documented(module):
    for name in module.__all__:
        thing = getattr(module, name)
        doc = inspect.getdoc(thing)
        assert doc, name
        if inspect.isfunction(thing) and len(inspect.signature(thing).parameters) > 1:
            missing = [p for p in inspect.signature(thing).parameters if not re.search(rf"\b{p}\b", doc)]
            assert not missing, f"{name}: {missing}"


def test_public_surface():
    """The names that other code is written against."""
    assert {
        "KVLayout", "quantize_pages", "gather_dequant", "gather_workspace", "combine_swa_indices", "sparse_mla_attention",
        "paged_mla_attention", "merge_attention", "apply_attn_sink",
    } <= set(pallas_kernels.__all__)  # fmt: skip
    assert {
        "DSAConfig", "KVPool", "write_kv", "PrefillChunk", "make_plan", "split_round_robin", "merge_round_robin",
        "can_use_sparse_prefill", "sparse_prefill_predicate", "dsa_prefill_attention", "dsa_prefill_attention_local",
    } <= set(dsa_cp_jax.__all__)  # fmt: skip


SIGNATURES = {
    "gather_dequant": "pages slots * layout page_size num_slots implementation interpret",
    "gather_workspace": "compressed_pages compressed_slots swa_pages swa_slots * compressed_layout compressed_page_size"
    " swa_layout swa_page_size num_compressed num_swa implementation interpret",
    "combine_swa_indices": "topk_indices query_pos query_req compressed_base swa_base swa_first_pos"
    " * compress_ratio topk window implementation interpret",
    "sparse_mla_attention": "q kv indices topk_length attn_sink * sm_scale d_v implementation interpret",
    "paged_mla_attention": "q pages indices topk_length attn_sink extra_pages extra_indices extra_topk_length"
    " * layout page_size extra_layout extra_page_size sm_scale d_v implementation interpret",
    "merge_attention": "out_a lse_a out_b lse_b",
    "apply_attn_sink": "out lse attn_sink",
    "quantize_pages": "rows * layout page_size",
    "write_kv": "pool slots rows",
    "make_plan": "chunk config * cp_size",
    "split_round_robin": "x cp_size",
    "merge_round_robin": "x cp_size n",
    "can_use_sparse_prefill": "q_num_rows extend_lens * is_cp_round_robin cp_num_rows cp_size",
    "sparse_prefill_predicate": "num_reqs num_tokens * cp_size",
    "dsa_prefill_attention": "q plan swa_pool compressed_pool topk_indices attn_sink"
    " * kind config mesh cp_axis head_axis path implementation interpret",
    "dsa_prefill_attention_local": "q plan swa_pool compressed_pool topk_indices attn_sink"
    " * kind config cp_axis path implementation interpret",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    """Other code is written against these: arrays in this order, statics by keyword. New keywords may be added."""
    function = getattr(pallas_kernels, name, None) or getattr(dsa_cp_jax, name)
    arrays, _, statics = SIGNATURES[name].partition("* ")
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD] == arrays.split()
    assert set(statics.split()) <= {p.name for p in parameters if p.kind == p.KEYWORD_ONLY}


def test_goldens_are_small():
    assert sum(p.stat().st_size for p in (ROOT / "tests" / "golden").rglob("*") if p.is_file()) < 25e6

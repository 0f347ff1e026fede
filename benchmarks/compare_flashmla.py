"""Compares with FlashMLA on the same inputs: python -m benchmarks.compare_flashmla [--quick] [--json FILE]

FlashMLA comes from whichever of sgl-flash-mla, flash-mla, sglang-kernel and vLLM is installed, with torch (extra
`compare`). Inputs are made by JAX and handed to torch by dlpack, so both read the same bytes: bfloat16, float32 and
int32 arrays as they are, FP8 pages as uint8, which FlashMLA takes, too. A table per op tells how far the results are
apart, the device time of each (CUPTI, the median of the launches, 2 GiB written before each) and their ratio.

Without a GPU or without FlashMLA it says what is missing and compares with stored outputs of FlashMLA instead.
The exit code is 1 if something disagrees (cosine difference of 2e-5, lse apart by 1e-4, or an infinity in one only).

JAX takes 75% of a GPU's memory when it starts; with torch in the same process it must not: the benchmarks set
XLA_PYTHON_CLIENT_PREALLOCATE=false before that, unless the variable is set already.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _harness as harness
from pallas_kernels import KVLayout, paged_mla_attention, quantize_pages, sparse_mla_attention
from pallas_kernels.common import runs_on_hopper

PACKAGES = {
    "flash_mla": ("sgl-flash-mla", "flash-mla"),
    "sgl_kernel.flash_mla": ("sglang-kernel", "sgl-kernel"),
    "vllm.v1.attention.ops.flashmla": ("vllm",),
}
"""Module with FlashMLA's interface -> distributions that bring it."""
S_Q, S_KV, PAGES = 4096, 32_768, {256: 128, 64: 512}
LAUNCHES = 16


class Sparse(NamedTuple):
    d: int
    h_q: int
    topk: int
    features: bool  # attn_sink and topk_length (uniform in 1..topk)


class Paged(NamedTuple):
    d: int
    h_q: int
    b: int
    topk: int
    extra_topk: int


SPARSE = [
    Sparse(512, 64, 640, True), Sparse(512, 64, 640, False), Sparse(512, 128, 1152, False),
    Sparse(512, 128, 1152, True), Sparse(576, 128, 2048, False),
]  # fmt: skip
PAGED = [
    Paged(512, 64, 4096, 128, 512), Paged(512, 128, 4096, 128, 1024), Paged(512, 64, 64, 128, 512),
    Paged(576, 128, 128, 2048, 0),
]  # fmt: skip


@dataclasses.dataclass
class FlashMLA:
    """An installed FlashMLA."""

    module: Any
    package: str
    version: str
    options: dict
    log_base: float = math.e

    def takes(self, function: str, argument: str) -> bool:
        return argument in inspect.signature(getattr(self.module, function)).parameters

    def sparse(self, q, kv, indices, topk_length, attn_sink, sm_scale):
        """Out, max_logits and lse; attn_sink and topk_length came in 2026."""
        more = {} if attn_sink is None else dict(attn_sink=attn_sink, topk_length=topk_length)
        return self.module.flash_mla_sparse_fwd(q, kv, indices, sm_scale, **more, **self.options)


def find_flashmla() -> tuple[FlashMLA | None, list[str]]:
    """The first FlashMLA that can be imported, or why none can."""
    reasons = []
    for name, distributions in PACKAGES.items():
        try:
            module = importlib.import_module(name)
            inspect.signature(module.flash_mla_sparse_fwd)  # another module may have that name
        except Exception as error:  # a library that does not load raises whatever it likes
            reasons.append(f"{name} ({', '.join(distributions)}): {type(error).__name__}: {error}")
            continue
        package, version = name, "of unknown version"
        for distribution in distributions:
            try:
                package, version = distribution, importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                pass
        found = FlashMLA(module, package, version, {})
        if found.takes("flash_mla_sparse_fwd", "use_legacy"):  # its kernels for Hopper, in sgl-flash-mla
            found.options = dict(use_legacy=True)
        return found, []
    return None, reasons


def measure_log_base(flashmla: FlashMLA) -> float:
    """The base of the lse that `flash_mla_sparse_fwd` returns, by 128 equal keys.

    Base 2 before FlashMLA 082094b (2026-01-16), e since; but SGLang's builds went on with base 2 after that (its pull
    request 18902), so neither version nor date tells.
    """
    # d 576: the versions with base 2 take every d for that
    q, kv = (as_torch(jnp.zeros((n, m, 576), jnp.bfloat16)) for n, m in ((1, 64), (128, 1)))
    indices = as_torch(jnp.arange(128, dtype=jnp.int32)[None, None])
    lse = float(flashmla.sparse(q, kv, indices, None, None, 1.0)[2][0, 0])
    return min((2.0, math.e), key=lambda base: abs(math.log(128) / math.log(base) - lse))


def missing() -> tuple[FlashMLA | None, list[str]]:
    """FlashMLA, and what keeps it from running here."""
    reasons = []
    if jax.default_backend() != "gpu":
        reasons.append(f"a GPU that JAX can use: its devices are {jax.default_backend()} only (extra `cuda`)")
    try:
        import torch

        if not torch.cuda.is_available():
            reasons.append(f"a GPU that torch can use: torch {torch.__version__} finds none")
    except ImportError as error:
        reasons.append(f"torch: {error} (extra `compare`)")
    flashmla, more = find_flashmla()
    return flashmla, reasons + [f"FlashMLA: {reason}" for reason in more]


# ------------------------------------------------------------------------------------------------------------- inputs
def sparse_arrays(case: Sparse):
    """The arguments of `flash_mla_sparse_fwd`: q, kv, indices, topk_length, attn_sink."""
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (S_Q, case.h_q, case.d), jnp.bfloat16)
    kv = jax.random.normal(keys[1], (S_KV, 1, case.d), jnp.bfloat16)
    indices = jax.random.randint(keys[2], (S_Q, 1, case.topk), 0, S_KV, jnp.int32)
    if not case.features:
        return q, kv, indices, None, None
    return (
        q,
        kv,
        indices,
        jax.random.randint(keys[3], (S_Q,), 1, case.topk + 1),
        jax.random.normal(keys[4], (case.h_q,)),
    )


def run_sparse(case: Sparse, q, kv, indices, topk_length, attn_sink, implementation=None):
    return sparse_mla_attention(
        q, kv[:, 0], indices[:, 0], topk_length, attn_sink, sm_scale=case.d**-0.5, implementation=implementation
    )


def paged_arrays(case: Paged):
    """q, attn_sink, and (pages, slots) of the main pool and of the extra one."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    scopes = []
    for page_size, topk in zip(PAGES, (case.topk, case.extra_topk)):
        if topk:
            rows = jax.random.normal(next(keys), (PAGES[page_size], page_size, case.d), jnp.bfloat16)
            slots = jax.random.randint(next(keys), (case.b, topk), 0, page_size * PAGES[page_size], jnp.int32)
            scopes.append((quantize_pages(rows, layout=layout_of(case.d), page_size=page_size), slots))
    q = jax.random.normal(next(keys), (case.b, case.h_q, case.d), jnp.bfloat16)
    return q, jax.random.normal(next(keys), (case.h_q,)), scopes


def run_paged(case: Paged, q, attn_sink, scopes, implementation=None):
    layout, (main, *extra) = layout_of(case.d), scopes
    statics: dict = dict(layout=layout, page_size=256)
    if extra:
        statics |= dict(extra_layout=layout, extra_page_size=64)
    args = (q, *main, None, attn_sink, *(extra[0] if extra else ()))
    return paged_mla_attention(*args, **statics, sm_scale=case.d**-0.5, implementation=implementation)


def compiled(cases: list, make: Callable, run: Callable) -> list[tuple]:
    """(case, program that makes the arrays, program of ours) of each case, compiled side by side."""
    makes = [jax.jit(functools.partial(make, case)) for case in cases]
    runs = [(jax.jit(functools.partial(run, case)), jax.eval_shape(make)) for case, make in zip(cases, makes)]
    programs = harness.compile_all([(make, ()) for make in makes] + runs)
    return list(zip(cases, programs, programs[len(cases) :]))


def layout_of(d: int) -> KVLayout:
    return KVLayout.V4 if d == 512 else KVLayout.V32


def as_torch(x: Any) -> Any:
    """The same memory as a torch tensor."""
    if x is None:
        return None
    (tensor,) = harness.as_torch(x)
    assert tensor.data_ptr() == x.unsafe_buffer_pointer(), "copied"
    return tensor


# --------------------------------------------------------------------------------------------------------- comparisons
def differences(out, lse, their_out, their_lse) -> dict:
    """Largest absolute differences and the cosine difference of the outputs, and whether they agree."""
    out, lse, their_out, their_lse = (jnp.asarray(x, jnp.float32) for x in (out, lse, their_out, their_lse))
    infinite = jnp.isinf(their_lse)
    same_infinities = bool((jnp.where(infinite, their_lse, 0) == jnp.where(jnp.isinf(lse), lse, 0)).all())
    squares = float((out**2 + their_out**2).sum())
    cosine = float(((out - their_out) ** 2).sum()) / squares if squares else 0.0
    apart = float(jnp.abs(jnp.where(infinite, 0, lse - their_lse)).max())
    agrees = same_infinities and cosine < 2e-5 and apart < 1e-4  # NaN does not
    return dict(
        max_abs=float(jnp.abs(out - their_out).max()), cosine_difference=cosine, max_lse_difference=apart, agrees=agrees
    )


def time_both(ours: Callable, theirs: Callable) -> dict:
    their_us, _ = harness.torch_device_us(theirs, launches=LAUNCHES)
    us, _ = harness.device_us(lambda i: ours(), launches=LAUNCHES)
    return dict(flashmla_us=round(their_us, 2), us=round(us, 2), ratio=round(their_us / us, 3))


def runs_as(op: Callable, *args, **kwargs) -> str:
    """The implementation that the op chooses."""
    try:
        jax.eval_shape(functools.partial(op, implementation="mosaic_gpu", **kwargs), *args)
    except NotImplementedError:
        return "xla"
    return "mosaic_gpu" if runs_on_hopper() else "xla"


def compare_sparse(flashmla: FlashMLA, case: Sparse, make: Callable, run: Callable) -> dict:
    arrays = make()
    tensors = [as_torch(x) for x in arrays]

    def theirs():
        return flashmla.sparse(*tensors, sm_scale=case.d**-0.5)

    their_out, _, their_lse = (jnp.from_dlpack(x) for x in theirs())
    got = run(*arrays)
    return dict(
        case=f"d{case.d}_h{case.h_q}_k{case.topk}_s{S_Q}_kv{S_KV}",
        features="sink, lengths uniform" if case.features else "plain",
        implementation=runs_as(functools.partial(run_sparse, case), *arrays),
        **differences(got.out, got.lse, their_out, their_lse * math.log(flashmla.log_base)),
        **time_both(lambda: run(*arrays), theirs),
    )


def compare_paged(flashmla: FlashMLA, case: Paged, make: Callable, run: Callable) -> dict:
    q, sink, scopes = arrays = make()
    layout = layout_of(case.d)

    def cache(pages, page_size):
        tensor, width = as_torch(pages), layout.bytes_per_token
        return tensor[:, : page_size * width].view(-1, page_size, 1, width)

    (pages, slots), *extra = scopes
    more = {}
    if extra:
        slots_of_extra = as_torch(extra[0][1])[:, None]
        more = dict(extra_k_cache=cache(extra[0][0], 64), extra_indices_in_kvcache=slots_of_extra)
    meta, _ = flashmla.module.get_mla_metadata()
    theirs = functools.partial(
        flashmla.module.flash_mla_with_kvcache, as_torch(q)[:, None], cache(pages, 256), None, None, 512, meta,
        softmax_scale=case.d**-0.5, is_fp8_kvcache=True, indices=as_torch(slots)[:, None], attn_sink=as_torch(sink),
        **more, **flashmla.options,
    )  # fmt: skip
    their_out, their_lse = theirs()
    their_out, their_lse = jnp.from_dlpack(their_out[:, 0]), jnp.from_dlpack(their_lse[..., 0].contiguous())
    got = run(*arrays)
    return dict(
        case=f"{layout.name}_h{case.h_q}_b{case.b}_k{case.topk}+{case.extra_topk}", features="sink",
        implementation=runs_as(functools.partial(run_paged, case), *arrays),
        **differences(got.out, got.lse, their_out, their_lse),
        **time_both(lambda: run(*arrays), theirs),
    )  # fmt: skip


def compare_golden() -> dict[str, list[dict]]:
    """Stored outputs of sgl-flash-mla 1.0.0, made on an H200, against ours on the device at hand."""
    from tests.helpers.oracles import GOLDEN, golden

    rows: dict[str, list[dict]] = {"flash_mla_sparse_fwd": [], "flash_mla_with_kvcache": []}
    op: Any
    for path in sorted((GOLDEN / "flashmla").glob("*.npz")):
        z = golden(f"flashmla/{path.name}")
        z = {k: jnp.asarray(v) if isinstance(v, np.ndarray) and v.ndim else v for k, v in z.items()}
        statics: dict = dict(sm_scale=float(z["sm_scale"]))
        layout = layout_of(z["q"].shape[-1])
        if "kv" in z:
            op, args = sparse_mla_attention, [z["q"], z["kv"][:, 0], z["indices"][:, 0]]
            their_out, their_lse = z["out"], z["lse"]
        else:
            op, args = paged_mla_attention, [z["q"][:, 0], z["k_cache_raw"], z["indices"][:, 0]]
            statics |= dict(layout=layout, page_size=int(z["page"]))
            their_out, their_lse = z["out"][:, 0], z["lse"][..., 0]
        args += [z.get("topk_length"), z.get("attn_sink")]
        if "extra_k_cache_raw" in z:
            args += [z["extra_k_cache_raw"], z["extra_indices"][:, 0], z.get("extra_topk_length")]
            statics |= dict(extra_layout=layout, extra_page_size=int(z["extra_page"]))
        got = op(*args, **statics)
        rows["flash_mla_sparse_fwd" if "kv" in z else "flash_mla_with_kvcache"].append(
            dict(case=path.stem, features="stored", implementation=runs_as(op, *args, **statics))
            | differences(got.out, got.lse, their_out, their_lse)
        )
    return rows


# ---------------------------------------------------------------------------------------------------------------- main
def table(op: str, rows: list[dict]) -> str:
    columns = dict(
        case="case", features="features", implementation="ours runs as", max_abs="max abs", agrees="agrees",
        cosine_difference="cosine diff", max_lse_difference="max lse diff", flashmla_us="FlashMLA, us", us="ours, us",
        ratio="ratio",
    )  # fmt: skip

    def cell(value):
        if isinstance(value, str):
            return value
        if isinstance(value, bool):
            return "yes" if value else "NO"
        return f"{value:.1e}" if 0 < abs(value) < 0.1 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"

    columns = {key: title for key, title in columns.items() if any(key in row for row in rows)}
    lines = [list(columns.values())] + [[cell(row[key]) for key in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join([op] + ["  " + "  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in lines])


def compare(flashmla: FlashMLA, quick: bool) -> dict[str, list[dict]]:
    base = "natural" if flashmla.log_base == math.e else "base 2 (converted for the comparison)"
    print(
        f"FlashMLA: {flashmla.package} {flashmla.version}, module {flashmla.module.__name__}; its sparse lse is {base}"
    )
    sparse, paged = SPARSE, PAGED
    if not flashmla.takes("flash_mla_sparse_fwd", "topk_length"):
        print(
            "flash_mla_sparse_fwd of this version has no attn_sink, no topk_length and d 576 only: others are left out"
        )
        sparse = [case for case in sparse if not case.features and case.d == 576]
    if quick:
        sparse, paged = sparse[:1], paged[:1]
    programs = compiled(sparse, sparse_arrays, run_sparse)
    rows = {"flash_mla_sparse_fwd": [compare_sparse(flashmla, *program) for program in programs]}
    if not flashmla.takes("flash_mla_with_kvcache", "extra_k_cache"):
        print("flash_mla_with_kvcache of this version has neither extra_k_cache nor attn_sink: it is left out")
        return rows
    programs = compiled(paged, paged_arrays, run_paged)
    return rows | {"flash_mla_with_kvcache": [compare_paged(flashmla, *program) for program in programs]}


def find_working() -> tuple[FlashMLA | None, list[str]]:
    """FlashMLA, its log base measured, and what keeps it from running here."""
    flashmla, reasons = missing()
    if flashmla is not None and not reasons:
        try:
            flashmla.log_base = measure_log_base(flashmla)
        except Exception as error:  # vLLM's module, say, is there without its kernels
            reasons = [f"FlashMLA: {flashmla.package} {flashmla.version} does not run: {type(error).__name__}: {error}"]
    return flashmla, reasons


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="file to write the rows to")
    parser.add_argument("--quick", action="store_true", help="one case per op")
    args = parser.parse_args(argv)
    flashmla, reasons = find_working()
    if flashmla is None or reasons:
        print("The comparison with FlashMLA itself cannot run. Missing:")
        print("\n".join(f"  * {reason}" for reason in reasons))
        print(
            "Stored outputs of FlashMLA (tests/golden/flashmla: sgl-flash-mla 1.0.0, one H200) instead, without times:"
        )
        rows = compare_golden()
    else:
        rows = compare(flashmla, args.quick)
    for op, some in rows.items():
        print(table(op, some))
    if args.json:
        against = f"{flashmla.package} {flashmla.version}" if flashmla and not reasons else "stored outputs"
        about = dict(against=against, missing=reasons, **harness.about_this_run())
        args.json.write_text(json.dumps(about | dict(ops=rows), indent=1))
    compared = [row for some in rows.values() for row in some]
    return 0 if compared and all(row["agrees"] for row in compared) else 1


if __name__ == "__main__":
    sys.exit(main())

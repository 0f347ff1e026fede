"""Times the paged gather: python -m benchmarks.bench_gather_dequant [--out FILE]

Device time (CUPTI), median of 25 launches, each after 2 GiB were written: cold and dirty L2. Both implementations are
checked against each other first. The baseline is SGLang's Triton kernel on the same bytes, where sglang is installed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _harness as harness
from pallas_kernels import KVLayout, gather_dequant, gather_workspace

#        case, rows, page size, random pages
CASES = [
    ("V4_n262144_p64", 262_144, 64, False),
    ("V4_n262144_p64_random_pages", 262_144, 64, True),
    ("V4_n65536_p256", 65_536, 256, False),
    ("V4_n20607_p64", 20_607, 64, False),
]


def random_pages(rng, layout: KVLayout, page_size: int, num_pages: int) -> jax.Array:
    pages = rng.integers(0, 256, (num_pages, layout.page_stride(page_size)), dtype=np.uint8)
    if layout.scales_behind_page:
        at = layout.scale_offset(page_size)
        scales = pages[:, at : at + page_size * layout.scale_stride]
        scales[...] = rng.integers(117, 137, scales.shape)
    elif layout.d_fp8:
        tokens = pages[:, : page_size * layout.data_bytes].reshape(num_pages, page_size, layout.data_bytes)
        scales = rng.uniform(1e-3, 1, (num_pages, page_size, layout.num_scales)).astype(np.float32)
        tokens[..., layout.d_fp8 : layout.plain_offset] = scales.view(np.uint8)
    return jnp.array(pages)


def slots_of(rng, n: int, page_size: int, num_pages: int, random: bool) -> jax.Array:
    page = rng.permutation(num_pages) if random else np.arange(num_pages)
    token = np.arange(n)
    return jnp.array(page[token // page_size] * page_size + token % page_size, jnp.int32)


def moved_bytes(layout: KVLayout, n: int) -> int:
    return n * (layout.bytes_per_token + 4 + layout.d * layout.dtype.itemsize)


def difference(got, want, live: int) -> float:
    got, want = (jnp.nan_to_num(x[:live].astype(jnp.float32)) for x in (got, want))
    return float(jnp.abs(got - want).max()) if live else 0.0


def sglang_kernel():
    """SGLang's gather of V4 pages as a function of torch tensors, or None."""
    try:
        from sglang.kernels.ops.attention.dsv4.dequant_k_cache import dequantize_k_cache_paged_dsv4
    except ImportError:
        return None
    return dequantize_k_cache_paged_dsv4


def measure(results, case, layout, page_size, pages, slots, *, live=None, with_baseline=False, xla=True):
    """`live` None: no count is given; else it is traced."""
    run = jax.jit(gather_dequant, static_argnames=("layout", "page_size", "implementation"))
    sizes = dict(layout=layout, page_size=page_size)
    count = None if live is None else jnp.int32(live)
    n = slots.shape[0] if live is None else live
    want = run(pages, slots, **sizes, num_slots=count, implementation="xla")
    moved, baseline = moved_bytes(layout, n), {}
    if with_baseline and (kernel := sglang_kernel()):
        tensors = harness.as_torch(pages, slots)
        times = harness.torch_device_us(lambda: kernel(*tensors, page_size))
        error = difference(jnp.from_dlpack(kernel(*tensors, page_size)[:, 0]), want, n)
        results.add(**harness.row("gather_dequant", case, "sglang_triton", times, moved, max_abs_err=error))
        baseline = dict(baseline_us=round(times[0], 2), bar=1.0)
    for name in ("mosaic_gpu", "xla") if xla else ("mosaic_gpu",):
        error = difference(run(pages, slots, **sizes, num_slots=count, implementation=name), want, n)
        times = harness.device_us(
            lambda i, name=name: run(pages, slots, **sizes, num_slots=count, implementation=name)
        )  # fmt: skip
        against = baseline if name == "mosaic_gpu" else {}
        results.add(**harness.row("gather_dequant", case, name, times, moved, max_abs_err=error, **against))


def measure_workspace(results, rng):
    """A c4 layer's workspace: prefix 61,440, extend 4,096 (16,384 compressed entries, 4,223 window positions)."""
    n_c, n_s, layout = 16_384, 4_223, KVLayout.V4
    args = (
        random_pages(rng, layout, 64, 300), slots_of(rng, n_c, 64, 300, True),
        random_pages(rng, layout, 256, 30), slots_of(rng, n_s, 256, 30, True),
    )  # fmt: skip
    counts = dict(num_compressed=jnp.int32(n_c), num_swa=jnp.int32(n_s))

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(*args, **kwargs):
        return gather_workspace(
            *args, **kwargs, compressed_layout=layout, compressed_page_size=64, swa_layout=layout, swa_page_size=256
        )

    want = run(*args, **counts, implementation="xla")
    for name in ("mosaic_gpu", "xla"):
        error = difference(run(*args, **counts, implementation=name), want, n_c + n_s)
        times = harness.device_us(lambda i, name=name: run(*args, **counts, implementation=name))
        moved, case = moved_bytes(layout, n_c + n_s), f"V4_c{n_c}_p64_s{n_s}_p256"
        results.add(**harness.row("gather_workspace", case, name, times, moved, max_abs_err=error))


def main():
    results = harness.Results(harness.parser(__doc__, parts=False).parse_args().out)
    rng = np.random.default_rng(0)
    for case, n, page_size, random in CASES:
        num_pages = -(-n // page_size) + 8
        args = (
            KVLayout.V4, page_size, random_pages(rng, KVLayout.V4, page_size, num_pages),
            slots_of(rng, n, page_size, num_pages, random),
        )  # fmt: skip
        measure(results, case, *args, with_baseline=True)
        if case == "V4_n262144_p64":
            measure(results, f"{case}_live{n}", *args, live=n, with_baseline=True, xla=False)
            for live in (20_607, 1, 0):
                measure(results, f"{case}_live{live}", *args, live=live, xla=False)
    for layout in (KVLayout.V32, KVLayout.BF16, KVLayout.BF16.with_d(576)):
        case = f"{layout.name}_d{layout.d}_n262144_p64_random_pages"
        pages, slots = random_pages(rng, layout, 64, 4_104), slots_of(rng, 262_144, 64, 4_104, True)
        measure(results, case, layout, 64, pages, slots, xla=False)
    measure_workspace(results, rng)


if __name__ == "__main__":
    main()

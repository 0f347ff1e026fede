"""Times the strided combine: python -m benchmarks.bench_swa_combine [--out FILE]

Device time (CUPTI), median of 25 launches, each after 2 GiB were written: cold and dirty L2. Both implementations are
checked against each other first. The baseline is SGLang's Triton kernel on the same rows, where sglang is installed.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _harness as harness
from pallas_kernels import combine_swa_indices

WINDOW = 128
#        case, rows, topk, explicit top-k, compress ratio
CASES = [
    ("c4_4096x(512+128)", 4_096, 512, True, 4),
    ("c4_16384x(512+128)", 16_384, 512, True, 4),
    ("c4_4096x(1024+128)", 4_096, 1_024, True, 4),
    ("c4_16384x(1024+128)", 16_384, 1_024, True, 4),
    ("c128_4096x(8192+128)", 4_096, 8_192, False, 128),
    ("c0_131072x128", 131_072, 0, True, 1),
]


def main():
    results = harness.Results(harness.parser(__doc__, parts=False).parse_args().out)
    for case in CASES:
        measure(results, *case)


def sglang_launch(topk_indices, pos, first_pos, compressed_base, swa_base, topk, ratio):
    """A launch of SGLang's combine for the same rows, one request of them all, or None."""
    try:
        from sglang.kernels.ops.attention.dsv4.sparse_prefill_kernels import combine_topk_swa_indices
    except ImportError:
        return None
    rows = pos.shape[0]
    # SGLang derives the first gathered position as seq_len - gather_len.
    seq_lens = jnp.full(1, 2**30, jnp.int32)
    tensors = harness.as_torch(
        topk_indices, jnp.array([0, rows], jnp.int32), pos, seq_lens, seq_lens - first_pos, compressed_base, swa_base
    )
    return lambda: combine_topk_swa_indices(*tensors, WINDOW, ratio, topk)


def measure(results, case, rows, topk, explicit, ratio):
    rng = np.random.default_rng(0)
    # late positions: every row keeps its whole top-k
    pos = jnp.array(rng.integers(topk * ratio, 2**20 + topk * ratio, rows), jnp.int32)
    topk_indices = jnp.array(rng.integers(0, 2**18, (rows, topk)), jnp.int32) if explicit else None
    bases = [jnp.array(rng.integers(0, 100_000, 1), jnp.int32) for _ in range(3)]
    args = topk_indices, pos, jnp.zeros(rows, jnp.int32), *bases
    width = -(-(topk + WINDOW) // 128) * 128
    num_bytes = 4 * rows * ((topk if explicit else 0) + width + 3)
    run = jax.jit(combine_swa_indices, static_argnames=("compress_ratio", "topk", "window", "implementation"))
    sizes = dict(compress_ratio=ratio, topk=None if explicit else topk, window=WINDOW)
    want = run(*args, **sizes, implementation="xla")
    baseline = {}
    compressed_base, swa_base, first_pos = bases
    launch = sglang_launch(topk_indices, pos, first_pos, compressed_base, swa_base, topk, ratio) if explicit else None
    if launch is not None:
        error = max(int(jnp.abs(jnp.from_dlpack(a) - b).max()) for a, b in zip(launch(), want))
        times = harness.torch_device_us(launch)
        row = harness.row("combine_swa_indices", case, "sglang_triton", times, num_bytes, max_abs_err=error)
        results.add(**row)
        baseline = dict(baseline_us=row["us"], bar=1.0)
    for name in ("mosaic_gpu", "xla"):
        got = run(*args, **sizes, implementation=name)
        error = max(int(jnp.abs(a - b).max()) for a, b in zip(got, want))
        times = harness.device_us(lambda i, name=name: run(*args, **sizes, implementation=name))
        against = baseline if name == "mosaic_gpu" else {}
        results.add(**harness.row("combine_swa_indices", case, name, times, num_bytes, max_abs_err=error, **against))


if __name__ == "__main__":
    main()

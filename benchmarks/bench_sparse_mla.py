"""Times sparse MLA attention: python -m benchmarks.bench_sparse_mla [--flashmla FILE] [--quick] ...

Random valid indices, s_q 4096. Device time (CUPTI), median of 24 launches, each after 2 GiB were written, and the mean
of 60 back to back (power-limited). `--flashmla` names the shared library of sgl-flash-mla 1.0.0, _C_legacy.abi3.so
(needs torch): FlashMLA then runs in the same process, on the same arrays, with the same features, and is the baseline.
The first rows of every case are compared with the formula in float64.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _harness as harness
from pallas_kernels import sparse_mla_attention

S_Q = 4096
BAR = 1.05
CHECKED_ROWS = 8
#       d_qk, h_q, topk
TABLE = [(512, 64, 640), (512, 128, 640), (512, 128, 1152), (512, 64, 512), (512, 128, 1024), (576, 128, 2048)]
FEATURES = ["plain", "sink+length", "uniform length"]


class Case(NamedTuple):
    d: int
    h_q: int
    topk: int
    features: str = "plain"
    s_kv: int = 32_768


def cases(quick: bool) -> list[Case]:
    table = [Case(*shape, features) for shape in TABLE for features in FEATURES]
    if quick:
        return table
    table += [Case(*shape, s_kv=s_kv) for shape in TABLE for s_kv in (8_192, 131_072)]
    return table + [Case(512, h_q, 640, "sink+length") for h_q in (8, 16, 32)]  # tensor-parallel slices


def main():
    parser = harness.parser(__doc__)
    parser.add_argument("--flashmla", help="shared library of sgl-flash-mla")
    parser.add_argument("--quick", action="store_true", help="the table only")
    args = parser.parse_args()
    results = harness.Results(args.out)
    flashmla = load_flashmla(args.flashmla) if args.flashmla else None
    for case in harness.of_part(cases(args.quick), args.part):
        run = jax.jit(functools.partial(sparse_mla_attention, sm_scale=case.d**-0.5, implementation="mosaic_gpu"))
        run = run.lower(*jax.eval_shape(functools.partial(arrays, case))).compile()
        with harness.alone():
            measure(results, flashmla, case, run)


def arrays(case: Case):
    d, h_q, topk, features, s_kv = case
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (S_Q, h_q, d), jnp.bfloat16)
    kv = jax.random.normal(keys[1], (s_kv, d), jnp.bfloat16)
    indices = jax.random.randint(keys[2], (S_Q, topk), 0, s_kv, jnp.int32)
    if features == "plain":
        return q, kv, indices, None, None
    length = jnp.full(S_Q, topk, jnp.int32)
    if features == "uniform length":
        length = jax.random.randint(keys[3], (S_Q,), 1, topk + 1, jnp.int32)
    return q, kv, indices, length, jax.random.normal(keys[4], (h_q,))


def largest_error(args, sm_scale, out) -> float:
    """Of the first rows, against the formula in float64."""
    q, kv, indices, length, sink = args
    keys = kv[indices[:CHECKED_ROWS]]
    q, keys, out = (np.asarray(x[:CHECKED_ROWS].astype(jnp.float32), np.float64) for x in (q, keys, out))
    worst = 0.0
    for t in range(CHECKED_ROWS):
        k = keys[t] if length is None else keys[t, : int(length[t])]
        p = np.exp(q[t] @ k.T * sm_scale)
        total = p.sum(1) + (0 if sink is None else np.exp(np.asarray(sink, np.float64)))
        worst = max(worst, np.abs(p @ k[:, :512] / total[:, None] - out[t]).max())
    return float(worst)


def measure(results, flashmla, case: Case, run):
    args = arrays(case)
    d, h_q, topk, features, s_kv = case
    columns = S_Q * topk if args[3] is None else int(args[3].sum())
    flop = 2 * h_q * columns * (d + 512)
    name = f"d{d}_h{h_q}_k{topk}_s{S_Q}_kv{s_kv}"
    row = functools.partial(harness.flop_row, "sparse_mla_attention", name, features=features)

    baseline = {}
    if flashmla is not None and h_q in (64, 128):
        launch, ready = flashmla(args, d**-0.5)
        times = harness.device_us(launch, launches=24, ready=ready)
        hot = harness.back_to_back_us(launch, ready=ready)
        results.add(**row("flashmla", times, flop, max_abs_err=None, us_back_to_back=round(hot, 2)))
        baseline = dict(baseline_us=round(times[0], 2), bar=BAR, baseline="sgl-flash-mla 1.0.0, same run")
    error = largest_error(args, d**-0.5, run(*args).out)
    times = harness.device_us(lambda i: run(*args), launches=24)
    hot = harness.back_to_back_us(lambda i: run(*args))
    results.add(**row("mosaic_gpu", times, flop, max_abs_err=error, us_back_to_back=round(hot, 2), **baseline))


def load_flashmla(library: str):
    """A function from our arguments and sm_scale to (launch, ready) of FlashMLA on the same device arrays."""
    import torch

    torch.ops.load_library(library)

    def prepare(args, sm_scale):
        q, kv, indices = (torch.from_dlpack(x) for x in args[:3])
        length, sink = (None if x is None else torch.from_dlpack(x) for x in args[3:])

        def launch(i):
            return torch.ops.flash_mla_legacy.sparse_prefill_fwd(
                q, kv[:, None], indices[:, None], sm_scale, 512, sink, length, False, True
            )

        return launch, lambda result: torch.cuda.synchronize()

    return prepare


if __name__ == "__main__":
    main()

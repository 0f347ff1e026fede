"""Times paged MLA attention: python -m benchmarks.bench_paged_mla [--flashmla FILE] [--quick] ...

V4 pools of 32,768 slots each (main: pages of 256, extra: pages of 64), random valid slots, a sink. Device time (CUPTI),
median of 24 launches, each after 2 GiB were written, and the mean of 60 back to back (power-limited). `--flashmla`
names the shared library of sgl-flash-mla 1.0.0, _C_legacy.abi3.so (needs torch): FlashMLA then runs in the same
process, on the same arrays, its schedule computed beforehand, and is the baseline. The first rows of every case are
compared with plain jnp.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import _harness as harness
from pallas_kernels import KVLayout, paged_mla_attention, quantize_pages

BAR = 1.0
CHECKED_ROWS = 8
SLOTS = 32_768
SM_SCALE = 512**-0.5
STATICS = dict(layout=KVLayout.V4, page_size=256, extra_layout=KVLayout.V4, extra_page_size=64, sm_scale=SM_SCALE)


class Case(NamedTuple):
    b: int
    h_q: int
    extra: int  # columns; 128 of the main pool
    features: str = "plain"


def cases(quick: bool) -> list[Case]:
    table = [Case(4096, h_q, extra) for h_q in (64, 128) for extra in (512, 1024)]
    if quick:
        return table
    table += [case._replace(features="uniform length") for case in table]
    return table + [Case(b, h_q, 512) for b in (1, 8, 64) for h_q in (64, 128)]  # decode


def main():
    parser = harness.parser(__doc__)
    parser.add_argument("--flashmla", help="shared library of sgl-flash-mla")
    parser.add_argument("--quick", action="store_true", help="the four shapes that have a bar only")
    args = parser.parse_args()
    results = harness.Results(args.out)
    flashmla = load_flashmla(args.flashmla) if args.flashmla else None
    for case in harness.of_part(cases(args.quick), args.part):
        run, plain = programs(case)
        with harness.alone():
            measure(results, flashmla, case, run, plain)


def arrays(case: Case) -> dict:
    b, h_q, extra, features = case
    keys = jax.random.split(jax.random.key(0), 8)

    @functools.partial(jax.jit, static_argnums=1)
    def pages(key, page_size):
        rows = jax.random.normal(key, (SLOTS // page_size, page_size, 512), jnp.bfloat16)
        return quantize_pages(rows, layout=KVLayout.V4, page_size=page_size)

    given = dict(
        q=jax.random.normal(keys[0], (b, h_q, 512), jnp.bfloat16), pages=pages(keys[1], 256),
        indices=jax.random.randint(keys[2], (b, 128), 0, SLOTS, jnp.int32), extra_pages=pages(keys[4], 64),
        attn_sink=jax.random.normal(keys[3], (h_q,)),
        extra_indices=jax.random.randint(keys[5], (b, extra), 0, SLOTS, jnp.int32),
    )  # fmt: skip
    if features == "uniform length":
        given["topk_length"] = jax.random.randint(keys[6], (b,), 1, 129, jnp.int32)
        given["extra_topk_length"] = jax.random.randint(keys[7], (b,), 1, extra + 1, jnp.int32)
    return given


def first_rows(given: dict) -> dict:
    """The arguments for the rows that are checked."""
    whole = ("pages", "extra_pages", "attn_sink")
    return {name: x if name in whole else x[:CHECKED_ROWS] for name, x in given.items()}


def programs(case: Case):
    """The kernel, and plain jnp for the first rows."""
    run = jax.jit(functools.partial(paged_mla_attention, **STATICS, implementation="mosaic_gpu"))
    plain = functools.partial(paged_mla_attention, **STATICS, implementation="xla")
    plain = jax.jit(plain, compiler_options=harness.UNTUNED)
    given, few = (jax.eval_shape(make) for make in (lambda: arrays(case), lambda: first_rows(arrays(case))))
    return run.lower(**given).compile(), plain.lower(**few).compile()


def measure(results, flashmla, case: Case, run, plain):
    given = arrays(case)
    b, h_q, extra, features = case
    lengths = [given.get("topk_length"), given.get("extra_topk_length")]
    columns = sum(b * n if x is None else int(x.sum()) for x, n in zip(lengths, (128, extra)))
    name = f"d512_h{h_q}_k128+{extra}_b{b}"
    flop = 2 * h_q * columns * 1024
    row = functools.partial(harness.flop_row, "paged_mla_attention", name, features=features)

    baseline = {}
    if flashmla is not None:
        launch, ready = flashmla(given)
        times = harness.device_us(launch, launches=24, ready=ready)
        hot = harness.back_to_back_us(launch, ready=ready)
        results.add(**row("flashmla", times, flop, max_abs_err=None, us_back_to_back=round(hot, 2)))
        baseline = dict(baseline_us=round(times[0], 2), baseline="sgl-flash-mla 1.0.0, same run")
        baseline |= dict(bar=BAR) if b == 4096 and features == "plain" else {}
    want = plain(**first_rows(given)).out.astype(jnp.float32)
    error = float(jnp.abs(run(**given).out[:CHECKED_ROWS].astype(jnp.float32) - want).max())
    times = harness.device_us(lambda i: run(**given), launches=24)
    hot = harness.back_to_back_us(lambda i: run(**given))
    results.add(**row("mosaic_gpu", times, flop, max_abs_err=error, us_back_to_back=round(hot, 2), **baseline))


def load_flashmla(library: str):
    """A function from our arguments to (launch, ready) of FlashMLA on the same device arrays."""
    import torch

    torch.ops.load_library(library)

    def prepare(given):
        x = dict(zip(given, harness.as_torch(*given.values())))

        def cache(name, page_size):
            pages = x[name]
            return pages.as_strided((len(pages), page_size, 1, 584), (pages.shape[1], 584, 584, 1))

        schedule = [None, None]

        def launch(i):
            out, _, *schedule[:] = torch.ops.flash_mla_legacy.sparse_decode_fwd(
                x["q"][:, None], cache("pages", 256), x["indices"][:, None], x.get("topk_length"), x["attn_sink"],
                *schedule, cache("extra_pages", 64), x["extra_indices"][:, None], x.get("extra_topk_length"), 512,
                SM_SCALE, None,
            )  # fmt: skip
            return out

        launch(0)  # computes the schedule
        return launch, lambda result: torch.cuda.synchronize()

    return prepare


if __name__ == "__main__":
    main()

"""Draws what the project is about: the positions that each rank's rows select, by the right and the naive geometry."""

import sys
from pathlib import Path

import jax
import numpy as np

from dsa_cp_jax.chunk import ChunkPlan, PrefillChunk, make_plan
from dsa_cp_jax.config import DSAConfig
from dsa_cp_jax.engine import contiguous_query_pos
from pallas_kernels import combine_swa_indices

PREFIX, ROWS_PER_RANK = 300, 40
"""The chunk that is drawn: one request with PREFIX tokens cached, and so many new tokens per rank."""


def selected_positions(plan: ChunkPlan, query_pos) -> list[np.ndarray]:
    """The window positions that every chunk row selects (c0 layer) if its position is taken to be `query_pos`.

    Args:
      plan: the plan of a chunk of one request.
      query_pos: [token_capacity] int32.

    Returns:
      For each row, the positions that its workspace rows hold; a workspace row past the live ones holds -1.
    """
    no_topk = np.zeros((plan.token_capacity, 0), np.int32)
    rows = combine_swa_indices(
        no_topk, query_pos, plan.query_req, plan.swa.base * 0, plan.swa.base, plan.swa_first_pos, compress_ratio=1,
        implementation="xla",
    )  # fmt: skip
    first, count = int(plan.swa_first_pos[0]), int(plan.swa.count)
    positions = [index[:length] for index, length in zip(np.asarray(rows.indices), np.asarray(rows.lengths))]
    return [np.where((p >= 0) & (p < count), p + first, -1) for p in positions]


def bug_plan(cp_size: int) -> ChunkPlan:
    """The plan of the chunk that is drawn."""
    n = ROWS_PER_RANK * cp_size
    slots = np.arange(PREFIX + n)
    chunk = PrefillChunk.build(
        seq_lens=[PREFIX + n], extend_lens=[n], req_pool_indices=[0], req_to_token=slots[None], full_to_swa=slots,
        page_tables={}, token_capacity=n, cp_size=cp_size,
    )  # fmt: skip
    return jax.jit(make_plan, static_argnames=("config", "cp_size"))(chunk, config=DSAConfig.tiny(), cp_size=cp_size)


def describe(plan: ChunkPlan) -> str:
    """The selections of the first, a middle and the last row of each rank, in words."""
    right, naive = (selected_positions(plan, pos) for pos in (plan.query_pos, contiguous_query_pos(plan)))
    lines = [
        f"{plan.token_capacity} new tokens after {PREFIX}, round robin over {plan.cp_size} ranks, window 128.",
        f"{'rank':>4} {'row':>4} {'position':>8}   {'selects':<14} {'naive geometry selects':<24} fault",
    ]
    wrong = 0
    for g, (ours, theirs) in enumerate(zip(right, naive)):
        wrong += not np.array_equal(ours, theirs)
        rank, k = g % plan.cp_size, g // plan.cp_size
        if k in (0, ROWS_PER_RANK // 2, ROWS_PER_RANK - 1):
            missed = len(np.setdiff1d(ours, theirs))
            spans = (f"{p.min()}..{p.max()}" for p in (ours, theirs))
            fault = f"misses the {missed} nearest tokens" if missed else ""
            lines.append(
                "{:>4} {:>4} {:>8}   {:<14} {:<24} {}".format(rank, k, int(plan.query_pos[g]), *spans, fault).rstrip()
            )
    lines.append(f"The naive geometry is wrong in {wrong} of {plan.token_capacity} rows.")
    return "\n".join(lines)


def draw(plan: ChunkPlan, path: Path) -> None:
    """Draws the selections of all ranks into a PNG file. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * plan.cp_size, 4.6), layout="constrained")
    panels = figure.subplots(1, plan.cp_size, sharex=True, sharey=True, squeeze=False)[0]
    right, naive = (selected_positions(plan, pos) for pos in (plan.query_pos, contiguous_query_pos(plan)))
    pos = np.asarray(plan.query_pos)
    for rank, panel in enumerate(panels):
        rows = range(rank, plan.token_capacity, plan.cp_size)
        for selected, color, width, label in (
            (right, "#9ecae1", 3, "right"),
            (naive, "#d62728", 1, "naive, contiguous"),
        ):
            spans = [(selected[g].min(), selected[g].max()) for g in rows]
            panel.hlines(pos[list(rows)], *zip(*spans), color=color, lw=width, label=label)
        panel.plot(pos[rank :: plan.cp_size], pos[rank :: plan.cp_size], color="black", lw=1, label="the query itself")
        panel.set_title(f"rank {rank}")
        panel.set_xlabel("key position (tokens)")
    panels[0].set_ylabel("query position (tokens)")
    panels[0].legend(loc="lower right", fontsize=7)
    figure.suptitle("Window that each row selects: a rank holds every cp-th token, not a contiguous run")
    figure.savefig(path, dpi=120)


def show_bug(path: Path, *, cp_size: int) -> int:
    """Prints the selections and draws them to `path`. Returns an exit code: 2 if matplotlib is not there."""
    plan = bug_plan(cp_size)
    print(describe(plan))
    try:
        draw(plan, path)
    except ImportError:
        print("dsa-cp: the picture needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    print(f"drawn to {path}")
    return 0

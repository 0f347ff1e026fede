"""Draws the recorded rows for people: python -m benchmarks.plots [--results FILE|FOLDER] [--out FOLDER]

  roofline.png   every kernel, and the median ceiling of their runs: data movement by bytes, attention by FLOP per byte
  flashmla.png   FlashMLA's time over ours, where both were timed in the same run
  growth.png     layers on one GPU behind longer and longer prefixes
  scaling.png    layers over 1, 2, 4, ... GPUs

A picture is drawn where its rows exist. Where several rows are of the same case, the last one counts.
"""

import argparse
import json
import pathlib
import re
import statistics

ROOT = pathlib.Path(__file__).parents[1]
COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b"]


def load(results: pathlib.Path) -> list[dict]:
    """The rows of a JSONL file, or of all in a folder in the order of their names; the last of each case only."""
    last: dict[tuple, dict] = {}
    for file in sorted(results.glob("*.jsonl")) if results.is_dir() else [results]:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            key = row["op"], row["case"], row.get("features"), row["implementation"]
            last.pop(key, None)
            last[key] = row
    return list(last.values())


def flop_per_byte(row: dict) -> float | None:
    """Of attention on many rows: FLOP per byte of q, out and indices, which are read or written once."""
    match = re.fullmatch(r"d(\d+)_h(\d+)_k([\d+]+)_[sb](\d+)(_kv\d+)?", row["case"])
    if match is None:
        return None
    d, h_q, rows = (int(match[i]) for i in (1, 2, 4))
    if rows < 1024:  # a few rows do not fill the GPU
        return None
    topk = sum(map(int, match[3].split("+")))
    return row["tflops"] * row["us"] * 1e6 / (rows * (2 * h_q * (d + 512) + 4 * topk))


def natural(text: str) -> list:
    """A key that sorts numbers in the text by value."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


def number(x: float) -> str:
    """With a decimal below 100."""
    return f"{x:.1f}" if x < 100 else f"{x:,.0f}"


def by_op(rows: list[dict]) -> dict[str, list[dict]]:
    ops: dict[str, list[dict]] = {}
    for row in rows:
        ops.setdefault(row["op"], []).append(row)
    return ops


def roofline(rows: list[dict], figure) -> bool:
    ours = [row for row in rows if row["implementation"] == "mosaic_gpu"]
    moving = [row for row in ours if row.get("gbps")]
    attention = [(x, row) for row in ours if row.get("ceiling_tflops") and (x := flop_per_byte(row))]
    if not moving and not attention:
        return False
    panels = iter(figure.subplots(1, 2 if moving and attention else 1, squeeze=False)[0])
    if moving:
        axes = next(panels)
        for color, (op, some) in zip(COLORS, by_op(moving).items()):
            axes.plot([r["bytes"] / 1e6 for r in some], [r["gbps"] / 1e3 for r in some], "o", color=color, label=op)
        ceiling(axes, statistics.median(r["ceiling_gbps"] for r in moving) / 1e3, "2 GiB copy")
        axes.set(xscale="log", xlabel="bytes moved, MB", ylabel="TB/s", title="data movement")
        axes.set_xticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
        axes.minorticks_off()
    if attention:
        axes = next(panels)
        for color, op in zip(COLORS, ("sparse_mla_attention", "paged_mla_attention")):
            for marker, heads in zip("so", (64, 128)):
                some = [(x, r["tflops"]) for x, r in attention if r["op"] == op and f"_h{heads}_" in r["case"]]
                if some:
                    axes.plot(*zip(*some), marker, color=color, label=f"{op.split('_')[0]}, {heads} heads")
        ceiling(axes, statistics.median(row["ceiling_tflops"] for _, row in attention), "8192³ matrix product")
        axes.set(xlabel="FLOP per byte of queries, outputs, indices", ylabel="TFLOP/s", title="attention")
    return True


def ceiling(axes, value: float, name: str) -> None:
    axes.axhline(value, color="black", lw=1)
    axes.text(0.02, value, name, transform=axes.get_yaxis_transform(), va="bottom", fontsize=8)
    axes.set(ylim=(0, 1.15 * value))
    axes.legend(fontsize=8, loc="lower right")


def flashmla(rows: list[dict], figure) -> bool:
    ours = [row for row in rows if row["implementation"] == "mosaic_gpu" and row.get("ratio")]
    ours = [row for row in ours if "flash-mla" in (row.get("baseline") or "")]
    if not ours:
        return False
    ours.sort(key=lambda r: (r["op"] != "sparse_mla_attention", natural(r["case"]), r.get("features") or ""))
    figure.set_size_inches(9, 1.2 + 0.24 * len(ours))
    axes = figure.subplots()
    names = [f"{r['op'].removesuffix('_attention')}  {r['case']}  {r.get('features') or ''}" for r in ours]
    axes.barh(names, [r["ratio"] for r in ours], color=[COLORS[r["ratio"] < 1] for r in ours])
    for y, r in enumerate(ours):
        times = f"{number(r['us'])} µs, FlashMLA {number(r['baseline_us'])}"
        axes.text(0.02, y, times, va="center", fontsize=7, color="white")
    axes.axvline(1, color="black", lw=1)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set(xlabel="FlashMLA's time / ours, same run")
    return True


def growth(rows: list[dict], figure) -> bool:
    points: dict[tuple, dict[int, float]] = {}
    for row in rows:
        match = re.fullmatch(r"(c4|c128)_p(\d+)_e(\d+)_cp1_h(\d+)_k\d+", row["case"])
        if match and row["op"] in ("prefill_sparse", "prefill_dense") and row["implementation"] == "mosaic_gpu":
            kind, prefix, extend, heads = match.groups()
            panel = f"{kind}, {int(extend):,} rows, {heads} heads"
            points.setdefault((panel, row["op"].removeprefix("prefill_")), {})[int(prefix)] = row["us"]
    points = {key: times for key, times in points.items() if len(times) > 1}
    if not points:
        return False
    panels = sorted({panel for panel, _ in points}, key=natural)
    figure.set_size_inches(4.5 * len(panels), 3.4)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels):
        for color, path in zip(COLORS, ("sparse", "dense")):
            if times := points.get((panel, path)):
                axes.plot(*zip(*sorted(times.items())), "o-", color=color, label=path)
        axes.set(xscale="log", yscale="log", xlabel="prefix, tokens", title=panel)
        axes.grid(which="both", alpha=0.3)
        axes.legend(fontsize=8)
    figure.supylabel("µs per layer")
    return True


def scaling(rows: list[dict], figure) -> bool:
    points: dict[tuple, dict[int, float]] = {}
    for row in rows:
        match = re.fullmatch(r"(\w+)_p\d+_e(\d+)_cp(\d+)_h(\d+)_k\d+", row["case"])
        if match and row["op"] in ("prefill_layers", "prefill_blocks"):
            kind, extend, cp, heads = match.groups()
            what = row["op"].removeprefix("prefill_"), f"{int(extend):,} rows, {heads} heads"
            points.setdefault((*what, kind), {})[int(cp)] = row["us"]
    points = {key: times for key, times in points.items() if 1 in times and len(times) > 1}
    if not points:
        return False
    panels = sorted({key[:2] for key in points}, key=lambda panel: natural(str(panel)))
    figure.set_size_inches(3.2 * len(panels), 3.4)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels):
        sizes = sorted({cp for key, times in points.items() if key[:2] == panel for cp in times})
        axes.plot(sizes, sizes, color="black", lw=1, ls=":", label="linear")
        for color, kind in zip(COLORS, ("c0", "c4", "c128", "mix")):
            if times := points.get((*panel, kind)):
                axes.plot(*zip(*((cp, times[1] / times[cp]) for cp in sorted(times))), "o-", color=color, label=kind)
        axes.set(title="\n".join(panel), xlabel="GPUs", xticks=sizes)
        axes.legend(fontsize=8)
    figure.supylabel("times faster than one GPU")
    return True


PLOTS = dict(roofline=roofline, flashmla=flashmla, growth=growth, scaling=scaling)


def draw(results: pathlib.Path, out: pathlib.Path) -> list[str]:
    """Draws what there are rows for; returns the names of the pictures."""
    from matplotlib.figure import Figure

    rows, drawn = load(results), []
    for name, plot in PLOTS.items():
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        if not plot(rows, figure):
            print(f"{name}.png: no rows")
            continue
        out.mkdir(parents=True, exist_ok=True)
        figure.savefig(out / f"{name}.png", dpi=120, metadata=dict(Software=None))
        drawn.append(name)
        print(f"{name}.png: drawn")
    return drawn


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "plots")
    args = parser.parse_args()
    draw(args.results, args.out)


if __name__ == "__main__":
    main()

"""The main job's verdict: compares the arms' logits, says why the job fails, prints the table, writes the JSON."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CONTROL_FACTOR = 10
"""The naive geometry must differ by more than so many times the bound."""
TIE_FACTOR = 4
"""A step is a tie where the two best logits are closer than so many times the largest difference between the arms."""
MAX_TIES = 0.02
"""Share of the steps that may be ties."""


@dataclasses.dataclass(frozen=True)
class PromptReport:
    """What came out for one prompt.

    Attributes:
      name, tokens: of the prompt.
      chunks: [{tokens, path, reason}], prefill chunks of the sparse + CP arm, in order.
      must_be_sparse: every chunk has to be sparse (wide gate, or a prompt that is alone and does not pad); else the
        last one has to be dense.
      generated: tokens of the reference arm.
      steps, ties: generated tokens; those that are ties.
      mismatches, tied_mismatches: tokens that differ in some arm and are no ties; those that differ and are ties.
      max_logit_difference: over all arms and generated tokens.
      gate_ok: every chunk of every arm took the path that the host's gate says (the dense arm: dense).
      seconds: {arm: seconds}; of prompts that are read together, each has its share.
    """

    name: str
    tokens: int
    chunks: list[dict]
    must_be_sparse: bool
    generated: list[int]
    steps: int
    ties: int
    mismatches: int
    tied_mismatches: int
    max_logit_difference: float
    gate_ok: bool
    seconds: dict[str, float]


def compare_logits(logits: dict[str, np.ndarray], reference: str) -> tuple[float, np.ndarray, np.ndarray]:
    """Compares arms that were fed the same tokens.

    Args:
      logits: {arm: [steps, vocab]}.
      reference: name of the reference arm.

    Returns:
      Largest absolute difference from the reference; [steps] bool, ties: the reference's two best logits are closer
      than TIE_FACTOR times that difference; [steps] bool: the best token of some arm is another one.

    Two arms that differ by d pick different tokens only where the gap is at most 2 d, so with the difference of the
    same steps every step with different tokens is a tie. It is the bound on the difference, and the one on the number
    of ties, that make different tokens a failure.
    """
    ours = logits[reference]
    difference = float(np.max([np.abs(other - ours).max() for other in logits.values()]))  # NaN if there is one
    top = np.sort(ours, axis=-1)[:, -2:]
    ties = top[:, 1] - top[:, 0] < TIE_FACTOR * difference
    differs = np.any([other.argmax(-1) != ours.argmax(-1) for other in logits.values()], axis=0)
    return difference, ties, differs


def find_failures(reports: Sequence[PromptReport], control: dict, bound: float) -> list[str]:
    """Why the job fails, in words; empty if all arms agree."""
    failures = []
    for r in reports:
        if r.mismatches:
            failures.append(f"{r.name}: {r.mismatches} of {r.steps} tokens differ between the arms")
        if not r.max_logit_difference < bound:
            failures.append(f"{r.name}: logits differ by {r.max_logit_difference:.1e}, the bound is {bound:.0e}")
        if not r.gate_ok:
            failures.append(f"{r.name}: a chunk did not take the path that the gate says")
        paths = [chunk["path"] for chunk in r.chunks]
        if r.must_be_sparse and "dense" in paths:
            failures.append(f"{r.name}: a chunk ran dense, all must run sparse")
        if not r.must_be_sparse and paths[-1] != "dense":
            failures.append(f"{r.name}: the last chunk ran sparse, it must run dense")
    ties, steps = sum(r.ties for r in reports), sum(r.steps for r in reports)
    if ties > MAX_TIES * steps:
        failures.append(f"{ties} of {steps} steps are ties, more than {MAX_TIES:.0%}")
    if not control["max_logit_difference"] > CONTROL_FACTOR * bound:
        failures.append(
            f"positive control: the naive geometry differs by {control['max_logit_difference']:.1e} only, "
            f"less than {CONTROL_FACTOR} x {bound:.0e}: the comparison does not see the fault"
        )
    return failures


def print_table(reports: Sequence[PromptReport]) -> None:
    """One row per prompt; below it, the path that its chunks took, and why."""
    print(f"{'prompt':<18} {'tokens':>6} {'chunks':>6} {'equal':>5} {'ties':>4} {'max logit diff':>14} {'seconds':>8}")
    for r in reports:
        equal = "no" if r.mismatches else "tie" if r.tied_mismatches else "yes"
        print(
            f"{r.name:<18} {r.tokens:>6} {len(r.chunks):>6} {equal:>5} {r.ties:>4} {r.max_logit_difference:>14.1e} "
            f"{sum(r.seconds.values()):>8.1f}"
        )
        runs = []
        for chunk in r.chunks:
            key = (chunk["path"], chunk["reason"])
            if runs and runs[-1][0] == key:
                runs[-1][1] += 1
            else:
                runs.append([key, 1])
        for (path, reason), count in runs:
            print(f"    {count} x {path}: {reason}")


def write_json(path: Path, data: dict) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

"""The main job: a small decoder reads real text, and must write the same tokens with and without context parallelism.

Three arms run the same model over FP8 pools: no context parallelism (the reference), sparse + CP, dense + CP. A
fourth, the naive contiguous geometry, is the positive control: it shows that the comparison does see that fault.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import platform
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from dsa_cp_jax.config import DSAConfig
from dsa_cp_jax.engine import Arm, ChunkResult, Engine
from dsa_cp_jax.model import Decoder
from dsa_cp_jax.processes import ProcessError, start_processes
from dsa_cp_jax.progress import Progress
from dsa_cp_jax.prompts import Prompt, PromptError, check_fits, default_prompts, read_prompt
from pallas_kernels.common import cdiv

CONFIG = dataclasses.replace(DSAConfig.tiny(), swa_page_size=256, c4_page_size=64, c128_page_size=2)
KINDS = ("c0", "c128", "c4", "c128", "c4")
NEW_TOKENS = 16
BOUNDS = {"float32": 1e-3, "bfloat16": 3e-2}
"""Largest logit difference that the arms may have, for each dtype of the attention (bfloat16 on GPUs)."""
CONTROL_FACTOR = 10
"""The naive geometry must differ by more than so many times the bound."""
TIE_FACTOR = 4
"""A step is a tie where the two best logits are closer than so many times the largest difference between the arms."""
MAX_TIES = 0.02
"""Share of the steps that may be ties."""
ATTENTION_GAIN, LOGIT_GAIN = 0.05, 1.5
"""Scales of the attention's output and of the logits. Arms that agree up to rounding now and then store another FP8
value (a step of 6%), or select another one of two equally good entries. A small share of the attention keeps what such
an event does to the logits below the bound, and what the wrong geometry does is still far above it."""


def build_model() -> Decoder:
    """The main job's decoder: byte tokens, layers `KINDS`, 4 heads of 512, seeded random float32 parameters."""
    model = Decoder(CONFIG, KINDS, vocab_size=256, mlp_size=256, rngs=nnx.Rngs(0))
    for kernel, gain in [(model.head.kernel, LOGIT_GAIN)] + [
        (layer.attention.o_b_proj.kernel, ATTENTION_GAIN) for layer in model.layers
    ]:
        kernel[...] = kernel[...] * gain
    return model


@dataclasses.dataclass(frozen=True)
class PromptReport:
    """What came out for one prompt.

    Attributes:
      name, tokens: of the prompt.
      chunks: [{tokens, path, reason}], prefill chunks of the sparse + CP arm, in order.
      must_be_sparse: the prompt does not pad: every chunk has to be sparse.
      generated: tokens of the reference arm.
      steps, ties: generated tokens; those that are ties.
      mismatches, tied_mismatches: tokens that differ in some arm and are no ties; those that differ and are ties.
      max_logit_difference: over all arms and generated tokens.
      gate_ok: every chunk of every arm took the path that the host's gate says (the dense arm: dense).
      seconds: {arm: seconds}.
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


def prefill(engine: Engine, arm: Arm, prompt: Prompt, progress: Progress):
    """Reads a prompt chunk by chunk. Returns the session, which has it cached, and the list of ChunkResults."""
    session, results = engine.start(arm), []
    for start in range(0, len(prompt), engine.token_capacity):
        results.append(session.feed(prompt.tokens[start : start + engine.token_capacity]))
        progress.advance(f"{prompt.name}: {arm.name}")
    return session, results


def run_prompt(engine: Engine, arms: list[Arm], prompt: Prompt, progress: Progress) -> tuple[PromptReport, np.ndarray]:
    """Prefill and greedy decoding in all arms; the first is the reference, whose tokens all arms go on with.

    Returns:
      The report, and the reference's logits [vocab] after the prompt.
    """
    sessions, results, seconds = {}, {}, {}
    for arm in arms:
        begin = time.perf_counter()
        sessions[arm.name], results[arm.name] = prefill(engine, arm, prompt, progress)
        seconds[arm.name] = time.perf_counter() - begin
    prefills = {name: list(chunks) for name, chunks in results.items()}
    reference, generated = arms[0].name, []
    for step in range(NEW_TOKENS):
        best = results[reference][-1].logits.argmax()
        generated.append(int(multihost_utils.broadcast_one_to_all(best)))  # each process has a reference of its own
        if step == NEW_TOKENS - 1:
            break
        for arm in arms:
            begin = time.perf_counter()
            results[arm.name].append(sessions[arm.name].feed(np.array(generated[-1:], np.int32)))
            seconds[arm.name] += time.perf_counter() - begin
            progress.advance(f"{prompt.name}: {arm.name}")

    logits = {name: np.stack([r.logits for r in chunks[-NEW_TOKENS:]]) for name, chunks in results.items()}
    difference, ties, differs = compare_logits(logits, reference)

    def took_right_path(arm: Arm, result: ChunkResult) -> bool:
        return result.ran_sparse == (arm.allow_sparse and bool(result.gate))

    shown = next(arm for arm in arms if arm.cp_size > 1 and arm.allow_sparse)
    report = PromptReport(
        name=prompt.name,
        tokens=len(prompt),
        chunks=[
            dict(tokens=r.num_tokens, path="sparse" if r.ran_sparse else "dense", reason=r.gate.reason)
            for r in prefills[shown.name]
        ],
        must_be_sparse=len(prompt) % shown.cp_size == 0,
        generated=generated,
        steps=len(generated),
        ties=int(ties.sum()),
        mismatches=int((differs & ~ties).sum()),
        tied_mismatches=int((differs & ties).sum()),
        max_logit_difference=difference,
        gate_ok=all(took_right_path(arm, r) for arm in arms for r in results[arm.name]),
        seconds={name: round(s, 2) for name, s in seconds.items()},
    )
    return report, logits[reference][0]


def run_control(engine: Engine, prompt: Prompt, right: np.ndarray, progress: Progress) -> dict:
    """The positive control: how far the naive geometry is off after reading a prompt.

    Args:
      right: [vocab] logits of the reference arm after that prompt.
    """
    arm = Arm("naive geometry", max(engine.mesh), contiguous=True)
    wrong = prefill(engine, arm, prompt, progress)[1][-1].logits
    return dict(
        prompt=prompt.name, tokens=len(prompt), max_logit_difference=float(np.abs(right - wrong).max()),
        same_token=bool(right.argmax() == wrong.argmax()),
    )  # fmt: skip


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
            failures.append(f"{r.name}: {r.tokens} tokens do not pad, but a chunk ran dense")
        if not r.must_be_sparse and paths[-1] != "dense":
            failures.append(f"{r.name}: {r.tokens} tokens pad, but the last chunk did not run dense")
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


def pick_devices(cp_size: int | None, num_processes: int = 1) -> list[jax.Device]:
    """GPUs if there are enough of them, else virtual CPU devices; by default all GPUs where there are several, else 4.

    Raises:
      PromptError: there are fewer than cp_size devices, or some process has none of those.
    """
    with contextlib.suppress(RuntimeError):  # JAX runs already, with the devices that it has
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            jax.config.update("jax_num_cpu_devices", cdiv(cp_size or 4, num_processes))
    devices = jax.devices()
    if devices[0].platform != "cpu":
        cp_size = cp_size or (len(devices) if len(devices) > 1 else 4)
        if len(devices) < cp_size:
            devices = jax.devices("cpu")
    cp_size = cp_size or 4
    if len(devices) < cp_size:
        raise PromptError(f"--cp {cp_size} needs {cp_size} devices, there are {len(devices)}.")
    if len({device.process_index for device in devices[:cp_size]}) < num_processes:
        raise PromptError(f"--cp {cp_size} of {len(devices)} devices leaves some of {num_processes} processes without.")
    return devices[:cp_size]


def validate(engine: Engine, prompts: list[Prompt], bound: float) -> dict:
    """Runs all prompts and the control, prints the table and the summary, and returns the report for JSON."""
    begin = time.perf_counter()
    cp_size = max(engine.mesh)
    arms = [
        Arm("cp 1", 1),
        Arm(f"sparse + cp {cp_size}", cp_size),
        Arm(f"dense + cp {cp_size}", cp_size, allow_sparse=False),
    ]
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    uncut = prompts[longest]
    control_prompt = dataclasses.replace(uncut, tokens=uncut.tokens[: len(uncut) // cp_size * cp_size])
    if not len(control_prompt):
        raise PromptError(f"No prompt has cp_size={cp_size} tokens or more: nothing would run sparse.")
    chunks = [cdiv(len(p), engine.token_capacity) for p in prompts]
    total = len(arms) * (sum(chunks) + len(prompts) * (NEW_TOKENS - 1)) + 2 * chunks[longest]
    with Progress(total, shown=jax.process_index() == 0) as progress:
        reports, firsts = zip(*(run_prompt(engine, arms, prompt, progress) for prompt in prompts))
        right = firsts[longest]
        if len(control_prompt) < len(uncut):
            right = prefill(engine, arms[0], control_prompt, progress)[1][-1].logits
        control = run_control(engine, control_prompt, right, progress)
    failures = find_failures(reports, control, bound)
    seconds = time.perf_counter() - begin

    print_table(reports)
    print(
        f"positive control, naive contiguous geometry on {control['prompt']!r} ({control['tokens']} tokens): logits "
        f"off by {control['max_logit_difference']:.1e} (must exceed {CONTROL_FACTOR * bound:.0e}), "
        f"{'the same' if control['same_token'] else 'another'} first token"
    )
    steps, ties = sum(r.steps for r in reports), sum(r.ties for r in reports)
    print(
        f"{'FAILED' if failures else 'passed'}: {len(reports)} prompts, arms {', '.join(a.name for a in arms)}: "
        f"{steps} steps, {ties} ties, largest logit difference "
        f"{np.max([r.max_logit_difference for r in reports]):.1e} (bound {bound:.0e}), {seconds:.0f} s"
    )
    for failure in failures:
        print(f"  {failure}")
    device = next(iter(engine.mesh[cp_size].devices.flat))
    return dict(
        passed=not failures, failures=failures, cp_size=cp_size, device=device.device_kind, bound=bound,
        token_capacity=engine.token_capacity, pages=engine.pages, kinds=list(KINDS), new_tokens=NEW_TOKENS, ties=ties,
        steps=steps, seconds=round(seconds, 1), control=control, prompts=[dataclasses.asdict(r) for r in reports],
    )  # fmt: skip


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="dsa-cp", description="DeepSeek-V4 sparse prefill under context parallelism.")
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "validate", help="compare sparse + CP, dense + CP and no CP token by token on real text"
    )
    command.add_argument("--cp", type=int, metavar="N", help="ranks, at least 2 (default: all GPUs, or 4 CPU devices)")
    command.add_argument("--quick", action="store_true", help="one prompt of 2.6k tokens and three short ones")
    command.add_argument(
        "--prompt-file", action="append", metavar="FILE", help="UTF-8 text to read instead; may be repeated"
    )
    command.add_argument(
        "--pages", type=int, metavar="N", help="pages of 256 tokens in the pools (default: 48; --quick: 12)"
    )
    command.add_argument(
        "--coordinator", metavar="HOST:PORT", help="run as several processes, which meet here: process 0 listens there"
    )
    command.add_argument("--num-processes", type=int, metavar="N", help="with --coordinator: how many they are")
    command.add_argument("--process-id", type=int, metavar="I", help="with --coordinator: which one this is, from 0")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    command.add_argument(
        "--show-bug", nargs="?", const=Path("dsa-cp-bug.png"), type=Path, metavar="PNG",
        help="draw what each rank's rows select with the right and the naive geometry, and do nothing else",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.cp is not None and args.cp < 2:
        parser.error(f"--cp must be at least 2, got {args.cp}")
    if len({args.coordinator is None, args.num_processes is None, args.process_id is None}) > 1:
        parser.error("--coordinator, --num-processes and --process-id must be given together")
    args.pages = args.pages if args.pages is not None else 12 if args.quick else 48
    if args.pages < 1:
        parser.error(f"--pages must be at least 1, got {args.pages}")
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json must be a file in an existing directory, got {str(args.json)!r}")
    if args.show_bug is not None and (args.show_bug.suffix != ".png" or not args.show_bug.absolute().parent.is_dir()):
        parser.error(f"--show-bug must be a .png file in an existing directory, got {str(args.show_bug)!r}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 0 all arms agree, 1 they do not, 2 usage, 130 interrupted."""
    args = parse_args(argv)
    try:
        if args.show_bug is not None:
            from dsa_cp_jax.show_bug import show_bug

            return show_bug(args.show_bug, cp_size=args.cp or 4)
        prompts = [read_prompt(path) for path in args.prompt_file or ()]
        if args.coordinator is not None:
            texts = [zlib.crc32(prompt.tokens) for prompt in prompts] or ("quick" if args.quick else "default")
            job = f"cp {args.cp}, pages {args.pages}, prompts {texts}, Python {platform.python_version()}"
            start_processes(args.coordinator, args.num_processes, args.process_id, job=job)
        devices = pick_devices(args.cp, args.num_processes or 1)
        cp_size = len(devices)
        prompts = prompts or default_prompts(cp_size, quick=args.quick)
        for prompt in prompts:
            check_fits(prompt, new_tokens=NEW_TOKENS, pages=args.pages, page_size=CONFIG.swa_page_size)
        dtype = jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16
        mine = next(device for device in devices if device.process_index == jax.process_index())
        talker = contextlib.redirect_stdout(io.StringIO()) if args.process_id else contextlib.nullcontext()
        with talker, jax.default_device(mine), jax.default_matmul_precision("highest"):
            capacity = cdiv(1024, cp_size) * cp_size
            engine = Engine(
                build_model(), devices=devices, token_capacity=capacity, pages=args.pages, attention_dtype=dtype
            )
            report = validate(engine, prompts, BOUNDS[jnp.dtype(dtype).name])
        if args.json is not None and not args.process_id:
            write_json(args.json, report)
        return 0 if report["passed"] else 1
    except (PromptError, ProcessError, OSError) as error:
        print(f"dsa-cp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dsa-cp: interrupted", file=sys.stderr)
        return 130

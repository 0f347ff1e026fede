"""The main job: a small decoder reads real text, and must write the same tokens with and without context parallelism.

Three arms run the same model over FP8 pools: no context parallelism (the reference), sparse + CP, dense + CP. A
fourth, the naive contiguous geometry, is the positive control: it shows that the comparison does see that fault.
"""

import argparse
import contextlib
import dataclasses
import io
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
from dsa_cp_jax.engine import Arm, ChunkResult, Engine, Session
from dsa_cp_jax.model import Decoder
from dsa_cp_jax.processes import ProcessError, start_processes
from dsa_cp_jax.progress import Progress
from dsa_cp_jax.prompts import Prompt, PromptError, check_fits, default_prompts, read_prompt
from dsa_cp_jax.report import CONTROL_FACTOR, PromptReport, compare_logits, find_failures, print_table, write_json
from pallas_kernels.common import cdiv

CONFIG = dataclasses.replace(DSAConfig.tiny(), swa_page_size=256, c4_page_size=64, c128_page_size=2)
KINDS = ("c0", "c128", "c4", "c128", "c4")
NEW_TOKENS = 16
BOUNDS = {"float32": 1e-3, "bfloat16": 1e-2}
"""Largest logit difference that the arms may have, for each dtype of the attention (bfloat16 on GPUs). In float32 it
was 2.1e-5 and 1.6e-5 (160 steps, jax 0.11.2 and 0.12.0.1, CPU)."""
ATTENTION_GAIN, LOGIT_GAIN = 0.02, 1.5
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


def cut(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """How many tokens of each prompt each chunk takes: equal shares of the capacity for those that have some left."""
    left, chunks = list(lengths), []
    while any(left):
        share = capacity // sum(n > 0 for n in left)
        chunks.append([min(n, share) for n in left])
        left = [n - taken for n, taken in zip(left, chunks[-1])]
    return chunks


def feed(session: Session, pieces: Sequence[np.ndarray], results: list[list[ChunkResult]]) -> None:
    """Runs a chunk and adds what it gave to the results of each prompt that had tokens in it."""
    result = session.feed(*pieces)
    for piece, logits, own in zip(pieces, result.logits, results):
        if len(piece):
            own.append(dataclasses.replace(result, logits=logits, num_tokens=len(piece)))


def prefill(session: Session, prompts: Sequence[Prompt], progress: Progress) -> list[list[ChunkResult]]:
    """Reads the session's prompts chunk by chunk. Returns each prompt's chunks."""
    results = [[] for _ in prompts]
    starts = np.zeros(len(prompts), int)
    for counts in cut([len(prompt) for prompt in prompts], session.engine.token_capacity):
        ends = starts + counts
        feed(session, [p.tokens[i:j] for p, i, j in zip(prompts, starts, ends)], results)
        starts = ends
        progress.advance(f"{prompts[int(np.argmax(counts))].name}: {session.arm.name}")
    return results


def run_batch(
    engine: Engine, arms: list[Arm], prompts: Sequence[Prompt], progress: Progress
) -> list[tuple[PromptReport, np.ndarray]]:
    """Prefill and greedy decoding in all arms; the first is the reference, whose tokens all arms go on with.

    The reference reads each prompt alone, the other arms read all of them together.

    Returns:
      For each prompt the report, and the reference's logits [vocab] after the prompt.
    """
    everyone = range(len(prompts))
    groups = {arm.name: [[i] for i in everyone] if arm is arms[0] else [list(everyone)] for arm in arms}
    sessions, results, seconds = {}, {arm.name: [] for arm in arms}, {}
    for arm in arms:
        begin = time.perf_counter()
        sessions[arm.name] = [engine.start(arm, rows) for rows in groups[arm.name]]
        for session in sessions[arm.name]:
            results[arm.name] += prefill(session, [prompts[i] for i in session.rows], progress)
        seconds[arm.name] = time.perf_counter() - begin
    prefills = {name: [list(chunks) for chunks in of_prompts] for name, of_prompts in results.items()}
    reference, generated = arms[0].name, [[] for _ in prompts]
    for step in range(NEW_TOKENS):
        best = np.array([chunks[-1].logits.argmax() for chunks in results[reference]])
        best = multihost_utils.broadcast_one_to_all(best)  # each process has a reference of its own
        for tokens, token in zip(generated, best):
            tokens.append(int(token))
        if step == NEW_TOKENS - 1:
            break
        for arm in arms:
            begin = time.perf_counter()
            for session in sessions[arm.name]:
                pieces = [np.array(generated[i][-1:], np.int32) for i in session.rows]
                feed(session, pieces, [results[arm.name][i] for i in session.rows])
                progress.advance(f"{prompts[session.rows[0]].name}: {arm.name}")
            seconds[arm.name] += time.perf_counter() - begin

    def took_right_path(arm: Arm, result: ChunkResult) -> bool:
        return result.ran_sparse == (arm.allow_sparse and bool(result.gate))

    shown = next(arm for arm in arms if arm.cp_size > 1 and arm.allow_sparse)
    reports = []
    for i, prompt in enumerate(prompts):
        logits = {name: np.stack([r.logits for r in chunks[i][-NEW_TOKENS:]]) for name, chunks in results.items()}
        difference, ties, differs = compare_logits(logits, reference)
        unpadded = len(prompts) == 1 and len(prompt) % shown.cp_size == 0
        report = PromptReport(
            name=prompt.name,
            tokens=len(prompt),
            chunks=[
                dict(tokens=r.num_tokens, path="sparse" if r.ran_sparse else "dense", reason=r.gate.reason)
                for r in prefills[shown.name][i]
            ],
            must_be_sparse=engine.gate == "wide" or unpadded,
            generated=generated[i],
            steps=NEW_TOKENS,
            ties=int(ties.sum()),
            mismatches=int((differs & ~ties).sum()),
            tied_mismatches=int((differs & ties).sum()),
            max_logit_difference=difference,
            gate_ok=all(took_right_path(arm, r) for arm in arms for r in results[arm.name][i]),
            seconds={name: round(s / len(prompts), 2) for name, s in seconds.items()},
        )
        reports.append((report, logits[reference][0]))
    return reports


def run_control(engine: Engine, prompt: Prompt, right: np.ndarray, progress: Progress) -> dict:
    """The positive control: how far the naive geometry is off after reading a prompt.

    Args:
      right: [vocab] logits of the reference arm after that prompt.
    """
    arm = Arm("naive geometry", max(engine.mesh), contiguous=True)
    wrong = prefill(engine.start(arm), [prompt], progress)[0][-1].logits
    return dict(
        prompt=prompt.name, tokens=len(prompt), max_logit_difference=float(np.abs(right - wrong).max()),
        same_token=bool(right.argmax() == wrong.argmax()),
    )  # fmt: skip


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
    batches = [prompts[i : i + engine.requests] for i in range(0, len(prompts), engine.requests)]
    chunks = [len(cut([len(p)], engine.token_capacity)) for p in prompts]
    together = [len(cut([len(p) for p in batch], engine.token_capacity)) for batch in batches]
    total = sum(chunks) + 2 * sum(together) + (len(prompts) + 2 * len(batches)) * (NEW_TOKENS - 1) + 2 * chunks[longest]
    with Progress(total, shown=jax.process_index() == 0) as progress:
        done = [one for batch in batches for one in run_batch(engine, arms, batch, progress)]
        reports, firsts = zip(*done)
        right = firsts[longest]
        if len(control_prompt) < len(uncut):
            right = prefill(engine.start(arms[0]), [control_prompt], progress)[0][-1].logits
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
        f"{'FAILED' if failures else 'passed'}: {len(reports)} prompts, {engine.requests} at a time, "
        f"{engine.gate} gate, arms {', '.join(a.name for a in arms)}: {steps} steps, {ties} ties, "
        "largest logit difference "
        f"{np.max([r.max_logit_difference for r in reports]):.1e} (bound {bound:.0e}), {seconds:.0f} s"
    )
    for failure in failures:
        print(f"  {failure}")
    device = next(iter(engine.mesh[cp_size].devices.flat))
    return dict(
        passed=not failures, failures=failures, cp_size=cp_size, gate=engine.gate, batch=engine.requests,
        device=device.device_kind, processes=jax.process_count(), jax=jax.__version__,
        xla_flags=os.environ.get("XLA_FLAGS", ""), bound=bound, token_capacity=engine.token_capacity,
        pages=engine.pages, kinds=list(KINDS), new_tokens=NEW_TOKENS, ties=ties, steps=steps,
        seconds=round(seconds, 1), control=control, prompts=[dataclasses.asdict(r) for r in reports],
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
        "--pages", type=int, metavar="N", help="pages of 256 tokens for each prompt (default: 48; --quick: 12)"
    )
    command.add_argument(
        "--gate", choices=("seed", "wide"), default="seed",
        help="which chunks run sparse: of one prompt and unpadded (seed), or all (wide)",
    )  # fmt: skip
    command.add_argument(
        "--batch", type=int, default=1, metavar="N", help="prompts that are read at a time (default: 1)"
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
    if args.num_processes is not None and args.num_processes < 1:
        parser.error(f"--num-processes must be at least 1, got {args.num_processes}")
    if args.batch < 1:
        parser.error(f"--batch must be at least 1, got {args.batch}")
    args.pages = args.pages if args.pages is not None else 12 if args.quick else 48
    if args.pages < 1:
        parser.error(f"--pages must be at least 1, got {args.pages}")
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json must be a file in an existing directory, got {str(args.json)!r}")
    if args.show_bug is not None and (args.cp or 4) > 16:  # nobody could read it, and drawing takes minutes
        parser.error(f"--show-bug draws at most 16 ranks, got --cp {args.cp}")
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
            how = f"cp {args.cp}, {args.gate} gate, batch {args.batch}, pages {args.pages}"
            job = f"{how}, prompts {texts}, Python {platform.python_version()}"
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
                build_model(), devices=devices, token_capacity=capacity, pages=args.pages, attention_dtype=dtype,
                requests=args.batch, gate=args.gate,
            )  # fmt: skip
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

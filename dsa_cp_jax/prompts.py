"""Real text for the main job, as byte tokens: prompt files, or documentation strings of the standard library."""

import dataclasses
import importlib
import inspect
from pathlib import Path

import numpy as np

from pallas_kernels.common import cdiv

DEFAULT_PROMPTS = (
    # module, bytes, what the length is for
    ("doctest", 10_600, "unpadded"),
    ("logging", 10_648, "unpadded"),
    ("difflib", 4_600, "padded"),
    ("decimal", 2_600, "padded"),
    ("tarfile", 1_300, "padded"),
    ("threading", 700, "padded"),
    ("random", 384, "unpadded"),
    ("argparse", 128, "padded"),
    ("statistics", 36, "unpadded"),
    ("textwrap", 20, "padded"),
)
QUICK_PROMPTS = (
    ("doctest", 2_600, "unpadded"),
    ("random", 384, "unpadded"),
    ("argparse", 128, "padded"),
    ("textwrap", 20, "padded"),
)


class PromptError(ValueError):
    """A prompt that cannot be read or does not fit."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text to read.

    Attributes:
      name: what the table calls it.
      tokens: [n] int32, the UTF-8 bytes.
    """

    name: str
    tokens: np.ndarray

    @classmethod
    def of(cls, name: str, text: bytes) -> "Prompt":
        """The prompt of a text."""
        return cls(name, np.frombuffer(text, np.uint8).astype(np.int32))

    def __len__(self) -> int:
        return len(self.tokens)


def documentation(module_name: str) -> bytes:
    """Documentation strings of a module of the standard library, its public classes, methods and functions."""
    module = importlib.import_module(module_name)
    texts = [module.__doc__]
    for name, member in sorted(vars(module).items()):
        if name.startswith("_") or not (inspect.isclass(member) or inspect.isfunction(member)):
            continue
        if (member.__module__ or "").lstrip("_") != module_name.lstrip("_"):
            continue
        texts.append(member.__doc__)
        if inspect.isclass(member):
            texts += [method.__doc__ for _, method in sorted(vars(member).items()) if inspect.isroutine(method)]
    return "\n\n".join(text for text in texts if text).encode()


def default_prompts(cp_size: int, *, quick: bool) -> list[Prompt]:
    """Prompts that need no download: two of about 10.6k tokens that cp_size divides, several that pad, several short.

    Args:
      cp_size: ranks; the lengths are made divisible by it, or not divisible where padding is the point.
      quick: fewer and shorter ones.

    Raises:
      PromptError: the documentation strings are too short (Python strips them with -OO).
    """
    prompts = []
    for module, size, purpose in QUICK_PROMPTS if quick else DEFAULT_PROMPTS:
        size = cdiv(size, cp_size) * cp_size + (1 if purpose == "padded" else 0)
        text = documentation(module)[:size]
        if len(text) < size:
            raise PromptError(
                f"The documentation strings of `{module}` have {len(text)} of {size} bytes (is it -OO?): "
                "give texts by --prompt-file."
            )
        prompts.append(Prompt.of(f"{module} docs", text))
    return prompts


def read_prompt(path: str) -> Prompt:
    """Reads a prompt file.

    Raises:
      PromptError: it is not there, cannot be read, is empty, or is not UTF-8 text.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise PromptError(f"Prompt file {path!r} cannot be read: {error.strerror}.") from error
    if not text:
        raise PromptError(f"Prompt file {path!r} is empty.")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"Prompt file {path!r} is not UTF-8 text (byte {error.start}).") from error
    return Prompt.of(Path(path).name, text)


def check_fits(prompt: Prompt, *, new_tokens: int, pages: int, page_size: int) -> None:
    """Raises PromptError if a prompt and its continuation need more pages than the pool has."""
    needed = cdiv(len(prompt) + new_tokens, page_size)
    if needed > pages:
        raise PromptError(
            f"Prompt {prompt.name!r} of {len(prompt)} tokens (and {new_tokens} new ones) needs {needed} pages of "
            f"{page_size} tokens, the pool has {pages}; pass --pages {needed}."
        )

"""The main job's progress bar, which also sees to it that Ctrl-C ends the job."""

import signal
import sys
import threading
from typing import Any


class Progress:
    """A progress bar on a terminal's standard error; silent elsewhere. While it is open, no Ctrl-C gets lost.

    Python loses an interrupt that it raises inside a callback, of XLA or of the garbage collector: such a one comes
    through at the next step.
    """

    def __init__(self, total: int, *, shown: bool = True):
        self.total, self.done, self.shown = max(total, 1), 0, shown and sys.stderr.isatty()
        self.interrupted = False
        self.handler: Any = None  # what was there before

    def __enter__(self) -> "Progress":
        if threading.current_thread() is threading.main_thread():
            self.handler = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_) -> None:
        if self.handler is not None:
            signal.signal(signal.SIGINT, self.handler)
        self.clear()

    def _interrupt(self, *_) -> None:
        self.interrupted = True
        raise KeyboardInterrupt

    def advance(self, what: str) -> None:
        """One more unit is done; `what` says where we are."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.done += 1
        if self.shown:
            full = 30 * self.done // self.total
            text = f"\r[{'#' * full}{'.' * (30 - full)}] {100 * self.done // self.total:3d}% {what}"
            print(f"{text[:110]:<110}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Removes the bar."""
        if self.shown:
            print(f"\r{'':<110}\r", end="", file=sys.stderr, flush=True)

"""Noticing, from another thread, that a step takes too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType


class Watchdog:
    """Watches over a loop of steps while it is entered; does nothing when `seconds` is None.

    Args:
        seconds: how long a step may take.
        report: `(position, seconds spent) -> text` for a step that takes longer.
        on_stall: gets that text, once for each such step, on the watchdog's thread.
    """

    def __init__(
        self, seconds: float | None, report: Callable[[int, float], str], on_stall: Callable[[str], None]
    ) -> None:
        self._seconds = seconds
        self._report = report
        self._on_stall = on_stall
        self._current: tuple[int, float] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def at(self, position: int) -> None:
        """The loop begins this step now."""
        if self._seconds is not None:
            self._current = (position, time.monotonic())

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            self._thread = threading.Thread(
                target=self._watch, args=(self._seconds,), name="pipeline-schedule watchdog", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, seconds: float) -> None:
        reported: tuple[int, float] | None = None
        left = seconds
        while not self._ended.wait(left):
            current = self._current
            if current is None or current is reported:
                left = seconds
                continue
            spent = time.monotonic() - current[1]
            left = seconds - spent
            if left <= 0:
                reported = current
                left = seconds
                self._on_stall(self._report(current[0], spent))

"""What several files of tests use."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def lines_run() -> Callable[[Callable[[], object]], int]:
    """How many lines of Python an action takes, in whatever it calls: the same on every machine, as time is not."""

    def counted(action: Callable[[], object]) -> int:
        count = 0

        def seen(frame: object, event: str, argument: object) -> object:
            nonlocal count
            count += event == "line"
            return seen

        before = sys.gettrace()
        sys.settrace(seen)
        try:
            action()
        finally:
            sys.settrace(before)
        return count

    return counted

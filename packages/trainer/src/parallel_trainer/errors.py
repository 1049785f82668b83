"""The error that carries what a user can mend."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """Something a user can mend. Commands print the message, without a traceback, and exit with 2.

    message:  what is wrong, or the heading of `problems`.
    problems: what is wrong, where it is several things.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__("\n".join([message, *(f"  - {problem}" for problem in problems)]))
        self.problems = tuple(problems) or (message,)


class MissingCorpus(UserError):
    """A corpus that has not been built."""

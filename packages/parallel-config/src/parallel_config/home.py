"""Paths as people write them: `~` and `~user` at the start stand for a home folder, in files and in commands alike."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

_VARIABLE = re.compile(r"(?:^|/)\$(?:\w|\{)")


def expand_home(path: str) -> str:
    """The path with the home folder in place of a leading `~` or `~user`.

    Raises ValueError for a user that does not exist and for a shell variable such as $HOME, which is not replaced: a
    folder of that very name would be made.
    """
    if _VARIABLE.search(path):
        raise ValueError("has a shell variable, which is not replaced here")
    expanded = os.path.expanduser(path)
    if path.startswith("~") and expanded == path:
        raise ValueError(f"has no home folder for {path.partition('/')[0]}")
    return expanded


def path_argument(text: str) -> Path:
    """The path that an option of a command gives; for `type=` of argparse."""
    try:
        return Path(expand_home(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None

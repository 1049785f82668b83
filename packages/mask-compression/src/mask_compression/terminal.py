"""Output for any terminal and log: characters that its encoding lacks are written in ASCII."""

from __future__ import annotations

import codecs
import io
import sys

_ERRORS = "mask_compression.ascii"
_ASCII = {"·": ".", "▒": "+", "█": "#", "…": "...", "≥": ">=", "≤": "<=", "×": "x"}


def show_anywhere() -> None:
    """Let stdout and stderr take every text, whatever their encoding: what it lacks becomes ASCII, or an escape."""
    codecs.register_error(_ERRORS, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    escaped = (_ASCII.get(character) or character.encode("ascii", "backslashreplace").decode() for character in lacking)
    return "".join(escaped), error.end

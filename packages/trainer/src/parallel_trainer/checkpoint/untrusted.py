"""Reading what somebody else may have made: strict JSON, and names of files that stay in their folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from parallel_trainer.errors import UserError


def parse_object(text: bytes) -> dict[str, Any]:
    """The JSON object that a text is. Raises ValueError for anything else: keys that come twice and NaN included."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=_without_repetition, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError, with a reason that does not name the file, and FileNotFoundError."""
    try:
        return parse_object(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"it cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(str(error)) from error


def is_file_name(name: Any) -> bool:
    """Whether a name is that of a file in its own folder: no way out of the folder, nothing that cannot be shown."""
    return isinstance(name, str) and Path(name).name == name not in ("", "..") and name.isprintable()


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} comes twice")
        found[name] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")

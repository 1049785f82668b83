"""What ranks tell each other around a checkpoint: texts, and errors that then all of them raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from device_mesh import Communicator

from parallel_trainer.errors import UserError

T = TypeVar("T")


def gather(communicator: Communicator, value: Any) -> list[Any]:
    """What each rank says, something that JSON can write, in the order of the ranks. Collective."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = communicator.all_gather(np.array([text.size])).tolist()
    every = communicator.all_gather(text, sizes=sizes)
    return [json.loads(part.tobytes()) for part in np.split(every, np.cumsum(sizes)[:-1])]


def all_or_none(communicator: Communicator, action: Callable[[], T]) -> T:
    """What `action` returns, if it succeeds on every rank. Collective.

    Raises the UserError of the lowest rank that had one, or an OSError of it as one, on all ranks.
    """
    result, error = attempt(action)
    first = next((text for text in gather(communicator, error) if text is not None), None)
    if first is not None:
        raise UserError(first)
    assert result is not None
    return result[0]


def attempt(action: Callable[[], T]) -> tuple[tuple[T] | None, str | None]:
    """The result of an action in a tuple, or the text of what a user can mend."""
    try:
        return (action(),), None
    except UserError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error.filename}: {error.strerror}" if error.filename else str(error)

"""Ending a job whose rank failed: one message, last on the screen, and no rank left waiting."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from device_mesh.communicator import Communicator

NOTICE_TAG = 32_000  # within the 32,767 that MPI guarantees, and out of the way of small tags
_FLUSH_SECONDS = 0.2
_KILL_SECONDS = 8.0


@contextmanager
def abort_on_error(
    communicator: Communicator,
    *,
    message_only: tuple[type[BaseException], ...] = (),
    grace_seconds: float = 0.5,
) -> Iterator[None]:
    """Run a rank's main block; if it raises, print why and end the whole job.

    A rank that just dies leaves the others waiting for it. Here the failing rank prints its traceback to
    stderr and then ends all ranks. When several ranks fail together, the lowest of them prints and the
    others stay silent, so that an error common to all ranks is seen once. Use it around everything after
    `connect`:

        communicator = connect()
        with abort_on_error(communicator):
            train(communicator)

    Exit codes: what `sys.exit` asked for, 130 for Ctrl-C, 2 for `message_only` errors, 1 for all others. A
    `sys.exit` with a message prints that message, with a number nothing; `sys.exit(0)` passes through.

    Args:
        communicator: all ranks, as `connect` returns them.
        message_only: errors that are the user's to mend, such as a configuration error: printed as their
        message,
            without a traceback.
        grace_seconds: how long a failing rank waits to hear that a lower rank failed too.
    """
    try:
        yield
    except BaseException as error:
        code, text = _verdict(error, communicator, message_only)
        if code == 0:
            raise
        sys.stdout.flush()
        if _is_first(communicator, grace_seconds):
            if text:
                print(text, file=sys.stderr, flush=True)
            # The launcher drops what it has not read from the pipe when the job ends.
            time.sleep(_FLUSH_SECONDS if communicator.size > 1 else 0)
        else:
            time.sleep(_KILL_SECONDS)
        communicator.abort(code)


def _verdict(
    error: BaseException, communicator: Communicator, message_only: tuple[type[BaseException], ...]
) -> tuple[int, str]:
    """The exit code and what to print."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0, ""
        return 1, str(error.code)
    if isinstance(error, KeyboardInterrupt):
        return 130, "Interrupted."
    if isinstance(error, message_only):
        return 2, str(error)
    own = error.__traceback__ and error.__traceback__.tb_next  # without the frame of abort_on_error
    who = f"rank {communicator.rank} of {communicator.size} failed:\n" if communicator.size > 1 else ""
    return 1, who + "".join(traceback.format_exception(type(error), error, own)).rstrip()


def _is_first(communicator: Communicator, grace_seconds: float) -> bool:
    """Whether it falls to this failing rank to print.

    No collective may be used here, since nobody knows who else comes. A failing rank tells the ranks above
    it at once, and those below it when it starts to print; a rank that has been told leaves the printing to
    others.
    """
    rank, size = communicator.rank, communicator.size
    notice = np.zeros(1, np.uint8)
    # Where even this fails, printing twice is better than printing nothing.
    with suppress(Exception):
        heard = [
            communicator.irecv(np.empty(1, np.uint8), peer, tag=NOTICE_TAG) for peer in range(size) if peer != rank
        ]
        told = [communicator.isend(notice, peer, tag=NOTICE_TAG) for peer in range(rank + 1, size)]
        deadline = time.monotonic() + (grace_seconds if rank else 0.0)
        while True:
            if any(request.done() for request in heard):
                return False
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        told += [communicator.isend(notice, peer, tag=NOTICE_TAG) for peer in range(rank)]
    return True

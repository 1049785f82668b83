"""Being asked to stop: by the signal that schedulers send before they kill, seen by all ranks after the same step."""

from __future__ import annotations

import signal
from types import FrameType

import numpy as np
from device_mesh import Communicator


class StopRequest:
    """Whether any rank of a run has got SIGTERM, which from here on ends no process by itself."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._told = False
        signal.signal(signal.SIGTERM, self._tell)

    def requested(self) -> bool:
        """The same answer on all ranks. Collective. Once it is yes, later signals are ignored, to the process's end."""
        told = np.array([self._told], np.int64)
        if not self._communicator.all_reduce(told, "max")[0]:
            return False
        # Python takes its own handlers back before a process is over, and not this.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return True

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told = True

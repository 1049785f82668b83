"""The computations that models are written in, by name of the device they run on.

>>> cpu = kernels("cpu")
>>> cpu.swiglu.__name__
'swiglu'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel_trainer.kernels.interface import Kernels

__all__ = ["kernels"]


def kernels(device: str) -> Kernels:
    """The kernel set of `device`, imported when it is first asked for.

    Raises ValueError for a device that has none.
    """
    if device == "cpu":
        from parallel_trainer.kernels import cpu

        return cpu
    if device == "ascend":
        from parallel_trainer.kernels import ascend

        return ascend
    raise ValueError(
        f"kernels: device {device!r} has no kernel set; one of the known sets has to be named; use 'cpu' or 'ascend'"
    )

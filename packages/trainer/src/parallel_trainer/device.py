"""What MindSpore computes on."""

from __future__ import annotations

import mindspore as ms

from parallel_trainer.job import Device


def start_mindspore(device: Device) -> None:
    """Have MindSpore compute on a device, operator by operator."""
    ms.set_device({"cpu": "CPU", "ascend": "Ascend"}[device])
    ms.set_context(mode=ms.PYNATIVE_MODE)
    if device != "cpu":
        return
    # Kernels are NumPy and wait for their inputs: handing operators to MindSpore's own threads only adds waiting,
    # half of a small model's step on one rank and more where ranks share cores.
    ms.runtime.launch_blocking()

"""Being a rank: what every command that trains or evaluates does where a launcher started it."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from device_mesh import Communicator, Launch, abort_on_error, connect
from parallel_config import ConfigError

from parallel_trainer.errors import UserError
from parallel_trainer.launch.joining import join, left_over, refuse, with_rank_environment

HOW_ON_ASCEND = (
    "ranks on NPUs are started by MindSpore's msrun: msrun --worker_num=N --local_worker_num=N --join=True "
    "python -m parallel_trainer.run_mindformer --config FILE --mode 1 --device_target Ascend."
)


def world_size_of(args: argparse.Namespace) -> int:
    """The ranks to start here. Raises UserError for less than one."""
    world_size: int = 1 if args.nproc is None else args.nproc
    if world_size < 1:
        raise UserError(f"--nproc {world_size} must be at least 1.")
    return world_size


def in_launch(
    launch: Launch, args: argparse.Namespace, arguments: Sequence[str], work: Callable[[Communicator], None]
) -> int:
    """Be what a launcher started this process as, and do a rank's work.

    arguments: the command line to begin again with, where ranks need other variables of the environment.
    """
    if args.device == "ascend":
        _check_npus(launch)
    elif launch.kind == "msrun-scheduler":
        from device_mesh.msrun_scheduler import schedule

        return schedule()
    if None not in (args.nproc, launch.size) and args.nproc != launch.size:
        refuse(
            launch,
            f"--nproc {args.nproc} does not match: a launcher started {launch.size} ranks. Leave --nproc out there. "
            f"{left_over(launch)}",
        )
    with_rank_environment(launch, arguments)
    communicator = connect("mindspore") if args.device == "ascend" else join(launch)
    if communicator.rank:
        warnings.simplefilter("ignore")
    elif launch.kind == "msrun":
        print(f"Rank 0 of {communicator.size} reports the run here; in the others' logs are only their errors.")
    with abort_on_error(communicator, message_only=(UserError, ConfigError)):
        work(communicator)
    return 0


def _check_npus(launch: Launch) -> None:
    """Refuse a launch that cannot compute on NPUs; for the others, have MindSpore compute there."""
    if not launch.kind.startswith("msrun"):
        refuse(launch, f"--device ascend: {HOW_ON_ASCEND}")
    if not any(Path("/dev").glob("davinci[0-9]*")):
        refuse(
            launch,
            "--device ascend: this machine has no NPU (/dev/davinci0). Use --device cpu here, or a machine as in "
            "docs/ascend.md.",
        )
    import mindspore

    mindspore.set_device("Ascend")

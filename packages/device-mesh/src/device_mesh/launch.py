"""How this process was started: by which launcher, as which of how many ranks. Read from the environment alone."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Literal, NoReturn

from attrs import field, frozen

_KILL_SECONDS = 8.0

Kind = Literal["mpi", "msrun", "msrun-scheduler"]

PMIX = "PMIX_RANK"

# By launcher: the variable that gives it away, and those of the number of ranks and of this process's own.
_MPI_LAUNCHERS = (
    ("PMI_SIZE", "PMI_SIZE", "PMI_RANK"),  # mpiexec of MPICH and its relatives, srun --mpi=pmi2
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI's mpiexec
    (PMIX, "SLURM_STEP_NUM_TASKS", PMIX),  # srun --mpi=pmix; PMIx itself tells the size to MPI only
    ("PMI_PORT", "MS_WORKER_NUM", "PMI_ID"),  # a PMI-1 server of the user's own
    ("PMI_FD", "MS_WORKER_NUM", "PMI_RANK"),
)


class LaunchError(RuntimeError):
    """The ranks that a launcher started could not be connected."""


@frozen
class Launch:
    """What a launcher told this process.

    kind: "mpi" for a rank that MPI can connect as it is, "msrun" for a worker of MindSpore's msrun,
        "msrun-scheduler" for the process beside its workers.
    size: how many ranks were started; None where the launcher says it to MPI only.
    rank: which of them this process is; None where the launcher does not say.
    local_rank: its number among the ranks of this node; None where the launcher does not say.
    local_size: how many ranks this node has; None where the launcher does not say.
    sign: the variable that gave the launcher away.
    """

    kind: Kind
    size: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    sign: str = field(default="", eq=False)

    @property
    def speaks(self) -> bool:
        """Whether it falls to this process to report what all ranks see alike, before they can talk to each other.

        Under msrun each node has its own terminal, and the first worker of each node speaks.
        """
        if self.kind == "msrun":
            return not (self.rank if self.local_rank is None else self.local_rank)
        return self.kind == "mpi" and not self.rank

    def leave(self) -> NoReturn:
        """End a process that does not speak, with exit code 2 and without a word.

        msrun kills all workers, the one that speaks too, when the first of them ends: there this one waits for that.
        """
        if self.kind == "msrun":
            time.sleep(_KILL_SECONDS)
        sys.exit(2)


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """How this process was started; None if no launcher did.

    A shell that `srun --mpi=pmix` opened leaves PMIX_RANK to whatever is called in it. That is no launch where Slurm
    says that its step has one task, or has not said how many, as it does in each task of a step. Where PMIx belongs to
    another launcher (prterun in a shell of Slurm's), what Slurm says of its step is nothing to go by.

    msrun goes before the others, since it may itself have been started by one (srun, one msrun a node); a
    PMI-1 server that PMI_PORT names goes before msrun.
    """
    of_msrun = "MS_ROLE" in environment or environment.get("MS_WORKER_NUM", "1") != "1"
    if of_msrun and "PMI_PORT" not in environment:
        return _msrun(environment)
    for sign, size_name, rank in _MPI_LAUNCHERS:
        if sign in environment and not (sign == PMIX and _left_over(environment)):
            size = None if sign == PMIX and not _by_slurm(environment) else _number(environment, size_name)
            return Launch("mpi", size, _number(environment, rank), *_on_this_node(environment, size), sign)
    return None


def _left_over(environment: Mapping[str, str]) -> bool:
    """Whether PMIx's variables are those of a shell that Slurm opened, and not of this process."""
    return _by_slurm(environment) and environment.get("SLURM_STEP_NUM_TASKS") in (None, "1")


def _by_slurm(environment: Mapping[str, str]) -> bool:
    """Whether PMIx's variables come from `srun --mpi=pmix`."""
    return environment.get("PMIX_NAMESPACE", "").startswith("slurm.")


def _on_this_node(environment: Mapping[str, str], size: int | None) -> tuple[int | None, int | None]:
    """This process's number among the ranks of its node, and how many these are, as far as a launcher says it.

    What Slurm says is taken where the tasks of its step are the ranks: they are not those of an mpiexec in its shell.
    """
    if "MPI_LOCALNRANKS" in environment:  # MPICH's mpiexec
        return _number(environment, "MPI_LOCALRANKID"), _number(environment, "MPI_LOCALNRANKS")
    counts = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environment, "SLURM_NODEID")
    if node is None or node >= len(counts) or sum(counts) != size:
        return None, None
    return _number(environment, "SLURM_LOCALID"), counts[node]


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's numbers of tasks, node by node; none where the text is something else.

    >>> _tasks_per_node("32(x2),16")
    [32, 32, 16]
    """
    parts = [re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,6})\))?", part) for part in text.split(",")]
    if not all(parts):
        return []
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def _msrun(environment: Mapping[str, str]) -> Launch:
    size = _number(environment, "MS_WORKER_NUM")
    if environment.get("MS_ROLE") == "MS_SCHED":
        return Launch("msrun-scheduler", size, sign="MS_ROLE")
    # Where msrun leaves the numbering to the cluster, workers beside the scheduler inherit its RANK_ID of 0.
    rank = _number(environment, "MS_NODE_ID" if "MS_NODE_ID" in environment else "RANK_ID")
    return Launch("msrun", size, rank, _number(environment, "DEVICE_ID"), sign="MS_WORKER_NUM")


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None

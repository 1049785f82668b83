"""Variables by which MPICH and its mpiexec can be told how to start ranks, and what becomes of each of them.

A batch system, a shell that `srun` opened or a module file sets such variables for programs of its own. Ranks that all
start on one machine have to start the same way whatever is set there. Names are those that MPICH 5.0's sources read
(`src/pm/hydra`, `src/pmi`, `src/util/mpir_pmi.c`).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from attrs import frozen

Fate = Literal["removed", "removed without hosts", "kept"]


@frozen
class Family:
    """Variables that are treated alike.

    patterns: their names, `*` standing for any rest. The first family of `FAMILIES` that has a name decides.
    fate:     "removed": neither mpiexec nor ranks see them. "removed without hosts": the same, unless the user named
              hosts in HYDRA_HOST_FILE. "kept": passed on as they are.
    why:      what they would do, or why they do nothing.
    """

    patterns: tuple[str, ...]
    fate: Fate
    why: str


FAMILIES = (
    Family(
        ("PMI_*", "PMI2_*", "PMIX_*", "PRTE_*", "HYDI_*", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
        "removed",
        "belong to ranks of another start: MPI would look for a launcher that is not there",
    ),
    Family(
        ("OMPI_COMM_WORLD_*", "OMPI_UNIVERSE_SIZE"),
        "removed",
        "the same, of Open MPI's mpiexec",
    ),
    Family(
        ("MPIR_CVAR_PMI_VERSION", "MPIR_PARAM_PMI_VERSION", "MPICH_PMI_VERSION"),
        "removed",
        "chooses the protocol between mpiexec and ranks, which is that of the mpiexec used",
    ),
    Family(
        ("HYDRA_ENV",),
        "removed",
        "'none' would keep all other variables from the ranks, their number of threads among them",
    ),
    Family(
        ("HYDRA_LAUNCHER*", "HYDRA_BOOTSTRAP*", "HYDRA_RMK"),
        "removed without hosts",
        "says by which program ranks start on other machines; without a list of hosts there are none",
    ),
    Family(
        ("HYDRA_*", "MPIEXEC_*"),
        "kept",
        "set on purpose: hosts, binding to cores, ports, a time limit, output for debugging",
    ),
    Family(
        ("MPIR_CVAR_*", "MPIR_PARAM_*", "MPICH_*", "UCX_*", "FI_*", "HWLOC_*"),
        "kept",
        "set on purpose: tuning of MPI and of the libraries below it",
    ),
    Family(
        (
            *("SLURM_*", "SLURMD_*", "SBATCH_*", "PBS_*", "LSB_*", "LSF_*", "SGE_*", "PE_HOSTFILE", "ARC"),
            *("LOADL*", "MP_*", "COBALT_*"),  # LoadLeveler, the Parallel Environment beside it, Cobalt
        ),
        "kept",
        "of a batch system: a program may want to read them; they do not decide how ranks start, since mpiexec is told",
    ),
)

HOST_FILE = "HYDRA_HOST_FILE"
# All ranks are forked on this machine, and no batch system is asked for others.
_HERE = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}


def family(name: str) -> Family | None:
    """What a variable belongs to; None for one that MPI does not react to."""
    return next((one for one in FAMILIES if any(fnmatchcase(name, pattern) for pattern in one.patterns)), None)


def for_own_mpiexec(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which an mpiexec starts all of its ranks on this machine, whatever else is set.

    Where the user names hosts in HYDRA_HOST_FILE, mpiexec starts them as its own variables say.

    >>> for_own_mpiexec({"HOME": "/home/me", "SLURM_NNODES": "4", "PMIX_RANK": "0"})
    {'HOME': '/home/me', 'SLURM_NNODES': '4', 'HYDRA_LAUNCHER': 'fork', 'HYDRA_RMK': 'user'}
    """
    hosts = names_hosts(environment)
    removed = {"removed"} if hosts else {"removed", "removed without hosts"}
    kept = {name: value for name, value in environment.items() if _fate(name) not in removed}
    return kept if hosts else kept | _HERE


def names_hosts(environment: Mapping[str, str]) -> bool:
    """Whether the user wants ranks on hosts of a list of his own."""
    return environment.get(HOST_FILE, "") != ""


def of_another_start(environment: Mapping[str, str]) -> list[str]:
    """Names of variables that ranks must not see which somebody else is about to connect."""
    return [name for name in environment if _fate(name) == "removed"]


def _fate(name: str) -> Fate:
    found = family(name)
    return "kept" if found is None else found.fate

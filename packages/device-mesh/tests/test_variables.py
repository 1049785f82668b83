"""What becomes of variables that batch systems, other launchers and the user set for the start of ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from device_mesh.variables import FAMILIES, family, for_own_mpiexec, of_another_start

BIN = Path(sys.executable).parent
# How the variables of launchers and batch systems begin, whoever makes them.
LAUNCHERS = "SLURM|SLURMD|SBATCH|PBS|LSB|LSF|SGE|PE|LOADL|COBALT|HYDRA|HYDI|MPIEXEC|PMI|PMI2|PMIX|PRTE|OMPI"
LIBRARY = "MPICH|MPIR_CVAR|MPIR_PARAM"
HERE = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}


def names_in(path: Path, prefixes: str) -> set[str]:
    """Names of variables that a program of MPICH has among its texts."""
    texts = re.findall(rb"[ -~]{5,}", path.read_bytes())
    return {text.decode() for text in texts if re.fullmatch(rf"({prefixes})_[A-Z0-9_]*[A-Z0-9]".encode(), text)}


def test_the_table_has_every_launcher_variable_that_the_installed_mpich_knows() -> None:
    known = names_in(BIN / "mpiexec.hydra", LAUNCHERS) | names_in(BIN / "hydra_pmi_proxy", LAUNCHERS)
    libraries = list((BIN.parent / "lib").glob("libmpi.so.*"))
    for library in libraries:
        known |= names_in(library, f"{LAUNCHERS}|{LIBRARY}")
    assert {"SLURM_TASKS_PER_NODE", "PBS_NODEFILE", "HYDRA_LAUNCHER", "PE_HOSTFILE", "PMIX_NAMESPACE"} <= known
    assert sorted(name for name in known if family(name) is None) == []


@pytest.mark.parametrize(
    ("name", "fate"),
    [
        ("PMIX_RANK", "removed"),
        ("PMIX_NAMESPACE", "removed"),
        ("PMI_FD", "removed"),
        ("PMI_SPAWNED", "removed"),
        ("PRTE_LAUNCHED", "removed"),
        ("OMPI_COMM_WORLD_SIZE", "removed"),
        ("MPIR_CVAR_PMI_VERSION", "removed"),
        ("HYDRA_ENV", "removed"),
        ("HYDRA_LAUNCHER", "removed without hosts"),
        ("HYDRA_BOOTSTRAP_EXEC", "removed without hosts"),
        ("HYDRA_HOST_FILE", "kept"),
        ("HYDRA_TOPO_DEBUG", "kept"),
        ("MPIEXEC_TIMEOUT", "kept"),
        ("MPIR_CVAR_CH4_NETMOD", "kept"),
        ("SLURM_JOB_ID", "kept"),
        ("PBS_NODEFILE", "kept"),
        ("LSB_MCPU_HOSTS", "kept"),
        ("LOADL_HOSTFILE", "kept"),
        ("COBALT_NODEFILE", "kept"),
    ],
)
def test_fate(name: str, fate: str) -> None:
    found = family(name)
    assert found is not None
    assert found.fate == fate


def test_what_mpi_does_not_know_is_nobodys() -> None:
    assert family("HOME") is None
    assert family("OMP_NUM_THREADS") is None


def test_ranks_are_forked_here_whatever_the_environment_says() -> None:
    kept = {"HOME": "/h", "SLURM_JOB_ID": "77", "MPIR_CVAR_NOLOCAL": "1", "HYDRA_DEBUG": "0"}
    gone = {"PMIX_RANK": "0", "HYDRA_BOOTSTRAP": "slurm", "HYDRA_LAUNCHER_EXEC": "/no/srun", "HYDRA_ENV": "none"}
    assert for_own_mpiexec(kept | gone | {"HYDRA_LAUNCHER": "ssh", "HYDRA_RMK": "pbs"}) == kept | HERE


def test_a_list_of_hosts_leaves_the_start_to_the_user() -> None:
    hosts = {"HYDRA_HOST_FILE": "/h/hosts", "HYDRA_LAUNCHER": "ssh", "SLURM_NNODES": "2"}
    assert for_own_mpiexec(hosts | {"PMIX_RANK": "0"}) == hosts
    assert for_own_mpiexec({"HYDRA_HOST_FILE": ""}) == {"HYDRA_HOST_FILE": ""} | HERE


def test_ranks_that_are_about_to_be_connected_see_nothing_of_another_start() -> None:
    assert of_another_start({"PMI_RANK": "1", "PMIX_RANK": "1", "SLURM_NNODES": "2", "HYDRA_LAUNCHER": "ssh"}) == [
        "PMI_RANK",
        "PMIX_RANK",
    ]


def test_the_page_on_launching_has_the_table() -> None:
    """docs/launching.md, where the tests run in the repository: each family with its fate."""
    page = Path(__file__).parents[3] / "docs" / "launching.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for one in FAMILIES:
        names = ", ".join(f"`{pattern}`" for pattern in one.patterns)
        assert any(row.startswith(f"| {names} | {one.fate} |") for row in rows), names


def test_ranks_of_pmix_are_refused_in_words_by_an_mpich_that_does_not_know_it() -> None:
    """PUB2-LAUNCH-02, where a launcher other than Slurm may have started the process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PMI")}
    program = [sys.executable, "-c", "from device_mesh import connect; connect()"]
    ends = [
        subprocess.run(program, env=environment | variables, capture_output=True, text=True, timeout=60, check=False)
        for variables in ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-a-1@1"}, {"PMIX_RANK": "1"})
    ]
    assert [end.returncode for end in ends] == [1, 2]
    for word in ("PMIX_RANK", "PMIX_NAMESPACE", "env -u", "--mpi=pmi2"):
        assert word in ends[0].stderr
    assert ends[1].stderr == ""

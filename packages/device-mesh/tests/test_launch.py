"""How a process was started, from what launchers leave in its environment."""

from __future__ import annotations

import pytest
from device_mesh import Launch, launched

MSRUN = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "8",
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "8118",
    "RANK_SIZE": "8",
    "RANK_ID": "5",
    "MS_NODE_ID": "5",
    "DEVICE_ID": "1",
}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "RANK_ID": "0", "MS_WORKER_NUM": "1"}, None),
        ({"PMI_SIZE": "4", "PMI_RANK": "1", "PMI_FD": "8"}, Launch("mpi", 4, 1)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, Launch("mpi", 2, 0)),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.7.0", "SLURM_STEP_NUM_TASKS": "6"}, Launch("mpi", 6, 3)),
        ({"PMIX_RANK": "3"}, Launch("mpi", None, 3)),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-a-7@1"}, Launch("mpi", None, 0)),
        # prterun in a shell of Slurm's, of one task and of several: the tasks are not prterun's ranks
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-a-12@1", "SLURM_STEP_NUM_TASKS": "1"}, Launch("mpi", None, 3)),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-a-12@1", "SLURM_STEP_NUM_TASKS": "6"}, Launch("mpi", None, 0)),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, None),  # of the shell
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0", "SLURM_STEP_NUM_TASKS": "2"}, Launch("mpi", 2, 1)),
        (
            {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            Launch("mpi", 4, 3, 1, 2),
        ),
        ({"PMI_PORT": "localhost:4711", "PMI_ID": "2"}, Launch("mpi", None, 2)),
        (MSRUN, Launch("msrun", 8, 5, 1)),
        (MSRUN | {"MS_ROLE": "MS_SCHED", "RANK_ID": "0"}, Launch("msrun-scheduler", 8)),
        ({"MS_WORKER_NUM": "8", "RANK_ID": "3"}, Launch("msrun", 8, 3)),
    ],
)
def test_what_each_launcher_says(environment: dict[str, str], launch: Launch | None) -> None:
    assert launched(environment) == launch


def test_msrun_goes_before_the_launcher_that_started_it() -> None:
    assert launched(MSRUN | {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "9"}) == Launch("msrun", 8, 5, 1)
    assert launched(MSRUN | {"PMIX_RANK": "1"}) == Launch("msrun", 8, 5, 1)


def test_a_pmi_server_of_the_users_own_goes_before_msrun() -> None:
    assert launched(MSRUN | {"PMI_PORT": "127.0.0.1:4711", "PMI_ID": "5"}) == Launch("mpi", 8, 5)


@pytest.mark.parametrize(
    ("size", "tasks", "node", "here"),
    [
        (64, "32(x2)", 0, 32),
        (48, "32,16", 0, 32),
        (48, "32,16", 1, 16),
        (21, "8(x2),4,1", 1, 8),
        (21, "8(x2),4,1", 3, 1),
        (4, "4", 0, 4),
    ],
)
def test_ranks_of_srun_know_how_many_their_node_has(size: int, tasks: str, node: int, here: int) -> None:
    """`srun --mpi=pmi2`: PMI tells the size of the job only."""
    environment = {"PMI_SIZE": str(size), "PMI_RANK": "3", "SLURM_STEP_TASKS_PER_NODE": tasks}
    assert launched(environment | {"SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}) == Launch("mpi", size, 3, 0, here)


@pytest.mark.parametrize(
    ("tasks", "node"),
    [
        ("1", "0"),  # of a shell, in which an mpiexec started the ranks
        ("32(x2)", "2"),
        ("32(x2)", ""),
        ("", "0"),
        ("32(x2", "0"),
        ("32,,32", "0"),
        ("-32,96", "0"),
        ("64(x)", "0"),
    ],
)
def test_what_slurm_says_of_another_step_or_not_clearly_counts_for_nothing(tasks: str, node: str) -> None:
    environment = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node, "SLURM_LOCALID": "0"}
    assert launched({"PMI_SIZE": "64", "PMI_RANK": "3"} | environment) == Launch("mpi", 64, 3)


def test_mpiexec_in_a_shell_of_slurm_goes_before_slurm() -> None:
    step = {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    of_mpiexec = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
    assert launched(step | of_mpiexec) == Launch("mpi", 4, 3, 1, 2)


@pytest.mark.parametrize("number", ["", "four", "-1", "٤", "1e3"])
def test_what_is_not_a_number_is_not_taken_for_one(number: str) -> None:
    assert launched({"PMI_SIZE": number, "PMI_RANK": number}) == Launch("mpi")


@pytest.mark.parametrize(
    ("launch", "speaks"),
    [
        (Launch("mpi", 4, 0), True),
        (Launch("mpi", 4, 1), False),
        (Launch("msrun", 8, 4, 0), True),  # the first of the second node
        (Launch("msrun", 8, 5, 1), False),
        (Launch("msrun", 8, None, 0), True),
        (Launch("msrun-scheduler", 8), False),
    ],
)
def test_one_process_speaks_for_all(launch: Launch, speaks: bool) -> None:
    assert launch.speaks is speaks

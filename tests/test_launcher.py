"""One process is one run, unless torchrun or srun has really started several."""

import socket

import pytest
from lines import run_line
from refusals import refuses

from fl_lightning.foundation.launcher import Launch, check_torchrun_answers, launch_of, left_over

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SALLOC = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_JOB_NAME": "interactive",
}
SRUN = SALLOC | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
}


def test_processes_of_torchrun_and_srun_are_recognised():
    assert launch_of(TORCHRUN) == Launch("torchrun", rank=3, local_rank=1, node=1, size=4)
    assert launch_of(SRUN) == Launch("srun", rank=1, local_rank=0, node=1, size=2)
    assert launch_of(SRUN | TORCHRUN) == launch_of(TORCHRUN)  # torchrun, within a job of SLURM
    assert left_over(TORCHRUN) == left_over(SRUN) == []


@pytest.mark.parametrize(
    "environment, names",
    [
        (
            {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
            ["RANK=1", "LOCAL_RANK=1", "WORLD_SIZE=2"],
        ),
        ({"NODE_RANK": "1", "GROUP_RANK": "0"}, ["NODE_RANK=1"]),
        (SALLOC, ["SLURM_NTASKS=4"]),
        # sbatch
        (
            SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
            ["SLURM_NTASKS=4"],
        ),
        (
            SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"},
            ["SLURM_NTASKS=4"],
        ),
        (
            MPIRUN,
            ["OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_LOCAL_RANK=2", "OMPI_COMM_WORLD_SIZE=4"],
        ),
        ({name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"}, ["RANK=3"]),
        (TORCHRUN | {"RANK": "4"}, ["RANK=4"]),
        (TORCHRUN | {"RANK": "first"}, ["RANK=first"]),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, []),
        ({}, []),
    ],
)
def test_what_another_job_has_left_starts_no_process(environment, names):
    assert launch_of(environment) is None
    assert left_over(environment)[: len(names)] == names
    assert bool(left_over(environment)) == bool(names)


def test_a_torchrun_that_is_gone_is_not_waited_for():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        check_torchrun_answers(TORCHRUN | address)  # rank 0 opens the port itself, later
        there = TORCHRUN | address | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        with refuses(r"torchrun does not answer at MASTER_ADDR:MASTER_PORT, 127.0.0.1:"):
            check_torchrun_answers(there)
        server.listen()
        check_torchrun_answers(there)


SMALL = (
    "--method fedavg --federation.rounds 1 --federation.clients 3 --data.fraction 0.2 --loggers "
    "null"
)


def test_processes_that_were_started_and_are_not_wanted_are_refused(monkeypatch, capsys, tmp_path):
    for name, value in (SRUN | {"SLURM_PROCID": "0"}).items():
        monkeypatch.setenv(name, value)
    assert run_line(f"fit {SMALL} --out {tmp_path / 'runs'}") == 2
    assert capsys.readouterr().err == (
        "fl-train: error: fabric.devices=1: by SLURM_STEP_ID, srun has started 2 processes: "
        "devices times num_nodes must be as many; if it has not, unset SLURM_STEP_ID\n"
    )
    assert not (tmp_path / "runs").exists()

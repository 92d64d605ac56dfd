"""Finds out whether torchrun or srun has started this process as one of several.

An earlier job, a container or a shell on a cluster (`salloc`) can leave variables that look like a
launcher's. So a launcher is recognised only if all its variables are set and consistent; otherwise
this process is a run of its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fl_lightning.foundation.errors import BadInput, check

TORCHRUN = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for each of its processes (torch.distributed.elastic)."""
SRUN = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
"""Variables that srun sets for each of its tasks. A shell of `salloc` and an `sbatch` script have
SLURM_NTASKS, but no step."""
RANKS = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_NODE_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "MPI_LOCALRANKID",
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_RANK",
)
"""Variables in which launchers (torch, Lightning, SLURM, MPI, LSF, Flux) give a process its rank or
node."""
SIZES = (
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "JSM_NAMESPACE_SIZE",
    "FLUX_JOB_SIZE",
)
"""Variables in which they give the number of processes."""
AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable that torchrun sets to True if it listens at MASTER_ADDR:MASTER_PORT itself."""
PATIENCE = 10.0
"""Seconds until torchrun must answer there. It answers at once; our choice, for a busy network."""
OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", AGENT)
"""Variables that torch reads when processes connect."""
OF_LIGHTNING = (
    "LT_CLI_USED",
    "LT_ACCELERATOR",
    "LT_STRATEGY",
    "LT_DEVICES",
    "LT_NUM_NODES",
    "LT_PRECISION",
)
"""Variables of Lightning's command line, which Fabric would use instead of its arguments."""


@dataclass(frozen=True)
class Launch:
    """The launcher that has started this process as one of several, the process's ranks (among all,
    and on its node), its node and the number of processes."""

    by: Literal["torchrun", "srun"]
    rank: int
    local_rank: int
    node: int
    size: int


def launch_of(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return how a launcher has started this process as one of several; None: no launcher has, or
    it has started one process only."""
    if all(name in environment for name in TORCHRUN):
        by: Literal["torchrun", "srun"] = "torchrun"
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE")
    elif all(name in environment for name in SRUN):
        by = "srun"
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS")
    else:
        return None
    try:
        rank, local_rank, node, size = (int(environment.get(name, 0)) for name in names)
    except ValueError:
        return None
    is_one_of_several = size > 1 and 0 <= local_rank <= rank < size
    return Launch(by, rank, local_rank, node, size) if is_one_of_several else None


def check_torchrun_answers(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `BadInput` if torchrun's variables are set and it does not answer: processes would wait
    for each other forever."""
    if environment.get(AGENT) != "True":
        return
    address = environment["MASTER_ADDR"]
    port = environment["MASTER_PORT"]
    try:
        socket.create_connection((address, int(port)), PATIENCE).close()
    except (OSError, ValueError, OverflowError) as error:
        problem = f"torchrun does not answer at MASTER_ADDR:MASTER_PORT, {address}:{port} ({error})"
        remedy = "if it has not started this process, unset TORCHELASTIC_RUN_ID"
        name = TORCHRUN[0]
        raise BadInput(name, environment[name], f"{problem}; {remedy}") from None


def rank() -> int:
    """Return this process's rank among those that a launcher has started; 0 without a launcher."""
    launch = launch_of()
    return launch.rank if launch is not None else 0


def left_over(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return `NAME=VALUE` of all variables that look like a launcher's if none has started this
    process."""
    if launch_of(environment) is not None:
        return []
    harmless_values = dict.fromkeys(RANKS, "0") | dict.fromkeys(SIZES, "1")
    return [
        f"{name}={environment[name]}"
        for name, harmless in harmless_values.items()
        if environment.get(name, harmless) != harmless
    ]


def line_on_left_over() -> str:
    """Return a warning about `left_over` variables; empty: there are none."""
    names = ", ".join(left_over())
    why = "since neither srun nor torchrun has started this process"
    several = "several processes: --fabric.devices on this machine, or srun"
    return f"environment: {names} is ignored, {why} ({several})" if names else ""


def check_launched(launch: Launch, devices: int | str, ranks: int) -> None:
    """Raise `BadInput` unless the launcher still runs and has started as many processes as the
    configuration asks for.

    Args:
        launch: of this process.
        devices: `fabric.devices`, for the error.
        ranks: number of processes by the configuration.
    """
    variable = TORCHRUN[0] if launch.by == "torchrun" else SRUN[0]
    requirement = (
        f"by {variable}, {launch.by} has started {launch.size} processes: devices times num_nodes "
        f"must be as many; if it has not, unset {variable}"
    )
    check("fabric.devices", devices, launch.size == ranks, requirement)
    if launch.by == "torchrun":
        check_torchrun_answers()

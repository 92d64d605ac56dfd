"""Finds out who has started this process: torchrun or srun, as one of several, or a person, alone.

Variables of an earlier job, of a container or of a shell on a cluster (`salloc`) look like a
launcher's and start nothing. So a launcher counts only where all that it sets is there and fits
together; otherwise one process is one run.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fl_lightning.foundation.errors import BadInput, check

TORCHRUN = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each of its processes (torch.distributed.elastic)."""
SRUN = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
"""What srun sets for each of its tasks. A shell of `salloc` and an `sbatch` script have
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
"""In which launchers say which of several processes this one is: those of torch, Lightning, SLURM,
MPI, LSF, Flux."""
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
"""In which they say how many there are."""
AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Set to True by torchrun where it listens at MASTER_ADDR:MASTER_PORT itself, before it starts its
processes."""
PATIENCE = 10.0
"""Seconds for torchrun to answer there. It answers at once: ours, for a busy network."""
OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", AGENT)
"""What torch itself reads when processes meet."""
OF_LIGHTNING = (
    "LT_CLI_USED",
    "LT_ACCELERATOR",
    "LT_STRATEGY",
    "LT_DEVICES",
    "LT_NUM_NODES",
    "LT_PRECISION",
)
"""What Lightning's own command sets, and Fabric takes instead of its arguments."""


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher has started: its rank, of all and on its node, and
    their number."""

    by: Literal["torchrun", "srun"]
    rank: int
    local_rank: int
    node: int
    size: int


def launch_of(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return the launcher that has started this process as one of several; None: it is alone,
    whatever is left in the environment."""
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
    """Raise `BadInput` where torchrun is gone and its variables stayed: processes would wait for
    each other."""
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
    """This process's rank among those that a launcher has started; 0 where it was started by
    hand."""
    launch = launch_of()
    return launch.rank if launch is not None else 0


def left_over(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return `NAME=VALUE` of all variables that call this process one of several, though no
    launcher has started it."""
    if launch_of(environment) is not None:
        return []
    harmless_values = dict.fromkeys(RANKS, "0") | dict.fromkeys(SIZES, "1")
    return [
        f"{name}={environment[name]}"
        for name, harmless in harmless_values.items()
        if environment.get(name, harmless) != harmless
    ]


def line_on_left_over() -> str:
    """Return a line on `left_over` for the user; empty where there is nothing."""
    names = ", ".join(left_over())
    why = "since neither srun nor torchrun has started this process"
    several = "several processes: --fabric.devices on this machine, or srun"
    return f"environment: {names} is not heeded, {why} ({several})" if names else ""


def check_launched(launch: Launch, devices: int | str, ranks: int) -> None:
    """Raise `BadInput` unless `launch` is there and has started the `ranks` processes that the
    configuration asks for. `devices`: of the configuration."""
    variable = TORCHRUN[0] if launch.by == "torchrun" else SRUN[0]
    requirement = (
        f"{launch.by} has started {launch.size} processes: devices times num_nodes must be as many "
        f"(if it has started none, unset {variable})"
    )
    check("fabric.devices", devices, launch.size == ranks, requirement)
    if launch.by == "torchrun":
        check_torchrun_answers()

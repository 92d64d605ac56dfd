"""Lightning's cluster environments and launcher for a run's processes, which this package, torchrun
or srun has started (`foundation.launcher`)."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies.launchers import _MultiProcessingLauncher
from lightning.fabric.strategies.launchers.multiprocessing import (
    _check_missing_main_guard,
    _GlobalStateSnapshot,
)
from torch.multiprocessing.spawn import start_processes

from fl_lightning.foundation import launcher


class OwnProcesses(LightningEnvironment):
    """The environment of processes that this package starts on this machine; variables that another
    job has left are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        """Rank of this process."""

    @property
    def creates_processes_externally(self) -> bool:
        """Return False: this package starts the processes itself."""
        return False

    @property
    def main_address(self) -> str:
        """Return 127.0.0.1: all processes are on this machine."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Return a port that was free at the first call; later calls return the same."""
        if self._main_port == -1:
            with socket.socket() as free:
                free.bind((self.main_address, 0))
                self._main_port = free.getsockname()[1]
        return self._main_port

    def local_rank(self) -> int:
        """Return the rank on this machine, which is also the rank among all processes."""
        return self.number

    def node_rank(self) -> int:
        """Return 0, the number of the only machine."""
        return 0

    def teardown(self) -> None:
        """Do nothing."""


class TasksOfSrun(SLURMEnvironment):
    """The environment of processes that `srun` has started, without Lightning's restrictions on the
    job's name and options."""

    @staticmethod
    def _validate_srun_used() -> None:
        """Check nothing: `launch_of` has checked that srun was used."""

    @staticmethod
    def _validate_srun_variables() -> None:
        """Check nothing: Lightning refuses `--ntasks` without `--ntasks-per-node`, which works."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check nothing: `fl_lightning.run.launch` compares the number of processes with the
        configuration."""

    def world_size(self) -> int:
        """Return the number of tasks of this step; the job may have more."""
        return int(os.environ["SLURM_STEP_NUM_TASKS"])


def environment_of(launch: launcher.Launch | None) -> ClusterEnvironment:
    """Return the cluster environment of the processes that `launch` describes; None: this package
    starts them."""
    if launch is None:
        return OwnProcesses()
    if launch.by == "torchrun":
        return TorchElasticEnvironment()
    return TasksOfSrun(auto_requeue=False)


class Spawning(_MultiProcessingLauncher):
    """Spawns ranks. It works in a notebook, too, since ranks run imported code and nothing that a
    cell defines."""

    @property
    def is_interactive_compatible(self) -> bool:
        """Return True: Lightning may use this launcher in a notebook."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function` on every rank; return rank 0's result.

        A terminal sends Ctrl-C to all processes. The ranks ignore it, since a rank that is still
        importing would print a traceback; this process ends them.
        """
        _check_missing_main_guard()
        environment = self._strategy.cluster_environment
        assert environment is not None and environment.main_port  # chosen now, for all ranks
        answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
        arguments = [function, args, kwargs, answers, _GlobalStateSnapshot.capture()]
        # the ranks inherit the blocked signal
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            ranks = start_processes(
                self._wrapping_function,
                arguments,
                self._strategy.num_processes,  # type: ignore[attr-defined]
                join=False,
                start_method="spawn",
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        while not ranks.join():
            pass
        return answers.get()

    def _wrapping_function(self, process_idx: int, *args: Any) -> None:
        for name in launcher.OF_TORCH:
            os.environ.pop(name, None)
        environment = self._strategy.cluster_environment
        assert isinstance(environment, OwnProcesses)
        environment.number = process_idx
        super()._wrapping_function(process_idx, *args)

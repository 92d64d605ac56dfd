"""Starts Flower's SuperExec with fl_lightning loaded: `python -m fl_lightning.sites.superexec`.

Takes the arguments of `flower-superexec`. Flower starts a new process for every message, which
needs some seconds to load torch. Here each is a fork of this process, which has loaded it.
"""

import contextlib
import os
import sys
from importlib import import_module
from typing import Any

from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import subprocess_executor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.supernode.cli import flwr_clientapp


def launch(executor: object, spec: ExecutionSpec) -> LaunchResult:
    """Run a ClientApp in a fork of this process. Replaces the method of Flower's
    `SubprocessExecutor`, which would start a new Python process.

    Args:
        executor: Flower's executor; it is not used.
        spec: the task: its type, and the address and token with which it reports to Flower.
    """
    if spec.task_type is not TaskType.CLIENT_APP:
        return LaunchResult.failed("this SuperExec runs ClientApps")
    if os.fork() == 0:
        words = ["--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
        words += ["--insecure"] if spec.insecure else []
        if spec.root_certificates_path is not None:
            words += ["--root-certificates", spec.root_certificates_path]
        sys.argv = [
            "flwr-clientapp",
            *words,
            "--parent-pid",
            str(os.getppid()),
        ]
        flwr_clientapp()
    return LaunchResult.accepted()


def reconcile(executor: object) -> None:
    """Collect the exit codes of forks that have ended, so that none stays a zombie. Forks are this
    process's only children. `executor` is not used."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    # loads torch and everything else that a ClientApp needs
    import_module("fl_lightning.sites.flower")
    executor_class: Any = subprocess_executor.SubprocessExecutor
    executor_class.launch = launch
    executor_class.reconcile = reconcile
    flower_superexec()

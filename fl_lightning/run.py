"""From a resolved configuration to a finished run folder: what `fl-train` calls, in one process or many."""

from __future__ import annotations

import importlib
import json
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from fl_lightning import __version__
from fl_lightning.callbacks.base import Callback, RoundRecord
from fl_lightning.callbacks.checkpoint import export_model, restore
from fl_lightning.config import Component, Config
from fl_lightning.data import prepare
from fl_lightning.errors import BadInput, RunFailed
from fl_lightning.federation import Federation
from fl_lightning.models import build, head_of
from fl_lightning.parallel import ClientParallelStrategy, launched_from_outside
from fl_lightning.rng import key
from fl_lightning.runfolder import RunFolder, best


def fit(config: Config, folder: Path, resume: bool = False) -> dict[str, Any]:
    """Run `config` in `folder` (made by the caller), from the start or from its last checkpoint.

    Returns:
        What `summary.json` holds.
    """
    return _launch(config, _fit, folder, resume)


def test(config: Config, folder: Path) -> dict[str, Any]:
    """Judge the models of the run in `folder` again; returns their scores and the round they come from."""
    return _launch(config, _test, folder)


def export(config: Config, folder: Path, client: int, out: Path) -> dict[str, Any]:
    """Write the final model of one client as safetensors to `out`; returns its kind (personal or global) and round."""
    if not 0 <= client < config.federation.clients:
        raise BadInput("client", client, f"it must lie in [0, {config.federation.clients - 1}]")
    single = replace(config, fabric=replace(config.fabric, accelerator="cpu", devices=1, num_nodes=1))
    return _launch(single, _export, folder, client, out)


# ---------------------------------------------------------------- on every rank


def _fit(fabric: Fabric, config: Config, folder: Path, resume: bool) -> dict[str, Any]:
    folder = fabric.broadcast(folder)  # under torchrun or SLURM rank 0 alone has chosen it
    callbacks = {name: instantiate(f"callbacks.{name}", c) for name, c in config.callbacks.items()}
    saver = [callbacks.pop("checkpoint")] if "checkpoint" in callbacks else []  # last, when all else is written
    loggers = [instantiate(f"loggers.{name}", c) for name, c in config.loggers.items()]
    keeper = _Keeper(RunFolder(folder))
    fed = assemble(fabric, config, folder, [*callbacks.values(), keeper, *loggers, *saver])
    if resume and (folder / "checkpoints" / "manifest.json").exists():
        restore(fed, folder / "checkpoints")
    summary = fed.fit()
    accuracies = summary.pop("final_accuracies")
    if fed.is_main:  # last of all, so that loggers have had their say
        keeper.folder.write_final(accuracies)
        keeper.folder.write_summary(summary)
    return summary


def _test(fabric: Fabric, config: Config, folder: Path) -> dict[str, Any]:
    fed = assemble(fabric, config, folder, [])
    restore(fed, folder / "checkpoints")
    return {"round": fed.server.round, **fed.judge_everyone()}


def _export(fabric: Fabric, config: Config, folder: Path, client: int, out: Path) -> dict[str, Any]:
    fed = assemble(fabric, config, folder, [])
    restore(fed, folder / "checkpoints")
    kind, row, counters = fed.final_model(client)
    export_model(row, counters, fed, out)
    shapes = {"input_shape": fed.data.input_shape, "num_classes": fed.data.num_classes}
    return {"kind": kind, "round": fed.server.round, **shapes}


def assemble(fabric: Fabric, config: Config, folder: Path, callbacks: list[Callback]) -> Federation:
    """The federation of `config`, ready to run: data, model with its seeded first weights, method."""
    with fabric.rank_zero_first(local=True):  # one rank downloads
        data = prepare(config.data, config.federation.clients, config.seed, config.smoke)
    if len(config.models) > 1:
        raise BadInput("model", len(config.models), "one architecture, which all clients share")
    component = config.models[0].component
    torch.manual_seed(key(config.seed, "initial model"))
    model = build(component, data.input_shape, data.num_classes)
    method = instantiate("method", config.method)
    return Federation(fabric, config, data, model, head_of(model), method, callbacks, folder)


def instantiate(key_: str, component: Component) -> Any:
    """The object that a resolved component names."""
    module, _, name = component.class_path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    try:
        return cls(**component.init_args)
    except (TypeError, ValueError) as error:
        raise BadInput(key_, component.init_args, str(error)) from error


class _Keeper(Callback):
    """Writes the run folder's tables (rank 0), after observers and before loggers and the checkpoint."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_fit_start(self, fed: Federation) -> None:
        """Drop rows of rounds that the checkpoint does not know."""
        if fed.is_main:
            self.folder.truncate(fed.resumed_from)

    def on_round_end(self, fed: Federation, record: RoundRecord) -> None:
        """One row of metrics, a row per client, and the cohort's relation."""
        if fed.is_main:
            self.folder.append(record)

    def on_fit_end(self, fed: Federation, summary: dict[str, Any]) -> None:
        """What `summary.json` says of the whole run."""
        if not fed.is_main:
            return
        rows = self.folder.read_metrics()
        best_accuracy, best_round = best(rows)
        judged = [r["mean_accuracy"] for r in rows if "mean_accuracy" in r]
        summary |= {
            "method": type(fed.method).__name__.lower(),
            "rounds": fed.rounds,
            "clients": fed.clients,
            "best_mean_accuracy": best_accuracy,
            "best_round": best_round,
            "last_mean_accuracy": judged[-1],
            "upload_bytes": int(sum(r["upload_bytes"] for r in rows)),
            "download_bytes": int(sum(r["download_bytes"] for r in rows)),
            "world_size": fed.world_size,
            "made_up_data": fed.data.made_up,
            "version": __version__,
        }


# ---------------------------------------------------------------- starting processes


def _launch(config: Config, task: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run `task(fabric, config, *args)` on every process that the configuration asks for; rank 0's answer."""
    outside = launched_from_outside()
    accelerator = {"gpu": "cuda"}.get(config.fabric.accelerator, config.fabric.accelerator)
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    devices: int | str = config.fabric.devices
    if devices == "auto":
        devices = torch.cuda.device_count() if accelerator == "cuda" else 1
    if accelerator == "cuda" and (not torch.cuda.is_available() or int(devices) > torch.cuda.device_count()):
        raise BadInput("fabric.devices", devices, f"this machine has {torch.cuda.device_count()} CUDA devices")
    ranks = int(devices) * config.fabric.num_nodes
    if ranks > config.federation.clients:
        raise BadInput(
            "fabric.devices", devices, f"at most one process for each of the {config.federation.clients} clients"
        )
    if config.fabric.num_nodes > 1 and not outside:
        raise BadInput("fabric.num_nodes", config.fabric.num_nodes, "several nodes want SLURM or torchrun")
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # ranks joining: nobody's news
    strategy = ClientParallelStrategy(start_method="popen" if outside else "spawn")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*srun.* command is available.*")  # a login node is a fine place to run
        fabric = Fabric(
            accelerator=accelerator,
            devices=devices,
            num_nodes=config.fabric.num_nodes,
            precision=config.fabric.precision,
            strategy=strategy,
        )
    note = Path(args[0]) / ".failure.json"
    note.unlink(missing_ok=True)
    try:
        result: dict[str, Any] = fabric.launch(
            cast(Callable[..., Any], _guarded), task, config, int(devices), note, *args
        )
    except ProcessRaisedException as error:
        raise _told(note) or error from None
    except ProcessExitedException as error:
        raise RunFailed(f"rank {error.error_index} died: {error}") from None
    finally:
        note.unlink(missing_ok=True)
    return result


def _guarded(
    fabric: Fabric, task: Callable[..., dict[str, Any]], config: Config, local_ranks: int, note: Path, *args: Any
) -> dict[str, Any]:
    """One rank: its share of the cores, and a note for the parent process when it ends badly."""
    threads = config.fabric.threads
    if threads is None and local_ranks > 1:
        threads = max(1, (os.cpu_count() or 1) // local_ranks)
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        answer = task(fabric, config, *args)
    except (BadInput, RunFailed) as error:
        if fabric.world_size > 1:
            note.write_text(json.dumps([type(error).__name__, _plain(error)]))
        raise
    finally:
        torch.set_num_threads(before)
    if fabric.world_size > 1:  # else gloo's threads may outlive the interpreter and abort the process
        fabric.barrier()
        dist.destroy_process_group()
    return answer


def _plain(error: BadInput | RunFailed) -> list[Any]:
    return [error.key, str(error.value), error.allowed] if isinstance(error, BadInput) else [str(error)]


def _told(note: Path) -> BadInput | RunFailed | None:
    """The error that a rank left in its note, if it did."""
    if not note.exists():
        return None
    kind, args = json.loads(note.read_text())
    return BadInput(*args) if kind == "BadInput" else RunFailed(*args)

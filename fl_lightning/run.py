"""Runs a resolved configuration in one or several processes: trains, evaluates, exports models,
lets new clients join."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from fl_lightning.callbacks.base import Callback, in_order
from fl_lightning.callbacks.blurrelation import BlurRelation
from fl_lightning.callbacks.checkpoint import has_checkpoint, restore, why_no_checkpoint
from fl_lightning.callbacks.relations import Relation
from fl_lightning.configuration.config import Component, Config, check
from fl_lightning.data import FederatedData, imbalance, prepare
from fl_lightning.data.columns import NEWCOMER
from fl_lightning.data.federated import number_of, samples_digest
from fl_lightning.data.newcomers import from_file
from fl_lightning.engine.build import federation
from fl_lightning.engine.evaluation import Evaluator
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.joining import find_group, rule_of
from fl_lightning.engine.joining import join as join_client
from fl_lightning.engine.predictor import Predictor
from fl_lightning.engine.probe import scoring_is_pure
from fl_lightning.engine.scoring import network_scores
from fl_lightning.engine.writer import RunFolderWriter
from fl_lightning.exporting.about import described
from fl_lightning.exporting.calibration import NONE, CalibrationRule
from fl_lightning.exporting.formats import Format, write
from fl_lightning.foundation import device, launcher, log
from fl_lightning.foundation.docstrings import first_paragraph
from fl_lightning.foundation.errors import BadInput, MachineFailed, RunFailed
from fl_lightning.foundation.files import share_lock
from fl_lightning.foundation.heap import keep_freed
from fl_lightning.foundation.parallel import fabric_of
from fl_lightning.foundation.rng import key
from fl_lightning.methods.base import Method
from fl_lightning.methods.common.adapters import adapter_callbacks
from fl_lightning.models import arguments_of, build
from fl_lightning.models.base import inputs
from fl_lightning.results import provenance
from fl_lightning.results.folder import RunFolder, best
from fl_lightning.training.executors.together import Together


def fit(
    config: Config,
    folder: Path,
    resume: bool = False,
    put_together: Callable[..., Federation] | None = None,
) -> dict[str, Any]:
    """Train a run.

    Args:
        config: the resolved configuration.
        folder: the run folder, which exists.
        resume: whether to continue from the folder's last checkpoint.
        put_together: as for `fit_on_rank`.

    Returns:
        The content of `summary.json`.
    """
    precision = config.fabric.precision
    supported = precision != "16-mixed" or device.resolved(config.fabric.accelerator) != "cpu"
    requirement = "a CPU trains with bf16-mixed, 32-true or 64-true"
    check("fabric.precision", precision, supported, requirement)
    return launch(config, fit_on_rank, folder, resume, put_together)


def test(config: Config, folder: Path, which: Literal["last", "best"]) -> dict[str, Any]:
    """Evaluate the models in a checkpoint of the run in `folder` again; return their scores and the
    checkpoint's round."""
    return launch(config, _test, folder, which)


def export(
    config: Config,
    folder: Path,
    client: str,
    out: Path,
    which: Literal["last", "best"],
    kind: Format = "safetensors",
    calibration: CalibrationRule = NONE,
) -> dict[str, Any]:
    """Write a client's model to a file.

    Args:
        config: the run's configuration.
        folder: the run folder.
        client: the client's name, or its number as text.
        out: the file to write.
        which: the checkpoint.
        kind: the file's format.
        calibration: temperature and threshold to fit on the client's validation data.

    Returns:
        Kind of model (`kind`), client (`whose`), round, and the arguments of the model's class.
    """
    return launch(on_one_cpu(config), _export, folder, client, out, which, kind, calibration)


def predictor(
    config: Config, folder: Path, client: int, which: Literal["last", "best"]
) -> Predictor:
    """Return a client's model from a checkpoint of the run in `folder`, on the CPU; it takes raw
    samples."""
    requirement = f"it must lie in [0, {config.clients - 1}]"
    check("client", client, client in range(config.clients), requirement)
    model: Predictor = launch(on_one_cpu(config), _predictor, folder, client, which)["predictor"]
    return model


def join(
    config: Config,
    folder: Path,
    data: str,
    out: Path,
    rounds: int | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Write a model for a new client of a finished run to a file; the run folder is not changed.

    Args:
        config: the run's configuration.
        folder: the run folder.
        data: npz file with the client's data.
        out: the file to write.
        rounds: number of rounds in which the client trains; None: `evaluation.newcomer_rounds`.
        model: the client's architecture, as `engine.joining.find_group` takes it.

    Returns:
        As for `export`, and: whether the data are `labelled`, the rule by which the method serves
        new clients, the number of rounds `trained`, and scores on test data, if there are any.
    """
    return launch(on_one_cpu(config), _join, folder, data, out, rounds, model)


def on_one_cpu(config: Config) -> Config:
    """Return `config` for one process on the CPU."""
    fabric = replace(config.fabric, accelerator="cpu", devices=1, num_nodes=1)
    return replace(config, fabric=fabric)


TABLES = ("final_accuracies", "final_models", "final_further", "final_predictions", "newcomers")
"""Entries of a summary with a value for each client, which are written to other files."""


# ---------------------------------------------------------------- on every rank


def fit_on_rank(
    fabric: Fabric,
    config: Config,
    folder: Path,
    resume: bool,
    put_together: Callable[..., Federation] | None = None,
) -> dict[str, Any]:
    """Train a run on this rank; `launch` calls it on every rank. Arguments and result are those of
    `fit`.

    `put_together` makes the federation from (fabric, config, folder, callbacks); None: `assemble`.
    """
    folder = fabric.broadcast(folder)  # under torchrun or SLURM only rank 0 has chosen it
    prefix = f"rank {fabric.global_rank}: " if fabric.global_rank else ""
    with log.logged_to(folder / "log.txt", prefix):
        return _fit(fabric, config, folder, resume, put_together or assemble)


def _fit(
    fabric: Fabric,
    config: Config,
    folder: Path,
    resume: bool,
    put_together: Callable[..., Federation],
) -> dict[str, Any]:
    """Make callbacks and federation, restore a checkpoint if asked for, run all rounds, and write
    the summary."""
    callbacks = {name: instantiate(f"callbacks.{name}", c) for name, c in config.callbacks.items()}
    loggers = [instantiate(f"loggers.{name}", c) for name, c in config.loggers.items()]
    writer = RunFolderWriter(RunFolder(folder))
    # a rank that this package has started holds the lock together with its parent process
    lock = share_lock(folder / "lock") if _note is not None and (folder / "lock").exists() else None
    requirement = "relations are chosen by the method: drop it, and choose another --method"
    for name, callback in callbacks.items():
        is_callback = not isinstance(callback, Relation)
        check(f"callbacks.{name}", type(callback).__name__, is_callback, requirement)
    fed = put_together(fabric, config, folder, in_order([*callbacks.values(), writer], loggers))
    run = fed.run
    rows = writer.folder.read("metrics") if resume else []
    if resume and has_checkpoint(folder / "checkpoints"):
        restore(run, folder / "checkpoints")
    elif rows:
        reason = why_no_checkpoint(
            callbacks.values(), rows, ended=(folder / "summary.json").is_file()
        )
        if run.is_main:
            line = f"resume: the run {reason}; it begins again, with the same numbers"
            print(line, file=sys.stderr)
    writer.folder.check_whole(run.resumed_from)
    with run.processes.watched(config.fabric.timeout, _tell, end_lost=_note is not None):
        summary = fed.fit()
    summary = _without_tables(summary)
    if run.is_main:  # last of all: the summary marks the end of the run
        # Scripts rely on these two names; loggers, where a column has its last value, get
        # `total_...` alone.
        for name in ("upload_bytes", "download_bytes"):
            summary[name] = summary[f"total_{name}"]
        writer.folder.write_summary(summary)
    if lock is not None:
        lock.close()
    return summary


def _without_tables(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key not in TABLES}


def _test(
    fabric: Fabric, config: Config, folder: Path, which: Literal["last", "best"]
) -> dict[str, Any]:
    """Score the final models of a checkpoint."""
    fed = finished_federation(fabric, config, folder)
    _restore(fed, which)
    scoring_is_pure(fed.run, fed.worker.trainers)
    scores = _without_tables(fed.evaluator.everyone())
    return {"round": fed.run.server.round, **scores}


def finished_federation(
    fabric: Fabric, config: Config, folder: Path, callbacks: Sequence[Callback] = ()
) -> Federation:
    """Return the federation of a finished run, with initial models: the caller restores a
    checkpoint. A line is printed if the data have changed since the run."""
    fed = assemble(fabric, config, folder, list(callbacks))
    data = fed.run.data
    before = provenance.data_digest(folder)
    if fed.run.is_main and data.holds_all and before not in (None, samples_digest(data)):
        line = (
            "data: the data have changed since the run trained on them: what is computed from "
            "data (scores, input statistics) is of other samples than the run's"
        )
        print(line, file=sys.stderr)
    return fed


def _restore(fed: Federation, which: Literal["last", "best"]) -> None:
    """Load a checkpoint; for `best` print a line if a better round was not saved."""
    run = fed.run
    metric = run.metric
    t = restore(run, run.folder / "checkpoints", which)
    rows = RunFolder(run.folder).read("metrics")
    name = metric.of("validation")
    if not any(name in row for row in rows):
        name = metric.of("mean")
    score, best_round = best(rows, name)
    saved = next((row[name] for row in rows if row["round"] == t and name in row), math.nan)
    if which == "best" and run.is_main and metric.merit(score) > metric.merit(saved):
        line = (
            f"checkpoint best: round {t} ({name} {saved:.4f}), the best that was saved; round "
            f"{best_round} ({score:.4f}) was not: lower callbacks.checkpoint.seconds to save it"
        )
        print(line, file=sys.stderr)


def _export(
    fabric: Fabric,
    config: Config,
    folder: Path,
    client: str,
    out: Path,
    which: Literal["last", "best"],
    form: Format,
    calibration: CalibrationRule,
) -> dict[str, Any]:
    """Write a client's model from a checkpoint (see `export`)."""
    fed = finished_federation(fabric, config, folder)
    number = number_of(fed.run.data, client)
    _restore(fed, which)
    kind, vector, buffers = fed.evaluator.final_model(number)
    called = fed.run.data.client_label(number)
    fitted = calibrated(fed.evaluator, number, kind, vector, buffers, calibration)
    facts = write_model(fed, number, vector, buffers, out, form=form, fitted=fitted)
    return {"kind": kind, "whose": called, **facts}


def calibrated(
    evaluator: Evaluator,
    client: int,
    kind: str,
    vector: torch.Tensor,
    buffers: list[torch.Tensor],
    calibration: CalibrationRule,
) -> dict[str, Any]:
    """Return the temperature and threshold of a client's model, fitted to its validation data, by
    name; empty if `calibration` asks for neither.

    Args:
        evaluator: the run's evaluator.
        client: the client's number.
        kind: kind of the model.
        vector: the model (D,).
        buffers: buffers of the network that are not in the vector.
        calibration: whether to fit a temperature, and the rule for the threshold.
    """
    if not calibration.is_wanted:
        return {}
    bound = evaluator.at_rest(client, buffers)
    bound.ready(kind, vector)
    scores, labels = network_scores(bound, bound.data.validation)
    data = evaluator.run.data
    return calibration.fitted(scores, labels, list(data.class_names), data.client_label(client))


def _predictor(
    fabric: Fabric, config: Config, folder: Path, client: int, which: Literal["last", "best"]
) -> dict[str, Any]:
    """Return a client's model from a checkpoint (see `predictor`)."""
    fed = finished_federation(fabric, config, folder)
    _restore(fed, which)
    kind, vector, buffers = fed.evaluator.final_model(client)
    return {"predictor": Predictor(fed.evaluator.at_rest(client, buffers), kind, vector)}


def _join(
    fabric: Fabric,
    config: Config,
    folder: Path,
    data: str,
    out: Path,
    rounds: int | None,
    model: str | None,
) -> dict[str, Any]:
    """Have a new client join the run in memory, and write its model (see `join`)."""
    for name, component in config.callbacks.items():
        kind = component.load()
        requirement = f"no client can join: callbacks.{name} would not account for its upload"
        check("run", str(folder), not getattr(kind, "accounts", False), requirement)
        requirement = "no client can join: blurrelation would not change the mix that it receives"
        check("run", str(folder), kind is not BlurRelation, requirement)
    fed = finished_federation(fabric, config, folder)
    group = find_group(fed.run, model)
    restore(fed.run, folder / "checkpoints")
    rounds = config.evaluation.newcomer_rounds if rounds is None else rounds
    new, labelled = from_file(
        fed.run.data, data, config.data.validation if rounds else 0.0, config.seed, fed.run.dtype
    )
    vector, buffers, scores = join_client(fed.worker, new, labelled, rounds, group)
    rule = rule_of(fed.run, group)
    trains = (labelled or rule.unlabelled) and rule.trains != "nothing"
    # the first client of this architecture serves to find the network
    facts = write_model(fed, group.members[0], vector, buffers, out, NEWCOMER)
    return {
        "kind": "after" if labelled and rounds else "before",
        "labelled": labelled,
        "rule": rule.description,
        "trained": rounds if trains else 0,
        **scores,
        **facts,
    }


def write_model(
    fed: Federation,
    client: int,
    vector: torch.Tensor,
    buffers: list[torch.Tensor],
    out: Path,
    who: int | None = None,
    form: Format = "safetensors",
    fitted: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a model to a file.

    Args:
        fed: the run's federation. Afterwards the network of the model's architecture in it has
            copies of the model's tensors.
        client: any client with the model's architecture.
        vector: the model (D,).
        buffers: buffers of the network that are not in the vector.
        out: the file to write.
        who: the client whose preprocessing the file describes, by its number among all clients of
            the data, held-out ones included; None: `client`.
        form: the file's format.
        fitted: temperature and threshold, by name, for the file; None: none.

    Returns:
        The run's round, the arguments of the model's class, and facts about its data.

    Raises:
        BadInput: torch cannot export the model in this format.
        RunFailed: the file cannot be written.
    """
    run = fed.run
    data = run.data
    group = run.group_of(client)
    module = fed.worker.trainers[group.index].module
    model = module.model
    module.binding.bind(vector, [b.clone() for b in buffers])
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()  # own memory in place of a part of the vector
    about_data = described(data, data.numbers[client] if who is None else who) | dict(fitted or {})
    if form != "safetensors":  # the exported graph takes float32
        model.float()
    write(model, form, out, inputs(2, data.input_shape, data.text), about_data)
    component = run.config.models[group.index].component
    facts = {
        "round": run.server.round,
        "component": component,
        "arguments": arguments_of(component, data.input_shape, data.num_classes, data.text),
        "about": about_data,
    }
    if type(run.method).build is not Method.build:
        facts["built_by"] = run.config.method
    facts |= {
        "input_shape": tuple(data.input_shape),
        "classes": data.num_classes,
        "text": data.text,
    }
    if type(run.method).outputs is not Method.outputs:
        documented = first_paragraph(type(run.method).outputs.__doc__)
        facts["scored_as"] = documented or "its own hook `outputs` says"
    return facts


def assemble(
    fabric: Fabric,
    config: Config,
    folder: Path,
    callbacks: list[Callback],
    data: FederatedData | None = None,
    most_batches: int | None = None,
    together: Together | None = None,
) -> Federation:
    """Load data, make models and method, and return the federation, ready to run.

    Args:
        fabric: this process's Fabric.
        config: the resolved configuration.
        folder: the run folder.
        callbacks: the run's callbacks.
        data: the clients' data; None: those that the configuration names.
        most_batches: maximum number of batches of an epoch and of steps of a phase; None: no limit.
        together: scheduler that trains the clients of this and other runs in this process together;
            None: the run trains alone.
    """
    if data is None:
        # one rank downloads
        with fabric.rank_zero_first(local=True), device.seeded(key(config.seed, "data")):
            data = prepare(config.data, config.federation.clients, config.seed, config.smoke)
    config = imbalance.with_metric(config, data)
    data.balance = config.data.balance
    per_position = data.text is not None and data.text.per_position
    balanced = data.balance is not None and per_position
    requirement = "each sample has several targets: set it to null"
    check("data.balance", data.balance, not balanced, requirement)
    models = []
    for model in config.models:  # no model depends on those before it in the list
        device.seed_all(key(config.seed, "initial model"), fabric.device)
        models.append(build(model.component, data.input_shape, data.num_classes, data.text))
    return federation(
        fabric,
        config,
        data,
        models,
        config.method.build(),
        [*adapter_callbacks(models), *callbacks],
        folder,
        most_batches,
        together,
    )


def instantiate(config_key: str, component: Component) -> Any:
    """Return an object of a resolved component. `config_key`: the component's key, for errors."""
    try:
        return component.build()
    except (TypeError, ValueError) as error:
        raise BadInput(config_key, component.init_args, str(error)) from error


# ---------------------------------------------------------------- starting processes


def launch(config: Config, task: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Call `task(fabric, config, *args)` in every process that the configuration asks for; return
    the result of rank 0.

    Raises:
        BadInput: the number of processes or threads does not fit machine, clients or launcher; or
            the task has raised it.
        RunFailed: the task has raised it, or a process died.
    """
    launched = launcher.launch_of()
    nodes = config.fabric.num_nodes
    kind = device.resolved(config.fabric.accelerator)
    devices = _devices(config, kind)
    ranks = devices * nodes
    requirement = f"at most one process per client: use {config.clients} or fewer"
    check("fabric.devices", devices, ranks <= config.clients, requirement)
    if launched is not None:
        launcher.check_launched(launched, devices, ranks)
    elif line := launcher.line_on_left_over():
        log.say(line)
    threads = _threads(config, devices, launched is not None)
    requirement = "several nodes need SLURM or torchrun: start the run with srun or torchrun"
    check("fabric.num_nodes", nodes, nodes == 1 or launched is not None, requirement)
    # a rank's error is printed once, in one line
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # Lightning's advice to use srun
        warnings.filterwarnings("ignore", ".*srun.* command is available.*")
        fabric = fabric_of(kind, config.fabric.precision, devices, nodes, launched)
    work = cast(Callable[..., Any], _guarded)
    with tempfile.TemporaryDirectory() as notes:
        note = None if launched or ranks == 1 else Path(notes) / "failure"
        try:
            result: dict[str, Any] = fabric.launch(work, task, config, threads, note, *args)
        except ProcessRaisedException as error:
            raise _failure_in(note) or error from None
        except ProcessExitedException as error:
            end = f"exit code {error.exit_code}"
            if error.signal_name:
                end = f"killed by {error.signal_name}"
            died = MachineFailed(
                f"rank {error.error_index} died ({end}); the run can be continued with --resume"
            )
            raise _failure_in(note) or died from None
    return result


def _devices(config: Config, kind: str) -> int:
    """Return the number of devices of this `kind` to use on each node; each has one process."""
    available = device.count() if kind == device.accelerator_kind() else None
    if config.fabric.devices == "auto":
        devices = min(available or 1, config.clients)
    else:
        devices = int(config.fabric.devices)
    if config.smoke:
        devices = min(devices, config.clients)
    enough = available is None or devices <= available
    requirement = f"this machine has {available} {kind.upper()} devices: use at most as many"
    check("fabric.devices", devices, enough, requirement)
    return devices


def _threads(config: Config, devices: int, launched: bool) -> int | None:
    """Return the number of threads for each process; None: torch's default."""
    every_core = os.cpu_count() or 1
    cores = every_core
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    threads = config.fabric.threads
    requirement = f"it must be at most {4 * cores}, since this process may use {cores} cores"
    check("fabric.threads", threads, (threads or 1) <= 4 * cores, requirement)
    if threads is not None or devices == 1:
        return threads
    # SLURM has bound each task to its share of the cores
    if launched and cores < every_core:
        return cores
    return max(1, cores // devices)


_note: Path | None = None
"""In a rank that this package has started: the file into which it writes its pickled error for the
parent process. Else None."""


def _guarded(
    fabric: Fabric,
    task: Callable[..., dict[str, Any]],
    config: Config,
    threads: int | None,
    note: Path | None,
    *args: Any,
) -> dict[str, Any]:
    """Call the task on this rank with `threads` threads and the configured determinism, then leave
    the process group; return the task's result.

    In a rank that this package has started, `note` is the file for an error of the task, after
    which the rank exits at once. Such a rank also ends when its parent process ends.
    """
    global _note
    _note = note
    log.escape_unprintable()
    if note is not None:
        log.ignore_closed_pipe()
        # raise KeyboardInterrupt, so that open files are closed
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # End this rank when its parent ends. Torch would use SIGINT, which a script's background
        # jobs ignore.
        _prctl_pr_set_pdeathsig(signal.SIGTERM)
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():  # it died while this rank was starting
            _end(128 + signal.SIGTERM)
    keep_freed()
    device.set_deterministic(config.fabric.deterministic)
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        try:
            with device.rng_restored(torch.device("cpu")):  # for the script that calls us
                result = task(fabric, config, *args)
        # of evaluation or aggregation: in a visit the executor retries client by client
        except torch.OutOfMemoryError as error:
            first_line = str(error).partition("\n")[0]
            reason = f"out of memory: {first_line}; fl-train plan estimates what a run needs"
            raise RunFailed(reason) from error
    except (BadInput, RunFailed) as error:
        if note is not None:
            _tell(error)
            _end(error.exit_code)
        raise
    except KeyboardInterrupt:
        if note is not None:
            _end(128 + signal.SIGTERM)
        raise
    finally:
        torch.set_num_threads(before)
    # gloo's threads could outlive the interpreter and abort the process
    if fabric.world_size > 1:
        fabric.barrier()
        dist.destroy_process_group()
    return result


def _end(code: int) -> None:
    """End this process at once; at a normal exit torch would wait for ranks that have ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell(error: BadInput | RunFailed) -> None:
    """Report the error that ends this process: to the parent process, which prints the first such
    error, or else on stderr."""
    if _note is None:
        print("fl-train: error:", error, file=sys.stderr, flush=True)
        return
    with contextlib.suppress(FileExistsError), _note.open("xb") as file:
        pickle.dump(error, file)


def _failure_in(note: Path | None) -> BadInput | RunFailed | None:
    """Return the error that a rank has written to `note`; None: there is none."""
    if note is None:
        return None
    try:
        error: BadInput | RunFailed = pickle.loads(note.read_bytes())
    # there is no file, or the rank was killed while writing it
    except (OSError, EOFError, pickle.UnpicklingError):
        return None
    return error

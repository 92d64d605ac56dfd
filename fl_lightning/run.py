"""Runs a resolved configuration in one process or many: trains, tests, exports, joins clients."""

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
from fl_lightning.engine.joining import architecture, rule_of
from fl_lightning.engine.joining import join as join_client
from fl_lightning.engine.predictor import Predictor
from fl_lightning.engine.probe import try_evaluation
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
    """Run `config` in `folder` (made by the caller), from the start or from its last checkpoint;
    `put_together` as for `fit_on_rank`.

    Returns:
        The content of `summary.json`.
    """
    precision = config.fabric.precision
    supported = precision != "16-mixed" or device.resolved(config.fabric.accelerator) != "cpu"
    requirement = "a CPU trains with bf16-mixed, 32-true or 64-true"
    check("fabric.precision", precision, supported, requirement)
    return launch(config, fit_on_rank, folder, resume, put_together)


def test(config: Config, folder: Path, which: Literal["last", "best"]) -> dict[str, Any]:
    """Judge the models in a checkpoint of the run in `folder` again; returns their scores and its
    round."""
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
    """Write the model of a client, by name or number, to `out`; returns its kind, round and the
    model's arguments."""
    return launch(alone(config), _export, folder, client, out, which, kind, calibration)


def predictor(
    config: Config, folder: Path, client: int, which: Literal["last", "best"]
) -> Predictor:
    """One client's model of the run in `folder`, ready for raw samples; on the CPU."""
    requirement = f"it must lie in [0, {config.clients - 1}]"
    check("client", client, client in range(config.clients), requirement)
    model: Predictor = launch(alone(config), _predictor, folder, client, which)["predictor"]
    return model


def join(
    config: Config,
    folder: Path,
    data: str,
    out: Path,
    rounds: int | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Write a model for a client that was not in the run of `folder` to `out`; nothing in the
    folder is written to.

    Args:
        data: the client's data, an npz file.
        rounds: that it takes part in; None: the configuration's.
        model: its architecture, as `engine.joining.architecture` takes it.

    Returns:
        As `export`, and whether the data are `labelled`, and the accuracy on test data, if there
        are any: as received, and after training.
    """
    return launch(alone(config), _join, folder, data, out, rounds, model)


def alone(config: Config) -> Config:
    """`config` for one process, on the CPU."""
    fabric = replace(config.fabric, accelerator="cpu", devices=1, num_nodes=1)
    return replace(config, fabric=fabric)


TABLES = ("final_accuracies", "final_models", "final_further", "final_predictions", "newcomers")
"""Values for each client in a summary, which are written to files of their own."""


# ---------------------------------------------------------------- on every rank


def fit_on_rank(
    fabric: Fabric,
    config: Config,
    folder: Path,
    resume: bool,
    put_together: Callable[..., Federation] | None = None,
) -> dict[str, Any]:
    """`fit` on one rank, in a task that has been launched already.

    `put_together`: makes the federation of (fabric, config, folder, callbacks); None: `assemble`.
    """
    folder = fabric.broadcast(folder)  # under torchrun or SLURM rank 0 alone has chosen it
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
    """Make callbacks and federation, restore a checkpoint, run all rounds, write the summary."""
    callbacks = {name: instantiate(f"callbacks.{name}", c) for name, c in config.callbacks.items()}
    loggers = [instantiate(f"loggers.{name}", c) for name, c in config.loggers.items()]
    writer = RunFolderWriter(RunFolder(folder))
    # a rank that this package has started holds the lock beside its parent process
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
    fed = ended(fabric, config, folder)
    _restore(fed, which)
    try_evaluation(fed.run, fed.worker.trainers)
    scores = _without_tables(fed.evaluator.everyone())
    return {"round": fed.run.server.round, **scores}


def ended(
    fabric: Fabric, config: Config, folder: Path, callbacks: Sequence[Callback] = ()
) -> Federation:
    """Put together the federation of a run that has ended, with initial models until the caller
    restores a checkpoint; prints a line if its data have changed since."""
    fed = assemble(fabric, config, folder, list(callbacks))
    data = fed.run.data
    before = provenance.data_of(folder)
    if fed.run.is_main and data.holds_all and before not in (None, samples_digest(data)):
        line = (
            "data: the data have changed since the run trained on them: what is computed from "
            "data (scores, input statistics) is of other samples than the run's"
        )
        print(line, file=sys.stderr)
    return fed


def _restore(fed: Federation, which: Literal["last", "best"]) -> None:
    """Load a checkpoint; for `best`, print a line if a better round was not saved."""
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
    """Write a client's model of a checkpoint, calibrated if asked for."""
    fed = ended(fabric, config, folder)
    number = number_of(fed.run.data, client)
    _restore(fed, which)
    kind, vector, buffers = fed.evaluator.final_model(number)
    called = fed.run.data.called(number)
    fitted = calibrated(fed.evaluator, number, kind, vector, buffers, calibration)
    facts = written(fed, number, vector, buffers, out, form=form, fitted=fitted)
    return {"kind": kind, "whose": called, **facts}


def calibrated(
    evaluator: Evaluator,
    client: int,
    kind: str,
    vector: torch.Tensor,
    buffers: list[torch.Tensor],
    calibration: CalibrationRule,
) -> dict[str, Any]:
    """Fit temperature and threshold of a client's model to its validation data; returns them by
    name, empty where none is wanted."""
    if not calibration.is_wanted:
        return {}
    bound = evaluator.at_rest(client, buffers)
    bound.ready(kind, vector)
    scores, labels = network_scores(bound, bound.data.validation)
    data = evaluator.run.data
    return calibration.fitted(scores, labels, list(data.class_names), data.called(client))


def _predictor(
    fabric: Fabric, config: Config, folder: Path, client: int, which: Literal["last", "best"]
) -> dict[str, Any]:
    """A client's model of a checkpoint."""
    fed = ended(fabric, config, folder)
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
    """Have a new client join a copy of the run, and write its model."""
    for name, component in config.callbacks.items():
        kind = component.load()
        requirement = f"no client can join: callbacks.{name} would not account for its upload"
        check("run", str(folder), not getattr(kind, "accounts", False), requirement)
        requirement = "no client can join: blurrelation would not change the mix that it receives"
        check("run", str(folder), kind is not BlurRelation, requirement)
    fed = ended(fabric, config, folder)
    group = architecture(fed.run, model)
    restore(fed.run, folder / "checkpoints")
    rounds = config.evaluation.newcomer_rounds if rounds is None else rounds
    new, labelled = from_file(
        fed.run.data, data, config.data.validation if rounds else 0.0, config.seed, fed.run.dtype
    )
    vector, buffers, scores = join_client(fed.worker, new, labelled, rounds, group)
    rule = rule_of(fed.run, group)
    trains = (labelled or rule.unlabelled) and rule.trains != "nothing"
    # the first client stands in for any with this architecture
    facts = written(fed, group.members[0], vector, buffers, out, NEWCOMER)
    return {
        "kind": "after" if labelled and rounds else "before",
        "labelled": labelled,
        "rule": rule.says,
        "trained": rounds if trains else 0,
        **scores,
        **facts,
    }


def written(
    fed: Federation,
    client: int,
    vector: torch.Tensor,
    buffers: list[torch.Tensor],
    out: Path,
    who: int | None = None,
    form: Format = "safetensors",
    fitted: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write one model (D,), `vector` with its `buffers`; returns the run's round, the arguments of
    its class, and facts about its data. The module stays with copies of the model's tensors.

    `client` is any that runs the model's architecture. `who` is the number, among all clients of
    the data, of the one whose inputs the file describes (None: the number of `client`).

    Raises:
        BadInput: torch cannot export it as `form`.
        RunFailed: the file cannot be written.
    """
    run = fed.run
    data = run.data
    group = run.group_of(client)
    module = fed.worker.trainers[group.index].module
    model = module.model
    module.binding.bind(vector, [b.clone() for b in buffers])
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()  # memory of its own, no longer a piece of the vector
    number = data.numbers[client] if who is None else who
    about_data = described(data, number) | dict(fitted or {})
    if form != "safetensors":  # rows become numbers of 32 bits; a class's weights are read as such
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
    """The federation of `config`, ready to run; `engine.build.federation` puts it together.

    Args:
        data: None: the configuration's.
        most_batches: batches of an epoch, and steps of a phase, at most; None: all.
        together: drives the run beside others.
    """
    if data is None:
        # one rank downloads
        with fabric.rank_zero_first(local=True), device.seeded(key(config.seed, "data")):
            data = prepare(config.data, config.federation.clients, config.seed, config.smoke)
    config = imbalance.judged(config, data)
    data.balance = config.data.balance
    per_position = data.text is not None and data.text.per_position
    balanced = data.balance is not None and per_position
    requirement = "each sample has several targets here: set it to null"
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


def instantiate(key_: str, component: Component) -> Any:
    """The object that a resolved component names."""
    try:
        return component.build()
    except (TypeError, ValueError) as error:
        raise BadInput(key_, component.init_args, str(error)) from error


# ---------------------------------------------------------------- starting processes


def launch(config: Config, task: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run `task(fabric, config, *args)` on every process that the configuration asks for; returns
    the result of rank 0."""
    launched = launcher.launch_of()
    nodes = config.fabric.num_nodes
    kind = device.resolved(config.fabric.accelerator)
    devices = _devices(config, kind)
    ranks = devices * nodes
    requirement = f"at most one process for each of the {config.clients} clients"
    check("fabric.devices", devices, ranks <= config.clients, requirement)
    if launched is not None:
        launcher.check_launched(launched, devices, ranks)
    elif line := launcher.line_on_left_over():
        log.say(line)
    threads = _threads(config, devices, launched is not None)
    requirement = "several nodes want SLURM or torchrun"
    check("fabric.num_nodes", nodes, nodes == 1 or launched is not None, requirement)
    # a rank's error is printed once, in one line
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # a login node is a fine place to run
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
    """Devices of this `kind`, and so processes, on each node."""
    available = device.count() if kind == device.here() else None
    if config.fabric.devices == "auto":
        devices = min(available or 1, config.clients)
    else:
        devices = int(config.fabric.devices)
    if config.smoke:
        devices = min(devices, config.clients)
    enough = available is None or devices <= available
    requirement = f"this machine has {available} {kind.upper()} devices"
    check("fabric.devices", devices, enough, requirement)
    return devices


def _threads(config: Config, devices: int, launched: bool) -> int | None:
    """Threads of each process; None: torch's default."""
    every_core = os.cpu_count() or 1
    cores = every_core
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    threads = config.fabric.threads
    requirement = f"at most {4 * cores}: this process may use {cores} cores"
    check("fabric.threads", threads, (threads or 1) <= 4 * cores, requirement)
    if threads is not None or devices == 1:
        return threads
    # tasks that SLURM has bound to cores have their share already
    if launched and cores < every_core:
        return cores
    return max(1, cores // devices)


_note: Path | None = None
"""In a rank that this package has started: the file for its pickled error, which the parent process
reads."""


def _guarded(
    fabric: Fabric,
    task: Callable[..., dict[str, Any]],
    config: Config,
    threads: int | None,
    note: Path | None,
    *args: Any,
) -> dict[str, Any]:
    """Run the task on one rank, with its share of the cores and torch's determinism, and leave the
    process group afterwards. A rank that this package has started ends with its parent process; if
    its task fails, it leaves the error in `note` and exits at once."""
    global _note
    _note = note
    log.print_anything()
    if note is not None:
        log.outlive_readers()
        # unwind, as for Ctrl-C: close what is open
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # A rank ends with the process that started it. Torch asks for SIGINT, which a script's
        # background jobs ignore.
        _prctl_pr_set_pdeathsig(signal.SIGTERM)
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():  # killed while this one was starting
            _end(128 + signal.SIGTERM)
    keep_freed()
    device.set_deterministic(config.fabric.deterministic)
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        try:
            with device.no_draws(torch.device("cpu")):  # a script's random state stays
                result = task(fabric, config, *args)
        # outside of visits: within, the loop retries client by client
        except torch.OutOfMemoryError as error:
            first_line = str(error).partition("\n")[0]
            reason = f"out of memory: {first_line}; fl-train plan says what a run takes"
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
    # else gloo's threads may outlive the interpreter and abort the process
    if fabric.world_size > 1:
        fabric.barrier()
        dist.destroy_process_group()
    return result


def _end(code: int) -> None:
    """End this process now: all is closed, and torch would wait at exit for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell(error: BadInput | RunFailed) -> None:
    """Report why this process ends: to the parent process, which prints the first report, or on
    stderr."""
    if _note is None:
        print("fl-train: error:", error, file=sys.stderr, flush=True)
        return
    with contextlib.suppress(FileExistsError), _note.open("xb") as file:
        pickle.dump(error, file)


def _failure_in(note: Path | None) -> BadInput | RunFailed | None:
    """The error that a rank left in its note; None: it left none."""
    if note is None:
        return None
    try:
        error: BadInput | RunFailed = pickle.loads(note.read_bytes())
    # there is no note, or its writer was killed over it
    except (OSError, EOFError, pickle.UnpicklingError):
        return None
    return error

"""From a resolved configuration to a finished run folder: what `fl-train` calls, in one process or
many."""

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
from fl_lightning.callbacks.checkpoint import has_checkpoint, restore, why_none
from fl_lightning.callbacks.relations import Relation
from fl_lightning.configuration.config import Component, Config, check
from fl_lightning.data import FederatedData, imbalance, prepare
from fl_lightning.data.columns import NEWCOMER
from fl_lightning.data.federated import number_of, samples_digest
from fl_lightning.data.newcomers import from_file
from fl_lightning.engine.build import federation
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.joining import architecture, rule_of
from fl_lightning.engine.joining import join as join_client
from fl_lightning.engine.predictor import Predictor
from fl_lightning.engine.probe import try_evaluation
from fl_lightning.engine.scoring import network_scores
from fl_lightning.engine.writer import RunFolderWriter
from fl_lightning.exporting.about import about
from fl_lightning.exporting.calibration import NONE, Calibration
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
        What `summary.json` holds.
    """
    if (
        config.fabric.precision == "16-mixed"
        and device.resolved(config.fabric.accelerator) == "cpu"
    ):
        raise BadInput(
            "fabric.precision", "16-mixed", "a CPU trains with bf16-mixed, 32-true or 64-true"
        )
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
    calibration: Calibration = NONE,
) -> dict[str, Any]:
    """Write the model of a client, by name or number, to `out`; returns its kind, round and the
    model's arguments."""
    return launch(alone(config), _export, folder, client, out, which, kind, calibration)


def predictor(
    config: Config, folder: Path, client: int, which: Literal["last", "best"]
) -> Predictor:
    """One client's model of the run in `folder`, ready for raw samples; on the CPU."""
    check(
        "client", client, 0 <= client < config.clients, f"it must lie in [0, {config.clients - 1}]"
    )
    made: Predictor = launch(alone(config), _predictor, folder, client, which)["predictor"]
    return made


def join(config: Config, folder: Path, *newcomer: Any) -> dict[str, Any]:
    """Write a model for a client that was not in the run of `folder`; nothing in the folder is
    written to.

    `asked`: `data` (an npz file), `out`, `rounds`, `model` (as `architecture` has it). Returns what
    `export` returns, whether the data are `labelled`, and the accuracy on test data where there are
    any: as received, and after training.
    """
    return launch(alone(config), _join, folder, *newcomer)


def alone(config: Config) -> Config:
    """The same in one process, on the CPU."""
    return replace(config, fabric=replace(config.fabric, accelerator="cpu", devices=1, num_nodes=1))


TABLES = ("final_accuracies", "final_models", "final_further", "final_predictions", "newcomers")
"""What a summary has for each client, which is written to files of its own."""


# ---------------------------------------------------------------- on every rank


def fit_on_rank(
    fabric: Fabric,
    config: Config,
    folder: Path,
    resume: bool,
    put_together: Callable[..., Federation] | None = None,
) -> dict[str, Any]:
    """`fit` on one rank, where a caller's own task has been launched already.

    `put_together`: makes the federation of (fabric, config, folder, callbacks); None: `assemble`.
    """
    folder = fabric.broadcast(folder)  # under torchrun or SLURM rank 0 alone has chosen it
    who = f"rank {fabric.global_rank}: " if fabric.global_rank else ""
    with log.logged_to(folder / "log.txt", who):
        return _logged(fabric, config, folder, resume, put_together or assemble)


def _logged(
    fabric: Fabric,
    config: Config,
    folder: Path,
    resume: bool,
    put_together: Callable[..., Federation],
) -> dict[str, Any]:
    callbacks = {name: instantiate(f"callbacks.{name}", c) for name, c in config.callbacks.items()}
    loggers = [instantiate(f"loggers.{name}", c) for name, c in config.loggers.items()]
    writer = RunFolderWriter(RunFolder(folder))
    lock = share_lock(folder / "lock") if _note is not None and (folder / "lock").exists() else None
    for name, callback in callbacks.items():
        if isinstance(callback, Relation):
            raise BadInput(
                f"callbacks.{name}", type(callback).__name__, "a relation is brought by a method"
            )
    fed = put_together(fabric, config, folder, in_order([*callbacks.values(), writer], loggers))
    if resume and has_checkpoint(folder / "checkpoints"):
        restore(fed.run, folder / "checkpoints")
    elif resume and (rows := writer.folder.read("metrics")):
        when = why_none(callbacks.values(), rows, ended=(folder / "summary.json").is_file())
        if fed.run.is_main:
            print(
                f"resume: the run {when}; it begins again, with the same numbers", file=sys.stderr
            )
    writer.folder.check_whole(fed.run.resumed_from)
    with fed.run.processes.watched(config.fabric.timeout, _tell, end_lost=_note is not None):
        summary = fed.fit()
    # in files of their own
    summary = {key: value for key, value in summary.items() if key not in TABLES}
    if fed.run.is_main:  # last of all: it says that the run has ended
        # The two names that scripts rely on; loggers, where a column has its last value, get
        # `total_...` alone.
        summary |= {name: summary[f"total_{name}"] for name in ("upload_bytes", "download_bytes")}
        writer.folder.write_summary(summary)
    if lock is not None:
        lock.close()
    return summary


def _test(
    fabric: Fabric, config: Config, folder: Path, which: Literal["last", "best"]
) -> dict[str, Any]:
    fed = ended(fabric, config, folder)
    _restore(fed, which)
    try_evaluation(fed.run, fed.worker.trainers)
    scores = fed.evaluator.everyone()
    scores = {key: value for key, value in scores.items() if key not in TABLES}
    return {"round": fed.run.server.round, **scores}


def ended(
    fabric: Fabric, config: Config, folder: Path, callbacks: Sequence[Callback] = ()
) -> Federation:
    """The federation of a run that has ended; a line says so where its data are not those that it
    trained on."""
    fed = assemble(fabric, config, folder, list(callbacks))
    data, before = fed.run.data, provenance.data_of(folder)
    if fed.run.is_main and data.holds_all and before not in (None, samples_digest(data)):
        what = (
            "what is computed from data (scores, input statistics) is of other samples than the "
            "run's"
        )
        print(f"data: the data have changed since the run trained on them: {what}", file=sys.stderr)
    return fed


def _restore(fed: Federation, which: Literal["last", "best"]) -> None:
    """Load a checkpoint; where it is the best, say so if a round that was not saved is better."""
    t = restore(fed.run, fed.run.folder / "checkpoints", which)
    rows, metric = RunFolder(fed.run.folder).read("metrics"), fed.run.metric
    name = metric.of(
        "validation" if any(metric.of("validation") in row for row in rows) else "mean"
    )
    score, at = best(rows, name)
    ours = next((row[name] for row in rows if row["round"] == t and name in row), math.nan)
    if which == "best" and fed.run.is_main and metric.merit(score) > metric.merit(ours):
        line = f"checkpoint best: round {t} ({name} {ours:.4f}), the best that was saved"
        print(
            f"{line}; round {at} ({score:.4f}) was not: callbacks.checkpoint.seconds",
            file=sys.stderr,
        )


def _export(
    fabric: Fabric,
    config: Config,
    folder: Path,
    client: str,
    out: Path,
    which: Literal["last", "best"],
    form: Format,
    calibration: Calibration,
) -> dict[str, Any]:
    fed = ended(fabric, config, folder)
    number = number_of(fed.run.data, client)
    _restore(fed, which)
    kind, vector, buffers = fed.evaluator.final_model(number)
    fitted = {}
    if calibration.is_wanted:
        own = fed.evaluator.at_rest(number, buffers)
        own.ready(kind, vector)
        scores, labels = network_scores(own, own.data.validation)
        names, called = list(fed.run.data.class_names), fed.run.data.called(number)
        fitted = calibration.fitted(scores, labels, names, called)
    facts = written(fed, number, vector, buffers, out, form=form, fitted=fitted)
    return {"kind": kind, "whose": fed.run.data.called(number), **facts}


def _predictor(
    fabric: Fabric, config: Config, folder: Path, client: int, which: Literal["last", "best"]
) -> dict[str, Any]:
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
    private = next(
        (n for n, c in config.callbacks.items() if getattr(c.load(), "accounts", False)), None
    )
    allowed = f"a client that joins would upload what callbacks.{private} does not account for"
    check("run", str(folder), private is None, allowed)
    blurred = any(c.load() is BlurRelation for c in config.callbacks.values())
    check(
        "run",
        str(folder),
        not blurred,
        "a client that joins would receive a mix that blurrelation has not changed",
    )
    fed = ended(fabric, config, folder)
    group = architecture(fed.run, model)
    restore(fed.run, folder / "checkpoints")
    rounds = config.evaluation.newcomer_rounds if rounds is None else rounds
    new, labelled = from_file(
        fed.run.data, data, config.data.validation if rounds else 0.0, config.seed, fed.run.dtype
    )
    vector, buffers, scores = join_client(fed.worker, new, labelled, rounds, group)
    rule = rule_of(fed.run, group)
    kind = "after" if labelled and rounds else "before"
    trained = rounds if (labelled or rule.unlabelled) and rule.trains != "nothing" else 0
    # Any client with the same architecture.
    facts = written(fed, group.members[0], vector, buffers, out, NEWCOMER)
    return {
        "kind": kind,
        "labelled": labelled,
        "rule": rule.says,
        "trained": trained,
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
    """Write one model (D,) with its buffers; returns the run's round, what its class is called
    with, and what is said of its data.

    `client` has the architecture, and `who` made the inputs: its number among all that the data
    were dealt to (None: the client's).

    Raises:
        BadInput: torch cannot export it as `form`.
        RunFailed: the file cannot be written.
    """
    run = fed.run
    group = run.group_of(client)
    module = fed.worker.trainers[group.index].module
    model = module.model
    module.binding.bind(vector, [b.clone() for b in buffers])
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()  # memory of its own, no longer a piece of the vector
    known = about(run.data, run.data.numbers[client] if who is None else who) | dict(fitted or {})
    if form != "safetensors":  # rows become numbers of 32 bits; a class's weights are read as such
        model.float()
    write(model, form, out, inputs(2, run.data.input_shape, run.data.text), known)
    component = run.config.models[group.index].component
    arguments = arguments_of(component, run.data.input_shape, run.data.num_classes, run.data.text)
    facts = {
        "round": run.server.round,
        "component": component,
        "arguments": arguments,
        "about": known,
    }
    if type(run.method).build is not Method.build:
        facts["built_by"] = run.config.method
    facts |= {
        "input_shape": tuple(run.data.input_shape),
        "classes": run.data.num_classes,
        "text": run.data.text,
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
    """The federation of `config`, ready to run: data (None: the config's), model with its first
    weights, method.

    `most_batches`: batches of an epoch, and steps of a phase, at most (None: all). `together`
    drives the run beside others.
    """
    if data is None:
        # one rank downloads
        with fabric.rank_zero_first(local=True), device.seeded(key(config.seed, "data")):
            data = prepare(config.data, config.federation.clients, config.seed, config.smoke)
    config = imbalance.judged(config, data)
    data.balance = config.data.balance
    per_position = data.text is not None and data.text.per_position
    allowed = "each sample has several targets here: null"
    check("data.balance", data.balance, data.balance is None or not per_position, allowed)
    models = []
    for each in config.models:  # no model depends on those before it in the list
        device.seed_all(key(config.seed, "initial model"), fabric.device)
        models.append(build(each.component, data.input_shape, data.num_classes, data.text))
    method, every_callback = config.method.build(), [*adapter_callbacks(models), *callbacks]
    return federation(
        fabric, config, data, models, method, every_callback, folder, most_batches, together
    )


def instantiate(key_: str, component: Component) -> Any:
    """The object that a resolved component names."""
    try:
        return component.build()
    except (TypeError, ValueError) as error:
        raise BadInput(key_, component.init_args, str(error)) from error


# ---------------------------------------------------------------- starting processes


def launch(config: Config, task: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run `task(fabric, config, *args)` on every process that the configuration asks for; rank 0's
    answer."""
    outside = launcher.launch_of()
    clients = config.clients
    kind = device.resolved(config.fabric.accelerator)
    there = device.count() if kind == device.here() else None
    devices: int | str = config.fabric.devices
    if devices == "auto":
        devices = min(there or 1, clients)
    if config.smoke:
        devices = min(int(devices), clients)
    if there is not None and int(devices) > there:
        raise BadInput(
            "fabric.devices", devices, f"this machine has {there} {kind.upper()} devices"
        )
    ranks = int(devices) * config.fabric.num_nodes
    check(
        "fabric.devices",
        devices,
        ranks <= clients,
        f"at most one process for each of the {clients} clients",
    )
    if outside is not None:
        launcher.check_launched(outside, devices, ranks)
    elif line := launcher.line_on_left_over():
        log.say(line)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if (config.fabric.threads or 1) > 4 * cores:
        raise BadInput(
            "fabric.threads", config.fabric.threads, f"this process may use {cores} cores"
        )
    threads = config.fabric.threads
    # tasks that SLURM has bound to cores have their share already
    if threads is None and int(devices) > 1:
        threads = (
            cores if outside and cores < (os.cpu_count() or 1) else max(1, cores // int(devices))
        )
    if config.fabric.num_nodes > 1 and not outside:
        raise BadInput(
            "fabric.num_nodes", config.fabric.num_nodes, "several nodes want SLURM or torchrun"
        )
    # a rank's error is said once, in one line
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # a login node is a fine place to run
        warnings.filterwarnings("ignore", ".*srun.* command is available.*")
        fabric = fabric_of(
            kind, config.fabric.precision, int(devices), config.fabric.num_nodes, outside
        )
    work = cast(Callable[..., Any], _guarded)
    with tempfile.TemporaryDirectory() as notes:
        note = None if outside or ranks == 1 else Path(notes) / "failure"
        try:
            result: dict[str, Any] = fabric.launch(work, task, config, threads, note, *args)
        except ProcessRaisedException as error:
            raise _failure_in(note) or error from None
        except ProcessExitedException as error:
            how = (
                f"killed by {error.signal_name}"
                if error.signal_name
                else f"exit code {error.exit_code}"
            )
            died = MachineFailed(
                f"rank {error.error_index} died ({how}); the run can be continued with --resume"
            )
            raise _failure_in(note) or died from None
    return result


# where a rank that this package has started leaves its last words, for the parent process
_note: Path | None = None


def _guarded(
    fabric: Fabric,
    task: Callable[..., dict[str, Any]],
    config: Config,
    threads: int | None,
    note: Path | None,
    *args: Any,
) -> dict[str, Any]:
    """One rank: its share of the cores, and a note for the parent process when it ends badly."""
    global _note
    _note = note
    log.print_anything()
    if note is not None:
        log.outlive_readers()
        # unwind, as for Ctrl-C: close what is open
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # It ends with the process that started it. Torch asks for SIGINT, which a script's
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
            with device.no_draws(torch.device("cpu")):  # a script goes on with its own
                answer = task(fabric, config, *args)
        # beside the visits, which are tried again in smaller parts
        except torch.OutOfMemoryError as error:
            first_line = str(error).partition("\n")[0]
            raise RunFailed(
                f"out of memory: {first_line}; fl-train plan says what a run takes"
            ) from error
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
    return answer


def _end(code: int) -> None:
    """End this process now: all is closed, and torch would wait at exit for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell(error: BadInput | RunFailed) -> None:
    """Say why this process ends: to the parent process, which prints what it is told first, or on
    stderr."""
    if _note is None:
        print("fl-train: error:", error, file=sys.stderr, flush=True)
        return
    with contextlib.suppress(FileExistsError), _note.open("xb") as file:
        pickle.dump(error, file)


def _failure_in(note: Path | None) -> BadInput | RunFailed | None:
    """The error that a rank left in its note, if it did."""
    if note is None:
        return None
    try:
        error: BadInput | RunFailed = pickle.loads(note.read_bytes())
    # there is none, or its writer was killed over it
    except (OSError, EOFError, pickle.UnpicklingError):
        return None
    return error

"""The public functions, for scripts and notebooks. The command line makes its commands, keys and
help from their signatures and docstrings.

They raise `BadInput` and `RunFailed`. Torch and pandas are imported only when they are needed.
"""

# Without `from __future__ import annotations`: the command line needs annotations as objects.
import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fl_lightning.configuration.catalogue import nearest_first
from fl_lightning.configuration.config import check
from fl_lightning.configuration.ranges import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
)
from fl_lightning.configuration.resolve import start_of
from fl_lightning.configuration.signatures import checked, plain
from fl_lightning.foundation import command, signals
from fl_lightning.foundation.metric import JudgeMetric
from fl_lightning.foundation.newprocess import in_new_process
from fl_lightning.lab.given import ConfigLike, flags_of, layers_of, object_settings
from fl_lightning.lab.worth.answer import Worth as Worth
from fl_lightning.results.result import RunResult

if TYPE_CHECKING:
    import numpy as np
    import torch
    from pandas import DataFrame

    from fl_lightning.engine.predictor import Predictor
    from fl_lightning.lab.audit.auditing import Audit
    from fl_lightning.lab.handing_over import Exported
    from fl_lightning.lab.planning.plan import Plan
    from fl_lightning.lab.study.comparison import Comparison
    from fl_lightning.lab.study.launch import Runs
    from fl_lightning.sites.deploy import Deployed

Place = str | os.PathLike[str]
Definition = Mapping[str, Any] | Place
Names = str | Iterable[str] | None
Form = Literal["table", "csv", "latex", "json", "html"]
Kind = Literal["before", "distilled", "after", "global", "finetuned"]
BATCH = 500
"""Samples of a forward pass of `Run.predict`: `evaluation.batch_size`'s default."""


class Run(RunResult):
    """A finished run: its tables (`RunResult`) and its clients' models."""

    def model(self, client: int | str, checkpoint: Literal["last", "best"] = "last") -> "Predictor":
        """Return a client's final model, an `nn.Module` that takes raw samples, as the data source
        has them.

        Args:
            client: the client's number, or its name if clients have names.
            checkpoint: the newest, or the best by validation (else mean) accuracy.

        Raises:
            BadInput: there is no such client, or no checkpoint.
        """
        check("checkpoint", checkpoint, checkpoint in ("last", "best"), "it must be last or best")
        key = self._number(client), checkpoint
        models: dict[Any, Predictor] = self.__dict__.setdefault("_models", {})
        if key not in models:
            from fl_lightning.results.opening import config_of
            from fl_lightning.run import predictor

            models[key] = predictor(config_of(self.folder), self.folder, *key)
        return models[key]

    def predict(self, client: Any, x: Any = None) -> "np.ndarray":
        """Return a client's model's predictions for raw samples, (n,): names of classes, or in a
        regression numbers.

        Args:
            client: the client's number or name; or a DataFrame with the samples of several clients,
                whose column `data.group_column` names the client of each row.
            x: n samples as `Predictor.forward` takes them; None: they are in the DataFrame.
        """
        import numpy as np

        model, scores = self._scores(client, x)
        if model.task == "regression":
            return scores[:, 0].numpy()
        return np.array(model.class_names)[scores.argmax(-1).numpy()]

    def predict_proba(self, client: Any, x: Any = None) -> "DataFrame":
        """Return a client's model's probabilities for raw samples: a row for each sample, with the
        index of a DataFrame, and a column for each class. Arguments as in `predict`."""
        from pandas import DataFrame

        model, scores = self._scores(client, x)
        requirement = "it has a regression, or a class at each position of a text: call predict"
        has_classes = model.task == "classification" and scores.ndim == 2
        check("run", str(self.folder), has_classes, requirement)
        index = getattr(client if x is None else x, "index", None)
        return DataFrame(scores.softmax(-1).numpy(), index, model.class_names)

    def _scores(self, client: Any, x: Any) -> "tuple[Predictor, torch.Tensor]":
        """Return a model, and the models' outputs for all samples: (n, ..., classes) without
        classes that no client has, or (n, 1) in a regression. Arguments as in `predict`; the model
        is that of the only or first client."""
        import torch

        if x is not None:
            model = self.model(client)
            rows = x.iloc if hasattr(x, "iloc") else x
            width = len(model.class_names) or 1
            with torch.no_grad():
                parts = [model(rows[at : at + BATCH]).cpu() for at in range(0, len(x), BATCH)]
            return model, torch.cat([torch.zeros(0, width), *(part[..., :width] for part in parts)])
        column = self.config["data"]["group_column"]
        fits = column in getattr(client, "columns", ()) and len(client) > 0
        requirement = (
            f"without x, give a DataFrame: rows whose column {column!r} names the client of each; "
            "else call predict(client, x)"
        )
        check("x", type(client).__name__, fits, requirement)
        names = client[column].astype(str).str.strip().to_numpy()
        groups = client.groupby(names).indices.items()
        scored = [(rows, *self._scores(name, client.iloc[rows])) for name, rows in groups]
        order = torch.cat([torch.as_tensor(rows) for rows, _, _ in scored]).argsort()
        return scored[0][1], torch.cat([scores for _, _, scores in scored])[order]

    def _number(self, client: int | str) -> int:
        import numpy as np

        if not isinstance(client, str):
            is_number = isinstance(client, int | np.integer) and not isinstance(client, bool)
            check("client", client, is_number, "it must be a client's number, from 0, or its name")
            return int(client)
        from fl_lightning.foundation.named import composed

        numbers = {name: number for number, name in self.client_names.items()}
        name = composed(client)
        names = nearest_first(name, numbers) or "clients have none here"
        check("client", name, name in numbers, f"no such client; names: {names}")
        return numbers[name]


# ---------------------------------------------------------------- one run


@checked
def fit(
    config: ConfigLike = (),
    *,
    data: Any = None,
    model: Any = None,
    method: Any = None,
    label: Any = None,
    group: Any = None,
    unit: Any = None,
) -> Run:
    """Run federated training.

    Later config files and flags override earlier ones. In help, a note such as '50: KAPC on MNIST'
    says where a default comes from ('our choice': from this project).

    The run takes place in this process, or in the processes that `fabric.devices` asks for. If it
    starts several, a script must keep its calls below ``if __name__ == "__main__":``. Signal
    handlers are restored afterwards, also if the run fails.

    Args:
        config: keys and values as a config file has them, nested or with dots
            (``{"federation.rounds": 20}``), over the file or files that ``config`` names; or the
            path of a config file, or the name of one that is shipped; or flags as on the command
            line (``["--config=kapc_digits", "--seed=1"]``). In a mapping a class, or an object of a
            method, may be where a file has its import path, and None is null: ``{"loggers": None}``
            goes without any.
        data: a DataFrame; (x, y) or (x, y, client) arrays, a Dataset of such samples, or a
            LightningDataModule (`data.given.keep`). Clients that are named make the natural
            partition, unless ``config`` says otherwise. The data are kept beside the run, in
            ``OUT/given``, where a resumed run and other processes find them.
        model: an `nn.Module`, with whose weights every client begins (kept in ``OUT/given``); a
            class, or a name.
        method: an object of a method's class, the class, or a name.
        label: of a DataFrame, the column of labels (`data.label_column`).
        group: of a DataFrame, the column that names the clients (`data.group_column`).
        unit: of a DataFrame, the column that names the person or thing that a row describes, if
            several rows may describe the same (`data.unit_column`).

    Returns:
        The finished run.

    Raises:
        BadInput: a key, value or class is wrong.
        RunFailed: the run could not go on; in most cases it can be continued with `resume`.
    """
    objects = _objects(locals())
    others = multiprocessing.active_children()
    out = start_of(layers_of(config, {})[0]).out
    try:
        with object_settings(objects, Path(out)) as layer:
            from fl_lightning.lab.fitting import train

            return Run(train(*layers_of(config, layer)))
    except KeyboardInterrupt:
        signals.stop_ranks(but=others)
        raise


def resolved(config: ConfigLike = ()) -> str:
    """Return a run's resolved config as YAML, which `config` accepts as a file."""
    from fl_lightning.configuration.resolve import to_yaml
    from fl_lightning.lab.fitting import config_of_run
    from fl_lightning.results.opening import settings_to_resume

    layers, config_name = layers_of(config, {})
    saved = settings_to_resume(start_of(layers))
    return to_yaml(config_of_run(layers, config_name, saved))


@checked
def test(
    run: Place, *, checkpoint: Literal["last", "best"] = "last", config: ConfigLike = ()
) -> dict[str, Any]:
    """Evaluate the models of a finished run again.

    Args:
        run: DIR: the run folder.
        checkpoint: The newest, or the best by validation (else mean) accuracy.
        config: keys of evaluation, hardware and the data's place, over the run's.

    Returns:
        Scores by name, and the round.
    """
    from fl_lightning.results.opening import config_of

    run_config = config_of(Path(run), layers_of(config, {})[0])
    from fl_lightning.run import test as engine

    return engine(run_config, Path(run), checkpoint)


@checked
def export(
    run: Place,
    client: int | str,
    out: Place,
    *,
    format: Literal["safetensors", "torch_export", "onnx"] = "safetensors",
    checkpoint: Literal["last", "best"] = "last",
    temperature: bool = False,
    threshold: Literal["youden", "cost"] | None = None,
    cost: PositiveFloat | None = None,
    case: str | None = None,
) -> "Exported":
    """Write a client's model, with code that loads it and predicts rows.

    Args:
        run: DIR: the run folder.
        client: The client's name, or its number, from 0.
        out: FILE: the file to write; it ends with .safetensors, .pt2 (torch_export) or .onnx.
        format: Tensors, or the graph that torch traces: torch.export's, or ONNX (extra onnx).
        checkpoint: The newest, or the best by validation (else mean) accuracy.
        temperature: Scale probabilities by one number that is fitted to the client's validation
            data.
        threshold: For two classes, the rule that chooses the least probability at which one class
            is predicted, on the client's validation data: Youden's J, or the least cost (default:
            the more probable class).
        cost: Number of false alarms that are as bad as one missed case, for the rule cost.
        case: Name of the class to detect (the cases), for the rule cost.
    """
    from fl_lightning.exporting.calibration import CalibrationRule
    from fl_lightning.lab.handing_over import export as write

    def of_site(*arguments: Any) -> Any:
        from fl_lightning.sites.ends import export_at_site

        return export_at_site(*arguments)

    calibration = CalibrationRule(temperature, threshold, cost, case)
    return write(Path(run), str(client), os.fspath(out), format, checkpoint, calibration, of_site)


@checked
def join(
    run: Place,
    data: Place,
    out: Place,
    *,
    rounds: NonNegativeInt | None = None,
    architecture: str | None = None,
) -> "Exported":
    """Give a new client a personalised model from a finished run.

    The run is not changed.

    Args:
        run: DIR: the run folder.
        data: FILE.npz: Holds x_train, y_train (omit: no labels) and, to score it, x_test, y_test.
        out: FILE.safetensors: the file to write.
        rounds: Rounds of local training, given labels (default: the run's
            evaluation.newcomer_rounds).
        architecture: The client's, if the run has several: its name, or its number from 0.
    """
    from fl_lightning.lab.handing_over import join as write

    return write(Path(run), os.fspath(data), os.fspath(out), rounds, architecture)


@checked
def plan(config: ConfigLike = (), *, samples: PositiveInt = 500) -> "Plan":
    """Rehearse a round: memory, bytes and seconds of a fit.

    Also takes the keys of fit.

    Args:
        config: as for `fit`.
        samples: Training samples per client to make up if the data are missing.
    """
    run_config = _complete_config(config)
    from fl_lightning.lab.planning.rehearsal import rehearse

    return rehearse(run_config, samples)


@checked
def submit(
    config: ConfigLike = (),
    *,
    nodes: PositiveInt = 1,
    gpus_per_node: NonNegativeInt = 0,
    tasks_per_node: PositiveInt = 1,
    time: str | None = None,
    partition: str | None = None,
    warning: PositiveInt = 120,
    sbatch: str | None = None,
    dry_run: bool = False,
    array: str | None = None,
    cpus_per_task: PositiveInt | None = None,
    mem: str | None = None,
    setup: str | None = None,
) -> str:
    """Submit a fit to SLURM: a job that resumes, or an array.

    Also takes the keys of fit.

    Args:
        config: as for `fit`.
        nodes: Number of machines; sets fabric.num_nodes.
        gpus_per_node: GPUs per machine, one process each; sets fabric.devices.
        tasks_per_node: Processes per machine, if gpus_per_node is 0.
        time: Time limit of a job, HH:MM:SS; every job needs one.
        partition: SLURM's partition.
        warning: Seconds before the limit at which the run stops itself.
        sbatch: Further options for sbatch: '--qos=low --exclusive'.
        dry_run: Print the script; submit nothing.
        array: A sweep, with a run folder for each point: 'seed=0-4 data.alpha=0.1,0.3'.
        cpus_per_task: Cores of each process.
        mem: Memory of each machine: MiB, or with a unit, such as 64G.
        setup: Lines of shell before the run: 'module load cuda; export OMP_PROC_BIND=true'.

    Returns:
        A text that says which jobs were submitted; with dry_run the script.
    """
    job = _job(locals())
    from fl_lightning.lab.submit import submit as hand_in

    return hand_in(flags_of(config), job, array)


@checked
def deploy(
    config: ConfigLike = (), *, out: Place, sites: Place | None = None, rehearse: bool = True
) -> "Deployed":
    """Write a Flower app that runs a method with each client at its own site.

    Also takes the keys of fit.

    Args:
        config: as for `fit`.
        out: DIR: a new folder for the app; the run gets its name.
        sites: DIR: also write the config's data, as one file per client, for a rehearsal.
        rehearse: First run two rounds by messages and in the simulator; stop if results differ.
    """
    run_config = _complete_config(config)
    from fl_lightning.sites.deploy import deploy as write

    return write(run_config, os.fspath(out), sites=_text(sites), rehearse=rehearse)


@checked
def check_method(
    own_method: str | type,
    *,
    only: Names = None,
    quick: bool = False,
    out: Place | None = None,
    config: ConfigLike = (),
) -> None:
    """Test your own method: seeds, resume, cohorts, bytes, ranks.

    Also takes keys of fit.

    Args:
        own_method: its class, or the import path.
        only: Some checks by name, separated by commas (default: all).
        quick: Only the checks of seeds, resume, cohorts, failures and bytes, in three rounds.
        out: DIR: a new folder that keeps the runs (default: they are deleted).
        config: keys of the runs.

    Raises:
        RunFailed: some checks fail.
    """
    from fl_lightning.lab.check import checking

    if not isinstance(config, Mapping | str | os.PathLike):
        config = list(config)
        another = any(flag.partition("=")[0] == "--method" for flag in config)
        requirement = f"{plain(own_method)} is checked; --method.ARG sets its arguments"
        check("method", "--method", not another, requirement)
    layers, _ = layers_of(config, {})
    checking.check_method(plain(own_method), _text(only), quick, _text(out), layers)


@checked
def check_data(
    config: ConfigLike = (),
    *,
    data: Any = None,
    label: Any = None,
    group: Any = None,
    unit: Any = None,
    out: Place | None = None,
) -> "DataFrame":
    """Compare a table's columns between silos, before training.

    Also takes keys of fit: --data.root FILE.csv, --data.group_column and the like.

    Args:
        config: as for `fit`.
        data: a DataFrame, as for `fit`.
        label: likewise.
        group: likewise.
        unit: likewise.
        out: FILE.html: a page with the findings, and an example of the summary of columns, without
            any row, that each silo would have to send for them.

    Returns:
        A row for each finding, the worst first: `column`, `silo`, `finding` (leak, units, coding,
        constant, identifier, missing, outcome), the value `here` and `elsewhere`, and the same in
        words as `numbers`.
    """
    objects = _objects(locals())
    from fl_lightning.configuration.resolve import resolve
    from fl_lightning.lab.datacheck.checking import check_data as compared

    with tempfile.TemporaryDirectory() as folder, object_settings(objects, Path(folder)) as layer:
        layers, _ = layers_of(config or {}, layer)
        return compared(resolve(layers).data, _text(out))


# ---------------------------------------------------------------- many runs


@checked
def study(
    definition: Definition,
    out: Place,
    *,
    data: Any = None,
    model: Any = None,
    label: Any = None,
    group: Any = None,
    unit: Any = None,
    config: ConfigLike = (),
    workers: PositiveInt | None = None,
    together: int | str | None = None,
    accept_changed_code: bool = False,
    methods: Names = None,
    seeds: str | None = None,
    settings: Names = None,
    slurm: bool = False,
    nodes: PositiveInt = 1,
    gpus_per_node: NonNegativeInt = 0,
    tasks_per_node: PositiveInt = 1,
    time: str | None = None,
    partition: str | None = None,
    warning: PositiveInt = 120,
    sbatch: str | None = None,
    dry_run: bool = False,
    cpus_per_task: PositiveInt | None = None,
    mem: str | None = None,
    setup: str | None = None,
) -> "Runs":
    """Run the missing runs of a grid of methods, settings and seeds.

    Keys with a dot override the study's base.

    Args:
        definition: a study file, the name of a shipped one, or its content as a mapping; its
            methods may be classes or objects.
        out: DIR: the study's folder; an existing one is continued.
        data: as for `fit`, over the study's base.
        model: likewise.
        label: likewise.
        group: likewise.
        unit: likewise.
        config: keys over the study's base.
        workers: Worker processes (default: one per core, or 1 with a GPU).
        together: Runs that train together in a process: a number, or auto, which measures whether
            that is faster (default: the study's).
        accept_changed_code: Continue although your own code has changed; the run keeps both
            versions.
        methods: Run only these methods now: labels, separated by commas; baselines that the study
            adds always run.
        seeds: Run only these seeds now (0, or 0,2, or 0-4); new ones are added to the study.
        settings: Run only these settings now: KEY=VALUE,... such as data.alpha=0.3.
        slurm: Submit the runs to SLURM as an array of jobs; the keys below describe a job.
        nodes: Number of machines; sets fabric.num_nodes.
        gpus_per_node: GPUs per machine, one process each; sets fabric.devices.
        tasks_per_node: Processes per machine, if gpus_per_node is 0.
        time: Time limit of a job, HH:MM:SS; every job needs one.
        partition: SLURM's partition.
        warning: Seconds before the limit at which the run stops itself.
        sbatch: Further options for sbatch: '--qos=low --exclusive'.
        dry_run: Print the script; submit nothing.
        cpus_per_task: Cores of each process.
        mem: Memory of each machine: MiB, or with a unit, such as 64G.
        setup: Lines of shell before the runs: 'module load cuda; export OMP_PROC_BIND=true'.

    Returns:
        The runs; `scores` is a table of all their final scores.

    Raises:
        BadInput: the study or a key is wrong; nothing has been written.
        RunFailed: some runs failed; the others have been run.
    """
    job, objects = _job(locals()), _objects(locals())
    from fl_lightning.lab.study import launch

    part = (_text(methods), seeds, _text(settings))
    options = launch.StudyOptions(
        os.fspath(out), workers, together, accept_changed_code, slurm, job
    )
    return _of_a_study(launch.study, definition, out, objects, config, part, options)


@checked
def reproduce(
    definition: str,
    *,
    out: Place | None = None,
    config: ConfigLike = (),
    workers: PositiveInt | None = None,
    together: int | str | None = None,
    accept_changed_code: bool = False,
    methods: Names = None,
    seeds: str | None = None,
    settings: Names = None,
    rounds: int | None = None,
    format: Form = "table",
    no_run: bool = False,
) -> "Comparison":
    """Run what is missing of a paper's table; print its numbers beside ours.

    Args:
        definition: a study file that has the paper's numbers, or the name of a shipped one.
        out: DIR: the study's folder; an existing one is continued (default: studies/NAME).
        config: keys over the study's base.
        workers: Worker processes (default: one per core, or 1 with a GPU).
        together: Runs that train together in a process: a number, or auto, which measures whether
            that is faster (default: the study's).
        accept_changed_code: Continue although your own code has changed; the run keeps both
            versions.
        methods: Run only these methods now: labels, separated by commas; baselines that the study
            adds always run.
        seeds: Run only these seeds now (0, or 0,2, or 0-4); new ones are added to the study.
        settings: Run only these settings now: KEY=VALUE,... such as data.alpha=0.3.
        rounds: Number of rounds in place of the study's; the table's heading names it.
        format: Format of the table.
        no_run: Run nothing; print the table of the finished runs.
    """
    from fl_lightning.lab.study import launch
    from fl_lightning.lab.study.reproduce import reproduce as run_again

    place = str(Path("studies") / definition.removesuffix(".yaml").replace("/", "-"))
    options = launch.StudyOptions(os.fspath(out or place), workers, together, accept_changed_code)
    part = (_text(methods), seeds, _text(settings))
    return run_again(definition, layers_of(config, {})[0], part, options, rounds, format, no_run)


@checked
def tune(
    definition: Definition,
    out: Place,
    *,
    data: Any = None,
    model: Any = None,
    label: Any = None,
    group: Any = None,
    unit: Any = None,
    config: ConfigLike = (),
    trials: PositiveInt = 20,
    metric: JudgeMetric | None = None,
    workers: PositiveInt | None = None,
    seed: NonNegativeInt = 1000,
    untuned: bool = False,
    study: bool = True,
    accept_changed_code: bool = False,
) -> "DataFrame":
    """Tune methods on validation data, then run a study of the choices.

    The study has new seeds.

    Args:
        definition: as for `study`.
        out: DIR: the search's folder; an existing one is continued.
        data: as for `fit`, over the study's base.
        model: likewise.
        label: likewise.
        group: likewise.
        unit: likewise.
        config: keys over the study's base.
        trials: Trials of each method: the base's settings, nine random ones, then TPE's.
        metric: Score by which trials are chosen and the study's runs are judged (default:
            evaluation.metric).
        workers: Worker processes (default: one per core, or 1 with a GPU).
        seed: Seed of the trials, which the study must not use. 1000: few studies do.
        untuned: Also evaluate the settings that the search began from, as further rows.
        study: Run the study of the chosen arguments; false: only write its file, tuned.yaml.
        accept_changed_code: Continue although your own code has changed; the run keeps both
            versions.

    Returns:
        `tuned.csv`: a row for each method, with its choice and its trials' scores on validation
        data; empty while trials are at work in other processes.

    Raises:
        BadInput: as `study`.
        RunFailed: as `study`.
    """
    objects = _objects(locals())
    from fl_lightning.lab.study import tuning

    options = tuning.TuneOptions(
        os.fspath(out),
        workers,
        accept_changed_code=accept_changed_code,
        trials=trials,
        metric=metric,
        seed=seed,
        untuned=untuned,
        runs_study=study,
    )
    _of_a_study(tuning.tune, definition, out, objects, config, options)
    import pandas as pd

    table = Path(out) / "tuned.csv"
    return pd.read_csv(table) if table.is_file() else pd.DataFrame()


@checked
def compare(
    runs: Any,
    *,
    baseline: str | None = None,
    judge: Kind | None = None,
    metric: JudgeMetric | None = None,
    target: PositiveShare | None = None,
    format: Form = "table",
    out: Place | None = None,
    accept_changed_code: bool = False,
    clients: bool = False,
    columns: Names = None,
    caption: str | None = None,
    label: str | None = None,
) -> "Comparison":
    """Compare methods over seeds, paired, in one table.

    Args:
        runs: a study's folder or archive, or several runs: folders or `Run`.
        baseline: Method to compare with (default: local training, else the first).
        judge: Kind of model that all methods are scored by (default: each run's own).
        metric: Score: accuracy, or one of evaluation.metrics (default: what the runs are judged by,
            evaluation.metric).
        target: Accuracy, up to 1, at which bytes and seconds are compared.
        format: Format of the table.
        out: FILE: written in place of the screen.
        accept_changed_code: Compare although seeds of a row were trained with different versions of
            your own code; a note says so.
        clients: A row for each client: samples, alone, each method, paired differences over seeds.
        columns: Columns of the table, with commas, such as mean,difference,interval.
        caption: Caption of the LaTeX table.
        label: Label of the LaTeX table, such as tab:digits.

    Returns:
        `table` has a row for each method by judge and setting, every digit kept (docs/compare.md
        names the columns); `notes` is what is said below it; `str` the text in `format`.
    """
    from fl_lightning.lab.study import comparison

    options = comparison.CompareOptions(
        baseline=baseline,
        judge=judge,
        metric=metric,
        target=target,
        format=format,
        out=_text(out),
        accept_changed_code=accept_changed_code,
        clients=clients,
        columns=_text(columns),
        caption=caption,
        label=label,
    )
    return comparison.compare(_folders(runs), options)


@checked
def report(
    runs: Any,
    *,
    out: Place | None = None,
    figures: Literal["svg", "pdf", "png"] | None = None,
    accept_changed_code: bool = False,
) -> str:
    """Write one HTML page on runs (or folders of runs), or on a study.

    Args:
        runs: folders, or a study's.
        out: FILE.html: the page (default: report.html, in the run folder of a single RUN).
        figures: Also write each chart to a file, in FILE-figures.
        accept_changed_code: For a study: as in fl-train compare.

    Returns:
        A text with the page's path.
    """
    from fl_lightning.lab.report.writing import report as write

    return write(_folders(runs), _text(out), figures, accept_changed_code)


@checked
def worth(
    config: ConfigLike = (),
    out: Place = "worth",
    *,
    data: Any = None,
    label: Any = None,
    group: Any = None,
    unit: Any = None,
    methods: Names = None,
    repeats: Annotated[int, Range(2)] | None = None,
    minutes: PositiveFloat | None = None,
    metric: Literal["accuracy", "balanced_accuracy", "auroc", "mae"] | None = None,
    margin: PositiveFloat | None = None,
    leave_one_out: bool = False,
    curve: bool = False,
    workers: PositiveInt | None = None,
) -> Worth:
    """Estimate what each silo gains by federating.

    Also takes --config FILE and keys of fit.

    Args:
        config: as for `fit`.
        out: DIR: folder for runs and results; an existing one is continued.
        data: as for `fit`.
        label: likewise.
        group: likewise.
        unit: likewise.
        methods: Methods besides FedAvg, separated by commas (default: fedper,ditto,crosskapc,
            fedcac,partialpooling and the config's). Each is scored after 1, 3 and 10 times the
            rounds.
        repeats: Trainings of each method, rounded up to a multiple of 5, the number of folds
            (default: 10).
        minutes: Time limit, in place of repeats: whole cycles of 5 folds are trained while time is
            left; if the first does not end, its finished folds count.
        metric: Score of the gains (default: evaluation.metric; for a regression mae).
        margin: Points below which a difference does not matter (default: 2; for mae: 2 % of the
            silo's error, in the target's unit).
        leave_one_out: Also train without each silo in turn: how much the others' scores fall.
        curve: Also train with 10, 25 and 50 % of each silo's samples: up to which size federating
            pays.
        workers: Worker processes (default: one per core, or 1 with a GPU).

    Returns:
        The answer: `silos` is a DataFrame with a row for each silo; `consortium` has the results
        for all silos together.

    Raises:
        BadInput: a key or value is wrong.
        RunFailed: trainings failed; the same call tries them again.
    """
    objects = _objects(locals())
    from fl_lightning.lab.worth import output
    from fl_lightning.lab.worth.launch import worth as launch

    with object_settings(objects, Path(out).parent) as layer:
        measured = launch(
            layers_of(config, layer)[0],
            Path(out),
            methods=None if methods is None else [name.strip() for name in str(methods).split(",")],
            again=command.line("worth", "--out", os.fspath(out)),
            repeats=repeats,
            minutes=minutes,
            metric=metric,
            margin=margin,
            leave_one_out=leave_one_out,
            curve=curve,
            workers=workers,
        )
    page = Path(out) / "worth.html"
    return Worth(Path(out), f"{output.table(measured)}the page: {page}")


@checked
def audit(run_or_study: Place, out: Place) -> "Audit":
    """Measure what finished runs reveal about their clients' data.

    Args:
        run_or_study: a folder.
        out: DIR: folder for audit.json, audit.csv and audit.html.

    Raises:
        RunFailed: a method claims a smaller epsilon than its canaries allow.
    """
    from fl_lightning.lab.audit.auditing import audit as audited

    return audited(Path(run_or_study), Path(out))


@checked
def archive(
    study_or_archive: Place,
    *,
    out: Place | None = None,
    rerun: str | None = None,
    config: ConfigLike = (),
) -> str:
    """Pack a study into one file, or train a run in such a file again.

    Args:
        study_or_archive: a study's folder, or an archive.
        out: FILE.zip: the archive (default: STUDY.zip); with --rerun a new folder for the run.
        rerun: CELL: folder of a run in the archive, such as runs/kapc/seed-0: train it again and
            compare the results.
        config: keys that say where the data are, for a run that is trained again.

    Returns:
        A text that says what was done.

    Raises:
        RunFailed: the run's results differ from the archive's.
    """
    from fl_lightning.lab.study.archive import archive as pack

    return pack(Path(study_or_archive), _text(out), rerun, layers_of(config, {})[0])


@checked
def status(folder: Place = "runs") -> Any:
    """Show progress of runs: a table of those in a folder, or of a study's.

    Args:
        folder: a folder of runs, or a study's.
    """
    from fl_lightning.lab.status import table

    return table(Path(folder))


@checked
def dashboard(
    *,
    entity: str | None = None,
    project: str = "fl_lightning",
    name: str = "fl_lightning",
    json: Place | None = None,
) -> str:
    """Save a workspace for the project at W&B or in a file.

    Args:
        entity: W&B entity (default: the user's own).
        project: W&B project.
        name: Name of the view; a view of this name is replaced.
        json: FILE: write the view there and send nothing.
    """
    from fl_lightning.lab.report.workspace import dashboard as save

    return save(entity, project, name, _text(json))


# ---------------------------------------------------------------- arguments


def _of_a_study(
    work: Any,
    definition: Definition,
    out: Place,
    objects: Mapping[str, Any],
    config: ConfigLike,
    *further: Any,
) -> Any:
    """Read a study's definition, add a script's `objects` (data, model, ...) to its base, and call
    `work(content, layers, *further)` in a new process (`in_new_process`); return its result."""
    from fl_lightning.lab.study.studyfile import read

    with object_settings(objects, Path(out).parent) as layer:
        is_name = isinstance(definition, str | os.PathLike)
        content = read(str(definition)) if is_name else plain(definition)
        if layer and isinstance(content, dict):
            base = content.get("base") or []
            content["base"] = [*(base if isinstance(base, list) else [base]), layer]
        layers, _ = layers_of(config, {})
        # `plain` writes classes of the script itself as '__main__.NAME'
        uses_script = "'__main__." in f"{content}{layers}"
        return in_new_process(work, content, layers, *further, names_main=uses_script)


def _objects(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a function's arguments with which a script passes objects."""
    names = ("data", "model", "method", "label", "group", "unit")
    return {name: arguments[name] for name in names if name in arguments}


def _job(arguments: Mapping[str, Any]) -> Any:
    """Return the SLURM job that the arguments of `submit` or `study` describe."""
    from fl_lightning.lab.submit import Job

    return Job(**{key: arguments[key] for key in Job.__dataclass_fields__})


def _folders(runs: Any) -> list[str]:
    """Return the folders of one or several runs as text."""
    several = [runs] if isinstance(runs, str | os.PathLike | RunResult) else list(runs)
    return [str(run.folder) if isinstance(run, RunResult) else os.fspath(run) for run in several]


def _complete_config(config: ConfigLike) -> Any:
    """Return the resolved configuration. A table that cannot be read is refused before torch is
    imported; a missing one is not refused."""
    from fl_lightning.configuration.resolve import resolve
    from fl_lightning.configuration.tables import Absent, check_first_rows

    layers, _ = layers_of(config, {})
    with contextlib.suppress(Absent):  # `plan` makes data up
        check_first_rows(layers)
    return resolve(layers)


def _text(value: Any) -> str | None:
    """Return a path, or names separated by commas, as text."""
    return None if value is None else str(value)

"""Several runs beside each other: by which model they are compared, what differs, and all scores in
one table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from fl_lightning.configuration.config import check, flat
from fl_lightning.foundation.metric import ACCURACY, Metric
from fl_lightning.results.result import RunResult

if TYPE_CHECKING:
    from pandas import DataFrame

_ORDER = ("after", "before", "finetuned", "global")
"""Of kinds of model to compare runs by; clients' own models come first, as personalised methods are
about them."""
MACHINE = ("data.root", "data.public_root", "data.download", "data.resident")
"""Keys of a configuration that say where data lie, not which; but see `_own_data`."""
QUIET = ("heatmaps", "ledger", "progress", "checkpoint")
"""Callbacks that change no number: they name no method."""
SHARED = ("data", "federation", "model", "optimizer")
"""Groups of keys that make a setting, where run folders differ in them."""
ALSO = ("smoke", "evaluation.finetune_epochs")
"""Further keys that do."""
TIDY = ["method", "setting", "seed", "client", "model", "metric", "value"]
"""Columns of `tidy`."""
ABSENT = object()
"""The value of a key that a configuration does not have."""


@dataclass(frozen=True)
class Comparison:
    """By which kind of model runs are compared."""

    kind: str | None
    """One that all judged runs were scored by; None: there is none, and each run keeps its own
    judge."""
    differ: bool
    """Whether the runs have different judges."""
    metric: Metric = ACCURACY

    @classmethod
    def of(cls, runs: list[RunResult]) -> Comparison:
        """Their own judge where it is one, else the first kind in all of them: after training, then
        before, ..."""
        metric = runs[0].metric if runs else ACCURACY
        judged = [run for run in runs if run.has(metric.of("mean"))]
        judges = {run.judge for run in judged}
        if len(judges) <= 1:
            return cls(next(iter(judges), None), False, metric)
        shared = (kind for kind in _ORDER if all(run.has(metric.by(kind)) for run in judged))
        return cls(next(shared, None), True, metric)

    @property
    def column(self) -> str:
        """Of metrics.csv."""
        return self.metric.by(self.kind) if self.kind and self.differ else self.metric.of("mean")


def same_but_seed(runs: list[RunResult]) -> list[int]:
    """A number for each run, from 0: equal where runs differ in nothing but their seed (and where
    data lie)."""
    groups: dict[str, int] = {}
    numbers = []
    for run in runs:
        keys = {k: v for k, v in flat(run.config) if k != "seed" and k not in MACHINE}
        settings = repr(sorted((keys | {"data.root": _own_data(run)}).items()))
        numbers.append(groups.setdefault(settings, len(groups)))
    return numbers


def seeds_apart(runs: list[RunResult]) -> list[list[int]]:
    """Numbers of runs that differ in nothing but their seed (and where data lie), by group, each of
    two or more.

    Runs of which two have the same seed are no group: one seed counted twice would narrow the
    spread.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for number, group in enumerate(same_but_seed(runs)):
        groups[group].append(number)
    return [
        members
        for members in groups.values()
        if len(set(_seeds(runs, members))) == len(members) > 1
    ]


def same_seeds(runs: list[RunResult]) -> bool:
    """Whether each method in each setting has run with the same several seeds, each once."""
    groups = seeds_apart(runs)
    seeds = [sorted(_seeds(runs, members)) for members in groups]
    return sum(map(len, groups)) == len(runs) > 0 and all(
        of_group == seeds[0] for of_group in seeds
    )


def _seeds(runs: list[RunResult], members: list[int]) -> list[str]:
    return [repr(runs[number].setting("seed")) for number in members]


def run_folders(paths: list[Path]) -> list[Path]:
    """`paths`, in which a folder of runs (or of folders of runs, as a study is) stands for all runs
    in it."""
    return [folder for path in paths for folder in (_runs_in(path) or [path])]


def _runs_in(path: Path) -> list[Path]:
    if (path / "config.yaml").is_file():
        return [path]
    inside = sorted(path.iterdir()) if path.is_dir() else []
    return [
        folder
        for sub in inside
        if sub.is_dir() and sub.name != "references"
        for folder in _runs_in(sub)
    ]


def differing(runs: list[RunResult]) -> Iterator[tuple[str, list[Any]]]:
    """Every dotted key of their configurations whose value is not the same in all runs, and the
    values."""
    every = [dict(flat(run.config)) for run in runs]
    for key in dict.fromkeys(key for settings in every for key in settings):
        values = [settings.get(key, ABSENT) for settings in every]
        if any(value != values[0] for value in values):
            yield key, values


def differing_keys(runs: list[RunResult]) -> list[str]:
    """The keys, but those of `MACHINE`, that are known to differ: earlier versions did not have all
    of them."""
    known = []
    for key, values in differing(runs):
        named = [value for value in values if value is not ABSENT]
        if key not in MACHINE and any(value != named[0] for value in named):
            known.append(key)
    return known


def labels(runs: list[RunResult]) -> list[str]:
    """Each run's method, the arguments in which runs of that method differ, its callbacks' too, and
    the callbacks that not all runs have."""
    callbacks = [[c for c in run.config.get("callbacks") or {} if c not in QUIET] for run in runs]
    shared = set(callbacks[0]).intersection(*callbacks) if runs else set()
    names = [method_of(run) for run in runs]
    keys_of = {
        name: differing_keys([run for run, other in zip(runs, names, strict=True) if other == name])
        for name in set(names)
    }
    labelled = []
    for run, name, own in zip(runs, names, callbacks, strict=True):
        words = [name]
        for key in keys_of[name]:
            group, part = (*key.split("."), "")[:2]
            if key.startswith("method.init_args.") or (group == "callbacks" and part in own):
                short = key.replace(".init_args.", ".").removeprefix(f"{group}.")
                words.append(f"{short}={run.setting(key)}")
        labelled.append(" ".join([*words, *(f"+{c}" for c in own if c not in shared)]))
    return labelled


def _own_data(run: RunResult) -> str:
    """The name of the file or folder of own data, which tells them from others wherever they lie;
    else empty."""
    root = PurePath(str(run.setting("data.root") or ""))
    return (
        root.name
        if root.suffix or run.setting("data.source") in ("arrays", "images", "table")
        else ""
    )


def method_of(run: RunResult) -> str:
    """The short name of a run's method."""
    return str(run.method).rpartition(".")[2].lower()


def words(setting: Mapping[str, Any]) -> str:
    """A setting as text: `data.alpha=0.1, model.hidden=[16]`."""
    return ", ".join(f"{key}={value}" for key, value in setting.items())


def settings(runs: list[RunResult]) -> list[str]:
    """Of each run, the data, federation, model and optimiser settings in which the runs differ:
    `data.alpha=0.1`."""
    keys = [key for key in differing_keys(runs) if key.partition(".")[0] in SHARED or key in ALSO]
    roots = [_own_data(run) for run in runs]
    own = [{"data.root": root} if len({*roots}) > 1 else {} for root in roots]
    return [
        words(root | {key: run.setting(key) for key in keys})
        for run, root in zip(runs, own, strict=True)
    ]


def tidy(runs: Iterable[RunResult], names: Sequence[tuple[str, str]] | None = None) -> DataFrame:
    """The final scores of all runs, a row for each run, client and metric.

    Columns: `method` (its label among these runs), `setting` (what else differs but the seed),
        `seed`, `client`,
    `model` (the kind of the client's final model), `metric`, `value`. Runs that are not finished
    have no rows.

    `names`: method and setting of each run, as a study calls them; None: by what differs among the
    runs.
    """
    from pandas import DataFrame, concat

    runs = [run for run in runs if run.finished]
    names = list(zip(labels(runs), settings(runs), strict=True)) if names is None else names
    tables = [
        run.final.melt(
            [name for name in ("client", "name", "model") if name in run.final], var_name="metric"
        )
        .dropna(subset="value")
        .assign(method=label, setting=setting, seed=run.setting("seed"))
        for run, (label, setting) in zip(runs, names, strict=True)
    ]
    return (
        concat(tables, ignore_index=True).reindex(columns=TIDY)
        if tables
        else DataFrame(columns=TIDY)
    )


def load(paths: list[Path], regression: bool = True) -> list[RunResult]:
    """Read run folders, in the order given.

    Raises:
        BadInput: a folder does not exist or holds no run, or is given twice; it is a regression
            beside a classification (or judged by another metric), or (unless `regression`) at all.
    """
    resolved = [path.resolve() for path in paths]
    for at, path in enumerate(paths):
        check(
            "run",
            str(path),
            not path.is_dir() or resolved.index(resolved[at]) == at,
            "it must be given once",
        )
    runs = [RunResult(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    for path, run in zip(paths, runs, strict=True):
        fine = regression or run.task == "classification"
        check(
            "run",
            str(path),
            fine,
            "it is a regression, and a comparison speaks of accuracies; see fl-train report",
        )
        same = run.metric is runs[0].metric or not regression  # a comparison names its metric
        check(
            "run",
            str(path),
            same,
            f"it is judged by the {run.metric.words}, {runs[0].name} by another metric",
        )
    return runs


def damage(run: RunResult) -> str | None:
    """What of a run that has ended is damaged, in words; None: nothing, or it has not ended."""
    if not (run.folder / "summary.json").is_file():
        return None
    run.rows("final")
    unread = {note for section in ("runs", "accuracy", "fairness") for note in run.notes[section]}
    for name in ("summary.json", "metrics.csv", "final.csv"):
        if f"{name} cannot be read" in unread:
            return f"its {name} is damaged"
    if not run.finished:
        ended = run.files.read_summary().get("rounds") == run.rounds_asked
        return "its metrics.csv lacks rounds" if ended else None
    rows = len(run.files.read("final"))
    return "its final.csv lacks clients" if 0 < rows < run.summary.clients else None


def _names(paths: list[Path]) -> list[str]:
    """Folder names, with their parents' where that is needed to tell them apart."""
    short = [path.resolve().name for path in paths]
    names = [
        name if short.count(name) == 1 else f"{path.resolve().parent.name}/{name}"
        for path, name in zip(paths, short, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({names[:at].count(name) + 1})"
        for at, name in enumerate(names)
    ]

"""Several runs: the kind of model to compare, differences of their settings, and a table of all
scores."""

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

Runs = list[RunResult]
_KINDS_TO_COMPARE = ("after", "before", "finetuned", "global")
"""Kinds of models by which runs are compared, in this order; clients' own models come first, since
personalised methods aim at them."""
PLACE_KEYS = ("data.root", "data.public_root", "data.download", "data.resident")
"""Keys that tell where data lie, not which they are; see `_own_data`."""
NEUTRAL_CALLBACKS = ("heatmaps", "ledger", "progress", "checkpoint")
"""Callbacks that change no number, so they are left out of a method's label."""
SETTING_GROUPS = ("data", "federation", "model", "optimizer")
"""Groups of keys that describe a setting."""
SETTING_KEYS = ("smoke", "evaluation.finetune_epochs")
"""Further keys that describe a setting."""
TIDY = ["method", "setting", "seed", "client", "model", "metric", "value"]
"""Columns of `tidy`."""
ABSENT = object()
"""Value of a key that a configuration does not have."""


@dataclass(frozen=True)
class CommonScore:
    """Kind of model, and metric, by which runs are compared."""

    kind: str | None
    """A kind of model that all runs have scores of; None: there is none, and each run keeps its own
    judge."""
    differ: bool
    """Whether the runs' judges differ."""
    metric: Metric = ACCURACY

    @classmethod
    def of(cls, runs: Runs) -> CommonScore:
        """Choose the kind: the runs' judge if all have the same, else the first kind that all have
        scores of (after training, before, ...)."""
        metric = runs[0].metric if runs else ACCURACY
        judged = [run for run in runs if run.has(metric.of("mean"))]
        judges = {run.judge for run in judged}
        if len(judges) <= 1:
            return cls(next(iter(judges), None), False, metric)
        for kind in _KINDS_TO_COMPARE:
            if all(run.has(metric.by(kind)) for run in judged):
                return cls(kind, True, metric)
        return cls(None, True, metric)

    @property
    def column(self) -> str:
        """Column of metrics.csv that holds these scores."""
        if self.kind and self.differ:
            return self.metric.by(self.kind)
        return self.metric.of("mean")


def group_of_each(runs: Runs) -> list[int]:
    """Return a group number for each run, from 0; runs that differ only in the seed and in where
    their data lie (`PLACE_KEYS`) have the same number."""
    groups: dict[str, int] = {}
    numbers = []
    for run in runs:
        settings = dict(flat(run.config))
        settings |= dict.fromkeys(("seed", *PLACE_KEYS)) | {"data.root": _own_data(run)}
        text = repr(sorted(settings.items()))
        numbers.append(groups.setdefault(text, len(groups)))
    return numbers


def seed_groups(runs: Runs) -> list[list[int]]:
    """Return the groups (`group_of_each`) of two or more runs, each a list of positions in `runs`.

    A group in which two runs have the same seed is left out: it would count that seed twice, and
    narrow the spread.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for number, group in enumerate(group_of_each(runs)):
        groups[group].append(number)
    replicates: list[list[int]] = []
    for members in groups.values():
        seeds = set(_seeds(runs, members))
        if len(members) > 1 and len(seeds) == len(members):
            replicates.append(members)
    return replicates


def have_same_seeds(runs: Runs) -> bool:
    """Return whether all groups of runs (one method in one setting) have the same seeds: at least
    two, and each of them once in a group."""
    seeds = [sorted(_seeds(runs, members)) for members in seed_groups(runs)]
    if not seeds or sum(map(len, seeds)) < len(runs):
        return False
    return all(of_group == seeds[0] for of_group in seeds)


def _seeds(runs: Runs, members: list[int]) -> list[str]:
    return [repr(runs[number].setting("seed")) for number in members]


def run_folders(paths: list[Path]) -> list[Path]:
    """Return run folders; a path to a folder of runs, or of folders of runs (a study), is replaced
    by all runs in it."""
    return [folder for path in paths for folder in (_runs_in(path) or [path])]


def _runs_in(path: Path) -> list[Path]:
    if (path / "config.yaml").is_file():
        return [path]
    runs: list[Path] = []
    for folder in sorted(path.iterdir()) if path.is_dir() else []:
        if folder.is_dir() and folder.name != "references":
            runs += _runs_in(folder)
    return runs


def differing(runs: Runs) -> Iterator[tuple[str, list[Any]]]:
    """Yield each dotted configuration key whose value is not the same in all runs, and the
    values."""
    settings_of_runs = [dict(flat(run.config)) for run in runs]
    for key in dict.fromkeys(key for settings in settings_of_runs for key in settings):
        values = [settings.get(key, ABSENT) for settings in settings_of_runs]
        if any(value != values[0] for value in values):
            yield key, values


def differing_keys(runs: Runs) -> list[str]:
    """Return the configuration keys whose values differ between runs, except `PLACE_KEYS`.

    A run that does not have a key, such as a run of an earlier version, is not compared by it.
    """
    keys = []
    for key, values in differing(runs):
        present = [value for value in values if value is not ABSENT]
        if key not in PLACE_KEYS and any(value != present[0] for value in present):
            keys.append(key)
    return keys


def labels(runs: Runs) -> list[str]:
    """Return a label for each run: its method, the arguments that differ among runs of the method
    and of its callbacks, and the callbacks that not all runs have."""
    callbacks = []
    for run in runs:
        names = run.config.get("callbacks") or {}
        callbacks.append([name for name in names if name not in NEUTRAL_CALLBACKS])
    shared = set(callbacks[0]).intersection(*callbacks) if runs else set()
    by_method: dict[str, Runs] = defaultdict(list)
    for run in runs:
        by_method[method_of(run)].append(run)
    keys_of = {name: differing_keys(members) for name, members in by_method.items()}
    labelled = []
    for run, callbacks_of_run in zip(runs, callbacks, strict=True):
        name = method_of(run)
        words = [name]
        for key in keys_of[name]:
            group, part, *_ = *key.split("."), ""  # a key without a dot has the part ""
            is_argument = key.startswith("method.init_args.")
            if is_argument or (group == "callbacks" and part in callbacks_of_run):
                short = key.replace(".init_args.", ".").removeprefix(f"{group}.")
                words.append(f"{short}={run.setting(key)}")
        words += [f"+{callback}" for callback in callbacks_of_run if callback not in shared]
        labelled.append(" ".join(words))
    return labelled


def _own_data(run: RunResult) -> str:
    """Return the name of the user's file or folder of data, which identifies them wherever they
    lie; empty for other data."""
    root = PurePath(str(run.setting("data.root") or ""))
    is_own = root.suffix or run.setting("data.source") in ("arrays", "images", "table")
    return root.name if is_own else ""


def method_of(run: RunResult) -> str:
    """Return the short name of a run's method."""
    return str(run.method).rpartition(".")[2].lower()


def words(setting: Mapping[str, Any]) -> str:
    """Return a setting as text: `data.alpha=0.1, model.hidden=[16]`."""
    return ", ".join(f"{key}={value}" for key, value in setting.items())


def settings(runs: Runs) -> list[str]:
    """Return, for each run, the data, federation, model and optimiser settings in which the runs
    differ, as text: `data.alpha=0.1`."""
    differing = differing_keys(runs)
    keys = [
        key for key in differing if key in SETTING_KEYS or key.partition(".")[0] in SETTING_GROUPS
    ]
    roots = [_own_data(run) for run in runs]
    has_roots = len(set(roots)) > 1
    texts = []
    for run, root in zip(runs, roots, strict=True):
        setting: dict[str, Any] = {"data.root": root} if has_roots else {}
        texts.append(words(setting | {key: run.setting(key) for key in keys}))
    return texts


def tidy(
    runs: Iterable[RunResult],
    names: Sequence[tuple[str, str]] | None = None,
) -> DataFrame:
    """Return the final scores of all finished runs, a row for each run, client and metric.

    Columns: `method` (label of the run), `setting` (other differences but the seed), `seed`,
    `client`, `model` (kind of the client's final model), `metric`, `value`.

    `names`: method and setting of each run, as in a study; None: derived from the differences among
    the runs.
    """
    from pandas import DataFrame, concat

    runs = [run for run in runs if run.finished]
    if not runs:
        return DataFrame(columns=TIDY)
    if names is None:
        names = list(zip(labels(runs), settings(runs), strict=True))
    tables = []
    for run, (label, setting) in zip(runs, names, strict=True):
        of_client = [name for name in ("client", "name", "model") if name in run.final]
        scores = run.final.melt(of_client, var_name="metric").dropna(subset="value")
        seed = run.setting("seed")
        tables.append(scores.assign(method=label, setting=setting, seed=seed))
    return concat(tables, ignore_index=True).reindex(columns=TIDY)


def load(paths: list[Path], regression: bool = True) -> Runs:
    """Read run folders, in the order given.

    Args:
        paths: the folders.
        regression: whether regressions are allowed.

    Raises:
        BadInput: a folder holds no run or is named twice; runs are judged by different metrics; or
            a run is a regression, and these are not allowed.
    """
    earlier: set[Path] = set()
    for path in paths:
        is_new = path.resolve() not in earlier or not path.is_dir()
        check("run", str(path), is_new, "it is named twice: name it once")
        earlier.add(path.resolve())
    names = _names(paths)
    runs = [RunResult(path, name) for path, name in zip(paths, names, strict=True)]
    for path, run in zip(paths, runs, strict=True):
        if regression:  # else a comparison names its metric
            requirement = (
                f"it is judged by the {run.metric.words}, {runs[0].name} by another metric: choose "
                f"runs with one metric"
            )
            check("run", str(path), run.metric is runs[0].metric, requirement)
        else:
            requirement = (
                "it is a regression, and only accuracies are compared: see fl-train report"
            )
            check("run", str(path), run.task == "classification", requirement)
    return runs


def damage(run: RunResult) -> str | None:
    """Describe the damaged file of a run that has ended; None if there is none, or the run has not
    ended."""
    if not (run.folder / "summary.json").is_file():
        return None
    run.rows("final")  # notes what cannot be read of it
    notes = run.notes
    unread = [*notes["runs"], *notes["accuracy"], *notes["fairness"]]
    for name in ("summary.json", "metrics.csv", "final.csv"):
        if f"{name} cannot be read" in unread:
            return f"its {name} is damaged"
    if not run.finished:
        ended = run.files.read_summary().get("rounds") == run.rounds_asked
        return "its metrics.csv lacks rounds" if ended else None
    rows = len(run.files.read("final"))
    return "its final.csv lacks clients" if 0 < rows < run.summary.clients else None


def _names(paths: list[Path]) -> list[str]:
    """Return the folders' names, preceded by their parents' if two are equal."""
    places = [path.resolve() for path in paths]
    short = [place.name for place in places]
    names = [
        place.name if short.count(place.name) == 1 else f"{place.parent.name}/{place.name}"
        for place in places
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({names[:number].count(name) + 1})"
        for number, name in enumerate(names)
    ]

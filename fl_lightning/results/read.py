"""Run folders as plain data. A folder may be half written: what cannot be read becomes a note, never an error."""

from __future__ import annotations

import itertools
import math
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from fl_lightning.config import check
from fl_lightning.csvtable import Row
from fl_lightning.errors import BadInput
from fl_lightning.metric import ACCURACY, BY_TASK, MODELS, Metric
from fl_lightning.results.folder import RunFolder, final_kind, final_words, judge_of

T = TypeVar("T")

MIB = 2**20
UNREADABLE = (OSError, ValueError, TypeError, LookupError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error)
"""What reading a damaged table, npz or JSON file may raise."""
_ORDER = ("after", "before", "finetuned", "global")
"""Of kinds of model to compare runs by; clients' own models come first, as personalised methods are about them."""
AXES = {"round": "round", "mib": "MiB sent", "channel": "modelled channel seconds", "wall": "seconds without scoring"}
"""What may stand below the accuracy curves; all but the rounds add up from round to round."""
MACHINE = ("data.root", "data.public_root", "data.download", "data.resident")
"""Keys of a configuration that say where data lie, not which."""
ABSENT = object()
"""The value of a key that a configuration does not have."""
_LASTING = ("judge", "version", "made_up_data", "clients", "held_out_clients", "newcomer_rule", "heterogeneity_")
"""What keys of summary.json that hold for a run however long it is begin with."""
_SUMMED = {"mib": ("upload_bytes", "download_bytes"), "channel": ("channel_s",), "wall": ("seconds",)}


@dataclass
class Ledger:
    """What travelled in the rounds whose ledger can be read. Direction 0 is the download, 1 the upload."""

    rounds: list[int]
    layers: list[str]
    share: np.ndarray
    """(2, L, rounds): share of the cohort whose layer travelled, 0..1."""
    kinds: dict[str, tuple[int, int]]
    """Bytes downloaded and uploaded by kind, over these rounds."""


@dataclass
class Run:
    """One run folder, as far as it can be read."""

    folder: RunFolder
    name: str
    """Its folder's name; longer where two runs would have the same."""
    config: dict[str, Any]
    metrics: list[Row]
    clients: list[Row]
    final: list[Row]
    summary: dict[str, Any]
    """Empty unless the run has ended; without its results where it was extended since and has not ended again."""
    split: list[Row] = field(default_factory=list)
    """The rows of split.csv; none in runs of earlier versions."""
    ledger: Ledger | None = None
    newcomers: list[Row] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """What is missing, by section of the page."""

    def note_damaged(self, section: str, rounds: list[int]) -> None:
        """Note that the files of these rounds cannot be read; nothing if there are none."""
        if rounds:
            more = f" and {len(rounds) - 10} more" if len(rounds) > 10 else ""
            self.notes[section].append(f"files that cannot be read: round {', '.join(map(str, rounds[:10]))}{more}")

    def setting(self, key: str) -> Any:
        """The value of a dotted key of config.yaml; None if it has none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def rounds_done(self) -> int:
        """The last round with a row in metrics.csv; 0 if there is none."""
        return int(max((row["round"] for row in self.metrics), default=0))

    @property
    def rounds_asked(self) -> int | None:
        """`federation.rounds`."""
        rounds = self.setting("federation.rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def finished(self) -> bool:
        """Whether the run has ended and was not extended since."""
        asked = self.rounds_asked or 0
        return self.summary.get("rounds") == asked and self.rounds_done >= asked

    @property
    def metric(self) -> Metric:
        """What it is judged by."""
        return BY_TASK.get(self.setting("data.task"), ACCURACY)

    @property
    def judge(self) -> str | None:
        """The kind of model that `mean_accuracy` speaks of; None if it cannot be told."""
        return judge_of({"judge": self.setting("evaluation.judge"), **self.summary}, self.metrics)

    def has(self, column: str) -> bool:
        """Whether metrics.csv has a value in this column."""
        return any(column in row for row in self.metrics)

    def column(self, name: str) -> list[float]:
        """A column of metrics.csv; nan where a round has no value."""
        return [row.get(name, math.nan) for row in self.metrics]

    def total(self, *names: str) -> float | None:
        """Sum of columns over the rounds; None unless every round has them all."""
        if not self.metrics or any(name not in row for row in self.metrics for name in names):
            return None
        return sum(row[name] for row in self.metrics for name in names)

    def axis(self, name: str) -> list[float] | None:
        """One of `AXES` at the end of each round; None if a round lacks it."""
        if name == "round":
            return self.column("round")
        if self.total(*_SUMMED[name]) is None:
            return None
        unit = MIB if name == "mib" else 1
        return [so_far / unit for so_far in itertools.accumulate(_spent(row, name) for row in self.metrics)]

    def spent(self, name: str) -> float | None:
        """One of `AXES` at the end of the run; None if a round lacks it."""
        values = self.axis(name)
        return values[-1] if values else None

    def scores(self, kind: str | None, metric: str | None = None) -> tuple[dict[int, float], str]:
        """Scores of models of this kind by client, and whose: of the final models, or else of the last judged round.

        `kind` None: the judge's; with it alone final models may be of another kind, where clients never took part.
        `metric`: another than the run's; clients of which it is not defined are left out.
        """
        kind, metric = kind or self.judge, metric or self.metric.name
        if self.finished and self.final and kind in (None, final_kind(self.summary)):
            found = {int(row["client"]): row[metric] for row in self.final if metric in row}
            return found, f"end: {final_words(self.summary)}"
        column = f"{metric}_{kind}"
        judged = [row for row in self.judged_clients if column in row]
        last = max((row["round"] for row in judged), default=0)
        words = f"round {int(last)}: {MODELS.get(str(kind), 'kind of model unknown')}"
        return {int(row["client"]): row[column] for row in judged if row["round"] == last}, words

    @property
    def judged_clients(self) -> list[Row]:
        """The rows of clients.csv up to the last round of metrics.csv."""
        return [row for row in self.clients if row["round"] <= self.rounds_done]


def _spent(row: Row, name: str) -> float:
    """What a round adds to one of `AXES`, in bytes or seconds; `wall` without the scoring, which is no method's work.

    FedAvg as a study's forced row is fine-tuned in each judged round, for its score alone. Runs of earlier versions do
    not tell scoring apart.
    """
    found = sum(row[column] for column in _SUMMED[name])
    return max(0.0, found - row.get("seconds_evaluation", 0.0)) if name == "wall" else found


@dataclass(frozen=True)
class Comparison:
    """By which kind of model runs are compared."""

    kind: str | None
    """One that all judged runs were scored by; None: there is none, and each stands by its own judge."""
    differ: bool
    """Whether the runs have different judges."""
    metric: Metric = ACCURACY

    @classmethod
    def of(cls, runs: list[Run]) -> Comparison:
        """Their own judge where it is one, else the first kind in all of them: after training, then before, ..."""
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


def same_but_seed(runs: list[Run]) -> list[int]:
    """A number for each run, from 0: equal where runs differ in nothing but their seed (and where data lie)."""
    groups: dict[str, int] = {}
    settings = [{k: v for k, v in _leaves(run.config) if k != "seed" and k not in MACHINE} for run in runs]
    return [groups.setdefault(repr(sorted(values.items())), len(groups)) for values in settings]


def seeds_apart(runs: list[Run]) -> list[list[int]]:
    """Numbers of runs that differ in nothing but their seed (and where data lie), by group, each of two or more.

    Runs of which two have the same seed are no group: one seed counted twice would narrow the spread.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for number, group in enumerate(same_but_seed(runs)):
        groups[group].append(number)
    return [members for members in groups.values() if len(set(_seeds(runs, members))) == len(members) > 1]


def same_seeds(runs: list[Run]) -> bool:
    """Whether each method in each setting has run with the same several seeds, each once."""
    groups = seeds_apart(runs)
    seeds = [sorted(_seeds(runs, members)) for members in groups]
    return sum(map(len, groups)) == len(runs) > 0 and all(of_group == seeds[0] for of_group in seeds)


def _seeds(runs: list[Run], members: list[int]) -> list[str]:
    return [repr(runs[number].setting("seed")) for number in members]


def run_folders(paths: list[Path]) -> list[Path]:
    """`paths`, in which a folder of runs (or of folders of runs, as a study is) stands for all runs in it."""
    return [found for path in paths for found in (_runs_in(path) or [path])]


def _runs_in(path: Path) -> list[Path]:
    if (path / "config.yaml").is_file():
        return [path]
    inside = sorted(path.iterdir()) if path.is_dir() else []
    return [found for sub in inside if sub.is_dir() and sub.name != "references" for found in _runs_in(sub)]


def differing(runs: list[Run]) -> Iterator[tuple[str, list[Any]]]:
    """Every dotted key of their configurations whose value is not the same in all runs, and the values."""
    flat = [dict(_leaves(run.config)) for run in runs]
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values = [settings.get(key, ABSENT) for settings in flat]
        if any(value != values[0] for value in values):
            yield key, values


def differing_keys(runs: list[Run]) -> list[str]:
    """The keys, but those of `MACHINE`, that are known to differ: earlier versions did not have all of them."""
    known = [(key, [value for value in values if value is not ABSENT]) for key, values in differing(runs)]
    return [key for key, values in known if any(value != values[0] for value in values) and key not in MACHINE]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def load(paths: list[Path], ledger: bool = True, regression: bool = True) -> list[Run]:
    """Read run folders, in the order given; without `ledger` what travelled, a file for each round, is left out.

    Raises:
        BadInput: a folder does not exist or holds no run, or is given twice; it is a regression beside a
            classification, or (unless `regression`) at all.
    """
    seen: set[Path] = set()
    for path in paths:
        if not path.is_dir():
            raise BadInput("run", str(path), "it must be a run folder; there is no such folder")
        if not (path / "config.yaml").is_file():
            raise BadInput("run", str(path), "it must be a run folder; config.yaml is missing")
        if path.resolve() in seen:
            raise BadInput("run", str(path), "it must be given once")
        seen.add(path.resolve())
    runs = [_load(path, name, ledger) for path, name in zip(paths, _names(paths), strict=True)]
    for path, run in zip(paths, runs, strict=True):
        fine = regression or run.metric is ACCURACY
        check("run", str(path), fine, "it is a regression, and a comparison speaks of accuracies; see fl-train report")
        same = run.metric is runs[0].metric
        check("run", str(path), same, f"it is judged by the {run.metric.words}, {runs[0].name} by another metric")
    return runs


def _names(paths: list[Path]) -> list[str]:
    """Folder names, with their parents' where that is needed to tell them apart."""
    short = [path.resolve().name for path in paths]
    long = [f"{path.resolve().parent.name}/{name}" for path, name in zip(paths, short, strict=True)]
    names = [name if short.count(name) == 1 else longer for name, longer in zip(short, long, strict=True)]
    return [
        name if names.count(name) == 1 else f"{name} ({names[:at].count(name) + 1})" for at, name in enumerate(names)
    ]


def _load(path: Path, name: str, ledger: bool) -> Run:
    try:
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        config = None
    if not isinstance(config, dict):
        raise BadInput("run", str(path), "it must be a run folder; its config.yaml cannot be read")
    folder = RunFolder(path)
    run = Run(folder, name, config, [], [], [], {})
    run.metrics = _table(run, "accuracy", "metrics.csv", folder.read_metrics, "round")
    run.clients = _table(run, "fairness", "clients.csv", folder.read_clients, "round", "client")
    needed = ("samples_per_class", run.metric.name)
    run.newcomers = _table(run, "newcomers", "newcomers.csv", folder.read_newcomers, *needed)
    run.final = _table(run, "fairness", "final.csv", folder.read_final, "client", run.metric.name)
    run.split = _table(run, "split", "split.csv", folder.read_split, "client", "train_samples", "test_samples")
    summary = _read(run, "runs", "summary.json", folder.read_summary)
    run.summary = summary if isinstance(summary, dict) else {}
    if not run.finished:  # what the shorter run came to before it was extended is no result of this one
        run.final, run.newcomers = [], []
        run.summary = {key: value for key, value in run.summary.items() if key.startswith(_LASTING)}
    if (path / "failure.txt").is_file():
        run.notes["runs"].append("a client failed: failure.txt in the run folder says how")
    run.ledger = _ledger(run) if ledger else None
    return run


def _read(run: Run, section: str, file: str, read: Callable[[], T]) -> T | None:
    """What `read` gives, or a note that `file` cannot be read; a file that is not there is no news here."""
    try:
        return read()
    except FileNotFoundError:
        return None
    except UNREADABLE:
        run.notes[section].append(f"{file} cannot be read")
        return None


def _table(run: Run, section: str, file: str, read: Callable[[], list[Row]], *needed: str) -> list[Row]:
    """The rows that have a finite number in every `needed` column."""
    rows = _read(run, section, file, read) or []
    return [row for row in rows if all(math.isfinite(row.get(name, math.nan)) for name in needed)]


def _ledger(run: Run) -> Ledger | None:
    rounds: list[int] = []
    damaged: list[int] = []
    shares: list[np.ndarray] = []
    names: list[str] | None = None
    kinds: dict[str, tuple[int, int]] = {}
    for number in run.folder.traffic_rounds():
        try:
            traffic = run.folder.read_traffic(number)
            sizes, sent = np.asarray(traffic.bytes, dtype=np.int64), np.asarray(traffic.sent, dtype=bool)
            clients, _, layers = sent.shape
            if (clients, 2, layers + 1, len(traffic.kinds)) != sizes.shape or sent.shape[1] != 2 or not clients:
                raise ValueError("its arrays do not fit together")
            if shares and layers != shares[0].shape[1]:
                raise ValueError("it has other layers than the rounds before")
        except UNREADABLE:
            damaged.append(number)
            continue
        rounds.append(number)
        shares.append(sent.mean(axis=0))
        names = names or traffic.layers
        for kind, (down, up) in zip(traffic.kinds, sizes.sum(axis=(0, 2)).T.tolist(), strict=True):
            before = kinds.get(str(kind), (0, 0))
            kinds[str(kind)] = (before[0] + down, before[1] + up)
    run.note_damaged("ledger", damaged)
    if not rounds:
        return None
    count = shares[0].shape[1]
    names = names or _layers_of_relation(run)
    if names is None or len(names) != count:
        names = [f"layer {number}" for number in range(count)]
    return Ledger(rounds, names, np.stack(shares, axis=-1), kinds)


def _layers_of_relation(run: Run) -> list[str] | None:
    """Older ledgers do not name their layers; the relation does."""
    for number in run.folder.relation_rounds():
        try:
            return run.folder.read_relation(number).layers
        except UNREADABLE:
            continue
    return None

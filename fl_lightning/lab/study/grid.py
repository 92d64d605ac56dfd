"""The content of a study file as plain data: methods, settings and seeds, and the runs and cells
that follow from them.

A *run* is trained; a *cell* is an entry of the table: a method (row) in a setting with a seed. Most
runs serve one cell. Every study adds baselines, its *forced* rows: training alone, and FedAvg
judged after local training and after fine-tuning, for which one run may serve two cells.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, TypeVar

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import Config, check

K = TypeVar("K")
T = TypeVar("T")

KEYS = ("base", "methods", "seeds", "grid", "forced", "together", "paper")
"""Keys of a study file."""
GRID_GROUPS = ("data", "federation", "model", "optimizer")
"""Groups of keys that a grid may vary: those that all methods share."""
METHOD_GROUPS = ("optimizer", "evaluation", "callbacks")
"""Groups of keys that a method may set for itself beside its arguments. None of them decides the
split, the initial model or the batches."""
MOST_RUNS = 10_000
"""Most runs of one study (our choice): a year of runs of an hour each. A mistyped range of seeds
has more."""
MAX_LABEL_BYTES = 100  # a folder's name may have 255 bytes

Setting = dict[str, Any]
"""A point of the grid: values by flat key (`data.alpha`); empty without a grid."""


@dataclass(frozen=True)
class ListedMethod:
    """A method in the list of a study: its arguments, and the rows of the table that its runs
    fill."""

    key: str
    """Name of the entry in error messages: `methods[1]`."""
    name: str
    """Name or import path of the method."""
    label: str
    """Name of its run folders, and of its row unless `judges` names rows."""
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: Setting = field(default_factory=dict)
    """Values of flat keys that hold for this method only, such as `optimizer.lr`."""
    when: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments that hold in some settings only, by a key and value of the setting:
    `data.alpha=0.3`."""
    judges: Mapping[str, str] = field(default_factory=dict)
    """The kind of model that judges each of its rows, by label; empty: one row, `label`, judged by
    the run's judge."""
    forced: bool = False
    """Whether it is a baseline that every study adds."""

    def arguments_in(self, setting: Setting) -> dict[str, Any]:
        """The method's arguments in a setting, including those that `when` gives for it."""
        arguments = dict(self.arguments)
        for word in setting_texts(setting):
            arguments.update(self.when.get(word, {}))
        return arguments


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: a method in a setting with a seed."""

    setting: Setting
    entry: ListedMethod
    seed: int

    @property
    def folder(self) -> str:
        """The run folder, relative to the study's."""
        setting = safe(",".join(setting_texts(self.setting)))
        parts = [
            "runs",
            setting,
            label_folder(self.entry.label),
            f"seed-{self.seed}",
        ]
        return "/".join(filter(None, parts))

    def cells(self) -> list[dict[str, Any]]:
        """The entries of `study.json` that the run serves."""
        cell = {
            "setting": self.setting,
            "method": self.entry.name,
            "label": self.entry.label,
            "seed": self.seed,
            "folder": self.folder,
            "forced": self.entry.forced,
        }
        judges = self.entry.judges.items()
        return [
            {
                **cell,
                "label": label,
                "judge": judge,
            }
            for label, judge in judges
        ] or [cell]


Pairs = list[tuple[StudyRun, Config]]
"""Runs and their configs."""


@dataclass(frozen=True)
class Study:
    """The checked content of a study file. The base is as written, not yet merged into a
    `Config`."""

    base: Any
    methods: list[Any]
    seeds: list[int]
    grid: dict[str, list[Any]]
    forced: bool
    together: int | str = "auto"
    """Most runs that train together in one process, or `auto`; once a study has begun, no result
    depends on it."""
    paper: dict[str, Any] | None = None
    """The printed tables that `fl-train reproduce` compares with (study/papers.py); no run depends
    on it."""

    @classmethod
    def of(cls, content: Any) -> Study:
        """Read and check the `content` of a study file.

        Raises:
            BadInput: a key is unknown or missing, a method is unknown, a list is empty, seeds are
                not whole numbers, two methods have one label, or there are too many runs.
        """
        check(
            "study",
            content,
            isinstance(content, dict),
            f"it must be a mapping with keys of: {', '.join(KEYS)}",
        )
        for key, value in content.items():
            near = catalogue.did_you_mean(str(key), KEYS)
            check(
                str(key),
                value,
                key in KEYS,
                f"no such key{near}; keys of a study: {', '.join(KEYS)}",
            )
        for key in ("base", "methods", "seeds"):
            check(
                key,
                None,
                content.get(key) is not None,
                "it is missing: a study file must name it",
            )
        forced, paper = content.get("forced", True), content.get("paper")
        check(
            "forced",
            forced,
            isinstance(forced, bool),
            "it must be true or false",
        )
        methods = content["methods"]
        is_list = isinstance(methods, list) and len(methods) > 0
        check(
            "methods",
            methods,
            is_list,
            "it must be a list of names, or of mappings of a name and arguments",
        )
        is_mapping = isinstance(paper, dict | None)
        check(
            "paper",
            paper,
            is_mapping,
            "it must be a mapping (docs/studies.md)",
        )
        together = content.get("together", "auto")
        check_together(together)
        grid = _grid(content["grid"]) if "grid" in content else {}
        seeds = read_seeds(content["seeds"])
        study = cls(
            content["base"],
            methods,
            seeds,
            grid,
            forced,
            together,
            paper,
        )
        study.check()
        return study

    def check(self) -> None:
        """Raise `BadInput` for two methods with one label, a key that is set twice, or too many
        runs."""
        settings, entries = self.settings(), self.entries()
        varied = self.varied()
        setting_words = list(
            dict.fromkeys(word for setting in settings for word in setting_texts(setting))
        )
        requirement = f"the grid has no such setting; it has {', '.join(setting_words) or 'none'}"
        by_folder: dict[str, ListedMethod] = {}
        for entry in entries:
            for label in {entry.label: None, **entry.judges}:
                namesake = by_folder.setdefault(label_folder(label), entry)
                check(
                    entry.key,
                    label,
                    namesake is entry,
                    f"{namesake.key} has the same label: give one of them another `label`",
                )
            repeated_keys = sorted(entry.settings.keys() & varied)
            check(
                entry.key,
                ", ".join(repeated_keys),
                not repeated_keys,
                "the grid sets it, too: remove one of them",
            )
            for word in entry.when:
                check(
                    f"{entry.key}.when",
                    word,
                    word in setting_words,
                    requirement,
                )
        number = len(settings) * len(entries) * len(self.seeds)
        check(
            "study",
            number,
            number <= MOST_RUNS,
            f"a study has at most {MOST_RUNS} runs",
        )

    def varied(self) -> set[str]:
        """The flat keys that the grid sets."""
        return {key for setting in self.settings() for key in setting}

    def settings(self) -> list[Setting]:
        """The points of the grid, the last key varying fastest."""
        axes = [
            values if is_linked(key) else [{key: value} for value in values]
            for key, values in self.grid.items()
        ]
        return [reduce(or_, point, {}) for point in itertools.product(*axes)]

    def entries(self, full_participation: bool = True) -> list[ListedMethod]:
        """The listed methods, and the forced baselines that are not among them.

        Args:
            full_participation: whether all clients take part in every round. If so, a run scores
                all clients by every kind of model, and one run of FedAvg serves its two forced
                rows, which differ in the judge. If not, a run scores all clients by its own judge
                only, and each of the two rows needs a run.
        """
        entries = [_listed_method(f"methods[{k}]", method) for k, method in enumerate(self.methods)]
        plain = {entry.name for entry in entries if entry.label == entry.name}
        forced = _forced_baselines(full_participation) if self.forced else []
        return entries + [entry for entry in forced if entry.label not in plain]

    def runs(self, participation: float) -> list[StudyRun]:
        """All runs, seed by seed, so that the first seeds can be compared before the last have run.

        Args:
            participation: `federation.participation` of the base; a setting may have another.
        """
        runs = []
        for seed, setting in itertools.product(self.seeds, self.settings()):
            share = setting.get("federation.participation", participation)
            runs += [
                StudyRun(setting, entry, seed)
                for entry in self.entries(full_participation=share == 1)
            ]
        return runs


def by_key(
    items: Iterable[T],
    key: Callable[[T], K],
) -> dict[K, list[T]]:
    """Group items by their key, in the order in which keys first occur."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def setting_texts(setting: Setting) -> list[str]:
    """The keys and values of a setting as texts: `data.alpha=0.3`."""
    return [f"{key}={_text(value)}" for key, value in setting.items()]


def label_folder(label: str) -> str:
    """The name of the folder of a label's runs."""
    return label.replace(" ", ",")


def safe(text: str) -> str:
    """Make a text usable as a folder name: return it unchanged if possible, else with characters
    replaced, shortened, and with a hash of the text at the end."""
    plain = re.sub(r"[^\w .,=+@-]", "_", text, flags=re.ASCII)
    if plain == text and len(text) <= MAX_LABEL_BYTES and not text.startswith("."):
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=3).hexdigest()
    return f"{plain[: MAX_LABEL_BYTES - 7].lstrip('.')}-{digest}"


def _listed_method(key: str, method: Any) -> ListedMethod:
    """Read an entry of `methods`.

    Args:
        key: name of the entry in error messages.
        method: a name, or a mapping of `name`, arguments, flat config keys and `label`.
    """
    content = {"name": method} if isinstance(method, str) else method
    is_mapping = isinstance(content, dict) and all(isinstance(word, str) for word in content)
    check(
        key,
        method,
        is_mapping,
        "it must be a name, or a mapping of `name` and arguments",
    )
    arguments_left = dict(content)
    name = arguments_left.pop("name", arguments_left.pop("class_path", None))
    label = arguments_left.pop("label", None)
    when = arguments_left.pop("when", {})
    is_mapping = isinstance(when, dict) and all(isinstance(value, dict) for value in when.values())
    check(
        f"{key}.when",
        when,
        is_mapping,
        "it must map settings to arguments: {data.alpha=0.3: {beta: 1.0}}",
    )
    is_named = isinstance(name, str)
    check(
        key,
        content,
        is_named,
        "it must say which method: {name: fedprox, mu: 0.1}",
    )
    found_method = catalogue.find("methods", key, name)
    settings = {word: arguments_left.pop(word) for word in list(arguments_left) if "." in word}
    for word, value in settings.items():
        _check_axis(f"{key}.{word}", word, value, METHOD_GROUPS)
    init_args = arguments_left.pop("init_args", None) or {}
    check(
        f"{key}.init_args",
        init_args,
        isinstance(init_args, dict),
        "it must be a mapping of arguments",
    )
    arguments = init_args | arguments_left
    if label is None:
        method_name = found_method.name.rpartition(".")[2].lower()
        label = safe(" ".join([method_name, *setting_texts(arguments | settings)]))
    is_name = isinstance(label, str) and label.strip() == label != "" and safe(label) == label
    check(
        f"{key}.label",
        label,
        is_name,
        f"it must be fit for a folder's name: at most {MAX_LABEL_BYTES} letters, digits, spaces "
        "and .,=+@-",
    )
    path = found_method.class_path if "." in found_method.name else found_method.name
    return ListedMethod(key, path, label, arguments, settings, when)


def _forced_baselines(full_participation: bool) -> list[ListedMethod]:
    """The baselines of every study: training alone, and FedAvg judged after local training and
    after fine-tuning.

    Args:
        full_participation: whether all clients take part in every round (`Study.entries`).
    """
    judges = {"fedavg after": "after", "fedavg finetuned": "finetuned"}
    kinds = ["before", "after", "global", "finetuned"] if full_participation else None
    fedavg = [
        ListedMethod(
            "forced",
            "fedavg",
            label,
            settings={"evaluation.judge": judge, "evaluation.models": kinds},
            forced=True,
        )
        for label, judge in judges.items()
    ]
    if full_participation:
        fedavg = [
            replace(
                fedavg[0],
                label="fedavg personalised",
                judges=judges,
            )
        ]
    return [
        ListedMethod(
            "forced",
            "local",
            "local",
            forced=True,
        ),
        *fedavg,
    ]


def check_together(value: Any) -> None:
    """Raise `BadInput` unless `value` is `auto` or a whole number from 1: the most runs that train
    together in one process."""
    is_number = type(value) is int and value > 0
    check(
        "together", value, is_number or value == "auto", "it must be a whole number from 1, or auto"
    )


def read_seeds(seeds: Any) -> list[int]:
    """Read seeds from a list or a range such as `0-4`; raises `BadInput` for anything else."""
    requirement = "it must be a span such as 0-4, or a list of whole numbers from 0, each once"
    text = seeds.strip() if isinstance(seeds, str) else ""
    if span := re.fullmatch(r"(\d{1,18})-(\d{1,18})", text):
        first, last = map(int, span.groups())
        check("seeds", seeds, first <= last, requirement)
        check(
            "seeds",
            seeds,
            last - first < MOST_RUNS,
            f"a study has at most {MOST_RUNS} runs",
        )
        return list(range(first, last + 1))
    is_list = isinstance(seeds, list) and len(seeds) > 0
    are_seeds = is_list and all(type(seed) is int and 0 <= seed < 2**63 for seed in seeds)
    check(
        "seeds",
        seeds,
        are_seeds and len(set(seeds)) == len(seeds),
        requirement,
    )
    return list(seeds)


def _grid(content: Any) -> dict[str, list[Any]]:
    """Read the key `grid`."""
    is_mapping = isinstance(content, dict) and len(content) > 0
    check(
        "grid",
        content,
        is_mapping,
        "it must map keys to lists of values; without a grid, leave it out",
    )
    varied: list[str] = []
    for name, values in content.items():
        key = f"grid.{name}"
        is_list = isinstance(values, list) and len(values) > 0
        if (
            is_list
            and is_linked(name)
            and all(isinstance(value, dict) and value for value in values)
        ):
            keys = list(values[0])
            for point in values:
                check(
                    key,
                    point,
                    list(point) == keys,
                    f"each must have the keys {', '.join(map(str, keys))}",
                )
                for word, value in point.items():
                    _check_axis(f"{key}.{word}", word, value, GRID_GROUPS)
        else:
            keys = [name]
            _check_axis(key, name, values, GRID_GROUPS)
            check(key, values, is_list, "it must be a list of values")
        texts = {json.dumps(_as_number(value), default=str) for value in values}
        check(
            key,
            values,
            len(texts) == len(values),
            "a value is there twice: leave it once",
        )
        varied += keys
    repeated_keys = sorted({key for key in varied if varied.count(key) > 1})
    check(
        "grid", ", ".join(repeated_keys), not repeated_keys, "it is set twice: remove one of them"
    )
    return dict(content)


def _as_number(value: Any) -> Any:
    """Numbers, and texts of numbers (YAML reads 1e-1 as text), as floats, so that 1, 1.0 and 1e0
    are one value."""
    if isinstance(value, list):
        return list(map(_as_number, value))
    if isinstance(value, dict):
        return {key: _as_number(part) for key, part in value.items()}
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    return value


def is_linked(key: Any) -> bool:
    """Whether a key of the grid is the user's name for several config keys that vary together. Such
    a name has no dot and is neither `model` nor a group of config keys (`GRID_GROUPS`)."""
    return isinstance(key, str) and key != "model" and "." not in key and key not in GRID_GROUPS


def _check_axis(
    where: str,
    key: Any,
    value: Any,
    groups: tuple[str, ...],
) -> None:
    """Raise `BadInput` for the key `where` unless `key` is a config key of one of `groups`."""
    group, dot, _ = key.partition(".") if isinstance(key, str) else ("", "", "")
    check(
        where,
        value,
        group in groups and (bool(dot) or key == "model"),
        f"only keys of {', '.join(groups)} can be set here, such as {groups[0]}.NAME",
    )


def _text(value: Any) -> str:
    """A value as part of a label."""
    if isinstance(value, list):
        return "-".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)

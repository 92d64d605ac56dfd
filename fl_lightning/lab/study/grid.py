"""What a study file asks for, as plain data: methods in settings with seeds, and the runs and cells
that it means.

A *run* is trained; a *cell* is one entry of the table: a method (row), in a setting, with a seed.
Most runs are one cell; the forced run of FedAvg is two, judged after local training and after
fine-tuning.
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
AXES = ("data", "federation", "model", "optimizer")
"""What a grid may vary: anything that all methods share."""
OWN = ("optimizer", "evaluation", "callbacks")
"""What a method may have for itself beside its arguments: nothing that decides split, first model
or batches."""
MOST_RUNS = 10_000
"""Runs of one study. Ours: a year of runs of an hour each; a mistyped span of seeds has more."""
LONGEST = 100  # bytes of a label: a folder's name may have 255

Setting = dict[str, Any]
"""Flat keys of the grid to their values; empty where there is no grid."""


@dataclass(frozen=True)
class ListedMethod:
    """A method as a study lists it, and the rows of the table that its runs serve."""

    key: str
    """How errors call it: `methods[1]`."""
    name: str
    label: str
    """Of its folders, and of its row where it has one."""
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: Setting = field(default_factory=dict)
    """Flat keys that are set for this method alone, such as `optimizer.lr`."""
    when: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments that it has in some settings only, by one of the setting's words:
    `data.alpha=0.3`."""
    judges: Mapping[str, str] = field(default_factory=dict)
    """Of its rows, by label, the kind of model where the run's own judge does not say it; empty:
    one row, `label`."""
    forced: bool = False
    """Whether it is a baseline that the study adds by itself."""

    def arguments_in(self, setting: Setting) -> dict[str, Any]:
        """Its arguments in a setting."""
        arguments = dict(self.arguments)
        for word in words(setting):
            arguments.update(self.when.get(word, {}))
        return arguments


@dataclass(frozen=True)
class StudyRun:
    """One run folder of a study."""

    setting: Setting
    entry: ListedMethod
    seed: int

    @property
    def folder(self) -> str:
        """Relative to the study's."""
        setting = safe(",".join(words(self.setting)))
        parts = [
            "runs",
            setting,
            place(self.entry.label),
            f"seed-{self.seed}",
        ]
        return "/".join(filter(None, parts))

    def cells(self) -> list[dict[str, Any]]:
        """Its entries of `study.json`."""
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
"""Runs with their configs."""


@dataclass(frozen=True)
class Study:
    """A study file, checked as far as it can be without its base."""

    base: Any
    methods: list[Any]
    seeds: list[int]
    grid: dict[str, list[Any]]
    forced: bool
    together: int | str = "auto"
    """How many runs train together in a process; no run's numbers depend on it once the study has
    begun."""
    paper: dict[str, Any] | None = None
    """What `fl-train reproduce` compares it with (study/papers.py); nothing of it decides a run."""

    @classmethod
    def of(cls, content: Any) -> Study:
        """The study in a YAML file's `content`.

        Raises:
            BadInput: a key that does not exist or is missing, a method that nothing is called, an
                empty list, seeds that are no seeds, two methods of one label, too many runs.
        """
        check(
            "study", content, isinstance(content, dict), f"it must hold the keys {', '.join(KEYS)}"
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
                "a study must have it",
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
        """Raise `BadInput` for methods that cannot be told apart, a key that is set twice, or too
        many runs."""
        settings, entries = self.settings(), self.entries()
        varied = self.varied()
        setting_words = list(dict.fromkeys(word for setting in settings for word in words(setting)))
        requirement = f"the grid has no such setting; it has {', '.join(setting_words) or 'none'}"
        by_folder: dict[str, ListedMethod] = {}
        for entry in entries:
            for label in {entry.label: None, **entry.judges}:
                namesake = by_folder.setdefault(place(label), entry)
                check(
                    entry.key,
                    label,
                    namesake is entry,
                    f"{namesake.key} is called so, too: give one of them a `label`",
                )
            twice = sorted(entry.settings.keys() & varied)
            check(
                entry.key,
                ", ".join(twice),
                not twice,
                "the grid sets it, too",
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
            f"it has at most {MOST_RUNS} runs",
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

    def entries(self, everyone: bool = True) -> list[ListedMethod]:
        """The methods, with the forced rows that are not among them.

        Args:
            everyone: every client takes part in every round. Then the last round scores the final
                model of each, of any kind, and one FedAvg run serves two rows; else only the
                judge's final models are scored for everyone.
        """
        entries = [_entry(f"methods[{k}]", method) for k, method in enumerate(self.methods)]
        plain = {entry.name for entry in entries if entry.label == entry.name}
        forced = _forced(everyone) if self.forced else []
        return entries + [entry for entry in forced if entry.label not in plain]

    def runs(self, participation: float) -> list[StudyRun]:
        """All runs, seed by seed: after a part of them there is a comparison already.

        `participation`: the base's, for settings that do not say.
        """
        runs = []
        for seed, setting in itertools.product(self.seeds, self.settings()):
            share = setting.get("federation.participation", participation)
            runs += [StudyRun(setting, entry, seed) for entry in self.entries(everyone=share == 1)]
        return runs


def by_key(
    things: Iterable[T],
    key: Callable[[T], K],
) -> dict[K, list[T]]:
    """The things of each key, in the order in which keys come first."""
    groups: dict[K, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def words(setting: Setting) -> list[str]:
    """A setting, a word for each key: `data.alpha=0.3`."""
    return [f"{key}={_text(value)}" for key, value in setting.items()]


def place(label: str) -> str:
    """The name of a label's folder."""
    return label.replace(" ", ",")


def safe(text: str) -> str:
    """`text` as a folder's name: as it is where it may be, else shortened and with a digest of all
    of it."""
    plain = re.sub(r"[^\w .,=+@-]", "_", text, flags=re.ASCII)
    if plain == text and len(text) <= LONGEST and not text.startswith("."):
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=3).hexdigest()
    return f"{plain[: LONGEST - 7].lstrip('.')}-{digest}"


def _entry(key: str, method: Any) -> ListedMethod:
    """A method by its name, or by a mapping of name, arguments, keys of its own (with a dot) and
    `label`."""
    content = {"name": method} if isinstance(method, str) else method
    is_mapping = isinstance(content, dict) and all(isinstance(word, str) for word in content)
    check(
        key,
        method,
        is_mapping,
        "it must be a name, or a mapping of `name` and arguments",
    )
    rest = dict(content)
    name = rest.pop("name", rest.pop("class_path", None))
    label = rest.pop("label", None)
    when = rest.pop("when", {})
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
    listed = catalogue.find("methods", key, name)
    settings = {word: rest.pop(word) for word in list(rest) if "." in word}
    for word, value in settings.items():
        _check_axis(f"{key}.{word}", word, value, OWN)
    inside = rest.pop("init_args", None) or {}
    check(
        f"{key}.init_args",
        inside,
        isinstance(inside, dict),
        "it must be a mapping of arguments",
    )
    arguments = inside | rest
    if label is None:
        short = listed.name.rpartition(".")[2].lower()
        label = safe(" ".join([short, *words(arguments | settings)]))
    is_name = isinstance(label, str) and label.strip() == label != "" and safe(label) == label
    check(
        f"{key}.label",
        label,
        is_name,
        f"it names a folder: at most {LONGEST} letters, digits, spaces and .,=+@-",
    )
    path = listed.class_path if "." in listed.name else listed.name
    return ListedMethod(key, path, label, arguments, settings, when)


def _forced(everyone: bool) -> list[ListedMethod]:
    """Rows without which no table of personalised methods can be judged: training alone, and FedAvg
    personalised."""
    judges = {"fedavg after": "after", "fedavg finetuned": "finetuned"}
    kinds = ["before", "after", "global", "finetuned"] if everyone else None
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
    if everyone:
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
    """Raise `BadInput` unless it may be how many runs train together."""
    is_number = type(value) is int and value > 0
    check(
        "together", value, is_number or value == "auto", "it must be a whole number from 1, or auto"
    )


def read_seeds(seeds: Any) -> list[int]:
    """The seeds of a list, or of a span such as `0-4`; `BadInput` for anything else."""
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
                    _check_axis(f"{key}.{word}", word, value, AXES)
        else:
            keys = [name]
            _check_axis(key, name, values, AXES)
            check(key, values, is_list, "it must be a list of values")
        texts = {json.dumps(_as_number(value), default=str) for value in values}
        check(
            key,
            values,
            len(texts) == len(values),
            "it has a value twice",
        )
        varied += keys
    twice = sorted({key for key in varied if varied.count(key) > 1})
    check("grid", ", ".join(twice), not twice, "it is set twice")
    return dict(content)


def _as_number(value: Any) -> Any:
    """Numbers, and texts that are some (YAML reads 1e-1 as text), as floats: 1, 1.0 and 1e0 are one
    value."""
    if isinstance(value, list):
        return list(map(_as_number, value))
    if isinstance(value, dict):
        return {key: _as_number(part) for key, part in value.items()}
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    return value


def is_linked(key: Any) -> bool:
    """Whether a name of the grid is no key, but stands for several that vary together."""
    return isinstance(key, str) and key != "model" and "." not in key and key not in AXES


def _check_axis(
    where: str,
    key: Any,
    value: Any,
    groups: tuple[str, ...],
) -> None:
    group, dot, _ = key.partition(".") if isinstance(key, str) else ("", "", "")
    check(
        where,
        value,
        group in groups and (bool(dot) or key == "model"),
        f"it may be a key of {', '.join(groups)}, such as {groups[0]}.NAME",
    )


def _text(value: Any) -> str:
    """A value within a label."""
    if isinstance(value, list):
        return "-".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)

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
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import check

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
class Entry:
    """A method as a study lists it, and the rows of the table that its runs serve."""

    key: str
    """How errors call it: `methods[1]`."""
    name: str
    label: str
    """Of its folders, and of its row where it has one."""
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: Setting = field(default_factory=dict)
    """Flat keys that it has for itself."""
    when: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments that it has in some settings only, by one of the setting's words:
    `data.alpha=0.3`."""
    judges: Mapping[str, str] = field(default_factory=dict)
    """Of its rows, by label, the kind of model where the run's own judge does not say it; empty:
    one row, `label`."""
    forced: bool = False

    def arguments_in(self, setting: Setting) -> dict[str, Any]:
        """Its arguments in a setting."""
        arguments = dict(self.arguments)
        for word in words(setting):
            arguments |= self.when.get(word, {})
        return arguments


@dataclass(frozen=True)
class Run:
    """One run folder of a study."""

    setting: Setting
    entry: Entry
    seed: int

    @property
    def folder(self) -> str:
        """Relative to the study's."""
        setting = safe(",".join(words(self.setting)))
        return "/".join(
            filter(None, ["runs", setting, place(self.entry.label), f"seed-{self.seed}"])
        )

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
        return [
            cell | {"label": label, "judge": judge} for label, judge in self.entry.judges.items()
        ] or [cell]


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
        for key in content:
            near = catalogue.did_you_mean(str(key), KEYS)
            check(
                str(key),
                content[key],
                key in KEYS,
                f"no such key{near}; keys of a study: {', '.join(KEYS)}",
            )
        for key in ("base", "methods", "seeds"):
            check(key, None, content.get(key) is not None, "a study must have it")
        forced = content.get("forced", True)
        check("forced", forced, isinstance(forced, bool), "it must be true or false")
        methods, grid = content["methods"], content.get("grid", {})
        fine = isinstance(methods, list) and len(methods) > 0
        check(
            "methods",
            methods,
            fine,
            "it must be a list of names, or of mappings of a name and arguments",
        )
        paper = content.get("paper")
        check(
            "paper", paper, isinstance(paper, dict | None), "it must be a mapping (docs/studies.md)"
        )
        together = content.get("together", "auto")
        check_together(together)
        axes = _grid(grid) if "grid" in content else {}
        study = cls(
            content["base"], methods, read_seeds(content["seeds"]), axes, forced, together, paper
        )
        study.check()
        return study

    def check(self) -> None:
        """Raise `BadInput` for methods that cannot be told apart, a key that is set twice, or too
        many runs."""
        by_folder: dict[str, Entry] = {}
        for entry in self.entries():
            for label in dict.fromkeys([entry.label, *entry.judges]):
                other = by_folder.setdefault(place(label), entry)
                check(
                    entry.key,
                    label,
                    other is entry,
                    f"{other.key} is called so, too: give one of them a `label`",
                )
            both = sorted(entry.settings.keys() & self.varied())
            check(entry.key, ", ".join(both), not both, "the grid sets it, too")
            known = dict.fromkeys(word for setting in self.settings() for word in words(setting))
            for word in entry.when:
                allowed = f"the grid has no such setting; it has {', '.join(known) or 'none'}"
                check(f"{entry.key}.when", word, word in known, allowed)
        number = len(self.settings()) * len(self.entries()) * len(self.seeds)
        check("study", number, number <= MOST_RUNS, f"it has at most {MOST_RUNS} runs")

    def varied(self) -> set[str]:
        """The flat keys that the grid sets."""
        return {key for setting in self.settings() for key in setting}

    def settings(self) -> list[Setting]:
        """The points of the grid, the last key varying fastest."""
        axes = [
            [value if is_linked(key) else {key: value} for value in values]
            for key, values in self.grid.items()
        ]
        return [
            {k: v for part in point for k, v in part.items()} for point in itertools.product(*axes)
        ]

    def entries(self, everyone: bool = True) -> list[Entry]:
        """The methods, with the forced rows that are not among them.

        Args:
            everyone: every client takes part in every round. Then the last round scores the final
                model of each, of any kind, and one FedAvg run serves two rows; else only the
                judge's final models are scored for everyone.
        """
        listed = [_entry(f"methods[{number}]", given) for number, given in enumerate(self.methods)]
        plain = {entry.name for entry in listed if entry.label == entry.name}
        return listed + [
            entry for entry in _forced(everyone) if self.forced and entry.label not in plain
        ]

    def runs(self, participation: float) -> list[Run]:
        """All runs, seed by seed: after a part of them there is a comparison already.

        `participation`: the base's, for settings that do not say.
        """
        runs = []
        for seed, setting in itertools.product(self.seeds, self.settings()):
            share = setting.get("federation.participation", participation)
            runs += [Run(setting, entry, seed) for entry in self.entries(everyone=share == 1)]
        return runs


def by_key(things: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
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


def _entry(key: str, given: Any) -> Entry:
    """A method by its name, or by a mapping of name, arguments, keys of its own (with a dot) and
    `label`."""
    if isinstance(given, str):
        given = {"name": given}
    fine = isinstance(given, dict) and all(isinstance(word, str) for word in given)
    check(key, given, fine, "it must be a name, or a mapping of `name` and arguments")
    rest = dict(given)
    name, called = rest.pop("name", rest.pop("class_path", None)), rest.pop("label", None)
    when = rest.pop("when", {})
    fine = isinstance(when, dict) and all(isinstance(value, dict) for value in when.values())
    check(
        f"{key}.when",
        when,
        fine,
        "it must map settings to arguments: {data.alpha=0.3: {beta: 1.0}}",
    )
    check(key, given, isinstance(name, str), "it must say which method: {name: fedprox, mu: 0.1}")
    entry_of = catalogue.find("methods", key, name)
    short = entry_of.name.rpartition(".")[2].lower()
    settings = {word: rest.pop(word) for word in list(rest) if "." in word}
    for word, value in settings.items():
        _check_axis(f"{key}.{word}", word, value, OWN)
    inside = rest.pop("init_args", None) or {}
    check(f"{key}.init_args", inside, isinstance(inside, dict), "it must be a mapping of arguments")
    arguments = inside | rest
    given_name = " ".join(
        [short, *(f"{word}={_text(value)}" for word, value in (arguments | settings).items())]
    )
    label = safe(given_name) if called is None else called
    fine = isinstance(label, str) and label.strip() == label != "" and safe(label) == label
    check(
        f"{key}.label",
        label,
        fine,
        f"it names a folder: at most {LONGEST} letters, digits, spaces and .,=+@-",
    )
    return Entry(
        key,
        entry_of.class_path if "." in entry_of.name else entry_of.name,
        label,
        arguments,
        settings,
        when,
    )


def _forced(everyone: bool) -> list[Entry]:
    """Rows without which no table of personalised methods can be judged: training alone, and FedAvg
    personalised."""
    rows = {"fedavg after": "after", "fedavg finetuned": "finetuned"}
    entries = [Entry("forced", "local", "local", forced=True)]
    if everyone:
        both = {
            "evaluation.judge": "after",
            "evaluation.models": ["before", "after", "global", "finetuned"],
        }
        return [
            *entries,
            Entry(
                "forced", "fedavg", "fedavg personalised", settings=both, judges=rows, forced=True
            ),
        ]
    for label, judge in rows.items():
        own = {"evaluation.judge": judge, "evaluation.models": None}
        entries.append(Entry("forced", "fedavg", label, settings=own, forced=True))
    return entries


def check_together(value: Any) -> None:
    """Raise `BadInput` unless it may be how many runs train together."""
    fine = value == "auto" or (type(value) is int and value > 0)
    check("together", value, fine, "it must be a whole number from 1, or auto")


def read_seeds(given: Any) -> list[int]:
    """The seeds of a list, or of a span such as `0-4`; `BadInput` for anything else."""
    allowed = "it must be a span such as 0-4, or a list of whole numbers from 0, each once"
    span = re.fullmatch(r"(\d{1,18})-(\d{1,18})", given.strip()) if isinstance(given, str) else None
    if span:
        first, last = int(span[1]), int(span[2])
        check("seeds", given, first <= last, allowed)
        check("seeds", given, last - first < MOST_RUNS, f"a study has at most {MOST_RUNS} runs")
        return list(range(first, last + 1))
    fine = (
        isinstance(given, list)
        and len(given) > 0
        and all(type(s) is int and 0 <= s < 2**63 for s in given)
    )
    check("seeds", given, fine and len(set(given)) == len(given), allowed)
    return list(given)


def _grid(given: Any) -> dict[str, list[Any]]:
    fine = isinstance(given, dict) and len(given) > 0
    check("grid", given, fine, "it must map keys to lists of values; without a grid, leave it out")
    points: list[str] = []
    for key, values in given.items():
        fine = isinstance(values, list) and len(values) > 0
        linked = (
            fine and is_linked(key) and all(isinstance(value, dict) and value for value in values)
        )
        inside = list(values[0]) if linked else [key]
        if not linked:
            _check_axis(f"grid.{key}", key, values, AXES)
        check(f"grid.{key}", values, fine, "it must be a list of values")
        for value in values if linked else ():
            check(
                f"grid.{key}",
                value,
                list(value) == inside,
                f"each must have the keys {', '.join(map(str, inside))}",
            )
            for name in inside:
                _check_axis(f"grid.{key}.{name}", name, value[name], AXES)
        texts = [json.dumps(_as_number(value), default=str) for value in values]
        check(f"grid.{key}", values, len(set(texts)) == len(texts), "it has a value twice")
        points += inside
    both = sorted({key for key in points if points.count(key) > 1})
    check("grid", ", ".join(both), not both, "it is set twice")
    return dict(given)


def _as_number(value: Any) -> Any:
    """Numbers, and texts that are some (YAML reads 1e-1 as text), as floats: 1, 1.0 and 1e0 are one
    value."""
    if isinstance(value, list):
        return [_as_number(one) for one in value]
    if isinstance(value, dict):
        return {key: _as_number(one) for key, one in value.items()}
    with contextlib.suppress(ValueError, OverflowError):
        return (
            float(value)
            if isinstance(value, int | float | str) and not isinstance(value, bool)
            else value
        )
    return value


def is_linked(key: Any) -> bool:
    """Whether a name of the grid is no key, but stands for several that vary together."""
    return isinstance(key, str) and key != "model" and "." not in key and key not in AXES


def _check_axis(where: str, key: Any, value: Any, groups: tuple[str, ...]) -> None:
    fine = (
        isinstance(key, str)
        and (key.partition(".")[0] in groups)
        and (key == "model" or "." in key)
    )
    check(where, value, fine, f"it may be a key of {', '.join(groups)}, such as {groups[0]}.NAME")


def _text(value: Any) -> str:
    """A value within a label."""
    if isinstance(value, list):
        return "-".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)

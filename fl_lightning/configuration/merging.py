"""From a command line and config files to one set of settings: later ones override earlier ones.

A value on the command line stays text until its type is known. Components are merged by rule:
another class drops the arguments of the one before, the same class keeps them; callbacks and
loggers are merged by name, and null removes one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from fl_lightning.cli.parser import (
    COMPONENTS,
    fit_keys,
    hint,
    keys,
    leaves,
    parser_of,
    passed_on,
    typed,
    unknown,
)
from fl_lightning.cli.schema import COMMANDS
from fl_lightning.cli.yamltext import NAMED, read
from fl_lightning.configuration import catalogue
from fl_lightning.configuration.components import Network
from fl_lightning.configuration.config import (
    GROUPS,
    Component,
    Config,
    ModelConfig,
    check,
    check_finite,
)
from fl_lightning.configuration.ranges import check_limit
from fl_lightning.foundation.errors import NO_VALUE, BadInput

Layer = dict[str, Any]

# Callbacks that every run has unless they are set to null.
DEFAULT_CALLBACKS = ("heatmaps", "progress", "checkpoint")
# What `fl-train fit` alone trains: the method that we recommend (docs/results/measured.md) with its
# own defaults, on the digits that ship with the package.
DEFAULTS: Layer = {
    "method": "selfkapc",
    "model": "mlp",
    "callbacks": {name: {} for name in DEFAULT_CALLBACKS},
}


@dataclass
class Settings:
    """Plain keys nested and untyped, components by class path with the arguments given so far."""

    plain: Layer = field(default_factory=dict)
    method: Component = field(default_factory=lambda: Component(""))
    models: list[ModelConfig] = field(default_factory=list)
    callbacks: dict[str, Component | None] = field(default_factory=dict)
    loggers: dict[str, Component | None] = field(default_factory=dict)

    @classmethod
    def merged(cls, layers: Iterable[Layer], over: Config | None = None) -> Settings:
        """`layers` over a resolved config, or over the defaults; each over the ones before."""
        if over is None:
            settings, layers = cls(), [DEFAULTS, *layers]
        else:
            plain: Layer = {"seed": over.seed, "smoke": over.smoke}
            plain |= over.groups()
            settings = cls(
                plain, over.method, list(over.models), dict(over.callbacks), dict(over.loggers)
            )
        for layer in layers:
            settings._add(layer)
        return settings

    def _add(self, layer: Layer) -> None:
        for key, value in layer.items():
            if key == "method":
                self.method = _component("methods", key, value, self.method)
            elif key == "model":
                self.models = _models(value, self.models)
            elif key == "callbacks":
                self.callbacks = _named(key, value, self.callbacks)
            elif key == "loggers":
                self.loggers = _named(key, value, self.loggers)
            else:
                _update(self.plain, {key: value})


# ---------------------------------------------------------------- the command line


@dataclass
class CommandLine:
    """A command line, read."""

    command: str
    words: list[str] = field(default_factory=list)
    """What belongs to no key: studies, runs, a method."""
    own: list[Layer] = field(default_factory=list)
    """Of the command's own keys, a layer for each."""
    layers: list[Layer] = field(default_factory=list)
    """Of the keys of a run's config: a layer for each flag, and those of each config file."""
    flags: list[str] = field(default_factory=list)
    """The words that give `layers`."""
    first: str | None = None
    """The first `--config`: it names the run."""

    @cached_property
    def values(self) -> Namespace:
        """The values of the command's own keys."""
        return values_of(self.command, self.own)


def read_line(argv: list[str], command: str = "fit") -> CommandLine:
    """Read the command line of any command; for `fit` all keys are those of the run's config.

    Raises:
        BadInput: a key that does not exist, a value that is missing, a config file that cannot be
            read.
    """
    line, rest, own = CommandLine(command), list(argv), keys(parser_of(command))
    known = own | passed_on(command)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            check(
                "command line",
                word,
                bool(COMMANDS[command].words) and word != "--",
                "expected --key value",
            )
            line.words.append(word)
            continue
        key, given, text = word[2:].partition("=")
        key = key if key in known or (plain := key.replace("-", "_")) not in known else plain
        head = key.partition(".")[0]
        if key not in known and not (head in COMPONENTS and head in known):
            raise unknown(key, text if given or not rest else rest[0], list(known), command)
        flag = [f"--{key}{given}{text}"]
        if not given and _takes(key, rest, command, known):
            flag.append(text := rest.pop(0))
        elif not given:
            check(key, "", key in known and hint(known[key]) is bool, NO_VALUE)
            text = "true"  # a switch alone means true
        if key == "config":
            line.first = line.first or text
        layers = read_config(text) if key == "config" else [_nested(key, _value(key, text))]
        if command != "fit" and key in own:
            line.own += layers
        if command == "fit" or "." in key or key not in own:
            line.layers += layers
            line.flags += flag
    return line


def _takes(key: str, rest: list[str], command: str, known: dict[str, Any]) -> bool:
    """Whether the next word is the value of `key`: no flag, and behind a switch where there are
    words, a truth value.

    The value of sbatch may look like a flag that the command does not have.
    """
    if not rest:
        return False
    after = rest[0]
    if after.startswith("--"):
        return key == "sbatch" and after[2:].partition("=")[0].replace("-", "_") not in known
    switch = key in known and hint(known[key]) is bool
    return not switch or not COMMANDS[command].words or after.lower() in ("true", "false")


def values_of(command: str, layers: Iterable[Layer]) -> Namespace:
    """The values of a command's own keys in `layers`, every default filled in."""
    plain: Layer = {}
    for layer in layers:
        _update(plain, {key: value for key, value in layer.items() if key not in COMPONENTS})
    values = typed(parser_of(command), plain)
    for key, (kind, *_) in COMMANDS[command].keys.items():
        check_finite(key, values[key])
        check_limit(key, values[key], kind)
    return values


# ---------------------------------------------------------------- config files


def read_config(
    name: str, key: str = "config", folder: Path = Path(), above: tuple[str, ...] = ()
) -> list[Layer]:
    """The settings in a YAML file, or in the config that ships with the package under this name:
    first those of the config that it names as its `base`, and so on down the chain.

    Args:
        name: of the file or config.
        key: what names it.
        folder: where a file is looked for before the shipped configs.
        above: the configs whose base it is.

    Raises:
        BadInput: there is no such config, it cannot be read, or it is its own base.
    """
    file, content = read("configs", key, name, folder)
    place = str(file.resolve())
    check(
        key,
        name,
        place not in above,
        f"a config cannot be its own base: {' -> '.join([*above, place])}",
    )
    check(key, name, isinstance(content, dict | None), "it must hold keys and values")
    once: Layer = {}
    for dotted, value in sorted((content or {}).items(), key=lambda item: "." in str(item[0])):
        _update(once, _nested(str(dotted), value), str(dotted))
    return layers_of(name, content or {}, file.parent, (*above, place))


def layers_of(
    name: str, content: dict[Any, Any], folder: Path, above: tuple[str, ...] = ()
) -> list[Layer]:
    """The settings in the content of a config `name`, those of its base before them; `folder`,
    `above`: of its base."""
    own = {key: value for key, value in content.items() if key != "base"}
    base = content.get("base")
    check(
        "base",
        base,
        isinstance(base, str | None),
        f"it must be the name or the file of one config (in {name})",
    )
    below = [] if base is None else read_config(base, "base", folder, above)
    return [*below, *own_layers(name, own)]


def own_layers(name: str, content: dict[Any, Any]) -> list[Layer]:
    """The settings in the content of a config `name` without its base: first the callbacks or
    loggers that a null removes, so that others can be named beside it."""
    removed = {key: None for key in NAMED if content.get(key, "") is None}
    return [
        *([removed] if removed else []),
        layer_of(name, {k: v for k, v in content.items() if k not in removed}),
    ]


def layer_of(name: str, content: dict[Any, Any]) -> Layer:
    """The settings in the content of a config file `name`, nested."""
    layer: Layer = {}
    keyed = [(str(key), *str(key).partition(".")[:2], value) for key, value in content.items()]
    for key, head, dot, value in sorted(
        keyed, key=lambda item: item[1] in COMPONENTS and bool(item[2])
    ):
        # an empty section sets nothing
        if value is not None or not (key in COMPONENTS or key in GROUPS):
            if dot and head in COMPONENTS and not isinstance(layer.get(head, {}), dict):
                layer[head] = _by_name(head, layer[head])
            _update(layer, _nested(str(key), value))
    plain = {key: value for key, value in layer.items() if key not in COMPONENTS}
    try:
        dict(leaves(plain, {key: action for key, action in fit_keys().items() if key != "config"}))
    except BadInput as error:
        raise BadInput(error.key, error.value, f"{error.allowed} (in {name})") from None
    return layer


def _by_name(head: str, given: Any) -> Layer:
    """A method, model, callbacks or loggers that a file only names, as a mapping with room for
    arguments."""
    if head in NAMED:
        return _mapping(head, given)
    if not isinstance(given, str):
        raise BadInput(
            head,
            given,
            f"{head}.ARG belongs to one {head}: give a list's items their own arguments",
        )
    return {"class_path": given}


def _value(key: str, text: str) -> Any:
    """Text of a flag; where it may be a name, a list, a mapping or null of components, it is read
    as YAML."""
    head, *rest = key.split(".")
    depth = 1 if head in NAMED else 0
    beside = key in ("model.weights", "model.adapters")
    if head not in COMPONENTS or not (len(rest) <= depth or rest[-1] == "init_args" or beside):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise BadInput(key, text, "it is not valid YAML") from None


def _nested(key: str, value: Any) -> Layer:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _update(old: Layer, new: Layer, once: str = "") -> None:
    """Put `new` over `old`; `BadInput` where `once`, the key that gives it, replaces a value."""
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            _update(old[key], value, once)
        # a name, then its arguments
        elif once and key in old and not (key in COMPONENTS and isinstance(value, dict)):
            raise BadInput(
                once, value, f"it is given twice, also as {old[key]!r}: with dots and nested"
            )
        else:
            old[key] = copy.deepcopy(value)


def _component(
    kind: str,
    key: str,
    given: Any,
    old: Component | None,
    reserved: tuple[str, ...] = ("name", "class_path"),
) -> Component:
    """`given` over `old`: a name, an import path, or a mapping of a name, `init_args` and plain
    arguments."""
    if isinstance(given, str):
        given = {"class_path": given}
    if not isinstance(given, dict):
        raise BadInput(
            key, given, "it must be a name, an import path, or a mapping {class_path, init_args}"
        )
    rest = dict(given)
    names = [name for name in (rest.pop(word, None) for word in reserved) if name is not None]
    init_args = rest.pop("init_args", None) or {}
    check(
        f"{key}.init_args",
        init_args,
        isinstance(init_args, dict),
        "it must be a mapping of arguments",
    )
    if not all(isinstance(name, str) for name in names):
        raise BadInput(key, names[0], "a name must be text")
    check(key, given, len(names) < 2, "give its name or its class_path, not both")
    for name in init_args.keys() & rest.keys():
        raise BadInput(
            f"{key}.{name}",
            rest[name],
            f"it is also in init_args, as {init_args[name]!r}: give it once",
        )
    class_path = (
        catalogue.find(kind, key, names[0]).class_path if names else old.class_path if old else ""
    )
    kept = old.init_args if old and old.class_path == class_path else {}
    arguments = {**kept, **init_args, **rest}
    return Component(class_path, arguments)


def _models(given: Any, old: list[ModelConfig]) -> list[ModelConfig]:
    if isinstance(given, list):
        check(
            "model",
            given,
            bool(given),
            "it must be a name, or a list of at least one {name, count}",
        )
        return [_model(f"model[{i}]", item, None) for i, item in enumerate(given)]
    named = isinstance(given, str) or (
        isinstance(given, dict) and not {"name", "class_path"}.isdisjoint(given)
    )
    allowed = "the config lists several models: give the whole list, or one name"
    check("model", given, len(old) <= 1 or named, allowed)
    return [_model("model", given, old[0] if len(old) == 1 else None)]


def _model(key: str, given: Any, old: ModelConfig | None) -> ModelConfig:
    rest = dict(given) if isinstance(given, dict) else {"class_path": given}
    count = rest.pop("count", None)
    whole = count is None or (str(count).isdecimal() and int(count) > 0)
    check(f"{key}.count", count, whole, "it must be a whole number above 0")
    count = None if count is None else int(count)
    beside = {k: rest.pop(k) for k in ("weights", "adapters") if k in rest}
    component = _component("models", key, rest, old.component if old else None)
    check(
        key, given, bool(component.class_path), "it must say which model: {name, count, init_args}"
    )
    same = old is not None and old.component.class_path == component.class_path
    return ModelConfig(
        _network(key, component, old.component if old and same else None, beside), count
    )


def _network(
    key: str, component: Component, old: Component | None, given: dict[str, Any]
) -> Component:
    """A model with what is `given` of its weights and adapters, over the earlier ones."""
    before = old if isinstance(old, Network) else Network("")
    weights, adapters = given.get("weights", before.weights), given.get("adapters", before.adapters)
    check(
        f"{key}.weights",
        weights,
        isinstance(weights, str | None),
        "it must be a safetensors file, or null",
    )
    if isinstance(adapters, bool):  # with all defaults, or none
        adapters = {} if adapters else None
    check(
        f"{key}.adapters",
        adapters,
        isinstance(adapters, dict | None),
        "it must be a mapping, true, or null",
    )
    if adapters and before.adapters:
        adapters = before.adapters | adapters
    if weights is None and adapters is None:
        return component
    return Network(component.class_path, component.init_args, weights, adapters)


def _named(kind: str, given: Any, old: dict[str, Component | None]) -> dict[str, Component | None]:
    """Callbacks or loggers by name, `given` over `old`; null alone removes all."""
    if given is None:
        return dict.fromkeys(old)
    merged = dict(old)
    for word, value in _mapping(kind, given).items():
        key = f"{kind}.{word}"
        entry = catalogue.lookup(kind, str(word))
        name = entry.name if entry else _short(str(word))
        before = merged.get(name)
        if value is None:
            if name not in merged:
                catalogue.find(kind, key, str(word))  # raises for a name that nothing has
            merged[name] = None
        elif isinstance(value, dict):
            first = {} if before else {"class_path": str(word)}
            merged[name] = _component(
                kind, key, {**first, **value}, before, reserved=("class_path",)
            )
        else:
            raise BadInput(
                key, value, "it must be a mapping of its arguments, or null to go without"
            )
    return merged


def _mapping(kind: str, given: Any) -> Layer:
    """Callbacks or loggers, given as names with commas, as a list of names or as a mapping, as a
    mapping."""
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",")]
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        given = {_short(name): {"class_path": name} for name in given}
    check(
        kind,
        given,
        isinstance(given, dict),
        "it must be names, or a mapping of names to their arguments",
    )
    return given


def _short(name: str) -> str:
    """What an own callback or logger is called: the last part of its import path."""
    return name.rpartition(".")[2].lower() if "." in name else name

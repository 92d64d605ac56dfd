"""From a command line and config files to one set of settings: later ones override earlier ones.

A value on the command line stays text until its type is known. Components are merged by rule:
another class drops the arguments of the one before, the same class keeps them; callbacks and
loggers are merged by name, and null removes one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.components import Network
from fl_lightning.configuration.config import Component, Config, ModelConfig, check
from fl_lightning.configuration.files import Layer, mapping, short, update
from fl_lightning.foundation.errors import BadInput

# Callbacks that every run has unless they are set to null.
DEFAULT_CALLBACKS = ("heatmaps", "progress", "checkpoint")
# What `fl-train fit` alone trains: the method with the first mean rank of the atlas
# (docs/results/crosskapc.md) with its own defaults, on the digits that ship with the package.
DEFAULTS: Layer = {
    "method": "crosskapc",
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
                update(self.plain, {key: value})


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
    for word, value in mapping(kind, given).items():
        key = f"{kind}.{word}"
        entry = catalogue.lookup(kind, str(word))
        name = entry.name if entry else short(str(word))
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

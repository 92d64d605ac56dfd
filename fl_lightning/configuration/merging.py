"""Merges the layers of settings from config files and flags; later layers override earlier ones.

A component of another class drops the arguments given before; one of the same class keeps them.
Callbacks and loggers are merged by name, and null removes one. Values keep the types that they were
given with.
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
    """Merged settings of a run before `resolve` checks them: plain keys as nested dicts, components
    with the arguments given so far."""

    plain: Layer = field(default_factory=dict)
    method: Component = field(default_factory=lambda: Component(""))
    models: list[ModelConfig] = field(default_factory=list)
    callbacks: dict[str, Component | None] = field(default_factory=dict)
    loggers: dict[str, Component | None] = field(default_factory=dict)

    @classmethod
    def merged(
        cls,
        layers: Iterable[Layer],
        over: Config | None = None,
    ) -> Settings:
        """Return settings that result from merging layers.

        Args:
            layers: settings; later layers override earlier ones.
            over: a resolved configuration that the settings change; None: the defaults.
        """
        if over is None:
            settings = cls()
            settings._add(DEFAULTS)
        else:
            plain = {
                "seed": over.seed,
                "smoke": over.smoke,
                **over.groups(),
            }
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
    value: Any,
    old: Component | None,
    name_keys: tuple[str, ...] = ("name", "class_path"),
) -> Component:
    """Return the component that `value` makes of `old`.

    Args:
        kind: the component's kind, such as `methods`.
        key: the component's key, for errors.
        value: a name, an import path, or a mapping of a name, `init_args` and single arguments.
        old: the component from earlier layers; None: there is none.
        name_keys: the keys of the mapping under which the name may stand.
    """
    if isinstance(value, str):
        value = {"class_path": value}
    requirement = "it must be a name, an import path, or a mapping {class_path, init_args}"
    check(key, value, isinstance(value, dict), requirement)
    arguments = dict(value)
    names = [arguments.pop(name_key, None) for name_key in name_keys]
    names = [name for name in names if name is not None]
    init_args = arguments.pop("init_args", None) or {}
    requirement = "it must be a mapping of arguments"
    check(f"{key}.init_args", init_args, isinstance(init_args, dict), requirement)
    for name in names:
        check(key, name, isinstance(name, str), "a name must be text")
    check(key, value, len(names) < 2, "give its name or its class_path, not both")
    for name in init_args.keys() & arguments.keys():
        problem = f"it is also in init_args, as {init_args[name]!r}: give it once"
        raise BadInput(f"{key}.{name}", arguments[name], problem)
    old = old or Component("")
    class_path = catalogue.find(kind, key, names[0]).class_path if names else old.class_path
    old_arguments = old.init_args if old.class_path == class_path else {}
    return Component(class_path, {**old_arguments, **init_args, **arguments})


def _models(value: Any, old: list[ModelConfig]) -> list[ModelConfig]:
    if isinstance(value, list):
        requirement = "it must be a name, or a list of at least one {name, count}"
        check("model", value, bool(value), requirement)
        return [_model(f"model[{i}]", item, None) for i, item in enumerate(value)]
    has_name = isinstance(value, str)
    has_name |= isinstance(value, dict) and not {"name", "class_path"}.isdisjoint(value)
    requirement = "the config lists several models: give a whole new list, or one name"
    check("model", value, len(old) <= 1 or has_name, requirement)
    return [
        _model(
            "model",
            value,
            old[0] if len(old) == 1 else None,
        )
    ]


def _model(key: str, value: Any, old: ModelConfig | None) -> ModelConfig:
    settings = dict(value) if isinstance(value, dict) else {"class_path": value}
    count = settings.pop("count", None)
    is_count = count is None or (str(count).isdecimal() and int(count) > 0)
    check(f"{key}.count", count, is_count, "it must be a whole number above 0")
    network = {name: settings.pop(name) for name in ("weights", "adapters") if name in settings}
    old_component = old.component if old else None
    component = _component("models", key, settings, old_component)
    requirement = "it must say which model: {name, count, init_args}"
    check(key, value, bool(component.class_path), requirement)
    if old_component and old_component.class_path != component.class_path:
        old_component = None
    component = _network(key, component, old_component, network)
    return ModelConfig(component, None if count is None else int(count))


def _network(
    key: str, component: Component, old: Component | None, settings: dict[str, Any]
) -> Component:
    """Return a model with the weights and adapters in `settings`, or else those of `old`."""
    if not isinstance(old, Network):
        old = Network("")
    weights = settings.get("weights", old.weights)
    adapters = settings.get("adapters", old.adapters)
    requirement = "it must be a safetensors file, or null"
    check(f"{key}.weights", weights, isinstance(weights, str | None), requirement)
    if isinstance(adapters, bool):  # with all defaults, or none
        adapters = {} if adapters else None
    requirement = "it must be a mapping, true, or null"
    check(f"{key}.adapters", adapters, isinstance(adapters, dict | None), requirement)
    if adapters and old.adapters:
        adapters = old.adapters | adapters
    if weights is None and adapters is None:
        return component
    return Network(component.class_path, component.init_args, weights, adapters)


def _named(
    kind: str,
    value: Any,
    old: dict[str, Component | None],
) -> dict[str, Component | None]:
    """Return the callbacks or loggers `old` with those of `value` merged in by name. A name that
    is removed has the value None; a `value` of None removes all."""
    if value is None:
        return dict.fromkeys(old)
    merged = dict(old)
    for word, settings in mapping(kind, value).items():
        key = f"{kind}.{word}"
        entry = catalogue.lookup(kind, str(word))
        name = entry.name if entry else short(str(word))
        if settings is None:
            if name not in merged:
                catalogue.find(kind, key, str(word))  # raises for an unknown name
            merged[name] = None
            continue
        requirement = "it must be a mapping of its arguments, or null to go without"
        check(key, settings, isinstance(settings, dict), requirement)
        component = merged.get(name)
        if component is None:
            settings = {"class_path": str(word), **settings}
        merged[name] = _component(
            kind,
            key,
            settings,
            component,
            name_keys=("class_path",),
        )
    return merged

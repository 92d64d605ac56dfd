"""Turns layers of settings into a checked `Config`, and a `Config` back into YAML."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import inspect
import os
import re
import sys
from functools import cache
from pathlib import PurePath
from typing import Any, get_type_hints

import yaml
from jsonargparse import ArgumentParser

try:
    from yaml import CSafeDumper as SafeDumper  # the same text, ten times as fast
except ImportError:  # PyYAML was built without libyaml
    from yaml import SafeDumper  # type: ignore[assignment]

from fl_lightning.configuration import catalogue, index
from fl_lightning.configuration.components import AdaptersConfig, Network
from fl_lightning.configuration.config import (
    GROUPS,
    Component,
    Config,
    ModelConfig,
    Start,
    check,
    check_finite,
)
from fl_lightning.configuration.files import Layer, update
from fl_lightning.configuration.keys import COMPONENTS, run_values, typed
from fl_lightning.configuration.merging import DEFAULT_CALLBACKS, Settings
from fl_lightning.configuration.ranges import check_ranges
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.extras import install_hint

EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""A number such as 1e-3, which PyYAML reads as text if it has no dot or no sign."""
# Base classes of each kind of component, and the arguments that the engine passes to it.
BASES = {
    "methods": (["fl_lightning.methods.base.Method"], frozenset[str]()),
    "models": (
        ["torch.nn.Module"],
        frozenset({"input_shape", "num_classes", "vocabulary", "per_position"}),
    ),
    "callbacks": (
        [f"fl_lightning.callbacks.{kind}" for kind in ("Transform", "Observer", "Aggregator")],
        frozenset(),
    ),
    "loggers": (["fl_lightning.callbacks.Observer"], frozenset[str]()),
}


def start_of(layers: list[Layer]) -> Start:
    """Return the keys of `Start` in `layers`; components are not checked.

    Raises:
        BadInput: a plain key does not exist or has a wrong value.
    """
    plain: Layer = {}
    for layer in layers:
        update(plain, {key: value for key, value in layer.items() if key not in COMPONENTS})
    values = run_values(plain)
    start = Start(**{field.name: values[field.name] for field in dataclasses.fields(Start)})
    fits = len(os.fsencode(start.name or "")) <= 255
    check("name", start.name, fits, "it has more than 255 bytes, too many for a folder's name")
    return start


def resolve(layers: list[Layer], over: Config | None = None) -> Config:
    """Return the checked configuration of merged settings, with every default filled in.

    Plain keys and names are checked before any class is imported. `optimizer.privacy` adds the
    callback that accounts for it; `smoke` makes the run small.

    Args:
        layers: settings; later layers override earlier ones.
        over: a resolved configuration that the settings change; None: the defaults.

    Raises:
        BadInput: a key, name or value is wrong.
    """
    settings = Settings.merged(layers, over)
    values = run_values(settings.plain)
    config = Config(
        method=settings.method,
        models=settings.models,
        seed=values.seed,
        callbacks={name: c for name, c in settings.callbacks.items() if c is not None},
        loggers={name: c for name, c in settings.loggers.items() if c is not None},
        smoke=values.smoke,
        **{name: group(**values[name].as_dict()) for name, group in GROUPS.items()},
    )
    data = config.data
    data.source = catalogue.find("sources", "data.source", data.source).name
    data.partition = catalogue.find("partitions", "data.partition", data.partition).name
    config.validate()
    # stepprivacy comes first: it must account for an upload before another callback refuses it
    if config.optimizer.privacy.on:
        accounts = Component("fl_lightning.callbacks.stepprivacy.StepPrivacy")
        config.callbacks = {"stepprivacy": accounts} | config.callbacks
    if config.smoke:
        _shrink(config)
    return _with_arguments(config)


def _with_arguments(config: Config) -> Config:
    """Import every component's class, check its arguments, and return `config` with all defaults of
    arguments."""
    _look_here()
    method = _completed("methods", "method", config.method)
    method.check()
    models = []
    for number, model in enumerate(config.models):
        key = "model" if len(config.models) == 1 else f"model[{number}]"
        models.append(dataclasses.replace(model, component=_network(key, model.component)))
    sections: dict[str, Any] = {}
    for kind in ("callbacks", "loggers"):
        components = getattr(config, kind).items()
        sections[kind] = {name: _completed(kind, f"{kind}.{name}", c) for name, c in components}
    return dataclasses.replace(config, method=method, models=models, **sections)


def method_entry(class_path: str) -> dict[str, Any]:
    """Return a method's entry of `index.json`; for a user's own class make one like it."""
    from fl_lightning.configuration.describe import described

    _look_here()
    return index.method(class_path) or described(_import("methods", "method", class_path))


def to_yaml(config: Config) -> str:
    """Return `config` as YAML, which resolves to an equal configuration."""
    return yaml.dump(
        to_settings(config),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
    )


def to_settings(config: Config) -> dict[str, Any]:
    """Return `config` as the mapping in a config file: plain values, and names in place of the
    import paths of the package's classes."""
    models = [_named("models", m.component) | m.options() for m in config.models]
    sections: dict[str, Any] = {}
    for kind in ("callbacks", "loggers"):
        sections[kind] = {
            name: _arguments(kind, name, component)
            for name, component in getattr(config, kind).items()
        }
    for name in DEFAULT_CALLBACKS:
        sections["callbacks"].setdefault(name, None)
    settings: dict[str, Any] = _plain(
        {
            "seed": config.seed,
            "smoke": config.smoke,
            "method": _named("methods", config.method),
            "model": models[0] if len(models) == 1 else models,
            **config.groups(),
            **sections,
        }
    )
    return settings


def _plain(value: Any) -> Any:
    """Return `value` in types that YAML has: paths as text, enums by name, tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    return value.name if isinstance(value, enum.Enum) else value


def _look_here() -> None:
    """Add the working directory to `sys.path`, so that the user's own classes can be imported."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def _shrink(config: Config) -> None:
    """Apply `--smoke` to `config` in place: one round, full participation, at most four clients.
    Held-out clients, client names and counts of architectures are cut to these clients."""
    data = config.data
    full_count = config.federation.clients
    clients = min(4, full_count)
    config.federation.rounds = 1
    config.federation.participation = 1.0
    config.federation.clients = clients
    if data.held_out is not None:
        remaining = [client for client in data.held_out if client < clients]
        data.held_out = remaining[: clients - 1] or [clients - 1]
    if data.client_names is not None and len(data.client_names) == full_count:
        data.client_names = data.client_names[:clients]
    counts = [model.count for model in config.models]
    if None in counts:
        return
    # deal clients to the architectures in turn, to none more than it has
    smoke_counts = [0] * len(counts)
    while sum(smoke_counts) < clients:
        for i, count in enumerate(counts):
            has_more = smoke_counts[i] < (count or 0)
            smoke_counts[i] += has_more and sum(smoke_counts) < clients
    models = zip(config.models, smoke_counts, strict=True)
    config.models = [ModelConfig(model.component, count) for model, count in models if count]


def _network(key: str, component: Component) -> Component:
    """Return a model with all arguments, and with all values of its adapters."""
    # a function of torchvision, timm or the user that makes a model
    if inspect.isfunction(_import("models", key, component.class_path)):
        network = Component(component.class_path, _read(key, component))
    else:
        network = _completed("models", key, component)
    if not isinstance(component, Network):
        return network
    adapters = component.adapters
    if adapters is not None:
        parser = _parser(AdaptersConfig, frozenset())
        adapters = typed(parser, adapters, prefix=f"{key}.adapters.").as_dict()
        check_ranges(AdaptersConfig(**adapters), f"{key}.adapters")
    return Network(network.class_path, network.init_args, component.weights, adapters)


def _read(key: str, component: Component) -> dict[str, Any]:
    """Return the arguments of a function that makes a model. Text is read as YAML (and 1e-3 as a
    number) unless the parameter is annotated `str`."""
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # annotations of a user's function may fail to resolve
        hints = get_type_hints(component.load())
    values = dict(component.init_args)
    for name, value in values.items():
        if isinstance(value, str) and hints.get(name) is not str:
            try:
                values[name] = float(value) if EXPONENT.fullmatch(value) else yaml.safe_load(value)
            except yaml.YAMLError:
                problem = "it is not valid YAML: quote text"
                raise BadInput(f"{key}.{name}", value, problem) from None
        check_finite(f"{key}.{name}", values[name])
    return values


def _completed(kind: str, key: str, component: Component) -> Component:
    """Return a component with checked arguments and all defaults that YAML can express."""
    cls = _import(kind, key, component.class_path)
    parser = _parser(cls, BASES[kind][1].difference(component.init_args))
    values = typed(parser, component.init_args, prefix=f"{key}.").as_dict()
    for name, value in values.items():
        check_finite(f"{key}.{name}", value)
    parameters = inspect.signature(cls).parameters
    for name in values.keys() - component.init_args.keys():
        if name in parameters and not _is_plain(parameters[name].default):
            del values[name]  # YAML cannot express this default: the class sets it
    return Component(component.class_path, values)


@cache
def _parser(cls: type, from_engine: frozenset[str]) -> ArgumentParser:
    """Return a parser of a class's arguments without those that come `from_engine`; cached, since
    building it is slow."""
    _look_up_types(cls)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, skip=set(from_engine), fail_untyped=False)
    return parser


def _look_up_types(cls: type) -> None:
    """Replace the annotations of a dataclass's arguments, which are text, by types.

    jsonargparse resolves the text in the module of `cls` only; if a base class in another module
    uses a name that is not there, it would check no argument at all.
    """
    if dataclasses.is_dataclass(cls) and cls.__dataclass_params__.init:  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):  # annotations of a user's class may fail to resolve
            types = get_type_hints(cls)
            annotations = cls.__init__.__annotations__
            annotations |= {name: types[name] for name in annotations.keys() & types.keys()}


def _import(kind: str, key: str, class_path: str) -> Any:
    """Return the class at an import path; for models also a function that makes one.

    Raises:
        BadInput: it cannot be imported, or is not a subclass of the kind's bases.
    """
    module, _, name = class_path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        problem = install_hint(error.name) or f"there is no module {error.name}"
        raise BadInput(key, class_path, problem) from None
    except Exception as error:  # the import of a user's module can raise anything
        problem = f"it cannot be imported: {type(error).__name__}: {error}"
        if isinstance(error, AttributeError) and module in sys.modules:
            members = vars(sys.modules[module]).items()
            names = [member for member, value in members if isinstance(value, type)]
            problem = f"module {module} has no {name}{catalogue.did_you_mean(name, names)}"
        raise BadInput(key, class_path, problem) from None
    if kind == "models" and inspect.isfunction(cls):
        return cls
    base_paths = BASES[kind][0]
    bases = tuple(Component(path).load() for path in base_paths)
    is_subclass = isinstance(cls, type) and issubclass(cls, bases)
    check(key, class_path, is_subclass, f"it must be a subclass of {' or '.join(base_paths)}")
    if kind == "methods":
        _check_fields(key, class_path, cls)
    return cls


def _check_fields(key: str, class_path: str, method: type) -> None:
    """Raise `BadInput` for a method whose class, or a base, has annotated fields but is not
    decorated as a dataclass: they would be no arguments."""
    for base in method.__mro__:
        if "__dataclass_fields__" in vars(base):
            continue
        annotations = inspect.get_annotations(base).items()
        fields = [name for name, kind in annotations if "ClassVar" not in str(kind)]
        problem = f"{base.__name__} has fields that are no arguments ({', '.join(fields)})"
        requirement = f"{problem}: write @dataclass(frozen=True) above it"
        check(key, class_path, not fields, requirement)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def _named(kind: str, component: Component) -> dict[str, Any]:
    """Return a component as a config has it: name (else class path) and arguments."""
    entry = catalogue.lookup(kind, component.class_path)
    name = {"name": entry.name} if entry else {"class_path": component.class_path}
    return {**name, "init_args": component.init_args}


def _arguments(
    kind: str,
    name: str,
    component: Component,
) -> dict[str, Any]:
    """Return the content of a config under the name of a callback or logger: its arguments, with
    its class path if the name is not the class's."""
    entry = catalogue.table(kind).get(name)
    if entry and entry.class_path == component.class_path:
        return component.init_args
    return {"class_path": component.class_path, "init_args": component.init_args}


class _Dumper(SafeDumper):
    """Writes a value that occurs twice in full each time, without YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

"""Settings from Python: mappings, classes, objects and arrays that a script passes to
`fl_lightning.fit`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.configuration import tables
from fl_lightning.configuration.config import check, flat
from fl_lightning.configuration.files import Layer, read_config
from fl_lightning.configuration.files import layers_of as layers_in
from fl_lightning.configuration.flags import layers_of_flags, read_flags
from fl_lightning.configuration.signatures import plain
from fl_lightning.foundation.errors import BadInput

ConfigLike = Mapping[str, Any] | str | os.PathLike[str] | Iterable[str]
TWICE = "it is set both in the config and by keyword: remove one"
"""The message for a value that is both in the config and an argument of the call."""


@contextlib.contextmanager
def object_settings(objects: Mapping[str, Any], out: Path) -> Iterator[Layer]:
    """Context manager: yield settings that name the data, model and method which a call has passed
    as objects.

    Objects that a config cannot hold are written to files in `out/given`; if `BadInput` is raised
    inside the context, these files are removed.

    Args:
        objects: `data`, `model` and `method`, and, if `data` is a DataFrame, the names of its
            columns: `label`, `group` and `unit`. Each may be None or missing.
        out: folder of the runs.
    """
    folder = out / "given"
    layer: Layer = {}
    files_before = set(folder.rglob("*"))
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        data, model, method = (objects.get(key) for key in ("data", "model", "method"))
        names = {key: objects.get(key) for key in ("label", "group", "unit")}
        is_frame = hasattr(data, "to_csv")
        for key, name in names.items():
            check(
                key,
                name,
                name is None or is_frame,
                "it is only for a DataFrame as `data`: leave it out",
            )
            check(
                key,
                name,
                isinstance(name, str | None),
                "it must be a column's name, a text",
            )
        if is_frame:
            layer |= tables.keep_frame(data, folder, names)
        elif data is not None:
            from fl_lightning.data import given as given_data

            layer |= given_data.keep(data, folder)[1]
        if isinstance(model, str | type | Mapping):
            layer["model"] = plain(model)
        elif model is not None:
            from fl_lightning.models import given as given_models

            layer |= given_models.keep(model, folder)[1]
        if method is not None:
            layer["method"] = plain(method)
        yield layer
    except BadInput:
        for path in sorted({*folder.rglob("*")} - files_before, reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for path in absent:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def layers_of(config: ConfigLike, objects: Layer) -> tuple[list[Layer], str | None]:
    """Returns the settings of a call, and the config file after which the run is named, if any.

    Later settings override earlier ones. A mapping gives, in this order: the config files that its
    key `config` names, its key `base`, `objects`, and its other keys. A config file gives its
    settings, then `objects`.

    Args:
        config: a mapping, a config file or its name, or flags.
        objects: the settings of `object_settings`; empty if `config` is flags.
    """
    if isinstance(config, str | os.PathLike):
        name = os.fspath(config)
        return [*read_config(name), objects], name
    if isinstance(config, Mapping):
        settings = plain(config)
        files = _take_config_files(settings)
        layers = [layer for file in files for layer in read_config(str(file))]
        for key in ("model", "method"):
            check(
                key,
                settings.get(key),
                key not in settings or key not in objects,
                TWICE,
            )
        if "base" in settings:  # objects override the base, too
            layers += layers_in("fit", {"base": settings.pop("base")}, Path())
        own_layers = layers_in("fit", settings, Path())
        for layer in own_layers if "data" in objects else ():
            for key in ("source", "root"):
                value = layer.get("data", {}).get(key)
                check(f"data.{key}", value, value is None, TWICE)
        return [*layers, objects, *own_layers], str(files[0]) if files else None
    check(
        "config",
        config,
        isinstance(config, Iterable),
        "it must be a mapping, a config file or its name, or flags",
    )
    flags = [*config]
    for flag in flags:
        check("config", flag, isinstance(flag, str), "it must be a text, --key=value")
    check(
        "config",
        " ".join(flags),
        not objects,
        "it must be a mapping or a file if data, model or method are given by keyword",
    )
    return layers_of_flags(read_flags(flags)[1])


def _take_config_files(settings: dict[str, Any]) -> list[Any]:
    """Removes the key `config` from `settings`, and returns its files."""
    files = settings.pop("config", None) or []
    return files if isinstance(files, list) else [files]


def flags_of(config: ConfigLike) -> list[str]:
    """Returns `config` as flags of the command line."""
    if isinstance(config, str | os.PathLike):
        return [f"--config={os.fspath(config)}"]
    if not isinstance(config, Mapping):
        return [*config]
    settings = plain(config)
    names = _take_config_files(settings)
    if "base" in settings:
        names.append(settings.pop("base"))
    flags = [f"--config={name}" for name in names]
    return flags + [f"--{key}={_as_text(value)}" for key, value in flat(settings)]


def _as_text(value: Any) -> str:
    """Returns `value` as the command line has it: text unchanged, other values as YAML in one
    line."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).splitlines()[0]

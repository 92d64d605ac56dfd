"""What a script hands over, as settings: mappings, classes, objects, arrays."""

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
TWICE = "it is given twice: here and by keyword"


@contextlib.contextmanager
def handed_over(objects: Mapping[str, Any], out: Path) -> Iterator[Layer]:
    """The settings of data, model and method that a script hands over (`objects`), whose files are
    written below `out`, and removed where `BadInput` is raised inside."""
    folder = out / "given"
    layer: Layer = {}
    before = set(folder.rglob("*"))
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        data, model, method = (objects.get(key) for key in ("data", "model", "method"))
        names = {key: objects.get(key) for key in ("label", "group", "unit")}
        is_frame = hasattr(data, "to_csv")
        for key, name in names.items():
            requirement = "it names a column of a DataFrame, which data must be"
            check(key, name, name is None or is_frame, requirement)
            check(
                key,
                name,
                isinstance(name, str | None),
                "a column's name is text",
            )
        if is_frame:
            layer |= tables.keep_frame(data, folder, names)
        elif data is not None:
            from fl_lightning.data import given as own_data

            layer |= own_data.keep(data, folder)[1]
        if isinstance(model, str | type | Mapping):
            layer["model"] = plain(model)
        elif model is not None:
            from fl_lightning.models import given as own_models

            layer |= own_models.keep(model, folder)[1]
        if method is not None:
            layer["method"] = plain(method)
        yield layer
    except BadInput:
        for path in sorted({*folder.rglob("*")} - before, reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for path in absent:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def layers_of(config: ConfigLike, objects: Layer) -> tuple[list[Layer], str | None]:
    """Returns layers in the order of a call: files and bases, what a script hands over (`objects`),
    the mapping's own keys; and the config file that names the run."""
    if isinstance(config, str | os.PathLike):
        name = os.fspath(config)
        return [*read_config(name), objects], name
    if isinstance(config, Mapping):
        settings = plain(config)
        files = _files_of(settings)
        layers = [layer for file in files for layer in read_config(str(file))]
        for key in ("model", "method"):
            check(
                key,
                settings.get(key),
                key not in settings or key not in objects,
                TWICE,
            )
        if "base" in settings:  # what is handed over goes over the base, too
            layers += layers_in("fit", {"base": settings.pop("base")}, Path())
        over = layers_in("fit", settings, Path())
        for layer in over if "data" in objects else ():
            for key in ("source", "root"):
                value = layer.get("data", {}).get(key)
                check(f"data.{key}", value, value is None, TWICE)
        return [*layers, objects, *over], str(files[0]) if files else None
    requirement = "it must be a mapping, a config file or its name, or flags"
    check("config", config, isinstance(config, Iterable), requirement)
    flags = [*config]
    for flag in flags:
        check("config", flag, isinstance(flag, str), "flags are text: --key=value")
    requirement = "with data, model or method by keyword it must be a mapping or a file"
    check("config", " ".join(flags), not objects, requirement)
    return layers_of_flags(read_flags(flags)[1])


def _files_of(settings: dict[str, Any]) -> list[Any]:
    """Takes the config files out of `settings`, and returns them."""
    files = settings.pop("config", None) or []
    return files if isinstance(files, list) else [files]


def flags_of(config: ConfigLike) -> list[str]:
    """Returns `config` as flags of a command line."""
    if isinstance(config, str | os.PathLike):
        return [f"--config={os.fspath(config)}"]
    if not isinstance(config, Mapping):
        return [*config]
    settings = plain(config)
    names = _files_of(settings)
    if "base" in settings:
        names.append(settings.pop("base"))
    flags = [f"--config={name}" for name in names]
    return flags + [f"--{key}={_as_text(value)}" for key, value in flat(settings)]


def _as_text(value: Any) -> str:
    """Returns `value` as a command line has it: text as it is, all else as YAML in one line."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).splitlines()[0]

"""Makes keys, help and bounds of the public functions from their signatures and docstrings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_args

from docstring_parser import parse
from jsonargparse import ArgumentParser

from fl_lightning.configuration.config import check, check_finite
from fl_lightning.configuration.keys import keys, typed, unknown
from fl_lightning.configuration.ranges import bare, check_limit
from fl_lightning.foundation.errors import BadInput

F = TypeVar("F", bound=Callable[..., Any])
WORDS = {
    "definition": "STUDY",
    "folder": "[OUT]",
    "own_method": "METHOD",
    "run_or_study": "STUDY | RUN",
    "runs": "STUDY | RUN [RUN ...]",
    "study_or_archive": "STUDY | FILE.zip",
}
"""Parameters that are positional words on the command line, and their names in its usage."""
_AS_TEXT = (os.PathLike[str], Iterable[str])
"""Types for which the command line has text."""


def parser_of(function: Callable[..., Any]) -> ArgumentParser:
    """Return a parser whose keys are the parameters of a public function.

    Left out are positional words (`WORDS`), `config`, and parameters of type `Any`, which only
    scripts can pass. If a parameter's description begins with capitals and a colon ("DIR: where it
    goes"), they are its metavar.
    """
    documented = parse(function.__doc__ or "")
    texts = {parameter.arg_name: parameter.description or "" for parameter in documented.params}
    parser = ArgumentParser(exit_on_error=False, description=documented.short_description)
    for name, parameter in inspect.signature(function).parameters.items():
        if name in WORDS or name == "config" or parameter.annotation is Any:
            continue
        text = " ".join(texts[name].split())
        stands_for, colon, rest = text.partition(": ")
        is_metavar = bool(colon) and stands_for.partition(".")[0].isupper()
        options: dict[str, Any] = {
            "type": _plain_type(parameter.annotation),
            "help": text,
        }
        if is_metavar:
            options |= {
                "metavar": stands_for,
                "help": rest[:1].upper() + rest[1:],
            }
        if parameter.default is inspect.Parameter.empty:
            options["required"] = True
        else:
            options["default"] = parameter.default
        parser.add_argument(f"--{name}", **options)
    return parser


def _plain_type(annotation: Any) -> Any:
    """Return the type that jsonargparse checks: without bounds, and `str` for paths and names."""
    parts = get_args(annotation)
    if not any(part in parts for part in _AS_TEXT):
        return bare(annotation)
    return str | None if type(None) in parts else str


def checked(function: F) -> F:
    """Decorate a public function so that its arguments are checked and converted by its signature.

    Calls raise `BadInput` for an unknown or missing argument and for a value of another type or
    beyond its bounds.
    """
    signature = inspect.signature(function)
    parser = functools.cache(lambda: parser_of(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in signature.parameters:
                raise unknown(
                    name,
                    kwargs[name],
                    [*signature.parameters],
                    function.__name__,
                )
        try:
            arguments = signature.bind_partial(*args, **kwargs).arguments
        except TypeError as error:
            raise BadInput(function.__name__, ..., f"{error}: give arguments by name") from None
        settings = {name: plain(arguments[name]) for name in keys(parser()) if name in arguments}
        for name, value in settings.items():
            if isinstance(value, list):  # a list of names
                settings[name] = ",".join(map(str, value))
        values = typed(parser(), settings).as_dict()
        for name, value in values.items():
            check_finite(name, value)
            check_limit(name, value, signature.parameters[name].annotation)
        for name in WORDS.keys() & signature.parameters.keys():
            is_optional = signature.parameters[name].default is not inspect.Parameter.empty
            check(name, None, is_optional or name in arguments, "it must be given")
            if name in arguments:
                value = arguments[name]
                is_plain = isinstance(value, bool | int | float | None)
                check(name, value, not is_plain, "it must be a path, a name or an object")
        return function(**{**arguments, **values})

    return call  # type: ignore[return-value]


def plain(value: Any) -> Any:
    """Return `value` in the types of a config file.

    Paths and importable classes become text, numpy's numbers and arrays become Python's, and a
    dataclass object (a method) becomes its class path with those arguments that differ from their
    defaults.

    Raises:
        BadInput: a class or function cannot be imported by its name.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if type(value).__module__ == "numpy":
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in dataclasses.fields(value):
            argument = getattr(value, field.name)
            if field.init and argument != field.default:
                changed[field.name] = argument
        return {"class_path": plain(type(value)), "init_args": plain(changed)}
    if callable(value):
        name = getattr(value, "__qualname__", "<none>")
        path = f"{value.__module__}.{name}"
        is_importable = "<" not in path and "." not in name
        requirement = "define it at the top level of a module, where every process can import it"
        check("config", path, is_importable, requirement)
        return path
    return value

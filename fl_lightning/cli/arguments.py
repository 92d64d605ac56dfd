"""The arguments of methods: those of ours are checked by `index.json`, without importing torch."""

from __future__ import annotations

from jsonargparse import ArgumentParser

from fl_lightning.cli.parser import typed
from fl_lightning.config import Component, check, check_finite
from fl_lightning.configuration import index
from fl_lightning.ranges import Needs, Range


def check_arguments(method: Component) -> None:
    """Raise `BadInput` for an argument of one of our methods that there is not, or for a value that cannot work.

    What is anybody else's is checked when its class has been imported.
    """
    entry = index.method(method.class_path)
    if entry is None:
        return
    parser, arguments = ArgumentParser(exit_on_error=False), entry["arguments"]
    for name, argument in arguments.items():
        parser.add_argument(f"--{name}", type=index.type_of(argument), default=argument["default"])
    values = typed(parser, method.init_args, prefix="method.").as_dict()
    for name, value in values.items():
        check_finite(f"method.{name}", value)
        bounds, or_null = arguments[name].get("bounds"), arguments[name].get("null", False)
        if bounds is not None and value is not None:
            allowed = Range(**bounds)
            check(f"method.{name}", value, value in allowed, f"{allowed}{', or null' if or_null else ''}")
    for rule in entry["needs"]:
        Needs(**rule).check(values, "method")

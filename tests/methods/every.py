"""Every method by name, made as the command line makes it, on data and a network on which a round
takes no time."""

from functools import cache

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import Component
from fl_lightning.configuration.flags import layers_of_flags, read_flags
from fl_lightning.configuration.resolve import resolve
from fl_lightning.methods import Method
from fl_lightning.run import instantiate

NAMES = list(catalogue.table("methods"))
FEW = {
    **{name: {"samples": "24"} for name in ("fedmd", "simpfd", "topkpfd", "ktpfl")},
    **{name: {"samples": "24", "steps": "2", "batch_size": "8"} for name in ("feddf", "pfeddf")},
    "fedrep": {"head_epochs": "1"},
    "fedgen": {"generator_steps": "2", "hidden": "8", "noise": "4"},
    "fedtgp": {"server_epochs": "2"},
    "lgfedavg": {"layers": "1"},
    "pfedhn": {"hidden": "8"},
    "pfedla": {"hidden": "8", "embedding": "4"},
}
"""What makes a method quick, and what it needs on a network of two layers."""
BESIDE = {"fedalign": {"block": "body.1"}}
"""What a method needs to run on the plain network."""


def method_of(name, **arguments):
    """The method called `name` with the arguments that flags say: `--method NAME --method.ARGUMENT
    VALUE ...`.

    Raises:
        BadInput: as the command does.
    """
    values = FEW.get(name, {}) | arguments
    method = instantiate("method", _component(name, tuple(values.items())))
    assert isinstance(method, Method)
    return method


@cache
def _component(name: str, arguments: tuple[tuple[str, str], ...]) -> Component:
    """The resolved component of a method; resolving takes longer than most rounds here."""
    flags = [f"--method={name}", *(f"--method.{key}={value}" for key, value in arguments)]
    return resolve(layers_of_flags(read_flags(flags)[1])[0]).method

"""Arguments of methods without their modules: the same as those of the classes, refused early, and explained."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import fields
from typing import get_type_hints

import pytest

from fl_lightning import catalogue
from fl_lightning.cli import main
from fl_lightning.cli.arguments import check_arguments, explained, sketch
from fl_lightning.config import Component
from fl_lightning.errors import BadInput


def test_a_sketch_has_the_fields_of_its_class() -> None:
    """Names, defaults, types with their bounds, where they are searched: of every method."""
    for name, entry in catalogue.table("methods").items():
        module, _, cls = entry.class_path.rpartition(".")
        real, drawn = getattr(importlib.import_module(module), cls), sketch(entry.class_path)
        assert drawn is not None, name
        ours, theirs = ([(f.name, f.default, dict(f.metadata)) for f in fields(kind)] for kind in (drawn, real))
        assert ours == theirs, name
        hints, known = get_type_hints(drawn, include_extras=True), get_type_hints(real, include_extras=True)
        assert [(f, hints[f]) for f, *_ in ours] == [(f, known[f]) for f, *_ in ours], name


@pytest.mark.parametrize(
    ("method", "given", "told"),
    [
        ("fedprox", {"mu": "-1"}, "method.mu: -1.0 is not allowed; it must be 0 or more"),
        ("fedprox", {"mu": "much"}, "method.mu: 'much' is not allowed; it must be a number"),
        ("fedprox", {"mu": "1e39"}, "method.mu: 1e+39 is not allowed; it must be a finite number"),
        ("fedprox", {"m": 1}, "method.m: 1 is not allowed; no such key (did you mean method.mu?)"),
        ("kapc", {"solver": "exakt"}, "method.solver: 'exakt' is not allowed; it must be one of step, exact"),
        ("fedora", {"lam": 2.0}, "method.lam: 2.0 is not allowed; it belongs to method.selection constant"),
        ("ktpfl", {"loss": "mse"}, "method.loss: 'mse' is not allowed; the paper's update compares probabilities"),
        ("knnper", {"kernel": "box"}, "method.kernel: 'box' is not allowed; it must be one of gaussian, exponential"),
    ],
)
def test_wrong_values_are_told(method: str, given: dict[str, object], told: str) -> None:
    component = Component(catalogue.find("methods", "method", method).class_path, given)
    with pytest.raises(BadInput) as caught:
        check_arguments(component)
    assert str(caught.value).startswith(told)


def test_right_values_and_those_of_others_pass() -> None:
    check_arguments(Component("fl_lightning.methods.fedprox.FedProx", {"mu": "0.5"}))
    check_arguments(Component("fl_lightning.methods.local.Local", {"epochs": None}))
    check_arguments(Component("my_methods.Mine", {"anything": 3}))


def test_every_argument_of_every_method_is_explained() -> None:
    for entry in catalogue.table("methods").values():
        kind = sketch(entry.class_path)
        assert kind is not None
        text = explained(entry.name, kind)
        assert text.startswith(f"{entry.name}: {entry.summary}")
        said = text.split("\n\n")
        for field in fields(kind):
            (own,) = (part for part in said if part.startswith(f"  --method.{field.name}  "))
            assert len(own.splitlines()) > 1, f"{entry.name}: nothing is said of {field.name}"


def test_help_and_list_show_type_bounds_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--method.mu  a number, 0 or more (default: 0.01; fl-train tune looks from 0.001 to 1)",
        "weight of (mu/2) ||w - w_global||^2; 0 is FedAvg. 0.01 lies inside the authors' grid",
    )
    assert main(["fit", "--method", "fedprox", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.index("--federation.rounds") < out.index(words[0])
    assert all(word in out for word in words)
    assert main(["list", "methods", "fedprox", "local"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words) and "--method.epochs  a number or null" in out
    assert main(["fit", "--config", "fedrep_digits", "-h"]) == 0
    assert "--method.head_epochs" in capsys.readouterr().out
    assert main(["fit", "--help"]) == 0
    assert "fl-train fit --method NAME --help" in capsys.readouterr().out


def test_names_that_there_are_not(refused: Callable[..., str]) -> None:
    assert "did you mean fedprox?" in refused("list", "methods", "fedprxo")

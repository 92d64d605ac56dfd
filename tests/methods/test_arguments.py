"""Each argument of each method with values that cannot work: refused in one line that names it, or
a sound run."""

import importlib
import math
from dataclasses import fields

import pytest
from every import BESIDE, NAMES, method_of
from refusals import refuses

from fl_lightning.configuration import catalogue
from fl_lightning.foundation.errors import BadInput, RunFailed

BAD = ("-1", "0", "1.5", "nan", "inf", "-inf", "1e39", "-1e39", "x", "", "[1]", "{}")
"""As they are typed."""
WILD = ("3e38", "1.6e38", "1e-30")
"""Numbers of 32 bits that no optimiser may bear: a run may also end in one line that says that it
has diverged."""
DATA = {"fraction": 0.2, "validation": 0.25, "public": "held_back"}


def arguments():
    """Each method's name with each of its arguments."""
    found = []
    for name in NAMES:
        module, _, cls = catalogue.table("methods")[name].class_path.rpartition(".")
        found += [(name, f.name) for f in fields(getattr(importlib.import_module(module), cls))]
    return found


@pytest.mark.sampled("apfl-adaptive")
@pytest.mark.parametrize("name, argument", arguments(), ids=lambda part: part)
def test_it_is_refused_or_harmless(federation, name, argument):
    endless = "epochs" in argument or argument in (
        "steps",
        "relation_steps",
    )  # they do as they are asked
    found = {
        value: outcome(federation, name, argument, value)
        for value in (*BAD, *(() if endless else WILD))
    }
    assert {value: said for value, said in found.items() if said} == {}


def outcome(federation, name, argument, value):
    """What is wrong with what came of it; empty: nothing."""
    try:
        fed = federation(
            method_of(name, **(BESIDE.get(name, {}) | {argument: value})),
            data=DATA,
            clients=3,
            rounds=2,
            batch_size=16,
        )
        fed.prepare()
        numbers = [x for t in (1, 2) for x in fed.round(t).metrics.values()]
        numbers += fed.evaluator.everyone()["final_accuracies"]
    except BadInput as error:
        named = (
            error.key.startswith("method.") and argument in str(error) and "\n" not in str(error)
        )
        # FedAlign's empty block: it names the one it chose
        chosen = error.key != f"method.{argument}" or value == ""
        shown = chosen or str(error.value) == value or equal(error.value, value)
        return "" if named and shown else f"refused: {error}"
    except RunFailed as error:
        return "" if value in WILD and "not finite" in str(error) else f"failed: {error}"
    except Exception as error:
        return f"raised: {error!r}"
    return "" if all(map(math.isfinite, numbers)) else f"not finite: {numbers}"


def equal(value, typed):
    """Whether a value is the number that was typed."""
    try:
        number = float(typed)
    except ValueError:
        return False
    return value == number or (
        math.isnan(number) and isinstance(value, float) and math.isnan(value)
    )


@pytest.mark.parametrize("name", ["fedala", "fedas", "feddf", "pfeddf", "pfedme", "scaffold"])
def test_unscaled_gradients_are_refused_beside_scaled_losses(name, federation, monkeypatch):
    """16-mixed scales losses and leaves steps out: what a method makes of gradients itself would be
    lost, or wrong."""
    run = federation().run
    monkeypatch.setattr(run.config.fabric, "precision", "16-mixed")
    with refuses(r"fabric.precision='16-mixed'.*bf16-mixed"):
        method_of(name).check(run)

from __future__ import annotations

import importlib
import inspect

import pytest
from torch import nn

from fl_lightning.callbacks.base import Callback, Observer
from fl_lightning.configuration import catalogue
from fl_lightning.foundation.errors import BadInput
from fl_lightning.methods import Method


@pytest.mark.parametrize("name", ["kapc", "KAPC", "k_a-pc", "fl_lightning.methods.kapc.KAPC"])
def test_a_name_is_found_however_it_is_spelt(name: str) -> None:
    entry = catalogue.find("methods", "method", name)
    assert (entry.name, entry.class_path) == ("kapc", "fl_lightning.methods.kapc.KAPC")


def test_a_dotted_name_is_the_users_own_class() -> None:
    assert catalogue.find("methods", "method", "mine.Method").class_path == "mine.Method"
    assert catalogue.find("sources", "data.source", "mine.Module").name == "mine.Module"


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(BadInput) as caught:
        catalogue.find("methods", "method", "kpac")
    assert caught.value.key == "method"
    assert "did you mean kapc?" in str(caught.value)
    assert "see fl-train list methods" in str(caught.value)
    with pytest.raises(BadInput, match=r"did you mean mlp\?.*alexnet.*shufflenetv2"):
        catalogue.find("models", "model", "mpl")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("federation.ronds", "federation.rounds"),
        ("rounds", "federation.rounds"),
        ("ronds", "federation.rounds"),
        ("training.rounds", "federation.rounds"),
    ],
)
def test_did_you_mean_knows_full_keys_and_last_parts(word: str, meant: str) -> None:
    assert (
        catalogue.did_you_mean(word, ["seed", "federation.rounds", "data.alpha"])
        == f" (did you mean {meant}?)"
    )


def test_did_you_mean_keeps_silent_when_nothing_is_near() -> None:
    assert catalogue.did_you_mean("zzz", ["seed", "federation.rounds"]) == ""


@pytest.mark.parametrize(
    ("kind", "base"),
    [("methods", Method), ("models", nn.Module), ("callbacks", Callback), ("loggers", Observer)],
)
def test_every_listed_class_exists_and_is_of_its_kind(kind: str, base: type) -> None:
    assert catalogue.table(kind)
    for entry in catalogue.table(kind).values():
        module, _, name = entry.class_path.rpartition(".")
        found = getattr(importlib.import_module(module), name)
        assert found.__name__.lower() == entry.name and issubclass(found, base)


def test_every_listed_method_is_one_and_can_be_made() -> None:
    """Neither the networks that one builds, nor the bases that several share."""
    classes = {}
    for entry in catalogue.table("methods").values():
        module, _, name = entry.class_path.rpartition(".")
        classes[entry.name] = getattr(importlib.import_module(module), name)
    assert all(issubclass(cls, Method) and not inspect.isabstract(cls) for cls in classes.values())
    assert {"fedavg", "fedproto", "fedrod"} <= classes.keys()
    assert not {"method", "classmeans", "twoheads"} & classes.keys()


def test_sources_partitions_and_configs_have_summaries() -> None:
    for kind, name in (
        ("sources", "digits"),
        ("partitions", "dirichlet"),
        ("configs", "kapc_resnet18"),
    ):
        assert name in catalogue.table(kind)
        assert all(entry.summary for entry in catalogue.table(kind).values())


def test_shipped_configs_open_with_and_without_suffix() -> None:
    assert catalogue.shipped("configs", "kapc_exact_digits") == catalogue.shipped(
        "configs", "kapc_exact_digits.yaml"
    )
    assert catalogue.shipped("configs", "nothing") is None

import importlib
import inspect

import pytest
from refusals import refuses

from fl_lightning.configuration import catalogue
from fl_lightning.foundation.errors import BadInput
from fl_lightning.methods import Method


@pytest.mark.parametrize("name", ["kapc", "KAPC", "k_a-pc", "fl_lightning.methods.kapc.KAPC"])
def test_a_name_is_found_however_it_is_spelt(name):
    entry = catalogue.find("methods", "method", name)
    assert (entry.name, entry.class_path) == ("kapc", "fl_lightning.methods.kapc.KAPC")


def test_a_dotted_name_is_the_users_own_class():
    assert catalogue.find("methods", "method", "mine.Method").class_path == "mine.Method"
    assert catalogue.find("sources", "data.source", "mine.Module").name == "mine.Module"


def test_an_unknown_name_is_answered_with_the_nearest_and_all():
    with pytest.raises(BadInput) as caught:
        catalogue.find("methods", "method", "kpac")
    assert caught.value.key == "method"
    assert "did you mean kapc?" in str(caught.value)
    assert "see fl-train list methods" in str(caught.value)
    with refuses(r"did you mean mlp\?.*alexnet.*shufflenetv2"):
        catalogue.find("models", "model", "mpl")


def test_every_listed_method_is_one_and_can_be_made():
    """Neither the networks that one builds, nor the bases that several share."""
    classes = {}
    for entry in catalogue.table("methods").values():
        module, _, name = entry.class_path.rpartition(".")
        classes[entry.name] = getattr(importlib.import_module(module), name)
    assert all(issubclass(cls, Method) and not inspect.isabstract(cls) for cls in classes.values())
    assert {"fedavg", "fedproto", "fedrod"} <= classes.keys()
    assert not {"method", "classmeans", "twoheads"} & classes.keys()


def test_shipped_configs_open_with_and_without_suffix():
    assert catalogue.shipped("configs", "kapc_exact_digits") == catalogue.shipped(
        "configs", "kapc_exact_digits.yaml"
    )
    assert catalogue.shipped("configs", "nothing") is None

import os
import sys
from pathlib import Path

import pytest
import yaml
from refusals import refuses

from fl_lightning.configuration.catalogue import table
from fl_lightning.configuration.config import Component
from fl_lightning.configuration.flags import layers_of_flags, read_flags
from fl_lightning.configuration.keys import hint, keys
from fl_lightning.configuration.resolve import BASES, _parser, resolve, to_yaml


def resolved(*argv):
    return resolve(layers_of_flags(read_flags(argv)[1])[0])


def test_every_default_is_filled_in():
    config = resolved("--method", "fedprox")
    assert config.method.init_args == {"mu": 0.01}
    assert config.callbacks["heatmaps"].init_args["every"] is None
    assert config.models[0].component.init_args.keys() == {"hidden"}  # the engine gives the rest
    assert list(config.callbacks)[-3:] == ["heatmaps", "progress", "checkpoint"]


def test_values_take_the_types_of_the_signature():
    flags = "--method kapc --method.lam 1e-3 --method.start server --seed 7"
    config = resolved(*flags.split(), "--model.hidden", "[3, 4]")
    assert (config.method.init_args["lam"], config.method.init_args["start"]) == (0.001, "server")
    assert list(config.models[0].component.init_args["hidden"]) == [3, 4]
    assert config.seed == 7


def test_what_was_removed_stays_removed_when_read_back(tmp_path, monkeypatch):
    source = "from fl_lightning.callbacks import Observer\nclass Watch(Observer):\n"
    (tmp_path / "mine.py").write_text(f"{source}    def __init__(self, deep: dict): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    flags = [
        "--callbacks.heatmaps",
        "null",
        "--callbacks",
        "mine.Watch",
        "--callbacks.watch.deep.x",
        "1",
    ]
    flags += ["--loggers", "tensorboard", "--data.root", "2024"]
    config = resolved(*flags, "--model", "[{name: mlp, count: 4}, {name: cnn, count: 6}]")
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    again = resolved("--config", str(tmp_path / "again.yaml"))
    assert again.callbacks.keys() == {"watch", "progress", "checkpoint"}
    assert again.data.root == "2024"
    assert again == config


def test_names_are_written_short_and_lists_in_full():
    content = yaml.safe_load(to_yaml(resolved()))
    assert content["method"]["name"] == "crosskapc"
    assert content["callbacks"]["checkpoint"] == {
        "every": 1,
        "keep": 2,
        "best": True,
        "seconds": 10.0,
    }
    assert not {"out", "name", "resume", "print_config", "config"} & content.keys()


@pytest.mark.parametrize(
    "flags, told",
    {
        "--federation.rounds many": "federation.rounds='many'.*a whole number",
        "--federation.rounds 1.5": "federation.rounds='1.5'.*a whole number",
        "--federation.rounds null": "federation.rounds=.*a whole number",
        "--federation.rounds 0": "federation.rounds=0.*at least 1",
        "--federation.participation 0": "federation.participation=0.0.*",
        "--federation.participation 1.5": "federation.participation=1.5.*",
        "--data.alpha -1": "data.alpha=-1.0.*above 0",
        "--data.source minst": "data.source='minst'.*did you mean mnist",
        "--data.partition diriclet": "data.partition=.*did you mean dirichlet.*import path",
        "--data.partition hsu --data.by class": "data.by='class'.*hsu means client; partition dirichlet",
        "--config kapc_mnist --data.sizes free": "data.sizes='free'.*hsu means equal",
        "--optimizer.name sdg": "optimizer.name='sdg'.*one of sgd, adam",
        "--model []": r"model=\[\].*a list of at least one",
        "--fabric.devices two": "fabric.devices='two'.*a whole number or one of auto",
        "--evaluation.models [x]": "evaluation.models=.*a list: .*or null",
        "--model [{name:mlp,count:3}]": "model",
    }.items(),
)
def test_bad_plain_values(flags, told):
    with refuses(f"^{told}"):
        resolved(*flags.split())


@pytest.mark.parametrize(
    "flags, told",
    {
        "--method kapc --method.lm 1": r"method.lm='1'.*did you mean method.lam\?.*method.beta",
        "--method fedavg --method.lam 1": "method.lam='1'.*no such key; keys: none",
        "--method kapc --method.lam much": "method.lam='much'.*a number",
        "--method kapc --method.lam null": "method.lam='null'.*a number",
        "--method kapc --method.lam -1": "method.lam=-1.0.*0 or more",
        "--method kapc --method.solver exat": "method.solver='exat'.*one of step, exact",
        "--method fedprox --method.mu 1e39": r"method.mu=1e\+39.*a finite number",
        "--method fedora --method.lam 2": "method.lam=2.0.*only method.selection constant uses it",
        "--method ktpfl --method.loss mse": "method.loss='mse'.*update compares probabilities",
        "--method kapc --method.rho 1": "method.rho=1.0.*the published step has no rho of its own",
        "--callbacks.heatmaps.evry 2": r"callbacks.heatmaps.evry=.*did you mean callbacks.heatmaps.every\?",
        "--model.hidden wide": "model.hidden='wide'.*a list: ",
        "--method fl_lightning.models.mlp.MLP": "method=.*subclass of fl_lightning.methods.base.Method",
        "--method fl_lightning.methods.kapc.KACP": r"method=.*did you mean KAPC\?",
        "--callbacks fl_lightning.callbacks.cube.LearnedCube": r"callbacks.learnedcube=.*subclass of fl_lightning.callbacks.Transform or "
        r".*\.Observer or .*\.Aggregator",
        "--method no_such_package.Method": "method=.*no module no_such_package",
    }.items(),
)
def test_bad_components(flags, told):
    with refuses(f"^{told}"):
        resolved(*flags.split())


OWN = """
from pathlib import Path
from fl_lightning.callbacks import Callback, Observer

class Watch(Observer):
    def __init__(self, where: Path, every: int = 2, hook=print):
        self.where = where

class Bare(Observer):
    pass
"""


@pytest.fixture
def own(engine, tmp_path):
    """A module in the current directory; its name is not used twice in a session."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    return name


def test_own_classes_are_found_in_the_current_directory(own):
    flags = ["--callbacks", f"{own}.Watch", "--callbacks.watch.where", "here"]
    config = resolved(*flags)
    # no YAML can say `print`
    assert config.callbacks["watch"].init_args == {"where": Path("here"), "every": 2}
    assert yaml.safe_load(to_yaml(config))["callbacks"]["watch"] == {
        "class_path": f"{own}.Watch",
        "init_args": {"where": "here", "every": 2},
    }


def test_text_for_a_function_is_read_by_what_it_wants(own, tmp_path):
    """`1e-3` was text, `no` for a text was false, and what is no YAML ended in a traceback."""
    with (tmp_path / f"{own}.py").open("a") as file:
        file.write("def net(num_classes, share: float = 0.5, kind: str = '', **more):\n    pass\n")
    flags = [
        "--model",
        f"{own}.net",
        "--model.share",
        "1e-3",
        "--model.kind",
        "no",
        "--model.further",
        "2E4",
    ]
    assert resolved(*flags).models[0].component.init_args == {
        "share": 0.001,
        "kind": "no",
        "further": 20000.0,
    }
    with refuses(r"^model\.share='\[1': it is not valid YAML"):
        resolved(*flags, "--model.share", "[1")
    with refuses(r"^model\.share=nan: it must be a finite number"):
        resolved(*flags, "--model.share", ".nan")
    with refuses(r"^model\.further=\[1, nan\]: it must be a finite number"):
        resolved(*flags, "--model.further", "[1, .nan]")


def test_an_argument_without_default_must_be_given(own):
    with refuses(r"callbacks.watch.where: .*must be given"):
        resolved("--callbacks", f"{own}.Watch")


def test_the_current_directory_comes_last_so_that_it_shadows_nothing(own):
    assert resolved("--callbacks", f"{own}.Bare").callbacks["bare"].init_args == {}
    assert sys.path.index(os.getcwd()) == len(sys.path) - 1


@pytest.mark.sampled("callbacks", "loggers")
@pytest.mark.parametrize("kind", ["methods", "models", "callbacks", "loggers"])
def test_every_argument_of_a_shipped_class_has_a_type_that_is_checked(kind):
    """jsonargparse takes any value, and says nothing, where it cannot look a type up."""
    for entry in table(kind).values():
        cls = Component(entry.class_path).load()
        types = {
            key: str(hint(action)) for key, action in keys(_parser(cls, BASES[kind][1])).items()
        }
        assert {
            key for key, name in types.items() if "Unvalidated" in name or name in ("None", "Any")
        } == set()

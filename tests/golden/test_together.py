"""All golden methods in one study, on a network that stacks: the same bits alone and among all the
others."""

from pathlib import Path

import cases
import pytest
import yaml
from small import results

from fl_lightning.cli import main
from fl_lightning.configuration import catalogue

FEW = ("fedavg", "fedproto", "apfl")


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW, tuple(catalogue.table("methods"))], ids=["few", "all"])
def test_methods_have_the_same_bits_alone_and_among_others(names, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    of = cases.methods()
    # a study has one base, and they want adapters
    names = tuple(name for name in names if name not in cases.ADAPTED)

    def entry(name):
        settings = of[name]
        more = {f"optimizer.{key}": value for key, value in settings.get("optimizer", {}).items()}
        return {"name": name, **settings["method"]["init_args"], **more}

    base = cases.merged(
        cases.SETTINGS,
        {
            "model": cases.MLP,
            "data": {"public": "held_back"},
            "fabric": {"executor": "vmap", "precision": "32-true"},
        },
    )
    study = {
        "base": base,
        "methods": [entry(name) for name in names],
        "seeds": [0],
        "forced": False,
    }
    Path("study.yaml").write_text(yaml.safe_dump(study))
    for out, at_once in (("alone", 1), ("together", len(names))):
        line = ["study", "study.yaml", "--out", out, "--workers", "1", "--together", str(at_once)]
        assert main(line) == 0, capfd.readouterr().err
    alone, among = results(Path("alone")), results(Path("together"))
    assert len(alone) == len(names)
    assert [name for name in alone if alone[name] != among.get(name)] == []

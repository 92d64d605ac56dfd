"""Names of the version before: they work, and one line says what they are called now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from watching import Make, client_of, payload_of

import fl_lightning.core
from fl_lightning import renames
from fl_lightning.callbacks.relations import Alone
from fl_lightning.cli import main
from fl_lightning.cli.settings import Settings
from fl_lightning.core import Objective, RunContext
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.local import Local


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renames, "_warned", set())


@pytest.fixture
def warned(capsys: Any) -> Callable[[], list[str]]:
    """What each line since the last call says is called otherwise now."""
    return lambda: [line.partition(":")[0] for line in capsys.readouterr().err.splitlines() if "is called" in line]


def test_a_client(federation: Make, warned: Callable[[], list[str]]) -> None:
    fed = federation(FedAvg())
    fed.round(1)
    client: Any = client_of(fed, 0)
    old, new = (give(payload_of(client), 0.5) for give in (client.pulled, client.proximal))
    np.testing.assert_array_equal(old.proximal_weight, new.proximal_weight)
    client.noted["mine"] = 3
    assert client.scratch == {"mine": 3}
    assert fed.run.said is fed.run.warned  # type: ignore[attr-defined]
    assert warned() == [
        "Client.pulled is called proximal now", "Client.noted is called scratch now",
        "RunContext.said is called warned now",
    ]  # fmt: skip
    client.noted, client.pulled, fed.run.said  # noqa: B018
    assert not warned()


def test_an_objective(warned: Callable[[], list[str]]) -> None:
    objective: Any = Objective(anchor=torch.zeros(2), pull=np.ones(1))  # type: ignore[call-arg]
    assert objective.proximal_weight is objective.pull
    assert warned() == ["Objective.pull is called proximal_weight now"]
    with pytest.raises(TypeError, match="pulls"):
        Objective(pulls=1)  # type: ignore[call-arg]


def test_the_class_of_a_run(warned: Callable[[], list[str]]) -> None:
    assert fl_lightning.core.Run is RunContext
    assert warned() == ["fl_lightning.core.Run is called RunContext now"]
    with pytest.raises(AttributeError, match="Ran"):
        _ = fl_lightning.core.Ran


def test_a_relation(federation: Make, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]) -> None:
    class Own(Alone):
        mixes = "heard"

    monkeypatch.setattr(Local, "relation", lambda self: Own())
    fed = federation(Local(), participation=0.5)
    fed.round(1, [0, 1]), fed.round(2, [1, 2])
    assert fed.run.relation.sources == "uploaded"
    assert warned() == ["Own.mixes is called sources now"]


@pytest.mark.parametrize(
    ("given", "value", "line"),
    [
        ({"mixes": "heard"}, "uploaded", "method.mixes is called method.sources uploaded now"),
        ({"mixes": "cohort"}, "cohort", "method.mixes is called method.sources now"),
        ({"init_args": {"mixes": "heard"}}, "uploaded", "method.mixes is called method.sources uploaded now"),
    ],
)
def test_an_argument(given: dict[str, Any], value: str, line: str, warned: Callable[[], list[str]]) -> None:
    settings = Settings.merged([{"method": {"name": "kapc", **given}}, {"seed": 1}])
    assert settings.method.init_args == {"sources": value} and warned() == [line]


def test_an_argument_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--method", "kapc", "--method.mixes", "heard", "--print_config"]) == 0
    text = capsys.readouterr().out
    assert "sources: uploaded" in text and "mixes" not in text
    assert main(["fit", "--method", "fedavg", "--method.mixes", "heard", "--print_config"]) == 2
    assert "method.mixes: 'heard'" in capsys.readouterr().err

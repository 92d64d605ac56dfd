"""Clients that have not uploaded yet count with the initial model, and the log says so."""

import pytest

from fl_lightning.methods.fedamp import FedAMP

LINE = "are mixed are of clients that have not uploaded yet"


@pytest.mark.parametrize("participation, count", [(0.5, 1), (1.0, 0)])
def test_the_share_of_initial_models_is_said_once(federation, capsys, participation, count):
    federation(FedAMP(), participation=participation, rounds=3).fit()
    assert capsys.readouterr().err.count(LINE) == count

"""Sites with a process for each message, as Flower has it: killed, asked twice, with unfit data."""

from pathlib import Path

import numpy as np
import pytest

from fl_lightning.cli import main
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.sites import wire
from fl_lightning.sites.app import PACKAGE
from fl_lightning.sites.ends import config_of
from fl_lightning.sites.exchange import Exchange
from fl_lightning.sites.rehearsal import differences, simulate

from .kills import of_sites
from .processes import Processes, in_process, nodes_of, run_of
from .test_equal import SMALL

FLAGS = SMALL.replace("--federation.clients 3", "--federation.clients 2").split()


@pytest.fixture
def app(tmp_path, monkeypatch):
    """An app for two sites in the working directory."""
    monkeypatch.chdir(tmp_path)
    words = [*FLAGS, "--method", "ditto", "--federation.rounds", "4", "--rehearse", "false"]
    assert main(["deploy", *words, "--out", "app", "--sites", "sites"]) == 0
    return tmp_path / "app" / PACKAGE


@pytest.mark.slow
@pytest.mark.alone
def test_killed_sites_lose_nothing(tmp_path, monkeypatch):
    """Some of the kills that `python -m tests.deploy.kills sites` makes 25 of."""
    monkeypatch.chdir(tmp_path)
    done = of_sites(tmp_path, 4, seed=0)
    assert (done.lost, done.unlike) == ([], [])
    assert done.killed == {"site": 4}
    words = ["--client", "0", "--out", str(tmp_path / "none.safetensors")]
    assert main(["export", "--run", str(tmp_path / "at-1" / "app"), *words]) == 2


@pytest.mark.slow
def test_a_centre_that_goes_on_comes_to_the_same_bits(app, tmp_path, monkeypatch):
    """It dies after sites have answered round 3 and before it has saved it: they answer the same
    bytes again."""
    ask, trained = Exchange.ask, []

    def dying(self, t, kind, *rest):
        answers = ask(self, t, kind, *rest)
        if (t, kind) == (3, "visit"):
            trained.append(answers)
            if len(trained) == 1:
                raise RunFailed("the centre dies")
        return answers

    monkeypatch.setattr(Exchange, "ask", dying)
    sites = in_process(app, nodes_of(tmp_path))
    with pytest.raises(RunFailed, match="the centre dies"):
        run_of(app, sites, tmp_path / "center")
    run = run_of(app, sites, tmp_path / "center", resume=True)
    first, second = trained
    assert all(wire.pack(first[client]) == wire.pack(second[client]) for client in (0, 1))
    assert differences(simulate(config_of(app), tmp_path), run) == []


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (
            lambda a: a.update(x_train=a["x_train"][..., :7]),
            "its samples have another shape than the federation's",
        ),
        (
            lambda a: a.update(y_train=a["y_train"] + 5),
            "its data have classes that the federation does not know",
        ),
        (lambda a: a.pop("y_train"), "its data cannot be read"),
    ],
)
def test_data_that_do_not_fit_are_one_line(spoil, sentence, app, tmp_path):
    nodes = nodes_of(tmp_path)
    with np.load(nodes[1]["data"]) as file:
        content = dict(file)
    spoil(content)
    np.savez(nodes[1]["data"], **content)
    with pytest.raises(RunFailed, match=rf"^site 1 cannot take part: {sentence}$"):
        run_of(app, in_process(app, nodes), tmp_path / "center")


def test_a_folder_of_another_site_is_one_line(app, tmp_path):
    """Two sites share a folder; two sites say that they are one client."""
    first, second = nodes_of(tmp_path)
    sentence = "its folder holds the state of another client, or of another configuration"
    shared = in_process(app, [first, second | {"folder": first["folder"]}])
    with pytest.raises(RunFailed, match=f"^site 1 cannot take part: {sentence}"):
        run_of(app, shared, tmp_path / "center")
    twice = in_process(app, [first, first | {"folder": str(tmp_path / "another")}])
    with pytest.raises(RunFailed, match=r"the sites at 0 and 1 both say that they are client 0"):
        run_of(app, twice, tmp_path / "other")


OWN = '''
"""A method of the consortium's own."""

from fl_lightning.methods import Traits
from fl_lightning.methods.fedavg import FedAvg


class Halved(FedAvg):
    """Goes half of the way."""

    traits = Traits(changes_upload=True)

    def upload(self, client, download):
        sent = super().upload(client, download)
        sent.vector = (sent.vector + download.vector) / 2
        return sent
'''


@pytest.mark.slow
@pytest.mark.alone
def test_own_code_travels_with_the_app(tmp_path, monkeypatch):
    """The file is gone once the app is written; sites and centre have the app's copy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("consortium_methods.py").write_text(OWN)
    words = [*FLAGS, "--method", "consortium_methods.Halved", "--rehearse", "false"]
    assert main(["deploy", *words, "--out", "app", "--sites", "sites"]) == 0
    Path("consortium_methods.py").unlink()
    app = tmp_path / "app" / PACKAGE
    run = run_of(app, Processes(app, nodes_of(tmp_path)), tmp_path / "center")
    assert (run / "summary.json").is_file()
    assert differences(simulate(config_of(app), tmp_path), run) == []

"""Sites as processes behind sockets, as Flower's ClientApp finds them: killed, asked twice, with
unfit data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning.cli import main
from fl_lightning.cli.ends import config_of
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.sites.app import PACKAGE
from fl_lightning.sites.exchange import Exchange
from fl_lightning.sites.rehearsal import differences, simulate
from fl_lightning.sites.relay import process_of

from .kills import of_sites
from .processes import NAME, configs_of, end_all, pid_of, run_of
from .test_equal import SMALL

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A site's process outlives the process that started it, of which its `Popen` warns."""

FLAGS = SMALL.replace("--federation.clients 3", "--federation.clients 2").split()


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An app for two sites."""
    monkeypatch.chdir(tmp_path)
    words = [*FLAGS, "--method", "ditto", "--federation.rounds", "4", "--rehearse", "false"]
    assert main(["deploy", *words, "--out", "app", "--sites", "sites"]) == 0
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(map(str, [*sys.path[:1], str(Path(__file__).parents[2])]))
    )
    return tmp_path / "app" / PACKAGE


@pytest.fixture
def sites(app: Path, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """Node configurations of the two sites; their processes end with the test."""
    configs = configs_of(tmp_path, ("north", "south"))
    yield configs
    end_all(configs)


@pytest.mark.slow
@pytest.mark.alone
def test_killed_sites_and_relays_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the kills that `python -m tests.deploy.kills sites` makes 50 of."""
    monkeypatch.chdir(tmp_path)
    done = of_sites(tmp_path, {"sites": 3, "relays": 2}, seed=0)
    assert (done.lost, done.unlike) == ([], [])
    assert done.counts()["killed"] == {"site": 3, "relay": 2}
    own = str(tmp_path / "at-south" / "app")
    assert (
        main(["export", "--run", own, "--client", "0", "--out", str(tmp_path / "none.safetensors")])
        == 2
    )


@pytest.mark.slow
@pytest.mark.alone
def test_a_centre_that_goes_on_comes_to_the_same_bits(
    app: Path, sites: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies after sites have answered round 3 and before it has saved it: they answer the same
    bytes again."""
    folder = tmp_path / "center"
    ask, trained = Exchange.ask, []

    def dying(self: Exchange, t: int, kind: str, *rest: Any) -> Any:
        answers = ask(self, t, kind, *rest)
        if (t, kind) == (3, "visit"):
            trained.append(answers)
            if len(trained) == 1:
                raise RunFailed("the centre dies")
        return answers

    monkeypatch.setattr(Exchange, "ask", dying)
    with pytest.raises(RunFailed, match="the centre dies"):
        run_of(app, sites, folder)
    run_of(app, sites, folder, resume=True)
    assert [sorted(t.keys()) for t in trained] == [[0, 1], [0, 1]]
    assert differences(simulate(config_of(app), tmp_path), folder) == []


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("spoil", "sentence"),
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
def test_data_that_do_not_fit_are_one_line(
    spoil: Callable[[dict[str, Any]], Any],
    sentence: str,
    app: Path,
    sites: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    with np.load(sites[1]["data"]) as file:
        content = dict(file)
    spoil(content)
    np.savez(sites[1]["data"], **content)
    with pytest.raises(RunFailed, match=rf"^site 1 cannot take part: {sentence}$"):
        run_of(app, sites, tmp_path / "center")


@pytest.mark.slow
@pytest.mark.alone
def test_two_sites_with_one_identity_are_one_line(
    app: Path, sites: list[dict[str, Any]], tmp_path: Path
) -> None:
    twice = [sites[0], sites[0] | {"folder": str(tmp_path / "another")}]
    try:
        with pytest.raises(
            RunFailed, match=r"the sites at \d and \d both say that they are client 0"
        ):
            run_of(app, twice, tmp_path / "center")
    finally:
        end_all(twice)


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
def test_own_code_travels_with_the_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is gone once the app is written; sites and centre have the app's copy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("consortium_methods.py").write_text(OWN)
    words = [*FLAGS, "--method", "consortium_methods.Halved", "--rehearse", "false"]
    assert main(["deploy", *words, "--out", "app", "--sites", "sites"]) == 0
    Path("consortium_methods.py").unlink()
    configs = configs_of(tmp_path, ("north", "south"))
    try:
        run = run_of(tmp_path / "app" / PACKAGE, configs, tmp_path / "center")
    finally:
        end_all(configs)
    assert (run / "summary.json").is_file()
    assert differences(simulate(config_of(tmp_path / "app" / PACKAGE), tmp_path), run) == []


CLIENT_APP = """
import json, sys
sys.path.insert(0, sys.argv[1])
from fl_app import relay
print(type(relay.connect(relay.Path(sys.argv[2]), json.loads(sys.argv[3]))).__name__, flush=True)
"""
SUPERNODE = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {CLIENT_APP.replace("fl_app", PACKAGE)!r}, *sys.argv[1:]], check=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_site_ends_with_the_supernode_that_it_was_started_for(
    app: Path, sites: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Which is killed, and so tells nobody."""
    (tmp_path / "flower-supernode").write_text(SUPERNODE)
    folder = tmp_path / "at-north" / NAME
    folder.mkdir(parents=True)
    words = [sys.executable, "flower-supernode", str(app.parent), str(folder), json.dumps(sites[0])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == "socket\n"
        site = pid_of(sites[0])
        started = process_of(site)
        assert started is not None and f"--keeper {node.pid} " in f"{started.command} "
        node.kill()
    deadline = time.monotonic() + 30
    while (started := process_of(site)) is not None and started.state != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.1)

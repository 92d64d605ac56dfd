"""Sites as processes behind sockets, as Flower's ClientApp finds them: killed, asked twice, with unfit data."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from fl_lightning.cli import main
from fl_lightning.cli.ends import config_of
from fl_lightning.deploy import relay
from fl_lightning.deploy.app import PACKAGE, fingerprint
from fl_lightning.deploy.center import federation_of
from fl_lightning.deploy.data import Facts
from fl_lightning.deploy.exchange import Come, Exchange, Limits
from fl_lightning.deploy.rehearsal import differences, simulate
from fl_lightning.errors import RunFailed
from fl_lightning.run import fit_on_rank, launch

from .test_equal import SMALL

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A site's process outlives the process that started it, of which its `Popen` warns."""

FLAGS = SMALL.replace("--federation.clients 3", "--federation.clients 2").split()


class Processes:
    """A transport to sites that are processes, each behind its socket."""

    def __init__(self, configs: list[dict[str, Any]]) -> None:
        self.configs, self.pool, self.come = configs, ThreadPoolExecutor(8), SimpleQueue[tuple[str, bytes]]()
        self.number = 0

    def addresses(self) -> list[int]:
        return list(range(len(self.configs)))

    def push(self, address: int, message: bytes, ttl: float) -> str:
        self.number += 1
        name = str(self.number)
        self.pool.submit(lambda: self.come.put((name, relay.answered(message, "app", self.configs[address]))))
        return name

    def pull(self, most: int) -> list[tuple[str, Come]]:
        return [self.come.get() for _ in range(self.come.qsize())]

    def pause(self) -> None:
        time.sleep(0.02)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An app for two sites, whose relay is this process."""
    monkeypatch.chdir(tmp_path)
    words = [*FLAGS, "--method", "ditto", "--federation.rounds", "4", "--rehearse", "false"]
    assert main(["deploy", *words, "--out", "app", "--sites", "sites"]) == 0
    monkeypatch.setattr(relay, "HERE", tmp_path / "app" / PACKAGE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [*sys.path[:1], str(Path(__file__).parents[2])])))
    return tmp_path / "app" / PACKAGE


@pytest.fixture
def sites(app: Path, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """Node configurations of the two sites; their processes end with the test."""
    configs = [
        {"client": k, "site": name, "data": str(tmp_path / "sites" / f"site-{k}.npz"), "python": sys.executable,
         "folder": str(tmp_path / f"at-{name}"), "idle": 60.0}
        for k, name in enumerate(("north", "south"))
    ]  # fmt: skip
    yield configs
    for config in configs:
        with contextlib.suppress(ProcessLookupError, OSError, ValueError):
            os.kill(pid_of(config), signal.SIGKILL)


def pid_of(config: dict[str, Any]) -> int:
    return int((Path(config["folder"]) / "app" / "lock").read_text().split()[1])


def run_of(app: Path, configs: list[dict[str, Any]], folder: Path, resume: bool = False) -> Path:
    config = config_of(app)
    mark = fingerprint(app, config)
    folder.mkdir(exist_ok=resume)
    exchange = Exchange(Processes(configs), "run", mark, Limits(120, 120, 30))
    public = app.parents[1] / "sites" / "public.npz"
    put_together = partial(federation_of, exchange, Facts.read(app / "facts.json"), public)
    launch(config, fit_on_rank, folder, resume, put_together)
    return folder


@pytest.mark.slow
@pytest.mark.alone
def test_killed_sites_lose_nothing(
    app: Path, sites: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of one site in each round, in turns, at a random moment: the numbers are those of the simulator, and the
    export is the personal model."""
    draws, turns, kills, ask = random.Random(0), cycle(sites), list[int](), Exchange.ask

    def kill(site: dict[str, Any]) -> None:
        with contextlib.suppress(ProcessLookupError, OSError, ValueError, IndexError):
            os.kill(pid := pid_of(site), signal.SIGKILL)
            kills.append(pid)

    def killed(self: Exchange, t: int, kind: str, *rest: Any) -> Any:
        if kind != "visit":
            return ask(self, t, kind, *rest)
        timer = threading.Timer(draws.uniform(0, 0.3), kill, [next(turns)])
        timer.start()
        answers = ask(self, t, kind, *rest)
        timer.join()  # the next round begins with it dead at the latest, and starts it again
        return answers

    monkeypatch.setattr(Exchange, "ask", killed)
    run = run_of(app, sites, tmp_path / "center")
    assert differences(simulate(config_of(app), tmp_path), run) == []
    assert len(set(kills)) == 4  # one in each round
    for config in sites:
        with contextlib.suppress(ProcessLookupError, OSError, ValueError):
            os.kill(pid_of(config), signal.SIGKILL)
    own = str(Path(sites[1]["folder"]) / "app")
    assert main(["export", "--run", own, "--client", "1", "--out", str(tmp_path / "one.safetensors")]) == 0
    assert main(["export", "--run", own, "--client", "0", "--out", str(tmp_path / "none.safetensors")]) == 2


@pytest.mark.slow
@pytest.mark.alone
def test_a_centre_that_goes_on_comes_to_the_same_bits(
    app: Path, sites: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies after sites have answered round 3 and before it has saved it: they answer the same bytes again."""
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
        (lambda a: a.update(x_train=a["x_train"][..., :7]), "its samples have another shape than the federation's"),
        (lambda a: a.update(y_train=a["y_train"] + 5), "its data have classes that the federation does not know"),
        (lambda a: a.pop("y_train"), "its data cannot be read"),
    ],
)
def test_data_that_do_not_fit_are_one_line(
    spoil: Callable[[dict[str, Any]], Any], sentence: str, app: Path, sites: list[dict[str, Any]], tmp_path: Path
) -> None:
    with np.load(sites[1]["data"]) as file:
        content = dict(file)
    spoil(content)
    np.savez(sites[1]["data"], **content)
    with pytest.raises(RunFailed, match=rf"^site 1 cannot take part: {sentence}$"):
        run_of(app, sites, tmp_path / "center")


@pytest.mark.slow
@pytest.mark.alone
def test_two_sites_with_one_identity_are_one_line(app: Path, sites: list[dict[str, Any]], tmp_path: Path) -> None:
    twice = [sites[0], sites[0] | {"folder": str(tmp_path / "another")}]
    try:
        with pytest.raises(RunFailed, match=r"the sites at \d and \d both say that they are client 0"):
            run_of(app, twice, tmp_path / "center")
    finally:
        os.kill(pid_of(twice[1]), signal.SIGKILL)

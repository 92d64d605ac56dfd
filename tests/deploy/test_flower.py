"""Real SuperLink and SuperNodes on loopback, with TLS and a key for each node, in an environment of
Flower's own."""

import json
import signal
import time

import pytest
from lines import run_line

from fl_lightning.cli import main
from fl_lightning.results.folder import RunFolder
from fl_lightning.sites.app import PACKAGE
from fl_lightning.sites.ends import config_of
from fl_lightning.sites.rehearsal import differences, simulate

from .kills import of_flower
from .test_equal import SMALL


@pytest.mark.slow
@pytest.mark.alone
def test_three_supernodes_come_to_the_simulators_bits(machines, tmp_path, capsys):
    """KAPC+BLS with TLS and node authentication; tables, bytes against the ledger, and each site's
    own model."""
    machines.open(3, *SMALL.split(), "--method", "kapc", "--callbacks", "checkpoint,layerselection")
    out = machines.flwr(*machines.run())
    run = tmp_path / "runs" / "app"
    assert (run / "summary.json").is_file(), out[-3000:]
    assert differences(simulate(config_of(tmp_path / "app" / PACKAGE), tmp_path), run) == []

    uploads = sum(row["upload_bytes"] for row in RunFolder(run).read("clients"))
    received = json.loads((run / "deployed.json").read_text())["bytes_received"]
    messages = 3 * (2 + 1)  # two visits and a final score of each; kapc has no global model
    assert uploads <= received <= 1.02 * uploads + 2000 * messages
    print(f"uploads {uploads} bytes in the ledger, {received} received in {messages} messages")
    seconds = [row["seconds"] for row in RunFolder(run).read("metrics")]
    print(f"seconds a round {seconds}")

    own, out_file = str(tmp_path / "at-2" / "app"), str(tmp_path / "two.safetensors")
    assert main(["export", "--run", own, "--client", "2", "--out", out_file]) == 0
    capsys.readouterr()
    assert run_line(f"export --run {run} --client 2 --out {tmp_path / 'none.safetensors'}") == 2
    assert "at their sites" in capsys.readouterr().err
    assert run_line(f"report {run}") == 0


@pytest.mark.slow
@pytest.mark.alone
def test_kills_lose_nothing(machines):
    """One of each of the kills that `python -m tests.deploy.kills flower` makes many of: a
    SuperNode comes back, and after the SuperLink's death the same `flwr run` goes on."""
    done = of_flower(machines, {"site": 1, "node": 1, "superlink": 1}, seed=0)
    assert (done.lost, done.unlike) == ([], [])
    assert done.killed == {"site": 1, "node": 1, "superlink": 1}


def of_sites(machines):
    """Process ids of the sites."""
    return [pid for pid, command in machines.processes() if "sites.superexec" in command]


@pytest.mark.slow
@pytest.mark.alone
def test_the_stream_has_the_rounds_and_a_site_ends_with_its_supernode(machines):
    """Both however they end: told to, or killed; and the centre with its SuperLink."""
    machines.open(
        2,
        *SMALL.replace("clients 3", "clients 2").split(),
        "--method",
        "fedavg",
        "--callbacks",
        "progress",
    )
    out = machines.flwr(*machines.run())
    assert [t for t in (1, 2) if f"round {t}/2: mean accuracy 0." in out] == [1, 2], out[-3000:]
    assert "run folder: " in out
    wait_for(lambda: len(of_sites(machines)) == 2)  # the forks of the last messages end
    for left, name, number in ((1, "node0", signal.SIGKILL), (0, "node1", signal.SIGTERM)):
        machines.running[name].send_signal(number)
        machines.running[name].wait(60)
        wait_for(lambda left=left: len(of_sites(machines)) == left)
    machines.running["superlink"].kill()
    machines.running["superlink"].wait()
    wait_for(lambda: not [*machines.processes()])


def wait_for(holds):
    """Some seconds: of a busy machine."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)

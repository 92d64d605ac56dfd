"""Real SuperLink and SuperNodes on loopback, with TLS and a key for each node, in an environment of Flower's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.cli import main
from fl_lightning.cli.ends import config_of
from fl_lightning.deploy.app import PACKAGE
from fl_lightning.deploy.rehearsal import differences, simulate
from fl_lightning.results.folder import RunFolder

from .test_equal import SMALL

HERE = Path(__file__).parent
PATIENCE = 900
CERTIFICATES = """
openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj "/CN=test CA" -keyout ca.key -out ca.crt \
  -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
openssl req -newkey rsa:2048 -nodes -subj "/CN=localhost" -keyout server.key -out server.csr
printf "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n" > ext.cnf
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile ext.cnf -out server.crt
for k in 0 1 2; do ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f node$k; done
"""


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Flower's commands; FL_FLOWER names an environment that is there already."""
    if there := os.environ.get("FL_FLOWER"):
        return Path(there) / "bin"
    made = tmp_path_factory.mktemp("flower") / "env"
    subprocess.run(["uv", "venv", "-q", str(made), "--python", "3.11"], check=True)
    python, listed = str(made / "bin" / "python"), str(HERE / "flower.txt")
    install = ["uv", "pip", "install", "-q", "--no-config", "--python", python, "-r", listed]
    subprocess.run(install, check=True)
    return made / "bin"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Machines:
    """Processes of one deployment in `folder`, all of which end with the test."""

    def __init__(self, flower: Path, folder: Path) -> None:
        self.flower, self.folder, self.port, self.running = flower, folder, free_port(), []
        off = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(folder / "home")}
        off |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        off |= {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "OMP_NUM_THREADS": "1"}
        beside = str(Path(sys.executable).parent)
        self.env = {**os.environ, **off, "PATH": f"{flower}:{beside}:{os.environ['PATH']}"}
        (folder / "home").mkdir()
        address = f'[superlink.centre]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{folder}/ca.crt"\n'
        (folder / "home" / "config.toml").write_text(address)
        subprocess.run(["bash", "-ec", CERTIFICATES], cwd=folder, check=True, capture_output=True)

    def start(self, name: str, until: str, *words: str) -> None:
        """Start a command of Flower, and wait until its log says `until`."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            command = [str(self.flower / words[0]), *words[1:]]
            process = subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=out, stderr=out)
        self.running.append(process)
        deadline = time.monotonic() + PATIENCE
        while until not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert until in log.read_text(), log.read_text()[-2000:]

    def flwr(self, *words: str) -> str:
        """What a command of `flwr` prints."""
        command = [str(self.flower / "flwr"), *words]
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=PATIENCE)
        return done.stdout + done.stderr

    def run(self) -> list[str]:
        """The words of `flwr` that start a run, or have it go on."""
        folders = (
            f'out="{self.folder}/runs" public="{self.folder}/sites/public.npz" sites="{self.folder}/sites" again=600'
        )
        return ["run", "app", "centre", "--stream", "-c", folders]

    def simulation(self, nodes: int) -> None:
        """A SuperLink with Flower's simulation engine in place of SuperNodes."""
        address = f'[superlink.centre]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (self.folder / "home" / "config.toml").write_text(address)
        words = ["--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(self.port)]
        self.start("superlink", "Uvicorn running on", "flower-superlink", *words)
        sizes = ["--num-supernodes", str(nodes), "--client-resources-num-cpus", "1"]
        self.flwr("federation", "simulation-config", "@none/default", "centre", *sizes)

    def superlink(self) -> None:
        keys = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
        words = ["--host", "127.0.0.1", "--port", str(self.port), "--database", "state.db", "--enable-supernode-auth"]
        self.start("superlink", "Uvicorn running on", "flower-superlink", *words, *keys)

    def node(self, client: int, data: Path) -> None:
        own = f'client={client} site="site-{client}" data="{data}" folder="{self.folder}/at-{client}" idle=300'
        words = ["--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(free_port())]
        keys = ["--root-certificates", "ca.crt", "--auth-supernode-private-key", f"node{client}"]
        self.start(f"node{client}", "SuperNode ID", "flower-supernode", *words, *keys, "--node-config", own)

    def end(self) -> None:
        for process in reversed(self.running):
            process.send_signal(signal.SIGTERM)
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
        mine = f"FLWR_HOME={self.folder / 'home'}\0".encode()
        for environment in Path("/proc").glob("[0-9]*/environ"):  # sites' processes, and the engine's
            with contextlib.suppress(OSError):
                if mine in environment.read_bytes():
                    os.kill(int(environment.parent.name), signal.SIGKILL)


@pytest.fixture
def machines(flower: Path, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(flower, tmp_path)
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.alone
def test_three_supernodes_come_to_the_simulators_bits(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """KAPC+BLS with TLS and node authentication; tables, bytes against the ledger, and each site's own model."""
    monkeypatch.chdir(tmp_path)
    words = [*SMALL.split(), "--method", "kapc", "--rehearse", "false", "--callbacks", "checkpoint,layerselection"]
    assert main(["deploy", *words, "--out", "app", "--sites", "sites"]) == 0
    machines.superlink()
    for k in range(3):
        registered = machines.flwr("supernode", "register", f"node{k}.pub", "centre", "--format", "json")
        assert "node-id" in registered, registered
        machines.node(k, tmp_path / "sites" / f"site-{k}.npz")
    out = machines.flwr(*machines.run())
    run = tmp_path / "runs" / "app"
    assert (run / "summary.json").is_file(), out[-3000:]
    assert differences(simulate(config_of(tmp_path / "app" / PACKAGE), tmp_path), run) == []

    uploads = sum(row["upload_bytes"] for row in RunFolder(run).read("clients"))
    received = json.loads((run / "deployed.json").read_text())["bytes_received"]
    messages = 3 * (2 + 1)  # two visits and a final score of each; kapc has no global model
    assert uploads <= received <= 1.02 * uploads + 2000 * messages
    print(f"uploads {uploads} bytes in the ledger, {received} received in {messages} messages")
    seconds: list[Any] = [row["seconds"] for row in RunFolder(run).read("metrics")]
    print(f"seconds a round {seconds}")

    own, out_file = str(tmp_path / "at-2" / "app"), str(tmp_path / "two.safetensors")
    assert main(["export", "--run", own, "--client", "2", "--out", out_file]) == 0
    capsys.readouterr()
    assert main(["export", "--run", str(run), "--client", "2", "--out", str(tmp_path / "none.safetensors")]) == 2
    assert "at their sites" in capsys.readouterr().err
    assert main(["report", str(run)]) == 0


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_goes_on_after_its_superlink_was_killed(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 after the first round; SuperNodes come back by themselves, and the same `flwr run` goes on."""
    monkeypatch.chdir(tmp_path)
    words = [*SMALL.replace("clients 3", "clients 2").replace("rounds 2", "rounds 3").split(), "--method", "ditto"]
    assert main(["deploy", *words, "--rehearse", "false", "--out", "app", "--sites", "sites"]) == 0
    machines.superlink()
    for k in range(2):
        machines.flwr("supernode", "register", f"node{k}.pub", "centre", "--format", "json")
        machines.node(k, tmp_path / "sites" / f"site-{k}.npz")
    run = tmp_path / "runs" / "app"
    first = subprocess.Popen([str(machines.flower / "flwr"), *machines.run()], cwd=tmp_path, env=machines.env)
    deadline = time.monotonic() + PATIENCE
    while not list((run / "checkpoints").glob("*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    superlink = machines.running[0]
    superlink.kill()
    superlink.wait()
    first.wait(PATIENCE)
    assert not (run / "summary.json").is_file()
    machines.superlink()
    out = machines.flwr(*machines.run())
    assert (run / "summary.json").is_file(), out[-3000:]
    assert differences(simulate(config_of(tmp_path / "app" / PACKAGE), tmp_path), run) == []


@pytest.mark.slow
@pytest.mark.alone
def test_flowers_simulation_engine_comes_to_the_simulators_bits(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten clients as nodes of `flwr run` without a SuperNode."""
    monkeypatch.chdir(tmp_path)
    words = [*SMALL.replace("clients 3", "clients 10").split(), "--method", "kapc", "--rehearse", "false"]
    assert main(["deploy", *words, "--out", "app", "--sites", "sites"]) == 0
    machines.simulation(10)
    out = machines.flwr(*machines.run())
    run = tmp_path / "runs" / "app"
    assert (run / "summary.json").is_file(), out[-3000:]
    assert differences(simulate(config_of(tmp_path / "app" / PACKAGE), tmp_path), run) == []
    own, out_file = str(tmp_path / "sites" / "site-7" / "app"), str(tmp_path / "seven.safetensors")
    assert main(["export", "--run", own, "--client", "7", "--out", out_file]) == 0

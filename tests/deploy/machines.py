"""A deployment on this machine: SuperLink and SuperNodes as processes on loopback, with TLS and a
key for each node."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from fl_lightning.cli import main

HERE = Path(__file__).parent
PATIENCE = 900
PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
CERTIFICATES = """
openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj "/CN=test CA" -keyout ca.key -out ca.crt \
  -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
openssl req -newkey rsa:2048 -nodes -subj "/CN=localhost" -keyout server.key -out server.csr
printf "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n" > ext.cnf
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile ext.cnf -out server.crt
"""
KEY = 'ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f'
SILENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}
"""Nothing calls home, and nothing is installed by a run."""


def environment(folder):
    """The folder of Flower's commands; FL_FLOWER names an environment that is there already, else
    one is made. It borrows all else from the environment of the tests."""
    python, listed = folder / "bin" / "python", str(HERE / "flower.txt")
    if there := os.environ.get("FL_FLOWER"):
        python = Path(there) / "bin" / "python"
    else:
        subprocess.run(["uv", "venv", "-q", str(folder), "--python", sys.executable], check=True)
        install = ["uv", "pip", "install", "-q", "--no-config", "--python", str(python)]
        subprocess.run([*install, "-r", listed], check=True)
    ours, theirs = (
        subprocess.check_output([path, "-c", PACKAGES], text=True).strip()
        for path in (sys.executable, python)
    )
    (Path(theirs) / "fl_lightning.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return python.parent


def free_port():
    """One that nobody listens at now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def of_home(home):
    """Process id and command line of all processes whose FLWR_HOME is `home`: Flower's, and the
    sites'."""
    mine = f"FLWR_HOME={home}\0".encode()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mine in (place / "environ").read_bytes():
                yield (
                    int(place.name),
                    (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(),
                )


def kill_all(home):
    """Kill what `of_home` names."""
    for pid, _ in of_home(home):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


class Machines:
    """Processes of one deployment in `folder`, all of which end with it."""

    def __init__(self, flower, folder):
        self.flower, self.folder, self.port = flower, folder, free_port()
        self.running = {}
        self.patience = "again=600"
        """Further words of the run's configuration."""
        beside = str(Path(sys.executable).parent)
        path = {"PATH": f"{flower}:{beside}:{os.environ['PATH']}"}
        self.env = {**os.environ, **SILENT, "FLWR_HOME": str(folder / "home"), **path}
        (folder / "home").mkdir()
        address = (
            f'[superlink.centre]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = '
            f'"{folder}/ca.crt"\n'
        )
        (folder / "home" / "config.toml").write_text(address)
        subprocess.run(["bash", "-ec", CERTIFICATES], cwd=folder, check=True, capture_output=True)

    def open(self, nodes, *words):
        """Write an app and the data of so many sites (no words: they are there), start the
        SuperLink and a SuperNode for each."""
        if words:
            command = ["deploy", *words, "--rehearse", "false", "--out", "app", "--sites", "sites"]
            assert main(command) == 0
        self.superlink()
        for k in range(nodes):
            subprocess.run(["bash", "-ec", f"{KEY} node{k}"], cwd=self.folder, check=True)
            registered = self.flwr(
                "supernode", "register", f"node{k}.pub", "centre", "--format", "json"
            )
            assert "node-id" in registered, registered
            self.node(k)

    def start(self, name, until, *words):
        """Start a command of Flower, and wait until its log says `until`; whether it does."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            process = self.command(out, *words)
        self.running[name] = process
        deadline = time.monotonic() + PATIENCE
        while (
            until not in log.read_text() and process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.2)
        return until in log.read_text()

    def command(self, out, *words):
        """A command of Flower, begun."""
        command = [str(self.flower / words[0]), *words[1:]]
        return subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=out, stderr=out)

    def flwr(self, *words):
        """What a command of `flwr` prints."""
        command = [str(self.flower / "flwr"), *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=PATIENCE
        )
        return done.stdout + done.stderr

    def run(self):
        """The words of `flwr` that start a run, or have it go on."""
        settings = f'out="{self.folder}/runs" sites="{self.folder}/sites"'
        public = self.folder / "sites" / "public.npz"
        settings += f' public="{public}"' if public.is_file() else ""
        settings += f" {self.patience}"
        return ["run", "app", "centre", "--stream", "-c", settings]

    def superlink(self):
        """Start it, or start it again."""
        words = f"--host 127.0.0.1 --port {self.port} --database state.db --enable-supernode-auth"
        keys = "--ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key"
        words = f"{words} {keys}".split()
        started = self.start("superlink", "Uvicorn running on", "flower-superlink", *words)
        assert started, (self.folder / "superlink.log").read_text()[-2000:]

    def node(self, client):
        """Start a SuperNode; one that was killed is refused for a while: it is started again, as a
        supervisor does."""
        name, port = f"node{client}", free_port()
        config = f'client={client} site="site-{client}" folder="{self.folder}/at-{client}"'
        config += f' data="{self.folder}/sites/site-{client}.npz"'
        words = f"--superlink 127.0.0.1:{self.port} --host 127.0.0.1 --port {port}"
        words += f" --root-certificates ca.crt --auth-supernode-private-key {name}"
        words += " --isolation process"  # a SuperExec has loaded fl_lightning
        command = ["flower-supernode", *words.split(), "--node-config", config]
        deadline = time.monotonic() + 240
        while not self.start(name, "SuperNode ID", *command):
            log = (self.folder / f"{name}.log").read_text()
            assert time.monotonic() < deadline, log[-2000:]
            time.sleep(5)
        words = f"-m fl_lightning.sites.superexec --insecure --runtime-api-address 127.0.0.1:{port}"
        words += f" --parent-pid {self.running[name].pid}"
        if before := self.running.get(f"executor{client}"):
            before.wait(60)
        with (self.folder / f"executor{client}.log").open("wb") as out:
            self.running[f"executor{client}"] = self.command(out, "python", *words.split())

    def processes(self):
        """Process id and command line of all that belong to it."""
        yield from of_home(self.folder / "home")

    def end(self):
        """End all processes."""
        for process in reversed(self.running.values()):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            process.kill()
            process.wait()
        kill_all(self.folder / "home")

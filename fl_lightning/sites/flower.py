"""Flower's ServerApp and ClientApp of a deployment.

Only this file and `superexec` import flwr. A message is one array of bytes, which Flower splits and
joins again.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fl_lightning.foundation.exits import guarded
from fl_lightning.sites import ends
from fl_lightning.sites.exchange import Reply

PAUSE = 0.2
"""Seconds between two calls of `pull`: a SuperNode fetches messages every 3 seconds."""
SLACK = 2**28
"""Bytes that other work of the process (threads, connections) may need while an answer is read. Our
choice."""


def server_app(app: Path) -> ServerApp:
    """Return the ServerApp of the app in the folder `app`; it prints an error as one line."""
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        settings = context.run_config
        transport = GridTransport(grid, str(settings["name"]))
        if code := guarded(lambda: ends.center(app, settings, transport)):
            raise RuntimeError(f"the run has ended with exit code {code}")

    return server


def client_app(app: Path) -> ClientApp:
    """Return the ClientApp of the app in the folder `app`."""
    client = ClientApp()

    # handles messages of every kind: all are sent as Flower's kind `train`
    @client.train()
    def answer(message: Message, context: Context) -> Message:
        node = node_of(context.node_config, context.run_config)
        run = str(message.content["about"]["run"])
        return Message(records(ends.answer(app, run, node, body_of(message))), reply_to=message)

    return client


def records(body: bytes) -> RecordDict:
    """Return the content of a Flower message that carries the bytes `body`."""
    return RecordDict({"body": ArrayRecord({"bytes": Array("uint8", (len(body),), "bytes", body)})})


def body_of(message: Message) -> bytes:
    """Return the bytes that `records` has put into a message."""
    return message.content["body"]["bytes"].data


def node_of(node: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's configuration: `client`, `data` (the client's data file), `folder` (for its
    state), and what else it has.

    In Flower's simulation engine a node's configuration has only a number K, `partition-id`. Then
    the node is client K, with the data file `site-K.*` and the folder `site-K`, both in the folder
    that the run config names as `sites`.

    Args:
        node: the node's configuration as Flower has it.
        run: the run config of `flwr run`.
    """
    if "client" in node or "partition-id" not in node or not run.get("sites"):
        return dict(node)
    client = int(node["partition-id"])
    folder = Path(str(run["sites"])) / f"site-{client}"
    files = [str(file) for file in folder.parent.glob(f"{folder.name}.*")]
    return {
        **node,
        "client": client,
        "data": "".join(files[:1]),
        "folder": str(folder),
    }


class GridTransport:
    """Sends messages through Flower's grid. `run`: name of the run's folder at the sites."""

    def __init__(self, grid: Grid, run: str) -> None:
        self.grid = grid
        self.run = run
        self.waiting: list[str] = []
        self.unsent: list[str] = []

    def addresses(self) -> list[int]:
        """Return the ids of the connected nodes."""
        return list(self.grid.get_node_ids())

    def push(self, address: int, message: bytes, ttl: float) -> str:
        """Send a message; return Flower's id of it, or a name of our own if sending failed."""
        content = records(message)
        content["about"] = ConfigRecord({"run": self.run})
        sent = Message(content, dst_node_id=address, message_type="train", ttl=ttl)
        try:
            [name] = self.grid.push_messages([sent])
        except Exception:  # a busy SuperLink may drop a part of the message
            name = f"unsent {time.monotonic_ns()}"
            self.unsent.append(name)
        else:
            self.waiting.append(name)
        return name

    def pull(self, most: int) -> list[tuple[str, Reply]]:
        """Return the replies that have arrived, each with the name of its message. The reply is
        None for a message that could not be sent. `most`: as in `Transport.pull`."""
        answers: list[tuple[str, Reply]] = [(name, None) for name in self.unsent]
        self.unsent = []
        size = 0
        for name in list(self.waiting):
            if size > most:
                break
            for reply in self._replies(name, most):
                self.waiting.remove(name)
                answers.append((name, reply))
                size += len(reply) if isinstance(reply, bytes) else 0
        return answers

    def _replies(self, name: str, most: int) -> list[Reply]:
        """Return the reply to one message in a list, empty if none has arrived. A reply is its
        bytes, or its length if that is more than `most`."""
        try:
            # Flower reads a whole answer into memory before its length can be checked
            with memory_for(4 * most):
                messages = list(self.grid.pull_messages([name]))
        except MemoryError:
            return [-1]
        except Exception:  # it may arrive later
            return []
        if not messages:
            return []
        if messages[0].has_error():
            return [None]
        try:
            body = body_of(messages[0])
        except Exception:  # a hostile site may have sent any records
            body = b""
        return [body if len(body) <= most else len(body)]

    def pause(self) -> None:
        """Sleep for `PAUSE` seconds."""
        time.sleep(PAUSE)


@contextlib.contextmanager
def memory_for(count: int) -> Iterator[None]:
    """Have `MemoryError` raised if this process allocates more than `count` + `SLACK` bytes within
    the block: an answer that is too large then ends no run. On Linux only."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    for line in lines:
        if line.startswith("VmData:"):
            used = 1024 * int(line.split()[1])
            resource.setrlimit(resource.RLIMIT_DATA, (min([used + count + SLACK, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

"""Flower's two ends: a ServerApp and a ClientApp that carry bytes, and nothing else.

The only file that imports flwr, and the only other that it imports is `relay`: `fl-train deploy`
copies both into the app's folder, so that an environment with flwr alone can run them. The
federation is computed by processes of `fl-train`'s own environment: one at the centre, which this
ServerApp starts and talks to through pipes, and one at each site, which the ClientApp finds at a
socket and starts where there is none. They stay from message to message; Flower makes a new process
for every message that a ClientApp gets.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from typing import IO, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fl_lightning.sites.relay import (
    COMMAND,
    HERE,
    answered,
    memory_for,
    node_of,
    python_of,
    read_frame,
    write_frame,
)

LAST_LINES = 5.0
"""Seconds for the last lines of a centre that has ended: a process that it has left behind may hold
the pipe."""
PLAIN = "bytes"
"""How the array is serialized, as Flower asks: not at all."""


def records(body: bytes) -> RecordDict:
    """Bytes as Flower carries them: an array in pieces, addressed by their content."""
    return RecordDict({"body": ArrayRecord({"bytes": Array("uint8", (len(body),), PLAIN, body)})})


def body_of(message: Message) -> bytes:
    """What `records` was given. Nothing is decoded: what the array says of its type and shape is
    not looked at."""
    return message.content["body"]["bytes"].data


# ---------------------------------------------------------------- the centre

server = ServerApp()


@server.main()
def center(grid: Grid, context: Context) -> None:
    """Start the centre's process, and carry its messages until it ends."""
    config = context.run_config
    command = [python_of(config), *COMMAND, "center", "--app", str(HERE)]
    for key in ("out", "name", "public", "gather", "visit", "again"):
        if config.get(key) not in (None, ""):
            command += [f"--{key}", str(config[key])]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    teller = threading.Thread(target=tell, args=(process.stderr,), daemon=True)
    teller.start()
    try:
        serve(grid, process.stdout, process.stdin)
    finally:
        process.stdin.close()  # the centre ends where it reads nothing more
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            code = process.wait()
        teller.join(LAST_LINES)
    if code:
        raise RuntimeError(f"the centre's process ended with exit code {code}")


def tell(lines: IO[bytes]) -> None:
    """Print what the centre prints (each round with its scores): of its ServerApp's prints Flower
    makes the stream."""
    for line in lines:
        print(line.decode(errors="replace").rstrip(), flush=True)


def serve(grid: Grid, source: IO[bytes], out: IO[bytes]) -> None:
    """Do what the centre asks for, frame by frame."""
    waiting: list[str] = []
    while True:
        try:
            wish, body = read_frame(source)
        except EOFError:
            return
        if wish["op"] == "addresses":
            write_frame(out, {"addresses": [str(node) for node in grid.get_node_ids()]})
        elif wish["op"] == "push":
            content = records(body)
            content["about"] = ConfigRecord({"run": wish["run"]})
            node, ttl = int(wish["address"]), float(wish["ttl"])
            message = Message(
                content, dst_node_id=node, message_type="train", group_id=wish["group"], ttl=ttl
            )
            names = list(grid.push_messages([message]))
            waiting += names
            write_frame(out, {"name": names[0] if names else ""})
        else:
            answers, body = pulled(grid, waiting, int(wish["most"]))
            write_frame(out, {"answers": answers}, body)


def pulled(grid: Grid, waiting: list[str], most: int) -> tuple[list[list[Any]], bytes]:
    """What has come, one answer at a time: of each the message's name, its length (None: an error;
    -1: it does not fit into memory) and whether it is among the bytes. What has come leaves
    `waiting`."""
    answers: list[list[Any]] = []
    bodies: list[bytes] = []
    for name in list(waiting):
        if sum(map(len, bodies)) > most:
            break  # the others at the next look: so many bytes lie here at once
        try:
            # Flower takes in a whole answer before anybody may look at its length
            with memory_for(4 * most):
                replies = list(grid.pull_messages([name]))
        except MemoryError:
            waiting.remove(name)
            answers.append([name, -1, False])
            continue
        for reply in replies:
            waiting.remove(name)
            try:
                content = None if reply.has_error() else body_of(reply)
            except Exception:  # whatever a hostile site has made of it
                content = b""
            taken = content is not None and len(content) <= most
            answers.append([name, None if content is None else len(content), taken])
            bodies.append(content if content is not None and taken else b"")
    return answers, b"".join(bodies)


# ---------------------------------------------------------------- a site

client = ClientApp()


@client.train()
def site(message: Message, context: Context) -> Message:
    """Carry one message to the site's process, and its answer back."""
    config = node_of(context.node_config, context.run_config)
    run = str(message.content["about"]["run"])
    answer = answered(body_of(message), run, config)
    return Message(records(answer), reply_to=message)

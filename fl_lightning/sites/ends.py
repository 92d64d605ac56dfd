"""The two processes of a deployment, which Flower's apps start: `python -m fl_lightning.sites.ends
center|site`."""

from __future__ import annotations

import json
import os
import socket
import sys
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fl_lightning.configuration.config import Config, Start, check
from fl_lightning.configuration.files import read_config
from fl_lightning.configuration.resolve import resolve
from fl_lightning.foundation.errors import BadInput, Damaged
from fl_lightning.foundation.exits import guarded
from fl_lightning.foundation.files import Taken, take, write_whole
from fl_lightning.results import opening as runs
from fl_lightning.results.opening import CENTER, SITE
from fl_lightning.sites.app import fingerprint
from fl_lightning.sites.relay import REFUSED, end_with, read_frame, write_frame

_ABOUT = {"client": int, "fingerprint": str, "data": str}
"""What `site.json` says, and of which types."""
IDLE = 3600.0
"""Seconds without a message after which a site's process ends; the next message starts it again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one end; the exit code is that of `fl-train`."""
    words = _parser().parse_args(argv)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed goes to the log: the pipe is for frames
    belongs_to = os.getppid() if words.end == "center" else words.keeper
    if belongs_to > 1:
        end_with(belongs_to)
    return guarded(lambda: _center(words, out) if words.end == "center" else _site(words))


def _parser() -> ArgumentParser:
    parser = ArgumentParser("fl_lightning.sites.ends", allow_abbrev=False)
    parser.add_argument("end", choices=("center", "site"))
    parser.add_argument("--app", type=Path, required=True)
    for name in ("out", "name", "public", "data", "socket", "folder", "site"):
        parser.add_argument(f"--{name}", default="")
    for name, default in (("gather", 600.0), ("visit", 3600.0), ("again", 90.0), ("idle", IDLE)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--client", type=int, default=-1)
    parser.add_argument("--keeper", type=int, default=0)
    return parser


def config_of(app: Path) -> Config:
    """The configuration of an app, or of a folder that one has made."""
    source = app / "source"
    if source.is_dir() and str(source) not in sys.path:
        sys.path.append(str(source))
    return resolve(read_config(str(app / "config.yaml")))


# ---------------------------------------------------------------- the centre


def _center(words: Namespace, out: BinaryIO) -> None:
    from fl_lightning.run import fit_on_rank, launch
    from fl_lightning.sites.center import federation_of
    from fl_lightning.sites.data import Facts
    from fl_lightning.sites.exchange import Exchange, Limits
    from fl_lightning.sites.pipes import PipeTransport

    config = config_of(words.app)
    mark = fingerprint(words.app, config)
    there = Path(words.out) / words.name
    start = Start(out=words.out, name=words.name, resume=(there / runs.CONFIG).exists())
    runs.check_name(start)
    if saved := runs.saved_layer(there):
        runs.check_goes_on(saved, config, there)
    facts = Facts.read(words.app / "facts.json")
    public = Path(words.public) if words.public else None
    with runs.opened(start, words.name, config) as folder:
        run_id = _run_id(folder, mark)
        transport = PipeTransport(sys.stdin.buffer, out, words.name)
        limits = Limits(words.gather, words.visit, words.again)
        exchange = Exchange(transport, run_id, mark, limits)
        put_together = partial(federation_of, exchange, facts, public)
        launch(config, fit_on_rank, folder, start.resume, put_together)
        _count(folder, exchange.bytes_sent, exchange.bytes_received)


def _run_id(folder: Path, mark: str) -> str:
    """The run's name for sites, drawn when it first begins: one that begins anew under an old name
    is another run."""
    file = folder / CENTER
    if file.is_file():
        return str(_kept(file, {"run": str})["run"])
    run_id = f"{mark[:16]}-{uuid.uuid4().hex[:16]}"
    write_whole(file, json.dumps({"run": run_id}))
    return run_id


def _count(folder: Path, sent: int, received: int) -> None:
    """Add the bytes of this process's messages to those of the run's processes before it."""
    known = _kept(folder / CENTER, {"run": str})
    sums = {
        "bytes_sent": known.get("bytes_sent", 0) + sent,
        "bytes_received": known.get("bytes_received", 0) + received,
    }
    write_whole(folder / CENTER, json.dumps(known | sums))


def _kept(file: Path, needed: Mapping[str, type]) -> dict[str, Any]:
    """What one of the two files says; `Damaged` where it cannot be read, or lacks a key."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict) or not all(
        isinstance(content.get(k), kind) for k, kind in needed.items()
    ):
        raise Damaged("run", str(file.parent), f"its {file.name} is damaged")
    return content


# ---------------------------------------------------------------- a site


def _site(words: Namespace) -> None:
    folder = Path(words.folder)
    try:
        lock = take(folder / "lock")
    except Taken:
        return  # another process is this site's
    try:
        with lock:
            _answer_all(words, folder)
    # the line stays: the relay of an earlier start may not have read it yet
    except BadInput as error:
        sentence = getattr(
            error, "sentence", "it cannot take part; see site.log in the site's folder"
        )
        write_whole(folder / REFUSED, sentence)
        raise


def _answer_all(words: Namespace, folder: Path) -> None:
    from fl_lightning.run import launch
    from fl_lightning.sites.data import Facts, Unfit, at_site

    config = config_of(words.app)
    mark = fingerprint(words.app, config)
    about = {"client": words.client, "fingerprint": mark, "data": str(Path(words.data).resolve())}
    known = _kept(folder / SITE, _ABOUT) if (folder / SITE).is_file() else about
    if (known["client"], known["fingerprint"]) != (words.client, mark):
        sentence = "its folder holds the state of another client, or of another configuration"
        raise Unfit("folder", str(folder), sentence, sentence)
    data = at_site(Facts.read(words.app / "facts.json"), config, words.client, Path(words.data))
    for name in ("config.yaml", "facts.json"):
        write_whole(folder / name, (words.app / name).read_bytes())
    for file in (words.app / "source").rglob("*.py"):
        write_whole(folder / file.relative_to(words.app), file.read_bytes())
    write_whole(folder / SITE, json.dumps(known | {"data": about["data"]}))

    def serve(fabric: Any, config: Config) -> dict[str, Any]:
        from fl_lightning.sites.site import Site

        site = Site(fabric, config, folder, data, words.client, mark, words.site)
        (folder / REFUSED).unlink(missing_ok=True)
        listen(Path(words.socket), site.answer, str(words.app), words.idle)
        return {}

    launch(config, serve)


def exported(folder: Path, client: int, out: Path) -> tuple[Config, dict[str, Any]]:
    """Write the model of the site whose folder it is to `out`; its configuration, and kind, round
    and arguments.

    Raises:
        BadInput: it is another client's, or its data or its state cannot be read.
    """
    from fl_lightning.run import launch
    from fl_lightning.sites.data import Facts, at_site

    known = _kept(folder / SITE, _ABOUT)
    check(
        "client", client, client == known["client"], f"it is the site of client {known['client']}"
    )
    config = config_of(folder)
    data = at_site(Facts.read(folder / "facts.json"), config, client, Path(known["data"]))

    def write(fabric: Any, config: Config) -> dict[str, Any]:
        from fl_lightning.sites.site import Site

        site = Site(fabric, config, folder, data, client, known["fingerprint"])
        check("run", str(folder), site.round > 0, "it holds no checkpoint yet")
        return site.export(out)

    return config, launch(config, write)


def listen(path: Path, answer: Callable[[bytes], bytes], app: str, idle: float) -> None:
    """Answer one message after the other, until none has come for `idle` seconds or one is of
    another app."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(16)
        server.settimeout(idle)
        try:
            while True:
                connection, _ = server.accept()
                with connection, connection.makefile("rwb") as file:
                    try:
                        about, message = read_frame(file)
                        if about.get("app") != app:
                            return
                        write_frame(file, {}, answer(message))
                    except (OSError, EOFError):
                        continue  # the other end has gone; the message comes again
        except TimeoutError:
            return
        finally:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())

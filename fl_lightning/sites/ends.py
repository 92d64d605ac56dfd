"""The two ends of a deployment: the centre's run, and a site's answer to a message."""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fl_lightning.configuration.config import Config, Start, check
from fl_lightning.configuration.files import read_config
from fl_lightning.configuration.resolve import resolve
from fl_lightning.exporting.calibration import Calibration
from fl_lightning.foundation.errors import Damaged
from fl_lightning.foundation.files import write_whole
from fl_lightning.results import opening as runs
from fl_lightning.results.opening import CENTER, SITE
from fl_lightning.run import fit_on_rank, launch
from fl_lightning.sites.app import fingerprint
from fl_lightning.sites.center import federation_of
from fl_lightning.sites.data import Facts, Unfit, at_site
from fl_lightning.sites.exchange import Exchange, Limits, Transport
from fl_lightning.sites.site import FAILED, Site, keep_traceback, unable

_ABOUT = {"client": int, "fingerprint": str, "data": str}
"""Keys of `site.json` and their types."""


def config_of(app: Path) -> Config:
    """The configuration of an app, or of a folder that one has made."""
    source = app / "source"
    if source.is_dir() and str(source) not in sys.path:
        sys.path.append(str(source))
    return resolve(read_config(str(app / "config.yaml")))


# ---------------------------------------------------------------- the centre


def center(app: Path, settings: Mapping[str, Any], transport: Transport) -> None:
    """Begin the run of `app`, or go on with it. `settings`: those of `flwr run`."""

    config = config_of(app)
    mark = fingerprint(app, config)
    out = str(settings["out"])
    name = str(settings["name"])
    there = Path(out) / name
    start = Start(out=out, name=name, resume=(there / runs.CONFIG).exists())
    runs.check_name(start)
    if saved := runs.saved_layer(there):
        runs.check_goes_on(saved, config, there)
    public = Path(str(settings["public"])) if settings.get("public") else None
    limits = {key: float(settings[key]) for key in ("gather", "visit", "again") if key in settings}
    with runs.opened(start, name, config) as folder:
        exchange = Exchange(transport, run_id(folder, mark), mark, Limits(**limits))
        put_together = partial(federation_of, exchange, Facts.read(app / "facts.json"), public)
        launch(config, fit_on_rank, folder, start.resume, put_together)
        count(folder, exchange.bytes_sent, exchange.bytes_received)


def run_id(folder: Path, mark: str) -> str:
    """The run's name for sites, drawn when it first begins: one that begins anew under an old name
    is another run."""
    file = folder / CENTER
    if file.is_file():
        return str(_kept(file, {"run": str})["run"])
    drawn = f"{mark[:16]}-{uuid.uuid4().hex[:16]}"
    write_whole(file, json.dumps({"run": drawn}))
    return drawn


def count(folder: Path, sent: int, received: int) -> None:
    """Add the bytes of this process's messages to those of the run's processes before it."""
    content = _kept(folder / CENTER, {"run": str})
    content["bytes_sent"] = content.get("bytes_sent", 0) + sent
    content["bytes_received"] = content.get("bytes_received", 0) + received
    write_whole(folder / CENTER, json.dumps(content))


def _kept(file: Path, needed: Mapping[str, type]) -> dict[str, Any]:
    """The content of one of the two files; `Damaged` if it cannot be read, or lacks a key."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), kind) for key, kind in needed.items()
    ):
        raise Damaged("run", str(file.parent), f"its {file.name} is damaged")
    return content


# ---------------------------------------------------------------- a site


def answer(app: Path, run: str, node: Mapping[str, Any], message: bytes) -> bytes:
    """The answer of a site to a message of `run`. `node`: the SuperNode's configuration."""
    name = str(node.get("site", ""))
    if Path(run).name != run or not {"client", "data", "folder"} <= node.keys():
        why = "its node config lacks client, data or folder"
        return unable(message, node.get("client"), name, why)
    client = int(node["client"])
    folder = Path(str(node["folder"])) / run
    data = str(Path(str(node["data"])).resolve())
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / "lock"):
        try:
            return _answer(app, folder, client, data, name, message)
        except Exception as error:
            keep_traceback(folder)
            why = error.allowed if isinstance(error, Unfit) else FAILED
            return unable(message, client, name, why)


def _answer(app: Path, folder: Path, client: int, data: str, name: str, message: bytes) -> bytes:
    """The answer of the site of `client` with its state in `folder`.

    Raises:
        BadInput: the folder is another site's, or the data cannot be read.
    """
    config = config_of(app)
    mark = fingerprint(app, config)
    about = {"client": client, "fingerprint": mark, "data": data}
    known = _kept(folder / SITE, _ABOUT) if (folder / SITE).is_file() else {}
    if known and (known["client"], known["fingerprint"]) != (client, mark):
        wrong = "its folder holds the state of another client, or of another configuration"
        raise Unfit("folder", str(folder), wrong)
    if known != about:
        texts = ["config.yaml", "facts.json"]
        texts += [path.relative_to(app).as_posix() for path in (app / "source").rglob("*.py")]
        for text in texts:
            write_whole(folder / text, (app / text).read_bytes())
        write_whole(folder / SITE, json.dumps(about))
    answer: bytes = _opened(folder, config, about, name, lambda site: site.answer(message))
    return answer


def _opened(
    folder: Path, config: Config, about: Mapping[str, Any], name: str, use: Callable[[Site], Any]
) -> Any:
    """The result of `use` for the site in `folder`. `about`: the content of its `site.json`."""
    client = about["client"]
    mark = about["fingerprint"]
    data = at_site(Facts.read(folder / "facts.json"), config, client, Path(about["data"]))

    def run(fabric: Any, config: Config) -> dict[str, Any]:
        return {"result": use(Site(fabric, config, folder, data, client, mark, name))}

    return launch(config, run)["result"]


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process answers a message in this folder: Flower may bring one twice."""
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def exported(
    folder: Path, client: int, out: Path, calibration: Calibration
) -> tuple[Config, dict[str, Any]]:
    """Write the model of the site whose folder it is to `out`; its configuration, and kind, round
    and arguments.

    Raises:
        BadInput: it is another client's, or its data or its state cannot be read.
    """
    known = _kept(folder / SITE, _ABOUT)
    sole = known["client"]
    check("client", client, client == sole, f"it is the site of client {sole}")

    def write(site: Site) -> dict[str, Any]:
        check("run", str(folder), site.round > 0, "it holds no checkpoint yet")
        return site.export(out, calibration)

    config = config_of(folder)
    return config, _opened(folder, config, known, "", write)

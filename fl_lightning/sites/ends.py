"""The entry points of a deployment's processes: `center` runs the federation, `answer` handles one
message at a site."""

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
from fl_lightning.exporting.calibration import CalibrationRule
from fl_lightning.foundation.errors import Damaged
from fl_lightning.foundation.files import write_whole
from fl_lightning.results import opening
from fl_lightning.results.opening import CENTER, SITE
from fl_lightning.run import fit_on_rank, launch
from fl_lightning.sites.app import fingerprint
from fl_lightning.sites.center import federation_of
from fl_lightning.sites.data import SiteFacts, Unfit, at_site
from fl_lightning.sites.exchange import Exchange, Limits, Transport
from fl_lightning.sites.site import FAILED, Site, failed_reply, keep_traceback

SITE_KEYS = {"client": int, "fingerprint": str, "data": str}
"""Keys of `site.json` and their types."""


def config_of(app: Path) -> Config:
    """Return the configuration of an app, or of a site's folder. If the folder has a subfolder
    `source`, append it to `sys.path`, so that the user's own code can be imported."""
    source = app / "source"
    if source.is_dir() and str(source) not in sys.path:
        sys.path.append(str(source))
    return resolve(read_config(str(app / "config.yaml")))


# ---------------------------------------------------------------- the centre


def center(
    app: Path,
    settings: Mapping[str, Any],
    transport: Transport,
) -> None:
    """Run the federation of `app` to its end, from the start or from its last checkpoint.

    Args:
        app: the app's folder.
        settings: the run config of `flwr run`.
        transport: sends messages to the sites and receives their answers.
    """
    config = config_of(app)
    app_fingerprint = fingerprint(app, config)
    out = str(settings["out"])
    name = str(settings["name"])
    run_folder = Path(out) / name
    begun = (run_folder / opening.CONFIG).exists()
    start = Start(out=out, name=name, resume=begun)
    opening.check_name(start)
    saved = opening.saved_settings(run_folder)
    if saved:
        opening.check_resumable(saved, config, run_folder)
    public = settings.get("public")
    public_file = Path(str(public)) if public else None
    limits = {key: float(settings[key]) for key in ("gather", "visit", "again") if key in settings}
    with opening.open_run_folder(start, name, config) as folder:
        exchange = Exchange(
            transport,
            run_id(folder, app_fingerprint),
            app_fingerprint,
            Limits(**limits),
        )
        facts = SiteFacts.read(app / "facts.json")
        put_together = partial(federation_of, exchange, facts, public_file)
        launch(config, fit_on_rank, folder, begun, put_together)
        add_bytes(folder, exchange.bytes_sent, exchange.bytes_received)


def run_id(folder: Path, app_fingerprint: str) -> str:
    """Return the run's id, by which sites distinguish a resumed run from a new one of the same
    name.

    Args:
        folder: the run folder. The id is drawn at the first start and kept in its `center.json`.
        app_fingerprint: fingerprint of the app; a newly drawn id begins with 16 of its characters.
    """
    file = folder / CENTER
    if file.is_file():
        return str(_read(file, {"run": str})["run"])
    drawn_id = f"{app_fingerprint[:16]}-{uuid.uuid4().hex[:16]}"
    write_whole(file, json.dumps({"run": drawn_id}))
    return drawn_id


def add_bytes(folder: Path, sent: int, received: int) -> None:
    """Add the bytes of this process's messages to the run's counts in `CENTER`."""
    file = folder / CENTER
    content = _read(file, {"run": str})
    for key, count in (("bytes_sent", sent), ("bytes_received", received)):
        content[key] = content.get(key, 0) + count
    write_whole(file, json.dumps(content))


def _read(file: Path, types: Mapping[str, type]) -> dict[str, Any]:
    """Return the content of `center.json` or `site.json`.

    Raises:
        Damaged: a key of `types` is missing, or its value has another type.
    """
    try:
        content = dict(json.loads(file.read_text(encoding="utf-8")))
        is_valid = all(isinstance(content[key], kind) for key, kind in types.items())
    except (ValueError, TypeError, KeyError):
        is_valid = False
    if not is_valid:
        raise Damaged("run", str(file.parent), f"its {file.name} is damaged")
    return content


# ---------------------------------------------------------------- a site


def answer(
    app: Path,
    run: str,
    node: Mapping[str, Any],
    message: bytes,
) -> bytes:
    """Return a site's answer to a message; errors become an answer that says why.

    Args:
        app: the app's folder.
        run: name of the run's folder at the site.
        node: the SuperNode's configuration.
        message: the bytes of the message.
    """
    name = str(node.get("site", ""))
    if Path(run).name != run or not {"client", "data", "folder"} <= node.keys():
        why = f"its node config lacks client, data or folder, or {run!r} is not a folder name"
        return failed_reply(message, node.get("client"), name, why)
    client = int(node["client"])
    folder = Path(str(node["folder"])) / run
    data = str(Path(str(node["data"])).resolve())
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        try:
            return _answer(app, folder, client, data, name, message)
        except Exception as error:
            keep_traceback(folder)
            why = error.requirement if isinstance(error, Unfit) else FAILED
            return failed_reply(message, client, name, why)


def _answer(
    app: Path,
    folder: Path,
    client: int,
    data: str,
    name: str,
    message: bytes,
) -> bytes:
    """Return the answer to a message at the site of `client`, whose state is in `folder`.

    Raises:
        BadInput: the folder is another site's, or the data cannot be read.
    """
    config = config_of(app)
    app_fingerprint = fingerprint(app, config)
    settings = {"client": client, "fingerprint": app_fingerprint, "data": data}
    file = folder / SITE
    stored = _read(file, SITE_KEYS) if file.is_file() else {}
    if stored and (stored["client"], stored["fingerprint"]) != (client, app_fingerprint):
        problem = (
            "its folder holds the state of another client, or of another configuration: give the "
            "node an empty folder"
        )
        raise Unfit("folder", str(folder), problem)
    if stored != settings:
        for path in (app / "config.yaml", app / "facts.json", *(app / "source").rglob("*.py")):
            write_whole(folder / path.relative_to(app), path.read_bytes())
        write_whole(file, json.dumps(settings))
    reply: bytes = _at_site(
        folder,
        config,
        settings,
        name,
        lambda site: site.answer(message),
    )
    return reply


def _at_site(
    folder: Path, config: Config, settings: Mapping[str, Any], name: str, use: Callable[[Site], Any]
) -> Any:
    """Make the site in `folder` and return the result of `use` for it. `settings`: the content of
    its `site.json`."""
    client = settings["client"]
    app_fingerprint = settings["fingerprint"]
    facts = SiteFacts.read(folder / "facts.json")
    data = at_site(facts, config, client, Path(settings["data"]))

    def run(fabric: Any, config: Config) -> dict[str, Any]:
        return {
            "result": use(
                Site(
                    fabric,
                    config,
                    folder,
                    data,
                    client,
                    app_fingerprint,
                    name,
                )
            )
        }

    return launch(config, run)["result"]


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold the lock, so that one process at a time answers a message in this folder: Flower may
    deliver a message twice."""
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def export_at_site(
    folder: Path,
    client: int,
    out: Path,
    calibration: CalibrationRule,
) -> tuple[Config, dict[str, Any]]:
    """Write the final model of the site in `folder` to `out`.

    Args:
        folder: the run's folder at the site.
        client: the site's client.
        out: the file.
        calibration: temperature and threshold to fit on the site's validation data.

    Returns:
        The site's configuration; kind, round and arguments of the model.

    Raises:
        BadInput: the folder is another client's, or its data or state cannot be read.
    """
    settings = _read(folder / SITE, SITE_KEYS)
    site_client = settings["client"]
    requirement = f"the folder is the site of client {site_client}: export that one"
    check("client", client, client == site_client, requirement)

    def write(site: Site) -> dict[str, Any]:
        requirement = "the site has no checkpoint yet: wait until the first round has ended"
        check("run", str(folder), site.round > 0, requirement)
        return site.export(out, calibration)

    config = config_of(folder)
    return config, _at_site(folder, config, settings, "", write)

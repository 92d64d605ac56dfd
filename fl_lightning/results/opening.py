"""The run folder OUT/NAME: which one, what may change when it is resumed, and its config.yaml."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from fl_lightning.configuration.config import Config, Start, check, flat
from fl_lightning.configuration.files import Layer, read_config
from fl_lightning.configuration.resolve import resolve, to_settings, to_yaml
from fl_lightning.foundation import launcher
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.files import (
    Taken,
    aside_of,
    flush,
    make_folder,
    take_lock,
    write_whole,
)
from fl_lightning.foundation.log import now, say
from fl_lightning.results import owncode

CONFIG = "config.yaml"
LOCK = "lock"
CENTER, SITE = "deployed.json", "site.json"
"""Files that say of a run folder that its clients are elsewhere, or that it is one site's."""

# What a resumed run may change: how long, where, and what is told of it. Anything else would make
# it another run.
MAY_CHANGE = (
    "federation.rounds",
    "federation.on_bad_client",
    "fabric.accelerator",
    "fabric.devices",
    "fabric.num_nodes",
    "fabric.threads",
    "fabric.timeout",
    "fabric.bank",
    "loggers",
    "callbacks.progress",
    "callbacks.heatmaps",
    "callbacks.checkpoint.seconds",
    "data.root",
    "data.public_root",
    "data.download",
    "data.resident",
)


def check_name(start: Start) -> None:
    """Raise `BadInput` for a name that is no folder name, for `resume` without one, for a run that
    exists already."""
    if start.name is None:
        check("resume", True, not start.resume, "it needs --name: which run to continue")
        return
    is_plain = start.name not in ("", ".", "..") and Path(start.name).name == start.name
    requirement = "it must be the name of a folder, without slashes; its parent is --out"
    check("name", start.name, is_plain, requirement)
    folder = Path(start.out) / start.name
    try:
        exists, is_run = folder.exists(), (folder / CONFIG).exists()
        # of a start that was stopped, or had a full disk
        begun = {LOCK, aside_of(folder / CONFIG).name}
        is_empty = not exists or {path.name for path in folder.iterdir()} <= begun
    except (OSError, ValueError) as error:
        raise BadInput("name", start.name, f"it can be no folder: {error}") from None
    if launcher.rank() > 0:
        return  # rank 0 may be making the folder right now
    lacks = f"it holds no {CONFIG}"
    way = "continue it with --resume" if is_run else f"{lacks}, so it is no run: remove it"
    requirement = f"{folder} exists; {way}, or choose another name"
    check("name", start.name, start.resume or not exists, requirement)
    requirement = f"{folder} is a folder of something else: {lacks}"
    check("name", start.name, is_empty or is_run, requirement)


def check_path(key: str, path: Path) -> None:
    """Raise `BadInput` for what can be no path: a name that is too long, a folder that nobody may
    look into."""
    try:
        path.exists()
    except (OSError, ValueError) as error:
        raise BadInput(key, str(path), f"it can be no folder: {error}") from None


def check_out(
    key: str,
    file: str,
    suffix: str = "",
    mark: str | None = None,
    kind: str = "",
) -> Path:
    """Returns the path of `file` if it can be written: its folder exists, the suffix fits, and it
    is new or begins with `mark`. `BadInput` otherwise; of a file without the mark, that it is no
    `kind`."""
    path = Path(file)
    check(key, file, path.parent.is_dir(), f"there is no folder {path.parent}")
    check(key, file, not suffix or path.suffix == suffix, f"it must end with {suffix}")
    if mark is not None and path.exists():
        is_marked = path.is_file() and mark.encode() in path.read_bytes()[:1000]
        requirement = f"it exists and is no {kind}, and is not written over"
        check(key, file, is_marked, requirement)
    return path


def check_first_start(start: Start, configured: bool) -> None:
    """Say that a run that was to be resumed is not there, and begins now.

    Raises:
        BadInput: no config says what it is (`configured` is False): more likely its name is wrong.
    """
    out = Path(start.out)
    if not start.resume or start.name is None or (out / start.name / CONFIG).exists():
        return
    if configured:
        line = f"resume: there is no run {start.name!r} in {out} yet: it starts now"
        if launcher.rank() == 0:
            print(line, file=sys.stderr)
        return
    runs = sorted(file.parent.name for file in out.glob(f"*/{CONFIG}"))
    near = difflib.get_close_matches(
        start.name,
        runs,
        n=5,
        cutoff=0.5,
    )
    listed = f"runs there: {', '.join(runs[:5]) or 'none'}"
    if near:
        listed = f"did you mean {' or '.join(near)}?"
    requirement = f"there is no such run in {out} to resume ({listed}); to start one, give --config"
    raise BadInput("name", start.name, requirement)


def check_no_key(config: Config) -> None:
    """Raise `BadInput` for a value that holds a W&B key: config.yaml would tell everyone."""
    secret = os.environ.get("WANDB_API_KEY")
    form = re.compile(r"\b([0-9a-f]{40}|wandb_v\d_\w{20,})\b")
    requirement = "it holds a W&B key, whose place is the environment: WANDB_API_KEY"
    for name, value in flat(to_settings(config)):
        is_at_wandb = name.startswith("loggers.wandb.") and form.search(str(value))
        if is_at_wandb or (secret and secret in str(value)):
            raise BadInput(_flag_of(name), "***", requirement)


@contextlib.contextmanager
def opened(
    start: Start,
    stem: str,
    config: Config,
) -> Iterator[Path]:
    """The run folder, with its config.yaml. Bad input that shows only within leaves the disk as it
    was: a new folder is removed, and a config.yaml is put back or removed, unless rounds have been
    trained."""
    if launcher.rank() > 0:
        yield make(start, stem)
        return
    out = Path(start.out)
    absent = [path for path in (out, *out.parents) if not path.exists()]
    is_new = start.name is None or not (out / start.name).exists()
    folder = make(start, stem)
    with locked(folder):
        before, done = _content(folder / CONFIG), _content(folder / "metrics.csv")
        write_config(folder, config)
        try:
            yield folder
        except BaseException as error:
            if _content(folder / "metrics.csv") != done:
                raise
            if before is not None:
                if _content(folder / CONFIG) != before:
                    # the run goes on from where it was, as it was
                    write_whole(folder / CONFIG, before)
            elif isinstance(error, BadInput) and is_new:
                shutil.rmtree(folder)
                with contextlib.suppress(OSError):  # another run may have come in
                    for path in absent:
                        path.rmdir()
            elif isinstance(error, BadInput):
                (folder / CONFIG).unlink()
            raise


@contextlib.contextmanager
def when_stopped(line: Callable[[], str]) -> Iterator[None]:
    """Say `line` where what is within is stopped (Ctrl-C, SIGTERM)."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and launcher.rank() == 0:
            say(line())
        raise


def goes_on(folder: Path, line: str | None) -> str:
    """Returns how the run in `folder`, which has been stopped, goes on: with `line`, or with the
    shortest that does it."""
    out = [] if folder.parent == Path("runs") else ["--out", str(folder.parent)]
    shortest = shlex.join(["fl-train", "fit", *out, "--name", folder.name, "--resume"])
    has_checkpoint = any((folder / "checkpoints").glob("manifest-*"))
    where = ""
    if (folder / "metrics.csv").is_file() and not has_checkpoint:
        where = " from its start, since it has no checkpoint yet,"
    return f"fl-train: stopped; it goes on{where} with: {line or shortest}"


def make(start: Start, stem: str) -> Path:
    """Makes the run folder on rank 0; elsewhere returns its path, which the launcher has named."""
    out = Path(start.out)
    if launcher.rank() > 0:
        return out / (start.name or stem)
    try:
        make_folder(out)
        if start.name is None:
            return _first_free(out, stem)
        folder = out / start.name
        folder.mkdir(exist_ok=start.resume)
        flush(out)
        return folder
    except OSError as error:
        raise BadInput("out", start.out, f"no run folder can be made in it: {error}") from None


def write_config(folder: Path, config: Config) -> None:
    """Write config.yaml, whole or not at all."""
    if launcher.rank() == 0:
        write_whole(folder / CONFIG, to_yaml(config))


def saved_of(start: Start) -> Layer | None:
    """Returns the settings of the run to resume; None where nothing is resumed, or the run does not
    exist yet."""
    return saved_layer(Path(start.out) / start.name) if start.resume and start.name else None


def saved_layer(folder: Path) -> Layer | None:
    """The settings in the config.yaml of a run folder; None if there is none."""
    check_path("run", folder / CONFIG)
    file = folder / CONFIG
    if not file.is_file():
        return None
    return read_config(str(file))[-1]  # it has no base: one layer


def config_of(folder: Path, layers: list[Layer] | None = None) -> Config:
    """Returns the resolved config of the run in `folder`, with `layers` over it.

    Raises:
        BadInput: there is no run, or its clients' models are at their sites.
    """
    saved = saved_layer(folder)
    if saved is None:
        raise BadInput("run", str(folder), f"there is no run: {CONFIG} is missing")
    way = f"fl-train export --run FOLDER/{folder.name} there"
    requirement = f"its clients' models and data are at their sites: {way}"
    check("run", str(folder), not (folder / CENTER).is_file(), requirement)
    return resolve([saved, *(layers or [])])


def check_goes_on(
    saved: Layer,
    config: Config,
    folder: Path,
    accept: bool = False,
) -> None:
    """Raise `BadInput` unless `config` may go on with the run in `folder`, whose config.yaml holds
    `saved`.

    `accept`: allows changed own code.
    """
    before = dict(flat(to_settings(resolve([saved]))))
    after = dict(flat(to_settings(config)))
    for key in dict.fromkeys([*before, *after]):
        free = any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)
        old, value = before.get(key), after.get(key)
        if not free and old != value:
            began = repr(old)
            if key not in after and key.startswith("callbacks."):  # the whole callback
                key, began = key.rpartition(".")[0], "it"
            requirement = f"the run began with {began}; go on with that, or start another run"
            remedy = "docs/reference.md lists what may change on resume"
            raise BadInput(_flag_of(key), value, f"{requirement} ({remedy})")
    # it imports numpy, which a mere check of the command line does not need
    from fl_lightning.results.folder import RunFolder

    rows = RunFolder(folder).read("metrics")
    done = max((int(row["round"]) for row in rows), default=0)
    rounds = config.federation.rounds
    check("federation.rounds", rounds, rounds >= done, f"the run has done {done} already")
    owncode.check_same(config, folder, accept)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of the folder.

    Raises:
        BadInput: one is in it, or the folder cannot be written.
    """
    file = folder / LOCK
    is_new = not file.exists()
    try:
        before = "" if is_new else file.read_text(encoding="utf-8")
        lock = take_lock(file)
    except Taken as error:
        requirement = f"a run is going on in {folder} ({error}); wait for it, or end it"
        raise BadInput("name", folder.name, requirement) from None
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            say(f"{folder}: no locks here ({error.strerror}); start no second run in it")
            yield
            return
        requirement = f"{folder} cannot be written ({error.strerror})"
        raise BadInput("out", str(folder.parent), requirement) from None
    if not os.access(folder, os.W_OK):
        lock.close()
        raise BadInput("out", str(folder.parent), f"{folder} cannot be written")
    refused = False
    try:
        yield
    except BadInput:
        refused = True
        if is_new and not (folder / "metrics.csv").exists():
            file.unlink(missing_ok=True)
        raise
    finally:
        with contextlib.suppress(OSError), lock:  # who ran here last, and that it has ended
            lock.truncate(0)
            line = f"process {os.getpid()} on {socket.gethostname()}, ended {now()}\n"
            lock.write(before if refused else line)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _first_free(out: Path, stem: str) -> Path:
    number = 1
    while True:
        folder = out / f"{stem}-{number:03d}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
        number += 1


def _flag_of(key: str) -> str:
    """The key as it is written on the command line."""
    head, _, rest = key.partition(".")
    if head in ("method", "model"):
        rest = rest.removeprefix("init_args.")
        return head if rest in ("name", "class_path") else f"{head}.{rest}"
    return key

"""The run folder OUT/NAME: its creation and lock, its config.yaml, and the changes that a resumed
run may make."""

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
"""Files that mark the folder of a deployment's server, and of one of its sites."""

# Keys that may change on resume: length, place and output. Any other would make another run.
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
    """Check the name of a run that is to start.

    Raises:
        BadInput: the name cannot be a folder's, a resumed run has no name, or a run with the name
            exists and is not resumed.
    """
    if start.name is None:
        check("resume", True, not start.resume, "it needs --name: which run to continue")
        return
    is_plain = start.name not in ("", ".", "..") and Path(start.name).name == start.name
    requirement = "it must be the name of a folder, without slashes: set its parent by --out"
    check("name", start.name, is_plain, requirement)
    folder = Path(start.out) / start.name
    try:
        exists, is_run = folder.exists(), (folder / CONFIG).exists()
        # files of a start that was stopped, or met a full disk
        files_of_a_start = {LOCK, aside_of(folder / CONFIG).name}
        is_empty = not exists or {path.name for path in folder.iterdir()} <= files_of_a_start
    except (OSError, ValueError) as error:
        raise BadInput("name", start.name, f"it cannot name a folder ({error})") from None
    if launcher.rank() > 0:
        return  # rank 0 may be making the folder right now
    lacks = f"it holds no {CONFIG}"
    remedy = "continue it with --resume" if is_run else f"{lacks}, so it is no run: remove it"
    requirement = f"{folder} exists; {remedy}, or choose another name"
    check("name", start.name, start.resume or not exists, requirement)
    requirement = f"{folder} is no run folder, since {lacks}: choose another name"
    check("name", start.name, is_empty or is_run, requirement)


def check_path(key: str, path: Path) -> None:
    """Raise `BadInput` if a path cannot be used: a name is too long, or a folder may not be
    read."""
    try:
        path.exists()
    except (OSError, ValueError) as error:
        raise BadInput(key, str(path), f"it cannot be opened ({error})") from None


def check_out(
    key: str,
    file: str,
    suffix: str = "",
    mark: str | None = None,
    kind: str = "",
) -> Path:
    """Return the path of an output file after checking that it can be written.

    Args:
        key: configuration key of the file, for errors.
        file: the path.
        suffix: suffix that the file must have; empty: any.
        mark: text in the first lines of files of this kind; other files are not overwritten. None:
            any file is.
        kind: name of the kind, for errors.

    Raises:
        BadInput: the folder does not exist, the suffix is another, or the file exists without the
            mark.
    """
    path = Path(file)
    check(key, file, path.parent.is_dir(), f"there is no folder {path.parent}: create it")
    check(key, file, not suffix or path.suffix == suffix, f"it must end with {suffix}")
    if mark is not None and path.exists():
        is_marked = path.is_file() and mark.encode() in path.read_bytes()[:1000]
        requirement = f"it exists and is no {kind}, so it is not overwritten: choose another name"
        check(key, file, is_marked, requirement)
    return path


def check_first_start(start: Start, configured: bool) -> None:
    """Print that a run starts now if it is to be resumed but does not exist yet.

    `configured`: whether the command gives a config to start it with.

    Raises:
        BadInput: the run does not exist and no config is given: its name is probably misspelled.
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
    """Raise `BadInput` for a value that holds a W&B key, which config.yaml would make public."""
    secret = os.environ.get("WANDB_API_KEY")
    form = re.compile(r"\b([0-9a-f]{40}|wandb_v\d_\w{20,})\b")
    requirement = "it holds a W&B key: remove it, and set WANDB_API_KEY in the environment"
    for name, value in flat(to_settings(config)):
        is_at_wandb = name.startswith("loggers.wandb.") and form.search(str(value))
        if is_at_wandb or (secret and secret in str(value)):
            raise BadInput(_flag_of(name), "***", requirement)


@contextlib.contextmanager
def open_run_folder(
    start: Start,
    stem: str,
    config: Config,
) -> Iterator[Path]:
    """Context manager that creates or reopens the run folder, locks it, writes config.yaml and
    yields the path.

    An error before the first round has been trained undoes this: an earlier config.yaml is
    restored, and after bad input a new folder is removed.

    Args:
        start: name and parent of the folder, and whether the run is resumed.
        stem: beginning of the folder's name if `start` has no name.
        config: content of config.yaml.
    """
    if launcher.rank() > 0:
        yield make_run_folder(start, stem)
        return
    out = Path(start.out)
    absent = [path for path in (out, *out.parents) if not path.exists()]
    is_new = start.name is None or not (out / start.name).exists()
    folder = make_run_folder(start, stem)
    with locked(folder):
        before, done = _bytes_of(folder / CONFIG), _bytes_of(folder / "metrics.csv")
        write_config(folder, config)
        try:
            yield folder
        except BaseException as error:
            if _bytes_of(folder / "metrics.csv") != done:
                raise
            if before is not None:
                if _bytes_of(folder / CONFIG) != before:
                    write_whole(folder / CONFIG, before)
            elif isinstance(error, BadInput) and is_new:
                shutil.rmtree(folder)
                with contextlib.suppress(OSError):  # another run may use the parent folders
                    for path in absent:
                        path.rmdir()
            elif isinstance(error, BadInput):
                (folder / CONFIG).unlink()
            raise


@contextlib.contextmanager
def say_when_stopped(line: Callable[[], str]) -> Iterator[None]:
    """Context manager that prints the text of `line` if its body is stopped (Ctrl-C, SIGTERM)."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and launcher.rank() == 0:
            say(line())
        raise


def resume_line(folder: Path, command: str | None) -> str:
    """Return the line that tells how to resume the run in `folder`, which has been stopped.

    `command`: the command that resumes it; None: the shortest one is found.
    """
    out = [] if folder.parent == Path("runs") else ["--out", str(folder.parent)]
    shortest = shlex.join(["fl-train", "fit", *out, "--name", folder.name, "--resume"])
    has_checkpoint = any((folder / "checkpoints").glob("manifest-*"))
    where = ""
    if (folder / "metrics.csv").is_file() and not has_checkpoint:
        where = " from its start, since it has no checkpoint yet,"
    return f"fl-train: stopped; it goes on{where} with: {command or shortest}"


def make_run_folder(start: Start, stem: str) -> Path:
    """Create the run folder, on rank 0, and return its path; other ranks only return the path.

    `stem`: the name if `start` has none. Rank 0 appends a number to it; other ranks get the
    complete name from the launcher.
    """
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
        raise BadInput("out", start.out, f"no run folder can be created in it: {error}") from None


def write_config(folder: Path, config: Config) -> None:
    """Write config.yaml, on rank 0, whole or not at all."""
    if launcher.rank() == 0:
        write_whole(folder / CONFIG, to_yaml(config))


def settings_to_resume(start: Start) -> Layer | None:
    """Return the settings of the run to be resumed; None if no run is resumed, or it does not exist
    yet."""
    return saved_settings(Path(start.out) / start.name) if start.resume and start.name else None


def saved_settings(folder: Path) -> Layer | None:
    """Return the settings in a run folder's config.yaml, as a layer that others may be merged over;
    None without the file."""
    check_path("run", folder / CONFIG)
    file = folder / CONFIG
    if not file.is_file():
        return None
    return read_config(str(file))[-1]  # it has no base: one layer


def config_of(folder: Path, layers: list[Layer] | None = None) -> Config:
    """Return the resolved config of the run in `folder`; `layers` of settings override the saved
    ones.

    Raises:
        BadInput: there is no run, or it is a deployment, whose models are at its sites.
    """
    saved = saved_settings(folder)
    if saved is None:
        raise BadInput("run", str(folder), f"there is no run: {CONFIG} is missing")
    command = f"fl-train export --run FOLDER/{folder.name}"
    requirement = f"its clients' models and data are at their sites: run {command} there"
    check("run", str(folder), not (folder / CENTER).is_file(), requirement)
    return resolve([saved, *(layers or [])])


def check_resumable(
    saved: Layer,
    config: Config,
    folder: Path,
    accept_changed_code: bool = False,
) -> None:
    """Raise `BadInput` unless the run in `folder` may be resumed with `config`.

    It may differ in the keys `MAY_CHANGE` only, and must ask for at least the rounds that are done.

    Args:
        saved: settings in the folder's config.yaml.
        config: the new config.
        folder: the run folder.
        accept_changed_code: whether the user's own code may have changed.
    """
    before = dict(flat(to_settings(resolve([saved]))))
    after = dict(flat(to_settings(config)))
    for key in dict.fromkeys([*before, *after]):
        may_change = any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)
        old, value = before.get(key), after.get(key)
        if not may_change and old != value:
            began = repr(old)
            if key not in after and key.startswith("callbacks."):  # the whole callback
                key, began = key.rpartition(".")[0], "it"
            remedy = "keep that, or start another run (docs/reference.md lists what may change)"
            raise BadInput(_flag_of(key), value, f"the run began with {began}: {remedy}")
    # imported here, since a check of the command line does not need numpy
    from fl_lightning.results.folder import RunFolder

    rows = RunFolder(folder).read("metrics")
    done = max((int(row["round"]) for row in rows), default=0)
    rounds = config.federation.rounds
    check(
        "federation.rounds",
        rounds,
        rounds >= done,
        f"the run has done {done} already: ask for as many",
    )
    owncode.check_same(config, folder, accept_changed_code)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager that keeps other runs out of the folder.

    Raises:
        BadInput: another run uses the folder, or it cannot be written.
    """
    file = folder / LOCK
    is_new = not file.exists()
    try:
        before = "" if is_new else file.read_text(encoding="utf-8")
        lock = take_lock(file)
    except Taken as error:
        requirement = f"another run uses {folder} ({error}): wait for it, or end it"
        raise BadInput("name", folder.name, requirement) from None
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            say(f"{folder}: it cannot be locked ({error.strerror}); start no second run in it")
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
        with contextlib.suppress(OSError), lock:  # the file tells which run used it last
            lock.truncate(0)
            line = f"process {os.getpid()} on {socket.gethostname()}, ended {now()}\n"
            lock.write(before if refused else line)


def _bytes_of(path: Path) -> bytes | None:
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
    """Return the key as it is written on the command line."""
    head, _, rest = key.partition(".")
    if head in ("method", "model"):
        rest = rest.removeprefix("init_args.")
        return head if rest in ("name", "class_path") else f"{head}.{rest}"
    return key

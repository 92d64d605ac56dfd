"""Whether W&B's server can be reached, and whose variables the environment holds: decided before a
run begins, and never by asking for a key."""

import contextlib
import os
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

Mode = Literal["online", "offline", "disabled"]
SWEEP = ("WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH")
"""What `wandb agent` sets for the run that it starts."""
OF_ONE_RUN = (
    *SWEEP,
    "WANDB_RESUME",
    "WANDB_RESUME_FROM",
    "WANDB_FORK_FROM",
    "WANDB_NAME",
    "WANDB_RUN_NAME",
    "WANDB_RUN_STORAGE_ID",
    "WANDB_RUN_DIR",
    "WANDB_DIR",
    "WANDB_ROOT_DIR",
    "WANDB_X_FILES_DIR",
    "WANDB__FILES_DIR",
    "WANDB_X_SYNC_DIR_SUFFIX",
    "WANDB__SYNC_DIR_SUFFIX",
    "WANDB_X_LABEL",
    "WANDB__LABEL",
)
"""Variables that say which run this is, or where its files lie. Of another job they would make two
runs one. All others (WANDB_API_KEY, WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, WANDB_BASE_URL,
WANDB_TAGS, ...) are the user's."""
_PATIENCE = 3.0  # seconds to wait for a sign of life of the W&B server


def id_of_agent() -> str | None:
    """The id that `wandb agent` has given to this process's run; None: no agent has started it.

    The variables alone prove nothing: beside them the agent writes the run's parameters into a file
    of this name.
    """
    sweep, run_id, file = (os.environ.get(name, "") for name in SWEEP)
    by_agent = Path(file).name == f"config-{run_id}.yaml" and Path(file).is_file()
    return run_id if sweep and run_id and by_agent else None


def forget_other_runs(keep: tuple[str, ...] = ()) -> list[str]:
    """Take the variables of `OF_ONE_RUN` but for `keep` out of this process's environment, before
    W&B reads it.

    Returns:
        Their names.
    """
    names = [name for name in OF_ONE_RUN if name in os.environ and name not in keep]
    for name in names:
        del os.environ[name]
    return names


def possible_mode() -> tuple[Mode, str]:
    """What `auto` comes to (online, offline or disabled), and why it is not online. Never asks for
    a key."""
    import wandb

    try:
        settings = wandb.setup(wandb.Settings(silent=True)).settings
        if settings.mode in ("disabled", "offline", "dryrun"):
            reason = f"W&B is set to {settings.mode}"
            return "disabled" if settings.mode == "disabled" else "offline", reason
        if not wandb.login(prompt=False, verify=False):
            return "offline", "no API key is known (set WANDB_API_KEY, or run: wandb login)"
    except Exception as error:
        return "offline", f"the W&B settings or the API key cannot be used ({type(error).__name__})"
    host, port = address(settings.base_url)
    if not answers(host, port):
        return "offline", f"{host} does not answer"
    return "online", ""


def address(url: str) -> tuple[str, int]:
    """Host and port that a request for `url` goes to: the proxy's, where there is one."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)


def answers(host: str, port: int) -> bool:
    """Whether something listens there. A thread, since looking a name up heeds no time limit."""
    answered = threading.Event()

    def knock() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), _PATIENCE).close()
            answered.set()

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return answered.is_set()


def let_go(exit_code: int = 1) -> None:
    """Part with W&B's helper, or where it is gone W&B prints a traceback at the end; and with W&B's
    settings."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown(exit_code=exit_code)

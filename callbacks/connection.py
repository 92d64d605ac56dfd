"""The connection to W&B, decided before a run begins and never by asking for a key: whether its
server can be reached, and which variables of the environment belong to other runs."""

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
"""Variables that `wandb agent` sets for the run that it starts."""
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
"""Variables that name a run or its files. Inherited from another job, they would merge two runs
into one. All others (WANDB_API_KEY, WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, WANDB_BASE_URL,
WANDB_TAGS, ...) are the user's."""
_PATIENCE = 3.0  # seconds to wait for W&B's server


def id_of_agent() -> str | None:
    """Return the run id that `wandb agent` has given to this process; None: no agent has started
    it.

    The variables may be inherited and prove nothing alone: the agent also writes the run's
    parameters into a file `config-ID.yaml`.
    """
    sweep, run_id, file = (os.environ.get(name, "") for name in SWEEP)
    by_agent = Path(file).name == f"config-{run_id}.yaml" and Path(file).is_file()
    return run_id if sweep and run_id and by_agent else None


def forget_other_runs(keep: tuple[str, ...] = ()) -> list[str]:
    """Remove the environment variables that name a single run or its files (`OF_ONE_RUN`), except
    those in `keep`, before W&B reads them; return the names of those removed."""
    names = [name for name in OF_ONE_RUN if name in os.environ and name not in keep]
    for name in names:
        del os.environ[name]
    return names


def possible_mode() -> tuple[Mode, str]:
    """Return the mode that `auto` means here (online, offline or disabled), and the reason if it is
    not online. Never asks for a key."""
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
    if not is_reachable(host, port):
        return "offline", f"{host} does not answer"
    return "online", ""


def address(url: str) -> tuple[str, int]:
    """Return host and port to which a request for `url` connects: those of the proxy, if there is
    one."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)


def is_reachable(host: str, port: int) -> bool:
    """Return whether a TCP connection to `host` opens within `_PATIENCE` seconds. It runs in a
    thread, since looking up a name has no time limit."""
    answered = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), _PATIENCE).close()
            answered.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return answered.is_set()


def tear_down(exit_code: int = 1) -> None:
    """Shut down W&B's service process and forget W&B's settings.

    If the service is gone, W&B would otherwise print a traceback at exit; and this process's next
    run would reuse the settings. `exit_code`: reported to the service.
    """
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown(exit_code=exit_code)

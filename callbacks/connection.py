"""Whether W&B's server can be reached: decided before a run begins, and never by asking for a key."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from typing import Literal
from urllib.parse import urlsplit

Mode = Literal["online", "offline", "disabled"]
_PATIENCE = 3.0  # seconds to wait for a sign of life of the W&B server


def possible_mode() -> tuple[Mode, str]:
    """What `auto` comes to (online, offline or disabled), and why it is not online. Never asks for a key."""
    import wandb

    try:
        settings = wandb.setup(wandb.Settings(silent=True)).settings
        if settings.mode in ("disabled", "offline", "dryrun"):
            return "disabled" if settings.mode == "disabled" else "offline", f"W&B is set to {settings.mode}"
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
        try:
            socket.create_connection((host, port), _PATIENCE).close()
            answered.set()
        except OSError:
            pass

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return answered.is_set()


def let_go() -> None:
    """Part with a helper of W&B's that is gone, or W&B prints a traceback when the process ends."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown(exit_code=1)

"""The centre's end of the pipes to Flower's ServerApp."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from fl_lightning.foundation.errors import MachineFailed
from fl_lightning.sites.exchange import Come
from fl_lightning.sites.relay import read_frame, write_frame

PAUSE = 0.2
"""Seconds between two looks for answers: a site's process takes longer than that for any
message."""


class PipeTransport:
    """Asks the ServerApp for what Flower does. `run` names the run's folder at the sites."""

    def __init__(self, source: BinaryIO, out: BinaryIO, run: str) -> None:
        self.source, self.out, self.run = source, out, run

    def addresses(self) -> list[int]:
        """Ids of the nodes that are connected."""
        return [int(node) for node in self._asks({"op": "addresses"})[0]["addresses"]]

    def push(self, address: int, message: bytes, ttl: float) -> str:
        """Flower's id of the message."""
        wish = {"op": "push", "address": str(address), "ttl": ttl, "run": self.run, "group": ""}
        return str(self._asks(wish, message)[0]["name"])

    def pull(self, most: int) -> list[tuple[str, Come]]:
        """What has been answered; None: Flower knows that the node is gone, or that its app has
        failed."""
        about, body = self._asks({"op": "pull", "most": most})
        answers: list[tuple[str, Come]] = []
        start = 0
        for name, size, taken in about["answers"]:
            answers.append((name, body[start : start + size] if taken else size))
            start += size if taken else 0
        return answers

    def pause(self) -> None:
        """Wait a moment."""
        time.sleep(PAUSE)

    def _asks(self, wish: Mapping[str, Any], body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        try:
            write_frame(self.out, dict(wish), body)
            return read_frame(self.source)
        except (EOFError, BrokenPipeError):
            raise MachineFailed(
                "Flower's ServerApp has ended; the same flwr run goes on from here"
            ) from None

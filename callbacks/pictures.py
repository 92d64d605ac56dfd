"""What observers that draw have in common: pictures are drawn in another process, and none is lost at the end."""

from __future__ import annotations

import sys
import time
from abc import ABC
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from fl_lightning import log
from fl_lightning.callbacks.base import Observer
from fl_lightning.core import Run
from fl_lightning.drawing.process import draw
from fl_lightning.record import PATIENCE, Picture

_BROKEN_OFF = 5.0


def patience() -> float:
    """Seconds to wait for pictures: few where an error or Ctrl-C is ending the run, since a resumed one draws them."""
    return PATIENCE if sys.exc_info()[0] is None else _BROKEN_OFF


class Pictures(Observer, ABC):
    """Has pictures drawn beside the training. A run whose pictures cannot be drawn says so, and goes on."""

    def __init__(self) -> None:
        self._drawn: list[Picture] = []

    def have_drawn(
        self, section: str, function: Callable[..., dict[str, np.ndarray]], *args: object,
        files: Mapping[str, Path | None],
    ) -> dict[str, Picture]:  # fmt: skip
        """Pictures `section/NAME` for each of `files`, which `function(*args)` will have drawn."""
        self._tell()
        made = draw(function, *args, files=files)
        self._drawn += list(made.values())[:1]  # those of a call are drawn together
        return {f"{section}/{name}": picture for name, picture in made.items()}

    def on_close(self, run: Run) -> None:
        """Wait for what is not drawn yet."""
        self.finish()

    def finish(self) -> None:
        """Wait until all is drawn, and say what is not."""
        end = time.monotonic() + patience()
        for picture in self._drawn:
            picture.wait(end - time.monotonic())
        self._tell(last=True)

    def _tell(self, last: bool = False) -> None:
        """Say what was not drawn, and forget what was."""
        ended = [picture for picture in self._drawn if picture.ready or last]
        self._drawn = [picture for picture in self._drawn if picture not in ended]
        for reason in sorted({reason for picture in ended if (reason := picture.failure)}):
            log.say(f"pictures: some are not drawn: {reason}")

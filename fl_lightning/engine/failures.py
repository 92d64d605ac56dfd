"""Clients that fail: who, in which round, at which stage, and whether the run goes on."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from fl_lightning.core.run import RunContext
from fl_lightning.engine.record import ClientResult, numbers
from fl_lightning.foundation.device import lost
from fl_lightning.foundation.errors import BadClient, BadInput, MachineFailed, RunFailed, redact
from fl_lightning.foundation.files import writing

_CHECKS = (
    ("train_loss", "training", "its loss"),
    ("model_norm", "training", "its model"),
    ("kept_norm", "training", "what else it keeps"),
    ("upload_norm", "upload", "its upload"),
)


class Staged(Protocol):
    """Work that says what it is at."""

    stage: str


class Visited(Staged, Protocol):
    """A visit: the round, the client, and how it failed."""

    t: int
    id: int
    failure: BadClient | None


class Guard:
    """Names the client, the round and the stage of whatever a client's model, data or hooks
    raise."""

    def __init__(self, run: RunContext) -> None:
        self.run = run

    @contextlib.contextmanager
    def catch(self, visit: Visited) -> Iterator[None]:
        """As `naming`; where failing clients are tolerated, the failure is left with the
        `visit`."""
        try:
            with self.naming(visit.t, visit.id, visit):
                yield
        except BadClient as failure:
            if not self.run.tolerant:
                raise
            visit.failure = failure.bare()  # a traceback would keep what the visit had made

    @contextlib.contextmanager
    def naming(self, t: int, client: int, at: Staged) -> Iterator[None]:
        """Whatever is raised within names the client, the round and the stage that `at.stage` says.

        Raises:
            BadClient: the client failed; `failure.txt` in the run folder has the traceback added to
                it.
        """
        try:
            yield
        except (BadInput, RunFailed):
            raise
        except Exception as error:
            called = self.run.data.called(client)
            if why := lost(self.run.device):
                what = (
                    f"the device {self.run.device} failed in round {t}, {called}, stage "
                    f"{at.stage}: {redact(why)}"
                )
                raise MachineFailed(f"{what}; the run can be continued with --resume") from error
            note = self.run.folder / "failure.txt"
            with writing(note), note.open("a", encoding="utf-8") as file:
                file.write(
                    f"{called}, round {t}, stage {at.stage}\n{redact(traceback.format_exc())}\n"
                )
            reason = redact(f"{type(error).__name__}: {error}".splitlines()[0])
            raise BadClient(
                client, t, at.stage, f"{reason} (traceback in failure.txt)", called
            ) from error

    def check_finite(self, t: int, results: Sequence[ClientResult]) -> None:
        """Raise `BadClient` for the first client whose loss, model, further vectors, memory or
        upload is not finite."""
        numbers([values for r in results for values in (r.values, r.norms)])
        for result in results:
            infinite = [stage_of for name, *stage_of in _CHECKS if not _is_finite(result, name)]
            told = [x for x in result.statistics.values() if x.is_floating_point()]
            if not all(bool(x.isfinite().all()) for x in told):
                infinite.append(["upload", "what it tells"])
            if infinite:
                stage, what = infinite[0]
                raise _not_finite(self.run, t, result.client, stage, what)


def _is_finite(result: ClientResult, name: str) -> bool:
    return math.isfinite((result.values | result.norms).get(name, 0.0))


def finite(run: RunContext, t: int, client: int, model: Tensor, what: str) -> Tensor:
    """The `model` (D,) that a client has trained; `BadClient`: it is not finite, and its scores
    would mean nothing."""
    if not bool(model.isfinite().all()):
        raise _not_finite(run, t, client, "training", what)
    return model


def _not_finite(run: RunContext, t: int, client: int, stage: str, what: str) -> BadClient:
    reason = f"{what} is not finite; lower optimizer.lr"
    return BadClient(client, t, stage, reason, run.data.called(client))

"""Base classes of callbacks: transforms change messages, observers read each round's record, and
aggregators make one model of a round's uploads. Relations are in `relations`.

State that must survive a round is declared as named tensors of the client or the server: these
move between ranks, are saved and are resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.configuration.config import check
from fl_lightning.configuration.ranges import check_ranges
from fl_lightning.core import (
    Client,
    Payload,
    Phase,
    RelationInputs,
    RoundRecord,
    RunContext,
    Tensors,
)
from fl_lightning.core.mixing import mean_of
from fl_lightning.core.server import GroupServer, Server
from fl_lightning.foundation import log
from fl_lightning.privacy.steps import Private

STAGES = ("observe", "draw", "show", "write", "log", "save", "send")
"""Hooks of all callbacks of one stage run before those of the next."""


def in_order(callbacks: Iterable[Callback], loggers: Iterable[Callback] = ()) -> list[Callback]:
    """Return callbacks by stage, within a stage as given; `loggers` come at stage `log` at the
    earliest."""
    log_stage = STAGES.index("log")
    placed = [(STAGES.index(callback.stage), callback) for callback in callbacks]
    placed += [(max(STAGES.index(logger.stage), log_stage), logger) for logger in loggers]
    placed.sort(key=lambda place: place[0])
    return [callback for _, callback in placed]


internal = partial(field, init=False, repr=False)
"""A dataclass field that is no argument of the callback: it holds a value while a run goes on."""


class Callback:
    """Base of all callbacks.

    Raises:
        TypeError: a subclass defines a hook that the engine never calls for its kind.
    """

    stage: ClassVar[Literal["observe", "draw", "show", "write", "log", "save", "send"]] = "observe"
    """When its hooks run: it observes and adds metrics; draws; shows progress; writes tables; logs;
    saves the run; sends what is saved (after a crash it catches up from the run folder)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__name__
        if cls.stage not in STAGES:
            stages = ", ".join(STAGES)
            raise TypeError(f"{name}.stage is {cls.stage!r}, which is not one of {stages}")
        if cls.__module__ == __name__:
            return
        is_kind = Callback in cls.__bases__  # a new kind may define hooks that give tensors
        for hook in vars(cls):
            gives_tensors = hook in ("init_client", "init_server") and not is_kind
            exists = any(hasattr(base, hook) for base in cls.__bases__)
            if (hook.startswith("on_") or gives_tensors) and not exists:
                bases = ", ".join(base.__name__ for base in cls.__bases__)
                raise TypeError(f"{name}.{hook} would never be called: {bases} has no such hook")

    def __post_init__(self) -> None:
        """Raise `BadInput` for an argument of a dataclass that its type does not allow
        (`ranges`)."""
        check_ranges(self, self.config_key)

    @property
    def config_key(self) -> str:
        """Its key in a configuration, for messages."""
        return f"callbacks.{type(self).__name__.lower()}"

    def on_fit_start(self, run: RunContext) -> None:
        """Everything is set up, on every rank (`run.resumed_from`: the last finished round). Raise
        `BadInput` here."""


class Transform(Callback):
    """Changes messages between clients and server: quantises, leaves layers out, adds noise.

    Transforms run in the configuration's order, on the client's home rank. A class that changes a
    payload's `vector` or `sent` must declare it: storage depends on it, and an undeclared change
    is an error.
    """

    changes_download = False
    """Whether `on_download` may put another `vector` into a payload, or change what is `sent`."""
    changes_upload = False
    """Whether `on_upload` may: then the server's copy of a client is no longer the client's own
    model."""
    client_memory = False
    """Whether `init_client` gives anything."""
    further_vectors = False
    """Whether what it changes includes `payload.vectors`; else it is refused beside a method that
    exchanges any."""
    deployed = False
    """Whether it works with `fl-train deploy`: the centre runs `on_download`, and the site
    `on_upload`, which reads nothing of the server. Its client memory travels to the centre in the
    clear."""

    def on_fit_start(self, run: RunContext) -> None:
        """Print a line where it has no effect: it changes models alone, and the method sends none,
        but class means or predictions."""
        alone = (self.changes_upload or self.changes_download) and not self.further_vectors
        sends = any(group.up_mask.any() or group.down_mask.any() for group in run.groups)
        if alone and run.is_main and not sends:
            problem = f"it changes models on their way, and {run.method_name} sends none"
            log.say(f"{self.config_key}: {problem}")

    def init_client(self, run: RunContext) -> Tensors:
        """Tensors (on the CPU) that every client keeps in its memory for this transform, with their
        first values."""
        return {}

    def on_download(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """`payload` is about to reach `client`. To change its numbers, give it a new `vector`
        (`changes_download`)."""

    def on_phase(
        self,
        client: Client,
        phase: Phase,
    ) -> Private | None:
        """`client` is about to train `phase`; returns how its steps are protected (None: they are
        not)."""
        return None

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """`payload` is about to leave `client`. To change its numbers, give it a new `vector`
        (`changes_upload`)."""


class Observer(Callback):
    """Reads the record and adds metrics and pictures. Hooks run on every rank (rank 0 is
    `run.is_main`), but for `on_client_end`."""

    def on_round_start(
        self,
        run: RunContext,
        round: int,
        cohort: list[int],
    ) -> None:
        """The cohort is drawn; nothing has been sent."""

    def on_client_end(
        self,
        run: RunContext,
        client: int,
    ) -> None:
        """`client` has uploaded in this round (home rank only)."""

    def on_aggregate(
        self,
        run: RunContext,
        server: Server,
    ) -> None:
        """The method has aggregated what clients of the round have uploaded; what is added to
        `server.metrics` becomes part of the record."""

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """The round is complete and scored."""

    def summarize(self, run: RunContext) -> Mapping[str, Any]:
        """Return entries of `summary.json` after the last round; rank 0's are kept.

        A key that two parts of a run give ends the run with an error.
        """
        return {}

    def on_fit_end(
        self,
        run: RunContext,
        summary: Mapping[str, Any],
    ) -> None:
        """The last round is over; `summary` is the content of `summary.json`."""

    def on_close(self, run: RunContext) -> None:
        """Runs last, also after an error: close files and bars."""


class Aggregator(Callback):
    """Combines a round's uploads into the global model; here the mean by the relation's weights.

    A run has one aggregator at most, and only with a method whose relation is global.
    """

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` where there is no global model, or another aggregator."""
        requirement = "it needs a method whose relation is a global model's, as fedavg's is"
        check(self.config_key, run.method_name, run.relation.is_global, requirement)
        first = next(c for c in run.callbacks if isinstance(c, Aggregator))
        requirement = f"one way to aggregate, and {type(first).__name__.lower()} is one already"
        check(self.config_key, ..., first is self, requirement)

    def weights(
        self,
        p: Tensor,
        inputs: RelationInputs,
    ) -> Tensor:
        """The sources' weights, (L, n) summing to 1, from those of the relation, `p`."""
        return p

    def combine(
        self,
        W: Tensor,
        p: Tensor,
    ) -> Tensor:
        """One vector (columns,) from a tile of all sources' vectors `W` (n, columns) and their
        weights `p` (n,).

        Tiles are taken one by one: what is done to a column may depend on that column and on `p`
        alone.
        """
        return mean_of(W, p)

    def finished(
        self,
        mean: Tensor,
        group: GroupServer,
        who: Sequence[int],
    ) -> Tensor:
        """Finish the model (D,) that was made of the uploads of `who`, on every rank: it may gain
        noise."""
        return mean


class Unweighted(Aggregator):
    """Every client counts once, however many samples it has."""

    def weights(
        self,
        p: Tensor,
        inputs: RelationInputs,
    ) -> Tensor:
        """1 / n each."""
        return torch.full_like(p, 1 / p.shape[-1])

"""Base classes of callbacks: transforms change messages, observers read each round's record, and
aggregators combine a round's uploads. The base of relations is in `relations`.

State that must survive a round is declared as named tensors of the client or the server: these move
between ranks, are saved and are resumed.
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
"""The order of the stages: hooks of all callbacks of one stage run before those of the next."""


def in_order(callbacks: Iterable[Callback], loggers: Iterable[Callback] = ()) -> list[Callback]:
    """Return callbacks and loggers in the order in which their hooks run: by stage, and within a
    stage in the given order. Loggers of stages before `log` run at stage `log`."""
    log_stage = STAGES.index("log")
    placed = [(STAGES.index(callback.stage), callback) for callback in callbacks]
    placed += [(max(STAGES.index(logger.stage), log_stage), logger) for logger in loggers]
    placed.sort(key=lambda place: place[0])
    return [callback for _, callback in placed]


internal = partial(field, init=False, repr=False)
"""A dataclass field that is no argument of the callback: it holds a value during the run."""


class Callback:
    """Base of all callbacks.

    Raises:
        TypeError: a subclass defines a hook that the engine never calls for its kind.
    """

    stage: ClassVar[Literal["observe", "draw", "show", "write", "log", "save", "send"]] = "observe"
    """When its hooks run. `observe`: add metrics; `draw`: draw pictures; `show`: show progress;
    `write`: write tables; `log`: write logs; `save`: save the run; `send`: upload what is saved
    (after a crash it catches up from the run folder)."""

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
        """Raise `BadInput` if an argument of a dataclass lies outside the range that its type
        declares (`ranges`)."""
        check_ranges(self, self.config_key)

    @property
    def config_key(self) -> str:
        """The key of the callback in a configuration, such as `callbacks.topk`, for messages."""
        return f"callbacks.{type(self).__name__.lower()}"

    def on_fit_start(self, run: RunContext) -> None:
        """Called on every rank before the first round, when data, models and checkpoint are loaded
        (`run.resumed_from`: the last finished round). Raise `BadInput` if the callback cannot work
        here."""


class Transform(Callback):
    """Changes messages between clients and server: quantises, leaves layers out, adds noise.

    Transforms run in the configuration's order, on the client's home rank. A class that changes a
    payload's `vector` or `sent` declares it by `changes_download` or `changes_upload`: storage
    depends on it, and an undeclared change is an error.
    """

    changes_download = False
    """Whether `on_download` may assign another `vector` to a payload, or change which blocks are
    `sent`."""
    changes_upload = False
    """Whether `on_upload` may do so. The server's copy of the upload then differs from the client's
    model and is stored apart."""
    client_memory = False
    """Whether `init_client` returns any tensors."""
    further_vectors = False
    """Whether it also changes `payload.vectors`; otherwise it is refused with a method that
    exchanges such vectors."""
    deployed = False
    """Whether it works with `fl-train deploy`: the centre (server) runs `on_download`, and the site
    (client) runs `on_upload`, which must not read the server's state. The centre receives its
    client memory unencrypted."""

    def on_fit_start(self, run: RunContext) -> None:
        """Print a notice if the transform only changes models and the method exchanges no models
        (only class means, for instance), so that the transform has no effect."""
        alone = (self.changes_upload or self.changes_download) and not self.further_vectors
        sends = any(group.up_mask.any() or group.down_mask.any() for group in run.groups)
        if alone and run.is_main and not sends:
            problem = f"it changes models on their way, and {run.method_name} sends none"
            log.say(f"{self.config_key}: {problem}")

    def init_client(self, run: RunContext) -> Tensors:
        """Return the tensors (on the CPU), with their first values, that each client keeps in its
        memory for this transform."""
        return {}

    def on_download(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Change `payload` before `client` receives it. To change its numbers, assign a new
        `vector` (`changes_download`)."""

    def on_phase(
        self,
        client: Client,
        phase: Phase,
    ) -> Private | None:
        """Return the clipping and noise of DP-SGD for the steps of `phase`, which `client` is about
        to train; None: ordinary steps."""
        return None

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Change `payload` before it leaves `client`. To change its numbers, assign a new `vector`
        (`changes_upload`)."""


class Observer(Callback):
    """Reads each round's record; may add metrics and pictures to it. Hooks run on every rank (rank
    0 is `run.is_main`), except `on_client_end`: it runs on the client's home rank only."""

    def on_round_start(
        self,
        run: RunContext,
        round: int,
        cohort: list[int],
    ) -> None:
        """Called after the cohort is drawn, before anything is sent."""

    def on_client_end(
        self,
        run: RunContext,
        client: int,
    ) -> None:
        """Called after `client` has uploaded in this round, on its home rank only."""

    def on_aggregate(
        self,
        run: RunContext,
        server: Server,
    ) -> None:
        """Called after the method has aggregated the round's uploads; entries that are added to
        `server.metrics` become part of the record."""

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """Called when the round is complete and scored."""

    def summarize(self, run: RunContext) -> Mapping[str, Any]:
        """Return entries for `summary.json` after the last round; those of rank 0 are kept.

        A key that another callback or the run also gives ends the run with an error.
        """
        return {}

    def on_fit_end(
        self,
        run: RunContext,
        summary: Mapping[str, Any],
    ) -> None:
        """Called after the last round; `summary` is the content of `summary.json`."""

    def on_close(self, run: RunContext) -> None:
        """Called last, also after an error: close files and progress bars."""


class Aggregator(Callback):
    """Combines a round's uploads into the global model. This base computes the mean by the
    relation's weights.

    A run has at most one aggregator, and only with a method whose relation is global.
    """

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` if the method has no global model, or the run has another aggregator."""
        requirement = "it needs a method with one global model, such as fedavg"
        check(
            self.config_key,
            run.method_name,
            run.relation.is_global,
            requirement,
        )
        first = next(c for c in run.callbacks if isinstance(c, Aggregator))
        requirement = f"a run has one aggregator, and {first.config_key} is it; remove one"
        check(
            self.config_key,
            ...,
            first is self,
            requirement,
        )

    def weights(
        self,
        p: Tensor,
        inputs: RelationInputs,
    ) -> Tensor:
        """Return the weights of the n uploads in each of the L layers, (L, n) summing to 1.

        Args:
            p: the relation's weights, (L, n).
            inputs: the round's clients and their last uploads.
        """
        return p

    def combine(
        self,
        W: Tensor,
        p: Tensor,
    ) -> Tensor:
        """Combine some columns of the n uploads into one row, (columns,).

        Columns are combined tile by tile, so the result in a column may depend on that column and
        `p` only.

        Args:
            W: the tile: some columns of all uploads, (n, columns).
            p: the uploads' weights, (n,).
        """
        return mean_of(W, p)

    def finished(
        self,
        mean: Tensor,
        group: GroupServer,
        clients: Sequence[int],
    ) -> Tensor:
        """Return the final global model (D,), on every rank; a subclass may add noise.

        Args:
            mean: the combined uploads (D,).
            group: the server's handle for the clients' architecture.
            clients: numbers of the clients whose uploads were combined.
        """
        return mean


class Unweighted(Aggregator):
    """Gives every client the same weight, however many samples it has."""

    def weights(
        self,
        p: Tensor,
        inputs: RelationInputs,
    ) -> Tensor:
        """Return 1 / n for each source."""
        return torch.full_like(p, 1 / p.shape[-1])

"""Scores of many models at once, taken before they are asked for one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fl_lightning.core import Client, RunContext
from fl_lightning.engine import scoring
from fl_lightning.engine.trainer import Trainer


class ToScore(NamedTuple):
    """A model of a client that is about to be scored: with others it can be scored beforehand."""

    kind: str
    client: Client
    vector: Tensor


class Ahead:
    """Scores models beside each other, for `Remembered` to give out."""

    def __init__(self, run: RunContext, trainers: Sequence[Trainer], remembered: scoring.Remembered) -> None:
        self.run, self.trainers, self.remembered = run, trainers, remembered

    def takes(self, client: Client) -> bool:
        """Whether models of the client can be scored beside others."""
        executor, data = self.trainers[client.group.index].executor, client.data
        plain = self.remembered.enabled and not scoring.further_metrics(self.run)
        return plain and (executor.scores(data.test) or executor.scores(data.validation))

    def score(self, models: Sequence[ToScore]) -> None:
        """Score models, so that the evaluator finds what it would compute.

        What fails here will fail again where client and round are named.
        """
        for group in {model.client.group.index for model in models}:
            ours = [model for model in models if model.client.group.index == group]
            with contextlib.suppress(Exception):
                self.remembered.compute(self.trainers[group].executor, self.run.judge, ours)

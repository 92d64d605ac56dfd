"""Seconds of a round from those of a few rounds that were run (`visits`): arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import LinearRegression

from fl_lightning.config import Config
from fl_lightning.engine.placement import moves
from fl_lightning.planning.memory import Setup
from fl_lightning.planning.setting import cohorts
from fl_lightning.training.schedule import Length


@dataclass(frozen=True)
class Link:
    """What an exchange between two ranks takes."""

    latency: float = 1e-3
    """Seconds, whatever its size."""
    bandwidth: float = 1e9
    """Bytes a second that a rank sends. Both are assumed unless `measured`: those of a network of 10 Gbit/s."""
    measured: bool = False


@dataclass(frozen=True)
class Observed:
    """One round that was run, of clients of one architecture."""

    kind: int
    """The architecture."""
    work: np.ndarray
    """Its clients, their training steps, the samples of those, and test samples (4,): see `work_of`."""
    mixed: np.ndarray
    """What the server had to do (3,): see `mixing_of`."""
    client: float
    """Seconds of training, download and upload."""
    evaluation: float
    server: float


@dataclass(frozen=True)
class Speeds:
    """Seconds for each unit of work, never negative: what fits the rounds that were run."""

    client: np.ndarray
    """By architecture (A, 4), as `work_of` counts."""
    evaluation: np.ndarray
    server: np.ndarray
    """As `mixing_of` counts (3,)."""

    @classmethod
    def fit(cls, observed: Sequence[Observed], finetuned: bool = False) -> Speeds:
        """Least squares over `observed`. What is evaluated has been trained for it, if `finetuned`."""
        client, evaluation = [], []
        for kind in range(1 + max(o.kind for o in observed)):
            ours = [o for o in observed if o.kind == kind]
            work = np.array([o.work for o in ours])
            client.append(_solved(work * [1, 1, 1, 0], [o.client for o in ours]))
            evaluation.append(_solved(work * [1, finetuned, 0, 1], [o.evaluation for o in ours]))
        server = _solved(np.array([o.mixed for o in observed]), [o.server for o in observed])
        return cls(np.array(client), np.array(evaluation), server)


def _solved(work: np.ndarray, seconds: Sequence[float]) -> np.ndarray:
    """Of rounds of 1 and of 4 s, the same error counts 4 times in the first: a long one says more, and not all."""
    fitted = LinearRegression(positive=True, fit_intercept=False)
    return np.asarray(fitted.fit(work, seconds, sample_weight=1 / np.maximum(seconds, 1e-6)).coef_)


def steps_of(config: Config, per_epoch: np.ndarray, limit: float = math.inf) -> np.ndarray:
    """Local steps in a round of clients with so many batches in an epoch (n,), at most `limit` if steps are counted."""
    length = Length.of(config.federation)
    length = length if math.isinf(limit) else length.at_most(int(limit))
    return np.array([length.steps_of(int(batches)) for batches in per_epoch])


def work_of(
    config: Config, train: Sequence[int], test: Sequence[int], limit: float = math.inf, width: int = 1
) -> np.ndarray:
    """Of each client's visit (n, 4): itself, its steps, the samples of those, test samples.

    Epochs end after `limit` steps. Of `width` clients that train at once, all take as many steps as the longest.
    """
    S, size = np.array(train), config.federation.batch_size
    per_epoch = np.minimum(np.ceil(S / size), limit)
    work = np.ones((len(S), 4))
    work[:, 1] = steps_of(config, per_epoch, limit)
    work[:, 2] = work[:, 1] / np.maximum(per_epoch, 1) * np.minimum(S, limit * size)
    for first in range(0, len(S) if width > 1 else 0, width):
        group = work[first : first + width, 1:3]
        group[:] = group.max(axis=0)
    work[:, 3] = test
    return work


def mixing_of(setup: Setup, sources: int, receivers: int) -> np.ndarray:
    """What the server does for so many (3,): a round, vectors that it reads and writes, and pairs of them."""
    one = setup.policy.one_download and not any("robust" in c.class_path for c in setup.config.callbacks.values())
    receivers = 1 if one else receivers
    return np.array([1.0, sources + receivers, sources * max(receivers, sources * setup.learns)])


def seconds(setup: Setup, speeds: Speeds, link: Link, sent: float, exchanges: int) -> dict[str, float]:
    """Seconds of a round: the busiest rank's visits by the engine's own homes and moves, the server's share, and its
    `exchanges`, by which all ranks have `sent` so many bytes."""
    config, ranks = setup.config, setup.hardware.ranks
    train, test = np.array(setup.sizes.train), np.array(setup.sizes.test)
    width = setup.width if config.fabric.executor == "vmap" else 1
    home = setup.home.tolist()
    costs = np.array([p.cost.step for p in setup.profiles])[setup.kind] * train
    slowest = []
    for cohort in cohorts(config):
        if ranks > 1:
            listed = cohort.tolist()
            for client, to in moves(listed, home, {c: float(costs[c]) for c in listed}, ranks):
                home[client] = to
        rank = np.array(home)[cohort]
        work, kind = work_of(config, train[cohort], test[cohort], width=width), setup.kind[cohort]
        both = [np.bincount(rank, (work * c[kind]).sum(1), ranks) for c in (speeds.client, speeds.evaluation)]
        busiest = int(np.argmax(both[0] + both[1]))
        slowest.append([part[busiest] for part in both])
    training, evaluation = np.mean(slowest, axis=0).tolist()
    shares = np.array([1, 1 / ranks, 1 / ranks])
    server = float((speeds.server * mixing_of(setup, setup.sources, len(cohorts(config)[0])) * shares).sum())
    found = {"clients": training, "evaluation": evaluation / config.evaluation.every, "server": server}
    return found | {"exchange": sent / ranks / link.bandwidth + exchanges * link.latency}

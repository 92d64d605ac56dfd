"""Clients that test a claimed epsilon: each is in or out by a coin, and what leaves the noise is
asked which.

Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar: One-shot Empirical Privacy Estimation for
Federated Learning. ICLR 2024 (random directions). Guesses are counted as in `privacy.bound`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.callbacks.base import Observer, Transform, internal
from fl_lightning.callbacks.central import CLIP, CentralPrivacy
from fl_lightning.callbacks.privacy import LocalPrivacy
from fl_lightning.configuration.config import check
from fl_lightning.configuration.ranges import PositiveShare
from fl_lightning.core import Client, ModelGroup, Payload, RoundRecord, RunContext, Tensors
from fl_lightning.foundation.rng import generator, numpy_rng
from fl_lightning.privacy.bound import lower_bound, share_right
from fl_lightning.privacy.mechanism import MODEL

SCORE, ROUNDS = "canary.score", "canary.rounds"
LONG = 1e4
"""Clips that a canary's change is long before it is bounded: what it sends has the length of the
clip."""


@dataclass
class Canaries(Transform, Observer):
    """A TEST of `localprivacy` or `centralprivacy`: it gives a lower bound on epsilon; canaries
    upload no model.

    The change that a canary uploads is replaced, before it is bounded: by a random direction, the
    same in all rounds, if the canary's coin says in, and by 0 if it says out. What leaves through
    the noise (its noisy uploads, or the global models) is compared with the direction, and the
    coins of the surest canaries are guessed.

    Args:
        share: of the clients, drawn from the seed, that are canaries. The others train as always.
        guesses: share of the canaries whose coin is guessed, half of them as in. 0.2: the largest
            bounds on Gaussian noise of epsilon 4 and 8 with 500 canaries, of 1, 0.5, 0.2, 0.1 and
            0.05.
    """

    changes_upload = client_memory = True

    share: PositiveShare = 1.0
    guesses: PositiveShare = 0.2
    _canaries: frozenset[int] = internal(default=frozenset())
    _privacy: LocalPrivacy | CentralPrivacy | None = internal(default=None)
    _before: dict[int, Tensor] = internal(default_factory=dict)
    """This round's global models before it, by group."""

    def on_fit_start(self, run: RunContext) -> None:
        """Draw the canaries; raise `BadInput` where no epsilon is claimed of the models."""
        key = self.config_key
        claims = [c for c in run.callbacks if isinstance(c, LocalPrivacy | CentralPrivacy)]
        requirement = "it tests localprivacy or centralprivacy, and neither is there"
        check(key, "", bool(claims), requirement)
        hands_on = any((g.up_mask & g.down_mask).any() for g in run.groups)
        requirement = "canaries are in models, and this method hands none on"
        check(key, run.method_name, hands_on, requirement)
        self._privacy = claims[0]
        count = max(1, round(self.share * run.clients))
        draws = numpy_rng(run.config.seed, "canaries")
        self._canaries = frozenset(draws.choice(run.clients, count, replace=False).tolist())

    def init_client(self, run: RunContext) -> Tensors:
        """How far what left went in the canary's direction so far, in clips, and in how many
        rounds."""
        return {
            SCORE: torch.zeros((), dtype=torch.float64),
            ROUNDS: torch.zeros((), dtype=torch.int64),
        }

    def on_round_start(
        self,
        run: RunContext,
        round: int,
        cohort: list[int],
    ) -> None:
        """Keep the global models."""
        self._before = {g.index: g.vectors[MODEL].clone() for g in run.groups}

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """A canary's change is its direction, or nothing."""
        if client.id not in self._canaries or not payload.sent.any():
            return
        run = client.run
        is_local = isinstance(self._privacy, LocalPrivacy)
        base = client.reference if is_local else client.group.vectors[MODEL]
        payload.vector = base.clone()
        if coin(run, client.id):
            payload.vector += LONG * self._clip(run) * direction(run, client.group, client.id)
        if is_local:  # subtracted here, since the server's copy of the upload holds it
            along = self._along(run, client.group, client.id, base)
            client.memory[SCORE] = client.memory[SCORE] - along

    def on_client_end(
        self,
        run: RunContext,
        client: int,
    ) -> None:
        """Of local privacy: the upload as the server has received it."""
        if client in self._canaries and isinstance(self._privacy, LocalPrivacy):
            received = run.states[client].received[MODEL]
            self._add(
                run,
                client,
                self._along(
                    run,
                    run.group_of(client),
                    client,
                    received,
                ),
            )

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """Of central privacy: the change of the global model."""
        if isinstance(self._privacy, LocalPrivacy):
            return
        for row in record.clients:
            client = int(row["client"])
            if client in self._canaries and client in run.states:
                group = run.group_of(client)
                change = group.vectors[MODEL] - self._before[group.index]
                along = self._along(run, group, client, change)
                self._add(run, client, len(record.clients) * along)

    def _add(
        self,
        run: RunContext,
        client: int,
        score: float,
    ) -> None:
        """Count a round of a canary, with its score."""
        memory = run.states[client].memory
        memory[SCORE] = memory[SCORE] + score
        memory[ROUNDS] = memory[ROUNDS] + 1

    def _along(
        self,
        run: RunContext,
        group: ModelGroup,
        client: int,
        vector: Tensor,
    ) -> float:
        """How far `vector` (D,) goes in the canary's direction, in clips."""
        unit = direction(run, group, client).double()
        return float(vector.to(unit.device).double() @ unit) / self._clip(run)

    def _clip(self, run: RunContext) -> float:
        if isinstance(self._privacy, LocalPrivacy):
            return self._privacy._noises[MODEL].clip
        return float(run.server.memory[CLIP])

    def summarize(self, run: RunContext) -> Mapping[str, Any]:
        """The guesses, how many were right, and the epsilon that they refute."""
        scores_here = {}
        for c, state in run.states.items():
            if c in self._canaries and state.memory[ROUNDS]:
                scores_here[c] = float(state.memory[SCORE])
        scores = run.processes.gather_by_client(scores_here)
        scored = sorted((score, c) for c, score in scores.items())
        count = len(scored)
        half = min(max(1, round(self.guesses * count / 2)), count // 2)
        if not half or self._privacy is None:
            return {"privacy_canaries": count}
        guessed_out = scored[:half]
        guessed_in = scored[-half:]
        right = sum(not coin(run, c) for _, c in guessed_out)
        right += sum(coin(run, c) for _, c in guessed_in)
        low, high = share_right(2 * half, right)
        return {
            "privacy_canaries": count,
            "privacy_canary_guesses": 2 * half,
            "privacy_canary_right": right,
            "privacy_canary_right_low": low,
            "privacy_canary_right_high": high,
            "privacy_epsilon_bound": lower_bound(
                count,
                2 * half,
                right,
                self._privacy.delta,
            ),
        }


def coin(run: RunContext, client: int) -> bool:
    """Whether a canary is in: fair, of (seed, client), and known to nobody who guesses."""
    return bool(numpy_rng(run.config.seed, "canary coin", client).integers(2))


def direction(
    run: RunContext,
    group: ModelGroup,
    client: int,
) -> Tensor:
    """A canary's direction (D,), of length 1 over what its group sends."""
    draws = generator(run.config.seed, "canary direction", client)
    vector = torch.zeros_like(group.initial)
    for s in group.layout.segments(group.up_mask & group.down_mask):
        vector[s.columns] = torch.randn(s.stop - s.start, generator=draws).to(vector)
    return vector / torch.linalg.vector_norm(vector)

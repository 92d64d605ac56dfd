"""A test of a claimed epsilon by canaries: clients that upload a secret direction or nothing, as a
coin decides, which is then guessed from the noisy results.

Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar: One-shot Empirical Privacy Estimation for
Federated Learning. ICLR 2024 (random directions). Guesses are evaluated as in `privacy.bound`.
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
"""Length of a canary's change before clipping, in multiples of the clip: so long that after
clipping it has exactly the length of the clip."""


@dataclass
class Canaries(Transform, Observer):
    """A TEST of `localprivacy` or `centralprivacy`: it gives a lower bound on epsilon. Some clients
    become canaries, which upload no model of their own.

    A coin is tossed once for each canary: "in" or "out". Before clipping, the change of a canary
    that is in is replaced by a long random direction, the same in all rounds; the change of a
    canary that is out, by 0. The canary's score is the projection of the noisy results (its
    uploads, or the global models) on its direction. The canaries with the highest scores are
    guessed to be in, those with the lowest to be out.

    Args:
        share: share of the clients that are canaries, drawn from the seed. The others train as
            always.
        guesses: share of the canaries whose coins are guessed, half of them as in, half as out.
            0.2: among 1, 0.5, 0.2, 0.1 and 0.05 it gave the largest bounds, on Gaussian noise of
            epsilon 4 and 8 with 500 canaries.
    """

    changes_upload = client_memory = True

    share: PositiveShare = 1.0
    guesses: PositiveShare = 0.2
    _canaries = frozenset[int]()
    _privacy: LocalPrivacy | CentralPrivacy | None = internal(default=None)
    _before: dict[int, Tensor] = internal(default_factory=dict)
    """The global models before this round, by group."""

    def on_fit_start(self, run: RunContext) -> None:
        """Draw the canaries; raise `BadInput` if no callback claims an epsilon, or clients receive
        nothing of the models that others upload."""
        key = self.config_key
        claims = [c for c in run.callbacks if isinstance(c, LocalPrivacy | CentralPrivacy)]
        requirement = "it tests localprivacy or centralprivacy; add one of them"
        check(key, ..., bool(claims), requirement)
        sends_models_on = any((g.up_mask & g.down_mask).any() for g in run.groups)
        problem = "canaries hide in models, and this method sends none on to clients"
        requirement = f"{problem}; choose another --method, such as fedavg"
        check(key, run.method_name, sends_models_on, requirement)
        self._privacy = claims[0]
        count = max(1, round(self.share * run.clients))
        draws = numpy_rng(run.config.seed, "canaries")
        self._canaries = frozenset(draws.choice(run.clients, count, replace=False).tolist())

    def init_client(self, run: RunContext) -> Tensors:
        """Return the canary's state: the sum over rounds of the noisy results' projections on its
        direction, in multiples of the clip, and the number of those rounds."""
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
        """Store the global models, to measure their change in this round."""
        self._before = {g.index: g.vectors[MODEL].clone() for g in run.groups}

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Replace a canary's change by its direction, or by zeros."""
        if client.id not in self._canaries or not payload.sent.any():
            return
        run = client.run
        is_local = isinstance(self._privacy, LocalPrivacy)
        base = client.reference if is_local else client.group.vectors[MODEL]
        payload.vector = base.clone()
        if coin(run, client.id):
            payload.vector += LONG * self._clip(run) * direction(run, client.group, client.id)
        if is_local:  # the server's copy of the upload holds the base: its part is subtracted here
            along = self._along(run, client.group, client.id, base)
            client.memory[SCORE] = client.memory[SCORE] - along

    def on_client_end(
        self,
        run: RunContext,
        client: int,
    ) -> None:
        """With `localprivacy`, add the projection of the received upload to the canary's score."""
        if client in self._canaries and isinstance(self._privacy, LocalPrivacy):
            received = run.states[client].received[MODEL]
            along = self._along(run, run.group_of(client), client, received)
            self._add(run, client, along)

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """With `centralprivacy`, add the projection of the global model's change to the canaries'
        scores."""
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
        """Add a round's `score` to the canary's memory."""
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
        """Return the projection of `vector` (D,) on the canary's direction, in multiples of the
        clip."""
        unit = direction(run, group, client).double()
        return float(vector.to(unit.device).double() @ unit) / self._clip(run)

    def _clip(self, run: RunContext) -> float:
        if isinstance(self._privacy, LocalPrivacy):
            return self._privacy._noises[MODEL].clip
        return float(run.server.memory[CLIP])

    def summarize(self, run: RunContext) -> Mapping[str, Any]:
        """Return the number of guesses and of right ones, the interval of their share, and the
        lower bound on epsilon."""
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
    """Return whether a canary is in: a fair coin from (seed, client), unknown to whoever
    guesses."""
    return bool(numpy_rng(run.config.seed, "canary coin", client).integers(2))


def direction(
    run: RunContext,
    group: ModelGroup,
    client: int,
) -> Tensor:
    """Return a canary's direction (D,), of length 1, in the blocks that are both uploaded and
    downloaded."""
    draws = generator(run.config.seed, "canary direction", client)
    vector = torch.zeros_like(group.initial)
    for s in group.layout.segments(group.up_mask & group.down_mask):
        vector[s.columns] = torch.randn(s.stop - s.start, generator=draws).to(vector)
    return vector / torch.linalg.vector_norm(vector)

"""Differential privacy of the global model, by a server that clients trust (`centralprivacy`).

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models. ICLR 2018
(DP-FedAvg). Andrew, Thakkar, McMahan, Ramaswamy: Differentially Private Learning with Adaptive
Clipping. NeurIPS 2021.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from fl_lightning.callbacks.base import Observer, Transform, Unweighted, internal
from fl_lightning.callbacks.privacy import INPUTS, check_account, check_noise_stays, most_uploads
from fl_lightning.callbacks.relations import SampleCounts
from fl_lightning.configuration.config import Config, check
from fl_lightning.configuration.optimizerkeys import check_noise
from fl_lightning.configuration.ranges import Range
from fl_lightning.core import Client, Payload, RoundRecord, RunContext
from fl_lightning.core.run import cohort_size
from fl_lightning.core.server import GroupServer
from fl_lightning.core.traits import MARK, declares, is_shipped
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.rng import ENTROPY, generator, unrepeatable
from fl_lightning.privacy.accounting import DELTA, Mechanism, calibrated, epsilon
from fl_lightning.privacy.mechanism import MODEL, clipped, repaired, with_protected_change

CLIP, NOISE, TAKEN = "privacy.clip", "privacy.noise", "privacy.taken"
"""Tensors of the server's memory: clip and noise of the next round, and the number of rounds of
each client."""
RATE, COUNTING = 0.2, 20
"""Of adaptive clipping (Andrew et al., 2021, section 3): the step size of the clip, and the divisor
of n that gives the noise on the count."""


def why_uncovered(method: Any) -> str | None:
    """Return why noise on the mean does not protect all that the server of `method` learns and
    sends on; None: it does."""
    relation = method.relation()
    if not relation.is_global:
        return "each of its clients receives its own mix, and the noise is on one global model"
    kinds = [b.kind for b in method.beside().values() if b.values != "public"]
    slots = [name for name, slot in method.slots().items() if slot.exchanged]
    if kinds or slots:
        return (
            f"its clients also upload {(kinds + slots)[0]}, which the noise on the mean does not "
            f"cover"
        )
    for hook in ("aggregate", "broadcast"):
        if not hasattr(getattr(method, hook), MARK):
            place = f"{hook} of {_owner(method, hook)}"
            return f"its server ({place}) may read single uploads or weight them"
    if (
        not isinstance(relation, SampleCounts)
        or relation.sources != "cohort"
        or method.traits.everyone_first
    ):
        return "its server weights uploads in another way, or uses those of earlier rounds"
    return None


def clients_keep_state(
    config: Config,
    method: Any,
    callbacks: Iterable[Any],
) -> bool:
    """Return whether clients may keep state between rounds that depends on their data and
    influences later uploads.

    An upload of such a client also depends on the earlier rounds in which it took part, so secret
    cohorts (amplification by sampling) do not lower epsilon.

    Args:
        config: says whether the optimiser's state is kept.
        method: examined for memory, slots, the model that clients start from, and a `scope` of its
            own, by which parts of models may stay with clients.
        callbacks: examined for memory; objects or classes.
    """
    remembers = any(declares(part, "client_memory") for part in (method, *callbacks))
    own_part = _owner(method, "scope") != "Method" and not (
        is_shipped(method) and method.traits.still
    )
    own_vectors = bool(method.slots()) or method.traits.starts != "server"
    return remembers or own_part or own_vectors or config.optimizer.keep_state


def _owner(method: Any, hook: str) -> str:
    return next(cls.__name__ for cls in type(method).__mro__ if hook in vars(cls))


@dataclass
class CentralPrivacy(Transform, Unweighted, Observer):
    """A trusted server clips each client's change and adds noise to the mean: differential privacy
    against everybody but the server.

    The unit of privacy is a client: epsilon compares a run with the same run without the client's
    term in the sum of changes (with `quantile`, also in the count of small norms). All n clients of
    the cohort have weight 1 / n, and the noise on the mean has the standard deviation noise * clip
    / n. There is no protection against the server itself (`localprivacy` gives it).

    Args:
        clip: the greatest L2 norm of a client's change of the global model; with `quantile`, that
            of the first round.
        noise: standard deviation of the noise on the sum of changes, in multiples of `clip`.
        epsilon_target: in place of `noise`: the run's epsilon, for which the least sufficient noise
            is computed.
        quantile: adaptive clipping: from round to round the clip approaches this quantile of the
            clients' norms. Each round's noisy count of norms below the clip tells the direction.
            Changes get a little more noise in return, so epsilon stays the same. null: a fixed
            clip. The authors use 0.5.
        delta: the delta at which epsilon is given; below 1 / number of clients. 1e-5: usual in the
            field.
        reproducible: noise is drawn from (seed, round), so whoever knows the seed can subtract it.
            false: from the operating system's random numbers.
    """

    changes_upload = True
    accounts = True
    """Whether it accounts for the privacy of the whole run."""

    clip: float | None = None
    noise: float | None = None
    epsilon_target: float | None = None
    quantile: Annotated[float, Range(0, 1, above=True, below=True)] | None = None
    delta: float = DELTA
    reproducible: bool = True
    _noise = 0.0
    _stateful = False
    """Whether clients keep state (`clients_keep_state`)."""
    _within: dict[int, bool] = internal(default_factory=dict)
    """Whether each client's change in this round was within the clip, on this rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_noise(
            self.config_key,
            self.clip,
            self.noise,
            self.epsilon_target,
            self.delta,
        )

    # ---------------------------------------------------------------- before the first round

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` if the noise does not protect all that the server learns, or a resumed
        run would change it."""
        key = self.config_key
        check_account(run, key)
        has_buffers = any(
            b.is_floating_point() for group in run.groups for b in group.initial_buffers
        )
        self._stateful = has_buffers or clients_keep_state(run.config, run.method, run.callbacks)
        self._noise = self._multiplier(run.config, run.method)
        Unweighted.on_fit_start(self, run)
        names = [g.name for g in run.groups]
        requirement = f"{key} needs one architecture; give all clients the same model"
        check("model", names, len(names) == 1, requirement)
        last = [c for c in run.callbacks if isinstance(c, Transform)][-1]
        problem = f"it must be named before {key.removeprefix('callbacks.')}"
        requirement = f"{problem}, which clips the final uploads"
        check(last.config_key, ..., last is self, requirement)
        memory = run.server.memory
        noise = memory.setdefault(NOISE, torch.tensor(self._noise, dtype=torch.float64))
        key = f"{key}.epsilon_target"
        check_noise_stays(key, self.epsilon_target, [float(noise)], [self._noise])
        memory.setdefault(CLIP, torch.tensor(self.clip, dtype=torch.float64))
        memory.setdefault(TAKEN, torch.zeros(run.clients, dtype=torch.int64))

    def _multiplier(
        self,
        config: Config,
        method: Any,
    ) -> float:
        """Return the standard deviation of the run's noise, in multiples of the clip.

        Raises:
            BadInput: the method is not covered; delta is too large; no noise meets the target; the
                cohort is too small for adaptive clipping.
        """
        key = self.config_key
        if why := why_uncovered(method):
            requirement = f"{why}; choose another --method, such as fedavg"
            raise BadInput(key, type(method).__name__.lower(), requirement)
        requirement = f"it must be below 1 / {config.clients}, one over the number of clients"
        check(f"{key}.delta", self.delta, self.delta < 1 / config.clients, requirement)
        noise = self._calibrated(config, method) if self.noise is None else self.noise
        size = cohort_size(config, config.clients)
        most = 2 * size / COUNTING
        problem = f"cohorts of {size} need noise below {most:g} for it, and have {noise:.4g}"
        requirement = f"{problem}; use larger cohorts, less noise, or null"
        is_possible = self.quantile is None or noise < most
        check(f"{key}.quantile", self.quantile, is_possible, requirement)
        return noise

    def _calibrated(
        self,
        config: Config,
        method: Any,
    ) -> float:
        key = f"{self.config_key}.epsilon_target"
        target = float(self.epsilon_target or 0)
        times = _rounds(config, method)
        noises = list[float]()
        failure = None
        for make in self._ways(config, times, config.federation.rounds):
            try:
                noises.append(calibrated(make, target, self.delta, key))
            except BadInput as error:
                failure = error
        if failure and not noises:
            raise failure
        return min(noises)

    def planned(
        self,
        config: Config,
        method: Any,
        sends_model: bool,
        sizes: Sequence[int],
    ) -> dict[str, Any]:
        """Return the privacy entries of the summary, as far as they are known before the run.

        Args:
            config: the run's config.
            method: the run's method.
            sends_model: whether clients upload models.
            sizes: number of training samples of each client.
        """
        callbacks = [part.load() for part in config.callbacks.values()]
        self._stateful = clients_keep_state(config, method, callbacks)
        self._noise = self._multiplier(config, method)
        times = _rounds(config, method)
        return self._report(
            config,
            times,
            config.federation.rounds,
            float(self.clip or 0),
        )

    # ---------------------------------------------------------------- in a round

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Clip the client's change from the global model."""
        same_blocks = bool((payload.sent == client.group.up_mask).all())
        problem = "it sends other blocks than its scope says, and the choice may reveal data"
        requirement = f"{problem}; choose another --method, such as fedavg"
        check(self.config_key, client.run.method_name, same_blocks, requirement)
        clip = float(client.run.server.memory[CLIP])

        def clip_change(change: Tensor) -> Tensor:
            clipped_change = clipped(change, clip)
            self._within[client.id] = torch.equal(clipped_change, change)
            return clipped_change

        start = client.group.vectors[MODEL]
        payload.vector = with_protected_change(client, payload, start, clip_change)

    def finished(
        self,
        mean: Tensor,
        group: GroupServer,
        clients: Sequence[int],
    ) -> Tensor:
        """Return the mean with noise on all blocks that clients receive; count the round for
        `clients` and, with `quantile`, adapt the clip to their norms."""
        run = group.server.run
        n = len(clients)
        memory = run.server.memory
        if self.reproducible:
            draws = generator(run.config.seed, "central privacy", group.server.round)
        else:
            draws = unrepeatable(run.processes.gather_objects(os.urandom(ENTROPY))[0])
        clip = float(memory[CLIP])
        noise = self._noise
        counting = run.cohort_size / COUNTING
        # the two together are as good as one message with the whole noise
        if self.quantile is not None:
            noise = (self._noise**-2 - (2 * counting) ** -2) ** -0.5
        for s in group.layout.segments(group.group.down_mask):
            normal = torch.randn(s.stop - s.start, generator=draws, dtype=torch.float32)
            mean[s.columns] += (noise * clip / n * normal).to(mean)
        rounds = memory[TAKEN].clone()
        rounds[clients] += 1
        memory[TAKEN] = rounds
        if self.quantile is not None:
            within = run.processes.gather_by_client(self._within)
            count_noise = counting * float(torch.randn((), generator=draws))
            count = sum(within[c] - 0.5 for c in clients) + count_noise
            step = math.exp(-RATE * (count / n + 0.5 - self.quantile))
            memory[CLIP] = memory[CLIP] * step
        self._within.clear()
        return repaired(group.layout, group.group.down_mask, mean)

    # ---------------------------------------------------------------- epsilon

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """Add epsilon so far: each client's to its row, the largest to the round's metrics; with
        `quantile`, also the clip of the next round."""
        rounds = run.server.memory[TAKEN].tolist()
        t = run.server.round
        for row in record.clients:
            of_client = rounds[int(row["client"])]
            row["privacy_epsilon"] = self._epsilon(run.config, of_client, t)
        record.metrics["privacy_epsilon"] = self._epsilon(run.config, max(rounds), t)
        if self.quantile is not None:
            record.metrics["privacy_clip"] = float(run.server.memory[CLIP])

    def _epsilon(
        self,
        config: Config,
        times: int,
        rounds: int,
        *,
        replace_one: bool = False,
    ) -> float:
        """Return the smallest epsilon of all valid accountings (`_ways`)."""
        ways = self._ways(config, times, rounds)
        return min(epsilon(make(self._noise), self.delta, replace_one=replace_one) for make in ways)

    def _ways(
        self,
        config: Config,
        times: int,
        rounds: int,
    ) -> list[Any]:
        """Return the valid ways to account for a run, each as a function from the noise to
        mechanisms. One composes the `times` rounds in which the client took part. If clients keep
        no state, another composes all `rounds`, with cohorts that are secret. The smaller of their
        epsilons is valid."""
        clients = config.clients
        size = cohort_size(config, clients)
        ways = [lambda noise: [Mechanism(noise, times)]]
        if size < clients and not self._stateful:
            ways.append(lambda noise: [Mechanism(noise, rounds, cohort=(size, clients))])
        return ways

    def summarize(self, run: RunContext) -> Mapping[str, Any]:
        """Return the summary's entries on privacy: the largest epsilon of any client, its delta and
        unit, and what it covers."""
        memory = run.server.memory
        times = int(memory[TAKEN].max())
        return self._report(run.config, times, run.server.round, float(memory[CLIP]))

    def _report(
        self,
        config: Config,
        times: int,
        rounds: int,
        clip: float,
    ) -> dict[str, Any]:
        of_known_cohorts = epsilon([Mechanism(self._noise, times)], self.delta)
        least = self._epsilon(config, times, rounds)
        secret = ", who do not know the cohorts" if least < of_known_cohorts else ""
        if self._stateful and cohort_size(config, config.clients) < config.clients:
            secret = (
                ", also those who know the cohorts: clients keep state, so secret cohorts do not "
                "lower epsilon"
            )
        return {
            "privacy_epsilon": least,
            "privacy_epsilon_replace_one": self._epsilon(config, times, rounds, replace_one=True),
            "privacy_epsilon_known_cohorts": of_known_cohorts,
            "privacy_delta": self.delta,
            "privacy_unit": "client",
            "privacy_mechanism": "central",
            "privacy_uploads": times,
            "privacy_clip_model": clip,
            "privacy_noise_model": self._noise,
            "privacy_covers": "global models of all rounds against other clients and their readers"
            + f"{secret}; not against the server, nor a client's scores, tables and personal "
            f"model, nor {INPUTS}",
        }


def _rounds(config: Config, method: Any) -> int:
    """Return the number of rounds of the client that is drawn most often."""
    return most_uploads(config, method, [MODEL])[0]

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
from fl_lightning.callbacks.privacy import INPUTS, check_account, check_noise_stays, uploads
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
from fl_lightning.privacy.mechanism import MODEL, clipped, moved, repaired

CLIP, NOISE, TAKEN = "privacy.clip", "privacy.noise", "privacy.taken"
"""Tensors of the server's memory: the clip and the noise of the next round, and how many rounds
each client was in."""
RATE, COUNTING = 0.2, 20
"""Of adaptive clipping (Andrew et al., 2021, section 3): the step of the clip, and by how much n is
divided for the noise of the count."""


def refusal(method: Any) -> str | None:
    """Why noise on the mean does not cover what the server of `method` learns and hands on; None:
    it does."""
    relation = method.relation()
    if not relation.is_global:
        return "its clients receive mixes of their own, and the noise is on the one global model"
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
            return f"its server ({place}) may look at single uploads, or weighs them"
    if (
        not isinstance(relation, SampleCounts)
        or relation.sources != "cohort"
        or method.traits.everyone_first
    ):
        return "its server weighs uploads in another way, or those of earlier rounds"
    return None


def keeps_state(
    config: Config,
    method: Any,
    callbacks: Iterable[Any],
) -> bool:
    """Whether clients may keep anything of their data from round to round that a later upload
    depends on.

    No theorem on secret cohorts covers such a client: what it uploads tells of rounds in which it
    took part before.

    Args:
        config: whether the optimiser's state is kept.
        method: by what it declares; where it has a `scope` of its own, parts of models may stay
            with clients.
        callbacks: objects or classes.
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
    """A trusted server bounds each client's change and adds noise to their one mean: privacy
    against all others.

    The unit is a client: epsilon compares runs with and without its part in the sum of changes, and
    in the count for `quantile`. The mean is plain, 1 / n for each of the cohort's n clients, and
    its noise has the standard deviation noise * clip / n. Against the server itself it protects
    nothing (`localprivacy` does).

    Args:
        clip: the greatest L2 norm of a client's change of the global model; with `quantile` that of
            the first round.
        noise: standard deviation of the noise on the sum of changes, in units of the clip.
        epsilon_target: in place of `noise`: the least noise that keeps the run's epsilon there.
        quantile: adaptive clipping: the clip follows this quantile of the norms by a noisy count of
            the clients below it; the count has a share of the noise, and epsilon stays. null: the
            clip stays. The authors: 0.5.
        delta: at which epsilon is given; below one over the clients. 1e-5: the field's habit.
        reproducible: noise is drawn for (seed, round): who knows the seed can take it off. false:
            the operating system's random numbers.
    """

    changes_upload = True
    accounts = True
    """As of `LocalPrivacy`."""

    clip: float | None = None
    noise: float | None = None
    epsilon_target: float | None = None
    quantile: Annotated[float, Range(0, 1, above=True, below=True)] | None = None
    delta: float = DELTA
    reproducible: bool = True
    _noise = 0.0
    _stateful = False
    """Whether clients keep state (`keeps_state`)."""
    _within: dict[int, bool] = internal(default_factory=dict)
    """This round's uploads of this rank: whether a client's change was within the clip."""

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
        """Raise `BadInput` where the noise does not cover what the server learns, or a resumed run
        had other noise."""
        key = self.config_key
        check_account(run, key)
        has_buffers = any(
            b.is_floating_point() for group in run.groups for b in group.initial_buffers
        )
        self._stateful = has_buffers or keeps_state(run.config, run.method, run.callbacks)
        self._noise = self._multiplier(run.config, run.method)
        Unweighted.on_fit_start(self, run)
        names = [g.name for g in run.groups]
        check(
            "model",
            names,
            len(names) == 1,
            f"{key} takes clients of one architecture",
        )
        last = [c for c in run.callbacks if isinstance(c, Transform)][-1]
        problem = f"it must be named before {key.removeprefix('callbacks.')}"
        requirement = f"{problem}, which bounds what is sent in the end"
        check(last.config_key, ..., last is self, requirement)
        memory = run.server.memory
        noise = memory.setdefault(NOISE, torch.tensor(self._noise, dtype=torch.float64))
        target = self.epsilon_target
        check_noise_stays(
            f"{key}.epsilon_target",
            target,
            [float(noise)],
            [self._noise],
        )
        memory.setdefault(CLIP, torch.tensor(self.clip, dtype=torch.float64))
        memory.setdefault(TAKEN, torch.zeros(run.clients, dtype=torch.int64))

    def _multiplier(
        self,
        config: Config,
        method: Any,
    ) -> float:
        """The noise of the run.

        Raises:
            BadInput: the method is not covered; delta is too large; no noise meets the target; the
                cohort is too small for adaptive clipping.
        """
        key = self.config_key
        if why := refusal(method):
            requirement = f"{why}; choose another --method, such as fedavg"
            raise BadInput(key, type(method).__name__.lower(), requirement)
        requirement = f"it must lie below one over the {config.clients} clients"
        check(f"{key}.delta", self.delta, self.delta < 1 / config.clients, requirement)
        noise = self._calibrated(config, method) if self.noise is None else self.noise
        size = cohort_size(config, config.clients)
        most = 2 * size / COUNTING
        requirement = f"with cohorts of {size} it needs noise below {most:g}, and has {noise:.4g}"
        enough = self.quantile is None or noise < most
        check(f"{key}.quantile", self.quantile, enough, requirement)
        return noise

    def _calibrated(
        self,
        config: Config,
        method: Any,
    ) -> float:
        key = f"{self.config_key}.epsilon_target"
        target = float(self.epsilon_target or 0)
        times = _rounds(config, method)
        enough = list[float]()
        why = None
        for make in self._ways(config, times, config.federation.rounds):
            try:
                enough.append(calibrated(make, target, self.delta, key))
            except BadInput as error:
                why = error
        if why is not None and not enough:
            raise why
        return min(enough)

    def planned(
        self,
        config: Config,
        method: Any,
        sends_model: bool,
        sizes: Sequence[int],
    ) -> dict[str, Any]:
        """What the summary will have, before the run."""
        callbacks = [part.load() for part in config.callbacks.values()]
        self._stateful = keeps_state(config, method, callbacks)
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
        """Bound the change from the global model."""
        same_blocks = bool((payload.sent == client.group.up_mask).all())
        problem = "it sends other blocks than its scope says, and which they are may tell of data"
        requirement = f"{problem}; choose another --method, such as fedavg"
        check(self.config_key, client.run.method_name, same_blocks, requirement)
        clip = float(client.run.server.memory[CLIP])

        def bounded(change: Tensor) -> Tensor:
            short = clipped(change, clip)
            self._within[client.id] = torch.equal(short, change)
            return short

        payload.vector = moved(client, payload, client.group.vectors[MODEL], bounded)

    def finished(
        self,
        mean: Tensor,
        group: GroupServer,
        who: Sequence[int],
    ) -> Tensor:
        """With noise on all that is handed on; the rounds of `who` are counted, and the clip
        follows their norms."""
        run = group.server.run
        n = len(who)
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
        rounds[who] += 1
        memory[TAKEN] = rounds
        if self.quantile is not None:
            within = run.processes.gather_by_client(self._within)
            count_noise = counting * float(torch.randn((), generator=draws))
            count = sum(within[c] - 0.5 for c in who) + count_noise
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
        """Epsilon so far: the largest client's, and each client's; with `quantile`, the clip of the
        next round."""
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
        """The smaller of two that both hold: of the rounds with the client; of all rounds, if
        nobody knows who was in them and clients keep no state."""
        ways = self._ways(config, times, rounds)
        return min(epsilon(make(self._noise), self.delta, replace_one=replace_one) for make in ways)

    def _ways(
        self,
        config: Config,
        times: int,
        rounds: int,
    ) -> list[Any]:
        """Accountings of a run that hold, each from a noise to mechanisms: of the `times` rounds
        with the client; of all rounds with secret cohorts, if clients keep no state. The smaller
        epsilon holds."""
        clients = config.clients
        size = cohort_size(config, clients)
        ways = [lambda noise: [Mechanism(noise, times)]]
        if size < clients and not self._stateful:
            ways.append(lambda noise: [Mechanism(noise, rounds, cohort=(size, clients))])
        return ways

    def summarize(self, run: RunContext) -> Mapping[str, Any]:
        """Epsilon of the client with the largest, its delta and unit, and what it covers."""
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
            "privacy_epsilon_replace_one": self._epsilon(
                config,
                times,
                rounds,
                replace_one=True,
            ),
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
    """Of the client that is drawn most often."""
    return uploads(config, method, [MODEL])[0]

"""Differential privacy: what leaves a client is bounded and noised (`localprivacy`)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fl_lightning.callbacks.base import Observer, Transform, internal
from fl_lightning.callbacks.blurrelation import BlurRelation
from fl_lightning.callbacks.compression import Quantize, TopK
from fl_lightning.callbacks.keepuploads import KeepUploads
from fl_lightning.callbacks.robust import NormBound
from fl_lightning.configuration.config import Config, check
from fl_lightning.configuration.optimizerkeys import check_noise
from fl_lightning.core import Client, Payload, RoundRecord, RunContext, Tensors
from fl_lightning.core.run import cohort_of
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.rng import unrepeatable
from fl_lightning.privacy.accounting import DELTA, Mechanism, calibrated, check_delta, epsilon
from fl_lightning.privacy.mechanism import Noise, kinds, kinds_of, protect

UPLOADS, NOISE = "privacy.uploads", "privacy.noise"
"""Tensors of a client's memory: how many uploads of each kind have left it, and the noise of each
kind."""
BEHIND = (Quantize, TopK, NormBound, KeepUploads, BlurRelation)
"""Transforms that look at the noisy upload and at what the server knows alone: they run behind the
noise."""
INPUTS = (
    "how inputs are read: what they are imputed, scaled and normalised by, tokens, values of "
    "columns, class names"
)
"""All clients' training data decide it, without noise, and every exported model holds it."""
SCORES = ("accuracy", "evaluation", "loss", "metrics", "scores", "test", "validation")
"""What users may want to have covered, and is not."""


@dataclass
class LocalPrivacy(Transform, Observer):
    """Each client clips all that it uploads and adds noise: differential privacy against the server
    and all others.

    The unit is a client: all of its data. Epsilon is of adding or removing what the client
    contributes to its uploads, composed over the rounds in which it took part, by dp-accounting's
    privacy loss distributions. Whatever the server and other clients do with uploads afterwards
    cannot raise it.

    Args:
        clip: the greatest L2 norm of what is uploaded, one for all kinds or `{model: 1.0,
            class_means: 0.5}`.
        noise: standard deviation of the noise on each number, in units of the clip, one for all
            kinds or one for each.
        epsilon_target: in place of `noise`: that of every kind is the least which keeps the client
            with most rounds at this epsilon.
        delta: at which epsilon is given; below one over all training samples. 1e-5: the field's
            habit.
        reproducible: noise is drawn for (seed, client, round, kind): equal runs are equal to the
            bit, and who knows the seed can take the noise off. false: the operating system's random
            numbers, which nobody can repeat.
    """

    changes_upload = client_memory = further_vectors = deployed = True
    accounts = True
    """It reports epsilon of the whole upload: no method reports one of a part."""

    clip: float | dict[str, float] | None = None
    noise: float | dict[str, float] | None = None
    epsilon_target: float | None = None
    delta: float = DELTA
    reproducible: bool = True
    _noises: dict[str, Noise] = internal(default_factory=dict)

    def __post_init__(self) -> None:
        check_noise(
            self.config_key,
            self.clip,
            self.noise,
            self.epsilon_target,
            self.delta,
        )

    # ---------------------------------------------------------------- before the first round

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` where something of an upload cannot be protected, or a resumed run had
        other noise."""
        check_account(run, self.config_key)
        self._check_others(run)
        samples = sum(run.data.train_sizes)
        self._noises = self.noises(run.config, run.method, kinds_of(run), samples)
        now = [noise.multiplier for noise in self._noises.values()]
        of_this_rank = [
            s.memory[NOISE].tolist() for s in run.states.values() if s.memory[UPLOADS].any()
        ]
        key = f"{self.config_key}.epsilon_target"
        for of_rank in run.processes.gather_objects(of_this_rank):
            for before in of_rank:
                check_noise_stays(key, self.epsilon_target, before, now)

    def _check_others(self, run: RunContext) -> None:
        """Raise `BadInput` for parts of the run that tell more than the noisy upload, or change
        what it counts."""
        key = self.config_key
        name = run.method_name
        for upload, beside in run.method.beside().items():
            problem = f"its uploads hold {upload} ({beside.description})"
            cure = "choose another --method, such as fedavg"
            requirement = f"{problem}, which no bound and noise can protect; {cure}"
            check(key, name, beside.values is not None, requirement)
        sigma = getattr(run.method, "sigma", 0) if name == "fedhkd" else 0
        requirement = f"beside {key}, which covers class means too, it must be 0"
        check("method.sigma", sigma, not sigma, requirement)
        is_behind = False
        for callback in run.callbacks:
            if callback is self:
                is_behind = True
            elif isinstance(callback, Transform):
                must_be_behind = isinstance(callback, BEHIND)
                where = "behind" if must_be_behind else "before"
                requirement = f"it must be named {where} {key.removeprefix('callbacks.')}"
                check(
                    callback.config_key,
                    ...,
                    is_behind == must_be_behind,
                    requirement,
                )
                chooses = getattr(callback, "client", False) is True
                requirement = f"which layers a client sends tells of its data: false beside {key}"
                check(f"{callback.config_key}.client", True, not chooses, requirement)

    def noises(
        self,
        config: Config,
        method: Any,
        named: Sequence[str],
        samples: int,
    ) -> dict[str, Noise]:
        """Clip and noise of each of the kinds `named`.

        Raises:
            BadInput: a kind is not covered, or there is no such; delta is too large; no noise meets
                the target.
        """
        check_delta(f"{self.config_key}.delta", self.delta, samples)
        clips = self._of_kinds("clip", named)
        if self.noise is not None or not named:
            noise = self._of_kinds("noise", named)
        else:
            key = f"{self.config_key}.epsilon_target"
            target = float(self.epsilon_target or 0)
            times = uploads(config, method, named)
            one_for_all = calibrated(
                lambda noise: [Mechanism(noise, n) for n in times],
                target,
                self.delta,
                key,
            )
            noise = dict.fromkeys(named, one_for_all)
        return {kind: Noise(clips[kind], noise[kind]) for kind in named}

    def _of_kinds(
        self,
        argument: str,
        named: Sequence[str],
    ) -> dict[str, float]:
        value = getattr(self, argument)
        if not isinstance(value, dict):
            return {name: float(value) for name in named}
        key = f"{self.config_key}.{argument}"
        listed = ", ".join(named) or "nothing"
        for name in value:
            problem = "scores are computed on clients' own test data and published as they are"
            requirement = f"{problem}: no noise covers them; kinds are {listed}"
            check(key, name, name not in SCORES, requirement)
            check(
                key,
                name,
                name in named,
                f"clients upload no such kind; they upload {listed}",
            )
        for name in named:
            requirement = f"clients also upload {name}, which would be unprotected: give {listed}"
            check(key, value, name in value, requirement)
        return {name: float(value[name]) for name in named}

    def planned(
        self,
        config: Config,
        method: Any,
        sends_model: bool,
        sizes: Sequence[int],
    ) -> dict[str, Any]:
        """What the summary will have at most, before the run."""
        named = kinds(method, sends_model=sends_model)
        self._noises = self.noises(config, method, named, sum(sizes))
        return self._report([uploads(config, method, named)])

    # ---------------------------------------------------------------- in a round

    def init_client(self, run: RunContext) -> Tensors:
        """How many uploads of each kind have left the client, and their noise."""
        count = len(kinds_of(run))
        return {
            UPLOADS: torch.zeros(count, dtype=torch.int64),
            NOISE: torch.zeros(count, dtype=torch.float64),
        }

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Bound, add noise, and count."""

        def draws(kind: str) -> torch.Generator:
            if self.reproducible:
                return client.generator(f"privacy {kind}")
            return unrepeatable()

        sent_kinds = protect(client, payload, self._noises, draws)
        counted = torch.tensor([kind in sent_kinds for kind in self._noises], dtype=torch.int64)
        client.memory[UPLOADS] = client.memory[UPLOADS] + counted
        noise = [noise.multiplier for noise in self._noises.values()]
        client.memory[NOISE] = torch.tensor(noise, dtype=torch.float64)

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """Add epsilon so far: each client's to its row, the largest to the round's metrics."""
        counts = self._counts(run)
        for row in record.clients:
            row["privacy_epsilon"] = self._epsilon(counts[int(row["client"])])
        epsilons = map(self._epsilon, set(counts.values()))
        record.metrics["privacy_epsilon"] = max(epsilons, default=0.0)

    def _counts(self, run: RunContext) -> dict[int, tuple[int, ...]]:
        """How many uploads of each kind have left each client."""
        of_rank = {c: tuple(s.memory[UPLOADS].tolist()) for c, s in run.states.items()}
        return run.processes.gather_by_client(of_rank)

    def _epsilon(
        self,
        times: Sequence[int],
        *,
        replace_one: bool = False,
    ) -> float:
        """Epsilon of so many uploads of each kind."""
        kinds = zip(self._noises.values(), times, strict=True)
        mechanisms = [Mechanism(noise.multiplier, n) for noise, n in kinds]
        return epsilon(mechanisms, self.delta, replace_one=replace_one)

    # ---------------------------------------------------------------- at the end

    def summarize(self, run: RunContext) -> Mapping[str, Any]:
        """Epsilon of the client with the largest, its delta and unit, and what it covers."""
        return self._report(list(set(self._counts(run).values())))

    def _report(self, counts: Sequence[Sequence[int]]) -> dict[str, Any]:
        largest = max(counts, key=self._epsilon, default=())
        covered = ", ".join(self._noises) or "nothing is uploaded"
        report = {
            "privacy_epsilon": self._epsilon(largest) if largest else 0.0,
            "privacy_epsilon_replace_one": 0.0,
            "privacy_delta": self.delta,
            "privacy_unit": "client",
            "privacy_mechanism": "local",
            "privacy_uploads": max((n for times in counts for n in times), default=0),
            "privacy_covers": f"uploads of a client ({covered}) against the server, other clients "
            f"and readers of the global model; not the number of its samples, its losses and "
            f"scores, other tables, its personal model, {INPUTS}",
        }
        if largest:
            report["privacy_epsilon_replace_one"] = self._epsilon(largest, replace_one=True)
        for kind, noise in self._noises.items():
            report[f"privacy_clip_{kind}"] = noise.clip
            report[f"privacy_noise_{kind}"] = noise.multiplier
        return report


def check_account(run: RunContext, key: str) -> None:
    """Raise `BadInput` where the part of a run `key` cannot account for its privacy: dp-accounting
    is missing, another part accounts for it, or clients join later."""
    require("dp", key, ..., "its epsilon is computed by that package")
    first, *others = sorted(c.config_key for c in run.callbacks if getattr(c, "accounts", False))
    requirement = f"keep one of it and {', '.join(others)}: each accounts for the whole run"
    check(first, ..., not others, requirement)
    share = run.config.data.held_out_clients
    requirement = f"clients that join later are not accounted by {key}: set it to 0"
    check("data.held_out_clients", share, not share, requirement)


def check_noise_stays(
    key: str,
    value: Any,
    before: Sequence[float],
    now: Sequence[float],
) -> None:
    """Raise `BadInput`, for `key`, unless a resumed run has the noise that it began with."""
    is_same = all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(before, now, strict=True))
    requirement = f"the run began with noise {before}, and now it would be {now}: begin a new run"
    check(key, value, is_same, requirement)


def uploads(
    config: Config,
    method: Any,
    named: Sequence[str],
) -> list[int]:
    """How many messages of each kind the client with most rounds uploads in the run, at most."""
    most = max(rounds_of(config, method).values(), default=0)
    once = {b.kind: b.once for b in method.beside().values()}
    return [min(1, most) if once.get(kind, False) else most for kind in named]


def rounds_of(config: Config, method: Any) -> Counter[int]:
    """In how many rounds of the run each client takes part."""
    rounds: Counter[int] = Counter()
    for t in range(1, config.federation.rounds + 1):
        everyone = t == 1 and method.traits.everyone_first
        rounds.update(range(config.clients) if everyone else cohort_of(config, t))
    return rounds

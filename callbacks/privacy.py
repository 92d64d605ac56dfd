"""Differential privacy of uploads: each client clips them and adds noise (`localprivacy`)."""

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
from fl_lightning.privacy.mechanism import Noise, kinds_of_method, kinds_of_run, protect

UPLOADS, NOISE = "privacy.uploads", "privacy.noise"
"""Tensors of a client's memory: its number of uploads of each kind, and the noise of each kind."""
BEHIND = (Quantize, TopK, NormBound, KeepUploads, BlurRelation)
"""Transforms that run after the noise: they use only the noisy upload and what the server knows
anyway."""
INPUTS = (
    "how inputs are read: what they are imputed, scaled and normalised by, tokens, values of "
    "columns, class names"
)
"""Parts of the inputs that all clients' training data decide without noise; every exported model
holds them."""
SCORES = ("accuracy", "evaluation", "loss", "metrics", "scores", "test", "validation")
"""Names that users may give as kinds of uploads, but which no noise covers."""


@dataclass
class LocalPrivacy(Transform, Observer):
    """Each client clips all that it uploads and adds noise: differential privacy against the server
    and all others.

    The unit of privacy is a client with all of its data: epsilon compares runs with and without the
    client's contribution to its uploads, composed over the rounds in which it took part, by
    dp-accounting's privacy loss distributions. Nothing that the server or other clients do with
    uploads afterwards raises epsilon. The tensors of an upload are of one or more kinds: the model,
    a further vector of the method, a table such as class means. Each kind has its own clip and
    noise.

    Args:
        clip: the greatest L2 norm of an upload, one for all kinds or `{model: 1.0, class_means:
            0.5}`.
        noise: standard deviation of the noise on each number, in multiples of `clip`, one for all
            kinds or one for each.
        epsilon_target: in place of `noise`: epsilon of the client with the most rounds, for which
            the least sufficient noise is computed, the same for every kind.
        delta: the delta at which epsilon is given; below 1 / number of all training samples. 1e-5:
            usual in the field.
        reproducible: noise is drawn from (seed, client, round, kind): equal runs are bit-identical,
            and whoever knows the seed can subtract the noise. false: from the operating system's
            random numbers, which nobody can repeat.
    """

    changes_upload = client_memory = further_vectors = deployed = True
    accounts = True
    """Whether it accounts for the privacy of the whole run; then no method reports an epsilon of a
    part."""

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
        """Raise `BadInput` if a part of an upload cannot be protected, or a resumed run would
        change the noise."""
        check_account(run, self.config_key)
        self._check_others(run)
        samples = sum(run.data.train_sizes)
        self._noises = self.noises(run.config, run.method, kinds_of_run(run), samples)
        now = [noise.multiplier for noise in self._noises.values()]
        of_this_rank = [
            s.memory[NOISE].tolist() for s in run.states.values() if s.memory[UPLOADS].any()
        ]
        key = f"{self.config_key}.epsilon_target"
        for of_rank in run.processes.gather_objects(of_this_rank):
            for before in of_rank:
                check_noise_stays(key, self.epsilon_target, before, now)

    def _check_others(self, run: RunContext) -> None:
        """Raise `BadInput` for a method or callback that reveals more than the noisy upload, or
        changes what is accounted for."""
        key = self.config_key
        name = run.method_name
        for upload, beside in run.method.beside().items():
            problem = f"its uploads hold {upload} ({beside.description})"
            cure = "choose another --method, such as fedavg"
            requirement = f"{problem}, which clipping and noise cannot protect; {cure}"
            check(key, name, beside.values is not None, requirement)
        sigma = getattr(run.method, "sigma", 0) if name == "fedhkd" else 0
        requirement = f"{key} already adds noise to class means; set it to 0"
        check("method.sigma", sigma, not sigma, requirement)
        is_behind = False
        for callback in run.callbacks:
            if callback is self:
                is_behind = True
            elif isinstance(callback, Transform):
                must_be_behind = isinstance(callback, BEHIND)
                where = "after" if must_be_behind else "before"
                requirement = f"it must be named {where} {key.removeprefix('callbacks.')}"
                check(
                    callback.config_key,
                    ...,
                    is_behind == must_be_behind,
                    requirement,
                )
                chooses = getattr(callback, "client", False) is True
                problem = "the layers that a client chooses to send reveal its data"
                requirement = f"{problem}; set it to false beside {key}"
                check(f"{callback.config_key}.client", True, not chooses, requirement)

    def noises(
        self,
        config: Config,
        method: Any,
        kinds: Sequence[str],
        samples: int,
    ) -> dict[str, Noise]:
        """Return clip and noise of each kind.

        Args:
            config: the run's config.
            method: the run's method.
            kinds: the kinds that clients upload.
            samples: number of training samples of all clients, which bounds delta.

        Raises:
            BadInput: `clip` or `noise` lacks a kind, or names another; delta is too large; no noise
                meets the target.
        """
        check_delta(f"{self.config_key}.delta", self.delta, samples)
        clips = self._of_kinds("clip", kinds)
        if self.noise is not None or not kinds:
            noise = self._of_kinds("noise", kinds)
        else:
            key = f"{self.config_key}.epsilon_target"
            target = float(self.epsilon_target or 0)
            times = most_uploads(config, method, kinds)
            one_for_all = calibrated(
                lambda noise: [Mechanism(noise, n) for n in times],
                target,
                self.delta,
                key,
            )
            noise = dict.fromkeys(kinds, one_for_all)
        return {kind: Noise(clips[kind], noise[kind]) for kind in kinds}

    def _of_kinds(
        self,
        argument: str,
        kinds: Sequence[str],
    ) -> dict[str, float]:
        value = getattr(self, argument)
        if not isinstance(value, dict):
            return {kind: float(value) for kind in kinds}
        key = f"{self.config_key}.{argument}"
        listed = ", ".join(kinds) or "nothing"
        for name in value:
            problem = "scores are published without noise, and none can be added"
            requirement = f"{problem}; clients upload {listed}"
            check(key, name, name not in SCORES, requirement)
            requirement = f"clients upload nothing of this name; they upload {listed}"
            check(key, name, name in kinds, requirement)
        for kind in kinds:
            requirement = f"clients also upload {kind}, which would be unprotected; give {listed}"
            check(key, value, kind in value, requirement)
        return {kind: float(value[kind]) for kind in kinds}

    def planned(
        self,
        config: Config,
        method: Any,
        sends_model: bool,
        sizes: Sequence[int],
    ) -> dict[str, Any]:
        """Return the privacy entries of the summary before the run, with the epsilon that it
        reaches at most.

        Args:
            config: the run's config.
            method: the run's method.
            sends_model: whether clients upload models.
            sizes: number of training samples of each client.
        """
        kinds = kinds_of_method(method, sends_model=sends_model)
        self._noises = self.noises(config, method, kinds, sum(sizes))
        return self._report([most_uploads(config, method, kinds)])

    # ---------------------------------------------------------------- in a round

    def init_client(self, run: RunContext) -> Tensors:
        """Return the client's number of uploads of each kind, and their noise."""
        count = len(kinds_of_run(run))
        return {
            UPLOADS: torch.zeros(count, dtype=torch.int64),
            NOISE: torch.zeros(count, dtype=torch.float64),
        }

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Clip the upload, add noise, and count it."""

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
        """Return the number of uploads of each kind that each client has sent."""
        of_rank = {c: tuple(s.memory[UPLOADS].tolist()) for c, s in run.states.items()}
        return run.processes.gather_by_client(of_rank)

    def _epsilon(
        self,
        times: Sequence[int],
        *,
        replace_one: bool = False,
    ) -> float:
        """Return epsilon of `times` uploads of each kind."""
        kinds = zip(self._noises.values(), times, strict=True)
        mechanisms = [Mechanism(noise.multiplier, n) for noise, n in kinds]
        return epsilon(mechanisms, self.delta, replace_one=replace_one)

    # ---------------------------------------------------------------- at the end

    def summarize(self, run: RunContext) -> Mapping[str, Any]:
        """Return the summary's entries on privacy: the largest epsilon of any client, its delta and
        unit, and what it covers."""
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
    """Raise `BadInput` if the callback with the key `key` cannot account for the run's privacy:
    dp-accounting is missing, another callback accounts for it, or clients join later."""
    require("dp", key, ..., "its epsilon is computed by that package")
    first, *others = sorted(c.config_key for c in run.callbacks if getattr(c, "accounts", False))
    requirement = f"{', '.join(others)} also accounts for the whole run; keep one of them"
    check(first, ..., not others, requirement)
    share = run.config.data.held_out_clients
    requirement = f"{key} does not account for clients that join later; set it to 0"
    check("data.held_out_clients", share, not share, requirement)


def check_noise_stays(
    key: str,
    value: Any,
    before: Sequence[float],
    now: Sequence[float],
) -> None:
    """Raise `BadInput` for `key` unless a resumed run has the noise that it began with."""
    is_same = all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(before, now, strict=True))
    problem = f"the run began with noise {before}, and now it would be {now}"
    requirement = f"{problem}; resume with its own configuration, or begin a new run"
    check(key, value, is_same, requirement)


def most_uploads(
    config: Config,
    method: Any,
    kinds: Sequence[str],
) -> list[int]:
    """Return the greatest number of uploads of each kind that one client sends in the run."""
    most = max(rounds_of(config, method).values(), default=0)
    once = {b.kind: b.once for b in method.beside().values()}
    return [min(1, most) if once.get(kind, False) else most for kind in kinds]


def rounds_of(config: Config, method: Any) -> Counter[int]:
    """Return the number of rounds in which each client takes part."""
    rounds: Counter[int] = Counter()
    for t in range(1, config.federation.rounds + 1):
        everyone = t == 1 and method.traits.everyone_first
        rounds.update(range(config.clients) if everyone else cohort_of(config, t))
    return rounds

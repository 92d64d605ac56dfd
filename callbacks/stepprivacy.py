"""Differential privacy of single samples: what `optimizer.privacy` accounts for, and what it
refuses."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from fl_lightning.callbacks.base import Observer, Transform
from fl_lightning.callbacks.privacy import (
    BEHIND,
    INPUTS,
    check_account,
    check_noise_stays,
    rounds_of,
)
from fl_lightning.configuration.config import Config, check
from fl_lightning.core import Client, ModelGroup, Payload, Phase, RoundRecord, RunContext, Tensors
from fl_lightning.foundation.device import rng_restored
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.rng import generator, unrepeatable
from fl_lightning.models import has_own_step
from fl_lightning.privacy.accounting import (
    Mechanism,
    calibrated,
    check_delta,
    epsilon,
    sampling_rate,
)
from fl_lightning.privacy.steps import Private, clipped_sum

STEPS, NOISE = "privacy.steps", "privacy.step_noise"
"""Tensors: of a client's memory, the private steps that it has taken; of the server's, the noise of
the run."""
KEY = "optimizer.privacy"


@dataclass
class StepPrivacy(Transform, Observer):
    """Computes epsilon for `optimizer.privacy`, which adds this callback; do not name it yourself.

    The unit is a sample of a client. Each step is a Gaussian mechanism on a Poisson sample of the
    client's training samples; epsilon is of all steps that the client has taken, by dp-accounting's
    privacy loss distributions.
    """

    client_memory = True
    accounts = True
    """As of `LocalPrivacy`."""

    _noise = 0.0

    @property
    def config_key(self) -> str:
        """Of what it accounts for: nobody names the callback."""
        return KEY

    # ---------------------------------------------------------------- before the first round

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` where something of a sample passes the noise by, or a resumed run had
        other noise."""
        check_account(run, KEY)
        self._check(run)
        self._noise = self._multiplier(run.config, run.method, run.data.train_sizes)
        memory = run.server.memory
        before = [float(memory.get(NOISE, self._noise))]
        configured = run.config.optimizer.privacy.noise
        check_noise_stays(f"{KEY}.noise", configured, before, [self._noise])
        memory[NOISE] = torch.tensor(self._noise, dtype=torch.float64)

    def _check(self, run: RunContext) -> None:
        """Raise `BadInput` for parts of the run that tell more of a sample than the noisy steps
        do."""
        for group in run.groups:
            _check_model(run, group)
        judged = (run.judge, *(run.config.evaluation.models or ()))
        problem = f"fine-tuned copies take steps that {KEY} does not account for"
        requirement = f"{problem}: use before, after or global"
        check("evaluation.judge", run.judge, "finetuned" not in judged, requirement)
        precision = run.config.fabric.precision
        requirement = f"{KEY} bounds gradients in 32 bits or more: use 32-true or 64-true"
        check(
            "fabric.precision",
            precision,
            precision in ("32-true", "64-true"),
            requirement,
        )
        names = ", ".join(kind.__name__.lower() for kind in BEHIND)
        requirement = f"beside {KEY} nothing else may look at samples: only {names} can run with it"
        for callback in run.callbacks:
            if isinstance(callback, Transform) and callback is not self:
                check(
                    callback.config_key,
                    ...,
                    isinstance(callback, BEHIND),
                    requirement,
                )

    def _multiplier(
        self,
        config: Config,
        method: Any,
        sizes: Sequence[int],
    ) -> float:
        """The noise of the run.

        Raises:
            BadInput: the method is not covered; delta is too large; no noise meets the target.
        """
        privacy = config.optimizer.privacy
        requirement = (
            "callbacks.stepprivacy accounts for it, and it is off: give its clip and noise"
        )
        check(KEY, ..., privacy.on, requirement)
        if (why := refusal(method)) is not None:
            problem = f"it {why}, which noise on steps does not cover"
            requirement = f"{problem}; choose another --method, such as fedavg"
            raise BadInput(KEY, type(method).__name__.lower(), requirement)
        delta = privacy.delta
        check_delta(f"{KEY}.delta", delta, sum(sizes))
        if privacy.noise is not None:
            return privacy.noise
        key = f"{KEY}.epsilon_target"
        target = float(privacy.epsilon_target or 0)
        clients = largest(_planned(config, method, sizes))
        check(key, target, bool(clients), "no client takes a step in this run")
        clients.sort(key=lambda client: -client[0] * client[1] ** 0.5)  # about how epsilon grows
        noise = 0.0
        for rate, steps in clients:
            if not noise or epsilon([Mechanism(noise, steps, rate)], delta) > target:
                noise = calibrated(
                    partial(_one_mechanism, steps, rate),
                    target,
                    delta,
                    key,
                )
        return noise

    def planned(
        self,
        config: Config,
        method: Any,
        sends_model: bool,
        sizes: Sequence[int],
    ) -> dict[str, Any]:
        """What the summary will have at most, before the run."""
        self._noise = self._multiplier(config, method, sizes)
        return self._report(config, _planned(config, method, sizes))

    # ---------------------------------------------------------------- in a round

    def init_client(self, run: RunContext) -> Tensors:
        """How many steps the client has taken."""
        return {STEPS: torch.zeros((), dtype=torch.int64)}

    def on_phase(
        self,
        client: Client,
        phase: Phase,
    ) -> Private:
        """How the next phase of `client` is protected.

        Raises:
            BadInput: it trains on other samples, by another loss, or by steps of its own; nothing
                accounts for it.
        """
        run = client.run
        privacy = run.config.optimizer.privacy
        parts = {name: getattr(phase, name) for name in ("part", "targets", "batch_size", "step")}
        for name, part in (parts | {"loss": phase.objective.loss}).items():
            problem = f"a phase of it has a {name} of its own"
            requirement = f"{problem}, which noise on steps does not cover"
            check(KEY, run.method_name, part is None, requirement)

        def draws(purpose: str, step: int) -> torch.Generator:
            if privacy.reproducible:
                ids = client.id, client.round, step
                return generator(run.config.seed, f"private {purpose}", *ids)
            return unrepeatable()

        steps = sum(fit.steps for fit in client.fits)
        return Private(
            float(privacy.clip or 0),
            float(run.server.memory[NOISE]),
            steps,
            draws,
        )

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Count the steps.

        Raises:
            BadInput: they are more than the method's `private_phases` say.
        """
        method = client.run.method
        steps = sum(fit.steps for fit in client.fits)
        phases = method.private_phases()
        most = 0
        if not isinstance(phases, str):
            most = steps_of(client.run.config, phases, len(client.data.train))
        requirement = f"its private_phases say {most} steps in a round, and it took {steps}"
        check(
            f"{type(method).__name__}.private_phases",
            phases,
            steps <= most,
            requirement,
        )
        client.memory[STEPS] = client.memory[STEPS] + steps

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """Epsilon so far, of the client with the largest."""
        record.metrics["privacy_epsilon"] = self._epsilon(run.config, _taken(run))

    def summarize(self, run: RunContext) -> Mapping[str, Any]:
        """Epsilon of the client with the largest, its delta and unit, and what it covers."""
        return self._report(run.config, _taken(run))

    # ---------------------------------------------------------------- epsilon

    def _epsilon(
        self,
        config: Config,
        taken: Iterable[tuple[float, int]],
    ) -> float:
        delta = config.optimizer.privacy.delta
        return max(
            (epsilon([Mechanism(self._noise, n, q)], delta) for q, n in largest(taken)), default=0.0
        )

    def _report(
        self,
        config: Config,
        taken: Sequence[tuple[float, int]],
    ) -> dict[str, Any]:
        privacy = config.optimizer.privacy
        return {
            "privacy_epsilon": self._epsilon(config, taken),
            "privacy_delta": privacy.delta,
            "privacy_unit": "sample",
            "privacy_mechanism": "steps",
            "privacy_steps": max((n for _, n in taken), default=0),
            "privacy_sampling": max((q for q, _ in taken), default=0.0),
            "privacy_clip_gradient": privacy.clip,
            "privacy_noise_gradient": self._noise,
            "privacy_covers": "a training sample, against the server, other clients and readers of "
            "global and "
            "personal "
            "models; not how many samples a client has, losses and scores in tables, validation "
            "and test samples, "
            f"{INPUTS}",
        }


def refusal(method: Any) -> str | None:
    """What `method` makes of samples beside private steps, in words; None: nothing."""
    phases = method.private_phases()
    if isinstance(phases, str):
        return phases
    kinds = [entry.words for entry in method.beside().values() if entry.values != "public"]
    return f"uploads {kinds[0]}" if kinds else None


def largest(lengths: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """Of (sampling rate, steps) those that no other exceeds in both: the largest epsilon is one of
    theirs."""
    clients: list[tuple[float, int]] = []
    most = 0
    for rate, steps in sorted(lengths, reverse=True):
        if steps > most:
            most = steps
            clients.append((rate, steps))
    return clients


def steps_of(
    config: Config,
    phases: Sequence[float | None],
    samples: int,
) -> int:
    """Steps that a client with so many samples takes in a round, at most."""
    federation = config.federation
    per_epoch = math.ceil(samples / federation.batch_size)
    total = 0
    if not samples:
        return total
    for epochs in phases:
        epochs = federation.local_epochs if epochs is None else epochs
        if epochs is None:
            total += federation.local_steps or 0
        elif epochs:
            total += max(1, round(epochs * per_epoch))
    return total


def _planned(
    config: Config,
    method: Any,
    sizes: Sequence[int],
) -> list[tuple[float, int]]:
    """Sampling rate and steps of each client in the run, at most."""
    phases = method.private_phases()
    rounds = rounds_of(config, method)
    if isinstance(phases, str):
        return []
    size = config.federation.batch_size
    return [
        (sampling_rate(n, size), rounds[c] * steps_of(config, phases, n))
        for c, n in enumerate(sizes)
    ]


def _taken(run: RunContext) -> list[tuple[float, int]]:
    """Sampling rate and steps so far of each client that has taken part."""
    steps = run.processes.gather_by_client({c: int(s.memory[STEPS]) for c, s in run.states.items()})
    size = run.config.federation.batch_size
    return [(sampling_rate(run.data.train_sizes[c], size), n) for c, n in steps.items()]


def _check_model(run: RunContext, group: ModelGroup) -> None:
    """Raise `BadInput` for a model that tells of samples otherwise than by its gradients, or whose
    gradients of single samples torch.func cannot find."""
    model = group.module.model
    for name, part in model.named_modules():
        tracks = isinstance(part, _NormBase) and part.track_running_stats
        problem = f"its {name} ({type(part).__name__}) keeps statistics of samples"
        requirement = f"{problem}, and no noise covers them: use a model with GroupNorm"
        check(
            "model",
            group.name,
            not tracks or name in group.layout.still,
            requirement,
        )
    requirement = f"{KEY} bounds samples in the task loss, and would pass its training_step by"
    check("model", group.name, not has_own_step(model), requirement)
    for client in run.at_home(group.members)[:1]:
        batch = run.data.example(client, run.device, run.dtype)
        try:
            with rng_restored(run.device):
                clipped_sum(group.module, batch, 1.0)
        except Exception as error:  # whatever a user's forward pass does that torch.func cannot
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            requirement = f"torch.func cannot find gradients of single samples ({reason})"
            raise BadInput("model", group.name, requirement) from error


def _one_mechanism(
    count: int,
    rate: float,
    noise: float,
) -> list[Mechanism]:
    """The mechanism of `count` steps that take samples at `rate`."""
    return [Mechanism(noise, count, rate)]

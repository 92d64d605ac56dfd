"""Differential privacy of single samples: the callback that accounts for `optimizer.privacy`
(DP-SGD) and refuses settings that it does not cover."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
"""Tensors: in a client's memory, the number of its private steps; in the server's, the noise of the
run."""
KEY = "optimizer.privacy"


@dataclass
class StepPrivacy(Transform, Observer):
    """Computes epsilon for `optimizer.privacy`, which adds this callback by itself; do not name it
    in a configuration.

    The unit is a sample of a client. Each step is a Gaussian mechanism on a Poisson sample of the
    client's training samples; epsilon is of all steps that the client has taken, by dp-accounting's
    privacy loss distributions.
    """

    client_memory = True
    accounts = True
    """Whether it accounts for the privacy of the whole run."""

    _noise = 0.0

    @property
    def config_key(self) -> str:
        """Return `optimizer.privacy`, the key that users set."""
        return KEY

    # ---------------------------------------------------------------- before the first round

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` if samples are used outside the private steps, or a resumed run would
        change the noise."""
        check_account(run, KEY)
        self._check(run)
        self._noise = self._multiplier(run.config, run.method, run.data.train_sizes)
        memory = run.server.memory
        before = [float(memory.get(NOISE, self._noise))]
        configured = run.config.optimizer.privacy.noise
        check_noise_stays(f"{KEY}.noise", configured, before, [self._noise])
        memory[NOISE] = torch.tensor(self._noise, dtype=torch.float64)

    def _check(self, run: RunContext) -> None:
        """Raise `BadInput` for a model, judge, precision or callback that reveals more of a sample
        than the noisy steps do."""
        for group in run.groups:
            _check_model(run, group)
        judged = (run.judge, *(run.config.evaluation.models or ()))
        problem = f"fine-tuned copies take steps that {KEY} does not account for"
        requirement = f"{problem}; use before, after or global"
        check("evaluation.judge", run.judge, "finetuned" not in judged, requirement)
        precision = run.config.fabric.precision
        requirement = f"{KEY} clips gradients in 32 bits or more; use 32-true or 64-true"
        is_full = precision in ("32-true", "64-true")
        check("fabric.precision", precision, is_full, requirement)
        names = ", ".join(kind.__name__.lower() for kind in BEHIND)
        problem = f"beside {KEY} no other callback may use samples"
        requirement = f"{problem}; remove it (only {names} can run with {KEY})"
        for callback in run.callbacks:
            if isinstance(callback, Transform) and callback is not self:
                check(callback.config_key, ..., isinstance(callback, BEHIND), requirement)

    def _multiplier(
        self,
        config: Config,
        method: Any,
        sizes: Sequence[int],
    ) -> float:
        """Return the standard deviation of the run's noise, in multiples of the clip.

        Raises:
            BadInput: the method is not covered; delta is too large; no noise meets the target.
        """
        privacy = config.optimizer.privacy
        requirement = "callbacks.stepprivacy needs it; give its clip and noise"
        check(KEY, ..., privacy.on, requirement)
        if (why := why_uncovered(method)) is not None:
            problem = f"it {why}, which noise on steps does not cover"
            requirement = f"{problem}; choose another --method, such as fedavg"
            raise BadInput(KEY, type(method).__name__.lower(), requirement)
        delta = privacy.delta
        check_delta(f"{KEY}.delta", delta, sum(sizes))
        if privacy.noise is not None:
            return privacy.noise
        key = f"{KEY}.epsilon_target"
        target = float(privacy.epsilon_target or 0)
        clients = undominated(_planned(config, method, sizes))
        requirement = "no client takes a step in this run; give it local epochs or steps"
        check(key, target, bool(clients), requirement)
        clients.sort(key=lambda client: -client[0] * client[1] ** 0.5)  # about how epsilon grows
        noise = 0.0
        for rate, steps in clients:
            if not noise or epsilon([Mechanism(noise, steps, rate)], delta) > target:

                def with_noise(noise: float, n: int = steps, q: float = rate) -> list[Mechanism]:
                    return [Mechanism(noise, n, q)]

                noise = calibrated(with_noise, target, delta, key)
        return noise

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
        self._noise = self._multiplier(config, method, sizes)
        return self._report(config, _planned(config, method, sizes))

    # ---------------------------------------------------------------- in a round

    def init_client(self, run: RunContext) -> Tensors:
        """Return the number of private steps that the client has taken."""
        return {STEPS: torch.zeros((), dtype=torch.int64)}

    def on_phase(
        self,
        client: Client,
        phase: Phase,
    ) -> Private:
        """Return the protection of the next phase of `client`.

        Raises:
            BadInput: the phase has its own samples, targets, batch size, loss or steps, which
                nothing accounts for.
        """
        run = client.run
        privacy = run.config.optimizer.privacy
        parts = {name: getattr(phase, name) for name in ("part", "targets", "batch_size", "step")}
        for name, part in (parts | {"loss": phase.objective.loss}).items():
            problem = f"one of its phases has its own {name}, which noise on steps does not cover"
            requirement = f"{problem}; choose another --method, such as fedavg"
            check(KEY, run.method_name, part is None, requirement)

        def draws(purpose: str, step: int) -> torch.Generator:
            if privacy.reproducible:
                ids = client.id, client.round, step
                return generator(run.config.seed, f"private {purpose}", *ids)
            return unrepeatable()

        steps = sum(fit.steps for fit in client.fits)
        noise = float(run.server.memory[NOISE])
        return Private(float(privacy.clip or 0), noise, steps, draws)

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Add the round's steps to the client's count.

        Raises:
            BadInput: there are more than the method's `private_phases` allow.
        """
        method = client.run.method
        steps = sum(fit.steps for fit in client.fits)
        phases = method.private_phases()
        most = 0
        if not isinstance(phases, str):
            most = most_steps(client.run.config, phases, len(client.data.train))
        requirement = f"it allows {most} steps in a round, and a client took {steps}; correct it"
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
        """Add the largest epsilon of any client so far to the round's metrics."""
        record.metrics["privacy_epsilon"] = self._epsilon(run.config, _taken(run))

    def summarize(self, run: RunContext) -> Mapping[str, Any]:
        """Return the summary's entries on privacy: the largest epsilon of any client, its delta and
        unit, and what it covers."""
        return self._report(run.config, _taken(run))

    # ---------------------------------------------------------------- epsilon

    def _epsilon(
        self,
        config: Config,
        taken: Iterable[tuple[float, int]],
    ) -> float:
        delta = config.optimizer.privacy.delta
        epsilons = [epsilon([Mechanism(self._noise, n, q)], delta) for q, n in undominated(taken)]
        return max(epsilons, default=0.0)

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
            "global and personal models; not how many samples a client has, losses and scores in "
            f"tables, validation and test samples, {INPUTS}",
        }


def why_uncovered(method: Any) -> str | None:
    """Return how `method` uses samples outside the private steps, in words that follow "it"; None:
    it does not."""
    phases = method.private_phases()
    if isinstance(phases, str):
        return phases
    kinds = [entry.description for entry in method.beside().values() if entry.values != "public"]
    return f"uploads {kinds[0]}" if kinds else None


def undominated(lengths: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the (sampling rate, steps) pairs that no other pair exceeds in both; the client with
    the largest epsilon has one of these pairs."""
    clients: list[tuple[float, int]] = []
    most = 0
    for rate, steps in sorted(lengths, reverse=True):
        if steps > most:
            most = steps
            clients.append((rate, steps))
    return clients


def most_steps(
    config: Config,
    phases: Sequence[float | None],
    samples: int,
) -> int:
    """Return the greatest number of steps in a round of a client with `samples` training samples.

    Args:
        config: the run's config.
        phases: epochs of each of the method's phases; None: the run's local epochs or steps.
        samples: number of the client's training samples.
    """
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
    """Return each client's sampling rate and its greatest number of steps in the run."""
    phases = method.private_phases()
    rounds = rounds_of(config, method)
    if isinstance(phases, str):
        return []
    size = config.federation.batch_size
    return [
        (sampling_rate(n, size), rounds[c] * most_steps(config, phases, n))
        for c, n in enumerate(sizes)
    ]


def _taken(run: RunContext) -> list[tuple[float, int]]:
    """Return the sampling rate, and the steps so far, of each client that has taken part."""
    steps = run.processes.gather_by_client({c: int(s.memory[STEPS]) for c, s in run.states.items()})
    size = run.config.federation.batch_size
    return [(sampling_rate(run.data.train_sizes[c], size), n) for c, n in steps.items()]


def _check_model(run: RunContext, group: ModelGroup) -> None:
    """Raise `BadInput` for a model that uses samples otherwise than by its gradients, or whose
    per-sample gradients torch.func cannot compute."""
    model = group.module.model
    for name, part in model.named_modules():
        tracks = isinstance(part, _NormBase) and part.track_running_stats
        problem = f"its {name} ({type(part).__name__}) keeps statistics of samples"
        requirement = f"{problem}, and no noise covers them; use a model with GroupNorm"
        check(
            "model",
            group.name,
            not tracks or name in group.layout.still,
            requirement,
        )
    problem = f"{KEY} clips gradients of the task loss, and would not call its training_step"
    requirement = f"{problem}; use a model without one"
    check("model", group.name, not has_own_step(model), requirement)
    for client in run.at_home(group.members)[:1]:
        batch = run.data.example(client, run.device, run.dtype)
        try:
            with rng_restored(run.device):
                clipped_sum(group.module, batch, 1.0)
        except Exception as error:  # whatever a user's forward pass does that torch.func cannot
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            problem = f"torch.func cannot compute its per-sample gradients ({reason})"
            requirement = f"{problem}; use another model"
            raise BadInput("model", group.name, requirement) from error

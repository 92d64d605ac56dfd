"""The keys of `optimizer`, and of its DP-SGD (`optimizer.privacy`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from fl_lightning.configuration.ranges import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ShareBelow1,
    check_ranges,
)
from fl_lightning.foundation.errors import check


@dataclass
class StepPrivacyConfig:
    """Differential privacy of each sample, step by step (DP-SGD: Abadi et al., CCS 2016); off
    unless a key is given."""

    clip: float | None = None
    """Clipping bound: greatest L2 norm of a sample's gradient in a step. Required with DP-SGD:
    noise without a bound protects nothing."""
    noise: float | None = None
    """Noise multiplier: standard deviation of the noise on the sum of a step's gradients, in units
    of `clip`."""
    epsilon_target: float | None = None
    """Epsilon that no client exceeds, in place of `noise`: the least noise for it is computed."""
    delta: float = 1e-5
    """Delta at which epsilon is given; below 1 / (number of all training samples). 1e-5:
    customary."""
    reproducible: bool = True
    """Draw batches and noise from (seed, client, round, step): runs are reproducible, but anyone
    who knows the seed can subtract the noise. false: the operating system's random numbers."""

    @property
    def on(self) -> bool:
        """Whether DP-SGD is on: any key differs from its default."""
        return self != StepPrivacyConfig()

    def validate(self) -> None:
        """Raise `BadInput` unless the keys are complete and in their bounds (`check_noise`)."""
        check_noise("optimizer.privacy", self.clip, self.noise, self.epsilon_target, self.delta)


def check_noise(
    key: str,
    clip: Any,
    noise: Any,
    target: float | None,
    delta: float,
) -> None:
    """Raise `BadInput` unless `clip` is given, exactly one of `noise` and `target` is given, all
    are positive, and `delta` is in (0, 1).

    Args:
        key: prefix of the keys in errors.
        clip: clipping bound, or a mapping with one for each kind of upload (`Beside.kind`).
        noise: noise multiplier, or such a mapping; None: it is computed from `target`.
        target: `epsilon_target`.
        delta: of (epsilon, delta).
    """
    requirement = "it must be given: noise without a bound protects nothing"
    check(f"{key}.clip", None, clip is not None, requirement)
    requirement = "give exactly one of noise and epsilon_target"
    check(f"{key}.noise", noise, (noise is None) != (target is None), requirement)
    positive = "it must be above 0"
    for name, value, requirement in (
        ("clip", clip, positive),
        (
            "noise",
            noise,
            f"{positive}: without noise there is no epsilon (callbacks.normbound bounds alone)",
        ),
        ("epsilon_target", target, positive),
    ):
        for number in value.values() if isinstance(value, dict) else [value]:
            is_positive = number is None or 0 < number < math.inf
            check(f"{key}.{name}", value, is_positive, requirement)
    check(f"{key}.delta", delta, 0 < delta < 1, "it must lie in (0, 1)")


@dataclass
class OptimizerConfig:
    """Local optimiser of a client. Its momentum is reset in each round unless `keep_state` is
    true."""

    name: Literal["sgd", "adam", "adamw", "module"] = "sgd"
    """`module`: the optimiser that a LightningModule returns from `configure_optimizers`; `lr`,
    `lr_decay`, `lr_step` and `weight_decay` here then have no effect. sgd: KAPC."""
    lr: NonNegativeFloat = 0.05
    """Learning rate. 0.05: our choice; accuracy is 0.6 to 1.7 points above that of KAPC's 0.01 on
    the digits (configs/digits.yaml)."""
    momentum: ShareBelow1 = 0.0
    """SGD's momentum. 0: KAPC mentions none."""
    nesterov: bool = False
    """Nesterov's form of momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 term for sgd and adam, decoupled for adamw. 0: KAPC mentions none."""
    clip_norm: PositiveFloat | None = None
    """Clip the gradient of a step to this norm; null: never."""
    lr_decay: PositiveFloat = 1.0
    """The learning rate of round t is `lr * lr_decay ** ((t - 1) // lr_step)`."""
    lr_step: PositiveInt = 1
    """Rounds between decays of the learning rate."""
    keep_state: bool = False
    """Keep each client's optimiser state from round to round (it is saved in checkpoints)."""
    privacy: StepPrivacyConfig = field(default_factory=StepPrivacyConfig)
    """DP-SGD, differential privacy of single samples; off unless one of its keys is given."""

    def __post_init__(self) -> None:
        """Turn a mapping given as `privacy` into a `StepPrivacyConfig`."""
        if isinstance(self.privacy, dict):
            self.privacy = StepPrivacyConfig(**self.privacy)

    def validate(self) -> None:
        """Raise `BadInput` for a value beyond its bounds, or that another key excludes."""
        check_ranges(self, "optimizer")
        is_sgd = self.name == "sgd"
        momentum = self.momentum
        requirement = f"{self.name} has no such argument: set it to 0, or use sgd"
        check("optimizer.momentum", momentum, is_sgd or not momentum, requirement)
        requirement = "it needs optimizer.momentum above 0"
        check("optimizer.nesterov", self.nesterov, not self.nesterov or momentum > 0, requirement)
        if self.privacy.on:
            self.privacy.validate()
            requirement = "optimizer.privacy works with sgd only: use sgd"
            check("optimizer.name", self.name, is_sgd, requirement)

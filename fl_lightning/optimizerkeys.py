"""The keys of a client's optimiser, and of the privacy of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from fl_lightning.errors import check
from fl_lightning.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, ShareBelow1, check_ranges


@dataclass
class StepPrivacyConfig:
    """Differential privacy of each sample, step by step (DP-SGD: Abadi et al., CCS 2016); off unless a key is given."""

    clip: float | None = None
    """Greatest L2 norm of a sample's gradient in a step. It must be given: noise without a bound protects nothing."""
    noise: float | None = None
    """Standard deviation of the noise on the sum of a step's gradients, in units of the clip."""
    epsilon_target: float | None = None
    """In place of noise: the least noise that keeps every client's epsilon there."""
    delta: float = 1e-5
    """At which epsilon is given; below one over all training samples. 1e-5: the field's habit."""
    reproducible: bool = True
    """Batches and noise are drawn for (seed, client, round, step): equal runs are equal to the bit, and who knows the
    seed can take the noise off. false: the operating system's random numbers."""

    @property
    def on(self) -> bool:
        """Whether anything is asked for."""
        return self != StepPrivacyConfig()

    def validate(self) -> None:
        """Raise `BadInput` for what no noise can make private."""
        check_noise("optimizer.privacy", self.clip, self.noise, self.epsilon_target, self.delta)


def check_noise(key: str, clip: Any, noise: Any, target: float | None, delta: float) -> None:
    """Raise `BadInput` for what no mechanism can have; `clip` and `noise`: a number, or one for each kind."""
    check(f"{key}.clip", None, clip is not None, "it must be given: noise without a bound protects nothing")
    one = (noise is None) != (target is None)
    check(f"{key}.noise", noise, one, "either noise or epsilon_target says how much noise there is")
    above = "it must be above 0"
    without = f"{above}: without noise there is no epsilon (callbacks.normbound bounds alone)"
    for name, value, says in (("clip", clip, above), ("noise", noise, without), ("epsilon_target", target, above)):
        for number in value.values() if isinstance(value, dict) else [value]:
            check(f"{key}.{name}", value, number is None or 0 < number < math.inf, says)
    check(f"{key}.delta", delta, 0 < delta < 1, "it must lie in (0, 1)")


@dataclass
class OptimizerConfig:
    """A client's local optimiser. Its momentum is cleared at each visit unless `keep_state`."""

    name: Literal["sgd", "adam", "adamw", "module"] = "sgd"
    """`module`: the optimiser that the model, a LightningModule, makes in `configure_optimizers`. sgd: KAPC."""
    lr: NonNegativeFloat = 0.05
    """Learning rate. 0.05: ours, 0.6 to 1.7 points above KAPC's 0.01 on the digits (configs/digits.yaml)."""
    momentum: ShareBelow1 = 0.0
    """SGD's momentum. KAPC states none."""
    nesterov: bool = False
    """Nesterov's form of momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 term for sgd and adam, decoupled for adamw. KAPC states none."""
    clip_norm: PositiveFloat | None = None
    """Clip the gradient of a step to this norm; null: never."""
    lr_decay: PositiveFloat = 1.0
    """The learning rate of round t is `lr * lr_decay ** ((t - 1) // lr_step)`."""
    lr_step: PositiveInt = 1
    """Rounds between decays of the learning rate."""
    keep_state: bool = False
    """Keep each client's optimiser state between its rounds (it moves and is saved with the client)."""
    privacy: StepPrivacyConfig = field(default_factory=StepPrivacyConfig)
    """Of each sample, step by step; off unless one of its keys is given."""

    def __post_init__(self) -> None:
        """A mapping that is given as `privacy` becomes a config, too."""
        if isinstance(self.privacy, dict):
            self.privacy = StepPrivacyConfig(**self.privacy)

    def validate(self) -> None:
        """Raise `BadInput` for a value that cannot work."""
        check_ranges(self, "optimizer")
        sgd, momentum = self.name == "sgd", self.momentum
        check("optimizer.momentum", momentum, sgd or not momentum, f"{self.name} takes none; it belongs to sgd")
        fine = not self.nesterov or momentum > 0
        check("optimizer.nesterov", self.nesterov, fine, "it needs optimizer.momentum above 0")
        if self.privacy.on:
            self.privacy.validate()
            check("optimizer.name", self.name, sgd, "optimizer.privacy clips and noises steps of sgd alone")

"""Optimisers of local training: plain SGD without wrappers, or any torch optimiser through
Fabric."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.wrappers import _FabricOptimizer
from torch import Tensor, nn

from fl_lightning.configuration.config import OptimizerConfig, check
from fl_lightning.foundation.errors import BadInput
from fl_lightning.training.kernels import clip_factor, direction
from fl_lightning.training.module import ClientModule


@dataclass(eq=False)
class FastSGD:
    """SGD by torch's operations on lists of tensors, without the wrappers of `torch.optim`, which
    cost more than a small model's step."""

    parameters: list[nn.Parameter]
    config: OptimizerConfig

    def __post_init__(self) -> None:
        self.reset()

    def reset(self, lr: float | None = None) -> None:
        """Prepare the training of another client: clear the momentum, and find out which parameters
        require a gradient now.

        Args:
            lr: learning rate; None: the configuration's.
        """
        config = self.config
        self.lr = config.lr if lr is None else lr
        self._plain = not (config.momentum or config.weight_decay or config.clip_norm)
        self._momenta: dict[int, Tensor] = {}
        self._trained = [k for k, p in enumerate(self.parameters) if p.requires_grad]
        self._targets: list[Tensor] = [self.parameters[k] for k in self._trained]

    def step(self, loss: Tensor, terms: Sequence[Tensor | None] | None = None) -> None:
        """Take a step, with clipping, momentum and weight decay as in torch.

        Args:
            terms: gradient of the objective's terms for each parameter, which is added to that of
                the loss (and overwritten); None: the objective has no terms.
        """
        config = self.config
        places = self._trained
        parameters = self._targets
        gradients: Sequence[Tensor | None] = [None] * len(places)
        if terms is None or loss.requires_grad:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        if terms is not None:
            gradients = _added([terms[k] for k in places], gradients)
        reached = [g for g in gradients if g is not None]
        if len(reached) < len(gradients):
            within = [k for k, g in enumerate(gradients) if g is not None]
            places = [places[k] for k in within]
            parameters = [parameters[k] for k in within]
        with torch.no_grad():
            if self._plain:
                torch._foreach_add_(parameters, reached, alpha=-self.lr)
                return
            if config.clip_norm is not None:
                norms = torch.stack(torch._foreach_norm(reached))
                factor = clip_factor(torch.linalg.vector_norm(norms), config.clip_norm)
                reached = list(torch._foreach_mul(reached, factor))
            momenta = [self._momentum(k) for k in places] if config.momentum else []
            step = direction(
                parameters,
                reached,
                momenta,
                config.weight_decay,
                config.momentum,
                config.nesterov,
            )
            torch._foreach_add_(parameters, step, alpha=-self.lr)

    def _momentum(self, k: int) -> Tensor:
        if k not in self._momenta:
            self._momenta[k] = torch.zeros_like(self.parameters[k])
        return self._momenta[k]

    def state(self) -> dict[str, Tensor]:
        """Return the momentum buffers, `momentum.K` for parameter K."""
        momenta = sorted(self._momenta.items())
        return {f"momentum.{k}": momentum for k, momentum in momenta}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a state as from `state`. Its tensors are copied, as steps write in place."""
        for name, momentum in state.items():
            k = int(name.split(".")[1])
            device = self.parameters[k].device
            self._momenta[k] = momentum.to(device, copy=True)


def _added(into: list[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add gradients to the tensors of `into`, in place; returns the sums. None counts as 0."""
    pairs = list(zip(into, gradients, strict=True))
    targets = []
    added = []
    for target, gradient in pairs:
        if target is not None and gradient is not None:
            targets.append(target)
            added.append(gradient)
    if targets:
        torch._foreach_add_(targets, added)
    return [g if a is None else a for a, g in pairs]


_SCALER = ("scale", "_growth_tracker")
"""Entries of a GradScaler's state that its steps change."""


@dataclass(eq=False)
class AnyOptimizer:
    """Runs any torch optimiser through Fabric, with loss scaling and clipping.

    The optimiser of a user's LightningModule (`optimizer.name: module`) keeps its own learning
    rates. Torch's optimisers skip parameters without a gradient: neither weight decay nor momentum
    changes them.
    """

    fabric: Fabric
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    config: OptimizerConfig

    def __post_init__(self) -> None:
        self._groups = []
        for group in self.optimizer.param_groups:
            options = {k: v for k, v in group.items() if k != "params"}
            self._groups.append(copy.deepcopy(options))
        strategy = self.fabric.strategy
        self._stepper = _FabricOptimizer(optimizer=self.optimizer, strategy=strategy)
        self._scaler = getattr(strategy.precision, "scaler", None)  # of 16-mixed
        self._scale = copy.deepcopy(self._scaler.state_dict()) if self._scaler is not None else {}
        self.reset()

    def reset(self, lr: float | None = None) -> None:
        """Prepare the training of another client: clear all state, and restore parameter groups and
        loss scaling. No result may depend on the client that trained before.

        Args:
            lr: learning rate; None: the configuration's.
        """
        self.lr = self.config.lr if lr is None else lr
        self.optimizer.state.clear()
        if self._scaler is not None:
            self._scaler.load_state_dict(self._scale)
            self._scaler._per_optimizer_states.clear()  # incomplete if a step has failed
        for group, first in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(first))

    def step(self, loss: Tensor, terms: Sequence[Tensor | None] | None = None) -> None:
        """Run the backward pass, clip, and take a step.

        Args:
            terms: gradient of the objective's terms for each parameter, which is added to that of
                the loss; None: the objective has no terms.
        """
        for group in self.optimizer.param_groups:
            if self.config.name != "module":
                group["lr"] = self.lr
        self.optimizer.zero_grad()
        if terms is None or loss.requires_grad:
            self.fabric.backward(loss)
        if terms is not None or self.config.clip_norm is not None:
            self.fabric.strategy.precision.unscale_gradients(self.optimizer)
        for parameter, term in zip(self.parameters, terms or (), strict=False):
            if term is not None and parameter.requires_grad:
                gradient = parameter.grad
                parameter.grad = term.clone() if gradient is None else gradient.add_(term)
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters(), self.config.clip_norm)
        self._stepper.step()

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the optimiser's state: `NAME.K` for parameter K, and with 16-mixed
        precision also `scaler`, the state of loss scaling.

        Raises:
            BadInput: the state has an entry that is not a tensor.
        """
        tensors = {}
        states = self.optimizer.state_dict()["state"]
        for k, state in sorted(states.items()):
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    requirement = (
                        f"this optimiser's {name}.{k} is not a tensor and cannot be kept: "
                        "set it to False"
                    )
                    raise BadInput("optimizer.keep_state", True, requirement)
                tensors[f"{name}.{k}"] = value
        if self._scaler is not None:
            scaling = self._scaler.state_dict()
            numbers = [scaling[key] for key in _SCALER]
            tensors["scaler"] = torch.tensor(numbers, dtype=torch.float64)
        return tensors

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a state as from `state`. Its tensors are copied, as steps write in place."""
        loaded = self.optimizer.state_dict()
        for name, value in state.items():
            if name == "scaler":
                if self._scaler is not None:
                    scale, growth = value.tolist()
                    scaling = dict(zip(_SCALER, (scale, int(growth)), strict=True))
                    self._scaler.load_state_dict(self._scale | scaling)
                continue
            label, k = name.rsplit(".", 1)
            of_parameter = loaded["state"].setdefault(int(k), {})
            of_parameter[label] = value.clone()
        self.optimizer.load_state_dict(loaded)


LocalOptimizer = FastSGD | AnyOptimizer
"""Trains a client's parameters; `state` and `load` are for `optimizer.keep_state`."""


def total_step_length(
    config: OptimizerConfig,
    lr: float,
    steps: int,
) -> float:
    """Return how far this number of steps moves the model if all gradients are equal, in units of
    the gradient. Without momentum this is lr times steps.

    With momentum m, the gradient of step j moves the model by lr sum_{k >= j} m^(k - j) in all. To
    estimate the mean gradient from a model's change, divide the change by this length: with lr
    times steps the estimate would be up to 1 / (1 - m) times too large.
    """
    m = 0.0
    if config.name == "sgd":
        m = config.momentum
    if not m or not steps:
        return lr * steps
    missing = m * (1 - m**steps) / (1 - m)
    total = (steps - missing) / (1 - m)
    return lr * (steps + m * total if config.nesterov else total)


def make_optimizer(
    fabric: Fabric,
    module: ClientModule,
    config: OptimizerConfig,
) -> LocalOptimizer:
    """Make the optimiser that `config` names for the module's parameters.

    Raises:
        BadInput: no parameter can be trained, or the model has no optimiser of its own.
    """
    parameters = [p for p in module.binding.parameters if p.requires_grad]
    requirement = "no parameter requires a gradient: leave some trainable"
    check("model", type(module.model).__name__, bool(parameters), requirement)
    if config.name == "sgd" and fabric.strategy.precision.precision != "16-mixed":
        return FastSGD(parameters, config)
    if config.name == "module":
        optimizer = module.configure_optimizers()
        if not isinstance(optimizer, torch.optim.Optimizer):
            requirement = (
                "the model is no LightningModule whose configure_optimizers returns one optimiser: "
                "choose sgd, adam or adamw"
            )
            raise BadInput("optimizer.name", config.name, requirement)
        return AnyOptimizer(fabric, optimizer, parameters, config)
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "sgd":
        options |= {"momentum": config.momentum, "nesterov": config.nesterov}
    kinds = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    optimizer = kinds[config.name](parameters, **options)
    return AnyOptimizer(fabric, optimizer, parameters, config)

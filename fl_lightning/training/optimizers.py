"""How a client descends: plain SGD without wrappers, or any torch optimiser through Fabric."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.wrappers import _FabricOptimizer
from torch import Tensor, nn

from fl_lightning.configuration.config import OptimizerConfig, check
from fl_lightning.foundation.errors import BadInput
from fl_lightning.training.kernels import clip_factor, direction
from fl_lightning.training.module import ClientModule


class FastSGD:
    """SGD in torch's operations on lists: without the wrappers that cost more than a small model's
    step."""

    def __init__(self, parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters = list(parameters)
        self.config = config
        self.reset()

    def reset(self, lr: float | None = None) -> None:
        """Before each client's training: forget the momentum, and from now on train what requires a
        gradient now at the rate `lr` (None: the configuration's)."""
        config = self.config
        self.lr = config.lr if lr is None else lr
        self._plain = not (config.momentum or config.weight_decay or config.clip_norm)
        self._momenta: dict[int, Tensor] = {}
        self._trained = [k for k, p in enumerate(self.parameters) if p.requires_grad]
        self._targets: list[Tensor] = [self.parameters[k] for k in self._trained]

    def step(self, loss: Tensor, more: Sequence[Tensor | None] | None = None) -> None:
        """w <- w - lr (clipping, momentum and weight decay as torch has them).

        `more`: what the loss's gradient is added to for each parameter, written over; None:
        nothing.
        """
        config, used = self.config, self._trained
        gradients: Sequence[Tensor | None] = [None] * len(used)
        if more is None or loss.requires_grad:
            gradients = torch.autograd.grad(loss, self._targets, allow_unused=True)
        if more is not None:
            gradients = _added([more[k] for k in used], gradients)
        parameters = self._targets
        reached_gradients = [g for g in gradients if g is not None]
        if len(reached_gradients) < len(gradients):
            reached = [k for k, g in enumerate(gradients) if g is not None]
            used, parameters = [used[k] for k in reached], [parameters[k] for k in reached]
        with torch.no_grad():
            if self._plain:
                torch._foreach_add_(parameters, reached_gradients, alpha=-self.lr)
                return
            if config.clip_norm is not None:
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(reached_gradients)))
                reached_gradients = list(
                    torch._foreach_mul(reached_gradients, clip_factor(norm, config.clip_norm))
                )
            momenta = [self._momentum(k) for k in used] if config.momentum else []
            decay = config.weight_decay
            step = direction(
                parameters, reached_gradients, momenta, decay, config.momentum, config.nesterov
            )
            torch._foreach_add_(parameters, step, alpha=-self.lr)

    def _momentum(self, k: int) -> Tensor:
        if k not in self._momenta:
            self._momenta[k] = torch.zeros_like(self.parameters[k])
        return self._momenta[k]

    def state(self) -> dict[str, Tensor]:
        """`momentum.K` by parameter."""
        return {f"momentum.{k}": momentum for k, momentum in sorted(self._momenta.items())}

    def load(self, state: dict[str, Tensor]) -> None:
        """Copies, since the steps write in place."""
        for name, momentum in state.items():
            k = int(name.split(".")[1])
            self._momenta[k] = momentum.to(self.parameters[k].device, copy=True)


def _added(into: list[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Sums, in place of `into`."""
    both = [(a, g) for a, g in zip(into, gradients, strict=True) if a is not None and g is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [g for _, g in both])
    return [g if a is None else a for a, g in zip(into, gradients, strict=True)]


_SCALER = ("scale", "_growth_tracker")  # what a GradScaler changes as it goes


class AnyOptimizer:
    """Any torch optimiser, through Fabric: its loss scaling, and clipping.

    A model's own (`optimizer.name: module`) keeps its own learning rates. What requires no gradient
    has none, and is passed over by torch's optimisers: neither weight decay nor momentum reach it.
    """

    def __init__(
        self,
        fabric: Fabric,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        config: OptimizerConfig,
    ) -> None:
        self.fabric, self.optimizer, self.parameters, self.config = (
            fabric,
            optimizer,
            parameters,
            config,
        )
        self._groups = [
            {k: copy.deepcopy(v) for k, v in g.items() if k != "params"}
            for g in optimizer.param_groups
        ]
        self._stepper = _FabricOptimizer(optimizer=optimizer, strategy=fabric.strategy)
        self._scaler = getattr(fabric.strategy.precision, "scaler", None)  # of 16-mixed
        self._scale = copy.deepcopy(self._scaler.state_dict()) if self._scaler is not None else {}
        self.reset()

    def reset(self, lr: float | None = None) -> None:
        """Forget all state, and what the client before has changed in the groups and in the loss
        scaling."""
        self.lr = self.config.lr if lr is None else lr
        self.optimizer.state.clear()
        # else a client's numbers would depend on who trained before it on this rank
        if self._scaler is not None:
            self._scaler.load_state_dict(self._scale)
            self._scaler._per_optimizer_states.clear()  # a step that failed has left half of one
        for group, first in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(first))

    def step(self, loss: Tensor, more: Sequence[Tensor | None] | None = None) -> None:
        """Backward, clip, step. `more`: what the loss's gradient is added to for each parameter;
        None: nothing."""
        for group in self.optimizer.param_groups:
            if self.config.name != "module":
                group["lr"] = self.lr
        self.optimizer.zero_grad()
        if more is None or loss.requires_grad:
            self.fabric.backward(loss)
        if more is not None or self.config.clip_norm is not None:
            self.fabric.strategy.precision.unscale_gradients(self.optimizer)
        for parameter, added in zip(self.parameters, more or (), strict=False):
            if added is not None and parameter.requires_grad:
                parameter.grad = (
                    added.clone() if parameter.grad is None else parameter.grad.add_(added)
                )
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters(), self.config.clip_norm)
        self._stepper.step()

    def _parameters(self) -> list[Tensor]:
        return [p for g in self.optimizer.param_groups for p in g["params"]]

    def state(self) -> dict[str, Tensor]:
        """`NAME.K` by parameter, and `scaler` (16-mixed)."""
        states = self.optimizer.state_dict()["state"]
        tensors = {
            f"{name}.{k}": value
            for k, state in sorted(states.items())
            for name, value in state.items()
        }
        odd = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
        if odd:
            raise BadInput(
                "optimizer.keep_state", True, f"this optimiser keeps {odd[0]}, which is no tensor"
            )
        if self._scaler is not None:
            now = self._scaler.state_dict()
            tensors["scaler"] = torch.tensor([now[key] for key in _SCALER], dtype=torch.float64)
        return tensors

    def load(self, state: dict[str, Tensor]) -> None:
        """Copies, since the steps write in place."""
        kept = self.optimizer.state_dict()
        for name, value in state.items():
            if name == "scaler":
                if self._scaler is not None:
                    scale = dict(zip(_SCALER, (float(value[0]), int(value[1])), strict=True))
                    self._scaler.load_state_dict({**self._scale, **scale})
                continue
            label, k = name.rsplit(".", 1)
            kept["state"].setdefault(int(k), {})[label] = value.clone()
        self.optimizer.load_state_dict(kept)


LocalOptimizer = FastSGD | AnyOptimizer
"""What trains a client, over the module's parameters; `state` and `load` are for
`optimizer.keep_state`."""


def step_sizes(config: OptimizerConfig, lr: float, steps: int) -> float:
    """Sum over so many steps of how far each gradient moves the model, in all: lr each without
    momentum.

    With momentum m the gradient of step j counts sum_{k >= j} m^(k - j) times: without dividing by
    that, what is concluded from a model's change comes out up to 1 / (1 - m) times too large.
    """
    m = config.momentum if config.name == "sgd" else 0.0
    if not m or not steps:
        return lr * steps
    total = (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)
    return lr * (steps + m * total if config.nesterov else total)


def make_optimizer(fabric: Fabric, module: ClientModule, config: OptimizerConfig) -> LocalOptimizer:
    """The optimiser that `config` names, over the module's parameters."""
    parameters = [p for p in module.binding.parameters if p.requires_grad]
    check(
        "model",
        type(module.model).__name__,
        bool(parameters),
        "it must have a parameter that can be trained",
    )
    if config.name == "sgd" and fabric.strategy.precision.precision != "16-mixed":
        return FastSGD(parameters, config)
    if config.name == "module":
        optimizer = module.configure_optimizers()
        if not isinstance(optimizer, torch.optim.Optimizer):
            allowed = (
                "the model must be a LightningModule whose configure_optimizers returns one "
                "optimiser"
            )
            raise BadInput("optimizer.name", config.name, allowed)
        return AnyOptimizer(fabric, optimizer, parameters, config)
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "sgd":
        options |= {"momentum": config.momentum, "nesterov": config.nesterov}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[
        config.name
    ]
    return AnyOptimizer(fabric, kind(parameters, **options), parameters, config)

"""The LightningModule around the user's model, which computes the loss and the objective's
terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from lightning import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_lightning.core import PLAIN, Batch, Layout, Objective
from fl_lightning.core.layout import Binding
from fl_lightning.data import Part
from fl_lightning.foundation.device import wide
from fl_lightning.foundation.errors import BadInput, check
from fl_lightning.foundation.metric import ACCURACY, Metric
from fl_lightning.training.kernels import Columns, Terms, max_pool
from fl_lightning.training.schedule import StepState
from fl_lightning.training.standin import stand_in

UNHEEDED = (
    "configure_callbacks",
    "configure_model",
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)
"""Hooks that a Lightning Trainer would call in training. As there is no Trainer here, a model that
overrides one of them is refused."""


QUIET = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.Embedding,
    nn.ReLU,
    nn.Flatten,
    nn.Sequential,
    nn.ModuleList,
)
"""Modules of torch that draw no random numbers. This package's modules draw only through
torch's."""


class Skipped(BadInput):
    """Raised if the user's `training_step` returns None. Local training catches it and takes no
    step for the batch. Where a loss is needed for every batch, the error ends the run."""


class _Proximal(NamedTuple):
    """The proximal term of an objective by columns."""

    weight: bytes
    """The objective's `proximal_weight`."""
    columns: list[Columns]
    places: list[tuple[int, int]]
    """(start, stop) columns of each parameter in the term; (start, start) of the others."""
    numbers: int
    """Number of parameters in the term."""


class ClientModule(LightningModule):
    """The LightningModule of all clients of an architecture on a rank. It wraps their network, and
    is bound to the vector of one client after the other.

    Args:
        model: the network; if it is a LightningModule with a `training_step`, this step computes
            the task loss.
        layout: the model's layout.
        num_classes: number of the model's outputs.
        features: whether to keep the classifier's input of each pass.
        metric: the main metric of the task. Clients are scored by it, and its `loss` (cross-entropy
            for the accuracy) is the task loss.
        method: class name of the method, for messages.
    """

    cast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Fabric's autocast."""
    draws_in_evaluation = False
    """Whether the model draws random numbers in evaluation, too; set by the engine's
    `scoring_is_pure`."""
    weights: Tensor | None = None
    """Weights of the classes in the task loss while a client trains; None: all equal."""
    weighed = False
    """Whether the current training has used these weights."""
    own_step = False
    """Whether the user's model has a `training_step`."""
    objective = PLAIN
    _masked = False
    _room: Tensor | None = None
    _proximal = _Proximal(b"", [], [], 0)
    proximal_numbers = 0
    """Number of parameters in the proximal term."""
    _terms: Terms | None = None
    _has_terms = False

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        num_classes: int,
        features: bool = False,
        metric: Metric = ACCURACY,
        method: str = "Method",
    ) -> None:
        super().__init__()
        self.model = model
        self.layout = layout
        self.num_classes = num_classes
        self.metric = metric
        self.keeps_features = features
        self.method = method
        self.draws = not all(map(_draws_nothing, model.modules()))
        """Whether training steps may draw random numbers."""
        self._features: Tensor
        if features:
            self.head.register_forward_pre_hook(self._look)
        _replace_methods(model, layout)
        self.binding = Binding(model, layout)
        if isinstance(model, LightningModule):
            _check_steps(model)
            step = model.training_step
            self.own_step = type(model).training_step is not LightningModule.training_step
            self._numbered = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        requires_grad = [p.requires_grad for p in self.binding.parameters]
        self.trainable = np.array(requires_grad, dtype=bool)
        """Bool: mask of the parameters, in the order of the blocks, that are not frozen."""
        self.used = layout.parameters.stop
        """Number of columns up to the last parameter; parameters come first."""
        self.step_state = StepState()
        """State of the current local step."""
        stand_in(model, self.step_state)

    @property
    def head(self) -> nn.Module:
        """The classifier."""
        return self.model.get_submodule(self.layout.head)

    @property
    def features(self) -> Tensor:
        """The classifier's input in the last pass, (batch, d).

        Raises:
            BadInput: the method does not declare the trait `features`.
        """
        requirement = "the method uses module.features: set it to True"
        check(f"{self.method}.traits.features", False, self.keeps_features, requirement)
        return self._features

    def forget_features(self) -> None:
        """Drop the features of the last pass."""
        self.__dict__.pop("_features", None)

    @property
    def device_of_model(self) -> torch.device:
        """The device of the model's parameters."""
        return next(iter(self.model.parameters())).device

    def _look(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep the classifier's input as `features`."""
        self._features = inputs[0]

    def set_objective(self, objective: Objective) -> None:
        """Set the objective that local steps minimise from now on."""
        if objective is PLAIN and self.objective is PLAIN:
            return
        self.objective = objective
        self.proximal_numbers = 0
        self._terms = None
        self._has_terms = objective.linear is not None or objective.has_proximal
        if not objective.has_proximal:
            return
        layout = self.layout
        assert objective.proximal_weight is not None
        weight = objective.proximal_weight.tobytes()
        if weight != self._proximal.weight:
            places = []
            coefficients = objective.proximal_weight[: len(self.trainable)]
            for block, c in zip(layout.blocks, coefficients, strict=False):
                places.append((block.start, block.stop if c else block.start))
            self._proximal = _Proximal(
                weight, [*objective.columns(layout)], places, objective.proximal_numbers(layout)
            )
        self.proximal_numbers = self._proximal.numbers

    def train_only(self, trains: np.ndarray | None) -> None:
        """Make only the trainable blocks in `trains` (bool [B]; None: all) require a gradient.

        Raises:
            ValueError: no block would train.
        """
        if trains is None and not self._masked:
            return
        mask = self.trainable
        if trains is not None:
            mask = mask & trains[: len(mask)]
        if not mask.any():
            raise ValueError("no block is left to train")
        for parameter, requires_grad in zip(self.binding.parameters, mask.tolist(), strict=True):
            parameter.requires_grad_(requires_grad)
        self._masked = trains is not None

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's scores, (batch, classes) in a classification, of inputs `x`
        (batch, ...)."""
        scores: Tensor = self.model(x)
        return scores

    def task_loss(self, batch: tuple[Tensor, Tensor], batch_idx: int | None = None) -> Tensor:
        """Return the loss of the user's `training_step` if the model has one, else the task's mean
        loss.

        Args:
            batch_idx: argument of `training_step`; None: the index of the current local step's
                batch, or 0.

        Raises:
            Skipped: `training_step` returned None.
            BadInput: `training_step` returned something else that is no loss.
        """
        if self.own_step:
            index = batch_idx
            if batch_idx is None:
                index = self.step_state.batch_idx
            arguments = (batch, index) if self._numbered else (batch,)
            output = self.model.training_step(*arguments)  # type: ignore[operator]
            return _loss_in(output, type(self.model).__name__, self.method)
        x, y = batch
        scores = self.model(x)
        if self.weights is None:
            return self.metric.loss(scores, y)
        self.weighed = True
        return cross_entropy(scores, y, self.weights.to(scores.dtype))

    def objective_terms(self) -> tuple[Tensor, list[Tensor | None]] | None:
        """Compute the objective's terms at the bound vector: sum_b c_b ||w_b - a_b||^2 (KAPC's
        journal version, Eq. 16) and <linear, w>.

        Returns:
            The value, and the gradient for each trainable parameter (None: it is in no term). The
            gradients are views that the next call overwrites, to save memory that autograd would
            allocate. None: the objective has no terms.
        """
        if not self._has_terms:
            return None
        vector = self.binding.vector
        if self._terms is None:
            self._terms = self._prepared(vector)
        value = self._terms.value(vector[None, : self.used]).squeeze(0)
        self._terms.gradient()  # writes to the room, of which the slopes are views
        return value, self._slopes

    def _prepared(self, vector: Tensor) -> Terms:
        """Make the terms of the objective, and set `_slopes` to views of their gradient."""
        room = self._room
        if room is None or room.dtype != vector.dtype or room.device != vector.device:
            # keep it: allocating takes as long as a step
            room = self._room = vector.new_empty(1, self.used)
        anchor = self.objective.anchor
        linear = self.objective.linear
        columns = []
        rest = self.layout.is_parameter
        places = self._proximal.places
        if self.objective.has_proximal:
            columns = self._proximal.columns
            rest = rest & (self.objective.proximal_weight == 0)
        else:
            anchor = None
        if linear is not None:
            linear = linear[: self.used]
            further = [(s.start, s.stop, 0.0) for s in self.layout.segments(rest)]
            columns = [*columns, *further]
            places = [(b.start, b.stop) for b in self.layout.blocks if b.kind == "parameter"]
        self._slopes = []
        parameters = zip(places, self.binding.parameters, self.trainable.tolist(), strict=True)
        for (start, stop), parameter, is_trainable in parameters:
            if is_trainable:
                slope = None
                if stop > start:
                    slope = room[0, start:stop].view(parameter.shape)
                self._slopes.append(slope)
        return Terms(room, None if anchor is None else anchor[: self.used], linear, columns)

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        """Return the task loss, or the objective's `loss`, without the objective's terms.

        Raises:
            Skipped: no step is to be taken for this batch.
        """
        loss = self.objective.loss
        if loss is None:
            return self.task_loss(batch, batch_idx)
        return loss(self, batch)

    @torch.no_grad()
    def mean_loss(self, part: Part, batch_size: int) -> Tensor:
        """Return the mean task loss of the bound model on `part` in evaluation mode, shape (); NaN
        if the part is empty."""
        self.model.eval()
        dtype = wide(self.device_of_model)
        total = torch.zeros((), device=self.device_of_model, dtype=dtype)
        for k, (x, y) in enumerate(part.batches(batch_size)):
            with self.cast():
                loss = self.task_loss((x, y), k)
                total = total + len(y) * loss.to(dtype)
        if len(part):
            return total / len(part)
        return total * torch.nan

    @torch.no_grad()
    def outputs_at(self, vector: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (batch, d) and class scores of inputs `x` by another model `vector` (D,),
        in evaluation mode, for a loss that compares models. The bound vector stays bound. The
        method must declare the trait `features`."""
        features = getattr(self, "_features", x)
        training = self.model.training
        bound = self.binding.vector
        buffers = self.binding.buffers
        blocks = {}
        for block in self.layout.blocks:
            blocks[block.name] = vector[block.columns].view(block.shape)
        self.model.eval()
        try:
            if self.binding.spectral:  # other buffers, too
                self.binding.bind(vector, [b.clone() for b in buffers])
            scores = torch.func.functional_call(self.model, blocks, x)
            return self.features, scores
        finally:
            if self.binding.spectral:
                self.binding.point(bound, buffers)
            self.model.train(training)
            self._features = features

    def flat_gradient(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the task loss of the bound model on a batch, shape (), and its gradient (D,),
        which is 0 for blocks that do not train."""
        vector = self.binding.vector
        trained = [p for p in self.binding.parameters if p.requires_grad]
        with torch.enable_grad(), self.cast():
            loss = self.task_loss(batch)
        gradients = iter(torch.autograd.grad(loss, trained, allow_unused=True))
        flat = torch.zeros_like(vector)
        # parameters are the first blocks
        for block, parameter in zip(self.layout.blocks, self.binding.parameters, strict=False):
            gradient = None
            if parameter.requires_grad:
                gradient = next(gradients)
            if gradient is not None:
                flat[block.columns] = gradient.reshape(-1)
        return loss.detach(), flat

    def configure_optimizers(self) -> Any:
        """Return the optimiser of the user's LightningModule, for `--optimizer.name module`."""
        if isinstance(self.model, LightningModule):
            return self.model.configure_optimizers()
        return None


class Passes:
    """Counts the samples in all forward and backward passes through the bound model within a `with`
    block, for one client at a time.

    A forward pass is counted when the classifier runs, which it does in every pass, even if a
    user's step calls the parts of the model one by one. A backward pass is counted when the
    gradient of the classifier's input is computed. It is not counted at the scores, because the
    backward pass of a loss that uses only features does not go through them; but if the
    classifier's input requires no gradient, the scores are used.
    """

    def __init__(self, module: ClientModule) -> None:
        self.forward = self.backward = 0
        hook = module.head.register_forward_hook(self._passed)
        self._hooks = module.head._forward_hooks
        self._place = hook.id
        # the hook is registered only while counting, as it slows down every pass
        hook.remove()

    def __enter__(self) -> Self:
        self.forward = self.backward = 0
        self._hooks[self._place] = self._passed
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.pop(self._place, None)

    def _passed(
        self,
        head: nn.Module,
        inputs: Any,
        output: Any,
    ) -> None:
        scores = output if isinstance(output, Tensor) else output[0]
        samples = len(scores)
        self.forward += samples
        for tensor in (*inputs, scores):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._returned(samples))
                return

    def _returned(self, samples: int) -> None:
        self.backward += samples


def _replace_methods(model: nn.Module, layout: Layout) -> None:
    """Keep frozen normalisations in evaluation mode, and use a faster kernel for max-pooling."""
    for name in layout.still:  # every phase calls `train`
        norm = model.get_submodule(name)
        norm.train = MethodType(_stay, norm)  # type: ignore[method-assign]
        norm.eval()
    for pool in model.modules():
        if type(pool) is nn.MaxPool2d:
            pool.forward = MethodType(max_pool, pool)  # type: ignore[method-assign]


def _draws_nothing(module: nn.Module) -> bool:
    """Whether the module itself, apart from its children, certainly draws no random numbers."""
    kind = type(module)
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    return kind in QUIET or kind.__module__.startswith("fl_lightning.models.")


def _check_steps(model: LightningModule) -> None:
    """Raise `BadInput` if the user's model relies on hooks that a Lightning Trainer would call."""
    kind = type(model)
    requirement = "its automatic_optimization is False: set it to True, as the engine takes steps"
    check("model", kind.__name__, model.automatic_optimization, requirement)
    unheeded = [
        hook for hook in UNHEEDED if getattr(kind, hook) is not getattr(LightningModule, hook)
    ]
    requirement = (
        f"its {', '.join(unheeded)} would not be called: use only the hooks training_step and "
        "configure_optimizers"
    )
    check("model", kind.__name__, not unheeded, requirement)


def _stay(norm: nn.Module, mode: bool = True) -> nn.Module:
    """Replaces `train` of a frozen normalisation, which stays in evaluation mode."""
    norm.training = False
    return norm


def _loss_in(
    output: Any,
    model: str,
    method: str,
) -> Tensor:
    """Return the loss, shape (), in the output of the user's `training_step`."""
    if output is None:
        requirement = (
            "its training_step returned None, which skips a batch, but "
            f"{method} needs a loss for every batch: return one"
        )
        raise Skipped("model", model, requirement)
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        if loss.ndim == 0:
            return loss
        return loss.reshape(())
    returned = type(output).__name__
    if isinstance(output, Mapping):
        returned = f"a {returned} without a loss of one number as 'loss'"
    elif isinstance(output, Tensor):
        returned = f"numbers of shape {tuple(output.shape)}"
    requirement = (
        f"its training_step returned {returned}: return a loss of one number, a dict with this "
        "loss as 'loss', or None to skip the batch"
    )
    raise BadInput("model", model, requirement)

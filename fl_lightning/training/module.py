"""The LightningModule around the user's model: the task's loss plus the objective's terms."""

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
from fl_lightning.training.schedule import Last
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
"""Hooks that a Lightning Trainer calls in training. There is none here: a model that relies on one
is refused."""


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
"""Modules of torch that draw nothing. Ours draw only by those of torch in them."""


class Skipped(BadInput):
    """Raised where the user's `training_step` returns None: local training takes no step for the
    batch; anywhere else a loss is needed, and this is bad input."""


class _Proximal(NamedTuple):
    """The proximal term of an objective, laid out."""

    weight: bytes
    """The objective's `proximal_weight`."""
    columns: list[Columns]
    places: list[tuple[int, int]]
    """First and last column of each parameter that the term reaches; else twice the first."""
    numbers: int


class ClientModule(LightningModule):
    """The one module of an architecture on a rank: clients are bound into it one after the other.

    Args:
        model: the network; a LightningModule with a `training_step` of its own keeps its own task
            loss.
        layout: of the model.
        num_classes: outputs of the model.
        features: keep the classifier's input of each pass.
        metric: how the client is scored, and its task loss.
        method: the class name of the method, for messages.
    """

    cast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Fabric's autocast."""
    draws_in_evaluation = False
    """Whether the model draws random numbers in evaluation, too, once that has been tried."""
    weights: Tensor | None = None
    """Of the classes in the task loss, while a client trains; None: all alike."""
    weighed = False
    """Whether these weights have been used in its training."""
    own_step = False
    """Whether the user's model has a `training_step`."""
    objective = PLAIN
    _masked = False
    _room: Tensor | None = None
    _proximal = _Proximal(b"", [], [], 0)
    proximal_numbers = 0
    """Numbers of the model in the proximal term."""
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
        self.looks = features
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
        """Bool: the parameters, in the order of the blocks, that the method's `build` has not
        frozen."""
        self.used = layout.parameters.stop
        """Columns of a vector up to the last parameter: parameters come first."""
        self.last = Last()
        """Facts about the last training step."""
        stand_in(model, self.last)

    @property
    def head(self) -> nn.Module:
        """The classifier."""
        return self.model.get_submodule(self.layout.head)

    @property
    def features(self) -> Tensor:
        """With `features`: the classifier's input in the last pass, (batch, d).

        Raises:
            BadInput: the method does not declare that it looks at features.
        """
        requirement = "it looks at module.features: set it to True"
        check(f"{self.method}.traits.features", False, self.looks, requirement)
        return self._features

    def forget_features(self) -> None:
        """Drop the features of the last pass."""
        self.__dict__.pop("_features", None)

    @property
    def device_of_model(self) -> torch.device:
        """Where the model lies."""
        return next(iter(self.model.parameters())).device

    def _look(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._features = inputs[0]

    def set_objective(self, objective: Objective) -> None:
        """Train, from now on, down `objective`."""
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
        """From now on only the trainable blocks among `trains` (bool [B]; None: all) require a
        gradient.

        Raises:
            ValueError: nothing would train.
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
        """Class scores (batch, classes) of images `x` (batch, channels, height, width)."""
        scores: Tensor = self.model(x)
        return scores

    def task_loss(self, batch: tuple[Tensor, Tensor], batch_idx: int | None = None) -> Tensor:
        """The user's `training_step` where the model has one, else the task's mean loss.

        `batch_idx`: for that step; None: the index of the current training step, else 0.

        Raises:
            Skipped: that step returned None.
            BadInput: it returned something else that is no loss.
        """
        if self.own_step:
            index = batch_idx
            if batch_idx is None:
                index = self.last.batch_idx
            arguments = (batch, index) if self._numbered else (batch,)
            output = self.model.training_step(*arguments)  # type: ignore[operator]
            return _loss_in(output, type(self.model).__name__, self.method)
        x, y = batch
        scores = self.model(x)
        if self.weights is None:
            return self.metric.loss(scores, y)
        self.weighed = True
        return cross_entropy(scores, y, self.weights.to(scores.dtype))

    def coaching(self) -> tuple[Tensor, list[Tensor | None]] | None:
        """The objective's terms at the bound vector, sum_b c_b ||w_b - a_b||^2 (KAPC's journal
        version, Eq. 16) and <linear, w>; None: the objective has none.

        Returns:
            Their value, and their gradient for each trainable parameter (None: no term reaches it),
            in views that the next call writes over: autograd would add up gradients in new memory.
        """
        if not self._has_terms:
            return None
        vector = self.binding.vector
        if self._terms is None:
            self._terms = self._prepared(vector)
        value = self._terms.value(vector[None, : self.used]).squeeze(0)
        self._terms.gradient()  # in the room, of which these are views
        return value, self._slopes

    def _prepared(self, vector: Tensor) -> Terms:
        """The terms of the objective; `_slopes` are views of their gradient."""
        room = self._room
        if room is None or room.dtype != vector.dtype or room.device != vector.device:
            # allocating so much anew takes as long as a step
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
        """Task loss (or the objective's own), without the objective's terms; `Skipped`: no step is
        to be taken."""
        loss = self.objective.loss
        if loss is None:
            return self.task_loss(batch, batch_idx)
        return loss(self, batch)

    @torch.no_grad()
    def mean_loss(self, part: Part, batch_size: int) -> Tensor:
        """Mean task loss of the bound vector on `part` in evaluation mode, shape (); NaN on an
        empty part."""
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
        """Features (batch, d) and class scores of inputs `x` under another `vector` (D,), in
        evaluation mode: for a loss that compares models. The bound vector stays bound, and nothing
        is written to. The method must declare `features`.
        """
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
        """The task loss of the bound vector on a batch, shape (), and its gradient (D,); 0 where
        nothing trains."""
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
        """The user's own, for `--optimizer.name module`."""
        if isinstance(self.model, LightningModule):
            return self.model.configure_optimizers()
        return None


class Passes:
    """Counts, while it is entered, the samples of forward and backward passes through a client's
    bound model, whichever code runs them.

    Forward passes are seen at the classifier, which every pass meets, also where a user's step
    calls the model's parts by itself. Backward passes are seen at the features before it, where
    they train: a loss of features alone never reaches scores. There is one object for each module,
    entered several times in a visit, and for one client at a time.
    """

    def __init__(self, module: ClientModule) -> None:
        self.forward = self.backward = 0
        hook = module.head.register_forward_hook(self._passed)
        self._hooks = module.head._forward_hooks
        self._place = hook.id
        # it hangs there only while it counts: a hook makes every pass of the classifier slower
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
    """Keep frozen normalisations in evaluation, and have max-pooling run by a faster kernel."""
    for name in layout.still:  # `train` reaches it with every phase
        norm = model.get_submodule(name)
        norm.train = MethodType(_stay, norm)  # type: ignore[method-assign]
        norm.eval()
    for pool in model.modules():
        if type(pool) is nn.MaxPool2d:
            pool.forward = MethodType(max_pool, pool)  # type: ignore[method-assign]


def _draws_nothing(module: nn.Module) -> bool:
    """Whether a pass of this module by itself surely draws no random number."""
    kind = type(module)
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    return kind in QUIET or kind.__module__.startswith("fl_lightning.models.")


def _check_steps(model: LightningModule) -> None:
    """Raise `BadInput` where the user's model relies on hooks of a Lightning Trainer."""
    kind = type(model)
    requirement = "its automatic_optimization is False: leave it True, local steps are taken here"
    check("model", kind.__name__, model.automatic_optimization, requirement)
    unheeded = [
        hook for hook in UNHEEDED if getattr(kind, hook) is not getattr(LightningModule, hook)
    ]
    requirement = (
        f"its {', '.join(unheeded)} would not be called: of its hooks only training_step and "
        "configure_optimizers are"
    )
    check("model", kind.__name__, not unheeded, requirement)


def _stay(norm: nn.Module, mode: bool = True) -> nn.Module:
    """A frozen normalisation's `train`: stay in evaluation."""
    norm.training = False
    return norm


def _loss_in(
    output: Any,
    model: str,
    method: str,
) -> Tensor:
    """The loss, shape (), in the output of the user's `training_step`."""
    if output is None:
        requirement = (
            "its training_step returned None, which passes a batch over in plain local training "
            f"alone: {method} needs a loss of every batch"
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
        f"its training_step returned {returned}; it must return a loss of one number, a dict with "
        "it as 'loss', or None to pass the batch over"
    )
    raise BadInput("model", model, requirement)

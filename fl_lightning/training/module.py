"""One client: a LightningModule around the user's model, whose loss is the task's plus the
objective's terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MethodType, TracebackType
from typing import Any, Self

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
    """The user's `training_step` returned None: no step is taken for the batch. Bad input where its
    loss is needed."""


class ClientModule(LightningModule):
    """The one module of an architecture on a rank: clients are bound into it one after the other.

    Args:
        model: the network; a LightningModule with a `training_step` of its own keeps its own task
            loss.
        layout: of the model.
        num_classes: outputs of the model.
        features: keep what the classifier sees of each pass.
        metric: how the client is scored, and its task loss.
        method: what the class of the method is called, for messages.
    """

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
        self.model, self.layout, self.num_classes, self.metric = model, layout, num_classes, metric
        self.cast: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Fabric's autocast."""
        self.draws = not all(map(_draws_nothing, model.modules()))
        """Whether training steps may draw random numbers."""
        self._seen: Tensor
        self.looks, self.method = features, method
        if features:
            self.head.register_forward_pre_hook(self._look)
        for name in layout.still:  # `train` comes to it with every phase
            norm = model.get_submodule(name)
            norm.train = MethodType(_stays, norm)  # type: ignore[method-assign]
            norm.eval()
        for pool in model.modules():
            if type(pool) is nn.MaxPool2d:
                pool.forward = MethodType(max_pool, pool)  # type: ignore[method-assign]
        self.binding = Binding(model, layout)
        self.draws_in_evaluation = False
        """Whether the model draws random numbers in evaluation, too, once that has been tried."""
        self.weights: Tensor | None = None
        """Of the classes in the task loss, while a client trains; None: all alike."""
        self.weighed = False
        """Whether they have been used in its training."""
        self.own_step = False
        """Whether the user's model has a `training_step`."""
        if isinstance(model, LightningModule):
            _check_steps(model)
            self.own_step = type(model).training_step is not LightningModule.training_step
            self._numbered = is_param_in_hook_signature(
                model.training_step, "batch_idx", min_args=2
            )
        self.trainable = np.array([p.requires_grad for p in self.binding.parameters], dtype=bool)
        """Bool: the parameters, in the order of the blocks, that a method has not frozen in what it
        has built."""
        self.used = layout.parameters.stop
        """Columns of a vector up to the last parameter: parameters come first."""
        self._masked = False
        self._room: Tensor | None = None
        self._known: tuple[bytes, list[Columns], list[tuple[int, int]], int] = (b"", [], [], 0)
        self.objective = PLAIN
        self.proximal_numbers = 0
        """Numbers of the model in the proximal term."""
        self._terms: Terms | None = None
        self._adds = False
        self.last = Last()
        """What the last training step came to."""
        stand_in(model, self.last)

    @property
    def head(self) -> nn.Module:
        """The classifier."""
        return self.model.get_submodule(self.layout.head)

    @property
    def features(self) -> Tensor:
        """With `features`: what the classifier saw in the last pass, (batch, d).

        Raises:
            BadInput: the method does not declare that it looks at them.
        """
        check(
            f"{self.method}.traits.features",
            False,
            self.looks,
            "it looks at module.features: set it to True",
        )
        return self._seen

    def forget_features(self) -> None:
        """Nobody may look at those of the last pass any more."""
        self.__dict__.pop("_seen", None)

    @property
    def device_of_model(self) -> torch.device:
        """Where the model lies."""
        return next(iter(self.model.parameters())).device

    def _look(self, head: nn.Module, seen: tuple[Tensor, ...]) -> None:
        self._seen = seen[0]

    def set_objective(self, objective: Objective) -> None:
        """Train, from now on, down `objective`."""
        if objective is PLAIN and self.objective is PLAIN:
            return
        self.objective, self.proximal_numbers = objective, 0
        self._terms = None
        self._adds = objective.linear is not None or objective.pulls
        if not objective.pulls:
            return
        assert objective.proximal_weight is not None
        weight, name = objective.proximal_weight, objective.proximal_weight.tobytes()
        if name != self._known[0]:  # columns change only with the blocks of the proximal term
            blocks = [b for b in self.layout.blocks if b.kind == "parameter"]
            places = [
                (b.start, b.stop if c else b.start) for b, c in zip(blocks, weight, strict=False)
            ]
            self._known = (
                name,
                [*objective.columns(self.layout)],
                places,
                objective.proximal_numbers(self.layout),
            )
        self.proximal_numbers = self._known[3]

    def train_only(self, trains: np.ndarray | None) -> None:
        """From now on only the blocks of `trains` (bool [B]; None: all) require a gradient, and no
        frozen parameter.

        Raises:
            ValueError: nothing would train.
        """
        if trains is None and not self._masked:
            return
        trained = (
            self.trainable if trains is None else self.trainable & trains[: len(self.trainable)]
        )
        if not trained.any():
            raise ValueError("no block is left to train")
        for parameter, wants in zip(self.binding.parameters, trained.tolist(), strict=True):
            parameter.requires_grad_(wants)
        self._masked = trains is not None

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (batch, classes) of images `x` (batch, channels, height, width)."""
        scores: Tensor = self.model(x)
        return scores

    def task_loss(self, batch: tuple[Tensor, Tensor], batch_idx: int | None = None) -> Tensor:
        """The user's `training_step` where the model has one, else the task's mean loss.

        `batch_idx`: for that step; None: that of the training step that is being taken, else 0.

        Raises:
            Skipped: that step returned None.
            BadInput: it returned something else that is no loss.
        """
        if self.own_step:
            index = self.last.batch_idx if batch_idx is None else batch_idx
            out = self.model.training_step(*((batch, index) if self._numbered else (batch,)))  # type: ignore[operator]
            return _loss_in(out, type(self.model).__name__, self.method)
        x, y = batch
        scores = self.model(x)
        if self.weights is None:
            return self.metric.loss(scores, y)
        self.weighed = True
        return cross_entropy(scores, y, self.weights.to(scores.dtype))

    def coaching(self) -> tuple[Tensor, list[Tensor | None]] | None:
        """The objective's terms at the bound vector, sum_b c_b ||w_b - a_b||^2 (KAPC's journal
        version, Eq. 16) and <linear, w>: their value, and their gradient for each parameter that
        the optimiser knows (None: nothing reaches it; views that the next call writes over).
        Without autograd, which would add up gradients in new memory. None: there are none.
        """
        if not self._adds:
            return None
        vector = self.binding.vector
        assert vector is not None
        if self._terms is None:
            self._terms = self._prepared(vector)
        value = self._terms.value(vector[None, : self.used]).squeeze(0)
        self._terms.gradient()  # in the room, of which these are views
        return value, self._slopes

    def _prepared(self, vector: Tensor) -> Terms:
        room = self._room
        if room is None or room.dtype != vector.dtype or room.device != vector.device:
            # kept: a step's time is lost in getting so much anew
            room = self._room = vector.new_empty(1, self.used)
        objective, used = self.objective, self.used
        columns: list[Columns] = self._known[1] if objective.pulls else []
        anchor = objective.anchor if objective.pulls else None
        places, linear = self._known[2], objective.linear
        if linear is not None:
            weight = objective.proximal_weight if objective.pulls else None
            rest = (
                self.layout.is_parameter
                if weight is None
                else self.layout.is_parameter & (weight == 0)
            )
            columns = [*columns, *((s.start, s.stop, 0.0) for s in self.layout.segments(rest))]
            places = [(b.start, b.stop) for b in self.layout.blocks if b.kind == "parameter"]
        known = zip(places, self.binding.parameters, self.trainable.tolist(), strict=True)
        self._slopes = [
            room[0, a:b].view(p.shape) if b > a else None for (a, b), p, trains in known if trains
        ]
        anchor, linear = (None if vector is None else vector[:used] for vector in (anchor, linear))
        return Terms(room, anchor, linear, columns)

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        """Task loss (or the objective's own), without the objective's terms; `Skipped`: no step is
        to be taken."""
        own = self.objective.loss
        return self.task_loss(batch, batch_idx) if own is None else own(self, batch)

    @torch.no_grad()
    def mean_loss(self, part: Part, batch_size: int) -> Tensor:
        """Mean task loss of the bound vector on `part` in evaluation mode, shape (); NaN on an
        empty part."""
        self.model.eval()
        exact = wide(self.device_of_model)
        total = torch.zeros((), device=self.device_of_model, dtype=exact)
        for k, (x, y) in enumerate(part.batches(batch_size)):
            with self.cast():
                total = total + len(y) * self.task_loss((x, y), k).to(exact)
        return total / len(part) if len(part) else total * torch.nan

    @torch.no_grad()
    def under(self, vector: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (batch, d) and class scores of inputs `x` under another `vector` (D,), in
        evaluation mode: for a loss that compares models. What is bound stays so, and nothing of
        either is written to. The method must declare `features`.
        """
        seen, training = getattr(self, "_seen", x), self.model.training
        bound, buffers = self.binding.vector, self.binding.buffers
        blocks = {b.name: vector[b.start : b.stop].view(b.shape) for b in self.layout.blocks}
        self.model.eval()
        try:
            if self.binding.spectral:  # other buffers, too
                self.binding.bind(vector, [b.clone() for b in buffers])
            scores = torch.func.functional_call(self.model, blocks, x)
            return self.features, scores
        finally:
            if self.binding.spectral and bound is not None:
                self.binding.point(bound, buffers)
            self.model.train(training)
            self._seen = seen

    def flat_gradient(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The task loss of the bound vector on a batch, shape (), and its gradient (D,); 0 where
        nothing trains."""
        vector = self.binding.vector
        assert vector is not None
        trained = [p for p in self.binding.parameters if p.requires_grad]
        with torch.enable_grad(), self.cast():
            loss = self.task_loss(batch)
        gradients = iter(torch.autograd.grad(loss, trained, allow_unused=True))
        gradient = torch.zeros_like(vector)
        blocks = [b for b in self.layout.blocks if b.kind == "parameter"]
        for block, parameter in zip(blocks, self.binding.parameters, strict=True):
            if parameter.requires_grad and (g := next(gradients)) is not None:
                gradient[block.start : block.stop] = g.reshape(-1)
        return loss.detach(), gradient

    def configure_optimizers(self) -> Any:
        """The user's own, for `--optimizer.name module`."""
        if isinstance(self.model, LightningModule):
            return self.model.configure_optimizers()
        return None


class Passes:
    """Counts, while it is entered, how many samples go through a client's bound model, and back,
    whichever code sends them.

    It looks at the classifier, which every pass meets, also where a user's step calls the model's
    parts by itself, and for the way back at the features before it, where they train: a loss of
    features alone never reaches scores. There is one for each module, and never two clients in it
    at once. It is entered several times in a visit: what a pass of a small model takes is much for
    it.
    """

    def __init__(self, module: ClientModule) -> None:
        self.forward = self.backward = 0
        hook = module.head.register_forward_hook(self._passed)
        self._hooks, self._place = module.head._forward_hooks, hook.id
        # it hangs there only while it counts: a hook makes every pass of the classifier slower
        hook.remove()

    def __enter__(self) -> Self:
        self.forward = self.backward = 0
        self._hooks[self._place] = self._passed
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.pop(self._place, None)

    def _passed(self, head: nn.Module, inputs: Any, out: Any) -> None:
        scores = out if isinstance(out, Tensor) else out[0]
        samples = len(scores)
        self.forward += samples
        passed = next(
            (x for x in (*inputs, scores) if isinstance(x, Tensor) and x.requires_grad), None
        )
        if passed is not None:
            passed.register_hook(lambda _: self._returned(samples))

    def _returned(self, samples: int) -> None:
        self.backward += samples


def _draws_nothing(module: nn.Module) -> bool:
    """Whether a pass of this module itself is known to draw no random number."""
    kind = type(module)
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return not hooked and (kind in QUIET or kind.__module__.startswith("fl_lightning.models."))


def _check_steps(model: LightningModule) -> None:
    """Raise `BadInput` where local steps would pass by what the user's model does in a Lightning
    Trainer."""
    name, own = type(model).__name__, type(model)
    allowed = "its automatic_optimization is False: leave it True, local steps are taken here"
    check("model", name, model.automatic_optimization, allowed)
    unheeded = [
        hook for hook in UNHEEDED if getattr(own, hook) is not getattr(LightningModule, hook)
    ]
    allowed = (
        f"its {', '.join(unheeded)} would not be called: of its hooks only training_step and "
        f"configure_optimizers"
    )
    check("model", name, not unheeded, f"{allowed} are")


def _stays(norm: nn.Module, mode: bool = True) -> nn.Module:
    """A normalisation's `train`: its statistics stay as they are, and it goes by them."""
    norm.training = False
    return norm


def _loss_in(out: Any, model: str, method: str) -> Tensor:
    """The loss, shape (), in what the user's `training_step` has returned."""
    if out is None:
        allowed = (
            "its training_step returned None, which passes a batch over in plain local training "
            "alone"
        )
        raise Skipped("model", model, f"{allowed}: {method} needs a loss of every batch")
    loss = out.get("loss") if isinstance(out, Mapping) else out
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss if loss.ndim == 0 else loss.reshape(())
    returned = type(out).__name__
    if isinstance(out, Mapping):
        returned = f"a {returned} without a loss of one number as 'loss'"
    elif isinstance(out, Tensor):
        returned = f"numbers of shape {tuple(out.shape)}"
    allowed = (
        "it must return a loss of one number, a dict with it as 'loss', or None to pass the batch "
        "over"
    )
    raise BadInput("model", model, f"its training_step returned {returned}; {allowed}")

"""One architecture, followed through a visit's training steps and an evaluation pass without memory and arithmetic."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_lightning.config import Component, Config
from fl_lightning.core import PLAIN, Batch, Client, Fit, Objective, Payload, Phase, RunContext
from fl_lightning.core.layout import Segment
from fl_lightning.core.mixing import TILE
from fl_lightning.engine.build import make_group, run_of
from fl_lightning.engine.trainer import Trainer
from fl_lightning.errors import BadInput
from fl_lightning.methods.base import Method
from fl_lightning.models import build, frozen_in, frozen_when_built
from fl_lightning.models.base import inputs, targets
from fl_lightning.parallel import fabric_of
from fl_lightning.planning.setting import DataSizes, made_up
from fl_lightning.storage.state import MODEL, ClientState
from fl_lightning.training.module import ClientModule


@dataclass(frozen=True)
class ModelProfile:
    """One architecture, as it trains and is scored; all sizes in bytes unless they say otherwise."""

    model: str
    numbers: int
    """Of its vector, D."""
    item: int
    """Bytes of a number."""
    own: int
    """Buffers that never travel."""
    frozen: int
    """What does not train: once on every rank."""
    layers: int
    mask: np.ndarray
    """Bool [B]: the blocks that travel to clients."""
    columns: int
    """Numbers that travel to a client."""
    tiles: tuple[int, ...]
    """Pieces in which the server mixes them, by layer (of one layer, where the relation tells none apart)."""
    layer_tiles: tuple[int, ...]
    """The same by layer, whatever the relation does."""
    trained: int
    """Gradients of all parameters."""
    optimized: int
    """Vectors of a client that an optimiser trains, each with a state of its own."""
    saved: int
    """The most that autograd keeps of a training step for its backward pass."""
    step: int
    """The most that a training step's forward and backward pass hold at once, gradients included, with what the method
    has made for it."""
    evaluation: int
    """The most that an evaluation pass holds at once."""
    memory: float
    """Named tensors that method and relation keep with the server."""
    stacks: bool
    """Nothing in it mixes samples: clients can train at once."""
    terms: int
    """Vectors that the terms of its phases' objectives take where models are stacked."""
    asks: bool = False
    """A phase has own steps that ask for gradients: of all clients that train at once each is in the middle of one."""

    @property
    def vector(self) -> int:
        """One model-shaped vector."""
        return self.numbers * self.item


class _Live(TorchDispatchMode):
    """Follows the bytes of storages that are made within, and their peak; those of `known` do not count."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {t.untyped_storage()._cdata: weakref.ref(t.untyped_storage()) for t in known}
        self._kept = [t.untyped_storage() for t in known]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and look at what it made."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        if place in self._seen:
            return
        size = storage.nbytes()
        self._seen[place] = weakref.ref(storage)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self._seen.pop(place, None)
        self.now -= size


def one_process(precision: Any, accelerator: str = "cpu") -> Fabric:
    """One process; 16-mixed, which wants a GPU, becomes bf16-mixed on a CPU: the sizes are the same."""
    if precision == "16-mixed" and accelerator == "cpu":
        precision = "bf16-mixed"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*srun.* command is available.*")
        return fabric_of(accelerator, precision)


def trace(component: Component, config: Config, method: Method, sizes: DataSizes) -> ModelProfile:
    """Follow a training step of each phase and an evaluation pass of a model on tensors that have shapes, no numbers.

    A model that looks at its numbers cannot do without: it is followed on real ones.

    Raises:
        BadInput: the model does not fit the data, or fails in its step.
    """
    build(component, sizes.sample_shape, sizes.classes, sizes.text)  # tried on two zeros: a wrong shape is said as ever
    profile = _without_numbers(component, config, method, sizes)
    if profile is not None:
        return profile
    try:
        return _followed(component, config, method, sizes)
    except BadInput:
        raise
    except Exception as error:
        reason = f"its training step fails: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise BadInput("model", component.class_path, reason) from error


def _without_numbers(*given: Any) -> ModelProfile | None:
    """`_followed` on tensors without numbers, in a process of its own; None: a user's model cannot do without.

    Such a backward pass starts threads that stay, and a process that has some can fork none that trains.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def follow() -> None:
        answer = None
        with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*data pointer of FakeTensor.*")  # a method copies a part of the model
            answer = _followed(*given)
        theirs.send(answer)

    child = context.Process(target=follow)
    child.start()
    theirs.close()
    try:
        profile: ModelProfile | None = ours.recv()
    except EOFError:  # it died
        profile = None
    child.join()
    return profile


def _followed(component: Component, config: Config, method: Method, sizes: DataSizes) -> ModelProfile:
    fabric = one_process(config.fabric.precision)
    model = build(component, sizes.sample_shape, sizes.classes, sizes.text)
    frozen = frozen_in(model)
    model = method.build(model, sizes.classes)
    group = make_group(0, fabric.device, config, model, [0], method, frozen + frozen_when_built(model))
    one = replace(sizes, train=sizes.train[:1], test=sizes.test[:1])  # of all data the first client's, made up
    run = run_of(fabric, config, made_up(one), method, [], [group], Path())
    run.home = [0] * config.clients
    dtype = run.dtype
    trainer = Trainer(fabric, run, group, model)
    parameters = trainer.module.binding.parameters
    size = max(2, min(config.federation.batch_size, max(sizes.train)))
    saved, step, slots, terms, asks = _steps(trainer, _client(run, trainer), _batch(size, sizes, dtype))
    scored = min(config.evaluation.batch_size, max(sizes.test))
    segments = group.layout.segments(group.down_mask, by_layer=run.relation.per_layer)
    item = group.initial.element_size()
    return ModelProfile(
        model=component.class_path.rpartition(".")[2],
        numbers=group.layout.size,
        item=item,
        own=sum(b.nbytes for b in group.initial_buffers),
        frozen=sum(tensor.nbytes for tensor in group.frozen.values()),
        layers=len(group.layout.layers),
        mask=group.down_mask,
        columns=sum(s.stop - s.start for s in segments),
        tiles=_tiles(segments),
        layer_tiles=_tiles(group.layout.segments(group.down_mask, by_layer=True)),
        trained=sum(p.numel() for p in parameters if p.requires_grad) * item,
        optimized=slots,
        saved=saved,
        step=step,
        evaluation=_pass(trainer, _batch(scored, sizes, dtype)[0]),
        memory=_memory(run),
        stacks=not group.whole_last,
        terms=terms,
        asks=asks,
    )


def _tiles(segments: Iterable[Segment]) -> tuple[int, ...]:
    """Pieces of `segments`, by layer."""
    tiles = Counter[int]()
    for s in segments:
        tiles[s.layer] += math.ceil((s.stop - s.start) / TILE)
    return tuple(tiles[layer] for layer in range(1 + max(tiles, default=0)))


def _client(run: RunContext, trainer: Trainer) -> Client:
    """The first client in its first round; it has received zeros."""
    group, slots = trainer.group, run.method.slots()
    vectors = {name: slot.first(group.initial).clone() for name, slot in slots.items()}
    exchanged = {name: torch.zeros_like(group.initial) for name, slot in slots.items() if slot.exchanged}
    state = ClientState(0, {MODEL: group.initial.clone()} | vectors, list(group.initial_buffers), {})
    with contextlib.suppress(Exception):  # what it keeps may hang on data
        state.memory = run.method.init_client(run)
    client = Client(run, group, 0, 1, state)
    client.payload = Payload(group.layout, torch.zeros_like(group.initial), group.down_mask.copy(), exchanged)
    _ = client.data  # made now, they are no part of its steps
    return client


def _memory(run: RunContext) -> float:
    """Bytes of what method and relation keep with the server, made without memory; where that hangs on data, a method
    counts nothing, and a relation holds everybody by everybody."""
    total = 0.0
    for part, unknown in ((run.method, 0.0), (run.relation, 8.0 * run.clients**2)):
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                total += sum(tensor.nbytes for tensor in part.init_server(run).values())
        except Exception:
            total += unknown
    return total


def _batch(samples: int, sizes: DataSizes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = inputs(samples, sizes.sample_shape, sizes.text)
    y = targets(samples, sizes.sample_shape, 1, sizes.text, floats=sizes.task != "classification")
    return x.to(dtype if sizes.text is None else x.dtype), y


def _known(client: Client) -> list[Tensor]:
    """What lies there before a step."""
    group, module, received = client.group, client.module, client.payload
    lasting = [group.initial, *group.initial_buffers, received.vector, *received.vectors.values()]
    return [*lasting, *client.state.vectors.values(), *module.model.parameters(), *module.model.buffers()]


def _steps(trainer: Trainer, client: Client, batch: tuple[Tensor, Tensor]) -> tuple[int, int, int, int, bool]:
    """Of a step of each phase of a visit: the most that is saved for its backward pass, the most that it holds at once,
    how many vectors an optimiser trains, how many the objectives' terms take, and whether own steps ask for gradients.

    A method that asks for numbers, or for what only a round has, is followed with a proximal term whose anchor is what
    was received.
    """
    module, nothing = trainer.module, torch.zeros(())
    known = [*_known(client), *batch, nothing]
    sizes: list[tuple[int, int]] = []
    slots, terms, asks = set(), 0, False
    try:
        with _Live(known) as live:  # what a method makes for its phases lies there with the steps
            for phase in _phases(client):
                sizes.append(_step(module, client, phase, batch, known, live))
                slots |= {phase.slot} if phase.step is None else set()
                terms, asks = max(terms, _terms(phase.objective)), asks or phase.by_gradient
                client.fits.append(Fit(nothing, nothing, 1, len(batch[1]), 1.0))
            if not slots:
                sizes.append(_step(module, client, Phase(), batch, known, live))
    except Exception:
        with _Live(known) as live:
            proximal = Phase(objective=client.proximal(client.payload, 1.0))
            sizes.append(_step(module, client, proximal, batch, known, live))
            terms = max(terms, _terms(proximal.objective))
    module.set_objective(PLAIN)
    module.train_only(None)
    saved, peak = (max(values) for values in zip(*sizes, strict=True))
    return saved, peak, max(1, len(slots)), terms, asks


def _terms(objective: Objective) -> int:
    """Anchor and coefficients, the linear term, and room for both."""
    vectors = 2 * objective.pulls + (objective.linear is not None)
    return vectors + (vectors > 0)


def _phases(client: Client) -> Iterator[Phase]:
    """All of a visit."""
    method = client.run.method
    yield from method.receive(client, client.payload) or ()
    yield from method.phases(client, client.payload)


def _step(
    module: ClientModule, client: Client, phase: Phase, batch: Batch, known: list[Tensor], live: _Live
) -> tuple[int, int]:
    """Bytes that are saved for the backward pass (of nothing that is `known`), and the peak of both passes."""
    ours = {t.untyped_storage()._cdata for t in known}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ours:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    module.binding.rebind(client[phase.slot], client.state.buffers)
    module.model.train()
    module.set_objective(phase.objective)
    module.train_only(phase.trains)
    live.peak = live.now
    if phase.step is not None:  # as many passes as it likes: what is saved is told by a step of the optimiser
        with module.last.trial():
            phase.step(client, batch)
        return 0, live.peak
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), module.cast(), module.last.trial():
        loss = module.training_step(batch, 0)
    module.coaching()
    parameters = [p for p in module.binding.parameters if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    del gradients
    return sum(saved.values()), live.peak


def _pass(trainer: Trainer, x: Tensor) -> int:
    """The most that a pass in evaluation mode holds at once."""
    model = trainer.module.model.eval()
    with _Live([*model.parameters(), *model.buffers(), x]) as live, torch.no_grad(), trainer.module.cast():
        model(x)
    return live.peak

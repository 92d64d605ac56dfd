"""What a method of personalised federated learning is: a frozen object that states only its
difference from FedAvg."""

from dataclasses import dataclass, fields
from difflib import get_close_matches
from inspect import isfunction
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fl_lightning.callbacks.relations import Alone, Relation, SampleCounts, Uniform
from fl_lightning.configuration.config import check
from fl_lightning.configuration.ranges import check_ranges
from fl_lightning.core import (
    Beside,
    Block,
    Client,
    GroupServer,
    Payload,
    Payloads,
    Phase,
    Phases,
    RunContext,
    Server,
    Slot,
    Tensors,
    Traits,
)
from fl_lightning.core.traits import is_shipped, sees_only_the_mean

Scope = Literal["shared", "personal", "uploaded"]
"""shared: sent both ways. personal: never sent. uploaded: sent to the server only."""

TRAITS = {field.name for field in fields(Traits)}

_LIKE = 0.8
"""How alike a function's name and a hook's may be (difflib's ratio): `recieve` is 0.86, and what
the methods here call their own helpers is below 0.75."""


@dataclass(frozen=True)
class Method:
    """FedAvg, and the base of all methods: each overrides what it does differently.

    Fields of a subclass are its hyper-parameters: they are the arguments in YAML and on the command
    line. Those that are `searched` say where `fl-train tune` looks for their value. A method holds
    no state (it is frozen): what survives a round lies in the clients' vectors and memory and in
    the server's.

    Raises:
        TypeError: a subclass has a function named nearly as a hook, which nobody would call, or
            declares a trait as a class variable.
    """

    traits: ClassVar[Traits] = Traits()
    """What it declares; a variant of another method changes some of that one's by `replace`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks = [name for name, value in vars(Method).items() if isfunction(value)]
        for name, value in vars(cls).items():
            if name in TRAITS and "ClassVar" in str(cls.__annotations__.get(name, ClassVar)):
                raise TypeError(f"{cls.__name__}.{name}: write traits = Traits({name}=...)")
            inherited = any(hasattr(base, name) for base in cls.__bases__)
            if inherited or name.startswith("_") or not isfunction(value):
                continue
            if like := get_close_matches(name, hooks, 1, _LIKE):
                raise TypeError(
                    f"{cls.__name__}.{name} would never be called: is it {like[0]}? Else begin it "
                    f"with _"
                )

    def __post_init__(self) -> None:
        """Raise `BadInput` for an argument that its type, or a rule of its traits, does not allow
        (`ranges`)."""
        check_ranges(self, "method")
        for rule in self.traits.needs:
            rule.check(vars(self), "method")

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` where the method cannot work on this run.

        The engine refuses a regression itself where `traits.classes` is set.
        """

    # ---------------------------------------------------------------- the model

    def build(self, model: nn.Module, num_classes: int) -> nn.Module:
        """The network that clients train: the user's, or one with modules added (a second
        classifier, a gate)."""
        return model

    def slots(self) -> dict[str, Slot]:
        """Model-shaped vectors that every client owns beside `model`."""
        return {}

    def scope(self, block: Block) -> Scope:
        """How one tensor of the model travels: `shared` both ways, `uploaded` to the server only,
        `personal` never."""
        return "shared"

    # ---------------------------------------------------------------- the server: on every rank

    def relation(self) -> Relation:
        """Who receives whose model: what the default `broadcast` and `aggregate` go by."""
        return SampleCounts()

    def init_server(self, run: RunContext) -> Tensors:
        """Named tensors that the server keeps in its memory, equal on every rank, with their first
        values."""
        return {}

    @sees_only_the_mean
    def broadcast(self, server: Server) -> Payloads:
        """What each client of the cohort is sent (this rank's): the global model, or its own mix by
        the relation."""
        relation = server.run.relation
        payloads: Payloads = {}
        for group in server.groups:
            if relation.is_global:
                payloads |= group.send(dict.fromkeys(group.here, group["model"]))
            elif group.cohort:
                payloads |= group.mix_by(relation)
        return payloads

    @sees_only_the_mean
    def aggregate(self, server: Server) -> None:
        """The relation learns from the round's uploads; then the new global model, where there is
        one. At least one client has answered: otherwise the engine ends the run."""
        relation = server.run.relation
        relation.learn(server)
        for group in server.groups:
            if relation.is_global and group.answered:
                group["model"] = group.mean_by(relation)

    # ---------------------------------------------------------------- a client: on its home rank

    def init_client(self, run: RunContext) -> Tensors:
        """Named tensors (on the CPU) that a client keeps in its memory, with their first values
        (`client_memory`)."""
        return {}

    def receive(self, client: Client, payload: Payload) -> Phases | None:
        """`payload` has arrived. The client's model is then scored as `before`; a method that must
        train for it yields phases."""
        if self.traits.starts == "server":
            client.overwrite(payload)
        return None

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Local training. Where this is a generator, what follows a `yield` runs when that phase is
        done (`client.fits[-1]` is what it came to)."""
        return [Phase()]

    def upload(self, client: Client, payload: Payload) -> Payload:
        """What goes to the server."""
        return Payload(client.layout, client["model"], client.group.up_mask.copy())

    def beside(self) -> dict[str, Beside]:
        """What uploads hold in `statistics` and `extra`, by name: what is not declared cannot be
        protected."""
        return {}

    def private_phases(self) -> tuple[float | None, ...] | str:
        """Tell whether noise on steps (`optimizer.privacy`) covers the method.

        Returns:
            Where it does, the epochs of each phase of a round (None: the federation's length). It
            does if all that is kept and uploaded follows from the optimiser's steps down the task
            loss on all of the client's samples. Else a string, what else the method makes of
            samples, with which the run is refused.
        """
        if not is_shipped(self):
            return (
                "is a class of your own whose private_phases does not say what it makes of samples"
            )
        return self.traits.sample_use or (None,)

    # ----------------------------------------------------------- a client that has been in no round

    def admit(self, server: Server, client: Client) -> None:
        """A newcomer is about to take part: what the server sets for it (every rank). Its model
        begins as the global one, or as the mean of all; the tensors of `init_server` have room for
        one client more."""

    def newcomer_phases(self, client: Client, payload: Payload) -> Phases:
        """A newcomer's local training."""
        return self.phases(client, payload)

    # ---------------------------------------------------------------- scores

    def personal(self, client: Client) -> Tensor:
        """The vector (D,) that is scored before and after local training. It is also the model that
        is exported, and where there is no global model the one that fine-tuning begins from."""
        return client["model"]

    def global_model(self, group: GroupServer, client: int) -> Tensor | None:
        """The vector (D,) that is scored as the client's global model, after aggregation. None:
        there is none, as the relation mixes for each client, or as parts are not sent that train
        (those that never train, `traits.still`, everybody has)."""
        is_sent = group.group.down_mask[group.layout.is_parameter].all()
        is_shared = is_sent or self.traits.still
        return group["model"] if group.server.run.relation.is_global and is_shared else None

    def prepare(
        self,
        client: Client,
        vector: Tensor,
        kind: str,
    ) -> Tensors:
        """What `outputs` needs beside the model `vector` (D,), which is about to be scored as
        `kind`: made once, it is kept in `client.prepared`."""
        return {}

    def outputs(
        self,
        client: Client,
        x: Tensor,
        kind: str,
    ) -> Tensor:
        """Class scores (batch, classes) of the bound model, which is scored as `kind` (before,
        after, global, ...)."""
        scores: Tensor = client.module.model(x)
        return scores

    def summary(self, run: RunContext) -> dict[str, Any]:
        """What `summary.json` gains at the end."""
        return {}


@dataclass(frozen=True)
class WithoutModels(Method):
    """Base: no model travels; what clients tell each other, if anything, travels beside it."""

    def relation(self) -> Relation:
        """Nobody receives a model."""
        return Alone()

    def scope(self, block: Block) -> Scope:
        """No tensor of the model travels."""
        return "personal"


@dataclass(frozen=True)
class OwnClassifier(Method):
    """Base: everything travels both ways but the classifier, which is never sent."""

    def scope(self, block: Block) -> Scope:
        """The classifier stays."""
        return "personal" if block.head else "shared"


@dataclass(frozen=True)
class OwnStatistics(Method):
    """Base: parameters travel; running statistics stay each client's own, since mixes of them
    belong to no model."""

    def scope(self, block: Block) -> Scope:
        """Running statistics stay."""
        return "shared" if block.kind == "parameter" else "personal"


@dataclass(frozen=True)
class PlainMean(Method):
    """Base: the global model is the plain mean, in which clients weigh the same whatever their
    samples."""

    def relation(self) -> Relation:
        """The plain mean."""
        return Uniform()


@dataclass(frozen=True)
class PlainSteps(Method):
    """Base: clients take steps w - lr g of the method's own, so the optimiser's steps must be
    such."""

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` for an optimiser with other steps."""
        check_plain_steps(run)


def move_on(group: GroupServer, old: Tensor, size: float) -> None:
    """Scale the server's step: the group's new global model becomes old + size (new - old) on its
    parameters; exact where `size`, the server's learning rate, is 0 or 1.

    Running statistics stay what they are: beyond the new ones a variance might be negative.
    """
    columns = group.layout.parameters
    group["model"][columns] = torch.lerp(old[columns], group["model"][columns], size)


def check_sgd(run: RunContext, why: str, **values: object) -> None:
    """Raise `BadInput` unless steps are those of SGD, with losses that are not scaled.

    Args:
        run: of the method.
        why: the method needs them, in words.
        values: of the optimiser's keys, by name, where they must have one.
    """
    config = run.config.optimizer
    for key, value in {"name": "sgd", **values}.items():
        setting = getattr(config, key)
        requirement = f"{why}: it must be {'null' if value is None else value}"
        check(f"optimizer.{key}", setting, setting == value, requirement)
    carried = bool(config.keep_state and config.momentum)
    requirement = f"{why}: it must be false beside momentum"
    check("optimizer.keep_state", config.keep_state, not carried, requirement)
    check_no_scaling(run)


def check_plain_steps(run: RunContext) -> None:
    """Raise `BadInput` unless the optimiser's step is w - lr g, as a method's own steps are."""
    why = f"{run.method_name} takes steps w - lr g of its own"
    check_sgd(run, why, momentum=0, weight_decay=0, clip_norm=None)


def check_no_scaling(run: RunContext) -> None:
    """Raise `BadInput` where losses must be scaled: a method's own gradients are not, and steps may
    be left out."""
    precision = run.config.fabric.precision
    requirement = f"{run.method_name} cannot work with scaled losses: use bf16-mixed or 32-true"
    check("fabric.precision", precision, precision != "16-mixed", requirement)

"""The base of all methods: a frozen dataclass that states only how it differs from FedAvg."""

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
"""Similarity (difflib's ratio) from which on a function's name counts as a misspelt hook: `recieve`
has 0.86; the helpers of the methods here are below 0.75."""


@dataclass(frozen=True)
class Method:
    """FedAvg, and the base of all methods: a subclass overrides the hooks in which it differs.

    Fields of a subclass are its hyper-parameters: arguments in YAML and on the command line. A
    field with a default of `searched(...)` also states the range in which `fl-train tune` looks for
    its value. A method has no state of its own (it is frozen): values that outlast a round are kept
    in the clients' vectors and memory and in the server's.

    Raises:
        TypeError: a subclass has a function whose name is a misspelt hook's, which would never be
            called, or declares a trait as a class variable.
    """

    traits: ClassVar[Traits] = Traits()
    """The method's declarations; a variant of another method changes some of them by `replace`."""

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
                    f"{cls.__name__}.{name} would never be called: rename it to {like[0]}, or let "
                    f"its name begin with _"
                )

    def __post_init__(self) -> None:
        """Raise `BadInput` for an argument that its type, or a rule among the traits (`needs`),
        forbids."""
        check_ranges(self, "method")
        for rule in self.traits.needs:
            rule.check(vars(self), "method")

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` if the method cannot work with the run's settings, data or models.

        The engine itself refuses regression where the trait `classes` is set.
        """

    # ---------------------------------------------------------------- the model

    def build(self, model: nn.Module, num_classes: int) -> nn.Module:
        """Return the network that clients train: the user's, or the user's with modules added (a
        second classifier, a gate)."""
        return model

    def slots(self) -> dict[str, Slot]:
        """Declare further vectors of the model's size that every client keeps, by name."""
        return {}

    def scope(self, block: Block) -> Scope:
        """Return how a tensor of the model is exchanged: `shared` in both directions, `uploaded` to
        the server only, or `personal`, never."""
        return "shared"

    # ---------------------------------------------------------------- the server: on every rank

    def relation(self) -> Relation:
        """Return the `Relation`: the weights of each client's model in the model that each client
        receives. The default `broadcast` and `aggregate` mix by it."""
        return SampleCounts()

    def init_server(self, run: RunContext) -> Tensors:
        """Return the initial values of named tensors that the server keeps in its memory, equal on
        all ranks."""
        return {}

    @sees_only_the_mean
    def broadcast(self, server: Server) -> Payloads:
        """Return what the server sends to each client of the cohort on this rank: the global model,
        or the client's own mix by the relation."""
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
        """Let the relation learn from the round's uploads; then compute the new global model, if
        the method has one.

        At least one client has answered; otherwise the engine ends the run.
        """
        relation = server.run.relation
        relation.learn(server)
        for group in server.groups:
            if relation.is_global and group.answered:
                group["model"] = group.mean_by(relation)

    # ---------------------------------------------------------------- a client: on its home rank

    def init_client(self, run: RunContext) -> Tensors:
        """Return the initial values of named tensors that a client keeps in its memory, on the CPU.
        The trait `client_memory` declares them."""
        return {}

    def receive(self, client: Client, payload: Payload) -> Phases | None:
        """Write the client's download into its model, which is then scored as `before` (before
        local training).

        A method that trains before this score yields its phases, as in `phases`. The default
        overwrites the blocks of the client's model that the server has sent; if the trait `starts`
        is not `server`, it leaves the model as it is.
        """
        if self.traits.starts == "server":
            client.overwrite(payload)
        return None

    def phases(self, client: Client, payload: Payload) -> Phases:
        """Return the phases of local training, or yield them: the code after a `yield` runs when
        that phase has ended, with its result in `client.fits[-1]`."""
        return [Phase()]

    def upload(self, client: Client, payload: Payload) -> Payload:
        """Return what the client sends to the server."""
        return Payload(client.layout, client["model"], client.group.up_mask.copy())

    def beside(self) -> dict[str, Beside]:
        """Declare the tensors that a client uploads beside its model, in `Payload.statistics` and
        `Payload.extra`: by name, their content and the kind of their values.

        Local privacy refuses to run with tensors that are not declared.
        """
        return {}

    def private_phases(self) -> tuple[float | None, ...] | str:
        """Return the epochs of each phase of a round, by which DP-SGD (`optimizer.privacy`) counts
        the client's steps, or the reason why DP-SGD cannot protect the method's clients.

        DP-SGD protects them if everything that a client keeps and uploads follows from the
        optimiser's steps on the task loss, with all of the client's samples.

        Returns:
            A tuple with the epochs of each phase (None: as configured for local training). Or a
            text that names the method's other use of samples: the run is then refused with this
            text.
        """
        if not is_shipped(self):
            return "is a class of your own whose private_phases does not say how it uses samples"
        return self.traits.sample_use or (None,)

    # ----------------------------------------------------------- a client that has been in no round

    def admit(self, server: Server, client: Client) -> None:
        """Set up the server's tensors for a newcomer: a client that joins after the last round.

        Called on every rank, before the newcomer's first download. By then the tensors of
        `init_server` that have a row for each client have one more, and the newcomer's model is the
        global one or the mean of all clients'.
        """

    def newcomer_phases(self, client: Client, payload: Payload) -> Phases:
        """Return the phases of a newcomer's local training (see `admit`), or yield them."""
        return self.phases(client, payload)

    # ---------------------------------------------------------------- scores

    def personal(self, client: Client) -> Tensor:
        """Return the vector (D,) that is scored before and after local training, and exported.
        Fine-tuning starts from it if there is no global model."""
        return client["model"]

    def global_model(self, group: GroupServer, client: int) -> Tensor | None:
        """Return the vector (D,) that is scored as the client's global model after aggregation, or
        None if there is none.

        The default has none if the relation mixes a model for each client, or if some parameters
        are trained and not sent. Parameters that never train (trait `still`) are the same
        everywhere and need not be sent.

        Args:
            group: the server's handle of the clients that share the client's architecture.
            client: number of the client.
        """
        is_sent = group.group.down_mask[group.layout.is_parameter].all()
        is_shared = is_sent or self.traits.still
        return group["model"] if group.server.run.relation.is_global and is_shared else None

    def prepare(
        self,
        client: Client,
        vector: Tensor,
        kind: str,
    ) -> Tensors:
        """Return tensors that `outputs` needs to score a model, such as the features of stored
        samples. They are computed once for each scoring, and kept in `client.prepared`.

        Args:
            client: whose model is scored.
            vector: the model, (D,).
            kind: kind of the model: `before`, `after`, `global`, ... as in `outputs`.
        """
        return {}

    def outputs(
        self,
        client: Client,
        x: Tensor,
        kind: str,
    ) -> Tensor:
        """Return class scores (batch, classes) of inputs `x` by the client's network, into which
        the scored vector has been loaded.

        Args:
            client: whose network it is.
            x: a batch of inputs.
            kind: kind of the scored model: `before` or `after` local training, `global`,
                `distilled` or `finetuned`.
        """
        scores: Tensor = client.module.model(x)
        return scores

    def summary(self, run: RunContext) -> dict[str, Any]:
        """Return entries that are added to `summary.json` at the end of the run."""
        return {}


@dataclass(frozen=True)
class WithoutModels(Method):
    """Base: clients and server never exchange models, so all blocks are personal; a subclass may
    exchange other tensors, such as predictions."""

    def relation(self) -> Relation:
        """Return the relation in which every client keeps its own model."""
        return Alone()

    def scope(self, block: Block) -> Scope:
        return "personal"


@dataclass(frozen=True)
class OwnClassifier(Method):
    """Base: the classifier stays at the client; everything else is shared."""

    def scope(self, block: Block) -> Scope:
        return "personal" if block.head else "shared"


@dataclass(frozen=True)
class OwnStatistics(Method):
    """Base: parameters are shared; running statistics stay at the client, since a mix of them fits
    no mixed model."""

    def scope(self, block: Block) -> Scope:
        return "shared" if block.kind == "parameter" else "personal"


@dataclass(frozen=True)
class PlainMean(Method):
    """Base: the global model is the mean in which all clients weigh the same, whatever their number
    of samples."""

    def relation(self) -> Relation:
        return Uniform()


@dataclass(frozen=True)
class PlainSteps(Method):
    """Base: clients take gradient steps w - lr g of the method's own, and the configured optimiser
    must be plain SGD, which steps in the same way."""

    def check(self, run: RunContext) -> None:
        """Raise `BadInput` unless the optimiser is plain SGD."""
        check_plain_steps(run)


def move_on(group: GroupServer, old: Tensor, size: float) -> None:
    """Apply the server's learning rate: replace the parameters of the group's new global model by
    old + size (new - old).

    The result is exact for `size` 0 and 1. Running statistics stay as aggregated: extrapolated
    variances could become negative.

    Args:
        group: whose global model has just been aggregated.
        old: the global model (D,) before aggregation.
        size: the server's learning rate.
    """
    columns = group.layout.parameters
    group["model"][columns] = torch.lerp(old[columns], group["model"][columns], size)


def check_sgd(run: RunContext, why: str, **values: object) -> None:
    """Raise `BadInput` unless the optimiser is SGD, its momentum is not kept between rounds, and
    losses are not scaled.

    Args:
        run: whose settings are checked.
        why: the reason, which begins the message.
        values: further keys of `optimizer` and the values that they must have.
    """
    config = run.config.optimizer
    for key, value in {"name": "sgd", **values}.items():
        setting = getattr(config, key)
        check(
            f"optimizer.{key}",
            setting,
            setting == value,
            f"{why}; set it to {'null' if value is None else value}",
        )
    is_kept = bool(config.keep_state and config.momentum)
    check(
        "optimizer.keep_state",
        config.keep_state,
        not is_kept,
        f"{why}; set it to false, or optimizer.momentum to 0",
    )
    check_no_scaling(run)


def check_plain_steps(run: RunContext) -> None:
    """Raise `BadInput` unless the optimiser is plain SGD, whose step is w - lr g."""
    why = f"{run.method_name} takes plain steps w - lr g of its own"
    check_sgd(run, why, momentum=0, weight_decay=0, clip_norm=None)


def check_no_scaling(run: RunContext) -> None:
    """Raise `BadInput` for the precision 16-mixed, which scales losses and skips steps whose
    gradients overflow: gradients that a method computes itself are not scaled."""
    precision = run.config.fabric.precision
    check(
        "fabric.precision",
        precision,
        precision != "16-mixed",
        f"{run.method_name} cannot work with scaled losses; use bf16-mixed or 32-true",
    )

"""Declarations of a method that the engine, privacy callbacks and listings read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fl_lightning.configuration.ranges import Needs
from fl_lightning.core.newcomer import Rule
from fl_lightning.foundation.errors import BadInput

MARK = "sees_only_the_mean"
"""Attribute of the hooks that `sees_only_the_mean` marks."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """A method's declarations: `traits = Traits(judge="after")` in its class.

    A variant of another method writes `traits = replace(FedMD.traits, judge="global")`.
    """

    family: str = "your own"
    """The idea that the method belongs to; `fl-train list methods` groups by it."""
    judge: Literal["before", "after", "global", "finetuned"] = "global"
    """The kind of model whose score counts as the run's by default: the client's before or after
    local training, the global one, or a fine-tuned copy."""
    starts: Literal["own", "server", "both"] = "server"
    """The client's model after `receive`: its own from before, the received one, or parts of
    both."""
    features: bool = False
    """The method's losses, passes or predictions use features (the classifier's input)."""
    adapts: bool = False
    """A received model scores differently at each client, as `personal`, `prepare` or `outputs` use
    the client's data or memory."""
    classes: bool = False
    """The method needs classes, so regression is refused."""
    statistics: bool = False
    """Uploads hold statistics or other tensors that the server aggregates."""
    several: bool = True
    """Clients may run several architectures if the relation allows it."""
    changes_download: bool = False
    """`broadcast` may omit blocks that `scope` sends."""
    changes_upload: bool = False
    """`upload` may send another vector than the client's model, or other blocks than those of
    `scope`."""
    client_memory: bool = False
    """`init_client` returns tensors, or hooks use `client.rounds`."""
    everyone_first: bool = False
    """All clients take part in the first round, for any participation."""
    still: bool = False
    """Personal blocks never train: all clients keep the same initial ones."""
    needs: tuple[Needs, ...] = ()
    """Rules between two arguments."""
    newcomers: Rule | None = None
    """How a client that joins later obtains its model; None: as follows from `scope` and the
    relation (`engine.joining`)."""
    receives: str = ""
    """The model that clients receive, in words; empty: it follows from scope and relation."""
    receives_beside: str = ""
    """The tensors that clients receive in addition to one model, in words."""
    sample_use: str = ""
    """How the method uses samples in addition to the optimiser's steps on the task loss, in
    words."""


Hook = TypeVar("Hook")


def sees_only_the_mean(hook: Hook) -> Hook:
    """Decorator that marks an `aggregate` or `broadcast` as using uploads only through the
    relation's mean, to which `centralprivacy` adds noise. Without the mark, `centralprivacy`
    refuses the method."""
    setattr(hook, MARK, True)
    return hook


def declares(part: Any, trait: str) -> bool:
    """Whether a method declares `trait` in its traits, or a callback in its class."""
    return bool(getattr(getattr(part, "traits", part), trait, False))


def is_shipped(method: object) -> bool:
    """Whether the method is one of this package's."""
    return type(method).__module__.startswith("fl_lightning.methods.")


def undeclared(
    part: Any,
    trait: str,
    why: str,
) -> BadInput:
    """Make the error for a method or callback that needs `trait` without declaring it.

    Args:
        part: the method or callback.
        why: the action that needs the trait, for the message: "its upload changes ...".
    """
    place = ""
    if hasattr(part, "traits"):
        place = "traits."
    return BadInput(f"{type(part).__name__}.{place}{trait}", False, f"{why}: set it to True")

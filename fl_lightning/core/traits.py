"""What a method declares about itself, for the engine, privacy and listings to go by."""

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
    """The idea that the method belongs to, as `fl-train list methods` groups them."""
    judge: Literal["before", "after", "global", "finetuned"] = "global"
    """The model that is scored by default: the client's before or after its local training, the
    global one, or its fine-tuned copy."""
    starts: Literal["own", "server", "both"] = "server"
    """What `receive` makes the client's model: its own as it was, what it has received, or parts
    of both."""
    features: bool = False
    """Own losses, passes or predictions use features (the classifier's input)."""
    adapts: bool = False
    """A received model scores differently at each client: `personal`, `prepare` or `outputs` use
    its data or memory."""
    classes: bool = False
    """It works with classes: regression is refused."""
    statistics: bool = False
    """Uploads hold statistics or other tensors that the server aggregates."""
    several: bool = True
    """Clients may run several architectures, as far as the relation allows it."""
    changes_download: bool = False
    """`broadcast` may leave out blocks that `scope` sends."""
    changes_upload: bool = False
    """`upload` may send another vector than the client's model, or other blocks than `scope`
    says."""
    client_memory: bool = False
    """`init_client` returns tensors, or hooks use `client.rounds`."""
    everyone_first: bool = False
    """All clients take part in the first round, whatever the participation."""
    still: bool = False
    """Personal parts never train: they are the initial ones, which everybody has."""
    needs: tuple[Needs, ...] = ()
    """Rules between two arguments."""
    newcomers: Rule | None = None
    """What a client is given that joins later; None: it follows from `scope` and the relation
    (`engine.joining`)."""
    receives: str = ""
    """The model that clients receive, in words; empty: scope and relation say it."""
    receives_beside: str = ""
    """What clients receive beside one model, in words."""
    sample_use: str = ""
    """What the method makes of samples beside the optimiser's steps down the task loss, in
    words."""


Hook = TypeVar("Hook")


def sees_only_the_mean(hook: Hook) -> Hook:
    """Mark an `aggregate` or `broadcast` that uses uploads through the relation's mean alone, which
    the noise of `centralprivacy` then covers."""
    setattr(hook, MARK, True)
    return hook


def declares(part: Any, trait: str) -> bool:
    """Whether a method, by its traits, or a callback, by itself, declares `trait`."""
    return bool(getattr(getattr(part, "traits", part), trait, False))


def is_shipped(method: object) -> bool:
    """Whether the class of `method` is one of the package's."""
    return type(method).__module__.startswith("fl_lightning.methods.")


def undeclared(
    part: Any,
    trait: str,
    why: str,
) -> BadInput:
    """The error of a method or callback that does what only `trait` allows."""
    place = "traits." if hasattr(part, "traits") else ""
    return BadInput(f"{type(part).__name__}.{place}{trait}", False, f"{why}: set it to True")

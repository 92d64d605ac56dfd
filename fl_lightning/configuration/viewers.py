"""The table of who sees what, by method, from what the methods' classes declare: the head of
docs/privacy.md."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from fl_lightning.configuration import explain

HEAD = (
    "method",
    "the server receives of a client",
    "another client receives",
    "`localprivacy`",
    "`centralprivacy`",
    "`optimizer.privacy`",
)


def table(classes: Mapping[str, Any]) -> str:
    """A row for each of the methods' `classes` by name, in Markdown."""
    return explain.table(HEAD, (_row(name, cls()) for name, cls in classes.items()))


def _row(name: str, method: Any) -> tuple[str, ...]:
    entries = method.beside()
    slots = [f"vector `{slot}`" for slot, given in method.slots().items() if given.exchanged]
    kinds: dict[str, list[str]] = {}
    for entry in entries.values():
        if entry.values != "public":
            kinds.setdefault(entry.kind, []).append(entry.words)
    described = [f"{', '.join(words)} (`{kind}`)" for kind, words in kinds.items()]
    sends = "; ".join(filter(None, [_blocks(method, ("shared", "uploaded")), *slots, *described]))
    relation, down = method.relation(), _blocks(method, ("shared",))
    gets = f"{'the mean' if relation.is_global else 'its own mix'} of {down}" if down else ""
    gets = method.traits.receives or ("" if type(relation).__name__ == "Alone" else gets)
    gets = "; ".join(filter(None, [gets, method.traits.receives_beside]))
    refused = [entry.kind for entry in entries.values() if entry.values is None]
    local = f"refused: `{refused[0]}`" if refused else "yes" if sends else "nothing to protect"
    central = importlib.import_module("fl_lightning.callbacks.central").refusal(method)
    covered = "nothing to protect" if not sends else "yes" if central is None else "refused"
    why = importlib.import_module("fl_lightning.callbacks.stepprivacy").refusal(method)
    return (
        f"`{name}`",
        sends or "nothing",
        gets or "nothing",
        local,
        covered,
        f"refused: {why}" if why else "yes",
    )


def _blocks(method: Any, scopes: tuple[str, ...]) -> str:
    """Names what a typical deep network sends in these scopes; empty: nothing."""
    nn = importlib.import_module("torch.nn")
    matrices = {
        name: nn.ModuleDict({"default": nn.Linear(4, 4, bias=False)})
        for name in ("lora_A", "lora_B")
    }
    linear = [nn.ModuleDict(matrices), *(nn.Linear(4, 4) for _ in range(5))]
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4), *linear
    )
    blocks = (
        importlib.import_module("fl_lightning.core.layout")
        .Layout(network, str(len(network) - 1))
        .blocks
    )
    sent = {block.name for block in blocks if method.scope(block) in scopes}
    if not sent:
        return ""
    parts = {
        "models": blocks,
        "models' parameters": [b for b in blocks if b.kind == "parameter"],
        "models without normalisation": [b for b in blocks if not b.normalisation],
        "bodies' parameters": [b for b in blocks if not b.head and b.kind == "parameter"],
        "bodies": [b for b in blocks if not b.head],
        "the A of adapters": [b for b in blocks if ".lora_A." in b.name],
        "models without the A of adapters": [b for b in blocks if ".lora_A." not in b.name],
    }
    return next(
        (words for words, whole in parts.items() if {b.name for b in whole} == sent), "some layers"
    )

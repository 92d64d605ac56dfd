"""Makes the table in docs/privacy.md of what the server and other clients receive from a client, by
method, from the declarations of the methods' classes."""

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
    """Return a Markdown table with a row for each method: what the server and another client
    receive from a client, and which forms of differential privacy the method supports. `classes`:
    the methods' classes by name."""
    return explain.table(HEAD, (_row(name, cls()) for name, cls in classes.items()))


def _row(name: str, method: Any) -> tuple[str, ...]:
    entries = method.beside().values()
    uploads = [_blocks(method, ("shared", "uploaded"))]
    uploads += [f"vector `{name}`" for name, slot in method.slots().items() if slot.exchanged]
    words_of_kind: dict[str, list[str]] = {}
    for entry in entries:
        if entry.values != "public":
            words_of_kind.setdefault(entry.kind, []).append(entry.description)
    uploads += [f"{', '.join(words)} (`{kind}`)" for kind, words in words_of_kind.items()]
    uploaded = "; ".join(filter(None, uploads))
    relation = method.relation()
    mix = "the mean" if relation.is_global else "its own mix"
    blocks = _blocks(method, ("shared",))
    received = f"{mix} of {blocks}" if blocks and type(relation).__name__ != "Alone" else ""
    received = method.traits.receives or received
    received = "; ".join(filter(None, [received, method.traits.receives_beside]))
    refused = [entry.kind for entry in entries if entry.values is None]
    local = central = "yes" if uploaded else "nothing to protect"
    if refused:
        local = f"refused: `{refused[0]}`"
    if uploaded and _refusal("central", method) is not None:
        central = "refused"
    why = _refusal("stepprivacy", method)
    steps = f"refused: {why}" if why else "yes"
    return f"`{name}`", uploaded or "nothing", received or "nothing", local, central, steps


def _refusal(callback: str, method: Any) -> str | None:
    """Return why the module `callback` refuses a method; None: it does not."""
    module = importlib.import_module(f"fl_lightning.callbacks.{callback}")
    reason: str | None = module.why_uncovered(method)
    return reason


def _blocks(method: Any, scopes: tuple[str, ...]) -> str:
    """Return words for the blocks of a typical deep network that have one of these scopes under the
    method (`Method.scope`), such as `bodies`; empty: there are none."""
    nn = importlib.import_module("torch.nn")
    layout = importlib.import_module("fl_lightning.core.layout")
    matrices = {
        name: nn.ModuleDict({"default": nn.Linear(4, 4, bias=False)})
        for name in ("lora_A", "lora_B")
    }
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.Flatten(),
        nn.Linear(8, 4),
        nn.ModuleDict(matrices),
        *(nn.Linear(4, 4) for _ in range(5)),
    )
    head = str(len(network) - 1)
    blocks = layout.Layout(network, head).blocks
    named_blocks = {block.name for block in blocks if method.scope(block) in scopes}
    if not named_blocks:
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
    for words, part in parts.items():
        if {block.name for block in part} == named_blocks:
            return words
    return "some layers"

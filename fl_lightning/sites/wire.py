"""Messages between the centre and its sites: JSON with tensors in it, as the bytes of one
safetensors file.

Reading a message runs no code. What arrives is compared with the layout of the model before it is
used. Of a vector only the blocks that are `sent` are in the message, without the gaps between
blocks: the bytes that the tables of traffic count. At the receiver the other blocks are NaN, so
that a hook that reads them is noticed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fl_lightning.core import Payload
from fl_lightning.core.beside import Beside
from fl_lightning.core.layout import Layout
from fl_lightning.foundation.metric import MODELS

HEADER = "fl_lightning"
"""Key of the JSON in the file's metadata."""
TENSOR = "tensor"
"""Key of a tensor's number in the JSON."""
BY_CLASS = ("classes", "rows", "class_counts")
"""Of `Beside.values`: a row for each class that the client has."""
ROWS_VARY = (*BY_CLASS, "public", None)
"""Of `Beside.values`: clients have different numbers of rows."""

Message = dict[str, Any]
Forms = Mapping[str, Counter[tuple[tuple[int, ...], torch.dtype]]]
"""How often a tensor of this name has come with which shape and type."""


class Unreadable(Exception):
    """A message cannot be used; the text says why, and holds nothing of the sender's data."""


def pack(message: Mapping[str, Any]) -> bytes:
    """The bytes of a message: of nested mappings and lists of numbers, texts and tensors."""
    tensors: dict[str, Tensor] = {}

    def numbered(tensor: Tensor) -> dict[str, str]:
        number = str(len(tensors))
        # a copy: safetensors takes none that share memory
        tensors[number] = tensor.detach().cpu().clone().contiguous()
        return {TENSOR: number}

    text = json.dumps(message, default=numbered)
    return bytes(save(tensors, metadata={HEADER: text}))


def unpack(content: bytes | int, most: int | None = None) -> Message:
    """The message of at most `most` bytes. A number stands for one with so many, which nobody has
    taken (-1: there was no memory to count them).

    Raises:
        Unreadable: it is too long, or no message.
    """
    size = content if isinstance(content, int) else len(content)
    if size < 0:
        raise Unreadable(f"it has far more than the {most} bytes that are accepted")
    if isinstance(content, int) or (most is not None and size > most):
        raise Unreadable(f"it has {size} bytes, more than the {most} that are accepted")
    try:
        size = int.from_bytes(content[:8], "little")
        if size > len(content):
            raise Unreadable("it is cut short")
        text = json.loads(content[8 : 8 + size])["__metadata__"][HEADER]
        # memory that torch has aligned
        tensors = {name: tensor.clone() for name, tensor in load(content).items()}
        message = json.loads(
            text, object_hook=lambda item: tensors[item[TENSOR]] if TENSOR in item else item
        )
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unreadable("it is no message of this package") from error
    if not isinstance(message, dict):
        raise Unreadable("its header is no mapping")
    return message


# ---------------------------------------------------------------- vectors


def columns(vector: Tensor, layout: Layout, blocks: np.ndarray) -> Tensor:
    """The numbers of `blocks` (bool [B]) of a vector (D,), one behind the other."""
    parts = [vector[b.start : b.stop] for b in _chosen(layout, blocks)]
    return torch.cat(parts) if parts else vector[:0]


def empty(layout: Layout, like: Tensor) -> Tensor:
    """A vector (D,) with NaN in every block, 0 in the gaps: nothing has arrived."""
    vector = torch.zeros(layout.size, dtype=like.dtype, device=like.device)
    for block in layout.blocks:
        vector[block.start : block.stop] = torch.nan
    return vector


def fill(vector: Tensor, layout: Layout, blocks: np.ndarray, numbers: Any) -> Tensor:
    """Write the numbers that `columns` gave into the `blocks` of `vector`; returns it.

    Raises:
        Unreadable: there are more or fewer numbers, or of another type.
    """
    count = int(layout.numbers[blocks].sum())
    if (tuple(numbers.shape), numbers.dtype) != ((count,), vector.dtype):
        shape = f"{tuple(numbers.shape)} of {numbers.dtype}"
        raise Unreadable(f"a vector has shape {shape}, not ({count},) of {vector.dtype}")
    sizes = [block.size for block in _chosen(layout, blocks)]
    for block, part in zip(_chosen(layout, blocks), numbers.split(sizes), strict=True):
        vector[block.start : block.stop] = part.to(vector.device)
    return vector


def _chosen(layout: Layout, blocks: np.ndarray) -> list[Any]:
    return [block for block, chosen in zip(layout.blocks, blocks, strict=True) if chosen]


def mask(places: Any, size: int) -> np.ndarray:
    """The blocks at `places`, bool [size].

    Raises:
        Unreadable: these are no places of blocks.
    """
    if not (isinstance(places, list) and all(type(k) is int and 0 <= k < size for k in places)):
        raise Unreadable("it names blocks that the model does not have")
    blocks = np.zeros(size, dtype=bool)
    blocks[places] = True
    return blocks


# ---------------------------------------------------------------- payloads


def of_payload(payload: Payload) -> Message:
    """A payload without `own_weights`, which do not travel."""
    layout = payload.layout
    vectors = payload.vectors.items()
    return {
        "sent": np.flatnonzero(payload.sent).tolist(),
        "model": columns(payload.vector, layout, payload.sent),
        "vectors": {name: columns(vector, layout, layout.is_parameter) for name, vector in vectors},
        "statistics": payload.statistics,
        "extra": payload.extra,
        "further": {key: of_payload(inner) for key, inner in payload.further.items()},
    }


def to_payload(message: Any, layout: Layout, like: Tensor) -> Payload:
    """The payload of which `of_payload` made `message`; blocks that were not sent are NaN.

    Args:
        message: the part of a message.
        layout: of the vectors.
        like: a vector (D,) of the type and on the device that vectors are to have.

    Raises:
        Unreadable: a part is missing, or of another shape or type.
    """
    try:
        sent = mask(message["sent"], len(layout.blocks))
        payload = Payload(layout, fill(empty(layout, like), layout, sent, message["model"]), sent)
        for slot, numbers in message["vectors"].items():
            payload.vectors[slot] = fill(empty(layout, like), layout, layout.is_parameter, numbers)
        payload.statistics.update(_tensors(message["statistics"]))
        payload.extra.update(_tensors(message["extra"]))
        for key, inner in message["further"].items():
            payload.further[int(key)] = to_payload(inner, layout, like)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Unreadable("parts of it are missing") from error
    return payload


def _tensors(named: Any) -> dict[str, Tensor]:
    if not all(isinstance(tensor, Tensor) for tensor in named.values()):
        raise TypeError(named)
    return dict(named)


# ---------------------------------------------------------------- what sites say


def values_of(message: Message) -> dict[str, float]:
    """The columns of a client's row.

    Raises:
        Unreadable: these are no numbers with names.
    """
    return _numbers(message.get("values"))


def final_of(message: Message) -> dict[str, Any]:
    """Kind and scores of a client's final model.

    Raises:
        Unreadable: these are no scores.
    """
    scores = message.get("scores")
    if not (isinstance(scores, dict) and scores.get("kind") in MODELS):
        raise Unreadable("it does not say which model it has scored")
    rest = {name: value for name, value in scores.items() if name not in ("kind", "further")}
    return {**_numbers(rest), "kind": scores["kind"], "further": _numbers(scores.get("further"))}


def _numbers(values: Any) -> dict[str, float]:
    named = isinstance(values, dict) and all(
        name.isidentifier() and type(value) in (int, float) and not abs(value) >= 2.0**63
        for name, value in values.items()
    )
    if not named or {"client", "round"} & values.keys():
        raise Unreadable("its scores are no numbers with names")
    return dict(values)


def check_memory(known: Mapping[str, Tensor], memory: Any) -> dict[str, Tensor]:
    """What a site's transforms keep, by the names of `known`, which the centre has of that client.

    Raises:
        Unreadable: a tensor is missing, or of another shape or type.
    """
    kept: dict[str, Tensor] = {}
    for name, ours in known.items():
        tensor = memory.get(name) if isinstance(memory, dict) else None
        form = ours.shape, ours.dtype
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != form:
            raise Unreadable(f"its {name} is missing, or of another shape or type")
        kept[name] = tensor
    return kept


def check_beside(
    beside: Mapping[str, Tensor], entries: Mapping[str, Beside], classes: int, forms: Forms
) -> None:
    """Check the tensors of an upload beside vectors against the method's declarations (`entries`),
    the shapes of most sites, and the classes of the federation.

    Raises:
        Unreadable: a tensor is missing, or does not fit.
    """
    for name, entry in entries.items():
        if name not in beside and not entry.once:
            raise Unreadable(f"its {name} is missing")
    there = {name: (beside[name], entry) for name, entry in entries.items() if name in beside}
    for name, (tensor, entry) in there.items():
        first = int(entry.values in ROWS_VARY)
        usual: Counter[Any] = Counter()
        for (shape, dtype), count in forms[name].items():
            usual[len(shape), shape[first:], dtype] += count
        form = tensor.ndim, tuple(tensor.shape[first:]), tensor.dtype
        if form != usual.most_common(1)[0][0]:
            words = f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise Unreadable(f"its {name} has shape {words}, and other sites' another")
    rows = [(tensor, entry) for tensor, entry in there.values() if entry.values in BY_CLASS]
    for known in [tensor.tolist() for tensor, entry in rows if entry.values == "classes"][:1]:
        if not set(known) <= set(range(classes)) or len(set(known)) < len(known):
            raise Unreadable("it names classes that the federation does not have")
        if any(len(tensor) != len(known) for tensor, _ in rows):
            raise Unreadable("it has not one row for each of its classes")


def check_finite(payload: Payload) -> None:
    """Raise `Unreadable` where a number that was sent is not finite."""
    layout = payload.layout
    parts = [columns(payload.vector, layout, payload.sent)]
    parts += [columns(vector, layout, layout.is_parameter) for vector in payload.vectors.values()]
    parts += [x for x in (payload.statistics | payload.extra).values() if x.is_floating_point()]
    if not all(bool(part.isfinite().all()) for part in parts):
        raise Unreadable("its upload is not finite")

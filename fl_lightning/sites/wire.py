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
"""Values of `Beside.values` with a row for each class that the client has."""
ROWS_VARY = (*BY_CLASS, "public", None)
"""Values of `Beside.values` whose number of rows differs between clients."""

Message = dict[str, Any]
Form = tuple[int, tuple[int, ...], torch.dtype]
"""Number of axes, shape and type of a tensor (`form`)."""


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
    """Read a message of at most `most` bytes. An int stands for a message of that length which was
    not accepted (-1: nobody knows its length).

    Raises:
        Unreadable: the message is too long, or none.
    """
    size = content if isinstance(content, int) else len(content)
    if size < 0:
        raise Unreadable(f"it has far more than the {most} bytes that are accepted")
    if isinstance(content, int) or (most is not None and size > most):
        raise Unreadable(f"it has {size} bytes, more than the {most} that are accepted")
    try:
        header_size = int.from_bytes(content[:8], "little")
        if header_size > size:
            raise Unreadable("it is cut short")
        text = json.loads(content[8 : 8 + header_size])["__metadata__"][HEADER]
        # memory that torch has aligned
        tensors = {name: tensor.clone() for name, tensor in load(content).items()}

        def with_tensor(item: dict[str, Any]) -> Any:
            return tensors[item[TENSOR]] if TENSOR in item else item

        message = json.loads(text, object_hook=with_tensor)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unreadable("it is no message of this package") from error
    if not isinstance(message, dict):
        raise Unreadable("its header is no mapping")
    return message


# ---------------------------------------------------------------- vectors


def packed(
    vector: Tensor,
    layout: Layout,
    blocks: np.ndarray,
) -> Tensor:
    """Return the numbers of `blocks` (bool [B]) of a vector (D,), joined."""
    parts = [vector[b.start : b.stop] for b in _chosen(layout, blocks)]
    return torch.cat(parts) if parts else vector[:0]


def empty(layout: Layout, like: Tensor) -> Tensor:
    """Return a vector (D,) in which nothing has arrived: NaN in every block, 0 in the gaps."""
    vector = torch.zeros(
        layout.size,
        dtype=like.dtype,
        device=like.device,
    )
    for block in layout.blocks:
        vector[block.start : block.stop] = torch.nan
    return vector


def unpack_into(
    vector: Tensor,
    layout: Layout,
    blocks: np.ndarray,
    numbers: Any,
) -> Tensor:
    """Write `numbers`, as `packed` returns them, into the `blocks` of `vector`; returns `vector`.

    Raises:
        Unreadable: the numbers are more, fewer, or of another type.
    """
    count = int(layout.sizes[blocks].sum())
    shape = tuple(numbers.shape)
    if (shape, numbers.dtype) != ((count,), vector.dtype):
        arrived = f"{shape} of {numbers.dtype}"
        raise Unreadable(f"a vector has shape {arrived}, not ({count},) of {vector.dtype}")
    chosen = _chosen(layout, blocks)
    parts = numbers.split([block.size for block in chosen])
    for block, part in zip(chosen, parts, strict=True):
        vector[block.start : block.stop] = part.to(vector.device)
    return vector


def _chosen(layout: Layout, blocks: np.ndarray) -> list[Any]:
    return [layout.blocks[k] for k in np.flatnonzero(blocks)]


def mask(places: Any, size: int) -> np.ndarray:
    """Return a mask, bool [size], of the blocks at `places`.

    Raises:
        Unreadable: `places` are no places of blocks.
    """
    exist = isinstance(places, list) and all(type(k) is int and 0 <= k < size for k in places)
    if not exist:
        raise Unreadable("it names blocks that the model does not have")
    blocks = np.zeros(size, dtype=bool)
    blocks[places] = True
    return blocks


# ---------------------------------------------------------------- payloads


def of_payload(payload: Payload) -> Message:
    """Return a payload as a part of a message, without `own_weights`, which do not travel."""
    layout = payload.layout
    vectors = {
        name: packed(vector, layout, layout.is_parameter)
        for name, vector in payload.vectors.items()
    }
    return {
        "sent": np.flatnonzero(payload.sent).tolist(),
        "model": packed(payload.vector, layout, payload.sent),
        "vectors": vectors,
        "statistics": payload.statistics,
        "extra": payload.extra,
        "further": {key: of_payload(inner) for key, inner in payload.further.items()},
    }


def to_payload(message: Any, layout: Layout, like: Tensor) -> Payload:
    """Return the payload that `of_payload` wrote as `message`; blocks that were not sent are NaN.

    Args:
        message: the part of a message.
        layout: of the vectors.
        like: a vector (D,) with the type and device of the result.

    Raises:
        Unreadable: a part is missing, or of another shape or type.
    """
    try:
        sent = mask(message["sent"], len(layout.blocks))
        vector = unpack_into(
            empty(layout, like),
            layout,
            sent,
            message["model"],
        )
        payload = Payload(layout, vector, sent)
        for slot, numbers in message["vectors"].items():
            vector = empty(layout, like)
            payload.vectors[slot] = unpack_into(vector, layout, layout.is_parameter, numbers)
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
    """Return the columns of a client's row.

    Raises:
        Unreadable: the values are no numbers with names.
    """
    return _numbers(message.get("values"))


def final_of(message: Message) -> dict[str, Any]:
    """Return kind and scores of a client's final model.

    Raises:
        Unreadable: there are no scores.
    """
    scores = message.get("scores")
    if not (isinstance(scores, dict) and scores.get("kind") in MODELS):
        raise Unreadable("it does not say which model it has scored")
    kind = scores.pop("kind")
    further = _numbers(scores.pop("further", None))
    return {**_numbers(scores), "kind": kind, "further": further}


def _numbers(values: Any) -> dict[str, float]:
    is_table = isinstance(values, dict) and not {"client", "round"} & values.keys()
    if not (is_table and all(_is_score(*item) for item in values.items())):
        raise Unreadable("its scores are no numbers with names")
    return dict(values)


def _is_score(name: str, value: Any) -> bool:
    is_number = type(value) in (int, float) and not abs(value) >= 2.0**63  # NaN is one
    return is_number and name.isidentifier()


def check_memory(initial: Mapping[str, Tensor], memory: Any) -> dict[str, Tensor]:
    """Return the tensors of a site's transforms by the names of `initial`, their first values.

    Raises:
        Unreadable: a tensor is missing, or of another shape or type.
    """
    tensors: dict[str, Tensor] = {}
    for name, first in initial.items():
        tensor = memory.get(name) if isinstance(memory, dict) else None
        form = first.shape, first.dtype
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != form:
            raise Unreadable(f"its {name} is missing, or of another shape or type")
        tensors[name] = tensor
    return tensors


def form(tensor: Tensor, entry: Beside) -> Form:
    """Return the form that an entry has at all clients: without its number of rows where that
    varies."""
    first = int(entry.values in ROWS_VARY)
    return tensor.ndim, tuple(tensor.shape[first:]), tensor.dtype


def check_beside(
    beside: Mapping[str, Tensor],
    entries: Mapping[str, Beside],
    classes: int,
    forms: Mapping[str, Counter[Form]],
) -> None:
    """Check the tensors of an upload beside vectors.

    Args:
        beside: the tensors.
        entries: the method's declarations.
        classes: of the federation.
        forms: how often each form has come, by name; the most frequent one is right.

    Raises:
        Unreadable: a tensor is missing, or does not fit.
    """
    by_class = []
    class_numbers: list[int] | None = None
    for name, entry in entries.items():
        tensor = beside.get(name)
        if tensor is None:
            if entry.once:
                continue
            raise Unreadable(f"its {name} is missing")
        if form(tensor, entry) != forms[name].most_common(1)[0][0]:
            arrived = f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise Unreadable(f"its {name} has shape {arrived}, and other sites' another")
        if entry.values in BY_CLASS:
            by_class.append(tensor)
        if entry.values == "classes":
            class_numbers = tensor.tolist()
    if class_numbers is None:
        return
    distinct = set(class_numbers)
    if not distinct <= set(range(classes)) or len(distinct) < len(class_numbers):
        raise Unreadable("it names classes that the federation does not have")
    if any(len(tensor) != len(class_numbers) for tensor in by_class):
        raise Unreadable("it has not one row for each of its classes")


def check_finite(payload: Payload) -> None:
    """Raise `Unreadable` where a number that was sent is not finite."""
    layout = payload.layout
    parts = [packed(payload.vector, layout, payload.sent)]
    parts += [packed(vector, layout, layout.is_parameter) for vector in payload.vectors.values()]
    beside = payload.statistics | payload.extra
    parts += [tensor for tensor in beside.values() if tensor.is_floating_point()]
    if not all(bool(part.isfinite().all()) for part in parts):
        raise Unreadable("its upload is not finite")

"""Messages between the centre and its sites: a header in JSON and tensors, as the bytes of one
safetensors file.

No pickle anywhere: reading a message runs no code. What arrives is compared with the layout of the
model before it is used. Only the blocks that are `sent` are in the message, without the gaps
between blocks: the bytes that the tables of traffic count. At the receiver the other blocks are
NaN, so that a hook that reads them is noticed.
"""

from __future__ import annotations

import json
import math
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
"""Key of the header in the file's metadata."""
KINDS_OF_NUMBER = (int, float)
MODEL_KEY = "model"
MEMORY = "memory."
"""Before the names of what transforms keep with a client."""

BY_CLASS = ("classes", "rows", "class_counts")
"""Of `Beside.values`: a row for each class that the client has."""

Header = dict[str, Any]
Tensors = dict[str, Tensor]
Forms = Mapping[str, Counter[tuple[tuple[int, ...], torch.dtype]]]
"""How often a tensor of this name has come with which shape and type."""


class Unreadable(Exception):
    """A message is not what it should be; the text says why, and holds nothing of the sender's
    data."""


def pack(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """One message. Tensors are copied: safetensors takes none that share memory."""
    apart = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    return bytes(save(apart, metadata={HEADER: json.dumps(dict(header))}))


def unpack(content: bytes | int, most: int | None = None) -> tuple[Header, Tensors]:
    """Header and tensors of a message of at most `most` bytes. A number: of one with so many, which
    nobody has taken (-1: there was no memory to count them).

    Raises:
        Unreadable: it is too long, no safetensors, or its header is no mapping.
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
        header = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][HEADER])
        # memory that torch has aligned
        tensors = {name: tensor.clone() for name, tensor in load(content).items()}
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unreadable("it is no message of this package") from error
    if not isinstance(header, dict):
        raise Unreadable("its header is no mapping")
    return header, tensors


# ---------------------------------------------------------------- vectors


def columns(vector: Tensor, layout: Layout, blocks: np.ndarray) -> Tensor:
    """The numbers of `blocks` (bool [B]) of a vector (D,), one behind the other."""
    parts = [
        vector[b.start : b.stop] for b, there in zip(layout.blocks, blocks, strict=True) if there
    ]
    return torch.cat(parts) if parts else vector[:0]


def empty(layout: Layout, like: Tensor) -> Tensor:
    """A vector (D,) of which nothing has arrived: NaN in every block, 0 in the gaps."""
    vector = torch.zeros(layout.size, dtype=like.dtype, device=like.device)
    for block in layout.blocks:
        vector[block.start : block.stop] = torch.nan
    return vector


def fill(vector: Tensor, layout: Layout, blocks: np.ndarray, numbers: Tensor, what: str) -> Tensor:
    """Write what `columns` gave into the `blocks` of `vector`; returns it.

    Raises:
        Unreadable: there are more or fewer numbers, or of another type.
    """
    expected = (int(layout.numbers[blocks].sum()), vector.dtype)
    if (numbers.numel(), numbers.dtype) != expected or numbers.ndim != 1:
        given = f"{tuple(numbers.shape)} of {numbers.dtype}"
        raise Unreadable(f"{what} has shape {given}, not ({expected[0]},) of {expected[1]}")
    start = 0
    for block, there in zip(layout.blocks, blocks, strict=True):
        if there:
            vector[block.start : block.stop] = numbers[start : start + block.size].to(vector.device)
            start += block.size
    return vector


# ---------------------------------------------------------------- payloads


def of_payload(payload: Payload, prefix: str = "") -> tuple[Header, Tensors]:
    """Header and tensors of a payload; of `own_weights`, which do not travel, nothing."""
    layout = payload.layout
    header: Header = {"sent": np.flatnonzero(payload.sent).tolist(), "further": {}}
    tensors: Tensors = {f"{prefix}{MODEL_KEY}": columns(payload.vector, layout, payload.sent)}
    for slot, vector in payload.vectors.items():
        tensors[f"{prefix}vectors.{slot}"] = columns(vector, layout, layout.is_parameter)
    for kind in ("statistics", "extra"):
        named = getattr(payload, kind)
        header[kind] = list(named)
        tensors |= {f"{prefix}{kind}.{name}": tensor for name, tensor in named.items()}
    header["vectors"] = list(payload.vectors)
    for key, inner in payload.further.items():
        header["further"][str(key)], more = of_payload(inner, f"{prefix}further.{key}.")
        tensors |= more
    return header, tensors


def to_payload(
    header: Header, tensors: Tensors, layout: Layout, like: Tensor, prefix: str = ""
) -> Payload:
    """The payload of which `of_payload` gave header and tensors; blocks that were not sent are NaN.

    Args:
        header: of this payload.
        tensors: of the whole message.
        layout: what the vectors must fit.
        like: a vector (D,) of the type and on the device that vectors are to have.
        prefix: before its tensors' names.

    Raises:
        Unreadable: something is missing, or of another shape or type.
    """
    try:
        sent = np.zeros(len(layout.blocks), dtype=bool)
        sent[np.array(_places(header["sent"], len(sent)), dtype=np.int64)] = True
        vector = fill(
            empty(layout, like), layout, sent, tensors[f"{prefix}{MODEL_KEY}"], "its model"
        )
        payload = Payload(layout, vector, sent)
        for slot in header["vectors"]:
            numbers = tensors[f"{prefix}vectors.{slot}"]
            payload.vectors[slot] = fill(
                empty(layout, like), layout, layout.is_parameter, numbers, f"its {slot}"
            )
        for kind in ("statistics", "extra"):
            getattr(payload, kind).update(
                {name: tensors[f"{prefix}{kind}.{name}"] for name in header[kind]}
            )
        for key, inner in header["further"].items():
            payload.further[int(key)] = to_payload(
                inner, tensors, layout, like, f"{prefix}further.{key}."
            )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Unreadable("parts of it are missing") from error
    return payload


def _places(places: Any, size: int) -> list[int]:
    if not (isinstance(places, list) and all(type(k) is int and 0 <= k < size for k in places)):
        raise Unreadable("it names blocks that the model does not have")
    return places


def values_of(header: Header) -> dict[str, float]:
    """The columns of a client's row as they arrived: names and numbers, nothing else.

    Raises:
        Unreadable: there is something else.
    """
    return _numbers(header.get("values"))


def final_of(header: Header) -> dict[str, Any]:
    """Kind and scores of a client's final model as they arrived.

    Raises:
        Unreadable: there is something else.
    """
    given = header.get("scores")
    scores: dict[str, Any] = given if isinstance(given, dict) else {}
    kind = scores.get("kind")
    if not (isinstance(kind, str) and kind in MODELS):
        raise Unreadable("it does not say which model it has scored")
    rest = {name: value for name, value in scores.items() if name not in ("kind", "further")}
    return {"kind": kind, "further": _numbers(scores.get("further")), **_numbers(rest)}


def _numbers(values: Any) -> dict[str, float]:
    fine = isinstance(values, dict) and all(
        isinstance(name, str) and _is_number(x) for name, x in values.items()
    )
    if (
        not fine
        or not all(name.isidentifier() for name in values)
        or {"client", "round"} & values.keys()
    ):
        raise Unreadable("its scores are no numbers with names")
    return dict(values)


def check_memory(known: Mapping[str, Tensor], tensors: Tensors) -> Tensors:
    """What a site's transforms keep, by the names of `known`, which the centre has of that client.

    Raises:
        Unreadable: something is missing, or of another shape or type.
    """
    given = {name: tensors.get(f"{MEMORY}{name}") for name in known}
    for name, tensor in given.items():
        if tensor is None or (tensor.shape, tensor.dtype) != (known[name].shape, known[name].dtype):
            raise Unreadable(f"its {name} is missing, or of another shape or type")
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def check_beside(
    given: Mapping[str, Tensor], entries: Mapping[str, Beside], classes: int, forms: Forms
) -> None:
    """What an upload holds beside vectors: whole, shaped as that of most sites, and of classes that
    there are.

    Raises:
        Unreadable: something that the method declares (`entries`) is missing, or does not fit.
    """
    for name, entry in entries.items():
        if name not in given and entry.once:
            continue
        if name not in given:
            raise Unreadable(f"its {name} is missing")
        free = int(entry.values in (*BY_CLASS, "public", None))  # how many rows is the client's own
        usual: Counter[Any] = Counter()
        for (shape, dtype), count in forms[name].items():
            usual[len(shape), shape[free:], dtype] += count
        tensor = given[name]
        if (tensor.ndim, tuple(tensor.shape[free:]), tensor.dtype) != usual.most_common(1)[0][0]:
            raise Unreadable(
                f"its {name} has shape {tuple(tensor.shape)} of {tensor.dtype}, and other sites' "
                f"another"
            )
    rows = {
        name: given[name]
        for name, entry in entries.items()
        if entry.values in BY_CLASS and name in given
    }
    known = next((rows[name] for name in rows if entries[name].values == "classes"), None)
    if known is None:
        return
    if not set(known.tolist()) <= set(range(classes)) or len(set(known.tolist())) < len(known):
        raise Unreadable("it names classes that the federation does not have")
    if any(len(tensor) != len(known) for tensor in rows.values()):
        raise Unreadable("it has not one row for each of its classes")


def check_finite(payload: Payload) -> None:
    """Raise `Unreadable` where a number that was sent is not finite."""
    parts = [columns(payload.vector, payload.layout, payload.sent)]
    parts += [
        columns(v, payload.layout, payload.layout.is_parameter) for v in payload.vectors.values()
    ]
    parts += [x for x in (payload.statistics | payload.extra).values() if x.is_floating_point()]
    if not all(bool(part.isfinite().all()) for part in parts):
        raise Unreadable("its upload is not finite")


def _is_number(value: Any) -> bool:
    return type(value) in KINDS_OF_NUMBER and (math.isnan(value) or abs(value) < 2.0**63)

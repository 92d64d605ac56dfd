"""Encodes messages between the centre and its sites: a JSON header and tensors, as the bytes of one
safetensors file.

Reading a message runs no code, and its tensors are compared with the layout of the model before
they are used. A message contains only those blocks of a vector that are sent, without the gaps
between blocks: these are the bytes that the traffic tables count. At the receiver the other blocks
are NaN, so that a hook that reads them is noticed.

A tensor "beside" the vectors is an entry of an upload's `statistics` or `extra`, which the method
declares (`Method.beside`).
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
"""Key in the JSON under which a tensor's number stands."""
BY_CLASS = ("classes", "rows", "class_counts")
"""`Beside.values` of tensors with a row for each class of the client's samples."""
ROWS_VARY = (*BY_CLASS, "public", None)
"""`Beside.values` of tensors whose number of rows differs between clients."""

Message = dict[str, Any]
TensorType = tuple[int, tuple[int, ...], torch.dtype]
"""Number of axes, shape (perhaps without the number of rows) and dtype of a tensor."""


class Unreadable(Exception):
    """A message cannot be used. The text gives the reason and contains nothing of the sender's
    data."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message, which consists of nested mappings and lists of numbers, texts
    and tensors."""
    tensors: dict[str, Tensor] = {}

    def numbered(tensor: Tensor) -> dict[str, str]:
        number = str(len(tensors))
        # a copy: safetensors refuses tensors that share memory
        tensors[number] = tensor.detach().cpu().clone().contiguous()
        return {TENSOR: number}

    text = json.dumps(message, default=numbered)
    return bytes(save(tensors, metadata={HEADER: text}))


def unpack(content: bytes | int, most: int | None = None) -> Message:
    """Return the message in `content`.

    Args:
        content: the bytes; or a number, if the message was too long to be read: its length (-1:
            unknown).
        most: maximum number of bytes; None: no limit.

    Raises:
        Unreadable: the message is too long, or the bytes are not a message.
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
        # a copy is aligned as torch needs it
        tensors = {name: tensor.clone() for name, tensor in load(content).items()}

        def with_tensor(item: dict[str, Any]) -> Any:
            return tensors[item[TENSOR]] if TENSOR in item else item

        message = json.loads(text, object_hook=with_tensor)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unreadable("it is not a message of this package") from error
    if not isinstance(message, dict):
        raise Unreadable("its header is not a mapping")
    return message


# ---------------------------------------------------------------- vectors


def packed(
    vector: Tensor,
    layout: Layout,
    blocks: np.ndarray,
) -> Tensor:
    """Return the numbers of those blocks of a vector (D,) that `blocks` (bool [B]) selects, joined
    to one vector."""
    parts = [vector[b.start : b.stop] for b in _chosen(layout, blocks)]
    return torch.cat(parts) if parts else vector[:0]


def empty(layout: Layout, like: Tensor) -> Tensor:
    """Return a vector (D,) with NaN in every block and 0 in the gaps, to be filled by
    `unpack_into`. `like`: a tensor with its dtype and device."""
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
    """Write `numbers`, as `packed` returns them, into the `blocks` of `vector`; return `vector`.

    Raises:
        Unreadable: `numbers` has another length or dtype than the blocks.
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


def mask(indices: Any, size: int) -> np.ndarray:
    """Return a mask, bool [size], that is true for the blocks with these `indices`.

    Raises:
        Unreadable: `indices` is not a list of numbers from 0 to `size` - 1.
    """
    exist = isinstance(indices, list) and all(type(k) is int and 0 <= k < size for k in indices)
    if not exist:
        raise Unreadable("it names blocks that the model does not have")
    blocks = np.zeros(size, dtype=bool)
    blocks[indices] = True
    return blocks


# ---------------------------------------------------------------- payloads


def of_payload(payload: Payload) -> Message:
    """Return a payload as a part of a message. `Payload.own_weights`, the receiver's weights on its
    own model in a mix, are left out: only the server needs them."""
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
    """Return the payload that `of_payload` has put into a message; blocks that were not sent are
    NaN.

    Args:
        message: the part of a message.
        layout: layout of the payload's vectors.
        like: a vector (D,) with the dtype and device of the result.

    Raises:
        Unreadable: a part is missing, or has another shape or dtype.
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
            payload.vectors[slot] = unpack_into(
                empty(layout, like), layout, layout.is_parameter, numbers
            )
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


# ---------------------------------------------------------------- answers of sites


def values_of(message: Message) -> dict[str, float]:
    """Return a client's values for its row of `clients.csv`, by column.

    Raises:
        Unreadable: they are not numbers by name.
    """
    return _numbers(message.get("values"))


def final_of(message: Message) -> dict[str, Any]:
    """Return the kind (`kind`) and the scores of a client's final model, by name. The entry
    `further` maps the names of the metrics besides accuracy (`evaluation.metrics`) to their scores.

    Raises:
        Unreadable: the message has no kind, or its scores are not numbers by name.
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
        raise Unreadable("its scores are not numbers by name")
    return dict(values)


def _is_score(name: str, value: Any) -> bool:
    is_number = type(value) in (int, float) and not abs(value) >= 2.0**63  # NaN is one
    return is_number and name.isidentifier()


def check_memory(initial: Mapping[str, Tensor], memory: Any) -> dict[str, Tensor]:
    """Return the memory tensors of a site's transforms, by name, after a check.

    Args:
        initial: the transforms' initial tensors: the expected names, shapes and dtypes.
        memory: the tensors that the site has sent.

    Raises:
        Unreadable: a tensor is missing, or has another shape or dtype.
    """
    tensors: dict[str, Tensor] = {}
    for name, first in initial.items():
        tensor = memory.get(name) if isinstance(memory, dict) else None
        expected = first.shape, first.dtype
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != expected:
            raise Unreadable(f"its {name} is missing, or of another shape or type")
        tensors[name] = tensor
    return tensors


def tensor_type(tensor: Tensor, entry: Beside) -> TensorType:
    """Return the number of axes, the shape and the dtype of a tensor in an upload. They must be
    equal for all clients. The shape is without the number of rows if that may differ between
    clients by `entry`, the method's declaration of the tensor (`ROWS_VARY`)."""
    first = int(entry.values in ROWS_VARY)
    return tensor.ndim, tuple(tensor.shape[first:]), tensor.dtype


def check_beside(
    beside: Mapping[str, Tensor],
    entries: Mapping[str, Beside],
    classes: int,
    tensor_types: Mapping[str, Counter[TensorType]],
) -> None:
    """Check an upload's tensors beside its vectors.

    Args:
        beside: the tensors by name.
        entries: the method's declarations by name.
        classes: number of classes of the federation.
        tensor_types: by name, how often each type has arrived from clients with this architecture;
            the most frequent one counts as right.

    Raises:
        Unreadable: a tensor is missing, has another type than other sites', or does not fit the
            classes.
    """
    by_class = []
    class_numbers: list[int] | None = None
    for name, entry in entries.items():
        tensor = beside.get(name)
        if tensor is None:
            if entry.once:
                continue
            raise Unreadable(f"its {name} is missing")
        if tensor_type(tensor, entry) != tensor_types[name].most_common(1)[0][0]:
            arrived = f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise Unreadable(f"its {name} has shape {arrived}, other sites' has another")
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
        raise Unreadable("a tensor does not have one row for each of its classes")


def check_finite(payload: Payload) -> None:
    """Raise `Unreadable` if a number in the upload is not finite."""
    layout = payload.layout
    parts = [packed(payload.vector, layout, payload.sent)]
    parts += [packed(vector, layout, layout.is_parameter) for vector in payload.vectors.values()]
    beside = payload.statistics | payload.extra
    parts += [tensor for tensor in beside.values() if tensor.is_floating_point()]
    if not all(bool(part.isfinite().all()) for part in parts):
        raise Unreadable("its upload is not finite")

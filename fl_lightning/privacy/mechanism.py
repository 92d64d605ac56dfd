"""Clipping and noise of one upload, kind by kind; nothing else of the client's data is left in it.

A kind is a name under which a clip and a noise are configured: `model`, the slot of an exchanged
vector, or a kind that the method's `beside` declares. For each kind, all of its tensors together
are one vector (for the model: the change that the client uploads, `Client.reference` subtracted).
This is scaled down to the norm of the clip; then every number gets Gaussian noise. Numbers that are
impossible after noise (a negative count, a variance below 0) are corrected from the noisy numbers
alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core import Beside, Client, Payload, RunContext
from fl_lightning.core.layout import Layout, Segment
from fl_lightning.foundation.errors import BadInput, check

MODEL = "model"
LEAST = 1e-6
"""Least share, and least eigenvalue of a covariance, after noise (ours), so that logarithms and
inverses exist."""


@dataclass(frozen=True)
class Noise:
    """Clip and noise of a kind: the greatest norm, and the standard deviation of the noise in
    multiples of it."""

    clip: float
    multiplier: float


Draws = Callable[[str], torch.Generator]
"""Returns the random generator of a kind."""


def kinds_of_run(run: RunContext) -> list[str]:
    """Return the kinds of tensors (see above) that clients of `run` upload and that need noise:
    those that the method declares public, since they tell nothing of samples, are left out."""
    return kinds_of_method(run.method, sends_model=any(g.up_mask.any() for g in run.groups))


def kinds_of_method(method: Any, *, sends_model: bool) -> list[str]:
    """Return the kinds of tensors in a method's uploads that need noise: those that it declares
    public are left out.

    Args:
        method: declares its slots and the named tensors that travel with models (`beside`).
        sends_model: whether clients upload models.
    """
    slots = [name for name, slot in method.slots().items() if slot.exchanged]
    beside = [b.kind for b in method.beside().values() if b.values != "public"]
    return list(dict.fromkeys([MODEL] * sends_model + slots + beside))


def clipped(x: Tensor, clip: float) -> Tensor:
    """Return `x` (n,), scaled down to norm `clip` where it is longer; zeros if it is not finite."""
    norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
    if norm > clip and norm < float("inf"):
        return (x.double() * (clip / norm)).to(x.dtype)
    return x if norm <= clip else torch.zeros_like(x)


def noisy(
    x: Tensor,
    noise: Noise,
    draws: torch.Generator,
) -> Tensor:
    """Return `x` (n,), scaled down to the clip, with Gaussian noise on each number."""
    normal = torch.randn(x.shape, generator=draws, dtype=torch.float32)
    return clipped(x, noise.clip) + (noise.multiplier * noise.clip * normal).to(x)


def protect(
    client: Client,
    payload: Payload,
    noises: Mapping[str, Noise],
    draws: Draws,
) -> set[str]:
    """Clip `payload` and add noise, in place; return the kinds that it holds.

    Raises:
        BadInput: it holds a tensor that the method does not declare, or other blocks than its
            `scope` says.
    """
    sent: set[str] = set()
    if payload.sent.any():
        same_blocks = payload.sent.tobytes() == client.group.up_mask.tobytes()
        problem = "it sends other blocks than its scope says, and the choice may reveal data"
        requirement = f"{problem}; choose another --method, such as fedavg"
        check(
            "callbacks.localprivacy",
            client.run.method_name,
            same_blocks,
            requirement,
        )
        add_noise = partial(noisy, noise=noises[MODEL], draws=draws(MODEL))
        payload.vector = with_protected_change(
            client,
            payload,
            client.reference,
            add_noise,
        )
        sent.add(MODEL)
    segments = client.layout.segments(client.layout.is_parameter)
    for slot, vector in payload.vectors.items():
        fresh = torch.zeros_like(vector)
        values = noisy(
            _gather(vector, segments),
            noises[slot],
            draws(slot),
        )
        _scatter(fresh, segments, values)
        payload.vectors[slot] = fresh
        sent.add(slot)
    return sent | _protect_beside(client, payload, noises, draws)


def with_protected_change(
    client: Client,
    payload: Payload,
    start: Tensor,
    protects: Callable[[Tensor], Tensor],
) -> Tensor:
    """Protect the change from `start` to the upload by `protects` (clipping, noise); return `start`
    plus the protected change, (D,). Blocks that are not sent stay as in `start`."""
    layout = client.layout
    segments = layout.segments(payload.sent)
    vector = start.clone()
    base = _gather(start, segments)
    change = _gather(payload.vector, segments) - base
    _scatter(vector, segments, base + protects(change))
    client.flops += 6 * len(base)  # difference, square and sum, scaling, noise, sum
    return repaired(layout, payload.sent, vector)


def repaired(
    layout: Layout,
    sent: np.ndarray,
    vector: Tensor,
) -> Tensor:
    """Set negative running variances to 0, in place, and return the vector.

    Args:
        layout: tells which blocks are variances.
        sent: which blocks are changed, bool [B].
        vector: (D,).
    """
    for block, travels in zip(layout.blocks, sent, strict=True):
        if travels and block.kind == "buffer" and block.name.endswith("running_var"):
            vector[block.columns].clamp_min_(0)
    return vector


def _gather(vector: Tensor, segments: list[Segment]) -> Tensor:
    return torch.cat([vector[s.columns] for s in segments])


def _scatter(
    vector: Tensor,
    segments: list[Segment],
    values: Tensor,
) -> None:
    parts = values.split([s.stop - s.start for s in segments])
    for s, part in zip(segments, parts, strict=True):
        vector[s.columns] = part


# ---------------------------------------------------------------- beside the model


def _protect_beside(
    client: Client,
    payload: Payload,
    noises: Mapping[str, Noise],
    draws: Draws,
) -> set[str]:
    """Clip the named tensors that travel with the model and add noise, in place; return their
    kinds."""
    declared = client.run.method.beside()
    places = {name: part for part in (payload.statistics, payload.extra) for name in part}
    if undeclared := [name for name in places if name not in declared]:
        requirement = f"its upload holds {undeclared[0]}, which its `beside` does not declare"
        raise BadInput(
            "callbacks.localprivacy",
            client.run.method_name,
            requirement,
        )
    entries = {
        name: entry
        for name, entry in declared.items()
        if name in places and entry.values != "public"
    }
    classes = next((places[n][n].long() for n, b in entries.items() if b.values == "classes"), None)
    dense = {
        n: _dense(places[n][n], b, classes, client)
        for n, b in entries.items()
        if b.values != "classes"
    }
    fresh: dict[str, Tensor] = {}
    for kind in dict.fromkeys(b.kind for n, b in entries.items() if n in dense):
        names = [n for n in dense if entries[n].kind == kind]
        numbers = torch.cat([dense[n].flatten() for n in names])
        vector = noisy(numbers, noises[kind], draws(kind))
        client.flops += 5 * len(vector)
        parts = vector.split([dense[n].numel() for n in names])
        fresh |= {
            n: _valid(part.view(dense[n].shape), entries[n])
            for n, part in zip(names, parts, strict=True)
        }
    counts = next((fresh[n] for n, b in entries.items() if b.values == "class_counts"), None)
    for name, entry in entries.items():
        old = places[name][name]
        if entry.values == "classes":
            if counts is None:
                requirement = "its `beside` declares classes but no class_counts"
                raise BadInput(
                    "callbacks.localprivacy",
                    client.run.method_name,
                    requirement,
                )
            new = counts.nonzero()[:, 0]
        elif entry.values in ("rows", "class_counts") and counts is not None:
            new = fresh[name][counts > 0]
        else:
            new = fresh[name].reshape(old.shape)
        places[name][name] = new.to(old.dtype)
    return {b.kind for b in entries.values()}


def _dense(
    x: Tensor,
    entry: Beside,
    classes: Tensor | None,
    client: Client,
) -> Tensor:
    """Return `x` in at least 32 bits; if it has rows for the client's classes only, with rows for
    all classes."""
    x = x.detach().cpu().to(torch.promote_types(x.dtype, torch.float32))
    if entry.values not in ("rows", "class_counts"):
        return x.reshape(-1) if not x.ndim else x
    if classes is None:
        requirement = "its `beside` declares rows by class but no classes"
        raise BadInput(
            "callbacks.localprivacy",
            client.run.method_name,
            requirement,
        )
    table = torch.zeros(
        client.run.data.num_classes,
        *x.shape[1:],
        dtype=x.dtype,
    )
    table[classes.cpu()] = x
    return table


def _valid(x: Tensor, entry: Beside) -> Tensor:
    """Return the nearest tensor to the noisy `x` that has values of its declared kind (such as
    counts or shares)."""
    if entry.values == "nonnegative":
        return x.clamp_min(0)
    if entry.values == "class_counts":
        return x.round().clamp_min(0)
    if entry.values == "counts":  # without any, no class could be drawn: then one of each
        x = x.round().clamp_min(0)
        return x if x.any() else torch.ones_like(x)
    if entry.values == "shares":
        x = x.clamp_min(LEAST)
        return x / x.sum(-1, keepdim=True)
    if entry.values == "covariance":
        values, vectors = torch.linalg.eigh((x + x.mT).double() / 2)
        return (vectors * values.clamp_min(LEAST) @ vectors.mT).to(x)
    return x

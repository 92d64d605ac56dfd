"""What makes inputs of raw rows and class names of scores, in plain PyTorch: exported beside a model, word for word."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

EMPTY = ("", "na", "nan", "null")
"""What an empty cell of a table may hold, in small letters."""


def inputs(about: Mapping[str, Any], rows: Sequence[Any]) -> torch.Tensor:
    """Raw rows as the model's input.

    Args:
        about: what the export says of the model's data.
        rows: of a table mappings from column to cell, or lists of cells in the order of `about["columns"]`; vectors (n,
            features); images (n, height, width), (n, height, width, channels), (n, channels, height, width) or paths of
            files; or texts.
    """
    kind, shape = about["input"], about["shape"]
    if kind == "text":
        return torch.tensor([_tokens(about["tokens"], row) for row in rows], dtype=torch.int64).reshape(-1, *shape)
    if kind == "table":
        x = torch.tensor([_features(about["columns"], row) for row in rows], dtype=torch.float64)
    else:
        x = torch.stack([_sample(row, shape) for row in rows])
    if about["scale"] is not None:
        empty, scale, shift = (torch.tensor(about[k], dtype=torch.float64) for k in ("empty", "scale", "shift"))
        x = torch.where(x.isnan(), empty, x.double()) * scale + shift
    mean, std = (torch.tensor(about[name], dtype=torch.float32) for name in ("mean", "std"))
    return x.float().sub(mean).div(std)


def names(about: Mapping[str, Any], scores: torch.Tensor) -> list[Any]:
    """Class names of scores (n, classes); of (n, positions, classes) a list for each row; of a regression numbers."""
    if not about["class_names"]:
        return scores[..., 0].tolist()
    known: list[str] = about["class_names"]
    best = scores[..., : len(known)].argmax(-1).tolist()
    return [[known[k] for k in row] if isinstance(row, list) else known[row] for row in best]


def _features(columns: Sequence[tuple[str, Sequence[str] | None]], row: Any) -> list[float]:
    """A table's row as numbers: an empty cell is NaN, a column of words a number for each of its values."""
    numbers: list[float] = []
    for place, (name, values) in enumerate(columns):
        cell = row[name] if isinstance(row, Mapping) else row[place]
        text = "" if cell is None else str(cell).strip()
        if values is not None:
            numbers += [float(text == value) for value in values]
        else:
            numbers.append(math.nan if text.lower() in EMPTY else float(text))
    return numbers


def _sample(row: Any, shape: Sequence[int]) -> torch.Tensor:
    """A vector, a series or an image with its channels first."""
    if isinstance(row, str) or hasattr(row, "__fspath__"):
        import numpy as np
        from PIL import Image

        size = (shape[2], shape[1])
        row = np.array(Image.open(row).convert("RGB").resize(size, Image.Resampling.BILINEAR))
    x = torch.as_tensor(row)
    if list(x.shape) != list(shape) and x.ndim == 3:
        x = x.permute(2, 0, 1)
    return x.reshape(shape)


def _tokens(tokens: Mapping[str, Any], text: str) -> list[int]:
    """Numbers of a text's tokens, 0 on the left where it is short."""
    if tokens["tokenizer"] is not None:
        from tokenizers import Tokenizer

        numbers = Tokenizer.from_str(tokens["tokenizer"]).encode(text).ids
    else:
        known = {name: number for number, name in enumerate(tokens["names"])}
        numbers = [known.get(character, 0) for character in text]
    length = tokens["length"]
    numbers = numbers[-length:] if tokens["keep"] == "last" else numbers[:length]
    return [0] * (length - len(numbers)) + list(numbers)

"""Inputs from raw rows, and class names from scores, in plain PyTorch: copied word for word into
the file beside an exported model."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fl_lightning.foundation.cells import is_empty, number


def inputs(about: Mapping[str, Any], rows: Sequence[Any]) -> torch.Tensor:
    """Return raw rows as the model's input.

    Args:
        about: the description of the model's data.
        rows: for a table, mappings from column to cell, or lists of cells in the order of
            `about["columns"]`; vectors (n, features); images (n, height, width), (n, height, width,
            channels), (n, channels, height, width) or paths of files; texts, or numbers of their
            tokens (n, length).

    Raises:
        ValueError: a row has another shape or lacks a column; a cell is no number, or none of its
            column's values, or is empty though the model was trained without empty cells; or an
            image has more than 8 bits a channel.
    """
    return scaled(about, raw(about, rows))


def raw(about: Mapping[str, Any], rows: Sequence[Any]) -> torch.Tensor:
    """Return rows as numbers in the model's shape: tokens int64; a table's features float32, as
    training reads them, with NaN for an empty cell. Images are rotated by the angle by which the
    run rotated the client's."""
    kind, shape = about["input"], list(about["shape"])
    if kind == "text":
        samples = [torch.tensor(_tokens(about["tokens"], row), dtype=torch.int64) for row in rows]
    elif kind == "table":
        samples = [torch.tensor(_features(about, row), dtype=torch.float32) for row in rows]
    else:
        samples = [_sample(row, shape) for row in rows]
    for sample in samples:
        if list(sample.shape) != shape:
            size = list(sample.shape)
            raise ValueError(f"a sample has the shape {size}, and the model's have {shape}")
    x = torch.stack(samples) if samples else torch.zeros(0, *shape)
    if samples and about.get("angle"):  # the run turned this client's images
        from torchvision.transforms.functional import rotate

        x = rotate(x.float(), about["angle"])
    return x


def scaled(about: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
    """Return rows of `raw`, imputed, scaled and normalised, float32; tokens as they are."""
    if about["input"] == "text":
        return x
    if about["empty"] is not None:
        x = torch.where(x.isnan(), torch.tensor(about["empty"], dtype=torch.float64), x.double())
    if about["scale"] is not None:
        centre, spread, slope, shift = torch.tensor(about["scale"], dtype=torch.float64)
        x = (x.double() - centre) / spread * slope + shift
    mean, std = (torch.tensor(about[name], dtype=torch.float32) for name in ("mean", "std"))
    x = x.float().sub(mean).div(std)
    if not bool(x.isfinite().all()):
        raise ValueError(
            "a number is not finite, or a cell is empty and the model was trained without such"
        )
    return x


def probabilities(about: Mapping[str, Any], scores: torch.Tensor) -> torch.Tensor:
    """Return probabilities (n, classes) from scores, with the exported temperature, if any.

    Raises:
        ValueError: the model is a regression, or scores each position of a text.
    """
    if not about["class_names"] or scores.ndim != 2:
        raise ValueError("only a model that gives each row a class has probabilities")
    scores = scores[..., : len(about["class_names"])].double()
    return (scores / about.get("temperature", 1.0)).softmax(-1)


def names(about: Mapping[str, Any], scores: torch.Tensor) -> list[Any]:
    """Return the class name of each row of scores (n, classes), by the exported threshold, if any;
    for (n, positions, classes) a list for each row; for a regression numbers."""
    if not about["class_names"]:
        return scores[..., 0].tolist()
    classes: list[str] = about["class_names"]
    best = scores[..., : len(classes)].argmax(-1).tolist()
    if "threshold" in about:  # from which probability on a row is of one of the two classes
        case, least = about["threshold"]
        number = classes.index(case)
        is_case = probabilities(about, scores)[:, number] >= least
        best = torch.where(is_case, number, 1 - number).tolist()
    if scores.ndim > 2:
        return [[classes[k] for k in row] for row in best]
    return [classes[k] for k in best]


def _features(about: Mapping[str, Any], row: Any) -> list[float]:
    """Return a table's row as numbers: NaN for an empty cell; for a column of words a number for
    each of its values."""
    numbers: list[float] = []
    for place, (name, values) in enumerate(about["columns"]):
        key, keys = (name, row) if isinstance(row, Mapping) else (place, range(len(row)))
        if key not in keys:
            raise ValueError(f"it lacks the column {name}")
        cell = row[key]
        is_missing = cell is None or cell != cell
        text = "" if is_missing else unicodedata.normalize("NFC", str(cell).strip())
        if values is not None:
            cell_value = _value(text, values)
            if cell_value is None and not is_empty(text):
                listed = ", ".join(values)
                raise ValueError(
                    f"{text!r} in the column {name} is not one of its values: {listed}"
                )
            numbers += [float(value == cell_value) for value in values]
        else:
            try:
                is_typed = isinstance(cell, float | int)  # no text: it has no decimal comma
                form = {**about, "decimal": "."} if is_typed else about
                numbers.append(number(name, text, form))
            except ValueError:
                kind = "date" if name in about["dates"] else "number"
                raise ValueError(f"{text!r} in the column {name} is no {kind}") from None
    return numbers


def _value(text: str, values: Sequence[str]) -> str | None:
    """Return the one of `values` that a cell holds, or None: 3.0 is 3, as a table has it if other
    cells of a column are empty."""
    if text in values:
        return text
    try:
        return next((value for value in values if float(value) == float(text)), None)
    except ValueError:
        return None


def _sample(row: Any, shape: Sequence[int]) -> torch.Tensor:
    """Return a vector, a series or an image with its channels first."""
    if isinstance(row, str) or hasattr(row, "__fspath__"):
        import numpy as np
        from PIL import Image, ImageOps

        size = (shape[2], shape[1])
        with Image.open(row) as image:
            if image.mode[0] in "IF":  # Pillow cuts their numbers off at 255
                raise ValueError(
                    f"{row} has more than 8 bits a channel, mode {image.mode}: convert it to 8"
                )
            upright: Image.Image = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                white = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(white, upright.convert("RGBA"))
            row = np.array(upright.convert("RGB").resize(size, Image.Resampling.BILINEAR))
    x = torch.as_tensor(row)
    if list(x.shape) == list(shape):
        return x
    if x.ndim == 2:
        return x[None]
    return x.permute(2, 0, 1) if x.ndim == 3 else x


def _tokens(tokens: Mapping[str, Any], text: Any) -> list[int]:
    """Return the numbers of a text's tokens, with 0 on the left if it is short; numbers stay as
    they are."""
    if not isinstance(text, str):
        return [int(number) for number in text]
    if tokens["tokenizer"] is not None:
        from tokenizers import Tokenizer

        numbers = Tokenizer.from_str(tokens["tokenizer"]).encode(text).ids
    else:
        number_of = {name: number for number, name in enumerate(tokens["names"])}
        numbers = [number_of.get(character, 0) for character in text]
    length = tokens["length"]
    numbers = numbers[-length:] if tokens["keep"] == "last" else numbers[:length]
    return [0] * (length - len(numbers)) + list(numbers)

"""Image files: the user's class folders, and the decoding that file-based sets of torchvision
share."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from fl_lightning.configuration.config import DataConfig, check
from fl_lightning.data.source import SamplePool, Setting, Source, at_root, source_of
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadInput, first_line
from fl_lightning.foundation.named import composed, entries, is_hidden, some

SIZE = 32
"""Image files are resized to SIZE x SIZE colour pixels (bilinear, antialiased): the size of CIFAR,
GTSRB and SVHN."""
MARK = 2**16
"""Bytes at the beginning of a file that, with its size, identify a picture."""
LAYOUT = "a folder with train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png alone (split 80/20)"


def decoder(
    image: Callable[[int], Any],
    root: str | None,
    where: Callable[[int], str],
) -> Callable[[ndarray], ndarray]:
    """Return a function that decodes the images at given indices in threads, to uint8 [m, 3, SIZE,
    SIZE].

    If an image cannot be decoded, it raises `BadInput` for `data.root`.

    Args:
        image: returns the PIL image of an index.
        root: value of `data.root`, for errors.
        where: describes the place of an index's image, for errors.
    """

    def decode(index: int) -> ndarray:
        from PIL import Image

        try:
            resized = _colour(image(index)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        except Exception as error:  # pillow raises many types for a broken file
            problem = f"an image cannot be read: {where(index)} ({first_line(error)})"
            raise BadInput("data.root", root, problem) from error
        return np.asarray(resized).transpose(2, 0, 1)

    def read(indices: ndarray) -> ndarray:
        samples = np.empty((len(indices), 3, SIZE, SIZE), np.uint8)
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            for place, sample in enumerate(threads.map(decode, indices.tolist())):
                samples[place] = sample
        return samples

    return read


def load(data: DataConfig) -> Source:
    """Read class folders below `data.root`; classes are numbered in the order of their names."""
    root, folder = at_root(data, LAYOUT)
    if not (folder / "train").is_dir():
        pool, names = class_folders(root, folder)
        return source_of(data, pool, None, names)
    unread = {path.name for path in entries(folder)} - {"train", "test"}
    if unread:
        log.say(f"data: not read in {folder.name}/: {some(sorted(unread))}")
    train, names = class_folders(root, folder / "train")
    if not data.reads_test:
        return Source(train, train, names)
    test, test_names = class_folders(root, folder / "test")
    untrained = sorted(set(test_names) - set(names))
    problem = f"test/ has classes that train/ lacks: {', '.join(untrained)}"
    check("data.root", root, not untrained, problem)
    numbers = np.array([names.index(name) for name in test_names])
    return Source(train, replace(test, labels=numbers[test.labels]), names)


def class_folders(
    root: str,
    folder: Path,
    layout: str = LAYOUT,
) -> tuple[SamplePool, list[str]]:
    """Return the pictures in `folder`, which has a folder for each class, and the names of the
    classes.

    Prints a line about files that are left out.

    Args:
        root: value of `data.root`, for errors.
        folder: the folder.
        layout: description of the expected folders, for errors.

    Raises:
        BadInput: there is no such folder, no class in it, or a class without pictures.
    """
    setting = Setting("data.root", root)
    problem = f"it must be {layout} (there is no folder {folder.name}/)"
    setting.check(folder.is_dir(), problem)
    by_class: dict[str, list[Path]] = {}
    hidden: list[Path] = []
    left_out: list[Path] = []
    for path in sorted(folder.iterdir()):
        if is_hidden(path):
            hidden.append(path)
        elif not path.is_dir():
            left_out.append(path)
        else:
            pictures = by_class.setdefault(composed(path.name), [])
            files = _files(path, frozenset(), hidden)
            for file in sorted(files, key=lambda file: (str(file.parent), file.name)):
                is_picture = file.suffix.lower() in picture_suffixes()
                (pictures if is_picture else left_out).append(file)
    _say_left_out(folder, left_out, hidden)
    problem = f"it must be {layout} (there is no class folder in {folder.name}/)"
    setting.check(bool(by_class), problem)
    for name, pictures in by_class.items():
        problem = f"its class folder {name!r} in {folder.name}/ holds no picture that Pillow opens"
        setting.check(bool(pictures), f"{problem}: fill it or delete it")
    names = sorted(by_class)
    files_in_order = [file for name in names for file in by_class[name]]
    sizes = [len(by_class[name]) for name in names]
    labels = np.repeat(np.arange(len(names)), sizes)
    read = decoder(
        lambda index: open_picture(files_in_order[index]),
        root,
        lambda index: str(files_in_order[index]),
    )
    return SamplePool(labels, read, mark=marks(files_in_order, folder)), names


@cache
def picture_suffixes() -> frozenset[str]:
    """Return the suffixes, in lower case, of all files that Pillow can read."""
    from PIL import Image, ImageFile

    Image.init()
    formats = set()
    for name, (kind, _) in Image.OPEN.items():
        # a stub recognises a format (`.h5`) that it cannot read
        if not (isinstance(kind, type) and issubclass(kind, ImageFile.StubImageFile)):
            formats.add(name)
    return frozenset(end for end, name in Image.registered_extensions().items() if name in formats)


def _files(
    folder: Path,
    above: frozenset[Path],
    hidden: list[Path],
) -> Iterator[Path]:
    """Yield all files below `folder`, following links; hidden ones are added to `hidden` instead.

    `above`: resolved paths of the parent folders, against endless links.
    """
    place = folder.resolve()
    if place in above:  # a link to a parent folder
        return
    for path in folder.iterdir():
        if is_hidden(path):
            hidden.append(path)
        elif path.is_dir():
            yield from _files(path, above | {place}, hidden)
        else:
            yield path


def _say_left_out(
    folder: Path,
    others: list[Path],
    hidden: list[Path],
) -> None:
    """Print a line about files that are left out: others than pictures, outside of class folders,
    or hidden."""
    parts = []
    if others:
        counts = Counter(file.suffix.lower() or "no ending" for file in others)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        first = others[0].relative_to(folder)
        parts.append(
            f"{len(others)} files that are no pictures of a class ({kinds}; the first: {first})"
        )
    if hidden:
        counts = Counter(path.name for path in hidden)
        shown = [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
        parts.append(f"hidden: {some(shown)}")
    if parts:
        log.say(f"data: left out in {folder.name}/: {'; '.join(parts)}")


def marks(
    files: Sequence[Path],
    folder: Path,
) -> Callable[[ndarray], list[bytes]]:
    """Return the function `SamplePool.mark` of pictures: from indices into `files` to bytes that
    identify the pictures.

    Args:
        files: the pictures.
        folder: a folder that contains all of them; the paths below it become part of the bytes.
    """
    return lambda indices: [_mark(files[index], folder) for index in indices.tolist()]


def _mark(file: Path, folder: Path) -> bytes:
    """Identify a picture without decoding it, by its path, size and beginning."""
    try:
        with file.open("rb") as content:
            begin = content.read(MARK)
            size = os.fstat(content.fileno()).st_size
    except OSError:  # `decoder` refuses the picture
        begin = b""
        size = 0
    name = composed(os.path.relpath(file, folder))
    return f"{name} {size} ".encode(errors="surrogateescape") + begin


def open_picture(path: str | Path) -> Any:
    """Open an image file: the first frame, in colour, rotated as its orientation tag says."""
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        _check_bits(image)
        return _colour(ImageOps.exif_transpose(image))


def _colour(image: Any) -> Any:
    """Convert a PIL image to RGB of 8 bits a channel, with transparent pixels over white.

    Pillow alone would clip values of more bits, and show the colour beneath transparency.

    Raises:
        ValueError: the image has more than 8 bits a channel; `exporting.plain` refuses the same.
    """
    from PIL import Image

    _check_bits(image)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def _check_bits(image: Any) -> None:
    if image.mode[0] in "IF":  # I;16, I, F
        raise ValueError(f"it has more than 8 bits a channel, mode {image.mode}: convert it to 8")

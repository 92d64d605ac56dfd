"""Image files: the user's own class folders, and the decoding that torchvision's file-based sets
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
"""Bytes of a file by which, with its size, a picture is told from others: smaller ones are told by
all they hold."""
LAYOUT = "a folder with train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png alone (split 80/20)"


def decoder(
    image: Callable[[int], Any],
    root: str | None,
    where: Callable[[int], str],
) -> Callable[[ndarray], ndarray]:
    """The reader of a pool whose sample i is the PIL image `image(i)`: uint8 [m, 3, SIZE, SIZE],
    decoded by threads.

    It raises `BadInput`, with `root` as the value of `data.root`, for an image that cannot be read,
    and says `where` that lies.
    """

    def decode(index: int) -> ndarray:
        from PIL import Image

        try:
            resized = _colour(image(index)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        except Exception as error:  # pillow answers broken files in half a dozen types
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
        line = f"beside train/ and test/ in {folder.name}/, and not read"
        log.say(f"data: {line}: {some(sorted(unread))}")
    train, names = class_folders(root, folder / "train")
    if not data.reads_test:
        return Source(train, train, names)
    test, test_names = class_folders(root, folder / "test")
    strangers = sorted(set(test_names) - set(names))
    problem = f"test/ has classes that train/ has not: {', '.join(strangers)}"
    check("data.root", root, not strangers, problem)
    numbers = np.array([names.index(name) for name in test_names])
    return Source(train, replace(test, labels=numbers[test.labels]), names)


def class_folders(
    root: str,
    folder: Path,
    layout: str = LAYOUT,
) -> tuple[SamplePool, list[str]]:
    """The pictures in `folder`, a folder for each class, and the classes. One line names files that
    are left out.

    Raises:
        BadInput: there is no such folder, no class in it, or a class without pictures; it says the
            `layout`.
    """
    setting = Setting("data.root", root)
    problem = f"it must be {layout} (there is no folder {folder.name}/)"
    setting.check(folder.is_dir(), problem)
    by_class: dict[str, list[Path]] = {}
    hidden: list[Path] = []
    others: list[Path] = []
    for path in sorted(folder.iterdir()):
        if is_hidden(path):
            hidden.append(path)
        elif not path.is_dir():
            others.append(path)
        else:
            pictures = by_class.setdefault(composed(path.name), [])
            files = _files(path, frozenset(), hidden)
            for file in sorted(files, key=lambda file: (str(file.parent), file.name)):
                is_picture = file.suffix.lower() in openable()
                (pictures if is_picture else others).append(file)
    _say_left_out(folder, others, hidden)
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
        lambda index: opened(files_in_order[index]),
        root,
        lambda index: str(files_in_order[index]),
    )
    return SamplePool(labels, read, mark=marks(files_in_order, folder)), names


@cache
def openable() -> frozenset[str]:
    """Ends of names, in small letters, of all formats that Pillow reads here."""
    from PIL import Image, ImageFile

    Image.init()
    formats = set()
    for name, (kind, _) in Image.OPEN.items():
        # a stub recognises a format (`.h5`), and nothing here reads it
        if not (isinstance(kind, type) and issubclass(kind, ImageFile.StubImageFile)):
            formats.add(name)
    return frozenset(end for end, name in Image.registered_extensions().items() if name in formats)


def _files(
    folder: Path,
    above: frozenset[Path],
    hidden: list[Path],
) -> Iterator[Path]:
    """All files in `folder` and its folders, links followed, but `hidden` ones, which are
    collected."""
    place = folder.resolve()
    if place in above:  # a link to a folder that it lies in
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
    """One line on files and folders that are no pictures, or lie beside the class folders."""
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
    """`SamplePool.mark` of the pictures in `files`, by their places in `folder`."""
    return lambda indices: [_mark(files[index], folder) for index in indices.tolist()]


def _mark(file: Path, folder: Path) -> bytes:
    """What tells a picture from others without decoding it: its place, size and beginning."""
    try:
        with file.open("rb") as content:
            begin = content.read(MARK)
            size = os.fstat(content.fileno()).st_size
    except OSError:  # it is said where the picture is read
        begin = b""
        size = 0
    name = composed(os.path.relpath(file, folder))
    return f"{name} {size} ".encode(errors="surrogateescape") + begin


def opened(path: str | Path) -> Any:
    """The picture in a file, in colour and as its orientation tag says; of several frames the
    first."""
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        _check_bits(image)
        return _colour(ImageOps.exif_transpose(image))


def _colour(image: Any) -> Any:
    """A PIL image in 8 bits for each of three channels, transparent pixels over white; Pillow cuts
    numbers of more bits off at 255, and shows what lies below transparency.

    Raises:
        ValueError: it has more bits. `exporting.plain` refuses the same.
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

"""Image files: the user's own class folders, and the decoding that torchvision's file-based sets share."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.config import DataConfig, check
from fl_lightning.data.source import Pool, Source, at_root, source_of
from fl_lightning.errors import BadInput
from fl_lightning.extras import require

SIZE = 32
"""Image files are resized to SIZE x SIZE colour pixels (bilinear, antialiased): the size of CIFAR, GTSRB and SVHN."""
LAYOUT = "a folder with train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png alone (split 80/20)"


def decoder(
    image: Callable[[int], Any], root: str | None, where: Callable[[int], str]
) -> Callable[[np.ndarray], np.ndarray]:
    """The reader of a pool whose sample i is the PIL image `image(i)`: uint8 [m, 3, SIZE, SIZE], decoded by threads.

    It raises `BadInput`, with `root` as the value of `data.root`, for an image that cannot be read, and says `where`
    that lies.
    """

    def decode(index: int) -> np.ndarray:
        from PIL import Image

        try:
            resized = _colour(image(index)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        except Exception as error:  # pillow answers broken files in half a dozen types
            reason = str(error).split("\n")[0]
            raise BadInput("data.root", root, f"an image cannot be read: {where(index)} ({reason})") from error
        return np.asarray(resized).transpose(2, 0, 1)

    def read(indices: np.ndarray) -> np.ndarray:
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
    train, names = class_folders(root, folder / "train")
    if not data.reads_test:
        return Source(train, train, names)
    tests, test_names = class_folders(root, folder / "test")
    strangers = sorted(set(test_names) - set(names))
    check("data.root", root, not strangers, f"test/ has classes that train/ has not: {', '.join(strangers)}")
    numbers = np.array([names.index(name) for name in test_names])
    return Source(train, Pool(numbers[tests.labels], tests.read), names)


def class_folders(root: str, folder: Path, layout: str = LAYOUT) -> tuple[Pool, list[str]]:
    """The images in `folder`, a folder for each class, and the classes; `BadInput` that says the `layout`."""
    require("vision", "data.root", root)
    from torchvision.datasets import ImageFolder

    try:
        dataset = ImageFolder(folder, loader=opened)  # its own turns what has more bits white
    except OSError as error:
        reason = str(error).split("\n")[0]
        raise BadInput("data.root", root, f"it must be {layout} ({reason})") from error
    read = decoder(lambda index: dataset[index][0], root, lambda index: dataset.samples[index][0])
    return Pool(np.array(dataset.targets, np.int64), read), dataset.classes


def opened(path: str | Path) -> Any:
    """The image in a file, in colour."""
    from PIL import Image

    with Image.open(path) as image:
        return _colour(image)


def _colour(image: Any) -> Any:
    """A PIL image in 8 bits for each of three channels; Pillow cuts numbers of more bits off at 255 and says nothing.

    Raises:
        ValueError: it has more bits. `exporting.plain` refuses the same.
    """
    if image.mode[0] in "IF":  # I;16, I, F
        raise ValueError(f"it has more than 8 bits a channel, mode {image.mode}: convert it to 8")
    return image.convert("RGB")

"""MNIST's own files in one folder, gzipped or not, as MNIST's site and Debian's package
`dataset-fashion-mnist` have them."""

import gzip
from pathlib import Path

import numpy as np

from fl_lightning.data.source import Absent, SamplePool, Source
from fl_lightning.foundation.errors import BadInput, check

PARTS = ("train", "t10k")
WHOLE = 60_000
"""Training images of the complete set. MNIST and Fashion-MNIST have equal files but for their
content."""


def lies_in(root: str | None) -> bool:
    """Return whether the folder `root` itself holds MNIST's files; torchvision's lie two folders
    below."""
    return root is not None and any(
        _file(Path(root), f"{part}-images-idx3-ubyte") for part in PARTS
    )


def load(
    root: str,
    class_names: list[str],
    begins: tuple[int, ...],
) -> Source:
    """Read training and test images (1, 28, 28) in `root`.

    Args:
        root: the folder.
        class_names: names of the classes.
        begins: first training labels of the expected set; other labels mean that the files are
            another set's.

    Raises:
        Absent: one of the four files is missing.
        BadInput: a file cannot be read, or the files are another set's.
    """
    pools = []
    for part in PARTS:
        images = _read(root, f"{part}-images-idx3-ubyte", 3)
        labels = _read(root, f"{part}-labels-idx1-ubyte", 1)
        valid = len(images) == len(labels) and labels.max(initial=0) < len(class_names)
        mismatch = (
            f"its {part} images and labels do not fit together: {len(images)} images, "
            f"{len(labels)} labels"
        )
        check("data.root", root, valid, f"{mismatch}, {len(class_names)} classes")
        pools.append(SamplePool.of(images[:, None], labels))
    first = pools[0].labels[: len(begins)].tolist()
    valid = len(pools[0].labels) != WHOLE or first == list(begins)
    check(
        "data.root",
        root,
        valid,
        f"its files are another data set's: training labels begin {first}, not {list(begins)}; "
        f"set data.source to the name of that data set",
    )
    return Source(pools[0], pools[1], class_names)


def _file(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def _read(
    root: str,
    name: str,
    axes: int,
) -> np.ndarray:
    """Read the uint8 array of an idx file: two zeros, 8 (for bytes), the number of axes, their
    lengths, the numbers."""
    path = _file(Path(root), name)
    if path is None:
        raise Absent("data.root", root, f"it lacks {name} (or {name}.gz)")
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        shape = np.frombuffer(content, ">i4", axes, 4)
        if content[:4] != bytes((0, 0, 8, axes)):
            raise ValueError("it is no idx file of bytes")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError) as error:
        raise BadInput("data.root", root, f"{path.name} cannot be read ({error})") from None

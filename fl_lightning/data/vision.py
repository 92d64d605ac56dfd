"""torchvision's classification data sets, by their names in lower case."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.configuration.config import DataConfig
from fl_lightning.data import idx
from fl_lightning.data.images import SIZE, decoder
from fl_lightning.data.source import Absent, SamplePool, Source, source_of
from fl_lightning.foundation.errors import first_line
from fl_lightning.foundation.extras import require

DEFAULT_ROOT = "data"
"""Folder of torchvision's files if data.root is not set."""

_SIDES = {"train": {"train": True}, "test": {"train": False}}
_SPLITS = {"train": {"split": "train"}, "test": {"split": "test"}}
_VAL = {"train": {"split": "train"}, "test": {"split": "val"}}
_TRAINVAL = {"train": {"split": "trainval"}, "test": {"split": "test"}}
_WHOLE: dict[str, dict[str, Any]] = {"whole": {}}


@dataclass(frozen=True)
class Recipe:
    """How torchvision builds a data set, and the shape of its content."""

    dataset: str
    """The class in torchvision.datasets."""
    files: str
    """Files that torchvision expects below the root."""
    classes: int
    shape: tuple[int, int, int] = (3, SIZE, SIZE)
    parts: dict[str, dict[str, Any]] = field(default_factory=lambda: _SPLITS)
    """Arguments of `train` and `test`, or of `whole` for a set without a test part."""
    first_label: int = 0
    downloads: bool = True
    """Whether torchvision can download it."""
    begins: tuple[int, ...] = ()
    """First training labels of a set whose files may also lie in the root itself (data/idx.py)."""
    elsewhere: str = ""
    """Another place to get the files from."""


def _emnist(
    split: str,
    classes: int,
    first_label: int = 0,
) -> Recipe:
    parts = {part: {"split": split, **sides} for part, sides in _SIDES.items()}
    return Recipe(
        "EMNIST", f"EMNIST/raw/emnist-{split}-*-ubyte", classes, (1, 28, 28), parts, first_label
    )


def _grey(
    dataset: str,
    begins: tuple[int, ...] = (),
    elsewhere: str = "",
) -> Recipe:
    files = f"{dataset}/raw/*-ubyte"
    return Recipe(
        dataset,
        files,
        10,
        (1, 28, 28),
        _SIDES,
        begins=begins,
        elsewhere=elsewhere,
    )


RECIPES: dict[str, Recipe] = {
    "mnist": _grey("MNIST", (5, 0, 4, 1, 9, 2, 1, 3)),
    "fashionmnist": _grey(
        "FashionMNIST",
        (9, 0, 0, 3, 0, 2, 7, 2),
        elsewhere="Debian's package dataset-fashion-mnist has it, for --data.root "
        "/usr/share/datasets/fashion-mnist",
    ),
    "kmnist": _grey("KMNIST"),
    "qmnist": _grey("QMNIST"),
    "emnist": _emnist("balanced", 47),
    "emnist_balanced": _emnist("balanced", 47),
    "emnist_byclass": _emnist("byclass", 62),
    "emnist_bymerge": _emnist("bymerge", 47),
    "emnist_digits": _emnist("digits", 10),
    "emnist_letters": _emnist("letters", 26, first_label=1),
    "emnist_mnist": _emnist("mnist", 10),
    "usps": Recipe(
        "USPS",
        "usps.bz2 and usps.t.bz2",
        10,
        (1, 16, 16),
        _SIDES,
    ),
    "semeion": Recipe(
        "SEMEION",
        "semeion.data",
        10,
        (1, 16, 16),
        _WHOLE,
    ),
    "cifar10": Recipe("CIFAR10", "cifar-10-batches-py/", 10, parts=_SIDES),
    "cifar100": Recipe("CIFAR100", "cifar-100-python/", 100, parts=_SIDES),
    "svhn": Recipe("SVHN", "train_32x32.mat and test_32x32.mat", 10),
    "stl10": Recipe("STL10", "stl10_binary/", 10, (3, 96, 96)),
    "gtsrb": Recipe("GTSRB", "gtsrb/GTSRB/ and gtsrb/GT-final_test.csv", 43),
    "dtd": Recipe("DTD", "dtd/dtd/", 47),
    "eurosat": Recipe("EuroSAT", "eurosat/2750/", 10, parts=_WHOLE),
    "flowers102": Recipe("Flowers102", "flowers-102/", 102),
    "food101": Recipe("Food101", "food-101/", 101),
    "oxfordiiitpet": Recipe("OxfordIIITPet", "oxford-iiit-pet/", 37, parts=_TRAINVAL),
    "fgvcaircraft": Recipe("FGVCAircraft", "fgvc-aircraft-2013b/", 100, parts=_TRAINVAL),
    "stanfordcars": Recipe("StanfordCars", "stanford_cars/", 196, downloads=False),
    "pcam": Recipe("PCAM", "pcam/*.h5", 2),
    "renderedsst2": Recipe("RenderedSST2", "rendered-sst2/", 2),
    "country211": Recipe("Country211", "country211/", 211),
    "clevrclassification": Recipe(
        "CLEVRClassification", "clevr/CLEVR_v1.0/", 8, parts=_VAL, first_label=3
    ),
    "fer2013": Recipe(
        "FER2013", "fer2013/fer2013.csv or fer2013/icml_face_data.csv", 7, downloads=False
    ),
    "imagenette": Recipe("Imagenette", "imagenette2/", 10, parts=_VAL),
    "imagenet": Recipe(
        "ImageNet",
        "ILSVRC2012_*.tar",
        1000,
        parts=_VAL,
        downloads=False,
    ),
    "places365": Recipe(
        "Places365",
        "categories_places365.txt, places365_*.txt, data_256_standard/ and val_256/",
        365,
        parts={
            "train": {"split": "train-standard", "small": True},
            "test": {"split": "val", "small": True},
        },
    ),
    "sun397": Recipe("SUN397", "SUN397/", 397, parts=_WHOLE),
    "caltech101": Recipe("Caltech101", "caltech101/101_ObjectCategories/", 101, parts=_WHOLE),
    "caltech256": Recipe("Caltech256", "caltech256/256_ObjectCategories/", 257, parts=_WHOLE),
    "inaturalist": Recipe(
        "INaturalist",
        "2021_train_mini/ and 2021_valid/",
        10_000,
        parts={
            "train": {"version": "2021_train_mini"},
            "test": {"version": "2021_valid"},
        },
    ),
}


def load(data: DataConfig) -> Source:
    """Load the torchvision data set `data.source` below `data.root`.

    Raises:
        Absent: torchvision cannot load it, for whatever reason.
    """
    name = data.source
    root = data.root
    download = data.download
    require("vision", "data.source", name)
    import torchvision.datasets

    recipe = RECIPES[name]
    build = getattr(torchvision.datasets, recipe.dataset)
    folder = DEFAULT_ROOT if root is None else root
    if recipe.begins and root is not None and idx.lies_in(root):
        return idx.load(root, list(build.classes), recipe.begins)
    options = {"download": download} if recipe.downloads else {}
    before = _existing_folders(Path(folder)) if download else set()
    pools: dict[str, SamplePool] = {}
    for part, arguments in recipe.parts.items():
        if part == "test" and not data.reads_test:
            continue
        try:
            dataset = build(root=folder, **arguments, **options)
            pools[part] = _pool(dataset, recipe)
        # torchvision raises many types for a missing, cut or corrupt file, a lost network and an
        # absent package
        except Exception as error:
            new_folders = _existing_folders(Path(folder)) - before if download else set()
            for new in sorted(new_folders, reverse=True):  # inner folders first
                with contextlib.suppress(OSError):  # it has content, perhaps another run's
                    new.rmdir()
            remedy = _remedy(name, recipe, part, folder, download, error)
            raise Absent("data.root", root, remedy) from error
        names = _class_names(dataset, recipe)
    if "whole" in pools:
        return source_of(data, pools["whole"], None, names)
    test = pools["test"] if data.reads_test else pools["train"]
    return Source(pools["train"], test, names)


def _existing_folders(root: Path) -> set[Path]:
    """Return the existing folders among `root`, its parents, and those one or two levels below it.

    `load` removes the folders that a failed download has added.
    """
    below = []
    if root.is_dir():
        below = [root, *root.glob("*/"), *root.glob("*/*/")]
    return {path for path in (*root.parents, *below) if path.is_dir()}


def _remedy(
    name: str,
    recipe: Recipe,
    part: str,
    folder: str,
    download: bool,
    error: Exception,
) -> str:
    reason = first_line(error).split(". ")[0].rstrip(".")
    problem = (
        f"torchvision cannot load the {part} part of {recipe.dataset} from {folder!r} ({reason})"
    )
    remedies = [f"put {recipe.files} below data.root"]
    if recipe.downloads and not download:
        remedies = [f"--data.download true fetches it; or {remedies[0]}"]
    if recipe.elsewhere:
        remedies.append(recipe.elsewhere)
    remedies.append("or --data.source digits needs no files")
    return f"for the source {name} {problem}; {'; '.join(remedies)}"


def _pool(dataset: Any, recipe: Recipe) -> SamplePool:
    labels = _labels(dataset) - recipe.first_label
    if labels.min() < 0 or labels.max() >= recipe.classes:
        raise ValueError(f"labels {labels.min()} to {labels.max()} for {recipe.classes} classes")
    samples = getattr(dataset, "data", None)
    if samples is None:
        read = decoder(
            lambda index: dataset[index][0], recipe.dataset, lambda index: f"sample {index + 1}"
        )
        # published images do not change, so their digest needs no decoding
        return SamplePool(
            labels,
            read,
            mark=lambda index: [b""] * len(index),
        )
    samples = np.asarray(samples)
    if samples.ndim == 3:
        samples = samples[:, None]
    elif samples.shape[1:] != recipe.shape:
        samples = samples.transpose(0, 3, 1, 2)
    return SamplePool.of(samples, labels)


def _labels(dataset: Any) -> np.ndarray:
    """Return the class numbers, int64 [n], from the attribute where a data set keeps them; images
    are decoded only if there is none."""
    for attribute in ("targets", "labels", "_labels", "y"):
        labels = getattr(dataset, attribute, None)
        if labels is not None:
            labels = np.asarray(labels)
            # QMNIST has eight columns, of which the first is the class
            labels = labels[:, 0] if labels.ndim == 2 else labels
            return labels.astype(np.int64)
    if hasattr(dataset, "_samples"):
        labels = [label for _, label in dataset._samples]
    elif hasattr(dataset, "index"):
        labels = [label for label, _ in dataset.index]
    else:
        labels = [dataset[index][1] for index in range(len(dataset))]
    return np.array(labels, np.int64)


def _class_names(dataset: Any, recipe: Recipe) -> list[str]:
    for attribute in ("classes", "categories"):
        names = getattr(dataset, attribute, None) or []
        names = [name if isinstance(name, str) else str(name[0]) for name in names]
        if len(names) >= recipe.classes:
            return names[-recipe.classes :]
    return [str(label + recipe.first_label) for label in range(recipe.classes)]

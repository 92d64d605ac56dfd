"""LEAF's JSON (Caldas et al., 2018), as its scripts leave FEMNIST and Shakespeare behind: natural groups are its users.

A file holds `users`, `num_samples` and `user_data`: by user `x`, a list of samples, and `y`, their labels. A sample of
FEMNIST is 784 grey values (white is 1), one of Shakespeare 80 characters, of which the next is the label.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.config import DataConfig
from fl_lightning.data import text
from fl_lightning.data.source import Absent, Pool, Source, split_source
from fl_lightning.errors import BadInput

LAYOUT = "a folder with train/*.json and test/*.json, or with *.json alone (split 80/20 within each user)"
Samples = dict[str, tuple[list[Any], list[Any]]]
"""By user: x and y."""


def load(data: DataConfig) -> Source:
    """Images (1, side, side) float32 where a sample's values make a square, else features; texts as characters.

    Raises:
        BadInput: the folder is not there (then `Absent`); a file, user and sample that are malformed, by name.
    """
    root = data.root
    if root is None or not Path(root).expanduser().is_dir():
        raise Absent("data.root", root, f"the source leaf wants {LAYOUT}")
    folder = Path(root).expanduser()
    whole = not (folder / "train").is_dir()
    train = _files(root, folder if whole else folder / "train")
    test: Samples = {} if whole or not data.reads_test else _files(root, folder / "test")
    users = sorted(train)
    strangers = sorted(set(test) - set(users))
    if strangers:
        raise BadInput("data.root", root, f"the user {strangers[0]!r} has test samples and none for training")
    if isinstance(next(iter(train.values()))[0][0], str):
        return _texts(train, test, users, data)
    classes = 1 + max(int(max(y)) for part in (train, test) for _, y in part.values() if y)
    pools = [_pool(root, part, users) for part in (train, test) if part]
    names = [str(label) for label in range(classes)]
    if len(pools) == 2:
        return Source(pools[0], pools[1], names, users)
    return split_source(pools[0], names, users) if whole else Source(pools[0], pools[0], names, users)


def _texts(train: Samples, test: Samples, users: list[str], data: DataConfig) -> Source:
    """Characters, and as classes the characters that may come next: all tokens."""
    names, encode = text.characters(line for x, y in train.values() for line in (*x, *y))

    def pool(part: Samples) -> Pool:
        held = [(*pair, number) for number, user in enumerate(users) for pair in _pairs(part, user)]
        tokens = np.zeros((len(held), data.length), np.int64)
        for row, (line, _, _) in zip(tokens, held, strict=True):
            found = encode(line)[-data.length :]
            row[data.length - len(found) :] = found
        labels = np.array([(encode(label) or [0])[0] for _, label, _ in held], np.int64)
        return Pool(labels, lambda index: tokens[index], np.array([number for *_, number in held], np.int64))

    ours = pool(train)
    if test:
        return Source(ours, pool(test), names, users, vocabulary=len(names))
    made = split_source(ours, names, users) if data.reads_test else Source(ours, ours, names, users)
    return Source(made.train, made.test, names, users, vocabulary=len(names))


def _pairs(part: Samples, user: str) -> Iterator[tuple[Any, Any]]:
    """x and y of each of a user's samples."""
    return zip(*part.get(user, ([], [])), strict=True)


def _pool(root: str, part: Samples, users: list[str]) -> Pool:
    width = len(next(iter(part.values()))[0][0])
    side = math.isqrt(width)
    rows, labels, groups = [], [], []
    for number, user in enumerate(users):
        for k, (x, y) in enumerate(_pairs(part, user), 1):
            fine = isinstance(x, list) and len(x) == width and type(y) is int and y >= 0
            if not fine:
                what = f"sample {k} of user {user!r}: x must hold {width} numbers, y a class from 0; y is {y!r}"
                raise BadInput("data.root", root, what)
            rows.append(x)
            labels.append(y)
            groups.append(number)
    try:
        raw = np.array(rows, np.float32)
    except (TypeError, ValueError) as error:
        raise BadInput("data.root", root, f"x holds what is no number ({str(error).splitlines()[0]})") from error
    if side * side == width and side > 1:
        raw = raw.reshape(-1, 1, side, side)
    return Pool(np.array(labels, np.int64), lambda index: raw[index], np.array(groups, np.int64))


def _files(root: str, folder: Path) -> Samples:
    """All users of a folder's files; a user that stands in two of them has both's samples."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise Absent("data.root", root, f"there is no .json file in {folder.name}/; it must be {LAYOUT}")
    found: Samples = {}
    for file in files:
        try:
            held = json.loads(file.read_text(encoding="utf-8"))
            users, of_user = held["users"], held["user_data"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{file.name} is none of LEAF's: {type(error).__name__}: {str(error).splitlines()[0]}"
            raise BadInput("data.root", root, what) from error
        for user in users:
            own = of_user.get(user, {}) if isinstance(of_user, dict) else {}
            x, y = own.get("x"), own.get("y")
            if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y) or not x:
                raise BadInput(
                    "data.root", root, f"{file.name}: the user {user!r} must have lists x and y of one length"
                )
            before = found.setdefault(str(user), ([], []))
            before[0].extend(x)
            before[1].extend(y)
    return found

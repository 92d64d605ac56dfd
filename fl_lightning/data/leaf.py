"""LEAF's JSON files (Caldas et al., 2018), as its scripts write FEMNIST and Shakespeare; the
natural groups are its users.

A file holds `users`, `num_samples` and `user_data`: for each user `x`, a list of samples, and `y`,
their labels. A sample of FEMNIST is 784 grey values (white is 1); one of Shakespeare is 80
characters, and its label the next.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.configuration.config import FLOAT32, DataConfig, check
from fl_lightning.data import text
from fl_lightning.data.columns import say_merged
from fl_lightning.data.source import (
    Absent,
    Reading,
    SamplePool,
    Setting,
    Source,
    Tokens,
    at_root,
    source_of,
)
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadInput, first_line
from fl_lightning.foundation.named import composed, entries, some

LAYOUT = (
    "a folder with train/*.json and test/*.json, or with *.json alone (split 80/20 within each "
    "user)"
)
UserSamples = dict[str, tuple[list[Any], list[Any]]]
"""Lists x and y of each user."""


def load(data: DataConfig) -> Source:
    """Read LEAF's files: images (1, side, side) float32 if the values of a sample make a square,
    else features; texts as characters.

    Raises:
        Absent: the folder is missing.
        BadInput: a sample is malformed; the error names file, user and sample.
    """
    root, folder = at_root(data, LAYOUT)
    whole = not (folder / "train").is_dir()
    train = _files(root, folder if whole else folder / "train")
    users = sorted(user for user, (x, _) in train.items() if x)
    first = train[users[0]][0][0]
    test: UserSamples = {}
    if data.reads_test and not whole:
        test = _files(root, folder / "test", first)
    setting = Setting("data.root", root)
    untrained = sorted(set(test) - set(train))
    problem = f"some users are in test/ but not in train/: {some(map(repr, untrained))}"
    setting.check(not untrained, problem)
    _say_empty(train, test)
    if isinstance(first, str):
        return _texts(train, test, users, data)
    samples_of_users = [*train.values(), *test.values()]
    labels = [label for _, y in samples_of_users for label in y]
    classes = 1 + max(labels)
    samples = sum(len(y) for _, y in train.values())
    problem = f"label {classes - 1} of {samples} training samples: number classes from 0 on"
    setting.check(classes <= samples, problem)
    pools = [_pool(part, users) for part in (train, test) if part]
    names = [str(label) for label in range(classes)]
    return source_of(data, pools[0], None if whole else pools[-1], names, users)


def _texts(
    train: UserSamples,
    test: UserSamples,
    users: list[str],
    data: DataConfig,
) -> Source:
    """Build a source of characters; the classes are the tokens that may come next."""
    lines_of_train: list[str] = []
    for x, y in train.values():
        lines_of_train += [*x, *y]
    names, encode = text.characters(lines_of_train)

    def pool(part: UserSamples) -> SamplePool:
        samples = _numbered(part, users)
        lines = [line for line, _, _ in samples]
        first_tokens = [(encode(label) or [0])[0] for _, label, _ in samples]
        labels = np.array(first_tokens, np.int64)
        tokens = text.padded(lines, lambda line: encode(line)[-data.length :], data.length)
        owners = np.array([number for *_, number in samples], np.int64)
        return SamplePool(labels, lambda index: tokens[index], owners)

    train_pool = pool(train)
    test_pool = None if data.reads_test else train_pool
    source = source_of(data, train_pool, pool(test) if test else test_pool, names, users)
    reading = Reading(tokens=Tokens(names, data.length, "last"))
    return replace(source, vocabulary=len(names), reading=reading)


def _say_empty(train: UserSamples, test: UserSamples) -> None:
    """Print a line about users without training samples, who become no clients."""
    empty = sorted(set(train) - {user for user, (x, _) in train.items() if x})
    unused = sum(len(test[user][0]) for user in empty if user in test)
    if empty:
        problem = f"{len(empty)} of {len(train)} users have no training samples and are left out"
        log.say(f"data: {problem}, with {unused} test samples: {some(map(repr, empty))}")


def _numbered(
    part: UserSamples,
    users: list[str],
) -> list[tuple[Any, Any, int]]:
    """List x, y and the user's number of each sample."""
    samples = []
    for number, user in enumerate(users):
        x, y = part.get(user, ([], []))
        for sample, label in zip(x, y, strict=True):
            samples.append((sample, label, number))
    return samples


def _pool(part: UserSamples, users: list[str]) -> SamplePool:
    numbered = _numbered(part, users)
    exact = np.array([x for x, _, _ in numbered])
    say_merged([f"value {k} of samples" for k in range(exact.shape[1])], exact)
    raw = exact.astype(np.float32)
    side = math.isqrt(raw.shape[1])
    if side * side == raw.shape[1] and side > 1:
        raw = raw.reshape(-1, 1, side, side)
    labels, groups = np.array([place for _, *place in numbered], np.int64).T
    return SamplePool(labels, lambda index: raw[index], groups)


def _files(
    root: str,
    folder: Path,
    like: Any = None,
) -> UserSamples:
    """Read the samples of all users from a folder's files; a user in two files has the samples of
    both.

    `like`: a sample whose form all must have, a text or so many numbers; None: the first sample.
    """
    files = entries(folder, "*.json")
    if not files:
        raise Absent(
            "data.root", root, f"there is no .json file in {folder.name}/; it must be {LAYOUT}"
        )
    by_user: UserSamples = {}
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            users = {user: content["user_data"].get(user) for user in content["users"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            kind = type(error).__name__
            problem = f"{file.name} is no file of LEAF ({kind}: {first_line(error)})"
            raise BadInput("data.root", root, problem) from error
        for user, content_of_user in users.items():
            samples = content_of_user if isinstance(content_of_user, dict) else {}
            x: Any = samples.get("x")
            y: Any = samples.get("y")
            are_lists = isinstance(x, list) and isinstance(y, list)
            problem = f"{file.name}: the user {user!r} must have lists x and y of one length"
            check("data.root", root, are_lists and len(x) == len(y), problem)
            like = x[0] if like is None and x else like
            wrong = _wrong(str(user), x, y, like)
            check("data.root", root, wrong is None, f"{file.name}: {wrong}")
            all_x, all_y = by_user.setdefault(composed(str(user)), ([], []))
            all_x.extend(x)
            all_y.extend(y)
    check("data.root", root, bool(by_user), f"the files in {folder.name}/ name no user")
    has_samples = any(x for x, _ in by_user.values())
    check("data.root", root, has_samples, f"no user in the files of {folder.name}/ has a sample")
    return by_user


def _wrong(
    user: str,
    x: list[Any],
    y: list[Any],
    like: Any,
) -> str | None:
    """Describe the first malformed sample of a user; None if there is none."""
    texts = isinstance(like, str)
    width = len(like) or 1 if isinstance(like, list) else 1
    requirement = (
        "be a text, y the next character" if texts else f"hold {width} numbers, y a class from 0"
    )
    for k, (sample, label) in enumerate(zip(x, y, strict=True), 1):
        if texts:
            valid = isinstance(sample, str) and isinstance(label, str)
        else:
            valid = _is_numbers(sample, width) and type(label) is int and label >= 0
        if not valid:
            return f"sample {k} of user {user!r}: x must {requirement}; y is {label!r}"
    return None


def _is_numbers(sample: Any, width: int) -> bool:
    try:
        numbers = np.asarray(sample)
    except ValueError:  # lists of several lengths
        return False
    return (
        numbers.shape == (width,)
        and numbers.dtype.kind in "biuf"
        and bool((np.abs(numbers) < FLOAT32).all())
    )

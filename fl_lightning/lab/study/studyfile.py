"""Reads study files, from the user or from the package, and follows their key `like`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_lightning.configuration import files
from fl_lightning.configuration.config import check


def read(
    name: str,
    beside: Path = Path(),
    visited: tuple[Path, ...] = (),
) -> Any:
    """Read a study file for `Study.of`; configs in its base that lie beside it get absolute paths.

    A study with the key `like` takes the keys of another. Its `base` is appended to the other's,
    its `paper` is merged into the other's key by key, and any other key replaces the other's.

    Args:
        name: a file, or a name of `fl-train list studies`.
        beside: folder in which a relative path is looked up.
        visited: studies whose `like` led here.

    Raises:
        BadInput: there is no such study, it cannot be read, or its `like` leads back to itself.
    """
    file, content = files.read("studies", "study", name, beside)
    path = file.resolve()
    check("like", name, path not in visited, "its `like` leads back to the study itself: remove it")
    if not isinstance(content, dict):
        return content
    base = content.get("base")
    if base is not None:
        parts = base if isinstance(base, list) else [base]
        content["base"] = [_with_folder(part, file.parent) for part in parts]
    if "like" not in content:
        return content
    like = content.pop("like")
    check(
        "like",
        like,
        isinstance(like, str),
        "it must be a study's name or file",
    )
    liked = read(like, file.parent, (*visited, path))
    if not isinstance(liked, dict):
        return liked
    study = {**liked, **content}
    base, over = liked.get("base") or [], content.get("base") or []
    study["base"] = [*base, *over]
    paper, printed = content.get("paper"), liked.get("paper")
    if isinstance(paper, dict) and isinstance(printed, dict):
        study["paper"] = printed | paper
    return study


def _with_folder(part: Any, folder: Path) -> Any:
    """The absolute path if `part` is a config file in `folder`, else `part`."""
    is_file = isinstance(part, str) and (folder / part).is_file()
    return str(folder / part) if is_file else part

"""A study by its file, or by the name of one that ships with the package, with what it takes from
another (`like`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_lightning.configuration import files
from fl_lightning.configuration.config import check


def read(
    name: str,
    beside: Path = Path(),
    like_it: tuple[Path, ...] = (),
) -> Any:
    """The content of a study, for `Study.of`; files that its base names are whole paths.

    A study that is `like` another takes all its keys; what it says of `base` comes behind the
    other's, of `paper` key by key over the other's, and of any other key in its place.

    Args:
        name: a file, or a name of `fl-train list studies`.
        beside: folder where a file is looked for.
        like_it: the studies that are like this one.

    Raises:
        BadInput: there is no such study, it cannot be read, or it is like itself.
    """
    file, content = files.read("studies", "study", name, beside)
    path = file.resolve()
    check("like", name, path not in like_it, "the study is like itself")
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
    liked = read(like, file.parent, (*like_it, path))
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
    """A config that lies beside the study by its whole path; anything else as it is."""
    is_file = isinstance(part, str) and (folder / part).is_file()
    return str(folder / part) if is_file else part

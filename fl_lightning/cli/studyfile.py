"""A study by its file, or by the name of one that ships with the package, with what it takes from another (`like`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_lightning import catalogue
from fl_lightning.cli.yamltext import parse
from fl_lightning.errors import BadInput


def read(name: str, beside: Path = Path(), taken: tuple[Path, ...] = ()) -> Any:
    """The content of a study, for `Study.of`; files that its base names are whole paths.

    A study that is `like` another takes all its keys; what it says of `base` comes behind the other's, of `paper` key
    by key over the other's, and of any other key in its place.

    Args:
        name: a file, or a name of `fl-train list studies`.
        beside: folder where a file is looked for.
        taken: the studies that are like this one.

    Raises:
        BadInput: there is no such study, it cannot be read, or it is like itself.
    """
    file = beside / name if (beside / name).is_file() else catalogue.shipped_study(name)
    if file is None:
        shipped = list(catalogue.table("studies"))
        near = catalogue.did_you_mean(name.removesuffix(".yaml"), shipped)
        raise BadInput("study", name, f"no such file{near}; studies that ship with the package: fl-train list studies")
    if file in taken:
        raise BadInput("like", name, "the study is like itself")
    content = _content(file)
    if not isinstance(content, dict):
        return content
    if content.get("base") is not None:
        given = content["base"]
        content["base"] = [_whole(part, file.parent) for part in (given if isinstance(given, list) else [given])]
    if "like" not in content:
        return content
    other = read(_name(content.pop("like")), file.parent, (*taken, file))
    if not isinstance(other, dict):
        return other
    if isinstance(other.get("paper"), dict) and isinstance(content.get("paper"), dict):
        content["paper"] = {**other["paper"], **content["paper"]}
    return {**other, **content, "base": [*(other.get("base") or []), *(content.get("base") or [])]}


def _name(given: Any) -> str:
    if not isinstance(given, str):
        raise BadInput("like", given, "it must be a study's name or file")
    return given


def _whole(part: Any, folder: Path) -> Any:
    """A config that lies beside the study by its whole path; anything else as it is."""
    return str(folder / part) if isinstance(part, str) and (folder / part).is_file() else part


def _content(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput("study", str(file), f"it cannot be read: {reason}") from None
    return parse("study", str(file), text)

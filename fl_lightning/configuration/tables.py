"""The user's own table as cells by column, and what is wrong with it. Torch is not imported."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from fl_lightning.configuration.config import FLOAT32, DataConfig, check
from fl_lightning.configuration.files import Layer, update
from fl_lightning.configuration.keys import run_values
from fl_lightning.foundation.cells import SEPARATORS, is_empty, number
from fl_lightning.foundation.errors import BadInput, first_line
from fl_lightning.foundation.extras import hint_if_missing
from fl_lightning.foundation.files import write_whole
from fl_lightning.foundation.named import composed

LAYOUT = "a CSV file with a line of column names, then a sample a line"
SUFFIXES = (".csv", ".tsv", ".xlsx")
"""Files that are tables whatever `data.source` says."""
PANDAS = {".parquet": ("read_parquet", "pyarrow"), ".xlsx": ("read_excel", "openpyxl")}
"""Tables that are no text: the function of pandas that reads each, and the package that it uses."""
TEXT = ("separator", "decimal", "encoding")
"""Keys of `data` on how a text file is written."""
FORM = (*TEXT, "dates", "date_format", "day_zero")
"""Keys of `data` on how a table is written."""
COLUMNS = ("label_column", "group_column", "unit_column", "columns", "one_hot", "dates")
"""Keys of `data` that name columns."""
FIRST = 10
"""Rows that are looked at before torch is imported. Ours: enough to see what a column holds."""
INDEX = re.compile("|__index_level_[0-9]+__|Unnamed: 0")
"""Columns that pandas makes of a table's index: the order of the rows, which may give classes
away."""
DECIMAL = {
    ".": re.compile(r"[-+]?\d*,\d+"),
    ",": re.compile(r"[-+]?\d*\.\d+"),
}
"""Numbers that are written with the other decimal mark, by `data.decimal`."""
DATE = re.compile(r"(\d{4}|\d{1,2})([-./])\d{1,2}\2(\d{4}|\d{1,2})([ T].*)?")


class Absent(BadInput):
    """The data are not there (a smoke run may then make some up)."""


def at_root(
    data: DataConfig, layout: str, is_there: Callable[[Path], bool] = Path.is_dir
) -> tuple[str, Path]:
    """Return `data.root` as text and as a path; raise `Absent`, with the `layout`, where it is not
    there (`is_there`: a folder)."""
    root = data.root
    path = Path(data.root or "").expanduser()
    if root is None or not is_there(path):
        raise Absent("data.root", root, f"the source {data.source} wants {layout}")
    return root, path


def spelled(data: DataConfig) -> DataConfig:
    """Return `data` with names of columns as `read` spells them (Unicode NFC)."""
    names: dict[str, Any] = {}
    for key in COLUMNS:
        value = getattr(data, key)
        if isinstance(value, list):
            names[key] = [composed(name) for name in value]
        elif value is not None:
            names[key] = composed(value)
    return replace(data, **names)


def form_of(data: DataConfig) -> dict[str, Any]:
    """Return the keys of how the table is written, as `cells.number` takes them."""
    return {key: getattr(data, key) for key in FORM} | {"dates": data.dates or []}


def check_first_rows(layers: Sequence[Layer]) -> None:
    """Raise `BadInput` for a table that a run with these settings could not read: by its columns
    and first rows, before torch is imported."""
    plain: Layer = {"data": {}}
    for layer in layers:
        update(plain, {key: layer[key] for key in ("data", "smoke") if key in layer})
    values = run_values(plain)
    data = spelled(DataConfig(**values.data.as_dict()))
    suffix = Path(data.root or "").suffix.lower()
    may_be_table = data.source in ("table", DataConfig.source) and suffix in SUFFIXES
    is_table = data.source == "table" or may_be_table
    if values.smoke or data.root is None or not is_table:
        return
    data = replace(data, source="table")
    data.check_dates()
    cells = read(data, FIRST)
    label, _, features = columns_of(data, [*cells])
    if len(features) > 1:  # one alone may hold texts, or names of images
        for name in features:
            if name not in (data.one_hot or []):
                numbers(data, name, cells[name])
    if data.task == "regression":
        numbers(data, label, cells[label])


def read(data: DataConfig, most: int | None = None) -> dict[str, list[str]]:
    """Read the cells of the table `data.root` by column, of its first `most` rows.

    Raises:
        BadInput: no such file (then `Absent`), or one that is no table as the keys say.
    """
    root, path = at_root(data, f"the path of {LAYOUT}", Path.is_file)
    is_text = path.suffix.lower() not in PANDAS
    end = None if most is None else most + 1
    try:
        text = _decoded(data, path) if is_text else _binary_as_csv(data, path)
        separator = SEPARATORS[data.separator] if is_text else ","
        rows = csv.reader(
            io.StringIO(text, newline=""),
            delimiter=separator,
            strict=True,
        )
        stripped = ([cell.strip() for cell in row] for row in rows if row)
        head, *samples = islice(stripped, end)
    except (csv.Error, OSError, ValueError) as error:  # no line at all
        reason = first_line(error)
        raise BadInput("data.root", root, f"it must be {LAYOUT} ({reason})") from error
    head = [composed(name) for name in head]
    for name, count in Counter(head).items():
        check("data.root", root, count == 1, f"two of its columns are called {name!r}")
    check("data.root", root, bool(samples), f"it must be {LAYOUT}, but holds no sample")
    for place, row in enumerate(samples, 1):
        requirement = f"sample {place} has {len(row)} cells for {len(head)} columns"
        check("data.root", root, len(row) == len(head), requirement)
    return dict(
        zip(
            head,
            map(list, zip(*samples, strict=True)),
            strict=True,
        )
    )


def _decoded(data: DataConfig, path: Path) -> str:
    """Return the text of a file; `BadInput` for a wrong `data.encoding` or `data.separator`."""
    content = path.read_bytes()
    likely = _likely_encoding(content)
    try:
        codec = codecs.lookup(data.encoding).name.removesuffix("-sig")
        text = content.decode("utf-8-sig" if codec == "utf-8" else codec)
    except (LookupError, UnicodeError) as error:
        wrong = "the file is not written in it"
        if isinstance(error, LookupError):
            wrong = "there is no such encoding"
        problem = f"{wrong}; {data.root} looks like {likely}: set data.encoding {likely}"
        raise BadInput("data.encoding", data.encoding, problem) from None
    is_other = likely != codec and likely in ("utf-8", "utf-16") and not content.isascii()
    requirement = f"{data.root} is written in {likely}: set data.encoding {likely}"
    check("data.encoding", data.encoding, not is_other and "\0" not in text, requirement)
    first_line = text.partition("\n")[0]
    best = max(SEPARATORS, key=lambda name: first_line.count(SEPARATORS[name]))
    is_parted = SEPARATORS[data.separator] in first_line or SEPARATORS[best] not in first_line
    requirement = f"the first line of {data.root} has none: set data.separator {best!r}"
    check("data.separator", data.separator, is_parted, requirement)
    return text


def _likely_encoding(content: bytes) -> str:
    """Guess the encoding of a file."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" in content:
        return "utf-16-le" if content[1:2] == b"\0" else "utf-16-be"
    for encoding in ("utf-8", "cp1252"):
        try:
            content.decode(encoding)
        except UnicodeError:
            continue
        has_quotes = any(0x80 <= byte < 0xA0 for byte in content)
        return "latin-1" if encoding == "cp1252" and not has_quotes else encoding
    return "latin-1"


def _binary_as_csv(data: DataConfig, path: Path) -> str:
    """Read a table that is no text; return it as CSV."""
    function, engine = PANDAS[path.suffix.lower()]
    absent = hint_if_missing("pandas") or hint_if_missing(engine)
    check("data.root", data.root, not absent, absent)
    for key in TEXT:
        value = getattr(data, key)
        is_default = value == DataConfig.__dataclass_fields__[key].default
        requirement = f"it belongs to tables that are text, not to {path.suffix}: leave it out"
        check(f"data.{key}", value, is_default, requirement)
    import pandas

    is_sheet = function == "read_excel"
    options = {"header": None, "dtype": object} if is_sheet else {}  # pandas would rename columns
    try:
        frame = getattr(pandas, function)(path, **options)
    except Exception as error:  # the engines raise a dozen kinds
        problem = f"it cannot be read: {first_line(error)}"
        raise BadInput("data.root", data.root, problem) from None
    return as_csv(frame, header=not is_sheet)


def keep(
    frame: Any,
    folder: Path,
    names: Mapping[str, str | None],
) -> Layer:
    """Write a DataFrame to a folder in `folder` that is named by its content; return settings.

    Args:
        frame: the table.
        folder: where the data of scripts are kept.
        names: columns by what they are: label, group, unit.

    Returns:
        The settings that a run with it begins with; its groups make the natural partition.
    """
    levels = frame.columns.nlevels
    check("data", "DataFrame", levels == 1, f"its columns have {levels} levels, not one name each")
    text = as_csv(frame)
    file = folder / hashlib.sha256(text.encode()).hexdigest()[:16] / "given.csv"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    data: Layer = {key: DataConfig.__dataclass_fields__[key].default for key in TEXT}
    data |= {"source": "table", "root": str(file)}
    data |= {f"{key}_column": name for key, name in names.items() if name is not None}
    layer: Layer = {"data": data}
    group = names.get("group")
    cells = [] if group is None else read(DataConfig(**data)).get(composed(group), [])
    if cells:
        data["partition"] = "natural"
        layer["federation"] = {"clients": len(set(map(composed, cells)))}
    return layer


def as_csv(frame: Any, header: bool = True) -> str:
    """Return a DataFrame as CSV; levels of its index that have names are columns."""
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    text: str = frame.to_csv(index=False, header=header)
    return text


def columns_of(data: DataConfig, head: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """Return the columns of label, group and features (`data.unit_column` is none) of a table with
    the column names `head`; `BadInput` for one that is not there."""
    shown = ", ".join(head[:10]) + (", ..." if len(head) > 10 else "")
    label = data.label_column
    group = data.group_column
    unit = data.unit_column
    names = [("label_column", label), ("group_column", group), ("unit_column", unit)]
    names += [("columns", name) for name in data.columns or []]
    requirement = f"there is no such column; columns: {shown}"
    for key, name in names:
        check(f"data.{key}", name, name is None or name in head, requirement)
    features = data.columns
    if features is None:
        features = [name for name in head if name not in (label, group, unit)]
        for name in features:
            requirement = (
                f"its column {name!r} is an index that pandas wrote: name in data.columns those "
                f"that are features; columns: {shown}"
            )
            check("data.root", data.root, not INDEX.fullmatch(name), requirement)
    requirement = (
        "data.columns or data.label_column names it, too; it is no feature: leave it out there"
    )
    check(
        "data.unit_column",
        unit,
        unit is None or unit not in (label, *features),
        requirement,
    )
    requirement = "it must name columns of features beside the label's"
    check("data.columns", features, bool(features) and label not in features, requirement)
    requirement = "it must name columns of features (data.columns)"
    for key in ("one_hot", "dates"):
        for name in getattr(data, key) or []:
            check(f"data.{key}", name, name in features, requirement)
    return label, group, features


def numbers(
    data: DataConfig,
    column: str,
    cells: Sequence[str],
) -> list[float]:
    """Read the numbers of a column; NaN in an empty cell, where `data.impute` fills it.

    Raises:
        BadInput: a cell holds something else; the line names the key that reads it.
    """
    form = form_of(data)
    is_date = column in form["dates"]
    values = []
    for sample, cell in enumerate(cells, 1):
        try:
            value = number(column, cell, form)
        except ValueError:
            value = FLOAT32  # no number: refused below as one that is too large
        may_be_empty = is_empty(cell) and data.impute is not None
        if not abs(value) < FLOAT32 and not may_be_empty:
            kind = "not a date" if is_date else "not a number (of 32 bits)"
            problem = f"column {column!r} of sample {sample} holds {cell!r}, which is {kind}"
            remedy = _remedy(column, cell, form)
            raise BadInput("data.root", data.root, f"{problem}; {remedy}")
        values.append(value)
    return values


def _remedy(
    column: str,
    cell: str,
    form: Mapping[str, Any],
) -> str:
    """Say how a cell that is no number can be read."""
    if is_empty(cell):
        return "data.impute fills it"
    if column in form["dates"]:
        date_format = form["date_format"] or "2024-12-31"
        return f"dates are written like {date_format}: set data.date_format, as '%d.%m.%Y'"
    if DATE.fullmatch(cell):
        format_key = "" if re.match(r"\d{4}-\d\d-\d\d", cell) else " and data.date_format"
        return f"data.dates '[{column}]'{format_key} makes days since data.day_zero of it"
    if DECIMAL[form["decimal"]].fullmatch(cell):
        other_mark = "." if form["decimal"] == "," else ","
        return f"data.decimal {other_mark!r} reads it"
    return "leave it out with data.columns, or list it in data.one_hot"

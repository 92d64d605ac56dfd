"""Reads the user's own table into cells by column, and refuses a wrong one in one line. Torch is
not imported."""

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
"""Binary tables by suffix: the function of pandas that reads them, and the package that it
needs."""
TEXT = ("separator", "decimal", "encoding")
"""Keys of `data` for the format of a text file."""
FORM = (*TEXT, "dates", "date_format", "day_zero")
"""Keys of `data` for the format of a table: of its file, numbers and dates."""
COLUMNS = ("label_column", "group_column", "unit_column", "columns", "one_hot", "dates")
"""Keys of `data` that name columns."""
FIRST = 10
"""Rows that are checked before torch is imported. Our choice: enough to see a column's type."""
INDEX = re.compile("|__index_level_[0-9]+__|Unnamed: 0")
"""Names of columns that pandas makes of a table's index. It holds the order of the rows, from which
a model may learn the classes."""
DECIMAL = {
    ".": re.compile(r"[-+]?\d*,\d+"),
    ",": re.compile(r"[-+]?\d*\.\d+"),
}
"""By `data.decimal`: numbers written with the other decimal mark."""
DATE = re.compile(r"(\d{4}|\d{1,2})([-./])\d{1,2}\2(\d{4}|\d{1,2})([ T].*)?")


class Absent(BadInput):
    """The data do not exist. `--smoke` and `plan` then use synthetic data."""


def at_root(
    data: DataConfig, layout: str, is_there: Callable[[Path], bool] = Path.is_dir
) -> tuple[str, Path]:
    """Return `data.root` as text and as a path.

    Args:
        data: the configuration's data section.
        layout: what the source needs there, in words for the error.
        is_there: the check of the path; the default wants a folder.

    Raises:
        Absent: `data.root` is null, or the check fails.
    """
    root = data.root
    path = Path(data.root or "").expanduser()
    if root is None or not is_there(path):
        raise Absent("data.root", root, f"the source {data.source} needs {layout}")
    return root, path


def spelled(data: DataConfig) -> DataConfig:
    """Return `data` with the names of columns in composed Unicode (NFC), as `read` returns them."""
    names: dict[str, Any] = {}
    for key in COLUMNS:
        value = getattr(data, key)
        if isinstance(value, list):
            names[key] = [composed(name) for name in value]
        elif value is not None:
            names[key] = composed(value)
    return replace(data, **names)


def form_of(data: DataConfig) -> dict[str, Any]:
    """Return the keys `FORM` with their values, as `cells.number` takes them."""
    return {key: getattr(data, key) for key in FORM} | {"dates": data.dates or []}


def check_first_rows(layers: Sequence[Layer]) -> None:
    """Raise `BadInput` if a run with these settings could not read its table. Checks the columns
    and the first rows, before torch is imported; does nothing for other data."""
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
    if len(features) > 1:  # a single column may contain texts, or names of images
        for name in features:
            if name not in (data.one_hot or []):
                numbers(data, name, cells[name])
    if data.task == "regression":
        numbers(data, label, cells[label])


def read(data: DataConfig, most: int | None = None) -> dict[str, list[str]]:
    """Return the cells of the table `data.root` by column.

    Args:
        data: the configuration's data section.
        most: maximum number of rows, from the first; None: all.

    Raises:
        Absent: there is no such file.
        BadInput: the file is not a table in the format that the keys of `data` describe.
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
    except (csv.Error, OSError, ValueError) as error:  # ValueError: there is no line at all
        reason = first_line(error)
        raise BadInput("data.root", root, f"it must be {LAYOUT} ({reason})") from error
    head = [composed(name) for name in head]
    for name, count in Counter(head).items():
        requirement = f"it has {count} columns called {name!r}: rename all but one"
        check("data.root", root, count == 1, requirement)
    check("data.root", root, bool(samples), "it has column names, but no sample: add rows")
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
    """Return the text of a file.

    Raises:
        BadInput: `data.encoding` or `data.separator` is wrong for it.
    """
    content = path.read_bytes()
    likely = _likely_encoding(content)
    try:
        codec = codecs.lookup(data.encoding).name.removesuffix("-sig")
        text = content.decode("utf-8-sig" if codec == "utf-8" else codec)
    except (LookupError, UnicodeError) as error:
        wrong = "the file does not have this encoding"
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
    requirement = f"the first line of {data.root} lacks it: set data.separator {best!r}"
    check("data.separator", data.separator, is_parted, requirement)
    return text


def _likely_encoding(content: bytes) -> str:
    """Return a guess of a file's encoding."""
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
    """Return a binary table as the text of a CSV file."""
    function, engine = PANDAS[path.suffix.lower()]
    absent = hint_if_missing("pandas") or hint_if_missing(engine)
    check("data.root", data.root, not absent, absent)
    for key in TEXT:
        value = getattr(data, key)
        is_default = value == DataConfig.__dataclass_fields__[key].default
        requirement = f"it is for text files, not for {path.suffix}: leave it out"
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


def keep_frame(
    frame: Any,
    folder: Path,
    names: Mapping[str, str | None],
) -> Layer:
    """Write a DataFrame to a CSV file, in a subfolder named by a hash of its content.

    Args:
        frame: the table.
        folder: the folder for data that scripts pass as objects.
        names: the columns of `label`, `group` and `unit`, by these words; None: no such column.

    Returns:
        The settings with which a run reads the file; if it has groups, each becomes a client.
    """
    levels = frame.columns.nlevels
    requirement = f"its columns have {levels} levels: give each column one name"
    check("data", "DataFrame", levels == 1, requirement)
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
    """Return a DataFrame as the text of a CSV file. Named levels of its index become columns,
    others are dropped."""
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    text: str = frame.to_csv(index=False, header=header)
    return text


def columns_of(data: DataConfig, head: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """Return the names of the label's, the group's and the feature columns of a table with the
    column names `head`. The column `data.unit_column` is not a feature.

    Raises:
        BadInput: a column that a key names does not exist, or is used in a wrong way.
    """
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
                f"its column {name!r} is a row index that pandas wrote: list the feature columns "
                f"in data.columns; columns: {shown}"
            )
            check("data.root", data.root, not INDEX.fullmatch(name), requirement)
    requirement = (
        "it cannot be a feature or the label: leave it out of data.columns and data.label_column"
    )
    check(
        "data.unit_column",
        unit,
        unit is None or unit not in (label, *features),
        requirement,
    )
    requirement = "it must list at least one column of features, and not the label's"
    check("data.columns", features, bool(features) and label not in features, requirement)
    requirement = "it must list feature columns only (data.columns)"
    for key in ("one_hot", "dates"):
        for name in getattr(data, key) or []:
            check(f"data.{key}", name, name in features, requirement)
    return label, group, features


def numbers(
    data: DataConfig,
    column: str,
    cells: Sequence[str],
) -> list[float]:
    """Return the numbers in the cells of a column; NaN for an empty cell that `data.impute` will
    fill.

    Raises:
        BadInput: a cell is not a number or a date; the message names the key that can help.
    """
    form = form_of(data)
    is_date = column in form["dates"]
    values = []
    for sample, cell in enumerate(cells, 1):
        try:
            value = number(column, cell, form)
        except ValueError:
            value = FLOAT32  # not a number: refused below like one that is too large
        may_be_empty = is_empty(cell) and data.impute is not None
        if not abs(value) < FLOAT32 and not may_be_empty:
            kind = "not a date" if is_date else "not a number (float32)"
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
    """Return what the user can do about a cell that is not a number."""
    if is_empty(cell):
        return "set data.impute to fill it"
    if column in form["dates"]:
        date_format = form["date_format"] or "2024-12-31"
        return f"data.date_format expects {date_format}: set it to the file's format, as '%d.%m.%Y'"
    if DATE.fullmatch(cell):
        format_key = "" if re.match(r"\d{4}-\d\d-\d\d", cell) else " and data.date_format"
        return f"set data.dates '[{column}]'{format_key} to read it as a date"
    if DECIMAL[form["decimal"]].fullmatch(cell):
        other_mark = "." if form["decimal"] == "," else ","
        return f"set data.decimal {other_mark!r}"
    return "leave the column out of data.columns, or list it in data.one_hot"

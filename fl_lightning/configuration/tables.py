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
from fl_lightning.configuration.keys import run_parser, typed
from fl_lightning.foundation.cells import SEPARATORS, is_empty, number
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.extras import missing
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
DECIMAL = {".": re.compile(r"[-+]?\d*,\d+"), ",": re.compile(r"[-+]?\d*\.\d+")}
"""Numbers that are written with the other decimal mark, by `data.decimal`."""
DATE = re.compile(r"(\d{4}|\d{1,2})([-./])\d{1,2}\2(\d{4}|\d{1,2})([ T].*)?")


class Absent(BadInput):
    """The data are not there (a smoke run may then make some up)."""


def at_root(
    data: DataConfig, layout: str, there: Callable[[Path], bool] = Path.is_dir
) -> tuple[str, Path]:
    """`data.root` as it was given and as a path; `Absent` where that is not `there` (a folder),
    with the `layout`."""
    root = data.root
    path = Path(data.root or "").expanduser()
    if root is None or not there(path):
        raise Absent("data.root", root, f"the source {data.source} wants {layout}")
    return root, path


def spelled(data: DataConfig) -> DataConfig:
    """`data` with names of columns in the spelling that `read` gives them."""
    spelling: dict[str, Any] = {}
    for key in COLUMNS:
        name = getattr(data, key)
        if isinstance(name, list):
            spelling[key] = [composed(one) for one in name]
        elif name is not None:
            spelling[key] = composed(name)
    return replace(data, **spelling)


def form_of(data: DataConfig) -> dict[str, Any]:
    """How the table is written, as `cells.number` takes it."""
    return {key: getattr(data, key) for key in FORM} | {"dates": data.dates or []}


def check_first_rows(layers: Sequence[Layer]) -> None:
    """Raise `BadInput` for a table that a run with these settings could not read: by its columns
    and first rows, before torch is imported."""
    plain: Layer = {"data": {}}
    for layer in layers:
        update(plain, {key: layer[key] for key in ("data", "smoke") if key in layer})
    values = typed(run_parser(), plain)
    data = spelled(DataConfig(**values.data.as_dict()))
    suffix = Path(data.root or "").suffix.lower()
    may_be_table = data.source in ("table", DataConfig.source) and suffix in SUFFIXES
    is_table = data.source == "table" or may_be_table
    if values.smoke or data.root is None or not is_table:
        return
    data = replace(data, source="table")
    data.check_dates()
    cells = read(data, FIRST)
    label, _, columns = columns_of(data, [*cells])
    words = set(data.one_hot or [])
    for name in columns if len(columns) > 1 else ():  # one alone may hold texts, or names of images
        if name not in words:
            numbers(data, name, cells[name])
    if data.task == "regression":
        numbers(data, label, cells[label])


def read(data: DataConfig, most: int | None = None) -> dict[str, list[str]]:
    """The cells of the table `data.root` by column, of its first `most` rows.

    Raises:
        BadInput: no such file (then `Absent`), or one that is no table as the keys say.
    """
    root, path = at_root(data, f"the path of {LAYOUT}", Path.is_file)
    is_text = path.suffix.lower() not in PANDAS
    try:
        text = _decoded(data, path) if is_text else _written(data, path)
        separator = SEPARATORS[data.separator] if is_text else ","
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        filled = ([cell.strip() for cell in row] for row in rows if row)
        head, *lines = islice(filled, None if most is None else most + 1)
    except (csv.Error, OSError, ValueError) as error:  # no line at all
        raise BadInput(
            "data.root", root, f"it must be {LAYOUT} ({str(error).splitlines()[0]})"
        ) from error
    head = [composed(name) for name in head]
    twice = [name for name, count in Counter(head).items() if count > 1]
    if twice:
        raise BadInput("data.root", root, f"two of its columns are called {twice[0]!r}")
    check("data.root", root, bool(lines), f"it must be {LAYOUT}, but holds no sample")
    for place, row in enumerate(lines, 1):
        check(
            "data.root",
            root,
            len(row) == len(head),
            f"sample {place} has {len(row)} cells for {len(head)} columns",
        )
    return dict(zip(head, map(list, zip(*lines, strict=True)), strict=True))


def _decoded(data: DataConfig, path: Path) -> str:
    """The text of a file, with its lines parted as `data.separator` says."""
    content = path.read_bytes()
    likely = _likely_encoding(content)
    try:
        codec = codecs.lookup(data.encoding).name.removesuffix("-sig")
        text = content.decode("utf-8-sig" if codec == "utf-8" else codec)
    except (LookupError, UnicodeError) as error:
        wrong = "there is no such encoding" if isinstance(error, LookupError) else "it is not"
        allowed = f"{wrong} that of {data.root}, which looks like {likely}: data.encoding {likely}"
        raise BadInput("data.encoding", data.encoding, allowed) from None
    is_other = likely != codec and likely in ("utf-8", "utf-16") and not content.isascii()
    allowed = f"{data.root} is written in {likely}: data.encoding {likely}"
    check("data.encoding", data.encoding, not is_other and "\0" not in text, allowed)
    first = text.partition("\n")[0]
    best = max(SEPARATORS, key=lambda name: first.count(SEPARATORS[name]))
    parted = SEPARATORS[data.separator] in first or SEPARATORS[best] not in first
    allowed = f"the first line of {data.root} has none: data.separator {best!r}"
    check("data.separator", data.separator, parted, allowed)
    return text


def _likely_encoding(content: bytes) -> str:
    """What a file seems to be written in."""
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


def _written(data: DataConfig, path: Path) -> str:
    """A table that is no text, as CSV."""
    function, engine = PANDAS[path.suffix.lower()]
    absent = missing("pandas") or missing(engine)
    check("data.root", data.root, not absent, absent)
    for key in TEXT:
        default = DataConfig.__dataclass_fields__[key].default
        is_default = getattr(data, key) == default
        allowed = f"it belongs to tables that are text, not to {path.suffix}: leave it out"
        check(f"data.{key}", getattr(data, key), is_default, allowed)
    import pandas

    is_sheet = function == "read_excel"
    options = {"header": None, "dtype": object} if is_sheet else {}  # pandas would rename columns
    try:
        frame = getattr(pandas, function)(path, **options)
    except Exception as error:  # the engines raise a dozen kinds
        line = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput("data.root", data.root, f"it cannot be read: {line}") from None
    return as_csv(frame, header=not is_sheet)


def keep(frame: Any, folder: Path, names: Mapping[str, str | None]) -> Layer:
    """Write a DataFrame to a folder in `folder` that is named by its content.

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
    place = folder / hashlib.sha256(text.encode()).hexdigest()[:16] / "given.csv"
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, text)
    data: Layer = {key: DataConfig.__dataclass_fields__[key].default for key in TEXT}
    data |= {"source": "table", "root": str(place)}
    data |= {f"{key}_column": name for key, name in names.items() if name is not None}
    layer: Layer = {"data": data}
    group = names.get("group")
    cells = [] if group is None else read(DataConfig(**data)).get(composed(group), [])
    if cells:
        data["partition"] = "natural"
        layer["federation"] = {"clients": len({composed(cell) for cell in cells})}
    return layer


def as_csv(frame: Any, header: bool = True) -> str:
    """A DataFrame as CSV; levels of its index that have names are columns."""
    is_named = any(name is not None for name in frame.index.names)
    text: str = (frame.reset_index() if is_named else frame).to_csv(index=False, header=header)
    return text


def columns_of(data: DataConfig, head: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """The columns of label, group and features (none is `data.unit_column`) among those of a table,
    `head`; `BadInput` for one that is not there."""
    shown = ", ".join(head[:10]) + (", ..." if len(head) > 10 else "")
    label = data.label_column
    group = data.group_column
    named = [
        ("label_column", label),
        ("group_column", group),
        ("unit_column", data.unit_column),
        *(("columns", name) for name in data.columns or []),
    ]
    for key, name in named:
        check(
            f"data.{key}",
            name,
            name is None or name in head,
            f"there is no such column; columns: {shown}",
        )
    columns = (
        [name for name in head if name not in (label, group, data.unit_column)]
        if data.columns is None
        else data.columns
    )
    if data.columns is None and (index := [name for name in columns if INDEX.fullmatch(name)]):
        problem = (
            f"its column {index[0]!r} is an index that pandas wrote: name in data.columns those "
            f"that are features"
        )
        raise BadInput("data.root", data.root, f"{problem}; columns: {shown}")
    unit = data.unit_column
    allowed = (
        "data.columns or data.label_column names it, too; it is no feature: leave it out there"
    )
    check("data.unit_column", unit, unit is None or unit not in (label, *columns), allowed)
    fine = bool(columns) and label not in columns
    check("data.columns", columns, fine, "it must name columns of features beside the label's")
    for key in ("one_hot", "dates"):
        for name in getattr(data, key) or []:
            allowed = "it must name columns of features (data.columns)"
            check(f"data.{key}", name, name in columns, allowed)
    return label, group, columns


def numbers(data: DataConfig, column: str, cells: Sequence[str]) -> list[float]:
    """The numbers in a column; NaN in an empty cell, where `data.impute` fills it.

    Raises:
        BadInput: a cell holds something else; it says which key reads it.
    """
    form = form_of(data)
    values = []
    for sample, cell in enumerate(cells, 1):
        try:
            value = number(column, cell, form)
        except ValueError:
            value = FLOAT32
        if not abs(value) < FLOAT32 and not (is_empty(cell) and data.impute is not None):
            kind = "not a date" if column in form["dates"] else "not a number (of 32 bits)"
            problem = f"column {column!r} of sample {sample} holds {cell!r}, which is {kind}"
            raise BadInput("data.root", data.root, f"{problem}; {_way(column, cell, form)}")
        values.append(value)
    return values


def _way(column: str, cell: str, form: Mapping[str, Any]) -> str:
    """What to do about a cell that is no number."""
    if is_empty(cell):
        return "data.impute fills it"
    if column in form["dates"]:
        wanted = form["date_format"] or "2024-12-31"
        return f"dates are written like {wanted}: set data.date_format, as '%d.%m.%Y'"
    if DATE.fullmatch(cell):
        has_format = "" if re.match(r"\d{4}-\d\d-\d\d", cell) else " and data.date_format"
        return f"data.dates '[{column}]'{has_format} makes days since data.day_zero of it"
    if DECIMAL[form["decimal"]].fullmatch(cell):
        return f"data.decimal {'.' if form['decimal'] == ',' else ','!r} reads it"
    return "leave it out with data.columns, or list it in data.one_hot"

"""Tables as other programs write them: separators, decimal marks, encodings, dates."""

import sys

import numpy as np
import pandas as pd
import pytest
from refusals import refuses

from fl_lightning.configuration.config import DataConfig
from fl_lightning.configuration.tables import check_first_rows
from fl_lightning.data import table
from fl_lightning.data.load import source_name
from fl_lightning.foundation.errors import BadInput

GERMAN = "Spital;Größe;Eintritt;krank\n" + "".join(
    f"{('Zürich', 'Bern')[k % 2]};{k},5;{1 + k}.02.2024;{('ja', 'nein')[k % 3 > 0]}\n"
    for k in range(20)
)
ENGLISH = GERMAN.replace(",", ".").replace(";", ",")
COLUMNS = {
    "label_column": "krank",
    "group_column": "Spital",
    "dates": ["Eintritt"],
    "date_format": "%d.%m.%Y",
    "day_zero": "2024-01-31",
}


def write(folder, content):
    (folder / "t.csv").write_bytes(content)
    return str(folder / "t.csv")


def features(source):
    every = np.concatenate([source.train.read_all(), source.test.read_all()])
    return sorted(every.tolist())


@pytest.mark.parametrize(
    "content, keys",
    [
        (GERMAN.encode("utf-8-sig"), {}),
        (GERMAN.encode("utf-16"), {"encoding": "utf-16"}),
        (GERMAN.encode("latin-1"), {"encoding": "latin-1"}),
        (GERMAN.replace("\n", "\r\n").encode("cp1252"), {"encoding": "cp1252"}),
        (
            GERMAN.replace(";", "\t").encode("utf-16-le"),
            {"encoding": "utf-16-le", "separator": "tab"},
        ),
        (ENGLISH.encode(), {"separator": ",", "decimal": "."}),
    ],
    ids=["bom", "utf-16", "latin-1", "windows", "tabs", "english"],
)
def test_one_table_in_many_forms(content, keys, tmp_path):
    form = {"separator": ";", "decimal": ",", **keys}
    source = table.load(DataConfig(root=write(tmp_path, content), **form, **COLUMNS))
    assert (source.group_names, source.class_names) == (["Bern", "Zürich"], ["ja", "nein"])
    assert features(source) == [[k + 0.5, k + 1] for k in range(20)]


@pytest.mark.parametrize(
    "content, keys, line",
    [
        (GERMAN.encode(), {"separator": ","}, r"data\.separator=','.*: set data\.separator ';'"),
        (
            GERMAN.replace(";", "\t").encode(),
            {},
            r"data\.separator=';'.*: set data\.separator 'tab'",
        ),
        (
            GERMAN.encode(),
            {"decimal": "."},
            r"column 'Größe' of sample 1 holds '0,5', .*data\.decimal ','",
        ),
        (ENGLISH.encode(), {"separator": ","}, r"holds '0\.5', .*data\.decimal '\.'"),
        (GERMAN.encode("latin-1"), {}, r"data\.encoding='utf-8'.*: set data\.encoding latin-1"),
        (GERMAN.replace("ü", "–").encode("cp1252"), {}, r"data\.encoding cp1252"),
        (GERMAN.encode("utf-16-le"), {}, r"data\.encoding utf-16-le"),
        (
            GERMAN.encode(),
            {"encoding": "latin-1"},
            r"data\.encoding='latin-1'.*: set data\.encoding utf-8",
        ),
        (GERMAN.encode(), {"encoding": "utf-9"}, r"data\.encoding='utf-9'.*no such encoding"),
        (
            GERMAN.encode(),
            {"dates": None},
            r"holds '1\.02\.2024', .*data\.dates '\[Eintritt\]' and data\.date_format",
        ),
        (GERMAN.encode(), {"date_format": None}, r"not a date; .*data\.date_format"),
        (
            GERMAN.encode(),
            {"dates": ["Austritt"]},
            r"data\.dates='Austritt'.*feature columns",
        ),
    ],
)
def test_one_line_names_the_key_and_its_value(content, keys, line, tmp_path):
    form = {"separator": ";", "decimal": ",", **COLUMNS, **keys}
    with refuses(line) as caught:
        table.load(DataConfig(root=write(tmp_path, content), **form))
    assert "\n" not in str(caught.value)


def test_dates_with_times_and_empty_cells(tmp_path):
    rows = (
        "day,a,label\n2000-01-02,1,0\n2000-01-03T12:00:00+02:00,2,1\n,3,0\n1999-12-31 06:00,4,1\n"
    )
    data = DataConfig(root=write(tmp_path, rows.encode()), dates=["day"], impute="mean")
    assert sorted(x for x, _ in features(table.load(data)) if x == x) == [-0.75, 1.0, 2.5]


def frame():
    return pd.DataFrame(
        {
            "site": ["a", "b"] * 10,
            "age": [None, *map(float, range(19))],
            "seen": pd.date_range("2000-01-02", periods=20),
            "ill": [k % 2 for k in range(20)],
        }
    )


KEYS = {
    "source": "table",
    "label_column": "ill",
    "group_column": "site",
    "dates": ["seen"],
    "impute": "mean",
}


@pytest.mark.parametrize("suffix", [".parquet", ".xlsx"])
def test_tables_that_are_no_text(suffix, tmp_path):
    pytest.importorskip({".parquet": "pyarrow", ".xlsx": "openpyxl"}[suffix])
    path = tmp_path / f"t{suffix}"
    if suffix == ".parquet":
        frame().to_parquet(path)
    else:
        frame().to_excel(path, index=False)
    data = DataConfig(root=str(path), **KEYS)
    assert source_name(data) == "table"
    source = table.load(data)
    assert source.group_names == ["a", "b"]
    assert [x for _, x in sorted(features(source), key=lambda x: x[1])] == list(range(1, 21))
    with refuses(r"data\.decimal=','.*leave it out"):
        table.load(DataConfig(root=str(path), decimal=",", **KEYS))


def test_a_missing_engine_is_named(tmp_path, monkeypatch):
    (tmp_path / "t.xlsx").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with refuses(r"data\.root=.*it needs openpyxl, .*install"):
        table.load(DataConfig(root=str(tmp_path / "t.xlsx")))


@pytest.mark.parametrize(
    "data, line",
    [
        ({"root": "none.csv"}, "data.root='none.csv'"),
        ({"label_column": "sick"}, "data.label_column='sick'"),
        ({"columns": ["Alter"]}, "data.columns='Alter'"),
        ({"separator": ","}, "data.separator ';'"),
        ({"decimal": "."}, "data.decimal ','"),
        ({"dates": None}, "data.dates '[Eintritt]'"),
    ],
)
def test_the_first_rows_are_looked_at(data, line, tmp_path):
    path = write(tmp_path, GERMAN.encode() + b"only;two\n")  # beyond the first rows
    every = {"root": path, "separator": ";", "decimal": ",", **COLUMNS}
    check_first_rows([{"data": every}])
    with pytest.raises(BadInput) as caught:
        check_first_rows([{"data": every}, {"data": data}])
    assert line in str(caught.value)
    check_first_rows([{"data": every}, {"data": data, "smoke": True}])

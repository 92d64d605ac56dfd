"""Clients that were held out, on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_lightning.lab.report import load, render, vector
from fl_lightning.lab.report.clients import table as by_client
from fl_lightning.lab.report.newcomers import curve, further, table
from fl_lightning.results.folder import RunFolder

from .conftest import MakeRun

SUMMARY = ', "held_out_clients": [3, 7], "newcomer_rule": "global model, then <local> training"'
ROWS = """client,samples_per_class,samples,test_samples,rule,accuracy_received,accuracy,loss
3,0,0,9,"global model, then <local> training",0.25,0.25,2.0
3,5,40,9,"global model, then <local> training",0.25,0.75,1.0
7,0,0,9,"global model, then <local> training",0.75,0.75,2.0
7,5,40,9,"global model, then <local> training",0.75,0.25,
"""


@pytest.fixture
def held(make_run: MakeRun) -> Path:
    """A run that held two clients out."""
    path = make_run("held", summary=SUMMARY)
    (path / "newcomers.csv").write_text(ROWS)
    return path


def test_the_curve_is_the_mean_over_unseen_clients(make_run: MakeRun, held: Path) -> None:
    runs = load([make_run("plain"), held])
    figure = curve(runs)["newcomers-curve"]
    [line] = figure["data"]
    assert (line["name"], line["x"], line["y"]) == ("held", ["0", "5"], [0.5, 0.5])
    assert line["error_y"]["array"] == [0.25, 0.25]
    assert table(runs).rows == [
        ["held out", "–", "3, 7"],
        ["a newcomer gets", "–", "global model, then <local> training"],
        ["0 labelled samples a class", "–", "50.00 %"],
        ["5 labelled samples a class", "–", "50.00 %"],
    ]


def test_a_newcomer_lends_its_name_to_no_client(held: Path) -> None:
    """Those that take part are numbered anew: number 3 is another client in each table."""
    folder = RunFolder(held)
    folder.names = names = ["Aarau", "Chur", "Davos", "Zug"]
    folder.write_split([5] * 4, [2] * 4, None)
    rows = (
        ROWS.replace("client,", "client,name,")
        .replace("\n3,", "\n3,Basel,")
        .replace("\n7,", "\n7,Uri,")
    )
    (held / "newcomers.csv").write_text(rows)
    (run,) = runs = load([held])
    assert run.client_names == dict(enumerate(names))
    assert [row[0] for row in by_client(runs).rows] == names
    assert table(runs).rows[0] == ["held out", "Basel, Uri"]


def test_newcomers_of_a_run_before_it_was_extended_are_not_its_results(make_run: MakeRun) -> None:
    path = make_run("held", asked=9, summary=SUMMARY + ', "made_up_data": true')
    (path / "newcomers.csv").write_text(ROWS)
    (run,) = load([path])
    assert run.newcomers.empty and run.final.empty
    assert (
        "final_mean_accuracy" not in run.summary
        and run.facts["made_up_data"]
        and run.judge == "after"
    )
    page = render([run])
    assert 'id="newcomers' not in page and "4, 2 of them held out" in page


def test_it_stands_on_the_page_where_there_is_one(make_run: MakeRun, held: Path) -> None:
    page = render(load([held]))
    assert "4, 2 of them held out" in page
    assert (
        'id="newcomers-curve"' in page
        and 'href="#newcomers"' in page
        and "then &lt;local&gt; training" in page
    )
    assert 'id="newcomers' not in render(load([make_run("plain")]))


def test_further_metrics_and_errors_of_regressions_stand_there_too(
    make_run: MakeRun, held: Path
) -> None:
    lines = ROWS.splitlines()
    rows = [
        f"{line},{cell}" for line, cell in zip(lines, ["f1", "", "0.5", "0.25", "1.0"], strict=True)
    ]
    (held / "newcomers.csv").write_text("\n".join(rows) + "\n")
    assert further(load([held])).rows == [
        ["macro F1, 0 labelled samples a class", "25.00 %"],
        ["macro F1, 5 labelled samples a class", "75.00 %"],
    ]
    assert "By further metrics (2)" in render(load([held])) and "further metrics" not in render(
        load([make_run("a")])
    )
    errors = make_run("errors", config={"data": {"task": "regression"}}, summary=SUMMARY)
    (errors / "newcomers.csv").write_text(
        "client,samples_per_class,rule,mae\n3,0,own,2.5\n3,5,own,1.25\n"
    )
    figure = curve(load([errors]))["newcomers-curve"]
    assert (figure["data"][0]["y"], figure["layout"]["xaxis"]["title"]["text"]) == (
        [2.5, 1.25],
        "labelled samples",
    )
    assert [row[0] for row in table(load([errors])).rows[2:]] == [
        "0 labelled samples",
        "5 labelled samples",
    ]
    assert (
        "of each class" not in (page := render(load([errors])))
        and "from few labelled samples or from none" in page
    )
    assert "mean absolute error" in figure["layout"]["yaxis"]["title"]["text"]


@pytest.mark.slow
def test_the_curve_is_a_file_for_a_paper_too(make_run: MakeRun, held: Path, tmp_path: Path) -> None:
    [file] = [
        f
        for f in vector.write(load([held]), tmp_path / "figures", "svg")
        if f.stem == "newcomers-curve"
    ]
    assert "labelled samples of each class" in file.read_text()


@pytest.mark.parametrize(
    "text", ["client,samples_per_class\n3,", "client,samples_per_class,accuracy\n3,x,1\n", "\xff"]
)
def test_a_damaged_table_costs_its_section_alone(held: Path, text: str) -> None:
    (held / "newcomers.csv").write_text(text, encoding="latin-1")
    runs = load([held])
    assert runs[0].newcomers.empty and 'id="newcomers-curve"' not in render(runs)

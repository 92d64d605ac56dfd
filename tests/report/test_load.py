import math
import shutil

import pytest
from refusals import refuses

from fl_lightning.lab.report.page import render
from fl_lightning.results.runs import load


def test_axes_add_up(make_run):
    (run,) = load([make_run(channel=True)])
    assert run.axis("round") == [1, 2, 3]
    assert run.axis("mib") == [8, 16, 24]  # 4 clients, 1 MiB up and 1 MiB down
    assert run.axis("channel") == [3, 6, 9]
    assert run.axis("wall") == [1.75, 3.5, 5.25]  # without scoring
    assert run.spent("wall") == 5.25


def test_an_axis_with_a_gap_is_none(make_run):
    path = make_run()
    text = (path / "metrics.csv").read_text()
    (path / "metrics.csv").write_text(text.replace(",2.0,1.5,", ",,1.5,", 1))
    (run,) = load([path])
    assert run.axis("wall") is None
    assert run.axis("mib") == [8, 16, 24]
    assert run.axis("channel") is None


def test_names_tell_runs_apart(make_run, tmp_path):
    paths = [make_run("x/run"), make_run("y/run"), make_run("other")]
    assert [run.name for run in load(paths)] == ["x/run", "y/run", "other"]


def test_what_is_no_run_is_refused(make_run, tmp_path):
    path = make_run()
    with refuses("it must be a run folder, but does not exist"):
        load([tmp_path / "nowhere"])
    with refuses(r"has no config\.yaml"):
        load([tmp_path])
    with refuses("name it once"):
        load([path, path / ".." / path.name])
    (path / "config.yaml").write_text("a: [")
    with refuses("cannot be read"):
        load([path])


def damaged(content):
    return b"no table, no archive"


@pytest.mark.sampled("metrics.csv")
@pytest.mark.parametrize(
    "file, change, said",
    [
        ("metrics.csv", None, "0 of 3 rounds are done"),
        ("metrics.csv", damaged, "No round has been judged yet"),
        ("metrics.csv", lambda content: content[:-20], "2 of 3 rounds are done"),
        ("clients.csv", None, ""),
        ("final.csv", None, ""),
        ("final.csv", damaged, ""),
        ("summary.json", None, "unfinished: 3 of 3"),
        ("summary.json", damaged, "summary.json cannot be read"),
        ("relation", None, "No relation can be shown"),
        ("relation/round-0002.npz", None, "1 of 3 rounds have no relation file"),
        ("relation/round-0002.npz", damaged, "files that cannot be read: round 2."),
        ("relation/round-0002.npz", lambda content: content[:200], "cannot be read: round 2."),
        ("traffic", None, "Nothing is known by layer"),
        ("traffic/round-0002.npz", None, ""),
        ("traffic/round-0002.npz", damaged, "files that cannot be read: round 2."),
        ("config.yaml", lambda _: b"federation: 3\n", "rounds are done"),
        ("columns.json", lambda _: b'{"mean_accuracy": {"model": ["x"]}}', "after local training"),
        ("provenance.json", lambda _: b'[{"data": [1]}]', ""),
    ],
)
def test_a_run_that_is_not_whole_still_has_a_page(make_run, file, change, said):
    """Half written, or damaged, in one way."""
    run = make_run()
    path = run / file
    if change:
        path.write_bytes(change(path.read_bytes() if path.exists() else b""))
    else:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = render(load([run]))
    assert said in page and "</html>" in page


@pytest.mark.sampled("metrics.csv")
@pytest.mark.parametrize("table", ["metrics.csv", "clients.csv", "final.csv"])
def test_cells_that_are_no_numbers(make_run, table):
    """Each of these in each column."""
    path = make_run()
    *lines, last = (path / table).read_text().splitlines()
    cells = ["words", "nan", "inf", "", "1e999"]
    first, *columns = last.split(",")
    for shift in range(len(cells)):
        spoiled = [cells[(k + shift) % len(cells)] for k in range(len(columns))]
        (path / table).write_text("\n".join([*lines, ",".join([first, *spoiled]), ""]))
        assert "</html>" in render(load([path]))


def test_each_final_score_is_at_its_clients_number(make_run):
    """Also behind a client that could not be scored, whose cell is NaN."""
    path = make_run()
    (path / "final.csv").write_text(
        "client,accuracy,model\n0,0.5,after\n1,nan,\n2,0.75,after\n3,nan,\n"
    )
    (run,) = load([path])
    assert run.final_accuracies.tolist() == pytest.approx(
        [0.5, math.nan, 0.75, math.nan], nan_ok=True
    )
    assert "62.50 %" in repr(run)

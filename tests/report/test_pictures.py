import base64

import numpy as np
import pytest

from fl_lightning.lab.report.page import render
from fl_lightning.lab.report.pictures import MISSING, OVER, STEPS, colour_end, encode, relations
from fl_lightning.results.runs import load


def decode(picture, columns):
    """What a picture shows, float64 (rows, columns), as the page's script reads it."""
    codes = np.frombuffer(base64.b64decode(picture["codes"]), dtype=np.uint8)
    values = picture["low"] + codes * ((picture["high"] - picture["low"]) / STEPS)
    values[codes == OVER], values[codes == MISSING] = picture["over"], np.nan
    return values.reshape(-1, columns)


def test_what_lies_beyond_the_colours_is_exact_and_what_is_missing_stays_missing():
    values = np.array([[0.1, 0.9876], [np.nan, 0.2], [np.inf, -0.3]])
    back = decode(encode(values, high=0.3), 2)
    assert back[0, 1] == pytest.approx(0.9876)
    assert np.isnan(back[[1, 2], 0]).all()
    assert back[2, 1] == pytest.approx(-0.3)
    assert back[0, 0] == pytest.approx(0.1, abs=0.6 / STEPS)


def rewritten(path, rows):
    """The run with `rows` (receivers, layers, sources) as the relation of every round."""
    for file in (path / "relation").iterdir():
        held = dict(np.load(file))
        np.savez(file, **(held | {"rows": rows.astype(np.float32)}))
    return path


OWN, MIX = np.eye(4)[:, None].repeat(3, axis=1), np.tile([0.1, 0.2, 0.3, 0.4], (4, 3, 1))
CONSTANT = {
    "every client receives its own model alone": OWN,
    "all clients receive one and the same mix": MIX,
    "all clients receive one and the same mix, but for norm, head: of these each "
    "has its own": np.concatenate([MIX[:, :1], OWN[:, 1:]], axis=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("said", CONSTANT)
def test_a_relation_without_differences_is_folded_away(make_run, said):
    """A sentence stands for it; its pictures are in there still."""
    runs = load([rewritten(make_run("a"), CONSTANT[said]), make_run("b")])
    assert [run["constant"] for run in relations(runs)["runs"]] == [said, ""]
    page = render(runs)
    assert f"a: in every round shown {said}." in page
    before, folded = page.split('<details id="constant">')
    folded = folded.partition("</details>")[0]
    assert 'id="overview-0"' in folded and 'id="client-0"' in folded and 'id="play"' not in folded
    assert 'id="overview-1"' in before and 'id="overview-1"' not in folded and 'id="play"' in before
    alone = render(runs[:1])
    assert (
        alone.index('<details id="constant">')
        < alone.index('id="play"')
        < alone.index('id="overview-0"')
    )
    assert 'id="constant"' not in render(runs[1:])


def big_run(make_run, rounds, clients, layers):
    """A run whose relation does not compress, with tables to match."""
    path = make_run("big", tuple(np.linspace(0.1, 0.9, rounds)), cohort=tuple(range(clients)))
    random = np.random.default_rng(0)
    rows = random.dirichlet(np.ones(clients), (clients, layers)).astype(np.float32)
    names = np.array([f"layer{number}.conv" for number in range(layers)])
    numbers = np.arange(clients)
    for number in range(1, rounds + 1):
        file = path / "relation" / f"round-{number:04d}.npz"
        np.savez(file, rows=rows, receivers=numbers, layers=names, sources=numbers)
    return path


def test_of_a_huge_cohort_some_are_shown_in_detail(make_run, monkeypatch):
    monkeypatch.setattr("fl_lightning.lab.report.pictures.BUDGET", 200_000)
    runs = load([big_run(make_run, 12, 60, 30)])
    shown = relations(runs)
    assert len(shown["rounds"]) >= 4
    assert 0 < len(shown["runs"][0]["pictures"][12]["clients"]) < 60
    assert "only the first" in runs[0].notes["relation"][0]

    monkeypatch.setattr("fl_lightning.lab.report.pictures.BUDGET", 10_000)
    runs = load([runs[0].folder])
    assert relations(runs)["rounds"] == []
    assert runs[0].notes["relation"] == ["60 clients are too many for this page"]


def test_a_strong_own_weight_does_not_swallow_the_rest():
    own = np.eye(2, dtype=bool)
    assert colour_end(np.array([[0.9, 0.1], [0.2, 0.8]]), own) == pytest.approx(0.3)  # 1.5 x 0.2
    assert colour_end(np.array([[0.5, 0.5], [0.5, 0.5]]), own) is None
    assert colour_end(np.eye(2), own) is None  # nothing for others: 0 to 1

"""The answer as a page, a picture, and an object: what readers are shown is what `worth.json`
says."""

import html
import json
import re
import shlex

import numpy as np
import pytest
from refusals import refuses

import fl_lightning
from fl_lightning.lab.worth import page, words
from fl_lightning.lab.worth.measure import as_json, measure
from fl_lightning.lab.worth.silos import Silo
from fl_lightning.lab.worth.statistics import ScoredSamples, Scores

from .conftest import SMALL


def made(gains, cycles=4, windows=0):
    """Silos of so many samples, `windows` of them a recording, whose federated models are right so
    much more often."""
    rng = np.random.default_rng(1)
    silos = []
    for c, (name, (n, gain)) in enumerate(gains.items()):
        drawn = rng.random((cycles, n))
        chance = rng.beta(5, 2, n)
        rows = {"local": Scores((drawn < chance).astype(float))}
        for label, less in (("fedavg after", 0.02), ("ditto", 0.0)):
            moved = drawn + rng.normal(0, 0.02, (cycles, n))
            rows[label] = Scores((moved < np.clip(chance + gain - less, 0, 1)).astype(float))
        folds = np.stack([rng.permutation(np.arange(n) % 5) for _ in range(cycles)])
        units = np.arange(n) // max(windows, 1)
        silos.append(Silo(c, name, ScoredSamples(np.arange(n) % 2, folds, units), rows, size=n))
        silos[-1].units = len(set(units)) if windows else 0
    return measure(silos, "accuracy", None, cycles)


def test_every_verdict_is_found_where_it_is_due():
    measured = made(
        {
            "up": (900, 0.08),
            "down": (900, -0.08),
            "same": (3000, 0.0),
            "few": (30, 0.1),
            "open": (60, 0.02),
        }
    )
    verdicts = {answer.silo.name: answer.verdict for answer in measured.answers}
    assert verdicts == {
        "up": "gains",
        "down": "harmed",
        "same": "no difference that matters",
        "few": "cannot tell yet",
        "open": "cannot tell yet",
    }
    assert measured.method == "ditto"
    assert measured.consortium["sentence"].startswith(
        "It depends on the silo: of 5 silos 1 gains, 1 loses, for 1 it"
    )
    assert measured.consortium["surely_gain"] == ["up"]
    sentences = {answer.silo.name: answer.sentence for answer in measured.answers}
    assert re.search(
        r"with about \d+ own samples we would know it to within ±\d",
        sentences["open"],
        re.IGNORECASE,
    )
    assert "verdict takes 40" in sentences["few"]


def test_promises_for_repeated_samples_are_of_units():
    """What intervals count is what is asked for; too few units get no verdict."""
    measured = made({"few": (80, 0.3), "open": (120, 0.02), "other": (240, 0.0)}, windows=10)
    few, unsure, _ = measured.answers
    assert few.verdict == "cannot tell yet" and "of 8 units, and a verdict takes 10" in few.sentence
    assert unsure.estimate is not None and unsure.verdict == "cannot tell yet"
    half_width = words.next_half_width(unsure.estimate.half)
    needed = unsure.estimate.samples_for(12, half_width)
    assert f"about {needed} own units" in unsure.sentence and "of 12 units" in unsure.sentence
    row = as_json(measured)["silos"][1]
    assert row["units"] == 12 and "samples_for" not in row
    assert row["units_for"]["0.05"] == unsure.estimate.samples_for(12, 0.05)


def test_a_gain_is_one_over_everything_that_the_silo_can_do_alone():
    """The network trained alone is far below the federation, a linear model on own rows is not: the
    silo does not gain. Where a longer training is best on other folds, it is what counts."""
    measured = made({"a": (900, 0.08), "b": (900, 0.08), "c": (900, 0.08)})
    assert {answer.verdict for answer in measured.answers} == {"gains"}
    silos = [answer.silo for answer in measured.answers]
    for silo in silos[:2]:
        silo.rows["own linear"] = Scores(silo.rows["ditto"].right.copy())
    silos[2].rows["local x10"] = silos[2].rows["ditto"]
    silos[2].rows["own linear"] = silos[2].rows["local"]
    silos[0].rows["local x10"], silos[1].rows["local x10"] = (s.rows["local"] for s in silos[:2])
    after = measure(silos, "accuracy", None, 4)
    assert [answer.alone_kind for answer in after.answers] == ["own linear"] * 2 + ["local x10"]
    assert "gains" not in {answer.verdict for answer in after.answers}
    assert all(answer.alone == pytest.approx(answer.federated) for answer in after.answers)


def test_a_gain_needs_every_kind_alone_to_be_below(monkeypatch):
    """By the other folds a kind may be chosen that is not the best over all: it is no gain to be
    above that alone."""
    measured = made({"a": (900, 0.08), "b": (900, 0.08), "c": (900, 0.08)})
    silos = [answer.silo for answer in measured.answers]
    for silo in silos:
        silo.rows["own linear"] = silo.rows["ditto"]

    def worse(silos, metric):
        return [(silo.rows["local"], "local") for silo in silos]

    monkeypatch.setattr("fl_lightning.lab.worth.measure.best_alone", worse)
    answer = measure(silos, "accuracy", None, 4).answers[0]
    assert answer.low > 0 and answer.verdict == "cannot tell yet"
    assert "a simple weighted sum of its columns" in answer.sentence


@pytest.mark.parametrize("gain", [0.004, -0.004])
def test_gains_within_the_margin_are_no_yes_and_no_no(gain):
    """An interval may lie above 0 and within the margin: as of a silo, the margin comes first."""
    rng, silos = np.random.default_rng(0), []
    for c in range(5):
        right = np.repeat((rng.random(4000) < 0.9)[None], 4, 0).astype(float)
        rows, moved = (
            {label: Scores(right.copy()) for label in ("local", "ditto")},
            rng.choice(4000, 16, replace=False),
        )
        rows["local"].right[:, moved], rows["ditto"].right[:, moved] = gain < 0, gain > 0
        folds = np.stack([rng.permutation(np.arange(4000) % 5) for _ in range(4)])
        silos.append(
            Silo(
                c,
                f"s{c}",
                ScoredSamples(np.arange(4000) % 2, folds, np.arange(4000)),
                rows,
                size=4000,
            )
        )
    facts = measure(silos, "accuracy", None, 4).consortium
    assert facts["sentence"].startswith(
        "On average joining makes no difference that matters: of 5 silos for 5 it makes"
    )
    assert facts["counts"]["no difference that matters"] == 5 and facts["surely_gain"] == []


def test_two_silos_are_no_consortium():
    facts = made({"up": (900, 0.08), "down": (900, -0.08), "few": (30, 0.0)}).consortium
    assert "gain" not in facts and "only 2 have enough samples" in facts["sentence"]


def test_the_page_says_what_the_json_says(out):
    content = json.loads((out / "worth.json").read_text())
    text = html.unescape((out / "worth.html").read_text())
    for row in content["silos"]:
        assert row["sentence"] in text and row["verdict"] in text
    assert "<script" not in text and "http" not in text


def test_a_silos_name_is_no_markup():
    text = page.render(made({"<b>A": (50, 0), "B & C": (50, 0), "D": (50, 0)}), [])
    assert "<b>" not in text and "&lt;b&gt;A" in text


@pytest.mark.slow
def test_python_gives_the_same(copy):
    """The call goes on in the folder: nothing is trained, the DataFrame is the CSV."""
    flags = shlex.split(SMALL.replace("--methods fedper --workers 1", ""))
    worth = fl_lightning.worth(flags, out="answer", methods=["fedper"], repeats=5, workers=1)
    assert worth.page.is_file() and worth.sentence in repr(worth)
    assert list(worth.silos["silo"]) == ["Aarau", "Basel", "Chur", "Pure", "Twin", "Zug"]
    assert worth.silos["gain"].isna().sum() == 2
    row = json.loads((copy / "worth.json").read_text())["silos"][0]
    assert worth.silos.loc[0, "gain"] == row["gain"]
    with refuses(r"worth\.json"):
        fl_lightning.Worth("nowhere")

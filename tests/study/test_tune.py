"""`fl-train tune` in this process (its workers are forked from it), on a few digits; and what its
parts promise."""

import csv
import dataclasses
import json
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from forked import forked
from lines import run_line
from refusals import refused_line, refuses

from fl_lightning.cli import main
from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import DataConfig
from fl_lightning.configuration.ranges import Range as Bounds
from fl_lightning.configuration.ranges import bounded_fields, limit
from fl_lightning.configuration.resolve import _import, resolve
from fl_lightning.configuration.search import Choice, LogRange, Range, Whole, edge, refusal, widened
from fl_lightning.data import digits
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.files import take_lock
from fl_lightning.lab.study import trials
from fl_lightning.lab.study.chosen import chosen as values_chosen
from fl_lightning.lab.study.grid import Entry
from fl_lightning.lab.study.space import Dimension, _share, drawn, nearby, space
from fl_lightning.lab.study.trials import Search, Trial, run_trials
from fl_lightning.lab.study.tuned import Tuned
from fl_lightning.methods.fedprox import FedProx

from .small import SMALL
from .small import TINY as STUDY

TINY = {**STUDY, "base": ["kapc_digits", SMALL], "methods": [{"name": "fedprox", "mu": 0.5}]}
LENGTHS = {
    "epochs",
    "personal_epochs",
    "head_epochs",
    "align_epochs",
    "steps",
    "inner_steps",
    "components",
}
"""Arguments that change how much a client, or the server, trains."""
PICKY = '''
from dataclasses import dataclass
from fl_lightning.configuration.config import check
from fl_lightning.methods import Method, Range, searched

@dataclass(frozen=True)
class Picky(Method):
    """FedAvg that refuses most of what it says it takes."""

    size: float = searched(0.0, Range(0.0, 1.0), "a test")

    def __post_init__(self) -> None:
        check("method.size", self.size, self.size == 0, "it must be 0")
'''


@pytest.fixture
def ask(on_study):
    """Tunes TINY with changes."""
    return lambda words="--out t --trials 2 --workers 1", **changes: on_study(
        f"tune study.yaml {words}", TINY | changes
    )


def rows(file):
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def tables(folder):
    """What a search has written of its choices."""
    return {
        name: (folder / name).read_bytes() for name in ("tuned.csv", "trials.csv", "tuned.yaml")
    }


def stamps(folder):
    """When each run ended. Folders may go while this looks: `os.walk` passes over them."""
    ended = [
        Path(inside, "summary.json")
        for inside, _, files in os.walk(folder)
        if "summary.json" in files
    ]
    return {file: file.stat().st_mtime_ns for file in ended}


# ---------------------------------------------------------------- what it does


def test_it_searches_reports_and_judges_the_choice_on_fresh_seeds(ask, tmp_path, capfd):
    # the base leaves the test part open, as every resolved one does
    study = {
        "grid": {"data.alpha": [0.1, 1.0]},
        "base": [*TINY["base"], {"data": {"test_seed": None}}],
    }
    line = "--out t --trials 2 --workers 1 --seed 1001"
    code, out, err = ask(f"{line} --untuned", **study)
    assert code == 0 and "4 of 4 runs finished" in out, err
    trials = rows(tmp_path / "t/trials.csv")
    assert [row["trial"] for row in trials] == ["0", "1"]
    # as in the base; mu is the file's, and fixed
    assert json.loads(trials[0]["values"]) == {"optimizer.lr": 0.05}
    for row in trials:  # the mean over settings of the final models' score on validation data
        places = sorted(tmp_path.glob(f"t/trials/fedprox,mu=0.5/trial-00{row['trial']}/*"))
        assert [place.name for place in places] == ["data.alpha=0.1", "data.alpha=1.0"]
        summaries = [json.loads((place / "summary.json").read_text()) for place in places]
        assert float(row["score"]) == sum(one["final_mean_accuracy"] for one in summaries) / 2
        config = yaml.safe_load((places[0] / "config.yaml").read_text())
        assert (config["seed"], config["data"]["score_on"]) == (1001, "validation")
        assert config["optimizer"]["lr"] == json.loads(row["values"])["optimizer.lr"]
    (tuned,) = rows(tmp_path / "t/tuned.csv")
    scores = [float(row["score"]) for row in trials]
    assert [float(tuned[name]) for name in ("start", "min", "max")] == [scores[0], *sorted(scores)]
    assert float(tuned["gain"]) == max(scores) - scores[0]
    for file in tmp_path.glob("t/**/config.yaml"):  # no trial trains on what the study tests
        assert yaml.safe_load(file.read_text())["data"]["test_seed"] == 0
    choice = json.loads(trials[scores.index(max(scores))]["values"])["optimizer.lr"]
    assert json.loads(tuned["values"]) == {"optimizer.lr": choice}
    methods = yaml.safe_load((tmp_path / "t/tuned.yaml").read_text())["methods"]
    rates = {"fedprox mu=0.5": choice, "fedprox mu=0.5 untuned": 0.05}
    assert {one["label"]: one["optimizer.lr"] for one in methods} == rates
    assert [one["init_args"] for one in methods] == [{"mu": 0.5}] * 2
    config = yaml.safe_load(next((tmp_path / "t/study/runs").glob("**/config.yaml")).read_text())
    assert (config["data"]["score_on"], config["seed"]) == ("test", 0)
    # The table of the study has the values, and says why they may tell little; an archive, too.
    assert tuned["warnings"].startswith("2 trials: below 10")
    assert run_line("archive t/study --out t.zip") == 0
    for place in ("t/study", "t.zip"):
        assert main(["compare", place, "--format", "csv", "--out", "table.csv"]) == 0
        chosen = {row["method"]: row["chosen"] for row in rows(tmp_path / "table.csv")}
        assert chosen == {label: f"optimizer.lr={lr}" for label, lr in rates.items()}
        assert "2 trials: below 10 the luck of the draw decides" in capfd.readouterr().err
    # Nothing is run twice, and another search is another folder's.
    before, choices = stamps(tmp_path / "t"), tables(tmp_path / "t")
    code, out, err = ask(f"{line} --untuned", **study)
    assert code == 0 and "4 of 4 runs finished (4 were there)" in out, err
    code, out, err = ask(line, **study)
    assert (code, out) == (2, "") and "has trained this run" in err
    other = refused_line(ask("--out t --trials 4 --workers 1", **study))
    assert "trials: " in other and "--out of its own" in other
    assert (before, choices) == (stamps(tmp_path / "t"), tables(tmp_path / "t"))


def test_the_metric_that_is_named_chooses(ask):
    words = "--out t --trials 2 --workers 1 --study false --metric balanced_accuracy"
    assert ask(words)[0] == 0
    assert rows(Path("t/tuned.csv"))[0]["metric"] == "balanced_accuracy"
    assert "metric: balanced_accuracy" in Path("t/tuned.yaml").read_text()
    assert "metric" in refused_line(ask("--out u --metric nosuch"))


@pytest.mark.parametrize(
    "content",
    ["method,trials\nlocal,2\n", "method,values\nlocal,{\n", "method,values\nlocal,[1]\n"],
)
def test_a_damaged_record_of_choices_is_one_line(content, tmp_path):
    (tmp_path / "study.json").write_text("[]")
    (tmp_path / "tuned.csv").write_text(content)
    with refuses(r"tuned\.csv is damaged") as caught:
        values_chosen(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "trials: 2\nseed: 1000\nbase:\ngrid:\nmethods:\n"])
def test_a_damaged_request_is_one_line(content, ask, tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t/tune.yaml").write_text(content)
    assert "t/tune.yaml is damaged" in refused_line(ask())
    assert [file.read_text() for file in (tmp_path / "t").iterdir()] == [content]


@pytest.fixture
def search(tmp_path):
    """Of FedProx, four trials."""
    base = resolve([{"method": "fedprox", "data": {"validation": 0.2}}])
    return Search(Entry("methods[0]", "fedprox", "fedprox"), tmp_path / "t", 4, 3, base, [{}])


@pytest.mark.parametrize("content", ["garbage", "3", "{}", "[1]", '{"number": 0', "\xff"])
def test_a_damaged_trial_is_one_line(content, search):
    file = search.file(0)
    file.parent.mkdir(parents=True)
    file.write_bytes(content.encode("latin-1"))
    with refuses(r"trial-000\.json is damaged") as caught:
        search.ended()
    assert "\n" not in str(caught.value)


def test_a_search_of_an_earlier_version_is_not_gone_on_with(ask, tmp_path):
    line = "--out t --trials 1 --workers 1 --study false"
    assert ask(line)[0] == 0
    (tmp_path / "t/trials/journal.log").touch()
    assert "drawn by an earlier version" in refused_line(ask(line))


def test_choices_are_those_of_the_searchs_own_study(tmp_path):
    """Another study beside it has equal labels, perhaps, and other values."""
    (tmp_path / "tune.yaml").write_text("trials: 2\n")
    (tmp_path / "tuned.csv").write_text('method,values\nfedprox,"{""mu"": 0.1}"\n')
    for name in ("study", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "study.json").write_text("{}")
    assert values_chosen(tmp_path / "study") == ({"fedprox": "mu=0.1"}, [])
    assert values_chosen(tmp_path / "other") == ({}, [])


def test_what_a_method_refuses_is_a_trial_too(ask, tmp_path):
    (tmp_path / "my_picky.py").write_text(PICKY)
    code, _, err = ask("--out t --trials 3 --workers 1 --study false", methods=["my_picky.Picky"])
    assert code == 0, err
    (tuned,) = rows(tmp_path / "t/tuned.csv")
    assert (tuned["trials"], tuned["refused"], tuned["trial"]) == ("3", "2", "0")
    assert all("it must be 0" in row["why"] for row in rows(tmp_path / "t/trials.csv")[1:])
    assert not (tmp_path / "t/study").exists()


def test_the_test_part_is_not_even_read(ask, tmp_path):
    """Another one, which nothing accepts that reads it, changes no byte."""
    own = {"data.source": "arrays", "data.root": str(tmp_path / "a.npz"), "data.partition": "hsu"}
    base = [*TINY["base"], {**own, "federation.rounds": 1}]
    source = digits.load(DataConfig())
    x, x_test = (part.read_all()[:, 0].astype(np.float32) for part in (source.train, source.test))
    poison = np.full((7, 3, 2), np.nan, np.float32)
    labels = source.test.labels
    for name, part, targets in (("clean", x_test, labels), ("poisoned", poison, -labels)):
        parts = {"x_train": x, "y_train": source.train.labels, "x_test": part, "y_test": targets}
        np.savez(tmp_path / "a.npz", **parts)
        words = f"--out {name} --trials 1 --workers 1 --study false"
        code, _, err = ask(words, base=base, methods=["kapc"])
        assert code == 0, err
    clean, other = tmp_path / "clean", tmp_path / "poisoned"
    assert tables(clean) == tables(other)
    for file in clean.glob("trials/**/clients.csv"):
        assert file.read_bytes() == (other / file.relative_to(clean)).read_bytes()


@pytest.mark.slow
def test_what_is_tried_does_not_depend_on_workers_or_on_kills(ask, tmp_path):
    methods = ["fedprox", "kapc", "ditto"]
    words = "--trials 9 --study false"
    changes = {"methods": methods, "base": ["kapc_exact_digits", SMALL, {"federation.rounds": 6}]}
    assert ask(f"--out one --workers 1 {words}", **changes)[0] == 0
    assert ask(f"--out two --workers 2 {words}", **changes)[0] == 0
    argv = ["tune", "study.yaml", "--out", "killed", "--workers", "2", *words.split()]
    stood, ended = {}, 0
    for kill in range(9):
        attempt = forked(argv, tmp_path / "said")
        while kill < 8 and len(stamps(tmp_path / "killed")) < ended + 1 + kill % 3:
            assert not attempt.ended(), attempt.err
            time.sleep(0.002)
        if kill < 8:
            attempt.send(signal.SIGKILL)
        assert attempt.wait() == (-9 if kill < 8 else 0), attempt.err
        now = stamps(tmp_path / "killed")
        assert stood.items() <= now.items()  # no run that has ended is run again
        stood, ended = now, len(now)
    one, two, killed = (tables(tmp_path / name) for name in ("one", "two", "killed"))
    assert one == two == killed
    assert len(rows(tmp_path / "one/trials.csv")) == 27


@pytest.mark.parametrize(
    "words, changes, said",
    [
        ("--trials 2", {}, "out: it must be given"),
        ("--out t --trials 0", {}, "trials: 0"),
        (
            "--out t",
            {"base": ["kapc_exact_digits", {"data.validation": 0}]},
            "data.validation: 0.0",
        ),
        ("--out t", {"grid": {"data.test_seed": [1, None]}}, "data.test_seed: None"),
        ("--out t", {"grid": {"data.validation": [0.2, 0.0]}}, "data.validation: 0.0"),
        ("--out t", {"grid": {"optimizer.name": ["sgd", "adam"]}}, "grid: 'optimizer.name=adam'"),
        ("--out full", {}, "something else"),
        (
            "--out t --untuned",
            {"methods": [{"name": "local", "label": "x" * 93}]},
            "untuned' is too long",
        ),
        (
            "--out t --untuned",
            {"methods": ["local", {"name": "ditto", "label": "local untuned"}]},
            "another method is",
        ),
    ],
)
def test_bad_words(words, changes, said, ask, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    assert said in refused_line(ask(words, **changes))
    assert not (tmp_path / "t").exists()


# ---------------------------------------------------------------- trials

RATE = Dimension("optimizer.lr", LogRange(1e-3, 0.3), 0.05)


def test_draws_are_spread_evenly_and_begin_with_the_start():
    values = drawn(RATE, "a", 11, 3)
    assert values[0] == 0.05
    parts = [math.floor(10 * math.log(value / 1e-3, 300)) for value in values[1:]]
    assert sorted(parts) == list(range(10)) != parts
    choices = drawn(Dimension("b", Choice((1, 2, None)), None), "a", 7, 3)
    assert choices[0] is None and [choices[1:].count(value) for value in (1, 2, None)] == [2, 2, 2]
    assert sorted(drawn(Dimension("c", Whole(1, 3), 2), "a", 7, 3)[1:]) == [1, 1, 2, 2, 3, 3]
    assert drawn(RATE, "a", 1, 3) == [0.05]


def test_draws_of_what_all_methods_have_are_the_same():
    assert drawn(RATE, "a", 8, 3) == drawn(RATE, "b", 8, 3) != drawn(RATE, "a", 8, 4)
    own = Dimension("method.mu", Range(0, 1), 0.5)
    pairs = zip(drawn(own, "a", 8, 3)[1:], drawn(own, "b", 8, 3)[1:], strict=True)
    assert all(one != other for one, other in pairs)


@pytest.mark.parametrize(
    "where, best",
    [(LogRange(1e-3, 0.3), 0.02), (Range(0, 1), 0.5), (Whole(1, 9), 5), (Choice((1, 2, 3)), 2)],
)
def test_later_draws_are_near_the_best(where, best):
    dimension = Dimension("method.mu", where, best)
    values = [nearby(dimension, "a", number, 3, best) for number in range(10, 60)]
    shares = [_share(where, value) - _share(where, best) for value in values]
    assert abs(np.mean(shares)) < 0.1 and 0.05 < np.std(shares) < 0.3
    assert nearby(Dimension("b", Range(2, 2), 2), "a", 10, 3, 2) == 2


def test_a_search_goes_by_scores_after_ten_trials(search):
    search = dataclasses.replace(search, number=12)
    first = [search.values(k) for k in range(10)]
    for k, values in enumerate(first):
        search.file(k).parent.mkdir(parents=True, exist_ok=True)
        search.file(k).write_text(json.dumps(vars(Trial(k, values, k / 10))))
    assert len({str(values) for values in first}) == 10
    later = search.values(10)
    assert later.keys() == first[9].keys() and later not in first
    assert later == search.values(10) != search.values(11)


def test_processes_share_a_search_and_no_trial(search, monkeypatch):
    tried = []

    def run(search, number):
        tried.append(number)
        search.file(number).write_text(json.dumps(vars(Trial(number, {}, 0.5))))

    monkeypatch.setattr(trials, "_run_trial", run)
    search.file(1).parent.mkdir(parents=True)
    with take_lock(search.file(1).with_suffix(".lock")):  # another process's
        assert run_trials(search) is None
    assert tried == [0, 2, 3] and len(search.ended()) == 3
    assert run_trials(search) is None
    assert tried == [0, 2, 3, 1] and len(search.ended()) == 4


@pytest.mark.parametrize(
    "space, value, end",
    [
        (LogRange(1e-3, 0.1), 0.012, None),
        (LogRange(1e-3, 0.1), 0.0012, 1e-3),
        (LogRange(1e-3, 0.1), 0.09, 0.1),
        (Range(0, 1), 0.96, 1),
        (Range(0, 1), 0.04, 0),
        (Whole(2, 4), 4, 4),
        (Whole(1, 2), 2, None),
        (Choice((20, 50, 100)), 20, 20),
        (Choice((1, 2)), 2, None),
        (Choice((1, 2, 3, None)), None, None),
        (Range(2, 2), 2, None),
    ],
)
def test_edges_of_a_range(space, value, end):
    assert edge(space, value) == end


def test_scores_that_are_no_numbers_are_one_line():
    ended = [Trial(k, {}, None, "its score is no number") for k in range(2)]
    with pytest.raises(
        RunFailed, match="m: none of its 2 trials ended well: its score is no number"
    ):
        Tuned(Entry("methods[0]", "m", "m"), ended).row()


@pytest.mark.parametrize("score, start, gain", [(None, "nan", "nan"), (3.0, "3.0", "0.0")])
def test_a_start_without_a_score_has_no_number(score, start, gain):
    """It had 0, as if it were the best of all errors, and the gain went by that."""
    ended = [Trial(0, {}, score, metric="mae"), Trial(1, {}, 3.0, metric="mae")]
    row = Tuned(Entry("methods[0]", "m", "m"), ended).row()
    assert (str(row["start"]), str(row["gain"]), row["best"]) == (start, gain, 3.0)


# ---------------------------------------------------------------- spaces


def spaces():
    """Of every method, the arguments that are searched."""
    return {
        name: [field for field in dataclasses.fields(method(name)) if "search" in field.metadata]
        for name in catalogue.table("methods")
    }


def method(name):
    return _import("methods", "method", catalogue.table("methods")[name].class_path)


def test_spaces_hold_their_defaults_and_say_why_and_change_no_budget():
    found = spaces()
    assert len(found) >= 48 and sum(map(bool, found.values())) >= 40
    for name, fields in found.items():
        for field in fields:
            assert widened(field.metadata["search"], field.default) == field.metadata["search"], (
                name,
                field.name,
            )
            assert len(field.metadata["why"]) > 5, (name, field.name)
            assert field.name not in LENGTHS, (name, field.name)


def test_spaces_lie_within_what_their_arguments_may_be():
    for name, fields in spaces().items():
        for field in fields:
            hint = bounded_fields(method(name)).get(field.name)
            space, values = field.metadata["search"], limit(hint)[0] or Bounds(-math.inf)
            ends = space.values if isinstance(space, Choice) else (space.low, space.high)
            assert all(value in values for value in ends), (name, field.name)


def test_what_is_searched_begins_from_the_base_and_leaves_what_the_study_sets():
    def keys(fixed=frozenset(), **more):  # type: ignore[assignment]
        config = resolve(
            [{"method": {"name": "pfedme", "init_args": more.pop("method", {})}, **more}]
        )
        return {d.key: (d.start, d.space) for d in space(config, fixed)}

    assert keys()["method.lam"] == (15.0, LogRange(1, 20))
    assert keys(method={"lam": 100.0})["method.lam"] == (100.0, LogRange(1, 100.0))
    assert "method.lam" not in keys(method={"lam": 0.0})  # no logarithm holds it
    assert keys({"method.lam", "optimizer.lr"}).keys() == {"method.personal_lr", "method.beta"}
    assert keys(optimizer={"name": "adam", "lr": 0.001})["optimizer.lr"] == (
        0.001,
        LogRange(1e-4, 1e-2),
    )
    assert "optimizer.lr" not in keys(optimizer={"name": "module"})


def test_settings_of_a_grid_have_one_range_each(tmp_path):
    entry = Entry("methods[0]", "fedavg", "fedavg")
    base = resolve([{"method": "fedavg", "data": {"validation": 0.2}}])

    def keys(*settings):
        return [d.key for d in Search(entry, tmp_path, 2, 1000, base, list(settings)).dimensions]

    sgd, adam, adamw = ({"optimizer.name": name} for name in ("sgd", "adam", "adamw"))
    assert keys(adam, adamw) == keys(sgd) == ["optimizer.lr"]  # one range
    # it is not searched
    assert keys(sgd | {"optimizer.lr": 0.1}, adam | {"optimizer.lr": 0.001}) == []
    for other in (adam, {"optimizer.name": "module"}):
        with refuses(r"fedavg has another range of optimizer\.lr there than in the first"):
            keys(sgd, other)


@pytest.mark.parametrize(
    "where, says",
    [
        (LogRange(0, 1), "above 0, for logarithms"),
        (Range(1, 0.1), "low end must not be above"),
        (Range(0, math.inf), "finite numbers"),
        (Whole(1, 3.5), "whole numbers"),  # type: ignore[arg-type]
        (Choice(()), "at least one"),
        (Choice(((1, 2), (3,))), "its values must be texts, numbers, true, false or null"),
        ((0, 1), "it must be a LogRange, Range, Whole or Choice"),
    ],
)
def test_a_space_that_nothing_can_be_drawn_from_is_one_line(where, says):
    """Before the search: some failed after a trial or after all of them, and some were searched at
    one point alone."""
    assert refusal(where) is not None
    config = resolve([{"method": "fedprox"}])
    with pytest.MonkeyPatch.context() as patch:
        fields = dataclasses.fields(FedProx)
        patch.setattr(
            next(f for f in fields if f.name == "mu"), "metadata", {"search": where, "why": "none"}
        )
        with refuses(rf"FedProx\.mu: .* is not allowed; .*{says}"):
            space(config)


def test_spaces_are_widened():
    assert widened(Range(0, 1), 2) == Range(0, 2)
    assert widened(Whole(2, 4), 7) == Whole(2, 7)
    assert widened(Whole(2, 4), 2.5) is None
    assert widened(LogRange(1, 2), None) is None
    assert widened(Choice((1, 2)), None) == Choice((1, 2, None))
    assert widened(Choice((1, 2)), [3]) is None  # a journal would not give it back

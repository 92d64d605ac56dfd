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
from unittest.mock import Mock

import numpy as np
import optuna
import pytest
import yaml
from forked import forked
from lines import run_line
from pandas import DataFrame
from refusals import refused_line, refuses

from fl_lightning.cli import main
from fl_lightning.configuration import catalogue
from fl_lightning.configuration.config import DataConfig
from fl_lightning.configuration.ranges import Range as Bounds
from fl_lightning.configuration.ranges import bounded_fields, limit
from fl_lightning.configuration.resolve import _import, resolve
from fl_lightning.configuration.search import (
    Choice,
    LogRange,
    Range,
    Whole,
    edge,
    space_problem,
    widened,
)
from fl_lightning.data import digits
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.metric import BY_TASK
from fl_lightning.lab.study.chosen import chosen_values
from fl_lightning.lab.study.grid import ListedMethod
from fl_lightning.lab.study.space import Dimension, space
from fl_lightning.lab.study.trials import Trials, best
from fl_lightning.lab.study.tuned import Tuned
from fl_lightning.lab.study.tuning import Search, _run_trial
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


@pytest.mark.slow
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
    assert "trials: " in other and "give this search another --out" in other
    assert (before, choices) == (stamps(tmp_path / "t"), tables(tmp_path / "t"))


@pytest.mark.slow
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
        chosen_values(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "trials: 2\nseed: 1000\nbase:\ngrid:\nmethods:\n"])
def test_a_damaged_request_is_one_line(content, ask, tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t/tune.yaml").write_text(content)
    assert "t/tune.yaml is damaged" in refused_line(ask())
    assert [file.read_text() for file in (tmp_path / "t").iterdir()] == [content]


@pytest.mark.parametrize(
    "line", ["garbage", "3", "{}", '{"op_code": 99}', "\xff", '{"op_code": 4}']
)
def test_a_damaged_journal_is_one_line(line, tmp_path):
    carry_on(tmp_path / "t", set())
    journal = tmp_path / "t/journal.log"
    whole = journal.read_bytes()
    for content in (whole + line.encode("latin-1") + b"\n", line.encode("latin-1") + b"\n" + whole):
        journal.write_bytes(content)
        with refuses(r"t/journal\.log is damaged") as caught:
            Trials(tmp_path / "t", "mine", TWO, 8, seed=3).ended()
        assert "\n" not in str(caught.value)
        assert journal.read_bytes().startswith(content)


def test_choices_are_those_of_the_searchs_own_study(tmp_path):
    """Another study beside it has equal labels, perhaps, and other values."""
    (tmp_path / "tune.yaml").write_text("trials: 2\n")
    (tmp_path / "tuned.csv").write_text('method,values\nfedprox,"{""mu"": 0.1}"\n')
    for name in ("study", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "study.json").write_text("{}")
    assert chosen_values(tmp_path / "study") == ({"fedprox": "mu=0.1"}, [])
    assert chosen_values(tmp_path / "other") == ({}, [])


def test_what_a_method_refuses_is_a_trial_too(ask, tmp_path):
    (tmp_path / "my_picky.py").write_text(PICKY)
    code, _, err = ask("--out t --trials 3 --workers 1 --study false", methods=["my_picky.Picky"])
    assert code == 0, err
    (tuned,) = rows(tmp_path / "t/tuned.csv")
    assert (tuned["trials"], tuned["refused"], tuned["trial"]) == ("3", "2", "0")
    assert all("it must be 0" in row["why"] for row in rows(tmp_path / "t/trials.csv")[1:])
    assert not (tmp_path / "t/study").exists()


@pytest.mark.slow
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
        ("--out t --trials 0", {}, "trials=0"),
        (
            "--out t",
            {"base": ["kapc_exact_digits", {"data.validation": 0}]},
            "data.validation=0.0",
        ),
        ("--out t", {"grid": {"data.test_seed": [1, None]}}, "data.test_seed=None"),
        ("--out t", {"grid": {"data.validation": [0.2, 0.0]}}, "data.validation=0.0"),
        ("--out t", {"grid": {"optimizer.name": ["sgd", "adam"]}}, "grid='optimizer.name=adam'"),
        ("--out full", {}, "it has other files and no tune.yaml"),
        (
            "--out t --untuned",
            {"methods": [{"name": "local", "label": "x" * 93}]},
            "untuned' is too long",
        ),
        (
            "--out t --untuned",
            {"methods": ["local", {"name": "ditto", "label": "local untuned"}]},
            "another method has",
        ),
    ],
)
def test_bad_words(words, changes, said, ask, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    assert said in refused_line(ask(words, **changes))
    assert not (tmp_path / "t").exists()


# ---------------------------------------------------------------- trials

TWO = [Dimension("a", LogRange(0.1, 10), 1.0), Dimension("b", Choice((1, 2, None)), None)]


def score(values):
    return -abs(values["a"] - 3) - (values["b"] or 5)


def tell(claim, score):
    claim.tell(score)
    claim.release()


def carry_on(folder, kills):
    """Eight trials, of which those of `kills` are begun by a process that is gone before it
    tells."""
    number = 0
    while True:
        trials = Trials(folder, "mine", TWO, 8, seed=3)
        claim = trials.claim()
        if claim is None:
            return trials.ended()
        if number not in kills:
            claim.tell(score(claim.values)) if claim.number != 5 else claim.refuse("it is five")
        claim.release()
        number += 1


def test_trials_go_on_where_they_were(tmp_path):
    whole = carry_on(tmp_path / "whole", set())
    assert carry_on(tmp_path / "killed", {0, 3, 7}) == whole
    assert [trial.number for trial in whole] == list(range(8))
    assert whole[0].values == {"a": 1.0, "b": None}
    assert len({str(trial.values) for trial in whole}) == 8
    assert [trial.number for trial in whole if trial.score is None] == [5] and whole[
        5
    ].why == "it is five"
    chosen = best(whole)
    assert chosen.score == max(trial.score for trial in whole if trial.score is not None)
    assert [trial.values for trial in carry_on(tmp_path / "whole", set())] == [
        trial.values for trial in whole
    ]


def drawn(folder, label, dimensions, number):
    """The values of a method's first trials, each scored by what only this method knows."""
    trials, found = Trials(folder, label, dimensions, number, seed=3), []
    for _ in range(number):
        claim = trials.claim()
        found.append(claim.values)
        tell(claim, len(label) * claim.values["optimizer.lr"])
    return found


def test_first_draws_of_what_all_methods_have_are_the_same(tmp_path):
    rate, own = (
        Dimension("optimizer.lr", LogRange(1e-3, 0.3), 0.05),
        Dimension("method.mu", Range(0, 1), 0.5),
    )
    one, other, alone = (
        drawn(tmp_path, label, dimensions, 10)
        for label, dimensions in (("a", [own, rate]), ("bb", [rate, own]), ("c", [rate]))
    )
    rates = [[trial["optimizer.lr"] for trial in trials] for trials in (one, other, alone)]
    assert rates[0] == rates[1] == rates[2] and len(set(rates[0])) == 10
    assert one[0]["method.mu"] == other[0]["method.mu"] == 0.5
    assert all(a["method.mu"] != b["method.mu"] for a, b in zip(one[1:], other[1:], strict=True))


@pytest.mark.parametrize(
    "space, value, end",
    [
        (LogRange(1e-3, 0.1), 0.012, None),
        (LogRange(1e-3, 0.1), 0.0012, 1e-3),
        (Range(0, 1), 0.04, 0),
        (Whole(2, 4), 4, 4),
        (Whole(1, 2), 2, None),
        (Choice((20, 50, 100)), 20, 20),
        (Choice((1, 2, 3, None)), None, None),
        (Range(2, 2), 2, None),
    ],
)
def test_edges_of_a_range(space, value, end):
    assert edge(space, value) == end


def test_a_kill_between_two_arguments_changes_neither(tmp_path, monkeypatch):
    def begun(folder, killed):
        first = Trials(folder, "mine", TWO, 3, seed=3).claim()
        tell(first, 1.0)
        if killed:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(
                    optuna.Trial, "suggest_categorical", Mock(side_effect=KeyboardInterrupt)
                )
                Trials(folder, "mine", TWO, 3, seed=3).claim()
        second = Trials(folder, "mine", TWO, 3, seed=3).claim()
        assert second.number == 1
        second.release()
        return second.values

    assert begun(tmp_path / "killed", True) == begun(tmp_path / "whole", False)


def tuned(folder, scores, metric):
    """What a search is told of trials with these scores."""
    trials = Trials(folder, "m", TWO, len(scores), 0)
    for one in scores:
        tell(trials.claim(), one)
    return Tuned(ListedMethod("methods[0]", "m", "m"), trials.ended(), BY_TASK[metric])


def test_of_errors_the_least_is_the_best_trial(tmp_path, monkeypatch):
    """A trial's score is the mean error's merit."""
    errors = DataFrame({"metric": "mae", "value": [1.0, 3.0]})
    monkeypatch.setattr("fl_lightning.lab.study.tuning.tidy", lambda runs: errors)
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "summary.json"):  # its run has ended
        (tmp_path / "run" / name).write_text("{}")
    search = Mock(settings=[{}], **{"metric.return_value": BY_TASK["regression"]})
    claim = Mock(folder=tmp_path, number=0, values={})
    _run_trial(search, claim)
    claim.tell.assert_called_once_with(-2.0)


def test_scores_that_are_no_numbers_are_one_line(tmp_path):
    line = "m: none of its 2 trials ended well: its score is no number"
    with pytest.raises(RunFailed, match=line):
        tuned(tmp_path, [math.nan, math.nan], "classification").row()


@pytest.mark.parametrize("score, start, gain", [(math.nan, "nan", "nan"), (-3.0, "3.0", "0.0")])
def test_a_start_without_a_score_has_no_number(tmp_path, score, start, gain):
    """It had 0, as if it were the best of all errors, and the gain went by that."""
    row = tuned(tmp_path, [score, -3.0], "regression").row()
    assert (str(row["start"]), str(row["gain"]), row["best"]) == (start, gain, 3.0)


def test_processes_share_a_journal_and_no_trial(tmp_path):
    ours, theirs = (Trials(tmp_path, "mine", TWO, 3, seed=0) for _ in range(2))
    claims = [ours.claim(), theirs.claim(), ours.claim(), theirs.claim()]
    assert [claim.number if claim else None for claim in claims] == [0, 1, 2, None]
    first, second, third, _ = claims
    assert first is not None and second is not None and third is not None
    tell(first, 0.5)
    assert theirs.claim() is None  # the others are at work
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(b'{"op_code": 6, "wor')  # a process was killed over a line
    second.release()
    again = theirs.claim()
    assert (again.number, again.values) == (1, second.values)
    for claim, score in ((again, 0.25), (third, 0.75)):
        tell(claim, score)
    assert [trial.score for trial in Trials(tmp_path, "mine", TWO, 3, seed=0).ended()] == [
        0.5,
        0.25,
        0.75,
    ]


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
    entry = ListedMethod("methods[0]", "fedavg", "fedavg")
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
    assert space_problem(where) is not None
    config = resolve([{"method": "fedprox"}])
    with pytest.MonkeyPatch.context() as patch:
        fields = dataclasses.fields(FedProx)
        patch.setattr(
            next(f for f in fields if f.name == "mu"), "metadata", {"search": where, "why": "none"}
        )
        with refuses(rf"FedProx\.mu=.*:.*{says}"):
            space(config)

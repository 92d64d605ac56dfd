"""`fl-train study --together`: run folders as of runs alone, and what a study remembers of how its
clients train."""

import json
import re
import shutil

import pytest
import yaml
from kills_together import differences

from fl_lightning.foundation import device
from fl_lightning.lab.study import together
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import Study
from fl_lightning.lab.study.launch import resolved

from .small import TINY, results

MORE = {**TINY, "methods": ["kapc", {"name": "fedprox", "mu": 0.5}, "fedproto"], "seeds": [0, 1]}


@pytest.fixture
def ask(on_study):
    """Runs MORE with changes, in the folder `out`."""
    return lambda words, out="s", **changes: on_study(
        f"study study.yaml --out {out} {words}", MORE | changes
    )


def executors(study):
    files = study.glob("**/config.yaml")
    return {yaml.safe_load(file.read_text())["fabric"]["executor"] for file in files}


def test_no_number_depends_on_how_many_train_together(ask, tmp_path):
    """Alone through stacked passes, and two at a time in one of two processes."""
    for words, out in (
        ("--workers 1 --together 1 --fabric.executor vmap", "alone"),
        ("--workers 2 --together 2", "together"),
    ):
        code, _, err = ask(words, out, seeds=[0])
        assert code == 0 and "[3/3]" in err, err
    alone = results(tmp_path / "alone")
    assert len(alone) == 3 and alone == results(tmp_path / "together")
    assert executors(tmp_path / "together") == {"vmap"}
    kept = json.loads((tmp_path / "together/executors.json").read_text())
    assert kept == {"mlp {'hidden': [16]}, digits in batches of 16, sgd": "vmap"}
    log = (tmp_path / "together/runs/fedproto/seed-0/log.txt").read_text()
    assert "trains in the loop" not in log  # its own loss is stacked, too
    assert "kapc" not in log


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["sampler", "weights"])
def test_classes_count_alike_in_company_as_alone(ask, tmp_path, balance):
    """Samples are drawn in stacked passes, too; weights of a loss take the loop, and a line says
    so."""
    base = [*MORE["base"], {"data.balance": balance}]
    changes = {"base": base, "methods": ["fedavg", "fedprox"], "seeds": [0]}
    plain = {**changes, "base": MORE["base"]}
    for words, out, keys in (
        ("--together 1 --fabric.executor vmap", "alone", changes),
        ("--together 2", "together", changes),
        ("--together 2", "plain", plain),
    ):
        code, _, err = ask(f"--workers 1 {words}", out, **keys)
        assert code == 0, err
    alone, company, unbalanced = (results(tmp_path / n) for n in ("alone", "together", "plain"))
    assert alone == company != unbalanced
    log = (tmp_path / "together/runs/fedavg/seed-0/log.txt").read_text()
    assert ("data.balance weights gives each client a loss of its own" in log) == (
        balance == "weights"
    )


@pytest.mark.slow
def test_a_run_that_diverges_ends_alone(ask, tmp_path):
    """The others end with the numbers that they have without it."""
    bad = {"name": "fedprox", "label": "bad", "mu": 0.5, "optimizer.lr": 1e30}
    assert ask("--workers 1 --together 6", "want")[0] == 0
    code, _, err = ask("--workers 1 --together 8", methods=[*MORE["methods"], bad])
    assert code == 1
    failed = [line for line in err.splitlines() if " failed: " in line]
    assert sorted(line.split(" failed: ")[0] for line in failed) == ["bad, seed 0", "bad, seed 1"]
    assert all("not finite" in line for line in failed)
    shutil.rmtree(tmp_path / "s" / "runs" / "bad")
    assert results(tmp_path / "s") == results(tmp_path / "want")


def configs_of(study):
    return [config for _, config in resolved(study)[1]]


def choose(tmp_path, wanted, **changes):
    """What a study in the folder `s` is to keep."""
    _, pairs = resolved(Study.of(MORE | changes))
    return together.choose_executors(StudyFolder(tmp_path / "s"), pairs, wanted, pairs)[1]


@pytest.mark.slow
def test_auto_measures_once_and_goes_by_it(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(
        together, "_faster_executor", lambda config: measured.append(config) or "vmap"
    )
    long = {"base": [*MORE["base"], {"federation.rounds": 200}]}
    assert list(choose(tmp_path, "auto").values()) == ["loop"]  # too short to be worth it
    assert not measured
    known = choose(tmp_path, "auto", **long)
    assert list(known.values()) == ["vmap"]
    assert len(measured) == 1  # one kind of run
    (tmp_path / "s").mkdir()
    together.write_executors(StudyFolder(tmp_path / "s"), known)
    assert (
        choose(tmp_path, "auto", **long)
        == choose(tmp_path, 1, **long)
        == choose(tmp_path, 4, **long)
        == known
    )
    assert len(measured) == 1


@pytest.mark.slow
def test_jobs_have_the_executor_of_the_study(ask, tmp_path, monkeypatch, commands):
    """A row's seeds train alike, whether a process here or a job trains them."""
    commands(sbatch="echo Submitted batch job 42", squeue="exit 0")
    monkeypatch.setattr(
        together, "_faster_executor", lambda config: pytest.fail("jobs are not measured")
    )
    few = {"methods": ["fedprox"], "forced": False}
    code, _, err = ask(
        "--workers 1 --together 2", **few, seeds=[0], grid={"federation.batch_size": [16]}
    )
    assert code == 0, err
    (run,) = tmp_path.glob("s/runs/*/fedprox/seed-0")
    (run / "summary.json").unlink()  # it was stopped
    code, out, err = ask("--slurm --time 1:00:00", **few, grid={"federation.batch_size": [16, 32]})
    assert code == 0 and "4 of 4 runs in s" in out, err
    assert executors(run.parent) == {"vmap"}
    # What the study has not had before trains in the loop, and stays with it.
    (other,) = tmp_path.glob("s/runs/*=32/fedprox")
    assert executors(other) == {"loop"}
    assert [*json.loads((tmp_path / "s/executors.json").read_text()).values()] == ["vmap", "loop"]


@pytest.mark.slow
def test_what_cannot_train_together_does_not(tmp_path):
    """Runs of several processes, and those that train in the loop: each has a worker for itself."""
    for words, want in (
        ({}, (1, 1)),
        ({"fabric.executor": "vmap"}, (8, 64)),
        ({"fabric.devices": 2}, (1, 1)),
    ):
        configs = configs_of(Study.of({**MORE, "base": [*MORE["base"], words]}))
        assert (together.most_at_once(8, configs), together.most_at_once("auto", configs)) == want
    configs = configs_of(
        Study.of(
            {**MORE, "base": [*MORE["base"], {"fabric.executor": "vmap", "fabric.devices": 2}]}
        )
    )
    assert together.most_at_once(8, configs) == 1


@pytest.mark.slow
def test_a_killed_study_comes_to_the_same(tmp_path):
    """kill -9 of the study and of the process in which the runs train; more kills:
    `kills_together.py`."""
    unlike, kills = differences(tmp_path, 4)
    assert kills == 4
    assert unlike == []


@pytest.mark.slow
def test_fewer_runs_train_at_a_time_where_memory_does_not_suffice(tmp_path, monkeypatch, capsys):
    """A line says so; none is written where there is enough, and one where it cannot be planned."""
    large = {"base": [*MORE["base"], {"model.hidden": [300], "fabric.executor": "vmap"}]}
    configs = configs_of(Study.of(MORE | large))

    def allowed(mib):
        monkeypatch.setattr(device, "free_bytes", lambda _: mib * 2**20)
        return together.within_memory(6, 1, configs), capsys.readouterr().err

    assert allowed(100_000) == (6, "")
    fits, line = allowed(700)
    assert 1 <= fits < 6
    assert line.count("\n") == 1
    figures = r"6 runs take some [\d.,]+ [MG]iB, and a process may take [\d.,]+ MiB"
    assert re.match(rf"together: {fits} at a time: {figures}\n", line)
    assert allowed(10)[0] == 1
    monkeypatch.setattr(together, "_measured_bytes", lambda config: 1 / 0)
    fits, line = allowed(700)
    assert fits == 6
    assert "the memory of 6 runs is not known (ZeroDivisionError: division by zero)" in line

"""`fl-train study` in this process (its workers are forked from it), on a few digits."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.cli import main
from fl_lightning.core.phase import Batch
from fl_lightning.foundation.files import take
from fl_lightning.lab.study import scores
from fl_lightning.lab.study.board import Board
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.lab.study.grid import Study
from fl_lightning.lab.study.launch import resolved, run_one
from fl_lightning.training import local

sys.path.append(str(Path(__file__).resolve().parents[1] / "faults"))
from forked import forked

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "fabric.accelerator": "cpu",
    "data.fraction": 0.4,
    "model": {"hidden": [16]},
    "federation.clients": 4,
    "federation.local_epochs": 1,
    "federation.rounds": 2,
}
TINY = {
    "base": ["kapc_exact_digits", SMALL],
    "methods": ["kapc", {"name": "fedprox", "mu": 0.5}],
    "seeds": [0],
    "forced": False,
}


@pytest.fixture
def ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Writes a study file, TINY with changes, and runs it; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "SLURM_PROCID", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)

    def run(words: str = "--workers 1", **changes: Any) -> tuple[int, str, str]:
        write(tmp_path, **changes)
        capfd.readouterr()
        code = main(["study", "study.yaml", "--out", "s", *shlex.split(words)])
        return code, *capfd.readouterr()

    return run


def write(folder: Path, **changes: Any) -> None:
    (folder / "study.yaml").write_text(yaml.safe_dump({**TINY, **changes}))


def table(file: Path) -> list[dict[str, str]]:
    """All of a table that must be equal between equal runs."""
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    return [
        {k: v for k, v in row.items() if not k.startswith(("seconds", "memory"))} for row in rows
    ]


def results(study: Path, only: Collection[str] | None = None) -> dict[str, Any]:
    """The tables and final weights of every run, or of those that are named."""
    found: dict[str, Any] = {}
    for run in sorted(study.glob("runs/**/seed-*")):
        if only is not None and str(run.relative_to(study)) not in only:
            continue
        newest = max(run.glob("checkpoints/manifest-*.json"))
        kept = json.loads(newest.read_text())["manifest"]
        files = [kept["server"]["file"], *(entry["file"] for entry in kept["clients"].values())]
        digests = [
            hashlib.sha256((run / "checkpoints" / file).read_bytes()).hexdigest() for file in files
        ]
        tables = [table(run / f"{name}.csv") for name in ("metrics", "clients", "final")]
        found[str(run.relative_to(study))] = (tables, digests)
    return found


def stamps(study: Path) -> dict[Path, int]:
    """When each run ended."""
    return {file: file.stat().st_mtime_ns for file in study.glob("runs/**/summary.json")}


# ---------------------------------------------------------------- what it does


def test_a_study_runs_what_is_missing_and_nothing_twice(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, err = ask()
    assert code == 0, err
    assert "2 of 2 runs finished" in out
    assert re.search(r"\[2/2\] fedprox mu=0.5, seed 0: \d\d\.\d\d % \(global\), ", err)
    study = tmp_path / "s"
    content = json.loads((study / "study.json").read_text())
    assert content["version"] == 1
    assert [cell["folder"] for cell in content["cells"]] == [
        "runs/kapc/seed-0",
        "runs/fedprox,mu=0.5/seed-0",
    ]
    for cell in content["cells"]:
        config = yaml.safe_load((study / cell["folder"] / "config.yaml").read_text())
        assert config["method"]["name"] == cell["method"]
        assert config["seed"] == cell["seed"]
        assert config["fabric"]["threads"] == 1
        assert config["loggers"] == {}
        assert [name for name, value in config["callbacks"].items() if value is not None] == [
            "checkpoint"
        ]
        assert len(table(study / cell["folder"] / "metrics.csv")) == 2
    before = stamps(study)
    code, out, err = ask(methods=["kapc", {"name": "fedprox", "mu": 0.5}, "fedavg"])
    assert code == 0
    assert "3 of 3 runs finished (2 were there)" in out
    assert before.items() <= stamps(study).items()
    assert len(stamps(study)) == 3
    assert main(["status", "s"]) == 0


def test_keys_of_the_base_can_be_set_on_the_command_line(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    words = "--workers 1 --federation.rounds 1 --data.resident=never"
    when = {"data.alpha=0.5": {"lam": 7.0}}
    methods = [{"name": "kapc", "when": when}]
    grid = {"data.alpha": [0.5]}
    code, _, err = ask(words, methods=methods, grid=grid)
    assert code == 0, err
    (run,) = stamps(tmp_path / "s")
    config = yaml.safe_load((run.parent / "config.yaml").read_text())
    assert (config["federation"]["rounds"], config["data"]["resident"]) == (1, "never")
    assert config["method"]["init_args"]["lam"] == 7.0
    code, _, err = ask(
        words, methods=[{"name": "kapc", "when": {"data.alpha=0.5": {"lam": 8.0}}}], grid=grid
    )
    assert code == 2 and "in this study 'kapc' is" in err
    code, _, err = ask("--workers 1", methods=methods, grid=grid)
    assert code == 2 and "base.federation.rounds: 2" in err  # the study has run with another base
    whole = yaml.safe_load((tmp_path / "s/study.yaml").read_text())
    assert ask(**whole)[0] == 0  # what was set is a part of it


def test_a_row_of_which_no_run_has_begun_may_change(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    row = {"name": "kapc", "label": "mine", "lam": 7.0}
    assert ask("--workers 1 --methods local", methods=["local", row])[0] == 0
    code, _, err = ask("--workers 1", methods=["local", row | {"lam": 8.0}])
    assert code == 0, err
    code, _, err = ask("--workers 1", methods=["local", row])
    assert code == 2 and "in this study 'mine' is" in err


def test_the_table_of_a_study_has_the_scores_of_compare(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    """Of all clients' final models, and not of those that took part in the last round."""
    assert ask("--workers 1 --federation.participation 0.5", methods=["local"])[0] == 0
    folder = StudyFolder(tmp_path / "s")
    (seen,) = Board(folder, folder.cells()).look(lambda _: None)
    (cell,) = scores.read([tmp_path / "s"])[0].itertuples()
    assert seen.score == pytest.approx(cell.scores.mean())
    assert abs(seen.score - cell.run.rows("metrics")[-1]["mean_accuracy"]) > 0.001


def test_the_forced_rows_are_read_off_one_run(ask: Callable[..., Any], tmp_path: Path) -> None:
    assert ask(methods=["local"], forced=True)[0] == 0
    cells = {
        cell["label"]: cell for cell in json.loads((tmp_path / "s/study.json").read_text())["cells"]
    }
    run = tmp_path / "s" / cells["fedavg after"]["folder"]
    assert run == tmp_path / "s" / cells["fedavg finetuned"]["folder"]
    last = [row for row in table(run / "clients.csv") if row["round"] == "2"]
    final = table(run / "final.csv")
    assert {row["model"] for row in final} == {"after"}
    # of every client, so of this
    assert [row["accuracy"] for row in final] == [row["accuracy_after"] for row in last]
    assert all(
        row[f"accuracy_{cells[label]['judge']}"]
        for row in last
        for label in ("fedavg after", "fedavg finetuned")
    )


def test_a_failing_run_is_named_and_the_others_run_on(
    ask: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    methods = ["ktpfl", "local"]
    code, out, err = ask(methods=methods)
    assert code == 1
    assert out == ""
    assert "ktpfl, seed 0 failed: " in err
    assert "error: 1 of 2 runs failed (ktpfl, seed 0), the first: " in err.splitlines()[-1]
    assert "Traceback" not in err
    assert [file.parent.parent.name for file in stamps(tmp_path / "s")] == ["local"]
    assert main(["status", "s"]) == 0
    said = capfd.readouterr().out
    assert "1 of 2 runs finished, 1 failed" in said
    assert "runs/ktpfl/seed-0: " in said


def test_a_part_is_run_first_and_the_rest_later(ask: Callable[..., Any], tmp_path: Path) -> None:
    """The table names the whole study from the start; a later call runs what is missing, and
    nothing again."""
    whole = {
        "grid": {"data.alpha": [0.1, 0.3], "federation.clients": [3, 4]},
        "methods": ["local", "kapc"],
    }
    part = "--workers 1 --methods local --seeds 0 --settings data.alpha=0.3,federation.clients=4"
    code, out, err = ask(part, **whole)
    assert code == 0, err
    assert "1 of 1 runs finished, of the 8 of the whole study" in out
    first = stamps(tmp_path / "s")
    assert [str(file.parent.relative_to(tmp_path)) for file in first] == [
        "s/runs/data.alpha=0.3,federation.clients=4/local/seed-0"
    ]
    assert len(json.loads((tmp_path / "s/study.json").read_text())["cells"]) == 8
    code, out, err = ask(
        "--workers 1 --seeds 3 --methods kapc --settings federation.clients=3", **whole
    )
    # a seed beside the study's own
    assert code == 0 and "2 of 2 runs finished, of the 16 of the whole study" in out
    assert len(stamps(tmp_path / "s")) == 3
    code, out, err = ask(
        "--workers 1 --seeds 0,3 --methods local --settings data.alpha=0.3", **whole
    )
    assert code == 0 and "4 of 4 runs finished (1 were there), of the 16" in out
    assert first.items() <= stamps(tmp_path / "s").items()


def test_a_part_comes_with_the_forced_rows_and_keeps_what_else_failed(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    more = {
        "forced": True,
        "seeds": [0, 1],
        "methods": ["kapc", {"name": "fedper", "label": "fedper"}],
    }
    code, _, err = ask("--workers 1 --methods kapc --seeds 1", **more)
    assert code == 0, err
    ended = sorted(
        str(file.parent.relative_to(tmp_path / "s/runs")) for file in stamps(tmp_path / "s")
    )
    assert ended == ["fedavg,personalised/seed-1", "kapc/seed-1", "local/seed-1"]
    file = tmp_path / "s/failures.json"
    file.write_text('{"runs/fedper/seed-0": "no data", "runs/kapc/seed-0": "no data"}')
    assert ask("--workers 1 --methods kapc --seeds 0", **more)[0] == 0
    assert json.loads(file.read_text()) == {"runs/fedper/seed-0": "no data"}


@pytest.mark.parametrize("content", ["", "{", "3", "null", "[1]"])
def test_damaged_failures_are_passed_over(content: str, tmp_path: Path) -> None:
    (tmp_path / "failures.json").write_text(content)
    assert StudyFolder(tmp_path).failures() == {}


def test_a_study_grows_and_does_not_change(ask: Callable[..., Any], tmp_path: Path) -> None:
    assert ask(methods=["local"])[0] == 0
    kept = {path: path.read_bytes() for path in (tmp_path / "s").glob("study.*")}
    assert len(kept) == 2
    for said, changes in [
        (
            "base.federation.local_epochs: 2",
            {"base": ["kapc_exact_digits", SMALL, {"federation.local_epochs": 2}]},
        ),
        ("study: 'without s/runs/local/seed-0'", {"methods": ["fedavg"]}),
        (
            "study: 'without s/runs/local/seed-0'",
            {"methods": ["local"], "grid": {"data.alpha": [0.1]}},
        ),
        (
            "methods[0]: {'name': 'local', 'epochs': 3}",
            {"methods": [{"name": "local", "epochs": 3, "label": "local"}]},
        ),
    ]:
        code, _, err = ask(**changes)
        assert code == 2
        assert said in err and err.count("\n") == 1
        assert kept == {path: path.read_bytes() for path in (tmp_path / "s").glob("study.*")}
    # Seeds that have been run stay beside others.
    assert ask(methods=["local"], seeds=[1])[0] == 0
    assert [
        cell["seed"] for cell in json.loads((tmp_path / "s/study.json").read_text())["cells"]
    ] == [1, 0]
    assert ask(methods=["local"])[0] == 0
    kept = {path: path.read_bytes() for path in (tmp_path / "s").glob("study.*")}
    # A study that began before there was some key goes on where that has its default.
    file = tmp_path / "s/study.yaml"
    file.write_text(file.read_text().replace("    score_on: test\n", ""))
    assert len(file.read_text()) < len(kept[file]) and ask(methods=["local"])[0] == 0
    assert file.read_bytes() == kept[file]
    # What is the same said otherwise is the same, and so is the study's own file.
    assert ask(base=str(tmp_path / "s/study.yaml"), methods=["local"])[0] == 2
    whole = yaml.safe_load((tmp_path / "s/study.yaml").read_text())
    assert ask(**whole)[0] == 0
    assert ask(methods=["local"], base=[whole["base"], {"data.root": None}])[0] == 0


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("methods[0].lamda: 1", {"methods": [{"name": "kapc", "lamda": 1}]}),
        ("methods[1].mu: 'much'", {"methods": ["kapc", {"name": "fedprox", "mu": "much"}]}),
        (
            "methods[1]: 'kapc lam=0.05' is not allowed; it comes to the same as methods[0]",
            {"methods": ["kapc", {"name": "kapc", "lam": 0.05}]},
        ),
        ("methods[0]: 'no.such.Method'", {"methods": ["no.such.Method"]}),
        ("data.alpha: -1", {"grid": {"data.alpha": [0.1, -1]}}),
        ("data.alhpa: 1", {"grid": {"data.alhpa": [1]}}),
        ("config: 'nothing'", {"base": "nothing"}),
        ("base: 3", {"base": [3]}),
        ("federation.ronds: 3", {"base": {"federation.ronds": 3}}),
        ("base.out: 'x'", {"base": {"out": "x"}}),
        ("optimizer.lr: 'x'", {"methods": [{"name": "kapc", "optimizer.lr": "x"}]}),
        ("seeds: '3-1'", {"seeds": "3-1"}),
        ("rows: 1", {"rows": 1}),
        (
            "methods[1]: 'a,b' is not allowed; methods[0] is called so, too",
            {"methods": [{"name": "kapc", "label": "a b"}, {"name": "fedprox", "label": "a,b"}]},
        ),
        (
            "forced: 'fedavg personalised' is not allowed; methods[0] is called so, too",
            {"methods": [{"name": "fedavg", "label": "fedavg,personalised"}], "forced": True},
        ),
    ],
)
def test_a_bad_study_is_one_line_before_anything_is_written(
    said: str, changes: dict[str, Any], ask: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, err = ask(**changes)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "study: it must be given once"),
        ("a.yaml b.yaml --out s", "study: 'a.yaml b.yaml' is not allowed; it must be given once"),
        ("study.yaml", "out: it must be given"),
        ("none.yaml --out s", "none.yaml"),
        ("study.yaml --out s --workers 0", "workers: 0"),
        ("study.yaml --out s --time 3", "it needs slurm"),
        ("study.yaml --out s --slurm", "time: None"),
        (
            "study.yaml --out s --slurm --time 3 --together 2",
            "together: 2 is not allowed; with slurm",
        ),
        ("study.yaml --out s --worker 3", "did you mean workers"),
        ("study.yaml --out other", "something else"),
        ("bad.yaml --out s", "line 1, column"),
        (
            "study.yaml --out s --methods kapc,kap",
            "methods: 'kap' is not allowed; the study has no such method",
        ),
        ("study.yaml --out s --methods kap", "did you mean kapc"),
        ("study.yaml --out s --seeds x", "seeds: 'x'"),
        (
            "study.yaml --out s --settings data.alpha=1",
            "settings: 'data.alpha=1' is not allowed; the study's grid",
        ),
    ],
)
def test_bad_words(
    words: str,
    said: str,
    ask: Callable[..., Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path)
    (tmp_path / "bad.yaml").write_text("a: [1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    assert main(["study", *shlex.split(words)]) == 2
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_another_study_that_came_between_is_seen(
    ask: Callable[..., Any], tmp_path: Path, monkeypatch
) -> None:
    """Between the first look at the folder and its lock data may be loaded, for minutes."""

    def meanwhile(configs: Any) -> None:
        monkeypatch.setattr("fl_lightning.lab.study.launch.fetch", lambda configs: None)
        assert (
            ask(base=["kapc_exact_digits", SMALL, {"optimizer.lr": 0.3}], methods=["local"])[0] == 0
        )

    monkeypatch.setattr("fl_lightning.lab.study.launch.fetch", meanwhile)
    code, _, err = ask()
    assert (
        code == 2
        and "base.optimizer.lr: 0.05" in err
        and "for another base give another --out" in err
    )
    assert [file.parent.parent.name for file in stamps(tmp_path / "s")] == ["local"]


def test_two_studies_do_not_write_to_one_folder(ask: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with take(tmp_path / "s" / "lock"):
        code, _, err = ask()
    assert code == 2
    assert "a study is going on in it" in err
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["lock"]


def test_slurm_gets_an_array_of_what_is_missing(
    ask: Callable[..., Any], tmp_path: Path, monkeypatch
) -> None:
    code, out, err = ask("--slurm --time 1:00:00 --dry-run")
    assert code == 0, err
    assert "#SBATCH --array=0-1\n" in out and '#SBATCH --job-name="s"\n' in out
    assert not (tmp_path / "s").exists()
    (tmp_path / "sbatch").write_text('#!/bin/bash\ncp "$1" got; echo Submitted batch job 42\n')
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "sinfo").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, out, err = ask("--slurm --time 1:00:00")
    assert code == 0, err
    assert "Submitted batch job 42" in out
    text = (tmp_path / "got").read_text()
    lines = [
        shlex.split(shlex.split(line)[0])
        for line in text.split("RUNS=(\n")[1].split("\n)\n")[0].splitlines()
    ]
    monkeypatch.chdir("/")
    assert (
        main(["fit", "--resume", "--fabric.num_nodes", "1", "--fabric.devices", "1", *lines[0]])
        == 0
    )
    monkeypatch.chdir(tmp_path)
    assert [str(file.relative_to(tmp_path)) for file in stamps(tmp_path / "s")] == [
        "s/runs/kapc/seed-0/summary.json"
    ]
    code, out, _ = ask("--slurm --time 1:00:00 --dry-run")
    assert "seed-0" in out and "/kapc" not in out and "--array" not in out


def test_the_pages_studies_are_understood() -> None:
    text = (ROOT / "docs" / "studies.md").read_text()
    found = [block.partition("```")[0] for block in text.split("```yaml\n")[1:]]
    assert found
    for block in found:
        _, runs, configs = resolved(Study.of(yaml.safe_load(block)))
        assert len(runs) == len(configs) > 0


# ---------------------------------------------------------------- equal terms

SOME = ("fedavg", "kapc", "ditto", "local")
MORE = (
    "fedavg",
    "fedprox",
    "fedper",
    "fedrep",
    "scaffold",
    "fedamp",
    "cfl",
    "fedbabu",
    "pfedgraph",
    "ifca",
)
"""Some that train the user's own network: others add modules to it, and the rest of it is the
same."""


@pytest.mark.parametrize("methods", [SOME, pytest.param(MORE, marks=pytest.mark.slow)])
def test_methods_have_the_same_split_first_model_and_batches(
    methods: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one (setting, seed): what two methods draw for the same purpose, client and epoch is the
    same samples."""
    seen: dict[str, dict[Any, str]] = defaultdict(dict)
    real, at = local.batches, [""]

    def watched(
        part: Any, schedule: Any, epoch: int, first: int, count: int, drawn: int | None = None
    ) -> Any:
        for k, batch in enumerate(real(part, schedule, epoch, first, count, drawn), first):
            key = schedule.purpose, schedule.client, epoch, k, schedule.batch_size, len(part)
            seen[at[0]][key] = digest(batch)
            yield batch

    monkeypatch.setattr(local, "batches", watched)
    asked = Study.of({**TINY, "methods": list(methods), "seeds": [0, 1]})
    _, runs, configs = resolved(asked)
    runs, configs = runs[: len(methods) + 1], configs[: len(methods) + 1]  # and one of another seed
    initial: dict[str, str] = {}
    for run, config in zip(runs, configs, strict=True):
        at[0] = f"{run.entry.label} {run.seed}"
        assert run_one((config, tmp_path / run.folder)) is None, at[0]
        file = tmp_path / run.folder / "checkpoints" / "initial.safetensors"
        initial[at[0]] = hashlib.sha256(file.read_bytes()).hexdigest()
    same = [f"{name} 0" for name in methods]
    assert len({initial[name] for name in same}) == 1
    for name in same:
        common = seen["fedavg 0"].keys() & seen[name].keys()
        assert {seen["fedavg 0"][key] for key in common} == {seen[name][key] for key in common}
        assert all(seen["fedavg 0"][key] == seen[name][key] for key in common)
        assert common == seen["fedavg 0"].keys() and len(common) > 10
    assert initial["fedavg 1"] != initial["fedavg 0"]
    common = seen["fedavg 0"].keys() & seen["fedavg 1"].keys()
    assert all(seen["fedavg 0"][key] != seen["fedavg 1"][key] for key in common)


def digest(batch: Batch) -> str:
    found = hashlib.sha256()
    for tensor in batch:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


# ---------------------------------------------------------------- faults

LONG = {
    "methods": ["kapc", "fedavg"],
    "seeds": "0-2",
    "forced": True,
    "base": ["kapc_exact_digits", SMALL, {"federation.rounds": 6}],
}


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.slow
def test_killed_again_and_again_it_ends_as_if_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of a study with two workers, 20 times; what stood is not run again."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **{**LONG, "base": [*LONG["base"], {"federation.rounds": 25}]})
    assert main(["study", "study.yaml", "--out", "whole", "--workers", "1"]) == 0
    whole = results(tmp_path / "whole")
    argv = ["study", "study.yaml", "--out", "s", "--workers", "2"]
    code, stood = -9, stamps(tmp_path / "s")
    for kill in range(21):
        attempt, before = forked(argv, tmp_path / "said"), rows(tmp_path / "s")
        wanted, moment = kill % 6, time.monotonic() + 0.1 * (kill % 5)  # new rounds, or that soon
        while kill < 20 and (
            rows(tmp_path / "s") < before + wanted or (not wanted and time.monotonic() < moment)
        ):
            assert not attempt.ended(), attempt.err
            time.sleep(0.002)
        if kill < 20:
            workers = children(attempt.pid)
            attempt.send(signal.SIGKILL)
            assert not any(wait_for_end(pid) for pid in workers)  # they end with it, at once
        code, now = attempt.wait(), stamps(tmp_path / "s")
        assert code == (-9 if kill < 20 else 0), attempt.err
        assert stood.items() <= now.items()
        stood = now
    assert results(tmp_path / "s") == whole


def rows(study: Path) -> int:
    """Rounds that have been written."""
    return sum(file.read_text().count("\n") - 1 for file in study.glob("runs/**/metrics.csv"))


def wait_for_end(pid: int) -> bool:
    """Whether a process is still there after two seconds."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.005)
    return True


@pytest.mark.slow
def test_a_killed_worker_costs_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **LONG)
    attempt = forked(["study", "study.yaml", "--out", "s", "--workers", "1"], tmp_path / "said")
    while not list((tmp_path / "s").glob("runs/**/metrics.csv")):
        time.sleep(0.01)
    (worker,) = children(attempt.pid)
    os.kill(worker, signal.SIGKILL)
    assert attempt.wait() == 1
    assert "failed: its process died (killed by SIGKILL)" in attempt.err
    assert len(stamps(tmp_path / "s")) == 11
    assert main(["study", "study.yaml", "--out", "s", "--workers", "1"]) == 0
    assert len(stamps(tmp_path / "s")) == 12


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_says_how_to_go_on(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **LONG)
    line = ["study", "study.yaml", "--out", "s", "--workers", "2"]
    attempt = forked(line, tmp_path / "said")
    while not list((tmp_path / "s").glob("runs/**/metrics.csv")):
        time.sleep(0.01)
    attempt.send(number)
    start = time.monotonic()
    assert attempt.wait() == code
    assert time.monotonic() - start < 10
    assert f"it goes on with: fl-train {shlex.join(line)}" in attempt.err
    assert "Traceback" not in attempt.err
    assert main(line) == 0


@pytest.mark.slow
def test_workers_stay_up_and_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **LONG)
    for workers in ("1", "2"):
        assert main(["study", "study.yaml", "--out", f"s{workers}", "--workers", workers]) == 0
    assert results(tmp_path / "s1") == results(tmp_path / "s2")
    logs = [
        file.read_text().count("---- ") for file in sorted((tmp_path / "s2" / "logs").iterdir())
    ]
    assert len(logs) == 2
    assert sum(logs) == 12 and min(logs) > 1
    # As `fl-train fit` has it, alone.
    config = str(tmp_path / "s1/runs/kapc/seed-1/config.yaml")
    assert main(["fit", "--config", config, "--out", "alone/runs/kapc", "--name", "seed-1"]) == 0
    assert results(tmp_path / "alone").items() <= results(tmp_path / "s1").items()

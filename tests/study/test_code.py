"""Own code that is edited under a study, a search or a comparison."""

import json
import sys
from pathlib import Path

import pytest
from refusals import refused_line

from fl_lightning.cli import main
from fl_lightning.results import owncode

from .small import SMALL

ONE_ROUND = {**SMALL, "federation.rounds": 1}
METHOD = '''
from dataclasses import dataclass
from fl_lightning.methods import Method
from {name}_steps import SIGN

@dataclass(frozen=True)
class Mine(Method):
    """FedAvg by another name."""
'''


@pytest.fixture
def ask(on_study, monkeypatch):
    """Runs a command in a folder with a study of a method of one's own, as a new process would;
    code, out, err."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits within a second of one another

    def run(words, **changes):
        for name in [name for name in sys.modules if name.startswith("fl_own_study")]:
            del sys.modules[name]
        asked = {
            "base": ["kapc_exact_digits", ONE_ROUND],
            "methods": ["fl_own_study.Mine"],
            "seeds": [0],
            "forced": False,
        }
        return on_study(words, asked | changes)

    Path("fl_own_study.py").write_text(METHOD.format(name="fl_own_study"))
    edit(1)
    return run


def edit(sign):
    """The file that the method's imports."""
    Path("fl_own_study_steps.py").write_text(f"SIGN = {sign}\n")


@pytest.mark.slow
def test_seeds_that_are_added_after_an_edit_are_refused(ask, tmp_path):
    line = "study study.yaml --out s --workers 1"
    assert ask(line)[0] == 0
    edit(-1)
    before = (tmp_path / "s/study.json").read_bytes()
    assert refused_line(ask(line, seeds=[0, 1])).startswith(
        "code='fl_own_study_steps.py': runs in s were trained with another version"
    )
    assert (tmp_path / "s/study.json").read_bytes() == before and not list(
        tmp_path.glob("s/runs/*/seed-1")
    )
    # A row of another method, with models and data of the package's, has nothing to do with it.
    assert ask(line, methods=["fl_own_study.Mine", "fedavg"])[0] == 0
    assert len(list(tmp_path.glob("s/runs/fedavg/seed-*/summary.json"))) == 1
    # Accepted, it is kept and said; what was accepted once is so for the next call.
    both = {"methods": ["fl_own_study.Mine", "fedavg"]}
    assert ask(f"{line} --accept-changed-code", seeds=[0, 1], **both)[0] == 0
    assert ask(line, seeds=[0, 1, 2], **both)[0] == 0
    texts = [
        (tmp_path / f"s/runs/mine/seed-{k}/source/fl_own_study_steps.py").read_text()
        for k in (0, 1, 2)
    ]
    assert texts == ["SIGN = 1\n", "SIGN = -1\n", "SIGN = -1\n"]
    code, out, err = ask("compare s")
    assert code == 0, err
    said = " ".join(out.split())
    assert "mine: its runs were trained with 2 versions of fl_own_study_steps.py" in said
    first, second = (
        owncode.recorded_digests(tmp_path / f"s/runs/mine/seed-{k}")["fl_own_study_steps.py"]
        for k in (0, 1)
    )
    assert f"seeds 0 with {first[:8]}; seeds 1, 2 with {second[:8]}" in said
    assert ask("archive s")[0] == 0
    line_of = next(part for part in out.splitlines() if part.startswith("mine: its runs"))
    assert line_of in ask("compare s.zip")[1].splitlines()
    edit(2)  # a third version
    assert ask(line, seeds=[0, 1, 2, 3], **both)[0] == 2


@pytest.mark.slow
def test_a_model_is_every_rows(ask, tmp_path):
    model = "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self):\n"
    model += "        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
    Path("fl_own_study_net.py").write_text(model)
    base = ["kapc_exact_digits", {**ONE_ROUND, "model": "fl_own_study_net.Net"}]
    assert ask("study study.yaml --out s --workers 1", base=base, methods=["fedper"])[0] == 0
    Path("fl_own_study_net.py").write_text(f"{model}# edited\n")
    line = refused_line(
        ask("study study.yaml --out s --workers 1", base=base, methods=["fedper", "fedavg"])
    )
    assert line.startswith("code='fl_own_study_net.py': ")


@pytest.mark.slow
def test_a_job_that_waits_in_a_queue_is_held_to_what_was_submitted(ask, tmp_path, commands):
    sbatch = 'cp "$1" got; echo Submitted batch job 42'
    commands(sbatch=sbatch, squeue="exit 0")
    line = "study study.yaml --out s --slurm --time 1:00:00"
    assert ask(line)[0] == 0
    fit = "fit --resume --out s/runs/mine --name seed-0"
    edit(-1)
    assert refused_line(ask(fit)).startswith(
        "code='fl_own_study_steps.py': it has changed since s/runs/mine/seed-0"
    )
    assert ask(line)[0] == 0  # nothing of it had run: submitted again it is the new version
    assert "accept_changed_code" not in (tmp_path / "got").read_text()
    assert ask(fit)[0] == 0
    edit(1)
    (tmp_path / "s/runs/mine/seed-0/summary.json").unlink()
    assert ask(line)[0] == 2
    assert ask(f"{line} --accept_changed_code")[0] == 0
    assert "--name seed-0 --accept_changed_code" in (tmp_path / "got").read_text()


@pytest.mark.slow
def test_trials_of_one_search_have_one_code(ask, tmp_path):
    line = "tune study.yaml --out t --trials 1 --workers 1 --study false"
    assert ask(line)[0] == 0
    edit(-1)
    assert refused_line(ask(line)).startswith(
        "code='fl_own_study_steps.py': the trials in t began with another version"
    )
    assert ask(f"{line} --accept_changed_code")[0] == 0
    assert ask(line)[0] == 0


def versioned(run, digest):
    """`run`, with a record of own code."""
    entry = {"first_round": 1, "folder": "source", "code": {"mine.py": digest}, "changed": []}
    (run / "source").mkdir()
    (run / owncode.ROUNDS).write_text(json.dumps([entry]))
    return run


def test_runs_of_a_row_with_different_code_are_refused(
    make_run,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(tmp_path)
    for seed, digest in ((0, "aaaaaaaaaa"), (1, "bbbbbbbbbb")):
        versioned(make_run(f"mine-{seed}", [0.5, 0.6], method="mine.Mine", seed=seed), digest)
        make_run(f"fedavg-{seed}", [0.5, 0.7], method="fedavg", seed=seed)
    words = ["compare", *(f"{name}-{seed}" for name in ("fedavg", "mine") for seed in (0, 1))]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "compare='mine': its runs were trained with 2 versions of mine.py" in err
    assert main([*words, "--accept_changed_code"]) == 0
    assert "seeds 0 with aaaaaaaa; seeds 1 with bbbbbbbb" in " ".join(
        capsys.readouterr().out.split()
    )

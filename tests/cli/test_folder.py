import errno
import re
from pathlib import Path

import pytest
import yaml
from lines import run_line

from fl_lightning.cli import main
from fl_lightning.foundation import launcher
from fl_lightning.foundation.errors import MachineFailed


def saved(folder):
    content = yaml.safe_load(Path(folder, "config.yaml").read_text())
    return content


def rows(folder, done):
    """A run folder's metrics of `done` rounds."""
    lines = ["round,mean_accuracy", *(f"{t},0.5" for t in range(1, done + 1))]
    Path(folder, "metrics.csv").write_text("\n".join(lines) + "\n")


def test_a_run_is_named_after_its_config_else_method_data_and_seed_and_counted(engine):
    for _ in range(2):
        assert run_line("fit --config kapc_exact_digits.yaml") == 0
    assert run_line("fit --config kapc_exact_digits.yaml --method fedavg --seed 3") == 0
    Path("fields.csv").write_text("red,label\n0.5,a\n")
    assert run_line("fit --method fedavg --out other --data.root fields.csv") == 0
    assert [str(folder) for _, folder, _ in engine.calls] == [
        "runs/kapc_exact_digits-001",
        "runs/kapc_exact_digits-002",
        "runs/kapc_exact_digits-003",
        "other/fedavg-fields-seed0-001",
    ]
    assert saved("runs/kapc_exact_digits-001")["federation"]["clients"] == 10


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--config kapc_exact_digits", "fl-train fit --name kapc_exact_digits-001 --resume"),
        (
            "--method fedavg --out there --name 'a b'",
            "fl-train fit --out there --name 'a b' --resume",
        ),
    ],
)
def test_ctrl_c_says_how_to_go_on(engine, capsys, flags, said):
    def stop():
        raise KeyboardInterrupt

    engine.action = stop
    assert run_line(f"fit {flags}") == 130
    assert capsys.readouterr().err == f"fl-train: stopped; it goes on with: {said}\n"
    assert (
        run_line(said.removeprefix("fl-train ")) == 130
    )  # and so it does, from here, and says so again
    assert engine.calls[-1][1:] == (engine.calls[0][1], True)
    assert capsys.readouterr().err == f"fl-train: stopped; it goes on with: {said}\n"


def test_ctrl_c_before_a_checkpoint_says_that_the_run_begins_again(engine, capsys):
    def stop():
        rows("runs/a", 3)
        raise KeyboardInterrupt

    engine.action = stop
    assert run_line("fit --name a") == 130
    assert capsys.readouterr().err == (
        "fl-train: stopped; it goes on from its start, since it has no checkpoint yet, with: "
        "fl-train fit --name a --resume\n"
    )


@pytest.mark.parametrize(
    "flags, said",
    {
        "--name=": "name=",
        "--name=..": "name=",
        "--name=a/b": "name=",
        "--name=/a": "name=",
        "--out file": "out='file'",
        "--resume": "resume=",
    }.items(),
)
def test_names_that_are_no_folder(refused, flags, said):
    Path("file").write_text("")
    assert refused(f"fit {flags}").startswith(said)


@pytest.mark.parametrize("left", [["lock"], ["lock", ".config.yaml.part"]])
def test_what_a_first_start_left_before_its_config_does_not_stop_the_next(engine, left):
    Path("runs/a").mkdir(parents=True)
    for name in left:
        Path("runs/a", name).touch()
    assert run_line("fit --config kapc_exact_digits --name a --resume") == 0
    assert saved("runs/a")["federation"]["clients"] == 10


def test_a_full_disk_leaves_the_config_of_a_run_that_is_resumed(engine, monkeypatch, capsys):
    assert run_line("fit --config kapc_exact_digits --name a") == 0
    before = saved("runs/a")

    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    def stop():
        monkeypatch.setattr("fl_lightning.foundation.files.os.replace", full)
        monkeypatch.setattr(Path, "write_bytes", full)
        raise MachineFailed("cannot write runs/a/split.csv: No space left on device")

    engine.action = stop
    assert run_line("fit --name a --resume") == 1
    assert (
        capsys.readouterr().err
        == "fl-train: error: cannot write runs/a/split.csv: No space left on device\n"
    )
    assert saved("runs/a") == before


def test_a_first_start_is_said_and_wants_a_config(engine, refused, capfd):
    """A name that was mistyped would else begin a run of the defaults, without a word."""
    assert run_line("fit --config kapc_exact_digits --name long-night --resume") == 0
    assert (
        capfd.readouterr().err
        == "resume: there is no run 'long-night' in runs yet: it starts now\n"
    )
    assert run_line("fit --config kapc_exact_digits --name other") == 0
    said = refused("fit --name long-nigth --resume --federation.rounds 40")
    assert said.startswith("name='long-nigth'") and "did you mean long-night?" in said
    assert "runs there: long-night, other" in refused("fit --name zzz --resume --method fedavg")
    assert "runs there: none" in refused("fit --name zzz --resume --out nowhere")
    assert (
        len(engine.calls) == 2
        and not Path("runs/long-nigth").exists()
        and not Path("nowhere").exists()
    )
    assert run_line("fit --name long-night --resume") == 0
    assert capfd.readouterr().err == ""


def test_resume_may_extend_move_and_relog(engine):
    assert run_line("fit --config kapc_exact_digits --name a") == 0
    flags = (
        "--federation.rounds 40 --fabric.devices 2 --loggers null --callbacks.progress null "
        "--data.resident never"
    )
    assert run_line(f"fit --config kapc_exact_digits --name a --resume {flags}") == 0
    assert saved("runs/a")["federation"]["rounds"] == engine.calls[-1][0].federation.rounds == 40


@pytest.mark.parametrize(
    "flags, told",
    {
        "--data.alpha 0.5": "data.alpha=0.5.*0.1",
        "--seed 1": "seed=1.*0",
        "--method.lam 3": "method.lam=3.0",
        "--method fedavg": "method='fedavg'.*'kapc'",
        "--model.hidden [65]": "model.hidden=",
        "--callbacks.checkpoint null": "callbacks.checkpoint",
    }.items(),
)
def test_resume_with_another_changed_key(engine, refused, flags, told):
    line = "fit --config kapc_exact_digits --name a"
    assert run_line(line) == 0
    before = saved("runs/a")
    error = refused(f"{line} --resume {flags}")
    assert re.match(told, error), error
    assert saved("runs/a") == before


def test_resume_without_a_config_goes_on_as_it_was(engine, refused):
    assert run_line("fit --config kapc_exact_digits --name a --data.alpha 0.7") == 0
    assert run_line("fit --name a --resume --federation.rounds 30") == 0
    config = engine.calls[-1][0]
    assert (config.data.alpha, config.federation.rounds) == (0.7, 30)
    assert refused("fit --name a --resume --seed 5").startswith("seed=5")


def test_resume_without_a_config_knows_the_callbacks_of_the_run(engine, tmp_path):
    name = f"watch_{tmp_path.name.replace('-', '_')}"
    Path(f"{name}.py").write_text(
        "from fl_lightning.callbacks.heatmaps import Heatmaps\nclass Own(Heatmaps): pass\n"
    )
    assert run_line(f"fit --name a --loggers {name}.Own") == 0
    assert run_line("fit --name a --resume --loggers.own.every 2") == 0
    assert engine.calls[-1][0].loggers["own"].init_args["every"] == 2


def test_resume_cannot_undo_rounds(engine, refused):
    assert run_line("fit --config kapc_exact_digits --name a") == 0
    rows("runs/a", 8)
    line = "fit --config kapc_exact_digits --name a --resume"
    assert "has done 8" in refused(f"{line} --federation.rounds 7")
    assert run_line(f"{line} --federation.rounds 8") == 0


def started_by_torchrun(monkeypatch, rank):
    """As one of two processes."""
    for name in launcher.TORCHRUN:
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else str(rank))


def test_other_ranks_leave_the_folder_to_rank_0(engine, monkeypatch):
    started_by_torchrun(monkeypatch, rank=1)
    Path("runs/a").mkdir(parents=True)
    assert run_line("fit --name a") == 0
    assert main(["fit"]) == 0
    assert [p.name for p in Path("runs").rglob("*")] == ["a"]
    monkeypatch.setenv("RANK", "0")
    assert run_line("fit --name b") == 0
    assert Path("runs/b/config.yaml").exists()


def test_other_ranks_do_not_judge_the_folder(engine, monkeypatch):
    """They may come when it is there and its config.yaml is not yet."""
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/lock").touch()
    Path("runs/a/notes.txt").touch()
    line = "fit --config kapc_exact_digits --name a --resume"
    assert run_line(line) == 2
    started_by_torchrun(monkeypatch, rank=1)
    assert run_line(line) == 0

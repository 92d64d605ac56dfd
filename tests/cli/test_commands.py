from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.cli import COMMANDS, main
from fl_lightning.configuration.catalogue import KINDS, families, table
from fl_lightning.configuration.config import EvaluationConfig


def test_print_config_prints_and_does_nothing_else(
    engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["fit", "--config", "kapc_exact_digits", "--print_config", "--method.lam", "3"]) == 0
    )
    assert yaml.safe_load(capsys.readouterr().out)["method"]["init_args"]["lam"] == 3
    assert not engine.calls
    assert not Path("runs").exists()


def test_the_engine_gets_the_resolved_config(engine: Any) -> None:
    assert main(["fit", "--config", "kapc_mnist", "--method", "fedprox", "--smoke"]) == 0
    ((config, folder, resume),) = engine.calls
    assert config.method.class_path == "fl_lightning.methods.fedprox.FedProx"
    assert config.method.init_args == {"mu": 0.01}
    assert (folder, resume, config.smoke) == (Path("runs/kapc_mnist-001"), False, True)


@pytest.mark.parametrize("kind", KINDS)
def test_list_gives_a_line_each(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    # methods are grouped by the idea that they belong to
    entries = [line for line in lines if not line.endswith(":")]
    assert [line.split()[0] for line in entries] == [
        e.name for group in families(kind).values() for e in group
    ]
    assert all(len(line.split(maxsplit=1)) == 2 for line in entries)
    assert main(["list"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert kind in out
    assert all(f"  {line}" in out for line in lines)


def test_list_of_something_else(refused: Callable[..., str]) -> None:
    assert "did you mean methods?" in refused("list", "method")


def test_test_judges_a_run_again(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", "kapc_exact_digits", "--name", "a"]) == 0
    assert main(["test", "--run", "runs/a", "--evaluation.batch_size", "7"]) == 0
    config, folder, which = engine.calls[-1]
    assert (config.evaluation.batch_size, config.federation.rounds, folder, which) == (
        7,
        20,
        Path("runs/a"),
        "last",
    )
    assert main(["test", "--run", "runs/a", "--checkpoint", "best"]) == 0
    assert engine.calls[-1] == (replace(config, evaluation=EvaluationConfig()), folder, "best")
    assert capsys.readouterr().out.split() == 2 * ["mean_accuracy", "0.75"]


def test_test_and_export_of_what_is_no_run(refused: Callable[..., str]) -> None:
    assert refused("test").startswith("run: ")
    assert refused("test", "--run", "nowhere").startswith("run: 'nowhere'")
    assert refused(
        "export", "--run", "nowhere", "--client", "0", "--out", "m.safetensors"
    ).startswith("run: 'nowhere'")


def test_test_cannot_change_the_run(engine: Any, refused: Callable[..., str]) -> None:
    assert main(["fit", "--config", "kapc_exact_digits", "--name", "a"]) == 0
    assert refused("test", "--run", "runs/a", "--data.alpha", "1").startswith("data.alpha: '1'")


def test_export_writes_the_lines_that_load_the_model(
    engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--config", "kapc_exact_digits", "--name", "a"]) == 0
    assert main(["export", "--run", "runs/a", "--client", "3", "--out", "m.safetensors"]) == 0
    assert engine.calls[-1][1:] == (
        Path("runs/a"),
        "3",
        Path("m.safetensors"),
        "last",
        "safetensors",
    )
    text = Path("m.py").read_text()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == text.splitlines()[0] and printed[-1].startswith("from m import predict")
    names: dict[str, Any] = {}
    exec(text.partition("load_model(")[0], names)
    assert names["model"].classifier.out_features == 10


def test_an_export_that_the_disk_refuses_can_be_repeated(
    engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--config", "kapc_exact_digits", "--name", "a"]) == 0
    out = Path("m.safetensors")
    monkeypatch.setattr(
        engine, "export", lambda *a, export=engine.export: (out.touch(), export(*a))[1]
    )
    line = ["export", "--run", "runs/a", "--client", "3", "--out", str(out)]
    before = sorted(Path().iterdir())

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("fl_lightning.foundation.files.os.replace", full)
        assert main(line) == 1
    assert (
        capsys.readouterr().err == "fl-train: error: cannot write m.py: No space left on device\n"
    )
    assert sorted(Path().iterdir()) == before
    assert main(line) == 0


def test_what_loads_an_exported_model_can_be_imported(
    engine: Any, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    assert main(["fit", "--config", "kapc_exact_digits", "--name", "a"]) == 0
    assert main(["export", "--run", "runs/a", "--client", "3", "--out", "1-st.safetensors"]) == 0
    assert "from _1_st import predict" in capsys.readouterr().out and Path("_1_st.py").is_file()
    error = refused("export", "--run", "runs/a", "--client", "3", "--out", "torch.safetensors")
    assert error.startswith("out: 'torch.safetensors'") and "hide the module torch" in error


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--format tar --client 0", "format: 'tar'"),
        ("--client 0 --out no/m.safetensors", "out: "),
        ("", "client: it must be given"),
    ],
)
def test_bad_exports(engine: Any, refused: Callable[..., str], flags: str, told: str) -> None:
    assert main(["fit", "--config", "kapc_exact_digits", "--name", "a"]) == 0
    assert refused(
        "export", "--run", "runs/a", "--out", "m.safetensors", *flags.split()
    ).startswith(told)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("--ronds 3", "ronds"),
        ("--federation.rounds x", "federation.rounds"),
        ("--config nothing.yaml", "config"),
        ("--method fedvag", "method"),
        ("--method.lm 3", "method.lm"),
        ("--data.alpha 0", "data.alpha"),
        ("--federation.participation 1.5", "federation.participation"),
        ("--seed", "seed"),
        ("surplus", "command line"),
    ],
)
def test_bad_input_is_one_line_that_names_key_and_value(
    refused: Callable[..., str], line: str, key: str
) -> None:
    error = refused("fit", *line.split())
    assert error.startswith(f"{key}: ")
    assert line.split()[-1] in error or line == "--seed"
    assert not Path("runs").exists()


def test_columns_of_help_and_lists_are_straight(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(rows) == len(COMMANDS) and max(map(len, rows)) <= 90
    width = max(map(len, COMMANDS))
    assert all(line[2 : width + 4] == f"{line.split()[0]:{width + 2}s}" for line in rows)
    for kind in ("configs", "studies"):
        assert main(["list", kind]) == 0
        width = max(map(len, table(kind)))
        lines = capsys.readouterr().out.splitlines()
        assert all(line.startswith(f"{line.split()[0]:{width + 2}s}") for line in lines)

"""What scripts and notebooks are given: `fl_lightning.fit` and `Run`, with the command line's
checks and no traces."""

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from lines import run_line
from refusals import refuses

import fl_lightning
from fl_lightning import Run, RunFailed, fit
from fl_lightning.callbacks import Observer
from fl_lightning.cli import COMMANDS
from fl_lightning.methods import Method

QUIET = {
    "loggers": None,
    "callbacks": {"heatmaps": None, "progress": None},
    "fabric.accelerator": "cpu",
    "fabric.threads": 1,
    "data.fraction": 0.4,
    "model.hidden": [16],
    "federation": {"clients": 4, "local_epochs": 1, "rounds": 3, "participation": 0.5},
}
FLAGS = """
--config=kapc_exact_digits --loggers=null --callbacks.heatmaps=null --callbacks.progress=null
--fabric.accelerator=cpu --fabric.threads=1 --data.fraction=0.4 --model.hidden=[16] --federation.clients=4
--federation.local_epochs=1 --federation.rounds=3 --federation.participation=0.5
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of KAPC, to which nothing is written."""
    return fit({"config": "kapc_exact_digits", **QUIET, "out": tmp_path_factory.mktemp("runs")})


class Halves(Method):
    """FedAvg by another name."""


class Stops(Observer):
    """Ctrl-C before round `at`."""

    at = 2

    def on_round_start(self, run, round, cohort):
        if round == Stops.at:
            raise KeyboardInterrupt


@pytest.fixture
def here(monkeypatch):
    """This file as a module that can be imported, as a notebook's `__main__` is."""
    module = sys.modules.setdefault("own_notebook", sys.modules[__name__])
    for cls in (Halves, Stops):
        monkeypatch.setattr(cls, "__module__", "own_notebook")
    monkeypatch.setitem(sys.modules, "own_notebook", module)


def untimed(run):
    return {
        name: column.tolist()
        for name, column in run.rounds.items()
        if not name.startswith(("seconds", "memory"))
    }


# ---------------------------------------------------------------- fit


@pytest.mark.slow
def test_a_mapping_a_file_and_flags_are_one_run(workplace):
    """Called again and again in one process, whose signal handlers stay what they were."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    one = fit({"config": "kapc_exact_digits", **QUIET})
    Path("own.yaml").write_text(
        yaml.safe_dump({**yaml.safe_load((one.folder / "config.yaml").read_text())})
    )
    other, third = fit(Path("own.yaml")), fit(FLAGS.split())
    assert [run.folder.as_posix() for run in (one, other, third)] == [
        "runs/kapc_exact_digits-001",
        "runs/own-001",
        "runs/kapc_exact_digits-002",
    ]
    assert one.config == other.config == third.config
    assert str(untimed(one)) == str(untimed(other)) == str(untimed(third))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    told = {**QUIET, "config": ["kapc_exact_digits"], "name": one.folder.name, "resume": True}
    longer = fit({**told, "federation.rounds": np.int64(4), "out": Path("runs")})
    assert longer.rounds["round"].tolist() == [1, 2, 3, 4]
    assert run_line(f"export --run {longer.folder} --client 0 --out a.safetensors") == 0


def test_a_class_stands_for_its_import_path(here):
    run = fit({**QUIET, "method": Halves, "name": "own"})
    assert run.config["method"]["class_path"] == "own_notebook.Halves"
    assert repr(run).startswith("<Run runs/own: own_notebook.Halves, 3 of 3 rounds, mean accuracy ")

    class Inside(Method):
        """Nobody can import it."""

    with refuses(r"<locals>.*define it at the top level of a module"):
        fit({**QUIET, "method": Inside})


@pytest.mark.parametrize(
    "config, said",
    [
        (["--seed"], r"^seed: it needs a value"),
        (["--seed", 3], r"^config=3: it must be a text"),
        (
            3,
            r"^config=3: it must be a mapping, a config file or its name, or "
            r"flags",
        ),
        (
            {"print_config": True, "seed": 1},
            r"^print_config=True: no such key",
        ),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_as_by_the_command(config, said, workplace):
    with refuses(said):
        fit(config)
    assert list(workplace.iterdir()) == []


@pytest.mark.slow
def test_an_extended_run_has_no_results_until_it_ends(here, monkeypatch):
    """Stopped before its first new round it has lost nothing; after it, what the shorter run's end
    left is gone."""
    of_the_end = ("final.csv", "newcomers.csv", "summary.json")
    callbacks = {**QUIET["callbacks"], "stops": {"class_path": Stops}}
    told = {
        **QUIET,
        "config": "kapc_exact_digits",
        "name": "cut",
        "resume": True,
        "callbacks": callbacks,
    }
    told |= {"data.held_out_clients": 0.25, "evaluation.newcomer_samples": [0]}
    short = fit({**told, "federation": {**QUIET["federation"], "rounds": 1}})
    before = [(short.folder / name).read_bytes() for name in of_the_end]
    assert short.summary["rounds"] == 1 and len(short.newcomers) > 0

    for stopped in (2, 3):
        monkeypatch.setattr(Stops, "at", stopped)
        with pytest.raises(KeyboardInterrupt):
            fit(told)
        if stopped == 2:
            assert [(short.folder / name).read_bytes() for name in of_the_end] == before
            config = short.folder / "config.yaml"
            # as a kill leaves it
            config.write_text(config.read_text().replace("rounds: 1\n", "rounds: 3\n", 1))
        cut = Run(short.folder)
        assert repr(cut) == f"<Run {short.folder}: kapc, {stopped - 1} of 3 rounds>"
        assert (
            cut.summary == {}
            and cut.final.empty
            and cut.newcomers.empty
            and len(cut.final_accuracies) == 0
        )
    assert not any((short.folder / name).exists() for name in of_the_end)
    monkeypatch.setattr(Stops, "at", 0)
    assert fit(told).summary["rounds"] == 3


@pytest.mark.slow
def test_several_processes_from_a_notebook(workplace):
    """An interactive interpreter has no file that its processes could read; Lightning knows it by
    `sys.ps1`."""
    config = {**QUIET, "method": "fedavg", "fabric.devices": 2}
    lines = (
        f"import sys; sys.ps1 = '>>> '\nfrom fl_lightning import "
        f"fit\nprint(fit({config!r}).summary['world_size'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["2"], done.stderr


# ---------------------------------------------------------------- the tables


def test_tables_are_those_of_the_folder(run):
    tables = {"metrics": run.rounds, "clients": run.clients, "split": run.split, "final": run.final}
    for name, table in tables.items():
        with (run.folder / f"{name}.csv").open(newline="") as file:
            written_rows = list(csv.DictReader(file))
        assert set(table) == {k for k in written_rows[0] if any(row[k] for row in written_rows)}
        for column, values in table.items():
            number = str if column == "model" else float
            written = [number(row[column]) if row[column] else np.nan for row in written_rows]
            np.testing.assert_array_equal(values, written)
    assert run.summary == json.loads((run.folder / "summary.json").read_text())
    mean = run.final_accuracies.mean()
    assert mean == pytest.approx(run.summary["final_mean_accuracy"])
    words = f"kapc, 3 of 3 rounds, mean accuracy {100 * mean:.2f} % at the end"
    assert repr(run) == f"<Run {run.folder}: {words}>"
    assert run.columns["mean_accuracy"].model == run.judge == "after"
    after = run.by_client("accuracy_after")
    assert np.isfinite(after).sum(1).tolist() == [2, 2, 2]  # half of the clients in each round
    np.testing.assert_allclose(np.nanmean(after, 1), run.rounds["accuracy_after"])
    with refuses(r"^column='accuracy_afte': choose a column of cl"):
        run.by_client("accuracy_afte")


def test_the_cube_is_the_cohorts_part_of_the_relation(run):
    assert run.relation_rounds == [1, 2, 3]
    view = run.relation(2)
    cube = run.cube(2)
    assert cube.shape == (4, len(view.layers), 4)
    assert np.flatnonzero(np.isfinite(cube).all((1, 2))).tolist() == view.receivers
    for a, receiver in enumerate(view.receivers):
        np.testing.assert_array_equal(cube[receiver][:, view.sources], view.rows[a])
        np.testing.assert_allclose(cube[receiver].sum(-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(run.cube(), run.cube(3))
    with refuses(r"^round=4: it has no stored relation: choose another; stored: 1 to 3$"):
        run.cube(4)


# ---------------------------------------------------------------- what the package gives


def test_the_package_lists_what_it_gives_and_imports_it_when_asked():
    assert set(fl_lightning.__all__) <= set(dir(fl_lightning))
    names = [name for name in fl_lightning.__all__ if name[0] != "_"]
    commands = {name.replace("-", "_") for name in COMMANDS} - {"list"}
    assert {*names} == {"BadInput", "Run", "RunFailed", "Worth", "resolved"} | commands
    assert [getattr(fl_lightning, name).__name__.rpartition(".")[2] for name in names] == names
    assert issubclass(RunFailed, Exception)
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        fl_lightning.fitt  # noqa: B018
    lines = """
import sys, fl_lightning
print([name for name in ("torch", "numpy", "jsonargparse", "yaml") if name in sys.modules])
fl_lightning.Run, fl_lightning.fit
print([name for name in ("torch", "lightning", "matplotlib", "pandas") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


class Forgotten(Method):
    """Its field is no argument: `@dataclass(frozen=True)` is missing."""

    strength: float = 0.3


def test_a_method_whose_fields_are_no_arguments_is_refused(here, monkeypatch):
    monkeypatch.setattr(Forgotten, "__module__", "own_notebook")
    for given in ({}, {"method.strength": 0.5}):
        with refuses(
            r"^method=.*Forgotten.*\(strength\): write @dataclass\(frozen=True\) above it"
        ):
            fit({**QUIET, "method": Forgotten, **given})


def test_an_error_shows_no_whole_array():
    with refuses(r"^data\.root=\[\[0\.0, .*\.\.\.: it must be text or null$") as caught:
        fit({**QUIET, "data.root": np.zeros((100, 64))})
    assert len(str(caught.value)) < 300

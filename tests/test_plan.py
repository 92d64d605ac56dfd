"""`fl-train plan`: a rehearsed round, and what a run is said to take from it."""

import csv
import json
import shlex
from dataclasses import replace

import pytest
from lines import run_line

from fl_lightning.cli import main
from fl_lightning.configuration.config import (
    Component,
    Config,
    DataConfig,
    FederationConfig,
    ModelConfig,
)
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.worker import Worker
from fl_lightning.lab.planning import rehearsal

LINE = (
    "--config kapc_exact_digits --loggers null --fabric.accelerator cpu --data.fraction 0.4 "
    "--federation.local_epochs 1"
)


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Runs `fl-train plan` with the keys of a line; returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(line):
        assert run_line(f"plan {line}") == 0, capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []  # a plan leaves nothing behind
        return capsys.readouterr().out

    return run


def config(**federation):
    return Config(
        Component("fl_lightning.methods.kapc.KAPC"),
        [ModelConfig(Component("fl_lightning.models.mlp.MLP", {"hidden": [32]}))],
        federation=FederationConfig(**({"clients": 10, "batch_size": 16} | federation)),
        data=DataConfig(partition="iid"),
    )


def test_bytes_are_those_that_a_run_counts(plan, tmp_path):
    planned = json.loads(plan(f"{LINE} --json"))
    assert (
        main(
            ["fit", "--name", "one", *shlex.split(f"{LINE} --federation.rounds 1 --callbacks null")]
        )
        == 0
    )
    with (tmp_path / "runs" / "one" / "metrics.csv").open() as file:
        [counted] = csv.DictReader(file)
    assert planned["upload"] == float(counted["upload_bytes"])
    assert planned["download"] == float(counted["download_bytes"])
    assert planned["rehearsed"] == planned["cohort"] == planned["clients"] == 10
    assert planned["memory"] > 2**27 and planned["memory_device"] is None
    assert planned["round_seconds"] == pytest.approx(sum(planned["seconds"].values()))


def test_data_that_are_not_here_are_made_up(plan, monkeypatch):
    monkeypatch.setattr(rehearsal, "BUDGET", 0.0)
    words = (
        "--config kapc_mnist --loggers null --data.download false --fabric.accelerator cpu "
        "--federation.clients 4 --model mlp --method ktpfl --data.public fashionmnist "
        "--method.samples 40 --samples 30"
    )
    assert "data: not here; 30 training samples a client were made up" in plan(words)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_short_round_of_some_clients_is_scaled_to_the_cohort(executor, monkeypatch):
    """At a known rate per sample, seconds are those of all clients' samples; the server's are as
    they were."""
    monkeypatch.setattr(rehearsal, "BUDGET", 0.0)
    monkeypatch.setattr(rehearsal, "MOST_CLIENTS", 4)
    trained = []
    train, run_round = Worker._train, Federation.round

    def counting(self, visits, jobs):
        fits = train(self, visits, jobs)
        trained.extend(fit.samples for fit in fits.values())
        return fits

    def timed(self, number, cohort):
        trained.clear()
        record = run_round(self, number, cohort)
        tests = sum(self.run.data.test_sizes[c] for c in cohort)
        client, evaluation = 1e-3 * sum(trained), 1e-4 * tests
        seconds = {
            "seconds_client": client,
            "seconds_evaluation": evaluation,
            "seconds": client + evaluation + 5,
        }
        return replace(record, metrics=record.metrics | seconds)

    monkeypatch.setattr(Worker, "_train", counting)
    monkeypatch.setattr(Federation, "round", timed)
    run = config(local_epochs=2)
    run = replace(
        run,
        fabric=replace(run.fabric, executor=executor),
        evaluation=replace(run.evaluation, every=3),
    )
    planned = rehearsal.rehearse(run)
    assert sum(trained) == 4 * 2 * 16  # a batch in each of two epochs
    data = rehearsal.data_here(run)
    assert planned.seconds == pytest.approx(
        {
            "clients": 1e-3 * 2 * sum(data.train_sizes),
            "evaluation": 1e-4 * sum(data.test_sizes) / 3,
            "server": 5.0,
        }
    )
    assert (planned.rehearsed, planned.cohort) == (4, 10)
    # A vector of the model in 32 bits and the relation's share stay with each of the other six
    # clients.
    numbers = 64 * 32 + 32 + 32 * 10 + 10
    samples = sum(data.train_sizes) + sum(data.test_sizes)
    assert planned.stored == pytest.approx(6 * 4 * (numbers + 64 * samples / 10), rel=0.05)


@pytest.mark.parametrize(
    "words, message",
    {
        "--config nosuch.yaml": "config",
        "--nosuch 3": "nosuch",
        "--samples 0": "samples",
        "study.yaml": "study.yaml",
        "--federation.rounds none": "federation.rounds",
        "--optimizer.lr 1e30 --data.fraction 0.1": "not finite",
    }.items(),
)
def test_bad_input_is_one_line(
    words,
    message,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(tmp_path)
    config_words = (
        "" if "--config" in words else "--config kapc_exact_digits --loggers null --callbacks null "
    )
    assert main(["plan", *shlex.split(config_words + words)]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("fl-train: error:") == 1 and "Traceback" not in err
    assert message in err

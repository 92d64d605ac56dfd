"""The benchmarks measure what they say: the bare loop does the engine's work, and the scripts run."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from fl_lightning import catalogue, rng
from fl_lightning.cli import main, studyfile
from fl_lightning.cli.study import resolve
from fl_lightning.config import Component, DataConfig
from fl_lightning.core.mixing import Gram
from fl_lightning.data import prepare
from fl_lightning.methods.kapc import KAPC
from fl_lightning.models.mlp import MLP
from fl_lightning.study.grid import Study

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
Load = Callable[[str], ModuleType]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports a script of the benchmarks as it is when run: with its folder on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for file in FOLDER.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture
def tiny(script: Load) -> Any:
    """Five MLP clients on noise, four of which take part in a round."""
    workload = script("workloads").workloads(FOLDER)["100-mlps-10-a-round"]
    noise = replace(workload.data, source="arrays")
    return replace(
        workload, data=noise, clients=5, participation=0.8, train_samples=173, test_samples=40, rounds_at_once=1
    )


def test_bare_loop_and_engine_reach_the_same_weights(script: Load, tiny: Any) -> None:
    assert script("speed").same_weights(tiny, rounds=3, tolerance=1e-5) < 1e-5


@pytest.mark.slow
def test_they_agree_with_batch_norm_and_a_lone_last_sample(script: Load, tiny: Any) -> None:
    resnet = Component("fl_lightning.models.resnet18.ResNet18")
    lone = replace(tiny, model=resnet, shape=(3, 8, 8), clients=2, train_samples=2 * 17, test_samples=2, local_epochs=1)
    assert script("speed").same_weights(lone, tolerance=1e-5) < 1e-5


def test_a_bare_loop_that_does_other_work_is_found_out(
    script: Load, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script("bare"), "generator", lambda seed, *ids: rng.generator(seed + 1, *ids))
    with pytest.raises(AssertionError, match="does other work"):
        script("speed").same_weights(tiny)


@pytest.mark.slow
def test_a_default_round_scores_every_kind_of_model(script: Load, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, columns = script("speed"), set[str]()
    federation = type(tiny).federation

    def noting(*args: Any, **settings: Any) -> Any:
        fed = federation(*args, **settings)
        taken = fed.round
        fed.round = lambda t: columns.update(*taken(t).clients)
        return fed

    monkeypatch.setattr(type(tiny), "federation", noting)
    rows = module.as_it_comes(tiny, 1)
    assert [row.what for row in rows] == ["a default round of FedAvg", "a default round of KAPC"]
    assert all(row.ratio > 0 and row.name == f"default-{tiny.name}" for row in rows)
    assert {"accuracy_before", "accuracy_after", "accuracy_global"} <= columns


@pytest.mark.slow
def test_only_one_benchmark_runs_and_the_others_rows_stay(
    script: Load, tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speed = script("speed")
    first, second = replace(tiny, name="first"), replace(tiny, name="second")
    known = speed.workloads(FOLDER) | {"first": first, "second": second}
    monkeypatch.setattr(speed, "workloads", lambda root: known)
    out = tmp_path / "speed.json"
    speed.main(speed.benchmarks(), ["--only", "first", "--pairs", "1", "--out", str(out)])
    speed.main(speed.benchmarks(), ["--only", "kapc-second", "--pairs", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["first", "first", "first", "kapc-second", "kapc-second"]
    assert all(row["seconds"] > 0 and row["low"] <= row["ratio"] <= row["high"] for row in rows)
    assert capsys.readouterr().out.count("| first |") == 6  # three rows, printed twice


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sides"), [("saving", 1), ("executors", 2), ("accounting", 1)])
def test_what_else_is_timed_of_a_round(script: Load, tiny: Any, kind: str, sides: int) -> None:
    rows = getattr(script("speed"), kind)(tiny, 1)
    assert len(rows) == sides
    assert all(row.seconds > 0 and row.against_seconds > 0 for row in rows)


@pytest.mark.parametrize("solver", ["step", "exact"])
def test_the_server_step_is_the_engines(script: Load, solver: Any) -> None:
    """Each receives the mix of all by its row of the cube, which the step has learned."""
    model = MLP((1, 8, 8), 10, [16])
    server = script("server").Server(model, 3, KAPC(solver=solver, start="server" if solver == "exact" else "own"))
    before = server.memory["relation"].clone()
    server.step()
    cube = server.memory["relation"]
    assert cube.shape == (3, 2, 3) and (solver == "exact" or not torch.equal(cube, before))
    for s in server.segments:
        columns = slice(s.start, s.stop)
        want = cube[:, s.layer].float() @ server.models[:, columns]
        torch.testing.assert_close(server.received[:, columns], want, rtol=1e-4, atol=1e-6)


def test_rounds_are_stamped_and_the_first_one_ends_the_process(
    script: Load, federation: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fed = federation(rounds=3, callbacks=[script("stamps").Stamps(str(tmp_path / "stamps"))])
    fed.fit()
    clock, busy = zip(*json.loads((tmp_path / "stamps.0").read_text()), strict=True)
    assert len(clock) == 3 and list(clock) == sorted(clock) and list(busy) == sorted(busy)
    first = script("stamps")
    monkeypatch.setattr(first.os, "_exit", lambda code: pytest.exit(f"{code}"))
    with pytest.raises(pytest.exit.Exception, match="0"):
        federation(callbacks=[first.FirstRound(str(tmp_path / "first.json"))]).fit()
    found = json.loads((tmp_path / "first.json").read_text())
    assert found["seconds"] > 0 and found["peak_mib"] > 100


def test_the_interval_holds_the_median_with_95_percent(script: Load) -> None:
    interval = script("measure").interval
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval([float(k) for k in range(1, 11)]) == (2.0, 9.0)  # 97.9 %; (3, 8) would be 89 %
    assert interval([float(k) for k in range(1, 31)]) == (10.0, 21.0)  # the textbook's ranks for n = 30


@pytest.mark.slow
def test_the_table_of_attackers(
    script: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One round each; a model that left the finite numbers is said to have."""
    attackers = script("attackers")
    monkeypatch.setattr(attackers, "RUN", f"{attackers.RUN} --federation.rounds 1 --evaluation.every 1")
    monkeypatch.setattr(attackers, "DEFENCES", {k: attackers.DEFENCES[k] for k in ("mean", "median")})
    monkeypatch.setitem(attackers.ATTACKS, "far off", "--callbacks.attack.kind noise --callbacks.attack.scale 1e30")
    attackers.table("iid", ["none", "far off"], seeds=1)
    none, far = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[-2:])
    assert all(0 < float(cell.split()[0]) <= 100 for cell in none[1:])
    assert far[1:] == ["diverged", "diverged |"]


def test_rows_that_are_not_learned(script: Load) -> None:
    relation = script("relation")
    sets = {
        "hsu": DataConfig(by="client", sizes="equal", alpha=0.3),
        "labels": DataConfig(partition="iid", planted="labels"),
    }
    data = {name: prepare(data, 20, 0) for name, data in sets.items()}
    for name, kind in ((n, k) for n in data for k in get_args(relation.Fixed)):
        table = relation.given(kind, data[name], 0, 3)
        assert table.shape == (3, 20, 20)
        assert table.sum(-1) == pytest.approx(np.ones((3, 20)))
        assert table.min() >= 0
    oracle = relation.given("oracle", data["labels"], 0, 1)[0]
    assert np.flatnonzero(oracle[6]).tolist() == [2, 6, 10, 14, 18]
    assert oracle[6, 2] == pytest.approx(0.2)
    counts = data["hsu"].class_counts
    overlap = [np.minimum(counts[3] / counts[3].sum(), c / c.sum()).sum() for c in counts]
    assert relation.given("oracle", data["hsu"], 0, 1)[0, 3] == pytest.approx(np.array(overlap) / sum(overlap))
    two = relation.given("random", data["labels"], 0, 2), relation.given("random", data["labels"], 1, 2)
    assert not np.allclose(two[0][0], two[0][1])  # layers differ
    assert not np.allclose(two[0], two[1])  # seeds differ


@pytest.mark.parametrize("how", ["shuffled", "others-shuffled"])
def test_shuffled_rows_are_the_learned_ones_in_the_wrong_place(script: Load, how: str) -> None:
    relation = script("relation")
    settings = relation.CubeSettings(solver="exact", rho_units="spread", beta=0.6)
    learned, wrong = relation.LearnedCube(settings), relation.Shuffled(settings, how)
    wrong.on_fit_start(SimpleNamespace(clients=6, config=SimpleNamespace(seed=0)))
    models = torch.randn(6, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centred = models - models.mean(0)
    everybody = list(range(6))
    rows = []
    for one in (learned, wrong):
        memory = one.init_server(SimpleNamespace(clients=6, layer_names=["a"]))
        gram = Gram((centred @ centred.T)[None], (centred @ models.mean(0))[None], models.mean(0).square().sum()[None])
        inputs = relation.RelationInputs(everybody, everybody, torch.ones(6), 1, 6, memory, lambda g=gram: g)
        rows.append(one.weights(inputs)[0])
    right, given = rows
    if how == "shuffled":
        places = [next(j for j in everybody if torch.equal(row, right[j])) for row in given]
        assert sorted(places) == everybody
        assert all(i != j for i, j in enumerate(places))
    else:
        assert torch.equal(given.diagonal(), right.diagonal())
        assert torch.allclose(given.sort().values, right.sort().values)
        assert not torch.allclose(given, right)


@pytest.mark.slow
def test_the_table_of_relations(script: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two rows of one data set for two rounds, and the study that chooses rho."""
    relation = script("relation")
    monkeypatch.chdir(FOLDER)
    words = ["--methods=ours uniform,ours oracle", "--settings=data.planted=labels", "--seeds=0,1", "--workers=1"]
    short = ["--federation.rounds=2", "--evaluation.every=2", f"--out={tmp_path / 'study'}"]
    assert main(["study", "relation.yaml", *words, *short]) == 0
    uniform, oracle = (line.split(" | ")[1:] for line in relation.table(tmp_path / "study").splitlines()[2:])
    assert oracle == ["ours oracle", "0.20", f"{1 - 4 / 19:.2f}", "1.00 |"]  # r_ii, own group less chance, Rand index
    assert uniform[:3] == ["ours uniform", "0.05", "0.00"]
    study = Study.of(studyfile.read("relation_rho.yaml"))
    assert {config.data.score_on for config in resolve(study)[2]} == {"validation"}


# ---------------------------------------------------------------- what a round of every method costs

DOCS = FOLDER.parent / "docs" / "methods.md"


def table(text: str, script: Load) -> dict[str, list[float]]:
    """The rows of the table of costs, by method."""
    found = {}
    for line in text.partition(" | ".join(script("costs").HEAD))[2].splitlines()[2:]:
        if not line.startswith("| `"):
            break
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[name.strip("`")] = [float(cell) for cell in cells]
    return found


def test_every_method_stands_in_the_table_of_costs(script: Load) -> None:
    assert set(table(DOCS.read_text(), script)) == set(catalogue.table("methods"))


@pytest.mark.sampled("[fedavg]")
@pytest.mark.parametrize("name", catalogue.table("methods"))
def test_the_table_of_costs_is_what_a_round_counts(script: Load, name: str) -> None:
    """Within the digits that are shown, and 5 %: how often a solver or a search goes on depends on rounding."""
    head = f"| {' | '.join(script('costs').HEAD)} |\n| --- |\n"
    now = table(head + script("costs").row(name), script)[name]
    assert now == pytest.approx(table(DOCS.read_text(), script)[name], rel=0.05, abs=0.05)


@pytest.mark.slow
def test_adapters_are_measured(script: Load, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    adapters = script("adapters")
    small = replace(tiny, model=replace(adapters.STEPS["vit-adapters-8px"].model, init_args={"depth": 1, "width": 16}))
    [row] = adapters.against_bare(replace(small, shape=(1, 8, 8)), 1)
    assert row.ratio > 0 and "numbers train" in row.note
    found = adapters.memory(40)
    assert found["vector"] / 2 < found["a_client"] and found["stays"] <= found["a_client"] and found["frozen"] > 3e5


@pytest.mark.slow
def test_a_study_is_timed_with_its_rounds(script: Load) -> None:
    wall, rounds = script("studies").study(runs=4, rounds=1, workers=1)
    assert 0 < rounds < wall


@pytest.mark.slow
def test_the_calibration_of_worth(script: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One consortium with gains and one without: lines of the file, not run again, and the table of goals."""
    worth, file = script("worth"), tmp_path / "results.jsonl"
    worth.main(["run", str(file), "--count", "2", "--cycles", "1", "--draws", "2"])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["null"] for line in lines] == [False, True]
    assert [row["size"] for row in lines[0]["silos"]] == list(worth.SIZES)
    assert all(row["true"] == 0 for row in lines[1]["silos"]) and any(row["true"] for row in lines[0]["silos"])
    before = file.read_text()
    worth.main(["run", str(file), "--count", "2", "--cycles", "1", "--draws", "2"])
    assert file.read_text() == before
    worth.main(["promises", str(file), "--first", "2", "--count", "2", "--cycles", "1"])
    last = json.loads(file.read_text().splitlines()[-1])
    assert last["number"] == 3 and last["silos"] == []
    if last["more"] and last["more"]["reached"]:
        assert last["more"]["needed"] > last["more"]["size"] and last["more"]["reached"] < last["more"]["half"]
    worth.main(["table", str(file)])
    shown = capsys.readouterr().out
    assert "4 consortia, 2 without any gain" in shown and "promised for more own samples kept" in shown


def test_the_calibrations_students_learn(script: Load) -> None:
    """Of 1,000 samples an epoch or so of steps learns most of what the teacher knows; alone is one silo's model."""
    worth = script("worth")
    world = worth.World(0)
    assert world.features == 8
    data = [world.draw(c, 1000) for c in range(len(worth.SIZES))]
    models = worth.trained([[x for x, _ in data]], [[y for _, y in data]], world, 0)
    for c in range(len(worth.SIZES)):
        x, y = world.draw(c, 4000)
        scored = worth.logits([p[:, c : c + 1] for p in models["local"]], torch.from_numpy(x)[None, None])[0, 0]
        best = ((x - world.shifts[c]) @ world.teachers[c] * world.slope / 8**0.5 + world.offsets[c] > 0) == y
        assert ((scored > 0).numpy() == y).mean() > best.mean() - 0.08


def test_runs_together_are_measured(
    script: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line with both sides; both train the same runs."""
    together = script("together")
    monkeypatch.setattr(
        sys, "argv", ["together.py", "--only", "ten-seeds", "--seeds", "2", "--rounds", "1", "--pairs", "1"]
    )
    together.main()
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("| 2 seeds of fedavg, together | ")
    loop, stacked = (float(cell) for cell in line.split(" | ")[1:3])
    assert 0 < stacked < 60
    assert 0 < loop < 60


@pytest.mark.slow
def test_an_exported_task_gives_the_same_model_by_hand(
    script: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `pfl_export` writes is enough: clipped changes, their mean and the noise give the run's global model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text("""
base:
  - {method: fedavg, data.source: digits, data.partition: iid, data.fraction: 0.3, federation.clients: 6,
     federation.participation: 0.5, federation.rounds: 3, federation.local_epochs: 2, federation.batch_size: 500,
     model: {name: mlp, init_args: {hidden: [8]}}, loggers: null, fabric.accelerator: cpu,
     optimizer.lr: 0.5}
methods:
  - {name: fedavg, label: noisy, callbacks.centralprivacy.clip: 0.1, callbacks.centralprivacy.noise: 0.5}
  - {name: fedper, label: another}
seeds: [0]
forced: false
""")
    assert main(["study", "study.yaml", "--out", "study", "--workers", "1"]) == 0
    monkeypatch.setattr(sys, "argv", ["pfl_export.py", "study", "out"])
    script("pfl_export").main()
    z = {name: torch.from_numpy(value) for name, value in np.load("out/seed-0.npz").items() if value.dtype.kind != "U"}
    assert not any(name.startswith("another/") for name in z)
    names = [name.removeprefix("initial/") for name in z if name.startswith("initial/")]
    x = ((z["x_train"].float() - z["mean"]) / z["std"]).flatten(1).split(z["n_train"].tolist())
    y = z["y_train"].split(z["n_train"].tolist())
    model = [z[f"initial/{name}"].clone() for name in names]
    for t, cohort in enumerate(z["cohorts"].tolist()):
        total = [torch.zeros_like(value) for value in model]
        for c in cohort:
            own = [value.clone().requires_grad_() for value in model]
            for _ in range(2):
                hidden = torch.relu(torch.nn.functional.linear(x[c], own[0], own[1]))
                loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, own[2], own[3]), y[c])
                slopes = torch.autograd.grad(loss, own)
                own = [(v - 0.5 * g).detach().requires_grad_() for v, g in zip(own, slopes, strict=True)]
            change = [(a - b).detach() for a, b in zip(own, model, strict=True)]
            norm = torch.cat([part.flatten() for part in change]).norm()
            for whole, part in zip(total, change, strict=True):
                whole += part * min(1.0, float(0.1 / norm))
        noise = [0.5 * 0.1 * z[f"normal/{name}"][t] for name in names]
        model = [a + (b + c) / len(cohort) for a, b, c in zip(model, total, noise, strict=True)]
    for name, value in zip(names, model, strict=True):
        torch.testing.assert_close(value, z[f"noisy/final/{name}"], rtol=1e-4, atol=1e-5)

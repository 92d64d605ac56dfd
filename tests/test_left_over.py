"""Small things that only a second reading finds: each has its test here, by the part that it
belongs to."""

import numpy as np
import pytest
import torch
from classes import GPFL, FedAvg, FedGen, FedRoD, KTPFLModels, PFedFDA, PFedHN
from watching import client_of, payload_of, server_of

from fl_lightning.callbacks.base import Transform
from fl_lightning.callbacks.exhibits import tables_to_keep
from fl_lightning.callbacks.robust import Krum
from fl_lightning.core import Phase
from fl_lightning.engine.phases import _belongs, _prefix, job_of
from fl_lightning.engine.writer import RunFolderWriter
from fl_lightning.lab import statistics
from fl_lightning.lab.study.board import state_of
from fl_lightning.lab.study.folder import StudyFolder
from fl_lightning.methods.fedalign import stretch
from fl_lightning.results.folder import RunFolder
from fl_lightning.training.schedule import stream


def test_spectral_norms_are_taken_in_32_bits_whatever_the_precision():
    """Under autocast too: there products of halves would have 8 bits."""
    a, b = (torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(k)) for k in (1, 2))
    whole = stretch(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(stretch(a, b), whole)
        assert stretch(a.bfloat16(), b.bfloat16()).dtype == torch.float32


def test_what_the_optimiser_keeps_is_of_one_slot_and_one_purpose():
    phases = [
        Phase(),
        Phase(purpose="align"),
        Phase("personal"),
        Phase("personal", purpose="align"),
    ]
    prefixes = [_prefix(phase) for phase in phases]
    assert len(set(prefixes)) == 4
    for prefix in prefixes:
        assert [other for other in prefixes if _belongs(f"{other}momentum", prefix)] == [prefix]


def test_a_few_seeds_that_differ_alike_have_no_interval():
    same = [[np.array([0.1, 0.3])], [np.array([0.3, 0.1])]]
    assert statistics.have_equal_means(same)
    assert not statistics.have_equal_means([*same, [np.array([0.1, 0.1])]])


def test_the_artifact_has_the_table_of_clients(tmp_path):
    (tmp_path / "clients.csv").write_text("round,client\n")
    assert tables_to_keep(RunFolder(tmp_path), 1) == [tmp_path / "clients.csv"]


def test_a_damaged_run_of_a_study_leaves_the_others_to_be_seen(tmp_path):
    cells = [
        {"folder": f"runs/a/seed-{seed}", "label": "a", "setting": {}, "seed": seed, "method": "a"}
        for seed in (0, 1)
    ]
    for cell, text in zip(
        cells, ("round,seconds,mean_accuracy\n1,1,0.5\n", "\0\0\n1\n"), strict=True
    ):
        folder = tmp_path / str(cell["folder"])
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(text)
    states = [state_of(StudyFolder(tmp_path), cell, lambda run: None).state for cell in cells]
    assert states == ["stopped", "unreadable"]


def test_a_run_without_any_judged_round_has_a_summary_all_the_same(tmp_path, make_run):
    run = make_run(FedAvg())
    folder = RunFolder(tmp_path)
    keeper = RunFolderWriter(folder)
    keeper.unlike = {}
    folder.read = lambda table: [_row()] if table == "metrics" else []  # type: ignore[method-assign]
    summary = keeper.summarize(run)
    assert summary["rounds"] == 2
    assert not {"best_mean_accuracy", "best_round", "last_mean_accuracy"} & summary.keys()


def test_the_seconds_of_a_resumed_run_hold_those_of_all_rounds_before(tmp_path, make_run):
    run = make_run(FedAvg())
    run.resumed_from = 2
    folder = RunFolder(tmp_path)
    rows = [_row() | {"round": t, "seconds": 1000.0 * t} for t in (1, 2, 3)]
    folder.read = lambda table: rows if table == "metrics" else []  # type: ignore[method-assign]
    summary = RunFolderWriter(folder).summarize(run)
    assert summary["wall_seconds"] == pytest.approx(3000, abs=500)


def _row():
    traffic = {
        f"{way}load{kind}_bytes": 1.0 for way in ("up", "down") for kind in ("", "_parameter")
    }
    return {"round": 1.0, "seconds": 1.0, **traffic}


def test_running_statistics_do_not_decide_who_is_alike(federation):
    """KT-pFL's relation over models goes by parameters alone, as inner products of changes do."""
    fed = federation(KTPFLModels(), net="norm")
    fed.round(1)
    before = fed.run.method.broadcast(server := server_of(fed)) and server.only.weighed.weights  # type: ignore[union-attr]
    for state in fed.run.states.values():
        state.received["model"][fed.run.groups[0].layout.parameters.stop :] *= 7 * (
            state.client + 1
        )
    fed.run.method.broadcast(server := server_of(fed))
    assert torch.equal(server.only.weighed.weights, before)  # type: ignore[union-attr]


@pytest.mark.parametrize("far", range(4))  # whoever would be chosen else
def test_krum_sees_an_upload_whose_running_statistics_alone_are_far_off(federation, far):
    """They travel and are averaged: a relation may leave them aside, an aggregator that looks for
    attackers may not."""

    class Statistics(Transform):
        changes_upload = True

        def on_upload(self, client, payload):
            if client.id == far:
                payload.vector = payload.vector.clone()
                payload.vector[payload.layout.parameters.stop :] += 1e3

    fed = federation(FedAvg(), net="norm", callbacks=[Statistics(), Krum(attackers=0, keep=2)])
    fed.round(1)
    assert fed.run.groups[0].vectors["model"].abs().max() < 100


@pytest.mark.parametrize(
    "method",
    [FedRoD(), GPFL(), FedGen(generator_steps=1), PFedFDA()],
    ids=lambda m: type(m).__name__,
)
def test_methods_count_the_labels_that_a_client_trains_on(federation, method):
    """Flipped labels: their counts turn with them, where a method asks; those of the split stay."""
    fed = federation(method, data={"alpha": 0.1})
    true = fed.run.data.class_counts.copy()
    fed.run.data.relabel(1, lambda y: 9 - y)
    client, other = (client_of(fed, c) for c in (1, 0))
    assert client.class_counts.tolist() == true[1, ::-1].tolist() != true[1].tolist()
    assert other.class_counts.tolist() == true[0].tolist() and np.array_equal(
        fed.run.data.class_counts, true
    )
    y = torch.cat([y for _, y in client.data.train.batches(100)])
    assert torch.equal(client.class_counts, y.bincount(minlength=10))
    with pytest.MonkeyPatch.context() as patch:
        asked = []
        counts = type(fed.run.data).trained_counts
        patch.setattr(
            type(fed.run.data),
            "trained_counts",
            lambda data, i: (asked.append(i), counts(data, i))[1],
        )
        fed.round(1)
        assert {0, 1, 2, 3} <= {*asked}


def test_steps_of_pfedhns_newcomer_take_batches_of_their_own(federation):
    fed = federation(PFedHN(hidden=4), rounds=3, batch_size=8, local_epochs=1)
    fed.round(1)
    fed.round(2)
    client = client_of(fed, 1)
    phases = fed.run.method.newcomer_phases(client, payload_of(client))
    jobs = [job_of(client, phase, 0) for phase in phases]
    first, other = (next(stream(job.part, job.schedule))[0] for job in jobs)
    assert not torch.equal(first, other)

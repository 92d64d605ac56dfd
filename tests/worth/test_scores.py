"""Scores read back silo by silo: what counts as one, and what is in no figure."""

import numpy as np
from refusals import refuses

from fl_lightning.lab.worth import FOLDS, scores
from fl_lightning.lab.worth.silos import SiloFacts
from fl_lightning.results.folder import save_arrays

SILOS = [list(range(30)), list(range(30, 50))]


def written(out, silos=SILOS, label="local", cycles=2, seed=0):
    """Score files of silos with samples of these numbers, ten of a unit; the answer to number k is
    right if k is even."""
    rng = np.random.default_rng(seed)
    for cycle in range(cycles):
        folds = [rng.permutation(np.arange(len(own)) % FOLDS) for own in silos]
        for fold in range(FOLDS):
            parts = [np.array(own)[of == fold] for own, of in zip(silos, folds, strict=True)]
            sample = np.concatenate(parts)
            save_arrays(
                scores.scores_path(out, label, cycle * FOLDS + fold),
                sample=sample,
                unit=sample // 10,
                right=(sample % 2 == 0).astype(float),
                label=(sample % 3 == 0).astype(int),
                client=np.repeat(np.arange(len(silos)), [len(part) for part in parts]),
                outputs=np.zeros((len(sample), 0), np.float32),
            )


def read(out, copies=None, kind=""):
    groups = np.arange(50)
    for number, first in (copies or {}).items():
        groups[number] = first
    return scores.read(out, ["local"], 2, SiloFacts(["a", "b"], [30, 20], groups, kind))


def test_cycles_are_in_one_order(tmp_path):
    """Whatever fold tested it, a sample has one place."""
    written(tmp_path)
    for own, silo in zip(SILOS, read(tmp_path), strict=True):
        assert silo.rows["local"].right.tolist() == [[float(k % 2 == 0) for k in own]] * 2
        assert silo.samples.labels.tolist() == [int(k % 3 == 0) for k in own]
        assert (silo.samples.folds[0] != silo.samples.folds[1]).any()
        assert silo.independent == (len(own), "samples")


def test_samples_of_a_person_are_one_unit(tmp_path):
    written(tmp_path)
    silo = read(tmp_path, kind="units")[0]
    assert silo.samples.units.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    assert silo.independent == (3, "units")


def test_copies_within_a_silo_are_one_unit_and_those_in_two_are_left_out(tmp_path):
    written(tmp_path)
    first, second = read(tmp_path, {5: 4, 30: 10, 31: 11})
    assert first.repeated == 2 and len(np.unique(first.samples.units)) == 27
    assert first.shared == {1: 2} and second.shared == {0: 2}
    assert (first.left_out, len(first.samples), len(second.samples)) == (2, 28, 18)
    assert first.rows["local"].right.shape == (2, 28)


def test_a_silo_of_another_folder_has_the_samples_that_count(tmp_path):
    """Those that another silo has are left out where that silo is absent, too."""
    written(tmp_path)
    written(tmp_path / "without", SILOS[:1], seed=3)
    like = read(tmp_path, {30: 10})[0]
    facts = SiloFacts(["a", "b"], [30, 20], np.arange(50))
    for place in (tmp_path, tmp_path / "without"):
        silo = scores.read_same_samples(place, like, ["local"], facts)
        assert silo.keys.tolist() == [k for k in range(30) if k != 10]
        assert silo.rows["local"].right.shape == (1, 29)


def test_rows_that_tested_other_samples_and_broken_files_are_refused(tmp_path):
    facts = SiloFacts(["a", "b"], [30, 20], np.arange(60))
    written(tmp_path)
    written(tmp_path, [list(range(1, 31)), SILOS[1]], "fedper")
    with refuses("tested other samples"):
        scores.read(tmp_path, ["local", "fedper"], 2, facts)
    file = scores.scores_path(tmp_path, "local", 3)
    file.write_bytes(file.read_bytes()[:200])
    with refuses(r"seed-3\.npz.*it cannot be read .*; delete it"):
        read(tmp_path)


def test_folds_that_have_ended_count(tmp_path):
    """Of a cycle of which two folds have scores of all rows, their samples."""
    written(tmp_path, cycles=1)
    for fold in (1, 3, 4):
        scores.scores_path(tmp_path, "local", fold).unlink()
    assert scores.complete_folds(tmp_path, ["local"]) == [0, 2]
    facts = SiloFacts(["a", "b"], [30, 20], np.arange(50))
    first, second = scores.read(tmp_path, ["local"], 1, facts, [0, 2])
    assert (len(first.samples), len(second.samples)) == (12, 8)

"""Scores read back silo by silo: what counts as one, and what is in no figure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_lightning.foundation.errors import BadInput
from fl_lightning.lab.worth import FOLDS, scores
from fl_lightning.lab.worth.silos import Facts
from fl_lightning.results.folder import save_arrays


def written(
    out: Path, silos: list[list[int]], label: str = "local", cycles: int = 2, seed: int = 0
) -> None:
    """Score files of silos with samples of these contents; the answer to content k is right if k is
    even."""
    rng = np.random.default_rng(seed)
    for cycle in range(cycles):
        folds = [rng.permutation(np.arange(len(own)) % FOLDS) for own in silos]
        for fold in range(FOLDS):
            parts = [np.array(own)[of == fold] for own, of in zip(silos, folds, strict=True)]
            sample = np.concatenate(parts).astype(np.uint64)
            table = {
                "sample": sample,
                "right": (sample % 2 == 0).astype(float),
                "label": (sample % 3 == 0).astype(int),
            }
            table["client"] = np.repeat(np.arange(len(silos)), [len(part) for part in parts])
            table["outputs"] = np.zeros((len(sample), 0), np.float32)
            save_arrays(scores.place(out, label, cycle * FOLDS + fold), **table)


def read(
    out: Path, silos: list[list[int]], recordings: dict[int, int] | None = None
) -> list[scores.Silo]:
    facts = Facts(
        [f"s{k}" for k in range(len(silos))], [len(own) for own in silos], recordings or {}
    )
    return scores.read(out, ["local"], 2, facts)


def test_cycles_are_in_one_order(tmp_path: Path) -> None:
    """Whatever fold tested it, a sample has one place: the content tells which."""
    silos = [list(range(100, 130)), list(range(200, 240))]
    written(tmp_path, silos)
    for own, silo in zip(silos, read(tmp_path, silos), strict=True):
        assert silo.rows["local"].right.tolist() == [[float(k % 2 == 0) for k in own]] * 2
        assert silo.samples.labels.tolist() == [int(k % 3 == 0) for k in own]
        assert all(
            np.bincount(of).tolist() == [len(own) // FOLDS] * FOLDS for of in silo.samples.folds
        )
        assert (silo.samples.folds[0] != silo.samples.folds[1]).any()


def test_windows_of_a_recording_are_one_unit(tmp_path: Path) -> None:
    silos = [list(range(100, 130))]
    written(tmp_path, silos)
    recordings = {k: (k - 100) // 10 for k in silos[0]}
    silo, apart = read(tmp_path, silos, recordings)[0], read(tmp_path, silos)[0]
    assert silo.samples.units.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    assert silo.independent == (3, "recordings")
    assert len(set(apart.samples.units.tolist())) == 30 and apart.independent == (30, "samples")


def test_a_silo_of_another_folder_has_the_samples_that_count(tmp_path: Path) -> None:
    """Those that another silo has are left out where that silo is absent, too: rows have the same
    samples."""
    silos = [list(range(100, 130)), [*range(120, 130), *range(200, 220)]]
    written(tmp_path, silos)
    written(tmp_path / "without", silos[:1], seed=3)
    like = read(tmp_path, silos)[0]
    both = [
        scores.one(place, like, "local", Facts([], []))
        for place in (tmp_path, tmp_path / "without")
    ]
    assert [silo.keys.tolist() for silo in both] == [list(range(100, 120))] * 2
    assert both[0].rows["local"].right.shape == (1, 20) and len(both[1].samples) == 20


def test_equal_samples_of_a_silo_are_one_unit(tmp_path: Path) -> None:
    silos = [[*range(100, 130), 100]]
    written(tmp_path, silos)
    silo = read(tmp_path, silos)[0]
    assert (
        silo.repeated == 2
        and len(silo.samples) == 31
        and len(set(silo.samples.units.tolist())) == 30
    )


def test_samples_of_two_silos_are_left_out(tmp_path: Path) -> None:
    silos = [list(range(100, 130)), [*range(120, 130), *range(200, 220)]]
    written(tmp_path, silos)
    first, second = read(tmp_path, silos)
    assert first.shared == {1: 10} and second.shared == {0: 10}
    assert len(first.samples) == 20 == first.rows["local"].right.shape[1] and first.left_out == 10
    assert first.rows["local"].right[0].tolist() == [float(k % 2 == 0) for k in range(100, 120)]


def test_coarse_columns_are_no_copies(tmp_path: Path) -> None:
    """Where values repeat within a silo, equal ones in another tell nothing: all samples count."""
    silos = [[k % 12 for k in range(40)], [k % 12 for k in range(30)]]
    written(tmp_path, silos)
    assert [(silo.shared, len(silo.samples)) for silo in read(tmp_path, silos)] == [
        ({}, 40),
        ({}, 30),
    ]


def test_equal_samples_keep_their_own_labels_over_cycles(tmp_path: Path) -> None:
    """Coarse columns: contents repeat with both labels, and each cycle's folds bring them in
    another order."""
    rng = np.random.default_rng(0)
    contents, labels = np.arange(60) % 4, rng.integers(0, 2, 60)
    for cycle in range(3):
        of = rng.permutation(np.arange(60) % FOLDS)
        for fold in range(FOLDS):
            mine = of == fold
            table = {
                "sample": contents[mine].astype(np.uint64),
                "label": labels[mine],
                "right": 1.0 * labels[mine],
            }
            table |= {
                "client": np.zeros(mine.sum(), int),
                "outputs": labels[mine, None].astype(np.float32),
            }
            save_arrays(scores.place(tmp_path, "local", cycle * FOLDS + fold), **table)
    silo = scores.read(tmp_path, ["local"], 3, Facts(["a"], [60]))[0]
    for of_cycle, outputs in zip(silo.rows["local"].right, silo.rows["local"].outputs, strict=True):  # type: ignore[arg-type]
        assert (of_cycle == silo.samples.labels).all() and (
            outputs[:, 0] == silo.samples.labels
        ).all()
    # equal by chance: none is a copy
    assert len(set(silo.samples.units.tolist())) == 60 and silo.repeated == 0
    again = scores.one(tmp_path, silo, "local", Facts(["a"], [60]))
    assert (
        len(set(again.samples.units.tolist())) == 60
        and (again.samples.labels == silo.samples.labels).all()
    )
    with np.load(place := scores.place(tmp_path, "local", FOLDS)) as arrays:
        other = dict(arrays)
    save_arrays(place, **other | {"label": 1 - other["label"]})
    with pytest.raises(BadInput, match="tested other samples"):
        scores.read(tmp_path, ["local"], 3, Facts(["a"], [60]))


def test_rows_that_tested_other_samples_are_refused(tmp_path: Path) -> None:
    written(tmp_path, [list(range(30))])
    written(tmp_path, [list(range(1, 31))], "fedper")
    with pytest.raises(BadInput, match="tested other samples"):
        scores.read(tmp_path, ["local", "fedper"], 2, Facts(["s"], [30]))
    scores.place(tmp_path, "local", 0).write_bytes(b"")
    with pytest.raises(BadInput, match="delete it"):
        read(tmp_path, [list(range(30))])


def test_fingerprints_are_of_the_content() -> None:
    raw = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    raw[4] = raw[1]
    keys = scores.fingerprints(raw)
    assert keys[4] == keys[1] and len(set(keys.tolist())) == 4 and keys.dtype == np.uint64


def test_a_file_that_is_cut_short_is_one_line(tmp_path: Path) -> None:
    silos = [list(range(100, 130))]
    written(tmp_path, silos)
    file = scores.place(tmp_path, "local", 3)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(
        BadInput, match=r"seed-3\.npz' is not allowed; it cannot be read .*; delete it"
    ):
        read(tmp_path, silos)

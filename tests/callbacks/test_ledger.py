"""Pictures of the ledger: the numbers behind them by hand, and that they are drawn of all rounds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fl_lightning.callbacks.ledger import Ledger
from fl_lightning.cli import main
from fl_lightning.drawing import ledger
from fl_lightning.drawing.ledger import Series, costs, in_columns
from fl_lightning.errors import BadInput
from fl_lightning.record import RelationView, RoundRecord
from fl_lightning.results.folder import RunFolder

LAYERS = ["conv", "fc", "head"]
MIB = 2**20
NAMES = ["bytes", "layers", "upload"]


def run_of(folder: Path, rounds: int = 3, is_main: bool = True) -> Any:
    return SimpleNamespace(is_main=is_main, rounds=rounds, folder=folder, layer_names=LAYERS, judge="after")


def record(round: int, **metrics: float) -> RoundRecord:
    """Two clients. All layers go down; client 0 sends `round` layers up, client 1 a single one."""
    sent = np.ones((2, 2, 3), dtype=bool)
    sent[0, 1, round:] = sent[1, 1, 1:] = False
    traffic = np.zeros((2, 2, 4, 4), dtype=np.int64)
    traffic[:, :, :3, 0] = sent * MIB
    traffic[:, 0, 3, 2] = MIB // 2  # statistics, down
    view = RelationView(np.zeros((0, 3, 0)), [], LAYERS, [])
    means = {"upload_bytes": int(traffic[:, 1].sum()), "download_bytes": int(traffic[:, 0].sum()), **metrics}
    return RoundRecord(round, [0, 1], means, [{"client": 0}, {"client": 1}], view, view.layers, traffic, sent)


def test_series_by_hand() -> None:
    made = Series.of({t: (record(t).traffic, record(t).sent) for t in (2, 1, 3)})
    assert made.rounds == [1, 2, 3]
    assert made.mib.tolist() == [[7, 2], [7, 3], [7, 4]]
    assert made.parameter_mib.tolist() == [[6, 2], [6, 3], [6, 4]]
    assert made.layers[:, 0].tolist() == [[3, 3, 3]] * 3
    assert made.layers[:, 1].tolist() == [[1, 1, 1], [1.5, 1, 2], [2, 1, 3]]
    assert made.shares[:, 1].tolist() == [[1, 0, 0], [1, 0.5, 0], [1, 0.5, 0.5]]


def test_costs_add_up_over_rounds_that_are_not_judged() -> None:
    """7 MiB down, and 2, 3, 4 up."""
    rows = [{"round": t, **record(t, channel_s=t / 4).metrics} for t in (1, 2, 3)]
    rows[0]["mean_accuracy"], rows[2]["mean_accuracy"] = 0.5, 0.75
    seconds, mib, accuracy = costs(rows)
    assert seconds.tolist() == [0.25, 1.5]
    assert mib.tolist() == [9, 30]
    assert accuracy.tolist() == [0.5, 0.75]


def test_many_rounds_share_columns() -> None:
    values, labels = in_columns(np.arange(320.0).reshape(320, 1), range(1, 321))
    assert labels == list(range(2, 321, 2))
    assert values[:2].tolist() == [[0.5], [2.5]]
    assert in_columns(np.zeros((160, 1)), range(1, 161))[1] == list(range(1, 161))
    values, labels = in_columns(np.arange(503.0).reshape(503, 1), range(1, 504))
    assert labels[:2] == [5, 10]
    assert labels[-1] == 503
    assert values[-1].tolist() == [501.0]  # rounds 501 to 503, counted from 0


def test_pictures_are_drawn_in_the_last_round_of_all_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, run = RunFolder(tmp_path), run_of(tmp_path)
    drawn: list[Series] = []
    monkeypatch.setattr(ledger, "draw_layers", lambda traffic: drawn.append(traffic) or np.zeros((1, 1, 3), np.uint8))
    for t in (1, 2, 3):
        made = record(t)
        Ledger().on_round_end(run, made)  # a new one each time, as if each round had been resumed
        assert bool(made.images) == (t == 3)
        if t == 3:
            rows = [*folder.read_metrics(), {"round": 3, **made.metrics}]
            assert sorted(ledger.draw(tmp_path, made, rows, "after")) == sorted(NAMES)
        folder.append(made)
    (traffic,) = drawn
    assert traffic.rounds == [1, 2, 3]
    assert traffic.mib.tolist() == [[7, 2], [7, 3], [7, 4]]


@pytest.mark.parametrize("rounds", [1, 3])
def test_files_are_the_images_and_not_blank(tmp_path: Path, rounds: int) -> None:
    folder, run = RunFolder(tmp_path), run_of(tmp_path, rounds)
    for t in range(1, rounds + 1):
        made, drawing = record(t, mean_accuracy=t / 4, channel_s=float(t)), Ledger()
        drawing.on_round_end(run, made)
        drawing.on_close(run)
        folder.append(made)
    assert sorted(made.images) == sorted(f"ledger/{name}" for name in ledger.NAMES)
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {
        f"ledger-{n}.png" for n in [*NAMES, "accuracy", "time"]
    }
    images = {name: image.array() for name, image in made.images.items()}
    assert images.pop("ledger/download") is None  # every layer always travelled down: one colour
    for name, image in images.items():
        file = tmp_path / "figures" / f"{name.replace('/', '-')}.png"
        np.testing.assert_array_equal(np.asarray(Image.open(file)), image)
        assert image.dtype == np.uint8
        assert image.shape[2] == 3
        assert np.count_nonzero((image < 200).any(axis=2)) > 1000  # letters, axes and lines
    upload = np.array([0x44, 0x01, 0x54])
    assert (images["ledger/bytes"] == upload).all(axis=2).any()


def test_every_other_round_rank_0_alone_and_no_layers(tmp_path: Path) -> None:
    made = [record(t) for t in (1, 2, 3)]
    for one in made:
        Ledger(every=2).on_round_end(run_of(tmp_path), one)
    assert [bool(one.images) for one in made] == [False, True, True]
    other, empty = record(3), record(3)
    Ledger().on_round_end(run_of(tmp_path, is_main=False), other)
    bare = run_of(tmp_path)
    bare.layer_names = []
    Ledger().on_round_end(bare, empty)
    assert not other.images
    assert not empty.images
    with pytest.raises(BadInput, match=r"callbacks\.ledger\.every: 0 .*at least 1, or null"):
        Ledger(every=0)


def test_what_always_travelled_whole_is_not_drawn(tmp_path: Path) -> None:
    made = record(1, mean_accuracy=0.5)
    rows = [{"round": 1, **made.metrics}]
    made.sent[:] = True
    assert sorted(ledger.draw(tmp_path, made, rows, "after")) == ["accuracy", "bytes"]
    made.sent[:], made.traffic[:] = False, 0
    assert sorted(ledger.draw(tmp_path, made, rows, "after")) == ["accuracy"]


def test_a_run_hands_them_on_and_a_resumed_one_draws_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--config kapc_digits --loggers null --loggers tensorboard --callbacks.heatmaps null --data.fraction 0.4"
    flags += " --federation.local_epochs 1 --fabric.accelerator cpu --callbacks.progress null --callbacks fixedrate"
    assert main(["fit", *flags.split(), "--federation.rounds", "2", "--name", "a"]) == 0
    figures = tmp_path / "runs" / "a" / "figures"
    before = {file.name: file.read_bytes() for file in figures.iterdir()}
    assert set(before) == {f"ledger-{name}.png" for name in ("bytes", "accuracy", "time")}
    assert main(["fit", "--federation.rounds", "3", "--callbacks.ledger.every", "1", "--name", "a", "--resume"]) == 0
    assert all(file.read_bytes() != before[file.name] for file in figures.iterdir())
    events = b"".join(file.read_bytes() for file in (tmp_path / "runs" / "a" / "tensorboard").iterdir())
    assert b"ledger/bytes" in events


def test_the_cache_of_fonts_is_made_in_silence(tmp_path: Path) -> None:
    """A first use of matplotlib makes one, and may say so; a folder that cannot hold it would be named."""
    (tmp_path / "file").write_text("")
    env = {**os.environ, "MPLCONFIGDIR": str(tmp_path / "file" / "none"), "TMPDIR": str(tmp_path)}
    code = "from fl_lightning.cli import main; main(['list', 'methods']); import matplotlib.font_manager"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert "kapc" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("seconds", [0.0, 3.0, 1e300])
def test_costs_are_drawn_whatever_their_size(seconds: float) -> None:
    """In a channel that takes for ever, the labels of the axis stay within the picture."""
    common = {"mean_accuracy": 0.5, "upload_bytes": 1, "download_bytes": 1}
    picture = ledger.draw_time([{"round": t, "channel_s": seconds, **common} for t in (1, 2, 3)], "after")
    assert picture.shape == (400, 1100, 3)
    assert (picture < 128).any()

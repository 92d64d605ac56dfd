import math
import pickle

import numpy as np
import pytest
from refusals import refuses

from fl_lightning.foundation.errors import BadInput
from fl_lightning.results.folder import (
    CLIENT_FLOPS,
    CLIENT_LOSSES,
    RunFolder,
    best,
    mean_of_bests,
    save_arrays,
)
from fl_lightning.results.record import RelationView, RoundRecord


def record(round, **metrics):
    rows = np.full((2, 3, 2), round / 7)
    view = RelationView(rows, [0, 4], ["conv1", "fc", "head"], [0, 4])
    clients = [{"client": 0, "accuracy_after": 0.1 * round}, {"client": 4, "accuracy_after": 1 / 3}]
    traffic = np.arange(2 * 2 * 4 * 4).reshape(2, 2, 4, 4)
    means = {"mean_accuracy": round / 3, "upload_bytes": 2**40 + round, **metrics}
    sent = np.arange(2 * 2 * 3).reshape(2, 2, 3) % 5 > 0
    return RoundRecord(round, [0, 4], means, clients, view, view.layers, traffic, sent)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for round in (1, 2, 3):
        folder.append(record(round))
    return folder


def test_rows_come_back_with_every_digit(folder):
    assert folder.read("metrics")[1] == {
        "round": 2,
        "mean_accuracy": 2 / 3,
        "upload_bytes": 2**40 + 2,
    }
    assert folder.read("clients")[3] == {"round": 2, "client": 4, "accuracy_after": 1 / 3}
    text = (folder.path / "metrics.csv").read_text().splitlines()
    # empty where no step was taken, and nothing counted
    always = ",".join([*CLIENT_LOSSES, *CLIENT_FLOPS])
    assert text[:2] == [
        f"round,mean_accuracy,upload_bytes,{always}",
        f"1,{1 / 3!r},{2**40 + 1},,,,,,",
    ]


def test_traffic_is_read_back(folder):
    assert folder.traffic_rounds() == folder.relation_rounds() == [1, 2, 3]
    (folder.path / "traffic" / "round-later.npz").write_bytes(b"not ours")
    assert folder.traffic_rounds() == [1, 2, 3]
    traffic = folder.read_traffic(2)
    assert (traffic.clients, traffic.layers) == ([0, 4], ["conv1", "fc", "head"])
    assert traffic.kinds == ["parameters", "buffers", "statistics", "other"]
    assert traffic.bytes.tolist() == np.arange(64).reshape(2, 2, 4, 4).tolist()
    assert traffic.sent.tolist() == (np.arange(12).reshape(2, 2, 3) % 5 > 0).tolist()
    with pytest.raises(FileNotFoundError):
        folder.read_traffic(9)


@pytest.mark.parametrize("cut", [1, 8, 20])
def test_half_a_row_is_neither_read_nor_kept(folder, cut):
    file = folder.path / "metrics.csv"
    file.write_bytes(file.read_bytes()[:-cut])
    assert [row["round"] for row in folder.read("metrics")] == [1, 2]
    folder.truncate(3)
    folder.append(record(3))
    assert [row["round"] for row in folder.read("metrics")] == [1, 2, 3]


def test_half_a_header_is_no_table(folder):
    file = folder.path / "metrics.csv"
    file.write_text("round,mean_accu")
    assert folder.read("metrics") == []
    folder.truncate(0)
    folder.append(record(1))
    assert folder.read("metrics")[0]["mean_accuracy"] == 1 / 3


def test_truncate_forgets_later_rounds_everywhere(folder):
    folder.truncate(1)
    assert [row["round"] for row in folder.read("metrics")] == [1]
    assert [row["round"] for row in folder.read("clients")] == [1, 1]
    assert [p.name for p in (folder.path / "relation").iterdir()] == ["round-0001.npz"]
    folder.truncate(0)
    assert folder.read("metrics") == []
    folder.append(record(1))
    assert len(folder.read("metrics")) == 1


@pytest.mark.parametrize("content", [b"", b"x", b"[1, 2]", None])
def test_a_damaged_relation_is_one_line(folder, content):
    path = folder.relation_file(2)
    if content is None:  # arrays that do not fit together
        save_arrays(
            path,
            rows=np.ones((2, 1, 2)),
            receivers=np.arange(2),
            layers=np.array(["a", "b"]),
            sources=[0, 1],
        )
    else:
        path.write_bytes(content)
    with refuses(r"run='.*': its relation/round-0002.npz is damaged: restore it"):
        folder.read_relation(2)
    assert folder.intact_relation(2) is None


def test_mean_of_bests_takes_another_round_for_each_client():
    rows = [
        {"round": 1, "client": 0, "accuracy_after": 0.5},
        {"round": 1, "client": 1, "accuracy_after": 0.9},
    ]
    rows += [
        {"round": 2, "client": 0, "accuracy_after": 0.7},
        {"round": 2, "client": 1, "accuracy_after": 0.1},
    ]
    rows += [{"round": 3, "client": 0, "accuracy_after": math.nan}, {"round": 3, "client": 2}]
    assert mean_of_bests(rows, "accuracy_after") == (pytest.approx(0.8), 2)
    errors = [{**row, "mae_after": row["accuracy_after"]} for row in rows[:4]]
    assert mean_of_bests(errors, "mae_after") == (pytest.approx(0.3), 2)
    score, clients = mean_of_bests(rows, "accuracy_global")
    assert math.isnan(score)
    assert clients == 0


def test_best_is_the_first_of_the_greatest_and_skips_rounds_not_judged():
    rows = [{"round": 1, "mean_accuracy": 0.5}, {"round": 2}, {"round": 3, "mean_accuracy": 0.7}]
    assert best(
        [*rows, {"round": 4, "mean_accuracy": 0.7}, {"round": 5, "mean_accuracy": math.nan}]
    ) == (0.7, 3)
    accuracy, round = best([{"round": 2}])
    assert math.isnan(accuracy)
    assert round == 0


def test_nobody_waits_for_the_disk_before_a_flush_but_for_rows_that_it_has(tmp_path, monkeypatch):
    """A new table is not flushed: nothing counts on it yet. One that is written anew is: a crash
    would take it all."""
    waited = []
    monkeypatch.setattr(
        "fl_lightning.foundation.files.flush",
        lambda path: waited.append(path.name.strip(".").split(".part")[0]),
    )
    folder = RunFolder(tmp_path)
    folder.write_split([1], [1], None)
    for t in (1, 2):
        folder.append(record(t))
    assert not {name for name in waited if "." in name}
    folder.append(record(3, later=1.0))
    assert {name for name in waited if "." in name} == {"metrics.csv"}
    folder.write_final([0.5])
    assert "final.csv" in waited


@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv"])
def test_no_run_goes_on_over_a_table_with_a_hole(folder, name):
    """`clients.csv` has rows of every round, too: one in which all clients fail ends the run."""
    file = folder.path / name
    folder.check_whole(3)
    file.write_text(
        "".join(line for line in file.read_text().splitlines(True) if not line.startswith("2,"))
    )
    with refuses(rf"its {name} lacks a round up to 3"):
        folder.check_whole(3)


def test_a_damaged_table_is_bad_input_that_names_it(folder):
    """Whoever reads it: a run that is resumed, `fl-train test`, a comparison."""
    file = folder.path / "metrics.csv"
    whole = file.read_text()
    for text in (
        whole.replace("1,0.3", "1,garbage", 1),
        whole.replace("round", "rund", 1),
        whole.replace("\n2,", "\n,", 1),
    ):
        file.write_text(text)
        for read in (lambda: folder.read("metrics"), lambda: folder.check_whole(3)):
            with refuses(r"^run=.* its metrics\.csv is damaged$") as caught:
                read()
            assert isinstance(pickle.loads(pickle.dumps(caught.value)), BadInput)
    file.write_bytes(b"round\n\xff\n")
    with refuses(r"its metrics\.csv is damaged"):
        folder.read("metrics")
    with pytest.raises(FileNotFoundError):
        folder.read_summary()
    for text in ("{", "[1]"):
        (folder.path / "summary.json").write_text(text)
        with refuses(r"its summary\.json is damaged"):
            folder.read_summary()

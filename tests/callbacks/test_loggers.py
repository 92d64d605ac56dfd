from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fl_lightning.callbacks import loggers
from fl_lightning.callbacks.loggers import TensorBoard, WandB
from fl_lightning.drawing import save_png
from fl_lightning.errors import BadInput, RunFailed
from fl_lightning.record import RelationView, RoundRecord
from fl_lightning.runfolder import RunFolder

KEY = "0123456789abcdef0123456789abcdef01234567"
PICTURE = np.arange(40 * 50 * 3, dtype=np.uint8).reshape(40, 50, 3)
NO_RELATION = RelationView(np.zeros((0, 0, 0), np.float32), [], [], [])


def run_of(folder: Path, resumed_from: int = 0, is_main: bool = True) -> SimpleNamespace:
    folder.mkdir(exist_ok=True)
    config = SimpleNamespace(to_dict=lambda: {"seed": 3, "model": {"init_args": {"api_key": "hush", "tokens": 4}}})
    return SimpleNamespace(is_main=is_main, folder=folder, resumed_from=resumed_from, rounds=3, config=config)


def record(round: int) -> RoundRecord:
    metrics = {"mean_accuracy": round / 4, "upload_bytes": 10 * round}
    return RoundRecord(
        round,
        [0],
        metrics,
        [],
        NO_RELATION,
        [],
        np.zeros((0, 2, 1, 4)),
        np.zeros((0, 2, 0)),
        {"relation/overview": PICTURE},
    )


def log(logger, run, rounds) -> dict:
    logger.on_fit_start(run)
    for round in rounds:
        logger.on_round_end(run, record(round))
    summary = {"best_mean_accuracy": 0.75, "final_accuracies": [0.1]}
    logger.on_fit_end(run, summary)
    logger.on_close(run)
    return summary


# ---------------------------------------------------------------- TensorBoard


def read_events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    return events


def test_tensorboard_holds_scalars_and_pictures(tmp_path) -> None:
    log(TensorBoard(), run_of(tmp_path), [1, 2])
    events = read_events(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("own_judge/mean_accuracy")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.width, e.height) for e in events.Images("relation/overview")] == [(1, 50, 40), (2, 50, 40)]


def test_tensorboard_goes_on_after_a_resume_without_doubles(tmp_path) -> None:
    first = TensorBoard()
    first.on_fit_start(run_of(tmp_path))
    for round in (1, 2):
        first.on_round_end(run_of(tmp_path), record(round))
    first.on_close(run_of(tmp_path))
    log(TensorBoard(), run_of(tmp_path, resumed_from=1), [2, 3])
    assert [e.step for e in read_events(tmp_path).Scalars("own_judge/mean_accuracy")] == [1, 2, 3]


def test_tensorboard_begun_again_before_a_first_checkpoint_has_no_doubles(tmp_path) -> None:
    first = TensorBoard()
    first.on_fit_start(run_of(tmp_path))
    first.on_round_end(run_of(tmp_path), record(1))
    first.on_close(run_of(tmp_path))
    log(TensorBoard(), run_of(tmp_path), [1, 2])
    assert [e.step for e in read_events(tmp_path).Scalars("own_judge/mean_accuracy")] == [1, 2]


def test_tensorboard_speaks_on_rank_0_alone(tmp_path) -> None:
    log(TensorBoard(), run_of(tmp_path, is_main=False), [1])
    assert not (tmp_path / "tensorboard").exists()


def test_what_speaks_of_the_judge_has_another_name_than_what_can_be_compared() -> None:
    own = ["mean_accuracy", "worst_mae", "weighted_accuracy", "validation_accuracy", "validation_mean_accuracy"]
    own += ["best_mean_accuracy", "mean_best_accuracy", "last_mean_mae", "final_std_accuracy"]
    own += ["mean_f1", "clients_auroc", "final_mean_calibration"]
    shared = [
        "f1_after",
        "accuracy_after",
        "best_accuracy_after",
        "mae_before",
        "upload_bytes",
        "total_upload_bytes",
        "judge",
    ]
    named = loggers.by_judge(dict.fromkeys([*own, *shared], 0))
    assert list(named) == [*(f"own_judge/{name}" for name in own), *shared]


# ---------------------------------------------------------------- W&B


@pytest.fixture
def wandb_alone(tmp_path, monkeypatch) -> Iterator[None]:
    """W&B without this machine's keys and settings, and without the network."""
    import wandb

    wandb.teardown()
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb_config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb_cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb_data"))
    monkeypatch.setattr(loggers, "_answers", lambda host, port: False)
    yield
    wandb.teardown()


def read_records(file: Path) -> list:
    """The records of a `.wandb` file: a log of blocks of 32 KiB, with chunks of (checksum, length, kind, bytes)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, held, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(held))
            held = b""
    return records


def history(offline: Path) -> list[dict[str, str]]:
    import wandb

    wandb.teardown()  # waits until its helper process has written everything
    (file,) = offline.glob("run-*.wandb")
    rows = [r.history for r in read_records(file) if r.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): item.value_json for item in row.item} for row in rows]


def offline_runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_ctime_ns)


@pytest.mark.usefixtures("wandb_alone")
def test_offline_holds_one_row_a_round_with_its_picture(tmp_path, capfd, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    summary = log(WandB(tags=["test"]), run_of(tmp_path / "run"), [1, 2])
    (offline,) = offline_runs(tmp_path / "run")
    rows = history(offline)
    assert [(row["round"], row["own_judge/mean_accuracy"], row["upload_bytes"]) for row in rows] == [
        ("1", "0.25", "10"),
        ("2", "0.5", "20"),
    ]
    assert all("relation/overview/path" in row for row in rows)
    assert len(list((offline / "files/media/images/relation").glob("overview_*.png"))) == 2
    assert summary["wandb"] == f"wandb sync {offline}"
    said = capfd.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert "does not answer" in line
    assert f"wandb sync {offline}" in line
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes() or b"hush" in path.read_bytes()]
    assert (tmp_path / "run" / "wandb_id.txt").read_text().strip() in offline.name


@pytest.mark.usefixtures("wandb_alone")
def test_a_resumed_offline_run_is_whole_under_the_same_id(tmp_path) -> None:
    folder = RunFolder(tmp_path / "run")
    log(WandB(mode="offline"), run_of(folder.path), [1, 2])
    for round in (1, 2):
        folder.append(record(round))
        save_png(PICTURE, folder.path / "figures" / f"round-{round:04d}-overview.png")
    log(WandB(mode="offline"), run_of(folder.path, resumed_from=2), [3])
    first, second = offline_runs(folder.path)
    name = (folder.path / "wandb_id.txt").read_text().strip()
    assert name in first.name
    assert name in second.name
    rows = history(second)
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    assert all("relation/overview/path" in row for row in rows)


@pytest.mark.usefixtures("wandb_alone")
def test_losing_wandb_midway_does_not_stop_the_training(tmp_path, capfd) -> None:
    logger, run = WandB(mode="offline"), run_of(tmp_path / "run")
    logger.on_fit_start(run)
    capfd.readouterr()
    assert logger._run is not None
    logger._run.finish()  # from here on log() raises
    for round in (1, 2):
        logger.on_round_end(run, record(round))
    logger.on_fit_end(run, {})
    logger.on_close(run)
    (line,) = capfd.readouterr().err.splitlines()
    assert "logging stopped in round 1" in line


@pytest.mark.usefixtures("wandb_alone")
def test_a_key_that_cannot_be_used_is_never_shown(tmp_path, capfd, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "not a key")
    assert loggers._possible_mode()[0] == "offline"
    with pytest.raises(BadInput) as caught:
        WandB(mode="online").on_fit_start(run_of(tmp_path / "run"))
    assert caught.value.key == "loggers.wandb.mode"
    assert "not a key" not in str(caught.value) + capfd.readouterr().err


class Online:
    """Stands in for a run on the server; `refuses` holds the modes in which none can be opened."""

    def __init__(self, summary: dict, refuses: tuple[str, ...] = ()) -> None:
        self.summary, self.resumed, self.offline, self.refuses = summary, bool(summary), False, refuses
        self.id, self.url, self.dir = "abc123", "https://here.example/abc123", "wandb/run-abc123/files"
        self.rows: list[dict] = []
        self.asked: list[dict] = []

    def init(self, **asked):
        self.asked.append(asked)
        if asked["mode"] in self.refuses:
            raise RuntimeError(f"refused with {KEY}")
        self.offline = asked["mode"] == "offline"
        return self

    def log(self, row) -> None:
        self.rows.append(row)

    def define_metric(self, *args, **kwargs) -> None: ...

    def finish(self, exit_code) -> None:
        raise TimeoutError


@pytest.fixture
def online(monkeypatch):
    """Makes W&B's server answer with the given run."""
    import wandb

    def answer_with(run: Online) -> Online:
        monkeypatch.setattr(wandb, "init", run.init)
        monkeypatch.setattr(loggers, "_possible_mode", lambda: ("online", ""))
        return run

    return answer_with


def test_a_resumed_online_run_gets_what_the_server_lacks(tmp_path, online, capfd) -> None:
    folder = RunFolder(tmp_path)
    for round in (1, 2):
        folder.append(record(round))
    (tmp_path / "wandb_id.txt").write_text("abc123\n")
    server = online(Online({"round": 1}))
    summary = log(WandB(), run_of(tmp_path, resumed_from=2), [3])
    assert [row["round"] for row in server.rows] == [2, 3]
    assert (server.asked[0]["id"], server.asked[0]["resume"]) == ("abc123", "allow")
    assert summary["wandb"] == server.url
    assert server.summary["own_judge/best_mean_accuracy"] == 0.75
    assert [line.partition(" (")[0] for line in capfd.readouterr().err.splitlines()] == [
        f"W&B: {server.url}",
        "W&B: not all is uploaded",
    ]


def test_a_server_that_refuses_means_offline_and_the_key_stays_unsaid(tmp_path, online, capfd) -> None:
    server = online(Online({}, refuses=("online",)))
    log(WandB(), run_of(tmp_path), [1])
    assert [asked["mode"] for asked in server.asked] == ["online", "offline"]
    assert len(server.rows) == 1
    said = capfd.readouterr().err
    assert "offline, since opening an online run failed (RuntimeError)" in said
    assert KEY not in said


def test_training_goes_on_without_any_wandb_unless_it_was_demanded(tmp_path, online, capfd) -> None:
    online(Online({}, refuses=("online", "offline")))
    assert "wandb" not in log(WandB(), run_of(tmp_path), [1])
    assert capfd.readouterr().err == "W&B: nothing is logged, since opening an offline run failed (RuntimeError)\n"
    with pytest.raises(RunFailed, match=r"^W&B: opening an online run failed \(RuntimeError\)$"):
        log(WandB(mode="online"), run_of(tmp_path), [1])


@pytest.mark.usefixtures("wandb_alone")
@pytest.mark.parametrize(
    ("environment", "answers", "mode", "reason"),
    [
        ({}, True, "offline", "no API key is known"),
        ({"WANDB_API_KEY": KEY}, False, "offline", "here.example does not answer"),
        ({"WANDB_API_KEY": KEY}, True, "online", ""),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, True, "offline", "W&B is set to offline"),
        ({"WANDB_MODE": "disabled"}, True, "disabled", "W&B is set to disabled"),
    ],
)
def test_the_mode_is_decided_up_front(environment, answers, mode, reason, monkeypatch, capfd) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "https://here.example")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(loggers, "_answers", lambda host, port: answers)
    found, why = loggers._possible_mode()
    assert found == mode
    assert why.startswith(reason)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("wandb_alone")
def test_a_key_in_netrc_counts(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "https://here.example")
    monkeypatch.setattr(loggers, "_answers", lambda host, port: True)
    (tmp_path / "netrc").write_text(f"machine here.example\n  login user\n  password {KEY}\n")
    (tmp_path / "netrc").chmod(0o600)
    assert loggers._possible_mode() == ("online", "")


@pytest.mark.parametrize("mode", ["auto", "online", "offline"])
def test_other_ranks_and_disabled_do_nothing(mode, tmp_path) -> None:
    log(WandB(mode=mode), run_of(tmp_path, is_main=False), [1])
    assert "wandb" not in log(WandB(mode="disabled"), run_of(tmp_path), [1])
    assert not list(tmp_path.iterdir())


def test_a_mode_that_does_not_exist_is_named() -> None:
    with pytest.raises(BadInput, match=r"loggers\.wandb\.mode: 'on' .* auto, online, offline, disabled"):
        WandB(mode="on")  # type: ignore[arg-type]


def test_a_listening_socket_answers_and_a_closed_one_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert loggers._answers("127.0.0.1", port)
    assert not loggers._answers("127.0.0.1", port)


def test_the_address_is_the_proxys_where_there_is_one(monkeypatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert loggers._address("https://api.wandb.ai") == ("api.wandb.ai", 443)
    assert loggers._address("http://localhost:8080") == ("localhost", 8080)
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert loggers._address("https://api.wandb.ai") == ("proxy.example", 3128)
    monkeypatch.setenv("no_proxy", "api.wandb.ai")
    assert loggers._address("https://api.wandb.ai") == ("api.wandb.ai", 443)

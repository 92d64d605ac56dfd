import json
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from fl_lightning.callbacks import connection, exhibits
from fl_lightning.callbacks.heatmaps import Heatmaps
from fl_lightning.callbacks.loggers import TensorBoard, WandB
from fl_lightning.configuration.config import (
    Component,
    Config,
    FederationConfig,
    ModelConfig,
)
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.metric import ACCURACY
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.record import RelationView

from . import rounds

KEY = "0123456789abcdef0123456789abcdef01234567"
PICTURE = np.arange(40 * 50 * 3, dtype=np.uint8).reshape(40, 50, 3)
RELATION = RelationView(
    np.array([[[0.75, 0.25]], [[0.5, 0.5]]], np.float32), [0, 1], ["fc"], [0, 1]
)
MLP = ModelConfig(Component("my.Net", {"api_key": "hush", "tokens": 4}))
DATA = SimpleNamespace(
    metric=ACCURACY,
    task="classification",
    client_names=[],
    class_names=[],
    holds_all=True,
    class_counts=np.array([[4, 0], [2, 2]]),
    train_sizes=[4, 4],
    test_sizes=[1, 2],
)


def config_of(rounds=3):
    federation = FederationConfig(rounds=rounds, clients=2)
    kapc = Component("fl_lightning.methods.kapc.KAPC", {"lam": 0.5})
    return Config(kapc, [MLP], 3, federation, loggers={"wandb": Component("x.WandB")})


def run_of(folder, resumed_from=0, rounds=3):
    folder.mkdir(exist_ok=True)
    return SimpleNamespace(
        is_main=True,
        folder=folder,
        resumed_from=resumed_from,
        rounds=rounds,
        config=config_of(rounds=rounds),
        data=DATA,
        judge="after",
        clients=2,
        callbacks=[],
    )


def record(round):
    metrics = {"mean_accuracy": round / 4, "upload_bytes": 10 * round}
    clients = [{"client": 0, "accuracy_after": 0.25}, {"client": 1, "accuracy_after": 0.75}]
    images = {"relation/overview": PICTURE}
    return rounds.record(round, [0, 1], metrics, clients, RELATION, images)


def log(logger, run, logged):
    logger.on_fit_start(run)
    for round in logged:
        logger.on_round_end(run, record(round))
    summary = {
        "best_mean_accuracy": 0.75,
        "final_accuracies": [0.1, 0.2],
        "final_models": ["after", "before"],
    }
    summary |= logger.summarize(run)
    logger.on_fit_end(run, summary)
    logger.on_close(run)
    return summary


# ---------------------------------------------------------------- TensorBoard


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"images": 0, "scalars": 0}
    )
    events.Reload()
    return events


def test_tensorboard_holds_scalars_and_pictures(tmp_path):
    log(TensorBoard(), run_of(tmp_path), [1, 2])
    events = read_events(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("accuracy/own_judge_mean")] == [
        (1, 0.25),
        (2, 0.5),
    ]
    assert [(e.step, e.width, e.height) for e in events.Images("relation/overview")] == [
        (1, 50, 40),
        (2, 50, 40),
    ]


@pytest.mark.parametrize("resumed_from", [0, 1])
def test_tensorboard_goes_on_after_a_resume_without_doubles(tmp_path, resumed_from):
    """Also where the run begins again, before its first checkpoint."""
    first, run = TensorBoard(), run_of(tmp_path)
    first.on_fit_start(run)
    for round in (1, 2):
        first.on_round_end(run, record(round))
    first.on_close(run)
    log(TensorBoard(), run_of(tmp_path, resumed_from), range(resumed_from + 1, 4))
    assert [e.step for e in read_events(tmp_path).Scalars("accuracy/own_judge_mean")] == [1, 2, 3]


# ---------------------------------------------------------------- W&B


@pytest.fixture
def wandb_alone(tmp_path, monkeypatch):
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
    monkeypatch.setattr(connection, "is_reachable", lambda host, port: False)
    yield
    wandb.teardown()


def read_records(file):
    """The records of a `.wandb` file: a log of blocks of 32 KiB, with chunks of (checksum, length,
    kind, bytes)."""
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


def sent(offline, kind):
    """What an offline run holds of one kind: `history`, `summary`, `config`, `metric`, `run`,
    `artifact`."""
    import wandb

    wandb.teardown()  # waits until its helper process has written everything
    (file,) = offline.glob("run-*.wandb")
    return [getattr(r, kind) for r in read_records(file) if r.WhichOneof("record_type") == kind]


def items(entries):
    return {item.key or "/".join(item.nested_key): item.value_json for item in entries}


def history(offline):
    return [items(row.item) for row in sent(offline, "history")]


def offline_runs(folder):
    return sorted(
        (folder / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_ctime_ns
    )


@pytest.mark.slow
@pytest.mark.usefixtures("wandb_alone")
def test_an_offline_run_says_what_it_is_and_keeps_its_tables(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.append(record(1))
    folder.write_final([0.1, 0.2], models=["after", "before"])
    log(WandB(mode="offline", notes="a note", tags=["one"]), run_of(tmp_path / "run"), [1, 3])
    (offline,) = offline_runs(tmp_path / "run")
    (run,) = sent(offline, "run")
    assert (run.job_type, run.notes, list(run.tags)) == ("seed 3", "a note", ["one"])
    assert run.run_group == exhibits.group_of(config_of())
    held = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert held["model"] == {"name": "net", "api_key": "***", "tokens": 4}
    (file,) = (offline / "files/media/table/clients").glob("final_*.json")
    table = json.loads(file.read_text())
    final = dict(zip(table["columns"], table["data"][1], strict=True))
    assert (final["client"], final["final_accuracy"], final["model"]) == (1, 0.2, "before")
    paths = [e.path for a in sent(offline, "artifact") for e in a.manifest.contents]
    assert {"final.csv", "metrics.csv", "relation/round-0001.npz"} <= set(paths)


@pytest.mark.slow
@pytest.mark.usefixtures("wandb_alone")
def test_a_resumed_offline_run_is_whole_under_the_same_id(tmp_path):
    folder = RunFolder(tmp_path / "run")
    log(WandB(mode="offline"), run_of(folder.path), [1, 2])
    for round in (1, 2):
        folder.append(record(round))
    resumed = run_of(folder.path, resumed_from=2)
    resumed.callbacks = [Heatmaps()]  # it draws the rounds that are sent again from relation/
    log(WandB(mode="offline"), resumed, [3])
    first, second = offline_runs(folder.path)
    name = (folder.path / "wandb_id.txt").read_text().strip()
    assert name in first.name
    assert name in second.name
    rows = history(second)
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    assert all("relation/overview/path" in row for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("wandb_alone")
def test_losing_wandb_midway_does_not_stop_the_training(tmp_path, capfd):
    logger, run = WandB(mode="offline"), run_of(tmp_path / "run")
    logger.on_fit_start(run)
    capfd.readouterr()
    logger._run.finish()  # from here on log() raises
    for round in (1, 2):
        logger.on_round_end(run, record(round))
    logger.on_fit_end(run, {})
    logger.on_close(run)
    (line,) = capfd.readouterr().err.splitlines()
    assert "logging stopped in round 1" in line


@pytest.mark.usefixtures("wandb_alone")
def test_a_key_that_cannot_be_used_is_never_shown(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "not a key")
    assert connection.possible_mode()[0] == "offline"
    with pytest.raises(BadInput) as caught:
        WandB(mode="online").on_fit_start(run_of(tmp_path / "run"))
    assert caught.value.key == "loggers.wandb.mode"
    assert "not a key" not in str(caught.value) + capfd.readouterr().err


class Online:
    """Stands in for a run on the server; `refuses` holds the modes in which none can be opened."""

    def __init__(self, summary, refuses=()):
        self.summary, self.resumed, self.offline, self.refuses = (
            summary,
            bool(summary),
            False,
            refuses,
        )
        self.id, self.url, self.dir = (
            "abc123",
            "https://here.example/abc123",
            "wandb/run-abc123/files",
        )
        self.rows = []
        self.asked = []

    def init(self, **asked):
        self.asked.append(asked)
        if asked["mode"] in self.refuses:
            raise RuntimeError(f"refused with {KEY}")
        self.offline = asked["mode"] == "offline"
        return self

    def log(self, row, step, commit):
        assert (step, commit) == (row["round"], True)
        self.rows.append(row)

    def define_metric(self, *args, **kwargs): ...

    def log_artifact(self, artifact): ...

    def finish(self, exit_code):
        raise TimeoutError


@pytest.fixture
def online(monkeypatch):
    """Makes W&B's server answer with the given run."""
    import wandb

    def answer_with(run):
        monkeypatch.setattr(wandb, "init", run.init)
        monkeypatch.setattr(connection, "possible_mode", lambda: ("online", ""))
        return run

    return answer_with


def test_a_resumed_online_run_gets_what_the_server_lacks(tmp_path, online, capfd):
    folder = RunFolder(tmp_path)
    for round in (1, 2):
        folder.append(record(round))
    (tmp_path / "wandb_id.txt").write_text("abc123\n")
    server = online(Online({"round": 1}))
    summary = log(WandB(), run_of(tmp_path, resumed_from=2), [3])
    assert [row["round"] for row in server.rows] == [2, 3]
    assert (server.asked[0]["id"], server.asked[0]["resume"]) == ("abc123", "allow")
    assert summary["wandb"] == server.url
    assert server.summary["final/own_judge_best_mean_accuracy"] == 0.75
    assert [line.partition(" (")[0] for line in capfd.readouterr().err.splitlines()] == [
        f"W&B: {server.url}",
        "W&B: not all is uploaded",
    ]


def test_sums_go_on_over_rounds_that_the_server_has_and_are_trained_again(tmp_path, online):
    """After a kill the server may have rounds beyond the checkpoint."""
    folder = RunFolder(tmp_path)
    for round in (1, 2):
        folder.append(record(round))
    (tmp_path / "wandb_id.txt").write_text("abc123\n")
    server = online(Online({"round": 4}))
    log(WandB(), run_of(tmp_path, resumed_from=2, rounds=5), [3, 4, 5])
    (row,) = server.rows
    (mib,) = [value for name, value in row.items() if name.endswith("mib_so_far")]
    assert row["round"] == 5 and mib == pytest.approx(10 * (1 + 2 + 3 + 4 + 5) / 2**20)


def test_a_server_that_refuses_means_offline_and_the_key_stays_unsaid(tmp_path, online, capfd):
    server = online(Online({}, refuses=("online",)))
    log(WandB(), run_of(tmp_path), [1])
    assert [asked["mode"] for asked in server.asked] == ["online", "offline"]
    assert len(server.rows) == 1
    said = capfd.readouterr().err
    assert "offline, since opening an online run failed (RuntimeError)" in said
    assert KEY not in said


def test_training_goes_on_without_any_wandb_unless_it_was_demanded(tmp_path, online, capfd):
    online(Online({}, refuses=("online", "offline")))
    assert "wandb" not in log(WandB(), run_of(tmp_path), [1])
    assert (
        capfd.readouterr().err
        == "W&B: nothing is logged, since opening an offline run failed (RuntimeError)\n"
    )
    with pytest.raises(
        RunFailed, match=r"^W&B: opening an online run failed \(RuntimeError\); use mode auto$"
    ):
        log(WandB(mode="online"), run_of(tmp_path), [1])


@pytest.mark.usefixtures("wandb_alone")
@pytest.mark.parametrize(
    "environment, answers, mode, reason",
    [
        ({}, True, "offline", "no API key is known"),
        ({"WANDB_API_KEY": KEY}, False, "offline", "here.example does not answer"),
        ({"WANDB_API_KEY": KEY}, True, "online", ""),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, True, "offline", "W&B is set to offline"),
        ({"WANDB_MODE": "disabled"}, True, "disabled", "W&B is set to disabled"),
    ],
)
def test_the_mode_is_decided_up_front(environment, answers, mode, reason, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_BASE_URL", "https://here.example")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(connection, "is_reachable", lambda host, port: answers)
    found, why = connection.possible_mode()
    assert found == mode
    assert why.startswith(reason)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("wandb_alone")
def test_a_key_in_netrc_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "https://here.example")
    monkeypatch.setattr(connection, "is_reachable", lambda host, port: True)
    (tmp_path / "netrc").write_text(f"machine here.example\n  login user\n  password {KEY}\n")
    (tmp_path / "netrc").chmod(0o600)
    assert connection.possible_mode() == ("online", "")


# ---------------------------------------------------------------- variables of other runs

OTHERS = {
    "WANDB_RUN_ID": "theirs",
    "WANDB_RESUME": "must",
    "WANDB_NAME": "theirs",
    "WANDB_SWEEP_ID": "sw",
}


def identity(folder):
    """Id of the offline run in a run folder: of its file, which W&B has named after it."""
    assert [run.name.rpartition("-")[2] for run in offline_runs(folder)] == [
        (folder / "wandb_id.txt").read_text()[:-1]
    ]
    return (folder / "wandb_id.txt").read_text().strip()


@pytest.mark.slow
@pytest.mark.usefixtures("wandb_alone")
def test_a_run_has_its_own_id_whatever_the_environment_holds(tmp_path, monkeypatch, capfd):
    for name, value in (OTHERS | {"WANDB_DIR": str(tmp_path / "theirs")}).items():
        monkeypatch.setenv(name, value)
    log(WandB(mode="offline"), run_of(tmp_path / "a"), [1])
    told = capfd.readouterr().err
    assert (
        "W&B: WANDB_SWEEP_ID, WANDB_RUN_ID, WANDB_RESUME, WANDB_NAME, WANDB_DIR would name another "
        "run" in told
    )
    log(WandB(mode="offline"), run_of(tmp_path / "b"), [1])
    assert len({identity(tmp_path / "a"), identity(tmp_path / "b"), "theirs"}) == 3
    assert not (tmp_path / "theirs").exists()


@pytest.mark.slow
# W&B leaves the agent's file open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("wandb_alone")
def test_the_run_that_an_agent_has_started_has_the_agents_id(tmp_path, monkeypatch):
    """The next one of the same process has its own."""
    file = tmp_path / "wandb" / "sweep-sw" / "config-trial1.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("seed:\n  value: 1\n")
    for name, value in zip(connection.SWEEP, ("sw", "trial1", str(file)), strict=True):
        monkeypatch.setenv(name, value)
    log(WandB(mode="offline"), run_of(tmp_path / "a"), [1])
    log(WandB(mode="offline"), run_of(tmp_path / "b"), [1])
    assert identity(tmp_path / "a") == "trial1"
    assert identity(tmp_path / "b") != "trial1"


def test_the_users_variables_are_heeded(tmp_path, online, monkeypatch):
    for name in ("PROJECT", "RUN_GROUP", "JOB_TYPE"):
        monkeypatch.setenv(f"WANDB_{name}", f"my {name}")
    server = online(Online({}))
    log(WandB(), run_of(tmp_path / "a"), [1])
    log(WandB(project="p", group="g", job_type="j"), run_of(tmp_path / "b"), [1])
    chosen = [(one["project"], one["group"], one["job_type"]) for one in server.asked]
    assert chosen == [("my PROJECT", "my RUN_GROUP", "my JOB_TYPE"), ("p", "g", "j")]

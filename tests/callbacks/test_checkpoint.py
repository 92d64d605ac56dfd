"""What is kept, what a load believes, and what it refuses."""

import json
import os
from dataclasses import dataclass

import pytest
import torch
import xxhash
from refusals import refuses
from safetensors.torch import load_file, save_file

from fl_lightning.callbacks.base import Observer, Transform
from fl_lightning.callbacks.checkpoint import Checkpoint, restore
from fl_lightning.core import Slot, Traits
from fl_lightning.methods.base import Method
from fl_lightning.results.folder import RunFolder
from fl_lightning.storage.state import MODEL
from fl_lightning.storage.store import VectorStore

from .rounds import record

CPU = torch.device("cpu")


def a_round(fed, t, cohort=None):
    """What a round leaves behind: other numbers in all that is kept."""
    run = fed.run
    cohort = range(run.clients) if cohort is None else cohort
    for c in cohort:
        state = fed.pool.state(c)
        tensors = [
            *state.vectors.values(),
            *state.received.values(),
            *state.buffers,
            *state.memory.values(),
        ]
        for k, tensor in enumerate({id(v): v for v in tensors}.values()):
            tensor += 100 * c + 10 * t + k
        state.rounds += 1
    for group in run.groups:
        group.vectors = {name: vector + t for name, vector in group.vectors.items()}
    for tensor in run.server.memory.values():
        tensor += t
    run.server.round = t
    run.server.uploaded.update(cohort)
    return record(t, cohort)


def saved(fed, saver, scores, half=False):
    """The run after as many rounds, of which the checkpoint believes these scores; with `half`
    clients take turns."""
    saver.seconds = 0.0
    for t, score in enumerate(scores, 1):
        done = a_round(fed, t, range(t % 2, fed.run.clients, 2) if half else None)
        if score is not None:
            done.metrics["mean_accuracy"] = score
        saver.on_round_end(fed.run, done)
    return fed.run


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(v, other[k]) and v.dtype == other[k].dtype for k, v in one.items()
    )


def facts(run):
    """What survives a round beside tensors."""
    turns = {c: (state.rounds, own_copies(state)) for c, state in run.states.items()}
    return run.server.round, run.server.uploaded, turns


def tensors(run):
    """All tensors that survive a round, by whose they are."""
    parts = {"server": run.server.memory}
    for k, group in enumerate(run.groups):
        initial = dict(enumerate([group.initial, *group.initial_buffers]))
        parts |= {f"vectors {k}": group.vectors, f"initial {k}": initial}
    for c, state in run.states.items():
        buffers = dict(enumerate(state.buffers))
        of_client = {"vectors": state.vectors, "received": state.received}
        of_client |= {"memory": state.memory, "buffers": buffers}
        parts |= {(c, name): part for name, part in of_client.items()}
    return parts


def equal(one, other):
    """Whether all that survives a round is the same."""
    ours, theirs = tensors(one), tensors(other)
    return (
        facts(one) == facts(other)
        and ours.keys() == theirs.keys()
        and all(same(part, theirs[name]) for name, part in ours.items())
    )


def own_copies(state):
    return [slot for slot, vector in state.received.items() if vector is not state.vectors[slot]]


def rounds(folder):
    return sorted(
        int(p.stem.rpartition("-")[2]) for p in (folder / "checkpoints").glob("manifest-*")
    )


def manifest(folder, round):
    held = json.loads((folder / f"checkpoints/manifest-round-{round:05d}.json").read_text())
    return held["manifest"]


def forge(folder, round, change):
    """Change a manifest, with a checksum that fits."""
    content = manifest(folder, round)
    change(content)
    digest = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
    file = folder / f"checkpoints/manifest-round-{round:05d}.json"
    file.write_text(json.dumps({"xxh3": digest, "manifest": content}))


@pytest.mark.parametrize(
    "keep, best, left",
    [(1, False, [5]), (2, False, [4, 5]), (2, True, [2, 4, 5]), (9, True, [1, 2, 3, 4, 5])],
)
def test_the_last_few_and_the_best_are_kept(federation, tmp_path, keep, best, left):
    saved(
        federation(net="norm"),
        Checkpoint(keep=keep, best=best),
        [0.1, 0.8, float("nan"), 0.8, None],
        half=True,
    )
    assert rounds(tmp_path) == left
    folder = tmp_path / "checkpoints"
    named = {e["file"] for t in left for e in manifest(tmp_path, t)["clients"].values()}
    named |= {manifest(tmp_path, t)["server"]["file"] for t in left} | {"initial.safetensors"}
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*.safetensors")} == named


def test_rounds_that_take_no_time_are_saved_every_ten_seconds(federation, tmp_path, monkeypatch):
    """A round of 3 s: the first, then the first that ends 10 s later, and the last. What was
    flushed is all since."""
    fed, now, flushed = federation(net="norm", rounds=12), [0.0], []
    monkeypatch.setattr("fl_lightning.callbacks.checkpoint.time.monotonic", lambda: now[0])
    monkeypatch.setattr(RunFolder, "flush", lambda self, after, upto: flushed.append((after, upto)))
    saver = Checkpoint(keep=99)
    for t in range(1, 13):
        now[0] = 3.0 * t
        saver.on_round_end(fed.run, a_round(fed, t))
    assert rounds(tmp_path) == [1, 5, 9, 12]
    assert flushed == [(0, 1), (1, 5), (5, 9), (9, 12)]
    assert Checkpoint().seconds == 10
    for wrong in (-1.0, float("nan"), float("inf")):
        with refuses(r"callbacks\.checkpoint\.seconds"):
            Checkpoint(seconds=wrong)


@pytest.mark.parametrize("runs, saved, best", [(1, [1, 3, 6, 9], 6), (3, [1, 5, 9], 9)])
def test_a_best_round_is_saved_early_where_that_is_cheap(
    runs, saved, best, federation, tmp_path, monkeypatch
):
    """Rounds of 0.5 s, saved in 1/32 s: what is better than all that is saved waits for 20/32 s,
    the rest for 10 s; of three runs that share a process for 60/32 s."""
    fed, now = federation(net="norm", rounds=9), [0.0]
    others = [Checkpoint() for _ in range(runs)]
    for other in others:
        other.on_fit_start(fed.run)
    monkeypatch.setattr("fl_lightning.callbacks.checkpoint.time.monotonic", lambda: now[0])
    monkeypatch.setattr(RunFolder, "flush", lambda *_: now.__setitem__(0, now[0] + 1 / 32))
    saver = Checkpoint(keep=99)
    for t, score in enumerate([0.1, 0.2, 0.3, 0.2, 0.25, 0.5, 0.6, 0.4, 0.3], 1):
        now[0] += 0.5
        done = a_round(fed, t)
        done.metrics["mean_accuracy"] = score
        saver.on_round_end(fed.run, done)
    assert rounds(tmp_path) == saved  # of one run 2 and 7 came too soon
    assert saver.summarize(fed.run) == {"best_checkpoint_round": best}


@dataclass(frozen=True)
class Slots(Method):
    """More vectors than a model, one of them exchanged, and memory of its own on both sides."""

    traits = Traits(client_memory=True)

    def slots(self):
        return {"control": Slot("zeros", exchanged=True), "personal": Slot()}

    def init_client(self, run):
        return {"alpha": torch.tensor(0.5)}

    def init_server(self, run):
        return {"cluster": torch.zeros(run.clients, dtype=torch.int64)}


class Keeps(Transform):
    """Keeps a number with every client; the server may have its own copies of models."""

    client_memory = True

    def __init__(self, copies):
        self.changes_upload = copies

    def init_client(self, run):
        return {"kept": torch.zeros(1)}


class Watches(Observer):
    """Keeps nothing."""


def of_slots(federation, net="norm", copies=False):
    fed = federation(Slots(), callbacks=[Watches(), Keeps(copies)], net=net)
    for group in fed.run.groups:
        group.vectors |= {"control": torch.zeros_like(group.initial)}
    return fed


@pytest.mark.parametrize("copies", [False, True], ids=["one copy", "two copies"])
@pytest.mark.parametrize("net", ["plain", "norm", {"norm": 2, "plain": 2}], ids=str)
def test_all_that_survives_a_round_is_saved(federation, tmp_path, net, copies):
    before = saved(of_slots(federation, net, copies), Checkpoint(), [0.1, 0.2], half=True)
    again = of_slots(federation, net, copies).run
    for group in again.groups:  # what a run was made with comes from its checkpoint too
        for tensor in (group.initial, *group.initial_buffers):
            tensor += 1
    assert restore(again, tmp_path / "checkpoints") == again.resumed_from == 2
    assert equal(before, again)
    assert own_copies(again.states[0]) == ([MODEL] if copies else []) + ["control"]
    assert {"alpha", "kept"} == again.states[0].memory.keys()


@pytest.mark.parametrize("place", ["disk", "host"])
def test_vectors_come_back_to_where_they_lay(federation, tmp_path, place):
    before = saved(of_slots(federation), Checkpoint(), [None])
    again = of_slots(federation).run
    again.store = VectorStore(place, tmp_path, CPU)
    kept = []
    allocate = again.store.allocate

    def allocated(vector):
        kept.append(allocate(vector))
        return kept[-1]

    again.store.allocate = allocated
    restore(again, tmp_path / "checkpoints")
    assert equal(before, again)
    lie = {
        id(v) for s in again.states.values() for v in (*s.vectors.values(), *s.received.values())
    }
    assert lie == {id(v) for v in kept}


def test_a_run_goes_on_with_the_files_that_it_was_resumed_with(federation, tmp_path):
    saved(federation(net="norm"), Checkpoint(), [None])
    again, saver = federation(net="norm"), Checkpoint()
    restore(again.run, tmp_path / "checkpoints")
    saver.on_fit_start(again.run)
    saver.on_round_end(again.run, a_round(again, 2, [1]))
    files = {c: entry["file"] for c, entry in manifest(tmp_path, 2)["clients"].items()}
    assert files == {
        str(c): f"rows/client-{c:05d}-round-{2 if c == 1 else 1:05d}.safetensors" for c in range(4)
    }
    assert manifest(tmp_path, 2)["initial"] == manifest(tmp_path, 1)["initial"]


def test_the_names_on_disk(federation, tmp_path):
    """Runs that were saved before can be resumed: names stay."""
    folder = tmp_path / "checkpoints"
    saved(of_slots(federation, copies=True), Checkpoint(), [0.5])
    held = manifest(tmp_path, 1)
    assert list(held) == [
        "round",
        "score",
        "initial",
        "server",
        "heard",
        "blocks",
        "dtype",
        "clients",
    ]
    assert held["heard"] == [0, 1, 2, 3] and held["clients"]["2"].keys() == {
        "turns",
        "file",
        "size",
        "xxh3",
    }
    assert held["blocks"][0][0] == [0, 3] and held["blocks"][0][1][0] == [
        "conv.weight",
        [4, 1, 3, 3],
    ]
    own = {
        "row",
        "received",
        "buffers.0",
        "vectors.control",
        "vectors.personal",
        "received.control",
    }
    assert load_file(folder / held["clients"]["2"]["file"]).keys() == own | {
        "fields.alpha",
        "fields.kept",
    }
    assert load_file(folder / held["server"]["file"]).keys() == {
        "0.shared",
        "0.vectors.control",
        "fields.cluster",
    }
    assert load_file(folder / "initial.safetensors").keys() == {"0.row", "0.buffers.0"}


def test_vectors_that_are_one_tensor_are_saved_one_by_one(federation, make_run, tmp_path):
    """As before a first round, when a server's vectors are the initial model."""
    before = federation(net="norm")
    [group] = before.run.groups
    done, initial = a_round(before, 1), group.initial
    group.vectors = {MODEL: initial, "a": initial, "b": initial}
    Checkpoint().on_round_end(before.run, done)
    again = make_run(net="norm")
    restore(again, tmp_path / "checkpoints")
    vectors = again.groups[0].vectors
    assert vectors[MODEL] is again.groups[0].initial
    assert torch.equal(vectors["a"], initial) and torch.equal(vectors["b"], initial)


FORGED = {
    "a path out of the folder": lambda m: m["clients"]["0"].update(file="../../secret.safetensors"),
    "an absolute path": lambda m: m["server"].update(file="/etc/passwd"),
    "no number": lambda m: m["clients"]["0"].update(turns="1"),
    "a negative number": lambda m: m["server"].update(size=-1),
    "a client that is none": lambda m: m["clients"].update({"x": m["clients"]["0"]}),
    "a client by two names": lambda m: m["clients"].update({"00": m["clients"]["0"]}),
    "a part left out": lambda m: m.pop("heard"),
    "another round": lambda m: m.update(round=1),
    "somebody else's row": lambda m: m["clients"].update(
        {"0": m["initial"] | {"turns": 1, "size": 5}}
    ),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_manifest_is_passed_over(what, federation, make_run, tmp_path, capsys):
    saved(federation(net="norm"), Checkpoint(), [0.1, 0.2])
    capsys.readouterr()
    forge(tmp_path, 2, FORGED[what])
    again = make_run(net="norm")
    assert restore(again, tmp_path / "checkpoints") == 1
    err = capsys.readouterr().err
    assert err.startswith("checkpoint: passed over round 2: ")
    assert err.endswith("; using round 1\n") and err.count("\n") == 1


def test_a_manifest_that_is_no_json_at_all(federation, make_run, tmp_path):
    saved(federation(net="norm"), Checkpoint(), [0.1, 0.2])
    file = tmp_path / "checkpoints/manifest-round-00002.json"
    for content in (
        b"",
        b"null",
        b"[]",
        b'{"manifest": {}}',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"xxh3": 1, "manifest": 2}',
    ):
        file.write_bytes(content)
        assert restore(make_run(net="norm"), tmp_path / "checkpoints") == 1
    file.unlink()
    os.mkfifo(file)  # to open it would wait for ever
    assert restore(make_run(net="norm"), tmp_path / "checkpoints") == 1


def test_a_link_out_of_the_folder_is_not_followed(federation, make_run, tmp_path, capsys):
    saved(federation(net="norm"), Checkpoint(), [0.1, 0.2])
    file = tmp_path / "checkpoints" / manifest(tmp_path, 2)["server"]["file"]
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert restore(make_run(net="norm"), tmp_path / "checkpoints") == 1
    assert (
        "server-round-00002.safetensors is no plain file of this folder" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "whose, what",
    [
        ("clients", "row"),
        ("clients", "received"),
        ("clients", "buffers.0"),
        ("clients", "vectors.personal"),
        ("clients", "received.control"),
        ("server", "0.shared"),
        ("server", "0.vectors.control"),
    ],
)
def test_tensors_of_another_shape_are_refused(federation, tmp_path, capsys, whose, what):
    """Also those that need not be there."""
    saved(of_slots(federation, copies=True), Checkpoint(), [0.1, 0.2])
    entry = manifest(tmp_path, 2)[whose]
    entry = entry["1"] if whose == "clients" else entry
    file = tmp_path / "checkpoints" / entry["file"]
    save_file({**load_file(file), what: torch.zeros(3)}, file)
    content = file.read_bytes()
    entry |= {"size": len(content), "xxh3": xxhash.xxh3_128_hexdigest(content)}
    changed = {"1": entry} if whose == "clients" else entry
    forge(tmp_path, 2, lambda m: m[whose].update(changed))
    assert restore(of_slots(federation, copies=True).run, tmp_path / "checkpoints") == 1
    assert f"has no {what} of shape" in capsys.readouterr().err


def test_another_model_is_bad_input(federation, make_run, tmp_path):
    saved(federation(net="norm"), Checkpoint(), [0.1])
    with refuses("another model or precision"):
        restore(make_run(net="plain"), tmp_path / "checkpoints")
    with refuses("more clients than the 2 of this run"):
        restore(make_run(net="norm", clients=2), tmp_path / "checkpoints")
    with refuses("no checkpoint yet"):
        restore(make_run(net="norm"), tmp_path / "nowhere")
    for file in (tmp_path / "checkpoints").glob("server*"):
        file.unlink()
    again = make_run(net="norm")
    before = again.groups[0].initial.clone()
    with refuses(r"no intact checkpoint \(round 1: server-round-00001.* cannot be read"):
        restore(again, tmp_path / "checkpoints")
    assert (
        again.states == {}
        and torch.equal(again.groups[0].initial, before)
        and again.server.round == 0
    )

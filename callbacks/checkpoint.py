"""Checkpoints of a run on disk: the clients' vectors that changed, the server's state, and a
manifest that names the files.

`fl_lightning.storage.manifest` explains their layout and how files are verified. Names of tensors
in the files: `row` is a model, `vectors.SLOT` a further vector, `buffers.K` a buffer, `fields.NAME`
an entry of memory, `received` the server's last copy of a client's model (`received.SLOT`: of a
slot), `K.shared` the global model of group K. In the manifest `turns` counts a client's rounds, and
`heard` lists the clients that have uploaded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fl_lightning.callbacks.base import Observer, internal
from fl_lightning.configuration.config import check
from fl_lightning.configuration.ranges import NonNegativeFloat, PositiveInt
from fl_lightning.core import RoundRecord, RunContext, Tensors
from fl_lightning.core.client import client_memory
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.files import writing
from fl_lightning.foundation.signals import undisturbed
from fl_lightning.results.folder import RunFolder
from fl_lightning.storage import manifest as disk
from fl_lightning.storage.manifest import DamagedCheckpoint, Manifest
from fl_lightning.storage.state import MODEL, ClientState, privacy_spent

CHEAP = 20
"""A best round is saved early once the time since the last checkpoint is this many times the
seconds that it took to save, times the number of runs in this process."""
_SAVING: WeakValueDictionary[int, Checkpoint] = WeakValueDictionary()
"""The callbacks of the runs in progress in this process."""


@dataclass
class Checkpoint(Observer):
    """Saves the run, so that it can be resumed: a run that is killed loses the rounds since the
    last checkpoint.

    The last round is always saved. A run that is killed before its first checkpoint begins again.

    Args:
        every: number of rounds between checkpoints, if `seconds` have passed. 1: each long round is
            saved.
        keep: number of newest checkpoints that are kept. 2: if the disk damages the newest, one is
            left.
        best: also keep the checkpoint of the best round: by accuracy on validation data or, without
            these, by `mean_accuracy`, which looks at test data. A round better than all saved ones
            is saved before `seconds` have passed, as long as such early saving takes at most a
            twentieth of the run's time. `best_checkpoint_round` in `summary.json` names the round.
        seconds: least number of seconds between checkpoints, and from the start to the first. 10:
            rounds of milliseconds would cost more to save than to run, and ten seconds are soon run
            again. 0: save every round that `every` names.
    """

    stage = "save"

    every: PositiveInt = 1
    keep: PositiveInt = 2
    best: bool = True
    seconds: NonNegativeFloat = 10.0
    saved = 0
    """The last round that was saved, or from which the run was resumed."""
    _saved_at: float | None = internal(default=None)
    """Time of this process's last checkpoint, or of its start."""
    _took = 0.1
    """Seconds that the last checkpoint took; before the first a guess: some 50 ms for ten small
    models."""
    _last: Manifest | None = internal(default=None)
    _spent: dict[int, dict[str, Any]] = internal(default_factory=dict)
    """By client, its spent privacy budget when this process last saved it: a visit that failed may
    spend some."""
    _kept: dict[int, Manifest] | None = internal(default=None)
    """Manifests in the folder, by round; None: the folder has not been read yet."""

    def on_fit_start(self, run: RunContext) -> None:
        """Start the clock and, in a resumed run, read the manifest: files of clients that do not
        change are used again."""
        _SAVING[id(self)] = self
        self._saved_at = time.monotonic()
        self.saved = run.resumed_from
        if run.resumed_from:
            self._last = disk.read_manifest(run.folder / "checkpoints", run.resumed_from)

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """Save the run if a checkpoint is due; Ctrl-C and SIGTERM wait until it is written."""
        metric = run.metric
        score = record.metrics.get(metric.of("validation"), record.metrics.get(metric.of("mean")))
        score = None if score is None else metric.merit(score)
        if not self._due(run, record.round, score):
            return
        begun = time.monotonic()
        self.save(run, score)
        self.saved = record.round
        self._saved_at = time.monotonic()
        self._took = self._saved_at - begun

    def save(
        self,
        run: RunContext,
        score: float | None = None,
    ) -> None:
        """Save the run as it is now.

        Args:
            run: the run.
            score: the score of its last round, if it was scored.
        """
        with undisturbed():
            self._last = self._save(run, run.folder / "checkpoints", score)

    def on_close(self, run: RunContext) -> None:
        """Remove this callback from `_SAVING`, the callbacks of this process's runs in progress,
        whose number determines how much time an early checkpoint may take."""
        _SAVING.pop(id(self), None)

    def summarize(self, run: RunContext) -> dict[str, int]:
        """Return the summary's entry `best_checkpoint_round`, the round that `--checkpoint best`
        loads; no entry if there is none."""
        if not run.is_main or not self.best:
            return {}
        manifests = self._kept or disk.manifests(run.folder / "checkpoints")
        greatest = disk.best_round(manifests.values())
        return {} if greatest is None else {"best_checkpoint_round": greatest}

    def may_lack_checkpoint(self, rows: Sequence[Mapping[str, float]]) -> bool:
        """Return whether a killed run may have been stopped before its first checkpoint. If not,
        and there is none on disk, its files have been deleted.

        A run can be killed between the last row and the checkpoint of that round, so only
        checkpoints due in earlier rounds are certain. If the run was begun with the default
        `seconds` and is resumed with fewer, its checkpoints were due later: the greater of the two
        is assumed.

        Args:
            rows: the rows of the run's metrics.csv.
        """
        last_due = len(rows) - 1 - (len(rows) - 1) % self.every
        longest = max(self.seconds, Checkpoint.seconds)
        return last_due <= 0 or sum(row["seconds"] for row in rows[:last_due]) < longest

    def _due(
        self,
        run: RunContext,
        round: int,
        score: float | None,
    ) -> bool:
        """Return whether the round is saved: the same on every rank, by rank 0's clock and
        files."""
        if round == run.rounds:
            return True
        if round % self.every:
            return False
        if not self.seconds:
            return True
        waited = math.inf if self._saved_at is None else time.monotonic() - self._saved_at
        cheap = waited >= CHEAP * self._took * max(1, len(_SAVING))
        is_due = waited >= self.seconds or (cheap and self._is_best(score))
        return bool(run.processes.gather_objects(is_due)[0])

    def _is_best(self, score: float | None) -> bool:
        """Return whether `score` is greater than those of all kept checkpoints."""
        if not self.best or score is None or math.isnan(score):
            return False
        manifests = self._kept or {}
        greatest = disk.best_round(manifests.values())
        return greatest is None or score > manifests[greatest]["score"]

    def _save(
        self,
        run: RunContext,
        folder: Path,
        score: float | None,
    ) -> Manifest:
        """Write what has changed since the last checkpoint, on every rank, then the manifest;
        return it."""
        t = run.server.round
        before = self._last or {"clients": {}}
        entries: dict[str, dict[str, Any]] = {}
        changed: dict[str, Tensors] = {}
        for client, state in sorted(run.states.items()):
            entry = before["clients"].get(str(client))
            spent = {name: x.tolist() for name, x in privacy_spent(state).items()}
            same_budget = spent == self._spent.get(client, {})
            if entry is None or entry["turns"] != state.rounds or not same_budget:
                name = f"rows/client-{client:05d}-round-{t:05d}.safetensors"
                changed[name] = _of_client(state)
                entry = {"turns": state.rounds, "file": name}
                self._spent[client] = spent
            entries[str(client)] = entry
        server = f"server-round-{t:05d}.safetensors"
        if run.is_main:
            changed[server] = _of_server(run)
            if "initial" not in before:
                changed["initial.safetensors"] = _initial(run)
        written = disk.write_tensors(folder, changed)
        for entry in entries.values():
            entry |= written.get(entry["file"], {})
        parts = run.processes.gather_objects((entries, written))  # all vectors are on the disk
        files = parts[0][1]
        manifest = {
            "round": t,
            "score": score,
            "initial": before.get("initial") or files.get("initial.safetensors"),
            "server": files[server],
            "heard": sorted(run.server.uploaded),
            "blocks": _blocks(run),
            "dtype": str(run.dtype),
            "clients": {client: entry for part, _ in parts for client, entry in part.items()},
        }
        if run.is_main:
            RunFolder(run.folder).flush(self._last["round"] if self._last else run.resumed_from, t)
            disk.write_manifest(folder, manifest)
            self._prune(folder, manifest)
        run.processes.barrier()
        return manifest

    def _prune(
        self,
        folder: Path,
        newest: Manifest,
    ) -> None:
        """Delete all checkpoints except the newest few and the best, and files that no kept
        manifest names.

        The first call reads the folder; later ones know what this run has written.
        """
        files = set[str]()
        if self._kept is None:
            saved = disk.manifests(folder)
            self._kept = {t: m for t, m in saved.items() if t <= newest["round"]}
            for pattern in ("manifest-*", "server-*", "rows/*"):
                files |= {path.relative_to(folder).as_posix() for path in folder.glob(pattern)}
        self._kept[newest["round"]] = newest
        rounds = sorted(self._kept, reverse=True)[: self.keep]
        greatest = disk.best_round(self._kept.values())
        if self.best and greatest is not None:
            rounds.append(greatest)
        for manifest in self._kept.values():
            files |= {*disk.files_of(manifest)}
        self._kept = {t: self._kept[t] for t in rounds}
        for manifest in self._kept.values():
            files -= {*disk.files_of(manifest)}
        with writing(folder):
            for name in files:
                (folder / name).unlink(missing_ok=True)


def why_no_checkpoint(
    callbacks: Iterable[Any],
    rows: Sequence[Mapping[str, float]],
    ended: bool,
) -> str:
    """Return why a run never saved a checkpoint, in words that complete "the run ...".

    Args:
        callbacks: the run's callbacks.
        rows: the rows of its metrics.csv.
        ended: whether the run has ended.

    Raises:
        BadInput: the run has saved a checkpoint, and its files have been deleted.
    """
    savers = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if ended or not all(saver.may_lack_checkpoint(rows) for saver in savers):
        problem = "the run's checkpoints are gone, and it would begin again over its own tables"
        cure = "give a new --name, or restore its folder checkpoints"
        raise BadInput("resume", True, f"{problem}; {cure}")
    return "was stopped before its first checkpoint" if savers else "keeps no checkpoints"


def has_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds any checkpoint, intact or damaged."""
    return bool(disk.rounds(folder))


def restore(
    run: RunContext,
    folder: Path,
    which: Literal["last", "best"] | int = "last",
) -> int:
    """Load a checkpoint in `folder` into `run` (the newest intact, the best, or a round's); return
    its round.

    Each rank loads its own clients and the server. Skipped checkpoints are named on stderr.

    Raises:
        BadInput: there is no checkpoint, none is intact, or it belongs to another model.
    """
    rounds = disk.rounds(folder)
    if which != "last":
        chosen = disk.best_round(disk.manifests(folder).values()) if which == "best" else which
        rounds = [t for t in rounds if t == chosen]
    rounds = run.processes.gather_objects(rounds)[0]
    place = str(folder.parent)
    check("run", place, bool(rounds), "it holds no checkpoint yet")
    damaged: list[str] = []
    for t in rounds:
        reason = ""
        try:
            loaded = _load(run, folder, t)
        except DamagedCheckpoint as error:
            reason = str(error)
        reasons = [*filter(None, run.processes.gather_objects(reason))]
        if not reasons:
            break
        damaged.append(f"round {t}: {reasons[0]}")
    else:
        raise BadInput("run", place, f"it has no intact checkpoint ({'; '.join(damaged)})")
    if damaged and run.is_main:
        log.say(f"checkpoint: passed over {'; '.join(damaged)}; using round {t}")
    _put(run, loaded)
    run.data.at_round(run.server.round)
    return run.server.round


class _Loaded(NamedTuple):
    manifest: Manifest
    initial: Tensors
    server: Tensors
    states: dict[int, ClientState]


def _load(
    run: RunContext,
    folder: Path,
    round: int,
) -> _Loaded:
    """Return manifest, initial models, server tensors and this rank's clients; `run` is not
    changed."""
    manifest = disk.read_manifest(folder, round)
    place = str(folder.parent)
    clients = [*map(int, manifest["clients"])]
    fits = max(manifest["heard"] + clients, default=0) < run.clients
    cure = "resume with the run's own configuration"
    requirement = f"its checkpoint has more clients than the {run.clients} of this run; {cure}"
    check("run", place, fits, requirement)
    fits = manifest["blocks"] == _blocks(run) and manifest["dtype"] == str(run.dtype)
    requirement = f"its checkpoint was saved with another model or precision; {cure}"
    check("run", place, fits, requirement)
    initial = disk.read_tensors(folder, manifest["initial"], _initial(run), {})
    models = {f"{k}.shared": group.initial for k, group in enumerate(run.groups)}
    fields = _flat(fields=run.server.memory) | _vectors(run)
    server = disk.read_tensors(folder, manifest["server"], fields, models)
    memory = client_memory(run)
    states = {}
    for client in run.at_home(clients):
        entry = manifest["clients"][str(client)]
        group = run.group_of(client)
        model = group.initial
        slots = dict.fromkeys(run.method.slots(), model)
        buffers = group.initial_buffers
        expected = _flat(row=model, vectors=slots, buffers=buffers, fields=memory)
        copies = _flat(received=slots) | {"received": model}
        saved = disk.read_tensors(folder, entry, expected, copies)
        states[client] = _state(run, client, entry["turns"], saved)
    return _Loaded(manifest, initial, server, states)


def _put(run: RunContext, loaded: _Loaded) -> None:
    """Copy what was loaded into `run`."""
    device = run.device
    saved = loaded.server
    for k, group in enumerate(run.groups):
        initial = _under(loaded.initial, f"{k}")
        group.initial.copy_(initial["row"])
        for buffer, value in zip(group.initial_buffers, _buffers(initial, device), strict=True):
            buffer.copy_(value)
        for name, tensor in group.frozen.items():
            tensor.copy_(initial[f"frozen.{name}"])
        for name, vector in _under(saved, f"{k}.vectors").items():
            group.vectors[name] = vector.to(device)
        group.vectors[MODEL] = saved.get(f"{k}.shared", group.initial).to(device)
    run.server.memory |= _under(saved, "fields")
    run.server.round = loaded.manifest["round"]
    run.server.uploaded = set(loaded.manifest["heard"])
    run.states.clear()
    run.states.update(loaded.states)
    run.resumed_from = run.server.round


# ---------------------------------------------------------------- tensors and their names


def _of_client(state: ClientState) -> Tensors:
    """Return a client's tensors by name; the server's copies of its uploads only where they are
    other tensors."""
    vectors = dict(state.vectors)
    row = vectors.pop(MODEL)
    tensors = _flat(
        row=row,
        vectors=vectors,
        buffers=state.buffers,
        fields=state.memory,
    )
    for slot, vector in state.received.items():
        if vector is not state.vectors.get(slot):
            tensors[_received_name(slot)] = vector
    return tensors


def _state(
    run: RunContext,
    client: int,
    rounds: int,
    saved: Mapping[str, Tensor],
) -> ClientState:
    """Return the client's state from the tensors that `_of_client` named, in the run's store."""
    slots = run.method.slots()
    vectors = {MODEL: run.store.allocate(saved["row"])}
    vectors |= {slot: run.store.allocate(saved[f"vectors.{slot}"]) for slot in slots}
    received = {}
    for slot in [MODEL, *(name for name, slot in slots.items() if slot.exchanged)]:
        copy = _received_name(slot)
        received[slot] = run.store.allocate(saved[copy]) if copy in saved else vectors[slot]
    # Memory lies on the CPU, but for the optimiser's tensors of the size of parameters.
    memory = _under(saved, "fields")
    for name, value in memory.items():
        if name.startswith("optimizer.") and value.ndim:
            memory[name] = run.store.stow(value.to(run.device))
    return ClientState(
        client,
        vectors,
        _buffers(saved, run.device),
        received,
        rounds,
        memory,
    )


def _received_name(slot: str) -> str:
    """Return the name of the server's last copy of a slot."""
    return "received" if slot == MODEL else f"received.{slot}"


def _of_server(run: RunContext) -> Tensors:
    """Return the server's memory and vectors; a global model only if it is not the initial one."""
    tensors = _flat(fields=run.server.memory) | _vectors(run)
    for k, group in enumerate(run.groups):
        if group.vectors[MODEL] is not group.initial:
            tensors[f"{k}.shared"] = group.vectors[MODEL]
    return tensors


def _vectors(run: RunContext) -> Tensors:
    """Return the server's vectors of each group other than the global model."""
    tensors: Tensors = {}
    for k, group in enumerate(run.groups):
        vectors = {name: vector for name, vector in group.vectors.items() if name != MODEL}
        tensors |= _flat(**{f"{k}.vectors": vectors})
    return tensors


def _initial(run: RunContext) -> Tensors:
    """Return each group's initial model, buffers and frozen tensors: stored once."""
    tensors: Tensors = {}
    for k, group in enumerate(run.groups):
        parts = _flat(row=group.initial, buffers=group.initial_buffers, frozen=group.frozen)
        tensors |= {f"{k}.{name}": tensor for name, tensor in parts.items()}
    return tensors


def _blocks(run: RunContext) -> list[Any]:
    """Return the facts in which a checkpoint and a run must agree: for each group its first and
    last client, and names and shapes of its blocks."""
    return [
        [[*g.members[:1], *g.members[-1:]], [[b.name, list(b.shape)] for b in g.layout.blocks]]
        for g in run.groups
    ]


def _flat(**parts: Tensor | Mapping[str, Tensor] | Sequence[Tensor]) -> Tensors:
    """Return tensors by dotted names: `row`, `vectors.personal`, `buffers.0`."""
    tensors: Tensors = {}
    for name, part in parts.items():
        if isinstance(part, Tensor):
            tensors[name] = part
        else:
            pairs = part.items() if isinstance(part, Mapping) else enumerate(part)
            tensors |= {f"{name}.{key}": tensor for key, tensor in pairs}
    return tensors


def _under(saved: Mapping[str, Tensor], name: str) -> Tensors:
    """Return the tensors of the part `name`, by the rest of their names."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): t for key, t in saved.items() if key.startswith(prefix)}


def _buffers(saved: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
    buffers = _under(saved, "buffers")
    return [buffers[str(k)].to(device) for k in range(len(buffers))]

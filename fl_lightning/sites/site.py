"""A site: trains one client on its own data and answers the centre's messages.

Before an answer is sent, it and then the client's new state are written to the site's folder. A
message that arrives twice gets the stored bytes again, and nothing is trained twice: a stored
answer is valid if the checkpoint is of its round.
"""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning import __version__
from fl_lightning.callbacks.base import Transform
from fl_lightning.callbacks.checkpoint import Checkpoint, has_checkpoint, restore
from fl_lightning.configuration.config import Config
from fl_lightning.core import Client, Payload, RunContext
from fl_lightning.engine.evaluation import Evaluator
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.record import ClientResult, Results, Timer, numbers
from fl_lightning.engine.trainer import choose_executors, count_costs
from fl_lightning.exporting.calibration import CalibrationRule
from fl_lightning.foundation.device import digest
from fl_lightning.foundation.errors import BadClient, redact
from fl_lightning.foundation.files import write_whole
from fl_lightning.run import assemble, calibrated, instantiate, write_model
from fl_lightning.sites import wire
from fl_lightning.sites.data import (
    NotTransmitted,
    OwnData,
    UnreadableMemory,
    site_transforms,
    with_loop,
)
from fl_lightning.storage import manifest as disk
from fl_lightning.storage.state import MODEL, privacy_spent

MODELS_FILE = "received.safetensors"
"""File in a site's folder with the last message that contained the server's models, for exports."""
HEADER_KEYS = ("kind", "run", "round", "client")
"""Header of a message; the answer has the same."""
FAILED = "its site could not go on; the traceback is in failure.txt in the site's folder"
"""Reason that is sent for an unexpected error, whose own text could contain a label or a path."""
NOT_FINITE = "is not finite; lower optimizer.lr"


class Uploading(Transform):
    """Runs a transform's `init_client` and `on_upload` at a site, but not its `on_download`, which
    the centre has run on the payload before it sent the message."""

    changes_upload = client_memory = True

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def init_client(self, run: RunContext) -> dict[str, Tensor]:
        """Return the wrapped transform's tensors."""
        return self.transform.init_client(run)

    def on_upload(self, client: Client, payload: Payload) -> None:
        """Run the wrapped transform's `on_upload`."""
        self.transform.on_upload(client, payload)


class Outbox(Transform):
    """Runs after all other transforms and keeps the upload that they leave, to send it."""

    payload: Payload

    def on_upload(self, client: Client, payload: Payload) -> None:
        """Keep `payload`."""
        self.payload = payload


class ServerModel:
    """Gives the `Evaluator` at a site the server's model for its client, from the last message."""

    has_global = False
    """Whether the server has a model for every client."""
    model: Tensor | None = None

    def global_model(self, client: int) -> Tensor | None:
        """Return the server's model; None: the server has none for the site's client."""
        return self.model


class Site:
    """Trains and scores one client at its site. Made anew for each message, from the state in its
    folder.

    Args:
        fabric: this process's Fabric.
        config: the app's configuration.
        folder: holds the site's state and stored answers.
        data: the client's data.
        client: its number.
        fingerprint: the app's fingerprint (`app.fingerprint`).
        name: the site's name, for messages to the user.
    """

    def __init__(
        self,
        fabric: Fabric,
        config: Config,
        folder: Path,
        data: OwnData,
        client: int,
        fingerprint: str,
        name: str = "",
    ) -> None:
        self.client = client
        self.name = name
        self.data = data
        self.fingerprint = fingerprint
        self.folder = folder
        sizes = data.train_sizes, data.validation_sizes, data.test_sizes
        self.sizes = [size[client] for size in sizes]
        # with skip a client that fails keeps its former state
        federation = replace(config.federation, on_bad_client="skip")
        config = replace(
            with_loop(config), federation=federation, callbacks=site_transforms(config), loggers={}
        )
        self.transforms = [
            instantiate(f"callbacks.{key}", component)
            for key, component in config.callbacks.items()
        ]
        # set if the method cannot be deployed: the site then answers hello only
        self.refused: NotTransmitted | None = None
        try:
            # placeholders: `assemble` assigns clients to processes by their sizes
            data.train_sizes = data.validation_sizes = data.test_sizes = [2] * config.clients
            self.fed = assemble(fabric, config, folder, self.transforms, data)
            for transform in self.transforms:
                transform.on_fit_start(self.fed.run)
        except NotTransmitted as error:  # the method builds server memory from all clients' data
            self.refused = error
            return
        self._settle()
        data.train_sizes, data.validation_sizes, data.test_sizes = sizes
        self.checkpoint = Checkpoint(best=False, seconds=0)
        if has_checkpoint(folder / "checkpoints"):
            restore(self.fed.run, folder / "checkpoints")
            self.checkpoint.on_fit_start(self.fed.run)
            if (folder / MODELS_FILE).is_file():
                self._take_over(wire.unpack((folder / MODELS_FILE).read_bytes()))

    def _settle(self) -> None:
        """Adapt the federation to a site: no readable server memory, server models from messages,
        transforms on the upload only."""
        run = self.fed.run
        run.server.memory = UnreadableMemory()
        worker = self.fed.worker
        self.server_model = ServerModel()
        self.evaluator = Evaluator(run, worker.trainers, worker.guard, self.server_model)
        self.group = run.group_of(self.client)
        self.outbox = Outbox()
        transforms = [*map(Uploading, self.transforms), self.outbox]
        worker = replace(worker, evaluator=self.evaluator, transforms=transforms)
        self.fed = Federation(worker)
        choose_executors(run, worker.trainers)
        count_costs(run, worker.trainers)

    @property
    def round(self) -> int:
        """Round of the last visit that this site has answered; 0: none."""
        return self.fed.run.server.round

    # ---------------------------------------------------------------- messages

    def answer(self, content: bytes) -> bytes:
        """Return the answer to a message. An error is answered, too, with a reason that contains
        nothing of the site's data."""
        about: wire.Message = {}
        stage = "download"
        why = FAILED
        work = {
            "visit": self._visit,
            "score": self._score,
            "final": self._final,
        }
        try:
            message = wire.unpack(content)
            about = {key: message[key] for key in HEADER_KEYS}
            kind = message["kind"]
            self._check(message)
            if kind == "hello":
                return wire.pack(about | self._hello())
            if self.refused is not None:
                raise self.refused
            stored_reply = self._stored_reply(message, content)
            if stored_reply is not None:
                return stored_reply
            self._agree(message)
            stage = "training" if kind == "visit" else "evaluation"
            reply = wire.pack(about | work[kind](message))
            self._keep(message, content, reply)
            return reply
        except NotTransmitted as error:
            return wire.pack(about | {"refused": [error.attribute, error.hook]})
        except BadClient as failure:
            stage = failure.stage
            if failure.reason.endswith(NOT_FINITE):
                why = failure.reason
        except wire.Unreadable as error:
            stage = "download"
            why = f"the site refused the message: {error}"
        except Exception:
            keep_traceback(self.folder)
        return wire.pack(about | {"failed": [stage, why]})

    def _check(self, message: wire.Message) -> None:
        """Raise `Unreadable` for a message that is not for this site."""
        kind = message["kind"]
        if kind not in ("hello", "visit", "score", "final"):
            raise wire.Unreadable("its kind is unknown")
        if kind != "hello" and message["fingerprint"] != self.fingerprint:
            raise wire.Unreadable("it is of another configuration than this site's")
        if message["client"] not in (self.client, None):
            raise wire.Unreadable(f"it is for client {message['client']}")

    def _hello(self) -> wire.Message:
        return {
            "site": self.client,
            "name": self.name,
            "sizes": self.sizes,
            "version": __version__,
            "fingerprint": self.fingerprint,
            "initial": "" if self.refused else digest_of(self.fed),
        }

    def _agree(self, message: wire.Message) -> None:
        """Restore the client's state after the number of visits that the centre counts. It is
        smaller than the site's own if the centre has refused an answer or never received it.

        Raises:
            Unreadable: the site has not stored that state.
        """
        run = self.fed.run
        folder = self.folder / "checkpoints"
        answered_round = self.round
        # "visits" in messages, "turns" in manifests and `ClientState.rounds` are one count
        visits = visits_of(run, self.client)
        counted_visits = message["visits"]
        if message["round"] < answered_round or visits == counted_visits:
            return
        if not counted_visits:
            self.fed.pool.restore(self.client, None)
        else:
            client = str(self.client)
            saved_rounds = [
                t
                for t, manifest in disk.manifests(folder).items()
                if manifest["clients"].get(client, {}).get("turns") == counted_visits
            ]
            if visits < counted_visits or not saved_rounds:
                have = f"the site has the state after {visits} visits"
                raise wire.Unreadable(f"{have}, the centre counts {counted_visits}")
            spent = privacy_spent(run.states.get(self.client))
            restore(run, folder, saved_rounds[0])
            run.states[self.client].memory |= spent
            self.checkpoint.on_fit_start(run)
        run.server.round = answered_round
        self.checkpoint.save(run)

    def _visit(self, message: wire.Message) -> wire.Message:
        """Train the client; return its upload and its values for `clients.csv`."""
        run = self.fed.run
        t = message["round"]
        c = self.client
        if t <= self.round:
            raise wire.Unreadable(
                f"it is of round {t}, and the site has answered round {self.round}"
            )
        self._take_over(message)
        payload = wire.to_payload(
            message["payload"],
            self.group.layout,
            self.group.initial,
        )
        run.server.round = t - 1
        results = self.fed.worker.visits(
            t,
            [c],
            {c: payload},
            message["scored"],
            Timer(),
        )
        result = self._result(results)
        run.server.round = t
        run.server.uploaded.add(c)
        memory = run.states[c].memory
        names = [name for transform in self.transforms for name in transform.init_client(run)]
        return {
            "values": result.values,
            "uncounted": result.uncounted,
            "payload": wire.of_payload(self.outbox.payload),
            "memory": {name: memory[name] for name in names},
        }

    def _result(self, results: Results) -> ClientResult:
        """Return the client's result; raise `BadClient` if it failed or has a value that is not
        finite."""
        if results.failures:
            raise results.failures[0][0]
        result = results.clients[self.client]
        numbers([result.values])
        return result

    def _score(self, message: wire.Message) -> wire.Message:
        """Score the models that exist only after aggregation."""
        self._take_over(message)
        t = message["round"]
        results = Results({self.client: ClientResult(self.client, {})})
        self.fed.run.server.round = t - 1
        self.evaluator.after_aggregation(t, results)
        return {"values": self._result(results).values}

    def _final(self, message: wire.Message) -> wire.Message:
        """Score the client's final model."""
        self._take_over(message)
        t = self.fed.run.server.round = message["round"]
        with self.evaluator.guard.naming(t, self.client, self.evaluator):
            scores = self.evaluator.final_scores(self.client)
        numbers([scores, scores["further"]])
        return {"scores": scores}

    def export(self, out: Path, calibration: CalibrationRule) -> dict[str, Any]:
        """Write the client's current final model to `out`; return its kind, round and arguments.
        `calibration`: temperature and threshold to fit on the site's validation data."""
        kind, vector, buffers = self.evaluator.final_model(self.client)
        fitted = calibrated(self.evaluator, self.client, kind, vector, buffers, calibration)
        facts = write_model(self.fed, self.client, vector, buffers, out, fitted=fitted)
        return {"kind": kind, **facts}

    def _take_over(self, message: wire.Message) -> None:
        """Set the server's models for the client to those in a message."""
        run = self.fed.run
        group = self.group
        layout = group.layout
        size = len(layout.blocks)
        self.server_model.has_global = bool(message["has_global"])
        run.server.uploaded = {self.client} if message["uploaded"] else set()
        if shared := message.get("shared"):
            sent = wire.mask(shared["sent"], size)
            vector = group.initial.clone()
            group.vectors[MODEL] = wire.unpack_into(
                vector,
                layout,
                sent,
                shared["model"],
            )
        if model := message.get("global"):
            sent = wire.mask(model["sent"], size)
            own_blocks = wire.mask(model["own"], size)
            vector = group.initial.clone()
            state = run.states.get(self.client)
            if state is not None:
                columns = wire.packed(state.vectors[MODEL], layout, own_blocks)
                wire.unpack_into(vector, layout, own_blocks, columns)
            self.server_model.model = wire.unpack_into(
                vector,
                layout,
                sent,
                model["model"],
            )

    # ---------------------------------------------------------------- stored answers

    def _file(self, round: int) -> Path:
        return self.folder / "answers" / f"round-{round:05d}.safetensors"

    def _stored_reply(self, message: wire.Message, content: bytes) -> bytes | None:
        """Return the stored answer if the message is a visit of the last answered round; else
        None.

        Raises:
            Unreadable: in that round the site has answered another message.
        """
        if message["kind"] != "visit" or message["round"] != self.round:
            return None
        file = self._file(self.round)
        digest_file = file.with_suffix(".xxh3")
        if not (file.is_file() and digest_file.is_file()):
            return None
        reply = file.read_bytes()
        if digest_file.read_text(encoding="utf-8") != _digests(content, reply):
            raise wire.Unreadable(f"another message of round {self.round} has been answered")
        return reply

    def _keep(
        self,
        message: wire.Message,
        content: bytes,
        reply: bytes,
    ) -> None:
        """Write to the disk: of a visit the answer and then the client's state, of another message
        the message itself, which contains the server's models."""
        if message["kind"] != "visit":
            write_whole(self.folder / MODELS_FILE, content)
            return
        file = self._file(message["round"])
        write_whole(file, reply)
        write_whole(file.with_suffix(".xxh3"), _digests(content, reply))
        self.checkpoint.save(self.fed.run)  # from here on the stored answer is valid
        for stored_file in file.parent.glob("round-*"):
            if stored_file.stem < file.stem:
                stored_file.unlink()


def failed_reply(
    content: bytes,
    client: Any,
    name: str,
    why: str,
) -> bytes:
    """Return the answer of a site that cannot take part.

    Args:
        content: the message.
        client: the client in the node's configuration, unchecked.
        name: the site's name.
        why: the reason, for the user.
    """
    about: wire.Message = {}
    with contextlib.suppress(wire.Unreadable, KeyError):
        message = wire.unpack(content)
        about = {key: message[key] for key in HEADER_KEYS}
    return wire.pack(
        about
        | {
            "failed": ["data", why],
            "site": client,
            "name": name,
        }
    )


def keep_traceback(folder: Path) -> None:
    """Append the traceback of the current error to `failure.txt`. Its text could contain a label or
    a path, so it stays at the site."""
    with (folder / "failure.txt").open("a", encoding="utf-8") as file:
        file.write(f"{redact(traceback.format_exc())}\n")


def visits_of(run: RunContext, client: int) -> int:
    """Return the number of visits that have trained the client's state in `run.states`; 0 if the
    method keeps no client's state between rounds."""
    return run.states[client].rounds if run.policy.keeps_clients and client in run.states else 0


def digest_of(fed: Federation) -> str:
    """Return a digest of the initial models, which must be equal at the centre and all sites."""
    tensors = []
    for group in fed.run.groups:
        tensors += [group.initial, *group.frozen.values()]
    return digest(tensors).hex()


def _digests(message: bytes, reply: bytes) -> str:
    return f"{xxhash.xxh3_128_hexdigest(message)} {xxhash.xxh3_128_hexdigest(reply)}"

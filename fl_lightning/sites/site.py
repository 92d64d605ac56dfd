"""One site: its own data, one client, and an answer for each message. What it keeps lies in a
folder of its own.

An answer is on the disk, with the client's state behind it, before it is sent. A message that comes
again gets the same bytes again, and nothing is trained twice: the checkpoint's round says whether
the stored answer counts.
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
from fl_lightning.exporting.calibration import Calibration
from fl_lightning.foundation.device import digest
from fl_lightning.foundation.errors import BadClient, redact
from fl_lightning.foundation.files import write_whole
from fl_lightning.run import assemble, calibrated, instantiate, written
from fl_lightning.sites import wire
from fl_lightning.sites.data import NotHere, OwnData, Withheld, of_sites, with_loop
from fl_lightning.storage import manifest as disk
from fl_lightning.storage.state import MODEL, spent_by

BROUGHT = "received.safetensors"
"""In a site's folder: the last message that brought the server's models, for exports."""
ABOUT = ("kind", "run", "round", "client")
"""Of a message's header: an answer repeats it."""
FAILED = "its site could not go on; the traceback is in failure.txt in the site's folder"
"""What leaves the site of an error: its text could hold a label or a path."""
NOT_FINITE = "is not finite; lower optimizer.lr"


class Uploading(Transform):
    """A transform's part at the site: the centre has run `on_download` before it sent."""

    changes_upload = client_memory = True

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def init_client(self, run: RunContext) -> dict[str, Tensor]:
        """What the transform keeps."""
        return self.transform.init_client(run)

    def on_upload(self, client: Client, payload: Payload) -> None:
        """What the transform does."""
        self.transform.on_upload(client, payload)


class Outbox(Transform):
    """Keeps the upload of a visit as the transforms have left it: what is to be sent."""

    def __init__(self) -> None:
        self.payload: Payload | None = None

    def on_upload(self, client: Client, payload: Payload) -> None:
        """It is about to leave."""
        self.payload = payload


class Brought:
    """What the server has for the site's client: it comes with the message."""

    whole = False
    model: Tensor | None = None

    def of(self, client: int) -> Tensor | None:
        """What the message brought."""
        return self.model


class Site:
    """The site of `client`, which `data` belongs to, for one message; its state and answers are
    kept in `folder`."""

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
        # a client that failed is left as it was
        one = replace(config.federation, on_bad_client="skip")
        config = replace(with_loop(config), federation=one, callbacks=of_sites(config), loggers={})
        self.transforms = [
            instantiate(f"callbacks.{name}", c) for name, c in config.callbacks.items()
        ]
        self.refused: NotHere | None = None
        try:
            # To deal clients to processes a federation asks for everybody's sizes: any will do.
            data.train_sizes = data.validation_sizes = data.test_sizes = [2] * config.clients
            self.fed = assemble(fabric, config, folder, self.transforms, data)
            for transform in self.transforms:
                transform.on_fit_start(self.fed.run)
        except NotHere as error:  # the method's first server memory is made of everybody's data
            self.refused = error
            return
        self._settle()
        data.train_sizes, data.validation_sizes, data.test_sizes = sizes
        self.checkpoint = Checkpoint(best=False, seconds=0)
        if has_checkpoint(folder / "checkpoints"):
            restore(self.fed.run, folder / "checkpoints")
            self.checkpoint.on_fit_start(self.fed.run)
            if (folder / BROUGHT).is_file():
                self._bring(wire.unpack((folder / BROUGHT).read_bytes()))

    def _settle(self) -> None:
        """Have the federation be this client's alone: no server memory, scores of what messages
        bring."""
        fed = self.fed
        run = self.fed.run
        run.server.memory = Withheld()
        worker = fed.worker
        self.brought = Brought()
        self.evaluator = Evaluator(run, worker.trainers, worker.guard, self.brought)
        self.group = run.group_of(self.client)
        self.outbox = Outbox()
        transforms = [*map(Uploading, self.transforms), self.outbox]
        worker = replace(worker, evaluator=self.evaluator, transforms=transforms)
        self.fed = fed = Federation(worker)
        choose_executors(run, fed.worker.trainers)
        count_costs(run, fed.worker.trainers)

    @property
    def round(self) -> int:
        """The last round that this site has answered; 0: none."""
        return self.fed.run.server.round

    # ---------------------------------------------------------------- messages

    def answer(self, content: bytes) -> bytes:
        """The answer to a message; an error becomes an answer, too, in one fixed sentence."""
        about: wire.Message = {}
        stage = "download"
        try:
            message = wire.unpack(content)
            about = {key: message[key] for key in ABOUT}
            self._check(message)
            if message["kind"] == "hello":
                return wire.pack(about | self._hello())
            if self.refused is not None:
                raise self.refused
            again = self._answered(message, content)
            if again is not None:
                return again
            self._agree(message)
            stage = "training" if message["kind"] == "visit" else "evaluation"
            work = {"visit": self._visit, "score": self._score, "final": self._final}
            reply = wire.pack(about | work[message["kind"]](message))
            self._keep(message, content, reply)
            return reply
        except NotHere as error:
            return wire.pack(about | {"refused": [error.what, error.hook]})
        except BadClient as failure:
            fixed = failure.reason if failure.reason.endswith(NOT_FINITE) else FAILED
            stage = failure.stage
            why = fixed
        except wire.Unreadable as error:
            stage = "download"
            why = f"the site refused the message: {error}"
        except Exception:
            keep_traceback(self.folder)
            why = FAILED
        return wire.pack(about | {"failed": [stage, why]})

    def _check(self, message: wire.Message) -> None:
        if message["kind"] not in ("hello", "visit", "score", "final"):
            raise wire.Unreadable("its kind is unknown")
        if message["kind"] != "hello" and message["fingerprint"] != self.fingerprint:
            raise wire.Unreadable("it is of another configuration than this site's")
        if message["client"] not in (self.client, None):
            raise wire.Unreadable(f"it is for client {message['client']}")

    def _hello(self) -> wire.Message:
        facts = {
            "site": self.client,
            "name": self.name,
            "sizes": self.sizes,
            "version": __version__,
        }
        facts["fingerprint"] = self.fingerprint
        if self.refused is not None:
            return facts | {"initial": "", "at": 0}
        return facts | {"initial": digest_of(self.fed), "at": self.round}

    def _agree(self, message: wire.Message) -> None:
        """Go back to the state that the centre counts on: an answer that it has refused, or never
        had, does not count.

        Raises:
            Unreadable: the site does not have that state.
        """
        run = self.fed.run
        folder = self.folder / "checkpoints"
        answered = self.round
        visits = visits_of(run, self.client)
        counted = message["visits"]
        if message["round"] < answered or visits == counted:
            return
        if not counted:
            self.fed.pool.restore(self.client, None)
        else:
            entries = {t: m["clients"] for t, m in disk.manifests(folder).items()}
            turns = {t: e.get(str(self.client), {}).get("turns") for t, e in entries.items()}
            saved = next((t for t, count in turns.items() if count == counted), None)
            if visits < counted or saved is None:
                raise wire.Unreadable(
                    f"the site has its state after {visits} visits, the centre has {counted}"
                )
            spent = spent_by(run.states.get(self.client))
            restore(run, folder, saved)
            run.states[self.client].memory |= spent
            self.checkpoint.on_fit_start(run)
        run.server.round = answered  # what was answered is answered
        self.checkpoint.save(run)

    def _visit(self, message: wire.Message) -> wire.Message:
        """Train: the upload, and the columns of the client's row."""
        run = self.fed.run
        t = message["round"]
        c = self.client
        if t <= self.round:
            raise wire.Unreadable(
                f"it is of round {t}, and the site has answered round {self.round}"
            )
        self._bring(message)
        payload = wire.to_payload(message["payload"], self.group.layout, self.group.initial)
        run.server.round = t - 1
        results = self.fed.worker.visits(t, [c], {c: payload}, message["scored"], Timer())
        if results.failures:
            raise results.failures[0][0]
        result = results.clients[c]
        upload = self.outbox.payload
        assert upload is not None
        numbers([result.values])
        memory = run.states[c].memory
        kept = [name for transform in self.transforms for name in transform.init_client(run)]
        answer = {
            "values": result.values,
            "uncounted": result.uncounted,
            "payload": wire.of_payload(upload),
            "memory": {name: memory[name] for name in kept},
        }
        run.server.round = t
        run.server.uploaded.add(c)
        return answer

    def _score(self, message: wire.Message) -> wire.Message:
        """Scores of models that exist only now."""
        self._bring(message)
        results = Results({self.client: ClientResult(self.client, {})})
        self.fed.run.server.round = message["round"] - 1
        self.evaluator.after_aggregation(message["round"], results)
        if results.failures:
            raise results.failures[0][0]
        values = results.clients[self.client].values
        numbers([values])
        return {"values": values}

    def _final(self, message: wire.Message) -> wire.Message:
        """Kind and scores of the client's final model."""
        self._bring(message)
        t = self.fed.run.server.round = message["round"]
        with self.evaluator.guard.naming(t, self.client, self.evaluator):
            scores = self.evaluator.final_scores(self.client)
        numbers([scores, scores["further"]])
        return {"scores": scores}

    def export(self, out: Path, calibration: Calibration) -> dict[str, Any]:
        """Write the client's final model, as far as it is known now, to `out`; its kind, round and
        arguments. `calibration` is fitted to the site's validation data."""
        kind, vector, buffers = self.evaluator.final_model(self.client)
        fitted = calibrated(self.evaluator, self.client, kind, vector, buffers, calibration)
        facts = written(self.fed, self.client, vector, buffers, out, fitted=fitted)
        return {"kind": kind, **facts}

    def _bring(self, message: wire.Message) -> None:
        """Take over what the message holds of the server's models for the client."""
        run = self.fed.run
        group = self.group
        layout = self.group.layout
        self.brought.whole = bool(message["has_global"])
        run.server.uploaded = {self.client} if message["uploaded"] else set()
        if shared := message.get("shared"):
            blocks = wire.mask(shared["sent"], len(layout.blocks))
            group.vectors[MODEL] = wire.fill(group.initial.clone(), layout, blocks, shared["model"])
        if model := message.get("global"):
            sent, own = (wire.mask(model[key], len(layout.blocks)) for key in ("sent", "own"))
            vector = group.initial.clone()
            state = run.states.get(self.client)
            if state is not None:
                columns = wire.columns(state.vectors[MODEL], layout, own)
                wire.fill(vector, layout, own, columns)
            self.brought.model = wire.fill(vector, layout, sent, model["model"])

    # ---------------------------------------------------------------- what was answered

    def _file(self, round: int) -> Path:
        return self.folder / "answers" / f"round-{round:05d}.safetensors"

    def _answered(self, message: wire.Message, content: bytes) -> bytes | None:
        """The stored answer to a visit that has been answered; None: there is none.

        Raises:
            Unreadable: that round was answered, to another message.
        """
        if message["kind"] != "visit" or message["round"] != self.round:
            return None
        file = self._file(self.round)
        digest = file.with_suffix(".xxh3")
        if not (file.is_file() and digest.is_file()):
            return None
        reply = file.read_bytes()
        if digest.read_text(encoding="utf-8").split() != _digests(content, reply):
            raise wire.Unreadable(f"round {self.round} has been answered, to another message")
        return reply

    def _keep(self, message: wire.Message, content: bytes, reply: bytes) -> None:
        """Have the answer and then the client's state on the disk."""
        if message["kind"] != "visit":
            write_whole(self.folder / BROUGHT, content)
            return
        file = self._file(message["round"])
        write_whole(file, reply)
        write_whole(file.with_suffix(".xxh3"), " ".join(_digests(content, reply)))
        self.checkpoint.save(self.fed.run)  # from here on the stored answer counts
        for old in file.parent.glob("round-*"):
            if old.stem < file.stem:
                old.unlink()


def unable(content: bytes, client: Any, name: str, why: str) -> bytes:
    """The answer of a site that cannot take part."""
    about: wire.Message = {}
    with contextlib.suppress(wire.Unreadable, KeyError):
        message = wire.unpack(content)
        about = {key: message[key] for key in ABOUT}
    return wire.pack(about | {"failed": ["data", why], "site": client, "name": name})


def keep_traceback(folder: Path) -> None:
    """Add the current error to `failure.txt`: its text could hold a label or a path, and stays at
    the site."""
    with (folder / "failure.txt").open("a", encoding="utf-8") as file:
        file.write(f"{redact(traceback.format_exc())}\n")


def visits_of(run: RunContext, client: int) -> int:
    """Visits that the state of a client has behind it; 0 where states are not kept from round to
    round."""
    return run.states[client].rounds if run.policy.keeps_clients and client in run.states else 0


def digest_of(fed: Federation) -> str:
    """Of the initial models: centre and sites must begin with the same."""
    return digest(
        t for group in fed.run.groups for t in (group.initial, *group.frozen.values())
    ).hex()


def _digests(*contents: bytes) -> list[str]:
    return [xxhash.xxh3_128_hexdigest(content) for content in contents]

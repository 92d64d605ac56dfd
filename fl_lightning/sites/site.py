"""One site: its own data, one client, and an answer for each message. What it keeps lies in a
folder of its own.

An answer is on the disk, with the client's state behind it, before it is sent. A message that comes
again gets the same bytes again, and nothing is trained twice: the checkpoint's round says whether
the stored answer counts.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning import __version__
from fl_lightning.callbacks.base import Transform
from fl_lightning.callbacks.checkpoint import Checkpoint, has_checkpoint, restore
from fl_lightning.callbacks.relations import Relation
from fl_lightning.configuration.config import Config
from fl_lightning.core import Client, Payload, RunContext
from fl_lightning.engine.evaluation import Evaluator
from fl_lightning.engine.federation import Federation
from fl_lightning.engine.record import ClientResult, Results, Timer, numbers
from fl_lightning.engine.trainer import choose_executors, count_costs
from fl_lightning.foundation.device import digest
from fl_lightning.foundation.errors import BadClient, redact
from fl_lightning.foundation.files import write_whole
from fl_lightning.methods.base import Method
from fl_lightning.run import assemble, instantiate, written
from fl_lightning.sites import wire
from fl_lightning.sites.data import NotHere, OwnData, Unfit, Withheld, of_sites, with_loop
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


class SiteEvaluator(Evaluator):
    """Scores at the site: what the server has for its client comes with the message."""

    has_global = False
    brought: Tensor | None = None

    def global_model(self, client: int) -> Tensor | None:
        """What the message brought."""
        return self.brought


class Site:
    """The client `client`, which `data` belongs to; its state and answers are kept in `folder`."""

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
        self.client, self.name, self.data, self.fingerprint, self.folder = (
            client,
            name,
            data,
            fingerprint,
            folder,
        )
        sizes = data.train_sizes, data.validation_sizes, data.test_sizes
        self.sizes = [size[client] for size in sizes]
        # a client that failed is left as it was
        one = replace(config.federation, on_bad_client="skip")
        config = replace(with_loop(config), federation=one, callbacks=of_sites(config), loggers={})
        self.transforms = [
            instantiate(f"callbacks.{name}", c) for name, c in config.callbacks.items()
        ]
        self.refused: Located | None = None
        try:
            # To deal clients to processes a federation asks for everybody's sizes: any will do.
            data.train_sizes = data.validation_sizes = data.test_sizes = [2] * config.clients
            self.fed = assemble(fabric, config, folder, self.transforms, data)
            for transform in self.transforms:
                transform.on_fit_start(self.fed.run)
        except NotHere as error:  # the method's first server memory is made of everybody's data
            self.refused = located(error)
            return
        self._settle()
        data.train_sizes, data.validation_sizes, data.test_sizes = sizes
        self.checkpoint = Checkpoint(best=False, seconds=0)
        if has_checkpoint(folder / "checkpoints"):
            restore(self.fed.run, folder / "checkpoints")
            self.checkpoint.on_fit_start(self.fed.run)
            if (folder / BROUGHT).is_file():
                self._bring(*wire.unpack((folder / BROUGHT).read_bytes()))

    def _settle(self) -> None:
        """Have the federation be this client's alone: no server memory, scores of what messages
        bring."""
        fed, run = self.fed, self.fed.run
        run.server.memory = Withheld()
        old = fed.evaluator
        self.evaluator = SiteEvaluator(run, old.trainers, old.guard, fed.reducer)
        fed.evaluator = fed.worker.evaluator = self.evaluator
        self.group = run.group_of(self.client)
        self.outbox = Outbox()
        fed.worker.transforms = [*map(Uploading, self.transforms), self.outbox]
        choose_executors(run, fed.worker.trainers)
        count_costs(run, fed.worker.trainers)

    @property
    def round(self) -> int:
        """The last round that this site has answered; 0: none."""
        return self.fed.run.server.round

    # ---------------------------------------------------------------- messages

    def answer(self, content: bytes) -> bytes:
        """The answer to a message; an error becomes an answer, too, in one fixed sentence."""
        about: dict[str, Any] = {}
        stage = "download"
        try:
            header, tensors = wire.unpack(content)
            about = {key: header[key] for key in ABOUT}
            self._check(header)
            if header["kind"] == "hello":
                return wire.pack(about | self._hello(), {})
            if self.refused is not None:
                raise self.refused
            again = self._answered(header, content)
            if again is not None:
                return again
            self._agree(header)
            stage = "training" if header["kind"] == "visit" else "evaluation"
            reply = getattr(self, f"_{header['kind']}")(header, tensors)
            made = wire.pack(about | reply[0], reply[1])
            self._keep(header, content, made)
            return made
        except NotHere as error:
            known = located(error)
            return wire.pack(about | {"refused": [known.what, known.hook]}, {})
        except BadClient as failure:
            fixed = failure.reason if failure.reason.endswith(NOT_FINITE) else FAILED
            return wire.pack(about | {"failed": [failure.stage, fixed]}, {})
        except wire.Unreadable as error:
            return wire.pack(
                about | {"failed": ["download", f"the site refused the message: {error}"]}, {}
            )
        except Exception:
            keep_traceback(self.folder)
            return wire.pack(about | {"failed": [stage, FAILED]}, {})

    def _check(self, header: wire.Header) -> None:
        if header["kind"] not in ("hello", "visit", "score", "final"):
            raise wire.Unreadable("its kind is unknown")
        if header["kind"] != "hello" and header["fingerprint"] != self.fingerprint:
            raise wire.Unreadable("it is of another configuration than this site's")
        if header["client"] not in (self.client, None):
            raise wire.Unreadable(f"it is for client {header['client']}")

    def _hello(self) -> wire.Header:
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

    def _agree(self, header: wire.Header) -> None:
        """Go back to the state that the centre counts on: an answer that it has refused, or never
        had, does not count.

        Raises:
            Unreadable: the site does not have that state.
        """
        run, own, known, answered = (
            self.fed.run,
            visits_of(self.fed.run, self.client),
            header["visits"],
            self.round,
        )
        if header["round"] < answered or own == known:
            return
        folder, saved, spent = (
            self.folder / "checkpoints",
            None,
            spent_by(run.states.get(self.client)),
        )
        if known and own > known:
            manifests = {
                t: m for t in disk.rounds(folder) if (m := disk.intact(folder, t)) is not None
            }
            turns = {
                t: m["clients"].get(str(self.client), {}).get("turns", 0)
                for t, m in manifests.items()
            }
            saved = next((t for t, count in turns.items() if count == known), None)
        if saved is not None:
            restore(run, folder, saved)
            run.states[self.client].memory |= spent
            self.checkpoint.on_fit_start(run)
        elif known:
            raise wire.Unreadable(
                f"the site has its state after {own} visits, the centre has {known}"
            )
        else:
            self.fed.pool.restore(self.client, None)
        run.server.round = answered  # what was answered is answered
        self.checkpoint.save(run)

    def _visit(
        self, header: wire.Header, tensors: wire.Tensors
    ) -> tuple[wire.Header, wire.Tensors]:
        """Train: the upload, and the columns of the client's row."""
        run, t, c = self.fed.run, header["round"], self.client
        if t <= self.round:
            raise wire.Unreadable(
                f"it is of round {t}, and the site has answered round {self.round}"
            )
        self._bring(header, tensors)
        payload = wire.to_payload(header["payload"], tensors, self.group.layout, self.group.initial)
        with self._after(t - 1):
            results = self.fed.worker.visits(t, [c], {c: payload}, header["scored"], Timer())
            if results.failures:
                raise results.failures[0][0]
        result, upload = results.clients[c], self.outbox.payload
        assert upload is not None
        numbers([result.values])
        described, sent = wire.of_payload(upload)
        memory = run.states[c].memory
        kept = [name for transform in self.transforms for name in transform.init_client(run)]
        sent |= {f"{wire.MEMORY}{name}": memory[name] for name in kept}
        self.outbox.payload = None
        self.fed.pool.forget()
        run.server.round = t
        run.server.uploaded.add(c)
        return {"values": result.values, "uncounted": result.uncounted, "payload": described}, sent

    def _score(
        self, header: wire.Header, tensors: wire.Tensors
    ) -> tuple[wire.Header, wire.Tensors]:
        """Scores of models that exist only now."""
        self._bring(header, tensors)
        results = Results({self.client: ClientResult(self.client, {})})
        with self._after(header["round"] - 1):
            self.evaluator.after_aggregation(header["round"], results)
        if results.failures:
            raise results.failures[0][0]
        values = results.clients[self.client].values
        numbers([values])
        return {"values": values}, {}

    def _final(
        self, header: wire.Header, tensors: wire.Tensors
    ) -> tuple[wire.Header, wire.Tensors]:
        """Kind and scores of the client's final model."""
        self._bring(header, tensors)
        t = header["round"]
        with self._after(t), self.evaluator.guard.naming(t, self.client, self.evaluator):
            scores = self.evaluator._final_scores(self.client)
        numbers([scores, scores["further"]])
        return {"scores": scores}, {}

    @contextlib.contextmanager
    def _after(self, round: int) -> Iterator[None]:
        """A block in which the server has ended `round`."""
        server = self.fed.run.server
        before, server.round = server.round, round
        try:
            yield
        finally:
            server.round = before

    def export(self, out: Path) -> dict[str, Any]:
        """Write the client's final model, as far as it is known now, to `out`; its kind, round and
        arguments."""
        kind, vector, buffers = self.evaluator.final_model(self.client)
        return {"kind": kind, **written(self.fed, self.client, vector, buffers, out)}

    def _bring(self, header: wire.Header, tensors: wire.Tensors) -> None:
        """What the server has for the client now, where the message holds it."""
        run, group = self.fed.run, self.group
        self.evaluator.has_global = bool(header["has_global"])
        run.server.uploaded = {self.client} if header["uploaded"] else set()
        if "shared" in header:
            blocks = _mask(header["shared"], len(group.layout.blocks))
            group.vectors[MODEL] = wire.fill(
                group.initial.clone(), group.layout, blocks, tensors["shared"], "it"
            )
        if "global" in header:
            self.evaluator.brought = self._whole(header["global"], tensors["global"])

    def _whole(self, places: Mapping[str, list[int]], given: Tensor) -> Tensor:
        """The server's model for this client: what was sent, the client's own where it has that,
        and first values."""
        group, state = self.group, self.fed.run.states.get(self.client)
        sent, own = (_mask(places[key], len(group.layout.blocks)) for key in ("sent", "own"))
        vector = group.initial.clone()
        if state is not None:
            wire.fill(
                vector,
                group.layout,
                own,
                wire.columns(state.vectors[MODEL], group.layout, own),
                "it",
            )
        return wire.fill(vector, group.layout, sent, given, "it")

    # ---------------------------------------------------------------- what was answered

    def _file(self, round: int) -> Path:
        return self.folder / "answers" / f"round-{round:05d}.safetensors"

    def _answered(self, header: wire.Header, content: bytes) -> bytes | None:
        """The stored answer to a visit that has been answered; None: there is none.

        Raises:
            Unreadable: that round was answered, to another message.
        """
        if header["kind"] != "visit" or header["round"] != self.round:
            return None
        file = self._file(self.round)
        digest = file.with_suffix(".xxh3")
        if not (file.is_file() and digest.is_file()):
            return None
        message, stored = digest.read_text(encoding="utf-8").split()
        made = file.read_bytes()
        if message != xxhash.xxh3_128_hexdigest(content) or stored != xxhash.xxh3_128_hexdigest(
            made
        ):
            raise wire.Unreadable(f"round {self.round} has been answered, to another message")
        return made

    def _keep(self, header: wire.Header, content: bytes, made: bytes) -> None:
        """Have the answer and then the client's state on the disk."""
        if header["kind"] != "visit":
            write_whole(self.folder / BROUGHT, content)
            return
        file = self._file(header["round"])
        write_whole(file, made)
        digests = (xxhash.xxh3_128_hexdigest(content), xxhash.xxh3_128_hexdigest(made))
        write_whole(file.with_suffix(".xxh3"), " ".join(digests).encode())
        self.checkpoint.save(self.fed.run)  # from here on the stored answer counts
        for old in file.parent.glob("round-*"):
            if old.stem < file.stem:
                old.unlink()


def answered(
    content: bytes,
    client: int,
    name: str,
    folder: Path,
    with_site: Callable[[Callable[[Site], bytes]], bytes],
) -> bytes:
    """The answer of a site that `with_site` makes of its folder and data, or why it cannot be
    made."""
    try:
        return with_site(lambda site: site.answer(content))
    except Unfit as error:
        why = error.sentence
    except Exception:
        why = FAILED
    keep_traceback(folder)
    return unable(content, client, name, why)


def unable(content: bytes, client: Any, name: str, why: str) -> bytes:
    """The answer of a site that cannot take part."""
    about: wire.Header = {}
    with contextlib.suppress(wire.Unreadable, KeyError):
        header, _ = wire.unpack(content)
        about = {key: header[key] for key in ABOUT}
    return wire.pack(about | {"failed": ["data", why], "site": client, "name": name}, {})


def keep_traceback(folder: Path) -> None:
    """Add the current error to `failure.txt`: its text could hold a label or a path, and stays at
    the site."""
    with (folder / "failure.txt").open("a", encoding="utf-8") as file:
        file.write(f"{redact(traceback.format_exc())}\n")


class Located(NotHere):
    """What does not travel, and the hook that asked for it."""

    def __init__(self, what: str, hook: str) -> None:
        super().__init__(what)
        self.hook = hook


def located(error: NotHere) -> Located:
    """The innermost hook of a method or relation among the frames of `error`."""
    if isinstance(error, Located):
        return error
    hook, trace = "", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, Method | Relation):
            hook = f"{type(owner).__name__}.{trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return Located(error.what, hook)


def visits_of(run: RunContext, client: int) -> int:
    """Visits that the state of a client has behind it; 0 where states are not kept from round to
    round."""
    return run.states[client].rounds if run.policy.keeps_clients and client in run.states else 0


def digest_of(fed: Federation) -> str:
    """Of the initial models: centre and sites must begin with the same."""
    return digest(
        t for group in fed.run.groups for t in (group.initial, *group.frozen.values())
    ).hex()


def _mask(places: Sequence[int], size: int) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[list(places)] = True
    return mask

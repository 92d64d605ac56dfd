"""What an attacker can look at after a run: how sure models are of each sample, uploads'
classifiers, the relation.

Nothing is trained, and the run folder is only read. A sample is known by a digest of its numbers as
they were read, so that the same sample is recognised in runs of other seeds, where it may be a
training sample or a test sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.callbacks.attack import Attack
from fl_lightning.callbacks.base import Callback, Transform, in_order
from fl_lightning.callbacks.checkpoint import Checkpoint, has_checkpoint, restore
from fl_lightning.configuration.config import Config, check
from fl_lightning.core import Client
from fl_lightning.engine.federation import Federation
from fl_lightning.foundation import log
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.metric import NO_TARGET
from fl_lightning.results.folder import RunFolder
from fl_lightning.run import alone, ended, launch
from fl_lightning.storage import manifest as disk

Confidence = dict[str, np.ndarray]
"""By view, of each sample: log p(y) - log(1 - p(y)), of a text with a target at every place their
mean; NaN where there is no such model."""

VIEWS = {
    "public: global model": "the global model, as it would be exported",
    "public: personal model": "the client's final model, as it would be exported",
    "server: upload": "the client's last upload",
    "another client": "what the next client begins the next round with",
}
"""Models that are looked at, by viewer."""


@dataclass
class Samples:
    """One row for each training and test sample of each client, but for `Observed.flipped`."""

    client: np.ndarray
    digest: np.ndarray
    """uint64: equal for equal samples."""
    member: np.ndarray
    """Bool: it was trained on by its client; else it is a test sample of it."""
    confidence: Confidence = field(default_factory=dict)
    """Under the models of the last round."""
    over_rounds: dict[str, Confidence] = field(default_factory=dict)
    """Over `Observed.rounds`: its `mean`, and its `rise` from the first to the last; empty where
    that is one round."""


@dataclass
class Observed:
    """One run."""

    method: str
    seed: int
    samples: Samples
    counts: np.ndarray
    """(N, C): training samples by client and class, as the client trains on them."""
    groups: list[int]
    """The planted group of each client; all 0 where there are none."""
    heads: np.ndarray | None
    """(N, C): of each client's last upload the classifier's bias; None: no upload with one is
    kept."""
    relation: dict[str, np.ndarray] = field(default_factory=dict)
    """(N, N) rows of the last round by layer; `mean` over layers. Empty: no relation of all clients
    is kept."""
    privacy: dict[str, Any] = field(default_factory=dict)
    """What the run's summary says of its privacy."""
    rounds: list[int] = field(default_factory=list)
    """Rounds whose models are kept, ascending (`callbacks.checkpoint.keep`), up to the last."""
    flipped: list[int] = field(default_factory=list)
    """Clients that trained on flipped labels, whose samples are left out: members would differ from
    test samples by their labels."""


def observed(config: Config, folder: Path) -> Observed:
    """What is left of the finished run in `folder`.

    Raises:
        BadInput: it has no checkpoint, or its data no classes.
    """
    check(
        "audit",
        str(folder),
        has_checkpoint(folder / "checkpoints"),
        "it has no checkpoint: its models are not kept",
    )
    check(
        "audit",
        config.data.task,
        config.data.task == "classification",
        "an audit is of runs with classes",
    )
    return launch(alone(config), _observed, folder)["observed"]


def _observed(fabric: Fabric, config: Config, folder: Path) -> dict[str, Any]:
    fed = ended(fabric, config, folder, _transforms(config))
    flipped = _flipped(fed)
    if flipped:
        log.say(
            f"audit: samples of clients {', '.join(map(str, flipped))} are left out: they trained "
            f"on flipped labels"
        )
    kept = RunFolder(folder)
    relation = _relation(kept, fed.run.clients)
    earlier = _earlier(fed, config, folder / "checkpoints", flipped)
    last = restore(fed.run, folder / "checkpoints", "last")
    samples = _samples(fed, flipped)
    seen = {t: views for t, views in earlier.items() if t < last} | {last: samples.confidence}
    if len(seen) > 1:
        of_rounds = {view: np.stack([views[view] for views in seen.values()]) for view in VIEWS}
        samples.over_rounds["mean"] = {view: values.mean(0) for view, values in of_rounds.items()}
        samples.over_rounds["rise"] = {
            view: values[-1] - values[0] for view, values in of_rounds.items()
        }
    summary = kept.read_summary() or {}
    privacy = {key: value for key, value in summary.items() if key.startswith("privacy_")}
    data = fed.run.data
    counts = np.stack([data.trained_counts(id) for id in range(fed.run.clients)])
    whole = Observed(
        fed.run.method_name,
        config.seed,
        samples,
        counts,
        list(data.groups),
        _heads(fed),
        relation,
        privacy,
        list(seen),
        flipped,
    )
    return {"observed": whole}


def _transforms(config: Config) -> list[Callback]:
    """The run's callbacks that may change what travels, in their order: what is kept of its clients
    goes by them."""
    return in_order(
        one.build() for one in config.callbacks.values() if issubclass(one.load(), Transform)
    )


def _flipped(fed: Federation) -> list[int]:
    """Flip the labels that simulated attackers have flipped; who these are, ascending."""
    attacks = [callback for callback in fed.run.callbacks if isinstance(callback, Attack)]
    for attack in attacks:
        attack.on_fit_start(fed.run)
    return sorted(
        {id for attack in attacks if attack.kind == "label_flip" for id in attack.attackers}
    )


def _earlier(
    fed: Federation, config: Config, folder: Path, flipped: list[int]
) -> dict[int, Confidence]:
    """Under the models of the rounds before the last that `callbacks.checkpoint.keep` has kept, by
    round, ascending.

    The best checkpoint, where it is older than these, is left out: it was chosen by scores, of test
    samples where there are no others. None where clients' data change from round to round: samples
    of then are others.
    """
    keep = next(
        (c.init_args["keep"] for c in config.callbacks.values() if c.load() is Checkpoint), 1
    )
    rounds = disk.rounds(folder)[1:keep] if config.data.drift_every is None else []
    seen: dict[int, Confidence] = {}
    for t in reversed(rounds):
        try:
            restore(fed.run, folder, t)
        except BadInput as error:
            log.say(f"audit: passed over round {t}: {error.requirement}")
            continue
        seen[t] = _samples(fed, flipped).confidence
    return seen


@torch.no_grad()
def _samples(fed: Federation, flipped: list[int]) -> Samples:
    """Those of all clients but the `flipped` ones."""
    run, rows = fed.run, list[tuple[Any, ...]]()
    for id in range(run.clients):
        data = run.data.client(id, run.device, run.dtype)
        parts = [
            list(part.batches(run.config.evaluation.batch_size)) for part in (data.train, data.test)
        ]
        raw = [x.contiguous().cpu().numpy() for part in run.data.raw(id) for x in part]
        digests = [xxhash.xxh3_64_intdigest(x.tobytes()) for x in raw]
        member = np.repeat([True, False], [sum(len(y) for _, y in part) for part in parts])
        batches = [batch for part in parts for batch in part]
        views = {view: _confidence(fed, view, id, batches) for view in VIEWS}
        rows.append((np.full(len(digests), id), np.array(digests, dtype=np.uint64), member, views))
    client, digest, member = (np.concatenate([row[k] for row in rows]) for k in range(3))
    there = ~np.isin(client, flipped)
    views = {view: np.concatenate([row[3][view] for row in rows])[there] for view in VIEWS}
    return Samples(client[there], digest[there], member[there], views)


def _confidence(
    fed: Federation, view: str, id: int, batches: list[tuple[Tensor, Tensor]]
) -> np.ndarray:
    """Of the samples of client `id`, in the eyes of a viewer."""
    count = sum(len(y) for _, y in batches)
    model = _model(fed, view, id)
    if model is None:
        return np.full(count, np.nan)
    client, kind, vector = model
    client.ready(kind, vector)
    client.module.model.eval()
    values = []
    for x, y in batches:
        scores = fed.run.method.outputs(client, x, kind).double()
        values.append(log_odds(scores, y).cpu().numpy())
    return np.nan_to_num(np.concatenate(values), nan=0.0, posinf=1e6, neginf=-1e6)


def log_odds(scores: Tensor, y: Tensor) -> Tensor:
    """Log odds of the right classes, (b,), from scores (b, classes), or (b, places, classes) of
    texts: their mean."""
    has_target = y != NO_TARGET
    right = y.where(has_target, 0)[..., None]
    each = scores.gather(-1, right)[..., 0] - scores.scatter(-1, right, -torch.inf).logsumexp(-1)
    return (
        each if y.ndim == 1 else each.where(has_target, 0).sum(1) / has_target.sum(1).clamp(min=1)
    )


def _model(fed: Federation, view: str, id: int) -> tuple[Client, str, Tensor] | None:
    """Handle, kind and vector; None: there is no such model, or not a whole one."""
    run, evaluator = fed.run, fed.evaluator
    if view == "public: global model":
        vector = evaluator.global_model(id) if evaluator.has_global else None
        return None if vector is None else (evaluator.at_rest(id), "global", vector)
    if view == "public: personal model":
        with torch.enable_grad():  # a fine-tuned copy is trained for it
            kind, vector, buffers = evaluator.final_model(id)
        return None if kind == "global" else (evaluator.at_rest(id, buffers), kind, vector)
    if view == "server: upload":
        group, state = run.group_of(id), run.states.get(id)
        whole = group.up_mask[group.layout.is_parameter].all()
        there = (
            state is not None and id in run.server.uploaded and whole and not run.policy.for_judge
        )
        return (
            (evaluator.at_rest(id), "after", state.received["model"])
            if state is not None and there
            else None
        )
    members = run.group_of(id).members
    if len(members) < 2 or not run.group_of(id).down_mask.any():
        return None
    other = members[(members.index(id) + 1) % len(members)]
    vector, buffers = evaluator.beginning(other)
    return evaluator.at_rest(other, buffers), "before", vector


def _heads(fed: Federation) -> np.ndarray | None:
    """Biases of the classifiers that clients last uploaded, (N, C)."""
    run, rows = fed.run, []
    for id in range(run.clients):
        group, state = run.group_of(id), run.states.get(id)
        sent = [
            block
            for block, up in zip(group.layout.blocks, group.up_mask, strict=True)
            if up and block.head
        ]
        biases = [block for block in sent if block.shape == (run.data.num_classes,)]
        if not biases or state is None or id not in run.server.uploaded or run.policy.for_judge:
            return None
        rows.append(
            state.received["model"][biases[-1].start : biases[-1].stop].double().cpu().numpy()
        )
    return np.stack(rows)


def _relation(folder: RunFolder, clients: int) -> dict[str, np.ndarray]:
    """The rows of the last round in which everybody took part, and more than one source counted."""
    for t in reversed(folder.relation_rounds()):
        view = folder.read_relation(t)
        if view.receivers == view.sources == list(range(clients)):
            layers = {name: view.rows[:, k] for k, name in enumerate(view.layers)}
            return {"mean": view.rows.mean(1)} | layers
    return {}

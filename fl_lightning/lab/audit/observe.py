"""Collect what attackers can see after a run: models' confidence in each sample, classifiers of
uploads, the relation.

Nothing is trained for it (except fine-tuned copies that are scored), and the run folder is only
read. Samples are identified by a digest of their raw numbers, so that one is recognised in runs of
other seeds, where it may be a training sample or a test sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from lightning.fabric import Fabric
from pandas import DataFrame, concat
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
from fl_lightning.run import finished_federation, launch, on_one_cpu
from fl_lightning.storage import manifest as disk

Array = np.ndarray
Confidence = dict[str, Array]
"""By viewer (a key of `VIEWS`), a model's confidence in each sample: the log odds of its true
class, log p - log(1 - p), for texts their mean over positions; NaN if the viewer has no model."""

VIEWS = {
    "public: global model": "the global model, as it would be exported",
    "public: personal model": "the client's final model, as it would be exported",
    "server: upload": "the client's last upload",
    "another client": "what the next client begins the next round with",
}
"""Model that each viewer has of a client."""


@dataclass
class AuditedSamples:
    """The samples on which membership is attacked: training and test samples of all clients but
    those that trained on flipped labels (`Observed.flipped`). Each field is an array with an entry
    for each sample, or holds such arrays."""

    client: Array
    """Number of the client that has the sample."""
    digest: Array
    """uint64, equal for equal samples."""
    member: Array
    """True for training samples, False for test samples."""
    confidence: Confidence = field(default_factory=dict)
    """Confidence of the last round's models."""
    over_rounds: dict[str, Confidence] = field(default_factory=dict)
    """`mean` of the confidence over `Observed.rounds`, and its `rise` from the first to the last;
    empty if there is only one round."""


@dataclass
class Observed:
    """Everything that attackers can see of one run."""

    method: str
    seed: int
    samples: AuditedSamples
    counts: Array
    """(N, C) training samples by client and class, with planted or flipped labels."""
    groups: list[int]
    """Planted group of each client; all 0 if none are planted."""
    heads: Array | None
    """(N, C) bias of the classifier in each client's last upload; None if a client has no stored
    upload with one."""
    relation: dict[str, Array] = field(default_factory=dict)
    """(N, N) by layer, and `mean` over layers: last stored relation of all clients; empty if there
    is none."""
    privacy: dict[str, Any] = field(default_factory=dict)
    """Privacy keys of summary.json."""
    rounds: list[int] = field(default_factory=list)
    """Rounds whose models are stored (`callbacks.checkpoint.keep`), ascending, with the last."""
    flipped: list[int] = field(default_factory=list)
    """Clients that trained on flipped labels: labels would tell their members from test samples, so
    their samples are left out."""


def observe(config: Config, folder: Path) -> Observed:
    """Load a finished run, and collect what attackers can see of it.

    Args:
        config: config of the run.
        folder: folder of the run.

    Raises:
        BadInput: the run has no checkpoint, or is no classification.
    """
    check(
        "audit",
        str(folder),
        has_checkpoint(folder / "checkpoints"),
        "it has no checkpoint; audit runs with callbacks.checkpoint, which stores models",
    )
    task = config.data.task
    check(
        "data.task",
        task,
        task == "classification",
        "only classification runs can be audited; name another run",
    )
    return launch(on_one_cpu(config), _observe_on_rank, folder)["observed"]


def _observe_on_rank(fabric: Fabric, config: Config, folder: Path) -> dict[str, Any]:
    """Do the work of `observe` on a rank."""
    fed = finished_federation(fabric, config, folder, _transforms(config))
    flipped = _flip_labels(fed)
    if flipped:
        clients = ", ".join(map(str, flipped))
        trained = "they trained on flipped labels"
        log.say(f"audit: samples of clients {clients} are left out: {trained}")
    files, checkpoints = RunFolder(folder), folder / "checkpoints"
    relation = _relation(files, fed.run.clients)
    by_round = _earlier_confidences(fed, config, checkpoints, flipped)
    last = restore(fed.run, checkpoints, "last")
    samples = _samples(fed, flipped)
    by_round = {t: views for t, views in by_round.items() if t < last}
    by_round[last] = samples.confidence
    if len(by_round) > 1:
        samples.over_rounds.update(mean={}, rise={})
        for view in VIEWS:
            values = np.stack([views[view] for views in by_round.values()])
            samples.over_rounds["mean"][view] = values.mean(0)
            samples.over_rounds["rise"][view] = values[-1] - values[0]
    data, summary = fed.run.data, files.read_summary()
    observed = Observed(
        fed.run.method_name,
        config.seed,
        samples,
        np.stack([data.trained_counts(client) for client in range(fed.run.clients)]),
        list(data.groups),
        _heads(fed),
        relation,
        {key: value for key, value in summary.items() if key.startswith("privacy_")},
        list(by_round),
        flipped,
    )
    return {"observed": observed}


def _transforms(config: Config) -> list[Callback]:
    """Build the run's transforms, in order: they decide which client states were stored."""
    components = config.callbacks.values()
    return in_order(c.build() for c in components if issubclass(c.load(), Transform))


def _flip_labels(fed: Federation) -> list[int]:
    """Flip the labels that simulated attackers flipped in the run; returns these clients,
    ascending."""
    clients: set[int] = set()
    for callback in fed.run.callbacks:
        if isinstance(callback, Attack):
            callback.on_fit_start(fed.run)
            clients |= set(callback.attackers) if callback.kind == "label_flip" else set()
    return sorted(clients)


def _earlier_confidences(
    fed: Federation, config: Config, folder: Path, flipped: list[int]
) -> dict[int, Confidence]:
    """Confidences of the models that `callbacks.checkpoint.keep` stored before the last round, by
    round, ascending.

    An older best checkpoint is left out: it was chosen by scores, possibly on test samples. Where
    clients' data drift the result is empty, since earlier rounds had other samples.
    """
    if config.data.drift_every is not None:
        return {}
    keeps = [c.init_args["keep"] for c in config.callbacks.values() if c.load() is Checkpoint]
    by_round: dict[int, Confidence] = {}
    kept = keeps[0] if keeps else 1
    for t in reversed(disk.rounds(folder)[1:kept]):  # newest first; [0] is the last round
        try:
            restore(fed.run, folder, t)
        except BadInput as error:
            log.say(f"audit: passed over round {t}: {error.requirement}")
            continue
        by_round[t] = _samples(fed, flipped).confidence
    return by_round


@torch.no_grad()
def _samples(fed: Federation, flipped: list[int]) -> AuditedSamples:
    """Samples of all clients that are not `flipped`, with the confidence of the loaded models."""
    run = fed.run
    rows = []
    for client in range(run.clients):
        data = run.data.client(client, run.device, run.dtype)
        size = run.config.evaluation.batch_size
        trained, tested = (list(part.batches(size)) for part in (data.train, data.test))
        counts = [sum(len(y) for _, y in part) for part in (trained, tested)]
        raw = [x.contiguous().cpu().numpy() for part in run.data.raw_samples(client) for x in part]
        digests = [xxhash.xxh3_64_intdigest(x.tobytes()) for x in raw]
        batches = [*trained, *tested]
        columns = {
            "client": client,
            "digest": np.array(digests, dtype=np.uint64),
            "member": np.repeat([True, False], counts),
        }
        rows.append(
            DataFrame(columns | {view: _confidence(fed, view, client, batches) for view in VIEWS})
        )
    table = concat(rows)
    honest = table[~table.client.isin(flipped)]
    values = {name: honest[name].to_numpy() for name in honest}
    confidence = {view: values.pop(view) for view in VIEWS}
    return AuditedSamples(**values, confidence=confidence)


def _confidence(
    fed: Federation, view: str, client: int, batches: list[tuple[Tensor, Tensor]]
) -> Array:
    """Confidence of a viewer's model in each sample of a client."""
    model = _model(fed, view, client)
    if model is None:
        return np.full(sum(len(y) for _, y in batches), np.nan)
    handle, kind, vector = model
    handle.ready(kind, vector)
    handle.module.model.eval()
    values = []
    for x, y in batches:
        scores = fed.run.method.outputs(handle, x, kind).double()
        values.append(log_odds(scores, y).cpu().numpy())
    return np.nan_to_num(
        np.concatenate(values),
        nan=0.0,
        posinf=1e6,
        neginf=-1e6,
    )


def log_odds(scores: Tensor, y: Tensor) -> Tensor:
    """Log odds of the true classes, (b,).

    Args:
        scores: (b, classes), or for texts (b, positions, classes): the mean over positions counts.
        y: (b,) or (b, positions) true classes; positions with `NO_TARGET` are left out.
    """
    has_target = y != NO_TARGET
    right = y.where(has_target, 0)[..., None]
    others = scores.scatter(-1, right, -torch.inf).logsumexp(-1)
    odds = scores.gather(-1, right)[..., 0] - others
    if y.ndim == 1:
        return odds
    return odds.where(has_target, 0).sum(1) / has_target.sum(1).clamp(min=1)


def _model(fed: Federation, view: str, client: int) -> tuple[Client, str, Tensor] | None:
    """Model that a viewer has of a client, as handle, kind of model and vector; None if there is
    none, or only a part of one."""
    run, evaluator = fed.run, fed.evaluator
    group = run.group_of(client)
    if view == "public: global model":
        vector = evaluator.global_model(client) if evaluator.has_global else None
        return None if vector is None else (evaluator.at_rest(client), "global", vector)
    if view == "public: personal model":
        with torch.enable_grad():  # a fine-tuned copy is trained for it
            kind, vector, buffers = evaluator.final_model(client)
        return None if kind == "global" else (evaluator.at_rest(client, buffers), kind, vector)
    if view == "server: upload":
        upload = _upload(fed, client)
        is_complete = group.up_mask[group.layout.is_parameter].all()
        if upload is None or not is_complete:
            return None
        return evaluator.at_rest(client), "after", upload
    members = group.members
    if len(members) < 2 or not group.down_mask.any():
        return None
    other = members[(members.index(client) + 1) % len(members)]
    vector, buffers = evaluator.beginning(other)
    return evaluator.at_rest(other, buffers), "before", vector


def _upload(fed: Federation, client: int) -> Tensor | None:
    """Last upload of a client; None if none is stored, or only the judge's model."""
    run = fed.run
    state = run.states.get(client)
    if state is None or client not in run.server.uploaded or run.policy.for_judge:
        return None
    return state.received["model"]


def _heads(fed: Federation) -> Array | None:
    """Bias of the classifier in each client's last upload, (N, C); None if a client has none."""
    run, rows = fed.run, []
    for client in range(run.clients):
        group, upload = run.group_of(client), _upload(fed, client)
        biases = [
            block
            for block, is_sent in zip(
                group.layout.blocks,
                group.up_mask,
                strict=True,
            )
            if is_sent and block.head and block.shape == (run.data.num_classes,)
        ]
        if not biases or upload is None:
            return None
        last = biases[-1]
        bias = upload[last.start : last.stop]
        rows.append(bias.double().cpu().numpy())
    return np.stack(rows)


def _relation(folder: RunFolder, clients: int) -> dict[str, Array]:
    """Last stored relation with all clients as receivers and sources, (N, N) by layer and `mean`;
    empty if there is none."""
    for t in reversed(folder.relation_rounds()):
        view = folder.read_relation(t)
        if view.receivers == view.sources == list(range(clients)):
            layers = {name: view.rows[:, k] for k, name in enumerate(view.layers)}
            return {"mean": view.rows.mean(1)} | layers
    return {}

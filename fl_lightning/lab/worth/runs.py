"""One training of `worth`, which scores its models itself where a length of training ends."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning.callbacks.base import Observer
from fl_lightning.configuration.config import Config
from fl_lightning.core import RoundRecord, RunContext
from fl_lightning.data import imbalance, prepare, silos, units
from fl_lightning.data.load import load
from fl_lightning.engine import scoring
from fl_lightning.engine.evaluation import Evaluator
from fl_lightning.engine.federation import Federation
from fl_lightning.lab.worth import FOLDS, LENGTHS, row
from fl_lightning.lab.worth.plain import KINDS, MOST_FEATURES, fitted
from fl_lightning.lab.worth.scores import place
from fl_lightning.lab.worth.silos import Facts
from fl_lightning.methods.partialpooling import MOST_FEATURES as MOST_POOLED
from fl_lightning.results.folder import save_arrays
from fl_lightning.run import assemble

Table = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A training, and the rows whose scores it writes.

    Args:
        config: of the run, for the longest length.
        folder: of the run.
        out: under which scores are kept; None: there are none.
        rows: of each row the kind of model, or None: the run's own judge's.
        lengths: after how many times the configured rounds it is scored.
        plain: plain models that are fitted to the same samples.
    """

    config: Config
    folder: Path
    out: Path | None
    rows: Mapping[str, str | None]
    lengths: Sequence[int] = LENGTHS
    plain: Sequence[str] = ()

    @property
    def ends(self) -> dict[int, int]:
        """Of each round at which it is scored the length."""
        rounds = self.config.federation.rounds // max(self.lengths)
        return {rounds * length: length for length in self.lengths}

    @property
    def files(self) -> list[Path]:
        """What it leaves of scores."""
        if self.out is None:
            return []
        names = [row(label, length) for label in self.rows for length in self.lengths]
        return [place(self.out, name, self.config.seed) for name in (*names, *self.plain)]

    @property
    def done(self) -> bool:
        """Whether nothing is missing."""
        ended = (self.folder / "summary.json").is_file()
        return ended and all(file.is_file() for file in self.files)

    def run(self, train: Any) -> None:
        """Train and score, anew where an ended run has lost its scores.

        Args:
            train: `(config, folder, accept, put_together)`, which runs or resumes.
        """
        if (self.folder / "summary.json").is_file():
            shutil.rmtree(self.folder)
        train(self.config, self.folder, accept=True, put_together=partial(_judged, self))


def _judged(
    task: Task, fabric: Any, config: Config, folder: Path, callbacks: Sequence[Any]
) -> Federation:
    """The federation of a run with a `Judge`."""
    judge = Judge(task)
    fed = assemble(fabric, config, folder, [judge, *callbacks] if task.out else [*callbacks])
    judge.evaluator = fed.evaluator
    return fed


class Judge(Observer):
    """Writes the scores of every client's tested samples where a length of training ends."""

    evaluator: Evaluator

    def __init__(self, task: Task) -> None:
        self.task = task

    def on_round_end(self, run: RunContext, record: RoundRecord) -> None:
        """Score all rows."""
        length = self.task.ends.get(record.round)
        if length is None:
            return
        for label, kind in self.task.rows.items():
            own = {c: self._scored(run, c, kind) for c in run.at_home(range(run.clients))}
            self._write(run, row(label, length), own)
        if length == min(self.task.lengths):
            for kind in self.task.plain:
                own = {c: _plain(run, c, kind) for c in run.at_home(range(run.clients))}
                self._write(run, kind, own)

    def _scored(self, run: RunContext, client: int, kind: str | None) -> Table:
        evaluator = self.evaluator
        if kind == "finetuned":
            judged, (vector, buffers) = kind, evaluator.finetune(run.server.round, client)
        else:
            judged, vector, buffers = evaluator.final_model(client)
        handle = evaluator.at_rest(client, buffers)
        handle.ready(judged, vector)
        seen: scoring.Seen = []
        scoring.score(judged, handle, handle.data.test, seen)
        outputs, y = (torch.cat(parts).cpu() for parts in zip(*seen, strict=True))
        return _table(run, client, outputs, y)

    def _write(self, run: RunContext, name: str, own: dict[int, Table]) -> None:
        parts = [part for _, part in sorted(run.processes.gather_by_client(own).items())]
        if run.is_main and self.task.out is not None:
            table = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            save_arrays(place(self.task.out, name, run.config.seed), **table)


def _table(run: RunContext, client: int, outputs: torch.Tensor, y: torch.Tensor) -> Table:
    """Of each tested sample its number, unit and label, the share of right answers or the absolute
    error, and the class scores."""
    data, count = run.data, len(y)
    metric, classes = data.metric, outputs.shape[-1]
    by_class = y.ndim == 1 and classes > 1
    if classes == 1:  # a regression
        right = (outputs[:, 0].double() - y).abs()
    elif by_class:
        right = (outputs.argmax(1) == y).double()
    else:  # texts: of each the share of its positions
        shares = [metric.total(outputs[k : k + 1], y[k : k + 1], classes) for k in range(count)]
        right = torch.stack(shares).double()
    return {
        "sample": data.tested_rows(client),
        "unit": data.units(client)[1],
        "client": np.full(count, data.numbers[client]),
        "label": y.numpy() if by_class else np.zeros(count, np.int64),
        "right": right.numpy(),
        "outputs": outputs.float().numpy() if by_class else np.zeros((count, 0), np.float32),
    }


def _plain(run: RunContext, client: int, kind: str) -> Table:
    data = run.data.client(client)

    def arrays(part: Any) -> tuple[np.ndarray, np.ndarray]:
        xs, ys = zip(*part.batches(4096), strict=True)
        return torch.cat(xs).flatten(1).double().numpy(), torch.cat(ys).numpy()

    x, y = arrays(data.test)
    own = run.data.units(client)[0]
    train = arrays(data.train) if len(data.train) else (x[:0], y[:0])
    outputs = fitted(kind, train, x, own, run.data.num_classes)
    return _table(run, client, torch.from_numpy(outputs), torch.from_numpy(y))


def look(config: Config) -> Facts:
    """The silos before anything is trained.

    Raises:
        BadInput: the data are absent, malformed or too few.
    """
    source, _ = load(config.data, config.federation.clients, config.smoke)
    seeds = range(FOLDS)
    parts = [prepare(config.data, config.federation.clients, s, config.smoke) for s in seeds]
    data = parts[0]
    clients = range(data.clients)
    tested = [np.concatenate([part.tested_rows(c) for part in parts]) for c in clients]
    # a silo of 3 tests some of them twice
    pool = source.train.followed_by(source.test) if config.data.pooled else source.train
    rows = pool.read_all()
    if pool.spans is not None:
        copies, kind = pool.numbers, "recordings"
    elif rows.ndim == 2 and rows.dtype != np.int64 and pool.labels.ndim == 1:
        copies, kind = units.copies(np.column_stack([rows, pool.labels])), "units"
    else:
        marks = [one.tobytes() for one in rows]
        copies, kind = np.unique(marks, return_inverse=True)[1], "units"
    counted = pool.units is not None or pool.spans is not None
    plain = rows[0].size <= MOST_FEATURES and not source.vocabulary
    return Facts(
        rare=imbalance.metric_line(data) if imbalance.default_metric(data) else "",
        names=data.client_names or [f"silo {c}" for c in clients],
        sizes=[len(np.unique(own)) for own in tested],
        copies=copies,
        kind=kind if counted else "",
        counts=[len(np.unique(pool.independent[own])) for own in tested] if counted else (),
        plain=[*KINDS] if plain and rows.ndim == 2 else [*KINDS][:1] if plain else [],
        pools=rows.ndim == 2 and rows.shape[1] <= MOST_POOLED and not source.vocabulary,
        notes=silos.lines(config.data),
    )

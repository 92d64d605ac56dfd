"""Train for `worth`, with models scored where each training length ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
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
from fl_lightning.lab.worth import FOLDS, LENGTHS, LINEAR, row_name
from fl_lightning.lab.worth.plain import FITTERS, MOST_FEATURES, fit_and_predict
from fl_lightning.lab.worth.scores import Table, scores_path
from fl_lightning.lab.worth.silos import SiloFacts
from fl_lightning.lab.worth.statistics import Array
from fl_lightning.methods.partialpooling import MOST_FEATURES as MOST_POOLED
from fl_lightning.results.folder import save_arrays
from fl_lightning.run import assemble


@dataclass(frozen=True)
class Task:
    """A training, and the rows whose scores it writes.

    Args:
        config: config of the run, with the rounds of the longest of `lengths`.
        folder: folder of the run.
        out: folder below which scores are stored; None: no scores.
        rows: for each row, by its label, the kind of model that is scored, such as "finetuned";
            None: the kind that judges the run.
        lengths: training lengths after which models are scored.
        plain: names of plain models that are fitted to the same samples.
    """

    config: Config
    folder: Path
    out: Path | None
    rows: Mapping[str, str | None]
    lengths: Sequence[int] = LENGTHS
    plain: Sequence[str] = ()

    @property
    def length_by_round(self) -> dict[int, int]:
        """Rounds whose models are scored, each with the training length that ends there."""
        rounds = self.config.federation.rounds // max(self.lengths)
        return {rounds * length: length for length in self.lengths}

    @property
    def files(self) -> list[Path]:
        """Paths of the score files that it writes."""
        if self.out is None:
            return []
        names = [row_name(label, length) for label in self.rows for length in self.lengths]
        return [scores_path(self.out, name, self.config.seed) for name in (*names, *self.plain)]

    @property
    def done(self) -> bool:
        """Whether the run has ended and all score files exist."""
        ended = (self.folder / "summary.json").is_file()
        return ended and all(file.is_file() for file in self.files)

    def run(self, train: Any) -> None:
        """Start or resume the run. If the run has ended (but score files are missing, or this task
        would be `done`), delete it and train again.

        Args:
            train: the function that trains a config in a folder,
                `fl_lightning.lab.study.launch.train`.
        """
        if (self.folder / "summary.json").is_file():
            shutil.rmtree(self.folder)
        train(
            self.config,
            self.folder,
            accept=True,
            put_together=partial(_with_scores, self),
        )


def _with_scores(
    task: Task, fabric: Any, config: Config, folder: Path, callbacks: Sequence[Any]
) -> Federation:
    """Assemble the federation of a task's run, with a `ScoreWriter` if it is scored."""
    writer = ScoreWriter(task)
    observers = [writer] if task.out else []
    fed = assemble(
        fabric,
        config,
        folder,
        [*observers, *callbacks],
    )
    writer.evaluator = fed.evaluator
    return fed


class ScoreWriter(Observer):
    """Writes the scores of all clients' test samples where a training length ends."""

    evaluator: Evaluator

    def __init__(self, task: Task) -> None:
        self.task = task

    def on_round_end(self, run: RunContext, record: RoundRecord) -> None:
        """Score and write all rows, if a training length ends with this round."""
        length = self.task.length_by_round.get(record.round)
        if length is None:
            return
        for label, kind in self.task.rows.items():
            self._write(run, row_name(label, length), partial(self._score, run, kind))
        if length == min(self.task.lengths):
            for kind in self.task.plain:
                self._write(run, kind, partial(_plain_scores, run, kind))

    def _score(
        self,
        run: RunContext,
        kind: str | None,
        client: int,
    ) -> Table:
        evaluator = self.evaluator
        if kind == "finetuned":
            judged, (vector, buffers) = kind, evaluator.finetune(run.server.round, client)
        else:
            judged, vector, buffers = evaluator.final_model(client)
        handle = evaluator.at_rest(client, buffers)
        handle.ready(judged, vector)
        batches: scoring.ScoredBatches = []
        scoring.score(
            judged,
            handle,
            handle.data.test,
            batches,
        )
        outputs, y = (torch.cat(parts).cpu() for parts in zip(*batches, strict=True))
        return _table(
            run,
            client,
            outputs,
            y,
        )

    def _write(
        self,
        run: RunContext,
        name: str,
        score: Callable[[int], Table],
    ) -> None:
        """Write the tables that `score` returns for all clients to one file."""
        tables = {client: score(client) for client in run.at_home(range(run.clients))}
        gathered = run.processes.gather_by_client(tables)
        parts = [table for _, table in sorted(gathered.items())]
        if run.is_main and self.task.out is not None:
            table = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            save_arrays(scores_path(self.task.out, name, run.config.seed), **table)


def _table(
    run: RunContext,
    client: int,
    outputs: torch.Tensor,
    y: torch.Tensor,
) -> Table:
    """Make a client's table of tested samples: number, group, client, label, `right` (share of
    right predictions, or absolute error) and class scores."""
    data, count, classes = run.data, len(y), outputs.shape[-1]
    has_class = y.ndim == 1 and classes > 1
    labels, scores = np.zeros(count, np.int64), np.zeros((count, 0), np.float32)
    if has_class:
        right = (outputs.argmax(1) == y).double()
        labels, scores = y.numpy(), outputs.float().numpy()
    elif classes == 1:  # a regression
        right = (outputs[:, 0].double() - y).abs()
    else:  # texts: share of positions predicted right
        pairs = zip(outputs.split(1), y.split(1), strict=True)
        right = torch.stack([data.metric.total(*pair, classes) for pair in pairs]).double()
    return {
        "sample": data.test_sample_ids(client),
        "unit": data.unit_ids(client)[1],
        "client": np.full(count, data.numbers[client]),
        "label": labels,
        "right": right.numpy(),
        "outputs": scores,
    }


def _plain_scores(run: RunContext, kind: str, client: int) -> Table:
    """Fit a plain model to a client's training samples, and score its test samples."""
    data = run.data.client(client)
    x, y = _arrays(data.test)
    train = _arrays(data.train) if len(data.train) else (x[:0], y[:0])
    outputs = fit_and_predict(
        kind,
        train,
        x,
        run.data.unit_ids(client)[0],
        run.data.num_classes,
    )
    return _table(
        run,
        client,
        torch.from_numpy(outputs),
        torch.from_numpy(y),
    )


def _arrays(part: Any) -> tuple[Array, Array]:
    """All samples (n, features), flattened, and their labels."""
    xs, ys = zip(*part.batches(4096), strict=True)
    return torch.cat(xs).flatten(1).double().numpy(), torch.cat(ys).numpy()


def facts_of(config: Config) -> SiloFacts:
    """Load the data of all folds, and collect facts on the silos before anything is trained.

    Raises:
        BadInput: the data are absent, malformed or too few.
    """
    count = config.federation.clients
    source, _ = load(config.data, count, config.smoke)
    parts = [
        prepare(
            config.data,
            count,
            seed,
            config.smoke,
        )
        for seed in range(FOLDS)
    ]
    data = parts[0]
    # unique: a silo of 3 samples tests some of them twice
    tested = [
        np.unique(np.concatenate([part.test_sample_ids(client) for part in parts]))
        for client in range(data.clients)
    ]
    pool = source.train.followed_by(source.test) if config.data.pooled else source.train
    rows = pool.read_all()
    is_table = rows.ndim == 2
    if pool.spans is not None:
        copies = pool.sample_ids
    elif is_table and rows.dtype != np.int64 and pool.labels.ndim == 1:
        copies = units.copies(np.column_stack([rows, pool.labels]))
    else:
        copies = np.unique([sample.tobytes() for sample in rows], return_inverse=True)[1]
    kind = "" if pool.units is None else "units"
    if pool.spans is not None:
        kind = "recordings"
    plain: list[str] = []
    if rows[0].size <= MOST_FEATURES and not source.vocabulary:
        plain = [*FITTERS] if is_table else [LINEAR]
    return SiloFacts(
        rare=imbalance.metric_line(data) if imbalance.default_metric(data) else "",
        names=data.client_names or [f"silo {client}" for client in range(data.clients)],
        sizes=[len(numbers) for numbers in tested],
        copies=copies,
        kind=kind,
        counts=[len(np.unique(pool.unit_ids[numbers])) for numbers in tested] if kind else (),
        plain=plain,
        pools=is_table and rows.shape[1] <= MOST_POOLED and not source.vocabulary,
        notes=silos.warning_lines(config.data),
    )

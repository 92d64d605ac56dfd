"""Loggers: rank 0 passes each round's metrics and pictures to TensorBoard or W&B."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fl_lightning.callbacks import connection, exhibits
from fl_lightning.callbacks.base import Observer
from fl_lightning.callbacks.exhibits import without_secrets
from fl_lightning.callbacks.heatmaps import DRAWN, OVERVIEW, Heatmaps
from fl_lightning.configuration.config import check, flat
from fl_lightning.core.run import RunContext
from fl_lightning.foundation import log
from fl_lightning.foundation.csvtable import Row
from fl_lightning.foundation.errors import RunFailed
from fl_lightning.foundation.extras import require
from fl_lightning.foundation.files import atomic_write
from fl_lightning.results.columns import (
    COLUMNS,
    CumulativeCosts,
    by_viewer_name,
    evenly_spaced,
    summary_viewer_name,
    viewer_name,
)
from fl_lightning.results.folder import RunFolder
from fl_lightning.results.provenance import run_title
from fl_lightning.results.record import RelationView, RoundRecord

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard import SummaryWriter

PROJECT = "fl_lightning"
MOST_OVERVIEWS, MOST_FURTHER = 700, 120
"""Limits on the pictures that are sent to W&B, each a file: the greatest number of rounds with a
picture of the relation, and about the greatest number of other pictures in all. Together with its
other files a run stays below the 1,000 files that W&B's documentation advises."""


class TensorBoard(Observer):
    """Writes scalars and pictures for TensorBoard to `tensorboard/` in the run folder; the step is
    the round."""

    stage = "log"

    def __init__(self) -> None:
        hint = "to log without it: --loggers.tensorboard null"
        require("tensorboard", "loggers.tensorboard", "tensorboard", hint)
        self._writer: SummaryWriter | None = None
        self._so_far = CumulativeCosts()

    def on_fit_start(self, run: RunContext) -> None:
        """Open the event file. In a resumed run, tell TensorBoard (`purge_step`) to hide the events
        of rounds that will be run again."""
        if run.is_main:
            from torch.utils.tensorboard import SummaryWriter
            from torch.utils.tensorboard.summary import hparams

            rows = RunFolder(run.folder).read("metrics")
            self._so_far = CumulativeCosts(r for r in rows if r["round"] <= run.resumed_from)
            folder = run.folder / "tensorboard"
            # also before a first checkpoint
            again = run.resumed_from + 1 if folder.exists() else None
            self._writer = SummaryWriter(str(folder), purge_step=again)
            values = dict(flat(without_secrets(run.config.by_key())))
            lines = [f"| {key} | {value} |" for key, value in values.items()]
            self._writer.add_text("config", "\n".join(["| key | value |", "| --- | --- |", *lines]))
            metric = run.data.metric
            scores = [metric.of("mean"), *map(metric.by, ("before", "after", "global"))]
            texts = {key: str(value) for key, value in values.items()}
            for part in hparams(texts, dict.fromkeys(map(viewer_name, scores), 0)):
                self._writer._get_file_writer().add_summary(part)

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """Write the round, and flush so that a reader finds it."""
        if self._writer is None:
            return
        for name, value in (
            by_viewer_name(record.metrics) | self._so_far.add(record.metrics)
        ).items():
            self._writer.add_scalar(name, value, record.round)
        for name, image in record.images.items():
            self._writer.add_image(name, image, record.round, dataformats="HWC")
        self._writer.flush()

    def on_close(self, run: RunContext) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB(Observer):
    """Sends metrics and heatmaps to Weights & Biases; without a key or a network, writes a folder
    to upload later.

    Each round is a row of W&B's history; its number, `round`, is W&B's step and the x axis of
    charts. The run's id at W&B is stored as `wandb_id.txt` in the run folder, so a resumed run
    continues under the same id. Rounds that W&B does not have (an offline run cannot be appended
    to) are sent again from the run folder.
    """

    stage = "send"

    def __init__(
        self,
        project: str = PROJECT,
        entity: str | None = None,
        mode: Literal["auto", "online", "offline", "disabled"] = "auto",
        group: str | None = None,
        tags: list[str] | None = None,
        job_type: str | None = None,
        notes: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        """Set the options. For those that are None, W&B's environment variables (WANDB_...) count.

        Args:
            project: name of the project. If it is fl_lightning, WANDB_PROJECT counts instead, if
                set.
            entity: user or team that owns the project.
            mode: auto: online if an API key is known and the server answers, else offline; or the
                mode that WANDB_MODE names, if set.
            group: name of the run's group. None: WANDB_RUN_GROUP, else the method and a name of its
                setting, equal for runs that differ by their seed alone.
            tags: tags of the run.
            job_type: job type of the run. None: WANDB_JOB_TYPE, else the seed.
            notes: notes on the run.
            checkpoint: also upload the last checkpoint.
        """
        modes = ("auto", "online", "offline", "disabled")
        check(
            "loggers.wandb.mode",
            mode,
            mode in modes,
            f"it must be one of {', '.join(modes)}",
        )
        require(
            "wandb",
            "loggers.wandb",
            "wandb",
            "to log without it: --loggers.wandb null",
        )
        self.mode = mode
        self.checkpoint = checkpoint
        variable = os.environ.get
        if project == PROJECT:
            project = variable("WANDB_PROJECT") or project
        self._options: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "tags": tags,
            "notes": notes,
            "group": group or variable("WANDB_RUN_GROUP"),
            "job_type": job_type or variable("WANDB_JOB_TYPE"),
        }
        self._run: wandb.Run | None = None
        self._agents_id: str | None = None
        self._defined: set[str] = set()
        self._sent = 0  # the last round that W&B has
        self._so_far = CumulativeCosts()
        self._ended = False

    def on_fit_start(self, run: RunContext) -> None:
        """Decide between online and offline, and open the run; raise `BadInput` if `online` is
        impossible."""
        if not run.is_main or self.mode == "disabled":
            return
        self._agents_id = connection.id_of_agent()
        ignored = connection.forget_other_runs(keep=connection.SWEEP if self._agents_id else ())
        if ignored:
            why = "would name another run and is ignored: each run has its own id and folder"
            self._say(f"{', '.join(ignored)} {why}")
        mode: connection.Mode = "offline"
        reason = ""
        if self.mode != "offline":
            mode, reason = connection.possible_mode()
        possible = self.mode in ("auto", mode)
        check(
            "loggers.wandb.mode",
            self.mode,
            possible,
            f"{reason}; use auto or offline",
        )
        if mode == "disabled":
            return
        for attempt in dict.fromkeys((mode, "offline")):
            try:
                self._run = self._open(run, attempt)
                break
            except Exception as error:  # its text is not printed: it may hold parts of the key
                reason = f"opening an {attempt} run failed ({type(error).__name__})"
                if self.mode != "auto":
                    raise RunFailed(f"W&B: {reason}; use mode auto") from None
        if self._run is None:
            self._say(f"nothing is logged, since {reason}")
            return
        if self._run.offline:
            since = reason and f", since {reason}"
            self._say(f"offline{since}; upload later with: {self._where()}")
        else:
            self._say(self._where())
            self._sent = int(self._run.summary.get("round", 0)) if self._run.resumed else 0
        if run.rounds > MOST_OVERVIEWS:
            fewer = f"the relation is drawn in {MOST_OVERVIEWS} of {run.rounds} rounds"
            advice = "W&B advises fewer than 1,000 files a run; TensorBoard and relation/ have all"
            self._say(f"{fewer}: {advice}")
        self._send_again(run)

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """Send the round as one row."""
        self._send(
            run, record.round, record.metrics, record.clients, record.images, record.relation
        )

    def summarize(self, run: RunContext) -> dict[str, str]:
        """Return the run's address or, for an offline run, the command that uploads it."""
        return {} if self._run is None else {"wandb": self._where()}

    def on_fit_end(
        self,
        run: RunContext,
        summary: Mapping[str, Any],
    ) -> None:
        """Set the run's summary, and upload tables and files."""
        self._ended = True
        if self._run is None:
            return
        for name, value in summary.items():
            if isinstance(value, bool | int | float | str) and name != "wandb":
                self._run.summary[summary_viewer_name(name)] = value
        try:
            self._keep(run, summary)
        except Exception as error:  # curves and summary are there all the same
            self._say(f"tables and files are not kept ({type(error).__name__})")

    def on_close(self, run: RunContext) -> None:
        """Finish the run; data that cannot be uploaded in a minute stay on the disk."""
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=0 if self._ended else 1)
        except Exception as error:
            kind = type(error).__name__
            self._say(f"not all is uploaded ({kind}); upload it with: {self._sync()}")
            connection.tear_down()
        self._run = None
        if self._agents_id is not None:
            # W&B would give the agent's id to this process's next run, too
            connection.tear_down(0 if self._ended else 1)

    def _open(
        self,
        run: RunContext,
        mode: connection.Mode,
    ) -> wandb.Run:
        import wandb

        config = run.config
        id_file = run.folder / "wandb_id.txt"
        former_id = None
        if run.resumed_from and id_file.exists():
            former_id = id_file.read_text(encoding="utf-8").strip()
        defaults = {"group": exhibits.group_of(config), "job_type": f"seed {config.seed}"}
        options = dict(self._options)
        for key, default in defaults.items():
            options[key] = options[key] or default
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=30,
            finish_timeout=60,
            finish_timeout_raises=True,
        )
        opened = wandb.init(
            **options,
            name=run_title(config, run.folder.name),
            dir=run.folder,
            id=former_id or self._agents_id or secrets.token_hex(4),
            resume="allow" if former_id and mode == "online" else None,
            mode=mode,
            config=without_secrets(config.by_key()),
            settings=settings,
        )
        # the agent's id is this run's: a second one in this process has its own
        connection.forget_other_runs()
        with atomic_write(id_file) as aside:
            aside.write_text(f"{opened.id}\n", encoding="utf-8")
        opened.define_metric("round")
        opened.define_metric("*", step_metric="round")
        return opened

    def _send_again(self, run: RunContext) -> None:
        """Send the finished rounds that W&B does not have."""
        folder = RunFolder(run.folder)
        every = folder.read("metrics")
        rows = [row for row in every if row["round"] > self._sent]
        self._so_far = CumulativeCosts(row for row in every if row["round"] <= self._sent)
        clients = defaultdict[float, list[Row]](list)
        if rows:
            for row in folder.read("clients"):
                clients[row["round"]].append(row)
        for row in rows:
            t = int(row.pop("round"))
            view = folder.read_relation(t) if folder.relation_file(t).exists() else None
            images: dict[str, np.ndarray] = {}
            for callback in run.callbacks:
                if view is not None and isinstance(callback, Heatmaps):
                    images |= callback.pictures(run, view, t)
            self._send(
                run,
                t,
                row,
                clients[t],
                images,
                view,
            )

    def _send(
        self,
        run: RunContext,
        t: int,
        metrics: Mapping[str, float],
        clients: Iterable[Mapping[str, float]],
        images: Mapping[str, np.ndarray],
        relation: RelationView | None,
    ) -> None:
        # also for rounds that were sent before a kill and are trained again
        sums = self._so_far.add(metrics)
        if self._run is None or t <= self._sent:
            return
        import wandb

        try:
            column = run.data.metric.by(run.judge)
            scores = [client[column] for client in clients if column in client]
            row: dict[str, Any] = {"round": t, **by_viewer_name(metrics), **sums}
            for name in metrics.keys() - self._defined:
                summary = COLUMNS[name].wandb_summary
                self._run.define_metric(viewer_name(name), step_metric="round", summary=summary)
            self._defined |= metrics.keys()
            if scores:
                counts = np.histogram(scores, bins=20)
                row["fairness/clients"] = wandb.Histogram(np_histogram=counts)
            tabled = t in evenly_spaced(run.rounds, exhibits.MOST_TABLES)
            if relation is not None and relation.rows.size and tabled:
                table = exhibits.relation_table(relation, run.data.client_names)
                row["relation/cube"] = wandb.Table(**table)
            for name, image in self._with_room(run, t, images).items():
                row[name] = wandb.Image(image)
            self._run.log(row, step=t, commit=True)
            self._sent = t
        except Exception as error:  # a viewer that is lost must not stop the training
            kind = type(error).__name__
            self._say(f"logging stopped in round {t} ({kind}); all of it is in metrics.csv")
            self._run = None
            connection.tear_down()

    def _with_room(
        self,
        run: RunContext,
        t: int,
        images: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Return those of the pictures of round `t` that are sent; in long runs, pictures of some
        rounds only, spread evenly over the run."""
        further = {name: image for name, image in images.items() if name != OVERVIEW}
        most = MOST_FURTHER // max(len(further), 1)
        rounds = evenly_spaced(run.rounds, most)
        if most >= 2 * DRAWN:
            rounds = rounds + evenly_spaced(run.rounds, DRAWN)
        pictures = further if t in rounds else {}
        if OVERVIEW in images and t in evenly_spaced(run.rounds, MOST_OVERVIEWS):
            pictures[OVERVIEW] = images[OVERVIEW]
        return pictures

    def _keep(
        self,
        run: RunContext,
        summary: Mapping[str, Any],
    ) -> None:
        """Upload the table of clients and the run's files: configuration, tables, relation,
        checkpoint."""
        import wandb

        assert self._run is not None
        folder = RunFolder(run.folder)
        # a later round's row takes the place
        last = {int(row["client"]): row for row in folder.read("clients")}
        scores = summary["final_accuracies"]
        table = exhibits.client_table(run, scores, summary["final_models"], last)
        self._run.summary["clients/final"] = wandb.Table(**table)
        artifact = wandb.Artifact(
            f"run-{self._run.id}", type="run", description="configuration, tables, relation cube"
        )
        for path in exhibits.tables_to_keep(folder, run.rounds):
            artifact.add_file(str(path), name=str(path.relative_to(run.folder)))
        self._run.log_artifact(artifact)
        with tempfile.TemporaryDirectory() as aside:
            packed = None
            if self.checkpoint:
                packed = exhibits.pack_checkpoint(run.folder / "checkpoints", Path(aside))
            if packed is not None:
                saved = wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint")
                saved.add_file(str(packed))  # a copy: the folder may go
                self._run.log_artifact(saved)

    def _where(self) -> str:
        assert self._run is not None
        return self._sync() if self._run.offline else str(self._run.url)

    def _sync(self) -> str:
        assert self._run is not None
        return f"wandb sync {Path(self._run.dir).parent}"

    def _say(self, line: str) -> None:
        log.say(f"W&B: {line}")

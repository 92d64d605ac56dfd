"""Terminal output of a run: a progress bar, and at the end a table and where to find everything."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from fl_lightning.callbacks.base import Observer
from fl_lightning.core import RoundRecord, RunContext
from fl_lightning.foundation.csvtable import Row
from fl_lightning.foundation.log import in_bytes
from fl_lightning.foundation.metric import MODELS, of_rows
from fl_lightning.results.folder import RunFolder, best, final_words


class Progress(Observer):
    """A progress bar (one line a round where there is no terminal), and a table at the end."""

    stage = "show"

    def __init__(self) -> None:
        self._rows: list[Row] = []
        # the best scored round and the last one: enough for a line, however many rounds there are
        self._judged: list[Row] = []
        self._summary: Mapping[str, Any] | None = None
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        self._task = TaskID(0)
        # about the clients of this rank in the round, and how many of them have ended
        self._share = self._done = 0

    def on_fit_start(self, run: RunContext) -> None:
        """Show the bar, in a resumed run with its scores so far."""
        if not run.is_main:
            return
        if run.resumed_from:
            for row in RunFolder(run.folder).read("metrics"):
                if row["round"] <= run.resumed_from:
                    self._add(row)
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=self._console,
                expand=True,
            )
            note = _so_far(self._judged)
            start = run.resumed_from
            self._task = self._bar.add_task(
                "",
                total=run.rounds,
                completed=start,
                note=note,
            )
            self._bar.start()

    def on_round_start(
        self,
        run: RunContext,
        round: int,
        cohort: list[int],
    ) -> None:
        """Show the number of the round."""
        self._share = math.ceil(len(cohort) / run.world_size)
        self._done = 0
        if self._bar is not None:
            description = f"round {round}/{run.rounds}"
            self._bar.update(self._task, description=description, completed=round - 1)

    def on_client_end(
        self,
        run: RunContext,
        client: int,
    ) -> None:
        """Advance the bar within the round, as far as rank 0 knows it."""
        self._done += 1
        if self._bar is not None and self._done <= self._share:
            self._bar.advance(self._task, 1 / self._share)

    def on_round_end(
        self,
        run: RunContext,
        record: RoundRecord,
    ) -> None:
        """Show the round's scores."""
        if not run.is_main:
            return
        metrics = record.metrics
        is_judged = self._add({"round": record.round, **metrics})
        note = _so_far(self._judged)
        if self._bar is not None:
            self._bar.update(self._task, completed=record.round, note=note)
            return
        loss = metrics.get("train_loss")
        trained = "no steps" if loss is None else f"loss {loss:.4f}"
        score = note if is_judged else "not judged"
        line = f"round {record.round}/{run.rounds}: {score}, {trained}, {metrics['seconds']:.1f} s"
        print(line, file=self._console.file, flush=True)

    def _add(self, row: Row) -> bool:
        """Store the round of `row`; return whether its models were scored."""
        self._rows.append(row)
        if of_rows([row]).of("mean") not in row:
            return False
        rows = [*self._judged, row]
        _, best_round = best(rows)
        best_row = next((judged for judged in rows if judged["round"] == best_round), row)
        self._judged = [best_row, row]
        return True

    def on_fit_end(
        self,
        run: RunContext,
        summary: Mapping[str, Any],
    ) -> None:
        """Store the summary for the table."""
        self._summary = summary

    def on_close(self, run: RunContext) -> None:
        """Remove the bar; print the table if the run has ended well."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if run.is_main and self._summary is not None:
            out = Console()
            out.print(_table(run, self._rows, self._summary))
            lines = _closing_lines(run, self._rows, self._summary)
            # not wrapped: paths can be copied
            out.print(
                *lines,
                sep="\n",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )


def _table(
    run: RunContext,
    rows: list[Row],
    summary: Mapping[str, Any],
) -> Table:
    """Return the table of each kind of model's scores, and of the spread over clients."""
    names = f"{type(run.method).__name__}, {run.clients} clients, {run.rounds} rounds"
    title = escape(f"{run.folder.name}: {names}")
    table = Table(title=title, title_justify="left", caption_justify="left")
    metric = of_rows(rows)
    mean = metric.of("mean")
    table.add_column(f"{metric.words}, mean of the round's clients")
    for column in ("best", "round", "last"):
        table.add_column(column, justify="right")
    for kind, label in MODELS.items():
        column = metric.by(kind)
        values = [row[column] for row in rows if column in row]
        if values:
            score, round = best(rows, column)
            is_judge = kind == run.judge
            cells = [label + " *" * is_judge, f"{score:.4f}", f"{round}", f"{values[-1]:.4f}"]
            table.add_row(*cells, style="bold" if is_judge else None)
    judged = {int(row["round"]): row for row in rows if mean in row}
    if judged:
        _, round = best(rows)
        best_row = judged[round]
        last_row = judged[max(judged)]
        for label, column in (
            ("* worst 10 % of clients", metric.of("worst")),
            ("* spread over clients (std)", metric.of("std")),
        ):
            table.add_row(
                label,
                f"{best_row[column]:.4f}",
                f"{round}",
                f"{last_row[column]:.4f}",
            )
    if metric.of("mean_best") in summary:
        score = summary[metric.of("mean_best")]
        table.add_row("* mean of each client's best round", f"{score:.4f}")
    final_models, _, other_models = final_words(summary).partition("; ")
    if f"final_{mean}" in summary:
        label = f"all clients at the end ({final_models})"
        table.add_row(
            label,
            "",
            "",
            f"{summary[f'final_{mean}']:.4f}",
            end_section=True,
        )
    if "validation_round" in summary:
        label = "* in the round chosen on validation data"
        score = summary[f"validation_{mean}"]
        table.add_row(label, f"{score:.4f}", f"{summary['validation_round']}")
    table.caption = f"* the judge, whose scores are {mean}: {MODELS[run.judge]}"
    if other_models:
        table.caption += f"\nat the end: {other_models}"
    return table


def _closing_lines(
    run: RunContext,
    rows: list[Row],
    summary: Mapping[str, Any],
) -> list[str]:
    """Return lines about bytes, times, scores and where to find everything."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row)  # it adds floats, too
    lines = [f"{_travelled(total, 'upload', 'up')}, {_travelled(total, 'download', 'down')}"]
    if "channel_s" in total:
        parts = ", ".join(
            f"{part} {total[f'channel_{part}_s']:.2f}" for part in ("download", "compute", "upload")
        )
        seconds = f"{total['channel_s']:.2f} s over the channel"
        lines.append(f"{seconds} ({parts}; the slowest client of each round)")
    phases = ", ".join(
        f"{phase} {total[f'seconds_{phase}']:.1f}" for phase in ("client", "server", "evaluation")
    )
    memory = max(row.get("memory_mib", 0.0) for row in rows)
    metric = of_rows(rows)
    words = metric.mean_words
    score, round = best(rows)
    score_words = f"best {words} {score:.4f} ({MODELS[run.judge]}) in round {round}"
    lines += [
        f"{total['seconds']:.1f} s in rounds ({phases}), at most {memory:.0f} MiB of memory",
        f"{type(run.method).__name__}: {score_words}; run folder: {run.folder}",
        f"The best round is chosen on {run.config.data.score_on} data, so it is optimistic; the "
        f"last round is not.",
    ]
    if "held_out_clients" in summary:
        prefix = f"newcomer_{metric.of('mean')}_"
        counts = [key.removeprefix(prefix) for key in summary if key.startswith(prefix)]
        scores = ", ".join(f"{summary[prefix + count]:.4f} with {count}" for count in counts)
        counted = "of each class" if metric.rises else "in all"
        unseen = f"{len(summary['held_out_clients'])} unseen clients, labelled samples {counted}"
        lines.append(f"{unseen}: {words} {scores} ({summary['newcomer_rule']})")
    if (run.folder / "figures").is_dir():
        lines.append(f"figures: {run.folder / 'figures'}")
    if (run.folder / "tensorboard").is_dir():
        lines.append(f"TensorBoard: tensorboard --logdir {run.folder / 'tensorboard'}")
    if "wandb" in summary:
        lines.append(f"W&B: {summary['wandb']}")
    return lines


def _travelled(
    total: Mapping[str, float],
    way: str,
    word: str,
) -> str:
    """Return the bytes of one direction in words."""
    size = total[f"{way}_bytes"]
    parameters = in_bytes(total[f"{way}_parameter_bytes"], like=size).split()[0]
    return f"{in_bytes(size)} {word} (parameters: {parameters})"


def _so_far(rows: list[Row]) -> str:
    """Return the judge's mean in the last scored round, and the best so far, in words; empty if
    there is none."""
    metric = of_rows(rows)
    judged = [row[metric.of("mean")] for row in rows if metric.of("mean") in row]
    if not judged:
        return ""
    score, round = best(rows)
    return f"{metric.mean_words} {judged[-1]:.4f} (best {score:.4f} in round {round})"

"""What a person at the terminal sees: a bar while the rounds go by, a table and the way to
everything at the end."""

import math
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
        # the best judged round and the last: a line must not cost more the more there are
        self._judged: list[Row] = []
        self._summary: Mapping[str, Any] | None = None
        self._console = Console(stderr=True)
        self._bar: Bar | None = None
        self._task = TaskID(0)
        # clients of this rank in the round, and how many of them are done
        self._share = self._done = 0

    def on_fit_start(self, run: RunContext) -> None:
        """Show the bar, with what a resumed run has reached so far."""
        if not run.is_main:
            return
        if run.resumed_from:
            for row in RunFolder(run.folder).read("metrics"):
                if row["round"] <= run.resumed_from:
                    self._add(row)
        if self._console.is_terminal:
            note = TextColumn("{task.fields[note]}")
            left = TimeRemainingColumn()
            line = (TextColumn("{task.description}"), BarColumn(bar_width=None), note, left)
            self._bar = Bar(
                *line,
                console=self._console,
                expand=True,
            )
            self._task = self._bar.add_task(
                "", total=run.rounds, completed=run.resumed_from, note=_so_far(self._judged)
            )
            self._bar.start()

    def on_round_start(
        self,
        run: RunContext,
        round: int,
        cohort: list[int],
    ) -> None:
        """Say which round it is."""
        self._share = math.ceil(len(cohort) / run.world_size)
        self._done = 0
        if self._bar is not None:
            self._bar.update(
                self._task, description=f"round {round}/{run.rounds}", completed=round - 1
            )

    def on_client_end(self, run: RunContext, client: int) -> None:
        """Move on within the round, as far as rank 0 can tell."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task, 1 / self._share if self._done <= self._share else 0)

    def on_round_end(self, run: RunContext, record: RoundRecord) -> None:
        """Show what the round brought."""
        if not run.is_main:
            return
        self._add({"round": record.round, **record.metrics})
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=record.round,
                note=_so_far(self._judged),
            )
        else:
            judged = of_rows([record.metrics]).of("mean") in record.metrics
            accuracy = _so_far(self._judged) if judged else "not judged"
            loss = record.metrics.get("train_loss")
            seconds = record.metrics["seconds"]
            trained = "no steps" if loss is None else f"loss {loss:.4f}"
            line = f"round {record.round}/{run.rounds}: {accuracy}, {trained}, {seconds:.1f} s"
            print(line, file=self._console.file, flush=True)

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        if of_rows([row]).of("mean") in row:
            _, at = best(both := [*self._judged, row])
            self._judged = [next((one for one in both if one["round"] == at), row), row]

    def on_fit_end(
        self,
        run: RunContext,
        summary: Mapping[str, Any],
    ) -> None:
        """Keep the summary for the table."""
        self._summary = summary

    def on_close(self, run: RunContext) -> None:
        """Take the bar away; print the table if the run has ended well."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if run.is_main and self._summary is not None:
            out = Console()
            out.print(_table(run, self._rows, self._summary))
            for line in _closing_lines(run, self._rows, self._summary):
                # not wrapped: paths can be copied
                out.print(
                    line,
                    soft_wrap=True,
                    markup=False,
                    highlight=False,
                )


def _table(
    run: RunContext,
    rows: list[Row],
    summary: Mapping[str, Any],
) -> Table:
    """Accuracies of each model that was judged, and how the clients differ."""
    names = f"{type(run.method).__name__}, {run.clients} clients, {run.rounds} rounds"
    table = Table(
        title=escape(f"{run.folder.name}: {names}"), title_justify="left", caption_justify="left"
    )
    metric = of_rows(rows)
    mean = metric.of("mean")
    table.add_column(f"{metric.words}, mean of the round's clients")
    for column in ("best", "round", "last"):
        table.add_column(column, justify="right")
    for kind, label in MODELS.items():
        values = [row[metric.by(kind)] for row in rows if metric.by(kind) in row]
        if values:
            accuracy, round = best(rows, metric.by(kind))
            judge = kind == run.judge
            cells = (label + " *" * judge, f"{accuracy:.4f}", str(round), f"{values[-1]:.4f}")
            table.add_row(*cells, style="bold" if judge else None)
    judged = {int(row["round"]): row for row in rows if mean in row}
    _, round = best(rows)
    for statistic, label in (
        ("worst", "* worst 10 % of clients"),
        ("std", "* spread over clients (std)"),
    ):
        if judged:
            name = metric.of(statistic)
            cells = (
                label,
                f"{judged[round][name]:.4f}",
                str(round),
                f"{judged[max(judged)][name]:.4f}",
            )
            table.add_row(*cells)
    if metric.of("mean_best") in summary:
        bests = f"{summary[metric.of('mean_best')]:.4f}"
        table.add_row("* mean of each client's best round", bests, "", "")
    if f"final_{mean}" in summary:
        which = f"all clients at the end ({final_words(summary).partition('; ')[0]})"
        table.add_row(which, "", "", f"{summary[f'final_{mean}']:.4f}", end_section=True)
    if "validation_round" in summary:
        chosen = f"{summary[f'validation_{mean}']:.4f}"
        table.add_row(
            "* in the round chosen on validation data", chosen, str(summary["validation_round"]), ""
        )
    table.caption = f"* the judge, whose scores are {mean}: {MODELS[run.judge]}"
    if others := final_words(summary).partition("; ")[2]:
        table.caption += f"\nat the end: {others}"
    return table


def _closing_lines(
    run: RunContext,
    rows: list[Row],
    summary: Mapping[str, Any],
) -> list[str]:
    """What travelled, how long it took, and where everything is."""
    total = {
        name: sum(row.get(name, 0.0) for row in rows)
        for name in {key for row in rows for key in row}
    }
    up, down = (
        f"{in_bytes(sent := total[f'{way}_bytes'])} {word} "
        f"(parameters: {in_bytes(total[f'{way}_parameter_bytes'], like=sent).split()[0]})"
        for way, word in (("upload", "up"), ("download", "down"))
    )
    phases = ", ".join(
        f"{phase} {total.get(f'seconds_{phase}', 0.0):.1f}"
        for phase in ("client", "server", "evaluation")
    )
    score, round = best(rows)
    words = of_rows(rows).mean_words
    lines = [
        f"{up}, {down}",
        f"{total['seconds']:.1f} s in rounds ({phases}), "
        f"at most {max(row.get('memory_mib', 0.0) for row in rows):.0f} MiB of memory",
        f"{type(run.method).__name__}: best {words} {score:.4f} ({MODELS[run.judge]}) in round "
        f"{round}; "
        f"run folder: {run.folder}",
        f"The best round is chosen on {run.config.data.score_on} data, so it is optimistic; the "
        f"last round is not.",
    ]
    if "held_out_clients" in summary:
        name = f"newcomer_{of_rows(rows).of('mean')}_"
        curve = {
            key.removeprefix(name): value for key, value in summary.items() if key.startswith(name)
        }
        scores = ", ".join(f"{value:.4f} with {count}" for count, value in curve.items())
        counted = "of each class" if of_rows(rows).rises else "in all"
        unseen = f"{len(summary['held_out_clients'])} unseen clients, labelled samples {counted}"
        lines.append(f"{unseen}: {words} {scores} ({summary['newcomer_rule']})")
    if "channel_s" in total:
        parts = ", ".join(
            f"{part} {total[f'channel_{part}_s']:.2f}" for part in ("download", "compute", "upload")
        )
        lines.insert(
            1,
            f"{total['channel_s']:.2f} s over the channel ({parts}; the slowest client of each "
            f"round)",
        )
    if (run.folder / "figures").is_dir():
        lines.append(f"figures: {run.folder / 'figures'}")
    if (run.folder / "tensorboard").is_dir():
        lines.append(f"TensorBoard: tensorboard --logdir {run.folder / 'tensorboard'}")
    if "wandb" in summary:
        lines.append(f"W&B: {summary['wandb']}")
    return lines


def _so_far(rows: list[Row]) -> str:
    """The judge's mean in the last judged round, and the best so far; empty if there is none."""
    metric = of_rows(rows)
    judged = [row[metric.of("mean")] for row in rows if metric.of("mean") in row]
    if not judged:
        return ""
    score, round = best(rows)
    return f"{metric.mean_words} {judged[-1]:.4f} (best {score:.4f} in round {round})"

"""Writes the run folder's tables, log and provenance, and summarises all rounds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fl_lightning import __version__
from fl_lightning.callbacks.base import Observer
from fl_lightning.configuration.config import Config, check
from fl_lightning.core import RoundRecord, RunContext
from fl_lightning.data import heterogeneity, imbalance
from fl_lightning.data.federated import FederatedData, samples_digest
from fl_lightning.foundation import log
from fl_lightning.foundation.csvtable import Row
from fl_lightning.foundation.extras import hint_if_missing
from fl_lightning.foundation.metric import MODELS, Metric
from fl_lightning.results import owncode, provenance
from fl_lightning.results.folder import RunFolder, best, mean_of_bests


class RunFolderWriter(Observer):
    """Writes the run folder's tables (rank 0), after observers and before loggers and the
    checkpoint."""

    stage = "write"

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._recorded = False
        self._began = time.perf_counter()
        self._code: dict[str, bytes] = {}
        self._data: str | None = None
        self.heterogeneity: dict[str, float] = {}

    def on_fit_start(self, run: RunContext) -> None:
        """Delete rows of rounds after the checkpoint, and write the clients' sample counts."""
        self._began = time.perf_counter()
        if run.is_main:
            begins = ""
            if run.resumed_from:
                begins = f", on from round {run.resumed_from}"
            log.note(
                f"{run.method_name}: {run.clients} clients, {run.rounds} rounds, {run.world_size} "
                f"processes{begins}"
            )
            # the tables describe the data of the first round; they may have drifted since
            run.data.at_round(1)
            self._describe(run)
            run.data.at_round(run.resumed_from or 1)

    def _describe(self, run: RunContext) -> None:
        """Write the clients' sample counts and how much their data differ, and log rare classes.

        Raises:
            BadInput: the resumed run began with other samples, or `evaluation.predictions` cannot
                be written.
        """
        data = run.data
        self.folder.names = data.client_names
        if run.config.evaluation.predictions:
            absent = hint_if_missing("pandas") or hint_if_missing("pyarrow")
            check("evaluation.predictions", True, not absent, absent)
            requirement = (
                "predictions of a deployment, and of each position in a text, cannot be written: "
                "set it to False"
            )
            plain = data.holds_all and not (data.text and data.text.per_position)
            check("evaluation.predictions", True, plain, requirement)
        counts = None
        if data.task == "classification" and data.holds_all:
            counts = data.class_counts
        resumed = bool(run.resumed_from)
        same = self.folder.write_split(
            data.train_sizes,
            data.test_sizes,
            counts,
            data.class_names,
            resumed,
        )
        requirement = (
            "the clients' samples differ from those with which the run began: restore these, or "
            "start a new run"
        )
        check("data.root", run.config.data.root, same, requirement)
        self.folder.truncate(run.resumed_from)
        self._code = owncode.read(owncode.paths(run.config))
        if not data.holds_all:  # a deployment's server does not know the clients' data
            return
        self._data = samples_digest(data)
        before = None
        if resumed:
            before = provenance.data_digest(run.folder)
        if before not in (None, self._data):
            log.say(
                f"data: other samples than the run began with, from round {run.resumed_from + 1} on"
            )
        if not run.resumed_from:
            log_data_caveats(run.config, data)
        differences = heterogeneity.measure(data)
        self.folder.write_heterogeneity(differences.clients, differences.pairs)
        self.heterogeneity = differences.summary()

    def on_round_end(self, run: RunContext, record: RoundRecord) -> None:
        """Append a row of metrics, a row for each client and the cohort's relation. If this extends
        a finished run, delete the tables of its final models."""
        log.write_waiting()
        if run.is_main:
            first = not self._recorded
            self._recorded = True
            if first:  # record nothing if the run failed before its first round
                provenance.record_start(
                    run.folder,
                    self._code,
                    record.round,
                    self._data,
                    run.data.reading.digest,
                )
            self.folder.append(record)
            self.folder.write_columns(run.judge)
            if first:
                self.folder.delete_final_files()
            name = run.metric.of("mean")
            score = record.metrics.get(name)
            seconds = record.metrics["seconds"]
            judged = "not judged" if score is None else f"{name} {score:.4f}"
            log.note(f"round {record.round}/{run.rounds}: {judged}, {seconds:.1f} s")

    def summarize(self, run: RunContext) -> dict[str, Any]:
        """Summarise the whole run from its tables, on rank 0; other ranks get an empty dict."""
        if not run.is_main:
            return {}
        rows = self.folder.read("metrics")
        earlier = sum(r["seconds"] for r in rows if r["round"] <= run.resumed_from)
        summary: dict[str, Any] = {"wall_seconds": time.perf_counter() - self._began + earlier}
        summary |= {"method": run.method_name, "rounds": run.rounds, "clients": run.clients}
        for metric in dict.fromkeys([run.data.metric, run.metric]):  # the last one chooses rounds
            summary |= self._judged(rows, metric, run.judge)
        for kind in map(run.data.metric.by, MODELS):
            if any(kind in r for r in rows):
                summary[f"best_{kind}"] = best(rows, kind)[0]
        for name, score in rows[-1].items():
            if name.startswith("global_test_"):
                summary[f"last_{name}"] = score
        for name in ("upload", "upload_parameter", "download", "download_parameter"):
            summary[f"total_{name}_bytes"] = int(sum(r[f"{name}_bytes"] for r in rows))
        if run.config.evaluation.metrics and run.data.holds_all:
            summary["least_test_class"] = run.data.least_test_class
        return summary | {
            **self.heterogeneity,
            "world_size": run.world_size,
            "made_up_data": run.data.made_up,
            "version": __version__,
        }

    def _judged(
        self,
        rows: list[Row],
        metric: Metric,
        judge: str,
    ) -> dict[str, Any]:
        """Summarise the rounds by one metric."""
        summary: dict[str, Any] = {}
        mean = metric.of("mean")
        on_validation = metric.of("validation")
        validated = [r for r in rows if on_validation in r and mean in r]
        if validated:  # the only choice of a round that does not use test data
            chosen = max(validated, key=lambda r: metric.merit(r[on_validation]))
            summary["validation_round"] = int(chosen["round"])
            summary[f"validation_{mean}"] = chosen[mean]
        mean_best, scored = mean_of_bests(self.folder.read("clients"), metric.by(judge))
        summary |= {metric.of("mean_best"): mean_best, "mean_best_clients": scored}
        judged = [r[mean] for r in rows if mean in r]
        if judged:
            summary[f"best_{mean}"], summary["best_round"] = best(rows, mean)
            summary[f"last_{mean}"] = judged[-1]
        return summary

    def on_fit_end(
        self,
        run: RunContext,
        summary: Mapping[str, Any],
    ) -> None:
        """Write the scores of final models and newcomers, and mark the run as ended."""
        if not run.is_main:
            return
        if self._recorded:
            provenance.record_end(run.folder)
        self.folder.write_final(
            summary["final_accuracies"],
            run.data.metric.name,
            summary["final_models"],
            summary["final_further"],
        )
        self.folder.write_newcomers(summary.get("newcomers", []))
        self.folder.write_predictions(summary.get("final_predictions", ()))
        self.folder.write_columns(run.judge)


def log_data_caveats(config: Config, data: FederatedData) -> None:
    """Log whether the metric was chosen by default, and which classes are rare or untrained."""
    evaluation = config.evaluation
    metric = evaluation.metric
    is_default = metric is not None and metric == imbalance.default_metric(data)
    lines = [
        imbalance.metric_line(data) if is_default else None,
        imbalance.rare_line(data, evaluation.metrics or ()),
        imbalance.untrained_line(data),
        imbalance.scattered_line(data),
    ]
    for line in filter(None, lines):
        log.say(line)

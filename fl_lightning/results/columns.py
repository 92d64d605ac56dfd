"""Declarations of all columns of a run's tables: meaning, direction, metric and model.

A run folder keeps the declarations of its columns in `columns.json`, so that readers do not depend
on this version. Viewers (TensorBoard, W&B) call a column `section/name`, and draw a section
together. Runs have different judges (the model that `mean_accuracy` scores): a judge's own columns
are called `own_judge_...`; to compare runs, use `accuracy/after` and the like.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fl_lightning.foundation.metric import BY_TASK, FURTHER, MODELS, Metric

JUDGE = "judge"
"""Value of `Column.model` for scores of the run's judge, whichever kind of model that is."""


@dataclass(frozen=True)
class Column:
    """One column of a table, or one key of `summary.json`."""

    name: str
    """The name; a name that ends with `*` declares all columns that begin with the text before
    it."""
    section: str = "other"
    """Section of viewers, which they draw together."""
    doc: str = ""
    better: Literal["max", "min"] | None = None
    metric: str | None = None
    """Name of the metric of which the column holds scores; None if it holds none."""
    model: str | None = None
    """Kind of model that is scored (`metric.MODELS`), or `JUDGE`."""
    viewed: str = ""
    """Name in the sections of viewers, if it differs."""

    @property
    def viewer_name(self) -> str:
        """Section and name in viewers: `accuracy/after`."""
        return f"{self.section}/{self.viewed or self.name}"

    @property
    def wandb_summary(self) -> str:
        """The option `summary` of W&B's `define_metric` for this column: the best and the last
        value (`max,last` or `min,last`), or only the last (`last`)."""
        return f"{self.better},last" if self.better else "last"

    def merit(self, value: float) -> float:
        """Return `value`, negated if less is better, so that greater is better."""
        return -value if self.better == "min" else value


class Registry:
    """Declared columns by name."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}

    def declare(self, *columns: Column) -> None:
        """Add columns; callbacks may declare theirs too.

        Raises:
            ValueError: a name is declared already.
        """
        for column in columns:
            if self._columns.setdefault(column.name, column) is not column:
                raise ValueError(f"{column.name} is declared already")

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def __getitem__(self, name: str) -> Column:
        """Return the declaration of a column.

        An undeclared column is put into the section `scores` if its name ends with a kind of model,
        else into `other`.
        """
        column = self._find(name)
        if column is not None:
            return replace(column, name=name)
        return Column(name, "scores" if name.rpartition("_")[2] in MODELS else "other")

    def _find(self, name: str) -> Column | None:
        """Return the column, or the declared family (`...*`) with the longest matching
        beginning."""
        names = [name, *(f"{name[:k]}*" for k in range(len(name), 0, -1))]
        return next((self._columns[name] for name in names if name in self._columns), None)


COLUMNS = Registry()


def _score_columns(metric: Metric) -> Iterable[Column]:
    """Yield the columns of one metric in all tables: `mean_accuracy`, `accuracy_after`,
    `worst_accuracy` and so on."""
    better: Literal["max", "min"] = "max" if metric.rises else "min"

    def of(
        name: str,
        doc: str,
        model: str | None = None,
        viewed: str = "",
    ) -> Column:
        meaning = f"{metric.words}: {doc}"
        return Column(
            name,
            metric.name,
            meaning,
            better,
            metric.name,
            model,
            viewed,
        )

    def by_judge(statistic: str, doc: str) -> Column:
        meaning = f"{doc}by the run's judge"
        return of(
            metric.of(statistic),
            meaning,
            JUDGE,
            f"own_judge_{statistic}",
        )

    yield of(metric.name, "of the client's final model, or of a newcomer's after it has trained")
    yield of(metric.by("received"), "of the model that a newcomer is given, before it trains")
    yield by_judge("mean", "mean over clients, ")
    for kind, words in MODELS.items():
        yield of(
            metric.by(kind),
            words,
            kind,
            kind,
        )
        global_test, doc = metric.on_global_test(kind), f"{words}, on the test set of all"
        yield of(
            global_test,
            doc,
            kind,
            f"global_test_{kind}",
        )
    if metric in FURTHER.values():
        doc = "clients that the mean is over: it is defined for those alone"
        column = of(
            metric.of("clients"),
            doc,
            JUDGE,
            "own_judge_clients",
        )
        yield replace(column, better=None)
    yield by_judge("weighted", "mean weighted by test samples, ")
    yield by_judge("validation", "mean on validation data, ")
    yield of(metric.by("validation"), "of the client on validation data, by the run's judge", JUDGE)
    worst, std = metric.of("worst"), metric.of("std")
    column = by_judge("worst", "mean of the worst tenth of the clients, ")
    yield replace(column, section="fairness", viewed=f"own_judge_{worst}")
    column = replace(by_judge("std", "spread, "), section="fairness", better="min")
    yield replace(column, viewed=f"own_judge_{std}")


def _summary_columns(metric: Metric) -> Iterable[Column]:
    """Yield the keys of one metric in `summary.json`."""
    mean, clients = metric.of("mean"), metric.of("clients")
    doc_of_key = {
        f"final_{mean}": "mean over all clients of their final models",
        f"final_{metric.of('worst')}": "the same of the worst tenth of the clients",
        f"final_{metric.of('std')}": "their spread",
        f"best_{mean}": "best mean of a round, chosen on test data",
        f"last_{mean}": "mean of the last judged round",
        f"validation_{mean}": "on test data, in the round that is best on validation data",
        metric.of("mean_best"): "mean over clients of each one's best round",
    }
    if metric in FURTHER.values():
        doc_of_key[f"final_{clients}"] = "clients that the final mean is over"
    better_of_key = {
        f"final_{clients}": None,
        f"final_{metric.of('std')}": "min",
    }
    for name, doc in doc_of_key.items():
        meaning = f"{metric.words}: {doc}, by the run's judge"
        better: Any = better_of_key.get(name, "max" if metric.rises else "min")
        yield Column(
            name,
            "final",
            meaning,
            better,
            metric.name,
            JUDGE,
            f"own_judge_{name}",
        )


_DECLARED: dict[str, dict[str, str]] = {
    "communication": {
        "upload_bytes": "bytes uploaded in the round",
        "upload_parameter_bytes": "bytes uploaded in the round: parameters alone",
        "download_bytes": "bytes downloaded in the round",
        "download_parameter_bytes": "bytes downloaded in the round: parameters alone",
        "layers_uploaded": "layers whose own parameters were uploaded",
        "layers_downloaded": "layers whose own parameters were downloaded",
        "channel_s": "modelled seconds of the round over the channel",
        "channel_download_s": "modelled seconds of the slowest client's download",
        "channel_compute_s": "modelled seconds of the slowest client's local training",
        "channel_upload_s": "modelled seconds of the slowest client's upload",
        "upload_*": "",
        "download_*": "",
        "layers_*": "",
        "channel_*": "",
        "total_upload_*": "sum over the rounds of this column of metrics.csv",
        "total_download_*": "sum over the rounds of this column of metrics.csv",
        "total_channel_*": "sum over the rounds of this column of metrics.csv",
    },
    "cost": {
        "flops_forward": "operations of the cohort's training: passes through the model",
        "flops_backward": "operations of the cohort's training: passes back",
        "flops_extra": "operations of clients in hooks and for a method's own weights",
        "flops_penalty": "operations of the proximal term: 5 for each number and step",
        "flops_server": "operations of the server: Gram matrices, mixing, the relation",
        "seconds": "seconds of the round, of the slowest process",
        "seconds_client": "seconds of the round in which clients train",
        "seconds_server": "seconds of the round in which server mixes",
        "seconds_evaluation": "seconds of the round in which models are scored",
        "memory_mib": "peak memory of all processes together, MiB",
        "memory_server_mib": "memory that the server's models and tensors take, MiB",
        "memory_device_mib": "peak memory of torch on GPUs, over all processes, MiB",
        "flops_*": "",
        "seconds*": "",
        "memory_*": "",
        "wall_seconds": "seconds of the round loop, with those before a resume",
    },
    "training": {
        "train_loss": "mean loss of local training, proximal term included",
        "coaching_loss": "mean of the proximal term alone",
        "objective": "KAPC's objective F (AAAI, Eq. 7 and 8, without their m_i / m)",
        "objective_coaching": "second sum of F: the proximal terms",
        "objective_relation": "third sum of F: the relation's distance from its prior",
        "gradient_norm": "norm of the client's parameter change over learning rate times steps",
        "gradient_norm_relation": "norm of F's gradient by the cohort's rows (AAAI, Eq. 12)",
        "gradient_norm_models_proxy": "stands for the norm of F's gradient by the models",
        "adapter_error": "what averaging adapters' A and B apart errs about B A, relative "
        "(Frobenius), mean over layers",
        "loss": "mean task loss of a newcomer on its test part",
        "objective_*": "",
        "gradient_norm_*": "",
    },
    "clients": {
        "clients_failed": "clients of the cohort that were left out after a failure",
        "clients_*": "",
    },
    "relation": {
        "rand_index": "adjusted Rand index of true groups and those of the relation's rows",
        "groups_separation": "how far apart the cosines of clients' steps are that tell groups, d'",
        "groups_z_*": "gain of groups in a layer by held-out losses, in standard errors",
    },
    "run": {
        "round": "number of the round, from 1",
        "client": "number of the client, from 0",
        "name": "name of the client, where clients have names",
        "model": "kind of model that the client's final score is of",
        "method": "the method",
        "rounds": "rounds that were run",
        "clients": "clients that took part, without those that were held out",
        "world_size": "processes",
        "version": "of fl_lightning",
        "judge": "kind of model that the run's own judge scores",
        "least_test_class": "test samples of the rarest class of a client's test part, least "
        "over clients",
        "held_out_clients": "numbers of the held-out clients in the split of all",
        "made_up_data": "whether `--smoke` had to make up data",
        "wandb": "where the W&B run is",
    },
    "final": {
        "largest_class_share": "share of the largest class in the client's test part, of clients "
        "whose final model predicts one class alone",
        "final_model": "what clients are left with: personal, global, finetuned",
        "final_kinds": "of how many clients which kind of model was scored at the end",
        "best_round": "the round of the best mean",
        "best_checkpoint_round": "the round that `--checkpoint best` takes",
        "mean_best_clients": "clients that the mean of best rounds is over",
        "validation_round": "the round that is best on validation data",
        "best_*": "by kind of model",
        "last_*": "by kind of model",
        "final_*": "by kind of model",
    },
    "data": {
        "train_samples": "training samples of the client",
        "test_samples": "test samples of the client",
        "jensen_shannon": "mean Jensen-Shannon distance of the client's label mix from the "
        "others', 0..1",
        "hellinger": "the same by Hellinger's distance",
        "feature_shift": "mean distance of the client's inputs from the others', standard "
        "deviations",
        "feature_shift_within": "the same of inputs of one class",
        "class_*": "training samples of this class",
        "heterogeneity_*": "how unlike the clients' data are: mean over pairs, or a Gini "
        "coefficient",
    },
    "newcomers": {
        "samples_per_class": "labelled samples of each class that were asked for (regression: in"
        " all)",
        "samples": "labelled samples that there were",
        "rule": "how the method comes to a newcomer's model",
        "newcomer_*": "mean over held-out clients, by labelled samples of each class",
    },
    "failures": {
        "stage": "where the client failed",
        "reason": "why",
        "outcome": "what became of the client: retried, skipped or not judged",
    },
    "privacy": {
        "privacy_epsilon": "largest epsilon of any client so far",
        "privacy_*": "what the method's noise promises",
    },
    "other": {
        "noise_share_*": "share of a client's step in this layer that is noise of few "
        "samples, mean",
    },
}
"""Columns without a metric, and their meanings, by section."""
_LESS_IS_BETTER = (
    *("train_loss", "coaching_loss", "objective", "objective_coaching", "objective_relation"),
    *("gradient_norm", "gradient_norm_relation", "gradient_norm_models_proxy", "adapter_error"),
    *("loss", "privacy_epsilon", "objective_*", "gradient_norm_*"),
)
for _metric in (*BY_TASK.values(), *FURTHER.values()):
    COLUMNS.declare(*_score_columns(_metric), *_summary_columns(_metric))
for _section, _docs in _DECLARED.items():
    for _name, _doc in _docs.items():
        _viewed = "epsilon" if _name == "privacy_epsilon" else ""
        _better: Any = "min" if _name in _LESS_IS_BETTER else None
        COLUMNS.declare(
            Column(
                _name,
                _section,
                _doc,
                _better,
                viewed=_viewed,
            )
        )


def viewer_name(column: str) -> str:
    """Return viewers' name of a column of `metrics.csv`."""
    return COLUMNS[column].viewer_name


def summary_viewer_name(key: str) -> str:
    """Return viewers' name of a key of `summary.json`; an undeclared key is in the section
    `run`."""
    return COLUMNS[key].viewer_name if key in COLUMNS else f"run/{key}"


def by_viewer_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `metrics.csv` with its columns renamed to viewers' names."""
    return {viewer_name(name): value for name, value in values.items()}


def declarations(
    names: Iterable[str],
    judge: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the content of `columns.json` for these columns, without empty fields.

    `judge`: the run's judge, such as `after`, which replaces the placeholder `JUDGE`.
    """
    declared = {}
    for name in names:
        fields = dataclasses.asdict(COLUMNS[name]) | {"name": ""}
        if judge and fields["model"] == JUDGE:
            fields["model"] = judge
        declared[name] = {key: value for key, value in fields.items() if value}
    return declared


class CumulativeCosts:
    """Sums of a run's costs up to each round, which viewers use as axes. Rounds are added in
    order."""

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        self._sums: dict[str, float] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, float]) -> dict[str, float]:
        """Add a row of `metrics.csv`; return the sums so far, by their names in viewers: MiB sent
        in both directions, seconds that a channel callback computed for sending them (`channel_s`),
        and measured seconds."""
        mib = [row[name] / 2**20 for name in ("upload_bytes", "download_bytes") if name in row]
        new = {"communication/mib_so_far": sum(mib)} if mib else {}
        new |= {name: row[column] for name, column in _SECONDS.items() if column in row}
        for name, value in new.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        return dict(self._sums)


_SECONDS = {
    "communication/channel_s_so_far": "channel_s",
    "cost/seconds_so_far": "seconds",
}


def evenly_spaced(rounds: int, most: int) -> list[int]:
    """Return at most `most` of the rounds 1 to `rounds`, evenly spaced, including the first and the
    last."""
    if rounds <= most:
        return list(range(1, rounds + 1))
    if most < 2:
        return [rounds]
    return [1 + round(k * (rounds - 1) / (most - 1)) for k in range(most)]

"""Every column of a run's tables, declared: what it means, which way is better, and of which metric
and model it is.

A run folder keeps the declarations of its own columns in `columns.json`, so that a reader need not
know this version. Viewers (TensorBoard, W&B) call a column `section/name`, since they draw a
section together. Runs have different judges: what a run's own judge says is `own_judge_...`, and
runs are to be compared by `accuracy/after` and its like.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fl_lightning.foundation.metric import BY_TASK, FURTHER, MODELS, ONE_CLASS, Metric

JUDGE = "judge"
"""The model of a column that speaks of the run's judge, whichever kind that is."""
_METRICS = (*BY_TASK.values(), *FURTHER.values())


@dataclass(frozen=True)
class Column:
    """One column of a table, or one key of `summary.json`."""

    name: str
    """A name that ends with `*` declares all that begin so."""
    section: str = "other"
    """What viewers draw together."""
    doc: str = ""
    better: Literal["max", "min"] | None = None
    metric: str | None = None
    """Name of the metric whose score it is, where it is one."""
    model: str | None = None
    """Kind of model that is scored (`metric.MODELS`), or `JUDGE`."""
    viewed: str = ""
    """What viewers call it within its section, where that is not its name."""

    @property
    def shown(self) -> str:
        """What viewers call it: `accuracy/after`."""
        return f"{self.section}/{self.viewed or self.name}"

    @property
    def kept(self) -> str:
        """What a viewer's summary keeps of it, in W&B's words: the best value and the last, or the
        last alone."""
        return f"{self.better},last" if self.better else "last"

    def merit(self, value: float) -> float:
        """`value`, or its negative where less is better: greater is better."""
        return -value if self.better == "min" else value


class Registry:
    """Declared columns by name."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}

    def declare(self, *columns: Column) -> None:
        """Add columns, of one's own callbacks too.

        Raises:
            ValueError: a name is declared already.
        """
        for column in columns:
            if self._columns.setdefault(column.name, column) is not column:
                raise ValueError(f"{column.name} is declared already")

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def __getitem__(self, name: str) -> Column:
        """The declaration of a column. One that nobody has declared is in the section `other`, or
        of a score of one's own where its name ends with a kind of model."""
        if (column := self._find(name)) is not None:
            return column if column.name == name else replace(column, name=name)
        return Column(name, "scores" if name.rpartition("_")[2] in MODELS else "other")

    def _find(self, name: str) -> Column | None:
        """The column, or the family whose name is the longest beginning of it."""
        names = [name, *(f"{name[:k]}*" for k in range(len(name), 0, -1))]
        return next((self._columns[name] for name in names if name in self._columns), None)


COLUMNS = Registry()


def _of_score(metric: Metric) -> Iterable[Column]:
    """The columns of one metric, in all tables."""
    better: Literal["max", "min"] = "max" if metric.rises else "min"

    def of(name: str, doc: str, model: str | None = None, viewed: str = "") -> Column:
        return Column(
            name, metric.name, f"{metric.words}: {doc}", better, metric.name, model, viewed
        )

    yield of(metric.name, "of the client's final model, or of a newcomer's after it has trained")
    yield of(metric.by("received"), "of the model that a newcomer is given, before it trains")
    yield of(metric.of("mean"), "mean over clients, by the run's judge", JUDGE, "own_judge_mean")
    for kind, words in MODELS.items():
        yield of(metric.by(kind), words, kind, kind)
        yield of(
            metric.on_global_test(kind),
            f"{words}, on the test set of all",
            kind,
            f"global_test_{kind}",
        )
    if metric in FURTHER.values():
        doc = "clients that the mean is over: it is defined for those alone"
        viewed = "own_judge_clients"
        yield replace(of(metric.of("clients"), doc, JUDGE, viewed), better=None)
        return
    yield of(
        metric.of("weighted"),
        "mean weighted by test samples, by the run's judge",
        JUDGE,
        "own_judge_weighted",
    )
    yield of(
        metric.of("validation"),
        "mean on validation data, by the run's judge",
        JUDGE,
        "own_judge_validation",
    )
    yield of(metric.by("validation"), "of the client on validation data, by the run's judge", JUDGE)
    worst, std = metric.of("worst"), metric.of("std")
    column = of(
        worst,
        "mean of the worst tenth of the clients, by the run's judge",
        JUDGE,
        f"own_judge_{worst}",
    )
    yield replace(column, section="fairness")
    yield replace(
        of(std, "spread, by the run's judge", JUDGE, f"own_judge_{std}"),
        section="fairness",
        better="min",
    )


def _of_the_end(metric: Metric) -> Iterable[Column]:
    """The keys of `summary.json` of one metric."""
    mean, clients = metric.of("mean"), metric.of("clients")
    ways: dict[str, str] = {
        f"final_{mean}": "mean over all clients of their final models",
        f"final_{metric.of('worst')}": "the same of the worst tenth of the clients",
        f"final_{metric.of('std')}": "their spread",
        f"best_{mean}": "best mean of a round, chosen on test data",
        f"last_{mean}": "mean of the last judged round",
        f"validation_{mean}": "on test data, in the round that is best on validation data",
        metric.of("mean_best"): "mean over clients of each one's best round",
    }
    if metric in FURTHER.values():
        ways = {
            f"final_{mean}": ways[f"final_{mean}"],
            f"final_{clients}": "clients that the final mean is over",
        }
    better: Literal["max", "min"] = "max" if metric.rises else "min"
    for name, doc in ways.items():
        meaning = f"{metric.words}: {doc}, by the run's judge"
        sense = (
            None if name.endswith(clients) else better if metric.of("std") not in name else "min"
        )
        yield Column(name, "final", meaning, sense, metric.name, JUDGE, f"own_judge_{name}")


for _metric in _METRICS:
    COLUMNS.declare(*_of_score(_metric), *_of_the_end(_metric))

COLUMNS.declare(
    Column("upload_bytes", "communication", "bytes uploaded in the round"),
    Column(
        "upload_parameter_bytes", "communication", "bytes uploaded in the round: parameters alone"
    ),
    Column("download_bytes", "communication", "bytes downloaded in the round"),
    Column(
        "download_parameter_bytes",
        "communication",
        "bytes downloaded in the round: parameters alone",
    ),
    Column("layers_uploaded", "communication", "layers whose own parameters were uploaded"),
    Column("layers_downloaded", "communication", "layers whose own parameters were downloaded"),
    Column("channel_s", "communication", "modelled seconds of the round over the channel"),
    Column(
        "channel_download_s", "communication", "modelled seconds of the slowest client's download"
    ),
    Column(
        "channel_compute_s",
        "communication",
        "modelled seconds of the slowest client's local training",
    ),
    Column("channel_upload_s", "communication", "modelled seconds of the slowest client's upload"),
    Column(
        "flops_forward", "cost", "operations of the cohort's training: passes through the model"
    ),
    Column("flops_backward", "cost", "operations of the cohort's training: passes back"),
    Column("flops_extra", "cost", "operations of clients in hooks and for a method's own weights"),
    Column("flops_penalty", "cost", "operations of the proximal term: 5 for each number and step"),
    Column("flops_server", "cost", "operations of the server: Gram matrices, mixing, the relation"),
    Column("seconds", "cost", "seconds of the round, of the slowest process"),
    Column("seconds_client", "cost", "seconds of the round in which clients train"),
    Column("seconds_server", "cost", "seconds of the round in which server mixes"),
    Column("seconds_evaluation", "cost", "seconds of the round in which models are scored"),
    Column("memory_mib", "cost", "peak memory of all processes together, MiB"),
    Column("memory_server_mib", "cost", "memory that the server's models and tensors take, MiB"),
    Column("memory_device_mib", "cost", "peak memory of torch on GPUs, over all processes, MiB"),
    Column("train_loss", "training", "mean loss of local training, proximal term included", "min"),
    Column("coaching_loss", "training", "mean of the proximal term alone", "min"),
    Column(
        "objective",
        "training",
        "KAPC's objective F (AAAI, Eq. 7 and 8, without their m_i / m)",
        "min",
    ),
    Column("objective_coaching", "training", "second sum of F: the proximal terms", "min"),
    Column(
        "objective_relation",
        "training",
        "third sum of F: the relation's distance from its prior",
        "min",
    ),
    Column(
        "gradient_norm",
        "training",
        "norm of the client's parameter change over learning rate times steps",
        "min",
    ),
    Column(
        "gradient_norm_relation",
        "training",
        "norm of F's gradient by the cohort's rows (AAAI, Eq. 12)",
        "min",
    ),
    Column(
        "gradient_norm_models_proxy",
        "training",
        "stands for the norm of F's gradient by the models",
        "min",
    ),
    Column(
        "adapter_error",
        "training",
        "what averaging adapters' A and B apart errs about B A, relative (Frobenius), mean over "
        "layers",
        "min",
    ),
    Column("clients_failed", "clients", "clients of the cohort that were left out after a failure"),
    Column(
        "rand_index",
        "relation",
        "adjusted Rand index of true groups and those of the relation's rows",
    ),
    Column("round", "run", "number of the round, from 1"),
    Column("client", "run", "number of the client, from 0"),
    Column("name", "run", "name of the client, where clients have names"),
    Column("model", "run", "kind of model that the client's final score is of"),
    Column(
        ONE_CLASS,
        "final",
        "share of the largest class in the client's test part, of clients whose final model "
        "predicts one class alone",
    ),
    Column("loss", "training", "mean task loss of a newcomer on its test part", "min"),
    Column("train_samples", "data", "training samples of the client"),
    Column("test_samples", "data", "test samples of the client"),
    Column(
        "samples_per_class",
        "newcomers",
        "labelled samples of each class that were asked for (regression: in all)",
    ),
    Column("samples", "newcomers", "labelled samples that there were"),
    Column("rule", "newcomers", "how the method comes to a newcomer's model"),
    Column("stage", "failures", "where the client failed"),
    Column("reason", "failures", "why"),
    Column("outcome", "failures", "what became of the client: retried, skipped or not judged"),
    Column(
        "jensen_shannon",
        "data",
        "mean Jensen-Shannon distance of the client's label mix from the others', 0..1",
    ),
    Column("hellinger", "data", "the same by Hellinger's distance"),
    Column(
        "feature_shift",
        "data",
        "mean distance of the client's inputs from the others', standard deviations",
    ),
    Column("feature_shift_within", "data", "the same of inputs of one class"),
    Column(
        "privacy_epsilon",
        "privacy",
        "epsilon so far, of the client with the largest",
        "min",
        viewed="epsilon",
    ),
    Column(
        "noise_share_*",
        "other",
        "share of a client's step in this layer that is noise of few samples, mean",
    ),
    Column(
        "groups_separation",
        "relation",
        "how far apart the cosines of clients' steps are that tell groups, d'",
    ),
    Column(
        "groups_z_*", "relation", "gain of groups in a layer by held-out losses, in standard errors"
    ),
    Column("class_*", "data", "training samples of this class"),
    *(
        Column(f"{begin}*", section, doc, better="min" if section == "training" else None)
        for section, doc, begins in (
            ("communication", "", ("upload_", "download_", "layers_", "channel_")),
            ("cost", "", ("flops_", "seconds", "memory_")),
            ("training", "", ("objective_", "gradient_norm_")),
            ("privacy", "what the method's noise promises", ("privacy_",)),
            ("clients", "", ("clients_",)),
            (
                "data",
                "how unlike the clients' data are: mean over pairs, or a Gini coefficient",
                ("heterogeneity_",),
            ),
            (
                "newcomers",
                "mean over held-out clients, by labelled samples of each class",
                ("newcomer_",),
            ),
        )
        for begin in begins
    ),
    Column("method", "run", "the method"),
    Column("rounds", "run", "rounds that were run"),
    Column("clients", "run", "clients that took part, without those that were held out"),
    Column("world_size", "run", "processes"),
    Column("version", "run", "of fl_lightning"),
    Column("judge", "run", "kind of model that the run's own judge scores"),
    Column("final_model", "final", "what clients are left with: personal, global, finetuned"),
    Column("final_kinds", "final", "of how many clients which kind of model was scored at the end"),
    Column("best_round", "final", "the round of the best mean"),
    Column("best_checkpoint_round", "final", "the round that `--checkpoint best` takes"),
    Column("mean_best_clients", "final", "clients that the mean of best rounds is over"),
    Column("validation_round", "final", "the round that is best on validation data"),
    Column(
        "least_test_class",
        "run",
        "test samples of the rarest class of a client's test part, least over clients",
    ),
    Column("held_out_clients", "run", "numbers of the held-out clients in the split of all"),
    Column("wall_seconds", "cost", "seconds of the round loop, with those before a resume"),
    Column("made_up_data", "run", "whether `--smoke` had to make up data"),
    Column("wandb", "run", "where the W&B run is"),
    *(Column(f"{begin}*", "final", "by kind of model") for begin in ("best_", "last_", "final_")),
    *(
        Column(
            f"total_{begin}*", "communication", "sum over the rounds of this column of metrics.csv"
        )
        for begin in ("upload_", "download_", "channel_")
    ),
)


def shown(column: str) -> str:
    """What viewers call a column of `metrics.csv`."""
    return COLUMNS[column].shown


def in_summary(key: str) -> str:
    """What viewers call a key of `summary.json`; one that nobody has declared is in the section
    `run`."""
    return COLUMNS[key].shown if key in COLUMNS else f"run/{key}"


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `metrics.csv` by viewers' names."""
    return {shown(name): value for name, value in values.items()}


def declarations(names: Iterable[str], judge: str | None = None) -> dict[str, dict[str, Any]]:
    """The content of `columns.json` for these columns: the fields that are not empty. `judge`: its
    kind of model."""
    declared = {}
    for name in names:
        column = COLUMNS[name]
        column = replace(column, model=judge) if column.model == JUDGE and judge else column
        declared[name] = {
            key: value
            for key, value in dataclasses.asdict(column).items()
            if value and key != "name"
        }
    return declared


class CumulativeCosts:
    """What a run has cost until the end of each round: axes to draw accuracy over. Rounds are added
    in order."""

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        self._sums: dict[str, float] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, float]) -> dict[str, float]:
        """Add a row of `metrics.csv`; returns the sums by viewers' names: MiB both ways, modelled
        and real seconds."""
        mib = [row[name] / 2**20 for name in ("upload_bytes", "download_bytes") if name in row]
        new = {"communication/mib_so_far": sum(mib)} if mib else {}
        new |= {name: row[column] for name, column in _SECONDS.items() if column in row}
        for name, value in new.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        return dict(self._sums)


_SECONDS = {"communication/channel_s_so_far": "channel_s", "cost/seconds_so_far": "seconds"}


def spread(rounds: int, most: int) -> list[int]:
    """At most `most` of the rounds 1 to `rounds`, evenly apart, the first and the last among
    them."""
    if rounds <= most:
        return list(range(1, rounds + 1))
    return [1 + round(k * (rounds - 1) / (most - 1)) for k in range(most)] if most > 1 else [rounds]

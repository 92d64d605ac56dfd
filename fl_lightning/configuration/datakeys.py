"""Base classes of `DataConfig`, with keys that only some sources, partitions or splits use."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Annotated, Literal

from fl_lightning.configuration.ranges import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
)
from fl_lightning.foundation.errors import BadInput

Balance = Literal["weights", "sampler"]


@dataclass
class SourceKeys:
    """Keys that only some sources or partitions use: columns, samples by class, groups that drift,
    domains, tokens."""

    label_column: str = "label"
    """Sources table and hf: the column of labels (regression: of targets)."""
    group_column: str | None = None
    """Sources table and hf: the column of groups; in the natural partition each of its values is a
    client."""
    unit_column: str | None = None
    """Sources table and hf: the column that names the person, specimen or document (the unit) that
    a row describes, if several rows may describe the same: no unit is in two parts of a split, and
    none in two clients. null: every row is independent."""
    client_names: list[str] | None = None
    """Names of the clients in tables, reports and messages, client 0 first; null: the groups' names
    in the natural partition, else numbers."""
    columns: list[str] | None = None
    """Sources table and hf: feature columns, or one column of images (table: file names) or, with
    `tokens`, of texts; null: all but the label and group columns."""
    one_hot: list[str] | None = None
    """Source table: categorical columns, which are one-hot encoded (an empty cell or an unseen
    value: all zeros); null: none."""
    dates: list[str] | None = None
    """Source table: columns of dates, which become days since `day_zero`; null: none."""
    date_format: str | None = None
    """Source table: how dates are written, as `%d.%m.%Y` (the codes of Python's strptime); null:
    ISO 8601, as 2024-12-31 or 2024-12-31 14:30."""
    day_zero: str = "2000-01-01"
    """Source table: the day from which `dates` count. 2000-01-01: our choice; it moves all numbers
    of a column alike."""
    separator: Literal[",", ";", "tab", "|"] = ","
    """Source table: what parts the columns of a text file. `,`: CSV as RFC 4180 has it."""
    decimal: Literal[".", ","] = "."
    """Source table: the decimal mark in a text file. `.`: as in most programs' exports."""
    encoding: str = "utf-8"
    """Source table: how a text file is encoded, as latin-1, cp1252 or utf-16. utf-8: with or
    without a byte order mark, as today's programs write."""
    impute: Literal["mean", "median", "most_frequent"] | None = None
    """Source table: what fills empty cells of numeric columns; null: empty cells are refused."""
    scale: str | None = None
    """Feature vectors: `standard`, `robust`, `minmax`, `maxabs`, or the import path of a
    scikit-learn transformer, for numeric columns; null: standardise by mean and deviation of all
    clients' training data."""
    fitted: Literal["shared", "own"] = "shared"
    """What `impute` and `scale` are fitted on: the training parts of all clients together, or each
    client's own. shared: as for images; the statistics that clients reveal for it are not
    privacy-protected."""
    samples_per_class: PositiveInt | None = None
    """Maximum of training and validation samples per class and client; null: no limit."""
    concentration: PositiveFloat = 50.0
    """Mixture partition: each client draws its class mix from Dir(concentration * m), m being its
    group's mix; with larger values clients of a group are more alike. 50: our choice; with 10
    classes a client's mix is then nearer to its group's than to another's."""
    drift_every: PositiveInt | None = None
    """Planted groups: interval in rounds at which every second client of a group switches to the
    next group's task; null: tasks stay."""
    clients_per_domain: PositiveInt = 1
    """Sources with domains: clients per domain, which share its samples, each with the domain's
    class mix."""
    tokens: Literal["characters", "word_pieces"] | None = None
    """Text columns (sources table and hf): what a token is; null: no column is text. Sources of
    texts: null is characters."""
    length: PositiveInt = 80
    """Text: tokens in a sample; shorter ones are padded with token 0 on the left. 80: LEAF's
    Shakespeare."""
    vocabulary: PositiveInt = 1000
    """Word pieces: maximum size of the vocabulary, which is learned from the training texts. 1,000:
    our choice, for small texts."""

    def check_dates(self) -> None:
        """Raise `BadInput` unless `day_zero` is an ISO date."""
        try:
            date.fromisoformat(self.day_zero)
        except ValueError:
            raise BadInput(
                "data.day_zero", self.day_zero, "it must be a date such as 2000-12-31"
            ) from None


@dataclass
class SplitKeys:
    """Keys on which samples train and which test: folds, held-out clients, share of training data,
    partition seed, class balance, minimum of test samples."""

    folds: Annotated[int, Range(2)] | None = None
    """Cross-validation: training and test data are pooled, and each client's samples are split into
    this many folds, which keep its class mix. Seed s tests fold s modulo `folds` of the split drawn
    from s // `folds`: seeds 0 to `folds` - 1 test every sample once. null: one test part. With
    `global_test` only the training data are split."""
    held_out: list[int] | None = None
    """Held-out clients by number, from 0; null: `held_out_clients` draws them."""
    train_share: PositiveShare = 1.0
    """Share of each client's training samples to keep, with its class mix, at least one sample
    (with `validation` two, one to train on); test parts stay whole."""
    partition_seed: NonNegativeInt | None = None
    """Seed of the partition and of planted tasks; null: the run's `seed` (with `folds`: s //
    `folds`). A number: the same clients for all seeds."""
    balance: Balance | None = None
    """Have a client's classes count alike in local training: by weights of the loss (the inverse of
    its own class counts; torch's weighted mean), or by a sampler, which draws each epoch's samples
    with replacement. null: every sample counts alike, as in most papers."""
    least_test_positives: PositiveInt | None = None
    """Minimum of test samples of every class per client, so that AUROC and similar scores are
    defined for all clients. `client_test` moves samples of rare classes to meet it; a run with a
    client that has fewer is refused. null: no check."""

"""Keys of `data` that one source or one way of splitting alone reads: `DataConfig` has them, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fl_lightning.errors import check
from fl_lightning.ranges import NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare, Range


@dataclass
class SourceKeys:
    """Keys of single sources and partitions: columns, samples by class, groups that drift, domains, tokens."""

    label_column: str = "label"
    """Sources table and hf: the column of the classes, or of the targets."""
    group_column: str | None = None
    """Sources table and hf: the column of the natural partition's groups, a client for each of its values."""
    client_names: list[str] | None = None
    """Names of the clients in tables, reports and messages, client 0 first; null: those of the natural partition have
    their groups' names, others have numbers."""
    columns: list[str] | None = None
    """Sources table and hf: the columns of features, or one column of images (in a table: files) or, with `tokens`, of
    texts; null: all but those of label and group."""
    one_hot: list[str] | None = None
    """Source table: columns of categories; each value becomes a feature that is 0 or 1 (an empty cell or an unseen
    value: all of them 0); null: none."""
    impute: Literal["mean", "median", "most_frequent"] | None = None
    """Source table: what an empty cell of a column of numbers gets; null: an empty cell is refused."""
    scale: str | None = None
    """Samples that are vectors: `standard`, `robust`, `minmax`, `maxabs`, or the import path of a transformer of
    scikit-learn, which scales columns of numbers; null: the mean and deviation of all clients' training data."""
    fitted: Literal["shared", "own"] = "shared"
    """What `impute` and `scale` are fitted on: the training parts of all clients together, or each client's own.
    shared: as images are normalised; what clients reveal for it is not protected."""
    samples_per_class: PositiveInt | None = None
    """Training and validation samples of each class that each client keeps at most; null: all of them."""
    concentration: PositiveFloat = 50.0
    """Mixture partition: clients of a group draw their class mixes from Dir(concentration m), m the group's own: the
    larger, the more alike. 50: ours, with 10 classes a client's mix is then nearer to its group's than to another's."""
    drift_every: PositiveInt | None = None
    """Planted groups: after each so many rounds, every second client of a group switches to the next group's task;
    null: tasks stay."""
    clients_per_domain: PositiveInt = 1
    """Sources of domains: clients that share the samples of each domain, with its class mix."""
    tokens: Literal["characters", "word_pieces"] | None = None
    """Text columns (sources table and hf): what a token is; null: characters in texts, and no text elsewhere."""
    length: PositiveInt = 80
    """Text: tokens in a sample; shorter ones are padded with token 0 on the left. 80: LEAF's Shakespeare."""
    vocabulary: PositiveInt = 1000
    """Word pieces: how many are learned from the training texts at most. 1,000: ours, for small texts."""


@dataclass
class SplitKeys:
    """Each client's own test part, in folds, and what every one must hold."""

    folds: Annotated[int, Range(2)] | None = None
    """Training and test data are pooled, and each client's samples are cut into so many folds with its class mix. The
    run of seed s is tested on fold s modulo `folds` of a cut drawn from s // `folds`: consecutive seeds test every
    sample once. null: one test part. With `global_test` the training data alone are cut."""
    held_out: list[int] | None = None
    """Clients that are held out, by number from 0, in place of a share that is drawn; null: `held_out_clients` are."""
    train_share: PositiveShare = 1.0
    """Share of each client's training samples that is kept, with its class mix, at least one; test parts stay whole."""
    partition_seed: NonNegativeInt | None = None
    """Seed that draws which client has which samples, and its planted task; null: the run's own `seed` (with `folds`
    the number of its cycle). A number: all seeds have the same clients."""
    least_test_positives: PositiveInt | None = None
    """Samples of every class that each client's test part holds, at least: AUROC and its like are then defined for all.
    `client_test` gives a rare class so many; a run with a client that has too few is refused. null: no check."""

    def check_splits(self, client_test: float | None, test_fraction: float | None, global_test: bool) -> None:
        """Raise `BadInput` for `folds` beside other ways to make a test part."""
        if self.folds is None:
            return
        allowed = f"data.client_test is {client_test}: one of them must be null"
        check("data.folds", self.folds, client_test is None, allowed)
        allowed = "beside data.test_fraction there is no test part to cut, but with data.global_test"
        check("data.folds", self.folds, test_fraction is None or global_test, allowed)

    def check_held_out(self, share: float, clients: int) -> None:
        """Raise `BadInput` unless `held_out` names some of the clients, and no `share` of them is drawn."""
        named = self.held_out
        if named is None:
            return
        some = 0 < len(named) == len(set(named)) < clients
        fine = some and not share and set(named) <= set(range(clients))
        allowed = f"numbers from 0 of some of {clients} clients, each once, with data.held_out_clients 0; or null"
        check("data.held_out", named, fine, allowed)

"""Keys of `data` that one source or one generator alone reads: `DataConfig` has them, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_lightning.ranges import PositiveFloat, PositiveInt


@dataclass
class SourceKeys:
    """Columns, what a client keeps of each class, groups that are drawn or drift, clients of a domain, tokens."""

    label_column: str = "label"
    """Sources table and hf: the column of the classes, or of the targets."""
    group_column: str | None = None
    """Sources table and hf: the column of the natural partition's groups, a client for each of its values."""
    columns: list[str] | None = None
    """Sources table and hf: the columns of features, or one column of images (in a table: files) or, with `tokens`, of
    texts; null: all but those of label and group."""
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
    """Text: tokens in a sample; shorter ones are filled up with token 0 on the left. 80: LEAF's Shakespeare."""
    vocabulary: PositiveInt = 1000
    """Word pieces: how many are learned from the training texts at most. 1,000: ours, for small texts."""

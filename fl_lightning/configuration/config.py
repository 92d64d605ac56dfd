"""The configuration of a run as dataclasses. Nothing here imports torch, so `fl-train --help` is
quick.

Beside every default stands where it comes from. KAPC is Zhi et al., AAAI 2024, and its journal
extension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fl_lightning.configuration.components import Component as Component
from fl_lightning.configuration.components import ModelConfig as ModelConfig
from fl_lightning.configuration.datakeys import SourceKeys, SplitKeys
from fl_lightning.configuration.optimizerkeys import OptimizerConfig as OptimizerConfig
from fl_lightning.configuration.ranges import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    ShareBelow1,
    check_ranges,
)
from fl_lightning.foundation.errors import check as check
from fl_lightning.foundation.metric import (
    CLASS_SHARE,
    FurtherName,
    JudgeKind,
    JudgeMetric,
    ModelKind,
)

FLOAT32 = 1.7e38
"""Half of the largest float32 number: the gradient of a proximal term has twice its coefficient."""


def are_numbers(clients: object) -> bool:
    """Return whether a key's value is a list of whole numbers, or None, which stands for all
    clients or for the default."""
    return clients is None or (isinstance(clients, list) and all(type(c) is int for c in clients))


def check_finite(key: str, value: Any) -> None:
    """Raise `BadInput` if `value`, or a number in this list or mapping, is NaN, infinite or too
    large for a model's float32 numbers."""
    numbers = [value]
    if isinstance(value, dict):
        numbers = list(value.values())
    elif isinstance(value, list | tuple):
        numbers = list(value)
    is_finite = all(not isinstance(number, float) or abs(number) < FLOAT32 for number in numbers)
    check(key, value, is_finite, f"it must be a finite number below {FLOAT32:g}")


def held_out(share: float, clients: int, smoke: bool = False) -> int:
    """Return how many of `clients` clients are held out if `share` of them are; in a smoke run at
    least 1 unless `share` is 0."""
    count = round(share * clients)
    return min(max(count, 1), clients - 1) if smoke and share else count


@dataclass
class FederationConfig:
    """Clients, rounds and local training."""

    rounds: PositiveInt = 50
    """Communication rounds. 50: KAPC on MNIST."""
    clients: PositiveInt = 10
    """Clients in the federation, N. 10: KAPC's setting without client selection."""
    participation: PositiveShare = 1.0
    """Share of the clients per round; the cohort has `max(1, round(participation * N))` clients."""
    local_epochs: int | float | None = None
    """Local epochs per round, E; may be a fraction (0.5: half of the batches of an epoch, at least
    one). null: 5, as KAPC, unless `local_steps` is set."""
    local_steps: NonNegativeInt | None = None
    """Local steps per round, in place of `local_epochs`; they may span several epochs. null:
    `local_epochs` applies, as in most papers."""
    batch_size: PositiveInt = 16
    """Samples per local step. 16: our choice for clients with some 150 samples; with 64 there are
    too few steps to learn much."""
    on_bad_client: Literal["stop", "skip", "retry"] = "stop"
    """When a client fails: stop the run, skip the client in this round, or retry it once and then
    skip it. stop: our choice, so that failures are noticed."""

    def __post_init__(self) -> None:
        """Set 5 local epochs if no length of local training is given."""
        if self.local_epochs is None and self.local_steps is None:
            self.local_epochs = 5

    def validate(self) -> None:
        """Raise `BadInput` for a value beyond its bounds, or that another key excludes."""
        check_ranges(self, "federation")
        epochs = self.local_epochs
        steps = self.local_steps
        not_negative = epochs is None or epochs >= 0
        check("federation.local_epochs", epochs, not_negative, "it must be 0 or more")
        requirement = f"federation.local_epochs is {epochs}: one of them must be null"
        check("federation.local_steps", steps, epochs is None or steps is None, requirement)


@dataclass
class DataConfig(SplitKeys, SourceKeys):
    """Data, and how they are divided among the clients."""

    task: Literal["classification", "regression"] = "classification"
    """Regression: labels are numbers, the local loss is the squared error, and runs report `mae` in
    place of accuracy."""
    source: str = "digits"
    """Data source: `digits` (ships with the package), another name (`fl-train list sources`:
    torchvision's, your own files), or the import path of a LightningDataModule."""
    root: str | None = None
    """Folder of the data, or a file, which means a source: `.npz` (arrays), `.csv`, `.tsv` or
    `.xlsx` (table), or `.parquet` (hf, unless `source` is table)."""
    download: bool = False
    """Let torchvision download missing data."""
    partition: str = "dirichlet"
    """Partition by name (`fl-train list partitions`: dirichlet, hsu, mixture, pathological,
    lognormal, rotated, natural, iid), or a function's import path."""
    alpha: PositiveFloat = 0.1
    """Dirichlet concentration: the smaller, the more the clients differ. 0.1: the harder of KAPC's
    settings, 0.1 and 0.3."""
    by: Literal["class", "client"] | None = None
    """Dirichlet: draw each class's shares over the clients (class), or each client's shares over
    the classes (client); null: class. The partition hsu always draws by client."""
    sizes: Literal["free", "equal"] | None = None
    """Dirichlet: client sizes as they are drawn (free), or the same for all clients (equal); null:
    free. The partition hsu always has equal sizes."""
    classes_per_client: PositiveInt = 2
    """Pathological and lognormal partitions: classes each client holds. 2: McMahan et al., 2017;
    KT-pFL's Non-IID_2."""
    samples_per_client: Annotated[int, Range(2)] | None = None
    """Maximum of a client's training and validation samples together; its class mix is kept. null:
    no limit."""
    rest_to: int | None = None
    """Rotated and iid partitions: the client that gets the samples which `samples_per_client` takes
    from the others; null: none."""
    client_test: Annotated[float, Range(0, 1, above=True, below=True)] | None = None
    """Share of each client's samples that is its test part, after training and test data are
    pooled; null: the data set's own test part is divided among the clients. With `global_test` only
    the training data are divided and split."""
    global_test: bool = False
    """Also score on the data set's whole test part, the same for all clients (FedHKD's global
    accuracy): the global model (without one, the model of `judge`) and those in
    `evaluation.models`."""
    planted: Literal["none", "labels", "permuted", "rotation"] = "none"
    """Give groups of clients different tasks, on any partition (client i is in group i modulo
    `groups`): group g has its labels shifted by g classes (labels) or permuted at random
    (permuted), or its images rotated by 360 g / `groups` degrees (rotation), in test data, too."""
    groups: Annotated[int, Range(2)] = 4
    """Number of groups that are planted, or of the partition `mixture`. 4: IFCA's rotated MNIST
    (Ghosh et al., NeurIPS 2020)."""
    fraction: PositiveShare = 1.0
    """Share of the training and of the test data that is used."""
    test_fraction: PositiveShare | None = None
    """Share of the test data that is used; null: as `fraction`."""
    test_seed: NonNegativeInt | None = None
    """Seed of the test part, for data that come without one; null: the run's `seed`, so that each
    seed has another test part. A number: one test part for all seeds."""
    validation: ShareBelow1 = 0.0
    """Share of each client's training data held back for validation."""
    score_on: Literal["test", "validation"] = "test"
    """Data that models are scored on; validation: test data are not read, as in the trials of
    `fl-train tune`."""
    min_samples: PositiveInt = 10
    """Minimum of training samples per client; each also needs a test sample."""
    held_out_clients: ShareBelow1 = 0.0
    """Share of the clients, drawn from the seed, that are held out of training, aggregation and
    evaluation. After the last round each gets the method's model for unseen clients
    (`newcomers.csv`). 0: none."""
    public: str | None = None
    """Public samples without labels, for methods that distil: `held_back` (training data that no
    client gets), a data source, or an `.npz` file with `x_public` or `x_train`."""
    public_root: str | None = None
    """Folder of the public data source; null: `root`, or its folder if it is a file."""
    public_samples: PositiveInt | None = None
    """Maximum of public samples, drawn from the seed; null: all, but for `held_back` a tenth of the
    training data."""
    augment: Literal["none", "flip", "crop_flip"] = "none"
    """Batched augmentation of training images. none: KAPC mentions no augmentation."""
    resident: Literal["auto", "always", "never"] = "auto"
    """Keep the data on the training device as tensors (auto: if they fit); otherwise a DataLoader
    is used, with the same results."""

    @property
    def own_test(self) -> float:
        """Share of each client's samples that becomes its test part; 0: the test part of the data
        set is divided among the clients."""
        return 1 / self.folds if self.folds is not None else self.client_test or 0.0

    @property
    def pooled(self) -> bool:
        """Whether the test part of the data set is pooled with its training data before both are
        divided among the clients."""
        return self.own_test > 0 and not self.global_test

    @property
    def reads_test(self) -> bool:
        """Whether the test part of the data set is read at all."""
        return self.score_on == "test" or self.pooled

    @property
    def split_seed(self) -> int:
        """Seed for splitting a test part off data that have none. It is `test_seed`, which
        `data.prepare` sets to the run's seed if it is null; 0 before that."""
        return self.test_seed or 0

    def validate(self) -> None:
        """Raise `BadInput` for a value beyond its bounds, or that another key excludes."""
        check_ranges(self, "data")
        self.check_dates()
        is_hsu = self.partition == "hsu"
        cuts_test = self.test_fraction is not None and not self.global_test
        rest = self.rest_to
        moves_labels = self.planted in ("labels", "permuted")
        turns_twice = self.planted == "rotation" and self.partition == "rotated"
        rules = [
            (
                "folds",
                self.folds is None or self.client_test is None,
                f"data.client_test is {self.client_test}: one of them must be null",
            ),
            (
                "folds",
                self.folds is None or not cuts_test,
                "data.test_fraction leaves no test part to split into folds: leave one of them "
                "out, or set data.global_test",
            ),
            (
                "by",
                not is_hsu or self.by in ("client", None),
                "data.partition hsu means client; partition dirichlet takes others",
            ),
            (
                "sizes",
                not is_hsu or self.sizes in ("equal", None),
                "data.partition hsu means equal; partition dirichlet takes others",
            ),
            (
                "score_on",
                self.score_on == "test" or self.validation > 0,
                "it needs data.validation above 0",
            ),
            (
                "rest_to",
                rest is None or (self.samples_per_client is not None and rest >= 0),
                "it must be a client's number from 0, with data.samples_per_client, or null",
            ),
            (
                "rest_to",
                rest is None or self.partition in ("rotated", "iid"),
                "it belongs to the partitions rotated and iid, whose clients are alike",
            ),
            (
                "planted",
                not moves_labels or self.task == "classification",
                "a regression has no classes whose labels could be moved: use none or rotation",
            ),
            (
                "drift_every",
                self.drift_every is None or self.planted != "none",
                "clients can change tasks only if there are several: set data.planted",
            ),
            (
                "planted",
                not (moves_labels and self.global_test),
                "with data.global_test all clients share one test set: use none or rotation",
            ),
            (
                "planted",
                not turns_twice,
                "the rotated partition turns images already: use iid",
            ),
            (
                "client_test",
                self.client_test is None or not cuts_test,
                "data.test_fraction leaves no test part to take a share of: leave one of them out, "
                "or set data.global_test",
            ),
            (
                "public_root",
                self.public_root is None or self.public is not None,
                "it needs data.public",
            ),
            (
                "public_samples",
                self.public_samples is None or self.public is not None,
                "it needs data.public",
            ),
        ]
        for key, holds, requirement in rules:
            check(f"data.{key}", getattr(self, key), holds, requirement)


@dataclass
class EvaluationConfig:
    """Evaluation: when, of which models, by which scores."""

    every: PositiveInt = 1
    """Rounds between evaluations of the cohort; the last round is always evaluated. 1: KAPC on
    MNIST."""
    judge: JudgeKind = "auto"
    """Model whose accuracy is `mean_accuracy`: the client's before or after local training, the
    global one, or its fine-tuned copy; auto: the method's choice. The other models have columns of
    their own."""
    models: list[ModelKind] | None = None
    """Models to evaluate; null: all that exist, except finetuned. The model of `judge` is always
    evaluated. distilled: after learning from the teacher, before local training."""
    metric: JudgeMetric | None = None
    """Score that chooses: the best round, tuned arguments, what `compare`, `worth` and reports show
    first. null: accuracy, but auroc where one of two classes has less than 20 % of the training
    samples, which accuracy hides; of a regression mae."""
    metrics: list[FurtherName] | None = None
    """Scores besides accuracy; null: none, since each costs time (docs/reference.md).
    `class_share_accuracy` needs `data.global_test`."""
    predictions: bool = False
    """Write `final_predictions.parquet` (extra tables): of every test sample the client, the row,
    the label, and the probabilities that the client's final model gives. false: it holds a line
    for each sample."""
    finetune_epochs: NonNegativeInt = 0
    """Epochs of fine-tuning for the `finetuned` copy; 0: as long as a round's local training."""
    batch_size: PositiveInt = 500
    """Samples per forward pass of evaluation; it limits memory, and changes scores by rounding at
    most."""
    newcomer_samples: list[int] | None = None
    """Numbers of labelled samples per class (regression: in total). For each number, every held-out
    client gets a model trained on at most that many; null: 0, 1, 5 and 20."""
    newcomer_rounds: PositiveInt = 2
    """Rounds that a held-out client takes part in, alone, after the last round. 2: our choice; it
    uploads in the first, and in the second it receives what the server mixes for it."""

    def validate(self) -> None:
        """Raise `BadInput` for a value beyond its bounds, or that another key excludes."""
        check_ranges(self, "evaluation")
        counts = self.newcomer_samples
        distinct = counts is None or 0 < len(counts) == len(set(counts))
        requirement = "it must list numbers of 0 or more, each once, or be null"
        check(
            "evaluation.newcomer_samples", counts, distinct and min(counts or [0]) >= 0, requirement
        )


@dataclass
class FabricConfig:
    """Hardware and processes (settings of Lightning Fabric)."""

    accelerator: str = "auto"
    """cpu, cuda (also ROCm), xpu, mps, or another name that Lightning or torch has; gpu: whichever
    is present; auto: a GPU if present, else the CPU."""
    devices: int | Literal["auto"] = "auto"
    """Processes on each node; auto: every GPU, or one process on CPU."""
    num_nodes: PositiveInt = 1
    """Machines; more than one needs SLURM or torchrun."""
    precision: Literal["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true"] = "32-true"
    """Precision, named as in Lightning; the server always mixes in 32 bits or more."""
    threads: PositiveInt | None = None
    """CPU threads per process; null: the cores divided by the processes. Bit-identical runs need
    the same number."""
    executor: Literal["auto", "loop", "vmap"] = "loop"
    """How a process trains its clients: one by one (loop), many at once (vmap), or the faster of
    these, measured at the start (auto). loop: executors round differently, and what auto chooses
    depends on the machine."""
    deterministic: bool = False
    """Use only deterministic kernels of torch, and refuse operations that have none. false: on a
    CPU all kernels are deterministic, for a given number of threads; on a GPU some deterministic
    ones are slower (sums by index, cuDNN's backward) and a few are missing."""
    bank: Literal["memory", "host", "disk"] = "memory"
    """Where clients' models are stored between rounds: in the device's memory, in main memory of a
    machine with a GPU (host), or in files (disk). memory: the fastest."""
    timeout: Annotated[float, Range(1)] = 120.0
    """Seconds without a heartbeat until a process counts as lost and the others stop. 120:
    heartbeats come every second."""

    def validate(self) -> None:
        """Raise `BadInput` for a value beyond its bounds, or that another key excludes."""
        check_ranges(self, "fabric")
        enough = self.devices == "auto" or int(self.devices) >= 1
        check("fabric.devices", self.devices, enough, "it must be at least 1, or auto")


@dataclass
class Start:
    """Keys that say how a run is started: its seed, name, folder, and whether it resumes."""

    seed: int = 0
    """Seed of all random draws that have no seed of their own."""
    smoke: bool = False
    """Smoke test: one round, few clients, two batches; synthetic data if data are missing."""
    out: str = "runs"
    """Folder in which the run folders are made."""
    name: str | None = None
    """Name of the run folder (default: from config, or method, data, seed; and a counter)."""
    resume: bool = False
    """Continue run --name; if it does not exist and --config is given, start it."""
    accept_changed_code: bool = False
    """Continue although your own code has changed; the run keeps both versions."""


@dataclass
class Config:
    """A run's resolved configuration: every name is replaced by a class path, every default is
    filled in."""

    method: Component
    models: list[ModelConfig]
    seed: int = 0
    federation: FederationConfig = field(default_factory=FederationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    fabric: FabricConfig = field(default_factory=FabricConfig)
    callbacks: dict[str, Component] = field(default_factory=dict)
    loggers: dict[str, Component] = field(default_factory=dict)
    smoke: bool = False

    @property
    def held_out(self) -> int:
        """Number of held-out clients."""
        if self.data.held_out is not None:
            return len(self.data.held_out)
        return held_out(self.data.held_out_clients, self.federation.clients, self.smoke)

    @property
    def clients(self) -> int:
        """Number of clients that take part in rounds: all that are not held out."""
        return self.federation.clients - self.held_out

    def validate(self) -> None:
        """Raise `BadInput` for the first value, in any group, beyond its bounds or that another key
        excludes."""
        check("seed", self.seed, 0 <= self.seed < 2**63, "it must lie in [0, 2**63)")
        for name in GROUPS:
            group = getattr(self, name)
            for key, value in vars(group).items():
                check_finite(f"{name}.{key}", value)
            group.validate()
        data = self.data
        clients = self.federation.clients
        metrics = self.evaluation.metrics or []
        by_class = data.task == "classification"
        balance = data.balance
        metric = self.evaluation.metric
        count = self.held_out
        no_classes = "a regression (data.task) has no classes: it must be null"
        check("data.balance", balance, balance is None or by_class, no_classes)
        requirement = "it must be null with optimizer.privacy, which needs every sample drawn alike"
        fits = balance is None or not self.optimizer.privacy.on
        check("data.balance", balance, fits, requirement)
        requirement = "a regression (data.task) is judged by mae: it must be null"
        check("evaluation.metric", metric, metric is None or by_class, requirement)
        check("evaluation.metrics", metrics, not metrics or by_class, no_classes)
        requirement = f"{CLASS_SHARE.name} needs data.global_test true"
        fits = CLASS_SHARE.name not in metrics or data.global_test
        check("evaluation.metrics", metrics, fits, requirement)
        share = data.held_out_clients
        numbers = data.held_out
        if numbers is not None:
            some = 0 < len(numbers) == len(set(numbers)) < clients
            exist = set(numbers) <= set(range(clients))
            requirement = (
                f"it must list some of the {clients} clients by number from 0, each once, with "
                f"data.held_out_clients 0; or be null"
            )
            check("data.held_out", numbers, some and exist and not share, requirement)
        requirement = f"of {clients} clients that is {count}: hold out at least one, but not all"
        check("data.held_out_clients", share, not share or 0 < count < clients, requirement)
        counts = [model.count for model in self.models]
        if counts != [None] * len(counts):
            total = sum(count or 0 for count in counts)
            requirement = f"the counts must add up to federation.clients = {clients}"
            check("model", counts, total == clients, requirement)

    def by_key(self) -> dict[str, Any]:
        """Return the configuration as a dict nested like the command line's keys, with short names
        of classes: `method.name`, `method.lam`."""
        models = [_short(m.component) | m.options() for m in self.models]
        components = {
            kind: {k: _short(c) for k, c in getattr(self, kind).items()}
            for kind in ("callbacks", "loggers")
        }
        model = models[0] if len(models) == 1 else models
        first = {
            "seed": self.seed,
            "smoke": self.smoke,
            "method": _short(self.method),
            "model": model,
        }
        return first | self.groups() | components

    def groups(self) -> dict[str, dict[str, Any]]:
        """Return the groups of keys (`GROUPS`) as dicts, without `optimizer.privacy` if it is off,
        so that they equal those of configs from before that key existed."""
        groups = {name: dataclasses.asdict(getattr(self, name)) for name in GROUPS}
        if not self.optimizer.privacy.on:
            del groups["optimizer"]["privacy"]
        return groups


GROUPS: dict[str, type] = {
    "federation": FederationConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "evaluation": EvaluationConfig,
    "fabric": FabricConfig,
}
"""The groups of a configuration's plain keys: `federation` has `federation.rounds`, ..."""


def flat(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested mappings; an empty mapping is yielded as a value.
    `key`: prefix of the keys."""
    if not isinstance(values, dict) or not values:
        yield key, values
        return
    for name, value in values.items():
        yield from flat(value, f"{key}.{name}" if key else str(name))


def _short(component: Component) -> dict[str, Any]:
    return {
        **component.init_args,
        "name": component.class_path.rpartition(".")[2].lower(),
    }

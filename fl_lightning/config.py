"""What a run is asked to do, as plain data. Nothing here imports torch: `fl-train --help` answers at once.

Every default says where it comes from. KAPC stands for Zhi et al., AAAI 2024 and its journal extension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fl_lightning.components import Component as Component
from fl_lightning.components import ModelConfig as ModelConfig
from fl_lightning.datakeys import SourceKeys, SplitKeys
from fl_lightning.errors import check as check
from fl_lightning.metric import CLASS_SHARE
from fl_lightning.optimizerkeys import OptimizerConfig as OptimizerConfig
from fl_lightning.ranges import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    ShareBelow1,
    check_ranges,
)

FLOAT32 = 1.7e38
"""Half of what a number of 32 bits can hold, about: a proximal term's slope is twice its coefficient."""


def are_numbers(clients: object) -> bool:
    """Whether `clients` is a list of whole numbers, or None."""
    return clients is None or (isinstance(clients, list) and all(type(c) is int for c in clients))


def check_finite(key: str, value: Any) -> None:
    """Raise `BadInput` for a number that is NaN, infinite, or too large for the 32 bits that models have."""
    fine = not isinstance(value, float) or abs(value) < FLOAT32
    check(key, value, fine, f"it must be a finite number of 32 bits, below {FLOAT32:g}")


def held_out(share: float, clients: int, smoke: bool = False) -> int:
    """How many of `clients` are held out; in a smoke run, which has few, one at least where any are asked for."""
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
    """Share of the clients in each round's cohort, of size `max(1, round(participation * N))`."""
    local_epochs: int | float | None = None
    """Local epochs in a round, E, or a part of one (0.5: half of the batches, at least one). null: 5, as KAPC, unless
    `local_steps` is set."""
    local_steps: NonNegativeInt | None = None
    """Local steps in a round, over as many epochs as they take, in place of `local_epochs`; null: count epochs, as most
    papers do."""
    batch_size: PositiveInt = 16
    """Samples in a local step. 16: ours, for clients of some 150 samples; with 64 a first model hardly learns."""
    on_bad_client: Literal["stop", "skip", "retry"] = "stop"
    """When a client fails: stop the run, skip the client in this round, or retry it once and then skip it. stop: ours,
    so that a failure is seen."""

    def __post_init__(self) -> None:
        """Fill in the length of local training, where none is set."""
        if self.local_epochs is None and self.local_steps is None:
            self.local_epochs = 5

    def validate(self) -> None:
        """Raise `BadInput` for a value that cannot work."""
        check_ranges(self, "federation")
        epochs, steps = self.local_epochs, self.local_steps
        check("federation.local_epochs", epochs, epochs is None or epochs >= 0, "it must be 0 or more")
        fine = epochs is None or steps is None
        check("federation.local_steps", steps, fine, f"federation.local_epochs is {epochs}: one of them must be null")


@dataclass
class DataConfig(SplitKeys, SourceKeys):
    """Data, and how they are divided among the clients."""

    task: Literal["classification", "regression"] = "classification"
    """Regression: labels are numbers, the local loss is the squared error, and runs are judged by `mae`."""
    source: str = "digits"
    """`digits` (ships with the package), another by name (`fl-train list sources`: torchvision's, your own files), or
    the import path of a LightningDataModule."""
    root: str | None = None
    """Folder of the data, or the `.npz` file for `arrays`, or the `.csv` file for `table`; such a file overrides any
    source."""
    download: bool = False
    """Let torchvision download missing data."""
    partition: str = "dirichlet"
    """dirichlet, hsu, mixture, pathological, lognormal, rotated, natural, iid, or a function's import path."""
    alpha: PositiveFloat = 0.1
    """Dirichlet concentration: the smaller, the more the clients differ. 0.1: KAPC's harder setting."""
    by: Literal["class", "client"] | None = None
    """Dirichlet: shares of each class over clients, or of each client over classes; null: class. hsu is by client."""
    sizes: Literal["free", "equal"] | None = None
    """Dirichlet: sizes as they are drawn (free), or as many samples for each client (equal); null: free. hsu: equal."""
    classes_per_client: PositiveInt = 2
    """Pathological and lognormal partitions: classes each client holds. 2: McMahan et al., 2017; KT-pFL's Non-IID_2."""
    samples_per_client: Annotated[int, Range(2)] | None = None
    """Training and validation samples each client keeps at most, with its class mix; null: all of them."""
    rest_to: int | None = None
    """Rotated and iid partitions: the client that gets what the others leave for `samples_per_client`; null: nobody."""
    client_test: Annotated[float, Range(0, 1, above=True, below=True)] | None = None
    """Training and test data are pooled, and this share of each client's samples is its test part; null: the set's own
    test part is divided among the clients. With `global_test` only the training data are divided and cut."""
    global_test: bool = False
    """Also score on the data set's whole test part, one for all clients (FedHKD's global accuracy): the global model
    (without one, the judge's) and the others in `evaluation.models`."""
    planted: Literal["none", "labels", "permuted", "rotation"] = "none"
    """Groups with different tasks, over any partition (client i in group i modulo `groups`): in group g labels are
    shifted by g classes, or permuted (drawn from the seed), or images turned by 360 g / `groups` degrees; test data,
    too."""
    groups: Annotated[int, Range(2)] = 4
    """Number of planted or mixed groups. 4: IFCA's rotated MNIST (Ghosh et al., NeurIPS 2020)."""
    fraction: PositiveShare = 1.0
    """Share of the training and of the test data that is used."""
    test_fraction: PositiveShare | None = None
    """Share of the test data that is used; null: as `fraction`."""
    test_seed: NonNegativeInt | None = None
    """Seed that draws a test part from data that come without one, before they are divided; null: the run's own `seed`,
    so that a mean over seeds is also a mean over test parts. A number: the same test part for every seed."""
    validation: ShareBelow1 = 0.0
    """Share of each client's training data held back for validation."""
    score_on: Literal["test", "validation"] = "test"
    """Part of each client's data that models are scored on; validation: test data are not read (`fl-train tune`)."""
    min_samples: PositiveInt = 10
    """Training samples that each client has at least; it also has a test sample."""
    held_out_clients: ShareBelow1 = 0.0
    """Share of the clients, drawn from the seed, that are held out of training, aggregation and evaluation. After the
    last round each gets the model that the method gives an unseen client (`newcomers.csv`). 0: nobody."""
    public: str | None = None
    """Public samples without labels, for methods that distil: `held_back` (training data that no client gets), a data
    source, or an `.npz` file with `x_public` or `x_train`."""
    public_root: str | None = None
    """Folder of the public data source; null: `root`, or the folder that it lies in."""
    public_samples: PositiveInt | None = None
    """Public samples at most, drawn from the seed; null: all, or a tenth of the training data for `held_back`."""
    augment: Literal["none", "flip", "crop_flip"] = "none"
    """Batched augmentation of training images. none: KAPC states none."""
    resident: Literal["auto", "always", "never"] = "auto"
    """Keep the data on the training device as tensors (auto: if they fit); a DataLoader gives the same numbers."""

    @property
    def own_test(self) -> float:
        """Share of a client's samples that is its own test part (`client_test`, `folds`); 0: the set's is divided."""
        return 1 / self.folds if self.folds is not None else self.client_test or 0.0

    @property
    def pooled(self) -> bool:
        """Whether the set's own test part is divided among the clients with its training data."""
        return self.own_test > 0 and not self.global_test

    @property
    def reads_test(self) -> bool:
        """Whether the set's own test part is read at all."""
        return self.score_on == "test" or self.pooled

    @property
    def split_seed(self) -> int:
        """What draws the test part of data that come without one (`prepare` has put the run's seed in its place)."""
        return self.test_seed or 0

    def validate(self) -> None:
        """Raise `BadInput` for a value that cannot work."""
        check_ranges(self, "data")
        self.check_splits(self.client_test, self.test_fraction, self.global_test)
        for key, fixed in (("by", "client"), ("sizes", "equal")):
            value = getattr(self, key)
            fine = self.partition != "hsu" or value in (fixed, None)
            check(f"data.{key}", value, fine, f"data.partition hsu means {fixed}; partition dirichlet takes others")
        fine = self.score_on == "test" or self.validation > 0
        check("data.score_on", self.score_on, fine, "it needs data.validation above 0")
        size, rest = self.samples_per_client, self.rest_to
        fine = rest is None or (size is not None and rest >= 0)
        check("data.rest_to", rest, fine, "it must be a client's number from 0, with data.samples_per_client, or null")
        fine = rest is None or self.partition in ("rotated", "iid")
        check("data.rest_to", rest, fine, "it belongs to the partitions rotated and iid, whose clients are alike")
        other = self.planted in ("labels", "permuted")
        fine = not other or self.task == "classification"
        check("data.planted", self.planted, fine, "a regression has no classes to move labels on by: none or rotation")
        fine = self.drift_every is None or self.planted != "none"
        check("data.drift_every", self.drift_every, fine, "clients change tasks where there are several: data.planted")
        fine = not (other and self.global_test)
        check(
            "data.planted", self.planted, fine, "one test set for all (data.global_test) has one meaning of its labels"
        )
        fine = (self.planted, self.partition) != ("rotation", "rotated")
        check("data.planted", self.planted, fine, "the rotated partition turns images already: use iid")
        share = self.client_test
        fine = share is None or self.test_fraction is None or self.global_test
        allowed = "beside data.test_fraction there is no test part to take a share of, but with data.global_test"
        check("data.client_test", share, fine, allowed)
        for key in ("public_root", "public_samples"):
            value = getattr(self, key)
            check(f"data.{key}", value, value is None or self.public is not None, "it needs data.public")


@dataclass
class EvaluationConfig:
    """When models are evaluated, and which accuracy is called `mean_accuracy`."""

    every: PositiveInt = 1
    """Rounds between evaluations of the cohort; the last round is always evaluated. 1: KAPC on MNIST."""
    judge: Literal["auto", "before", "after", "global", "finetuned"] = "auto"
    """The model whose accuracy is `mean_accuracy`; auto: the method's own choice. The others get columns, too."""
    models: list[Literal["before", "distilled", "after", "global", "finetuned"]] | None = None
    """Which models to evaluate; null: all that exist, except finetuned. The judge is always evaluated."""
    metrics: list[Literal["balanced_accuracy", "f1", "auroc", "calibration", "class_share_accuracy"]] | None = None
    """Further scores beside accuracy; null: none, since each costs time (docs/reference.md).
    `class_share_accuracy` needs `data.global_test`."""
    finetune_epochs: NonNegativeInt = 0
    """Epochs of fine-tuning for `finetuned`, on a copy; 0: as long as a round's local training."""
    batch_size: PositiveInt = 500
    """Samples in one forward pass of evaluation: it bounds memory and changes scores by rounding at most."""
    newcomer_samples: list[int] | None = None
    """Labelled samples of each class (regression: in all) from which a held-out client gets a model, at most; null: 0,
    1, 5 and 20."""
    newcomer_rounds: PositiveInt = 2
    """Rounds that a new client takes part in, alone; the others do not train. 2: ours, in the first it uploads, in the
    second it receives what the server mixes for it."""

    def validate(self) -> None:
        """Raise `BadInput` for a value that cannot work."""
        check_ranges(self, "evaluation")
        counts = self.newcomer_samples
        fine = counts is None or (bool(counts) and min(counts) >= 0 and len(set(counts)) == len(counts))
        check("evaluation.newcomer_samples", counts, fine, "numbers of 0 or more, each once; or null")


@dataclass
class FabricConfig:
    """Where it runs (settings of Lightning Fabric)."""

    accelerator: str = "auto"
    """cpu, cuda (ROCm too), xpu, mps, any that Lightning knows or torch has; gpu: the one that is there; auto: that,
    else the CPU."""
    devices: int | Literal["auto"] = "auto"
    """Processes on each node; auto: every GPU, or one process on CPU."""
    num_nodes: PositiveInt = 1
    """Machines; more than one needs SLURM or torchrun."""
    precision: Literal["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true"] = "32-true"
    """Number format, by Lightning's name; the server always mixes in 32 bits or more."""
    threads: PositiveInt | None = None
    """CPU threads of each process; null: the cores divided by the processes. Equal bits need equal threads."""
    executor: Literal["auto", "loop", "vmap", "graph"] = "loop"
    """How a rank trains its clients: one by one (loop); many at once (vmap); one by one as a graph (CUDA, XPU); auto:
    the fastest, measured at the start. loop: executors round differently, and auto may choose another one on
    another machine."""
    deterministic: bool = False
    """Use only deterministic kernels of torch, and refuse operations that have none. false: on a CPU all are, given the
    number of threads; on a GPU some are slower (sums by index, cuDNN's backward) and a few are missing."""
    channels_last: bool = False
    """Store images with the channels of a pixel side by side (torch's channels_last). false: it is meant for GPUs and
    16 bits; on our CPU it gains nothing (docs/performance.md)."""
    bank: Literal["memory", "host", "disk"] = "memory"
    """Where clients' models are stored between visits: in the device's memory, in main memory beside a GPU, or in
    files. memory: the fastest."""
    timeout: Annotated[float, Range(1)] = 120.0
    """Seconds without a heartbeat until a process counts as lost and the others stop. 120: one comes each second."""

    def validate(self) -> None:
        """Raise `BadInput` for a value that cannot work."""
        check_ranges(self, "fabric")
        devices_fine = self.devices == "auto" or int(self.devices) >= 1
        check("fabric.devices", self.devices, devices_fine, "it must be at least 1, or auto")


@dataclass
class Config:
    """One run, resolved: every name turned into a class path, every default filled in."""

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
        """Clients that are held out."""
        if self.data.held_out is not None:
            return len(self.data.held_out)
        return held_out(self.data.held_out_clients, self.federation.clients, self.smoke)

    @property
    def clients(self) -> int:
        """Clients that take part: those of the federation but for the ones that are held out."""
        return self.federation.clients - self.held_out

    def validate(self) -> None:
        """Raise `BadInput` for the first value that cannot work."""
        check("seed", self.seed, 0 <= self.seed < 2**63, "it must lie in [0, 2**63)")
        for name in GROUPS:
            group = getattr(self, name)
            for key, value in vars(group).items():
                check_finite(f"{name}.{key}", value)
            group.validate()
        metrics = self.evaluation.metrics or []
        fine = not metrics or self.data.task == "classification"
        check("evaluation.metrics", metrics, fine, "a regression (data.task) has no classes: it must be null")
        fine = CLASS_SHARE.name not in metrics or self.data.global_test
        check("evaluation.metrics", metrics, fine, f"{CLASS_SHARE.name} needs data.global_test true")
        share, count = self.data.held_out_clients, self.held_out
        self.data.check_held_out(share, self.federation.clients)
        allowed = f"of {self.federation.clients} clients that is {count}: there must be some on either side"
        check("data.held_out_clients", share, not share or 0 < count < self.federation.clients, allowed)
        counts = [m.count for m in self.models]
        if any(c is not None for c in counts):
            total = sum(c or 0 for c in counts)
            clients = self.federation.clients
            check("model", counts, total == clients, f"the counts must add up to federation.clients = {clients}")

    def by_key(self) -> dict[str, Any]:
        """Plain data nested by the keys of the command line, with short names: `method.name`, `method.lam`."""
        models = [_short(m.component) | m.beside() for m in self.models]
        components = {kind: {k: _short(c) for k, c in getattr(self, kind).items()} for kind in ("callbacks", "loggers")}
        model = models[0] if len(models) == 1 else models
        first = {"seed": self.seed, "smoke": self.smoke, "method": _short(self.method), "model": model}
        return first | self.groups() | components

    def groups(self) -> dict[str, dict[str, Any]]:
        """Plain data of the groups of keys. The privacy of steps is left out where it is off: configurations from
        before it are equal to these."""
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
"""The keys of a configuration that are groups of plain ones."""


def flat(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested mappings, and their values."""
    if not isinstance(values, dict) or not values:
        yield key, values
        return
    for name, value in values.items():
        yield from flat(value, f"{key}.{name}" if key else str(name))


def _short(component: Component) -> dict[str, Any]:
    return {**component.init_args, "name": component.class_path.rpartition(".")[2].lower()}

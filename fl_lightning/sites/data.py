"""The data of a deployment: facts that all sites know, a site's own samples, and errors for hooks
that read the data of other sites."""

from __future__ import annotations

import csv
import inspect
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.relations import Relation
from fl_lightning.configuration.config import Component, Config, DataConfig, check
from fl_lightning.configuration.tables import form_of, numbers
from fl_lightning.data import FederatedData, prepare, table
from fl_lightning.data import arrays as npz
from fl_lightning.data.columns import Columns, Preprocessing
from fl_lightning.data.federated import AsRead
from fl_lightning.data.part import Samples
from fl_lightning.data.source import Reading
from fl_lightning.exporting import plain
from fl_lightning.foundation.cells import SEPARATORS
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.files import atomic_write, write_whole
from fl_lightning.foundation.metric import Task
from fl_lightning.foundation.named import composed
from fl_lightning.methods.base import Method

PARTS = ("train", "validation", "test")
PUBLIC = "public"
PART = "part"
"""The column of a site's table that holds one of `PARTS`, or `PUBLIC`."""
Parts = dict[str, tuple[np.ndarray, np.ndarray]]
"""Samples and labels by part."""


class NotTransmitted(RunFailed):
    """A hook of the method or relation read data that are not transmitted: the method cannot be
    deployed.

    Args:
        attribute: the data, as code: `run.data.client(3)`.
        hook: `Class.function`; empty: the hook that is running now.
    """

    def __init__(self, attribute: str, hook: str = "") -> None:
        super().__init__(f"{attribute} is not transmitted")
        self.attribute = attribute
        self.hook = hook or _running_hook()

    def as_bad_input(self, method: str) -> BadInput:
        """Return the error for the user. `method`: the method's name."""
        requirement = (
            f"it cannot be deployed, since {self.hook} reads {self.attribute}, which is not "
            f"transmitted: choose another method"
        )
        return BadInput("method", method, requirement)


def _running_hook() -> str:
    """Return the innermost running function of a `Method` or `Relation` as `Class.function`; empty:
    none is running."""
    for frame in inspect.stack(0):
        owner = frame.frame.f_locals.get("self")
        if isinstance(owner, Method | Relation):
            return f"{type(owner).__name__}.{frame.function}"
    return ""


class Unfit(BadInput):
    """A site's data or folder do not fit the federation.

    Only `requirement` is sent to the centre, so it must not contain anything of the data.
    """


class UnreadableMemory(dict[str, Tensor]):
    """Takes the place of the server's memory at a site: reading any entry raises
    `NotTransmitted`."""

    def get(self, name: object, default: Any = None) -> NoReturn:
        """Raise `NotTransmitted`."""
        raise NotTransmitted(f"run.server.memory[{name!r}]")

    __getitem__ = __contains__ = get


class OwnOnly(Sequence[Any]):
    """A sequence with a value for each client; reading a value that this end does not have raises
    `NotTransmitted`.

    Args:
        name: the attribute of `run.data` that it takes the place of, for the error.
        values: the values that this end has, by client.
        size: number of clients.
    """

    def __init__(
        self,
        name: str,
        values: Mapping[int, Any],
        size: int,
    ) -> None:
        self.name = name
        self.values = dict(values)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, client: Any) -> Any:
        if not isinstance(client, int) or client not in self.values:
            raise NotTransmitted(f"run.data.{self.name} of other clients")
        return self.values[client]

    def __iter__(self) -> Iterator[Any]:
        return (self[client] for client in range(self.size))


# ---------------------------------------------------------------- facts


@dataclass(frozen=True)
class SiteFacts:
    """Facts about a configuration's data that the app tells the centre and all sites. They contain
    no sample and no number of samples."""

    input_shape: list[int]
    strides: list[int]
    """Strides of a sample in memory. Convolutions round differently with other strides, so centre
    and sites use the same."""
    class_names: list[str]
    task: Task
    mean: list[Any]
    """Mean of each channel or feature of the training data; every site normalises with it and with
    `std`."""
    std: list[Any]
    public: bool
    """Whether the method uses public samples, which each site's data file then contains."""
    client_names: list[str] = field(default_factory=list)
    """Names, client 0 first; empty: clients have numbers only."""
    columns: list[tuple[str, list[str] | None]] | None = None
    """For each feature column of a table its name and, if it is one-hot, its values."""
    fills: list[float] | None = None
    """Value for empty cells by feature (`data.impute`); None: each site fits its own, or no feature
    is imputed."""
    scale: list[list[float]] | None = None
    """Four rows, each with a number by feature: centre, spread, slope and shift of `data.scale`,
    (x - centre) / spread * slope + shift."""

    @classmethod
    def of(cls, data: FederatedData) -> SiteFacts:
        """Return the facts of `data`.

        Raises:
            BadInput: a site's data file cannot hold data of this kind.
        """
        requirement = "sites cannot hold texts: deploy tables, images, series or vectors"
        check("data.source", "texts", data.text is None, requirement)
        raw = AsRead.of(data)
        reading = data.reading
        facts = cls(
            list(data.input_shape),
            list(raw.strides),
            data.class_names,
            data.task,
            raw.mean.tolist(),
            raw.std.tolist(),
            raw.public is not None,
            data.client_names,
        )
        if reading.columns is not None:
            names = reading.columns.names
            values = reading.columns.values
            requirement = "sites' files use this name for train, validation or test: rename it"
            check("data.columns", PART, PART not in names, requirement)
            facts = replace(facts, columns=[(name, values.get(name)) for name in names])
        steps = reading.preprocessing
        if steps is not None and not steps.own:
            fills, scale = steps.affine(0)
            facts = replace(facts, fills=fills, scale=scale)
        return facts

    def reading(self, data: DataConfig) -> Reading:
        """Return the description of how a site turns raw samples into model inputs: the columns of
        its table, and the preprocessing (`data.source.Reading`). `data`: the app's data section."""
        columns = None
        if self.columns is not None:
            values = {name: words for name, words in self.columns if words is not None}
            columns = Columns(
                [name for name, _ in self.columns],
                values,
                form_of(data),
            )
        steps: Preprocessing | None = None
        if self.fills is not None:
            steps = Declared(data, columns, self)
        elif data.impute is not None or data.scale is not None:
            steps = Preprocessing(data, columns, self.input_shape[0])
        return Reading(list(self.client_names), columns, preprocessing=steps)

    def write(self, file: Path) -> None:
        """Write JSON, from which `read` gets the same floats."""
        write_whole(file, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, file: Path) -> SiteFacts:
        """Return the facts that `write` wrote."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))


class Declared(Preprocessing):
    """Imputes and scales a site's samples with numbers that the app's facts contain (`fills`,
    `scale`), where `Preprocessing` fits the numbers to the client's data."""

    def __init__(
        self,
        data: DataConfig,
        columns: Columns | None,
        facts: SiteFacts,
    ) -> None:
        super().__init__(data, columns, facts.input_shape[0])
        self.facts = facts

    def affine(self, who: int) -> tuple[list[float], list[list[float]]]:
        """Return the value that fills empty cells, by feature, and the four rows of
        `SiteFacts.scale`; each is empty if the facts have none. They do not depend on the client
        `who`."""
        return self.facts.fills or [], self.facts.scale or []

    def transformed(
        self,
        who: int,
        name: str,
        raw: np.ndarray,
    ) -> np.ndarray:
        """Return the samples `raw` (n, features), imputed and scaled. `who` and `name` are the
        client's number and name, which change nothing here."""
        fills = None if self.data.impute is None else self.facts.fills
        about = {"input": "table", "empty": fills, "scale": self.facts.scale}
        return plain.scaled(about | UNCHANGED, torch.from_numpy(raw)).numpy()


UNCHANGED = {"mean": [0.0], "std": [1.0]}
"""A normalisation that changes nothing."""


# ---------------------------------------------------------------- the data of one end


class OwnData(FederatedData):
    """The data of one site, which has one client's samples, or of the centre, which has none."""

    holds_all = False
    own_clients: frozenset[int] = frozenset()
    """The clients whose samples are here."""

    def client(
        self, i: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ) -> Any:
        """Return the site's own data; raise `NotTransmitted` for another client."""
        if i not in self.own_clients:
            raise NotTransmitted(f"run.data.client({i})")
        return super().client(i, device, dtype)

    def example(
        self,
        i: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return a sample and its label to count FLOPs with; zeros for a client of another site."""
        if i in self.own_clients:
            return super().example(i, device, dtype)
        label = torch.zeros(1, dtype=torch.float32 if self.task == "regression" else torch.int64)
        return torch.zeros(
            1,
            *self.input_shape,
            device=device,
            dtype=dtype,
        ), label.to(device)


def at_site(
    facts: SiteFacts,
    config: Config,
    client: int,
    file: Path,
) -> OwnData:
    """Return the data of the site of `client`, with the samples in `file`.

    Raises:
        Unfit: the samples cannot be read, or do not fit the federation.
    """

    def check_fit(holds: bool, problem: str) -> None:
        if not holds:
            raise Unfit("data", str(file), problem)

    unreadable = "its data cannot be read"
    try:
        parts, public = _read(facts, config.data, file)
    except (BadInput, ValueError) as error:
        raise Unfit("data", str(file), unreadable) from error
    check_fit(bool(parts), unreadable)
    classes = len(facts.class_names) if facts.task == "classification" else math.inf
    for part, (x, y) in parts.items():
        has_shape = list(x.shape[1:]) == facts.input_shape
        check_fit(has_shape, "its samples have another shape than the federation's")
        has_classes = y.max(initial=0) < classes
        check_fit(has_classes, "its data have classes that the federation does not know")
        check_fit(bool(len(y)) or part == "validation", f"it has no samples for {part}")
    check_fit(public is not None or not facts.public, "it has no public samples")
    reading = facts.reading(config.data)
    steps = reading.preprocessing
    if steps is not None:
        try:
            if facts.fills is None:
                steps.fit(client, "this site", parts["train"][0])
            for part, (x, y) in parts.items():
                parts[part] = steps.transformed(client, "this site", x), y
        except (BadInput, ValueError) as error:
            raise Unfit("data", str(file), "its data cannot be imputed or scaled") from error
    sizes = {client: [len(parts[part][1]) for part in PARTS]}
    return _data(facts, config, reading, parts, {client}, public, sizes)


def at_center(
    facts: SiteFacts, config: Config, sizes: Mapping[int, Sequence[int]], public: Path | None
) -> OwnData:
    """Return the data of the centre.

    Args:
        facts: the app's facts about the data.
        config: the app's configuration.
        sizes: number of training, validation and test samples by client, as the sites sent them.
        public: file with public samples; None: there is none.

    Raises:
        BadInput: the method needs public samples, and there are none.
    """
    empty = np.zeros((0, *facts.input_shape), np.float32), np.zeros(0, np.int64)
    samples = None if public is None else _read(facts, config.data, public)[1]
    requirement = (
        "the method needs public samples at the centre: set public in the run config of flwr run "
        "to a file with x_public"
    )
    check(
        "public",
        str(public),
        samples is not None or not facts.public,
        requirement,
    )
    reading = facts.reading(config.data)
    return _data(
        facts,
        config,
        reading,
        dict.fromkeys(PARTS, empty),
        set(),
        samples,
        sizes,
    )


def _read(
    facts: SiteFacts,
    data: DataConfig,
    file: Path,
) -> tuple[Parts, np.ndarray | None]:
    """Return the raw samples and labels in `file` by part, and its raw public samples or None.

    Raises:
        BadInput, ValueError: the file cannot be read.
    """
    if file.suffix != ".csv" or facts.columns is None:
        return npz.site(str(file), facts.task)
    cells = table.read(replace(data, root=str(file)))
    label = data.label_column
    for column in (PART, label):
        check("data", str(file), column in cells, f"it has no column {column!r}")
    about = {"input": "table", "columns": facts.columns, "shape": facts.input_shape}
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    raw = plain.raw(about | form_of(data), rows).numpy()
    part_of = np.array(cells[PART])
    for part in {*cells[PART]} - {*PARTS, PUBLIC}:
        problem = f"its column {PART} holds {part!r}, not {', '.join(PARTS)} or {PUBLIC}"
        raise BadInput("data", str(file), problem)
    complete = data.impute is not None or np.isfinite(raw).all()
    requirement = "a cell is empty: fill it, or deploy with data.impute"
    check("data", str(file), complete, requirement)
    class_numbers = {name: number for number, name in enumerate(facts.class_names)}
    unknown = len(class_numbers)
    parts: Parts = {}
    for part in PARTS:
        index = np.flatnonzero(part_of == part)
        words = [composed(cells[label][k]) for k in index]
        if facts.task == "regression":
            labels = np.array(numbers(data, label, words), np.float32)
        else:
            labels = np.array([class_numbers.get(word, unknown) for word in words], np.int64)
        parts[part] = raw[index], labels
    public = raw[part_of == PUBLIC]
    return parts, public if len(public) else None


def _data(
    facts: SiteFacts,
    config: Config,
    reading: Reading,
    parts: Parts,
    own_clients: set[int],
    public: np.ndarray | None,
    sizes: Mapping[int, Sequence[int]],
) -> OwnData:
    """Return the data of a site or of the centre; reading data of a client outside `own_clients`
    raises `NotTransmitted`.

    Args:
        facts: the app's facts about the data.
        config: the app's configuration.
        reading: columns and preprocessing of raw samples.
        parts: the samples, imputed and scaled.
        own_clients: the site's client; at the centre empty.
        public: raw public samples; None: there are none.
        sizes: number of samples in each of `PARTS`, by those clients whose numbers are known here.
    """
    mean = torch.tensor(facts.mean, dtype=torch.float32)
    std = torch.tensor(facts.std, dtype=torch.float32)

    def samples(x: np.ndarray, y: np.ndarray) -> Samples:
        strides = (math.prod(x.shape[1:]), *facts.strides)
        inputs = torch.from_numpy(x)
        laid_out = torch.empty_strided(x.shape, strides, dtype=inputs.dtype)
        return Samples(
            laid_out.copy_(inputs),
            torch.from_numpy(y),
            mean,
            std,
        )

    x, y = parts["train"]
    x_validation, y_validation = parts["validation"]
    trained = samples(np.concatenate([x, x_validation]), np.concatenate([y, y_validation]))
    tested = samples(*parts["test"])
    clients = range(config.clients)
    shares = []
    for begin, end in ((0, len(y)), (len(y), len(trained.labels)), (0, len(tested.labels))):
        index = np.arange(begin, end)
        shares.append([index if client in own_clients else index[:0] for client in clients])
    pool = None
    if public is not None:
        if reading.preprocessing is not None:
            public = reading.preprocessing.transformed(0, "all clients", public)
        pool = samples(public, np.zeros(0, np.int64))
    data = OwnData(
        trained,
        tested,
        tuple(shares),  # type: ignore[arg-type]
        list(facts.class_names),
        [0.0] * len(clients),
        config.data.augment,
        config.data.resident,
        task=facts.task,
        public=pool,
        reading=reading,
    )
    data.own_clients = frozenset(own_clients)
    class_counts = {client: data.class_counts[client] for client in own_clients}
    data.class_counts = OwnOnly(  # type: ignore[assignment]
        "class_counts", class_counts, len(clients)
    )
    for k, part in enumerate(PARTS):
        counts = {client: samples_of_parts[k] for client, samples_of_parts in sizes.items()}
        name = f"{part}_sizes"
        setattr(data, name, OwnOnly(name, counts, len(clients)))
    return data


# ---------------------------------------------------------------- files to rehearse with


def write_sites(
    config: Config,
    data: FederatedData,
    folder: Path,
) -> list[Path]:
    """Write `data` as one file for each client, `site-0.npz` (a table: `site-0.csv`), and a file
    with the public samples; return the clients' files.

    Raises:
        BadInput: the configuration rotates clients' images or has tasks that drift, which a file of
            samples cannot express.
    """
    facts = SiteFacts.of(data)
    if data.reading.preprocessing is not None:
        clients = config.federation.clients
        data = prepare(
            config.data,
            clients,
            config.seed,
            config.smoke,
            fit=False,
        )
    raw = AsRead.of(data)
    requirement = "sites' files cannot hold rotated or drifting samples: change data.partition"
    check("data", ..., raw.plain, requirement)
    write: Callable[..., None] = _write_arrays
    suffix = "npz"
    if facts.columns is not None:
        write = partial(_write_table, facts, config.data)
        suffix = "csv"
    public = {} if raw.public is None else {PUBLIC: (raw.public, torch.zeros(0))}
    contents = {}
    for client, parts in enumerate(raw.parts):
        contents[folder / f"site-{client}.{suffix}"] = parts | public
    files = [*contents]
    if public:
        contents[folder / f"public.{suffix}"] = public
    for file, parts in contents.items():
        with atomic_write(file) as aside:
            write(aside, parts)
    return files


def _write_arrays(file: Path, parts: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    arrays = {"raw": np.ones(1)}
    for part, (x, y) in parts.items():
        arrays[f"x_{part}"] = x.numpy()
        if part != PUBLIC:
            arrays[f"y_{part}"] = y.numpy()
    with file.open("wb") as out:
        np.savez(out, **arrays)  # type: ignore[arg-type]


def _write_table(
    facts: SiteFacts, data: DataConfig, file: Path, parts: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Write samples as a table with the columns of the original: numbers rounded to 32 bits, words,
    and empty cells."""
    columns = facts.columns or []
    label = data.label_column
    text = io.StringIO()
    rows = csv.writer(text, delimiter=SEPARATORS[data.separator])
    rows.writerow([*(name for name, _ in columns), label, PART])
    for part, (x, y) in parts.items():
        for k, features in enumerate(x.tolist()):
            if part == PUBLIC:
                label_cell = ""
            elif facts.task == "classification":
                label_cell = facts.class_names[int(y[k])]
            else:
                label_cell = _cell(label, y[k].item(), data)
            rows.writerow([*_cells(columns, features, data), label_cell, part])
    file.write_text(text.getvalue(), encoding=data.encoding)


def _cells(
    columns: Sequence[tuple[str, list[str] | None]], features: Sequence[float], data: DataConfig
) -> Iterator[str]:
    """Yield the cells of a sample's features."""
    remaining = iter(features)
    for name, words in columns:
        if words is None:
            yield _cell(name, next(remaining), data)
        else:
            yield "".join([word for word in words if next(remaining)])


def _cell(column: str, number: float, data: DataConfig) -> str:
    """Return a number, or the date of a number of days, as `cells.number` reads it."""
    if math.isnan(number):
        return ""
    if column in (data.dates or []):
        moment = datetime.fromisoformat(data.day_zero) + timedelta(days=number)
        return moment.strftime(data.date_format) if data.date_format else moment.isoformat()
    return repr(number).replace(".", data.decimal)


def site_transforms(config: Config) -> dict[str, Component]:
    """Return the configuration's transforms that run at the sites, by name."""
    return {name: c for name, c in config.callbacks.items() if getattr(c.load(), "deployed", False)}


def with_loop(config: Config) -> Config:
    """Return `config` as the centre and every site run it: in one process, clients one after the
    other."""
    return replace(
        config,
        fabric=replace(
            config.fabric,
            executor="loop",
            devices=1,
            num_nodes=1,
        ),
    )

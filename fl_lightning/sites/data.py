"""The data of a federation of sites: facts that all of them know, a site's own samples, and errors
for hooks that ask for more."""

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
"""The column of a site's table that says to which of these a row belongs."""
Parts = dict[str, tuple[np.ndarray, np.ndarray]]
"""Samples and labels by part."""


class NotHere(RunFailed):
    """A hook has asked for `what`, which does not travel. `hook`: the method's or relation's."""

    def __init__(self, what: str, hook: str = "") -> None:
        super().__init__(f"{what} does not travel")
        self.what = what
        self.hook = hook
        for frame in inspect.stack(0):
            owner = frame.frame.f_locals.get("self")
            if not self.hook and isinstance(owner, Method | Relation):
                self.hook = f"{type(owner).__name__}.{frame.function}"

    def refusal(self, method: str) -> BadInput:
        """The line for the user."""
        allowed = f"{self.hook} reads {self.what}, which does not travel: it cannot be deployed"
        return BadInput("method", method, allowed)


class Unfit(BadInput):
    """A site's data do not fit the federation. The centre learns what is wrong (`allowed`), which
    holds none of them."""


class Withheld(dict[str, Tensor]):
    """The server's memory at a site: reading it is an error."""

    def get(self, name: object, default: Any = None) -> NoReturn:
        """Raises `NotHere`."""
        raise NotHere(f"run.server.memory[{name!r}]")

    __getitem__ = __contains__ = get


class OwnOnly(Sequence[Any]):
    """A list over all clients with some values; reading another's is an error."""

    def __init__(self, what: str, values: Mapping[int, Any], size: int) -> None:
        self.what = what
        self.values = dict(values)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, client: Any) -> Any:
        if not isinstance(client, int) or client not in self.values:
            raise NotHere(f"run.data.{self.what} of other clients")
        return self.values[client]

    def __iter__(self) -> Iterator[Any]:
        return (self[client] for client in range(self.size))


# ---------------------------------------------------------------- facts


@dataclass(frozen=True)
class Facts:
    """Facts about the configuration's data that the app tells the centre and all sites: no sample,
    no count."""

    input_shape: list[int]
    strides: list[int]
    """Of a sample in memory: convolutions round by it, so that all ends must lay samples out
    alike."""
    class_names: list[str]
    task: Task
    mean: list[Any]
    """Of each channel or feature of the training data; every site normalises by it and by `std`."""
    std: list[Any]
    public: bool
    """Whether the method works on public samples, which travel with a site's data file."""
    client_names: list[str] = field(default_factory=list)
    """Of the clients that take part, in order; empty: they have numbers alone."""
    columns: list[tuple[str, list[str] | None]] | None = None
    """Of a table's features: names, and the values of one-hot columns."""
    fills: list[float] | None = None
    """What `data.impute` puts into an empty cell of each feature; None: each site fits its own, or
    none is needed."""
    scale: list[list[float]] | None = None
    """Centre, spread, slope and shift of each feature by `data.scale`."""

    @classmethod
    def of(cls, data: FederatedData) -> Facts:
        """Of the data that a configuration names.

        Raises:
            BadInput: a site could not hold such data in a file of its own.
        """
        allowed = "sites hold tables, images, series or vectors, no texts yet"
        check("data.source", "texts", data.text is None, allowed)
        read = AsRead.of(data)
        reading = data.reading
        columns = fills = scale = None
        if reading.columns is not None:
            names = reading.columns.names
            values = reading.columns.values
            check("data.columns", PART, PART not in names, "sites' files need this name: rename it")
            columns = [(name, values.get(name)) for name in names]
        fits = reading.preprocessing
        if fits is not None and not fits.own:
            fills, scale = fits.affine(0)
        return cls(
            list(data.input_shape),
            list(read.strides),
            data.class_names,
            data.task,
            read.mean.tolist(),
            read.std.tolist(),
            read.public is not None,
            data.client_names,
            columns,
            fills,
            scale,
        )

    def reading(self, data: DataConfig) -> Reading:
        """How a site's raw samples become inputs."""
        columns = None
        if self.columns is not None:
            values = {name: words for name, words in self.columns if words is not None}
            columns = Columns([name for name, _ in self.columns], values, form_of(data))
        fits: Preprocessing | None = None
        if self.fills is not None:
            fits = Declared(data, columns, self)
        elif data.impute is not None or data.scale is not None:
            fits = Preprocessing(data, columns, self.input_shape[0])
        return Reading(list(self.client_names), columns, preprocessing=fits)

    def write(self, file: Path) -> None:
        """Write JSON; floats come back as they were."""
        write_whole(file, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, file: Path) -> Facts:
        """The facts that `write` wrote."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))


class Declared(Preprocessing):
    """The imputer and the scaler that the app declares."""

    def __init__(self, data: DataConfig, columns: Columns | None, facts: Facts) -> None:
        super().__init__(data, columns, facts.input_shape[0])
        self.facts = facts

    def affine(self, who: int) -> tuple[list[float], list[list[float]]]:
        """The declared numbers."""
        return self.facts.fills or [], self.facts.scale or []

    def transformed(self, who: int, name: str, raw: np.ndarray) -> np.ndarray:
        """Samples (n, features), imputed and scaled."""
        empty = None if self.data.impute is None else self.facts.fills
        about = {"input": "table", "empty": empty, "scale": self.facts.scale}
        return plain.scaled(about | UNCHANGED, torch.from_numpy(raw)).numpy()


UNCHANGED = {"mean": [0.0], "std": [1.0]}
"""A normalisation that changes nothing."""


# ---------------------------------------------------------------- the data of one end


class OwnData(FederatedData):
    """The data of one site, or of the centre, which has none."""

    holds_all = False

    def client(
        self, i: int, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ) -> Any:
        """The site's own; raises `NotHere` for another's."""
        if i not in self.own:
            raise NotHere(f"run.data.client({i})")
        return super().client(i, device, dtype)

    def example(self, i: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A made-up sample where there is none: operations are counted by shape."""
        if i in self.own:
            return super().example(i, device, dtype)
        label = torch.zeros(1, dtype=torch.float32 if self.task == "regression" else torch.int64)
        return torch.zeros(1, *self.input_shape, device=device, dtype=dtype), label.to(device)

    own: frozenset[int] = frozenset()
    """The clients whose samples are here."""


def at_site(facts: Facts, config: Config, client: int, file: Path) -> OwnData:
    """The data of the site of `client`: the samples in `file`.

    Raises:
        Unfit: they cannot be read, or do not fit the federation.
    """

    def fits(holds: bool, wrong: str) -> None:
        if not holds:
            raise Unfit("data", str(file), wrong)

    try:
        parts, public = _read(facts, config.data, file)
    except (BadInput, ValueError) as error:
        raise Unfit("data", str(file), "its data cannot be read") from error
    fits(bool(parts), "its data cannot be read")
    classes = len(facts.class_names) if facts.task == "classification" else math.inf
    for name, (x, y) in parts.items():
        same = list(x.shape[1:]) == facts.input_shape
        fits(same, "its samples have another shape than the federation's")
        known = y.max(initial=0) < classes
        fits(known, "its data have classes that the federation does not know")
        fits(bool(len(y)) or name == "validation", f"it has no samples for {name}")
    fits(public is not None or not facts.public, "it has no public samples")
    reading = facts.reading(config.data)
    steps = reading.preprocessing
    if steps is not None:
        try:
            if facts.fills is None:
                steps.fit(client, "this site", parts["train"][0])
            for name, (x, y) in parts.items():
                parts[name] = steps.transformed(client, "this site", x), y
        except (BadInput, ValueError) as error:
            raise Unfit("data", str(file), "its data cannot be imputed or scaled") from error
    data = _data(facts, config, reading, parts, {client}, public)
    sizes = {part: {client: len(parts[part][1])} for part in PARTS}
    return _known(data, sizes, config.clients)


def at_center(
    facts: Facts, config: Config, sizes: Mapping[str, Mapping[int, int]], public: Path | None
) -> OwnData:
    """The data of the centre: how many samples of each part every site told it (`sizes`), and the
    public samples."""
    nothing = np.zeros((0, *facts.input_shape), np.float32), np.zeros(0, np.int64)
    samples = None if public is None else _read(facts, config.data, public)[1]
    allowed = "the method works on public samples at the centre: a file with x_public"
    check("public", str(public), samples is not None or not facts.public, allowed)
    reading = facts.reading(config.data)
    parts = dict.fromkeys(PARTS, nothing)
    data = _data(facts, config, reading, parts, set(), samples)
    return _known(data, sizes, config.clients)


def _read(facts: Facts, data: DataConfig, file: Path) -> tuple[Parts, np.ndarray | None]:
    """Raw samples and labels in `file` by part, and raw public samples.

    Raises:
        BadInput, ValueError: they cannot be read.
    """
    if file.suffix != ".csv" or facts.columns is None:
        return npz.site(str(file), facts.task)
    cells = table.read(replace(data, root=str(file)))
    label = data.label_column
    for column in (PART, label):
        check("data", str(file), column in cells, f"it has no column {column!r}")
    about = {"input": "table", "columns": facts.columns, "shape": facts.input_shape}
    about |= form_of(data)
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    raw = plain.raw(about, rows).numpy()
    part_of = np.array(cells[PART])
    for part in {*cells[PART]} - {*PARTS, PUBLIC}:
        allowed = f"{', '.join(PARTS)} or {PUBLIC}"
        check("data", str(file), False, f"its column {PART} holds {part!r}, not {allowed}")
    if data.impute is None and not np.isfinite(raw).all():
        check("data", str(file), False, "a cell is empty, and data.impute is null")
    places = {name: place for place, name in enumerate(facts.class_names)}
    parts: Parts = {}
    for part in PARTS:
        index = np.flatnonzero(part_of == part)
        words = [composed(cells[label][k]) for k in index]
        if facts.task == "regression":
            labels = np.array(numbers(data, label, words), np.float32)
        else:
            # an unknown class is one beyond those that there are
            labels = np.array([places.get(word, len(places)) for word in words], np.int64)
        parts[part] = raw[index], labels
    public = raw[part_of == PUBLIC]
    return parts, public if len(public) else None


def _data(
    facts: Facts,
    config: Config,
    reading: Reading,
    parts: Parts,
    own: set[int],
    public: np.ndarray | None,
) -> OwnData:
    """The data of an end. `public`: raw samples."""
    mean, std = (torch.tensor(numbers, dtype=torch.float32) for numbers in (facts.mean, facts.std))

    def samples(x: np.ndarray, y: np.ndarray) -> Samples:
        return Samples(laid_out(torch.from_numpy(x), facts.strides), torch.from_numpy(y), mean, std)

    (x, y), (x_validation, y_validation) = parts["train"], parts["validation"]
    trained = samples(np.concatenate([x, x_validation]), np.concatenate([y, y_validation]))
    ends = {
        "train": (0, len(y)),
        "validation": (len(y), len(trained.labels)),
        "test": (0, len(parts["test"][1])),
    }
    shares = tuple(
        [np.arange(*ends[part] if c in own else (0, 0)) for c in range(config.clients)]
        for part in PARTS
    )
    pool = None
    if public is not None:
        if reading.preprocessing is not None:
            public = reading.preprocessing.transformed(0, "all clients", public)
        pool = samples(public, np.zeros(0, np.int64))
    data = OwnData(
        trained,
        samples(*parts["test"]),
        shares,  # type: ignore[arg-type]
        list(facts.class_names),
        [0.0] * config.clients,
        config.data.augment,
        config.data.resident,
        task=facts.task,
        public=pool,
        reading=reading,
    )
    data.own = frozenset(own)
    return data


def laid_out(samples: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of `samples` (n, ...) in which each lies in memory by `strides`."""
    copy = torch.empty_strided(
        samples.shape, (math.prod(samples.shape[1:]), *strides), dtype=samples.dtype
    )
    return copy.copy_(samples)


def _known(data: OwnData, sizes: Mapping[str, Mapping[int, int]], clients: int) -> OwnData:
    """`data`, where reading counts of other clients is an error."""
    counts = {client: data.class_counts[client] for client in data.own}
    data.class_counts = OwnOnly("class_counts", counts, clients)  # type: ignore[assignment]
    data.train_sizes, data.validation_sizes, data.test_sizes = (  # type: ignore[assignment]
        OwnOnly(f"{part}_sizes", sizes[part], clients) for part in PARTS
    )
    return data


# ---------------------------------------------------------------- files to rehearse with


def write_sites(config: Config, data: FederatedData, folder: Path) -> list[Path]:
    """Write the `data` of a configuration as one file for each client, `site-0.npz` or of a table
    `site-0.csv`, and the public samples.

    Raises:
        BadInput: the clients' samples are turned, or drift, which a file cannot say.
    """
    facts = Facts.of(data)
    if data.reading.preprocessing is not None:
        clients = config.federation.clients
        seed = config.seed
        data = prepare(config.data, clients, seed, config.smoke, fit=False)
    read = AsRead.of(data)
    allowed = "a rehearsal needs samples that are not turned"
    check("data.partition", "rotated or planted", read.plain, allowed)
    public = {} if read.public is None else {PUBLIC: (read.public, torch.zeros(0))}
    sites = [parts | public for parts in read.parts]
    write: Callable[..., None] = partial(_write_table, facts, config.data)
    suffix = "csv"
    if facts.columns is None:
        write = _write_arrays
        suffix = "npz"
    files = [folder / f"site-{client}.{suffix}" for client in range(len(sites))]
    for file, parts in zip(files, sites, strict=True):
        with atomic_write(file) as aside:
            write(aside, parts)
    if public:
        with atomic_write(folder / f"public.{suffix}") as aside:
            write(aside, public)
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
    facts: Facts, data: DataConfig, file: Path, parts: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Write samples as the table had them: numbers with 32 bits, words, and empty cells."""
    columns = facts.columns or []
    label = data.label_column
    text = io.StringIO()
    rows = csv.writer(text, delimiter=SEPARATORS[data.separator])
    rows.writerow([*(name for name, _ in columns), label, PART])
    for part, (x, y) in parts.items():
        for k, features in enumerate(x.tolist()):
            word = ""
            if part != PUBLIC:
                is_class = facts.task == "classification"
                value = y[k].item()
                word = facts.class_names[int(value)] if is_class else _written(label, value, data)
            rows.writerow([*_cells(columns, features, data), word, part])
    file.write_text(text.getvalue(), encoding=data.encoding)


def _cells(
    columns: Sequence[tuple[str, list[str] | None]], features: Sequence[float], data: DataConfig
) -> Iterator[str]:
    """The cells of a sample's features."""
    rest = iter(features)
    for name, words in columns:
        if words is None:
            yield _written(name, next(rest), data)
        else:
            places = [word for word in words if next(rest)]
            yield "".join(places)


def _written(column: str, number: float, data: DataConfig) -> str:
    """A number as the table has it, which `cells.number` reads."""
    if math.isnan(number):
        return ""
    if column in (data.dates or []):
        moment = datetime.fromisoformat(data.day_zero) + timedelta(days=number)
        return moment.strftime(data.date_format) if data.date_format else moment.isoformat()
    return repr(number).replace(".", data.decimal)


def of_sites(config: Config) -> dict[str, Component]:
    """The transforms of the configuration that sites run at their end, by name."""
    return {name: c for name, c in config.callbacks.items() if getattr(c.load(), "deployed", False)}


def with_loop(config: Config) -> Config:
    """The configuration as every end runs it: one process, clients one after the other."""
    return replace(config, fabric=replace(config.fabric, executor="loop", devices=1, num_nodes=1))

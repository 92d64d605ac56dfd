"""The data of a federation where each site has its own: what all know of them, and what asks for
more is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fl_lightning.configuration.config import Component, Config, check
from fl_lightning.data import FederatedData
from fl_lightning.data import arrays as npz
from fl_lightning.data.federated import AsRead
from fl_lightning.data.part import Samples
from fl_lightning.data.source import Reading
from fl_lightning.foundation.errors import BadInput, RunFailed
from fl_lightning.foundation.files import atomic_write, write_whole
from fl_lightning.foundation.metric import Task

PARTS = ("train", "validation", "test")


class NotHere(RunFailed):
    """A hook has asked for what does not travel: `what`."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} does not travel")
        self.what = what


class Unfit(BadInput):
    """A site's data do not fit the federation. `sentence` is what the centre learns of it: it holds
    none of them."""

    def __init__(self, key: str, value: object, allowed: str, sentence: str) -> None:
        super().__init__(key, value, allowed)
        self.sentence = sentence


class Withheld(dict[str, Tensor]):
    """The server's memory as a site has it: nothing, and to ask for something is an error, not an
    empty answer."""

    def get(self, name: object, default: Any = None) -> NoReturn:
        """Raises `NotHere`."""
        raise NotHere(f"run.server.memory[{name!r}]")

    __getitem__ = __contains__ = get


class OwnOnly(Sequence[Any]):
    """A list over all clients of which some values are here; to ask for another's is an error."""

    def __init__(self, what: str, values: Mapping[int, Any], size: int) -> None:
        self.what, self.values, self.size = what, dict(values), size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, client: Any) -> Any:
        if not isinstance(client, int) or client not in self.values:
            raise NotHere(f"run.data.{self.what} of other clients")
        return self.values[client]

    def __iter__(self) -> Iterator[Any]:
        return (self[client] for client in range(self.size))


@dataclass(frozen=True)
class Facts:
    """What the centre and all sites know of the data, from the data of the configuration: no
    sample, no count."""

    input_shape: list[int]
    strides: list[int]
    """Of a sample in memory: convolutions round by it, so that all ends must lay samples out
    alike."""
    class_names: list[str]
    task: Task
    mean: list[Any]
    """Of each channel or feature of the configuration's training data; every site normalises by
    it."""
    std: list[Any]
    public: bool
    """Whether the method's public samples travel with a site's own data file."""
    client_names: list[str] = field(default_factory=list)
    """Of the clients that take part, in order; empty: they have numbers alone."""

    @classmethod
    def of(cls, data: FederatedData) -> Facts:
        """Of the data that a configuration names.

        Raises:
            BadInput: a site could not hold such data in a file of its own.
        """
        check(
            "data.source",
            "texts",
            data.text is None,
            "sites hold images, series or vectors, no texts yet",
        )
        fits = data.reading.preprocessing
        # it is fitted on the training samples of all clients, which no end has
        if fits is not None:
            key = "impute" if fits.data.impute is not None else "scale"
            value = getattr(fits.data, key)
            allowed = (
                "preprocess the data and set null: in a deployment nobody has all samples to fit "
                "it on"
            )
            raise BadInput(f"data.{key}", value, allowed)
        read, shape = AsRead.of(data), list(data.input_shape)
        mean, std = read.mean.tolist(), read.std.tolist()
        names = data.client_names
        return cls(
            shape,
            list(read.strides),
            data.class_names,
            data.task,
            mean,
            std,
            read.public is not None,
            names,
        )

    def write(self, file: Path) -> None:
        """As JSON: the numbers of 32 bits come back as they were."""
        write_whole(file, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, file: Path) -> Facts:
        """What `write` wrote."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))


class OwnData(FederatedData):
    """The data of one site, or none: those of other clients are elsewhere."""

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
    """What the site of `client` has: its samples in the npz `file`, and the public ones where there
    are any.

    Raises:
        BadInput: they cannot be read, or do not fit the federation.
    """
    try:
        parts, public = npz.site(str(file), facts.task)
    except BadInput as error:
        raise Unfit(error.key, error.value, error.allowed, "its data cannot be read") from None

    def fits(holds: bool, allowed: str, sentence: str) -> None:
        if not holds:
            raise Unfit("data", str(file), allowed, sentence)

    fits(bool(parts), "it holds no x_train", "its data cannot be read")
    for name, (x, y) in parts.items():
        shapes = (
            f"x_{name} has samples of shape {x.shape[1:]}, the federation's are "
            f"{tuple(facts.input_shape)}"
        )
        fits(
            list(x.shape[1:]) == facts.input_shape,
            shapes,
            "its samples have another shape than the federation's",
        )
        known = facts.task == "regression" or not len(y) or int(y.max()) < len(facts.class_names)
        beyond = f"y_{name} has classes beyond the {len(facts.class_names)} of the federation"
        fits(known, beyond, "its data have classes that the federation does not know")
        fits(
            bool(len(y)) or name == "validation",
            f"it holds no x_{name}",
            f"it has no samples for {name}",
        )
    fits(
        public is not None or not facts.public,
        "the method wants x_public in it, too",
        "it has no public samples",
    )
    data = _data(facts, config, parts, {client}, config.clients, public)
    sizes = {part: {client: len(parts[part][1])} for part in PARTS}
    return _known(data, sizes, config.clients)


def at_center(
    facts: Facts, config: Config, sizes: Mapping[str, Mapping[int, int]], public: Path | None
) -> OwnData:
    """What the centre has: how many samples of each part every site told it (`sizes`), and the
    public samples."""
    nothing = {
        part: (np.zeros((0, *facts.input_shape), np.float32), np.zeros(0, np.int64))
        for part in PARTS
    }
    known = None if public is None else npz.site(str(public), facts.task)[1]
    allowed = "the method works on public samples at the centre: an npz with x_public"
    check("public", str(public), known is not None or not facts.public, allowed)
    return _known(
        _data(facts, config, nothing, set(), config.clients, known), sizes, config.clients
    )


def _data(
    facts: Facts,
    config: Config,
    parts: Mapping[str, tuple[np.ndarray, np.ndarray]],
    own: set[int],
    clients: int,
    public: np.ndarray | None,
) -> OwnData:
    mean, std = (torch.tensor(numbers, dtype=torch.float32) for numbers in (facts.mean, facts.std))

    def samples(*names: str) -> Samples:
        x, y = (np.concatenate([parts[name][k] for name in names]) for k in range(2))
        return Samples(laid_out(torch.from_numpy(x), facts.strides), torch.from_numpy(y), mean, std)

    train = len(parts["train"][1])
    ends = {"train": (0, train), "validation": (train, train + len(parts["validation"][1]))}
    ends["test"] = (0, len(parts["test"][1]))
    shares = tuple(
        [np.arange(*ends[p] if c in own else (0, 0)) for c in range(clients)] for p in PARTS
    )
    pool = None
    if public is not None:
        raw = laid_out(torch.from_numpy(public), facts.strides)
        pool = Samples(raw, torch.zeros(0, dtype=torch.int64), mean, std)
    data = OwnData(
        samples("train", "validation"),
        samples("test"),
        shares,  # type: ignore[arg-type]
        list(facts.class_names),
        [0.0] * clients,
        config.data.augment,
        config.data.resident,
        task=facts.task,
        public=pool,
        reading=Reading(client_names=list(facts.client_names)),
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
    counts = {client: data.class_counts[client] for client in data.own}
    data.class_counts = OwnOnly("class_counts", counts, clients)  # type: ignore[assignment]
    data.train_sizes, data.validation_sizes, data.test_sizes = (  # type: ignore[assignment]
        OwnOnly(f"{part}_sizes", sizes[part], clients) for part in PARTS
    )
    return data


def write_sites(data: FederatedData, folder: Path) -> list[Path]:
    """The data of a configuration as the files of so many sites, to rehearse with: `site-0.npz`,
    and `public.npz`.

    Raises:
        BadInput: the clients' samples are turned, or drift: a file does not say that.
    """
    read = AsRead.of(data)
    check(
        "data.partition",
        "rotated or planted",
        read.plain,
        "a rehearsal needs samples that are not turned",
    )
    public = {} if read.public is None else {"x_public": read.public.numpy()}
    files = []
    for client, parts in enumerate(read.parts):
        named: dict[str, np.ndarray] = {"raw": np.ones(1), **public}
        for part, (x, y) in parts.items():
            named |= {f"x_{part}": x.numpy(), f"y_{part}": y.numpy()}
        files.append(folder / f"site-{client}.npz")
        with atomic_write(files[-1]) as aside, aside.open("wb") as out:
            np.savez(out, **named)  # type: ignore[arg-type]
    if public:
        with atomic_write(folder / "public.npz") as aside, aside.open("wb") as out:
            np.savez(out, raw=np.ones(1), **public)  # type: ignore[arg-type]
    return files


def of_sites(config: Config) -> dict[str, Component]:
    """The transforms of the configuration that sites run at their end, by name."""
    return {name: c for name, c in config.callbacks.items() if getattr(c.load(), "deployed", False)}


def with_loop(config: Config) -> Config:
    """The configuration as every end runs it: one process, clients one after the other."""
    return replace(config, fabric=replace(config.fabric, executor="loop", devices=1, num_nodes=1))

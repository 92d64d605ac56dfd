"""The data of a whole federation, from which each client's samples come as batches on its
device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
import xxhash
from numpy import ndarray
from torch import Tensor

from fl_lightning.configuration import catalogue
from fl_lightning.configuration.components import Text
from fl_lightning.configuration.datakeys import Balance
from fl_lightning.data.augment import Augmentation
from fl_lightning.data.columns import NEWCOMER
from fl_lightning.data.part import (
    ClientSamples,
    LoadedPart,
    Part,
    Relabelling,
    ResidentPart,
    Samples,
    TargetPart,
)
from fl_lightning.data.planted import Tasks
from fl_lightning.data.source import HeldOut, Reading
from fl_lightning.foundation.device import free_bytes
from fl_lightning.foundation.errors import BadInput, check
from fl_lightning.foundation.metric import BY_TASK, NO_TARGET, Task
from fl_lightning.foundation.named import composed

RESIDENT_SHARE = 0.5
"""Largest share of a device's free memory that all samples in use may take to lie on it, with
`data.resident: auto`."""


class FederatedData:
    """The samples of all clients, and facts about them.

    The raw samples lie in memory once. `client` prepares a client's training, validation and test
    parts when it is first called for the client, and keeps them.
    """

    _round = 1  # the round whose tasks clients have
    balance: Balance | None = None
    """`data.balance`."""
    holds_all: ClassVar[bool] = True
    """Whether this process holds every client's samples; at a site of a deployment it does not."""

    def __init__(
        self,
        train: Samples,
        test: Samples,
        shares: tuple[list[ndarray], list[ndarray], list[ndarray]],
        class_names: list[str],
        angles: list[float],
        augment: Literal["none", "flip", "crop_flip"] = "none",
        resident: Literal["auto", "always", "never"] = "auto",
        made_up: bool = False,
        task: Task = "classification",
        public: Samples | None = None,
        common: Samples | None = None,
        groups: list[int] | None = None,
        held_out: Sequence[HeldOut] = (),
        vocabulary: int = 0,
        drifting: Tasks | None = None,
        reading: Reading | None = None,
    ) -> None:
        """
        Args:
            train, test: the samples of all clients.
            shares: each client's indices for training and validation (into `train`) and for test
                (into `test`).
            class_names: names of the classes; empty for a regression.
            angles: degrees by which each client's images are rotated.
            augment: augmentation of training images.
            resident: whether tensors lie on the device (`data.resident`).
            made_up: whether the samples are noise in place of absent data (smoke runs only).
            task: classification, or regression.
            public: samples without labels, for all clients and the server.
            common: the test set for all clients (`data.global_test`); it may be `test`.
            groups: true group of each client.
            held_out: clients that take no part in the run; the others have the numbers of this
                object.
            vocabulary: number of different tokens of texts; 0 for other samples.
            drifting: planted groups between which clients move as rounds go by.
            reading: how raw samples become inputs.
        """
        self.input_shape: tuple[int, ...] = tuple(train.raw.shape[1:])
        self.class_names = class_names
        self.task = task
        self.metric = BY_TASK[task]
        """The metric by which models are judged, and their local loss."""
        self.num_classes = 1 if task == "regression" else len(class_names)
        """Number of outputs of a model."""
        self.clients = len(angles)
        self.held_out = list(held_out)
        held_out_numbers = {client.number for client in held_out}
        all_clients = range(self.clients + len(held_out_numbers))
        self.numbers = [client for client in all_clients if client not in held_out_numbers]
        """Each client's number among all clients, including the held-out ones."""
        self.groups = groups or [0] * self.clients
        """True group of every client: the planted group, mixture or domain; all 0 without
        groups."""
        self.reading = reading or Reading()
        self.vocabulary = vocabulary
        """Number of different tokens of texts; 0 for other samples."""
        self.made_up = made_up
        """Whether the samples are noise in place of absent data (smoke runs only)."""
        self.train_sizes, self.validation_sizes, self.test_sizes = (
            [len(index) for index in indices] for indices in shares
        )
        self.class_counts, self.validation_counts, self.test_counts = (
            _class_counts(indices, _strata(pool, task), self.num_classes)
            for indices, pool in zip(shares, (train, train, test), strict=True)
        )
        """Samples by client and class, int64 [N, classes], by the labels as dealt
        (`trained_counts`: as trained on). Texts count next tokens; a regression has one class."""
        self._train = train
        self._test = test
        self._public = public
        self._common = common
        self._common_parts: dict[tuple[torch.device, torch.dtype], Part] = {}
        self._shares = shares
        self._angles = list(angles)
        self._resident = resident
        self._drifting = drifting
        black = -train.mean / train.std
        self._augmentation = (
            None if augment == "none" else Augmentation(augment == "crop_flip", black)
        )
        self._cache: dict[tuple[int, torch.device, torch.dtype], ClientData] = {}
        self._memory_answers: dict[torch.device, bool] = {}
        self._relabelled: dict[int, Relabelling] = {}
        self._newcomer: ClientData | None = None

    @property
    def public_size(self) -> int:
        """Number of public samples."""
        return 0 if self._public is None else len(self._public.raw)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the raw samples, which every process holds."""
        common = None if self._common is self._test else self._common
        pools = [self._train, self._test, self._public, common]
        tensors: list[Tensor] = []
        for pool in pools:
            if pool is not None:
                tensors += [pool.raw, pool.labels]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def least_test_class(self) -> int:
        """The smallest number of test samples of one class at one client, of all pairs of client
        and class with at least one."""
        return int(self.test_counts[self.test_counts > 0].min())

    @property
    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation by which inputs are normalised, shaped to broadcast against one
        sample."""
        return self._train.mean, self._train.std

    @property
    def client_names(self) -> list[str]:
        """Names of the clients, without held-out ones; empty if clients have only numbers."""
        names = self.reading.client_names
        return [names[number] for number in self.numbers] if names else []

    def client_label(self, i: int) -> str:
        """Return client `i`'s number, with its name if it has one, for messages."""
        names = self.client_names
        return f"client {i} ({names[i]})" if i < len(names) else f"client {i}"

    @property
    def text(self) -> Text | None:
        """Vocabulary and kind of targets of texts; None for other samples."""
        return Text(self.vocabulary, self._train.labels.ndim > 1) if self.vocabulary else None

    def client(
        self,
        i: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> ClientData:
        """Return client `i`'s parts on `device`; they are kept for the next call."""
        device = torch.device(device)
        if self._newcomer is not None and i == self.clients - 1:
            return self._newcomer
        key = (i, device, dtype)
        if key not in self._cache:
            train, validation, test = (share[i] for share in self._shares)
            where = self._angles[i], device, dtype
            training = self._part(self._train, train, *where, self._augmentation)
            labels = self._trained_labels(i).to(device)
            if i in self._relabelled:
                training = TargetPart(training, labels)
            if self.balance is not None:
                training.set_balance(self.balance, labels, self.num_classes)
            self._cache[key] = ClientData(
                training,
                self._part(self._train, validation, *where),
                self._part(self._test, test, *where),
            )
        return self._cache[key]

    def raw_samples(self, i: int) -> tuple[Tensor, Tensor]:
        """Return client `i`'s raw training and test samples, in the stored order of its training
        and test parts.

        They are neither normalised nor rotated, so a sample has the same values with every seed.
        """
        trained, _, tested = (share[i] for share in self._shares)
        return self._train.raw[trained], self._test.raw[tested]

    def global_test(
        self,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Part | None:
        """Return the test set for all clients, without rotation; None without `data.global_test`.

        It has no samples of held-out clients, and is kept for the next call.
        """
        if self._common is not None and (device, dtype) not in self._common_parts:
            index = np.arange(len(self._common.labels))
            if self.held_out and self._common is self._test:
                index = np.setdiff1d(
                    index, np.concatenate([newcomer.test for newcomer in self.held_out])
                )
            self._common_parts[device, dtype] = self._part(self._common, index, 0.0, device, dtype)
        return self._common_parts.get((device, dtype))

    def public(
        self,
        index: Tensor | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return public inputs at `index` (int64 [m]; None: all), normalised like the private ones,
        without rotation.

        Raises:
            BadInput: there are no public samples.
        """
        if self._public is None:
            requirement = (
                "the method needs public data: set it to held_back, a data source or an .npz file"
            )
            raise BadInput("data.public", None, requirement)
        index = torch.arange(self.public_size) if index is None else index.cpu()
        return self._public.inputs(
            index,
            0.0,
            torch.device(device),
            dtype,
        )

    def run_numbers(self, dealt_numbers: Sequence[int]) -> list[int]:
        """Return the run's numbers of clients that are given by their numbers among all clients,
        ascending; held-out clients have none and are left out."""
        return [place for place, number in enumerate(self.numbers) if number in set(dealt_numbers)]

    def example(
        self,
        i: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return a batch of at most two training samples of client `i`, with which a model's
        operations (FLOPs) are counted."""
        batches = self.client(i, device, dtype).train.batches(2)
        return next(iter(batches))

    # ---------------------------------------------------------------- new clients

    def newcomer_inputs(
        self,
        raw: Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return a new client's samples as inputs, prepared like those of the run's clients.

        If each client has a transformer of its own, `fit_newcomer` must have been called.
        """
        raw = raw.long() if self.vocabulary else raw
        preprocessing = self.reading.preprocessing
        if preprocessing is not None:
            values = preprocessing.transformed(NEWCOMER, "the new client", raw.numpy())
            raw = torch.from_numpy(values)
        samples = Samples(raw, torch.empty(0), *self.statistics)
        return samples.inputs(torch.arange(len(raw)), 0.0, device, dtype)

    def fit_newcomer(self, raw: ndarray) -> None:
        """Fit a transformer on a new client's training samples; does nothing if all clients share
        one."""
        preprocessing = self.reading.preprocessing
        if preprocessing is not None and preprocessing.own:
            preprocessing.fit(NEWCOMER, "the new client", raw)

    def newcomer_part(
        self,
        x: Tensor,
        y: Tensor,
    ) -> Part:
        """Return a new client's inputs and labels as a training part, with the run's augmentation
        and class balance."""
        part = ResidentPart(x, y, self._augmentation)
        if self.balance is not None:
            part.set_balance(self.balance, y, self.num_classes)
        return part

    def held_out_samples(
        self,
        who: HeldOut,
        device: torch.device,
        dtype: torch.dtype,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return a held-out client's samples, (inputs, labels): all of its training samples, and
        all of its test samples."""
        parts = []
        for pool, share in ((self._train, who.train), (self._test, who.test)):
            samples = ClientSamples(
                pool,
                share,
                who.angle,
                device,
                dtype,
            )
            parts.append(samples.at(samples.index))
        return parts

    def with_newcomer(self, parts: ClientData) -> FederatedData:
        """Return a shallow copy with one more client, which has the parts `parts`.

        Tensors and caches are shared. A new client without training samples has weight 1 in
        weighted means, as if it had one sample. Names, and the counts of validation and test
        samples by class, are those of the other clients only.
        """
        extended = copy.copy(self)
        labels = [y.cpu().numpy() for _, y in parts.train.batches(4096)]
        extended._newcomer = parts
        extended.clients = self.clients + 1
        extended.groups = [*self.groups, 0]
        extended.train_sizes = [*self.train_sizes, max(1, len(parts.train))]
        extended.validation_sizes = [*self.validation_sizes, len(parts.validation)]
        extended.test_sizes = [*self.test_sizes, len(parts.test)]
        if self.task == "classification":
            y = np.concatenate([np.zeros(0, np.int64), *map(np.ravel, labels)])
            counts = np.bincount(y[y != NO_TARGET], minlength=self.num_classes)
            extended.class_counts = np.vstack([self.class_counts, counts[None]]).astype(
                self.class_counts.dtype
            )
        return extended

    # ---------------------------------------------------------------- samples of a client

    def first_samples(
        self,
        i: int,
        most: int,
    ) -> tuple[Tensor, Tensor]:
        """Return inputs (m, ...) and labels (m,) of client `i`'s first training samples, at most
        `most`, on the CPU."""
        index = self._shares[0][i][:most]
        cpu = torch.device("cpu")
        samples = ClientSamples(
            self._train,
            index,
            self._angles[i],
            cpu,
            torch.float32,
        )
        return samples.at(samples.index)

    def relabel(
        self,
        i: int,
        change: Relabelling,
    ) -> None:
        """Change the labels that client `i` trains on from now on (an attack); `class_counts` keep
        the labels as dealt."""
        self._relabelled[i] = change
        for key in [key for key in self._cache if key[0] == i]:
            del self._cache[key]

    def unit_ids(
        self,
        i: int,
    ) -> tuple[ndarray, ndarray]:
        """Return the unit (person, recording) of each training and test sample of client `i`, as
        numbers.

        Without units each sample has a number of its own.
        """
        if self._newcomer is not None and i == self.clients - 1:
            return np.arange(self.train_sizes[i]), np.arange(self.test_sizes[i])
        trained, _, tested = (share[i] for share in self._shares)
        units = []
        for pool, index in ((self._train, trained), (self._test, tested)):
            units.append(index if pool.units is None else pool.units[index])
        return units[0], units[1]

    def test_sample_ids(self, i: int) -> ndarray:
        """Return a number for each test sample of client `i`; a sample has the same number in every
        split."""
        index = self._shares[2][i]
        return index if self._test.rows is None else self._test.rows[index]

    def test_table_rows(self, i: int) -> ndarray:
        """Return the row of each test sample of client `i` in the user's table, from 0;
        `test_sample_ids` if the data are no table."""
        lines = self._test.lines
        if lines is None:
            return self.test_sample_ids(i)
        return lines[self._shares[2][i]]

    def trained_counts(self, i: int) -> ndarray:
        """Count client `i`'s training samples by class, int64 (classes,), after `relabel`."""
        if i not in self._relabelled:
            return np.asarray(self.class_counts[i])
        labels = self._trained_labels(i).numpy()
        return _class_counts([np.arange(len(labels))], labels, self.num_classes)[0]

    def _trained_labels(self, i: int) -> Tensor:
        """Return the labels of client `i`'s training samples, after `relabel`."""
        labels = self._train.labels[torch.from_numpy(self._shares[0][i])]
        return self._relabelled[i](labels) if i in self._relabelled else labels

    def at_round(self, round: int) -> None:
        """Change the labels and rotations of all clients, held-out ones too, to the tasks that they
        have in `round`; does nothing without `data.drift_every`."""
        if self._drifting is None or round == self._round:
            return
        tasks = self._drifting
        before = self._round
        self._round = round
        unseen = [
            (newcomer.number, newcomer.train, newcomer.validation, newcomer.test)
            for newcomer in self.held_out
        ]
        indices_of_clients = [*zip(self.numbers, *self._shares, strict=True), *unseen]
        tasks.drift(
            indices_of_clients,
            self._train.labels.numpy(),
            self._test.labels.numpy(),
            before,
            round,
        )
        self.groups = [tasks.group(number, round) for number in self.numbers]
        self._angles = [tasks.angle(group) for group in self.groups]
        self.held_out = [
            replace(newcomer, angle=tasks.angle(tasks.group(newcomer.number, round)))
            for newcomer in self.held_out
        ]
        if tasks.tables is not None:
            self.class_counts = _class_counts(
                self._shares[0], self._train.labels.numpy(), self.num_classes
            )
        self._cache.clear()

    def _part(
        self,
        pool: Samples,
        index: ndarray,
        angle: float,
        device: torch.device,
        dtype: torch.dtype,
        augmentation: Augmentation | None = None,
    ) -> Part:
        samples = ClientSamples(
            pool,
            index,
            angle,
            device,
            dtype,
        )
        if self._fits_in_memory(device):
            return ResidentPart(*samples.at(samples.index), augmentation)
        return LoadedPart(samples, augmentation)

    def _fits_in_memory(self, device: torch.device) -> bool:
        if self._resident != "auto":
            return self._resident == "always"
        if device not in self._memory_answers:
            pools = [pool for pool in (self._train, self._test, self._common) if pool is not None]
            floats = sum(pool.raw.numel() for pool in pools)
            self._memory_answers[device] = 4 * floats <= RESIDENT_SHARE * free_bytes(device)
        return self._memory_answers[device]


@dataclass(frozen=True)
class ClientData:
    """One client's training, validation and test samples."""

    train: Part
    validation: Part
    test: Part


@dataclass(frozen=True)
class AsRead:
    """Raw samples of all clients, with what turns them into inputs; a deployment writes them to a
    file for each site."""

    plain: bool
    """Whether clients train on the samples as read: not rotated, and the same in every round."""
    mean: Tensor
    """Mean of each channel or feature, float32; with `std` it normalises inputs."""
    std: Tensor
    strides: tuple[int, ...]
    """Memory strides of one sample; the rounding of convolutions depends on them."""
    parts: list[dict[str, tuple[Tensor, Tensor]]]
    """Samples and labels of each client, for `train`, `validation` and `test`."""
    public: Tensor | None

    @classmethod
    def of(cls, data: FederatedData) -> AsRead:
        """Collect the samples of all clients."""
        train = data._train
        pools = {"train": train, "validation": train, "test": data._test}
        parts = []
        for shares in zip(*data._shares, strict=True):
            samples = {}
            for (part, pool), share in zip(pools.items(), shares, strict=True):
                index = torch.from_numpy(share)
                samples[part] = pool.raw[index], pool.labels[index]
            parts.append(samples)
        is_plain = not any(data._angles) and data._drifting is None
        public = None if data._public is None else data._public.raw
        strides = tuple(train.raw.stride()[1:])
        return cls(
            is_plain,
            train.mean,
            train.std,
            strides,
            parts,
            public,
        )


def _strata(pool: Samples, task: Task) -> ndarray:
    """Return the class of each sample; all samples of a regression are of one class."""
    if task == "classification":
        return pool.labels.numpy()
    return np.zeros(len(pool.labels), np.int64)


def number_of(data: FederatedData, client: str) -> int:
    """Return the number of the client whose name, or number, is `client`; raise `BadInput` if there
    is none."""
    names = data.client_names
    client = composed(client)
    if client in names:
        return names.index(client)
    is_number = client.isdecimal() and int(client) < data.clients
    listed = f", or be a name: {catalogue.nearest_first(client, names)}" if names else ""
    check("client", client, is_number, f"it must lie in [0, {data.clients - 1}]{listed}")
    return int(client)


def angle_of(data: FederatedData, who: int) -> float:
    """Return the degrees by which images of a client are rotated; `who`: its number among all
    clients, including held-out ones."""
    return data._angles[data.numbers.index(who)] if who in data.numbers else 0.0


def samples_digest(data: FederatedData) -> str:
    """Return XXH3, in hexadecimal, of all samples and labels and of their assignment to clients."""
    state = xxhash.xxh3_128()
    tensors = [t for pool in (data._train, data._test) for t in (pool.raw, pool.labels)]
    shares = []
    for indices in data._shares:
        shares += [np.asarray(index, np.int64) for index in indices]
    for array in [*(tensor.numpy() for tensor in tensors), *shares]:
        state.update(str(array.shape).encode())
        state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()


def _class_counts(
    shares: list[ndarray],
    labels: ndarray,
    classes: int,
) -> ndarray:
    """Count samples by client and class, int64 [N, classes]; labels that are no target do not
    count."""
    sizes = [len(index) for index in shares]
    owner = np.repeat(np.arange(len(shares)), sizes)
    labels = labels[np.concatenate(shares)]
    owner = owner.reshape(-1, *[1] * (labels.ndim - 1))
    cells = (owner * classes + labels)[labels != NO_TARGET]
    counts = np.bincount(cells, minlength=len(shares) * classes)
    return counts.reshape(len(shares), classes)

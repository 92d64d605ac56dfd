"""Columns of a table as features: one-hot, imputed, and scaled by transformers of scikit-learn.

A transformer is fitted on training parts alone: on each client's own (`data.fitted: own`), or on
all of them together.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_lightning.configuration.components import Component
from fl_lightning.configuration.config import FLOAT32, DataConfig, check
from fl_lightning.configuration.tables import form_of
from fl_lightning.foundation import log
from fl_lightning.foundation.cells import is_empty
from fl_lightning.foundation.errors import BadInput
from fl_lightning.foundation.named import some

SCALERS = {
    "standard": "sklearn.preprocessing.StandardScaler",
    "robust": "sklearn.preprocessing.RobustScaler",
    "minmax": "sklearn.preprocessing.MinMaxScaler",
    "maxabs": "sklearn.preprocessing.MaxAbsScaler",
}
"""`data.scale` by name."""
NEWCOMER = -1
"""The number of a client that is new, by which its own fit is kept."""
PROBES = 64
"""Rows by which a scaler is found to be affine."""
FAR = 2.0**31
"""Where its slope is measured: between 0 and 1 a scaler of large numbers rounds it away."""
MERGED = 0.01
"""Share of a column's different values that float32 may merge without a word: two random numbers
are one by chance."""
BLURRED = 0.01
"""Share of a column's deviation that rounding to float32 may reach without a word. Ours: noise of a
hundredth."""
PROBED = 10_000
"""Rows that are looked at, evenly spaced. Ours: half a second for the features of MNIST."""
EXACT = ("float32", "float16", "bool", "uint8", "int8", "uint16", "int16")
"""Types whose values float32 holds as they are."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are features, and how cells become numbers."""

    names: list[str]
    """Of the columns, in order."""
    values: Mapping[str, list[str]]
    """The values of each column that is one-hot, in order."""
    form: Mapping[str, Any] = field(default_factory=dict)
    """How the table is written (`tables.form_of`)."""

    @property
    def numeric(self) -> np.ndarray:
        """Which features are numbers (others: whether the cell holds a certain value), bool
        (features,)."""
        return np.concatenate(
            [np.full(len(self.values.get(n, "1")), n not in self.values) for n in self.names]
        )

    @property
    def features(self) -> list[str]:
        """A name for each feature: the column, or `column=value`."""
        return [
            f
            for n in self.names
            for f in ([f"{n}={v}" for v in self.values[n]] if n in self.values else [n])
        ]

    @classmethod
    def of(
        cls,
        cells: Mapping[str, Sequence[str]],
        data: DataConfig,
    ) -> Columns:
        """Of cells by column; the values of a column are ordered as text, without empty cells."""
        one_hot = [name for name in data.one_hot or [] if name in cells]
        values = {n: sorted(v for v in {*cells[n]} if not is_empty(v)) for n in one_hot}
        return cls(list(cells), values, form_of(data))

    @classmethod
    def unknown(cls, shape: Sequence[int]) -> Columns | None:
        """Of a table that is not there and was made up: numbers (n, features) alone."""
        return cls([f"feature {k}" for k in range(shape[1])], {}) if len(shape) == 2 else None


def say_merged(names: Sequence[str], numbers: np.ndarray) -> None:
    """A line on columns of `numbers` (n, columns), called `names`, whose values float32 merges or
    rounds coarsely."""
    if numbers.dtype.name in EXACT or not len(numbers):
        return
    rows = numbers[:: -(-len(numbers) // PROBED)]
    rounded = (rows.astype(np.float32) != rows).any(axis=0)
    losses = {names[place]: _loss(rows[:, place]) for place in np.flatnonzero(rounded).tolist()}
    lossy = [name for name, loss in losses.items() if loss]
    if lossy:
        also = f" (and {some(lossy[1:])})" if lossy[1:] else ""
        instead = "subtract a constant in the file, such as the time of the first sample"
        log.say(f"data: {lossy[0]}{also}: {losses[lossy[0]]}; {instead}")


def say_merged_samples(name: str, samples: np.ndarray) -> None:
    """`say_merged` for the array `name`: by feature of vectors (n, features), of images and series
    all values."""
    vectors = samples.ndim == 2
    names = [f"feature {k} of {name}" for k in range(samples.shape[1])] if vectors else [name]
    say_merged(names, samples if vectors else samples.reshape(-1, 1))


def _loss(column: np.ndarray) -> str:
    """What float32 loses of the numbers in a column, in words; empty: nothing to speak of."""
    values = np.sort(column[np.isfinite(column)])
    stored = values.astype(np.float32)
    if not len(values):
        return ""
    before, after = (1 + int(np.count_nonzero(each[1:] != each[:-1])) for each in (values, stored))
    if after < (1 - MERGED) * before:
        return f"of {before} different values {after} are left in 32 bits"
    error = float(np.abs(stored.astype(np.float64) - values).max())
    deviation = float(values.std())
    coarse = before > 1 and error > BLURRED * deviation
    return (
        f"32 bits round its values by up to {error:.3g}, of a deviation of {deviation:.3g}"
        if coarse
        else ""
    )


class Preprocessing:
    """What makes inputs of features: an imputer and a scaler for all clients, or for each its
    own."""

    def __init__(
        self,
        data: DataConfig,
        columns: Columns | None,
        width: int,
    ) -> None:
        self.data = data
        self.columns = columns
        self.own = data.fitted == "own"
        self.numeric = columns.numeric if columns is not None else np.ones(width, bool)
        self.features = (
            columns.features if columns is not None else [f"feature {k}" for k in range(width)]
        )
        self._fits: dict[int, list[tuple[str, Any]]] = {}

    @classmethod
    def of(
        cls,
        data: DataConfig,
        columns: Columns | None,
        raw: np.ndarray,
    ) -> Preprocessing | None:
        """What fits on samples like `raw` (n, features); None: nothing is to be fitted.

        Raises:
            BadInput: samples are no vectors or no table's, or some belong to no client that could
                fit its own.
        """
        for key in ("one_hot", "impute", "dates"):
            valid = getattr(data, key) is None or columns is not None
            check(
                f"data.{key}",
                getattr(data, key),
                valid,
                "the samples are no columns of a table (source table)",
            )
        key = "data.impute" if data.impute is not None else "data.scale"
        value = data.impute or data.scale
        valid = value is not None or data.fitted == "shared"
        check(
            "data.fitted",
            data.fitted,
            valid,
            "nothing is fitted: it needs data.impute or data.scale",
        )
        if value is None:
            return None
        vectors = raw.ndim == 2 and raw.dtype != np.int64
        check(
            key,
            value,
            vectors,
            "the samples are no vectors: it belongs to tables and arrays of features",
        )
        common = data.public is not None or data.global_test
        requirement = (
            "public samples, and those of data.global_test, belong to no client: it must be shared"
        )
        check("data.fitted", data.fitted, data.fitted == "shared" or not common, requirement)
        return cls(data, columns, raw.shape[1])

    def all_of(
        self,
        train: np.ndarray,
        test: np.ndarray,
        shares: Sequence[Sequence[np.ndarray]],
        shared: np.ndarray,
        names: Sequence[str],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Training and test samples (n, features), which may be one array, after fits on training
        samples.

        Args:
            train, test: as they were read.
            shares: each client's training, validation and test samples; the last index `test`.
            shared: the training samples of the clients that take part.
            names: of the clients.
        """
        one = test is train
        if not self.own:
            self.fit(0, "all clients", train[np.sort(shared)])
            values = self.transformed(0, "all clients", train)
            return values, values if one else self.transformed(0, "all clients", test)
        out = np.zeros(train.shape, np.float32)
        other = out if one else np.zeros(test.shape, np.float32)
        for client, name in enumerate(names):
            self.fit(client, name, train[shares[0][client]])
            for values, raw, share in (
                (out, train, shares[0]),
                (out, train, shares[1]),
                (other, test, shares[2]),
            ):
                values[share[client]] = self.transformed(
                    client,
                    name,
                    raw[share[client]],
                )
        return out, other

    def fit(
        self,
        who: int,
        name: str,
        raw: np.ndarray,
    ) -> None:
        """Fit on the training samples `raw` (n, features) of client `who`, called `name`; of all
        with `shared`."""
        numbers = raw[:, self.numeric].astype(np.float64)
        steps: list[tuple[str, Any]] = []
        if self.data.impute is not None:
            from sklearn.impute import SimpleImputer

            without = np.isnan(numbers).all(0)
            feature = np.array(self.features)[self.numeric][without][:1]
            problem = f"column {''.join(feature)!r} of {name} has no value to impute from: drop it"
            instead = ", or data.fitted shared" if self.own else ""
            check(
                "data.impute",
                self.data.impute,
                not without.any(),
                problem + instead,
            )
            steps.append(("data.impute", SimpleImputer(strategy=self.data.impute)))
        if self.data.scale is not None:
            steps.append(("data.scale", _made(self.data.scale)))
        for key, step in steps:
            with _blamed(
                key,
                getattr(self.data, key.removeprefix("data.")),
                name,
            ):
                numbers = np.asarray(step.fit(numbers).transform(numbers))
        self._fits[who if self.own else 0] = steps

    def affine(self, who: int) -> tuple[list[float], list[list[float]]]:
        """What fills an empty cell of each feature, and centre, spread, slope and shift behind it
        (`_affine`).

        Raises:
            BadInput: the scaler does more than that.
        """
        width = int(self.numeric.sum())
        fills = np.zeros(len(self.numeric))
        rule = np.repeat(
            [[0.0], [1.0], [1.0], [0.0]],
            len(self.numeric),
            1,
        )
        for key, step in self._fits[who if self.own else 0]:
            if key == "data.impute":
                fills[self.numeric] = step.statistics_
                continue
            factors = _affine(step, width)
            requirement = (
                f"it does more than scale each column, which an exported file cannot: "
                f"{', '.join(SCALERS)}"
            )
            check("data.scale", self.data.scale, factors is not None, requirement)
            rule[:, self.numeric] = factors
        return fills.tolist(), rule.tolist()

    def transformed(
        self,
        who: int,
        name: str,
        raw: np.ndarray,
    ) -> np.ndarray:
        """Samples (n, features) of client `who`, float32 of the same shape."""
        if not len(raw):
            return raw.astype(np.float32)
        numbers = raw[:, self.numeric].astype(np.float64)
        out = raw.astype(np.float32)
        for key, step in self._fits[who if self.own else 0]:
            value = getattr(self.data, key.removeprefix("data."))
            with _blamed(key, value, name):
                values = np.asarray(step.transform(numbers), np.float64)
            problem = (
                f"it makes features of shape {values.shape[1:]} of {numbers.shape[1:]} on the part "
                f"of {name}"
            )
            check(key, value, values.shape == numbers.shape, problem)
            with np.errstate(invalid="ignore"):
                valid = bool((np.abs(values) < FLOAT32).all())
            check(key, value, valid, f"it makes numbers that are not finite on the part of {name}")
            numbers = values
        out[:, self.numeric] = numbers
        return out


def _affine(step: Any, width: int) -> np.ndarray | None:
    """Centre, spread, slope and shift (4, width) by which a scaler makes `(x - centre) / spread *
    slope + shift`.

    Bit by bit for those of scikit-learn, which compute in this order. None: it does more.
    """
    probes = np.random.default_rng(0).normal(
        0,
        100,
        (PROBES, width),
    )
    outputs = np.asarray(step.transform(probes), np.float64)
    zero = np.zeros(width)
    one = np.ones(width)
    if type(step).__module__.startswith("sklearn.preprocessing."):
        centre = getattr(step, "mean_", getattr(step, "center_", None))
        spread = getattr(step, "scale_", None)
        centre = zero if centre is None else centre
        spread = one if spread is None else spread
        rule = (
            (zero, one, spread, step.min_) if hasattr(step, "min_") else (centre, spread, one, zero)
        )
        if np.array_equal(outputs, (probes - rule[0]) / rule[1] * rule[2] + rule[3]):
            return np.array(rule)
    shift, far = (
        np.asarray(step.transform(np.full((1, width), value)), np.float64)[0]
        for value in (0.0, FAR)
    )
    slope = (far - shift) / FAR
    return (
        np.array([zero, one, slope, shift])
        if np.allclose(outputs, probes * slope + shift, 1e-5, 1e-5)
        else None
    )


@contextlib.contextmanager
def _blamed(
    key: str,
    value: object,
    name: str,
) -> Iterator[None]:
    """Whatever a transformer raises is bad input, which names whose part it failed on."""
    try:
        with warnings.catch_warnings():
            # on constant columns and the like: the numbers are checked
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        line = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(key, value, f"it fails on the part of {name}: {line}") from error


def _made(name: str) -> Any:
    """The transformer that a name or an import path (of a class or a function without arguments)
    gives."""
    path = SCALERS.get(name, name)
    transformers = (
        f"choose among {', '.join(SCALERS)}, or give the import path of a transformer of "
        f"scikit-learn"
    )
    check("data.scale", name, path.find(".") > 0, transformers)
    try:
        transformer = Component(path).build()
    except Exception as error:  # a user's function can raise anything
        line = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput("data.scale", name, f"it cannot be made: {line}; {transformers}") from error
    valid = callable(getattr(transformer, "fit", None)) and callable(
        getattr(transformer, "transform", None)
    )
    check("data.scale", name, valid, f"it has no fit and transform; {transformers}")
    return transformer

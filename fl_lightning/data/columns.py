"""Table columns as features: one-hot, imputed, and scaled by transformers of scikit-learn.

A transformer is fitted on training samples only: on those of each client (`data.fitted: own`), or
on those of all clients together.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy import ndarray

from fl_lightning.configuration.components import Component
from fl_lightning.configuration.config import FLOAT32, DataConfig, check
from fl_lightning.configuration.tables import form_of
from fl_lightning.foundation import log
from fl_lightning.foundation.cells import is_empty
from fl_lightning.foundation.errors import BadInput, first_line
from fl_lightning.foundation.named import some

SCALERS = {
    "standard": "sklearn.preprocessing.StandardScaler",
    "robust": "sklearn.preprocessing.RobustScaler",
    "minmax": "sklearn.preprocessing.MinMaxScaler",
    "maxabs": "sklearn.preprocessing.MaxAbsScaler",
}
"""Transformers by the short names of `data.scale`."""
NEWCOMER = -1
"""Key of the fit of a client that is new to the run."""
PROBES = 64
"""Random rows on which a scaler is tested for being affine."""
FAR = 2.0**31
"""Input at which a scaler's slope is measured: between 0 and 1, large shifts would round it
away."""
MERGED = 0.01
"""Share of a column's different values that float32 may merge without a warning: two random numbers
may coincide by chance."""
BLURRED = 0.01
"""Share of a column's deviation by which float32 may round its values without a warning. Ours: like
noise of a hundredth."""
PROBED = 10_000
"""Rows, evenly spaced, that are tested for the loss of digits. Ours: half a second for the features
of MNIST."""
EXACT = ("float32", "float16", "bool", "uint8", "int8", "uint16", "int16")
"""Types whose values float32 holds exactly."""


@dataclass(frozen=True)
class Columns:
    """The feature columns of a table, and how their cells become numbers."""

    names: list[str]
    """The column names, in order."""
    values: Mapping[str, list[str]]
    """The values of each one-hot column, in order."""
    form: Mapping[str, Any] = field(default_factory=dict)
    """How numbers and dates are written in the table (`tables.form_of`)."""

    @property
    def pairs(self) -> list[tuple[str, str | None]]:
        """The column and the one-hot value of each feature; the value of a numeric feature is
        None."""
        pairs: list[tuple[str, str | None]] = []
        for name in self.names:
            values = self.values.get(name, [None])
            pairs += [(name, value) for value in values]
        return pairs

    @property
    def numeric(self) -> ndarray:
        """Whether each feature is numeric, bool (features,)."""
        return np.array([value is None for _, value in self.pairs], bool)

    @property
    def features(self) -> list[str]:
        """The name of each feature: the column, or `column=value`."""
        return [name if value is None else f"{name}={value}" for name, value in self.pairs]

    @classmethod
    def of(
        cls,
        cells: Mapping[str, Sequence[str]],
        data: DataConfig,
    ) -> Columns:
        """Build the columns from `cells`, the cell texts by column.

        The values of a one-hot column are sorted as text. Empty cells get no feature of their own.
        """
        values = {}
        for name in data.one_hot or []:
            if name in cells:
                filled = [cell for cell in set(cells[name]) if not is_empty(cell)]
                values[name] = sorted(filled)
        return cls(list(cells), values, form_of(data))

    @classmethod
    def numbered(cls, shape: Sequence[int]) -> Columns | None:
        """Build columns with numbers for names, for a table that was made up in a smoke run.

        Returns None unless the shape of its samples is (n, features).
        """
        if len(shape) != 2:
            return None
        names = [f"feature {k}" for k in range(shape[1])]
        return cls(names, {})


def say_merged(names: Sequence[str], numbers: ndarray) -> None:
    """Print a warning if a column loses digits in float32: different values become equal, or are
    rounded coarsely (`MERGED`, `BLURRED`).

    Args:
        names: names of the columns.
        numbers: values of the columns as they were read, (n, columns).
    """
    if numbers.dtype.name in EXACT or not len(numbers):
        return
    rows = numbers[:: -(-len(numbers) // PROBED)]
    rounded = (rows.astype(np.float32) != rows).any(axis=0)
    losses = {}
    for place in np.flatnonzero(rounded).tolist():
        loss = _loss(rows[:, place])
        if loss:
            losses[names[place]] = loss
    if losses:
        first, *other_names = losses
        also = f" (and {some(other_names)})" if other_names else ""
        remedy = "subtract a constant in the file, such as the time of the first sample"
        log.say(f"data: {first}{also}: {losses[first]}; {remedy}")


def say_merged_samples(name: str, samples: ndarray) -> None:
    """Print the warning of `say_merged` for the array `name`: by feature for vectors (n, features),
    else for all values together."""
    if samples.ndim != 2:
        say_merged([name], samples.reshape(-1, 1))
        return
    names = [f"feature {k} of {name}" for k in range(samples.shape[1])]
    say_merged(names, samples)


def _loss(column: ndarray) -> str:
    """Describe what float32 loses of a column's numbers; empty if that is negligible."""
    finite = column[np.isfinite(column)]
    values = np.unique(finite)
    stored = values.astype(np.float32)
    count = len(values)
    stored_count = len(np.unique(stored))
    if stored_count < (1 - MERGED) * count:
        return f"of {count} different values {stored_count} are left in 32 bits"
    if count < 2:
        return ""
    errors = np.abs(stored - values.astype(np.float64))
    error = float(errors.max())
    deviation = float(finite.std())
    if error <= BLURRED * deviation:
        return ""
    return f"32 bits round its values by up to {error:.3g}, of a deviation of {deviation:.3g}"


class Preprocessing:
    """Imputer and scaler of features: one for all clients, or one for each."""

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
    def from_config(
        cls,
        data: DataConfig,
        columns: Columns | None,
        raw: ndarray,
    ) -> Preprocessing | None:
        """Build the unfitted imputer and scaler that `data` asks for; None if it asks for none.

        Args:
            data: the configuration.
            columns: columns of the table; None if the samples come from no table.
            raw: the samples, (n, features).

        Raises:
            BadInput: the samples are not vectors, or not from a table; or each client is to fit its
                own, and some samples belong to no client.
        """
        requirement = "only tables have it (data.source table): remove it"
        for key in ("one_hot", "impute", "dates"):
            value = getattr(data, key)
            check(f"data.{key}", value, value is None or columns is not None, requirement)
        is_own = data.fitted == "own"
        key = "data.scale" if data.impute is None else "data.impute"
        value = data.impute or data.scale
        requirement = "nothing is to be fitted: set data.impute or data.scale, or remove it"
        check("data.fitted", data.fitted, value is not None or not is_own, requirement)
        if value is None:
            return None
        are_vectors = raw.ndim == 2 and raw.dtype != np.int64
        requirement = "only vectors of features can have it, and the samples are none: remove it"
        check(key, value, are_vectors, requirement)
        has_common = data.public is not None or data.global_test
        requirement = (
            "public samples, and those of data.global_test, belong to no client: set it to shared"
        )
        check("data.fitted", data.fitted, not is_own or not has_common, requirement)
        return cls(data, columns, raw.shape[1])

    def fit_transform(
        self,
        train: ndarray,
        test: ndarray,
        shares: Sequence[Sequence[ndarray]],
        shared: ndarray,
        names: Sequence[str],
    ) -> tuple[ndarray, ndarray]:
        """Fit on the training samples; return transformed training and test samples, (n, features).

        Args:
            train, test: the samples as they were read; they may be one array, and then the two
                results are also one array.
            shares: each client's indices for training and validation (into `train`) and for test
                (into `test`).
            shared: indices of the training samples of all clients that take part; with
                `data.fitted` shared, one imputer and scaler is fitted on them.
            names: names of the clients, for errors.
        """
        is_one = test is train
        if not self.own:
            self.fit(0, "all clients", train[np.sort(shared)])
            values = self.transformed(0, "all clients", train)
            return values, values if is_one else self.transformed(0, "all clients", test)
        train_values = np.zeros(train.shape, np.float32)
        test_values = train_values if is_one else np.zeros(test.shape, np.float32)
        for client, name in enumerate(names):
            trained, validated, tested = (part[client] for part in shares)
            self.fit(client, name, train[trained])
            for share in (trained, validated):
                train_values[share] = self.transformed(client, name, train[share])
            test_values[tested] = self.transformed(client, name, test[tested])
        return train_values, test_values

    def fit(
        self,
        who: int,
        name: str,
        raw: ndarray,
    ) -> None:
        """Fit on raw training samples (n, features).

        Args:
            who: number of the client; ignored if one fit serves all clients.
            name: name of the client, for errors.
            raw: the samples.
        """
        numbers = raw[:, self.numeric].astype(np.float64)
        steps: list[tuple[str, Any]] = []
        if self.data.impute is not None:
            from sklearn.impute import SimpleImputer

            is_empty_column = np.isnan(numbers).all(0)
            empty = np.array(self.features)[self.numeric][is_empty_column]
            remedy = "drop it, or data.fitted shared" if self.own else "drop it"
            problem = f"column {''.join(empty[:1])!r} of {name} has no value to impute from"
            check("data.impute", self.data.impute, not len(empty), f"{problem}: {remedy}")
            steps.append(("impute", SimpleImputer(strategy=self.data.impute)))
        if self.data.scale is not None:
            steps.append(("scale", _transformer(self.data.scale)))
        for key, step in steps:
            with _blamed(f"data.{key}", getattr(self.data, key), name):
                numbers = np.asarray(step.fit(numbers).transform(numbers))
        self._fits[who if self.own else 0] = steps

    def affine(
        self,
        who: int,
    ) -> tuple[list[float], list[list[float]]]:
        """Return client `who`'s imputer and scaler as numbers, for an export.

        Returns the value by which each feature's empty cells are filled, and four lists with a
        number for each feature: centre, spread, slope and shift. The scaled feature is
        (x - centre) / spread * slope + shift; scikit-learn's scalers compute in this order, so an
        export that does too is equal to the bit.

        Raises:
            BadInput: the scaler is not affine.
        """
        width = len(self.numeric)
        fills = np.zeros(width)
        rule = np.repeat([[0.0], [1.0], [1.0], [0.0]], width, 1)
        steps = dict(self._fits[who if self.own else 0])
        if "impute" in steps:
            fills[self.numeric] = steps["impute"].statistics_
        if "scale" in steps:
            factors = _affine(steps["scale"], int(self.numeric.sum()))
            requirement = (
                f"an exported file cannot do more than scale each column, as these do: "
                f"{', '.join(SCALERS)}"
            )
            check("data.scale", self.data.scale, factors is not None, requirement)
            rule[:, self.numeric] = factors
        return fills.tolist(), rule.tolist()

    def transformed(
        self,
        who: int,
        name: str,
        raw: ndarray,
    ) -> ndarray:
        """Apply client `who`'s fit to raw samples (n, features); returns float32 of the same shape.
        `name`: the client's, for errors."""
        samples = raw.astype(np.float32)
        if not len(raw):
            return samples
        numbers = raw[:, self.numeric].astype(np.float64)
        for step_name, step in self._fits[who if self.own else 0]:
            key = f"data.{step_name}"
            value = getattr(self.data, step_name)
            with _blamed(key, value, name):
                values = np.asarray(step.transform(numbers), np.float64)
            shapes = f"features of shape {values.shape[1:]} from {numbers.shape[1:]}"
            problem = f"it makes {shapes} for {name}: choose a scaler that keeps the shape"
            check(key, value, values.shape == numbers.shape, problem)
            with np.errstate(invalid="ignore"):
                is_finite = bool((np.abs(values) < FLOAT32).all())
            problem = f"it makes numbers that are not finite for {name}"
            check(key, value, is_finite, problem)
            numbers = values
        samples[:, self.numeric] = numbers
        return samples


def _affine(step: Any, width: int) -> ndarray | None:
    """Return centre, spread, slope and shift (4, width) of a scaler that computes `(x - centre) /
    spread * slope + shift`; None if it computes something else.

    The result is exact to the bit for scikit-learn's scalers, which compute in this order.
    """
    probes = np.random.default_rng(0).normal(0, 100, (PROBES, width))
    outputs = np.asarray(step.transform(probes), np.float64)
    zeros = np.zeros(width)
    ones = np.ones(width)
    if type(step).__module__.startswith("sklearn.preprocessing."):
        spread = getattr(step, "scale_", None)
        spread = ones if spread is None else spread
        centre = getattr(step, "mean_", getattr(step, "center_", None))
        rule = (zeros if centre is None else centre, spread, ones, zeros)
        if hasattr(step, "min_"):
            rule = (zeros, ones, spread, step.min_)
        scaled = (probes - rule[0]) / rule[1]
        if np.array_equal(outputs, scaled * rule[2] + rule[3]):
            return np.array(rule)
    shift = np.asarray(step.transform(zeros[None]), np.float64)[0]
    far = np.asarray(step.transform(np.full((1, width), FAR)), np.float64)[0]
    slope = (far - shift) / FAR
    if not np.allclose(outputs, probes * slope + shift, 1e-5, 1e-5):
        return None
    return np.array([zeros, ones, slope, shift])


@contextlib.contextmanager
def _blamed(
    key: str,
    value: object,
    name: str,
) -> Iterator[None]:
    """Turn any exception of a transformer into `BadInput` that names the client, `name`."""
    try:
        with warnings.catch_warnings():
            # constant columns and the like: `transformed` checks the numbers
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        line = first_line(error)
        raise BadInput(key, value, f"it fails on the samples of {name}: {line}") from error


def _transformer(name: str) -> Any:
    """Build the transformer that a short name or an import path (of a class, or of a function
    without arguments) stands for."""
    path = SCALERS.get(name, name)
    choices = (
        f"choose among {', '.join(SCALERS)}, or give the import path of a transformer of "
        f"scikit-learn"
    )
    check("data.scale", name, path.find(".") > 0, choices)
    try:
        transformer = Component(path).build()
    except Exception as error:  # a user's function can raise anything
        line = first_line(error)
        raise BadInput("data.scale", name, f"it cannot be made: {line}; {choices}") from error
    methods = [getattr(transformer, method, None) for method in ("fit", "transform")]
    requirement = f"it has no fit and transform; {choices}"
    check("data.scale", name, all(map(callable, methods)), requirement)
    return transformer

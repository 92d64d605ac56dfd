"""One client's model on samples as a user has them: what the data do to them, the network, the method's own outputs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.config import check
from fl_lightning.core.client import Client
from fl_lightning.methods.base import Method


class Predictor(nn.Module):
    """A trained client's model, ready for raw samples.

    Args:
        client: the client, with the buffers of its model.
        kind: of model, as which the method scores it.
        vector: the model (D,).
    """

    def __init__(self, client: Client, kind: str, vector: Tensor) -> None:
        super().__init__()
        run, method = client.run, type(client.run.method)
        self.kind, self.task, self.class_names = kind, run.data.task, list(run.data.class_names)
        """The kind of model; classification or regression; names of the classes, in order."""
        self.input_shape, self._dtype = run.data.input_shape, run.dtype
        self._tokens = run.data.text is not None
        self._reading, self._number = run.data.reading, run.data.numbers[client.id]
        for name, tensor in zip(("mean", "std"), run.data.normalisation, strict=True):
            self.register_buffer(name, tensor.clone())
        client.ready(kind, vector)
        self._client: tuple[Client, Tensor] | None = None
        self.network: nn.Module = copy.deepcopy(client.module.model).eval()
        for tensor in [*self.network.parameters(), *self.network.buffers()]:
            tensor.data = tensor.data.clone()  # memory of its own, no longer a piece of the vector
        if method.outputs is not Method.outputs or method.prepare is not Method.prepare:
            self._client = client, vector  # its scores are more than the network's

    def forward(self, x: Any) -> Tensor:
        """Class scores (n, classes), or numbers (n, 1), of raw samples.

        Args:
            x: tensor or array of n samples, as the data source had them: (n, features), (n, channels, height, width)
                or, as in `.npz` files, (n, height, width[, channels]); tokens int64 (n, length); a table's DataFrame.

        Raises:
            BadInput: they have another shape, or lack a column.
        """
        inputs = self.inputs(x)
        if self._client is None:
            scores: Tensor = self.network(inputs)
            return scores
        client, vector = self._client
        client.ready(self.kind, vector)
        client.module.model.eval()
        with torch.no_grad():
            return client.run.method.outputs(client, inputs, self.kind)

    def inputs(self, x: Any) -> Tensor:
        """Raw samples as the network takes them: encoded, imputed and scaled as in training, or normalised."""
        raw = self._shaped(self._encoded(x))
        if self._reading.preprocessing is not None:
            raw = self._reading.preprocessing.transformed(self._number, f"client {self._number}", raw)
        tensor = torch.from_numpy(np.ascontiguousarray(raw))
        if tensor.dtype == torch.int64:
            return tensor
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        return ((tensor.to(mean.device).float() - mean) / std).to(self._dtype)

    def _encoded(self, x: Any) -> np.ndarray:
        """Columns of a DataFrame as numbers, one-hot where the run had them so."""
        columns = self._reading.columns
        if columns is None or not hasattr(x, "columns"):
            return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
        absent = [name for name in columns.names if name not in x.columns]
        check("x", list(x.columns), not absent, f"it lacks the column {', '.join(absent)}")
        return columns.encoded(x[columns.names].astype(str).to_numpy().tolist())

    def _shaped(self, raw: np.ndarray) -> np.ndarray:
        """Samples in torch's layout; numbers that are no bytes and no tokens as float32."""
        wanted = np.int64 if self._tokens else raw.dtype if raw.dtype == np.uint8 else np.float32
        if raw.shape[1:] != self.input_shape and raw.ndim == 3:
            raw = raw[:, None]
        if raw.shape[1:] != self.input_shape and raw.ndim == 4:
            raw = raw.transpose(0, 3, 1, 2)
        fine = raw.ndim > 0 and raw.shape[1:] == self.input_shape
        check("x", f"samples of shape {raw.shape[1:]}", fine, f"the run's samples have the shape {self.input_shape}")
        return raw.astype(wanted)

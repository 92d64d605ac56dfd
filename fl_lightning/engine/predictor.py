"""Predicts raw samples with one client's model, including preprocessing and the method's
outputs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core import Client
from fl_lightning.exporting import plain
from fl_lightning.exporting.about import described
from fl_lightning.foundation.errors import BadInput
from fl_lightning.methods.base import Method


class Predictor(nn.Module):
    """A trained client's model, ready for raw samples.

    Args:
        client: the client, with the buffers of its model.
        kind: the kind of model (`before`, `after`, ...), as which the method computes its scores.
        vector: the model (D,).
    """

    def __init__(
        self,
        client: Client,
        kind: str,
        vector: Tensor,
    ) -> None:
        super().__init__()
        run = client.run
        method = type(client.run.method)
        self.kind = kind
        self.task = run.data.task
        """`classification` or `regression`."""
        self.class_names = list(run.data.class_names)
        """Names of the classes in the order of the scores."""
        self._reading = run.data.reading
        self._number = run.data.numbers[client.id]
        self._dtype = run.dtype
        self._about = described(run.data, self._number, fitted=False)
        client.ready(kind, vector)
        self._client: tuple[Client, Tensor] | None = None
        self.network: nn.Module = copy.deepcopy(client.module.model).eval()
        for tensor in [*self.network.parameters(), *self.network.buffers()]:
            tensor.data = tensor.data.clone()  # no longer a view of the vector
        if method.outputs is not Method.outputs or method.prepare is not Method.prepare:
            self._client = client, vector  # the method's scores are not the network's

    def forward(self, x: Any) -> Tensor:
        """Return class scores (n, classes) of raw samples, or predicted numbers (n, 1).

        Args:
            x: n samples in the form of the data source: a table's DataFrame, or a list of rows
                (`exporting.plain.raw`); tensor or array (n, features), (n, channels, height, width)
                or (n, height, width[, channels]); texts, or their tokens (n, length).

        Raises:
            BadInput: the samples have another shape, lack a column, or have a cell that is not a
                number.
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
        """Convert raw samples to the network's input tensor: numbers from texts or table cells,
        preprocessed and scaled as in training."""
        rows = x
        if hasattr(x, "to_dict"):
            rows = x.astype(object).where(x.notna(), None).to_dict("records")
        try:
            raw = plain.raw(self._about, rows)
            if self._reading.preprocessing is not None:
                transformed = self._reading.preprocessing.transformed(
                    self._number, f"client {self._number}", raw.numpy()
                )
                raw = torch.from_numpy(transformed)
            inputs = plain.scaled(self._about, raw)
        except ValueError as error:
            raise BadInput("x", type(x).__name__, str(error)) from None
        device = next((p.device for p in self.network.parameters()), torch.device("cpu"))
        return inputs.to(device, self._dtype if inputs.is_floating_point() else None)

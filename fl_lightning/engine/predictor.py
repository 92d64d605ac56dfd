"""One client's model for raw samples: preprocessing, the network, and the method's own outputs."""

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
        kind: of model, as which the method scores it.
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
        """The kind of model."""
        self.task = run.data.task
        """`classification` or `regression`."""
        self.class_names = list(run.data.class_names)
        """In the order of the scores."""
        self._reading = run.data.reading
        self._number = run.data.numbers[client.id]
        self._dtype = run.dtype
        self._about = described(run.data, self._number, fitted=False)
        client.ready(kind, vector)
        self._client: tuple[Client, Tensor] | None = None
        self.network: nn.Module = copy.deepcopy(client.module.model).eval()
        for tensor in [*self.network.parameters(), *self.network.buffers()]:
            tensor.data = tensor.data.clone()  # memory of its own, no longer a piece of the vector
        if method.outputs is not Method.outputs or method.prepare is not Method.prepare:
            self._client = client, vector  # the method's scores are not the network's

    def forward(self, x: Any) -> Tensor:
        """Class scores (n, classes), or numbers (n, 1), of raw samples.

        Args:
            x: n samples as the data source had them: a table's DataFrame, or a list of rows
                (`exporting.plain.raw`); tensor or array (n, features), (n, channels, height, width)
                or (n, height, width[, channels]); texts, or their tokens (n, length).

        Raises:
            BadInput: they have another shape, lack a column, or a cell is no number.
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
        """Raw samples as the network takes them: read as an exported file reads them, and scaled as
        in training."""
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

"""BLS, bidirectional layer selection: send only the layers worth sending (Zhi et al., the journal
extension of KAPC).

Server side: a layer in which a client's weight on itself is already great is not sent to it. Client
side: only the first Omega layers are sent back, Omega chosen by a generalisation bound (Eq. 29).
Layers that are not sent stay stale on the server.
"""

import contextlib
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.callbacks.base import Transform
from fl_lightning.configuration.config import check
from fl_lightning.configuration.ranges import NonNegativeFloat
from fl_lightning.core import Client, Layout, Payload, RunContext, Tensors
from fl_lightning.foundation.device import wide
from fl_lightning.foundation.errors import BadInput


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of the L layers, which enter the generalisation bound of `bound_holds`: n_l, the number
    of columns of each weight matrix, and d_l, the number of outputs of each layer; each (L,)."""

    columns: np.ndarray
    outputs: np.ndarray


def bound_holds(
    omega: int,
    B: np.ndarray,
    tau: np.ndarray,
    B_now: np.ndarray,
    tau_now: np.ndarray,
    sizes: LayerSizes,
    classes: int,
) -> bool:
    """Return whether BLS's generalisation bound (Eq. 29) holds if only layers 1..omega are sent.

    The bound is L d_omega M^(omega) / (omega c 2^(L - omega)) prod_j B^_j / B_j  <=  M(L), where
    M(l) = tau_l / (2 B_l) + sqrt(n_l) M(l - 1). B^ and M^ are computed from this round's norms, B
    and M from the greatest norms so far. Logarithms are compared, since products reach e^65 and
    more.

    Args:
        omega: number of layers that would be sent, 1..L.
        B: greatest ||w^l|| so far, (L,).
        tau: greatest ||w^l - s^l|| so far, (L,).
        B_now: this round's ||w^l||, (L,).
        tau_now: this round's ||w^l - s^l||, (L,); 0 for a layer without regulariser.
        sizes: n_l and d_l of each layer.
        classes: c, the number of classes in the client's data.
    """
    L = len(B)
    bound = (
        math.log(L)
        + math.log(sizes.outputs[omega - 1])
        + _log_m(
            omega,
            B_now,
            tau_now,
            sizes,
        )
    )
    bound -= math.log(omega) + math.log(classes) + (L - omega) * math.log(2)
    bound += float(np.log(B_now).sum() - np.log(B).sum())
    return bound <= _log_m(L, B, tau, sizes)


def _log_m(
    layers: int,
    B: np.ndarray,
    tau: np.ndarray,
    sizes: LayerSizes,
) -> float:
    """Return log M(layers); minus infinity if none of these layers has a regulariser."""
    value = -math.inf
    for k in range(layers):
        term = math.log(tau[k]) - math.log(2 * B[k]) if tau[k] > 0 else -math.inf
        value = float(np.logaddexp(term, 0.5 * math.log(sizes.columns[k]) + value))
    return value


def search(
    omega: int,
    fits: list[bool],
    direction: Literal["swapped", "printed"],
    step_back: bool,
    largest: Literal["L-1", "L"],
) -> int:
    """Return Omega, the number of layers to send. The search starts at the last round's Omega and
    changes it by 1 until the bound begins, or ceases, to hold.

    Args:
        omega: Omega of the client's last round.
        fits: whether the bound holds for Omega = 1..L; `fits[0]` is for Omega 1.
        direction: `swapped`: layers are added while the bound holds, removed while it does not.
            `printed`: the opposite, as the paper's algorithm is printed; the search then often ends
            at the least or the greatest Omega.
        step_back: if the search stops at an Omega that violates the bound, return the Omega before
            that.
        largest: the greatest Omega; the least is 1.
    """
    most = len(fits) if largest == "L" else max(len(fits) - 1, 1)
    start = omega = min(max(omega, 1), most)
    fit = fits[omega - 1]
    move = 1 if fit == (direction == "swapped") else -1
    while 1 <= omega + move <= most and fits[omega - 1] == fit:
        omega += move

    return omega - move if step_back and omega != start and not fits[omega - 1] else omega


@dataclass
class LayerSelection(Transform):
    """Bidirectional layer selection: client and server each send only a part of the layers.

    Args:
        mu: on the server: a layer is not sent to a client whose weight on itself is at least mu in
            this layer. 0.7: the journal's cost study. null: send all layers.
        client: on clients: upload only the first Omega layers. If false, upload all.
        search: direction in which Omega is searched. `printed`, as the paper prints the algorithm,
            ends at the least or the greatest Omega; `swapped` does the opposite
            (docs/decisions/0010).
        step_back: take the last Omega that satisfies the bound, not the first that violates it.
        width: d_l of Eq. 29 for a convolution: its `channels`, or the `numbers` it puts out for a
            sample (channels x height x width). channels: our choice, the paper leaves it open
            (docs/decisions/0010).
        largest: the greatest Omega: `L-1`, or `L` (paper), with L layers. A client updates the
            greatest norms in Eq. 29, B and tau, only if it sent all L layers in the round before:
            with `L-1` never after its first round. L-1: our choice
            (docs/results/layer-selection.md).
    """

    changes_download = changes_upload = client_memory = deployed = True

    mu: NonNegativeFloat | None = 0.7
    client: bool = True
    search: Literal["swapped", "printed"] = "swapped"
    step_back: bool = False
    largest: Literal["L-1", "L"] = "L-1"
    width: Literal["channels", "numbers"] = "channels"

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` if the method's relation has no weights for each layer."""
        requirement = "it needs a method with weights for each layer, such as kapc"
        check(self.config_key, run.method_name, run.relation.per_layer, requirement)

    def init_client(self, run: RunContext) -> Tensors:
        """Return the bounds B and tau, the last Omega (L: all layers), and which layers the server
        has ever received."""
        L = len(run.layer_names)
        zeros = torch.zeros(L, dtype=torch.float64)
        return {
            "selection.B": zeros,
            "selection.tau": zeros.clone(),
            "selection.omega": torch.tensor(L),
            "selection.received": torch.zeros(L, dtype=torch.bool),
        }

    def on_download(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Leave out layers in which the client's weight on itself is great, and layers that the
        client has never uploaded."""
        send = np.ones(len(client.layout.layers), dtype=bool)
        if self.mu is not None:
            if payload.own_weights is None:
                problem = "does not say how much of a download is the client's own"
                requirement = f"{client.run.method_name} {problem}; set it to null"
                raise BadInput("callbacks.layerselection.mu", self.mu, requirement)
            send &= payload.own_weights < self.mu
        if client.rounds > 0:
            send &= client.memory["selection.received"].numpy()
        payload.sent &= send[[b.layer for b in client.layout.blocks]]

    def on_upload(
        self,
        client: Client,
        payload: Payload,
    ) -> None:
        """Choose Omega and upload layers 1..Omega only. Normalisations are always sent, as the
        papers' byte counts show."""
        memory = client.memory
        L = len(client.layout.layers)
        omega = self._omega(client) if self.client and L > 1 else L
        memory["selection.omega"] = torch.tensor(omega)
        payload.sent &= client.layout.mask(lambda b: b.layer < omega or b.normalisation)
        memory["selection.received"] = memory["selection.received"] | (torch.arange(L) < omega)

    def _omega(self, client: Client) -> int:
        """Return Omega, the number of layers that a client receives and sends in this round.

        In a client's first round, and after one with all L layers, the greatest norms are updated
        and the search begins at L - 1; else the bound (Eq. 29) decides.
        """
        memory = client.memory
        L = len(client.layout.layers)
        omega = int(memory["selection.omega"])
        B_now, tau_now = self._norms(client)
        B = memory["selection.B"].numpy()
        tau = memory["selection.tau"].numpy()
        if client.rounds == 0 or omega == L:
            # all layers were regularised: update the bounds, and send all but the last layer
            memory["selection.B"] = torch.from_numpy(np.maximum(B, B_now))
            memory["selection.tau"] = torch.from_numpy(np.maximum(tau, tau_now))
            return L - 1
        classes = int((client.class_counts > 0).sum())
        sizes = _sizes(client.layout)
        if self.width == "numbers":
            sizes = replace(sizes, outputs=_output_sizes(client, sizes.outputs))
        fits = [
            bound_holds(
                o,
                B,
                tau,
                B_now,
                tau_now,
                sizes,
                classes,
            )
            for o in range(1, L + 1)
        ]
        return search(
            omega,
            fits,
            self.search,
            self.step_back,
            self.largest,
        )

    def _norms(self, client: Client) -> tuple[np.ndarray, np.ndarray]:
        """Return ||w^l|| and ||w^l - s^l|| of the client's current model, each (L,); the latter is
        0 for layers that were not received."""
        layout = client.layout
        model = client["model"]
        received = client.payload
        L = len(layout.layers)
        numbers = layout.sizes * layout.is_layer_weight
        client.flops += int(2 * numbers.sum() + 3 * (numbers * received.sent).sum())
        squares = torch.zeros(2, L, dtype=wide(model.device), device=model.device)
        weight, distance = squares
        for block, is_sent in zip(layout.blocks, received.sent, strict=True):
            if block.normalisation or block.kind == "buffer":
                continue
            w = model[block.columns]
            weight[block.layer] += w.to(squares).square().sum()
            if is_sent:
                difference = w - received.vector[block.columns]
                distance[block.layer] += difference.to(squares).square().sum()
        weight, distance = squares.cpu()  # the device is waited for once
        return weight.sqrt().clamp_min(1e-12).numpy(), distance.sqrt().numpy()


def _sizes(layout: Layout) -> LayerSizes:
    """Return the columns (in_channels * k * k) and outputs of each layer's largest parameter."""
    L = len(layout.layers)
    columns = np.ones(L)
    outputs = np.ones(L)
    biggest = np.zeros(L)
    for b in layout.blocks:
        if b.kind == "parameter" and not b.normalisation and b.size > biggest[b.layer]:
            biggest[b.layer] = b.size
            outputs[b.layer] = b.shape[0] if b.shape else 1
            columns[b.layer] = max(1.0, b.size / outputs[b.layer])
    return LayerSizes(columns, outputs)


def _output_sizes(client: Client, outputs: np.ndarray) -> np.ndarray:
    """Return how many numbers each layer puts out for a sample, (L,); `outputs` for a layer that is
    not called as a module."""
    network = client.bind().model
    widths = dict(zip(client.layout.layers, outputs, strict=True))

    def note(
        name: str,
        _: nn.Module,
        __: Any,
        output: Any,
    ) -> None:
        if isinstance(output, Tensor):
            widths[name] = float(output[0].numel())

    x, _ = next(iter(client.data.train.batches(1)))
    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for name, module in network.named_modules():
            if name in widths:
                hook = module.register_forward_hook(partial(note, name))
                hooks.callback(hook.remove)
        network.eval()(x)
    return np.array([*widths.values()])

"""Low-rank adapters (LoRA): which blocks are A and B, and the error of averaging them
separately."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl_lightning.callbacks.base import Observer
from fl_lightning.configuration.config import check
from fl_lightning.core import Block, GroupServer, RunContext, Server
from fl_lightning.foundation.device import wide


def is_a(block: Block) -> bool:
    """Whether a block is an adapter's A, of shape (r, inputs), which is drawn at random (lora_A in
    `peft`)."""
    return ".lora_A." in block.name


def is_b(block: Block) -> bool:
    """Whether a block is an adapter's B, of shape (outputs, r), which starts at 0."""
    return ".lora_B." in block.name


def check_adapters(run: RunContext) -> None:
    """Raise `BadInput` unless every client's network has adapters."""
    for group, model in zip(run.groups, run.config.models, strict=True):
        adapters = getattr(model.component, "adapters", None)
        check(
            "model.adapters",
            adapters,
            any(map(is_a, group.layout.blocks)),
            f"{run.method_name} needs low-rank adapters in {group.name}; add some, such as "
            "--model.adapters.rank 8",
        )


class AdapterError(Observer):
    """Observer that adds `adapter_error` to a round's metrics: the error of averaging the factors A
    and B of low-rank adapters separately (see `on_aggregate`). It is attached automatically to
    every run whose networks have adapters."""

    config_key = "model.adapters"

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` if clients of one network upload adapters of different ranks."""
        ranks: dict[str, set[int]] = {}
        for group, model in zip(run.groups, run.config.models, strict=True):
            of_network = ranks.setdefault(model.component.class_path, set())
            for block, is_uploaded in zip(group.layout.blocks, group.up_mask, strict=True):
                if is_uploaded and is_a(block):
                    of_network.add(block.shape[0])
                if is_uploaded and is_b(block):
                    of_network.add(block.shape[1])
            check(
                "model.adapters.rank",
                sorted(of_network),
                len(of_network) <= 1,
                f"{run.method_name} cannot mix adapters of different ranks; give all clients of a "
                "network the same rank",
            )

    def on_aggregate(self, run: RunContext, server: Server) -> None:
        """Add `adapter_error`: the relative error of averaging the uploaded A and B separately, as
        a mean over adapted layers.

        For a layer: ||sum_i p_i B_i A_i - (sum_i p_i B_i) (sum_i p_i A_i)|| / ||sum_i p_i B_i
        A_i||, with Frobenius norms and the relation's weights p_i of the clients that answered
        (FFA-LoRA's paper, section 3). Nothing is added if A or B is not sent, or if the relation
        has no global model. Computing the error is not counted among the method's operations.
        """
        if not run.relation.is_global:
            return
        counted = server.flops
        errors = [error for group in server.groups for error in _errors(group)]
        server.flops = counted
        if errors:
            server.metrics["adapter_error"] = sum(errors) / len(errors)


def adapter_callbacks(models: Sequence[nn.Module]) -> list[Observer]:
    """Return the observers that every run of these networks gets beside the configured ones."""
    adapted = any(".lora_A." in name for model in models for name in dict(model.named_parameters()))
    return [AdapterError()] if adapted else []


def _errors(group: GroupServer) -> list[float]:
    """The error of each layer whose A and B are sent both ways; empty if no client has answered."""
    travels = group.group.up_mask & group.group.down_mask
    blocks = zip(group.layout.blocks, travels, strict=True)
    travelling = {block.name: block for block, both_ways in blocks if both_ways}
    pairs = []
    for block in filter(is_a, travelling.values()):
        b = travelling.get(block.name.replace("lora_A", "lora_B"))
        if b is not None:
            pairs.append((block, b))
    weighed = group.weighed
    if not pairs or not group.answered or weighed is None or len(weighed.weights) > 1:
        return []
    weights = weighed.weights[0, 0]
    of_means = _products(group.mean(weights, group.answered), pairs)
    exact = [torch.zeros_like(product) for product in of_means]
    for client, p in zip(group.answered, weights.tolist(), strict=True):
        for total, product in zip(exact, _products(group.vector(client), pairs), strict=True):
            total += p * product
    errors = []
    for total, product in zip(exact, of_means, strict=True):
        size = float(total.norm())
        errors.append(float((total - product).norm()) / size if size else 0.0)
    return errors


def _products(vector: Tensor, pairs: Sequence[tuple[Block, Block]]) -> list[Tensor]:
    """B A (outputs, inputs) of each pair (A, B) of blocks in `vector` (D,); convolution kernels are
    flattened."""
    numbers = vector.to(wide(vector.device))
    products = []
    for a, b in pairs:
        A = numbers[a.columns].reshape(a.shape).flatten(1)
        B = numbers[b.columns].reshape(b.shape).flatten(1)
        products.append(B @ A)
    return products

"""Low-rank adapters (LoRA) in a federation: which blocks are A and B, and what it costs to average
them apart."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl_lightning.callbacks.base import Observer
from fl_lightning.configuration.config import check
from fl_lightning.core import Block, GroupServer, RunContext, Server
from fl_lightning.foundation.device import wide


def is_a(block: Block) -> bool:
    """Whether it is an adapter's A, (r, inputs), which is drawn at random (`peft`'s name of it)."""
    return ".lora_A." in block.name


def is_b(block: Block) -> bool:
    """Whether it is an adapter's B, (outputs, r), which begins at 0."""
    return ".lora_B." in block.name


def check_adapters(run: RunContext) -> None:
    """Raise `BadInput` unless every client's network has adapters."""
    for group, model in zip(run.groups, run.config.models, strict=True):
        adapters = getattr(model.component, "adapters", None)
        problem = f"{run.method_name} needs low-rank adapters in {group.name}"
        requirement = f"{problem}, such as --model.adapters.rank 8"
        check("model.adapters", adapters, any(map(is_a, group.layout.blocks)), requirement)


class AdapterError(Observer):
    """Adds `adapter_error` to a round's metrics. Hangs on every run whose networks have
    adapters."""

    config_key = "model.adapters"

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` where clients of one network upload adapters of several ranks."""
        ranks: dict[str, set[int]] = {}
        for group, model in zip(run.groups, run.config.models, strict=True):
            of_network = ranks.setdefault(model.component.class_path, set())
            for block, is_uploaded in zip(group.layout.blocks, group.up_mask, strict=True):
                if is_uploaded and is_a(block):
                    of_network.add(block.shape[0])
                if is_uploaded and is_b(block):
                    of_network.add(block.shape[1])
            problem = f"clients of {group.name} upload adapters, which {run.method_name} cannot mix"
            requirement = f"{problem}: one rank for all"
            check("model.adapters.rank", sorted(of_network), len(of_network) <= 1, requirement)

    def on_aggregate(self, run: RunContext, server: Server) -> None:
        """Measure what this round's mean of uploads, which averages A and B apart, errs about their
        product B A: `adapter_error`.

        Of each adapted layer ||sum_i p_i B_i A_i - (sum_i p_i B_i) (sum_i p_i A_i)|| /
        ||sum_i p_i B_i A_i||, Frobenius norms, with p_i the relation's weights of those who
        answered; the mean over layers (FFA-LoRA's paper, section 3). Nothing where A or B stays at
        home, or the relation is no global model's. What it computes is no operation of the
        method's.
        """
        if not run.relation.is_global:
            return
        counted = server.flops
        errors = [error for group in server.groups for error in _errors(group)]
        server.flops = counted
        if errors:
            server.metrics["adapter_error"] = sum(errors) / len(errors)


def adapter_callbacks(models: Sequence[nn.Module]) -> list[Observer]:
    """What hangs on a run of these networks beside what its configuration names."""
    adapted = any(".lora_A." in name for model in models for name in dict(model.named_parameters()))
    return [AdapterError()] if adapted else []


def _errors(group: GroupServer) -> list[float]:
    """The error of each layer whose A and B are both sent both ways; none where nobody answered."""
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
    """B A (outputs, inputs) of each pair (A, B) of blocks of `vector` (D,); kernels of a
    convolution are flattened."""
    numbers = vector.to(wide(vector.device))
    products = []
    for a, b in pairs:
        A = numbers[a.columns].reshape(a.shape).flatten(1)
        B = numbers[b.columns].reshape(b.shape).flatten(1)
        products.append(B @ A)
    return products

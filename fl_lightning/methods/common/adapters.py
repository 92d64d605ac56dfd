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
        allowed = (
            f"{run.method_name} needs low-rank adapters in {group.name}, such as "
            f"--model.adapters.rank 8"
        )
        check("model.adapters", adapters, any(is_a(b) for b in group.layout.blocks), allowed)


class AdapterError(Observer):
    """Adds `adapter_error` to a round's metrics. Hangs on every run whose networks have
    adapters."""

    config_key = "model.adapters"

    def on_fit_start(self, run: RunContext) -> None:
        """Raise `BadInput` where clients of one network upload adapters of several ranks."""
        ranks: dict[str, set[int]] = {}
        for group, model in zip(run.groups, run.config.models, strict=True):
            sent = [
                b
                for b, up in zip(group.layout.blocks, group.up_mask, strict=True)
                if up and (is_a(b) or is_b(b))
            ]
            of_group = {b.shape[0] if is_a(b) else b.shape[1] for b in sent}
            ranks.setdefault(model.component.class_path, set()).update(of_group)
            several = sorted(ranks[model.component.class_path])
            allowed = (
                f"clients of {group.name} upload adapters, which {run.method_name} cannot mix: one "
                f"rank for all"
            )
            check("model.adapters.rank", several, len(several) <= 1, allowed)

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
        errors = [e for group in server.groups for e in _errors(group)]
        server.flops = counted
        if errors:
            server.metrics["adapter_error"] = sum(errors) / len(errors)


def adapter_callbacks(models: Sequence[nn.Module]) -> list[Observer]:
    """What hangs on a run of these networks beside what its configuration names."""
    adapted = any(".lora_A." in name for model in models for name in dict(model.named_parameters()))
    return [AdapterError()] if adapted else []


def _errors(group: GroupServer) -> list[float]:
    """Of each layer whose A and B are both sent both ways; none where nobody answered."""
    blocks = group.layout.blocks
    travels = group.group.up_mask & group.group.down_mask
    sent = {b.name: b for b, both in zip(blocks, travels, strict=True) if both}
    pairs = [
        (b, sent[other])
        for b in sent.values()
        if is_a(b) and (other := b.name.replace("lora_A", "lora_B")) in sent
    ]
    if not pairs or not group.answered or group.weighed is None or len(group.weighed.weights) > 1:
        return []
    weights = group.weighed.weights[0, 0]
    apart = _products(group.mean(weights, group.answered), pairs)
    exact = [torch.zeros_like(product) for product in apart]
    for client, p in zip(group.answered, weights.tolist(), strict=True):
        for total, product in zip(exact, _products(group.vector(client), pairs), strict=True):
            total += p * product
    norms = [
        (float((one - other).norm()), float(one.norm()))
        for one, other in zip(exact, apart, strict=True)
    ]
    return [error / size if size else 0.0 for error, size in norms]


def _products(vector: Tensor, pairs: Sequence[tuple[Block, Block]]) -> list[Tensor]:
    """B A (outputs, inputs) of each pair (A, B) of blocks of `vector` (D,); kernels of a
    convolution are flattened."""
    matrices = [
        [vector[x.start : x.stop].to(wide(vector.device)).reshape(x.shape).flatten(1) for x in pair]
        for pair in pairs
    ]
    return [b @ a for a, b in matrices]

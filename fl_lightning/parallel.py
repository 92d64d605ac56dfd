"""Clients, not batches, are shared out over processes: the Fabric strategy for that, and the exchange between ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor
from torch.nn import Module


class ClientParallelStrategy(DDPStrategy):
    """Processes of a DDP group whose unit of work is the client.

    A model is neither wrapped nor broadcast and gradients are never averaged (stock DDP would silently make all
    personal models one), loaders are not sharded, and a single process needs no rendezvous and no port.
    """

    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        """Return `module` as it is."""
        return module

    @property
    def distributed_sampler_kwargs(self) -> None:  # type: ignore[override]
        """None: a client's data are read by its home rank alone."""
        return

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes == 1:
            self._launcher = None
        else:
            super()._configure_launcher()

    def _setup_distributed(self) -> None:
        for name in ("lightning.fabric", "lightning.pytorch"):  # who joined which group is nobody's news
            logging.getLogger(name).setLevel(logging.WARNING)
        if self.num_nodes * self.num_processes == 1:
            self._set_world_ranks()
        else:
            super()._setup_distributed()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register this strategy's own name only (the base class registers DDP's)."""
        strategy_registry.register("client_parallel", cls, description="one client at a time on each process")


if "client_parallel" not in STRATEGY_REGISTRY.available_strategies():
    ClientParallelStrategy.register_strategies(STRATEGY_REGISTRY)


def launched_from_outside() -> bool:
    """Whether SLURM or torchrun has started the processes already."""
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")  # as Lightning sees it
    return "TORCHELASTIC_RUN_ID" in os.environ or ("SLURM_NTASKS" in os.environ and not interactive)


class Group:
    """The processes of a run, as the engine needs them. With one process nothing is sent.

    Results must not depend on the number of ranks: what is summed, is summed in the order of clients and tiles.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.rank: int = fabric.global_rank
        self.size: int = fabric.world_size
        self.device: torch.device = fabric.device

    def gather_objects(self, item: Any) -> list[Any]:
        """`item` of every rank, in rank order, on every rank. For small things (results, sizes)."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def exchange(self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
        """All-to-all of consecutive parts of the flat `send`; returns what the ranks sent here, in rank order."""
        received = send.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, send, list(receive_sizes), list(send_sizes))
        return received

    def gather_parts(self, part: Tensor, width: int) -> list[Tensor]:
        """Flat `part`s of at most `width` numbers from every rank, each padded to `width`."""
        padded = part.new_zeros(width)
        padded[: part.numel()] = part
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return parts

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            self.fabric.barrier()


def share_out(work: Sequence[float], ranks: int) -> list[int]:
    """Home rank of every client: the largest first, each to the rank with the least work so far (ties: lowest rank)."""
    load = [0.0] * ranks
    home = [0] * len(work)
    for client in sorted(range(len(work)), key=lambda c: (-work[c], c)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        home[client] = rank
        load[rank] += work[client]
    return home

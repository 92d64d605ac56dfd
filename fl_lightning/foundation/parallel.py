"""Clients, not batches, are distributed over processes: the Fabric strategy, and the exchange
between ranks."""

from __future__ import annotations

import contextlib
import heapq
import io
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import count
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor
from torch.nn import Module

from fl_lightning.foundation import device, launcher, port
from fl_lightning.foundation.errors import BadInput, MachineFailed, RunFailed, redact
from fl_lightning.foundation.processes import Spawning, environment_of
from fl_lightning.foundation.shared_memory import SharedMemory, joined

T = TypeVar("T")


class ClientParallelStrategy(DDPStrategy):
    """Processes of a DDP group whose unit of work is the client.

    A model is neither wrapped nor broadcast and gradients are never averaged (stock DDP would
    silently make all personal models one), loaders are not sharded, and a single process needs no
    rendezvous and no port.
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
        elif self._start_method == "spawn":
            self._launcher = Spawning(self)
        else:
            super()._configure_launcher()

    def _setup_distributed(self) -> None:
        for name in ("lightning.fabric", "lightning.pytorch"):  # which process joined which group
            logging.getLogger(name).setLevel(logging.WARNING)
        if self.num_nodes * self.num_processes == 1:
            self._set_world_ranks()
        else:
            with port.named_if_taken():
                super()._setup_distributed()


class TorchAccelerator(Accelerator):
    """This machine's accelerator, of a kind that Lightning does not know (XPU) or lets train alone
    only (MPS)."""

    def setup_device(self, device: torch.device) -> None:
        """Make `device` this process's own."""
        if device.index:
            torch.accelerator.set_device_index(device.index)

    def teardown(self) -> None:
        """Nothing is to be undone."""

    @staticmethod
    def parse_devices(devices: int | str) -> int:
        """How many."""
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """The first so many."""
        return [torch.device(TorchAccelerator.name(), k) for k in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        """All of them."""
        return device.count()

    @staticmethod
    def is_available() -> bool:
        """Whether there is one."""
        return device.here() is not None

    @staticmethod
    def name() -> str:
        """Torch's name of its kind."""
        return device.here() or "cpu"


class _Fabric(Fabric):
    """Fabric that does not look for callbacks of other packages: nobody would call them, and to
    find them it reads what all installed packages say of themselves, anew for each of a study's
    runs."""

    @staticmethod
    def _configure_callbacks(callbacks: Any) -> list[Any]:
        return list(callbacks or [])


def fabric_of(
    kind: str,
    precision: Any,
    devices: int = 1,
    num_nodes: int = 1,
    launch: launcher.Launch | None = None,
) -> Fabric:
    """Fabric with the client-parallel strategy.

    Args:
        kind: `device.resolved`.
        precision: `fabric.precision`.
        devices: processes on each node.
        num_nodes: machines.
        launch: what has started the processes; None: Fabric starts them.

    Raises:
        BadInput: the device cannot do this precision.
    """
    for name in launcher.OF_LIGHTNING:  # Fabric would take them instead of what it is given here
        os.environ.pop(name, None)
    ours = kind == device.here() and kind != "cuda"
    plugins: list[Any] = []
    if ours and precision.endswith(
        "-mixed"
    ):  # Lightning takes every device that it does not know for CUDA
        try:
            plugins = [MixedPrecision(precision, kind)]
        except (RuntimeError, ValueError, NotImplementedError) as error:
            allowed = f"{kind} cannot scale losses ({error}): bf16-mixed, 32-true".replace(
                "\n", " "
            )
            raise BadInput("fabric.precision", precision, allowed) from error
    start_method: Literal["popen", "spawn"] = "spawn" if launch is None else "popen"
    return _Fabric(
        accelerator=TorchAccelerator() if ours else kind,
        devices=devices,
        num_nodes=num_nodes,
        precision=None if plugins else precision,
        plugins=[*plugins, environment_of(launch)],
        strategy=ClientParallelStrategy(start_method=start_method),
    )


def one_process(precision: Any, accelerator: str = "cpu") -> Fabric:
    """Fabric for this process alone; 16-mixed, which wants a GPU, becomes bf16-mixed on a CPU."""
    if precision == "16-mixed" and accelerator == "cpu":
        precision = "bf16-mixed"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*srun.* command is available.*")
        return fabric_of(accelerator, precision)


class Group:
    """The processes of a run, as the engine needs them. With one process nothing is sent.

    Results must not depend on the number of ranks: what is summed, is summed in the order of
    clients and tiles.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.rank: int = fabric.global_rank
        self.size: int = fabric.world_size
        self.device: torch.device = fabric.device
        self.exchanges = 0
        self._watch: Heartbeat | None = None

    @contextlib.contextmanager
    def watched(
        self, timeout: float, tell: Callable[[RunFailed], None], end_lost: bool
    ) -> Iterator[None]:
        """Within, a process that gives no sign of life for `timeout` seconds ends this one (see
        `Heartbeat`)."""
        if self.size == 1:
            yield
            return
        self._watch = Heartbeat(self, timeout, tell, end_lost)
        try:
            yield
        finally:
            self._watch.leave()
            self._watch = None

    @contextlib.contextmanager
    def _together(self, all_ranks: bool = True) -> Iterator[None]:
        """An exchange (counted where `all_ranks` take part), in which a process that is lost is
        named.

        Raises:
            RunFailed: the others did not answer.
        """
        self.exchanges += all_ranks
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self._watch is None:
                raise MachineFailed(f"the processes lost each other: {error}") from error
            raise self._watch.named(error) from error

    @cached_property
    def _shared(self) -> SharedMemory | None:
        """What the CPU processes of one machine exchange through; None: the process group (gloo,
        NCCL) it is."""
        return (
            joined(self.rank, self.size, self._gathered, self._meet)
            if self.device.type == "cpu"
            else None
        )

    def _meet(self) -> None:
        with self._together():
            dist.barrier()

    def gather_objects(self, item: Any) -> list[Any]:
        """`item` of every rank, in rank order, on every rank. For small things (results, sizes)."""
        if self.size == 1:
            return [item]
        return (
            self._shared.gather_objects(item) if self._shared is not None else self._gathered(item)
        )

    def gather_by_client(self, items: dict[int, T]) -> dict[int, T]:
        """`items` of the clients of every rank, each of which is on one, on every rank."""
        return {
            client: item for part in self.gather_objects(items) for client, item in part.items()
        }

    def _gathered(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.size
        with self._together():
            dist.all_gather_object(items, item)
        return items

    def all_to_all(
        self, parts: list[Tensor], send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[Tensor]:
        """All-to-all of consecutive shares of `parts` (flat, at least one); what came from each
        rank, in rank order.

        It is to be read before the next exchange, and may not be written to.
        """
        if self._shared is not None:
            return self._shared.all_to_all(parts, send_sizes, receive_sizes)
        received = parts[0].new_empty(sum(receive_sizes))
        with self._together():
            dist.all_to_all_single(
                received, torch.cat(parts), list(receive_sizes), list(send_sizes)
            )
        return list(received.split(list(receive_sizes)))

    def gather_parts(self, parts: list[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """`parts` (flat, at least one) of every rank, `sizes` numbers in all by rank; to be read as
        in `all_to_all`."""
        if self._shared is not None:
            return self._shared.gather_parts(parts, sizes)
        padded = torch.cat([*parts, parts[0].new_zeros(max(sizes) - sizes[self.rank])])
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        with self._together():
            dist.all_gather(gathered, padded)
        return [part[:size] for part, size in zip(gathered, sizes, strict=True)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' `tensor`s, on every rank; exact where all ranks but one have a
        number as 0."""
        if self.size > 1:
            with self._together():
                dist.all_reduce(tensor)
        return tensor

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor of any shape and type to rank `to`, which has to `receive` it."""
        if tensor.numel():
            with self._together(all_ranks=False):
                dist.send(tensor.to(self.device).reshape(-1).view(torch.uint8), to)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """What rank `source` sends, on this rank's device."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if tensor.numel():
            with self._together(all_ranks=False):
                dist.recv(tensor.view(-1).view(torch.uint8), source)
        return tensor

    def send_object(self, item: Any, to: int) -> None:
        """Send anything to rank `to`, which has to `receive_object`; of what it holds, one tensor
        stays one."""
        buffer = io.BytesIO()
        torch.save(item, buffer)
        content = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        self.send(torch.tensor([len(content)]), to)
        self.send(content, to)

    def receive_object(self, source: int) -> Any:
        """What rank `source` sends; its tensors on this rank's device, but for those that were on
        the CPU."""
        [size] = self.receive([1], torch.int64, source).tolist()
        content = io.BytesIO(self.receive([size], torch.uint8, source).cpu().numpy().tobytes())

        def place(storage: Any, at: str) -> Any:
            return storage if at == "cpu" else storage.to(device=self.device)

        return torch.load(content, map_location=place, weights_only=False)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            with self._together():
                self.fabric.barrier()


class Heartbeat:
    """Finds out which process has died or hangs, and does not let the others wait for it for ever.

    Each process gives a sign of life every second, whatever its main thread is busy with: a count
    in the group's store, which rank 0 (or torchrun) serves. One that sees no change of it for
    `timeout` seconds names it and ends: its main thread may be waiting in an exchange that nothing
    interrupts. To be suspended together is no death.

    Args:
        group: of the processes.
        timeout: seconds.
        tell: what to do with the line.
        end_lost: kill who hangs, where all processes are on this machine and one waits for them
            all.
    """

    def __init__(
        self, group: Group, timeout: float, tell: Callable[[RunFailed], None], end_lost: bool
    ) -> None:
        self.group, self.timeout, self.tell, self.end_lost = group, timeout, tell, end_lost
        self.beat = min(1.0, timeout / 5)
        self._store = dist.distributed_c10d._get_default_store()
        now = time.monotonic()
        self._signs: list[bytes] = [b""] * group.size
        self._moved = [now] * group.size  # when each rank's sign was last seen to change
        self._answered = now  # when the store last did
        self._left = threading.Event()
        # Two, since a store that hangs blocks who asks it.
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._speak, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Stop watching, and let the others know that silence means nothing from now on."""
        self._left.set()
        for thread in (
            self._threads
        ):  # a thread within torch when the interpreter ends would abort the process
            thread.join(5 * self.beat)

    def named(self, error: BaseException) -> RunFailed:
        """What to say of the ranks that are lost, some seconds after an exchange has failed with
        `error`."""
        time.sleep(4 * self.beat)
        gone = self._silent(3 * self.beat) or [
            r for r, sign in enumerate(self._signs) if sign == b"left"
        ]
        if gone:
            return _lost(gone, "is gone")
        behind = [
            r
            for r, sign in enumerate(self._signs)
            if sign and int(sign.split()[1]) < self.group.exchanges
        ]
        if behind:
            return _lost(behind, "did not come to where the others waited for it")
        why = redact(
            str(error).partition("\n")[0]
        )  # all are there and came: it is the device, or what joins them
        return MachineFailed(
            f"an exchange between the ranks failed: {why}; the run can be continued with --resume"
        )

    def _speak(self) -> None:
        store, size = self._store, self.group.size
        with contextlib.suppress(RuntimeError):  # the store is gone: `_listen` will see
            for k in count():
                end = self._left.is_set()
                sign = "left" if end else f"{k} {self.group.exchanges} {os.getpid()}"
                store.set(f"fl_lightning/{self.group.rank}", sign)
                for rank, key in enumerate(f"fl_lightning/{r}" for r in range(size)):
                    seen = store.get(key) if store.check([key]) else b""
                    if seen != self._signs[rank]:
                        self._signs[rank], self._moved[rank] = seen, time.monotonic()
                self._answered = time.monotonic()
                if end:
                    return
                self._left.wait(self.beat)

    def _silent(self, limit: float) -> list[int]:
        now = time.monotonic()
        if now - self._answered > limit:
            return [0]
        return [
            r
            for r, moved in enumerate(self._moved)
            if now - moved > limit and self._signs[r] != b"left"
        ]

    def _listen(self) -> None:
        last = time.monotonic()
        while not self._left.wait(self.beat):
            now = time.monotonic()
            if now - last > self.timeout / 2:  # it was this process that slept
                self._moved, self._answered = [now] * self.group.size, now
            last = now
            lost = self._silent(self.timeout)
            if lost:
                self.tell(_lost(lost, f"gave no sign of life for {self.timeout:g} s"))
                for rank in lost if self.end_lost else []:
                    with contextlib.suppress(
                        ProcessLookupError, IndexError
                    ):  # it is gone; it never spoke
                        os.kill(int(self._signs[rank].split()[2]), signal.SIGKILL)
                os._exit(RunFailed.exit_code)


def _lost(ranks: Sequence[int], what: str) -> RunFailed:
    return MachineFailed(
        f"rank {', '.join(map(str, ranks))} {what}; the run can be continued with --resume"
    )


def assign_homes(work: Sequence[float], ranks: int) -> list[int]:
    """Home rank of every client: the largest first, each to the rank with the least work so far
    (ties: lowest rank)."""
    loads = [
        (0.0, rank) for rank in range(ranks)
    ]  # a heap: a search costs minutes at 10^6 clients over 1,000 ranks
    home = [0] * len(work)
    for client in sorted(range(len(work)), key=lambda c: (-work[c], c)):
        load, rank = loads[0]
        home[client] = rank
        heapq.heapreplace(loads, (load + work[client], rank))
    return home

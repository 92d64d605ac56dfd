"""Distributes clients, not batches, over processes (ranks): the Fabric strategy, the exchange
between ranks, and the watch for ranks that die."""

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
from fl_lightning.foundation.shared_memory import SharedMemory, open_shared_memory

T = TypeVar("T")


class ClientParallelStrategy(DDPStrategy):
    """A DDP process group in which each rank trains its own clients.

    Models are not wrapped or broadcast and gradients are not averaged (plain DDP would make all
    personal models equal), loaders are not sharded, and a single process opens no port.
    """

    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        """Return `module` unwrapped."""
        return module

    @property
    def distributed_sampler_kwargs(self) -> None:  # type: ignore[override]
        """Return None, so that Lightning adds no distributed sampler: only a client's home rank
        reads the client's data."""
        return

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes == 1:
            self._launcher = None
        elif self._start_method == "spawn":
            self._launcher = Spawning(self)
        else:
            super()._configure_launcher()

    def _setup_distributed(self) -> None:
        for name in ("lightning.fabric", "lightning.pytorch"):  # no line for each joining process
            logging.getLogger(name).setLevel(logging.WARNING)
        if self.num_nodes * self.num_processes == 1:
            self._set_world_ranks()
        else:
            with port.port_errors_named():
                super()._setup_distributed()


class TorchAccelerator(Accelerator):
    """Lightning's interface to this machine's accelerator, for kinds that Lightning does not know
    (XPU) or allows in a single process only (MPS)."""

    def setup_device(self, device: torch.device) -> None:
        """Make `device` this process's current device."""
        if device.index:
            torch.accelerator.set_device_index(device.index)

    def teardown(self) -> None:
        """Do nothing."""

    @staticmethod
    def parse_devices(devices: int | str) -> int:
        """Return `devices` as a number."""
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """Return the machine's first `devices` devices."""
        return [torch.device(TorchAccelerator.name(), k) for k in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices."""
        return device.count()

    @staticmethod
    def is_available() -> bool:
        """Return whether the machine has a device."""
        return device.accelerator_kind() is not None

    @staticmethod
    def name() -> str:
        """Return torch's name of the accelerator's kind."""
        return device.accelerator_kind() or "cpu"


class _Fabric(Fabric):
    """Fabric without its search for callbacks of other packages: nothing would call them, and the
    search would read the metadata of all installed packages in each run of a study."""

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
    """Return a Fabric with `ClientParallelStrategy`.

    Args:
        kind: kind of device, as `device.resolved` returns it.
        precision: `fabric.precision`.
        devices: number of processes on each node.
        num_nodes: number of nodes.
        launch: how a launcher has started this process; None: Fabric starts the processes.

    Raises:
        BadInput: the device does not support this precision.
    """
    for name in launcher.OF_LIGHTNING:  # Fabric would use them instead of these arguments
        os.environ.pop(name, None)
    uses_torch = kind == device.accelerator_kind() and kind != "cuda"
    plugins: list[Any] = []
    if uses_torch and precision.endswith("-mixed"):
        try:
            # Lightning treats every device that it does not know as CUDA
            plugins = [MixedPrecision(precision, kind)]
        except (RuntimeError, ValueError, NotImplementedError) as error:
            reason = str(error).replace("\n", " ")
            problem = f"{kind} cannot scale losses ({reason}): use bf16-mixed or 32-true"
            raise BadInput("fabric.precision", precision, problem) from error
    start_method: Literal["popen", "spawn"] = "spawn" if launch is None else "popen"
    return _Fabric(
        accelerator=TorchAccelerator() if uses_torch else kind,
        devices=devices,
        num_nodes=num_nodes,
        precision=None if plugins else precision,
        plugins=[*plugins, environment_of(launch)],
        strategy=ClientParallelStrategy(start_method=start_method),
    )


def one_process(precision: Any, accelerator: str = "cpu") -> Fabric:
    """Return a Fabric for this process only. On a CPU the precision 16-mixed, which needs a GPU, is
    replaced by bf16-mixed."""
    if precision == "16-mixed" and accelerator == "cpu":
        precision = "bf16-mixed"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*srun.* command is available.*")
        return fabric_of(accelerator, precision)


class RankGroup:
    """Communication between the processes (ranks) of a run; with one process nothing is sent.

    So that results do not depend on the number of ranks, callers sum in the order of clients and
    tiles, never of ranks.
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
        """Watch the other ranks by a `Heartbeat` within the block; with one process do nothing.

        Args:
            timeout: seconds without a sign of life until a rank counts as lost.
            tell: is called with the error before this process ends because of a lost rank.
            end_lost: whether to kill lost ranks, too.
        """
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
        """Run an exchange between ranks within the block, and count it if `all_ranks` take part.

        Raises:
            MachineFailed: the exchange failed; the error names the lost ranks.
        """
        self.exchanges += all_ranks
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self._watch is None:
                raise MachineFailed(f"the processes lost each other: {error}") from error
            raise self._watch.who_is_lost(error) from error

    @cached_property
    def _shared(self) -> SharedMemory | None:
        """The memory that ranks exchange data by if all use the CPU of one machine; None: the
        process group (gloo, NCCL) does it."""
        if self.device.type != "cpu":
            return None
        return open_shared_memory(self.rank, self.size, self._gathered, self._meet)

    def _meet(self) -> None:
        with self._together():
            dist.barrier()

    def gather_objects(self, item: Any) -> list[Any]:
        """Return the `item` of every rank, in rank order, on every rank. Made for small objects
        (results, sizes)."""
        if self.size == 1:
            return [item]
        if self._shared is not None:
            return self._shared.gather_objects(item)
        return self._gathered(item)

    def gather_by_client(self, items: dict[int, T]) -> dict[int, T]:
        """Return the `items` of all ranks, merged, on every rank; each client is in one rank's
        dict."""
        gathered: dict[int, T] = {}
        for part in self.gather_objects(items):
            gathered |= part
        return gathered

    def _gathered(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.size
        with self._together():
            dist.all_gather_object(items, item)
        return items

    def all_to_all(
        self, parts: list[Tensor], send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[Tensor]:
        """Send each rank its share of this rank's numbers; return the shares received, in rank
        order. They must be read before the next exchange and not be written to.

        Args:
            parts: this rank's numbers: at least one flat tensor, all of one dtype. Joined, they are
                the shares for rank 0, rank 1, ...
            send_sizes: numbers in the share for each rank.
            receive_sizes: numbers in the share from each rank.
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
        """Send all of this rank's numbers to every rank; return those received, in rank order. They
        must be read before the next exchange and not be written to.

        Args:
            parts: this rank's numbers: at least one flat tensor, all of one dtype.
            sizes: numbers from each rank.
        """
        if self._shared is not None:
            return self._shared.gather_parts(parts, sizes)
        padded = torch.cat([*parts, parts[0].new_zeros(max(sizes) - sizes[self.rank])])
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        with self._together():
            dist.all_gather(gathered, padded)
        return [part[:size] for part, size in zip(gathered, sizes, strict=True)]

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to rank `to`, which must call `receive`."""
        if tensor.numel():
            with self._together(all_ranks=False):
                dist.send(tensor.to(self.device).reshape(-1).view(torch.uint8), to)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Return a tensor that rank `source` sends, on this rank's device."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if tensor.numel():
            with self._together(all_ranks=False):
                dist.recv(tensor.view(-1).view(torch.uint8), source)
        return tensor

    def send_object(self, item: Any, to: int) -> None:
        """Send an object to rank `to`, which must call `receive_object`. A tensor that occurs twice
        in the object is sent once and stays one tensor."""
        buffer = io.BytesIO()
        torch.save(item, buffer)
        content = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        self.send(torch.tensor([len(content)]), to)
        self.send(content, to)

    def receive_object(self, source: int) -> Any:
        """Return an object that rank `source` sends. Its tensors are put on this rank's device;
        those that were on the CPU stay there."""
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
    """Ends this process if another rank has died or hangs, so that no rank waits for it forever.

    A thread of each rank writes a sign of life, a count, to the process group's store every second;
    rank 0 (or torchrun) serves the store. A rank that sees no change of another's count for
    `timeout` seconds reports that rank and ends itself, since its main thread may be waiting in an
    exchange that cannot be interrupted. If all ranks were suspended together, none is ended.

    Args:
        group: the run's ranks.
        timeout: seconds without a sign of life until a rank counts as lost.
        tell: is called with the error before this process ends.
        end_lost: whether to kill lost ranks, too; only if all ranks are on this machine and were
            started by one parent process, which waits for them.
    """

    def __init__(
        self, group: RankGroup, timeout: float, tell: Callable[[RunFailed], None], end_lost: bool
    ) -> None:
        self.group = group
        self.timeout = timeout
        self.tell = tell
        self.end_lost = end_lost
        self.beat = min(1.0, timeout / 5)
        self._store = dist.distributed_c10d._get_default_store()
        now = time.monotonic()
        self._signs: list[bytes] = [b""] * group.size
        self._changed_at = [now] * group.size  # when each rank's sign was last seen to change
        self._answered_at = now  # when the store last answered
        self._left = threading.Event()
        # two threads, since a store that hangs blocks the one that reads it
        works = (self._exchange_signs, self._end_if_silent)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Stop watching, and tell the other ranks that this one leaves."""
        self._left.set()
        # a thread that is inside torch when the interpreter ends would abort the process
        for thread in self._threads:
            thread.join(5 * self.beat)

    def who_is_lost(self, error: BaseException) -> RunFailed:
        """Return the error for the user after an exchange has failed with `error`. It waits for
        four beats to see which ranks are lost, and names them."""
        time.sleep(4 * self.beat)
        ended = [rank for rank, sign in enumerate(self._signs) if sign == b"left"]
        lost_ranks = self._silent(3 * self.beat) or ended
        if lost_ranks:
            return _lost(lost_ranks, "is gone")
        late_ranks = []
        for rank, sign in enumerate(self._signs):
            if sign and int(sign.split()[1]) < self.group.exchanges:
                late_ranks.append(rank)
        if late_ranks:
            return _lost(late_ranks, "did not come to where the others waited for it")
        # all ranks live and take part: the device or the network failed
        reason = redact(str(error).partition("\n")[0])
        return MachineFailed(
            f"an exchange between the ranks failed: {reason}; the run can be continued with "
            f"--resume"
        )

    def _exchange_signs(self) -> None:
        """Write this rank's sign of life and read the others', every beat."""
        store = self._store
        keys = [f"fl_lightning/{rank}" for rank in range(self.group.size)]
        with contextlib.suppress(RuntimeError):  # without the store `_end_if_silent` ends all
            for k in count():
                leaves = self._left.is_set()
                sign = "left" if leaves else f"{k} {self.group.exchanges} {os.getpid()}"
                store.set(keys[self.group.rank], sign)
                for rank, key in enumerate(keys):
                    rank_sign = store.get(key) if store.check([key]) else b""
                    if rank_sign != self._signs[rank]:
                        self._signs[rank] = rank_sign
                        self._changed_at[rank] = time.monotonic()
                self._answered_at = time.monotonic()
                if leaves:
                    return
                self._left.wait(self.beat)

    def _silent(self, limit: float) -> list[int]:
        """Return the ranks without a sign of life for `limit` seconds; rank 0 if the store does not
        answer."""
        now = time.monotonic()
        if now - self._answered_at > limit:
            return [0]
        signs = zip(self._signs, self._changed_at, strict=True)
        return [
            rank
            for rank, (sign, changed_at) in enumerate(signs)
            if now - changed_at > limit and sign != b"left"
        ]

    def _end_if_silent(self) -> None:
        """End this process when another rank has given no sign of life for `timeout` seconds."""
        woken_at = time.monotonic()
        while not self._left.wait(self.beat):
            now = time.monotonic()
            if now - woken_at > self.timeout / 2:  # this process was suspended
                self._changed_at = [now] * self.group.size
                self._answered_at = now
            woken_at = now
            lost_ranks = self._silent(self.timeout)
            if not lost_ranks:
                continue
            self.tell(_lost(lost_ranks, f"gave no sign of life for {self.timeout:g} s"))
            if self.end_lost:
                for rank in lost_ranks:
                    # the rank has ended, or has never given a sign
                    with contextlib.suppress(ProcessLookupError, IndexError):
                        os.kill(int(self._signs[rank].split()[2]), signal.SIGKILL)
            os._exit(RunFailed.exit_code)


def _lost(ranks: Sequence[int], problem: str) -> RunFailed:
    names = ", ".join(map(str, ranks))
    return MachineFailed(f"rank {names} {problem}; the run can be continued with --resume")


def assign_homes(work: Sequence[float], ranks: int) -> list[int]:
    """Return the home rank of every client. Clients are assigned in the order of their `work`, the
    largest first, each to the rank with the least work so far (ties: lowest rank)."""
    # a heap: searching a list takes minutes for 10^6 clients on 1,000 ranks
    loads = [(0.0, rank) for rank in range(ranks)]
    homes = [0] * len(work)
    for client in sorted(range(len(work)), key=lambda client: (-work[client], client)):
        load, rank = loads[0]
        homes[client] = rank
        heapq.heapreplace(loads, (load + work[client], rank))
    return homes

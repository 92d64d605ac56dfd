"""One of several ranks on pretended devices, each in a process of its own: python rank.py
FL_TRAIN_ARGUMENTS

What joins them is as NCCL is: it takes contiguous tensors of the rank's own device, and no others.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # torch's flight recorder knows groups written in C++ only

import torch
import torch.distributed as dist
from pretended import NAME, STATE, install, present
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future


def _done(result):
    future = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class _Plain:
    supports_splitting = supports_coalescing = False


class Joined(dist.ProcessGroup):
    """Exchanges between devices, carried by gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.carrier = dist.ProcessGroupGloo(store, rank, size, timeout)

    getBackendName = staticmethod(lambda: "pretended_ccl")  # noqa: N815
    group_name = property(lambda self: dist.distributed_c10d._world.pg_names[self])
    _device_types = property(lambda self: [torch.device(NAME)])

    def _get_backend(self, device):
        return _Plain()

    def _down(self, tensors):
        for tensor in tensors:
            if tensor.device != torch.device(NAME, STATE.index) or not tensor.is_contiguous():
                raise RuntimeError(
                    f"no contiguous tensor of this rank's device: {tensor.device} "
                    f"{tuple(tensor.shape)}"
                )
        return [t.cpu() for t in tensors]

    def _carried(self, into, exchange):
        below = self._down(into)
        exchange(below).wait()
        for tensor, value in zip(into, below, strict=True):
            tensor.copy_(value)
        return _done(into)

    def allreduce(self, tensors, options=None):
        mine = dist.AllreduceOptions()
        return self._carried(tensors, lambda below: self.carrier.allreduce(below, mine))

    def broadcast(self, tensors, options=None):
        return self._carried(tensors, lambda below: self.carrier.broadcast(below, options))

    def allgather(self, into, tensors, options=None):
        mine = self._down(tensors)
        return self._carried(into[0], lambda below: self.carrier.allgather([below], mine))

    def _allgather_base(self, into, tensor, options=None):
        [mine] = self._down([tensor])
        parts = list(into.view(self.size(), -1).unbind(0))
        return self._carried(parts, lambda below: self.carrier.allgather([below], [mine.view(-1)]))

    def alltoall_base(self, into, tensor, out_sizes, in_sizes, options=None):
        [mine] = self._down([tensor])

        def exchange(below):
            return self.carrier.alltoall_base(
                below[0], mine, out_sizes, in_sizes, dist.AllToAllOptions()
            )

        return self._carried([into], exchange)

    all_gather_single, all_to_all_single = _allgather_base, alltoall_base

    def send(self, tensors, to, tag=0):
        self.carrier.send(self._down(tensors), to, tag).wait()
        return _done(tensors)

    def recv(self, tensors, source, tag=0):
        return self._carried(tensors, lambda below: self.carrier.recv(below, source, tag))

    def barrier(self, opts=None):
        self.carrier.barrier().wait()
        return _done(None)


def main() -> int:
    """As `fl-train`."""
    install()
    dist.Backend.register_backend("pretended_ccl", Joined, devices=[NAME])
    from fl_lightning.cli import main as fl_train

    with present(index=int(os.environ["LOCAL_RANK"]), count=int(os.environ["LOCAL_WORLD_SIZE"])):
        return fl_train(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

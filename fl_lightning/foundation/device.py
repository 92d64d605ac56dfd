"""Functions for the device that clients train on, of any kind that torch knows: CPU, CUDA (or ROCm,
which torch calls `cuda`), XPU, MPS, ...

Torch has a module for each kind (`torch.cuda`, `torch.xpu`, `torch.mps`, or that of a registered
backend) with functions of the same names. Where a module lacks a function, the docstring here says
what is returned instead. No other code of the package names a kind.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from fl_lightning.foundation.errors import BadInput, check

KEY = "fabric.accelerator"

CUBLAS_WORKSPACE = ":4096:8"
"""Setting with which cuBLAS is deterministic (torch's notes on reproducibility)."""


def accelerator_kind() -> str | None:
    """Return torch's name of this machine's kind of accelerator, such as `cuda`, without opening a
    device; None: there is none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return None
    return accelerator.type


def count() -> int:
    """Return the number of this machine's accelerators, without opening one."""
    kind = accelerator_kind()
    return torch.get_device_module(kind).device_count() if kind else 0


def resolved(name: str) -> str:
    """Return the kind of device that the value `name` of `fabric.accelerator` means on this
    machine: `cpu`, torch's name of an accelerator, or one registered with Lightning.

    Raises:
        BadInput: the name is unknown, or the machine has no such device.
    """
    kind = accelerator_kind()
    if name in ("cpu", kind):
        return name
    if name == "auto":
        return kind or "cpu"
    if name == "gpu":
        if kind is None:
            raise BadInput(KEY, name, "torch sees no GPU on this machine: use cpu")
        return kind
    from lightning.fabric.accelerators import ACCELERATOR_REGISTRY

    registered = ACCELERATOR_REGISTRY.available_accelerators()
    names = sorted({"auto", "gpu", "xpu", *registered})
    check(KEY, name, name in names, f"it must be one of {', '.join(names)}")
    is_own = name not in ("cuda", "mps", "tpu", "xpu")  # registered by the user
    if is_own and ACCELERATOR_REGISTRY.get(name).is_available():
        return name
    raise BadInput(KEY, name, f"torch sees no {name.upper()} device on this machine: use cpu")


def module_of(device: torch.device) -> Any:
    """Return the module of a device's kind (`torch.cuda`, `torch.xpu`, ...); None: the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    module = module_of(device)
    if module is not None:
        module.synchronize()


def why_lost(device: torch.device) -> str | None:
    """Return the first line of the device's error if it can no longer compute; None: it works.

    Called after a client has failed, to find out whether the device has failed instead. After many
    errors of a GPU (illegal access, a device that fell off the bus), all its later operations in
    the same process fail, too.
    """
    try:
        synchronize(device)
        torch.ones(1, device=device).item()
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError):
            return str(error).partition("\n")[0]
    return None


@cache
def wide(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums are computed on the device: float64, or float32 if the device
    has no float64 (MPS)."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device).add_(1.0)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def digest(tensors: Iterable[Tensor]) -> bytes:
    """Return a hash of the tensors' bytes; their device makes no difference."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        state.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return state.digest()


# ---------------------------------------------------------------- memory


def free_bytes(device: torch.device) -> float:
    """Return the free memory of the device in bytes. For the CPU, and for devices that do not
    report it, that of the machine."""
    module = module_of(device)
    if hasattr(module, "mem_get_info"):
        return float(module.mem_get_info(device)[0])
    if hasattr(module, "recommended_max_memory"):  # MPS
        return float(module.recommended_max_memory() - module.driver_allocated_memory())
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux: assume that the data fit
        return float("inf")
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def resident_bytes() -> float:
    """Return the main memory of this process in bytes.

    Raises:
        OSError: the system is not Linux.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def peak_bytes(device: torch.device) -> float | None:
    """Return the peak of torch's memory on the device in bytes; None: it is the CPU or does not
    report it."""
    module = module_of(device)
    if not hasattr(module, "max_memory_allocated"):
        return None
    return float(module.max_memory_allocated(device))


# ---------------------------------------------------------------- streams


def has_streams(device: torch.device) -> bool:
    """Return whether the device can copy while it computes (not MPS, nor the CPU)."""
    return hasattr(module_of(device), "Stream")


def host_buffer(vector: Tensor, device: torch.device) -> Tensor:
    """Return an empty tensor in main memory with the shape and dtype of `vector`; pinned if the
    device has streams, so that it can be copied while the device computes."""
    return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=has_streams(device))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device. From main memory it is copied by way of pinned memory, without
    waiting for the copy, if the device has streams."""
    if tensor.device == device:
        return tensor
    if tensor.device.type != "cpu" or not has_streams(device):
        return tensor.to(device)
    return host_buffer(tensor, device).copy_(tensor).to(device, non_blocking=True)


# ---------------------------------------------------------------- random numbers


def seed(number: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and the device, and numpy's. `torch.manual_seed` would
    take longer, since it seeds all kinds of devices."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    if device.type != "cpu":
        module_of(device).manual_seed(number)


def seed_all(number: int, device: torch.device) -> None:
    """Seed the generators that `seed` does, and Python's `random`. Seeding `random` is slow: it
    takes as long as computing a layer of a small model."""
    seed(number, device)
    random.seed(number)


def random_states(device: torch.device) -> list[Any]:
    """Return the states of the generators that a model may draw from: torch's of the CPU and the
    device, numpy's, Python's."""
    module = module_of(device)
    on_device = [] if module is None else [module.get_rng_state()]
    return [torch.get_rng_state(), *on_device, np.random.get_state(), random.getstate()]


def same_states(a: list[Any], b: list[Any]) -> bool:
    """Return whether two `random_states` are equal: nothing was drawn between them."""
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) else repr(x) == repr(y)
        for x, y in zip(a, b, strict=True)
    )


@contextlib.contextmanager
def rng_restored(device: torch.device) -> Iterator[None]:
    """Restore all random states after the block, so that its draws change no later ones."""
    first, *on_device, of_numpy, of_python = random_states(device)
    try:
        yield
    finally:
        torch.set_rng_state(first)
        for state in on_device:
            module_of(device).set_rng_state(state)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


@contextlib.contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed all generators of the CPU with `number` for the block; restore their states after it."""
    cpu = torch.device("cpu")
    with rng_restored(cpu):
        seed_all(number, cpu)
        yield


def set_deterministic(only_deterministic: bool) -> None:
    """Have torch use deterministic kernels only, and raise for operations that have none; or undo
    this. Must be called before the device is opened."""
    if only_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
        torch.backends.cudnn.benchmark = False  # its choice by timing is random
    torch.use_deterministic_algorithms(only_deterministic)

"""The device that clients train on, of any kind that torch knows: CUDA (ROCm is `cuda` to torch
too), XPU, MPS, ...

`torch.accelerator` says which kind this machine has. What a kind can do is in its own module
(`torch.cuda`, `torch.xpu`, `torch.mps`, or that of a registered backend), whose functions have the
same names; where one is missing, each function here says what happens instead. Nothing else in the
package asks for a kind by its name.
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
"""With one of two sizes of work space cuBLAS repeats its own bits (torch's notes on
reproducibility)."""


def accelerator_kind() -> str | None:
    """Return torch's name of this machine's kind of accelerator, without opening a device; None:
    there is none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return None
    return accelerator.type


def count() -> int:
    """Count the accelerators of this machine, without opening one."""
    kind = accelerator_kind()
    return torch.get_device_module(kind).device_count() if kind else 0


def resolved(name: str) -> str:
    """Return the device that `fabric.accelerator` means on this machine: `cpu`, an accelerator's
    kind, or a name that Lightning knows.

    Raises:
        BadInput: nobody knows the name, or the machine has no such device.
    """
    kind = accelerator_kind()
    if name in ("cpu", kind):
        return name
    if name == "auto":
        return kind or "cpu"
    if name == "gpu":
        if kind is None:
            raise BadInput(KEY, name, "torch sees no GPU device on this machine")
        return kind
    from lightning.fabric.accelerators import ACCELERATOR_REGISTRY

    registered = ACCELERATOR_REGISTRY.available_accelerators()
    names = sorted({"auto", "gpu", "xpu", *registered})
    check(KEY, name, name in names, f"it must be one of {', '.join(names)}")
    is_own = name not in ("cuda", "mps", "tpu", "xpu")  # of the user
    if is_own and ACCELERATOR_REGISTRY.get(name).is_available():
        return name
    raise BadInput(KEY, name, f"torch sees no {name.upper()} device on this machine")


def module_of(device: torch.device) -> Any:
    """`torch.cuda`, `torch.xpu`, ...: the module of a device's kind; None: the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    module = module_of(device)
    if module is not None:
        module.synchronize()


def why_lost(device: torch.device) -> str | None:
    """Return why nothing can be computed on the device any more (first line of its error); None: it
    works.

    Many of a GPU's errors stay until the process ends (an illegal access, a device that fell off
    the bus): the next caller gets them, and it is no client's fault. Ask after a failure.
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
    """Return the type for sums on the device: float64, or float32 where it has no other (MPS)."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device).add_(1.0)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def digest(tensors: Iterable[Tensor]) -> bytes:
    """Return a digest of the bytes of tensors, on whatever device they are."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        state.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return state.digest()


# ---------------------------------------------------------------- memory


def free_bytes(device: torch.device) -> float:
    """Return the free memory of the device; of the CPU, or where its kind does not say, the
    machine's."""
    module = module_of(device)
    if hasattr(module, "mem_get_info"):
        return float(module.mem_get_info(device)[0])
    if hasattr(module, "recommended_max_memory"):  # MPS
        return float(module.recommended_max_memory() - module.driver_allocated_memory())
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux: trust that the data fit
        return float("inf")
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def resident_bytes() -> float:
    """Main memory that this process holds now.

    Raises:
        OSError: the system is not Linux.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def peak_bytes(device: torch.device) -> float | None:
    """Return the most memory that torch has held on the device; None: the CPU, or its kind does not
    say."""
    module = module_of(device)
    if not hasattr(module, "max_memory_allocated"):
        return None
    return float(module.max_memory_allocated(device))


# ---------------------------------------------------------------- streams


def has_streams(device: torch.device) -> bool:
    """Whether copies can run beside what the device computes (not on MPS)."""
    return hasattr(module_of(device), "Stream")


def host_buffer(vector: Tensor, device: torch.device) -> Tensor:
    """Main memory for a tensor like `vector`: pinned where a stream can copy from it while the
    device computes."""
    return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=has_streams(device))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the main memory to the device, and return it there; do not wait for the copy
    where it can be made from pinned memory."""
    if tensor.device == device:
        return tensor
    if tensor.device.type != "cpu" or not has_streams(device):
        return tensor.to(device)
    return host_buffer(tensor, device).copy_(tensor).to(device, non_blocking=True)


# ---------------------------------------------------------------- random numbers


def seed(number: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and the device, and numpy's. `torch.manual_seed`, which
    asks every kind of device, takes longer."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    if device.type != "cpu":
        module_of(device).manual_seed(number)


def seed_all(number: int, device: torch.device) -> None:
    """Call `seed`, and seed Python's generator, which takes as long as a layer of a small model."""
    seed(number, device)
    random.seed(number)


def random_states(device: torch.device) -> list[Any]:
    """State of the generators that a model may draw from: torch's on the CPU and the device,
    numpy's, Python's."""
    module = module_of(device)
    on_device = [] if module is None else [module.get_rng_state()]
    return [torch.get_rng_state(), *on_device, np.random.get_state(), random.getstate()]


def same_states(a: list[Any], b: list[Any]) -> bool:
    """Whether nothing was drawn between two `random_states`."""
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) else repr(x) == repr(y)
        for x, y in zip(a, b, strict=True)
    )


@contextlib.contextmanager
def rng_restored(device: torch.device) -> Iterator[None]:
    """Let the block draw, and restore all random states after it: to others nothing was drawn."""
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
    """Seed the CPU's draws within the block with `number`; restore all random states after it."""
    cpu = torch.device("cpu")
    with rng_restored(cpu):
        seed_all(number, cpu)
        yield


def set_deterministic(only_deterministic: bool) -> None:
    """Switch on, or off, kernels that repeat their own bits, and errors of operations without one;
    to be called before the device is opened."""
    if only_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
        torch.backends.cudnn.benchmark = False  # which kernel wins a race of timings is chance
    torch.use_deterministic_algorithms(only_deterministic)

"""A pretended accelerator for tests: a device in Python, whose tensors no operation of the host may
touch.

Torch lets a kind of device be written in Python (the key `PrivateUse1`). Here its memory is the
machine's, and its kernels are the CPU's, so numbers are those of the CPU, bit for bit. What differs
is what a GPU is strict about: tensors of two devices do not meet in an operation, draws come from a
generator of its own, memory may run out, and the device may fail for good. It has no streams and no
pinned memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
COPIES = {"_copy_from", "_copy_from_and_resize"}
INDEXED = {
    "index",
    "index_put_",
    "index_put",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
}
"""Torch takes indices from the host here."""

_ON_HOST, _ELSEWHERE = 1, 12  # kinds of devices in DLPack
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@dataclass
class State:
    """What the device stands at."""

    present: bool = False
    """Whether torch sees it."""
    count: int = 1
    """Devices of the machine."""
    index: int = 0
    """The one that this process uses."""
    dead: bool = False
    """Whether whatever is asked of it fails."""
    limit: float = float("inf")
    """Bytes of its memory."""
    held: int = 0
    peak: int = 0
    draws: torch.Generator = field(default_factory=torch.Generator)


STATE = State()


def is_here(tensor):
    """Whether it lies on the device."""
    return isinstance(tensor, Tensor) and tensor.device.type == NAME


def _turned(tensor, kind):
    """The same memory as a tensor of another device."""
    capsule = torch._C._to_dlpack(tensor.detach())
    place = _pointer(capsule, b"dltensor") + 8
    ctypes.c_int32.from_address(place).value = kind
    ctypes.c_int32.from_address(place + 4).value = STATE.index if kind == _ELSEWHERE else 0
    return torch._C._from_dlpack(capsule)


def on_host(tensor):
    """The memory of a tensor of the device, as the device's kernels see it."""
    if not tensor.numel():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return _turned(tensor, _ON_HOST)


def on_device(tensor):
    """A tensor of the device with the memory of a new one of the host."""
    size = tensor.untyped_storage().nbytes()
    if STATE.held + size > STATE.limit:
        raise torch.OutOfMemoryError(
            f"{NAME} out of memory: {size} bytes beside {STATE.held} of {STATE.limit:.0f}"
        )
    made = _turned(tensor, _ELSEWHERE)
    STATE.held += size
    STATE.peak = max(STATE.peak, STATE.held)
    weakref.finalize(made.untyped_storage(), _freed, size)
    return made


def _freed(size):
    STATE.held -= size


@cache
def _draws(op):
    return any(a.name == "generator" for a in op._schema.arguments)


def name_of(op):
    """Without namespace and overload."""
    return op._schema.name.split("::")[1]


def _check(op, args, kwargs):
    name = name_of(op)
    if STATE.dead:
        raise torch.AcceleratorError(
            f"{NAME} error: an illegal memory access was encountered\nand more lines"
        )
    given = [args[0], *args[2:3]] if name in INDEXED else tree_leaves((args, kwargs))
    strangers = [t for t in given if isinstance(t, Tensor) and not is_here(t) and t.dim()]
    if strangers and name not in COPIES and any(map(is_here, tree_leaves((args, kwargs)))):
        raise RuntimeError(
            f"{name}: expected all tensors on one device, found "
            f"{[tuple(t.shape) for t in strangers]}"
        )
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"{name}: expected a generator of {NAME}, found the CPU's")


def _fallback(op, *args, **kwargs):
    """Any operation: the CPU's kernel on the device's memory."""
    _check(op, args, kwargs)
    known = {}
    to_device = any(map(is_here, tree_leaves((args, kwargs))))

    def lower(x):
        nonlocal to_device
        if isinstance(x, torch.device) and x.type == NAME:
            to_device = True
            return torch.device("cpu")
        if is_here(x):
            lowered = on_host(x)
            known[id(lowered)] = (lowered, x)
            return lowered
        return x

    theirs, named = tree_map(lower, (args, kwargs))
    if _draws(op):
        named["generator"] = STATE.draws
    out = _from_own_draws(op, *theirs) if name_of(op) == "native_dropout" else op(*theirs, **named)
    for lowered, x in known.values():
        if lowered.size() != x.size():  # an `out` that has grown
            n = on_device(lowered.clone())
            _set(x, n.untyped_storage(), 0, list(n.size()), list(n.stride()))
    return tree_map_only(Tensor, lambda x: _raise(x, known) if to_device else x, out)


def _from_own_draws(op, *args):
    """An operation that takes no generator draws from the CPU's, and is to draw from the
    device's."""
    before = torch.get_rng_state()
    torch.set_rng_state(STATE.draws.get_state())
    try:
        return op(*args)
    finally:
        STATE.draws.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def _raise(x, known):
    """A result on the device: what it is a view of, if it is one, and new memory else."""
    if id(x) in known:
        return known[id(x)][1]
    for lowered, root in known.values():
        if (
            x.numel()
            and x.dtype == root.dtype
            and x.untyped_storage()._cdata == lowered.untyped_storage()._cdata
        ):
            offset = (
                root.storage_offset() + (x.data_ptr() - lowered.data_ptr()) // root.element_size()
            )
            return _as_strided(root, list(x.size()), list(x.stride()), offset)
    return on_device(x)


def _set(x, *storage):
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(_KERNEL, x, *storage)


def _as_strided(x, *shape):
    return torch.ops.aten.as_strided.default.redispatch(_KERNEL, x, *shape)


def _resize(x, size, **_):
    """Where it grows, new memory that begins with what there was."""
    made = torch.empty(size, dtype=x.dtype)
    if made.numel() > x.numel():
        made.view(-1)[: x.numel()].copy_(on_host(x).reshape(-1))
        grown = on_device(made)
        _set(x, grown.untyped_storage(), 0, list(made.size()), list(made.stride()))
    else:
        _set(x, x.untyped_storage(), x.storage_offset(), list(made.size()), list(made.stride()))
    return x


def _copy(source, into, non_blocking=False):
    """Between memories."""
    _check(torch.ops.aten._copy_from.default, (source, into), {})
    a, b = (on_host(t) if is_here(t) else t for t in (source, into))
    b.copy_(a)
    return into


class Backend:
    """What torch asks of a kind of device, and `torch.cuda` has functions for."""

    is_initialized = staticmethod(lambda: True)
    is_available = staticmethod(lambda: STATE.present)
    device_count = staticmethod(lambda: STATE.count if STATE.present else 0)
    current_device = staticmethod(lambda: STATE.index)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])

    @staticmethod
    def manual_seed(seed):
        STATE.draws.manual_seed(seed)

    manual_seed_all = manual_seed

    @staticmethod
    def get_rng_state(device=None):
        return STATE.draws.get_state()

    @staticmethod
    def set_rng_state(state, device=None):
        STATE.draws.set_state(state)

    @staticmethod
    def mem_get_info(device=None):
        limit = min(STATE.limit, 2.0**33)
        return limit - STATE.held, limit

    @staticmethod
    def max_memory_allocated(device=None):
        return STATE.peak

    @staticmethod
    def reset_peak_memory_stats(device=None):
        STATE.peak = STATE.held

    empty_cache = staticmethod(lambda: None)

    @staticmethod
    def synchronize(device=None):
        if STATE.dead:
            raise torch.AcceleratorError(
                f"{NAME} error: an illegal memory access was encountered\nand more lines"
            )


def _convolution(x, w, b, *rest):
    return _fallback(torch.ops.aten.convolution.default, x, w, b, *rest)


def _convolution_backward(g, x, w, *rest):
    *shape, mask = rest
    bias = [w.shape[0]] if mask[2] else None
    return _fallback(torch.ops.aten.convolution_backward.default, g, x, w, bias, *shape, mask)


def _narrowed(name):
    """A product under autocast."""
    op = getattr(torch.ops.aten, name)

    def run(*args):
        dtype = torch.get_autocast_dtype(NAME)
        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        ):
            return op(
                *(
                    t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
                    for t in args
                )
            )

    return run


_kept = []


def install():
    """Once in a process, before anything has run backward."""
    _setup_privateuseone_for_python_backend(NAME, Backend)
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten.impl("as_strided", _as_strided, "PrivateUse1")
    aten.impl("resize_", _resize, "PrivateUse1")
    for name in ("view", "_reshape_alias"):
        op = getattr(torch.ops.aten, name).default
        aten.impl(name, lambda *args, op=op: op.redispatch(_KERNEL, *args), "PrivateUse1")
    for name in ("_copy_from", "_copy_from_and_resize"):
        aten.impl(name, _copy, "PrivateUse1")
    aten.impl("convolution_overrideable", _convolution, "PrivateUse1")
    aten.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    for name in ("linear", "mm", "addmm", "matmul"):
        aten.impl(name, _narrowed(name), "AutocastPrivateUse1")
    _kept.extend([everything, aten])


@contextlib.contextmanager
def present(index=0, count=1):
    """Within, torch sees the device, or `count` of them, of which this process uses the one with
    this `index`."""
    assert not STATE.present
    STATE.present, STATE.dead, STATE.limit = True, False, float("inf")
    STATE.index, STATE.count = index, count
    try:
        yield
    finally:
        STATE.present = STATE.dead = False

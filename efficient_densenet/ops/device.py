"""What the passes want to know of a device; given by hand, it also stands for one that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """One accelerator, or the CPU.

    Args:
        capability: CUDA's compute capability; ``None`` where there is no such thing.
        multiprocessors: how many programs run at the same time, at least.
        l2_bytes: the cache its processors share.
    """

    capability: tuple[int, int] | None
    multiprocessors: int
    l2_bytes: int


CPU = Device(None, 1, 2**20)
H200 = Device((9, 0), 132, 50 * 2**20)

_known: dict[tuple[str, int | None], Device] = {}
_assumed: dict[str, Device] = {}


@contextmanager
def assume(device_type: str, device: Device) -> Iterator[None]:
    """Inside, every device of this type is taken for ``device``: nothing is asked of it, and nothing run to prove it."""
    before = _assumed.get(device_type)
    _assumed[device_type] = device
    try:
        yield
    finally:
        _assumed.pop(device_type)
        if before is not None:
            _assumed[device_type] = before


def is_assumed(device: torch.device) -> bool:
    return device.type in _assumed


def describe(device: torch.device) -> Device:
    """The device as it was assumed, or as it is; asked once."""
    if device.type in _assumed:
        return _assumed[device.type]
    key = device.type, device.index
    if key not in _known:
        _known[key] = _ask(device)
    return _known[key]


def _ask(device: torch.device) -> Device:
    if device.type != "cuda":
        return CPU if device.type == "cpu" else Device(None, 64, 2**22)
    found = torch.cuda.get_device_properties(device)
    capability = None if torch.version.hip else (found.major, found.minor)
    return Device(capability, found.multi_processor_count, getattr(found, "L2_cache_size", 2**22))

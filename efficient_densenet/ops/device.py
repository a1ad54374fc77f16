"""What the passes know of the machine they run on: one description, from which every choice follows.

Choices follow from shapes and from this, never from a stopwatch: the same program on the same machine adds up its sums
in the same order every time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

MIB = 2**20


@dataclass(frozen=True)
class Description:
    """A kind of device, and what follows from it.

    Args:
        type: as in ``torch.device(type)``.
        capability: a CPU's vector instructions as torch names them (``"AVX2"``, ``"AVX512"``, …), or a CUDA device's
            compute capability, ``(9, 0)``.
        cache_bytes: an accelerator's last cache; 0 where nobody knows.
        multiprocessors: how many programs of a kernel run at the same time, at least.
        tile_bytes: how large a tile may be.
        unfolded_bytes: how much scratch unfolded gradients may take.
        row_bytes: at a multiple of how many bytes a block's rows of features start.
        unfolds: whether a 3x3 convolution's weight gradient is a product with the unfolded output gradient, else torch's
            own kernel.
    """

    type: str
    capability: str | tuple[int, int]
    cache_bytes: int
    multiprocessors: int
    tile_bytes: int
    unfolded_bytes: int
    row_bytes: int
    unfolds: bool

    @classmethod
    def of(
        cls, type: str, capability: str | tuple[int, int] = "", cache_bytes: int = 0, multiprocessors: int = 1
    ) -> Description:
        """A device by the facts alone."""
        if type == "cpu":
            # Tiles long enough to hide Python's cost per operation, short enough for a share of the last-level cache.
            # With AVX-512, torch's kernel for the weight gradient runs at 2-3 times the rate of unfolding and
            # multiplying for the few output channels of a dense layer; with AVX2, at less than it.
            return cls(type, capability, cache_bytes, multiprocessors, 2 * MIB, 4 * MIB, 1, capability != "AVX512")
        # Tiles as large as the cache, as far as neither launches nor scratch memory get out of hand.
        tile_bytes = min(max(cache_bytes, 16 * MIB), 64 * MIB)
        return cls(type, capability, cache_bytes, multiprocessors, tile_bytes, 64 * MIB, 16, True)


H200 = Description.of("cuda", (9, 0), 50 * MIB, 132)


@functools.cache
def _found(type: str, index: int | None) -> Description:
    if type == "cpu":
        return Description.of(type, torch.backends.cpu.get_cpu_capability())
    if type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        cache_bytes = getattr(properties, "L2_cache_size", 0)
        return Description.of(type, capability, cache_bytes, properties.multi_processor_count)
    return Description.of(type)


_assumed: dict[str, Description] = {}


def describe(device: torch.device) -> Description:
    """The device, as found or as :func:`assume` says."""
    return _assumed.get(device.type) or _found(device.type, device.index)


def is_assumed(device: torch.device) -> bool:
    """Whether nothing is to be asked of the device itself, which may not be there."""
    return device.type in _assumed


@contextlib.contextmanager
def assume(description: Description) -> Iterator[None]:
    """Within it, devices of this type are as described: to run another machine's choices, or count without a device."""
    before = _assumed.get(description.type)
    _assumed[description.type] = description
    try:
        yield
    finally:
        if before is None:
            del _assumed[description.type]
        else:
            _assumed[description.type] = before


_precision = threading.Lock()
_precision_users: list[str] = []  # for each block that is running just now: the setting before the first of them


def _product_precision(new: str | None = None) -> str:
    """The setting for float32 products, in the words of this version of torch; or change it."""
    if hasattr(torch.backends.cudnn, "conv"):
        if new is not None:
            torch.backends.cuda.matmul.fp32_precision = new
        return torch.backends.cuda.matmul.fp32_precision
    if new is not None:
        torch.set_float32_matmul_precision({"tf32": "high", "ieee": "highest"}.get(new, new))
    return torch.get_float32_matmul_precision()


@contextlib.contextmanager
def products_as_convolutions(device: torch.device) -> Iterator[None]:
    """Within it, float32 products may use TF32 where convolutions may: a 1x1 convolution is run as a product."""
    if device.type != "cuda":
        yield
        return
    of_convolutions = getattr(torch.backends.cudnn, "conv", None)
    if of_convolutions is None:
        allowed = torch.backends.cudnn.allow_tf32
    else:
        allowed = of_convolutions.fp32_precision == "tf32"
    with _precision:  # autograd's threads and replicas share the setting
        _precision_users.append(_precision_users[0] if _precision_users else _product_precision())
        _product_precision("tf32" if allowed else "ieee")
    try:
        yield
    finally:
        with _precision:
            before = _precision_users.pop()
            if not _precision_users:
                _product_precision(before)

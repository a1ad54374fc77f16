"""Passes over a matrix in tiles of rows, small enough that a tile stays in the cache between the passes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# On a CPU: long enough to hide Python's cost per operation, short enough for a share of the last-level cache.
# On an accelerator: few launches, and a bound on the scratch memory.
CPU_TILE_BYTES = 2**21
ACCELERATOR_TILE_BYTES = 2**26


def row_tiles(rows: int, row_bytes: int, device: torch.device, unit: int = 1) -> Iterator[slice]:
    """Slices that cover ``rows`` rows of ``row_bytes`` each, in steps of a multiple of ``unit`` (one image's rows, say)."""
    tile_bytes = CPU_TILE_BYTES if device.type == "cpu" else ACCELERATOR_TILE_BYTES
    step = max(tile_bytes // max(row_bytes * unit, 1), 1) * unit
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class Scratch:
    """Working memory of one pass over a block: each name is one allocation, grown on demand and used again."""

    def __init__(self, device: torch.device):
        self._device = device
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor, valid until the same name is taken again."""
        size = 1
        for n in shape:
            size *= n
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != dtype:
            self._flat.pop(name, None)
            flat = self._flat[name] = torch.empty(size, dtype=dtype, device=self._device)
        return flat[:size].view(shape)

    def take_zeroed(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Like :meth:`take`, but zero when the name is taken in this shape for the first time, and as it was left after."""
        flat = self._flat.get(name)
        if flat is None or flat.shape != shape or flat.dtype != dtype:
            flat = self._flat[name] = torch.zeros(shape, dtype=dtype, device=self._device)
        return flat

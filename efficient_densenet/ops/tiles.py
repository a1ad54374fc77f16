"""Passes over a matrix in tiles of rows, small enough that a tile stays in the cache between the passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# On a CPU: long enough to hide Python's cost per operation, short enough for a share of the last-level cache.
# On an accelerator: few launches, and a bound on the scratch memory.
CPU_TILE_BYTES = 2**21
ACCELERATOR_TILE_BYTES = 2**26


def tile_rows(rows: int, row_bytes: int, device: torch.device, unit: int = 1) -> int:
    """How many of ``rows`` rows of ``row_bytes`` each make a tile: a multiple of ``unit`` (one image's rows, say)."""
    tile_bytes = CPU_TILE_BYTES if device.type == "cpu" else ACCELERATOR_TILE_BYTES
    return min(max(tile_bytes // max(row_bytes * unit, 1), 1) * unit, rows)


def parts(rows: Tensor, step: int) -> Sequence[Tensor]:
    """The matrix in tiles of ``step`` rows."""
    return (rows,) if rows.shape[0] <= step else rows.split(step)


def fit(scratch: Tensor, rows: int) -> Tensor:
    """The first ``rows`` rows; the tensor itself for all but the last tile."""
    return scratch if scratch.shape[0] == rows else scratch[:rows]


class Scratch:
    """Working memory of one pass over a block: each name is one allocation, grown on demand and used again."""

    def __init__(self, device: torch.device):
        self._device = device
        self._flat: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor, valid until the same name is taken again."""
        last = self._last.get(name)
        if last is not None and last.shape == shape and last.dtype == dtype:
            return last
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != dtype:
            flat = last = None  # first give the old one back
            self._flat.pop(name, None)
            self._last.pop(name, None)
            flat = self._flat[name] = torch.empty(size, dtype=dtype, device=self._device)
        view = self._last[name] = flat[:size].view(shape)
        return view

    def take_zeroed(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Like :meth:`take`, but zero when the name is taken in this shape for the first time, and as it was left after."""
        flat = self._flat.get(name)
        if flat is None or flat.shape != shape or flat.dtype != dtype:
            flat = self._flat[name] = torch.zeros(shape, dtype=dtype, device=self._device)
        return flat

    def clear(self) -> None:
        """Give all of it back."""
        self._flat.clear()
        self._last.clear()

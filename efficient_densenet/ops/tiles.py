"""Passes over a matrix in tiles of rows, small enough that a tile stays in the cache between the passes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Long enough to hide Python's cost per tile, short enough for a share of the last-level cache.
CPU_TILE_BYTES = 2**21


def row_tiles(rows: Tensor, multiple: int = 1) -> Iterator[slice]:
    """Slices that cover the rows of a matrix, in steps of a multiple of ``multiple``; a single one on an accelerator.

    Args:
        rows: ``(m, C)``; its width and element size set how many rows fit a tile.
        multiple: rows that must stay together, such as those of one image.
    """
    count, width = rows.shape
    step = count
    if rows.device.type == "cpu":
        fitting = CPU_TILE_BYTES // max(width * rows.element_size(), 1)
        step = max(fitting // multiple, 1) * multiple
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def scratch_for(rows: Tensor, tiles: list[slice], dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised matrix that holds any of the tiles."""
    return torch.empty((max(t.stop - t.start for t in tiles), rows.shape[1]), dtype=dtype or rows.dtype, device=rows.device)

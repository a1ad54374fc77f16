"""Passes over a matrix in tiles of rows, small enough that a tile stays in the cache between the passes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .device import describe
from .overrides import is_fake

_few = False


def tile_rows(rows: int, row_bytes: int, device: torch.device, unit: int = 1) -> int:
    """How many of ``rows`` rows of ``row_bytes`` each make a tile: a multiple of ``unit`` (one image's rows, say)."""
    return min(max(describe(device).tile_bytes // max(row_bytes * unit, 1), 1) * unit, rows)


def parts(rows: Tensor, step: int) -> Sequence[Tensor]:
    """The matrix in tiles of ``step`` rows."""
    return (rows,) if rows.shape[0] <= step else _split(rows, step)


def _split(rows: Tensor, step: int) -> Sequence[Tensor]:
    if not (_few and is_fake(rows)):
        return rows.split(step)
    count = -(-rows.shape[0] // step)
    return [rows[i * step : (i + 1) * step] for i in sorted({0, 1, count - 1})]


@contextlib.contextmanager
def few_tiles() -> Iterator[None]:
    """Within it, passes over tensors without data go over the first two tiles and the last.

    The others hold what the second one holds: who follows memory has seen it all, at a cost that does not grow with the
    batch. Not seen: a mean and a variance per column for each tile left out, for as long as the pass takes.
    """
    global _few
    before, _few = _few, True
    try:
        yield
    finally:
        _few = before


def tiles(step: int, *matrices: Tensor | None) -> Iterable[tuple[Tensor | None, ...]]:
    """Matrices of equally many rows in tiles of ``step`` of them, side by side; ``None`` stays ``None``."""
    if matrices[0].shape[0] <= step:
        return (matrices,)
    columns = (itertools.repeat(None) if matrix is None else _split(matrix, step) for matrix in matrices)
    return zip(*columns)  # noqa: B905 - some repeat


def fit(scratch: Tensor, rows: int) -> Tensor:
    """The first ``rows`` rows; the tensor itself for all but the last tile."""
    return scratch if scratch.shape[0] == rows else scratch[:rows]


def as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, at no cost where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


class Scratch:
    """Working memory of one pass over a block: each name is one allocation, grown on demand and used again."""

    def __init__(self, device: torch.device):
        self._device = device
        self._flat: dict[str, Tensor] = {}
        self._taken: dict[str, tuple[int, int, torch.dtype, Tensor]] = {}

    def take(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised ``(rows, width)`` matrix, valid until the same name is taken again."""
        taken = self._taken.get(name)
        if taken is not None and taken[:3] == (rows, width, dtype):
            return taken[3]
        taken = None
        size = rows * width
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != dtype:
            flat = None  # first give the old one back
            self._flat.pop(name, None)
            self._taken.pop(name, None)
            flat = self._flat[name] = torch.empty(size, dtype=dtype, device=self._device)
        matrix = flat.as_strided((rows, width), (width, 1))
        self._taken[name] = rows, width, dtype, matrix
        return matrix

    def take_zeroed(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that is zero when the name is taken in this shape for the first time, and as it was left after."""
        flat = self._flat.get(name)
        if flat is None or flat.shape != shape or flat.dtype != dtype:
            flat = self._flat[name] = torch.zeros(shape, dtype=dtype, device=self._device)
        return flat

    def clear(self) -> None:
        """Give all of it back."""
        self._flat.clear()
        self._taken.clear()

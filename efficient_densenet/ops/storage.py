"""The block's shared buffer: every feature of a dense block in one channels-last tensor.

Layer ``l`` of a dense block reads all features before it. In channels-last order those are the first ``C_l`` columns of
one ``(m, C_total)`` matrix, ``m = N·H·W``, so reading them is a strided view and appending is a write behind them:
nothing is ever concatenated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .device import describe
from .overrides import overridable


def channels_last_empty(like: Tensor, channels: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised ``(N, channels, *spatial)`` tensor whose channels lie next to each other, of any dimension."""
    n, _, *spatial = like.shape
    return torch.empty((n, *spatial, channels), dtype=dtype or like.dtype, device=like.device).movedim(-1, 1)


def aligned_empty(like: Tensor, channels: int, dtype: torch.dtype | None = None) -> Tensor:
    """The same, in rows that start where the device loads vectors: the first columns of a matrix slightly wider."""
    dtype = dtype or like.dtype
    unit = max(describe(like.device).row_bytes // dtype.itemsize, 1)
    pitch = -(-channels // unit) * unit
    whole = channels_last_empty(like, pitch, dtype)
    return whole if pitch == channels else whole.narrow(1, 0, channels)


def as_rows(x: Tensor) -> Tensor:
    """The ``(m, C)`` matrix behind a channels-last ``(N, C, *spatial)`` tensor, or behind its first or other channels.

    A view wherever the layout allows, which is always so for slices of channels of :func:`channels_last_empty`.
    """
    return x.movedim(1, -1).flatten(0, -2)


def columns(rows: Tensor, start: int, stop: int) -> Tensor:
    """``rows[:, start:stop]``, in half the time."""
    strides = rows.stride()
    return rows.as_strided((rows.shape[0], stop - start), strides, rows.storage_offset() + start * strides[1])


class FeatureBuffer:
    """The features of one dense block in one forward pass.

    Args:
        x: the block's input, ``(N, C_0, *spatial)``; gives shape and device.
        channels: ``C_0 + L k``, all the channels the block will hold.
        dtype: the type the features are stored in.
        alone: whether nobody outside sees it, so that its rows may be aligned.
    """

    def __init__(self, x: Tensor, channels: int, dtype: torch.dtype, alone: bool = False):
        self.tensor = (aligned_empty if alone else channels_last_empty)(x, channels, dtype)

    @classmethod
    def of(cls, x: Tensor) -> FeatureBuffer:
        """What reads ``x`` alone; channels-last, it is a buffer already."""
        buffer = cls.__new__(cls)
        buffer.tensor = x.detach()
        return buffer

    def first(self, channels: int, new_first: bool = False) -> Tensor:
        """The ``channels`` features written first, as an alias with a version counter of its own.

        They stand at the beginning; at the end in a block whose new features come first.

        A plain view would share the buffer's counter, and autograd would refuse to use it after the next layer has
        written behind it, into columns the view does not even cover.
        """
        whole = self.tensor
        n, total, *spatial = whole.shape
        at = total - channels if new_first else 0
        return whole.new_empty(0).set_(
            whole.untyped_storage(), whole.storage_offset() + at, (n, channels, *spatial), whole.stride()
        )


class _Append(torch.autograd.Function):
    """Write ``y`` beside ``x`` in the buffer and return both as one tensor: ``cat([x, y], 1)`` without copying x."""

    @staticmethod
    def forward(ctx, x: Tensor | None, y: Tensor, buffer: FeatureBuffer, last: bool, new_first: bool) -> Tensor:
        before = 0 if x is None else x.shape[1]
        features = buffer.first(before + y.shape[1], new_first)
        # Where x and y are in what is returned.
        ctx.x, ctx.y = ((y.shape[1], before), (0, y.shape[1])) if new_first else ((0, before), (before, y.shape[1]))
        at = features.storage_offset() - buffer.tensor.storage_offset()
        buffer.tensor.narrow(1, at + ctx.y[0], y.shape[1]).copy_(y)
        ctx.y_dtype = y.dtype
        if last:
            # The finished block leaves the library's hands here. Whoever edits it in place edits what the layers will
            # read again; kept as a saved tensor, autograd notices before any of them does.
            ctx.save_for_backward(features)
        return features

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        ctx.saved_tensors  # noqa: B018 - raises if the finished block was edited in place
        # Indexing takes an alias where it takes all, for which torch's old vmap (is_grads_batched) has no rule.
        before = grad.narrow(1, *ctx.x) if ctx.x[1] else None
        return before, grad.narrow(1, *ctx.y).to(ctx.y_dtype), None, None, None


@overridable
def append(x: Tensor | None, y: Tensor, buffer: FeatureBuffer, last: bool = False, new_first: bool = False) -> Tensor:
    """Add ``y`` to the features ``x`` of ``buffer``; differentiable, equals ``torch.cat([x, y], 1)``.

    Args:
        x: the features so far, as :func:`append` returned them, or ``None`` for the block's input.
        y: what to write behind them.
        buffer: the storage both live in.
        last: whether the result is the finished block.
        new_first: ``torch.cat([y, x], 1)`` instead: the buffer is filled from its end.

    Shape:
        - x: ``(N, C, *spatial)``
        - y: ``(N, k, *spatial)``
        - returns: ``(N, C + k, *spatial)``, channels-last, sharing memory with ``buffer``
    """
    return _Append.apply(x, y, buffer, last, new_first)

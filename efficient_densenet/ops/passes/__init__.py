"""The passes over its matrices that a dense block is made of, each in every implementation under one name.

* :mod:`.reference`: plain torch operations on whole matrices; what the others are tested against.
* :mod:`.tiles`: torch operations on tiles that stay in the cache; any device.
* :mod:`.triton`: Triton kernels, for CUDA; they prove themselves on the device first (:mod:`.proof`).

:class:`Passes` documents them. What is common to all:

* A matrix has a row per pixel, ``m = n · hw``, and a column per channel. It may be columns of a wider one: the strides
  are ``(pitch, 1)``, ``pitch >= C``. Only what is named ``out`` or ``g``, ``statistics`` or ``correction`` is written.
* ``sizes`` are the 2 or 3 spatial sizes of an image (a line of pixels is an image of one row), ``hw`` their product.
* The features' type is what products are computed in: ``z`` and ``a`` are rounded to it, and so are the weights, which
  come as the parameters they are: any type, any strides, ``(K, C, *taps)``. Products and sums add up in
  :func:`~.vectors.wide_type`. Whether float32 may be TF32 is what torch says of convolutions.
* Vectors are ``(C,)`` in the wide type and contiguous, or rows of a ``(2, C)`` slice with strides ``(pitch, 1)``.
* A NaN or an infinity goes where it goes in the plain model: ``relu(NaN)`` is NaN, the mask is ``not z <= 0``.
* ``scratch`` is the block's working memory. What a pass returns as :class:`~.vectors.Partial` or ``Pending`` may lie in
  it, and is good until the next pass but the one that finishes it.
* Nothing waits for the device, and sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..tiles import Scratch
from .vectors import Correction, FoldedNorm, Gradients, Need, Partial, Pending, Rebuild, merge, wide_type

__all__ = [
    "Correction", "FoldedNorm", "Gradients", "Need", "Partial", "Passes", "Pending", "Rebuild", "choice",
    "implementation", "merge", "wide_type",
]  # fmt: skip


class Passes(Protocol):
    """The names and signatures every implementation, a module, has."""

    # Statistics and norms

    @staticmethod
    def statistics(x: Tensor, statistics: Tensor, scratch: Scratch) -> Partial | None:
        """Mean and biased variance of the columns of ``x``, ``(m, C)``, into ``statistics``, ``(2, C)``.

        Returns:
            ``None`` if they are there; else the parts that :meth:`fold` is still to merge into them.
        """

    @staticmethod
    def fold(
        mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, batch: bool,
        new: Partial | None, at: int, scratch: Scratch,
    ) -> FoldedNorm:  # fmt: skip
        """One small step: finish the statistics of the newest channels, and fold a norm that reads them.

        Args:
            mean, var: ``(C,)``, of all channels the norm reads; with ``new``, written at ``[at : at + its C]``.
                Running statistics may be of another type, and may change afterwards: the result holds a copy of them.
            gamma, beta: the affine parameters, or ``None``.
            eps: added to the variance.
            batch: whether the statistics are the batch's (the result's ``mean`` then is ``mean``), else running ones.
            new: what the pass before left of the statistics of channels it wrote, or ``None``.
            at: where those channels are among the norm's.
        """

    # A layer forward

    @staticmethod
    def conv1x1_forward(
        x: Tensor, norm: FoldedNorm, weight: Tensor, bias: Tensor | None, out: Tensor, statistics: Tensor | None,
        scratch: Scratch,
    ) -> Partial | None:  # fmt: skip
        """``out = relu(norm(x)) Wᵀ + bias``, and the statistics of ``out`` as stored.

        Args:
            x: ``(m, C)``.
            weight: ``(K, C, 1, 1)`` or ``(K, C, 1, 1, 1)``.
            bias: ``(K,)`` or ``None``.
            out: ``(m, K)``.
            statistics: ``(2, K)``, where mean and variance go; ``None`` where nobody asks.

        Returns:
            as :meth:`statistics`; ``None`` where nobody asked.
        """

    @staticmethod
    def conv3x3_forward(
        x: Tensor, norm: FoldedNorm, weight: Tensor, bias: Tensor | None, factor: Tensor | None,
        sizes: tuple[int, ...], out: Tensor, statistics: Tensor | None, scratch: Scratch,
    ) -> Partial | None:  # fmt: skip
        """``out = factor · (conv(relu(norm(x)), W) + bias)``, padded with zeros, and the statistics of ``out``.

        Args:
            x: ``(m, C)``: conv1's output, or the features themselves in a layer without bottleneck.
            weight: ``(K, C, 3, 3)``, ``(K, C, 3, 3, 3)`` or ``(K, C, 1, 3)``.
            bias: ``(K,)`` or ``None``.
            factor: dropout's factors, ``(n, hw, K)``, or ``(n, 1, K)`` for whole channels, any strides; or ``None``.
            out: ``(m, K)``, columns of the block's buffer.
            statistics: ``(2, K)`` or ``None``.
        """

    # A layer backward

    @staticmethod
    def conv3x3_backward(
        x: Tensor, norm: FoldedNorm, weight: Tensor, y: Tensor, grad: Tensor, correction: Correction | None,
        factor: Tensor | None, sizes: tuple[int, ...], out: Tensor | None, first: int | None, need: Need,
        scratch: Scratch,
    ) -> Pending:  # fmt: skip
        """Backwards through :meth:`conv3x3_forward`, from ``dy = factor · (grad + slope (y - mean) + level)``.

        ``dz`` is the gradient at the norm's output where ``relu(norm(x))`` is not zero.

        Args:
            x, norm, weight, factor, sizes: as forward.
            y: ``(m, K)``: what forward wrote to ``out``.
            grad: ``(m, K)``: columns of the block's gradient buffer.
            correction: of those columns, or ``None`` where nobody has read them through batch statistics: then
                ``dy = factor · grad``, and no term of zero times ``y``.
            out: where the gradient of what was read goes, or ``None``.
            first: ``None``: ``out``, ``(m, C)``, becomes ``dz``. Else ``out``, columns of the gradient buffer, is that of
                the channels of ``x`` from ``first`` on, and ``scale dz`` is added to it.
            need: what else is wanted.
        """

    @staticmethod
    def conv1x1_backward(
        x: Tensor, norm: FoldedNorm, weight: Tensor, b: Tensor, dz2: Tensor, norm2: FoldedNorm,
        correction2: Correction | None, g: Tensor | None, first: int, need: Need, scratch: Scratch,
    ) -> Pending:  # fmt: skip
        """Backwards through :meth:`conv1x1_forward` in one pass: ``db, dz = mask(db W)``, ``g += scale dz``, dW, sums.

            db = scale2 dz2 + slope2 (b - mean2) + level2

        Args:
            x, norm, weight: as forward.
            b: ``(m, K)``, what forward gave.
            dz2: ``(m, K)``, the gradient at the output of the norm behind it.
            norm2: that norm.
            correction2: its correction, or ``None`` where its statistics are running ones.
            g: columns of the gradient buffer for the channels of ``x`` from ``first`` on, added to; ``None``: not wanted.
            first: see ``g``.
            need: what else is wanted.
        """

    @staticmethod
    def finish_backward(
        pending: Pending, norm: FoldedNorm, weight: Tensor | None, count: int, correction: Tensor | None,
        scratch: Scratch, rebuild: Rebuild | None = None,
    ) -> Gradients:  # fmt: skip
        """Small sums at the end of a backward pass: the parameters' gradients, and the norm's part of a correction.

            dbeta = Σ dz,   dgamma = r Σ dz (x - mean)
            slope -= r² (gamma dgamma) / count,   level -= scale dbeta / count

        Args:
            pending: what that pass returned.
            norm: the norm it went through.
            weight: the convolution's, or ``None`` where there is none.
            count: m, of the batches of all processes together.
            correction: ``(2, C)``, slope and level, added to; ``None``: not wanted.
            rebuild: a convolution to run at the same time, in the same launch where there are any: it depends on none of
                this, and the pass before no longer on what it writes.

        Returns:
            What was needed, else ``None``: sums give both gamma's and beta's.
        """

    @staticmethod
    def correct(
        x: Tensor, g: Tensor, scale: Tensor | None, correction: Correction | None, out: Tensor, scratch: Scratch
    ) -> None:
        """``out = scale g + slope (x - mean) + level``, rounded once.

        Args:
            x: ``(m, C)``.
            g: ``(m, C)``, and may be ``out``.
            scale: ``(C,)``, or ``None`` for one.
            correction: or ``None`` for no further term.
            out: ``(m, C)``.
        """

    # What stands before and behind the blocks

    @staticmethod
    def norm_relu(x: Tensor, norm: FoldedNorm, out: Tensor, scratch: Scratch) -> None:
        """``out = relu(norm(x))``, both ``(m, C)``."""

    @staticmethod
    def norm_relu_backward(
        x: Tensor, norm: FoldedNorm, grad: Tensor, out: Tensor | None, first: int | None, need: Need, scratch: Scratch
    ) -> Pending:
        """Backwards through :meth:`norm_relu`.

        Args:
            x: ``(m, C)``.
            grad: ``(n, hw, C)`` in any strides, zeros included: the gradient of what was given.
            out: ``(m, C')`` or ``None``: not wanted.
            first: ``None``: ``out`` becomes ``dz``, ``C' = C``. Else it becomes ``scale dz`` of the channels from
                there on.
        """

    @staticmethod
    def transition_forward(
        x: Tensor, norm: FoldedNorm, weight: Tensor, bias: Tensor | None, pool: tuple[int, ...],
        sizes: tuple[int, ...], out: Tensor, scratch: Scratch,
    ) -> None:  # fmt: skip
        """``out = AvgPool(relu(norm(x))) Wᵀ + bias``, which is the convolution before the pooling.

        Args:
            x: ``(m, C)``.
            weight: ``(K, C, 1, 1)`` or ``(K, C, 1, 1, 1)``.
            pool: the window, which is the stride; what is left over at the end is not read.
            sizes: of an image of ``x``.
            out: ``(n · product of size // pool, K)``.
        """

    @staticmethod
    def transition_backward(
        x: Tensor, norm: FoldedNorm, weight: Tensor, grad: Tensor, pool: tuple[int, ...], sizes: tuple[int, ...],
        out: Tensor | None, first: int, need: Need, scratch: Scratch,
    ) -> Pending:  # fmt: skip
        """Backwards through :meth:`transition_forward`; ``out`` becomes ``scale dz``.

        Args:
            grad: ``(n, product of size // pool, K)`` in any strides.
            out: for the channels of ``x`` from ``first`` on, every row written; ``None``: not wanted.
        """

    @staticmethod
    def norm_relu_max_pool(
        x: Tensor, norm: FoldedNorm, window: tuple, sizes: tuple[int, ...], out: Tensor, scratch: Scratch
    ) -> None:
        """``out = max_pool(relu(norm(x)))``.

        Args:
            x: ``(m, C)``.
            window: kernel, stride, padding, dilation, each with a value per size, and ``ceil_mode``.
            sizes: of an image of ``x``.
            out: ``(n, C, *pooled)``, channels-last.
        """

    @staticmethod
    def norm_relu_max_pool_backward(
        x: Tensor, norm: FoldedNorm, window: tuple, sizes: tuple[int, ...], grad: Tensor, out: Tensor, need: Need,
        scratch: Scratch,
    ) -> Pending:  # fmt: skip
        """Backwards through :meth:`norm_relu_max_pool`: ``out``, ``(m, C)``, becomes ``dz``.

        Args:
            grad: ``(n, C, *pooled)`` in any strides.
        """

    # How the sums are to be found

    @staticmethod
    def short_cuts(norms: Sequence[FoldedNorm], dtype: torch.dtype) -> set[FoldedNorm]:
        """The norms whose :class:`Need` may have a ``short_cut``, which goes with the convolution's weight.

        Asked once for a block's backward pass; ``dtype`` is the features'. May wait for a CPU only.
        """


def implementation(device: torch.device, dtype: torch.dtype) -> Passes:
    """The passes that run on this device for features of this type."""
    from . import launch, tiles

    if launch.why_not(device, dtype) is None:
        from . import triton

        return triton
    return tiles


def choice(device: torch.device, dtype: torch.dtype) -> str:
    """What :func:`implementation` chooses and why, in words; and which kernels were found wanting so far."""
    from . import launch, proof

    why = launch.why_not(device, dtype)
    if why is not None:
        return f"torch's operations: {why}"
    failed = [name for (name, of), verdict in proof.verdicts(device).items() if verdict is not None and of == dtype]
    return "Triton kernels" + (f", but torch's operations for {', '.join(failed)}" if failed else "")

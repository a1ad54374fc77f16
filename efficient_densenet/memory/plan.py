"""A plan for a budget: which blocks keep their conv1's outputs, and which compute them again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..models.densenet import BlockSize, DenseNet, highest
from .estimate import MakesOptimizer, MemoryEstimate, bytes_of, rehearsal

NEAR = 0.02  # how far beyond the budget the additive model may be for a plan that is tried all the same


def fit_plan(
    model: DenseNet,
    input_shape: Sequence[int],
    budget: int | str,
    dtype: str | torch.dtype | None = None,
    optimizer: Optimizer | MakesOptimizer | None = None,
    device: torch.device | str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> tuple[str, ...]:
    """The modes, fused or lean for each block, that fit into a budget with the fewest multiplications repeated.

    A block that keeps its conv1's outputs holds them while it and all behind it go backward: sums that say how the
    peak of any plan lies between that of fused and that of lean, both of which are predicted; and so is the answer.

    Args:
        model: a network of this library; all arguments as for :func:`estimate_memory`.
        input_shape: of its input, batch included.
        budget: bytes of everything, or a text such as ``"8GiB"``.

    Returns:
        What :meth:`DenseNet.set_efficient` takes.

    Raises:
        ValueError: not even lean in all blocks fits; says what it takes.

    Example:
        >>> from efficient_densenet import densenet_bc
        >>> fit_plan(densenet_bc(depth=22, growth_rate=12), (8, 3, 32, 32), "18MiB")
        ('lean', 'fused', 'fused')
    """
    if not isinstance(model, DenseNet):
        raise TypeError(f"model must be a DenseNet of this library, got {type(model).__name__}")
    budget = bytes_of(budget)
    with rehearsal(model, dtype, optimizer, device, loss) as step:
        plan, found = cheapest(model.block_sizes(input_shape), lambda modes: step(input_shape, modes), budget)
    if found.peak_bytes > budget:
        raise ValueError(f"budget: lean in all blocks takes {found.peak_bytes:,} bytes, more than {budget:,}")
    return plan


def cheapest(
    sizes: Sequence[BlockSize], predict: Callable[[tuple[str, ...]], MemoryEstimate], budget: int
) -> tuple[tuple[str, ...], MemoryEstimate]:
    """The plan and its estimate; that of lean in all blocks if none fits."""

    def modes(kept: set[nn.Module]) -> tuple[str, ...]:
        return tuple("fused" if size.block in kept else "lean" for size in sizes)

    everything = {size.block for size in sizes}
    fused, lean = predict(modes(everything)), predict(modes(set()))
    if fused.peak_bytes <= budget:
        return modes(everything), fused
    least, most = highest(sizes, set()), highest(sizes, everything)
    scale = (fused.peak_bytes - lean.peak_bytes) / max(most - least, 1)
    plans = []
    for kept in itertools.product((True, False), repeat=len(sizes)):
        blocks = {size.block for size, keeps in zip(sizes, kept, strict=True) if keeps}
        peak = lean.peak_bytes + scale * (highest(sizes, blocks) - least)
        if peak <= (1 + NEAR) * budget and 0 < len(blocks) < len(sizes):
            repeated = sum(size.rows * size.block.repeated() for size in sizes if size.block not in blocks)
            plans.append((repeated, peak, modes(blocks)))
    for _, _, plan in sorted(plans):
        if (found := predict(plan)).peak_bytes <= budget:
            return plan, found
    return modes(set()), lean

"""Gradients by torch's own operations, where those of this package's functions are asked for more than they can do.

Their backward passes work in place, on one gradient. Where it is to be differentiated again (``create_graph``), or is
many gradients in one (``is_grads_batched``, ``vectorize=True``, ``torch.func.vmap`` round ``autograd.grad``), the plain
formula is computed once more and autograd differentiates that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


def in_a_transform() -> bool:
    """Whether a transform of ``torch.func`` is running, ``vmap`` of gradients included."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return bool(active and active())


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """What is done within concerns tensors of before any transform alone: as if there was none."""
    with contextlib.ExitStack() as leave:
        if in_a_transform():
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            leave.enter_context(temporarily_clear_interpreter_stack())
        for _ in range(levels_of_batched_gradients()):  # among which torch forbids random numbers
            torch._C._vmapmode_decrement_nesting()
            leave.callback(torch._C._vmapmode_increment_nesting)
        yield


def levels_of_batched_gradients() -> int:
    """How many vmaps of ``torch.autograd`` itself are running: ``is_grads_batched``, ``vectorize=True``."""
    if not hasattr(torch._C, "_vmapmode_increment_nesting"):
        return 0
    torch._C._vmapmode_increment_nesting()
    return torch._C._vmapmode_decrement_nesting()


def is_many(grad: Tensor) -> bool:
    """Whether ``grad`` is many gradients of such a vmap; known to the tensor also in the threads of devices."""
    is_batched = getattr(getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", None)
    return is_batched is not None and is_batched(grad)


def must_rebuild(grad: Tensor) -> bool:
    """Whether the backward pass that got ``grad`` needs :func:`rebuilt_gradients`."""
    return torch.is_grad_enabled() or in_a_transform() or is_many(grad)


def rebuilt_gradients(
    reference: Callable[..., Tensor], tensors: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of ``reference(*tensors)`` for those that need one; differentiable where the backward pass is.

    Args:
        reference: the plain formula.
        tensors: its arguments, as they were saved.
        needed: for each, whether its gradient is wanted.
        grad: the gradient of the result; under vmap, many.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), outside_transforms():
        out = reference(*tensors)
    wanted = [t for t, need in zip(tensors, needed, strict=True) if need]
    gradients = iter(torch.autograd.grad(out, wanted, grad, create_graph=create_graph, allow_unused=True))
    return [next(gradients) if need else None for need in needed]

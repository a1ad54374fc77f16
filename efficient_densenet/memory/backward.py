"""``loss.backward()`` for tensors on a device that is not there.

torch's engine hands every node to a thread of its device and asks the driver for that device, also where the tensors
are fake. The walk here does the same on the calling thread: nodes in the engine's order (the latest first, leaves at
once), gradients fitted to what they belong to and added up, what a node has saved given back once it has run.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_LEAF = "torch::autograd::AccumulateGrad"


def backward(losses: list[Tensor], device: torch.device) -> None:
    """The backward pass of one loss, on any device.

    Not run are hooks on tensors, parameters and nodes; and a backward within the backward (torch's reentrant
    checkpointing) fails as before.

    Args:
        losses: the loss alone; it is taken out, as whoever holds it holds the graph.
        device: where it is.
    """
    if device.type == "cpu":
        losses.pop().backward()
        return
    with torch.no_grad():
        grad = torch.ones_like(losses[0])
    start = [(losses.pop().grad_fn, grad)]
    del grad
    # Within a pass of torch's own engine, over a number on the CPU: grad mode and the identity of this pass, by which
    # checkpointing tells one backward from the next, are then as in any other.
    trigger = torch.ones((), device="cpu", requires_grad=True)
    _Within.apply(trigger, lambda: _walk(start)).backward()


class _Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None


def _walk(start: list[tuple[Any, Tensor]]) -> None:
    """Run the graph behind a node from the gradient of its output; ``start`` is emptied."""
    node, grad = start.pop()
    waits_for = _edges_into(node)
    grads: dict[Any, list[Tensor | None]] = {node: [grad]}
    ready = [(0, 0, node)]
    pushed = 0
    del grad
    while ready:
        *_, node = heapq.heappop(ready)
        results = _run(node, grads.pop(node))
        edges = [edge for edge in node.next_functions if edge[0] is not None or not isinstance(node, BackwardCFunction)]
        waits_for.pop(node, None)
        del node  # and with it what it has saved
        for i, (after, place) in enumerate(edges):
            grad, results[i] = results[i], None
            if after is None:
                continue
            held = grads.setdefault(after, [None] * max(len(after._input_metadata), place + 1))
            if grad is not None:
                grad = _fitted(grad, after._input_metadata[place])
                held[place] = grad if held[place] is None else held[place] + grad
            del grad, held
            waits_for[after] -= 1
            if not waits_for[after]:
                pushed += 1
                heapq.heappush(ready, (-_order(after), pushed, after))
        after = edges = results = None


def _edges_into(root: Any) -> Counter:
    """How many edges lead into every node behind ``root``."""
    edges, seen, stack = Counter(), {root}, [root]
    while stack:
        for after, _ in stack.pop().next_functions:
            if after is None:
                continue
            edges[after] += 1
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return edges


def _order(node: Any) -> int:
    return 2**63 if node.name() == _LEAF else node._sequence_nr()


def _run(node: Any, grads: list[Tensor | None]) -> list[Tensor | None]:
    """What a node makes of the gradients of its outputs, one for each of its edges."""
    if node.name() == _LEAF:
        _add_to_leaf(node.variable, grads.pop())
        return []
    if not isinstance(node, BackwardCFunction):
        results = node(*grads)
        return list(results) if isinstance(results, tuple) else [results]
    for i, (grad, meta) in enumerate(zip(grads, node._input_metadata, strict=True)):
        if grad is None:
            grads[i] = torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)
    results = node.apply(*grads)
    results = results if isinstance(results, tuple) else (results,)
    # It answers for every argument, but only tensors that need a gradient have edges.
    return [result for result, needed in zip(results, node.needs_input_grad, strict=True) if needed]


def _fitted(grad: Tensor, meta: Any) -> Tensor:
    if grad.shape != torch.Size(meta.shape):
        grad = grad.sum_to_size(tuple(meta.shape))
    return grad.to(meta.dtype)


def _add_to_leaf(leaf: Tensor, grad: Tensor | None) -> None:
    """Into ``leaf.grad``: taken over as it is if its strides are the leaf's, copied if not, added if there is one."""
    if grad is None:
        return
    if leaf.grad is not None:
        leaf.grad.add_(grad)
        return
    strides = [(n, a, b) for n, a, b in zip(leaf.shape, leaf.stride(), grad.stride(), strict=True) if n > 1]
    if any(a != b for _, a, b in strides):
        grad = torch.empty_strided(leaf.shape, leaf.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)
    leaf.grad = grad.detach()

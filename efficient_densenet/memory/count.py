"""A training step on tensors without data: what it launches, moves and holds on a device that need not be there."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ..ops.device import H200, assume, describe, is_assumed
from .backward import backward
from .rules import views_by_their_kernel
from .tracker import Tracker, Traffic


@dataclass(frozen=True)
class StepCount:
    """What one training step costs a device.

    Attributes:
        peak_bytes: the most that was allocated at one moment, over what was there before.
        kept_bytes: what was still allocated after the forward pass.
        forward, backward: what each of them launches and moves.
        operators: the same by phase and operator.
    """

    peak_bytes: int
    kept_bytes: int
    forward: Traffic
    backward: Traffic
    operators: dict[tuple[str, str], Traffic] = field(repr=False)

    @property
    def total(self) -> Traffic:
        """What both passes launch and move."""
        return self.forward + self.backward


def count_step(
    model: nn.Module,
    x: Tensor,
    loss: Callable[[Tensor], Tensor] = torch.sum,
    device: torch.device | str = "cuda",
    autocast: torch.dtype | None = None,
) -> StepCount:
    """Count one training step, ``loss(model(x)).backward()``, on a copy of the model without data.

    The model's own code runs, and torch's for that device, on fake tensors: nothing is computed, no memory is taken,
    and no device is needed. Gradients of the parameters count; parameters, buffers and ``x`` were there before and do
    not. Storages count at the size asked for; workspaces of cuDNN and cuBLAS, and what operators take and give back
    inside, are not seen. Kernels per operator of torch are those of its eager mode, by its sources.

    Args:
        model: the model, in the mode to count, on any device ("meta" serves).
        x: stands for its input, batch included, by shape, type, layout and ``requires_grad``; on any device.
        loss: a scalar from the model's output; what else it needs it makes on the output's device.
        device: what the step is meant for: ``"cuda"`` or ``"cpu"``.
        autocast: the type of ``torch.autocast``, or None for a step without.

    Raises:
        ValueError: a device of another type.
        RuntimeError: CUDA is asked for, and this torch is too old for it (2.4 is).

    Example:
        >>> from efficient_densenet import densenet_bc
        >>> step = count_step(densenet_bc(depth=40, growth_rate=12), torch.empty(64, 3, 32, 32, device="meta"))
        >>> step.total.host_waits
        0
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA device, got {str(device)!r}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    tracker = Tracker(device.type)
    with without_data(device):
        model, x = on(model, device), empty_like(x, device)
        tracker.adopt([*model.parameters(), *model.buffers(), x])
        with tracker:
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                losses = [loss(model(x))]
            kept = tracker.live_bytes - tracker.before_bytes
            tracker.phase = "backward"
            backward(losses, device)
    return StepCount(
        tracker.peak_bytes - tracker.before_bytes,
        kept,
        tracker.total("forward"),
        tracker.total("backward"),
        tracker.operators,
    )


@contextlib.contextmanager
def without_data(device: torch.device) -> Iterator[None]:
    """Every tensor made inside is fake; a CUDA device that is not there is taken for an H200, also by autocast."""
    from torch._subclasses import FakeTensorMode

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    if device.type == "cuda" and not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):  # it asks the driver, and aborts
        raise RuntimeError(f"torch {torch.__version__} cannot count for CUDA without a device; a newer one can")
    absent = device.type == "cuda" and not torch.cuda.is_available()
    fake.cache_enabled = False  # it would keep storages given to set_ alive, every block's buffer among them
    with contextlib.ExitStack() as stack:
        if absent:
            select = _in_half_precision(torch._C._select_conv_backend)
            stack.enter_context(mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
            stack.enter_context(mock.patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True))
            stack.enter_context(mock.patch.object(torch._C, "_select_conv_backend", select))
        if device.type == "cuda" and not is_assumed(device):
            stack.enter_context(assume(H200 if absent else describe(device)))
        stack.enter_context(views_by_their_kernel())
        stack.enter_context(fake)
        yield


def _in_half_precision(select: Callable[..., Any]) -> Callable[..., Any]:
    """The choice of a convolution's backend, which without a device denies bfloat16 cuDNN and its layout."""

    def chosen(*tensors: Tensor, bias: Tensor | None = None, **settings: Any) -> Any:
        def half(t: Tensor | None) -> Tensor | None:
            if t is None or t.dtype != torch.bfloat16:
                return t
            return torch.empty_strided(t.shape, t.stride(), dtype=torch.float16, device=t.device)  # launches nothing

        *tensors, bias = map(half, (*tensors, bias))
        return select(*tensors, bias=bias, **settings)

    return chosen


def on(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype | None = None,
    memo: dict[int, Any] | None = None,
) -> nn.Module:
    """A copy of the model with fake parameters and buffers of the same shapes and strides on ``device``.

    Args:
        model: on any device.
        device: of the copies.
        dtype: of those that are floating-point; by default their own.
        memo: takes the copies, by ``id`` of what they are of.
    """
    memo = {} if memo is None else memo
    for tensor in (*model.parameters(), *model.buffers()):
        fake = empty_like(tensor, device, dtype)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(model, memo)


def empty_like(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the same shape, strides and ``requires_grad`` on ``device``; if floating-point, of that ``dtype``."""
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return empty.requires_grad_(tensor.requires_grad)

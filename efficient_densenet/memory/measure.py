"""The memory of a training step, measured from real allocations."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function

T = TypeVar("T")
_FORWARD = "efficient_densenet: forward"


@dataclass(frozen=True)
class Allocations:
    """Bytes allocated while something ran, over what was allocated before.

    Attributes:
        peak_bytes: the most that was allocated at one moment.
        kept_bytes: what was still allocated after the forward pass; for a training step, what is kept for the backward.
    """

    peak_bytes: int
    kept_bytes: int


def measure_step(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] = torch.sum) -> Allocations:
    """Peak of allocations in one training step, and the bytes kept after its forward pass.

    A step is ``loss(model(x)).backward()``. Gradients of the parameters are dropped before and after it, so they count;
    parameters, buffers and ``x`` were there before and do not. Running statistics move as in any training forward.
    What is counted, and what is not, is said in :func:`measure_allocations`.

    Args:
        model: the model, in the mode (training, eval, ``set_efficient``) to measure, on the device of ``x``.
        x: its input, batch included.
        loss: a scalar from the model's output.

    Returns:
        Bytes; on the CPU the same in every run, on CUDA after a step that warmed it up (the first one also allocates
        the workspaces of cuBLAS).

    Example:
        >>> from efficient_densenet import densenet_bc
        >>> model = densenet_bc(depth=40, growth_rate=12, efficient=False)
        >>> naive = measure_step(model, torch.randn(4, 3, 32, 32))
        >>> measure_step(model.set_efficient(True), torch.randn(4, 3, 32, 32)).peak_bytes < 0.5 * naive.peak_bytes
        True
    """
    model.zero_grad(set_to_none=True)
    try:
        return measure_allocations(lambda: loss(model(x)), Tensor.backward, x.device)
    finally:
        model.zero_grad(set_to_none=True)


def measure_allocations(
    forward: Callable[[], T],
    backward: Callable[[T], object] | None = None,
    device: torch.device | str = "cpu",
) -> Allocations:
    """Run ``backward(forward())`` once and follow what it allocates on ``device``.

    On the CPU every call of torch's allocator is recorded (by ``torch.autograd.profiler``) and added up. Counted, each
    at the size asked for: the storage of every tensor (a view or an in-place operation has none of its own), whatever
    its way to life: activations, gradients, temporaries inside operators, and the scratch that kernels take from the
    allocator, oneDNN's included. Not counted: storages that existed before, or their release; memory that libraries
    take for themselves (packing buffers of BLAS, oneDNN's cached primitives); Python objects; what the C library adds
    by rounding and fragmentation; and threads that ``forward`` starts itself (autograd's are counted).

    On CUDA the counters of torch's caching allocator are read, for the whole device: the same, at sizes rounded up to
    512 bytes, the workspaces of cuDNN and cuBLAS included, memory reserved but not in use excluded.

    Args:
        forward: its result, and all that the result keeps alive, is held until ``backward`` has run.
        backward: what is run on that result, or nothing.
        device: the CPU or a CUDA device.

    Raises:
        ValueError: a device of another type.

    Example:
        >>> measure_allocations(lambda: torch.ones(1000).relu())  # two tensors of 4,000 bytes; the first does not last
        Allocations(peak_bytes=8000, kept_bytes=4000)
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _measure_cuda(forward, backward, device)
    if device.type == "cpu":
        return _measure_cpu(forward, backward)
    raise ValueError(f"device must be a CPU or a CUDA device, got {str(device)!r}")


def _measure_cuda(forward, backward, device: torch.device) -> Allocations:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = forward()
    kept = torch.cuda.memory_allocated(device)
    if backward is not None:
        backward(result)
    return Allocations(torch.cuda.max_memory_allocated(device) - before, kept - before)


def _measure_cpu(forward, backward) -> Allocations:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler talks on standard error, from its first use on
    with profile(profile_memory=True) as recorded:
        with record_function(_FORWARD):
            result = forward()
        if backward is not None:
            backward(result)

    with tempfile.TemporaryDirectory() as folder:  # the trace file is the one public way to every single event
        path = os.path.join(folder, "trace.json")
        recorded.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    span = next(event for event in events if event["name"] == _FORWARD)
    end_of_forward = span["ts"] + span["dur"]
    calls = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == 0]
    calls.sort(key=lambda event: event["ts"])

    live: dict[int, int] = {}  # by address: the release of a storage from before has no part in the sum
    allocated = peak = kept = 0
    for event in calls:
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            live[address] = size
            allocated += size
        else:
            allocated -= live.pop(address, 0)
        peak = max(peak, allocated)
        if event["ts"] <= end_of_forward:
            kept = allocated
    return Allocations(peak, kept)

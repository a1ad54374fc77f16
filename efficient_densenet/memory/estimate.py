"""What a training step will hold at its worst moment, found out without running it."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..models.layers import DenseBlock, mode_name
from ..ops.tiles import few_tiles
from .backward import backward
from .count import empty_like, on, without_data
from .tracker import Tracker

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
TYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
CUDA_BLOCK = 512  # the caching allocator rounds up to multiples of these bytes

Mode = bool | str | Sequence[bool | str]
MakesOptimizer = Callable[..., Optimizer]


@dataclass(frozen=True)
class MemoryEstimate:
    """The worst moment of a training step, in bytes by part.

    Attributes:
        weight_bytes, buffer_bytes, input_bytes: the model's parameters and buffers, and its input.
        gradient_bytes: gradients of the parameters that are there by then.
        optimizer_bytes: the optimizer's state.
        kept_bytes: what the forward pass keeps for the backward one.
        scratch_bytes: all else: what operators work in, gradients on their way.
        when: the moment: ``"forward"``, ``"backward"`` or ``"optimizer"``, the step of the optimizer.
    """

    weight_bytes: int
    buffer_bytes: int
    input_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    scratch_bytes: int
    when: str

    @property
    def step_bytes(self) -> int:
        """What the step adds to weights, buffers and input: comparable to :func:`measure_step`."""
        return self.gradient_bytes + self.optimizer_bytes + self.kept_bytes + self.scratch_bytes

    @property
    def peak_bytes(self) -> int:
        """Everything that is there."""
        return self.weight_bytes + self.buffer_bytes + self.input_bytes + self.step_bytes


def estimate_memory(
    model: nn.Module,
    input_shape: Sequence[int] | Tensor,
    mode: Mode | None = None,
    dtype: str | torch.dtype | None = None,
    optimizer: Optimizer | MakesOptimizer | None = None,
    device: torch.device | str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> MemoryEstimate:
    """Predict the memory of a training step, without running it and without the device it is meant for.

    The model's own code and the optimizer's run once on tensors without data, on a copy; every storage is followed from
    its birth to its death. The model is left alone, and no random numbers are drawn. The step is one of many: the
    optimizer's state is there, gradients are ``None`` before.

    Not in it, as for :func:`count_step`: on CUDA the workspaces of cuDNN and cuBLAS, the context (some hundred MiB), and
    what the allocator has reserved and does not use.

    Args:
        model: any module, in the state (training, eval, layout) to predict, on any device, ``"meta"`` included.
        input_shape: of its input, batch included; or a tensor that stands for it, by shape, type and layout.
        mode: what :meth:`DenseNet.set_efficient` takes, a plan included; by default what the model is set to.
        dtype: ``"bf16"`` or ``"fp16"`` for autocast; ``"float32"`` or a type of torch's for weights and input of that
            type; by default as the model is.
        optimizer: an optimizer of the model's parameters, or a class or function that makes one from them.
        device: ``"cpu"`` or ``"cuda"``, which need not be there; by default where the model is.
        loss: a scalar from the model's output; by default the sum of all tensors in it that need a gradient.

    Raises:
        ValueError: an argument that cannot work; names it and what would.
        RuntimeError: CUDA is asked for, and this torch is too old for it (2.4 is).

    Example:
        >>> from efficient_densenet import densenet121
        >>> with torch.device("meta"):
        ...     model = densenet121()
        >>> naive, lean = (estimate_memory(model, (2, 3, 64, 64), mode, device="cpu") for mode in ("naive", "lean"))
        >>> lean.kept_bytes < 0.2 * naive.kept_bytes
        True
    """
    with rehearsal(model, dtype, optimizer, device, loss) as step:
        return step(input_shape, mode)


@contextlib.contextmanager
def rehearsal(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    optimizer: Optimizer | MakesOptimizer | None = None,
    device: torch.device | str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Iterator[Callable[..., MemoryEstimate]]:
    """``step(input_shape, mode)`` as often as needed, on one copy of the model; arguments as :func:`estimate_memory`.

    Everything in between runs on tensors without data.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module) or (
        isinstance(inner := getattr(model, "module", None), nn.Module) and "Parallel" in type(model).__name__
    ):
        model = inner  # compiled, DataParallel, DistributedDataParallel
    autocast, dtype = _types(dtype)
    device = _device(model, device)
    granularity = CUDA_BLOCK if device.type == "cuda" else 1
    memo: dict[int, Any] = {}
    with without_data(device), few_tiles(), _same_optimizers(device):
        twin = on(model, device, dtype, memo)
        parameters = list(twin.parameters())
        floating = next((p.dtype for p in parameters if p.is_floating_point()), torch.get_default_dtype())

        def step(input_shape: Sequence[int] | Tensor, mode: Mode | None = None) -> MemoryEstimate:
            if mode is not None:
                set_mode(twin, mode)
            x = _input(input_shape, device, floating, dtype)
            trains = optimizer and _optimizer(optimizer, parameters, memo, device)
            tracker = Tracker(device.type, granularity)
            tracker.adopt(parameters, "weights")
            tracker.adopt(twin.buffers(), "buffers")
            tracker.adopt([x], "input")
            if trains:
                tracker.adopt(_state(trains), "optimizer")
            twin.zero_grad(set_to_none=True)
            try:
                with tracker:
                    with torch.autocast(device.type, autocast, enabled=autocast is not None):
                        losses = [(loss or summed)(twin(x))]
                    tracker.move("forward", "kept")
                    tracker.phase = "backward"
                    backward(losses, device)
                    tracker.mark((p.grad for p in parameters), "gradients")
                    tracker.phase = "optimizer"
                    if trains:
                        _step(trains)
                        tracker.mark(_state(trains), "optimizer", from_the_start=True)
            finally:
                twin.zero_grad(set_to_none=True)
            worst = tracker.worst()
            known = ("weights", "buffers", "input", "gradients", "optimizer", "kept")
            sizes = {part: worst.parts.get(part, 0) for part in known}
            sizes["buffers"] += worst.parts.get("before", 0)  # tensors that modules hold in their own ways
            rest = worst.bytes - sum(sizes.values())
            return MemoryEstimate(*sizes.values(), rest, worst.phase)

        yield step


def summed(output: Any) -> Tensor:
    """The sum of all that needs a gradient in a model's output: a tensor, or tensors in tuples, lists and dicts."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not tensors:
        raise ValueError("model: nothing in its output needs a gradient, so there is no training step to predict")
    total = tensors[0].sum()
    for tensor in tensors[1:]:
        total = total + tensor.sum()
    return total


def set_mode(model: nn.Module, mode: Mode) -> None:
    """Set the mode of every network of this library in a module, or else its dense blocks, and of what is converted.

    Raises:
        ValueError: there is none.
    """
    settable = [module for module in model.modules() if callable(getattr(module, "set_efficient", None))]
    for module in settable:
        module.set_efficient(mode)
    blocks = [module for module in model.modules() if isinstance(module, DenseBlock)]
    converted = [module for module in model.modules() if "_efficient_mode" in module.__dict__]
    for module in converted:
        module.__dict__["_efficient_mode"] = mode_name(mode)
    if not settable and not blocks and not converted:
        raise ValueError(f"mode={mode!r}: there is no dense block of this library in {type(model).__name__}")
    for block in () if settable else blocks:
        block.efficient = mode


def _types(dtype: str | torch.dtype | None) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The type of autocast, and that of weights and input; ``None`` for neither."""
    if dtype is None or isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return None, dtype
    if isinstance(dtype, str) and dtype in AUTOCAST:
        return AUTOCAST[dtype], None
    if isinstance(dtype, str) and dtype in TYPES:
        return None, TYPES[dtype]
    raise ValueError(
        f"dtype must be one of {', '.join(AUTOCAST)} (autocast), {', '.join(TYPES)} or a type of torch's, got {dtype!r}"
    )


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is None:
        tensor = next((tensor for tensor in (*model.parameters(), *model.buffers())), None)
        device = "cpu" if tensor is None or tensor.device.type == "meta" else tensor.device
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA device, got {str(device)!r}")
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def _input(shape: Sequence[int] | Tensor, device: torch.device, floating: torch.dtype, dtype: torch.dtype | None):
    if isinstance(shape, Tensor):
        return empty_like(shape, device, dtype)
    if not isinstance(shape, Sequence) or any(type(size) is not int or size < 0 for size in shape) or not shape:
        raise ValueError(f"input_shape must be sizes, batch included, such as (64, 3, 32, 32), got {shape!r}")
    return torch.empty(tuple(shape), dtype=floating, device=device)


# Optimizers


@contextlib.contextmanager
def _same_optimizers(device: torch.device) -> Iterator[None]:
    """Tensors without data count as tensors where optimizers choose between loops and operators on lists."""
    from torch._subclasses.fake_tensor import FakeTensor

    optimizers = importlib.import_module("torch.optim.optimizer")
    known = getattr(optimizers, "_foreach_supported_types", None)
    if known is None:
        yield
        return
    with mock.patch.object(optimizers, "_foreach_supported_types", [*known, FakeTensor]):
        yield


def _optimizer(
    optimizer: Optimizer | MakesOptimizer, parameters: list[Tensor], memo: dict[int, Any], device: torch.device
) -> Optimizer:
    """The same for the copy's parameters."""
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise TypeError(f"optimizer must be an optimizer, what makes one, or None, got {optimizer!r}")
        made = optimizer(parameters)
        if not isinstance(made, Optimizer):
            raise TypeError(f"optimizer must be an optimizer, or make one from parameters; it made {made!r}")
        return made
    memo = dict(memo)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if id(parameter) not in memo:
            raise ValueError(f"optimizer has a parameter of shape {tuple(parameter.shape)} that is none of the model's")
    for tensor in _state(optimizer):
        # Counters of steps are kept on the host.
        memo[id(tensor)] = empty_like(tensor, torch.device("cpu") if tensor.dim() == 0 else device)
    return copy.deepcopy(optimizer, memo)


def _state(optimizer: Optimizer) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]


def _step(optimizer: Optimizer) -> None:
    try:
        optimizer.step()  # makes its state
        optimizer.step()
    except TypeError as error:
        if "closure" not in str(error):
            raise
        raise ValueError(f"optimizer: {type(optimizer).__name__} calls the model in its step, and has no place here")


# The largest batch


def bytes_of(budget: int | str) -> int:
    """Bytes of a number, or of a text such as ``"8GiB"``, ``"24 GB"`` or ``"500MiB"``.

    Raises:
        ValueError: anything else, and what is not positive.
    """
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", 1):
        units |= {f"{letter}ib": 1024**power, f"{letter}b": 1000**power}
    number, unit = budget, ""
    if isinstance(budget, str):
        digits = budget.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        number, unit = digits, budget.strip()[len(digits) :].lower()
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(budget, bool) and unit in units and int(float(number) * units[unit]) > 0:
            return int(float(number) * units[unit]) if isinstance(budget, str) else int(budget)
    raise ValueError(f"budget must be positive bytes or a text such as '8GiB' or '500MiB', got {budget!r}")


def fit_batch_size(
    model: nn.Module,
    input_shape: Sequence[int],
    budget: int | str,
    mode: Mode | None = None,
    dtype: str | torch.dtype | None = None,
    optimizer: Optimizer | MakesOptimizer | None = None,
    device: torch.device | str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> int:
    """The largest batch whose predicted peak (:attr:`MemoryEstimate.peak_bytes`) fits into a budget.

    The peak follows a straight line over the batch, nearly: it takes two predictions, and one that checks the answer.

    Args:
        model: as for :func:`estimate_memory`; so are all arguments not said here.
        input_shape: the batch in it is where the search starts.
        budget: bytes, or a text such as ``"8GiB"``.

    Raises:
        ValueError: a batch of one does not fit; says what it takes.

    Example:
        >>> from efficient_densenet import densenet_bc
        >>> model = densenet_bc(depth=22, growth_rate=12)
        >>> naive, lean = (fit_batch_size(model, (4, 3, 32, 32), "100MiB", mode) for mode in ("naive", "lean"))
        >>> lean > 3 * naive
        True
    """
    budget = bytes_of(budget)
    with rehearsal(model, dtype, optimizer, device, loss) as step:
        peak = Line(lambda batch: step((batch, *input_shape[1:]), mode))
        batch = peak.largest(budget, start=input_shape[0])
    if not batch:
        raise ValueError(f"budget: a batch of one takes {peak.known[1].peak_bytes:,} bytes, more than {budget:,}")
    return batch


class Line:
    """The peak over the batch size, from few predictions and lines between them.

    Args:
        predict: the estimate for a batch.

    Attributes:
        known: estimates by batch.
    """

    def __init__(self, predict: Callable[[int], MemoryEstimate]):
        self._predict = predict
        self.known: dict[int, MemoryEstimate] = {}

    def at(self, batch: int) -> MemoryEstimate:
        """Predicted by a step."""
        if batch not in self.known:
            self.known[batch] = self._predict(batch)
        return self.known[batch]

    def read(self, batch: int) -> float:
        """Read off the line through the two nearest batches that are known; through none but one, in proportion."""
        if batch in self.known:
            return self.known[batch].peak_bytes
        near = sorted(self.known, key=lambda other: abs(math.log(other / batch)))[:2]
        a = self.known[near[0]]
        if len(near) == 1:
            grows = a.input_bytes + a.kept_bytes + a.scratch_bytes
            return a.peak_bytes + grows * (batch / near[0] - 1)
        b = self.known[near[1]]
        return a.peak_bytes + (b.peak_bytes - a.peak_bytes) / (near[1] - near[0]) * (batch - near[0])

    def reading(self, budget: int, most: int = 2**31) -> int:
        """The largest batch that fits by what can be read off; 0 for none."""
        fits, too_large = 0, most + 1
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            if self.read(middle) <= budget:
                fits = middle
            else:
                too_large = middle
        return fits

    def largest(self, budget: int, start: int, least: int = 1, most: int = 2**31) -> int:
        """The largest batch that fits, checked by a step; 0 if the least one does not."""
        self.at(min(max(start, least), most))
        while True:
            batch = max(self.reading(budget, most), least)
            if batch in self.known and self.read(batch) <= budget:
                return batch
            if batch in self.known and batch == least:
                return 0
            self.at(batch)

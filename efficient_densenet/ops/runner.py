"""Dense layers in a row, and what closes them, as one function: from modules to a call of :func:`fused_block`.

The one place where modules turn into numbers for the block function, whosever they are: the library's own
blocks, other people's, and layers given by hand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .batch_norm import synchronised_over, uses_batch_statistics
from .dense_block import BlockCall, NormCall, TailCall, fused_block, layer_call
from .layout import behind_convolution, behind_pointwise, gradient_in_format, is_channels_last
from .modules import Parts, Tail, fits, tensor


def process_groups(layers: Sequence[Parts]) -> set[dist.ProcessGroup | None]:
    """Over which processes the norms take batch statistics; for the block function it must be one choice."""
    norms = (norm for layer in layers for norm in layer.norms)
    return {synchronised_over(norm) for norm in norms if uses_batch_statistics(norm)}


def dtype_of(x: Tensor, layers: Sequence[Parts], tail: Tail | None = None) -> torch.dtype | None:
    """What the block function stores and multiplies in; None where torch refuses or must decide the mixture."""
    weight, *others = [tensor(layer.conv1, "weight").dtype for layer in layers] or [tensor(tail.conv, "weight").dtype]
    if any(other != weight for other in others):
        return None
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight):
        # Features of another type stay what they are in the plain model, beside new ones in half precision.
        dtype = torch.get_autocast_dtype(x.device.type)
        return dtype if x.dtype == dtype else None
    return weight if x.dtype == weight else None


def why_no_operator(layers: Sequence[Parts], new_first: bool = False, new_only: bool = False) -> str:
    """Why ``torch.compile`` leaves layers that run as one function out of its graph."""
    if any(group is not None for group in process_groups(layers)):
        return "statistics over several processes"
    if any(tensor(conv, "bias") is not None for layer in layers for conv in layer.convs):
        return "convolutions with a bias"
    return "another order or choice of features" if new_first or new_only else ""


def closes(tail: Tail, x: Tensor, layers: Sequence[Parts]) -> bool:
    """Whether layers that can be computed of x, and a tail without objections, can be one function."""
    if tail.conv is not None and min(x.shape[2:]) < 2:
        return False
    channels = x.shape[1] + sum(tensor(layer.convs[-1], "weight").shape[0] for layer in layers)
    if not fits(tail, x.dim() - 2, channels, dtype_of(x, layers, tail)):
        return False
    if layers and tail.conv is not None:
        if tensor(tail.conv, "weight").dtype != tensor(layers[0].conv1, "weight").dtype:
            return False
    return len(process_groups(layers) | NormCall.of(tail.norm).groups) <= 1


def formats(layer: Parts, channels_last: bool, shape: Sequence[int], dtype: torch.dtype) -> list[bool]:
    """Whether what a layer's convolutions give, and the layer, is channels-last in the plain model.

    Args:
        layer: the layer.
        channels_last: whether the features it reads are.
        shape: of these.
        dtype: what the convolutions compute in.
    """
    found = []
    for conv in layer.convs:
        weight = tensor(conv, "weight")
        channels_last = behind_pointwise(channels_last, shape)
        channels_last = behind_convolution(channels_last, shape, weight, dtype)
        shape = (shape[0], weight.shape[0], *shape[2:])
        found.append(channels_last)
    return [*found, behind_dropout(layer, channels_last, shape)]


def behind_dropout(layer: Parts, channels_last: bool, shape: Sequence[int]) -> bool:
    """The same for what its dropout gives."""
    if layer.drop_rate and layer.channel_wise:  # by factors of another shape, so that a single channel is what it was
        return channels_last and math.prod(shape[2:]) > 1
    return behind_pointwise(channels_last, shape) if layer.drop_rate else channels_last


def behind_transition(tail: Tail, channels_last: bool, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """The same for a transition's output, from whether its rectified input, of that shape, is."""
    return len(shape) == 4 and behind_convolution(channels_last, shape, tensor(tail.conv, "weight"), dtype)


def run_fused(
    x: Tensor,
    layers: Sequence[Parts],
    keep_conv1: bool,
    channels_last: bool | None = None,
    tail: Tail | None = None,
    new_first: bool = False,
    new_only: bool = False,
) -> tuple[Tensor, bool]:
    """The layers one after the other, each reading everything before it, and the tail; all of it as one function.

    Args:
        x: what the first layer reads; :func:`dtype_of` has an answer for it.
        layers: to which :func:`~.modules.why_not_fused` does not object; none, where a transition stands alone.
        keep_conv1: fused, or else lean.
        channels_last: whether x is in the plain model, where it comes from another part of the library and may be laid
            out otherwise; ``None`` where it comes from outside.
        tail: to which :func:`~.modules.why_no_tail` does not object.
        new_first: whether a layer's features stand before those it has read, not behind.
        new_only: whether the input is left out of the output, which then has no tail.

    Returns:
        The output, channels-last or as the tail writes it, and whether it is channels-last in the plain model.
    """
    dtype = dtype_of(x, layers, tail)
    outside = channels_last is None
    channels_last = is_channels_last(x) if outside else channels_last
    shape, of_new = list(x.shape), True
    calls, parameters = [], []
    for layer in layers:
        *wanted_formats, new_format = formats(layer, channels_last, shape, dtype)
        call, taken = layer_call(layer, wanted_formats[-1])
        kernels = range(2, len(taken), 4)
        for i, wanted in zip(kernels, wanted_formats, strict=True):
            kernel = taken[i]
            # Its gradient comes as the kernel is, unless told otherwise; a single tap is both.
            if kernel.shape[2:].numel() > 1 and is_channels_last(kernel) != wanted:
                taken[i] = gradient_in_format(kernel, wanted)
        calls.append(call)
        parameters += taken
        channels_last, of_new = channels_last and new_format, of_new and new_format
        shape[1] += kernel.shape[0]
    if outside and not channels_last:
        x = gradient_in_format(x, False)
    channels_last = of_new if new_only else channels_last
    tail_call = None
    if tail is not None:
        channels_last = behind_pointwise(channels_last, shape)
        parameters += [tensor(tail.norm, "weight"), tensor(tail.norm, "bias")]
        if tail.conv is not None:
            pool = (2,) * (x.dim() - 2)
            tail_call = TailCall(NormCall.of(tail.norm), pool if len(pool) > 1 else (1, 2))
            parameters += [tensor(tail.conv, "weight"), tensor(tail.conv, "bias")]
            channels_last = behind_transition(tail, channels_last, shape, dtype)
        else:
            tail_call = TailCall(NormCall.of(tail.norm), None, channels_last)
    one_d = x.dim() == 3
    if one_d:  # one row of pixels
        x = x.unsqueeze(2)
        parameters = [p.unsqueeze(2) if p is not None and p.dim() == 3 else p for p in parameters]
    call = BlockCall(tuple(calls), tail_call, keep_conv1, new_first, new_only)
    if not torch.compiler.is_compiling():
        out = fused_block(x, call, parameters, dtype)
        return out.squeeze(2) if one_d else out, channels_last
    biased = tail is not None and tail.conv is not None and tensor(tail.conv, "bias") is not None
    if not biased and not why_no_operator(layers, new_first, new_only) and call.group is None:
        from .operators import traced_block

        out = traced_block(x, call, parameters, dtype)
    else:
        run = functools.partial(fused_block, call=call, parameters=parameters, dtype=dtype)
        out = run_outside_the_compiler(run, x)
    return out.squeeze(2) if one_d else out, channels_last


def run_outside_the_compiler(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``run(x)``, which the compiler leaves alone."""
    from .uncompiled import call  # loads the compiler, which is there anyway by now

    return call(run, x)

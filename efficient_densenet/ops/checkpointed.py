"""Dense layers in a row, each checkpointed, on one buffer; what cannot be rebuilt is called as in the plain model.

Nothing is concatenated: every layer reads the features before it as a view of the buffer and adds its own beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .batch_norm import FeatureStatistics
from .bottleneck import checkpointed_bottleneck, convolve
from .dense_block import draw_dropout, layer_call
from .layout import behind_pointwise, copy_in_format, gradient_in_format, in_format, is_channels_last
from .modules import Parts, call_norm_relu, why_not_recomputed
from .runner import behind_dropout
from .storage import FeatureBuffer, append


class Layer(Protocol):
    """A dense layer that can be run part by part."""

    growth_rate: int

    def __call__(self, x: Tensor) -> Tensor:
        """All of it: from features to new ones."""

    def after_bottleneck(self, x: Tensor) -> Tensor:
        """What follows its first convolution."""

    def parts(self) -> Parts:
        """Its modules and its dropout in this forward."""

    def why_not_fused(self) -> str:
        """Why nobody else can speak for what follows its first convolution."""


def run_checkpointed(
    x: Tensor,
    layers: Sequence[Layer],
    channels_last: bool | None = None,
    new_first: bool = False,
    new_only: bool = False,
) -> tuple[Tensor, bool]:
    """The layers one after the other, without concatenation and without what can be rebuilt.

    Args:
        x: what the first layer reads.
        layers: the layers.
        channels_last: whether x is in the plain model, where it comes from another part of the library and may be laid
            out otherwise; ``None`` where it comes from outside.
        new_first: whether a layer's features stand before those it has read, not behind.
        new_only: whether the input is left out of the output.

    Returns:
        The output, and whether it is channels-last in the plain model.
    """
    room = x.shape[1] + sum(layer.growth_rate for layer in layers)
    buffer = FeatureBuffer(x, room, x.dtype)

    def statistics_of(buffer: FeatureBuffer):
        return functools.cache(functools.partial(FeatureStatistics, buffer.tensor, new_first=new_first))

    statistics = statistics_of(buffer)  # by group of processes
    new_is_last, new_dtype = True, None

    def finished() -> bool:
        """The format of the finished block, and so of the gradients that concatenations give."""
        return channels_last

    if channels_last is None:
        channels_last = is_channels_last(x)
        x = gradient_in_format(x, finished)
    features = append(None, x, buffer, new_first=new_first)
    for number, layer in enumerate(layers, 1):
        parts = layer.parts()
        if why_not_recomputed(parts):
            # An unknown module gets what concatenation would give it: a tensor of its own, as it may work in place,
            # in the plain model's format, as it may draw random numbers in the order of memory.
            new = layer(copy_in_format(features, channels_last))
            is_last = is_channels_last(new)
            new = gradient_in_format(new, finished)
        else:
            is_last = behind_pointwise(channels_last, features.shape) or is_channels_last(parts.conv1.weight)
            new = checkpointed_bottleneck(features, statistics, parts.norm1, parts.conv1, is_last)
            is_last = is_last and is_channels_last(new)
            if layer.why_not_fused():  # the same for unknown modules behind conv1
                new = layer.after_bottleneck(in_format(new, is_last))
                is_last = is_channels_last(new)
                new = gradient_in_format(new, finished)
            else:
                if parts.norm2 is not None:
                    is_last = behind_pointwise(is_last, new.shape) or is_channels_last(parts.conv2.weight)
                    new = convolve(call_norm_relu(new, parts.norm2, parts.relu2), parts.conv2, is_last)
                    is_last = is_last and is_channels_last(new)
                if parts.drop_rate:
                    new = new * draw_dropout(layer_call(parts, is_last)[0], new.shape, new.dtype, new.device)
                is_last = behind_dropout(parts, is_last, new.shape)
        channels_last, new_is_last = channels_last and is_last, new_is_last and is_last
        new_dtype = torch.promote_types(new.dtype, new_dtype or new.dtype)
        dtype = torch.promote_types(new.dtype, features.dtype)
        wanted = max(room, features.shape[1] + new.shape[1])
        if dtype != features.dtype or wanted > room:  # under autocast, or behind a module of another type or width
            room = wanted
            buffer = FeatureBuffer(x, room, dtype)  # promoted, as by cat
            statistics = statistics_of(buffer)
            features = append(None, features, buffer, new_first=new_first)
        last = number == len(layers) and not new_only
        features = append(features, new, buffer, last=last, new_first=new_first)
    if new_only:  # a copy: whoever edits it shall not edit what the layers will read again
        count = features.shape[1] - x.shape[1]
        new = features.narrow(1, 0 if new_first else x.shape[1], count).to(new_dtype)
        return copy_in_format(new, new_is_last), new_is_last
    return features, channels_last

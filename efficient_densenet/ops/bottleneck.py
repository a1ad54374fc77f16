"""A dense layer's concat-BN-ReLU-conv bottleneck: plain, and checkpointed on the block's shared storage.

Equivalent to, with ``x`` the features so far::

    conv(relu(norm(torch.cat(x, 1))))

Checkpointed, only the features are kept, which the block's buffer holds anyway: BN and ReLU are rebuilt in the backward
pass, nothing is concatenated, the convolution is not run again (its output is kept by whatever follows), and the
running statistics move once per training forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .batch_norm import (
    FeatureStatistics, Statistics, move_running_statistics, norm_relu, synchronised_over, uses_batch_statistics,
)  # fmt: skip
from .layout import gradient_in_format
from .modules import CONVOLUTIONS
from .overrides import overridable
from .rebuild import outside_transforms


def bottleneck_reference(x: Tensor, norm: nn.Module, relu: nn.Module, conv: nn.Module) -> Tensor:
    """The plain path: call the modules, let autograd keep what it wants."""
    return conv(relu(norm(x)))


@overridable
def checkpointed_bottleneck(
    x: Tensor, statistics: Callable[..., FeatureStatistics], norm: nn.Module, conv: nn.Module, channels_last: bool
) -> Tensor:
    """``conv(relu(norm(x)))``, keeping ``x`` and rebuilding the rest in the backward pass.

    Args:
        x: the features so far, a view of the block's buffer.
        statistics: gives the batch statistics of the buffer's channels over a group of processes, for all layers.
        norm: a BatchNorm to which :func:`~.modules.why_not_recomputed` does not object; its running statistics move.
        conv: the convolution behind it.
        channels_last: the format of its weight's gradient.

    Shape:
        - x: ``(N, C_l, *spatial)``
        - returns: ``(N, conv.out_channels, *spatial)``

    Source: Pleiss et al., Memory-Efficient Implementation of DenseNets, arXiv:1707.06990, section 3.
    """
    exchange = None
    if uses_batch_statistics(norm):
        over = statistics(synchronised_over(norm))
        used, exchange = over.first(x.shape[1]), over.exchange
        move_running_statistics([(norm, used)], exchange.count)
    else:
        used = Statistics.running(norm)

    # Everything is handed over as it is now: by the time of the recomputation the module may hold other tensors
    # (torch.func.functional_call, a copy, a replica).
    arguments = (
        x, norm.weight, norm.bias, kernel(conv, channels_last), conv.bias, used, norm.eps, exchange,
        CONVOLUTIONS[type(conv)], (conv.stride, conv.padding, conv.dilation, conv.groups),
    )  # fmt: skip
    if not torch.is_grad_enabled():
        return _norm_relu_conv(*arguments)
    # Nothing in here is random.
    return checkpoint(_norm_relu_conv, *arguments, use_reentrant=False, preserve_rng_state=False)


def kernel(conv: nn.Module, channels_last: bool) -> Tensor:
    """The weight of a convolution that is channels-last here; its gradient arrives in the given format."""
    weight = conv.weight
    if channels_last or all(side == 1 for side in weight.shape[2:]):  # what it has anyway, or a shape that is both
        return weight
    return gradient_in_format(weight, False)


def convolve(x: Tensor, conv: nn.Module, channels_last: bool) -> Tensor:
    """``conv(x)``, its weight's gradient in the given format."""
    weight = kernel(conv, channels_last)
    return CONVOLUTIONS[type(conv)](x, weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)


def _norm_relu_conv(x, gamma, beta, weight, bias, statistics, eps, exchange, convolution, geometry) -> Tensor:
    with outside_transforms():  # vmap of gradients: what it needs rebuilt is not batched
        # Views: torch 2.4 forgets a leaf's hooks where a Function within a checkpoint is its first reader.
        gamma, beta = (p if p is None else p.view_as(p) for p in (gamma, beta))
        return convolution(norm_relu(x, gamma, beta, statistics, eps, exchange), weight, bias, *geometry)

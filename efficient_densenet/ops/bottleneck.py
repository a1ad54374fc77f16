"""A dense layer's concat-BN-ReLU-conv bottleneck: plain, and checkpointed on the block's shared storage.

Equivalent to, with ``x`` the features so far::

    conv(relu(norm(torch.cat(x, 1))))

Checkpointed, only the features are kept, which the block's buffer holds anyway: BN and ReLU are rebuilt in the backward
pass, nothing is concatenated, the convolution is not run again (its output is kept by whatever follows), and the
running statistics move once per training forward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .batch_norm import (
    NORMS, FeatureStatistics, Statistics, move_running_statistics, norm_relu, uses_batch_statistics,
)  # fmt: skip

CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}


def bottleneck_reference(x: Tensor, norm: nn.Module, relu: nn.Module, conv: nn.Module) -> Tensor:
    """The plain path: call the modules, let autograd keep what it wants."""
    return conv(relu(norm(x)))


def checkpointed_bottleneck(x: Tensor, statistics: FeatureStatistics, norm: nn.Module, conv: nn.Module) -> Tensor:
    """``conv(relu(norm(x)))``, keeping ``x`` and rebuilding the rest in the backward pass.

    Args:
        x: the features so far, a view of the block's buffer.
        statistics: the batch statistics of the buffer's channels, taken once for all layers.
        norm: a BatchNorm for which :func:`why_not_recomputed` has no objection; its running statistics move here.
        conv: the convolution behind it.

    Shape:
        - x: ``(N, C_l, *spatial)``
        - returns: ``(N, conv.out_channels, *spatial)``

    Source: Pleiss et al., Memory-Efficient Implementation of DenseNets, arXiv:1707.06990, section 3.
    """
    count = x.numel() // x.shape[1]
    if uses_batch_statistics(norm):
        used = statistics.first(x.shape[1])
        move_running_statistics(norm, used, count)
    else:
        used = Statistics.running(norm)

    # Everything is handed over as it is now: by the time of the recomputation the module may hold other tensors
    # (torch.func.functional_call, a copy, a replica).
    arguments = (
        x, norm.weight, norm.bias, conv.weight, conv.bias, used, norm.eps, uses_batch_statistics(norm),
        CONVOLUTIONS[type(conv)], (conv.stride, conv.padding, conv.dilation, conv.groups),
    )  # fmt: skip
    if not torch.is_grad_enabled():
        return _norm_relu_conv(*arguments)
    # Nothing in here is random.
    return checkpoint(_norm_relu_conv, *arguments, use_reentrant=False, preserve_rng_state=False)


def _norm_relu_conv(x, gamma, beta, weight, bias, statistics, eps, batch, convolution, geometry) -> Tensor:
    return convolution(norm_relu(x, gamma, beta, statistics, eps, batch), weight, bias, *geometry)


def why_not_recomputed(layer: nn.Module) -> str:
    """Why a layer's bottleneck cannot be rebuilt from its features, or an empty string where it can.

    What is hooked, parametrized, replaced or carries a state of its own is called as often as in the plain model: once.
    """
    for name, types in (("norm1", NORMS), ("relu1", (nn.ReLU,)), ("conv1", tuple(CONVOLUTIONS))):
        module = getattr(layer, name)
        if type(module) not in types:
            return f"{name} is a {type(module).__name__}"
        if is_hooked(module):
            return f"{name} has hooks"
    if layer.conv1.padding_mode != "zeros":
        return f"conv1 pads with {layer.conv1.padding_mode!r}"
    return "it has hooks" if is_hooked(layer) else ""


HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module runs more than its ``forward``: hooks of its own, or a ``forward`` set on the instance."""
    return any(getattr(module, hooks, None) for hooks in HOOKS) or "forward" in module.__dict__


def why_plain(x: Tensor) -> str:
    """Why a block must run as plain autograd just now, or an empty string."""
    if torch.jit.is_tracing():
        return "traced"
    if torch.compiler.is_compiling() and getattr(torch.compiler, "is_exporting", lambda: True)():
        return "exported"
    if x.numel() == 0:
        return "an empty batch"
    if _global_hooks():
        return "hooks on every module"
    if _transformed():
        return "a torch.func transform"
    return ""


def _global_hooks() -> bool:
    module = torch.nn.modules.module
    return any(
        getattr(module, f"_global{hooks}", None)
        for hooks in HOOKS
    )


def _transformed() -> bool:
    """Inside torch.func (grad, vmap, jvp, …) or forward-mode differentiation, which checkpointing refuses."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return bool(active and active()) or getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0

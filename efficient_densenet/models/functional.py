"""A dense block out of layers of one's own, in one line of one's own ``forward``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..ops.checkpointed import run_checkpointed
from ..ops.layout import in_format
from ..ops.modules import (
    CONVOLUTIONS, DROPOUTS, NORM_DIMS, NORMS, Parts, is_hooked, is_inspected, rectifies, why_not_fused, why_plain,
)  # fmt: skip
from ..ops.runner import dtype_of, process_groups, run_fused, run_outside_the_compiler
from .layers import DenseLayer, mode_name

OUTPUTS = ("all", "new")


def dense_block(
    x: Tensor,
    layers: Iterable[nn.Module],
    mode: bool | str = True,
    new_first: bool = False,
    output: str = "all",
) -> Tensor:
    """Layers one after the other, each reading everything before it; equivalent to, with its numbers::

        for layer in layers:
            x = torch.cat([x, layer(x)], 1)        # new_first: torch.cat([layer(x), x], 1)
        return x                                   # output="new": without the x it began with

    Layers of the kind that dense blocks are made of, ``BN, ReLU, Conv3x3`` or ``BN, ReLU, Conv1x1, BN, ReLU, Conv3x3``,
    with or without a dropout behind, run on one buffer: only their new features are kept, ``k`` channels a layer, and
    in ``"fused"`` what lies between their convolutions; nothing is concatenated. If one of them is hooked, is of
    another kind, or has other settings, what cannot be computed so is called as it is. So it is in the loop above.

    Args:
        x: what the first layer reads.
        layers: in order. ``nn.Sequential``s, nested or not, or the library's own :class:`DenseLayer`s; any other module
            from features to new ones will do, and makes this the loop above. Growth rates may differ.
        mode: ``False`` or ``"naive"``, ``"checkpoint"``, ``"fused"``, ``"lean"``; ``True`` or ``"auto"`` is fused.
        new_first: whether a layer's output stands before what it has read.
        output: ``"all"``, or ``"new"``: what the layers have added, in the same order, without ``x``.

    Shape:
        - x: ``(N, C_0, *spatial)``
        - layer l: from ``(N, C_0 + k_1 + … + k_{l-1}, *spatial)`` to ``(N, k_l, *spatial)``
        - returns: ``(N, C_0 + k_1 + … + k_L, *spatial)``, or ``(N, k_1 + … + k_L, *spatial)``

    Raises:
        ValueError: a layer that does not read what is there, or gives other sizes; an unknown mode or output.
        TypeError: something that is no layer.

    Example:
        >>> def layer(channels):
        ...     return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 12, 3, padding=1))
        >>> layers = nn.ModuleList(layer(48 + 12 * i) for i in range(4))
        >>> dense_block(torch.randn(2, 48, 8, 8), layers).shape
        torch.Size([2, 96, 8, 8])
    """
    mode = mode_name(mode, "mode")
    if output not in OUTPUTS:
        raise ValueError(f"output must be {' or '.join(map(repr, OUTPUTS))}, got {output!r}")
    layers = _layers(layers)
    only_new = output == "new"
    if why_plain(x):
        return _plain(x, layers, new_first, only_new)
    known = [_known(layer) for layer in layers]
    _check(x, known)
    if mode == "naive" or None in known or all(map(is_inspected, layers)):
        return _plain(x, layers, new_first, only_new)
    parts = [layer.parts() for layer in known]
    is_fused = mode != "checkpoint" and dtype_of(x, parts) is not None and len(process_groups(parts)) <= 1
    if is_fused and not any(layer.why_not_fused() for layer in known):
        out, channels_last = run_fused(x, parts, mode != "lean", new_first=new_first, new_only=only_new)
        return in_format(out, channels_last)

    def run(x: Tensor) -> Tensor:
        return in_format(*run_checkpointed(x, known, None, new_first, only_new))

    return run_outside_the_compiler(run, x) if torch.compiler.is_compiling() else run(x)


def _plain(x: Tensor, layers: Sequence[nn.Module], new_first: bool, only_new: bool) -> Tensor:
    """The reference: concatenate, apply the layer, keep everything."""
    features = [x]
    for i, layer in enumerate(layers):
        new = layer(torch.cat(features, 1))
        if isinstance(x, Tensor):  # and nothing that stands for one
            if not isinstance(new, Tensor):
                raise TypeError(f"layers[{i}] returns a {type(new).__name__}, not a tensor")
            if new.dim() != x.dim() or (new.shape[0], *new.shape[2:]) != (x.shape[0], *x.shape[2:]):
                raise ValueError(f"layers[{i}] gives {tuple(new.shape)} beside features of {tuple(x.shape)}")
        features.insert(0 if new_first else len(features), new)
    if only_new:
        features.pop(-1 if new_first else 0)
    return torch.cat(features, 1)


class _Sequential:
    """A dense layer that is written down as an ``nn.Sequential``, with what :class:`~..ops.checkpointed.Layer` asks."""

    def __init__(self, whole: nn.Sequential, modules: list[nn.Module], parts: Parts, behind_conv1: int):
        self._whole, self._modules, self._parts, self._behind_conv1 = whole, modules, parts, behind_conv1

    def __call__(self, x: Tensor) -> Tensor:
        return self._whole(x)

    def after_bottleneck(self, x: Tensor) -> Tensor:
        for module in self._modules[self._behind_conv1 :]:
            x = module(x)
        return x

    def parts(self) -> Parts:
        return self._parts

    @property
    def growth_rate(self) -> int:
        return self._parts.convs[-1].out_channels

    def why_not_fused(self) -> str:
        if any(type(module) in (*DROPOUTS, nn.Identity) and is_hooked(module) for module in self._modules):
            return "its dropout has hooks"
        return why_not_fused(self._parts)


def _layers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    if isinstance(layers, nn.ModuleDict):
        layers = layers.values()
    elif not isinstance(layers, Iterable):
        raise TypeError(f"layers must be a sequence of modules, got a {type(layers).__name__}")
    layers = list(layers)
    if not layers:
        raise ValueError("layers is empty")
    for i, layer in enumerate(layers):
        if not callable(layer):
            raise TypeError(f"layers[{i}] is a {type(layer).__name__}, not a module")
        if type(layer) in NORMS or type(layer) is nn.ReLU:
            raise ValueError(f"layers[{i}] is a {type(layer).__name__}, no layer by itself; put a single one in a list")
    return layers


def _flattened(layer: nn.Module, owners: list[nn.Module]) -> list[nn.Module]:
    """What a Sequential calls, with the children of Sequentials within it in their place."""
    if type(layer) is not nn.Sequential:
        return [layer]
    owners.append(layer)
    return [module for child in layer._modules.values() for module in _flattened(child, owners)]


def _known(layer: nn.Module) -> _Sequential | DenseLayer | None:
    """The layer, if the types of its modules tell what it computes."""
    if type(layer) is DenseLayer:
        return layer
    owners: list[nn.Module] = []
    modules = _flattened(layer, owners)
    chain: list[nn.Module | None] = []
    i = behind_conv1 = 0
    while i < len(modules) and len(chain) < 6:
        fused_norm = rectifies(modules[i])
        j = i + (1 if fused_norm else 2)
        found = fused_norm or (type(modules[i]) in NORMS and i + 1 < len(modules) and type(modules[i + 1]) is nn.ReLU)
        if not found or j >= len(modules) or type(modules[j]) not in CONVOLUTIONS:
            break
        dims = len(modules[j].kernel_size)
        if NORM_DIMS.get(type(modules[i]), dims) != dims or not _keeps_sizes(modules[j]):
            return None
        chain += modules[i], None if fused_norm else modules[i + 1], modules[j]
        i = j + 1
        behind_conv1 = behind_conv1 or i
    if not chain or not owners:
        return None
    rate, channel_wise = 0.0, False
    for module in modules[i:]:
        if type(module) is nn.Identity:
            continue
        if type(module) not in DROPOUTS:
            return None
        if module.training and module.p > 0:
            dims = DROPOUTS[type(module)]
            if rate or dims not in (0, len(chain[2].kernel_size)):
                return None
            rate, channel_wise = float(module.p), dims > 0
    parts = Parts(*chain, *(None,) * (6 - len(chain)), rate, channel_wise, True, tuple(owners))
    return _Sequential(layer, modules, parts, behind_conv1)


def _keeps_sizes(conv: nn.Module) -> bool:
    if isinstance(conv.padding, str):
        return conv.padding == "same"
    same = tuple(d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
    return set(conv.stride) == {1} and tuple(2 * p for p in conv.padding) == same


def _check(x: Tensor, known: Sequence[_Sequential | DenseLayer | None]) -> None:
    """Raises ValueError, in one line, where layers do not fit to what they read."""
    channels = x.shape[1] if x.dim() > 1 else 0
    for i, layer in enumerate(known):
        if layer is None:  # nobody knows what follows
            return
        parts = layer.parts()
        dims, kind = len(parts.conv1.kernel_size) + 2, type(parts.conv1).__name__
        if x.dim() != dims:
            raise ValueError(f"x must have {dims} dimensions for a {kind}, got {tuple(x.shape)}")
        reads = channels
        for j, (norm, conv) in enumerate(zip(parts.norms, parts.convs, strict=True), 1):
            for module, found in ((norm, norm.num_features), (conv, conv.in_channels)):
                if found != reads:
                    kind = type(module).__name__
                    raise ValueError(f"layers[{i}]: {kind} number {j} is for {found} channels, but reads {reads}")
            reads = conv.out_channels
        channels += reads

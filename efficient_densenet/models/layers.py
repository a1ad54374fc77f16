"""The parts of a DenseNet: dense layer, dense block, transition; parameters here, and which op runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.checkpointed import run_checkpointed
from ..ops.layout import behind_pointwise, in_format
from ..ops.modules import (
    Parts, Tail, call_norm_relu, is_hooked, is_inspected, tensor, why_no_tail, why_not_fused, why_not_recomputed,
    why_plain, why_quantised,
)  # fmt: skip
from ..ops.passes import choice
from ..ops.runner import (
    behind_transition, closes, dtype_of, process_groups, run_fused, run_outside_the_compiler, why_no_operator,
)  # fmt: skip
from .weights import layer_key

MODES = ("naive", "checkpoint", "fused", "lean", "auto")
Mode = bool | str | Sequence[bool | str]  # for all blocks, or one for each


def mode_name(mode: bool | str, argument: str = "efficient") -> str:
    """The name of a mode: ``False`` is ``"naive"``, ``True`` is ``"auto"``; ``argument`` is what the user calls it.

    Raises:
        ValueError: anything that is neither a bool nor one of :data:`MODES`.
    """
    if isinstance(mode, bool):
        return "auto" if mode else "naive"
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"{argument} must be True, False or one of {', '.join(map(repr, MODES))}, got {mode!r}")
    return MODES[MODES.index(mode)]  # whatever kind of str it was


def mode_names(mode: Mode, blocks: int) -> str | tuple[str, ...]:
    """The name of a mode, or, of a plan with one for each of so many blocks, their names.

    Raises:
        ValueError: an unknown mode, or another number of them.
    """
    if not isinstance(mode, (list, tuple)):
        return mode_name(mode)
    if len(mode) != blocks:
        known = ", ".join(map(repr, MODES))
        raise ValueError(f"efficient must be one mode ({known}), or one for each of {blocks} blocks, got {mode!r}")
    return tuple(map(mode_name, mode))


def conv(spatial_dims: int, in_channels: int, out_channels: int, kernel_size: int, **kwargs) -> nn.Module:
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spatial_dims - 1](
        in_channels, out_channels, kernel_size, bias=False, **kwargs
    )


def batch_norm(spatial_dims: int, channels: int) -> nn.Module:
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[spatial_dims - 1](channels)


def pool(spatial_dims: int, kind: str, **kwargs) -> nn.Module:
    return getattr(nn, f"{kind}Pool{spatial_dims}d")(**kwargs)


class DenseLayer(nn.Module):
    """H_l: all features so far to ``growth_rate`` new ones.

        H_l = conv3x3 ∘ ReLU ∘ BN ∘ conv1x1 ∘ ReLU ∘ BN        (bn_size=None: conv3x3 ∘ ReLU ∘ BN)

    Shape:
        - input: ``(N, in_channels, *spatial)``
        - output: ``(N, growth_rate, *spatial)``

    Source: arXiv:1608.06993, section 3, "Composite function" and "Bottleneck layers".
    """

    def __init__(self, in_channels: int, growth_rate: int, bn_size: int | None, drop_rate: float, spatial_dims: int):
        super().__init__()
        self.growth_rate = growth_rate
        self.drop_rate = float(drop_rate)
        self.norm1 = batch_norm(spatial_dims, in_channels)
        self.relu1 = nn.ReLU()
        if bn_size is None:
            self.conv1 = conv(spatial_dims, in_channels, growth_rate, kernel_size=3, padding=1)
        else:
            width = bn_size * growth_rate
            self.conv1 = conv(spatial_dims, in_channels, width, kernel_size=1)
            self.norm2 = batch_norm(spatial_dims, width)
            self.relu2 = nn.ReLU()
            self.conv2 = conv(spatial_dims, width, growth_rate, kernel_size=3, padding=1)
        self.has_bottleneck = bn_size is not None

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        """Takes the names of torchvision's published files too; here, as state dicts come in by any container."""
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name = prefix + layer_key(key.removeprefix(prefix))
            if name not in state_dict:
                state_dict[name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return self.after_bottleneck(self.conv1(self.relu1(self.norm1(x))))
        return self.after_bottleneck(self.conv1(call_norm_relu(x, self.norm1, self.relu1)))

    def after_bottleneck(self, x: Tensor) -> Tensor:
        """What follows ``conv1`` in H_l."""
        if self.has_bottleneck:
            if torch.jit.is_scripting():
                x = self.conv2(self.relu2(self.norm2(x)))
            else:
                x = self.conv2(call_norm_relu(x, self.norm2, self.relu2))
        return self.dropped_out(x)

    def dropped_out(self, x: Tensor) -> Tensor:
        """What follows the last convolution in H_l."""
        if self.drop_rate > 0.0 and self.training:
            # Dropout draws in the order of memory. Drawn for a contiguous tensor, the same seed drops the same values
            # whatever the layout of x, so that neither channels-last nor the mode changes them.
            x = x * F.dropout(torch.ones_like(x, memory_format=torch.contiguous_format), self.drop_rate)
        return x

    def parts(self) -> Parts:
        """The modules and the dropout of this forward."""
        modules = self._modules
        rate = self.drop_rate if self.training and self.drop_rate > 0 else 0.0
        first = modules["norm1"], modules["relu1"], modules["conv1"]
        second = (modules["norm2"], modules["relu2"], modules["conv2"]) if self.has_bottleneck else (None, None, None)
        return Parts(*first, *second, rate, owners=(self,))

    def why_not_fused(self) -> str:
        """Why the block function cannot speak for this layer."""
        return "it has hooks" if "after_bottleneck" in self.__dict__ else why_not_fused(self.parts())


@dataclass(frozen=True)
class BlockPlan:
    """What one dense block runs: its name, the mode asked for, the path taken, and why where that is another one.

    ``keeps_conv1``: whether the outputs of the layers' ``conv1`` stay in memory between forward and backward. Always in
    naive, checkpoint and fused; in lean only in the blocks that do not set the peak.

    ``graph_break``: why, under ``torch.compile``, it is left out of the graph and runs uncompiled; empty where it is
    part of it.

    ``passes``: in a model's plan, of fused and lean blocks: whether they run Triton kernels or torch's operations where
    the weights are, and why.
    """

    block: str
    asked: str
    runs: str
    reason: str = ""
    keeps_conv1: bool = True
    passes: str = ""
    graph_break: str = ""


class DenseBlock(nn.ModuleDict):
    """L dense layers, each reading everything before it: ``x_l = H_l([x_0, …, x_{l-1}])``.

    Args:
        num_layers: L.
        in_channels: C_0.
        growth_rate: k.
        bn_size: width of the bottleneck in units of k, or ``None``.
        drop_rate: dropout after every layer.
        spatial_dims: 1, 2 or 3.

    Attributes:
        efficient: the mode asked for; takes the same values as :meth:`DenseNet.set_efficient`, and reads as their name.

    Shape:
        - input: ``(N, C_0, *spatial)``
        - output: ``(N, C_0 + L k, *spatial)``
    """

    __jit_unused_properties__ = ["efficient"]

    _efficient = "naive"

    def __init__(
        self,
        num_layers: int,
        in_channels: int,
        growth_rate: int,
        bn_size: int | None,
        drop_rate: float,
        spatial_dims: int,
    ):
        super().__init__()
        for i in range(num_layers):
            layer = DenseLayer(in_channels + i * growth_rate, growth_rate, bn_size, drop_rate, spatial_dims)
            self[f"denselayer{i + 1}"] = layer
        self.num_output_features = in_channels + num_layers * growth_rate

    @property
    def efficient(self) -> str:
        """The mode asked for: one of :data:`efficient_densenet.models.MODES`."""
        return self._efficient

    @efficient.setter
    def efficient(self, mode: bool | str) -> None:
        self._efficient = mode_name(mode)

    def __setstate__(self, state: dict) -> None:
        state = dict(state)
        if "efficient" in state:  # pickled when the mode was a plain attribute
            state["_efficient"] = mode_name(state.pop("efficient"))
        super().__setstate__(state)

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return self._plain(x)
        return self._run(x)

    def _plain(self, x: Tensor) -> Tensor:
        """The reference: concatenate, apply H_l, keep everything."""
        features = [x]
        for layer in self.values():
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)

    @torch.jit.unused
    def _run(self, x: Tensor) -> Tensor:
        if self.efficient == "naive" or why_plain(x):
            return self._plain(x)
        runs, _ = self.path()
        if runs == "naive":
            return self._plain(x)
        out, channels_last = self._inside(x, runs)
        return out if channels_last is None else in_format(out, channels_last)

    def _inside(self, x: Tensor, runs: str, channels_last: bool | None = None) -> tuple[Tensor, bool]:
        """The block on shared storage, and whether its output is channels-last in the plain model.

        Args:
            x: the block's input.
            runs: what the plan says.
            channels_last: whether that is, where it comes from another part of the library and may be laid out
                otherwise; ``None`` where it comes from outside.
        """
        layers = self.parts()
        if runs != "checkpoint" and dtype_of(x, layers) is not None:
            return run_fused(x, layers, self.efficient != "lean", channels_last)
        modules = list(self._modules.values())
        if torch.compiler.is_compiling():
            return run_outside_the_compiler(lambda x: in_format(*run_checkpointed(x, modules, channels_last)), x), None
        return run_checkpointed(x, modules, channels_last)

    def closed_by(
        self, x: Tensor, tail: nn.Module, keep_conv1: bool = False, channels_last: bool | None = None
    ) -> tuple[Tensor, bool | None] | None:
        """The block and what closes it without anything between them that others could see.

        Args:
            x: the block's input.
            tail: a :class:`Transition`, or the model's final norm, with which goes its ReLU.
            keep_conv1: in lean mode, keep the outputs of ``conv1`` all the same: this block does not set the peak.
            channels_last: of x, as for the block alone.

        Returns:
            The output, and whether it is channels-last in the plain model, or ``None`` where it is laid out so already;
            or ``None`` where block and tail have to be called the one after the other.
        """
        if is_hooked(self) or why_plain(x) or (runs := self.path()[0]) == "naive":
            return None
        if isinstance(tail, Transition):
            if tail.why_not_taken_in():
                return None
        elif why_no_tail(Tail(tail, None)):
            return None
        run = functools.partial(self._closed, runs=runs, tail=tail, keep_conv1=keep_conv1, channels_last=channels_last)
        if torch.compiler.is_compiling() and (runs == "checkpoint" or dtype_of(x, self.parts()) is None):
            return run_outside_the_compiler(lambda x: in_format(*run(x)), x), None
        return run(x)

    def _closed(
        self, x: Tensor, runs: str, tail: nn.Module, keep_conv1: bool, channels_last: bool | None
    ) -> tuple[Tensor, bool]:
        is_transition = isinstance(tail, Transition)
        closing, layers = tail.tail() if is_transition else Tail(tail, None), self.parts()
        if runs != "checkpoint" and dtype_of(x, layers) is not None and closes(closing, x, layers):
            return run_fused(x, layers, keep_conv1 or self.efficient != "lean", channels_last, closing)
        features, channels_last = self._inside(x, runs, channels_last)
        channels_last = behind_pointwise(channels_last, features.shape)
        if not is_transition:
            return F.relu(in_format(tail(features), channels_last)), channels_last
        out = tail(features)
        return out, behind_transition(closing, channels_last, features.shape, out.dtype)

    def parts(self) -> list[Parts]:
        """Of every layer, in this forward."""
        return [layer.parts() for layer in self._modules.values()]

    def sizes(self) -> tuple[int, int, int]:
        """Channels of the finished block, of all its conv1 outputs together, and of the widest of them."""
        # By what the modules say: others, which stand where the block function does not run, may say nothing.
        layers = [layer for layer in self._modules.values() if type(layer) is DenseLayer and layer.has_bottleneck]
        widths = [getattr(layer.conv1, "out_channels", 0) for layer in layers]
        return self.num_output_features, sum(widths), max(widths, default=0)

    def repeated(self) -> int:
        """Multiplications of all its conv1, for one pixel."""
        layers = [layer for layer in self._modules.values() if type(layer) is DenseLayer and layer.has_bottleneck]
        return sum(layer.norm1.num_features * layer.conv1.out_channels for layer in layers if not layer.why_not_fused())

    def _why_not_dense_layers(self) -> str:
        foreign = [f"{key} is a {type(layer).__name__}" for key, layer in self.items() if type(layer) is not DenseLayer]
        return ", ".join(foreign)

    def _objections(self, why: Callable[[nn.Module], str]) -> list[tuple[str, str]]:
        answers = [(key, why(layer)) for key, layer in self.items()]
        return [(key, answer) for key, answer in answers if answer]

    def path(self) -> tuple[str, str]:
        """What this block runs, and why where that was not asked for."""
        asked = self.efficient
        if asked == "naive":
            return asked, ""
        if len(self) == 0 or (foreign := self._why_not_dense_layers()):
            return "naive", foreign if len(self) else "no layers"
        if is_inspected(self):
            return "naive", "inspected: every norm and convolution has hooks"
        if asked != "checkpoint":
            reasons = [f"{key}: {why}" for key, why in self._objections(DenseLayer.why_not_fused)]
            if not reasons and len(process_groups(self.parts())) > 1:
                reasons = ["its norms take their statistics over different processes"]
            if not reasons:
                return "fused" if asked == "auto" else asked, ""
        else:
            objections = self._objections(lambda layer: why_not_recomputed(layer.parts()))
            reasons = [f"{key} is not recomputed: {why}" for key, why in objections]
        quantised = [f"{key}: {why}" for key, why in self._objections(why_quantised)] if reasons else []
        return ("naive", "; ".join(quantised)) if quantised else ("checkpoint", "; ".join(reasons))

    def plan(self, name: str = "", keeps_conv1: bool = False) -> BlockPlan:
        """What this block runs, and why where that was not asked for; ``keeps_conv1`` as its model decides in lean."""
        runs, reason = self.path()
        graph_break = "checkpointed" if runs == "checkpoint" else ""
        if runs in ("fused", "lean"):
            graph_break = why_no_operator(self.parts())
        keeps_conv1 = keeps_conv1 or runs != "lean"
        return BlockPlan(name, self.efficient, runs, reason, keeps_conv1, graph_break=graph_break)

    def passes(self) -> str:
        """What the block function's passes run on, for :class:`BlockPlan`."""
        weight = tensor(next(iter(self.values())).conv1, "weight")
        return choice(weight.device, weight.dtype)

    def extra_repr(self) -> str:
        plan = self.plan()
        return f"efficient={plan.asked!r}, runs {plan.runs}" + (f" ({plan.reason})" if plan.reason else "")


class Transition(nn.Sequential):
    """Between two blocks: ``AvgPool2 ∘ conv1x1 ∘ ReLU ∘ BN``.

    Shape:
        - input: ``(N, in_channels, *spatial)``
        - output: ``(N, out_channels, *(size // 2 for size in spatial))``
    """

    def __init__(self, in_channels: int, out_channels: int, spatial_dims: int):
        super().__init__()
        self.norm = batch_norm(spatial_dims, in_channels)
        self.relu = nn.ReLU()
        self.conv = conv(spatial_dims, in_channels, out_channels, kernel_size=1)
        self.pool = pool(spatial_dims, "Avg", kernel_size=2, stride=2)

    def tail(self) -> Tail:
        """Its modules, as what closes a block."""
        modules = self._modules
        return Tail(modules["norm"], modules["relu"], modules["conv"], modules["pool"], (self,))

    def why_not_taken_in(self) -> str:
        """Why the block function cannot take in this transition."""
        if type(self) is not Transition:
            return f"it is a {type(self).__name__}"
        if list(self._modules) != ["norm", "relu", "conv", "pool"]:
            return f"it is made of {', '.join(self._modules)}"
        return why_no_tail(self.tail())

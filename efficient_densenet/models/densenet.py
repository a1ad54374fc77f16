"""DenseNet and its published shapes."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.batch_norm import synchronised_over
from ..ops.layout import behind_pointwise, in_format, is_channels_last
from ..ops.modules import CONVOLUTIONS, MAX_POOLS, is_hooked, why_no_stem, why_plain
from ..ops.stem import norm_relu_max_pool
from .layers import BlockPlan, DenseBlock, Mode, Transition, batch_norm, conv, mode_names, pool
from .weights import adapted, load_weights, published_weights, shortened, weights_in


def _positive_int(name: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class BlockSize:
    """What a dense block holds in a training step, in elements.

    Attributes:
        block: the block.
        rows: pixels of the batch.
        before: what is kept between the block before it and this one.
        features: its buffer, and as much again for its gradient while it goes backward.
        outputs: those of its conv1, if they are kept.
        working: its widest layer's b and da.
    """

    block: DenseBlock
    rows: int
    before: int
    features: int
    outputs: int
    working: int


def highest(sizes: Sequence[BlockSize], kept: set[DenseBlock]) -> int:
    """The most elements at one moment of the backward pass, if some blocks keep the outputs of their conv1."""
    most, there = 0, 0
    for size in sizes:
        there += size.before + size.features + (size.outputs if size.block in kept else 0)
        most = max(most, there + size.features + size.working)
    return most


class DenseNet(nn.Module):
    """A densely connected network (DenseNet, DenseNet-BC) whose dense blocks choose how they keep their features.

    Layer ``l`` of a block computes ``x_l = H_l([x_0, …, x_{l-1}])`` with
    ``H_l = conv3x3 ∘ ReLU ∘ BN ∘ conv1x1 ∘ ReLU ∘ BN``; blocks are joined by transitions
    ``AvgPool2 ∘ conv1x1 ∘ ReLU ∘ BN``. The state-dict keys and their order are torchvision's, in every mode.

    Convolutions start from a normal distribution of variance ``2 / fan_out``, norms from one and zero, the classifier's
    bias from zero.

    Args:
        growth_rate: k, the channels every layer adds.
        block_config: layers of each dense block.
        compression: channels a transition keeps, as a fraction in (0, 1].
        num_init_features: channels of the stem.
        bn_size: the bottleneck has ``bn_size * growth_rate`` channels; ``None`` for layers without bottleneck,
            BN-ReLU-conv3x3.
        drop_rate: dropout after every dense layer, in [0, 1).
        num_classes: outputs of the classifier; 0 for none: the model then returns the pooled features.
        small_inputs: a 3x3 stem at full resolution (CIFAR); else a strided 7x7 one, BN, ReLU, max-pool (ImageNet).
        in_channels: channels of the input.
        spatial_dims: 1, 2 or 3.
        efficient: how the dense blocks run: ``False``/``"naive"``, ``"checkpoint"``, ``"fused"``, ``"lean"``, or
            ``True``/``"auto"`` for the best one available; or one of these for each block. All compute the same
            numbers; see :meth:`set_efficient`.

    Shape:
        - input: ``(N, in_channels, *spatial)`` with ``spatial_dims`` sizes of at least ``model.min_size``
        - output: ``(N, num_classes)``, or ``(N, num_features)`` without a classifier

    Raises:
        ValueError: an argument, or a later input, that cannot work; names it and what would.

    Example:
        >>> model = DenseNet(growth_rate=12, block_config=(16, 16, 16), efficient=True)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    Source: Huang et al., Densely Connected Convolutional Networks, CVPR 2017 (arXiv:1608.06993), sections 3 and 4;
    initialisation: He et al., Delving Deep into Rectifiers, ICCV 2015 (arXiv:1502.01852), equation 14.
    """

    __jit_unused_properties__ = ["efficient", "feature_info", "_stem_end"]

    def __init__(
        self,
        growth_rate: int = 12,
        block_config: tuple[int, ...] = (16, 16, 16),
        compression: float = 0.5,
        num_init_features: int = 24,
        bn_size: int | None = 4,
        drop_rate: float = 0.0,
        num_classes: int = 10,
        small_inputs: bool = True,
        in_channels: int = 3,
        spatial_dims: int = 2,
        efficient: Mode = True,
    ):
        super().__init__()
        _positive_int("growth_rate", growth_rate)
        _positive_int("num_init_features", num_init_features)
        _positive_int("in_channels", in_channels)
        _positive_int("num_classes", num_classes, least=0)
        if bn_size is not None:
            _positive_int("bn_size", bn_size)
        if not isinstance(block_config, (tuple, list)) or not block_config:
            raise ValueError(
                f"block_config must be a tuple of layers per block, such as (16, 16, 16), got {block_config!r}"
            )
        for num_layers in block_config:
            _positive_int("every entry of block_config", num_layers)
        if not (_is_number(compression) and 0.0 < compression <= 1.0):
            raise ValueError(f"compression must lie in (0, 1], got {compression!r}")
        if not (_is_number(drop_rate) and 0.0 <= drop_rate < 1.0):
            raise ValueError(f"drop_rate must lie in [0, 1), got {drop_rate!r}")
        if spatial_dims not in (1, 2, 3):
            raise ValueError(f"spatial_dims must be 1, 2 or 3, got {spatial_dims!r}")

        self.spatial_dims = spatial_dims
        self.in_channels = in_channels
        stem = {"kernel_size": 3, "padding": 1} if small_inputs else {"kernel_size": 7, "stride": 2, "padding": 3}
        self.features = nn.Sequential()
        self.features.add_module("conv0", conv(spatial_dims, in_channels, num_init_features, **stem))
        if not small_inputs:
            self.features.add_module("norm0", batch_norm(spatial_dims, num_init_features))
            self.features.add_module("relu0", nn.ReLU())
            self.features.add_module("pool0", pool(spatial_dims, "Max", kernel_size=3, stride=2, padding=1))

        channels = num_init_features
        for i, num_layers in enumerate(block_config, start=1):
            block = DenseBlock(num_layers, channels, growth_rate, bn_size, drop_rate, spatial_dims)
            self.features.add_module(f"denseblock{i}", block)
            channels = block.num_output_features
            if i < len(block_config):
                kept = math.floor(channels * compression)
                if kept < 1:
                    raise ValueError(
                        f"compression={compression!r} leaves no channel of the {channels} after block {i}; "
                        f"at least {1 / channels:.3g} is needed"
                    )
                self.features.add_module(f"transition{i}", Transition(channels, kept, spatial_dims))
                channels = kept
        self.features.add_module("norm5", batch_norm(spatial_dims, channels))

        self.num_features = channels
        self.min_size = _min_size(small_inputs, len(block_config) - 1)
        self.num_classes = num_classes
        self.classifier = nn.Linear(channels, num_classes) if num_classes else nn.Identity()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.set_efficient(efficient)

    # How the dense blocks run

    @property
    def efficient(self) -> str | tuple[str, ...]:
        """The mode asked for: one of :data:`efficient_densenet.models.MODES`, or one for each block."""
        return self._efficient

    def set_efficient(self, mode: Mode) -> DenseNet:
        """Choose how the dense blocks run, at any time, on the same weights; returns the model.

        Args:
            mode: what a layer that reads C_l channels keeps between forward and backward, and what runs again:

                * ``False``/``"naive"``: plain autograd; ``2 C_l + 8 k`` channels.
                * ``"checkpoint"``: activation checkpointing of every layer's concat-BN-ReLU-conv on one shared
                  buffer; ``9 k``; BN and ReLU run again.
                * ``"fused"``: a block is one function; ``5 k``; BN and ReLU run again, no convolution does.
                * ``"lean"``: as fused; ``k``; conv1 runs again too, in the blocks that set the peak.
                * ``True``/``"auto"``: fused where it applies, else checkpoint.

                Or a plan: a tuple or list of these, one for each block. There a lean block recomputes conv1, wherever
                the peak is.

        Raises:
            ValueError: an unknown mode, or not as many as blocks.
        """
        blocks = [module for module in self.features.modules() if isinstance(module, DenseBlock)]
        self._efficient = mode_names(mode, len(blocks))
        for block, asked in zip(blocks, self._modes(len(blocks)), strict=True):
            block.efficient = asked
        return self

    def _modes(self, blocks: int = 1) -> tuple[str, ...]:
        """The modes asked for."""
        return self._efficient if isinstance(self._efficient, tuple) else (self._efficient,) * blocks

    def execution_plan(self, input_shape: tuple[int, ...] | None = None) -> list[BlockPlan]:
        """For every dense block: its name, the mode asked for, what runs, and why where the two differ.

        Args:
            input_shape: ``(N, in_channels, *spatial)``; matters in lean mode alone, where the blocks that keep conv1's
                outputs depend on the sizes. A typical one if not given.
        """
        if input_shape is None:
            input_shape = (1, self.in_channels, *(8 * self.min_size,) * self.spatial_dims)
        off_peak = self._off_peak(input_shape)
        plans = []
        for name, module in self.named_modules():
            if isinstance(module, DenseBlock):
                plan = module.plan(name, keeps_conv1=module in off_peak)
                functional = plan.runs in ("fused", "lean")
                plans.append(dataclasses.replace(plan, passes=module.passes() if functional else ""))
        return plans

    def extra_repr(self) -> str:
        plans = self.execution_plan()
        runs = [plan.runs for plan in plans]
        runs = runs if isinstance(self._efficient, tuple) else sorted(set(runs))
        lines = f"efficient={self._efficient!r}, blocks run: {', '.join(runs)}"
        if self._efficient == "lean":
            kept = [plan.block for plan in plans if plan.keeps_conv1]
            lines += f", conv1's outputs kept in: {', '.join(kept) or 'none'}"
        return lines

    def _off_peak(self, input_shape: Sequence[int]) -> set[DenseBlock]:
        """The blocks that may keep the outputs of their conv1 without raising the peak of a training step in lean mode.

        While a block goes backward there are: all features and kept outputs up to it, its gradient buffer, its widest
        layer's b and da. What a block keeps is there while it and every later one goes backward: outputs are kept from
        the last block on, as long as the largest of these sums stays what it is when nothing is kept.
        """
        if self._efficient != "lean":
            return set()
        sizes = [size for size in self.block_sizes(input_shape) if size.block.path()[0] == "lean"]
        kept: set[DenseBlock] = set()
        allowed = highest(sizes, kept)
        for size in reversed(sizes):
            if highest(sizes, kept | {size.block}) <= allowed:
                kept.add(size.block)
        return kept

    def block_sizes(self, input_shape: Sequence[int]) -> list[BlockSize]:
        """What every dense block holds in a training step, in elements, for an input of that shape."""
        # Shapes come from the modules' settings, not from weights: reading a parametrized weight may move its state.
        sizes, channels = list(input_shape[2:]), 0
        blocks, alive = [], 0
        for module in self.features._modules.values():  # with those that stand in it twice
            rows = input_shape[0] * math.prod(sizes)
            if isinstance(module, DenseBlock):
                total, outputs, widest = module.sizes()
                blocks.append(BlockSize(module, rows, alive, rows * total, rows * outputs, 2 * rows * widest))
                alive = 0
            elif isinstance(module, Transition):
                sizes = [s // 2 for s in sizes]
            elif hasattr(module, "num_features"):
                channels = module.num_features
            elif isinstance(module, tuple(CONVOLUTIONS)):
                sizes = [(s - 1) // module.stride[0] + 1 for s in sizes]
            elif isinstance(module, tuple(MAX_POOLS)):
                alive += rows * channels
                sizes = [(s - 1) // 2 + 1 for s in sizes]
        return blocks

    # The forward pass

    def forward_features(self, x: Tensor) -> Tensor:
        """The feature map after the final norm and ReLU, ``(N, num_features, *spatial)``."""
        if torch.jit.is_scripting():
            return F.relu(self.features(x))
        self._check_input(x)
        return self._run_features(x)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """What :meth:`forward_intermediates` gives, by index, as in timm: the channels (``num_chs``), the stride against
        the input (``reduction``) and the module behind which it is taken.

        Index 0 is the stem before its pooling; then every dense block before its transition, but for the last, which
        is taken behind the final norm and ReLU.
        """
        info, stride, channels = [], 1, 0
        for name, module in self.features.named_children():
            if isinstance(module, tuple(CONVOLUTIONS)):
                stride, channels = stride * module.stride[0], module.out_channels
            elif isinstance(module, DenseBlock):
                channels = module.num_output_features
            if name == self._stem_end or isinstance(module, DenseBlock) or name == "norm5":
                info.append({"num_chs": channels, "reduction": stride, "module": f"features.{name}"})
            if isinstance(module, Transition):
                stride, channels = 2 * stride, module.conv.out_channels
            elif name == "pool0":
                stride *= module.stride
        del info[-2]  # the last block, which counts behind the norm
        return info

    @property
    def _stem_end(self) -> str:
        return "relu0" if "relu0" in self.features._modules else "conv0"

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Feature maps from the way, as timm's DenseNet gives them; what they are says :attr:`feature_info`.

        Args:
            x: the input.
            indices: which; the last so many if an ``int``, all if ``None``; negative ones count from the end.
            norm: has no meaning, the last one is normalised, the others are not.
            stop_early: leave out what is behind the last one asked for.
            output_fmt: ``"NCHW"``, for sequences and volumes too.
            intermediates_only: return no final features.

        Returns:
            The features behind the final norm and ReLU (with ``stop_early``, the last that were computed), and the list
            of those asked for; or the list alone.

        Raises:
            ValueError: an index that does not exist, or another ``output_fmt``.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        modules = [of["module"].partition(".")[2] for of in self.feature_info]
        count = len(modules)
        if indices is None or isinstance(indices, int):
            wanted = list(range(count))[-(indices or count) :]
        else:
            wanted = [i + count if i < 0 else i for i in indices]
        if isinstance(indices, int) and not 0 < indices <= count or any(not 0 <= i < count for i in wanted):
            raise ValueError(
                f"indices must be a number from 1 to {count}, or some of {-count} to {count - 1}, got {indices!r}"
            )
        self._check_input(x)
        names = [modules[i] for i in sorted(set(wanted))]
        taken = []
        for name, module in self.features.named_children():  # each part by itself: what is taken is read twice
            x = module(x)
            if name == "norm5":
                x = F.relu(x)
            if name in names:
                taken.append(x)
                if stop_early and name == names[-1]:
                    break
        return taken if intermediates_only else (x, taken)

    def forward_head(self, features: Tensor) -> Tensor:
        """Global average pooling and the classifier: ``(N, num_features, *spatial)`` to ``(N, num_classes)``."""
        return self.classifier(features.flatten(2).mean(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    @torch.jit.unused
    def _run_features(self, x: Tensor) -> Tensor:
        """``relu(features(x))``, each dense block together with what closes it wherever both allow it."""
        modes = set(self._modes())
        plain = modes == {"naive"} or type(self.features) is not nn.Sequential
        if plain or is_hooked(self.features) or why_plain(x):
            return F.relu(self.features(x))
        off_peak = self._off_peak(x.shape)
        modules = list(self.features)
        channels_last = None  # whether x is in the plain model, where it is laid out otherwise here
        while modules:
            module, closed = modules.pop(0), None
            if type(module) is DenseBlock and modules and (type(modules[0]) is Transition or len(modules) == 1):
                closed = module.closed_by(x, modules[0], module in off_peak, channels_last)
                if closed is not None and type(modules.pop(0)) is not Transition:
                    return closed[0]
            elif len(modules) > 2 and channels_last is None and not torch.compiler.is_compiling():
                if not modes <= {"naive", "checkpoint"} and not why_no_stem(x, module, *modules[:2]):
                    closed = norm_relu_max_pool(x, module, modules[1]), behind_pointwise(is_channels_last(x), x.shape)
                    del modules[:2]
            if closed is None:
                closed = module(x if channels_last is None else in_format(x, channels_last)), None
            x, channels_last = closed
        return F.relu(x if channels_last is None else in_format(x, channels_last))

    @torch.jit.unused
    def _check_input(self, x: Tensor) -> None:
        if torch.jit.is_tracing() or not isinstance(x, Tensor):  # a trace warns of comparisons; torch.fx has no shapes
            return
        if x.dim() != self.spatial_dims + 2 or x.shape[1] != self.in_channels:
            wanted = ", ".join(["N", str(self.in_channels), *["D", "H", "W"][-self.spatial_dims :]])
            raise ValueError(f"expected an input of shape ({wanted}), got {tuple(x.shape)}")
        if x.shape[0] == 0 and self._efficient != "naive" and any(map(synchronised_over, self.modules())):
            raise ValueError(
                "an empty batch: with synchronised BatchNorm every process needs an image, "
                "except with efficient='naive'"
            )
        if min(x.shape[2:]) < self.min_size:
            raise ValueError(
                f"input of size {'x'.join(map(str, x.shape[2:]))} is too small for this model; "
                f"every side must be at least {self.min_size}"
            )

    # Weights

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False):
        """As torch's; takes the key names of torchvision's published files too, and its errors are short.

        Raises:
            RuntimeError: keys or shapes that do not fit: the first five of each kind, and how many more.
        """
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except RuntimeError as error:
            if type(error) is RuntimeError and str(error).startswith("Error(s) in loading state_dict"):
                raise RuntimeError(shortened(str(error))) from None
            raise

    # The classifier

    def get_classifier(self) -> nn.Module:
        """The last layer: ``nn.Linear``, or ``nn.Identity`` where ``num_classes`` is 0."""
        return self.classifier

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifier by one of ``num_classes`` outputs (0: none), of the same device and dtype."""
        self.num_classes = _positive_int("num_classes", num_classes, least=0)
        reference = self.features.norm5.weight
        self.classifier = nn.Identity()
        if num_classes:
            self.classifier = nn.Linear(self.num_features, num_classes, device=reference.device, dtype=reference.dtype)
            nn.init.zeros_(self.classifier.bias)


def _min_size(small_inputs: bool, num_transitions: int) -> int:
    """The least side of an input that leaves one pixel for the last block."""
    size = 2**num_transitions
    if not small_inputs:
        size = 2 * (2 * size - 1) - 1  # max-pool (3, stride 2, padding 1), then conv (7, stride 2, padding 3)
    return size


def densenet_bc(depth: int = 100, growth_rate: int = 12, **kwargs) -> DenseNet:
    """DenseNet-BC for CIFAR by its depth: three equal blocks, 2k stem channels, compression 0.5.

    A depth of ``6 n + 4`` has ``n`` layers in each block, of two convolutions each.

    Args:
        depth: convolution and linear layers on the longest path; ``depth - 4`` a positive multiple of 6.
        growth_rate: k.
        **kwargs: further arguments of :class:`DenseNet`.

    Raises:
        ValueError: a depth that does not exist; names the nearest that do.

    Example:
        >>> sum(p.numel() for p in densenet_bc(depth=100, growth_rate=12).parameters())
        769162

    Source: arXiv:1608.06993, section 4.2.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 10 or (depth - 4) % 6:
        if isinstance(depth, (int, float)) and not isinstance(depth, bool) and depth > 10 and math.isfinite(depth):
            below = 6 * math.floor((depth - 4) / 6) + 4
            near = f"the nearest valid depths are {below} and {below + 6}"
        else:
            near = "the least is 10"
        raise ValueError(f"depth must be 6 n + 4 (10, 16, …, 40, …, 100, …), got {depth!r}; {near}")
    _positive_int("growth_rate", growth_rate)
    if kwargs.get("bn_size", 4) is None:
        raise ValueError(
            "densenet_bc has bottleneck layers; for basic layers use DenseNet(bn_size=None, block_config=...)"
        )
    kwargs.setdefault("block_config", ((depth - 4) // 6,) * 3)
    kwargs.setdefault("num_init_features", 2 * growth_rate)
    return DenseNet(growth_rate=growth_rate, **kwargs)


def _imagenet(
    name: str,
    block_config: tuple[int, ...],
    growth_rate: int,
    num_init_features: int,
    weights: str | os.PathLike | None,
    kwargs: dict,
) -> DenseNet:
    kwargs = {"num_classes": 1000, "small_inputs": False, **kwargs}
    model = DenseNet(growth_rate, block_config, num_init_features=num_init_features, **kwargs)
    if weights is not None:
        _load_weights(model, weights, name)
    return model


def _load_weights(model: DenseNet, weights: str | os.PathLike, name: str) -> None:
    if isinstance(weights, str) and weights.isidentifier() and not os.path.isfile(weights):
        found, notes = adapted(published_weights(name, weights), model)
        if notes:
            warnings.warn(f"weights={weights!r} of {name}: {', and '.join(notes)}", stacklevel=4)
    elif not os.path.isfile(weights):
        raise ValueError(
            "weights must be None, the path of a state dict, or a name of torchvision's such as 'DEFAULT', "
            f"and there is no file {os.fspath(weights)!r}"
        )
    else:
        try:
            found = weights_in(torch.load(weights, map_location="cpu", weights_only=True))
        except Exception as error:  # torch has no common type for what another file makes it raise
            wanted = "damaged, or no file of torch.save with tensors and plain objects alone"
            raise ValueError(f"weights={os.fspath(weights)!r} is {wanted}") from error
    if not found:
        raise ValueError(f"weights={os.fspath(weights)!r} holds no weights")
    try:
        load_weights(model, found)
    except ValueError as error:
        raise ValueError(f"weights={os.fspath(weights)!r} {error}") from None


def densenet121(weights: str | os.PathLike | None = None, **kwargs) -> DenseNet:
    """DenseNet-121 for ImageNet: blocks (6, 12, 24, 16), k = 32, 64 stem channels; 7,978,856 parameters.

    Args:
        weights: ``None``; the path of a state dict or training checkpoint, torchvision's files included; or a name of
            torchvision's, ``"DEFAULT"`` or ``"IMAGENET1K_V1"``, which is downloaded on first use, and with other
            ``in_channels`` or ``num_classes`` adapted as timm does, with a warning that says how.
        **kwargs: further arguments of :class:`DenseNet`.

    Raises:
        ValueError: no such file or name, or weights that do not fit or cannot be downloaded.
        ImportError: a name, without torchvision.

    Source: arXiv:1608.06993, table 1.
    """
    return _imagenet("densenet121", (6, 12, 24, 16), 32, 64, weights, kwargs)


def densenet161(weights: str | os.PathLike | None = None, **kwargs) -> DenseNet:
    """DenseNet-161 for ImageNet: blocks (6, 12, 36, 24), k = 48, 96 stem channels; 28,681,000 parameters.

    Args:
        weights: ``None``; the path of a state dict or training checkpoint, torchvision's files included; or a name of
            torchvision's, ``"DEFAULT"`` or ``"IMAGENET1K_V1"``, which is downloaded on first use, and with other
            ``in_channels`` or ``num_classes`` adapted as timm does, with a warning that says how.
        **kwargs: further arguments of :class:`DenseNet`.
    """
    return _imagenet("densenet161", (6, 12, 36, 24), 48, 96, weights, kwargs)


def densenet169(weights: str | os.PathLike | None = None, **kwargs) -> DenseNet:
    """DenseNet-169 for ImageNet: blocks (6, 12, 32, 32), k = 32, 64 stem channels; 14,149,480 parameters.

    Args:
        weights: ``None``; the path of a state dict or training checkpoint, torchvision's files included; or a name of
            torchvision's, ``"DEFAULT"`` or ``"IMAGENET1K_V1"``, which is downloaded on first use, and with other
            ``in_channels`` or ``num_classes`` adapted as timm does, with a warning that says how.
        **kwargs: further arguments of :class:`DenseNet`.
    """
    return _imagenet("densenet169", (6, 12, 32, 32), 32, 64, weights, kwargs)


def densenet201(weights: str | os.PathLike | None = None, **kwargs) -> DenseNet:
    """DenseNet-201 for ImageNet: blocks (6, 12, 48, 32), k = 32, 64 stem channels; 20,013,928 parameters.

    Args:
        weights: ``None``; the path of a state dict or training checkpoint, torchvision's files included; or a name of
            torchvision's, ``"DEFAULT"`` or ``"IMAGENET1K_V1"``, which is downloaded on first use, and with other
            ``in_channels`` or ``num_classes`` adapted as timm does, with a warning that says how.
        **kwargs: further arguments of :class:`DenseNet`.
    """
    return _imagenet("densenet201", (6, 12, 48, 32), 32, 64, weights, kwargs)


def densenet264(weights: str | os.PathLike | None = None, **kwargs) -> DenseNet:
    """DenseNet-264 for ImageNet: blocks (6, 12, 64, 48), k = 32, 64 stem channels.

    Args:
        weights: ``None``, or the path of a state dict.
        **kwargs: further arguments of :class:`DenseNet`.
    """
    return _imagenet("densenet264", (6, 12, 64, 48), 32, 64, weights, kwargs)

"""For which modules, and when, the functions of this package may speak; each answer is a reason, empty where they may.

They compute what the modules say, or they hand over. A module that is not exactly the expected type, that is hooked,
parametrized, or replaced is called like in the plain model. Handing over is visible, never an error, never another
number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .overrides import PLAIN_TENSORS, as_plain, is_plain, why_other_type
from .rebuild import in_a_transform
from .sync_batch_norm import SyncBatchNorm, SyncBatchNormThen

CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm)
NORM_DIMS = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}  # those synchronised take any
DIMS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
PLAIN_SETTINGS = {
    (kernel, dims): {
        "kernel_size": (kernel,) * dims, "padding": (kernel // 2,) * dims, "stride": (1,) * dims,
        "dilation": (1,) * dims, "groups": 1, "padding_mode": "zeros",
    } for kernel in (1, 3) for dims in (1, 2, 3)
}  # fmt: skip
DROPOUTS = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}  # 0: drops values, else channels
AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
MAX_POOLS = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3}
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)
HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


class Parts(NamedTuple):
    """What a dense layer is made of in this forward: BN-ReLU-conv1x1-BN-ReLU-conv3x3, or BN-ReLU-conv3x3.

    Modules are looked up by their names every time, never held: they may have been replaced, or be a replica's.
    """

    norm1: nn.Module
    relu1: nn.Module | None  # None: by a function, or within the norm
    conv1: nn.Module
    norm2: nn.Module | None = None  # None: no bottleneck
    relu2: nn.Module | None = None
    conv2: nn.Module | None = None
    drop_rate: float = 0.0  # of the dropout that is active just now
    channel_wise: bool = False  # which drops whole channels
    as_laid_out: bool = False  # which draws in the order of memory, as torch's does; else as if contiguous
    owners: tuple[nn.Module, ...] = ()  # in whose forward all this stands

    @property
    def norms(self) -> tuple[nn.Module, ...]:
        return (self.norm1,) if self.norm2 is None else (self.norm1, self.norm2)

    @property
    def convs(self) -> tuple[nn.Module, ...]:
        return (self.conv1,) if self.norm2 is None else (self.conv1, self.conv2)


class Tail(NamedTuple):
    """What closes a dense block: a transition, BN-ReLU-conv1x1-AvgPool2, or BN-ReLU where there is no convolution."""

    norm: nn.Module
    relu: nn.Module | None  # as in :class:`Parts`
    conv: nn.Module | None = None
    pool: nn.Module | None = None  # None behind a convolution: by a function that is known to halve the sizes
    owners: tuple[nn.Module, ...] = ()


def tensor(module: nn.Module, name: str) -> Tensor | None:
    """A parameter; where it is something else (a replica's, a quantised module's), whatever goes by its name."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def part(module: nn.Module, name: str) -> nn.Module:
    """A submodule. These checks run in every forward, and ``nn.Module``'s own way to it is several times slower."""
    return module._modules[name]


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module runs more than its ``forward``: hooks, or a ``forward`` set on the instance."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def why_plain(x: Tensor) -> str:
    """Why a block must run as plain autograd just now."""
    if not isinstance(x, Tensor):  # but what stands for one
        return "traced by torch.fx"
    if type(x) not in PLAIN_TENSORS:
        if why := why_other_type(x):
            return why
        x = as_plain(x)  # it need not hear of the questions
    if x.is_nested or x.layout != torch.strided or x.dtype not in FLOATING:
        return f"a {'nested' if x.is_nested else x.layout if x.layout != torch.strided else x.dtype} tensor"
    if torch.jit.is_tracing():
        return "traced"
    if torch.compiler.is_compiling() and getattr(torch.compiler, "is_exporting", lambda: True)():
        return "exported"
    if x.numel() == 0:
        return "an empty batch"
    if not torch.amp.is_autocast_available(x.device.type):
        return f"device {x.device.type!r}"
    if any(getattr(torch.nn.modules.module, f"_global_{hooks}", None) for hooks in HOOKS):
        return "hooks on every module"
    if in_a_transform():
        return "a torch.func transform"
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        return "forward-mode differentiation"
    return ""


def is_inspected(module: nn.Module) -> bool:
    """Whether every leaf of ``module`` that holds parameters is hooked: somebody looks at how its parts hang together.

    Such tools (dependency graphs for pruning, summaries) put together what their hooks see and autograd's graph; any
    other graph than that of the plain modules would be read wrongly, without a word.
    """
    leaves = (part for part in module.modules() if part._parameters and not part._modules)
    first = next(leaves, None)
    return first is not None and is_hooked(first) and all(map(is_hooked, leaves))  # most often the first says no


def call_norm_relu(x: Tensor, norm: nn.Module, relu: nn.Module) -> Tensor:
    """``relu(norm(x))`` by the modules, in place where nobody can tell.

    The rectifiers are not in place of themselves, as torch then refuses backward hooks on the norm. In a training step
    that costs nothing, since neither BatchNorm nor ReLU keeps what lies between them; without gradients it would add a
    tensor to the peak.
    """
    y = norm(x)
    if torch.compiler.is_compiling() or why_plain(y) or y.requires_grad:
        return relu(y)
    if type(norm) not in NORMS or is_hooked(norm) or type(relu) is not nn.ReLU or is_hooked(relu):
        return relu(y)
    return F.relu_(y)


def why_quantised(layer: nn.Module) -> str:
    """Why a layer will get and give quantised tensors."""
    for name, module in layer._modules.items():
        if type(module).__module__.startswith("torch.ao.nn.") and ".quantized." in type(module).__module__:
            return f"{name} is a quantised {type(module).__name__}"
    return ""


def why_not_recomputed(layer: Parts) -> str:
    """Why a dense layer's bottleneck cannot be rebuilt from its features."""
    return (
        _why_other_relu(layer.relu1, "relu1")
        or _why_other(layer.conv1, "conv1", tuple(CONVOLUTIONS))
        or ("" if layer.conv1.padding_mode == "zeros" else f"conv1 pads with {layer.conv1.padding_mode!r}")
        or _why_other_norm(layer.norm1, "norm1", layer.conv1, affine=False)
        or _why_hooked(layer.owners)
    )


def why_not_fused(layer: Parts) -> str:
    """Why the block function cannot speak for a dense layer."""
    norm1, relu1, conv1, norm2, relu2, conv2 = layer[:6]
    why = (
        _why_hooked(layer.owners)
        or _why_other_relu(relu1, "relu1")
        or _why_other_conv(conv1, "conv1", 3 if norm2 is None else 1)
        or _why_other_norm(norm1, "norm1", conv1)
    )
    if why or norm2 is None:
        return why
    why = (
        _why_other_relu(relu2, "relu2")
        or _why_other_conv(conv2, "conv2", 3)
        or _why_other_norm(norm2, "norm2", conv2)
    )
    if why:
        return why
    first, second = tensor(conv1, "weight"), tensor(conv2, "weight")
    if type(conv1) is type(conv2) and first.shape[0] == second.shape[1] and first.dtype == second.dtype:
        return ""
    return f"conv2 is a {_described(conv2)} behind a {_described(conv1)}"


def why_no_tail(tail: Tail) -> str:
    """Why the block function cannot take in what closes the block."""
    norm, relu, conv, pool, owners = tail
    why = _why_hooked(owners) or _why_other_relu(relu, "relu")
    if why or conv is None:
        return why or _why_other_norm(norm, "norm5")
    why = _why_other_conv(conv, "conv", 1) or _why_other_norm(norm, "norm", conv)
    if why or pool is None:
        return why
    return (
        _why_other(pool, "pool", AVERAGE_POOLS)
        or ("" if _is_plain_halving(pool) else "pool has another window")
        or ("" if AVERAGE_POOLS.index(type(pool)) + 1 == DIMS[type(conv)] else f"pool is an {type(pool).__name__}")
    )


def fits(tail: Tail, dims: int, channels: int, dtype: torch.dtype) -> bool:
    """Whether what closes a block is for so many dimensions of space, so many channels, and their type."""
    gamma = tensor(tail.norm, "weight")
    dims_wanted = _norm_dims(tail.norm) if tail.conv is None else DIMS[type(tail.conv)]
    return dims_wanted in (None, dims) and gamma.shape[0] == channels and _normalises(gamma.dtype, dtype)


def why_no_stem(x: Tensor, norm: nn.Module, relu: nn.Module | None, pool: nn.Module) -> str:
    """Why BN, ReLU and max-pool of the stem cannot be one function of x."""
    if why := _why_other_norm(norm, "norm0"):
        return why
    if why := _why_other_relu(relu, "relu0"):
        return why
    if type(pool) not in MAX_POOLS or is_hooked(pool) or pool.return_indices:
        return "pool0 is not a plain max-pool"
    dims = MAX_POOLS[type(pool)]
    if x.dim() != dims + 2 or not fits(Tail(norm, relu), dims, x.shape[1], x.dtype):
        return "an input of another shape or type"
    return ""


def _why_hooked(owners: Iterable[nn.Module]) -> str:
    return "it has hooks" if any(map(is_hooked, owners)) else ""


def _why_other(module: nn.Module, name: str, types: tuple[type, ...]) -> str:
    if type(module) not in types:
        return f"{name} is a {type(module).__name__}"
    return f"{name} has hooks" if is_hooked(module) else ""


def rectifies(norm: nn.Module) -> bool:
    """Whether a norm is timm's (or that synchronised), of BatchNorm and exactly a ReLU; without importing timm."""
    kind = type(norm)
    if kind.__module__ != "timm.layers.norm_act" or kind.__name__ not in ("BatchNormAct2d", "SyncBatchNormAct"):
        if kind is not SyncBatchNormThen:
            return False
    return [type(part) for part in norm._modules.values() if type(part) is not nn.Identity] == [nn.ReLU]


def _why_other_relu(relu: nn.Module | None, name: str) -> str:
    return "" if relu is None else _why_other(relu, name, (nn.ReLU,))


def _norm_dims(norm: nn.Module) -> int | None:
    """For how many dimensions of space a norm is; ``None`` where for any."""
    return NORM_DIMS.get(type(norm)) or (2 if isinstance(norm, nn.BatchNorm2d) else None)


def _normalises(of_norm: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a BatchNorm of one type takes features of another: its own, or half precision in float32."""
    return of_norm == dtype or (of_norm == torch.float32 and dtype in HALF)


def _why_other_norm(norm: nn.Module, name: str, conv: nn.Module | None = None, affine: bool = True) -> str:
    """Why a norm, before this convolution, is not a BatchNorm of torch's in good order."""
    if type(norm) not in NORMS and rectifies(norm):
        if is_hooked(norm) or any(map(is_hooked, norm._modules.values())):
            return f"{name} has hooks"
    elif why := _why_other(norm, name, NORMS):
        return why
    if not norm.eps > 0:
        return f"{name} has eps {norm.eps}"
    gamma, beta = tensor(norm, "weight"), tensor(norm, "bias")
    for parameter in (gamma, beta):
        if not is_plain(parameter) and (affine or parameter is not None):
            return f"{name} has no plain affine parameters"
    buffers = norm._buffers
    if not ("running_mean" in buffers and "running_var" in buffers and "num_batches_tracked" in buffers):
        return f"{name} has running statistics that are no buffers"
    mean, var = buffers["running_mean"], buffers["running_var"]
    if (mean is None) != (var is None) or (mean is None and norm.track_running_stats):
        return f"{name} has no running {'mean' if mean is None else 'variance'}"
    shape = dtype = None
    if conv is not None:
        weight = tensor(conv, "weight")
        shape = (weight.shape[1] * conv.groups,)
        if _norm_dims(norm) not in (None, DIMS[type(conv)]):
            return f"{name} is a {type(norm).__name__} before a {type(conv).__name__}"
    for value in (gamma, beta, mean, var):
        if value is None:
            continue
        shape, dtype = shape or value.shape, dtype or value.dtype
        if value.shape != shape or value.dtype != dtype:
            wanted = f"{dtype} for {shape[0]} channels" if len(shape) == 1 else "one row of channels"
            return f"{name} has {value.dtype} of shape {tuple(value.shape)}, not {wanted}"
    if conv is not None and dtype is not None and not _normalises(dtype, weight.dtype):
        return f"{name} is in {dtype} before a {_described(conv)}"
    return ""


def _described(conv: nn.Module) -> str:
    weight = tensor(conv, "weight")
    return f"{type(conv).__name__} of {weight.shape[1]} to {weight.shape[0]} channels in {weight.dtype}"


def _why_other_conv(conv: nn.Module, name: str, kernel: int) -> str:
    if why := _why_other(conv, name, tuple(CONVOLUTIONS)):
        return why
    weight, bias = tensor(conv, "weight"), tensor(conv, "bias")
    if not is_plain(weight):
        return f"{name} has no plain weight"
    wanted, settings = PLAIN_SETTINGS[kernel, DIMS[type(conv)]], conv.__dict__
    for setting, value in wanted.items():
        if settings[setting] != value:
            return f"{name} has {setting}={settings[setting]!r}"
    if weight.shape[2:] != wanted["kernel_size"]:
        return f"{name} has a weight of shape {tuple(weight.shape)}"
    if bias is None:
        return ""
    if not is_plain(bias):
        return f"{name} has no plain bias"
    fits_weight = bias.shape == weight.shape[:1] and bias.dtype == weight.dtype
    return "" if fits_weight else f"{name} has a bias of shape {tuple(bias.shape)} in {bias.dtype}"


def _is_plain_halving(pool: nn.Module) -> bool:
    def all_are(value: int | tuple[int, ...], wanted: int) -> bool:
        return all(v == wanted for v in (value if isinstance(value, tuple) else (value,)))

    return (
        all_are(pool.kernel_size, 2)
        and all_are(pool.stride, 2)
        and all_are(pool.padding, 0)
        and not pool.ceil_mode
        and pool.count_include_pad
        and getattr(pool, "divisor_override", None) is None
    )

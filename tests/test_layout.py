"""What leaves the library has the memory format that the plain model gives it, for the same weights and input.

Compared are the strides of all sides longer than one; of the others they mean nothing.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from efficient_densenet.ops.layout import is_channels_last

from helpers import assert_same, each_mode, images, toy, twin

FORMATS = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}
# Of weights and of inputs: contiguous or channels-last.
BOTH = list(itertools.product((False, True), (False, True)))
each_format = pytest.mark.parametrize(
    "formats", BOTH, ids=lambda pair: "_".join("last" if last else "contiguous" for last in pair)
)

SHAPES = {
    "1d": ({"spatial_dims": 1, "drop_rate": 0.2}, (2, 3, 16)),
    "1d_stem": ({"spatial_dims": 1, "small_inputs": False}, (2, 3, 32)),
    "2d": ({}, (2, 3, 8, 6)),
    "2d_stem": ({"small_inputs": False, "num_classes": 0}, (2, 3, 32, 32)),
    "2d_basic_dropout": ({"bn_size": None, "drop_rate": 0.2}, (3, 3, 8, 8)),
    "2d_one_image": ({}, (1, 3, 8, 8)),
    "2d_one_pixel": ({"block_config": (2,)}, (3, 3, 1, 1)),
    "2d_one_channel": ({"growth_rate": 1, "bn_size": 1, "num_init_features": 1, "in_channels": 1}, (2, 1, 8, 8)),
    "2d_one_channel_dropout": ({"growth_rate": 1, "num_init_features": 2, "drop_rate": 0.2}, (2, 3, 8, 8)),
    "3d": ({"spatial_dims": 3}, (2, 3, 4, 6, 4)),
    "3d_stem": ({"spatial_dims": 3, "small_inputs": False}, (2, 3, 16, 16, 16)),
    "3d_many": ({"spatial_dims": 3, "block_config": (2,)}, (20, 3, 2, 2, 2)),
    "3d_one_image": ({"spatial_dims": 3}, (1, 3, 4, 4, 4)),
}


def strides(x: Tensor | None) -> tuple | None:
    """The strides that tell something, or that the tensor is no plain memory at all."""
    if x is None:
        return None
    return tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)


def formatted(x: Tensor, last: bool) -> Tensor:
    return x.clone(memory_format=FORMATS[x.dim()] if last else torch.contiguous_format)


def laid_out(model: nn.Module, last: bool) -> nn.Module:
    for p in model.parameters() if last else ():
        if p.dim() in FORMATS:
            p.data = p.data.contiguous(memory_format=FORMATS[p.dim()])
    return model


def everything_public(model: nn.Module, x: Tensor, autocast: bool = False) -> dict[str, Tensor | None]:
    """Outputs, gradients by ``backward`` and by ``autograd.grad``, of the model and of each part of it alone."""
    calls = {"model": (model, x), "forward_features": (model.forward_features, x), "features": (model.features, x)}
    last = is_channels_last(x)
    for name in ("denseblock1", "transition1"):
        part = getattr(model.features, name, None)
        if part is not None:
            channels = next(m.num_features for m in part.modules() if hasattr(m, "num_features"))
            calls[name] = part, formatted(images(x.shape[0], channels, *[4] * (x.dim() - 2)).to(x.dtype), last)
    found = {}
    for name, (call, fed) in calls.items():
        leaf = fed.detach().requires_grad_()

        def run() -> Tensor:
            torch.manual_seed(5)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return call(leaf)

        model.eval()
        with torch.no_grad():
            found[f"{name}, eval"] = run()
        model.train()
        y = found[f"{name}, train"] = run()
        wanted = {"input": leaf, **dict(model.named_parameters())}
        grads = torch.autograd.grad(loss_of(y), list(wanted.values()), retain_graph=True, allow_unused=True)
        found |= {f"{name}: grad of {n}": g for n, g in zip(wanted, grads, strict=True)}
        if name != "features":
            model.zero_grad()
            loss_of(y).backward()
            found |= {f"{name}: {n}.grad": p.grad for n, p in wanted.items()}
    return found


def loss_of(y: Tensor) -> Tensor:
    """A fixed weighting; the gradient has the format of ``y``."""
    return (y * torch.empty_like(y).copy_(images(*y.shape, seed=8))).sum()


def assert_laid_out_alike(expected: dict, actual: dict) -> None:
    assert expected.keys() == actual.keys()
    faults = [
        f"{name}: {strides(actual[name])} instead of {strides(want)} for {tuple(want.shape)}"
        for name, want in expected.items()
        if want is not None and strides(actual[name]) != strides(want)
    ]
    assert not faults, "\n".join((f"{len(faults)} of {len(expected)} are laid out otherwise:", *faults[:20]))


def compared(overrides: dict, size: tuple, formats: tuple, dtype: torch.dtype, autocast: bool = False):
    """What is public, in the plain model and in every mode."""
    x = formatted(images(*size).to(dtype), formats[1])
    for mode in ("naive", "checkpoint", "fused", *(("lean",) if dtype == torch.float64 else ())):
        yield everything_public(laid_out(toy(mode, dtype=dtype, **overrides), formats[0]), x, autocast)


@each_format
@pytest.mark.parametrize("shape", SHAPES)
def test_everything_public_is_laid_out_as_in_the_plain_model(shape, formats):
    """Kills: an internal channels-last tensor that gets out, a gradient in the format of a buffer."""
    expected, *others = compared(*SHAPES[shape], formats, torch.float32)
    for actual in others:
        assert_laid_out_alike(expected, actual)


@each_format
@pytest.mark.parametrize("shape", ["2d", "2d_stem", "3d"])
def test_in_double_precision_the_numbers_too(shape, formats):
    """Kills: a conversion that mixes up what it converts, a format chosen by the precision."""
    expected, *others = compared(*SHAPES[shape], formats, torch.float64)
    for actual in others:
        assert_laid_out_alike(expected, actual)
        assert_same(expected, actual)


@each_format
@pytest.mark.parametrize("shape", ["1d", "2d", "2d_basic_dropout"])  # a CPU pools no bfloat16 volumes
def test_under_autocast(shape, formats):
    """Kills: a format that depends on the type of the weights."""
    expected, *others = compared(*SHAPES[shape], formats, torch.float32, autocast=True)
    for actual in others:
        assert_laid_out_alike(expected, actual)


def handed_over(model: nn.Module, x: Tensor, name: str) -> dict[str, Tensor]:
    """What hooks on one module see: inputs, outputs, and the gradients of both."""
    seen = {}

    def forward(module, args, output):
        seen[f"{name}: input"], seen[f"{name}: output"] = args[0], output

    def backward(module, grad_in, grad_out):
        seen[f"{name}: gradient of the input"], seen[f"{name}: gradient of the output"] = grad_in[0], grad_out[0]

    handles = [
        model.get_submodule(name).register_forward_hook(forward),
        model.get_submodule(name).register_full_backward_hook(backward),
    ]
    loss_of(model(x.detach().requires_grad_())).backward()
    for handle in handles:
        handle.remove()
    return seen


@each_mode
@each_format
@pytest.mark.parametrize("overrides", [{}, {"spatial_dims": 1}, {"spatial_dims": 3}], ids=["2d", "1d", "3d"])
def test_hooks_see_the_plain_models_formats(mode, overrides, formats):
    """On one module at a time: what stands beside it works as ever, channels-last.

    A gradient that the plain model takes out of a longer one, without a copy, may come in one piece.
    Kills: internal tensors handed to modules that are not the library's business.
    """
    dims = overrides.get("spatial_dims", 2)
    plain = laid_out(toy(small_inputs=False, dtype=torch.float32, **overrides), formats[0])
    other = laid_out(twin(plain, mode), formats[0])
    x = formatted(images(2, 3, *[20] * dims).float(), formats[1])
    for name, module in plain.named_modules():
        if name in ("", "features") or "denseblock1" in name and "denselayer2" not in name:
            continue
        expected, actual = handed_over(plain, x, name), handed_over(other, x, name)
        for kind, want in expected.items():
            if want is None or not (want.is_contiguous() or want.is_contiguous(memory_format=FORMATS[want.dim()])):
                continue
            assert strides(actual[kind]) == strides(want), f"{kind}: {actual[kind].stride()} instead of {want.stride()}"


@each_mode
def test_every_gradient_can_be_viewed(mode):
    """What tools do with gradients and features of a contiguous model. Kills: as above, for whoever flattens."""
    model = toy(mode)
    assert all(g.view(-1).dim() == 1 for g in torch.autograd.grad(model(images()).sum(), list(model.parameters())))
    assert model.forward_features(images()).view(4, -1).dim() == 2
    assert model.features(images()).view(4, -1).dim() == 2

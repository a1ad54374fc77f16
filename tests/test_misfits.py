"""Parts that do not fit where they stand: in every mode what the plain model does, be it numbers or an error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from helpers import assert_same, blocks, each_mode, images, layers, toy, training_state


def _norm(name, make):
    def change(model):
        setattr(layers(model)[1], name, make())

    return change


def _values(path, make):
    """Another tensor for a parameter or buffer of the model."""
    owner, _, name = path.rpartition(".")

    def change(model):
        module = model.get_submodule(owner)
        value = make(getattr(module, name))
        if name in module._parameters:
            value = nn.Parameter(value)
        setattr(module, name, value)

    return change


def _plain_attribute(model):
    norm = layers(model)[1].norm1
    mean = norm.running_mean
    del norm.running_mean
    norm.__dict__["running_mean"] = mean


def _no_track(model):
    norm = layers(model)[1].norm1
    norm.running_mean = norm.running_var = None


LAYER = "features.denseblock1.denselayer2"
CHANGES = {
    "norm1 of one channel": _norm("norm1", lambda: nn.BatchNorm2d(1).double()),
    "norm1 of fewer channels": _norm("norm1", lambda: nn.BatchNorm2d(8).double()),
    "norm1 of more channels": _norm("norm1", lambda: nn.BatchNorm2d(16).double()),
    "norm1 for volumes": _norm("norm1", lambda: nn.BatchNorm3d(12).double()),
    "norm1 for series": _norm("norm1", lambda: nn.BatchNorm1d(12).double()),
    "norm1 synchronised": _norm("norm1", lambda: nn.SyncBatchNorm(12).double()),
    "norm1 in float32": _norm("norm1", lambda: nn.BatchNorm2d(12)),
    "norm1 in half precision": _norm("norm1", lambda: nn.BatchNorm2d(12).half()),
    "norm2 of one channel": _norm("norm2", lambda: nn.BatchNorm2d(1).double()),
    "norm2 in float32": _norm("norm2", lambda: nn.BatchNorm2d(16)),
    "conv1 of fewer channels": _norm("conv1", lambda: nn.Conv2d(8, 16, 1, bias=False).double()),
    "conv1 of one channel": _norm("conv1", lambda: nn.Conv2d(1, 16, 1, bias=False).double()),
    "conv1 for volumes": _norm("conv1", lambda: nn.Conv3d(12, 16, 1, bias=False).double()),
    "conv1 in float32": _norm("conv1", lambda: nn.Conv2d(12, 16, 1, bias=False)),
    "conv2 of other channels": _norm("conv2", lambda: nn.Conv2d(8, 4, 3, padding=1, bias=False).double()),
    "conv2 for series": _norm("conv2", lambda: nn.Conv1d(16, 4, 3, padding=1, bias=False).double()),
    "conv2 in float32": _norm("conv2", lambda: nn.Conv2d(16, 4, 3, padding=1, bias=False)),
    "conv2 wider": _norm("conv2", lambda: nn.Conv2d(16, 6, 3, padding=1, bias=False).double()),
    "gamma of one element": _values(f"{LAYER}.norm1.weight", lambda t: t[:1].clone()),
    "gamma of another shape": _values(f"{LAYER}.norm1.weight", lambda t: t[:, None].clone()),
    "beta of one element": _values(f"{LAYER}.norm2.bias", lambda t: t[:1].clone()),
    "a running mean of one element": _values(f"{LAYER}.norm1.running_mean", lambda t: t[:1].clone()),
    "a running variance in float32": _values(f"{LAYER}.norm1.running_var", lambda t: t.float()),
    "no running mean": _values(f"{LAYER}.norm1.running_mean", lambda t: None),
    "no running variance": _values(f"{LAYER}.norm2.running_var", lambda t: None),
    "no running statistics": _no_track,
    "a running mean that is no buffer": _plain_attribute,
    "conv1's weight 3x3": _values(f"{LAYER}.conv1.weight", lambda t: t.repeat(1, 1, 3, 3)),
    "conv2's weight 1x1": _values(f"{LAYER}.conv2.weight", lambda t: t[..., :1, :1].clone()),
    "conv2's weight of other channels": _values(f"{LAYER}.conv2.weight", lambda t: t[:, :8].clone()),
    "conv2's weight wider": _values(f"{LAYER}.conv2.weight", lambda t: t.repeat(2, 1, 1, 1)),
    "the transition's norm of one channel": lambda m: setattr(m.features.transition1, "norm", nn.BatchNorm2d(1).double()),
    "the transition's norm in float32": lambda m: setattr(m.features.transition1, "norm", nn.BatchNorm2d(16)),
    "the transition's convolution of other channels": lambda m: setattr(
        m.features.transition1, "conv", nn.Conv2d(8, 8, 1, bias=False).double()
    ),
    "the transition's weight 3x3": _values("features.transition1.conv.weight", lambda t: t.repeat(1, 1, 3, 3)),
    "the transition's weight in float32": _values("features.transition1.conv.weight", lambda t: t.float()),
    "the transition's pool for volumes": lambda m: setattr(m.features.transition1, "pool", nn.AvgPool3d(2, 2)),
    "the transition's pool for series": lambda m: setattr(m.features.transition1, "pool", nn.AvgPool1d(2, 2)),
    "the final norm of one channel": lambda m: setattr(m.features, "norm5", nn.BatchNorm2d(1).double()),
    "the final norm in float32": lambda m: setattr(m.features, "norm5", nn.BatchNorm2d(16)),
    "the stem's norm of one channel": lambda m: setattr(m.features, "norm0", nn.BatchNorm2d(1).double()),
    "the stem's norm in float32": lambda m: setattr(m.features, "norm0", nn.BatchNorm2d(8)),
    "the stem's pool for volumes": lambda m: setattr(m.features, "pool0", nn.MaxPool3d(3, 2, 1)),
    "the stem's running mean of one element": _values("features.norm0.running_mean", lambda t: t[:1].clone()),
    "a layer too many": lambda m: blocks(m)[0].add_module("denselayer3", copy.deepcopy(layers(m)[1])),
    "a layer of another kind first": lambda m: blocks(m)[0].add_module("denselayer1", copy.deepcopy(layers(m)[2])),
}


def _outcome(model, training, dtype=torch.float64):
    model.train(training)
    try:
        return training_state(model, images(4, 3, 32, 32, dtype=dtype))
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        return error


def _compare(expected, actual):
    if isinstance(expected, Exception) or isinstance(actual, Exception):
        assert type(actual) is type(expected), f"{actual!r} instead of {expected!r}"[:600]
    else:
        assert_same(expected, actual)


@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_numbers_or_error_are_the_plain_model_s(change, training, mode):
    found = []
    for which in ("naive", mode):
        model = toy(which, spatial_dims=2, small_inputs=False)
        change(model)
        found.append(_outcome(model, training))
    _compare(*found)

"""Models that others have changed: whatever was added, moved, subclassed or resized works as in the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from efficient_densenet.models import Transition
from helpers import assert_same, assert_trains_like, blocks, each_mode, gradients, images, layers, toy


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def used_twice(model):
    shared = nn.Tanh()
    children = list(model.features.named_children())
    model.features = nn.Sequential()
    for name, module in children:
        model.features.add_module(name, module)
        if name in ("transition1", "denseblock2"):
            model.features.add_module(f"tanh{name[-1]}", shared)


def block_used_twice(model):
    stem, block, norm = model.features.conv0, model.features.denseblock1, model.features.norm5
    model.features = nn.Sequential()
    squeeze = nn.Conv2d(16, 8, 1).double()
    for name, module in {"conv0": stem, "first": block, "squeeze": squeeze, "second": block, "norm5": norm}.items():
        model.features.add_module(name, module)


def transition_of_other_order(model):
    transition = model.features.transition1
    parts = {name: transition._modules[name] for name in ("conv", "norm", "relu", "pool")}
    parts["norm"] = nn.BatchNorm2d(8).double()
    transition._modules.clear()
    transition._modules.update(parts)


def subclass_of(kind):
    class Tripled(kind):
        def forward(self, x):
            return 3 * super().forward(x) + 1

    return Tripled


def change_class(module):
    module.__class__ = subclass_of(type(module))


def transition_at_the_end(model):
    """A subclassed one, where the final norm was."""
    del model.features.norm5
    model.features.add_module("transition2", subclass_of(Transition)(16, 16, 2).double())


def another_end(model):
    layer = layers(model)[0]
    layer.after_bottleneck = lambda x: layer.conv2(layer.relu2(layer.norm2(x))).sin()


def of_width(width):
    def change(model):
        torch.manual_seed(2)
        first, second = layers(model)[:2]
        first.conv2 = nn.Conv2d(16, width, 3, padding=1, bias=False).double()
        second.norm1 = nn.BatchNorm2d(8 + width).double()
        second.conv1 = nn.Conv2d(8 + width, 16, 1, bias=False).double()
        model.features.transition1.norm = nn.BatchNorm2d(8 + width + 4).double()
        model.features.transition1.conv = nn.Conv2d(8 + width + 4, 8, 1, bias=False).double()

    return change


def negative_dropout(model):
    for layer in layers(model):
        layer.drop_rate = -0.5


CHANGES = {
    "module used twice": used_twice,
    "block used twice": block_used_twice,
    "transition with one part more": lambda model: model.features.transition1.add_module("tanh", nn.Tanh()),
    "transition of other order": transition_of_other_order,
    "transition without pool": lambda model: delattr(model.features.transition1, "pool"),
    "features subclassed": lambda model: setattr(model.features, "__class__", Doubled),
    "transition subclassed": lambda model: change_class(model.features.transition1),
    "transition subclassed, at the end": transition_at_the_end,
    "block subclassed": lambda model: change_class(blocks(model)[0]),
    "last block subclassed": lambda model: change_class(blocks(model)[-1]),
    "layer's end replaced": another_end,
    "wider layer": of_width(6),
    "narrower layer": of_width(2),
    "drop rate below zero": negative_dropout,
}


@each_mode
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_trains_like_the_plain_one(mode, change):
    """Kills: functions that speak for modules they do not know."""
    plain = toy()
    CHANGES[change](plain)
    changed = copy.deepcopy(plain)
    changed.set_efficient(mode)
    if change == "layer's end replaced":
        another_end(changed)  # the copy's would call the original's modules
    assert_trains_like(plain, changed, images(4, 3, 16, 16), steps=2)


@each_mode
@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_an_edit_of_a_blocks_output_is_noticed_whatever_its_width(mode, width, memory_format):
    """Noticed, or without effect on the gradients. Kills: the edit that goes unseen because the buffer is not full."""
    found = []
    for net in (toy(), toy(mode)):
        of_width(width)(net)
        x = images(2, 8, 8, 8).to(memory_format=memory_format).requires_grad_()
        out = blocks(net)[0](x)
        out.mul_(2)
        try:
            out.square().sum().backward()
        except RuntimeError as error:
            assert found and "inplace" in str(error), "the plain path takes this edit"
            return
        found.append({"input.grad": x.grad, **gradients(net)})
    assert memory_format == torch.contiguous_format or width == 2
    assert_same(*found)

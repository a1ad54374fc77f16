"""Other people's DenseNets, converted: the same numbers, the same objects, and what cannot be converted says why."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import efficient_densenet
from efficient_densenet import DenseNet, execution_plan, make_efficient, restore
from efficient_densenet.conversion import adopt
from efficient_densenet.memory import measure_step
from families import (
    FAMILIES, K, BlockAndTransition, Functional, FunctionalTransition, Net, NewFirst, SharedReLU, SwitchedTransition,
    TiramisuBlock, row, standard_transition,
)  # fmt: skip
from helpers import assert_same, assert_trains_like, buffers, gradients, images, norms, peer, toy, training_state

SMALL = {"growth_rate": 4, "block_config": (3, 3), "num_classes": 5}


def torchvision(**overrides):
    return peer("torchvision.models.densenet").DenseNet(**{**SMALL, "num_init_features": 8, **overrides})


def timm(**overrides):
    peer("timm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sys.modules["timm"].create_model("densenet121", **{**SMALL, **overrides})


def monai(dims, **overrides):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nets = peer("monai.networks.nets")
    return nets.DenseNet(dims, 3, 5, init_features=8, growth_rate=4, block_config=(3, 3), **overrides)


LIBRARIES = {
    "torchvision": torchvision,
    "torchvision, dropout": lambda: torchvision(drop_rate=0.3),
    "timm": timm,
    "timm, dropout": lambda: timm(proj_drop_rate=0.3),
    "MONAI 1-D": lambda: monai(1, dropout_prob=0.3),
    "MONAI 2-D": lambda: monai(2),
    "MONAI 3-D": lambda: monai(3),
}
PICKED = ("torchvision", "timm", "MONAI 2-D")
jit_is_deprecated = pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
each_pick = pytest.mark.parametrize("name", PICKED)


def ready(model: nn.Module) -> nn.Module:
    """In float64, none of its norms neutral, some of them negative."""
    torch.manual_seed(0)
    for norm in norms(model.double()).values():
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5)[::3].neg_()
            norm.bias.normal_(0, 0.3)
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 1.5)
    return model


def pair(name: str, mode="fused") -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A model, its converted copy, and images for both."""
    torch.manual_seed(0)
    model = ready({**FAMILIES, **LIBRARIES}[name]())
    dims = next(module.weight.dim() - 2 for module in model.modules() if hasattr(module, "kernel_size"))
    side = 33 if name in LIBRARIES else 9
    return model, make_efficient(copy.deepcopy(model), mode), images(3, 3, *(side,) * dims)


def runs(model: nn.Module) -> set[str]:
    return {plan.runs for plan in execution_plan(model)}


# --- The same numbers -----------------------------------------------------------------------------------------------

CONVERTED = [name for name in {**LIBRARIES, **FAMILIES} if "efficient" not in name]


@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_converted_model_trains_like_the_original(name, training):
    """Kills: ReLUs, dropouts, orders that are not what the module computes; statistics that move twice."""
    model, other, x = pair(name)
    assert runs(other) == {"fused"}
    assert_trains_like(model.train(training), other.train(training), x, steps=3)


@each_pick
def test_lean(name):
    model, other, x = pair(name, "lean")
    assert runs(other) == {"lean"}
    assert_trains_like(model, other, x, steps=2)


@each_pick
def test_parts_that_are_frozen(name):
    """One block in evaluation and one norm without gradients. Kills: flags of the whole for those of a part."""
    model, other, x = pair(name)
    for net in (model, other):
        net.features.denseblock1.eval()
        norm = list(norms(net.features.denseblock2).values())[2]
        norm.eval().requires_grad_(False)
    assert_trains_like(model, other, x, steps=2)
    assert runs(other) == {"fused"}


@each_pick
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format], ids=str)
def test_formats(name, memory_format):
    """What parts give is laid out as the original gives it. Kills: channels-last views that nobody expects."""
    model, other, x = pair(name)
    for net in (model, other):
        net.to(memory_format=memory_format)
        x = x.to(memory_format=memory_format).requires_grad_()
        found = []
        for part in net.features.children():
            x = part(x)
            found.append(x.stride())
        expected = found if net is model else expected
        x = images(3, 3, 33, 33)
    assert found == expected


@pytest.mark.parametrize("name", ["kuangliu", "tiramisu", "tiramisu, up", "bamos", "in one module"])
def test_lean_and_frozen_parts_of_single_files(name):
    """As above. Kills: biases, orders, transitions that hold for training and for fused alone."""
    model, other, x = pair(name, "lean")
    for net in (model, other):
        net.block1.eval()
        norm = list(norms(net.block2).values())[1]
        norm.eval().requires_grad_(False)
    assert runs(other) == {"lean"}
    assert_trains_like(model, other, x, steps=3)


def calls_of(monkeypatch) -> list:
    """What the block function is called with, from now on."""
    calls, run = [], adopt.run_found
    monkeypatch.setattr(adopt, "run_found", lambda *args: calls.append(args[1]) or run(*args))
    return calls


@pytest.mark.parametrize("kind", [FunctionalTransition, SwitchedTransition])
def test_transitions_with_code_of_their_own(kind, monkeypatch):
    """Alone, and as one function with the block before them. Kills: blocks alone that are efficient."""
    torch.manual_seed(0)
    block = ready(row(Functional, 8))
    model = nn.ModuleList([block, ready(kind(20, 8))])
    other = make_efficient(copy.deepcopy(model))
    assert [plan.block for plan in execution_plan(other)] == ["0"]
    x, calls = images(2, 8, 8, 6), calls_of(monkeypatch)
    assert_trains_like(model, other, x, forward=lambda net, x: net[1](net[0](x)))
    assert [(len(found.layers), found.tail is not None) for found in calls] == [(3, False), (0, True)]
    calls.clear()
    in_a_row = make_efficient(nn.Sequential(*copy.deepcopy(model)))
    assert_trains_like(nn.Sequential(*model), in_a_row, x)
    assert [(len(found.layers), found.tail is not None) for found in calls] == [(3, True)]
    small = images(2, 20, 4, 1)  # there is nothing to pool
    for net in (model, other):
        with pytest.raises(RuntimeError, match="too small"):
            net[1](small)


def test_new_features_alone_in_a_row(monkeypatch):
    """A block that gives new features only, behind another and before a transition.

    Kills: layers joined over the end of such a block, or closed by what reads the new features alone.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        row(Functional, 8, 2), TiramisuBlock(16, 2, upsample=True, dropout=0.3), standard_transition(8, 8),
        row(NewFirst, 8, 2), row(Functional, 16, 2), BlockAndTransition(24), BlockAndTransition(24),
    )  # fmt: skip
    other = make_efficient(copy.deepcopy(ready(model)))
    calls = calls_of(monkeypatch)
    assert_trains_like(model, other, images(2, 8, 16, 16), steps=3)
    found = [(len(one.layers), one.new_first, one.new_only, one.tail is not None) for one in calls[:6]]
    assert found == [
        (2, False, False, False), (2, False, True, False), (0, None, False, True), (2, True, False, False),
        (5, False, False, True), (3, False, False, True),
    ]  # fmt: skip
    plans = [(plan.block, plan.runs, plan.graph_break) for plan in execution_plan(other)]
    another = "another order or choice of features"
    assert plans == [
        ("0", "fused", ""), ("1", "fused", "convolutions with a bias"), ("3", "fused", another), ("4", "fused", ""),
        ("5", "fused", ""), ("6", "fused", ""),
    ]  # fmt: skip


def test_dropout_that_evaluation_does_not_end():
    """As a function's default has it (HDenseUNet). Kills: dropout that ends with training, whoever wrote it."""
    torch.manual_seed(0)
    model = ready(nn.Sequential(AlwaysDropping(8), AlwaysDropping(12))).eval()
    other = make_efficient(copy.deepcopy(model))
    assert runs(other) == {"fused"}
    assert_trains_like(model, other, images(2, 8, 6, 6), steps=2)


def test_an_asked_checkpoint_is_answered():
    """The plan says what runs. Kills: a mode that is written down and not run."""
    model, other, x = pair("torchvision", "checkpoint")
    plans = execution_plan(other)
    assert {(plan.asked, plan.runs, plan.reason) for plan in plans} == {
        ("checkpoint", "fused", "there are no checkpoints in converted modules")
    }
    fused = make_efficient(copy.deepcopy(model), "fused")
    assert_trains_like(model, other, x)
    assert measure_step(other, x).kept_bytes == measure_step(fused, x).kept_bytes


class Segmentation(nn.Module):
    """Nothing but what dense blocks are made of: the whole looks like one from afar."""

    def __init__(self):
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 3, padding=1), TiramisuBlock(8)
        self.up, self.end = TiramisuBlock(20, upsample=True), nn.Conv2d(12, 2, 1)

    def forward(self, x):
        return self.end(self.up(self.down(self.stem(x))))


def test_networks_of_nothing_else():
    """Kills: blocks that a plan does not show, as what they stand in was looked at."""
    torch.manual_seed(0)
    model = ready(Segmentation())
    assert [(plan.block, plan.reason) for plan in execution_plan(model)] == [
        ("down", "not converted"), ("up", "not converted")
    ]  # fmt: skip
    other = make_efficient(copy.deepcopy(model))
    assert [(plan.block, plan.runs) for plan in execution_plan(other)] == [("down", "fused"), ("up", "fused")]
    assert_trains_like(model, other, images(2, 3, 8, 8), steps=3)


@pytest.mark.parametrize("name", ["torchvision", "gpleiss"])
def test_memory_flags(name):
    """With the model's own checkpoints on, it computes what it computes without them; theirs move statistics twice.

    Kills: a flag's code traced into, or kept running.
    """
    model, _, x = pair(name)
    if name == "torchvision":
        flagged = torchvision(memory_efficient=True)
    else:
        flagged = FAMILIES["gpleiss, efficient"]()
    flagged.double().load_state_dict(model.state_dict())
    make_efficient(flagged)
    assert runs(flagged) == {"fused"}
    assert_trains_like(model, flagged, x, steps=2)


# --- What is no dense block -----------------------------------------------------------------------------------------


class Bad(nn.Module):
    """A dense layer, but for one thing."""

    def __init__(self, channels=8, **conv):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 16, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(16), nn.Conv2d(16, K, 3, **{"padding": 1, "bias": False, **conv})
        self.drop = nn.Dropout(0.5)
        self.seen = []

    def new(self, x):
        return self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))

    def forward(self, x):
        return torch.cat([x, self.new(x)], 1)


class DropoutTwice(Bad):
    def forward(self, x):
        return torch.cat([x, self.drop(self.drop(self.new(x)))], 1)


class DropoutInside(Bad):
    def forward(self, x):
        out = self.drop(self.conv1(F.relu(self.norm1(x))))
        return torch.cat([x, self.conv2(F.relu(self.norm2(out)))], 1)


class NoReLU(Bad):
    def forward(self, x):
        return torch.cat([x, self.conv2(F.relu(self.norm2(self.conv1(self.norm1(x)))))], 1)


class Scaled(Bad):
    def forward(self, x):
        return torch.cat([x, 2 * self.new(x)], 1)


class Residual(Bad):
    def forward(self, x):
        return x[:, :K] + self.new(x)


class Cropped(Bad):
    def forward(self, x):
        return torch.cat([x[..., 1:-1, 1:-1], self.new(x)[..., 1:-1, 1:-1]], 1)


class ByShape(Bad):
    def forward(self, x):
        return torch.cat([x, self.new(x)], 1) if x.shape[2] > 4 else x


class ByChance(Bad):
    def forward(self, x):
        return torch.cat([x, self.new(x)], 1) if random.random() < 2 else x


class Twice(Bad):
    def forward(self, x):
        self.new(x)
        return torch.cat([x, self.new(x)], 1)


class Detached(Bad):
    def forward(self, x):
        return torch.cat([x.detach(), self.new(x)], 1)


class InsideOut(Bad):
    """The gradients alone are others."""

    def forward(self, x):
        with torch.no_grad():
            out = self.conv1(F.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(F.relu(self.norm2(out)))], 1)


class Rectified(nn.ReLU):
    def forward(self, x):
        return super().forward(x) + 1


class OwnReLU(Bad):
    def __init__(self):
        super().__init__()
        self.act = Rectified()

    def new(self, x):
        return self.conv2(self.act(self.norm2(self.conv1(self.act(self.norm1(x))))))


class MaxPooled(FunctionalTransition):
    def forward(self, x):
        return F.max_pool2d(self.conv1(F.relu(self.bn1(x))), 2)


class PooledByThree(FunctionalTransition):
    def forward(self, x):
        return F.avg_pool2d(self.conv1(F.relu(self.bn1(x))), 3, 2)


class PooledPadded(FunctionalTransition):
    def forward(self, x):
        return F.avg_pool2d(self.conv1(F.relu(self.bn1(x))), 2, ceil_mode=True)


class PooledFirst(FunctionalTransition):
    def forward(self, x):
        return self.conv1(F.avg_pool2d(F.relu(self.bn1(x)), 2))


class NoReLUInTransition(FunctionalTransition):
    """As in weiaicunzai/pytorch-cifar100."""

    def forward(self, x):
        return F.avg_pool2d(self.conv1(self.bn1(x)), 2)


class DroppedTransition(FunctionalTransition):
    """As in andreasveit/densenet-pytorch, with a dropout rate."""

    def forward(self, x):
        return F.avg_pool2d(F.dropout(self.conv1(F.relu(self.bn1(x))), 0.3, training=True), 2)


class AlwaysDropping(Bad):
    """In evaluation too, as a function's default has it (HDenseUNet): computed here like any other dropout."""

    def forward(self, x):
        return torch.cat([x, F.dropout(self.new(x), 0.4)], 1)


class MixedOrder(nn.Module):
    """Its features are appended by one layer and prepended by the next."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Residual(8), Residual(8 + K)

    def forward(self, x):
        x = torch.cat([x, self.a.new(x)], 1)
        return torch.cat([self.b.new(x), x], 1)


class Sparse(nn.Module):
    """The second layer reads the first one's features only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Residual(8), Residual(K)

    def forward(self, x):
        a = self.a.new(x)
        return torch.cat([x, a, self.b.new(a)], 1)


def with_norm(norm):
    layer = Bad()
    layer.norm1 = norm
    return layer


TRAPS = {
    "groups": (lambda: Bad(groups=4), "conv2 has groups=4"),
    "padding mode": (lambda: Bad(padding_mode="replicate"), "conv2 has padding_mode='replicate'"),
    "dilation": (lambda: Bad(dilation=2, padding=2), "conv2 has"),
    "norm": (lambda: with_norm(nn.GroupNorm(2, 8)), "norm1"),
    "instance norm": (lambda: with_norm(nn.InstanceNorm2d(8, affine=True)), "norm1"),
    "dropout twice": (DropoutTwice, "behind dropout"),
    "dropout inside": (DropoutInside, "a norm behind dropout"),
    "no ReLU": (NoReLU, "no ReLU behind norm1"),
    "scaled": (Scaled, "multiplies"),
    "residual": (Residual, "takes a part of its features"),
    "cropped": (Cropped, "takes a part of its features"),
    "by shape": (ByShape, "reads shape of its features"),
    "by chance": (ByChance, "draws random numbers"),
    "computed twice": (Twice, "computes more than it returns"),
    "detached": (Detached, "reads detach of its features"),
    "without gradients": (InsideOut, "other numbers"),
    "another ReLU": (OwnReLU, "adds"),
    "sparse": (Sparse, "than to concatenate it"),
    "appended and prepended": (MixedOrder, "in order"),
    "largest of four": (lambda: MaxPooled(8, 8), "max_pool2d"),
    "pooled by three": (lambda: PooledByThree(8, 8), "averages over 3 at a stride of 2"),
    "pooled beyond the edge": (lambda: PooledPadded(8, 8), "averages over 2"),
    "pooled first": (lambda: PooledFirst(8, 8), "it concatenates nothing"),
    "transition without ReLU": (lambda: NoReLUInTransition(8, 8), "no ReLU behind bn1"),
    "dropout in a transition": (lambda: DroppedTransition(8, 8), "a dropout between convolution and pooling"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_what_looks_like_a_dense_layer_stays_plain(trap):
    """Refused with its reason; next to a real block, it stays what it is, and right.

    Kills: recognition by names of classes or children, or by numbers alone.
    """
    make, reason = TRAPS[trap]
    with pytest.raises(ValueError, match="no dense block was found") as refused:
        make_efficient(make().double())
    assert reason in str(refused.value)
    torch.manual_seed(0)
    model = ready(nn.Sequential(row(Functional, 8, 2), standard_transition(16, 8), make()))
    if trap == "another ReLU":
        model[-1].seen = [1]
    other = make_efficient(copy.deepcopy(model))
    assert type(other[-1]) is type(model[-1])
    x = images(2, 8, 12, 12)
    torch.manual_seed(0)
    expected = training_state(model, x, input_grad=False)
    torch.manual_seed(0)
    assert_same(expected, training_state(other, x, input_grad=False))


@jit_is_deprecated
def test_other_models_are_refused():
    """Kills: conversions of everything that has norms and convolutions; a refusal without words."""
    resnet = peer("torchvision.models").resnet18()
    types = [type(module) for module in resnet.modules()]
    with pytest.raises(ValueError, match="no dense block was found in ResNet"):
        make_efficient(resnet)
    assert types == [type(module) for module in resnet.modules()]
    with pytest.raises(ValueError, match="nothing in it has the parts of one"):
        make_efficient(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="nn.Module"):
        make_efficient("densenet121")
    with pytest.raises(ValueError, match="efficient must be"):
        make_efficient(Net(lambda c: row(Functional, c)), "fast")
    with pytest.raises(ValueError, match="before it is scripted"):
        make_efficient(nn.Sequential(torch.jit.script(nn.Sequential(nn.ReLU()))))


def test_the_nearest_miss_is_named():
    model = torchvision()
    for block in (model.features.denseblock1, model.features.denseblock2):
        block.denselayer2.conv2 = nn.Conv2d(16, 4, 3, padding=1, bias=False, groups=4)
    with pytest.raises(ValueError, match="features.denseblock1: denselayer2: conv2 has groups=4"):
        make_efficient(model)
    assert not any(hasattr(module, "_efficient_mode") for module in model.modules())


# --- What conversion leaves alone -----------------------------------------------------------------------------------


@each_pick
def test_modules_parameters_and_keys_are_the_same(name):
    """Kills: replaced or renamed modules; an optimizer from before that trains nothing."""
    model = ready(LIBRARIES[name]())
    before = dict(model.named_modules()), dict(model.named_parameters()), list(model.state_dict())
    kinds = {key: type(module) for key, module in before[0].items()}
    states = {key: dict(module.__dict__) for key, module in before[0].items()}
    assert make_efficient(model) is model
    assert all(model.get_submodule(key) is module for key, module in before[0].items())
    assert all(isinstance(module, kinds[key]) for key, module in model.named_modules())
    assert all(type(module).__name__ == kinds[key].__name__ for key, module in model.named_modules())
    assert all(model.get_parameter(key) is p for key, p in before[1].items())
    assert list(model.state_dict()) == before[2]
    make_efficient(model, "lean")
    assert runs(model) == {"lean"}
    assert restore(model) is model
    for key, module in model.named_modules():
        assert type(module) is kinds[key] and module.__dict__.keys() == states[key].keys(), key


class Talking(Bad):
    """Code that does more than compute."""

    def forward(self, x):
        print("here")
        self.seen.append(x)
        self.count = getattr(self, "count", 0) + 1
        return super().forward(x)


def test_conversion_touches_nothing(capsys):
    """Kills: hooks that are called, prints, and other people's state changed for finding out what they compute."""
    model = nn.Sequential(Talking(8), Functional(8), ByChance(12))
    model[1].eval()
    called = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: called.append(args))
        module.register_forward_pre_hook(lambda *args: called.append(args))
    everywhere = nn.modules.module.register_module_forward_hook(lambda *args: called.append(args))
    states = [dict(module.__dict__) for module in model.modules()]
    values = {key: value.clone() for key, value in model.state_dict().items()}
    drawn, python, grad = torch.get_rng_state(), random.getstate(), torch.is_grad_enabled()
    try:
        make_efficient(model)
    finally:
        everywhere.remove()
    assert torch.equal(drawn, torch.get_rng_state()) and python == random.getstate() and grad == torch.is_grad_enabled()
    assert not called and not capsys.readouterr().out and not model[0].seen
    assert_same(values, dict(model.state_dict()), 0)
    for module, state in zip(model.modules(), states, strict=True):
        now = {key: value for key, value in module.__dict__.items() if not key.startswith("_efficient_")}
        assert now.keys() == state.keys() and all(now[key] is value for key, value in state.items())


def test_a_conversion_that_fails_half_way_is_undone(monkeypatch):
    """Kills: a model half of which is converted; a mode that was set before and is lost."""
    model = nn.ModuleList([make_efficient(Functional(8), "lean"), Functional(8), SharedReLU(8)])
    before = [(type(module), dict(module.__dict__)) for module in model.modules()]

    def failing(kind):
        if kind is SharedReLU:
            raise TypeError("no room for another class")
        return adopt.efficient_class(kind)

    monkeypatch.setattr(efficient_densenet.conversion.convert, "efficient_class", failing)
    with pytest.raises(TypeError, match="no room"):
        make_efficient(model, "fused")
    assert [(type(module), dict(module.__dict__)) for module in model.modules()] == before


def test_models_of_this_package_inside_are_set():
    both = nn.ModuleList([toy(), torchvision().double()])
    make_efficient(both, "lean")
    assert both[0].efficient == "lean" and runs(both) == {"lean"}
    assert type(both[0]) is DenseNet
    make_efficient(both[0], False)
    assert both[0].efficient == "naive"


# --- What holds after conversion ------------------------------------------------------------------------------------


@each_pick
def test_copies_and_files(name):
    """Kills: copies that run the original's weights, or lose the conversion."""
    model, other, x = pair(name)
    expected = model.eval()(x)
    copied = copy.deepcopy(other.eval())
    loaded = pickle.loads(pickle.dumps(other))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    for net in (copied, loaded):
        assert runs(net) == {"fused"}
        torch.testing.assert_close(net(x), expected)


@pytest.mark.parametrize("name", ["torchvision", "pytorchcv", "tiramisu, up"])
def test_a_file_in_a_fresh_process(name, tmp_path):
    model, other, x = pair(name)
    torch.save((other.eval(), x, model.eval()(x)), tmp_path / "model.pt")
    code = (
        "import torch; from efficient_densenet import execution_plan\n"
        f"model, x, y = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "torch.testing.assert_close(model(x), y)\n"
        "assert {plan.runs for plan in execution_plan(model)} == {'fused'}"
    )
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env={**os.environ, "PYTHONPATH": paths})


@each_pick
@jit_is_deprecated
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_scripts_traces_and_graphs(name):
    """Kills: a conversion that cannot be scripted, or that graphs show."""
    model, other, x = pair(name)
    expected = model.eval()(x)
    other.eval()
    for _ in range(2):
        torch.testing.assert_close(torch.jit.script(other)(x), expected)
    torch.jit.script(model)
    torch.testing.assert_close(torch.jit.trace(other, x)(x), expected)
    graphs = [torch.fx.symbolic_trace(net) for net in (model, other)]
    assert [node.name for node in graphs[0].graph.nodes] == [node.name for node in graphs[1].graph.nodes]
    torch.testing.assert_close(graphs[1](x), expected)
    programs = [torch.export.export(net, (x,)) for net in (model, other)]
    assert [node.name for node in programs[0].graph.nodes] == [node.name for node in programs[1].graph.nodes]
    assert runs(other) == {"fused"}


@each_pick
def test_compiled(name):
    model, other, x = pair(name)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for net, run in ((model, model), (other, compiled)):
        run(x).square().sum().backward()
    assert_same(gradients(model) | buffers(model), gradients(other) | buffers(other))


def test_compiled_with_biases():
    """Outside the graph, as the plan says. Kills: biases that the compiled block leaves out."""
    model, other, x = pair("tiramisu, up")
    assert {plan.graph_break for plan in execution_plan(other)} == {"convolutions with a bias"}
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo looks at gradients of what passes a break
        for net, run in ((model, model), (other, compiled)):
            run(x).square().sum().backward()
    assert_same(gradients(model) | buffers(model), gradients(other) | buffers(other))


@each_pick
def test_parametrized_later(name):
    """Weights that are computed are computed as often as in the original. Kills: weights read past their computation."""
    model, other, x = pair(name)
    for net in (model, other):
        torch.manual_seed(3)
        convs = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
        torch.nn.utils.parametrizations.spectral_norm(convs[2])
    assert_trains_like(model, other, x, steps=2)
    assert sum(bool(plan.reason) for plan in execution_plan(other)) == 1


@each_pick
def test_onnx(name, tmp_path):
    pytest.importorskip("onnxscript", reason="torch exports to ONNX by onnxscript")
    model, other, x = pair(name)
    sizes = []
    for net in (model, other):
        program = torch.onnx.export(net.eval(), (x,), dynamo=True)
        sizes.append([node.op_type for node in program.model.graph])
    assert sizes[0] == sizes[1]


def replica(model: nn.Module) -> nn.Module:
    """What DataParallel makes of a model for another device."""
    modules = list(model.modules())
    replicas = [module._replicate_for_data_parallel() for module in modules]
    for module, twin in zip(modules, replicas, strict=True):
        twin._former_parameters = {}
        for key, child in module._modules.items():
            twin._modules[key] = None if child is None else replicas[modules.index(child)]
        for key, p in module._parameters.items():
            if p is None:
                twin._parameters[key] = None
            else:
                setattr(twin, key, p * 1)
                twin._former_parameters[key] = getattr(twin, key)
        for key, buffer in module._buffers.items():
            twin._buffers[key] = None if buffer is None else buffer.clone()
    return replicas[0]


@each_pick
def test_replicas(name):
    """Kills: replicas that run the original's modules; a plan learned from what a replica holds."""
    model, other, x = pair(name)
    other.features.denseblock1.note = "changed since"  # so that a replica is the first to look again
    twin = replica(other)
    torch.testing.assert_close(twin(x), model(x))
    assert runs(twin) == {"fused"}
    assert sum(p.grad is not None for p in other.parameters()) == 0
    twin(x).sum().backward()
    assert all(p.grad is not None for p in other.parameters())


@each_pick
def test_children_called_one_by_one(name):
    model, other, x = pair(name)
    ours, theirs = x, x
    for part, original in zip(other.features.children(), model.features.children(), strict=True):
        ours, theirs = part(ours), original(theirs)
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(other.features[:6](x), model.features[:6](x))
    assert runs(other.features[:6]) == {"fused"}


def test_flags_changed_later():
    """Kills: dropout rates of the time of conversion."""
    model, other, x = pair("torchvision")
    for rate in (0.4, 0.0, 0.2):
        for net in (model, other):
            for module in net.modules():
                if hasattr(module, "drop_rate"):
                    module.drop_rate = rate
        assert_trains_like(model, other, x)
        assert runs(other) == {"fused"}


@each_pick
def test_hooks_set_and_removed(name):
    """Kills: hooks on inner modules that are not called."""
    model, other, x = pair(name)
    seen = []
    conv = next(module for key, module in other.named_modules() if "dense" in key and key.endswith("conv2"))
    handle = conv.register_forward_hook(lambda *args: seen.append(args))
    assert_trains_like(model, other, x)
    assert seen and runs(other) == {"fused", "naive"}
    assert any("conv2 has hooks" in plan.reason for plan in execution_plan(other))
    handle.remove()
    assert runs(other) == {"fused"}


def test_modules_replaced_later():
    """Kills: parts that are held, or only looked for by name."""
    model, other, x = pair("torchvision")
    for net in (model, other):
        layer = net.features.denseblock1.denselayer2
        torch.manual_seed(5)
        layer.conv2 = nn.Conv2d(16, 4, 3, padding=1, bias=False).double()
        layer.relu1 = nn.ReLU6()
        net.features.denseblock2.denselayer1.norm1.weight.requires_grad_(False)
    assert_trains_like(model, other, x, steps=2)
    assert [plan.reason for plan in execution_plan(other)] == ["denselayer2: relu1 is a ReLU6", ""]


class TenTimes(nn.Module):
    def forward(self, x):
        return 10 * x


def test_a_layer_added_later():
    """Kills: plans that do not see what was added."""
    model, other, x = pair("torchvision")
    for net in (model, other):
        net.features.denseblock2.add_module("denselayer4", torchvision().features.denseblock1.denselayer1.double())
        net.features.denseblock2.denselayer4.forward = lambda features: 10 * features[-1]
        net.features.norm5 = ready(nn.BatchNorm2d(26))
        net.classifier = nn.Linear(26, 5).double()
    other.load_state_dict(model.state_dict())
    assert_trains_like(model, other, x, steps=2)


@each_pick
def test_block_arguments_by_name(name):
    """Kills: another name for the argument of a block."""
    model, other, _ = pair(name)
    block = model.features.denseblock1
    argument = list(inspect.signature(type(block).forward).parameters)[1]
    x = images(2, 8, 6, 6)
    torch.testing.assert_close(other.features.denseblock1(**{argument: x}), block(**{argument: x}))


@each_pick
def test_norms_synchronised_before_and_after(name):
    """Kills: norms with a ReLU inside that are none of the known ones once synchronised."""
    model, other, x = pair(name)
    convert = efficient_densenet.SyncBatchNorm.convert_sync_batchnorm
    for net in (convert(copy.deepcopy(other)), make_efficient(convert(copy.deepcopy(model)))):
        assert runs(net) == {"fused"}
        assert_trains_like(copy.deepcopy(model), net, x)


@each_pick
def test_hooks_on_whole_blocks(name):
    """As for maps of what a network looks at: the blocks stay efficient. Kills: hooks that another call goes round."""
    model, other, x = pair(name)
    found = []
    for net in (model, other):
        seen = []
        block1, block2 = net.features.denseblock1, net.features.denseblock2
        block2.register_forward_hook(lambda module, args, out: (out.register_hook(seen.append), None)[1])
        block1.register_full_backward_hook(lambda module, grads, out: seen.append(out[0]))
        net(x).square().sum().backward()
        found.append({str(i): grad for i, grad in enumerate(seen)})
    assert len(found[0]) == 2 and runs(other) == {"fused"}
    assert_same(*found)


def test_features_in_a_list():
    """timm's features_only, and torchvision's getters of layers and of nodes in a graph."""
    model, other, x = pair("timm")
    shape = {"features_only": True, "out_indices": (0, 1, 2), "num_classes": None}
    nets = [ready(timm(**shape)), make_efficient(ready(timm(**shape)))]
    assert runs(nets[1]) == {"fused"}

    def forward(net, x):
        return torch.cat([feature.flatten(1) for feature in net(x)], 1)

    assert_trains_like(*nets, x, steps=2, forward=forward)
    getter = peer("torchvision.models._utils").IntermediateLayerGetter
    graphs = peer("torchvision.models.feature_extraction")
    names = {"denseblock1": "a", "transition1": "b"}
    for key, want in getter(model.features, names)(x).items():
        got = getter(other.features, names)(x)[key]
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    assert graphs.get_graph_node_names(model) == graphs.get_graph_node_names(other)


def test_a_transition_walked_through():
    """As encoders for segmentation do: norm, ReLU, a skip, convolution, pooling."""
    model, other, x = pair("torchvision")
    found = []
    for net in (model, other):
        *stem, block, transition, second, _ = net.features.children()
        for part in (*stem, block):
            y = part(y) if part is not stem[0] else part(x)
        skip = transition.relu(transition.norm(y))
        out = second(transition.pool(transition.conv(skip)))
        (out.sum() + skip.square().sum()).backward()
        found.append({"out": out, "skip": skip, **{key: p.grad for key, p in net.named_parameters()}})
    assert_same(*found)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@each_pick
def test_averaged_and_distributed(name, group):
    model, other, x = pair(name)
    averaged = [torch.optim.swa_utils.AveragedModel(net) for net in (model, other)]
    parallel = nn.parallel.DistributedDataParallel(other)
    assert_same(training_state(model, x), training_state(other, x, forward=lambda net, x: parallel(x)))
    for average, net in zip(averaged, (model, other), strict=True):
        average.update_parameters(net)
        average.update_parameters(net)
    torch.testing.assert_close(averaged[1].eval()(x), averaged[0].eval()(x))
    assert runs(averaged[1]) == {"fused"}


@each_pick
def test_fully_sharded(name, group, monkeypatch):
    """Kills: a class on top of ours that ours is not found under; blocks that are plain once they are sharded."""
    from torch.distributed.device_mesh import init_device_mesh

    shard = pytest.importorskip("torch.distributed.fsdp").__dict__.get("fully_shard")
    if shard is None:
        pytest.skip("this torch has no fully_shard")
    model, other, x = pair(name)
    mesh = init_device_mesh("cpu", (1,))
    for part in (other.features.denseblock1, other.features.transition1, other.features.denseblock2, other):
        shard(part, mesh=mesh)
    calls = []
    run = adopt.run_found
    monkeypatch.setattr(adopt, "run_found", lambda *args: calls.append(args) or run(*args))
    outputs = [net(x) for net in (model, other)]
    torch.testing.assert_close(*outputs)
    assert len(calls) == 3
    for out in outputs:
        out.square().sum().backward()
    for (key, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=key)


# --- Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fused", "lean"])
def test_as_little_memory_as_the_librarys_own_model(mode):
    """Kills: transitions, stems, blocks that keep what the library's own do not."""
    shape = {"growth_rate": 8, "block_config": (4, 6, 4, 4), "num_init_features": 16, "num_classes": 5}
    theirs = make_efficient(torchvision(**shape), mode)
    own = DenseNet(**shape, small_inputs=False, efficient=mode)
    x = images(4, 3, 64, 64, dtype=torch.float32)
    kept, own_kept = (measure_step(net, x) for net in (theirs, own))
    assert kept.kept_bytes <= 1.03 * own_kept.kept_bytes
    assert kept.peak_bytes <= 1.03 * own_kept.peak_bytes


@pytest.mark.parametrize("name", ["timm", "MONAI 2-D", "gpleiss", "bamos"])
def test_kept_memory_grows_with_depth_and_not_its_square(name):
    """Doubling the layers of a block. Kills: concatenations that are kept."""
    kept = []
    for layers in (6, 12):
        if name == "timm":
            model = timm(block_config=(layers,)).features.denseblock1
        elif name == "MONAI 2-D":
            net = peer("monai.networks.nets").DenseNet(2, 3, 5, init_features=8, growth_rate=4, block_config=(layers,))
            model = net.features.denseblock1
        else:
            model = row(Functional, 8, layers)
        x = images(4, 8, 16, 16, dtype=torch.float32)
        kept.append(measure_step(make_efficient(model), x).kept_bytes)
    assert kept[1] < 2.2 * kept[0]


def test_the_library_is_imported_without_others():
    code = (
        "import sys, torch, efficient_densenet\n"
        "assert not {'torchvision', 'timm', 'monai', 'torch._dynamo'} & set(sys.modules) - set(sys.argv)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert "make_efficient" in efficient_densenet.__all__

"""DenseNet itself: shapes, keys, parameter counts, initialisation, errors; torchvision's model as outside oracle."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
import sys

import pytest
import torch
import torchvision
from torch import nn

import efficient_densenet
from efficient_densenet import DenseNet, densenet121, densenet264, densenet_bc
from efficient_densenet.models import MODES as ALL_MODES
from efficient_densenet.models import DenseBlock

from helpers import (
    MODES,
    TOY,
    assert_same,
    blocks,
    classification_loss,
    each_mode,
    gradients,
    images,
    layers,
    norms,
    toy,
    training_state,
)

PUBLISHED = ("densenet121", "densenet161", "densenet169", "densenet201")


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def on_meta(builder, *args, **kwargs):
    with torch.device("meta"):
        return builder(*args, **kwargs)


# --- state dicts ----------------------------------------------------------------------------------------------------


def published(state: dict) -> dict:
    """A state dict as in torchvision's files: the names of its first DenseNets, before batches were counted."""
    return {
        re.sub(r"(norm|conv)([12])\.", r"\1.\2.", key): value
        for key, value in state.items()
        if not key.endswith("num_batches_tracked")
    }


class Lightning(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net, self.loss = net, nn.CrossEntropyLoss()


CONTAINERS = {
    "model": (lambda model: model, ""),
    "DataParallel": (nn.DataParallel, "module."),
    "Sequential": (lambda model: nn.Sequential(nn.Identity(), model), "1."),
    "Lightning": (Lightning, "net."),
    "features": (lambda model: model.features, None),
    "layer": (lambda model: model.features.denseblock1.denselayer2, None),
    "copy": (copy.deepcopy, ""),
    "pickled": (lambda model: pickle.loads(pickle.dumps(model)), ""),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("mode", ["naive", "fused"])
def test_published_names_load_into_any_container(mode, container, assign):
    """Kills: names that one way of loading alone understands."""
    wrap, prefix = CONTAINERS[container]
    source, target = (toy(mode, seed=seed) for seed in (1, 2))
    if prefix is None:
        source, prefix = wrap(source), ""
    target = wrap(target)
    old = {prefix + key: value for key, value in published(source.state_dict()).items()}
    given = dict(old)
    found = target.load_state_dict(old, assign=assign)
    assert not found.missing_keys and not found.unexpected_keys and old.keys() == given.keys()
    assert_same({prefix + key: value for key, value in source.state_dict().items()}, target.state_dict(), 0)


def test_old_and_new_names_at_once_are_unexpected():
    """Kills: one of two tensors chosen in silence."""
    model = toy()
    with pytest.raises(RuntimeError, match='Unexpected.*"features.denseblock1.denselayer1.norm.1.weight"'):
        model.load_state_dict({**published(model.state_dict()), **model.state_dict()})


def test_what_does_not_fit_is_listed_in_short():
    """Kills: hundreds of keys in one error; another type of error, or of result, than torch's."""
    model = toy()
    state = model.state_dict()
    other = {f"backbone.{key}": value for key, value in state.items()}
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(other)
    message = str(caught.value)
    assert type(caught.value) is RuntimeError and message.startswith("Error(s) in loading state_dict for DenseNet:")
    for what, first in (("Missing", "features.conv0.weight"), ("Unexpected", "backbone.features.conv0.weight")):
        line = next(line for line in message.splitlines() if what in line)
        assert f'"{first}"' in line and line.count('"') == 10 and "more" in line
    missing = len([key for key in state if not key.endswith("num_batches_tracked")])
    assert f"and {missing - 5} more" in message and f"and {len(state) - 5} more" in message

    found = model.load_state_dict(other, strict=False)
    assert len(found.missing_keys) == missing and len(found.unexpected_keys) == len(state)
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch for features.denseblock1.*and \d+ more$") as caught:
        toy(growth_rate=5).load_state_dict(state)
    assert str(caught.value).count("size mismatch") == 5
    with pytest.raises(RuntimeError, match='(?s)Missing key.*: "classifier.bias".$'):
        model.load_state_dict({key: value for key, value in state.items() if key != "classifier.bias"})


# --- torchvision as oracle ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_order_and_shapes_are_torchvisions(name):
    """Kills: a key renamed, a module moved, a shape of another recipe."""
    ours = on_meta(getattr(efficient_densenet, name)).state_dict()
    theirs = on_meta(getattr(torchvision.models, name), weights=None).state_dict()
    assert [(key, value.shape, value.dtype) for key, value in ours.items()] == [
        (key, value.shape, value.dtype) for key, value in theirs.items()
    ]


def test_weights_from_a_file(tmp_path):
    """torchvision's published files have the names of its first DenseNets. Kills: names that are not translated."""
    file = tmp_path / "densenet121.pth"
    with pytest.raises(ValueError, match="there is no file '.*densenet121.pth'"):
        densenet121(weights=file)
    torch.manual_seed(0)
    state = torchvision.models.densenet121(weights=None, num_classes=3).state_dict()
    torch.save(published(state), file)
    assert_same(state, densenet121(weights=file, num_classes=3).state_dict(), tolerance=0)
    with pytest.raises(ValueError, match=r"classifier.weight has shape \(3, 1024\) instead of \(1000, 1024\)"):
        densenet121(weights=str(file))
    torch.save({"optimizer": {}}, file)
    with pytest.raises(ValueError, match="holds no weights"):
        densenet121(weights=file)
    file.write_bytes(b"no weights")
    with pytest.raises(ValueError, match="is damaged, or no file of torch.save"):
        densenet121(weights=file)


@pytest.fixture
def download(monkeypatch):
    """torchvision finds these weights of densenet121 where it would download them."""
    torch.manual_seed(0)
    state = torchvision.models.densenet121(weights=None).state_dict()
    weights = torchvision.models.DenseNet121_Weights
    monkeypatch.setattr(weights, "get_state_dict", lambda self, *args, **kwargs: published(state))
    return state


@pytest.mark.filterwarnings("error")
def test_weights_by_their_name(download):
    for name in ("DEFAULT", "IMAGENET1K_V1"):
        assert_same(download, densenet121(weights=name).state_dict(), tolerance=0)
    with pytest.raises(ValueError, match="'IMAGENET1K_V9' is neither a file nor a name of densenet121's weights, 'IMAG"):
        densenet121(weights="IMAGENET1K_V9")
    with pytest.raises(ValueError, match="weights='DEFAULT': nobody published weights of densenet264; give a file"):
        efficient_densenet.densenet264(weights="DEFAULT")


@pytest.mark.parametrize("in_channels", [1, 2, 5])
def test_weights_of_other_channels_and_classes_are_adapted_aloud(download, in_channels):
    """As timm does. Kills: a mean for a sum, a scale the other way round, silence."""
    with pytest.warns(UserWarning, match="weights='DEFAULT' of densenet121: conv0's kernels for 3 channels are ") as said:
        model = densenet121(weights="DEFAULT", in_channels=in_channels, num_classes=7)
    assert "the classifier of 1000 classes is left out, one of 7 begins anew" in str(said[0].message)
    kernel = download["features.conv0.weight"]
    adapted = {1: lambda: kernel.sum(1, keepdim=True), 2: lambda: kernel[:, :2] * 1.5,
               5: lambda: torch.cat([kernel, kernel[:, :2]], 1) * 0.6}[in_channels]()  # fmt: skip
    state = model.state_dict()
    assert torch.allclose(state.pop("features.conv0.weight"), adapted, rtol=1e-6)
    assert state["classifier.weight"].shape == (7, 1024) and not state["classifier.bias"].any()
    rest = {key: download[key] for key in state if key not in ("classifier.weight", "classifier.bias")}
    assert_same(rest, {key: state[key] for key in rest}, tolerance=0)
    with pytest.warns(UserWarning, match="the classifier of 1000 classes is left out$"):
        densenet121(weights="DEFAULT", num_classes=0)


def test_weights_that_cannot_be_downloaded_are_said(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(torchvision.models.DenseNet121_Weights, "get_state_dict", refuse)
    with pytest.raises(ValueError, match="weights='DEFAULT': cannot download https://.*no network; a file works too"):
        densenet121(weights="DEFAULT")
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(ImportError, match="weights='DEFAULT' are torchvision's: pip install torchvision, or give a file"):
        densenet121(weights="DEFAULT")


def test_densenet264_is_the_papers():
    """Blocks (6, 12, 64, 48), k = 32, as torchvision's class builds it."""
    theirs = on_meta(torchvision.models.DenseNet, 32, (6, 12, 64, 48), 64)
    assert list(on_meta(densenet264).state_dict()) == list(theirs.state_dict())
    assert parameters(on_meta(densenet264)) == parameters(theirs)


ORACLE = {"growth_rate": 4, "block_config": (2, 3, 2), "num_init_features": 8, "num_classes": 5}


def torchvisions(**overrides) -> nn.Module:
    """torchvision's model in our toy's shape, with values that are nowhere neutral."""
    torch.manual_seed(0)
    model = torchvision.models.DenseNet(**{**ORACLE, **overrides}).double()
    for norm in norms(model).values():
        with torch.no_grad():
            norm.weight.uniform_(-1.5, 1.5)
            norm.bias.normal_(0, 0.3)
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("mode", ["naive", *MODES])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("drop_rate", [0.0, 0.3])
def test_training_equals_torchvisions(mode, training, drop_rate):
    """Strict load, then outputs, gradients, statistics and weights over three steps, in every mode, the plain included.

    Kills: a fault shared by all our modes.
    """
    theirs = torchvisions(drop_rate=drop_rate).train(training)
    ours = DenseNet(**ORACLE, drop_rate=drop_rate, small_inputs=False, efficient=mode).double().train(training)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = images(3, 3, 40, 33)
    assert_same(training_state(theirs, x, steps=3), training_state(ours, x, steps=3))


def test_densenet121_gives_torchvisions_logits():
    """A strict load of the whole state dict, both ways. Kills: 121 layers wired another way than 7."""
    torch.manual_seed(0)
    theirs = torchvision.models.densenet121(weights=None).double().eval()
    ours = densenet121().double().eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = images(1, 3, 64, 64)
    with torch.no_grad():
        expected = theirs(x)
        assert_same({"logits": expected}, {"logits": ours(x)})
        ours.set_efficient(False)
        assert_same({"logits": expected}, {"logits": ours(x)})
    theirs.load_state_dict(ours.state_dict(), strict=True)


# --- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("builder", "arguments", "count"),
    [
        (densenet_bc, {"depth": 40, "growth_rate": 12}, 176_122),
        (densenet_bc, {"depth": 100, "growth_rate": 12}, 769_162),
        (densenet_bc, {"depth": 250, "growth_rate": 24}, 15_324_406),
        (densenet_bc, {"depth": 190, "growth_rate": 40}, 25_624_430),
        (efficient_densenet.densenet121, {}, 7_978_856),
        (efficient_densenet.densenet161, {}, 28_681_000),
        (efficient_densenet.densenet169, {}, 14_149_480),
        (efficient_densenet.densenet201, {}, 20_013_928),
    ],
    ids=["BC(40,12)", "BC(100,12)", "BC(250,24)", "BC(190,40)", "121", "161", "169", "201"],
)
def test_parameter_counts(builder, arguments, count):
    """The published ones. Kills: another stem, compression or bottleneck width."""
    assert parameters(on_meta(builder, **arguments)) == count


def test_defaults():
    """The interface's, by name and in order; ``densenet_bc()`` is BC(100, 12)."""
    signature = inspect.signature(DenseNet).parameters
    assert [(name, p.default) for name, p in signature.items()] == [
        ("growth_rate", 12), ("block_config", (16, 16, 16)), ("compression", 0.5), ("num_init_features", 24),
        ("bn_size", 4), ("drop_rate", 0.0), ("num_classes", 10), ("small_inputs", True), ("in_channels", 3),
        ("spatial_dims", 2), ("efficient", True),
    ]  # fmt: skip
    assert list(on_meta(densenet_bc).state_dict()) == list(on_meta(DenseNet).state_dict())
    assert parameters(on_meta(densenet_bc)) == parameters(on_meta(DenseNet)) == 769_162
    assert on_meta(densenet_bc).efficient == "auto"


@pytest.mark.parametrize("depth", [10, 16, 22, 40, 100])
def test_depth_counts_layers(depth):
    """Convolutions and the classifier on the longest path. Kills: blocks one layer short."""
    model = on_meta(densenet_bc, depth=depth, growth_rate=6)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) + 1 == depth
    assert model.features.conv0.out_channels == 12


def test_builders_take_every_argument():
    """Kills: keyword arguments that a builder swallows."""
    model = densenet_bc(
        depth=10, growth_rate=4, drop_rate=0.1, num_classes=3, in_channels=2, spatial_dims=1, small_inputs=False,
        compression=0.25, efficient="checkpoint",
    )  # fmt: skip
    assert model(torch.randn(2, 2, 64)).shape == (2, 3)
    assert model.efficient == "checkpoint"
    assert model.features.transition1.conv.out_channels == (8 + 4) // 4
    assert all(layer.drop_rate == 0.1 for layer in layers(model))
    assert on_meta(densenet121, num_classes=7, in_channels=1, drop_rate=0.2).classifier.out_features == 7


@pytest.mark.parametrize("spatial_dims", [1, 2, 3])
def test_spatial_dims(spatial_dims):
    """Modules of the right dimension, and no other, in both stems."""
    for small_inputs in (True, False):
        model = toy(spatial_dims=spatial_dims, small_inputs=small_inputs)
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spatial_dims - 1]
        kinds = {type(m) for m in model.modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d))}
        assert kinds == {convolution}
        assert model(images(2, 3, *[32] * spatial_dims)).shape == (2, 5)


def test_basic_layers():
    """``bn_size=None``: BN-ReLU-conv3x3 with keys ``norm1`` and ``conv1``."""
    model = toy(bn_size=None)
    layer = layers(model)[0]
    assert [name for name, _ in layer.named_parameters()] == ["norm1.weight", "norm1.bias", "conv1.weight"]
    assert layer.conv1.weight.shape == (4, 8, 3, 3)
    assert layer(images(2, 8, 6, 5)).shape == (2, 4, 6, 5)


def test_stems():
    """CIFAR: a 3x3 convolution at full resolution and nothing else; ImageNet: 7x7, BN, ReLU, max-pool, a quarter."""
    small, large = toy(), toy(small_inputs=False)
    assert list(dict(small.features.named_children()))[:2] == ["conv0", "denseblock1"]
    assert list(dict(large.features.named_children()))[:5] == ["conv0", "norm0", "relu0", "pool0", "denseblock1"]
    assert small.features.conv0(images(1, 3, 32, 32)).shape[2:] == (32, 32)
    assert large.features[:4](images(1, 3, 32, 32)).shape[2:] == (8, 8)


@pytest.mark.parametrize("compression", [1.0, 0.5, 0.3])
def test_compression_rounds_down(compression):
    """floor(theta m), arXiv:1608.06993 section 3."""
    model = toy(compression=compression, growth_rate=5)
    assert model.features.transition1.conv.out_channels == math.floor(compression * (8 + 2 * 5))


@each_mode
def test_features_head_and_classifier(mode):
    """``forward`` is the head of the features; features end in ReLU; no classifier gives them pooled."""
    model, x = toy(mode).eval(), images()
    features = model.forward_features(x)
    assert features.shape == (4, model.get_classifier().in_features, 4, 4) and (features >= 0).all()
    assert torch.equal(model.forward_head(features), model(x))
    assert model.get_classifier() is model.classifier and isinstance(model.classifier, nn.Linear)
    pooled = toy(mode, num_classes=0).eval()
    pooled.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("classifier")}, strict=True)
    assert torch.allclose(pooled(x), features.mean((2, 3)), rtol=0, atol=1e-12)
    assert torch.allclose(model(x), model.classifier(pooled(x)), rtol=0, atol=1e-12)


def test_reset_classifier():
    """Another number of classes, none, and back; type and device stay; it trains."""
    model = toy()
    model.reset_classifier(3)
    assert model(images()).shape == (4, 3) and model.classifier.weight.dtype == torch.float64
    assert not model.classifier.bias.any()
    classification_loss(model(images())).backward()
    assert model.classifier.weight.grad is not None
    model.reset_classifier(0)
    assert model(images()).shape[1] == model.num_features
    assert not [name for name in model.state_dict() if name.startswith("classifier")]
    model.reset_classifier(7)
    assert model(images()).shape == (4, 7) and model.get_classifier().out_features == 7


def test_initialisation():
    """The paper's recipe: convolutions normal with variance 2 / fan-out, norms 1 and 0, the classifier's bias 0.

    Kills: torch's default (uniform, a sixth of the variance), fan-in, a layer left out.
    """
    torch.manual_seed(0)
    model = DenseNet(growth_rate=32, block_config=(2, 2), num_init_features=64)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight
            expected = math.sqrt(2 / (module.out_channels * weight[0, 0].numel()))
            spread = 4 * expected / math.sqrt(2 * weight.numel())  # four standard errors
            assert abs(weight.std().item() - expected) < spread, name
            assert abs(weight.mean().item()) < 4 * expected / math.sqrt(weight.numel()), name
            outside = (weight.abs() > 2 * expected).double().mean().item()
            assert 0.03 < outside < 0.065, f"{name} is not normal"  # 4.6 % of a normal; 0 of a uniform distribution
        elif isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all() and not module.bias.any(), name
    assert not model.classifier.bias.any()
    assert model.classifier.weight.std() > 0


def test_same_seed_same_weights_in_every_mode():
    """Kills: a mode that draws other weights."""
    states = [toy(mode).state_dict() for mode in ALL_MODES]
    for state in states[1:]:
        assert list(state) == list(states[0])
        assert all(torch.equal(state[key], states[0][key]) for key in state)


@pytest.mark.parametrize("overrides", [{}, {"bn_size": None}, {"spatial_dims": 3}, {"num_classes": 0}])
def test_keys_are_the_same_in_every_mode(overrides):
    """Names, order, shapes and types of parameters and buffers."""
    expected = [(k, v.shape, v.dtype) for k, v in toy(**overrides).state_dict().items()]
    for mode in ALL_MODES:
        assert [(k, v.shape, v.dtype) for k, v in toy(mode, **overrides).state_dict().items()] == expected


# --- the mode in force ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "named"), [(False, "naive"), (True, "auto"), *((mode, mode) for mode in ALL_MODES)], ids=str
)
def test_mode_reads_as_asked(given, named):
    """By constructor and by ``set_efficient``; visible in ``print(model)`` and in the plan."""
    model = toy(given)
    other = toy("naive")
    assert other.set_efficient(given) is other
    for net in (model, other):
        assert net.efficient == named
        assert repr(named) in repr(net).split("\n", 3)[1] or repr(named) in repr(net)
        plan = net.execution_plan()
        assert [entry.block for entry in plan] == ["features.denseblock1", "features.denseblock2"]
        for entry in plan:
            assert entry.asked == named
            assert entry.runs == named or named == "auto" and entry.runs in MODES
            assert entry.runs in repr(net)


@each_mode
def test_plan_names_what_steps_aside_and_why(mode):
    """Block by block. Kills: a plan that says what was asked for, not what runs."""
    model = toy(mode, block_config=(2, 1, 2))
    model.features.denseblock2.denselayer1.norm1 = nn.GroupNorm(2, 8).double()
    first, second, third = model.execution_plan()
    assert first.runs == third.runs == mode and not first.reason and not third.reason
    assert "denselayer1" in second.reason and "GroupNorm" in second.reason
    assert second.reason in repr(model)


@each_mode
def test_a_block_whose_leaves_are_all_hooked_runs_plain(mode):
    """Tools that inspect a model see its parts and the plain graph; one hook less, and it is a hooked block as ever.

    Kills: a graph whose nodes are blocks under a tool that looks for layers.
    """
    model = toy(mode)
    leaves = [m for m in blocks(model)[0].modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d))]
    handles = [leaf.register_forward_hook(lambda module, args, output: None) for leaf in leaves]
    first, second = model.execution_plan()
    assert (first.runs, second.runs) == ("naive", mode)
    assert "hooks" in first.reason and first.reason in repr(model)
    handles.pop().remove()
    assert model.execution_plan()[0].runs == "checkpoint"
    for handle in handles:
        handle.remove()
    assert model.execution_plan()[0].runs == mode


@pytest.mark.parametrize(
    ("given", "named"), [(False, "naive"), (True, "auto"), *((mode, mode) for mode in ALL_MODES)], ids=str
)
def test_a_blocks_mode_takes_the_same_words(given, named):
    """Kills: ``block.efficient = False`` taken for a mode of its own, which then ran fused."""
    block = blocks(toy("checkpoint"))[0]
    block.efficient = given
    runs = "fused" if named == "auto" else named
    for copied in (block, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert copied.efficient == named
        assert (copied.plan().asked, copied.plan().runs) == (named, runs)
    x = images(2, 8, 4, 4).to(memory_format=torch.channels_last)
    assert isinstance(block(x).grad_fn, torch.autograd.function.BackwardCFunction) == (runs != "naive")


def test_blocks_pickled_with_a_plain_attribute():
    """The mode of blocks that older versions saved. Kills: a mode lost, as a property now hides it."""
    block = blocks(toy("naive"))[0]
    state = dict(block.__dict__)
    del state["_efficient"]
    old = DenseBlock.__new__(DenseBlock)
    old.__setstate__({**state, "efficient": "lean"})
    assert old.efficient == "lean" and "efficient" not in old.__dict__


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("growth_rate", 0), ("growth_rate", -4), ("growth_rate", 2.5), ("growth_rate", "12"), ("growth_rate", True),
        ("block_config", ()), ("block_config", (2, 0)), ("block_config", (2, -1)), ("block_config", 4),
        ("block_config", (2, 1.5)), ("block_config", "deep"), ("block_config", None),
        ("compression", 0), ("compression", 1.5), ("compression", -0.5), ("compression", 0.01), ("compression", "half"),
        ("compression", float("nan")),
        ("num_init_features", 0), ("num_init_features", 8.0),
        ("bn_size", 0), ("bn_size", -1), ("bn_size", 1.5),
        ("drop_rate", -0.1), ("drop_rate", 1.0), ("drop_rate", 1.5), ("drop_rate", float("nan")), ("drop_rate", None),
        ("num_classes", -1), ("num_classes", 2.5), ("num_classes", None),
        ("in_channels", 0), ("in_channels", 1.5),
        ("spatial_dims", 0), ("spatial_dims", 4), ("spatial_dims", "2"),
        ("efficient", "fast"), ("efficient", 3), ("efficient", None), ("efficient", ["checkpoint"]),
    ],
    ids=lambda value: repr(value),
)  # fmt: skip
def test_constructor_errors(name, value):
    """One clear line that names the argument and the value."""
    with pytest.raises((ValueError, TypeError)) as caught:
        DenseNet(**{**TOY, name: value})
    message = str(caught.value)
    assert name in message and "\n" not in message
    parts = value if isinstance(value, (tuple, str)) else ()
    assert value == () or any(repr(part) in message for part in (value, *parts))


def test_unknown_arguments():
    """As Python does. Kills: ``**kwargs`` that swallow a misspelt argument."""
    for builder in (DenseNet, densenet_bc, densenet121):
        with pytest.raises(TypeError, match="grow_rate"):
            builder(grow_rate=12)


@pytest.mark.parametrize("mode", ["fast", "lena", "Checkpoint", None, 2, "", []])
def test_unknown_modes(mode):
    """The line lists the modes there are; the model stays as it was."""
    model = toy("checkpoint")
    with pytest.raises((ValueError, TypeError), match="efficient") as caught:
        model.set_efficient(mode)
    assert all(repr(known) in str(caught.value) for known in ALL_MODES)
    assert repr(mode) in str(caught.value)
    assert model.efficient == "checkpoint"
    block = blocks(model)[0]
    with pytest.raises((ValueError, TypeError), match="efficient") as caught:
        block.efficient = mode
    assert all(repr(known) in str(caught.value) for known in ALL_MODES)
    assert repr(mode) in str(caught.value)
    assert block.efficient == "checkpoint"


@pytest.mark.parametrize(
    ("depth", "nearest"),
    [(25, ("22", "28")), (41, ("40", "46")), (99, ("94", "100")), (12, ("10", "16")), (39.5, ("34", "40"))],
)
def test_depths_that_do_not_exist(depth, nearest):
    """Kills: 25 rounded down to 22 in silence."""
    with pytest.raises(ValueError, match="depth") as caught:
        densenet_bc(depth=depth)
    assert str(depth) in str(caught.value) and "\n" not in str(caught.value)
    assert all(depth in str(caught.value) for depth in nearest)


@pytest.mark.parametrize("depth", [4, 7, 0, -10, 9, "100", None, True, float("nan"), float("inf")], ids=repr)
def test_depths_below_the_least(depth):
    with pytest.raises((ValueError, TypeError), match="depth") as caught:
        densenet_bc(depth=depth)
    assert "10" in str(caught.value) and repr(depth) in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "least"),
    [
        ({"block_config": (1, 2, 1)}, 4),
        ({"block_config": (2,)}, 1),
        ({"block_config": (1, 1, 1, 1)}, 8),
        ({"small_inputs": False, "block_config": (1, 1, 1, 1)}, 29),
        ({"small_inputs": False, "block_config": (1,)}, 1),
        ({"small_inputs": False, "block_config": (1, 1)}, 5),
        ({"spatial_dims": 3, "block_config": (1, 1)}, 2),
        ({"spatial_dims": 1, "small_inputs": False, "block_config": (1, 1, 1)}, 13),
    ],
)
@pytest.mark.parametrize("mode", ["naive", *MODES])
def test_least_size(overrides, least, mode):
    """The least size works, one less is a line that says the least. Kills: "output size too small" from inside."""
    model = toy(mode, **overrides).eval()
    dims = overrides.get("spatial_dims", 2)
    assert model(images(2, 3, *[least] * dims)).shape == (2, 5)
    if least > 1:
        wide = (least + 3,) * (dims - 1)
        for small in {(least - 1,) * dims, (*wide, least - 1), (least - 1, *wide)}:
            with pytest.raises(ValueError, match=rf"\b{least}\b") as caught:
                model(images(2, 3, *small))
            assert "\n" not in str(caught.value) and str(small[-1]) in str(caught.value)


@each_mode
@pytest.mark.parametrize("size", range(29, 37))
def test_every_size_that_works(mode, size):
    """ImageNet's stem, square and not, against torchvision."""
    theirs = torchvisions(block_config=(1, 1, 1, 1)).eval()
    ours = DenseNet(**{**ORACLE, "block_config": (1, 1, 1, 1)}, small_inputs=False, efficient=mode).double().eval()
    ours.load_state_dict(theirs.state_dict())
    for shape in ((size, size), (size, 70 - size)):
        x = images(1, 3, *shape)
        states = []
        for net in (theirs, ours):
            net.zero_grad()
            output = net(x)
            classification_loss(output).backward()
            states.append({"output": output, **gradients(net)})
        assert_same(*states)


@pytest.mark.parametrize("mode", ["naive", *MODES])
def test_wrong_inputs(mode):
    """Too few dimensions, another number of channels: a line that says the shape expected and the one received."""
    for shape in ((3, 16, 16), (4, 1, 16, 16), (4, 3, 16), (4, 3, 16, 16, 16)):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            toy(mode)(images(*shape))
        assert "\n" not in str(caught.value) and str(shape[1]) in str(caught.value)


@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_empty_batch(mode, training):
    """What the plain path does with no image at all, and no crash."""
    outcomes = []
    for net in (toy(), toy(mode)):
        try:
            outcomes.append(net.train(training)(images()[:0]).shape)
        except (ValueError, RuntimeError) as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]

"""Every efficient mode against the plain path: the same numbers for all shapes, layouts, precisions, sets of gradients.

Each test names the mutation it kills.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import random

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from efficient_densenet.ops.device import assume, describe

from helpers import (
    MODES,
    assert_as_accurate,
    assert_same,
    assert_trains_like,
    buffers,
    classification_loss,
    each_mode,
    evaluation,
    gradients,
    images,
    layers,
    linear_loss,
    norms,
    toy,
    training_state,
    twin,
)

SHAPES = {
    "cifar": ({"block_config": (2, 2, 2)}, (4, 3, 16, 16)),
    "small": ({}, (4, 3, 8, 8)),
    "two_blocks": ({"block_config": (3, 2)}, (2, 3, 32, 32)),
    "twelve_layers_dropout": ({"block_config": (12,), "drop_rate": 0.2}, (4, 3, 8, 8)),
    "dropout": ({"drop_rate": 0.3}, (4, 3, 8, 8)),
    "no_bottleneck": ({"bn_size": None}, (4, 3, 8, 8)),
    "no_bottleneck_dropout": ({"bn_size": None, "drop_rate": 0.3}, (4, 3, 8, 8)),
    "imagenet_stem": ({"small_inputs": False, "block_config": (2, 2, 2)}, (3, 3, 33, 40)),
    "imagenet_stem_1d": ({"small_inputs": False, "spatial_dims": 1, "in_channels": 2}, (4, 2, 61)),
    "imagenet_stem_3d": ({"small_inputs": False, "spatial_dims": 3, "in_channels": 1}, (2, 1, 17, 16, 18)),
    "1d": ({"spatial_dims": 1}, (4, 3, 33)),
    "1d_dropout": ({"spatial_dims": 1, "drop_rate": 0.2}, (4, 3, 16)),
    "3d": ({"spatial_dims": 3}, (2, 3, 8, 7, 9)),
    "3d_one_block": ({"spatial_dims": 3, "block_config": (3,)}, (2, 3, 4, 5, 6)),
    "3d_no_bottleneck": ({"spatial_dims": 3, "bn_size": None, "block_config": (2, 2)}, (2, 3, 4, 6, 5)),
    "odd_sizes": ({}, (3, 3, 17, 13)),
    "one_column": ({"block_config": (3,)}, (4, 3, 9, 1)),
    "least_size": ({"block_config": (2, 1, 2)}, (6, 3, 4, 4)),
    "gray_images": ({"in_channels": 1}, (4, 1, 8, 8)),
    "no_compression": ({"compression": 1.0}, (4, 3, 8, 8)),
    "strong_compression": ({"compression": 0.3}, (4, 3, 8, 8)),
    "odd_channels": ({"growth_rate": 5, "bn_size": 3, "num_init_features": 7}, (4, 3, 8, 8)),
    "growth_of_one": ({"growth_rate": 1, "bn_size": 1, "num_init_features": 1}, (4, 3, 8, 8)),
    "one_layer_blocks": ({"block_config": (1, 1)}, (4, 3, 8, 8)),
    "one_image": ({}, (1, 3, 8, 8)),
    "no_classifier": ({"num_classes": 0}, (4, 3, 8, 8)),
    "one_class": ({"num_classes": 1}, (4, 3, 8, 8)),
    "many_rows": ({"block_config": (2, 2)}, (5, 3, 64, 32)),
}
each_shape = pytest.mark.parametrize("shape", SHAPES)


@functools.lru_cache(maxsize=None)
def plain_state(shape: str, training: bool, steps: int) -> dict:
    """What the plain path does; the same for every mode."""
    overrides, size = SHAPES[shape]
    return training_state(toy(**overrides).train(training), images(*size), steps=steps)


@each_mode
@each_shape
def test_three_steps_equal_the_plain_path(mode, shape):
    """Kills: a missing or wrong gradient, statistics moved twice, dropout drawn anew, a buffer's old content."""
    overrides, size = SHAPES[shape]
    assert_same(plain_state(shape, True, 3), training_state(toy(mode, **overrides), images(*size), steps=3))


@each_mode
@each_shape
def test_eval_with_gradients_equals_the_plain_path(mode, shape):
    """Kills: batch statistics used in eval, running statistics moved in eval, batch terms in the eval backward."""
    overrides, size = SHAPES[shape]
    model = toy(mode, **overrides).eval()
    before = buffers(model)
    assert_same(plain_state(shape, False, 1), training_state(model, images(*size)))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


@each_mode
@pytest.mark.parametrize("input_grad", [True, False], ids=["input_grad", "plain_input"])
def test_images_with_and_without_gradients(mode, input_grad):
    """Kills: a first layer that learns nothing because the images, its only input, need no gradient."""
    model = toy(block_config=(3, 2))
    assert_trains_like(model, twin(model, mode), images(), steps=3, input_grad=input_grad)


@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_forward_without_gradients(mode, training, context):
    """Kills: another path's numbers without gradients; statistics moved only by the backward's recomputation."""
    model = toy(drop_rate=0.2).train(training)
    other = twin(model, mode)
    found = []
    for net in (model, other):
        torch.manual_seed(3)
        with context():
            output = net(images())
        assert not output.requires_grad
        found.append({"output": output.clone(), **dict(net.named_buffers())})
    assert_same(*found)


@each_mode
def test_training_goes_on_after_inference_mode(mode):
    """A buffer kept from inference would be an inference tensor that autograd refuses."""
    model = toy()
    other = twin(model, mode)
    for net in (model, other):
        with evaluation(net), torch.inference_mode():
            net(images(8, 3, 8, 8))
    assert_trains_like(model, other, images())


def in_bfloat16(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def norms_in_float32(model: nn.Module) -> None:
    model.bfloat16()
    for norm in norms(model).values():
        norm.float()


# How a float32 toy is put into its precision, and how it is called.
PRECISIONS = {
    "float32": (lambda model: None, None),
    "bfloat16": (lambda model: model.bfloat16(), None),
    "bfloat16_eval": (lambda model: model.bfloat16().eval(), None),
    "bfloat16_float32_norms": (norms_in_float32, None),
    "autocast": (lambda model: None, in_bfloat16),
    "autocast_eval": (lambda model: model.eval(), in_bfloat16),
}


def low_precision_toy(mode: str, shape: str, precision: str, seed: int) -> tuple[nn.Module, torch.Tensor]:
    overrides, size = SHAPES[shape]
    model = toy(mode, dtype=torch.float32, seed=seed, **overrides)
    PRECISIONS[precision][0](model)
    return model, images(*size, seed=20 + seed).to(model.features.conv0.weight.dtype)


@functools.lru_cache(maxsize=None)
def exact_and_plain(shape: str, precision: str, seed: int) -> tuple[dict, dict]:
    """The same draw in float64 and by the plain path; the same for every mode."""
    model, x = low_precision_toy("naive", shape, precision, seed)
    exact = training_state(copy.deepcopy(model).double(), x.double(), loss=linear_loss)
    return exact, training_state(model, x, forward=PRECISIONS[precision][1], loss=linear_loss)


@each_mode
@pytest.mark.parametrize("shape", ["small", "no_bottleneck", "3d", "imagenet_stem", "dropout"])
def test_float32_over_three_steps(mode, shape):
    """Kills: float32 that drifts from the plain path by more than summation order explains."""
    overrides, size = SHAPES[shape]
    model = toy(dtype=torch.float32, **overrides)
    assert_trains_like(model, twin(model, mode), images(*size).float(), tolerance=1e-3, steps=3)


@each_mode
@pytest.mark.parametrize(
    ("precision", "shape"),
    [
        *((precision, "small") for precision in PRECISIONS),
        *((precision, "no_bottleneck") for precision in ("float32", "bfloat16", "bfloat16_eval", "autocast")),
        *((p, "imagenet_stem") for p in ("bfloat16", "bfloat16_float32_norms", "autocast", "autocast_eval")),
        ("autocast", "1d"),
        ("bfloat16", "3d_one_block"),
    ],
)
def test_low_precision(mode, precision, shape):
    """No less exact than the plain path; in float32 torch's own norms sum in float64 on a CPU, so there about as exact.

    Kills: sums or statistics taken in bfloat16, one more rounding of the features, a recomputation outside the caller's
    autocast, one type assumed for all parameters, cancellation.
    """
    draws = []
    for seed in range(3):
        model, x = low_precision_toy(mode, shape, precision, seed)
        actual = training_state(model, x, forward=PRECISIONS[precision][1], loss=linear_loss)
        draws.append((*exact_and_plain(shape, precision, seed), actual))
    assert_as_accurate(*draws, factor=4 if precision == "float32" else 2)


@each_mode
def test_autocast_round_the_whole_step(mode):
    """Kills: operations of the backward that are cast because the caller's autocast is still on."""
    model = toy(dtype=torch.float32)
    states = []
    for outside in (True, False):
        net = twin(model, mode)
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            loss = linear_loss(in_bfloat16(net, images().float()))
            loss.backward()
        states.append(gradients(net))
    assert_same(*states, tolerance=1e-6)


@each_mode
def test_autocast_switched_off_inside(mode):
    """For the model alone, inside a caller's autocast. Kills: the type taken from an outer context."""

    def switched_off(model, x):
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            return model(x)

    model = toy(dtype=torch.float32)
    assert_trains_like(model, twin(model, mode), images().float(), tolerance=1e-4, forward=switched_off)


@each_mode
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", ["denseblock1", "transition1", "block and transition"])
def test_parts_alone_under_autocast(mode, part, given):
    """Given features of autocast's type or another. Kills: features rounded that the plain model keeps as they are."""
    model = toy(dtype=torch.float32)
    found = []
    for net in (model, twin(model, mode)):
        block, transition = net.features.denseblock1, net.features.transition1
        parts = {"denseblock1": block, "transition1": transition, "block and transition": nn.Sequential(block, transition)}
        x = images(4, 16 if part == "transition1" else 8, 8, 8).to(given).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = parts[part](x)
        out.float().square().sum().backward()
        found.append((out.detach(), x.grad))
    (want, want_grad), (got, got_grad) = found
    assert (got.dtype, got_grad.dtype) == (want.dtype, want_grad.dtype)
    if part == "denseblock1":
        assert torch.equal(got[:, :8], want[:, :8])
    for expected, actual in ((want, got), (want_grad, got_grad)):
        assert (expected - actual).float().norm() <= 0.02 * expected.float().norm()


LAYOUTS = {
    "channels_last": lambda: images().to(memory_format=torch.channels_last),
    "every_other_pixel": lambda: images(4, 3, 16, 16)[:, :, ::2, ::2],
    "transposed": lambda: images(4, 3, 8, 12).transpose(2, 3),
    "some_channels": lambda: images(4, 7, 8, 8)[:, 2:5],
    "flipped_batch": lambda: images(8, 3, 8, 4).movedim(0, -1).movedim(2, 0),
    "expanded_batch": lambda: images(1, 3, 8, 8).expand(4, -1, -1, -1),
    "expanded_pixels": lambda: images(4, 3, 1, 8).expand(-1, -1, 8, -1),
    "offset": lambda: images(5, 3, 8, 8)[1:],
}


@each_mode
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weights", ["contiguous_weights", "channels_last_weights"])
def test_layouts(mode, layout, weights):
    """Kills: a view taken of memory that is not laid out as assumed."""
    model = toy()
    if weights == "channels_last_weights":
        model.to(memory_format=torch.channels_last)
    assert_trains_like(model, twin(model, mode), LAYOUTS[layout]())


@each_mode
@pytest.mark.parametrize("shape", ["small", "no_bottleneck_dropout", "3d", "imagenet_stem", "dropout"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("unfolds", [True, False], ids=["unfolding", "convolving"])
def test_tiles_of_any_size(mode, shape, training, unfolds):
    """One image or a few rows at a time, with a shorter last tile, and both ways to the 3x3 weights' gradients.

    Kills: a sum or a correction of one tile only.
    """
    overrides, size = SHAPES[shape]
    machine = dataclasses.replace(
        describe(torch.device("cpu")), tile_bytes=3000, unfolded_bytes=2000, unfolds=unfolds
    )
    with assume(machine):
        state = training_state(toy(mode, **overrides).train(training), images(*size), steps=3 if training else 1)
    assert_same(plain_state(shape, training, 3 if training else 1), state)


@each_mode
def test_blocks_take_inputs_of_any_layout(mode):
    """The block itself, fed with a view, an expanded tensor and a plain tensor; the gradient expanded as by sum()."""
    model = toy()
    inputs = {
        "view": images(4, 16, 8, 8)[:, 4:12],
        "expanded": images(1, 8, 1, 8).expand(4, -1, 8, -1),
        "channels_last": images(4, 8, 8, 8).to(memory_format=torch.channels_last),
    }
    for x in inputs.values():
        for input_grad in (True, False):
            states = []
            for net in (twin(model, "naive"), twin(model, mode)):
                block = net.features.denseblock1
                states.append(training_state(block, x, input_grad=input_grad, loss=torch.Tensor.sum))
            assert_same(*states)


@each_mode
@pytest.mark.parametrize("spatial_dims", [1, 2, 3])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_ties_in_the_stems_pooling(mode, spatial_dims, training):
    """Flat images, as scans have them: the first of equal values gets the gradient. Kills: another one, or all."""
    model = toy(small_inputs=False, spatial_dims=spatial_dims, block_config=(1, 1)).train(training)
    x = images(3, 3, *[18] * spatial_dims).round()
    x[..., 5:] = 1.0
    assert_trains_like(model, twin(model, mode), x)


@each_mode
def test_channels_last_stays(mode):
    """Kills: features that fall back to the contiguous layout, which costs a copy before every convolution."""
    model = toy(mode, dtype=torch.float32).to(memory_format=torch.channels_last)
    features = model.forward_features(images().float().to(memory_format=torch.channels_last))
    assert features.is_contiguous(memory_format=torch.channels_last)


@each_mode
def test_the_input_is_left_alone(mode):
    """Kills: an in-place rectifier or a statistics pass that writes into what the caller owns."""
    model = toy(mode, block_config=(12,), drop_rate=0.2)
    block, x = model.features.denseblock1, images(4, 8, 8, 8).requires_grad_()
    before = x.detach().clone()
    block(x).square().sum().backward()
    assert torch.equal(x.detach(), before)


@each_mode
def test_the_incoming_gradient_is_left_alone(mode):
    """It may be expanded or used by another branch. Kills: adding into the tensor that autograd handed in."""
    model = toy(mode)
    x = images(4, 8, 8, 8).requires_grad_()
    y = model.features.denseblock1(x)
    shared = images(*y.shape, seed=2)
    before = shared.clone()
    torch.autograd.backward(y, shared)
    assert torch.equal(shared, before)


@each_mode
@pytest.mark.parametrize("drop_rate", [0.0, 0.3])
def test_the_generator_ends_where_the_plain_path_leaves_it(mode, drop_rate):
    """Kills: random numbers drawn a second time, or a generator set back."""
    model = toy(drop_rate=drop_rate)
    found = []
    for net in (model, twin(model, mode)):
        torch.manual_seed(5)
        loss = classification_loss(net(images()))
        after_forward = torch.get_rng_state()
        loss.backward()
        found.append((after_forward, torch.get_rng_state()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@each_mode
def test_draws_between_forward_and_backward_do_not_matter(mode):
    """Kills: masks rebuilt from wherever the generator happens to stand."""
    model = toy(drop_rate=0.3)
    states = []
    for net in (model, twin(model, mode)):
        torch.manual_seed(5)
        loss = classification_loss(net(images()))
        torch.rand(17)
        loss.backward()
        states.append({**gradients(net), "next": torch.rand(3, dtype=torch.float64)})
    assert_same(*states)


# --- frozen parts ---------------------------------------------------------------------------------------------------

FROZEN = {
    "nothing": lambda name: False,
    "stem": lambda name: name.startswith(("features.conv0", "features.norm0")),
    "first_block": lambda name: "denseblock1." in name,
    "stem_and_first_block": lambda name: name.startswith(("features.conv0", "features.norm0", "features.denseblock1")),
    "middle_block": lambda name: "denseblock2." in name,
    "all_blocks": lambda name: "denseblock" in name,
    "first_layer": lambda name: "denselayer1." in name,
    "last_layer": lambda name: "denselayer2." in name,
    "all_but_last_layer": lambda name: "denselayer2." not in name,
    "norms": lambda name: "norm" in name,
    "norm1": lambda name: ".norm1." in name,
    "norm2": lambda name: ".norm2." in name,
    "gammas": lambda name: "norm" in name and name.endswith("weight"),
    "betas": lambda name: name.endswith("bias"),
    "convolutions": lambda name: "conv" in name,
    "conv1": lambda name: ".conv1." in name,
    "conv2": lambda name: ".conv2." in name,
    "conv1_and_norm2": lambda name: ".conv1." in name or ".norm2." in name,
    "all_but_norm1": lambda name: ".norm1." not in name,
    "all_but_conv1": lambda name: ".conv1." not in name,
    "all_but_one_beta": lambda name: name != "features.denseblock1.denselayer2.norm1.bias",
    "all_but_one_gamma": lambda name: name != "features.denseblock2.denselayer1.norm2.weight",
    "transitions": lambda name: "transition" in name,
    "all_but_classifier": lambda name: not name.startswith("classifier"),
    "everything": lambda name: True,
    **{f"random_{seed}": (lambda name, seed=seed: random.Random(f"{seed} {name}").random() < 0.5) for seed in range(3)},
}


def frozen(part: str, mode: str) -> nn.Module:
    model = toy(mode, drop_rate=0.2 if part.startswith("random") else 0.0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[part](name))
    return model


@functools.lru_cache(maxsize=None)
def frozen_state(part: str, training: bool, input_grad: bool) -> dict:
    """What the plain path does; the same for every mode."""
    return training_state(frozen(part, "naive").train(training), images(4, 3, 6, 6), input_grad=input_grad)


@each_mode
@pytest.mark.parametrize("part", FROZEN)
def test_frozen_parts(mode, part):
    """Gradients that nobody asked for stay None, all others are the plain path's, with images that ask or do not.

    Kills: layers skipped because their input needs no gradient, gradients computed or lost by a wrong mask.
    """
    for training, input_grad in ((True, False), (False, True)):
        found = training_state(frozen(part, mode).train(training), images(4, 3, 6, 6), input_grad=input_grad)
        assert_same(frozen_state(part, training, input_grad), found)


@each_mode
def test_frozen_basic_layers(mode):
    """The same without bottleneck, where one convolution reads the block's features."""
    for kept in ("norm1.weight", "norm1.bias", "conv1.weight", "denselayer2", "denseblock1.denselayer1"):
        model = toy(bn_size=None)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(kept in name or name.startswith("classifier"))
        assert_trains_like(model, twin(model, mode), images(), input_grad=False)


@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_frozen_imagenet_stem(mode, training):
    """The same for the strided stem, its norm and its pooling. Kills: a stem that wants a gradient for its input."""
    for kept in ("conv0", "norm0.weight", "norm0.bias", "denselayer1.norm1.bias", "classifier"):
        for input_grad in (False, True):
            model = toy(small_inputs=False, block_config=(1, 1)).train(training)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(kept in name)
            assert_trains_like(model, twin(model, mode), images(3, 3, 16, 16), input_grad=input_grad)


@each_mode
def test_parts_frozen_and_thawed_between_steps(mode):
    """Kills: a decision about gradients made once and kept."""
    model = toy()
    other = twin(model, mode)
    for part in ("norms", "everything", "first_block", "nothing"):
        for net in (model, other):
            for name, parameter in net.named_parameters():
                parameter.requires_grad_(not FROZEN[part](name))
        assert_trains_like(model, other, images(), input_grad=False)


@each_mode
def test_no_graph_where_nothing_is_asked_for(mode):
    """Kills: a graph, and memory, kept for a model that is frozen altogether."""
    model = toy(mode).requires_grad_(False)
    assert not model(images()).requires_grad


# --- switching ------------------------------------------------------------------------------------------------------


@each_mode
def test_switching_back_and_forth(mode):
    """Kills: state of a mode left behind on the modules."""
    model = toy()
    other = twin(model, mode)
    for step in range(4):
        other.set_efficient(mode if step % 2 else False)
        assert_trains_like(model, other, images())


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
def test_switching_between_forward_and_backward(first, second):
    """Kills: a backward that asks the module, not its own graph, how the forward was done."""
    model = toy()
    other = twin(model, first)
    states = []
    for net in (model, other):
        loss = classification_loss(net(images()))
        if net is other:
            net.set_efficient(second)
        loss.backward()
        states.append(gradients(net))
    assert_same(*states)


@each_mode
@pytest.mark.parametrize("forward_training", [True, False], ids=["train", "eval"])
def test_train_and_eval_between_forward_and_backward(mode, forward_training):
    """Kills: a recomputation that normalises with whatever the module says at the time of the backward."""
    model = toy(drop_rate=0.2).train(forward_training)
    states = []
    for net in (model, twin(model, mode)):
        torch.manual_seed(2)
        loss = classification_loss(net(images()))
        net.train(not forward_training)
        loss.backward()
        states.append({**gradients(net), **dict(net.named_buffers())})
    assert_same(*states)


@each_mode
def test_growing_and_shrinking_batches(mode):
    """Kills: storage kept from an earlier batch of another size, type or resolution."""
    model = toy()
    other = twin(model, mode)
    for size in ((2, 3, 8, 8), (6, 3, 8, 8), (3, 3, 12, 4), (2, 3, 8, 8)):
        assert_trains_like(model, other, images(*size))
    model.float(), other.float()
    assert_trains_like(model, other, images().float(), tolerance=1e-3)


# --- checkpoint: how it is done -------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Counts the operators that run, by name without overload; concatenations only where they join feature maps.

    ``applied`` counts how often weights of given shapes are applied forward, as convolutions or, 1x1, as products.
    """

    def __init__(self, weights: tuple[torch.Size, ...] = ()):
        super().__init__()
        self.counts: dict[str, int] = {}
        self.weights = {*map(tuple, weights), *((w[1], w[0]) for w in weights if max(w[2:]) == 1)}
        self.applied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("cat", "stack") and args[0][0].dim() < 3:
            name += " of vectors"
        self.counts[name] = self.counts.get(name, 0) + 1
        if any(word in name for word in ("convolution", "mm", "linear")) and "backward" not in name:
            self.applied += any(isinstance(a, torch.Tensor) and tuple(a.shape) in self.weights for a in args[1:])
        return func(*args, **(kwargs or {}))

    def __getitem__(self, name: str) -> int:
        return self.counts.get(name, 0)


def operators(model: nn.Module, x: torch.Tensor, weights=()) -> tuple[Operators, Operators]:
    """What runs in the forward and in the backward of a training step."""
    with Operators(weights) as forward:
        loss = classification_loss(model(x))
    with Operators(weights) as backward:
        loss.backward()
    return forward, backward


@pytest.mark.parametrize("shape", ["cifar", "no_bottleneck", "dropout", "3d"])
def test_checkpoint_concatenates_nothing(shape):
    """Neither in the forward nor in the backward nor in the recomputation. Kills: a concatenation in any of them."""
    overrides, size = SHAPES[shape]
    for counted in operators(toy("checkpoint", **overrides), images(*size)):
        assert counted["cat"] == counted["stack"] == 0
    assert operators(toy("naive", **overrides), images(*size))[0]["cat"] > 0  # the counter sees them


@pytest.mark.parametrize("spatial_dims", [1, 2, 3])
@pytest.mark.parametrize(
    ("mode", "convolution", "bn_size"),
    [("checkpoint", "conv1", None), ("checkpoint", "conv2", 4), *((mode, "conv1", 4) for mode in MODES)],
)
def test_no_convolution_runs_again(mode, convolution, bn_size, spatial_dims):
    """But conv1 under "lean". Kills: a recomputation that includes a convolution; a lean mode that keeps everything.

    One block of widths that no gradient's product shares, so that a forward application shows by its shapes.
    """
    model = toy(
        mode, growth_rate=12, num_init_features=23, block_config=(2,), bn_size=bn_size, spatial_dims=spatial_dims
    )
    shapes = tuple(getattr(layer, convolution).weight.shape for layer in layers(model))
    forward, backward = operators(model, images(4, 3, *[6] * spatial_dims), shapes)
    assert forward.applied >= len(shapes), "the counter does not see a forward application"
    assert (backward.applied > 0) == (mode == "lean")


@each_mode
def test_no_generator_state_is_saved_where_nothing_is_random(mode, monkeypatch):
    """Kills: ``preserve_rng_state`` left on, a fixed cost for every layer."""

    def refuse(*args, **kwargs):
        raise AssertionError("the generator's state was asked for")

    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch, name, refuse)
        monkeypatch.setattr(torch.random, name, refuse)
    classification_loss(toy(mode)(images())).backward()

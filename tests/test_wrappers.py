"""Every efficient mode inside everything people wrap a model in: autograd, functional calls, compilers, hooks, surgery.

Each test names the mutation it kills.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from torchvision.models.feature_extraction import create_feature_extractor

from efficient_densenet import DenseNet
from efficient_densenet.models import DenseBlock

from helpers import (
    MODES,
    TOY,
    assert_as_accurate,
    assert_same,
    assert_trains_like,
    blocks,
    buffers,
    classification_loss,
    compiled_state,
    each_mode,
    evaluation,
    gradients,
    images,
    layers,
    linear_loss,
    toy,
    training_state,
    twin,
)


# torch deprecates its jit, and still loads its forward-mode derivatives through it.
uses_jit = pytest.mark.filterwarnings("ignore:.*torch.jit.*")


def compare(run, mode: str, tolerance: float = 1e-10, **overrides) -> None:
    """``run(model)`` returns entries to compare; gradients and buffers join them."""
    model = toy(**overrides)
    states = []
    for net in (model, twin(model, mode)):
        torch.manual_seed(0)
        found = run(net) or {}
        states.append({**found, **gradients(net), **buffers(net)})
    assert_same(*states, tolerance=tolerance)


# --- autograd -------------------------------------------------------------------------------------------------------


@each_mode
def test_autograd_grad(mode):
    """For the input, for all parameters, for a few of them. Kills: gradients that only ``backward`` delivers."""

    def run(model):
        x = images().requires_grad_()
        loss = classification_loss(model(x))
        names, parameters = zip(*model.named_parameters())
        found = dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=True)))
        found["x"] = torch.autograd.grad(loss, x, retain_graph=True)[0]
        for name in ("features.denseblock1.denselayer2.conv1.weight", "features.denseblock2.denselayer1.norm1.bias"):
            found[f"alone {name}"] = torch.autograd.grad(loss, model.get_parameter(name), retain_graph=True)[0]
        found["features"] = torch.autograd.grad(loss, model.features.conv0.weight)[0]
        return found

    compare(run, mode)


@each_mode
@pytest.mark.parametrize(
    "listed",
    [
        ["features.conv0.weight"],
        ["features.denseblock2.denselayer1.norm1.weight", "classifier.bias"],
        ["features.denseblock1.denselayer1.conv2.weight", "features.denseblock2.denselayer2.norm2.bias"],
    ],
    ids=["stem", "norm1_and_classifier", "inside_two_blocks"],
)
def test_backward_with_inputs(mode, listed):
    """Only what is listed gets a gradient. Kills: gradients accumulated behind autograd's back."""

    def run(model):
        classification_loss(model(images())).backward(inputs=[model.get_parameter(name) for name in listed])
        assert [name for name, p in model.named_parameters() if p.grad is not None] == listed or len(listed) > 1

    compare(run, mode)


@each_mode
def test_backward_twice_over_a_retained_graph(mode):
    """Kills: a guard against moving statistics that serves once, buffers used up by the first backward."""

    def run(model):
        x = images().requires_grad_()
        loss = classification_loss(model(x))
        loss.backward(retain_graph=True)
        loss.backward()
        return {"x": x.grad}

    compare(run, mode, drop_rate=0.2)


@each_mode
def test_backward_twice_over_a_freed_graph_is_an_error(mode):
    """As in the plain path. Kills: a second backward over buffers that were given back."""
    for net in (toy(), toy(mode)):
        loss = classification_loss(net(images()))
        loss.backward()
        with pytest.raises(RuntimeError):
            loss.backward()


@each_mode
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first_first", "last_first"])
def test_two_forwards_before_the_backwards(mode, order):
    """Kills: one buffer per module instead of one per forward."""

    def run(model):
        losses = [classification_loss(model(images(seed=seed))) for seed in (1, 2)]
        for index in order:
            losses[index].backward()

    compare(run, mode, drop_rate=0.2)


@each_mode
def test_other_forwards_between_forward_and_backward(mode):
    """A teacher's, an evaluation's. Kills: storage of a forward that a later one without gradients overwrites."""

    def run(model):
        loss = classification_loss(model(images(seed=1)))
        with torch.no_grad():
            model(images(seed=2))
        with evaluation(model), torch.inference_mode():
            model(images(6, 3, 8, 8, seed=3))
        loss.backward()

    compare(run, mode, drop_rate=0.2)


@each_mode
def test_the_same_model_twice_in_one_graph(mode):
    """Siamese. Kills: one forward's storage used for both."""

    def run(model):
        x = images().requires_grad_()
        first, second = model(x), model(2 * x.flip(0))
        F.cosine_similarity(first, second).sum().backward()
        return {"x": x.grad}

    compare(run, mode)


@each_mode
def test_output_of_one_forward_steers_another(mode):
    """The second forward's input depends on the first's output. Kills: a backward that is not reentrant."""

    def run(model):
        x = images().requires_grad_()
        scale = model(x).mean(1).view(-1, 1, 1, 1)
        classification_loss(model(x * (1 + scale))).backward()
        return {"x": x.grad}

    compare(run, mode)


@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"bn_size": None}, {"small_inputs": False}, {"spatial_dims": 1}],
    ids=["bottleneck", "no_bottleneck", "imagenet_stem", "1d"],
)
def test_gradient_penalty(mode, training, overrides):
    """Double backward through the images. Kills: a backward that autograd cannot differentiate."""

    def run(model):
        model.train(training)
        sides = [6 if "small_inputs" not in overrides else 18] * overrides.get("spatial_dims", 2)
        x = images(3, 3, *sides).requires_grad_()
        output = model(x)
        (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (classification_loss(output) + grad.square().sum()).backward()
        return {"grad": grad, "x": x.grad}

    compare(run, mode, **overrides)


@each_mode
def test_double_backward_through_parameters(mode):
    """Meta-learning: a step taken in the graph. Frozen and trained parameters mixed."""

    def run(model):
        model.features.conv0.requires_grad_(False)
        model.features.denseblock1.denselayer2.norm1.requires_grad_(False)
        parameters = [p for p in model.parameters() if p.requires_grad]
        loss = classification_loss(model(images(3, 3, 6, 6)))
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        sum((g * (p + 1)).sum() for g, p in zip(grads, parameters, strict=True)).backward()

    compare(run, mode)


@each_mode
def test_gradient_penalty_under_autocast(mode):
    """By the rule for low precision. Kills: a rebuilt block whose types do not fit those of the forward."""
    draws = []
    for seed in range(3):
        plain = toy(dtype=torch.float32, seed=seed)
        states = []
        for net in (twin(plain, "naive").double(), plain, twin(plain, mode)):
            x = images(4, 3, 6, 6, seed=seed).to(net.classifier.weight.dtype).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
                output = net(x)
            (grad,) = torch.autograd.grad(linear_loss(output), x, create_graph=True)
            grad.square().sum().backward()
            states.append({"output": output.detach(), "x.grad": x.grad, **gradients(net)})
        draws.append(tuple(states))
    assert_as_accurate(*draws)


@each_mode
def test_hessian_vector_product_with_dropout(mode):
    """Kills: masks drawn anew when the backward is rebuilt for a second differentiation."""

    def run(model):
        parameters = list(model.parameters())
        loss = classification_loss(model(images(3, 3, 6, 6)))
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        products = torch.autograd.grad(grads, parameters, [torch.ones_like(p) for p in parameters], allow_unused=True)
        return {f"product {i}": p for i, p in enumerate(products)}

    compare(run, mode, drop_rate=0.3)


def block_function(mode: str, training: bool, **overrides):
    """A tiny dense block as a function of its input and parameters, and tensors to call it with."""
    model = toy(mode, **{"growth_rate": 2, "block_config": (2,), "num_init_features": 2, "bn_size": 1, **overrides})
    block = model.features.denseblock1.train(training)
    names, parameters = zip(*block.named_parameters())

    def function(x, *values):
        return torch.func.functional_call(block, dict(zip(names, values)), (x,))

    x = images(2, 2, 3, 3).requires_grad_()
    return function, (x, *(p.detach().clone().requires_grad_() for p in parameters))


@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("overrides", [{}, {"bn_size": None}], ids=["bottleneck", "no_bottleneck"])
def test_gradcheck_of_a_block(mode, training, overrides):
    """Against finite differences, which share no code with any mode."""
    function, values = block_function(mode, training, **overrides)
    assert torch.autograd.gradcheck(function, values, fast_mode=True)


@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gradgradcheck_of_a_block(mode, training):
    """Second derivatives against finite differences of the first."""
    function, values = block_function(mode, training)
    assert torch.autograd.gradgradcheck(function, values, fast_mode=True)


@each_mode
def test_anomaly_mode(mode):
    """Kills: a backward that runs only where nobody watches."""
    with torch.autograd.set_detect_anomaly(True):
        compare(lambda model: classification_loss(model(images())).backward(), mode)


@each_mode
def test_default_dtype(mode):
    """Kills: scratch tensors of torch's default type instead of the features'."""
    try:
        torch.set_default_dtype(torch.float64)
        model = toy(dtype=torch.float32)
        assert_trains_like(model, twin(model, mode), images().float(), tolerance=1e-4)
        model = toy(dtype=torch.float64)
        assert_trains_like(model, twin(model, mode), images())
    finally:
        torch.set_default_dtype(torch.float32)


@each_mode
def test_part_of_the_model_under_no_grad(mode):
    """A frozen trunk. Kills: a block that wants a gradient for its input."""

    def run(model):
        *trunk, block, transition, last, norm = list(model.features)[:5] + list(model.features)[-1:]
        x = images()
        with torch.no_grad():
            for module in model.features[:4]:
                x = module(x)
        for module in model.features[4:]:
            x = module(x)
        classification_loss(model.forward_head(F.relu(x))).backward()

    compare(run, mode)


# --- in-place edits -------------------------------------------------------------------------------------------------

EDITS = {
    "scaled": lambda y: y.mul_(2),
    "rectified": lambda y: F.relu(y, inplace=True),
    "first_channels": lambda y: y[:, :3].zero_(),
    "last_channels": lambda y: y[:, -3:].add_(1),
    "one_image": lambda y: y[0].neg_(),
    "detached": lambda y: y.detach().mul_(2),
}


@each_mode
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("tracked", [True, False], ids=["tracked", "untracked"])
@pytest.mark.parametrize("moment", ["at_once", "after_use"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_in_place_edit_of_a_blocks_output(mode, edit, tracked, moment, memory_format):
    """The plain path's gradients or autograd's usual error. Kills: a saved view that bypasses the version counter."""
    model = toy()
    states = []
    for net in (model, twin(model, mode)):
        x = images(4, 8, 8, 8).to(memory_format=memory_format).requires_grad_()
        y = net.features.denseblock1(x)
        value = y.sum() if moment == "after_use" else 0
        try:
            with torch.set_grad_enabled(tracked):
                EDITS[edit](y)
            (value + (y * images(*y.shape, seed=4)).sum()).backward()
        except RuntimeError as error:
            assert net is not model, "the plain path takes this edit"
            assert "modified by an inplace operation" in str(error) or "in-place" in str(error)
            return
        states.append({"x": x.grad, **gradients(net.features.denseblock1)})
    assert_same(*states)


@each_mode
def test_in_place_edit_of_a_blocks_input(mode):
    """After the block has read it. Kills: the same, for a block that keeps its input instead of copying it."""
    model = toy()
    states = []
    for net in (model, twin(model, mode)):
        x = images(4, 8, 8, 8).requires_grad_()
        h = x * 1
        y = net.features.denseblock1(h)
        with torch.no_grad():
            h.zero_()
        try:
            y.square().sum().backward()
        except RuntimeError:
            assert net is not model
            return
        states.append({"x": x.grad, **gradients(net.features.denseblock1)})
    assert_same(*states)


CHANGED = {
    "conv1": "features.denseblock1.denselayer2.conv1.weight",
    "conv2": "features.denseblock2.denselayer1.conv2.weight",
    "gamma1": "features.denseblock1.denselayer2.norm1.weight",
    "beta1": "features.denseblock1.denselayer2.norm1.bias",
    "gamma2": "features.denseblock2.denselayer2.norm2.weight",
    "beta2": "features.denseblock2.denselayer2.norm2.bias",
}


@each_mode
@pytest.mark.parametrize("name", CHANGED)
def test_parameters_changed_between_forward_and_backward(mode, name):
    """The old values' gradients or an error. Kills: a recomputation that silently reads the new values."""
    model = toy()
    states = []
    for change, net in ((False, model), (True, twin(model, mode))):
        loss = classification_loss(net(images()))
        if change:
            with torch.no_grad():
                net.get_parameter(CHANGED[name]).add_(0.7)
        try:
            loss.backward()
        except RuntimeError:
            assert change
            return
        states.append(gradients(net))
    assert_same(*states)


@each_mode
def test_parameters_replaced_between_forward_and_backward(mode):
    """``p.data = …`` and a new Parameter leave the old graph alone. Kills: a backward that asks the module again."""

    def run(model):
        loss = classification_loss(model(images()))
        layer = model.features.denseblock1.denselayer2
        old = layer.conv1.weight, layer.norm1.bias
        layer.conv1.weight = nn.Parameter(torch.zeros_like(old[0]))
        layer.norm1.bias = nn.Parameter(torch.ones_like(old[1]))
        loss.backward()
        return {"conv1": old[0].grad, "beta1": old[1].grad}

    compare(run, mode)


# --- functional calls and transforms --------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_functional_call(mode, training):
    """Parameters and buffers lent for the forward only. Kills: a recomputation with the module's own."""

    def run(model):
        model.train(training)
        lent = {name: (p.detach() * 1.3 + 0.1).requires_grad_() for name, p in model.named_parameters()}
        statistics = {name: b.clone() + 1 for name, b in model.named_buffers()}
        x = images(4, 3, 18, 18).requires_grad_()
        output = torch.func.functional_call(model, {**lent, **statistics}, (x,))
        classification_loss(output).backward()
        assert all(p.grad is None for p in model.parameters())
        return {
            "x": x.grad,
            **{f"lent {name}": value.grad for name, value in lent.items()},
            **{f"lent {name}": value for name, value in statistics.items()},
        }

    compare(run, mode, drop_rate=0.2, small_inputs=False)


@each_mode
def test_functional_call_with_computed_parameters(mode):
    """Hypernetwork: the parameters themselves have a graph."""

    def run(model):
        scale = torch.tensor(1.1, dtype=torch.float64, requires_grad=True)
        lent = {name: p * scale for name, p in model.named_parameters()}
        classification_loss(torch.func.functional_call(model, lent, (images(),))).backward()
        return {"scale": scale.grad}

    compare(run, mode)


def functional(model):
    """``loss(parameters, x)`` without side effects; the model in eval mode."""
    model.eval()
    statistics = {name: b.detach() for name, b in model.named_buffers()}

    def loss(parameters, x):
        return classification_loss(torch.func.functional_call(model, (parameters, statistics), (x,)))

    return loss, {name: p.detach() for name, p in model.named_parameters()}


TRANSFORMS = {
    "grad": lambda loss, p, x: torch.func.grad(loss)(p, x),
    "grad_and_value": lambda loss, p, x: torch.func.grad_and_value(loss)(p, x)[0],
    "per_sample": lambda loss, p, x: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(p, x[:, None]),
    "ensemble": lambda loss, p, x: {
        "loss": torch.func.vmap(loss, in_dims=(0, None))({n: torch.stack([v, v * 1.1]) for n, v in p.items()}, x)
    },
    "vjp": lambda loss, p, x: torch.func.vjp(loss, p, x)[1](torch.tensor(0.5, dtype=torch.float64))[0],
    "jvp": lambda loss, p, x: {"tangent": torch.func.jvp(loss, (p, x), (p, x))[1]},
    "jacrev": lambda loss, p, x: {"x": torch.func.jacrev(loss, argnums=1)(p, x)},
    "second": lambda loss, p, x: {
        "x": torch.func.grad(lambda y: torch.func.grad(loss, argnums=1)(p, y).square().sum())(x)
    },
}


@uses_jit
@each_mode
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func(mode, transform):
    """Kills: a checkpoint or an autograd function that refuses torch.func instead of stepping aside."""

    def run(model):
        loss, parameters = functional(model)
        return TRANSFORMS[transform](loss, parameters, images(3, 3, 6, 6))

    compare(run, mode)


@each_mode
def test_torch_func_grad_in_training(mode):
    """Statistics handed in as arguments move as in the plain path."""

    def run(model):
        statistics = {name: b.clone() for name, b in model.named_buffers()}

        def loss(parameters, statistics, x):
            return classification_loss(torch.func.functional_call(model, (parameters, statistics), (x,)))

        found = torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()}, statistics, images())
        return {**found, **{f"lent {name}": b for name, b in statistics.items()}}

    compare(run, mode)


def batched_gradients(model, x, wrt, **kwargs):
    output = model(x)
    many = images(3, *output.shape, seed=5)
    return torch.autograd.grad(output, wrt, many, is_grads_batched=True, **kwargs)


def batched_and_once_more(model, x):
    wrt = [x, *model.parameters()]
    first = batched_gradients(model, x, wrt, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), wrt, allow_unused=True)
    return [*first, *second]


def vmapped_gradients(model, x):
    output, wrt = model(x), [x, *model.parameters()]
    return torch.func.vmap(lambda v: torch.autograd.grad(output, wrt, v, retain_graph=True))(
        images(3, *output.shape, seed=5)
    )


BATCHED = {
    "jacobian": lambda model, x: [torch.autograd.functional.jacobian(model, x, vectorize=True)],
    "hessian": lambda model, x: [
        torch.autograd.functional.hessian(lambda y: model(y).square().sum(), x[..., ::2], vectorize=True)
    ],
    "grads": lambda model, x: batched_gradients(model, x, [x, *model.parameters()]),
    "some grads": lambda model, x: batched_gradients(model, x, list(model.parameters())[1::3]),
    "differentiable grads": batched_and_once_more,
    "vmap": vmapped_gradients,
}


STEM = {"small_inputs": False, "block_config": (1,)}
BASIC = {"spatial_dims": 1, "bn_size": None, "drop_rate": 0.2}


@uses_jit
@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("asked", "overrides"),
    [*((asked, {}) for asked in BATCHED), *((asked, o) for o in (STEM, BASIC) for asked in ("grads", "vmap"))],
    ids=[*BATCHED, *(f"{name}-{asked}" for name in ("stem", "basic") for asked in ("grads", "vmap"))],
)
def test_many_gradients_at_once(mode, training, asked, overrides):
    """One backward pass under vmap. Kills: a backward that works in place on tensors that are many in one."""
    if mode == "checkpoint" and asked == "vmap":
        x = torch.ones(2, requires_grad=True)
        y = checkpoint(torch.sin, x, use_reentrant=False)
        try:
            torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(torch.eye(2))
        except RuntimeError:
            pytest.skip("this torch's own checkpoint (2.4) does not go with torch.func.vmap")

    def run(model):
        model.train(training)
        x = images(2, 3, *((8, 8) if overrides is STEM else (4, 4))[: model.spatial_dims]).requires_grad_()
        found = BATCHED[asked](model, x)
        return {str(i): None if g is None else g.detach() for i, g in enumerate(found)}

    compare(run, mode, **overrides)


@uses_jit
@each_mode
def test_forward_mode_differentiation(mode):
    """Dual numbers. Kills: an autograd function without a forward derivative that does not step aside."""

    def run(model):
        model.eval()
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(images(), images(seed=2))
            return {"tangent": torch.autograd.forward_ad.unpack_dual(model(x)).tangent.detach()}

    compare(run, mode)


# --- checkpointing and saved tensors --------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpointed_by_the_user(mode, reentrant):
    """Round the whole model and round a part of it. The user's recomputation is a forward like any other."""

    def run(model):
        x = images().requires_grad_()
        output = checkpoint(model, x, use_reentrant=reentrant)
        h = checkpoint(model.features[:3], x, use_reentrant=reentrant)
        (classification_loss(output) + h.square().mean()).backward()
        for name, buffer in model.named_buffers():  # how far the recomputation goes is torch's affair
            buffer.zero_()
        return {"output": output.detach(), "x": x.grad}

    compare(run, mode, drop_rate=0.2)


@each_mode
def test_saved_tensors_hooks(mode):
    """Offloading: what is kept may come back as another tensor. Kills: a backward that needs the very storage."""

    def run(model):
        with torch.autograd.graph.save_on_cpu():
            loss = classification_loss(model(images(seed=1)))
        loss.backward()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
            loss = classification_loss(model(images(seed=2)))
        loss.backward()

    compare(run, mode, drop_rate=0.2)


# --- copies and files -----------------------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("trained_before", [True, False])
def test_deepcopy_is_independent(mode, trained_before):
    """Kills: a module captured in a closure at construction, whose weights the copy goes on using."""
    model = toy(mode)
    if trained_before:
        classification_loss(model(images())).backward()
    other = copy.deepcopy(model)
    for name, p in other.named_parameters():
        assert p is not model.get_parameter(name)
    with evaluation(model), evaluation(other):
        before = model(images())
        assert_same({"output": before}, {"output": other(images())})
        with torch.no_grad():
            for layer in layers(other):
                layer.conv1.weight.mul_(-1.5)
        assert torch.equal(model(images()), before)
        assert not torch.allclose(other(images()), before)
    expected = toy()
    expected.load_state_dict(other.state_dict())
    other.zero_grad(set_to_none=True)
    assert_trains_like(expected, other, images())


@each_mode
def test_deepcopy_of_a_layer_and_of_a_block(mode):
    """Parts copy like the whole."""
    model = toy(mode)
    block = copy.deepcopy(model.features.denseblock1)
    with torch.no_grad():
        for p in block.parameters():
            p.mul_(0.5)
    model.features.denseblock1 = block
    expected = toy()
    expected.load_state_dict(model.state_dict())
    assert_trains_like(expected, model, images())


@each_mode
@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_pickle_and_save(mode, way):
    """The whole model, before and after training. Kills: closures, locks or graphs kept on a module."""
    model = toy(mode)
    for _ in range(2):
        file = io.BytesIO()
        if way == "pickle":
            pickle.dump(model, file)
            other = pickle.loads(file.getvalue())
        else:
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        assert other.efficient == mode
        expected = toy()
        expected.load_state_dict(model.state_dict())
        assert_trains_like(expected, other, images())
        classification_loss(model(images())).backward()


@pytest.mark.parametrize("source", ["naive", *MODES])
@pytest.mark.parametrize("target", ["naive", *MODES])
def test_state_dicts_fit_every_mode(source, target):
    """Keys, order and values. Kills: parameters that a mode adds, renames or stores in another layout."""
    model, other = toy(source), toy(target, seed=9)
    classification_loss(model(images())).backward()
    assert list(model.state_dict()) == list(toy().state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    with evaluation(model), evaluation(other):
        assert_same({"output": model(images())}, {"output": other(images())})


@each_mode
def test_garbage_is_freed_without_a_collector(mode):
    """Kills: a reference cycle through the graph that keeps a step's memory until Python looks for garbage."""
    import gc
    import weakref

    model = toy(mode)
    gc.collect()
    gc.disable()
    try:
        x = images().requires_grad_()
        features = model.features(x)
        alive = weakref.ref(features)
        classification_loss(model.forward_head(F.relu(features))).backward()
        del features
        assert alive() is None
    finally:
        gc.enable()


# --- hooks ----------------------------------------------------------------------------------------------------------


HOOKED = {"block_config": (2, 2), "small_inputs": False}
SUBMODULES = [  # one of every kind
    "",
    "features",
    "features.conv0",
    "features.norm0",
    "features.relu0",
    "features.pool0",
    "features.denseblock1",
    "features.denseblock2.denselayer1",
    "features.denseblock2.denselayer2.norm1",
    "features.denseblock2.denselayer2.relu1",
    "features.denseblock2.denselayer2.conv1",
    "features.denseblock2.denselayer2.norm2",
    "features.denseblock2.denselayer2.relu2",
    "features.denseblock2.denselayer2.conv2",
    "features.transition1",
    "features.transition1.norm",
    "features.transition1.relu",
    "features.transition1.conv",
    "features.transition1.pool",
    "features.norm5",
    "classifier",
]


def hook_forward(module: nn.Module, note) -> None:
    """Every way to hook a forward; ``note(kind, value)`` per call."""
    module.register_forward_pre_hook(lambda m, args: note("pre"))
    module.register_forward_pre_hook(lambda m, args, kwargs: note("pre with kwargs"), with_kwargs=True)
    module.register_forward_hook(lambda m, args, out: note("forward", out))
    module.register_forward_hook(lambda m, args, kwargs, out: note("with kwargs", out), with_kwargs=True)
    module.register_forward_hook(lambda m, args, out: note("always", out), always_call=True)


def hook_backward(module: nn.Module, note) -> None:
    """Both ways to hook a backward."""
    module.register_full_backward_hook(lambda m, grad_in, grad_out: note("backward", grad_out[0]))
    module.register_full_backward_pre_hook(lambda m, grad_out: note("backward pre", grad_out[0]))


HOOKS = {"forward": (5, hook_forward), "backward": (2, hook_backward)}
KINDS_OF_HOOKS = {
    "pre": lambda module, note: module.register_forward_pre_hook(lambda m, args: note("pre")),
    "pre_with_kwargs": lambda module, note: module.register_forward_pre_hook(
        lambda m, args, kwargs: note("pre"), with_kwargs=True
    ),
    "forward": lambda module, note: module.register_forward_hook(lambda m, args, out: note("forward", out)),
    "backward": lambda module, note: module.register_full_backward_hook(
        lambda m, grad_in, grad_out: note("backward", grad_out[0])
    ),
    "backward_pre": lambda module, note: module.register_full_backward_pre_hook(
        lambda m, grad_out: note("backward pre", grad_out[0])
    ),
}


def hooked_state(mode: str, name: str, register, calls: int) -> dict:
    """A step with hooks on one submodule; what they saw among the entries."""
    model, seen = toy(mode, **HOOKED), {}

    def note(kind, value=None):
        seen[f"{len(seen)} {kind}"] = None if value is None else value.detach()

    register(model.get_submodule(name), note)
    state = training_state(model, images(3, 3, 16, 16))
    assert len(seen) == calls, f"{name}: {len(seen)} calls instead of {calls}"
    return {**state, **seen}


@functools.lru_cache(maxsize=None)
def hooked_plainly(name: str, hook: str) -> dict:
    """What the plain path does; the same for every mode."""
    calls, register = HOOKS[hook]
    return hooked_state("naive", name, register, calls)


@each_mode
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_every_kind_of_submodule(mode, hook):
    """Called as often as in the plain path, with the same values, and the training goes on as if they were not there.

    Kills: a fast path that skips hooked modules, a recomputation that calls a hook again, a rectifier that works in
    place behind a norm, which torch refuses between full backward hooks and which edits what a hook has kept.
    """
    for name in SUBMODULES:
        calls, register = HOOKS[hook]
        assert_same(hooked_plainly(name, hook), hooked_state(mode, name, register, calls))


@each_mode
@pytest.mark.parametrize("kind", KINDS_OF_HOOKS)
def test_each_kind_of_hook_alone(mode, kind):
    """Kills: a kind of hook that nobody looks for."""
    for name in ("features.denseblock1.denselayer2.conv1", "features.denseblock2", "features.transition1.norm"):
        hooked_state(mode, name, KINDS_OF_HOOKS[kind], 1)


@each_mode
@pytest.mark.parametrize("name", SUBMODULES[1:])
def test_hooks_that_change_values(mode, name):
    """What a forward hook and a backward hook return counts. Kills: hooks called but not listened to."""

    def scale_gradient(module, grad_in, grad_out):
        return tuple(None if g is None else g * 0.7 for g in grad_in)

    model = toy(**HOOKED)
    module = model.get_submodule(name)
    module.register_forward_hook(lambda module, args, out: out * 1.5 + 0.1)
    module.register_full_backward_hook(scale_gradient)
    assert_trains_like(model, twin(model, mode), images(3, 3, 16, 16))


@pytest.mark.parametrize("mode", ["naive", *MODES])
@pytest.mark.parametrize("hooked", [nn.BatchNorm2d, nn.ReLU, "all"], ids=["norms", "rectifiers", "global"])
def test_what_hooks_keep_without_gradients_stays(mode, hooked):
    """Norms' outputs and rectifiers' inputs, kept without a copy. Kills: a rectifier in place under somebody's eyes."""
    model, kept = toy(mode, **HOOKED).eval(), []

    def keep(module, args, output):
        if isinstance(module, (nn.BatchNorm2d, nn.ReLU)):
            kept.extend((value, value.clone()) for value in (args[0], output))

    if hooked == "all":
        handles = [nn.modules.module.register_module_forward_hook(keep)]
    else:
        handles = [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, hooked)]
    try:
        with torch.no_grad():
            model(images(3, 3, 16, 16))
    finally:
        for handle in handles:
            handle.remove()
    assert len(kept) >= 2 * 9
    assert all(torch.equal(value, then) for value, then in kept)


@pytest.mark.parametrize("mode", ["naive", *MODES])
def test_rectifiers_that_the_user_sets_in_place(mode):
    """As older versions had them, and their pickles have. Kills: a setting that is not the module's own any more."""
    model = toy(**HOOKED)
    other = twin(model, mode)
    for module in other.modules():
        if isinstance(module, nn.ReLU):
            assert not module.inplace
            module.inplace = True
    assert_trains_like(model, other, images(3, 3, 16, 16), steps=2)
    with torch.no_grad():
        assert_same({"eval": model.eval()(images())}, {"eval": other.eval()(images())})


@each_mode
def test_hooks_removed(mode):
    """Kills: a way to compute chosen once for a hooked module and kept."""
    model = toy()
    other = twin(model, mode)
    calls = []
    handles = [layer.conv1.register_forward_hook(lambda *args: calls.append(1)) for layer in layers(other)]
    assert_trains_like(model, other, images())
    assert len(calls) == len(handles)
    for handle in handles:
        handle.remove()
    assert_trains_like(model, other, images(), steps=2)
    assert len(calls) == len(handles)


@each_mode
def test_global_module_hooks(mode):
    """Profilers and loggers hook all modules at once. Kills: hooks looked for on the module only."""
    counts = []
    for net in (toy(**HOOKED), toy(mode, **HOOKED)):
        names = {module: name for name, module in net.named_modules()}
        calls = Counter()
        handles = [
            nn.modules.module.register_module_forward_pre_hook(lambda m, args: calls.update([f"pre {names[m]}"])),
            nn.modules.module.register_module_forward_hook(lambda m, args, out: calls.update([f"post {names[m]}"])),
            nn.modules.module.register_module_full_backward_hook(
                lambda m, grad_in, grad_out: calls.update([f"backward {names[m]}"])
            ),
        ]
        try:
            state = training_state(net, images(3, 3, 16, 16))
        finally:
            for handle in handles:
                handle.remove()
        counts.append((calls, state))
    assert counts[0][0] == counts[1][0]
    assert_same(counts[0][1], counts[1][1])


@each_mode
def test_hooks_on_parameters(mode):
    """Tensor hooks, post-accumulate hooks: each once per backward. Kills: gradients written around autograd."""

    def run(model):
        calls = Counter()
        for name, p in model.named_parameters():
            p.register_hook(lambda grad, name=name: calls.update([name]) or grad * 2)
            p.register_post_accumulate_grad_hook(lambda p, name=name: calls.update([f"{name} done"]))
        classification_loss(model(images())).backward()
        assert set(calls.values()) == {1} and len(calls) == 2 * len(list(model.parameters()))

    compare(run, mode)


@each_mode
def test_backward_hook_on_features_and_in_place_rectifier(mode):
    """torch refuses to edit such a module's output in place. Kills: an in-place ReLU behind ``features``."""
    model = toy()
    states = []
    for net in (model, twin(model, mode)):
        seen = []
        net.features.register_full_backward_hook(lambda m, grad_in, grad_out, seen=seen: seen.append(grad_out[0]))
        state = training_state(net, images())
        assert len(seen) == 1
        states.append({**state, "seen": seen[0]})
    assert_same(*states)


@each_mode
@pytest.mark.parametrize(
    "target", ["features", "features.norm5", "features.denseblock2", "features.denseblock1", "features.transition1"]
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_grad_cam(mode, target, training):
    """Activations and their gradients at a layer, as explanation tools take them."""

    def run(model):
        model.train(training)
        kept = {}

        def keep(module, args, output):
            kept["activation"] = output.detach().clone()
            output.register_hook(lambda grad: kept.update(gradient=grad.clone()))

        model.get_submodule(target).register_forward_hook(keep)
        x = images().requires_grad_()
        model(x)[:, 2].sum().backward()
        weights = kept["gradient"].mean((2, 3), keepdim=True)
        return {"x": x.grad, **kept, "map": F.relu((weights * kept["activation"]).sum(1))}

    compare(run, mode)


@each_mode
def test_retained_gradients_inside(mode):
    """``retain_grad`` on blocks' outputs taken by hooks."""

    def run(model):
        outputs = []

        def keep(module, args, output):
            output.retain_grad()
            outputs.append(output)

        for block in blocks(model):
            block.register_forward_hook(keep)
        classification_loss(model(images())).backward()
        return {f"block {i}": y.grad for i, y in enumerate(outputs)}

    compare(run, mode)


# --- surgery --------------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """LoRA: a frozen convolution and a trained correction of low rank."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Conv2d(base.in_channels, 2, 1, bias=False, dtype=torch.float64)
        window = {"kernel_size": base.kernel_size, "stride": base.stride, "padding": base.padding}
        self.up = nn.Conv2d(2, base.out_channels, **window, dtype=torch.float64)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Observer(nn.Module):
    """Counts its forwards and keeps a moving range, in buffers and in a plain attribute, as quantisation tools do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.seen.add_(1)
        self.largest.lerp_(x.detach().max(), 0.3)
        return F.relu(x) * (1 + 0.1 * self.seen)


class DoublingNorm(nn.BatchNorm2d):
    """A subclass with another algebra."""

    def forward(self, x):
        return 2 * super().forward(x) + 0.25


class BiasedConvolution(nn.Conv2d):
    """A subclass with another algebra."""

    def forward(self, x):
        return super().forward(x) + 0.5


def replace(model: nn.Module, own: str, make) -> None:
    """Every submodule called ``own`` becomes ``make(submodule)``."""
    found = [(name, module) for name, module in model.named_modules() if name.split(".")[-1] == own]
    assert found, f"nothing is called {own}"
    for name, module in found:
        torch.manual_seed(11)
        setattr(model.get_submodule(name.rpartition(".")[0]), own, make(module).double())


def biased(conv):
    return nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size, padding=conv.padding)


SURGERY = {
    "lora_conv1": ("conv1", LowRank),
    "lora_conv2": ("conv2", LowRank),
    "biased_conv1": ("conv1", biased),
    "biased_conv2": ("conv2", biased),
    "grouped_conv2": ("conv2", lambda m: nn.Conv2d(m.in_channels, m.out_channels, 3, padding=1, groups=4, bias=False)),
    "dilated_conv2": (
        "conv2",
        lambda m: nn.Conv2d(m.in_channels, m.out_channels, 3, padding=2, dilation=2, bias=False),
    ),
    "reflecting_conv2": (
        "conv2",
        lambda m: nn.Conv2d(m.in_channels, m.out_channels, 3, padding=1, padding_mode="reflect", bias=False),
    ),
    "wide_conv2": ("conv2", lambda m: nn.Conv2d(m.in_channels, m.out_channels, 5, padding=2, bias=False)),
    "same_conv2": ("conv2", lambda m: nn.Conv2d(m.in_channels, m.out_channels, 3, padding="same", bias=False)),
    "wide_conv1": ("conv1", lambda m: nn.Conv2d(m.in_channels, m.out_channels, 3, padding=1, bias=False)),
    "sequential_conv1": ("conv1", lambda m: nn.Sequential(m, nn.Dropout(0.3))),
    "subclassed_conv1": (
        "conv1",
        lambda m: BiasedConvolution(m.in_channels, m.out_channels, m.kernel_size, bias=False),
    ),
    "group_norm1": ("norm1", lambda m: nn.GroupNorm(2, m.num_features)),
    "group_norm2": ("norm2", lambda m: nn.GroupNorm(2, m.num_features)),
    "instance_norm1": (
        "norm1",
        lambda m: nn.InstanceNorm2d(m.num_features, affine=True, track_running_stats=True),
    ),
    "instance_norm2": ("norm2", lambda m: nn.InstanceNorm2d(m.num_features, affine=True)),
    "identity_norm1": ("norm1", lambda m: nn.Identity()),
    "identity_norm2": ("norm2", lambda m: nn.Identity()),
    "identity_relu1": ("relu1", lambda m: nn.Identity()),
    "subclassed_norm1": ("norm1", lambda m: DoublingNorm(m.num_features)),
    "subclassed_norm2": ("norm2", lambda m: DoublingNorm(m.num_features)),
    "sync_norm1": ("norm1", lambda m: nn.SyncBatchNorm(m.num_features)),
    "transition_group_norm": ("norm", lambda m: nn.GroupNorm(2, m.num_features)),
    "transition_identity": ("norm", lambda m: nn.Identity()),
    "transition_max_pool": ("pool", lambda m: nn.MaxPool2d(2)),
    "transition_gelu": ("relu", lambda m: nn.GELU()),
    "final_group_norm": ("norm5", lambda m: nn.GroupNorm(2, m.num_features)),
    "final_identity": ("norm5", lambda m: nn.Identity()),
    "stem_group_norm": ("norm0", lambda m: nn.GroupNorm(2, m.num_features)),
    "stem_no_affine": ("norm0", lambda m: nn.BatchNorm2d(m.num_features, affine=False)),
    "stem_identity": ("norm0", lambda m: nn.Identity()),
    "stem_gelu": ("relu0", lambda m: nn.GELU()),
    "stem_relu6": ("relu0", lambda m: nn.ReLU6(inplace=True)),
    "stem_no_pool": ("pool0", lambda m: nn.Identity()),
    "stem_average_pool": ("pool0", lambda m: nn.AvgPool2d(2)),
    "stem_other_max_pool": ("pool0", lambda m: nn.MaxPool2d(2)),
    "stem_ceiling_pool": ("pool0", lambda m: nn.MaxPool2d(3, stride=2, ceil_mode=True)),
    "stem_dilated_pool": ("pool0", lambda m: nn.MaxPool2d(3, stride=2, padding=1, dilation=2)),
    "stem_overlapping_pool": ("pool0", lambda m: nn.MaxPool2d((3, 2), stride=(1, 2), padding=(1, 0))),
    "transition_other_pool": ("pool", lambda m: nn.AvgPool2d(3, stride=2, padding=1)),
    "transition_ceiling_pool": ("pool", lambda m: nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False)),
    "transition_divisor": ("pool", lambda m: nn.AvgPool2d(2, divisor_override=3)),
    "transition_no_pool": ("pool", lambda m: nn.Identity()),
    "transition_wide_conv": ("conv", lambda m: nn.Conv2d(m.in_channels, m.out_channels, 3, padding=1)),
    "stem_conv": ("conv0", lambda m: nn.Conv2d(3, m.out_channels, 5, stride=2)),
    "gelu1": ("relu1", lambda m: nn.GELU()),
    "gelu2": ("relu2", lambda m: nn.GELU()),
    "silu1_in_place": ("relu1", lambda m: nn.SiLU(inplace=True)),
    "leaky1": ("relu1", lambda m: nn.LeakyReLU(0.1, inplace=True)),
    "prelu1": ("relu1", lambda m: nn.PReLU()),
    "relu6_1": ("relu1", lambda m: nn.ReLU6(inplace=True)),
    "random_relu1": ("relu1", lambda m: nn.RReLU()),
    "dropout1": ("relu1", lambda m: nn.Sequential(nn.ReLU(), nn.Dropout(0.5))),
    "dropout_for_norm1": ("norm1", lambda m: nn.Dropout(0.5)),
    "relu1_not_in_place": ("relu1", lambda m: nn.ReLU(inplace=False)),
    "lora_transition": ("conv", LowRank),
    "lora_stem": ("conv0", LowRank),
    "sequential_stem": ("conv0", lambda m: nn.Sequential(m, nn.BatchNorm2d(m.out_channels))),
    "foreign_transition": ("transition1", lambda m: nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU(), nn.MaxPool2d(2))),
    "foreign_layer": ("denselayer2", lambda m: nn.Sequential(nn.Conv2d(12, 4, 3, padding=1), nn.Tanh())),
    "foreign_block": ("denseblock2", lambda m: nn.Conv2d(8, 16, 1)),
    "observer1": ("relu1", lambda m: Observer()),
    "observer2": ("relu2", lambda m: Observer()),
    "observed_conv1": ("conv1", lambda m: nn.Sequential(Observer(), m)),
}


def operated(operation: str, mode: str) -> dict:
    """A step in training and one in eval; the calls that an :class:`Observer` counted among the entries."""
    own, make = SURGERY[operation]
    model = toy(mode, small_inputs="stem" not in operation)
    replace(model, own, make)
    x = images(4, 3, *[8 if "stem" not in operation else 20] * 2)
    state = training_state(model, x)
    state |= {f"eval, {name}": value for name, value in training_state(model.eval(), x).items()}
    observers = {name: module for name, module in model.named_modules() if isinstance(module, Observer)}
    return state | {f"{name}.calls": torch.tensor(observer.calls) for name, observer in observers.items()}


@functools.lru_cache(maxsize=None)
def operated_plainly(operation: str) -> dict:
    """What the plain path does; the same for every mode."""
    return operated(operation, "naive")


@each_mode
@pytest.mark.parametrize("operation", SURGERY)
def test_replaced_submodules(mode, operation):
    """A block that is not the standard one calls its modules, each once per forward, with exact statistics.

    Kills: a module taken for the standard one, state moved again by a recomputation, an in-place rectifier behind an
    Identity that destroys the shared features.
    """
    assert_same(operated_plainly(operation), operated(operation, mode))


@each_mode
def test_identity_norms_leave_the_input_alone(mode):
    """Kills: the same in-place rectifier, on what the caller owns."""
    model = toy(mode)
    replace(model, "norm1", lambda m: nn.Identity())
    for x in (images(4, 8, 8, 8), images(4, 8, 8, 8).requires_grad_()):
        before = x.detach().clone()
        model.features.denseblock1(x)
        assert torch.equal(x.detach(), before)


@each_mode
def test_sync_batch_norm_without_process_group(mode):
    """torch's own conversion of the whole model; alone it computes what BatchNorm does."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(toy())
    other = twin(model, mode)
    assert_trains_like(model, other, images(), steps=2)
    assert list(other.state_dict()) == list(toy().state_dict())


PARAMETRIZATIONS = {
    "weight_norm": lambda conv: parametrizations.weight_norm(conv),
    "spectral_norm": lambda conv: parametrizations.spectral_norm(conv),
    "spectral_norm_by_hook": lambda conv: nn.utils.spectral_norm(conv),
    "orthogonal": lambda conv: parametrizations.orthogonal(conv),
    "pruned": lambda conv: prune.l1_unstructured(conv, "weight", 0.4),
    "pruned_randomly": lambda conv: prune.random_unstructured(conv, "weight", 0.4),
}


@each_mode
@pytest.mark.parametrize("own", ["conv1", "conv2", "conv"])
@pytest.mark.parametrize("parametrization", PARAMETRIZATIONS)
def test_parametrized_weights(mode, parametrization, own):
    """Kills: the tensor behind the parametrization used as the weight, its power iteration run again."""
    if parametrization == "orthogonal" and own != "conv":
        own = "conv1"
    model = toy()
    for name, module in list(model.named_modules()):
        if name.split(".")[-1] == own:
            torch.manual_seed(3)
            PARAMETRIZATIONS[parametrization](module)
    states = []
    # Parametrized modules have classes of their own that do not copy; each is made anew from the same weights.
    other = toy(mode)
    for name, module in list(other.named_modules()):
        if name.split(".")[-1] == own:
            torch.manual_seed(3)
            PARAMETRIZATIONS[parametrization](module)
    other.load_state_dict(model.state_dict())
    for net in (model, other):
        states.append(training_state(net, images(), steps=2))
    assert_same(*states)


@each_mode
def test_pruned_norms(mode):
    """A pruned gamma is recomputed by a pre-hook before every forward."""
    model, other = toy(), toy(mode)
    for net in (model, other):
        for layer in layers(net):
            prune.l1_unstructured(layer.norm1, "weight", 0.5)
            prune.l1_unstructured(layer.norm2, "bias", 0.5)
    assert_same(training_state(model, images(), steps=2), training_state(other, images(), steps=2))


@each_mode
def test_parametrization_of_a_norm(mode):
    """Kills: the norm's parameter read where the parametrization's result belongs."""

    class Positive(nn.Module):
        def forward(self, x):
            return F.softplus(x)

    model, other = toy(), toy(mode)
    for net in (model, other):
        for layer in layers(net):
            nn.utils.parametrize.register_parametrization(layer.norm1, "weight", Positive())
    assert_same(training_state(model, images(), steps=2), training_state(other, images(), steps=2))


@each_mode
def test_tied_weights(mode):
    """One convolution and one norm in two layers. Kills: gradients stored, not accumulated; state kept per module."""
    model = toy()
    other = twin(model, mode)
    for net in (model, other):
        first, second = net.features.denseblock1.denselayer1, net.features.denseblock1.denselayer2
        second.conv2 = first.conv2
        second.norm2 = first.norm2
        second.conv1.weight = nn.Parameter(second.conv1.weight.detach())
    assert_trains_like(model, other, images(), steps=2)


@each_mode
def test_replaced_forward(mode):
    """A patched ``forward`` on an instance counts as a module's own. Kills: a check of the class only."""
    model = toy()
    other = twin(model, mode)
    for net in (model, other):
        conv = net.features.denseblock1.denselayer2.conv1
        conv.forward = lambda x, conv=conv: F.conv2d(x, conv.weight * 2)
    assert_trains_like(model, other, images(), steps=2)


@each_mode
def test_layers_added_and_removed(mode):
    """A block's layers as the user left them. Kills: a plan made at construction."""
    model = toy(block_config=(3,))
    other = twin(model, mode)
    for net in (model, other):
        block = net.features.denseblock1
        del block.denselayer3
    states = [
        training_state(net.features.denseblock1, images(4, 8, 8, 8), steps=2) for net in (model, other)
    ]
    assert states[0]["step 1: output"].shape[1] == 8 + 2 * 4
    assert_same(*states)


@each_mode
def test_parts_used_alone(mode):
    """A block in a user's own network, followed by anything."""

    class Network(nn.Module):
        def __init__(self, source):
            super().__init__()
            self.first, self.second = source.features.denseblock1, source.features.denseblock2
            self.between = nn.Conv2d(16, 8, 3, stride=2, dtype=torch.float64)

        def forward(self, x):
            return self.second(F.gelu(self.between(self.first(x)))).mean((2, 3))

    model = toy()
    torch.manual_seed(1)
    net = Network(model)
    torch.manual_seed(1)
    other = Network(twin(model, mode))
    assert_trains_like(net, other, images(4, 8, 9, 9), steps=2)


# --- graphs and compilers -------------------------------------------------------------------------------------------


@uses_jit
@each_mode
@pytest.mark.parametrize(
    "overrides", [{}, {"bn_size": None}, {"small_inputs": False}], ids=["cifar", "basic", "imagenet"]
)
def test_trace(mode, overrides):
    """Kills: checkpoints or autograd functions in a trace."""
    model = toy(mode, **overrides).eval()
    x = images(2, 3, 32, 32)
    traced = torch.jit.trace(model, x)
    other = images(3, 3, 32, 32)
    assert_same({"output": toy(**overrides).eval()(other)}, {"output": traced(other)})
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    assert_same({"output": model(other)}, {"output": torch.jit.load(file)(other)})


@uses_jit
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # torch's batch_norm looks at the batch size
@each_mode
def test_trace_in_training(mode):
    """A traced model trains too."""
    model = toy()
    other = twin(model, mode)
    state = other.state_dict()
    state = {name: value.clone() for name, value in state.items()}
    traced = torch.jit.trace(other, images(), check_trace=False)
    other.load_state_dict(state)  # tracing ran a forward
    assert_trains_like(model, traced, images())


@pytest.mark.parametrize("mode", ["naive", *MODES])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_symbolic_trace(mode, training):
    """The graph is the plain model's, and trains. Kills: a look at what stands for the input under torch.fx."""
    model = toy().train(training)
    assert_trains_like(model, torch.fx.symbolic_trace(twin(model, mode)), images(), steps=2)


@each_mode
def test_feature_extractor(mode):
    """torchvision cuts networks by torch.fx; a block that is a leaf keeps its mode. Kills: leaves that run plain."""
    model = toy()
    nodes = {"features.denseblock1": "low", "features.norm5": "high"}
    cut = create_feature_extractor(twin(model, mode), nodes, tracer_kwargs={"leaf_modules": [DenseBlock]})
    assert {block.plan().runs for block in cut.modules() if isinstance(block, DenseBlock)} == {mode}

    def parts(x):
        low = model.features[:2](x)
        return {"low": low, "high": model.features[2:](low)}

    outputs = parts(images()), cut(images())
    for found in outputs:
        sum(map(linear_loss, found.values())).backward()
    assert_same(outputs[0] | gradients(model.features), outputs[1] | gradients(cut.features))


@uses_jit
@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_script(mode, training):
    """As torchvision's DenseNet does. Kills: code that TorchScript cannot read on the way to the plain path."""
    model = toy().train(training)
    scripted = torch.jit.script(twin(model, mode))
    assert_trains_like(model, scripted, images(), steps=2)


@each_mode
def test_export(mode):
    """Kills: checkpoints or autograd functions in an exported graph; a batch size frozen into it."""
    model = toy(mode).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (images(),), dynamic_shapes=({0: batch},))
    for size in (4, 7):
        x = images(size, 3, 8, 8)
        assert_same({"output": toy().eval()(x)}, {"output": program.module()(x)})


# dynamo looks at the gradient of whatever passes a graph break, silently except where warnings are errors.
looks_at_gradients = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@looks_at_gradients
@each_mode
def test_compile(mode, compiler):
    """A compiled model trains, and is not compiled again in the second step. Kills: statistics lost by the compiler."""
    model = toy(block_config=(1, 1))
    other = twin(model, mode)
    compiled = torch.compile(other, backend="eager")
    for step in range(3):
        with compiler.config.patch(error_on_recompile=step > 0):
            assert_same(training_state(model, images()), compiled_state(other, compiled, 4))


@looks_at_gradients
def test_compile_for_changing_batch_sizes(compiler):
    """With AOT autograd, in training and eval. Kills: a graph for every batch size."""
    model = toy(block_config=(1, 1))
    other = twin(model, "auto")
    compiled = torch.compile(other, backend="aot_eager", dynamic=True)
    for size in (5, 9, 7):  # none of them a number of channels, to which the compiler would tie it
        with compiler.config.patch(error_on_recompile=size != 5):
            assert_same(training_state(model, images(size, 3, 8, 8)), compiled_state(other, compiled, size))
    with evaluation(model), evaluation(other), torch.no_grad():
        assert_same({"output": model(images())}, {"output": compiled(images())})


@each_mode
def test_functional_tensor_modes(mode):
    """FLOP counters and shape propagation: a dispatch mode and fake tensors go through, with the plain path's FLOPs."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for net in (toy(), toy(mode)):
        with FlopCounterMode(display=False) as counter:
            net(images())
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    with FakeTensorMode():
        model = DenseNet(**TOY, efficient=mode)
        model(torch.randn(4, 3, 8, 8)).sum().backward()
        assert model.features.conv0.weight.grad.shape == model.features.conv0.weight.shape


@each_mode
def test_meta_device(mode):
    """Shapes without memory: built, run and differentiated on ``meta``."""
    with torch.device("meta"):
        model = toy(mode, dtype=torch.float32)
        x = torch.empty(4, 3, 8, 8)
    output = model(x)
    assert output.shape == (4, 5)
    output.sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


# --- threads --------------------------------------------------------------------------------------------------------


def in_threads(*functions) -> None:
    """Run all at once; the first exception is raised here."""
    failures = []
    start = threading.Barrier(len(functions))

    def run(function):
        try:
            start.wait()
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def replicate(model: nn.Module, copies: int) -> list[nn.Module]:
    """What ``torch.nn.parallel.replicate`` does for GPUs: replicas whose parameters are not Parameters but computed.

    The first replica shares the model's buffers, the others have their own.
    """
    replicas = []
    for index in range(copies):
        made = {module: module._replicate_for_data_parallel() for module in model.modules()}
        for module, replica in made.items():
            for name, child in module._modules.items():
                replica._modules[name] = made[child] if child is not None else None
            for name, parameter in module._parameters.items():
                setattr(replica, name, None if parameter is None else parameter.clone())
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    replica._buffers[name] = buffer if index == 0 else buffer.clone()
        replicas.append(made[model])
    return replicas


@each_mode
@pytest.mark.parametrize(
    "overrides", [{}, {"bn_size": None}, {"small_inputs": False}], ids=["bottleneck", "basic", "imagenet_stem"]
)
def test_data_parallel_replicas(mode, overrides):
    """Two replicas at once in threads, a backward through both. Kills: shared storage or weights between replicas.

    The statistics of the model are those of the first replica.
    """

    def run(model):
        for step in range(3):
            x = images(6, 3, 16, 16, seed=step)
            replicas, outputs = replicate(model, 2), [None, None]
            assert not list(replicas[0].parameters())

            def forward(index):
                outputs[index] = replicas[index](x[3 * index : 3 * index + 3])

            in_threads(lambda: forward(0), lambda: forward(1))
            classification_loss(torch.cat(outputs)).backward()

    compare(run, mode, **overrides)


@each_mode
def test_copies_train_in_threads(mode):
    """Forward and backward at once, each thread its own model. Kills: module-level or class-level storage."""
    model = toy(drop_rate=0.0)
    expected = [training_state(twin(model, "naive"), images(seed=seed), steps=2) for seed in range(3)]
    found = [None] * 3
    copies = [twin(model, mode) for _ in range(3)]

    def train(index):
        found[index] = training_state(copies[index], images(seed=index), steps=2)

    in_threads(*[lambda index=index: train(index) for index in range(3)])
    for want, got in zip(expected, found, strict=True):
        assert_same(want, got)


@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_one_model_used_by_threads(mode, training):
    """Gradients taken at once from one model. Kills: per-module state of a forward that another thread overwrites."""
    model = toy().train(training)
    other = twin(model, mode)

    def gradient(net, seed):
        x = images(seed=seed).requires_grad_()
        return torch.autograd.grad(classification_loss(net(x)), [x, *net.parameters()])

    expected = [gradient(twin(model, "naive"), seed) for seed in range(3)]
    found = [[] for _ in range(3)]
    in_threads(*[lambda s=s: [found[s].append(gradient(other, s)) for _ in range(4)] for s in range(3)])
    for want, runs in zip(expected, found, strict=True):
        for got in runs:
            assert_same(dict(enumerate_names(want)), dict(enumerate_names(got)))


def enumerate_names(tensors):
    return ((str(index), tensor) for index, tensor in enumerate(tensors))


@each_mode
def test_backward_in_another_thread(mode):
    """Kills: state of a forward kept in thread-local storage."""
    model = toy()
    states = []
    for net in (model, twin(model, mode)):
        loss = classification_loss(net(images()))
        in_threads(loss.backward) if net is not model else loss.backward()
        states.append(gradients(net))
    assert_same(*states)


# --- failing in the middle ------------------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_training_goes_on_after_an_exception(mode, phase):
    """An interrupt or out of memory in the middle of a step. Kills: a guard left switched on."""
    model = toy()
    other = twin(model, mode)
    for net in (model, other):
        layer = net.features.denseblock2.denselayer1

        def fail(*args):
            raise KeyboardInterrupt

        if phase == "forward":
            handle = layer.conv2.register_forward_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                net(images())
            handle.remove()
        else:
            handle = layer.norm2.weight.register_hook(fail)
            loss = classification_loss(net(images()))
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
            handle.remove()
            del loss
    for (name, want), (_, got) in zip(model.named_buffers(), other.named_buffers(), strict=True):
        assert torch.allclose(want, got, rtol=0, atol=1e-12) or phase == "forward", name
    other.load_state_dict(model.state_dict())
    assert_trains_like(model, other, images(), steps=2)

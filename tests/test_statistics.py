"""BatchNorm in every efficient mode: running statistics to 1e-12, counters exactly, gradients for any parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers import (
    assert_as_accurate,
    assert_same,
    assert_trains_like,
    buffers,
    classification_loss,
    each_mode,
    evaluation,
    gradients,
    blocks,
    images,
    layers,
    linear_loss,
    norms,
    toy,
    training_state,
    twin,
)

MOMENTA = {
    "cumulative": lambda i: None,
    "zero": lambda i: 0.0,
    "one": lambda i: 1.0,
    "mixed": lambda i: (None, 0.0, 1.0, 0.3, 0.1)[i % 5],
}


@each_mode
@pytest.mark.parametrize("momentum", MOMENTA)
def test_momentum(mode, momentum):
    """Every norm its own. Kills: one momentum for all readers of a channel, ``None`` taken for 0 or 0.1."""
    model = toy(block_config=(3, 2))
    for index, norm in enumerate(norms(model).values()):
        norm.momentum = MOMENTA[momentum](index)
    assert_trains_like(model, twin(model, mode), images(), steps=3)


@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_epsilon_of_every_norm(mode, training):
    """From 1e-5 to 1, each norm its own. Kills: one reciprocal deviation for all readers of a channel."""
    model = toy(block_config=(3, 3)).train(training)
    for index, norm in enumerate(norms(model).values()):
        norm.eps = (1e-5, 1.0, 1e-3, 0.1, 1e-2)[index % 5]
    assert_trains_like(model, twin(model, mode), images(), steps=2)


KINDS = torch.tensor([0.0, 1e-6, -1e-6, -1.0, 30.0, 1e-12, 1.0])
GAMMAS = {
    "zero": lambda gamma: gamma.zero_(),
    "tiny": lambda gamma: gamma.fill_(1e-6),
    "negative": lambda gamma: gamma.abs_().neg_(),
    "some_tiny": lambda gamma: gamma[1::3].fill_(1e-6),
    "some_zero": lambda gamma: gamma[::2].zero_(),
    "all_kinds": lambda gamma: gamma.copy_(KINDS.repeat(len(gamma))[: len(gamma)]),
}


@each_mode
@pytest.mark.parametrize("which", ["norm1", "all"])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_gamma(mode, which, gamma):
    """Kills: gradients got by dividing by gamma, a sign lost in the mask, a channel dropped because its gamma is 0."""
    model = toy()
    for name, norm in norms(model).items():
        if which in name or which == "all":
            with torch.no_grad():
                GAMMAS[gamma](norm.weight)
    for training in (True, False):
        model.train(training)
        assert_trains_like(model, twin(model, mode), images())


@each_mode
@pytest.mark.parametrize("gamma", ["some_tiny", "all_kinds", "some_zero"])
def test_gamma_in_float32(mode, gamma):
    """The same where cancellation shows. Kills: dgamma from a difference that cancels when gamma is small."""
    model = toy(block_config=(3, 2), dtype=torch.float32)
    with torch.no_grad():
        for norm in norms(model).values():
            GAMMAS[gamma](norm.weight)
            norm.bias.normal_(0, 1)
    assert_trains_like(model, twin(model, mode), images().float(), tolerance=1e-3)


@each_mode
@pytest.mark.parametrize("beta", [0.0, -100.0, 100.0], ids=["zero", "nothing_passes", "everything_passes"])
def test_beta(mode, beta):
    """The rectifier's corners: nothing, everything. Kills: a mask rebuilt from another value than the forward's."""
    model = toy()
    with torch.no_grad():
        for norm in norms(model).values():
            norm.bias.fill_(beta)
    assert_trains_like(model, twin(model, mode), images())


EVALUATED = {
    "all": lambda name: True,
    "norm1": lambda name: name.endswith("norm1"),
    "norm2": lambda name: name.endswith("norm2"),
    "first_block": lambda name: "denseblock1" in name,
    "stem_and_transitions": lambda name: "block" not in name,
    "one_norm1": lambda name: name == "features.denseblock1.denselayer2.norm1",
    "one_norm2": lambda name: name == "features.denseblock2.denselayer1.norm2",
    "every_second_layer": lambda name: "denselayer2" in name,
    "final": lambda name: name == "features.norm5",
}


@each_mode
@pytest.mark.parametrize("part", EVALUATED)
def test_norms_in_eval_inside_a_training_model(mode, part):
    """Fine-tuning with frozen statistics. Kills: the model's flag asked instead of each norm's own."""
    model = toy()
    for name, norm in norms(model).items():
        if EVALUATED[part](name):
            norm.eval()
    before = buffers(model)
    other = twin(model, mode)
    assert_trains_like(model, other, images(), steps=2)
    for name, buffer in other.named_buffers():
        if EVALUATED[part](name.rpartition(".")[0]):
            assert torch.equal(buffer, before[name]), name


@each_mode
def test_norms_in_training_inside_an_eval_model(mode):
    """Re-estimating statistics under dropout switched off. Kills: the block's flag asked instead of each norm's own."""
    model = toy(drop_rate=0.3).eval()
    for index, norm in enumerate(norms(model).values()):
        norm.train(index % 2 == 0)
    assert_trains_like(model, twin(model, mode), images(), steps=2)


@each_mode
def test_layers_in_eval_inside_a_training_model(mode):
    """A layer's own flag decides its dropout and its norms."""
    model = toy(drop_rate=0.3, block_config=(3, 2))
    layers(model)[1].eval()
    layers(model)[3].eval()
    assert_trains_like(model, twin(model, mode), images(), steps=2)


@each_mode
@pytest.mark.parametrize("training_forwards", [1, 3])
def test_forward_without_backward_moves_statistics(mode, training_forwards):
    """Kills: statistics that move in the recomputation only."""
    model = toy()
    other = twin(model, mode)
    for forward in range(training_forwards):
        outputs = [net(images(seed=forward)) for net in (model, other)]
        assert outputs[1].requires_grad
        assert_same(buffers(model), buffers(other), tolerance=1e-12, running=1e-12)
    counters = [b for name, b in other.named_buffers() if name.endswith("num_batches_tracked")]
    assert counters and all(counter == training_forwards for counter in counters)


@each_mode
def test_statistics_move_in_the_forward_and_never_again(mode):
    """Kills: running statistics moved again by the backward, by a second backward or by a double backward."""
    model = toy(mode)
    x = images().requires_grad_()
    loss = classification_loss(model(x))
    after_forward = buffers(model)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    grad.square().sum().backward()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, after_forward[name]), name


@each_mode
def test_eval_outputs_after_training(mode):
    """What moved statistics twice would spoil: the evaluation. Kills the same, as users would see it."""
    model = toy()
    other = twin(model, mode)
    assert_trains_like(model, other, images(), steps=5)
    with evaluation(model), evaluation(other), torch.no_grad():
        assert_same({"output": model(images(seed=7))}, {"output": other(images(seed=7))})


@each_mode
@pytest.mark.parametrize("removed", ["affine", "running_statistics", "both", "counter"])
@pytest.mark.parametrize("which", ["norm1", "norm2", "all"])
def test_norms_without_parameters_or_statistics(mode, removed, which):
    """Kills: a norm taken for a standard one because its class is."""
    model = toy()
    for name, norm in norms(model).items():
        if which in name or which == "all":
            if removed in ("affine", "both"):
                norm.affine = False
                norm.register_parameter("weight", None)
                norm.register_parameter("bias", None)
            if removed in ("running_statistics", "both"):
                norm.track_running_stats = False
                norm.running_mean = norm.running_var = norm.num_batches_tracked = None
            if removed == "counter":
                norm.num_batches_tracked = None
    for training in (True, False):
        model.train(training)
        assert_trains_like(model, twin(model, mode), images())


@each_mode
@pytest.mark.parametrize("which", ["norm1", "norm2", "transition", "norm0", "norm5"])
def test_built_without_parameters_or_statistics(mode, which):
    """The same, built so by the user and put in the place of one norm."""
    for options in ({"affine": False}, {"track_running_stats": False}, {"momentum": None, "eps": 0.3}):
        model = toy()
        for name, norm in norms(model).items():
            if which in name:
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, nn.BatchNorm2d(norm.num_features, **options).double())
        assert_trains_like(model, twin(model, mode), images())


@each_mode
def test_tracking_switched_off_on_a_built_norm(mode):
    """torch then normalises with the batch and leaves the buffers alone, in training only."""
    model = toy()
    for norm in norms(model).values():
        norm.track_running_stats = False
    for training in (True, False):
        model.train(training)
        assert_trains_like(model, twin(model, mode), images(), steps=2)


@each_mode
@pytest.mark.parametrize("offset", [10.0, 1e3, 1e4])
def test_variance_under_a_large_mean(mode, offset):
    """As good as torch's own. Kills: the variance as the difference of two sums."""
    draws = []
    for seed in range(3):
        plain = toy(block_config=(3,), dtype=torch.float32, seed=seed)
        for norm in norms(plain).values():
            norm.momentum = 1.0
        nets = twin(plain, "naive").double(), plain, twin(plain, mode)
        x = images(4, 8, 16, 16, seed=seed).float() + offset
        dtypes = torch.float64, torch.float32, torch.float32
        draws.append(
            tuple(
                training_state(net.features.denseblock1, x.to(dtype), loss=linear_loss)
                for net, dtype in zip(nets, dtypes, strict=True)
            )
        )
    assert_as_accurate(*draws, factor=4)


@each_mode
def test_constant_channels(mode):
    """Variance zero: the gradient is finite and the plain path's."""
    model = toy()
    x = images()
    x[:, 1] = 0.7
    with torch.no_grad():
        model.features.conv0.weight[::2].zero_()
    assert_trains_like(model, twin(model, mode), x)


@each_mode
def test_not_a_number_stays_where_it_is(mode):
    """A NaN in one image reaches what it reaches in the plain path; nothing hides it."""
    model = toy().eval()
    x = images()
    x[2, 0, 3, 3] = float("nan")
    outputs = [net(x).isnan() for net in (model, twin(model, mode))]
    assert outputs[0].any() and torch.equal(*outputs)


@each_mode
@pytest.mark.parametrize("context", ["plain", "no_grad"])
def test_one_value_per_channel_is_an_error_in_training(mode, context):
    """torch refuses to take a variance of one value, and so does every mode."""
    model = toy()
    for net in (model, twin(model, mode)):
        with torch.set_grad_enabled(context == "plain"), pytest.raises(ValueError):
            net(images(1, 3, 2, 2))


@each_mode
def test_two_forwards_with_cumulative_average(mode):
    """``momentum=None`` divides by the counter of its own forward. Kills: a correction applied in the backward."""
    model = toy()
    for norm in norms(model).values():
        norm.momentum = None
    states = []
    for net in (model, twin(model, mode)):
        losses = [classification_loss(net(images(seed=seed))) for seed in (1, 2)]
        losses[0].backward()
        losses[1].backward()
        states.append({**gradients(net), **buffers(net)})
    assert_same(*states)


@each_mode
def test_statistics_moved_between_forward_and_backward(mode):
    """A forward that moves them between another forward and its backward leaves the latter's gradients as they were.

    Of ``norm1`` alone: torch's own norms, which the checkpoint mode calls for the rest, do read what has moved.
    Kills: running statistics that the backward reads from the module.
    """
    model = toy().eval()
    states = []
    for net, moved in ((model, False), (twin(model, mode), True)):
        loss = classification_loss(net(images()))
        if moved:
            for layer in layers(net):
                layer.norm1.train()
            net(images(seed=5) + 3)
        loss.backward()
        states.append(gradients(net))
    assert_same(*states)


@each_mode
def test_buffers_stay_the_same_tensors(mode):
    """DDP and optimizers' hooks hold on to them. Kills: buffers replaced instead of moved in place."""
    model = toy(mode)
    before = {name: (buffer, buffer.data_ptr()) for name, buffer in model.named_buffers()}
    classification_loss(model(images())).backward()
    for name, buffer in model.named_buffers():
        assert (buffer is before[name][0], buffer.data_ptr()) == (True, before[name][1]), name


@each_mode
@pytest.mark.parametrize("stem", ({}, {"small_inputs": False}), ids=("first layer", "stem"))
def test_statistics_of_half_precision_features_are_taken_in_single(mode, stem):
    """Kills: products that autocast rounds on the way to a mean."""
    plain = toy(dtype=torch.float32, growth_rate=3, num_init_features=6, **stem)  # widths that no vector kernel takes
    model = twin(plain, mode)
    x = images(4, 3, *(32 if stem else 9,) * plain.spatial_dims, dtype=torch.float32) + 3
    with torch.autocast("cpu", torch.bfloat16):
        plain(x), model(x)
    name = "features.norm0" if stem else "features.denseblock1.denselayer1.norm1"  # reads the same numbers in both
    for buffer in ("running_mean", "running_var"):
        want, got = (m.get_submodule(name).get_buffer(buffer) for m in (plain, model))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@each_mode
def test_eps_of_zero_is_what_torch_makes_of_it(mode):
    """Kills: numbers where the plain model raises."""
    plain = toy()
    layers(plain)[1].norm1.eps = 0.0
    outcomes = []
    for model in (plain, twin(plain, mode)):
        try:
            outcomes.append(model(images()).detach())
        except (RuntimeError, ValueError) as error:
            outcomes.append(str(error))
    assert type(outcomes[0]) is type(outcomes[1])
    assert outcomes[0] == outcomes[1] if isinstance(outcomes[0], str) else torch.allclose(*outcomes)


@each_mode
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_what_is_no_number_goes_where_it_goes_in_the_plain_model(mode, value, training):
    """In the model's input, and in that of a block called alone. Kills: a mean from differences to an infinite mean."""
    for overrides in ({}, {"bn_size": None}, {"small_inputs": False}, {"spatial_dims": 1}):
        found = []
        for net in (toy(**overrides), toy(mode, **overrides)):
            x, features = images(3, 3, *(16,) * net.spatial_dims), images(3, 8, *(6,) * net.spatial_dims)
            x.view(-1)[5] = features.view(-1)[5] = value
            net.train(training)
            state = {"block": blocks(net)[0](features).detach(), **buffers(net)}
            found.append({**state, "model": net(x).detach(), **{f"then {k}": v for k, v in buffers(net).items()}})
        for name, want in found[0].items():
            got = found[1][name]
            assert torch.equal(want.isnan(), got.isnan()) and torch.equal(want.isinf(), got.isinf()), name
            assert torch.equal(want[want.isinf()], got[want.isinf()]), name


@pytest.mark.parametrize("mode", ["fused", "lean"])
def test_a_transition_pools_large_half_precision_numbers(mode):
    """17,000 behind the rectifier: four of them are no fp16 number, their mean is. Kills: a window summed in fp16."""
    found = []
    for dtype, asked in ((torch.float64, "naive"), (torch.float16, mode)):
        net = toy(asked, dtype=dtype, block_config=(1, 1)).eval()
        norm = net.features.transition1.norm
        with torch.no_grad():
            norm.weight.zero_(), norm.bias.fill_(17000.0)
            net.features.transition1.conv.weight.fill_(1 / 16)
        block, tail = net.features.denseblock1, net.features.transition1
        closed = block.closed_by(images(2, 8, 8, 8).to(dtype), tail) if asked != "naive" else None
        found.append(closed[0] if closed else tail(block(images(2, 8, 8, 8).to(dtype))))
    assert found[1].dtype == torch.float16 and found[1].isfinite().all()
    assert (found[1].double() - found[0]).abs().max() <= 2e-3 * found[0].abs().max()

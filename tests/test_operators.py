"""A dense block as two operators: one graph under ``torch.compile``, the plain model's numbers, and what a graph allows."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn

from efficient_densenet import DenseNet
from efficient_densenet.ops import dense_block
from helpers import (
    assert_as_accurate, assert_same, blocks, compiled_state, each_mode, images, layers, linear_loss, toy,
    training_state, twin,
)  # fmt: skip


def frozen(model):
    for p in layers(model)[0].parameters():
        p.requires_grad_(False)


def frozen_norms(model):
    """In evaluation mode, some of them: they take running statistics, the others the batch's."""
    layers(model)[0].norm2.eval()
    layers(model)[1].norm1.eval()


def cumulative(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None


SETTINGS = {
    "plain": {},
    "drop_rate": {"drop_rate": 0.3},
    "no bottleneck": {"bn_size": None},
    "imagenet stem": {"small_inputs": False},
    "two blocks": {"block_config": (2, 1)},
    "frozen": frozen,
    "frozen norms": frozen_norms,
    "cumulative": cumulative,
    "evaluation": lambda model: model.eval(),
}


def changed(setting: str) -> DenseNet:
    how = SETTINGS[setting]
    model = toy(**{"block_config": (2,), **(how if isinstance(how, dict) else {})})
    if not isinstance(how, dict):
        how(model)
    return model


@pytest.mark.parametrize("mode", ["fused", "lean"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_one_graph(mode, setting, compiler):
    """No graph break, the plain model's numbers. Kills: statistics that move inside or not at all, dropout drawn in the
    operator, gradients of what is frozen."""
    model = changed(setting)
    size = 32 if setting == "imagenet stem" else 8
    other = twin(model, mode)
    assert not any(plan.graph_break for plan in other.execution_plan())
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    x = images(4, 3, size, size)
    assert_same(training_state(model, x), training_state(other, x, forward=lambda net, x: compiled(x)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_all_batches(backend, compiler):
    """With the fake implementations. Kills: a graph for every batch size; wrong shapes of fakes."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor compiles with g++")
    model = toy(block_config=(2, 1))
    other = twin(model, "fused")
    compiled = torch.compile(other, backend=backend, fullgraph=True, dynamic=True)
    for size in (5, 9, 7):  # none of them a number of channels, to which the compiler would tie it
        with compiler.config.patch(error_on_recompile=size != 5):
            assert_same(training_state(model, images(size, 3, 8, 8)), compiled_state(other, compiled, size))


@pytest.mark.parametrize(("part", "channels"), [("denseblock1", 8), ("transition1", 16)])
def test_a_part_alone_trains_compiled(part, channels, compiler):
    """Kills: no gradient for an argument that is an empty list, which torch takes for one of tensors."""
    model = toy()
    own, other = (getattr(net.features, part) for net in (model, twin(model, "fused")))
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    x = images(5, channels, 8, 8)
    assert_same(training_state(own, x), training_state(other, x, forward=lambda net, x: compiled(x)))


def test_one_graph_under_autocast(compiler):
    """No less exact than the plain model, in its types. Kills: types taken from the weights while tracing."""
    model, x = toy(dtype=torch.float32), images().float()
    other = twin(model, "fused")
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    exact = training_state(copy.deepcopy(model).double(), x.double(), loss=linear_loss)

    def state(net, run):
        def forward(net, x):
            with torch.autocast("cpu", torch.bfloat16):
                return run(x)

        return training_state(net, x, forward=forward, loss=linear_loss)

    assert_as_accurate((exact, state(model, model), state(other, compiled)))


def recorded(model: nn.Module, x: torch.Tensor) -> dict[str, tuple]:
    """The arguments of both operators in a compiled training step."""
    calls = {}

    class Recording(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "efficient_densenet" and function not in calls:
                calls[function] = tuple(
                    [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in a]
                    if isinstance(a, list) else a.detach().clone() if isinstance(a, torch.Tensor) else a
                    for a in args
                )  # fmt: skip
            return function(*args, **(kwargs or {}))

    def backend(graph, _):
        def run(*args):
            with Recording():
                return graph(*args)

        return run

    loss = torch.compile(model, backend=backend, fullgraph=True)(x).sum()
    if loss.requires_grad:
        with Recording():
            loss.backward()
    return calls


CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


@pytest.mark.parametrize("mode", ["fused", "lean"])
@pytest.mark.parametrize("setting", [*SETTINGS, "3-D", "bfloat16"])
def test_operators_say_what_they_do(mode, setting, compiler):
    """torch's own checks: nothing is written to, results are as the fakes say. Kills: results of memory nobody wrote,
    which a graph would take for those of another call."""
    size = (3, 32, 32) if setting == "imagenet stem" else (3, 8, 8)
    dtype = torch.float64
    if setting == "3-D":
        model, size = toy(block_config=(2,), spatial_dims=3), (3, 4, 4, 6)
    elif setting == "bfloat16":
        model, dtype = toy(block_config=(2,), dtype=torch.bfloat16), torch.bfloat16
    else:
        model = changed(setting)
    calls = recorded(model.set_efficient(mode), images(4, *size, dtype=dtype))
    names = {function.name().partition("::")[2] for function in calls}
    assert names == {"block", "block_backward"}
    for function, args in calls.items():
        torch.library.opcheck(function, args, test_utils=CHECKS)


def test_second_derivatives_are_refused(compiler):
    """Kills: a gradient's gradient that is silently zero."""
    model = toy("fused", block_config=(2,))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = images().requires_grad_()
    (first,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of a compiled dense block"):
        first.square().sum().backward()


@each_mode
def test_the_plan_names_what_breaks_the_graph(mode):
    model = toy(mode)
    wanted = "checkpointed" if mode == "checkpoint" else ""
    assert {plan.graph_break for plan in model.execution_plan()} == {wanted}
    assert {plan.graph_break for plan in toy("naive").execution_plan()} == {""}
    conv = layers(model)[1].conv2
    conv.bias = nn.Parameter(torch.zeros(conv.out_channels, dtype=torch.float64))
    first, second = model.execution_plan()
    assert first.graph_break == (wanted or "convolutions with a bias") and second.graph_break == wanted


# CUDA graphs


@pytest.mark.parametrize("mode", ["fused", "lean"])
@pytest.mark.parametrize("again", [False, True], ids=["backward", "twice differentiated"])
def test_nothing_reads_or_sets_a_generator_s_state_in_a_captured_step(mode, again, monkeypatch):
    """Which no stream that is being captured allows. Kills: dropout that could be drawn again in eager mode alone."""
    model = toy(drop_rate=0.4)
    other = twin(model, mode)

    def step(net):
        torch.manual_seed(3)
        x = images().requires_grad_()
        loss = net(x).square().sum()
        if again:
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = gradient.square().sum()
        loss.backward()
        return {"loss": loss.detach(), "input.grad": x.grad, **{n: p.grad for n, p in net.named_parameters()}}

    expected = step(model)

    def refused(*args, **kwargs):
        raise RuntimeError("not while a stream is captured")

    monkeypatch.setattr(dense_block, "_is_captured", lambda device: True)
    monkeypatch.setattr(dense_block, "_random_state", refused)
    monkeypatch.setattr(torch.random, "fork_rng", refused)
    assert_same(expected, step(other))
    assert {plan.runs for plan in other.execution_plan()} == {mode} and blocks(other)

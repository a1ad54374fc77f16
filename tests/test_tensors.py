"""Tensors of other kinds than plain, strided, floating ones: naive's result in every mode, or naive's error."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.ao import quantization
from torchvision import tv_tensors

from efficient_densenet import DenseNet
from efficient_densenet.ops.modules import why_plain
from helpers import TOY, assert_same, blocks, buffers, each_mode, gradients, images, toy, twin

# --- quantised models -----------------------------------------------------------------------------------------------


class Quantised(nn.Module):
    """As torch's tutorial on eager quantisation has it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.quantise, self.model, self.dequantise = quantization.QuantStub(), model, quantization.DeQuantStub()

    def set_efficient(self, mode):
        self.model.set_efficient(mode)

    def forward(self, x):
        return self.dequantise(self.model(self.quantise(x)))


@pytest.fixture
def engine():
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this build of torch cannot quantise")
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, "fbgemm"
    yield
    torch.backends.quantized.engine = before


def quantises(test):
    for message in (
        "torch.ao.quantization is deprecated:DeprecationWarning",  # and is still what eager quantisation is
        "Please use quant_min and quant_max:UserWarning",  # torch says so of its own default settings
        "torch.quantize_per_tensor, torch.quantize_per_channel and other:UserWarning",  # deprecated likewise
        "All inputs of this cat operator must share:UserWarning",  # observed where they were made, as in any DenseNet
    ):
        test = pytest.mark.filterwarnings(f"ignore:{message}")(test)
    return pytest.mark.usefixtures("engine")(test)


@quantises
@each_mode
@pytest.mark.parametrize("trained", [False, True], ids=["calibrated", "trained"])
@pytest.mark.parametrize("small_inputs", [True, False], ids=["cifar", "imagenet"])
def test_quantised_models(mode, trained, small_inputs):
    """Eagerly, after calibration and after training. Kills: a shared buffer for tensors with scales of their own."""
    model = Quantised(toy(dtype=torch.float32, small_inputs=small_inputs)).train(trained)
    if trained:
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        naive = quantization.prepare_qat(model)
    else:
        model.qconfig = quantization.default_qconfig  # observes ranges; a histogram's bins turn on a rounding
        naive = quantization.prepare(model)
    x = images(4, 3, 32, 32, dtype=torch.float32)
    observed = []
    other = twin(naive, mode)
    for net in (naive, other):
        output = net(x)
        if trained:
            output.square().sum().backward()
        observed.append({"output": output.detach(), **gradients(net), **buffers(net)})
    assert_same(*observed, tolerance=1e-3, running=1e-4)  # float32, where rounding to steps magnifies rounding

    other = copy.deepcopy(naive)
    other.set_efficient(mode)
    naive, other = quantization.convert(naive.eval()), quantization.convert(other.eval())
    assert torch.equal(naive(x), other(x))
    for plan in other.model.execution_plan():
        assert plan.runs == "naive" and "norm1 is a quantised BatchNorm2d" in plan.reason


# --- layouts and types of numbers -----------------------------------------------------------------------------------

KINDS = {
    "torch.int64": lambda x: x.long(),
    "torch.bool": lambda x: x > 0,
    "torch.complex64": lambda x: torch.complex(x, x),
    "torch.float8_e5m2": lambda x: x.to(torch.float8_e5m2),
    "torch.quint8": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    "torch.sparse_coo": lambda x: x.to_sparse(),
    "torch._mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1, :, 1:]]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel and other:UserWarning")
@each_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_other_kinds(mode, training, kind):
    """The model, and a block alone. Kills: efficient code for what it was not made for."""
    x = images(2, 8, 6, 6, dtype=torch.float32)
    assert kind in why_plain(KINDS[kind](x))
    for called, given in ((blocks, KINDS[kind](x)), (lambda model: [model], KINDS[kind](x[:, :3]))):
        outcomes = []
        for chosen in ("naive", mode):
            model = toy(chosen, dtype=torch.float32).train(training)
            try:
                outcomes.append(called(model)[0](given))
            except (RuntimeError, NotImplementedError, TypeError) as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1] if isinstance(outcomes[0], tuple) else torch.equal(*outcomes)


# --- subclasses -----------------------------------------------------------------------------------------------------


class Named(torch.Tensor):
    """Carries a name through every function, and notes which they were."""

    calls: list = []  # noqa: RUF012 - one list for all

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func)
        found = super().__torch_function__(func, types, args, kwargs)
        if isinstance(found, Named):
            given = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
            found.name_ = next((a.name_ for a in given if hasattr(a, "name_")), "nameless")
        return found


class Torchs(torch.Tensor):
    """Knows torch's functions, and no other's."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if not (getattr(func, "__module__", None) or "torch").startswith("torch"):
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs)


class Wrapped(torch.Tensor):
    """Holds another tensor, and sees every operation, as a DTensor does."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, requires_grad=held.requires_grad
        )

    def __init__(self, held):
        self.held = held.detach()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(value):
            return value.held if isinstance(value, Wrapped) else value

        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


def named(x):
    x = x.as_subclass(Named)
    x.name_ = "Ada"
    return x


def plain(x):
    x = x.held if isinstance(x, Wrapped) else x
    return x.detach().as_subclass(torch.Tensor)


SUBCLASSES = {
    "named": named,
    "torch's": lambda x: x.as_subclass(Torchs),
    "tv_tensors": lambda x: tv_tensors.Image(x),
    "wrapped": Wrapped,
}
PARTS = {
    "model": lambda model, x: model(x),
    "forward_features": lambda model, x: model.forward_features(x),
    "features": lambda model, x: model.features(x),
    "block": lambda model, x: blocks(model)[0](model.features.conv0(x)),
    "transition": lambda model, x: model.features.transition1(blocks(model)[0](model.features.conv0(x))),
    "1d": lambda model, x: model(x[..., 0]),
    "imagenet": lambda model, x: model(x),
}


@each_mode
@pytest.mark.parametrize(
    ("kind", "part", "training"),
    [
        *(("named", part, True) for part in PARTS),
        *((kind, part, True) for kind in SUBCLASSES if kind != "named" for part in ("model", "block")),
        *((kind, "imagenet", False) for kind in SUBCLASSES),
    ],
)
def test_inputs_of_other_types(mode, kind, part, training):
    """Type, what it carries, and numbers are the plain model's. Kills: an autograd function that types do not survive,
    and one that a type which computes by itself never sees."""
    overrides = {"1d": {"spatial_dims": 1}, "imagenet": {"small_inputs": False}}.get(part, {})
    model = toy(**overrides).train(training)
    states = []
    for net in (model, twin(model, mode)):
        x = images(4, 3, 8, 8).requires_grad_()
        output = PARTS[part](net, SUBCLASSES[kind](x))
        carried = type(output), getattr(output, "name_", None)
        if kind != "wrapped":  # the toy has no gradients
            output.as_subclass(torch.Tensor).square().sum().backward()
        states.append((carried, {"output": plain(output), "x": x.grad, **gradients(net), **buffers(net)}))
    assert states[0][0] == states[1][0]
    assert_same(states[0][1], states[1][1])


@pytest.mark.parametrize("mode", ["fused", "lean"])
def test_a_block_is_one_function_to_a_type(mode):
    """By torch's protocol. Kills: a hand-over to the plain path, which would cost a subclass all the memory."""
    Named.calls.clear()
    toy(mode, small_inputs=False)(named(images(4, 3, 16, 16)))
    names = [getattr(func, "__name__", "") for func in Named.calls]
    assert names.count("fused_block") == 2 and names.count("norm_relu_max_pool") == 1
    assert "batch_norm" not in names and "cat" not in names


class Special(nn.Parameter):
    """A type of its own that overrides nothing."""


def with_parameters(model, wrap):
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = wrap(parameter.detach())
    return model


@each_mode
@pytest.mark.parametrize("kind", ["special", "named"])
def test_parameters_of_other_types(mode, kind):
    """Kills: exact types, where nothing is overridden; and functions that do not ask a type that overrides them."""
    wrap = Special if kind == "special" else lambda p: named(p).requires_grad_()
    states = []
    for chosen in ("naive", mode):
        model = with_parameters(toy(chosen), wrap)
        output = model(images())
        output.as_subclass(torch.Tensor).square().sum().backward()
        states.append(
            ({"output": plain(output), **{n: plain(p.grad) for n, p in model.named_parameters()}}, type(output))
        )
    assert_same(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]
    for plan in model.execution_plan():
        assert plan.runs == (mode if kind == "special" else "checkpoint")


@each_mode
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("small_inputs", [True, False], ids=["cifar", "imagenet"])
def test_fake_tensors(mode, inside, small_inputs):
    """They plan and step like real ones. Kills: a question about values, and real tensors among them."""
    fake = FakeTensorMode()
    with fake:
        model = DenseNet(**{**TOY, "small_inputs": small_inputs}, efficient=mode)
        x = torch.randn(4, 3, 32, 32)
    assert {(plan.runs, plan.reason) for plan in model.execution_plan()} == {(mode, "")}
    with fake if inside else contextlib.nullcontext():
        model(x).sum().backward()
    assert {type(p.grad) for p in model.parameters()} == {FakeTensor}

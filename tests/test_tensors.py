"""Tensors of other kinds than plain, strided, floating ones: naive's result in every mode, or naive's error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.ao import quantization

from efficient_densenet.ops.modules import why_plain
from helpers import assert_same, blocks, buffers, each_mode, gradients, images, toy, twin

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
        model.qconfig = quantization.default_qconfig  # whose observers note ranges; a histogram's bins turn on a rounding
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

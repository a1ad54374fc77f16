"""Every Triton kernel in Triton's interpreter, against the passes by plain operations. Run by test_kernels.py.

In a process of its own: Triton has to know before it is imported.
"""

import interpreting  # noqa: F401 - first

import warnings
from dataclasses import replace

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from efficient_densenet.ops import costs, device
from efficient_densenet.ops.passes import launch, proof, reference, tiles, triton
from efficient_densenet.ops.passes.proof import CASES, ODD, Shape, disagreement
from efficient_densenet.ops.tiles import Scratch

# NumPy's word on infinities that the kernels are meant to pass on.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
CPU = torch.device("cpu")
LOW = (torch.float32, torch.bfloat16, torch.float16)

SHAPES = {
    "odd": ODD,
    # Several chunks of every kind: of 32 channels read, of the width, of the channels written.
    "chunks": Shape(n=1, sizes=(4, 5), channels=37, width=40, k=36, taps=(1, 3), pad=3),
    "all": Shape(
        n=2, sizes=(4, 6), channels=24, width=16, k=8, pad=8, first=8, bias=True, dropout=True, channels_last=True,
        pool=(2, 3), stem=((2, 3), (1, 2), (0, 1), (2, 1)), ceil_mode=True,
    ),
    "first": Shape(n=1, sizes=(3, 5), channels=21, first=3, batch=False, pad=0),
    "volume": Shape(
        n=2, sizes=(2, 3, 4), channels=10, width=8, k=4, taps=(3, 3, 3), pad=2, pool=(2, 2, 2),
        stem=((1, 2, 3), (1, 2, 2), (0, 1, 1), (1, 1, 1)),
    ),
    "line": Shape(n=3, sizes=(1, 7), channels=6, width=5, k=2, taps=(1, 3), pad=1, pool=(1, 2)),
    "one row": Shape(n=1, sizes=(1, 1), channels=5, width=4, k=3, pool=(1, 1)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def trusted(monkeypatch, request):
    """The kernels as they are: what does not prove itself is not replaced."""
    torch.set_num_threads(1)
    if "proving" not in request.keywords:
        monkeypatch.setattr(proof, "holds", lambda *args: True)


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Of every launch: that its loads ask for as many bytes as it says. Kills: a mask that the formula does not know."""
    asked, load, run = [], InterpreterBuilder.create_masked_load, launch.run

    def seen(self, pointers, mask, *args):
        value = load(self, pointers, mask, *args)
        asked.append(int(mask.data.sum()) * value.data.dtype.itemsize)
        return value

    def checked(what):
        asked.clear()
        run(what)
        assert sum(asked) == what.loaded, what

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", seen)
    monkeypatch.setattr(launch, "run", checked)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_every_pass_in_float64(name, shape):
    """Kills: a tail of channels or rows that is summed or written; a swapped tap; a short part taken for a full one."""
    assert disagreement(name, triton, torch.float64, CPU, SHAPES[shape]) is None


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_low_precision_is_as_accurate(name, dtype):
    """The error against float64 is at most twice that of the plain operations in the same type.

    Kills: a product or a sum in half precision.
    """
    shape = replace(ODD, taps=(1, 3)) if "conv3x3" in name else SHAPES["chunks"]
    if name == "conv1x1_forward":
        shape = replace(shape, channels=300)  # so that it shows
    exact, plain, found = (
        CASES[name](passes, proof._Values(dtype, CPU, wide), Scratch(CPU), shape)
        for passes, wide in ((reference, True), (reference, False), (triton, False))
    )
    floor = torch.finfo(dtype).eps / (2 if dtype == torch.float32 else 8)  # few numbers, each a rounding or two off
    for key, want in exact.items():
        want = want.nan_to_num(0.0)
        size = max(want.norm().item(), 1e-6)
        own, theirs = ((values[key].double().nan_to_num(0.0) - want).norm().item() for values in (plain, found))
        assert theirs / size + floor <= 2 * (own / size + floor), key
        assert torch.equal(found[key].isnan(), plain[key].isnan()), key


NUMBERS = (
    "conv1x1_forward", "conv3x3_forward", "conv1x1_backward", "norm_relu_backward", "norm_relu_max_pool",
    "norm_relu_max_pool_backward",
)  # fmt: skip


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")), ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_goes_where_it_goes_in_the_plain_model(monkeypatch, name, value):
    """Kills: a maximum that swallows NaN; a mask ``z > 0``; an infinity times zero in a tail."""
    draw = proof._Values.matrix

    def matrix(self, *args):
        view = draw(self, *args)
        if view.shape[0] > 9 and view.shape[1] > 3:
            view[9, 3] = value
        return view

    monkeypatch.setattr(proof._Values, "matrix", matrix)
    assert disagreement(name, triton, torch.float64, CPU, replace(ODD, first=0)) is None


@pytest.mark.proving
def test_a_kernel_that_proves_wrong_is_left_alone(monkeypatch):
    """Kills: a verdict nobody asks for; one that is asked again and again; a wrong number."""
    monkeypatch.setattr(proof, "_verdicts", {})
    tried = []
    attempt = proof._try
    monkeypatch.setattr(proof, "_try", lambda *args: tried.append(args) or attempt(*args))
    wrong = launch.norm_relu
    monkeypatch.setattr(launch, "norm_relu", lambda x, scale, shift, out: wrong(x, scale, -shift, out))
    v = proof._Values(torch.float32, CPU, False)
    x, norm = v.matrix(8, 5), v.norm(5)
    out, want = torch.empty_like(x), torch.empty_like(x)
    with pytest.warns(UserWarning, match="norm_relu are not used for torch.float32 on cpu, but torch's"):
        triton.norm_relu(x, norm, out, Scratch(CPU))
    tiles.norm_relu(x, norm, want, Scratch(CPU))
    assert torch.equal(out, want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        triton.norm_relu(x, norm, out, Scratch(CPU))
    assert [args[0] for args in tried] == ["norm_relu"]
    assert "differs" in proof.verdicts(CPU)["norm_relu", torch.float32]


@pytest.mark.proving
def test_a_kernel_that_does_not_compile_is_left_alone(monkeypatch):
    monkeypatch.setattr(proof, "_verdicts", {})

    def refuse(*args):
        raise launch.Failed("norm_relu: no registers")

    x = torch.randn(8, 5)
    norm = proof._Values(torch.float32, CPU, False).norm(5)
    out, want = torch.empty_like(x), torch.empty_like(x)
    triton.norm_relu(x, norm, out, Scratch(CPU))  # proves itself
    monkeypatch.setattr(launch, "norm_relu", refuse)  # and fails on another shape
    with pytest.warns(UserWarning, match="no registers"):
        triton.norm_relu(x, norm, out, Scratch(CPU))
    tiles.norm_relu(x, norm, want, Scratch(CPU))
    assert torch.equal(out, want)


def test_sums_are_added_up_without_their_kernel(monkeypatch):
    """Kills: taps or bias in other places than the kernel's."""

    def refuse(*args):
        raise launch.Failed("finish_gradient: no registers")

    monkeypatch.setattr(launch, "finish_gradient", refuse)
    assert disagreement("conv3x3_backward", triton, torch.float64, CPU, SHAPES["all"]) is None


def test_a_dispatch_mode_sees_every_launch_and_fake_tensors_need_none():
    """Kills: a kernel that counts do not see; one that asks a fake tensor for its address."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "efficient_densenet":
                self.names.append(function._schema.name.partition("::")[2])
            return function(*args, **(kwargs or {}))

    def step(v):
        return CASES["conv1x1_backward"](triton, v, Scratch(CPU), replace(ODD, channels=16, pad=0))

    with Seen() as real:
        step(proof._Values(torch.float32, CPU, False))
    with FakeTensorMode(allow_non_fake_inputs=True), Seen() as fake:
        step(proof._Values(torch.float32, CPU, False))
    assert real.names == fake.names == ["product_gradient", "finish_and_product"]


def test_what_is_only_written_does_not_count_as_read():
    """Kills: outputs and partial sums that count twice; features that count where no correction reads them."""
    cost = costs.COSTS["efficient_densenet::correct"]
    (x, g, out), vector = (torch.empty(6, 4) for _ in range(3)), torch.empty(4)
    assert cost(x, g, None, vector, vector, vector, out).read == 2 * 6 * 4 * 4 + 3 * 4 * 4
    assert cost(x, g, None, None, None, None, g).read == 6 * 4 * 4


def _toy(mode: str, dtype: torch.dtype, **overrides):
    from helpers import toy

    return toy(mode, dtype=dtype, growth_rate=3, block_config=(2, 1), num_init_features=5, bn_size=2, **overrides)


@pytest.mark.parametrize("mode, small_inputs", [("checkpoint", True), ("fused", False), ("lean", True)])
def test_a_training_step(mode, small_inputs):
    """A whole model on kernels, with stem, transition and final norm: outputs, gradients, buffers as the plain model's.

    Rows of features are aligned, as on a GPU. Kills: a pass that leaves to the next what its kernel did not write.
    """
    from helpers import assert_same, images, training_state

    x = images(3, 3, 6, 5) if small_inputs else images(2, 3, 17, 14)
    want = training_state(_toy("naive", torch.float64, small_inputs=small_inputs), x)
    with device.assume(replace(device.describe(CPU), row_bytes=32)):
        assert_same(want, training_state(_toy(mode, torch.float64, small_inputs=small_inputs), x))


@pytest.mark.parametrize("mode", ["fused", "lean"])
@pytest.mark.parametrize("kind", ["Tiramisu's", "bottleneck", "1-D"])
def test_layers_of_ones_own(kind, mode):
    """With biases, dropout of values and of channels, new features first, and alone: numbers as in the plain loop.

    Kills: a kernel that takes features for the first columns, or dropout's factors for one of each value.
    """
    from helpers import assert_trains_like
    from test_functional import pair

    plain, other, x = pair(kind, mode, new_first=True, output="new")
    assert_trains_like(plain, other, x)


@pytest.mark.parametrize("mode", ["fused", "lean"])
def test_a_step_launches_what_is_counted(mode, monkeypatch):
    """Kernels launched on real tensors and counted on a GPU that is not there. Kills: a count of another path."""
    from helpers import images

    from efficient_densenet.memory import count_step

    names, run = [], launch.run
    monkeypatch.setattr(launch, "run", lambda what: (names.append(what.kernel), run(what)))
    x = images(2, 3, 4, 4).float()
    _toy(mode, torch.float32)(x).sum().backward()
    monkeypatch.setenv("EFFICIENT_DENSENET_KERNELS", "")
    counted = count_step(_toy(mode, torch.float32), x, torch.sum, "cuda").operators
    launches = {name: 0 for name in names}
    for (_, name), traffic in counted.items():
        if name.startswith("efficient_densenet::"):
            launches[name.partition("::")[2]] = launches.get(name.partition("::")[2], 0) + traffic.launches
    assert launches == {name: names.count(name) for name in names}

"""``dense_block``: layers of one's own, as the loop that concatenates them, in every mode."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from helpers import assert_as_accurate, assert_same, assert_trains_like, each_mode, images, linear_loss, training_state
from torch import Tensor, nn

from efficient_densenet import dense_block
from efficient_densenet.memory import measure_step
from efficient_densenet.models import DenseLayer
from efficient_densenet.ops import dense_block as op

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
each_output = pytest.mark.parametrize("output", ["all", "new"])
each_order = pytest.mark.parametrize("new_first", [False, True], ids=["behind", "first"])


class Net(nn.Module):
    """A dense block in a ``forward`` of its own, as a loop where there is no mode."""

    def __init__(self, layers, mode=None, new_first=False, output="all"):
        super().__init__()
        self.layers, self.mode = nn.ModuleList(layers), mode
        self.new_first, self.output = new_first, output

    def forward(self, x: Tensor) -> Tensor:
        if self.mode is not None:
            return dense_block(x, self.layers, self.mode, self.new_first, self.output)
        new = []
        for layer in self.layers:
            y = layer(x)
            x = torch.cat([y, x] if self.new_first else [x, y], 1)
            new.append(y)
        return x if self.output == "all" else torch.cat(new[::-1] if self.new_first else new, 1)


def layers(channels=5, growth=(3, 2, 4), dims=2, width=0, bias=True, dropout=None, nested=False, seed=0):
    """Layers none of whose values is a neutral 0 or 1; ``width``: of a bottleneck, if there is one."""
    torch.manual_seed(seed)
    norm, conv = NORMS[dims - 1], CONVS[dims - 1]
    found = []
    for k in growth:
        parts = [norm(channels), nn.ReLU(inplace=True)]
        if width:
            parts += [conv(channels, width, 1, bias=bias), norm(width), nn.ReLU()]
        parts.append(conv(width or channels, k, 3, padding=1, bias=bias))
        if nested:
            parts = [nn.Sequential(*parts[:3]), nn.Sequential(nn.Sequential(*parts[3:]), nn.Identity())]
        found.append(nn.Sequential(*parts, *([] if dropout is None else [dropout(0.3)])))
        channels += k
    for module in nn.ModuleList(found).double().modules():
        if isinstance(module, NORMS):
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5)[::3].neg_()
                module.bias.normal_(0, 0.3)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 1.5)
    return found


KINDS = {
    "Tiramisu's": ({"dropout": nn.Dropout2d}, (2, 5, 4, 6)),
    "bottleneck": ({"width": 6, "dropout": nn.Dropout, "nested": True}, (3, 5, 4, 4)),
    "bottleneck, no bias": ({"width": 6, "bias": False, "dropout": nn.Dropout2d}, (2, 5, 4, 4)),
    "1-D": ({"dims": 1, "width": 4, "dropout": nn.Dropout1d}, (3, 5, 7)),
    "3-D": ({"dims": 3, "dropout": nn.Dropout3d}, (2, 5, 3, 4, 3)),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def pair(kind: str, mode: str, new_first: bool = False, output: str = "all") -> tuple[Net, Net, Tensor]:
    """The loop, the function on the same weights, and images."""
    made, shape = KINDS[kind]
    plain = Net(layers(**made), None, new_first, output)
    other = copy.deepcopy(plain)
    other.mode = mode
    return plain, other, images(*shape)


@each_output
@each_order
@each_mode
@each_kind
def test_it_trains_like_the_loop(kind, mode, new_first, output):
    """Kills: a bias that moves no running mean, or is in no gradient; another draw of dropout; suffixes read as
    prefixes; the input's gradient from an output that it is no part of."""
    plain, other, x = pair(kind, mode, new_first, output)
    assert_trains_like(plain, other, x, steps=2)


@each_mode
@each_kind
def test_frozen_and_evaluated_parts(kind, mode):
    """Kills: a gradient buffer that begins where the first trainable layer would write in the other order."""
    for new_first, output in itertools.product((False, True), ("all", "new")):
        plain, other, x = pair(kind, mode, new_first, output)
        for net in (plain, other):
            net.layers[0].requires_grad_(False).eval()
            net.layers[1][0].requires_grad_(False)
            net.layers[2][-1].eval()
        assert_trains_like(plain, other, x, input_grad=False)
        plain.eval(), other.eval()
        assert_trains_like(plain, other, x)
        with torch.no_grad():
            assert_same({"output": plain(x)}, {"output": other(x)})


@each_output
@each_order
@each_mode
def test_second_derivatives(mode, new_first, output):
    """Kills: a reference without bias, with dropout drawn anew, in the other order."""
    found = []
    for net in pair("Tiramisu's", mode, new_first, output)[:2]:
        torch.manual_seed(3)
        x = images(2, 5, 4, 6).requires_grad_()
        wanted = [x, *net.parameters()]
        first = torch.autograd.grad(net(x).square().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
        found.append({str(i): g.detach() for i, g in enumerate((*first, *second))})
    assert_same(*found, tolerance=1e-8)


@each_order
@each_mode
@pytest.mark.parametrize("kind", ["Tiramisu's", "bottleneck", "3-D"])
def test_in_channels_last(kind, mode, new_first):
    """Dropout of single values draws in the order of memory. Kills: another order; an output in another format."""
    plain, other, x = pair(kind, mode, new_first, "new")
    x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    strides = []
    assert_trains_like(plain, other, x, forward=lambda net, x: strides.append((y := net(x)).stride()) or y)
    assert strides[0] == strides[1]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@each_mode
def test_in_low_precision(mode, autocast):
    """Kills: a bias in float32 added to a product in bfloat16, or the other way round."""

    def forward(net, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and x.dtype == torch.float32):
            return net(x)

    draws = []
    for seed in range(4):
        exact = Net(layers(width=6, seed=seed), None, True, "new")
        plain = copy.deepcopy(exact).float()
        other = copy.deepcopy(plain)
        other.mode = mode
        x = images(4, 5, 6, 6, seed=seed).float()
        draws.append([
            training_state(net, x.to(dtype), forward=forward, loss=linear_loss)
            for net, dtype in ((exact, torch.float64), (plain, torch.float32), (other, torch.float32))
        ])  # fmt: skip
    assert_as_accurate(*draws)


@each_output
@each_mode
def test_under_autocast_the_input_stays_what_it_is(mode, output):
    """Kills: an input in float32 rounded to bfloat16 on its way through the block; an output in another type."""
    plain, other, x = pair("bottleneck, no bias", mode, output=output)
    plain, other, x = plain.float().eval(), other.float().eval(), x.float()
    for inputs in (x, x.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            want, got = plain(inputs), other(inputs)
        assert want.dtype == got.dtype
        if output == "all":
            assert torch.equal(want[:, :5], got[:, :5])


def test_new_features_first_five_in_a_row():
    """``x = torch.cat([module(x), x], 1)``, five times. Kills: as above, on a deeper block."""
    plain = Net(layers(4, (2,) * 5, width=6), None, True)
    other = copy.deepcopy(plain)
    other.mode = True
    assert_trains_like(plain, other, images(2, 4, 5, 5), steps=3)


@each_mode
def test_the_librarys_own_layers(mode):
    """Beside others. Kills: a layer asked for attributes that only the library's have, or only a Sequential."""
    torch.manual_seed(0)
    own = DenseLayer(5, 3, 2, 0.2, 2).double()
    plain = Net([own, *layers(8, (2, 2))], None)
    other = copy.deepcopy(plain)
    other.mode = mode
    assert_trains_like(plain, other, images(2, 5, 4, 4))


class Odd(nn.Module):
    """From features to new ones, in a way of its own."""

    def __init__(self, channels: int, growth: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, growth, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mul_(2)).tanh()  # in place: on what it has been given, and nobody else's


def another(layer: nn.Sequential, change: str) -> nn.Module:
    convolution = layer[2]
    if change == "another module":
        return Odd(convolution.in_channels, convolution.out_channels).double()
    if change == "a subclass":
        return type("Mine", (nn.Sequential,), {"forward": lambda self, x: 2 * nn.Sequential.forward(self, x)})(*layer)
    if change == "two dropouts":
        layer.append(nn.Dropout(0.4))
    elif change == "groups":
        layer[2] = nn.Conv2d(8, 2, 3, padding=1, groups=2).double()
    elif change == "valid and padded":
        layer[2] = nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(8, 2, 3)).double()
    elif change == "no padding, then two":
        layer[2] = nn.Conv2d(8, 6, 3).double()
        layer.insert(3, nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 3, padding=2)).double())
    elif change == "another norm":
        layer[0] = nn.GroupNorm(2, 8).double()
    elif change == "parametrized":
        nn.utils.parametrizations.weight_norm(layer[2])
    return layer


@each_mode
@pytest.mark.parametrize(
    "change",
    ["another module", "a subclass", "two dropouts", "groups", "valid and padded", "no padding, then two",
     "another norm", "parametrized"],
)  # fmt: skip
def test_other_layers_are_called_as_they_are(change, mode):
    """Kills: taking a module for what its neighbours are; a module in place on the shared buffer."""
    for new_first, output in ((False, "all"), (True, "new")):
        plain, other, x = pair("Tiramisu's", mode, new_first, output)
        for net in (plain, other):
            torch.manual_seed(1)
            net.layers[1] = another(net.layers[1], change)
        if change == "another module":
            plain.layers[1].forward = lambda x, layer=plain.layers[1]: Odd.forward(layer, x.clone())
        assert_trains_like(plain, other, x)


@each_mode
@pytest.mark.parametrize("where", ["1", "1.0", "1.1", "1.2", "1.3"])
def test_every_hook_runs_once(where, mode):
    """On a layer, its norm, rectifier, convolution, dropout. Kills: a hook not seen, or seen twice."""
    plain, other, x = pair("Tiramisu's", mode, True)
    seen = []
    for net in (plain, other):
        net.layers.get_submodule(where).register_forward_hook(lambda m, args, out, net=net: seen.append(net) or 2 * out)
    assert_trains_like(plain, other, x)
    assert seen == [plain, other]


def test_the_block_function_is_what_runs(monkeypatch):
    """Kills: the loop, called by another name."""
    calls, run = [], op._Forward.run
    monkeypatch.setattr(op._Forward, "run", lambda self: calls.append(self.call) or run(self))
    for kind in KINDS:
        _, other, x = pair(kind, "auto", True, "new")
        other(x)
    assert len(calls) == len(KINDS) and all(call.new_first and call.new_only for call in calls)


@each_order
@each_output
def test_what_is_kept(new_first, output):
    """Of a deep block at one growth rate, twice as deep: all features once, and no concatenation.

    Kills: an input or an output kept beside the buffer, layer by layer.
    """
    x = torch.randn(2, 8, 8, 8)

    def kept(mode, depth):
        net = Net(layers(8, (4,) * depth), mode, new_first, output).float()
        return measure_step(net, x).kept_bytes

    assert kept("naive", 16) / kept("naive", 8) > 2.8
    for mode in ("checkpoint", "fused", "lean"):
        assert kept(mode, 16) / kept(mode, 8) < 2.1
        assert kept(mode, 16) < 0.35 * kept("naive", 16)


@pytest.mark.parametrize("mode", ["checkpoint", "fused"])
def test_new_features_alone_may_be_edited(mode):
    """As in the loop. Kills: handing out a view of what the layers read again."""
    found = []
    for net in pair("Tiramisu's", mode, output="new")[:2]:
        torch.manual_seed(0)
        x = images(2, 5, 4, 6).requires_grad_()
        net(x).mul_(2).sum().backward()
        found.append({"x": x.grad})
    assert_same(*found)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler
@pytest.mark.parametrize("mode", ["naive", "checkpoint", "fused", "lean"])
def test_traced_and_compiled(mode):
    """By torch.fx, torch.export and torch.compile. Kills: a question that a stand-in for a tensor cannot answer."""
    plain, other, x = pair("bottleneck, no bias", mode)
    plain.eval(), other.eval()
    want = {"": plain(x)}
    assert_same(want, {"": torch.fx.symbolic_trace(other)(x)})
    assert_same(want, {"": torch.export.export(other, (x,)).module()(x)})
    assert_same(want, {"": torch.compile(other, backend="eager")(x)})


def test_mistakes_are_named():
    x = images(2, 5, 4, 4)
    first, second, third = layers()
    for wrong, message in (
        ([first, third], r"layers\[1\]: BatchNorm2d number 1 is for 10 channels, but reads 8"),
        ([second], r"layers\[0\]: BatchNorm2d number 1 is for 8 channels, but reads 5"),
        ([nn.Sequential(*first[:2], nn.Conv2d(6, 2, 3, padding=1))], r"Conv2d number 1 is for 6 channels, but reads 5"),
        ([nn.Sequential(*first[:2], nn.Conv2d(5, 2, 3).double())], r"layers\[0\] gives \(2, 2, 2, 2\) beside features"),
        (layers(dims=3), r"x must have 5 dimensions for a Conv3d, got \(2, 5, 4, 4\)"),
        (first, r"layers\[0\] is a BatchNorm2d, no layer by itself"),
        ([], "layers is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            dense_block(x, wrong)
    with pytest.raises(ValueError, match="output must be 'all' or 'new', got 'old'"):
        dense_block(x, layers(), output="old")
    with pytest.raises(ValueError, match="mode must be True, False or one of .*, got 'fast'"):
        dense_block(x, layers(), "fast")
    with pytest.raises(TypeError, match="layers must be a sequence of modules, got a Odd"):
        dense_block(x, Odd(5, 2))
    with pytest.raises(TypeError, match=r"layers\[1\] is a int, not a module"):
        dense_block(x, [first, 2])

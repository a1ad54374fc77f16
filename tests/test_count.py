"""Counting without data: the tracker by hand-counted cases, the walk against torch's engine, a step against a real one.

And the laws of a training step on CUDA, which hold on a machine that has none.
"""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import MODES, assert_same, buffers, classification_loss, each_mode, gradients, images, layers, toy
from torch import nn

from efficient_densenet import DenseNet
from efficient_densenet.memory import count_step, measure_step
from efficient_densenet.memory.backward import backward
from efficient_densenet.memory.count import without_data
from efficient_densenet.memory.tracker import Tracker, Traffic
from efficient_densenet.ops import costs
from efficient_densenet.ops.costs import Cost, cost_of, made_of, nbytes

N = 1000
BYTES = 4 * N
ALL = ("naive", *MODES)

needs_fake_cuda = pytest.mark.skipif(
    not hasattr(torch._C, "_ensureCUDADeviceGuardSet"),
    reason="this torch asks the driver for the device of a fake CUDA tensor",
)
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_fake_cuda)])


def tracked(run, device: str) -> Tracker:
    """What ``run`` does to a device: real tensors on the CPU, fake ones on CUDA."""
    with contextlib.ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(without_data(torch.device("cuda", 0)))
        stack.enter_context(torch.device(device))
        tracker = stack.enter_context(Tracker(device))
        tracker.held = run()
    return tracker


# Operators that exist for these tests: one by its schema, one that declares its costs, one that is made of others.

LIBRARY = torch.library.Library("efficient_densenet_test", "FRAGMENT")
for schema in (
    "scale(Tensor x, Tensor(a!) out) -> ()", "product(Tensor x, Tensor w) -> Tensor", "whole(Tensor x) -> Tensor",
):  # fmt: skip
    LIBRARY.define(schema)
for dispatch in ("CPU", "Meta"):
    LIBRARY.impl("scale", lambda x, out: None, dispatch)
    LIBRARY.impl("product", lambda x, w: torch.empty_like(x), dispatch)
    LIBRARY.impl("whole", lambda x: torch.empty_like(x), dispatch)
OURS = torch.ops.efficient_densenet_test


@pytest.fixture
def declared(monkeypatch):
    monkeypatch.setattr(costs, "COSTS", {})
    monkeypatch.setattr("efficient_densenet.memory.tracker.COSTS", costs.COSTS)
    monkeypatch.setattr(costs, "IMPLEMENTATIONS", {})
    monkeypatch.setattr("efficient_densenet.memory.tracker.IMPLEMENTATIONS", costs.IMPLEMENTATIONS)
    cost_of("efficient_densenet_test::product")(lambda x, w: Cost(2, loaded=3 * nbytes(x)))
    made_of("efficient_densenet_test::whole", lambda x: x.relu().neg())


def a() -> torch.Tensor:
    return torch.empty(N)


def freed_on_the_way() -> torch.Tensor:
    one, two = a(), torch.empty(3 * N)
    del one, two
    return a()


@each_device
@pytest.mark.parametrize(
    "run, launches, read, written, peak, left",
    [
        pytest.param(a, 0, 0, 0, 1, 1, id="a tensor"),
        pytest.param(lambda: a().view(10, -1).t()[1:].unsqueeze(0).detach(), 0, 0, 0, 1, 1, id="views"),
        pytest.param(lambda: torch.zeros(N), 1, 0, 1, 1, 1, id="filled"),
        pytest.param(lambda: torch.zeros(0), 0, 0, 0, 0, 0, id="no bytes, no launch"),
        pytest.param(lambda: a().zero_().relu_(), 2, 1, 2, 1, 1, id="in place"),
        pytest.param(lambda: a().relu().neg(), 2, 2, 2, 2, 1, id="a temporary dies"),
        pytest.param(freed_on_the_way, 0, 0, 0, 4, 1, id="freed on the way"),
        pytest.param(lambda: torch.add(a(), a(), out=a()), 1, 2, 1, 3, 1, id="out="),
        pytest.param(lambda: a().copy_(a()), 1, 1, 1, 2, 1, id="copied"),
        pytest.param(lambda: a().add_(a()), 1, 2, 1, 2, 1, id="added in place"),
        pytest.param(lambda: torch.empty(1, N).expand(5, N).clone(), 1, 1, 5, 6, 5, id="expanded, once"),
        pytest.param(lambda: torch.empty(2, N)[:, ::2].relu(), 1, 1, 1, 3, 1, id="a part of a tensor"),
        pytest.param(lambda: a().resize_(2 * N), 0, 0, 0, 3, 2, id="resized"),
        pytest.param(lambda: torch._foreach_add_([a() for _ in range(3)], 1), 1, 3, 3, 3, 3, id="a list, one launch"),
        pytest.param(lambda: torch._foreach_add_([a()] * 111, 1), 2, 111, 111, 1, 1, id="a list, two launches"),
        pytest.param(lambda: a() is None, 0, 0, 0, 1, 0, id="nothing left"),
        pytest.param(lambda: OURS.scale(a(), a()), 1, 2, 1, 2, 0, id="ours, by its schema"),
        pytest.param(lambda: OURS.product(a(), a()), 2, 2, 1, 3, 1, id="ours, as it says"),
        pytest.param(lambda: OURS.whole(a()), 2, 2, 2, 3, 1, id="ours, made of others"),
    ],
)
def test_operators_and_storages_are_those_counted_by_hand(device, run, launches, read, written, peak, left, declared):
    """Kills: views that launch; an argument forgotten, or read twice; a storage that never dies, or is born twice."""
    tracker = tracked(run, device)
    total = tracker.total()
    assert (total.launches, total.read_bytes, total.written_bytes) == (launches, read * BYTES, written * BYTES)
    assert (tracker.peak_bytes, tracker.live_bytes) == (peak * BYTES, left * BYTES)
    assert total.bytes == (read + written) * BYTES and total.host_waits == 0


def test_what_is_loaded_is_what_is_read_unless_an_operator_says_so(declared):
    assert tracked(lambda: a().relu(), "cpu").total().loaded_bytes == BYTES
    assert tracked(lambda: OURS.product(a(), a()), "cpu").total().loaded_bytes == 3 * BYTES


@needs_fake_cuda
@pytest.mark.parametrize(
    "run, waits",
    [
        pytest.param(lambda: a() * 2, 0, id="a number from the host"),
        pytest.param(lambda: a().cpu(), 1, id="to the host"),
        pytest.param(lambda: a().to("cpu", non_blocking=True), 0, id="to the host, later"),
        pytest.param(lambda: torch.tensor([1.0, 2.0], device="cuda"), 1, id="from a list"),
        pytest.param(lambda: a().copy_(torch.empty(N, device="cpu")), 1, id="from the host"),
        pytest.param(lambda: a().sum().item(), 1, id="item"),
        pytest.param(lambda: bool(a().any()), 1, id="bool"),
        pytest.param(lambda: torch.tensor(1.0, device="cpu").item(), 0, id="among the host's own"),
    ],
)
def test_waits_of_the_host_are_seen(run, waits):
    """Kills: a copy or a question that nobody notices, and that forbids CUDA graphs."""
    assert tracked(run, "cuda").total().host_waits == waits


@needs_fake_cuda
def test_a_number_that_is_not_there_is_one_or_false():
    assert tracked(lambda: (a().sum().item(), bool(a().any()), int(a().long()[0])), "cuda").held == (1.0, False, 1)


def test_storages_from_before_stay_and_the_peak_has_parts():
    """Kills: a peak of other parts than its own moment's; what was there before counted as the step's."""
    before, seen_late = a(), torch.empty(2 * N)
    tracker = Tracker("cpu")
    tracker.adopt([before, None, before], "weights")
    with tracker:
        kept = before.relu()
        assert tracker.live_bytes == 2 * BYTES
        tracker.move("forward", "kept")
        tracker.phase = "backward"
        kept.neg().neg()
        assert tracker.worst().parts == {"weights": BYTES, "kept": BYTES, "backward": 2 * BYTES}
        seen_late.sum()
    assert tracker.before_bytes == 3 * BYTES and tracker.peak_bytes == 6 * BYTES
    assert tracker.worst().parts == {"weights": BYTES, "kept": BYTES, "backward": 2 * BYTES, "before": 2 * BYTES}
    assert set(tracker.operators) == {("forward", "aten::relu"), ("backward", "aten::neg"), ("backward", "aten::sum")}
    assert tracker.total("forward").launches == 1 and tracker.total().launches == 4


def test_kernels_of_torch_that_are_not_one():
    """Kills: convolution's gradients taken for one kernel; BatchNorm, which goes over its input twice, for one pass."""
    with torch.no_grad():
        norm = tracked(lambda: F.batch_norm(torch.empty(8, 5), None, None, training=True), "cpu").total()
    assert norm.launches == 2 and norm.read_bytes == 2 * 160
    for needs, kernels in (((True, True), 2), ((False, True), 1)):
        x = torch.empty(1, 2, 4, 4, requires_grad=needs[0])
        step = count_step(nn.Conv2d(2, 3, 3), x, device="cpu")
        assert step.operators["backward", "aten::convolution_backward"].launches == kernels + 1  # and the bias's


def test_traffic_adds_up():
    assert Traffic(1, 2, 3, 4, 5, 6) + Traffic(1, 1, 1, 1, 1, 1) == Traffic(2, 3, 4, 5, 6, 7)


# The walk in the place of torch's engine


class Twice(torch.autograd.Function):
    """Two outputs, of which one may go unused; an argument without a gradient between those with one."""

    @staticmethod
    def forward(ctx, x, factor, w):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w, x * factor

    @staticmethod
    def backward(ctx, first, second):
        x, w = ctx.saved_tensors
        return first * w + ctx.factor * second, None, (first * x).sum(0)


class Odd(nn.Module):
    """Weights read twice, broadcast, transposed and not at all."""

    def __init__(self):
        super().__init__()
        self.w, self.matrix, self.unused = (nn.Parameter(torch.randn(*s)) for s in ((6,), (6, 6), (2,)))

    def forward(self, x):
        y, _ = Twice.apply(x.flatten(1)[:, :6], 3.0, self.w)
        return F.linear(y + self.w, self.matrix).mul(self.matrix.t().sum(0)) @ self.matrix


def by_both(model: nn.Module, x: torch.Tensor):
    """Gradients and counts of a step by torch's engine and by the walk, on real tensors."""
    for device in ("cpu", "cuda"):  # where the walk is taken for the loss to be
        other, inputs = copy.deepcopy(model), x.detach().clone().requires_grad_()
        tracker = Tracker("cpu")
        tracker.adopt([*other.parameters(), *other.buffers(), inputs])
        with tracker:
            losses = [classification_loss(other(inputs))]
            tracker.phase = "backward"
            backward(losses, torch.device(device))
        yield {**gradients(other), **buffers(other), "input.grad": inputs.grad}, tracker


@needs_fake_cuda  # and with it, that nodes tell what they belong to
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("mode", [*ALL, "odd"])
def test_the_walk_is_torch_s_engine(mode, layout):
    """Kills: a gradient that is lost, doubled or copied on its way; saved tensors that outlive their node."""
    model = (Odd() if mode == "odd" else toy(mode)).to(torch.float64, memory_format=layout)
    x = images(4, 3, 8, 8).contiguous(memory_format=layout)
    copy.deepcopy(model)(x)  # torch is asked once which formats its convolutions can give
    (wanted, engine), (found, walk) = by_both(model, x)
    assert_same(wanted, found, 0.0)
    extra = {("backward", "aten::ones"), ("backward", "aten::ones_like")}  # those of the pass it runs in
    wanted, found = (
        {key: traffic for key, traffic in tracker.operators.items() if key not in extra} for tracker in (engine, walk)
    )
    assert wanted == found
    assert walk.peak_bytes == pytest.approx(engine.peak_bytes, rel=0.01)


# A step


def net(mode: str, layers: tuple[int, ...] = (2, 2), **overrides) -> DenseNet:
    torch.manual_seed(0)
    return DenseNet(**{"growth_rate": 8, "block_config": layers, "num_init_features": 16, **overrides}, efficient=mode)


def loss(output: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float(), torch.zeros(len(output), dtype=torch.int64, device=output.device))


@pytest.mark.parametrize(
    "mode, overrides", [*((mode, {}) for mode in ALL), ("fused", {"drop_rate": 0.3}), ("lean", {"bn_size": None})]
)
def test_a_step_without_data_holds_what_a_real_one_holds(mode, overrides):
    """Kills: storages forgotten, or kept alive by whoever counts; another mode than the real one's."""
    model, x = net(mode, **overrides), torch.randn(8, 3, 16, 16)
    real, counted = measure_step(model, x, loss), count_step(model, x, loss, "cpu")
    # The state of the random generator, which a layer with dropout keeps, is made where no operator is seen.
    unseen = len(layers(model)) * torch.get_rng_state().nbytes if "drop_rate" in overrides else 0
    assert real.kept_bytes - counted.kept_bytes in (0, unseen)
    assert real.peak_bytes - counted.peak_bytes == pytest.approx(0, abs=unseen + 0.02 * real.peak_bytes)


@needs_fake_cuda
@pytest.mark.parametrize("mode", ALL)
def test_the_model_is_left_alone(mode):
    """Kills: a count that moves running statistics, leaves gradients, or asks a driver."""
    model, x = net(mode, (2,)), torch.empty(2, 3, 8, 8, device="meta")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count_step(model, x, loss)
    assert_same(before, model.state_dict(), 0.0)
    assert all(type(p) is nn.Parameter and p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()


@needs_fake_cuda
@pytest.mark.parametrize("mode", ALL)
def test_autocast_halves_what_is_kept(mode):
    """Kills: autocast that switches itself off where there is no GPU; a layout without cuDNN, which then is copied."""
    model = net(mode, (2,)).to(memory_format=torch.channels_last)
    x = torch.empty(64, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    full, half = count_step(model, x, loss), count_step(model, x, loss, autocast=torch.bfloat16)
    assert half.kept_bytes == pytest.approx(full.kept_bytes / 2, rel=0.1)
    assert half.total.bytes < 0.7 * full.total.bytes


@needs_fake_cuda
@pytest.mark.parametrize("mode", ALL)
def test_settings_that_ask_for_a_device_that_is_not_there(mode):
    """Dropout's generator, and a counter: the plain model reads it, one wait per norm; the efficient modes do not."""
    model = net(mode, (2,), drop_rate=0.2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    step = count_step(model, torch.empty(4, 3, 8, 8), loss)
    called = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    if mode != "naive":  # only the checkpointed mode calls norms, but those it rebuilds
        called = [name for name in called if mode == "checkpoint" and not name.endswith("norm1")]
    assert step.total.host_waits == len(called)


def test_a_device_that_cannot_be():
    with pytest.raises(ValueError, match="device must be a CPU or a CUDA device, got 'mps'"):
        count_step(net("naive"), torch.empty(1), device="mps")


# Laws on CUDA, of the plain model and of the modes against it. Where a mode is bettered, its numbers here go down.

# Most, as shares of the plain model's: launches and bytes of a further layer, peak of a step.
SHARES = {"checkpoint": (1.75, 0.95, 0.7), "fused": (0.39, 0.3, 0.5), "lean": (0.39, 0.35, 0.36)}


@pytest.fixture(scope="module")
def steps():
    """Steps of one block of 2, 3 and 4 layers, by mode."""

    def step(mode: str, num_layers: int):
        model = net(mode, (num_layers,), growth_rate=12, num_init_features=24).to(memory_format=torch.channels_last)
        x = torch.empty(32, 3, 32, 32, device="meta").contiguous(memory_format=torch.channels_last)
        return count_step(model, x, loss)

    return {mode: [step(mode, num_layers) for num_layers in (2, 3, 4)] for mode in ALL}


def growth(values: list[int]) -> tuple[int, int]:
    return values[1] - values[0], values[2] - values[1]


@needs_fake_cuda
@each_mode
def test_launches_per_layer_are_a_constant(steps, mode):
    """Kills: a pass over all layers in every layer, as the plain model has: it adds up every gradient by itself."""
    first, second = growth([step.total.launches for step in steps[mode]])
    assert first > 0 and second == pytest.approx(first, abs=1 if mode == "naive" else 0)
    _, naive = growth([step.total.launches for step in steps["naive"]])
    assert second <= SHARES[mode][0] * naive


@needs_fake_cuda
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bf16"])
def test_what_features_go_through_are_kernels(autocast):
    """Also in stem and transition. Kills: a pass that falls back to torch's operations; casts of its own in the count."""
    model = net("lean", small_inputs=False, num_init_features=32).to(memory_format=torch.channels_last)
    x = torch.empty(8, 3, 64, 64, device="meta").contiguous(memory_format=torch.channels_last)
    step = count_step(model, x, loss, autocast=autocast)
    launches = {(phase, name.partition("::")[2]): t.launches for (phase, name), t in step.operators.items()}
    assert launches["forward", "norm_relu_max_pool"] == launches["backward", "norm_relu_max_pool_gradient"] == 1
    assert launches["backward", "finish_and_product"] == launches["backward", "norm_relu_product"] == 1  # two layers
    assert launches.get(("forward", "_to_copy"), 0) <= 6  # images and what is not a block's
    own = {"aten::convolution", "aten::convolution_backward", "aten::_to_copy"}
    large = {name for (_, name), t in step.operators.items() if t.bytes > 0.03 * step.total.bytes}
    assert {name for name in large if name.startswith("aten::")} <= own


@needs_fake_cuda
@each_mode
def test_bytes_per_layer_are_a_share_of_the_plain_model_s(steps, mode):
    """They grow with the channels that a layer reads."""
    first, second = growth([step.total.bytes for step in steps[mode]])
    assert second > first > 0
    _, naive = growth([step.total.bytes for step in steps["naive"]])
    assert second <= SHARES[mode][1] * naive


@needs_fake_cuda
@each_mode
def test_no_step_waits_and_its_peak_is_a_share_of_the_plain_one(steps, mode):
    assert all(step.total.host_waits == 0 for step in (*steps[mode], *steps["naive"]))
    assert steps[mode][2].peak_bytes <= SHARES[mode][2] * steps["naive"][2].peak_bytes

"""Measuring allocations, by hand-counted cases; and the memory of training steps, as ratios and laws of growth."""

import pytest
import torch
import torch.nn.functional as F
from helpers import MODES, classification_loss, each_mode, images, toy
from torch import nn

from efficient_densenet import DenseNet, densenet_bc
from efficient_densenet.memory import Allocations, measure_allocations, measure_step
from efficient_densenet.models import DenseBlock


@pytest.fixture(autouse=True)
def one_thread():
    """These operations are small; on a busy machine two threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


N = 1000
BYTES = 4 * N


def empty() -> torch.Tensor:
    return torch.empty(N)


class ScratchInBackward(torch.autograd.Function):
    """The identity, whose backward needs twice the memory of its gradient for a moment."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        torch.empty(2 * N)
        return grad.clone()


def freed_on_the_way() -> torch.Tensor:
    a = empty()
    b = torch.empty(3 * N)
    del a, b
    return empty()


@pytest.mark.parametrize(
    "forward, peak, kept",
    [
        pytest.param(empty, BYTES, BYTES, id="a tensor"),
        pytest.param(lambda: torch.empty(N, dtype=torch.float64), 2 * BYTES, 2 * BYTES, id="float64"),
        pytest.param(lambda: [empty() for _ in range(10)], 10 * BYTES, 10 * BYTES, id="ten tensors"),
        pytest.param(lambda: empty().view(10, -1).t()[1:], BYTES, BYTES, id="views"),
        pytest.param(lambda: empty().zero_().relu_(), BYTES, BYTES, id="in place"),
        pytest.param(lambda: empty().relu().relu(), 2 * BYTES, BYTES, id="temporaries"),
        pytest.param(freed_on_the_way, 4 * BYTES, BYTES, id="freed on the way"),
        pytest.param(lambda: empty().resize_(2 * N), 3 * BYTES, 2 * BYTES, id="resized"),
        pytest.param(lambda: empty() is None, BYTES, 0, id="nothing kept"),
        pytest.param(lambda: torch.empty(0), 0, 0, id="no bytes"),
    ],
)
def test_allocations_are_those_counted_by_hand(forward, peak, kept):
    assert measure_allocations(forward) == Allocations(peak, kept)


def test_the_backward_counts_toward_the_peak_only():
    x = torch.empty(N, requires_grad=True)
    # The output's gradient, the scratch of two, and the copy that becomes x.grad come one after the other.
    found = measure_allocations(lambda: ScratchInBackward.apply(x), lambda y: y.backward(torch.empty(N)))
    assert found == Allocations(peak_bytes=3 * BYTES, kept_bytes=0)


def test_what_the_forward_keeps_is_still_there_at_the_peak_of_the_backward():
    found = measure_allocations(empty, lambda kept: torch.empty(5 * N))
    assert found == Allocations(peak_bytes=6 * BYTES, kept_bytes=BYTES)


def test_storages_from_before_and_their_release_do_not_count():
    old = [empty()]
    measure_allocations(lambda: old.append(empty()))  # one of them known to an earlier recording

    def forward():
        old.clear()
        return torch.empty(N // 2)

    assert measure_allocations(forward) == Allocations(BYTES // 2, BYTES // 2)


def test_an_error_passes_through_and_the_next_measurement_is_right():
    with pytest.raises(ZeroDivisionError):
        measure_allocations(lambda: 1 / 0)
    assert measure_allocations(empty) == Allocations(BYTES, BYTES)


def test_a_device_that_cannot_be_measured_is_named():
    with pytest.raises(ValueError, match="'meta'"):
        measure_allocations(empty, device="meta")


def test_a_step_counts_gradients_and_leaves_out_parameters():
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
    x = torch.randn(1, 100)
    for _ in range(2):
        found = measure_step(model, x)
        assert all(p.grad is None for p in model.parameters())
        # Kept: the first layer's output and the sum. Backward: gradients of both weights, both outputs and the sum.
        assert found.kept_bytes == 4 * (100 + 1)
        assert 4 * 2 * 100 * 100 < found.peak_bytes <= 4 * (2 * 100 * 100 + 4 * 100 + 2)
        model(x).sum().backward()  # gradients that are there already would be added to, not allocated


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_allocations_are_those_counted_by_hand():
    n = 1024  # a multiple of the allocator's 512 bytes
    found = measure_allocations(
        lambda: torch.ones(n, device="cuda").relu(), lambda y: torch.empty(3 * n, device="cuda"), device="cuda"
    )
    assert found == Allocations(peak_bytes=4 * 4 * n, kept_bytes=4 * n)


# Training steps


def kept_by_a_block(mode: str, num_layers: int) -> int:
    block = DenseBlock(num_layers, 8, growth_rate=4, bn_size=4, drop_rate=0.0, spatial_dims=2)
    block.efficient = mode
    return measure_step(block, torch.randn(2, 8, 16, 16, requires_grad=True)).kept_bytes


@each_mode
def test_kept_bytes_grow_with_the_depth_not_with_its_square(mode):
    assert kept_by_a_block(mode, 32) < 2.05 * kept_by_a_block(mode, 16)


def test_the_plain_path_keeps_bytes_that_grow_faster():
    assert kept_by_a_block("naive", 32) > 3 * kept_by_a_block("naive", 16)


def test_each_mode_needs_less_than_the_one_before():
    model, x = densenet_bc(100, 12), images(2, 3, 16, 16, dtype=torch.float32)
    gradients = sum(4 * p.numel() for p in model.parameters())
    found = [measure_step(model.set_efficient(mode), x, classification_loss) for mode in ("naive", *MODES)]
    peaks = [step.peak_bytes - gradients for step in found]
    kept = [step.kept_bytes for step in found]
    assert peaks == sorted(peaks, reverse=True) and kept == sorted(kept, reverse=True)
    assert peaks[1] < 0.345 * peaks[0]


@each_mode
def test_a_measurement_repeats_and_the_fiftieth_step_ends_with_what_the_fifth_had(mode):
    model, x = toy(mode, drop_rate=0.2, block_config=(3,)), images(2, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train(steps: int) -> None:
        for _ in range(steps):
            classification_loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(5)
    fifth = measure_step(model, x)
    assert measure_allocations(lambda: train(45)).kept_bytes == 0
    assert measure_step(model, x) == fifth


@pytest.mark.parametrize("mode", ["naive", *MODES])
def test_evaluation_adds_nothing_to_the_peak_of_training(mode):
    model, x = toy(mode), images(4, 3, 16, 16)
    training = measure_step(model, x, classification_loss)

    def epoch_and_evaluation() -> None:
        for _ in range(2):
            classification_loss(model.train()(x)).backward()
            model.zero_grad()
            with torch.no_grad():
                F.softmax(model.eval()(x), 1)

    assert measure_allocations(epoch_and_evaluation) == Allocations(training.peak_bytes, 0)


@each_mode
def test_a_larger_dropout_rate_needs_no_more_memory(mode):
    x = images()
    assert measure_step(toy(mode, drop_rate=0.6), x) == measure_step(toy(mode, drop_rate=0.2), x)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("bn_size", [4, None])
def test_rectifiers_need_no_more_than_in_place(channels_last, bn_size):
    """In the plain path: a step's peak and what it keeps, and the peak without gradients, called for or possible.

    Kills: a rectifier that makes a tensor of its own where nobody could tell.
    """
    model, x = densenet_bc(40, 12, efficient="naive"), images(2, 3, 16, 16, dtype=torch.float32)
    if bn_size is None:
        model = DenseNet(12, (6, 6), bn_size=None, efficient="naive")
    if channels_last:
        model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    found = []
    for in_place in (True, False):
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = in_place
        steps = [measure_step(model.train(training), x) for training in (True, False)]
        with torch.no_grad():
            without = [measure_allocations(lambda: model(x))]
        model.requires_grad_(False)
        without.append(measure_allocations(lambda: model(x)))
        model.requires_grad_(True)
        found.append((steps, without))
    assert found[0] == found[1]

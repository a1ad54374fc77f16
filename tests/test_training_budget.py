"""What fits into the memory: the search, what it measures, and what is chosen from it."""

import dataclasses
import importlib.util
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from efficient_densenet.memory import measure_allocations
from efficient_densenet.training import budget, data
from efficient_densenet.training.config import Config, UsageError
from efficient_densenet.training.distributed import World

spec = importlib.util.spec_from_file_location("demo", Path(__file__).parent.parent / "demo.py")
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)

SMALL = Config(dataset="digits", depth=10, growth_rate=4, batch_size=16, num_workers=0, seed=3)
MIB = 2**20


@pytest.fixture(scope="module")
def images():
    return data.load(SMALL, World(), 3)


def choose(images, world=World(), **flags):
    lines = []
    config = dataclasses.replace(SMALL, **flags)
    chosen = budget.choose(config, demo.start, images, 1, world, lines.append)
    return chosen.efficient, chosen.batch_size, lines


# The search


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("room", [20, 37, 100, 1000, 12345])
@pytest.mark.parametrize(
    "need",
    [
        lambda batch: 5 + 7 * batch,
        lambda batch: max(60, 7 * batch),
        lambda batch: 5 + 7 * batch + (40 if batch > 9 else 0),
        lambda batch: math.inf if batch > 20 else 2 * batch,
        lambda batch: 3 + batch * math.log2(batch + 2),
    ],
    ids=["a line", "a floor", "a step", "no more", "a curve"],
)
def test_the_search_ends_with_the_largest_batch_that_fits(need, room, least):
    most, calls = 1294, []
    needs = budget.search(lambda batch: calls.append(batch) or need(batch), room, least, most)
    fitting = [batch for batch in range(least, most + 1) if need(batch) <= room]
    assert max((batch for batch in needs if needs[batch] <= room), default=None) == max(fitting, default=None)
    assert len(calls) == len(set(calls)) < 15 and needs == {batch: need(batch) for batch in calls}


def test_few_batches_are_measured_and_none_far_too_large():
    calls = []
    budget.search(lambda batch: calls.append(batch) or 100 + 7 * batch, 10_000, 1, 10**6)
    assert len(calls) < 8 and max(calls) == (10_000 - 100) // 7 + 1


# What is measured


def test_a_measurement_moves_no_random_numbers_and_repeats(images):
    state = torch.get_rng_state()
    first = budget.need(SMALL, demo.start, images, 8, World())
    assert torch.equal(torch.get_rng_state(), state)
    assert budget.need(SMALL, demo.start, images, 8, World()) == first


def test_everything_that_a_run_holds_is_counted(images):
    """Kills: a measurement of the activations alone, or before the optimizer has a state."""
    model = demo.make_model(SMALL, images, World())
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())

    def need(world=World(), **flags):
        return budget.need(dataclasses.replace(SMALL, **flags), demo.start, images, 8, world)

    whole = need()
    assert whole - need(momentum=0.0) == pytest.approx(parameters, abs=100)
    assert need(ema_decay=0.9) - whole == pytest.approx(parameters + buffers, abs=100)
    assert need(world=World(distributed=True)) - whole == parameters
    assert need(accumulation_steps=4, warmup_epochs=0) > whole  # gradients during a forward pass
    assert need(amp="fp16") < need() + MIB


# What is chosen


def real_step(config, images, batch):
    """Peak of a run's allocations written out by hand: the model, SGD with momentum, and the second of two steps."""

    def run():
        model = demo.build_model(config, 10, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
        for _ in range(2):
            x = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
            F.cross_entropy(model(x), torch.arange(batch) % 10).backward()
            optimizer.step()
            optimizer.zero_grad()

    return measure_allocations(run).peak_bytes


@pytest.mark.parametrize("mode", [True, "naive", "lean"])
def test_the_chosen_batch_fits_and_a_quarter_more_does_not(images, mode):
    """Kills: an extrapolation that nothing verifies, and a margin that wastes the memory."""
    room = 10 * MIB
    efficient, batch, _ = choose(images, efficient=mode, batch_size="auto", memory_budget=str(room))
    assert efficient == ("fused" if mode is True else mode) and batch > 4
    config = dataclasses.replace(SMALL, efficient=efficient)
    assert real_step(config, images, batch) <= room < real_step(config, images, math.ceil(1.25 * batch))


def test_the_fastest_mode_that_fits(images):
    deeper = {"depth": 22, "growth_rate": 8}
    needs = {
        mode: budget.need(dataclasses.replace(SMALL, efficient=mode, **deeper), demo.start, images, 16, World())
        for mode in ("fused", "lean")
    }
    assert needs["lean"] < needs["fused"]
    efficient, batch, lines = choose(images, memory_budget=str(needs["fused"]), **deeper)
    assert (efficient, batch) == ("fused", 16)
    mib = f"{needs['fused'] / MIB:,.0f} MiB"
    assert lines == [f"memory: {mib} of {mib} with efficient=fused and batches of 16"]
    assert choose(images, efficient="auto", memory_budget=str(needs["fused"] - 1), **deeper)[:2] == ("lean", 16)
    words = r"with --efficient lean, --batch_size 16 takes about .* MiB; --batch_size \d+ fits"
    with pytest.raises(UsageError, match=words):
        choose(images, memory_budget=str(needs["lean"] - 1), **deeper)


def test_the_largest_batch_is_the_training_set(images):
    few = dataclasses.replace(images, train=torch.utils.data.Subset(images.train, range(21)))
    assert choose(few, batch_size="auto", memory_budget="1GiB")[:2] == ("fused", 21)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"efficient": "naive", "memory_budget": "4MiB"}, "4MiB: with --efficient naive, --batch_size 16 takes about"),
        ({"efficient": "naive", "memory_budget": "1000"}, "1000: with --efficient naive, --batch_size 1 takes 1 MiB"),
        ({"batch_size": "auto", "memory_budget": "1KiB"}, "1KiB: with --efficient lean, --batch_size 1 takes"),
    ],
)
def test_what_does_not_fit_is_said_with_what_would(images, flags, words):
    with pytest.raises(UsageError) as caught:
        choose(images, **flags)
    assert str(caught.value).startswith(f"--memory_budget {words}") and "\n" not in str(caught.value)


def test_the_advice_is_the_way_that_takes_the_most(images, monkeypatch):
    """In small networks lean may need more than fused."""
    takes = {"fused": 2, "lean": 3}
    monkeypatch.setattr(budget, "need", lambda config, start, images, batch, world: takes[config.efficient] * batch)
    with pytest.raises(UsageError, match="--efficient fused, --batch_size 16 takes about .*; --batch_size 10 fits"):
        choose(images, memory_budget="20")


def test_a_gpu_that_has_too_little_for_a_batch(images, monkeypatch):
    """The allocator's refusal is an answer: the batch does not fit."""
    steps = budget.engine.train_steps

    def short(model, batches, *rest):
        if len(batches.sampler) > 6:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return steps(model, batches, *rest)

    monkeypatch.setattr(budget.engine, "train_steps", short)
    assert choose(images, batch_size="auto", memory_budget="1GiB")[1] == 6


def test_without_a_budget_nothing_is_measured(images, monkeypatch):
    monkeypatch.setattr(budget, "need", None)
    assert choose(images) == (True, 16, [])


def test_without_a_budget_a_batch_fills_the_free_memory_of_the_fullest_gpu(images, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(World, "gather", lambda self, value: [value, 500] if value == 1000 else [value])
    seen = []
    monkeypatch.setattr(budget, "need", lambda config, start, images, batch, world: seen.append(batch) or 10 * batch)
    config = budget.choose(dataclasses.replace(SMALL, batch_size="auto"), demo.start, images, 1, World(), seen.append)
    assert (config.memory_budget, config.batch_size) == ("450", 45)

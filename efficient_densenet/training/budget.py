"""The mode and the batch size that fit into the memory: found out by training a few steps with each."""

import contextlib
import dataclasses
import math

import torch

from ..memory import measure_allocations
from . import engine
from .config import UsageError, bytes_of
from .distributed import World

FREE_SHARE = 0.9  # of a GPU's free memory: the rest is for what the allocator reserves and cannot use
FASTEST = ("fused", "lean")  # in this order; naive and checkpoint are slower and take more
MIB = 2**20


def choose(config, start, images, least, world, say):
    """Settles what ``--memory_budget`` and ``--batch_size auto`` leave open; every rank calls this, rank 0 decides.

    A run needs the peak of its allocations from the building of the model on: parameters, buffers, gradients, optimizer
    state, averaged weights, and training and evaluating a batch. It is measured with random images, under the flags'
    own settings, on a model of its own (before ``--compile``), and leaves the random numbers alone. The batch size is
    searched along the straight line that memory follows; what is chosen has been measured.

    Args:
        config: The flags.
        start: ``start(config, images, world)`` makes the state of a run that begins.
        images: The data set.
        least: Images that a batch must have.
        world: The processes; each of them has the budget.
        say: Prints a line.

    Returns:
        The flags with ``efficient``, ``batch_size`` and ``memory_budget`` as they will be used.

    Raises:
        UsageError: Nothing fits; the line says what is needed and what would fit.
    """
    if config.memory_budget is None and config.batch_size != "auto":
        return config
    if config.memory_budget is None:
        free = min(world.gather(torch.cuda.mem_get_info(world.device)[0]))
        config = dataclasses.replace(config, memory_budget=str(int(FREE_SHARE * free)))
    return world.on_main(lambda: _choose(config, start, images, least, world, say))


def _choose(config, start, images, least, world, say):
    budget, auto = bytes_of(config.memory_budget), config.batch_size == "auto"
    most = max(least, math.ceil(len(images.train) / world.size)) if auto else config.batch_size
    failed = []
    for mode in FASTEST if config.efficient in (True, "auto") else (config.efficient,):
        tried = dataclasses.replace(config, efficient=mode)
        needs = search(lambda batch: need(tried, start, images, batch, world), budget, least, most)
        fits = max((batch for batch, need_ in needs.items() if need_ <= budget), default=0)
        if fits == most or auto and fits:
            say(f"memory: {_mib(needs[fits])} of {_mib(budget)} with efficient={mode} and batches of {fits}")
            return dataclasses.replace(tried, batch_size=fits)
        failed.append((fits, -needs[least], mode, needs))
    fits, _, mode, needs = max(failed)
    short = f"--memory_budget {config.memory_budget}: with --efficient {mode}, --batch_size"
    if not fits:
        raise UsageError(f"{short} {least} takes {_mib(needs[least])} already")
    takes = needs.get(most, needs[fits] + (most - fits) * _slope(needs, fits))
    raise UsageError(f"{short} {most} takes about {_mib(takes)}; --batch_size {fits} fits")


def need(config, start, images, batch, world):
    """Bytes that a run allocates on its device with batches of so many images; infinite if there are not that many."""
    alone = World(device=world.device)
    shape = (images.in_channels, *images.facts["image_size"])
    cuda = [world.device] if world.device.type == "cuda" else []

    def run():
        state = start(config, images, alone)
        # A first scale that is too large would skip the first step, which leaves the optimizer's state for the second.
        state.scaler = torch.amp.GradScaler(world.device.type, init_scale=1.0, enabled=config.amp == "fp16")
        for size in (min(2, batch), batch):
            few = dataclasses.replace(config, batch_size=size, accumulation_steps=min(2, config.accumulation_steps))
            batches = _Batches(size, few.accumulation_steps, shape, images.num_classes)
            for _ in engine.train_steps(state.model, batches, state, few, alone):
                pass
        engine.evaluate(state.kept, batches, few, alone)
        return sum(parameter.numel() * parameter.element_size() for parameter in state.model.parameters())

    with torch.random.fork_rng(devices=cuda):
        gradients = []
        before = torch.cuda.memory_allocated(world.device) if cuda else 0  # workspaces that an earlier measurement left
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            peak = measure_allocations(lambda: gradients.append(run()), device=world.device).peak_bytes
        if cuda:
            torch.cuda.empty_cache()
    if not gradients:
        return math.inf
    # DistributedDataParallel keeps the room for all gradients also while there are none.
    return before + peak + (gradients[0] if world.distributed else 0)


def search(need, budget, least, most):
    """Measures batch sizes up to the largest that fits and the next, that does not; a line says where to look.

    Args:
        need: Bytes that a batch of some size takes, which grow with it.
        budget: Bytes that there are.
        least, most: The smallest and the largest size to think of.

    Returns:
        The bytes of every size that was measured, ``least`` among them.
    """
    needs = {least: need(least)}
    fits, too_large = least, most + 1
    while needs[fits] <= budget and too_large - fits > 1:
        slope = _slope(needs, fits)
        guess = fits + math.floor((budget - needs[fits]) / slope) if slope > 0 else (fits + too_large) // 2
        if math.isinf(needs.get(too_large, 0)):  # which is on no line
            guess = min(guess, (fits + too_large) // 2)
        # At most eightfold: what no batch size changes may hide the slope at first. At least one more: lines err.
        guess = min(max(guess, fits + 1), 8 * fits, too_large - 1)
        needs[guess] = need(guess)
        if needs[guess] <= budget:
            fits = guess
        else:
            too_large = guess
    return needs


def _slope(needs, batch):
    """Bytes per image at a measured batch size, from the next larger one that was measured, else the next smaller."""
    others = [other for other, bytes_ in needs.items() if other != batch and math.isfinite(bytes_)]
    if not others:
        return 0
    other = min(others, key=lambda other: (other < batch, abs(other - batch)))
    return (needs[other] - needs[batch]) / (other - batch)


class _Batches:
    """Random images and labels: as many batches as make a step, and the sampler that a loader has."""

    def __init__(self, size, count, shape, num_classes):
        self._size, self._count, self._shape, self._num_classes = size, count, shape, num_classes
        self.sampler = range(size * count)

    def __iter__(self):
        for _ in range(self._count):
            yield torch.rand(self._size, *self._shape), torch.randint(self._num_classes, (self._size,))


def _mib(bytes_):
    return f"{bytes_ / MIB:,.0f} MiB"

"""DistributedDataParallel in every mode: two gloo processes on one machine against naive gradients averaged by hand."""

from __future__ import annotations

import functools
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers import MODES, assert_same, buffers, classification_loss, gradients, images, layers, toy
from ranks import on_ranks

RANKS = 2
STEPS = 3
OPTIONS = {
    "plain": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "no_broadcast": {"broadcast_buffers": False, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
}
VARIANTS = {
    "all_trained": lambda model: None,
    "stem_frozen": lambda model: model.features.conv0.requires_grad_(False),
    "first_block_frozen": lambda model: model.features.denseblock1.requires_grad_(False),
    "replaced_norm": lambda model: setattr(layers(model)[1], "norm1", nn.GroupNorm(2, 12).double()),
    "two_forwards": lambda model: None,
    "accumulated": lambda model: None,
}
CASES = [
    *[("all_trained", options) for options in OPTIONS],
    ("stem_frozen", "plain"),
    ("first_block_frozen", "find_unused_parameters"),
    ("replaced_norm", "plain"),
    ("two_forwards", "no_broadcast"),
    ("accumulated", "plain"),
]


def build(variant: str, mode: str) -> nn.Module:
    model = toy(mode)
    VARIANTS[variant](model)
    return model


def batches(variant: str, rank: int, step: int) -> list[list[torch.Tensor]]:
    """What a rank reads in a step: lists of batches, each forwarded one by one before one backward."""
    first, second = (images(3, 3, 8, 8, seed=100 * step + 10 * rank + number) for number in (0, 1))
    return {"two_forwards": [[first, second]], "accumulated": [[first], [second]]}.get(variant, [[first]])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def train(model: DistributedDataParallel, variant: str, rank: int) -> dict:
    """Some steps of SGD on this rank's images."""
    optimizer = sgd(model)
    state = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        *earlier, last = batches(variant, rank, step)
        for group in earlier:
            with model.no_sync():
                sum(classification_loss(model(x)) for x in group).backward()
        sum(classification_loss(model(x)) for x in last).backward()
        found = {**gradients(model.module), **buffers(model.module)}
        state |= {f"step {step}: {name}": value for name, value in found.items()}
        optimizer.step()
    return {**state, **{name: p.detach().clone() for name, p in model.module.named_parameters()}}


def worker(rank: int, folder: str) -> None:
    """One rank: all cases in one process group, results into a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    results = {}
    for mode in MODES:
        for variant, options in CASES:
            model = DistributedDataParallel(build(variant, mode), **OPTIONS[options])
            results[mode, variant, options] = train(model, variant, rank)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What every rank found, by (mode, variant, options)."""
    folder = str(tmp_path_factory.mktemp("gloo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(worker, args=(folder,), nprocs=RANKS)
    return [torch.load(f"{folder}/rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@functools.lru_cache(maxsize=None)
def expected(variant: str, options: str) -> list[dict]:
    """What plain models on all ranks' images do when their gradients are averaged; rank 0's buffers go to all."""
    models = [build(variant, "naive") for _ in range(RANKS)]
    optimizers = [sgd(model) for model in models]
    states: list[dict] = [{} for _ in models]
    for step in range(STEPS):
        sent = []  # rank 0's buffers before each of its forwards
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            number = 0
            for index, group in enumerate(batches(variant, rank, step)):
                loss = 0
                for x in group:
                    if rank == 0:
                        sent.append(buffers(model))
                    # DDP sends them before a forward whose predecessor exchanged gradients.
                    elif index == 0 and options != "no_broadcast":
                        for name, buffer in model.named_buffers():
                            buffer.copy_(sent[number][name])
                    number += 1
                    loss = loss + classification_loss(model(x))
                loss.backward()
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            if parameters[0].grad is not None:
                mean = sum(p.grad for p in parameters) / RANKS
                for p in parameters:
                    p.grad = mean.clone()
        for model, optimizer, state in zip(models, optimizers, states, strict=True):
            found = {**gradients(model), **buffers(model)}
            state |= {f"step {step}: {name}": value for name, value in found.items()}
            optimizer.step()
    for model, state in zip(models, states, strict=True):
        state |= {name: p.detach().clone() for name, p in model.named_parameters()}
    return states


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("variant", "options"), CASES, ids=["-".join(case) for case in CASES])
def test_gradients_are_the_mean_and_buffers_right(ranks, mode, variant, options):
    """Kills: "mark a variable ready only once", gradients that miss a rank, buffers replaced under DDP's hands."""
    for rank, want in enumerate(expected(variant, options)):
        assert_same(want, ranks[rank][mode, variant, options])


def channels_last_step() -> None:
    """On one rank, where a warning is an error."""
    dist.init_process_group("gloo")
    for mode in ("naive", *MODES):
        model = toy(mode).to(memory_format=torch.channels_last)
        x = images(3, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        ddp = DistributedDataParallel(model)
        for _ in range(2):
            classification_loss(ddp(x)).backward()
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_gradients_come_in_the_strides_of_the_weights(tmp_path):
    """Kills: a 1x1 kernel's gradient whose sides of length one have strides of their own, of which DDP warns."""
    assert on_ranks(1, tmp_path, channels_last_step) == [None]

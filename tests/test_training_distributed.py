"""Several processes: who they are, and that what they do together ends together."""

import contextlib
import os
import signal
import sys
import weakref

import pytest
import torch
from ranks import free_port, on_ranks
from torch import nn

from efficient_densenet import SyncBatchNorm, densenet_bc
from efficient_densenet.training import checkpoint, data, distributed, engine
from efficient_densenet.training.config import Config, RunError, UsageError
from efficient_densenet.training.distributed import World, find_world

# Python 3.12 and later warn of every fork; the processes forked here use one thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

# Who is there


@pytest.fixture(autouse=True)
def launcher(monkeypatch):
    """No launcher; call the result to pretend one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def pretend(rank, size, local=None, gpus=0):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        if size:
            for name, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}.items():
                monkeypatch.setenv(name, str(value))

    return pretend


@pytest.mark.parametrize(
    "rank, size, gpus, flags, expected",
    [
        (0, 0, 0, {}, World()),
        (0, 0, 1, {}, World(device=torch.device("cuda:0"))),
        (0, 0, 4, {}, World(device=torch.device("cuda:0"), gpus=4)),
        (0, 0, 4, {"device": "cpu"}, World()),
        (0, 0, 4, {"device": "cuda:2"}, World(device=torch.device("cuda:2"))),
        (0, 0, 4, {"parallel": "none"}, World(device=torch.device("cuda:0"))),
        (0, 0, 4, {"parallel": "dp", "device": "cuda"}, World(device=torch.device("cuda:0"), gpus=4)),
        (1, 2, 0, {}, World(1, 1, 2, distributed=True)),
        (1, 2, 4, {}, World(1, 1, 2, torch.device("cuda:1"), distributed=True)),
        (1, 2, 4, {"device": "cpu"}, World(1, 1, 2, distributed=True)),
        (0, 1, 4, {}, World(0, 0, 1, torch.device("cuda:0"), distributed=True)),
    ],
)
def test_processes_and_devices(launcher, rank, size, gpus, flags, expected):
    launcher(rank, size, gpus=gpus)
    assert find_world(Config(**flags)) == expected


@pytest.mark.parametrize(
    "rank, size, gpus, flags, words",
    [
        (0, 0, 0, {"device": "cuda"}, "--device cuda: no CUDA GPU is visible"),
        (0, 0, 2, {"device": "cuda:2"}, "the last is cuda:1"),
        (0, 0, 2, {"device": "tpu"}, "--device tpu: expected one of auto, cpu, cuda, cuda:N"),
        (0, 0, 2, {"parallel": "ddp"}, "--parallel ddp: start it with torchrun"),
        (0, 0, 0, {"parallel": "dp"}, "--parallel dp: needs visible CUDA GPUs"),
        (0, 2, 2, {"parallel": "dp"}, "--parallel dp: torchrun started 2 processes"),
        (0, 2, 2, {"parallel": "none"}, "--parallel none: torchrun started 2 processes"),
        (0, 2, 2, {"device": "cuda:1"}, "--device cuda:1: torchrun started 2 processes"),
        (0, 4, 2, {}, "4 processes for 2 visible GPUs"),
        (0, 0, 2, {"compile": True}, "--compile True: not with DataParallel"),
        (0, 0, 2, {"sync_bn": True}, "--sync_bn True: not with DataParallel"),
        (0, 0, 2, {"memory_budget": "1GiB"}, "--memory_budget 1GiB: not with DataParallel"),
        (0, 0, 2, {"batch_size": "auto"}, "--batch_size auto: not with DataParallel"),
        (0, 0, 0, {"batch_size": "auto"}, "--batch_size auto: a CPU has no memory of its own to fill, add"),
        (0, 0, 2, {"batch_size": "auto", "device": "cpu"}, "--batch_size auto: a CPU has"),
    ],
)
def test_what_cannot_be_served_is_refused(launcher, rank, size, gpus, flags, words):
    launcher(rank, size, gpus=gpus)
    with pytest.raises(UsageError, match=words):
        find_world(Config(**flags))


def test_looking_for_gpus_starts_no_cuda():
    find_world(Config())
    assert not torch.cuda.is_initialized()


def test_the_step_in_words():
    assert str(World()) == "1 CPU" and str(World(size=2)) == "2 CPU processes"
    assert str(World(size=2, device=torch.device("cuda"), gpus=1)) == "2 GPUs"
    four = World(device=torch.device("cuda:0"), gpus=4)
    assert str(four) == "4 GPUs" and four.replicas == 4
    assert [engine.step_lr(Config(lr_scaling=how), four) for how in ("linear", "sqrt", "none")] == [0.4, 0.2, 0.1]
    words = "4 GPUs x 64 = 256 images per step, lr 0.4 (by DataParallel; torchrun --nproc_per_node=4 demo.py is faster)"
    assert engine.describe_step(Config(warmup_epochs=0), four) == words
    assert "lr 0.4 after 5 warm-up epochs (the run is over by then)" in engine.describe_step(Config(n_epochs=5), four)
    processes = World(size=4, device=torch.device("cuda:0"), distributed=True)
    assert engine.describe_step(Config(warmup_epochs=0), processes) == words.partition(" (")[0]


def test_cpus_are_shared_by_the_processes_of_a_machine(monkeypatch):
    monkeypatch.setattr(distributed.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert distributed.cpus_per_process() == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert distributed.cpus_per_process() == 1


# What they do together


class Order(nn.Module):
    """Its one logit pair depends on a running statistic that differs between ranks."""

    def __init__(self, rank):
        super().__init__()
        self.register_buffer("running_mean", torch.tensor([float(rank), 2.0]))
        self.register_buffer("num_batches_tracked", torch.tensor(rank))

    def forward(self, x):
        return torch.stack([x.flatten(1)[:, 0], torch.full((len(x),), 2.5)], dim=1)


def _together():
    seen = {}
    with distributed.start(Config(device="cpu")) as world:
        seen["values"] = world.gather(world.rank * 10)
        seen["main"] = world.on_main(lambda: f"from {world.rank}")
        turns = []
        world.together(
            (world.rank == 0, lambda: turns.append("first")), (world.rank != 0, lambda: turns.append("second"))
        )
        seen["turns"] = world.gather(turns)
        for name, error in (
            ("usage", UsageError("--data x: not there")),
            ("run", RunError("disk\nfull")),
            ("bug", KeyError("k")),
        ):

            def fails():
                raise error

            try:
                world.together((world.rank == 1, fails))
            except (UsageError, RunError, KeyError) as raised:
                seen[name] = (type(raised).__name__, str(raised), distributed.speaks_for(raised))

        model = Order(world.rank)
        world.average_buffers(model)
        seen["buffers"] = (model.running_mean.tolist(), model.num_batches_tracked.item())
        model.running_mean.fill_(world.rank)
        world.broadcast(model)
        seen["broadcast"] = (model.running_mean.tolist(), model.num_batches_tracked.item())

        for size in (7, 2):  # evaluation: fewer images than ranks as well
            images = [(torch.full((1, 2, 2), float(i)), i % 2) for i in range(size)]
            loader = data.batches(images, data.EvalSampler(size, world), Config(batch_size=2, num_workers=0), world)
            seen[f"evaluate {size}"] = engine.evaluate(model, loader, Config(channels_last=False), world)

        torch.manual_seed(world.rank)
        wrapped = world.wrap(nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False), nn.BatchNorm1d(2)))
        x = torch.randn(8, 1, 2, 2, generator=torch.Generator().manual_seed(5))
        wrapped(x[world.rank :: 3]).square().sum().backward()
        linear, norm = wrapped.module[1], wrapped.module[2]
        seen["wrapped"] = (linear.weight.tolist(), linear.weight.grad.tolist(), norm.running_mean.tolist())
    return seen


def test_three_ranks(tmp_path):
    seen = on_ranks(3, tmp_path, _together)
    first = seen[0]
    for rank, mine in enumerate(seen):
        assert mine["values"] == [0, 10, 20] and mine["main"] == "from 0"
        assert mine["turns"] == [["first"], ["second"], ["second"]]
        assert mine["usage"] == ("UsageError", "--data x: not there", rank == 0)
        assert mine["run"] == ("RunError", "disk full", rank == 0)
        assert mine["bug"] == (("KeyError", "'k'", True) if rank == 1 else ("RunError", "'k'", rank == 0))
        assert mine["buffers"] == ([1.0, 2.0], rank)  # the mean of 0, 1, 2; counters are left alone
        assert mine["broadcast"] == ([0.0, 0.0], 0)
        assert mine["wrapped"][:2] == first["wrapped"][:2]  # the same weights, the same gradient
    assert seen[1]["wrapped"][2] != first["wrapped"][2]  # and each rank's own statistics

    for size in (7, 2):
        images = [(torch.full((1, 2, 2), float(i)), i % 2) for i in range(size)]
        loader = data.batches(images, range(size), Config(batch_size=2, num_workers=0), World())
        alone = engine.evaluate(Order(0), loader, Config(channels_last=False), World())
        for mine in seen:
            assert mine[f"evaluate {size}"] == pytest.approx(alone, abs=1e-7)


# What they train


class Batches(list):
    """What :func:`engine.train_steps` needs of a loader."""

    @property
    def sampler(self):
        return range(sum(len(labels) for _, labels in self))


def _run(config, world, seed):
    model = densenet_bc(10, 4, drop_rate=config.drop_rate)
    if config.sync_bn and world.size > 1:
        model = SyncBatchNorm.convert_sync_batchnorm(model)
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), engine.step_lr(config, world), config.momentum, nesterov=True)
    return checkpoint.State(
        model=model,
        optimizer=optimizer,
        scheduler=engine.scheduler(optimizer, config, world),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        ema=engine.averaged(model, config.ema_decay),
        totals=engine.Totals(torch.device("cpu")),
    )


def _images(step, count):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 3, 8, 8, generator=generator), torch.randint(10, (count,), generator=generator)


def _parameters(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _after_each_step():
    config, after = Config(device="cpu", batch_size=4, drop_rate=0.2, ema_decay=0.9, accumulation_steps=2), []
    with distributed.start(config) as world:
        torch.manual_seed(world.rank)  # the wrapper gives all ranks the weights of the first
        state = _run(config, world, seed=world.rank)
        trained = world.wrap(state.model)
        batches = Batches(_images(10 * world.rank + step, 4) for step in range(9))
        for _ in engine.train_steps(trained, batches, state, config, world):
            after.append(_parameters(state.model))
    return after


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hold_equal_parameters_after_each_step(tmp_path, size):
    """Kills: gradients that are not exchanged, or exchanged before the accumulation is complete."""
    first, *others = on_ranks(size, tmp_path, _after_each_step)
    assert len(first) == 5 and not torch.equal(first[0], first[4])
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


def _synchronised(sync_bn=True):
    config = Config(device="cpu", batch_size=4, sync_bn=sync_bn, warmup_epochs=0, lr=0.05, lr_scaling="none")
    with distributed.start(config) as world:
        torch.manual_seed(7)
        state = _run(config, world, seed=0)
        batches = Batches([part[4 * world.rank :][:4] for part in _images(step, 8)] for step in range(5))
        for _ in engine.train_steps(world.wrap(state.model), batches, state, config, world):
            pass
        loss = state.totals.over_ranks(world)[0]
    return state.model.state_dict(), loss


def test_synchronised_batch_norm_trains_as_one_process_with_the_whole_batch(tmp_path):
    config = Config(batch_size=8, lr=0.05)
    torch.manual_seed(7)
    state = _run(config, World(), seed=0)
    whole = Batches(_images(step, 8) for step in range(5))
    for _ in engine.train_steps(state.model, whole, state, config, World()):
        pass
    for mine, loss in on_ranks(2, tmp_path, _synchronised):
        assert loss == pytest.approx(state.totals.means()[0], rel=1e-4)
        for name, tensor in state.model.state_dict().items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    local, _ = on_ranks(2, tmp_path, _synchronised, False)[0]
    assert not torch.allclose(local["features.norm5.running_var"], mine["features.norm5.running_var"], rtol=1e-2)


# How they part


def _part(error, ports):
    """What gloo's threads still hold of the last exchange when a group has ended, for one group after the other."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)  # a thread that waits for itself would not end
    sys.setswitchinterval(60)  # Python's lock is had only where it is let go of
    held = []
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        with contextlib.suppress(KeyError), distributed.start(Config(device="cpu")):
            given, got = torch.ones(9999), [torch.zeros(9999) for _ in range(2)]
            left = [weakref.ref(tensor) for tensor in (given, *got)]
            torch.distributed.all_gather(got, given)
            del given, got
            if error:
                raise KeyError
        held += [tensor() for tensor in left if tensor() is not None]
        if error:
            torch.distributed.destroy_process_group()
    return held


@pytest.mark.parametrize("error", [False, True])
def test_a_process_ends_when_gloo_has_freed_what_it_exchanged(tmp_path, error):
    """Kills: destroying the group as a whole (torch 2.4 then hangs, mostly); an error that leaves gloo no moment."""
    assert on_ranks(2, tmp_path, _part, error, [free_port() for _ in range(12)]) == [[], []]

"""One process or many: who this process is, and what all of them do together."""

import contextlib
import datetime
import inspect
import os
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from .config import RunError, UsageError


@dataclass(frozen=True)
class World:
    """The processes that train one model, seen from one of them.

    Attributes:
        rank, local_rank, size: This process, its number on this machine, and how many there are in all.
        device: Where this process computes.
        gpus: GPUs that one process drives: more than one under DataParallel only.
        distributed: Whether there is a process group (under torchrun, of one process too).
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    gpus: int = 1
    distributed: bool = False

    @property
    def is_main(self):
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    @property
    def replicas(self):
        """GPUs (or CPU processes) that share a step: its batch is ``batch_size`` times this."""
        return self.size * self.gpus

    @property
    def devices(self):
        """The devices of this process."""
        return [torch.device("cuda", i) for i in range(self.gpus)] if self.gpus > 1 else [self.device]

    def __str__(self):
        """The replicas in words: ``1 CPU``, ``4 GPUs``, ``2 CPU processes``."""
        one, several = {"cuda": ("GPU", "GPUs")}.get(self.device.type, ("CPU", "CPU processes"))
        return f"{self.replicas} {one if self.replicas == 1 else several}"

    def together(self, *turns):
        """Calls functions one after the other; an error on one rank is raised on all, so that none waits for it.

        The ranks raise with one message, and mark it as ``shared``: one of them is enough to show it.

        Args:
            turns: Pairs of a condition on this rank and a function for the ranks where it holds. A turn begins when
                the one before is over everywhere.

        Returns:
            What this rank's function returned, or None.
        """
        result = None
        for mine, function in turns:
            error = None
            if mine:
                try:
                    result = function()
                except Exception as raised:
                    error = raised
            kind = next((kind for kind in (UsageError, RunError) if isinstance(error, kind)), None)
            failed = next(filter(None, self.gather(error and (kind, _line(error)))), None)
            if error is not None and kind is None:
                raise error  # something unforeseen: here with its traceback
            if failed is not None:
                shared = (failed[0] or RunError)(failed[1])
                shared.shared = True
                raise shared from error
        return result

    def on_main(self, function):
        """Calls the function on rank 0 and gives every rank its result, or its error."""
        result = [self.together((self.is_main, function))]
        if self.distributed:
            dist.broadcast_object_list(result, src=0, device=torch.device("cpu"))
        return result[0]

    def gather(self, value):
        """The ranks' values in a list, on every rank."""
        if not self.distributed:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def any(self, *conditions):
        """Whether each condition holds on any of the ranks; asked and answered by the CPUs."""
        if not self.distributed:
            return conditions
        flags = torch.tensor(conditions, dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return flags.bool().tolist()

    def sum(self, tensor):
        """The sum of the ranks' tensors, as a new tensor, on every rank."""
        total = tensor.clone()
        if self.distributed:
            dist.all_reduce(total)
        return total

    def wrap(self, model):
        """The model as it is called in training: itself, or shared among processes or GPUs.

        DistributedDataParallel leaves the buffers alone: every rank's BatchNorm sees its own images, and
        :meth:`average_buffers` puts the statistics together where they are used.
        """
        if self.distributed:
            ddp = nn.parallel.DistributedDataParallel
            sync = "forward_sync_buffers"  # "broadcast_buffers" in older releases
            if sync not in inspect.signature(ddp).parameters:
                sync = "broadcast_buffers"
            device_ids = [self.device.index] if self.device.type == "cuda" else None
            return ddp(model, device_ids=device_ids, gradient_as_bucket_view=True, **{sync: False})
        return self.spread(model)

    def spread(self, model):
        """The model on all GPUs of this process: under DataParallel where they are several."""
        return nn.DataParallel(model) if self.gpus > 1 else model

    @torch.no_grad()
    def average_buffers(self, model):
        """Replaces floating-point buffers (BatchNorm's running statistics) by their mean over the ranks."""
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if self.size == 1 or not buffers:
            return
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        dist.all_reduce(flat)
        for buffer, mean in zip(buffers, (flat / self.size).split([buffer.numel() for buffer in buffers])):
            buffer.copy_(mean.view_as(buffer))

    @torch.no_grad()
    def broadcast(self, model):
        """Gives every rank the parameters and buffers of rank 0."""
        if self.distributed:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)


def under_torchrun():
    """Whether this process was started by torchrun (or sets the same variables)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launcher():
    """Names the torchrun that started this process, the same for all restarts; None without one, or not on Linux."""
    if not under_torchrun():
        return None
    try:
        with open(f"/proc/{os.getppid()}/stat", "rb") as stat, open("/proc/sys/kernel/random/boot_id") as boot:
            started = stat.read().rpartition(b")")[2].decode().split()[19]
            return f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{boot.read().strip()}/{os.getppid()}/{started}"
    except OSError:
        return None


class Stopped(Exception):
    """The end of a run that was asked to stop, after its checkpoint is written."""

    shared = True

    def __init__(self, received, where, folder):
        received = received or signal.SIGTERM  # another rank's
        super().__init__(f"stopped by {received.name} {where}; go on with --resume {folder}")
        self.exit_code = 128 + received


class Signals:
    """Notes SIGTERM and Ctrl-C instead of dying of them, while it is in use as a context manager.

    Attributes:
        received: The first signal, or None. A second Ctrl-C ends the process as usual (under torchrun, which passes
            signals on that the terminal has sent already, it does not).
    """

    def __init__(self):
        self.received = None

    def __enter__(self):
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number, frame):
        if self.received is not None and number == signal.SIGINT and not under_torchrun():
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)


def speaks_for(error):
    """Whether this process shows an error: the first one on a machine where all have it, else the one that has it."""
    return (
        not (isinstance(error, UsageError) or getattr(error, "shared", False))
        or os.environ.get("LOCAL_RANK", "0") == "0"
    )


@contextlib.contextmanager
def start(config):
    """Finds this process's device, joins the others if there are any, and yields the :class:`World`."""
    world = find_world(config)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if not world.distributed:
        yield world
        return
    # Objects and flags go through gloo on the CPU, so that asking the others never waits for a GPU.
    backend = "gloo" if world.device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = datetime.timedelta(minutes=30)
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    # torchrun may keep one store for all its restarts, with the addresses of processes that are no more.
    store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield world
    except BaseException:
        # No goodbye: it would wait for the others, who wait for this process to end. But Python aborts if it ends while
        # gloo's threads want its lock, to free what the last exchange has left: they get a moment for that.
        time.sleep(0.1)
        raise
    _leave()


def _leave():
    """Ends the process group.

    One of gloo's threads may want Python's lock, to free what the last exchange has left. torch 2.4 waits for it with
    that lock held, for ever, where the group is destroyed as a whole; it lets go of the lock for a gloo that is
    destroyed last, by itself, as the one held here is.
    """
    # A private name; releases that lack it do not need it.
    gloo = getattr(dist.group.WORLD, "_get_backend", lambda _: None)(torch.device("cpu"))
    dist.destroy_process_group()
    del gloo


def find_world(config):
    """Decides device and parallelism from the flags, the environment and the GPUs in sight, touching none of them.

    Raises:
        UsageError: Flags that this machine or this way of starting cannot serve.
    """
    gpus = torch.cuda.device_count()
    if config.device.startswith("cuda") and gpus == 0:
        raise UsageError(f"--device {config.device}: no CUDA GPU is visible, use --device cpu")
    on_gpu = config.device != "cpu" and gpus > 0
    if config.batch_size == "auto" and config.memory_budget is None and not on_gpu:
        raise UsageError("--batch_size auto: a CPU has no memory of its own to fill, add e.g. --memory_budget 4GiB")
    index = int(config.device[5:]) if config.device.startswith("cuda:") else None
    if index is not None and index >= gpus:
        raise UsageError(f"--device {config.device}: {gpus} CUDA GPUs are visible, the last is cuda:{gpus - 1}")

    if under_torchrun():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        if config.parallel in ("dp", "none") and size > 1:
            raise UsageError(f"--parallel {config.parallel}: torchrun started {size} processes, which is ddp")
        if index is not None and size > 1:
            raise UsageError(f"--device {config.device}: torchrun started {size} processes, use --device cuda")
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
        if on_gpu and processes > gpus:
            raise UsageError(f"--device {config.device}: {processes} processes for {gpus} visible GPUs on this machine")
        device = torch.device("cuda", local_rank if index is None else index) if on_gpu else torch.device("cpu")
        return World(rank, local_rank, size, device, distributed=True)

    if config.parallel == "ddp":
        raise UsageError("--parallel ddp: start it with torchrun --nproc_per_node=N demo.py")
    if config.parallel == "dp" and not (on_gpu and index is None):
        raise UsageError("--parallel dp: needs visible CUDA GPUs and no number in --device")
    several = on_gpu and index is None and gpus > 1 and config.parallel != "none"
    unserved = {"compile": config.compile, "sync_bn": config.sync_bn, "memory_budget": config.memory_budget,
                "batch_size": config.batch_size == "auto" and "auto"}  # fmt: skip
    for flag, value in unserved.items():
        if several and value:
            raise UsageError(f"--{flag} {value}: not with DataParallel; use torchrun, or --parallel none")
    device = torch.device("cuda", index or 0) if on_gpu else torch.device("cpu")
    return World(device=device, gpus=gpus if several else 1)


def cpus_per_process():
    """CPUs that this process may use, shared with the others on this machine."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cpus // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _line(error):
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__

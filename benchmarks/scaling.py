"""How training scales over processes: images/s, speed-up, efficiency, memory and the share of communication.

python benchmarks/scaling.py
python benchmarks/scaling.py --model densenet121 --processes 1,2,4,8 --output rows.csv
python benchmarks/scaling.py --batch_norm plain --ddp default
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import (
    MIB,
    Conditions,
    as_tuple,
    boolean,
    build,
    choose,
    environment,
    is_out_of_memory,
    print_row,
    size,
    start,
    title,
    whole,
    write_rows,
)  # fmt: skip
from torch.nn.parallel import DistributedDataParallel

from efficient_densenet import SyncBatchNorm
from efficient_densenet.memory import measure_allocations

DDP = {
    "default": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "small_buckets": {"bucket_cap_mb": 1},
    "large_buckets": {"bucket_cap_mb": 100},
}
BATCH_NORM = ("plain", "synchronised")
ALONE = "none"  # a process alone, or the work of one without what it would exchange


@dataclass(frozen=True, kw_only=True)
class Settings(Conditions):
    """Training steps of 1, 2, 4, … processes, one GPU each, or one core of the CPU each (gloo).

    Every process has its own batch, so that the work per process stays the same; a step is forward, loss, backward with
    the exchange of gradients, and SGD. All numbers of processes and all settings are run in turn, A B A B, in one run,
    by the same processes, of which those that are not needed wait.

    Efficiency is the images/s of a process against those of one process alone, without DistributedDataParallel: of the
    median steps, and of the fastest ones. Communication is the share of a step beyond the same step without exchange,
    while as many processes work: the machine's shared memory and clock are not counted as communication.

    Args:
        model: densenet_bc, densenet121, 161, 169, 201, 264, or densenet3d.
        depth: Depth of DenseNet-BC. Default: 100.
        modes: What is compared, separated by commas. Default: fused.
        processes: Numbers of processes, separated by commas, 1 among them. Default: those of 1, 2, 4 and 8 for which
            the machine has GPUs, or cores.
        batch_norm: plain, synchronised (over all processes), or both, separated by commas. Default: both.
        ddp: DistributedDataParallel's options, separated by commas; of default, bucket_view for its
            gradient_as_bucket_view, static_graph, small_buckets of 1 MiB, large_buckets of 100 MiB.
        growth_rate: k of DenseNet-BC. Default: 12.
        batch_size: Images per process and step. Default: 64 (densenet_bc), 2 (densenet3d) or 16.
        image_size: Their side. Default: 32 (densenet_bc), 80 (densenet3d) or 224.
        spatial_dims: 1, 2 or 3, DenseNet-BC on sequences, images or volumes. Default: 2.
        dtype: float32, float64, bfloat16 or float16.
        device: auto, cpu or cuda.
        channels_last: Model and images in the channels-last layout, which sequences do not have.
        rounds: Timed steps of each.
        output: Write the rows to this CSV file.
    """

    depth: int | None = None
    modes: tuple[str, ...] | None = ("fused",)
    processes: tuple[int, ...] | None = None
    batch_norm: tuple[str, ...] = BATCH_NORM
    ddp: tuple[str, ...] = tuple(DDP)
    channels_last: bool = True
    rounds: int = 5

    def __post_init__(self):
        super().__post_init__()
        bc = self.model == "densenet_bc"
        if self.depth is not None and not bc:
            raise ValueError(f"depth={self.depth!r} has no meaning for {self.model}, whose depth is fixed")
        there = torch.cuda.device_count() if self.device == "cuda" else len(cores())
        what = "GPUs" if self.device == "cuda" else "cores"
        wanted = [n for n in (1, 2, 4, 8) if n <= there] if self.processes is None else as_tuple(self.processes)
        for n in wanted:
            if whole("processes", n) > there:
                raise ValueError(f"processes={n}: there are {there} {what}, and each process needs its own")
        if 1 not in wanted:
            raise ValueError(f"processes={','.join(map(str, wanted))}: 1 must be among them, the others are measured by it")
        self._set("processes", tuple(sorted(set(wanted))))
        self._set("batch_norm", as_tuple(self.batch_norm))
        for kind in self.batch_norm:
            choose("batch_norm", kind, BATCH_NORM)
        self._set("ddp", as_tuple(self.ddp))
        for options in self.ddp:
            choose("ddp", options, DDP)
        boolean("channels_last", self.channels_last)
        whole("rounds", self.rounds)
        self.cells()

    @staticmethod
    def devices() -> list[str]:
        return ["auto", "cpu", *["cuda"][: torch.cuda.device_count()]]

    def cells(self) -> list[dict[str, Any]]:
        """One cell per mode, number of processes and settings; without exchange first, by which those are measured."""
        depth = {"depth": self.depth or 100} if self.model == "densenet_bc" else {}
        common = {**depth, "channels_last": self.channels_last and self.spatial_dims > 1}
        cells = []
        for mode in self.modes:
            for n in self.processes:
                settings = [("plain", ALONE)]
                settings += [(kind, options) for kind in self.batch_norm for options in self.ddp] if n > 1 else []
                columns = [{"processes": n, "batch_norm": kind, "ddp": options} for kind, options in settings]
                cells += [self.cell(mode, **common, **of_cell) for of_cell in columns]
        return cells


def cores() -> list[int]:
    """The CPU's cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def training_step(cell: dict[str, Any], rank: int, groups: dict[int, tuple]) -> tuple[Callable[[], None], float]:
    """A function that trains one step in this process, warm, and the most MiB that it took; infinite: it does not fit.

    That is all that is allocated from the building of the model on: weights, gradients, the buckets they are exchanged
    in, the optimizer's state, and what a step needs.
    """
    device = torch.device(f"cuda:{rank}" if cell["device"] == "cuda" else "cpu")
    exchange, _ = groups[cell["processes"]]
    steps: list[Callable[[], None]] = []

    def prepare() -> None:
        model, x, loss = build({**cell, "device": str(device)})
        if cell["batch_norm"] == "synchronised":
            model = SyncBatchNorm.convert_sync_batchnorm(model, exchange)
        if cell["ddp"] != ALONE:
            device_ids = [rank] if device.type == "cuda" else None
            model = DistributedDataParallel(model, device_ids, process_group=exchange, **DDP[cell["ddp"]])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()

        for _ in range(2):  # the first one makes the optimizer's state, and DistributedDataParallel's buckets anew
            step()
        steps.append(step)

    try:
        peak = measure_allocations(prepare, device=device).peak_bytes / MIB
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return prepare, float("inf")
    return steps[0], peak


def work(rank: int, port: int, settings: Settings, folder: str) -> None:
    """What one of the processes does; the first one writes the times and peaks of all cells."""
    cells, cuda = settings.cells(), settings.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
        with contextlib.suppress(AttributeError, OSError):
            os.sched_setaffinity(0, [cores()[rank]])
    world = max(settings.processes)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    # For each number of processes, what they exchange tensors through, and what lets the host wait for the others.
    groups = {n: (dist.new_group(range(n)), dist.new_group(range(n), backend="gloo")) for n in settings.processes}
    everybody = groups[world][1]
    times: list[list[float]] = [[] for _ in cells]
    steps, peaks = [], []
    for cell in cells:
        step, peak = training_step(cell, rank, groups) if rank < cell["processes"] else (None, 0.0)
        found = torch.tensor(peak, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=everybody)
        steps.append(step)
        peaks.append(found.item())
    for _ in range(settings.rounds):
        for cell, step, peak, taken in zip(cells, steps, peaks, times, strict=True):
            _, together = groups[cell["processes"]]
            if step is not None and peak < float("inf"):
                dist.barrier(together)
                start = time.perf_counter()
                step()
                if cuda:
                    torch.cuda.synchronize()
                dist.barrier(together)  # the slowest process counts
                taken.append(1000 * (time.perf_counter() - start))
            dist.barrier(everybody)
    if rank == 0:
        torch.save((times, peaks), Path(folder) / "times")
    dist.barrier(everybody)
    dist.destroy_process_group()


def measure(settings: Settings) -> tuple[list[list[float]], list[float]]:
    """Milliseconds of every cell's steps, and its peak per process in MiB."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (port, settings, folder), nprocs=max(settings.processes))
        return torch.load(Path(folder) / "times", weights_only=True)


def summaries(cells: list[dict[str, Any]], times: list[list[float]]) -> list[dict[str, float | None]]:
    """The columns of every cell's steps, in milliseconds, against one process alone and those that exchange nothing."""
    taken = {(cell["mode"], cell["processes"], cell["batch_norm"], cell["ddp"]): t for cell, t in zip(cells, times)}
    rows = []
    for cell, mine in zip(cells, times, strict=True):
        columns: dict[str, float | None] = dict.fromkeys(
            ("step_ms", "fastest_ms", "images_per_s", "speed_up", "efficiency", "fastest_efficiency", "communication")
        )
        if mine:
            one, apart = (taken[cell["mode"], n, "plain", ALONE] for n in (1, cell["processes"]))
            columns["step_ms"] = round(statistics.median(mine), 2)
            columns["fastest_ms"] = round(min(mine), 2)
            columns["images_per_s"] = round(1000 * cell["processes"] * cell["batch_size"] / columns["step_ms"], 1)
            efficiency = statistics.median(o / t for o, t in zip(one, mine))
            columns["speed_up"] = round(cell["processes"] * efficiency, 3)
            columns["efficiency"] = round(efficiency, 3)
            columns["fastest_efficiency"] = round(min(one) / min(mine), 3)
            columns["communication"] = round(max(0.0, 1 - statistics.median(a / t for a, t in zip(apart, mine))), 3)
        rows.append(columns)
    return rows


def run(settings: Settings) -> list[dict[str, Any]]:
    """Time every cell in turn, print a table, and write what was asked for."""
    cells, conditions = settings.cells(), environment(settings.device)
    conditions["threads"] = 1
    times, peaks = measure(settings)
    print(f"{title(cells[0])}, {size(cells[0])} per process, {cells[0]['dtype']}, {conditions['hardware']}, "
          f"{conditions['cpu_capability']}")  # fmt: skip
    names = ("processes", "step ms", "images/s", "speed-up", "efficiency", "of fastest", "exchange", "peak MiB")
    print_row("BatchNorm, DistributedDataParallel", "mode", *names)
    rows = []
    for cell, numbers, peak in zip(cells, summaries(cells, times), peaks, strict=True):
        fits = peak < float("inf")
        status = "ok" if fits else "out of memory"
        row = {**cell, "rounds": settings.rounds, **numbers, "peak_mib": round(peak, 1) if fits else None}
        rows.append({**row, "status": status, **conditions})
        shown = ("step_ms", "images_per_s", "speed_up", "efficiency", "fastest_efficiency", "communication", "peak_mib")
        values = [row[name] for name in shown] if fits else [status]
        print_row(f"{cell['batch_norm']}, {cell['ddp']}", cell["mode"], cell["processes"], *values)
    if settings.output:
        write_rows(settings.output, rows)
    return rows


def main(arguments: list[str] | None = None) -> None:
    start(Settings, run, arguments)


if __name__ == "__main__":
    main()

"""Time of a training step or of inference, of all methods in turn in one run, against the plain model in channels-last.

python benchmarks/speed.py
python benchmarks/speed.py --model densenet121 --rounds 5 --output rows.csv
python benchmarks/speed.py --inference True
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from measure import (
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


@dataclass(frozen=True, kw_only=True)
class Settings(Conditions):
    """Time of one training step (forward, loss, backward) or of inference, in every mode and both memory layouts.

    All are run in turn, A B A B, in one process, so that a slow moment of the machine meets all of them. The result is
    the ratio to the plain model in channels-last, its best setting: the median of the ratios in each round, and the
    ratio of the fastest steps, which a shared machine's slow minutes move less.

    Args:
        model: densenet_bc (by depth), densenet121, 161, 169, 201, 264, or densenet3d (blocks 6 and 12, growth rate 32,
            volumes of one channel).
        modes: What is compared, separated by commas. Default: all, that is the library's modes, "concatenation"
            (torch.utils.checkpoint as one writes it without the library) and, for its models, "torchvision"
            (memory_efficient=True). The plain model is always there.
        depth: Depth of DenseNet-BC. Default: 100.
        growth_rate: k of DenseNet-BC. Default: 12.
        batch_size: Images per step. Default: 64 (densenet_bc), 2 (densenet3d) or 16.
        image_size: Their side. Default: 32 (densenet_bc), 80 (densenet3d) or 224.
        spatial_dims: 1, 2 or 3, DenseNet-BC on sequences, images or volumes. Default: 2.
        dtype: float32, float64, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        inference: Time the forward pass alone, in evaluation mode and without gradients.
        layouts: Memory layouts, contiguous and channels_last, separated by commas. Default: both (1-D: contiguous).
        rounds: Timed steps of each.
        output: Write the rows to this CSV file.
    """

    depth: int | None = None
    inference: bool = False
    layouts: tuple[str, ...] | None = None
    rounds: int = 5

    def __post_init__(self):
        super().__post_init__()
        bc = self.model == "densenet_bc"
        if self.depth is not None and not bc:
            raise ValueError(f"depth={self.depth!r} has no meaning for {self.model}, whose depth is fixed")
        possible = ("contiguous", "channels_last") if self.spatial_dims > 1 else ("contiguous",)
        layouts = possible if self.layouts is None else as_tuple(self.layouts)
        for layout in layouts:
            choose("layouts", layout, possible)
        self._set("layouts", layouts)
        boolean("inference", self.inference)
        whole("rounds", self.rounds)
        self.cells()  # names a depth or an image size that cannot be

    def cells(self) -> list[dict[str, Any]]:
        """Every contender; the reference, naive in channels-last where there is such a layout, first."""
        depth = {"depth": self.depth or 100} if self.model == "densenet_bc" else {}
        wanted = [(mode, layout == "channels_last") for mode in self.modes for layout in self.layouts]
        reference = ("naive", self.spatial_dims > 1)
        contenders = [reference, *(contender for contender in wanted if contender != reference)]
        columns = {**depth, "inference": self.inference}
        return [self.cell(mode, **columns, channels_last=channels_last) for mode, channels_last in contenders]


def timed_step(cell: dict[str, Any], make: Callable[[dict], tuple] | None = None) -> Callable[[], float] | None:
    """A function that runs one step of the cell, warm, and returns its milliseconds; None: it does not fit.

    A step is forward, loss and backward, or in ``inference`` the forward pass in evaluation mode without gradients.

    Args:
        cell: what is timed.
        make: its model, input and loss; by default :func:`~measure.build`.
    """
    model, x, loss = (make or build)(cell)
    training = not cell.get("inference")
    model.train(training)
    synchronize = torch.cuda.synchronize if x.is_cuda else lambda: None

    def step() -> float:
        model.zero_grad(set_to_none=True)
        synchronize()
        start = time.perf_counter()
        with torch.set_grad_enabled(training):
            output = model(x)
        if training:
            loss(output).backward()
        synchronize()
        return 1000 * (time.perf_counter() - start)

    try:
        step()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    return step


def in_turn(steps: list[Callable[[], float] | None], rounds: int) -> list[list[float]]:
    """What every step took in every round, A B A B; nothing of those that do not fit."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, taken in zip(steps, times):
            if step is not None:
                taken.append(step())
    return times


def summary(taken: list[float], reference: list[float]) -> dict[str, float | None]:
    """The columns of a contender's steps, in milliseconds, against those of the reference in the same rounds."""
    columns = dict.fromkeys(("step_ms", "spread_ms", "fastest_ms", "ratio", "fastest_ratio"))
    if taken:
        columns["step_ms"] = round(statistics.median(taken), 2)
        columns["spread_ms"] = round(max(taken) - min(taken), 2)
        columns["fastest_ms"] = round(min(taken), 2)
    if taken and reference:
        columns["ratio"] = round(statistics.median(t / r for t, r in zip(taken, reference)), 4)
        columns["fastest_ratio"] = round(min(taken) / min(reference), 4)
    return columns


def run(settings: Settings) -> list[dict[str, Any]]:
    """Time every contender in turn, print a table, and write what was asked for."""
    conditions = environment(settings.device)
    cells = settings.cells()
    times = in_turn([timed_step(cell) for cell in cells], settings.rounds)

    first = cells[0]
    work = f"{title(first)}, {size(first)}, {'inference' if settings.inference else 'training step'}, {first['dtype']}"
    print(f"{work}, {conditions['hardware']}, {conditions['cpu_capability']}, {conditions['threads']} threads")
    print_row("mode", "layout", "step ms", "spread ms", "fastest ms", "ratio", "of fastest")
    rows = []
    for cell, taken in zip(cells, times):
        numbers = summary(taken, times[0])
        status = "ok" if taken else "out of memory"
        layout = "channels-last" if cell["channels_last"] else "contiguous"
        print_row(cell["mode"], layout, *(numbers.values() if taken else [status]))
        rows.append({**cell, "rounds": settings.rounds, **numbers, "status": status, **conditions})
    if settings.output:
        write_rows(settings.output, rows)
    return rows


def main(arguments: list[str] | None = None) -> None:
    start(Settings, run, arguments)


if __name__ == "__main__":
    main()

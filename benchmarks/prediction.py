"""Memory of a training step as predicted without running it, against what it allocates.

python benchmarks/prediction.py
python benchmarks/prediction.py --model densenet121 --batch_sizes 1,2,4 --image_size 128 --output rows.csv
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from measure import (
    MIB, TORCHVISION, Conditions, as_tuple, boolean, build, choose, environment, print_row, run_in_fresh_process, size,
    start, title, whole, write_rows,
)  # fmt: skip

from efficient_densenet import make_efficient
from efficient_densenet.memory import estimate_memory, measure_step

CONVERTED = ("naive", "fused", "lean")
BATCH_SIZES = {"densenet_bc": (2, 4, 8), "densenet3d": (1, 2, 3)}


@dataclass(frozen=True, kw_only=True)
class Settings(Conditions):
    """The predicted peak of a training step on the CPU against that of its real allocations, by mode and batch size.

    A step is forward, cross-entropy and backward; parameters are left out, their gradients are in. Every row comes from
    a fresh process.

    Args:
        model: densenet_bc, densenet121, 161, 169, 201, 264, or densenet3d (blocks 6 and 12, growth rate 32, volumes of
            one channel).
        depth: Depth of DenseNet-BC. Default: 100.
        modes: What is predicted, separated by commas. Default: all, that is the library's modes, "concatenation"
            (torch.utils.checkpoint as one writes it without the library) and, for its models, "torchvision"
            (memory_efficient=True).
        growth_rate: k of DenseNet-BC. Default: 12.
        batch_sizes: Images per step. Default: 2,4,8 (densenet_bc) or 1,2,3.
        batch_size: The same, a single one.
        image_size: Their side. Default: 32 (densenet_bc), 80 (densenet3d) or 224.
        spatial_dims: 1, 2 or 3, DenseNet-BC on sequences, images or volumes. Default: 2.
        dtype: float32 or float64.
        device: cpu.
        converted: torchvision's network, made efficient in each of the modes naive, fused, lean.
        output: Write the rows to this CSV file.
    """

    depth: int | None = None
    device: str = "cpu"
    batch_sizes: tuple[int, ...] | None = None
    converted: bool = False

    def __post_init__(self):
        if self.batch_sizes is None:
            several = BATCH_SIZES.get(self.model, (1, 2, 3))
            self._set("batch_sizes", several if self.batch_size is None else as_tuple(self.batch_size))
        boolean("converted", self.converted)
        if self.converted:
            choose("model", self.model, TORCHVISION)
            self._set("modes", CONVERTED if self.modes is None else as_tuple(self.modes))
            for mode in self.modes:
                choose("modes", mode, CONVERTED)
        self._set("batch_sizes", tuple(whole("batch_sizes", batch) for batch in as_tuple(self.batch_sizes)))
        super().__post_init__()
        bc = self.model == "densenet_bc"
        if self.depth is not None and not bc:
            raise ValueError(f"depth={self.depth!r} has no meaning for {self.model}, whose depth is fixed")
        self._set("depth", whole("depth", self.depth or 100) if bc else None)
        self.cells()  # names a depth or an image size that cannot be

    @staticmethod
    def dtypes() -> list[str]:
        return ["float32", "float64"]

    @staticmethod
    def devices() -> list[str]:
        return ["cpu"]

    def cells(self) -> list[dict[str, Any]]:
        """One cell per mode and batch size."""
        depth = {"depth": self.depth} if self.depth else {}
        columns = [{**depth, "batch_size": batch, "converted": self.converted} for batch in self.batch_sizes]
        return [self.cell(mode, **of_cell) for of_cell in columns for mode in self.modes]


def compare_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """One step, predicted and run."""
    model, x, loss = build(cell)
    if cell["converted"]:
        import torchvision

        model = make_efficient(getattr(torchvision.models, cell["model"])(), cell["mode"])
    predicted = estimate_memory(model, x, loss=lambda output: loss(output, target=torch.arange(len(output)) % 10))
    loss(model(x[:2]), target=torch.arange(len(x[:2])) % 10).backward()  # warms up
    return {"predicted_bytes": predicted.step_bytes, "measured_bytes": measure_step(model, x, loss).peak_bytes}


def named(row: dict[str, Any]) -> str:
    """What was done, as a table names it."""
    return f"{title(row)}{' of torchvision, converted' if str(row['converted']) == 'True' else ''}, {size(row)}"


def run(settings: Settings) -> list[dict[str, Any]]:
    """Compare every cell, print it, and write what was asked for."""
    print_row("training step", "mode", "predicted MiB", "measured MiB", "error %")
    conditions = environment(settings.device)
    rows: list[dict[str, Any]] = []
    for cell in settings.cells():
        row = run_in_fresh_process(compare_cell, cell) | conditions
        rows.append(row)
        if settings.output:
            write_rows(settings.output, rows)  # after each: a run that is stopped has lost nothing
        if row["status"] != "ok":
            print_row(named(row), row["mode"], row["status"])
            continue
        predicted, measured = row["predicted_bytes"], row["measured_bytes"]
        numbers = f"{predicted / MIB:.1f}", f"{measured / MIB:.1f}", f"{100 * (predicted / measured - 1):+.2f}"
        print_row(named(row), row["mode"], *numbers)
    return rows


def main(arguments: list[str] | None = None) -> None:
    start(Settings, run, arguments)


if __name__ == "__main__":
    main()

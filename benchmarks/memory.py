"""Memory of a training step: the peak of allocations, and what is kept after the forward pass.

python benchmarks/memory.py
python benchmarks/memory.py --modes naive,checkpoint --depths 40,100 --output rows.csv --figure figure.png
python benchmarks/memory.py --model densenet121 --batch_size 8

Out of memory is a row too.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

from measure import (
    MIB,
    Conditions,
    as_tuple,
    boolean,
    build,
    environment,
    print_row,
    run_in_fresh_process,
    size,
    start,
    title,
    whole,
    writable,
    write_rows,
)  # fmt: skip

from efficient_densenet.memory import measure_step


@dataclass(frozen=True, kw_only=True)
class Settings(Conditions):
    """Memory of one training step, from real allocations, by mode and depth.

    A step is forward, loss and backward; the parameters are left out, their gradients are in. Every number comes from a
    fresh process. The second part, of single dense blocks of a growing number of layers, shows the law of growth.

    Args:
        model: densenet_bc (by depth), densenet121, 161, 169, 201, 264, or densenet3d (blocks 6 and 12, growth rate 32,
            volumes of one channel).
        modes: What is compared, separated by commas. Default: all, that is the library's modes, "concatenation"
            (torch.utils.checkpoint as one writes it without the library) and, for its models, "torchvision"
            (memory_efficient=True).
        depths: Depths of DenseNet-BC. Default: 40,64,100.
        growth_rate: k of DenseNet-BC. Default: 12.
        blocks: Layers of the single dense blocks. Default: 8,16,32,64 with densenet_bc, none otherwise; 0 is none too.
            They get a batch of a 32nd of the size.
        batch_size: Images per step. Default: 64 (densenet_bc), 2 (densenet3d) or 16.
        image_size: Their side. Default: 32 (densenet_bc), 80 (densenet3d) or 224.
        spatial_dims: 1, 2 or 3, DenseNet-BC on sequences, images or volumes. Default: 2.
        dtype: float32, float64, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        channels_last: Model and images in the channels-last layout.
        output: Write the rows to this CSV file.
        figure: Draw memory over depth into this PNG file.
    """

    depths: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None
    channels_last: bool = False
    figure: str | None = None

    def __post_init__(self):
        super().__post_init__()
        bc = self.model == "densenet_bc"
        if self.depths is not None and not bc:
            raise ValueError(f"depths={self.depths!r} has no meaning for {self.model}, whose depth is fixed")
        self._set("depths", as_tuple(self.depths or (40, 64, 100)) if bc else (None,))
        blocks = (8, 16, 32, 64) if bc and self.blocks is None else as_tuple(self.blocks or 0)
        if blocks != (0,) and not bc:
            raise ValueError(f"blocks={self.blocks!r} goes with densenet_bc only")
        self._set("blocks", tuple(whole("blocks", layers) for layers in blocks if blocks != (0,)))
        if boolean("channels_last", self.channels_last) and self.spatial_dims == 1:
            raise ValueError("channels_last=True needs spatial_dims 2 or 3")
        writable("figure", self.figure, ".png")
        if self.figure and max(len(self.depths), len(self.blocks)) < 2:
            raise ValueError(f"figure={self.figure!r} needs two depths or two blocks at least")
        self.cells()  # names a depth or an image size that cannot be

    def cells(self) -> list[dict[str, Any]]:
        """Every cell, the networks first, then the single blocks."""
        layout = {"channels_last": self.channels_last}
        networks = [{"depth": depth} if depth else {} for depth in self.depths]
        batch_size = max(1, self.batch_size // 32)
        blocks = [{"model": "dense_block", "layers": layers, "batch_size": batch_size} for layers in self.blocks]
        return [self.cell(mode, **columns, **layout) for columns in networks + blocks for mode in self.modes]


def measure_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """One training step after a small one that warms up, in this process."""
    model, x, loss = build({**cell, "batch_size": min(2, cell["batch_size"])})
    loss(model(x)).backward()
    model, x, loss = build(cell)
    found = measure_step(model, x, loss)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "kept_mib": round(found.kept_bytes / MIB, 2),
        "peak_mib": round(found.peak_bytes / MIB, 2),
        "process_mib": round(resident / MIB, 1),
    }


def run(settings: Settings) -> list[dict[str, Any]]:
    """Measure every cell, print it, and write what was asked for."""
    print_row("training step", "mode", "kept MiB", "peak MiB", "of naive", "process MiB")
    conditions = environment(settings.device)
    rows: list[dict[str, Any]] = []
    naive: dict[tuple, float] = {}
    for cell in settings.cells():
        row = run_in_fresh_process(measure_cell, cell) | conditions
        rows.append(row)
        if settings.output:
            write_rows(settings.output, rows)  # after each: a run that is stopped has lost nothing
        name = f"{title(row)}, {size(row)}"
        if row["status"] != "ok":
            print_row(name, row["mode"], row["status"])
            continue
        if row["mode"] == "naive":
            naive[row["model"], row["layers"]] = row["peak_mib"]
        plain = naive.get((row["model"], row["layers"]))
        share = f"{row['peak_mib'] / plain:.3f}" if plain else ""
        print_row(name, row["mode"], row["kept_mib"], row["peak_mib"], share, row["process_mib"])
    if settings.figure:
        from report import draw_memory

        draw_memory(rows, settings.figure)
    return rows


def main(arguments: list[str] | None = None) -> None:
    start(Settings, run, arguments)


if __name__ == "__main__":
    main()

"""What a training step would launch, move and hold on CUDA, counted on tensors without data; no GPU is needed.

python benchmarks/cuda_counts.py
python benchmarks/cuda_counts.py --model densenet121 --batch_size 64 --dtype bf16 --output rows.csv

Nothing here is a time. How fast a step runs follows from its launches where they are small, from its bytes where they
are large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from measure import (
    MIB,
    Conditions,
    boolean,
    environment,
    network,
    print_row,
    size,
    start,
    title,
    whole,
    write_rows,
)  # fmt: skip
from torch import Tensor

from efficient_densenet.memory import count_step

AUTOCAST = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Settings(Conditions):
    """Kernel launches, bytes, waits of the host and peak memory of one training step on a GPU, by mode.

    A step is forward, cross-entropy and backward, of the product's own code, on fake tensors. Bytes are those of every
    argument of every launch, each element once; the parameters' own memory is left out, their gradients are in. cuDNN's
    kernels are those of a torch that was built with CUDA.

    Args:
        model: densenet_bc, densenet121, 161, 169, 201, 264, or densenet3d (blocks 6 and 12, growth rate 32, volumes of
            one channel).
        depth: Depth of DenseNet-BC. Default: 100.
        modes: What is compared, separated by commas. Default: all, that is the library's modes, "concatenation"
            (torch.utils.checkpoint as one writes it without the library) and, for its models, "torchvision"
            (memory_efficient=True).
        growth_rate: k of DenseNet-BC. Default: 12.
        batch_size: Images per step. Default: 64 (densenet_bc), 2 (densenet3d) or 16.
        image_size: Their side. Default: 32 (densenet_bc), 80 (densenet3d) or 224.
        spatial_dims: 1, 2 or 3, DenseNet-BC on sequences, images or volumes. Default: 2.
        dtype: float32; or bf16 or fp16, autocast on float32 parameters.
        device: cuda; or cpu, where launches mean operators.
        channels_last: Model and images in the channels-last layout, which sequences do not have.
        output: Write the rows to this CSV file.
    """

    depth: int | None = None
    device: str = "cuda"
    channels_last: bool = True

    def __post_init__(self):
        super().__post_init__()
        bc = self.model == "densenet_bc"
        if self.depth is not None and not bc:
            raise ValueError(f"depth={self.depth!r} has no meaning for {self.model}, whose depth is fixed")
        self._set("depth", whole("depth", self.depth or 100) if bc else None)
        boolean("channels_last", self.channels_last)
        self.cells()  # names a depth or an image size that cannot be

    @staticmethod
    def dtypes() -> list[str]:
        return list(AUTOCAST)

    @staticmethod
    def devices() -> list[str]:
        return ["cuda", "cpu"]

    def cells(self) -> list[dict[str, Any]]:
        """One cell per mode."""
        layout = {"channels_last": self.channels_last and self.spatial_dims > 1}
        depth = {"depth": self.depth} if self.depth else {}
        return [self.cell(mode, **depth, **layout) for mode in self.modes]


def cross_entropy(output: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), torch.zeros(len(output), dtype=torch.int64, device=output.device))


def count_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """One training step, counted."""
    with torch.device("meta"):
        model = network(cell)
        channels = model.features.conv0.in_channels
        x = torch.empty(cell["batch_size"], channels, *[cell["image_size"]] * cell["spatial_dims"])
    if cell["channels_last"]:
        layout = torch.channels_last if cell["spatial_dims"] == 2 else torch.channels_last_3d
        model.to(memory_format=layout)
        x = x.contiguous(memory_format=layout)
    step = count_step(model, x, cross_entropy, cell["device"], AUTOCAST[cell["dtype"]])
    total = step.total
    return {
        "launches": total.launches,
        "forward_launches": step.forward.launches,
        "bytes": total.bytes,
        "read_bytes": total.read_bytes,
        "written_bytes": total.written_bytes,
        "loaded_bytes": total.loaded_bytes,
        "host_waits": total.host_waits,
        "kept_bytes": step.kept_bytes,
        "peak_bytes": step.peak_bytes,
    }


def run(settings: Settings) -> list[dict[str, Any]]:
    """Count every mode, print it, and write what was asked for."""
    names = ("launches", "of naive", "GB", "of naive", "host waits", "kept MiB", "peak MiB", "of naive")
    print_row("training step", "mode", *names)
    conditions = environment("cpu")
    del conditions["hardware"], conditions["cpu_capability"], conditions["threads"]  # which have no part in it
    rows: list[dict[str, Any]] = []
    naive: dict[str, Any] = {}
    for cell in settings.cells():
        row = {**cell, **count_cell(cell), **conditions}
        rows.append(row)
        if settings.output:
            write_rows(settings.output, rows)  # after each: a run that is stopped has lost nothing
        if row["mode"] == "naive":
            naive = row
        compared = ("launches", "bytes", "peak_bytes")
        share = {name: f"{row[name] / naive[name]:.3f}" if naive else "" for name in compared}
        print_row(
            f"{title(row)}, {size(row)}", row["mode"],
            row["launches"], share["launches"], f"{row['bytes'] / 1e9:.1f}", share["bytes"], row["host_waits"],
            round(row["kept_bytes"] / MIB), round(row["peak_bytes"] / MIB), share["peak_bytes"],
        )  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> None:
    start(Settings, run, arguments)


if __name__ == "__main__":
    main()

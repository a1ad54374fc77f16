"""Other people's DenseNets before and after ``make_efficient``: peak of a training step, and its time.

python benchmarks/conversion.py --output peaks.csv
python benchmarks/conversion.py --time True --rounds 8 --output times.csv
python benchmarks/conversion.py --networks tiramisu --modes original,lean
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from measure import (
    MIB, as_tuple, boolean, choose, environment, print_row, read_rows, rows_in_fresh_process, run_in_fresh_process,
    size, start, whole, writable, write_rows,
)  # fmt: skip
from speed import in_turn, summary, timed_step
from torch import Tensor, nn

from efficient_densenet import densenet121, make_efficient
from efficient_densenet.memory import measure_step

OWN = ("library fused", "library lean")
PEAKS = {"kept_mib": "kept MiB", "peak_mib": "peak MiB"}
TIMES = {
    "step_ms": "step ms", "spread_ms": "spread ms", "fastest_ms": "fastest ms", "ratio": "ratio",
    "fastest_ratio": "of fastest",
}  # fmt: skip
MODES = ("original", "own flag", "fused", "lean", *OWN)


class FCDenseNet(nn.Module):
    """A Tiramisu, FC-DenseNet67: five dense blocks of five layers down, as many up, k = 16, at full resolution.

    Convolutions with biases, Dropout2d behind each; on the way up a block gives its new features only.

    Source: Jégou et al., The One Hundred Layers Tiramisu, arXiv:1611.09326; written as in bfortuner/pytorch_tiramisu.
    """

    def __init__(self, depth: int = 5, layers: int = 5, growth_rate: int = 16, classes: int = 11, width: int = 48):
        super().__init__()
        new, skips = layers * growth_rate, []
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.smaller, self.larger, self.up = (nn.ModuleList() for _ in range(4))
        for _ in range(depth):
            self.down.append(TiramisuBlock(width, layers, growth_rate))
            width += new
            skips.append(width)
            norm, conv = nn.BatchNorm2d(width), nn.Conv2d(width, width, 1)
            self.smaller.append(nn.Sequential(norm, nn.ReLU(inplace=True), conv, nn.Dropout2d(0.2), nn.MaxPool2d(2)))
        self.middle = TiramisuBlock(width, layers, growth_rate, new_only=True)
        for skip in reversed(skips):
            self.larger.append(nn.ConvTranspose2d(new, new, 2, stride=2))
            self.up.append(TiramisuBlock(new + skip, layers, growth_rate, new_only=True))
        self.last = nn.Conv2d(new, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.first(x), []
        for block, smaller in zip(self.down, self.smaller, strict=True):
            skips.append(block(x))
            x = smaller(skips[-1])
        x = self.middle(x)
        for larger, block in zip(self.larger, self.up, strict=True):
            x = block(torch.cat([larger(x), skips.pop()], 1))
        return self.last(x)


class TiramisuBlock(nn.Module):
    def __init__(self, channels: int, layers: int, growth_rate: int, new_only: bool = False):
        super().__init__()
        self.new_only = new_only
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels + i * growth_rate), nn.ReLU(inplace=True),
                nn.Conv2d(channels + i * growth_rate, growth_rate, 3, padding=1), nn.Dropout2d(0.2),
            ) for i in range(layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        new = []
        for layer in self.layers:
            new.append(layer(x))
            x = torch.cat([x, new[-1]], 1)
        return torch.cat(new, 1) if self.new_only else x


class Stages(nn.Module):
    """The library's own model as an encoder: the maps that timm's ``features_only`` gives."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.model.forward_intermediates(x, intermediates_only=True)


def of_classes(output: Tensor) -> Tensor:
    """Cross entropy of images, or of pixels, with fixed classes."""
    batch, classes, *sizes = output.shape
    target = torch.arange(batch, device=output.device).view(batch, *[1] * len(sizes)).expand(batch, *sizes)
    return F.cross_entropy(output, target % classes)


def of_stages(stages: list[Tensor]) -> Tensor:
    """A loss that every stage has a gradient of."""
    return sum(stage.sum() for stage in stages)


def _torchvision(**kwargs) -> nn.Module:
    import torchvision

    return torchvision.models.densenet121(**kwargs)


def _timm(flag: bool = False, **kwargs) -> nn.Module:
    import timm

    model = timm.create_model("densenet121", **kwargs)
    if flag:
        model.set_grad_checkpointing()
    return model


def _monai() -> nn.Module:
    from monai.networks.nets import DenseNet121

    return DenseNet121(spatial_dims=3, in_channels=1, out_channels=2)


@dataclass(frozen=True)
class Network:
    """Somebody's network: how it is made, with its own flag for memory where it has one, and the library's own twin."""

    title: str
    original: Callable[[], nn.Module]
    flagged: Callable[[], nn.Module] | None
    own: Callable[[str], nn.Module] | None
    flag: str = ""
    loss: Callable[[Any], Tensor] = of_classes
    batch_size: int = 16
    image_size: int = 224
    spatial_dims: int = 2
    in_channels: int = 3


NETWORKS = {
    "torchvision": Network(
        "torchvision `densenet121`", _torchvision, functools.partial(_torchvision, memory_efficient=True),
        lambda mode: densenet121(efficient=mode), "memory_efficient=True",
    ),
    "timm": Network(
        "timm `densenet121`", _timm, functools.partial(_timm, flag=True), lambda mode: densenet121(efficient=mode),
        "set_grad_checkpointing()",
    ),
    "monai": Network(
        "MONAI `DenseNet121`, 3-D", _monai, None,
        lambda mode: densenet121(efficient=mode, spatial_dims=3, in_channels=1, num_classes=2),
        batch_size=2, image_size=64, spatial_dims=3, in_channels=1,
    ),
    "encoder": Network(
        "timm `features_only`, all stages", functools.partial(_timm, features_only=True),
        functools.partial(_timm, flag=True, features_only=True), lambda mode: Stages(densenet121(efficient=mode)),
        "set_grad_checkpointing()", of_stages, batch_size=8,
    ),
    "tiramisu": Network("Tiramisu, FC-DenseNet67", FCDenseNet, None, None, batch_size=2),
}  # fmt: skip


def modes_of(network: Network) -> tuple[str, ...]:
    """What there is of a network."""
    absent = [] if network.flagged else ["own flag"]
    return tuple(mode for mode in MODES if mode not in absent and (network.own or mode not in OWN))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Other people's DenseNets as they are, with their own flag for memory, and after make_efficient.

    The peak of a training step (forward, loss, backward; parameters left out, their gradients in), every one in a fresh
    process; or its time, of all that there is of a network in turn, A B A B, in one. All are timed in channels-last, the
    original in both layouts. Each network is written when it is measured; rows of others that the file holds stay.

    Args:
        networks: torchvision, timm, monai (3-D), encoder (timm's features_only, all stages), tiramisu. Default: all.
        modes: original (always there), "own flag", fused, lean, "library fused", "library lean". Default: all of them.
        time: Measure times instead of peaks.
        rounds: Timed steps of each.
        batch_size: Images per step. Default: 16; 8 (encoder) or 2 (monai, tiramisu).
        image_size: Their side. Default: 224, or 64 (monai).
        device: cpu, cuda or cuda:N.
        output: Write the rows to this CSV file.
    """

    networks: tuple[str, ...] = tuple(NETWORKS)
    modes: tuple[str, ...] | None = None
    time: bool = False
    rounds: int = 5
    batch_size: int | None = None
    image_size: int | None = None
    device: str = "cpu"
    output: str | None = None

    def __post_init__(self):
        for name, default, choices in (("networks", (), NETWORKS), ("modes", MODES, MODES)):
            object.__setattr__(self, name, as_tuple(getattr(self, name) or default))
            for value in getattr(self, name):
                choose(name, value, choices)
        boolean("time", self.time)
        for name in ("rounds", "batch_size", "image_size"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name))
        if self.image_size is not None and self.image_size < 32:
            raise ValueError(f"image_size must be at least 32 here, got {self.image_size}")
        gpus = torch.cuda.device_count()
        choose("device", self.device, ["cpu", *["cuda"][:gpus], *(f"cuda:{i}" for i in range(gpus))])
        writable("output", self.output, ".csv")

    def cells(self, name: str) -> list[dict[str, Any]]:
        """All of a network; to be timed, the reference first, the original in channels-last."""
        network = NETWORKS[name]
        modes = [mode for mode in modes_of(network) if mode == "original" or mode in self.modes]
        wanted = [(mode, self.time) for mode in modes]
        if self.time:
            wanted.insert(1, ("original", False))
        return [
            {
                "network": name, "batch_size": self.batch_size or network.batch_size,
                "image_size": self.image_size or network.image_size, "spatial_dims": network.spatial_dims,
                "dtype": "float32", "device": self.device, "channels_last": channels_last, "mode": mode,
            } for mode, channels_last in wanted
        ]  # fmt: skip


def build(cell: dict[str, Any]) -> tuple[nn.Module, Tensor, Callable[[Any], Tensor]]:
    """A cell's model, input and loss, the same numbers every time."""
    network, mode = NETWORKS[cell["network"]], cell["mode"]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's imports
        if mode in OWN:
            model = network.own(mode.split()[1])
        else:
            model = network.flagged() if mode == "own flag" else network.original()
    if mode in ("fused", "lean"):
        make_efficient(model, mode)
    x = torch.randn(cell["batch_size"], network.in_channels, *[cell["image_size"]] * network.spatial_dims)
    layout = torch.contiguous_format
    if cell["channels_last"]:
        layout = torch.channels_last if network.spatial_dims == 2 else torch.channels_last_3d
    return model.to(cell["device"], memory_format=layout), x.to(cell["device"], memory_format=layout), network.loss


def measure_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """One training step after a small one that warms up, in this process."""
    model, x, loss = build({**cell, "batch_size": min(2, cell["batch_size"])})
    loss(model(x)).backward()
    found = measure_step(*build(cell))
    return {"kept_mib": round(found.kept_bytes / MIB, 2), "peak_mib": round(found.peak_bytes / MIB, 2)}


def time_cells(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each of the cells, timed in turn in this process."""
    times = in_turn([timed_step(cell, build) for cell in work["cells"]], work["rounds"])
    for cell, taken in zip(work["cells"], times, strict=True):
        status = "ok" if taken else "out of memory"
        yield {**cell, "rounds": work["rounds"], **summary(taken, times[0]), "status": status}


def run(settings: Settings) -> list[dict[str, Any]]:
    """Measure what was asked for, print it, and write it."""
    conditions, columns = environment(settings.device), TIMES if settings.time else PEAKS
    print_row("training step", "mode", *columns.values())
    rows: list[dict[str, Any]] = []
    if settings.output and os.path.exists(settings.output):
        rows = [row for row in read_rows(settings.output) if row["network"] not in settings.networks]
    for name in settings.networks:
        cells = settings.cells(name)
        for row in measured(cells, settings):
            layout = ", channels-last" if row["channels_last"] else ""
            numbers = [row[column] for column in columns] if row["status"] == "ok" else [row["status"]]
            print_row(f"{name}, {size(row)}{layout}", row["mode"], *numbers)
            rows.append(row | conditions)
        if settings.output:
            order = list(NETWORKS)
            write_rows(settings.output, sorted(rows, key=lambda row: order.index(row["network"])))
    return rows


def measured(cells: list[dict[str, Any]], settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each of a network's cells."""
    if not settings.time:
        yield from (run_in_fresh_process(measure_cell, cell) for cell in cells)
        return
    for row in rows_in_fresh_process(time_cells, {"cells": cells, "rounds": settings.rounds}):
        if "network" in row:
            yield row
        elif row["status"] != "ok":
            raise ValueError(f"{cells[0]['network']}: {row['status']}")


def main(arguments: list[str] | None = None) -> None:
    start(Settings, run, arguments)


if __name__ == "__main__":
    main()

"""What the benchmarks share: command lines, models and baselines, a fresh process per cell, and rows."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import math
import multiprocessing
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import efficient_densenet
from efficient_densenet import DenseNet, densenet_bc
from efficient_densenet.models import MODES, DenseBlock

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
TORCHVISION = ("densenet121", "densenet161", "densenet169", "densenet201")
IMAGENET = (*TORCHVISION, "densenet264")
DEFAULTS = {"densenet_bc": (64, 32), "densenet3d": (2, 80), "imagenet": (16, 224)}  # batch and image size by model
INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")  # variables that keep torch from a CPU's newest ones


# Models and methods: the library's modes, and what one would use without the library


class ConcatenatedBlock(nn.ModuleDict):
    """A dense block as one writes it with ``torch.utils.checkpoint``: the known method, for comparison.

    Concatenation, BN, ReLU and conv1 of every layer are checkpointed together; the concatenation is made again in the
    backward pass, and so do the running statistics move again.

    Source: Pleiss et al., Memory-Efficient Implementation of DenseNets, arXiv:1707.06990; torchvision's
    ``memory_efficient=True`` is the same.
    """

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            bottleneck = checkpoint(functools.partial(_bottleneck, layer), *features, use_reentrant=False)
            features.append(layer.after_bottleneck(bottleneck))
        return torch.cat(features, 1)


def _bottleneck(layer: nn.Module, *features: Tensor) -> Tensor:
    return layer.conv1(layer.relu1(layer.norm1(torch.cat(features, 1))))


def concatenated(model: DenseNet) -> DenseNet:
    """The model with every dense block by the known method, in place."""
    for name, module in list(model.features.named_children()):
        if isinstance(module, DenseBlock):
            setattr(model.features, name, ConcatenatedBlock(module))
    return model


def modes_of(model: str) -> tuple[str, ...]:
    """What can be compared for a model: plain autograd, the known methods, and the library's modes."""
    library = [mode for mode in MODES if mode not in ("naive", "auto")]
    return ("naive", "concatenation", *(["torchvision"] if model in TORCHVISION else []), *library)


def network(cell: dict[str, Any]) -> nn.Module:
    """The network of a cell, in its mode, on the CPU.

    Args:
        cell: ``model``, ``mode``, ``depth``, ``layers``, ``growth_rate`` and ``spatial_dims``, as in the rows.
    """
    name, mode = cell["model"], cell["mode"]
    if mode == "torchvision":
        import torchvision

        return getattr(torchvision.models, name)(memory_efficient=True)
    efficient = "naive" if mode == "concatenation" else mode
    kwargs = {"growth_rate": cell["growth_rate"], "spatial_dims": cell["spatial_dims"], "efficient": efficient}
    if name == "dense_block":
        model = DenseNet(block_config=(cell["layers"],), num_init_features=2 * cell["growth_rate"], **kwargs)
    elif name == "densenet_bc":
        model = densenet_bc(cell["depth"], **kwargs)
    elif name == "densenet3d":
        model = DenseNet(block_config=(6, 12), num_init_features=64, small_inputs=False, in_channels=1, **kwargs)
    else:
        model = getattr(efficient_densenet, name)(efficient=efficient)
    return concatenated(model) if mode == "concatenation" else model


def build(cell: dict[str, Any]) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """A cell's model, input and loss, on its device, in its dtype and layout, the same numbers every time."""
    torch.manual_seed(0)
    model = network(cell)
    device, dtype = torch.device(cell["device"]), DTYPES[cell["dtype"]]
    loss = functools.partial(F.cross_entropy, target=torch.arange(cell["batch_size"], device=device) % 10)
    channels = model.features.conv0.in_channels
    if cell["model"] == "dense_block":
        channels, model, loss = 2 * cell["growth_rate"], model.features.denseblock1, torch.sum
    x = torch.randn(cell["batch_size"], channels, *[cell["image_size"]] * cell["spatial_dims"])
    layout = torch.contiguous_format
    if cell["channels_last"]:
        layout = torch.channels_last if cell["spatial_dims"] == 2 else torch.channels_last_3d
    model.to(device, dtype, memory_format=layout)
    x = x.to(device, dtype, memory_format=layout)
    # Inside a network a block's input asks for its gradient.
    return model, x.requires_grad_(cell["model"] == "dense_block"), loss


def num_layers(model: str, depth: int | None) -> int:
    """Dense layers of a network."""
    if model == "densenet_bc":
        return (depth - 4) // 2
    if model == "densenet3d":
        return 6 + 12
    return (int(model.removeprefix("densenet")) - 5) // 2


# The command line


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The flags that every benchmark has. A subclass adds its own and says what they mean in its docstring."""

    model: str = "densenet_bc"
    growth_rate: int | None = None
    batch_size: int | None = None
    image_size: int | None = None
    spatial_dims: int | None = None
    modes: tuple[str, ...] | None = None
    dtype: str = "float32"
    device: str = "auto"
    output: str | None = None

    def __post_init__(self):
        bc = self.model == "densenet_bc"
        choose("model", self.model, ("densenet_bc", "densenet3d", *IMAGENET))
        batch_size, image_size = DEFAULTS.get(self.model, DEFAULTS["imagenet"])
        for name, default, applies in (
            ("batch_size", batch_size, True),
            ("image_size", image_size, True),
            ("growth_rate", 12 if bc else 48 if self.model == "densenet161" else 32, bc),
            ("spatial_dims", 3 if self.model == "densenet3d" else 2, bc),
        ):
            value = getattr(self, name)
            if value is not None and not applies:
                raise ValueError(f"{name}={value!r} has no meaning for {self.model}, whose {name} is {default}")
            self._set(name, whole(name, default if value is None else value))
        choose("spatial_dims", self.spatial_dims, (1, 2, 3))
        self._set("modes", as_tuple(modes_of(self.model) if self.modes is None else self.modes))
        for mode in self.modes:
            choose("modes", mode, modes_of(self.model))
        choose("dtype", self.dtype, self.dtypes())
        if self.device == "auto":
            self._set("device", "cuda" if torch.cuda.is_available() else "cpu")
        choose("device", self.device, self.devices())
        writable("output", self.output, ".csv")

    @staticmethod
    def dtypes() -> list[str]:
        """What ``dtype`` may be."""
        return list(DTYPES)

    @staticmethod
    def devices() -> list[str]:
        """What ``device`` may be."""
        gpus = torch.cuda.device_count()
        return ["auto", "cpu", *["cuda"][:gpus], *(f"cuda:{i}" for i in range(gpus))]

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def cell(self, mode: str, **columns: Any) -> dict[str, Any]:
        """A cell under these conditions; ``columns`` are added or replace.

        Raises:
            ValueError: a depth that does not exist, or images too small for the network.
        """
        cell = {
            "model": self.model,
            "depth": int(self.model.removeprefix("densenet")) if self.model in IMAGENET else None,
            "layers": None,
            "growth_rate": self.growth_rate,
            "batch_size": self.batch_size,
            "image_size": self.image_size,
            "spatial_dims": self.spatial_dims,
            "dtype": self.dtype,
            "device": self.device,
            "channels_last": False,
            "mode": mode,
            **columns,
        }
        reference = tuple(cell[name] for name in ("model", "depth", "layers", "growth_rate", "spatial_dims"))
        least, cell["layers"] = _least_size_and_layers(*reference)
        if self.image_size < least:
            raise ValueError(f"image_size must be at least {least} here, got {self.image_size}")
        return cell


@functools.cache
def _least_size_and_layers(
    model: str, depth: int | None, layers: int | None, growth_rate: int, spatial_dims: int
) -> tuple[int, int]:
    cell = {"model": model, "depth": depth, "layers": layers, "growth_rate": growth_rate, "spatial_dims": spatial_dims}
    reference = network({**cell, "mode": "naive"})
    return reference.min_size, sum(len(module) for module in reference.modules() if isinstance(module, DenseBlock))


def parse(settings: type, arguments: list[str] | None = None) -> Any:
    """The checked settings of a command line, before any work; a mistake is one line and exit code 2.

    Args:
        settings: a dataclass whose fields are the flags and whose docstring is the help.
        arguments: by default those of this process.
    """
    try:
        from efficient_densenet.training.config import read_flags
    except ImportError:
        fail('the package fire is missing; pip install -e ".[demo]" brings it')
    try:
        given = read_flags(settings, sys.argv[1:] if arguments is None else arguments, Path(sys.argv[0]).name)
        return settings(**given)
    except (TypeError, ValueError) as error:
        fail(str(error))


def start(settings: type, run: Callable[[Any], object], arguments: list[str] | None = None) -> None:
    """A whole command: reads its flags, as :func:`parse`, and runs; what goes wrong on the way is one line too."""
    parsed = parse(settings, arguments)
    try:
        run(parsed)
    except (ImportError, ValueError, OSError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """One line on standard error and exit code 2."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


def as_tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def choose(name: str, value: object, choices: Iterable) -> None:
    if isinstance(value, bool) or value not in tuple(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def whole(name: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def writable(name: str, path: object, suffix: str) -> None:
    """Refuse, before any work, a file that could not be written after it."""
    if path is None:
        return
    if not isinstance(path, str) or not path.endswith(suffix):
        raise ValueError(f"{name} must be the name of a {suffix} file, got {path!r}")
    folder = Path(path).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{name}={path!r}: {folder} is not a folder that can be written to")


# Cells and rows


def run_in_fresh_process(function: Callable[[dict], dict], cell: dict[str, Any]) -> dict[str, Any]:
    """``function(cell)`` in a process of its own; the row it makes, or one that says ``out of memory``.

    Raises:
        RuntimeError: the function failed in another way; names it.
    """
    *rows, end = rows_in_fresh_process(function, cell)
    if end["status"] == "out of memory":
        return {**cell, "status": "out of memory"}
    if end["status"] != "ok":
        raise RuntimeError(f"{cell} failed: {end['status']}")
    return {**cell, **rows[0], "status": "ok"}


def rows_in_fresh_process(
    function: Callable[[dict], dict | Iterable[dict]], cell: dict[str, Any], seconds: float | None = None
) -> Iterator[dict[str, Any]]:
    """The rows ``function(cell)`` returns or yields in a process of its own, each as it comes.

    Processes are forked from a server that has imported torch and done nothing, so each one starts clean and at once.

    Args:
        function: makes the rows; one, or an iterable of them.
        cell: what it is called with.
        seconds: after these the process is ended.

    Yields:
        The rows; the last one holds the ``status`` alone: ``ok``, ``out of memory``, ``out of time``, or what went wrong.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "efficient_densenet.memory"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_cell, args=(sender, function, cell))
    process.start()
    sender.close()
    end = math.inf if seconds is None else time.monotonic() + seconds
    status = None
    try:
        while status is None:
            if not receiver.poll(None if seconds is None else max(end - time.monotonic(), 0)):
                status = "out of time"
                break
            try:
                row, status = receiver.recv()
            except EOFError:
                process.join()
                killed = process.exitcode == -signal.SIGKILL  # so Linux ends what takes too much
                status = "out of memory" if killed else "it ended without a result"
            else:
                if status is None:
                    yield row
    finally:
        if status in (None, "out of time"):
            process.kill()
        process.join()
        receiver.close()
    yield {"status": status}


def _run_cell(sender, function: Callable[[dict], dict | Iterable[dict]], cell: dict[str, Any]) -> None:
    try:
        rows = function(cell)
        for row in [rows] if isinstance(rows, dict) else rows:
            sender.send((row, None))
        sender.send(({}, "ok"))
    except Exception as error:
        sender.send(({}, "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"))


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception says that an allocator had nothing left; the CPU's raises a plain RuntimeError."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def environment(device: str) -> dict[str, Any]:
    """The columns that say where a row comes from."""
    limits = [f"{name}={os.environ[name]}" for name in INSTRUCTIONS if os.environ.get(name)]
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "hardware": torch.cuda.get_device_name(device) if str(device).startswith("cuda") else _cpu_name(),
        "cpu_capability": f"{capability} ({' '.join(limits)})" if limits else capability,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "command": shlex.join([*limits, "python", _relative(sys.argv[0]), *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit the library was measured at, with ``+`` where its code differs from it; empty outside a checkout."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
        commit = git(["git", "rev-parse", "--short", "HEAD"], check=True).stdout.strip()
        code = ["efficient_densenet", ":!efficient_densenet/training"]
        return commit + ("+" if git(["git", "diff", "--quiet", "HEAD", "--", *code]).returncode else "")
    return ""


def _relative(path: str) -> str:
    with contextlib.suppress(ValueError):
        return str(Path(path).resolve().relative_to(ROOT))
    return Path(path).name


def write_rows(path: str, rows: list[dict[str, Any]]) -> None:
    """CSV, whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(column for row in rows for column in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_text(path, text.getvalue())


def replace_text(path: str | Path, text: str) -> None:
    """A text file, whole or not at all."""
    temporary = f"{path}.tmp"
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def read_rows(path: str | Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def title(row: dict[str, Any]) -> str:
    """A row's model as prose writes it."""
    if row["model"] == "densenet_bc":
        return f"DenseNet-BC({row['depth']},{row['growth_rate']})"
    if row["model"] == "dense_block":
        return f"dense block, {row['layers']} layers"
    if row["model"] == "densenet3d":
        return "3-D DenseNet, blocks of 6 and 12, k = 32"
    return row["model"].replace("densenet", "DenseNet-")


def size(row: dict[str, Any]) -> str:
    """A row's input as prose writes it."""
    return f"batch {row['batch_size']}, {'x'.join([str(row['image_size'])] * int(row['spatial_dims']))}"


def print_row(*cells: object) -> None:
    """A line of a table: two wide columns of text, then numbers; None is an empty cell."""
    cells = ["" if cell is None else cell for cell in cells]
    print("".join(f"{cell:<{width - 1}} " for cell, width in zip(cells[:2], (42, 16)))
          + "".join(f"{cell:>13}" for cell in cells[2:]), flush=True)  # fmt: skip

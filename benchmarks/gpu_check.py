"""One command on a GPU: is everything right there, what does it take, how fast is it.

python benchmarks/gpu_check.py                 # eight minutes, the most important first; called again, it goes on
python benchmarks/gpu_check.py --minutes 60
python benchmarks/gpu_check.py --dry_run       # all of it at toy size on a CPU, the kernels in Triton's interpreter
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import (
    DEFAULTS,
    DTYPES,
    MIB,
    TORCHVISION,
    boolean,
    build,
    choose,
    environment,
    is_out_of_memory,
    print_row,
    read_rows,
    replace_text,
    rows_in_fresh_process,
    start,
    title,
    writable,
    write_rows,
)  # fmt: skip
from torch import Tensor, nn

from efficient_densenet import DenseNet
from efficient_densenet.memory import count_step, measure_step
from efficient_densenet.models import MODES

LIBRARY = tuple(mode for mode in MODES if mode not in ("naive", "auto"))
GIB = 2**30
BUDGETS_GIB = (12, 16, 24, 80)
CELL_SECONDS = 150  # more than any part should take; a kernel that hangs must not take the rest with it
COMPILING_SECONDS = 300  # the same, where a whole network is compiled
LEAST_SECONDS = 5

# (a) What is compared with float64: every kind of layer, stem and size the kernels tell apart.
NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "k = 12": ({"growth_rate": 12, "block_config": (3, 3)}, (4, 3, 17, 12)),
    "k = 48": ({"growth_rate": 48, "block_config": (2, 2), "num_init_features": 96}, (3, 3, 9, 16)),
    "strided stem": ({"growth_rate": 32, "block_config": (2, 2), "num_init_features": 64, "small_inputs": False},
                     (4, 3, 40, 33)),
    "3-D": ({"growth_rate": 16, "block_config": (2, 2), "num_init_features": 32, "spatial_dims": 3,
             "in_channels": 1, "small_inputs": False}, (2, 1, 20, 21, 22)),
    "no bottleneck": ({"growth_rate": 12, "block_config": (3, 3), "bn_size": None}, (4, 3, 12, 9)),
}  # fmt: skip
TOY_NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "k = 4": ({"growth_rate": 4, "block_config": (2, 2), "num_init_features": 8}, (2, 3, 5, 6)),
    "strided stem": ({"growth_rate": 4, "block_config": (1, 1), "num_init_features": 8, "small_inputs": False},
                     (2, 3, 16, 15)),
    "3-D": ({"growth_rate": 4, "block_config": (2,), "num_init_features": 8, "spatial_dims": 3, "in_channels": 1},
            (2, 1, 3, 4, 3)),
    "no bottleneck": ({"growth_rate": 4, "block_config": (2, 2), "bn_size": None}, (2, 3, 5, 6)),
}  # fmt: skip

STEPS = [
    {"part": "a", "check": "steps", "dtype": dtype, "settings": setup}
    for dtype in ("float32", "bfloat16", "float16") for setup in ("default", "deterministic")
]  # fmt: skip

# (b) Networks, batches and types by priority, and those that are compiled too.
TIMED = (
    ("densenet_bc", 100, 12, 64, "float32"),
    ("densenet121", None, None, 64, "bfloat16"),
    ("densenet_bc", 100, 12, 256, "float32"),
    ("densenet121", None, None, 64, "float32"),
    ("densenet3d", None, None, 8, "float32"),
    ("densenet_bc", 100, 12, 64, "bfloat16"),
    ("densenet_bc", 190, 40, 64, "float32"),
    ("densenet201", None, None, 64, "bfloat16"),
    ("densenet121", None, None, 128, "bfloat16"),
    ("densenet_bc", 100, 12, 256, "bfloat16"),
    ("densenet201", None, None, 128, "bfloat16"),
    ("densenet3d", None, None, 8, "bfloat16"),
    ("densenet_bc", 190, 40, 64, "bfloat16"),
    ("densenet121", None, None, 128, "float32"),
    ("densenet201", None, None, 64, "float32"),
    ("densenet201", None, None, 128, "float32"),
)
COMPILED = TIMED[:2]
# Each in a process of its own, with the plain model in turn: compiling takes minutes.
COMPILATIONS = (
    ("fused", "compiled"), ("naive", "compiled"), ("naive", "compiled, budget 0.3"), ("naive", "compiled, budget 0.05")
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Correctness, memory, time and largest batches on one GPU, by priority, in rows and a report.

    (a) every kernel and every mode against float64, with torch's default and with its deterministic settings, and
    repeated runs bit by bit; (b) peak and time of training steps against plain PyTorch and what else there is, eager,
    as CUDA graphs and compiled; (c) the largest batches in 12, 16, 24 and 80 GiB; (d) where the time goes, operator by
    operator, against the bytes it moves at the bandwidth of a copy. Called again with the same output, it goes on where
    the time was over.

    Args:
        minutes: The time there is. What is left then is done by the next call.
        dry_run: Go through all of it at toy size on the CPU, the kernels in Triton's interpreter.
        device: auto, cuda or cuda:N.
        output: The CSV file of the rows; the report goes beside it, as .md. Default: gpu_check.csv in this folder.
    """

    minutes: float = 8.0
    dry_run: bool = False
    device: str = "auto"
    output: str = "gpu_check.csv"

    def __post_init__(self):
        boolean("dry_run", self.dry_run)
        if isinstance(self.minutes, bool) or not isinstance(self.minutes, (int, float)) or not self.minutes > 0:
            raise ValueError(f"minutes must be a positive number, got {self.minutes!r}")
        gpus = torch.cuda.device_count()
        choose("device", self.device, ["auto", *["cuda"][:gpus], *(f"cuda:{i}" for i in range(gpus))])
        if not gpus and not self.dry_run:
            raise ValueError("no CUDA GPU is visible; --dry_run goes through everything on the CPU")
        writable("output", self.output, ".csv")
        # With its number, without which it cannot be made the current one.
        device = "cpu" if self.dry_run else "cuda:0" if self.device in ("auto", "cuda") else self.device
        object.__setattr__(self, "device", device)

    def cells(self) -> list[dict[str, Any]]:
        """What is done, each in a process of its own, in order of priority."""
        common = {"device": self.device, "dry_run": self.dry_run}
        cells = [{"part": "a", "check": "kernels"}, *STEPS]
        timed = TIMED[:2] if self.dry_run else TIMED
        times = [{"part": "b", "check": "time", **_network(*network, toy=self.dry_run)} for network in timed]
        compiled = [
            {"part": "b", "check": "time", **_network(*network, toy=self.dry_run), "execution": execution, "mode": mode}
            for network in COMPILED for mode, execution in COMPILATIONS
        ]  # fmt: skip
        cells += [*times[:4], *compiled, *times[4:]]
        cells += [
            {"part": "c", "check": "largest batch", **_network(*network[:3], 1, dtype, toy=self.dry_run), "mode": mode}
            for network, dtype in ((TIMED[1], "bfloat16"), (TIMED[0], "float32"), (TIMED[4], "float32"))
            for mode in ("naive", "fused", "lean")
        ][: 2 if self.dry_run else None]
        cells += [{"part": "d", "check": "operators", **_network(*network, toy=self.dry_run)} for network in timed[:4]]
        return [{"name": _name(cell), **common, **cell} for cell in cells]


def _name(cell: dict[str, Any]) -> str:
    """What tells a cell from all others, as a person reads it."""
    what = f"{title(cell)}, batch {cell['batch_size']}" if cell["check"] == "time" else cell["check"]
    if cell["check"] in ("largest batch", "operators"):
        what += f", {title(cell)}" + (f", batch {cell['batch_size']}" if cell["check"] == "operators" else "")
    details = [cell[detail] for detail in ("dtype", "settings", "mode", "execution") if detail in cell]
    return f"({cell['part']}) {', '.join([what, *details])}"


def _network(model: str, depth: int | None, growth_rate: int | None, batch: int, dtype: str, toy: bool) -> dict:
    """The columns that :func:`measure.build` reads; ``dtype`` is autocast's, where it is not float32."""
    dims = 3 if model == "densenet3d" else 2
    size = DEFAULTS.get(model, DEFAULTS["imagenet"])[1]
    if toy:
        model, depth, growth_rate, batch, size, dims = "densenet_bc", 10, 4, 2, 8, 2
    growth_rate = growth_rate or (48 if model == "densenet161" else 32)
    return {
        "model": model, "depth": depth, "layers": None, "growth_rate": growth_rate, "batch_size": batch,
        "image_size": size, "spatial_dims": dims, "dtype": dtype,
    }  # fmt: skip


# (a) Correctness


def check_kernels(cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every pass by kernels of our own, on the odd case by which it proves itself."""
    from efficient_densenet.ops.passes import launch, proof, triton

    device = torch.device(cell["device"])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name in proof.CASES:
            try:
                fault = proof.disagreement(name, triton, dtype, device, proof.ODD)
            except launch.Failed as failure:
                fault = str(failure)
            yield {"operator": name, "dtype": str(dtype).removeprefix("torch."), "status": fault or "ok"}


def check_steps(cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Forward and backward of small networks: each mode's error against float64, beside the plain model's own."""
    device, dtype = torch.device(cell["device"]), DTYPES[cell["dtype"]]
    if cell["settings"] == "deterministic":
        torch.use_deterministic_algorithms(True)
    networks = NETWORKS
    if cell["dry_run"]:  # all of them once; the interpreter takes half a minute for each
        networks = dict(list(TOY_NETWORKS.items())[: None if cell["name"] == _name(STEPS[0]) else 1])
    for name, (shape, size) in networks.items():
        torch.manual_seed(0)
        model = DenseNet(**shape, efficient="naive").to(device)
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.3)
        x = torch.randn(size, device=device)
        exact = _state(copy.deepcopy(model).double(), x.double(), None)
        plain = _errors(_state(model, x, dtype), exact)
        for mode in LIBRARY:
            row = {"network": name, "mode": mode}
            try:
                first, again = (_state(model.set_efficient(mode), x, dtype) for _ in range(2))
            except Exception as error:
                yield {**row, "status": f"{type(error).__name__}: {error}"}
                continue
            errors = _errors(first, exact)
            floor = torch.finfo(dtype).eps / 8
            ratio = statistics.median((errors[key] + floor) / (plain[key] + floor) for key in errors)
            equal = all(torch.equal(value, again[key]) for key, value in first.items())
            right = ratio <= 2 and all(math.isfinite(error) for error in errors.values())
            yield {
                **row,
                "error": max(errors.values()),
                "naive_error": max(plain.values()),
                "error_ratio": round(ratio, 3),
                "bit_equal": equal,
                "runs": " ".join(sorted({plan.runs for plan in model.execution_plan()})),
                "status": ("ok" if equal else "repeated runs differ") if right else "less exact than the plain model",
            }


def _state(model: nn.Module, x: Tensor, autocast: torch.dtype | None) -> dict[str, Tensor]:
    """Outputs, gradients and buffers of one training step on a copy."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    with _autocast(x.device, autocast):
        output = model(x)
    F.cross_entropy(output.to(torch.promote_types(output.dtype, torch.float32)), _labels(output)).backward()
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return {"output": output.detach(), "input.grad": x.grad, **gradients, **buffers}


def _labels(output: Tensor) -> Tensor:
    return torch.arange(len(output), device=output.device) % output.shape[1]


def _errors(state: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative to each entry's norm."""
    return {
        name: ((value.double() - exact[name]).norm() / exact[name].norm().clamp_min(1e-6)).item()
        for name, value in state.items()
    }


def _autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    if dtype in (None, torch.float32, torch.float64):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


# (b) Memory and time


def contenders(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """What is timed: mode, layout, and how it is executed."""
    modes = [*(["torchvision"] if cell["model"] in TORCHVISION else []), *LIBRARY]
    contenders = [("naive", True, "eager"), *((mode, True, "eager") for mode in modes), ("naive", False, "eager")]
    contenders += [(mode, True, "graphed") for mode in ("naive", "fused", "lean")]
    if "execution" in cell:
        contenders = [contenders[0], (cell["mode"], True, cell["execution"])]
    return [dict(zip(("mode", "channels_last", "execution"), contender)) for contender in contenders]


def check_time(cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Peak of a step of every contender, then their times in turn, A B A B."""
    rows, steps = [], []
    for contender in contenders(cell):
        row, step = dict(contender), None
        try:
            step, found = prepared({**cell, **contender})
            rows.append(row | found | {"status": "ok"})
        except Skipped as reason:
            rows.append(row | {"status": f"skipped: {reason}"})
        except Exception as error:
            what = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            rows.append(row | {"status": " ".join(what.split())[:200]})
        steps.append(step)
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(2 if cell["dry_run"] else 5):
        for step, taken in zip(steps, times):
            if step is not None:
                taken.append(timed(step, cell["device"], repeat=1 if cell["dry_run"] else 4))
    reference = next(
        t for row, t in zip(rows, times) if (row["mode"], row["channels_last"], row["execution"]) == ("naive", True, "eager")
    )  # fmt: skip
    for row, taken in zip(rows, times):
        if taken:
            row["step_ms"], row["fastest_ms"] = round(statistics.median(taken), 3), round(min(taken), 3)
            row["images_per_s"] = round(1000 * cell["batch_size"] / row["step_ms"], 1)
            row["fastest_ratio"] = round(min(taken) / min(reference), 4) if reference else None
        yield row


class Skipped(Exception):
    """Why something cannot be done here."""


def prepared(cell: dict[str, Any]) -> tuple[Callable[[], object], dict[str, float]]:
    """A warm training step as a function, and its peaks."""
    cuda, execution = cell["device"] != "cpu", cell["execution"]
    if execution != "eager" and not cuda:
        raise Skipped("CUDA graphs need a GPU" if execution == "graphed" else "compiled for a GPU alone")
    model, x, loss = _built(cell)
    called = model
    if execution.startswith("compiled"):
        torch._dynamo.reset()
        share = execution.partition("budget ")[2]
        with contextlib.ExitStack() as stack:
            if share:
                stack.enter_context(torch._functorch.config.patch(activation_memory_budget=float(share)))
            called = torch.compile(model, fullgraph=cell["mode"] != "naive")
            _step(called, x, loss, cell)()  # compiles
    step = _step(called, x, loss, cell)
    step()
    reserved = None
    if cuda:
        step()
        torch.cuda.synchronize(), torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
    found = measure_step(_Cast(called, cell), x, loss)
    if cuda:
        reserved = round((torch.cuda.max_memory_reserved() - before) / MIB, 1)
    if execution == "graphed":
        step = _graphed(step, model)
    peaks = {"peak_mib": round(found.peak_bytes / MIB, 1), "kept_mib": round(found.kept_bytes / MIB, 1)}
    return step, peaks | {"reserved_mib": reserved}


def _built(cell: dict[str, Any]) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """The cell's network in float32: its type is autocast's."""
    return build({**cell, "dtype": "float32"})


class _Cast(nn.Module):
    """The model under the cell's autocast."""

    def __init__(self, model: nn.Module, cell: dict[str, Any]):
        super().__init__()
        self.model, self.dtype = model, DTYPES[cell["dtype"]]

    def forward(self, x: Tensor) -> Tensor:
        with _autocast(x.device, self.dtype):
            return self.model(x)


def _step(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], cell: dict[str, Any]) -> Callable[[], object]:
    cast = _Cast(model, cell)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss(cast(x).float()).backward()

    return step


def _graphed(step: Callable[[], object], model: nn.Module) -> Callable[[], object]:
    """The step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(), step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed(step: Callable[[], object], device: str, repeat: int) -> float:
    """Milliseconds of one step, of so many in a row."""
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(repeat):
        step()
    wait()
    return 1000 * (time.perf_counter() - began) / repeat


# (c) The largest batch


def check_largest_batch(cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The most images whose training step stays within a budget of what the allocator reserves."""
    from efficient_densenet.training.budget import search

    cuda = cell["device"] != "cpu"
    cell = {**cell, "channels_last": True}
    needs: dict[int, float] = {}

    def need(batch: int) -> float:
        if batch not in needs:
            needs[batch] = _needed({**cell, "batch_size": batch}, cuda)
        return needs[batch]

    budgets = [gib * GIB for gib in BUDGETS_GIB] if cuda else [4 * MIB, 8 * MIB]
    room = torch.cuda.get_device_properties(cell["device"]).total_memory if cuda else math.inf
    for budget in budgets:
        row = {"budget_gib": round(budget / GIB, 4)}
        if budget > room:
            yield {**row, "status": f"skipped: the GPU has {room / GIB:.0f} GiB"}
            continue
        tried = search(need, budget, least=2, most=4096)
        fits = [batch for batch, bytes_ in tried.items() if bytes_ <= budget]
        yield {**row, "largest_batch": max(fits, default=0), "status": "ok"}


def _needed(cell: dict[str, Any], cuda: bool) -> float:
    try:
        model, x, loss = _built(cell)
        step = _step(model, x, loss, cell)
        if not cuda:
            return measure_step(_Cast(model, cell), x, loss).peak_bytes
        step()
        del step
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        _step(model, x, loss, cell)()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return math.inf
    finally:
        if cuda:
            torch.cuda.empty_cache()


# (d) Where the time goes


def check_operators(cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Device time of every operator of a step against the bytes it moves, at the bandwidth of a copy."""
    cuda = cell["device"] != "cpu"
    bandwidth = _copy_bandwidth(cell["device"], 2**22 if cell["dry_run"] else 2**30)
    yield {"operator": "copy", "gb_per_s": round(bandwidth / 1e9, 1), "status": "ok"}
    activities = [torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CPU)
    for mode in ("naive", "fused", "lean"):
        contender = {**cell, "mode": mode, "channels_last": True}
        model, x, loss = _built(contender)
        autocast = None if cell["dtype"] == "float32" else DTYPES[cell["dtype"]]
        counted = count_step(
            model, x, lambda output: F.cross_entropy(output.float(), _labels(output)),
            "cuda" if cuda else "cpu", autocast,
        )  # fmt: skip
        moved: dict[str, list[float]] = {}
        for (_, name), traffic in counted.operators.items():
            entry = moved.setdefault(name, [0, 0])
            entry[0], entry[1] = entry[0] + traffic.bytes, entry[1] + traffic.launches
        step = _step(model, x, loss, contender)
        step(), step()
        with torch.profiler.profile(activities=activities) as profile:
            step()
            if cuda:
                torch.cuda.synchronize()
        for row in _of_copies(profile.key_averages(), moved, bandwidth, cuda):
            yield {"mode": mode, **row, "status": "ok"}


def _of_copies(
    events: Iterable[Any], moved: dict[str, list[float]], bandwidth: float, cuda: bool
) -> Iterator[dict[str, Any]]:
    """What operators took in a profile, those of which it is known what they move.

    Kernels of our own appear as what they are, launched by no operator; torch's operators with what they launch
    themselves, or else with what they call.
    """
    own = {name.partition("::")[2]: name for name in moved if name.startswith("efficient_densenet::")}
    for event in events:
        name = own.get(event.key, event.key)
        if cuda:
            taken = event.self_device_time_total or event.device_time_total
        else:
            taken = event.self_cpu_time_total
        if name in moved and taken > 0:
            bytes_, launches = moved[name]
            yield {
                "operator": name, "launches": launches, "gb": round(bytes_ / 1e9, 4), "device_ms": round(taken / 1e3, 4),
                "of_copy": round(bytes_ / (taken * 1e-6) / bandwidth, 3),
            }  # fmt: skip


def _copy_bandwidth(device: str, size: int) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / (1e-3 * min(timed(lambda: target.copy_(source), device, repeat=5) for _ in range(3)))


# All of it


CHECKS: dict[str, Callable[[dict[str, Any]], Iterator[dict[str, Any]]]] = {
    "kernels": check_kernels,
    "steps": check_steps,
    "time": check_time,
    "largest batch": check_largest_batch,
    "operators": check_operators,
}
WHERE = ("hardware", "torch", "commit")
ENDED = "the end"


def check(cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of one cell, in a process of its own."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic algorithms ask for it
    if cell["dry_run"] and cell["check"] != "largest batch":  # whose many steps would take the interpreter minutes
        os.environ |= {"EFFICIENT_DENSENET_KERNELS": "interpret", "TRITON_INTERPRET": "1"}
    if cell["device"] != "cpu":
        torch.cuda.set_device(torch.device(cell["device"]))
    return CHECKS[cell["check"]](cell)


def run(settings: Settings) -> list[dict[str, Any]]:
    """Do what is left of the cells in the time there is; returns all rows."""
    end = time.monotonic() + 60 * settings.minutes
    conditions = environment(settings.device)
    rows: list[dict[str, Any]] = read_rows(settings.output) if os.path.exists(settings.output) else []
    cells = settings.cells()
    # A cell that ended has a last row, of part and name alone; the rows of one that did not are made again.
    ended = {row["name"] for row in rows if row["check"] == ENDED and _here(row, conditions)}
    rows = [row for row in rows if row["name"] in ended or not _here(row, conditions)]
    left = 0
    print_row("what", "mode", "status")
    for cell in cells:
        limit = COMPILING_SECONDS if "execution" in cell else CELL_SECONDS
        seconds = min(end - time.monotonic(), limit)
        if cell["name"] in ended:
            continue
        if seconds < LEAST_SECONDS:
            left += 1
            continue
        began, made = time.monotonic(), []
        for row in rows_in_fresh_process(check, cell, seconds):
            if set(row) == {"status"}:
                row = {**cell, **row, "check": ENDED, "seconds": round(time.monotonic() - began, 1)}
                if row["status"] != "ok":
                    print_row(cell["name"], "", row["status"])
            elif cell["check"] != "operators":  # of which there are many
                print_row(cell["name"], row.get("mode") or row.get("operator") or "", row["status"])
            made.append({**cell, **row, **conditions})
            if made[-1]["status"] == "out of time" and seconds < limit:  # the next call gives it more
                left, made = left + 1, []
            write_rows(settings.output, rows + made)
        rows += made
    shown = [row for row in rows if _here(row, conditions)]
    replace_text(Path(settings.output).with_suffix(".md"), report(shown))
    print(f"{left} of {len(cells)} parts are left for the next call" if left else "complete")
    return rows


def _here(row: dict[str, Any], conditions: dict[str, Any]) -> bool:
    """Whether a row is from this device, this torch and this commit."""
    return all(str(row[name]) == str(conditions[name]) for name in WHERE)


def report(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: what is wrong first, then a table for each part."""
    of = {what: [row for row in rows if row["check"] == what] for what in (*CHECKS, ENDED)}
    where = ", ".join(f"{rows[0][name]}" for name in ("hardware", "torch", "commit")) if rows else "nothing"
    faults = [row for row in rows if not str(row["status"]).startswith(("ok", "skipped"))]
    lines = [f"# GPU check: {where}", ""]
    lines += [f"{len(faults)} of {len(rows)} rows are not as they should be:" if faults else "Nothing is wrong.", ""]
    lines += [
        f"* {row['name']} {row.get('network') or ''} {row.get('mode') or ''} {row.get('execution') or ''} "
        f"{row.get('operator') or ''}: {row['status']}" for row in faults
    ]  # fmt: skip
    lines += _table("Kernels against the plain path", of["kernels"], ("operator", "dtype", "status"))
    lines += _table(
        "A training step against float64", of["steps"],
        ("dtype", "settings", "network", "mode", "runs", "error", "naive_error", "error_ratio", "bit_equal", "status"),
    )  # fmt: skip
    columns = ("mode", "channels_last", "execution", "peak_mib", "reserved_mib", "step_ms", "images_per_s",
               "fastest_ratio", "status")  # fmt: skip
    for name in dict.fromkeys(row["name"] for row in of["time"]):
        lines += _table(name, [row for row in of["time"] if row["name"] == name], columns)
    lines += _table("Largest batch", of["largest batch"], ("name", "budget_gib", "largest_batch", "status"))
    columns = ("mode", "operator", "launches", "gb", "device_ms", "of_copy", "gb_per_s")
    for name in dict.fromkeys(row["name"] for row in of["operators"]):
        shown = [row for row in of["operators"] if row["name"] == name]
        shown.sort(key=lambda row: (str(row.get("mode") or ""), -float(row.get("device_ms") or 0)))
        lines += _table(name, shown, columns)
    lines += _table("Seconds", of[ENDED], ("name", "seconds", "status"))
    return "\n".join(lines) + "\n"


def _table(heading: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> list[str]:
    if not rows:
        return []
    lines = ["", f"## {heading}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [row.get(column) for column in columns]
        lines.append(f"| {' | '.join('' if cell is None else _short(cell) for cell in cells)} |")
    return lines


def _short(value: object) -> str:
    text = str(value).replace("|", "/")
    with contextlib.suppress(ValueError):
        return text if len(text) < 8 else f"{float(text):.2g}"
    return text


def main(arguments: list[str] | None = None) -> None:
    start(Settings, run, arguments)


if __name__ == "__main__":
    main()

"""The Triton kernels compiled ahead of time, in the configurations they would be launched in. Run by test_kernels.py.

``python tests/compiled_kernels.py [minutes [sm_80 sm_90 sm_100 gfx942]]`` compiles whatever whole training steps launch,
in random order, and prints what became of it; for hours, unless told how many minutes.
"""

import contextlib
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from efficient_densenet import densenet121, densenet161, densenet_bc
from efficient_densenet.memory import count_step
from efficient_densenet.ops import costs, device
from efficient_densenet.ops.passes import launch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HALF, FULL = torch.bfloat16, torch.float32
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), (8, 0), 166_912),
    "sm_90": (GPUTarget("cuda", 90, 32), (9, 0), 232_448),
    "sm_100": (GPUTarget("cuda", 100, 32), (10, 0), 232_448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), (9, 4), 65_536),
}
# Images, channels read, width, growth rate and pitch of some layer; pitches before they are rounded up.
LAYERS = {
    "BC(100,12) block 1": ((64, 32, 32), 36, 48, 12, 216),
    "BC(100,12) block 3": ((64, 8, 8), 162, 48, 12, 342),
    "121": ((64, 56, 56), 96, 128, 32, 256),
    "161": ((64, 56, 56), 144, 192, 48, 384),
    "BC(190,40)": ((64, 32, 32), 120, 160, 40, 1320),
    "3-D": ((4, 16, 32, 32), 36, 48, 12, 216),
}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def vector(size: int) -> torch.Tensor:
    return empty((size + 3) // 4 * 4)[:size]


def launches(layer: str, dtype: torch.dtype) -> dict[str, launch.Launch]:
    """What a layer, its block's tail and its norms launch."""
    (n, *sizes), c, width, k, pitch = LAYERS[layer]
    m = torch.Size((n, *sizes)).numel()
    unit = 16 // dtype.itemsize
    pitch = -(-pitch // unit) * unit
    features, gradients = empty(m, pitch, dtype=dtype), empty(m, pitch, dtype=dtype)
    x, g_x, y, g = features[:, :c], gradients[:, :c], features[:, c : c + k], gradients[:, c : c + k]
    b, dz2 = empty(m, width, dtype=dtype), empty(m, width, dtype=dtype)
    taps, pool = (3,) * len(sizes), (2,) * len(sizes)
    pooled = m // 2 ** len(sizes)
    w1, w2 = empty(width, c), empty(k, *taps, width)
    one, two, own = [vector(c) for _ in range(3)], [vector(width) for _ in range(3)], [empty(k) for _ in range(3)]

    def parts(kernel: str, columns: int, inner: int) -> torch.Tensor:
        return empty(launch.cdiv(m, launch.tile(kernel, dtype, columns, inner, x.device).rows), 2, columns)

    def splits(kernel: str, columns: int, inner: int, chunks: int, rows: int = m) -> tuple[int, int]:
        tile = launch.tile(kernel, dtype, columns, inner, x.device)
        return launch.splits(rows, chunks * launch.cdiv(columns, tile.columns), tile, x.device)

    p4, each4 = splits("conv_weight_gradient", width, k, w2[0, ..., 0].numel())
    p5, each5 = splits("product_gradient", c, width, 1)
    pt, each_t = splits("norm_relu_gradient", c, 0, 1, pooled)
    ps, each_s = splits("norm_relu_max_pool_gradient", c, 0, 1)
    half, window = [size // 2 for size in sizes], [[value] * len(sizes) for value in (3, 2, 1, 1)]
    dp = empty(1, pooled, c, dtype=dtype)
    out = empty(pooled, c // 2, dtype=dtype)
    statistics = parts("norm_relu_product", width, c)
    return {
        "conv1x1 forward": launch.norm_relu_product.plan(x, *one[:2], w1, None, b, statistics, [1], [1]),
        "conv3x3 forward": launch.norm_relu_conv.plan(
            b, *two[:2], w2, None, None, y, parts("norm_relu_conv", k, width), sizes
        ),
        "conv3x3 backward": launch.conv_gradient.plan(
            g, y, *own, None, w2, b, *two, dz2, parts("conv_input_gradient", width, k), empty(p4, w2.numel()), sizes, 0,
            False, each4, True, False,
        ),
        "conv1x1 backward": launch.product_gradient.plan(
            x, g_x, b, dz2, w1, *one, two[0], *two, empty(p5, w1.numel()), empty(p5, 2, c), 0, each5, True, False
        ),
        "transition forward": launch.norm_relu_product.plan(
            x, *one[:2], empty(c // 2, c), None, out, None, sizes, pool
        ),
        "transition backward": launch.norm_relu_gradient.plan(
            x, *one, dp, g_x, empty(pt, 2, c), sizes, pool, 0, each_t, True, True
        ),
        "max pool": launch.norm_relu_max_pool.plan(x, *one[:2], dp[0], sizes, half, *window),
        "max pool backward": launch.norm_relu_max_pool_gradient.plan(
            x, *one, dp[0], empty(m, c, dtype=dtype), empty(ps, 2, c), sizes, half, *window, each_s
        ),
        "final norm": launch.norm_relu.plan(x, *one[:2], empty(m, c, dtype=dtype)),
        "statistics": launch.statistics.plan(x, parts("statistics", c, 0)),
        "input's gradient": launch.correct.plan(x, g_x, None, *one, empty(m, c, dtype=dtype)),
        "fold": launch.fold.plan(
            *two[:2], two[0], two[0], statistics, None, *two, m, launch.cdiv(m, statistics.shape[0]), 0, 1e-5
        ),
        "finish": launch.finish_gradient.plan(
            empty(p5, 2, c), *one[:2], *one[:2], *one[:2], empty(p5, w1.numel()), w1, None, m, width, (c, 1, 1)
        ),
    }  # fmt: skip


@cache
def compiled(target: str, layer: str, name: str, dtype: torch.dtype) -> dict:
    """What became of one of them, compiled for arguments of which nothing is known."""
    with planning(target):
        return build(target, launches(layer, dtype)[name], known=False)


@contextlib.contextmanager
def planning(target: str, precise: bool = False):
    """Within it, tensors without data are on such a device."""
    gpu, capability, _ = TARGETS[target]
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = not precise and gpu.backend == "cuda"
    kinds = (device.Description.of(kind, capability, 50 * 2**20, 132) for kind in ("meta", "cuda"))
    try:
        with device.assume(next(kinds)), device.assume(next(kinds)):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def source(planned: launch.Launch, known: bool) -> tuple[dict, dict, dict]:
    """Signature, constants and attributes of a launch: with what Triton learns from its arguments, if it is to know."""
    kernel = getattr(launch.kernels(), planned.kernel)
    constants = {**planned.constants, "ACC": tl.float32}
    signature, attributes = {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, planned.arguments, strict=False)):
        asks = known and not parameter.do_not_specialize
        if value is None or (asks and isinstance(value, int) and value == 1):
            constants[parameter.name] = value
            continue
        tensor = isinstance(value, torch.Tensor)
        signature[parameter.name] = TYPES[value.dtype] if tensor else "i32"
        if asks and (value.storage_offset() * value.element_size() if tensor else value) % 16 == 0:
            attributes[i,] = [["tt.divisibility", 16]]
    return {p: signature.get(p, "constexpr") for p in kernel.arg_names}, constants, attributes


def build(target: str, planned: launch.Launch, known: bool) -> dict:
    """Compile a launch: registers, bytes of stack and of shared memory, and how often what instruction."""
    gpu = TARGETS[target][0]
    kernel = getattr(launch.kernels(), planned.kernel)
    signature, constants, attributes = source(planned, known)
    made = ASTSource(
        fn=kernel, signature=signature, constexprs={(kernel.arg_names.index(p),): v for p, v in constants.items()},
        attrs=attributes,
    )  # fmt: skip
    done = triton.compile(made, target=gpu, options={"num_warps": planned.warps, "num_stages": planned.stages})
    found = {"shared": done.metadata.shared, "warps": planned.warps, "stages": planned.stages}
    found |= {p: constants[p] for p in ("BM", "BC", "BK", "VX") if p in constants}
    if gpu.backend != "cuda":
        text = done.asm["amdgcn"]
        return found | {"tensor": len(re.findall("v_mfma", text)), "128": len(re.findall("_load_dwordx4", text))}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    found |= {"registers": int(re.search(r"REG:(\d+)", usage)[1]), "stack": int(re.search(r"STACK:(\d+)", usage)[1])}
    loads = re.findall(r"\b(?:LDG|LDGSTS)\.E[\w.]*", code)
    return found | {
        "tensor": len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA)\b", code)),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "128": sum(load.endswith(".128") or ".128." in load for load in loads),
        "16": sum(".U16" in load or ".S16" in load or ".U8" in load for load in loads),
        "loads": len(loads),
    }


PRODUCTS = {"norm_relu_product", "norm_relu_conv", "conv_gradient", "product_gradient", "finish_and_product"}


def faults(target: str, planned: launch.Launch, found: dict) -> list[str]:
    """What is wrong with what became of a launch."""
    cuda, half = target != "gfx942", any(a.element_size() == 2 for a in planned.arguments if isinstance(a, torch.Tensor))
    wrong = []
    if cuda and (found["stack"] or found["spills"]):
        wrong.append("registers spill")
    if found["shared"] > TARGETS[target][2]:
        wrong.append("more shared memory than there is")
    if "VX" in found and found["VX"] * (2 if half else 4) == 16 and not found["128"]:
        wrong.append("no vector loads")
    precise = planned.constants.get("PREC") == "ieee" and not half
    if planned.kernel in PRODUCTS and not precise and (cuda or half) and not found["tensor"]:
        wrong.append("no tensor cores")
    return wrong


needs_tools = pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="Triton's package has no ptxas")


# The narrowest layer, whose channels no vector divides, and the widest ones, whose sums take the most registers.
@needs_tools
@pytest.mark.parametrize(
    ("target", "layer", "name", "dtype"),
    [
        ("sm_90", "BC(100,12) block 3", "conv1x1 forward", HALF),
        ("sm_90", "BC(100,12) block 1", "conv3x3 backward", HALF),
        ("sm_90", "121", "conv1x1 backward", HALF),
        ("sm_80", "BC(100,12) block 3", "conv1x1 backward", HALF),
        ("sm_80", "161", "conv1x1 backward", FULL),
        ("sm_100", "BC(100,12) block 1", "conv1x1 forward", HALF),
        ("gfx942", "121", "conv1x1 forward", HALF),
    ],
    ids=str,
)
def test_compiles_to_vectors_and_tensor_cores_without_spills(target, layer, name, dtype):
    """Kills: a mask by the true number of channels; a tile too large for the registers or the shared memory."""
    found = compiled(target, layer, name, dtype)
    with planning(target):
        planned = launches(layer, dtype)[name]
    assert not faults(target, planned, found), found
    assert found["128"] and (dtype.itemsize == 4 or target == "gfx942" or not found["16"]), found


# By hand: all that whole training steps launch.

STEPS = {
    "BC(100,12)": (lambda **how: densenet_bc(100, 12, num_classes=10, **how), (64, 3, 32, 32)),
    "121": (densenet121, (64, 3, 224, 224)),
    "161": (densenet161, (64, 3, 224, 224)),
    "BC(190,40)": (lambda **how: densenet_bc(190, 40, num_classes=10, **how), (64, 3, 32, 32)),
}


def without_data(value):
    """A fake tensor as one that has an address, if only relative to its storage."""
    if not isinstance(value, torch.Tensor):
        return value
    whole = empty(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def step_calls(name: str, dtype: torch.dtype) -> list[tuple]:
    """Every call of an operator in a training step that rebuilds what it can; where, only sums' sizes depend on."""
    make, shape = STEPS[name]
    calls = []

    def recording(operator, cost):
        function = getattr(launch, operator.partition("::")[2])

        def record(*args):
            calls.append((function, *map(without_data, args)))
            return cost(*args)

        return record

    with torch.device("meta"):
        model, x = make(efficient="lean").to(memory_format=torch.channels_last), torch.empty(shape)
    recorded = {operator: recording(operator, cost) for operator, cost in costs.COSTS.items()}
    with mock.patch.dict(costs.COSTS, recorded):
        count_step(model, x.to(memory_format=torch.channels_last), torch.sum, "cuda", dtype if dtype == HALF else None)
    return calls


def sweep(minutes: float, targets: list[str]) -> None:
    cases = {}
    for name in STEPS:
        for dtype in (HALF, FULL):
            calls = step_calls(name, dtype)
            for target in targets:
                for precise in (False, True)[: 2 if dtype == FULL else 1]:
                    with planning(target, precise):
                        plans = [function.plan(*args) for function, *args in calls]
                    for planned in plans:
                        for known in (True, False):
                            key = target, planned.kernel, planned.warps, planned.stages, *map(str, source(planned, known))
                            cases.setdefault(key, (target, name, dtype, planned, known))
    print(f"{len(cases)} to compile, {dict(Counter(target for target, *_ in cases))}", flush=True)
    order = list(cases.values())
    random.Random(0).shuffle(order)
    done, bad, vectors, tensors, largest, start = Counter(), Counter(), Counter(), Counter(), Counter(), time.monotonic()
    for target, name, dtype, planned, known in order:
        if time.monotonic() - start > 60 * minutes:
            break
        try:
            found = build(target, planned, known)
            wrong = faults(target, planned, found)
        except Exception as error:  # the sweep goes on
            found, wrong = {}, [f"{type(error).__name__}: {str(error)[:200]}"]
        done[target] += 1
        bad.update((target, fault) for fault in wrong)
        largest[target] = max(largest[target], found.get("shared", 0))
        vectors[target] += bool(found.get("128"))
        tensors[target] += bool(found.get("tensor"))
        print(target, name, dtype, planned.kernel, "as known" if known else "unknown", found, wrong or "ok", flush=True)
    for target in targets:
        faulty = {fault: count for (where, fault), count in bad.items() if where == target}
        print(
            f"{target}: {done[target]} compiled, {vectors[target]} with vectors of 16 bytes, {tensors[target]} with tensor "
            f"cores, at most {largest[target]} bytes of shared memory, faults: {faulty or 'none'}"
        )


if __name__ == "__main__":
    sweep(float(sys.argv[1]) if len(sys.argv) > 1 else float("inf"), sys.argv[2:] or list(TARGETS))

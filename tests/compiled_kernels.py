"""The Triton kernels compiled ahead of time, in the configurations they would be launched in. Run by test_kernels.py.

``python tests/compiled_kernels.py [sm_80 sm_90 sm_100 gfx942]`` compiles all shapes and prints what became of them.
"""

import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from efficient_densenet.ops import device
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


def launches(layer: str, dtype: torch.dtype, padded: bool = True) -> dict[str, launch.Launch]:
    """What a layer, its block's tail and its norms launch."""
    (n, *sizes), c, width, k, pitch = LAYERS[layer]
    m = torch.Size((n, *sizes)).numel()
    unit = 16 // dtype.itemsize
    pitch = -(-pitch // unit) * unit if padded else pitch
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
def compiled(
    target: str, layer: str, name: str, dtype: torch.dtype, precise: bool = False, padded: bool = True
) -> dict:
    """What became of one of them: registers, bytes of stack and of shared memory, and how often what instruction."""
    gpu, capability, _ = TARGETS[target]
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = not precise and gpu.backend == "cuda"
    try:
        with device.assume(device.Description.of("meta", capability, 50 * 2**20, 132)):
            planned = launches(layer, dtype, padded)[name]
    finally:
        torch.backends.cudnn.allow_tf32 = before
    kernel = getattr(launch.kernels(), planned.kernel)
    constants = {**planned.constants, "ACC": tl.float32}
    signature = {}
    for parameter, value in zip(kernel.arg_names, planned.arguments, strict=False):
        if value is None:
            constants[parameter] = None
        else:
            signature[parameter] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
    signature = {p: signature.get(p, "constexpr") for p in kernel.arg_names}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(kernel.arg_names.index(p),): v for p, v in constants.items()}
    )
    done = triton.compile(source, target=gpu, options={"num_warps": planned.warps, "num_stages": planned.stages})
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
    found |= {
        "tensor": len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA)\b", code)),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "128": sum(load.endswith(".128") or ".128." in load for load in loads),
        "16": sum(".U16" in load or ".S16" in load or ".U8" in load for load in loads),
        "loads": len(loads),
    }
    return found


def faults(target: str, layer: str, name: str, dtype: torch.dtype, precise: bool = False, padded: bool = True) -> list:
    """What is wrong with one of them."""
    found = compiled(target, layer, name, dtype, precise, padded)
    cuda = target != "gfx942"
    wrong = []
    if cuda and (found["stack"] or found["spills"]):
        wrong.append("registers spill")
    if found["shared"] > TARGETS[target][2]:
        wrong.append("more shared memory than there is")
    if name in ("fold", "finish"):
        return wrong
    if padded and not found["128"]:
        wrong.append("no vector loads")
    if padded and cuda and dtype.itemsize == 2 and found["16"]:
        wrong.append("loads of single elements")
    if "conv" in name and not precise and (cuda or dtype.itemsize == 2) and not found["tensor"]:
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
    assert not faults(target, layer, name, dtype), compiled(target, layer, name, dtype)


if __name__ == "__main__":
    count = 0
    for target in sys.argv[1:] or TARGETS:
        for layer in LAYERS:
            for name in launches(layer, FULL):
                for kind in ("bf16", "fp16", "tf32", "ieee", "bf16 unpadded", "tf32 unpadded"):
                    if "conv" not in name and kind in ("fp16", "ieee"):
                        continue
                    if "unpadded" in kind and LAYERS[layer][4] != 342:
                        continue
                    types = {"bf16": HALF, "fp16": torch.float16, "tf32": FULL, "ieee": FULL}
                    case = target, layer, name, types[kind[:4]], kind == "ieee", "unpadded" not in kind
                    try:
                        wrong, found = faults(*case), compiled(*case)
                    except Exception as error:
                        wrong, found = [f"{type(error).__name__}: {str(error)[:200]}"], {}
                    count += bool(wrong)
                    print(target, layer, name, kind, found, "; ".join(wrong) or "ok", sep=" | ", flush=True)
    print(f"{count} with faults")

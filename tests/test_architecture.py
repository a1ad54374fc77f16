"""The house plan, read from the sources: who imports whom, what importing costs, which names are public."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import efficient_densenet

ROOT = Path(efficient_densenet.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Parts of the package, and the parts each may import; arrows go one way.
ARROWS = {
    "ops": {"ops"},
    "models": {"models", "ops"},
    "conversion": {"conversion", "models", "ops"},
    "memory": {"memory", "conversion", "models", "ops"},
    "__init__": {"models", "conversion", "memory"},
    "training": {"training", "memory", "conversion", "models", "ops", "__init__"},
}


def part(module: str) -> str:
    """``efficient_densenet.models.layers`` is of the part ``models``; the package itself of ``__init__``."""
    return module.split(".")[1] if "." in module else "__init__"


def module_name(file: Path) -> str:
    names = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imports(file: Path) -> list[tuple[str, bool]]:
    """Absolute names of all modules a file imports, each with whether it does so inside a function."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    within = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    package = module_name(file) if file.name == "__init__.py" else module_name(file).rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in within) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            # ``from . import layers`` names a module, ``from .layers import DenseLayer`` an object in one.
            whole = [n for n in names if (ROOT.parent / n.replace(".", "/")).with_suffix(".py").exists()]
            found += [(name, id(node) in within) for name in whole or [base]]
    return found


def test_the_reader_sees_imports():
    """Kills: a reader of imports that finds nothing and lets everything pass."""
    names = [name for file in FILES for name, _ in imports(file)]
    assert {"torch", "efficient_densenet.models.densenet", "efficient_densenet.ops.storage"} <= set(names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_arrows_go_one_way(file):
    """training -> memory, conversion -> models -> ops -> torch."""
    own = part(module_name(file))
    assert own in ARROWS, f"{file.name} has no place in the house plan"
    for name, _ in imports(file):
        if name.split(".")[0] == ROOT.name:
            assert part(name) in ARROWS[own], f"{module_name(file)} imports {name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_library_imports_torch_and_nothing_heavier(file):
    """Outside training only torch and the standard library; torchvision's weights lazily, inside one function.

    The kernels' file imports Triton, and is itself imported by the first launch on a device.
    """
    if part(module_name(file)) == "training":
        return
    for name, within_function in imports(file):
        top = name.split(".")[0]
        lazily = top == "torchvision" and within_function and file.name == "weights.py"
        lazily |= top == "triton" and file.name == "triton_kernels.py"
        assert within_function or not name.endswith(".triton_kernels"), f"{module_name(file)} imports {name}"
        assert top in {"torch", ROOT.name, *sys.stdlib_module_names} or lazily, f"{module_name(file)} imports {name}"


def test_no_cycles_within_a_part():
    """Kills: two files that cannot be read one before the other."""
    graph = {module_name(f): {name for name, _ in imports(f) if name.startswith(ROOT.name)} for f in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for name in graph.get(module, ()):
                # A package's own __init__ gathers its files.
                if not module.startswith(f"{name}.") and name != module:
                    visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_importing_and_training_on_a_cpu_is_light():
    """Kills: torchvision, fire, tqdm or matplotlib loaded with the library; CUDA initialised by a step on the CPU."""
    script = """
import sys
import torch
before = set(sys.modules)  # torch itself imports tqdm where it is installed
import efficient_densenet
added = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = {"torchvision", "fire", "tqdm", "matplotlib", "sklearn", "tensorboard", "pandas", "triton"} & added
assert not heavy, heavy
model = efficient_densenet.DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8)
model(torch.randn(2, 3, 8, 8)).sum().backward()
assert not torch.cuda.is_initialized()
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not result.stdout and not result.stderr


PUBLIC = {
    "DenseNet", "SyncBatchNorm", "densenet_bc", "make_efficient", "restore", "execution_plan",
    "densenet121", "densenet161", "densenet169", "densenet201", "densenet264",
}  # fmt: skip


def test_public_names():
    """Kills: a public name lost, hidden, or public by accident."""
    assert PUBLIC <= set(efficient_densenet.__all__)
    assert set(efficient_densenet.__all__) <= PUBLIC | {"dense_block", "estimate_memory", "fit_batch_size"}
    for name in efficient_densenet.__all__:
        assert getattr(efficient_densenet, name).__doc__, f"{name} has no docstring"
    assert efficient_densenet.__version__.count(".") == 2


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_sources(file):
    """A docstring for every module, no print in the library, but where it is a command."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if text.strip():
        assert ast.get_docstring(tree), f"{file.name} has no docstring"
    if part(module_name(file)) != "training" and file.name != "table.py":
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert "print" not in [function.id for function in calls if isinstance(function, ast.Name)]

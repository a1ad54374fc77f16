"""The Triton kernels without a GPU: interpreted, and compiled ahead of time, each in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_tests(name: str, folder: Path, **environment: str) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@needs_triton
def test_interpreted(tmp_path):
    run_tests("interpreted_kernels.py", tmp_path, EFFICIENT_DENSENET_KERNELS="interpret", TRITON_INTERPRET="1")


@needs_triton
def test_compiled_ahead_of_time(tmp_path):
    run_tests("compiled_kernels.py", tmp_path, EFFICIENT_DENSENET_KERNELS="1", TRITON_INTERPRET="0")

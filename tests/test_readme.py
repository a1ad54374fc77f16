"""What the README shows: its commands are understood, its Python runs."""

import csv
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from efficient_densenet import densenet_bc
from efficient_densenet.memory import table
from efficient_densenet.training.config import parse_flags

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import conversion  # noqa: E402
import cuda_counts  # noqa: E402
import gpu_check  # noqa: E402
import measure  # noqa: E402
import memory  # noqa: E402
import prediction  # noqa: E402
import report  # noqa: E402
import scaling  # noqa: E402
import speed  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    shlex.split(command, comments=True)
    for language, block in BLOCKS
    if language == "bash"
    for line in block.splitlines()
    for command in re.sub(r"^(\w+=\S+ )+", "", line).split("&&")
]
UNDERSTOOD = {  # reads the flags and does nothing
    "demo.py": parse_flags,
    "benchmarks/memory.py": lambda flags: measure.parse(memory.Settings, flags),
    "benchmarks/speed.py": lambda flags: measure.parse(speed.Settings, flags),
    "benchmarks/conversion.py": lambda flags: measure.parse(conversion.Settings, flags),
    "benchmarks/cuda_counts.py": lambda flags: measure.parse(cuda_counts.Settings, flags),
    "benchmarks/gpu_check.py": lambda flags: measure.parse(gpu_check.Settings, flags),
    "benchmarks/prediction.py": lambda flags: measure.parse(prediction.Settings, flags),
    "benchmarks/scaling.py": lambda flags: measure.parse(scaling.Settings, flags),
    "benchmarks/report.py": lambda flags: measure.parse(report.Settings, flags),
}


def test_the_run_that_learns_ended_as_the_readme_says():
    """Kills: a number that was typed; curves of another run."""
    with open(ROOT / "benchmarks" / "results" / "digits.csv", newline="") as file:
        *epochs, last = csv.DictReader(file)
    said = float(re.search(r"below a test error of 3 %, here at ([\d.]+) %", README)[1])
    assert said == round(100 * float(last["test_error"]), 2) < 3
    assert f"--n_epochs {len(epochs)} " in README and (ROOT / "benchmarks" / "results" / "digits.png").is_file()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_are_understood(words, tmp_path, monkeypatch):
    """Kills: a flag that was renamed, a file that has moved."""
    program = next((word for word in words if word in UNDERSTOOD), None)
    if words[:3] == ["python", "-m", "efficient_densenet.memory"]:
        assert table.read(words[3:])
        return
    if program is None:
        assert words[0] == "pip" or words[:3] == ["python", "-m", "pytest"]
        return
    assert words[0] in ("python", "torchrun") and (ROOT / program).is_file()
    flags = words[words.index(program) + 1 :]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    if "--help" in flags:
        with pytest.raises(SystemExit) as stop:
            UNDERSTOOD[program](flags)
        assert stop.value.code == 0
    else:
        UNDERSTOOD[program](flags)


PYTHON = [block for language, block in BLOCKS if language == "python"]


@pytest.mark.parametrize("block", PYTHON, ids=range(len(PYTHON)))
def test_python_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved = re.search(r'"([^"]*model\.dat)"', block)
    if saved:
        path = tmp_path / saved.group(1)
        path.parent.mkdir(parents=True)
        torch.save(densenet_bc(100, 12, num_classes=10).state_dict(), path)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()

"""The examples, run end to end with tiny settings."""

import re
import subprocess
import sys
from pathlib import Path

from helpers import peer

ROOT = Path(__file__).resolve().parent.parent


def test_monai_in_3d():
    """Kills: an example that converts nothing, or does not train."""
    peer("monai.networks.nets")
    flags = "--blocks 4,3 --size 32 --batch_size 2 --steps 2".split()
    command = [sys.executable, "-W", "ignore", "examples/monai_3d.py", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = map(int, re.search(r"(\d+) MiB as it is, (\d+) MiB now", done.stdout).groups())
    assert after < 0.9 * before
    assert done.stdout.count("runs fused") == 2 and done.stdout.count("loss ") == 2 and "nan" not in done.stdout

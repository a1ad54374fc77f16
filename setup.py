"""Packaging: ``pip install -e .`` for the library, ``.[demo]`` to train with demo.py, ``.[test,peers]`` for the tests."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
FACE = (ROOT / "efficient_densenet/__init__.py").read_text(encoding="utf-8")
VERSION = re.search(r'__version__ = "([^"]+)"', FACE).group(1)

# torchvision: data sets and the outside oracle of the tests; fire: the command line; tqdm: the progress bar;
# matplotlib: curves.png and the benchmark figures; scikit-learn: the digits data set, which needs no download.
DEMO = ["torchvision>=0.19", "fire>=0.5", "tqdm", "matplotlib", "scikit-learn"]

setup(
    name="efficient_densenet",
    version=VERSION,
    description="DenseNets that train in a fraction of the memory, with exactly the same numbers",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["efficient_densenet", "efficient_densenet.*"]),
    python_requires=">=3.10",
    install_requires=["torch>=2.4"],
    # tensorboard: for demo.py --tensorboard True, and the test that reads its files back. pytest-xdist: the tests on
    # two cores, in little more than half the time. peers: other people's tools, which the tests try on the models.
    extras_require={
        "demo": DEMO,
        "tensorboard": ["tensorboard"],
        "test": [*DEMO, "tensorboard", "pytest>=7", "pytest-xdist"],
        "peers": ["monai", "timm", "torch-pruning"],
    },
)

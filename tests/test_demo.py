"""demo.py from the command line to the test error, on real digits."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import on_ranks

import efficient_densenet
from efficient_densenet.training import data, log

DEMO = Path(__file__).parent.parent / "demo.py"
SMALL = "--dataset digits --depth 10 --growth_rate 4 --batch_size 16 --num_workers 0 --device cpu --seed 3".split()

# Python 3.12 and later warn of every fork; the processes forked here use one thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

spec = importlib.util.spec_from_file_location("demo", DEMO)
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs demo.py in this process and an empty folder; gives exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def start(*flags):
        monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, flags)])
        try:
            demo.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return start


def rows(folder):
    with open(Path(folder) / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def weights(folder):
    return torch.load(Path(folder) / "model.dat", weights_only=True)


def test_a_run_leaves_what_it_promises(run):
    code, out, err = run(*SMALL, "--n_epochs", 2, "--max_steps", 4, "--save", "out")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "data: digits" and "1,294 training, 143 validation, 360 test images" in lines[1]
    assert "densenet_bc (depth 10, growth rate 4), 2,666 parameters, efficient=auto, blocks run: " in lines[2]
    assert lines[3] == "1 CPU x 16 = 16 images per step, lr 0.1" and lines[4] == "results: out"
    assert [line[:11] for line in lines[5:7]] == ["epoch 1/2: ", "epoch 2/2: "] and " MiB" in lines[5]

    assert sorted(os.listdir("out")) == ["config.json", "curves.png", "model.dat", "results.csv"]
    first, second, last = rows("out")
    assert [first["epoch"], second["epoch"]] == ["1", "2"] and first["test_error"] == ""
    assert [float(first["lr"]), float(second["lr"])] == pytest.approx([0.1, 0.01])
    assert all(float(first[name]) > 0 for name in log.COLUMNS if name != "test_error")
    assert lines[-1] == f"test error: {float(last['test_error']):.4f}"

    settings = json.loads(Path("out/config.json").read_text())
    assert settings["depth"] == 10 and settings["efficient"] is True and settings["seed"] == 3
    assert settings["dataset"] == settings["images"]["name"] == "digits" and settings["world_size"] == 1
    assert settings["versions"]["torch"] == torch.__version__

    # model.dat is the model of the best epoch: its error on the validation images is the one that was logged.
    config = demo.parse_flags([*SMALL, "--save", "out"])
    images = data.load(config, demo.distributed.World(), 3)
    model = demo.build_model(config, 10, 3)
    model.load_state_dict(weights("out"))
    loader = data.batches(images.valid, range(len(images.valid)), config, demo.distributed.World())
    _, error = demo.engine.evaluate(model, loader, demo.distributed.World())
    assert error == min(float(first["valid_error"]), float(second["valid_error"]))


def test_a_seed_repeats_a_run_whatever_the_workers_and_the_mode(run):
    runs = {"a": [], "workers": ["--num_workers", 1], "naive": ["--efficient", "False"], "other": ["--seed", 4]}
    for folder, flags in runs.items():
        assert run(*SMALL, "--n_epochs", 1, "--max_steps", 3, "--drop_rate", 0.2, "--save", folder, *flags)[0] == 0
    first, workers, naive, other = map(weights, runs)
    for name, tensor in first.items():
        assert torch.equal(tensor, workers[name]), name
        assert torch.allclose(tensor, naive[name], rtol=0, atol=0.01), name  # another order of sums, three steps on
    assert not torch.allclose(first["features.conv0.weight"], other["features.conv0.weight"], rtol=0, atol=0.01)


def test_without_validation_the_last_weights_are_kept(run):
    assert run(*SMALL, "--n_epochs", 2, "--max_steps", 2, "--valid_size", 0, "--save", "out")[0] == 0
    written = rows("out")
    assert [row["valid_loss"] + row["valid_error"] for row in written] == ["", "", ""]
    assert weights("out")["features.norm5.num_batches_tracked"] == 4


def test_results_are_kept_unless_they_may_go(run):
    flags = [*SMALL, "--n_epochs", 1, "--max_steps", 1, "--save", "out"]
    assert run(*flags)[0] == 0
    before = Path("out/model.dat").read_bytes()
    code, out, err = run(*flags)
    assert (code, out) == (2, "") and "--save out: holds results already" in err
    assert Path("out/model.dat").read_bytes() == before
    assert run(*flags, "--overwrite", "True", "--seed", 5)[0] == 0
    assert Path("out/model.dat").read_bytes() != before


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--effcient True", "unknown flag --effcient, did you mean --efficient?"),
        ("--efficient false", "--efficient must be True, False or one of"),
        ("--efficient fussed", "got 'fussed'"),
        ("--depth 25", "--depth must be 6 n + 4"),
        ("--depth 25", "22 and 28"),
        ("--compression 0.001 --growth_rate 2", "--compression"),
        ("--lr fast", "--lr fast: expected a number"),
        ("--dataset imagefolder --data nowhere", "--data nowhere: there is no folder train/"),
        ("--dataset cifar10 --data nowhere", "--dataset cifar10: not in nowhere"),
        ("--data nowhere", "--dataset cifar10: not in nowhere"),
        ("--dataset digits --valid_size 1437", "--valid_size 1437: digits has 1437 training images"),
        ("--dataset digits --model densenet121 --image_size 28", "--image_size: images of 28 pixels are too small"),
        ("--parallel ddp", "--parallel ddp: start it with torchrun"),
        ("--sync_bm True", "unknown flag --sync_bm"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_happens(run, monkeypatch, flags, words):
    monkeypatch.setattr(data, "_unreachable", lambda url: "no network")
    code, out, err = run(*flags.split())
    assert (code, out) == (2, "")
    assert err.startswith("demo.py: error: ") and words in err and err.count("\n") == 1
    assert os.listdir() == []


def test_an_unreadable_image_ends_the_run_with_its_name(run):
    from PIL import Image

    for part in ("train", "test"):
        for name in "ab":
            os.makedirs(f"images/{part}/{name}")
            for i in range(4):
                Image.new("RGB", (32, 32)).save(f"images/{part}/{name}/{i}.png")
    Path("images/train/b/2.png").write_bytes(b"no image")
    flags = [*SMALL, "--dataset", "imagefolder", "--data", "images", "--n_epochs", 1, "--save", "out", "--num_workers", 1]
    code, _, err = run(*flags)
    assert code == 1 and err.count("\n") == 1
    assert err.startswith("demo.py: error: cannot read the image images/train/b/2.png: ")


def test_efficient_modes_come_from_the_library(run):
    for mode in efficient_densenet.models.MODES:
        code, out, _ = run(*SMALL, "--n_epochs", 1, "--max_steps", 1, "--save", mode, "--efficient", mode)
        assert code == 0 and f"efficient={mode}, " in out


def test_an_imagenet_shape(run):
    flags = "--dataset digits --model densenet121 --batch_size 60 --valid_size 2 --num_workers 0 --max_steps 1 --n_epochs 1".split()
    code, out, err = run(*flags, "--save", "out")
    assert (code, err) == (0, "") and "model: densenet121, 6,964,106 parameters" in out


def environment():
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::FutureWarning"}


def test_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(DEMO)]
    flags = [*SMALL, "--n_epochs", "1", "--max_steps", "2", "--save", "out"]
    done = subprocess.run(command + flags, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 CPU processes x 16 = 32 images per step, lr 0.2") == 1
    assert done.stdout.count("test error: ") == 1
    first, last = rows(tmp_path / "out")
    assert 0 < float(last["test_error"]) < 1
    assert json.loads((tmp_path / "out/config.json").read_text())["world_size"] == 2
    model = efficient_densenet.densenet_bc(10, 4)
    model.load_state_dict(weights(tmp_path / "out"))


def _mistaken(folder):
    os.chdir(folder)
    sys.argv = ["demo.py", "--dataset", "imagefolder", "--data", "nowhere"]
    demo.main()


def test_a_mistake_is_shown_by_one_rank(tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    stops = on_ranks(3, tmp_path / "ranks", _mistaken, tmp_path / "empty")
    assert [(type(stop), stop.code) for stop in stops] == [(SystemExit, 2)] * 3
    assert capfd.readouterr().err.count("demo.py: error: --data nowhere: there is no folder train/") == 1
    assert os.listdir(tmp_path / "empty") == []

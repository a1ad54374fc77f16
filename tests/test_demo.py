"""demo.py from the command line to the test error, on real digits."""

import csv
import importlib.util
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from ranks import on_ranks

import efficient_densenet
from efficient_densenet.training import budget, data, log

DEMO = Path(__file__).parent.parent / "demo.py"
SMALL = "--dataset digits --depth 10 --growth_rate 4 --batch_size 16 --num_workers 0 --device cpu --seed 3".split()

# Python 3.12 and later warn of every fork; the processes forked here use one thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

spec = importlib.util.spec_from_file_location("demo", DEMO)
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)


@pytest.fixture(autouse=True)
def uncurved(request, monkeypatch):
    """Drawing takes longer than the rest of these runs; the first test draws."""
    if request.node.name != "test_a_run_leaves_what_it_promises":
        monkeypatch.setattr(log.Results, "draw_curves", lambda self, rows: None)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs demo.py in this process and an empty folder; gives exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def start(*flags):
        monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, flags)])
        return demo.main(), *capsys.readouterr()

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

    assert sorted(os.listdir("out")) == ["checkpoint.pt", "config.json", "curves.png", "model.dat", "results.csv"]
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
    config, _ = demo.parse_flags(SMALL)
    images = data.load(config, demo.distributed.World(), 3)
    model = demo.build_model(config, 10, 3)
    model.load_state_dict(weights("out"))
    loader = data.batches(images.valid, range(len(images.valid)), config, demo.distributed.World())
    _, error = demo.engine.evaluate(model, loader, config, demo.distributed.World())
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
        ("--efficient fussed", "--efficient fussed: expected True or False or naive or checkpoint"),
        ("--save ~nobody-of-this-name", "--save ~nobody-of-this-name: there is no home folder ~nobody-of-this-name"),
        ("--depth 25", "--depth must be 6 n + 4"),
        ("--depth 25", "22 and 28"),
        ("--compression 0.001 --growth_rate 2", "--compression"),
        ("--lr fast", "--lr fast: expected a number"),
        ("--dataset imagefolder --data nowhere", "--data nowhere: there is no folder train/"),
        ("--dataset cifar10 --data nowhere", "--dataset cifar10: not in nowhere"),
        ("--data nowhere", "--dataset cifar10: not in nowhere"),
        ("--dataset digits --valid_size 1437", "--valid_size 1437: digits has 1437 training images"),
        ("--dataset digits --model densenet121 --image_size 28", "--image_size: images of 28x28 pixels are too small"),
        ("--parallel ddp", "--parallel ddp: start it with torchrun"),
        ("--sync_bm True", "unknown flag --sync_bm"),
        ("--model resnet50 --depth 40", "--model resnet50: expected one of densenet121"),
        ("--n_epochs 3 --warmup_epochs 4", "--warmup_epochs 4: the run has 3 epochs"),
        ("--save a/" + "b" * 300, "File name too long"),
        ("--save /dev/null/out", "--save /dev/null/out: /dev/null is not a folder"),
        ("--resume maybe", "--resume maybe: there is no such folder"),
        ("--resume maybe/checkpoint.pt", "--resume maybe/checkpoint.pt: there is no such folder"),
        (f"--resume {DEMO}", "there is no such folder; it takes the folder of a run, or the checkpoint.pt in it"),
        ("--evaluate maybe", "--evaluate maybe: there is no file maybe"),
        (f"--evaluate {DEMO}", "demo.py: it is damaged, or no file of torch.save"),
        ("--evaluate maybe --memory_budget 1GiB", "--evaluate does not go with --memory_budget"),
        ("--distill hard", "--distill hard: from whom? add --teacher PATH"),
        ("--teacher maybe --distill hard --distill_temperature 2", "--distill_temperature 2: has no meaning for"),
        ("--teacher maybe --distill_alpha 1.5", "--distill_alpha 1.5: must be at least 0 and at most 1"),
        ("--dataset digits --teacher maybe", "--teacher maybe: there is no file maybe"),
        ("--device cpu --batch_size auto", "--batch_size auto: a CPU has no memory of its own to fill"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_happens(run, monkeypatch, flags, words):
    monkeypatch.setattr(data, "_unreachable", lambda url: "no network")
    code, out, err = run(*flags.split())
    assert (code, out) == (2, "")
    assert err.startswith("demo.py: error: ") and words in err and err.count("\n") == 1
    assert os.listdir() == []


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--memory_budget 1MiB", "--memory_budget 1MiB: with --efficient lean, --batch_size 16 takes about"),
        ("--image_size 4 --batch_size 1", "--batch_size 1: too few images, BatchNorm needs 2 in a batch"),
    ],
)
def test_a_mistake_that_the_data_show(run, flags, words):
    code, out, err = run(*SMALL, *flags.split())
    assert code == 2 and out.startswith("data: digits\n") and len(out.splitlines()) == 2
    assert err.startswith(f"demo.py: error: {words}") and err.count("\n") == 1
    assert os.listdir() == []


def image_folder(folder, bits=8, parts=("train", "test"), classes="ab"):
    """Class folders of four images of noise each, of 8 or of 12 bits."""
    for part in parts:
        for name in classes:
            os.makedirs(f"{folder}/{part}/{name}")
            for i in range(4):
                noise = torch.randint(2**bits, (32, 32)).numpy().astype("uint8" if bits == 8 else "uint16")
                Image.fromarray(noise).save(f"{folder}/{part}/{name}/{i}.png")


def test_images_that_cannot_be_used_are_named(run):
    image_folder("images")
    odd = Path("images/train/b/2.png")
    whole = odd.read_bytes()
    flags = [*SMALL, "--dataset", "imagefolder", "--data", "images", "--n_epochs", 1, "--save", "out"]

    def error(expected, *more):
        code, _, err = run(*flags, *more)
        assert code == expected and err.count("\n") == 1
        return err.removeprefix("demo.py: error: ")

    for content in (whole[: len(whole) // 2], b"no image", b""):
        odd.write_bytes(content)
        for more in ([], ["--image_size", 16]):
            assert error(2, *more).startswith("--data: cannot read the image images/train/b/2.png: ")
    assert not os.path.exists("out")
    odd.write_bytes(whole[:200] + bytes(99) + whole[299:])  # its header is right, and its end
    assert error(1, "--num_workers", 1).startswith("cannot read the image images/train/b/2.png: ")
    Image.new("RGB", (32, 31)).save(odd)
    words = "--image_size: the image images/train/b/2.png has 32x31 pixels, the first image has 32x32; --image_size N"
    assert error(2, "--save", "other").startswith(words) and not os.path.exists("other")
    assert run(*flags, "--save", "other", "--image_size", 32)[0] == 0


def test_a_folder_is_said_to_be_what_it_was_taken_for(run):
    """Kills: CIFAR-10 asked for where a folder of images was given; val/ called test/; another one when tested."""
    image_folder("mine", parts=("train", "val"))
    flags = [*SMALL[2:], "--n_epochs", 1, "--max_steps", 1, "--save", "out"]
    code, out, err = run(*flags, "--data", "mine")
    said = "data: imagefolder in mine (class folders under train/ and val/)"
    assert (code, err) == (0, "") and out.splitlines()[0] == said
    assert json.loads(Path("out/config.json").read_text())["dataset"] == "imagefolder"
    assert run("--resume", "out")[1].splitlines()[0] == run("--evaluate", "out")[1].splitlines()[0] == said
    image_folder("other")
    for path in ("out", "out/model.dat"):
        assert run("--evaluate", path, "--data", "other")[1].startswith("data: imagefolder in other (")
    code, _, err = run("--resume", "out", "--data", "other")
    assert code == 2 and "--data other: the run in out has mine, and it goes on as it was" in err


def test_a_test_is_on_the_data_that_it_is_given(run, uninterrupted):
    """A model of digits, tested on a folder of images. Kills: the run's data set, whatever --data holds."""
    image_folder("other", classes="0123456789")
    code, out, err = run("--evaluate", uninterrupted, "--data", "other")
    assert (code, err) == (0, "") and out.startswith("data: imagefolder in other (")
    os.mkdir("empty")
    assert run("--evaluate", uninterrupted, "--data", "empty")[1].startswith("data: digits\n")


def test_the_value_of_white_is_kept(run):
    image_folder("deep", bits=12)
    flags = [*SMALL[2:], "--data", "deep", "--n_epochs", 1, "--max_steps", 1]
    out = run(*flags, "--save", "wide")[1]
    assert re.search("\nimages of more than 8 bits: values up to 4,0.., white is 65,535: .*--image_max 4095 uses", out)
    assert run(*flags, "--image_max", 4095, "--save", "out")[0] == 0
    assert json.loads(Path("out/config.json").read_text())["image_max"] == 4095
    for flag in ("--resume", "--evaluate"):
        assert re.search("\nimages of more than 8 bits: values up to 4,0.., white is 4,095\n", run(flag, "out")[1])
    code, _, err = run("--resume", "out", "--image_max", 1000)
    assert code == 2 and "--image_max 1000.0: the run in out has 4095.0" in err


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_console_shows_what_it_has_no_characters_for(run, monkeypatch, encoding):
    """Kills: an error of encoding after config.json was written, or in the line that explains another error."""
    image_folder("bilder/狗é", classes=["猫", os.fsdecode(b"\xff")])
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding, "strict") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    flags = [*SMALL[2:], "--data", "bilder/狗é", "--n_epochs", 2, "--max_steps", 1, "--progress", "True"]
    assert run(*flags, "--save", "结果")[0] == run("--resume", "结果")[0] == run("--evaluate", "结果")[0] == 0
    (Path("bilder/狗é/test") / os.fsdecode(b"\xff") / "0.png").write_bytes(b"")
    assert run("--evaluate", "结果")[0] == run("--深")[0] == 2
    for stream in (stdout, stderr):
        stream.flush()
    said = stdout.buffer.getvalue().decode(encoding)
    assert said.count("results: \\u7ed3\\u679c\n") == 2 and "bilder/\\u72d7" in said
    assert "/test/\\udcff/0.png: it is empty" in stderr.buffer.getvalue().decode(encoding)
    assert json.loads(Path("结果/config.json").read_bytes().decode())["images"]["classes"][0] == "猫"


def test_efficient_modes_come_from_the_library(run):
    for mode in efficient_densenet.models.MODES:
        code, out, _ = run(
            *SMALL, "--n_epochs", 1, "--max_steps", 1, "--valid_size", 0, "--save", mode, "--efficient", mode
        )
        assert code == 0 and f"efficient={mode}, " in out


def test_an_imagenet_shape(run):
    flags = "--dataset digits --model densenet121 --batch_size 60 --valid_size 2 --num_workers 0 --max_steps 1".split()
    code, out, err = run(*flags, "--n_epochs", 1, "--save", "out")
    assert (code, err) == (0, "") and "model: densenet121, 6,964,106 parameters" in out


# Flags that change how it trains


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--amp bf16", "lr 0.1"),
        ("--amp fp16 --clip_grad 1", "lr 0.1"),
        ("--channels_last False --label_smoothing 0.1", "lr 0.1"),
        (
            "--accumulation_steps 3",
            "1 CPU x 16 x 3 accumulation steps = 48 images per step, lr 0.3 after 5 warm-up epochs",
        ),
        ("--accumulation_steps 4 --lr_scaling sqrt --warmup_epochs 0", "= 64 images per step, lr 0.2"),
        ("--ema_decay 0.9", "lr 0.1"),
        ("--schedule cosine --tensorboard True", "lr 0.1"),
        ("--progress True", "lr 0.1"),
    ],
)
def test_flags_of_training(run, monkeypatch, flags, words):
    few = tuple(data._Arrays(part.images[:64], part.labels[:64], part.classes) for part in data._digits())
    monkeypatch.setattr(data, "_digits", lambda: few)  # low precision is slow on many CPUs
    code, out, err = run(*SMALL, *flags.split(), "--n_epochs", 1, "--max_steps", 2, "--save", "out")
    assert code == 0 and words in out.splitlines()[3]
    assert err == "" or "--progress" in flags and "images/s" in err
    assert "epoch 1/1: " in out and 0 < float(rows("out")[-1]["test_error"]) < 1
    assert os.path.exists("out/tensorboard") == ("--tensorboard" in flags)


def test_averaged_weights_are_what_is_kept(run):
    flags = [*SMALL, "--n_epochs", 1, "--max_steps", 3]
    run(*flags, "--save", "plain")
    run(*flags, "--save", "averaged", "--ema_decay", 0.5)
    plain, averaged = weights("plain"), weights("averaged")
    assert list(plain) == list(averaged)
    assert not torch.equal(plain["features.conv0.weight"], averaged["features.conv0.weight"])
    assert plain["features.norm5.num_batches_tracked"] == averaged["features.norm5.num_batches_tracked"] == 3
    checkpoint = torch.load("averaged/checkpoint.pt", weights_only=True)
    assert torch.equal(checkpoint["ema"]["module.features.conv0.weight"], averaged["features.conv0.weight"])
    assert torch.equal(checkpoint["model"]["features.conv0.weight"], plain["features.conv0.weight"])


def test_a_last_batch_of_one_image_that_batch_norm_cannot_take_is_left_out(run, monkeypatch):
    parts = tuple(data._Arrays(part.images[:33], part.labels[:33], part.classes) for part in data._digits())
    monkeypatch.setattr(data, "_digits", lambda: parts)
    flags = [*SMALL, "--valid_size", 0, "--n_epochs", 1]
    code, out, err = run(*flags, "--image_size", 4, "--save", "out")  # 4 pixels become 1
    assert (code, err) == (0, "")
    said = "1 CPU x 16 = 16 images per step, lr 0.1, 1 left over in an epoch: BatchNorm needs 2 in a batch here"
    assert said in out.splitlines()
    assert weights("out")["features.norm5.num_batches_tracked"] == 2
    code, out, _ = run(*flags, "--image_size", 8, "--save", "larger")
    assert code == 0 and "left over" not in out and weights("larger")["features.norm5.num_batches_tracked"] == 3


# Memory

BUDGET = [*SMALL, "--n_epochs", 1, "--max_steps", 2, "--drop_rate", 0.2]


def test_a_budget_changes_nothing_but_the_choice(run):
    assert run(*BUDGET, "--efficient", "fused", "--save", "plain")[0] == 0
    code, out, err = run(*BUDGET, "--memory_budget", "1GiB", "--num_workers", 1, "--save", "out")
    assert (code, err) == (0, "")
    assert out.splitlines()[2].endswith(" of 1,024 MiB with efficient=fused and batches of 16")
    assert_same_run("out", "plain")


def test_a_chosen_batch_is_kept_for_resume_and_evaluation(run, monkeypatch):
    flags = [*BUDGET, "--memory_budget", "10MiB", "--batch_size", "auto", "--save", "out"]
    code, out, _ = run(*flags)
    settings = json.loads(Path("out/config.json").read_text())
    batch = settings["batch_size"]
    assert code == 0 and settings["efficient"] == "fused" and settings["memory_budget"] == "10MiB" and batch > 4
    assert f" of 10 MiB with efficient=fused and batches of {batch}\n" in out
    assert f"efficient=fused, blocks run: fused\n1 CPU x {batch} = {batch} images per step, lr 0.1\n" in out
    last = out.splitlines()[-1]

    monkeypatch.setattr(budget, "need", None)  # it is not measured again
    code, out, _ = run(*flags, "--efficient", "True", "--resume", "True", "--n_epochs", 2)
    assert code == 0 and f"1 CPU x {batch} = " in out and "goes on after 1 epochs and 0 steps" in out
    os.remove("out/checkpoint.pt")
    assert run("--resume", "out", "--n_epochs", 1, "--overwrite", "True")[0] == 0
    assert run("--evaluate", "out")[1].splitlines()[-1] == last
    code, _, err = run("--resume", "out", "--batch_size", batch + 1)
    assert code == 2 and f"--batch_size {batch + 1}: the run in out has {batch}" in err
    code, _, err = run("--resume", "out", "--efficient", "naive")
    assert code == 2 and "--efficient naive: the run in out has fused" in err


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler
def test_compile(run, monkeypatch):
    """The model goes through torch's compiler, and trains as without it."""
    compiled, compile = [], torch.compile

    def without_machine_code(model):  # which takes a minute
        compiled.append(compile(model, backend="eager"))
        return compiled[-1]

    monkeypatch.setattr(torch, "compile", without_machine_code)
    flags = [*SMALL, "--n_epochs", 1, "--max_steps", 3]
    assert run(*flags, "--save", "plain")[0] == 0 and not compiled
    assert run(*flags, "--save", "out", "--compile", "True")[0] == 0
    assert [type(model._orig_mod) for model in compiled] == [efficient_densenet.DenseNet]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for name, tensor in weights("plain").items():
        torch.testing.assert_close(weights("out")[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


# Stopping, going on, testing

LONG = [*SMALL, "--n_epochs", 3, "--max_steps", 3, "--drop_rate", 0.2, "--ema_decay", 0.8]


def assert_same_run(mine, theirs):
    """Equal weights, bit by bit, and equal rows but for speed and memory."""
    first, second = weights(mine), weights(theirs)
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    for row, other in zip(rows(mine), rows(theirs), strict=True):
        for name in set(log.COLUMNS) - {"images_per_s", "peak_mib"}:
            assert row[name] == other[name], name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of three epochs that nothing disturbed."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "out"
    assert _start(*LONG, "--save", folder) == 0
    return folder


def _start(*flags):
    sys.argv = ["demo.py", *map(str, flags)]
    return demo.main()


def _killed_after(steps, *flags):
    """Trains in this process, until it is killed in the step after so many."""
    taken, sgd = [], torch.optim.SGD.step

    def step(self, *args, **kwargs):
        taken.append(1)
        if len(taken) > steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return sgd(self, *args, **kwargs)

    torch.optim.SGD.step = step
    return _start(*flags)


def forked(function, *arguments):
    """Runs a function in a child process; gives the exit code, negative for a signal."""

    def child():
        torch.set_num_threads(1)
        sys.exit(function(*arguments))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.parametrize("steps, every", [(1, 1), (4, None), (5, 2), (8, 2)])
def test_a_killed_run_goes_on_bit_by_bit(run, uninterrupted, steps, every):
    flags = [*LONG, "--save", "out"] + ([] if every is None else ["--save_every_steps", every])
    assert forked(_killed_after, steps, *flags) == -signal.SIGKILL
    code, out, err = run("--resume", "out", "--num_workers", 1)
    assert (code, err) == (0, "")
    done = steps if every == 1 else steps // 3 * 3 + (steps % 3 // every * every if every else 0)
    assert f"goes on after {done // 3} epochs and {done % 3} steps" in out
    assert_same_run("out", uninterrupted)


@pytest.mark.parametrize("name, times", [("model.dat", 0), ("results.csv", 1), ("checkpoint.pt", 1)])
def test_a_run_killed_while_it_writes_goes_on(run, uninterrupted, name, times):
    written = []

    def write(path, content, whole=log.replace_file):
        if path == f"out/{name}":
            written.append(path)
            if len(written) > times:
                Path(f"{path}.tmp").write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
        whole(path, content)

    def killed():
        log.replace_file = write
        return _start(*LONG, "--save", "out")

    assert forked(killed) == -signal.SIGKILL
    assert os.path.exists(f"out/{name}.tmp")
    assert run("--resume", "out")[0] == 0
    assert_same_run("out", uninterrupted)
    assert not any(left.endswith(".tmp") for left in os.listdir("out"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_stop_says_how_it_goes_on(run, monkeypatch, uninterrupted, number):
    taken, sgd, handler = [], torch.optim.SGD.step, signal.getsignal(number)

    def step(self, *args, **kwargs):
        taken.append(1)
        if len(taken) == 5:
            os.kill(os.getpid(), number)
        return sgd(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", step)
        code, _, err = run(*LONG, "--save", "out", "--num_workers", 1)
    assert code == 128 + number
    assert err == f"demo.py: stopped by {number.name} in epoch 2/3 after step 2; go on with --resume out\n"
    assert signal.getsignal(number) == handler and multiprocessing.active_children() == []
    assert "goes on after 1 epochs and 2 steps" in run("--resume", "out/checkpoint.pt")[1]
    assert_same_run("out", uninterrupted)


def test_a_finished_run_is_extended(run, uninterrupted):
    flags = [*LONG, "--schedule", "cosine", "--save", "out"]
    assert run(*flags, "--n_epochs", 1)[0] == 0
    assert run(*flags, "--resume", "True", "--n_epochs", 2)[0] == 0
    assert [row["epoch"] for row in rows("out")] == ["1", "2", ""]
    assert json.loads(Path("out/config.json").read_text())["n_epochs"] == 2
    before = rows("out")
    assert run("--resume", "out")[0] == 0
    assert rows("out") == before
    code, _, err = run("--resume", "out", "--n_epochs", 1)
    assert code == 2 and "--n_epochs 1: the run in out is at 2 already" in err


def test_without_a_checkpoint_a_run_starts(run, uninterrupted):
    code, out, _ = run(*LONG, "--save", "out", "--resume", "True")
    assert code == 0 and "no checkpoint yet: from the start" in out
    assert_same_run("out", uninterrupted)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--resume RUN --lr 0.2", "--lr 0.2: the run in RUN has 0.1, and it goes on as it was"),
        ("--resume RUN --seed 4", "--seed 4: the run in RUN has 3"),
        ("--resume RUN --efficient naive", "--efficient naive: the run in RUN has True"),
        ("--resume RUN --save elsewhere", "goes on in RUN, not in --save elsewhere"),
        ("--resume True", "--resume True: which run?"),
        ("--resume RUN --evaluate RUN", "--evaluate does not go with --resume"),
        ("--evaluate nowhere", "--evaluate nowhere: there is no file nowhere"),
        ("--evaluate RUN --depth 16", "does not fit this model: missing features.denseblock1.denselayer2.norm1.weight"),
        ("--evaluate RUN/results.csv", "cannot read RUN/results.csv"),
    ],
)
def test_mistakes_about_runs(run, uninterrupted, flags, words):
    before = {path.name: path.read_bytes() for path in uninterrupted.iterdir()}
    code, _, err = run(*SMALL[6:8], *flags.replace("RUN", str(uninterrupted)).split())
    assert code == 2 and err.count("\n") == 1 and words.replace("RUN", str(uninterrupted)) in err
    assert {path.name: path.read_bytes() for path in uninterrupted.iterdir()} == before and os.listdir() == []


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda: os.remove("out/model.dat"), "--resume: out/model.dat, the best weights so far, is missing"),
        (lambda: os.remove("out/checkpoint.pt"), "--resume: out/checkpoint.pt is missing, yet there are results"),
        (lambda: torch.save({"model": {}}, "out/checkpoint.pt"), "out/checkpoint.pt is not the checkpoint of a run"),
        (lambda: os.truncate("out/checkpoint.pt", 9999), "cannot read out/checkpoint.pt: it is damaged, or no file of"),
    ],
)
def test_what_a_run_lacks_is_said_before_it_goes_on(run, uninterrupted, spoil, words):
    shutil.copytree(uninterrupted, "out")
    spoil()
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    code, out, err = run("--resume", "out", "--n_epochs", 4)
    assert (code, out) == (2, "") and err.count("\n") == 1 and words in err
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before


# Distillation

STUDENT = [*SMALL[:4], "--growth_rate", 2, *SMALL[6:], "--n_epochs", 2, "--max_steps", 3]


def test_a_student_learns_from_a_run_and_goes_on_bit_by_bit(run, uninterrupted):
    """Kills: a teacher that draws from the student's random numbers, is trained, or is forgotten by a restart."""
    told = ["--teacher", uninterrupted, "--distill_temperature", 2]
    code, out, err = run(*STUDENT, *told, "--save", "out")
    assert (code, err) == (0, "")
    assert (
        f"teacher: densenet_bc (depth 10, growth rate 4) in {uninterrupted}/model.dat; "
        "0.5 of the loss is for its probabilities at temperature 2\n"
    ) in out
    facts = json.loads(Path("out/config.json").read_text())["teacher_facts"]
    assert (facts["depth"], facts["growth_rate"], facts["dataset"]) == (10, 4, "digits") and len(facts["sha256"]) == 64

    assert forked(_killed_after, 4, *STUDENT, *told, "--save", "again", "--save_every_steps", 1) == -signal.SIGKILL
    assert run("--resume", "again")[0] == 0
    assert_same_run("again", "out")
    assert run("--evaluate", "out")[1].splitlines()[-1] == out.splitlines()[-1]

    assert run(*STUDENT, "--save", "alone")[0] == run(*STUDENT, *told, "--distill_alpha", 0, "--save", "deaf")[0] == 0
    assert_same_run("deaf", "alone")
    assert any(not torch.equal(weights("out")[name], value) for name, value in weights("alone").items())


def test_a_teacher_that_cannot_teach_is_named(run, uninterrupted):
    shutil.copytree(uninterrupted, "teacher")
    flags = [*STUDENT, "--teacher", "teacher"]
    assert run(*flags, "--distill", "hard", "--save", "out")[0] == 0
    code, _, err = run(*flags, "--save", "teacher", "--overwrite", "True")
    assert code == 2 and "--teacher teacher: lies in --save teacher" in err
    model = torch.load("teacher/model.dat")
    torch.save({name: 2 * value for name, value in model.items()}, "teacher/model.dat")
    code, _, err = run("--resume", "out", "--n_epochs", 3)
    assert code == 2 and "--resume: the file of --teacher teacher is not the one the run began with" in err
    settings = json.loads(Path("teacher/config.json").read_text())
    for change, words in (
        ({"dataset": "svhn"}, "--teacher teacher/model.dat: trained on svhn, and this run is on digits"),
        ({"images": {"classes": ["cat", "dog"]}}, "its 2 classes (cat, dog) are not the 10 of these images (0, 1, 2, …)"),
        ({"depth": 16}, "--teacher teacher/model.dat: does not fit this model: missing features.denseblock1.denselayer2"),
    ):
        Path("teacher/config.json").write_text(json.dumps(settings | change))
        code, _, err = run(*flags, "--save", "new")
        assert code == 2 and words in err and not os.path.exists("new"), err
    os.rename("teacher/model.dat", "alone.pth")
    code, _, err = run(*STUDENT, "--teacher", "alone.pth", "--save", "new")
    assert code == 2 and "no config.json beside it says which network it is; add e.g. --teacher_model densenet121" in err
    code, _, err = run(*STUDENT, "--teacher", "alone.pth", "--teacher_model", "densenet121", "--save", "new")
    assert code == 2 and "--teacher alone.pth: does not fit this model: missing " in err and not os.path.exists("new")


def test_a_saved_model_is_tested(run, uninterrupted):
    last = f"test error: {float(rows(uninterrupted)[-1]['test_error']):.4f}\n"
    for path in (uninterrupted, uninterrupted / "model.dat"):
        code, out, err = run("--evaluate", path)
        assert (code, err) == (0, "") and out.endswith(last)
    assert run("--evaluate", uninterrupted / "checkpoint.pt")[0] == 0  # the last weights, perhaps not the best
    other = {f"module.{name}": tensor for name, tensor in weights(uninterrupted).items()}
    torch.save({"state_dict": other}, "other.pt")
    assert run(*SMALL, "--evaluate", "other.pt")[1].endswith(last)
    assert os.listdir() == ["other.pt"]


def test_the_readme_predicts_with_what_a_run_left(uninterrupted, capsys):
    """The README's block, with this run's file and depth."""
    text = (DEMO.parent / "README.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    (block,) = (block for block in blocks if "model.dat" in block)
    for theirs, mine in (
        ('"results/first/model.dat"', repr(str(uninterrupted / "model.dat"))),
        ("depth=100, growth_rate=12", "depth=10, growth_rate=4"),
    ):
        assert block.count(theirs) == 1
        block = block.replace(theirs, mine)
    exec(compile(block, "README.md", "exec"), {})
    assert int(capsys.readouterr().out) in range(10)


# Faults


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(run):
    assert run(*SMALL, "--n_epochs", 1, "--max_steps", 1, "--save", "out")[0] == 0
    before = Path("out/checkpoint.pt").read_bytes()
    code, _, err = run("--resume", "out", "--n_epochs", 2, "--max_steps", 1)
    assert code == 0
    code, _, err = run(*SMALL, "--lr", 1e30, "--n_epochs", 1, "--save", "bad")
    assert code == 1 and err.count("\n") == 1 and "not finite in epoch 1, by step 50; there is no checkpoint yet" in err
    assert sorted(os.listdir("bad")) == ["config.json"] and before


def test_a_full_disk_is_said_and_leaves_the_last_checkpoint(run):
    assert run(*LONG, "--n_epochs", 1, "--save", "out")[0] == 0
    before = Path("out/checkpoint.pt").read_bytes()

    def small_disk():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        return _start("--resume", "out", "--n_epochs", 2)

    assert forked(small_disk) == 1
    assert Path("out/checkpoint.pt").read_bytes() == before and not list(Path("out").glob("*.tmp"))
    assert run("--resume", "out", "--n_epochs", 2)[0] == 0


def test_an_output_that_nobody_reads_is_said(tmp_path, capfd):
    def unread(*flags):
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        sys.stdout = open(1, "w", closefd=False)
        return _start(*flags)

    assert forked(unread, *SMALL, "--n_epochs", 1, "--max_steps", 1, "--save", tmp_path / "out") == 1
    assert capfd.readouterr().err == "demo.py: error: cannot write to standard output: Broken pipe\n"


def test_a_worker_that_is_killed_is_said(run, monkeypatch):
    get = data.Images.__getitem__

    def dies(self, key):
        if multiprocessing.parent_process() is not None and self.indices[key[0]] == 600:
            os.kill(os.getpid(), signal.SIGKILL)
        return get(self, key)

    monkeypatch.setattr(data.Images, "__getitem__", dies)
    code, _, err = run(*SMALL, "--num_workers", 1, "--valid_size", 0, "--n_epochs", 1, "--save", "out")
    assert code == 1 and err.count("\n") == 1 and "a process that loads images has died" in err


@pytest.mark.parametrize(
    "cause, words",
    [
        (OSError(24, "Too many open files"), "[Errno 24] Too many open files (a larger ulimit -n or fewer --num_"),
        (RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"),
         "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28) (more shared"),
        (MemoryError(), "MemoryError (fewer --num_workers"),
    ],
)  # fmt: skip
def test_what_a_worker_died_of_is_said(run, monkeypatch, cause, words):
    """Kills: a guess about memory in place of the cause."""

    def fails(self, key):
        raise cause

    monkeypatch.setattr(data._Arrays, "__getitem__", fails)
    monkeypatch.setattr(data, "_look", lambda *_: ((32, 32), None))
    code, _, err = run(*SMALL, "--num_workers", 1, "--n_epochs", 1, "--save", "out")
    assert code == 1 and err.count("\n") == 1
    assert err.startswith("demo.py: error: a process that loads images has died: ") and words in err


def _with_open_files(soft, hard, *flags):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return _start(*flags)


def test_too_few_open_files_are_said_before_any_work(tmp_path, capfd):
    """Kills: workers that cannot be talked to, about which torch says much, or nothing for ever."""
    flags = [*SMALL, "--num_workers", 9, "--n_epochs", 1, "--max_steps", 1, "--save", tmp_path / "out"]
    used = len(os.listdir("/dev/fd"))
    assert forked(_with_open_files, used + 50, used + 50, *flags) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and not (tmp_path / "out").exists()
    assert re.search(rf"--num_workers 9: takes about \d+ open files, the limit is {used + 50}; a larger ulimit -n", err)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert forked(_with_open_files, used + 20, hard, *flags, "--num_workers", 2) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["features.norm5.running_var", "classifier.weight"])
def test_weights_that_are_not_finite_are_not_tested(run, uninterrupted, monkeypatch, name):
    state = weights(uninterrupted)
    state[name].view(-1)[1] = float("nan")
    state["features.norm5.bias"][0] = float("inf")
    torch.save(state, "broken.pt")
    code, out, err = run(*SMALL, "--evaluate", "broken.pt")
    first = min(name, "features.norm5.bias", key=list(state).index)
    said = f"values that are not finite in {first} and 1 more of its {len(state)} tensors"
    assert (code, out) == (2, "") and err.startswith(f"demo.py: error: --evaluate broken.pt: {said}, so that its outputs")

    shutil.copytree(uninterrupted, "out")
    os.replace("broken.pt", "out/model.dat")
    code, out, err = run("--resume", "out")
    assert code == 1 and "test error" not in out and err == f"demo.py: error: out/model.dat cannot be tested: {said}\n"


def test_outputs_that_are_not_finite_are_said(run, uninterrupted):
    """Finite weights, too large for the sums. Kills: a test error that is chance, without a word."""
    state = weights(uninterrupted)
    state["classifier.weight"].fill_(1e38)
    state["features.norm5.weight"].fill_(1e38)
    torch.save(state, "large.pt")
    code, out, _ = run(*SMALL, "--evaluate", "large.pt")
    assert code == 0 and "not finite" in out.splitlines()[-2] and out.splitlines()[-1].startswith("test error: ")


# Several processes


def _two_ranks(folder, stop_in_step, *flags):
    if stop_in_step:
        taken, sgd = [], torch.optim.SGD.step

        def step(self, *args, **kwargs):
            taken.append(1)
            if len(taken) == stop_in_step and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            return sgd(self, *args, **kwargs)

        torch.optim.SGD.step = step
    os.chdir(folder)
    return _start(*flags)


def test_all_ranks_stop_in_one_step_and_go_on_bit_by_bit(tmp_path, capfd):
    assert on_ranks(2, tmp_path / "ranks", _two_ranks, tmp_path, None, *LONG, "--save", "whole") == [0, 0]
    assert on_ranks(2, tmp_path / "ranks", _two_ranks, tmp_path, 5, *LONG, "--save", "out") == [143, 143]
    assert capfd.readouterr().err.count("stopped by SIGTERM in epoch 2/3 after step 2; go on with --resume out") == 1
    assert on_ranks(2, tmp_path / "ranks", _two_ranks, tmp_path, None, "--resume", "out") == [0, 0]
    assert_same_run(tmp_path / "out", tmp_path / "whole")
    assert on_ranks(3, tmp_path / "ranks", _two_ranks, tmp_path, None, "--resume", "out") == [2, 2, 2]
    assert "--resume: the run had other processes (2) than there are now (3)" in capfd.readouterr().err


def environment():
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::FutureWarning,ignore:You are using:FutureWarning"}


def test_torchrun_starts_again_from_the_checkpoint(tmp_path):
    """Two processes under torchrun, one of which dies: the second start goes on, in the same folder, without a flag."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    flags = [*LONG, "--n_epochs", "2", "--max_steps", "4"]
    fault = """
import os, runpy, signal, sys, torch
steps, sgd = [], torch.optim.SGD.step
def step(self, *args, **kwargs):
    steps.append(1)
    if len(steps) == 6 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return sgd(self, *args, **kwargs)
torch.optim.SGD.step = step
sys.argv[0] = DEMO
runpy.run_path(DEMO, run_name="__main__")
"""
    (tmp_path / "faulty.py").write_text(fault.replace("DEMO", repr(str(DEMO))))
    done = subprocess.run(
        [*command, "faulty.py", *map(str, flags)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 CPU processes x 16 = 32 images per step, lr 0.2 after 5 warm-up epochs") == 2
    assert done.stdout.count("goes on after 1 epochs and 0 steps") == 1 and done.stdout.count("test error: ") == 1
    (folder,) = (tmp_path / "results").iterdir()
    assert json.loads((folder / "config.json").read_text())["world_size"] == 2
    assert on_ranks(2, tmp_path / "ranks", _two_ranks, tmp_path, None, *flags, "--save", "whole") == [0, 0]
    assert_same_run(folder, tmp_path / "whole")


def test_ranks_share_a_choice_and_synchronised_statistics(tmp_path, capfd):
    flags = [*SMALL, "--n_epochs", 1, "--max_steps", 2]
    assert on_ranks(2, tmp_path / "ranks", _two_ranks, tmp_path, None, *flags, "--save", "local") == [0, 0]
    flags += ["--sync_bn", "True", "--memory_budget", "10MiB", "--batch_size", "auto", "--save", "out"]
    assert on_ranks(2, tmp_path / "ranks", _two_ranks, tmp_path, None, *flags) == [0, 0]
    out, err = capfd.readouterr()
    assert out.count("memory: ") == 1 and err == ""
    batch = json.loads((tmp_path / "out/config.json").read_text())["batch_size"]
    assert f"2 CPU processes x {batch} = {2 * batch} images per step" in out and batch > 4
    assert list(weights(tmp_path / "out")) == list(weights(tmp_path / "local"))


def test_two_machines_train_together(tmp_path):
    """Two launchers that find each other on the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d",
               f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=test", "--local_addr=127.0.0.1", str(DEMO)]  # fmt: skip
    flags = [*SMALL, "--n_epochs", 1, "--max_steps", 2, "--save", "out"]
    launchers = [
        subprocess.Popen(
            [*command, *map(str, flags)],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        outputs = [launcher.communicate(timeout=240) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    out = "".join(out for out, _ in outputs)
    assert out.count("2 CPU processes x 16 = 32 images per step, lr 0.2") == out.count("test error: ") == 1
    assert os.listdir(tmp_path) == ["out"] and rows(tmp_path / "out")[-1]["test_error"]
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert settings["world_size"] == 2


def _mistaken(folder):
    os.chdir(folder)
    sys.argv = ["demo.py", "--dataset", "imagefolder", "--data", "nowhere"]
    return demo.main()


def test_a_mistake_is_shown_by_one_rank(tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    assert on_ranks(3, tmp_path / "ranks", _mistaken, tmp_path / "empty") == [2, 2, 2]
    assert capfd.readouterr().err.count("demo.py: error: --data nowhere: there is no folder train/") == 1
    assert os.listdir(tmp_path / "empty") == []

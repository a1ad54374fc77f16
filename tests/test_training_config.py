"""The command line: what is given arrives in the right type, what is wrong is refused in one line."""

import dataclasses

import pytest

from efficient_densenet.training.config import FASHION_FILES, Config, UsageError, bytes_of, dataset_in, parse_flags


def test_no_flags_give_the_papers_recipe():
    config, given = parse_flags([])
    assert (config.depth, config.growth_rate, config.compression, config.drop_rate) == (100, 12, 0.5, 0.0)
    assert (config.n_epochs, config.batch_size, config.lr, config.wd, config.momentum) == (300, 64, 0.1, 1e-4, 0.9)
    assert config == Config() and not given
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0


@pytest.mark.parametrize(
    "flags, name, value",
    [
        (["--depth", "40"], "depth", 40),
        (["--batch-size=8"], "batch_size", 8),
        (["--lr", "1"], "lr", 1.0),
        (["--data", "2024"], "data", "2024"),
        (["--save=1_0"], "save", "1_0"),
        (["--save", "a folder"], "save", "a folder"),
        (["--efficient", "False"], "efficient", False),
        (["--efficient=checkpoint"], "efficient", "checkpoint"),
        (["--overwrite"], "overwrite", True),
        (["--resume"], "resume", True),
        (["--resume", "True"], "resume", True),
        (["--resume", "2024"], "resume", "2024"),
        (["--noprogress"], "progress", False),
        (["--seed", "None"], "seed", None),
        (["--valid_size", "0"], "valid_size", 0),
        (["--batch_size", "auto"], "batch_size", "auto"),
        (["--memory_budget", "8GiB"], "memory_budget", "8GiB"),
        (["--memory_budget=1000000"], "memory_budget", "1000000"),
        (["--efficient", "false"], "efficient", False),
        (["--efficient=TRUE"], "efficient", True),
        (["--efficient", "Lean"], "efficient", "lean"),
        (["--amp", "BF16"], "amp", "bf16"),
        (["--dataset", "CIFAR10"], "dataset", "cifar10"),
        (["--model", "DenseNet121"], "model", "densenet121"),
        (["--model", "NONE"], "model", None),
        (["--schedule", "Cosine"], "schedule", "cosine"),
        (["--lr_scaling", "None"], "lr_scaling", "none"),
        (["--parallel", "None"], "parallel", "none"),
        (["--device", "CUDA:1"], "device", "cuda:1"),
        (["--batch_size", "AUTO"], "batch_size", "auto"),
        (["--memory_budget", "8gib"], "memory_budget", "8GiB"),
        (["--overwrite", "true"], "overwrite", True),
        (["--progress", "none"], "progress", None),
        (["--resume", "true"], "resume", True),
        (["--seed", "none"], "seed", None),
        (["--save", "Results"], "save", "Results"),
        (["--image_max", "4095"], "image_max", 4095.0),
    ],
)
def test_values_arrive_as_typed(flags, name, value):
    config, given = parse_flags(flags)
    got = getattr(config, name)
    assert got == value and type(got) is type(value) and name in given


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--effcient", "True"], "unknown flag --effcient, did you mean --efficient"),
        (["--nonsense=1"], "unknown flag --nonsense"),
        (["--depth", "deep"], "--depth deep: expected a whole number"),
        (["--depth"], "--depth True: expected a whole number"),
        (["--depth=40.5"], "--depth 40.5: expected a whole number"),
        (["--overwrite", "treu"], "--overwrite treu: expected True or False"),
        (["--amp"], "--amp needs a value"),
        (["--amp", "fp8"], "--amp fp8: expected one of off, bf16, fp16"),
        (["--ema_decay", "1"], "--ema_decay 1.0: must be at least 0 and below 1"),
        (["--lr", "-0.1"], "--lr -0.1: must be above 0"),
        (["--lr=1e999"], "--lr inf: expected a finite number"),
        (["--drop_rate", "1"], "--drop_rate 1.0: must be at least 0 and below 1"),
        (["--n_epochs=0"], "--n_epochs 0: must be at least 1"),
        (["--dataset", "mnist"], "--dataset mnist: expected one of auto, cifar10"),
        (["--model", "resnet50"], "--model resnet50: expected one of densenet121"),
        (["--model=densenet121", "--depth=40"], "--depth does not go with --model densenet121"),
        (["--model", "resnet50", "--depth", "40"], "--model resnet50: expected one of densenet121"),
        (["--save"], "--save needs a value"),
        (["--save", ""], "--save needs a value"),
        (["--data="], "--data needs a value"),
        (["--batch_size", "all"], "--batch_size all: expected a whole number or auto"),
        (["--batch_size", "2.5"], "--batch_size 2.5: expected a whole number or auto"),
        (["--batch_size=-2"], "--batch_size -2: must be at least 1"),
        (["--batch_size"], "--batch_size needs a value"),
        (["--memory_budget", "8GB"], "--memory_budget 8GB: expected bytes, or e.g. 8GiB or 500MiB"),
        (["--memory_budget", "0MiB"], "--memory_budget 0MiB: expected bytes"),
        (["--tensorboard", "yes"], "--tensorboard yes: expected True or False"),
        (["--progress", "1"], "--progress 1: expected True or False or None"),
        (["--max_steps", "0"], "--max_steps 0: must be at least 1"),
        (["--seed", "1e3"], "--seed 1e3: expected a whole number or None"),
        (["--n_epochs", "3", "--warmup_epochs", "4"], "--warmup_epochs 4: the run has 3 epochs"),
        (["--data", "--save=x"], "--data needs a value"),
        (["train"], "unexpected argument 'train'"),
        (["depth"], "unexpected argument 'depth'"),
        (["--", "--typo"], "unexpected argument '--'"),
        (["--d=1"], "ambiguous"),
        (["--efficient", "fussed"], "--efficient fussed: expected True or False or naive or checkpoint or fused"),
        (["--device", "tpu"], "--device tpu: expected one of auto, cpu, cuda, cuda:N"),
        (["--image_max", "0"], "--image_max 0.0: must be above 0"),
        (["--save", "~nobody-of-this-name/out"], "--save ~nobody-of-this-name/out: there is no home folder"),
    ],
)
def test_mistakes_are_named_in_one_line(flags, words, capsys):
    with pytest.raises(UsageError) as caught:
        parse_flags(flags)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_settings_in_python_are_words_in_any_case_too():
    """Kills: capitals that the command line alone understands, and config.json in them."""
    assert Config(amp="BF16", efficient="FALSE") == Config(amp="bf16", efficient=False)


def test_a_path_may_begin_at_home(monkeypatch, tmp_path):
    """Kills: a folder of the name ``~``; a path flag that was forgotten."""
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = [field.name for field in dataclasses.fields(Config) if field.metadata["path"]]
    assert paths == ["data", "save", "resume", "evaluate", "teacher"]
    for name in paths:
        assert getattr(parse_flags([f"--{name}=~/a folder"])[0], name) == f"{tmp_path}/a folder"
        assert getattr(parse_flags([f"--{name}", "a~"])[0], name) == "a~"


def test_a_named_folder_is_not_exchanged_for_digits():
    assert parse_flags([])[0].dataset == "auto"
    assert parse_flags(["--data", "there"])[0].dataset == "cifar10"
    assert parse_flags(["--data", "there", "--dataset", "svhn"])[0].dataset == "svhn"


@pytest.mark.parametrize(
    "files, name",
    [
        (["train/a/0.png", "test/a/0.png"], "imagefolder"),
        (["train/a/0.png", "val/a/0.png"], "imagefolder"),
        (["train/a/0.png"], "imagefolder"),  # which says that it needs a test/
        (["train/a/0.png", "test/a/0.png", "cifar-10-python.tar.gz"], "cifar10"),
        (["cifar-100-python/train"], "cifar100"),
        (["train_32x32.mat", "test_32x32.mat"], "svhn"),
        ([f"{name}-ubyte.gz" for name in FASHION_FILES], "fashion_mnist"),
        ([f"{name}-ubyte.gz" for name in FASHION_FILES[:3]], "cifar10"),  # to be downloaded
        (["FashionMNIST/raw/train-images-idx3-ubyte"], "fashion_mnist"),
        (["cats/0.PNG", "dogs/0.PNG"], "imagefolder"),  # which says that it needs a train/
        (["train", "test", "meta"], "cifar10"),  # no folders: the inside of another data set
        (["notes/today.txt", "0.png"], "cifar10"),
    ],
)
def test_a_folder_is_taken_for_what_it_holds(tmp_path, files, name):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    for flags in ([], ["--dataset", "Auto"]):
        config, given = parse_flags(["--data", str(tmp_path), *flags])
        assert config.dataset == name and given == {"data", *(["dataset"] if flags else [])}
    assert dataset_in(str(tmp_path), name) == name
    assert parse_flags(["--data", str(tmp_path), "--dataset", "svhn"])[0].dataset == "svhn"


@pytest.mark.parametrize(
    "text, bytes_",
    [("8GiB", 8 * 2**30), ("1.5GiB", 3 * 2**29), ("500 MiB", 500 * 2**20), ("3KiB", 3072), ("1TiB", 2**40), ("77", 77)],
)
def test_sizes(text, bytes_):
    assert bytes_of(text) == bytes_
    assert bytes_of(f"{text}b") is bytes_of("GiB") is bytes_of("-1") is bytes_of("1.5") is None


def test_help_shows_every_flag_with_its_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_flags(["--help"])
    assert caught.value.code == 0
    text, rest = capsys.readouterr()
    assert not rest and text.startswith("NAME\n    demo.py - Train a DenseNet")
    for field in dataclasses.fields(Config):
        shown = text.partition(f"--{field.name}=")[2].split("\n    -")[0].splitlines()
        assert shown[2].strip() == f"Default: {field.default!r}" and len(shown[3].strip()) > 10, field.name
    assert "VALUES" not in text and "GROUPS" not in text

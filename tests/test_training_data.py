"""Data sets: which is used and why, how they are split, and that every image is counted as often as it should be."""

import gzip
import multiprocessing
import os
import pickle
import shutil
import socket
import time
from collections import Counter

import numpy
import pytest
import torch
from PIL import Image
from torchvision import datasets

from efficient_densenet.training import data
from efficient_densenet.training.config import Config, RunError, UsageError
from efficient_densenet.training.distributed import World

ALONE = World()
# Python 3.12 and later warn of every fork; the processes forked here use one thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def load(seed=0, world=ALONE, **flags):
    return data.load(Config(num_workers=0, **flags), world, seed)


@pytest.fixture
def folders(tmp_path):
    """Class folders of 8x8 images, grey level by class: 4 for training and 2 for the test in each of 3 classes."""
    for part, count in (("train", 4), ("test", 2)):
        for label, name in enumerate("abc"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (100 * label, 10 * i, 0)).save(tmp_path / part / name / f"{i}.png")
    return tmp_path


def cifar(folder, monkeypatch, images=20):
    """A CIFAR-10 of noise in the published file format; torchvision's checksums are of other images."""
    monkeypatch.setattr(
        datasets.CIFAR10, "_check_integrity", lambda self: os.path.isdir(f"{self.root}/{self.base_folder}")
    )
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: True)
    (folder / "cifar-10-batches-py").mkdir(parents=True)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        pixels = numpy.random.default_rng(0).integers(0, 256, (images, 3072), dtype="uint8")
        content = {"data": pixels, "labels": [i % 10 for i in range(images)]}
        (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(content))
    (folder / "cifar-10-batches-py/batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))


def offline(monkeypatch):
    monkeypatch.setattr(data, "_unreachable", lambda url: "no network")


# Which data set


def test_digits_are_real_images_with_a_test_split_that_no_seed_moves():
    one, other = load(seed=1, dataset="digits"), load(seed=2, dataset="digits")
    assert (len(one.train), len(one.valid), len(one.test)) == (1294, 143, 360)
    assert one.num_classes == 10 and one.in_channels == 3
    image, label = one.test[0]
    assert image.shape == (3, 32, 32) and label == 0
    for i in (0, 100, 359):
        assert torch.equal(one.test[i][0], other.test[i][0])
    assert set(one.train.indices) | set(one.valid.indices) == set(range(1437))
    assert not set(one.train.indices) & set(one.valid.indices)
    assert one.valid.indices != other.valid.indices
    pixels = torch.stack([one.test[i][0] for i in range(360)])
    assert abs(pixels.mean()) < 0.05 and abs(pixels.std() - 1) < 0.05


def test_auto_takes_cifar10_where_it_is(tmp_path, monkeypatch):
    cifar(tmp_path, monkeypatch)
    found = load(dataset="auto", data=str(tmp_path))
    assert found.facts["name"] == "cifar10" and found.facts["note"] is None
    assert (len(found.train), len(found.valid), len(found.test)) == (90, 10, 20)


def test_auto_falls_back_on_digits_and_says_why(tmp_path, monkeypatch):
    offline(monkeypatch)
    found = load(dataset="auto", data=str(tmp_path / "data"))
    assert found.facts["name"] == "digits" and "not downloaded (no network)" in found.facts["note"]
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name, file", [("cifar10", "cifar-10-python.tar.gz"), ("cifar100", "cifar-100-python.tar.gz"),
                                        ("svhn", "train_32x32.mat"), ("fashion_mnist", ".gz files")])  # fmt: skip
def test_what_cannot_be_had_is_said_with_what_to_do(name, file, tmp_path, monkeypatch):
    offline(monkeypatch)
    with pytest.raises(UsageError, match=f"--dataset {name}: not in .*nowhere.*no network.*offline, put .*{file}"):
        load(dataset=name, data=str(tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_never_answers_is_not_waited_for(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(data, "CONNECT_SECONDS", 0.3)
        began = time.monotonic()
        found = load(dataset="auto", data=str(tmp_path))
        assert found.facts["name"] == "digits" and time.monotonic() - began < 5


def test_a_download_that_breaks_off_is_an_error_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_unreachable", lambda url: None)

    def breaks(self):
        assert socket.getdefaulttimeout() == data.CONNECT_SECONDS
        raise ConnectionResetError("connection reset by peer")

    monkeypatch.setattr(datasets.CIFAR10, "download", breaks)
    with pytest.raises(UsageError, match="connection reset by peer"):
        load(dataset="cifar10", data=str(tmp_path))
    assert socket.getdefaulttimeout() is None


def test_fashion_mnist_from_its_four_files(tmp_path):
    rng = numpy.random.default_rng(0)
    for part, count in (("train", 30), ("t10k", 10)):
        pixels = rng.integers(0, 256, (count, 28, 28), dtype="uint8")
        labels = numpy.arange(count, dtype="uint8") % 10
        for kind, header, content in (("images-idx3", 16, pixels), ("labels-idx1", 8, labels)):
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(bytes(header) + content.tobytes()))
    found = load(dataset="fashion_mnist", data=str(tmp_path), valid_size=0)
    image, label = found.test[3]
    assert image.shape == (1, 28, 28) and label == 3 and found.in_channels == 1
    assert torch.allclose(image[0], (torch.tensor(pixels[3]) / 255 - 0.2860) / 0.3530)
    assert found.valid is None and len(found.train) == 30

    damaged = tmp_path / "t10k-images-idx3-ubyte.gz"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(UsageError, match="cannot read t10k-images-idx3-ubyte.gz"):
        load(dataset="fashion_mnist", data=str(tmp_path))


# Class folders


def test_class_folders(folders):
    found = load(dataset="imagefolder", data=str(folders), valid_size=2)
    assert (len(found.train), len(found.valid), len(found.test)) == (10, 2, 6)
    assert found.facts["classes"] == ["a", "b", "c"] and found.facts["image_size"] == [8, 8]
    image, label = found.test[4]
    assert label == 2 and torch.allclose(image[0], torch.tensor((200 / 255 - 0.485) / 0.229))
    (folders / "test").rename(folders / "val")
    assert len(load(dataset="imagefolder", data=str(folders)).test) == 6


@pytest.mark.parametrize("image_size, shape", [(4, (3, 4, 4)), (16, (3, 16, 16)), (144, (3, 144, 144))])
def test_image_size_resizes(folders, image_size, shape):
    Image.new("RGB", (8, 20)).save(folders / "train/a/tall.png")
    found = load(dataset="imagefolder", data=str(folders), image_size=image_size, valid_size=1)
    assert {found.train[i, 0][0].shape for i in range(len(found.train))} == {shape}
    assert found.valid[0][0].shape == found.test[0][0].shape == shape


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda folder: (folder / "test").rename(folder / "elsewhere"), "no folder test/"),
        (lambda folder: (folder / "train").rename(folder / "elsewhere"), "no folder train/"),
        (lambda folder: (folder / "test/c").rename(folder / "test/d"), "class 'c' is not in both"),
        (lambda folder: [file.unlink() for file in (folder / "train/b").iterdir()], "no image in the class folder .*/b "),
        (lambda folder: [shutil.rmtree(path) for name in "bc" for path in folder.glob(f"*/{name}")], "one class, 'a'"),
        (lambda folder: [shutil.rmtree(path) for path in folder.glob("train/*")], "there is no class folder in"),
    ],
)
def test_folders_that_do_not_fit_are_named(folders, spoil, words):
    spoil(folders)
    with pytest.raises(UsageError, match=words):
        load(dataset="imagefolder", data=str(folders))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named(folders, workers):
    Image.effect_noise((8, 8), 50).save(folders / "test/b/1.png")
    whole = (folders / "test/b/1.png").read_bytes()
    (folders / "test/b/1.png").write_bytes(whole[:50] + bytes(30) + whole[80:])  # its header is right, and its end
    config = Config(dataset="imagefolder", data=str(folders), num_workers=workers)
    images = data.load(config, ALONE, 0).test
    batches = data.batches(images, data.EvalSampler(len(images), ALONE), config, ALONE)
    with pytest.raises(RunError, match="^cannot read the image .*test/b/1.png: [^\n]*$"), data.closing(batches):
        list(batches)
    assert multiprocessing.active_children() == []


def test_an_image_of_another_size_is_named(folders):
    Image.new("RGB", (9, 8)).save(folders / "test/b/1.png")
    words = r"--image_size: .*test/b/1.png has 9x8 pixels, the first image has 8x8; --image_size N"
    with pytest.raises(UsageError, match=words):
        load(dataset="imagefolder", data=str(folders))
    assert load(dataset="imagefolder", data=str(folders), image_size=8).test[3][0].shape == (3, 8, 8)
    (folders / "test/b/1.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match="cannot read the image .*test/b/1.png"):
        load(dataset="imagefolder", data=str(folders))


def test_hidden_files_and_folders_are_no_images_and_no_classes(folders):
    for part in ("train", "test"):
        (folders / part / "a/._0.png").write_bytes(b"left by a file system")
        (folders / part / ".cache").mkdir()
        Image.new("RGB", (8, 8)).save(folders / part / ".cache/0.png")
    found = load(dataset="imagefolder", data=str(folders), valid_size=0)
    assert found.num_classes == 3 and len(found.train) == 12 and len(found.test) == 6


def test_valid_size_leaves_images_to_train_on(folders):
    with pytest.raises(UsageError, match="--valid_size 12: imagefolder has 12 training images"):
        load(dataset="imagefolder", data=str(folders), valid_size=12)


# Augmentation


def test_augmentation_depends_on_its_seed_alone():
    train = load(dataset="digits").train
    state = torch.get_rng_state()
    views = [train[5, seed][0] for seed in range(20)]
    assert torch.equal(train[5, 3][0], views[3])
    assert len({view.numpy().tobytes() for view in views}) > 10
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "name, mirrored", [("cifar10", True), ("svhn", False), ("digits", False), ("imagefolder", True)]
)
def test_images_are_mirrored_where_that_keeps_their_class(name, mirrored):
    augment, prepare = data._transforms(None, (32, 32), (0.5,) * 3, (0.5,) * 3, data._FACTS[name][2])
    left = Image.new("RGB", (32, 32))
    left.paste((255, 255, 255), (0, 0, 16, 32))
    sides = set()
    for seed in range(20):
        torch.manual_seed(seed)
        view = augment(left)
        sides.add(bool(view[:, :, 8:12].mean() > view[:, :, 20:24].mean()))
    assert sides == ({True, False} if mirrored else {True})
    assert torch.equal(prepare(left), prepare(left))


# Shares of the ranks


@pytest.mark.parametrize("size, ranks", [(10, 1), (10, 3), (9, 3), (2, 5)])
def test_evaluation_counts_every_image_once(size, ranks):
    shares = [list(data.EvalSampler(size, World(rank=rank, size=ranks))) for rank in range(ranks)]
    assert sorted(sum(shares, [])) == list(range(size))
    assert [len(data.EvalSampler(size, World(rank=rank, size=ranks))) for rank in range(ranks)] == list(
        map(len, shares)
    )


@pytest.mark.parametrize("size, ranks", [(10, 1), (10, 3), (9, 3)])
def test_training_gives_the_ranks_equal_shares_of_all_images(size, ranks):
    samplers = [data.TrainSampler(size, World(rank=rank, size=ranks), Config(seed=0)) for rank in range(ranks)]
    shares = [[index for index, _ in sampler] for sampler in samplers]
    assert {sampler.note for sampler in samplers} == {""}
    assert {len(share) for share in shares} == {-(-size // ranks)}
    assert set(sum(shares, [])) == set(range(size)) and max(Counter(sum(shares, [])).values()) <= 2


@pytest.mark.parametrize(
    "size, ranks, gpus, batch, images",
    [(33, 1, 1, 16, 32), (34, 1, 1, 16, 34), (32, 1, 1, 16, 32), (97, 3, 1, 16, 32), (99, 3, 1, 16, 32),
     (100, 3, 1, 16, 34), (69, 1, 4, 16, 64), (72, 1, 4, 16, 72), (77, 1, 4, 16, 76), (65, 1, 4, 16, 64)],
)  # fmt: skip
def test_no_batch_is_left_with_a_single_image(size, ranks, gpus, batch, images):
    samplers = [
        data.TrainSampler(size, World(rank=rank, size=ranks, gpus=gpus), Config(seed=0, batch_size=batch), least=2)
        for rank in range(ranks)
    ]
    assert {len(list(sampler)) for sampler in samplers} == {images}
    for part in torch.arange(images).split(batch * gpus):  # as the loader, then DataParallel, divide them
        assert min(len(share) for share in part.chunk(gpus)) >= 2
    left = -(-size // ranks) - images
    said = f", {left} left over in an epoch: BatchNorm needs 2 in a batch here" if left else ""
    assert {sampler.note for sampler in samplers} == {said}


@pytest.mark.parametrize("size, batch", [(1, 16), (50, 1)])
def test_too_few_images_for_batch_norm_are_refused(size, batch):
    with pytest.raises(UsageError, match=f"--batch_size {batch}: too few images, BatchNorm needs 2 in a batch"):
        data.TrainSampler(size, ALONE, Config(seed=0, batch_size=batch), least=2)


def test_epochs_differ_in_order_and_augmentation_and_repeat():
    sampler = data.TrainSampler(50, ALONE, Config(seed=7))
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert [index for index, _ in first] != [index for index, _ in second]
    assert not set(first) & set(second)
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(1, first=20)
    assert list(sampler) == second[20:] and len(sampler) == 30


def test_a_limit_shortens_the_epoch():
    sampler = data.TrainSampler(50, ALONE, Config(seed=7, batch_size=5, accumulation_steps=2, max_steps=2))
    assert len(list(sampler)) == len(sampler) == sampler.images == 20 and sampler.per_step == 10

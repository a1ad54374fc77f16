"""The files of a run, and the memory of an epoch."""

import csv
import errno
import os

import numpy
import pytest
import torch
from torch import nn

from efficient_densenet.training import log
from efficient_densenet.training.config import Config, RunError, UsageError


def row(epoch, **values):
    return {name: float(epoch) for name in log.COLUMNS} | {"epoch": epoch, "test_error": None} | values


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "model.dat"
    log.replace_file(path, b"old")

    def breaks(file):
        file.write(b"half of the n")
        raise OSError("disk full")

    with pytest.raises(RunError, match="cannot write .*model.dat: disk full"):
        log.replace_file(path, breaks)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["model.dat"]
    log.replace_file(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["model.dat"]


@pytest.mark.parametrize("name", log.RESULTS)
def test_results_are_not_overwritten_unasked(tmp_path, name):
    (tmp_path / name).write_text("precious")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=f"--save .* holds results already .*{name}.*--overwrite True"):
        log.Results(Config(save=str(tmp_path)))
    assert (tmp_path / name).read_text() == "precious"
    log.Results(Config(save=str(tmp_path), overwrite=True)).begin({"lr": 0.1})
    assert sorted(os.listdir(tmp_path)) == ["config.json", "notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_with_other_files_will_do(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    log.Results(Config(save=str(tmp_path)))


def test_a_place_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/results"):
        with pytest.raises(UsageError, match="file is not a folder"):
            log.Results(Config(save=str(tmp_path / place)))


def test_a_read_only_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(log.os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(UsageError, match=f"no permission to write in {tmp_path}"):
        log.Results(Config(save=str(tmp_path / "a/b")))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_the_flags_fault(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="--save .*: File name too long"):
        log.Results(Config(save=str(tmp_path / "a" / ("b" * 300))))
    results = log.Results(Config(save=str(tmp_path / "a/b")))

    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(log.os, "makedirs", read_only)
    with pytest.raises(UsageError, match="--save .*a/b: cannot make this folder: Read-only file system"):
        results.begin({})
    assert os.listdir(tmp_path) == []


def test_without_a_name_every_run_has_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log.time, "strftime", lambda _: "2026-11-30-100000")
    names = []
    for _ in range(3):
        results = log.Results(Config())
        results.begin({})
        names.append(results.folder)
    assert names == [f"./results/2026-11-30-100000{suffix}" for suffix in ("", "-2", "-3")]


def test_rows_weights_and_curves(tmp_path):
    results = log.Results(Config(save=str(tmp_path)))
    results.begin({})
    model = nn.BatchNorm1d(2)
    rows = [row(1, valid_loss=None, valid_error=None)]
    results.after_epoch(rows, model.state_dict())
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.weight.data.fill_(9)
    rows.append(row(2, lr=0.1))
    results.after_epoch(rows, None)
    results.finish(rows, 0.25)

    with open(tmp_path / "results.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert list(written[0]) == log.COLUMNS and len(written) == 3 and len(rows) == 2
    assert written[0]["valid_loss"] == written[0]["valid_error"] == written[0]["test_error"] == ""
    assert (written[1]["epoch"], written[1]["lr"], written[1]["train_loss"]) == ("2", "0.1", "2.0")
    assert [value for value in written[2].values() if value] == ["0.25"] and written[2]["test_error"] == "0.25"

    state = torch.load(tmp_path / "model.dat", weights_only=True)
    assert list(state) == list(kept) and all(torch.equal(state[name], kept[name]) for name in kept)
    results.load_model(model)
    assert model.weight.tolist() == [1, 1]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    first = log.Results(Config(save=str(tmp_path / "out")))
    first.begin({})
    held = log._locks[str(tmp_path / "out")]
    log._locks.clear()  # as in another process
    with pytest.raises(UsageError, match="out: another run is writing there"):
        log.Results(Config(save=str(tmp_path / "out"), resume=True))
    log._locks[str(tmp_path / "out")] = held
    with first:
        pass
    log.Results(Config(save=str(tmp_path / "out"), resume=True)).__exit__()


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with log.Results(Config(save=str(tmp_path), tensorboard=True)) as results:
        results.begin({})
        rows = [row(1)]
        results.after_epoch(rows, None, [log.Usage(30.0, 10.0), log.Usage(40.0, busy=0.5)])
        results.after_epoch([*rows, row(2)], None)
        results.finish([*rows, row(2)], 0.5)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/train")] == [(1, 1), (2, 2)]
    assert [(event.step, event.value) for event in events.Scalars("error/test")] == [(3, 0.5)]
    assert set(events.Tags()["scalars"]) >= {"loss/valid", "error/train", "lr", "images_per_s", "peak_mib/0"}
    assert [(event.step, event.value) for event in events.Scalars("peak_mib/1")] == [(1, 40)]
    assert [(event.step, event.value) for event in events.Scalars("busy/1")] == [(1, 0.5)]
    assert "busy/0" not in events.Tags()["scalars"]


def test_tensorboard_takes_no_name_in_no_encoding(tmp_path):
    with pytest.raises(UsageError, match="--tensorboard True: not in .*\udcff, a name that is not UTF-8"):
        log.Results(Config(save=os.fsdecode(bytes(tmp_path) + b"/\xff"), tensorboard=True))


def test_peak_memory_is_that_of_the_epoch():
    meter = log.Meter([torch.device("cpu")])
    assert not meter.since_start
    (before,) = meter.read()
    assert 0.5 * before.peak < before.before <= before.peak and before.busy is None
    numpy.ones(100 * log.MIB, dtype="uint8")  # comes and goes
    (peak,) = meter.read()
    assert 95 < peak.peak - before.peak < 150 and peak.before == before.before
    meter.reset()
    assert meter.read()[0].peak < peak.peak - 80


def test_peak_memory_where_it_cannot_be_reset(monkeypatch):
    def refuse(path, *mode):
        raise PermissionError(path)

    monkeypatch.setattr(log, "open", refuse, raising=False)
    meter = log.Meter([torch.device("cpu")])
    assert meter.since_start and 50 < meter.read()[0].peak < 1e6


@pytest.mark.parametrize("answers, busy", [([40, 60], 0.5), ([ModuleNotFoundError("pynvml")], None)])
def test_utilisation_is_asked_for_now_and_then(monkeypatch, answers, busy):
    """Kills: NVML asked in every step, a run that ends for want of it."""
    clock, asked = iter([0.0, 0.5, 2.0, 2.0, 2.1, 4.0, 4.0]), iter(answers)

    def utilization(device):
        answer = next(asked)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(log.time, "monotonic", lambda: next(clock, 4.1))
    for name, function in (("utilization", utilization), ("max_memory_allocated", lambda _: 3 * log.MIB),
                           ("reset_peak_memory_stats", lambda _: None)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, function)
    meter = log.Meter([torch.device("cuda", 0)])
    for _ in range(5):
        meter.sample()
    assert meter.read() == [log.Usage(3.0, 0.0, busy)]


def test_the_line_of_an_epoch():
    line = log.epoch_line(row(3, valid_loss=None, valid_error=None, lr=0.01), 10, [log.Usage(100.4), log.Usage(200.6)], 3725.0)
    assert line == ("epoch 3/10: train loss 3.0000 error 3.0000, lr 0.01, 3 images/s, peak 100 + 201 MiB, 1:02:05 left")
    assert "left" not in log.epoch_line(row(10), 10, [log.Usage(1.0)], 0.0)
    assert "valid loss 10.0000 error 10.0000" in log.epoch_line(row(10), 10, [log.Usage(1.0)], 0.0)
    line = log.epoch_line(row(10), 10, [log.Usage(900.0, 600.0, 0.25), log.Usage(800.0, 600.0, 1.0)], 0.0)
    assert line.endswith("peak 900 + 800 MiB (300 + 200 of it for training), busy 25% + 100%")


class Totals:
    asked = 0

    def means(self):
        self.asked += 1
        return 1.25, 0.5


def test_the_bar_asks_the_device_seldom(capsys):
    totals, lines = Totals(), []
    with log.Bar("epoch 1/1", 120, 20, True, lines.append) as bar:
        bar._next = 0
        for _ in range(100):
            bar.advance(1, totals)
    assert totals.asked == 1 and lines == [] and bar.images_per_s > 1000
    shown = capsys.readouterr().err
    assert "epoch 1/1" in shown and "loss 1.2500, error 0.5000" in shown and "images/s" in shown


def test_without_a_terminal_a_long_epoch_shows_itself_in_lines(capsys):
    totals, lines = Totals(), []
    with log.Bar("epoch 1/1", 2000, 0, None, lines.append) as bar:
        bar.advance(1000, totals)
        bar._next = 0
        bar.advance(500, totals)
        bar.advance(500, totals)
    assert len(lines) == totals.asked == 1 and capsys.readouterr().err == ""
    assert lines[0].startswith("epoch 1/1: 1,500 of 2,000 images, loss 1.2500, error 0.5000, ") and lines[0].endswith(
        " left"
    )


def test_what_is_left_is_foretold_from_the_epochs_so_far(monkeypatch):
    now = iter([0.0, 10.0, 40.0])
    monkeypatch.setattr(log.time, "monotonic", lambda: next(now))
    clock = log.Clock()
    assert clock.left(5) == 50 and clock.left(4) == 80

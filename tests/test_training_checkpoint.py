"""Weights from anywhere, and the state that a run is resumed from; whole runs are resumed in test_demo.py."""

import json
import re

import pytest
import torch
from torch import nn

from efficient_densenet import densenet_bc
from efficient_densenet.training import checkpoint, engine, log
from efficient_densenet.training.config import Config, UsageError
from efficient_densenet.training.distributed import World


def net():
    return densenet_bc(10, 4)


WRITERS = {
    "plain": lambda state: state,
    "DistributedDataParallel": lambda state: {f"module.{key}": value for key, value in state.items()},
    "compiled": lambda state: {f"_orig_mod.module.{key}": value for key, value in state.items()},
    "training checkpoint": lambda state: {"state_dict": state, "optimizer": {"state": {}}, "epoch": 3},
    "another trainer": lambda state: {"model_state_dict": state, "optimizer_state_dict": {}},
    "ours, averaged": lambda state: {
        "model": {key: value * 0 for key, value in state.items()},
        "ema": {"n_averaged": torch.tensor(5), **{f"module.{key}": value for key, value in state.items()}},
    },
    "first torchvision": lambda state: {
        re.sub(r"\.(norm|conv)([12])\.", r".\1.\2.", key): value for key, value in state.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_weights_are_found_in_what_others_write(tmp_path, writer):
    theirs, mine = net(), net()
    content = WRITERS[writer](theirs.state_dict())
    assert writer != "first torchvision" or "features.denseblock1.denselayer1.norm.1.weight" in content
    torch.save(content, tmp_path / "weights.pt")
    checkpoint.load_weights(mine, str(tmp_path / "weights.pt"))
    for (name, value), other in zip(mine.state_dict().items(), theirs.state_dict().values()):
        assert torch.equal(value, other), name


def test_what_does_not_fit_is_listed(tmp_path):
    state = net().state_dict()
    state["classifier.weight"] = torch.zeros(7, 3)
    state["head.weight"] = state.pop("classifier.bias")
    torch.save(state, tmp_path / "weights.pt")
    model = net()
    before = model.classifier.weight.clone()
    with pytest.raises(UsageError) as caught:
        checkpoint.load_weights(model, str(tmp_path / "weights.pt"))
    for words in (
        "missing classifier.bias",
        "unexpected head.weight",
        "classifier.weight has shape (7, 3) instead of (10, ",
    ):
        assert words in str(caught.value)
    assert torch.equal(model.classifier.weight, before)
    (tmp_path / "weights.pt").write_bytes(b"no weights")
    with pytest.raises(UsageError, match="cannot read .*weights.pt"):
        checkpoint.load_weights(model, str(tmp_path / "weights.pt"))


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_a_state_survives_the_file(tmp_path, amp):
    config = Config(amp=amp, ema_decay=0.5, n_epochs=4)

    def fresh():
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return checkpoint.State(
            model=model,
            optimizer=optimizer,
            scheduler=engine.scheduler(optimizer, config, World()),
            scaler=torch.amp.GradScaler("cpu", enabled=amp == "fp16", init_scale=128.0),
            ema=engine.averaged(model, 0.5),
            totals=engine.Totals(torch.device("cpu")),
        )

    class Batches(list):
        sampler = range(12)

    data = Batches((torch.randn(4, 1, 2, 2), torch.randint(3, (4,))) for _ in range(3))
    run = fresh()
    for _ in engine.train_steps(run.model, data, run, config, World()):
        pass
    run.next_epoch({"epoch": 1, "train_loss": 2.0, "valid_error": None})
    assert run.improves(0.5) and not run.improves(0.75) and run.improves(0.5) and run.improves(0.25)
    for _ in engine.train_steps(run.model, data, run, config, World()):
        break
    torch.save(run.capture(World()), tmp_path / "checkpoint.pt")
    random = torch.rand(3)

    again = fresh()
    again.restore(checkpoint.read(str(tmp_path / "checkpoint.pt")), World())
    assert (again.epoch, again.step, again.best_error, again.rows) == (1, 1, 0.25, run.rows)
    assert torch.equal(torch.rand(3), random) and torch.equal(again.totals.sums, run.totals.sums)
    assert again.scaler.get_scale() == run.scaler.get_scale()
    for state in (run, again):
        for _ in engine.train_steps(state.model, data, state, config, World()):
            pass
        state.next_epoch({})
    assert again.scheduler.get_last_lr() == run.scheduler.get_last_lr() == [pytest.approx(0.01)]
    for part in ("model", "ema"):
        for name, value in getattr(run, part).state_dict().items():
            assert torch.equal(getattr(again, part).state_dict()[name], value), name


def test_a_restart_is_known_on_every_machine_of_the_run(tmp_path, monkeypatch):
    """torchrun may give rank 0 to another machine than before. Kills: one launcher in config.json, rank 0's."""

    class Two(World):
        def gather(self, value):
            return [value, "the other machine's"]

    facts = {"name": "digits"}
    monkeypatch.setattr(log, "launcher", lambda: "this machine's")
    folder = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(log.settings_of(Config(save=folder, lr=0.5), Two(), facts, None)))
    for launcher, resumes in (("this machine's", True), ("the other machine's", True), ("a stranger's", False)):
        monkeypatch.setattr(checkpoint.distributed, "launcher", lambda launcher=launcher: launcher)
        config = checkpoint.recall(Config(save=folder), {"save"})
        assert (config.resume, config.lr) == (resumes, 0.5 if resumes else 0.1)

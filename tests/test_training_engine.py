"""The learning rate's course, the sums of an epoch, and a training step."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

from efficient_densenet.training import engine
from efficient_densenet.training.config import Config
from efficient_densenet.training.distributed import World


def rates(scheduler_of, n_epochs, lr=0.1):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr)
    scheduler = scheduler_of(optimizer)
    course = []
    for _ in range(n_epochs):
        course.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return course


def ours(n_epochs, scale=1, **flags):
    return rates(lambda optimizer: engine.scheduler(optimizer, Config(n_epochs=n_epochs, **flags), scale), n_epochs)


@pytest.mark.parametrize("n_epochs, milestones", [(300, [150, 225]), (40, [20, 30]), (4, [2, 3]), (10, [5, 8]), (3, [2])])
def test_multistep_is_torchs(n_epochs, milestones):
    expected = rates(lambda optimizer: MultiStepLR(optimizer, milestones), n_epochs)
    assert ours(n_epochs) == pytest.approx(expected)


def test_one_epoch_has_the_whole_rate():
    assert ours(1) == [0.1]


@pytest.mark.parametrize("n_epochs", [1, 7, 50])
def test_cosine_is_torchs(n_epochs):
    expected = rates(lambda optimizer: CosineAnnealingLR(optimizer, n_epochs), n_epochs)
    assert ours(n_epochs, schedule="cosine") == pytest.approx(expected)


def test_warmup():
    plain, warm = ours(20), ours(20, warmup_epochs=3)
    assert warm[:3] == pytest.approx([0.025, 0.05, 0.075]) and warm[3:] == plain[3:]
    assert ours(20, scale=4) == ours(20, warmup_epochs=5)
    assert ours(20, scale=4, warmup_epochs=0) == plain
    cosine = rates(lambda optimizer: CosineAnnealingLR(optimizer, 16), 16)
    assert ours(20, schedule="cosine", warmup_epochs=4)[4:] == pytest.approx(cosine)
    assert len(ours(2, schedule="cosine", warmup_epochs=5)) == 2


def test_totals_are_means_over_images_whatever_the_batches():
    logits, labels = torch.randn(10, 3), torch.randint(3, (10,))
    for sizes in ([10], [4, 4, 2], [1] * 10):
        totals = engine.Totals(torch.device("cpu"))
        for part, targets in zip(logits.split(sizes), labels.split(sizes)):
            totals.add(F.cross_entropy(part, targets, reduction="sum"), part, targets)
        loss, error = totals.means()
        assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
        assert error == pytest.approx((logits.argmax(1) != labels).float().mean().item())
    assert all(math.isnan(mean) for mean in engine.Totals(torch.device("cpu")).means())


class NoBar:
    def advance(self, images, totals):
        pass


def test_an_epoch_is_the_textbooks_steps():
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(5)]
    model, reference = nn.Linear(6, 3), nn.Linear(6, 3)
    reference.load_state_dict(model.state_dict())
    recipe = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}
    totals, losses = engine.Totals(torch.device("cpu")), []
    optimizer = torch.optim.SGD(reference.parameters(), **recipe)
    for x, y in batches:
        loss = F.cross_entropy(reference(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    engine.train_epoch(model, batches, torch.optim.SGD(model.parameters(), **recipe), World(), totals, NoBar())
    assert torch.allclose(model.weight, reference.weight, atol=1e-7)
    assert totals.means()[0] == pytest.approx(sum(losses) / 5)
    assert model.weight.grad is None  # nothing of the last step is carried into the evaluation


def test_evaluation_keeps_no_graph_and_changes_nothing():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []
    model[2].register_forward_hook(lambda module, args, output: seen.append((output.requires_grad, module.training)))
    images = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(2)]
    assert engine.evaluate(model, images, World()) == engine.evaluate(model, images, World())
    assert set(seen) == {(False, False)}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])

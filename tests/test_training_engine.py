"""The learning rate's course, the sums of an epoch, and a training step."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

from efficient_densenet import densenet121, densenet_bc
from efficient_densenet.training import checkpoint, engine
from efficient_densenet.training.config import Config, RunError
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


def ours(n_epochs, ranks=1, **flags):
    config = Config(n_epochs=n_epochs, **flags)
    return rates(lambda optimizer: engine.scheduler(optimizer, config, World(size=ranks)), n_epochs)


@pytest.mark.parametrize(
    "n_epochs, milestones", [(300, [150, 225]), (40, [20, 30]), (4, [2, 3]), (10, [5, 8]), (3, [2])]
)
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
    assert ours(20, ranks=4) == ours(20, accumulation_steps=2) == ours(20, warmup_epochs=5)
    assert ours(20, ranks=4, warmup_epochs=0) == ours(20, ranks=4, lr_scaling="none") == plain
    cosine = rates(lambda optimizer: CosineAnnealingLR(optimizer, 16), 16)
    assert ours(20, schedule="cosine", warmup_epochs=4)[4:] == pytest.approx(cosine)
    assert len(ours(2, schedule="cosine", ranks=4)) == len(ours(2, schedule="cosine", warmup_epochs=2)) == 2


@pytest.mark.parametrize("build, size, least", [
    (lambda: densenet_bc(10, 4), 4, 2), (lambda: densenet_bc(10, 4), 7, 2), (lambda: densenet_bc(10, 4), 8, 1),
    (densenet121, 32, 2), (densenet121, 64, 1),
])  # fmt: skip
def test_the_images_that_batch_norm_needs(build, size, least):
    """Kills: an epoch that ends with an error in its last batch."""
    with torch.device("meta"):
        assert engine.least_batch(build(), [size, size]) == least
    model, image = build(), torch.randn(1, 3, size, size)
    with contextlib.nullcontext() if least == 1 else pytest.raises(ValueError, match="more than 1 value per channel"):
        model(image)


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


# What is learned from a teacher


def test_the_loss_of_distillation():
    """By its formula, in float64. Kills: T without its square, the KL divergence the other way round, smoothed hints."""
    ours, theirs, labels = torch.randn(5, 4).double().requires_grad_(), torch.randn(5, 4).double(), torch.randint(4, (5,))
    flags = {"teacher": "a run", "distill_alpha": 0.3, "label_smoothing": 0.1}
    given = F.cross_entropy(ours, labels, label_smoothing=0.1, reduction="sum")
    p, q = ((logits / 2.5).softmax(1) for logits in (theirs, ours))
    divergence = (p * (p.log() - q.log())).sum()
    soft = engine.loss_sum(ours, labels, theirs, Config(**flags, distill_temperature=2.5))
    torch.testing.assert_close(soft, 0.7 * given + 0.3 * 2.5**2 * divergence)
    right = -ours.log_softmax(1)[torch.arange(5), theirs.argmax(1)].sum()
    torch.testing.assert_close(
        engine.loss_sum(ours, labels, theirs, Config(**flags, distill="hard")), 0.7 * given + 0.3 * right
    )
    torch.testing.assert_close(engine.loss_sum(ours, labels, None, Config(label_smoothing=0.1)), given)
    alike = engine.loss_sum(ours, labels, ours.detach(), Config(**flags | {"distill_alpha": 1}, distill_temperature=3))
    assert torch.autograd.grad(alike, ours)[0].abs().max() < 1e-12


# Steps


def state_of(model, config):
    optimizer = torch.optim.SGD(model.parameters(), config.lr, config.momentum, weight_decay=config.wd, nesterov=True)
    return checkpoint.State(
        model=model,
        optimizer=optimizer,
        scheduler=engine.scheduler(optimizer, config, World()),
        scaler=torch.amp.GradScaler("cpu", enabled=config.amp == "fp16"),
        ema=engine.averaged(model, config.ema_decay) if config.ema_decay else None,
        totals=engine.Totals(torch.device("cpu")),
    )


class Batches(list):
    """What :func:`engine.train_steps` needs of a loader: batches, and a sampler as long as their images."""

    @property
    def sampler(self):
        return range(sum(len(labels) for _, labels in self))


def images(*sizes):
    generator = torch.Generator().manual_seed(1)
    return Batches(
        (torch.randn(size, 2, 2, 2, generator=generator), torch.randint(3, (size,), generator=generator))
        for size in sizes
    )


def net():
    return nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def twins():
    model, reference = net(), net()
    reference.load_state_dict(model.state_dict())
    return model, reference


def assert_same(model, reference, **tolerance):
    for (name, mine), theirs in zip(model.state_dict().items(), reference.state_dict().values()):
        torch.testing.assert_close(mine, theirs, msg=name, **tolerance)


def textbook(model, groups, config, lr, smooth=0.0, clip=0.0, after=lambda: None):
    """SGD on the mean loss of each group of images, as one writes it down."""
    optimizer = torch.optim.SGD(model.parameters(), lr, config.momentum, weight_decay=config.wd, nesterov=True)
    for group in groups:
        x, y = (torch.cat(part) for part in zip(*group))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=smooth).backward()
        if clip:
            norm = torch.sqrt(sum(parameter.grad.square().sum() for parameter in model.parameters()))
            for parameter in model.parameters():
                parameter.grad *= min(1.0, clip / norm)
        optimizer.step()
        after()


def test_an_epoch_is_the_textbooks_steps():
    config, batches = Config(batch_size=4, lr=0.1), images(4, 4, 4, 2)
    model, reference = twins()
    state = state_of(model, config)
    counts = list(engine.train_steps(model, batches, state, config, World()))
    textbook(reference, [[batch] for batch in batches], config, 0.1)
    assert counts == [4, 4, 4, 2] and state.step == 4
    assert_same(model, reference)
    assert state.totals.sums[2] == 14
    assert all(parameter.grad is None for parameter in model.parameters())  # the evaluation needs the memory


def test_accumulated_batches_are_one_batch_also_where_the_last_group_is_short():
    config, batches = Config(batch_size=4, lr=0.1, accumulation_steps=3, warmup_epochs=0), images(4, 4, 4, 4, 2)
    model, reference = twins()
    state = state_of(model, config)
    counts = list(engine.train_steps(model, batches, state, config, World()))
    textbook(reference, [batches[:3], batches[3:]], config, 0.1)
    assert counts == [12, 6] and state.step == 2
    assert_same(model, reference, rtol=1e-5, atol=1e-6)
    assert engine.step_lr(config, World()) == pytest.approx(0.3)
    assert engine.describe_step(config, World()) == ("1 CPU x 4 x 3 accumulation steps = 12 images per step, lr 0.3")


def test_accumulation_exchanges_gradients_once_per_step():
    class Shared(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.alone, self.exchanges = module, 0, 0

        @contextlib.contextmanager
        def no_sync(self):
            self.alone += 1
            yield
            self.alone -= 1

        def forward(self, x):
            self.exchanges += not self.alone
            return self.module(x)

    model, config = net(), Config(batch_size=4, accumulation_steps=3)
    shared = Shared(model)
    list(engine.train_steps(shared, images(4, 4, 4, 4, 2), state_of(model, config), config, World(distributed=True)))
    assert shared.exchanges == 2


def test_clipped_and_smoothed():
    config, batches = Config(batch_size=4, lr=0.1, clip_grad=0.05, label_smoothing=0.2), images(4, 4, 4)
    model, reference = twins()
    list(engine.train_steps(model, batches, state_of(model, config), config, World()))
    textbook(reference, [[batch] for batch in batches], config, 0.1, smooth=0.2, clip=0.05)
    assert_same(model, reference, rtol=1e-5, atol=1e-6)


def test_averaged_weights_and_statistics():
    config, batches = Config(batch_size=4, lr=0.1, ema_decay=0.8), images(4, 4, 4)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 3))
    state, seen = state_of(model, config), []
    for _ in engine.train_steps(model, batches, state, config, World()):
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    for name, average in state.ema.module.state_dict().items():
        expected = seen[0][name]
        for values in seen[1:]:
            expected = 0.8 * expected + 0.2 * values[name] if expected.is_floating_point() else values[name]
        torch.testing.assert_close(average, expected)


@pytest.mark.parametrize("amp, dtype", [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision(amp, dtype):
    config, batches = Config(batch_size=4, lr=0.1, amp=amp), images(4, 4)
    model, reference = twins()
    state, seen = state_of(model, config), set()
    model[3].register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    list(engine.train_steps(model, batches, state, config, World()))
    engine.evaluate(model, batches, config, World())
    assert seen == {dtype} and model[3].weight.dtype == torch.float32
    assert state.scaler.is_enabled() == (amp == "fp16")
    textbook(reference, [[batch] for batch in batches], config, 0.1)
    assert_same(model, reference, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("channels_last", [True, False])
def test_channels_last(channels_last):
    config, seen = Config(channels_last=channels_last, batch_size=4), []
    model = net()
    model[0].register_forward_hook(
        lambda module, args, output: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    list(engine.train_steps(model, images(4), state_of(model, config), config, World()))
    engine.evaluate(model, images(4), config, World())
    assert seen == [channels_last] * 2


def test_evaluation_keeps_no_graph_and_changes_nothing():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []
    model[3].register_forward_hook(lambda module, args, output: seen.append((output.requires_grad, module.training)))
    first, second = (engine.evaluate(model, images(4, 4), Config(), World()) for _ in range(2))
    assert first == second and set(seen) == {(False, False)}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_loss_that_is_no_number_is_found(tmp_path):
    config, batches = Config(batch_size=4), images(4, 4)
    batches[1][0][0, 0, 0, 0] = math.nan
    model = net()
    state = state_of(model, config)
    steps = engine.train_steps(model, batches, state, config, World())
    next(steps)
    assert state.totals.are_finite() and state.check_finite(str(tmp_path)) is None
    next(steps)
    assert not state.totals.are_finite()
    with pytest.raises(RunError, match="not finite in epoch 1, by step 2; there is no checkpoint yet"):
        state.check_finite(str(tmp_path))
    state = state_of(net(), config)
    state.model[0].weight.data[0] = math.nan  # after the last loss
    (tmp_path / "checkpoint.pt").write_text("")
    with pytest.raises(RunError, match=r"not finite .*checkpoint.pt is from before"):
        state.check_finite(str(tmp_path))

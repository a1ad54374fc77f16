"""Synchronised BatchNorm: processes with a part of the batch each do what one process does with the whole."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from efficient_densenet import SyncBatchNorm
from helpers import MODES, TOY, assert_same, buffers, each_mode, gradients, images, layers, norms, toy
from ranks import on_ranks

STEPS = {"2d": 5}  # 2 in the other variants
VARIANTS = {  # what the model is, and the images of each rank
    "2d": ({}, (16, 16)),
    "unequal": ({}, (3, 6)),
    "basic": ({"bn_size": None}, (4, 5)),
    "imagenet": ({"small_inputs": False}, (4, 4)),
    "3d": ({"spatial_dims": 3}, (3, 2)),
    "1d": ({"spatial_dims": 1}, (6, 4)),
    "frozen": ({}, (4, 5)),
    "one": ({}, (4, 5)),
}

# Python 3.12 and later warn of every fork; the processes forked here use one thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def build(variant: str, mode: str, synchronised: bool) -> nn.Module:
    model = toy(mode, **VARIANTS[variant][0])
    if synchronised and variant == "one":  # the others keep to their own process's images
        layers(model)[1].norm1 = SyncBatchNorm.convert_sync_batchnorm(layers(model)[1].norm1)
    elif synchronised:
        model = SyncBatchNorm.convert_sync_batchnorm(model)
    if variant == "frozen":  # one norm keeps to its running statistics
        layers(model)[1].norm1.eval()
    return model


def batch(variant: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and the weights of their outputs in the loss."""
    overrides, shares = VARIANTS[variant]
    size = 32 if variant == "imagenet" else 8
    shape = (sum(shares), 3, *(size,) * overrides.get("spatial_dims", 2))
    return images(*shape, seed=step), images(sum(shares), TOY["num_classes"], seed=100 + step)


def train(called: nn.Module, model: nn.Module, variant: str, share: slice, scale: int) -> list[dict]:
    """Some steps of SGD on a share of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    states = []
    for step in range(STEPS.get(variant, 2)):
        optimizer.zero_grad()
        x, weights = batch(variant, step)
        x = x[share].requires_grad_()
        output = called(x)
        (scale * (output * weights[share]).sum()).backward()  # DDP takes the mean over the ranks, the loss is a sum
        found = {"output": output.detach(), "input.grad": x.grad / scale, **gradients(model), **buffers(model)}
        optimizer.step()
        states.append({**found, **{name: p.detach().clone() for name, p in model.named_parameters()}})
    return states


def second_derivatives(model: nn.Module, share: slice) -> dict:
    x, weights = batch("unequal", 0)
    x = x[share].requires_grad_()
    (gradient,) = torch.autograd.grad((model(x) * weights[share]).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return {"input": x.grad, **gradients(model)}


def many_gradients(model: nn.Module, share: slice) -> dict:
    """By both of torch's vmaps."""
    x, _ = batch("unequal", 0)
    x = x[share].requires_grad_()
    output, wrt = model(x), [x, *model.parameters()]
    many = images(2, *batch("unequal", 0)[1].shape)[:, share]
    found = [*torch.autograd.grad(output, wrt, many, is_grads_batched=True, retain_graph=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no batching rule for every derivative
        found += torch.func.vmap(lambda v: torch.autograd.grad(output, wrt, v, retain_graph=True))(many)
    return {str(i): g for i, g in enumerate(found)}


def own_share(variant: str) -> slice:
    before = sum(VARIANTS[variant][1][: dist.get_rank()])
    return slice(before, before + VARIANTS[variant][1][dist.get_rank()])


def all_cases() -> dict:
    """On one rank: what each mode found for each variant."""
    dist.init_process_group("gloo")
    found = {}
    for mode in ("naive", *MODES):
        for variant in VARIANTS:
            model = build(variant, mode, synchronised=True)
            called = DistributedDataParallel(model)
            found[mode, variant] = train(called, model, variant, own_share(variant), dist.get_world_size())
        found[mode, "second"] = second_derivatives(build("unequal", mode, synchronised=True), own_share("unequal"))
        if mode != "checkpoint" or torch.__version__ >= "2.5":  # whose own checkpoint refuses torch.func.vmap
            found[mode, "many"] = many_gradients(build("unequal", mode, synchronised=True), own_share("unequal"))
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return on_ranks(2, tmp_path_factory.mktemp("ranks"), all_cases)


@functools.cache
def whole(variant: str) -> list[dict]:
    """The plain model, one process, all images."""
    model = build(variant, "naive", synchronised=False)
    return train(model, model, variant, slice(None), scale=1)


@pytest.mark.parametrize("mode", ("naive", *MODES))
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "one"])
def test_several_processes_do_what_one_does(ranks, mode, variant):
    """Kills: local statistics, counts that weigh processes instead of images, gradients from local sums."""
    first = VARIANTS[variant][1][0]
    for step, want in enumerate(whole(variant)):
        for rank, share in enumerate((slice(None, first), slice(first, None))):
            mine = {name: want[name][share] for name in ("output", "input.grad")}
            assert_same(want | mine, ranks[rank][mode, variant][step], tolerance=1e-9, running=1e-11)
        buffers_of = [{k: v for k, v in r[mode, variant][step].items() if "running_" in k} for r in ranks]
        assert all(torch.equal(buffers_of[0][name], buffers_of[1][name]) for name in buffers_of[0])


@each_mode
def test_one_synchronised_norm_among_others(ranks, mode):
    """Kills: the block function for a block whose norms take different statistics."""
    for rank in ranks:
        for want, got in zip(rank["naive", "one"], rank[mode, "one"], strict=True):
            assert_same(want, got, tolerance=1e-9)


@each_mode
def test_second_derivatives(ranks, mode):
    for rank in ranks:
        assert_same(rank["naive", "second"], rank[mode, "second"], tolerance=1e-8)


@pytest.mark.parametrize("mode", ("naive", *MODES))
def test_many_gradients_at_once(ranks, mode):
    """Kills: a sum over processes that knows one gradient alone. One process with all images is the reference."""
    first = VARIANTS["unequal"][1][0]
    want = many_gradients(build("unequal", "naive", synchronised=False), slice(None))
    half = len(want) // 2
    for rank, share in zip(ranks, (slice(None, first), slice(first, None)), strict=True):
        if (mode, "many") not in rank:
            pytest.skip("this torch's own checkpoint does not go with torch.func.vmap")
        for name in ("0", str(half)):  # the images' gradients
            assert_same({name: want[name][:, share]}, {name: rank[mode, "many"][name]}, tolerance=1e-8)
    for name in want.keys() - {"0", str(half)}:
        total = sum(rank[mode, "many"][name] for rank in ranks)
        assert_same({name: want[name]}, {name: total}, tolerance=1e-8)


def exchanged() -> dict:
    """On one rank: the numbers it sent for statistics and for sums, forward and backward, by mode."""
    dist.init_process_group("gloo")
    sent = {}
    gather, reduce = dist.all_gather, dist.all_reduce
    for mode in ("checkpoint", "fused", "lean"):
        model = build("2d", mode, synchronised=True)
        counted = {"statistics": 0, "sums": 0}

        def all_gather(tensors, tensor, group=None, counted=counted):
            counted["statistics"] += tensor.numel() if tensor.is_floating_point() else 0
            return gather(tensors, tensor, group=group)

        def all_reduce(tensor, group=None, counted=counted):
            counted["sums"] += tensor.numel()
            return reduce(tensor, group=group)

        dist.all_gather, dist.all_reduce = all_gather, all_reduce
        block, x = model.features.denseblock1, images(2, 8, 8, 8).requires_grad_()
        out = block(x)
        forward = dict(counted)
        out.sum().backward()
        sent[mode] = forward, {name: counted[name] - forward[name] for name in counted}
        dist.all_gather, dist.all_reduce = gather, reduce
    dist.destroy_process_group()
    return sent


def test_a_feature_is_exchanged_once(tmp_path):
    """Kills: an exchange per reading layer, and one when something is rebuilt."""
    (sent, _) = on_ranks(2, tmp_path, exchanged)
    k, c, layers_ = TOY["growth_rate"], TOY["num_init_features"], TOY["block_config"][0]
    features, widths = c + k * (layers_ - 1), 4 * k * layers_  # the last layer's features have no reader in the block
    for mode in ("fused", "lean"):
        forward, backward = sent[mode]
        assert forward == {"statistics": 2 * (features + widths), "sums": 0}, mode
        assert backward == {"statistics": 0, "sums": 2 * (features + widths)}, mode
    assert sent["checkpoint"][1]["statistics"] == 0


def test_one_process_is_a_plain_batch_norm():
    """Kills: a converted model that needs a process group."""
    model, other = build("2d", "fused", synchronised=False), build("2d", "fused", synchronised=True)
    assert list(model.state_dict()) == list(other.state_dict())
    assert {plan.runs for plan in other.execution_plan()} == {"fused"}
    want, got = (train(m, m, "2d", slice(None), 1) for m in (model, other))
    for a, b in zip(want, got, strict=True):
        assert_same(a, b)
    assert len(norms(model)) == sum(isinstance(m, SyncBatchNorm) for m in other.modules())


# --- conversion -----------------------------------------------------------------------------------------------------


class NormAct(nn.BatchNorm2d):
    """As timm has it: a BatchNorm that goes on to drop and rectify."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drop, self.act = nn.Dropout(0.2), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class Doubled(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


class ActNorm(nn.BatchNorm2d):
    """Its child comes first."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.act = nn.ReLU()

    def forward(self, x):
        return super().forward(self.act(x))


class InTraining(NormAct):
    def forward(self, x):
        return super().forward(x) + self.training


class Named(nn.BatchNorm2d):
    """Computes nothing else."""


def replaced(norm: nn.Module) -> nn.Module:
    norm.forward = lambda x: x
    return norm


REFUSED = {
    "doubled": Doubled, "act before norm": ActNorm, "another in training": InTraining,
    "lazy": lambda c: nn.LazyBatchNorm2d(), "forward replaced": lambda c: replaced(nn.BatchNorm2d(c)),
    "torch's, extended": type("Sync", (nn.SyncBatchNorm,), {"forward": lambda self, x: x}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_norms_that_compute_something_else_are_refused(kind):
    """Kills: wrong outputs in silence, and a model converted by half."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.ReLU(), REFUSED[kind](3)))
    types = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=rf"1\.1 is a .*\.{type(model[1][1]).__name__}, which"):
        SyncBatchNorm.convert_sync_batchnorm(model)
    assert types == [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="the module itself is a "):
        SyncBatchNorm.convert_sync_batchnorm(REFUSED[kind](3))


CONVERTED = {
    "1d": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d, "torch's": nn.SyncBatchNorm, "act": NormAct,
    "named": Named,
}  # fmt: skip


@pytest.mark.parametrize("settings", [
    {}, {"affine": False}, {"track_running_stats": False}, {"momentum": None, "eps": 1e-2}, {"dtype": torch.float64},
])  # fmt: skip
@pytest.mark.parametrize("kind", CONVERTED)
def test_a_converted_norm_keeps_what_it_has(kind, settings):
    """Kills: a setting, flag, hook or activation lost; a second conversion that does something."""
    norm = CONVERTED[kind](3, **settings).eval()
    model = nn.Sequential(norm, nn.InstanceNorm2d(3, affine=True), norm, nn.BatchNorm2d(3))
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5).requires_grad_(False)
    calls = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(norm)
    group = object()
    for given in (None, group, None):
        assert SyncBatchNorm.convert_sync_batchnorm(model, given) is model
        converted = model[0]
        assert isinstance(converted, SyncBatchNorm) and model[2] is converted and type(model[1]) is nn.InstanceNorm2d
        assert [type(child) for child in converted.children()] == [type(child) for child in before.children()]
        assert not converted.training and model[3].training
        assert not any(parameter.requires_grad for parameter in converted.parameters())
        assert_same(dict(before.state_dict()), dict(converted.state_dict()), 0)
        for name in ("num_features", "eps", "momentum", "affine", "track_running_stats"):
            assert getattr(before, name) == getattr(converted, name)
    assert converted.process_group is group
    converted.process_group = None
    x = images(4, 3, *(2,) * {"1d": 1, "3d": 3}.get(kind, 2)).to(settings.get("dtype", torch.float32))
    for training in (True, False):
        torch.manual_seed(0)
        want = before.train(training)(x)
        torch.manual_seed(0)
        calls.clear()
        assert torch.equal(want, converted.train(training)(x))
        assert calls == [1]
    assert_same(dict(before.state_dict()), dict(converted.state_dict()), 0)


def of_norms_and_activations(synchronised: bool) -> nn.Module:
    torch.manual_seed(0)
    norm = NormAct(4)
    norm.drop.p = 0.0
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 5, 3), nn.Flatten()).double()
    return SyncBatchNorm.convert_sync_batchnorm(model) if synchronised else model


def trained_norm_and_activation() -> list:
    dist.init_process_group("gloo")
    model = of_norms_and_activations(synchronised=True)
    x = images(9, 3, 5, 5)[own_share("basic")].requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, buffers(model)]


def test_a_norm_and_activation_on_two_processes(tmp_path):
    """Kills: statistics of the own images; an activation that is lost."""
    found = on_ranks(2, tmp_path, trained_norm_and_activation)
    model, x = of_norms_and_activations(synchronised=False), images(9, 3, 5, 5).requires_grad_()
    output = model(x)
    output.square().sum().backward()
    assert_same(
        {"output": output.detach(), "x": x.grad},
        {"output": torch.cat([rank[0] for rank in found]), "x": torch.cat([rank[1] for rank in found])},
    )
    for rank in found:
        assert_same(buffers(model), rank[2])


def with_an_empty_batch() -> list:
    """On one rank, of which the second has no image: what each mode makes of it."""
    dist.init_process_group("gloo")
    outcomes = []
    x = images(4, 3, 8, 8)[: 0 if dist.get_rank() else 4]
    for mode in ("naive", "fused"):
        model = build("2d", mode, synchronised=True)
        if mode == "fused" and len(x):  # the other rank stops, and takes no part
            break
        try:
            outcomes.append(len(model(x)))
        except ValueError as error:
            outcomes.append(str(error))
    return outcomes


def test_an_empty_batch_on_one_process(tmp_path):
    """Kills: a hang, as the ranks wait for each other in different places."""
    full, empty = on_ranks(2, tmp_path, with_an_empty_batch)
    assert full == [4] and empty[0] == 0 and "every process needs an image" in empty[1]

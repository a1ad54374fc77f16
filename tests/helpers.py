"""What the tests of the library compare: the whole training state, by name, against the plain path.

Outputs, input gradients, every parameter's gradient (its absence included), every buffer and every parameter, step by
step. A test that compares less passes a model whose running statistics move twice or whose early layers learn nothing.
"""

from __future__ import annotations

import copy
import re
import statistics
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efficient_densenet import DenseNet, models

MODES = tuple(mode for mode in models.MODES if mode not in ("naive", "auto"))
each_mode = pytest.mark.parametrize("mode", MODES)

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TOY = {"growth_rate": 4, "block_config": (2, 2), "num_init_features": 8, "num_classes": 5}


def toy(mode: str = "naive", *, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides) -> DenseNet:
    """A small DenseNet in training mode, none of whose values is a neutral 0 or 1."""
    torch.manual_seed(seed)
    model = DenseNet(**{**TOY, **overrides}, efficient=mode).to(dtype)
    for norm in norms(model).values():
        # Every third gamma is negative: the rectified half depends on its sign.
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5)[::3].neg_()
            norm.bias.normal_(0, 0.3)
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 1.5)
    return model


def images(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """Normal images; ``(4, 3, 8, 8)`` unless said."""
    return torch.randn(shape or (4, 3, 8, 8), dtype=dtype, generator=torch.Generator().manual_seed(seed))


def twin(model: nn.Module, mode: str) -> nn.Module:
    """A copy of ``model`` on other memory, computed in ``mode``."""
    other = copy.deepcopy(model)
    other.set_efficient(mode)
    return other


def norms(model: nn.Module) -> dict[str, nn.Module]:
    """Every batch norm of ``model`` by name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, NORMS)}


def layers(model: nn.Module) -> list[nn.Module]:
    """Every dense layer of ``model``, in order."""
    return [module for name, module in model.named_modules() if name.split(".")[-1].startswith("denselayer")]


def blocks(model: nn.Module) -> list[nn.Module]:
    """Every dense block of ``model``, in order."""
    return [module for name, module in model.named_modules() if name.split(".")[-1].startswith("denseblock")]


def classification_loss(output: Tensor) -> Tensor:
    """Cross entropy against fixed classes, in at least float32; any ``(N, C, ...)`` output serves."""
    logits = output.flatten(1).to(torch.promote_types(output.dtype, torch.float32))
    return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])


def linear_loss(output: Tensor) -> Tensor:
    """A fixed weighting, whose gradient does not depend on the output's rounding."""
    weights = images(*output.shape, seed=8).bfloat16().to(output.dtype)  # the same numbers in every type
    return (output * weights).sum()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {f"{name}.grad": None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def training_state(
    model: nn.Module,
    inputs: Tensor,
    *,
    steps: int = 1,
    input_grad: bool = True,
    forward=None,
    loss=classification_loss,
) -> dict[str, Tensor | None]:
    """Train ``model`` on ``inputs`` for some steps of SGD (lr 0.1, momentum 0.9); all that happened, by name.

    Args:
        model: trained in place.
        inputs: the same images in every step, in the layout they come in.
        steps: how many.
        input_grad: whether the images ask for a gradient.
        forward: ``forward(model, x)`` instead of ``model(x)``.
        loss: scalar from the output.
    """
    torch.manual_seed(0)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9) if trainable else None
    state: dict[str, Tensor | None] = {}
    for step in range(1, steps + 1):
        x = inputs.detach().requires_grad_(input_grad)
        model.zero_grad(set_to_none=True)
        output = model(x) if forward is None else forward(model, x)
        found = {"output": output.detach().clone()}
        objective = loss(output)
        if objective.requires_grad:
            objective.backward()
        found |= {"input.grad": x.grad, "input": x.detach().clone(), **gradients(model), **buffers(model)}
        if optimizer is not None:
            optimizer.step()
        found |= {name: p.detach().clone() for name, p in model.named_parameters()}
        state |= {f"step {step}: {name}": value for name, value in found.items()}
    return state


def compiled_state(model: nn.Module, compiled, size: int, **kwargs) -> dict:
    """A step of ``model`` through what was compiled of it."""
    return training_state(model, images(size, 3, 8, 8), forward=lambda net, x: compiled(x), **kwargs)


def assert_same(expected: dict, actual: dict, tolerance: float = 1e-10, running: float | None = None) -> None:
    """Every entry equal by name, relative to the entry's largest value; integers and absences exactly.

    Args:
        expected: the plain path's state.
        actual: the state under test.
        tolerance: of everything but running statistics.
        running: of running statistics; by default a hundredth of ``tolerance``.
    """
    assert expected.keys() == actual.keys()
    running = tolerance / 100 if running is None else running
    faults = []
    for name, want in expected.items():
        got = actual[name]
        if want is None or got is None:
            if want is not got:
                faults.append(f"{name}: {'absent' if got is None else 'present'}, not so in the plain path")
            continue
        if want.shape != got.shape or want.dtype != got.dtype:
            faults.append(f"{name}: {got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}")
            continue
        if not want.is_floating_point():
            if not torch.equal(want, got):
                faults.append(f"{name}: {got} instead of {want}")
            continue
        scale = max(want.detach().abs().max().item(), 1e-2) if want.numel() else 1.0
        bound = (running if "running_" in name else tolerance) * scale
        error = (want.detach() - got.detach()).abs().max().item() if want.numel() else 0.0
        if not error <= bound:  # a NaN is a fault too
            faults.append(f"{name}: differs by {error:.2e}, allowed {bound:.2e}")
    summary = f"{len(faults)} of {len(expected)} entries differ from the plain path:"
    assert not faults, "\n".join((summary, *faults[:12]))


def assert_trains_like(expected: nn.Module, actual: nn.Module, inputs: Tensor, tolerance: float = 1e-10, **kwargs):
    """Both models, trained the same way, go through the same states. Returns the state."""
    want = training_state(expected, inputs, **kwargs)
    assert_same(want, training_state(actual, inputs, **kwargs), tolerance)
    return want


def assert_as_accurate(*draws: tuple[dict, dict, dict], factor: float = 2) -> None:
    """The rule for low precision: the error against float64 is at most ``factor`` times the plain path's own.

    An entry's error is relative to its norm. At toy sizes one rounding more or less turns a rectifier and with it an
    entry's error several times over, in either model; so the ratio is a median over entries, steps and draws: of all
    gradients, all statistics, all values; and, up to twice the factor, of every role (the norms' gammas, say).

    Args:
        *draws: for each draw of weights and images, the states in float64, of the plain path, and under test.
        factor: how many times.
    """
    found: dict[str, list[float]] = {}
    for exact, plain, actual in draws:
        assert plain.keys() == actual.keys()
        floor = torch.finfo(next(value.dtype for name, value in plain.items() if name.endswith("output"))).eps / 8
        for name, value in plain.items():
            assert (value is None) == (actual[name] is None), name
            if value is None or not value.is_floating_point():
                continue
            assert value.dtype == actual[name].dtype, name
            assert torch.equal(value.isfinite(), actual[name].isfinite()), name
            own, theirs = ((state[name].double() - exact[name]).norm().item() for state in (plain, actual))
            size = max(exact[name].norm().item(), 1e-6)
            ratio = (theirs / size + floor) / (own / size + floor)
            kind = "gradients" if name.endswith(".grad") else "statistics" if "running_" in name else "values"
            parts = name.partition(": ")[2].split(".")
            role = re.sub(r"\d", "", ".".join(parts[-3:] if parts[-1] == "grad" else parts[-2:]))
            for group in (f"all {kind}", role):
                found.setdefault(group, []).append(ratio)
    ratios = {group: statistics.median(of_group) for group, of_group in found.items()}
    faults = [
        f"{group}: {ratio:.2f} times the plain path's own error"
        for group, ratio in ratios.items()
        if not ratio <= (factor if group.startswith("all ") else 2 * factor)
    ]
    assert not faults, "less exact than allowed:\n" + "\n".join(faults)


def peer(name: str):
    """Somebody else's tool, from the extra ``peers``; where it is not installed, the test is skipped."""
    return pytest.importorskip(name, reason=f'{name} comes with pip install -e ".[test,peers]"')


@contextmanager
def evaluation(model: nn.Module):
    """``model`` in eval mode for a moment; modules that were frozen in eval mode stay so."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield model
    finally:
        for module, training in modes.items():
            module.training = training

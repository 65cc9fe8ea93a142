"""The demo's GPT without dropout: through the CPU kernels its loss follows torch's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import orchard
from orchard.attention.compat import serve as right
from orchard.cli import corpus
from orchard.cli.minigpt import MiniGPT, Shape, Text, Trainer, batches
from orchard.dispatch import planner
from orchard.integrations import torch_sdpa
from orchard.testing.budget import OUTPUT_FACTOR

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STEPS = 20
SEED = 3


def curve(
    route: Callable[[], AbstractContextManager[None]], dtype: torch.dtype = torch.float32
) -> Tensor:
    """The loss before each step."""
    text = Text(corpus.text())
    shape = Shape(len(text.alphabet), dropout=0.0, batch=4)
    torch.manual_seed(SEED)
    trainer = Trainer(MiniGPT(shape).to(dtype), STEPS)
    with route():
        losses = [trainer.step(batch) for batch in batches(text.training, shape, STEPS, SEED)]
    return torch.tensor(losses, dtype=torch.float64)


def by_definition() -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.MATH)


@cache
def exact() -> Tensor:
    return curve(by_definition, torch.float64)


@cache
def torchs() -> Tensor:
    return curve(by_definition)


def excess(ours: Tensor) -> float:
    """How far the curve leaves fp64's beyond what rounding explains; at most 0 where it follows.

    Rounding may take it twice as far as it takes torch's fp32 curve anywhere, and one step of a
    loss in fp32 on top.
    """
    drift = float((torchs() - exact()).abs().max())
    allowed = OUTPUT_FACTOR * drift + torch.finfo(torch.float32).eps * exact().abs()
    return float(((ours - exact()).abs() - allowed).max())


def test_loss_follows_torchs(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHARD_BACKEND", "cpu")
    planner.reset()
    ours = curve(orchard.enabled)
    assert orchard.stats()["calls"] == {
        "forward": {"cpu": 2 * STEPS},
        "backward": {"cpu": 2 * STEPS},
    }
    assert float(exact()[-1]) < 0.8 * float(exact()[0]), "it learns something"
    assert excess(ours) <= 0


def test_a_small_error_leaves_the_curve(
    best_isa: None, fresh_planner: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of one part in ten thousand is more than rounding explains."""
    monkeypatch.setenv("ORCHARD_BACKEND", "cpu")
    planner.reset()
    monkeypatch.setattr(torch_sdpa, "serve", lambda *call: 1.0001 * right(*call))
    assert excess(curve(orchard.enabled)) > 0

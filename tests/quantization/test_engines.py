"""Engines are counted, and one that fails hands over to the definition, seen by the user."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import orchard
from orchard.backends.cpu import quantized
from orchard.dispatch import planner
from orchard.errors import ArgumentValueError, FallbackWarning, NativeError
from orchard.quantization import QuantizationConfig, engines, explain, quantized_attention

pytestmark = pytest.mark.dispatch

FP8 = QuantizationConfig(value_precision="fp8")


class Failing:
    """The native kernel, which raises from the moment it is told to."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.error: Exception | None = None
        self.attempts = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        return self.real(*args, **options)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    planner.reset()
    orchard.stats(reset=True)
    failing = Failing(quantized.attend)
    monkeypatch.setattr(quantized, "attend", failing)
    yield failing
    planner.reset()


def operands(rows: int = 12) -> list[Tensor]:
    source = Generator().manual_seed(6)
    return [torch.randn(1, 2, rows, 16, generator=source) for _ in range(3)]


def by_definition(given: list[Tensor], **options: Any) -> Tensor:
    """What the engine that serves everything gives."""
    exact = (operand.stored.dequantize(torch.float32) for operand in explain(*given).call[:3])
    return orchard.attention(*exact, **options)


@pytest.mark.usefixtures("kernel")
def test_calls_are_counted_by_engine() -> None:
    """Each call once under its engine; what the definition calls is counted as attention too."""
    for _ in range(3):
        quantized_attention(*operands())
    quantized_attention(*operands(), config=FP8)
    stats = orchard.stats()
    assert stats["calls"] == {
        "quantized_forward": {"cpu": 3, "dequantise": 1},
        "forward": {"cpu": 1},
    }
    assert stats["kernels"] == {"cpu/stored": 3, "dequantise/attention": 1, "cpu/native": 1}
    assert stats["fallbacks"] == [
        {
            "stage": "quantized_forward",
            "backend": "cpu",
            "code": "precision",
            "calls": 1,
            "reason": "reads no fp8, which value is stored as",
            "fix": "use int8 or int4",
        }
    ]
    assert orchard.advice() == [
        "1 call (quantized_forward) passed cpu by: reads no fp8, which value is stored as. "
        "To change that: use int8 or int4."
    ]


@pytest.mark.usefixtures("kernel")
def test_what_is_asked_for_is_no_fallback() -> None:
    """Where a backend is named, nobody was passed by; explaining counts nothing."""
    explain(*operands())
    quantized_attention(*operands(), backend="reference")
    stats = orchard.stats()
    assert stats["calls"] == {"quantized_forward": {"dequantise": 1}, "forward": {"reference": 1}}
    assert stats["fallbacks"] == []


@pytest.mark.grad
def test_gradients_are_counted_as_those_of_attention(kernel: Failing) -> None:
    leaves = [t.requires_grad_() for t in operands()]
    quantized_attention(*leaves).sum().backward()
    assert kernel.attempts == 1
    assert orchard.stats()["calls"] == {"quantized_forward": {"cpu": 1}, "backward": {"cpu": 1}}


def test_a_failure_hands_over(kernel: Failing) -> None:
    """One warning, one entry, the definition's answer; the problem is not tried again."""
    given = operands()
    kernel.error = NativeError("device lost")
    with pytest.warns(FallbackWarning, match="cpu failed in a quantized forward.*device lost"):
        out = quantized_attention(*given)
    assert torch.equal(out, by_definition(given))
    assert torch.equal(quantized_attention(*given), out)
    assert kernel.attempts == 1
    stats = orchard.stats()
    assert stats["calls"]["quantized_forward"] == {"dequantise": 2}
    assert stats["failures"] == [
        {
            "backend": "cpu",
            "stage": "quantized_forward",
            "error": "NativeError: device lost",
            "times": 1,
        }
    ]
    assert [(f["code"], f["calls"]) for f in stats["fallbacks"]] == [("failed", 2)]
    plan = explain(*given)
    assert plan.engine.name == "dequantise"
    assert "cpu: its kernel failed on this problem: NativeError: device lost" in str(plan)
    assert plan.attention is not None
    assert plan.attention.backend == "cpu"  # attention's own kernels are not set aside


OTHERS: dict[str, dict[str, Any]] = {
    "rows": {},
    "format": {"config": QuantizationConfig(key_precision="int4")},
    "options": {"causal": True},
    "output": {"config": QuantizationConfig(output_precision="bf16")},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_problems_are_not_set_aside(name: str, kernel: Failing) -> None:
    """A problem that differs in anything is tried on its own, and warns no second time."""
    kernel.error = NativeError("out of luck")
    with pytest.warns(FallbackWarning):
        quantized_attention(*operands())
    kernel.error = None
    given = operands(13) if name == "rows" else operands()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized_attention(*given, **OTHERS[name])
    assert kernel.attempts == 2
    assert orchard.stats()["calls"]["quantized_forward"] == {"dequantise": 1, "cpu": 1}
    planner.reset()
    quantized_attention(*operands())
    assert kernel.attempts == 3


def test_the_dropout_is_the_same(kernel: Failing) -> None:
    """The seed is drawn once: a fall-back drops what the kernel would have dropped."""
    given, failed, served = operands(), Generator().manual_seed(3), Generator().manual_seed(3)
    expected = by_definition(given, dropout_p=0.4, generator=served)
    kernel.error = NativeError("device lost")
    with pytest.warns(FallbackWarning):
        out = quantized_attention(*given, dropout_p=0.4, generator=failed)
    assert torch.equal(out, expected)
    assert torch.equal(failed.get_state(), served.get_state())


@pytest.mark.grad
def test_gradients_after_a_failure(kernel: Failing) -> None:
    """They are those of attention at the dequantised values, to the bit."""
    given = operands()
    exact = [operand.stored.dequantize().requires_grad_() for operand in explain(*given).call[:3]]
    leaves = [t.clone().requires_grad_() for t in given]
    kernel.error = NativeError("device lost")
    with pytest.warns(FallbackWarning):
        out = quantized_attention(*leaves)
    upstream = torch.randn(out.shape, generator=Generator().manual_seed(1))
    found = torch.autograd.grad(out, leaves, upstream)
    expected = torch.autograd.grad(orchard.attention(*exact), exact, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_whoever_insists_gets_the_error(kernel: Failing) -> None:
    kernel.error = NativeError("device lost")
    with pytest.raises(NativeError, match="device lost"):
        quantized_attention(*operands(), backend="cpu")
    assert orchard.stats()["failures"] == []


def test_whoever_insists_gets_the_error_after_others_were_handed_over(kernel: Failing) -> None:
    kernel.error = NativeError("device lost")
    with pytest.warns(orchard.FallbackWarning):
        quantized_attention(*operands())
    with pytest.raises(NativeError, match="device lost"):
        quantized_attention(*operands(), backend="cpu")
    kernel.error = None
    quantized_attention(*operands(), backend="cpu")
    assert orchard.stats()["calls"]["quantized_forward"] == {"dequantise": 1, "cpu": 1}


@pytest.mark.parametrize(("name", "value"), [("ON_ERROR", "raise"), ("BACKEND", "cpu")])
def test_the_environment_stops_the_handing_over(
    name: str, value: str, kernel: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ORCHARD_{name}", value)
    planner.reset()
    kernel.error = NativeError("device lost")
    with pytest.raises(NativeError, match="device lost"):
        quantized_attention(*operands())
    kernel.error = None
    quantized_attention(*operands())
    assert orchard.stats()["calls"] == {"quantized_forward": {"cpu": 1}}
    monkeypatch.undo()


def test_wrong_arguments_are_no_failure(kernel: Failing) -> None:
    """Orchard's own errors are raised as they are, and nobody is set aside."""
    kernel.error = ArgumentValueError("scales is wrong")
    with pytest.raises(ArgumentValueError, match="scales is wrong"):
        quantized_attention(*operands())
    kernel.error = None
    quantized_attention(*operands())
    assert kernel.attempts == 2


def test_the_last_engine_raises(kernel: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nobody after the definition."""

    def broken(call: engines.QuantizedCall) -> engines.Served:
        raise RuntimeError("no luck")

    last = engines.ENGINES[-1]
    mine = engines.Engine(last.name, last.kernel, "fails", last.reasons, broken, last.explain)
    monkeypatch.setattr(engines, "ENGINES", (mine,))
    with pytest.raises(RuntimeError, match="no luck"):
        quantized_attention(*operands())


@pytest.mark.stress
def test_failing_in_many_threads(kernel: Failing) -> None:
    """Eight threads that meet the failure at once are all served rightly, with one warning."""
    given = operands()
    expected = by_definition(given)
    orchard.stats(reset=True)
    kernel.error = NativeError("device lost")
    start = threading.Barrier(8)

    def work(_: int) -> Tensor:
        start.wait()
        return quantized_attention(*given)

    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("always")
        results = list(pool.map(work, range(8)))
    assert all(torch.equal(result, expected) for result in results)
    assert len(caught) == 1
    stats = orchard.stats()
    assert stats["calls"]["quantized_forward"] == {"dequantise": 8}
    (failure,) = stats["failures"]
    assert 1 <= failure["times"] <= 8

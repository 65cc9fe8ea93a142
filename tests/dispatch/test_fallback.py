"""A kernel that fails at run time: the next backend computes the same function."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import orchard
from orchard.attention import reference
from orchard.attention.dropout import draw_seed
from orchard.attention.ops import Settings
from orchard.attention.problem import (
    Gradients,
    Options,
    Problem,
    Saved,
    Tensors,
    Upstream,
    describe,
    drop_threshold,
)
from orchard.backends.aten import AtenBackend
from orchard.backends.reference import ReferenceBackend
from orchard.dispatch import planner as plans
from orchard.dispatch.backend import Backend
from orchard.dispatch.planner import Planner
from orchard.testing.budget import Results, judge

pytestmark = [pytest.mark.dispatch, pytest.mark.grad, pytest.mark.dropout]

Use = Callable[..., Planner]
STAGES = ("forward", "backward")


class Flaky(ReferenceBackend):
    """The reference, to the bit, until it is told to fail."""

    name = "flaky"
    summary = "for tests"
    failing: ClassVar[tuple[str, ...]] = ()
    error: ClassVar[BaseException] = RuntimeError("device lost")

    def __init__(self) -> None:
        super().__init__()
        self.attempts = 0

    def work(self, stage: str) -> None:
        self.attempts += 1
        if stage in self.failing:
            raise self.error

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        self.work("forward")
        return super().forward(problem, kernel, tensors)

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        self.work("backward")
        return super().backward(problem, kernel, tensors, saved, upstream)


class Second(Flaky):
    """Another one that may fail, with an error of its own."""

    name = "second"
    error: ClassVar[BaseException] = ArithmeticError("second failed too")


class Wide(Flaky):
    """Computes in fp64 and rounds once: other arithmetic than the reference's."""

    name = "wide"

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        self.work("forward")
        out, lse = reference.attend(widened(tensors), problem.options)
        return Saved(out.to(problem.dtype), lse.float())

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        self.work("backward")
        wide = Upstream(upstream.out.double(), None)
        found = reference.gradients(widened(tensors), problem.options, wide)
        return Gradients(*(grad.to(problem.dtype) for grad in found[:3]), None)


def widened(tensors: Tensors) -> Tensors:
    query, key, value = (operand.double() for operand in tensors[:3])
    return Tensors(query, key, value, tensors.mask, tensors.seed)


@contextmanager
def caught_warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def fail_in(monkeypatch: pytest.MonkeyPatch, kind: type[Flaky], *stages: str) -> None:
    monkeypatch.setattr(kind, "failing", stages)


def attempts(name: str) -> int:
    backend = plans.planner().backends[name]
    assert isinstance(backend, Flaky)
    return backend.attempts


def operands(rows: int = 12, **options: Any) -> list[Tensor]:
    make = torch.Generator().manual_seed(11)
    return [torch.randn(2, 4, rows, 16, generator=make, **options) for _ in range(3)]


# In the middle of training


STEPS, BREAK = 6, 3


def train(dropout_p: float, at_step: Callable[[int], None] = lambda _: None) -> list[Tensor]:
    """Gradients of every step of a small attention layer in training, dropout on."""
    torch.manual_seed(5)
    x = torch.randn(2, 4, 12, 16)
    weights = [torch.randn(16, 16).requires_grad_() for _ in range(3)]
    history: list[Tensor] = []
    for step in range(STEPS):
        at_step(step)
        query, key, value = (x @ weight for weight in weights)
        out = orchard.attention(query, key, value, causal=True, dropout_p=dropout_p)
        grads = torch.autograd.grad(out.square().mean(), weights)
        history += grads
        with torch.no_grad():
            for weight, grad in zip(weights, grads, strict=True):
                weight -= 0.5 * grad
    return history


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on(use_backends: Use, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Gradients of every step equal those of an undisturbed run; one warning; the journal knows."""
    use_backends(Flaky, ReferenceBackend)
    undisturbed = train(0.3)
    assert orchard.stats(reset=True)["calls"] == {
        "forward": {"flaky": STEPS},
        "backward": {"flaky": STEPS},
    }
    without_dropout = train(0.0)
    assert not any(map(torch.equal, undisturbed, without_dropout))
    plans.reset()
    orchard.stats(reset=True)

    def break_down(step: int) -> None:
        if step == BREAK:
            fail_in(monkeypatch, Flaky, stage)

    with caught_warnings() as caught:
        disturbed = train(0.3, break_down)
    assert len(disturbed) == 3 * STEPS
    assert all(map(torch.equal, disturbed, undisturbed))

    assert [warning.category for warning in caught] == [orchard.FallbackWarning]
    assert f"flaky failed in a {stage}" in str(caught[0].message)
    assert "RuntimeError: device lost" in str(caught[0].message)
    stats = orchard.stats()
    other = "backward" if stage == "forward" else "forward"
    assert stats["calls"] == {
        stage: {"flaky": BREAK, "reference": STEPS - BREAK},
        other: {"flaky": STEPS},
    }
    assert stats["failures"] == [
        {"backend": "flaky", "stage": stage, "error": "RuntimeError: device lost", "times": 1}
    ]
    (fallback,) = stats["fallbacks"]
    assert (fallback["stage"], fallback["backend"], fallback["code"], fallback["calls"]) == (
        stage,
        "flaky",
        "failed",
        STEPS - BREAK,
    )
    assert "device lost" in fallback["reason"]
    assert orchard.advice()[0].startswith(
        f"flaky failed in a {stage} and was set aside: RuntimeError: device lost."
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("failing", [(), ("forward",), ("backward",), STAGES], ids=str)
def test_gradients_stay_within_budget(
    use_backends: Use,
    monkeypatch: pytest.MonkeyPatch,
    failing: tuple[str, ...],
    dtype: torch.dtype,
) -> None:
    """Whichever direction other arithmetic takes over, the same dropout bits and budget hold."""
    use_backends(Wide, ReferenceBackend)
    inputs = operands(dtype=dtype, requires_grad=True)
    orchard.explain(*inputs, dropout_p=0.4)
    fail_in(monkeypatch, Wide, *failing)
    with caught_warnings() as caught:
        out, lse = orchard.attention(
            *inputs,
            causal=True,
            dropout_p=0.4,
            return_lse=True,
            generator=torch.Generator().manual_seed(2),
        )
        upstream = Upstream(torch.randn_like(out), None)
        grads = torch.autograd.grad(out, inputs, upstream.out)
    assert len(caught) == (1 if failing else 0)  # one error, one warning
    assert orchard.stats()["calls"] == {
        stage: {"reference" if stage in failing else "wide": 1} for stage in STAGES
    }
    seed = draw_seed(torch.device("cpu"), torch.Generator().manual_seed(2))
    tensors = Tensors(*(t.detach() for t in inputs), None, seed)
    options = Settings(None, 0.0, 0.4, -1, 0, False, "auto").options(*tensors[:2])
    assert options.threshold == drop_threshold(0.4)
    assert options.band is not None
    verdicts = judge(Results(out.detach(), lse.detach(), *grads), tensors, options, upstream)
    assert len(verdicts) == 5
    assert [str(verdict) for verdict in verdicts if not verdict.ok] == []


@pytest.mark.compile
def test_a_compiled_model_goes_on(use_backends: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a compiled function a failing backend is replaced without compiling again."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    use_backends(Flaky, ReferenceBackend)
    torch._dynamo.reset()
    compiles = CompileCounterWithBackend("aot_eager")
    step = torch.compile(orchard.attention, backend=compiles, fullgraph=True)
    inputs = operands(requires_grad=True)

    def gradients() -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return torch.autograd.grad(step(*inputs, dropout_p=0.3).square().sum(), inputs)

    undisturbed = gradients()
    fail_in(monkeypatch, Flaky, *STAGES)
    with caught_warnings() as caught:
        disturbed = gradients()
    assert all(map(torch.equal, disturbed, undisturbed))
    assert compiles.frame_count == 1
    assert [warning.category for warning in caught] == [orchard.FallbackWarning]
    assert orchard.stats()["calls"] == {stage: {"flaky": 1, "reference": 1} for stage in STAGES}
    torch._dynamo.reset()


# What is not replaced


@pytest.mark.parametrize("stage", STAGES)
def test_on_error_raise(
    environment: Use, use_backends: Use, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """ORCHARD_ON_ERROR=raise raises the kernel's own error in either direction."""
    use_backends(Flaky, ReferenceBackend)
    environment(ORCHARD_ON_ERROR="raise")
    inputs = operands(requires_grad=True)
    orchard.explain(*inputs)
    fail_in(monkeypatch, Flaky, stage)
    with pytest.raises(RuntimeError) as raised:
        orchard.attention(*inputs, dropout_p=0.3).sum().backward()
    assert raised.value is Flaky.error
    assert "reference" not in orchard.stats()["kernels"]
    assert inputs[0].grad is None
    fail_in(monkeypatch, Flaky)
    orchard.attention(*inputs, dropout_p=0.3).sum().backward()  # and nothing was set aside
    assert orchard.stats()["calls"]["backward"] == {"flaky": 1}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["argument", "variable"])
def test_an_insisted_backend_is_not_replaced(
    environment: Use, use_backends: Use, monkeypatch: pytest.MonkeyPatch, how: str, stage: str
) -> None:
    """A backend that was asked for raises its own error, and is tried again at the next call."""
    use_backends(Flaky, ReferenceBackend)
    environment(**({"ORCHARD_BACKEND": "flaky"} if how == "variable" else {}))
    options: dict[str, Any] = {"backend": "flaky"} if how == "argument" else {}
    inputs = operands(requires_grad=True)
    orchard.explain(*inputs, **options)
    fail_in(monkeypatch, Flaky, stage)
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            orchard.attention(*inputs, **options).sum().backward()
        assert raised.value is Flaky.error
    fail_in(monkeypatch, Flaky)
    orchard.attention(*inputs, **options).sum().backward()
    calls = orchard.stats()["calls"]
    assert set(calls["forward"]) == set(calls["backward"]) == {"flaky"}


def test_wrong_arguments_are_no_failure(use_backends: Use) -> None:
    """A wrong argument raises as ever and is counted against no backend."""
    use_backends(Flaky, ReferenceBackend)
    query, key, value = operands()
    orchard.attention(query, key, value)
    before = attempts("flaky")
    wrong: list[dict[str, Any]] = [
        {"mask": torch.zeros(3, 3)},
        {"dropout_p": 1.5},
        {"scale": float("nan")},
        {"window": (-5, 0)},
    ]
    for options in wrong:
        with pytest.raises(orchard.ArgumentValueError):
            orchard.attention(query, key, value, **options)
    with pytest.raises(orchard.ArgumentValueError):
        orchard.attention(query, key[..., :8], value)
    stats = orchard.stats()
    assert stats["failures"] == []
    assert stats["calls"] == {"forward": {"flaky": 1}}
    assert attempts("flaky") == before


@pytest.mark.parametrize(
    "error",
    [
        orchard.ArgumentValueError("mask is wrong"),
        orchard.ArgumentTypeError("query is wrong"),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("stage", STAGES)
def test_what_passes_through_a_kernel(
    use_backends: Use, monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
) -> None:
    """Orchard's own errors and the user's interrupt leave a kernel untouched, and no trace."""
    use_backends(Flaky, ReferenceBackend)
    inputs = operands(requires_grad=True)
    orchard.explain(*inputs)
    monkeypatch.setattr(Flaky, "error", error)
    fail_in(monkeypatch, Flaky, stage)
    with pytest.raises(type(error)) as raised:
        orchard.attention(*inputs).sum().backward()
    assert raised.value is error
    assert orchard.stats(reset=True)["failures"] == []
    fail_in(monkeypatch, Flaky)
    orchard.attention(*inputs).sum().backward()
    assert orchard.stats()["calls"] == {stage: {"flaky": 1} for stage in STAGES}


def test_the_last_backend_raises_its_own_error(
    use_backends: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody is left the last error comes out, and every call tells the same."""
    use_backends(Flaky, Second)
    query, key, value = operands()
    orchard.explain(query, key, value)
    fail_in(monkeypatch, Flaky, *STAGES)
    fail_in(monkeypatch, Second, *STAGES)
    with caught_warnings() as caught:
        for _ in range(2):
            with pytest.raises(ArithmeticError) as raised:
                orchard.attention(query, key, value)
            assert raised.value is Second.error
    assert len(caught) == 1
    assert "flaky" in str(caught[0].message)
    assert orchard.stats()["calls"] == {}
    fail_in(monkeypatch, Second)
    orchard.attention(query, key, value)
    assert orchard.stats()["calls"] == {"forward": {"second": 1}}


def test_the_only_backend_raises_its_own_error(
    use_backends: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that nobody can take over is raised without a warning."""
    use_backends(Flaky)
    query, key, value = operands()
    orchard.explain(query, key, value)
    fail_in(monkeypatch, Flaky, "forward")
    with pytest.raises(RuntimeError) as raised:
        orchard.attention(query, key, value)
    assert raised.value is Flaky.error


def test_failing_over_twice(use_backends: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two failing backends are both set aside within one call, each with a warning."""
    use_backends(Flaky, Second, ReferenceBackend)
    query, key, value = operands()
    expected = orchard.attention(query, key, value, backend="reference")
    orchard.explain(query, key, value)
    fail_in(monkeypatch, Flaky, "forward")
    fail_in(monkeypatch, Second, "forward")
    with caught_warnings() as caught:
        assert torch.equal(orchard.attention(query, key, value), expected)
    assert [str(warning.message).split()[1] for warning in caught] == ["flaky", "second"]
    plan = orchard.explain(query, key, value)
    assert plan.backend == "reference"
    for name, words in (("flaky", "device lost"), ("second", "second failed too")):
        (reason,) = plan.why_not(name)
        assert reason.code == "failed"
        assert words in reason.sentence


# Quarantine


def test_quarantine_is_of_one_backend_and_one_problem(
    use_backends: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The problem that failed is not tried again; every other problem still is."""
    use_backends(Flaky, ReferenceBackend)
    here, elsewhere = operands(12), operands(13)
    orchard.explain(*here)
    fail_in(monkeypatch, Flaky, "forward")
    with pytest.warns(orchard.FallbackWarning):
        orchard.attention(*here)
    fail_in(monkeypatch, Flaky)
    tried = attempts("flaky")
    orchard.attention(*here)
    assert attempts("flaky") == tried
    orchard.attention(*elsewhere)
    assert attempts("flaky") == tried + 1
    orchard.attention(*here, causal=True)
    orchard.attention(*(t.transpose(0, 1).contiguous().transpose(0, 1) for t in here))
    assert attempts("flaky") == tried + 3
    assert orchard.stats()["calls"] == {"forward": {"reference": 2, "flaky": 3}}
    assert orchard.explain(*here).why_not("flaky")[0].code == "failed"
    assert orchard.explain(*elsewhere).backend == "flaky"


def test_reset_lifts_the_quarantine(use_backends: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new planner tries again."""
    use_backends(Flaky, ReferenceBackend)
    inputs = operands()
    orchard.explain(*inputs)
    fail_in(monkeypatch, Flaky, "forward")
    with pytest.warns(orchard.FallbackWarning):
        orchard.attention(*inputs)
    fail_in(monkeypatch, Flaky)
    plans.reset()
    assert orchard.explain(*inputs).backend == "flaky"


def test_one_error_warns_once(use_backends: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error on several problems is one warning, and each failure is counted."""
    use_backends(Flaky, ReferenceBackend)
    orchard.explain(*operands())
    fail_in(monkeypatch, Flaky, "forward")
    with caught_warnings() as caught:
        for rows in (3, 4, 5, 3, 4, 5):
            orchard.attention(*operands(rows))
    assert len(caught) == 1
    (failure,) = orchard.stats()["failures"]
    assert failure["times"] == 3
    monkeypatch.setattr(Flaky, "error", RuntimeError("something else"))
    with pytest.warns(orchard.FallbackWarning, match="something else"):
        orchard.attention(*operands(6))


@pytest.mark.stress
def test_failing_in_many_threads(use_backends: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads that meet the failure at once are all served rightly, with one warning."""
    use_backends(Flaky, ReferenceBackend)
    inputs = operands()
    expected = orchard.attention(*inputs, backend="reference")
    orchard.explain(*inputs)
    fail_in(monkeypatch, Flaky, "forward")
    orchard.stats(reset=True)
    start = threading.Barrier(8)

    def work(_: int) -> Tensor:
        start.wait()
        return orchard.attention(*inputs)

    with caught_warnings() as caught, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    assert all(torch.equal(result, expected) for result in results)
    assert len(caught) == 1
    stats = orchard.stats()
    assert stats["calls"] == {"forward": {"reference": 8}}
    (failure,) = stats["failures"]
    assert 1 <= failure["times"] <= 8


# (out, lse, seed) is the interchange


def mask_with_an_empty_row(dtype: torch.dtype) -> Tensor:
    """[1, 1, 12, 12], where row 3 sees nothing and every other row sees its own key."""
    seen = (torch.rand(12, 12, generator=torch.Generator().manual_seed(4)) > 0.4) | torch.eye(
        12, dtype=torch.bool
    )
    seen[3] = False
    if dtype == torch.bool:
        return seen[None, None]
    return torch.zeros(1, 1, 12, 12, dtype=dtype).masked_fill(~seen, -torch.inf)


INTERCHANGED: dict[str, tuple[Callable[[], Tensors], Options]] = {
    "plain": (lambda: Tensors(*operands()), Options(0.25)),
    "causal": (
        lambda: Tensors(*operands()),
        Settings(0.3, 0.0, 0.0, -1, 0, False, "auto").options(*operands()[:2]),
    ),
    "bfloat16": (lambda: Tensors(*operands(dtype=torch.bfloat16)), Options(0.25)),
    "float16": (lambda: Tensors(*operands(dtype=torch.float16)), Options(0.25)),
    "grouped heads": (
        lambda: Tensors(operands()[0], operands(9)[1][:, :2], operands(9)[2][:, :2]),
        Options(0.25),
    ),
    "bool mask with an empty row": (
        lambda: Tensors(*operands(), mask_with_an_empty_row(torch.bool)),
        Options(0.25),
    ),
    "additive mask with an empty row": (
        lambda: Tensors(*operands(), mask_with_an_empty_row(torch.float32)),
        Options(0.25),
    ),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [(ReferenceBackend, AtenBackend), (AtenBackend, ReferenceBackend)],
    ids=["reference to aten", "aten to reference"],
)
@pytest.mark.parametrize("name", INTERCHANGED)
def test_interchange(name: str, first: type[Backend], second: type[Backend]) -> None:
    """A backward by one backend after a forward by another is within budget."""
    make, options = INTERCHANGED[name]
    tensors = make()
    ahead = describe(tensors, options, lse=True, grad=True)
    forwarder, backwarder = first(), second()
    kernel = forwarder.select(ahead)[0]
    assert kernel is not None
    saved = forwarder.forward(ahead, kernel.kernel, tensors)
    upstream = Upstream(torch.randn_like(saved.out), None)
    back = describe(tensors, options, stage="backward", grad_out=upstream.out, grad=True)
    kernel = backwarder.select(back)[0]
    assert kernel is not None
    grads = backwarder.backward(back, kernel.kernel, tensors, saved, upstream)
    verdicts = judge(Results(*saved, *grads[:3]), tensors, options, upstream)
    assert len(verdicts) == 5
    assert [str(verdict) for verdict in verdicts if not verdict.ok] == []


def test_interchange_through_the_call(use_backends: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """aten's forward and, when its backward fails, the reference's give the gradient."""
    inputs = operands(requires_grad=True)

    def broken(*_: object) -> Gradients:
        raise RuntimeError("no backward today")

    orchard.explain(*inputs)
    monkeypatch.setattr(AtenBackend, "backward", broken)
    out, lse = orchard.attention(*inputs, return_lse=True)
    upstream = Upstream(torch.randn_like(out), None)
    with pytest.warns(orchard.FallbackWarning, match="aten failed in a backward"):
        grads = torch.autograd.grad(out, inputs, upstream.out)
    assert orchard.stats()["calls"] == {"forward": {"aten": 1}, "backward": {"reference": 1}}
    tensors = Tensors(*(t.detach() for t in inputs))
    verdicts = judge(Results(out.detach(), lse.detach(), *grads), tensors, Options(0.25), upstream)
    assert len(verdicts) == 5
    assert [str(verdict) for verdict in verdicts if not verdict.ok] == []

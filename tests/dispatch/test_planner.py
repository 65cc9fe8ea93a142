"""Plans: who serves a call, why each other backend does not, and who is there at all."""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import orchard
from orchard.attention.problem import (
    Gradients,
    Options,
    Problem,
    Saved,
    Tensors,
    Upstream,
    describe,
)
from orchard.backends.aten import AtenBackend
from orchard.backends.reference import ReferenceBackend
from orchard.dispatch import planner as plans
from orchard.dispatch.backend import Reason
from orchard.dispatch.planner import Plan, Planner

pytestmark = [pytest.mark.dispatch]

Use = Callable[..., Planner]
backends = importlib.import_module("orchard.backends")  # `orchard.backends` is the function
SHIPPED = backends.REGISTRY


def operands(rows: int = 8, dim: int = 16, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(2, 4, rows, dim, generator=make, **options) for _ in range(3))  # type: ignore[return-value]


def problem_of(*tensors: Tensor, **options: Any) -> Problem:
    return describe(Tensors(*tensors), Options(0.25, **options))


def squeezed(text: str) -> str:
    return "".join(text.split())


def table_of(plan: Plan) -> dict[str, tuple[str, str, str]]:
    """The first table of a plan's text: (verdict, why, fix) by backend, wrapped lines joined."""
    lines = str(plan).splitlines()
    rule = next(n for n, line in enumerate(lines) if re.fullmatch("[- ]*-[- ]*", line))
    columns = [match.span() for match in re.finditer("-+", lines[rule])]
    rows: dict[str, tuple[str, str, str]] = {}
    current = ""
    for line in lines[rule + 1 :]:
        if not line.strip():
            break
        cells = [line[start:end].strip() for start, end in columns]
        if cells[0]:
            current = cells[0]
            rows[current] = ("", "", "")
        joined = (f"{have} {more}" for have, more in zip(rows[current], cells[1:], strict=True))
        rows[current] = tuple(squeezed(text) for text in joined)  # type: ignore[assignment]
    return rows


# A plan is a value


def test_plan_names_the_choice_and_every_other_backend() -> None:
    """A plain call is served by aten, and the reference says that it would serve it too."""
    plan = orchard.explain(*operands())
    assert (plan.backend, plan.kernel, plan.requested) == ("aten", "cpu-flash", "auto")
    assert [rejection.backend for rejection in plan.rejected] == ["reference"]
    assert [reason.code for reason in plan.why_not("reference")] == ["order"]
    assert plan.why_not("aten") == ()
    assert plan.backward is None


def test_plan_is_a_value() -> None:
    """Plans of equal problems are equal, hash alike and cannot be changed."""
    problem = problem_of(*operands())
    first, second = plans.planner().plan(problem), plans.reset().plan(problem)
    assert first is not second
    assert first == second
    assert hash(first) == hash(second)
    assert first != plans.planner().plan(problem, "reference")
    with pytest.raises(FrozenInstanceError):
        first.backend = "other"  # type: ignore[misc]


def test_plan_is_cached() -> None:
    """The same problem gets the same plan object, whatever its values."""
    query, key, value = operands()
    plan = orchard.explain(query, key, value)
    assert orchard.explain(query + 1, key.clone(), value) is plan
    assert orchard.explain(query, key, value, backend="aten") is not plan


def test_plan_depends_on_strides() -> None:
    """A changed stride is another problem, with a plan of its own."""
    query, key, value = operands()
    plan = orchard.explain(query, key, value)
    permuted = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert permuted.shape == query.shape
    other = orchard.explain(permuted, key, value)
    assert other is not plan
    assert other.backend == "aten"
    strided = torch.randn(2, 4, 8, 32)[..., ::2]
    assert orchard.explain(strided, key, value).backend == "reference"


def test_plan_depends_on_what_is_wanted() -> None:
    """Gradients, lse and deterministic algorithms are part of the problem."""
    query, key, value = operands()
    plain = orchard.explain(query, key, value).problem
    assert not plain.grad
    assert not plain.lse
    assert not plain.deterministic
    assert orchard.explain(query, key, value, return_lse=True).problem.lse
    wanted = orchard.explain(query.requires_grad_(), key, value)
    assert wanted.problem.grad
    assert wanted.backward is not None
    assert wanted.backward.problem.stage == "backward"
    with torch.no_grad():
        assert not orchard.explain(query, key, value).problem.grad
    torch.use_deterministic_algorithms(True)
    try:
        assert orchard.explain(query, key, value).problem.deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_explain_tells_what_serves() -> None:
    """The plan that explain() shows is the one that attention() follows, backward included."""
    query, key, value = operands(requires_grad=True)
    for options in ({}, {"softcap": 2.0}, {"backend": "reference"}):
        plan = orchard.explain(query, key, value, **options)
        orchard.attention(query, key, value, **options).sum().backward()
        assert plan.backend is not None
        assert plan.backward is not None
        assert orchard.stats(reset=True)["calls"] == {
            "forward": {plan.backend: 1},
            "backward": {plan.backward.backend: 1},
        }


def test_explain_computes_nothing() -> None:
    """explain() counts no call and draws no random number."""
    query, key, value = operands()
    state = torch.get_rng_state()
    orchard.explain(query, key, value, dropout_p=0.5)
    assert orchard.stats()["calls"] == {}
    assert torch.equal(torch.get_rng_state(), state)


def test_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many problems go by, the cache stays below its limit and plans stay right."""
    monkeypatch.setattr(plans, "_CACHED_PLANS", 8)
    planner = plans.planner()
    for rows in range(1, 30):
        plan = planner.plan(problem_of(*operands(rows)))
        assert plan.backend == "aten"
        assert plan.problem.query_length == rows
        assert 0 < len(planner._plans) <= 8


def test_threads_that_race_share_one_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads at their first call get the same planner, so that quarantine is not lost."""
    entered, waiting = threading.Event(), threading.Event()
    load, lock = backends.load, threading.Lock()

    class Watched:
        """A lock that tells when somebody has to wait for it."""

        def __enter__(self) -> None:
            if not lock.acquire(blocking=False):
                waiting.set()
                lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def slow_load() -> tuple[Any, ...]:
        entered.set()
        assert waiting.wait(30)
        return load()

    monkeypatch.setattr(plans, "_planner", None)
    monkeypatch.setattr(plans, "_planner_lock", Watched())
    monkeypatch.setattr(backends, "load", slow_load)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(plans.planner)
        assert entered.wait(30)
        second = pool.submit(plans.planner)
    assert first.result() is second.result()


# The text of a plan


class Narrow(ReferenceBackend):
    """Serves nothing that the test asks for, for several reasons with fixes."""

    name = "narrow"
    summary = "for tests"
    capabilities = (
        replace(
            ReferenceBackend.capabilities[0],
            kernel="narrow-kernel",
            dtypes=(torch.float16,),
            max_head_dim=8,
            softcap=False,
            dropout=False,
        ),
    )


def test_text_has_the_choice_first_then_every_reason_and_fix(use_backends: Use) -> None:
    """print(explain()) shows the choice, then each other backend with all reasons and fixes."""
    use_backends(Narrow, AtenBackend, ReferenceBackend)
    plan = orchard.explain(*operands(), softcap=2.0, dropout_p=0.5)
    assert plan.backend == "reference"
    rows = table_of(plan)
    assert list(rows) == ["reference", "narrow", "aten"]
    assert rows["reference"] == ("chosen", "chunked", "")
    expected = {
        "narrow": ["dtype", "head_dim", "softcap", "dropout"],
        "aten": ["softcap", "dropout"],
    }
    for name, codes in expected.items():
        verdict, why, fix = rows[name]
        assert verdict == "no"
        reasons = plan.why_not(name)
        assert [reason.code for reason in reasons] == codes
        assert all(squeezed(reason.sentence) in why for reason in reasons)
        assert all(squeezed(reason.fix) in fix for reason in reasons)
    assert sum(bool(reason.fix) for reason in plan.why_not("narrow")) == 3
    lines = str(plan).splitlines()
    assert lines[0] == "forward on cpu: served by reference (chunked)"
    assert "float32 query [2, 4, 8, 16]" in lines[1]
    assert "softcap 2" in lines[1]
    assert "dropout 0.5" in lines[1]
    assert "strides (512, 128, 16, 1)" in lines[2]
    assert max(len(line) for line in lines) <= 110


def test_text_says_who_would_serve_too() -> None:
    """A backend that stands behind the chosen one is shown as such, with how to insist on it."""
    verdict, why, fix = table_of(orchard.explain(*operands()))["reference"]
    assert verdict == "after"
    assert why == squeezed("serves this too, after aten")
    assert fix == squeezed('backend="reference" insists on it')


def test_text_holds_the_backward() -> None:
    """With gradients the text has a second table, for the backward."""
    query, key, value = operands()
    mask = torch.zeros(8, 8, requires_grad=True)
    text = str(orchard.explain(query, key, value, mask=mask))
    forward, _, backward = text.partition("backward on cpu: ")
    assert forward.startswith("forward on cpu: served by aten (cpu-flash)")
    assert backward.startswith("served by reference (chunked)")
    assert "gives no gradient of the mask" in backward
    assert "detach the mask" in backward


# Insisting on a backend


def test_insisted_backend_serves() -> None:
    """backend="reference" is served by it though another is preferred."""
    query, key, value = operands()
    out = orchard.attention(query, key, value, backend="reference")
    assert orchard.stats()["calls"] == {"forward": {"reference": 1}}
    assert out.shape == query.shape
    plan = orchard.explain(query, key, value, backend="reference")
    assert plan.backend == "reference"
    assert "was asked for" in plan.why_not("aten")[0].sentence


def test_insisted_backend_that_cannot_raises_with_all_reasons() -> None:
    """NotServedError holds every reason and fix, and nothing is served instead."""
    query, key, value = operands(dtype=torch.float64)
    options: dict[str, Any] = {"softcap": 2.0, "dropout_p": 0.5, "window": (1, 1)}
    plan = orchard.explain(query, key, value, backend="aten", **options)
    codes = [reason.code for reason in plan.why_not("aten")]
    assert codes == ["dtype", "band", "softcap", "dropout"]
    with pytest.raises(orchard.NotServedError) as caught:
        orchard.attention(query, key, value, backend="aten", **options)
    for reason in plan.why_not("aten"):
        assert squeezed(reason.sentence) in squeezed(str(caught.value))
        assert squeezed(reason.fix) in squeezed(str(caught.value))
    assert orchard.stats()["calls"] == {}


def test_insisted_backend_whose_backward_cannot_raises_at_the_forward() -> None:
    """Where gradients are wanted the backward's reasons count, and say that they are its."""
    query, key, value = operands()
    mask = torch.zeros(8, 8, requires_grad=True)
    with pytest.raises(orchard.NotServedError, match="in the backward, gives no gradient of the"):
        orchard.attention(query, key, value, mask=mask, backend="aten")
    with torch.no_grad():
        orchard.attention(query, key, value, mask=mask, backend="aten")
    assert orchard.stats()["calls"] == {"forward": {"aten": 1}}


def test_insisted_backend_gives_the_reasons_of_both_directions() -> None:
    """Reasons of the backward are listed beside those of the forward, not after their repair."""
    query, key, value = operands()
    mask = torch.zeros(8, 8, requires_grad=True)
    plan = orchard.explain(query, key, value, mask=mask, softcap=2.0, backend="aten")
    assert {reason.code for reason in plan.why_not("aten")} == {"softcap", "mask_grad"}


def test_explain_of_an_insisted_backend_that_cannot() -> None:
    """explain() does not raise: nobody serves, and the reasons are there."""
    plan = orchard.explain(*operands(), softcap=2.0, backend="aten")
    assert plan.backend is None
    assert plan.kernel == ""
    assert [reason.code for reason in plan.why_not("aten")] == ["softcap"]
    assert str(plan).startswith("forward on cpu: served by nobody")
    assert table_of(plan)["aten"][0] == "no"


def test_second_gradients_of_an_insisted_backend(environment: Use) -> None:
    """create_graph=True takes the reference, whichever way a backend was insisted on."""
    results = []
    for variables, backend in (({}, "aten"), ({"ORCHARD_BACKEND": "aten"}, "auto")):
        environment(**variables)
        query, key, value = operands(requires_grad=True)
        out = orchard.attention(query, key, value, backend=backend)
        (first,) = torch.autograd.grad(out.sin().sum(), query, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), query)
        results.append(second)
        calls = orchard.stats(reset=True)["calls"]
        assert calls["double_backward"] == {"reference": 1}
        assert set(calls["forward"]) == set(calls["backward"]) == {"aten"}
    assert torch.equal(*results)


@pytest.mark.parametrize("call", [orchard.attention, orchard.explain])
def test_unknown_backend_lists_the_known_ones(call: Callable[..., Any]) -> None:
    """A name that is no backend's is a wrong argument; the message lists what is allowed."""
    with pytest.raises(orchard.ArgumentValueError) as caught:
        call(*operands(), backend="flash9")
    for word in ("backend", "'flash9'", "'auto'", "aten", "reference"):
        assert word in str(caught.value)


def test_planner_refuses_an_unknown_backend_itself() -> None:
    """The planner checks the name too, for callers of the operators."""
    with pytest.raises(orchard.ArgumentValueError, match=r"'flash9'.*aten, reference"):
        plans.planner().plan(problem_of(*operands()), "flash9")


# Settings that steer plans


def test_backend_variable_insists(environment: Use) -> None:
    """ORCHARD_BACKEND acts as backend=, and backend= wins over it."""
    environment(ORCHARD_BACKEND="aten")
    query, key, value = operands()
    assert orchard.explain(query, key, value).backend == "aten"
    with pytest.raises(orchard.NotServedError, match="no softcap"):
        orchard.attention(query, key, value, softcap=2.0)
    orchard.attention(query, key, value, softcap=2.0, backend="reference")
    assert orchard.stats()["calls"] == {"forward": {"reference": 1}}


def test_disable_variable(environment: Use) -> None:
    """ORCHARD_DISABLE takes a backend out and says so; insisting on it raises."""
    environment(ORCHARD_DISABLE="aten")
    query, key, value = operands()
    plan = orchard.explain(query, key, value)
    assert plan.backend == "reference"
    (reason,) = plan.why_not("aten")
    assert reason.code == "disabled"
    assert "ORCHARD_DISABLE" in reason.sentence
    with pytest.raises(orchard.NotServedError, match="ORCHARD_DISABLE"):
        orchard.attention(query, key, value, backend="aten")


def test_everything_disabled(environment: Use) -> None:
    """With every backend disabled nobody serves, and the error says why for each."""
    environment(ORCHARD_DISABLE=" aten , reference,")
    query, key, value = operands()
    plan = orchard.explain(query, key, value)
    assert plan.backend is None
    assert [r.code for name in ("aten", "reference") for r in plan.why_not(name)] == [
        "disabled",
        "disabled",
    ]
    with pytest.raises(orchard.NotServedError) as caught:
        orchard.attention(query, key, value)
    assert str(caught.value).count("switched off by ORCHARD_DISABLE") == 2


# Availability is proved by running


class Wrong(ReferenceBackend):
    """A backend that spoils what it computes."""

    name = "wrong"
    summary = "for tests"

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        return self.spoil_forward(tensors, super().forward(problem, kernel, tensors))

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        exact = super().backward(problem, kernel, tensors, saved, upstream)
        return self.spoil_backward(exact)

    def spoil_forward(self, tensors: Tensors, saved: Saved) -> Saved:
        return saved

    def spoil_backward(self, grads: Gradients) -> Gradients:
        return grads


class RaisesError(Wrong):
    def spoil_forward(self, tensors: Tensors, saved: Saved) -> Saved:
        raise RuntimeError("no such\n   driver")


class MissesLibrary(Wrong):
    def spoil_forward(self, tensors: Tensors, saved: Saved) -> Saved:
        raise ImportError("libkernels.so not found")


class RaisesInBackward(Wrong):
    def spoil_backward(self, grads: Gradients) -> Gradients:
        raise OSError("no such driver")


class GivesZeros(Wrong):
    def spoil_forward(self, tensors: Tensors, saved: Saved) -> Saved:
        return saved._replace(out=torch.zeros_like(saved.out))


class GivesNan(Wrong):
    def spoil_forward(self, tensors: Tensors, saved: Saved) -> Saved:
        saved.out[0, 1, 7, 63] = torch.nan
        return saved


class GivesShape(Wrong):
    def spoil_forward(self, tensors: Tensors, saved: Saved) -> Saved:
        return saved._replace(out=saved.out[..., :-1])


class IgnoresScores(Wrong):
    def spoil_forward(self, tensors: Tensors, saved: Saved) -> Saved:
        return saved._replace(out=tensors.value.mean(2, keepdim=True).expand_as(saved.out))


class ShiftsLse(Wrong):
    def spoil_forward(self, tensors: Tensors, saved: Saved) -> Saved:
        return saved._replace(lse=saved.lse + 1)


class DoublesGradients(Wrong):
    def spoil_backward(self, grads: Gradients) -> Gradients:
        return Gradients(2 * grads.query, 2 * grads.key, 2 * grads.value, None)


class ZeroesGradients(Wrong):
    def spoil_backward(self, grads: Gradients) -> Gradients:
        return Gradients(0 * grads.query, 0 * grads.key, 0 * grads.value, None)


class SpoilsKeyGradient(Wrong):
    def spoil_backward(self, grads: Gradients) -> Gradients:
        return grads._replace(key=grads.key + torch.nan)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (RaisesError, "RuntimeError: no such driver"),
        (MissesLibrary, "ImportError: libkernels.so not found"),
        (RaisesInBackward, "OSError: no such driver"),
        (GivesZeros, "wrong values"),
        (GivesNan, "wrong values"),
        (GivesShape, ""),
        (IgnoresScores, "wrong values"),
        (ShiftsLse, "wrong values"),
        (DoublesGradients, "wrong values"),
        (ZeroesGradients, "wrong values"),
        (SpoilsKeyGradient, "wrong values"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_probe_that_fails_is_a_reason(use_backends: Use, kind: type[Wrong], words: str) -> None:
    """A backend that raises or is wrong on the tiny case is unavailable, never an exception."""
    use_backends(kind, ReferenceBackend)
    plan = orchard.explain(*operands())
    assert plan.backend == "reference"
    (reason,) = plan.why_not("wrong")
    assert reason.code == "unavailable"
    assert words in reason.sentence
    assert "\n" not in reason.sentence
    report = {entry.backend: entry for entry in orchard.backends()}
    assert not report["wrong"].available
    assert report["wrong"].reason == reason
    assert report["reference"].available
    with pytest.raises(orchard.NotServedError, match="probe"):
        orchard.attention(*operands(), backend="wrong")


def test_a_sound_backend_passes_the_probe(use_backends: Use) -> None:
    """The same backend, unspoiled, is available: the probe tells the two apart."""
    use_backends(Wrong, ReferenceBackend)
    assert orchard.explain(*operands()).backend == "wrong"
    assert all(entry.available for entry in orchard.backends())


class Counting(ReferenceBackend):
    name = "counting"
    summary = "for tests"

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        self.forwards += 1
        return super().forward(problem, kernel, tensors)


def test_a_probe_runs_once(use_backends: Use) -> None:
    """Availability is proved once per kernel and device, then remembered."""
    counting = use_backends(Counting).backends["counting"]
    assert isinstance(counting, Counting)
    for rows in (4, 5, 6):
        orchard.explain(*operands(rows))
    orchard.backends()
    assert counting.forwards == 1


class ShortOfMemory(Counting):
    name = "short"

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        saved = super().forward(problem, kernel, tensors)
        if self.forwards == 1:
            raise torch.OutOfMemoryError("no room for scratch")
        return saved


def test_a_probe_without_memory_is_tried_again(use_backends: Use) -> None:
    """Being short of memory once does not rule a backend out for the rest of the process."""
    use_backends(ShortOfMemory, ReferenceBackend)
    first = orchard.explain(*operands(4))
    assert first.backend == "reference"
    (reason,) = first.why_not("short")
    assert reason.code == "memory"
    assert "no room for scratch" in reason.sentence
    assert orchard.explain(*operands(5)).backend == "short"


def test_an_absent_device_is_a_reason() -> None:
    """A problem on a device that this machine does not have gives reasons, not an exception."""
    if torch.backends.mps.is_available():
        pytest.skip("this machine has an Apple GPU")
    problem = problem_of(*operands(dim=64))._replace(device=torch.device("mps"))
    plan = plans.planner().plan(problem)
    assert plan.backend is None
    for name in ("aten", "reference"):
        assert [reason.code for reason in plan.why_not(name)] == ["unavailable"]


# The registry


class Toy(ReferenceBackend):
    """What a new backend is: one class, and one entry in the registry."""

    name = "toy"
    summary = "a backend of this test"
    capabilities = (replace(ReferenceBackend.capabilities[0], kernel="toy-kernel", softcap=False),)

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        assert kernel == "toy-kernel"
        return super().forward(problem, kernel, tensors)


def test_adding_a_backend_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new entry in front is listed, explained, preferred and serves forward and backward."""
    before = [entry.backend for entry in orchard.backends()]
    assert "toy" not in before
    monkeypatch.setattr(backends, "REGISTRY", (f"{__name__}:Toy", *backends.REGISTRY))
    plans.reset()
    listed = {entry.backend: entry for entry in orchard.backends()}
    assert list(listed) == ["toy", *before]
    toy = listed["toy"]
    assert (toy.kernel, toy.device, toy.available, toy.reason) == ("toy-kernel", "cpu", True, None)
    assert toy.summary == "a backend of this test"

    query, key, value = operands(requires_grad=True)
    out = orchard.attention(query, key, value)
    expected = orchard.attention(query, key, value, backend="reference")
    assert torch.equal(out, expected)
    orchard.stats(reset=True)
    orchard.attention(query, key, value).sum().backward()
    orchard.attention(query.detach(), key.detach(), value.detach(), softcap=2.0)
    stats = orchard.stats()
    assert stats["calls"] == {"forward": {"toy": 1, "reference": 1}, "backward": {"toy": 1}}
    assert stats["kernels"]["toy/toy-kernel"] == 2
    codes = {(entry["backend"], entry["code"]) for entry in stats["fallbacks"]}
    assert codes == {("toy", "softcap"), ("aten", "softcap")}


class Tool(Toy):
    """A backend that is never to be chosen, nor even run, without being asked for."""

    name = "tool"
    on_request = True
    probes = 0

    def probe(self, *_: Any) -> None:
        type(self).probes += 1


@pytest.mark.parametrize("disabled", ["", "reference"])
def test_a_backend_that_waits_to_be_asked_for(
    disabled: str, use_backends: Use, environment: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither probed nor chosen, wherever it stands and whoever else serves; a name asks for it."""
    monkeypatch.setattr(Tool, "probes", 0)
    environment(ORCHARD_DISABLE=disabled)
    use_backends(Tool, ReferenceBackend)
    plan = orchard.explain(*operands())
    assert plan.backend == (None if disabled else "reference")
    (reason,) = plan.why_not("tool")
    assert reason == ("on_request", "runs only when it is asked for", 'backend="tool" asks for it')
    assert plan.passed_over == ((("reference", plan.why_not("reference")[0]),) if disabled else ())
    listed = {entry.backend: entry for entry in orchard.backends()}
    assert listed["tool"].reason == reason
    assert Tool.probes == 0

    assert orchard.explain(*operands(), backend="tool").backend == "tool"
    assert Tool.probes == 1
    environment(ORCHARD_BACKEND="tool")
    assert orchard.explain(*operands()).backend == "tool"
    assert next(entry for entry in orchard.backends() if entry.backend == "tool").available


def test_shipped_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shipped backend loads, and the last that need not be asked for serves all."""
    monkeypatch.setattr(backends, "REGISTRY", SHIPPED)
    loaded = backends.load()
    names = [backend.name for backend in loaded]
    assert names == ["cpu", "metal", "cuda", "aten", "reference", "metal-emulated"]
    last = [backend for backend in loaded if not backend.on_request][-1].capabilities[0]
    everything = problem_of(*operands(dtype=torch.float64), softcap=1.0, threshold=9)
    assert last.reasons(everything) == ()


def test_reports_name_their_reason_type() -> None:
    """orchard.backends() lists each kernel of this machine's devices with proof or a reason."""
    reports = orchard.backends()
    assert {(entry.backend, entry.kernel) for entry in reports if entry.device == "cpu"} == {
        ("aten", "cpu-flash"),
        ("reference", "chunked"),
    }
    for entry in reports:
        assert entry.available is (entry.reason is None)
        assert entry.reason is None or isinstance(entry.reason, Reason)
        assert entry.summary

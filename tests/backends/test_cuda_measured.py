"""Who serves under "auto" where torch was measured faster; without a GPU, with invented numbers."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest
import torch
from test_cuda_plan import FakeRuntime

from orchard.attention.problem import (
    Band,
    Gradients,
    Options,
    Problem,
    Saved,
    Tensors,
    Upstream,
    describe,
)
from orchard.backends.cuda import CudaBackend, measured
from orchard.backends.cuda.measured import Measured, Measurement
from orchard.backends.cuda.runtime import Gpu
from orchard.dispatch.backend import Backend, Capability, Reason
from orchard.dispatch.journal import Journal
from orchard.dispatch.planner import Plan, Planner
from orchard.dispatch.settings import Settings

pytestmark = pytest.mark.dispatch

GPU = torch.device("cuda", 0)
A100 = Gpu(80, 108, 164 * 1024)
CAUSAL = Options(0.125, band=Band(None, 0))
FASTER, SLOWER, EVEN = (0.90, 0.92, 0.95), (1.1, 1.2, 1.3), (0.97, 0.99, 1.01)


class Ours(CudaBackend):
    """On a GPU that is not here."""

    def unavailable(self, capability: Capability, device: torch.device) -> Reason | None:
        return None


class Torchs(Backend):
    """In the place of torch's fused operators."""

    name = "aten"
    summary = "a stand-in"
    capabilities = (
        Capability.everything("cudnn", ("cuda",), (torch.bfloat16,), stages=("forward",)),
        Capability.everything("flash", ("cuda",), (torch.bfloat16,)),
    )
    failing = False

    def unavailable(self, capability: Capability, device: torch.device) -> Reason | None:
        return None

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        if self.failing:
            raise RuntimeError("out of order")
        return Saved(tensors.query, tensors.query)

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        raise AssertionError("not asked for here")


def entry(ratio: tuple[float, float, float] = FASTER, **more: Any) -> Measurement:
    plain = Measurement("forward", "bfloat16", 64, True, 64, 4096, "hopper", {"cudnn": ratio})
    return plain._replace(**more)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def known(*entries: Measurement, family: str = "sm_90") -> None:
        found = {family: Measured("Some GPU, 2026-01-02", entries)}
        monkeypatch.setattr(measured, "table", lambda: found)

    return known


def planner(*backends: Backend, **settings: Any) -> Planner:
    return Planner(backends or (Ours(FakeRuntime()), Torchs()), Settings(**settings), Journal())


def problem(
    batch: int = 2,
    heads: int = 32,
    length: int = 4096,
    dim: int = 64,
    options: Options = CAUSAL,
    **more: Any,
) -> Problem:
    shape = (batch, heads, length, dim)
    operand = torch.empty((1, 1, 1, 1), dtype=torch.bfloat16)
    strides = (heads * length * dim, length * dim, dim, 1)
    described = describe(Tensors(operand, operand, operand), options)._replace(
        device=GPU,
        query_shape=shape,
        key_shape=shape,
        value_shape=shape,
        query_strides=strides,
        key_strides=strides,
        value_strides=strides,
    )
    return described._replace(**more)


def choice(plan: Plan) -> tuple[str | None, str]:
    return plan.backend, plan.kernel


def test_the_shipped_table_can_be_read() -> None:
    """Every family with its place, every ratio with its spread."""
    text = files("orchard.backends.cuda").joinpath("measured.json").read_text()
    assert set(measured.table()) == set(json.loads(text))
    for known in measured.table().values():
        assert known.place
        for each in known.measurements:
            assert each.stage in ("forward", "backward")
            assert all(len(ratio) == 3 for ratio in each.torch.values())


def test_without_a_measurement_of_the_problem_ours_is_taken(use: Any) -> None:
    use()
    assert choice(planner().plan(problem())) == ("cuda", "hopper")


def test_without_a_measurement_on_such_a_gpu_torchs_is_taken(use: Any) -> None:
    use(entry(), family="sm_80")
    assert choice(planner().plan(problem())) == ("aten", "cudnn")


def test_where_torch_was_faster_it_is_taken_and_the_plan_says_so(use: Any) -> None:
    use(entry())
    plan = planner().plan(problem())
    assert choice(plan) == ("aten", "cudnn")
    (reason,) = plan.why_not("cuda")
    assert reason == Reason(
        "measured",
        "hopper takes 1.09 times the time of torch's cudnn, measured with 64 heads of 4096 rows "
        "on Some GPU, 2026-01-02",
        'backend="cuda" insists on it',
    )
    shown = "".join(str(plan).split())
    assert "1.09timesthetime" in shown
    assert plan.passed_over == ()  # a choice, no fall-back
    assert plan.tally.passed_over == ()


def test_who_insists_gets_ours(use: Any) -> None:
    use(entry())
    assert choice(planner().plan(problem(), "cuda")) == ("cuda", "hopper")
    assert choice(planner(backend="cuda").plan(problem())) == ("cuda", "hopper")


@pytest.mark.parametrize("ratio", [SLOWER, EVEN])
def test_a_doubtful_measurement_changes_nothing(
    ratio: tuple[float, float, float], use: Any
) -> None:
    """Torch has to be faster in all rounds but a fifth."""
    use(entry(ratio))
    assert choice(planner().plan(problem())) == ("cuda", "hopper")


def test_of_torch_s_kernels_the_one_that_would_serve_counts(use: Any) -> None:
    use(entry(torch={"flash": FASTER, "cudnn": SLOWER}))
    assert choice(planner().plan(problem())) == ("cuda", "hopper")
    use(entry(stage="backward", torch={"flash": FASTER, "cudnn": SLOWER}))
    strides = problem().query_strides
    backward = problem(stage="backward", grad=True, grad_strides=strides)
    assert choice(planner().plan(backward)) == ("aten", "flash")


def test_a_rival_that_does_not_serve_is_no_rival(use: Any) -> None:
    use(entry())
    assert choice(planner(disabled=frozenset({"aten"})).plan(problem())) == ("cuda", "hopper")
    assert choice(planner(Ours(FakeRuntime())).plan(problem())) == ("cuda", "hopper")


def test_a_rival_that_fails_is_replaced_by_ours(use: Any) -> None:
    use(entry())
    rival = Torchs()
    rival.failing = True
    plans = planner(Ours(FakeRuntime()), rival)
    served: list[str] = []

    def serve(backend: Backend, kernel: str) -> None:
        if backend is rival:
            rival.forward(problem(), kernel, Tensors(*(torch.empty(0),) * 3))
        served.append(f"{backend.name}/{kernel}")

    with pytest.warns(match="aten failed in a forward and the next backend serves it"):
        plans.run(problem(), "auto", serve)
    assert served == ["cuda/hopper"]


@pytest.mark.parametrize(
    ("more", "near"),
    [
        ({}, True),
        ({"length": 5792}, True),
        ({"length": 5793}, False),
        ({"length": 2897}, True),
        ({"length": 2896}, False),
        ({"heads": 64}, True),
        ({"heads": 65}, False),
        ({"heads": 16}, True),
        ({"heads": 15}, False),
        ({"dim": 128}, False),
        ({"options": Options(0.125)}, False),
        ({"options": CAUSAL._replace(softcap=5.0)}, False),
        ({"options": CAUSAL._replace(threshold=100)}, False),
        ({"options": Options(0.125, band=Band(-100, 0))}, False),
        ({"deterministic": True}, False),
        ({"dtype": torch.float16}, False),
        ({"stage": "backward", "grad_strides": (1, 1, 64, 1)}, False),
        ({"key_shape": (2, 8, 4096, 64)}, False),
        ({"key_shape": (2, 32, 2048, 64)}, False),
        ({"value_shape": (2, 32, 4096, 32)}, False),
        ({"key_strides": (1, 1, 64, 2)}, False),
    ],
    ids=str,
)
def test_what_a_measurement_speaks_for(more: dict[str, Any], near: bool, use: Any) -> None:
    use(entry())
    found = measured.slower(problem(**more), "sm_90", "hopper", "cudnn")
    assert (found is not None) == near


def test_the_nearest_measurement_speaks(use: Any) -> None:
    use(entry(length=4096), entry(SLOWER, length=5120), entry(SLOWER, length=4096, planes=128))
    assert measured.slower(problem(length=4200), "sm_90", "hopper", "cudnn") is not None
    assert measured.slower(problem(length=5000), "sm_90", "hopper", "cudnn") is None


def test_of_another_kernel_of_ours_nothing_is_known(use: Any) -> None:
    use(entry())
    assert measured.slower(problem(), "sm_90", "tiled", "cudnn") is None


def test_the_family_is_that_of_the_gpu(use: Any) -> None:
    use(entry(kernel="tiled"), family="sm_80")
    plans = planner(Ours(FakeRuntime(A100)), Torchs())
    ours = Ours(FakeRuntime(A100))
    assert ours.yields_to(problem(), "tiled", "aten", "cudnn") is not None
    found = Ours(FakeRuntime()).yields_to(problem(), "tiled", "aten", "cudnn")
    assert found == Reason("measured", "was not measured on sm_90, where torch's kernel serves too")
    assert plans.plan(problem()).backend == "cuda"  # the kernel that would serve is another

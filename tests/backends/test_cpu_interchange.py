"""(out, lse, seed) is the interchange: a backward of one backend after a forward of another."""

from __future__ import annotations

import pytest
import torch
from programs.problems import SMALL, exercise

from orchard.attention.problem import Upstream, describe
from orchard.dispatch.planner import planner
from orchard.testing.budget import Results
from orchard.testing.conformance import CASES, Case

pytestmark = pytest.mark.grad

SUBJECTS = ("dtype", "mask", "band", "dropout", "grad")
CHOSEN = (SMALL, *(c for c in CASES if c.subject in SUBJECTS and c.dtype != torch.float64))


def interchange(case: Case, first: str, second: str) -> list[str] | None:
    """What is wrong with a forward by `first` and a backward by `second`; None: not served."""
    problem = exercise(case)
    tensors, upstream = problem.tensors, problem.upstream
    options = problem.settings.options(tensors.query, tensors.key)
    backends = planner().backends
    ahead = describe(tensors, options, lse=True, grad=True, mask_grad=problem.mask_grad)
    back = describe(
        tensors,
        options,
        stage="backward",
        grad_out=upstream.out,
        lse=upstream.lse is not None,
        grad=True,
        mask_grad=problem.mask_grad,
    )
    kernels = backends[first].select(ahead)[0], backends[second].select(back)[0]
    if kernels[0] is None or kernels[1] is None:
        return None
    saved = backends[first].forward(ahead, kernels[0].kernel, tensors)
    grads = backends[second].backward(back, kernels[1].kernel, tensors, saved, upstream)
    return problem.complaints(Results(*saved, *grads))


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_reference_and_cpu(case: Case, isa: str) -> None:
    """Everything that has a gradient, dropout, masks and lse among it, both ways."""
    assert interchange(case, "cpu", "reference") == []
    assert interchange(case, "reference", "cpu") == []


def test_aten_and_cpu(isa: str) -> None:
    """Where torch's own operators serve the case."""
    found = [
        wrong
        for case in CHOSEN
        for pair in (("aten", "cpu"), ("cpu", "aten"))
        if (wrong := interchange(case, *pair)) is not None
    ]
    assert len(found) > len(CHOSEN) / 2
    assert [wrong for wrong in found if wrong] == []


def test_lse_is_read(isa: str) -> None:
    """The backward follows the lse it is given: log 2 more halves every probability."""
    problem = exercise(SMALL)
    tensors, upstream = problem.tensors, problem.upstream
    cpu = planner().backends["cpu"]
    options = problem.settings.options(tensors.query, tensors.key)
    back = describe(tensors, options, stage="backward", grad_out=upstream.out, grad=True)
    saved = cpu.forward(describe(tensors, options, lse=True, grad=True), "native", tensors)
    grads = cpu.backward(back, "native", tensors, saved, upstream)
    shifted = saved._replace(lse=saved.lse + torch.log(torch.tensor(2.0)))
    halved = cpu.backward(back, "native", tensors, shifted, Upstream(upstream.out, None))
    torch.testing.assert_close(halved.value, grads.value / 2, rtol=1e-5, atol=1e-6)

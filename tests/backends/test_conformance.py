"""Every backend of this machine against the conformance suite."""

from __future__ import annotations

import pytest
import torch

from orchard.attention import reference
from orchard.attention.problem import Saved
from orchard.backends.reference import ReferenceBackend
from orchard.dispatch.report import visible_devices
from orchard.testing.conformance import CASES, Case, check

MARKS = {
    "layout": pytest.mark.layout,
    "shape": pytest.mark.layout,
    "dtype": pytest.mark.dtype,
    "mask": pytest.mark.mask,
    "band": pytest.mark.mask,
    "dropout": pytest.mark.dropout,
    "grad": pytest.mark.grad,
}
DEVICE_MARKS = {"cpu": pytest.mark.cpu, "cuda": pytest.mark.cuda, "mps": pytest.mark.mps}
DEVICES = [
    pytest.param(str(device), marks=DEVICE_MARKS[device.type]) for device in visible_devices()
]
PARAMETERS = [
    pytest.param(case, marks=[MARKS[case.subject], pytest.mark.grad], id=case.name)
    for case in CASES
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["auto", "cpu", "reference", "aten"])
@pytest.mark.parametrize("case", PARAMETERS)
def test_conformance(case: Case, backend: str, device: str) -> None:
    """Values and gradients within budget, guards intact, order and dtype as promised."""
    outcome = check(case, device, backend)
    if outcome.status == "not served":
        assert backend not in ("auto", "reference"), "these serve everything"
        assert backend != "cpu" or case.dtype == torch.float64 or device != "cpu"
        assert outcome.complaints, "what is not served has reasons"
        return
    assert outcome.complaints == []
    assert len(outcome.comparisons) >= 5


def test_aten_serves_what_its_table_says() -> None:
    """aten is not vacuously conformant: it serves more than half of the suite on the CPU."""
    served = [case for case in CASES if check(case, "cpu", "aten").status == "passed"]
    assert len(served) > len(CASES) / 2


class Broken(ReferenceBackend):
    """A reference with one defect, to show that the suite sees it."""

    defect = ""

    def forward(self, problem, kernel, tensors):  # type: ignore[no-untyped-def]
        out, lse = reference.forward(tensors, problem.options)
        if self.defect == "unwritten element" and out.numel():
            out[..., -1:, -1:] = torch.nan
        if self.defect == "small error":
            out = out * (1 + 1e-4)
        if self.defect == "lse base 2":
            lse = lse * 1.4426950408889634
        if self.defect == "writes an operand":
            tensors.key.as_strided((1,), (1,), tensors.key.storage_offset()).zero_()
        if self.defect == "writes before an operand":
            tensors.query.as_strided((1,), (1,), tensors.query.storage_offset() - 1).zero_()
        return Saved(out, lse)

    def backward(self, problem, kernel, tensors, saved, upstream):  # type: ignore[no-untyped-def]
        grads = super().backward(problem, kernel, tensors, saved, upstream)
        if self.defect == "key gradient of one group":
            return grads._replace(key=grads.key * 0.5)
        return grads


@pytest.mark.parametrize(
    "defect",
    [
        "unwritten element",
        "small error",
        "lse base 2",
        "writes an operand",
        "writes before an operand",
        "key gradient of one group",
    ],
)
def test_the_suite_sees_defects(
    defect: str, monkeypatch: pytest.MonkeyPatch, fresh_planner: None
) -> None:
    """A backend with one defect fails conformance."""
    from orchard.dispatch.planner import planner

    broken = Broken()
    broken.defect = defect  # type: ignore[misc]
    monkeypatch.setitem(planner().backends, "reference", broken)
    monkeypatch.setattr(broken, "unavailable", lambda *_: None)  # its probe would see it too
    case = next(case for case in CASES if case.name == "all operands contiguous")
    assert check(case, "cpu", "reference").status == "failed"

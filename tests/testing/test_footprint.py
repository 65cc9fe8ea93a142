from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from orchard.testing import footprint as module
from orchard.testing.benchmark import Case, build
from orchard.testing.footprint import answer, footprint

pytestmark = pytest.mark.cli

MEGABYTE = 10**6
CASE = Case("", batch=1, heads=2, kv_heads=2, rows=40, keys=40, dim=8, value_dim=8, backward=True)


def test_extra_is_what_is_neither_given_nor_taken() -> None:
    """The definition holds every score: a part of them at least is beyond operands and results."""
    case = replace(CASE, rows=1024, keys=1024, grad_rows=16)
    found = footprint(case, "reference")
    assert found.row.ours.status == "ok", found.row.ours.note
    assert found.row.served == {"forward": "reference", "backward": "reference"}
    assert found.extra is not None
    assert MEGABYTE < found.extra < 500 * MEGABYTE
    results = 4 * 2 * 1024 * 8 * 4
    assert found.row.ours.peak_bytes == found.extra + results
    check = found.row.ours.check
    assert check is not None
    assert {c.name for c in check.comparisons} == {"out", "grad_query", "grad_key", "grad_value"}
    assert check.share > 0
    assert (found.row.torch.status, found.row.ratio) == ("not measured", None)


def test_every_field_of_a_case_travels() -> None:
    case = replace(
        CASE,
        dtype=torch.bfloat16,
        views=("bshd", "last_strided", "contiguous"),
        window=(3, 2),
        dropout_p=0.2,
    )
    found = footprint(case, "auto")
    assert found.row.ours.status == "ok", found.row.ours.note
    assert found.row.case == case


def test_a_backend_that_does_not_serve() -> None:
    found = footprint(replace(CASE, dropout_p=0.1), "aten")
    assert found.row.ours.status == "not served"
    assert "dropout" in found.row.ours.note
    assert found.extra is None
    assert found.row.right


def test_a_process_that_breaks_is_a_failure() -> None:
    found = footprint(CASE, "nobody")
    assert found.row.ours.status == "failed"
    assert "nobody" in found.row.ours.note
    assert not found.row.right


def test_a_gpu_needs_no_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its allocator keeps the account. Determinism is asked for around the step."""
    asked: list[bool] = []

    def step(*args: Any) -> tuple[torch.Tensor, ...]:
        asked.append(torch.are_deterministic_algorithms_enabled())
        return right(*args)

    right = module.our_step
    monkeypatch.setattr(module, "our_step", step)
    monkeypatch.setattr(module, "build", lambda case, _: build(case, torch.device("cpu")))
    monkeypatch.setattr(module.subprocess, "run", None)
    for deterministic in (False, True):
        case = replace(CASE, deterministic=deterministic)
        found = footprint(case, "reference", torch.device("cuda"))
        assert found.row.ours.status == "ok", found.row.ours.note
        assert found.extra is not None
    assert asked == [False, True]


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module.our_step
    monkeypatch.setattr(module, "our_step", lambda *a: tuple(r + 1.0 for r in right(*a)))
    question = {"case": {**vars(CASE), "dtype": "float32"}, "backend": "auto"}
    found = answer({**question, "threads": torch.get_num_threads()})
    assert found["status"] == "WRONG"
    assert "grad_query: error" in found["note"]

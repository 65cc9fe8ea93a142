"""The operators called by themselves: whatever does not fit is refused before a backend sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import orchard
from orchard.attention.operands import check_operands, check_results, checked_seed
from orchard.attention.problem import Options, Saved, Tensors, Upstream, describe
from orchard.dispatch.journal import journal

pytestmark = pytest.mark.errors

VALUE, TYPE = orchard.ArgumentValueError, orchard.ArgumentTypeError
BACKENDS = ("cpu", "metal-emulated", "aten", "reference", "auto")
Case = tuple[dict[str, Any], type[Exception], tuple[str, ...]]


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


def forward(backend: str, **changes: Any) -> tuple[Tensor, Tensor]:
    arguments: dict[str, Any] = {
        "query": torch.randn(2, 4, 40, 16),
        "key": torch.randn(2, 2, 24, 16),
        "value": torch.randn(2, 2, 24, 16),
        "mask": None,
        "seed": None,
        "scale": None,
        "softcap": 0.0,
        "dropout_p": 0.0,
        "left": -1,
        "right": -1,
        "bottom_right": False,
        "backend": backend,
        "return_lse": False,
        "grad": False,
        "mask_grad": False,
    }
    unknown = changes.keys() - arguments.keys()
    assert not unknown
    found: tuple[Tensor, Tensor] = torch.ops.orchard.attention_forward(**arguments | changes)
    return found


def backward(backend: str, **changes: Any) -> tuple[Tensor, ...]:
    arguments: dict[str, Any] = {
        "grad_out": torch.randn(2, 4, 40, 16),
        "grad_lse": None,
        "query": torch.randn(2, 4, 40, 16),
        "key": torch.randn(2, 2, 24, 16),
        "value": torch.randn(2, 2, 24, 16),
        "mask": None,
        "seed": None,
        "out": torch.randn(2, 4, 40, 16),
        "lse": torch.randn(2, 4, 40),
        "scale": None,
        "softcap": 0.0,
        "dropout_p": 0.0,
        "left": -1,
        "right": -1,
        "bottom_right": False,
        "backend": backend,
        "mask_grad": False,
    }
    unknown = changes.keys() - arguments.keys()
    assert not unknown
    found: tuple[Tensor, ...] = torch.ops.orchard.attention_backward(**arguments | changes)
    return found


OPERANDS: dict[str, Case] = {
    "query rank": ({"query": zeros(4, 40, 16)}, VALUE, ("query", "3", "4 axes")),
    "key rank": ({"key": zeros(2, 24, 16)}, VALUE, ("key", "3", "4 axes")),
    "value rank": ({"value": zeros(1, 2, 2, 24, 16)}, VALUE, ("value", "5", "4 axes")),
    "key dtype": ({"key": zeros(2, 2, 24, 16).half()}, TYPE, ("key", "float16", "float32")),
    "value dtype": ({"value": zeros(2, 2, 24, 16).double()}, TYPE, ("float64", "float32")),
    "batch": (
        {"key": zeros(1, 2, 24, 16), "value": zeros(1, 2, 24, 16)},
        VALUE,
        ("key", "[1, 2, 24, 16]", "[2, 2, 24, 16]"),
    ),
    "key dimension": ({"key": zeros(2, 2, 24, 8)}, VALUE, ("key", "[2, 2, 24, 8]", "query")),
    "value batch": ({"value": zeros(1, 2, 24, 16)}, VALUE, ("value", "[1, 2, 24, 16]")),
    "value heads": ({"value": zeros(2, 1, 24, 16)}, VALUE, ("value", "[2, 1, 24, 16]", "key")),
    "value length": ({"value": zeros(2, 2, 12, 16)}, VALUE, ("value", "[2, 2, 12, 16]", "key")),
    "heads": (
        {"key": zeros(2, 3, 24, 16), "value": zeros(2, 3, 24, 16)},
        VALUE,
        ("key", "3 heads", "divide", "4"),
    ),
    "no key heads": (
        {"key": zeros(2, 0, 24, 16), "value": zeros(2, 0, 24, 16)},
        VALUE,
        ("key", "0 heads", "divide", "4"),
    ),
    "mask rows": ({"mask": zeros(1, 1, 7, 24).bool()}, VALUE, ("[1, 1, 7, 24]", "[2, 4, 40, 24]")),
    "mask keys": ({"mask": zeros(1, 1, 40, 9)}, VALUE, ("mask", "[1, 1, 40, 9]")),
    "mask heads": ({"mask": zeros(1, 2, 40, 24)}, VALUE, ("mask", "[1, 2, 40, 24]")),
    "mask rank": ({"mask": zeros(40, 24)}, VALUE, ("mask", "[40, 24]", "4 axes")),
    "mask dtype": ({"mask": zeros(1, 1, 40, 24).int()}, TYPE, ("mask", "int32", "bool")),
    "no seed": ({"dropout_p": 0.5}, TYPE, ("seed", "None", "two int32")),
    "seed dtype": ({"dropout_p": 0.5, "seed": zeros(2)}, TYPE, ("seed", "float32", "two int32")),
    "seed length": ({"dropout_p": 0.5, "seed": zeros(1).int()}, TYPE, ("seed", "[1]")),
}
RESULTS: dict[str, Case] = {
    "out dtype": ({"out": zeros(2, 4, 40, 16).half()}, TYPE, ("out", "float16", "float32")),
    "out rows": ({"out": zeros(2, 4, 39, 16)}, VALUE, ("out", "[2, 4, 39, 16]", "[2, 4, 40, 16]")),
    "lse dtype": ({"lse": zeros(2, 4, 40).half()}, TYPE, ("lse", "float16", "float32")),
    "lse rows": ({"lse": zeros(2, 4, 3)}, VALUE, ("lse", "[2, 4, 3]", "[2, 4, 40]")),
    "no lse": ({"lse": zeros(0)}, VALUE, ("lse", "[0]", "[2, 4, 40]")),
    "grad_out dtype": ({"grad_out": zeros(2, 4, 40, 16).half()}, TYPE, ("grad_out", "float16")),
    "grad_out width": ({"grad_out": zeros(2, 4, 40, 1)}, VALUE, ("grad_out", "[2, 4, 40, 1]")),
    "grad_out rank": ({"grad_out": zeros(4, 40, 16)}, VALUE, ("grad_out", "[4, 40, 16]")),
    "grad_lse dtype": ({"grad_lse": zeros(2, 4, 40).double()}, TYPE, ("grad_lse", "float64")),
    "grad_lse rows": ({"grad_lse": zeros(2, 4, 41)}, VALUE, ("grad_lse", "[2, 4, 41]")),
}


def refused(error: pytest.ExceptionInfo[Exception], words: tuple[str, ...]) -> None:
    """The message names what is wrong, and no backend has served or failed."""
    message = str(error.value)
    assert [word for word in words if word not in message] == []
    assert journal.stats()["calls"] == {}
    assert journal.stats()["failures"] == []


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_operands_of_a_forward(backend: str, name: str) -> None:
    """Operands that contradict one another are an error of the argument that is named."""
    changes, kind, words = OPERANDS[name]
    with pytest.raises(kind) as error:
        forward(backend, **changes)
    refused(error, words)


@pytest.mark.grad
@pytest.mark.parametrize("name", OPERANDS | RESULTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_operands_of_a_backward(backend: str, name: str) -> None:
    """The same in a backward, and what the forward left and what arrives has to fit too."""
    changes, kind, words = (OPERANDS | RESULTS)[name]
    with pytest.raises(kind) as error:
        backward(backend, **changes)
    refused(error, words)


@pytest.mark.parametrize("backend", ["cpu", "aten", "reference", "auto"])
def test_operands_that_fit(backend: str) -> None:
    """The calls that the cases above change are served as they are."""
    out, _ = forward(backend)
    assert out.shape == (2, 4, 40, 16)
    grads = backward(backend)
    assert [grad.shape for grad in grads[:3]] == [(2, 4, 40, 16), *((2, 2, 24, 16),) * 2]


def test_other_devices() -> None:
    """Tensors that torch's dispatcher lets through together have to be on one device."""
    here, elsewhere = zeros(1, 2, 8, 4), zeros(1, 2, 8, 4, device="meta")
    for name, tensors in {
        "key and value are on meta": (here, elsewhere, here, None),
        "key and value are on cpu and meta": (here, here, elsewhere, None),
        "mask is on meta": (here, here, here, elsewhere),
    }.items():
        with pytest.raises(VALUE, match=name):
            check_operands(*tensors)
    with pytest.raises(TYPE, match=r"seed .* on meta; .* on cpu"):
        checked_seed(zeros(2, dtype=torch.int32, device="meta"), here.device)
    problem = describe(
        Tensors(here, here, here), Options(1.0), stage="backward", grad_out=here, grad=True
    )
    row, row_elsewhere = zeros(1, 2, 8), zeros(1, 2, 8, device="meta")
    check_results(problem, Saved(here, row), Upstream(here, row))
    for name, saved, upstream in (
        ("out", Saved(elsewhere, row), Upstream(here, row)),
        ("lse", Saved(here, row_elsewhere), Upstream(here, row)),
        ("grad_out", Saved(here, row), Upstream(elsewhere, row)),
        ("grad_lse", Saved(here, row), Upstream(here, row_elsewhere)),
    ):
        with pytest.raises(VALUE, match=f"^{name} is on meta; it must be on query's device, cpu"):
            check_results(problem, saved, upstream)


def test_message_shows_the_operands() -> None:
    """An error about shapes shows those of all operands, with their strides."""
    with pytest.raises(VALUE) as error:
        forward("auto", value=zeros(2, 2, 12, 16).mT)
    shown = str(error.value)
    assert "query: shape [2, 4, 40, 16], strides (2560, 640, 16, 1)" in shown
    assert "value: shape [2, 2, 16, 12], strides (384, 192, 1, 16)" in shown


@pytest.mark.dropout
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_strided_seed(backend: str) -> None:
    """The words of a seed may lie apart."""
    query = torch.randn(1, 2, 6, 8)
    whole = torch.tensor([7, 0, -9], dtype=torch.int32)
    operands = {"query": query, "key": query, "value": query, "dropout_p": 0.5}
    expected, _ = forward(backend, **operands, seed=whole[[0, 2]])
    assert torch.equal(forward(backend, **operands, seed=whole[::2])[0], expected)


@pytest.mark.dropout
def test_seed_without_dropout_is_ignored() -> None:
    """A seed that nothing is drawn from is not looked at."""
    query = torch.randn(1, 2, 6, 8)
    operands = {"query": query, "key": query, "value": query}
    expected, _ = forward("cpu", **operands)
    assert torch.equal(forward("cpu", **operands, seed=zeros(5))[0], expected)

"""Bad input: the documented error, naming the argument, before anything reaches a kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import orchard
from orchard.dispatch.journal import journal

pytestmark = pytest.mark.errors

VALUE, TYPE = orchard.ArgumentValueError, orchard.ArgumentTypeError


def good(**changes: Any) -> dict[str, Any]:
    arguments = {
        "query": torch.randn(2, 4, 5, 8),
        "key": torch.randn(2, 2, 7, 8),
        "value": torch.randn(2, 2, 7, 6),
    }
    return arguments | changes


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(4, 2)], layout=torch.jagged)


CASES: list[tuple[str, dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ("query not a tensor", {"query": [1.0]}, TYPE, ("query", "list", "torch.Tensor")),
    ("value None", {"value": None}, TYPE, ("value", "None", "torch.Tensor")),
    ("query nested", {"query": nested()}, TYPE, ("query", "nested", "dense")),
    ("key sparse", {"key": zeros(2, 2, 7, 8).to_sparse()}, TYPE, ("key", "sparse_coo", "dense")),
    ("integer operands", {"query": zeros(2, 4, 5, 8).int()}, TYPE, ("query", "int32", "float32")),
    ("bool operands", {"query": zeros(2, 4, 5, 8).bool()}, TYPE, ("query", "torch.bool")),
    ("complex operands", {"query": zeros(2, 4, 5, 8).cfloat()}, TYPE, ("query", "complex64")),
    ("fp8", {"query": zeros(2, 4, 5, 8).to(torch.float8_e4m3fn)}, TYPE, ("query", "float8")),
    ("dtype mix", {"key": zeros(2, 2, 7, 8).half()}, TYPE, ("key", "float16", "float32")),
    ("device mix", {"key": zeros(2, 2, 7, 8, device="meta")}, VALUE, ("key", "meta", "cpu")),
    ("rank 1", {"query": zeros(8), "key": zeros(8), "value": zeros(8)}, VALUE, ("1", "axes")),
    ("rank 5", {"query": zeros(1, 2, 4, 5, 8)}, VALUE, ("5", "axes")),
    ("rank mix", {"key": zeros(2, 7, 8)}, VALUE, ("3", "axes")),
    ("batch", {"key": zeros(3, 2, 7, 8)}, VALUE, ("key", "batch", "3", "2")),
    ("batch broadcast", {"key": zeros(1, 2, 7, 8)}, VALUE, ("key", "batch", "1")),
    ("head dimension", {"key": zeros(2, 2, 7, 9)}, VALUE, ("key", "head dimension", "9", "8")),
    ("value length", {"value": zeros(2, 2, 6, 8)}, VALUE, ("value", "6", "7")),
    ("value heads", {"value": zeros(2, 4, 7, 8)}, VALUE, ("value", "heads", "4", "2")),
    (
        "head counts",
        {"key": zeros(2, 3, 7, 8), "value": zeros(2, 3, 7, 8)},
        VALUE,
        ("key", "3", "divide", "4"),
    ),
    (
        "no key heads",
        {"key": zeros(2, 0, 7, 8), "value": zeros(2, 0, 7, 8)},
        VALUE,
        ("key", "0", "divide"),
    ),
    ("mask type", {"mask": [[True]]}, TYPE, ("mask", "list")),
    ("mask shape", {"mask": zeros(5, 6)}, VALUE, ("mask", "[5, 6]", "[2, 4, 5, 7]")),
    ("mask rank", {"mask": zeros(1, 1, 1, 5, 7)}, VALUE, ("mask", "[2, 4, 5, 7]")),
    ("mask integer", {"mask": zeros(5, 7).int()}, TYPE, ("mask", "int32", "bool")),
    ("mask complex", {"mask": zeros(5, 7).cfloat()}, TYPE, ("mask", "complex64", "bool")),
    ("mask device", {"mask": zeros(5, 7, device="meta")}, VALUE, ("mask", "meta", "cpu")),
    ("mask sparse", {"mask": zeros(5, 7).to_sparse()}, TYPE, ("mask", "sparse")),
    ("causal", {"causal": "lower"}, VALUE, ("causal", "lower", "top_left", "bottom_right")),
    ("causal number", {"causal": 3}, VALUE, ("causal", "3")),
    ("window negative", {"window": (-2, 0)}, VALUE, ("window", "-2", "unbounded")),
    ("window single", {"window": 4}, TYPE, ("window", "4", "pair")),
    ("window length", {"window": (1, 2, 3)}, TYPE, ("window", "pair")),
    ("window floats", {"window": (1.0, 2.0)}, TYPE, ("window", "integers")),
    ("scale nan", {"scale": float("nan")}, VALUE, ("scale", "nan", "finite")),
    ("scale inf", {"scale": float("inf")}, VALUE, ("scale", "inf", "finite")),
    ("scale text", {"scale": "big"}, TYPE, ("scale", "big", "number")),
    ("softcap zero", {"softcap": 0.0}, VALUE, ("softcap", "0.0", "positive")),
    ("softcap negative", {"softcap": -1.0}, VALUE, ("softcap", "-1.0", "positive")),
    ("softcap nan", {"softcap": float("nan")}, VALUE, ("softcap", "nan", "finite")),
    ("dropout one", {"dropout_p": 1.0}, VALUE, ("dropout_p", "1.0", "[0, 1)")),
    ("dropout negative", {"dropout_p": -0.1}, VALUE, ("dropout_p", "-0.1", "[0, 1)")),
    ("dropout nan", {"dropout_p": float("nan")}, VALUE, ("dropout_p", "nan")),
    ("dropout None", {"dropout_p": None}, TYPE, ("dropout_p", "None", "[0, 1)")),
    ("layout", {"layout": "sbhd"}, VALUE, ("layout", "sbhd", "bhsd", "bshd")),
    ("backend", {"backend": "fastest"}, VALUE, ("backend", "fastest", "auto", "reference")),
    ("backend type", {"backend": 3}, TYPE, ("backend", "3")),
    (
        "generator type",
        {"dropout_p": 0.5, "generator": 17},
        TYPE,
        ("generator", "17", "torch.Generator"),
    ),
]


@pytest.mark.parametrize("function", [orchard.attention, orchard.explain], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("changes", "kind", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_wrong_argument(
    function: Any, changes: dict[str, Any], kind: type[Exception], words: tuple[str, ...]
) -> None:
    """The documented error, whose text names the argument, its value and what is allowed."""
    with pytest.raises(kind) as caught:
        function(**good(**changes))
    assert isinstance(caught.value, orchard.OrchardError)
    for word in words:
        assert word in str(caught.value)
    assert journal.stats()["calls"] == {}


def test_good_arguments_are_good() -> None:
    """The call that the sweep spoils is right as it stands."""
    assert orchard.attention(**good()).shape == (2, 4, 5, 6)


def test_shape_errors_show_all_three_operands() -> None:
    """Shapes, strides and dtypes of query, key and value are in the message."""
    with pytest.raises(VALUE) as caught:
        orchard.attention(**good(key=torch.randn(2, 8, 9, 2).transpose(1, 3)))
    text = str(caught.value)
    for name, shape, strides in (
        ("query", "[2, 4, 5, 8]", "(160, 40, 8, 1)"),
        ("key", "[2, 2, 9, 8]", "(144, 1, 2, 18)"),
        ("value", "[2, 2, 7, 6]", "(84, 42, 6, 1)"),
    ):
        assert f"{name}: shape {shape}, strides {strides}" in text


def test_errors_are_what_torch_users_catch() -> None:
    """`except ValueError`, `except TypeError` and `except RuntimeError` keep working."""
    assert issubclass(VALUE, ValueError)
    assert issubclass(TYPE, TypeError)
    assert issubclass(orchard.NotServedError, RuntimeError)
    assert issubclass(orchard.SettingError, ValueError)


def test_inputs_survive_an_error() -> None:
    """An error leaves the operands, their gradients and the random state as they were."""
    arguments = good(dropout_p=0.5, softcap=-1.0)
    before = {n: t.clone() for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    state = torch.get_rng_state()
    with pytest.raises(VALUE):
        orchard.attention(**arguments)
    assert all(torch.equal(arguments[name], tensor) for name, tensor in before.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_generator_of_another_device() -> None:
    """A generator has to live where query does."""

    class Elsewhere(torch.Generator):
        device = torch.device("cuda")

    with pytest.raises(VALUE, match="generator is on cuda"):
        orchard.attention(**good(dropout_p=0.5, generator=Elsewhere()))

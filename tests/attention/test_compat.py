"""torch's own attention call, by Orchard: its signature, its meaning and its errors."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import orchard
from orchard.attention.ops import Settings
from orchard.attention.problem import Tensors, Upstream
from orchard.testing.budget import Results, judge

LIMIT = 1e-10


class Call(NamedTuple):
    """Arguments of one call, by the shapes of its operands."""

    query: tuple[int, ...] = (2, 4, 7, 16)
    key: tuple[int, ...] = (2, 4, 9, 16)
    value: tuple[int, ...] = (2, 4, 9, 16)
    mask: tuple[str, tuple[int, ...]] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        make = torch.Generator().manual_seed(8)
        shapes = (self.query, self.key, self.value)
        drawn = [torch.randn(s, dtype=torch.float64, generator=make) for s in shapes]
        return tuple(t.to(dtype).requires_grad_() for t in drawn)  # type: ignore[return-value]

    def attn_mask(self, dtype: torch.dtype) -> Tensor | None:
        if self.mask is None:
            return None
        kind, shape = self.mask
        values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        if kind == "float":
            return values.to(dtype).requires_grad_()
        if kind == "closed":  # one row with nothing to attend to
            seen = values > -1
            seen[..., 0, :] = False
            return seen
        return values > -1


RANK3: dict[str, Any] = {"query": (4, 7, 16), "key": (4, 9, 16), "value": (4, 9, 16)}
RANK2: dict[str, Any] = {"query": (7, 16), "key": (9, 16), "value": (9, 16)}
GROUPED: dict[str, Any] = {"key": (2, 2, 9, 16), "value": (2, 2, 9, 16)}
CALLS = {
    "plain": Call(),
    "causal": Call(options={"is_causal": True}),
    "causal, more rows than keys": Call(query=(2, 4, 11, 16), options={"is_causal": True}),
    "causal, square": Call(query=(2, 4, 9, 16), options={"is_causal": True}),
    "scale": Call(options={"scale": 0.7}),
    "scale 0": Call(options={"scale": 0.0}),
    "scale of an int": Call(options={"scale": 1}),
    "scale of a negative": Call(options={"scale": -0.2}),
    "scale and causal": Call(options={"scale": 0.7, "is_causal": True}),
    "dropout_p of an int": Call(options={"dropout_p": 0}),
    "bool mask, 4-D": Call(mask=("bool", (2, 4, 7, 9))),
    "bool mask, keys of a batch": Call(mask=("bool", (2, 1, 1, 9))),
    "bool mask, 3-D": Call(mask=("bool", (4, 7, 9))),
    "bool mask, 2-D": Call(mask=("bool", (7, 9))),
    "bool mask, one row": Call(mask=("bool", (1, 9))),
    "bool mask, one column": Call(mask=("bool", (7, 1))),
    "bool mask, an empty row": Call(mask=("closed", (7, 9))),
    "bool mask, an empty row of each head": Call(mask=("closed", (2, 4, 7, 9))),
    "float mask, 4-D": Call(mask=("float", (2, 4, 7, 9))),
    "float mask, heads": Call(mask=("float", (1, 4, 1, 9))),
    "float mask, 3-D": Call(mask=("float", (4, 7, 9))),
    "float mask, 2-D": Call(mask=("float", (7, 9))),
    "float mask, one": Call(mask=("float", (1, 1))),
    "float mask and scale": Call(mask=("float", (7, 9)), options={"scale": 0.7}),
    "value dimension": Call(value=(2, 4, 9, 5)),
    "value dimension, causal": Call(value=(2, 4, 9, 24), options={"is_causal": True}),
    "grouped": Call(**GROUPED, options={"enable_gqa": True}),
    "grouped, one key head": Call(
        key=(2, 1, 9, 16), value=(2, 1, 9, 16), options={"enable_gqa": True}
    ),
    "grouped, causal": Call(**GROUPED, options={"enable_gqa": True, "is_causal": True}),
    "grouped, float mask": Call(
        **GROUPED, mask=("float", (2, 4, 7, 9)), options={"enable_gqa": True}
    ),
    "enable_gqa with equal heads": Call(options={"enable_gqa": True}),
    "3-D": Call(**RANK3),
    "3-D, causal": Call(**RANK3, options={"is_causal": True}),
    "3-D, float mask": Call(**RANK3, mask=("float", (4, 7, 9))),
    "3-D, bool mask, 2-D": Call(**RANK3, mask=("bool", (7, 9))),
    "3-D, grouped": Call(
        query=(4, 7, 16), key=(2, 9, 16), value=(2, 9, 16), options={"enable_gqa": True}
    ),
    "2-D": Call(**RANK2),
    "2-D, causal": Call(**RANK2, options={"is_causal": True}),
    "2-D, float mask": Call(**RANK2, mask=("float", (7, 9))),
    "no keys": Call(key=(2, 4, 0, 16), value=(2, 4, 0, 16)),
    "no rows": Call(query=(2, 4, 0, 16)),
    "no batch": Call(query=(0, 4, 7, 16), key=(0, 4, 9, 16), value=(0, 4, 9, 16)),
    "no head dimension": Call(query=(2, 4, 7, 0), key=(2, 4, 9, 0)),
    "no value dimension": Call(value=(2, 4, 9, 0)),
    "one of everything": Call(query=(1, 1, 1, 1), key=(1, 1, 1, 1), value=(1, 1, 1, 1)),
}


@pytest.mark.grad
@pytest.mark.parametrize("name", CALLS)
def test_against_torch_in_fp64(name: str) -> None:
    """Output and gradients, of the mask too, equal torch's to 1e-10, and Orchard serves."""
    call = CALLS[name]
    inputs, mask = call.operands(torch.float64), call.attn_mask(torch.float64)
    leaves = [*inputs, *([mask] if mask is not None and mask.requires_grad else [])]
    got = orchard.scaled_dot_product_attention(*inputs, attn_mask=mask, **call.options)
    want = F.scaled_dot_product_attention(*inputs, attn_mask=mask, **call.options)
    torch.testing.assert_close(got, want, atol=LIMIT, rtol=0)
    upstream = torch.randn_like(want)
    for mine, theirs in zip(
        torch.autograd.grad(got, leaves, upstream),
        torch.autograd.grad(want, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=LIMIT, rtol=0)
    stats = orchard.stats()
    assert sum(stats["calls"]["forward"].values()) == 1
    assert sum(stats["calls"]["backward"].values()) == 1
    assert stats["torch_sdpa"]["delegated"] == {}


@pytest.mark.parametrize("name", CALLS)
def test_without_gradients(name: str) -> None:
    """Without gradients the output equals torch's too, in shape, dtype and value."""
    call = CALLS[name]
    inputs, mask = call.operands(torch.float64), call.attn_mask(torch.float64)
    with torch.no_grad():
        got = orchard.scaled_dot_product_attention(*inputs, attn_mask=mask, **call.options)
        want = F.scaled_dot_product_attention(*inputs, attn_mask=mask, **call.options)
    torch.testing.assert_close(got, want, atol=LIMIT, rtol=0)
    assert orchard.stats()["torch_sdpa"]["delegated"] == {}


def four_axes(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (4 - tensor.ndim)]


@pytest.mark.dtype
@pytest.mark.grad
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if all(call.query)])
def test_within_budget(name: str, dtype: torch.dtype) -> None:
    """In the dtypes that models use, output and gradients are within the error budget."""
    call = CALLS[name]
    inputs, mask = call.operands(dtype), call.attn_mask(dtype)
    mask_grad = mask is not None and mask.requires_grad
    leaves = [*inputs, *([mask] if mask_grad else [])]
    out = orchard.scaled_dot_product_attention(*inputs, attn_mask=mask, **call.options)
    assert out.dtype == dtype
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, upstream)

    tensors = Tensors(
        *(four_axes(t.detach()) for t in inputs), None if mask is None else four_axes(mask.detach())
    )
    right = 0 if call.options.get("is_causal") else -1
    scale = call.options.get("scale")
    settings = Settings(scale, 0.0, 0.0, -1, right, False, "auto")
    options = settings.options(tensors.query, tensors.key)
    results = Results(four_axes(out.detach()), torch.empty(0), *map(four_axes, grads))
    verdicts = judge(
        results, tensors, options, Upstream(four_axes(upstream), None), mask_grad=mask_grad
    )
    judged = [verdict for verdict in verdicts if not verdict.name.startswith("lse")]
    assert len(judged) == 1 + len(leaves)
    assert [str(verdict) for verdict in judged if not verdict.ok] == []


@pytest.mark.dtype
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_float32_mask_for_every_dtype(dtype: torch.dtype) -> None:
    """An fp32 mask goes with operands of any dtype, as torch takes it."""
    call = Call(mask=("float", (7, 9)))
    inputs, mask = call.operands(dtype), call.attn_mask(torch.float32)
    assert mask is not None
    with torch.no_grad():
        out = orchard.scaled_dot_product_attention(*inputs, attn_mask=mask)
        assert F.scaled_dot_product_attention(*inputs, attn_mask=mask).dtype == out.dtype == dtype
    tensors = Tensors(*(t.detach() for t in inputs), four_axes(mask.detach()))
    settings = Settings(None, 0.0, 0.0, -1, -1, False, "auto")
    options = settings.options(tensors.query, tensors.key)
    (verdict, *_) = judge(Results(out, torch.empty(0)), tensors, options)
    assert verdict.name == "out"
    assert verdict.ok, str(verdict)
    assert orchard.stats()["torch_sdpa"]["delegated"] == {}


@pytest.mark.dropout
def test_dropout_is_orchards() -> None:
    """dropout_p draws Orchard's bits, reproducible by torch.manual_seed."""
    inputs = Call().operands(torch.float64)
    torch.manual_seed(3)
    got = orchard.scaled_dot_product_attention(*inputs, dropout_p=0.5)
    torch.manual_seed(3)
    want = orchard.attention(*inputs, dropout_p=0.5)
    assert torch.equal(got, want)
    assert not torch.allclose(got, orchard.scaled_dot_product_attention(*inputs))


def test_autocast_as_torch() -> None:
    """Under autocast the dtype of the result is torch's, and mixed dtypes are taken."""
    query, key, value = Call().operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for operands in ((query, key, value), (query.bfloat16(), key, value.half())):
            got = orchard.scaled_dot_product_attention(*operands)
            want = F.scaled_dot_product_attention(*operands)
            assert got.dtype == want.dtype == torch.bfloat16
    low = Tensors(*(t.detach().bfloat16() for t in (query, key, value)))
    options = Settings(None, 0.0, 0.0, -1, -1, False, "auto").options(*low[:2])
    with torch.autocast("cpu", torch.bfloat16):
        out = orchard.scaled_dot_product_attention(query, key, value)
    (verdict, *_) = judge(Results(out.detach(), torch.empty(0)), low, options)
    assert verdict.name == "out"
    assert verdict.ok, str(verdict)


def test_meta_tensors_as_torch() -> None:
    """On the meta device the result has torch's shape and dtype."""
    inputs = [t.detach().to("meta") for t in Call().operands(torch.float16)]
    got = orchard.scaled_dot_product_attention(*inputs)
    want = F.scaled_dot_product_attention(*inputs)
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)


@pytest.mark.parametrize(
    "options",
    [{"scale": True}, {"scale": torch.tensor(0.5)}, {"dropout_p": torch.tensor(0.0)}],
    ids=["scale True", "scale tensor", "dropout_p tensor"],
)
def test_numbers_as_torch_takes_them(options: dict[str, Any]) -> None:
    """What torch's parser takes for a number is taken here."""
    inputs = Call().operands(torch.float64)
    got = orchard.scaled_dot_product_attention(*inputs, **options)
    want = F.scaled_dot_product_attention(*inputs, **options)
    torch.testing.assert_close(got, want, atol=LIMIT, rtol=0)


# What Orchard does not compute is torch's


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def plain() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = Call().operands(torch.float32)
    return query.detach(), key.detach(), value.detach()


def with_options(*more: Any, **options: Any) -> Callable[[], Arguments]:
    return lambda: ((*plain(), *more), options)


def with_operands(change: Callable[[Tensor, Tensor, Tensor], Any], **options: Any) -> Any:
    return lambda: (tuple(change(*plain())), options)


DELEGATED: dict[str, tuple[Callable[[], Arguments], str]] = {
    "5-D": (with_operands(lambda q, k, v: (q[None], k[None], v[None])), "axes"),
    "ranks differ": (with_operands(lambda q, k, v: (q, k[0], v[0])), "axes"),
    "batch broadcast": (with_operands(lambda q, k, v: (q, k[:1], v[:1])), "broadcasting"),
    "heads broadcast": (with_operands(lambda q, k, v: (q, k[:, :1], v[:, :1])), "head counts"),
    "mask with causal": (
        with_options(torch.ones(7, 9, dtype=torch.bool), is_causal=True),
        "mask together with causal",
    ),
    "dropout_p 1": (with_options(dropout_p=1.0), "dropout_p"),
    "scale inf": (with_options(scale=float("inf")), "scale"),
    "subclass": (
        with_operands(lambda q, k, v: (q.as_subclass(Subclass), k, v)),
        "not a plain dense tensor",
    ),
}


class Subclass(Tensor):
    """Behaves as its base does."""


@pytest.mark.parametrize("while_enabled", [False, True], ids=["plain", "while enabled"])
@pytest.mark.parametrize("name", DELEGATED)
def test_delegated(name: str, while_enabled: bool) -> None:
    """A call that Orchard does not serve is torch's, to the bit, and is journaled once."""
    make, words = DELEGATED[name]
    arguments, options = make()
    want = F.scaled_dot_product_attention(*arguments, **options)
    if while_enabled:
        orchard.enable()
    got = orchard.scaled_dot_product_attention(*arguments, **options)
    assert type(got) is type(want)
    torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)
    stats = orchard.stats()
    assert stats["calls"] == {}
    ((sentence, times),) = stats["torch_sdpa"]["delegated"].items()
    assert words in sentence
    assert times == 1


BAD: dict[str, Callable[[], Arguments]] = {
    "dtypes differ": with_operands(lambda q, k, v: (q, k.double(), v)),
    "integers": with_operands(lambda q, k, v: (q.int(), k.int(), v.int())),
    "complex": with_operands(lambda q, k, v: (q + 0j, k + 0j, v + 0j)),
    "1-D": with_operands(lambda q, k, v: (q[0, 0, 0], k[0, 0, 0], v[0, 0, 0])),
    "head dimensions differ": with_operands(lambda q, k, v: (q, k[..., :8], v)),
    "batches differ": with_operands(lambda q, k, v: (q, k.repeat(2, 1, 1, 1), v)),
    "heads without enable_gqa": with_operands(lambda q, k, v: (q, k[:, :2], v[:, :2])),
    "heads that do not divide": with_operands(
        lambda q, k, v: (q, k[:, :3], v[:, :3]), enable_gqa=True
    ),
    "enable_gqa of 2-D": with_operands(
        lambda q, k, v: (q[0, 0], k[0, 0], v[0, 0]), enable_gqa=True
    ),
    "devices differ": with_operands(lambda q, k, v: (q.to("meta"), k, v)),
    "sparse": with_operands(lambda q, k, v: (q.to_sparse(), k, v)),
    "mask of int64": with_options(torch.ones(7, 9, dtype=torch.int64)),
    "mask of another float": with_options(torch.ones(7, 9, dtype=torch.float16)),
    "mask of complex": with_options(torch.ones(7, 9) + 0j),
    "mask that does not broadcast": with_options(torch.ones(7, 8)),
    "mask of 5 axes": with_options(torch.ones(1, 2, 4, 7, 9)),
    "mask of 1 axis": with_options(torch.ones(9)),
    "mask of no axis": with_options(torch.tensor(0.5)),
    "dropout_p below 0": with_options(dropout_p=-0.1),
    "dropout_p above 1": with_options(dropout_p=1.5),
    "dropout_p not a number": with_options(dropout_p=float("nan")),
    "dropout_p a string": with_options(None, "half"),
    "dropout_p None": with_options(None, None),
    "is_causal an int": with_options(None, 0.0, 2),
    "is_causal a string": with_options(None, 0.0, "bottom_right"),
    "scale a string": with_options(scale="small"),
    "mask a list": with_options([1.0]),
    "mask a number": with_options(1.0),
    "query a number": with_operands(lambda q, k, v: (1, k, v)),
    "query None": with_operands(lambda q, k, v: (None, k, v)),
    "key a list": with_operands(lambda q, k, v: (q, [1.0], v)),
}


def failure(call: Callable[..., Tensor], make: Callable[[], Arguments]) -> tuple[type, str]:
    arguments, options = make()
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call(*arguments, **options)
    return caught.type, str(caught.value)


@pytest.mark.errors
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", BAD)
def test_errors_are_torchs(name: str) -> None:
    """A bad call raises what torch raises: the same type and the same words."""
    want = failure(F.scaled_dot_product_attention, BAD[name])
    assert failure(orchard.scaled_dot_product_attention, BAD[name]) == want
    assert orchard.stats()["calls"] == {}


# The signature


def documented() -> dict[str, Any]:
    """Parameters and defaults from the first lines of torch's docstring."""
    text = F.scaled_dot_product_attention.__doc__
    assert text is not None
    head, arrow, _ = text.partition("-> Tensor:")
    assert arrow
    (function,) = ast.parse(f"def {head.strip()}: ...").body
    assert isinstance(function, ast.FunctionDef)
    names = [argument.arg for argument in function.args.args]
    defaults = [ast.literal_eval(default) for default in function.args.defaults]
    padding = [inspect.Parameter.empty] * (len(names) - len(defaults))
    return dict(zip(names, [*padding, *defaults], strict=True))


def test_signature_is_the_documented_one() -> None:
    """Names, order and defaults are those of torch's documentation."""
    mine = inspect.signature(orchard.scaled_dot_product_attention).parameters
    assert {name: parameter.default for name, parameter in mine.items()} == documented()
    assert list(mine) == list(documented())
    assert len(mine) == 8


def test_signature_is_the_operators() -> None:
    """Names, order and defaults are those of torch's operator."""
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    mine = inspect.signature(orchard.scaled_dot_product_attention).parameters
    assert [argument.name for argument in schema.arguments] == list(mine)
    for argument in schema.arguments:
        if argument.has_default_value():
            assert mine[argument.name].default == argument.default_value
        else:
            assert mine[argument.name].default is inspect.Parameter.empty


def test_by_position_and_by_name() -> None:
    """Arguments in torch's order mean what they mean by name."""
    inputs = Call().operands(torch.float64)
    mask = torch.ones(7, 9, dtype=torch.bool).tril()
    by_name = {"attn_mask": mask, "dropout_p": 0.0, "is_causal": False}
    got = orchard.scaled_dot_product_attention(*inputs, mask, 0.0, False, scale=0.2)
    want = F.scaled_dot_product_attention(
        query=inputs[0], key=inputs[1], value=inputs[2], scale=0.2, **by_name
    )
    torch.testing.assert_close(got, want, atol=LIMIT, rtol=0)

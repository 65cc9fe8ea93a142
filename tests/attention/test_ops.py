"""The operators under torch's own checks and under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import library as torch_library

import orchard
from orchard.testing.inputs import BY_NAME, guarded

pytestmark = pytest.mark.compile

LAYOUTS = {
    "contiguous": ("contiguous", "contiguous", "contiguous"),
    "bshd": ("bshd", "bshd", "bshd"),
    "mixed": ("last_strided", "bshd", "rows_padded"),
    "expanded": ("batch_expanded", "heads_expanded", "last_outermost"),
}
DEFAULTS: dict[str, Any] = {
    "scale": None,
    "softcap": 0.0,
    "dropout_p": 0.0,
    "left": -1,
    "right": -1,
    "bottom_right": False,
    "backend": "auto",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal_dropout": {"right": 0, "dropout_p": 0.25},
    "window_softcap": {"left": 2, "right": 3, "bottom_right": True, "softcap": 4.0},
    "scaled_reference": {"scale": 0.2, "backend": "reference"},
}


def operands(layout: str, dtype: torch.dtype = torch.float32, *, grad: bool) -> list[Tensor]:
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))
    return [
        guarded(shape, BY_NAME[view], dtype=dtype).tensor.requires_grad_(grad)
        for shape, view in zip(shapes, LAYOUTS[layout], strict=True)
    ]


def arguments(layout: str, option: str, mask_kind: str, *, grad: bool) -> tuple[Any, ...]:
    query, key, value = operands(layout, grad=grad)
    mask = None
    if mask_kind == "bool":
        mask = torch.rand(2, 1, 5, 7) > 0.2
    elif mask_kind == "additive":
        mask = torch.randn(1, 4, 1, 7, requires_grad=grad)
    options = DEFAULTS | OPTIONS[option]
    seed = torch.tensor([3, 4], dtype=torch.int32) if options["dropout_p"] else None
    return query, key, value, mask, seed, *options.values()


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("mask_kind", ["none", "bool", "additive"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_forward(layout: str, option: str, mask_kind: str, grad: bool) -> None:
    """Schema, autograd registration, fake and AOT dispatch of the forward operator agree."""
    args = arguments(layout, option, mask_kind, grad=grad)
    mask_grad = grad and mask_kind == "additive"
    outcome = torch_library.opcheck(
        torch.ops.orchard.attention_forward.default, (*args, True, grad, mask_grad)
    )
    assert set(outcome.values()) == {"SUCCESS"}
    assert len(outcome) == 4


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("mask_kind", ["none", "additive"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_backward(layout: str, option: str, mask_kind: str, grad: bool) -> None:
    """The same of the backward operator, whose own gradient is there for create_graph."""
    args = arguments(layout, option, mask_kind, grad=grad)
    mask_grad = mask_kind == "additive"
    with torch.no_grad():
        out, lse = torch.ops.orchard.attention_forward(*args, True, True, mask_grad)
    grad_out = torch.randn_like(out).requires_grad_(grad)
    grad_lse = torch.randn_like(lse).requires_grad_(grad)
    outcome = torch_library.opcheck(
        torch.ops.orchard.attention_backward.default,
        (grad_out, grad_lse, *args[:5], out, lse, *args[5:], mask_grad),
    )
    assert set(outcome.values()) == {"SUCCESS"}
    assert len(outcome) == 4


def test_lse_that_nobody_asked_for_is_empty() -> None:
    """Without gradients and return_lse the operator writes no lse."""
    args = arguments("contiguous", "plain", "none", grad=False)
    _, lse = torch.ops.orchard.attention_forward(*args, False, False, False)
    assert lse.shape == (0,)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "bottom_right_window": {"causal": "bottom_right", "window": (4, -1)},
    "softcap_bshd": {"softcap": 3.0, "layout": "bshd"},
    "lse": {"return_lse": True},
}


def run(call: Callable[..., Any], tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Outputs and gradients of a call."""
    result = call(*tensors, **options)
    outputs = list(result) if isinstance(result, tuple) else [result]
    loss = sum(output.cos().sum() for output in outputs)
    grads = torch.autograd.grad(loss, tensors)  # type: ignore[arg-type]
    return [*(output.detach() for output in outputs), *grads]


@pytest.mark.parametrize("engine", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_equals_eager(name: str, engine: str) -> None:
    """fullgraph compilation, forward and backward, gives eager's bits."""
    torch.compiler.reset()
    tensors = [torch.randn(2, 4, 4, 8, requires_grad=True) for _ in range(3)]
    call = torch.compile(orchard.attention, backend=engine, fullgraph=True)
    compiled = run(call, tensors, **CALLS[name])
    for mine, eager in zip(compiled, run(orchard.attention, tensors, **CALLS[name]), strict=True):
        assert torch.equal(mine, eager)
        assert mine.stride() == eager.stride()


@pytest.mark.parametrize("engine", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_mask_and_strides(engine: str) -> None:
    """Strided operands and an additive mask with its gradient go through a compiled graph."""
    torch.compiler.reset()
    tensors = operands("mixed", grad=True)
    mask = torch.randn(4, 1, 7, requires_grad=True)

    def function(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return orchard.attention(query, key, value, mask=mask, causal=True)

    call = torch.compile(function, backend=engine, fullgraph=True)
    compiled = run(call, [*tensors, mask])
    for mine, eager in zip(compiled, run(function, [*tensors, mask]), strict=True):
        assert torch.equal(mine, eager)


@pytest.mark.dropout
@pytest.mark.parametrize("engine", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_dropout_is_consistent(engine: str) -> None:
    """A compiled graph draws new bits per call and replays them in its backward."""
    torch.compiler.reset()
    query, key = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 40, 8)
    value = torch.eye(40).expand(1, 2, 40, 40).clone().requires_grad_()

    @torch.compile(backend=engine, fullgraph=True)
    def call(value: Tensor) -> Tensor:
        return orchard.attention(query, key, value, dropout_p=0.6)

    first, second = call(value), call(value)
    assert not torch.equal(first == 0, second == 0)
    for out in (first, second):
        (grad,) = torch.autograd.grad(out.sum(), value)
        assert torch.equal(grad[..., 0] != 0, (out != 0).any(2))
        assert 0.5 < float((out == 0).double().mean()) < 0.7


@pytest.mark.parametrize("engine", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_sizes_share_one_compilation(engine: str) -> None:
    """Different sizes run through one dynamic graph, forward and backward."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    call = torch.compile(orchard.attention, backend=engine, fullgraph=True, dynamic=True)
    for batch, rows, keys in ((2, 6, 9), (3, 17, 31), (5, 64, 50), (4, 9, 9)):
        tensors = [
            torch.randn(batch, 4, size, 8, requires_grad=True) for size in (rows, keys, keys)
        ]
        compiled = run(call, tensors, causal="bottom_right")
        eager = run(orchard.attention, tensors, causal="bottom_right")
        for mine, theirs in zip(compiled, eager, strict=True):
            assert torch.equal(mine, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_fake_outputs_follow_the_query() -> None:
    """The fake promises the strides that the kernel delivers, for every layout."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for view in BY_NAME.values():
        real = [guarded((2, 4, 5, 8), view).tensor for _ in range(3)]
        out = orchard.attention(*real)
        with FakeTensorMode() as mode:
            fake = orchard.attention(*(mode.from_tensor(tensor) for tensor in real))
        assert fake.stride() == out.stride(), view.name
        assert fake.dtype == out.dtype


def test_export() -> None:
    """torch.export keeps one Orchard node per call."""

    class Model(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return orchard.attention(query, key, key, causal=True)

    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    program = torch.export.export(Model(), (query, key))
    names = [str(node.target) for node in program.graph.nodes if "orchard" in str(node.target)]
    assert names == ["orchard.attention_forward.default"]
    assert torch.equal(program.module()(query, key), Model()(query, key))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda q: f(q).square().sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x.sin())[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.sin(),))[1],
    "grad of grad": lambda f, x: torch.func.grad(
        lambda p: torch.func.grad(lambda q: f(q).square().sum())(p).sin().sum()
    )(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x.cos()])),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda q: f(q).square().sum()))(
        torch.stack([x, x.cos()])
    ),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@pytest.mark.grad
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_function_transforms(name: str) -> None:
    """torch.func's transforms of a call are those of the definition."""
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64)

    def textbook(q: Tensor) -> Tensor:
        seen = torch.ones(3, 3, dtype=torch.bool).tril()
        return torch.softmax((q @ q.mT / 2).masked_fill(~seen, -torch.inf), -1) @ q

    got = TRANSFORMS[name](lambda q: orchard.attention(q, q, q, causal=True), x)
    torch.testing.assert_close(got, TRANSFORMS[name](textbook, x), atol=1e-10, rtol=0)


@pytest.mark.grad
def test_forward_mode() -> None:
    """The tangent of a dual tensor comes out in the operands' dtype, never silently dropped."""
    query, tangent = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, tangent)
        out = orchard.attention(dual, query, query)
        found = torch.autograd.forward_ad.unpack_dual(out).tangent
        low = orchard.attention(*(t.bfloat16() for t in (dual, query, query)))
        textbook = torch.softmax(dual @ query.mT / 8**0.5, -1) @ query
        expected = torch.autograd.forward_ad.unpack_dual(textbook).tangent
        assert torch.autograd.forward_ad.unpack_dual(low).tangent.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)

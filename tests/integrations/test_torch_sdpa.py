"""Routing of torch's own attention: everything while enabled, nothing before and after."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as early_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import orchard
from orchard.attention.ops import Settings
from orchard.attention.problem import Tensors, Upstream
from orchard.testing.budget import Results, judge

pytestmark = [pytest.mark.integration]

LIMIT = 1e-10
NOTHING = {
    "calls": {},
    "kernels": {},
    "fallbacks": [],
    "failures": [],
    "torch_sdpa": {"served": 0, "delegated": {}},
}
OPERATOR = "aten::scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def _fastpath() -> Iterator[None]:
    """torch's fast path as it is by default, and as it was afterwards."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)
    yield
    while orchard.integrations.torch_sdpa._state.depth:
        orchard.disable()
    torch.backends.mha.set_fastpath_enabled(before)


def operands(rows: int = 7, **options: Any) -> list[Tensor]:
    make = torch.Generator().manual_seed(rows)
    options = {"dtype": torch.float64} | options
    return [torch.randn(2, 4, rows, 8, generator=make, **options) for _ in range(3)]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=LIMIT, rtol=0)


def served() -> tuple[int, int, int]:
    """(calls of torch's SDPA taken over, forwards, backwards) since the last look."""
    stats = orchard.stats(reset=True)
    assert stats["torch_sdpa"]["delegated"] == {}
    forwards, backwards = (
        sum(stats["calls"].get(stage, {}).values()) for stage in ("forward", "backward")
    )
    return stats["torch_sdpa"]["served"], forwards, backwards


def torch_state() -> dict[str, Any]:
    """What enabling may touch in torch."""
    return {
        "kernels": torch._C._dispatch_dump(OPERATOR),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "functional": dict(vars(F)),
        "builtin": torch._C._nn.scaled_dot_product_attention,
        "attention module": dict(vars(nn.MultiheadAttention)),
        "encoder layer": dict(vars(nn.TransformerEncoderLayer)),
        "libraries": frozenset(library._impls),
    }


# On and off


def test_off_by_default() -> None:
    """A process that only imports Orchard computes with torch, and nothing is counted."""
    inputs = operands()
    F.scaled_dot_product_attention(*inputs)
    assert orchard.stats() == NOTHING


def test_enable_and_disable() -> None:
    """Between enable() and disable() Orchard serves, before and after torch does."""
    inputs = operands()
    want = F.scaled_dot_product_attention(*inputs)
    assert served() == (0, 0, 0)
    orchard.enable()
    close(F.scaled_dot_product_attention(*inputs), want)
    assert served() == (1, 1, 0)
    orchard.disable()
    assert torch.equal(F.scaled_dot_product_attention(*inputs), want)
    assert served() == (0, 0, 0)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_nested(depth: int) -> None:
    """As many disable() as enable() switch off, and not one sooner."""
    before, inputs = torch_state(), operands()
    for _ in range(depth):
        orchard.enable()
    for _ in range(depth):
        F.scaled_dot_product_attention(*inputs)
        assert served() == (1, 1, 0)
        orchard.disable()
    F.scaled_dot_product_attention(*inputs)
    assert served() == (0, 0, 0)
    assert torch_state() == before


def test_nested_blocks() -> None:
    """Blocks within blocks and within enable() leave the outer one on."""
    before, inputs = torch_state(), operands()
    orchard.enable()
    with orchard.enabled(), orchard.enabled():
        F.scaled_dot_product_attention(*inputs)
    F.scaled_dot_product_attention(*inputs)
    assert served() == (2, 2, 0)
    orchard.disable()
    assert torch_state() == before


def test_repeated() -> None:
    """Switching on and off many times works each time and leaves nothing behind."""
    before, inputs = torch_state(), operands()
    for _ in range(20):
        with orchard.enabled():
            F.scaled_dot_product_attention(*inputs)
        assert served() == (1, 1, 0)
        F.scaled_dot_product_attention(*inputs)
        assert served() == (0, 0, 0)
        assert torch_state() == before


def test_extra_disable_is_harmless() -> None:
    """disable() without enable() changes nothing, and the next enable() counts."""
    before, inputs = torch_state(), operands()
    orchard.disable()
    orchard.disable()
    assert torch_state() == before
    with orchard.enabled():
        F.scaled_dot_product_attention(*inputs)
    assert served() == (1, 1, 0)
    orchard.disable()
    assert torch_state() == before


def test_an_exception_restores() -> None:
    """An exception inside the block leaves it, and torch is as before."""
    before, inputs = torch_state(), operands()

    def fail_inside() -> None:
        with orchard.enabled():
            F.scaled_dot_product_attention(*inputs)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert served() == (1, 1, 0)
    assert torch_state() == before
    F.scaled_dot_product_attention(*inputs)
    assert served() == (0, 0, 0)


@pytest.mark.parametrize("fast", [True, False])
def test_torch_is_exactly_as_before(fast: bool) -> None:
    """Kernels, functions and the fast-path flag are restored, whatever the flag was."""
    torch.backends.mha.set_fastpath_enabled(fast)
    before = torch_state()
    orchard.enable()
    assert torch._C._dispatch_dump(OPERATOR) != before["kernels"]
    assert torch.backends.mha.get_fastpath_enabled() is False
    assert F.scaled_dot_product_attention is before["functional"]["scaled_dot_product_attention"]
    orchard.disable()
    assert torch_state() == before
    assert torch.backends.mha.get_fastpath_enabled() is fast


FRESH = """
    import sys
    import torch
    import torch.nn.functional as F
    from torch import library
    def state():
        return (
            torch._C._dispatch_dump("aten::scaled_dot_product_attention"),
            torch.backends.mha.get_fastpath_enabled(), dict(vars(F)),
            dict(vars(torch.nn.MultiheadAttention)), frozenset(library._impls),
        )
    before, modules = state(), set(sys.modules)
    import orchard
    now = state()
    assert now[:4] == before[:4]
    assert all(name.startswith("orchard/") for name in now[4] - before[4]), now[4] - before[4]
    assert not {"torch._dynamo", "rich", "matplotlib"} & (set(sys.modules) - modules)
    torch.manual_seed(0)
    x = torch.randn(1, 2, 8, 16)
    F.scaled_dot_product_attention(x, x, x)
    assert orchard.stats()["torch_sdpa"]["served"] == 0
    assert orchard.stats()["calls"] == {}
"""
COMPILED_BEFORE = """
    early = F.scaled_dot_product_attention
    compiles = 0
    def backend(graph, inputs):
        global compiles
        compiles += 1
        return graph.forward
    step = torch.compile(lambda x: early(x, x, x) + 1, backend=backend, fullgraph=True)
    want = step(x)
    assert (compiles, orchard.stats()["calls"]) == (1, {})
    for turn in range(3):
        with orchard.enabled():
            assert (step(x) - want).abs().max() < 2e-6  # a few roundings of sums below 4
            assert orchard.stats(reset=True)["calls"] == {"forward": {"cpu": 1}}
        assert torch.equal(step(x), want)
        assert orchard.stats(reset=True)["calls"] == {}
        if turn == 0:
            once = compiles
    assert compiles == once, (compiles, once)
    print("as it should be")
"""


@pytest.mark.compile
def test_fresh_process() -> None:
    """Importing changes nothing in torch; code compiled before the first enable() follows it."""
    environ = {name: text for name, text in os.environ.items() if "ORCHARD_" not in name}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(FRESH + COMPILED_BEFORE)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "as it should be\n"


# Eager calls


@pytest.mark.parametrize(
    "function",
    [early_name, F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention],
    ids=["imported earlier", "by module", "the operator"],
)
def test_every_name(function: Callable[..., Tensor]) -> None:
    """Whatever name torch's attention was bound to, the call is served."""
    inputs = operands()
    want = function(*inputs, is_causal=True)
    with orchard.enabled():
        got = function(*inputs, is_causal=True)
    close(got, want)
    assert served() == (1, 1, 0)


MASK = torch.rand(7, 7, generator=torch.Generator().manual_seed(1)) > 0.3
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool mask": {"attn_mask": MASK | torch.eye(7, dtype=torch.bool)},
    "bool mask with an empty row": {"attn_mask": MASK & (torch.arange(7) != 2)[:, None]},
    "float mask": {"attn_mask": torch.randn(4, 1, 7, dtype=torch.float64)},
}


@pytest.mark.grad
@pytest.mark.parametrize("name", OPTIONS)
def test_training(name: str) -> None:
    """Outputs and gradients equal torch's own to 1e-10 in fp64, both directions served."""
    inputs = operands(requires_grad=True)
    want = F.scaled_dot_product_attention(*inputs, **OPTIONS[name])
    upstream = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, inputs, upstream)
    with orchard.enabled():
        got = F.scaled_dot_product_attention(*inputs, **OPTIONS[name])
        got_grads = torch.autograd.grad(got, inputs, upstream)
    assert served() == (1, 1, 1)
    close(got, want)
    for mine, theirs in zip(got_grads, want_grads, strict=True):
        close(mine, theirs)


@pytest.mark.grad
def test_backward_after_disable() -> None:
    """A graph that was recorded while enabled runs its backward afterwards, and the reverse."""
    inputs = operands(requires_grad=True)
    theirs = F.scaled_dot_product_attention(*inputs)
    with orchard.enabled():
        mine = F.scaled_dot_product_attention(*inputs)
        want = torch.autograd.grad(theirs.sum(), inputs)
        assert served() == (1, 1, 0)
    got = torch.autograd.grad(mine.sum(), inputs)
    assert served() == (0, 0, 1)
    for a, b in zip(got, want, strict=True):
        close(a, b)


@pytest.mark.grad
def test_second_gradients() -> None:
    """create_graph=True gives the second gradients of torch's math attention."""

    def second(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(grad.sin().sum() for grad in first), inputs)

    inputs = operands(requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        want = second(inputs)
    with orchard.enabled():
        got = second(inputs)
    stats = orchard.stats()
    assert stats["torch_sdpa"]["served"] == 1
    assert sum(stats["calls"]["double_backward"].values()) == 1
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)


@pytest.mark.dtype
@pytest.mark.grad
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_training_within_budget(dtype: torch.dtype) -> None:
    """In the dtypes that models use, results of the routed call are within budget."""
    inputs = operands(dtype=dtype, requires_grad=True)
    with orchard.enabled():
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        upstream = Upstream(torch.randn_like(out), None)
        grads = torch.autograd.grad(out, inputs, upstream.out)
    assert served() == (1, 1, 1)
    assert_within_budget(out, grads, Tensors(*(t.detach() for t in inputs)), upstream, causal=True)


def assert_within_budget(
    out: Tensor, grads: tuple[Tensor, ...], tensors: Tensors, upstream: Upstream, *, causal: bool
) -> None:
    settings = Settings(None, 0.0, 0.0, -1, 0 if causal else -1, False, "auto")
    options = settings.options(tensors.query, tensors.key)
    verdicts = judge(Results(out.detach(), torch.empty(0), *grads), tensors, options, upstream)
    judged = [verdict for verdict in verdicts if not verdict.name.startswith("lse")]
    assert len(judged) == 4
    assert [str(verdict) for verdict in judged if not verdict.ok] == []


@pytest.mark.dropout
def test_dropout_is_orchards() -> None:
    """A routed call with dropout draws Orchard's bits, in training and without gradients."""
    for inputs in (operands(), operands(requires_grad=True)):
        torch.manual_seed(6)
        want = orchard.attention(*inputs, dropout_p=0.4)
        torch.manual_seed(6)
        with orchard.enabled():
            got = F.scaled_dot_product_attention(*inputs, dropout_p=0.4)
        assert torch.equal(got, want)


@pytest.mark.dtype
@pytest.mark.grad
def test_autocast() -> None:
    """Under autocast the routed call computes in autocast's dtype, within that dtype's budget."""
    inputs = operands(dtype=torch.float32, requires_grad=True)
    with orchard.enabled(), torch.autocast("cpu", torch.bfloat16):
        out = F.scaled_dot_product_attention(*inputs)
        upstream = Upstream(torch.randn_like(out), None)
        grads = torch.autograd.grad(out, inputs, upstream.out)
    assert served() == (1, 1, 1)
    assert out.dtype == torch.bfloat16
    assert {grad.dtype for grad in grads} == {torch.float32}
    low = Tensors(*(t.detach().bfloat16() for t in inputs))
    assert_within_budget(out, tuple(g.bfloat16() for g in grads), low, upstream, causal=False)


def test_autocast_mixes_dtypes() -> None:
    """Operands of several dtypes, and a mask, are cast as torch casts them."""
    query, key, value = operands(dtype=torch.float32)
    call = (query.half(), key, value.bfloat16(), torch.randn(7, 7))
    with torch.autocast("cpu", torch.bfloat16):
        want = F.scaled_dot_product_attention(*call)
        with orchard.enabled():
            got = F.scaled_dot_product_attention(*call)
    assert served() == (1, 1, 0)
    assert got.dtype == want.dtype == torch.bfloat16
    low = Tensors(query.half().bfloat16(), key.bfloat16(), value.bfloat16(), call[3].bfloat16())
    low = low._replace(mask=low.mask[None, None])
    options = Settings(None, 0.0, 0.0, -1, -1, False, "auto").options(*low[:2])
    (verdict, *_) = judge(Results(got, torch.empty(0)), low, options)
    assert verdict.name == "out"
    assert verdict.ok, str(verdict)


def test_inference_mode() -> None:
    """Inference tensors are served and give inference tensors."""
    inputs = operands()
    want = F.scaled_dot_product_attention(*inputs)
    with orchard.enabled(), torch.inference_mode():
        mixed = F.scaled_dot_product_attention(*inputs)
        inference = F.scaled_dot_product_attention(*(t.clone() for t in inputs))
    assert served() == (2, 2, 0)
    close(mixed, want)
    close(inference, want)
    assert inference.is_inference()


@pytest.mark.dropout
@pytest.mark.grad
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_with_dropout(reentrant: bool) -> None:
    """A recomputed forward draws the same bits: gradients equal those without checkpointing."""

    def gradients(wrap: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(4)
        inputs = operands(requires_grad=True)
        layer = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)  # noqa: E731
        wrap(layer, *inputs).square().sum().backward()
        return [leaf.grad for leaf in inputs if leaf.grad is not None]

    with orchard.enabled():
        plain = gradients(lambda layer, *inputs: layer(*inputs))
        assert served() == (1, 1, 1)
        again = gradients(lambda *call: checkpoint(*call, use_reentrant=reentrant))
        assert served() == (2, 2, 1)
    assert len(plain) == len(again) == 3
    assert all(map(torch.equal, again, plain))
    assert bool(plain[0].count_nonzero())


# Transforms


def counted_once() -> None:
    """Each call was either served or left to torch for a reason, and that once."""
    sdpa = orchard.stats(reset=True)["torch_sdpa"]
    assert sdpa["served"] + sum(sdpa["delegated"].values()) == 1


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], list[Tensor]], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(lambda q: f(q, *x[1:]).sin().sum())(x[0]),
    "vjp": lambda f, x: torch.func.vjp(lambda q: f(q, *x[1:]), x[0])[1](x[2])[0],
    "grad of grad": lambda f, x: torch.func.grad(
        lambda p: torch.func.grad(lambda q: f(q, *x[1:]).sin().sum())(p).sin().sum()
    )(x[0]),
    "grad in vmap": lambda f, x: torch.func.vmap(
        torch.func.grad(lambda q, k, v: f(q, k, v).sin().sum())
    )(*x),
    "jvp": lambda f, x: torch.func.jvp(lambda q: f(q, *x[1:]), (x[0],), (x[2],))[1],
}


@pytest.mark.grad
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    """torch.func's derivatives are torch's own, never an error or a silent zero."""
    inputs = operands()
    with sdpa_kernel(SDPBackend.MATH):
        want = TRANSFORMS[name](F.scaled_dot_product_attention, inputs)
        assert bool(want.count_nonzero())
        with orchard.enabled():
            got = TRANSFORMS[name](F.scaled_dot_product_attention, inputs)
    close(got, want)
    counted_once()


def test_vmap() -> None:
    """A vmapped call computes what torch computes."""
    inputs = operands()
    want = torch.func.vmap(F.scaled_dot_product_attention)(*inputs)
    with orchard.enabled():
        got = torch.func.vmap(F.scaled_dot_product_attention)(*inputs)
    close(got, want)


@pytest.mark.grad
def test_forward_mode() -> None:
    """A dual tensor's tangent comes out as torch's, never silently dropped."""
    query, key, value = operands()
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        dual = forward_ad.make_dual(query, value)
        want = forward_ad.unpack_dual(F.scaled_dot_product_attention(dual, key, value)).tangent
        with orchard.enabled():
            got = forward_ad.unpack_dual(F.scaled_dot_product_attention(dual, key, value)).tangent
        assert got is not None
        close(got, want)
    counted_once()


# What Orchard does not serve


class Subclass(Tensor):
    """Behaves as its base does."""


def nested(inputs: list[Tensor]) -> list[Tensor]:
    return [torch.nested.nested_tensor([t[0], t[1, :, :3]], layout=torch.strided) for t in inputs]


DELEGATED: dict[str, tuple[Callable[[list[Tensor]], list[Tensor]], dict[str, Any], str]] = {
    "5-D": (lambda x: [t[None] for t in x], {}, "axes"),
    "ranks differ": (lambda x: [x[0], x[1][0], x[2][0]], {}, "axes"),
    "batch broadcast": (lambda x: [x[0], x[1][:1], x[2][:1]], {}, "broadcasting"),
    "heads broadcast": (lambda x: [x[0], x[1][:, :1], x[2][:, :1]], {}, "head counts"),
    "mask with causal": (lambda x: x, {"attn_mask": MASK, "is_causal": True}, "mask together"),
    "dropout_p 1": (lambda x: x, {"dropout_p": 1.0}, "dropout_p"),
    "scale inf": (lambda x: x, {"scale": float("inf")}, "scale"),
    "subclass": (lambda x: [x[0].as_subclass(Subclass), *x[1:]], {}, "not a plain dense tensor"),
}


@pytest.mark.grad
@pytest.mark.parametrize("name", DELEGATED)
def test_delegated(name: str) -> None:
    """What Orchard cannot serve is torch's to the bit, gradients too, and journaled once."""
    change, options, words = DELEGATED[name]
    leaves = operands(requires_grad=True)

    def compute() -> list[Tensor]:
        out = F.scaled_dot_product_attention(*change(leaves), **options)
        grads = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
        return [out.detach(), *grads]

    want = compute()
    with orchard.enabled():
        got = compute()
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0, equal_nan=True)
    stats = orchard.stats()
    assert stats["calls"] == {}
    assert stats["torch_sdpa"]["served"] == 0
    ((sentence, times),) = stats["torch_sdpa"]["delegated"].items()
    assert words in sentence
    assert times == 1
    assert orchard.advice() == [f"1 call of torch's attention stayed with torch: {sentence}."]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_delegated() -> None:
    """Nested tensors are torch's, and journaled."""
    inputs = nested(operands())
    want = F.scaled_dot_product_attention(*inputs)
    with orchard.enabled():
        got = F.scaled_dot_product_attention(*inputs)
    assert got.is_nested
    for mine, theirs in zip(got.unbind(), want.unbind(), strict=True):
        assert torch.equal(mine, theirs)
    stats = orchard.stats()
    assert stats["calls"] == {}
    assert list(stats["torch_sdpa"]["delegated"].values()) == [1]


def test_jagged_tensors_are_torchs() -> None:
    """Jagged nested tensors, which torch routes by itself, compute the same while enabled."""
    rows = [torch.randn(n, 4, 8, dtype=torch.float64) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    want = F.scaled_dot_product_attention(jagged, jagged, jagged)
    with orchard.enabled():
        got = F.scaled_dot_product_attention(jagged, jagged, jagged)
    assert got.is_nested
    for mine, theirs in zip(got.unbind(), want.unbind(), strict=True):
        close(mine, theirs)


BAD: dict[str, tuple[Callable[[list[Tensor]], list[Any]], dict[str, Any]]] = {
    "dtypes differ": (lambda x: [x[0], x[1].float(), x[2]], {}),
    "integers": (lambda x: [t.int() for t in x], {}),
    "complex": (lambda x: [t + 0j for t in x], {}),
    "1-D": (lambda x: [t[0, 0, 0] for t in x], {}),
    "head dimensions differ": (lambda x: [x[0], x[1][..., :4], x[2]], {}),
    "batches differ": (lambda x: [x[0], x[1].repeat(2, 1, 1, 1), x[2]], {}),
    "heads without enable_gqa": (lambda x: [x[0], x[1][:, :2], x[2][:, :2]], {}),
    "heads that do not divide": (
        lambda x: [x[0], x[1][:, :3], x[2][:, :3]],
        {"enable_gqa": True},
    ),
    "enable_gqa of 2-D": (lambda x: [t[0, 0] for t in x], {"enable_gqa": True}),
    "devices differ": (lambda x: [x[0].to("meta"), *x[1:]], {}),
    "sparse": (lambda x: [x[0].to_sparse(), *x[1:]], {}),
    "mask of int64": (lambda x: x, {"attn_mask": torch.ones(7, 7, dtype=torch.int64)}),
    "mask of another float": (lambda x: x, {"attn_mask": torch.ones(7, 7).half()}),
    "mask that does not broadcast": (lambda x: x, {"attn_mask": torch.ones(7, 6)}),
    "mask of 5 axes": (lambda x: x, {"attn_mask": torch.ones(1, 2, 4, 7, 7)}),
    "mask of 1 axis": (lambda x: x, {"attn_mask": torch.ones(7)}),
    "mask of no axis": (lambda x: x, {"attn_mask": torch.tensor(0.5)}),
    "dropout_p below 0": (lambda x: x, {"dropout_p": -0.1}),
    "dropout_p above 1": (lambda x: x, {"dropout_p": 1.5}),
    "dropout_p a string": (lambda x: x, {"dropout_p": "half"}),
    "query a number": (lambda x: [1, *x[1:]], {}),
}


@pytest.mark.errors
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", BAD)
def test_errors_are_torchs(name: str) -> None:
    """A bad call raises torch's own error while enabled: the same type and the same words."""
    change, options = BAD[name]

    def failure() -> tuple[type, str]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            F.scaled_dot_product_attention(*change(operands()), **options)
        return caught.type, str(caught.value)

    want = failure()
    with orchard.enabled():
        assert failure() == want
    assert orchard.stats()["calls"] == {}


# torch's modules


class Operators(TorchDispatchMode):
    """The operators that reach a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))


PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])


def module(kind: str) -> nn.Module:
    torch.manual_seed(2)
    options: dict[str, Any] = {"batch_first": True, "dtype": torch.float64}
    if kind == "attention":
        return nn.MultiheadAttention(16, 4, **options)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, **options)
    return layer if kind == "layer" else nn.TransformerEncoder(layer, 3)


def apply(model: nn.Module, x: Tensor, padding: Tensor | None) -> Tensor:
    if isinstance(model, nn.MultiheadAttention):
        return model(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    return model(x, src_key_padding_mask=padding)


LAYERS = {"attention": 1, "layer": 1, "encoder": 3}
FAST = {
    "attention": "aten::_native_multi_head_attention",
    "layer": "aten::_transformer_encoder_layer_fwd",
    "encoder": "aten::_transformer_encoder_layer_fwd",
}


@pytest.mark.grad
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("kind", LAYERS)
def test_modules(kind: str, mode: str, padded: bool) -> None:
    """torch's attention modules are served in every mode, their fast path included."""
    model = module(kind).train(mode == "train")
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    padding = PADDING if padded else None
    seen = ~PADDING if padded else torch.ones_like(PADDING)
    weights = list(model.parameters())

    def compute() -> list[Tensor]:
        out = apply(model, x, padding)[seen]  # torch's fast path zeroes what is padding
        if mode == "no_grad":
            return [out]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), weights)]

    with torch.set_grad_enabled(mode != "no_grad"):
        want = compute()
        assert orchard.stats() == NOTHING
        with orchard.enabled():
            got = compute()
        layers = LAYERS[kind]
        assert served() == (layers, layers, 0 if mode == "no_grad" else layers)
        compute()
        assert orchard.stats() == NOTHING
    assert len(got) == (1 if mode == "no_grad" else 1 + len(weights))
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("kind", LAYERS)
def test_fast_path_is_real(kind: str) -> None:
    """The fast path runs before and after, and not while enabled."""
    model = module(kind).eval()
    x = torch.randn(2, 5, 16, dtype=torch.float64)

    def operators() -> set[str]:
        with torch.no_grad(), Operators() as seen:
            apply(model, x, None)
        return seen.names

    assert FAST[kind] in operators()
    with orchard.enabled():
        names = operators()
        assert FAST[kind] not in names
        assert "orchard::attention_forward" in names
    assert FAST[kind] in operators()


def test_attention_weights_are_torchs() -> None:
    """need_weights=True computes no attention operator, and nothing is counted for it."""
    model = module("attention").eval()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        want = model(x, x, x)
        with orchard.enabled():
            got = model(x, x, x)
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)
    assert orchard.stats() == NOTHING


# Threads


THREADS = 8


@pytest.mark.stress
@pytest.mark.grad
def test_threads() -> None:
    """Eight threads at once, enabled by another, are all served, each call counted."""
    rounds = 10
    inputs = [operands(3 + n, requires_grad=True) for n in range(THREADS)]

    def compute(number: int) -> list[Tensor]:
        out = F.scaled_dot_product_attention(*inputs[number], is_causal=True)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), inputs[number])]

    want = [compute(number) for number in range(THREADS)]
    start = threading.Barrier(THREADS)

    def work(number: int) -> list[list[Tensor]]:
        start.wait()
        return [compute(number) for _ in range(rounds)]

    with ThreadPoolExecutor(THREADS) as pool:
        with orchard.enabled():
            got = list(pool.map(work, range(THREADS)))
        total = THREADS * rounds
        assert served() == (total, total, total)
        list(pool.map(work, range(THREADS)))
        assert orchard.stats() == NOTHING
    for number, results in enumerate(got):
        for result in results:
            for mine, theirs in zip(result, want[number], strict=True):
                close(mine, theirs)


SWITCHING = """
    import sys, threading
    import torch, orchard
    import torch.nn.functional as F
    x = torch.randn(1, 2, 16, 8, dtype=torch.float64)
    want = F.scaled_dot_product_attention(x, x, x)
    results = []
    def call(ready):
        ready.set()
        try:
            results.append(F.scaled_dot_product_attention(x, x, x))
        except Exception as error:
            results.append(error)
    with orchard.enabled():
        F.scaled_dot_product_attention(x, x, x)
    sys.setswitchinterval(10)  # a thread goes on until it waits
    for _ in range(100):
        ready = threading.Event()
        thread = threading.Thread(target=call, args=(ready,))
        orchard.enable()
        thread.start()
        ready.wait()
        # The call has found Orchard's kernel, and waits for this thread before it runs it.
        orchard.disable()
        orchard.enable()
        orchard.disable()
        thread.join()
    assert len(results) == 100
    for result in results:
        assert isinstance(result, torch.Tensor), result
        torch.testing.assert_close(result, want, atol=1e-10, rtol=0)
    assert orchard.stats()["torch_sdpa"]["served"] > 1
    print("as it should be")
"""


@pytest.mark.stress
def test_switching_during_a_call() -> None:
    """A call that is under way in another thread survives being switched off."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SWITCHING)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "as it should be\n"


# torch.compile


@pytest.fixture
def compiles() -> Iterator[Any]:
    """A backend for torch.compile that counts, and a compiler without memory."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    with orchard.enabled():
        pass  # the first time in a process drops what was compiled; see test_fresh_process
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def causal_and_scaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return 2 * early_name(query, key, value, is_causal=True, scale=0.3)


def follow(
    compiled: Callable[[], list[Tensor]],
    want: list[Tensor],
    expected: dict[str, int],
    switches: list[bool],
) -> None:
    """Call while on or off as `switches` says; every result is right and the counters prove who."""
    for on in switches:
        if on:
            orchard.enable()
        got = compiled()
        stats = orchard.stats(reset=True)
        if on:
            orchard.disable()
        counted = {stage: sum(by.values()) for stage, by in stats["calls"].items()}
        assert counted == (expected if on else {})
        for mine, theirs in zip(got, want, strict=True):
            close(mine, theirs)


STARTS = {
    "compiled before": [False, True, False],
    "compiled while enabled": [True, False, True],
    "compiled after": [False, True],
}


@pytest.mark.compile
@pytest.mark.grad
@pytest.mark.parametrize("start", STARTS)
def test_compiled_function(start: str, compiles: Any) -> None:
    """A compiled function follows the switch, forward and backward, and compiles twice at most."""
    inputs = operands(requires_grad=True)

    def compute(function: Callable[..., Tensor]) -> list[Tensor]:
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), inputs)]

    want = compute(causal_and_scaled)
    with orchard.enabled():
        if start == "compiled after":
            F.scaled_dot_product_attention(*inputs)
    orchard.stats(reset=True)
    step = torch.compile(causal_and_scaled, backend=compiles, fullgraph=True)
    expected = {"forward": 1, "backward": 1}
    follow(lambda: compute(step), want, expected, STARTS[start])
    once = compiles.frame_count
    assert once == 2
    follow(lambda: compute(step), want, expected, [False, True] * 2)
    assert compiles.frame_count == once


@pytest.mark.compile
@pytest.mark.grad
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_compiled_module(kind: str, mode: str, compiles: Any) -> None:
    """A compiled module follows the switch in every mode, and compiles nothing a second time."""
    model = module(kind).train(mode == "train")
    plain = copy.deepcopy(model)
    x = torch.randn(2, 5, 16, dtype=torch.float64)

    def compute(model: nn.Module) -> list[Tensor]:
        with torch.set_grad_enabled(mode != "no_grad"):
            out = call(model)
            if mode == "no_grad":
                return [out]
            weights = list(model.parameters())
            return [out.detach(), *torch.autograd.grad(out.square().sum(), weights)]

    def call(model: nn.Module) -> Tensor:
        if kind == "attention":
            return model(x, x, x, need_weights=False)[0]
        return model(x)

    want = compute(plain)
    step = torch.compile(model, backend=compiles, fullgraph=True)
    layers = LAYERS[kind]
    expected = {"forward": layers} | ({} if mode == "no_grad" else {"backward": layers})
    follow(lambda: compute(step), want, expected, [False, True, False])
    once = compiles.frame_count
    assert once >= 2
    follow(lambda: compute(step), want, expected, [True, False] * 2)
    assert compiles.frame_count == once


@pytest.mark.compile
@pytest.mark.grad
def test_inductor() -> None:
    """The same with inductor, torch's default compiler."""
    import torch._dynamo

    torch._dynamo.reset()
    inputs = operands(requires_grad=True)

    def compute(function: Callable[..., Tensor]) -> list[Tensor]:
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out.sum(), inputs)]

    want = compute(causal_and_scaled)
    step = torch.compile(causal_and_scaled, backend="inductor", fullgraph=True)
    follow(lambda: compute(step), want, {"forward": 1, "backward": 1}, [True, False, True])
    torch._dynamo.reset()


@pytest.mark.compile
@pytest.mark.dropout
def test_compiled_dropout(compiles: Any) -> None:
    """A compiled call with dropout draws the bits of the eager one, and other bits next time."""
    inputs = operands()
    step = torch.compile(
        lambda q, k, v: early_name(q, k, v, dropout_p=0.4), backend=compiles, fullgraph=True
    )
    torch.manual_seed(6)
    want = [orchard.attention(*inputs, dropout_p=0.4) for _ in range(2)]
    assert not torch.equal(*want)
    with orchard.enabled():
        torch.manual_seed(6)
        got = [step(*inputs) for _ in range(2)]
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)
    assert compiles.frame_count == 1


@pytest.mark.compile
def test_compiled_delegation(compiles: Any) -> None:
    """A compiled call that Orchard cannot serve is torch's, and the journal has its reason."""
    inputs = [t[None] for t in operands()]
    want = causal_and_scaled(*inputs)
    step = torch.compile(causal_and_scaled, backend=compiles, fullgraph=True)
    with orchard.enabled():
        close(step(*inputs), want)
    stats = orchard.stats()
    assert stats["calls"] == {}
    ((sentence, times),) = stats["torch_sdpa"]["delegated"].items()
    assert "axes" in sentence
    assert times == 1


@pytest.mark.compile
def test_compiled_operator(compiles: Any) -> None:
    """A compiled call of the operator itself, as exported programs make it, follows the switch."""
    inputs = operands()
    want = torch.ops.aten.scaled_dot_product_attention(*inputs)
    step = torch.compile(
        lambda q, k, v: torch.ops.aten.scaled_dot_product_attention.default(q, k, v),
        backend=compiles,
        fullgraph=True,
    )
    follow(lambda: [step(*inputs)], [want], {"forward": 1}, [True, False, True, False])


def test_a_failed_enable_leaves_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a kernel cannot be registered, enable() raises and nothing is switched."""
    from orchard.integrations import torch_sdpa

    before = torch._C._dispatch_dump("aten::scaled_dot_product_attention")
    monkeypatch.setattr(torch_sdpa, "_KEYS", ("AutogradCPU", "NoSuchKey"))
    with pytest.raises(RuntimeError):
        orchard.enable()
    assert torch._C._dispatch_dump("aten::scaled_dot_product_attention") == before
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch_sdpa._state.depth == 0

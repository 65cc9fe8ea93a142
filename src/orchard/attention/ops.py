"""The torch operators: schemas, kernels, fakes and autograd. Torch only, registered on import.

One operator per direction, whatever the device and backend: the planner chooses inside it, so a
compiled graph holds one node per call and decides again for every shape it meets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from orchard.attention.leaving import inside
from orchard.attention.memory import conform, empty_following, empty_lse
from orchard.attention.observers import is_observed
from orchard.attention.operands import check_operands, check_results, checked_seed
from orchard.attention.problem import (
    Gradients,
    Options,
    Saved,
    Tensors,
    Upstream,
    accumulation_dtype,
    default_scale,
    describe,
    drop_threshold,
    is_traced,
    make_band,
)
from orchard.attention.reference import double_backward
from orchard.dispatch.planner import AUTO, planner

_OPTIONS = (
    "float? scale, float softcap, float dropout_p, "
    "SymInt left, SymInt right, bool bottom_right, str backend"
)
_library = library.Library("orchard", "DEF")
_library.define(
    "attention_forward(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed, "
    f"{_OPTIONS}, bool return_lse, bool grad, bool mask_grad) -> (Tensor out, Tensor lse)"
)
_library.define(
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, "
    "Tensor value, Tensor? mask, Tensor? seed, Tensor out, Tensor lse, "
    f"{_OPTIONS}, bool mask_grad) -> (Tensor, Tensor, Tensor, Tensor)"
)
_Forward = Callable[..., tuple[Tensor, Tensor]]
_Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
_forward_op: _Forward = torch.ops.orchard.attention_forward.default
_backward_op: _Backward = torch.ops.orchard.attention_backward.default


class Settings(NamedTuple):
    """The options of a call as the operators take them."""

    scale: float | None
    softcap: float
    dropout_p: float
    left: int
    right: int
    bottom_right: bool
    backend: str

    def options(self, query: Tensor, key: Tensor) -> Options:
        scale = default_scale(query.shape[3]) if self.scale is None else self.scale
        band = None
        if self.left >= 0 or self.right >= 0:
            rows, keys = query.shape[2], key.shape[2]
            band = make_band(self.left, self.right, self.bottom_right, rows, keys)
        threshold = drop_threshold(self.dropout_p) if self.dropout_p else 0
        return Options(scale, self.softcap, band, threshold)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, settings, flags = _parts(args)
    check_operands(*tensors[:4])
    return_lse, grad, _ = flags
    with inside:
        out, lse = _serve_forward(tensors, settings, *flags)
        return out, lse if return_lse or grad else _no_lse(out)


def _parts(args: tuple[Any, ...]) -> tuple[Tensors, Settings, tuple[bool, ...]]:
    """Arguments of the forward operator, by what they are."""
    return Tensors(*args[:5]), Settings(*args[5:12]), args[12:]


def _serve_forward(
    tensors: Tensors, settings: Settings, return_lse: bool, grad: bool, mask_grad: bool
) -> tuple[Tensor, Tensor]:
    """The forward of operands that go together; an lse that nobody wants may be anything."""
    query = tensors.query
    options = settings.options(query, tensors.key)
    if options.threshold or tensors.seed is not None:
        seed = checked_seed(tensors.seed, query.device) if options.threshold else None
        tensors = tensors._replace(seed=seed)
    problem = describe(tensors, options, lse=return_lse, grad=grad, mask_grad=mask_grad)
    saved = planner().run(
        problem, settings.backend, lambda server, kernel: server.forward(problem, kernel, tensors)
    )
    return conform(saved.out, query), saved.lse.contiguous()


def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    return_lse, grad, _ = rest[7:]
    out = empty_following(query, (*query.shape[:3], value.shape[3]))
    if not (return_lse or grad):
        return out, _no_lse(query)
    return out, empty_lse(query)


def _no_lse(query: Tensor) -> Tensor:
    return query.new_empty(0, dtype=accumulation_dtype(query.dtype))


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    settings, mask_grad = Settings(*rest[:7]), rest[7]
    check_operands(query, key, value, mask)
    options = settings.options(query, key)
    seed = checked_seed(seed, query.device) if options.threshold else None
    tensors = Tensors(query, key, value, mask, seed)
    problem = describe(
        tensors,
        options,
        stage="backward",
        grad_out=grad_out,
        lse=grad_lse is not None,
        grad=True,
        mask_grad=mask_grad,
    )
    saved, upstream = Saved(out, lse), Upstream(grad_out, grad_lse)
    check_results(problem, saved, upstream)
    with inside:
        grads = planner().run(
            problem,
            settings.backend,
            lambda server, kernel: server.backward(problem, kernel, tensors, saved, upstream),
        )
    return (
        conform(grads.query, query),
        conform(grads.key, key),
        conform(grads.value, value),
        query.new_empty(0) if mask is None or grads.mask is None else conform(grads.mask, mask),
    )


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask_grad = rest[7]
    return (
        empty_following(query, query.shape),
        empty_following(key, key.shape),
        empty_following(value, value.shape),
        empty_following(mask, mask.shape) if mask_grad and mask is not None else query.new_empty(0),
    )


def _forward_kernel(
    tensors: Tensors, settings: Settings, return_lse: bool, grad: bool, mask_grad: bool
) -> tuple[Tensor, Tensor]:
    """Below autograd: the operator where somebody sees it, else what it comes to, for speed."""
    if not is_observed(tensors):
        return _serve_forward(tensors, settings, return_lse, grad, mask_grad)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(*tensors, *settings, return_lse, grad, mask_grad)


def _backward_kernel(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Likewise; out and lse may be on a graph, which gradients are no part of."""
    with torch._C._AutoDispatchBelowAutograd():
        if not is_observed(args[:9]):
            return _backward(*args)
        return _backward_op(*args)


def _needs_graph(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(arg, Tensor) and arg.requires_grad for arg in args
    )


class _Attention(torch.autograd.Function):
    """The forward operator with its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        tensors, settings, flags = _parts(args)
        return _forward_kernel(tensors, settings, *flags)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _keep(ctx, inputs[:5], inputs[5:12], output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        return (*_gradients(ctx, grad_out, grad_lse), *(None,) * 11)


class _EagerAttention(torch.autograd.Function):
    """The same without torch.func, whose form of a Function costs 25 us more per call."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        tensors, settings, flags = Tensors(*args[:5]), args[5], args[6]
        output = _forward_kernel(tensors, settings, *flags)
        _keep(ctx, tensors, settings, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        return (*_gradients(ctx, grad_out, grad_lse), None, None, None)


def _keep(
    ctx: Any, tensors: Sequence[Any], settings: Sequence[Any], output: tuple[Tensor, Tensor]
) -> None:
    """What `_gradients` needs of a call."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)
    ctx.settings = settings


def _gradients(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """Of query, key, value and mask; None for what needs none."""
    query, key, value, mask, seed, out, lse = ctx.saved_tensors
    if grad_out is None:
        if grad_lse is None:
            return (None, None, None, None)
        grad_out = out.new_zeros(()).expand(out.shape)
    mask_grad = ctx.needs_input_grad[3]
    *grads, by_mask = backward_op(
        grad_out, grad_lse, query, key, value, mask, seed, out, lse, *ctx.settings, mask_grad
    )
    return (*grads, by_mask if mask_grad else None)


class _AttentionBackward(torch.autograd.Function):
    """The backward operator with its own gradient, for create_graph=True."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _backward_kernel(args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:7])
        ctx.settings = Settings(*inputs[9:16])
        ctx.mask_grad = inputs[16]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_out, grad_lse, query, key, value, mask, seed = ctx.saved_tensors
        tensors = Tensors(query, key, value, mask, seed)
        upstream = Upstream(grad_out, grad_lse)
        directions = Gradients(grads[0], grads[1], grads[2], grads[3] if ctx.mask_grad else None)
        options = ctx.settings.options(query, key)
        if is_traced(query) or torch._C._are_functorch_transforms_active():
            # Stand-ins without data: the definition is traced, there is nothing to plan with.
            by_upstream, by_tensors = double_backward(tensors, options, upstream, directions)
            return (*by_upstream, *by_tensors, *(None,) * 11)
        problem = describe(
            tensors,
            options,
            stage="double_backward",
            grad_out=grad_out,
            lse=grad_lse is not None,
            grad=True,
            mask_grad=ctx.mask_grad,
        )
        by_upstream, by_tensors = planner().run(
            problem,
            AUTO,
            lambda server, _: server.double_backward(problem, tensors, upstream, directions),
        )
        return (*by_upstream, *by_tensors, *(None,) * 11)


def _forward_graph(
    tensors: Tensors, settings: Settings, flags: tuple[bool, ...]
) -> tuple[Tensor, Tensor]:
    """The forward operator below autograd, on a graph."""
    if torch._C._are_functorch_transforms_active():
        transformed: _Forward = _Attention.apply
        return transformed(*tensors, *settings, *flags)
    eager: _Forward = _EagerAttention.apply
    return eager(*tensors, settings, flags)


def _backward_below(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if _needs_graph(args[:6]):
        on_graph: _Backward = _AttentionBackward.apply
        return on_graph(*args)
    return _backward_kernel(args)


def forward_op(
    tensors: Tensors, settings: Settings, *, return_lse: bool, grad: bool, mask_grad: bool
) -> tuple[Tensor, Tensor]:
    """The forward operator. Eager calls skip the dispatcher's autograd layer, for speed."""
    if torch.compiler.is_compiling():
        return _forward_op(*tensors, *settings, return_lse, grad, mask_grad)
    with inside:
        if grad:
            return _forward_graph(tensors, settings, (return_lse, grad, mask_grad))
        return _forward_kernel(tensors, settings, return_lse, grad, mask_grad)


def backward_op(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward operator, likewise."""
    if torch.compiler.is_compiling():
        return _backward_op(*args)
    with inside:
        return _backward_below(*args)


def _forward_autograd(*args: Any) -> tuple[Tensor, Tensor]:
    check_operands(*args[:4])
    if _needs_graph(args[:4]):
        return _forward_graph(*_parts(args))
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(*args)


_library.impl("attention_forward", _forward, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
_library.impl("attention_forward", _forward_autograd, "Autograd")
_library.impl("attention_backward", _backward_below, "Autograd")
library.register_fake("orchard::attention_forward", _forward_fake, lib=_library)
library.register_fake("orchard::attention_backward", _backward_fake, lib=_library)

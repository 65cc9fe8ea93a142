"""The call. Arguments are checked here, before anything reaches an operator or a kernel."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Generator, Tensor
from torch.autograd import forward_ad

from orchard.attention.dropout import draw_seed
from orchard.attention.leaving import inside
from orchard.attention.ops import Settings, forward_op
from orchard.attention.problem import Tensors, describe, drop_threshold
from orchard.attention.reference import define
from orchard.attention.repeats import fits, kind_of
from orchard.dispatch.planner import AUTO, Plan, planner
from orchard.errors import ArgumentTypeError, ArgumentValueError

Layout = Literal["bhsd", "bshd"]
Causal = bool | Literal["top_left", "bottom_right"]

_LARGEST = torch.finfo(torch.float32).max
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: Causal = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    layout: Layout = "bhsd",
    return_lse: Literal[False] = False,
    generator: Generator | None = None,
    backend: str = "auto",
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: Causal = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    layout: Layout = "bhsd",
    return_lse: Literal[True],
    generator: Generator | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: Causal = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    generator: Generator | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention on tensors of any strides.

    Args:
        query: [B, Hq, Sq, D] ([B, Sq, Hq, D] with layout="bshd"); [Hq, Sq, D] and [Sq, D] too.
        key: [B, Hkv, Sk, D], where Hkv divides Hq.
        value: [B, Hkv, Sk, Dv].
        mask: bool (True = attend) or floating (added to the scores), broadcastable to
            [B, Hq, Sq, Sk] whatever the layout.
        causal: True or "top_left": row i sees keys 0..i; "bottom_right": the last row sees all.
        window: (left, right) keys around the diagonal that `causal` names (top-left without
            it); -1 is unbounded.
        scale: factor of the scores, 1/sqrt(D) by default.
        softcap: scores become softcap * tanh(score / softcap).
        dropout_p: probability in [0, 1) of dropping an attention probability.
        return_lse: also return the log of each row's sum of exponentials, fp32 [B, Hq, Sq].
        generator: source of the dropout seed; torch's default for the device otherwise.
        backend: "auto", or the name of the backend that must serve the call.

    Returns:
        The output in query's dtype, layout and memory order, or (output, lse).

    Raises:
        ArgumentValueError, ArgumentTypeError: an argument is not allowed.
        NotServedError: the backend that was asked for cannot serve this call.
    """
    kind = None
    if not torch.compiler.is_compiling():
        kind = kind_of(
            query, key, value, mask, causal, window, scale, softcap, dropout_p, layout,
            return_lse, backend,
        )  # fmt: skip
        serve = None if kind is None else planner().repeated(kind)
        if serve is not None:
            given, bshd = (query, key, value), layout == "bshd"
            if bshd:
                given = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            with inside:
                saved = serve(*given, mask)
            if saved is not None:
                out = saved.out.transpose(1, 2) if bshd else saved.out
                return (out, saved.lse) if return_lse else out
    tensors, settings, squeeze = _check(
        query, key, value, mask, causal, window, scale, softcap, dropout_p, layout, backend
    )
    if dropout_p and drop_threshold(dropout_p):
        _check_generator(generator, query)
        tensors = tensors._replace(seed=draw_seed(query.device, generator))
    out, lse = attend(tensors, settings, layout, squeeze, bool(return_lse))
    if kind is not None:
        options = settings.options(tensors.query, tensors.key)
        problem = describe(tensors, options, lse=bool(return_lse))
        if fits(kind, problem):
            planner().remember(kind, problem, backend)
    return (out, lse) if return_lse else out


def attend(
    tensors: Tensors, settings: Settings, layout: Layout, squeeze: int, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """A checked call on [B, H, S, D] views, answered in the layout and rank it was made with."""
    query, key, value, mask, _ = tensors
    mask_grad = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    grad = mask_grad or _wants_grad(query, key, value)
    if forward_ad._current_level >= 0 and _has_tangent(query, key, value, mask):
        # Tangents pass through plain torch operations only.
        out, lse = define(tensors, settings.options(query, key))
    else:
        out, lse = forward_op(
            tensors, settings, return_lse=return_lse, grad=grad, mask_grad=mask_grad
        )
    if layout == "bshd" and squeeze < 2:
        out = out.transpose(1, 2)
    if squeeze:
        first = (0,) * squeeze
        out, lse = out[first], lse[first] if return_lse else lse
    return out, lse


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: Causal = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    generator: Generator | None = None,
    backend: str = "auto",
) -> Plan:
    """Who would serve `attention` with these arguments, and why each other backend would not.

    Nothing is computed, apart from the probe of a backend that has not been used yet. A backend
    that was asked for and cannot serve gives a plan whose `backend` is None.
    """
    tensors, settings, _ = _check(
        query, key, value, mask, causal, window, scale, softcap, dropout_p, layout, backend
    )
    if dropout_p:
        _check_generator(generator, tensors.query)
    mask_grad = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    problem = describe(
        tensors,
        settings.options(tensors.query, tensors.key),
        lse=bool(return_lse),
        grad=mask_grad or _wants_grad(query, key, value),
        mask_grad=mask_grad,
    )
    return planner().explain(problem, backend)


def _has_tangent(*tensors: Tensor | None) -> bool:
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _wants_grad(query: Tensor, key: Tensor, value: Tensor) -> bool:
    wanted = query.requires_grad or key.requires_grad or value.requires_grad
    return wanted and torch.is_grad_enabled()


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: Causal,
    window: tuple[int, int] | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    layout: Layout,
    backend: str,
) -> tuple[Tensors, Settings, int]:
    """The call as [B, H, S, D] views and checked options, and how many axes were added."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"{name} is {_a(tensor)}; it must be a torch.Tensor")
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise ArgumentTypeError(f"{name} is a {kind} tensor; it must be a dense, strided one")
    operands = (query, key, value)
    if layout not in ("bhsd", "bshd"):
        raise ArgumentValueError(f"layout is {layout!r}; it must be 'bhsd' or 'bshd'")
    if not isinstance(backend, str):
        raise ArgumentTypeError(f"backend is {_a(backend)}; it must be a name or 'auto'")
    if backend != AUTO and backend not in planner().backends:
        names = ", ".join(repr(name) for name in planner().backends)
        raise ArgumentValueError(f"backend is {backend!r}; it must be 'auto' or one of {names}")

    if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
        query, key, value, mask = _autocast(query, key, value, mask)
    dtype, device = query.dtype, query.device
    if dtype not in _DTYPES:
        raise ArgumentTypeError(
            f"query has dtype {dtype}; it must be float32, float16, bfloat16 or float64"
            + _operands(*operands)
        )
    if key.dtype != dtype or value.dtype != dtype:
        raise ArgumentTypeError(
            f"key and value have dtypes {key.dtype} and {value.dtype}; they must have query's, "
            f"{dtype}" + _operands(*operands)
        )
    if key.device != device or value.device != device:
        raise ArgumentValueError(
            f"key and value are on {key.device} and {value.device}; they must be on query's "
            f"device, {device}" + _operands(*operands)
        )
    rank = query.ndim
    if rank not in (2, 3, 4) or key.ndim != rank or value.ndim != rank:
        raise ArgumentValueError(
            f"query, key and value have {rank}, {key.ndim} and {value.ndim} axes; they must all "
            "have 4 (or 3, or 2)" + _operands(*operands)
        )
    if layout == "bshd" and rank > 2:
        query, key, value = (t.transpose(-3, -2) for t in (query, key, value))
    if rank == 3:
        query, key, value = query[None], key[None], value[None]
    elif rank == 2:
        query, key, value = query[None, None], key[None, None], value[None, None]
    batch, heads, rows, dim = query.shape
    key_batch, kv_heads, keys, key_dim = key.shape
    value_batch, value_heads, value_keys, _ = value.shape
    if key_batch != batch or value_batch != batch:
        raise ArgumentValueError(
            f"key and value have batch sizes {key_batch} and {value_batch}; they must have "
            f"query's, {batch}" + _operands(*operands)
        )
    if key_dim != dim:
        raise ArgumentValueError(
            f"key has head dimension {key_dim}; it must have query's, {dim}" + _operands(*operands)
        )
    if value_heads != kv_heads or value_keys != keys:
        raise ArgumentValueError(
            f"value has {value_heads} heads and length {value_keys}; it must have key's, "
            f"{kv_heads} and {keys}" + _operands(*operands)
        )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise ArgumentValueError(
            f"key has {kv_heads} heads; their number must divide query's, {heads}"
            + _operands(*operands)
        )
    if mask is not None:
        mask = _check_mask(mask, rank, (batch, heads, rows, keys), operands)

    settings = Settings(
        None if scale is None else check_number("scale", scale),
        0.0 if softcap is None else _check_softcap(softcap),
        _check_dropout(dropout_p),
        *_check_band(causal, window),
        backend,
    )
    return Tensors(query, key, value, mask), settings, 4 - rank


def _check_mask(
    mask: Tensor, rank: int, full: tuple[int, int, int, int], operands: tuple[Tensor, ...]
) -> Tensor:
    if not isinstance(mask, Tensor):
        raise ArgumentTypeError(f"mask is {_a(mask)}; it must be a torch.Tensor or None")
    if mask.layout is not torch.strided or mask.is_nested:
        raise ArgumentTypeError("mask is sparse or nested; it must be a dense, strided tensor")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ArgumentTypeError(f"mask has dtype {mask.dtype}; it must be bool or floating")
    if mask.device != operands[0].device:
        raise ArgumentValueError(
            f"mask is on {mask.device}; it must be on query's device, {operands[0].device}"
        )
    shape = mask.shape
    fits = len(shape) <= rank and all(
        have in (1, want) for have, want in zip(reversed(shape), reversed(full), strict=False)
    )
    if not fits:
        raise ArgumentValueError(
            f"mask has shape {list(shape)}; it must broadcast to {list(full[4 - rank :])}"
            + _operands(*operands)
        )
    return mask.view((1,) * (4 - len(shape)) + shape)


def _check_band(causal: Causal, window: tuple[int, int] | None) -> tuple[int, int, bool]:
    """(left, right, bottom_right) around the diagonal; causal is a right bound of 0."""
    if not isinstance(causal, bool) and causal not in ("top_left", "bottom_right"):
        raise ArgumentValueError(
            f"causal is {causal!r}; it must be True, False, 'top_left' or 'bottom_right'"
        )
    left, right = -1, -1
    if window is not None:
        whole = (
            isinstance(window, tuple | list)
            and len(window) == 2
            and all(isinstance(n, int | torch.SymInt) and n is not True for n in window)
        )
        if not whole:
            raise ArgumentTypeError(f"window is {window!r}; it must be a pair of integers")
        left, right = window
        if left < -1 or right < -1:
            raise ArgumentValueError(
                f"window is {window!r}; each bound must be -1 (unbounded) or not negative"
            )
    if causal:
        right = 0
    return left, right, causal == "bottom_right"


def check_number(name: str, number: float) -> float:
    """A finite number."""
    if isinstance(number, bool) or not isinstance(number, int | float | torch.SymFloat):
        raise ArgumentTypeError(f"{name} is {_a(number)}; it must be a number or None")
    if not -_LARGEST <= number <= _LARGEST:
        raise ArgumentValueError(f"{name} is {number}; it must be finite, also in fp32")
    return float(number)


def _check_softcap(softcap: float) -> float:
    number = check_number("softcap", softcap)
    if number <= 0:
        raise ArgumentValueError(f"softcap is {softcap}; it must be positive, or None")
    return number


def _check_dropout(dropout_p: float) -> float:
    if dropout_p is None:
        raise ArgumentTypeError("dropout_p is None; it must be a number in [0, 1)")
    number = check_number("dropout_p", dropout_p)
    if not 0.0 <= number < 1.0:
        raise ArgumentValueError(f"dropout_p is {dropout_p}; it must be in [0, 1)")
    return number


def _check_generator(generator: Generator | None, query: Tensor) -> None:
    if generator is None:
        return
    if not isinstance(generator, Generator):
        raise ArgumentTypeError(f"generator is {_a(generator)}; it must be a torch.Generator")
    if generator.device.type != query.device.type:
        raise ArgumentValueError(
            f"generator is on {generator.device}; it must be on query's device, {query.device}"
        )


def _autocast(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What torch's autocast does to its own attention: every floating operand but fp64."""
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind)

    def cast(tensor: Tensor) -> Tensor:
        eligible = tensor.dtype.is_floating_point and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible and tensor.device.type == kind else tensor

    return cast(query), cast(key), cast(value), None if mask is None else cast(mask)


def _a(thing: object) -> str:
    return f"{thing!r} of type {type(thing).__name__}"


def _operands(query: Tensor, key: Tensor, value: Tensor) -> str:
    lines = (
        f"\n  {name}: shape {list(t.shape)}, strides {t.stride()}, {t.dtype} on {t.device}"
        for name, t in (("query", query), ("key", key), ("value", value))
    )
    return "".join(lines)

"""Calls like one that was served before: known by what they look like, and not checked anew."""

from __future__ import annotations

from collections.abc import Hashable
from types import NoneType

import torch
from torch import Tensor
from torch._C import _get_deterministic_algorithms, _is_any_autocast_enabled
from torch.autograd import forward_ad

from orchard.attention.observers import is_observed
from orchard.attention.problem import Problem, allows_tf32

Kind = tuple[Hashable, ...]
_NUMBERS = frozenset({NoneType, float, int})  # a bool equals a number, and is not allowed as one


def kind_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool | str,
    window: tuple[int, int] | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    layout: object,
    return_lse: bool,
    backend: str,
) -> Kind | None:
    """Everything that the checks and the plan of an eager call without gradient depend on.

    None for calls that are more than that, or whose arguments may be wrong in a way that equal
    ones are not.
    """
    if (
        not type(query) is type(key) is type(value) is Tensor
        or type(dropout_p) is not float
        or dropout_p != 0.0
        or type(causal) not in (bool, str)
        or type(scale) not in _NUMBERS
        or type(softcap) not in _NUMBERS
        or layout not in ("bhsd", "bshd")
        or type(backend) is not str
        or query.ndim != 4
        or (torch.is_grad_enabled() and _learnt(query, key, value, mask))
        or _is_any_autocast_enabled()
        or forward_ad._current_level >= 0
    ):
        return None
    if mask is not None and (type(mask) is not Tensor or mask.ndim != 4):
        return None
    if window is not None and not (
        type(window) is tuple and all(type(bound) is int for bound in window)
    ):
        return None
    if is_observed((query, key, value, mask)):
        return None
    return (
        _look(query),
        _look(key),
        _look(value),
        None if mask is None else _look(mask),
        (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16,
        causal,
        window,
        scale,
        softcap,
        layout,
        bool(return_lse),
        backend,
        allows_tf32(query),
        _get_deterministic_algorithms(),
    )


def fits(kind: Kind, problem: Problem) -> bool:
    """Whether the call of this kind still poses the problem: flags of torch's are any thread's."""
    return kind[-2:] == (problem.tf32, problem.deterministic)


def _look(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _learnt(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether one of them wants a gradient."""
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return True
    return isinstance(mask, Tensor) and mask.requires_grad

"""What torch would refuse or bind otherwise than meant, and what a GPU would not forgive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from orchard.backends.metal.limits import BUFFERS, GROUP_THREADS, INLINE_BYTES
from orchard.testing.metal.lint import BOUND, Signature, check, signatures
from orchard.testing.metal.structure import Finding


def check_launch(
    args: Sequence[Any],
    threads: Sequence[int],
    group_size: Sequence[int],
    signature: Signature | None = None,
) -> list[Finding]:
    """What is wrong with a launch; `signature` is that of its kernel."""
    found = [finding for arg in args for finding in _argument(arg)]
    if len(args) > BUFFERS:
        found.append(Finding("buffers", 0, f"{len(args)} arguments: there are {BUFFERS} buffers"))
    if signature is not None:
        found += _bound(args, signature)
    if min(threads, default=0) < 1:
        found.append(Finding("zero-size launch", 0, f"a grid of {tuple(threads)} threads"))
    size = prod(group_size)
    if not 0 < size <= GROUP_THREADS:
        sentence = f"a group of {size} threads, of {GROUP_THREADS} at most"
        found.append(Finding("group size", 0, sentence))
    elif len(threads) != len(group_size):
        found.append(Finding("grid", 0, "threads and group_size differ in length"))
    elif any(total % size for total, size in zip(threads, group_size, strict=True)):
        sentence = f"{tuple(threads)} threads are no whole groups of {tuple(group_size)}"
        found.append(Finding("grid", 0, f"{sentence}: were groups counted?"))
    return found


def _bound(args: Sequence[Any], signature: Signature) -> Iterator[Finding]:
    for index in sorted(signature.keys() ^ set(range(len(args)))):
        what = "an argument and no buffer" if index < len(args) else "a buffer and no argument"
        yield Finding("arguments", 0, f"{index} is {what}")
    for index, arg in enumerate(args):
        scalar = signature.get(index)
        first = arg[0] if isinstance(arg, (list, tuple)) and arg else arg
        if scalar is None or not isinstance(first, (int, float)):
            continue
        if not isinstance(first, BOUND.get(scalar, ())):
            sentence = (
                f"{type(first).__name__} is bound to buffer {index}, which is read as {scalar}"
            )
            yield Finding("inline argument", 0, sentence)


def _argument(arg: Any) -> Iterator[Finding]:
    if isinstance(arg, Tensor):
        if arg.numel() == 0:
            yield Finding("empty tensor", 0, "has no memory to bind")
        if arg.dtype in (torch.float64, torch.complex128):
            yield Finding("dtype", 0, f"MPS has no {arg.dtype}")
    elif isinstance(arg, (list, tuple)):
        yield from _numbers(arg)
    elif not isinstance(arg, (int, float)):
        yield Finding("argument", 0, f"torch takes no {type(arg).__name__}")


def _numbers(values: Sequence[Any]) -> Iterator[Finding]:
    kinds = {int if isinstance(value, int) else type(value) for value in values}
    if not values:
        yield Finding("empty list", 0, "torch takes no empty list")
    elif any(issubclass(kind, Tensor) for kind in kinds):
        yield Finding("tensor list", 0, "torch does not make the tensors of a list resident")
    elif not kinds <= {int, float}:
        yield Finding("argument", 0, "torch takes lists of int or float")
    elif len(kinds) > 1:
        yield Finding("mixed list", 0, "the first element decides the type of all")
    if len(values) == 3:
        yield Finding("list of 3", 0, "a vector of three takes the place of four")
    if len(values) * (4 if kinds == {float} else 8) > INLINE_BYTES:
        yield Finding("inline bytes", 0, f"{len(values)} numbers are above {INLINE_BYTES} bytes")


class Recorder:
    """A MetalRuntime that compiles and launches nothing, and checks what it is asked to."""

    def __init__(self) -> None:
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.findings: list[Finding] = []
        self.sources = 0
        self.launches: list[str] = []

    def compile(self, source: str) -> Any:
        self.sources += 1
        self.findings += check(source)
        return _Library(self, signatures(source))


class _Library:
    def __init__(self, recorder: Recorder, kernels: Mapping[str, Signature]) -> None:
        self._recorder, self._kernels = recorder, kernels

    def __getattr__(self, name: str) -> Any:
        def launch(*args: Any, threads: Sequence[int], group_size: Sequence[int]) -> None:
            self._recorder.launches.append(name)
            found = check_launch(args, threads, group_size, self._kernels[name])
            self._recorder.findings += found

        return launch

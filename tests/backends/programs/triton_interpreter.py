"""The Triton kernels of the cuda backend on the CPU, executed by Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is defined, so this is for a process of its own.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from orchard.backends.cuda import CudaBackend, choice
from orchard.backends.cuda.runtime import Gpu, Step, kernel_of


def _corrected() -> None:
    """What Triton 3.6's interpreter does otherwise than a GPU, and than numpy 2.4 lets it."""
    patch_tensor, convert = interpreter._patch_lang_tensor, interpreter._convert_float
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # int() of an array with one element is an error in numpy.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return _widened(data)
        if (source, target) == (tl.float32, tl.bfloat16):  # it cuts the digits off
            nearest = torch.from_numpy(np.ascontiguousarray(data)).bfloat16()
            return nearest.view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, mode)

    def widened_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:  # it multiplies the bits
            a, b = (interpreter.TensorHandle(_widened(x.data), tl.float32) for x in (a, b))
        return dot(self, a, b, d, *rest)

    interpreter._patch_lang_tensor = patched_tensor
    interpreter._convert_float = rounded
    builder.create_dot = widened_dot


def _widened(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


_corrected()


_KERNELS = choice.KERNELS


class InterpretedRuntime:
    """In the place of a GPU, whose numbers it makes up."""

    launched: ClassVar[set[str]] = set()

    def gpu(self, device: torch.device) -> Gpu:
        return Gpu(80, 108, 164 * 1024)

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext()

    def launch(self, step: Step, *tensors: Tensor | None) -> None:
        self.launched.add(step.specialisation.kernel)
        with np.errstate(all="ignore"):  # a GPU says nothing of infinities either
            kernel_of(step.specialisation)[step.programs,](*tensors, *step.arguments)


class InterpretedBackend(CudaBackend):
    """The cuda backend for CPU tensors, with some of its kernels."""

    def __init__(self, *kernels: str) -> None:
        super().__init__(InterpretedRuntime())
        choice.KERNELS = tuple(
            kernel._replace(capability=replace(kernel.capability, devices=("cpu",)))
            for kernel in _KERNELS
            if kernel.capability.kernel in kernels
        )
        self.capabilities = tuple(kernel.capability for kernel in choice.KERNELS)

    def unavailable(self, *_: Any) -> None:
        return None

"""Orchard's own kernels for NVIDIA GPUs, written in Python for Triton."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from orchard.attention.problem import Gradients, Problem, Saved, Tensors, Upstream
from orchard.backends.cuda import choice, measured
from orchard.backends.cuda.launch import (
    BackwardKind,
    Setting,
    is_empty,
    plan_empty_backward,
    plan_empty_forward,
)
from orchard.backends.cuda.runtime import Runtime, TritonRuntime
from orchard.backends.cuda.tuning import blocks
from orchard.dispatch.backend import Backend, Capability, Reason
from orchard.dispatch.known import Known
from orchard.text import one_line

_PROGRAM_LIMIT = 2**31
_LEAST_BLOCK = 16
_LEAST_ARCHITECTURE = 80


# A plan is of a problem and a kernel: plain tuples, which every call makes one of.
ForwardCall = tuple[Problem, str]
BackwardCall = tuple[BackwardKind, str]


class CudaBackend(Backend):
    name = "cuda"
    summary = "Orchard's own kernels for NVIDIA GPUs, in Triton"
    capabilities = choice.CAPABILITIES
    probe_rows = (1, 128)
    rivals = ("aten",)

    def __init__(self, runtime: Runtime | None = None) -> None:
        super().__init__()
        self._runtime = runtime
        self._opening = threading.Lock()
        self._forwards = Known(self._plan_forward)
        self._backwards = Known(self._plan_backward)

    def special_reasons(self, capability: Capability, problem: Problem) -> tuple[Reason, ...]:
        found = list(choice.by_name(capability.kernel).reasons(problem))
        fp32, (scale, softcap) = torch.finfo(torch.float32), problem.options[:2]
        if softcap and (softcap < fp32.tiny or abs(scale) / softcap > fp32.max):
            sentence = "takes no softcap so small that fp32 does not hold it, or scale / softcap"
            found.append(Reason("softcap", sentence, "drop softcap"))
        longest = max(problem.query_length, problem.key_length)
        if problem.batch * problem.heads * blocks(longest, _LEAST_BLOCK) >= _PROGRAM_LIMIT:
            found.append(Reason("size", "counts programs in 31 bits"))
        return tuple(found)

    def probe(self, capability: Capability, device: torch.device) -> Reason | None:
        try:
            gpu = self._open().gpu(device)
            refused = choice.by_name(capability.kernel).refuses(gpu)
        except Exception as error:  # importing Triton finds drivers and compilers, or does not
            sentence = f"Triton does not work here: {one_line(error)}"
            return Reason("unavailable", sentence, "pip install triton")
        if gpu.architecture < _LEAST_ARCHITECTURE:
            return Reason("arch", f"needs compute capability 8.0 or later, this is {gpu.family}")
        return refused or super().probe(capability, device)

    def yields_to(
        self, problem: Problem, kernel: str, rival: str, rival_kernel: str
    ) -> Reason | None:
        family = self._open().gpu(problem.device).family
        return measured.slower(problem, family, kernel, rival_kernel)

    def _open(self) -> Runtime:
        with self._opening:
            if self._runtime is None:
                self._runtime = TritonRuntime()
            return self._runtime

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        runtime = self._runtime or self._open()
        with runtime.on(problem.device):
            plan = self._forwards[problem, kernel]
            saved: Saved = plan.run(runtime, tensors)
        return saved

    def prepare(self, problem: Problem, kernel: str) -> Callable[[Tensors], Saved]:
        if kernel == "packed":  # what is made of a copy does not lie as the query does
            return super().prepare(problem, kernel)
        runtime, device = self._runtime or self._open(), problem.device
        with runtime.on(device):
            run = self._forwards[problem, kernel].run

        def forward(tensors: Tensors) -> Saved:
            with runtime.on(device):
                saved: Saved = run(runtime, tensors)
            return saved

        return forward

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        runtime = self._runtime or self._open()
        by_lse = None if upstream.lse is None else upstream.lse.stride()
        kind = BackwardKind(problem, saved.out.stride(), saved.lse.stride(), by_lse)
        with runtime.on(problem.device):
            plan = self._backwards[kind, kernel]
            grads: Gradients = plan.run(runtime, tensors, saved, upstream)
        return grads

    def _plan_forward(self, call: ForwardCall) -> Any:
        problem, kernel = call
        if is_empty(problem):
            return plan_empty_forward(problem)
        setting = Setting(self._open().gpu(problem.device))
        return choice.by_name(kernel).forward(problem, setting)

    def _plan_backward(self, call: BackwardCall) -> Any:
        kind, kernel = call
        if is_empty(kind.problem):
            return plan_empty_backward(kind.problem)
        setting = Setting(self._open().gpu(kind.problem.device))
        return choice.by_name(kernel).backward(kind, setting)

"""Orchard's own Metal kernels, launched through torch.mps.compile_shader."""

from __future__ import annotations

import math

import torch

from orchard.attention.problem import Gradients, Problem, Saved, Tensors, Upstream
from orchard.backends.metal.launch import (
    BackwardKind,
    plan_backward,
    plan_forward,
    run_backward,
    run_forward,
)
from orchard.backends.metal.runtime import MetalRuntime, TorchRuntime
from orchard.backends.metal.source import MASK_TYPES, TYPES, Library
from orchard.dispatch.backend import Backend, Capability, Reason
from orchard.dispatch.known import Known


def capability(device: str) -> Capability:
    """What the kernels serve, on whatever stands for the device."""
    return Capability.everything(
        "simdgroup",
        (device,),
        tuple(TYPES),
        max_head_dim=256,
        mask_dtypes=tuple(MASK_TYPES),
        size_limit=2**31 - 1024,  # the end of a tile or run past the last is a number too
    )


class MetalBackend(Backend):
    name = "metal"
    summary = "Orchard's own Metal kernels, for Apple GPUs"
    capabilities = (capability("mps"),)
    probe_rows = (1, 16)

    def __init__(self, runtime: MetalRuntime | None = None) -> None:
        super().__init__()
        self.runtime: MetalRuntime = runtime or TorchRuntime()
        self.shaders = Library(self.runtime)
        self._forwards = Known(plan_forward)
        self._backwards = Known(plan_backward)

    def special_reasons(self, capability: Capability, problem: Problem) -> tuple[Reason, ...]:
        fp32, softcap = torch.finfo(torch.float32), problem.options.softcap
        if softcap and not fp32.tiny <= softcap <= fp32.max * math.log(2):
            sentence = "takes no softcap that fp32 does not hold, also in units of log 2"
            return (Reason("softcap", sentence, "use a softcap nearer to the scores"),)
        return ()

    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        with self.runtime.lock:
            return run_forward(self.shaders, problem, self._forwards[problem], tensors)

    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        by_lse = None if upstream.lse is None else upstream.lse.stride()
        kind = BackwardKind(problem, saved.out.stride(), saved.lse.stride(), by_lse)
        with self.runtime.lock:
            plan = self._backwards[kind]
            return run_backward(self.shaders, problem, plan, tensors, saved, upstream)

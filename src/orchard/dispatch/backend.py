"""What a backend is: capabilities as data, reasons as values, and the functions that serve."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from orchard.attention.memory import conform
from orchard.attention.problem import (
    Gradients,
    Options,
    Problem,
    Saved,
    Stage,
    Tensors,
    Upstream,
    default_scale,
    describe,
)
from orchard.attention.reference import attend, gradients
from orchard.text import one_line

ANY_DEVICE = ("*",)
BandKind = Literal["causal", "bottom_right", "window"]
MaskKind = Literal["bool", "additive"]


class Reason(NamedTuple):
    """Why a backend does not serve a problem, and what would change that."""

    code: str
    sentence: str
    fix: str = ""


@dataclass(frozen=True)
class Capability:
    """What one kernel of a backend serves. Whatever is left at its default, it does not."""

    kernel: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    stages: tuple[Stage, ...] = ("forward", "backward")
    max_head_dim: int | None = None  # None: any
    head_dim_multiple: int = 1
    other_value_dim: bool = False
    grouped_heads: bool = False
    masks: tuple[MaskKind, ...] = ()
    mask_dtypes: tuple[torch.dtype, ...] | None = None  # None: any
    mask_grad: bool = False
    bands: tuple[BandKind, ...] = ()
    mask_with_band: bool = False
    softcap: bool = False
    dropout: bool = False
    lse: bool = False
    lse_grad: bool = False
    zero_sizes: bool = False
    strided_last_axis: bool = False
    strided_grad_out: bool = False  # a grad_out whose last axis is strided or expanded
    unaligned_rows: bool = False  # rows that do not begin on 16-byte boundaries
    size_limit: int | None = None  # an axis, and batch times heads, are below it; None: any
    deterministic: bool = False

    @classmethod
    def everything(
        cls,
        kernel: str,
        devices: tuple[str, ...],
        dtypes: tuple[torch.dtype, ...],
        *,
        stages: tuple[Stage, ...] = ("forward", "backward"),
        max_head_dim: int | None = None,
        mask_dtypes: tuple[torch.dtype, ...] | None = None,
        size_limit: int | None = None,
    ) -> Capability:
        """A kernel that serves the whole meaning of attention, in these types and sizes."""
        return cls(
            kernel,
            devices,
            dtypes,
            stages,
            max_head_dim,
            other_value_dim=True,
            grouped_heads=True,
            masks=("bool", "additive"),
            mask_dtypes=mask_dtypes,
            mask_grad=True,
            bands=("causal", "bottom_right", "window"),
            mask_with_band=True,
            softcap=True,
            dropout=True,
            lse=True,
            lse_grad=True,
            zero_sizes=True,
            strided_last_axis=True,
            strided_grad_out=True,
            unaligned_rows=True,
            size_limit=size_limit,
            deterministic=True,
        )

    def on(self, device: torch.device) -> bool:
        return self.devices == ANY_DEVICE or device.type in self.devices

    def reasons(self, problem: Problem) -> tuple[Reason, ...]:
        """Every reason why this kernel does not serve `problem`."""
        p = problem
        forward = p.stage == "forward"
        found: list[Reason] = []

        def need(served: bool, code: str, sentence: str, fix: str = "") -> None:
            if not served:
                found.append(Reason(code, sentence, fix))

        need(self.on(p.device), "device", f"does not run on {p.device.type}")
        need(p.stage in self.stages, "stage", f"has no {p.stage.replace('_', ' ')}")
        need(
            p.dtype in self.dtypes,
            "dtype",
            f"does not take {dtype_name(p.dtype)}",
            f"use {', '.join(dtype_name(d) for d in self.dtypes)}",
        )
        widest = max(p.head_dim, p.value_dim)
        need(
            self.max_head_dim is None or widest <= self.max_head_dim,
            "head_dim",
            f"head dimension {widest} is above {self.max_head_dim}",
        )
        multiple = self.head_dim_multiple
        need(
            p.head_dim % multiple == 0 and p.value_dim % multiple == 0,
            "head_dim_multiple",
            f"head dimension {p.head_dim if p.head_dim % multiple else p.value_dim} is not a "
            f"multiple of {multiple}",
            "pad it",
        )
        need(
            self.other_value_dim or p.head_dim == p.value_dim,
            "value_dim",
            f"value has head dimension {p.value_dim}, query has {p.head_dim}",
        )
        need(
            self.grouped_heads or p.heads == p.kv_heads,
            "grouped_heads",
            f"does not share {p.kv_heads} key heads among {p.heads} query heads",
        )
        if p.mask is not None:
            need(p.mask.kind in self.masks, "mask", f"takes no {p.mask.kind} mask")
            need(
                self.mask_dtypes is None or p.mask.dtype in self.mask_dtypes,
                "mask_dtype",
                f"takes no mask of {dtype_name(p.mask.dtype)}",
                "convert the mask to float32",
            )
            need(
                forward or self.mask_grad or not p.mask_grad,
                "mask_grad",
                "gives no gradient of the mask",
                "detach the mask",
            )
            need(
                self.mask_with_band or p.band_kind == "none",
                "mask_with_band",
                "takes a mask or causal, not both",
                "write the causal part into the mask",
            )
        need(
            p.band_kind in ("none", *self.bands)
            or (p.band_kind == "causal" and p.query_length == p.key_length and bool(self.bands)),
            "band",
            f"no {p.band_kind.replace('_', '-')} masking for {p.query_length} rows "
            f"and {p.key_length} keys",
        )
        need(self.softcap or not p.options.softcap, "softcap", "no softcap", "drop softcap")
        need(
            self.dropout or not p.options.threshold,
            "dropout",
            "cannot draw Orchard's dropout bits",
            "set dropout_p=0",
        )
        need(
            not forward or self.lse or not (p.lse or p.grad),
            "lse",
            "gives no lse, which a backward or return_lse needs",
            "call it under torch.no_grad() without return_lse",
        )
        need(
            forward or self.lse_grad or not p.lse,
            "lse_grad",
            "takes no gradient through lse",
            "detach lse",
        )
        operands = p.operands
        none = [name for name, (shape, _) in operands.items() if 0 in shape]
        need(self.zero_sizes or not none, "zero_size", f"an axis of {_join(none)} has size 0")
        strided = [name for name, (shape, s) in operands.items() if shape[3] > 1 and s[3] != 1]
        need(
            self.strided_last_axis or not strided,
            "last_stride",
            f"the last axis of {_join(strided)} does not have stride 1",
            "make that axis contiguous",
        )
        need(
            self.strided_grad_out
            or p.grad_strides is None
            or p.value_dim <= 1
            or p.grad_strides[3] == 1,
            "grad_stride",
            "the last axis of grad_out does not have stride 1",
            "make that axis contiguous",
        )
        need(
            self.unaligned_rows or rows_aligned(p),
            "alignment",
            "rows do not begin on 16-byte boundaries",
            "make offset and strides multiples of 16 bytes",
        )
        largest = max(p.batch * p.heads, *p.query_shape, *p.key_shape, *p.value_shape)
        need(
            self.size_limit is None or largest < self.size_limit,
            "size",
            f"an axis, or batch times heads, is {largest}; it takes less than {self.size_limit}",
        )
        need(
            self.deterministic or forward or not p.deterministic,
            "deterministic",
            "its backward is not deterministic",
        )
        return tuple(found)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _join(names: list[str]) -> str:
    return " and ".join(names)


def rows_aligned(problem: Problem) -> bool:
    strides = (*problem.query_strides[:3], *problem.key_strides[:3], *problem.value_strides[:3])
    if problem.grad_strides is not None:
        strides = (*strides, *problem.grad_strides[:3])
    return problem.aligned and all(s * problem.dtype.itemsize % 16 == 0 for s in strides)


class Backend(ABC):
    """A way to compute attention. Subclasses say what they serve as data and serve it.

    Tensors that reach one fit their problem and one another: see attention/operands.py.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    capabilities: ClassVar[tuple[Capability, ...]]
    on_request: ClassVar[bool] = False  # neither probed nor chosen unless asked for by name
    probe_rows: ClassVar[tuple[int, ...]] = (16,)  # 1 too where a decode has kernels of its own
    rivals: ClassVar[tuple[str, ...]] = ()  # backends that `yields_to` is asked about

    def __init__(self) -> None:
        self._probed: dict[tuple[str, torch.device], Reason | None] = {}

    @abstractmethod
    def forward(self, problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        """(out, lse). An lse that the problem does not ask for may be an empty tensor."""

    def prepare(self, problem: Problem, kernel: str) -> Callable[[Tensors], Saved]:
        """`forward` for call after call: what can be found once is found here.

        The output lies in memory as the query does, and an lse that is asked for is contiguous.
        """

        def forward(tensors: Tensors) -> Saved:
            out, lse = self.forward(problem, kernel, tensors)
            return Saved(conform(out, tensors.query), lse.contiguous())

        return forward

    @abstractmethod
    def backward(
        self, problem: Problem, kernel: str, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        """Gradients of the operands, from any backend's forward."""

    def double_backward(
        self, problem: Problem, tensors: Tensors, upstream: Upstream, directions: Gradients
    ) -> tuple[Upstream, Gradients]:
        """Second gradients; only for a backend whose capabilities have the stage."""
        raise AssertionError(f"{self.name} was planned for a stage it does not have")

    def held_back(self, asked: str) -> Reason | None:
        """Why it is left alone where the name asked for is another."""
        if not self.on_request or asked == self.name:
            return None
        fix = f'backend="{self.name}" asks for it'
        return Reason("on_request", "runs only when it is asked for", fix)

    def yields_to(
        self, problem: Problem, kernel: str, rival: str, rival_kernel: str
    ) -> Reason | None:
        """Why, under "auto", it leaves what its kernel serves to a rival's; None: it does not."""
        return None

    def serves_device(self, device: torch.device) -> bool:
        return any(capability.on(device) for capability in self.capabilities)

    def select(self, problem: Problem) -> tuple[Capability | None, tuple[Reason, ...]]:
        """The first kernel that serves `problem`, or every reason why none does."""
        if not self.serves_device(problem.device):
            return None, (Reason("device", f"does not run on {problem.device.type}"),)
        collected: list[Reason] = []
        here = [c for c in self.capabilities if c.on(problem.device)]
        for capability in here:
            reasons = capability.reasons(problem) + self.special_reasons(capability, problem)
            if not reasons:
                unavailable = self.unavailable(capability, problem.device)
                if unavailable is None:
                    return capability, ()
                reasons = (unavailable,)
            if len(here) > 1:
                reasons = tuple(
                    r._replace(sentence=f"{capability.kernel}: {r.sentence}") for r in reasons
                )
            collected.extend(reasons)
        return None, tuple(collected)

    def special_reasons(self, capability: Capability, problem: Problem) -> tuple[Reason, ...]:
        """Reasons that the capability table cannot express."""
        return ()

    def unavailable(self, capability: Capability, device: torch.device) -> Reason | None:
        """None once a tiny case of this kernel has run right on `device`, else why it did not."""
        key = (capability.kernel, device)
        if key in self._probed:
            return self._probed[key]
        found = self.probe(capability, device)
        if found is None or found.code != "memory":  # there may be enough the next time
            self._probed[key] = found
        return found

    def probe(self, capability: Capability, device: torch.device) -> Reason | None:
        """Run tiny cases, backward too where there is one, and check their values."""
        try:
            right = all(self._is_right(capability, device, rows) for rows in self.probe_rows)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return Reason("memory", f"its probe ran out of memory: {one_line(error)}")
        except Exception as error:  # the probe exists to turn any failure into a reason
            return Reason("unavailable", f"its probe failed: {one_line(error)}")
        return None if right else Reason("unavailable", "its probe computed wrong values")

    def _is_right(self, capability: Capability, device: torch.device, rows: int) -> bool:
        """Whether a case of so many rows gives the values of the definition."""
        source = torch.Generator().manual_seed(0)

        def random(length: int) -> Tensor:
            return torch.randn(1, 2, length, 64, dtype=torch.float64, generator=source)

        exact, by_out = Tensors(random(rows), random(16), random(16)), random(rows)
        options = Options(default_scale(64))
        tensors = Tensors(*(t.to(device, capability.dtypes[0]) for t in exact[:3]))
        problem = describe(tensors, options, lse=capability.lse)
        saved = self.forward(problem, capability.kernel, tensors)
        expected = attend(exact, options)
        right = near(saved.out, expected.out)
        if capability.lse:
            right = right and near(saved.lse, expected.lse)
        if "backward" in capability.stages:
            grad_out = by_out.to(tensors.query)
            problem = describe(tensors, options, stage="backward", grad_out=grad_out, grad=True)
            upstream = Upstream(grad_out, None)
            found = self.backward(problem, capability.kernel, tensors, saved, upstream)
            known = gradients(exact, options, Upstream(by_out, None))
            right = right and all(map(near, found[:3], known[:3]))
        return right


def near(actual: Tensor, expected: Tensor) -> bool:
    """Whether a probe's values are those, allowing for any dtype's precision."""
    limit = 0.05 * float(expected.abs().max())
    return torch.allclose(actual.double().cpu(), expected, rtol=0.0, atol=limit)

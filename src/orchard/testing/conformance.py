"""The conformance suite: what every backend has to pass, in tests and in `orchard verify`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from orchard.attention.api import Causal, attention, explain
from orchard.attention.dropout import draw_seed
from orchard.attention.ops import Settings
from orchard.attention.problem import Options, Tensors, Upstream, accumulation_dtype
from orchard.attention.strides import axis_order
from orchard.dispatch.journal import journal
from orchard.dispatch.planner import AUTO
from orchard.errors import FallbackWarning, NotServedError
from orchard.testing.budget import Comparison, Results, judge
from orchard.testing.inputs import BY_NAME, VIEWS, Guarded, guarded
from orchard.testing.poison import poisoned

Subject = Literal["layout", "shape", "dtype", "mask", "band", "dropout", "grad"]


@dataclass(frozen=True)
class Case:
    """One problem, described so that it can be built on any device."""

    name: str
    subject: Subject
    dtype: torch.dtype = torch.float32
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    rows: int = 33
    keys: int = 47
    dim: int = 16
    value_dim: int = 16
    views: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    grad_view: str = "contiguous"
    mask: Literal["bool", "additive"] | None = None
    mask_axes: str = "bhqk"  # axes that are not broadcast
    mask_view: str = "contiguous"
    causal: Causal = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    lse_grad: bool = False
    mask_grad: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a case: passed, failed, or not served for reasons that are no failure."""

    case: Case
    status: Literal["passed", "failed", "not served"]
    served: str = ""  # forward and backward backends
    comparisons: list[Comparison] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """The largest share of its budget that any result uses."""
        shares = [c.error / c.budget for c in self.comparisons if c.budget]
        return max(shares, default=0.0)


def _all_views(view: str) -> tuple[str, str, str]:
    return (view, view, view)


def _layouts() -> Iterator[Case]:
    for view in VIEWS:
        yield Case(f"all operands {view.name}", "layout", views=_all_views(view.name))
        yield Case(
            f"key {view.name}, value last_strided, bf16",
            "layout",
            dtype=torch.bfloat16,
            views=("bshd", view.name, "last_strided"),
        )
        yield Case(f"grad_out {view.name}", "layout", grad_view=view.name, causal=True)
        wide = Case("", "layout", dtype=torch.bfloat16, dim=64, value_dim=64, kv_heads=2)
        yield replace(wide, name=f"all operands {view.name}, bf16", views=_all_views(view.name))
        yield replace(
            wide,
            name=f"query bshd, grad_out {view.name}, bf16",
            views=_all_views("bshd"),
            grad_view=view.name,
            causal=True,
        )
        yield replace(wide, name=f"grad_out {view.name}, bf16", grad_view=view.name)
    yield Case(
        "query bshd, grouped, dropout, fp16",
        "layout",
        dtype=torch.float16,
        kv_heads=2,
        views=("bshd", "qkv_slice", "rows_padded"),
        dropout_p=0.2,
    )


def _shapes() -> Iterator[Case]:
    base = Case("", "shape")
    for rows, keys in ((1, 1), (1, 7), (7, 1), (77, 77), (1, 1000), (1000, 7)):
        yield replace(base, name=f"{rows} rows, {keys} keys", rows=rows, keys=keys, kv_heads=2)
    yield replace(base, name="1 row, 5000 keys, grouped", rows=1, keys=5000, heads=8, kv_heads=2)
    for dim in (1, 40, 64, 80, 96, 128, 256):
        for dtype in (torch.float32, torch.bfloat16):
            yield replace(
                base, name=f"head dimension {dim}, {dtype}", dim=dim, value_dim=dim, dtype=dtype
            )
    for dim, value_dim in ((16, 40), (64, 1), (7, 13)):
        name = f"head dimension {dim}, value dimension {value_dim}"
        yield replace(base, name=name, dim=dim, value_dim=value_dim)
    for heads, kv_heads in ((8, 1), (6, 2), (3, 3)):
        name = f"{heads} query heads on {kv_heads} key heads"
        yield replace(base, name=name, heads=heads, kv_heads=kv_heads)
    for axis in ("batch", "rows", "keys", "dim", "value_dim"):
        size: dict[str, Any] = {axis: 0}
        yield replace(base, name=f"{axis} of size 0", **size)
    yield replace(base, name="no heads", heads=0, kv_heads=0)


def _dtypes() -> Iterator[Case]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        base = Case("", "dtype", dtype=dtype, rows=100, keys=130, dim=64, value_dim=64)
        yield replace(base, name=f"{dtype} full")
        yield replace(base, name=f"{dtype} causal", causal=True)
        yield replace(base, name=f"{dtype} large scores", scale=2.0)
        yield replace(base, name=f"{dtype} mask", mask="additive", mask_axes="bk")


def _masks() -> Iterator[Case]:
    kinds: tuple[Literal["bool", "additive"], ...] = ("bool", "additive")
    for kind in kinds:
        base = Case("", "mask", mask=kind, kv_heads=2)
        for axes in ("bhqk", "qk", "bk", "hk", "bq", "k", ""):
            yield replace(base, name=f"{kind} mask over {axes or 'nothing'}", mask_axes=axes)
        for view in ("last_strided", "last_outermost", "odd_offset", "heads_expanded"):
            yield replace(base, name=f"{kind} mask {view}", mask_view=view)
        yield replace(base, name=f"{kind} mask, causal", causal=True)
        yield replace(base, name=f"{kind} mask, bottom-right", causal="bottom_right")
        yield replace(base, name=f"{kind} mask, window, softcap", window=(5, 9), softcap=3.0)
        for view in ("contiguous", "bshd"):
            yield replace(
                base,
                name=f"{kind} mask, {view}, bf16",
                dtype=torch.bfloat16,
                kv_heads=4,
                dim=64,
                value_dim=64,
                views=_all_views(view),
            )
    yield Case("fp32 mask on fp16 operands", "mask", dtype=torch.float16, mask="additive")


def _bands() -> Iterator[Case]:
    alignments: tuple[Causal, ...] = (True, "bottom_right")
    for causal in alignments:
        for rows, keys in ((40, 40), (20, 50), (50, 20), (1, 50)):
            name = f"causal {causal}, {rows} rows, {keys} keys"
            yield Case(name, "band", rows=rows, keys=keys, causal=causal)
    for window in ((3, 0), (0, 3), (2, 5), (-1, 4), (4, -1), (0, 0), (100, 100)):
        yield Case(f"window {window}", "band", window=window)
        yield Case(f"window {window}, causal", "band", window=window, causal=True)
        yield Case(
            f"window {window}, bottom-right", "band", window=window, causal="bottom_right", rows=60
        )
    yield Case("softcap 5", "band", softcap=5.0, scale=1.0, causal=True)
    yield Case("scale 0", "band", scale=0.0)
    yield Case("scale -0.3", "band", scale=-0.3)


def _dropouts() -> Iterator[Case]:
    for p in (0.1, 0.5, 0.999):
        yield Case(f"dropout {p}", "dropout", dropout_p=p)
        yield Case(
            f"dropout {p}, causal, grouped, bf16",
            "dropout",
            dropout_p=p,
            causal=True,
            kv_heads=2,
            dtype=torch.bfloat16,
        )
    yield Case(
        "dropout 0.3, strided, mask, value dimension",
        "dropout",
        dropout_p=0.3,
        views=("last_strided", "bshd", "rows_padded"),
        mask="additive",
        mask_axes="hk",
        value_dim=24,
    )


def _gradients() -> Iterator[Case]:
    base = Case("", "grad", lse_grad=True)
    yield replace(base, name="through lse")
    yield replace(base, name="through lse, bottom-right with empty rows", causal="bottom_right")
    yield replace(base, name="through lse, dropout, bf16", dropout_p=0.2, dtype=torch.bfloat16)
    for axes in ("bhqk", "qk", "bk", "hq", ""):
        name = f"of an additive mask over {axes or 'nothing'}"
        yield Case(
            name, "grad", mask="additive", mask_axes=axes, mask_grad=True, kv_heads=2, dropout_p=0.1
        )
    yield Case(
        "of a strided additive mask, bf16",
        "grad",
        mask="additive",
        mask_view="last_outermost",
        mask_grad=True,
        dtype=torch.bfloat16,
        softcap=4.0,
    )


def _decodes() -> Iterator[Case]:
    """Few rows against many keys, which have kernels of their own in most backends."""
    base = Case("", "shape", kv_heads=2, rows=3, keys=300, dim=24, value_dim=40)
    half, short = torch.float16, torch.bfloat16
    yield replace(base, name="decode, bool mask", mask="bool")
    yield replace(base, name="decode, bool mask, bf16", mask="bool", dtype=short)
    yield replace(base, name="decode, additive mask over hk", mask="additive", mask_axes="hk")
    yield replace(base, name="decode, softcap", softcap=3.0)
    yield replace(base, name="decode, dropout", dropout_p=0.3)
    yield replace(base, name="decode, dropout, fp16", dropout_p=0.1, dtype=half)
    yield replace(base, name="decode, window", causal="bottom_right", window=(50, 0))
    yield replace(base, name="decode, strided", views=("last_strided", "bshd", "rows_padded"))
    yield replace(base, name="decode, head dimension 256", dim=256, value_dim=256)
    yield replace(base, name="decode, head dimension 1", dim=1, value_dim=1)
    yield replace(base, name="decode, 1 key", keys=1)
    yield replace(
        base,
        name="decode, more rows than keys",
        mask="bool",
        causal="bottom_right",
        rows=4,
        keys=2,
    )
    yield replace(
        base,
        name="decode, everything, bf16",
        dtype=short,
        mask="additive",
        mask_axes="q",
        causal=True,
        dropout_p=0.2,
        softcap=2.0,
    )


CASES: tuple[Case, ...] = (
    *_layouts(),
    *_shapes(),
    *_dtypes(),
    *_masks(),
    *_bands(),
    *_dropouts(),
    *_gradients(),
    *_decodes(),
)
QUICK = CASES[::4]
SEED = 7


@dataclass(frozen=True)
class Inputs:
    """A case's operands on a device, each between guards."""

    operands: tuple[Guarded, Guarded, Guarded]
    mask: Guarded | None
    grad_out: Guarded
    grad_lse: Tensor

    def intact(self) -> bool:
        everything = (*self.operands, self.grad_out, *([self.mask] if self.mask else []))
        return all(operand.intact() for operand in everything)


def build(case: Case, device: torch.device) -> Inputs:
    """Operands for `case`, the same values on every device."""
    source = torch.Generator().manual_seed(20)
    shapes = (
        (case.batch, case.heads, case.rows, case.dim),
        (case.batch, case.kv_heads, case.keys, case.dim),
        (case.batch, case.kv_heads, case.keys, case.value_dim),
    )
    query, key, value = (
        guarded(shape, BY_NAME[view], dtype=case.dtype, device=device, generator=source)
        for shape, view in zip(shapes, case.views, strict=True)
    )
    out_shape = (case.batch, case.heads, case.rows, case.value_dim)
    grad_out = guarded(
        out_shape, BY_NAME[case.grad_view], dtype=case.dtype, device=device, generator=source
    )
    grad_lse = torch.randn(out_shape[:3], generator=source, dtype=torch.float64)
    return Inputs(
        (query, key, value),
        _build_mask(case, device, source) if case.mask else None,
        grad_out,
        grad_lse.to(device, accumulation_dtype(case.dtype)),
    )


def _build_mask(case: Case, device: torch.device, source: torch.Generator) -> Guarded:
    """A mask that closes about a fifth of the places, and one row where it is not broadcast."""
    full = {"b": case.batch, "h": case.heads, "q": case.rows, "k": case.keys}
    shape = [size if axis in case.mask_axes else 1 for axis, size in full.items()]
    dtype = torch.float32 if case.dtype == torch.float16 else case.dtype
    view = BY_NAME[case.mask_view]
    built = guarded(shape, view, dtype=dtype, generator=source)
    # Through the first copy of each expanded axis, as a whole expanded tensor cannot be written.
    once = [1 if axis in view.expanded else size for axis, size in enumerate(shape)]
    place = (once, built.tensor.stride(), built.tensor.storage_offset())
    values = built.buffer.as_strided(*place)
    closed = values < -0.8
    if case.mask_axes == "bhqk" and closed.numel():
        closed[0, 0, -1] = True
    buffer = built.buffer
    if case.mask == "bool":
        buffer = torch.zeros_like(built.buffer, dtype=torch.bool)
        buffer.as_strided(*place).copy_(~closed)
    else:
        values.masked_fill_(closed, -torch.inf)
    buffer = buffer.to(device)
    return Guarded(buffer.as_strided(shape, *place[1:]), buffer, buffer.clone())


def check(case: Case, device: torch.device | str = "cpu", backend: str = AUTO) -> Outcome:
    """Run a case forward and backward and hold every result to its budget."""
    device = torch.device(device)
    if device.type == "mps" and case.dtype == torch.float64:
        return Outcome(case, "not served", complaints=["MPS has no float64"])
    inputs = build(case, device)
    query, key, value = (operand.tensor.requires_grad_() for operand in inputs.operands)
    mask = inputs.mask.tensor if inputs.mask else None
    if mask is not None and case.mask_grad:
        mask.requires_grad_()
    options: dict[str, Any] = {
        "mask": mask,
        "causal": case.causal,
        "window": case.window,
        "scale": case.scale,
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
        "backend": backend,
    }
    plan = explain(query, key, value, return_lse=case.lse_grad, **options)
    plans = (plan, plan.backward)
    unserved = next((p for p in plans if p is not None and p.backend is None), None)
    if unserved is not None:
        reasons = [reason.sentence for reason in unserved.why_not(backend)]
        return Outcome(case, "not served", complaints=reasons)

    failures = journal.stats()["failures"]
    try:
        actual = _run(case, inputs, options)
    except NotServedError as error:  # only the backward knows the strides of grad_out
        return Outcome(case, "not served", complaints=str(error).splitlines())
    seed = draw_seed(device, torch.Generator(device).manual_seed(SEED))
    comparisons = _against_definition(case, inputs, actual, seed)
    complaints = [str(c) for c in comparisons if not c.ok] + _complaints(case, inputs, actual)
    for failure in journal.stats()["failures"]:
        if failure not in failures:  # who was planned has to serve
            complaints.append(f"{failure['backend']} failed: {failure['error']}")
    served = f"{plan.backend} / {plan.backward.backend if plan.backward else '-'}"
    status: Literal["passed", "failed"] = "failed" if complaints else "passed"
    return Outcome(case, status, served, comparisons, complaints)


def _run(case: Case, inputs: Inputs, options: dict[str, Any]) -> Results:
    """Outputs, poisoned before they are written, and gradients."""
    query, key, value = (operand.tensor for operand in inputs.operands)
    source = torch.Generator(query.device).manual_seed(SEED)
    with poisoned(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # the journal tells
        out, lse = attention(query, key, value, return_lse=True, generator=source, **options)
        leaves = [query, key, value]
        if case.mask_grad and inputs.mask:
            leaves.append(inputs.mask.tensor)
        outputs, grads = [out], [inputs.grad_out.tensor]
        if case.lse_grad:
            outputs.append(lse)
            grads.append(inputs.grad_lse)
        found = torch.autograd.grad(outputs, leaves, grads)
    return Results(out.detach(), lse.detach(), *found)


def _complaints(case: Case, inputs: Inputs, actual: Results) -> list[str]:
    """What is wrong beside the values."""
    found = []
    out, lse, query = actual.out, actual.lse, inputs.operands[0].tensor
    if not inputs.intact():
        found.append("an operand or the memory around it was written to")
    if lse is None or (out.dtype, lse.dtype) != (case.dtype, accumulation_dtype(case.dtype)):
        found.append(f"out is {out.dtype} and lse is {lse if lse is None else lse.dtype}")
    order = axis_order(query.shape, query.stride())
    if out.numel() and axis_order(out.shape, out.stride()) != order:
        found.append(f"out has strides {out.stride()}, query {query.stride()}")
    return found


def _against_definition(
    case: Case, inputs: Inputs, actual: Results, seed: Tensor
) -> list[Comparison]:
    """Compare on the CPU, where every device's operands can be held to fp64."""
    query, key, value = (operand.tensor.detach().cpu() for operand in inputs.operands)
    mask = inputs.mask.tensor.detach().cpu() if inputs.mask else None
    tensors = Tensors(query, key, value, mask, seed.cpu())
    upstream = Upstream(
        inputs.grad_out.tensor.cpu(), inputs.grad_lse.cpu() if case.lse_grad else None
    )
    here = Results(*(None if result is None else result.cpu() for result in actual))  # type: ignore[arg-type]
    options = _options(case, tensors)
    return judge(here, tensors, options, upstream, mask_grad=case.mask_grad)


def _options(case: Case, tensors: Tensors) -> Options:
    left, right = case.window or (-1, -1)
    settings = Settings(
        case.scale,
        case.softcap or 0.0,
        case.dropout_p,
        left,
        0 if case.causal else right,
        case.causal == "bottom_right",
        AUTO,
    )
    return settings.options(tensors.query, tensors.key)

"""The binding of the native library: what it is told, what it answers, and when it is not there."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import orchard
from orchard.attention.problem import (
    Band,
    Options,
    Problem,
    Saved,
    Tensors,
    Upstream,
    describe,
)
from orchard.attention.strides import contiguous_strides
from orchard.backends.cpu import CpuBackend, location, native
from orchard.backends.cpu.arguments import forward_template
from orchard.backends.cpu.native import BackwardArgs, ForwardArgs
from orchard.dispatch import planner, settings
from orchard.testing.poison import poisoned

pytestmark = [pytest.mark.dispatch]

CPU = torch.device("cpu")
OPTIONS = Options(0.3)


class Recorder(native.Library):
    """Stands for the library: keeps a copy of every struct and answers with one status."""

    def __init__(self, status: int = 0, message: bytes = b"") -> None:
        self.status = status
        self.forwards: list[ForwardArgs] = []
        self.backwards: list[BackwardArgs] = []
        self._last_error = lambda: message

    def forward(self, address: int) -> int:
        held = ctypes.string_at(address, ctypes.sizeof(ForwardArgs))
        self.forwards.append(ForwardArgs.from_buffer_copy(held))
        return self.status

    def backward(self, address: int) -> int:
        held = ctypes.string_at(address, ctypes.sizeof(BackwardArgs))
        self.backwards.append(BackwardArgs.from_buffer_copy(held))
        return self.status


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def backend(recorder: Recorder) -> CpuBackend:
    """A backend whose library is the recorder."""
    made = CpuBackend()
    made._library = recorder
    return made


@pytest.fixture
def library() -> native.Library:
    """The library of this installation. Only its absence is a reason to skip."""
    if location.find_library() is None:
        pytest.skip("the native library is not built")
    return native.loaded()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """cpu before reference, in a planner of the test's own."""
    entries = ("orchard.backends.cpu:CpuBackend", "orchard.backends.reference:ReferenceBackend")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("orchard.backends"), "REGISTRY", entries)
        planner.reset()
        yield patch
    planner.reset()


def operands(dtype: torch.dtype = torch.float32) -> Tensors:
    """Two query heads on one key head, no two strides alike."""
    query = torch.randn(2, 5, 4, 3, dtype=dtype).transpose(1, 2)[:, :2, :, :]
    key = torch.randn(2, 1, 14, 3, dtype=dtype)[:, :, ::2]
    value = torch.randn(2, 1, 6, 7, dtype=dtype).mT
    return Tensors(query, key, value)


def is_tensor(args: Any, tensor: Tensor | None) -> bool:
    """Whether a struct's tensor is this one: address, sizes, strides and type."""
    if tensor is None:
        return args.data is None and list(args.sizes) == [0] * 4
    more = [1] * (4 - tensor.ndim)
    return (
        args.data == tensor.data_ptr()
        and list(args.sizes) == [*tensor.shape, *more]
        and list(args.strides) == [*tensor.stride(), *more]
        and args.dtype == native.DTYPES[tensor.dtype]
        and args.reserved == 0
    )


def backward_of(tensors: Tensors, grad_out: Tensor, **asked: Any) -> Problem:
    return describe(tensors, OPTIONS, stage="backward", grad_out=grad_out, grad=True, **asked)


# What the library is told


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_forward_struct(backend: CpuBackend, recorder: Recorder, dtype: torch.dtype) -> None:
    """The struct describes every tensor and option of the call."""
    mask = torch.zeros(2, 1, 1, 7, dtype=torch.float64)
    tensors = operands(dtype)._replace(mask=mask, seed=torch.tensor([5, -1], dtype=torch.int32))
    options = Options(0.25, 3.0, Band(-2, 4), 6554)
    saved = backend.forward(describe(tensors, options, lse=True), "native", tensors)
    (args,) = recorder.forwards
    assert args.struct_size == ctypes.sizeof(ForwardArgs)
    assert args.abi_version == native.ABI_VERSION
    for name, tensor in tensors._asdict().items():
        assert name == "seed" or is_tensor(getattr(args, name), tensor), name
    assert is_tensor(args.out, saved.out)
    assert is_tensor(args.lse, saved.lse)
    assert saved.out.shape == (2, 2, 5, 6)
    assert (saved.out.dtype, saved.lse.dtype) == (dtype, torch.float32)
    assert (args.band_low, args.band_high) == (-2, 4)
    assert (args.scale, args.softcap, args.drop_threshold) == (0.25, 3.0, 6554)
    assert tensors.seed is not None
    assert args.seed == tensors.seed.data_ptr()


def test_forward_struct_without_options(backend: CpuBackend, recorder: Recorder) -> None:
    """What is not asked for is absent; a band without bounds does not bound."""
    tensors = operands()
    saved = backend.forward(describe(tensors, OPTIONS), "native", tensors)
    (args,) = recorder.forwards
    assert is_tensor(args.mask, None)
    assert is_tensor(args.lse, None)
    assert saved.lse.numel() == 0
    assert args.seed is None
    assert (args.band_low, args.band_high) == (-(2**63), 2**63 - 1)
    assert (args.softcap, args.drop_threshold) == (0.0, 0)


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.grad
def test_backward_struct(backend: CpuBackend, recorder: Recorder, mask_dtype: torch.dtype) -> None:
    """Operands, what the forward left and what arrives, each by its own strides."""
    tensors = operands(torch.bfloat16)._replace(mask=torch.zeros(2, 1, 7, 5, dtype=mask_dtype).mT)
    out = torch.randn(2, 5, 2, 6, dtype=torch.bfloat16).transpose(1, 2)
    lse, grad_lse = torch.randn(2, 2, 5), torch.randn(2, 5, 2).mT
    grad_out = torch.ones((), dtype=torch.bfloat16).expand(2, 2, 5, 6)
    problem = backward_of(tensors, grad_out, lse=True, mask_grad=True)
    upstream = Upstream(grad_out, grad_lse)
    grads = backend.backward(problem, "native", tensors, Saved(out, lse), upstream)
    (args,) = recorder.backwards
    assert args.struct_size == ctypes.sizeof(BackwardArgs)
    given = {"out": out, "lse": lse, "grad_out": grad_out, "grad_lse": grad_lse}
    made = {f"grad_{name}": grad for name, grad in zip(grads._fields[:3], grads, strict=False)}
    for name, tensor in (tensors._asdict() | given | made).items():
        assert name == "seed" or is_tensor(getattr(args, name), tensor), name
    assert grads.mask is not None
    assert grads.mask.dtype == mask_dtype
    assert grads.mask.stride() == (35, 35, 1, 5)
    assert list(args.grad_mask.sizes) == [2, 1, 5, 7]
    assert list(args.grad_mask.strides) == [35, 35, 1, 5]
    assert args.grad_mask.dtype == native.DTYPES[torch.float32]
    assert args.grad_mask.data is not None


@pytest.mark.grad
def test_backward_struct_without_options(backend: CpuBackend, recorder: Recorder) -> None:
    """Without a gradient through lse or of the mask these are absent."""
    tensors = operands()._replace(mask=torch.zeros(2, 1, 5, 7))
    out, lse = torch.randn(2, 2, 5, 6), torch.randn(2, 2, 5)
    problem = backward_of(tensors, out)
    grads = backend.backward(problem, "native", tensors, Saved(out, lse), Upstream(out, None))
    (args,) = recorder.backwards
    assert is_tensor(args.grad_lse, None)
    assert is_tensor(args.grad_mask, None)
    assert grads.mask is None


def test_bool_mask(backend: CpuBackend, recorder: Recorder) -> None:
    """A bool mask goes as it is, with its own strides."""
    mask = torch.ones(7, 5, dtype=torch.bool).mT[None, None].expand(2, 2, 5, 7)
    tensors = operands()._replace(mask=mask)
    backend.forward(describe(tensors, OPTIONS), "native", tensors)
    assert is_tensor(recorder.forwards[0].mask, mask)


def test_same_problem_other_tensors(backend: CpuBackend, recorder: Recorder) -> None:
    """One template serves every call of a problem, and no call changes another's struct."""
    first, second = operands(), operands()
    problem = describe(first, OPTIONS)
    assert describe(second, OPTIONS) == problem
    outs = [backend.forward(problem, "native", tensors).out for tensors in (first, second)]
    assert len(backend._forwards) == 1
    for args, tensors, out in zip(recorder.forwards, (first, second), outs, strict=True):
        assert is_tensor(args.query, tensors.query)
        assert is_tensor(args.key, tensors.key)
        assert is_tensor(args.value, tensors.value)
        assert is_tensor(args.out, out)
    before = bytes(forward_template(problem).words)
    assert bytes(backend._forwards[problem].words) == before


@pytest.mark.grad
def test_same_problem_other_strides(backend: CpuBackend, recorder: Recorder) -> None:
    """What the problem does not hold has a template of its own for each layout."""
    tensors, grad_out = operands(), torch.randn(2, 2, 5, 6)
    lse = torch.randn(2, 2, 5)
    problem = backward_of(tensors, grad_out, lse=True)
    outs = (torch.randn(2, 2, 5, 6), torch.randn(2, 5, 2, 6).transpose(1, 2))
    grad_lses = (torch.randn(2, 2, 5), torch.randn(()).expand(2, 2, 5))
    given = [(out, grad_lse) for out in outs for grad_lse in grad_lses] * 2
    for out, grad_lse in given:
        upstream = Upstream(grad_out, grad_lse)
        backend.backward(problem, "native", tensors, Saved(out, lse), upstream)
    assert len(backend._backwards) == 4
    for args, (out, grad_lse) in zip(recorder.backwards, given, strict=True):
        assert is_tensor(args.out, out)
        assert is_tensor(args.grad_lse, grad_lse)


def test_templates_are_bounded(backend: CpuBackend) -> None:
    """Ever new problems do not fill the memory."""
    backend._forwards._most = backend._backwards._most = 3
    for rows in range(1, 9):
        query = torch.randn(1, 1, rows, 4)
        tensors = Tensors(query, query, query)
        saved = backend.forward(describe(tensors, OPTIONS, grad=True), "native", tensors)
        problem = backward_of(tensors, query)
        backend.backward(problem, "native", tensors, saved, Upstream(query, None))
        assert len(backend._forwards) <= 3
        assert len(backend._backwards) <= 3


def test_threads_are_the_callers(
    backend: CpuBackend, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call may use torch's number of threads, or ORCHARD_NUM_THREADS where it is set."""
    tensors = operands()
    problem = describe(tensors, OPTIONS._replace(threshold=65535))
    told: list[int] = []
    for number, setting in ((3, None), (5, None), (5, 2), (1, 10**12)):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        monkeypatch.setattr(settings, "_current", settings.Settings(num_threads=setting))
        backend.forward(problem, "native", tensors)
        told.append(recorder.forwards[-1].threads)
        assert recorder.forwards[-1].drop_threshold == 65535
    assert told == [3, 5, 2, native.MOST_THREADS]


# What it answers


@pytest.mark.errors
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (native.INVALID_ARGUMENT, orchard.ArgumentValueError),
        (native.UNSUPPORTED, orchard.NativeError),
        (native.OUT_OF_MEMORY, torch.OutOfMemoryError),
        (native.WRONG_ABI, orchard.NativeError),
        (77, orchard.NativeError),
    ],
)
def test_statuses(backend: CpuBackend, status: int, kind: type[Exception]) -> None:
    """Each status is an exception with the library's own words."""
    backend._library = Recorder(status, b"the barn is full")
    tensors = operands()
    with pytest.raises(kind, match="the barn is full"):
        backend.forward(describe(tensors, OPTIONS), "native", tensors)
    out, lse = torch.randn(2, 2, 5, 6), torch.randn(2, 2, 5)
    with pytest.raises(kind, match="the barn is full"):
        backend.backward(
            backward_of(tensors, out), "native", tensors, Saved(out, lse), Upstream(out, None)
        )


def test_status_without_words(backend: CpuBackend) -> None:
    """A status without a message is told by its number."""
    backend._library = Recorder(native.UNSUPPORTED)
    tensors = operands()
    with pytest.raises(orchard.NativeError, match=f"status {native.UNSUPPORTED}"):
        backend.forward(describe(tensors, OPTIONS), "native", tensors)


@pytest.mark.parametrize("status", [native.UNSUPPORTED, native.OUT_OF_MEMORY])
def test_failure_is_served_by_the_next(registered: pytest.MonkeyPatch, status: int) -> None:
    """Under "auto" the next backend serves a refused call, with a warning; not if insisted."""
    cpu = planner.planner().backends["cpu"]
    assert isinstance(cpu, CpuBackend)
    cpu._library = Recorder(status, b"the barn is full")
    registered.setattr(cpu, "unavailable", lambda *_: None)
    query = torch.randn(1, 2, 8, 16)
    with pytest.warns(orchard.FallbackWarning, match="the barn is full"):
        out = orchard.attention(query, query, query)
    assert torch.equal(out, orchard.attention(query, query, query, backend="reference"))
    with pytest.raises(RuntimeError, match="the barn is full"):
        orchard.attention(query, query, query, scale=0.1, backend="cpu")


# When it is not there


def _not_elf(folder: Path) -> Path:
    path = folder / "liborchard.so"
    path.write_text("no library")
    return path


@pytest.mark.parametrize("case", ["missing", "gone", "not a library", "another library"])
def test_unusable_library_is_a_reason(
    case: str, tmp_path: Path, registered: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with the library is a reason with a fix, and the next backend serves."""
    paths = {
        "missing": None,
        "gone": tmp_path / "liborchard.so",
        "not a library": _not_elf(tmp_path),
        "another library": Path(ctypes.util.find_library("c") or "libc.so.6"),
    }
    if case == "gone":
        paths[case].unlink()
    registered.setattr(location, "find_library", lambda: paths[case])
    registered.setattr(native, "_library", None)
    planner.reset()
    query = torch.randn(1, 2, 8, 16)
    plan = orchard.explain(query, query, query)
    assert plan.backend == "reference"
    (reason,) = plan.why_not("cpu")
    assert reason.code == "unavailable"
    assert "native library" in reason.sentence
    assert "C++20 compiler" in reason.fix
    assert "pip install" in reason.fix
    with pytest.raises(orchard.NotServedError, match="native library"):
        orchard.attention(query, query, query, backend="cpu")
    assert native._library is None


def test_wrong_abi_version_is_a_reason(
    library: native.Library, registered: pytest.MonkeyPatch
) -> None:
    """A library of another version is not called."""
    registered.setattr(native, "ABI_VERSION", 99)
    registered.setattr(native, "_library", None)
    query = torch.randn(1, 2, 8, 16)
    (reason,) = orchard.explain(query, query, query).why_not("cpu")
    assert reason.code == "unavailable"
    assert "ABI version 1" in reason.sentence
    assert "99" in reason.sentence


def test_failed_load_is_tried_again(
    library: native.Library, registered: pytest.MonkeyPatch
) -> None:
    """A library that is built later is found after a reset."""
    query = torch.randn(1, 2, 8, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(location, "find_library", lambda: None)
        patch.setattr(native, "_library", None)
        planner.reset()
        assert orchard.explain(query, query, query).backend == "reference"
    planner.reset()
    assert orchard.explain(query, query, query).backend == "cpu"


def test_probe_runs_a_decode_too(library: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row and several take different kernels, and both have to run right."""
    backend, lengths = CpuBackend(), []
    forward = backend.forward

    def counted(problem: Problem, kernel: str, tensors: Tensors) -> Saved:
        lengths.append(problem.query_length)
        return forward(problem, kernel, tensors)

    monkeypatch.setattr(backend, "forward", counted)
    assert backend.probe(backend.capabilities[0], CPU) is None
    assert lengths == [1, 16]


# What it does not serve


def reason_codes(**changes: Any) -> list[str]:
    tensors = operands()
    problem = describe(tensors, OPTIONS)._replace(**changes)
    backend = CpuBackend()
    (capability,) = backend.capabilities
    reasons = capability.reasons(problem) + backend.special_reasons(capability, problem)
    assert all(reason.sentence for reason in reasons)
    return [reason.code for reason in reasons]


def resized(**sizes: int) -> dict[str, Any]:
    """A problem's shapes and strides, with these sizes."""
    full = {"batch": 1, "heads": 2, "rows": 3, "keys": 4, "dim": 5, "value_dim": 5} | sizes
    batch, heads, rows, keys, dim, value_dim = full.values()
    shapes = {
        "query": (batch, heads, rows, dim),
        "key": (batch, heads, keys, dim),
        "value": (batch, heads, keys, value_dim),
    }
    return {f"{name}_shape": shape for name, shape in shapes.items()} | {
        f"{name}_strides": contiguous_strides(shape) for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param({"dtype": torch.float64}, ["dtype"], id="fp64"),
        pytest.param({"stage": "double_backward"}, ["stage"], id="create_graph"),
        pytest.param({"device": torch.device("cuda")}, ["device"], id="cuda"),
        pytest.param(resized(dim=512, value_dim=512), [], id="D 512"),
        pytest.param(resized(dim=513), ["head_dim"], id="D 513"),
        pytest.param(resized(value_dim=513), ["head_dim"], id="Dv 513"),
        pytest.param({"options": Options(0.3, 1e-40)}, ["softcap"], id="subnormal softcap"),
        pytest.param({"options": Options(0.3, 1e-30)}, [], id="small softcap"),
        pytest.param({"options": Options(1e2, 2e-38)}, ["softcap"], id="overflowing softcap"),
        pytest.param(resized(keys=2**31 - 1), [], id="below 2**31 keys"),
        pytest.param(resized(keys=2**31), ["size"], id="2**31 keys"),
        pytest.param(resized(rows=2**31), ["size"], id="2**31 rows"),
        pytest.param(resized(batch=2**16, heads=2**15), ["size"], id="2**31 heads in all"),
    ],
)
def test_reasons(changes: dict[str, Any], codes: list[str]) -> None:
    """What the kernels do not do is said before they are called."""
    assert reason_codes(**changes) == codes


@pytest.mark.mask
@pytest.mark.parametrize(
    ("dtype", "served"),
    [
        (torch.bool, True),
        (torch.float32, True),
        (torch.float16, True),
        (torch.bfloat16, True),
        (torch.float64, True),
        (torch.float8_e4m3fn, False),
        (torch.float8_e5m2, False),
    ],
)
def test_mask_dtypes(dtype: torch.dtype, served: bool) -> None:
    """Masks of every floating type that attention is computed in, and bool."""
    mask = torch.zeros(1, 1, 5, 7).to(dtype)
    spec = describe(operands()._replace(mask=mask), OPTIONS).mask
    assert reason_codes(mask=spec) == ([] if served else ["mask_dtype"])


# The library itself


def answer(
    library: native.Library, tensors: Tensors, change: dict[str, Any], absent: tuple[str, ...]
) -> tuple[int, Tensor]:
    """Call with a struct that was tampered with; the status, and what stands in the output."""
    template = forward_template(describe(tensors, OPTIONS))
    args = ForwardArgs.from_buffer_copy(template.words)
    out = torch.full(template.out.shape, 7.0)
    for name in ("query", "key", "value"):
        getattr(args, name).data = getattr(tensors, name).data_ptr()
    args.out = native.describe(out.dtype, out.shape, out.stride())
    args.out.data = out.data_ptr()
    args.threads = 1
    for name, value in change.items():
        setattr(args, name, value)
    for name in absent:
        getattr(args, name).data = None
    return library.forward(ctypes.addressof(args)), out


@pytest.mark.errors
@pytest.mark.parametrize(
    ("change", "absent", "statuses"),
    [
        pytest.param({"abi_version": 2}, (), (native.WRONG_ABI,), id="abi version"),
        pytest.param({"abi_version": 0}, (), (native.WRONG_ABI,), id="no abi version"),
        pytest.param(
            {"struct_size": ctypes.sizeof(ForwardArgs) - 8},
            (),
            (native.WRONG_ABI, native.INVALID_ARGUMENT),
            id="struct too short",
        ),
        pytest.param(
            {"struct_size": 0}, (), (native.WRONG_ABI, native.INVALID_ARGUMENT), id="no struct size"
        ),
        *(
            pytest.param({}, (name,), (native.INVALID_ARGUMENT,), id=f"{name} NULL")
            for name in ("query", "key", "value", "out")
        ),
        pytest.param(
            {"drop_threshold": 5}, (), (native.INVALID_ARGUMENT,), id="dropout without a seed"
        ),
        pytest.param(
            {"drop_threshold": 65536}, (), (native.INVALID_ARGUMENT,), id="threshold too large"
        ),
        pytest.param({"threads": -1}, (), (native.INVALID_ARGUMENT,), id="threads"),
    ],
)
def test_bad_struct(
    library: native.Library,
    change: dict[str, Any],
    absent: tuple[str, ...],
    statuses: tuple[int, ...],
) -> None:
    """A struct that contradicts itself is a status with words, and nothing is written."""
    tensors = operands()
    status, out = answer(library, tensors, change, absent)
    assert status in statuses
    with pytest.raises((orchard.NativeError, orchard.ArgumentValueError)) as caught:
        library.fail(status)
    assert len(str(caught.value).split()) > 2
    assert bool((out == 7.0).all())
    assert answer(library, tensors, {}, ())[0] == native.OK
    with pytest.raises(orchard.ArgumentValueError, match="without a message"):
        library.fail(native.INVALID_ARGUMENT)  # a success leaves no words


@pytest.mark.errors
def test_no_struct(library: native.Library) -> None:
    """NULL for the struct itself is an invalid argument."""
    assert library.forward(None) == native.INVALID_ARGUMENT
    assert library.backward(None) == native.INVALID_ARGUMENT


def test_struct_of_another_size_is_a_reason(
    library: native.Library, registered: pytest.MonkeyPatch
) -> None:
    """A header that grew shows in the probe, before any call is served."""
    sizeof = ctypes.sizeof
    registered.setattr(ctypes, "sizeof", lambda kind: sizeof(kind) + 8)
    query = torch.randn(1, 2, 8, 16)
    (reason,) = orchard.explain(query, query, query).why_not("cpu")
    assert reason.code == "unavailable"
    assert "probe failed" in reason.sentence


@pytest.mark.grad
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_output_element_is_written(
    library: native.Library, registered: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Outputs come from the allocator that poisons, and no NaN is left in any of them."""
    query, key, value = (
        torch.randn(2, 4, 33, 40, dtype=dtype).transpose(1, 2)[:, :, :4, :24].requires_grad_()
        for _ in range(3)
    )
    mask = torch.randn(2, 1, 4, 4, dtype=dtype, requires_grad=True)
    with poisoned():
        out, lse = orchard.attention(
            query, key, value, mask=mask, causal=True, return_lse=True, backend="cpu"
        )
        outputs, ones = (out, lse), (torch.ones_like(out), torch.ones_like(lse))
        grads = torch.autograd.grad(outputs, (query, key, value, mask), ones)
    for result in (out, lse, *grads):
        assert bool(result.isfinite().all())


@pytest.mark.grad
def test_lazy_tensors_are_resolved(library: native.Library, registered: pytest.MonkeyPatch) -> None:
    """A negation that torch has only noted, and zeros without memory, count as their values."""
    query = torch.randn(1, 2, 8, 16)
    out = orchard.attention(torch._neg_view(query), query, query, backend="cpu")
    assert torch.equal(out, orchard.attention(-query, query, query, backend="cpu"))
    leaf = query.clone().requires_grad_()
    for lazy in (torch._neg_view(query), torch._efficientzerotensor(query.shape)):
        out = orchard.attention(leaf, query, query, backend="cpu")
        (found,) = torch.autograd.grad(out, leaf, lazy, retain_graph=True)
        (expected,) = torch.autograd.grad(out, leaf, lazy.clone())
        assert torch.equal(found, expected)


# Instruction sets


ISA = """
    import sys
    import torch, orchard
    from orchard.backends.cpu import native
    backends = sys.modules["orchard.backends"]
    backends.REGISTRY = (
        "orchard.backends.cpu:CpuBackend", "orchard.backends.reference:ReferenceBackend"
    )
    x = torch.randn(1, 2, 8, 16)
    plan = orchard.explain(x, x, x)
    print(plan.backend, native.loaded().isa)
    print(*(reason.sentence + "; " + reason.fix for reason in plan.why_not("cpu")))
"""


def run_with(isa: str) -> list[str]:
    environ = {name: text for name, text in os.environ.items() if "ORCHARD_" not in name}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ISA)],
        env=environ | {"ORCHARD_CPU_ISA": isa},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_isa_of_a_fresh_process(library: native.Library) -> None:
    """ORCHARD_CPU_ISA chooses among what the machine runs; anything else is a reason."""
    available = library.isa_available
    assert run_with("portable")[0] == "cpu portable"
    other = next(name for name in settings.CPU_ISAS if name not in available)
    served, why = run_with(other)
    assert served.startswith("reference ")
    assert f"ORCHARD_CPU_ISA is '{other}'" in why
    assert ", ".join(available) in why


def test_reset_applies_the_isa(library: native.Library, registered: pytest.MonkeyPatch) -> None:
    """planner.reset() makes a changed ORCHARD_CPU_ISA count, and its absence too."""
    query = torch.randn(1, 2, 8, 16)
    for name in (*library.isa_available, None):
        if name is None:
            registered.delenv("ORCHARD_CPU_ISA")
        else:
            registered.setenv("ORCHARD_CPU_ISA", name)
        planner.reset()
        orchard.attention(query, query, query, backend="cpu")
        assert library.isa == (name or library.isa_available[0])


def test_isa_names(library: native.Library) -> None:
    """The variable takes every name that the library was compiled with; the best comes first."""
    assert set(library.isa_available) <= set(library.isa_compiled) <= set(settings.CPU_ISAS)
    assert "portable" in library.isa_compiled
    order = [name for name in settings.CPU_ISAS if name in library.isa_compiled]
    assert library.isa_compiled == order

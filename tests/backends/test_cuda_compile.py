"""The Triton kernels compiled for GPUs that need not be here."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.attention.problem import Band, Options, Tensors, Upstream, describe
from orchard.backends.cuda import CudaBackend
from orchard.backends.cuda.runtime import Gpu, Step, compiled, pointers_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton"),
]

MOST_DECODED = 32  # rows of each of two query heads
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}  # bytes that a program may have


class Recorder:
    """In the place of a GPU of some architecture: keeps what is launched."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture
        self.calls: list[tuple[Step, tuple[Tensor | None, ...]]] = []

    def gpu(self, device: torch.device) -> Gpu:
        return Gpu(self.architecture, 132, 228 * 1024)

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext()

    def launch(self, step: Step, *tensors: Tensor | None) -> None:
        self.calls.append((step, tensors))


def steps(
    architecture: int,
    dtype: torch.dtype,
    dim: int,
    options: Options,
    *,
    rows: int = 256,
    keys: int = 4096,
    mask: tuple[int, ...] | None = None,
    mask_dtype: torch.dtype | None = None,
    transposed: bool = False,
) -> Iterator[tuple[Step, tuple[Tensor | None, ...]]]:
    """What a forward and, unless it is a decode, a backward launch."""
    recorder = Recorder(architecture)
    backend = CudaBackend(recorder)
    shapes = ((1, 4, rows, dim), (1, 2, keys, dim), (1, 2, keys, dim))
    query, key, value = (torch.empty(shape, dtype=dtype) for shape in shapes)
    if transposed:
        query, key, value = (t.mT.contiguous().mT for t in (query, key, value))
    given = None if mask is None else torch.empty(mask, dtype=mask_dtype or dtype)
    tensors = Tensors(query, key, value, given, torch.zeros(2, dtype=torch.int32))
    gradient = {"grad": True, "mask_grad": mask is not None and mask_dtype is None}
    kernel = "decode" if rows <= MOST_DECODED else "tiled"
    saved = backend.forward(describe(tensors, options, **gradient), kernel, tensors)
    if kernel == "tiled":
        grad_out = torch.empty_like(saved.out)
        problem = describe(tensors, options, stage="backward", grad_out=grad_out, **gradient)
        backend.backward(problem, kernel, tensors, saved, Upstream(grad_out, None))
    yield from recorder.calls


CAUSAL = Options(0.1, band=Band(None, 0))
PROBLEMS = {
    "bf16, D 64, causal": (torch.bfloat16, 64, CAUSAL, {}),
    "fp16, D 128, transposed, window": (
        *(torch.float16, 128, Options(0.1, band=Band(-900, 7))),
        {"transposed": True},
    ),
    "bf16, D 256": (torch.bfloat16, 256, Options(0.1), {}),
    "bf16, D 64, dropout, softcap, mask": (
        *(torch.bfloat16, 64, Options(0.1, 5.0, None, 6000)),
        {"mask": (1, 1, 256, 4096)},
    ),
    "bf16, D 128, decode": (torch.bfloat16, 128, Options(0.1), {"rows": 1}),
    "fp32, D 64": (torch.float32, 64, Options(0.1), {}),
}
CHOSEN = {"mask": (1, 1, 256, 4096), "mask_dtype": torch.bool}
DEEP = {"fp32": (90, torch.float32, 128), "bf16": (80, torch.bfloat16, 256)}
# The default blocks, and those of Hopper where they differ most.
COMPILED = [(name, 80) for name in PROBLEMS if "mask" not in name] + [
    ("bf16, D 64, dropout, softcap, mask", 90),
    ("bf16, D 64, causal", 90),
]


@pytest.mark.parametrize(("name", "architecture"), COMPILED)
def test_kernels_compile(
    name: str, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To machine code, with no more shared memory than the GPU has, by the shipped blocks."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    dtype, dim, options, rest = PROBLEMS[name]
    seen = set()
    for step, tensors in steps(architecture, dtype, dim, options, **rest):
        kernel = compiled(step.specialisation, pointers_of(tensors, True), architecture)
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_MEMORY[architecture]
        if architecture == 80:  # the default blocks, which serve smaller GPUs too
            assert kernel.metadata.shared <= SHARED_MEMORY[86]
        seen.add(step.specialisation.kernel)
    assert len(seen) >= 2


def shallow_operands(kernel: Any) -> set[str]:
    """Operands of tensor cores that are less deep than a row of their layout: 4 runs of kWidth."""
    found = set()
    pattern = (
        r"tensor<(\d+)x(\d+)x\w+, #ttg.dot_op<{opIdx = (\d), parent = #mma\d*, kWidth = (\d+)}>"
    )
    seen = list(re.finditer(pattern, kernel.asm["ttgir"]))
    for match in seen:
        height, width, place, run = (int(number) for number in match.groups())
        if (width if place == 0 else height) < 4 * run:
            found.add(match[0])
    assert seen
    return found


@pytest.mark.parametrize("name", DEEP)
def test_products_are_as_deep_as_their_layouts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bool mask and dropout, where Triton's runs are longest and our blocks smallest."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    architecture, dtype, dim = DEEP[name]
    found = set()
    for step, tensors in steps(architecture, dtype, dim, Options(0.1, threshold=6000), **CHOSEN):
        variant, kind = step.specialisation.variant, step.specialisation.kernel
        if (dtype == torch.float32 and variant.precision == "ieee") or kind.endswith("rows"):
            continue
        kernel = compiled(step.specialisation, pointers_of(tensors, True), architecture)
        assert shallow_operands(kernel) == set(), (kind, variant)
        assert kernel.metadata.shared <= SHARED_MEMORY[architecture]
        found.add(kind)
    assert "general_backward.attention_grad_query" in found


@pytest.mark.parametrize("dim", [64, 128])
def test_a_kernel_that_begins_early_waits_before_it_reads(
    dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In machine code too nothing is read or written before the kernel before it has ended."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    first, (step, tensors) = steps(90, torch.bfloat16, dim, Options(0.1), rows=1)
    assert not first[0].specialisation.variant.early
    kernel = compiled(step.specialisation, pointers_of(tensors, True), 90)
    assert kernel.metadata.launch_pdl
    found = re.findall(r"\b(ACQBULK|LDG|STG|UBLKCP)", disassembled(kernel.asm["cubin"], tmp_path))
    assert {"ACQBULK", "LDG", "STG"} <= set(found)
    assert found[0] == "ACQBULK"


def test_decodes_in_wide_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program to a multiprocessor, no stack, and half the products where blocks are whole."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    products = {}
    for keys in (2**17, 2**17 - 1):
        step, tensors = next(steps(90, torch.bfloat16, 128, Options(0.1), rows=1, keys=keys))
        variant = step.specialisation.variant
        assert variant.block_keys == 128
        kernel = compiled(step.specialisation, pointers_of(tensors, True), 90)
        assert SHARED_MEMORY[90] // 2 < kernel.metadata.shared <= SHARED_MEMORY[90]
        assert stack(kernel.asm["cubin"], tmp_path) == 0
        products[variant.whole] = kernel.asm["ptx"].count("mma.sync")
    assert products[False] == 2 * products[True] > 0


@pytest.mark.parametrize("rows", [1, MOST_DECODED])
def test_decodes_with_masks_fit(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of as many keys as have wide blocks without a mask."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    keys = 2**17
    mask = (1, 4, rows, keys)
    step, tensors = next(
        steps(90, torch.float16, 128, Options(0.1), rows=rows, keys=keys, mask=mask)
    )
    kernel = compiled(step.specialisation, pointers_of(tensors, True), 90)
    assert kernel.metadata.shared <= SHARED_MEMORY[90]
    assert stack(kernel.asm["cubin"], tmp_path) == 0


FP32 = {
    "plain": (Options(0.1), {}),
    "causal, transposed": (CAUSAL, {"transposed": True}),
    "window": (Options(0.1, band=Band(-900, 7)), {}),
    "dropout, softcap, mask": (Options(0.1, 5.0, None, 6000), {"mask": (1, 1, 256, 4096)}),
}


@pytest.mark.parametrize("dim", [33, 64, 128])
@pytest.mark.parametrize("name", FP32)
def test_fp32_on_hopper(
    name: str, dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No products by wgmma: ptxas 12.8 makes some of those of split operands read descriptors that
    nobody wrote."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options, rest = FP32[name]
    for step, tensors in steps(90, torch.float32, dim, options, **rest):
        kernel = compiled(step.specialisation, pointers_of(tensors, True), 90)
        assert "wgmma" not in kernel.asm["ptx"], step.specialisation.kernel
        assert kernel.metadata.shared <= SHARED_MEMORY[90]


def disassembled(machine_code: bytes, folder: Path) -> str:
    return told("nvdisasm", "-c", machine_code, folder)


def stack(machine_code: bytes, folder: Path) -> int:
    """Bytes of it that a thread has."""
    found = re.search(r"STACK:(\d+)", told("cuobjdump", "-res-usage", machine_code, folder))
    assert found is not None
    return int(found[1])


def told(tool: str, option: str, machine_code: bytes, folder: Path) -> str:
    """What one of the tools that come with Triton says of a kernel."""
    path = folder / "kernel.cubin"
    path.write_bytes(machine_code)
    tools = Path(importlib.import_module("triton").__file__ or "").parent / "backends/nvidia/bin"
    found = subprocess.run([tools / tool, option, path], capture_output=True, text=True, check=True)
    return found.stdout + found.stderr


@pytest.mark.parametrize(("transposed", "aligned"), [(False, True), (True, True), (False, False)])
def test_loads_are_as_wide_as_they_may_be(
    transposed: bool, aligned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows or columns that are contiguous are copied 16 bytes at a time, whichever it is."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    step, tensors = next(steps(80, torch.bfloat16, 128, Options(0.1), transposed=transposed))
    text = compiled(step.specialisation, pointers_of(tensors, aligned), 80).asm["ptx"]
    assert ("cp.async.cg.shared.global" in text) == aligned

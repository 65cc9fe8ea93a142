"""The Hopper kernels compile for sm_90 without a GPU: on tensor cores, and kept in registers."""

import importlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from orchard.attention.problem import Band, MaskSpec, Options, Problem
from orchard.backends.cuda import hopper_fp32_plan, hopper_plan

triton = pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip(
    "triton.experimental.gluon.language.nvidia.hopper", reason="this triton has no Gluon for Hopper"
)
nvidia = importlib.import_module("triton.backends.nvidia.driver")
hopper_source = importlib.import_module("orchard.backends.cuda.hopper_source")  # needs both

SM_90 = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
PROCESSORS = 132
SHARED_BYTES = 227 * 1024  # that a block may have
CAUSAL, WINDOW = Band(None, 0), Band(-100, 20)


def problem(
    head_dim: int,
    *,
    band: Band | None = None,
    keys: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    mask: torch.dtype | None = None,
    dropout: bool = False,
    softcap: float = 0.0,
    stage: str = "forward",
    deterministic: bool = False,
) -> Problem:
    """Large enough for the configurations of long sequences."""
    rows = (2, 64, 4096, head_dim)
    shape = (2, 64, keys, head_dim)
    strides = (64 * 4096 * head_dim, 4096 * head_dim, head_dim, 1)
    key_strides = (64 * keys * head_dim, keys * head_dim, head_dim, 1)
    spec = None
    if mask is not None:
        spec = MaskSpec(mask, (2, 1, 4096, keys), (4096 * keys, 4096 * keys, keys, 1))
    return Problem(
        stage,
        torch.device("cuda", 0),
        dtype,
        *(rows, shape, shape),
        *(strides, key_strides, key_strides),
        None if stage == "forward" else strides,
        spec,
        Options(0.125, softcap, band, 6554 if dropout else 0),
        lse=True,
        grad=True,
        mask_grad=False,
        aligned=True,
        deterministic=deterministic,
    )


def forward(
    head_dim: int, config: hopper_plan.ForwardConfig | None = None, **options: object
) -> hopper_source.Source:
    given = problem(head_dim, **options)
    assert hopper_plan.reasons(given) == ()
    return hopper_source.forward_source(hopper_plan.specialise_forward(given, PROCESSORS, config))


def fp32(head_dim: int, **options: object) -> hopper_source.Source:
    given = problem(head_dim, dtype=torch.float32, **options)
    assert hopper_fp32_plan.reasons(given) == ()
    return hopper_source.fp32_source(hopper_fp32_plan.specialise(given, PROCESSORS))


def backward(head_dim: int, **options: object) -> hopper_plan.BackwardSpecialisation:
    given = problem(head_dim, stage="backward", **options)
    assert hopper_plan.reasons(given) == ()
    return hopper_plan.specialise_backward(given, PROCESSORS)


def keys(head_dim: int, **options: object) -> hopper_source.Source:
    return hopper_source.keys_source(backward(head_dim, **options))


def rows(head_dim: int, **options: object) -> hopper_source.Source:
    return hopper_source.rows_source(backward(head_dim, deterministic=True, **options))


# Source and bytes that it may spill. The forward spills nothing, in fp32 with D 128 the addresses
# of parts. A block of keys keeps its sums and products in 192 to 224 of 240 registers: there some
# addresses are spilled, and with Philox and a mask the statistics of rows and their addresses, too.
KERNELS = {
    "forward, D 128, causal": (lambda: forward(128, band=CAUSAL, dtype=torch.float16), 0),
    "forward, D 64, window, tail": (lambda: forward(64, band=WINDOW, keys=4000), 0),
    "forward, D 64, causal, four consumers": (
        lambda: forward(64, hopper_plan._FOUR, band=CAUSAL),
        0,
    ),
    "forward, D 128, dropout": (lambda: forward(128, dropout=True), 0),
    "forward, D 64, additive mask, softcap": (
        lambda: forward(64, mask=torch.bfloat16, softcap=20.0),
        0,
    ),
    "forward, D 128, additive mask": (lambda: forward(128, mask=torch.bfloat16), 0),
    "forward, D 64, additive mask": (lambda: forward(64, mask=torch.bfloat16), 0),
    "forward, D 64, additive mask, causal, fp16": (
        lambda: forward(64, mask=torch.float16, dtype=torch.float16, band=CAUSAL),
        0,
    ),
    "fp32, D 64": (lambda: fp32(64), 0),
    "fp32, D 64, window, tail, padded": (lambda: fp32(40, band=WINDOW, keys=4000), 0),
    "fp32, D 64, dropout": (lambda: fp32(64, dropout=True), 0),
    "fp32, D 128, causal": (lambda: fp32(128, band=CAUSAL), 800),
    "fp32, D 128, bool mask": (lambda: fp32(128, mask=torch.bool), 800),
    "backward, D 128, fused": (lambda: keys(128), 64),
    "backward, D 64, fused, causal": (lambda: keys(64, band=CAUSAL), 128),
    "backward, D 128, fused, dropout, bool mask": (
        lambda: keys(128, dropout=True, mask=torch.bool),
        544,
    ),
    "backward, D 64, fused, additive mask": (lambda: keys(64, mask=torch.bfloat16), 256),
    "backward, D 128, split": (lambda: keys(128, deterministic=True), 64),
    "backward, D 64, split, bool mask": (lambda: keys(64, deterministic=True, mask=torch.bool), 0),
    "backward, D 64, split, window, softcap": (
        lambda: keys(64, deterministic=True, band=WINDOW, keys=4000, softcap=20.0),
        0,
    ),
    "backward, D 64, rows": (lambda: rows(64), 0),
    "backward, D 64, rows, dropout, causal": (lambda: rows(64, dropout=True, band=CAUSAL), 0),
    "backward, D 128, rows": (lambda: rows(128), 0),
    "backward, D 128, rows, causal": (lambda: rows(128, band=CAUSAL), 16),
    "backward, D 128, rows, dropout": (lambda: rows(128, dropout=True), 256),
    "backward, D 128, rows, bool mask": (lambda: rows(128, mask=torch.bool), 128),
    "backward, D 64, rows, window, tail, softcap": (
        lambda: rows(64, band=WINDOW, keys=4000, softcap=20.0),
        0,
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_for_hopper(name: str, tmp_path: Path) -> None:
    source, spilled_at_most = KERNELS[name]
    if "fused" in name and (reason := hopper_source.unavailable()):
        pytest.skip(reason)
    compiled = source().compile(SM_90)
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert ("cp.async.bulk.tensor" in ptx) == (not name.startswith("fp32"))
    assert ("cp.reduce.async.bulk.tensor" in ptx) == ("backward" in name and "fused" in name)
    assert compiled.metadata.shared <= SHARED_BYTES
    report = assembled(ptx, tmp_path)
    assert "wgmma.mma_async instructions are serialized" not in report
    spilled = int(re.search(r"(\d+) bytes spill stores", report)[1])
    assert spilled <= spilled_at_most


def test_the_kernels_before_and_after_a_backward_load_wide() -> None:
    special = backward(128)
    for source in (hopper_source.statistics_source, hopper_source.sums_source):
        assert "ld.global.v4" in source(special).compile(SM_90).asm["ptx"]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_kernel_that_begins_early_waits_itself(head_dim: int, deterministic: bool) -> None:
    """And the one before it lets it begin, once this one has waited for what it needs itself."""
    special = backward(head_dim, deterministic=deterministic)
    last = hopper_source.rows_source if deterministic else hopper_source.sums_source
    sources = hopper_source.statistics_source, hopper_source.keys_source, last
    found = []
    for source in sources:
        compiled = source(special).compile(SM_90)
        orders = re.findall(r"griddepcontrol\.(wait|launch_dependents);", compiled.asm["ptx"])
        found.append((compiled.metadata.launch_pdl, orders))
    waits, lets = "wait", "launch_dependents"
    if deterministic:  # dQ reads what the statistics left, so dK and dV begin after these
        assert found == [(False, []), (False, [lets]), (True, [waits])]
    else:
        assert found == [(False, [lets]), (True, [waits, lets]), (True, [waits])]


def test_a_backward_with_an_added_mask_begins_after_what_is_before_it() -> None:
    """That is no kernel of these, and in a graph perhaps none at all."""
    assert not keys(64, mask=torch.bfloat16).early
    assert keys(64, mask=torch.bool).early


@pytest.mark.parametrize(("head_dim", "wide"), [(64, True), (36, True), (128, True), (33, False)])
def test_fp32_is_loaded_wide_where_rows_begin_on_16_bytes(head_dim: int, wide: bool) -> None:
    ptx = fp32(head_dim).compile(SM_90).asm["ptx"]
    assert ("ld.global.v4" in ptx) == wide


def parameters(constants: dict, types: dict, tiles: list | None) -> list[str]:
    """C types of what a launcher of Triton's passes to a kernel."""
    source = nvidia.make_launcher(constants, types, tiles)
    declared = re.search(r"static void _launch\((.*)\) {", source)[1]
    return [each.rsplit(" ", 1)[0] for each in declared.split(", ")]


@pytest.mark.parametrize(("source", "descriptors"), [(forward, 4), (fp32, 0), (keys, 9), (rows, 5)])
def test_a_launch_passes_what_tritons_own_would(
    source: Callable[..., hopper_source.Source], descriptors: int
) -> None:
    """With descriptors that were made before, and without the constants."""
    made = source(128)
    compiled = made.compile(SM_90)
    tiles = compiled.metadata.tensordesc_meta or []
    flat = dict(enumerate(hopper_source.flat_types(made.types, tiles)))
    own = parameters(compiled.src.constants, compiled.src.signature, tiles)
    assert parameters({}, flat, None) == own
    assert own.count("CUtensorMap") == len(tiles) == descriptors


def assembled(ptx: str, folder: Path) -> str:
    """What the assembler says about a kernel."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    finished = subprocess.run(
        [assembler, "-v", "--gpu-name=sm_90a", source, "-o", folder / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stderr

"""The Hopper kernels as Triton compiles them: types of arguments, constants, loaded kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton._C.libtriton import gluon_ir
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from orchard.backends.cuda import hopper_fp32_plan
from orchard.backends.cuda.hopper_around import grad_query_kernel, statistics_kernel
from orchard.backends.cuda.hopper_backward import backward_kernel, rows_kernel
from orchard.backends.cuda.hopper_forward import forward_kernel
from orchard.backends.cuda.hopper_fp32 import fp32_kernel
from orchard.backends.cuda.hopper_plan import (
    KEY_BLOCK,
    KNOWN_ADDRESSES,
    PLAIN_ROWS,
    SPAN_ELEMENTS,
    WARPGROUP_ROWS,
    BackwardSpecialisation,
    Described,
    ForwardSpecialisation,
    Geometry,
    TermsSpecialisation,
)
from orchard.backends.cuda.runtime import KernelError
from orchard.dispatch.known import Known

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.bool: "i8"}
_ELEMENTS = {"fp16": gl.float16, "bf16": gl.bfloat16, "fp32": gl.float32}
_MASKS = {"none": 0, "bool": 1, "additive": 2}
_WIDE = 16  # bytes of the widest load, and elements that its strides are multiples of
_SHAPE = dict.fromkeys(
    ("rows", "key_count", "heads", "group", "planes", "cohort", "low", "high"), "i32"
)


def unavailable() -> str | None:
    """Why this Triton cannot build or launch the kernels, or None."""
    if not hasattr(gluon_ir.GluonOpBuilder, "create_async_tma_reduce"):
        return f"triton {triton.__version__} does not expose TMA reductions"
    if not hasattr(nvidia, "make_tensordesc_arg"):
        return f"triton {triton.__version__} does not expose how it makes descriptors"
    return None


class Source(NamedTuple):
    """One specialisation of a kernel: its function, the types of its arguments, its constants."""

    function: Any
    types: Mapping[str, str]
    constants: Mapping[str, int]
    divisors: Mapping[str, int] = {}  # of pointers and integers, for wide loads
    early: bool = False  # it may begin before the kernel in front has ended, and waits itself

    def compile(self, target: Any = None) -> Any:
        """The kernel for `target`, by default that of the current device."""
        names = self.function.arg_names
        signature = {name: self.types.get(name, "constexpr") for name in names}
        constants = {(names.index(name),): value for name, value in self.constants.items()}
        attributes = {
            (names.index(name),): [["tt.divisibility", divisor]]
            for name, divisor in self.divisors.items()
        }
        kind = GluonASTSource if self.function.is_gluon() else triton.compiler.ASTSource
        source = kind(self.function, signature, constants, attributes)
        options = {"num_warps": 4, "launch_pdl": self.early}
        return triton.compile(source, target=target, options=options)


_compiling = threading.Lock()


class Descriptor(NamedTuple):
    """The part of Triton's TensorDescriptor that is read when a descriptor is made of it."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"

    @property
    def base(self) -> Descriptor:
        return self

    def data_ptr(self) -> int:
        return self.address


class Kernel:
    """A compiled specialisation, loaded on the device that was current."""

    def __init__(self, source: Source) -> None:
        with _compiling:
            compiled = source.compile()
            compiled[1, 1, 1]  # loads it
            launcher = flat_launcher(source.types, compiled.metadata)
        metadata = compiled.metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise KernelError(f"{metadata.name} wants scratch memory, which it is not given")
        self._tiles = metadata.tensordesc_meta
        self._launch = launcher.launch
        self._launched_as = (
            compiled.function,
            *(launcher.launch_cooperative_grid, launcher.launch_pdl),
            *(None, None),  # scratch memory
            compiled.packed_metadata,
            *(None, None, None),  # launch metadata and hooks, for profilers of Triton
        )
        self._stream = triton.runtime.driver.active.get_current_stream

    def describe(self, place: int, geometry: Geometry) -> Described:
        """What the descriptor in this place, counted among the descriptors, is launched with."""
        tile = self._tiles[place]
        return Known(
            lambda address: tuple(nvidia.make_tensordesc_arg(Descriptor(address, *geometry), tile)),
            KNOWN_ADDRESSES,
        )

    def __call__(self, programs: int, device: int, *arguments: object) -> None:
        """Enqueue on the current stream; the arguments are those of `Source.types`, in order."""
        self._launch(programs, 1, 1, self._stream(device), *self._launched_as, *arguments)

    def bind(self, *arguments: object) -> tuple[object, ...]:
        """Arguments as `launch` takes them, time and again."""
        return (*self._launched_as, *arguments)

    def launch(self, programs: int, device: int, bound: tuple[object, ...]) -> None:
        """The same with arguments that are bound."""
        self._launch(programs, 1, 1, self._stream(device), *bound)


def flat_launcher(types: Mapping[str, str], metadata: Any) -> Any:
    """A launcher that is given descriptors as they are. Triton's own makes them anew at every
    launch, in Python, which takes longer than the launch."""
    signature = flat_types(types, metadata.tensordesc_meta or ())
    source = SimpleNamespace(signature=dict(enumerate(signature)), constants={})
    return triton.runtime.driver.active.launcher_cls(
        source, metadata._replace(tensordesc_meta=None)
    )


def flat_types(types: Mapping[str, str], tiles: Iterable[Mapping[str, Any]]) -> list[str]:
    """Types of a kernel's parameters: those of a descriptor are itself, its shape and strides."""
    ranks = (len(tile["block_size"]) for tile in tiles)
    found: list[str] = []
    for kind in types.values():
        if kind.startswith("tensordesc"):
            rank = next(ranks)
            found += "nvTmaDesc", *("i32",) * rank, *("i64",) * rank
        else:
            found.append(kind)
    return found


def tile_type(dtype: str, block: Sequence[int]) -> str:
    """Triton's name of the type of a descriptor that moves such blocks."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _ELEMENTS[dtype])
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}],{layout!r}>"


def _terms(terms: TermsSpecialisation) -> tuple[dict[str, str], dict[str, int], dict[str, int]]:
    """Types, divisors and constants of what shapes a score; what is not there has a dummy type."""
    mask = "*fp32" if terms.mask_dtype is None else f"*{_TYPES[terms.mask_dtype]}"
    types = {"factor": "fp32", "cap": "fp32", "mask": mask}
    types |= dict.fromkeys(("mask_batch", "mask_head", "mask_row"), "i64")
    types |= {"seed": "*i32", "threshold": "i32", "keep_scale": "fp32"}
    names = ("mask", "mask_batch", "mask_head", "mask_row")
    constants = {
        "SOFTCAP": terms.softcap,
        "MASK": _MASKS[terms.mask],
        "MASK_KEYS": terms.mask_keys,
        "DROPOUT": terms.dropout,
    }
    return types, dict.fromkeys(names, _WIDE) if terms.wide_mask else {}, constants


def forward_source(special: ForwardSpecialisation) -> Source:
    config = special.config
    rows = _tile(special.dtype, WARPGROUP_ROWS, special.head_tile)
    keys = _tile(special.dtype, config.keys, special.head_tile)
    types = {"query": rows, "key": keys, "value": keys, "out": rows}
    types |= {"lse": "*fp32", "counter": "*i32"}
    terms, divisors, flags = _terms(special.terms)
    constants = {
        "CONSUMERS": config.consumers,
        "TILE": config.keys,
        "STAGES": config.stages,
        "REGISTERS": config.registers,
        "PIPELINED": config.pipelined,
        "DYNAMIC": special.dynamic,
        "LOW": special.low,
        "HIGH": special.high,
        "TAIL": special.tail,
        "LSE": special.lse,
        "ACCUMULATED": config.accumulated,
        "TREE": config.tree,
    }
    types |= _SHAPE | terms
    if special.mask_tiles:
        types["mask"] = _tile(special.dtype, WARPGROUP_ROWS, config.keys)
        divisors.pop("mask", None)
    constants |= flags | {"MASK_TILES": special.mask_tiles}
    return Source(forward_kernel, types, constants, divisors | {"lse": _WIDE})


def fp32_source(special: hopper_fp32_plan.Specialisation) -> Source:
    config = special.config
    operands = ("query", "key", "value", "out")
    strides = [f"{name}_{axis}" for name in operands for axis in ("batch", "head", "row")]
    types = {**dict.fromkeys((*operands, "lse"), "*fp32"), "counter": "*i32"}
    types |= dict.fromkeys(strides, "i64") | dict.fromkeys(("head_dim", "value_dim"), "i32")
    terms, divisors, flags = _terms(special.terms)
    divisors |= dict.fromkeys(("out", "lse"), _WIDE)
    if special.wide:
        divisors |= dict.fromkeys(operands, _WIDE)
        divisors |= dict.fromkeys((*strides, "head_dim", "value_dim"), _WIDE // 4)
    constants = {
        "WIDTHS": special.widths,
        "PADDED": special.padded,
        "TILE": config.keys,
        "STAGES": config.stages,
        "REGISTERS": config.registers,
        "DYNAMIC": special.dynamic,
        "LOW": special.low,
        "HIGH": special.high,
        "TAIL": special.tail,
        "LSE": special.lse,
    }
    return Source(fp32_kernel, types | _SHAPE | terms, constants | flags, divisors)


def statistics_source(special: BackwardSpecialisation) -> Source:
    pointer = f"*{_TYPES[special.dtype]}"
    strides = ("out_batch", "out_head", "out_row", "grad_batch", "grad_head", "grad_row")
    lse_strides = ("lse_batch", "lse_head", "lse_row")
    grad_lse_strides = ("grad_lse_batch", "grad_lse_head", "grad_lse_row")
    types = {"out": pointer, "grad_out": pointer}
    types |= dict.fromkeys(("lse", "grad_lse", "scaled_lse", "delta", "grad_query_sums"), "*fp32")
    types |= {"further": "*fp32"}
    types |= dict.fromkeys(("rows", "padded_rows", "heads", "head_dim", "value_dim"), "i32")
    types |= {"further_count": "i64"}
    types |= dict.fromkeys((*strides, *lse_strides, *grad_lse_strides), "i64")
    pointers = ("out", "grad_out", "scaled_lse", "delta", "grad_query_sums")
    divisors = dict.fromkeys(pointers, _WIDE)
    divisors |= dict.fromkeys((*strides, "head_dim", "value_dim"), 8)
    constants = {
        "HEAD_TILE": special.head_tile,
        "BLOCK": PLAIN_ROWS,
        "GRAD_LSE": special.grad_lse,
        "SUMS": special.fused,
        "EARLY": special.fused,
    }
    return Source(statistics_kernel, types, constants, divisors)


def keys_source(special: BackwardSpecialisation) -> Source:
    """dK and dV, and where the backward is fused the sums of dQ."""
    config = special.config
    rows = _tile(special.dtype, config.rows, special.head_tile)
    block = _tile(special.dtype, KEY_BLOCK, special.head_tile)
    statistics = tile_type("fp32", (1, config.rows))
    types = {"query": rows, "key": block, "value": block, "grad_out": rows}
    types |= {"lse": statistics, "delta": statistics, "grad_key": block, "grad_value": block}
    types |= {"sums": tile_type("fp32", (1, WARPGROUP_ROWS, 64))}
    types |= {"spare": "*fp32", "padded_rows": "i32"}
    types |= {"shared_sums": "*fp32", **dict.fromkeys(("unshared", "parts", "fewer"), "i32")}
    types |= {"sums_start": "*fp32"}
    steps = ("grad_batch", "grad_head", "grad_row")
    types |= {"grad_query": f"*{_TYPES[special.dtype]}", **dict.fromkeys(steps, "i64")}
    types |= {"finished": "*i32", "taken": "*i32", "lag": "i32", "head_dim": "i32"}
    terms, divisors, flags = _terms(special.terms)
    types |= _SHAPE | terms | {"grad_scale": "fp32"}
    constants = {
        "ROW_TILE": config.rows,
        "STAGES": config.stages,
        "REGISTERS": config.registers,
        "LOW": special.low,
        "HIGH": special.high,
        "TAIL": special.tail,
        "EMPTY_ROWS": special.empty_rows,
        "FUSED": special.fused,
        "SHARED": special.shared,
        "GROUPED": special.grouped,
        "ROTATED": special.rotated,
    }
    divisors |= {"sums_start": _WIDE, "grad_query": _WIDE}
    divisors |= dict.fromkeys((*steps, "head_dim"), 8)
    if special.mask_tiles:
        types["mask"] = _tile(special.dtype, WARPGROUP_ROWS, KEY_BLOCK)
        divisors.pop("mask", None)
    constants |= flags | {"MASK_TILES": special.mask_tiles}
    # With an added mask what runs before is no kernel of ours, or none at all.
    early = special.fused and special.terms.mask != "additive"
    return Source(backward_kernel, types, constants, divisors, early)


def rows_source(special: BackwardSpecialisation) -> Source:
    """dQ apart, for a backward that is not fused."""
    rows = _tile(special.dtype, WARPGROUP_ROWS, special.head_tile)
    block = _tile(special.dtype, KEY_BLOCK, special.head_tile)
    types = {"query": rows, "key": block, "value": block, "grad_out": rows}
    types |= {"grad_query": rows, "lse": "*fp32", "spare": "*fp32", "delta": "*fp32"}
    types |= {"counter": "*i32"}
    terms, divisors, flags = _terms(special.terms)
    types |= _SHAPE | terms | {"padded_rows": "i32", "grad_scale": "fp32"}
    constants = {
        "CONSUMERS": special.rows.consumers,
        "STAGES": special.rows.stages,
        "REGISTERS": special.rows.registers,
        "DYNAMIC": special.dynamic,
        "LOW": special.low,
        "HIGH": special.high,
        "TAIL": special.tail,
    }
    divisors |= dict.fromkeys(("lse", "spare", "delta"), _WIDE)
    return Source(rows_kernel, types, constants | flags, divisors, early=True)


def sums_source(special: BackwardSpecialisation) -> Source:
    """dQ from its fp32 sums, after a fused backward."""
    types = {"sums": "*fp32", "taken": "*i32", "grad_query": f"*{_TYPES[special.dtype]}"}
    types |= {"rows": "i32", "heads": "i32", "head_dim": "i32", "scale": "fp32"}
    strides = ("grad_batch", "grad_head", "grad_row")
    types |= dict.fromkeys(strides, "i64")
    divisors = {"sums": _WIDE, "grad_query": _WIDE, **dict.fromkeys((*strides, "head_dim"), 8)}
    constants = {
        "HEAD_TILE": special.head_tile,
        "BLOCK": PLAIN_ROWS,
        "SPAN": SPAN_ELEMENTS // special.head_tile,
        "EARLY": True,
    }
    return Source(grad_query_kernel, types, constants, divisors, early=True)


def _tile(dtype: torch.dtype, rows: int, head_tile: int) -> str:
    return tile_type(_TYPES[dtype], (1, 1, rows, head_tile))

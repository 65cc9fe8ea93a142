"""How a tensor is kept in fewer bits: formats, groups, scales, packing, and the way back.

The formulas are in docs/quantization.md. Every backend's kernel is held to what is written here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from orchard.attention.api import Layout
from orchard.attention.problem import is_traced
from orchard.backends.cpu import quantized
from orchard.backends.cpu.native import Library
from orchard.errors import ArgumentTypeError, ArgumentValueError

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "fp8"]
Granularity = Literal["tensor", "block", "row", "hybrid"]
Strategy = Literal["performance_first", "accuracy_first", "balanced"]
Group = tuple[int, int, int]  # batch entries, heads and rows that share a scale

PASS_THROUGH: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
LARGEST_LEVEL = {"int8": 127, "int4": 7, "fp8": 448}
PRECISIONS = (*PASS_THROUGH, *LARGEST_LEVEL)
GRANULARITIES = ("tensor", "block", "row", "hybrid")
LAYOUTS = ("bhsd", "bshd")
STRATEGIES = ("performance_first", "accuracy_first", "balanced")
SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32: its reciprocal is finite
LARGEST_MAGNITUDE = 2.0**126  # above it a range, or a level times its scale, may overflow fp32
_CHANNELS_IN_ORDER = 64  # that torch and the native library add up in the same order,
_ROWS_IN_ORDER = 2**16  # of so many rows at most
PARTS = ("data", "scales", "zero_points", "mean")
_STORED = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn, **PASS_THROUGH}


def check_choice(name: str, given: object, allowed: Sequence[str]) -> None:
    if given not in allowed:
        names = ", ".join(repr(choice) for choice in allowed)
        raise ArgumentValueError(f"{name} is {given!r}; it must be one of {names}")


def check_precision(name: str, given: object) -> None:
    check_choice(name, given, PRECISIONS)


def check_flag(name: str, given: object) -> None:
    if not isinstance(given, bool):
        raise ArgumentTypeError(f"{name} is {given!r}; it must be True or False")


def check_size(name: str, given: object) -> None:
    if not isinstance(given, int) or isinstance(given, bool):
        raise ArgumentTypeError(f"{name} is {given!r}; it must be an integer")
    if not 1 <= given < 2**63:
        raise ArgumentValueError(f"{name} is {given}; it must be at least 1 and below 2^63")


@dataclass(frozen=True)
class Format:
    """How one operand is to be stored. A pass-through precision has no scales to arrange."""

    precision: Precision = "int8"
    granularity: Granularity = "block"
    block_size: int = 16  # rows of a block
    head_block_size: int = 1  # heads of a block
    symmetric: bool = True
    smooth: bool = False
    adaptive_blocks: bool = False
    strategy: Strategy = "balanced"  # of hybrid

    def __post_init__(self) -> None:
        check_precision("precision", self.precision)
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("strategy", self.strategy, STRATEGIES)
        check_size("block_size", self.block_size)
        check_size("head_block_size", self.head_block_size)
        for name in ("symmetric", "smooth", "adaptive_blocks"):
            check_flag(name, getattr(self, name))
        if self.precision == "fp8" and not self.symmetric:
            raise ArgumentValueError("symmetric is False; it must be True for fp8, a signed format")

    @property
    def quantizes(self) -> bool:
        """Whether there are scales; fp32, fp16 and bf16 pass through."""
        return self.precision not in PASS_THROUGH

    def rows_in_block(self, length: int) -> int:
        """Rows of a block in a sequence of `length`; adaptive blocks shrink for short ones."""
        if not self.adaptive_blocks:
            return self.block_size
        fitting = next(size for limit, size in _ADAPTIVE if limit is None or length <= limit)
        if self.precision == "int4":
            fitting = max(fitting // 2, 32)
        return min(self.block_size, fitting)

    def group(self, shape: Sequence[int]) -> Group:
        """What shares a scale in a [B, H, S, D] tensor."""
        if self.granularity == "tensor":
            return max(shape[0], 1), max(shape[1], 1), max(shape[2], 1)
        if self.granularity == "row":
            return 1, 1, 1
        return 1, self.head_block_size, self.rows_in_block(shape[2])


# (longest sequence, rows of its adaptive block)
_ADAPTIVE = ((512, 64), (2048, 128), (None, 256))


class Deviation(NamedTuple):
    """How far a tensor is from what it stands for."""

    cosine: float
    relative_l2: float
    largest: float


def deviation(actual: Tensor, exact: Tensor) -> Deviation:
    """Measured in fp64; of nothing but zeros, equal tensors have cosine 1."""
    a, b = actual.detach().double().flatten(), exact.detach().double().flatten()
    off = a - b
    norm_a, norm_b = float(a.norm()), float(b.norm())
    same = 1.0 if norm_a == norm_b else 0.0
    cosine = float(a @ b) / (norm_a * norm_b) if norm_a and norm_b else same
    far = float(off.norm())
    relative = far / norm_b if norm_b else (torch.inf if far else 0.0)
    return Deviation(cosine, relative, float(off.abs().max()) if off.numel() else 0.0)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor in a format: value = (level - zero point) * scale + mean, in fp32."""

    data: Tensor  # [B, H, S, D]; int4 holds two to a byte, [B, H, S, (D + 1) // 2]
    scales: Tensor | None  # fp32 [groups of batch entries, of heads, of rows]
    zero_points: Tensor | None  # int8, as scales; None is symmetric
    mean: Tensor | None  # fp32 [B, H, 1, D], taken out of a smoothed key
    format: Format
    group: Group
    head_dim: int
    dtype: torch.dtype  # of the tensor it was made from
    layout: Layout = "bhsd"
    ndim: int = 4
    reasoning: str = ""  # why hybrid chose this granularity
    trusted: InitVar[bool] = False  # made of parts that were checked, or computed, together

    def __post_init__(self, trusted: bool) -> None:
        """A tensor that is put together wrongly, or comes from a wrong file, is refused."""
        if not trusted:
            self._check_facts()
            self._check_shapes()
            self._check_values()

    def _check_facts(self) -> None:
        if not isinstance(self.format, Format):
            raise ArgumentTypeError(f"format is {self.format!r}; it must be a Format")
        if not isinstance(self.group, tuple) or len(self.group) != 3:
            raise ArgumentValueError(f"group is {self.group!r}; it must be three sizes")
        for size in self.group:
            check_size("group", size)
        if not isinstance(self.head_dim, int) or self.head_dim < 0:
            raise ArgumentValueError(f"head_dim is {self.head_dim!r}; it must be a size")
        if self.dtype not in PASS_THROUGH.values():
            raise ArgumentTypeError(
                f"dtype is {self.dtype!r}; it must be torch.float32, torch.float16 or "
                "torch.bfloat16"
            )
        check_choice("layout", self.layout, LAYOUTS)
        if self.ndim not in (2, 3, 4):
            raise ArgumentValueError(f"ndim is {self.ndim!r}; it must be 2, 3 or 4")

    def _check_shapes(self) -> None:
        data, form = self.data, self.format
        if not isinstance(data, Tensor) or data.ndim != 4:
            found = f"of shape {list(data.shape)}" if isinstance(data, Tensor) else repr(data)
            raise ArgumentValueError(f"data is {found}; it must be a tensor with 4 axes")
        sizes = data.shape[:3]
        if any(size != 1 for size in sizes[: 4 - self.ndim]):
            raise ArgumentValueError(
                f"ndim is {self.ndim}; it must be 4 for data of {sizes[0]} batch entries and "
                f"{sizes[1]} heads"
            )
        packed = (self.head_dim + 1) // 2 if form.precision == "int4" else self.head_dim
        groups = tuple(-(-n // per) for n, per in zip(sizes, self.group, strict=True))
        zeros = form.quantizes and not form.symmetric
        mean = (*sizes[:2], 1, self.head_dim)
        self._need("data", (*sizes, packed), _STORED[form.precision])
        self._need("scales", groups if form.quantizes else None, torch.float32)
        self._need("zero_points", groups if zeros else None, torch.int8)
        self._need("mean", mean if form.smooth else None, torch.float32)

    def _need(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype) -> None:
        """That a part is there as it should be; no shape says that there must be none."""
        part: Tensor | None = getattr(self, name)
        if shape is None:
            if part is not None:
                raise ArgumentValueError(f"{name} is given; it must be None for {self.format}")
            return
        if not isinstance(part, Tensor) or part.shape != shape or part.dtype != dtype:
            found = f"{part.dtype} {list(part.shape)}" if isinstance(part, Tensor) else repr(part)
            raise ArgumentValueError(f"{name} is {found}; it must be {dtype} {list(shape)}")
        if part.layout is not torch.strided or part.is_neg():
            raise ArgumentValueError(f"{name} is sparse or negated lazily; it must lie in memory")
        if part.device != self.data.device:
            raise ArgumentValueError(
                f"{name} is on {part.device}; it must be on data's device, {self.data.device}"
            )

    def _check_values(self) -> None:
        """No value that the tensor stands for is NaN or Inf."""
        for name, part in self.parts.items():
            if part.dtype.is_floating_point and not bool(part.float().isfinite().all()):
                raise ArgumentValueError(f"{name} holds NaN or Inf; it must be finite")
        if self.mean is not None and bool((self.mean.abs() > LARGEST_MAGNITUDE).any()):
            raise ArgumentValueError(f"mean holds more than {LARGEST_MAGNITUDE:.4g}")
        if self.scales is None or not self.scales.numel():
            return
        low, high = (float(extreme) for extreme in torch.aminmax(self.scales))
        largest = LARGEST_MAGNITUDE / LARGEST_LEVEL[self.format.precision] * (1.0 + 2.0**-23)
        if low < SMALLEST_SCALE or high > largest:
            raise ArgumentValueError(
                f"scales are from {low:.4g} to {high:.4g}; they must be from "
                f"{SMALLEST_SCALE:.4g} to {largest:.4g}"
            )

    @property
    def shape(self) -> torch.Size:
        """That of the tensor it was made from."""
        batch, heads, rows, _ = self.data.shape
        order = (batch, rows, heads) if self._transposed else (batch, heads, rows)
        return torch.Size((*order[4 - self.ndim :], self.head_dim))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors it consists of, by their names."""
        named = {name: getattr(self, name) for name in PARTS}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of data, scales, zero points and mean."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    def levels(self) -> Tensor:
        """The stored levels [B, H, S, D]: int8 for int8 and int4, else as stored."""
        if self.format.precision != "int4":
            return self.data
        return unpack_int4(self.data, self.head_dim)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, shaped as the tensor they came from; in its dtype unless another is asked.

        Values that are stored in that dtype as they are come as a view of `data`.
        """
        values = self.levels().float()
        if self.scales is not None:
            rows = self.data.shape[:3]
            if self.zero_points is not None:
                values = values - spread_over_rows(self.zero_points, self.group, rows)
            values = values * spread_over_rows(self.scales, self.group, rows)
        if self.mean is not None:
            values = values + self.mean
        wanted = dtype or self.dtype
        if wanted == torch.float16:  # half a step above the largest value may be beyond fp16
            limit = torch.finfo(wanted).max
            values = values.clamp(-limit, limit)
        return self._shaped(values.to(wanted))

    def error(self, original: Tensor) -> Deviation:
        """How far the dequantised values are from the tensor they were made from."""
        if original.shape != self.shape:
            raise ArgumentValueError(
                f"original has shape {list(original.shape)}; it must be {list(self.shape)}"
            )
        return deviation(self.dequantize(torch.float32), original)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same on another device."""
        moved: dict[str, Any] = {name: part.to(device) for name, part in self.parts.items()}
        return replace(self, **moved, trusted=True)

    @property
    def _transposed(self) -> bool:
        return self.layout == "bshd" and self.ndim > 2

    def _shaped(self, values: Tensor) -> Tensor:
        values = values[(0,) * (4 - self.ndim)]
        return values.transpose(-3, -2) if self._transposed else values


def encode(
    tensor: Tensor, form: Format, name: str = "tensor", mean: Tensor | None = None
) -> QuantizedTensor:
    """A [B, H, S, D] tensor in `form`, whose granularity is settled; `mean` is taken out first."""
    values = tensor.detach()
    native = _encode_native(values, form, mean)
    if native is not None:
        return native
    if mean is not None:
        values = values.float() - mean
    top, bottom = _row_extremes(values)
    _check_magnitude(name, top, bottom, form.precision)
    group, dim = form.group(values.shape), values.shape[3]
    scales = zeros = None
    if not form.quantizes:
        data = values.to(PASS_THROUGH[form.precision])
    else:
        values, rows = values.float(), values.shape[:3]
        scales, zeros = _scales(top, bottom, form, group)
        steps = values / spread_over_rows(scales, group, rows)
        if form.precision == "fp8":
            data = steps.to(torch.float8_e4m3fn).contiguous()
        else:
            limit = LARGEST_LEVEL[form.precision]
            lowest, steps = -limit, steps.round()
            if zeros is not None:
                lowest, steps = -limit - 1, steps + spread_over_rows(zeros, group, rows)
            data = steps.clamp(lowest, limit).to(torch.int8).contiguous()
        if form.precision == "int4":
            data = pack_int4(data)
    return QuantizedTensor(data, scales, zeros, mean, form, group, dim, tensor.dtype, trusted=True)


def _encode_native(values: Tensor, form: Format, mean: Tensor | None) -> QuantizedTensor | None:
    """The same by the native CPU kernels, bit for bit; None where they do not serve."""
    served = form.precision in ("int8", "int4") and form.granularity in ("row", "block")
    library = _library_for(values) if served else None
    if library is None:
        return None
    group, int4 = form.group(values.shape), form.precision == "int4"
    found = quantized.quantize(library, values, mean, group, int4=int4, symmetric=form.symmetric)
    if found is None:  # it holds what has to be refused, by a message that says what
        return None
    data, scales, zeros, *_ = found
    dim, dtype = values.shape[3], values.dtype
    return QuantizedTensor(data, scales, zeros, mean, form, group, dim, dtype, trusted=True)


def _library_for(values: Tensor) -> Library | None:
    """The native library, where it can read these values."""
    if values.device.type != "cpu" or is_traced(values):
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    return quantized.usable_library()


def mean_over_sequence(values: Tensor) -> Tensor:
    """Of a [B, H, S, D] tensor, fp32 [B, H, 1, D]; of an empty one 0."""
    mean = _sum_over_sequence(values) / max(values.shape[2], 1)
    if math.isfinite(float(mean.sum())):
        return mean
    share = 2.0 ** -values.shape[2].bit_length()  # values above 2^127 / length add up to Inf
    return _sum_over_sequence(values.float() * share) / values.shape[2] / share


def _sum_over_sequence(values: Tensor) -> Tensor:
    # Torch adds up other channels, and more rows, in another order.
    alike = values.shape[3] % _CHANNELS_IN_ORDER == 0 and values.shape[2] <= _ROWS_IN_ORDER
    library = _library_for(values) if alike else None
    if library is not None:
        return quantized.sum_over_rows(library, values)
    # The order of the sum must not depend on the strides.
    return values.contiguous().sum(2, keepdim=True, dtype=torch.float32)


def _scales(
    top: Tensor, bottom: Tensor, form: Format, group: Group
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of every group, from the largest and -smallest value of its rows."""
    largest = LARGEST_LEVEL[form.precision]
    if form.symmetric:
        peak = largest_in_groups(torch.maximum(top, bottom), group)
        return (peak / largest).clamp(min=SMALLEST_SCALE), None
    above, below = largest_in_groups(top, group), largest_in_groups(bottom, group)
    scales = ((above + below) / (2 * largest + 1)).clamp(min=SMALLEST_SCALE)
    zeros = (below / scales).round() - (largest + 1)
    return scales, zeros.to(torch.int8)


def _row_extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the largest value and the largest negated one, fp32, neither below 0."""
    if not values.numel():
        nothing = values.new_zeros(values.shape[:3], dtype=torch.float32)
        return nothing, nothing
    low, high = torch.aminmax(values, dim=-1)
    return high.float().clamp(min=0.0), (-low).float().clamp(min=0.0)


def _check_magnitude(name: str, top: Tensor, bottom: Tensor, precision: Precision) -> None:
    limit = LARGEST_MAGNITUDE
    if precision in PASS_THROUGH:
        limit = torch.finfo(PASS_THROUGH[precision]).max
    if not top.numel():
        return
    largest = float(torch.maximum(top, bottom).max())
    if largest <= limit:  # NaN is not
        return
    if not math.isfinite(largest):
        raise ArgumentValueError(f"{name} holds NaN or Inf; it must be finite to be quantised")
    raise ArgumentValueError(
        f"{name} holds a value of magnitude {largest:.4g}; it must be at most {limit:.4g} "
        f"for {precision}"
    )


def row_peaks(values: Tensor) -> Tensor:
    """The largest magnitude of each row of a [B, H, S, D] tensor, fp32 [B, H, S]."""
    return torch.maximum(*_row_extremes(values))


def largest_in_groups(rows: Tensor, group: Group) -> Tensor:
    """Maximum of non-negative [B, H, S] over every group; the last of an axis may be ragged."""
    for axis, most in enumerate(group):
        size = min(most, rows.shape[axis])
        if size > 1:
            count = -(-rows.shape[axis] // size)
            padding = [0, 0] * (2 - axis) + [0, count * size - rows.shape[axis]]
            rows = F.pad(rows, padding).unflatten(axis, (count, size)).amax(axis + 1)
    return rows.contiguous()


def spread_over_rows(groups: Tensor, group: Group, rows: Sequence[int]) -> Tensor:
    """What belongs to groups, repeated for every row they hold: [B, H, S, 1]."""
    for axis, (size, length) in enumerate(zip(group, rows, strict=True)):
        if groups.shape[axis] == 1:
            groups = groups.expand(*groups.shape[:axis], length, *groups.shape[axis + 1 :])
        elif size > 1:
            groups = groups.repeat_interleave(size, axis).narrow(axis, 0, length)
    return groups[..., None]


def pack_int4(levels: Tensor) -> Tensor:
    """int8 levels in [-8, 7] two to a byte along the last axis, the even one in the low half."""
    levels = F.pad(levels, (0, levels.shape[-1] % 2)).view(torch.uint8)
    return (levels[..., 0::2] & 15) | (levels[..., 1::2] << 4)


def unpack_int4(data: Tensor, head_dim: int) -> Tensor:
    """The int8 levels that `pack_int4` packed."""
    signed = data.view(torch.int8)
    both = torch.stack((signed << 4 >> 4, signed >> 4), dim=-1)
    return both.flatten(-2)[..., :head_dim]

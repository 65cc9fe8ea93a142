"""Storing a tensor in fewer bits: every element within half a step, by groups as documented."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.quantization import QuantizedTensor, quantize
from orchard.quantization.formats import (
    LARGEST_LEVEL,
    PASS_THROUGH,
    Format,
    deviation,
    pack_int4,
    unpack_int4,
)
from orchard.testing.inputs import VIEWS, View, guarded

EPS = torch.finfo(torch.float32).eps
SMALLEST = 2.0**-126
SHAPE = (2, 3, 37, 33)  # nothing divides by a block, and int4 has half a byte to spare
BLOCK, HEADS = 8, 2
INTEGERS = ("int8", "int4")


def make(kind: str, shape: tuple[int, ...] = SHAPE) -> Tensor:
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    if kind == "normal":
        return normal
    if kind == "zero":
        return torch.zeros(shape)
    if kind == "constant":
        return torch.full(shape, -3.7)
    if kind == "one_sided":
        return normal.abs() + 5.0
    if kind == "denormal":
        return normal * 2.0**-140
    if kind == "outlier":
        normal[0, 1, 5, 7] = 1e6
        return normal
    assert kind == "large"
    return normal / normal.abs().max() * 2.0**126


def groups(granularity: str) -> Iterator[tuple[slice, slice, slice]]:
    """What shares a scale, written out from the words."""
    batch, heads, rows, _ = SHAPE
    if granularity == "tensor":
        yield slice(None), slice(None), slice(None)
        return
    row_step, head_step = (1, 1) if granularity == "row" else (BLOCK, HEADS)
    starts = (range(batch), range(0, heads, head_step), range(0, rows, row_step))
    for b, h, s in itertools.product(*starts):
        yield slice(b, b + 1), slice(h, h + head_step), slice(s, s + row_step)


def store(tensor: Tensor, precision: Any, granularity: Any, symmetric: bool) -> QuantizedTensor:
    return quantize(tensor, precision, granularity, BLOCK, symmetric, head_block_size=HEADS)


@pytest.mark.parametrize(
    "kind", ["normal", "zero", "constant", "one_sided", "denormal", "outlier", "large"]
)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("granularity", ["tensor", "block", "row"])
@pytest.mark.parametrize("precision", INTEGERS)
def test_within_half_a_step(precision: str, granularity: str, symmetric: bool, kind: str) -> None:
    """An integer is off by half a step of its group at most, beside fp32's own rounding."""
    tensor = make(kind)
    found = store(tensor, precision, granularity, symmetric).dequantize(torch.float32).double()
    exact = tensor.double()
    levels = LARGEST_LEVEL[precision] if symmetric else 2 * LARGEST_LEVEL[precision] + 1
    for part in groups(granularity):
        inside = exact[part]
        low, high = min(float(inside.min()), 0.0), max(float(inside.max()), 0.0)
        step = max((max(high, -low) if symmetric else high - low) / levels, SMALLEST)
        # Scale, quotient and product each round once; below SMALLEST they round to 2**-149.
        allowed = step / 2 + EPS * (levels * step + inside.abs()) + 2.0**-149
        assert ((found[part] - inside).abs() <= allowed).all()


@pytest.mark.parametrize("kind", ["normal", "zero", "constant", "denormal", "outlier", "large"])
@pytest.mark.parametrize("granularity", ["tensor", "block", "row"])
def test_fp8_within_half_a_step(granularity: str, kind: str) -> None:
    """fp8 has three bits of mantissa, and a smallest step of 2**-9 scales."""
    tensor = make(kind)
    found = store(tensor, "fp8", granularity, True).dequantize(torch.float32).double()
    for part in groups(granularity):
        inside = tensor.double()[part]
        scale = max(float(inside.abs().max()) / 448, SMALLEST)
        allowed = (inside.abs() * 2.0**-4).clamp(min=scale * 2.0**-10)
        assert ((found[part] - inside).abs() <= allowed * (1 + 4 * EPS) + 2.0**-149).all()


@pytest.mark.parametrize("precision", PASS_THROUGH)
def test_pass_through_rounds_once(precision: Any) -> None:
    """fp32, fp16 and bf16 keep the values in that dtype, without scales."""
    tensor = make("normal")
    stored = quantize(tensor, precision)
    assert stored.data.dtype == PASS_THROUGH[precision]
    assert stored.scales is None
    assert torch.equal(stored.dequantize(), tensor.to(PASS_THROUGH[precision]).float())


@pytest.mark.parametrize("precision", [*PASS_THROUGH, *LARGEST_LEVEL])
@pytest.mark.parametrize("dtype", PASS_THROUGH.values())
def test_what_is_stored_stays(precision: Any, dtype: torch.dtype) -> None:
    """Changing the tensor afterwards changes nothing that was stored, or passed through."""
    tensor = make("normal").to(dtype)
    stored = quantize(tensor, precision)
    before = stored.dequantize().clone()
    tensor.zero_()
    assert torch.equal(stored.dequantize(), before)


@pytest.mark.parametrize("granularity", ["tensor", "block", "row"])
def test_a_scale_for_every_group(granularity: str) -> None:
    """The scales are those of the groups, in their order, absmax / largest level each."""
    tensor = make("normal")
    for precision, largest in LARGEST_LEVEL.items():
        stored = store(tensor, precision, granularity, True)
        assert stored.scales is not None
        assert stored.zero_points is None
        expected = [float(tensor[part].abs().max()) for part in groups(granularity)]
        assert torch.equal(stored.scales.flatten(), torch.tensor(expected) / largest)


@pytest.mark.parametrize("precision", INTEGERS)
def test_asymmetric_keeps_zero(precision: Any) -> None:
    """0 is a level of every asymmetric group, so padding stays exactly 0."""
    tensor = make("one_sided")
    tensor[:, :, ::3] = 0.0
    found = quantize(tensor, precision, "block", BLOCK, symmetric=False).dequantize()
    assert torch.equal(found == 0, tensor == 0)


def test_levels_worked_by_hand() -> None:
    """Ties go to the even level; the ends of the range are reached."""
    rows = torch.tensor([[127.0, 2.5, 3.5, -127.0], [0.0, 0.0, 0.0, 0.0]])[None, None]
    stored = quantize(rows, "int8", "row")
    assert stored.data[0, 0].tolist() == [[127, 2, 4, -127], [0, 0, 0, 0]]
    assert stored.scales is not None
    assert stored.scales[0, 0].tolist() == [1.0, SMALLEST]
    stored = quantize(torch.tensor([[255.0, 0.0, 0.5, 1.5]]), "int8", "row", symmetric=False)
    assert stored.zero_points is not None
    assert stored.zero_points.flatten().tolist() == [-128]
    assert stored.data.flatten().tolist() == [127, -128, -128, -126]
    stored = quantize(torch.tensor([[-15.0, 0.0, -4.0]]), "int4", "row", symmetric=False)
    assert stored.zero_points is not None
    assert stored.zero_points.flatten().tolist() == [7]
    assert stored.levels().flatten().tolist() == [-8, 7, 3]


def test_bytes_of_int4_worked_by_hand() -> None:
    """Two to a byte, the even element in the low half; the half of an odd end is 0."""
    stored = quantize(torch.tensor([[7.0, -7.0, 1.0, -1.0, 3.0]]), "int4", "row")
    assert stored.data.flatten().tolist() == [0x97, 0xF1, 0x03]
    assert stored.data.dtype == torch.uint8


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_blocks_larger_than_memory(precision: Any) -> None:
    """Are blocks of everything."""
    tensor = torch.randn(1, 2, 8, 8)
    huge = quantize(tensor, precision, block_size=10**12, head_block_size=10**12)
    whole = quantize(tensor, precision, block_size=8, head_block_size=2)
    assert torch.equal(huge.dequantize(), whole.dequantize())
    with pytest.raises(ArgumentValueError, match="block_size"):
        quantize(tensor, precision, block_size=2**63)


def test_every_pair_of_int4_packs() -> None:
    """All 256 pairs come back."""
    pairs = torch.cartesian_prod(*[torch.arange(-8, 8, dtype=torch.int8)] * 2)
    assert torch.equal(unpack_int4(pack_int4(pairs), 2), pairs)


def test_smoothing_takes_the_mean_out() -> None:
    """The mean over the sequence is kept apart, and the rest is within half of a smaller step."""
    offset = 50.0 * torch.randn(SHAPE[3], generator=torch.Generator().manual_seed(1))
    tensor = make("normal") + offset
    plain, smooth = (quantize(tensor, "int8", "row", smooth=s) for s in (False, True))
    assert smooth.mean is not None
    assert torch.equal(smooth.mean, tensor.mean(2, keepdim=True))
    assert smooth.scales is not None
    exact = tensor.double() - smooth.mean.double()
    step = smooth.scales.double()[..., None]
    off = (smooth.dequantize().double() - tensor.double()).abs()
    rounding = EPS * (127 * step + exact.abs() + smooth.mean.double().abs())
    assert (off <= step / 2 + rounding).all()
    assert smooth.error(tensor).largest < plain.error(tensor).largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_of_large_values(dtype: torch.dtype) -> None:
    """Values whose sum is beyond fp32 have a mean, the one that smaller values would have."""
    tensor = make("normal").abs().clamp(max=2.0).to(dtype)
    small, large = (quantize(t, smooth=True) for t in (tensor, tensor * 2.0**125))
    assert small.mean is not None
    assert large.mean is not None
    assert torch.equal(large.mean, small.mean * 2.0**125)
    assert torch.equal(large.data, small.data)


@pytest.mark.parametrize("precision", [*PASS_THROUGH, *LARGEST_LEVEL])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("smooth", [False, True])
def test_not_finite_is_refused(precision: Any, bad: float, smooth: bool) -> None:
    """One NaN or Inf anywhere is an error that names the operand."""
    tensor = make("normal")
    tensor[1, 2, 36, 32] = bad
    with pytest.raises(ArgumentValueError, match="tensor holds NaN or Inf"):
        quantize(tensor, precision, smooth=smooth)


def test_too_large_is_refused() -> None:
    """A magnitude that the arithmetic or the dtype cannot hold is an error, not an Inf."""
    with pytest.raises(
        ArgumentValueError, match=r"magnitude 3e\+38; it must be at most 8.507e\+37"
    ):
        quantize(torch.full((2, 4), 3e38), "int8")
    with pytest.raises(ArgumentValueError, match=r"at most 6.55e\+04 for fp16"):
        quantize(torch.full((2, 4), 1e5), "fp16")


@pytest.mark.parametrize(("precision", "below"), [("int8", 0.4 / 254.6), ("int4", 0.4 / 14.6)])
def test_fp16_does_not_overflow(precision: Any, below: float) -> None:
    """A level above fp16's largest value comes back as that value."""
    tensor = torch.tensor([[65504.0, -65504.0 * below]], dtype=torch.float16)
    stored = quantize(tensor, precision, symmetric=False)
    assert float(stored.dequantize(torch.float32).max()) > 65520.0
    assert float(stored.dequantize().max()) == 65504.0


@pytest.mark.layout
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_strides_do_not_matter(view: View) -> None:
    """Any strides give the bytes of the contiguous copy, and nothing around is read or written."""
    source = guarded(SHAPE, view, generator=torch.Generator().manual_seed(2))
    for precision in LARGEST_LEVEL:
        found = store(source.tensor, precision, "block", True)
        expected = store(source.tensor.contiguous(), precision, "block", True)
        for name, part in found.parts.items():
            assert part.is_contiguous()
            assert torch.equal(part.view(torch.uint8), expected.parts[name].view(torch.uint8))
    assert source.intact()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtype_comes_back(dtype: torch.dtype) -> None:
    """The values are those of the fp32 copy; `dequantize` gives the dtype that was given."""
    tensor = make("normal").to(dtype)
    for precision in LARGEST_LEVEL:
        stored = store(tensor, precision, "block", True)
        wide = store(tensor.float(), precision, "block", True)
        assert stored.dequantize().dtype == dtype
        assert torch.equal(stored.dequantize(torch.float32), wide.dequantize())


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_layouts_and_ranks(layout: Any, rank: int) -> None:
    """Two, three or four axes in either layout are the same [B, H, S, D] inside."""
    tensor = make("normal")[(0,) * (4 - rank)]
    given = tensor.transpose(-3, -2) if layout == "bshd" and rank > 2 else tensor
    stored = quantize(given, "int4", "block", BLOCK, layout=layout)
    expected = quantize(tensor, "int4", "block", BLOCK)
    assert stored.shape == given.shape
    assert torch.equal(stored.data, expected.data)
    back = expected.dequantize()
    assert torch.equal(stored.dequantize(), back.transpose(-3, -2) if given is not tensor else back)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("precision", [*PASS_THROUGH, *LARGEST_LEVEL])
def test_sizes_of_zero(precision: Any, axis: int) -> None:
    """An axis of size 0 is stored and comes back."""
    shape = [2, 3, 5, 4]
    shape[axis] = 0
    for granularity in ("tensor", "block", "row", "hybrid"):
        stored = quantize(torch.zeros(shape), precision, granularity, smooth=True)
        assert stored.dequantize().shape == torch.Size(shape)


def test_bytes_are_counted() -> None:
    """Data, scales, zero points and mean, to the byte."""
    tensor = torch.randn(2, 3, 32, 64)
    assert quantize(tensor, "int8", "block", 16).nbytes == 2 * 3 * (32 * 64 + 2 * 4)
    assert quantize(tensor, "int4", "row").nbytes == 2 * 3 * 32 * (32 + 4)
    assert quantize(tensor, "int8", "tensor", symmetric=False).nbytes == 2 * 3 * 32 * 64 + 4 + 1
    assert quantize(tensor, "fp8", "row", smooth=True).nbytes == 2 * 3 * (32 * 68 + 64 * 4)
    assert quantize(tensor, "bf16").nbytes == 2 * 3 * 32 * 64 * 2


def test_error_is_measured() -> None:
    """Cosine, relative L2 and largest error, worked by hand; zeros are equal to zeros."""
    found = deviation(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0]))
    assert found == pytest.approx((0.6, 0.8, 4.0), abs=EPS)
    assert deviation(torch.zeros(2), torch.zeros(2)) == (1.0, 0.0, 0.0)
    assert deviation(torch.ones(2), torch.zeros(2)) == (0.0, torch.inf, 1.0)
    stored = quantize(torch.ones(4, 4))
    with pytest.raises(ArgumentValueError, match=r"original has shape \[2\]; it must be \[4, 4\]"):
        stored.error(torch.ones(2))


def test_to_a_device_keeps_everything() -> None:
    """Moving keeps every part and what is known about it."""
    stored = quantize(make("normal"), "int8", "block", symmetric=False, smooth=True)
    moved = stored.to("meta")
    assert moved.device.type == "meta"
    assert moved.parts.keys() == stored.parts.keys() == {"data", "scales", "zero_points", "mean"}
    assert (moved.format, moved.group) == (stored.format, stored.group)


def test_wrong_parts_are_refused() -> None:
    """A tensor cannot be put together from parts that do not belong together."""
    stored = quantize(make("normal"), "int8", "block", BLOCK, symmetric=False, smooth=True)
    assert stored.scales is not None
    for name, part in {
        "data": stored.data.float(),
        "scales": stored.scales[:, :, 1:],
        "zero_points": None,
        "mean": torch.zeros(3),
    }.items():
        wrong: dict[str, Any] = {name: part}
        with pytest.raises(ArgumentValueError, match=f"{name} is .* it must be"):
            replace(stored, **wrong)


TAMPERED: dict[str, tuple[str, dict[str, Any], str]] = {
    # name: (precision, what is put in, words of the error)
    "group of 0": ("int8", {"group": (0, 1, 1)}, "group is 0; it must be at least 1"),
    "group of two": ("int8", {"group": (1, 1)}, r"group is \(1, 1\); it must be three sizes"),
    "another group": ("int8", {"group": (1, 1, 4)}, r"scales is .* it must be .* \[2, 3, 10\]"),
    "dtype": ("int8", {"dtype": torch.int8}, "dtype is torch.int8; it must be torch.float32"),
    "no dtype": ("int8", {"dtype": torch.nn}, "dtype is <module.*it must be torch.float32"),
    "layout": ("int8", {"layout": "sbhd"}, "layout is 'sbhd'; it must be one of"),
    "ndim": ("int8", {"ndim": 5}, "ndim is 5; it must be 2, 3 or 4"),
    "too few axes": ("int8", {"ndim": 3}, "ndim is 3; it must be 4 for data of 2 batch entries"),
    "head_dim": ("int8", {"head_dim": 32}, r"data is .* it must be .*\[2, 3, 37, 32\]"),
    "negative head_dim": ("int4", {"head_dim": -1}, "head_dim is -1; it must be a size"),
    "format": ("int8", {"format": "int8"}, "format is 'int8'; it must be a Format"),
    "no data": ("int8", {"data": None}, "data is None; it must be a tensor with 4 axes"),
    "flat data": ("int8", {"data": torch.ones(3)}, r"data is of shape \[3\]; it must be a tensor"),
    "scales too many": ("bf16", {"scales": torch.ones(2, 3, 5)}, "scales is given; it must be Non"),
    "zeros too many": (
        "int8",
        {"zero_points": torch.zeros(2, 3, 5, dtype=torch.int8)},
        "zero_points is given; it must be None",
    ),
    "mean too many": ("int8", {"mean": torch.zeros(2, 3, 1, 33)}, "mean is given; it must be None"),
    "two devices": ("int8", {"scales": torch.ones(2, 3, 5, device="meta")}, "scales is on meta"),
    "NaN scale": ("int8", {"scales": torch.full((2, 3, 5), torch.nan)}, "scales holds NaN or Inf"),
    "Inf scale": ("fp8", {"scales": torch.full((2, 3, 5), torch.inf)}, "scales holds NaN or Inf"),
    "scale of 0": ("int8", {"scales": torch.zeros(2, 3, 5)}, "scales are from 0 to 0; they must"),
    "negative": ("int4", {"scales": -torch.ones(2, 3, 5)}, "scales are from -1 to -1; they must"),
    "large scale": ("int8", {"scales": torch.full((2, 3, 5), 1e38)}, "scales are from 1e"),
    "NaN value": ("bf16", {"data": torch.full(SHAPE, torch.nan).bfloat16()}, "data holds NaN"),
    "NaN level": (
        "fp8",
        {"data": torch.full(SHAPE, torch.nan).to(torch.float8_e4m3fn)},
        "data holds NaN",
    ),
}


@pytest.mark.errors
@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_tensors_are_refused(name: str) -> None:
    """What is wrong is said by its name, and nothing wrong passes."""
    precision, wrong, words = TAMPERED[name]
    stored = quantize(make("normal"), precision, "block", BLOCK)
    assert torch.equal(replace(stored).dequantize(), stored.dequantize())
    with pytest.raises((ArgumentValueError, ArgumentTypeError), match=words):
        replace(stored, **wrong)


@pytest.mark.parametrize("precision", LARGEST_LEVEL)
@pytest.mark.parametrize("size", [0.0, 1e-40, 2.0**126])
def test_every_quantised_tensor_passes_the_checks(precision: Any, size: float) -> None:
    """The smallest and the largest scale that there are can be put together again."""
    for symmetric in (True,) if precision == "fp8" else (True, False):
        tensor = torch.full((1, 2, 5, 4), size)
        tensor[:, 0] *= -1.0
        stored = quantize(tensor, precision, "tensor", symmetric=symmetric)
        assert torch.equal(replace(stored).dequantize(), stored.dequantize())


@pytest.mark.errors
@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"precision": "int3"}, ValueError, "precision is 'int3'; it must be one of 'fp32'"),
        ({"granularity": "head"}, ValueError, "granularity is 'head'; it must be one of 'tensor'"),
        ({"block_size": 0}, ValueError, "block_size is 0; it must be at least 1"),
        ({"block_size": 2.0}, TypeError, "block_size is 2.0; it must be an integer"),
        ({"head_block_size": -1}, ValueError, "head_block_size is -1"),
        ({"symmetric": 1}, TypeError, "symmetric is 1; it must be True or False"),
        ({"smooth": "yes"}, TypeError, "smooth is 'yes'"),
        ({"adaptive_blocks": None}, TypeError, "adaptive_blocks is None"),
        ({"strategy": "fast"}, ValueError, "strategy is 'fast'; it must be one of"),
        ({"layout": "sbhd"}, ValueError, "layout is 'sbhd'; it must be one of 'bhsd', 'bshd'"),
        ({"precision": "fp8", "symmetric": False}, ValueError, "symmetric is False.*fp8"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_wrong_settings(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    """Every setting that is not allowed is named, with what is."""
    with pytest.raises(error, match=words):
        quantize(torch.ones(4, 4), **wrong)


@pytest.mark.errors
def test_wrong_tensors() -> None:
    """What is not a dense floating tensor of two to four axes is refused."""
    wrong: Any = [1.0]
    with pytest.raises(ArgumentTypeError, match=r"tensor is .* it must be a torch\.Tensor"):
        quantize(wrong)
    with pytest.raises(ArgumentTypeError, match=r"torch\.float64; it must be float32, float16"):
        quantize(torch.ones(4, 4).double())
    with pytest.raises(ArgumentTypeError, match="sparse or nested"):
        quantize(torch.ones(4, 4).to_sparse())
    with pytest.raises(ArgumentValueError, match="2 to 4 axes"):
        quantize(torch.ones(4))


@pytest.mark.parametrize(
    ("length", "precision", "rows"),
    [
        (64, "int8", 64),
        (512, "int8", 64),
        (513, "int8", 128),
        (2048, "fp8", 128),
        (2049, "int8", 256),
        (512, "int4", 32),
        (513, "int4", 64),
        (2049, "int4", 128),
    ],
)
def test_adaptive_blocks(length: int, precision: Any, rows: int) -> None:
    """Longer sequences have larger blocks, int4 half of them, none above block_size."""
    form = Format(precision, "block", 1000, adaptive_blocks=True)
    assert form.rows_in_block(length) == rows
    assert Format(precision, "block", 24, adaptive_blocks=True).rows_in_block(length) == 24
    assert Format(precision, "block", 1000).rows_in_block(length) == 1000

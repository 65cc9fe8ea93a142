"""What the fp32 kernel for Hopper takes, and how it is specialised and launched: without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.attention.problem import Band, Options, Problem, Tensors, describe
from orchard.backends.cuda import choice, hopper_fp32_plan, hopper_plan
from orchard.backends.cuda.hopper_fp32_plan import Config, Specialisation

pytestmark = pytest.mark.dispatch

PROCESSORS = 132
PLAIN = Options(0.125)


def operands(
    dim: int = 64, value_dim: int = 64, *, rows: int = 256, keys: int = 256, heads: int = 4
) -> Tensors:
    """Their memory is never read."""
    shapes = (2, heads, rows, dim), (2, 2, keys, dim), (2, 2, keys, value_dim)
    return Tensors(*(torch.empty(shape) for shape in shapes))


def specialised(tensors: Tensors, options: Options = PLAIN, **kind: Any) -> Specialisation:
    return hopper_fp32_plan.specialise(describe(tensors, options, **kind), PROCESSORS)


# What is taken


def codes(problem: Problem) -> list[str]:
    return [reason.code for reason in hopper_fp32_plan.reasons(problem)]


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 128), (33, 17), (1, 128), (128, 1)])
def test_rows_of_any_width_are_taken(dim: int, value_dim: int) -> None:
    assert codes(describe(operands(dim, value_dim), PLAIN)) == []


def test_where_tf32_is_allowed_it_is_left_to_others() -> None:
    problem = describe(operands(), PLAIN)._replace(tf32=True)
    (reason,) = hopper_fp32_plan.reasons(problem)
    assert reason.code == "tf32"
    assert "ieee" in reason.fix


@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_the_highest_product_is_the_highest_score(scale: float) -> None:
    assert codes(describe(operands(), Options(scale))) == ["scale"]


def test_a_mask_is_taken_by_its_last_axis() -> None:
    mask = torch.empty(2, 1, 256, 256, dtype=torch.bool)
    for given, expected in ((mask, []), (mask.mT, ["mask_strides"]), (mask.mT[..., :1], [])):
        assert codes(describe(operands()._replace(mask=given), PLAIN)) == expected


@pytest.mark.parametrize(
    ("dim", "strides"),
    [
        (1, (1024, 256, 1, 4096)),
        (64, (0, 0, 0, 1)),
        (64, (1, 1, 1, 1)),
        (64, (64, 128, 512, 1)),
    ],
)
def test_the_output_has_contiguous_rows(dim: int, strides: tuple[int, ...]) -> None:
    """Of whatever query is taken: the kernel relies on it."""
    tensors = operands(dim)
    query = torch.empty(2**18).as_strided((2, 4, 256, dim), strides)
    problem = on_gpu(describe(tensors._replace(query=query), PLAIN))
    assert choice.by_name("hopper_fp32").capability.reasons(problem) == ()
    assert problem.out_strides[3] == 1


def test_every_reason_is_given() -> None:
    mask = torch.empty(2, 1, 256, 256, dtype=torch.bool).mT
    problem = describe(operands()._replace(mask=mask), Options(-1.0))._replace(tf32=True)
    assert codes(problem) == ["scale", "mask_strides", "tf32"]


def on_gpu(problem: Problem) -> Problem:
    return problem._replace(device=torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("tensors", "options", "code"),
    [
        (operands(dim=129), PLAIN, "head_dim"),
        (operands(value_dim=129), PLAIN, "head_dim"),
        (operands(), Options(0.125, softcap=5.0), "softcap"),
        (operands()._replace(mask=torch.empty(256, 256)[None, None]), PLAIN, "mask"),
        (operands()._replace(key=torch.empty(2, 2, 64, 256).mT), PLAIN, "last_stride"),
        (Tensors(*(each.half() for each in operands()[:3])), PLAIN, "dtype"),
        (operands(rows=0), PLAIN, "zero_size"),
    ],
)
def test_what_the_table_leaves_to_others(tensors: Tensors, options: Options, code: str) -> None:
    problem = on_gpu(describe(tensors, options))
    found = choice.by_name("hopper_fp32").capability.reasons(problem)
    assert code in [reason.code for reason in found]


# How it is specialised


@pytest.mark.parametrize(
    ("dim", "value_dim", "widths", "padded", "config"),
    [
        (64, 64, 1, False, Config(64, 2, 208)),
        (40, 64, 1, True, Config(64, 2, 208)),
        (64, 1, 1, True, Config(64, 2, 208)),
        (65, 64, 2, True, Config(64, 1, 208)),
        (64, 128, 2, True, Config(64, 1, 208)),
        (128, 128, 2, False, Config(64, 1, 208)),
    ],
)
def test_tiles_are_as_wide_as_the_wider_operand(
    dim: int, value_dim: int, widths: int, padded: bool, config: Config
) -> None:
    special = specialised(operands(dim, value_dim))
    assert (special.widths, special.padded, special.config) == (widths, padded, config)


@pytest.mark.parametrize(
    ("keys", "band", "low", "high", "tail"),
    [
        (256, None, False, False, False),
        (257, Band(None, 0), False, True, True),
        (320, Band(-5, None), True, False, False),
        (63, Band(-5, 5), True, True, True),
    ],
)
def test_bands_and_tails(keys: int, band: Band | None, low: bool, high: bool, tail: bool) -> None:
    special = specialised(operands(keys=keys), Options(0.125, band=band))
    assert (special.low, special.high, special.tail) == (low, high, tail)


def off(tensor: Tensor, begin: int) -> Tensor:
    """As many elements, beginning so many after a 16-byte boundary."""
    buffer = torch.empty(tensor.numel() + begin, dtype=tensor.dtype)
    return buffer[begin:].view(tensor.shape)


def test_loads_are_wide_where_every_row_begins_on_16_bytes() -> None:
    tensors = operands()
    assert specialised(tensors).wide
    assert specialised(operands(dim=36, value_dim=12)).wide
    assert not specialised(operands(dim=34)).wide
    assert not specialised(operands(value_dim=34)).wide
    assert not specialised(tensors._replace(value=off(tensors.value, 1))).wide
    assert specialised(tensors._replace(value=off(tensors.value, 4))).wide
    odd_rows = torch.empty(2, 2, 256, 65)[..., :64]
    assert not specialised(tensors._replace(key=odd_rows)).wide


@pytest.mark.parametrize(("heads", "dynamic"), [(66, False), (132, True)])
def test_many_tiles_are_taken_from_a_counter(heads: int, dynamic: bool) -> None:
    assert specialised(operands(heads=heads)).dynamic == dynamic


@pytest.mark.parametrize("wanted", ["lse", "grad", None])
def test_lse_is_stored_where_it_is_wanted(wanted: str | None) -> None:
    kind = {wanted: True} if wanted else {}
    assert specialised(operands(), **kind).lse == bool(wanted)


def test_a_mask_that_begins_off_16_bytes_is_loaded_narrowly() -> None:
    mask = torch.empty(2, 1, 256, 256, dtype=torch.bool)
    special = specialised(operands()._replace(mask=mask))
    assert special.terms.wide_mask
    assert special.fitting(mask) is special
    assert special.fitting(None) is special
    assert special.fitting(off(mask, 1)) == special._replace(terms=special.terms.narrow)
    assert (
        not specialised(operands(keys=250)._replace(mask=mask[..., :250]))
        .fitting(off(mask, 8))
        .terms.wide_mask
    )


# How it is launched


class RecordedKernel:
    """Keeps what it is launched with."""

    def __init__(self, special: Specialisation) -> None:
        self.special = special
        self.launches: list[tuple[Any, ...]] = []

    def __call__(self, programs: int, device: int, *arguments: object) -> None:
        self.launches.append((programs, arguments))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[RecordedKernel]:
    """Those that were asked for, in the place of compiled ones."""
    made: list[RecordedKernel] = []

    def make(special: Specialisation, device: torch.device) -> RecordedKernel:
        made.append(RecordedKernel(special))
        return made[-1]

    monkeypatch.setattr(hopper_fp32_plan, "_kernel", make)
    monkeypatch.setattr(hopper_plan, "index_of", lambda device: 0)
    return made


def test_a_launch_has_addresses_strides_sizes_and_terms(kernels: list[RecordedKernel]) -> None:
    tensors = operands(dim=40, value_dim=24, rows=300, keys=200)
    query = torch.empty(2, 300, 4, 40).transpose(1, 2)
    tensors = tensors._replace(query=query, seed=torch.empty(2, dtype=torch.int32))
    options = Options(0.125, band=Band(None, 0), threshold=6000)
    plan = hopper_fp32_plan.plan(describe(tensors, options, lse=True), PROCESSORS)
    out, lse = plan.run(None, tensors)
    ((programs, launched),) = kernels[0].launches
    assert programs == 2 * 4 * 3
    assert out.stride() == (300 * 4 * 24, 24, 4 * 24, 1)
    assert launched[:4] == tuple(each.data_ptr() for each in (*tensors[:3], out))
    assert launched[4:6] == (lse.data_ptr(), 0)
    strides = [step for each in (*tensors[:3], out) for step in each.stride()[:3]]
    assert list(launched[6:18]) == strides
    assert launched[18:20] == (40, 24)
    assert launched[20:28] == (300, 200, 4, 2, 8, 8, -(2**30), 0)
    assert launched[28:] == plan.terms.arguments(None, tensors.seed)


def test_a_launch_without_lse_and_with_a_counter(kernels: list[RecordedKernel]) -> None:
    tensors = operands()
    plan = hopper_fp32_plan.plan(describe(tensors, PLAIN), 2)
    saved = plan.run(None, tensors)
    ((programs, launched),) = kernels[0].launches
    assert saved.lse.numel() == 0
    assert programs == 2
    assert launched[4] == 0
    assert launched[5] != 0


def test_a_mask_off_16_bytes_has_a_kernel_of_its_own(kernels: list[RecordedKernel]) -> None:
    mask = torch.empty(2, 1, 256, 256, dtype=torch.bool)
    tensors = operands()._replace(mask=mask)
    plan = hopper_fp32_plan.plan(describe(tensors, PLAIN), PROCESSORS)
    plan.run(None, tensors)
    assert [len(kernel.launches) for kernel in kernels] == [1]
    other = tensors._replace(mask=off(mask, 1))
    plan.run(None, other)
    assert [len(kernel.launches) for kernel in kernels] == [1, 1]
    assert [kernel.special.terms.wide_mask for kernel in kernels] == [True, False]
    _, launched = kernels[1].launches[0]
    assert other.mask is not None
    assert launched[28 + 2] == other.mask.data_ptr()

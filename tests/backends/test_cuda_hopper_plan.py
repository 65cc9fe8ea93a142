"""What the Hopper kernels take, and how they are specialised: no GPU and no Triton is needed."""

import heapq
import math
from typing import Any

import pytest
import torch

from orchard.attention.problem import (
    Band,
    MaskSpec,
    Options,
    Problem,
    Saved,
    Tensors,
    Upstream,
    describe,
)
from orchard.backends.cuda import hopper_plan
from orchard.backends.cuda.launch import BackwardKind, Setting
from orchard.backends.cuda.runtime import Gpu
from orchard.dispatch.known import Known

PROCESSORS = 132
GPU = Gpu(90, PROCESSORS, 228 * 1024)


def pose(
    shape: tuple[int, int, int, int] = (2, 4, 256, 64),
    *,
    dtype: torch.dtype = torch.bfloat16,
    stage: str = "forward",
    **options: object,
) -> Problem:
    query = torch.empty(shape, dtype=dtype, device="meta")
    given = Options(0.125, **options)
    grad_out = query if stage == "backward" else None
    return describe(Tensors(query, query, query), given, stage=stage, grad_out=grad_out)


class RecordedKernel:
    """Keeps what it is launched with; a descriptor is launched with (place, address, strides)."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def describe(self, place: int, geometry: hopper_plan.Geometry) -> Known[int, tuple[Any, ...]]:
        return Known(lambda address: (place, address, geometry.strides))

    def bind(self, *arguments: object) -> tuple[object, ...]:
        return arguments

    def launch(self, programs: int, device: int, bound: tuple[object, ...]) -> None:
        self.launches.append(bound)

    def __call__(self, programs: int, device: int, *arguments: object) -> None:
        self.launch(programs, device, self.bind(*arguments))


def recorded_kernels(special: Any, device: torch.device) -> hopper_plan._Kernels:
    return hopper_plan._Kernels(RecordedKernel(), RecordedKernel(), RecordedKernel())


def codes(problem: Problem) -> list[str]:
    return [reason.code for reason in hopper_plan.reasons(problem)]


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(2, 4, 256, 64), (1, 1, 1, 128), (3, 2, 77, 40), (1, 1, 1, 8)])
def test_aligned_rows_are_taken(shape: tuple[int, int, int, int], stage: str) -> None:
    assert codes(pose(shape, stage=stage)) == []


def test_a_permuted_view_is_taken() -> None:
    problem = pose((2, 4, 256, 64))._replace(query_strides=(256 * 4 * 64, 64, 4 * 64, 1))
    assert codes(problem) == []


@pytest.mark.parametrize(
    ("strides", "why"),
    [
        ((65536, 16384, 1, 256), "a strided last axis"),
        ((0, 16384, 64, 1), "an expanded batch"),
        ((65540, 16385, 65, 1), "rows that do not begin on 16 bytes"),
        ((65536, 16384, 8, 1), "rows that overlap"),
    ],
)
def test_strides_that_tma_cannot_walk_are_refused(strides: tuple[int, ...], why: str) -> None:
    assert codes(pose()._replace(key_strides=strides)) == ["strides"], why


def test_every_reason_is_given() -> None:
    problem = pose((1, 1, 16, 12), stage="backward")._replace(key_strides=(192, 192, 11, 1))
    problem = problem._replace(options=problem.options._replace(scale=-1.0))
    assert codes(problem) == ["scale", "head_dim", "strides", "strides", "strides", "strides"]


def test_head_dimensions_of_a_backward_are_whole_groups() -> None:
    assert codes(pose((1, 1, 64, 12), stage="backward")).count("head_dim") == 1
    assert "head_dim" not in codes(pose((1, 1, 64, 12)))


def test_a_mask_is_taken_by_its_last_axis() -> None:
    mask = torch.ones(2, 1, 256, 256, dtype=torch.bool, device="meta")
    query = torch.empty(2, 4, 256, 64, dtype=torch.float16, device="meta")
    for given, expected in ((mask, []), (mask.mT, ["mask_strides"]), (mask[..., :1], [])):
        assert codes(describe(Tensors(query, query, query, given), Options(1.0))) == expected


@pytest.mark.parametrize(
    ("band", "rows", "keys", "empty"),
    [
        (None, 64, 64, False),
        (Band(None, 0), 64, 64, False),
        (Band(None, -1), 64, 64, True),
        (Band(-10, None), 64, 54, False),  # row 63 sees key 53
        (Band(-10, None), 64, 53, True),
    ],
)
def test_bands_that_leave_a_row_empty_are_known(
    band: Band | None, rows: int, keys: int, empty: bool
) -> None:
    problem = pose((1, 1, rows, 64), stage="backward", band=band)
    shape = (1, 1, keys, 64)
    problem = problem._replace(key_shape=shape, value_shape=shape)
    assert hopper_plan.specialise_backward(problem, PROCESSORS).empty_rows is empty


@pytest.mark.parametrize(
    ("shape", "options", "key_rows", "consumers", "dynamic", "programs"),
    [
        ((4, 32, 4096, 64), {}, 64, 3, True, PROCESSORS),
        ((4, 32, 4096, 64), {"softcap": 20.0}, 64, 3, True, PROCESSORS),
        ((4, 32, 4096, 64), {"threshold": 6554}, 64, 2, True, PROCESSORS),
        ((4, 32, 4096, 128), {}, 64, 2, True, PROCESSORS),
        ((1, 4, 1000, 64), {}, 64, 2, False, 4 * 8),
    ],
)
def test_a_deterministic_backward_is_configured_by_its_size_and_terms(
    shape: tuple[int, int, int, int],
    options: dict[str, Any],
    key_rows: int,
    consumers: int,
    dynamic: bool,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper_plan, "_backward_kernels", recorded_kernels)
    monkeypatch.setattr(hopper_plan, "index_of", lambda device: 0)
    problem = pose(shape, stage="backward", **options)._replace(deterministic=True)
    kind = BackwardKind(problem, (), (), None)
    plan = hopper_plan.plan_backward(kind, Setting(GPU))
    special = plan.special
    assert (special.config.rows, special.rows.consumers) == (key_rows, consumers)
    assert (special.dynamic, plan.programs[2]) == (dynamic, programs)


def test_a_mask_leaves_two_consumers_to_the_rows() -> None:
    mask = torch.ones(1, 1, 4096, 4096, dtype=torch.bool, device="meta")
    query = torch.empty(4, 32, 4096, 64, dtype=torch.bfloat16, device="meta")
    tensors = Tensors(query, query, query, mask)
    problem = describe(tensors, Options(0.125), stage="backward", grad_out=query)
    special = hopper_plan.specialise_backward(problem._replace(deterministic=True), PROCESSORS)
    assert (special.config.rows, special.rows.consumers, special.dynamic) == (64, 2, True)


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 128), (128, 64)])
def test_a_fused_backward_scales_dq_after_all_programs(
    head_dim: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dQ of D 64 is split by rows, so that its tiles have 128."""
    monkeypatch.setattr(hopper_plan, "_backward_kernels", recorded_kernels)
    monkeypatch.setattr(hopper_plan, "index_of", lambda device: 0)
    problem = pose((4, 32, 4096, head_dim), stage="backward")
    kind = BackwardKind(problem, (), (), None)
    plan = hopper_plan.plan_backward(kind, Setting(GPU))
    assert (plan.special.config.rows, plan.special.dynamic) == (rows, False)
    assert plan.programs[1:] == (plan.shares.programs, 4 * 32 * 64)
    assert plan.shares.blocks == 4 * 32 * 32


@pytest.mark.parametrize("blocks", [1, 2, 33, 131, 132, 133, 264, 1000, 2048, 4096])
@pytest.mark.parametrize("tiles", [1, 2, 8, 64, 256])
def test_shares_never_take_longer_than_whole_blocks(blocks: int, tiles: int) -> None:
    """Counted in tiles of rows."""
    shares = hopper_plan.Shares.of(blocks, tiles, PROCESSORS)
    shared = blocks - shares.unshared
    assert shares.blocks == blocks
    assert (shared > 0) == (shares.parts > 1)
    assert 0 <= shares.fewer <= shared
    of_more = (shared - shares.fewer) * (shares.parts + 1)
    assert shares.programs == shares.unshared + shares.fewer * shares.parts + of_more
    if shared:
        assert shares.unshared % PROCESSORS == shares.programs % PROCESSORS == 0
        assert shares.parts < tiles
        lengths = shares.fewer * shares.parts * [-(-tiles // shares.parts)]
        lengths += of_more * [-(-tiles // (shares.parts + 1))]
        ends = [0] * PROCESSORS
        for length in lengths:  # whoever is ready takes the next program
            heapq.heapreplace(ends, ends[0] + length)
        assert max(ends) <= tiles


def test_shares_have_to_save_enough() -> None:
    """2048 blocks are 15.5 turns of 132 processors: 16 without shares. With them 68 blocks are two
    turns, of 8 blocks in three parts and 60 in four.
    """
    assert hopper_plan.Shares.of(2048, 64, 132) == (2048, 15 * 132, 3, 8)
    assert hopper_plan.Shares.of(2048, 64, 132, 0.1) == (2048, 2048, 1, 0)
    assert hopper_plan.Shares.of(60, 64, 132, 0.1) == (60, 0, 2, 48)
    assert hopper_plan.Shares.of(2 * 132, 64, 132) == (264, 264, 1, 0)
    assert hopper_plan.Shares.of(1, 2, 132) == (1, 1, 1, 0)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "shared"), [(16, 128, True), (8, 128, False), (16, 64, False)]
)
def test_large_backwards_are_shared_where_that_kernel_is_faster(
    kv_heads: int, head_dim: int, shared: bool
) -> None:
    key = torch.empty(4, kv_heads, 4096, head_dim, dtype=torch.bfloat16, device="meta")
    query = torch.empty(4, 16, 4096, head_dim, dtype=torch.bfloat16, device="meta")
    tensors = Tensors(query, key, key)
    problem = describe(tensors, Options(0.125), stage="backward", grad_out=query)
    special = hopper_plan.specialise_backward(problem, PROCESSORS)
    assert (special.shared, special.rotated) == (shared, shared)
    assert special.grouped == (kv_heads == 8)


@pytest.mark.parametrize(
    ("band", "deterministic"), [(Band(None, 0), False), (Band(-100, None), False), (None, True)]
)
def test_blocks_are_whole_where_they_differ_or_order_counts(
    band: Band | None, deterministic: bool
) -> None:
    problem = pose((1, 4, 2048, 128), stage="backward", band=band)
    assert hopper_plan.specialise_backward(pose((1, 4, 2048, 128), stage="backward"), 132).shared
    special = hopper_plan.specialise_backward(problem._replace(deterministic=deterministic), 132)
    assert not special.shared


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "shape", "strides", "taken", "tiles"),
    [
        (BF16, (2, 1, 256, 256), (65536, 65536, 256, 1), True, True),
        (BF16, (1, 4, 256, 256), (262144, 65536, 256, 1), True, True),
        (BF16, (2, 4, 256, 256), (0, 0, 256, 1), True, True),
        (BF16, (2, 1, 1, 256), (256, 256, 256, 1), True, False),
        (FP32, (2, 1, 1, 256), (256, 256, 256, 1), True, False),
        (BF16, (2, 1, 256, 1), (256, 256, 1, 1), True, False),
        (FP32, (2, 1, 256, 256), (65536, 65536, 256, 1), False, False),
        (BF16, (2, 1, 256, 256), (66048, 66048, 258, 1), False, False),
        (BF16, (2, 1, 256, 256), (256, 256, 0, 1), False, False),
    ],
)
def test_added_masks(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    taken: bool,
    tiles: bool,
) -> None:
    """For each row and key only by TMA, in the operands' dtype; else where rows or keys share."""
    problem = pose()._replace(mask=MaskSpec(dtype, shape, strides))
    assert codes(problem) == ([] if taken else ["mask_strides"])
    assert hopper_plan.specialise_forward(problem, PROCESSORS).mask_tiles == tiles
    backward = pose(stage="backward")._replace(mask=problem.mask, mask_grad=True)
    apart = shape[2:] == (256, 256) and shape[:2] != (2, 4)
    expected = [] if taken else ["mask_strides"]
    assert codes(backward) == (expected if apart else ["mask_grad"])


def test_a_mask_that_begins_off_16_bytes_has_a_kernel_without_tma() -> None:
    mask = torch.empty(2 * 256 * 256 + 1, dtype=BF16)
    problem = pose()._replace(mask=MaskSpec(BF16, (2, 1, 256, 256), (65536, 65536, 256, 1)))
    special = hopper_plan.specialise_forward(problem, PROCESSORS)
    assert special.fitting(mask) is special
    assert special.fitting(None) is special
    other = special.fitting(mask[1:])
    assert (other.mask_tiles, other.terms.wide_mask) == (False, False)


@pytest.mark.parametrize(
    ("rows", "band", "terms", "consumers"),
    [
        (1024, Band(None, 0), {}, 4),
        (1025, Band(None, 0), {}, 3),
        (1024, None, {}, 3),
        (1024, Band(None, 0), {"threshold": 6000}, 2),
    ],
)
def test_consumers_of_head_dimension_64(
    rows: int, band: Band | None, terms: dict[str, Any], consumers: int
) -> None:
    problem = pose((16, 16, rows, 64), band=band, **terms)
    assert hopper_plan.specialise_forward(problem, PROCESSORS).config.consumers == consumers


@pytest.mark.parametrize(
    ("dtype", "dim", "scale", "softcap", "tiles", "accumulated"),
    [
        (BF16, 64, 0.125, 0.0, True, True),
        (BF16, 64, 1.0, 0.0, True, True),
        (BF16, 64, 2.0, 0.0, True, False),
        (BF16, 64, 0.13, 0.0, True, False),
        (BF16, 64, 0.125, 5.0, True, False),
        (BF16, 64, 0.125, 0.0, False, False),
        (BF16, 128, 0.125, 0.0, True, False),
        (torch.float16, 64, 0.125, 0.0, True, False),
    ],
)
def test_how_an_added_mask_meets_the_products(
    dtype: torch.dtype, dim: int, scale: float, softcap: float, tiles: bool, accumulated: bool
) -> None:
    """They are added to it where the query can be scaled exactly and tiles come by TMA."""
    mask = (2, 1, 256 if tiles else 1, 256)
    problem = pose((2, 4, 256, dim), dtype=dtype)._replace(
        options=Options(scale, softcap),
        mask=MaskSpec(dtype, mask, (mask[2] * 256, mask[2] * 256, 256, 1)),
    )
    special = hopper_plan.specialise_forward(problem, PROCESSORS)
    assert special.mask_tiles == tiles
    assert special.config.accumulated == accumulated
    off = special.fitting(torch.empty(9, dtype=BF16)[1:])
    assert not off.config.accumulated


def test_many_rows_with_a_mask_have_three_consumers_where_it_is_added_to() -> None:
    problem = pose((4, 32, 4096, 64))._replace(
        mask=MaskSpec(BF16, (4, 1, 4096, 4096), (4096 * 4096, 4096 * 4096, 4096, 1))
    )
    config = hopper_plan.specialise_forward(problem, PROCESSORS).config
    assert (config.consumers, config.pipelined, config.accumulated) == (3, False, True)
    dropped = problem._replace(options=problem.options._replace(threshold=6000))
    config = hopper_plan.specialise_forward(dropped, PROCESSORS).config
    assert (config.consumers, config.pipelined, config.accumulated) == (2, True, True)


def test_few_tiles_are_dealt_out_and_many_are_taken() -> None:
    few = hopper_plan.specialise_forward(pose((1, 24, 1024, 64)), PROCESSORS)
    many = hopper_plan.specialise_forward(pose((4, 32, 4096, 64)), PROCESSORS)
    assert (few.dynamic, few.config.consumers) == (False, 2)
    assert (many.dynamic, many.config.consumers) == (True, 3)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_scores_are_in_units_of_log_2(softcap: float) -> None:
    terms = hopper_plan.ScoreTerms.of(pose(softcap=softcap))
    factor, cap = terms.scales
    product = 3.0
    score = 0.125 * product
    if softcap:
        found = cap - 2 * cap / (1 + 2 ** (product * factor))
        assert found == pytest.approx(softcap * math.tanh(score / softcap) * math.log2(math.e))
    else:
        assert product * factor == pytest.approx(score * math.log2(math.e))


@pytest.mark.parametrize("threshold", [1, 6554, 32768, 65535])
def test_the_threshold_is_the_upper_half_of_a_word(threshold: int) -> None:
    word, _ = hopper_plan.ScoreTerms.of(pose(threshold=threshold)).dropout
    assert word & 0xFFFFFFFF == threshold << 16
    assert -(2**31) <= word < 2**31


@pytest.mark.parametrize(
    ("shape", "band", "cohort"),
    [
        ((4, 16, 4096, 128), None, 1),
        ((4, 16, 4096, 128), Band(None, 0), 16),  # 2 MiB of keys and values each
        ((1, 1, 65536, 128), Band(None, 0), 1),
        ((1, 24, 1024, 128), Band(None, 0), 24),  # few tiles, dealt out
    ],
)
def test_heads_side_by_side_fit_into_the_cache(
    shape: tuple[int, int, int, int],
    band: Band | None,
    cohort: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper_plan, "_forward_kernel", lambda special, device: RecordedKernel())
    problem = pose(shape, band=band)._replace(device=torch.device("cuda", 0))
    rows, keys, heads, group, planes, found, low, high = hopper_plan.plan_forward(
        problem, PROCESSORS
    ).work
    assert (rows, keys, heads, group) == (shape[2], shape[2], shape[1], 1)
    assert (planes, found) == (shape[0] * shape[1], cohort)
    assert (low < -shape[2], high) == (True, 0 if band else 2**30)


def numbered(*shape: int) -> Tensors:
    """Operands on the CPU, whose memory is never read; the key lies as [B, S, H, D]."""
    query, key, value = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(3))
    return Tensors(query, key.transpose(1, 2).contiguous().transpose(1, 2), value)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> RecordedKernel:
    """In the place of every forward."""
    recorded = RecordedKernel()
    monkeypatch.setattr(hopper_plan, "_forward_kernel", lambda special, device: recorded)
    monkeypatch.setattr(hopper_plan, "index_of", lambda device: 0)
    return recorded


@pytest.mark.parametrize("wanted", [False, True])
def test_a_forward_is_launched_with_its_tensors(wanted: bool, kernel: RecordedKernel) -> None:
    """Those of each call: descriptors in order, then lse, and 0 for what is not there."""
    calls = [numbered(2, 4, 256, 64), numbered(2, 4, 256, 64)]
    plan = hopper_plan.plan_forward(describe(calls[0], Options(0.125), lse=wanted), PROCESSORS)
    assert plan.special.lse == wanted
    for n in (0, 1, 0):
        tensors = calls[n]
        out, lse = plan.run(None, tensors)
        launched = kernel.launches.pop()
        for place, tensor in enumerate((*tensors[:3], out)):
            found = launched[3 * place : 3 * place + 3]
            assert found == (place, tensor.data_ptr(), tensor.stride())
        assert lse.shape == ((2, 4, 256) if wanted else (0,))
        assert launched[12:14] == (lse.data_ptr() if wanted else 0, 0)
        assert launched[14:22] == plan.work
        assert launched[22:] == plan.terms.arguments(None, None)


@pytest.mark.parametrize("other", ["mask", "seed", "counter"])
def test_a_forward_is_launched_with_its_further_tensors(other: str, kernel: RecordedKernel) -> None:
    tensors, processors = numbered(2, 4, 256, 64), PROCESSORS
    threshold, tiles = 0, 0
    if other == "mask":
        tensors = tensors._replace(mask=torch.empty(2, 1, 256, 256, dtype=BF16))
        tiles = 2
    elif other == "seed":
        tensors, threshold = tensors._replace(seed=torch.empty(2, dtype=torch.int32)), 6000
    else:
        processors = 2
    plan = hopper_plan.plan_forward(
        describe(tensors, Options(0.125, threshold=threshold)), processors
    )
    plan.run(None, tensors)
    (launched,) = kernel.launches
    assert plan.special.dynamic == (other == "counter")
    assert launched[12] == 0
    assert (launched[13] != 0) == (other == "counter")
    mask, seed = launched[24 : 25 + tiles], launched[28 + tiles]
    assert mask == ((4, tensors.mask.data_ptr(), (65536, 256, 256, 1)) if tiles else (0,))
    assert seed == (tensors.seed.data_ptr() if other == "seed" else 0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backward_is_launched_with_its_tensors(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = hopper_plan._Kernels(RecordedKernel(), RecordedKernel(), RecordedKernel())
    monkeypatch.setattr(hopper_plan, "_backward_kernels", lambda special, device: kernels)
    monkeypatch.setattr(hopper_plan, "index_of", lambda device: 0)
    tensors = numbered(2, 2, 2048, 64)
    grad_out = torch.empty(2, 2048, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    problem = describe(tensors, Options(0.125), stage="backward", grad_out=grad_out, grad=True)
    problem = problem._replace(deterministic=deterministic)
    saved = Saved(torch.empty_like(tensors.query), torch.empty(2, 2, 2048))
    kind = BackwardKind(problem, saved.out.stride(), saved.lse.stride(), None)
    plan = hopper_plan.plan_backward(kind, Setting(GPU))
    grads = plan.run(None, tensors, saved, Upstream(grad_out, None))
    statistics, keys, last = (kernel.launches[0] for kernel in kernels)

    assert statistics[:4] == (
        *(saved.out.data_ptr(), grad_out.data_ptr()),
        *(saved.lse.data_ptr(), saved.lse.data_ptr()),
    )
    assert statistics[14:20] == (*saved.out.stride()[:3], *grad_out.stride()[:3])
    for place, tensor in enumerate((*tensors[:3], grad_out)):
        assert keys[3 * place : 3 * place + 3] == (place, tensor.data_ptr(), tensor.stride())
    lse, delta = statistics[4:6]
    assert [keys[13], keys[16]] == [lse, delta]
    assert keys[18:21] == (6, grads.key.data_ptr(), grads.key.stride())
    assert keys[21:24] == (7, grads.value.data_ptr(), grads.value.stride())
    if deterministic:
        assert last[12:15] == (4, grads.query.data_ptr(), grads.query.stride())
        assert last[15:19] == (lse, lse, delta, 0)
        assert keys[29:34] == (0, 64, 1, 0, 0)
    else:
        sums, further, count = *statistics[6:8], statistics[13]
        shared = 64 * (2 * 128 * 64 + hopper_plan.COUNTER)
        assert (further - sums, count) == (4 * 4 * 2048 * 64, shared + 4 + 4)
        assert (keys[25], keys[29:34]) == (sums, (further, 0, 2, 60, sums))
        assert keys[34:38] == (grads.query.data_ptr(), *grads.query.stride()[:3])
        finished, taken = further + 4 * shared, further + 4 * (shared + 4)
        assert keys[38:42] == (finished, taken, plan.lag, 64)
        assert last[:3] == (sums, taken, grads.query.data_ptr())
        assert last[-3:] == grads.query.stride()[:3]


class RecordedRuntime:
    """Fills the statistics of rows with what tells them apart; keeps the steps."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def launch(self, step: Any, *tensors: Any) -> None:
        self.steps.append(step.specialisation.kernel.partition(".")[2])
        if self.steps[-1] == "attention_rows":
            for number, statistic in enumerate(tensors[-3:]):
                statistic.fill_(10.0 + number)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_backward_with_an_added_mask(
    offset: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics by the general kernel, padded so that rows past the end weigh nothing."""
    by_special: dict[Any, Any] = {}

    def kernels_of(special: Any, device: torch.device) -> Any:
        new = hopper_plan._Kernels(RecordedKernel(), RecordedKernel(), RecordedKernel())
        return by_special.setdefault(special, new)

    kept: list[torch.Tensor] = []

    def padded(plan: hopper_plan.BackwardPlan, known: torch.Tensor, filling: float) -> torch.Tensor:
        kept.append(pad(plan, known, filling))
        return kept[-1]

    pad = hopper_plan.BackwardPlan._padded
    monkeypatch.setattr(hopper_plan.BackwardPlan, "_padded", padded)
    monkeypatch.setattr(hopper_plan, "_backward_kernels", kernels_of)
    monkeypatch.setattr(hopper_plan, "index_of", lambda device: 0)
    query, key, value, _, _ = numbered(2, 4, 200, 64)
    mask = torch.empty(2, 1, 200, 208, dtype=BF16)[..., offset : offset + 200]
    tensors, grad_out = Tensors(query, key, value, mask), torch.empty_like(query)
    problem = describe(
        tensors, Options(0.125), stage="backward", grad_out=grad_out, grad=True, mask_grad=True
    )
    problem = problem._replace(deterministic=deterministic)
    assert codes(problem) == []
    saved = Saved(torch.empty_like(query), torch.empty(2, 4, 200))
    kind = BackwardKind(problem, saved.out.stride(), saved.lse.stride(), None)
    plan = hopper_plan.plan_backward(kind, Setting(GPU))
    runtime = RecordedRuntime()
    grads = plan.run(runtime, tensors, saved, Upstream(grad_out, None))

    assert runtime.steps == ["attention_rows", "attention_grad_mask"]
    assert grads.mask.shape == mask.shape
    lse, delta, spare = kept
    for statistic, number, filling in ((lse, 10.0, math.inf), (delta, 11.0, 0.0), (spare, 12.0, 0)):
        assert statistic.shape == (2, 4, 256)
        assert bool((statistic[..., :200] == number).all())
        assert bool((statistic[..., 200:] == filling).all())
    used = [(special, kernels) for special, kernels in by_special.items() if kernels.keys.launches]
    ((special, kernels),) = used
    assert special.mask_tiles == (offset == 0)
    assert kernels.statistics.launches == []
    keys, last = kernels.keys.launches[0], kernels.last.launches[0]
    assert (keys[13], keys[16]) == (lse.data_ptr(), delta.data_ptr())
    assert keys[27:29] == (spare.data_ptr(), 256)
    masked = keys[52:55] if offset == 0 else keys[52:53]
    assert masked[0] == (9 if offset == 0 else mask.data_ptr())
    assert offset or masked[1:] == (mask.data_ptr(), (200 * 208, 200, 208, 1))
    if deterministic:
        assert last[15:18] == (lse.data_ptr(), spare.data_ptr(), delta.data_ptr())

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from orchard.testing import cpu_targets, targets
from orchard.testing.benchmark import Case, Row, Side, Spread, Status
from orchard.testing.footprint import Footprint
from orchard.testing.targets import Finding, Point, Target, cells, measure_case

pytestmark = pytest.mark.cli

TINY = Case("tiny", batch=1, heads=2, kv_heads=2, rows=8, keys=8, dim=8, value_dim=8)
RATIO = Target("work", 2.0, 4.0, (TINY,))


def _point(value: float | None, ours: Status = "ok", theirs: Status = "ok", **more: float) -> Point:
    row = Row(TINY, Side(ours), Side(theirs), None, 0, {}, ())
    return Point(row, None if value is None else Spread(value - 0.5, value, value + 0.5), **more)


def _finding(target: Target, *values: float) -> Finding:
    return Finding(target, tuple(_point(value) for value in values))


def test_found_is_the_geometric_mean_of_the_medians() -> None:
    finding = _finding(RATIO, 2.0, 8.0, 4.0)
    assert finding.found == pytest.approx(4.0)
    assert finding.range == (2.0, 8.0)
    assert finding.status == "ok"


def test_the_range_of_one_case_is_that_of_its_rounds() -> None:
    assert _finding(RATIO, 3.0).range == (2.5, 3.5)


@pytest.mark.parametrize(
    ("values", "met"),
    [([1.99], "no"), ([2.0], "must"), ([1.0, 4.0], "must"), ([3.99], "must"), ([4.0], "aim")],
)
def test_what_is_met(values: list[float], met: str) -> None:
    assert _finding(RATIO, *values).met == met


@pytest.mark.parametrize(("megabytes", "met"), [(65.0, "no"), (64.0, "must"), (16.0, "aim")])
def test_of_memory_less_is_better(megabytes: float, met: str) -> None:
    target = Target("memory", 64.0, 16.0, (TINY,), "memory")
    assert _finding(target, megabytes).met == met
    assert _finding(target, 20.0, 10.0).range == (20.0, 10.0)


@pytest.mark.parametrize(("value", "share", "met"), [(5.0, 0.7, "must"), (5.0, 0.8, "aim")])
def test_an_aim_that_also_asks_for_bandwidth(value: float, share: float, met: str) -> None:
    target = replace(RATIO, kind="decode", copy_share=0.8)
    finding = Finding(target, (_point(value, bandwidth=3.14e10, copy_share=share),))
    assert finding.met == met
    shown = cells(finding.summary())
    assert shown[1] == f"5.00x, 31.4 GB/s, {share:.0%} of a copy"
    assert shown[4:] == ["4x, 80% of a copy", met]


def test_a_must_that_also_asks_for_bandwidth() -> None:
    target = replace(RATIO, kind="decode", copy_share=0.9, must_copy_share=0.75)
    for share, met in ((0.74, "no"), (0.75, "must"), (0.9, "aim")):
        finding = Finding(target, (_point(5.0, bandwidth=1e12, copy_share=share),))
        assert finding.met == met
    assert cells(finding.summary())[3:5] == ["2x, 75% of a copy", "4x, 90% of a copy"]


@pytest.mark.parametrize(
    ("values", "met"), [([1.7, 9.0], "no"), ([1.8, 2.3], "must"), ([1.8, 20.0], "aim")]
)
def test_what_the_worst_case_must_reach(values: list[float], met: str) -> None:
    target = replace(RATIO, worst=1.8)
    assert _finding(target, *values).met == met
    assert cells(_finding(target, *values).summary())[3] == "2x, worst 1.8x"


def test_the_worst_of_what_should_be_little_is_the_largest() -> None:
    target = Target("host", 45.0, 25.0, (TINY,), "host_time", worst=50.0)
    assert _finding(target, 30.0, 51.0).met == "no"
    finding = _finding(target, 30.0, 49.0)
    assert (finding.met, finding.range) == ("must", (49.0, 30.0))
    assert cells(finding.summary())[1:4] == ["38.3 us", "49.0 us to 30.0 us", "45 us, worst 50 us"]
    assert _finding(target, 20.0, 24.0).met == "aim"


def test_a_target_without_an_aim_or_without_any_limit() -> None:
    assert _finding(replace(RATIO, aim=None), 100.0).met == "must"
    free = _finding(replace(RATIO, must=None, aim=None), 0.1)
    assert (free.met, cells(free.summary())[3:]) == ("-", ["-", "-", "-"])
    lost = Finding(free.target, (_point(None, "failed"),))
    assert lost.met == "no"


def test_peers_are_named_and_counted() -> None:
    def point(peer: str) -> Point:
        measured = _point(2.0)
        row = replace(measured.row, peer=peer, ratio=measured.value)
        return replace(measured, row=row)

    several = Finding(RATIO, (point("cudnn"), point("flash"), point("cudnn")))
    assert several.summary()["peers"] == {"cudnn": 2, "flash": 1}
    assert cells(several.summary())[1] == "2.00x (cudnn 2, flash 1)"
    assert cells(Finding(RATIO, (point("flex"),)).summary())[1] == "2.00x (flex)"
    assert cells(Finding(RATIO, (point("torch"),)).summary())[1] == "2.00x"


@pytest.mark.parametrize("status", ["not served", "failed", "WRONG"])
def test_a_case_of_ours_without_a_number_takes_the_row_with_it(status: Status) -> None:
    finding = Finding(RATIO, (_point(9.0), _point(None, status)))
    assert (finding.status, finding.found, finding.range, finding.met) == (status, None, None, "no")
    assert cells(finding.summary()) == ["work", status, "-", "2x", "4x", "no"]


def test_wrong_is_said_first() -> None:
    assert Finding(RATIO, (_point(None, "not served"), _point(None, "WRONG"))).status == "WRONG"


def test_a_case_without_a_peer_is_left_out_and_counted() -> None:
    without = _point(None, "ok", "over budget")
    finding = Finding(RATIO, (_point(2.0), _point(8.0), without))
    assert finding.found == pytest.approx(4.0)
    assert cells(finding.summary())[1] == "4.00x (2 of 3 cases)"
    alone = Finding(RATIO, (without,))
    assert (alone.found, alone.status, alone.met) == (None, "torch over budget", "no")


def test_cells() -> None:
    share = Target("share", 0.85, 0.95, (TINY,), "matmul")
    memory = Target("memory", 64.0, 16.0, (TINY,), "memory")
    assert cells(_finding(RATIO, 1.0, 16.0).summary()) == [
        "work",
        "4.00x",
        "1.00x to 16.0x",
        "2x",
        "4x",
        "aim",
    ]
    assert cells(_finding(share, 0.9).summary())[1:5] == ["0.90", "0.40 to 1.40", "0.85", "0.95"]
    constant = Finding(memory, (replace(_point(0.0), value=Spread(23.0, 23.0, 23.0)),))
    assert cells(constant.summary())[1:] == ["23.0 MB", "-", "64 MB", "16 MB", "must"]


def test_the_table_of_the_cpu() -> None:
    table = cpu_targets.cpu()
    assert [(target.work, target.must, target.aim) for target in table] == [
        ("bf16 forward", 1.8, 2.3),
        ("fp16 forward", 1.6, 2.0),
        ("fp32 forward", 1.02, 1.15),
        ("bf16 forward+backward", 1.3, 1.7),
        ("fp16 forward+backward", 6.0, 9.0),
        ("fp32 forward+backward", 1.02, 1.15),
        ("dropout 0.1, forward+backward, bf16", 4.0, 7.0),
        ("dropout 0.1, forward+backward, fp16", 4.0, 7.0),
        ("dropout 0.1, forward+backward, fp32", 4.0, 7.0),
        ("last dimension strided, forward", 3.0, 5.0),
        ("Dv != D, forward+backward", 2.0, 4.0),
        ("additive mask with gradient, forward+backward", 2.0, 4.0),
        ("decode: Sq 1, Sk 4096, 32 heads, D 128, bf16", 2.5, 3.3),
        ("1x12x77x64, fp32", 1.0, 1.3),
        ("1x12x77x64, bf16", 1.0, 1.3),
        ("share of torch's matmul rate, D 128, S 2048, full, fp32", 0.85, 0.95),
        ("share of torch's matmul rate, D 128, S 2048, full, bf16", 0.6, 0.8),
        ("extra memory of forward+backward, B1 H8 S16384 D64, fp32", 64.0, 16.0),
    ]
    names = [case.name for target in table for case in target.cases]
    assert len(set(names)) == len(names)
    by_work = {target.work: target for target in table}
    plain = by_work["bf16 forward"].cases
    grid = {(case.rows, case.dim, case.causal) for case in plain}
    assert grid == set(product((512, 1024, 2048, 4096), (64, 128), (False, True)))
    assert {(case.batch, case.heads, case.dtype) for case in plain} == {(1, 8, torch.bfloat16)}
    half = {(case.rows, case.dim, case.causal) for case in by_work["fp16 forward+backward"].cases}
    assert grid - half == {(4096, 64, False), (4096, 128, False)}


def test_what_the_rows_of_the_cpu_ask_for() -> None:
    for target in cpu_targets.cpu():
        for case in target.cases:
            assert case.backward == ("backward" in target.work), target.work
            assert (case.dropout_p == 0.1) == ("dropout" in target.work)
            assert (case.views[0] == "last_strided") == ("strided" in target.work)
            assert (case.value_dim != case.dim) == ("Dv" in target.work)
            assert case.mask_grad == ("mask" in target.work)
            assert (case.grad_rows is not None) == (target.kind == "memory")
            assert case.rows == case.keys or target.kind == "decode"


def test_bytes_moved() -> None:
    case = replace(TINY, heads=4, rows=1, keys=16, value_dim=24, dtype=torch.bfloat16)
    assert targets.bytes_moved(case) == 2 * (4 * (8 + 24) + 2 * 16 * (8 + 24))


def test_a_ratio_is_measured_without_memory() -> None:
    point = measure_case(RATIO, replace(TINY, backward=True), "auto", 0.001)
    assert point.status == "ok"
    assert point.value == point.row.ratio
    assert point.value is not None
    assert point.row.ours.peak_bytes is None


def test_a_share_of_the_matmul_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "MATMUL_SIZE", 16)
    target = Target("share", 0.5, 0.9, (TINY,), "matmul")
    point = measure_case(target, TINY, "auto", 0.001)
    ratio = point.row.beside["matmul"].ratio
    assert point.value is not None
    # Our rate over the product's: their time over ours, times our operations over theirs.
    assert point.value.p50 == pytest.approx(ratio.p50 * (4 * 2 * 8 * 8 * 8) / (2 * 16**3))


def test_decode_beside_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "COPY_BYTES", 1000)
    target = Target("decode", 1.0, 2.0, (TINY,), "decode", copy_share=0.8)
    case = replace(TINY, rows=1)
    point = measure_case(target, case, "auto", 0.001)
    moved = targets.bytes_moved(case)
    assert point.value == point.row.ratio
    assert point.row.ours.seconds is not None
    assert point.bandwidth == pytest.approx(moved / point.row.ours.seconds.p50)
    ratio = point.row.beside["copy"].ratio
    assert point.copy_share == pytest.approx(ratio.p50 * moved / 2000)


def test_a_layout_beside_contiguous_operands() -> None:
    target = Target("layout", 0.9, 1.0, (TINY,), "layout")
    point = measure_case(target, replace(TINY, views=("bshd",) * 3), "auto", 0.001)
    assert point.status == "ok"
    assert point.value == point.row.beside["contiguous"].ratio


def test_one_fp32_gradient_of_the_query_may_be_no_extra_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def used(case: Case, backend: str, device: torch.device) -> Footprint:
        return Footprint(_point(1.0).row, 5_000_000)

    monkeypatch.setattr(targets, "footprint", used)
    target = Target("memory", 64.0, None, (TINY,), "memory")
    case = replace(TINY, rows=10_000)
    for fp32_dq, megabytes in ((False, 5.0), (True, 5.0 - 4 * 2 * 10_000 * 8 / 1e6)):
        point = measure_case(replace(target, fp32_dq=fp32_dq), case, "auto", 0.001)
        assert point.value is not None
        assert point.value.p50 == pytest.approx(megabytes)


def test_memory_is_measured_in_megabytes() -> None:
    target = Target("memory", 64.0, 16.0, (TINY,), "memory")
    point = measure_case(target, replace(TINY, backward=True), "reference", 0.001)
    assert point.value is not None
    assert 0 <= point.value.p50 < 1000
    assert point.row.ours.check is not None


def test_what_is_not_served_has_no_number() -> None:
    for kind in ("ratio", "decode", "matmul", "memory"):
        target = Target("work", 1.0, 2.0, (TINY,), kind)
        point = measure_case(target, replace(TINY, dropout_p=0.5), "aten", 0.001)
        assert (point.status, point.value, point.copy_share) == ("not served", None, None)

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat

import pytest
import torch

from orchard.attention.api import attention, explain
from orchard.attention.problem import Band
from orchard.testing import benchmark
from orchard.testing.benchmark import Case, NoPeerError, Peer, Spread, Step, measure
from orchard.testing.presets import PRESETS

pytestmark = pytest.mark.cli

CPU = torch.device("cpu")
TINY = Case("tiny", batch=2, heads=4, kv_heads=2, rows=9, keys=17, dim=8, value_dim=8)
STRIDED = ("bshd", "last_strided", "heads_expanded")
VARIANTS = [
    pytest.param(case, id=name)
    for name, case in {
        "full": TINY,
        "causal": replace(TINY, causal=True, backward=True),
        "bottom_right": replace(TINY, causal="bottom_right"),
        "window": replace(TINY, window=(3, 2)),
        "padding": replace(TINY, mask="padding", backward=True),
        "bias": replace(TINY, mask="bias", mask_grad=True, backward=True),
        "bias, causal": replace(TINY, mask="bias", mask_grad=True, causal=True, backward=True),
        "padding, window": replace(TINY, mask="padding", window=(3, 2), backward=True),
        "batch bias": replace(TINY, mask="batch_bias", mask_grad=True, backward=True),
        "backward alone": replace(TINY, causal=True, backward=True, backward_only=True),
        "deterministic": replace(TINY, backward=True, backward_only=True, deterministic=True),
        "grad_rows": replace(TINY, grad_rows=1, causal="bottom_right", backward=True),
        "dropout": replace(TINY, dropout_p=0.3, backward=True, value_dim=16),
        "strided": replace(TINY, views=STRIDED, dtype=torch.bfloat16),
    }.items()
]


def test_flops_of_known_problems() -> None:
    full = Case("", batch=2, heads=4, kv_heads=4, rows=16, keys=32, dim=8, value_dim=8)
    assert benchmark.flops(full) == 4 * 2 * 4 * 16 * 32 * 8
    assert benchmark.flops(replace(full, kv_heads=1)) == benchmark.flops(full)
    assert benchmark.flops(replace(full, value_dim=24)) == 2 * benchmark.flops(full)
    trained = replace(full, backward=True)
    assert benchmark.flops(trained) == 3.5 * benchmark.flops(full)
    assert benchmark.flops(replace(trained, backward_only=True)) == 2.5 * benchmark.flops(full)


def test_flops_of_bands() -> None:
    square = Case("", batch=1, heads=1, kv_heads=1, rows=16, keys=16, dim=1, value_dim=1)
    assert benchmark.flops(replace(square, causal=True)) == benchmark.flops(square) / 2
    # One row below a bottom-right diagonal sees every key; three rows leave out 0, 1 and 2.
    assert benchmark.flops(replace(square, rows=1, causal="bottom_right")) == 4 * 16
    assert benchmark.flops(replace(square, rows=3, causal="bottom_right")) == 4 * (16 + 15 + 14)
    # A window of two keys: the first row sees one.
    assert benchmark.flops(replace(square, window=(1, 0), causal=True)) == 4 * (1 + 15 * 2)


def test_percentiles_of_known_samples() -> None:
    assert benchmark.spread([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]) == Spread(2.0, 3.5, 5.0)
    assert benchmark.spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_the_ratio_is_paired_by_round() -> None:
    """Rounds twice as slow for both leave the ratio alone, which a ratio of medians would not."""
    ours, theirs = [1.0, 2.0, 1.0, 8.0], [3.0, 6.0, 3.0, 24.0]
    assert benchmark.paired_ratio(ours, theirs) == Spread(3.0, 3.0, 3.0)


def test_rounds_alternate_who_goes_first() -> None:
    calls: list[str] = []

    def recorder(name: str, value: float) -> Callable[[], float]:
        def sample() -> float:
            calls.append(name)
            return value

        return sample

    samples = benchmark.interleave([recorder("a", 1.0), recorder("b", 2.0)], 0.0, fewest=3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert samples == [[1.0] * 3, [2.0] * 3]


def test_a_sampler_warms_up_and_then_repeats_short_calls() -> None:
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1

    sample = benchmark.sampler(step, CPU)
    assert calls == 3
    assert sample() > 0
    assert calls > 3 + 10


def test_a_long_call_that_was_made_already_is_the_warm_up() -> None:
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1

    sample = benchmark.sampler(step, CPU, known=benchmark.LONG_CALL)
    assert calls == 0
    sample()
    assert calls == 1


def test_a_call_of_some_length_is_warmed_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "LONG_CALL", 0.01)
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.0015)

    sample = benchmark.sampler(step, CPU)
    assert calls == 1
    sample()
    assert calls == 2


@pytest.mark.parametrize(
    ("seconds", "rounds"), [(0.0, 4), (1.25, 4), (1.5, 3), (2.0, 2), (60.0, 2)]
)
def test_long_rounds_are_fewer(seconds: float, rounds: int) -> None:
    assert benchmark.fewest_rounds(seconds) == rounds


@pytest.mark.parametrize("case", VARIANTS)
def test_both_sides_compute_the_case(case: Case) -> None:
    """Also that torch is called so that it computes the same: it is held to the same budget."""
    row = measure(case, CPU, seconds=0.001)
    assert (row.ours.status, row.torch.status) == ("ok", "ok"), (row.ours.note, row.torch.note)
    assert row.ratio is not None
    assert row.ratio.p20 <= row.ratio.p50 <= row.ratio.p80
    assert row.rounds >= benchmark.FEWEST_ROUNDS
    assert (row.torch.check is None) == bool(case.dropout_p)
    assert set(row.served) == {"forward", "backward"} if case.backward else {"forward"}
    assert row.kernels
    judged = {comparison.name for comparison in row.ours.check.comparisons}
    grads = {"grad_query", "grad_key", "grad_value"} | ({"grad_mask"} if case.mask_grad else set())
    assert judged == {"out"} | (grads if case.backward else set())
    for side in (row.ours, row.torch):
        assert side.peak_bytes is not None
        assert side.peak_bytes > 0
        assert side.gflops == pytest.approx(benchmark.flops(case) / side.seconds.p50 / 1e9)


def test_something_else_takes_its_turn_in_the_same_rounds() -> None:
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.003)

    row = measure(TINY, CPU, seconds=0.001, peaks=False, beside={"sleep": step})
    assert calls == 3 + row.rounds
    found = row.beside["sleep"]
    assert found.seconds.p20 >= 0.003
    assert found.ratio.p20 <= found.ratio.p50 <= found.ratio.p80
    assert row.ratio is not None
    assert (row.ours.peak_bytes, row.torch.peak_bytes) == (None, None)


def _slow(case: Case, operands: benchmark.Operands) -> torch.Tensor:
    time.sleep(0.01)
    return benchmark.torch_attention(case, operands)


def _unable(case: Case, operands: benchmark.Operands) -> torch.Tensor:
    raise RuntimeError("takes no such case")


def _wrong(case: Case, operands: benchmark.Operands) -> torch.Tensor:
    return benchmark.torch_attention(case, operands) + 1.0


def test_the_fastest_peer_is_counted_and_named() -> None:
    """Peers that are wrong or do not take the case have no speed, and say so."""
    settings: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        settings.append("in")
        yield
        settings.append("out")

    peers = {
        "slow": Peer(_slow, setting=noted),
        "fast": benchmark.TORCH,
        "wrong": Peer(_wrong),
        "unable": Peer(_unable),
    }
    row = measure(replace(TINY, backward=True), CPU, seconds=0.001, peers=peers)
    assert row.peer == "fast"
    assert {name: side.status for name, side in row.peers.items()} == {
        "slow": "ok",
        "fast": "ok",
        "wrong": "over budget",
        "unable": "failed",
    }
    assert row.torch is row.peers["fast"]
    assert row.peers["slow"].seconds is not None
    assert row.peers["slow"].seconds.p20 >= 0.01
    assert row.peers["slow"].check is not None
    assert row.peers["wrong"].seconds is None
    assert "takes no such case" in row.peers["unable"].note
    assert row.beside == {}
    assert row.ratios.keys() == {"slow", "fast"}
    # In its setting: a first call, a warm-up, the first rounds, and the look at memory.
    assert settings == ["in", "out"] * (3 + benchmark.FIRST_ROUNDS)


def test_rivals_take_part_in_every_round() -> None:
    """A peer as fast as the fastest does, one that is left behind is compared in its own rounds."""
    times = iter((1.0, 2.0, 2.0 * benchmark.RIVAL, 9.0))  # ours, then the peers

    def sampling(step: Step, device: torch.device, known: float) -> Callable[[], float]:
        return partial(next, repeat(next(times)))

    peers = dict.fromkeys(("fast", "close", "slow"), benchmark.TORCH)
    row = measure(TINY, CPU, seconds=0.001, peers=peers, peaks=False, sampling=sampling)
    assert row.peer == "fast"
    assert row.rounds > benchmark.FIRST_ROUNDS
    assert {name: ratio.p50 for name, ratio in row.ratios.items()} == {
        "fast": 2.0,
        "close": 2.0 * benchmark.RIVAL,
        "slow": 9.0,
    }


def test_without_a_peer_there_is_no_ratio() -> None:
    row = measure(TINY, CPU, seconds=0.001, peers={"unable": Peer(_unable)})
    assert (row.peer, row.torch.status, row.ratio) == ("unable", "failed", None)
    assert row.ours.seconds is not None
    alone = measure(TINY, CPU, seconds=0.001, peers={})
    assert (alone.torch.status, alone.ratio, alone.peers) == ("not measured", None, {})


def test_a_peer_that_cannot_be_sampled_leaves_the_others() -> None:
    def sampling(step: Step, device: torch.device, known: float) -> Callable[[], float]:
        if calls:
            raise RuntimeError("cannot be recorded")
        calls.append(step)
        return lambda: 1.0

    calls: list[Step] = []
    row = measure(TINY, CPU, seconds=0.001, sampling=sampling)
    assert row.ours.seconds == Spread(1.0, 1.0, 1.0)
    assert (row.torch.status, row.ratio) == ("failed", None)
    assert "cannot be recorded" in row.torch.note
    row = measure(TINY, CPU, seconds=0.001, sampling=sampling)
    assert (row.ours.status, row.rounds) == ("failed", 0)


def test_a_backward_alone_makes_its_forward_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = 0

    def counted(*args: object, **options: object) -> torch.Tensor:
        nonlocal forwards
        forwards += 1
        return attention(*args, **options)

    monkeypatch.setattr(benchmark, "attention", counted)
    row = measure(replace(TINY, backward=True, backward_only=True), CPU, seconds=0.001)
    assert forwards == 2  # one that is checked, one before the timing
    assert row.rounds >= benchmark.FEWEST_ROUNDS
    assert row.ours.check is not None
    assert len(row.ours.check.comparisons) == 4


def test_determinism_is_asked_for_around_orchard_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[bool]] = {"ours": set(), "torch": set()}

    def ours(*args: object, **options: object) -> torch.Tensor:
        asked["ours"].add(torch.are_deterministic_algorithms_enabled())
        return attention(*args, **options)

    def theirs(case: Case, operands: benchmark.Operands) -> torch.Tensor:
        asked["torch"].add(torch.are_deterministic_algorithms_enabled())
        return right(case, operands)

    right = benchmark.torch_attention
    monkeypatch.setattr(benchmark, "attention", ours)
    monkeypatch.setattr(benchmark, "torch_attention", theirs)
    measure(replace(TINY, deterministic=True), CPU, seconds=0.001)
    assert asked == {"ours": {True}, "torch": {False}}
    assert not torch.are_deterministic_algorithms_enabled()


def test_softcap_is_checked_though_torch_has_none() -> None:
    row = measure(replace(TINY, softcap=1.5, backward=True), CPU, seconds=0.001)
    assert (row.ours.status, row.torch.status) == ("ok", "failed")
    assert "no softcap" in row.torch.note


def test_a_wrong_result_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object, **options: object) -> torch.Tensor:
        return attention(*args, **options) * 1.01

    monkeypatch.setattr(benchmark, "attention", wrong)
    row = measure(TINY, CPU, seconds=0.001)
    assert row.ours.status == "WRONG"
    assert "out: error" in row.ours.note
    assert not row.right
    assert (row.ours.seconds, row.ours.gflops, row.ours.peak_bytes, row.ratio) == (None,) * 4
    assert row.torch.seconds is None
    assert row.served == {"forward": explain(*_operands(TINY)).backend}


def test_a_wrong_peer_has_no_speed_and_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    right = benchmark.torch_attention
    monkeypatch.setattr(benchmark, "torch_attention", lambda *args: right(*args) + 1.0)
    row = measure(TINY, CPU, seconds=0.001)
    assert (row.ours.status, row.torch.status) == ("ok", "over budget")
    assert row.right
    assert row.ours.seconds is not None
    assert row.torch.seconds is None
    assert row.ratio is None


def test_a_peer_that_raises_leaves_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*args: object) -> None:
        raise NoPeerError("no dropout here")

    monkeypatch.setattr(benchmark, "torch_attention", unable)
    row = measure(TINY, CPU, seconds=0.001)
    assert row.torch.status == "failed"
    assert "no dropout here" in row.torch.note
    assert row.ours.seconds is not None
    assert row.ratio is None


def test_an_operand_that_is_written_to_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(query: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        out = attention(query, *args, **options)
        query[0, 0, 0, 0] += 1e-7
        return out

    monkeypatch.setattr(benchmark, "attention", careless)
    row = measure(TINY, CPU, seconds=0.001)
    assert row.ours.status == "WRONG"
    assert "written to" in row.ours.note


def test_a_backend_that_does_not_serve_is_no_failure() -> None:
    row = measure(replace(TINY, dropout_p=0.1), CPU, "aten", seconds=0.001)
    assert row.ours.status == "not served"
    assert "dropout" in row.ours.note
    assert row.right
    assert row.ratio is None


def test_what_the_oracle_can_afford() -> None:
    case = Case("", batch=2, heads=8, kv_heads=4, rows=64, keys=32)
    whole = benchmark.affordable_part(case, 2 * 8 * 64 * 32)
    assert whole.covers(case)
    assert benchmark.affordable_part(case, 5 * 64 * 32) == benchmark.Part(1, 4, 2, 64)
    assert benchmark.affordable_part(case, 32 * 32) == benchmark.Part(1, 2, 1, 16)
    # What sums over rows, or depends on their place, keeps all of them.
    for kept in (replace(case, backward=True), replace(case, dropout_p=0.1)):
        assert benchmark.affordable_part(kept, 32 * 32) == benchmark.Part(1, 2, 1, 64)
    # A gradient that comes in through a few rows depends on no others.
    few = replace(case, backward=True, grad_rows=20)
    assert benchmark.affordable_part(few, 1) == benchmark.Part(1, 2, 1, 20)
    assert benchmark.affordable_part(few, 50 * 2 * 32) == benchmark.Part(1, 2, 1, 50)
    # The gradient of a mask that every batch shares is a sum over them.
    shared = replace(case, mask="bias", mask_grad=True, backward=True)
    assert benchmark.affordable_part(shared, 1) == benchmark.Part(2, 2, 1, 64)
    of_heads = replace(shared, mask="batch_bias")
    assert benchmark.affordable_part(of_heads, 1) == benchmark.Part(1, 8, 4, 64)


def test_a_gradient_through_the_last_rows_only() -> None:
    """Nothing comes in elsewhere, so that a part of the rows gives whole gradients of the keys."""
    case = replace(TINY, backward=True, grad_rows=2)
    operands = benchmark.build(case, CPU)
    assert operands.intact()
    assert operands.grad_out is not None
    assert not operands.grad_out[:, :, :7].any()
    assert operands.grad_out[:, :, 7:].all()


@pytest.mark.parametrize("case", VARIANTS)
@pytest.mark.parametrize("most", [1, 2 * 9 * 17], ids=["last row", "one group"])
def test_a_part_is_judged_as_the_whole_is(
    case: Case, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right results pass on a part, and a mistake inside the part is seen."""
    monkeypatch.setattr(benchmark, "most_scores", lambda device: most)
    row = measure(case, CPU, seconds=0.001)
    assert (row.ours.status, row.torch.status) == ("ok", "ok"), (row.ours.note, row.torch.note)
    assert not row.ours.check.part.covers(case)

    def wrong(*args: object, **options: object) -> torch.Tensor:
        out = attention(*args, **options)
        last_row = torch.zeros_like(out).index_fill_(2, torch.tensor([out.shape[2] - 1]), 1.0)
        return out + last_row

    monkeypatch.setattr(benchmark, "attention", wrong)
    assert measure(case, CPU, seconds=0.001).ours.status == "WRONG"


def test_torch_is_given_a_mask_only_where_it_has_no_name_for_the_band() -> None:
    def mask(case: Case) -> torch.Tensor | None:
        return benchmark.torch_mask(case, benchmark.build(case, CPU))

    assert mask(TINY) is None
    assert mask(replace(TINY, causal=True)) is None
    small = replace(TINY, rows=2, keys=4)
    assert mask(replace(small, causal="bottom_right")).tolist() == [
        [True, True, True, False],
        [True, True, True, True],
    ]
    assert mask(replace(small, window=(0, 1))).tolist() == [
        [True, True, False, False],
        [False, True, True, False],
    ]
    assert replace(small, window=(0, 1)).band == Band(0, 1)


def test_torch_is_given_band_and_mask_in_one() -> None:
    """It refuses both at once. Where the mask is trained, so is the one that torch is given."""
    case = replace(TINY, rows=2, keys=3, mask="bias", mask_grad=True, causal=True, backward=True)
    operands = benchmark.build(case, CPU)
    peers = benchmark.for_torch(case, operands)
    assert operands.mask is not None
    assert peers.mask is not None
    hidden = torch.tensor([[False, True, True], [False, False, True]])
    assert torch.equal(peers.mask, operands.mask.masked_fill(hidden, -torch.inf))
    assert peers.mask.is_leaf
    assert peers.leaves == (*operands.leaves[:3], peers.mask)
    plain = replace(case, causal=False)
    operands = benchmark.build(plain, CPU)
    assert benchmark.for_torch(plain, operands) is operands
    padded = replace(case, mask="padding", mask_grad=False, keys=4)
    operands = benchmark.build(padded, CPU)
    mask = benchmark.for_torch(padded, operands).mask
    assert mask is not None
    assert torch.equal(mask, operands.mask & torch.ones(2, 4, dtype=torch.bool).tril())


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_named_cases_for_every_device(name: str, device: str) -> None:
    cases = PRESETS[name](torch.device(device), None)
    assert len({case.name for case in cases}) == len(cases)
    assert PRESETS[name].__doc__
    for case in cases:
        assert case.heads % case.kv_heads == 0
        assert benchmark.flops(case) > 0
    half = PRESETS[name](torch.device(device), torch.float16)
    assert {case.dtype for case in half} == {torch.float16}


def _operands(case: Case) -> tuple[torch.Tensor, ...]:
    operands = benchmark.build(case, CPU)
    return operands.query, operands.key, operands.value

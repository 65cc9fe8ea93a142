"""The table for NVIDIA GPUs: what it holds, and that every line of it can be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from orchard.attention.problem import Band
from orchard.testing import benchmark, gpu_timing, targets, torch_peers
from orchard.testing.benchmark import Case, NoPeerError, Peer
from orchard.testing.cuda_targets import RATES, cuda
from orchard.testing.targets import Target, measure_case, peers_of

pytestmark = pytest.mark.cli

CPU = torch.device("cpu")
BY_WORK = {target.work: target for target in cuda()}


def test_the_table_of_cuda() -> None:
    limits = [
        (target.work, target.must, target.worst, target.aim)
        for target in BY_WORK.values()
        if target.must is not None
    ]
    masked = "additive mask [B,1,S,S]"
    assert limits == [
        ("forward", 1.08, 1.02, 1.20),
        ("backward, fused", 1.03, 0.98, 1.12),
        ("backward, deterministic", 0.95, None, 1.03),
        ("S 1024, B16 H16, forward", 1.03, None, 1.10),
        ("B1 H24 S1024, forward, GPU time", 1.0, None, 1.15),
        ("B1 H24 S1024, forward, host time", 45.0, None, 25.0),
        ("[B, S, H, D] view against contiguous, forward", 0.94, None, 0.98),
        ("sequence contiguous, last dimension strided, forward", 10.0, None, 15.0),
        ("any other last-dimension stride, forward", 8.0, None, None),
        ("dropout 0.1, forward", 1.15, None, 1.4),
        ("dropout 0.1, forward+backward", 1.05, None, 1.4),
        (f"{masked}, forward", 1.5, None, 2.5),
        (f"{masked} with gradient, forward+backward", 1.5, None, 2.5),
        ("window 1024, S 16384, forward", 1.1, None, 1.4),
        ("window 1024, S 16384, backward", 1.1, None, 1.4),
        ("softcap, forward", 1.1, None, 1.3),
        ("softcap, backward", 1.1, None, 1.3),
        ("decode: Sq 1, Sk 16384, 32/8 heads, D 128, batch 8", 1.0, None, 1.3),
        ("fp32 forward, no TF32", 1.5, None, 2.0),
        ("extra memory, S 65536, H 16, D 128, split: deterministic", 64.0, None, None),
        ("extra memory, S 65536, H 16, D 128, fused: beyond one fp32 dQ", 64.0, None, None),
    ]
    decode = next(target for target in BY_WORK.values() if target.kind == "decode")
    assert (decode.must_copy_share, decode.copy_share) == (0.75, 0.9)
    names = [case.name for target in BY_WORK.values() for case in target.cases]
    assert len(set(names)) == len(names)


def test_what_its_rows_ask_for() -> None:
    for work, target in BY_WORK.items():
        held = target.must is not None
        for case in target.cases:
            assert case.dtype == (torch.float32 if "fp32 f" in work else torch.bfloat16)
            assert case.backward == ("backward" in work or target.kind == "memory"), work
            alone = "backward" in work and "forward+" not in work
            assert case.backward_only == alone, work
            assert case.deterministic == ("deterministic" in work)
            assert (case.dropout_p == 0.1) == ("dropout" in work)
            assert (case.mask == "batch_bias") == ("mask" in work)
            assert case.mask_grad == ("with gradient" in work)
            assert (case.softcap is not None) == ("softcap" in work)
            assert (case.band == Band(-1023, 0)) == ("window" in work)
            assert (target.against == "flex") == ("window" in work or "softcap" in work)
            assert (case.views != ("contiguous",) * 3) == ("view" in work or "stride" in work)
            assert target.fp32_dq == ("fp32 dQ" in work)
            assert held != work.startswith(RATES)
    large = {(c.rows, c.dim, c.causal) for c in BY_WORK["forward"].cases}
    assert large == set(product((4096, 16384), (64, 128), (False, True)))
    for step in ("backward, fused", "backward, deterministic"):
        assert {(c.rows, c.dim, c.causal) for c in BY_WORK[step].cases} == large
    for step in ("forward", "backward"):
        rated = BY_WORK[f"{RATES}, {step}"].cases
        assert {c.batch * c.rows for c in rated} == {16384}
        assert len(rated) == 24


def _small(case: Case) -> Case:
    """The same in a size that a CPU computes in no time."""
    group = case.heads // case.kv_heads
    rows = min(case.rows, 24)
    return replace(
        case,
        batch=2,
        heads=2 * group,
        kv_heads=2,
        rows=rows,
        keys=24,
        dim=8,
        value_dim=8,
        window=case.window and (5, 0),
        grad_rows=case.grad_rows and 4,
    )


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs a GPU is left out: graphs, queues of launches, flex_attention's compiler."""

    def uncompiled(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return function

    monkeypatch.setattr(targets, "replayed", benchmark.sampler)
    monkeypatch.setattr(targets, "enqueued", benchmark.sampler)
    monkeypatch.setattr(targets, "COPY_BYTES", 1000)
    monkeypatch.setattr(torch, "compile", uncompiled)


def _has_a_peer_on_a_cpu(target: Target, case: Case) -> bool:
    """flash without dropout and gradients of masks, and flex_attention's forward."""
    if target.against == "flex":
        return not case.backward
    return target.against == "torch" or not (case.dropout_p or case.mask_grad)


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("work", BY_WORK)
def test_every_row_is_measured(work: str) -> None:
    """In small and on the CPU: the cases compute what their peers compute, and give numbers."""
    target = BY_WORK[work]
    for case in {replace(_small(case), name="") for case in target.cases}:
        point = measure_case(target, case, "auto", 0.001, CPU)
        assert point.row.ours.status == "ok", point.row.ours.note
        judged = point.row.ours.check
        assert judged is not None
        assert len(judged.comparisons) == (1 + 3 * case.backward + case.mask_grad)
        compared = _has_a_peer_on_a_cpu(target, case)
        if target.kind == "layout":
            assert point.row.peers == {}
            assert set(point.row.beside) == {"contiguous"}
        elif target.kind != "memory" and compared:
            best = {"fused": "flash"}.get(target.against, target.against)
            assert point.row.peer == best, point.row.peers
            assert point.row.torch.check is not None
        assert (point.value is not None) == (target.kind in ("layout", "memory") or compared)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_given_the_case(cap: float | None, on_a_cpu: None) -> None:
    """It is held to the same budget."""
    case = replace(_small(BY_WORK["softcap, forward"].cases[0]), softcap=cap, kv_heads=1)
    for each in (case, replace(case, window=(3, 2), causal=False)):
        row = benchmark.measure(
            each, CPU, peers={"flex": torch_peers.flex(each, CPU)}, seconds=0.01
        )
        assert (row.peer, row.torch.status) == ("flex", "ok"), row.torch.note


def test_flex_attention_is_given_nothing_else() -> None:
    for more in ({"dropout_p": 0.1}, {"mask": "bias"}):
        with pytest.raises(NoPeerError, match="bands and softcaps only"):
            torch_peers.flex(Case("", **more), CPU)


def test_a_forced_kernel_serves_or_fails() -> None:
    """A CPU has flash of the three; who is forced does not pass the call on."""
    case = Case("", batch=1, heads=2, kv_heads=2, rows=8, keys=8, dim=8, value_dim=8)
    target = Target("", 1.0, 2.0, (case,), against="fused")
    row = benchmark.measure(case, CPU, peers=peers_of(target, case, CPU), seconds=0.001)
    assert {name: side.status for name, side in row.peers.items()} == {
        "cudnn": "failed",
        "flash": "ok",
        "efficient": "failed",
    }
    strided = replace(case, views=("last_strided",) * 3)
    row = benchmark.measure(strided, CPU, peers=peers_of(target, strided, CPU), seconds=0.001)
    assert (row.peers["flash"].status, row.ratio) == ("failed", None)
    assert isinstance(peers_of(replace(target, against="torch"), case, CPU)["torch"], Peer)


class FakeCuda:
    """In the place of torch.cuda: notes the order of what happens."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def synchronize(self, device: object) -> None:
        self.done.append("wait")


def test_the_host_does_not_wait_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    sample = gpu_timing.enqueued(lambda: fake.done.append("call"), CPU)
    calls = ["call"] * gpu_timing.QUEUED_CALLS
    assert fake.done == calls
    fake.done.clear()
    assert sample() > 0.0
    assert fake.done == ["wait", *calls, "wait"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_graph_has_every_call_in_it() -> None:
    """It is the GPU that does the work again, and the host that does not."""
    count, calls = torch.zeros((), device="cuda"), 0

    def step() -> None:
        nonlocal calls
        calls += 1
        count.add_(1.0)

    device = torch.device("cuda")
    sample = gpu_timing.replayed(step, device)
    recorded, done = calls, count.item()
    assert recorded == 2 + gpu_timing.RECORDED_CALLS
    assert sample() > 0.0
    assert calls == recorded
    assert (count.item() - done) % gpu_timing.RECORDED_CALLS == 0
    assert count.item() > done
    assert gpu_timing.enqueued(step, device)() > 0.0
    assert calls == recorded + 2 * gpu_timing.QUEUED_CALLS

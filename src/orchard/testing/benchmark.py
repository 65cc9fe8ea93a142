"""Orchard and torch side by side: cases as data, interleaved timing, correctness first."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from orchard.attention.api import Causal, attention, explain
from orchard.attention.dropout import draw_seed
from orchard.attention.problem import Band, Options, Tensors, Upstream, make_band
from orchard.dispatch.planner import AUTO, Plan
from orchard.dispatch.report import stats
from orchard.testing.budget import Comparison, Results, Standard, compare, standard
from orchard.testing.inputs import BY_NAME, Guarded, guarded
from orchard.testing.memory import peak_memory
from orchard.testing.poison import poisoned
from orchard.text import one_line

Step = Callable[[], object]
Setting = Callable[[], AbstractContextManager[object]]
Sampling = Callable[[Step, torch.device, float], Callable[[], float]]
Status = Literal["ok", "WRONG", "over budget", "not served", "failed", "not measured"]


class NoPeerError(RuntimeError):
    """Torch has nothing that computes the case; it has no number beside ours."""


SAMPLE_SECONDS = 0.002  # a sample repeats the call until it lasts about this long
CUDA_SAMPLE_SECONDS = 0.012  # shorter bursts leave a GPU time to cool down between them
FEWEST_ROUNDS = 4  # or as many as PATIENCE seconds allow, but LEAST_ROUNDS
LEAST_ROUNDS = 2
FIRST_ROUNDS = 3  # with every peer, where there are several; the rest is for rivals
RIVAL = 1.2  # times the fastest peer's time, up to which a peer is a rival
PATIENCE = 5.0
LONG_CALL = 1.0  # seconds: such a call, once it has been checked, needs no other warm-up
BACKWARD_COST = 2.5  # of a forward, by the field's convention
SEED = 7
OURS = "ours"
_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Case:
    """One problem and what is done with it, described so that it can be built on any device."""

    name: str
    batch: int = 2
    heads: int = 8
    kv_heads: int = 8
    rows: int = 512
    keys: int = 512
    dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    views: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    # bool [B,1,1,Sk], or additive [1,H,Sq,Sk] or [B,1,Sq,Sk]
    mask: Literal["padding", "bias", "batch_bias"] | None = None
    mask_grad: bool = False
    causal: Causal = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    backward: bool = False
    backward_only: bool = False  # of a backward: its forward is not timed
    deterministic: bool = False  # Orchard is asked for deterministic algorithms; its peers are not
    grad_rows: int | None = None  # the gradient that comes in is zero but for so many last rows

    @property
    def band(self) -> Band | None:
        left, right = self.window or (-1, -1)
        bottom_right = self.causal == "bottom_right"
        return make_band(left, 0 if self.causal else right, bottom_right, self.rows, self.keys)

    @property
    def step(self) -> str:
        """What is timed."""
        if not self.backward:
            return "forward"
        return "backward" if self.backward_only else "forward+backward"

    @property
    def sizes(self) -> str:
        """Batch, heads, rows and keys, head dimensions and dtype, for people."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dims = f"{self.dim}" if self.dim == self.value_dim else f"{self.dim}/{self.value_dim}"
        length = f"{self.rows}" if self.rows == self.keys else f"{self.rows}x{self.keys}"
        return f"B{self.batch} H{heads} S{length} D{dims} {_SHORT[self.dtype]}"


def flops(case: Case) -> float:
    """Operations of a step by the field's convention: only the two products, causal is half.

    Where a band is not the causal one of a square problem, the pairs inside it are counted.
    """
    band = case.band
    if band is None:
        pairs: float = case.rows * case.keys
    elif band == Band(None, 0) and case.rows == case.keys:
        pairs = case.rows * case.keys / 2
    else:
        pairs = sum(_visible(row, case.keys, band) for row in range(case.rows))
    forward = 2.0 * case.batch * case.heads * pairs * (case.dim + case.value_dim)
    costs = {"forward": 1.0, "backward": BACKWARD_COST, "forward+backward": 1.0 + BACKWARD_COST}
    return forward * costs[case.step]


def _visible(row: int, keys: int, band: Band) -> int:
    first = 0 if band.low is None else max(0, row + band.low)
    last = keys - 1 if band.high is None else min(keys - 1, row + band.high)
    return max(0, last - first + 1)


@dataclass(frozen=True)
class Operands:
    """A case's tensors on a device, each between guards."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    grad_out: Tensor | None
    leaves: tuple[Tensor, ...]
    guards: tuple[Guarded, ...]

    def intact(self) -> bool:
        return all(guard.intact() for guard in self.guards)


def build(case: Case, device: torch.device) -> Operands:
    """Operands for `case`, the same values every time; a GPU draws its own, which saves seconds."""
    source = Generator(device if device.type == "cuda" else "cpu").manual_seed(SEED)
    place = partial(guarded, dtype=case.dtype, device=device, generator=source)
    shapes = (
        (case.batch, case.heads, case.rows, case.dim),
        (case.batch, case.kv_heads, case.keys, case.dim),
        (case.batch, case.kv_heads, case.keys, case.value_dim),
    )
    guards = [place(s, BY_NAME[view]) for s, view in zip(shapes, case.views, strict=True)]
    query, key, value = (guard.tensor for guard in guards)
    leaves = [query, key, value]
    mask = None
    if case.mask == "padding":
        lengths = torch.linspace(case.keys, case.keys // 2, case.batch, device=device)
        seen = torch.arange(case.keys, device=device) < lengths.round()[:, None]
        mask = seen[:, None, None]
    elif case.mask is not None:
        planes = (1, case.heads) if case.mask == "bias" else (case.batch, 1)
        guards.append(place((*planes, case.rows, case.keys)))
        mask = guards[-1].tensor
        leaves += [mask] if case.mask_grad else []
    grad_out = None
    if case.backward:
        guards.append(place((case.batch, case.heads, case.rows, case.value_dim)))
        if case.grad_rows is not None:
            guards[-1].tensor[:, :, : case.rows - case.grad_rows] = 0.0
            guards[-1] = replace(guards[-1], before=guards[-1].buffer.clone())
        grad_out = guards[-1].tensor
        for leaf in leaves:
            leaf.requires_grad_()
    return Operands(query, key, value, mask, grad_out, tuple(leaves), tuple(guards))


def our_attention(
    case: Case, operands: Operands, backend: str, generator: Generator | None = None
) -> Tensor:
    """One call of Orchard's attention."""
    out: Tensor = attention(
        operands.query,
        operands.key,
        operands.value,
        **options_of(case, operands),
        generator=generator,
        backend=backend,
    )
    return out


def our_step(
    case: Case, operands: Operands, backend: str, generator: Generator | None = None
) -> tuple[Tensor, ...]:
    """One call of Orchard's attention: the output, and the gradients where the case wants them."""
    return _with_gradients(our_attention(case, operands, backend, generator), operands)


def torch_attention(case: Case, operands: Operands) -> Tensor:
    """The same by torch, called as its user would call it; `operands` are from `for_torch`."""
    if case.softcap is not None:
        raise NoPeerError("torch's scaled_dot_product_attention has no softcap")
    out: Tensor = F.scaled_dot_product_attention(
        operands.query,
        operands.key,
        operands.value,
        attn_mask=operands.mask,
        dropout_p=case.dropout_p,
        is_causal=case.band is not None and operands.mask is None,
        enable_gqa=case.heads != case.kv_heads,
    )
    return out


def for_torch(case: Case, operands: Operands) -> Operands:
    """The same operands with torch's mask, which is a leaf where the case's own is."""
    mask = torch_mask(case, operands)
    if mask is operands.mask or mask is None:
        return operands
    leaves = operands.leaves
    if case.mask_grad:
        mask = mask.detach().requires_grad_()
        leaves = (*leaves[:-1], mask)
    return replace(operands, mask=mask, leaves=leaves)


def torch_mask(case: Case, operands: Operands) -> Tensor | None:
    """What torch is given as a mask: the case's own, with the band where it has no name for it."""
    band = case.band
    if band is None or (band == Band(None, 0) and operands.mask is None):
        return operands.mask
    device = operands.query.device
    distance = (
        torch.arange(case.keys, device=device) - torch.arange(case.rows, device=device)[:, None]
    )
    seen = torch.ones_like(distance, dtype=torch.bool)
    if band.low is not None:
        seen &= distance >= band.low
    if band.high is not None:
        seen &= distance <= band.high
    if operands.mask is None:
        return seen
    if operands.mask.dtype == torch.bool:
        return operands.mask & seen
    return operands.mask.masked_fill(~seen, -torch.inf)


def options_of(case: Case, operands: Operands) -> dict[str, Any]:
    return {
        "mask": operands.mask,
        "causal": case.causal,
        "window": case.window,
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
    }


def _with_gradients(out: Tensor, operands: Operands) -> tuple[Tensor, ...]:
    if operands.grad_out is None:
        return (out,)
    return (out, *torch.autograd.grad(out, operands.leaves, operands.grad_out))


def as_it_is(case: Case, operands: Operands) -> Operands:
    return operands


class Peer(NamedTuple):
    """Somebody else who computes a case: from which operands, and in which setting."""

    attend: Callable[[Case, Operands], Tensor]
    adapt: Callable[[Case, Operands], Operands] = as_it_is
    setting: Setting = nullcontext


# The function is looked up when it is called.
TORCH = Peer(lambda case, operands: torch_attention(case, operands), for_torch)


@dataclass(frozen=True)
class Part:
    """What the oracle is asked about: the first batches and heads, the last rows."""

    batch: int
    heads: int
    kv_heads: int
    rows: int

    def of_query(self, tensor: Tensor) -> Tensor:
        """The part of a query, an output or a mask, whose axes of size one are left alone."""
        wanted = (self.batch, self.heads, self.rows)
        for axis, size in enumerate(wanted):
            if tensor.shape[axis] > 1:
                start = tensor.shape[axis] - size if axis == 2 else 0
                tensor = tensor.narrow(axis, start, size)
        return tensor

    def of_key(self, tensor: Tensor) -> Tensor:
        return tensor[: self.batch, : self.kv_heads]

    def covers(self, case: Case) -> bool:
        return (self.batch, self.heads, self.rows) == (case.batch, case.heads, case.rows)


def affordable_part(case: Case, most_scores: int) -> Part:
    """As much of `case` as has at most so many scores, and at least one group of heads.

    Rows are left out only where they are independent: not with dropout, and of a backward only
    those that pass no gradient on. A mask's gradient sums over every batch, or over every head.
    """
    if case.batch * case.heads * case.rows * case.keys <= most_scores:
        return Part(case.batch, case.heads, case.kv_heads, case.rows)
    group = case.heads // case.kv_heads
    batch = case.batch if case.mask_grad and case.mask == "bias" else 1
    by_group = batch * group * case.rows * case.keys
    kv_heads = min(max(most_scores // by_group, 1), case.kv_heads)
    if case.mask_grad and case.mask == "batch_bias":
        kv_heads = case.kv_heads
    rows = case.rows
    fewest = (case.grad_rows or case.rows) if case.backward else 1
    if by_group > most_scores and not case.dropout_p and not case.mask_grad:
        rows = min(max(most_scores // (group * case.keys), fewest), case.rows)
    return Part(batch, kv_heads * group, kv_heads, rows)


@dataclass(frozen=True)
class Check:
    """Results beside their budgets."""

    part: Part
    comparisons: tuple[Comparison, ...]
    complaint: str = ""

    @property
    def ok(self) -> bool:
        return not self.complaint and all(comparison.ok for comparison in self.comparisons)

    @property
    def share(self) -> float:
        """The largest share of its budget that any result uses."""
        return max((c.error / c.budget for c in self.comparisons if c.budget), default=0.0)

    def __str__(self) -> str:
        wrong = [str(comparison) for comparison in self.comparisons if not comparison.ok]
        return "; ".join([*wrong, *([self.complaint] if self.complaint else [])])


def most_scores(device: torch.device) -> int:
    """How many fp64 scores the oracle may hold in one tensor."""
    return 2**26 if device.type == "cuda" else 2**20


@dataclass(frozen=True)
class Oracle:
    """The standard of the part of a case that fp64 is affordable for."""

    part: Part
    standard: Standard
    device: torch.device


def oracle(case: Case, operands: Operands, options: Options, seed: Tensor | None) -> Oracle:
    """What the results of `case` are held to, whoever computes them."""
    device = operands.query.device
    part = affordable_part(case, most_scores(device))
    home = torch.device("cpu") if device.type == "mps" else device  # MPS has no fp64

    def ask(tensor: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
        return cut(tensor.detach()).to(home)

    mask, grad_out = operands.mask, operands.grad_out
    tensors = Tensors(
        ask(operands.query, part.of_query),
        ask(operands.key, part.of_key),
        ask(operands.value, part.of_key),
        None if mask is None else ask(mask, part.of_query),
        None if seed is None else seed.to(home),
    )
    upstream = None if grad_out is None else Upstream(ask(grad_out, part.of_query), None)
    shifted = _shifted(options, case.rows - part.rows)
    return Oracle(part, standard(tensors, shifted, upstream, mask_grad=case.mask_grad), home)


def check(judged_by: Oracle, operands: Operands, results: tuple[Tensor, ...]) -> Check:
    """Hold a step's results to their budgets."""
    part = judged_by.part
    cuts = (part.of_query, part.of_query, part.of_key, part.of_key, part.of_query)
    out, *grads = (
        cut(result.detach()).to(judged_by.device)
        for result, cut in zip(results, cuts, strict=False)
    )
    comparisons = compare(Results(out, None, *grads), judged_by.standard)
    complaint = "" if operands.intact() else "an operand or the memory around it was written to"
    return Check(part, tuple(comparisons), complaint)


def _shifted(options: Options, rows: int) -> Options:
    """The options seen from `rows` rows further down."""
    if options.band is None:
        return options
    low, high = (None if bound is None else bound + rows for bound in options.band)
    return options._replace(band=Band(low, high))


class Spread(NamedTuple):
    """Percentiles of samples."""

    p20: float
    p50: float
    p80: float


def spread(samples: Sequence[float]) -> Spread:
    levels = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    return Spread(*torch.tensor(samples, dtype=torch.float64).quantile(levels).tolist())


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """theirs / ours, round by round: above 1 ours is faster."""
    return spread([their / our for our, their in zip(ours, theirs, strict=True)])


def clock(step: Step, calls: int, device: torch.device) -> float:
    """Seconds per call of `step`, over `calls` calls in a row."""
    if device.type == "cuda":
        return _clock_on_cuda(step, calls)
    settle = torch.mps.synchronize if device.type == "mps" else _nothing
    settle()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    settle()
    return (time.perf_counter() - start) / calls


def _clock_on_cuda(step: Step, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()  # keeps the GPU at work while the first of the timed calls is enqueued
    start.record()
    for _ in range(calls):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / calls


def _nothing() -> None:
    pass


def interleave(
    samplers: Sequence[Callable[[], float]], seconds: float, fewest: int = FEWEST_ROUNDS
) -> list[list[float]]:
    """Samples of each, taken in rounds that go through them forwards and backwards in turn."""
    samples: list[list[float]] = [[] for _ in samplers]
    places = list(range(len(samplers)))
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < fewest or time.perf_counter() < end:
        for place in places if rounds % 2 == 0 else reversed(places):
            samples[place].append(samplers[place]())
        rounds += 1
    return samples


def sampler(step: Step, device: torch.device, known: float = 0.0) -> Callable[[], float]:
    """Samples of `step`, each over as many calls as a sample should last, after a warm-up.

    `known` is how long a call has taken already, if there was one: a long one was warm-up enough.
    """
    if known >= LONG_CALL:
        return partial(clock, step, 1, device)
    first = clock(step, 1, device)
    if first >= LONG_CALL / 10:
        return partial(clock, step, 1, device)
    once = min(clock(step, 1, device) for _ in range(2))
    lasting = CUDA_SAMPLE_SECONDS if device.type == "cuda" else SAMPLE_SECONDS
    calls = max(1, math.ceil(lasting / max(once, 1e-7)))
    return partial(clock, step, calls, device)


def fewest_rounds(seconds: float) -> int:
    """How many rounds there are at least, where one of them takes so many seconds."""
    return max(LEAST_ROUNDS, min(FEWEST_ROUNDS, int(PATIENCE / max(seconds, 1e-7))))


class Served(NamedTuple):
    """Calls that Orchard has served: by (stage, backend), and by kernel."""

    calls: Counter[tuple[str, str]]
    kernels: Counter[str]

    @classmethod
    def so_far(cls) -> Served:
        counted = stats()
        calls = {
            (stage, backend): n
            for stage, by_backend in counted["calls"].items()
            for backend, n in by_backend.items()
        }
        return cls(Counter(calls), Counter(counted["kernels"]))

    def since(self, before: Served) -> Served:
        return Served(self.calls - before.calls, self.kernels - before.kernels)

    def by_stage(self) -> dict[str, str]:
        """The backends of each stage; several where one gave up on the way."""
        names: dict[str, list[str]] = {}
        for stage, backend in self.calls:
            names.setdefault(stage, []).append(backend)
        return {stage: "+".join(backends) for stage, backends in names.items()}


@dataclass(frozen=True)
class Side:
    """What one of the two did with a case; a speed only where its results were right."""

    status: Status
    note: str = ""
    check: Check | None = None  # None: not judged
    seconds: Spread | None = None
    gflops: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Beside:
    """Something else that was timed in the same rounds."""

    seconds: Spread
    ratio: Spread  # its time over ours


@dataclass(frozen=True)
class Row:
    """A case measured."""

    case: Case
    ours: Side
    torch: Side
    ratio: Spread | None  # torch's time over ours
    rounds: int
    served: dict[str, str]  # stage to backend
    kernels: tuple[str, ...]  # backend/kernel
    beside: dict[str, Beside] = field(default_factory=dict)
    peer: str = "torch"  # whom `torch` and `ratio` are of: the fastest of the peers
    peers: dict[str, Side] = field(default_factory=dict)
    ratios: dict[str, Spread] = field(default_factory=dict)  # of every peer that was timed

    @property
    def right(self) -> bool:
        return self.ours.status in ("ok", "not served")


class _Attempt(NamedTuple):
    """A first call and what it came to."""

    side: Side
    seconds: float = 0.0


class _Turn(NamedTuple):
    """A step that is timed in its setting, and how long a call of it has taken already."""

    step: Step
    setting: Setting = nullcontext
    known: float = 0.0


def measure(
    case: Case,
    device: torch.device,
    backend: str = AUTO,
    seconds: float = 0.5,
    *,
    peaks: bool = True,
    beside: Mapping[str, Step] | None = None,
    peers: Mapping[str, Peer] | None = None,
    sampling: Sampling = sampler,
) -> Row:
    """Check every side of `case`, then time in turn those that are right.

    The peers are torch as its user calls it unless others are named; the fastest of them is what
    the ratio is to. Those far slower take part in the first rounds only, so that a GPU stays under
    the load of those that are compared. The steps of `beside` take their turn in every round.
    Without `peaks`, memory is left out.
    """
    operands = build(case, device)
    setting = deterministic if case.deterministic else nullcontext
    with setting():
        plan = explain(
            operands.query,
            operands.key,
            operands.value,
            backend=backend,
            **options_of(case, operands),
        )
    for stage in (plan, plan.backward):
        if stage is not None and stage.backend is None:
            unserved = Side("not served", "; ".join(_why_nobody(stage)))
            return Row(case, unserved, Side("not measured"), None, 0, {}, ())
    seed = draw_seed(device, Generator(device).manual_seed(SEED)) if case.dropout_p else None
    judged_by = oracle(case, operands, plan.problem.options, seed)
    before = Served.so_far()
    peers = {"torch": TORCH} if peers is None else peers
    given = {name: peer.adapt(case, operands) for name, peer in peers.items()}
    with setting():
        ours, our_time = _try_ours(case, operands, plan, judged_by)
    tried = {name: _try_peer(case, given[name], peer, judged_by) for name, peer in peers.items()}
    turns: dict[str, _Turn] = {}
    if ours.status == "ok":
        call = partial(our_attention, backend=backend)
        turns[OURS] = _Turn(_timed_step(case, operands, call, setting), setting, our_time)
        for name, (side, took) in tried.items():
            if side.status == "ok":
                peer = peers[name]
                step = _timed_step(case, given[name], peer.attend, peer.setting)
                turns[name] = _Turn(step, peer.setting, took)
        turns |= {name: _Turn(step) for name, step in (beside or {}).items()}
    samples, broken = _take_turns(turns, peers.keys(), device, seconds, sampling)
    served = Served.so_far().since(before)
    sides = {OURS: ours, **{name: side for name, (side, _) in tried.items()}} | broken
    for name in sides.keys() & samples.keys():
        sides[name] = _timed(sides[name], case, samples[name].own, turns[name], device, peaks)
    others = {
        name: Beside(spread(each.own), paired_ratio(each.ours, each.own))
        for name, each in samples.items()
        if name != OURS
    }
    ours = sides.pop(OURS)
    ratios = {name: others.pop(name).ratio for name in list(sides) if name in others}
    peer_name = min(ratios, key=lambda name: ratios[name].p50, default=next(iter(sides), "torch"))
    return Row(
        case,
        ours,
        sides.get(peer_name, Side("not measured")),
        ratios.get(peer_name),
        len(samples[OURS].own) if OURS in samples else 0,
        served.by_stage(),
        tuple(served.kernels),
        others,
        peer_name,
        sides,
        ratios,
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """While this lasts torch asks for deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _timed_step(
    case: Case, operands: Operands, attend: Callable[[Case, Operands], Tensor], setting: Setting
) -> Step:
    """The whole step; of a backward alone the forward is made here, once."""
    if not case.backward_only:
        return lambda: _with_gradients(attend(case, operands), operands)
    with setting():
        out = attend(case, operands)
    return lambda: torch.autograd.grad(out, operands.leaves, operands.grad_out, retain_graph=True)


class _Sampled(NamedTuple):
    """Samples of one side, and those of ours from the same rounds."""

    own: list[float]
    ours: list[float]


def _take_turns(
    turns: Mapping[str, _Turn],
    peers: Collection[str],
    device: torch.device,
    seconds: float,
    sampling: Sampling,
) -> tuple[dict[str, _Sampled], dict[str, Side]]:
    """Samples of each by name, and the sides of those that could not be sampled."""
    samplers: dict[str, Callable[[], float]] = {}
    broken: dict[str, Side] = {}
    for name, turn in turns.items():
        try:
            with turn.setting():
                samplers[name] = partial(
                    _in_setting, turn.setting, sampling(turn.step, device, turn.known)
                )
        except RuntimeError as error:
            broken[name] = Side("failed", one_line(error))
    if OURS not in samplers:
        return {}, broken
    found: dict[str, _Sampled] = {}
    rivals = set(samplers)
    if len(peers) > 1:
        found = _interleaved(samplers, 0.0, FIRST_ROUNDS)
        rivals -= _left_behind(found, peers)
    fewest = fewest_rounds(sum(turns[name].known for name in rivals))
    chosen = {name: each for name, each in samplers.items() if name in rivals}
    return found | _interleaved(chosen, seconds, fewest), broken


def _interleaved(
    samplers: Mapping[str, Callable[[], float]], seconds: float, fewest: int
) -> dict[str, _Sampled]:
    by_name = dict(zip(samplers, interleave(list(samplers.values()), seconds, fewest), strict=True))
    return {name: _Sampled(own, by_name[OURS]) for name, own in by_name.items()}


def _left_behind(found: Mapping[str, _Sampled], peers: Collection[str]) -> set[str]:
    """The peers that are no rivals of the fastest."""
    times = {name: spread(each.own).p50 for name, each in found.items() if name in peers}
    return {name for name, each in times.items() if each > RIVAL * min(times.values())}


def _in_setting(setting: Setting, sample: Callable[[], float]) -> float:
    """A sample, of which the time to change the setting is no part."""
    with setting():
        return sample()


def _try_ours(case: Case, operands: Operands, plan: Plan, judged_by: Oracle) -> _Attempt:
    source = Generator(operands.query.device).manual_seed(SEED)
    try:
        with poisoned():
            start = time.perf_counter()
            results = our_step(case, operands, plan.requested, source)
            took = _known(start, operands)
        found = check(judged_by, operands, results)
    except RuntimeError as error:
        return _Attempt(Side("failed", one_line(error)))
    return _Attempt(Side("ok" if found.ok else "WRONG", str(found), found), took)


def _known(start: float, operands: Operands) -> float:
    """How long a call took since `start`; on a GPU, where it compiled and did not wait, nothing."""
    return 0.0 if operands.query.device.type == "cuda" else time.perf_counter() - start


def _why_nobody(plan: Plan) -> list[str]:
    return [
        f"{backend}: {reason.sentence}"
        for backend, reasons, _ in plan.rejected
        for reason in reasons
        if reason.code not in ("device", "order")
    ]


def _try_peer(case: Case, operands: Operands, peer: Peer, judged_by: Oracle) -> _Attempt:
    try:
        start = time.perf_counter()
        with peer.setting(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a kernel that was forced does not take a case
            results = _with_gradients(peer.attend(case, operands), operands)
        took = _known(start, operands)
        if case.dropout_p:
            return _Attempt(Side("ok", "not judged: its dropout bits are its own"), took)
        found = check(judged_by, operands, results)
    except RuntimeError as error:
        return _Attempt(Side("failed", one_line(error)))
    return _Attempt(Side("ok" if found.ok else "over budget", str(found), found), took)


def _timed(
    side: Side,
    case: Case,
    samples: Sequence[float],
    turn: _Turn,
    device: torch.device,
    peaks: bool,
) -> Side:
    seconds = spread(samples)
    rate = flops(case) / seconds.p50 / 1e9
    peak = None
    if peaks:
        with turn.setting():
            peak = peak_memory(turn.step, device)
    return replace(side, seconds=seconds, gflops=rate, peak_bytes=peak)

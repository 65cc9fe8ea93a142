"""What `orchard demo` measures: one training run through Orchard and one through torch, in turn."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

import orchard
from orchard.attention.dropout import draw_seed
from orchard.attention.problem import Band, Options, Tensors, Upstream, drop_threshold
from orchard.cli import corpus
from orchard.cli.console import progress
from orchard.cli.minigpt import MiniGPT, Shape, Text, Trainer, batches, generate, losses
from orchard.dispatch.planner import Plan
from orchard.testing.benchmark import clock, paired_ratio, spread
from orchard.testing.budget import GRADIENT_FACTOR, OUTPUT_FACTOR, Results, judge
from orchard.testing.machine import machine
from orchard.testing.memory import peak_memory, why_no_peak

T = TypeVar("T")
MARKS = 6  # rows of the table of losses, after the first
PROMPT = "In autumn, "
SAMPLE = 320  # characters after the prompt
LEARNT = 0.9  # the final held-out loss may be at most this share of the initial one
APART = 0.05  # the two final losses may differ by this share of the initial one


@dataclass(frozen=True)
class Pair(Generic[T]):
    """The same thing of both runs."""

    orchard: T
    torch: T

    def __iter__(self) -> Iterator[T]:
        return iter((self.orchard, self.torch))


@dataclass
class Run:
    """One training run, by the route its attention takes."""

    route: Callable[[], AbstractContextManager[None]]
    trainer: Trainer
    seconds: list[float] = field(default_factory=list)
    calls: int = 0  # attention calls of the model
    served: int = 0  # those of them that Orchard took over from torch

    def train(self, batch: Tensor) -> float:
        """One timed step; switching the route is not part of the time."""
        found: list[float] = []
        with self._routed():
            step = clock(lambda: found.append(self.trainer.step(batch)), 1, batch.device)
            self.seconds.append(step)
        return found[0]

    def evaluate(self, batch: Tensor) -> float:
        with self._routed():
            return self.trainer.evaluate(batch)

    @contextmanager
    def _routed(self) -> Iterator[None]:
        before = _intercepted()
        with self.route():
            yield
        self.calls += self.trainer.model.shape.layers
        self.served += _intercepted() - before


def _intercepted() -> int:
    return int(orchard.stats()["torch_sdpa"]["served"])


@dataclass(frozen=True)
class Mark:
    """Losses after some steps; `train` is that of the last step's batch, before its update."""

    step: int
    train: Pair[float] | None
    held_out: Pair[float]


@dataclass(frozen=True)
class Deviation:
    """How far each route is from the model in fp64, and how far Orchard may be."""

    name: str
    orchard: float
    torch: float
    budget: float
    between: float  # the largest difference of the two routes
    holds: bool


@dataclass(frozen=True)
class Check:
    """Something that has to be so for the demo to have worked."""

    name: str
    holds: bool
    sentence: str


@dataclass(frozen=True)
class Report:
    """Everything that is printed, as data."""

    machine: dict[str, Any]
    model: dict[str, Any]
    steps: int
    seed: int
    losses: list[Mark]
    exactness: list[Deviation]
    exactness_served_by: str
    sample: str
    plan: dict[str, str | None]
    seconds_per_step: Pair[dict[str, float]]  # p20, p50, p80
    time_ratio: dict[str, float]  # torch's over Orchard's, step by step: above 1 Orchard is faster
    peak_memory_bytes: Pair[int | None]
    peak_memory_missing: str | None
    calls: Pair[int]
    served: Pair[int]
    stats: dict[str, Any]
    advice: list[str]
    checks: list[Check]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(check.holds for check in self.checks)


class Comparison:
    """Two runs from the same weights on the same batches."""

    def __init__(self, device: torch.device, steps: int, seed: int) -> None:
        self.device, self.steps, self.seed = device, steps, seed
        self.text = Text(corpus.text())
        self.shape = Shape(len(self.text.alphabet))
        torch.manual_seed(seed)
        model = MiniGPT(self.shape).to(device)
        self.runs = Pair(
            Run(orchard.enabled, Trainer(copy.deepcopy(model), steps)),
            Run(nullcontext, Trainer(copy.deepcopy(model), steps)),
        )
        self.held_out = torch.cat(list(batches(self.text.held_out, self.shape, 2, seed)))
        self.held_out = self.held_out.to(device)

    def describe_model(self) -> dict[str, Any]:
        model = self.runs.orchard.trainer.model
        return {
            **asdict(self.shape),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "training_characters": len(self.text.training),
            "held_out_characters": len(self.text.held_out),
        }

    def measure(self) -> Report:
        """Train, and everything that is reported of it."""
        started = time.perf_counter()
        runs, batch = self.runs, self.held_out[: self.shape.batch]
        memory = Pair(*(_peak(run, batch) for run in runs))
        plan = explain_training(runs.orchard.trainer.model, batch)
        orchard.stats(reset=True)
        marks = self.race()
        stats, advice = orchard.stats(), orchard.advice()
        deviations, served_by = exactness(runs.orchard.trainer.model, batch)
        return Report(
            machine=machine(self.device),
            model=self.describe_model(),
            steps=self.steps,
            seed=self.seed,
            losses=marks,
            exactness=deviations,
            exactness_served_by=served_by,
            sample=self.sample(),
            plan=_plan_data(plan),
            seconds_per_step=Pair(*(spread(run.seconds)._asdict() for run in runs)),
            time_ratio=paired_ratio(*(run.seconds for run in runs))._asdict(),
            peak_memory_bytes=memory,
            peak_memory_missing=why_no_peak(self.device),
            calls=Pair(*(run.calls for run in runs)),
            served=Pair(*(run.served for run in runs)),
            stats=stats,
            advice=advice,
            checks=[
                check_routing(runs),
                check_exactness(deviations),
                check_dropout(self.device),
                check_learning(marks),
                check_agreement(marks),
            ],
            seconds=time.perf_counter() - started,
        )

    def race(self) -> list[Mark]:
        """Train both in turn, step by step on the same batches; their losses on the way."""
        marks = [Mark(0, None, self._evaluate())]
        at = {round(n * self.steps / MARKS) for n in range(1, MARKS + 1)}
        fed = batches(self.text.training, self.shape, self.steps, self.seed)
        with progress("training", self.steps) as advance:
            for step, batch in enumerate((batch.to(self.device) for batch in fed), 1):
                train = Pair(*(run.train(batch) for run in self.runs))
                if step in at:
                    marks.append(Mark(step, train, self._evaluate()))
                advance(f"loss {train.orchard:.3f} (torch {train.torch:.3f})")
        return marks

    def _evaluate(self) -> Pair[float]:
        return Pair(*(run.evaluate(self.held_out) for run in self.runs))

    def sample(self) -> str:
        """Text from the model that was trained through Orchard."""
        start = self.text.encode(PROMPT).to(self.device)
        with orchard.enabled():
            tokens = generate(self.runs.orchard.trainer.model, start, SAMPLE, self.seed)
        return self.text.decode(tokens)


def _peak(run: Run, batch: Tensor) -> int | None:
    """Peak memory of the second step of a copy, which is thrown away; the first warms up."""
    trainer = Trainer(copy.deepcopy(run.trainer.model), steps=2)
    with run.route():
        trainer.step(batch)
        return peak_memory(lambda: trainer.step(batch), batch.device)


def explain_training(model: MiniGPT, batch: Tensor) -> Plan:
    """The plan of the attention call that training makes."""
    operands = model.first_operands(batch[:, :-1])
    return orchard.explain(*operands, causal=True, dropout_p=model.shape.dropout)


def _plan_data(plan: Plan) -> dict[str, str | None]:
    backward = plan.backward.backend if plan.backward is not None else None
    return {"forward": plan.backend, "backward": backward, "text": str(plan)}


class Outcome(NamedTuple):
    """What a model computes on a batch without dropout."""

    losses: Tensor  # of every character
    gradients: dict[str, Tensor]  # of the mean loss, by parameter


def exactness(model: MiniGPT, batch: Tensor) -> tuple[list[Deviation], str]:
    """Losses and gradients by both routes beside fp64, and which kernels served Orchard's."""
    model = copy.deepcopy(model).eval()
    before = orchard.stats()["kernels"]
    with orchard.enabled():
        ours = _outcome(model, batch)
    after = orchard.stats()["kernels"]
    served_by = [name for name, calls in after.items() if calls > before.get(name, 0)]
    theirs = _outcome(model, batch)
    exact = _outcome(copy.deepcopy(model).cpu().double(), batch.cpu())
    deviations = [
        _deviation("loss per character", ours.losses, theirs.losses, exact.losses, OUTPUT_FACTOR)
    ]
    for name, truth in exact.gradients.items():
        both = ours.gradients[name], theirs.gradients[name]
        deviations.append(_deviation(f"gradient of {name}", *both, truth, GRADIENT_FACTOR))
    return deviations, ", ".join(served_by) or "nobody"


def _outcome(model: MiniGPT, batch: Tensor) -> Outcome:
    found = losses(model, batch)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(found.mean(), parameters)
    return Outcome(found.detach(), dict(zip(names, gradients, strict=True)))


def _deviation(name: str, ours: Tensor, theirs: Tensor, exact: Tensor, factor: float) -> Deviation:
    error, yardstick = _distance(ours, exact), _distance(theirs, exact)
    budget = factor * yardstick + torch.finfo(ours.dtype).eps * float(exact.abs().max())
    holds = error <= budget and math.isfinite(error)
    return Deviation(name, error, yardstick, budget, _distance(ours, theirs), holds)


def _distance(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference; what is not a number is infinitely far."""
    difference = (one.cpu().double() - other.cpu().double()).abs()
    return float(torch.nan_to_num(difference, nan=torch.inf).max())


def tightest(deviations: list[Deviation]) -> Deviation:
    """The one that uses up most of its budget."""
    return max(deviations, key=lambda each: each.orchard / max(each.budget, sys.float_info.min))


def check_routing(runs: Pair[Run]) -> Check:
    ours, theirs = runs
    return Check(
        "routing",
        ours.served == ours.calls and theirs.served == 0,
        f"Orchard served {ours.served} of {ours.calls} attention calls of its own run, and "
        f"{theirs.served} of {theirs.calls} of torch's",
    )


def check_exactness(deviations: list[Deviation]) -> Check:
    worst = tightest(deviations)
    return Check(
        "exactness",
        all(deviation.holds for deviation in deviations),
        f"without dropout the {worst.name} is off by {worst.orchard:.2g}, and may be by "
        f"{worst.budget:.2g}",
    )


def check_dropout(device: torch.device) -> Check:
    """The call that training makes, dropout included, against fp64 with the same bits."""
    source = torch.Generator().manual_seed(0)
    query, key, value, grad_out = (
        torch.randn(2, 4, 64, 32, generator=source).to(device) for _ in range(4)
    )
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out, lse = orchard.attention(
        query,
        key,
        value,
        causal=True,
        dropout_p=0.1,
        return_lse=True,
        generator=torch.Generator(device).manual_seed(1),
    )
    grads = torch.autograd.grad(out, leaves, grad_out)
    seed = draw_seed(device, torch.Generator(device).manual_seed(1)).cpu()
    exact = [t.detach().cpu() for t in leaves]
    tensors = Tensors(exact[0], exact[1], exact[2], None, seed)
    options = Options(32**-0.5, band=Band(None, 0), threshold=drop_threshold(0.1))
    results = Results(*(t.detach().cpu() for t in (out, lse, *grads)))
    judged = judge(results, tensors, options, Upstream(grad_out.cpu(), None))
    worst = max(judged, key=lambda item: item.error / item.budget)
    return Check(
        "dropout",
        all(item.ok for item in judged),
        f"with dropout {worst.name} is off by {worst.error:.2g}, and may be by {worst.budget:.2g}",
    )


def check_learning(marks: list[Mark]) -> Check:
    first, last = marks[0].held_out, marks[-1].held_out
    return Check(
        "learning",
        all(after <= LEARNT * before for before, after in zip(first, last, strict=True)),
        f"the held-out loss went from {first.orchard:.3f} to {last.orchard:.3f} "
        f"(torch {last.torch:.3f}), and has to end at {LEARNT * first.orchard:.3f} or below",
    )


def check_agreement(marks: list[Mark]) -> Check:
    first, last = marks[0].held_out, marks[-1].held_out
    gap, allowed = abs(last.orchard - last.torch), APART * first.orchard
    return Check(
        "agreement",
        gap <= allowed,
        f"the final held-out losses are {gap:.4f} apart, and may be {allowed:.4f}",
    )

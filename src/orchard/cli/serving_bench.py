"""What `orchard bench --preset serving` measures: queues, lanes, and what they cost."""

from __future__ import annotations

import copy
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from orchard.attention.api import attention
from orchard.cli.minigpt import MiniGPT, Shape
from orchard.serving import StreamPool, cores
from orchard.serving.batch_queue import BatchQueue
from orchard.serving.one_core import OneCore
from orchard.testing.benchmark import paired_ratio, spread
from orchard.testing.clients import Answered, Call, Oracle, Pass, drive, percentile

P = ParamSpec("P")
R = TypeVar("R")
Line = dict[str, Any]
Side = Callable[[float], Pass]  # given seconds
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
THREADS = (1, 2, 4, 8, 16, 32)
DELAYS = (0.0005, 0.002, 0.01)
ROUNDS = 3
QUESTIONS = 64
BURST = 2000  # requests under way at once, where the cost of one is found
MAX_BATCH = 32


class Exercise(Protocol):
    """A row; its name is what `str` says."""

    def measure(self, device: torch.device, seconds: float) -> Line: ...


class Model(Protocol):
    """A model and a request for it, a single row."""

    def make(self) -> nn.Module: ...

    def question(self, source: torch.Generator) -> Tensor: ...


class Perceptron:
    """2.1 million parameters."""

    def make(self) -> nn.Module:
        sizes = (512, 1024, 1024, 512)
        first, second, third = (nn.Linear(*pair) for pair in pairwise(sizes))
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)

    def question(self, source: torch.Generator) -> Tensor:
        return torch.randn(1, 512, generator=source)


class Gpt:
    """The model that `orchard demo` trains."""

    shape = Shape(vocabulary=48)

    def make(self) -> nn.Module:
        return MiniGPT(self.shape)

    def question(self, source: torch.Generator) -> Tensor:
        size = (1, self.shape.context)
        return torch.randint(self.shape.vocabulary, size, generator=source)


MODELS: dict[str, Model] = {"mlp": Perceptron(), "gpt": Gpt()}


def _ready(device: torch.device) -> Callable[[], None]:
    """Waits for what this thread has queued, so that its answer is there."""
    if device.type == "cuda":
        return lambda: torch.cuda.current_stream(device).synchronize()
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None


def _turns(sides: Mapping[str, Side], seconds: float) -> dict[str, list[Pass]]:
    """Passes of each side; they take turns, and who goes first alternates."""
    names = list(sides)
    found: dict[str, list[Pass]] = {name: [] for name in names}
    for side in sides.values():
        side(min(seconds, 0.1))
    for number in range(ROUNDS):
        for name in names if number % 2 == 0 else names[::-1]:
            found[name].append(sides[name](seconds))
    return found


def _asked(clients: int, questions: Sequence[Tensor], **calls: Call) -> dict[str, Side]:
    """Sides of as many client threads each."""
    return {name: partial(drive, call, questions, clients) for name, call in calls.items()}


def _in_passing(call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call it in a thread that ends.

    Threads that torch has started for the main thread stay, and OpenMP's then wait for one another
    asleep, in all teams, because they are more than there are cores.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call, *args, **kwargs).result()


def _judged(oracle: Oracle, answered: Sequence[Answered]) -> Line:
    """JSON has no infinity and no NaN: None is an error without a number."""
    wrong, error, budget = _in_passing(oracle.judge, answered)
    return {"wrong": wrong, "error": error if math.isfinite(error) else None, "budget": budget}


def _side(passes: Sequence[Pass], oracle: Oracle) -> Line:
    answered = [each for one in passes for each in one.answered]
    seconds = [each.seconds for each in answered]
    return {
        "requests": len(answered),
        **_judged(oracle, answered),
        "throughput": spread([one.throughput for one in passes])._asdict(),
        "p50": percentile(seconds, 0.5),
        "p99": percentile(seconds, 0.99),
    }


def _compared(passes: Mapping[str, list[Pass]], oracle: Oracle) -> Line:
    """Both sides, and the second's throughput over the first's."""
    base, other = passes.values()
    ratio = paired_ratio([p.throughput for p in base], [p.throughput for p in other])
    sides = {name: _side(each, oracle) for name, each in passes.items()}
    wrong = sum(side["wrong"] for side in sides.values())
    return {**sides, "ratio": ratio._asdict(), "wrong": wrong}


class Prepared(NamedTuple):
    model: nn.Module
    call: Call  # by the thread that asks, until the answer is there
    questions: list[Tensor]
    oracle: Oracle


@cache
def _prepared(name: str, device: torch.device) -> Prepared:
    """A model on a device, and what it answers alone."""
    return _in_passing(_prepare, name, device)


def _prepare(name: str, device: torch.device) -> Prepared:
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1)
    asked = MODELS[name]
    model = asked.make().eval()
    questions = [asked.question(source) for _ in range(QUESTIONS)]
    exactly = copy.deepcopy(model).double()
    model.to(device)
    ready = _ready(device)

    @torch.no_grad()
    def call(x: Tensor) -> Tensor:
        answer: Tensor = model(x.to(device))
        ready()
        return answer

    with torch.no_grad():
        exact = [exactly(x.double() if x.is_floating_point() else x) for x in questions]
    alone = [call(x) for x in questions]
    return Prepared(model, call, questions, Oracle.near([x.to(device) for x in exact], alone))


class BareQueue:
    """What a queue of threads cannot do without: a list, and a lock for each who waits.

    It knows how many requests to wait for, and nothing of errors, shapes, deadlines or the end:
    what it reaches is a bound for what a queue can reach here.
    """

    def __init__(self, call: Call, rows: int, core: int | None = None) -> None:
        self._call = call
        self._rows = rows
        self._one_core = None if core is None else OneCore(core)
        self._waiting: deque[tuple[list[Tensor], threading.Lock]] = deque()
        self._full: SimpleQueue[None] = SimpleQueue()
        self._open = True
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def ask(self, x: Tensor) -> Tensor:
        if self._one_core is not None:
            self._one_core.join()
        slot, answered = [x], threading.Lock()
        answered.acquire()
        self._waiting.append((slot, answered))
        if len(self._waiting) == self._rows:
            self._full.put(None)
        answered.acquire()
        return slot[0]

    def _serve(self) -> None:
        if self._one_core is not None:
            self._one_core.join()
        while self._open:
            with suppress(Empty):
                self._full.get(timeout=0.002)
            batch = [self._waiting.popleft() for _ in range(min(self._rows, len(self._waiting)))]
            if batch:
                answers = self._call(torch.cat([slot[0] for slot, _ in batch])).split(1)
                for (slot, answered), answer in zip(batch, answers, strict=True):
                    slot[0] = answer
                    answered.release()

    def close(self) -> None:
        self._open = False
        self._thread.join()
        if self._one_core is not None:
            self._one_core.leave()


def _core(on_one_core: bool) -> int | None:
    """The core that threads are kept on."""
    return min(os.sched_getaffinity(0)) if on_one_core else None


def _where(on_one_core: bool) -> str:
    """What a row's name says of it."""
    return ", on one core" if on_one_core else ""


@dataclass(frozen=True)
class Ceiling:
    """A model that client threads call themselves, against batches that nobody has to gather, from
    one thread or from several with a share of the cores each: a queue that costs nothing.
    """

    model: str
    clients: int
    threads: int = 1

    def __str__(self) -> str:
        return f"{self.model}, {self.clients} clients, {self._how}"

    @property
    def _how(self) -> str:
        threads = "one thread" if self.threads == 1 else f"{self.threads} threads"
        return f"whole batches from {threads}"

    def measure(self, device: torch.device, seconds: float) -> Line:
        _, naive, questions, oracle = _prepared(self.model, device)
        sides = _asked(self.clients, questions, naive=naive)
        sides["queue"] = partial(self._pass, naive, questions)
        passes = _turns(sides, seconds)
        name = f"{self.model}, {self._how}"
        return {"model": name, "clients": self.clients, **_compared(passes, oracle)}

    def _pass(self, call: Call, questions: Sequence[Tensor], seconds: float) -> Pass:
        """As many rows under way as there are clients on the other side."""
        rows = self.clients // self.threads
        firsts = range(0, rows * self.threads, rows)
        batches = [torch.cat(list(questions[first : first + rows])) for first in firsts]

        def with_its_share(x: Tensor) -> Tensor:
            with cores.limited_to(cores.share(self.threads)):
                return call(x)

        found = drive(with_its_share, batches, self.threads, seconds)
        answered = (
            Answered(whole.question * rows + n, answer, whole.seconds)
            for whole in found.answered
            for n, answer in enumerate(whole.answer.split(1))
        )
        return Pass(found.seconds, tuple(answered))


@dataclass(frozen=True)
class Bound:
    """A model that client threads call themselves, against a queue that does the least."""

    model: str
    clients: int
    on_one_core: bool = False  # the queue's thread and its clients; not those of the other side

    def __str__(self) -> str:
        return f"{self.model}, {self.clients} clients, bare queue{_where(self.on_one_core)}"

    def measure(self, device: torch.device, seconds: float) -> Line:
        _, naive, questions, oracle = _prepared(self.model, device)
        with closing(BareQueue(naive, self.clients, _core(self.on_one_core))) as queue:
            sides = _asked(self.clients, questions, naive=naive, queue=queue.ask)
            passes = _turns(sides, seconds)
        name = f"{self.model}, bare queue{_where(self.on_one_core)}"
        return {"model": name, "clients": self.clients, **_compared(passes, oracle)}


@dataclass(frozen=True)
class Clients:
    """A model that client threads call themselves, against a BatchQueue in front of it."""

    model: str
    clients: int
    max_batch: int = MAX_BATCH
    on_one_core: bool = False  # the queue's threads and its clients; not those of the other side

    def __str__(self) -> str:
        return f"{self._name}, {self.clients} clients"

    @property
    def _name(self) -> str:
        batches = "" if self.max_batch == MAX_BATCH else f", batches of {self.max_batch}"
        return f"{self.model}{batches}{_where(self.on_one_core)}"

    def measure(self, device: torch.device, seconds: float) -> Line:
        model, naive, questions, oracle = _prepared(self.model, device)
        with BatchQueue(
            model,
            max_batch=self.max_batch,
            device=device,
            warmup=questions[0],
            core=_core(self.on_one_core),
        ) as queue:

            def queued(x: Tensor) -> Tensor:
                answer: Tensor = queue.submit(x).result()
                return answer

            sides = _asked(self.clients, questions, naive=naive, queue=queued)
            passes = _turns(sides, seconds)
            mean = queue.stats().mean_batch_rows
        found = _compared(passes, oracle)
        return {"model": self._name, "clients": self.clients, "mean_batch": mean, **found}


@dataclass(frozen=True)
class Lanes:
    """Small attention calls of many threads, as they come against each in a lane of its own."""

    threads: int

    def __str__(self) -> str:
        return f"attention, {self.threads} threads"

    @torch.no_grad()
    def measure(self, device: torch.device, seconds: float) -> Line:
        source = torch.Generator().manual_seed(1)
        packed = (torch.randn(3, 1, 8, 64, 64, generator=source) for _ in range(QUESTIONS))
        questions = [x.to(device) for x in packed]
        ready = _ready(device)

        @torch.no_grad()
        def call(x: Tensor) -> Tensor:
            return attention(x[0], x[1], x[2])

        def default(x: Tensor) -> Tensor:
            answer = call(x)
            ready()
            return answer

        with StreamPool(device) as pool:

            def in_lane(x: Tensor) -> Tensor:
                with pool.stream() as lane:
                    answer = call(x)
                    lane.synchronize()
                return answer

            oracle = Oracle.identical(_in_passing(lambda: [default(x) for x in questions]))
            sides = _asked(self.threads, questions, default=default, lanes=in_lane)
            passes = _turns(sides, seconds)
        return {"threads": self.threads, **_compared(passes, oracle)}


class Overhead:
    """What a request costs in a queue whose function does nothing."""

    def __str__(self) -> str:
        return "queue overhead"

    def measure(self, device: torch.device, seconds: float) -> Line:
        questions = [torch.full((1, 1), float(n)) for n in range(BURST)]
        found: list[float] = []
        wrong = 0
        with BatchQueue(_unchanged, max_pending=BURST) as queue:
            end = time.perf_counter() + ROUNDS * seconds
            while len(found) < ROUNDS or time.perf_counter() < end:
                start = time.perf_counter()
                futures = [queue.submit(x) for x in questions]
                answers = [future.result() for future in futures]
                found.append((time.perf_counter() - start) / BURST)
                wrong += sum(
                    not torch.equal(*pair) for pair in zip(questions, answers, strict=True)
                )
            mean = queue.stats().mean_batch_rows
        return {"overhead": spread(found)._asdict(), "mean_batch": mean, "wrong": wrong}


@dataclass(frozen=True)
class Lone:
    """How long a request takes that no other comes after, beyond the delay it is given."""

    delay: float

    def __str__(self) -> str:
        return f"lone request, max_delay {self.delay * 1e3:g} ms"

    def measure(self, device: torch.device, seconds: float) -> Line:
        x = torch.ones(1, 1)
        with BatchQueue(_unchanged, max_delay=self.delay) as queue:
            found = drive(lambda x: queue.submit(x).result(), [x], 1, ROUNDS * seconds)
        waits = [each.seconds for each in found.answered]
        return {
            "delay": self.delay,
            "requests": len(waits),
            "p50": percentile(waits, 0.5),
            "p99": percentile(waits, 0.99),
            "max": max(waits),
            **_judged(Oracle.identical([x]), found.answered),
        }


def _unchanged(x: Tensor) -> Tensor:
    return x


EXERCISES: tuple[Exercise, ...] = (
    *(Clients(model, clients) for model in MODELS for clients in CLIENTS),
    Bound("mlp", MAX_BATCH),
    Ceiling("mlp", MAX_BATCH),
    Ceiling("mlp", MAX_BATCH, threads=2),
    *(Lanes(threads) for threads in THREADS),
    Overhead(),
    *(Lone(delay) for delay in DELAYS),
)
ON_ONE_CORE = (Clients("mlp", MAX_BATCH, on_one_core=True),)
IN_LARGE_BATCHES = (
    Clients("mlp", 64, max_batch=64),
    Clients("mlp", 64, max_batch=64, on_one_core=True),
)
ON_A_GPU: tuple[Exercise, ...] = (
    *IN_LARGE_BATCHES,
    Bound("mlp", 64),
    Bound("mlp", 64, on_one_core=True),
    Ceiling("mlp", 64),
)


def exercises(device: torch.device) -> tuple[Exercise, ...]:
    """What is measured on a device; threads are kept on a core only where the system does so."""
    if not hasattr(os, "sched_setaffinity"):
        return EXERCISES
    return (*EXERCISES, *ON_ONE_CORE, *(ON_A_GPU if device.type == "cuda" else ()))


@dataclass(frozen=True)
class Goal:
    """What a row has to reach on a kind of device."""

    text: str
    device: str
    case: Exercise
    value: Callable[[Line], float]
    limit: float
    unit: str
    at_least: bool = False

    def judge(self, line: Line) -> Line:
        """A line of its own: what was found, and whether that is enough."""
        found = None if line["wrong"] else self.value(line)
        held = found is not None and (found >= self.limit if self.at_least else found <= self.limit)
        return {
            "goal": self.text,
            "found": found,
            "limit": self.limit,
            "at_least": self.at_least,
            "unit": self.unit,
            "held": held,
        }


def _gain(line: Line) -> float:
    return float(line["ratio"]["p50"])


def _slowest(line: Line) -> float:
    return float(line["queue"]["p99"] / line["naive"]["p99"])


def _microseconds(line: Line) -> float:
    return float(line["overhead"]["p50"]) * 1e6


def _extra_milliseconds(line: Line) -> float:
    return float(line["p99"] - line["delay"]) * 1e3


GOALS = (
    Goal("mlp, 32 clients: throughput", "cpu", Clients("mlp", 32), _gain, 4.0, "x", at_least=True),
    Goal("mlp, 32 clients: p99 / naive p99", "cpu", Clients("mlp", 32), _slowest, 1.0, "x"),
    Goal("overhead of a request", "cpu", Overhead(), _microseconds, 60.0, "us"),
    *(
        Goal(f"{lone}: p99 beyond it", "cpu", lone, _extra_milliseconds, 1.0, "ms")
        for lone in map(Lone, DELAYS)
    ),
    *(
        Goal(f"{clients}: throughput", "cuda", clients, _gain, 10.0, "x", at_least=True)
        for clients in (*(Clients(model, 64) for model in MODELS), *IN_LARGE_BATCHES)
    ),
)


def goals(line: Line, device: torch.device) -> list[Line]:
    """What the goals for a row say of it."""
    mine = [goal for goal in GOALS if goal.device == device.type and str(goal.case) == line["case"]]
    return [goal.judge(line) for goal in mine]


def _pair(line: Line, names: tuple[str, str], number: Callable[[Line], str]) -> str:
    return " / ".join(number(line[name]) for name in names)


def _sides(line: Line, names: tuple[str, str]) -> list[str]:
    """Ratio, throughputs, p50 and p99 of two sides; no speed beside a wrong answer."""
    if line["wrong"]:
        return [f"WRONG, {line['wrong']} answers", "-", "-", "-"]
    ratio = line["ratio"]
    return [
        f"{ratio['p50']:.2f} ({ratio['p20']:.2f}-{ratio['p80']:.2f})",
        _pair(line, names, lambda side: f"{side['throughput']['p50']:,.0f}"),
        _pair(line, names, lambda side: f"{side['p50'] * 1e3:.2f}"),
        _pair(line, names, lambda side: f"{side['p99'] * 1e3:.2f}"),
    ]


def client_rows(line: Line) -> list[list[str]]:
    if "clients" not in line:
        return []
    sides = _sides(line, ("naive", "queue"))
    mean = f"{line['mean_batch']:.1f}" if "mean_batch" in line else "-"
    return [[line["model"], str(line["clients"]), *sides, mean]]


def lane_rows(line: Line) -> list[list[str]]:
    if "threads" not in line:
        return []
    return [[str(line["threads"]), *_sides(line, ("default", "lanes"))]]


def cost_rows(line: Line) -> list[list[str]]:
    if "overhead" in line:
        low, middle, high = (line["overhead"][name] * 1e6 for name in ("p20", "p50", "p80"))
        return [[line["case"], f"{middle:.1f} us ({low:.1f}-{high:.1f}) for each request"]]
    if "delay" in line:
        words = (f"{name} {line[name] * 1e3:.2f} ms" for name in ("p50", "p99", "max"))
        return [[line["case"], ", ".join(words)]]
    return []


def goal_rows(line: Line) -> list[list[str]]:
    rows = []
    for goal in line["goals"]:
        found = "WRONG" if goal["found"] is None else f"{goal['found']:.3g} {goal['unit']}"
        limit = f"{'at least' if goal['at_least'] else 'at most'} {goal['limit']:g} {goal['unit']}"
        rows.append([goal["goal"], found, limit, "yes" if goal["held"] else "no"])
    return rows


_SPEEDS = ("throughput (p20-p80)", "requests/s", "p50, ms", "p99, ms")
TABLES = {  # title: headers and what makes the rows of a stored line
    "Client threads: calling the model / through a BatchQueue": (
        ("model", "clients", *_SPEEDS, "mean batch"),
        client_rows,
    ),
    "Threads of small attention calls: default / in lanes of a StreamPool": (
        ("threads", *_SPEEDS),
        lane_rows,
    ),
    "A queue whose function does nothing": (("what", "found"), cost_rows),
    "Goals": (("goal", "found", "must", "held"), goal_rows),
}

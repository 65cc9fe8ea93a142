"""Trying configs of the general CUDA kernels: each is checked, timed, and held to what is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from orchard.attention.problem import Options, Saved, Tensors, Upstream, default_scale, describe
from orchard.backends.cuda import choice, launch, tuning
from orchard.backends.cuda.configs import Config, Entry, Role, takes_wgmma
from orchard.backends.cuda.launch import BackwardKind, Setting
from orchard.backends.cuda.runtime import Runtime
from orchard.testing.benchmark import (
    Case,
    Sampling,
    Spread,
    Step,
    build,
    interleave,
    paired_ratio,
    sampler,
)
from orchard.testing.budget import Results, judge
from orchard.testing.poison import poisoned
from orchard.text import one_line

Trials = Mapping[Role, Config]
Note = Callable[[str], None]

FORWARD: tuple[Role, ...] = ("forward",)
DECODE: tuple[Role, ...] = ("decode", "join")
BACKWARD: tuple[Role, ...] = ("rows", "grad_key_value", "grad_query")
_CHECKED_ROWS, _CHECKED_KEYS = 203, 334  # lengths that end inside a block
_CHECKED_DECODE_KEYS = 3001


class _Grid(NamedTuple):
    """Values of each field of a Config."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    warps: tuple[int, ...]
    stages: tuple[int, ...]
    precisions: tuple[str, ...] = ("ieee",)


_GRIDS = {
    "half": _Grid((32, 64, 128), (32, 64, 128), (4, 8), (2, 3)),
    # Below the blocks that wgmma takes: see Config.
    "single": _Grid((16, 32), (16, 32), (4, 8), (1, 2), ("ieee", "bf16x6")),
}
_SINGLE_FORWARD = _GRIDS["single"]._replace(rows=(32, 64, 128), keys=(32, 64))
_JOINS = _Grid((1,), (16, 32, 64), (2, 4, 8), (1,))


class Trial(NamedTuple):
    """A config and how long a call took with it; None where it is of no use, with the reason."""

    config: Config
    seconds: float | None
    note: str = ""


class Tuned(NamedTuple):
    """What was found for a kernel."""

    entry: Entry
    before: Config
    best: Config
    ratio: Spread | None  # the time before over that of the best; None where they are the same
    trials: tuple[Trial, ...]

    @property
    def better(self) -> bool:
        """Whether the best was faster in all rounds but a fifth."""
        return self.ratio is not None and self.ratio.p20 > 1.0


def roles_of(case: Case) -> tuple[Role, ...]:
    """The kernels that serve a case."""
    packed_rows = case.heads // case.kv_heads * case.rows
    if packed_rows <= choice.DECODE_ROWS[case.dtype]:
        return DECODE
    return FORWARD + BACKWARD if case.backward else FORWARD


def candidates(entry: Entry, before: Config) -> list[Config]:
    """What is tried, beginning with what is there."""
    grid = _GRIDS[entry.size]
    if entry.role == "join":
        grid = _JOINS
    if entry.role == "forward" and entry.size == "single":
        grid = _SINGLE_FORWARD
    if entry.role == "decode":
        grid = grid._replace(rows=(before.rows,))
    tried = (Config(*values) for values in product(*grid))
    return list(dict.fromkeys([before, *(each for each in tried if not takes_wgmma(each))]))


class Exercise(NamedTuple):
    """A problem with its operands, and what its backward would be given."""

    tensors: Tensors
    options: Options
    upstream: Upstream | None

    @classmethod
    def of(cls, case: Case, device: torch.device) -> Exercise:
        operands = build(case, device)
        grad_out = operands.grad_out
        return cls(
            Tensors(*(t.detach() for t in (operands.query, operands.key, operands.value))),
            Options(default_scale(case.dim), band=case.band),
            None if grad_out is None else Upstream(grad_out, None),
        )


class Workbench:
    """A case on a GPU, solved with one config after another."""

    def __init__(self, runtime: Runtime, case: Case, device: torch.device) -> None:
        self.runtime, self.device = runtime, device
        self.roles = roles_of(case)
        self.decodes = self.roles == DECODE
        small = replace(
            case,
            batch=1,
            heads=2 * case.heads // case.kv_heads,
            kv_heads=2,
            rows=case.rows if self.decodes else _CHECKED_ROWS,
            keys=_CHECKED_DECODE_KEYS if self.decodes else _CHECKED_KEYS,
        )
        self._timed = Exercise.of(case, device)
        self._checked = Exercise.of(small, device)
        ahead = describe(self._timed.tensors, self._timed.options, grad=case.backward)
        self._problem = ahead
        self._saved: Saved | None = None

    @property
    def family(self) -> str:
        return self.runtime.gpu(self.device).family

    def entry(self, role: Role) -> Entry:
        return tuning.entry_of(self._problem, role)

    def config(self, role: Role, trials: Trials) -> Config:
        return tuning.config(self._problem, self.runtime.gpu(self.device), role, trials)

    def step(self, role: Role, trials: Trials) -> Step:
        """A call of the stage that a kernel belongs to, planned."""
        exercise = self._timed
        if role not in BACKWARD:
            return self._planned_forward(exercise, trials)
        if self._saved is None:
            self._saved = self._planned_forward(exercise, {})()
        return self._planned_backward(exercise, self._saved, trials)

    def complaints(self, role: Role, trials: Trials) -> list[str]:
        """What the results of a small problem are wrong in."""
        tensors, options, upstream = exercise = self._checked
        with poisoned():
            saved = self._planned_forward(exercise, trials)()
            results = Results(*saved)
            if role in BACKWARD:
                grads = self._planned_backward(exercise, saved, trials)()
                results = Results(*saved, *grads[:3])
        found = judge(results, tensors, options, upstream if role in BACKWARD else None)
        return [str(comparison) for comparison in found if not comparison.ok]

    def _planned_forward(self, exercise: Exercise, trials: Trials) -> Callable[[], Any]:
        problem = describe(exercise.tensors, exercise.options, lse=True)
        plan = launch.plan_decode if self.decodes else launch.plan_forward
        return self._run(plan(problem, self._setting(trials)), exercise.tensors)

    def _planned_backward(
        self, exercise: Exercise, saved: Saved, trials: Trials
    ) -> Callable[[], Any]:
        upstream = exercise.upstream
        assert upstream is not None
        problem = describe(
            exercise.tensors, exercise.options, stage="backward", grad_out=upstream.out, grad=True
        )
        kind = BackwardKind(problem, saved.out.stride(), saved.lse.stride(), None)
        plan = launch.plan_backward(kind, self._setting(trials))
        return self._run(plan, exercise.tensors, saved, upstream)

    def _setting(self, trials: Trials) -> Setting:
        return Setting(self.runtime.gpu(self.device), trials=trials)

    def _run(self, plan: Any, *given: Any) -> Callable[[], Any]:
        def call() -> Any:
            with self.runtime.on(self.device):
                return plan.run(self.runtime, *given)

        return call


def tune(
    bench: Workbench,
    roles: Sequence[Role],
    seconds: float = 0.2,
    *,
    sampling: Sampling = sampler,
    note: Note = lambda text: None,
) -> list[Tuned]:
    """Kernel by kernel, each beside the best of those before it."""
    found: list[Tuned] = []
    chosen: dict[Role, Config] = {}
    for role in roles:
        tuned = _tune_one(bench, role, chosen, seconds, sampling, note)
        if tuned.better:
            chosen[role] = tuned.best
        found.append(tuned)
    return found


def _tune_one(
    bench: Workbench,
    role: Role,
    chosen: Trials,
    seconds: float,
    sampling: Sampling,
    note: Note,
) -> Tuned:
    before = bench.config(role, {})
    trials = []
    for config in candidates(bench.entry(role), before):
        trials.append(_try(bench, role, {**chosen, role: config}, sampling))
        note(f"{role} {list(config)}")
    timed = [trial for trial in trials if trial.seconds is not None]
    best = min(timed, key=lambda trial: trial.seconds or 0.0, default=trials[0]).config
    ratio = None
    if best != before and trials[0].seconds is not None:
        steps = [bench.step(role, {**chosen, role: config}) for config in (best, before)]
        samplers = [sampling(step, bench.device, 0.0) for step in steps]
        ratio = paired_ratio(*interleave(samplers, seconds))
    return Tuned(bench.entry(role), before, best, ratio, tuple(trials))


def _try(bench: Workbench, role: Role, trials: Trials, sampling: Sampling) -> Trial:
    config = trials[role]
    try:
        wrong = bench.complaints(role, trials)
        if wrong:
            return Trial(config, None, f"wrong: {'; '.join(wrong)}")
        sample = sampling(bench.step(role, trials), bench.device, 0.0)
        return Trial(config, min(sample() for _ in range(3)))
    except RuntimeError as error:  # it does not compile, or takes more than the GPU has
        return Trial(config, None, one_line(error))


def open_runtime() -> Runtime:
    """Triton, on the GPU that is here."""
    from orchard.backends.cuda.runtime import TritonRuntime

    return TritonRuntime()

"""Choosing who serves a call, serving it, and going on when a kernel fails."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from orchard.attention.operands import check_shapes
from orchard.attention.problem import Problem, Saved, Tensors
from orchard.dispatch import settings
from orchard.dispatch.backend import Backend, Capability, Reason, dtype_name
from orchard.dispatch.journal import Counted, Journal, Tally, journal
from orchard.errors import (
    ArgumentValueError,
    FallbackWarning,
    NotServedError,
    OrchardError,
    SettingError,
)
from orchard.text import one_line, table

T = TypeVar("T")
A = TypeVar("A")
D = TypeVar("D", bound="Decision")
AUTO = "auto"
_CACHED_PLANS = 4096
_SERVES_TOO = ("order", "measured")  # reasons of a backend that could serve, but need not
_NO_FALL_BACK = ("device", "on_request", "measured")


# Serves query, key, value and mask; None where its kernel failed and the next backend is to serve.
Repeated = Callable[[Tensor, Tensor, Tensor, Tensor | None], Saved | None]


class Decision(Counted, Protocol):
    """A plan that can be carried out: of attention, or of quantised attention."""

    @property
    def problem(self) -> Hashable: ...
    @property
    def requested(self) -> str: ...
    @property
    def has_next(self) -> bool:
        """Whether somebody else serves the problem where this one fails."""


class Rejection(NamedTuple):
    backend: str
    reasons: tuple[Reason, ...]
    better: bool  # it stands before the chosen backend in the order of preference


@dataclass(frozen=True)
class Plan:
    """A decision: who serves a problem, and why each other backend does not."""

    problem: Problem
    requested: str
    backend: str | None  # None: nobody serves it
    kernel: str
    rejected: tuple[Rejection, ...]
    backward: Plan | None = None  # for a call whose gradient is wanted

    @cached_property
    def passed_over(self) -> tuple[tuple[str, Reason], ...]:
        """Reasons of the backends that would have been preferred on this device."""
        return tuple(
            (rejection.backend, reason)
            for rejection in self.rejected
            if rejection.better
            for reason in fallen_back(rejection.reasons)
        )

    @cached_property
    def tally(self) -> Tally:
        codes = dict.fromkeys((backend, reason.code) for backend, reason in self.passed_over)
        return Tally(self.problem.stage, self.backend or "", self.kernel, tuple(codes))

    @property
    def has_next(self) -> bool:
        return any(r.reasons[0].code in _SERVES_TOO for r in self.rejected)

    def why_not(self, backend: str) -> tuple[Reason, ...]:
        """The reasons why `backend` was not chosen; empty for the one that was."""
        return next((r.reasons for r in self.rejected if r.backend == backend), ())

    def __str__(self) -> str:
        text = f"{self._head}\n{describe_problem(self.problem)}\n\n{self._table}"
        if self.backward is not None:
            text += f"\n\n{self.backward._head}\n\n{self.backward._table}"
        return text

    @property
    def _head(self) -> str:
        p = self.problem
        served = f"{self.backend} ({self.kernel})" if self.backend else "nobody"
        return f"{p.stage.replace('_', ' ')} on {p.device.type}: served by {served}"

    @property
    def _table(self) -> str:
        rows = [[self.backend, "chosen", self.kernel, ""]] if self.backend else []
        for rejection in self.rejected:
            for n, reason in enumerate(rejection.reasons):
                name, verdict = (rejection.backend, "no") if n == 0 else ("", "")
                if reason.code in _SERVES_TOO:
                    verdict = "after"
                rows.append([name, verdict, reason.sentence, reason.fix])
        return table(["backend", "", "why", "what would change it"], rows)


def fallen_back(reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
    """Reasons that make it a fall-back to go on to the next; none where this was no choice."""
    return () if any(reason.code in _NO_FALL_BACK for reason in reasons) else reasons


def describe_problem(p: Problem) -> str:
    """One or two lines that say what the call is."""
    o = p.options
    words = [f"{dtype_name(p.dtype)} query {list(p.query_shape)} key {list(p.key_shape)}"]
    words.append(f"value {list(p.value_shape)}")
    if p.mask is not None:
        words.append(f"{p.mask.kind} mask {list(p.mask.shape)}")
    if o.band is not None:
        words.append(p.band_kind.replace("_", "-"))
    if o.softcap:
        words.append(f"softcap {o.softcap:g}")
    if o.threshold:
        words.append(f"dropout {o.threshold / 65536:.4g}")
    strides = f"strides {p.query_strides} {p.key_strides} {p.value_strides}"
    return f"  {', '.join(words)}\n  {strides}"


class Planner:
    """Plans problems over an ordered list of backends, first choice first."""

    def __init__(
        self, backends: tuple[Backend, ...], config: settings.Settings, log: Journal
    ) -> None:
        self.backends = {backend.name: backend for backend in backends}
        self._config = config
        self._journal = log
        self._plans: dict[tuple[Problem, str], Plan] = {}
        self._repeated: dict[Hashable, Repeated] = {}
        self._quarantine: dict[tuple[str, Hashable], Reason] = {}
        self._warned: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        names = ", ".join(self.backends)
        if config.backend not in (AUTO, *self.backends):
            raise SettingError(
                f"ORCHARD_BACKEND is {config.backend!r}; it must be 'auto' or one of {names}"
            )
        for name in config.disabled - set(self.backends):
            raise SettingError(f"ORCHARD_DISABLE names {name!r}; the backends are {names}")

    def plan(self, problem: Problem, requested: str = AUTO) -> Plan:
        """The plan for `problem`, from the cache where it is known."""
        found = self._plans.get((problem, requested))
        return found if found is not None else self._make(problem, requested)

    def _make(self, problem: Problem, requested: str) -> Plan:
        check_shapes(problem)
        asked = requested if requested != AUTO else self._config.backend
        if problem.stage == "double_backward":
            asked = AUTO  # create_graph works whoever was insisted on
        if asked != AUTO and asked not in self.backends:
            raise ArgumentValueError(
                f"backend is {asked!r}; it must be 'auto' or one of {', '.join(self.backends)}"
            )
        chosen: tuple[str, str] | None = None
        rejected: list[Rejection] = []
        for name, backend in self.backends.items():
            capability, reasons = self._select(backend, problem, asked)
            if capability is not None and chosen is None and asked in (AUTO, name):
                faster = self._faster(backend, capability, problem) if asked == AUTO else None
                if faster is None:
                    chosen = name, capability.kernel
                    continue
                reasons = (faster,)
            if not reasons:
                ahead = chosen[0] if chosen else asked
                reasons = (
                    Reason(
                        "order",
                        f"serves this too, but {ahead} was asked for"
                        if asked != AUTO
                        else f"serves this too, after {ahead}",
                        f'backend="{name}" insists on it',
                    ),
                )
            rejected.append(Rejection(name, reasons, better=chosen is None and asked == AUTO))
        winner, kernel = chosen or (None, "")
        plan = Plan(problem, requested, winner, kernel, tuple(rejected))
        settings.logger.debug("%s", plan)
        if plan.passed_over:
            settings.logger.info("%s passed over for %s", plan.tally.passed_over, winner)
        if len(self._plans) >= _CACHED_PLANS:
            self._plans.clear()
        self._plans[problem, requested] = plan
        return plan

    def _select(
        self, backend: Backend, problem: Problem, asked: str
    ) -> tuple[Capability | None, tuple[Reason, ...]]:
        if backend.name in self._config.disabled:
            return None, (Reason("disabled", "switched off by ORCHARD_DISABLE"),)
        held = self.set_aside(backend.name, problem) or backend.held_back(asked)
        if held is not None:
            return None, (held,)
        capability, reasons = backend.select(problem)
        if asked == backend.name and problem.stage == "forward" and problem.grad:
            known = {reason.code for reason in reasons}
            later = backend.select(problem.next_backward(lse_grad=False))[1]
            reasons += tuple(
                reason._replace(sentence=f"in the backward, {reason.sentence}")
                for reason in later
                if reason.code not in known
            )
        return None if reasons else capability, reasons

    def _faster(self, backend: Backend, capability: Capability, problem: Problem) -> Reason | None:
        """Why a rival that serves `problem` is to be preferred to this kernel, if so."""
        for name in backend.rivals:
            if name not in self.backends:
                continue
            rival, _ = self._select(self.backends[name], problem, AUTO)
            if rival is not None:
                reason = backend.yields_to(problem, capability.kernel, name, rival.kernel)
                if reason is not None:
                    return reason
        return None

    def unavailable(
        self, backend: Backend, capability: Capability, device: torch.device
    ) -> Reason | None:
        """Why a kernel does not run here, if so; one that waits to be asked for is not probed."""
        held = backend.held_back(self._config.backend)
        return held if held is not None else backend.unavailable(capability, device)

    def explain(self, problem: Problem, requested: str = AUTO) -> Plan:
        """The plan, with that of the backward where one would follow."""
        plan = self.plan(problem, requested)
        if problem.stage == "forward" and problem.grad:
            follow_up = problem.next_backward(lse_grad=problem.lse)
            plan = replace(plan, backward=self.plan(follow_up, requested))
        return plan

    def run(self, problem: Problem, requested: str, serve: Callable[[Backend, str], T]) -> T:
        """Serve `problem` by plan; under "auto" a kernel that fails is replaced by the next."""

        def serve_by(plan: Plan) -> T:
            if plan.backend is None:
                raise NotServedError(f"no backend may serve this call\n{plan}")
            return serve(self.backends[plan.backend], plan.kernel)

        return self.carry_out(lambda: self.plan(problem, requested), serve_by)

    def carry_out(self, decide: Callable[[], D], serve: Callable[[D], T]) -> T:
        """Serve by the plan that `decide` makes; who fails is set aside before it makes another."""
        while True:
            plan = decide()
            served = self._attempt(plan, serve, plan)
            if served is not None:
                return served[0]

    def _attempt(self, plan: Decision, serve: Callable[[A], T], given: A) -> tuple[T] | None:
        """What serving by the plan gives, itself perhaps None; no tuple where it was set aside."""
        try:
            result = serve(given)
        except OrchardError:
            raise
        except Exception as error:
            if not self._may_fall_back(plan):
                raise
            self._quarantine_failed(plan, error)
            return None
        self._journal.served(plan)
        return (result,)

    def remember(self, kind: Hashable, problem: Problem, requested: str) -> None:
        """Let calls of this kind, which pose `problem`, be served as it is now."""
        plan = self._plans.get((problem, requested))
        if plan is None or plan.backend is None:  # it was set aside meanwhile, or is another's
            return
        # When it is first needed: where preparing fails, a call is there to be served by the next.
        prepared = cache(partial(self.backends[plan.backend].prepare, problem, plan.kernel))

        def forward(tensors: Tensors) -> Saved:
            return prepared()(tensors)

        def serve(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Saved | None:
            served = self._attempt(plan, forward, Tensors(query, key, value, mask))
            return None if served is None else served[0]

        with self._lock:
            if self._plans.get((problem, requested)) is not plan:
                return  # it was set aside meanwhile
            if len(self._repeated) >= _CACHED_PLANS:
                self._repeated.clear()
            self._repeated[kind] = serve

    def repeated(self, kind: Hashable) -> Repeated | None:
        """What serves calls of this kind, if one was remembered."""
        return self._repeated.get(kind)

    def insists(self, requested: str) -> bool:
        """Whether the call, or the environment, names the backend that has to serve."""
        return requested != AUTO or self._config.backend != AUTO

    def set_aside(self, name: str, problem: Hashable) -> Reason | None:
        """Why nobody of this name is to serve the problem: it failed before."""
        return self._quarantine.get((name, problem))

    def _may_fall_back(self, plan: Decision) -> bool:
        stop = self._config.on_error == "raise" or self.insists(plan.requested)
        return plan.has_next and not stop

    def _quarantine_failed(self, plan: Decision, error: Exception) -> None:
        """Set the failed (backend, problem) aside, and say so."""
        name, stage = plan.tally.backend, plan.tally.stage
        text = one_line(error)
        reason = Reason("failed", f"its kernel failed on this problem: {text}")
        kind = (name, re.sub(r"\d+", "#", text))  # sizes in a message make no new error
        with self._lock:
            self._quarantine[name, plan.problem] = reason
            self._plans.clear()
            self._repeated.clear()
            first = kind not in self._warned
            self._warned.add(kind)
        self._journal.failed(name, stage, text)
        settings.logger.warning("%s failed and was set aside: %s", name, text)
        if first:
            where = stage.replace("_", " ")
            warnings.warn(
                f"orchard: {name} failed in a {where} and the next backend serves it: {text}",
                FallbackWarning,
                stacklevel=3,
            )


_planner: Planner | None = None
_planner_lock = threading.Lock()


def _renew_locks() -> None:
    global _planner_lock
    _planner_lock = threading.Lock()
    if _planner is not None:
        _planner._lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread may hold a lock while this one forks
    os.register_at_fork(after_in_child=_renew_locks)


def planner() -> Planner:
    """The process's planner, made at the first call."""
    return _planner if _planner is not None else _make_planner(anew=False)


def reset() -> Planner:
    """A fresh planner: settings read again, plans, probes and quarantine forgotten."""
    return _make_planner(anew=True)


def _make_planner(*, anew: bool) -> Planner:
    global _planner
    from orchard.backends import load

    with _planner_lock:
        if _planner is None or anew:
            _planner = Planner(load(), settings.reload(), journal)
        return _planner

"""What happened: calls by backend, fall-backs by reason, kernel failures, and advice from them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any, NamedTuple, Protocol

from orchard.dispatch.backend import Reason


class Tally(NamedTuple):
    """What is counted of a plan: bounded in number, whatever shapes go by."""

    stage: str
    backend: str
    kernel: str
    passed_over: tuple[tuple[str, str], ...]  # (backend, reason code) of each better choice


class Counted(Protocol):
    """A plan, as far as it is counted."""

    @property
    def tally(self) -> Tally: ...
    @property
    def passed_over(self) -> tuple[tuple[str, Reason], ...]: ...


class Journal:
    """Counters for the process. Safe to use from any thread."""

    def __init__(self) -> None:
        self._renew_lock()
        self._clear()

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def _clear(self) -> None:
        self._served: Counter[Tally] = Counter()
        self._examples: dict[tuple[str, str], Reason] = {}
        self._failures: Counter[tuple[str, str, str]] = Counter()
        self._intercepted = 0
        self._delegated: Counter[Reason] = Counter()

    def served(self, plan: Counted) -> None:
        with self._lock:
            self._served[plan.tally] += 1
            if plan.tally.passed_over:
                for backend, reason in plan.passed_over:
                    self._examples[backend, reason.code] = reason

    def failed(self, backend: str, stage: str, error: str) -> None:
        with self._lock:
            self._failures[backend, stage, error] += 1

    def intercepted(self) -> None:
        """A call of torch's SDPA that Orchard took over."""
        with self._lock:
            self._intercepted += 1

    def delegated(self, reason: Reason) -> None:
        """A call of torch's SDPA that was left to torch."""
        with self._lock:
            self._delegated[reason] += 1

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        with self._lock:
            served, examples = dict(self._served), dict(self._examples)
            failures = dict(self._failures)
            sdpa = {
                "served": self._intercepted,
                "delegated": {r.sentence: n for r, n in self._delegated.items()},
            }
            if reset:
                self._clear()
        calls: dict[str, dict[str, int]] = {}
        kernels: Counter[str] = Counter()
        fallbacks: Counter[tuple[str, str, str]] = Counter()
        for tally, n in served.items():
            by_backend = calls.setdefault(tally.stage, {})
            by_backend[tally.backend] = by_backend.get(tally.backend, 0) + n
            kernels[f"{tally.backend}/{tally.kernel}"] += n
            for backend, code in tally.passed_over:
                fallbacks[tally.stage, backend, code] += n
        return {
            "calls": calls,
            "kernels": dict(kernels),
            "fallbacks": [
                {
                    "stage": stage,
                    "backend": backend,
                    "code": code,
                    "calls": n,
                    "reason": examples[backend, code].sentence,
                    "fix": examples[backend, code].fix,
                }
                for (stage, backend, code), n in fallbacks.items()
            ],
            "failures": [
                {"backend": backend, "stage": stage, "error": error, "times": n}
                for (backend, stage, error), n in failures.items()
            ],
            "torch_sdpa": sdpa,
        }


def advise(stats: dict[str, Any]) -> list[str]:
    """Sentences that a user can act on, the most frequent matter first."""
    lines: list[str] = []
    for failure in stats["failures"]:
        lines.append(
            f"{failure['backend']} failed in a {failure['stage']} and was set aside: "
            f"{failure['error']}. ORCHARD_ON_ERROR=raise stops there instead of falling back."
        )
    for fallback in sorted(stats["fallbacks"], key=lambda entry: -int(entry["calls"])):
        fix = f" To change that: {fallback['fix']}." if fallback["fix"] else ""
        lines.append(
            f"{_calls(fallback['calls'])} ({fallback['stage']}) passed {fallback['backend']} by: "
            f"{fallback['reason']}.{fix}"
        )
    delegated = stats["torch_sdpa"]["delegated"]
    for sentence, n in sorted(delegated.items(), key=lambda entry: -int(entry[1])):
        lines.append(f"{_calls(n)} of torch's attention stayed with torch: {sentence}.")
    return lines


def _calls(n: int) -> str:
    return f"{n} call{'' if n == 1 else 's'}"


journal = Journal()
if hasattr(os, "register_at_fork"):  # another thread may hold the lock while this one forks
    os.register_at_fork(after_in_child=journal._renew_lock)

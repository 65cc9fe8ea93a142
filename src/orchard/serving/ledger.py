"""Which thread has which lane: leases, the three policies, and what is counted of them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchard.errors import PoolClosed, PoolExhausted
from orchard.serving.lanes import Lane

OnExhausted = Literal["share", "wait", "raise"]


@dataclass(frozen=True)
class LeaseCounts:
    in_use: int
    peak: int
    active: int
    leases: int
    shared: int
    waits: int
    exhausted: int


class Lease:
    """One thread's hold on a lane."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.thread = threading.current_thread()
        self.active = False


class _Waiter:
    def __init__(self, lock: threading.RLock) -> None:
        self.called = threading.Condition(lock)
        self.lane: Lane | None = None


class Ledger:
    """Every method is safe from any thread. One lock guards it all and is held for moments only:
    never while waiting, nor while anything of torch's or the caller's runs.
    """

    def __init__(
        self, lanes: Sequence[Lane], on_exhausted: OnExhausted, timeout: float | None
    ) -> None:
        self._default, *self._lanes = lanes
        self._on_exhausted = on_exhausted
        self._timeout = timeout
        self._closed = False
        self._leases = self._shared = self._waits = self._exhausted = self._peak = 0
        self._turn = 0  # of the lane that is shared next
        self._begin([])

    def _begin(self, held: list[Lease]) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()  # a pool may be collected in the middle of give_back
        self._waiters: deque[_Waiter] = deque()
        self._held = set(held)
        self._users = [0] * (1 + len(self._lanes))
        for lease in held:
            self._users[lease.lane.index] += 1
        # The lane that came back last goes out first: its memory is warm.
        self._free = [lane for lane in reversed(self._lanes) if not self._users[lane.index]]
        self._active = sum(lease.active for lease in held)

    def after_fork_in_child(self, held: list[Lease]) -> None:
        """The forking thread is the only one here, with its leases; locks may be anyone's."""
        self._begin(held)

    def take(self) -> Lease:
        """A lane for the calling thread, by the pool's policy."""
        return self._take(self._on_exhausted)

    def take_at_once(self) -> Lease:
        """A lane, shared where none is free; also from a closed pool, for work it has accepted."""
        return self._take("share", also_closed=True)

    def _take(self, on_exhausted: OnExhausted, also_closed: bool = False) -> Lease:
        with self._lock:
            if not also_closed:
                self._check_open()
            if threading.current_thread() is threading.main_thread():
                return self._lease(self._default)
            if not self._free:
                self._sweep()
            if self._free:
                return self._lease(self._free.pop())
            if on_exhausted == "share":
                self._shared += 1
                self._turn += 1
                return self._lease(self._lanes[(self._turn - 1) % len(self._lanes)])
            if on_exhausted == "raise":
                raise self._no_lane("none is free")
            return self._lease(self._wait())

    def _lease(self, lane: Lane) -> Lease:
        lease = Lease(lane)
        self._held.add(lease)
        self._users[lane.index] += 1
        self._leases += 1
        self._peak = max(self._peak, self._in_use())
        return lease

    def _wait(self) -> Lane:
        self._waits += 1
        waiter = _Waiter(self._lock)
        self._waiters.append(waiter)
        end = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            while waiter.lane is None and not self._closed:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise self._no_lane(f"none came back within {self._timeout} s")
                waiter.called.wait(left)
        except BaseException:
            if waiter.lane is not None:
                self._pass_on(waiter.lane)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        if waiter.lane is None:
            self._check_open()
        assert waiter.lane is not None
        return waiter.lane

    def _pass_on(self, lane: Lane) -> None:
        if self._waiters:
            waiter = self._waiters.popleft()
            waiter.lane = lane
            waiter.called.notify()
        else:
            self._free.append(lane)

    def _no_lane(self, why: str) -> PoolExhausted:
        self._exhausted += 1
        return PoolExhausted(
            f"all {len(self._lanes)} lanes of the StreamPool on {self._default.device} are held by "
            f"threads that live, and {why}; a lane comes back when its thread ends: use fewer "
            'threads, a larger size, or on_exhausted="share"'
        )

    def give_back(self, lease: Lease) -> None:
        """End a lease. Threads do this as they end, so it must not wait for one that never will:
        a thread of the process that forked this one, or one that the interpreter's end has stopped.
        """
        if sys.is_finalizing() or os.getpid() != self._process:
            return
        with self._lock:
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        if lease not in self._held:
            return
        self._held.remove(lease)
        self._active -= lease.active
        lane = lease.lane
        self._users[lane.index] -= 1
        if not self._users[lane.index] and lane is not self._default:
            self._pass_on(lane)

    def _sweep(self) -> None:
        """A thread gives back by itself, unless something keeps what it left behind."""
        for lease in [lease for lease in list(self._held) if not lease.thread.is_alive()]:
            self._end(lease)

    def activate(self, lease: Lease, also_closed: bool) -> int:
        """The lease's thread begins to work; returns how many are at work now."""
        with self._lock:
            if not also_closed:
                self._check_open()
            lease.active = True
            self._active += 1
            return self._active

    def rest(self, lease: Lease) -> None:
        """The lease's thread works elsewhere from now on."""
        with self._lock:
            self._active -= lease.active
            lease.active = False

    def close(self) -> None:
        """Nothing new is leased, and those who wait are told."""
        with self._lock:
            self._closed = True
            for waiter in self._waiters:
                waiter.called.notify()

    def check_open(self) -> None:
        with self._lock:
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed(f"this StreamPool on {self._default.device} has been closed")

    def _in_use(self) -> int:
        return len(self._lanes) - len(self._free)

    def counts(self) -> LeaseCounts:
        with self._lock:
            return LeaseCounts(
                in_use=self._in_use(),
                peak=self._peak,
                active=self._active,
                leases=self._leases,
                shared=self._shared,
                waits=self._waits,
                exhausted=self._exhausted,
            )

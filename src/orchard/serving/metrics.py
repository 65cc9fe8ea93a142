"""What queues and pools count, for Prometheus and for the log."""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

from orchard.dispatch.settings import logger
from orchard.errors import ArgumentTypeError, ArgumentValueError, ForkedProcessError
from orchard.serving.queue_stats import QueueStats
from orchard.serving.stream_pool import PoolStats

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector, CollectorRegistry

Stats = QueueStats | PoolStats


class Source(Protocol):
    """A BatchQueue or a StreamPool."""

    def stats(self) -> Stats: ...


class _Series(NamedTuple):
    """A field of the stats, as Prometheus shows it."""

    field: str
    kind: str  # "counter", or "gauge"
    help: str
    label: str | None = None  # of the values inside the field

    def values(self, value: Any) -> Iterator[tuple[list[str], float]]:
        """Values of the extra label, if there is one, and the number."""
        if self.label is None:
            yield [], value
        elif self.label == "quantile":
            for name, number in value._asdict().items():
                yield [f"{int(name[1:]) / 100:g}"], number
        else:
            for index, number in enumerate(value):
                yield [str(index)], number


_QUEUE = (
    _Series("submitted", "counter", "Requests taken, also those that wait for space"),
    _Series("completed", "counter", "Requests that got their result"),
    _Series("failed", "counter", "Requests that got an exception"),
    _Series("cancelled", "counter", "Requests cancelled before they ran"),
    _Series("expired", "counter", "Requests whose deadline passed"),
    _Series("dropped", "counter", "Requests dropped for a newer one"),
    _Series("closed", "counter", "Requests that the end of the queue came before"),
    _Series("rejected", "counter", "Requests refused because the queue was full"),
    _Series("batches", "counter", "Calls of the function that gave results"),
    _Series("rows", "counter", "Rows in those calls"),
    _Series("retried", "counter", "Batches that failed and were run again in halves"),
    _Series("oom_retries", "counter", "Batches that ran out of memory and were halved"),
    _Series("workers_replaced", "counter", "Worker threads that died and were replaced"),
    _Series("waiting", "gauge", "Requests held back by a full queue"),
    _Series("pending", "gauge", "Requests accepted and not yet run"),
    _Series("running", "gauge", "Requests in a worker's batch"),
    _Series("limit", "gauge", "Rows that a batch may have now"),
    _Series("mean_batch_rows", "gauge", "Mean rows of a batch"),
    _Series("fill", "gauge", "Mean rows of a batch as a share of max_batch"),
    _Series("padding", "gauge", "Share of the positions in batches that were padding"),
    _Series("queue_seconds", "gauge", "From submit to the start of the batch", "quantile"),
    _Series("run_seconds", "gauge", "From the start of a batch to its outcomes", "quantile"),
    _Series("busy", "gauge", "Share of its time that a worker spent on batches", "worker"),
)
_POOL = (
    _Series("in_use", "gauge", "Lanes held by threads"),
    _Series("active", "gauge", "Threads inside a block"),
    _Series("peak", "gauge", "The most lanes held at one time"),
    _Series("leases", "counter", "Leases given out"),
    _Series("shared", "counter", "Leases of a lane that another thread held"),
    _Series("waits", "counter", "Leases that had to wait"),
    _Series("exhausted", "counter", "Times that PoolExhausted was raised"),
    _Series("submitted", "counter", "Tasks submitted"),
    _Series("completed", "counter", "Tasks that got their result"),
    _Series("failed", "counter", "Tasks that raised"),
    _Series("cancelled", "counter", "Tasks cancelled before they ran"),
)
_KINDS: dict[str, tuple[type[Stats], tuple[_Series, ...]]] = {
    "queue": (QueueStats, _QUEUE),
    "pool": (PoolStats, _POOL),
}


class PrometheusCollector:
    """Shows queues and pools to Prometheus: `orchard_queue_*` and `orchard_pool_*`, by name.

    Nothing is kept alive: a queue that is dropped disappears from the next scrape. Numbers are
    taken when Prometheus asks, so that nothing is paid in between.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry` is prometheus_client's own if None."""
        try:
            from prometheus_client import REGISTRY, core
        except ImportError as error:
            raise ImportError(
                "PrometheusCollector needs prometheus-client; "
                "pip install 'orchard-attention[prometheus]'"
            ) from error
        self._families = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
        }
        self._lock = threading.Lock()
        self._sources: weakref.WeakValueDictionary[str, Source] = weakref.WeakValueDictionary()
        registry = REGISTRY if registry is None else registry
        registry.register(cast("Collector", self))

    def add(self, name: str, source: Source) -> None:
        """Show a BatchQueue or a StreamPool under `name`."""
        if not callable(getattr(source, "stats", None)):
            kind = type(source).__name__
            raise ArgumentTypeError(f"source is a {kind}; it must be a BatchQueue or a StreamPool")
        with self._lock:
            if name in self._sources:
                raise ArgumentValueError(f"name is {name!r}, which is taken; names must differ")
            self._sources[name] = source

    def remove(self, name: str) -> None:
        """Show it no longer; a name that is not shown is an error."""
        with self._lock:
            if self._sources.pop(name, None) is None:
                raise ArgumentValueError(f"name is {name!r}; there is {sorted(self._sources)}")

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client calls at a scrape."""
        found = self._stats()
        for kind, (of, series) in _KINDS.items():
            mine = {name: stats for name, stats in found.items() if isinstance(stats, of)}
            for each in series:
                labels = [kind] if each.label is None else [kind, each.label]
                name = f"orchard_{kind}_{each.field}"
                family = self._families[each.kind](name, each.help, labels=labels)
                for source, stats in mine.items():
                    for label, number in each.values(getattr(stats, each.field)):
                        family.add_metric([source, *label], number)
                yield family

    def _stats(self) -> dict[str, Stats]:
        with self._lock:
            sources = dict(self._sources)
        found = {}
        for name, source in sorted(sources.items()):
            try:
                found[name] = source.stats()
            except ForkedProcessError:  # the parent's: it shows it
                continue
        return found


class PeriodicLog:
    """Logs `stats()` every `interval` seconds as one line, and once more when it stops."""

    def __init__(self, stats: Callable[[], object], interval: float, name: str) -> None:
        if not isinstance(interval, int | float) or not 0 < interval < math.inf:
            raise ArgumentValueError(f"interval is {interval!r}; it must be seconds, above 0")
        self._stats = stats
        self._interval = min(float(interval), threading.TIMEOUT_MAX)
        self._name = name
        self._process = os.getpid()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"orchard-log-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self._say()

    def _say(self) -> None:
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s: %s", self._name, self._stats())

    def end(self) -> None:
        """Let the thread end, without waiting for it; in a forked process there is none."""
        if os.getpid() == self._process:
            self._over.set()

    def stop(self) -> None:
        """End it with a last line; no thread is left. In a forked process nothing has to end."""
        if os.getpid() != self._process or self._over.is_set():
            return
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._say()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

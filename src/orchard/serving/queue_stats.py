"""What a BatchQueue has done, as a value."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

_RECENT = 2048  # requests and batches that the percentiles are taken over


class Percentiles(NamedTuple):
    """Seconds; all 0 where nothing has been measured yet."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True)
class QueueStats:
    """A BatchQueue at one moment.

    submitted = completed + failed + cancelled + expired + dropped + closed + waiting + pending
    + running. Percentiles are over the most recent requests and batches.
    """

    submitted: int  # requests taken, also those that wait for space
    completed: int  # got their result
    failed: int  # got an exception of the function, or WorkerDied
    cancelled: int  # before they ran
    expired: int  # got DeadlineExceeded
    dropped: int  # got QueueFull for another's sake, under on_full="drop-oldest"
    closed: int  # got QueueClosed
    rejected: int  # refused at submit with QueueFull; not among the submitted
    batches: int  # calls of the function that gave results
    rows: int  # in those batches
    retried: int  # batches that failed and were run again in halves
    oom_retries: int  # those of them that ran out of memory
    workers_replaced: int
    waiting: int  # held back by a full queue, now
    pending: int  # accepted and not yet run, now
    running: int  # in a worker's batch, now
    limit: int  # rows a batch may have now: max_batch, or less after running out of memory
    mean_batch_rows: float
    fill: float  # mean_batch_rows / max_batch
    padding: float  # share of the positions in those batches that were padding
    queue_seconds: Percentiles  # from submit to the start of the batch, for each request
    run_seconds: Percentiles  # from the start of a batch to its outcomes, retries included
    busy: tuple[float, ...]  # share of its time that each worker has spent on batches

    def __str__(self) -> str:
        """One line for a log."""
        queue, run = self.queue_seconds, self.run_seconds
        return (
            f"{self.submitted} submitted, {self.completed} completed, {self.failed} failed, "
            f"{self.cancelled} cancelled, {self.expired} expired, {self.dropped} dropped, "
            f"{self.rejected} rejected, {self.closed} closed, {self.pending} pending; "
            f"{self.batches} batches of {self.mean_batch_rows:.1f} rows, limit {self.limit}; "
            f"queue p50 {queue.p50 * 1e3:.2f} p99 {queue.p99 * 1e3:.2f} ms, "
            f"run p50 {run.p50 * 1e3:.2f} p99 {run.p99 * 1e3:.2f} ms"
        )


@dataclass
class Counts:
    """The fields of QueueStats that only grow, but for the requests submitted: they are the sum."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    dropped: int = 0
    closed: int = 0
    rejected: int = 0
    batches: int = 0
    rows: int = 0
    retried: int = 0
    oom_retries: int = 0
    workers_replaced: int = 0


@dataclass
class Record:
    """What QueueStats are made from; guarded by the queue's lock."""

    counts: Counts = field(default_factory=Counts)
    filled: int = 0
    positions: int = 0
    queue_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    run_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def stats(
        self,
        *,
        waiting: int,
        pending: int,
        running: int,
        limit: int,
        max_batch: int,
        busy: tuple[float, ...],
    ) -> QueueStats:
        counts = self.counts
        mean = counts.rows / counts.batches if counts.batches else 0.0
        ended = counts.completed + counts.failed + counts.cancelled
        ended += counts.expired + counts.dropped + counts.closed
        return QueueStats(
            submitted=ended + waiting + pending + running,
            **asdict(counts),
            waiting=waiting,
            pending=pending,
            running=running,
            limit=limit,
            mean_batch_rows=mean,
            fill=mean / max_batch,
            padding=1 - self.filled / self.positions if self.positions else 0.0,
            queue_seconds=_percentiles(self.queue_seconds),
            run_seconds=_percentiles(self.run_seconds),
            busy=busy,
        )


def _percentiles(samples: Sequence[float]) -> Percentiles:
    if not samples:
        return Percentiles()
    ordered = sorted(samples)
    return Percentiles(*(ordered[int(share * len(ordered))] for share in (0.5, 0.9, 0.99)))

"""What Prometheus and the log are shown of queues and pools."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch

from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.serving import PoolStats, StreamPool
from orchard.serving.batch_queue import BatchQueue
from orchard.serving.metrics import PeriodicLog, PrometheusCollector
from orchard.serving.queue_stats import Counts, QueueStats

prometheus = pytest.importorskip("prometheus_client")

LONG = 60.0
COUNTED = {
    QueueStats: {"submitted"} | {field.name for field in fields(Counts)},
    PoolStats: {"leases", "shared", "waits", "exhausted"}
    | {"submitted", "completed", "failed", "cancelled"},
}


class Shown:
    """What a scrape of a registry says: samples by name and labels."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry(auto_describe=True)
        self.collector = PrometheusCollector(self.registry)

    def text(self) -> str:
        return prometheus.generate_latest(self.registry).decode()

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.fixture
def shown() -> Shown:
    return Shown()


def double(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        raise ValueError("negative")
    return x * 2


def test_a_queue_is_shown_as_it_counts(shown: Shown) -> None:
    """Every field of its stats, as the type that it is, under its name."""
    with BatchQueue(double, max_batch=4, workers=2) as queue:
        shown.collector.add("double", queue)
        futures = [queue.submit(torch.full((2, 1), float(n))) for n in (1, 2, -1)]
        queue.flush()
        assert [future.exception() is None for future in futures] == [True, True, False]
        stats = queue.stats()
        assert shown.value("orchard_queue_submitted_total", queue="double") == 3
        assert shown.value("orchard_queue_completed_total", queue="double") == 2
        assert shown.value("orchard_queue_failed_total", queue="double") == 1
        assert shown.value("orchard_queue_rows_total", queue="double") == 4
        assert shown.value("orchard_queue_limit", queue="double") == 4
        assert shown.value("orchard_queue_fill", queue="double") == stats.fill > 0
        for name, share in (("p50", "0.5"), ("p90", "0.9"), ("p99", "0.99")):
            for field in ("queue_seconds", "run_seconds"):
                found = shown.value(f"orchard_queue_{field}", queue="double", quantile=share)
                assert found == getattr(getattr(stats, field), name) > 0
        workers = [shown.value("orchard_queue_busy", queue="double", worker=w) for w in "01"]
        assert all(busy is not None and 0 <= busy <= 1 for busy in workers)
        assert max(busy for busy in workers if busy is not None) > 0
        assert shown.value("orchard_queue_busy", queue="double", worker="2") is None


def test_a_pool_is_shown_as_it_counts(shown: Shown) -> None:
    with StreamPool("cpu", size=2) as pool:
        shown.collector.add("lanes", pool)
        assert [pool.submit(int, n).result() for n in range(5)] == list(range(5))
        with pool.stream():
            assert shown.value("orchard_pool_active", pool="lanes") == 1
        assert shown.value("orchard_pool_active", pool="lanes") == 0
        assert shown.value("orchard_pool_submitted_total", pool="lanes") == 5
        assert shown.value("orchard_pool_completed_total", pool="lanes") == 5
        assert shown.value("orchard_pool_leases_total", pool="lanes") == pool.stats().leases


@pytest.mark.parametrize(("kind", "of"), [("queue", QueueStats), ("pool", PoolStats)])
def test_no_field_is_left_out(kind: str, of: type, shown: Shown) -> None:
    """Each has its family with a help text; what only grows is a counter, the rest a gauge."""
    grows = COUNTED[of]
    found = dict(re.findall(rf"# TYPE orchard_{kind}_(\w+) (\w+)", shown.text()))
    expected = {
        f"{field.name}_total" if field.name in grows else field.name: (
            "counter" if field.name in grows else "gauge"
        )
        for field in fields(of)
    }
    assert found == expected
    helped = re.findall(rf"# HELP orchard_{kind}_(\w+) \w+", shown.text())
    assert set(helped) == set(expected)


def test_several_sources_side_by_side(shown: Shown) -> None:
    with BatchQueue(double) as one, BatchQueue(double) as other, StreamPool("cpu") as pool:
        shown.collector.add("one", one)
        shown.collector.add("other", other)
        shown.collector.add("pool", pool)
        one.submit(torch.ones(1, 1)).result()
        assert shown.value("orchard_queue_submitted_total", queue="one") == 1
        assert shown.value("orchard_queue_submitted_total", queue="other") == 0
        assert shown.value("orchard_queue_submitted_total", queue="pool") is None
        shown.collector.remove("one")
        assert shown.value("orchard_queue_submitted_total", queue="one") is None
        assert shown.value("orchard_queue_submitted_total", queue="other") == 0


def test_a_dropped_queue_disappears(shown: Shown) -> None:
    """The collector keeps nothing alive; a closed queue is shown until it goes."""
    queue = BatchQueue(double)
    shown.collector.add("short", queue)
    queue.close()
    assert shown.value("orchard_queue_submitted_total", queue="short") == 0
    del queue
    gc.collect()
    assert shown.value("orchard_queue_submitted_total", queue="short") is None
    shown.collector.add("short", BatchQueue(double))


@pytest.mark.errors
def test_what_cannot_be_shown(shown: Shown) -> None:
    with pytest.raises(ArgumentTypeError, match="source is a int; it must be a BatchQueue or a"):
        shown.collector.add("number", 3)
    with StreamPool("cpu") as pool:
        shown.collector.add("pool", pool)
        with pytest.raises(ArgumentValueError, match="name is 'pool', which is taken"):
            shown.collector.add("pool", pool)
    with pytest.raises(ArgumentValueError, match=r"name is 'other'; there is \['pool'\]"):
        shown.collector.remove("other")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_shows_nothing_of_the_parent_s(shown: Shown) -> None:
    with BatchQueue(double) as queue:
        shown.collector.add("queue", queue)
        child = os.fork()
        if child == 0:
            os._exit(shown.value("orchard_queue_submitted_total", queue="queue") is None)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert shown.value("orchard_queue_submitted_total", queue="queue") == 0


def test_without_the_package() -> None:
    """The module imports without it, and the class says what to install."""
    program = (
        "import sys\n"
        "sys.modules['prometheus_client'] = None\n"
        "from orchard.serving.metrics import PrometheusCollector\n"
        "try:\n"
        "    PrometheusCollector()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip().endswith("pip install 'orchard-attention[prometheus]'"), done.stderr


class Lines(logging.Handler):
    """What is logged, and a way to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.came = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.came:
            self.said.append(record.getMessage())
            self.came.notify_all()

    def wait_for(self, count: int) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.said) >= count, LONG)


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logger = logging.getLogger("orchard")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def log_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("orchard-log")]


def test_a_queue_logs_and_stops_with_it(lines: Lines) -> None:
    """One line at a time while it runs, a last one with the whole account, then no thread."""
    with BatchQueue(double, log_every=0.001) as queue:
        lines.wait_for(3)
        assert len(log_threads()) == 1
        queue.submit(torch.ones(1, 1)).result()
    assert log_threads() == []
    assert all("\n" not in line for line in lines.said)
    assert lines.said[0].startswith("BatchQueue: 0 submitted, 0 completed")
    assert lines.said[-1].startswith("BatchQueue: 1 submitted, 1 completed")
    count = len(lines.said)
    queue.close()
    assert len(lines.said) == count


def test_a_long_interval_does_not_hold_up_the_end(lines: Lines) -> None:
    with BatchQueue(double, log_every=1e9):
        assert len(log_threads()) == 1
    assert log_threads() == []
    assert len(lines.said) == 1


def test_a_dropped_queue_stops_its_log(lines: Lines) -> None:
    queue = BatchQueue(double, log_every=1e9)
    (thread,) = log_threads()
    del queue
    gc.collect()
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_silent_logger_costs_nothing(lines: Lines) -> None:
    """Where nobody listens, stats are not even taken."""
    logging.getLogger("orchard").setLevel(logging.WARNING)
    asked: list[int] = []
    with PeriodicLog(lambda: asked.append(1), 0.001, "nobody"):
        pass
    assert asked == []
    assert lines.said == []


def test_a_pool_s_log(lines: Lines) -> None:
    with StreamPool("cpu") as pool, PeriodicLog(pool.stats, 0.001, "pool") as log:
        lines.wait_for(2)
        log.stop()
        count = len(lines.said)
        log.stop()
    assert len(lines.said) == count
    assert lines.said[0].startswith("pool: PoolStats(")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_closing_in_a_forked_child(lines: Lines) -> None:
    """The log is the parent's: the child's `close` neither waits nor speaks."""
    with BatchQueue(double, log_every=1e9) as queue:
        child = os.fork()
        if child == 0:
            queue.close()
            os._exit(len(lines.said))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(lines.said) == 1


@pytest.mark.errors
@pytest.mark.parametrize("interval", [0, -1, float("inf"), float("nan"), "often"])
def test_bad_intervals(interval: object) -> None:
    with pytest.raises(ArgumentValueError, match=r"interval is .*; it must be seconds, above 0"):
        PeriodicLog(dict, interval, "bad")
    with pytest.raises(ArgumentValueError, match=r"log_every is .*; it must be seconds above 0"):
        BatchQueue(double, log_every=interval)

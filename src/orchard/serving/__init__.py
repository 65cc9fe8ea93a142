"""Serving a model from many threads."""

from orchard.serving.batch_queue import BatchQueue
from orchard.serving.lanes import Event, Lane
from orchard.serving.queue_stats import QueueStats
from orchard.serving.stream_pool import PoolStats, StreamPool

__all__ = ["BatchQueue", "Event", "Lane", "PoolStats", "QueueStats", "StreamPool"]

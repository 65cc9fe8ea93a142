"""A model on several machines: a Ray Serve deployment with a BatchQueue inside each replica."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from orchard.dispatch.settings import logger
from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.serving.batch_queue import BatchQueue
from orchard.serving.queue_stats import QueueStats

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

_OF_ONE_PROCESS = ("model_or_fn", "pool", "clock")
_MAX_BATCH = inspect.signature(BatchQueue).parameters["max_batch"].default


class Replica:
    """What runs in each replica: a model of its own, behind a queue of its own."""

    def __init__(self, make_model: Callable[[], Callable[..., Any]], queue: dict[str, Any]) -> None:
        self._queue = BatchQueue(make_model(), **queue)

    async def __call__(self, x: Any, deadline: float | None = None, priority: int = 0) -> Any:
        return await self._queue.asubmit(x, deadline=deadline, priority=priority)

    def stats(self) -> QueueStats:
        return self._queue.stats()


def deployment(
    make_model: Callable[[], Callable[..., Any]],
    *,
    queue: Mapping[str, Any] | None = None,
    **options: Any,
) -> Application:
    """A Ray Serve application, for `ray.serve.run`, that answers in batches.

    make_model: called once in each replica; returns what BatchQueue takes, a model or a function.
    queue: BatchQueue's own parameters, the same in each replica.
    options: of `ray.serve.deployment`: num_replicas, ray_actor_options and so on. A replica takes
        2 * max_batch requests at once (max_ongoing_requests), so that the next batch fills while
        one runs.
    """
    serve = _serve()
    if not callable(make_model):
        kind = type(make_model).__name__
        raise ArgumentTypeError(f"make_model is a {kind}; it must be callable without arguments")
    parameters = dict(queue or {})
    _check_parameters(parameters)
    ongoing = 2 * parameters.get("max_batch", _MAX_BATCH)
    options = {"max_ongoing_requests": ongoing, **options}
    application: Application = serve.deployment(**options)(Replica).bind(make_model, parameters)
    return application


async def asubmit(
    handle: DeploymentHandle[Any],
    x: Any,
    *,
    deadline: float | None = None,
    priority: int = 0,
    attempts: int = 3,
) -> Any:
    """The answer to a request, as BatchQueue.asubmit.

    Ray finds another replica for what a dead one had not accepted. What it had accepted ends with
    RayActorError; here it is sent again, up to `attempts` times in all. A model's answer does not
    depend on how often it is asked.
    """
    from ray.exceptions import RayActorError

    if not isinstance(attempts, int) or attempts < 1:
        raise ArgumentValueError(f"attempts is {attempts!r}; it must be an integer of at least 1")
    for _ in range(attempts - 1):
        try:
            return await handle.remote(x, deadline, priority)
        except RayActorError:
            logger.warning("a replica died with a request, which is sent again")
    return await handle.remote(x, deadline, priority)


def _check_parameters(queue: dict[str, Any]) -> None:
    """Say here what would otherwise end every replica."""
    names = inspect.signature(BatchQueue).parameters
    allowed = [name for name in names if name not in _OF_ONE_PROCESS]
    wrong = [name for name in queue if name not in allowed]
    if wrong:
        raise ArgumentValueError(f"queue has {', '.join(wrong)}; it may have {', '.join(allowed)}")


def _serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise ImportError(
            "orchard.serving.ray needs Ray Serve; pip install 'orchard-attention[ray]'"
        ) from error
    return serve

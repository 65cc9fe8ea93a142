"""Every exception and warning that Orchard raises."""


class OrchardError(Exception):
    """Root of Orchard's exceptions."""


class ArgumentValueError(OrchardError, ValueError):
    """An argument has the right type and a value that is not allowed."""


class ArgumentTypeError(OrchardError, TypeError):
    """An argument has the wrong Python type, dtype or tensor layout."""


class NotServedError(OrchardError, RuntimeError):
    """The backend that was insisted on cannot serve this call; the message holds every reason."""


class SettingError(OrchardError, ValueError):
    """An ORCHARD_* environment variable holds a value that is not allowed."""


class NativeError(RuntimeError):
    """The native library refused a call, in its own words.

    No OrchardError: it is a failure of a kernel, which under "auto" the next backend makes good.
    """


class PoolExhausted(OrchardError, RuntimeError):
    """No lane of a StreamPool is free, and the pool was told to raise or its time-out passed."""


class PoolClosed(OrchardError, RuntimeError):
    """The StreamPool has been closed."""


class QueueFull(OrchardError, RuntimeError):
    """A BatchQueue holds max_pending requests: this one was refused, or dropped for a newer one."""


class QueueClosed(OrchardError, RuntimeError):
    """The BatchQueue was closed before this request could run."""


class DeadlineExceeded(OrchardError, TimeoutError):
    """The request's deadline passed before it ran."""


class WorkerDied(OrchardError, RuntimeError):
    """The worker thread that ran the request's batch ended without an answer."""


class ForkedProcessError(OrchardError, RuntimeError):
    """The object belongs to the parent of this forked process."""


class FallbackWarning(UserWarning):
    """A backend failed at run time and the next one served the call."""


class IntegrationWarning(UserWarning):
    """A part of torch could not be routed to Orchard."""

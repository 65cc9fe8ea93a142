"""Attention for PyTorch that is right on any layout, any device and any thread."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("orchard-attention")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

try:
    # The package comes first: the name `orchard.backends` belongs to the function.
    import orchard.backends  # noqa: F401
    from orchard.attention.api import attention
    from orchard.attention.compat import scaled_dot_product_attention
    from orchard.dispatch.report import BackendReport, advice, backends, stats
    from orchard.errors import (
        ArgumentTypeError,
        ArgumentValueError,
        DeadlineExceeded,
        FallbackWarning,
        ForkedProcessError,
        IntegrationWarning,
        NativeError,
        NotServedError,
        OrchardError,
        PoolClosed,
        PoolExhausted,
        QueueClosed,
        QueueFull,
        SettingError,
        WorkerDied,
    )
    from orchard.integrations.torch_sdpa import disable, enable, enabled
    from orchard.plans import explain
    from orchard.quantization import (
        KVCache,
        QuantizationConfig,
        QuantizedTensor,
        quantize,
        quantized_attention,
    )
    from orchard.serving.batch_queue import BatchQueue
    from orchard.serving.stream_pool import StreamPool
except Exception as _error:  # torch is missing, broken or too old, and `doctor` has to say so
    _import_error = _error
    for _name in ("attention", "backends"):  # packages that were imported before the error
        globals().pop(_name, None)

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"orchard.{name} needs a working torch: {_import_error}")

else:
    __all__ = [
        "ArgumentTypeError",
        "ArgumentValueError",
        "BackendReport",
        "BatchQueue",
        "DeadlineExceeded",
        "FallbackWarning",
        "ForkedProcessError",
        "IntegrationWarning",
        "KVCache",
        "NativeError",
        "NotServedError",
        "OrchardError",
        "PoolClosed",
        "PoolExhausted",
        "QuantizationConfig",
        "QuantizedTensor",
        "QueueClosed",
        "QueueFull",
        "SettingError",
        "StreamPool",
        "WorkerDied",
        "__version__",
        "advice",
        "attention",
        "backends",
        "disable",
        "enable",
        "enabled",
        "explain",
        "quantize",
        "quantized_attention",
        "scaled_dot_product_attention",
        "stats",
    ]

"""Attention for PyTorch that is right on any layout, any device and any thread."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("orchard-attention")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

try:
    import torch as _torch  # noqa: F401
except Exception as _error:  # torch is missing or broken, and `orchard doctor` has to say so
    _torch_error = _error

    def __getattr__(name: str) -> object:
        raise ImportError(f"orchard.{name} needs a working torch: {_torch_error}")

else:
    from orchard.attention.api import attention, explain
    from orchard.attention.compat import scaled_dot_product_attention
    from orchard.dispatch.report import BackendReport, advice, backends, stats
    from orchard.errors import (
        ArgumentTypeError,
        ArgumentValueError,
        FallbackWarning,
        IntegrationWarning,
        NotServedError,
        OrchardError,
        SettingError,
    )
    from orchard.integrations.torch_sdpa import disable, enable, enabled

    __all__ = [
        "ArgumentTypeError",
        "ArgumentValueError",
        "BackendReport",
        "FallbackWarning",
        "IntegrationWarning",
        "NotServedError",
        "OrchardError",
        "SettingError",
        "__version__",
        "advice",
        "attention",
        "backends",
        "disable",
        "enable",
        "enabled",
        "explain",
        "scaled_dot_product_attention",
        "stats",
    ]

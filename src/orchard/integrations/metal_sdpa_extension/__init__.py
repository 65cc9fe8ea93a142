"""A drop-in for the package `metal_sdpa_extension`, where every setting takes effect.

The names, fields, defaults and enum values are that package's; docs/quantization.md says what
each does here. It serves every device that Orchard serves. To have `import metal_sdpa_extension`
find it in an environment:

    python -m orchard.integrations.metal_sdpa_extension --install-shim
"""

from __future__ import annotations

import threading
from typing import NoReturn

import torch

from orchard.integrations import torch_sdpa
from orchard.integrations.metal_sdpa_extension.calls import (
    QUANT_BLOCK_WISE,
    QUANT_INT4,
    QUANT_INT8,
    QUANT_NONE,
    QUANT_TENSOR_WISE,
    clear_quantization_mode,
    get_dispatch_stats,
    hadamard_rotate,
    metal_flash_attention_autograd,
    metal_quantized_flash_attention_autograd,
    metal_scaled_dot_product_attention,
    quantized_scaled_dot_product_attention,
    quantized_scaled_dot_product_attention_enhanced,
    quantized_scaled_dot_product_attention_unified,
    quantized_scaled_dot_product_attention_with_config,
    reset_dispatch_stats,
    rope_scaled_dot_product_attention,
    set_quantization_mode,
    sparse_indexer_scores,
)
from orchard.integrations.metal_sdpa_extension.config import (
    BlockSizeConfig,
    HybridGranularityConfig,
    HybridStrategy,
    OutputPrecision,
    QuantizationConfig,
    QuantizationGranularity,
    QuantizationPrecision,
)
from orchard.integrations.metal_sdpa_extension.selection import (
    analyze_tensor_characteristics,
    estimate_accuracy_loss,
    estimate_quantization_overhead,
    select_hybrid_granularities,
    select_optimal_block_sizes,
    select_optimal_granularity,
)
from orchard.quantization import TensorAnalysisMetrics

__all__ = [
    "QUANT_BLOCK_WISE",
    "QUANT_INT4",
    "QUANT_INT8",
    "QUANT_NONE",
    "QUANT_TENSOR_WISE",
    "BlockSizeConfig",
    "HybridGranularityConfig",
    "HybridStrategy",
    "MetalSDPABackend",
    "OutputPrecision",
    "QuantizationConfig",
    "QuantizationGranularity",
    "QuantizationPrecision",
    "TensorAnalysisMetrics",
    "analyze_tensor_characteristics",
    "clear_quantization_mode",
    "estimate_accuracy_loss",
    "estimate_quantization_overhead",
    "get_dispatch_stats",
    "get_version",
    "hadamard_rotate",
    "is_metal_available",
    "metal_flash_attention_autograd",
    "metal_quantized_flash_attention_autograd",
    "metal_scaled_dot_product_attention",
    "quantized_scaled_dot_product_attention",
    "quantized_scaled_dot_product_attention_enhanced",
    "quantized_scaled_dot_product_attention_unified",
    "quantized_scaled_dot_product_attention_with_config",
    "register_backend",
    "reset_dispatch_stats",
    "rope_scaled_dot_product_attention",
    "select_hybrid_granularities",
    "select_optimal_block_sizes",
    "select_optimal_granularity",
    "set_quantization_mode",
    "sparse_indexer_scores",
    "unregister_backend",
]

INTERFACE_VERSION = (1, 0, 0)  # of the package whose interface this is
_registered = threading.Event()
_lock = threading.Lock()


def register_backend() -> None:
    """Serve torch's scaled_dot_product_attention with Orchard; a second call changes nothing."""
    with _lock:
        # A disable() of somebody else may have undone it.
        if not (_registered.is_set() and torch_sdpa.is_enabled()):
            torch_sdpa.enable()
            _registered.set()


def unregister_backend() -> None:
    """Undo `register_backend`: torch's attention is torch's again."""
    with _lock:
        if _registered.is_set():
            torch_sdpa.disable()
            _registered.clear()


class MetalSDPABackend:
    """The two switches as static methods."""

    register_backend = staticmethod(register_backend)
    unregister_backend = staticmethod(unregister_backend)


def is_metal_available() -> bool:
    """Whether torch sees an Apple GPU."""
    return torch.backends.mps.is_available()


def get_version() -> tuple[int, int, int]:
    """The version of the interface; `orchard.__version__` is Orchard's own."""
    return INTERFACE_VERSION


def __getattr__(name: str) -> NoReturn:
    if name.lower().startswith("mla") or name.startswith("has_native_bfloat"):
        raise AttributeError(
            f"Orchard's metal_sdpa_extension has no {name}: it concerns Metal's own library"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

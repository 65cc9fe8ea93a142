"""Tensors in fewer bits, and attention on them, where every setting takes effect."""

from orchard.quantization.analysis import TensorAnalysisMetrics, analyse
from orchard.quantization.attention import explain, quantized_attention
from orchard.quantization.cache import KVCache, load, save
from orchard.quantization.config import QuantizationConfig
from orchard.quantization.engines import QuantizedPlan, plan
from orchard.quantization.formats import Deviation, QuantizedTensor
from orchard.quantization.operands import quantize

__all__ = [
    "Deviation",
    "KVCache",
    "QuantizationConfig",
    "QuantizedPlan",
    "QuantizedTensor",
    "TensorAnalysisMetrics",
    "analyse",
    "explain",
    "load",
    "plan",
    "quantize",
    "quantized_attention",
    "save",
]

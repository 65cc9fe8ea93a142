"""A key-value cache that grows without touching what it holds, and files of quantised tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from orchard.attention.api import Layout
from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.quantization.config import QuantizationConfig
from orchard.quantization.formats import (
    LAYOUTS,
    PARTS,
    PASS_THROUGH,
    Format,
    QuantizedTensor,
    check_choice,
    spread_over_rows,
)
from orchard.quantization.operands import four_axes, quantize_together

FIRST_CAPACITY = 64  # rows; it doubles when it is full
_FILE_FORMAT = "orchard.quantized/1"
_ROW_GROUP = (1, 1, 1)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PASS_THROUGH.values()}


class _Growing:
    """One operand of a cache: rows in buffers with room for more, a scale for every row."""

    def __init__(self, first: QuantizedTensor) -> None:
        self.like = _by_row(first)
        self.length = 0
        self.buffers: dict[str, Tensor] = {}
        self.append(first)

    @property
    def mean(self) -> Tensor | None:
        return self.like.mean

    def append(self, more: QuantizedTensor) -> None:
        rows = _by_row(more)
        for name, part in _rows_of(rows).items():
            buffer = self.buffers.get(name)
            self.buffers[name] = _with_room(buffer, part, self.length)
            self.buffers[name][:, :, self.length : self.length + part.shape[2]] = part
        self.length += more.data.shape[2]

    def whole(self) -> QuantizedTensor:
        filled: dict[str, Any] = {
            name: buffer[:, :, : self.length] for name, buffer in self.buffers.items()
        }
        return replace(self.like, **filled, trusted=True)


def _rows_of(tensor: QuantizedTensor) -> dict[str, Tensor]:
    """The parts that have rows; the mean has none."""
    return {name: part for name, part in tensor.parts.items() if name != "mean"}


def _by_row(tensor: QuantizedTensor) -> QuantizedTensor:
    """The same levels with the scale of every row written out, to which rows can be added."""
    if tensor.scales is None:
        return tensor
    rows = tensor.data.shape[:3]
    written: dict[str, Any] = {
        name: spread_over_rows(part, tensor.group, rows).squeeze(-1).contiguous()
        for name, part in tensor.parts.items()
        if name in ("scales", "zero_points")
    }
    form = replace(tensor.format, granularity="row")
    return replace(tensor, format=form, group=_ROW_GROUP, **written, trusted=True)


def _with_room(buffer: Tensor | None, part: Tensor, length: int) -> Tensor:
    """`buffer`, or a larger copy of its rows, with room for those of `part`."""
    needed = length + part.shape[2]
    if buffer is not None and buffer.shape[2] >= needed:
        return buffer
    rows = max(needed, FIRST_CAPACITY, 2 * length)
    with torch.inference_mode(False):  # rows may be added outside of it later
        larger = part.new_empty((*part.shape[:2], rows, *part.shape[3:]))
    if buffer is not None:
        larger[:, :, :length] = buffer[:, :, :length]
    return larger


class KVCache:
    """Keys and values of past tokens, stored as `config` says.

    Each append is quantised by itself, with the granularity counted within it, and kept with a
    scale for every row; what was there keeps its bytes. The mean of a smoothed key is that of the
    first append that has rows. `cache.key` and `cache.value` are what `quantized_attention` takes.
    """

    def __init__(
        self, config: QuantizationConfig | None = None, *, layout: Layout = "bhsd"
    ) -> None:
        config = config or QuantizationConfig()
        if not isinstance(config, QuantizationConfig):
            raise ArgumentTypeError(f"config is {config!r}; it must be a QuantizationConfig")
        check_choice("layout", layout, LAYOUTS)
        self.config = config
        self.layout: Layout = layout
        self._operands: dict[str, _Growing] = {}

    def __len__(self) -> int:
        """Rows that every head holds."""
        return self._operands["key"].length if self._operands else 0

    @property
    def key(self) -> QuantizedTensor:
        return self._whole("key")

    @property
    def value(self) -> QuantizedTensor:
        return self._whole("value")

    @property
    def nbytes(self) -> int:
        """Bytes of what is held, without the room for more."""
        return sum(operand.whole().nbytes for operand in self._operands.values())

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add rows; both tensors have four axes, and those of the first append's sizes."""
        given = {"key": key, "value": value}
        _check_sizes(given, self._operands, self.layout)
        begun = self._operands if len(self) else {}  # without rows there is no mean yet
        stored = quantize_together(
            given,
            self.config.formats,
            self.layout,
            one_choice=not self.config.hybrid_per_operand,
            means={n: o.mean for n, o in begun.items() if o.mean is not None},
        )
        for name, tensor in stored.items():
            if name in begun:
                begun[name].append(tensor)
            else:
                self._operands[name] = _Growing(tensor)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file; needs the `quantization` extra."""
        held = {name: operand.whole() for name, operand in self._operands.items()}
        _write(path, held, {"config": asdict(self.config), "layout": self.layout})

    @classmethod
    def load(cls, path: str | PathLike[str], device: torch.device | str = "cpu") -> KVCache:
        """The cache that `save` wrote, to be appended to as before."""
        tensors, about = _read(path, device)
        if "config" not in about:
            raise ArgumentValueError(f"path is {str(path)!r}; it must be a file of KVCache.save")
        with _naming(path, "cache"):
            config = QuantizationConfig(**_fact(about, "config", dict))
            cache = cls(config, layout=_fact(about, "layout", str))
            _check_held(tensors, cache)
        cache._operands = {name: _Growing(tensor) for name, tensor in tensors.items()}
        return cache

    def _whole(self, name: str) -> QuantizedTensor:
        if not self._operands:
            raise ArgumentValueError(f"the cache has no {name} yet; append to it first")
        return self._operands[name].whole()


def _check_sizes(given: Mapping[str, Tensor], held: Mapping[str, _Growing], layout: Layout) -> None:
    """Refuse an append that does not fit, before anything is quantised."""
    views = {name: four_axes(name, tensor, layout) for name, tensor in given.items()}
    for name, tensor in given.items():
        if tensor.ndim != 4:
            raise ArgumentValueError(f"{name} has {tensor.ndim} axes; it must have 4")
    for name, operand in held.items():
        first, view = operand.like, views[name]
        fixed = (*first.data.shape[:2], first.head_dim, first.dtype, first.device)
        found = (*view.shape[:2], view.shape[3], view.dtype, view.device)
        if found != fixed:
            raise ArgumentValueError(
                f"{name} has batch, heads, head dimension, dtype and device {found}; they must be "
                f"those of the first append, {fixed}"
            )
    key, value = (views[name].shape[:3] for name in ("key", "value"))
    if key != value:
        raise ArgumentValueError(
            f"value has batch, heads and length {list(value)}; they must be key's, {list(key)}"
        )


def _check_held(tensors: Mapping[str, QuantizedTensor], cache: KVCache) -> None:
    """Refuse tensors that are not the key and value that such a cache holds."""
    if not tensors:
        return
    if tensors.keys() != {"key", "value"}:
        raise ArgumentValueError(f"it holds {sorted(tensors)}; it must hold key and value")
    for name, tensor in tensors.items():
        wanted, form = cache.config.formats[name], tensor.format
        fixed = (wanted.precision, wanted.symmetric, wanted.smooth, cache.layout, 4)
        found = (form.precision, form.symmetric, form.smooth, tensor.layout, tensor.ndim)
        if found != fixed:
            raise ArgumentValueError(
                f"{name} has precision, symmetric, smooth, layout and ndim {found}; they must be "
                f"the cache's, {fixed}"
            )
    key, value = (tensors[name].data.shape[:3] for name in ("key", "value"))
    if key != value:
        raise ArgumentValueError(
            f"value has batch, heads and length {list(value)}; they must be key's, {list(key)}"
        )


def save(path: str | PathLike[str], tensors: Mapping[str, QuantizedTensor]) -> None:
    """Write quantised tensors to a safetensors file; needs the `quantization` extra."""
    _write(path, tensors, {})


def load(
    path: str | PathLike[str], device: torch.device | str = "cpu"
) -> dict[str, QuantizedTensor]:
    """The tensors that `save` or `KVCache.save` wrote, by their names."""
    return _read(path, device)[0]


def _write(
    path: str | PathLike[str], tensors: Mapping[str, QuantizedTensor], about: dict[str, Any]
) -> None:
    save_file, *_ = _safetensors()
    parts, described = {}, {}
    written: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, QuantizedTensor):
            raise ArgumentTypeError(f"{name} is {tensor!r}; it must be a QuantizedTensor")
        for part_name, part in tensor.parts.items():
            dense = part.contiguous()
            memory = dense.untyped_storage().data_ptr()
            # safetensors refuses shared memory, which a tensor under two names has.
            parts[f"{name}.{part_name}"] = dense.clone() if memory in written else dense
            written.add(memory)
        described[name] = {
            "format": asdict(tensor.format),
            "group": tensor.group,
            "head_dim": tensor.head_dim,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "layout": tensor.layout,
            "ndim": tensor.ndim,
            "reasoning": tensor.reasoning,
        }
    metadata = {_FILE_FORMAT: json.dumps({"tensors": described, **about})}
    save_file(parts, path, metadata=metadata)


def _read(
    path: str | PathLike[str], device: torch.device | str
) -> tuple[dict[str, QuantizedTensor], dict[str, Any]]:
    _, safe_open, safetensor_error = _safetensors()
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            described = (file.metadata() or {}).get(_FILE_FORMAT)
            names = file.keys()
            parts = {name: file.get_tensor(name) for name in names}
    except safetensor_error as error:
        raise ArgumentValueError(f"path is {str(path)!r}, no safetensors file: {error}") from error
    if described is None:
        raise ArgumentValueError(
            f"path is {str(path)!r}; it must be a file of quantised tensors, {_FILE_FORMAT}"
        )
    with _naming(path, "description"):
        about = json.loads(described)
        held = _fact(about, "tensors", dict)
    tensors = {}
    for name, facts in held.items():
        with _naming(path, f"tensor {name!r}"):
            named: dict[str, Any] = {part: parts.get(f"{name}.{part}") for part in PARTS}
            dtype = _fact(facts, "dtype", str)
            check_choice("dtype", dtype, tuple(_DTYPES))
            tensors[name] = QuantizedTensor(
                **named,
                format=Format(**_fact(facts, "format", dict)),
                group=tuple(_fact(facts, "group", list)),
                head_dim=_fact(facts, "head_dim", int),
                dtype=_DTYPES[dtype],
                layout=_fact(facts, "layout", str),
                ndim=_fact(facts, "ndim", int),
                reasoning=_fact(facts, "reasoning", str),
            )
    return tensors, about


@contextmanager
def _naming(path: str | PathLike[str], what: str) -> Iterator[None]:
    """Whatever is wrong with the contents of a file is said together with its path."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ArgumentValueError(f"path is {str(path)!r}; its {what} is wrong: {error}") from error


def _fact(facts: Any, name: str, kind: type) -> Any:
    """A field of a description, which must be there and of its kind."""
    found = facts.get(name) if isinstance(facts, dict) else None
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ArgumentTypeError(f"{name} is {found!r}; it must be of type {kind.__name__}")
    return found


def _safetensors() -> tuple[Any, Any, Any]:
    try:
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            "files of quantised tensors need safetensors: "
            "pip install 'orchard-attention[quantization]'"
        ) from error
    return save_file, safe_open, SafetensorError

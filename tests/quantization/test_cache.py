"""The cache grows without touching what it holds; files give back what was written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from orchard.errors import ArgumentTypeError, ArgumentValueError
from orchard.quantization import (
    KVCache,
    QuantizationConfig,
    QuantizedTensor,
    load,
    quantize,
    quantized_attention,
    save,
)

PRECISIONS = ("int8", "int4", "fp8", "bf16")
LENGTHS = (37, 1, 1, 70, 0, 1)  # a prompt, tokens, more than the first capacity, nothing


def rows(length: int, seed: int, **options: Any) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    key = torch.randn(2, 3, length, 17, generator=source, **options)
    return key + 3.0, torch.randn(2, 3, length, 9, generator=source, **options)


def config(precision: Any = "int8", **options: Any) -> QuantizationConfig:
    return QuantizationConfig("fp16", precision, precision, **options)


def same(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Equal to the bit, in every part and all that is known about it."""
    facts = ("format", "group", "head_dim", "dtype", "layout", "ndim", "reasoning")
    return (
        one.parts.keys() == other.parts.keys()
        and all(
            torch.equal(
                part.contiguous().view(torch.uint8),
                other.parts[name].contiguous().view(torch.uint8),
            )
            for name, part in one.parts.items()
        )
        and all(getattr(one, fact) == getattr(other, fact) for fact in facts)
    )


@pytest.mark.parametrize("granularity", ["tensor", "block", "row", "hybrid"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_append_leaves_what_is_there(precision: str, granularity: Any) -> None:
    """After each append the bytes of the old rows are the same, and the new ones follow."""
    cache = KVCache(config(precision, granularity=granularity, symmetric=precision == "fp8"))
    mean = rows(LENGTHS[0], 0)[0].mean(2, keepdim=True) * (precision != "bf16")
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for seed, length in enumerate(LENGTHS):
        before = {name: part.clone() for name, part in cache.key.parts.items()} if seed else {}
        key, value = rows(length, seed)
        cache.append(key, value)
        for name, part in before.items():
            kept = cache.key.parts[name].narrow(2, 0, part.shape[2])
            assert torch.equal(kept.contiguous().view(torch.uint8), part.view(torch.uint8))
        # An append is quantised by itself, but for the mean of a smoothed key.
        for tensor, appended in ((key - mean, keys), (value, values)):
            stored = quantize(tensor, precision, granularity, symmetric=cache.config.symmetric)
            appended.append(stored.dequantize())
        assert torch.equal(cache.key.dequantize(), torch.cat(keys, 2) + mean)
        assert torch.equal(cache.value.dequantize(), torch.cat(values, 2))
    assert len(cache) == sum(LENGTHS)
    assert cache.key.shape == (2, 3, sum(LENGTHS), 17)


def test_a_view_stays_valid() -> None:
    """What was taken from the cache does not change when it grows."""
    cache = KVCache()
    cache.append(*rows(5, 0))
    taken = cache.key
    before = taken.dequantize()
    for seed in range(70):
        cache.append(*rows(1, seed))
    assert torch.equal(taken.dequantize(), before)


def test_rows_are_added_outside_of_inference_mode() -> None:
    key, value = (torch.randn(1, 2, 5, 8) for _ in range(2))
    cache, other = KVCache(), KVCache()
    with torch.inference_mode():
        cache.append(key, value)
    for _ in range(2):
        cache.append(key, value)
    for _ in range(3):
        other.append(key, value)
    assert torch.equal(cache.key.dequantize(), other.key.dequantize())
    assert torch.equal(cache.value.dequantize(), other.value.dequantize())


def test_rows_are_seldom_moved() -> None:
    """A thousand tokens, one by one, are copied to a larger buffer a few times only."""
    cache = KVCache()
    places = []
    for _ in range(1000):
        cache.append(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))
        places.append(cache.key.data.data_ptr())
    moves = sum(one != other for one, other in pairwise(places))
    assert moves <= 4  # 64, 128, 256, 512, 1024


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_attention_on_a_cache(layout: Any) -> None:
    """It is attention at the values that the cache holds."""
    cache = KVCache(layout=layout)
    for seed, length in enumerate(LENGTHS):
        key, value = rows(length, seed)
        if layout == "bshd":
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        cache.append(key, value)
    query = torch.randn(2, 6, 1, 17)
    if layout == "bshd":
        query = query.transpose(1, 2)
    passing = QuantizationConfig("fp32", "fp32", "fp32")
    out = quantized_attention(query, cache.key, cache.value, config=passing, layout=layout)
    expected = quantized_attention(
        query, cache.key.dequantize(), cache.value.dequantize(), config=passing, layout=layout
    )
    assert torch.equal(out, expected)
    assert out.shape == (*query.shape[:3], 9)


def test_bytes() -> None:
    """Data and a scale for every row, the mean once; room for more is not counted."""
    cache = KVCache()
    assert cache.nbytes == 0
    assert len(cache) == 0
    cache.append(*rows(10, 0))
    assert cache.nbytes == 6 * (10 * (17 + 4 + 9 + 4) + 4 * 17)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_file_of_a_cache(precision: str, symmetric: bool, tmp_path: Path) -> None:
    """A loaded cache is the saved one, and goes on growing as that does."""
    cache = KVCache(config(precision, symmetric=symmetric or precision == "fp8"))
    cache.append(*rows(37, 0, dtype=torch.bfloat16))
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    loaded = KVCache.load(path)
    assert loaded.config == cache.config
    for _ in range(2):
        assert same(loaded.key, cache.key)
        assert same(loaded.value, cache.value)
        for each in (cache, loaded):
            each.append(*rows(3, 1, dtype=torch.bfloat16))


@pytest.mark.parametrize("granularity", ["tensor", "block", "row", "hybrid"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_file_of_tensors(precision: Any, granularity: Any, tmp_path: Path) -> None:
    """Every format comes back to the bit, with its layout, dtype and reasoning."""
    key, value = rows(37, 0, dtype=torch.float16)
    tensors = {
        "key": quantize(key, precision, granularity, smooth=True),
        "value": quantize(value[0], precision, granularity, layout="bshd"),
    }
    save(tmp_path / "tensors", tensors)
    loaded = load(tmp_path / "tensors")
    assert loaded.keys() == tensors.keys()
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())


def test_an_empty_cache(tmp_path: Path) -> None:
    """It has no key yet, can be saved, and comes back empty."""
    with pytest.raises(ArgumentValueError, match="the cache has no key yet"):
        _ = KVCache().key
    KVCache(layout="bshd").save(tmp_path / "empty")
    loaded = KVCache.load(tmp_path / "empty")
    assert len(loaded) == 0
    assert loaded.layout == "bshd"


def test_no_rows_are_no_beginning(tmp_path: Path) -> None:
    """The mean of a smoothed key is that of the first rows, not of an append without any."""
    whole, begun = KVCache(config()), KVCache(config())
    begun.append(*rows(0, 0))
    begun.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache")
    for cache in (whole, begun, loaded):
        cache.append(*rows(37, 1))
        cache.append(*rows(2, 2))
    assert whole.key.mean is not None
    assert whole.key.mean.abs().min() > 1.0
    for cache in (begun, loaded):
        assert same(cache.key, whole.key)
        assert same(cache.value, whole.value)


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    """Parts that share memory are written for each name, and come back as they are."""
    stored = quantize(rows(5, 0)[0], "int8", "row", symmetric=False, smooth=True)
    save(tmp_path / "tensors", {"one": stored, "other": stored})
    loaded = load(tmp_path / "tensors")
    assert loaded.keys() == {"one", "other"}
    assert all(same(tensor, stored) for tensor in loaded.values())


@pytest.mark.errors
def test_wrong_appends() -> None:
    """What does not fit is refused, and the cache is as it was."""
    cache = KVCache()
    key, value = rows(4, 0)
    with pytest.raises(ArgumentValueError, match="key has 3 axes; it must have 4"):
        cache.append(key[0], value[0])
    with pytest.raises(ArgumentValueError, match=r"value has batch, heads and length \[2, 3, 3\]"):
        cache.append(key, value[:, :, 1:])
    cache.append(key, value)
    before = cache.key, cache.value
    bad = value.clone()
    bad[0, 0, 0, 0] = torch.nan
    for wrong, words in (
        ((key, bad), "value holds NaN"),
        ((key[:1], value[:1]), "key has batch, heads"),
        ((key, value[..., 1:]), "value has batch, heads, head dimension"),
        ((key.half(), value.half()), "key has batch, heads, head dimension, dtype"),
    ):
        with pytest.raises(ArgumentValueError, match=words):
            cache.append(*wrong)
        assert same(cache.key, before[0])
        assert same(cache.value, before[1])


@pytest.mark.errors
def test_wrong_arguments(tmp_path: Path) -> None:
    """Configuration, layout and files are checked."""
    wrong: Any = "int8"
    with pytest.raises(ArgumentTypeError, match="config is 'int8'"):
        KVCache(wrong)
    with pytest.raises(ArgumentValueError, match="layout is 'int8'"):
        KVCache(layout=wrong)
    not_stored: Any = {"key": torch.ones(2)}
    with pytest.raises(ArgumentTypeError, match=r"key is .* it must be a QuantizedTensor"):
        save(tmp_path / "x", not_stored)
    save_file({"key.data": torch.ones(2)}, tmp_path / "other")
    with pytest.raises(ArgumentValueError, match="must be a file of quantised tensors"):
        load(tmp_path / "other")
    save(tmp_path / "tensors", {"key": quantize(torch.ones(2, 2))})
    with pytest.raises(ArgumentValueError, match=r"must be a file of KVCache\.save"):
        KVCache.load(tmp_path / "tensors")


def lose_rows(about: Any, parts: dict[str, Tensor]) -> None:
    for name in ("value.data", "value.scales"):
        parts[name] = parts[name][:, :, :2].contiguous()


MALFORMED: dict[str, tuple[Callable[[Any, dict[str, Tensor]], object], str]] = {
    # name: (what is done to the description and to the tensors, words of the error)
    "group of 0": (
        lambda about, _: about["tensors"]["key"].update(group=[0, 1, 1]),
        "tensor 'key' is wrong: group is 0; it must be at least 1",
    ),
    "group of four": (
        lambda about, _: about["tensors"]["key"].update(group=[1, 1, 1, 1]),
        "group is .* it must be three sizes",
    ),
    "no group": (
        lambda about, _: about["tensors"]["key"].update(group=7),
        "group is 7; it must be of type list",
    ),
    "unknown dtype": (
        lambda about, _: about["tensors"]["value"].update(dtype="nn"),
        "tensor 'value' is wrong: dtype is 'nn'; it must be one of 'float32'",
    ),
    "missing field": (
        lambda about, _: about["tensors"]["key"].pop("ndim"),
        "ndim is None; it must be of type int",
    ),
    "field of another type": (
        lambda about, _: about["tensors"]["key"].update(ndim=True),
        "ndim is True; it must be of type int",
    ),
    "too few axes": (
        lambda about, _: about["tensors"]["key"].update(ndim=3),
        "ndim is 3; it must be 4 for data of 2 batch entries",
    ),
    "layout": (
        lambda about, _: about["tensors"]["key"].update(layout="zz"),
        "layout is 'zz'; it must be one of",
    ),
    "another layout": (
        lambda about, _: about["tensors"]["key"].update(layout="bshd"),
        "key has precision, symmetric, smooth, layout and ndim .*'bshd'",
    ),
    "unknown precision": (
        lambda about, _: about["tensors"]["key"]["format"].update(precision="int9"),
        "precision is 'int9'",
    ),
    "unknown setting": (
        lambda about, _: about["tensors"]["key"]["format"].update(colour=1),
        "unexpected keyword argument 'colour'",
    ),
    "no description": (lambda about, _: about.pop("tensors"), "tensors is None; it must be"),
    "missing tensor": (lambda about, _: about["tensors"].pop("key"), "it must hold key and value"),
    "missing part": (lambda _, parts: parts.pop("key.scales"), "scales is None; it must be"),
    "missing mean": (lambda _, parts: parts.pop("key.mean"), "mean is None; it must be"),
    "missing data": (lambda _, parts: parts.pop("value.data"), "data is None; it must be"),
    "NaN scales": (lambda _, parts: parts["key.scales"].fill_(torch.nan), "scales holds NaN"),
    "negative scales": (lambda _, parts: parts["key.scales"].neg_(), "scales are from -"),
    "NaN mean": (lambda _, parts: parts["key.mean"].fill_(torch.nan), "mean holds NaN"),
    "two lengths": (lose_rows, "value has batch, heads and length .* they must be key's"),
    "unknown configuration": (
        lambda about, _: about["config"].update(key_precison="int8"),
        "cache is wrong: .*'key_precison'",
    ),
    "wrong configuration": (
        lambda about, _: about["config"].update(granularity="head"),
        "cache is wrong: granularity is 'head'",
    ),
    "another configuration": (
        lambda about, _: about["config"].update(key_precision="int4"),
        "key has precision, symmetric, .*'int8'.* they must be the cache's, .*'int4'",
    ),
    "layout of the cache": (
        lambda about, _: about.update(layout=3),
        "cache is wrong: layout is 3; it must be of type str",
    ),
}


@pytest.mark.errors
@pytest.mark.parametrize("name", [None, *MALFORMED])
def test_malformed_files(name: str | None, tmp_path: Path) -> None:
    """A file that does not fit is refused by a message that names it and the field."""
    path, other = tmp_path / "cache", tmp_path / "other"
    cache = KVCache()
    cache.append(torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 4))
    cache.save(path)
    with safe_open(path, framework="pt") as file:
        ((key, text),) = file.metadata().items()
        names = file.keys()
        parts = {name: file.get_tensor(name) for name in names}
    about = json.loads(text)
    if name is not None:
        MALFORMED[name][0](about, parts)
    save_file(parts, other, metadata={key: json.dumps(about)})
    if name is None:
        assert same(KVCache.load(other).key, cache.key)
        return
    with pytest.raises(ArgumentValueError, match=f"path is .*other.*{MALFORMED[name][1]}"):
        KVCache.load(other)


@pytest.mark.errors
def test_files_of_another_kind(tmp_path: Path) -> None:
    """What is no safetensors file, or holds no JSON, is refused by its path."""
    path = tmp_path / "noise"
    path.write_bytes(b"\0" * 100)
    with pytest.raises(ArgumentValueError, match=r"path is .*noise.*no safetensors file"):
        load(path)
    save_file({}, path, metadata={"orchard.quantized/1": "{"})
    with pytest.raises(ArgumentValueError, match=r"path is .*noise.*its description is wrong"):
        load(path)


def test_without_safetensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The missing package is named together with what installs it."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"orchard-attention\[quantization\]"):
        save(tmp_path / "x", {})

"""Memory of outputs: what is given, and what is not done to it."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from orchard.attention import memory
from orchard.attention.memory import Place
from orchard.testing.benchmark import deterministic

CPU = torch.device("cpu")
PLACES = [
    Place((2, 3, 4), (12, 4, 1), torch.float32),
    Place((2, 3, 4), (1, 8, 2), torch.bfloat16),
    Place((1,), (1,), torch.float64),
    Place((), (), torch.float16),
    Place((2, 0, 4), (0, 4, 1), torch.float32),
]


@pytest.fixture(autouse=True)
def in_deterministic_mode() -> Iterator[None]:
    with deterministic():
        yield


def filled_elements(allocate: Callable[[], Tensor]) -> list[int]:
    """Sizes of what was filled on the way."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        allocate()
    fills = [event for event in seen.events() if event.name == "aten::fill_"]
    return [torch.Size(event.input_shapes[0]).numel() for event in fills]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_place_has_its_shape_in_deterministic_mode(place: Place) -> None:
    tensor = place.allocate(CPU)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == place
    assert tensor.storage_offset() == 0
    expected = torch.empty_strided(*place[:2], dtype=place.dtype).untyped_storage().nbytes()
    assert tensor.untyped_storage().nbytes() == expected
    assert torch.equal(tensor.fill_(1), torch.ones(place.shape, dtype=place.dtype))


def test_output_memory_is_not_filled_where_torch_fills() -> None:
    place = PLACES[0]
    assert 24 in filled_elements(lambda: torch.empty_strided(*place[:2], dtype=place.dtype))
    assert not any(filled_elements(lambda: place.allocate(CPU)))


def test_a_mode_without_memory_gets_none() -> None:
    with FakeTensorMode():
        tensor = PLACES[0].allocate(CPU)
    assert isinstance(tensor, FakeTensor)


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        memory.dense((2**50,)).allocate(CPU)

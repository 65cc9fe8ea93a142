"""What the Hopper kernels serve, and how a problem becomes their launches.

Nothing here imports Triton: the kernels are imported when a first problem is planned.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from orchard.attention import memory
from orchard.attention.dropout import keep_scale
from orchard.attention.memory import Place, dense, following
from orchard.attention.problem import Gradients, MaskSpec, Problem, Saved, Tensors, Upstream
from orchard.backends.cuda import launch
from orchard.backends.cuda.launch import NO_LSE, Backward, BackwardKind, Setting
from orchard.backends.cuda.runtime import Runtime
from orchard.dispatch.backend import Reason
from orchard.dispatch.known import Known

if TYPE_CHECKING:
    from orchard.backends.cuda.hopper_source import Kernel

ARCHITECTURE = 90  # compute capability 9.0
DTYPES = (torch.float16, torch.bfloat16)
HEAD_TILES = (64, 128)  # head dimensions of a tile; a smaller one is padded with zeros by TMA
WARPGROUP_ROWS = 64
KEY_BLOCK = 128  # keys of a block in the backward: two consumers of 64
PLAIN_ROWS = 64  # rows of a program of the kernels before and after a backward
_PADDING = 128  # rows of the statistics are padded to whole tiles
_FURTHEST = 2**30  # a bound of the band that excludes nothing, and can be added to a row
_LOG2_E = 1.4426950408889634
KNOWN_PROBLEMS = 4096
KNOWN_ADDRESSES = 64  # of the tensors of a plan: an allocator gives out the same few again
_WIDE = 16  # bytes of a wide load


class ForwardConfig(NamedTuple):
    consumers: int  # warpgroups of 64 rows each
    keys: int  # of a tile
    stages: int  # of keys and of values
    registers: int  # of a thread in a consumer
    pipelined: bool  # scores of a tile beside the output of the one before, in turns
    accumulated: bool = False  # products of a scaled query are added to the mask
    tree: bool = False  # a row's scores and weights are reduced as a tree, not one by one


class BackwardConfig(NamedTuple):
    rows: int  # query rows of a tile
    stages: int
    registers: int


class RowsConfig(NamedTuple):
    """Of the kernel of dQ apart."""

    consumers: int  # warpgroups of 64 rows each
    stages: int  # of keys and of values
    registers: int


# Chosen on an H200. 240 registers hold a 64x128 output beside 64x128 scores without a spill.
_FORWARD = ForwardConfig(2, 128, 2, 240, True)
# With D 64 and tiles enough three consumers hide each other's softmax better than two.
_THREE = ForwardConfig(3, 128, 2, 160, False)
# Short rows under a band have few whole tiles of 128 keys: there four with tiles of 64 are better.
_FOUR = ForwardConfig(4, 64, 3, 120, False)
_SHORT_BAND = 1024  # rows
_DYNAMIC_TURNS = 4  # tiles of a program from which a counter in memory is worth its cost
_CACHE_SHARE = 32 * 2**20  # bytes of a 50 MB cache
_KEY_COHORT = 4  # planes whose blocks of keys are worked on side by side under a band
# D 128: 64 rows and dQ split by columns. D 64: 128 rows in two halves and dQ split by rows.
_FUSED = {128: BackwardConfig(64, 2, 240), 64: BackwardConfig(128, 2, 240)}
# Without dQ tiles of 64 rows serve D 64 as well, and spill nothing.
_SPLIT = {128: _FUSED[128], 64: BackwardConfig(64, 4, 240)}
SPAN_ELEMENTS = 2048  # of dQ that a program of the fused backward converts early, at a time
COUNTER = 4  # elements: of programs that have added to the sums of a block, kept aligned
# What shares must save of a backward's time. The kernel for D 128 whose blocks are shared, and then
# begin with different rows, is the faster one by itself.
_LEAST_SAVING = 0.1
_MOST_TURNS = 8  # of programs that share blocks
_SHARING_COST = 4  # of a program that shares a block, in tiles of rows: its start and its sums
_ROWS = RowsConfig(2, 2, 240)
_THREE_ROWS = RowsConfig(3, 2, 160)  # has no registers for masks and Philox


class TermsSpecialisation(NamedTuple):
    """What shapes a score beside the product."""

    softcap: bool = False
    mask: str = "none"  # or "bool", "additive"
    mask_dtype: torch.dtype | None = None
    mask_keys: bool = False  # the mask has an element for each key
    wide_mask: bool = False  # its rows begin on 16 elements
    dropout: bool = False

    @property
    def narrow(self) -> TermsSpecialisation:
        return self._replace(wide_mask=False)


def begins_wide(mask: Tensor | None) -> bool:
    """Whether wide loads can begin where a mask does, if there is one."""
    return mask is None or mask.data_ptr() % _WIDE == 0


class ForwardSpecialisation(NamedTuple):
    """What a forward kernel is compiled for."""

    dtype: torch.dtype
    head_tile: int
    low: bool
    high: bool
    tail: bool  # the last tile of keys is not whole
    dynamic: bool  # programs take tiles when they are ready, instead of having them dealt out
    mask_tiles: bool  # tiles of the mask come by TMA
    lse: bool  # it is stored
    terms: TermsSpecialisation
    config: ForwardConfig

    def fitting(self, mask: Tensor | None) -> ForwardSpecialisation:
        """This, or what takes a mask that begins where its wide loads cannot."""
        if begins_wide(mask):
            return self
        return self._replace(
            mask_tiles=False,
            terms=self.terms.narrow,
            config=self.config._replace(accumulated=False),
        )


class BackwardSpecialisation(NamedTuple):
    """What the kernels of a backward are compiled for."""

    dtype: torch.dtype
    head_tile: int
    low: bool
    high: bool
    tail: bool  # the last block of keys is not whole
    empty_rows: bool  # some row may see no key
    grad_lse: bool
    fused: bool
    shared: bool  # programs share the last blocks of keys
    grouped: bool  # query heads share a key head
    rotated: bool  # blocks begin with different rows
    mask_tiles: bool  # tiles of the mask come by TMA
    terms: TermsSpecialisation
    config: BackwardConfig
    rows: RowsConfig  # where the backward is not fused
    dynamic: bool  # whether tiles of rows are taken when a program is ready for one

    def fitting(self, mask: Tensor | None) -> BackwardSpecialisation:
        """This, or what takes a mask that begins where its wide loads cannot."""
        if begins_wide(mask):
            return self
        return self._replace(mask_tiles=False, terms=self.terms.narrow)


def reasons(problem: Problem) -> tuple[Reason, ...]:
    """Why these kernels do not take a problem that their capability takes."""
    found = score_reasons(problem)
    mask = problem.mask
    if mask is not None and mask.kind == "additive":
        found += _additive_reasons(problem, mask)
    if problem.stage != "forward" and (problem.head_dim % 8 or problem.value_dim % 8):
        found.append(Reason("head_dim", "takes multiples of 8 as head dimensions in a backward"))
    for name, (shape, strides) in _described(problem).items():
        if not _describable(shape, strides, problem.dtype.itemsize):
            sentence = f"cannot have TMA walk the strides {strides} of {name}"
            found.append(Reason("strides", sentence))
    return tuple(found)


def score_reasons(problem: Problem) -> list[Reason]:
    """Why no kernel for Hopper takes what shapes the scores of a problem."""
    found = []
    if problem.options.scale <= 0.0:
        found.append(Reason("scale", "takes a positive scale only"))
    mask = problem.mask
    if mask is not None and mask.shape[3] > 1 and mask.strides[3] != 1:
        found.append(Reason("mask_strides", "takes a mask whose last axis is contiguous"))
    return found


def _additive_reasons(problem: Problem, mask: MaskSpec) -> list[Reason]:
    if problem.stage != "forward" and not launch.has_mask_apart(problem):
        sentence = "takes the gradient of a mask for each row and key that heads or batch share"
        return [Reason("mask_grad", sentence)]
    if 1 not in mask.shape[2:] and _mask_geometry(problem) is None:
        sentence = "takes an added mask for each row and key only as TMA can walk it"
        return [Reason("mask_strides", sentence, "give it the operands' dtype, rows on 16 bytes")]
    return []


def _described(problem: Problem) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shape and strides of the tensors that TMA reads and writes, by their names."""
    last = "output", problem.out_strides
    if problem.stage != "forward":
        last = "grad_out", problem.grad_strides or ()
    return {**problem.operands, last[0]: (_out_shape(problem), last[1])}


def _describable(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether TMA can walk a tensor: contiguous rows that begin on 16 bytes and do not overlap."""
    if shape[-1] > 1 and strides[-1] != 1:
        return False
    outer = [stride for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size > 1]
    return all(s >= shape[-1] and s * itemsize % 16 == 0 and s * itemsize < 2**40 for s in outer)


class Geometry(NamedTuple):
    """Shape and strides of a tensor as TMA wants them."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int]) -> Geometry:
        """Axes of size one get a stride that is legal, the last axis stride 1."""
        row = -(-shape[-1] // 8) * 8
        pairs = zip(shape[:-1], strides[:-1], strict=True)
        return cls(tuple(shape), (*(row if size == 1 else step for size, step in pairs), 1))

    @property
    def steps(self) -> tuple[int, ...]:
        """Strides of all axes but the last."""
        return self.strides[:-1]


# Arguments of a launch for a tensor that TMA walks, by the tensor's address.
Described = Mapping[int, tuple[Any, ...]]


def _describe(kernel: Kernel, geometries: Iterable[Geometry]) -> tuple[Described, ...]:
    """What each descriptor of a kernel is launched with; they are its first arguments."""
    return tuple(kernel.describe(place, each) for place, each in enumerate(geometries))


def _describe_mask(kernel: Kernel, place: int, problem: Problem) -> Described | None:
    """The same for a mask whose tiles come by TMA."""
    geometry = _mask_geometry(problem)
    return None if geometry is None else kernel.describe(place, geometry)


def _descriptors(places: Sequence[Described], tensors: Sequence[Tensor]) -> list[Any]:
    arguments: list[Any] = []
    for place, tensor in zip(places, tensors, strict=True):
        arguments += place[tensor.data_ptr()]
    return arguments


class ScoreTerms(NamedTuple):
    """Arguments of what shapes a score, around the pointers of mask and seed."""

    scales: tuple[float, float]
    mask_strides: tuple[int, int, int]
    dropout: tuple[int, float]

    @classmethod
    def of(cls, problem: Problem) -> ScoreTerms:
        options, mask = problem.options, problem.mask
        unit = 1.0 if mask is not None and mask.kind == "additive" else _LOG2_E
        cap = options.softcap
        factor = 2.0 * _LOG2_E * options.scale / cap if cap else options.scale * unit
        threshold = options.threshold
        return cls(
            (factor, cap * unit),
            _mask_strides(mask),
            (_signed(threshold << 16), keep_scale(threshold)),
        )

    def arguments(
        self, mask: Tensor | None, seed: Tensor | None, of_mask: Described | None = None
    ) -> tuple[Any, ...]:
        at = address_of(mask)
        masked = (at,) if of_mask is None or mask is None else of_mask[at]
        return (*self.scales, *masked, *self.mask_strides, address_of(seed), *self.dropout)


def _signed(word: int) -> int:
    """A 32-bit word as the signed integer that an argument is."""
    return word - 2**32 if word >= 2**31 else word


def _mask_geometry(problem: Problem) -> Geometry | None:
    """An added mask as TMA walks it, if it can: of the operands' type, a row for each query row."""
    mask = problem.mask
    if mask is None or mask.kind != "additive" or mask.dtype != problem.dtype:
        return None
    strides = (*_mask_strides(mask), mask.strides[3])
    shape = tuple(size if stride else 1 for size, stride in zip(mask.shape, strides, strict=True))
    if shape[2:] != (problem.query_length, problem.key_length):
        return None
    if not _describable(shape, strides, problem.dtype.itemsize):
        return None
    return Geometry.of(shape, strides)


def _mask_strides(mask: MaskSpec | None) -> tuple[int, int, int]:
    if mask is None:
        return 0, 0, 0
    pairs = zip(mask.shape[:3], mask.strides[:3], strict=True)
    batch, head, row = (0 if size == 1 else stride for size, stride in pairs)
    return batch, head, row


class ForwardPlan(NamedTuple):
    """What a launch of a forward needs beside its tensors."""

    special: ForwardSpecialisation
    kernel: Kernel
    programs: int
    device: int
    described: tuple[Described, ...]  # of query, key, value and out
    out: Place
    lse: Place | None
    mask: Described | None  # where its tiles come by TMA
    work: tuple[int, ...]
    terms: ScoreTerms
    # Where there are no other tensors: arguments by the addresses of these four.
    plain: Mapping[tuple[int, ...], tuple[Any, ...]] | None

    def run(self, _: Any, tensors: Tensors) -> Saved:
        query, key, value, mask, seed = tensors
        device = query.device
        out = self.out.allocate(device)
        addresses = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        if self.plain is not None:
            self.kernel.launch(self.programs, self.device, self.plain[addresses])
            return Saved(out, NO_LSE)
        special, kernel = self.special.fitting(mask), self.kernel
        if special is not self.special:
            kernel = _forward_kernel(special, device)
        lse = None if self.lse is None else self.lse.allocate(device)
        counter = new_counter(device, special.dynamic)
        of_query, of_key, of_value, of_out = self.described
        kernel(
            self.programs,
            self.device,
            *of_query[addresses[0]],
            *of_key[addresses[1]],
            *of_value[addresses[2]],
            *of_out[addresses[3]],
            *(address_of(lse), address_of(counter)),
            *self.work,
            *self.terms.arguments(mask, seed, self.mask if special.mask_tiles else None),
        )
        return Saved(out, NO_LSE if lse is None else lse)


def specialise_forward(
    problem: Problem, processors: int, config: ForwardConfig | None = None
) -> ForwardSpecialisation:
    low, high = problem.options.band or (None, None)
    config = config or _forward_config(problem, processors)
    return ForwardSpecialisation(
        problem.dtype,
        _head_tile(problem),
        low=low is not None,
        high=high is not None,
        tail=problem.key_length % config.keys != 0,
        dynamic=takes_tiles(problem, config.consumers, processors),
        mask_tiles=_mask_geometry(problem) is not None,
        lse=problem.lse or problem.grad,
        terms=terms_of(problem),
        config=config,
    )


def _forward_config(problem: Problem, processors: int) -> ForwardConfig:
    tile, terms = _head_tile(problem), terms_of(problem)
    plain = terms.mask == "none" and not terms.dropout
    accumulated = _accumulates(problem)
    many = takes_tiles(problem, _THREE.consumers, processors)
    if tile == 64 and many and (plain or (accumulated and not terms.dropout)):
        short = problem.options.band is not None and problem.query_length <= _SHORT_BAND
        return _FOUR if short and plain else _THREE._replace(accumulated=accumulated)
    # A pipeline has no room for tiles of masks that are loaded one by one, and with D 128 gains
    # nothing where there is that much to do beside the products.
    loaded = terms.mask != "none" and _mask_geometry(problem) is None
    pipelined = plain or (tile == 64 and not loaded)
    tree = pipelined and tile == 128
    return _FORWARD._replace(pipelined=pipelined, accumulated=accumulated, tree=tree)


def _accumulates(problem: Problem) -> bool:
    """Products are added to a mask where they come scaled: by a query that is scaled exactly."""
    mantissa, exponent = math.frexp(problem.options.scale)
    exact = problem.dtype is torch.bfloat16 and mantissa == 0.5 and -8 <= exponent <= 1
    return (
        exact
        and _head_tile(problem) == 64
        and not problem.options.softcap
        and _mask_geometry(problem) is not None
    )


def row_tiles(problem: Problem, consumers: int) -> int:
    rows = WARPGROUP_ROWS * consumers
    return problem.batch * problem.heads * -(-problem.query_length // rows)


def takes_tiles(problem: Problem, consumers: int, processors: int) -> bool:
    """Whether there are tiles of rows enough to take them from a counter."""
    return row_tiles(problem, consumers) >= _DYNAMIC_TURNS * processors


def plan_forward(
    problem: Problem, processors: int, config: ForwardConfig | None = None
) -> ForwardPlan:
    """`config` is given where configurations are compared."""
    special = specialise_forward(problem, processors, config)
    kernel = _forward_kernel(special, problem.device)
    shape = _out_shape(problem)
    geometries = *_operand_geometries(problem), Geometry.of(shape, problem.out_strides)
    described, terms = _describe(kernel, geometries), ScoreTerms.of(problem)
    work = work_of(problem, special.head_tile, special.dynamic, special.mask_tiles)

    def arguments(addresses: tuple[int, ...]) -> tuple[Any, ...]:
        pairs = zip(described, addresses, strict=True)
        descriptors = (argument for place, address in pairs for argument in place[address])
        return kernel.bind(*descriptors, 0, 0, *work, *terms.arguments(None, None))

    others = special.lse or special.dynamic or problem.mask or problem.options.threshold
    return ForwardPlan(
        special,
        kernel,
        min(row_tiles(problem, special.config.consumers), processors),
        index_of(problem.device),
        described,
        Place(shape, problem.out_strides, problem.dtype),
        dense(shape[:3]) if special.lse else None,
        _describe_mask(kernel, len(geometries), problem),
        work,
        terms,
        None if others else Known(arguments, KNOWN_ADDRESSES),
    )


class Shares(NamedTuple):
    """How many programs have a block of keys: one each of the first, several each of the rest.

    Blocks come in turns of one for each processor. Those of a last turn that is not full are cut
    into as many programs as fill some turns, those with the longer parts first.
    """

    blocks: int
    unshared: int
    parts: int  # programs of each of the next `fewer` blocks; those after them have one more
    fewer: int

    @classmethod
    def of(cls, blocks: int, tiles: int, processors: int, saving: float = 0.0) -> Shares:
        """For blocks that take so many tiles of rows, where this part of the time is saved."""
        whole = cls(blocks, blocks, 1, 0)
        turns, rest = divmod(blocks, processors)
        if not rest:
            return whole

        def shared(last_turns: int) -> Shares:
            parts, more = divmod(last_turns * processors, rest)
            return cls(blocks, blocks - rest, parts, rest - more)

        def time(last_turns: int) -> float:
            shares = shared(last_turns)
            long = tiles / shares.parts + _SHARING_COST
            short = tiles / (shares.parts + 1) + _SHARING_COST
            long_turns = -(-shares.fewer * shares.parts // processors)
            return long_turns * long + (last_turns - long_turns) * short

        counts = [n for n in range(1, _MOST_TURNS + 1) if 2 <= shared(n).parts < tiles]
        best = min(counts, key=time, default=0)
        all_whole = (turns + 1) * tiles
        if not best or turns * tiles + time(best) >= (1 - saving) * all_whole:
            return whole
        return shared(best)

    @property
    def programs(self) -> int:
        return self.unshared + (self.blocks - self.unshared) * (self.parts + 1) - self.fewer


class Sums(NamedTuple):
    """fp32 memory of a fused backward, all of it 0 at first. Places are counted in elements."""

    place: Place
    of_keys: int  # where dK and dV of shared blocks begin; those of dQ come first
    finished: int  # counters, of blocks of each key plane
    taken: int  # of spans of rows of each plane whose dQ is converted early

    @classmethod
    def of(cls, problem: Problem, shares: Shares) -> Sums:
        planes = problem.batch * problem.heads
        of_keys = planes * problem.query_length * problem.head_dim
        block = 2 * KEY_BLOCK * _head_tile(problem) + COUNTER
        finished = of_keys + (shares.blocks - shares.unshared) * block
        taken = finished + problem.batch * problem.kv_heads
        return cls(dense((taken + planes,)), of_keys, finished, taken)


class _Kernels(NamedTuple):
    statistics: Kernel
    keys: Kernel
    last: Kernel  # dQ: from its sums, or from the start


class BackwardPlan(NamedTuple):
    """What a backward needs beside its tensors."""

    special: BackwardSpecialisation
    kernels: _Kernels
    programs: tuple[int, int, int]  # of the kernels
    device: int
    keys: tuple[Described, ...]  # of the kernel of keys, and of that of dQ
    rows: tuple[Described, ...]
    out_steps: Mapping[tuple[int, ...], tuple[int, ...]]  # from its strides
    grad_out_steps: tuple[int, ...]  # strides of the outer axes
    grad_query_steps: tuple[int, ...]
    places: tuple[Place, Place, Place]  # of the gradients of query, key and value
    statistic: Place
    sums: Sums
    lag: int  # key planes after which one is likely to be finished
    sizes: tuple[int, int, int, int]
    shares: Shares
    key_order: tuple[int, int]  # planes and cohort of the kernel of keys
    row_order: tuple[int, int]
    band: tuple[int, int]
    dims: tuple[int, int]
    scale: float
    terms: ScoreTerms
    mask: Described | None  # where its tiles come by TMA
    added: Backward | None  # with an added mask: who knows its gradient, and rows of a large lse

    def run(
        self, runtime: Runtime, tensors: Tensors, saved: Saved, upstream: Upstream
    ) -> Gradients:
        device = tensors.query.device
        grad_query, grad_key, grad_value = (place.allocate(device) for place in self.places)
        sums = self.sums.place.allocate(device) if self.special.fused else None
        special, kernels = self.special.fitting(tensors.mask), self.kernels
        if special is not self.special:
            kernels = _backward_kernels(special, device)
        by_mask = None
        if self.added is None:
            lse, delta = self._run_statistics(tensors, saved, upstream, sums)
            spare = lse
        else:
            if sums is not None:
                sums.zero_()
            known = self.added.statistics(runtime, tensors, saved, upstream)
            by_mask = self.added.mask_apart(runtime, tensors, upstream, known)
            shift, delta, logarithm = known
            lse = self._padded(shift, torch.inf)
            delta = self._padded(delta, 0.0)
            spare = lse if logarithm is None else self._padded(logarithm, 0.0)
        given = (*tensors[:3], upstream.out)
        results = grad_key, grad_value, lse if sums is None else sums
        of_mask = self.mask if special.mask_tiles else None
        scale = self.scale * self.terms.dropout[1]
        sums_start, of_keys, finished, taken = self._addresses(sums)
        # Zeroed before the kernel of keys: that of dQ begins before this has ended.
        counter = new_counter(device, special.dynamic)
        kernels.keys(
            self.programs[1],
            self.device,
            *_descriptors(self.keys, (*given, lse, delta, *results)),
            *(spare.data_ptr(), self.statistic.shape[1], of_keys, *self.shares[1:]),
            *(sums_start, grad_query.data_ptr(), *self.grad_query_steps),
            *(finished, taken, self.lag, self.dims[0]),
            *(*self.sizes, *self.key_order, *self.band),
            *(*self.terms.arguments(*tensors[3:], of_mask), scale),
        )
        if sums is not None:
            kernels.last(
                self.programs[2],
                self.device,
                *(sums_start, taken, grad_query.data_ptr()),
                *(self.sizes[0], self.sizes[2], self.dims[0], scale),
                *self.grad_query_steps,
            )
        else:
            kernels.last(
                self.programs[2],
                self.device,
                *_descriptors(self.rows, (*given, grad_query)),
                *(lse.data_ptr(), spare.data_ptr(), delta.data_ptr()),
                address_of(counter),
                *(*self.sizes, *self.row_order, *self.band),
                *self.terms.arguments(*tensors[3:]),
                *(self.statistic.shape[1], self.scale),
            )
        return Gradients(grad_query, grad_key, grad_value, by_mask)

    def _addresses(self, sums: Tensor | None) -> tuple[int, ...]:
        """Of the sums of dQ, those of shared blocks, and the counters."""
        if sums is None:
            return 0, 0, 0, 0
        start = sums.data_ptr()
        return start, *(start + place * sums.element_size() for place in self.sums[1:])

    def _padded(self, known: Tensor, filling: float) -> Tensor:
        """Numbers of rows, [B, H, rows], as whole tiles of them."""
        missing = self.statistic.shape[1] - known.shape[2]
        return torch.nn.functional.pad(known, (0, missing), value=filling) if missing else known

    def _run_statistics(
        self, tensors: Tensors, saved: Saved, upstream: Upstream, sums: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """lse and delta of whole tiles of rows; the sums are cleared."""
        device = tensors.query.device
        lse, delta = self.statistic.allocate(device), self.statistic.allocate(device)
        out = _as_written(saved.out, tensors.query)
        grad_lse = saved.lse if upstream.lse is None else upstream.lse
        used = out, upstream.out, saved.lse, grad_lse, lse, delta
        self.kernels.statistics(
            self.programs[0],
            self.device,
            *(tensor.data_ptr() for tensor in used),
            *self._addresses(sums)[:2],
            *(self.sizes[0], self.statistic.shape[1], self.sizes[2], *self.dims),
            self.sums.place.shape[0] - self.sums.of_keys,
            *self.out_steps[out.stride()],
            *self.grad_out_steps,
            *saved.lse.stride(),
            *grad_lse.stride(),
        )
        return lse, delta


def specialise_backward(
    problem: Problem,
    processors: int,
    config: BackwardConfig | None = None,
    rows: RowsConfig | None = None,
) -> BackwardSpecialisation:
    low, high = problem.options.band or (None, None)
    tile = _head_tile(problem)
    rows = rows or _rows_config(problem, processors)
    config = config or (_SPLIT if problem.deterministic else _FUSED)[tile]
    shared = _shares(problem, config, processors).parts > 1
    grouped = problem.heads != problem.kv_heads
    return BackwardSpecialisation(
        problem.dtype,
        tile,
        low=low is not None,
        high=high is not None,
        tail=problem.key_length % KEY_BLOCK != 0,
        empty_rows=_may_have_empty_rows(problem),
        grad_lse=problem.lse,
        fused=not problem.deterministic,
        shared=shared,
        grouped=grouped,
        rotated=shared and tile == 128 and not grouped,
        mask_tiles=_mask_geometry(problem) is not None,
        terms=terms_of(problem),
        config=config,
        rows=rows,
        dynamic=problem.deterministic and takes_tiles(problem, rows.consumers, processors),
    )


def _shares(problem: Problem, config: BackwardConfig, processors: int) -> Shares:
    """Blocks are shared where sums may be added in any order and all blocks are equally long."""
    blocks = problem.batch * problem.kv_heads * -(-problem.key_length // KEY_BLOCK)
    if problem.deterministic or problem.options.band is not None:
        return Shares(blocks, blocks, 1, 0)
    tiles = -(-problem.query_length // config.rows)
    always = _head_tile(problem) == 128 and problem.heads == problem.kv_heads
    return Shares.of(blocks, tiles, processors, 0.0 if always else _LEAST_SAVING)


def _rows_config(problem: Problem, processors: int) -> RowsConfig:
    terms = terms_of(problem)
    plain = terms.mask == "none" and not terms.dropout
    three = problem.deterministic and plain and _head_tile(problem) == 64
    many = takes_tiles(problem, _THREE_ROWS.consumers, processors)
    return _THREE_ROWS if three and many else _ROWS


def plan_backward(
    kind: BackwardKind,
    setting: Setting,
    config: BackwardConfig | None = None,
    rows_config: RowsConfig | None = None,
) -> BackwardPlan:
    """Configurations are given where they are compared."""
    problem, processors = kind.problem, setting.gpu.processors
    special = specialise_backward(problem, processors, config, rows_config)
    planes, key_planes = problem.batch * problem.heads, problem.batch * problem.kv_heads
    padded = -(-problem.query_length // _PADDING) * _PADDING
    programs = planes * -(-problem.query_length // PLAIN_ROWS)
    if not special.fused:
        programs = min(row_tiles(problem, special.rows.consumers), processors)
    shares = _shares(problem, special.config, processors)
    kernels, shape = _backward_kernels(special, problem.device), _out_shape(problem)
    query, key, value = (
        following(shape, strides, problem.dtype) for shape, strides in problem.operands.values()
    )
    statistic = dense((planes, padded))
    sums = dense((planes, problem.query_length, problem.head_dim))
    cohort = _key_cohort(problem, special)
    by_query, by_key, by_value = (Geometry.of(*place[:2]) for place in (query, key, value))
    grad_out = Geometry.of(shape, problem.grad_strides or ())
    given = *_operand_geometries(problem), grad_out
    rows = Geometry(*statistic[:2])
    keys = *given, rows, rows, by_key, by_value, Geometry(*sums[:2])
    return BackwardPlan(
        special,
        kernels,
        (
            planes * (padded // PLAIN_ROWS),
            shares.programs,
            programs,
        ),
        index_of(problem.device),
        _describe(kernels.keys, keys),
        () if special.fused else _describe(kernels.last, (*given, by_query)),
        Known(lambda strides: Geometry.of(shape, strides).steps),
        grad_out.steps,
        by_query.steps,
        (query, key, value),
        statistic,
        Sums.of(problem, shares),
        _lag(problem, cohort, processors),
        _sizes(problem),
        shares,
        (key_planes, cohort),
        (planes, _cohort(problem, special.head_tile, special.dynamic, mask_tiles=False)),
        _band(problem),
        (problem.head_dim, problem.value_dim),
        problem.options.scale,
        ScoreTerms.of(problem),
        _describe_mask(kernels.keys, len(keys), problem),
        launch.plan_backward(kind, setting) if special.terms.mask == "additive" else None,
    )


@functools.lru_cache(KNOWN_PROBLEMS)
def _forward_kernel(special: ForwardSpecialisation, device: torch.device) -> Kernel:
    from orchard.backends.cuda.hopper_source import Kernel, forward_source

    with torch.cuda.device(device):
        return Kernel(forward_source(special))


@functools.lru_cache(KNOWN_PROBLEMS)
def _backward_kernels(special: BackwardSpecialisation, device: torch.device) -> _Kernels:
    from orchard.backends.cuda import hopper_source
    from orchard.backends.cuda.hopper_source import Kernel

    last = hopper_source.sums_source if special.fused else hopper_source.rows_source
    sources = hopper_source.statistics_source, hopper_source.keys_source, last
    with torch.cuda.device(device):
        return _Kernels(*(Kernel(source(special)) for source in sources))


def terms_of(problem: Problem) -> TermsSpecialisation:
    options, mask = problem.options, problem.mask
    terms = TermsSpecialisation(options.softcap != 0.0, dropout=options.threshold != 0)
    if mask is None:
        return terms
    return terms._replace(
        mask=mask.kind,
        mask_dtype=mask.dtype,
        mask_keys=mask.shape[3] > 1,
        wide_mask=all(stride % _WIDE == 0 for stride in _mask_strides(mask)),
    )


def _may_have_empty_rows(problem: Problem) -> bool:
    low, high = problem.options.band or (None, None)
    before = high is not None and high < 0
    after = low is not None and problem.query_length + low > problem.key_length
    return problem.mask is not None or before or after


def _head_tile(problem: Problem) -> int:
    """The head dimension that tiles of keys, values and output are padded to."""
    widest = max(problem.head_dim, problem.value_dim)
    return next(tile for tile in HEAD_TILES if widest <= tile)


def _out_shape(problem: Problem) -> tuple[int, ...]:
    return (*problem.query_shape[:3], problem.value_dim)


def _operand_geometries(problem: Problem) -> tuple[Geometry, Geometry, Geometry]:
    query, key, value = (Geometry.of(*operand) for operand in problem.operands.values())
    return query, key, value


def _sizes(problem: Problem) -> tuple[int, int, int, int]:
    """Rows, keys, heads, and query heads of a key head."""
    heads = problem.heads
    return problem.query_length, problem.key_length, heads, heads // problem.kv_heads


def work_of(
    problem: Problem, head_tile: int, dynamic: bool, mask_tiles: bool = False
) -> tuple[int, ...]:
    """Sizes, planes and their cohort, and the band."""
    cohort = _cohort(problem, head_tile, dynamic, mask_tiles)
    return (*_sizes(problem), problem.batch * problem.heads, cohort, *_band(problem))


def _cohort(problem: Problem, head_tile: int, dynamic: bool, mask_tiles: bool) -> int:
    """Planes worked on side by side. Under a band, where tiles differ in length and the longest are
    to come first: all where tiles are dealt out, else as many as the cache holds the keys of."""
    planes = problem.batch * problem.heads
    if problem.options.band is None and not mask_tiles:
        return 1
    if not dynamic:
        return planes
    group = problem.heads // problem.kv_heads
    plane_bytes = 2 * problem.key_length * head_tile * problem.dtype.itemsize
    return max(1, min(planes, group * _CACHE_SHARE // plane_bytes))


def _key_cohort(problem: Problem, special: BackwardSpecialisation) -> int:
    """Planes whose blocks of keys are worked on side by side: those that share a mask, else few."""
    if special.mask_tiles:
        return problem.kv_heads
    few = 1 if problem.options.band is None else _KEY_COHORT
    return min(few, problem.batch * problem.kv_heads)


def _lag(problem: Problem, cohort: int, processors: int) -> int:
    """Key planes after which one is likely finished: a turn of processors and a cohort."""
    blocks = cohort * -(-problem.key_length // KEY_BLOCK)
    return cohort * (1 + -(-processors // blocks))


def _band(problem: Problem) -> tuple[int, int]:
    """The band as two numbers that can be added to a row."""
    low, high = problem.options.band or (None, None)
    return (
        -_FURTHEST if low is None else max(low, -_FURTHEST),
        _FURTHEST if high is None else min(high, _FURTHEST),
    )


def new_counter(device: torch.device, dynamic: bool) -> Tensor | None:
    """Tiles that programs have taken, where they take them."""
    return torch.zeros(1, dtype=torch.int32, device=device) if dynamic else None


def address_of(tensor: Tensor | None) -> int:
    """A tensor that is not there has address 0."""
    return 0 if tensor is None else tensor.data_ptr()


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _as_written(out: Tensor, query: Tensor) -> Tensor:
    """The output in query's memory order and on 16 bytes, as a forward gives it."""
    out = memory.conform(out, query)
    return out.clone() if out.data_ptr() % 16 else out

"""Top-k selection and sparse sums on a GPU: kernels and their launchers. Their meaning is `reference_topk.py`.

Magnitudes are compared as integers (the bits of a float32 without its sign), so NaN has its place in the order.
No launcher waits for the GPU, and none uses float atomics: equal inputs give equal bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from commhooks.triton_kernels.reference import FLOATS as WIRE_DTYPES
from commhooks.triton_kernels.reference_topk import (
    blocks,
    check_blocks,
    check_exact,
    check_gradient,
    check_out,
    check_packed,
    check_sparse,
    exact_index_dtype,
    packed_bytes,
    packed_views,
)
from commhooks.triton_kernels.rounding import LAUNCH, round_to, widen

PASS_BLOCK = 4096  # elements a program of the passes over a whole tensor: as `_warps_of_block`, 16 a thread
PASS_WARPS = 8


def select_blocks(
    gradient: Tensor, residual: Tensor | None, k: int, block_size: int, wire_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The k largest of every `block_size` consecutive elements of M = gradient + residual, in one pass.

    One program a block, which stays in registers: the k-th largest magnitude is found bit by bit (bisection by
    counting, at most 31 counts), then a running count gives every sent element its slot. Of equals the lower index is
    sent, and NaN before all. A last block shorter than k sends all of itself; the slots that it leaves unused hold
    index 0 and value 0.

    Moves, an element: gradient and residual read, M written, 12 bytes in float32, which is the fewest possible; and
    3 bytes an entry sent in bfloat16 (blocks of 256; else 4).

    >>> m, packed = select_blocks(torch.tensor([1.0, -3.0, 2.0], device="cuda"), None, 2, 256, torch.float32)
    >>> m, packed[:8].view(torch.float32), packed[8:10]
    (tensor([1., 0., 0.]), tensor([-3., 2.]), tensor([1, 2], dtype=torch.uint8))

    Args:
        gradient: (numel,), float32, bfloat16 or float16. Overwritten where it is float32.
        residual: (numel,) float32, or None. Only read.
        k: 1 to block_size.
        block_size: a power of two, 256 to 8192.
        wire_dtype: float32, bfloat16 or float16. What overflows in it is sent as infinity.

    Returns:
        What was not sent, float32: M less the values as rounded to `wire_dtype`; 0 where a value that is not finite was
        sent. It lies in `gradient` where that is float32, else in a new tensor.
        The wire buffer: uint8, all values, then all block-local indices (uint8, or int16 if block_size > 256), k a
        block, ascending within it; zeros up to a multiple of 16 bytes.

    Raises:
        ValueError: an argument is none of these.
    """
    check_gradient(gradient, residual, WIRE_DTYPES)
    check_blocks(k, block_size, wire_dtype)
    numel = gradient.numel()
    m = _new_m(gradient)
    packed = torch.empty(packed_bytes(numel, k, block_size, wire_dtype), dtype=torch.uint8, device=gradient.device)
    values, indices = packed_views(packed, numel, k, block_size, wire_dtype)
    if numel:
        _select_blocks[(blocks(numel, block_size),)](
            gradient, residual, m, values, indices, packed, numel, packed.numel(), k,
            HAS_RESIDUAL=residual is not None, BLOCK=block_size, SLOTS=triton.next_power_of_2(k),
            **LAUNCH, num_warps=_warps_of_block(block_size),
        )  # fmt: skip
    return m, packed


def sum_blocks_(
    gathered: Tensor, k: int, block_size: int, wire_dtype: torch.dtype, divisor: float, out: Tensor
) -> None:
    """out = the sum of W ranks' selections, added in rank order in float32, / divisor; 0 elsewhere.

    One program owns a block of `out`: it writes zeros, then adds one rank after the other. A rank's entries have
    distinct indices, so no two threads meet, and a barrier stands between the ranks.

    Moves, an element: `out` written, 4 bytes in float32, which is the fewest possible; the additions, and the division
    that reads and writes the block again, find it in the cache. A bfloat16 or float16 `out` needs a float32 scratch of
    its length. And 3 or 4 bytes an entry and rank.

    >>> _, a = select_blocks(torch.tensor([9.0, 0.0, 0.0, 1.0], device="cuda"), None, 1, 256, torch.float32)
    >>> _, b = select_blocks(torch.tensor([0.0, 0.0, 8.0, 1.0], device="cuda"), None, 1, 256, torch.float32)
    >>> sum_blocks_(torch.stack([a, b]), 1, 256, torch.float32, 2, out)
    >>> out
    tensor([4.5, 0.0, 4.0, 0.0])

    Args:
        gathered: uint8 (W, bytes): every rank's buffer of `select_blocks`.
        divisor: of the sum.
        out: (numel,), float32, bfloat16 or float16; overwritten.

    Raises:
        ValueError: an argument is none of these.
    """
    check_blocks(k, block_size, wire_dtype)
    check_out(out, WIRE_DTYPES)
    numel = out.numel()
    check_packed(gathered, numel, k, block_size, wire_dtype)
    if not numel:
        return
    values, indices = packed_views(gathered.view(-1), numel, k, block_size, wire_dtype)  # of rank 0
    warps = _warps_of_block(block_size)
    _sum_blocks[(blocks(numel, block_size),)](
        values, indices, _scratch(out), out, numel, k, len(gathered),
        gathered.shape[1] // values.element_size(), gathered.shape[1] // indices.element_size(), float(divisor),
        BLOCK=block_size, CHUNK=_entries_at_once(k, warps), FINISH=_needs_finish(out, divisor),
        **LAUNCH, num_warps=warps,
    )  # fmt: skip


def select_exact(
    gradient: Tensor, residual: Tensor | None, k: int, wire_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of all elements of M = gradient + residual.

    Radix select: four passes count the magnitudes by their digits of 8 bits, most significant first, among those that
    share the digits found before; so the k-th largest is known. A fifth pass counts what each program will send, a scan
    places it, and the last pass sends it.

    Moves, an element in float32: gradient and residual read, M written, then M read five times: 32 bytes, where 12 are
    the fewest possible; a bucket of 25 MB stays in the cache of a large GPU between its passes.

    >>> select_exact(torch.tensor([1.0, -3.0, 2.0, 2.0], device="cuda"), None, 2, torch.float32)
    (tensor([1., 0., 0., 2.]), tensor([-3., 2.]), tensor([1, 2], dtype=torch.int32))

    Args:
        gradient, residual, wire_dtype: as in `select_blocks`.
        k: 1 to numel.

    Returns:
        What was not sent, as in `select_blocks`.
        The values (k,) in `wire_dtype`.
        Their indices (k,), ascending: int32, or int64 if there are more than 2^31 elements.

    Raises:
        ValueError: an argument is none of these.
    """
    check_gradient(gradient, residual, WIRE_DTYPES)
    numel = gradient.numel()
    check_exact(k, numel, wire_dtype)
    m = _new_m(gradient)
    grid = (triton.cdiv(numel, PASS_BLOCK),)
    digits = torch.zeros(4, 256, dtype=torch.int64, device=m.device)
    _count_first_digit[grid](
        gradient, residual, m, digits, numel,
        HAS_RESIDUAL=residual is not None, BLOCK=PASS_BLOCK, **LAUNCH, num_warps=PASS_WARPS,
    )  # fmt: skip
    for digit in range(1, 4):
        _count_digit[grid](m, digits, numel, k, DIGIT=digit, BLOCK=PASS_BLOCK, **LAUNCH, num_warps=PASS_WARPS)
    counts = torch.empty(2, grid[0], dtype=torch.int32, device=m.device)
    _count_sent[grid](m, digits, counts, numel, k, BLOCK=PASS_BLOCK, **LAUNCH, num_warps=PASS_WARPS)
    running = counts.cumsum(1)
    values = torch.empty(k, dtype=wire_dtype, device=m.device)
    indices = torch.empty(k, dtype=exact_index_dtype(numel), device=m.device)
    _send[grid](m, digits, counts, running, values, indices, numel, k, BLOCK=PASS_BLOCK, **LAUNCH, num_warps=PASS_WARPS)
    return m, values, indices


def sum_sparse_(values: Tensor, indices: Tensor, divisor: float, out: Tensor) -> None:
    """out = the sum of W ranks' (values, indices), added in rank order in float32, / divisor; 0 elsewhere.

    One program owns a range of `out`, finds each rank's entries in it by binary search, and adds them as `sum_blocks_`
    does.

    Moves as `sum_blocks_`, with 6 bytes an entry and rank (bfloat16 values, int32 indices).

    >>> sum_sparse_(torch.tensor([[9.0], [8.0]], device="cuda"), torch.tensor([[0], [2]], device="cuda"), 2, out)
    >>> out
    tensor([4.5, 0.0, 4.0, 0.0])

    Args:
        values: (W, k), float32, bfloat16 or float16.
        indices: (W, k), int32 or int64, of each rank ascending and without duplicates.
        divisor: of the sum.
        out: (numel,), float32, bfloat16 or float16; overwritten.

    Raises:
        ValueError: an argument is none of these. What the indices are is not looked at.
    """
    check_out(out, WIRE_DTYPES)
    check_sparse(values, indices)
    if not out.numel():
        return
    ranks, k = values.shape
    _sum_sparse[(triton.cdiv(out.numel(), PASS_BLOCK),)](
        values, indices, _scratch(out), out, out.numel(), k, ranks, float(divisor),
        RANKS=triton.next_power_of_2(ranks), STEPS=k.bit_length(), BLOCK=PASS_BLOCK,
        CHUNK=_entries_at_once(PASS_BLOCK // 64, PASS_WARPS), FINISH=_needs_finish(out, divisor),
        **LAUNCH, num_warps=PASS_WARPS,
    )  # fmt: skip


def _new_m(gradient: Tensor) -> Tensor:
    return gradient if gradient.dtype == torch.float32 else torch.empty_like(gradient, dtype=torch.float32)


def _scratch(out: Tensor) -> Tensor:
    """Where to add in float32: `out` itself if it is that."""
    return out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)


def _needs_finish(out: Tensor, divisor: float) -> bool:
    return divisor != 1 or out.dtype != torch.float32


def _warps_of_block(block_size: int) -> int:
    """16 elements a thread, as four loads of 16 bytes (8 on AMD): with more, the largest block's registers spill."""
    return max(1, block_size // 512)


def _entries_at_once(expected: int, warps: int) -> int:
    """What a program adds at once: the entries that it has to expect, but not more than one a thread."""
    return min(triton.next_power_of_2(expected), 32 * warps)


@triton.jit
def _first(program, BLOCK: tl.constexpr):
    """The first of this program's elements: int64, for there may be more than 2^31. What is added to it is int32."""
    return program.to(tl.int64) * BLOCK


@triton.jit
def _length(first, numel, BLOCK: tl.constexpr):
    """How many elements this program has."""
    return tl.minimum(numel - first, BLOCK).to(tl.int32)


@triton.jit
def _load(pointer, length, BLOCK: tl.constexpr):
    """As float32; 0 from `length` on. A whole block needs no mask: its loads are 16 bytes wide whatever the numel."""
    if length == BLOCK:
        x = tl.load(pointer + tl.arange(0, BLOCK))
    else:
        x = tl.load(pointer + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < length, other=0.0)
    return widen(x)


@triton.jit
def _store(pointer, x, length, BLOCK: tl.constexpr):
    if length == BLOCK:
        tl.store(pointer + tl.arange(0, BLOCK), x)
    else:
        tl.store(pointer + tl.arange(0, BLOCK), x, mask=tl.arange(0, BLOCK) < length)


@triton.jit
def _load_sum(gradient_ptr, residual_ptr, first, length, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    m = _load(gradient_ptr + first, length, BLOCK)
    if HAS_RESIDUAL:
        m += _load(residual_ptr + first, length, BLOCK)
    return m


@triton.jit
def _magnitude(x):
    """Int32 in the order of the magnitudes: the bits without the sign, one past infinity's for NaN."""
    return tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800001)


@triton.jit
def _keys(m, length, BLOCK: tl.constexpr):
    """The magnitudes, and -1, which is never sent, from `length` on."""
    return tl.where(tl.arange(0, BLOCK) < length, _magnitude(m), -1)


@triton.jit
def _unsent(m, value):
    """What stays of `m` where `value` was sent."""
    finite = _magnitude(value) < 0x7F800000
    return tl.where(finite, m, 0.0) - tl.where(finite, value, 0.0)


@triton.jit
def _kth_largest(keys, k):
    """A key that the k largest reach and no others, if there is one; else the k-th largest key; else 0.

    Bit by bit: the largest key that at least k reach. Stops early when exactly k do.
    """
    bound = 0
    bit = 30
    while bit >= 0:
        candidate = bound | (1 << bit)
        reached = tl.sum((keys >= candidate).to(tl.int32))
        bound = tl.where(reached >= k, candidate, bound)
        bit = tl.where(reached == k, -1, bit - 1)
    return bound


@triton.jit
def _places(keys, bound, above_before, equal_before, wanted):
    """Which are sent, and where to: those above the bound, and of those equal to it the first `wanted`, in order.

    The counts before are those of the elements before this program's.
    """
    above = (keys > bound).to(tl.int32)
    equal = (keys == bound).to(tl.int32)
    both = tl.cumsum(above + (equal << 16), 0)  # two running counts in one scan: no block has 2^16 elements
    equal_so_far = equal_before + (both >> 16)
    sent = (above == 1) | ((equal == 1) & (equal_so_far <= wanted))
    return sent, above_before + (both & 0xFFFF) + tl.minimum(equal_so_far, wanted) - 1


@triton.jit
def _select_blocks(
    gradient_ptr, residual_ptr, m_ptr, values_ptr, indices_ptr, packed_ptr, numel, packed_bytes, k,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    value_type: tl.constexpr = values_ptr.dtype.element_ty
    index_type: tl.constexpr = indices_ptr.dtype.element_ty
    block = tl.program_id(0)
    first = _first(block, BLOCK)
    length = _length(first, numel, BLOCK)
    m = _load_sum(gradient_ptr, residual_ptr, first, length, HAS_RESIDUAL, BLOCK)
    keys = _keys(m, length, BLOCK)
    bound = _kth_largest(keys, k)
    sent, slot = _places(keys, bound, 0, 0, k - tl.sum((keys > bound).to(tl.int32)))
    values_ptr += _first(block, k)
    indices_ptr += _first(block, k)
    if length < k:
        slots = tl.arange(0, SLOTS)
        unused = (slots >= length) & (slots < k)
        tl.store(values_ptr + slots, tl.zeros([SLOTS], value_type), mask=unused)
        tl.store(indices_ptr + slots, tl.zeros([SLOTS], index_type), mask=unused)
    values = round_to(m, value_type)
    _store(m_ptr + first, tl.where(sent, _unsent(m, widen(values)), m), length, BLOCK)
    tl.store(values_ptr + slot, values, mask=sent)
    tl.store(indices_ptr + slot, tl.arange(0, BLOCK).to(index_type), mask=sent)
    if block == tl.num_programs(0) - 1:
        entry: tl.constexpr = (value_type.primitive_bitwidth + index_type.primitive_bitwidth) // 8
        padding = _first(block + 1, k) * entry + tl.arange(0, 16)
        tl.store(packed_ptr + padding, tl.zeros([16], tl.uint8), mask=padding < packed_bytes)


@triton.jit
def _add_entries(sums_ptr, values_ptr, indices_ptr, count, CHUNK: tl.constexpr):
    """Add `count` entries, whose indices are distinct; then let every thread see it."""
    for start in range(0, count, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        mask = entry < count
        at = tl.load(indices_ptr + entry, mask=mask, other=0).to(tl.int64)
        x = widen(tl.load(values_ptr + entry, mask=mask, other=0.0))
        sums = tl.load(sums_ptr + at, mask=mask, other=0.0)
        tl.store(sums_ptr + at, sums + x, mask=mask)
    tl.debug_barrier()


@triton.jit
def _clear(sums_ptr, length, BLOCK: tl.constexpr):
    _store(sums_ptr, tl.zeros([BLOCK], tl.float32), length, BLOCK)
    tl.debug_barrier()


@triton.jit
def _finish(sums_ptr, out_ptr, length, divisor, BLOCK: tl.constexpr):
    mean = tl.div_rn(_load(sums_ptr, length, BLOCK), tl.zeros([BLOCK], tl.float32) + divisor)
    _store(out_ptr, round_to(mean, out_ptr.dtype.element_ty), length, BLOCK)


@triton.jit
def _sum_blocks(
    values_ptr, indices_ptr, sums_ptr, out_ptr, numel, k, ranks, values_stride, indices_stride, divisor,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    first = _first(block, BLOCK)
    length = _length(first, numel, BLOCK)
    values_ptr += _first(block, k)
    indices_ptr += _first(block, k)
    _clear(sums_ptr + first, length, BLOCK)
    for _ in range(ranks):
        _add_entries(sums_ptr + first, values_ptr, indices_ptr, tl.minimum(length, k), CHUNK)
        values_ptr += values_stride
        indices_ptr += indices_stride
    if FINISH:
        _finish(sums_ptr + first, out_ptr + first, length, divisor, BLOCK)


@triton.jit
def _first_not_below(indices_ptr, bound, k, ranks, RANKS: tl.constexpr, STEPS: tl.constexpr):
    """For each rank, how many of its k ascending indices are less than `bound`."""
    rank = tl.arange(0, RANKS)
    low = tl.zeros([RANKS], tl.int64)
    high = tl.zeros([RANKS], tl.int64) + tl.where(rank < ranks, k, 0)
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        below = tl.load(indices_ptr + rank.to(tl.int64) * k + middle, mask=open_, other=0) < bound
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & ~below, middle, high)
    return low


@triton.jit
def _sum_sparse(
    values_ptr, indices_ptr, sums_ptr, out_ptr, numel, k, ranks, divisor,
    RANKS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    first = _first(tl.program_id(0), BLOCK)
    length = _length(first, numel, BLOCK)
    starts = _first_not_below(indices_ptr, first, k, ranks, RANKS, STEPS)
    stops = _first_not_below(indices_ptr, first + length, k, ranks, RANKS, STEPS)
    _clear(sums_ptr + first, length, BLOCK)
    for rank in range(ranks):
        this = tl.arange(0, RANKS) == rank
        start = tl.sum(tl.where(this, starts, 0))
        stop = tl.sum(tl.where(this, stops, 0))
        _add_entries(sums_ptr, values_ptr + start, indices_ptr + start, (stop - start).to(tl.int32), CHUNK)
        values_ptr += k
        indices_ptr += k
    if FINISH:
        _finish(sums_ptr + first, out_ptr + first, length, divisor, BLOCK)


@triton.jit
def _digit(keys, DIGIT: tl.constexpr):
    return (keys >> (24 - 8 * DIGIT)) & 0xFF


@triton.jit
def _leading_digits(digits_ptr, k, DIGITS: tl.constexpr):
    """The leading digits of the k-th largest key, and which of the keys with these digits it is."""
    prefix = 0
    wanted = tl.zeros([], tl.int64) + k
    for digit in tl.static_range(DIGITS):
        counts = tl.load(digits_ptr + digit * 256 + tl.arange(0, 256))
        reached = tl.cumsum(counts, 0, reverse=True)  # how many have this digit or a larger one
        chosen = tl.sum((reached >= wanted).to(tl.int32)) - 1
        wanted -= tl.sum(tl.where(tl.arange(0, 256) > chosen, counts, 0))
        prefix = prefix * 256 + chosen
    return prefix, wanted


@triton.jit
def _add_counts(digits_ptr, digit, mask, DIGIT: tl.constexpr):
    counts = tl.histogram(digit, 256, mask=mask)
    place = digits_ptr + DIGIT * 256 + tl.arange(0, 256)
    tl.atomic_add(place, counts.to(tl.int64), mask=counts > 0, sem="relaxed")


@triton.jit
def _count_first_digit(
    gradient_ptr, residual_ptr, m_ptr, digits_ptr, numel, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    first = _first(tl.program_id(0), BLOCK)
    length = _length(first, numel, BLOCK)
    m = _load_sum(gradient_ptr, residual_ptr, first, length, HAS_RESIDUAL, BLOCK)
    _store(m_ptr + first, m, length, BLOCK)
    _add_counts(digits_ptr, _digit(_magnitude(m), 0), tl.arange(0, BLOCK) < length, 0)


@triton.jit
def _load_keys(m_ptr, numel, BLOCK: tl.constexpr):
    first = _first(tl.program_id(0), BLOCK)
    length = _length(first, numel, BLOCK)
    return _keys(_load(m_ptr + first, length, BLOCK), length, BLOCK)


@triton.jit
def _count_digit(m_ptr, digits_ptr, numel, k, DIGIT: tl.constexpr, BLOCK: tl.constexpr):
    keys = _load_keys(m_ptr, numel, BLOCK)
    prefix, _ = _leading_digits(digits_ptr, k, DIGIT)
    _add_counts(digits_ptr, _digit(keys, DIGIT), keys >> (32 - 8 * DIGIT) == prefix, DIGIT)


@triton.jit
def _count_sent(m_ptr, digits_ptr, counts_ptr, numel, k, BLOCK: tl.constexpr):
    keys = _load_keys(m_ptr, numel, BLOCK)
    bound, _ = _leading_digits(digits_ptr, k, 4)
    counts_ptr += tl.program_id(0)
    tl.store(counts_ptr, tl.sum((keys > bound).to(tl.int32)))
    tl.store(counts_ptr + tl.num_programs(0), tl.sum((keys == bound).to(tl.int32)))


@triton.jit
def _send(m_ptr, digits_ptr, counts_ptr, running_ptr, values_ptr, indices_ptr, numel, k, BLOCK: tl.constexpr):
    first = _first(tl.program_id(0), BLOCK)
    length = _length(first, numel, BLOCK)
    m_ptr += first
    m = _load(m_ptr, length, BLOCK)
    keys = _keys(m, length, BLOCK)
    bound, wanted = _leading_digits(digits_ptr, k, 4)
    counts_ptr += tl.program_id(0)
    running_ptr += tl.program_id(0)
    above_before = tl.load(running_ptr) - tl.load(counts_ptr)
    equal_before = tl.load(running_ptr + tl.num_programs(0)) - tl.load(counts_ptr + tl.num_programs(0))
    sent, slot = _places(keys, bound, above_before, equal_before, wanted)
    lane = tl.arange(0, BLOCK)
    values = round_to(m, values_ptr.dtype.element_ty)
    tl.store(values_ptr + slot, values, mask=sent)
    tl.store(indices_ptr + slot, (first + lane).to(indices_ptr.dtype.element_ty), mask=sent)
    tl.store(m_ptr + lane, _unsent(m, widen(values)), mask=sent)

"""PowerSGD's operations on thin factors (arXiv:1905.13727), one launch each for all factors of a bucket.

Factors are small beside the gradient: what a launch costs here is its latency. `largest` reads a whole buffer, for any
hook.

The functions have the names, arguments and meaning of those in `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from commhooks.triton_kernels.reference import DEPENDENT, FLOATS, Side, check
from commhooks.triton_kernels.rounding import LAUNCH, widen
from commhooks.triton_kernels.tiles import CHUNK, side_tables

MAX_RANK = 64
LARGEST_BLOCK = 8192  # numbers to an atomic operation: all of them meet at one address


@triton.jit
def _orthogonalize(packed, bases, lost, factors, epsilon, dependent, R: tl.constexpr, BLOCK: tl.constexpr):
    """One factor X (rank, length): T X with the T that makes its rows orthonormal, by Cholesky QR."""
    this = factors + tl.program_id(0).to(tl.int64) * 4
    packed += tl.load(this)
    bases += tl.load(this)
    rank, length = tl.load(this + 1), tl.load(this + 2)
    lost += tl.load(this + 3)
    r = tl.arange(0, R)
    row, col = r[:, None], r[None, :]

    gram = tl.zeros((R, R), tl.float64)  # X X^T
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = (row < rank) & (i < length)[None, :]
        x = widen(tl.load(packed + row * length + i[None, :], inside, other=0.0)).to(tl.float64)  # (R, BLOCK)
        for k in range(rank):
            x_k = widen(tl.load(packed + k * length + i, i < length, other=0.0)).to(tl.float64)
            gram += tl.where(col == k, tl.sum(x * x_k[None, :], 1)[:, None], 0.0)

    # gram = L L^T, row by row of L^-1: T begins as the identity, and loses L while L is found.
    transform = tl.where(row == col, 1.0, 0.0).to(tl.float64)
    smallest = tl.sum(tl.where(row == col, gram, 0.0), 1) * (dependent * dependent)
    norms = tl.zeros((R,), tl.float64)
    gone = tl.zeros((R,), tl.int8)
    for j in range(rank):
        column = tl.sum(tl.where(col == j, gram, 0.0), 1)  # (R,)
        square = tl.sum(tl.where(r == j, column, 0.0), 0)
        is_gone = square <= tl.sum(tl.where(r == j, smallest, 0.0), 0)  # False of NaN, which stays
        scale = tl.where(is_gone, 0.0, 1.0 / tl.sqrt(square))
        column *= scale
        along = tl.sum(tl.where(row == j, gram, 0.0), 0) * scale  # the same, gram being symmetric, as a row
        gram -= column[:, None] * along[None, :]
        done = tl.sum(tl.where(row == j, transform, 0.0), 0) * scale  # row j of T
        below = tl.where(r > j, column, 0.0)
        transform = tl.where(row == j, done[None, :], transform - below[:, None] * done[None, :])
        norms = tl.where(r == j, tl.sqrt(square), norms)
        gone = tl.where(r == j, is_gone.to(tl.int8), gone)
    tl.store(lost + r, gone, r < rank)
    shrink = tl.where(gone != 0, 0.0, norms / (norms + epsilon))
    transform *= shrink[:, None]

    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        out = tl.zeros((R, BLOCK), tl.float64)
        for k in range(rank):
            x_k = widen(tl.load(packed + k * length + i, i < length, other=0.0)).to(tl.float64)
            out += tl.sum(tl.where(col == k, transform, 0.0), 1)[:, None] * x_k[None, :]
        inside = (row < rank) & (i < length)[None, :]
        tl.store(bases + row * length + i[None, :], out.to(tl.float32), inside)


@triton.jit
def _magnitudes(packed, vectors, slots, chunks, factor_chunks, factors, vectors_numel, CHUNK: tl.constexpr):
    """The largest magnitude of a chunk, into its factor's slot and the last one."""
    program = tl.program_id(0).to(tl.int64)
    if program < factor_chunks:
        chunk = chunks + program * 4
        _raise_to_magnitude(packed + tl.load(chunk), tl.load(chunk + 1), slots, tl.load(chunk + 2), factors, CHUNK)
    else:
        start = (program - factor_chunks) * CHUNK
        _raise_to_magnitude(vectors + start, vectors_numel - start, slots, factors, factors, CHUNK)


@triton.jit
def _raise_to_magnitude(x, numel, slots, slot, last, CHUNK: tl.constexpr):
    i = tl.arange(0, CHUNK)
    bits = tl.max(_magnitude_bits(tl.load(x + i, i < numel, other=0.0)), 0)
    tl.atomic_max(slots + slot, bits)
    tl.atomic_max(slots + last, bits)


@triton.jit
def _magnitude_bits(x):
    """|x| as an integer: of the same order, with NaN above infinity, and the same for whatever order they come in."""
    return widen(x).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _largest(x, slot, numel, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:  # without a mask loads are wide
        tl.atomic_max(slot, tl.max(_magnitude_bits(tl.load(x + i)), 0))
    else:
        tl.atomic_max(slot, tl.max(_magnitude_bits(tl.load(x + i, i < numel, other=0.0)), 0))


@triton.jit
def _keep_factor(kept, new, scales, lost, fresh, chunks, factors, tiny, CHUNK: tl.constexpr):
    chunk = chunks + tl.program_id(0).to(tl.int64) * 4
    factor = tl.load(chunk + 2)
    i = tl.load(chunk) + tl.arange(0, CHUNK)
    inside = tl.arange(0, CHUNK) < tl.load(chunk + 1)
    row = (i - tl.load(chunk + 3)) // tl.load(factors + factor * 4 + 2)
    gone = tl.load(lost + tl.load(factors + factor * 4 + 3) + row, inside, other=0)
    scale = tl.maximum(tl.load(scales + factor), tiny)
    x = tl.div_rn(widen(tl.load(new + i, inside, other=0.0)), scale)
    tl.store(kept + i, tl.where(gone != 0, tl.load(fresh + i, inside, other=0.0), x), inside)


def orthogonalize(packed: Tensor, side: Side, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Orthonormal rows of the same span for every factor (rank, length), first row first. One launch.

    With one factor [[3, 4], [6, 8]]: [[0.6, 0.8], [0, 0]] and lost [False, True].

    Args:
        packed: the factors: float32, bfloat16 or float16.
        side: where they lie.
        epsilon: added to the norms that rows are divided by.
        dtype: of the result: float32.

    Returns:
        The packed orthonormal factors, and which rows depended on those before them and are zero: bool.

    Raises:
        ValueError: a tensor is of another dtype, not contiguous or too short, or a rank is above 64; it says which.

    The method, Cholesky QR with float64 sums, is the reference's. One program a factor reads it twice, and again for
    every row from the cache.
    """
    tables = side_tables(side, packed.device)
    check("packed", packed, FLOATS, side.numel)
    if dtype != torch.float32:
        raise ValueError(f"dtype is {dtype}; it must be torch.float32")
    check_rank(tables.max_rank)
    bases = torch.empty(side.numel, dtype=dtype, device=packed.device)
    lost = torch.empty(sum(side.ranks), dtype=torch.int8, device=packed.device)
    if side.factors:
        constants = orthogonalize_constants(tables.max_rank)
        _orthogonalize[(len(side.factors),)](
            packed, bases, lost, tables.factors, float(epsilon), DEPENDENT, **constants, **LAUNCH
        )
    return bases, lost.view(torch.bool)


def orthogonalize_constants(rank: int) -> dict[str, int]:
    """R, BLOCK and the number of warps.

    4096 float64 numbers, 32 registers a thread of 8 warps; but whole warps' loads of each row.
    """
    r = max(1, triton.next_power_of_2(rank))
    return {"R": r, "BLOCK": min(1024, 4096 // r), "num_warps": 8}


def magnitudes(packed: Tensor, side: Side, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each factor, and of the factors and `vectors` together; NaN of NaN. One launch.

    With one factor [[1, -3]] and vectors [7]: [3.0] and 7.0.

    Args:
        packed: the factors: float32, bfloat16 or float16.
        side: where they lie.
        vectors: float32, bfloat16 or float16.

    Returns:
        (factors,) and a scalar, float32.

    Raises:
        ValueError: a tensor is of another dtype, not contiguous or too short; it says which.
    """
    tables = side_tables(side, packed.device)
    check("packed", packed, FLOATS, side.numel)
    check("vectors", vectors, FLOATS, 0)
    factors, factor_chunks = len(side.factors), len(tables.chunks)
    slots = torch.zeros(factors + 1, dtype=torch.int32, device=packed.device)
    if programs := factor_chunks + triton.cdiv(vectors.numel(), CHUNK):
        _magnitudes[(programs,)](
            packed, vectors, slots, tables.chunks, factor_chunks, factors, vectors.numel(), CHUNK, **LAUNCH, num_warps=4
        )
    found = slots.view(torch.float32)
    return found[:factors], found[factors]


def largest(x: Tensor) -> Tensor:
    """The largest magnitude, a scalar, float32; NaN if there is one; 0 of nothing. One launch, one read.

    With [1, -3]: 3.0.

    Raises:
        ValueError: x is of another dtype than float32, bfloat16 and float16, or not contiguous.
    """
    check("x", x, FLOATS, 0)
    slot = torch.zeros((), dtype=torch.int32, device=x.device)
    if x.numel():
        _largest[(triton.cdiv(x.numel(), LARGEST_BLOCK),)](x, slot, x.numel(), LARGEST_BLOCK, **LAUNCH, num_warps=8)
    return slot.view(torch.float32)


def keep_factor_(kept: Tensor, new: Tensor, side: Side, scales: Tensor, lost: Tensor, fresh: Tensor) -> None:
    """`kept` becomes `new`, each factor divided by its scale, and its `lost` rows `fresh`.

    With one factor, new [[2, -4], [0, 0]], scale 4, lost [False, True], fresh all 9: kept [[0.5, -1], [9, 9]].
    One launch.

    Args:
        kept: the packed factors, float32, overwritten.
        new: the packed factors: float32, bfloat16 or float16.
        side: where they lie.
        scales: (factors,), float32.
        lost: bool, a row's after the other's.
        fresh: the packed factors, float32.

    Raises:
        ValueError: a tensor is of another dtype, not contiguous or too short; it says which.
    """
    tables = side_tables(side, kept.device)
    check("kept", kept, (torch.float32,), side.numel)
    check("new", new, FLOATS, side.numel)
    check("scales", scales, (torch.float32,), len(side.factors))
    check("lost", lost, (torch.bool,), sum(side.ranks))
    check("fresh", fresh, (torch.float32,), side.numel)
    if len(tables.chunks):
        tiny = torch.finfo(torch.float32).tiny
        _keep_factor[(len(tables.chunks),)](
            kept, new, scales, lost.view(torch.int8), fresh, tables.chunks, tables.factors, tiny, CHUNK,
            **LAUNCH, num_warps=4,
        )  # fmt: skip


def check_rank(rank: int) -> None:
    if rank > MAX_RANK:
        raise ValueError(
            f"rank is {rank}; the kernels take ranks up to {MAX_RANK}, with COMMHOOKS_BACKEND=reference any can be had"
        )

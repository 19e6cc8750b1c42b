"""PowerSGD's operations (arXiv:1905.13727, Algorithms 1 and 2), each a launch or two for all matrices of a bucket.

A full step is eight launches: project (2), orthogonalize, project_t (2), magnitudes, keep_factor_, reconstruct_. Of a
float32 gradient they move 28 bytes an element of M: gradient and residual in, M out; M in; M in, gradient and residual
out. Factors are small beside M.

The functions have the names, arguments and meaning of those in `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from commhooks.triton_kernels.reference import DEPENDENT, FLOATS, Factors, Plan, Projection, Side, check
from commhooks.triton_kernels.rounding import LAUNCH, round_to, widen
from commhooks.triton_kernels.tiles import (
    CHUNK,
    TILE_COLS,
    TILE_OUT_COLS,
    TILE_OUT_ROWS,
    TILE_ROWS,
    TILE_T_COLS,
    TILE_T_ROWS,
    PlanTables,
    ProjectionTiles,
    plan_tables,
    side_tables,
)

MAX_RANK = 64
LARGEST_BLOCK = 8192  # numbers to an atomic operation: all of them meet at one address
BUILT_IN_REGISTERS = 8  # ranks up to this keep a sum a number of M, larger ones take tl.dot


@triton.jit
def _project(
    gradient,
    residual,
    m,
    factor,
    partials,
    tiles,
    HAS_RESIDUAL: tl.constexpr,
    STORE_M: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALIGN: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One tile of M = gradient + residual, stored; and its part of P^T (rank, rows), or of Q^T (rank, cols).

    ROWS x COLS numbers at a time, STEPS times: along the columns for P, along the rows for Q.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * 8
    offset = tl.multiple_of(tl.load(tile), ALIGN)
    rows = tl.load(tile + 1)
    cols = tl.multiple_of(tl.load(tile + 2), ALIGN)
    rank = tl.load(tile + 3)
    factor += tl.load(tile + 4)
    partials += tl.load(tile + 5)
    row = tl.load(tile + 6) + tl.arange(0, ROWS)
    col = tl.multiple_of(tl.load(tile + 7), 16) + tl.arange(0, COLS)
    k = tl.arange(0, R)
    if R <= 8:  # BUILT_IN_REGISTERS
        sums = tl.zeros((R, ROWS, COLS), tl.float32)
    elif TRANSPOSED:
        sums = tl.zeros((R, COLS), tl.float32)
    else:
        sums = tl.zeros((ROWS, R), tl.float32)

    for _ in range(STEPS):
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        at = offset + row[:, None] * cols + col[None, :]
        x = widen(tl.load(gradient + at, inside, other=0.0))  # (ROWS, COLS)
        if HAS_RESIDUAL:
            x += tl.load(residual + at, inside, other=0.0)
        if STORE_M:
            tl.store(m + at, x, inside)
        if TRANSPOSED:
            p = tl.load(factor + k[:, None] * rows + row[None, :], (k < rank)[:, None] & (row < rows)[None, :], 0.0)
            if R <= 8:
                sums += p[:, :, None] * x[None, :, :]
            else:
                sums = tl.dot(p, x, sums, input_precision="ieee")
            row += ROWS
        else:
            q = tl.load(factor + k[:, None] * cols + col[None, :], (k < rank)[:, None] & (col < cols)[None, :], 0.0)
            if R <= 8:
                sums += q[:, None, :] * x[None, :, :]
            else:
                sums = tl.dot(x, tl.trans(q), sums, input_precision="ieee")
            col += COLS

    if TRANSPOSED:
        out = tl.sum(sums, 1) if R <= 8 else sums  # (R, COLS)
        tl.store(partials + k[:, None] * cols + col[None, :], out, (k < rank)[:, None] & (col < cols)[None, :])
    else:
        out = tl.sum(sums, 2) if R <= 8 else tl.trans(sums)  # (R, ROWS)
        tl.store(partials + k[:, None] * rows + row[None, :], out, (k < rank)[:, None] & (row < rows)[None, :])


@triton.jit
def _sum_partials(
    partials,
    gradient,
    residual,
    m,
    wire,
    sent,
    chunks,
    divisor,
    HAS_RESIDUAL: tl.constexpr,
    STORE_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A chunk of the packed result: partial sums added up, in their order; or a piece of a vector of M."""
    chunk = chunks + tl.program_id(0).to(tl.int64) * 6
    start, numel = tl.load(chunk), tl.load(chunk + 1)
    stride, splits = tl.load(chunk + 3), tl.load(chunk + 4)
    i = tl.arange(0, CHUNK)
    inside = i < numel
    total = tl.zeros((CHUNK,), tl.float32)
    if splits == 0:
        at = tl.load(chunk + 5) + i
        total += widen(tl.load(gradient + at, inside, other=0.0))
        if HAS_RESIDUAL:
            total += tl.load(residual + at, inside, other=0.0)
        if STORE_M:
            tl.store(m + at, total, inside)
    else:
        first = tl.load(chunk + 2)
        for split in range(splits):
            total += tl.load(partials + first + split * stride + i, inside, other=0.0)
    rounded = round_to(tl.div_rn(total, divisor), wire.dtype.element_ty)
    tl.store(wire + start + i, rounded, inside)
    if wire.dtype.element_ty == tl.float32:
        tl.store(sent + start + i, total, inside)
    else:
        tl.store(sent + start + i, widen(rounded) * divisor, inside)


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


@triton.jit
def _reconstruct(
    m,
    mean_p,
    mean_q,
    mean_vectors,
    sent_p,
    sent_q,
    sent_vectors,
    out,
    residual,
    tiles,
    HAS_RESIDUAL: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * 8
    if tl.load(tile + 3) == 0:
        _reconstruct_vector(m, mean_vectors, sent_vectors, out, residual, tile, HAS_RESIDUAL, ROWS * COLS)
    else:
        _reconstruct_matrix(m, mean_p, mean_q, sent_p, sent_q, out, residual, tile, HAS_RESIDUAL, ALIGN, ROWS, COLS)


@triton.jit
def _reconstruct_vector(
    m, mean, sent, out, residual, tile, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.load(tile + 7) + tl.arange(0, BLOCK)
    inside = i < tl.load(tile + 2)
    at, packed = tl.load(tile) + i, tl.load(tile + 4) + i
    if HAS_RESIDUAL:
        left = tl.load(m + at, inside, other=0.0) - tl.load(sent + packed, inside, other=0.0)
        tl.store(residual + at, left, inside)
    x = widen(tl.load(mean + packed, inside, other=0.0))
    tl.store(out + at, round_to(x, out.dtype.element_ty), inside)


@triton.jit
def _reconstruct_matrix(
    m, mean_p, mean_q, sent_p, sent_q, out, residual, tile,
    HAS_RESIDUAL: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A tile of P Q^T of the means, and of M - P Q^T of what was sent."""
    offset = tl.multiple_of(tl.load(tile), ALIGN)
    rows, cols = tl.load(tile + 1), tl.multiple_of(tl.load(tile + 2), ALIGN)
    rank = tl.load(tile + 3)
    row = tl.load(tile + 6) + tl.arange(0, ROWS)
    col = tl.multiple_of(tl.load(tile + 7), 16) + tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = offset + row[:, None] * cols + col[None, :]
    p, q = tl.load(tile + 4) + row, tl.load(tile + 5) + col
    if HAS_RESIDUAL:
        left = tl.load(m + at, inside, other=0.0)
        for k in range(rank):
            p_k = tl.load(sent_p + p + k * rows, row < rows, other=0.0)
            q_k = tl.load(sent_q + q + k * cols, col < cols, other=0.0)
            left -= p_k[:, None] * q_k[None, :]
        tl.store(residual + at, left, inside)
    mean = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(rank):
        p_k = widen(tl.load(mean_p + p + k * rows, row < rows, other=0.0))
        q_k = widen(tl.load(mean_q + q + k * cols, col < cols, other=0.0))
        mean += p_k[:, None] * q_k[None, :]
    tl.store(out + at, round_to(mean, out.dtype.element_ty), inside)


def project(
    gradient: Tensor, residual: Tensor | None, q: Tensor, plan: Plan, divisor: float, dtype: torch.dtype
) -> Projection:
    """M = gradient + residual; of every matrix P = M Q; behind them the vectors of M. Two launches.

    With one matrix M = [[1, 2], [3, 4]], Q = [[1], [0]] and divisor 2: P = [[1], [3]], wire [0.5, 1.5], sent [1, 3].

    Args:
        gradient: the bucket, flat: float32, bfloat16 or float16. With a residual and of float32 it becomes M.
        residual: as long, float32, or None. Not changed.
        q: packed Q^T of every matrix, float32.
        plan: where matrices, factors and vectors lie.
        divisor: of what is sent; the number of ranks.
        dtype: of what is sent: float32, bfloat16 or float16.

    Returns:
        See `Projection`. Sums are float32, and the same in every run: partial sums are added in their order.

    Raises:
        ValueError: a tensor is of another dtype, not contiguous or too short, or a rank is above 64; it says which.

    Bytes an element of a float32 M: 12 with a residual (gradient and residual in, M out), 4 without. No fewer are
    possible; partial sums add 8 rank / 1024.
    """
    tables = _checked_tables(gradient, residual, plan, dtype)
    check("q", q, (torch.float32,), plan.q.numel)
    return _launch_project(gradient, residual, q, tables, tables.project, divisor, dtype, transposed=False)


def project_t(
    gradient: Tensor,
    residual: Tensor | None,
    p: Tensor,
    plan: Plan,
    divisor: float,
    dtype: torch.dtype,
    *,
    with_vectors: bool,
) -> Projection:
    """M = gradient + residual; of every matrix Q = M^T P; behind them, if asked for, the vectors of M. Two launches.

    With one matrix M = [[1, 2], [3, 4]], P = [[1], [0]] and divisor 2: Q = [[1], [2]], wire [0.5, 1], sent [1, 2].

    Arguments, result and errors as of `project`, with P for Q.

    Bytes an element of a float32 M: 12 with a residual, 4 without; partial sums add 8 rank / 128.
    """
    tables = _checked_tables(gradient, residual, plan, dtype)
    check("p", p, (torch.float32,), plan.p.numel)
    tiles = tables.project_t_with_vectors if with_vectors else tables.project_t
    return _launch_project(gradient, residual, p, tables, tiles, divisor, dtype, transposed=True)


def _checked_tables(gradient: Tensor, residual: Tensor | None, plan: Plan, dtype: torch.dtype) -> PlanTables:
    tables = plan_tables(plan, gradient.device)
    check("gradient", gradient, FLOATS, 0)
    check("residual", residual, (torch.float32,), gradient.numel())
    if dtype not in FLOATS:
        raise ValueError(f"dtype is {dtype}; it must be one of {FLOATS}")
    _check_rank(tables.max_rank)
    return tables


def _check_rank(rank: int) -> None:
    if rank > MAX_RANK:
        raise ValueError(
            f"rank is {rank}; the kernels take ranks up to {MAX_RANK}, with COMMHOOKS_BACKEND=reference any can be had"
        )


def _launch_project(
    gradient: Tensor,
    residual: Tensor | None,
    factor: Tensor,
    tables: PlanTables,
    tiles: ProjectionTiles,
    divisor: float,
    dtype: torch.dtype,
    *,
    transposed: bool,
) -> Projection:
    in_place = gradient.dtype == torch.float32
    m = gradient if in_place else torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)
    flags = residual is not None, not in_place or residual is not None  # HAS_RESIDUAL, STORE_M
    partials = torch.empty(tiles.partial_numel, dtype=torch.float32, device=m.device)
    if len(tiles.tiles):
        constants = projection_constants(tables.max_rank, transposed=transposed)
        _project[(len(tiles.tiles),)](
            gradient, residual, m, factor, partials, tiles.tiles, *flags, transposed, tables.align, **constants,
            **LAUNCH,
        )  # fmt: skip
    numel = tiles.packed_numel
    wire = torch.empty(numel, dtype=dtype, device=m.device)
    sent = torch.empty(numel, dtype=torch.float32, device=m.device)
    if len(tiles.chunks):
        _sum_partials[(len(tiles.chunks),)](
            partials,
            gradient,
            residual,
            m,
            wire,
            sent,
            tiles.chunks,
            float(divisor),
            *flags,
            CHUNK,
            **LAUNCH,
            num_warps=4,
        )
    return Projection(m, wire, sent)


def projection_constants(rank: int, *, transposed: bool) -> dict[str, int]:
    """ROWS, COLS and STEPS of `_project`: how it goes through a tile; and the number of warps.

    Up to rank 8 each thread keeps rank sums for each of its numbers, and adds threads' up once a tile: 16 x 128 x rank
    sums are 64 registers a thread at rank 8. Above, tl.dot adds up at each step; what it holds of both sides must fit
    into the registers too.
    """
    r = max(1, triton.next_power_of_2(rank))
    rows = 16
    cols = 64 if not transposed and r > BUILT_IN_REGISTERS else 128
    tile_rows, tile_cols = (TILE_T_ROWS, TILE_T_COLS) if transposed else (TILE_ROWS, TILE_COLS)
    steps = tile_rows // rows if transposed else tile_cols // cols
    narrow = not transposed and r in (1, 2, 16, 32)
    warps = 4 if narrow else 16 if transposed and r == MAX_RANK else 8
    return {"R": r, "ROWS": rows, "COLS": cols, "STEPS": steps, "num_warps": warps}


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
    _check_rank(tables.max_rank)
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


def reconstruct_(m: Tensor, plan: Plan, mean: Factors, sent: Factors, out: Tensor, residual: Tensor | None) -> None:
    """out = P Q^T of the mean factors; residual = M - P Q^T of what this rank sent. One launch.

    With M = [[1, 2], [3, 4]], mean and sent P = [[1], [0]], Q = [[1], [2]]: out [[1, 2], [0, 0]], residual
    [[0, 0], [3, 4]].

    Args:
        m: float32; it may be `out` itself.
        plan: where matrices, factors and vectors lie.
        mean: float32, bfloat16 or float16.
        sent: float32.
        out: float32, bfloat16 or float16: overwritten.
        residual: float32, overwritten; or None.

    Raises:
        ValueError: a tensor is of another dtype, not contiguous or too short; it says which.

    Bytes an element of a float32 M: 12 with a residual (M in, gradient and residual out), 4 without.
    """
    tables = plan_tables(plan, m.device)
    check("m", m, (torch.float32,), 0)
    check("out", out, FLOATS, m.numel())
    check("residual", residual, (torch.float32,), m.numel())
    numels = plan.p.numel, plan.q.numel, plan.vectors_numel
    for name, x, numel in zip(Factors._fields, mean, numels, strict=True):
        check(f"mean.{name}", x, FLOATS, numel)
    for name, x, numel in zip(Factors._fields, sent, numels, strict=True):
        check(f"sent.{name}", x, (torch.float32,), numel)
    if len(tables.reconstruct):
        _reconstruct[(len(tables.reconstruct),)](
            m, *mean, *sent, out, residual, tables.reconstruct, residual is not None, tables.align,
            TILE_OUT_ROWS, TILE_OUT_COLS, **LAUNCH, num_warps=8,
        )  # fmt: skip

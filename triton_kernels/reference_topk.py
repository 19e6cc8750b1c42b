"""Top-k selection and sparse sums in plain torch: the meaning of the kernels in `topk.py`, and the CPU's fast path.

The largest are those of largest magnitude; among equals the lower index comes first. All NaN are equal, and larger than
infinity: a NaN is never lost.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from commhooks.triton_kernels.reference import FLOATS as WIRE_DTYPES, check, compute_dtype

BLOCK_SIZES = tuple(2**i for i in range(8, 14))
GRADIENT_DTYPES = (*WIRE_DTYPES, torch.float64)
ALIGNMENT = 16  # bytes: what is gathered from several ranks stays aligned for the widest load
# Elements, whole blocks of any size: a chunk and its few temporaries fit in a CPU core's second-level cache.
CHUNK = 2**18


def select_blocks(
    gradient: Tensor, residual: Tensor | None, k: int, block_size: int, wire_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The k largest of every `block_size` consecutive elements of M = gradient + residual.

    A last block shorter than k sends all of itself; the slots that it leaves unused hold index 0 and value 0.

    >>> m, packed = select_blocks(torch.tensor([1.0, -3.0, 2.0]), None, 2, 256, torch.float32)
    >>> unpack_blocks(packed, 3, 2, 256, torch.float32)
    (tensor([-3., 2.]), tensor([1, 2]))
    >>> m
    tensor([1., 0., 0.])

    Args:
        gradient: (numel,), float32, bfloat16, float16 or float64. Overwritten where it is M.
        residual: (numel,) in the compute dtype, or None. Only read.
        k: 1 to block_size.
        block_size: a power of two, 256 to 8192.
        wire_dtype: float32, bfloat16 or float16. What overflows in it is sent as infinity.

    Returns:
        What was not sent, in the compute dtype: M less the values as rounded to `wire_dtype`; 0 where a value that is
        not finite was sent. It lies in `gradient` where that has the compute dtype, else in a new tensor.
        The wire buffer: uint8, all values, then all block-local indices (uint8, or int16 if block_size > 256), k a
        block, ascending within it; zeros up to a multiple of 16 bytes.
    """
    check_gradient(gradient, residual, GRADIENT_DTYPES)
    check_blocks(k, block_size, wire_dtype)
    m = gradient.to(compute_dtype(gradient.dtype))
    numel = m.numel()
    scratch = torch.empty_like(m[:CHUNK], dtype=_magnitude_dtype(m))
    sent = []
    for start, stop, width in _chunks(numel, block_size):
        x = m[start:stop]
        if residual is not None:
            x.add_(residual[start:stop])
        sent.append(_largest(x.view(-1, width), min(k, width), scratch).add_(start))
    at = torch.cat(sent) if sent else torch.empty(0, dtype=torch.int64, device=m.device)
    packed = torch.zeros(packed_bytes(numel, k, block_size, wire_dtype), dtype=torch.uint8, device=m.device)
    values, indices = packed_views(packed, numel, k, block_size, wire_dtype)
    values[: len(at)] = _take_(m, at, wire_dtype)
    indices[: len(at)] = at & (block_size - 1)
    return m, packed


def unpack_blocks(
    packed: Tensor, numel: int, k: int, block_size: int, wire_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The values (a view) and global indices (int64) in a buffer of `select_blocks`, without its unused slots."""
    check_blocks(k, block_size, wire_dtype)
    check_packed(packed, numel, k, block_size, wire_dtype)
    values, indices = packed_views(packed, numel, k, block_size, wire_dtype)
    return values[: entries(numel, k, block_size)], places(indices, numel, k, block_size)


def places(indices: Tensor, numel: int, k: int, block_size: int) -> Tensor:
    """Of block-local indices, unused slots included, where in the whole the used ones are: int64."""
    starts = torch.arange(0, numel, block_size, device=indices.device)
    return (indices.view(-1, k) + starts[:, None]).view(-1)[: entries(numel, k, block_size)]


def sum_blocks_(
    gathered: Tensor, k: int, block_size: int, wire_dtype: torch.dtype, divisor: float, out: Tensor
) -> None:
    """out = the sum of W ranks' selections, added in rank order in the compute dtype, / divisor; 0 elsewhere.

    >>> _, a = select_blocks(torch.tensor([9.0, 0.0, 0.0, 1.0]), None, 1, 256, torch.float32)
    >>> _, b = select_blocks(torch.tensor([0.0, 0.0, 8.0, 1.0]), None, 1, 256, torch.float32)
    >>> sum_blocks_(torch.stack([a, b]), 1, 256, torch.float32, 2, out)
    >>> out
    tensor([4.5, 0.0, 4.0, 0.0])

    Args:
        gathered: uint8 (W, bytes): every rank's buffer of `select_blocks`.
        divisor: of the sum.
        out: (numel,), any floating dtype; overwritten.
    """
    check_blocks(k, block_size, wire_dtype)
    check_out(out, GRADIENT_DTYPES)
    check_packed(gathered, out.numel(), k, block_size, wire_dtype)
    if not out.numel():
        return
    total = _zeros_for(out)
    for packed in gathered:
        values, at = unpack_blocks(packed, out.numel(), k, block_size, wire_dtype)
        total.index_add_(0, at, values.to(total.dtype))
    _divide(total, divisor, out)


def select_exact(
    gradient: Tensor, residual: Tensor | None, k: int, wire_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of all elements of M = gradient + residual.

    >>> select_exact(torch.tensor([1.0, -3.0, 2.0, 2.0]), None, 2, torch.float32)
    (tensor([1., 0., 0., 2.]), tensor([-3., 2.]), tensor([1, 2], dtype=torch.int32))

    Args:
        gradient, residual, wire_dtype: as in `select_blocks`.
        k: 1 to numel.

    Returns:
        What was not sent, as in `select_blocks`.
        The values (k,) in `wire_dtype`.
        Their indices (k,), ascending: int32, or int64 if there are more than 2^31 elements.
    """
    check_gradient(gradient, residual, GRADIENT_DTYPES)
    check_exact(k, gradient.numel(), wire_dtype)
    m = gradient.to(compute_dtype(gradient.dtype))
    if residual is not None:
        m.add_(residual)
    at = _largest(m[None], k)
    return m, _take_(m, at, wire_dtype), at.to(exact_index_dtype(m.numel()))


def sum_sparse_(values: Tensor, indices: Tensor, divisor: float, out: Tensor) -> None:
    """out = the sum of W ranks' (values, indices), added in rank order in the compute dtype, / divisor; 0 elsewhere.

    >>> sum_sparse_(torch.tensor([[9.0], [8.0]]), torch.tensor([[0], [2]]), 2, out)
    >>> out
    tensor([4.5, 0.0, 4.0, 0.0])

    Args:
        values: (W, k), float32, bfloat16 or float16.
        indices: (W, k), int32 or int64, of each rank ascending and without duplicates.
        divisor: of the sum.
        out: (numel,), any floating dtype; overwritten.
    """
    check_out(out, GRADIENT_DTYPES)
    check_sparse(values, indices)
    total = _zeros_for(out)
    for x, at in zip(values, indices, strict=True):
        total.index_add_(0, at, x.to(total.dtype))
    _divide(total, divisor, out)


def _chunks(numel: int, block_size: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, length of each of its blocks) of stretches of whole blocks, and of the shorter block at the end."""
    whole = numel // block_size * block_size
    for start in range(0, whole, CHUNK):
        yield start, min(start + CHUNK, whole), block_size
    if whole < numel:
        yield whole, numel, numel - whole


def _magnitude_dtype(m: Tensor) -> torch.dtype:
    return torch.int64 if m.dtype == torch.float64 else torch.int32


def _magnitudes(m: Tensor, out: Tensor | None = None) -> Tensor:
    """Integers in the order of the magnitudes of `m`: the bits without the sign, one past infinity's for NaN."""
    dtype = _magnitude_dtype(m)
    infinity = 0x7FF << 52 if dtype == torch.int64 else 0xFF << 23
    return torch.bitwise_and(m.view(dtype), torch.iinfo(dtype).max, out=out).clamp_max_(infinity + 1)


def _largest(m: Tensor, k: int, scratch: Tensor | None = None) -> Tensor:
    """Where in the flat `m` (rows, n) the k largest of each row lie; ascending, (rows * k,)."""
    rows, n = m.shape
    keys = _magnitudes(m, None if scratch is None else scratch[: m.numel()].view_as(m))
    if keys.is_cuda:  # cannot look at how many reach a bound
        return _largest_by_sorting(keys, k)
    maxima = _maxima(keys, k)
    bound = maxima.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)  # k groups reach it, so k elements do
    surplus = None
    if (maxima >= bound).sum() > 2 * rows * k:  # many equal, zeros most often: the first k of a row are enough
        equal = keys == bound
        surplus = equal & (equal.cumsum(1) > k)
    mask = keys.ge_(bound).to(torch.bool)  # half the time of a comparison that makes booleans
    if surplus is not None:
        mask &= ~surplus
    at = _nonzero(mask)
    if len(at) > rows * k:
        at = at[_are_largest(_magnitudes(m.view(-1).index_select(0, at)), at // n, rows, k)]
    return at


def _largest_by_sorting(keys: Tensor, k: int) -> Tensor:
    rows, n = keys.shape
    order = keys.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
    return (order + torch.arange(0, rows * n, n, device=keys.device)[:, None]).view(-1)


def _maxima(keys: Tensor, k: int) -> Tensor:
    """The maxima (rows, groups) of disjoint groups of each row.

    With 3 k to 6 k groups few of the k largest of random numbers share a group: 1.1 k to 1.2 k reach the k-th maximum.
    """
    n = keys.shape[1]
    groups = min(1 << (3 * k - 1).bit_length(), n)
    grouped = n // groups * groups
    # Groups of stride `groups`: maxima along the outer dimension are vectorized.
    maxima = keys[:, :grouped].unflatten(1, (-1, groups)).amax(1)
    return maxima if grouped == n else torch.cat([maxima, keys[:, grouped:]], dim=1)


def _nonzero(mask: Tensor) -> Tensor:
    """Where the flat mask is true. Looks at eight elements at once, for few are."""
    flat = mask.view(-1)
    whole = flat.numel() // 8 * 8
    octets = flat[:whole].view(torch.int64)
    some = octets.nonzero()[:, 0]
    octet, inside = octets.index_select(0, some).view(torch.bool).view(-1, 8).nonzero().unbind(1)
    at = some.index_select(0, octet).mul_(8).add_(inside)
    return at if whole == flat.numel() else torch.cat([at, flat[whole:].nonzero()[:, 0] + whole])


def _are_largest(key: Tensor, row: Tensor, rows: int, k: int) -> Tensor:
    """Which of `key` are among the k largest of their row; `row` ascends, and each has at least k."""
    if key.dtype == torch.int32:
        order = ((row << 32) - key).argsort(stable=True)
    else:
        order = key.argsort(descending=True, stable=True)
        order = order[row[order].argsort(stable=True)]
    in_row = torch.bincount(row, minlength=rows)
    before = in_row.cumsum(0) - in_row
    mask = torch.empty_like(row, dtype=torch.bool)
    mask[order] = torch.arange(len(row), device=row.device) < before.index_select(0, row) + k  # row[order] is row
    return mask


def _take_(m: Tensor, at: Tensor, wire_dtype: torch.dtype) -> Tensor:
    """The values of `m` at `at` as sent; `m` keeps there what rounding lost, and 0 where that is not a number."""
    x = m[at]
    values = x.to(wire_dtype)
    m[at] = torch.where(values.isfinite(), x - values, 0)
    return values


def _zeros_for(out: Tensor) -> Tensor:
    """Zeros in the compute dtype, in the memory of `out` where it has that."""
    dtype = compute_dtype(out.dtype)
    return out.zero_() if out.dtype == dtype else torch.zeros_like(out, dtype=dtype)


def _divide(total: Tensor, divisor: float, out: Tensor) -> None:
    if divisor != 1:
        total.div_(divisor)
    if out is not total:
        out.copy_(total)


def blocks(numel: int, block_size: int) -> int:
    """How many blocks there are, the shorter last one included."""
    return -(-numel // block_size)


def entries(numel: int, k: int, block_size: int) -> int:
    """How many of the slots of `blocks` blocks are in use; they come first."""
    return numel // block_size * k + min(numel % block_size, k)


def block_index_dtype(block_size: int) -> torch.dtype:
    return torch.uint8 if block_size <= 256 else torch.int16


def exact_index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= 2**31 else torch.int64


def packed_bytes(numel: int, k: int, block_size: int, wire_dtype: torch.dtype) -> int:
    """The length of a buffer of `select_blocks`."""
    slots = blocks(numel, block_size) * k
    used = slots * (wire_dtype.itemsize + block_index_dtype(block_size).itemsize)
    return -(-used // ALIGNMENT) * ALIGNMENT


def packed_views(packed: Tensor, numel: int, k: int, block_size: int, wire_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values and the block-local indices in one buffer of `select_blocks`, unused slots included."""
    slots = blocks(numel, block_size) * k
    dtype = block_index_dtype(block_size)
    split = slots * wire_dtype.itemsize
    return packed[:split].view(wire_dtype), packed[split : split + slots * dtype.itemsize].view(dtype)


def check_gradient(gradient: Tensor, residual: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> None:
    _check_flat("gradient", gradient, dtypes)
    if residual is not None:
        _check_flat("residual", residual, (compute_dtype(gradient.dtype),))
        if residual.shape != gradient.shape or residual.device != gradient.device:
            raise ValueError(
                f"residual has shape {tuple(residual.shape)} on {residual.device}; it must be like the gradient, "
                f"{tuple(gradient.shape)} on {gradient.device}"
            )


def check_out(out: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    _check_flat("out", out, dtypes)


def _check_flat(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    check(name, x, dtypes, 0)
    if x.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be flat")


def check_blocks(k: int, block_size: int, wire_dtype: torch.dtype) -> None:
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size is {block_size}; it must be one of {BLOCK_SIZES}")
    if not 1 <= k <= block_size:
        raise ValueError(f"k is {k}; it must be from 1 to block_size, {block_size}")
    _check_wire_dtype(wire_dtype)


def check_exact(k: int, numel: int, wire_dtype: torch.dtype) -> None:
    if not 1 <= k <= numel:
        raise ValueError(f"k is {k}; it must be from 1 to the number of elements, {numel}")
    _check_wire_dtype(wire_dtype)


def _check_wire_dtype(wire_dtype: torch.dtype) -> None:
    if wire_dtype not in WIRE_DTYPES:
        raise ValueError(f"wire_dtype is {wire_dtype}; it must be one of {WIRE_DTYPES}")


def check_packed(packed: Tensor, numel: int, k: int, block_size: int, wire_dtype: torch.dtype) -> None:
    """`packed`, (bytes,) or (W, bytes), holds buffers of `select_blocks` for `numel` elements."""
    expected = packed_bytes(numel, k, block_size, wire_dtype)
    if packed.dtype != torch.uint8 or packed.shape[-1] != expected or not packed.is_contiguous():
        raise ValueError(
            f"packed buffers have dtype {packed.dtype}, shape {tuple(packed.shape)} and strides {packed.stride()}; "
            f"they must be uint8, contiguous, and {expected} bytes a rank"
        )


def check_sparse(values: Tensor, indices: Tensor) -> None:
    if values.dtype not in WIRE_DTYPES or values.dim() != 2 or not values.is_contiguous():
        raise ValueError(
            f"values have dtype {values.dtype} and shape {tuple(values.shape)}; they must be one of {WIRE_DTYPES}, "
            "(W, k) and contiguous"
        )
    if indices.dtype not in {torch.int32, torch.int64} or indices.shape != values.shape or not indices.is_contiguous():
        raise ValueError(
            f"indices have dtype {indices.dtype} and shape {tuple(indices.shape)}; they must be int32 or int64, "
            f"contiguous, and of the values' shape, {tuple(values.shape)}"
        )

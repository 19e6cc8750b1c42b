from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from commhooks.triton_kernels import reference_topk as topk
from commhooks.triton_kernels.reference import compute_dtype

WIRES = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*WIRES, torch.float64]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3.0, -7e4, 1e38, float("inf"), -float("inf"), float("nan")]


@st.composite
def numbers(draw, numel):
    """A float32 tensor (numel,): normal numbers, few of them distinct, or many of them special."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["normal", "integers", "sparse", "special", "equal", "ascending"]))
    x = torch.randn(numel, generator=generator)
    few = torch.rand(numel, generator=generator) < draw(st.sampled_from([0.01, 0.3]))
    return {
        "normal": x,
        "integers": x.round(),
        "sparse": torch.where(few, x, 0),
        "special": torch.where(
            few, torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (numel,), generator=generator)], x
        ),
        "equal": torch.full((numel,), 3.0),
        "ascending": torch.arange(float(numel)),  # the largest of a block are neighbours
    }[kind]


@st.composite
def problems(draw):
    """gradient, residual or None, wire dtype."""
    numel = draw(st.sampled_from([1, 7, 255, 256, 257, 1000, 1536, 2603]))
    gradient = draw(numbers(numel)).to(draw(st.sampled_from(DTYPES)))
    residual = draw(st.one_of(st.none(), numbers(numel)))
    if residual is not None:
        residual = residual.to(compute_dtype(gradient.dtype))
    return gradient, residual, draw(st.sampled_from(WIRES))


def largest(m, k):
    """Where the k largest magnitudes are, ascending, by sorting: NaN first, of equals the lower index first."""
    m = m.double().numpy()
    nan = np.isnan(m)
    return np.sort(np.lexsort((np.arange(len(m)), -np.abs(np.where(nan, 0, m)), ~nan))[:k])


def same(x, y):
    torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, check_device=False)


def assert_sent(gradient, residual, wire_dtype, select, at):
    """`select` sends the elements at `at` and leaves the rest; returns what it returned after m."""
    m = gradient.to(compute_dtype(gradient.dtype), copy=True)
    if residual is not None:
        m += residual
        kept = residual.clone()
    on_call = gradient.clone()
    rest, *sent = select(on_call, residual)
    values = m[at].to(wire_dtype)
    expected = m.clone()
    expected[at] = torch.where(values.isfinite(), m[at] - values, 0)
    same(rest, expected)
    assert (rest.data_ptr() == on_call.data_ptr()) == (gradient.dtype == m.dtype)
    if residual is not None:
        same(residual, kept)
    return values, sent


@settings(max_examples=200)
@given(problems(), st.sampled_from([256, 512, 1024]), st.data())
def test_select_blocks_is_what_sorting_each_block_gives(problem, block_size, data):
    gradient, residual, wire_dtype = problem
    k = data.draw(st.one_of(st.sampled_from([1, block_size]), st.integers(1, block_size)))
    numel = len(gradient)
    m = gradient.double() if residual is None else gradient.to(residual.dtype) + residual
    starts = range(0, numel, block_size)
    at = torch.from_numpy(np.concatenate([i + largest(m[i : i + block_size], k) for i in starts]))

    def select(x, y):
        with patch.object(topk, "CHUNK", data.draw(st.sampled_from([1024, topk.CHUNK]))):
            return topk.select_blocks(x, y, k, block_size, wire_dtype)

    values, (packed,) = assert_sent(gradient, residual, wire_dtype, select, at)
    sent_values, sent_at = topk.unpack_blocks(packed, numel, k, block_size, wire_dtype)
    same(sent_values, values)
    same(sent_at, at)
    # The layout, byte for byte; what is not used is zero.
    slots = len(starts) * k
    values = torch.cat([values, torch.zeros(slots - len(at), dtype=wire_dtype)])
    indices = torch.cat([at % block_size, torch.zeros(slots - len(at), dtype=torch.int64)])
    indices = indices.to(torch.uint8 if block_size == 256 else torch.int16)
    wire = torch.cat([values.view(torch.uint8), indices.view(torch.uint8)])
    if not values.isnan().any():  # which NaN it is depends on the machine
        same(packed[: len(wire)], wire)
    assert not packed[len(wire) :].any()
    assert len(packed) % 16 == 0
    assert len(packed) - len(wire) < 16


@settings(max_examples=200)
@given(problems(), st.data())
def test_select_exact_is_what_sorting_gives(problem, data):
    gradient, residual, wire_dtype = problem
    k = data.draw(st.integers(1, len(gradient)))
    m = gradient.double() if residual is None else gradient.to(residual.dtype) + residual
    at = torch.from_numpy(largest(m, k))
    values, sent = assert_sent(gradient, residual, wire_dtype, lambda x, y: topk.select_exact(x, y, k, wire_dtype), at)
    same(sent[0], values)
    same(sent[1], at.int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0, 0.001, 0.1, 1])
def test_the_same_in_many_elements(share, dtype):
    """Several chunks of the real length; from all zeros to none, with ties."""
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(2 * topk.CHUNK + 12345, generator=generator).bfloat16().to(dtype)
    m[torch.rand(len(m), generator=generator) >= share] = 0
    _, packed = topk.select_blocks(m.clone(), None, 10, 1024, torch.float32)
    _, at = topk.unpack_blocks(packed, len(m), 10, 1024, torch.float32)
    whole = len(m) // 1024 * 1024
    expected = topk._largest_by_sorting(topk._magnitudes(m[:whole]).view(-1, 1024), 10)
    same(at[: len(expected)], expected)
    same(topk.select_exact(m.clone(), None, 5000, torch.float32)[2], torch.from_numpy(largest(m, 5000)).int())


@settings(max_examples=100)
@given(st.integers(1, 5), st.integers(1, 300), numbers(1500), st.data())
def test_sorting_for_the_gpu_gives_the_same(rows, n, x, data):
    x = x[: rows * n].view(rows, n)
    k = data.draw(st.integers(1, n))
    at = topk._largest_by_sorting(topk._magnitudes(x), k)
    same(at, torch.from_numpy(np.concatenate([i * n + largest(row, k) for i, row in enumerate(x)])))
    same(at, topk._largest(x, k))


def test_nan_are_all_alike():
    """Whatever their bits are: machines differ in them."""
    bits = torch.tensor([0x7F800000, 0x7FC00000, -1, 0x7F800001], dtype=torch.int32)
    assert topk._magnitudes(bits.view(torch.float32)).tolist() == [0x7F800000] + 3 * [0x7F800001]


def add_up(entries, numel, divisor, dtype):
    """The mean of (at, values) of ranks, in numpy."""
    wide = np.float64 if dtype == torch.float64 else np.float32
    total = np.zeros(numel, wide)
    with np.errstate(invalid="ignore"):
        for at, values in entries:
            total[at.numpy()] += values.to(compute_dtype(dtype)).numpy()
        return torch.from_numpy(total / wide(divisor)).to(dtype)


@settings(max_examples=100)
@given(st.data(), st.integers(1, 6), st.sampled_from(DTYPES), st.sampled_from(WIRES), st.sampled_from([1, 2, 3]))
def test_sums(data, ranks, dtype, wire_dtype, divisor):
    numel = data.draw(st.sampled_from([3, 256, 700]))
    k = data.draw(st.integers(1, 3))
    gradients = [data.draw(numbers(numel)).to(dtype) for _ in range(ranks)]
    gathered = torch.stack([topk.select_blocks(x.clone(), None, k, 256, wire_dtype)[1] for x in gradients])
    out = torch.full((numel,), torch.nan, dtype=dtype)
    topk.sum_blocks_(gathered, k, 256, wire_dtype, divisor, out)
    unpacked = [topk.unpack_blocks(x, numel, k, 256, wire_dtype)[::-1] for x in gathered]
    same(out, add_up(unpacked, numel, divisor, dtype))
    values, indices = map(
        torch.stack, zip(*(topk.select_exact(x.clone(), None, k, wire_dtype)[1:] for x in gradients), strict=True)
    )
    out.fill_(torch.nan)
    topk.sum_sparse_(values, indices, divisor, out)
    same(out, add_up(zip(indices, values, strict=True), numel, divisor, dtype))


def test_two_ranks_by_hand():
    a, b = torch.tensor([9.0, 0, 0, 1]), torch.tensor([0, 0, 8.0, 1])
    out = torch.full((4,), torch.nan)
    sent = [topk.select_blocks(x, None, 1, 256, torch.bfloat16)[1] for x in (a, b)]
    topk.sum_blocks_(torch.stack(sent), 1, 256, torch.bfloat16, 2, out)
    assert out.tolist() == [4.5, 0, 4, 0]
    assert a.tolist() == b.tolist() == [0, 0, 0, 1]


def test_no_elements():
    empty = torch.empty(0)
    m, packed = topk.select_blocks(empty, None, 3, 256, torch.bfloat16)
    assert len(m) == len(packed) == 0
    topk.sum_blocks_(torch.stack([packed, packed]), 3, 256, torch.bfloat16, 2, empty)


X = torch.zeros(300)
PACKED = torch.zeros(2, 32, dtype=torch.uint8)
INDICES = torch.zeros(2, 3, dtype=torch.int32)
REFUSED = [
    ("block_size is 300", lambda t: t.select_blocks(X, None, 1, 300, torch.bfloat16)),
    ("block_size is 16384", lambda t: t.select_blocks(X, None, 1, 16384, torch.bfloat16)),
    ("k is 0", lambda t: t.select_blocks(X, None, 0, 256, torch.bfloat16)),
    ("k is 257", lambda t: t.select_blocks(X, None, 257, 256, torch.bfloat16)),
    ("wire_dtype is torch.float64", lambda t: t.select_blocks(X, None, 1, 256, torch.float64)),
    ("gradient is of torch.int64", lambda t: t.select_blocks(X.long(), None, 1, 256, torch.bfloat16)),
    ("gradient has shape", lambda t: t.select_blocks(X.view(3, 100), None, 1, 256, torch.bfloat16)),
    ("gradient has strides", lambda t: t.select_exact(X[::2], None, 1, torch.bfloat16)),
    ("residual is of torch.bfloat16", lambda t: t.select_blocks(X, X.bfloat16(), 1, 256, torch.bfloat16)),
    ("residual has shape", lambda t: t.select_exact(X, X[1:], 1, torch.bfloat16)),
    ("k is 0", lambda t: t.select_exact(X, None, 0, torch.bfloat16)),
    ("k is 301", lambda t: t.select_exact(X, None, 301, torch.bfloat16)),
    ("wire_dtype is torch.int8", lambda t: t.select_exact(X, None, 1, torch.int8)),
    ("packed buffers have dtype torch.int8", lambda t: t.sum_blocks_(PACKED.char(), 1, 256, torch.bfloat16, 1, X)),
    ("they must be uint8, contiguous, and 16", lambda t: t.sum_blocks_(PACKED, 1, 256, torch.bfloat16, 1, X)),
    ("out is of", lambda t: t.sum_blocks_(PACKED[:, :16], 1, 256, torch.bfloat16, 1, X.long())),
    ("values have dtype", lambda t: t.sum_sparse_(INDICES, INDICES, 1, X)),
    ("indices have dtype torch.float32", lambda t: t.sum_sparse_(INDICES.float(), INDICES.float(), 1, X)),
    ("indices have dtype torch.int32 and shape", lambda t: t.sum_sparse_(INDICES[:1].float(), INDICES, 1, X)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_what_is_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call(topk)

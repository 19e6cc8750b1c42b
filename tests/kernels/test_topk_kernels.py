import pytest
import torch
from hypothesis import given, settings, strategies as st

from commhooks.triton_kernels import reference_topk as reference, topk

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of float32: zeros, denormals, halfway cases of bfloat16, what overflows in float16, the largest, infinity, NaN.
PATTERNS = [0, 0, 0, 1, 0x7FFFFF, 0x3F808000, 0x3F818000, 0x477FF000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000]


@st.composite
def numbers(draw, numel):
    """A float32 tensor (numel,): normal numbers, or whole ones with many ties; some are special, of either sign."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(numel, generator=generator)
    if draw(st.booleans()):
        x = x.round()
    special = torch.tensor(PATTERNS, dtype=torch.int32)[torch.randint(len(PATTERNS), (numel,), generator=generator)]
    special = special.view(torch.float32) * torch.randint(2, (numel,), generator=generator).mul(2).sub(1)
    return torch.where(torch.rand(numel, generator=generator) < draw(st.sampled_from([0, 0.02, 0.9])), special, x)


@st.composite
def problems(draw, numels):
    """gradient, residual or None, wire dtype."""
    numel = draw(st.sampled_from(numels))
    gradient = draw(numbers(numel)).to(draw(st.sampled_from(DTYPES)))
    return gradient, draw(st.one_of(st.none(), numbers(numel))), draw(st.sampled_from(DTYPES))


def bits(x):
    """As integers, with all NaN alike: to compare without a tolerance."""
    x = x.cpu()
    if not x.is_floating_point():
        return x
    same = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return same.view(torch.int32 if x.itemsize == 4 else torch.int16)


def same(x, expected):
    torch.testing.assert_close(bits(x), bits(expected), rtol=0, atol=0)


def to(device, *tensors):
    return [None if x is None else x.clone().to(device) for x in tensors]


def assert_selects_alike(device, gradient, residual, *options, select):
    """The kernel does as the reference; returns what the reference returned after m."""
    expected_m, *expected = getattr(reference, select)(gradient.clone(), residual, *options)
    on_device, kept = to(device, gradient, residual)
    m, *sent = getattr(topk, select)(on_device, kept, *options)
    same(m, expected_m)
    assert (m is on_device) == (gradient.dtype == torch.float32)
    if residual is not None:
        same(kept, residual)
    return sent, expected


def assert_packs_alike(device, gradient, residual, k, block_size, wire_dtype):
    (sent,), (expected,) = assert_selects_alike(
        device, gradient, residual, k, block_size, wire_dtype, select="select_blocks"
    )
    layout = len(gradient), k, block_size, wire_dtype
    for x, y in zip(reference.packed_views(sent, *layout), reference.packed_views(expected, *layout), strict=True):
        same(x, y)
    used = reference.blocks(len(gradient), block_size) * k * (wire_dtype.itemsize + 1 + (block_size > 256))
    assert not sent[used:].any()
    assert sent.shape == expected.shape


@settings(max_examples=50, deadline=None)
@given(problems([1, 7, 255, 256, 257, 800]), st.data())
def test_select_blocks_is_the_reference_bit_for_bit(device, problem, data):
    block_size = data.draw(st.sampled_from([256, 512]))
    k = data.draw(st.one_of(st.sampled_from([1, 3, block_size]), st.integers(1, block_size)))
    assert_packs_alike(device, *problem[:2], k, block_size, problem[2])


@pytest.mark.parametrize("k", [1, 82, 5000, 8192])
def test_select_blocks_of_the_largest_size(device, k):
    x = torch.randn(8192 + 4000, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    assert_packs_alike(device, x, x.flip(0), k, 8192, torch.bfloat16)


@pytest.mark.parametrize("value", [0.0, -2.5, float("nan"), float("inf")])
def test_equal_elements_are_sent_from_the_first_on(device, value):
    x = torch.full((2 * topk.PASS_BLOCK + 100,), value)
    assert_packs_alike(device, x[:600], None, 5, 256, torch.float16)
    sent, expected = assert_selects_alike(device, x, None, topk.PASS_BLOCK + 10, torch.bfloat16, select="select_exact")
    same(sent[1], torch.arange(topk.PASS_BLOCK + 10).int())
    same(sent[0], expected[0])


def test_nan_and_infinity_are_never_lost(device):
    """Catches a selection by comparing floats: NaN compares with nothing."""
    for x, expected in (([1, float("nan"), float("inf"), 2], [1]), ([1, -float("inf"), 3e38, 2], [1])):
        (gradient,) = to(device, torch.tensor(x))
        _, _, indices = topk.select_exact(gradient.clone(), None, 1, torch.float32)
        assert indices.tolist() == expected
        _, packed = topk.select_blocks(gradient, None, 1, 256, torch.float32)
        assert packed[4].tolist() == expected[0]


@settings(max_examples=50, deadline=None)
@given(problems([1, 7, 600, topk.PASS_BLOCK, topk.PASS_BLOCK + 3, 2 * topk.PASS_BLOCK + 5]), st.data())
def test_select_exact_is_the_reference_bit_for_bit(device, problem, data):
    gradient, residual, wire_dtype = problem
    k = data.draw(st.one_of(st.just(len(gradient)), st.integers(1, len(gradient))))
    sent, expected = assert_selects_alike(device, gradient, residual, k, wire_dtype, select="select_exact")
    for x, y in zip(sent, expected, strict=True):
        same(x, y)


@st.composite
def sums(draw, numels):
    """The gradients of some ranks, k, wire dtype, divisor, dtype of the sum."""
    numel = draw(st.sampled_from(numels))
    gradients = [draw(numbers(numel)) for _ in range(draw(st.integers(1, 5)))]
    k = draw(st.sampled_from([1, 3, 40, 200]))
    return gradients, k, *(draw(st.sampled_from(x)) for x in (DTYPES, [1, 2, 3, 0.7], DTYPES))


@settings(max_examples=50, deadline=None)
@given(sums([1, 7, 256, 300, 600]), st.sampled_from([256, 512]))
def test_sum_blocks_is_the_reference_bit_for_bit(device, problem, block_size):
    gradients, k, wire_dtype, divisor, dtype = problem
    gathered = torch.stack([reference.select_blocks(x.clone(), None, k, block_size, wire_dtype)[1] for x in gradients])
    expected, out = torch.empty_like(gradients[0], dtype=dtype), torch.empty_like(gradients[0], dtype=dtype)
    reference.sum_blocks_(gathered, k, block_size, wire_dtype, divisor, expected)
    gathered, out = to(device, gathered, out)
    topk.sum_blocks_(gathered, k, block_size, wire_dtype, divisor, out)
    same(out, expected)


@settings(max_examples=50, deadline=None)
@given(sums([1, 7, 600, topk.PASS_BLOCK + 3]), st.sampled_from([torch.int32, torch.int64]))
def test_sum_sparse_is_the_reference_bit_for_bit(device, problem, index_dtype):
    gradients, k, wire_dtype, divisor, dtype = problem
    k = min(k, len(gradients[0]))
    sent = [reference.select_exact(x.clone(), None, k, wire_dtype)[1:] for x in gradients]
    values, indices = map(torch.stack, zip(*sent, strict=True))
    expected, out = torch.empty_like(gradients[0], dtype=dtype), torch.empty_like(gradients[0], dtype=dtype)
    reference.sum_sparse_(values, indices, divisor, expected)
    values, indices, out = to(device, values, indices.to(index_dtype), out)
    topk.sum_sparse_(values, indices, divisor, out)
    same(out, expected)


def test_ranks_are_added_in_order(device):
    """Catches another order, which rounds otherwise: 1 vanishes beside 2^24, unless 2^24 has gone before."""
    values = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]])
    for order, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        gradients, out = to(device, values[order], torch.empty(1))
        topk.sum_sparse_(gradients, torch.zeros_like(gradients, dtype=torch.int32), 1, out)
        assert out.item() == expected
        packed = torch.stack([topk.select_blocks(x.clone(), None, 1, 256, torch.float32)[1] for x in gradients])
        topk.sum_blocks_(packed, 1, 256, torch.float32, 1, out)
        assert out.item() == expected


def test_no_elements(device):
    empty = torch.empty(0, device=device)
    m, packed = topk.select_blocks(empty, None, 3, 256, torch.bfloat16)
    assert len(m) == len(packed) == 0
    topk.sum_blocks_(torch.stack([packed, packed]), 3, 256, torch.bfloat16, 2, empty)
    topk.sum_sparse_(torch.ones(2, 0, device=device), torch.ones(2, 0, device=device, dtype=torch.int32), 2, empty)


BEYOND = 2**31  # elements that are not there, before those that are


class Far:
    """Runs kernels as those programs that come after `BEYOND` elements, without allocating these."""

    def __init__(self, monkeypatch):
        self.interpreter = pytest.importorskip("triton.runtime.interpreter")
        self.monkeypatch = monkeypatch

    def run(self, kernel, programs, block, *arguments, **options):
        """An argument (tensor, n) is the tensor, of which n elements are not there."""
        builder = self.interpreter.interpreter_builder
        shifted = lambda x, y, z: setattr(builder, "grid_idx", (BEYOND // block + x, y, z))  # noqa: E731
        with self.monkeypatch.context() as patched:
            patched.setattr(builder, "set_grid_idx", shifted)
            kernel[(programs,)](*(self.pointer(*x) if isinstance(x, tuple) else x for x in arguments), **options)

    def pointer(self, x, missing):
        pointer = self.interpreter._implicit_cvt(x)
        pointer.handle.data = pointer.handle.data - x.new_tensor(
            missing * x.itemsize, dtype=torch.int64
        ).numpy().astype("uint64")
        return pointer


@pytest.fixture
def far(monkeypatch, device):
    if device != "cpu":
        pytest.skip("the interpreter's program ids are moved")
    return Far(monkeypatch)


def test_selection_beyond_2_31_elements(far):
    """Catches offsets in int32: they wrap, and meet no memory of ours."""
    k, numel = 256, 300
    gradient, residual = torch.randn(numel), torch.randn(numel)
    expected_m, expected_packed = reference.select_blocks(gradient.clone(), residual, k, 256, torch.bfloat16)
    values, indices = reference.packed_views(torch.zeros_like(expected_packed), numel, k, 256, torch.bfloat16)
    m = torch.empty(numel)
    far.run(
        topk._select_blocks, 2, 256, (gradient, BEYOND), (residual, BEYOND), (m, BEYOND), (values, BEYOND),
        (indices, BEYOND), expected_packed, BEYOND + numel, 0, k, HAS_RESIDUAL=True, BLOCK=256, SLOTS=256,
    )  # fmt: skip
    for x, y in zip(
        (values, indices), reference.packed_views(expected_packed, numel, k, 256, torch.bfloat16), strict=True
    ):
        same(x, y)
    same(m, expected_m)


def test_sum_beyond_2_31_elements(far):
    k, numel = 256, 300
    gradient = torch.randn(numel)
    _, packed = reference.select_blocks(gradient.clone(), None, k, 256, torch.float32)
    values, indices = reference.packed_views(packed, numel, k, 256, torch.float32)
    out = torch.empty(numel)
    far.run(
        topk._sum_blocks, 2, 256, (values, BEYOND), (indices, BEYOND), (out, BEYOND), (out, BEYOND), BEYOND + numel, k,
        1, 0, 0, 2.0, BLOCK=256, CHUNK=16, FINISH=True,
    )  # fmt: skip
    same(out, gradient / 2)


def test_exact_selection_and_sum_beyond_2_31_elements(far):
    k, numel, before = 200, topk.PASS_BLOCK + 50, BEYOND // topk.PASS_BLOCK
    gradient = torch.randn(numel)
    expected_m, expected_values, expected_at = reference.select_exact(gradient.clone(), None, k, torch.float32)
    m, digits, pass_ = torch.empty(numel), torch.zeros(4, 256, dtype=torch.int64), (2, topk.PASS_BLOCK)
    far.run(
        topk._count_first_digit, *pass_, (gradient, BEYOND), None, (m, BEYOND), digits, BEYOND + numel,
        HAS_RESIDUAL=False, BLOCK=topk.PASS_BLOCK,
    )  # fmt: skip
    for digit in range(1, 4):
        far.run(topk._count_digit, *pass_, (m, BEYOND), digits, BEYOND + numel, k, DIGIT=digit, BLOCK=topk.PASS_BLOCK)
    counts = torch.empty(2, 2, dtype=torch.int32)
    far.run(topk._count_sent, *pass_, (m, BEYOND), digits, (counts, before), BEYOND + numel, k, BLOCK=topk.PASS_BLOCK)
    values, at = torch.empty(k), torch.empty(k, dtype=torch.int64)
    far.run(
        topk._send, *pass_, (m, BEYOND), digits, (counts, before), (counts.cumsum(1), before), values, at,
        BEYOND + numel, k, BLOCK=topk.PASS_BLOCK,
    )  # fmt: skip
    same(m, expected_m)
    same(values, expected_values)
    same(at, expected_at.long() + BEYOND)
    out = torch.empty(numel)
    far.run(
        topk._sum_sparse, *pass_, values, at, (out, BEYOND), (out, BEYOND), BEYOND + numel, k, 1, 1.0,
        RANKS=1, STEPS=k.bit_length(), BLOCK=topk.PASS_BLOCK, CHUNK=64, FINISH=False,
    )  # fmt: skip
    same(out, gradient - expected_m)


X = torch.zeros(300)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("gradient is of torch.float64", lambda: topk.select_blocks(X.double(), None, 1, 256, torch.bfloat16)),
        ("gradient is of torch.float64", lambda: topk.select_exact(X.double(), None, 1, torch.bfloat16)),
        ("out is of torch.float64", lambda: topk.sum_sparse_(X[None], X[None].int(), 1, X.double())),
        ("block_size is 300", lambda: topk.select_blocks(X, None, 1, 300, torch.bfloat16)),
        ("residual has shape", lambda: topk.select_blocks(X, X[1:], 1, 256, torch.bfloat16)),
        ("k is 301", lambda: topk.select_exact(X, None, 301, torch.bfloat16)),
        ("packed buffers", lambda: topk.sum_blocks_(X[None], 1, 256, torch.bfloat16, 1, X)),
        ("indices have dtype", lambda: topk.sum_sparse_(X[None], X[None], 1, X)),
    ],
)
def test_what_is_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from commhooks.triton_kernels import cast, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Every kind of number: halfway cases of bfloat16, denormals, the largest, infinities and NaNs of any payload.
PATTERNS = [0, 0x3F808000, 0x3F818000, 0x3F807FFF, 1, 0x7FFFFF, 0x7F7FFFFF, 0x7F7F8000, 0x7F800000, 0x7F800001]


@st.composite
def floats(draw, numel):
    """A float32 tensor (numel,): random bits, with special numbers among them, of either sign."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32)
    special = torch.tensor(PATTERNS + [x - 2**31 for x in PATTERNS])[
        torch.randint(2 * len(PATTERNS), (numel,), generator=generator)
    ].to(torch.int32)
    return torch.where(torch.rand(numel, generator=generator) < 0.3, special, bits).view(torch.float32)


@st.composite
def problems(draw):
    """gradient, residual or None, divisor."""
    numel = draw(st.sampled_from([1, 7, 2048, 4200]))
    gradient = draw(floats(numel)).to(draw(st.sampled_from(DTYPES)))
    residual = draw(st.one_of(st.none(), floats(numel)))
    return gradient, residual, draw(st.sampled_from([1.0, 2.0, 3.0, 0.7]))


def bits(x):
    """As integers, with all NaNs alike: to compare without a tolerance."""
    x = x.cpu()
    same = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return same.view(torch.int32 if x.itemsize == 4 else torch.int16)


@settings(max_examples=40)
@given(problems(), st.sampled_from(DTYPES))
def test_to_wire_is_the_reference_bit_for_bit(device, problem, dtype):
    gradient, residual, divisor = problem
    rest, expected_rest = (None if residual is None else torch.empty(len(gradient)) for _ in range(2))
    expected_wire = reference.to_wire(gradient.clone(), residual, divisor, dtype, expected_rest)
    on_device = gradient.clone().to(device)
    before, rest = (None if residual is None else x.to(device) for x in (residual, rest))
    wire = cast.to_wire(on_device, before, divisor, dtype, rest)
    torch.testing.assert_close(bits(wire), bits(expected_wire), rtol=0, atol=0)
    if residual is None:
        assert torch.equal(bits(on_device), bits(gradient))
        return
    torch.testing.assert_close(bits(before), bits(residual), rtol=0, atol=0)  # untouched
    # m - wire x divisor: fused into one rounding or not, and then infinite where wire x divisor is.
    m = gradient.float() + residual
    rest, expected_rest = (torch.where(m.abs() > 1e38, 0, x.cpu()) for x in (rest, expected_rest))
    assert ((rest - expected_rest).abs() <= 2**-23 * m.abs()).logical_or(~expected_rest.isfinite()).all()
    assert torch.equal(rest.isfinite(), expected_rest.isfinite())


@settings(max_examples=40)
@given(problems(), st.sampled_from(DTYPES))
def test_from_wire_is_the_reference_bit_for_bit(device, problem, dtype):
    wire, _, divisor = problem
    out, expected = (torch.empty(len(wire), dtype=dtype) for _ in range(2))
    reference.from_wire_(wire, divisor, expected)
    out = out.to(device)
    cast.from_wire_(wire.to(device), divisor, out)
    torch.testing.assert_close(bits(out), bits(expected), rtol=0, atol=0)


@settings(max_examples=30)
@given(floats(300))
def test_bfloat16_against_numpy(device, x):
    """Independently: the nearer of the two neighbours in float64, and the even one of a tie."""
    x = torch.where(x.isfinite() & (x.abs() < 3e38), x, torch.zeros_like(x))
    wire = cast.to_wire(x.to(device), None, 1.0, torch.bfloat16, None)
    down = (x.view(torch.int32) & ~0xFFFF).numpy()
    low, high = down.view(np.float32).astype(np.float64), (down + 0x10000).view(np.float32).astype(np.float64)
    to_low, to_high = np.abs(x.double().numpy() - low), np.abs(high - x.double().numpy())
    even = (down >> 16) % 2 == 0
    nearest = np.where((to_low < to_high) | ((to_low == to_high) & even), low, high)
    assert np.array_equal(wire.double().cpu().numpy(), nearest)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gradient", (torch.zeros(4, dtype=torch.float64), None, 1.0, torch.bfloat16, None)),
        ("gradient", (torch.zeros(8)[::2], None, 1.0, torch.bfloat16, None)),
        ("residual", (torch.zeros(4), torch.zeros(3), 1.0, torch.bfloat16, torch.zeros(4))),
        ("residual", (torch.zeros(4), torch.zeros(4).half(), 1.0, torch.bfloat16, torch.zeros(4))),
        ("rest", (torch.zeros(4), torch.zeros(4), 1.0, torch.bfloat16, torch.zeros(3))),
        ("residual, rest:", (torch.zeros(4), torch.zeros(4), 1.0, torch.bfloat16, None)),
        ("dtype", (torch.zeros(4), None, 1.0, torch.int8, None)),
    ],
)
def test_what_it_does_not_take_it_names(name, arguments):
    with pytest.raises(ValueError, match=f"^{name} "):
        cast.to_wire(*arguments)

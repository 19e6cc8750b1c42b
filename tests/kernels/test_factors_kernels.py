import pytest
import torch
from hypothesis import given, settings, strategies as st

from commhooks.triton_kernels import factors, reference
from commhooks.triton_kernels.reference import Factor, Side

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("rank", [1, 3, 4, 7, 8, 16, 33, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_orthogonalize(device, rank, dtype):
    """Orthonormal to 1e-4, of the reference's span and signs; rows that depend are lost in both."""
    shapes = [(rank, 70), (min(rank, 3), 3), (rank, rank), (2, 1100)]
    side, offset = [], 0
    for shape in shapes:
        side.append(Factor(offset, *shape))
        offset += shape[0] * shape[1]
    side = Side(tuple(side))
    packed = torch.randn(offset)
    zeroed = side.factors[2].of(packed)
    zeroed[-1] = 0
    side.factors[3].of(packed)[1] = side.factors[3].of(packed)[0] * 2  # exact, whatever it is rounded to
    packed = packed.to(dtype)
    expected, expected_lost = reference.orthogonalize(packed, side, 0.0, torch.float32)
    bases, lost = factors.orthogonalize(packed.to(device), side, 0.0, torch.float32)
    assert lost.dtype == torch.bool
    assert torch.equal(lost.cpu(), expected_lost)
    torch.testing.assert_close(bases.cpu(), expected, rtol=0, atol=1e-5)
    for x, gone in zip(side.of(bases), lost.split(side.ranks), strict=True):
        gram = x.double() @ x.double().t()
        assert (gram - torch.diag((~gone).double())).abs().max() <= 1e-4


@pytest.mark.parametrize("condition", [1e3, 1e5])
@pytest.mark.parametrize("exponent", [-18, 0, 18])
def test_orthogonal_up_to_a_condition_number_of_1e5_at_any_scale(device, condition, exponent):
    rank, n = 8, 200
    u, _ = torch.linalg.qr(torch.randn(rank, rank, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(n, rank, dtype=torch.float64))
    singular = torch.logspace(0, -torch.tensor(condition).log10().item(), rank, dtype=torch.float64)
    x = (u @ torch.diag(singular) @ v.t() * 10.0**exponent).float()
    bases, lost = factors.orthogonalize(x.flatten().to(device), Side((Factor(0, rank, n),)), 0.0, torch.float32)
    assert not lost.any()
    bases = bases.view(rank, n).double()
    assert (bases @ bases.t() - torch.eye(rank, device=device)).abs().max() <= 1e-4


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_orthogonalize_hides_nothing_that_is_not_finite(device, poison):
    x = torch.randn(3, 8, device=device)
    x[1, 2] = poison
    bases, _ = factors.orthogonalize(x.flatten(), Side((Factor(0, 3, 8),)), 0.0, torch.float32)
    assert not bases.view(3, 8)[1:].isfinite().any()


def test_epsilon_is_added_to_the_norms(device):
    x = torch.tensor([3.0, 4.0, 4.0, -3.0, 0.0, 0.0], device=device)
    bases, lost = factors.orthogonalize(x, Side((Factor(0, 3, 2),)), 5.0, torch.float32)
    torch.testing.assert_close(bases.cpu(), torch.tensor([0.3, 0.4, 0.4, -0.3, 0.0, 0.0]))
    assert lost.tolist() == [False, False, True]


@settings(max_examples=30)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), max_size=3),
    special=st.sampled_from([0.0, float("nan"), float("inf"), -float("inf"), 6e-8]),
    vectors=st.integers(0, 40), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_magnitudes_and_largest_are_the_reference_bit_for_bit(device, shapes, special, vectors, dtype, seed):
    side, offset = [], 0
    for shape in shapes:
        side.append(Factor(offset, *shape))
        offset += shape[0] * shape[1]
    side = Side(tuple(side))
    generator = torch.Generator().manual_seed(seed)

    def draw(numel):
        x = torch.randn(numel, generator=generator)
        return torch.where(torch.rand(numel, generator=generator) < 0.1, special, x).to(dtype)

    packed, vectors = draw(offset), draw(vectors)
    expected, expected_worst = reference.magnitudes(packed, side, vectors)
    found, worst = factors.magnitudes(packed.to(device), side, vectors.to(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(worst.cpu(), expected_worst.float(), rtol=0, atol=0, equal_nan=True)
    expected, found = reference.largest(vectors), factors.largest(vectors.to(device))
    torch.testing.assert_close(found.cpu(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_magnitudes_of_more_than_a_chunk(device):
    packed, vectors = torch.zeros(2600, device=device), torch.zeros(2600, device=device)
    packed[2599], vectors[2599] = -3.0, 5.0
    side = Side((Factor(0, 2, 1300),))
    found, worst = factors.magnitudes(packed, side, vectors)
    assert (found.tolist(), worst.item(), factors.largest(vectors).item()) == ([3.0], 5.0, 5.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keep_factor_is_the_reference_bit_for_bit(device, dtype):
    side = Side((Factor(0, 3, 500), Factor(1500, 1, 7), Factor(1507, 2, 3)))
    kept, new, fresh = torch.randn(side.numel), torch.randn(side.numel).to(dtype), torch.randn(side.numel)
    scales, lost = torch.tensor([0.3, 0.0, 2.0]), torch.tensor([False, True, False, True, False, False])
    expected = kept.clone()
    reference.keep_factor_(expected, new, side, scales, lost, fresh)
    found = kept.clone().to(device)
    arguments = (x.to(device) if isinstance(x, torch.Tensor) else x for x in (new, side, scales, lost, fresh))
    factors.keep_factor_(found, *arguments)
    assert torch.equal(found.cpu(), expected)

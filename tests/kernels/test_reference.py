import pytest
import torch
from hypothesis import assume, given, strategies as st

from commhooks.triton_kernels.reference import Factor, Side, keep_factor_, largest, magnitudes, orthogonalize


def packed_as(factors):
    """Where these (rank, length) tensors lie when packed one behind the other."""
    shapes, offset = [], 0
    for x in factors:
        shapes.append(Factor(offset, *x.shape))
        offset += x.numel()
    return Side(tuple(shapes))


def orthonormal(*factors, epsilon=0.0):
    """Each factor's orthonormal rows, and which rows were dependent."""
    side = packed_as(factors)
    bases, lost = orthogonalize(torch.cat([x.flatten() for x in factors]), side, epsilon, torch.float32)
    return side.of(bases), list(lost.split(side.ranks))


def with_condition(rank, n, condition, seed=0):
    """Rows (rank, n) whose singular values go from 1 down to 1 / condition."""
    generator = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(n, rank, generator=generator, dtype=torch.float64))
    s = torch.logspace(0, -torch.tensor(float(condition)).log10().item(), rank, dtype=torch.float64)
    return (u @ torch.diag(s) @ v.t()).float()


@pytest.mark.parametrize("condition", [1, 1e3, 1e5])
@pytest.mark.parametrize("rank", [1, 2, 4, 7, 32])
def test_orthogonal_up_to_a_condition_number_of_1e5(rank, condition):
    x = with_condition(rank, 200, condition)
    before = x.double()
    (x,), (dependent,) = orthonormal(x)
    assert not dependent.any()
    assert (x.double() @ x.double().t() - torch.eye(rank)).abs().max() <= 1e-4
    # and of the same span: the rows before are combinations of the rows after
    rest = before - before @ x.double().t() @ x.double()
    assert rest.norm(dim=1).max() <= 1e-5 * before.norm(dim=1).max()


@given(
    rank=st.integers(1, 6), n=st.integers(1, 12), true_rank=st.integers(0, 6), exponent=st.integers(-20, 20),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_rows_are_orthonormal_or_zero(rank, n, true_rank, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(rank, true_rank, generator=generator), torch.randn(true_rank, n, generator=generator)
    x = left @ right * 10.0**exponent
    # Behind nearly parallel rows nobody can tell dependent ones: their rounding errors have grown too much.
    pivots = torch.linalg.qr(x.double().t() / x.abs().amax(1).clamp_min(1e-30), mode="r").R.diagonal().abs()
    assume(not ((pivots > 1e-6) & (pivots < 1e-2)).any())
    (x,), (dependent,) = orthonormal(x)
    gram = x.double() @ x.double().t()
    assert (gram - torch.diag((~dependent).double())).abs().max() <= 1e-3
    assert not x[dependent].any()
    assert (~dependent).sum() <= min(true_rank, n)


def test_factors_of_several_ranks_and_dependent_ones_together():
    """Catches: results that go to another factor; one dependent factor that spoils the others."""
    factors = [with_condition(2, 9, 10), torch.zeros(3, 5), with_condition(3, 20, 100), torch.ones(2, 4)]
    bases, dependent = orthonormal(*factors)
    assert [x.tolist() for x in dependent] == [[False] * 2, [True] * 3, [False] * 3, [False, True]]
    for x, y in zip(bases, factors, strict=True):
        torch.testing.assert_close(x, orthonormal(y)[0][0])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_rows_are_not_hidden(poison):
    x = with_condition(3, 8, 10)
    x[1, 2] = poison
    (x,), _ = orthonormal(x)
    assert not x[1:].isfinite().any()


def test_epsilon_is_added_to_the_norms():
    x = torch.tensor([[3.0, 4.0], [4.0, -3.0]])
    (x,), _ = orthonormal(x, epsilon=5.0)
    torch.testing.assert_close(x, torch.tensor([[0.3, 0.4], [0.4, -0.3]]))


@given(st.lists(st.floats(width=32), max_size=20))
def test_largest_is_finite_only_if_all_are(values):
    x = torch.tensor(values)
    assert bool(largest(x).isfinite()) == bool(x.isfinite().all())
    if x.isfinite().all():
        assert largest(x) == max(map(abs, values), default=0.0)


def test_magnitudes():
    side = packed_as([torch.empty(1, 2), torch.empty(2, 2)])
    packed = torch.tensor([1.0, -3.0, 0.5, 0.0, 2.0, 1.0, float("nan")])  # what lies behind the factors does not count
    scales, worst = magnitudes(packed, side, torch.tensor([-7.0]))
    assert scales.tolist() == [3.0, 2.0]
    assert worst == 7.0
    assert magnitudes(packed, side, torch.tensor([float("inf")]))[1].isinf()
    assert magnitudes(packed.fill_(float("nan")), side, torch.tensor([1.0]))[1].isnan()


def test_keep_factor_scales_and_refills():
    kept, new = torch.full((6,), 7.0), torch.tensor([2e30, -4e30, 0.0, 0.0, 1.0, 0.5])
    lost, fresh = torch.tensor([False, True, False]), torch.full((6,), 9.0)
    side, scales = packed_as([torch.empty(2, 2), torch.empty(1, 2)]), torch.tensor([4e30, 1.0])
    keep_factor_(kept, new, side, scales, lost, fresh)
    assert kept.tolist() == [0.5, -1.0, 9.0, 9.0, 1.0, 0.5]

import pytest
import torch
from hypothesis import given, settings, strategies as st

from commhooks.triton_kernels import powersgd, reference
from commhooks.triton_kernels.reference import Factor, Factors, Matrix, Plan, Side

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def plan_of(shapes, rank):
    """A plan of these matrices and, of one-dimensional shapes, vectors."""
    matrices, vectors, offset, p, q = [], [], 0, 0, 0
    for shape in shapes:
        if len(shape) == 2:
            n, m = shape
            r = min(rank, n, m)
            matrices.append(Matrix(offset, n, m, r, Factor(p, r, n), Factor(q, r, m)))
            p, q, offset = p + r * n, q + r * m, offset + n * m
        else:
            vectors.append((offset, shape[0]))
            offset += shape[0]
    return Plan(tuple(matrices), tuple(vectors)), offset


# Tiles: rows of 16 or 128, columns of 128, 256 or 1024; chunks of 1024.
lengths = st.sampled_from([1, 3, 16, 17, 100, 130, 257])
shapes = st.lists(st.one_of(st.tuples(lengths, lengths), st.tuples(lengths)), min_size=1, max_size=4)


@st.composite
def problems(draw):
    """plan, bucket, residual or None."""
    plan, numel = plan_of(draw(shapes), draw(st.sampled_from([1, 2, 3, 4, 5, 8, 12])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    bucket = torch.randn(numel, generator=generator).to(draw(st.sampled_from(DTYPES)))
    residual = torch.randn(numel, generator=generator) if draw(st.booleans()) else None
    return plan, bucket, residual, generator


def close(x, y, terms, *, rounded_to=torch.float32):
    """Sums of `terms` products of numbers of about 1, in another order: an ulp of the sum of magnitudes for each; and
    if the wire is rounded, one more rounding that may go the other way.
    """
    if y.numel() == 0:
        return
    tolerance = terms * 2**-22 * 4 + 2 * torch.finfo(rounded_to).eps * y.abs().max().item()
    torch.testing.assert_close(x.float().cpu(), y.float(), rtol=0, atol=tolerance)


def moved(x, device):
    return None if x is None else x.clone().to(device)


@pytest.mark.parametrize("transposed", [False, True])
@settings(max_examples=15)
@given(problems(), st.sampled_from(DTYPES), st.booleans())
def test_projections(device, transposed, problem, wire_dtype, with_vectors):
    plan, bucket, residual, generator = problem
    side, name = (plan.p, "project_t") if transposed else (plan.q, "project")
    options = {"with_vectors": with_vectors} if transposed else {}
    factor = torch.randn(side.numel, generator=generator)
    expected = getattr(reference, name)(bucket.clone(), residual, factor, plan, 3, wire_dtype, **options)
    gradient, kept = moved(bucket, device), moved(residual, device)
    found = getattr(powersgd, name)(gradient, kept, factor.to(device), plan, 3, wire_dtype, **options)
    if not transposed or with_vectors:
        assert torch.equal(found.m.cpu(), expected.m)  # exact: one addition
    else:  # of the vectors, M is not wanted and not there
        for x in plan.matrices:
            assert torch.equal(x.of(found.m).cpu(), x.of(expected.m))
    assert (found.m is gradient) == (bucket.dtype == torch.float32)
    assert residual is None or torch.equal(kept.cpu(), residual)
    terms = max((max(x.rows, x.cols) for x in plan.matrices), default=1)
    assert found.wire.dtype == wire_dtype
    close(found.wire, expected.wire, terms, rounded_to=wire_dtype)
    close(found.sent, expected.sent, terms, rounded_to=wire_dtype)


@pytest.mark.parametrize("shape", [(300, 2100), (2, 65_536)])
def test_projection_of_long_rows_and_columns_adds_all_parts(device, shape):
    """More than one tile along the sum, the last one short, in both directions; against float64."""
    plan, numel = plan_of([shape, (5,)], 2)
    bucket = torch.randn(numel, device=device)
    x = plan.matrices[0]
    for operation, fixed, axis in ((powersgd.project, x.q, 1), (powersgd.project_t, x.p, 0)):
        factor = torch.randn(fixed.numel, device=device)
        options = {"with_vectors": True} if axis == 0 else {}
        sent = operation(bucket, None, factor, plan, 1, torch.float32, **options).sent
        product = torch.tensordot(fixed.of(factor).double(), x.of(bucket).double(), ([1], [axis]))
        made = (x.p if axis == 1 else x.q).of(sent)
        assert (made - product).abs().max() <= max(shape) * 2**-23 * 4
        assert torch.equal(sent[-5:], bucket[-5:])


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
    bases, lost = powersgd.orthogonalize(packed.to(device), side, 0.0, torch.float32)
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
    bases, lost = powersgd.orthogonalize(x.flatten().to(device), Side((Factor(0, rank, n),)), 0.0, torch.float32)
    assert not lost.any()
    bases = bases.view(rank, n).double()
    assert (bases @ bases.t() - torch.eye(rank, device=device)).abs().max() <= 1e-4


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_orthogonalize_hides_nothing_that_is_not_finite(device, poison):
    x = torch.randn(3, 8, device=device)
    x[1, 2] = poison
    bases, _ = powersgd.orthogonalize(x.flatten(), Side((Factor(0, 3, 8),)), 0.0, torch.float32)
    assert not bases.view(3, 8)[1:].isfinite().any()


def test_epsilon_is_added_to_the_norms(device):
    x = torch.tensor([3.0, 4.0, 4.0, -3.0, 0.0, 0.0], device=device)
    bases, lost = powersgd.orthogonalize(x, Side((Factor(0, 3, 2),)), 5.0, torch.float32)
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
    found, worst = powersgd.magnitudes(packed.to(device), side, vectors.to(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(worst.cpu(), expected_worst.float(), rtol=0, atol=0, equal_nan=True)
    expected, found = reference.largest(vectors), powersgd.largest(vectors.to(device))
    torch.testing.assert_close(found.cpu(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_magnitudes_of_more_than_a_chunk(device):
    packed, vectors = torch.zeros(2600, device=device), torch.zeros(2600, device=device)
    packed[2599], vectors[2599] = -3.0, 5.0
    side = Side((Factor(0, 2, 1300),))
    found, worst = powersgd.magnitudes(packed, side, vectors)
    assert (found.tolist(), worst.item(), powersgd.largest(vectors).item()) == ([3.0], 5.0, 5.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keep_factor_is_the_reference_bit_for_bit(device, dtype):
    side = Side((Factor(0, 3, 500), Factor(1500, 1, 7), Factor(1507, 2, 3)))
    kept, new, fresh = torch.randn(side.numel), torch.randn(side.numel).to(dtype), torch.randn(side.numel)
    scales, lost = torch.tensor([0.3, 0.0, 2.0]), torch.tensor([False, True, False, True, False, False])
    expected = kept.clone()
    reference.keep_factor_(expected, new, side, scales, lost, fresh)
    found = kept.clone().to(device)
    arguments = (x.to(device) if isinstance(x, torch.Tensor) else x for x in (new, side, scales, lost, fresh))
    powersgd.keep_factor_(found, *arguments)
    assert torch.equal(found.cpu(), expected)


@settings(max_examples=20)
@given(problems(), st.sampled_from(DTYPES))
def test_reconstruct(device, problem, wire_dtype):
    plan, bucket, residual, generator = problem

    def draw():
        return [torch.randn(n, generator=generator) for n in (plan.p.numel, plan.q.numel, plan.vectors_numel)]

    mean, sent = Factors(*(x.to(wire_dtype) for x in draw())), Factors(*draw())
    m = bucket.float()
    out = m.clone() if bucket.dtype == torch.float32 else torch.empty_like(bucket)
    expected_out, expected = out.clone(), moved(residual, "cpu")
    aliased = expected_out if bucket.dtype == torch.float32 else m.clone()
    reference.reconstruct_(aliased, plan, mean, sent, expected_out, expected)
    out, kept = out.to(device), moved(residual, device)
    m = out if bucket.dtype == torch.float32 else m.to(device)
    mean, sent = (Factors(*(x.to(device) for x in y)) for y in (mean, sent))
    powersgd.reconstruct_(m, plan, mean, sent, out, kept)
    close(out, expected_out, 12, rounded_to=bucket.dtype)
    if residual is not None:
        close(kept, expected, 12)


def test_what_the_launchers_do_not_take_they_name():
    plan, numel = plan_of([(80, 80)], 65)
    with pytest.raises(ValueError, match="rank is 65; the kernels take ranks up to 64"):
        powersgd.project(torch.zeros(numel), None, torch.zeros(plan.q.numel), plan, 1, torch.float32)
    plan, numel = plan_of([(4, 4)], 2)
    with pytest.raises(ValueError, match=r"gradient is of torch\.float64"):
        powersgd.project(torch.zeros(numel).double(), None, torch.zeros(8), plan, 1, torch.float32)
    with pytest.raises(ValueError, match="q has 7 elements; it must have 8"):
        powersgd.project(torch.zeros(numel), None, torch.zeros(7), plan, 1, torch.float32)
    with pytest.raises(ValueError, match=r"dtype is torch\.int8"):
        powersgd.project(torch.zeros(numel), None, torch.zeros(8), plan, 1, torch.int8)

import pytest
import torch
from hypothesis import given, settings, strategies as st

from commhooks.triton_kernels import powersgd, reference
from commhooks.triton_kernels.reference import Factor, Factors, Matrix, Plan

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

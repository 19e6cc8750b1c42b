"""What every hook promises (DESIGN: "What every hook promises"), on simulated ranks."""

import pytest
import torch
from cases import CASES, WITH_FEEDBACK, draw_gradients, dtypes, flatten, named, residual_of, shapes, world_sizes
from hypothesis import given, strategies as st

from commhooks import simulate
from commhooks.ops import compute_dtype

scales = st.integers(-20, 20).map(lambda exponent: 10.0**exponent)
seeds = st.integers(0, 2**31)


def scale_for(case, dtype, scale):
    """fp16, as gradient or on the wire, holds 6e-8 to 65504 only: stay in the middle of it."""
    return min(max(scale, 1e-2), 10.0) if torch.float16 in (case.wire, dtype) else scale


def tolerance(case, dtype, world_size):
    """Of the residual identity, as a fraction of the largest number in it.

    float32 products of at most 31 terms round by 2^-24 each. Where a 16-bit sum is taken rank by rank, no rank can feed
    back its roundings: half a unit in the last place for each of W - 1 additions, and for P and Q both. A 16-bit
    gradient is rounded once more when the mean is written into it. fp16 adds its smallest number, 6e-8.
    """
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-24}
    result = 300 * 2.0**-24 + unit[dtype]
    if case.wire is not None and not case.sums_exactly:
        result += 4 * world_size * unit[case.wire]
    return result + (1e-3 if torch.float16 in (case.wire, dtype) else 0)


@pytest.mark.parametrize("case", **named(CASES))
@given(shapes=shapes, dtype=dtypes, world_size=world_sizes, scale=scales, seed=seeds, data=st.data())
def test_residual_identity_and_identical_ranks(case, shapes, dtype, world_size, scale, seed, data):
    """Catches: lost or doubled residuals, a residual of one parameter met by another, ranks that drift apart."""
    ranks = case.simulation(world_size)
    scale = scale_for(case, dtype, scale)
    names = [f"p{i}" for i in range(len(shapes))]
    for step in range(4):
        gradients = draw_gradients(shapes, world_size, dtype, scale, seed + step)
        cut = data.draw(st.integers(0, len(names)), label="where the bucket is cut")
        buckets = [part for part in (names[cut:], names[:cut]) if part]
        owed = sum(
            flatten(gradient) + residual_of(state, gradient)
            for gradient, state in zip(gradients, ranks.states, strict=True)
        )
        results = ranks.step(gradients, buckets)
        for result in results[1:]:
            assert all(torch.equal(result[name], results[0][name]) for name in names)
        if not case.feedback and case.name != "allreduce":
            continue
        paid = sum(
            flatten({name: result[name] for name in names}) + residual_of(state, gradient)
            for result, state, gradient in zip(results, ranks.states, gradients, strict=True)
        )
        if owed.numel():
            largest = max(float(owed.abs().max()) / world_size, scale)
            worst = float((owed - paid).abs().max()) / world_size
            assert worst <= tolerance(case, dtype, world_size) * largest * 4


@pytest.mark.parametrize("spares_unused", [False, True])
@pytest.mark.parametrize("case", **named(CASES))
def test_the_last_collective_is_called_so(case, spares_unused, monkeypatch):
    """Catches: another one after it, which ranks would launch in different orders; or a wait that backward pays for."""
    lasts, perform_them = [], simulate.perform

    def perform(collectives):
        lasts.append([x.last for x in collectives])
        return perform_them(collectives)

    monkeypatch.setattr(simulate, "perform", perform)
    for kinds in ([(8, 8), (3,)], [(3,)]):  # the other without anything to compress
        ranks = case.simulation(3)
        for state in ranks.states:
            state.spares_unused = spares_unused
        for step in range(4):
            lasts.clear()
            ranks.step(draw_gradients(kinds, 3, torch.float32, 1.0, step))
            assert lasts == [[False] * 3] * (len(lasts) - 1) + [[True] * 3]


@pytest.mark.parametrize("case", **named(CASES))
@given(shapes=shapes, dtype=dtypes, world_size=world_sizes)
def test_zero_in_zero_out(case, shapes, dtype, world_size):
    """Catches: 0 / 0 in orthogonalization and normalization, and random columns that leak into a result."""
    ranks = case.simulation(world_size)
    for _ in range(2):
        gradients = draw_gradients(shapes, world_size, dtype, 0.0, 0)
        for result, state in zip(ranks.step(gradients), ranks.states, strict=True):
            assert all(x.dtype == dtype and not x.any() for x in result.values())
            assert not residual_of(state, gradients[0]).any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", ["matrix", "vector"])
@pytest.mark.parametrize("case", **named(CASES))
def test_non_finite_reaches_all_ranks_and_is_gone_in_the_next_step(case, poison, dtype, place):
    """Catches: a NaN that a comparison swallows; a residual or warm start that keeps it; a rank that updates alone."""
    ranks = case.simulation(3)
    shapes = [(6, 5), (4,)]
    for step in range(3):
        ranks.step(draw_gradients(shapes, 3, dtype, 1.0, seed=10 + step))
    before = [residual_of(state, {"p0": torch.empty(30), "p1": torch.empty(4)}) for state in ranks.states]

    gradients = draw_gradients(shapes, 3, dtype, 1.0, seed=2)
    gradients[1]["p0" if place == "matrix" else "p1"].flatten()[2] = poison
    for result in ranks.step(gradients):
        assert not flatten(result).isfinite().all()
    for state, old, gradient in zip(ranks.states, before, gradients, strict=True):
        assert torch.equal(residual_of(state, gradient), old)

    for result in ranks.step(draw_gradients(shapes, 3, dtype, 1.0, seed=3)):
        assert flatten(result).isfinite().all()


@pytest.mark.parametrize("case", **named(WITH_FEEDBACK))
def test_residual_dtype_is_the_compute_dtype(case):
    """Catches: residuals of half-precision gradients kept in half precision, where small errors vanish."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        ranks = case.simulation(2)
        ranks.step(draw_gradients([(5, 4), (3,)], 2, dtype, 1.0, 0))
        assert {x.dtype for x in ranks.states[0].feedback.residuals.values()} == {compute_dtype(dtype)}


@pytest.mark.parametrize("case", **named(WITH_FEEDBACK))
def test_what_is_held_back_comes_later(case):
    """The sum of the results follows the sum of a constant gradient: nothing is lost for ever, as without feedback."""
    ranks = case.simulation(2)
    gradients = draw_gradients([(12, 9), (7,)], 2, torch.float32, 1.0, seed=5)
    steps = 60
    total = sum(flatten(ranks.step(gradients)[0]) for _ in range(steps))
    exact = sum(flatten(gradient) for gradient in gradients) / 2 * steps
    assert (total - exact).norm() <= max(0.15, 1 / case.share / steps) * exact.norm()

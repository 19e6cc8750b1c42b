import pytest
import torch
from cases import draw_gradients, flatten, powersgd_case, residual_of
from hypothesis import given, strategies as st

from commhooks import PowerSGDState
from commhooks.algorithms.powersgd import powersgd
from commhooks.bucket import Bucket, lay_out
from commhooks.comm import AllReduce, Comm
from commhooks.simulate import Simulation

seeds = st.integers(0, 2**31)
VARIANTS = {"standard": {}, "alternating": {"alternating": True}}


def simulation(world_size=1, rank=4, **options):
    return powersgd_case("", rank, **options).simulation(world_size)


def low_rank(n, m, rank, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, rank, generator=generator) @ torch.randn(rank, m, generator=generator)).to(dtype)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@given(n=st.integers(1, 40), m=st.integers(1, 40), rank=st.integers(1, 8), world_size=st.integers(1, 5), seed=seeds)
def test_the_error_is_never_longer_than_the_gradient(options, n, m, rank, world_size, seed):
    """A residual is M - M Q Q^T or M - P P^T M with orthonormal columns: a projection of M, on every rank."""
    ranks = simulation(world_size, rank, **options)
    for step in range(4):
        gradients = draw_gradients([(n, m)], world_size, torch.float32, 1.0, seed + step)
        before = [flatten(g) + residual_of(s, g) for g, s in zip(gradients, ranks.states, strict=True)]
        ranks.step(gradients)
        for m_before, state, gradient in zip(before, ranks.states, gradients, strict=True):
            assert residual_of(state, gradient).norm() <= m_before.norm() * (1 + 1e-4)


@given(n=st.integers(1, 30), m=st.integers(1, 30), rank=st.integers(1, 6), true_rank=st.integers(0, 6), seed=seeds)
def test_low_rank_gradients_come_back_exactly(n, m, rank, true_rank, seed):
    """P spans M's columns as soon as r is at least M's rank."""
    gradient = low_rank(n, m, min(true_rank, rank), seed=seed)
    result = simulation(rank=rank).step([{"p": gradient}])[0]["p"]
    # A random Q may lie nearly at right angles to a direction of M, which P then holds less exactly than 2^-24.
    assert (result - gradient).norm() <= 1e-3 * gradient.norm()


def test_low_rank_gradients_come_back_exactly_when_alternating():
    """As long as their columns and rows span the same spaces."""
    ranks = simulation(rank=4, alternating=True)
    gradient = low_rank(30, 20, 3)
    for step in range(6):
        result = ranks.step([{"p": gradient * (step + 1)}])[0]["p"]
        torch.testing.assert_close(result, gradient * (step + 1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_warm_start_converges_to_the_best_approximation(options):
    """Subspace iteration on a fixed matrix (Eckart-Young: no rank-r matrix is closer than the truncated SVD)."""
    u, _ = torch.linalg.qr(torch.randn(40, 25, generator=torch.Generator().manual_seed(1)))
    v, _ = torch.linalg.qr(torch.randn(25, 25, generator=torch.Generator().manual_seed(2)))
    singular_values = 0.8 ** torch.arange(25)
    gradient = u @ torch.diag(singular_values) @ v.t()
    ranks = simulation(rank=4, use_error_feedback=False, **options)
    errors = [(ranks.step([{"p": gradient}])[0]["p"] - gradient).norm() for _ in range(60)]
    best = singular_values[4:].norm()
    assert errors[0] > 1.05 * best  # a random start is not there yet
    assert errors[-1] <= 1.001 * best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("rank", [2, 4])
def test_rank_deficient_gradients_are_finite(rank, options, dtype):
    ranks = simulation(2, rank, **options)
    for step in range(4):
        gradient = low_rank(12, 10, 1, dtype, seed=step)
        for result in ranks.step([{"p": gradient}, {"p": gradient}]):
            assert result["p"].isfinite().all()


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("meanwhile", [0, 1])
def test_a_lost_column_comes_back(options, meanwhile):
    """After gradients of rank 0 or 1, gradients of rank 3 are exact again: no column stays zero for ever."""
    ranks = simulation(rank=3, use_error_feedback=False, **options)
    for step in range(6):
        ranks.step([{"p": low_rank(20, 15, meanwhile, seed=step)}])
    gradient = low_rank(20, 15, 3, seed=9)
    for _ in range(4):
        result = ranks.step([{"p": gradient}])[0]["p"]
    assert (result - gradient).norm() <= 1e-3 * gradient.norm()


def test_residuals_of_different_ranks_do_not_grow():
    """Ranks whose gradients differ for ever: M less the mean would pile up the difference, some 200 here."""
    ranks = simulation(2, rank=2)
    one, other = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(3))
    for _ in range(200):
        ranks.step([{"p": one}, {"p": other}])
    assert all(residual_of(state, {"p": one}).norm() < 20 * one.norm() for state in ranks.states)


def test_results_do_not_depend_on_the_buckets():
    """Catches: factors or residuals that stay with a bucket when its parameters move to another."""
    shapes = [(12, 10), (5,), (9, 14), (3, 4, 5)]
    names = ["p0", "p1", "p2", "p3"]
    splits = [[names], [["p3", "p0"], ["p2", "p1"]], [["p1"], ["p2"], ["p0", "p3"]], [names[::-1]]]
    for options in VARIANTS.values():
        whole, cut = simulation(2, **options), simulation(2, **options)
        for step, split in enumerate(splits):
            gradients = draw_gradients(shapes, 2, torch.float32, 1.0, step)
            one, other = whole.step(gradients)[0], cut.step(gradients, split)[0]
            for name in names:
                torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("options", "step"), [({}, 0), ({}, 2), *[({"alternating": True}, step) for step in range(4)]])
def test_collectives_and_bytes_of_a_bucket(options, step):
    """P and Q of all matrices, and the vectors, in as few collectives as the algorithm allows."""
    state = PowerSGDState(None, 2, 0, **options)
    state.step = step
    shapes = [(30, 20), (7,), (16, 40), (2, 3)]
    layout = lay_out(0, [(f"p{i}", f"p{i}", shape) for i, shape in enumerate(shapes)])
    bucket = Bucket(layout, torch.randn(sum(x.numel for x in layout.slices)), is_last=True)
    coroutine = powersgd(state, bucket, Comm(0, 2))
    sent, answer = [], None
    try:
        while True:
            request = coroutine.send(answer)
            assert isinstance(request, AllReduce)
            sent.append(request.tensor.numel())
            answer = request.tensor
    except StopIteration:
        pass
    p, q, vectors = 2 * (30 + 16), 2 * (20 + 40), 7 + 6
    if options and step >= 2:
        assert sent == ([p + vectors] if step == 2 else [q + vectors])
    else:
        assert sent == [p + vectors, q]


def test_warm_up_is_exact_and_leaves_no_residual():
    ranks = Simulation(powersgd, lambda: PowerSGDState(None, 1, start_powerSGD_iter=2), 2)
    for step in range(3):
        gradients = draw_gradients([(20, 20)], 2, torch.float32, 1.0, step)
        result = ranks.step(gradients)[0]["p0"]
        exact = torch.equal(result, (gradients[0]["p0"] / 2) + (gradients[1]["p0"] / 2))
        assert exact == (step < 2)


def test_compression_criterion_is_torchs():
    """(n + m) r min_compression_rate < n m, for the parameter as (shape[0], rest)."""
    state = PowerSGDState(None, 4, 0)
    for shape in [(16, 16), (17, 17), (16, 17), (64, 3, 3, 3), (8, 1000), (1000,), (9, 64)]:
        n, m = shape[0], torch.Size(shape[1:]).numel()
        assert (state.rank_of(shape) > 0) == (len(shape) > 1 and (n + m) * 4 * 2 < n * m)


def test_cold_start_draws_anew_and_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    ranks = simulation(rank=1, warm_start=False, use_error_feedback=False)
    gradient = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    first, second = (ranks.step([{"p": gradient}])[0]["p"] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"matrix_approximation_rank": 0}, "matrix_approximation_rank"),
        ({"matrix_approximation_rank": 1.5}, "matrix_approximation_rank"),
        ({"start_powerSGD_iter": -1}, "start_powerSGD_iter"),
        ({"min_compression_rate": 0}, "min_compression_rate"),
        ({"min_compression_rate": float("nan")}, "min_compression_rate"),
        ({"orthogonalization_epsilon": -1.0}, "orthogonalization_epsilon"),
        ({"wire_dtype": torch.float64}, "wire_dtype"),
        ({"wire_dtype": torch.int8}, "wire_dtype"),
        ({"random_seed": -1}, "random_seed"),
        ({"executor": "threads"}, "executor"),
        ({"compression_stats_logging_frequency": -1}, "compression_stats_logging_frequency"),
        ({"alternating": True, "warm_start": False}, "warm_start"),
        ({"process_group": "world"}, "process_group"),
    ],
)
def test_bad_options_are_named(options, name):
    with pytest.raises((ValueError, TypeError), match=name):
        PowerSGDState(**options)

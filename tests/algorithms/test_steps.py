"""Steps that count or do not, checkpoints, other numbers of ranks, other loss scales: on simulated ranks."""

import copy
import io

import pytest
import torch
from cases import CASES, WITH_FEEDBACK, draw_gradients, flatten, named, residual_of

from commhooks import CastState, PowerSGDState, TopKState, reshard
from commhooks.algorithms.cast import bf16
from commhooks.algorithms.powersgd import powersgd
from commhooks.algorithms.topk import topk
from commhooks.bucket import Bucket
from commhooks.simulate import Simulation

# Sides are multiples of 16, so that every parameter and factor begins at 64 bytes in any bucket: how the CPU's matrix
# products round depends on the alignment.
SHAPES = [(32, 16), (16,), (48, 32), (16, 4, 4)]
BUCKETS = [["p3", "p2"], ["p1", "p0"]]
# What is selected or who owns which part depends on the buckets.
OF_BUCKETS = {"topk exact", "topk exact leader", "bf16 fp32 sum EF", "fp16 fp32 sum EF"}
OF_BUCKETS |= {"topk", "topk balanced", "topk warm-up"}  # of more than two ranks: balanced


def gradients(step, world_size=3, dtype=torch.float32, scale=1.0):
    return draw_gradients(SHAPES, world_size, dtype, scale, seed=step)


def is_equal(results, others):
    return all(torch.equal(x[name], y[name]) for x, y in zip(results, others, strict=True) for name in x)


@pytest.mark.parametrize("bucket", [0, 1])
@pytest.mark.parametrize("start_iter", [0, 2])
@pytest.mark.parametrize("case", **named(CASES))
def test_a_step_that_is_not_finite_has_not_been(case, bucket, start_iter):
    """Catches: a bucket that keeps what it learned although another one of the step had the NaN; a step counted."""
    ranks, undisturbed = case.simulation(3), case.simulation(3)
    for state in ranks.states + undisturbed.states:
        state.start_iter = start_iter
    for step in range(6):
        if step in (1, 4):
            bad = gradients(100)
            bad[1][BUCKETS[bucket][0]].view(-1)[0] = float("nan")
            for result in ranks.step(bad, BUCKETS):
                assert not flatten({name: result[name] for name in BUCKETS[bucket]}).isfinite().all()
            if ranks.states[0].own:
                assert [state.step for state in ranks.states] == [step] * 3
        expected = undisturbed.step(gradients(step), BUCKETS)
        assert is_equal(ranks.step(gradients(step), BUCKETS), expected)


@pytest.mark.parametrize("other_buckets", [False, True])
@pytest.mark.parametrize("case", **named(CASES))
def test_resumed_is_as_if_never_stopped(case, other_buckets):
    """Catches: what is missing in a state dict, or comes back at another parameter."""
    if other_buckets and case.name in OF_BUCKETS:
        pytest.skip("depends on the buckets, as documented")
    straight = case.simulation(3)
    for step in range(5):
        straight.step(gradients(step), BUCKETS)
    saved = [through_a_file(state.state_dict()) for state in straight.states]
    resumed = case.simulation(3)
    for state, part in zip(resumed.states, saved, strict=True):
        state.load_state_dict(part)
    buckets = [["p0"], ["p1", "p2", "p3"]] if other_buckets else BUCKETS
    for step in range(5, 9):
        expected = straight.step(gradients(step), BUCKETS)
        assert is_equal(resumed.step(gradients(step), buckets), expected)
    assert [state.metrics() for state in resumed.states] == [
        state.metrics() for state in straight.states
    ] or other_buckets


def through_a_file(state_dict):
    """As `torch.save`, and `torch.load` with its defaults."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def test_a_state_dict_is_a_copy():
    ranks = Simulation(bf16, lambda: CastState(use_error_feedback=True), 1)
    ranks.step(gradients(0, 1))
    saved = ranks.states[0].state_dict()
    before = copy.deepcopy(saved)
    ranks.step(gradients(1, 1))
    assert all(torch.equal(x, saved["rank0"]["residual"][name]) for name, x in before["rank0"]["residual"].items())


@pytest.mark.parametrize("new_world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("case", **named(WITH_FEEDBACK))
def test_other_numbers_of_ranks_owe_the_same(case, new_world_size):
    ranks = case.simulation(3)
    for step in range(4):
        ranks.step(gradients(step))
    like = gradients(0)[0]
    owed = sum(residual_of(state, like) for state in ranks.states) / 3
    parts = reshard([state.state_dict() for state in reversed(ranks.states)], new_world_size)
    others = case.simulation(new_world_size)
    for state, part in zip(others.states, parts, strict=True):
        state.load_state_dict(part)
    others._attach(like)
    loaded = [flatten(state.state_dict()[f"rank{rank}"]["residual"]) for rank, state in enumerate(others.states)]
    assert owed.norm() > 0
    assert (sum(loaded) / new_world_size - owed).norm() <= 1e-6 * owed.norm()
    results = others.step(gradients(9, new_world_size))
    assert [state.step for state in others.states] == [5] * new_world_size
    assert flatten(results[0]).isfinite().all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda parts: parts[:2], r"of ranks \[0, 1\]; they must be of all 3"),
        (lambda parts: [parts[0], parts[0], parts[2]], "each once"),
        (lambda parts: [parts[0] | {"step": 9}, *parts[1:]], "step is 9 and 1"),
        (lambda _: [], "state_dicts is empty"),
        (lambda parts: [{"model": 1}, *parts[1:]], "no state dict"),
    ],
)
def test_what_cannot_be_resharded_is_refused(changed, message):
    ranks = Simulation(powersgd, lambda: PowerSGDState(None, 2, 0), 3)
    ranks.step(gradients(0))
    with pytest.raises(ValueError, match=message):
        reshard(changed([state.state_dict() for state in ranks.states]), 2)


def test_new_world_size_is_checked():
    with pytest.raises(ValueError, match="new_world_size is 0"):
        reshard([], 0)


@pytest.mark.parametrize(
    ("make", "shapes", "world_size", "message"),
    [
        (lambda: PowerSGDState(None, 3, 0), SHAPES, 2, "matrix_approximation_rank: 2 in it, 3 here"),
        (TopKState, SHAPES, 2, "state: PowerSGDState in it, TopKState here"),
        (lambda: PowerSGDState(None, 2, 0), SHAPES[:3], 2, r"p3: shape \(16, 4, 4\).* in it, nothing here"),
        (
            lambda: PowerSGDState(None, 2, 0),
            [(32, 15), *SHAPES[1:]],
            2,
            r"p0: shape \(32, 16\).* in it, shape \(32, 15\)",
        ),
        (lambda: PowerSGDState(None, 2, 0), SHAPES, 3, "world_size is 2 in it and 3 here: see commhooks.reshard"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused(make, shapes, world_size, message):
    saved_from = Simulation(powersgd, lambda: PowerSGDState(None, 2, 0), 2)
    saved_from.step(gradients(0, 2))
    saved = saved_from.states[0].state_dict()
    ranks = Simulation(topk if isinstance(make(), TopKState) else powersgd, make, world_size)
    ranks._attach(draw_gradients(shapes, 1, torch.float32, 1.0, 0)[0])
    with pytest.raises(ValueError, match=message):
        ranks.states[0].load_state_dict(saved)


def test_another_ranks_part_is_refused():
    ranks = Simulation(powersgd, lambda: PowerSGDState(None, 2, 0), 2)
    ranks.step(gradients(0, 2))
    with pytest.raises(ValueError, match="it is of rank1; this is rank 0"):
        ranks.states[0].load_state_dict(ranks.states[1].state_dict())


def test_a_state_dict_before_the_model_is_known_is_refused():
    with pytest.raises(RuntimeError, match="does not know its model"):
        CastState().state_dict()


@pytest.mark.parametrize("case", **named(WITH_FEEDBACK))
def test_residuals_follow_the_loss_scale(case):
    """Catches: residuals of one loss scale that meet gradients of another."""
    scales = [1.0, 2.0**10, 2.0**10, 2.0**5, 4.0, 1.0]
    if torch.float16 == case.wire:
        scales = [1.0, 2.0, 2.0, 4.0, 0.5, 1.0]  # within what the wire holds
    ranks, plain = case.simulation(2), case.simulation(2)
    now = {}
    for state in ranks.states:
        state.grad_scaler = lambda: now["scale"]
    for step, scale in enumerate(scales):
        now["scale"] = scale
        result = flatten(ranks.step(gradients(step, 2, scale=scale))[0]) / scale
        expected = flatten(plain.step(gradients(step, 2))[0])
        assert (result - expected).norm() <= 1e-3 * expected.norm()
    like = gradients(0)[0]
    saved = flatten(ranks.states[0].state_dict()["rank0"]["residual"])
    expected = flatten(plain.states[0].state_dict()["rank0"]["residual"])
    assert (saved - expected).norm() <= 1e-2 * expected.norm()
    assert like


@pytest.mark.parametrize("case", **named(CASES))
def test_parameters_may_change_buckets_on_the_way(case):
    """Catches: riders whose residual or velocity waits in vain in a bucket without matrices."""
    if case.name in OF_BUCKETS:
        pytest.skip("depends on the buckets, as documented")
    one = case.simulation(3)
    for step in range(4):
        apart = [["p3", "p2", "p0"], ["p1"]] if step % 2 else [["p3", "p2", "p1", "p0"]]
        one.step(gradients(step), apart)
    like = gradients(0)[0]
    owed = sum(flatten(x) + residual_of(state, x) for x, state in zip(gradients(9), one.states, strict=True))
    results = one.step(gradients(9), [["p3", "p2", "p0"], ["p1"]])
    paid = sum(
        flatten({n: x[n] for n in like}) + residual_of(s, like) for x, s in zip(results, one.states, strict=True)
    )
    if case.feedback:
        assert (owed - paid).abs().max() <= 0.05 * owed.abs().max()


def test_momentum_of_a_rider_does_not_depend_on_its_bucket():
    for buckets in ([["w", "b"]], [["w"], ["b"]]):
        ranks = Simulation(topk, lambda: TopKState(k=1, momentum=0.5), 1)
        for _ in range(3):
            result = ranks.step([{"w": torch.ones(4, 4), "b": torch.ones(3)}], buckets)[0]
        assert result["b"].tolist() == [1.75] * 3


def test_a_loss_scale_reaches_residuals_of_parameters_that_wait_for_their_new_bucket():
    ranks = Simulation(bf16, lambda: CastState(use_error_feedback=True), 1)
    ranks.step(gradients(0, 1), BUCKETS)
    before = residual_of(ranks.states[0], gradients(0, 1)[0])
    (state,) = ranks.states
    state.begin_step(torch.device("cpu"))
    layout = ranks._layout(0, ["p3"], gradients(0, 1)[0])
    state.feedback.flat(Bucket(layout, torch.zeros(256), is_last=False))  # and backward dies
    state.rescale(4)
    assert torch.equal(residual_of(state, gradients(0, 1)[0]), before * 4)


@pytest.mark.parametrize("case", **named(WITH_FEEDBACK))
def test_a_half_precision_result_that_overflows_is_a_step_that_has_not_been(case):
    ranks = case.simulation(1)
    ranks.step(gradients(0, 1, torch.float16))
    for state in ranks.states:
        state.rescale(0)
    large = [{name: torch.full_like(x, 65504.0) for name, x in gradients(0, 1, torch.float16)[0].items()}]
    for state in ranks.states:
        for piece in state.feedback.pieces.values():
            piece.fill_(3e4)
    before = residual_of(ranks.states[0], large[0])
    result = flatten(ranks.step(large)[0])
    if not result.isfinite().all():
        assert ranks.states[0].step == 1
        assert torch.equal(residual_of(ranks.states[0], large[0]), before)
    else:
        assert ranks.states[0].step == 2


def test_momentum_of_half_precision_gradients_may_pass_what_they_hold():
    ranks = Simulation(topk, lambda: TopKState(k=1, momentum=0.9, wire_dtype=torch.float32), 1)
    gradient = torch.zeros(4, 4, dtype=torch.float16)
    gradient[0, 0], gradient[1, 1] = 9000, 8000  # the one that waits gathers 8000 x 10
    for _ in range(12):
        ranks.step([{"w": gradient}])
    assert ranks.states[0].step > 6


def test_a_loss_scale_that_is_none_is_refused():
    ranks = Simulation(bf16, lambda: CastState(use_error_feedback=True, grad_scaler=lambda: 0.0), 1)
    with pytest.raises(ValueError, match=r"grad_scaler returned 0\.0"):
        ranks.step(gradients(0, 1))


def test_the_tracked_error_is_not_of_a_void_step():
    ranks = Simulation(powersgd, lambda: PowerSGDState(None, 2, 0, track_error=True), 1)
    ranks.step(gradients(0, 1))
    before = ranks.states[0].compression_error()
    bad = gradients(1, 1)
    bad[0]["p0"][0, 0] = float("nan")
    ranks.step(bad)
    assert ranks.states[0].compression_error() == before


def test_a_refused_state_dict_is_forgotten():
    ranks = Simulation(powersgd, lambda: PowerSGDState(None, 2, 0), 2)
    ranks.step(gradients(0, 2))
    (state, other) = ranks.states
    with pytest.raises(ValueError, match="of rank1"):
        state.load_state_dict(other.state_dict())
    assert not state.is_loading


def test_rescale_keeps_the_update_that_is_owed():
    ranks = Simulation(topk, lambda: TopKState(k=1, momentum=0.5), 2)
    ranks.step(gradients(0, 2))
    before = residual_of(ranks.states[0], gradients(0)[0])
    velocity = ranks.states[0].own["velocity"].pieces["p0"].clone()
    ranks.states[0].rescale(0.25)
    assert torch.equal(residual_of(ranks.states[0], gradients(0)[0]), before * 0.25)
    assert torch.equal(ranks.states[0].own["velocity"].pieces["p0"], velocity * 0.25)
    with pytest.raises(ValueError, match="factor is -1"):
        ranks.states[0].rescale(-1)


@pytest.mark.parametrize("case", **named(WITH_FEEDBACK))
def test_the_tracked_error_is_the_residual_over_what_there_was_to_send(case):
    ranks = case.simulation(1)
    ranks.states[0].track_error = True
    owed = {}
    for step in range(4):  # one of the two buckets a step
        for name, x in gradients(step, 1)[0].items():
            residual = ranks.states[0].feedback.residuals.get(name, torch.zeros(x.numel()))
            owed[name] = (x.flatten() + residual).norm()
        ranks.step(gradients(step, 1), BUCKETS)
        errors = ranks.states[0].compression_error()
        for name in BUCKETS[step % 2]:
            expected = ranks.states[0].feedback.residuals[name].norm() / owed[name]
            assert errors[name] == pytest.approx(float(expected), rel=1e-5, abs=1e-9)
    assert set(errors) == {"p0", "p1", "p2", "p3"}
    assert 0 <= ranks.states[0].metrics()["compression_error"] <= 1

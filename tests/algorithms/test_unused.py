"""Parameters that no rank has used in a step, on simulated ranks."""

from dataclasses import replace
from math import isfinite

import pytest
import torch
from cases import CASES, draw_gradients, flatten, named, residual_of, topk_case

SHAPES = [(32, 16), (16,), (48, 32), (16, 4, 4)]
BUCKETS = [["p3", "p2"], ["p1", "p0"]]
# With momentum, what is owed is not what comes of it.
MOMENTUM = replace(topk_case("topk momentum", density=0.2, momentum=0.9), feedback=False)
UNUSED = {2: ["p2"], 3: ["p0", "p1"], 5: ["p2"]}  # by step; p0 and p1 are a whole bucket


def remembered(state, name):
    return [memory.pieces[name].clone() for memory in (state.own | state.common).values()]


@pytest.mark.parametrize("case", **named([*CASES, MOMENTUM]))
def test_what_an_unused_parameter_is_owed_waits(case):
    """Catches: a residual sent into a result that DDP throws away; factors and velocities renewed by zeros."""
    ranks = case.simulation(3)
    for state in ranks.states:
        state.spares_unused = True
    for step in range(7):
        unused = UNUSED.get(step, [])
        gradients = draw_gradients(SHAPES, 3, torch.float32, 1.0, seed=step)
        for gradient in gradients:
            for name in unused:
                gradient[name].zero_()
        before = [[remembered(state, name) for name in unused] for state in ranks.states]
        owed = sum(flatten(x) + residual_of(state, x) for x, state in zip(gradients, ranks.states, strict=True))
        results = ranks.step(gradients, BUCKETS)
        for state, result, memories in zip(ranks.states, results, before, strict=True):
            assert state.step == step + 1
            for name, memory in zip(unused, memories, strict=True):
                assert not result[name].any()
                for old, new in zip(memory, remembered(state, name), strict=True):
                    assert torch.equal(old, new)
            for name in set(result) - set(unused):
                assert result[name].any() or case.share < 1  # else it may have to wait
        if case.feedback:
            paid = sum(
                flatten({name: result[name] for name in x}) + residual_of(state, x)
                for result, state, x in zip(results, ranks.states, gradients, strict=True)
            )
            torch.testing.assert_close(paid, owed, rtol=0, atol=0.2)  # a 16-bit wire's roundings


@pytest.mark.parametrize("value", [1e-30, float("inf"), float("nan")])
@pytest.mark.parametrize("case", **named(CASES))
def test_used_by_one_rank_is_used(case, value):
    """Catches: a parameter that is taken for unused because its numbers are small, or swallowed with a NaN."""
    if value == 1e-30 and case.wire == torch.float16:
        value = 1e-6  # fp16 holds no number as small
    ranks = case.simulation(3)
    for state in ranks.states:
        state.spares_unused = True
    gradients = draw_gradients([(16,), (4, 4)], 3, torch.float32, 0.0, 0)
    gradients[1]["p0"].fill_(value)
    for result in ranks.step(gradients):
        assert result["p0"].any()
        assert result["p0"].isfinite().all() == isfinite(value)

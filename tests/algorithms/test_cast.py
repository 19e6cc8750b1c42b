import pytest
import torch
from cases import draw_gradients
from hypothesis import given, strategies as st

from commhooks import CastState
from commhooks.algorithms.cast import bf16, fp16
from commhooks.simulate import Simulation


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_bf16_error_bound(values):
    """Round to nearest of 8 significant bits: |x - q| <= 2^-8 |x| (2^-9, but for ties), for normal numbers."""
    x = torch.tensor(values)
    x = x[(x == 0) | ((x.abs() >= torch.finfo(torch.bfloat16).tiny) & (x.abs() < torch.finfo(torch.bfloat16).max))]
    result = Simulation(bf16, CastState, 1).step([{"p": x}])[0]["p"]
    assert ((x - result).abs().double() <= 2.0**-8 * x.abs().double()).all()


def test_fp32_accumulation_does_not_get_worse_with_more_ranks():
    """64 ranks: a bf16 sum loses small addends one by one; a float32 sum rounds once."""
    gradients = draw_gradients([(2000,)], 64, torch.float32, 1.0, seed=0)
    gradients = [{"p0": g["p0"].abs()} for g in gradients]
    exact = sum(g["p0"].double() for g in gradients) / 64

    def error(**options):
        result = Simulation(bf16, lambda: CastState(**options), 64).step(gradients)[0]["p0"]
        return float(((result - exact).abs() / exact).max())

    assert error(accumulate="fp32") <= 2.0**-8
    assert error(accumulate="wire") > 2 * error(accumulate="fp32")


@pytest.mark.parametrize("accumulate", ["wire", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fp16_means_do_not_overflow_where_sums_would(dtype, accumulate):
    """5e4 on both ranks is 5e4 in the mean; its sum, 1e5, is infinite in fp16."""
    gradient = torch.tensor([5e4, -5e4, 1.0], dtype=dtype)
    results = Simulation(fp16, lambda: CastState(accumulate=accumulate), 2).step([{"p": gradient}, {"p": gradient}])
    for result in results:
        torch.testing.assert_close(result["p"], gradient, rtol=1e-3, atol=0)


def test_fp16_true_overflow_is_infinite_on_every_rank():
    gradients = [{"p": torch.tensor([1e6, 1.0])}, {"p": torch.tensor([0.0, 1.0])}]
    for result in Simulation(fp16, CastState, 2).step(gradients):
        assert result["p"].tolist() == [float("inf"), 1.0]


def test_predivide_factor_saves_small_fp16_values():
    """64 ranks of 1e-7: divided by 64 before the sum each is zero in fp16; divided after, it is not."""
    gradients = [{"p": torch.full((3,), 1e-7)} for _ in range(64)]
    lost = Simulation(fp16, CastState, 64).step(gradients)[0]["p"]
    kept = Simulation(fp16, lambda: CastState(gradient_predivide_factor=1.0), 64).step(gradients)[0]["p"]
    assert not lost.any()
    torch.testing.assert_close(kept, gradients[0]["p"], rtol=0.3, atol=0)


@pytest.mark.parametrize("options", [{"accumulate": "wire"}, {"accumulate": "fp32"}])
def test_bytes_are_half_of_float32(options):
    ranks = Simulation(bf16, lambda: CastState(**options), 4)
    ranks.step(draw_gradients([(40, 10)], 4, torch.float32, 1.0, 0))
    assert ranks.states[0].metrics() == {
        "steps": 1,
        "dense_bytes": 2 * 3 / 4 * 400 * 4,
        "bytes_sent": 2 * 3 / 4 * 400 * 2,
        "ratio": 2.0,
    }


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor"),
        ({"gradient_predivide_factor": float("inf")}, "gradient_predivide_factor"),
        ({"accumulate": "bf16"}, "accumulate"),
        ({"start_iter": -1}, "start_iter"),
        ({"start_iter": True}, "start_iter"),
        ({"stats_logging_frequency": 0.5}, "stats_logging_frequency"),
    ],
)
def test_bad_options_are_named(options, name):
    with pytest.raises((ValueError, TypeError), match=name):
        CastState(**options)

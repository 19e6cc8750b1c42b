"""Whole algorithms on simulated ranks, with kernels for operations: the same results as with the reference."""

import pytest
import torch

from commhooks import CastState, PowerSGDState, ops
from commhooks.algorithms.cast import bf16
from commhooks.algorithms.powersgd import powersgd
from commhooks.simulate import Simulation

SHAPES = {"a": (33, 20), "bias": (33,), "b": (20, 17, 2), "c": (5, 4)}
CASES = {
    "bf16": (bf16, lambda: CastState(use_error_feedback=True)),
    "bf16 float32 sum": (bf16, lambda: CastState(use_error_feedback=True, accumulate="fp32")),
    "powersgd": (powersgd, lambda: PowerSGDState(None, 3, 0)),
    "powersgd bf16 wire": (powersgd, lambda: PowerSGDState(None, 3, 0, wire_dtype=torch.bfloat16)),
    "powersgd alternating": (powersgd, lambda: PowerSGDState(None, 3, 0, alternating=True)),
}


def gradients(step, dtype, device):
    generator = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in SHAPES.items()}
        for _ in range(2)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_kernels_and_reference_agree(monkeypatch, device, case, dtype):
    """Four steps, so what is kept from one to the next takes part; the third with a NaN on one rank."""
    algorithm, make_state = CASES[case]
    runs = {}
    for backend in ("reference", "triton"):
        monkeypatch.setattr(ops, "BACKEND", backend)
        ranks = Simulation(algorithm, make_state, 2)
        runs[backend] = []
        for step in range(4):
            given = gradients(step, dtype, device)
            if step == 2:
                given[1]["a"][3, 4] = float("nan")
            means = ranks.step(given, [["a", "bias"], ["b", "c"]])
            assert all(torch.equal(x.nan_to_num(), means[1][name].nan_to_num()) for name, x in means[0].items())
            residuals = dict(ranks.states[1].feedback.residuals)
            runs[backend].append(means[0] | {f"residual of {name}": x.clone() for name, x in residuals.items()})
    tolerance = 1e-4 if dtype != torch.bfloat16 and "bf16" not in case else 2e-2  # a rounding that went the other way
    for expected, found in zip(runs["reference"], runs["triton"], strict=True):
        for name, x in expected.items():
            torch.testing.assert_close(
                found[name], x, rtol=0, atol=tolerance, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("matrices", [1, 12])
def test_a_full_step_is_eight_launches_whatever_the_number_of_matrices(monkeypatch, device, matrices):
    if device == "cuda":
        pytest.skip("counted in the interpreter; on a GPU by python -m benchmarks.kernels --gpu")
    from triton.runtime import interpreter  # noqa: PLC0415 - of no use on a GPU

    launched = []
    run = interpreter.GridExecutor.__call__

    def counted(self, *args, **kwargs):
        launched.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    monkeypatch.setattr(ops, "BACKEND", "triton")
    ranks = Simulation(powersgd, lambda: PowerSGDState(None, 2, 0), 1)
    ranks.step([{f"w{i}": torch.randn(9, 20) for i in range(matrices)} | {"bias": torch.randn(3)}])
    assert launched == [
        "_project", "_sum_partials", "_orthogonalize", "_project", "_sum_partials", "_magnitudes", "_keep_factor",
        "_reconstruct",
    ]  # fmt: skip

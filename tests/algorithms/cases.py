"""The hooks and options that every promise is tested with."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from commhooks import CastState, HookState, PowerSGDState, RandomKState, TopKState
from commhooks.algorithms.allreduce import allreduce
from commhooks.algorithms.cast import bf16, fp16
from commhooks.algorithms.powersgd import powersgd
from commhooks.algorithms.randomk import randomk
from commhooks.algorithms.topk import topk
from commhooks.simulate import Simulation


@dataclass(frozen=True)
class Case:
    name: str
    algorithm: Callable
    make_state: Callable[[], HookState]
    wire: torch.dtype | None = None  # what values are rounded to on the wire; None is no further rounding
    sums_exactly: bool = False  # the sum over ranks rounds no more than float32 does
    feedback: bool = False
    share: float = 1.0  # of a bucket of 108 entries, what one step sends: others wait

    def simulation(self, world_size: int) -> Simulation:
        return Simulation(self.algorithm, self.make_state, world_size)


def cast_case(name, algorithm, wire, **options) -> Case:
    return Case(
        name,
        algorithm,
        lambda: CastState(**options),
        wire=wire,
        sums_exactly=options.get("accumulate") == "fp32",
        feedback=options.get("use_error_feedback", False),
    )


def powersgd_case(name, rank=2, **options) -> Case:
    wire = options.get("wire_dtype")
    return Case(
        name,
        powersgd,
        # A compression rate near 0 compresses matrices down to 1 x 1, at every rank up to the full one.
        lambda: PowerSGDState(None, rank, 0, min_compression_rate=1e-9, **options),
        wire=wire if wire != torch.float32 else None,
        sums_exactly=wire in (None, torch.float32),
        feedback=options.get("use_error_feedback", True),
    )


def topk_case(name, algorithm=topk, state=TopKState, **options) -> Case:
    wire = options.get("wire_dtype", torch.bfloat16)
    reduces = algorithm is randomk or options.get("aggregation") == "leader"  # the wire dtype's sums, hop by hop
    return Case(
        name,
        algorithm,
        lambda: state(**options),
        wire=wire if wire != torch.float32 else None,
        sums_exactly=not reduces or wire == torch.float32,
        feedback=options.get("use_error_feedback", True),
        share=options["k"] / 108 if "k" in options else options["density"],
    )


EF = {"use_error_feedback": True}
CASES = [
    Case("allreduce", allreduce, HookState),
    cast_case("bf16", bf16, torch.bfloat16),
    cast_case("bf16 EF", bf16, torch.bfloat16, **EF),
    cast_case("bf16 predivide 1", bf16, torch.bfloat16, gradient_predivide_factor=1.0, **EF),
    cast_case("bf16 fp32 sum", bf16, torch.bfloat16, accumulate="fp32"),
    cast_case("bf16 fp32 sum EF", bf16, torch.bfloat16, accumulate="fp32", **EF),
    cast_case("fp16", fp16, torch.float16),
    cast_case("fp16 EF", fp16, torch.float16, **EF),
    cast_case("fp16 fp32 sum EF", fp16, torch.float16, accumulate="fp32", **EF),
    powersgd_case("powersgd"),
    powersgd_case("powersgd rank 1", rank=1),
    powersgd_case("powersgd rank 5", rank=5),
    powersgd_case("powersgd no EF", use_error_feedback=False),
    powersgd_case("powersgd cold", warm_start=False),
    powersgd_case("powersgd epsilon", orthogonalization_epsilon=1e-3),
    powersgd_case("powersgd bf16", wire_dtype=torch.bfloat16),
    powersgd_case("powersgd fp16", wire_dtype=torch.float16),
    powersgd_case("powersgd alternating", alternating=True),
    powersgd_case("powersgd alternating bf16", alternating=True, wire_dtype=torch.bfloat16),
    topk_case("topk", k=3, block_size=256),
    topk_case("topk allgather", k=3, aggregation="allgather", wire_dtype=torch.float16),
    topk_case("topk balanced", density=0.2, aggregation="balanced", block_size=256),
    topk_case("topk leader", k=2, aggregation="leader", wire_dtype=torch.float32),
    topk_case("topk leader bf16", k=2, aggregation="leader"),
    topk_case("topk exact", k=4, selection="exact", aggregation="allgather"),
    topk_case("topk exact leader", density=0.3, selection="exact", aggregation="leader"),
    topk_case("topk warm-up", k=1, warmup_steps=3),
    topk_case("randomk", randomk, RandomKState, density=0.5, wire_dtype=torch.float32),
    topk_case("randomk bf16", randomk, RandomKState, density=0.3),
]
WITH_FEEDBACK = [case for case in CASES if case.feedback]
POWERSGD = [case for case in CASES if case.algorithm is powersgd]


def named(cases):
    return {"argvalues": cases, "ids": [case.name for case in cases]}


# Odd and tiny shapes, a scalar and an empty dimension among them, with more than two dimensions too.
shapes = st.lists(
    st.lists(st.integers(1, 9), max_size=4).map(tuple) | st.sampled_from([(0,), (3, 0), (1, 1), (17, 2), (2, 31)]),
    min_size=1,
    max_size=4,
)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
world_sizes = st.sampled_from([1, 2, 3, 4, 7, 64])


def draw_gradients(
    shapes: list[tuple[int, ...]], world_size: int, dtype: torch.dtype, scale: float, seed: int
) -> list[dict[str, Tensor]]:
    """Each rank's gradients: standard normal numbers times `scale`."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            f"p{i}": (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
            for i, shape in enumerate(shapes)
        }
        for _ in range(world_size)
    ]


def flatten(named_tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.flatten().double() for x in named_tensors.values()])


def residual_of(state: HookState, like: dict[str, Tensor]) -> Tensor:
    """The state's residuals in the order of `like`, flat, float64; zeros where there are none yet."""
    residuals = state.feedback.residuals if state.feedback else {}
    return torch.cat([residuals.get(name, torch.zeros(x.numel())).double() for name, x in like.items()])

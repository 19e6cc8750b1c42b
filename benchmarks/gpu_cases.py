"""What is measured of a bucket: each operation as kernels and as the plain torch of the same meaning, and whole hooks.

Every case works on tensors of its own and may be repeated: gradients are random at first, and stay finite and dense.
Bytes are the fewest that the operation must move: what it reads, once, and what it writes.
"""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as torch_powersgd
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks
from benchmarks.gpu_report import CAST_OPERATIONS, COMPOSITION, FULL_STEP, KERNELS, POWERSGD_HOOK, TORCH_HOOK
from benchmarks.gpu_shapes import BucketShapes
from benchmarks.gpu_timing import Case
from commhooks import ops
from commhooks.algorithms.powersgd import FULL_STEPS, powersgd as powersgd_algorithm
from commhooks.bucket import Bucket
from commhooks.comm import Collective, Comm
from commhooks.triton_kernels import cast, factors, powersgd, reference, reference_topk, topk

RANK = 4
BLOCK_SIZE, DENSITY = 1024, 0.01
RANKS = 2  # divisor of what is sent, and buffers that are summed
WIRE = torch.bfloat16

BACKENDS = {KERNELS: "triton", COMPOSITION: "reference"}
MODULES: dict[str, dict[str, ModuleType]] = {
    KERNELS: {"cast": cast, "factors": factors, "powersgd": powersgd, "topk": topk},
    COMPOSITION: {"cast": reference, "factors": reference, "powersgd": reference, "topk": reference_topk},
}

Hook = Callable[[Any, Any], Future[Tensor]]


def random_gradient(shapes: BucketShapes, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shapes.numel, device=device, generator=generator).mul_(0.01).to(shapes.dtype)


def _residual(shapes: BucketShapes, device: torch.device) -> Tensor:
    return random_gradient(shapes, device, seed=1).float()


def _nbytes(*tensors: Tensor) -> int:
    return sum(x.nbytes for x in tensors)


def _copy(shapes: BucketShapes, device: torch.device) -> list[Case]:
    """What a copy of the bucket reaches: of a small one, less than the bandwidth of a large one."""
    source = random_gradient(shapes, device)
    target = torch.empty_like(source)
    return [Case("copy_ of the bucket", COMPOSITION, lambda: target.copy_(source), _nbytes(source, target))]


def _cast(implementation: str, shapes: BucketShapes, device: torch.device) -> Iterator[Case]:
    module = MODULES[implementation]["cast"]
    plain, gradient = (random_gradient(shapes, device) for _ in range(2))
    residual = _residual(shapes, device)
    rest = torch.empty_like(residual)
    wire = module.to_wire(gradient.clone(), residual, RANKS, WIRE, rest)
    one_way, both_ways = _nbytes(plain, wire), _nbytes(plain, wire, residual, residual)

    names = iter(CAST_OPERATIONS)
    yield Case(next(names), implementation, lambda: module.to_wire(plain, None, RANKS, WIRE, None), one_way)
    yield Case(next(names), implementation, lambda: module.to_wire(gradient, residual, RANKS, WIRE, rest), both_ways)
    yield Case(next(names), implementation, lambda: module.from_wire_(wire, 1, plain), one_way)


def powersgd_state(**options: Any) -> commhooks.PowerSGDState:
    return commhooks.PowerSGDState(matrix_approximation_rank=RANK, start_powerSGD_iter=0, **options)


def _powersgd(implementation: str, shapes: BucketShapes, device: torch.device) -> Iterator[Case]:
    module, thin = (MODULES[implementation][name] for name in ("powersgd", "factors"))
    plan = powersgd_state().plan(shapes.layout())
    gradient, residual = random_gradient(shapes, device), _residual(shapes, device)
    q, fresh = torch.randn(plan.q.numel, device=device), torch.randn(plan.q.numel, device=device)
    dtype = q.dtype
    m, wire, sent_p = module.project(random_gradient(shapes, device), residual, q, plan, RANKS, dtype)
    p, lost = thin.orthogonalize(wire, plan.p, 0.0, dtype)
    _, new_q, sent_q = module.project_t(m, None, p, plan, RANKS, dtype, with_vectors=False)
    vectors = wire[plan.p.numel :]
    scales, _ = thin.magnitudes(new_q, plan.q, vectors)
    mean = ops.Factors(p, new_q, vectors)
    sent = ops.Factors(p, sent_q, sent_p[plan.p.numel :])
    out = m if gradient.dtype == m.dtype else random_gradient(shapes, device)
    kept_residual = residual.clone()
    in_matrices = sum(x.rows * x.cols for x in plan.matrices) * m.itemsize

    def case(operation: str, call: Callable[[], object], bytes_moved: int) -> Case:
        return Case(operation, implementation, call, bytes_moved)

    yield case(
        "project",
        lambda: module.project(gradient, residual, q, plan, RANKS, dtype),
        _nbytes(gradient, residual, m, q, wire, sent_p),
    )
    yield case("orthogonalize", lambda: thin.orthogonalize(wire, plan.p, 0.0, dtype), 2 * plan.p.numel * p.itemsize)
    yield case(
        "project_t",
        lambda: module.project_t(m, None, p, plan, RANKS, dtype, with_vectors=False),
        in_matrices + _nbytes(p, new_q, sent_q),
    )
    yield case("magnitudes", lambda: thin.magnitudes(new_q, plan.q, vectors), _nbytes(new_q, vectors))
    yield case(
        "keep_factor_",
        lambda: thin.keep_factor_(q, new_q, plan.q, scales, lost, fresh),
        _nbytes(q, new_q),
    )
    yield case(
        "reconstruct_",
        lambda: module.reconstruct_(m, plan, mean, sent, out, kept_residual),
        _nbytes(m, out, kept_residual, *mean, *sent[1:]),
    )


def _powersgd_steps(implementation: str, shapes: BucketShapes, device: torch.device) -> Iterator[Case]:
    """The algorithm's own coroutine, with nothing between its collectives: one rank's mean is its own."""
    layout = shapes.layout()

    def step_of(state: commhooks.PowerSGDState, gradient: Tensor, number: int) -> Callable[[], object]:
        def step() -> None:
            state.step = number
            with backend(implementation):
                drive(powersgd_algorithm(state, Bucket(layout, gradient, is_last=True), Comm(0, 1)))

        return step

    # Gradient and residual in, M out; M in; M in, gradient and residual out. The half step has no second pass.
    once, m = shapes.dtype.itemsize + 8, 4
    full = step_of(powersgd_state(), random_gradient(shapes, device), 0)
    yield Case(FULL_STEP, implementation, full, (once + m + once) * shapes.numel)
    halves = powersgd_state(alternating=True)
    gradient = random_gradient(shapes, device)
    for number in range(FULL_STEPS):
        step_of(halves, gradient, number)()
    for number, side in ((FULL_STEPS, "P"), (FULL_STEPS + 1, "Q")):
        half = step_of(halves, gradient, number)
        yield Case(f"PowerSGD half step, {side}", implementation, half, 2 * once * shapes.numel)


@contextmanager
def backend(implementation: str) -> Iterator[None]:
    """Let commhooks.ops take this implementation."""
    before, ops.BACKEND = ops.BACKEND, BACKENDS[implementation]
    try:
        yield
    finally:
        ops.BACKEND = before


def drive(coroutine: Coroutine[Collective, Tensor, Tensor]) -> Tensor:
    """Run an algorithm to its end on one rank, where an all-reduce changes nothing."""
    answer: Any = None
    with torch.no_grad():
        while True:
            try:
                answer = coroutine.send(answer).tensor
            except StopIteration as stop:
                return stop.value


def _topk(implementation: str, shapes: BucketShapes, device: torch.device) -> Iterator[Case]:
    module = MODULES[implementation]["topk"]
    gradient, exact, out = (random_gradient(shapes, device) for _ in range(3))
    residual = _residual(shapes, device)
    in_block, in_all = round(DENSITY * BLOCK_SIZE), max(1, round(DENSITY * shapes.numel))
    m, packed = module.select_blocks(gradient.clone(), residual, in_block, BLOCK_SIZE, WIRE)
    gathered = packed.repeat(RANKS, 1)
    selection = _nbytes(gradient, residual, m)

    yield Case(
        "select_blocks",
        implementation,
        lambda: module.select_blocks(gradient, residual, in_block, BLOCK_SIZE, WIRE),
        selection + packed.nbytes,
    )
    yield Case(
        "sum_blocks_",
        implementation,
        lambda: module.sum_blocks_(gathered, in_block, BLOCK_SIZE, WIRE, RANKS, out),
        _nbytes(gathered, out),
    )
    yield Case(
        "select_exact",
        implementation,
        lambda: module.select_exact(exact, residual, in_all, WIRE),
        selection + in_all * (WIRE.itemsize + 4),
    )


def hook_cases(shapes: BucketShapes, device: torch.device) -> list[Case]:
    """Whole hooks, ours and torch's, each called with a GradBucket that DDP made; and waited for, as DDP would.

    They run on a process group of one rank. So this is the hooks' own cost, with that of calling the collectives but
    not of sending anything.
    """
    cast_bytes = 2 * (shapes.dtype.itemsize + WIRE.itemsize) * shapes.numel
    powersgd_bytes = (2 * shapes.dtype.itemsize + 20) * shapes.numel
    topk_bytes = (2 * shapes.dtype.itemsize + 8) * shapes.numel  # gradient and residual in, residual and gradient out
    group = dist.group.WORLD
    cases: list[Case] = []

    def add(operation: str, implementation: str, hook: Hook, state: Any, bytes_moved: float) -> None:
        bucket = grad_bucket(shapes, device)

        def call() -> None:
            if implementation == TORCH_HOOK:
                hook(state, bucket).wait()
            else:
                with backend(implementation):
                    hook(state, bucket).wait()

        cases.append(Case(operation, implementation, call, bytes_moved))

    for implementation in BACKENDS:
        add("bf16_hook", implementation, commhooks.bf16_hook, commhooks.CastState(group), cast_bytes)
        state = powersgd_state(process_group=group)
        add(POWERSGD_HOOK, implementation, commhooks.powersgd_hook, state, powersgd_bytes)
        add("topk_hook", implementation, commhooks.topk_hook, topk_state(process_group=group), topk_bytes)
    add("bf16_hook", TORCH_HOOK, default_hooks.bf16_compress_hook, group, cast_bytes)
    add(POWERSGD_HOOK, TORCH_HOOK, torch_powersgd.powerSGD_hook, torch_powersgd_state(), powersgd_bytes)
    return cases


def topk_state(**options: Any) -> commhooks.TopKState:
    return commhooks.TopKState(density=DENSITY, block_size=BLOCK_SIZE, wire_dtype=WIRE, **options)


def torch_powersgd_state() -> torch_powersgd.PowerSGDState:
    """With the same options as ours, but for two first steps that are exact: it takes no fewer."""
    return torch_powersgd.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)


class _Parameters(nn.Module):
    """A model of nothing but parameters, whose gradients are random numbers."""

    def __init__(self, shapes: BucketShapes, device: torch.device) -> None:
        super().__init__()
        pieces = random_gradient(shapes, device).split([x.numel for x in shapes.layout().slices])
        self.parameters_ = nn.ParameterList(
            nn.Parameter(piece.view(shape).clone()) for piece, shape in zip(pieces, shapes.shapes, strict=True)
        )

    def forward(self) -> Tensor:
        return sum((p.square().sum() for p in self.parameters_), torch.zeros((), device=self.parameters_[0].device))


def grad_bucket(shapes: BucketShapes, device: torch.device) -> Any:
    """DDP's bucket of these parameters. Before the first backward ends, DDP keeps all parameters in one."""
    ddp = DDP(_Parameters(shapes, device))
    buckets: list[Any] = []

    def keep(_: None, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        buckets.append(bucket)
        future: Future[Tensor] = Future(devices=[device])
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, keep)
    ddp().backward()
    (bucket,) = buckets
    assert bucket.buffer().numel() == shapes.numel
    return bucket


def _of_each(
    make: Callable[[str, BucketShapes, torch.device], Iterator[Case]],
) -> Callable[[BucketShapes, torch.device], list[Case]]:
    """The cases of both implementations."""

    def make_all(shapes: BucketShapes, device: torch.device) -> list[Case]:
        return [case for implementation in BACKENDS for case in make(implementation, shapes, device)]

    return make_all


# What is measured in turn. A family is made when the one before it is done, so that its tensors find room.
FAMILIES: dict[str, Callable[[BucketShapes, torch.device], list[Case]]] = {
    "copy": _copy,
    "cast": _of_each(_cast),
    "powersgd": _of_each(_powersgd),
    "steps": _of_each(_powersgd_steps),
    "topk": _of_each(_topk),
    "hooks": hook_cases,
}

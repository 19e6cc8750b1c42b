"""PowerSGD: gradient matrices as products of two thin factors (arXiv:1905.13727), and its alternating variant.

    M = gradient + residual           (n, m), on each rank
    P = mean over ranks of M Q        (n, r)
    P = orthogonalize(P)
    Q = mean over ranks of M^T P      (m, r), next step's Q: a step of subspace iteration
    gradient = P Q^T
    residual = M - P (M^T P)^T        what this rank did not send

The residual is the paper's (Algorithm 2): M less the rank's own part of the mean, not less the mean. Summed over the
ranks both are the same, and so is every result; but ranks whose gradients differ for long would pile up the difference
in the other one without end, while this one is a projection of M and never longer than M.
"""

import zlib
from functools import partial
from math import prod
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed as dist
from typing_extensions import Unpack

from commhooks import ops
from commhooks.algorithms.allreduce import allreduce
from commhooks.bucket import Bucket, Layout, Slice
from commhooks.comm import Comm
from commhooks.memory import ParameterMemory, lay_out_flat
from commhooks.state import CommonOptions, HookState, checked_choice, checked_int

SideName = Literal["p", "q"]
FULL_STEPS = 2  # that the alternating variant begins with


class PowerSGDState(HookState):
    """Options of `powersgd_hook`: those of torch's `PowerSGDState`, with its meaning, and some more.

    Args:
        process_group, options: see `HookState`; start_iter and stats_logging_frequency have torch's names here.
        matrix_approximation_rank: r, the number of columns of P and Q; clamped to min(n, m) for each matrix.
        start_powerSGD_iter: number of first steps that reduce exactly. 0 is allowed.
        min_compression_rate: a parameter viewed as (shape[0], rest) = (n, m) is compressed if
            (n + m) r min_compression_rate < n m. Others, and vectors, ride along uncompressed.
        use_error_feedback: add to the next gradient what compression left out of this one.
        warm_start: begin with the last step's Q instead of a random one.
        orthogonalization_epsilon: added to the norm by which each column of P is divided. Not needed: a column that
            depends on others becomes zero, and its column of Q is drawn anew for the next step.
        random_seed: of the random Q; the same on every rank. The global random state is never touched.
        compression_stats_logging_frequency: every so many steps, log `metrics()`; 0 is never.
        batch_tensors_with_same_shape: accepted for torch's sake. All matrices of a bucket are always sent together
            and orthogonalized together, so it changes nothing.
        wire_dtype: of P, Q and what rides along: torch.float32, bfloat16 or float16; None is the dtype computed in,
            float32, or float64 for float64 gradients. With error feedback this rank's rounding is fed back.
            float16 holds values from 6e-8 to 65504 only: P has the gradient's scale.
        alternating: one half-step a step (ACP-SGD, arXiv:2306.08881): P in even steps, Q in odd ones, each projected
            on the other, orthogonalized. One collective instead of two, and half the bytes, a step; the first two
            compressed steps are full ones, for a random factor is not worth projecting on.

    Raises:
        ValueError, TypeError: an option is out of its range; the message names it.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803 - torch's name
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        *,
        wire_dtype: torch.dtype | None = None,
        alternating: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(
            process_group,
            start_iter=checked_int("start_powerSGD_iter", start_powerSGD_iter, least=0),
            stats_logging_frequency=checked_int(
                "compression_stats_logging_frequency", compression_stats_logging_frequency, least=0
            ),
            **options,
        )
        if not min_compression_rate > 0:
            raise ValueError(f"min_compression_rate is {min_compression_rate}; it must be positive")
        if not 0 <= orthogonalization_epsilon < float("inf"):
            raise ValueError(f"orthogonalization_epsilon is {orthogonalization_epsilon}; it must be at least 0, finite")
        if alternating and not warm_start:
            raise ValueError(
                "warm_start is False; with alternating=True it must be True: each half-step needs the last"
            )
        self.matrix_approximation_rank = checked_int("matrix_approximation_rank", matrix_approximation_rank, least=1)
        self.min_compression_rate = min_compression_rate
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = checked_int("random_seed", random_seed, least=0)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.wire_dtype = checked_choice("wire_dtype", wire_dtype, (None, *ops.WIRE_DTYPES))
        self.alternating = alternating
        self.feed_back(use_error_feedback)
        sides: tuple[SideName, ...] = ("p", "q") if alternating else ("q",)
        if warm_start:
            self.common |= {side: self._factor_memory(side) for side in sides}
        self._fresh = {side: self._factor_memory(side) for side in sides}
        self._plans: WeakKeyDictionary[Layout, ops.Plan] = WeakKeyDictionary()

    def config(self) -> dict[str, object]:
        names = (
            "matrix_approximation_rank",
            "min_compression_rate",
            "use_error_feedback",
            "warm_start",
            "orthogonalization_epsilon",
            "random_seed",
            "wire_dtype",
            "alternating",
        )
        return super().config() | {name: getattr(self, name) for name in names}

    def rank_of(self, shape: tuple[int, ...]) -> int:
        """The rank to which a parameter of this shape is compressed; 0 if it is not."""
        n, m = matrix_shape(shape)
        rank = min(self.matrix_approximation_rank, n, m)
        compressed = len(shape) > 1 and (n + m) * rank * self.min_compression_rate < n * m
        return rank if compressed else 0

    def plan(self, layout: Layout) -> ops.Plan:
        """Which parameters of the bucket are factorized, and where their factors lie."""
        plan = self._plans.get(layout)
        if plan is None:
            matrices: list[ops.Matrix] = []
            vectors: list[tuple[int, int]] = []
            p = q = 0
            for x in layout.slices:
                if rank := self.rank_of(x.shape):
                    n, m = matrix_shape(x.shape)
                    factors = ops.Factor(p, rank, n), ops.Factor(q, rank, m)
                    matrices.append(ops.Matrix(x.offset, n, m, rank, *factors))
                    p, q = p + rank * n, q + rank * m
                else:
                    vectors.append((x.offset, x.numel))
            plan = self._plans[layout] = ops.Plan(tuple(matrices), tuple(vectors))
        return plan

    def factor(self, side: SideName, bucket: Bucket) -> Tensor:
        """The bucket's packed P or Q to project on: the last step's, with warm start; else random."""
        if self.warm_start:
            return self.common[side].flat(bucket)
        draw = partial(self._randomize, side, self.step)
        return lay_out_flat(bucket, partial(self._factor_numel, side), draw)

    def keep_factor(self, side: SideName, bucket: Bucket, new: Tensor, scales: Tensor, lost: Tensor) -> None:
        """The next step begins with `new`, scaled, but for its lost rows: random again."""
        plan = self.plan(bucket.layout)
        if self.warm_start and plan.matrices:
            kept, fresh = self.common[side].next(bucket), self._fresh[side].flat(bucket)
            ops.keep_factor_(kept, new, plan.p if side == "p" else plan.q, scales, lost, fresh)

    def _factor_memory(self, side: SideName) -> ParameterMemory:
        return ParameterMemory(partial(self._factor_numel, side), partial(self._randomize, side, 0))

    def _factor_numel(self, side: SideName, parameter: Slice) -> int:
        n, m = matrix_shape(parameter.shape)
        return self.rank_of(parameter.shape) * (n if side == "p" else m)

    def _randomize(self, side: SideName, draw: int, parameter: Slice, piece: Tensor) -> None:
        # Seeded by the parameter's name: whatever bucket it lies in, all ranks draw the same numbers for it.
        seed = zlib.crc32(f"{self.random_seed}/{parameter.name}/{side}/{draw}".encode())
        piece.normal_(generator=torch.Generator(piece.device).manual_seed(seed))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(shape[0], rest): of a convolution, the output channels by everything else."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


async def powersgd(state: PowerSGDState, bucket: Bucket, comm: Comm) -> Tensor:
    """The bucket's mean over all ranks, each large matrix at rank r, in place in `bucket.buffer`."""
    if state.reduces_exactly(bucket):
        return await allreduce(state, bucket, comm)
    plan = state.plan(bucket.layout)
    residual = state.residual(bucket)
    halves = state.alternating and state.step >= state.start_iter + FULL_STEPS
    step = _half_step if halves else _full_step
    m, mean, sent, worst = await step(state, bucket, residual, plan, comm)
    state.received(worst)
    kept = state.next_residual(bucket)
    ops.reconstruct_(m, plan, mean, sent, out=bucket.buffer, residual=kept)
    state.received_result(bucket.buffer)
    return bucket.buffer


async def _full_step(
    state: PowerSGDState, bucket: Bucket, residual: Tensor | None, plan: ops.Plan, comm: Comm
) -> tuple[Tensor, ops.Factors, ops.Factors, Tensor]:
    """P = M Q, orthogonalized; Q = M^T P. Two collectives; the vectors ride in the first.

    Returns M, the mean factors, this rank's part of them, and the largest magnitude received: finite, or not.
    """
    q = state.factor("q", bucket)
    wire_dtype = state.wire_dtype or q.dtype
    m, wire, sent_p = ops.project(bucket.buffer, residual, q, plan, comm.world_size, wire_dtype)
    mean_p = await comm.all_reduce(wire, last=not plan.matrices)
    vectors, sent_vectors = mean_p[plan.p.numel :], sent_p[plan.p.numel :]
    if not plan.matrices:
        return m, ops.Factors(q, q, vectors), ops.Factors(q, q, sent_vectors), ops.largest(vectors)
    p, lost = ops.orthogonalize(mean_p, plan.p, state.orthogonalization_epsilon, m.dtype)
    _, wire, sent_q = ops.project_t(m, None, p, plan, comm.world_size, wire_dtype, with_vectors=False)
    q = await comm.all_reduce(wire, last=True)
    # Of P as well: what is not finite in it, orthogonalization has spread, and with P to Q.
    scales, worst = ops.magnitudes(q, plan.q, vectors)
    state.keep_factor("q", bucket, q, scales, lost)
    if state.alternating:
        state.keep_factor("p", bucket, p, torch.ones_like(scales), lost)
    return m, ops.Factors(p, q, vectors), ops.Factors(p, sent_q, sent_vectors), worst


async def _half_step(
    state: PowerSGDState, bucket: Bucket, residual: Tensor | None, plan: ops.Plan, comm: Comm
) -> tuple[Tensor, ops.Factors, ops.Factors, Tensor]:
    """P = M Q in even steps, Q = M^T P in odd ones, the factor projected on orthogonalized. Returns as `_full_step`."""
    left = state.step % 2 == 0
    fixed: SideName = "q" if left else "p"
    moving: SideName = "p" if left else "q"
    numel = plan.p.numel if left else plan.q.numel
    factor = state.factor(fixed, bucket)
    basis, lost = ops.orthogonalize(factor, plan.q if left else plan.p, state.orthogonalization_epsilon, factor.dtype)
    args = bucket.buffer, residual, basis, plan, comm.world_size, state.wire_dtype or basis.dtype
    m, wire, sent = ops.project(*args) if left else ops.project_t(*args, with_vectors=True)
    mean = await comm.all_reduce(wire, last=True)
    scales, worst = ops.magnitudes(mean, plan.p if left else plan.q, mean[numel:])
    state.keep_factor(moving, bucket, mean, scales, lost)

    def factors(packed: Tensor) -> ops.Factors:
        thin, vectors = packed[:numel], packed[numel:]
        return ops.Factors(thin, basis, vectors) if left else ops.Factors(basis, thin, vectors)

    return m, factors(mean), factors(sent), worst

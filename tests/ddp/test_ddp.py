"""Every hook under what DDP does around it: rebuilt buckets, no_sync, static graphs, unused parameters, Join."""

import pytest
import torch
import torch.distributed as dist
from models import HOOKS, assert_replicas_equal, inputs, linears, register, train, train_unevenly
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks

# randomk awaits what "topk leader" does; one test of it is enough.
all_hooks = pytest.mark.parametrize("hook", [name for name in HOOKS if name != "randomk"])


def many_buckets(hook, executor):
    for _ in range(10):
        ddp = DDP(linears(), bucket_cap_mb=0.01)
        state = register(ddp, hook, executor=executor)
        train(ddp, 3)
        assert_replicas_equal(ddp)
        assert state.step == 3


@pytest.mark.parametrize(("world_size", "executor"), [(2, "inline"), (2, "pipelined"), (4, "pipelined")])
@all_hooks
def test_many_small_buckets_never_hang(ranks, hook, executor, world_size):
    """Catches: collectives whose order differs between ranks. torch's PowerSGD hook hangs or crashes here on gloo."""
    ranks(world_size, many_buckets, hook, executor)


def executors_agree(hook):
    results = []
    for executor in ("inline", "pipelined"):
        ddp = DDP(linears(), bucket_cap_mb=0.02)
        register(ddp, hook, executor=executor)
        train(ddp, 4)
        results.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]))
    assert torch.equal(*results)


@pytest.mark.parametrize("hook", HOOKS)
def test_executors_give_the_same_parameters(ranks, hook):
    """Catches: a pipelined bucket that meets another bucket's data."""
    ranks(2, executors_agree, hook)


def start(iteration, static_graph, alternating):
    ddp = DDP(linears(4), bucket_cap_mb=0.02, static_graph=static_graph)
    exact = DDP(linears(4), bucket_cap_mb=0.02, static_graph=static_graph)
    register(ddp, "powersgd", start_powerSGD_iter=iteration, alternating=alternating)
    for step in range(iteration + 3):
        for model in (ddp, exact):
            model.zero_grad()
            model(inputs(step)).square().mean().backward()
        same = all(
            torch.allclose(p.grad, q.grad, atol=1e-8) for p, q in zip(ddp.parameters(), exact.parameters(), strict=True)
        )
        assert same == (step < iteration), f"step {step}"


@pytest.mark.parametrize("alternating", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("iteration", [0, 1, 2])
def test_compression_starts_at_its_step(ranks, iteration, static_graph, alternating):
    """Also at step 0, whose buckets DDP lays out anew after it."""
    ranks(2, start, iteration, static_graph, alternating)


def late(hook):
    ddp = DDP(linears(6), bucket_cap_mb=0.02)
    register(ddp, hook)
    group = dist.new_group()

    def meet(_):
        dist.barrier(group)  # the other rank begins

    if dist.get_rank() == 0:
        ddp.module[0].weight.register_hook(meet)
    for step in range(3):
        loss = ddp(inputs(step)).sum()
        if dist.get_rank() == 1:
            dist.barrier(group)
        loss.backward()


@pytest.mark.parametrize("hook", ["allreduce", "bf16", "topk", "randomk"])
def test_backward_does_not_wait_for_other_ranks(ranks, hook):
    """With one collective a bucket, no hook call but the last one waits: here that would be for ever."""
    ranks(2, late, hook)


def accumulate():
    ddp = DDP(linears(3))
    state = register(ddp, "allreduce")
    with ddp.no_sync():
        ddp(inputs(0)).sum().backward()
        assert state.metrics()["bytes_sent"] == 0
    ddp(inputs(1)).sum().backward()
    assert state.step == 1
    alone = linears(3)
    alone(torch.cat([inputs(0), inputs(1)])).sum().backward()
    for p, q in zip(ddp.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(q.grad)
        torch.testing.assert_close(p.grad, q.grad / dist.get_world_size())


def test_no_sync_accumulates_and_sends_once(ranks):
    ranks(2, accumulate)


def uneven(hook):
    ddp = DDP(linears(4), bucket_cap_mb=0.02)
    state = register(ddp, hook)
    train_unevenly(ddp)
    assert state.step == 3 + 2 * (dist.get_world_size() - 1)
    assert_replicas_equal(ddp)


@pytest.mark.parametrize("world_size", [2, 4])
@all_hooks
def test_join_with_uneven_inputs(ranks, hook, world_size):
    ranks(world_size, uneven, hook)


class SometimesUnused(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = self.used(x)
        return self.other(x) if dist.get_rank() == 0 else x


def unused(hook):
    ddp = DDP(SometimesUnused(), find_unused_parameters=True, bucket_cap_mb=0.01)
    register(ddp, hook)
    train(ddp, 4)
    assert_replicas_equal(ddp)
    assert ddp.module.other.weight.grad.any()


@all_hooks
def test_find_unused_parameters(ranks, hook):
    ranks(2, unused, hook)


class SometimesResting(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, rests):
        x = self.used(x)
        return x if rests else self.other(x)


def resting(hook, view):
    ddp = DDP(SometimesResting(), find_unused_parameters=True, bucket_cap_mb=0.01, gradient_as_bucket_view=view)
    state = register(ddp, hook)
    weight, residuals = ddp.module.other.weight, state.own["residual"].pieces
    for step in range(6):
        ddp.zero_grad()
        rests = step % 2 == 1
        owed = residuals[weight].clone() if step else None
        ddp(inputs(step), rests).square().mean().backward()
        assert state.step == step + 1  # so it has counted
        assert (weight.grad is None) == rests
        assert not rests or (owed.any() and torch.equal(residuals[weight], owed))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("hook", ["bf16", "powersgd", "powersgd alternating", "topk", "topk leader", "randomk"])
def test_residual_of_a_parameter_that_no_rank_uses_waits(ranks, hook, view):
    """DDP throws away the result for it."""
    ranks(2, resting, hook, view)


def bucket_view(hook):
    results = []
    for view in (False, True):
        ddp = DDP(linears(4), gradient_as_bucket_view=view, bucket_cap_mb=0.02)
        register(ddp, hook)
        train(ddp, 4)
        results.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]))
    assert torch.equal(*results)


@all_hooks
def test_gradient_as_bucket_view(ranks, hook):
    ranks(2, bucket_view, hook)


def allreduce_is_ddp():
    with_hook, plain = DDP(linears(4), bucket_cap_mb=0.02), DDP(linears(4), bucket_cap_mb=0.02)
    with_hook.register_comm_hook(None, commhooks.allreduce_hook)
    train(with_hook, 4)
    train(plain, 4)
    for p, q in zip(with_hook.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_allreduce_hook_is_plain_ddp(ranks, world_size):
    """To the bit where W is a power of two: dividing by it is exact."""
    ranks(world_size, allreduce_is_ddp)


def half_precision(hook, dtype):
    ddp = DDP(linears(3).to(dtype), bucket_cap_mb=0.01)
    register(ddp, hook)
    for step in range(3):
        ddp.zero_grad()
        ddp(inputs(step).to(dtype)).float().square().mean().backward()
    for p in ddp.parameters():
        assert p.grad.dtype == dtype
        assert p.grad.isfinite().all()
        assert p.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@all_hooks
def test_models_of_other_dtypes(ranks, hook, dtype):
    ranks(2, half_precision, hook, dtype)


class Constant(nn.Module):
    """Its gradient is the input."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 32, dtype=dtype))

    def forward(self, x):
        return (self.weight * x).sum()


def gradient_of(value, hook, dtype):
    ddp = DDP(Constant(dtype))
    register(ddp, hook)
    ddp(torch.full((32, 32), value, dtype=dtype)).backward()
    return ddp.module.weight.grad


def large_fp16(hook):
    mean = gradient_of(5e4, hook, torch.float16)
    mean = mean[mean != 0]  # top-k and random-k have not sent all of it
    assert len(mean) == 1024 or hook.startswith(("topk", "randomk"))
    torch.testing.assert_close(mean, torch.full_like(mean, 5e4), rtol=2e-3, atol=0)
    infinite = gradient_of(float("inf") if dist.get_rank() == 0 else 1.0, hook, torch.float16)
    assert not infinite[infinite != 0].isfinite().any()


@all_hooks
def test_large_fp16_gradients(ranks, hook):
    """A mean that fp16 holds is not lost to a sum that it does not; a true overflow is one on every rank."""
    ranks(2, large_fp16, hook)


def nan_on_one_rank(hook):
    ddp = DDP(linears(4), bucket_cap_mb=0.02)
    register(ddp, hook)
    for step in range(4):
        ddp.zero_grad()
        loss = ddp(inputs(step)).square().mean()
        if step == 2 and dist.get_rank() == 1:
            loss = loss * float("nan")
        loss.backward()
        for p in ddp.parameters():
            assert p.grad.isfinite().all() if step != 2 else not p.grad.isfinite().all()


@all_hooks
def test_nan_on_one_rank_is_seen_by_all_and_gone_in_the_next_step(ranks, hook):
    ranks(2, nan_on_one_rank, hook)


class WithEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(100, 32, sparse=True), nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(self.embedding(x))


def sparse(hook):
    ddp, plain = DDP(WithEmbedding()), DDP(WithEmbedding())
    register(ddp, hook)
    for _ in range(3):
        for model in (ddp, plain):
            model.zero_grad()
            model(torch.arange(5) + 3 * dist.get_rank()).square().sum().backward()
        gradient, exact = ddp.module.embedding.weight.grad, plain.module.embedding.weight.grad
        assert gradient.is_sparse
        torch.testing.assert_close(gradient.to_dense(), exact.to_dense())


@all_hooks
def test_sparse_gradients_are_exact(ranks, hook):
    ranks(2, sparse, hook)


def flat_memory(hook):
    ddp = DDP(linears(6), bucket_cap_mb=0.02)
    state = register(ddp, hook)
    sizes = []
    for step in range(6):
        train(ddp, 1)
        if step > 1:
            sizes.append(sum(x.numel() for x in _tensors(state)))
    assert len(set(sizes)) == 1, sizes
    if state.feedback:
        residuals = sum(flat.whole.numel() for flat in state.feedback._flat.values())
        assert residuals == sum(p.numel() for p in ddp.parameters())


def _tensors(state):
    memories = [*state.own.values(), *state.common.values(), *getattr(state, "_fresh", {}).values()]
    return [flat.whole for memory in memories for flats in (memory._flat, memory._spare) for flat in flats.values()]


@all_hooks
def test_memory_is_flat_after_the_buckets_are_rebuilt(ranks, hook):
    """Catches: flat tensors of the first layout that live on beside the second's."""
    ranks(2, flat_memory, hook)


class Transposed(nn.Module):
    """A matrix that DDP keeps transposed in its bucket, and a convolution that it keeps channels last."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(24, 40).t())
        self.kernel = nn.Parameter(torch.zeros(16, 8, 3, 3).to(memory_format=torch.channels_last))

    def forward(self, left, right, out, rest):
        return (self.matrix * left[:, None] * right).sum() + (self.kernel * out[:, None, None, None] * rest).sum()


def memory_formats():
    ddp = DDP(Transposed())
    register(ddp, "powersgd")
    vectors = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in (40, 24, 16, (8, 3, 3))]
    ddp(*vectors).backward()
    left, right, out, rest = vectors
    torch.testing.assert_close(ddp.module.matrix.grad, left[:, None] * right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ddp.module.kernel.grad, out[:, None, None, None] * rest, rtol=1e-4, atol=1e-5)


def test_matrices_are_compressed_as_they_lie_in_memory(ranks):
    """A gradient of rank 1 is exact at rank 1: not if rows and columns were taken for one another."""
    ranks(2, memory_formats)

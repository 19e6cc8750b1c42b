"""What a hook lets its user see: ranges in a trace, errors by parameter, replicas that drift."""

import pytest
import torch
import torch.distributed as dist
from models import inputs, linears, register, train, train_unevenly
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile

import commhooks


def ranges(hook):
    ddp = DDP(linears(4), bucket_cap_mb=0.02)
    register(ddp, hook)
    train(ddp, 2)
    with profile() as trace:
        train(ddp, 1)
    return {event.name for event in trace.events() if event.name.startswith("commhooks.")}


PHASES = ("compress", "launch", "wait", "decompress")


@pytest.mark.parametrize("hook", ["powersgd", "bf16"])
def test_a_trace_names_hook_phase_and_bucket(ranks, hook):
    expected = {f"commhooks.{hook}.{phase} bucket {i}" for phase in PHASES for i in range(2)}
    for found in ranks(2, ranges, hook):
        assert found == expected


def drift(hook):
    ddp = DDP(linears(3), bucket_cap_mb=0.02)
    state = register(ddp, hook, check_replicas_every=2)
    train(ddp, 3)  # looks before the third step
    if dist.get_rank() == 1:
        with torch.no_grad():
            ddp.module[1].bias[3] += 1
    train(ddp, 1)  # does not look
    with pytest.raises(commhooks.ReplicaError, match=r"1\.bias differs on rank 1"):
        train(ddp, 1)
    assert state.step == 4


def test_replicas_are_checked_every_so_many_steps(ranks):
    """Catches: an option that is never looked at; ranks that would hang on it."""
    ranks(2, drift, "bf16")


def errors():
    ddp = DDP(linears(3), bucket_cap_mb=0.02)
    state = register(ddp, "powersgd", track_error=True)
    for step in range(6):
        ddp(inputs(step)).square().mean().backward()
    return state.compression_error()


def test_errors_by_parameter_name(ranks):
    for found in ranks(2, errors):
        assert set(found) == {f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")}
        assert all(0 < found[f"{i}.weight"] <= 1 for i in range(3))
        assert all(found[f"{i}.bias"] < 1e-6 for i in range(3))  # sent as it is


def other_hook_without_register(state_type):
    ddp = DDP(linears(2))
    hook = commhooks.bf16_hook if dist.get_rank() else commhooks.fp16_hook
    ddp.register_comm_hook(None if state_type == "None" else commhooks.CastState(), hook)
    with pytest.raises(ValueError, match="hook is 'fp16_hook' on rank 0 and 'bf16_hook' on rank 1"):
        train(ddp, 1)


@pytest.mark.parametrize("state", ["None", "CastState"])
def test_ranks_that_differ_are_told_at_the_first_step(ranks, state):
    ranks(2, other_hook_without_register, state)


def test_tracking_needs_error_feedback():
    for state_type in (commhooks.CastState, commhooks.TopKState, commhooks.PowerSGDState, commhooks.RandomKState):
        with pytest.raises(ValueError, match="track_error is True"):
            state_type(use_error_feedback=False, track_error=True)
    with pytest.raises(ValueError, match="track_error is True"):
        commhooks.HookState(track_error=True)


def joined():
    ddp = DDP(linears(3), bucket_cap_mb=0.02)
    state = register(ddp, "powersgd", check_replicas_every=1)
    train_unevenly(ddp)
    assert state.step >= 3
    commhooks.check_replicas(ddp)


def test_replicas_are_not_checked_while_a_rank_has_joined(ranks):
    """Catches: a false alarm, for a rank without inputs does not step its optimizer."""
    ranks(2, joined)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, 32, sparse=True), nn.Linear(32, 32)

    def forward(self, indices, scale):
        return (self.embedding(indices) * scale).sum() + self.linear(inputs(width=32)).square().mean()


def sparse_overflow():
    ddp = DDP(Sparse())
    state = register(ddp, "powersgd")
    for step, scale in enumerate([1.0, float("inf"), 1.0]):
        ddp.zero_grad()
        ddp(torch.arange(5), scale if dist.get_rank() else 1.0).backward()
        assert state.step == step + 1 - (step > 0)


def test_an_infinite_sparse_gradient_voids_the_step_too(ranks):
    ranks(2, sparse_overflow)

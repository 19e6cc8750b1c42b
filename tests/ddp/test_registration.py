"""commhooks.register: what it refuses, on every rank, and what it says."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from models import assert_replicas_equal, linears, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks


def registers():
    state = commhooks.register(ddp := DDP(linears(3)), commhooks.powersgd_hook, commhooks.PowerSGDState(None, 2, 0))
    train(ddp, 2)
    assert_replicas_equal(ddp)
    metrics = state.metrics()
    assert metrics["steps"] == 2
    assert metrics["ratio"] > 4
    assert commhooks.register(DDP(linears(2)), commhooks.bf16_hook).metrics()["ratio"] == 1
    with pytest.warns(UserWarning, match="compresses no parameter of this model"):
        commhooks.register(DDP(linears(2, width=4)), commhooks.powersgd_hook, commhooks.PowerSGDState())


def test_register(ranks):
    ranks(2, registers)


class Unhashable:
    __hash__ = None

    def __call__(self, state, bucket):
        """A hook, it seems."""


def wrong_on_some():
    """One rank's mistake is every rank's error: otherwise the others would wait for it."""
    me = dist.get_rank()
    ddp = DDP(linears(2))
    with pytest.raises(TypeError, match="ddp is a Sequential"):
        commhooks.register(linears(2), commhooks.bf16_hook)
    hooks = {1: len, 3: Unhashable()}
    with pytest.raises(ValueError, match=r"^rank 1: hook is 'len'; it must be .*; rank 3: hook is <.*Unhashable"):
        commhooks.register(ddp, hooks.get(me, commhooks.bf16_hook))
    with pytest.raises(ValueError, match=r"^rank 2: state is 4; topk_hook takes a TopKState$"):
        commhooks.register(ddp, commhooks.topk_hook, 4 if me == 2 else commhooks.TopKState())
    with pytest.raises(ValueError, match=r"rank 0: state is None; powersgd_hook takes a PowerSGDState; rank 1: state"):
        commhooks.register(ddp, commhooks.powersgd_hook)
    commhooks.register(ddp, commhooks.bf16_hook)


def test_what_is_wrong_on_any_rank_is_refused_on_all(ranks):
    ranks(4, wrong_on_some)


def differences():
    me = dist.get_rank()
    ddp = DDP(linears(2))
    with pytest.raises(ValueError, match="hook is 'fp16_hook' on rank 0 and 'bf16_hook' on rank 1"):
        commhooks.register(ddp, commhooks.bf16_hook if me else commhooks.fp16_hook)
    state = commhooks.PowerSGDState(None, 1 + me, executor="pipelined" if me == 2 else "inline")
    with pytest.raises(ValueError, match="matrix_approximation_rank is 1 on rank 0 and 2 on rank 1") as caught:
        commhooks.register(ddp, commhooks.powersgd_hook, state)
    for text in ("rank is 1 on rank 0 and 3 on rank 2", "executor is 'inline' on rank 0 and 'pipelined' on rank 2"):
        assert text in str(caught.value)
    other_caps = DDP(linears(2), bucket_cap_mb=1 + me // 2)
    with pytest.raises(ValueError, match=r"DDP's bucket_bytes_cap is 1048576 on rank 0 and 2097152 on rank 2$"):
        commhooks.register(other_caps, commhooks.bf16_hook)
    ahead = commhooks.HookState()
    alone = [dist.new_group([rank]) for rank in range(3)][me]
    if me == 1:
        once = DDP(linears(2), process_group=alone)
        commhooks.register(once, commhooks.allreduce_hook, ahead)
        train(once, 1)
        del once
    with pytest.raises(ValueError, match=r"step is 0 on rank 0 and 1 on rank 1$"):
        commhooks.register(ddp, commhooks.allreduce_hook, ahead)
    commhooks.register(ddp, commhooks.allreduce_hook)


def test_ranks_that_differ(ranks):
    ranks(3, differences)


def in_use():
    ddp = DDP(linears(2))
    state = commhooks.register(ddp, commhooks.bf16_hook)
    with pytest.raises(ValueError, match="rank 0: the model has a hook already: bf16_hook; rank 1: the model has a"):
        commhooks.register(ddp, commhooks.bf16_hook)
    builtin = DDP(linears(2))
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(ValueError, match=r"the model has a hook already: .*FP16"):
        commhooks.register(builtin, commhooks.bf16_hook)
    with pytest.raises(ValueError, match="serves another DDP model already"):
        commhooks.register(DDP(linears(2)), commhooks.bf16_hook, state)
    plain, other = commhooks.CastState(), DDP(linears(2))
    other.register_comm_hook(plain, commhooks.fp16_hook)  # has not been called yet
    with pytest.raises(ValueError, match="serves another DDP model already"):
        commhooks.register(DDP(linears(2)), commhooks.bf16_hook, plain)
    train(ddp, 1)
    train(other, 1)


def test_models_and_states_in_use(ranks):
    ranks(2, in_use)


def refused_state_is_free():
    state, ddp = commhooks.CastState(), DDP(linears(2))
    with pytest.raises(ValueError, match="hook is"):
        commhooks.register(ddp, commhooks.bf16_hook if dist.get_rank() else commhooks.fp16_hook, state)
    assert commhooks.register(ddp, commhooks.bf16_hook, state) is state
    train(ddp, 1)
    assert state.step == 1


def test_a_refused_state_is_free(ranks):
    ranks(2, refused_state_is_free)


def first_differing(change):
    """Beyond what DDP itself compares: the shapes of what trains, if it is not told to take them as they are."""
    module = linears(3, width=4)
    if dist.get_rank() == 1:
        change(module)
    ddp = DDP(module, init_sync=False)
    with pytest.raises(ValueError, match=r"^parameter \d is .* on rank 0 and .* on rank 1$") as caught:
        commhooks.register(ddp, commhooks.bf16_hook)
    return str(caught.value)


def reshape(module):
    module[1] = nn.Linear(4, 5)


def rename(module):
    module[1].scale = module[1].bias
    del module[1].bias


def freeze(module):
    module[2].bias.requires_grad = False


def widen(module):
    module[0].bias.data = module[0].bias.data.double()


def lengthen(module):
    module.append(nn.Linear(4, 1))


PARAMETERS = {
    reshape: "parameter 2 is 1.weight (4, 4) float32 requires_grad=True on rank 0 "
    "and 1.weight (5, 4) float32 requires_grad=True on rank 1",
    rename: "parameter 3 is 1.bias (4,) float32 requires_grad=True on rank 0 "
    "and 1.scale (4,) float32 requires_grad=True on rank 1",
    freeze: "parameter 5 is 2.bias (4,) float32 requires_grad=True on rank 0 "
    "and 2.bias (4,) float32 requires_grad=False on rank 1",
    widen: "parameter 1 is 0.bias (4,) float32 requires_grad=True on rank 0 "
    "and 0.bias (4,) float64 requires_grad=True on rank 1",
    lengthen: "parameter 6 is missing on rank 0 and 3.weight (1, 4) float32 requires_grad=True on rank 1",
}


def other_parameters():
    return {change: first_differing(change) for change in PARAMETERS}


def test_the_first_parameter_that_differs_is_named(ranks):
    assert ranks(2, other_parameters) == [PARAMETERS, PARAMETERS]


def absent():
    impatient = dist.new_group(timeout=timedelta(seconds=2))
    ddp = DDP(linears(2), process_group=impatient)
    if dist.get_rank():
        with pytest.raises(RuntimeError, match="a rank of the model has ended, or has not called it within the group"):
            commhooks.register(ddp, commhooks.bf16_hook)


def test_a_rank_that_does_not_register_is_missed(ranks):
    ranks(2, absent)


def plain_differences():
    """fp16 and bfloat16 have as many bytes: each rank would take the other's numbers for its own kind."""
    me = dist.get_rank()
    ddp = DDP(linears(4), bucket_cap_mb=0.02)
    ddp.register_comm_hook(None, commhooks.bf16_hook if me else commhooks.fp16_hook)
    with pytest.raises(ValueError, match="hook is 'fp16_hook' on rank 0 and 'bf16_hook' on rank 1"):
        train(ddp, 1)
    ddp = DDP(linears(4), bucket_cap_mb=0.02)
    ddp.register_comm_hook(commhooks.PowerSGDState(None, 1 + me), commhooks.powersgd_hook)
    with pytest.raises(ValueError, match="matrix_approximation_rank is 1 on rank 0 and 2 on rank 1"):
        train(ddp, 1)


def test_ddps_own_registration_compares_at_the_first_call(ranks):
    ranks(2, plain_differences)

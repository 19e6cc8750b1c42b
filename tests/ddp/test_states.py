"""Which model a state serves, which group it reduces over, and what is said where that goes wrong."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import HOOKS, assert_replicas_equal, inputs, linears, register, train
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks
from commhooks.algorithms.allreduce import allreduce
from commhooks.hooks import _run

all_hooks = pytest.mark.parametrize("hook", [name for name in HOOKS if name != "randomk"])
ROOT = Path(__file__).parents[2]


def two_models(hook):
    models = [DDP(linears(3), bucket_cap_mb=0.02) for _ in range(2)]
    states = [register(model, hook) for model in models]
    for model in models:
        train(model, 3)
        assert_replicas_equal(model)
    assert [state.step for state in states] == [3, 3]


@all_hooks
def test_two_models_with_a_state_each(ranks, hook):
    ranks(2, two_models, hook)


def one_state_for_two(hook_name):
    hook, state_type, options = HOOKS[hook_name]
    state = state_type(**options)
    models = [DDP(linears(3)) for _ in range(2)]
    for model in models:
        model.register_comm_hook(state, hook)
    with pytest.raises(ValueError, match="serves another DDP model already"):
        train(models[0], 1)


@all_hooks
def test_one_state_for_two_models_is_refused(ranks, hook):
    ranks(2, one_state_for_two, hook)


def second_model_comes_later():
    state = commhooks.CastState()
    first = DDP(linears(3))
    first.register_comm_hook(state, commhooks.bf16_hook)
    train(first, 1)
    second = DDP(linears(3))
    second.register_comm_hook(state, commhooks.bf16_hook)
    with pytest.raises(ValueError, match="make one state for each model"):
        train(second, 1)


def test_a_second_model_that_comes_later_is_refused(ranks):
    ranks(2, second_model_comes_later)


def subgroup(state):
    """Each rank trains alone: nothing may come from the other."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    ddp = DDP(linears(3), process_group=groups[dist.get_rank()])
    ddp.register_comm_hook(None if state == "None" else commhooks.CastState(), commhooks.bf16_hook)
    ddp(inputs()).sum().backward()
    alone = linears(3)
    alone(inputs()).sum().backward()
    for p, q in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2**-8, atol=0)


@pytest.mark.parametrize("state", ["None", "CastState"])
def test_the_group_is_the_models_own(ranks, state):
    """torch's hooks silently take the whole world where their group is None."""
    ranks(2, subgroup, state)


def other_group(plain):
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    ddp = DDP(linears(2))
    state = commhooks.PowerSGDState(alone)

    def register_and_train():
        if plain:
            ddp.register_comm_hook(state, commhooks.powersgd_hook)
        else:
            commhooks.register(ddp, commhooks.powersgd_hook, state)
        train(ddp, 1)

    with pytest.raises(ValueError, match=r"process_group has ranks \[\d\], but the DDP model .* ranks \[0, 1\]"):
        register_and_train()


@pytest.mark.parametrize("plain", [True, False])
def test_another_group_than_the_models_is_refused(ranks, plain):
    ranks(2, other_group, plain)


def group_as_state():
    group = dist.new_group([0, 1])
    ddp = DDP(linears(2))
    ddp.register_comm_hook(group, commhooks.fp16_hook)
    train(ddp, 2)
    assert_replicas_equal(ddp)


def test_a_process_group_as_state(ranks):
    ranks(2, group_as_state)


def model_replaced():
    state = commhooks.PowerSGDState(start_powerSGD_iter=0)
    module = linears(3)
    for _ in range(2):
        ddp = DDP(module)
        ddp.register_comm_hook(state, commhooks.powersgd_hook)
        train(ddp, 2)
        del ddp
    assert state.step == 4


def test_a_state_goes_on_when_its_model_is_wrapped_anew(ranks):
    ranks(2, model_replaced)


def wrong_state():
    ddp = DDP(linears(2))
    ddp.register_comm_hook(None, commhooks.powersgd_hook)
    with pytest.raises(TypeError, match="powersgd_hook takes a PowerSGDState, not None"):
        train(ddp, 1)


def test_a_wrong_state_is_named(ranks):
    ranks(2, wrong_state)


async def failing(state, bucket, comm):
    result = await allreduce(state, bucket, comm)
    if bucket.index == 1 and state.step == 1 and comm.rank in state.failing_ranks:
        raise ArithmeticError("no such root")
    return result


def failing_hook(state, bucket):
    return _run(failing, commhooks.HookState, state, bucket)


def failure(executor, failing_ranks):
    ddp = DDP(linears(4), bucket_cap_mb=0.02)
    state = commhooks.HookState(executor=executor)
    state.failing_ranks = failing_ranks
    ddp.register_comm_hook(state, failing_hook)
    start = time.monotonic()
    with pytest.raises(ArithmeticError, match="no such root") as caught:
        train(ddp, 3)
    (note,) = caught.value.__notes__
    assert note.startswith("in commhooks failing, step 1, bucket 1 (parameters: ")
    assert ".weight" in note
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("executor", ["inline", "pipelined"])
def test_an_algorithm_that_raises_is_heard_on_every_rank(ranks, executor):
    """Through Future.set_exception, DDP would show "Unable to cast ... to Tensor"."""
    ranks(2, failure, executor, (0, 1))


async def goes_on(_, bucket, comm):
    mean = await comm.all_reduce(bucket.buffer, last=True)
    return await comm.all_reduce(mean)


def goes_on_hook(state, bucket):
    return _run(goes_on, commhooks.HookState, state, bucket)


def goes_on_after_its_last(executor):
    ddp = DDP(linears(3))
    ddp.register_comm_hook(commhooks.HookState(executor=executor), goes_on_hook)
    with pytest.raises(RuntimeError, match=r"goes_on awaited AllReduce.* after its last collective"):
        ddp(inputs()).sum().backward()


@pytest.mark.parametrize("executor", ["inline", "pipelined"])
def test_a_collective_after_the_last_is_refused(ranks, executor):
    """For the ranks may come to it at different times."""
    ranks(2, goes_on_after_its_last, executor)


def dead_backward():
    """A step that fails is followed by a new model with the same state: nothing of the old is in flight."""
    module = linears(4)
    ddp = DDP(module, bucket_cap_mb=0.02)
    state = commhooks.HookState(executor="pipelined")
    state.failing_ranks = (0, 1)
    ddp.register_comm_hook(state, failing_hook)
    with pytest.raises(ArithmeticError):
        train(ddp, 3)
    assert state.binding.executor._tasks
    state.failing_ranks = ()
    group = ddp.process_group
    del ddp
    again = DDP(module, bucket_cap_mb=0.02, process_group=group)
    again.register_comm_hook(state, failing_hook)
    train(again, 3)
    assert_replicas_equal(again)


def test_a_backward_that_died_leaves_nothing_behind(ranks):
    ranks(2, dead_backward)


SHORT_RUNS = """
import os, sys, torch, torch.distributed as dist, torch._dynamo, commhooks
from torch.nn.parallel import DistributedDataParallel as DDP

def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ddp = DDP(torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3))), bucket_cap_mb=0.004)
    ddp.register_comm_hook(commhooks.PowerSGDState(start_powerSGD_iter=0), commhooks.powersgd_hook)
    for _ in range(3):
        ddp(torch.ones(2, 32)).sum().backward()
    last = dist.barrier(async_op=True)
    last.wait()
    dist.destroy_process_group()
    return last

torch.set_num_threads(1)
statuses, last = [], None
for launch in range(int(sys.argv[1])):
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            last = run(rank, f"{sys.argv[2]}/store{launch}")
            break
    if last is not None:
        break  # a rank: on to the end of the interpreter
    statuses += [os.waitpid(rank, 0)[1] for rank in ranks]
if last is None:
    print(statuses)
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("processes", "launches"), [(1, 10), (2, 1), pytest.param(1, 50, marks=pytest.mark.long)])
def test_launches_end_with_status_zero(tmp_path, processes, launches):
    """Whole interpreters: a thread or a collective left behind aborts one at its end now and then.

    So does torch's own `dist.barrier()` before the end, in 2 of 40 launches of plain DDP here: gloo's thread lets go of
    the collective a moment after wait() has returned, and may need an interpreter for it that is gone by then. The
    last collective is held until the end.

    Most launches are forked from a process that has imported everything, and end as any interpreter does; some begin
    anew.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for i in range(processes):
        (tmp_path / str(i)).mkdir()
        command = [sys.executable, "-c", SHORT_RUNS, str(launches), str(tmp_path / str(i))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=350, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{[0] * 2 * launches}\n", done.stderr

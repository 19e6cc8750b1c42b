"""Checkpoints of training over real process groups: what is resumed is as if it had never stopped."""

import gc

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import HOOKS, inputs, linears
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks

CAPS = [0.02, 25]  # MB; 0.02 is about one layer
SAVED_WITH = 0.02


class Training:
    def __init__(self, hook, cap, group=None):
        self.ddp = DDP(linears(4), bucket_cap_mb=cap, process_group=group)
        function, state_type, options = HOOKS[hook]
        self.state = commhooks.register(self.ddp, function, state_type(**options))
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)

    def train(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            (self.ddp(inputs(step)) - 1).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def parameters(self):
        return torch.cat([p.detach().flatten() for p in self.ddp.parameters()]).numpy()

    def save(self, path):
        parts = {"model": self.ddp.module, "optimizer": self.optimizer, "scheduler": self.scheduler, "hook": self.state}
        torch.save({name: part.state_dict() for name, part in parts.items()}, f"{path}-{dist.get_rank()}.pt")

    def load(self, path):
        saved = torch.load(f"{path}-{dist.get_rank()}.pt")  # with the default, weights_only
        parts = {"model": self.ddp.module, "optimizer": self.optimizer, "scheduler": self.scheduler, "hook": self.state}
        for name, part in parts.items():
            part.load_state_dict(saved[name])


def train_and_save(hooks, folder, ranks):
    group = dist.new_group(ranks) if ranks else None
    if ranks and dist.get_rank() not in ranks:
        return None
    ends = {}
    for hook in hooks:
        straight = Training(hook, SAVED_WITH, group)
        straight.train(range(10))
        ends[hook] = straight.parameters()
        stopped = Training(hook, SAVED_WITH, group)
        stopped.train(range(5))
        stopped.save(folder / hook)
    return ends


def resume(hooks, folder, ranks, caps):
    group = dist.new_group(ranks) if ranks else None
    if ranks and dist.get_rank() not in ranks:
        return None
    ends = {}
    for hook in hooks:
        for cap in caps:
            training = Training(hook, cap, group)
            training.load(folder / hook)
            assert training.state.step == 5
            training.train(range(5, 10))
            ends[hook, cap] = training.parameters()
    return ends


@pytest.mark.parametrize(("world_size", "members"), [(2, None), (3, [0, 2])], ids=["default group", "subgroup"])
def test_resumed_training_is_the_same_to_the_bit(ranks, tmp_path, world_size, members):
    """Catches: what the state dict forgets; what DDP's first buckets, or others, change."""
    hooks = list(HOOKS) if members is None else ["powersgd alternating", "topk"]
    caps = CAPS if members is None else CAPS[-1:]
    straight = ranks(world_size, train_and_save, hooks, tmp_path, members)
    resumed = ranks(world_size, resume, hooks, tmp_path, members, caps)
    for rank in members or range(world_size):
        different = [case for case, end in resumed[rank].items() if not np.array_equal(end, straight[rank][case[0]])]
        assert not different


def distributed_checkpoint(folder):
    hook = "powersgd alternating"
    first = Training(hook, SAVED_WITH)
    first.train(range(4))
    dcp.save({"model": first.ddp.module.state_dict(), "hook": first.state}, checkpoint_id=folder)
    second = Training(hook, CAPS[-1])
    model = second.ddp.module.state_dict()
    dcp.load({"model": model, "hook": second.state}, checkpoint_id=folder)
    assert second.state.step == 4
    mine, loaded = first.state.state_dict(), second.state.state_dict()
    rank = f"rank{dist.get_rank()}"
    assert mine[rank].pop("counters") == loaded[rank].pop("counters")
    for part in (rank, "common"):
        for memory, tensors in mine[part].items():
            assert all(torch.equal(x, loaded[part][memory][name]) for name, x in tensors.items())
    return mine[rank]["residual"]["0.weight"].numpy()


@pytest.mark.filterwarnings("ignore")  # in the ranks
def test_distributed_checkpoint_keeps_every_ranks_own_part(ranks, tmp_path):
    """Catches: equal keys on all ranks, of which torch.distributed.checkpoint saves one rank's."""
    first, second = ranks(2, distributed_checkpoint, tmp_path / "checkpoint")
    assert not np.array_equal(first, second)


def other_models():
    saved = Training("powersgd", 25).state.state_dict()
    ddp = DDP(linears(3))
    state = commhooks.PowerSGDState(start_powerSGD_iter=0)
    state.load_state_dict(saved)  # its model is not known yet
    with pytest.raises(ValueError, match=r"3\.weight: shape \(64, 64\).* in it, nothing here"):
        commhooks.register(ddp, commhooks.powersgd_hook, state)
    with pytest.raises(ValueError, match="state: PowerSGDState in it, TopKState here"):
        commhooks.TopKState().load_state_dict(saved)


def test_a_state_of_another_model_is_refused_when_registered(ranks):
    ranks(2, other_models)


def different_steps():
    training = Training("randomk", 25)
    training.train(range(2))
    early = training.state.state_dict()
    training.train(range(2))
    with pytest.raises(ValueError, match="step is 4 on rank 0 and 2 on rank 1"):
        training.state.load_state_dict(early if dist.get_rank() else training.state.state_dict())
    with pytest.raises(ValueError, match="rank 1: the state dict does not fit"):
        training.state.load_state_dict({**early, "world_size": 5} if dist.get_rank() else early)


def test_ranks_that_load_different_steps_are_all_told(ranks):
    """Catches: checkpoints of which one rank's is older, after which ranks would silently do different things."""
    ranks(2, different_steps)


def another_model_with_the_same_state():
    training = Training("powersgd", 25)
    training.train(range(3))
    state, before = training.state, training.state.state_dict()
    del training
    gc.collect()
    ddp = DDP(linears(4))
    commhooks.register(ddp, commhooks.powersgd_hook, state)
    rank = f"rank{dist.get_rank()}"
    after = state.state_dict()
    assert all(torch.equal(x, after[rank]["residual"][name]) for name, x in before[rank]["residual"].items())
    assert sum(len(memory.pieces) for memory in state.own.values()) == 0  # nothing of the old model is held


def test_a_state_goes_on_with_a_new_model(ranks):
    """Catches: residuals of parameters that are gone, held for ever, while the new ones begin at zero."""
    ranks(2, another_model_with_the_same_state)

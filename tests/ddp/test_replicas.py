"""The replica check: what it sees, what it says, and that it can run anywhere in training."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from models import assert_replicas_equal, inputs, linears, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks
from commhooks.replicas import _PIECE, ReplicaError, check_replicas, checksums

CPU = torch.device("cpu")
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float8_e4m3fn),
]


def checksum(x):
    (one,) = checksums([x], CPU)
    return one


def some(dtype, *shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 100
    return x > 0 if dtype is torch.bool else x.to(dtype)


@given(
    st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    st.data(),
)
def test_bits_and_their_order_decide(dtype, values, data):
    """Catches: a sum that a swap, or two changes of the same bit, leave as it is."""
    x = torch.tensor(values).to(dtype)
    bits = 8 * x.element_size()
    flips = data.draw(st.sets(st.tuples(st.integers(0, len(x) - 1), st.integers(0, bits - 1)), min_size=1, max_size=4))
    y = x.clone()
    for place, bit in flips:
        y[place] ^= torch.tensor(1 << bit if bit < 63 else -(1 << 63)).to(dtype)
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(y)
    for order in (x.flip(0), x.roll(1)):
        assert (checksum(x) == checksum(order)) == torch.equal(x, order)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    x = some(dtype, 7, 9)
    y = x.clone()
    y[3, 4], y[5, 6] = x[5, 6], x[3, 4]
    assert checksum(x) == checksum(x.t().contiguous().t()) == checksum(torch.stack([x, y], -1)[..., 0])
    assert (checksum(x) == checksum(y)) == torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    assert checksum(x) != checksum(x.roll(1, 1))
    assert checksum(x[:1, :1][:, ::2]) == checksum(x[0, 0])
    assert checksum(x[:0]) == checksum(x[:, :0])


def test_values_that_compare_otherwise_than_their_bits():
    zeros = torch.zeros(4)
    assert checksum(zeros) != checksum(-zeros)
    signs = zeros.double()
    signs[1::2] *= -1  # two signs of 8-byte words: in a sum modulo 2**64 both would be lost
    assert checksum(signs) != checksum(zeros.double())
    nan = torch.tensor([math.nan])
    assert checksum(nan) == checksum(nan.clone())
    assert checksum(nan) != checksum((nan.view(torch.int32) + 1).view(torch.float32))


def test_long_tensors():
    """Every piece counts, and its place."""
    x = torch.arange(2 * _PIECE + 3, dtype=torch.int32)
    swapped = torch.cat([x[_PIECE : 2 * _PIECE], x[:_PIECE], x[2 * _PIECE :]])
    seen = {checksum(x), checksum(swapped)}
    for place in (0, _PIECE - 1, _PIECE, 2 * _PIECE + 2):
        y = x.clone()
        y[place] += 1
        seen.add(checksum(y))
    assert len(seen) == 6


def test_no_two_of_many_are_alike():
    """Catches: factors that are not as random as they look."""
    eye = torch.eye(1024)
    assert len(set(checksums([*eye.unbind(), *(-eye).unbind(), *eye.cumsum(0).unbind()], CPU))) == 3 * 1024 - 1


class Mixed(nn.Module):
    """Parameters and buffers of several kinds; one parameter does not train, one is transposed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(4, 16).bfloat16().t())
        self.nothing = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x):
        return self.layers(x) @ self.transposed.float()


def trained():
    ddp = DDP(Mixed())
    optimizer = torch.optim.AdamW(ddp.parameters())
    for step in range(2):
        optimizer.zero_grad()
        ddp(inputs(step, width=16)).square().mean().backward()
        optimizer.step()
    return ddp, optimizer


def same():
    ddp, optimizer = trained()
    assert check_replicas(ddp) == check_replicas(ddp, optimizer) == check_replicas(ddp, repair=True) == []
    with pytest.raises(ReplicaError, match=r"layers\.1\.running_mean differs on rank 1 from rank 0"):
        check_replicas(ddp, buffers=True)  # each rank has seen other data
    assert check_replicas(ddp, buffers=True, repair=True) == ["layers.1.running_mean", "layers.1.running_var"]
    ddp(inputs(width=16))
    ddp.eval()(inputs(width=16))  # sends rank 0's, and changes nothing
    assert check_replicas(ddp, buffers=True) == []


def test_replicas_that_are_the_same(ranks):
    ranks(2, same)


def differ():
    ddp, optimizer = trained()
    me = dist.get_rank()
    layers, last = ddp.module.layers, ddp.module.layers[2].bias
    before = [p.clone() for p in ddp.parameters()]
    with torch.no_grad():
        if me in (1, 3):
            layers[2].weight[0, 0].mul_(-1)
        if me == 2:
            ddp.module.transposed[0, 3] += 1
        if me == 3:
            optimizer.state[last]["exp_avg"][1] *= 1 + 2**-22
            optimizer.state[last]["step"] += 1
    # A module's own parameters come before those of its submodules.
    found = r"^transposed differs on rank 2 from rank 0; in all, 2 of 9 tensors differ, on ranks 1, 2, 3$"
    with pytest.raises(ReplicaError, match=found):
        check_replicas(ddp)
    with pytest.raises(ReplicaError, match=r"in all, 4 of 30 tensors differ, on ranks 1, 2, 3$"):
        check_replicas(ddp, optimizer)
    names = ["transposed", "layers.2.weight", "exp_avg of layers.2.bias", "step of layers.2.bias"]
    assert check_replicas(ddp, optimizer, repair=True) == names
    assert check_replicas(ddp, optimizer) == []
    for p, q in zip(ddp.parameters(), before, strict=True):
        assert torch.equal(p, q)
    assert ddp.module.transposed.stride() == (1, 16)


def test_differences_are_named_on_every_rank_and_repaired_only_when_asked(ranks):
    ranks(4, differ)


def other_tensors():
    me = dist.get_rank()
    ddp = DDP(linears(2, width=4))
    optimizer = torch.optim.SGD(ddp.parameters(), momentum=0.9)
    if me == 1:
        train(ddp, 1, width=4)  # nothing of this optimizer
        optimizer.step()
    else:
        train(ddp, 1, width=4)
    missing = r"tensor 4 is missing on rank 0 and momentum_buffer of 0\.weight \(4, 4\) float32 on rank 1"
    with pytest.raises(ReplicaError, match=missing):
        check_replicas(ddp, optimizer, repair=True)
    ddp.module[1].bias.data = torch.zeros(4 + (me == 2), dtype=torch.float64 if me else torch.float32)
    with pytest.raises(ReplicaError, match=r"tensor 3 is 1\.bias \(4,\) float32 on rank 0 and 1\.bias \(4,\) float64 "):
        check_replicas(ddp)
    with pytest.raises(ReplicaError, match=r"tensor 2 is 1\.weight \(4, 4\) .* and other\.weight .* on rank 2"):
        check_replicas(renamed(ddp) if me == 2 else ddp)


def renamed(ddp):
    first, second = ddp.module
    ddp.module = nn.Sequential()
    ddp.module.add_module("0", first)
    ddp.module.add_module("other", second)
    return ddp


def test_other_tensors_are_an_error_not_a_hang(ranks):
    ranks(3, other_tensors)


def subgroups():
    """Rank 2 of the world is rank 0 of the model's group, and others know nothing of it."""
    me = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DDP(linears(2), process_group=groups[me // 2])
    with torch.no_grad():
        ddp.module[1].bias[0] = me
    with pytest.raises(ReplicaError, match=r"^1\.bias differs on rank 1 from rank 0; in all, 1 of 4"):
        check_replicas(ddp)
    assert check_replicas(ddp, repair=True) == ["1.bias"]
    assert ddp.module[1].bias[0] == 2 * (me // 2)


def test_the_group_is_the_models(ranks):
    ranks(4, subgroups)


def ignored():
    module = linears(2)
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    ddp = DDP(module)
    ddp.module[0].weight.data += dist.get_rank()
    assert check_replicas(ddp) == []


def test_parameters_that_ddp_ignores_are_left_out(ranks):
    ranks(2, ignored)


def in_a_hook(executor):
    ddp = DDP(linears(6), bucket_cap_mb=0.02)
    state = commhooks.HookState(executor=executor)

    def checking_hook(state, bucket) -> torch.futures.Future[torch.Tensor]:
        check_replicas(ddp)
        return commhooks.allreduce_hook(state, bucket)

    ddp.register_comm_hook(state, checking_hook)
    train(ddp, 3)
    assert_replicas_equal(ddp)
    if dist.get_rank() == 1:
        ddp.module[3].bias.data[5] += 1
    with pytest.raises(ReplicaError, match=r"3\.bias differs on rank 1"):
        train(ddp, 1)


@pytest.mark.parametrize("executor", ["inline", "pipelined"])
def test_inside_a_hook_between_its_collectives(ranks, executor):
    ranks(2, in_a_hook, executor)


def every(period):
    ddp = DDP(linears(3))
    commhooks.register(ddp, commhooks.allreduce_hook, commhooks.HookState(check_replicas_every=period))
    train(ddp, period)
    if dist.get_rank() == 1:
        ddp.module[2].weight.data[0, 0] += 1
    with pytest.raises(ReplicaError, match=r"2\.weight differs on rank 1"):
        train(ddp, 1)
    ddp = DDP(linears(3))
    commhooks.register(ddp, commhooks.allreduce_hook, commhooks.HookState())
    ddp.module[2].weight.data[0, 0] += dist.get_rank()
    train(ddp, 3)  # nobody has asked


def test_every_so_many_steps(ranks):
    ranks(2, every, 3)


def test_arguments():
    with pytest.raises(TypeError, match="ddp is a Sequential"):
        check_replicas(linears(1))


def wrong_optimizer():
    with pytest.raises(TypeError, match="optimizer is a float"):
        check_replicas(DDP(linears(1)), 0.1)


def test_optimizer_that_is_none(ranks):
    ranks(1, wrong_optimizer)

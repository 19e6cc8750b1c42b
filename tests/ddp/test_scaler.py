"""Mixed-precision training with a GradScaler over real process groups: overflows, and scales that change."""

import torch
import torch.distributed as dist
from models import HOOKS, inputs, linears
from torch.nn.parallel import DistributedDataParallel as DDP

import commhooks

OVERFLOW = 4  # the step at which rank 1's loss is infinite


def train_with_overflow(hook, *, skipping):
    """The parameters after each step, and the gradient norms; without the step that overflows if `skipping`."""
    ddp = DDP(linears(4), bucket_cap_mb=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    function, state_type, options = HOOKS[hook]
    state = commhooks.register(ddp, function, state_type(**options, grad_scaler=scaler))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    parameters, finite = [], []
    for step in range(8):
        if skipping and step == OVERFLOW:
            continue
        optimizer.zero_grad()
        loss = (ddp(inputs(step)) - 1).square().mean()
        if step == OVERFLOW and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        finite.append([p.grad.isfinite().all().item() for p in ddp.parameters()])
        scaler.step(optimizer)
        scaler.update()
        parameters.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]))
    return state, parameters, finite


def overflow(hooks):
    for hook in hooks:
        state, parameters, finite = train_with_overflow(hook, skipping=False)
        _, undisturbed, _ = train_with_overflow(hook, skipping=True)
        assert not any(finite.pop(OVERFLOW)), hook
        assert all(map(all, finite)), hook
        assert torch.equal(parameters[OVERFLOW], parameters[OVERFLOW - 1]), hook
        assert state.step == 7 or not state.has_something_to_lose
        for x, y in zip(parameters[:OVERFLOW] + parameters[OVERFLOW + 1 :], undisturbed, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=lambda text, hook=hook: f"{hook}: {text}")


def test_an_overflow_on_one_rank_is_a_step_that_has_not_been(ranks):
    """Catches: a rank that goes on alone; residuals or factors with the overflow in them, or of another loss scale."""
    ranks(2, overflow, list(HOOKS))


def unscaled_clipping():
    """Clipping sees what the optimizer will see: the averaged, decompressed gradients."""
    ddp = DDP(linears(4), bucket_cap_mb=0.02)
    state = commhooks.PowerSGDState(start_powerSGD_iter=0)
    ddp.register_comm_hook(state, commhooks.powersgd_hook)
    for step in range(3):
        ddp.zero_grad()
        (100 * ddp(inputs(step))).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        clipped = torch.stack([p.grad.norm() for p in ddp.parameters()]).norm()
        assert norm > 1
        torch.testing.assert_close(clipped, torch.tensor(1.0), rtol=1e-4, atol=0)
        norms = [torch.empty(()) for _ in range(2)]
        dist.all_gather(norms, norm)
        assert norms[0] == norms[1]
    residual = torch.cat(list(state.feedback.residuals.values()))
    assert residual.norm() > 1  # what is owed is not clipped


def test_clipping_after_backward(ranks):
    ranks(2, unscaled_clipping)

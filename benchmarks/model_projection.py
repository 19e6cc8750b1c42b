"""Projection: what hooks would do for large models on many nodes, from shapes, the cost model and assumptions alone.

Nothing here is measured. Every assumption is a field of `Assumptions` or said in `ASSUMED`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import ceil, log2
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt

from benchmarks.architectures import ARCHITECTURES, Architecture
from benchmarks.model_costs import Transfer, bytes_on_link, rounds, settle, transfers
from benchmarks.tables import Table
from commhooks import CastState, HookState, PowerSGDState, RandomKState, TopKState
from commhooks.bucket import Layout

NODES = (2, 4, 8, 16, 64, 256, 1024)
RATES = (1e9, 2.5e9, 5e9, 10e9, 25e9, 50e9, 100e9)
SHOWN_NODES = (8, 256)
BACKWARD = 2 / 3  # of the computation
GAIN = 0.05  # of a step that a hook must save to be said to pay


@dataclass(frozen=True)
class Assumptions:
    """Of a GPU, and of the network.

    Args:
        flops: operations a second that training sustains, half precision.
        memory: bytes a second that a hook's kernels move.
        launch: seconds for one kernel launch of a hook.
        alpha: seconds for one round of a collective.
    """

    flops: float = 150e12
    memory: float = 1.0e12
    launch: float = 5e-6
    alpha: float = 30e-6


ASSUMED = """\
Projection, not measurement. Assumed: one rank a node, or several that reduce among themselves for free before and
after (commhooks has no such hook yet; without one, an all_gather among all ranks of all nodes carries more);
{tera:g} TFLOP/s sustained; two thirds of a step are backward; DDP's default buckets; a hook's kernels move
{memory:g} TB/s and share the GPU with backward, so their time is added to it; {launch:g} us a launch, and no more
for orthogonalization. A round of a collective takes {alpha:g} us and the link is used perfectly; an all_reduce is
the faster of a ring and a double tree, an all_gather and an all_to_all are rings. No other traffic, no stragglers.
Gradients are float32, of the 7B model bfloat16: there bf16 saves nothing. Steps to a loss are no part of it: see
the convergence runs."""


@dataclass(frozen=True)
class Hook:
    """A hook in the projection.

    Args:
        label: for tables.
        state: makes its options; None is plain DDP.
        passes: bytes that its kernels read or write for one gradient element, besides two passes over the gradient.
        launches: of kernels, a bucket.
    """

    label: str
    state: Callable[[], HookState] | None
    passes: float
    launches: int

    def arithmetic(self, layout: Layout, gradient_bytes: int, assumed: Assumptions) -> float:
        """Seconds of the hook's own kernels for a bucket."""
        if self.state is None:
            return 0.0
        numel = sum(x.numel for x in layout.slices)
        return numel * (2 * gradient_bytes + self.passes) / assumed.memory + self.launches * assumed.launch


def _powersgd(rank: int, *, alternating: bool = False) -> Callable[[], HookState]:
    return lambda: PowerSGDState(
        matrix_approximation_rank=rank, start_powerSGD_iter=0, wire_dtype=torch.bfloat16, alternating=alternating
    )


# Passes as counted for benchmarks.kernels: residual in and out, M written and read, what is sent written and read.
HOOKS = (
    Hook("plain DDP", None, 0, 0),
    Hook("bf16", CastState, 4, 2),
    Hook("PowerSGD rank 4", _powersgd(4), 20, 8),
    Hook("PowerSGD rank 16", _powersgd(16), 20, 8),
    Hook("PowerSGD rank 4, alternating", _powersgd(4, alternating=True), 16, 6),
    Hook("top-k 1 %", lambda: TopKState(density=0.01), 12, 8),
    Hook("random-k 1 %", lambda: RandomKState(density=0.01), 12, 8),
)


def collective_seconds(transfer: Transfer, world_size: int, rate: float, alpha: float) -> float:
    """A ring's time; for all_reduce a double binary tree's, where that is shorter."""
    on_link = bytes_on_link(transfer.kind, transfer.nbytes, world_size)
    ring = alpha * rounds(transfer.kind, world_size) + on_link * 8 / rate
    if transfer.kind != "all_reduce":
        return ring
    return min(ring, alpha * 2 * ceil(log2(world_size)) + 2 * transfer.nbytes * 8 / rate)


@cache
def plan(architecture: Architecture, hook: Hook, world_size: int) -> list[tuple[Layout, list[Transfer]]]:
    state = settle(hook.state()) if hook.state else None
    return [(x, transfers(state, x, architecture.gradient_bytes, world_size)) for x in _buckets(architecture)]


@cache
def _buckets(architecture: Architecture) -> list[Layout]:
    return architecture.buckets()


def bytes_a_step(architecture: Architecture, hook: Hook, world_size: int) -> float:
    """Bytes that a rank sends in a step, by the formulas of `commhooks.comm`."""
    return sum(x.bytes_sent(world_size) for _, found in plan(architecture, hook, world_size) for x in found)


def step_seconds(architecture: Architecture, hook: Hook, world_size: int, rate: float, assumed: Assumptions) -> float:
    """A step: backward hands over bucket after bucket; a second stream compresses and reduces one after the other."""
    compute = architecture.flops / assumed.flops
    found = plan(architecture, hook, world_size)
    per_element = compute * BACKWARD / architecture.numel()
    clock = stream = compute * (1 - BACKWARD)
    for layout, collectives in found:
        clock += sum(x.numel for x in layout.slices) * per_element
        arithmetic = hook.arithmetic(layout, architecture.gradient_bytes, assumed)
        stream = max(stream, clock) + arithmetic
        stream += sum(collective_seconds(x, world_size, rate, assumed.alpha) for x in collectives)
        clock += arithmetic
    return max(clock, stream)


def pays_to(architecture: Architecture, hook: Hook, world_size: int, assumed: Assumptions) -> float | None:
    """The highest of many rates at which the hook's step is clearly shorter than both bf16's and plain DDP's."""
    for rate in np.geomspace(100e9, 0.1e9, 121):
        ours, *others = (
            step_seconds(architecture, x, world_size, float(rate), assumed) for x in (hook, HOOKS[0], HOOKS[1])
        )
        if ours < (1 - GAIN) * min(others):
            return float(rate)
    return None


def section(assumed: Assumptions | None = None) -> str:
    """The projection as Markdown."""
    assumed = assumed or Assumptions()
    text = ASSUMED.format(
        tera=assumed.flops / 1e12, memory=assumed.memory / 1e12, launch=assumed.launch * 1e6, alpha=assumed.alpha * 1e6
    )
    parts = ["### Projection", text]
    for architecture in ARCHITECTURES:
        compute = architecture.flops / assumed.flops
        what = f"{architecture.name}, {architecture.numel() / 1e6:,.1f}M parameters, {architecture.batch} a rank"
        parts.append(f"**Projection: {what}; {compute * 1e3:.0f} ms a step without communication.**")
        parts += [_step_table(architecture, nodes, assumed).markdown() for nodes in SHOWN_NODES]
        parts.append(_pays_table(architecture, assumed).markdown())
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _step_table(architecture: Architecture, nodes: int, assumed: Assumptions) -> Table:
    columns = ["hook", "MB a step", *(f"{rate / 1e9:g} Gbit/s" for rate in RATES)]
    table = Table(f"Projection: ms a step of {architecture.name} on {nodes} nodes", columns)
    for hook in HOOKS:
        times = [step_seconds(architecture, hook, nodes, rate, assumed) for rate in RATES]
        sent = bytes_a_step(architecture, hook, nodes) / 1e6
        table.rows.append([hook.label, f"{sent:,.1f}", *(f"{x * 1e3:,.0f}" for x in times)])
    return table


def _pays_table(architecture: Architecture, assumed: Assumptions) -> Table:
    title = (
        f"Projection: {architecture.name}, up to which Gbit/s a hook saves {GAIN:.0%} of the better of bf16 and plain"
    )
    table = Table(title, ["hook", *(f"{n} nodes" for n in NODES)])
    for hook in HOOKS[2:]:
        rates = [pays_to(architecture, hook, nodes, assumed) for nodes in NODES]
        table.rows.append([hook.label, *("never" if x is None else _gbit(x) for x in rates)])
    return table


def _gbit(rate: float) -> str:
    return "100 and more" if rate >= 99e9 else f"{rate / 1e9:.2g}"


def plot(folder: Path, assumed: Assumptions | None = None) -> Path:
    """Step time against link rate for every model, on the larger number of nodes shown."""
    mpl.use("Agg")
    figure, axes = plt.subplots(1, len(ARCHITECTURES), figsize=(13, 4.5), layout="constrained")
    rates = np.geomspace(RATES[0], RATES[-1], 41)
    for axis, architecture in zip(axes, ARCHITECTURES, strict=True):
        for hook in HOOKS:
            of = partial(step_seconds, architecture, hook, SHOWN_NODES[-1], assumed=assumed or Assumptions())
            axis.plot(rates / 1e9, [of(rate=float(rate)) * 1e3 for rate in rates], label=hook.label)
        axis.set(xscale="log", yscale="log", xlabel="Gbit/s", title=f"projection: {architecture.name}")
    axes[0].set_ylabel(f"ms a step, {SHOWN_NODES[-1]} nodes")
    axes[0].legend(fontsize="small")
    path = folder / "model-projection.png"
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path

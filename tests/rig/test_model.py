"""The cost model: fitted to made samples, held against the hooks' own bytes, and its projection's shapes."""

import random
from math import prod

import pytest
import torch

from benchmarks import model
from benchmarks.architectures import ARCHITECTURES, ddp_buckets
from benchmarks.model_checks import check_collectives, check_steps, fit_all, state_of
from benchmarks.model_costs import (
    KINDS,
    Cost,
    Link,
    Sample,
    bytes_on_link,
    exposed,
    fit,
    hierarchical,
    rounds,
    settle,
    transfers,
)
from benchmarks.model_projection import HOOKS, Assumptions, bytes_a_step, pays_to, section, step_seconds
from commhooks import CastState, PowerSGDState, RandomKState, TopKState
from commhooks.algorithms.cast import bf16
from commhooks.algorithms.powersgd import powersgd
from commhooks.algorithms.randomk import randomk
from commhooks.algorithms.topk import topk
from commhooks.comm import AllGather, AllReduce, AllToAll
from commhooks.simulate import bytes_sent

LINKS = [Link(None), Link(1e8, 1e-3), Link(1e9, 1e-3)]
SIZES = (1_000, 30_000, 1_000_000, 8_000_000)
TOTALS = {"ResNet-50": 25_557_032, "GPT-2 small": 124_439_808, "Llama 7B": 6_738_415_616}


@pytest.mark.parametrize("kind", KINDS)
def test_the_fit_recovers_what_made_the_samples(kind):
    """10 % noise on every sample, as a busy machine's."""
    noise = random.Random(0)
    true = Cost(alpha=2e-4, beta=2e-9, share=1.4)
    samples = [
        Sample(kind, nbytes, size, link, true.seconds(kind, nbytes, size, link) * noise.uniform(0.9, 1.1))
        for nbytes in SIZES
        for size in (2, 4)
        for link in LINKS[:2]
        for _ in range(5)
    ]
    found = fit(samples)
    assert found.alpha == pytest.approx(true.alpha, rel=0.1)
    assert found.beta == pytest.approx(true.beta, rel=0.1)
    assert found.share == pytest.approx(true.share, rel=0.05)
    for nbytes in SIZES:
        unseen = true.seconds(kind, nbytes, 8, LINKS[2])
        assert found.seconds(kind, nbytes, 8, LINKS[2]) == pytest.approx(unseen, rel=0.15)


def test_a_fit_without_limited_links_is_refused():
    with pytest.raises(ValueError, match="0 with one"):
        fit([Sample("all_reduce", 1000, 2, Link(None), 1e-3)] * 3)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_bytes_are_those_that_comm_counts(world_size):
    x = torch.empty(world_size, 12)
    for kind, collective in (("all_reduce", AllReduce), ("all_gather", AllGather), ("all_to_all", AllToAll)):
        assert bytes_on_link(kind, x.nbytes, world_size) == pytest.approx(collective(x).bytes_sent(world_size))


def test_rounds_of_rings():
    assert [rounds(kind, 4) for kind in ("all_reduce", "all_gather", "all_to_all")] == [6, 3, 3]


def test_a_broadcast_is_a_tree_whose_root_sends_most():
    assert [rounds("broadcast", size) for size in (2, 3, 4, 8)] == [1, 2, 2, 3]
    assert bytes_on_link("broadcast", 100, 8) == 300


STATES = {
    "bf16": (bf16, CastState),
    "powersgd": (powersgd, lambda: PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=0)),
    "powersgd, bf16 wire": (
        powersgd,
        lambda: PowerSGDState(matrix_approximation_rank=3, start_powerSGD_iter=0, wire_dtype=torch.bfloat16),
    ),
    "topk": (topk, TopKState),
    "topk, allgather": (topk, lambda: TopKState(density=0.05, block_size=256, aggregation="allgather")),
    "topk, exact": (topk, lambda: TopKState(density=0.05, selection="exact")),
    "topk, leader": (topk, lambda: TopKState(aggregation="leader")),
    "topk, balanced": (topk, lambda: TopKState(aggregation="balanced", min_numel=500)),
    "randomk": (randomk, lambda: RandomKState(density=0.03)),
}
SHAPES = [(40, 60), (33,), (8, 3, 5, 5), (300, 70), (7,), (20, 20)]


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("name", STATES)
def test_transfers_are_what_the_hook_sends(name, world_size):
    algorithm, make = STATES[name]
    for shapes in (SHAPES, [(33,), (7,)]):  # the second: nothing to compress
        (layout,) = ddp_buckets(shapes, 4, cap_mb=5)
        sent = bytes_sent(algorithm, make(), layout, torch.float32, world_size)
        assert sum(x.bytes_sent(world_size) for x in transfers(make(), layout, 4, world_size)) == pytest.approx(sent)


def test_transfers_of_alternating_half_steps_are_their_mean():
    def make():
        return PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=0, alternating=True)

    (layout,) = ddp_buckets(SHAPES, 4, cap_mb=5)
    state = make()
    *_, left, right = (bytes_sent(powersgd, state, layout, torch.float32, 4) for _ in range(4))
    found = transfers(settle(make()), layout, 4, 4)
    assert left != right
    assert sum(x.bytes_sent(4) for x in found) == pytest.approx((left + right) / 2)


def test_an_unknown_state_is_refused():
    with pytest.raises(TypeError, match="it must be a CastState"):
        transfers("powersgd", ddp_buckets([(2, 2)], 4, 1)[0], 4, 2)


def test_exposed_communication():
    """By hand: what fits under backward costs nothing, and the last bucket always waits."""
    assert exposed([[1.0], [1.0]], [5.0, 5.0]) == 1.0
    assert exposed([[4.0], [1.0]], [1.0, 1.0]) == pytest.approx(4.0)  # starts at 1 and 5, ends at 6
    # At 2 the first bucket's second collective is launched behind the second one's first; then its own follows.
    assert exposed([[1.0, 1.0], [1.0, 1.0]], [1.0, 1.0]) == pytest.approx(3.0)
    # A last collective holds up nothing: the third bucket is ready at 7, when the first two are there.
    assert exposed([[4.0], [1.0], [1.0]], [1.0, 1.0, 5.0]) == pytest.approx(1.0)
    assert exposed([[0.0], [0.0]], [1.0, 1.0]) == 0.0


def test_buckets_are_ddps():
    """The last parameters first, a first bucket of 1 MB by default, and full once the limit is met."""
    shapes = [(1024, 1024)] * 8
    assert [len(x.slices) for x in ddp_buckets(shapes, 4)] == [1, 7]
    assert [len(x.slices) for x in ddp_buckets(shapes, 4, cap_mb=10)] == [3, 3, 2]
    first = ddp_buckets([(2, 3), (5,)], 4, cap_mb=1)[0]
    assert [x.shape for x in first.slices] == [(5,), (2, 3)]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda x: x.name)
def test_totals_of_the_shapes(architecture):
    assert architecture.numel() == TOTALS[architecture.name]
    in_buckets = sum(prod(x.shape) for layout in architecture.buckets() for x in layout.slices)
    assert in_buckets == architecture.numel()


def made_launch(nodes: int, ranks_per_node: int, rate: str, costs: dict[str, Cost]) -> dict:
    """A record as benchmarks.model makes them, by a machine that follows `costs`."""
    link = Link(None) if rate == "none" else Link({"100mbit": 1e8, "1gbit": 1e9}[rate], 1e-3)
    world_size = nodes * ranks_per_node
    samples = [
        {"collective": kind, "nbytes": n, "seconds": [costs[kind].seconds(kind, n, world_size, link)] * 3}
        for kind in KINDS
        for n in SIZES
    ]
    if ranks_per_node > 1:
        seconds = hierarchical(costs, 1_000_000, nodes, ranks_per_node, link)
        samples.append({"collective": "hierarchical all_reduce", "nbytes": 1_000_000, "seconds": [seconds]})
    case = {"nodes": nodes, "ranks_per_node": ranks_per_node, "rate": rate}
    return {"case": case, "measured": {"link_rate": link.rate or 1e10, "samples": samples}}


COSTS = {kind: Cost(1e-4, 1e-9, 1.2) for kind in KINDS}


def test_the_fit_is_checked_on_launches_that_it_has_not_seen():
    records = [made_launch(n, 1, rate, COSTS) for n in (2, 4) for rate in ("100mbit", "none")]
    fitted = fit_all(records)
    unseen = made_launch(2, 2, "1gbit", COSTS)
    checks = check_collectives(unseen, fitted)
    assert {x.what for x in checks} == {*KINDS, "hierarchical all_reduce"}
    assert all(abs(x.error) < 0.02 for x in checks)
    slower = made_launch(2, 1, "1gbit", {kind: Cost(1e-4, 1e-9, 2.4) for kind in KINDS})
    assert min(x.error for x in check_collectives(slower, fitted)) == pytest.approx(-0.5, abs=0.05)


def test_an_unfinished_run_has_a_section():
    fitted = [made_launch(2, 1, rate, COSTS) for rate in ("100mbit", "none")]
    assert "Too few launches" in model.section(fitted[:1])
    text = model.section(fitted)
    assert "| all_reduce | 100 | 1.00 | 1.20 |" in text
    assert "Whole steps were not checked" in text


def bandwidth_record(rate: str, link_rate: float, **step_ms: float) -> dict:
    case = {"nodes": 2, "ranks_per_node": 1, "rate": rate}
    return {
        "case": case,
        "measured": {"link_rate": link_rate, "variants": {k: {"step_ms": v} for k, v in step_ms.items()}},
    }


def test_steps_are_checked_against_their_own_controls():
    """A link that is the bottleneck: 3.78 MB of bf16 at 100 Mbit/s are 302 ms, times the share; some under backward.

    The machine was busier when the slow link was measured.
    """
    free = bandwidth_record("none", 1e10, no_sync=40.0, bf16=50.0, powersgd=48.0)
    slow = bandwidth_record("100mbit", 1e8, no_sync=80.0, bf16=390.0, powersgd=70.0, unheard_of=1.0)
    found = {check.what: check for _, check in check_steps([free, slow], COSTS)}
    assert set(found) == {"bf16", "powersgd"}
    bf16_ms, powersgd_ms = (found[x].predicted * 1e3 for x in ("bf16", "powersgd"))
    assert 302 * 1.2 + 80 + 10 - 60 < bf16_ms < 302 * 1.2 + 80 + 10
    assert 80 + 8 < powersgd_ms < 80 + 8 + 0.13 * 80 * 1.2
    assert state_of("plain") is None


def test_the_projection_knows_what_slow_links_are():
    resnet, seven_b = ARCHITECTURES[0], ARCHITECTURES[2]
    plain, half, rank4, *_ = HOOKS
    assumed = Assumptions()
    at_1g, at_100g = (step_seconds(resnet, plain, 8, rate, assumed) for rate in (1e9, 100e9))
    wire = bytes_a_step(resnet, plain, 8) * 8 / 1e9
    assert wire == pytest.approx(2 * 7 / 8 * 4 * resnet.numel() * 8 / 1e9)
    assert wire < at_1g < wire + 0.02
    assert at_100g < at_1g / 20
    assert step_seconds(resnet, half, 8, 1e9, assumed) == pytest.approx(at_1g / 2, rel=0.05)
    assert pays_to(resnet, rank4, 8, assumed) > 10e9
    # With bfloat16 gradients bf16 has nothing to save.
    assert bytes_a_step(seven_b, half, 8) == bytes_a_step(seven_b, plain, 8)


def test_a_hook_on_a_perfect_network_costs_its_arithmetic():
    free = Assumptions(alpha=0)
    for architecture in ARCHITECTURES:
        for hook in HOOKS:
            arithmetic = sum(hook.arithmetic(x, architecture.gradient_bytes, free) for x in architecture.buckets())
            seconds = step_seconds(architecture, hook, 8, 1e18, free)
            assert seconds == pytest.approx(architecture.flops / free.flops + arithmetic, rel=1e-3)


def test_every_table_of_the_projection_says_that_it_is_one():
    lines = section().splitlines()
    titles = [lines[i - 2] for i, line in enumerate(lines) if line.startswith("| hook")]
    assert len(titles) == 9
    assert all(title.startswith("Projection") for title in titles)

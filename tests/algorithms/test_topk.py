import pytest
import torch
from cases import draw_gradients
from hypothesis import given, strategies as st

from commhooks import RandomKState, TopKState
from commhooks.algorithms.randomk import randomk
from commhooks.algorithms.topk import topk
from commhooks.bucket import lay_out
from commhooks.simulate import Simulation, bytes_sent

AGGREGATIONS = ["allgather", "balanced", "leader"]


def simulation(world_size, **options):
    return Simulation(topk, lambda: TopKState(**options), world_size)


def matrices(*rows):
    return [{"w": torch.tensor([row])} for row in rows]


@pytest.mark.parametrize("selection", ["block", "exact"])
def test_each_rank_sends_its_own_largest(selection):
    ranks = simulation(2, k=1, aggregation="allgather", selection=selection)
    results = ranks.step(matrices([9.0, 0, 0, 1], [0.0, 0, 8, 1]))
    for result, state in zip(results, ranks.states, strict=True):
        assert result["w"].tolist() == [[4.5, 0.0, 4.0, 0.0]]
        assert state.feedback.residuals["w"].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_balanced_selects_the_sum_again_and_owes_what_that_drops():
    """Both ranks' entries lie in the first range: rank 0 adds them up, keeps the larger, and owes the other twice."""
    ranks = simulation(2, k=1, aggregation="balanced")
    results = ranks.step(matrices([9.0, 0, 0, 1], [0.0, 0, 8, 1]))
    assert all(result["w"].tolist() == [[4.5, 0.0, 0.0, 0.0]] for result in results)
    residuals = [state.feedback.residuals["w"].tolist() for state in ranks.states]
    assert residuals == [[0.0, 0.0, 8.0, 1.0], [0.0, 0.0, 0.0, 1.0]]


def test_leader_takes_turns():
    ranks = simulation(2, k=1, aggregation="leader", use_error_feedback=False)
    gradients = [[9.0, 2, 0, 1], [4.0, 2, 8, 1]]
    assert ranks.step(matrices(*gradients))[1]["w"].tolist() == [[6.5, 0.0, 0.0, 0.0]]  # rank 0 chose
    assert ranks.step(matrices(*gradients))[0]["w"].tolist() == [[0.0, 0.0, 4.0, 0.0]]  # rank 1 chose


def test_ranks_in_another_order_give_the_same_where_the_leader_is_the_same():
    gradients = draw_gradients([(20, 30)], 4, torch.float32, 1.0, seed=0)
    options = {"density": 0.1, "aggregation": "leader", "wire_dtype": torch.float32}
    first = simulation(4, **options).step(gradients)[0]["p0"]
    again = simulation(4, **options).step([gradients[0], *reversed(gradients[1:])])[0]["p0"]
    torch.testing.assert_close(again, first)
    assert torch.equal(again != 0, first != 0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("options", [{"density": 1.0}, {"k": 5000}], ids=str)
def test_all_entries_are_the_exact_mean(aggregation, options):
    ranks = simulation(3, aggregation=aggregation, wire_dtype=torch.float32, **options)
    gradients = draw_gradients([(40, 60), (7,)], 3, torch.float32, 1.0, seed=1)
    result = ranks.step(gradients)[0]
    for name, x in result.items():
        torch.testing.assert_close(x, sum(gradient[name] for gradient in gradients) / 3)


@pytest.mark.parametrize("selection", ["block", "exact"])
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)), k=st.integers(1, 30), seed=st.integers(0, 2**31),
    levels=st.integers(1, 50),
)  # fmt: skip
def test_error_of_a_selection(selection, shape, k, seed, levels):
    """|x - C(x)|^2 <= (1 - k / n) |x|^2 (arXiv:1809.07599, eq. 7), and the entries are those that sorting gives.

    Few levels make ties, which the lower index wins.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-levels, levels + 1, shape, generator=generator).float()
    ranks = simulation(1, k=k, selection=selection, block_size=256, wire_dtype=torch.float32, aggregation="allgather")
    sent = ranks.step([{"w": x}])[0]["w"].flatten()
    blocks = [x.flatten()] if selection == "exact" else x.flatten().split(256)
    sent_blocks = [sent] if selection == "exact" else sent.split(256)
    for block, kept in zip(blocks, sent_blocks, strict=True):
        assert (block - kept).square().sum() <= (1 - min(k, len(block)) / len(block)) * block.square().sum() + 1e-3
        order = sorted(range(len(block)), key=lambda i: (-abs(float(block[i])), i))[:k]
        expected = torch.zeros_like(block)
        expected[order] = block[order]
        assert torch.equal(kept, expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_more_entries_than_16_bits_count(aggregation):
    ranks = simulation(2, density=0.01, aggregation=aggregation, wire_dtype=torch.float32)
    gradients = [{"w": torch.randn(300, 400)} for _ in range(2)]
    gradients[0]["w"][-1, -1] = gradients[1]["w"][-1, -1] = 100.0
    result = ranks.step(gradients)[0]["w"]
    assert result[-1, -1] == 100
    assert 0.009 <= (result != 0).float().mean() <= 0.021


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_nan_that_nobody_selects_for_itself_reaches_all(aggregation):
    """With leader the NaN is not where the leader looks; with the others it is selected before all."""
    ranks = simulation(4, k=1, aggregation=aggregation, block_size=256)
    gradients = [{"w": torch.arange(1000.0).view(10, 100)} for _ in range(4)]
    gradients[3]["w"][5, 5] = float("nan")
    for result in ranks.step(gradients):
        assert not result["w"].isfinite().all()


def test_density_falls_to_its_target():
    state = TopKState(density=0.01, warmup_steps=3, start_iter=2)
    counts = []
    for step in range(2, 8):
        state.step = step
        counts.append(state.count_of(10_000))
    assert counts == [3163, 1000, 317, 100, 100, 100]
    state = TopKState(k=5, warmup_steps=1)
    assert [state.count_of(500), state.count_of(3)] == [50, 3]


def test_momentum_is_gathered_where_nothing_is_sent_and_starts_anew_where_it_is():
    ranks = simulation(1, k=1, momentum=0.5, wire_dtype=torch.float32)
    gradient = [{"w": torch.tensor([[4.0, 1.0]]), "bias": torch.tensor([2.0])}]
    results = [ranks.step(gradient)[0] for _ in range(3)]
    # Entry 0 is sent in two steps, its velocity cut each time. Entry 1 waits: velocity 1, 1.5, 1.75, all in all 4.25.
    assert [x["w"].tolist() for x in results] == [[[4.0, 0.0]], [[4.0, 0.0]], [[0.0, 4.25]]]
    # A bias rides along: it has plain momentum.
    assert [x["bias"].tolist() for x in results] == [[2.0], [3.0], [3.5]]


def test_momentum_outlives_a_nan():
    ranks = simulation(1, k=1, momentum=0.5)
    ranks.step(matrices([4.0, 1.0]))
    before = ranks.states[0].own["velocity"].pieces["w"].clone()
    ranks.step(matrices([float("nan"), 1.0]))
    assert torch.equal(ranks.states[0].own["velocity"].pieces["w"], before)


@pytest.mark.parametrize("aggregation", ["leader", "balanced"])
def test_bytes_do_not_grow_with_the_number_of_ranks(aggregation):
    """A ring sends 2 (W - 1) / W: 1.5 with 4 ranks, 2 with very many. From 4 ranks on all are within 20 % of 1.75."""
    layout = lay_out(0, [("w", "w", (2048, 4096))])
    sizes = (4, 8, 64, 1024)
    sent = [bytes_sent(topk, TopKState(aggregation=aggregation), layout, torch.float32, size) for size in sizes]
    middle = sent[0] / 1.5 * 1.75
    assert all(middle / 1.2 <= x <= middle * 1.2 for x in sent)


def test_bytes_of_allgather_do():
    layout = lay_out(0, [("w", "w", (64, 4096)), ("bias", "bias", (4096,))])
    two, many = (
        bytes_sent(topk, TopKState(aggregation="allgather"), layout, torch.float32, size) for size in (2, 1024)
    )
    assert many == 1023 * two


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
@pytest.mark.parametrize("aggregation", [*AGGREGATIONS, "auto"])
def test_predicted_bytes_are_those_counted(world_size, aggregation):
    layout = lay_out(0, [("w", "w", (40, 100)), ("bias", "bias", (40,))])
    predicted = bytes_sent(topk, TopKState(aggregation=aggregation), layout, torch.float32, world_size)
    ranks = simulation(world_size, aggregation=aggregation)
    ranks.step([{"w": torch.randn(40, 100), "bias": torch.randn(40)} for _ in range(world_size)])
    assert ranks.states[-1].metrics()["bytes_sent"] == predicted


def test_auto_is_the_aggregation_that_sends_less():
    layout = lay_out(0, [("w", "w", (1024, 1024))])
    for size in (2, 3, 4, 8):
        sent = {
            name: bytes_sent(topk, TopKState(aggregation=name), layout, torch.float32, size)
            for name in ("auto", "allgather", "balanced")
        }
        assert sent["auto"] == min(sent.values())


def test_an_entry_takes_three_to_four_bytes():
    layout = lay_out(0, [("w", "w", (1024, 1024))])
    for block_size, expected in ((256, 3), (1024, 4)):
        state = TopKState(k=4, block_size=block_size, aggregation="allgather")
        assert bytes_sent(topk, state, layout, torch.float32, 2) / (2**20 / block_size * 4) == expected


def test_random_k_draws_alike_everywhere_and_leaves_the_global_random_state():
    before = torch.random.get_rng_state()
    gradients = draw_gradients([(30, 40)], 3, torch.float32, 1.0, seed=3)
    ranks = Simulation(randomk, lambda: RandomKState(density=0.1, wire_dtype=torch.float32), 3)
    first, second = ranks.step(gradients)[2]["p0"], ranks.step(gradients)[2]["p0"]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (first != 0).sum() == 120
    assert (first != 0).ne(second != 0).any()
    mean = sum(gradient["p0"] for gradient in gradients) / 3
    assert torch.allclose(first[first != 0], mean[first != 0])


def test_unbiased_random_k_is_right_in_the_mean():
    """Of 400 draws at density 1/4 the mean is off by sqrt(3 / 400) = 0.09 standard deviations of an entry."""
    ranks = Simulation(randomk, lambda: RandomKState(density=0.25, unbiased=True, use_error_feedback=False), 1)
    gradient = torch.linspace(1, 2, 41).view(1, 41)
    mean = sum(ranks.step([{"w": gradient}])[0]["w"] for _ in range(400)) / 400
    assert ((mean - gradient) / gradient).abs().max() <= 5 * 0.09


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density is 0.0; it must be above 0 and at most 1"),
        ({"density": 1.5}, "density is 1.5; it must be above 0"),
        ({"k": 0}, "k is 0; it must be at least 1"),
        ({"density": 0.1, "k": 3}, "density is 0.1 and k is 3; only one"),
        ({"block_size": 1000}, "block_size is 1000; it must be one of 256, 512"),
        ({"selection": "all"}, "selection is 'all'; it must be one of 'block', 'exact'"),
        ({"aggregation": "sum"}, "aggregation is 'sum'; it must be one of 'auto'"),
        ({"selection": "exact", "aggregation": "balanced"}, 'aggregation is "balanced"; with selection="exact"'),
        ({"wire_dtype": torch.int8}, r"wire_dtype is torch\.int8"),
        ({"momentum": 1.0}, "momentum is 1.0; it must be at least 0 and below 1"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
    ],
)
def test_what_topk_does_not_take_it_names(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        TopKState(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 2}, "density is 2; it must be above 0"),
        ({"unbiased": True}, "unbiased is True; with use_error_feed"),
    ],
)
def test_what_randomk_does_not_take_it_names(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        RandomKState(**options)

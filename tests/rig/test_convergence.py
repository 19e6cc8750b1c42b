"""The convergence benchmark: curves by hand, the tasks, and a small run with real ranks on real links, interrupted."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch
from test_rig import needs_namespaces

from benchmarks.convergence import FULL, QUICK, tune
from benchmarks.convergence_curves import at_step, final_loss, reach, seconds_on_link, smooth, spread, verdict
from benchmarks.convergence_rank import NO_COMMUNICATION, VARIANTS
from benchmarks.convergence_report import section
from benchmarks.convergence_task import look_up
from benchmarks.records import Records, read
from benchmarks.tasks import TASKS, evaluate, loss_of

ROOT = Path(__file__).parents[2]


def made_curve(losses: list[float], every: int = 10, bytes_a_step: float = 100.0, surplus: float = 0.0) -> dict:
    """A run that was evaluated every so many steps; `surplus` bytes were sent in the first of them besides."""
    steps = [every * i for i in range(len(losses))]
    sent = [n * bytes_a_step + (surplus if n else 0) for n in steps]
    return {"step": steps, "loss": losses, "accuracy": [0.5] * len(losses), "bytes": sent, "seconds": steps}


FALLING = made_curve([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])


def test_smoothing_never_looks_ahead():
    assert smooth([5.0, 4.0, 3.0, 2.0, 1.0, 0.0]) == [5.0, 4.0, 3.5, 3.0, 2.5, 2.0]
    assert final_loss(FALLING) == 3.0
    assert smooth([*FALLING["loss"], -1e9])[:8] == smooth(FALLING["loss"])


def test_steps_bytes_and_seconds_to_a_loss():
    """The smoothed curve is 8, 7, 6.5, 6, 5.5, 5, 4, 3: 5.25 lies half-way between steps 40 and 50."""
    reached = reach(5.25, FALLING, [x * 0.5 for x in FALLING["step"]])
    assert reached is not None
    assert (reached.step, reached.sent, reached.seconds) == pytest.approx((45, 4500, 22.5))
    assert reach(5.25, FALLING, None).seconds is None
    assert reach(9.0, FALLING, None).step == 0
    assert reach(3.0, FALLING, None).step == 70


def test_a_loss_that_was_not_reached_is_not_extrapolated():
    assert reach(2.999, FALLING, None) is None
    assert reach(1.0, FALLING, None) is None  # the raw curve touches it, the smoothed one does not


def test_the_first_crossing_counts():
    risen = made_curve([8.0, 4.0, 4.0, 9.0, 9.0, 9.0, 9.0])
    assert reach(6.0, risen, None).step == pytest.approx(5)


def test_losses_after_so_many_steps():
    assert at_step(45, FALLING, "loss") == pytest.approx(5.25)
    assert at_step(0, FALLING, "loss") == 8.0
    assert at_step(1000, FALLING, "loss") == 3.0


def test_seconds_on_a_link():
    """Steps times a step's; a warm-up's surplus of 1250 bytes takes 1 s at 10 kbit/s."""
    assert seconds_on_link(made_curve([1.0] * 3), 0.5, 1e4) == [0.0, 5.0, 10.0]
    assert seconds_on_link(made_curve([1.0] * 3, surplus=1250), 0.5, 1e4) == [0.0, 6.0, 11.0]


def test_spreads():
    assert f"{spread([3.0, 1.0, 2.0]):.1f}" == "2.0 (1.0 to 3.0)"
    assert f"{spread([2.0]):.1f}" == "2.0"
    assert spread([1.0, None]) is None  # one seed has not reached it
    assert verdict(spread([0.2, 0.3])) == "faster"
    assert verdict(spread([1.2, 1.3])) == "slower"
    assert verdict(spread([0.9, 1.3])) == "no difference beyond the spread"


def made_records(**losses: list[list[float]]) -> list[dict]:
    """Records of the digits, by variant a curve for each seed; every hook's step takes 0.1 s, bf16's 1 s."""
    records = [
        {
            "case": {"part": "train", "task": "digits", "variant": name, "seed": seed, "lr": 0.1},
            "measured": made_curve(x),
        }
        for name, curves in losses.items()
        for seed, x in enumerate(curves)
    ]
    timed = {name: [0.1] for name in [*VARIANTS, NO_COMMUNICATION]} | {"bf16": [1.0, 1.0, 5.0]}
    case = {"part": "time", "task": "digits", "rate": "100mbit"}
    return [*records, {"case": case, "measured": {"link_rate": 9.9e7, "seconds": timed}}]


BF16 = [[8.0, 6.0, 4.0, 3.0], [8.0, 6.0, 4.0, 2.0]]  # smoothed to 4.33 and 4.0 at their ends
GOOD = [[8.0, 6.0, 4.0, 3.0, 2.0, 1.0], [8.0, 7.0, 5.0, 3.0, 2.0, 1.0]]
STUCK = [[8.0, 6.0, 4.0, 3.0, 2.0, 1.0], [8.0] * 6]


def test_the_best_hook_reaches_the_loss_with_every_seed():
    records = made_records(bf16=BF16, **{"powersgd-4": GOOD, "topk-1": STUCK, "powersgd-4-control": STUCK})
    task = look_up(records, "digits")
    assert task.best("100mbit") == "powersgd-4"
    assert task.ratios("bf16", "100mbit").most == 1
    assert task.seconds("bf16", "100mbit") == [30.0, 30.0]  # the median step, 1 s
    assert task.ratios("powersgd-4", "100mbit").least == pytest.approx(0.1)  # seed 0: the same curve, a tenth the step
    assert task.ratios("topk-1", "100mbit") is None
    text = section(records)
    assert "100mbit (99 Mbit/s measured) the soonest is PowerSGD rank 4" in text
    assert "The goal, at most 0.2, is met." in text
    assert "not reached by 1 of 2" in text
    assert look_up(made_records(bf16=BF16, **{"topk-1": STUCK}), "digits").best("100mbit") is None


@pytest.mark.parametrize(
    ("without", "outcome"), [([[8.0] * 4] * 2, "it fails"), (BF16, "makes no difference"), ([[1.0] * 4] * 2, "better")]
)
def test_the_control_is_told_as_it_is(without, outcome):
    records = made_records(bf16=BF16, **{"powersgd-4": BF16, "powersgd-4-control": without})
    assert outcome in section(records)


@pytest.mark.parametrize("name", TASKS)
def test_ranks_share_a_task_out(name):
    """The same model on each, different batches, and a held-out part that no two share."""
    ours, theirs = (TASKS[name].make(0, rank, 2) for rank in range(2))
    for x, y in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(x, y)
    (x, _), (y, _) = next(ours.batches), next(theirs.batches)
    assert not torch.equal(x, y)
    assert not torch.equal(ours.held_out[0], theirs.held_out[0])
    whole = evaluate(TASKS[name].make(0, 0, 1))
    torch.testing.assert_close(evaluate(ours) + evaluate(theirs), whole)
    classes = 256 if name == "gpt" else 10
    assert (whole[0] / whole[2]).item() == pytest.approx(log(classes), rel=0.1)  # untrained
    other = TASKS[name].make(1, 0, 2)
    assert not torch.equal(next(other.batches)[0], x)


def test_the_digits_can_be_learned():
    """Without DDP: what the task itself allows."""
    problem = TASKS["digits"].make(0, 0, 1)
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(60):
        loss_of(problem.model, *next(problem.batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    _, right, number = evaluate(problem).tolist()
    assert right / number > 0.6


def test_every_timed_variant_is_there():
    for plan in (FULL, QUICK):
        for task in TASKS:
            assert {VARIANTS[x].timed_as or x for x in plan.variants_of(task)} <= set(VARIANTS)
    assert "topk-1-momentum" in FULL.variants_of("digits")
    assert "topk-1-momentum" not in FULL.variants_of("gpt")


def test_red_hooks_get_no_number():
    assert set(QUICK.without_red({"bf16", "topk"}).variants) == {"bf16", "topk-1", "topk-1-control"}
    assert "plain" in FULL.without_red({"bf16"}).variants
    with pytest.raises(RuntimeError, match="nothing to compare with"):
        QUICK.without_red({"powersgd"})


SMALL = """
import sys
from dataclasses import replace
from pathlib import Path
from rich.progress import Progress
from benchmarks import convergence, tasks
from benchmarks.namespaces import isolate
from benchmarks.records import Records
assert isolate() is None
case = dict(part="train", task="digits", seed=0, lr=0.05, steps=12)
cases = [case | {"variant": x} for x in ("plain", "bf16", "powersgd-4", "topk-1-momentum")]
records = Records(Path(sys.argv[1]), "convergence", {})
with Progress(disable=True) as progress:
    runner = convergence.Runner(records, progress, isolated=True)
    runner.train("train", cases[: int(sys.argv[2])])
    if len(sys.argv) > 3:
        runner.time("time", {"part": "time", "task": "digits", "rate": sys.argv[3]}, ["plain", "powersgd-4"], 2)
"""


def small(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", SMALL, *map(str, arguments)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=140, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@needs_namespaces
@pytest.mark.timeout(300)
def test_a_run_is_recorded_and_continued(tmp_path):
    """Two runs, then four, of which two are known; then step times on a link."""
    small(tmp_path, 2)
    before = (tmp_path / "convergence.jsonl").read_text()
    small(tmp_path, 4, "20mbit")
    text = (tmp_path / "convergence.jsonl").read_text()
    assert text.startswith(before)
    records = read(tmp_path, "convergence")
    curves = {x["case"]["variant"]: x["measured"] for x in records if x["case"]["part"] == "train"}
    assert len(records) == 5
    assert list(curves) == ["plain", "bf16", "powersgd-4", "topk-1-momentum"]
    for curve in curves.values():
        assert curve["step"] == [0, 5, 10, 12]
        assert curve["loss"][0] == curves["plain"]["loss"][0] == pytest.approx(log(10), rel=0.05)
        assert curve["loss"][-1] < curve["loss"][0]
    numel = sum(x.numel() for x in TASKS["digits"].make(0, 0, 1).model.parameters())
    assert curves["plain"]["bytes"] == [step * numel * 4 for step in (0, 5, 10, 12)]  # 2 (W - 1) / W is 1
    assert curves["bf16"]["bytes"][-1] == 12 * numel * 2
    assert curves["powersgd-4"]["bytes"][-1] < curves["bf16"]["bytes"][-1] / 10

    timed = records[-1]["measured"]
    assert timed["link_rate"] == pytest.approx(2e7, rel=0.1)
    plain, small_one, alone = (sorted(timed["seconds"][x])[1] for x in ("plain", "powersgd-4", NO_COMMUNICATION))
    assert alone < plain
    assert plain > numel * 4 * 8 / 2.2e7  # its bytes cannot pass the link sooner
    assert small_one < plain / 2


def test_the_rate_with_the_lowest_loss_is_taken(tmp_path):
    """Tuning from records that are there already: nothing runs."""
    plan = replace(FULL, grid=slice(1, None))
    records = Records(tmp_path, "convergence", {})

    class Known:
        def __init__(self):
            self.records = records

        def train(self, _, cases):
            assert [case["variant"] for case in cases] == ["bf16"] * 3
            for case, loss in zip(cases, (3.0, 1.0, 2.0), strict=True):
                records.add(case, made_curve([loss] * 3))

    assert tune(Known(), plan, "gpt") == TASKS["gpt"].learning_rates[-2]
    assert all(json.loads(line)["case"]["seed"] == 1000 for line in records.path.read_text().splitlines())

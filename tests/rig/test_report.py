"""RESULTS.md says what the records say, and nothing else."""

import sys

import pytest

from benchmarks import advice, report
from benchmarks.bandwidth_numbers import summarize
from benchmarks.bench import PARTS, progress_of, run_part
from benchmarks.records import RESULTS, Records

RATES = {"100mbit": 1e8, "1gbit": 1e9, "none": 1e10}
# At 1 Gbit/s PowerSGD gains on plain DDP only; unthrottled, all lose.
STEPS = {
    "no_sync": (50, 50, 50),
    "plain": (700, 120, 60),
    "bf16": (360, 90, 70),
    "fp16": (1, 1, 1),  # whose tests are red
    "powersgd": (80, 89.9, 80),  # not measurably faster than bf16 at 1 Gbit/s
    "topk": (790, 190, 90),
}


def slots(number):
    for name, steps in STEPS.items():
        for difference in (-0.5, 0, 0.5):
            yield {
                "variant": name, "steps": 10, "step_ms": steps[number] + difference, "tx_bytes_per_step": 1e6,
                "metric_bytes_per_step": None, "phases_ms": None,
            }  # fmt: skip


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page of a run that lacks its end, and of no other benchmark."""
    records = Records(tmp_path, "bandwidth", {})
    for hook in ("bf16", "fp16"):
        red = hook == "fp16"
        measured = {"passed": 9, "failed": int(red), "reason": "1 of its 10 tests fail" if red else ""}
        records.add({"tests": hook}, measured | {"green": not red})
    for number, (rate, measured_rate) in enumerate(RATES.items()):
        case = {"nodes": 2, "ranks_per_node": 1, "rate": rate}
        measured = {"link_rate": measured_rate, "variants": summarize(slots(number), measured_rate)}
        records.add(
            case, measured | {"refused": {"torch-bf16": "it wants NCCL"}, "failed": {"randomk": "ValueError: x"}}
        )
    monkeypatch.setattr(sys, "argv", ["report", "--out", str(tmp_path)])
    report.main()
    return (tmp_path / "RESULTS.md").read_text()


def test_the_choice_for_each_link(page):
    """Where several are level, the simplest; where none is faster than plain DDP, none."""
    assert "- 100 Mbit/s: powersgd_hook, bf16 wire\n- 1 Gbit/s: bf16_hook; not measurably different: powersgd" in page
    assert "- 10 Gbit/s: none (plain DDP)\n" in page
    assert "4.50 x faster than bf16_hook" in page
    assert "no hook is measurably faster than plain DDP (60 ms a step). Use none." in page


def test_losses_stand_beside_wins(page):
    rows = [line for line in page.splitlines() if line.startswith("| 2 nodes x 1 rank")]
    assert "| topk_hook, 1 % | topk_hook, 1 % |" in rows[0]
    assert rows[2].endswith("| powersgd_hook, bf16 wire; topk_hook, 1 % | powersgd_hook, bf16 wire; topk_hook, 1 % |")
    assert "| bf16_hook | +10.0 (slower) |" in page


def test_crossovers(page, tmp_path):
    assert "| topk_hook, 1 % | at none measured | at none measured |" in page
    (powersgd,) = [line for line in page.splitlines() if line.startswith("| powersgd_hook, bf16 wire | about ")]
    assert powersgd.endswith("(1 Gbit/s yes, 10 Gbit/s no) | 100 Mbit/s yes, 1 Gbit/s no |")
    assert "![bandwidth](bandwidth.png)" in page
    assert 10_000 < (tmp_path / "bandwidth.png").stat().st_size < 300_000


def test_what_has_no_number_says_why(page):
    assert "fp16: no number, 1 of its 10 tests fail" in page
    assert "| fp16_hook" not in page
    assert "torch bf16_compress_hook: refused by torch (it wants NCCL)" in page
    assert "randomk_hook, 1 %, 2 nodes x 1 rank, 100mbit asked, 100 Mbit/s measured: failed (ValueError: x)" in page
    assert "No records yet: `python -m benchmarks.convergence` makes them." in page


def test_where_the_numbers_come_from(page):
    assert "Made by `python " in page
    assert "The run is not finished" in page
    assert "Two cores are shared by all ranks" in page


def test_without_any_records(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report", "--out", str(tmp_path)])
    report.main()
    page = (tmp_path / "RESULTS.md").read_text()
    assert page.count("No records yet") == 4


def test_commands_name_no_folder_of_this_machine():
    """They are written into the records, which are kept with the project."""
    commands = [part.command(RESULTS, quick=False)[1:] for part in PARTS]
    assert all(command[-2:] == ["--out", "benchmarks/results"] for command in commands)


def test_a_benchmark_that_hangs_or_fails_is_ended(tmp_path):
    heard = []
    fails = [sys.executable, "-c", "print('[1/2]', flush=True); import time; time.sleep(1); raise SystemExit(3)"]
    assert run_part(fails, tmp_path / "log", 60, lambda past, tail: heard.append((past, tail))) == 3
    assert heard[-1][1] == "[1/2]\n"
    hangs = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert run_part(hangs, tmp_path / "log", 1, lambda *_: None) is None


def test_progress_is_what_the_benchmark_says_or_the_clock():
    assert progress_of("[1/4] x\n[3/4] y\n", past=1, expected=100) == 0.75
    assert progress_of("", past=50, expected=100) == 0.5
    assert progress_of("[4/4]", past=500, expected=100) == 0.99


def test_advice_weighs_steps_by_what_they_are_worth():
    """Catches: a hook recommended for short steps that get nowhere; a hook where plain DDP is as good."""
    step_ms = {"plain": 100, "bf16": 60, "powersgd": 50, "topk": 10}
    measured = {"link_rate": 1e8, "variants": {name: {"step_ms": ms} for name, ms in step_ms.items()}}
    steps = {"plain": 100, "bf16": 100, "powersgd": 130}  # top-k never comes to the loss
    said = advice._choice(measured, steps)
    assert said == "bf16_hook, 6.0 s, plain DDP 10.0 s; as good: powersgd_hook, bf16 wire"
    steps["powersgd"] = 100
    assert advice._choice(measured, steps) == "powersgd_hook, bf16 wire, 5.0 s, plain DDP 10.0 s"
    measured["variants"]["plain"]["step_ms"] = 52
    assert advice._choice(measured, steps) == "plain DDP, 5.2 s; as good: powersgd_hook, bf16 wire"
    assert advice.advice([], []).startswith("Needs the records")

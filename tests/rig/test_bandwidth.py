"""The bandwidth benchmark's own checks: its clock, its byte counter, its control, its verdicts; on real links."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_rig import needs_namespaces

from benchmarks.bandwidth import launches
from benchmarks.bandwidth_numbers import Crossover, crossover, fastest, summarize, verdict
from benchmarks.gate import HOOKS, run_tests
from benchmarks.records import Records, read

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-W", "ignore"]


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return [*PYTHON, str(path)]


def run(command, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SLEEPER = """
import time
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from benchmarks import bandwidth_rank
from benchmarks.variants import VARIANTS, Variant

def sleeping(seconds):
    def hook(state, bucket):
        if bucket.index() == 0:  # the step's first: no transfer is under way that would go on meanwhile
            time.sleep(seconds)
        return default_hooks.allreduce_hook(None, bucket)
    return Variant("sleeps", lambda ddp, _: ddp.register_comm_hook(None, hook))

VARIANTS["sleeps"], VARIANTS["wakes"] = sleeping(0.5), sleeping(0.0)
bandwidth_rank.main()
"""


@pytest.fixture(scope="module")
def slots(tmp_path_factory):
    """What rank 0 wrote of one launch at 500 Mbit/s."""
    folder = tmp_path_factory.mktemp("launch")
    out = folder / "out.jsonl"
    rig = [*PYTHON, "-m", "benchmarks.rig", "--rate=500mbit", "--timeout=90", "--", *script(folder, SLEEPER)]
    names = ["no_sync", "plain", "wakes", "sleeps", "bf16", "torch-bf16"]
    run([*rig, "--variants", *names, "--slot-seconds=0.2", "--out", str(out)])
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def summary(slots):
    return summarize((slot for slot in slots if "variant" in slot), link_rate=5e8)


@needs_namespaces
@pytest.mark.timeout(120)
def test_variants_take_turns(slots):
    order = [slot["variant"] for slot in slots if "variant" in slot]
    assert order == ["no_sync", "plain", "wakes", "sleeps", "bf16"] * 3
    refused = [slot for slot in slots if "refused" in slot]
    assert refused == [{"refused": "torch-bf16", "why": refused[0]["why"]}]
    assert "NCCL" in refused[0]["why"]


@needs_namespaces
def test_a_hook_that_sleeps_is_slower_by_what_it_slept(summary):
    """Catches: a clock that stops before the hook does, or that misses what happens in backward.

    Of the fastest round of each: what disturbs the machine only adds.
    """
    sleeps, wakes = (min(summary[name]["rounds_ms"]) for name in ("sleeps", "wakes"))
    assert sleeps - wakes == pytest.approx(500, rel=0.2)


@needs_namespaces
def test_the_control_communicates_nothing(summary):
    """Catches: a control that is plain DDP under another name, or that was not measured in these rounds."""
    control, plain = summary["no_sync"], summary["plain"]
    assert len(control["rounds_ms"]) == 3
    assert control["tx_bytes_per_step"] < 1e-3 * plain["tx_bytes_per_step"]
    assert control["exposed_ms"] == 0
    assert plain["floor_ms"] == max(control["step_ms"], plain["tx_bytes_per_step"] * 8 / 5e8 * 1e3)


@needs_namespaces
def test_hooks_of_ours_tell_their_bytes_and_phases(summary):
    """Catches: ranges renamed in the executor, that the profiler then no longer finds."""
    ours = summary["bf16"]
    assert ours["tx_bytes_per_step"] == pytest.approx(summary["plain"]["tx_bytes_per_step"] / 2, rel=0.03)
    assert ours["tx_bytes_per_step"] == pytest.approx(ours["metric_bytes_per_step"], rel=0.1)
    assert all(milliseconds > 0 for milliseconds in ours["phases_ms"].values())
    assert summary["plain"]["phases_ms"] is summary["plain"]["metric_bytes_per_step"] is None


COUNT = """
import os
import torch, torch.distributed as dist
from benchmarks.bandwidth_rank import measure_slot
dist.init_process_group("gloo")
def resent_segments():
    names, values = (line.split() for line in open("/proc/self/net/snmp") if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])

x = torch.ones(5_000_000)
before = resent_segments()
slot = measure_slot(lambda: dist.all_reduce(x), 3, os.environ["GLOO_SOCKET_IFNAME"])
resent = torch.tensor(resent_segments() - before)
dist.all_reduce(resent, dist.ReduceOp.MAX)
if dist.get_rank() == 0:
    print(slot.tx_bytes_per_step, resent.item() / 3)
last = dist.barrier(async_op=True)
last.wait()
dist.destroy_process_group()
"""


@needs_namespaces
def test_the_byte_counter_agrees_with_a_known_transfer(tmp_path):
    """An all-reduce of 20 MB between two ranks sends 20 MB from each, and what TCP sends again, 1448 bytes at a time.

    Unthrottled: headers are for 64 KB at a time.
    """
    stdout = run([*PYTHON, "-m", "benchmarks.rig", "--rate=none", "--", *script(tmp_path, COUNT)])
    counted, resent = map(float, stdout.split()[-2:])
    assert counted == pytest.approx(20e6 + 1448 * resent, rel=0.02)


RESUME = """
import sys
from pathlib import Path
from rich.console import Console
from benchmarks import bandwidth, gate
from benchmarks.namespaces import isolate
from benchmarks.records import Records
assert isolate() is None
gate.run_tests = lambda: {hook: gate.Outcome(passed=1, failed=int(hook == "topk")) for hook in gate.HOOKS}
plan = [bandwidth.Launch(2, 1, "none"), bandwidth.Launch(2, 1, "1gbit")]
records = Records(Path(sys.argv[1]), "bandwidth", {})
troubles = bandwidth.run(records, plan, ["plain", "bf16", "topk"], bandwidth.Launcher(3, 0.1), Console(width=200))
assert not troubles, troubles
"""
# In each rank: a hook that fails in its second step.
FAILING = """
import sys
if "benchmarks.bandwidth_rank" in sys.orig_argv:
    from benchmarks.variants import VARIANTS, Variant
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    calls = []
    def hook(state, bucket):
        calls.append(bucket.index())
        if calls.count(0) == 2:
            raise ArithmeticError("on purpose")
        return default_hooks.allreduce_hook(None, bucket)
    VARIANTS["bf16"] = Variant("fails", lambda ddp, _: ddp.register_comm_hook(None, hook))
"""


@needs_namespaces
@pytest.mark.timeout(120)
def test_what_is_measured_is_kept_and_what_fails_is_left_out(tmp_path):
    """The first launch is there already. In the second, one hook fails, and another's tests are red."""
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    before = Records(tmp_path, "bandwidth", {})
    before.add({"nodes": 2, "ranks_per_node": 1, "rate": "none"}, {"link_rate": 1e10, "variants": {}})
    kept = before.path.read_bytes()
    command = [*script(tmp_path, RESUME), str(tmp_path)]
    stdout = run(command, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert before.path.read_bytes().startswith(kept)
    found = [record for record in read(tmp_path, "bandwidth") if "rate" in record["case"]]
    assert [record["case"]["rate"] for record in found] == ["none", "1gbit"]
    measured = found[1]["measured"]
    assert set(measured["variants"]) == {"no_sync", "plain"}
    assert "ArithmeticError: on purpose" in measured["failed"]["bf16"]
    assert 5e8 <= measured["link_rate"] <= 1.15e9  # busy processors may not fill the link
    assert "topk gets no number" in stdout


PROMISES = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("case", ["bf16", "bf16 EF", "fp16", "topk exact", "topk"])
def test_promise(case, n):
    assert (case, n) != ("topk exact", 2)
"""


def test_hooks_with_red_tests_are_red(tmp_path):
    """Catches: a red option overlooked behind a green one; no test at all taken for green."""
    path = tmp_path / "test_some_promises.py"
    path.write_text(PROMISES)
    found = run_tests(str(path))
    assert [hook for hook in HOOKS if found[hook].green] == ["bf16", "fp16"]
    assert (found["bf16"].passed, found["topk"].passed, found["topk"].failed) == (4, 3, 1)
    assert found["topk"].reason == "1 of its 4 tests fail"
    assert "no test of randomk" in found["randomk"].reason


def test_tests_that_do_not_run_are_red(tmp_path):
    path = tmp_path / "test_nothing.py"
    path.write_text("import no_such_module\n")
    assert not any(outcome.green for outcome in run_tests(str(path)).values())


@pytest.mark.parametrize(
    ("rounds", "base", "said"),
    [
        ([10, 11, 12], [14, 15, 16], "faster"),
        ([14, 15, 16], [10, 11, 12], "slower"),
        ([10, 11, 12], [12, 13, 14], "no difference"),  # 2 ms, and rounds differ by 2
        ([10, 10, 10], [11, 12, 16], "no difference"),  # one side's spread is enough
        ([10, 10, 10], [10, 10, 10], "no difference"),
    ],
)
def test_a_difference_smaller_than_the_spread_is_none(rounds, base, said):
    assert verdict(rounds, base) == said


def test_summary():
    """Medians; exposed time round by round, as a slow round is slow for all; the floor of the link, or of the step."""
    slot = {"steps": 5, "tx_bytes_per_step": 1e6, "metric_bytes_per_step": None, "phases_ms": None}
    rounds = [("no_sync", 10), ("a", 15), ("no_sync", 20), ("a", 26), ("no_sync", 11), ("a", 18)]
    slots = [slot | {"variant": name, "step_ms": ms} for name, ms in rounds]
    fast, slow = summarize(slots, link_rate=1e9)["a"], summarize(slots, link_rate=1e8)["a"]
    assert (fast["step_ms"], fast["spread_ms"], fast["exposed_ms"]) == (18, 11, 6)
    assert (fast["floor_ms"], slow["floor_ms"]) == (11, 80)


def variant(ms, spread=0.2):
    return {"step_ms": ms, "rounds_ms": [ms - spread / 2, ms, ms + spread / 2]}


def launch(rate, **steps):
    return {"measured": {"link_rate": rate, "variants": {name: variant(ms) for name, ms in steps.items()}}}


def test_crossover():
    """At 1e8 the hook takes half the time, at 1e10 twice as long: in logarithms, the curves cross in the middle."""
    slow, fast = launch(1e8, plain=100, hook=50), launch(1e10, plain=10, hook=20)
    assert crossover([fast, slow], "hook", "plain") == Crossover(1e8, 1e10, pytest.approx(1e9))
    assert crossover([slow], "hook", "plain") == Crossover(1e8, None, None)
    assert crossover([fast], "hook", "plain") == Crossover(None, 1e10, None)
    assert crossover([slow, launch(1e10, plain=10, hook=9.9)], "hook", "plain") == Crossover(1e8, 1e10, None)
    assert crossover([slow, fast], "hook", "other") is None


def test_fastest_are_all_that_do_not_differ():
    variants = {"no_sync": variant(1), "a": variant(10.1), "b": variant(10), "c": variant(11)}
    assert fastest(variants) == ["b", "a"]


def test_launches():
    plan = launches(quick=False, rates=None, nodes=None)
    assert [x.rate for x in plan if (x.nodes, x.ranks_per_node) == (2, 1)][::5] == ["10mbit", "none"]
    assert sum(x.nodes * x.ranks_per_node == 4 for x in plan) == 4
    assert {x.nodes for x in launches(quick=False, rates=["1gbit"], nodes=[4])} == {4}

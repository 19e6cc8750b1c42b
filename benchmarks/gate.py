"""No number from a hook that is wrong: the promises' tests of every hook, run before anything is measured.

python -m benchmarks.gate
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from benchmarks.records import ROOT

TESTS = "tests/algorithms/test_promises.py"
HOOKS = ("allreduce", "bf16", "fp16", "powersgd", "topk", "randomk")
TIMEOUT = 180  # seconds; all green they take a fifth of it


@dataclass(frozen=True)
class Outcome:
    """What the tests of one hook said. `reason`: in words, where a hook is red."""

    passed: int = 0
    failed: int = 0
    reason: str = ""

    @property
    def green(self) -> bool:
        return self.passed > 0 and not self.failed and not self.reason


def run_tests(tests: str = TESTS) -> dict[str, Outcome]:
    """The outcome of every hook. Without an answer, as after a timeout, every hook is red."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", tests, "-n", "2", "-p", "benchmarks.gate_profile"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = os.environ | {"HYPOTHESIS_PROFILE": "gate"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            return dict.fromkeys(HOOKS, Outcome(reason=f"its tests took more than {TIMEOUT} s"))
        if not report.exists():
            last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no output"]
            return dict.fromkeys(HOOKS, Outcome(reason=f"its tests did not run: {last[0]}"))
        return outcomes(report)


def outcomes(report: Path) -> dict[str, Outcome]:
    """The outcome of every hook, from a JUnit report. Test names end in [hook and options-other parameters]."""
    passed, failed = dict.fromkeys(HOOKS, 0), dict.fromkeys(HOOKS, 0)
    trouble = ""
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest has just written it
        name = case.get("name", "")
        hook = name.partition("[")[2].replace("]", " ").replace("-", " ").partition(" ")[0]
        red = case.find("failure") is not None or case.find("error") is not None
        if hook in HOOKS:
            (failed if red else passed)[hook] += 1
        elif red:
            trouble = f"{name} failed"  # collection, or a test of all hooks
    return {hook: _outcome(hook, passed[hook], failed[hook], trouble) for hook in HOOKS}


def _outcome(hook: str, passed: int, failed: int, trouble: str) -> Outcome:
    reason = trouble
    if failed:
        reason = f"{failed} of its {passed + failed} tests fail"
    elif not passed:
        reason = reason or f"no test of {hook} was found"
    return Outcome(passed, failed, reason)


def main() -> None:
    found = run_tests()
    for hook, outcome in found.items():
        print(f"{hook}: {'green' if outcome.green else outcome.reason} ({outcome.passed} passed)")
    if not all(outcome.green for outcome in found.values()):
        sys.exit("gate: not every hook is green")


if __name__ == "__main__":
    main()

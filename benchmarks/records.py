"""What every benchmark measured, one JSON line a case, for whoever reads, plots or goes on with it later.

    records = Records(RESULTS, "bandwidth", {"quick": False})
    if not records.has(case):
        records.add(case, measure(case))
    records.finish()

Nothing is ever overwritten: a run appends to benchmarks/results/{benchmark}.jsonl. One that was interrupted has no end
mark, and is continued by the next one with the same commit and settings.
"""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / "build" / "quick"  # a quick run tries the harness; its numbers are not kept with the others
PACKAGES = ("torch", "triton", "numpy", "commhooks")

Record = dict[str, Any]

FIELDS: dict[str, type] = {
    "benchmark": str,
    "run": str,
    "time": str,
    "command": str,
    "settings": dict,
    "environment": dict,
    "case": dict,
    "measured": dict,
}
ENVIRONMENT: dict[str, type | tuple[type, ...]] = {
    "commit": str,
    "dirty": bool,
    "versions": dict,
    "processor": str,
    "cores": int,
    "load_average": (int, float),
}
END_FIELDS = {"benchmark", "run", "time", "end"}


class SchemaError(ValueError):
    """A line is no record of this schema; the message names the field."""


class Records:
    """One run of one benchmark, appended to folder/{benchmark}.jsonl.

    If the file's last run has the same commit, the same settings and no end mark, this one continues it: `has` knows
    its cases.

    Args:
        settings: what the whole run was asked for; plain JSON values.

    Raises:
        SchemaError: the file holds a line that is JSON but no record.
    """

    def __init__(self, folder: Path, benchmark: str, settings: dict[str, object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{benchmark}.jsonl"
        self.benchmark, self.settings = benchmark, _plain(settings)
        lines = _lines(self.path)
        self.records = self._unfinished(lines)
        self.run = self.records[0]["run"] if self.records else _now()
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self._append("")  # ends a torn line, so that the next one stands alone

    def _unfinished(self, lines: list[Record]) -> list[Record]:
        if not lines or "end" in lines[-1]:
            return []
        last = [line for line in lines if line["run"] == lines[-1]["run"]]
        commit = _constant_environment()["commit"]
        same = last[0]["environment"]["commit"] == commit and last[0]["settings"] == self.settings
        return last if same else []

    def has(self, case: dict[str, Any]) -> bool:
        """True if this run, or the one that it continues, has measured the case."""
        return any(record["case"] == _plain(case) for record in self.records)

    def add(self, case: dict[str, Any], measured: dict[str, Any]) -> None:
        """Append one record, and see that it reaches the file. NaN and infinities, which JSON lacks, become null.

        Raises:
            TypeError: a value is not one of JSON's.
        """
        record = {
            "benchmark": self.benchmark,
            "run": self.run,
            "time": _now(),
            "command": shlex.join(["python", *sys.orig_argv[1:]]),
            "settings": self.settings,
            "environment": environment(),
            "case": _plain(case),
            "measured": _plain(measured),
        }
        validate(record)
        self._append(json.dumps(record))
        self.records.append(record)

    def finish(self) -> None:
        """Mark the run as complete: the next one begins anew."""
        self._append(json.dumps({"benchmark": self.benchmark, "run": self.run, "time": _now(), "end": True}))

    def _append(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def read(folder: Path, benchmark: str) -> list[Record]:
    """The records of the newest finished run; of the newest run, if none was finished; nothing, if there is none.

    Raises:
        SchemaError: the file holds a line that is JSON but no record.
    """
    lines = _lines(folder / f"{benchmark}.jsonl")
    finished = {line["run"] for line in lines if "end" in line}
    records = [line for line in lines if "end" not in line]
    wanted = [record for record in records if record["run"] in finished] or records
    return [record for record in wanted if record["run"] == wanted[-1]["run"]]


def is_finished(folder: Path, benchmark: str) -> bool:
    """True if the run that `read` gives has its end mark."""
    records = read(folder, benchmark)
    lines = _lines(folder / f"{benchmark}.jsonl")
    return bool(records) and any("end" in line and line["run"] == records[0]["run"] for line in lines)


def validate(record: object) -> None:
    """Check one line of a file.

    Raises:
        SchemaError: it is neither a record nor an end mark; the message names the field.
    """
    if not isinstance(record, dict):
        raise SchemaError(f"a record is {record!r}; it must be an object")
    if "end" in record:
        if set(record) != END_FIELDS:
            raise SchemaError(f"an end mark has the fields {sorted(record)}; it must have {sorted(END_FIELDS)}")
        return
    _check_fields("record", record, FIELDS)
    _check_fields("environment", record["environment"], ENVIRONMENT)


def _check_fields(where: str, found: Record, wanted: dict[str, Any]) -> None:
    for name, kind in wanted.items():
        if name not in found:
            raise SchemaError(f"{where}: the field {name!r} is missing")
        if not isinstance(found[name], kind):
            kinds = " or ".join(x.__name__ for x in (kind if isinstance(kind, tuple) else (kind,)))
            raise SchemaError(f"{where}: the field {name!r} is {found[name]!r}; it must be of type {kinds}")
    if unknown := set(found) - set(wanted):
        raise SchemaError(f"{where}: the field {min(unknown)!r} is unknown; the fields are {', '.join(wanted)}")


def environment() -> dict[str, Any]:
    """Where a number was measured: commit, versions, machine; and the load average of this moment."""
    return _constant_environment() | {"load_average": round(os.getloadavg()[0], 2)}


@cache
def _constant_environment() -> dict[str, Any]:
    changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!benchmarks/RESULTS.md")
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "dirty": changes != "",
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The names of this machine's processors."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            names = {line.partition(":")[2].strip() for line in file if line.startswith("model name")}
    except OSError:
        names = set()
    return ", ".join(sorted(names)) or platform.machine()


def _lines(path: Path) -> list[Record]:
    """All whole lines of a file. A line cut off by a crash is no record: it is left out, and that is said."""
    found = []
    for number, text in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        if not text:
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            print(f"{path}: line {number} was cut off; it is left out", file=sys.stderr)
            continue
        try:
            validate(line)
        except SchemaError as error:
            raise SchemaError(f"{path}: line {number}: {error}") from None
        found.append(line)
    return found


def _plain(value: Any) -> Any:
    """As it will be read again: tuples are lists then, and numbers that are none are null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")  # runs are told apart by it

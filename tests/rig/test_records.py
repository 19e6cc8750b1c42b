"""The records of benchmarks: nothing lost, nothing overwritten, nothing that is no record."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.records import Records, SchemaError, is_finished, read, validate

ROOT = Path(__file__).parents[2]
SETTINGS = {"quick": False, "rates": ("10mbit", "none")}  # a tuple, which JSON gives back as a list


@pytest.fixture
def unfinished(tmp_path):
    """A run that ended after its first case."""
    records = Records(tmp_path, "b", SETTINGS)
    records.add({"rate": "10mbit"}, {"ms": 1.5})
    return records


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_interrupted_run_is_continued(unfinished, tmp_path):
    before = unfinished.path.read_bytes()
    again = Records(tmp_path, "b", SETTINGS)
    assert again.has({"rate": "10mbit"})
    assert not again.has({"rate": "none"})
    again.add({"rate": "none"}, {"ms": 0.5})
    again.finish()
    assert again.path.read_bytes().startswith(before)
    assert [x["case"] for x in read(tmp_path, "b")] == [{"rate": "10mbit"}, {"rate": "none"}]
    assert len({line["run"] for line in lines(again.path)}) == 1


@pytest.mark.parametrize("change", ["settings", "commit", "finished"])
def test_other_runs_are_not_continued(unfinished, tmp_path, change):
    path, settings = unfinished.path, SETTINGS
    if change == "settings":
        settings = SETTINGS | {"quick": True}
    elif change == "commit":
        commit = lines(path)[0]["environment"]["commit"]
        path.write_text(path.read_text().replace(commit, "0" * len(commit)))
    else:
        unfinished.finish()
    new = Records(tmp_path, "b", settings)
    assert not new.has({"rate": "10mbit"})
    new.add({"rate": "10mbit"}, {"ms": 2.5})
    assert new.run != unfinished.run


@pytest.mark.usefixtures("unfinished")
def test_read_prefers_the_newest_finished_run(tmp_path):
    assert [x["measured"]["ms"] for x in read(tmp_path, "b")] == [1.5]
    assert not is_finished(tmp_path, "b")
    for number in (1, 2):
        finished = Records(tmp_path, "b", {"number": number})
        finished.add({}, {"ms": number})
        finished.finish()
    Records(tmp_path, "b", SETTINGS).add({}, {"ms": 9.5})
    assert [x["measured"]["ms"] for x in read(tmp_path, "b")] == [2]
    assert is_finished(tmp_path, "b")
    assert read(tmp_path, "other") == []


def test_a_torn_line_costs_only_itself(unfinished, tmp_path, capsys):
    """As a crash leaves it: half a line, without its end."""
    with unfinished.path.open("a") as file:
        file.write('{"benchmark": "b", "ru')
    again = Records(tmp_path, "b", SETTINGS)
    assert again.has({"rate": "10mbit"})
    again.add({"rate": "none"}, {"ms": 0.5})
    assert [x["measured"]["ms"] for x in read(tmp_path, "b")] == [1.5, 0.5]
    assert "line 2 was cut off" in capsys.readouterr().err


def test_a_record_says_where_it_was_measured(unfinished):
    (record,) = lines(unfinished.path)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert record["environment"]["commit"] == commit.strip()
    assert set(record["environment"]["versions"]) == {"python", "torch", "triton", "numpy", "commhooks"}
    assert record["command"].startswith("python ")
    assert record["settings"] == {"quick": False, "rates": ["10mbit", "none"]}


def test_numbers_that_are_none_become_null(tmp_path):
    records = Records(tmp_path, "b", {})
    records.add({}, {"loss": [1.0, float("nan"), float("inf")]})
    assert lines(records.path)[0]["measured"] == {"loss": [1.0, None, None]}


@pytest.mark.parametrize("field", ["run", "measured", "environment"])
def test_a_missing_field_is_named(unfinished, field):
    record = dict(unfinished.records[0])
    del record[field]
    with pytest.raises(SchemaError, match=f"'{field}' is missing"):
        validate(record)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("case", [1], r"'case' is \[1\]; it must be of type dict"),
        ("time", 5, "'time' is 5; it must be of type str"),
        ("note", "x", "'note' is unknown"),
        ("environment", {"commit": "x"}, "environment: the field 'dirty' is missing"),
    ],
)
def test_a_wrong_field_is_named(unfinished, field, value, message):
    with pytest.raises(SchemaError, match=message):
        validate(unfinished.records[0] | {field: value})


def test_a_file_with_another_schema_is_refused(unfinished, tmp_path):
    with unfinished.path.open("a") as file:
        file.write('{"step": 1}\n')
    with pytest.raises(SchemaError, match="line 2: record: the field 'benchmark' is missing"):
        Records(tmp_path, "b", SETTINGS)

"""The record of a run, and the facts about machine and packages that go into it."""

from __future__ import annotations

import json
from pathlib import Path

from runlab.run.git.snapshot import GitRecord
from runlab.run.paths import RECORD
from runlab.run.record import (
    DeterminismFacts,
    ResumedPart,
    RunRecord,
    SweepMembership,
    TraceFacts,
    this_process,
)

FULL = RunRecord(
    id="a",
    status="finished",
    command_line=["train.py"],
    final_metrics={"eval/return": 1.5, "loss/value": float("nan")},
    trace=TraceFacts(digest="0f", iterations=3),
    resumed=[ResumedPart(**this_process(), env_steps=5, changed={"cpu": ["x", "y"]}, interruption="killed")],
    sweep=SweepMembership(id="s", dir="/s", job=2),
    git=GitRecord(ref="refs/runs/a", skipped=[{"path": "x", "reason": "large", "bytes": 7}]),
    determinism=DeterminismFacts(
        level="repeat", settings={"threads": 1}, checks={"repeats": {"holds": True}}
    ),
    versions={"torch": "2"},
    machine={"cpu": "z", "gpus": []},
    **this_process(),
)


def test_a_record_is_read_as_it_was_written_in_strict_json(tmp_path: Path) -> None:
    FULL.write(tmp_path)
    assert "NaN" not in (tmp_path / RECORD).read_text()
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]
    again = RunRecord.read(tmp_path)
    assert again.final_metrics == {"eval/return": 1.5, "loss/value": None}
    again.final_metrics = FULL.final_metrics
    assert again == FULL


def test_older_records_are_read_with_defaults(tmp_path: Path) -> None:
    text = '{"schema": 1, "id": "a", "status": "finished", "trace": null, "resumed": null, "unknown": 1}'
    (tmp_path / RECORD).write_text(text)
    assert RunRecord.read(tmp_path) == RunRecord(id="a", status="finished")


def test_an_outcome_says_nothing_about_process_and_host() -> None:
    outcome = json.loads(FULL.outcome({"trace.jsonl": "too large"}))
    assert outcome["left_out"] == {"trace.jsonl": "too large"}
    text = json.dumps(outcome)
    assert not [word for word in ("command_line", "pid", "hostname", "working_directory") if word in text]
    assert RunRecord.parse(text, "a ref").trace == FULL.trace

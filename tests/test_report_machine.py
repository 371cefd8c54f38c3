"""The JSON object and its contract."""

from __future__ import annotations

import json
from dataclasses import replace

from report_cases import ABOVE, DIVERGENCE, FAILING, INCONCLUSIVE, NOT_COMPARABLE, NOT_FINITE, PASSING, RUN

from probe.report.machine import as_object, incomparable, to_json

TOP = ["verdict", "exit", "first_divergence", "checks", "coverage", "runs", "provenance_changes", "next"]
TOP += ["tensors", "calibration"]
DIVERGED = ["step", "microbatch", "rank", "kind", "name", "order", "difference", "tolerance", "origin"]
CHECK = [
    *["what", "where", "verdict", "difference", "unit", "tolerance", "form", "spread", "worst"],
    *["cells", "above", "unjudged_failures", "not_compared", "smallest_detectable", "finest_detectable"],
    *["vacuous", "flaky", "assumed"],
]
WORST = ["step", "rank", "name", "expected", "actual", "shown"]


def test_the_keys_are_the_contract() -> None:
    found = json.loads(to_json(FAILING))
    assert list(found) == TOP
    assert list(found["first_divergence"]) == DIVERGED
    assert [list(check) for check in found["checks"]] == [CHECK] * len(FAILING.checks)
    assert [list(check["worst"]) for check in found["checks"] if check["worst"]] == [WORST] * 3
    assert list(found["coverage"]) == ["matched", "missing", "unexpected"]


def test_verdict_and_exit_status_follow_the_outcome() -> None:
    pairs = [
        (as_object(each)["verdict"], as_object(each)["exit"])
        for each in (PASSING, FAILING, INCONCLUSIVE, NOT_COMPARABLE)
    ]
    assert pairs == [("equivalent", 0), ("different", 1), ("inconclusive", 2), ("not comparable", 2)]


def test_a_check_and_a_divergence_become_these_objects() -> None:
    found = as_object(replace(FAILING, checks=(ABOVE,)))
    assert found["first_divergence"] == {
        "step": 1,
        "microbatch": 0,
        "rank": 1,
        "kind": "forward",
        "name": "blocks.2.attn",
        "order": 77,
        "difference": 0.213,
        "tolerance": 0.00411,
        "origin": "here",
    }
    assert found["checks"] == [
        {
            "what": "attention outputs",
            "where": "outputs of attention modules",
            "verdict": "above",
            "difference": 0.213,
            "unit": "relative",
            "tolerance": 0.0123,
            "form": "calibrated",
            "spread": 0.00777,
            "worst": {
                "step": 1,
                "rank": 1,
                "name": "blocks.2.attn",
                "expected": 12.3456,
                "actual": 12.6012,
                "shown": "l2 norm",
            },
            "cells": 1240,
            "above": 31,
            "unjudged_failures": 0,
            "not_compared": 0,
            "smallest_detectable": 0.0061,
            "finest_detectable": 0.00012,
            "vacuous": False,
            "flaky": False,
            "assumed": False,
        }
    ]


def test_what_json_has_no_number_for_becomes_null() -> None:
    infinite = replace(DIVERGENCE, difference=float("inf"))
    found = json.loads(to_json(replace(FAILING, checks=(NOT_FINITE,), first_divergence=infinite)))
    assert (found["checks"][0]["difference"], found["checks"][0]["worst"]["actual"]) == (None, None)
    assert found["first_divergence"]["difference"] is None


def test_runs_carry_their_provenance() -> None:
    assert as_object(replace(PASSING, runs=(RUN,)))["runs"] == [
        {
            "arm": "baseline",
            "path": "captures/base-0",
            "run_id": "b0",
            "ranks": 2,
            "world_size": 2,
            "steps": [1, 2, 3, 4, 5],
            "command": "accelerate launch --num_processes 2 train.py --lr 1e-4",
            "seed": "42",
            "commit": "0391d1c7aa11223344",
            "dirty": False,
            "perturb": "",
            "created_utc": "2026-05-04T10:00:00Z",
            "environment": {"torch": "2.14.1", "device": "cpu"},
            "attention": {},
            "problems": [],
            "step_offset": 0,
            "in_process": False,
        }
    ]


def test_captures_that_share_nothing_still_give_an_object() -> None:
    assert as_object(incomparable("no common steps")) == {
        "verdict": "not comparable",
        "exit": 2,
        "first_divergence": None,
        "checks": [],
        "coverage": {"matched": 0, "missing": [], "unexpected": []},
        "runs": [],
        "provenance_changes": [],
        "next": [],
        "tensors": [],
        "calibration": None,
    }


def test_a_declared_tolerance_below_the_noise_is_flaky_and_a_floor_is_assumed() -> None:
    checks = (replace(ABOVE, fit="flaky"), replace(ABOVE, fit="vacuous"), replace(ABOVE, assumed=True))
    found = [(c["vacuous"], c["flaky"], c["assumed"]) for c in as_object(replace(FAILING, checks=checks))["checks"]]
    assert found == [(False, True, False), (True, False, False), (False, False, True)]


def test_what_to_run_next_is_a_list_of_command_lines() -> None:
    found = json.loads(to_json(FAILING))["next"]
    assert found[-1] == {
        "purpose": "narrow down",
        "arm": None,
        "command": "probe diff captures/full-base-0 captures/full-opt-0 -t tolerances/job.toml",
    }
    assert [(each["purpose"], each["arm"]) for each in json.loads(to_json(INCONCLUSIVE))["next"]] == [
        ("add runs", "baseline"),
        ("add runs", "baseline"),
        ("add runs", "baseline"),
        ("add runs", "candidate"),
        ("add runs", None),
        ("narrow down", "baseline"),
        ("narrow down", "candidate"),
        ("narrow down", None),
    ]


def test_the_runs_that_tolerances_come_from_are_listed() -> None:
    found = as_object(FAILING)["calibration"]
    assert (found["k"], [run["run_id"] for run in found["runs"]]) == (3.0, ["b0", "b1", "b2"])

"""The comparison as one JSON object, whose keys are a contract with other programs.

It carries verdicts, numbers and names only; sentences are for people. Numbers that JSON has no word for (NaN, infinity)
become null. This module must not rename or drop a key without a new major version of the package; new ones may come.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from probe.judge.comparison import CheckResult, Comparison, Coverage, FirstDivergence, Outcome, Worst
from probe.report.commands import next_commands
from probe.report.elements import objects


def to_json(comparison: Comparison) -> str:
    """Return the JSON text."""
    return json.dumps(as_object(comparison), indent=1, allow_nan=False)


def as_object(comparison: Comparison) -> dict[str, Any]:
    """Return the object as plain values."""
    found = comparison.first_divergence
    return {
        "verdict": comparison.outcome.value,
        "exit": comparison.outcome.exit_status,
        "first_divergence": None if found is None else _divergence(found),
        "checks": [_check(check) for check in comparison.checks],
        "coverage": {
            "matched": comparison.coverage.matched,
            "missing": list(comparison.coverage.missing),
            "unexpected": list(comparison.coverage.unexpected),
        },
        "runs": [_plain(asdict(run)) for run in comparison.runs],
        "provenance_changes": list(comparison.provenance_changes),
        "next": [
            {"purpose": command.purpose, "arm": command.arm or None, "command": command.line}
            for command in next_commands(comparison)
        ],
        "tensors": objects(comparison),
        "calibration": None if comparison.calibration is None else _plain(asdict(comparison.calibration)),
    }


def incomparable(reason: str) -> Comparison:
    """Return the comparison of captures that share nothing, so that programs get an object in this case too."""
    return Comparison(
        outcome=Outcome.NOT_COMPARABLE,
        reason=reason,
        checks=(),
        first_divergence=None,
        coverage=Coverage(matched=0),
        runs=(),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _divergence(found: FirstDivergence) -> dict[str, Any]:
    return {
        "step": found.place.step,
        "microbatch": found.place.microbatch,
        "rank": found.place.rank,
        "kind": found.place.kind.value,
        "name": found.place.name,
        "order": found.place.order,
        "difference": _plain(found.difference),
        "tolerance": _plain(found.tolerance),
        "origin": found.origin.value,
    }


def _worst(worst: Worst) -> dict[str, Any]:
    return {
        "step": worst.place.step,
        "rank": worst.place.rank,
        "name": worst.place.name,
        "expected": _plain(worst.expected),
        "actual": _plain(worst.actual),
        "shown": worst.shown.value,
    }


def _check(check: CheckResult) -> dict[str, Any]:
    return {
        "what": check.what,
        "where": check.where,
        "verdict": check.verdict.value,
        "difference": _plain(check.difference),
        "unit": check.unit,
        "tolerance": _plain(check.tolerance),
        "form": check.form,
        "spread": _plain(check.spread),
        "worst": None if check.worst is None else _worst(check.worst),
        "cells": check.cells,
        "above": check.above,
        "unjudged_failures": check.unjudged_failures,
        "not_compared": check.not_compared,
        "smallest_detectable": _plain(check.smallest_detectable),
        "finest_detectable": _plain(check.finest_detectable),
        "vacuous": check.vacuous or check.fit == "vacuous",
        "flaky": check.fit == "flaky",
        "assumed": check.assumed,
    }

"""`probe show` on real captures."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probe import cli
from probe.point import Key, Kind
from probe.report.show import type_text
from probe.store.folder import create_capture, write_manifest
from probe.store.layout import SAMPLES, SCALARS, SKETCH_K, StepRows
from probe.store.writer import RankWriter

RUN_ID = "00ff00ff"
KEYS = (
    Key(kind=Kind.FORWARD, name="blocks.0.attn", item="[0]", microbatch=0),
    Key(kind=Kind.LOSS, name="micro_loss", microbatch=0),
    Key(kind=Kind.LOSS, name="micro_loss", microbatch=1),
    Key(kind=Kind.STATE, name="optimizer"),
)


def rows(step: int, rank: int) -> StepRows:
    nan = float("nan")
    return StepRows(
        step=step,
        rank=rank,
        world_size=2,
        keys=KEYS,
        order=np.arange(4, dtype=np.int32),
        dtype=("bfloat16", "float32", "float32", "str"),
        shape=((2, 8), (), (), ()),
        numel=np.array([16, 1, 1, 0]),
        nonfinite=np.array([1, 0, 0, 0]),
        value=np.array([nan, 0.5 + step, 0.25, nan]),
        scalars={name: np.array([0.5 * (at + 1), 2.0, 2.0, nan]) for at, name in enumerate(SCALARS)},
        sketch=np.full((4, SKETCH_K), np.nan, dtype=np.float32),
        sample=np.full((4, SAMPLES), np.nan, dtype=np.float32),
        hash=np.zeros((4, 2), dtype=np.uint64),
        text=("", "", "", "AdamW"),
        where=("Attention", "train.py:7", "train.py:7", ""),
    )


def record(path: Path, *, ranks: Sequence[int] = (0, 1), steps: Sequence[int] = (1, 2)) -> Path:
    create_capture(path)
    manifest: dict[str, Any] = {
        "run_id": RUN_ID,
        "world_size": 2,
        "created_utc": "2026-05-04T10:00:00Z",
        "config": {"command": ["python", "train.py"], "seed": 42, "steps": "1-2", "perturb": "ulp:1"},
        "provenance": {"trees": [{"root": "/src", "commit": "0391d1c7aa112233", "dirty": True}]},
    }
    write_manifest(path, manifest)
    for rank in ranks:
        writer = RankWriter(path, run_id=RUN_ID, rank=rank, world_size=2)
        for step in steps:
            writer.write(rows(step, rank))
        writer.close(error=None, dropped_steps=[])
    return path


def show(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.status_of(["show", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_overview_is_one_fact_a_line_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = record(tmp_path / "c", ranks=[1])
    assert show(capsys, capture) == (
        0,
        f"capture\t{capture}\n"
        "run\t00ff00ff\n"
        "created\t2026-05-04T10:00:00Z\n"
        "command\tpython train.py\n"
        "seed\t42\n"
        "perturb\tulp:1\n"
        "tree\t/src 0391d1c7aa + changes\n"
        "ranks\t1 of 2\n"
        "steps\t1-2 (rank 1)\n"
        "problems\trank 0 of 2 is missing\n"
        "quantities\tforward\t1\n"
        "quantities\tloss\t2\n"
        "quantities\tstate\t1\n"
        "quantities\tall\t4\n",
        "",
    )


HEADER = "Step\tRank\tQuantity\tType\tValue or l2\tMean\tMean |x|\tMax |x|\tNaN"


def test_values_are_tab_separated_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = record(tmp_path / "c")
    status, out, err = show(capsys, capture, "*", "--step", "2", "--rank", "1")
    assert (status, err) == (0, "")
    assert [line.split("\t") for line in out.splitlines()] == [
        HEADER.split("\t"),
        ["2", "1", "forward/blocks.0.attn[0]", "bf16[2,8]", "0.5", "1", "1.5", "2.5", "1"],
        ["2", "1", "loss/micro_loss", "f32", "2.5", "", "", "", "0"],
        ["2", "1", "loss/micro_loss@1", "f32", "0.25", "", "", "", "0"],
        ["2", "1", "state/optimizer", "str", "AdamW", "", "", "", "0"],
    ]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("blocks.#.attn", ["forward/blocks.0.attn[0]"]),
        ("loss/*", ["loss/micro_loss", "loss/micro_loss@1"]),
        ("loss/micro_loss@1", ["loss/micro_loss@1"]),
        ("forward/blocks.0.attn[0]", ["forward/blocks.0.attn[0]"]),
    ],
)
def test_names_are_globs_or_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, found: list[str]
) -> None:
    assert show(capsys, record(tmp_path / "c"), name, "--names") == (0, "".join(f"{each}\n" for each in found), "")


def test_json_holds_the_run_and_the_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = record(tmp_path / "c", ranks=[0, 1])
    status, out, _ = show(capsys, capture, "attn", "--json")
    assert (status, json.loads(out)["values"]) == (0, [])
    _, out, _ = show(capsys, capture, "*attn*", "--json", "--step", 1, "--rank", 0)
    found = json.loads(out)
    del found["manifest"]
    assert found == {
        "path": str(capture),
        "run_id": RUN_ID,
        "world_size": 2,
        "steps": {"0": [1, 2], "1": [1, 2]},
        "problems": [],
        "values": [
            {
                "step": 1,
                "rank": 0,
                "quantity": "forward/blocks.0.attn[0]",
                "order": 0,
                "dtype": "bfloat16",
                "shape": [2, 8],
                "nonfinite": 1,
                "value": None,
                "l2": 0.5,
                "mean": 1.0,
                "mean_abs": 1.5,
                "rms": 2.0,
                "max_abs": 2.5,
                "text": "",
                "where": "Attention",
            }
        ],
    }


def test_what_does_not_exist_is_answered_with_what_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = record(tmp_path / "c")
    assert show(capsys, capture, "attn") == (
        2,
        "",
        f"Capture {capture} has no quantity 'attn'. Names that contain it: forward/blocks.0.attn[0].\n",
    )
    assert show(capsys, capture, "zzz", "--names") == (
        2,
        "",
        f"Capture {capture} has no quantity 'zzz'. Option --names lists them all.\n",
    )
    assert show(capsys, capture, "--step", 9) == (2, "", f"Capture {capture} has no step 9; it has 1-2.\n")
    assert show(capsys, capture, "--rank", 5) == (2, "", f"Capture {capture} has no rank 5; it has 0, 1.\n")


def test_a_damaged_segment_is_named_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = record(tmp_path / "c")
    segment = sorted(capture.glob("rank00000/*.h5"))[0]
    segment.write_bytes(segment.read_bytes()[:-100])
    status, out, err = show(capsys, capture, "loss/micro_loss", "--rank", 0)
    assert (status, out) == (
        2,
        f"{HEADER}\n2\t0\tloss/micro_loss\tf32\t2.5\t\t\t\t0\n2\t0\tloss/micro_loss@1\tf32\t0.25\t\t\t\t0\n",
    )
    assert str(segment) in err


def test_a_terminal_gets_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", terminal)
    capture = record(tmp_path / "c")
    assert cli.status_of(["show", str(capture), "*attn*", "--step", "1", "--rank", "0"]) == 0
    assert [line.rstrip() for line in terminal.getvalue().splitlines()] == [
        "Step  Rank  Quantity                  Type       Value or l2  Mean  Mean |x|  Max |x|  NaN",
        "1     0     forward/blocks.0.attn[0]  bf16[2,8]  0.5          1     1.5       2.5      1",
    ]


def test_types_are_short() -> None:
    assert [type_text("bfloat16", (2, 8)), type_text("float8_e4m3fn", (3,)), type_text("str", ())] == [
        "bf16[2,8]",
        "float8_e4m3fn[3]",
        "str",
    ]

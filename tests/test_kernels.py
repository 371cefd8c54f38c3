"""Attention kernels: noted per module, shown where the arms differ and in the runs table, and never judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from probe.judge.comparison import Comparison
from probe.judge.kernels import attention_kernels, kernel_changes
from probe.report.markdown import to_markdown
from probe.report.text import to_text
from tests.recording import command, probe, record
from tests.report_cases import PASSING


def with_kernels(comparison: Comparison, *kernels: str) -> Comparison:
    runs = [
        replace(run, environment={**run.environment, "attention": kernel})
        for run, kernel in zip(comparison.runs, kernels, strict=True)
    ]
    return replace(comparison, runs=tuple(runs))


def test_changes_name_the_modules_and_both_kernels() -> None:
    before = {f"blocks.{i}.attn": "flash_attn.flash_attn_interface.flash_attn_func" for i in range(12)}
    after = {**dict.fromkeys(before, "torch sdpa: math"), "extra": "torch sdpa: flash"}
    assert kernel_changes(before, after) == [
        "attention of blocks.0.attn, blocks.1.attn, blocks.10.attn, blocks.11.attn, blocks.2.attn, blocks.3.attn, "
        "blocks.4.attn, blocks.5.attn, blocks.6.attn, blocks.7.attn and 2 more: "
        "flash_attn.flash_attn_interface.flash_attn_func -> torch sdpa: math",
        "attention of extra: none seen -> torch sdpa: flash",
    ]
    assert kernel_changes(before, before) == []


def test_reports_show_one_line_where_all_runs_agree_and_one_per_kernel_where_not() -> None:
    count = len(PASSING.runs)
    same = to_text(with_kernels(PASSING, *["torch sdpa: flash (4 modules)"] * count))
    assert "Attention: torch sdpa: flash (4 modules)" in same.splitlines()
    mixed = with_kernels(PASSING, *["torch sdpa: math (4 modules)"] * (count - 1), "torch sdpa: flash (4 modules)")
    lines = [line for line in to_text(mixed).splitlines() if line.startswith("Attention")]
    names = [Path(run.path).name for run in PASSING.runs]
    assert lines == [
        f"Attention in {', '.join(names[:-1])}: torch sdpa: math (4 modules)",
        f"Attention in {names[-1]}: torch sdpa: flash (4 modules)",
    ]
    assert "| Arm | Run | Commit | Dirty | Command | Seed | Attention |" in to_markdown(mixed).splitlines()
    assert "Attention" not in to_text(PASSING)


def test_the_kernel_that_ran_is_recorded_per_module_and_told_when_the_branch_gets_another(tmp_path: Path) -> None:
    runs = {
        name: record(tmp_path / name, command("sdpa.py", *arguments), "--seed", "1")
        for name, arguments in {"base": (), "math": ("--math",), "package": ("--package",)}.items()
    }
    kernels = {name: attention_kernels(capture) for name, capture in runs.items()}
    assert kernels == {
        "base": {"blocks.0": "torch sdpa: flash", "blocks.1": "torch sdpa: flash"},
        "math": {"blocks.0": "torch sdpa: math", "blocks.1": "torch sdpa: math"},
        "package": {"blocks.0": "sageattention.sageattn", "blocks.1": "sageattention.sageattn"},
    }
    told = probe("diff", str(tmp_path / "base"), str(tmp_path / "math"))
    assert "attention of blocks.0, blocks.1: torch sdpa: flash -> torch sdpa: math" in told.stdout

"""The terminal report, word for word, for each outcome."""

from __future__ import annotations

import io
import sys

import pytest
from report_cases import FAILING, INCONCLUSIVE, NOT_COMPARABLE, PASSING

from probe.report import text
from probe.report.text import print_comparison, report_lines, to_text

PASSING_TEXT = """\
What is recorded           Difference   Tolerance        Unmodified      Sees  Verdict
attention outputs              0.41 %      1.23 %           0.411 %    0.61 %  within
  worst: step 4, rank 1, blocks.3.attn[0]: expected 12.35, actual 12.34
loss                          4.1e-07    9.5e-07*                 -         -  within
  worst: step 2, rank 0, micro_loss@1: expected 0.6931471, actual 0.6931474
batch                       identical       exact 0 (bit-identical)         -  identical
state, not judged                   -        none                 -         -  recorded only

0 of 1,290 values are above tolerance.
* assumed: nothing was measured for this tolerance; it is a floor from the precision of the numbers.
sees: the least relative change that would have been flagged at the first judged step.
difference: l2 norm of the difference / l2 norm of the baseline (attention outputs).
difference: |difference| / median of the baseline (loss).
expected, actual: the values themselves; for tensors, their l2 norms.

Coverage: 5,040 values matched; nothing unmatched.

Largest difference / tolerance between runs:
  baseline pair, base-0 and base-1: 0.31
  cross pair, base-0 and opt-0: 0.33 at blocks.3.attn, step 4 (the largest of 2)

Arm        Run     Ranks   Steps  Commit                Seed
baseline   base-0  2 of 2  1-5    0391d1c7aa            42
baseline   base-1  2 of 2  1-5    0391d1c7aa            42
candidate  opt-0   2 of 2  1-5    ce9f454b00 + changes  42
Command: accelerate launch --num_processes 2 train.py --lr 1e-4
  opt-0: with --fused
Tolerances: tolerances/job.toml

Equivalent: The closest call is attention outputs, at 33 % of its tolerance (step 4, rank 1, blocks.3.attn)."""

FAILING_TEXT = """\
What is recorded           Difference   Tolerance        Unmodified      Sees  Verdict
loss                                -     9.5e-07                 -         -  not finite 2 of 20
  where: each microbatch's loss, unrounded, as backward gets it
  worst: step 2, rank 0, micro_loss@1: expected 0.693, actual NaN
attention outputs              21.3 %      1.23 %           0.411 %    0.61 %  above 31 of 1,240
  where: outputs of attention modules
  worst: step 1, rank 1, blocks.2.attn: expected 12.3, actual 12.6
LoRA parameters of every block after step
                                    -       exact                 -         -  not comparable
  8 values not compared (no quantity of this check is in both arms)
norm outputs                   0.41 %     1.23 %~           0.411 %    0.61 %  within
  worst: step 4, rank 1, blocks.3.attn[0]: expected 12.35, actual 12.34
  some quantities are judged up to step 3 only, for unmodified runs drift apart after it
batch                       identical       exact 0 (bit-identical)         -  identical
state, not judged                   -        none                 -         -  recorded only

33 of 2,530 values are above tolerance.
~ vacuous: a scrambled run would pass this check, so its verdict says nothing.
sees: the least relative change that would have been flagged at the first judged step.
difference: l2 norm of the difference / l2 norm of the baseline (attention outputs, norm outputs).
difference: |difference| / median of the baseline (loss).
expected, actual: the values themselves; for tensors, their l2 norms.

First divergence: step 1, microbatch 0, rank 1 only: forward/blocks.2.attn
  difference 21.3 %, tolerance 0.411 %, expected 12.3, actual 12.6
  wrong here (forward): What entered it, blocks.2.norm1, is within tolerance.
  After it, 30 of 100 values of step 1 are off.
  Next: Keep the tensors around it: probe record --steps 1 --full blocks.2.attn -- CMD.

Coverage: 4,000 values matched; 12 missing, 1 unexpected, 1 reshaped, 1 retyped.
  missing (only in the baseline): forward/blocks.0.mlp, forward/blocks.1.mlp, forward/blocks.2.mlp,
    forward/blocks.3.mlp, forward/blocks.4.mlp, forward/blocks.5.mlp, forward/blocks.6.mlp,
    forward/blocks.7.mlp, forward/blocks.8.mlp, forward/blocks.9.mlp and 2 more
  unexpected (only in the candidate): forward/blocks.0.fused|mlp
  reshaped (with another shape): forward/(root)
  retyped (with another element type): grad/blocks.0.attn.qkv_proj.lora_A.weight

Differences between the arms:
  env ATTN_BACKEND: 'fa2' in the baseline, 'sdpa' in the candidate

Notes:
  The loss of step 5 is not finite in the candidate.
  1 * 2 | 3

Arm        Run     Ranks   Steps  Commit                Seed
baseline   base-0  2 of 2  1-5    0391d1c7aa            42
candidate  opt-0   2 of 2  1-5    ce9f454b00 + changes  42
  problem: rank 1 was not closed cleanly, last step 5
Command: accelerate launch --num_processes 2 train.py --lr 1e-4
  opt-0: with --fused
Tolerances: tolerances/job.toml

Different: 3 quantities are more than 10 times above tolerance. The first divergence is blocks.2.attn."""

INCONCLUSIVE_TEXT = """\
What is recorded           Difference   Tolerance        Unmodified      Sees  Verdict
attention outputs                 2 %     1.23 %*           0.411 %    0.61 %  above 31 of 1,240
  where: outputs of attention modules
  worst: step 1, rank 1, blocks.2.attn: expected 12.3, actual 12.6
batch                       identical       exact 0 (bit-identical)         -  identical

31 of 1,270 values are above tolerance.
* assumed: nothing was measured for this tolerance; it is a floor from the precision of the numbers.
sees: the least relative change that would have been flagged at the first judged step.
difference: l2 norm of the difference / l2 norm of the baseline.
expected, actual: the values themselves; for tensors, their l2 norms.

First divergence (provisional): step 1, microbatch 0, rank 1 only: forward/blocks.2.attn
  difference 21.3 %, tolerance 0.411 %, expected 12.3, actual 12.6
  wrong here (forward): What entered it, blocks.2.norm1, is within tolerance.
  After it, 30 of 100 values of step 1 are off.
  Next: Keep the tensors around it: probe record --steps 1 --full blocks.2.attn -- CMD.

Coverage: 5,040 values matched; nothing unmatched.

Arm        Run     Ranks   Steps  Commit                Seed
baseline   base-0  2 of 2  1-5    0391d1c7aa            42
candidate  opt-0   2 of 2  1-5    ce9f454b00 + changes  42
  problem: rank 1 was not closed cleanly, last step 5
Command: accelerate launch --num_processes 2 train.py --lr 1e-4
  opt-0: with --fused
Tolerances: tolerances/job.toml

Runs to add:
  two more baselines and one more candidate: probe record -o captures/base-3 --seed 42 -- accelerate
    launch --num_processes 2 train.py --lr 1e-4

Inconclusive: 1 quantity is above its tolerance, by less than 10 x."""

NOT_COMPARABLE_TEXT = """\
What is recorded           Difference   Tolerance        Unmodified      Sees  Verdict
LoRA parameters of every block after step
                                    -       exact                 -         -  not comparable
  8 values not compared (no quantity of this check is in both arms)

Coverage: 0 values matched; nothing unmatched.

Arm        Run     Ranks   Steps  Commit                Seed
baseline   base-0  2 of 2  1-5    0391d1c7aa            42
candidate  opt-0   2 of 2  1-5    ce9f454b00 + changes  42
Command: accelerate launch --num_processes 2 train.py --lr 1e-4
  opt-0: with --fused

Not comparable: No check compared anything."""


def test_a_passing_report_reads_like_this() -> None:
    assert to_text(PASSING) == PASSING_TEXT


def test_a_failing_report_reads_like_this() -> None:
    assert to_text(FAILING) == FAILING_TEXT


def test_an_inconclusive_report_reads_like_this() -> None:
    assert to_text(INCONCLUSIVE) == INCONCLUSIVE_TEXT


def test_a_report_of_what_cannot_be_compared_reads_like_this() -> None:
    assert to_text(NOT_COMPARABLE) == NOT_COMPARABLE_TEXT


def test_everything_details_each_row_and_names_all_that_is_unmatched() -> None:
    lines = to_text(FAILING, everything=True).splitlines()
    at = lines.index("batch                       identical       exact 0 (bit-identical)         -  identical")
    assert lines[at + 1 : at + 4] == [
        "  where: inputs of the root module",
        "  judged: 3 quantities, 30 values, exact",
        "  metric: equal or not",
    ]
    assert "forward/blocks.11.mlp" in to_text(FAILING, everything=True)
    assert "forward/blocks.11.mlp" not in to_text(FAILING)


def test_all_lines_but_the_verdict_fit_the_width() -> None:
    for comparison in (PASSING, FAILING, INCONCLUSIVE, NOT_COMPARABLE):
        for everything in (False, True):
            lines = to_text(comparison, everything=everything).splitlines()
            assert max(map(len, lines[:-1])) <= text.WIDTH


def test_the_table_goes_to_a_pipe_without_colour(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(FAILING)
    assert capsys.readouterr().out == FAILING_TEXT + "\n"


def test_the_table_has_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    print_comparison(FAILING)
    assert "\x1b[31mattention outputs" in terminal.getvalue()
    assert "\x1b[1;31mDifferent: 3 quantities" in terminal.getvalue()


def test_the_verdict_is_coloured_by_its_outcome() -> None:
    styles = [report_lines(each)[-1].style for each in (PASSING, FAILING, INCONCLUSIVE, NOT_COMPARABLE)]
    assert styles == ["bold green", "bold red", "bold yellow", "bold yellow"]

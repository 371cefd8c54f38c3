"""The command line: `probe record`, `calibrate`, `diff`, `show`; other modules add protocols, and what keeps captures.

Commands turn arguments into calls and results into exit statuses; everything heavy is imported inside them, so that
`probe --help` answers at once and comparing never imports torch. Results go to stdout, progress and warnings to stderr.
This module must not know how anything is recorded, judged or drawn.

Exit status: 0 equivalent (or done), 1 different, 2 could not tell. `probe record` passes its command's status on.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from probe import cli_protocols
from probe.cli_captures import checks_of, compare_captures, import_numpy, pack, prune
from probe.cli_output import Reports, github_summary, refuse_overwriting, show_comparison
from probe.errors import IncomparableError, NotEquivalentError, ProbeError

COULD_NOT_TELL = 2
INTERRUPTED = 130

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
# click would check what exists only half; whoever opens a path says what is wrong with it.
_FOLDER = _FILE = click.Path(path_type=Path)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, 1 or 2 as the module says, 130 when interrupted."""
    # Nearly all that a command makes lives until it ends, and most commands end soon: looking for garbage among it at
    # every 700 objects, and once more at the end, took an eighth of a small comparison. mypy has the same threshold.
    gc.set_threshold(200_000)
    status = status_of(sys.argv[1:] if arguments is None else arguments)
    gc.freeze()
    sys.exit(status)


def status_of(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit status; what went wrong is printed to stderr."""
    try:
        status = main.main(args=list(arguments), prog_name="probe", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except click.UsageError as error:
        click.echo(usage_message(error), err=True)
        return COULD_NOT_TELL
    except (click.ClickException, ProbeError) as error:
        click.echo(message_of(error), err=True)
        return COULD_NOT_TELL
    except NotEquivalentError as error:
        click.echo(message_of(error), err=True)
        return 1
    except BrokenPipeError:
        # The reader of a pipe left (`probe show | head`); without this, Python complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return COULD_NOT_TELL
    except Exception:
        # Python's own status would be 1, which means "different" here.
        import traceback

        traceback.print_exc()
        return COULD_NOT_TELL
    return status if isinstance(status, int) else 0


def message_of(error: Exception) -> str:
    """Return an exception's text with the notes that outer layers added, one per line."""
    text = error.format_message() if isinstance(error, click.ClickException) else str(error)
    return "\n".join([text, *getattr(error, "__notes__", [])])


def usage_message(error: click.UsageError) -> str:
    """Return what is wrong with the arguments, and where the help is."""
    path = error.ctx.command_path if error.ctx is not None else "probe"
    return f"{error.format_message()}\nSee '{path} -h'."


class _CandidateList(click.Command):
    """Lets `--candidate` take all paths that follow it, as in `--candidate OPT-0 OPT-1`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        taking = waiting = False
        for arg in [*args, ""]:
            if not arg or arg.startswith("-"):
                if waiting:
                    raise click.BadOptionUsage("candidate", "Option '--candidate' requires at least one capture.", ctx)
                taking = arg == "--candidate" or arg.startswith("--candidate=")
                waiting = arg == "--candidate"
                spread += [] if waiting or not arg else [arg]
            else:
                spread += ["--candidate", arg] if taking else [arg]
                waiting = False
        return super().parse_args(ctx, spread)


@click.group(context_settings=_HELP)
@click.version_option(package_name="trainprobe", prog_name="probe", message="%(prog)s %(version)s")
def main() -> None:
    """Show that a change to training code leaves its numbers alone, or where they first depart.

    \b
    probe record -o captures/base-0 --seed 42 --steps 1-5 -- python train.py    # three times
    probe calibrate captures/base-* -o tolerances/job.toml
    probe record -o captures/opt-0 --seed 42 --steps 1-5 -- python train.py     # on the branch
    probe diff captures/base-0 captures/opt-0 -t tolerances/job.toml

    Exit status: 0 equivalent, 1 different, 2 could not tell.
    """


def _perturbation(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if value and not re.fullmatch(r"(ulp|layer)(:[0-9]+)?", value):
        raise click.BadParameter(f"{value!r} is no perturbation. Write 'ulp', 'ulp:SEED', 'layer' or 'layer:SEED'.")
    return value


@main.command(context_settings={**_HELP, "allow_interspersed_args": False})
@click.option("-o", "--output", type=_FOLDER, metavar="DIR", help="Capture to write [default: captures/TIME].")
@click.option("--steps", metavar="STEPS", help="Optimizer updates to record, such as 1-5,10 [default: all].")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed random, numpy and torch with SEED + rank.")
@click.option("--plan", type=_FILE, metavar="FILE", help="Plan file (TOML): what to record, how to judge it.")
@click.option("--full", multiple=True, metavar="GLOB", help="Keep these tensors whole; may be repeated.")
@click.option(
    "--perturb",
    default="",
    metavar="HOW",
    callback=_perturbation,
    help="Move parameters by one ulp: ulp[:SEED], layer[:SEED].",
)
@click.option(
    "--step-offset",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Steps trained before the checkpoint that the run goes on from: its first step is N + 1.",
)
@click.option(
    "--steps-per-file",
    type=click.IntRange(1),
    metavar="N",
    help="Fold every N steps of a rank into one file, for runs of thousands [default: the plan's, or 1].",
)
@click.option("--strict", is_flag=True, help="Stop the training when recording fails.")
@click.option("--force", is_flag=True, help="Replace an existing capture.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def record(
    output: Path | None,
    steps: str | None,
    seed: int | None,
    plan: Path | None,
    full: tuple[str, ...],
    perturb: str,
    step_offset: int,
    steps_per_file: int | None,
    strict: bool,
    force: bool,
    command: tuple[str, ...],
) -> int:
    """Run a training command and record what it computes.

    The script is not edited; every process of the command that trains is recorded. The exit status is the command's,
    or 2 when nothing was recorded.

    \b
    probe record -o captures/base-0 --seed 42 --steps 1-5 -- accelerate launch train.py --lr 1e-4
    """
    from probe.plan import default_plan, load_plan

    planned = (default_plan() if plan is None else load_plan(plan)).narrowed(steps=steps, full=full)
    if output is None:
        import time

        output = Path("captures") / time.strftime("%Y%m%d-%H%M%S")
        click.echo(f"Recording to {output}.", err=True)

    from probe.capture.launch import RecordOptions
    from probe.capture.launch import record as launch

    return launch(
        RecordOptions(
            output=output,
            steps=str(planned.steps),
            seed=seed,
            plan=plan,
            full=full,
            perturb=perturb,
            step_offset=step_offset,
            steps_per_file=steps_per_file,
            strict=strict,
            force=force,
            command=command,
        )
    )


@main.command(context_settings=_HELP)
@click.argument("captures", nargs=-1, required=True, type=_FOLDER, metavar="CAPTURE...")
@click.option("-o", "--output", type=_FILE, required=True, metavar="FILE", help="Tolerance file (TOML) to write.")
@click.option("--plan", type=_FILE, metavar="FILE", help="Plan file whose checks name the families.")
@click.option("-k", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True, help="Tolerance / spread.")
@click.option("--force", is_flag=True, help="Replace an existing tolerance file.")
def calibrate(captures: tuple[Path, ...], output: Path, plan: Path | None, k: float, force: bool) -> None:
    """Turn repeated runs of the unmodified code into tolerances.

    \b
    probe calibrate captures/base-0 captures/base-1 captures/base-2 -o tolerances/job.toml
    """
    refuse_overwriting([output], force=force)
    import_numpy()
    from probe.judge.calibrate import calibrate as calibrated
    from probe.judge.tolerance import save
    from probe.report.calibration import calibration_table
    from probe.store.reader import open_capture

    checks = checks_of(plan)
    runs = [open_capture(path) for path in captures]
    tolerances = calibrated(runs, k=k, checks=checks)
    try:
        save(tolerances, output)
    except OSError as error:
        raise ProbeError(f"Tolerance file {output} cannot be written: {error.strerror}.") from error
    add = []
    if tolerances.assumed:
        from probe.judge.provenance_changes import perturbations, run_summary
        from probe.report.commands import perturbed_calibration

        summaries = [run_summary(run, "baseline") for run in runs]
        files = {"output": str(output), "plan": str(plan or "")}
        add = perturbed_calibration(summaries, perturbations(runs[0]), k=k, **files)
    click.echo(calibration_table(tolerances, add))
    click.echo(f"Tolerances of {len(captures)} runs are in {output}.", err=True)


@main.command(cls=_CandidateList, context_settings=_HELP)
@click.argument("captures", nargs=-1, required=True, type=_FOLDER, metavar="BASE... [CAND]")
@click.option(
    "--candidate",
    "candidates",
    multiple=True,
    type=_FOLDER,
    metavar="CAND...",
    help="Runs of the branch; all else is baseline.",
)
@click.option("-t", "--tolerances", type=_FILE, metavar="FILE", help="Tolerance file from `probe calibrate`.")
@click.option("--plan", type=_FILE, metavar="FILE", help="Plan file whose checks judge.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--all", "everything", is_flag=True, help="Show details of every check and name everything unmatched.")
@click.option("--same-code", is_flag=True, help="Allow both arms to have run the same code.")
@click.option(
    "--inject",
    metavar="KIND[:SIZE]",
    help="Judge the candidate with a known change in it, and say which checks would have flagged it.",
)
@click.option("--report", type=_FILE, metavar="F.html", help="Write a self-contained HTML page.")
@click.option("--markdown", type=_FILE, metavar="F.md", help="Write Markdown for a pull request.")
@click.option("--junit", type=_FILE, metavar="F.xml", help="Write JUnit XML.")
@click.option("--github", is_flag=True, help="Append the Markdown to the GitHub step summary.")
@click.option("--scheduler", metavar="ADDRESS", help="Read the captures on a Dask cluster that sees their paths.")
@click.option("--force", is_flag=True, help="Replace existing report files.")
def diff(
    captures: tuple[Path, ...],
    candidates: tuple[Path, ...],
    tolerances: Path | None,
    plan: Path | None,
    as_json: bool,
    everything: bool,
    same_code: bool,
    inject: str | None,
    report: Path | None,
    markdown: Path | None,
    junit: Path | None,
    github: bool,
    scheduler: str | None,
    force: bool,
) -> int:
    """Compare runs: is the candidate equivalent to the baseline?

    Exit status: 0 equivalent, 1 different, 2 could not tell.

    \b
    probe diff captures/base-0 captures/opt-0 -t tolerances/job.toml
    probe diff captures/base-* --candidate captures/opt-* -t tolerances/job.toml --markdown table.md
    probe diff captures/base-0 -t tolerances/job.toml --inject scale:1.001
    """
    import_numpy()
    if inject is not None:
        return _inject(captures, candidates, tolerances, plan, inject, as_json=as_json)
    baselines, candidates = arms(captures, candidates)
    outputs = [path for path in (report, markdown, junit) if path is not None]
    refuse_overwriting(outputs, force=force)
    summary = github_summary() if github else None

    from dataclasses import replace

    from probe.judge.tolerance import load
    from probe.store.reader import open_capture

    checks = checks_of(plan)
    allowed = None if tolerances is None else load(tolerances)
    expected, actual = ([open_capture(path) for path in arm] for arm in (baselines, candidates))
    try:
        comparison, judgements = compare_captures(
            expected, actual, allowed, checks=checks, same_code=same_code, scheduler=scheduler
        )
    except IncomparableError as error:
        if as_json:
            from probe.report.machine import incomparable, to_json

            click.echo(to_json(incomparable(str(error))))
        raise
    comparison = replace(comparison, tolerances=str(tolerances or ""), plan=str(plan or ""))
    reports = Reports(report=report, markdown=markdown, junit=junit, summary=summary)
    return show_comparison(comparison, judgements, checks, reports, as_json=as_json, everything=everything)


def _inject(
    captures: tuple[Path, ...],
    candidates: tuple[Path, ...],
    tolerances: Path | None,
    plan: Path | None,
    inject: str,
    *,
    as_json: bool,
) -> int:
    """Show the power of the checks. A single capture is judged against itself. The status is 0 whatever they see."""
    from probe.judge.inject import parse_injection
    from probe.judge.power import measure_power
    from probe.judge.tolerance import load
    from probe.report.power import to_json, to_text
    from probe.store.reader import open_capture

    injection = parse_injection(inject)
    alone = len(captures) == 1 and not candidates
    baselines, candidates = (captures, captures) if alone else arms(captures, candidates)
    checks = checks_of(plan)
    power = measure_power(
        [open_capture(path) for path in baselines],
        open_capture(candidates[0]),
        None if tolerances is None else load(tolerances),
        injection,
        checks=checks,
    )
    click.echo(to_json(power) if as_json else to_text(power))
    return 0


def arms(captures: tuple[Path, ...], candidates: tuple[Path, ...]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Split the arguments of `diff` into baselines and candidates: `BASE CAND`, or `BASE... --candidate CAND...`."""
    if candidates:
        return captures, candidates
    if len(captures) == 2:
        return captures[:1], captures[1:]
    if len(captures) == 1:
        raise click.UsageError(f"Only one capture is given: {captures[0]}. Add the candidate's capture.")
    raise click.UsageError(
        f"{len(captures)} captures are given, and nothing says which are candidates. "
        "Write 'probe diff BASE... --candidate CAND...'."
    )


@main.command(context_settings=_HELP)
@click.argument("capture", type=_FOLDER)
@click.argument("name", required=False, default="")
@click.option("--step", type=click.IntRange(1), help="Show this step only.")
@click.option("--rank", type=click.IntRange(0), help="Show this rank only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--names", is_flag=True, help="Print the names of the quantities, one a line.")
def show(capture: Path, name: str, step: int | None, rank: int | None, as_json: bool, names: bool) -> int:
    """Show what a capture holds: ranks, steps, quantities, values.

    NAME is a glob over quantities, such as 'loss/*' or 'blocks.#.attn'.

    \b
    probe show captures/base-0
    probe show captures/base-0 'grad/*lora_B*' --step 1 --rank 0
    """
    import_numpy()
    from probe.report.show import show_capture
    from probe.store.reader import open_capture

    return show_capture(open_capture(capture), name, step=step, rank=rank, as_json=as_json, names=names)


main.add_command(pack)
main.add_command(prune)
main.add_command(cli_protocols.selfcheck)
main.add_command(cli_protocols.verify)

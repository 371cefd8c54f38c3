"""The commands that run a whole protocol: `probe verify` and `probe selfcheck`.

Like the others they turn arguments into a call and its result into an exit status, and import what is heavy only when
they run. This module must not know how anything is run or judged.
"""

from __future__ import annotations

from pathlib import Path

import click

from probe.cli_output import Reports, github_summary, refuse_overwriting, show_comparison

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_PATH = click.Path(path_type=Path)
_COMMAND = {**_HELP, "allow_interspersed_args": False}


def _tell(line: str) -> None:
    click.echo(line, err=True)


@click.command(context_settings=_COMMAND)
@click.option("--baseline", required=True, metavar="REV|DIR", help="Unmodified code: a git revision or a folder.")
@click.option("--candidate", required=True, metavar="REV|DIR", help="Changed code: a git revision or a folder.")
@click.option("-n", "baselines", type=click.IntRange(2), default=3, show_default=True, help="Baselines to record.")
@click.option("-o", "--output", type=_PATH, metavar="DIR", help="Folder for all runs [default: captures/verify-ID].")
@click.option("--steps", default="", metavar="STEPS", help="Optimizer updates to record, such as 1-5 [default: all].")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed random, numpy and torch with SEED + rank.")
@click.option("--plan", type=_PATH, metavar="FILE", help="Plan file (TOML): what to record, how to judge it.")
@click.option("--link", "links", multiple=True, type=_PATH, metavar="PATH", help="Link data that git does not hold.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--all", "everything", is_flag=True, help="Show details of every check and name everything unmatched.")
@click.option("--same-code", is_flag=True, help="Allow both arms to run the same code.")
@click.option("--report", type=_PATH, metavar="F.html", help="Write a self-contained HTML page.")
@click.option("--markdown", type=_PATH, metavar="F.md", help="Write Markdown for a pull request.")
@click.option("--junit", type=_PATH, metavar="F.xml", help="Write JUnit XML.")
@click.option("--github", is_flag=True, help="Append the Markdown to the GitHub step summary.")
@click.option("--force", is_flag=True, help="Start over; replace existing runs and report files.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def verify(
    baseline: str,
    candidate: str,
    baselines: int,
    output: Path | None,
    steps: str,
    seed: int | None,
    plan: Path | None,
    links: tuple[Path, ...],
    as_json: bool,
    everything: bool,
    same_code: bool,
    report: Path | None,
    markdown: Path | None,
    junit: Path | None,
    github: bool,
    force: bool,
    command: tuple[str, ...],
) -> int:
    """Run two versions of the code, and compare them.

    A revision runs in a git worktree of its own, a folder as it is; each imports its own code, which is checked.
    Interrupted, the same command goes on where it stopped. Exit status: 0 equivalent, 1 different, 2 could not tell.

    \b
    probe verify --baseline main --candidate my-branch --seed 42 -- torchrun train.py
    probe verify --baseline HEAD --candidate . --seed 42 -- python train.py
    """
    written = [path for path in (report, markdown, junit) if path is not None]
    refuse_overwriting(written, force=force)
    reports = Reports(report=report, markdown=markdown, junit=junit, summary=github_summary() if github else None)

    from dataclasses import replace

    from probe.errors import IncomparableError
    from probe.protocol.verify import TOLERANCES_FILE, VerifyOptions
    from probe.protocol.verify import verify as verified

    options = VerifyOptions(
        baseline=baseline,
        candidate=candidate,
        command=command,
        output=output,
        baselines=baselines,
        steps=steps,
        seed=seed,
        plan=plan,
        links=links,
        same_code=same_code,
        force=force,
    )
    try:
        result = verified(options, tell=_tell)
    except IncomparableError as error:
        if as_json:
            from probe.report.machine import incomparable, to_json

            click.echo(to_json(incomparable(str(error))))
        raise
    comparison = replace(
        result.comparison, tolerances=str(result.output / TOLERANCES_FILE), plan=str(options.plan or "")
    )
    _tell(f"Runs, trees and tolerances are in {result.output}.")
    return show_comparison(
        comparison, result.judgements, result.checks, reports, as_json=as_json, everything=everything
    )


@click.command(context_settings=_COMMAND)
@click.option(
    "-o", "--output", type=_PATH, metavar="DIR", help="Keep captures and logs here [default: kept after errors]."
)
@click.option("--steps", default="", metavar="STEPS", help="Optimizer updates to record, such as 1-5 [default: all].")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed random, numpy and torch with SEED + rank.")
@click.option("--plan", type=_PATH, metavar="FILE", help="Plan file (TOML): what to record.")
@click.option("--runs", type=click.IntRange(3), default=60, show_default=True, help="Most runs of the command.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def selfcheck(
    output: Path | None, steps: str, seed: int | None, plan: Path | None, runs: int, command: tuple[str, ...]
) -> int:
    """Show that recording leaves a run's numbers alone.

    Runs the command twice as it is and once recorded; losses and trained parameters must have the same bits. If not,
    it runs on until it can name the points that disturb. Exit status: 0 the same, 1 not, 2 could not tell.

    \b
    probe selfcheck --seed 42 --steps 1-5 -- python train.py --lr 1e-4
    """
    import shutil
    import tempfile

    from probe.protocol.selfcheck import SelfcheckOptions, verdict_lines
    from probe.protocol.selfcheck import selfcheck as checked

    folder = Path(tempfile.mkdtemp(prefix="probe-selfcheck-")) if output is None else output
    options = SelfcheckOptions(command=command, output=folder, steps=steps, seed=seed, plan=plan, runs=runs)
    result = checked(options, tell=_tell)
    if output is None:
        # After an error it stays: the message names a log in it.
        shutil.rmtree(folder)
    for line in verdict_lines(result):
        click.echo(line)
    return result.exit_status

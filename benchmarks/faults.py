"""Run the fault zoo in all its tracks, and identical code in all its configurations, and print one table.

The zoo is a folder with `run_zoo.py`: faults and sound optimizations as patches of one training script. It is given by
path, for it is kept apart from the package. Each track records its own baselines; a track that was interrupted goes on
where it stopped, for captures that exist are used again.

    python benchmarks/faults.py --zoo ../shared/zoo --work /tmp/zoo-captures
    python benchmarks/faults.py --zoo ../shared/zoo --only F04,B02 --same 0

Exit status: 0 when no fault was missed or mislocated, no sound branch alarmed and every case ran; else 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACKS = ("native", "deterministic", "bf16")
SAME = "identical code"

_SUMMARY = re.compile(
    r"^\w+: detected (\d+)/(\d+), located (\d+)/(\d+), false alarms (\d+)/(\d+), errors (\d+), (\d+) s$", re.MULTILINE
)
_IDENTICAL = re.compile(
    r"^identical code: (\d+) comparisons, (\d+) false alarms, (\d+) needed more runs, (\d+) s$", re.M
)


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one track came to; None where the track has no such figure."""

    track: str
    detected: tuple[int, int] | None = None
    located: tuple[int, int] | None = None
    alarms: tuple[int, int] | None = None
    escalated: int = 0
    errors: int = 0
    missing: tuple[str, ...] = ()
    """Lines of the cases that were missed, mislocated, alarmed or did not run."""

    @property
    def sound(self) -> bool:
        """Whether everything is as it should be."""
        full = all(pair is None or pair[0] == pair[1] for pair in (self.detected, self.located))
        return full and not self.errors and (self.alarms is None or self.alarms[0] == 0)


def read_score(track: str, output: str) -> Score | None:
    """Read the output of one run of the zoo; None if it has no summary.

    >>> case = "F04 fault fp32 -> different (escalated)\\n"
    >>> text = case + "native: detected 1/1, located 0/1, false alarms 0/1, errors 0, 9 s"
    >>> score = read_score("native", text)
    >>> score.detected, score.located, score.alarms, score.escalated, score.sound
    ((1, 1), (0, 1), (0, 1), 1, False)
    """
    same = _IDENTICAL.search(output)
    if same is not None:
        total, alarms, escalated, _ = map(int, same.groups())
        return Score(track=track, alarms=(alarms, total), escalated=escalated, missing=_lines(output, " -> different"))
    found = _SUMMARY.search(output)
    if found is None:
        return None
    detected, faults, located, of, alarms, benign, errors, _ = map(int, found.groups())
    named = re.findall(r'"(?:missed|false_alarm|mislocated)_ids": \[([^\]]*)\]', output)
    wrong = set(re.findall(r'"([^"]+)"', " ".join(named)))
    return Score(
        track=track,
        detected=(detected, faults),
        located=(located, of),
        alarms=(alarms, benign),
        escalated=output.count("(escalated)"),
        errors=errors,
        missing=tuple(line for line in output.splitlines() if line.split(" ")[0] in wrong or " ERROR " in line),
    )


def _lines(output: str, text: str) -> tuple[str, ...]:
    return tuple(line for line in output.splitlines() if text in line)


def run_zoo(zoo: Path, arguments: Sequence[str]) -> Iterator[str]:
    """Run the zoo with the `probe` of this interpreter, and yield its lines as they come."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, str(zoo / "run_zoo.py"), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PATH": path}
    )
    assert process.stdout is not None
    yield from process.stdout
    process.wait()


def table(scores: Sequence[Score]) -> str:
    """Lay the scores out as one table."""

    def part(pair: tuple[int, int] | None) -> str:
        return "-" if pair is None else f"{pair[0]} of {pair[1]}"

    rows = [("Track", "Detected", "Located", "False alarms", "Escalated", "Errors")]
    for one in scores:
        numbers = (str(one.escalated), str(one.errors))
        rows.append((one.track, part(one.detected), part(one.located), part(one.alarms), *numbers))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, default=os.environ.get("PROBE_ZOO"), help="folder [default: $PROBE_ZOO]")
    parser.add_argument("--work", type=Path, default=Path("zoo-captures"), help="where captures go")
    parser.add_argument("--tracks", default=",".join(TRACKS), help="tracks, separated by commas")
    parser.add_argument("--same", type=int, default=20, help="runs of identical code in each configuration; 0: none")
    parser.add_argument("--only", default="", help="cases, separated by commas")
    options = parser.parse_args()
    if options.zoo is None or not (Path(options.zoo) / "run_zoo.py").is_file():
        parser.error(f"There is no run_zoo.py in {options.zoo}. Give the folder with --zoo, or set PROBE_ZOO.")
    tracks = [track for track in options.tracks.split(",") if track]
    if not set(tracks) <= set(TRACKS):
        parser.error(f"Tracks are {', '.join(TRACKS)}, and {options.tracks!r} has another.")
    only = ["--only", options.only] if options.only else []
    wanted = [(track, ["--track", track]) for track in tracks]
    if options.same:
        wanted += [(f"{SAME}, {track}", ["--track", track, "--same", str(options.same)]) for track in tracks]
    scores = []
    for name, arguments in wanted:
        lines = []
        for line in run_zoo(Path(options.zoo), [*arguments, *only, "--work", str(options.work)]):
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line)
        score = read_score(name, "".join(lines))
        scores.append(score or Score(track=name, errors=1, missing=tuple(lines[-3:])))
    print(table(scores))
    for score in scores:
        for line in score.missing:
            print(f"{score.track}: {line.strip()}")
    return 0 if all(score.sound for score in scores) else 1


if __name__ == "__main__":
    sys.exit(main())

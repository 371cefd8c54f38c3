"""Measure `probe diff`: many quantities against the time and memory it may take, whole tensors against `cmp`.

    python benchmarks/diff.py tables  [--quantities 2000] [--steps 30] [--ranks 8] [--repeats 5] [--folder DIR]
    python benchmarks/diff.py scaling [--steps 4] [--folder DIR]        # 8 and 64 ranks
    python benchmarks/diff.py tensors [--gigabytes 2] [--folder DIR]    # all different, all identical, and cmp

Captures are made of random numbers under --folder, and kept there for the next time. All arms run interleaved with
their files in the page cache. `cmp` stops at the first byte that differs, so it is given identical copies: it then
reads all, as a comparison of tensors that all differ must. Memory is the proportional set size of all processes,
sampled every 20 ms in a run of its own."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from made_captures import machine, make

PROBE = [sys.executable, "-m", "probe", "diff", "--json"]


@dataclass(frozen=True)
class Took:
    """One run of a command."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def once(*commands: list[str], watched: bool = False) -> Took:
    """Run commands one after the other; sample their memory only if asked, for that takes a quarter of a core."""
    peak, done = 0.0, threading.Event()
    pid = 0

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, _memory(pid) if pid else 0.0)

    watcher = threading.Thread(target=watch)
    if watched:
        watcher.start()
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for command in commands:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        pid = process.pid
        _, said = process.communicate()
        if process.returncode not in (0, 1, 2) or b"Traceback" in said:
            sys.exit(f"{' '.join(command)} failed:\n{said.decode()}")
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    done.set()
    if watched:
        watcher.join()
    return Took(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak)


def _memory(pid: int) -> float:
    """Return the proportional set size of a process and those below it in MB."""
    total = 0.0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total = int(line.split()[1]) / 1e3
        for task in os.listdir(f"/proc/{pid}/task"):
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
            total += sum(_memory(int(child)) for child in children)
    except (OSError, ProcessLookupError):
        pass
    return total


def interleaved(arms: dict[str, list[list[str]]], repeats: int) -> dict[str, list[Took]]:
    """Run all arms in turn, once to warm up and measure memory, then as often as asked, and print what each took."""
    peaks = {name: once(*commands, watched=True).peak_mb for name, commands in arms.items()}
    took: dict[str, list[Took]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, commands in arms.items():
            took[name].append(once(*commands))
    print(f"{machine()}; median (least to most) of {repeats} interleaved repeats")
    for name, runs in took.items():
        wall, cpu = ([getattr(run, field) for run in runs] for field in ("wall_s", "cpu_s"))
        print(f"{name:24s} wall {spread(wall)} s   CPU {spread(cpu)} s   memory {peaks[name]:.0f} MB")
    return took


def spread(values: list[float]) -> str:
    """Write a median with its range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def ratio(name: str, one: list[Took], two: list[Took]) -> None:
    """Print how fast the first is, in units of the second."""
    for what in ("wall_s", "cpu_s"):
        ratios = [getattr(b, what) / getattr(a, what) for a, b in zip(one, two, strict=True)]
        print(f"{name} by {'wall' if what == 'wall_s' else 'CPU'} time: {spread(ratios)} of the speed of cmp")


def runs_of(folder: Path, count: int, **shape: int) -> list[str]:
    """Make so many baselines and one candidate, or take those that are there; return arguments of `probe diff`."""
    paths = [folder / f"base-{number}" for number in range(count)] + [folder / "cand"]
    for seed, path in enumerate(paths):
        if not path.exists():
            print(f"Making {path}.", file=sys.stderr)
            make(path, noise=1e-6, seed=seed, code="branch" if path.name == "cand" else "unmodified", **shape)
    return [*map(str, paths[:-1]), "--candidate", str(paths[-1])]


def tables(options: argparse.Namespace, folder: Path) -> None:
    """Compare three baselines with a candidate."""
    shape = {"quantities": options.quantities, "steps": options.steps, "ranks": options.ranks}
    runs = runs_of(folder / "tables-{quantities}-{steps}-{ranks}".format(**shape), 3, **shape)
    interleaved({"3 baselines, 1 candidate": [[*PROBE, *runs]]}, options.repeats)


def scaling(options: argparse.Namespace, folder: Path) -> None:
    """Compare two runs of 8 and of 64 ranks."""
    arms = {}
    for ranks in (8, 64):
        shape = {"quantities": options.quantities, "steps": options.steps, "ranks": ranks}
        arms[f"{ranks} ranks"] = [[*PROBE, *runs_of(folder / f"scaling-{options.steps}-{ranks}", 1, **shape)]]
    took = interleaved(arms, options.repeats)
    ratios = [b.wall_s / a.wall_s for a, b in zip(took["8 ranks"], took["64 ranks"], strict=True)]
    print(f"64 ranks take {spread(ratios)} times as long as 8")


def tensors(options: argparse.Namespace, folder: Path) -> None:
    """Compare whole tensors that all differ, and that are all identical, with what cmp takes."""
    folder = folder / f"tensors-{options.gigabytes:g}"
    elements = int(options.gigabytes * 1e9 / 4 / 8 / 2 / 4)
    shape = {"quantities": 300, "steps": 2, "ranks": 2}
    for name, noise in (("base", 0.0), ("different", 1e-3), ("identical", 0.0)):
        if not (folder / name).exists():
            print(f"Making {folder / name}.", file=sys.stderr)
            code = "unmodified" if name == "base" else "branch"
            make(folder / name, noise=noise, code=code, seed=len(name), tensors=(16, elements), **shape)
    if not (folder / "copy").exists():
        shutil.copytree(folder / "base", folder / "copy")
    base = sorted((folder / "base").glob("rank*/step*.h5"))
    copies = [folder / "copy" / file.relative_to(folder / "base") for file in base]
    arms = {
        "cmp": [["cmp", str(one), str(two)] for one, two in zip(base, copies, strict=True)],
        "all different": [[*PROBE, str(folder / "base"), str(folder / "different")]],
        "all identical": [[*PROBE, str(folder / "base"), str(folder / "identical")]],
    }
    took = interleaved(arms, options.repeats)
    print(f"{sum(file.stat().st_size for file in base) / 1e9:.2f} GB on each side")
    for name in ("all different", "all identical"):
        ratio(name, took[name], took["cmp"])


def main() -> None:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tables", "scaling", "tensors"))
    parser.add_argument("--quantities", type=int, default=2000)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    options.steps = options.steps or (4 if options.what == "scaling" else 30)
    run = {"tables": tables, "scaling": scaling, "tensors": tensors}[options.what]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled modules are kept, as in any installation
    with tempfile.TemporaryDirectory() as temporary:
        run(options, options.folder or Path(temporary))


if __name__ == "__main__":
    main()

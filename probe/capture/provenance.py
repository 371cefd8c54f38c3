"""Say what code, versions and devices really ran, from what the process imported and not from where it was started.

The commonest way to a false PASS is that the branch never ran: an editable install, a worktree or a symlinked
environment imports the other tree (the project's job study, section 3). So the code's identity is taken from the files
of the modules in `sys.modules`. Runs once, on rank 0's writer thread. This module must not know what is recorded.
"""

from __future__ import annotations

import datetime
import getpass
import hashlib
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import xxhash

import probe
from probe.capture.attention import dispatch_constants
from probe.capture.session import REQUEST, Request
from probe.store.layout import FORMAT_CAPTURE, FORMAT_VERSION

ENVIRONMENT = (
    "CUDA_", "CUBLAS_", "NCCL_", "OMP_", "MKL_", "GOMP_", "KMP_", "ATEN_", "ONEDNN_", "TORCH_",
    "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_",
    "ACCELERATE_", "DIFFSYNTH_", "HF_HUB_OFFLINE", "TRANSFORMERS_", "XFORMERS_", "FLASH_", "TRITON_", "NVIDIA_TF32",
    "PYTHONHASHSEED", "RANK", "WORLD_SIZE", "LOCAL_RANK",
)  # fmt: skip
"""Prefixes of the environment variables that change numbers or kernels. Nothing else is stored: the environment holds
secrets."""
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")

VERSIONS = (
    "torch", "torchvision", "torchaudio", "numpy", "accelerate", "transformers", "peft", "diffsynth", "lightning",
    "pytorch-lightning", "diffusers", "trl", "deepspeed", "flash-attn", "flash-attn-3", "xformers", "sageattention",
    "triton", "trainprobe",
)  # fmt: skip
"""Distributions whose versions are stored if they are installed."""


_SCRIPT = getattr(sys.modules.get("__main__"), "__file__", None)
"""The script that runs. Python forgets it when the script ends, and a short job has ended when its provenance is asked
for; this module is imported while it runs."""


def manifest(request: Request, world_size: int, imported: tuple[str, ...] | None) -> dict[str, Any]:
    """Build what `capture.json` holds.

    Args:
        request: What was asked for.
        world_size: Number of ranks.
        imported: Files of the process's modules; None leaves provenance out, which takes a while to find out.
    """
    return {
        "format": FORMAT_CAPTURE,
        "version": FORMAT_VERSION,
        "run_id": request.run_id,
        "world_size": world_size,
        "created_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "config": {
            "command": list(request.command),
            "seed": request.seed,
            "steps": request.steps,
            "perturb": request.perturb,
            "step_offset": request.step_offset,
            "steps_per_file": request.steps_per_file,
            "plan": request.plan,
        },
        "provenance": {} if imported is None else provenance(imported),
        "env": environment(),
    }


def environment() -> dict[str, str]:
    """Select the environment variables that can change numbers."""
    chosen = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(ENVIRONMENT) and name != REQUEST and not any(word in name for word in SECRET)
    }
    return dict(sorted(chosen.items()))


def provenance(imported: tuple[str, ...]) -> dict[str, Any]:
    """Describe the code, given the files that were imported, the versions and the device of this process."""
    files = job_files(imported)
    digests = {str(path): digest for path in files if (digest := _file_hash(path))}
    trees = [_git(Path(root)) for root in sorted({_git_root(path) for path in files} - {""})]
    whole = hashlib.sha256()
    for path in sorted(digests, key=_relative):
        whole.update(f"{_relative(path)}\0{digests[path]}\n".encode())
    return {
        "code": {"hash": whole.hexdigest()[:16], "files": {path: digests[path] for path in sorted(digests)}},
        "trees": trees,
        "versions": versions(),
        "device": device(),
        "launcher": launcher(),
        "attention": dispatch_constants(),
    }


def job_files(imported: tuple[str, ...]) -> list[Path]:
    """Select the files that belong to the job: neither installed packages nor Python nor this package."""
    apart = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    apart.append(os.path.dirname(os.path.abspath(probe.__file__)))
    roots = tuple(os.path.realpath(path) + os.sep for path in (*apart, *generated_folders()))
    found = set()
    for file in (_SCRIPT, *imported):
        if isinstance(file, str) and file.endswith(".py"):
            path = os.path.realpath(file)
            if not path.startswith(roots) and f"{os.sep}site-packages{os.sep}" not in path and os.path.isfile(path):
                found.add(Path(path))
    return sorted(found)


def generated_folders() -> list[str]:
    """List the folders of kernels that Inductor and Triton generate: they are what the code they come from is."""
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not inductor:
        inductor = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return [inductor, os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton")]


def _file_hash(path: Path) -> str:
    try:
        return xxhash.xxh3_128_hexdigest(path.read_bytes())
    except OSError:
        return ""


def _git_root(path: Path) -> str:
    for folder in path.parents:
        if (folder / ".git").exists():
            return str(folder)
    return ""


def _relative(path: str) -> str:
    """Give a file's path inside its tree, so that the same code in two worktrees has the same identity."""
    root = _git_root(Path(path))
    return os.path.relpath(path, root) if root else os.path.basename(path)


def _git(root: Path) -> dict[str, Any]:
    def ask(*arguments: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout if done.returncode == 0 else ""

    changes = ask("status", "--porcelain", "--untracked-files=no")
    difference = ask("diff", "HEAD") if changes else ""
    return {
        "root": str(root),
        "commit": ask("rev-parse", "HEAD").strip(),
        "dirty": bool(changes.strip()),
        "diff_hash": xxhash.xxh3_64_hexdigest(difference.encode()) if difference else "",
    }


def versions() -> dict[str, str]:
    """Give the versions of Python and of the packages that decide numbers."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device() -> str:
    """Name the device that training ran on, with its capability."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
    return f"cpu ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"


def launcher() -> str:
    """Name what started the process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "accelerate" if any(name.startswith("ACCELERATE_") for name in os.environ) else "torchrun"
    return "python"

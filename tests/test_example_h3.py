"""The MiniMax-H3 example repeats bit for bit, its noise is honest, its branch right, its fault where it says."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")
for needed in ("diffsynth", "accelerate", "peft"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "minimax_h3"
DRIVER = Path(__file__).resolve().parent / "jobs" / "h3_runs.py"
FP32 = ["--steps", "2", "--dtype", "float32"]
BF16 = ["--steps", "1"]
RUNS = {
    "plain": FP32,
    "again": FP32,
    "noise-1": [*FP32, "--noise", "act", "--run-id", "1"],
    "noise-1-kept": [*FP32, "--noise", "act", "--run-id", "1", "--no-use_gradient_checkpointing"],
    "noise-2": [*FP32, "--noise", "act", "--run-id", "2"],
    "sdpa": [*FP32, "--branch", "optimized", "--optimizations", "sdpa"],
    "sac": [*FP32, "--branch", "optimized", "--optimizations", "sac"],
    "compile": [*FP32, "--branch", "optimized", "--optimizations", "compile"],
    "optimized": [*FP32, "--branch", "optimized"],
    "bf16": BF16,
    "bf16-noise": [*BF16, "--noise", "act", "--run-id", "1"],
    "bf16-faulty": [*BF16, "--branch", "faulty", "--optimizations", "sdpa,sac"],
}

# All tests in one process of pytest-xdist, for they share the runs.
pytestmark = pytest.mark.xdist_group("example_h3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what every run of `RUNS` left."""
    out = tmp_path_factory.mktemp("h3")
    settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(EXAMPLE), str(out)],
        input=json.dumps(RUNS),
        text=True,
        capture_output=True,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture
def noise() -> ModuleType:
    """The example's noise module with its state as a fresh process has it."""
    module = sys.modules.get("h3_noise")
    if module is None:
        spec = importlib.util.spec_from_file_location("h3_noise", EXAMPLE / "noise.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["h3_noise"] = module
        spec.loader.exec_module(module)
    module.STATE.run_id, module.STATE.rank, module.STATE.forward = 0, 0, 0
    return module


def losses(runs: Path, name: str) -> list[float]:
    return [line["loss"] for line in json.loads((runs / f"{name}.json").read_text())]


def weights(runs: Path, name: str) -> bytes:
    return (runs / f"{name}.safetensors").read_bytes()


def differences(runs: Path, name: str, baseline: str) -> dict[str, float]:
    """Relative L2 difference of each watched output, first forward pass, in order of execution."""
    with np.load(runs / f"{baseline}.npz") as expected, np.load(runs / f"{name}.npz") as actual:
        return {
            module: float(np.linalg.norm(actual[module] - expected[module]) / np.linalg.norm(expected[module]))
            for module in actual.files
        }


def test_the_same_seed_gives_the_same_losses_and_the_same_weights(runs: Path) -> None:
    assert losses(runs, "again") == losses(runs, "plain")
    assert weights(runs, "again") == weights(runs, "plain")
    steps = [line["step"] for line in json.loads((runs / "plain.json").read_text())]
    assert steps == [1, 2]


def test_another_run_id_gives_other_weights(runs: Path) -> None:
    # Not always another loss: in fp32 the noise of 20,000 outputs averages out below the loss's own precision.
    assert len({weights(runs, name) for name in ("plain", "noise-1", "noise-2")}) == 3


def test_noise_moves_the_loss_by_rounding_only(runs: Path) -> None:
    np.testing.assert_allclose(losses(runs, "noise-1"), losses(runs, "plain"), rtol=1e-5)


def test_a_recomputed_block_sees_the_noise_of_its_forward(runs: Path) -> None:
    assert losses(runs, "noise-1-kept") == losses(runs, "noise-1")
    assert weights(runs, "noise-1-kept") == weights(runs, "noise-1")


@pytest.mark.parametrize("name", ["sdpa", "compile", "sac", "optimized"])
def test_an_optimization_is_the_baseline_but_for_rounding(runs: Path, name: str) -> None:
    np.testing.assert_allclose(losses(runs, name), losses(runs, "plain"), rtol=1e-5)
    moved = differences(runs, name, "plain")
    assert {module: value for module, value in moved.items() if value > 1e-5} == {}


def test_the_compiled_branch_was_compiled_and_hides_only_the_norms(runs: Path) -> None:
    plain, optimized = (set(differences(runs, name, "plain")) for name in ("plain", "optimized"))
    assert plain - optimized == {f"blocks.{block}.norm1" for block in range(4)}
    assert optimized - plain == set()
    assert weights(runs, "optimized") != weights(runs, "plain")


def test_the_planted_fault_shows_first_in_the_attention_of_block_2(runs: Path) -> None:
    spread = differences(runs, "bf16-noise", "bf16")
    moved = differences(runs, "bf16-faulty", "bf16")
    far_off = [module for module, value in moved.items() if value > 20 * spread[module]]
    assert far_off[:1] == ["blocks.2.attn"]


def test_the_planted_fault_does_not_show_in_the_loss(runs: Path) -> None:
    actual, expected = losses(runs, "bf16-faulty"), losses(runs, "bf16")
    assert actual != expected
    np.testing.assert_allclose(actual, expected, rtol=0.01)


def ulps(moved: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """How many representable numbers lie between, for finite values of one sign."""
    bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[original.dtype]
    return (moved.view(bits).long() - original.view(bits).long()).abs()


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 2 / 256), (torch.float32, 0.5)])
def test_noise_moves_a_share_of_the_elements_by_one_ulp(noise: ModuleType, dtype: torch.dtype, share: float) -> None:
    values = torch.randn(200, 500, generator=torch.Generator().manual_seed(3)).to(dtype)
    moved = noise.move_ulps(values, torch.tensor(7))
    counts = torch.bincount(ulps(moved, values).flatten())
    assert len(counts) == 2
    assert counts[1].item() / values.numel() == pytest.approx(share, rel=0.15)
    upward = (moved > values).sum() / (moved != values).sum()
    assert upward.item() == pytest.approx(0.5, abs=0.1)


def test_noise_leaves_zeros_and_the_global_random_state_alone(noise: ModuleType) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    zeros = torch.zeros(1000)
    assert torch.equal(noise.move_ulps(zeros, torch.tensor(0)), zeros)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_noise_depends_on_run_rank_forward_and_layer_and_on_nothing_else(noise: ModuleType) -> None:
    values = torch.ones(4096)
    results = []
    for run_id, rank, forward, layer in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]:
        noise.STATE.run_id, noise.STATE.rank, noise.STATE.forward = run_id, rank, forward
        first, second = (noise.move_ulps(values, torch.tensor(layer)) for _ in range(2))
        assert torch.equal(first, second)
        results.append(first.numpy().tobytes())
    assert len(set(results)) == 5


def test_noise_hands_gradients_on_and_later_hooks_see_it(noise: ModuleType) -> None:
    layer = torch.nn.Linear(64, 64)
    model = torch.nn.Sequential(layer)
    inputs = torch.randn(32, 64)
    quiet = layer(inputs)
    quiet.sum().backward()
    expected = layer.weight.grad.clone()
    layer.weight.grad = None
    assert noise.add_noise(model, run_id=1, rank=0) == 1
    seen = []
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    model(inputs).sum().backward()
    assert torch.equal(layer.weight.grad, expected)
    assert [torch.equal(output, quiet) for output in seen] == [False]


def test_an_incomplete_checkpoint_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "make_checkpoint.py"), str(tmp_path / "tiny"), "3"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"{tmp_path / 'tiny'} exists and is not complete; 3 samples by recipe 1 are wanted. "
        "Remove it, or name another folder.\n"
    )


def test_a_complete_checkpoint_folder_is_used_again(runs: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (runs / "tiny").rglob("*")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "make_checkpoint.py"), str(runs / "tiny"), "3"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{runs / 'tiny'} is complete; nothing to do.\n")
    assert {path: path.stat().st_mtime_ns for path in (runs / "tiny").rglob("*")} == before

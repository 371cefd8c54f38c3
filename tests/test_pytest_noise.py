"""Gradients that are nothing but rounding: allowed to be another small number, not to be absent or large."""

from __future__ import annotations

import torch
from torch import nn

from probe.equivalence.noise import NOISE, SIZES, allow_noise, noise_of
from probe.equivalence.options import Options
from probe.judge.comparison import Verdict
from probe.judge.limits import edited
from probe.judge.tolerance import Tolerance, Tolerances
from probe.point import Key, Kind
from tests.test_pytest_check import SWEEP, X, checker, failure


def member(spread: float, tolerance: float | None = None, floor: float = 1e-6) -> Tolerance:
    allowed = max(3 * spread, floor) if tolerance is None else tolerance
    return Tolerance(spread=(spread,), floor=(floor,), tolerance=(allowed,))


def tolerances(**members: Tolerance) -> Tolerances:
    labels = {name.replace("__", "/").replace("_", "."): each for name, each in members.items()}
    return Tolerances(k=3.0, created_utc="", steps=(1,), world_size=1, runs=(), families={"all": labels})


def test_only_gradients_that_one_ulp_moves_by_their_own_size_are_rounding() -> None:
    found = tolerances(
        grad__k=member(NOISE), grad__q=member(NOISE * 0.99), forward__k=member(NOISE), backward__k=member(2 * NOISE)
    )
    assert noise_of(found) == ("backward/k", "grad/k")


def test_their_floor_is_raised_and_siblings_follow_as_in_any_calibration() -> None:
    keys = [Key(kind=Kind.GRAD, name=name) for name in ("b.0.k", "b.1.k", "b.0.q")]
    found = allow_noise(tolerances(grad__b_0_k=member(1.0), grad__b_1_k=member(1e-3), grad__b_0_q=member(1e-7)), keys)
    assert found.families["all"] == {
        "grad/b.0.k": member(1.0, tolerance=3 * SIZES, floor=3 * SIZES),
        "grad/b.1.k": member(1e-3, tolerance=SIZES),
        "grad/b.0.q": member(1e-7),
    }
    assert edited(found, {key.label: key for key in keys}) == ()


def test_they_have_a_row_of_their_own_and_others_keep_their_sight() -> None:
    baseline, candidate = SWEEP.Model(), SWEEP.Model(attention=True)
    SWEEP.randomize(baseline, 0)
    result = SWEEP.check(baseline, candidate, 0)
    rows = {check.what: check for check in result.comparison.checks}
    assert result.tolerances.self_test == {}
    assert rows["gradients that are rounding"].quantities == 2
    assert rows["parameter gradients"].smallest_detectable < 1e-3


class Keys(nn.Module):
    """Attention over keys with a bias that softmax does not see, unless `seen`."""

    def __init__(self, *, seen: bool = False, detached: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.randn(8))
        self.map = nn.Linear(8, 8)
        self.seen, self.detached = seen, detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias.detach() if self.detached else self.bias
        weights = (self.map(x) @ (x + bias).t()).softmax(-1)
        return weights @ (x + bias * 1e-3 if self.seen else x)


def test_a_real_gradient_in_the_place_of_rounding_is_found_and_so_is_none() -> None:
    found = checker()(Keys(), baseline=Keys(), inputs=(X,))
    assert {check.what: check.verdict for check in found.checks}["gradients that are rounding"] is Verdict.IDENTICAL
    assert "grad/bias" in failure(checker(), Keys(detached=True), baseline=Keys(), inputs=(X,)).splitlines()[0]
    declared = checker(tolerances={"forward/*": 1.0, "loss/*": 1.0, "backward/*": 1.0, "grad/map*": 1.0})
    text = failure(declared, Keys(seen=True), baseline=Keys(), inputs=(X,))
    assert "Worst: gradients that are rounding, step 1, rank 0, bias" in text


def test_tolerances_that_a_test_declares_do_not_ask_rounding_to_repeat() -> None:
    baseline, candidate = SWEEP.Model(), SWEEP.Model(attention=True)
    SWEEP.randomize(baseline, 2)
    candidate.load_state_dict(baseline.state_dict())
    checker(tolerances=1e-3)(candidate, baseline=baseline, inputs=(torch.randn(2, 24, 32),))
    assert Options(tolerances=1e-3).checks()[0].rel == 1e-3

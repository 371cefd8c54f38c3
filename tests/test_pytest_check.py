"""`probe_check` in one process: what it compares, what it leaves alone, what it says; and what the plugin adds."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from probe.equivalence.checker import Place, ProbeCheck
from probe.equivalence.options import Options, from_marker
from probe.errors import IncomparableError, NotEquivalentError, ProbeError
from probe.judge.comparison import Comparison, Outcome, Verdict

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]


def checker(**options: Any) -> ProbeCheck:
    place = Place(file=Path(__file__), test="test_x", nodeid="tests/test_x.py::test_x", root=ROOT)
    return ProbeCheck(place=place, options=Options(**options))


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("equivalence_benchmark", ROOT / "benchmarks" / "equivalence.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SWEEP = benchmark()


class Net(nn.Module):
    """Two linear maps; what a test changes is an argument."""

    def __init__(self, *, scale: float = 1.0, dropout: float = 0.0, nan: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(dropout)
        self.scale, self.nan = scale, nan

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(torch.tanh(self.first(x)) * self.scale)
        y = self.second(h)
        return y / 0 if self.nan else y


X = torch.linspace(-1, 1, 48).view(6, 8)


def failure(check: ProbeCheck, *args: Any, **kwargs: Any) -> str:
    with pytest.raises((NotEquivalentError, ProbeError)) as caught:
        check(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    "case", [case for case in SWEEP.cases() if case.variant != "compiled"], ids=lambda case: case.name
)
def test_sound_variants_pass_and_each_fault_is_found_in_its_module(case: Any) -> None:
    baseline, candidate = SWEEP.Model(), case.build()
    for seed in range(3):
        SWEEP.randomize(baseline, seed)
        assert SWEEP.wrong(case, SWEEP.check(baseline, candidate, seed)) == ""


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_passes_and_its_fault_is_found_in_its_block() -> None:
    baseline = SWEEP.Model()
    SWEEP.randomize(baseline, 0)
    for case in SWEEP.cases():
        if case.variant == "compiled" and case.fault in ("", "mlp:scale"):
            candidate = SWEEP.Model(fault=case.fault)
            for block in candidate.blocks:
                block.compile(backend="aot_eager")
            assert SWEEP.wrong(case, SWEEP.check(baseline, candidate, 0)) == ""


def test_output_loss_gradients_and_parameters_after_a_step_are_all_compared() -> None:
    found = checker(steps=2)(
        Net(), baseline=Net(), inputs=(X,), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    rows = {check.what: (check.verdict, check.quantities, check.cells) for check in found.checks}
    assert rows == {
        "output": (Verdict.IDENTICAL, 1, 2),
        "gradients of arguments": (Verdict.IDENTICAL, 1, 2),
        "batch": (Verdict.IDENTICAL, 1, 2),
        "initial parameters": (Verdict.IDENTICAL, 4, 4),
        "other module outputs": (Verdict.IDENTICAL, 3, 6),
        "loss": (Verdict.IDENTICAL, 1, 2),
        "gradients of other outputs": (Verdict.IDENTICAL, 3, 6),
        "parameter gradients": (Verdict.IDENTICAL, 4, 8),
        "parameters after step": (Verdict.IDENTICAL, 4, 8),
    }
    assert found.outcome is Outcome.EQUIVALENT


def test_the_first_divergence_is_the_module_behind_the_fault() -> None:
    text = failure(checker(), Net(scale=1.001), baseline=Net(), inputs=(X,))
    assert text.splitlines()[1] == "First divergence: step 1, microbatch 0, rank 0: forward/drop"
    assert "  origin here (forward): Everything compared before it in the step is within tolerance" in text


def test_other_weights_are_told_from_another_computation() -> None:
    other = Net()
    with torch.no_grad():
        other.second.bias.add_(1)
    assert failure(checker(), other, baseline=Net(), inputs=(X,)).splitlines()[0] == (
        "Different: A value that is judged exactly is not equal: param/second.bias:before at step 1. The first "
        "divergence is param of second.bias at step 1, rank 0 (state)."
    )


def test_a_missing_gradient_fails_whatever_the_tolerance() -> None:
    class Detached(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.drop(torch.tanh(nn.functional.linear(x, self.first.weight.detach(), self.first.bias)))
            return self.second(h)

    text = failure(checker(tolerances=100.0), Detached(), baseline=Net(), inputs=(X,))
    assert "missing" in text.splitlines()[0]
    assert "Would have passed: no tolerance; something required is missing, or has another shape." in text


def test_a_value_that_is_not_finite_never_passes() -> None:
    text = failure(checker(tolerances=1e9), Net(nan=True), baseline=Net(), inputs=(X,))
    assert text.splitlines()[0].startswith("Different: A value is not finite in the candidate and finite in the basel")
    text = failure(checker(), Net(nan=True), baseline=Net(nan=True), inputs=(X,))
    assert text.splitlines()[0].startswith("Not comparable: The baseline itself is not finite at ")


def test_modules_gradients_and_generators_are_as_before() -> None:
    baseline, candidate = Net(), Net(scale=2.0)
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(baseline, norm)
    (baseline(X).sum()).backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradient, random = baseline.first.weight.grad, torch.get_rng_state()
    failure(
        checker(),
        nn.Sequential(candidate, norm),
        baseline=model,
        inputs=(X,),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert baseline.first.weight.grad is gradient
    assert candidate.first.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_both_arms_draw_the_same_random_numbers() -> None:
    assert checker()(Net(dropout=0.5), baseline=Net(dropout=0.5), inputs=(X,)).outcome is Outcome.EQUIVALENT


def test_functions_are_compared_by_output_and_gradients_of_their_arguments() -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    def detached(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b.detach()

    inputs = (X, X.t().contiguous())
    found = checker()(lambda a, b: (b.t() @ a.t()).t(), baseline=product, inputs=inputs)
    assert [check.what for check in found.checks] == ["output", "gradients of arguments", "batch", "loss"]
    assert "missing" in failure(checker(), detached, baseline=product, inputs=inputs).splitlines()[0]
    # What is given a gradient is the test's choice, once it makes one.
    wanted = (X.clone().requires_grad_(), inputs[1])
    assert checker()(detached, baseline=product, inputs=wanted).outcome is Outcome.EQUIVALENT


def test_a_function_around_a_module_is_compared_with_the_module() -> None:
    net, faulty = Net(), Net(scale=1.001)
    assert checker()(lambda x: net(x), baseline=net, inputs=(X,)).coverage.missing == ()
    assert "forward/drop" in failure(checker(), lambda x: faulty(x), baseline=net, inputs=(X,)).splitlines()[1]


def test_a_candidate_with_other_insides_is_judged_by_what_both_have() -> None:
    net = nn.Sequential(*(nn.Identity() for _ in range(20)), Net())
    found = checker()(lambda x: net[20](x), baseline=net, inputs=(X,))
    assert found.outcome is Outcome.EQUIVALENT
    assert found.coverage.matched >= 9


def test_declared_tolerances_replace_measured_ones_and_say_so() -> None:
    off = Net(scale=1.001)
    assert checker(tolerances=0.01)(off, baseline=Net(), inputs=(X,)).outcome is Outcome.EQUIVALENT
    found = checker(tolerances={"*": 0.01})(off, baseline=Net(), inputs=(X,))
    assert {check.what: check.form for check in found.checks if "toler" in check.what} == {"tolerances": "rel"}
    assert failure(checker(tolerances={"forward/*": 0.01}), off, baseline=Net(), inputs=(X,)).startswith("Different")


def test_a_wider_multiple_of_the_spread_lets_more_pass() -> None:
    off = Net(scale=1.00001)
    assert failure(checker(), off, baseline=Net(), inputs=(X,)).startswith("Different")
    assert checker(k=1e4)(off, baseline=Net(), inputs=(X,)).outcome is Outcome.EQUIVALENT


def test_a_borderline_result_is_settled_with_more_repeats() -> None:
    found: Comparison | None = None
    try:
        found = checker()(Net(scale=1.0 + 2e-6), baseline=Net(), inputs=(X,))
    except NotEquivalentError as error:
        assert "above tolerance in every candidate" in str(error)  # noqa: PT017 - either is settled
    assert found is None or found.outcome is Outcome.EQUIVALENT


def test_low_precision_is_calibrated_by_every_layer() -> None:
    baseline = Net().to(torch.bfloat16)
    x = X.to(torch.bfloat16)
    assert checker()(lambda x: baseline(x), baseline=baseline, inputs=(x,)).outcome is Outcome.EQUIVALENT
    assert failure(checker(), Net(scale=1.5).to(torch.bfloat16), baseline=baseline, inputs=(x,)).startswith("Different")


def fused(x: torch.Tensor, net: Net, scale: float) -> torch.Tensor:
    h = torch.tanh(nn.functional.linear(x, net.first.weight, net.first.bias))
    return nn.functional.linear(h * scale, net.second.weight, net.second.bias)


def test_a_function_that_uses_the_weights_of_a_module_is_compared_by_their_gradients() -> None:
    net = Net()
    found = checker()(lambda x: fused(x, net, 1.0), baseline=net, inputs=(X,))
    rows = {check.what: check.cells for check in found.checks}
    assert (found.outcome, rows["parameter gradients"]) == (Outcome.EQUIVALENT, 4)
    text = failure(checker(), lambda x: fused(x, net, 1.01), baseline=net, inputs=(X,))
    # The modules between are no longer called, so nobody knows which of them is to blame.
    assert text.splitlines()[1] == "First divergence: step 1, microbatch 0, rank 0: forward/(output)"
    assert text.splitlines()[3].startswith("  origin unknown (forward): ")


def test_a_function_whose_weights_are_not_known_says_how_to_name_them() -> None:
    net = Net()
    weights = [net.first.weight, net.first.bias, net.second.weight, net.second.bias]

    def free(x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(nn.functional.linear(x, weights[0], weights[1]))
        return nn.functional.linear(h, weights[2], weights[3])

    text = failure(checker(), free, baseline=net, inputs=(X,))
    assert (
        "Note: The candidate is a function behind which no single module was found, so its parameters are not known. "
        "Give a module, or a function that closes over one."
    ) in text.splitlines()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"inputs": (X,)},
            "Call of probe_check has neither a baseline nor a name. Give baseline=FUNCTION to compare in this process, "
            "or name='...' to compare with a stored capture.",
        ),
        (
            {"inputs": (X,), "baseline": Net(), "name": "x"},
            "Call of probe_check has both a baseline and a name. Give baseline=FUNCTION to compare in this process, or "
            "name='...' to compare with a stored capture.",
        ),
        (
            {"inputs": X, "baseline": Net()},
            "Inputs of probe_check are 'Tensor', not a tuple. Write inputs=(x,).",
        ),
        (
            {"inputs": (X,), "baseline": 3},
            "The baseline of probe_check is 'int', which cannot be called. Give a module or a function.",
        ),
        (
            {"inputs": (X,), "baseline": lambda x: "text"},
            "The baseline of probe_check returned 'str' and no tensor, so there is nothing to compare. Return what it "
            "computes.",
        ),
        (
            {"inputs": (X,), "baseline": Net(), "optimizer": torch.optim.SGD(Net().parameters(), lr=0.1)},
            "The optimizer of probe_check is 'SGD'. Give a function of the parameters, such as `lambda parameters: "
            "torch.optim.AdamW(parameters, lr=1e-3)`: each arm has its own parameters.",
        ),
        (
            {"inputs": (X,), "baseline": Net(), "optimizer": lambda parameters: None},
            "The optimizer of probe_check made 'NoneType' of the parameters. Give a function of the parameters, such "
            "as `lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)`.",
        ),
    ],
)
def test_a_wrong_call_says_what_to_write(call: dict[str, Any], message: str) -> None:
    with pytest.raises(IncomparableError) as caught:
        checker()(Net(), **call)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((2,), {}, "Marker 'probe' takes named arguments only, and got 2. Write probe(steps=2)."),
        (
            (),
            {"tolerance": 1},
            "Marker 'probe' takes no argument 'tolerance'. Did you mean 'tolerances'? Allowed: k, ranks, seed, steps, "
            "tolerances.",
        ),
        ((), {"steps": 0}, "Argument 'steps' of the marker 'probe' is 0. Allowed: numbers from 1."),
        ((), {"k": -1}, "Argument 'k' of the marker 'probe' is -1. Allowed: numbers above 0; 3 is usual."),
        (
            (),
            {"tolerances": {"*": -1.0}},
            "Tolerance of '*' is -1.0. Allowed: relative differences from 0, such as 1e-5.",
        ),
    ],
)
def test_a_wrong_marker_says_what_is_allowed(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ProbeError) as caught:
        from_marker(args, kwargs)
    assert str(caught.value) == message


def test_the_checker_travels_to_processes_that_a_test_spawns() -> None:
    check = pickle.loads(pickle.dumps(checker(k=4.0)))
    assert check.options == Options(k=4.0)
    assert check(Net(), baseline=Net(), inputs=(X,)).outcome is Outcome.EQUIVALENT


# ---------------------------------------------------------------------- the plugin
FAILING = """
    import pytest
    import torch

    @pytest.mark.probe(k=5)
    def test_double(probe_check):
        probe_check(lambda x: x * 4, baseline=lambda x: x * 2, inputs=(torch.ones(4),))

    def test_same(probe_check):
        probe_check(lambda x: x * 2, baseline=lambda x: x + x, inputs=(torch.ones(4),))
"""


def test_numbers_go_to_junit_and_a_page_of_each_failed_check_to_the_report(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_double=FAILING)
    result = pytester.runpytest_inprocess("--probe-report", "pages", "--junitxml", "junit.xml")
    result.assert_outcomes(passed=1, failed=1)
    cases = ElementTree.parse(pytester.path / "junit.xml").findall(".//testcase")
    found = {
        case.get("name"): {each.get("name"): each.get("value") for each in case.findall("./properties/property")}
        for case in cases
    }
    assert found == {
        "test_double": {
            "probe.check1.verdict": "different",
            "probe.check1.difference_over_tolerance": "1.05e+06",
            "probe.check1.values": "4",
            "probe.check1.first_divergence": "forward/(output)",
        },
        "test_same": {
            "probe.check1.verdict": "equivalent",
            "probe.check1.difference_over_tolerance": "0",
            "probe.check1.values": "4",
        },
    }
    assert [path.name for path in (pytester.path / "pages").iterdir()] == ["test_double.test_double.check1.html"]
    page = (pytester.path / "pages" / "test_double.test_double.check1.html").read_text()
    assert "<title>probe: different</title>" in page
    result.stdout.fnmatch_lines(["E *Report: pages/test_double.test_double.check1.html"])


def test_failed_checks_are_annotated_under_github_actions_only(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_double=FAILING + "\n    def test_other():\n        assert False\n")
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert not any(line.startswith("::") for line in pytester.runpytest_inprocess().outlines)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    annotations = [line for line in pytester.runpytest_inprocess().outlines if line.startswith("::")]
    assert len(annotations) == 1
    assert annotations[0].startswith(
        "::error file=test_double.py,line=6,title=probe%3A not equivalent::Different: 3 quantities are more than 10 "
        "times above tolerance. The first divergence is forward of (output) at step 1, rank 0 (forward).%0AFirst "
        "divergence: step 1, microbatch 0, rank 0: forward/(output)%0A  difference 100 %25, 1.05e+06 x its "
        "tight tolerance (9.54e-07), "
    )


RESEEDING = """
    import random, time
    import pytest

    def pytest_runtest_call(item):
        # What plugins that shuffle tests do: another seed in every run.
        import torch
        torch.manual_seed(time.time_ns() % 2**32)
        random.seed(time.time_ns())
"""
SEEDED = """
    import random
    import pytest
    import torch

    @pytest.mark.probe(seed={seed})
    @pytest.mark.parametrize("n", [1, 2])
    def test_seeded(probe_check, n):
        weight = torch.randn(4) * random.random()
        probe_check(lambda x: x * weight, name="y", inputs=(torch.randn(4),))
"""


def test_a_test_is_seeded_whatever_other_plugins_do(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(RESEEDING)
    pytester.makepyfile(test_seeded=SEEDED.format(seed=0))
    pytester.runpytest_inprocess("--probe-record-all").assert_outcomes(passed=2)
    pytester.runpytest_inprocess().assert_outcomes(passed=2)
    pytester.makepyfile(test_seeded=SEEDED.format(seed=1))
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["E *Different: The data differ: batch/(input)[[]0[]] at step 1, so that what follows is not comparable.*"]
    )


def test_checks_work_in_xdist_workers_and_importlib_mode_and_with_a_shuffling_plugin(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(test_double=FAILING, test_seeded=SEEDED.format(seed=0))
    (pytester.path / "captures" / "test_seeded.test_gone").mkdir(parents=True)
    shuffling = ["-p", "randomly"] if importlib.util.find_spec("pytest_randomly") else []
    options = ["-n", "2", "--import-mode=importlib", "--probe-record", "--junitxml", "junit.xml", *shuffling]
    result = pytester.runpytest_subprocess(*options)
    result.assert_outcomes(passed=1, failed=3)
    assert len([line for line in result.outlines if line.startswith("recorded: captures/test_seeded.")]) == 2
    result.stdout.fnmatch_lines(["stale: captures/test_seeded.test_gone (its test is gone; remove it)"])
    pytester.runpytest_inprocess("test_seeded.py").assert_outcomes(passed=2)
    names = [each.get("name") for each in ElementTree.parse(pytester.path / "junit.xml").findall(".//property")]
    assert sorted(set(names)) == [
        "probe.check1.difference_over_tolerance",
        "probe.check1.first_divergence",
        "probe.check1.values",
        "probe.check1.verdict",
        "probe.recorded",
    ]


def imported(*options: str) -> set[str]:
    """List what a pytest run imports that collects a file without checks."""
    code = "import sys, pytest; pytest.main(sys.argv[1:]); print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, "--co", "-q", *options], capture_output=True, text=True, timeout=120, check=True
    )
    return {line for line in done.stdout.splitlines() if line.replace(".", "_").isidentifier()}


def test_a_run_without_checks_imports_the_plugin_and_nothing_else(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing():\n    pass")
    added = imported() - imported("-p", "no:probe")
    assert added == {"probe", "probe.pytest_plugin"}


def test_the_import_rule_can_fail(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import probe.equivalence.options\n\ndef test_nothing():\n    pass")
    assert "numpy" in imported() or "probe.equivalence.options" in imported()


def test_the_options_and_the_marker_explain_themselves(pytester: pytest.Pytester) -> None:
    text = " ".join(pytester.runpytest_inprocess("--help").stdout.str().split())
    for words in (
        "--probe-record Record baselines that are missing or no longer met, and fail, so that a person looks.",
        "--probe-record-all Record all baselines anew, and pass.",
        "--probe-report=DIR Write an HTML page of every failed check to DIR.",
    ):
        assert words in text
    pytester.runpytest_inprocess("--markers").stdout.fnmatch_lines(["@pytest.mark.probe(tolerances=None, steps=1, *"])


def test_what_is_red_by_little_counts_only_if_it_repeats_at_the_neighbours() -> None:
    def near(x: torch.Tensor) -> torch.Tensor:
        # Just above tolerance at the given weights, exactly right one ulp away.
        return net(x) * (1 + 3e-6 if torch.equal(x.detach(), X) else 1.0)

    def far(x: torch.Tensor) -> torch.Tensor:
        return net(x) * (1 + 3e-3 if torch.equal(x.detach(), X) else 1.0)

    net = Net()
    found = checker()(near, baseline=net, inputs=(X,))
    assert found.outcome is Outcome.EQUIVALENT
    assert found.notes[-1].startswith("Without perturbation it was not: ")
    assert found.notes[-1].endswith("With both moved by ulp:1 everything is within (escalated).")
    assert failure(checker(), far, baseline=net, inputs=(X,)).startswith("Different")
    assert failure(checker(), lambda x: net(x) * (1 + 3e-6), baseline=net, inputs=(X,)).startswith("Different")

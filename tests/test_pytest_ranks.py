"""Checks on several ranks: the marker that starts them, and tests that spawn ranks themselves."""

from __future__ import annotations

import pytest
import torch  # noqa: F401 - the inner runs share it: it cannot be imported twice

from probe.equivalence.ranks import Outcome, told
from probe.store.reader import open_capture

pytest_plugins = ["pytester"]

NET = """
    import os
    import pytest
    import torch
    import torch.distributed as distributed
    from torch import nn

    class Net(nn.Module):
        def __init__(self, scale=1.0):
            super().__init__()
            self.map, self.scale = nn.Linear(4, 4), scale

        def forward(self, x):
            y = self.map(x) * (self.scale if distributed.get_rank() else 1.0)
            distributed.all_reduce(y.detach().clone())  # ranks that do not run in step would wait here for ever
            return y

    def pair(scale):
        baseline, candidate = Net(), Net(scale)
        candidate.load_state_dict(baseline.state_dict())
        return candidate, baseline
"""


def test_the_marker_runs_a_test_on_ranks_and_compares_all_of_them(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        def pytest_addoption(parser):
            parser.addoption("--scale", type=float, default=1.0)

        @pytest.fixture
        def scale(request):
            return request.config.getoption("--scale")
        """
    )
    pytester.makepyfile(
        test_net=NET
        + """
    class TestNet:
        @pytest.mark.probe(ranks=2)
        @pytest.mark.parametrize("width", [6])
        def test_net(self, probe_check, scale, tmp_path, width):
            assert os.environ["WORLD_SIZE"] == str(distributed.get_world_size()) == "2"
            candidate, baseline = pair(scale)
            found = probe_check(candidate, baseline=baseline, inputs=(torch.randn(width, 4),))
            assert [run.ranks for run in found.runs] == [2, 2]
    """
    )
    pytester.runpytest_inprocess("--junitxml", "junit.xml").assert_outcomes(passed=1)
    assert "probe.check1.verdict" in (pytester.path / "junit.xml").read_text()
    result = pytester.runpytest_inprocess("--scale", "1.5")
    result.assert_outcomes(failed=1)
    assert "All ranks of 2 failed:" in result.outlines
    assert "E   First divergence: step 1, microbatch 0, rank 1 only: forward/(output)" in result.outlines
    result.stdout.fnmatch_lines(["*Captured probe_check, check1 call*", "output *above 1 of 2"])


def test_a_baseline_of_two_ranks_is_stored_whole_and_read_by_both(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_net=NET
        + """
    @pytest.mark.probe(ranks=2)
    def test_net(probe_check):
        probe_check(Net(), name="net", inputs=(torch.randn(6, 4),))
    """
    )
    pytester.runpytest_inprocess("--probe-record-all").assert_outcomes(passed=1)
    capture = open_capture(pytester.path / "captures" / "test_net.test_net" / "net")
    assert (capture.world_size, capture.ranks, capture.problems) == (2, (0, 1), ())
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_a_rank_that_dies_or_skips_is_told(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_ranks="""
        import os
        import pytest
        import torch.distributed as distributed

        @pytest.mark.probe(ranks=2)
        def test_dies():
            if distributed.get_rank() == 1:
                os._exit(3)

        @pytest.mark.probe(ranks=2)
        def test_skips():
            pytest.skip("not today")
        """
    )
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(failed=1, skipped=1)
    assert "Rank 1 of 2 ended without a word." in result.outlines
    result.stdout.fnmatch_lines(["SKIPPED*not today"])


def test_a_test_may_spawn_its_ranks_itself(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_spawn=NET
        + """
    def work(rank, probe_check, store, scale):
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        try:
            torch.manual_seed(0)
            candidate, baseline = pair(scale)
            probe_check(candidate, baseline=baseline, inputs=(torch.randn(6, 4),))
        finally:
            distributed.destroy_process_group()

    @pytest.mark.parametrize("scale", [1.0, 1.5])
    def test_spawn(probe_check, tmp_path, scale):
        torch.multiprocessing.spawn(work, (probe_check, tmp_path / "store", scale), nprocs=2)
    """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E *First divergence: step 1, microbatch 0, rank 1 only: forward/(output)"])


def test_what_ranks_say_alike_is_said_once() -> None:
    same = [Outcome(rank=rank, outcome="failed", text="boom") for rank in range(2)]
    assert told(same) == "All ranks of 2 failed:\nboom"
    other = [Outcome(rank=0, outcome="passed"), Outcome(rank=1, outcome="failed", text="a"), same[0]]
    assert told([other[0], other[1]]) == "Rank 1 of 2 failed:\na"
    assert told([Outcome(rank=0, outcome="passed"), Outcome(rank=1, outcome="died")]) == (
        "Rank 1 of 2 ended without a word."
    )
    assert told([Outcome(rank=0, outcome="passed")]) == ""

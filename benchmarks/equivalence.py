"""Count false failures and missed faults of `probe_check` over many random seeds.

A two-block transformer in fp32 is the baseline. Four sound variants of it must pass at every seed: attention by a fused
kernel, the norm and gate fused in the MLP, activation checkpointing, compiled blocks. Each of these with a fault in its
second block (a scale of 1.001, two heads swapped, a gradient that is missing) must fail at every seed, and the first
divergence must be in the module that has the fault. Ratios only; nothing is timed.

    python benchmarks/equivalence.py --seeds 200
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from probe.equivalence.arm import Inputs, find_arm
from probe.equivalence.options import Options
from probe.equivalence.protocol import REPEATS, Recorded, Result, check_in_process
from probe.equivalence.run import Job
from probe.judge.comparison import Outcome

WIDTH, HEADS, TOKENS, BATCH = 32, 4, 24, 2
SCALE = 1.001
FAULTY = 1
"""Index of the block that has the fault."""


class Attention(nn.Module):
    """Causal self-attention, written out, or by the fused kernel."""

    def __init__(self, *, fused: bool, fault: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fused, self.fault = fused, fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.fault == "head":
            q = q[:, [1, 0, *range(2, HEADS)]]
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            weights = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            y = weights.masked_fill(future, float("-inf")).softmax(-1) @ v
        y = y.transpose(1, 2).reshape(x.shape)
        if self.fault == "scale":
            y = y * SCALE
        if self.fault == "gradient":
            return F.linear(y, self.o.weight.detach(), self.o.bias)
        return self.o(y)


class GatedMLP(nn.Module):
    """RMS norm and a gated MLP: five operations, or three fused ones."""

    def __init__(self, *, fused: bool, fault: str) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.up, self.gate, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH, bias=False),
            nn.Linear(WIDTH, 2 * WIDTH, bias=False),
            nn.Linear(2 * WIDTH, WIDTH, bias=False),
        )
        self.fused, self.fault = fused, fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm.detach() if self.fault == "gradient" else self.norm
        if self.fused:
            h = F.rms_norm(x, (WIDTH,), norm, 1e-6)
            up, gate = F.linear(h, torch.cat([self.up.weight, self.gate.weight])).chunk(2, -1)
        else:
            h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm
            up, gate = self.up(h), self.gate(h)
        y = self.down(up * F.silu(gate))
        return y * SCALE if self.fault == "scale" else y


class Block(nn.Module):
    """Attention and MLP with residuals."""

    def __init__(self, *, attention: bool = False, mlp: bool = False, recompute: bool = False, fault: str = "") -> None:
        super().__init__()
        place, _, kind = fault.partition(":")
        self.attn = Attention(fused=attention, fault=kind if place == "attn" else "")
        self.mlp = GatedMLP(fused=mlp, fault=kind if place == "mlp" else "")
        self.recompute = recompute

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.recompute else self.compute(x)


class Model(nn.Module):
    """Two blocks, of which the second may have a fault."""

    def __init__(self, *, fault: str = "", compiled: bool = False, **variant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(fault=fault if n == FAULTY else "", **variant) for n in range(2))
        if compiled:
            for block in self.blocks:
                block.compile()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


VARIANTS: dict[str, dict[str, bool]] = {
    "fused attention": {"attention": True},
    "fused norm and gate": {"mlp": True},
    "checkpointed": {"recompute": True},
    "compiled": {"compiled": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A variant, sound or with a fault, and where the fault is to be found."""

    variant: str
    fault: str
    found_at: str
    """Prefix of the first divergence's name; empty for a sound variant."""

    @property
    def name(self) -> str:
        return f"{self.variant}, {self.fault or 'sound'}"

    def build(self) -> Model:
        """Build the candidate."""
        return Model(fault=self.fault, **VARIANTS[self.variant])


def cases() -> Iterator[Case]:
    """List every variant with no fault and with each fault."""
    faults = {
        "attn:scale": "blocks.1.attn",
        "attn:head": "blocks.1.attn",
        "attn:gradient": "blocks.1.attn.o",
        "mlp:scale": "blocks.1.mlp",
        "mlp:gradient": "blocks.1.mlp.norm",
    }
    for variant in VARIANTS:
        yield Case(variant=variant, fault="", found_at="")
        for fault, where in faults.items():
            inside = variant == "compiled" and not fault.endswith("gradient")
            # What is inside a compiled block is not seen: the block is the finest name there is.
            yield Case(variant=variant, fault=fault, found_at="blocks.1" if inside else where)


def randomize(baseline: nn.Module, seed: int) -> None:
    """Give the baseline random weights."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in baseline.parameters():
            parameter.copy_(torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5))
            if parameter.shape == (WIDTH,):
                parameter.add_(1)


def check(baseline: nn.Module, candidate: nn.Module, seed: int, known: Recorded | None = None) -> Result:
    """Give the candidate the baseline's weights and compare them, as `probe_check` does.

    Args:
        baseline: With its weights.
        candidate: Another module with the same parameters.
        seed: Of the input.
        known: The baseline as recorded with this seed.
    """
    with torch.no_grad():
        for ours, theirs in zip(candidate.parameters(), baseline.parameters(), strict=True):
            ours.copy_(theirs)
    torch.manual_seed(seed)
    inputs = Inputs((torch.randn(BATCH, TOKENS, WIDTH),), {})
    options = Options(seed=seed)
    return check_in_process(
        find_arm("baseline", baseline),
        find_arm("candidate", candidate),
        Job(inputs=inputs, loss=None, optimizer=None, steps=1, seed=seed, command=()),
        k=options.k,
        checks=options.checks(),
        tolerances=None,
        known=known,
    )


def wrong(case: Case, result: Result) -> str:
    """Say what is wrong with a result, or nothing."""
    comparison = result.comparison
    if not case.fault:
        return "" if comparison.outcome is Outcome.EQUIVALENT else f"false failure: {comparison.reason}"
    if comparison.outcome is not Outcome.DIFFERENT:
        return f"missed: {comparison.outcome}: {comparison.reason}"
    found = comparison.first_divergence
    name = found.place.name if found else "nowhere"
    return (
        "" if name == case.found_at or name.startswith(f"{case.found_at}.") else f"found at {name}: {comparison.reason}"
    )


def sweep(seeds: range, wanted: Callable[[Case], bool] = lambda case: True) -> dict[str, Counter[str]]:
    """Check all cases with all seeds; count what went wrong by case. The baseline is recorded once for each seed."""
    baseline = Model()
    candidates = {case: case.build() for case in filter(wanted, cases())}
    results: dict[str, Counter[str]] = {case.name: Counter() for case in candidates}
    for count, seed in enumerate(seeds, 1):
        randomize(baseline, seed)
        known = None
        for case, candidate in candidates.items():
            result = check(baseline, candidate, seed, known)
            # Escalation recorded more of it: every case begins with as few repeats as a test does.
            known = known or (
                result.recorded if result.recorded and len(result.recorded.perturbed) == REPEATS else None
            )
            text = wrong(case, result)
            results[case.name]["right" if not text else f"seed {seed}: {text}"] += 1
        if count % 20 == 0:
            print(f"{count} seeds, {sum(each['right'] < count for each in results.values())} cases wrong", flush=True)
    for name, counts in results.items():
        print(f"{name}: {counts['right']} of {len(seeds)} right")
        for line in [line for line in counts if line != "right"][:5]:
            print(f"  {line}")
    return results


def main() -> int:
    """Run the sweep; exit status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--case", default="", help="only cases whose name has this text")
    given = parser.parse_args()
    results = sweep(range(given.first, given.first + given.seeds), lambda case: given.case in case.name)
    sound = [counts for name, counts in results.items() if name.endswith("sound")]
    faults = [counts for name, counts in results.items() if not name.endswith("sound")]
    for what, group in (("sound variants passed", sound), ("faults caught at their module", faults)):
        total = sum(sum(counts.values()) for counts in group)
        print(f"{what}: {sum(counts['right'] for counts in group)} of {total}")
    return 0 if all(counts["right"] == sum(counts.values()) for counts in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Call one arm as a training step would, and record what it computes.

Forward, loss, backward, and the optimizer's step if there is one. The values are taken by the same taps and summaries
as in a recorded training job, under the same kinds and names, so that they are judged by the same rules. This module
must not know which arm is which, or what is allowed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from probe.capture import perturb, provenance
from probe.capture.recorder import Recorder, ranks, step_key
from probe.capture.taps import Taps, tensors_in
from probe.equivalence.arm import Arm, Inputs, State, seed_all
from probe.equivalence.memory import MemoryCapture
from probe.errors import IncomparableError
from probe.plan import Plan
from probe.point import Key, Kind
from probe.store.folder import now
from probe.store.layout import StepRows

OUTPUT = "(output)"
"""Name of what the call returned; parentheses cannot occur in a module path."""
INPUT = "(input)"
"""Name of the call's arguments and of their gradients."""

PLAN = Plan(
    kinds=(Kind.BATCH, Kind.FORWARD, Kind.BACKWARD, Kind.LOSS, Kind.GRAD, Kind.PARAM),
    include=(f"batch/{INPUT}",),
    exclude=("forward/(root)", "backward/(root)"),
)
"""What a check records. The root's output is recorded as what the call returned, whether or not it is a module's."""

LOW_PRECISION = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What both arms do, besides the call itself."""

    inputs: Inputs
    loss: Callable[[Any], torch.Tensor] | None
    """Makes a number of the output; None: `projected`."""
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None
    steps: int
    seed: int
    command: tuple[str, ...]
    """How the check is run again, for the report."""


def projected(output: Any) -> torch.Tensor:
    """Make a number of an output to which every element contributes with a weight of its own.

    A mean or a sum of squares would not do: behind a normalization its gradient is zero. A single number is its own
    loss.
    """
    tensors = [tensor for _, tensor in tensors_in(output) if tensor.requires_grad]
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0].sum()
    total: torch.Tensor | None = None
    for index, tensor in enumerate(tensors):
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        wide = torch.promote_types(real.dtype, torch.float32)
        weights = torch.randn(real.shape, generator=perturb.seeded(0, "loss", index), dtype=wide).to(real.device)
        part = (real.to(wide) * weights).sum() / max(real.numel(), 1) ** 0.5
        total = part if total is None else total + part
    assert total is not None
    return total


def run(arm: Arm, job: Job, state: State, *, name: str, how: perturb.Perturbation | None = None) -> MemoryCapture:
    """Call an arm on fresh inputs from the saved state, and record it.

    Args:
        arm: What is called.
        job: What is done around it.
        state: Put back first.
        name: What a report calls the run.
        how: `ulp` moves parameters and inputs by one ulp, `layer` also the outputs of all layers; None: nothing.

    Raises:
        IncomparableError: The call returns no tensor, or the optimizer is none.
    """
    state.put_back()
    rank, world_size = ranks()
    run_id = uuid.uuid4().hex
    segments: dict[tuple[int, int], StepRows] = {}

    def sink(rows: StepRows) -> None:
        segments[rows.rank, rows.step] = rows

    recorder = Recorder(
        output=Path(name), run_id=run_id, plan=PLAN, strict=True, manifest=lambda world_size, imported: {}, sink=sink
    )
    with _tapped(arm, recorder, how):
        seed_all(job.seed + rank)
        optimizer = None
        if job.optimizer is not None and arm.module is not None:
            optimizer = job.optimizer([p for p in arm.parameters.values() if p.requires_grad])
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise IncomparableError(
                    f"The optimizer of probe_check made {type(optimizer).__name__!r} of the parameters. Give a "
                    "function of the parameters, such as `lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)`."
                )
        for _ in range(job.steps):
            _step(arm, job, recorder, optimizer, how)
            recorder.next_step()
    manifest = {
        "run_id": run_id,
        "world_size": world_size,
        "created_utc": now(),
        "config": {
            "command": list(job.command),
            "in_process": True,
            "seed": job.seed,
            "steps": f"1-{job.steps}" if job.steps > 1 else "1",
            "perturb": "" if how is None else str(how),
        },
        "provenance": where_it_ran(),
    }
    return MemoryCapture(
        path=Path(name), manifest=manifest, run_id=run_id, world_size=world_size, segments=gathered(segments)
    )


@cache
def where_it_ran() -> dict[str, Any]:
    """Give versions and device; no paths, for a baseline is committed."""
    return {"versions": provenance.versions(), "device": provenance.device()}


@contextmanager
def _tapped(arm: Arm, recorder: Recorder, how: perturb.Perturbation | None) -> Iterator[None]:
    if arm.module is None:
        yield
        return
    taps = Taps(arm.module, recorder, lambda: None)
    handles: list[Any] = []
    try:
        if how is not None:
            perturb.perturb_parameters(taps.parameters, how)
            if how.form == "layer":
                handles = perturb.perturb_outputs(taps.modules, how, lambda: (recorder.step, recorder.microbatch))
        yield
    finally:
        taps.remove()
        for handle in handles:
            handle.remove()


def _step(
    arm: Arm,
    job: Job,
    recorder: Recorder,
    optimizer: torch.optim.Optimizer | None,
    how: perturb.Perturbation | None,
) -> None:
    args, kwargs, leaves = job.inputs.fresh(how)
    parameters = {name: p for name, p in arm.parameters.items() if p.requires_grad}
    for path, tensor in leaves.items():
        key = Key(kind=Kind.BATCH, name=INPUT, item=path, microbatch=0)
        recorder.tensor(key, tensor, "argument of the call", exact=True)
    if recorder.step == 1:
        for name, parameter in parameters.items():
            recorder.tensor(step_key(Kind.PARAM, name, "before"), parameter, "before the call", exact=True)
    with torch.enable_grad():
        output = arm.call(*args, **kwargs)
    found = dict(tensors_in(output))
    if not found:
        raise IncomparableError(
            f"The {arm.role} of probe_check returned {type(output).__name__!r} and no tensor, so there is nothing to "
            "compare. Return what it computes."
        )
    for path, tensor in found.items():
        key = Key(kind=Kind.FORWARD, name=OUTPUT, item=path, microbatch=0)
        recorder.tensor(key, tensor, "what the call returned")
    if not any(tensor.requires_grad for tensor in found.values()):
        return
    loss = (job.loss or projected)(output)
    key = Key(kind=Kind.LOSS, name="micro_loss", microbatch=0)
    recorder.scalar(key, float(loss.detach()), "loss of the output", str(loss.dtype).removeprefix("torch."))
    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            recorder.tensor(step_key(Kind.GRAD, name), parameter.grad, "after the backward pass")
    for path, leaf in leaves.items():
        if leaf.grad is not None:
            recorder.tensor(step_key(Kind.GRAD, INPUT, path), leaf.grad, "after the backward pass")
    if optimizer is not None:
        optimizer.step()
        for name, parameter in parameters.items():
            recorder.tensor(step_key(Kind.PARAM, name), parameter, "after the optimizer's step", exact=True)
        optimizer.zero_grad()


def gathered(segments: dict[tuple[int, int], StepRows]) -> dict[tuple[int, int], StepRows]:
    """Join the segments of all ranks, so that each of them judges the same; a collective if there are several."""
    if ranks()[1] == 1 or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return segments
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, segments)
    return {place: rows for part in of_ranks for place, rows in sorted(part.items())}


def is_low_precision(capture: MemoryCapture) -> bool:
    """Tell whether anything was computed in a 16-bit floating-point type."""
    return any(LOW_PRECISION.intersection(rows.dtype) for rows in capture.segments.values())

"""The names of what is recorded: which point, in which microbatch, in which call.

Recording, storing, calibrating and judging all speak of quantities by the keys defined here, so that one name means
one tensor everywhere. This module must not know how a value is taken or how it is judged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

STEP_CLOCK = -1
"""Microbatch of a quantity that exists once per step (a gradient, a parameter, the learning rate)."""


class Kind(str, Enum):
    """The kinds of point, in the vocabulary of `probe diff --json`."""

    BATCH = "batch"
    """A tensor that enters the root module."""
    FORWARD = "forward"
    """A module's output."""
    BACKWARD = "backward"
    """The gradient of the loss with respect to a module's output."""
    LOSS = "loss"
    """The loss of a microbatch as backward got it, and the factor it was scaled by."""
    GRAD = "grad"
    """A trainable parameter's gradient after the step's last backward, before clipping; item `clipped`: what the
    optimizer got."""
    GRAD_NORM = "grad_norm"
    """What gradient clipping returned."""
    LR = "lr"
    """The learning rate of a parameter group."""
    PARAM = "param"
    """A trainable parameter after the step; item `before`: ahead of the first recorded step."""
    CALL = "call"
    """A function's arguments or result, by import path."""
    EXPLICIT = "explicit"
    """A value given to `probe.record`."""
    STATE = "state"
    """A fact about the job: train mode, number of trainable parameters and of gradients, RNG fingerprints."""

    # Keys are hashed at every tap; an Enum's own hash is a Python function.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Key:
    """Name one quantity within one step of one rank."""

    kind: Kind
    name: str
    """Canonical dotted name of the module, parameter or explicit record; wrapper prefixes are removed."""
    item: str = ""
    """Path inside a structured value (`[0]`, `.sample`), or `before`/`clipped` (see `Kind`)."""
    microbatch: int = STEP_CLOCK
    """Index of the backward pass within the step, from 0; `STEP_CLOCK` for quantities that exist once per step."""
    call: int = 0
    """Index of the firing within the microbatch, from 0."""

    @property
    def label(self) -> str:
        """Text that is unique within a step, e.g. `forward/blocks.3.attn[0]@1#2` (second call in microbatch 1)."""
        text = f"{self.kind.value}/{self.name}"
        if self.item:
            text += self.item if self.item[0] in "[.(" else f":{self.item}"
        if self.microbatch > 0:
            text += f"@{self.microbatch}"
        if self.call:
            text += f"#{self.call + 1}"
        return text

    @property
    def series(self) -> Key:
        """The same key without its microbatch: what one tolerance is for."""
        return replace(self, microbatch=STEP_CLOCK)

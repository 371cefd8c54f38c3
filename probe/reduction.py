"""Say which number a check judges: a tensor's mean, the norm of a group, the mean of a window of steps or of all ranks.

Without any of this a check judges what was recorded by its one judged number. This module only names the numbers;
`probe.measure.reduced` computes them. It must not know how they are judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from probe.errors import PlanError
from probe.selection import nearest

AS_JUDGED = "sketch"
"""The metric of a check that names none: the sketch distance of tensors, the number itself of numbers."""
SAMPLE = "sample"
METRICS = (AS_JUDGED, "value", "l2", "mean", "mean_abs", "rms", "max_abs", SAMPLE)
"""Numbers of one quantity. `value` has none where the quantity has several elements."""
COUNT, NORM, SUM_SQUARES = "count", "norm", "sum_squares"
REDUCES = (NORM, SUM_SQUARES, "mean", COUNT)
"""Numbers of a whole group: the root of its sum of squares, the sum itself, the mean of its quantities, their count."""
OVER_RANKS = ("mean",)

_WORDS = {
    "value": "",
    "l2": "the l2 norm",
    "mean": "the mean",
    "mean_abs": "the mean |x|",
    "rms": "the rms",
    "max_abs": "the max |x|",
    SAMPLE: "the sampled values",
    NORM: "the norm over the group",
    SUM_SQUARES: "the sum of squares over the group",
    COUNT: "the number of quantities in the group",
}


def check_reduction(
    owner: str, form: str, metric: Sequence[str], reduce: str, window: int | None, over_ranks: str
) -> None:
    """Refuse what cannot be computed.

    Args:
        owner: Whose reduction it is, in words, as the subject of a message.

    Raises:
        PlanError: A word is unknown, the window is empty, or two of them exclude each other.
    """
    for name, word, allowed in (
        *(("metric", each, METRICS) for each in metric),
        ("reduce", reduce, REDUCES),
        ("over_ranks", over_ranks, OVER_RANKS),
    ):
        if word and word not in allowed:
            raise PlanError(f"{owner} has {name} = {word!r}.{nearest(word, allowed)}")
    if window is not None and window < 1:
        raise PlanError(f"{owner} has window = {window}. It must be at least 1 step.")
    numbers = bool(reduce or over_ranks or window is not None)
    whole = next((each for each in metric if each in (AS_JUDGED, SAMPLE)), "")
    if numbers and whole:
        raise PlanError(
            f"{owner} has metric = {whole!r}, which is no single number, and asks for a mean or a group of it. "
            "Name another metric, such as 'l2'."
        )
    if numbers and len(metric) > 1:
        raise PlanError(f"{owner} makes one number and names {len(metric)} metrics. Name one.")
    if reduce and reduce != "mean" and metric:
        raise PlanError(
            f"{owner} has reduce = {reduce!r}, which takes no 'metric', but metric = {metric[0]!r} is given. Remove it."
        )
    if SAMPLE in metric and form in ("calibrated", "ratio"):
        raise PlanError(f"{owner} has form {form!r}, which takes no metric 'sample'. Use 'exact', 'rel' or 'abs'.")


@lru_cache(maxsize=1024)
def suffixes(metric: tuple[str, ...], reduce: str, window: int | None, over_ranks: str) -> tuple[str, ...]:
    """Return what is put behind the item of a quantity to name each number that is made of it.

    >>> suffixes(("mean_abs",), "", None, "")
    ('(mean_abs)',)
    >>> suffixes((), "norm", None, ""), suffixes((), "", 50, "mean")
    (('(norm)',), ('(mean of 50 steps, mean over ranks)',))
    >>> suffixes(("sketch",), "", None, "")
    ()
    """
    then = [] if window is None else [f"mean of {window} step{'s' * (window > 1)}"]
    then += ["mean over ranks"] if over_ranks else []
    if reduce:
        begun = [f"mean of {metric[0]}" if metric else reduce]
    else:
        begun = [each for each in metric if each != AS_JUDGED]
    if not begun:
        return (f"({', '.join(then)})",) if then else ()
    return tuple(f"({', '.join([one, *then])})" for one in begun)


def in_words(metric: Sequence[str], reduce: str, window: int | None, over_ranks: str) -> str:
    """Name the number in words, as the end of a metric's description; empty where it is the judged number.

    >>> in_words(("mean_abs",), "", None, ""), in_words((), "norm", None, "mean")
    ('of the mean |x|', 'of the norm over the group, mean over ranks')
    """
    if reduce == "mean":
        of_what = f"the mean over the group{' of ' + _WORDS[metric[0]] if metric and _WORDS[metric[0]] else ''}"
    elif reduce:
        of_what = _WORDS[reduce]
    else:
        of_what = " and ".join(filter(None, (_WORDS.get(each, "") for each in metric)))
    then = [] if window is None else [f"mean of {window} step{'s' * (window > 1)}"]
    then += ["mean over ranks"] if over_ranks else []
    if not of_what:
        return f"of the {', '.join(then)}" if then else ""
    return ", ".join([f"of {of_what}", *then])

"""Compiled from `_reduce.c` where a C compiler was at hand when the package was installed."""

import numpy as np
import numpy.typing as npt

INTERFACE: int

def reduce(
    address: int,
    numel: int,
    type: int,
    sketch: npt.NDArray[np.float32],
    index: npt.NDArray[np.int64],
    sample: npt.NDArray[np.float32],
    copy: int,
    /,
) -> tuple[float, float, float, float, int, int]:
    """Reduce `numel` contiguous elements (`type` 0: fp32, 1: bf16, 2: fp64) at an address.

    `sketch` [K] and `sample` [at least len(index)] are overwritten. The elements are copied to the address `copy`,
    which must have room for them, unless it is 0.

    Returns:
        sum, l2, sum |x|, max |x|, number of non-finite elements, number of elements.

    Raises:
        ValueError: A buffer has another size, or an index is outside the tensor.
    """

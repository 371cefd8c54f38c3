"""Numbers in, a verdict out: what is allowed, what is above it, where it first departs, and what it would have seen."""

"""Two captures in, numbers out: their quantities lined up, and how far apart each pair of values is."""

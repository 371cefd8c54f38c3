"""A job for `overhead.py`: transformer blocks of width 1,024, forward, backward and AdamW, on one thread.

python benchmarks/overhead.py benchmarks/wide.py
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time

import torch
from torch import nn


def main() -> None:
    """Train a few steps and print CPU seconds per step and a hash of the parameters."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True),
        num_layers=2,
        enable_nested_tensor=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    taken = []
    for step in range(6):
        x = torch.randn(4, 64, 1024, generator=torch.Generator().manual_seed(step))
        began = time.process_time()
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        taken.append(time.process_time() - began)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(json.dumps({"cpu_s_per_step": statistics.median(taken[1:]), "parameters": digest}))


if __name__ == "__main__":
    main()

"""A training script whose attention is torch's, by one backend or another, or that of a package."""

import argparse
import contextlib
import sys
import tempfile

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class Block(nn.Module):
    def __init__(self, package):
        super().__init__()
        self.qkv, self.package = nn.Linear(8, 24), package

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        if self.package:
            import sageattention

            o = sageattention.sageattn(q, k, v)
        else:
            o = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + o.transpose(1, 2).flatten(2)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--math", action="store_true")
    p.add_argument("--package", action="store_true")
    a = p.parse_args()
    if a.package:
        # The package itself needs a GPU; what is tested is that a call of it is seen when it is imported later.
        folder = tempfile.mkdtemp()
        with open(f"{folder}/sageattention.py", "w") as f:
            f.write("import torch\n\n\ndef sageattn(q, k, v):\n    return (q @ k.mT / 2).softmax(-1) @ v\n")
        sys.path.insert(0, folder)
    net = nn.Sequential()
    net.blocks = nn.Sequential(Block(a.package), Block(a.package))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        with sdpa_kernel([SDPBackend.MATH]) if a.math else contextlib.nullcontext():
            net(torch.randn(2, 5, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()

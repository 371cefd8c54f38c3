"""A training loop whose attention and loss are functions; some are in a module beside it."""

import argparse

import functions_library
import torch
from functions_library import attention
from torch import nn


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        return Scale.apply(x + attention(*self.qkv(x).chunk(3, -1), causal=True))


def loss_of(output, target):
    return (output - target).pow(2).mean()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--compile", action="store_true")
    a = p.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if a.compile:
        for block in model:
            block.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
        loss_of(model(x), target=functions_library.Targets.zeros(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)


if __name__ == "__main__":
    main()

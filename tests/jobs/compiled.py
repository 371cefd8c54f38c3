"""Twelve blocks compiled in one of the ways people use; prints how often the compiler ran."""

import argparse
import json

import torch
from torch import nn
from torch._dynamo.utils import counters


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.body = mixed

    def forward(self, x):
        return x + self.down(self.body(self.up(self.norm(x))))


def mixed(x):
    return torch.nn.functional.silu(x) * x


class Net(nn.Module):
    def __init__(self, width=8, depth=12):
        super().__init__()
        self.inp = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, 4)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def compiled(net, how):
    options = {"backend": "aot_eager"}
    if how == "model":
        return torch.compile(net, **options)
    if how == "method":
        net.compile(**options)
    for i, block in enumerate(net.blocks):
        if how == "block":
            net.blocks[i] = torch.compile(block, **options)
        elif how == "block-method":
            block.compile(**options)
        elif how == "forward":
            block.forward = torch.compile(block.forward, **options)
    if how == "function":
        shared = torch.compile(mixed, **options)
        for block in net.blocks:
            block.body = shared
    if how == "method-of-class":
        Block.forward = torch.compile(Block.forward, **options)
    return net


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--how", default="none")
    p.add_argument("--bf16", action="store_true")
    a = p.parse_args()
    torch.manual_seed(0)
    net = Net().to(torch.bfloat16 if a.bf16 else torch.float32)
    model = compiled(net, a.how)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(net.inp.weight.dtype)
        loss = (model(x) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stats = {name: counters["stats"][name] for name in ("calls_captured", "unique_graphs")}
    ok = {"frames": dict(counters["frames"]), "breaks": sum(counters["graph_break"].values())}
    weight = net.inp.weight.detach().float().double().sum().item()
    print(json.dumps({"losses": losses, "weights": weight, **stats, **ok, "limit": len(counters["recompile_limit"])}))


if __name__ == "__main__":
    main()

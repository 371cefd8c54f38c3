"""A small training script that knows nothing of the recorder. Run by the tests as a user would run theirs.

Prints one JSON line per step on rank 0. `--dump FILE` makes it look at its own gradients at the optimizer, with its own
code, so that a test can hold the recorder's numbers against them.
"""

import argparse
import json
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1) @ v)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), Attention(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.attn(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width, how):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 8)
        self.how = how

    def forward(self, x, scale=1.0):
        x = self.embed(x)
        for block in self.blocks:
            if self.how == "none" or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.head(x) * scale


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--accum", type=int, default=1)
    p.add_argument("--ckpt", default="none", choices=["none", "reentrant", "nonreentrant"])
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--clip", type=float, default=0.0)
    p.add_argument("--eval", action="store_true", help="an evaluation after each step")
    p.add_argument("--seed", type=int, default=None)
    p.add_argument("--loss-scale", type=float, default=1.0)
    p.add_argument("--fault", default="", choices=["", "scale", "nan", "raise", "no-step", "no-sync"])
    p.add_argument("--weights", default="")
    p.add_argument("--dump", default="")
    p.add_argument("--sleep", type=float, default=0.0)
    p.add_argument("--width", type=int, default=16)
    a = p.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    if a.seed is not None:
        torch.manual_seed(a.seed)
    net = Net(a.width, a.ckpt)
    if a.bf16:
        net.to(torch.bfloat16)
    model = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(100 + rank)
    dtype = torch.bfloat16 if a.bf16 else torch.float32
    dumps = []
    for step in range(1, a.steps + 1):
        total = 0.0
        for _ in range(a.accum):
            x = torch.randn(4, 6, 8, generator=data).to(dtype)
            if a.fault == "scale" and step == 2:
                net.blocks[1].attn.out.weight.data.mul_(1.01)
            inner = net if a.fault == "no-sync" else model
            loss = (inner(x, scale=1.0) - x).float().pow(2).mean()
            if a.fault == "nan" and step == 2:
                loss = loss * float("nan")
            total += float(loss.detach())
            (loss * a.loss_scale / a.accum).backward()
        for parameter in net.parameters():
            parameter.grad.div_(a.loss_scale)
        if a.fault == "raise" and step == 2:
            raise ValueError("the training script failed")
        if a.clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), a.clip)
        if a.dump:
            dumps.append({n: p.grad.clone() for n, p in net.named_parameters()})
        if a.fault != "no-step":
            optimizer.step()
        optimizer.zero_grad()
        if a.eval:
            net.eval()
            with torch.no_grad():
                net(torch.zeros(1, 6, 8, dtype=dtype))
            net.train()
        if rank == 0:
            print(json.dumps({"step": step, "loss": total}), flush=True)
        time.sleep(a.sleep)
    if a.dump:
        torch.save(dumps, f"{a.dump}.{rank}")
    if a.weights and rank == 0:
        torch.save(net.state_dict(), a.weights)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main()

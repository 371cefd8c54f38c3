"""One training job on two ranks, its model wrapped in whatever shards or replicates it, the data the same.

Every wrapper leaves the same mathematics: two ranks see half of each batch, except under tensor parallelism, where both
see all of it. Run by the tests as a user would run theirs.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.embed = nn.Linear(5, 10)
        self.blocks = nn.ModuleList(Block(10) for _ in range(2))
        self.head = nn.Linear(10, 3)
        self.unused = nn.Linear(3, 3)
        self.fault = fault

    def forward(self, x):
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.fault == "forward" and index == 1:
                x = x * 1.02
        return self.head(x)


def wrap(net, how):
    if how in ("ddp", "ddp-static", "ddp-view", "ddp-no-sync"):
        options = {"static_graph": how == "ddp-static", "gradient_as_bucket_view": how == "ddp-view"}
        unused = how != "ddp-static"
        return nn.parallel.DistributedDataParallel(net, find_unused_parameters=unused, **options)
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in net.blocks:
            fully_shard(block)
        return fully_shard(net)
    if how in ("fsdp1", "fsdp1-flat"):
        from torch.distributed.fsdp import FullyShardedDataParallel

        options = {"use_orig_params": how == "fsdp1", "device_id": torch.device("cpu")}
        for index, block in enumerate(net.blocks):
            net.blocks[index] = FullyShardedDataParallel(block, **options)
        return FullyShardedDataParallel(net, **options)
    if how == "tp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in net.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--wrap", default="none")
    p.add_argument("--steps", type=int, default=2)
    p.add_argument("--micro", type=int, default=1)
    p.add_argument("--clip", type=float, default=0.0)
    p.add_argument("--fault", default="")
    a = p.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net(a.fault)
    if a.wrap == "ddp-static" or world == 1 or a.wrap in ("none", "tp", "zero"):
        net.unused = nn.Identity()
    model = wrap(net, a.wrap)
    if a.wrap == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = nn.parallel.DistributedDataParallel(net)
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=a.wrap != "tp")
    data = torch.Generator().manual_seed(1)
    split = a.wrap != "tp"
    for _ in range(a.steps):
        for micro in range(a.micro):
            x = torch.randn(8, 5, generator=data)
            x = x.chunk(world)[rank] if split else x
            last = micro == a.micro - 1
            if a.wrap == "ddp-no-sync" and not last:
                with model.no_sync():
                    (model(x).pow(2).mean() / a.micro).backward()
            else:
                (model(x).pow(2).mean() / a.micro).backward()
        if a.clip and a.wrap == "fsdp1":
            model.clip_grad_norm_(a.clip)
        elif a.clip and a.wrap != "tp":  # torch refuses to clip plain and distributed gradients together
            nn.utils.clip_grad_norm_(model.parameters(), a.clip)
        optimizer.step()
        optimizer.zero_grad()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A training loop that names values itself through the explicit API, and has no optimizer of torch's."""

import argparse

import torch

import probe


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        x = probe.tap("hidden", self.first(x))
        return probe.tap("out", self.second(torch.relu(x)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--compile", action="store_true")
    a = p.parse_args()
    torch.manual_seed(0)
    net = Net()
    model = torch.compile(net, backend="aot_eager", fullgraph=True) if a.compile else net
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x).pow(2).mean()
        loss.backward()
        probe.record("loss", loss)
        probe.record("loss", loss * 2, note="again")
        probe.record("facts", {"tokens": 32, "name": "batch", "ready": True, "shape": tuple(x.shape), "ids": x.long()})
        probe.record_lazy("norm", lambda: sum(q.grad.norm() for q in net.parameters()))
        with torch.no_grad():
            for q in net.parameters():
                q -= 0.1 * q.grad
                q.grad = None
        probe.step()
    probe.flush()
    print("enabled" if probe.enabled() else "off", float(loss))


if __name__ == "__main__":
    main()

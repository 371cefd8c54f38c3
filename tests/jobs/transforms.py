"""A training loop that also calls its model under function transforms, and with a tensor of a class of its own."""

import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap


class Odd(torch.Tensor):
    """Has data, and refuses to show where."""

    def data_ptr(self):
        raise RuntimeError("Odd has no address.")

    def numpy(self, *args, **kwargs):
        raise RuntimeError("Odd has no address.")


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def of_sample(parameters, x):
        return functional_call(model, parameters, (x,)).sum()

    for step in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        (model(x).square().mean() + vmap(model)(x).mean()).backward()
        vmap(grad(of_sample), in_dims=(None, 0))(dict(model.named_parameters()), x)
        jacrev(model)(x[0])
        optimizer.step()
        optimizer.zero_grad()
    model(x.as_subclass(Odd)).sum().backward()
    optimizer.step()
    print(f"{sum(p.double().sum().item() for p in model.parameters()):.17g}")


if __name__ == "__main__":
    main()

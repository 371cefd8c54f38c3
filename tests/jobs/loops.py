"""Training loops of many forms that know nothing of the recorder. Run by the tests as a user would run theirs."""

import argparse
import copy
import io
import json

import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches(steps, micro=1):
    data = torch.Generator().manual_seed(1)
    return [[torch.randn(6, 4, generator=data) for _ in range(micro)] for _ in range(steps)]


def told(**values):
    print(json.dumps(values), flush=True)


def scaler(a, fused=False):
    """Mixed precision with a gradient scaler whose second update overflows."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, micro in enumerate(batches(a.steps, 2), start=1):
        for x in micro:
            loss = model(x).pow(2).mean() / 2
            if step == 2:
                loss = loss * torch.exp(x.sum() * 0 + 86)  # finite, and not once it is scaled
            scale.scale(loss).backward()
        if a.clip:
            scale.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), a.clip)
        scale.step(optimizer)
        scale.update()
        given = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        told(norm=float(torch.stack([g.norm() for g in given]).norm()), weight=float(model[0].weight.detach().sum()))


def scaler_fused(a):
    scaler(a, fused=True)


def gan(a):
    """Two models that train each other, each with an optimizer."""
    maker, judge = net(), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    of_maker = torch.optim.SGD(maker.parameters(), lr=1e-2)
    of_judge = torch.optim.SGD(judge.parameters(), lr=2e-2)
    for ((x,),) in zip(batches(a.steps)):
        fake = maker(x)
        loss = judge(x[:, :2]).mean() - judge(fake.detach()).mean()
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        of_maker.zero_grad()
        (-judge(fake).mean()).backward()
        of_maker.step()


def two(a):
    """One backward pass, and one optimizer for the matrices, one for the rest."""
    model = net()
    matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=1e-2, momentum=0.9)
    others = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=3e-3)
    for ((x,),) in zip(batches(a.steps)):
        model(x).pow(2).mean().backward()
        for optimizer in (matrices, others):
            optimizer.step()
            optimizer.zero_grad()


class Plain:
    """An optimizer that is nobody's subclass."""

    def __init__(self, parameters, lr, through_data):
        self.parameters, self.lr, self.through_data = list(parameters), lr, through_data

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            if self.through_data:
                p.data -= self.lr * p.grad
            else:
                p -= self.lr * p.grad
            p.grad = None


def by_hand(a, through_data=False):
    model = net()
    optimizer = Plain(model.parameters(), 1e-2, through_data)
    for micro in batches(a.steps, 2):
        for x in micro:
            (model(x).pow(2).mean() / 2).backward()
        optimizer.step()


def by_hand_data(a):
    by_hand(a, through_data=True)


def sgd(a):
    """What the loops by hand do, with torch's own optimizer."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for micro in batches(a.steps, 2):
        for x in micro:
            (model(x).pow(2).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def cut(a):
    """The same batch in one piece or in several; with `--fault`, one of which is forgotten in the sum."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    for _ in range(a.steps):
        pieces = torch.randn(8, 4, generator=data).chunk(a.micro)
        for number, x in enumerate(pieces):
            (model(x).pow(2).mean() / a.micro).backward()
            if a.fault and number == 0:
                model[2].bias.grad.zero_()
        optimizer.step()
        optimizer.zero_grad()


def clipped_by_hand(a):
    """Gradients halved through `.data` in every second step, which their versions do not show."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, (x,) in enumerate(batches(a.steps)):
        model(x).pow(2).mean().backward()
        if step % 2:
            for p in model.parameters():
                p.grad.data.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def autograd(a):
    """The same without backward: torch.autograd.grad, summed by hand."""
    model = net()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    for micro in batches(a.steps, 2):
        sums = [torch.zeros_like(p) for p in parameters]
        for x in micro:
            for total, gradient in zip(sums, torch.autograd.grad(model(x).pow(2).mean() / 2, parameters), strict=True):
                total += gradient
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total
        optimizer.step()


def closure(a):
    """The same in a closure, as LBFGS asks for and Lightning does."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for micro in batches(a.steps, 2):

        def again(micro=micro):
            optimizer.zero_grad()
            for x in micro:
                (model(x).pow(2).mean() / 2).backward()

        optimizer.step(again)


def schedule(a):
    """A schedule that steps twice for each update, as accelerate's does with two processes; clipped by value."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    for ((x,),) in zip(batches(a.steps)):
        model(x).pow(2).mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        rate.step()


def forgetful(a):
    """An evaluation after the second update that never returns to training."""
    model = nn.Sequential(net(), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step, ((x,),) in enumerate(zip(batches(a.steps)), start=1):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            model.eval()
            with torch.no_grad():
                model(x)


def resume(a):
    """Train, save, train; or load and train the rest (`--resume FILE`)."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 1
    if a.resume:
        state = torch.load(a.resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step, ((x,),) in enumerate(zip(batches(a.steps)), start=1):
        if step < first:
            continue
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and a.save:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, a.save)


def ema(a):
    """A moving average of the weights, evaluated after each update and never trained."""
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for ((x,),) in zip(batches(a.steps)):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            average(x)


def copies(a):
    """The model is copied and saved whole after each update, and the copy is called; the file must load anywhere."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for ((x,),) in zip(batches(a.steps)):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            copied(x).sum().backward()
        told(names_probe=b"probe" in file.getvalue())


def loose(a):
    """A parameter that no module holds, beside a model."""
    model, scale = net(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=1e-2)
    for ((x,),) in zip(batches(a.steps)):
        (model(x) * scale).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def parallel(a):
    model = nn.DataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for ((x,),) in zip(batches(a.steps)):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("loop")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--clip", type=float, default=0.0)
    p.add_argument("--micro", type=int, default=1)
    p.add_argument("--fault", action="store_true")
    p.add_argument("--resume", default="")
    p.add_argument("--save", default="")
    a = p.parse_args()
    torch.manual_seed(0)
    globals()[a.loop](a)


if __name__ == "__main__":
    main()

"""The same tiny training under the trainers that people use. Run by the tests as a user would run theirs."""

import argparse
import sys

import torch
from torch import nn

ACCUMULATE, CLIP, RATE = 2, 0.05, 0.1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def samples(count):
    return torch.randn(count, 6, 4, generator=torch.Generator().manual_seed(1))


def plain(a):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    data = list(samples(a.steps * ACCUMULATE))
    for step in range(a.steps):
        for x in data[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
            (net(x).pow(2).mean() / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def accelerate(a):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    loader = torch.utils.data.DataLoader(samples(a.steps * ACCUMULATE), batch_size=None)
    model, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


class WithLoss(Net):
    """What transformers' Trainer wants of a model: it computes its loss."""

    def forward(self, x):
        out = super().forward(x)
        return {"loss": out.pow(2).mean(), "logits": out}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield from ({"x": x} for x in samples(64))


def transformers(a):
    import transformers as t

    arguments = t.TrainingArguments(
        output_dir=a.folder,
        max_steps=a.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=CLIP,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )

    def one(batch):
        return {"x": batch[0]["x"]}

    t.Trainer(model=WithLoss(), args=arguments, train_dataset=Stream(), data_collator=one).train()


def lightning(a):
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, x, index):
            return self.net(x).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=a.steps,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(samples(64), batch_size=None, shuffle=False))


def lora(a, inject):
    import peft

    net = Net()
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["up", "down"], init_lora_weights="gaussian")
    torch.manual_seed(1)
    model = peft.inject_adapter_in_model(config, net) if inject else peft.get_peft_model(net, config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for x in samples(a.steps):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def peft_model(a):
    lora(a, inject=False)


def peft_injected(a):
    lora(a, inject=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("trainer")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--folder", default="out")
    a = p.parse_args()
    torch.manual_seed(0)
    getattr(sys.modules[__name__], a.trainer)(a)


if __name__ == "__main__":
    main()

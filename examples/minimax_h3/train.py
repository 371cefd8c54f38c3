"""Train LoRA on the tiny MiniMax-H3 DiT, the way DiffSynth's own H3 script does, on a CPU or a GPU.

Pipeline, training module, flow-matching loss and training loop are DiffSynth's; the flags that DiffSynth's script has
carry its names here. Nothing in this file knows that a run may be recorded.

    python train.py --steps 5
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 train.py --steps 5
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DIFFSYNTH_SKIP_DOWNLOAD", "True")

import accelerate
import noise
import numpy as np
import torch
from diffsynth.configs import MODEL_CONFIGS
from diffsynth.core import ModelConfig, UnifiedDataset
from diffsynth.diffusion import (
    DiffusionTrainingModule,
    FlowMatchSFTMiniMaxH3AudioVideoLoss,
    ModelLogger,
    launch_training_task,
)
from diffsynth.pipelines.minimax_h3_audio_video import MiniMaxH3Pipeline

HERE = Path(__file__).resolve().parent
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SEED_LIMIT = 2**32
"""numpy takes seeds below this."""


class MiniMaxH3TrainingModule(DiffusionTrainingModule):
    """Compute the flow-matching loss of one stage-1 sample, with LoRA in the DiT."""

    def __init__(self, args: argparse.Namespace, device: torch.device | str) -> None:
        super().__init__()
        self.pipe = MiniMaxH3Pipeline.from_pretrained(
            torch_dtype=DTYPES[args.dtype],
            device=device,
            model_configs=self.parse_model_configs(args.model_paths, None),
            processor_config=ModelConfig(path=args.processor_path),
        )
        self.split_pipeline_units("sft:train", self.pipe, lora_base_model=args.lora_base_model)
        self.switch_pipe_to_training_mode(
            self.pipe,
            lora_base_model=args.lora_base_model,
            lora_target_modules=args.lora_target_modules,
            lora_rank=args.lora_rank,
            task="sft:train",
        )
        self.pipe.scheduler_audio.set_timesteps(1000, training=True)
        self.use_gradient_checkpointing = args.use_gradient_checkpointing

    def forward(self, data: dict[str, Any], inputs: tuple[dict[str, Any], ...] | None = None) -> torch.Tensor:
        """Return the loss of one cached sample.

        Args:
            data: Unused; DiffSynth's loop passes raw data here when there is no cache.
            inputs: `(shared, positive, negative)` as stage 1 stored them.
        """
        inputs = self.transfer_data_to_device(inputs, self.pipe.device, self.pipe.torch_dtype)
        for unit in self.pipe.units:
            inputs = self.pipe.unit_runner(unit, self.pipe, *inputs)
        shared, positive, _ = inputs
        # The sample carries the flag that stage 1 was run with; this run's own decides.
        shared = {**shared, "use_gradient_checkpointing": self.use_gradient_checkpointing}
        return FlowMatchSFTMiniMaxH3AudioVideoLoss(self.pipe, **shared, **positive)


class StepLog(ModelLogger):
    """Print one JSON line per optimizer step, and save the LoRA weights once at the end where asked."""

    def __init__(self, weights: Path | None) -> None:
        super().__init__(output_path=None, remove_prefix_in_ckpt="pipe.dit.")
        self.weights = weights

    def on_step_end(
        self, accelerator: accelerate.Accelerator, model: Any, save_steps: Any = None, **kwargs: Any
    ) -> None:
        if not accelerator.sync_gradients:
            return
        self.num_steps += 1
        if accelerator.is_main_process:
            print(json.dumps({"step": self.num_steps, "loss": kwargs["loss"].item()}), flush=True)

    def on_epoch_end(self, accelerator: accelerate.Accelerator, model: Any, epoch_id: int) -> None:
        """Save nothing: an epoch of the tiny job is a few steps."""

    def on_training_end(self, accelerator: accelerate.Accelerator, model: Any, save_steps: Any = None) -> None:
        if self.weights is not None:
            self.output_path = str(self.weights.parent)
            self.save_model(accelerator, model, self.weights.name)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; paths that are not given lie in the checkpoint folder."""
    parser = argparse.ArgumentParser(description="Train LoRA on the tiny MiniMax-H3 DiT.")
    add = parser.add_argument
    add("--checkpoint", type=Path, default=HERE / "data" / "tiny", help="Folder that make_checkpoint.py made.")
    add("--dataset_base_path", help="Stage-1 cache (default: CHECKPOINT/cache).")
    add("--model_paths", help="Model files, in JSON format (default: the DiT in CHECKPOINT).")
    add("--processor_path", help="Qwen3-VL processor (default: CHECKPOINT/processor).")
    add("--dataset_repeat", type=int, default=1, help="Times that the samples are repeated in an epoch.")
    add("--dataset_num_workers", type=int, default=0, help="Workers that load data.")
    add("--num_epochs", type=int, default=1, help="Epochs.")
    add("--steps", type=int, help="Optimizer steps; takes the place of --dataset_repeat and --num_epochs.")
    add("--learning_rate", type=float, default=1e-4, help="Learning rate of AdamW.")
    add("--weight_decay", type=float, default=0.01, help="Weight decay of AdamW.")
    add("--gradient_accumulation_steps", type=int, default=1, help="Microbatches in an optimizer step.")
    add("--find_unused_parameters", action="store_true", help="Whether DDP looks for unused parameters.")
    add("--lora_base_model", default="dit", help="Model that gets LoRA.")
    add("--lora_target_modules", default="attn.qkv_proj,attn.out_proj,mlp.fc1,mlp.fc2", help="Layers that get LoRA.")
    add("--lora_rank", type=int, default=32, help="Rank of LoRA.")
    add(
        "--use_gradient_checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Whether each block is recomputed in backward.",
    )
    add("--initialize_model_on_cpu", action="store_true", help="Whether models are loaded on the CPU first.")
    add("--dtype", choices=sorted(DTYPES), default="bfloat16", help="Type of weights and activations.")
    add("--seed", type=int, default=42, help="Seed of rank 0; rank r takes SEED + r.")
    add("--weights", type=Path, help="File for the final LoRA weights of rank 0 (safetensors).")
    add("--noise", choices=["none", "act"], default="none", help="act: run-to-run noise as a GPU's sums have it.")
    add("--run-id", type=int, default=0, help="Which noise; the same number repeats it.")
    add("--branch", help="Optimized branch: optimized, faulty, or the path of a Python file.")
    add("--optimizations", help="Those of the branch to apply, comma-separated (default: all).")
    args = parser.parse_args()
    if not args.checkpoint.is_dir():
        parser.error(
            f"--checkpoint: {args.checkpoint} does not exist. Make it: python make_checkpoint.py {args.checkpoint}"
        )
    if args.optimizations is not None and args.branch is None:
        parser.error("--optimizations names parts of a branch, and no --branch is given.")
    if not 0 <= args.seed < SEED_LIMIT:
        parser.error(f"--seed is {args.seed}; 0 to {SEED_LIMIT - 1} is allowed.")
    args.dataset_base_path = args.dataset_base_path or str(args.checkpoint / "cache")
    args.model_paths = args.model_paths or json.dumps([str(args.checkpoint / "tiny_h3_dit.safetensors")])
    args.processor_path = args.processor_path or str(args.checkpoint / "processor")
    return args


def load_branch(name: str) -> ModuleType:
    """Import a branch by the name of a file beside this one, or by path."""
    path = Path(name) if name.endswith(".py") else HERE / f"{name}.py"
    if not path.is_file():
        sys.exit(f"--branch: {path} does not exist.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def seed_everything(seed: int) -> None:
    """Seed all global generators of this process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main() -> None:
    """Train as the command line says."""
    args = parse_arguments()
    if args.branch is not None:
        chosen = None if args.optimizations is None else args.optimizations.split(",")
        load_branch(args.branch).apply(chosen)
    # DiffSynth recognises a model by a hash of its keys and shapes, and knows no tiny one.
    MODEL_CONFIGS.append(json.loads((args.checkpoint / "model_config.json").read_text()))
    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        kwargs_handlers=[accelerate.DistributedDataParallelKwargs(find_unused_parameters=args.find_unused_parameters)],
    )
    seed_everything(args.seed + accelerator.process_index)
    per_step = accelerator.num_processes * args.gradient_accumulation_steps
    dataset = UnifiedDataset(
        base_path=args.dataset_base_path,
        repeat=args.dataset_repeat,
        max_data_items=None if args.steps is None else args.steps * per_step,
    )
    # Accelerate calls a CPU process's device "cpu:0", a name that the safetensors loader does not take.
    on_cpu = args.initialize_model_on_cpu or accelerator.device.type == "cpu"
    model = MiniMaxH3TrainingModule(args, device="cpu" if on_cpu else accelerator.device)
    if args.noise == "act":
        noise.add_noise(model, run_id=args.run_id, rank=accelerator.process_index)
    launch_training_task(
        accelerator,
        dataset,
        model,
        StepLog(args.weights),
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        num_workers=args.dataset_num_workers,
        num_epochs=args.num_epochs if args.steps is None else 1,
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()

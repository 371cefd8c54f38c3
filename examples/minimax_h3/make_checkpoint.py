"""Build the tiny MiniMax-H3 job: random weights, a processor that loads, and a stage-1 cache.

The seed job trains 33 billion parameters on eight GPUs. The same classes run on a CPU when their widths are small, so a
folder with a small checkpoint is all that the example needs. Everything in it is made here, from fixed seeds, by
DiffSynth's own classes and its own stage-1 units; only what a VAE or a text encoder would have computed is drawn at
random.

    python make_checkpoint.py OUT N
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DIFFSYNTH_SKIP_DOWNLOAD", "True")

MODEL_FILE = "tiny_h3_dit.safetensors"
CONFIG_FILE = "model_config.json"
MANIFEST_FILE = "complete.json"
RECIPE = 1
"""Number of this recipe; a folder made by another one is not re-used."""

HIDDEN = 128
DIT_ARGUMENTS = {
    "num_layers": 4,
    "token_refiner_num_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "ffn_hidden_size": 2 * HIDDEN,
    "text_dim": 64,
    "timestep_input_dim": 64,
    "time_embed_hidden_size": HIDDEN,
    "time_embed_dim": 64,
    "adaln_out_features": 6 * HIDDEN * 3,
    "final_adaln_out_features": 2 * HIDDEN,
    "rope_inv_freq_len": 5,
}
"""Widths of the tiny DiT. Six times `rope_inv_freq_len` may not exceed the head width; AdaLN gives six vectors to each
of three modalities in a block, and two to the final layer."""

VIDEO_SIDE = 128
VIDEO_FRAMES = 22
"""Height and width in pixels, and frames (17 n + 5): a packed sequence of 210 tokens and 46 of padding."""
TEXT_TOKENS = 24

Inputs = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""What DiffSynth's units pass on: shared, positive and negative inputs."""


def main() -> None:
    """Build the folder named on the command line, or say that it is there already."""
    parser = argparse.ArgumentParser(description="Build the tiny MiniMax-H3 checkpoint and its stage-1 cache.")
    parser.add_argument("out", type=Path, help="Folder to make.")
    parser.add_argument("samples", type=int, nargs="?", default=8, help="Number of stage-1 samples (default: 8).")
    arguments = parser.parse_args()
    if arguments.samples < 1:
        parser.error(f"SAMPLES is {arguments.samples}; at least 1 is needed.")
    build(arguments.out, arguments.samples)


def build(out: Path, samples: int) -> None:
    """Make the whole folder, or leave it alone where the same recipe made it before.

    The work is done in a temporary folder beside `out` and renamed at the end, so that `out` is never half made.

    Args:
        out: Folder to make.
        samples: Number of stage-1 samples in `out/cache/0`.

    Raises:
        SystemExit: `out` exists and is something else.
    """
    manifest = {"recipe": RECIPE, "samples": samples, "dit": DIT_ARGUMENTS}
    if out.exists():
        check_existing(out, manifest)
        print(f"{out} is complete; nothing to do.")
        return
    started = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        stages: list[tuple[str, Callable[[], None]]] = [
            ("DiT weights", lambda: write_dit(work)),
            ("processor", lambda: write_processor(work / "processor")),
            (f"{samples} stage-1 samples", lambda: write_cache(work / "cache" / "0", samples)),
        ]
        for number, (title, write) in enumerate(stages, start=1):
            write()
            print(f"[{number}/{len(stages)}] {title}: done at {time.monotonic() - started:.1f} s", flush=True)
        (work / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n")
        work.chmod(0o755)
        try:
            work.rename(out)
        except OSError:
            # Somebody else finished the same folder first.
            check_existing(out, manifest)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"{out} is complete.")


def check_existing(out: Path, manifest: dict[str, Any]) -> None:
    """Leave with a message unless `out` holds what `manifest` describes."""
    path = out / MANIFEST_FILE
    found = json.loads(path.read_text()) if path.exists() else None
    if found != manifest:
        what = f"was made with {found['samples']} samples by recipe {found['recipe']}" if found else "is not complete"
        sys.exit(
            f"{out} exists and {what}; {manifest['samples']} samples by recipe {RECIPE} are wanted. "
            "Remove it, or name another folder."
        )


def write_dit(out: Path) -> None:
    """Write random bf16 weights and the entry by which DiffSynth recognises them."""
    import torch
    from diffsynth.core.loader import hash_model_file
    from diffsynth.models.minimax_h3_dit import MiniMaxH3DiT
    from safetensors.torch import save_file

    torch.manual_seed(0)
    dit = MiniMaxH3DiT(**DIT_ARGUMENTS).to(torch.bfloat16)
    weights = out / MODEL_FILE
    save_file({name: tensor.contiguous() for name, tensor in dit.state_dict().items()}, weights)
    weights.chmod(0o644)
    entry = {
        "model_hash": hash_model_file(str(weights)),
        "model_name": "minimax_h3_dit",
        "model_class": f"{MiniMaxH3DiT.__module__}.{MiniMaxH3DiT.__qualname__}",
        "extra_kwargs": DIT_ARGUMENTS,
    }
    (out / CONFIG_FILE).write_text(json.dumps(entry, indent=1) + "\n")


def write_processor(out: Path) -> None:
    """Write a byte-level Qwen3-VL processor; training only needs that it loads."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2TokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    out.mkdir()
    vocabulary = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    (out / "vocab.json").write_text(json.dumps(vocabulary))
    (out / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = Qwen2TokenizerFast(str(out / "vocab.json"), str(out / "merges.txt"))
    marks = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(), tokenizer=tokenizer, video_processor=Qwen3VLVideoProcessor()
    )
    processor.save_pretrained(out)


def write_cache(out: Path, samples: int) -> None:
    """Write stage-1 samples as DiffSynth's `sft:data_process` task would: one `(shared, posi, nega)` per file."""
    import torch
    from diffsynth.diffusion.training_module import DiffusionTrainingModule
    from diffsynth.pipelines.minimax_h3_audio_video import MiniMaxH3Pipeline

    out.mkdir(parents=True)
    pipe = MiniMaxH3Pipeline(device="cpu", torch_dtype=torch.bfloat16)
    pipe.scheduler.set_timesteps(1000, training=True)
    stage = DiffusionTrainingModule()
    stage.pipe = pipe
    stage.split_pipeline_units(
        "sft:data_process",
        pipe,
        lora_base_model="dit",
        remove_unnecessary_params=True,
        force_remove_params_shared=("video_latents", "audio_latents"),
        force_remove_params_nega=("prompt_embeds", "text_token_tags", "packed"),
    )
    generator = torch.Generator().manual_seed(1)
    for number in range(samples):
        torch.save(process_sample(pipe, generator), out / f"{number}.pth")


def process_sample(pipe: Any, generator: Any) -> Inputs:
    """Run the stage-1 units on one sample, with random tensors where a VAE or text encoder would run.

    Args:
        pipe: Pipeline whose units are those of stage 1.
        generator: Source of latents and embeddings.
    """
    import torch

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    shared: dict[str, Any] = {
        "input_video": None,
        "height": VIDEO_SIDE,
        "width": VIDEO_SIDE,
        "num_frames": VIDEO_FRAMES,
        "keyframes": None,
        "keyframe_indices": None,
        "references": None,
        "ref_image_short_edge": 2048,
        "ref_video_short_edge": 768,
        "ref_video_max_pixels": 768 * 1344,
        "imgvid_cond_noise_aug": pipe.imgvid_cond_noise_aug,
        "audio_cond_noise_aug": pipe.audio_cond_noise_aug,
        "cfg_scale": 1,
        "seed": 42,
        "rand_device": "cpu",
        "use_gradient_checkpointing": True,
        "use_gradient_checkpointing_offload": False,
    }
    inputs: Inputs = (shared, {"prompt": "tiny"}, {})
    for unit in pipe.units:
        shared, positive, negative = inputs
        # The noise initializer has put tensors of the right shapes under `video_latents` and `audio_latents`.
        match type(unit).__name__:
            case "MiniMaxH3Unit_InputVideoEmbedder":
                shared["video_latents"] = shared["input_latents"] = draw(*shared["video_latents"].shape)
            case "MiniMaxH3Unit_InputAudioEmbedder":
                shared["audio_latents"] = shared["audio_input_latents"] = draw(*shared["audio_latents"].shape)
            case "MiniMaxH3Unit_PromptEmbedder":
                prompt = {
                    "prompt_embeds": draw(TEXT_TOKENS, DIT_ARGUMENTS["text_dim"]),
                    "text_token_tags": torch.ones(TEXT_TOKENS, dtype=torch.long),
                }
                positive.update(prompt)
                negative.update(prompt)
            case _:
                inputs = pipe.unit_runner(unit, pipe, *inputs)
    return inputs


if __name__ == "__main__":
    main()

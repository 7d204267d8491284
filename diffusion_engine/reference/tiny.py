"""Very small pipelines of random weights, written as diffusers and transformers write them: from words to picture, no download.

Neither real weights nor real tokenizers are needed: the sizes below are each family's with small numbers, and every text
encoder reads with the tokenizer that ships with the course's own model.
"""

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from diffusion_engine.reference.families import FAMILIES
from diffusion_engine.reference.solvers import FLOW

TOKENIZER = Path(__file__).resolve().parents[1] / "assets" / "model" / "tokenizer.json"
SMALL = {
    "vocab_size": 4000,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 1,
}
CLIP_LENGTH = 77  # tokens; the others read up to 512


class Tiny(NamedTuple):
    """Entries of the configurations of a very small pipeline; of the text encoders class and entries, in their order."""

    transformer: dict[str, Any]
    vae: dict[str, Any]
    scheduler: dict[str, Any]
    encoders: tuple[tuple[str, dict[str, Any]], ...]


def clip(width: int, pooled: int, pooled_only: bool = False) -> tuple[str, dict]:
    """A CLIP text model, with a projection of its pooled vector or without."""
    entries = SMALL | {"hidden_size": width, "projection_dim": pooled, "max_position_embeddings": CLIP_LENGTH}
    return "CLIPTextModelWithProjection" if pooled_only else "CLIPTextModel", entries | {"eos_token_id": 2}


def t5(width: int, kind: str = "T5EncoderModel") -> tuple[str, dict]:
    """A T5 encoder."""
    return kind, {"vocab_size": 4000, "d_model": width, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}


KL = {"block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "norm_num_groups": 4, "layers_per_block": 1}
DOWN_UP = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
DC = {"latent_channels": 4, "attention_head_dim": 4, "upsample_block_type": "interpolate", "decoder_act_fns": "silu"}
for way in ("encoder", "decoder"):
    DC |= {f"{way}_block_types": "ResBlock", f"{way}_block_out_channels": (8, 8, 8)}
    DC |= {f"{way}_layers_per_block": (1, 1, 1), f"{way}_qkv_multiscales": ((), (), ())}

TINY = {
    "sd3": Tiny(
        {"sample_size": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 4}
        | {"out_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 24, "caption_projection_dim": 64}
        | {"pos_embed_max_size": 12, "qk_norm": "rms_norm", "dual_attention_layers": [0]},
        KL | DOWN_UP | {"scaling_factor": 1.5305, "shift_factor": 0.0609},
        {"shift": 3.0},
        (clip(16, 12, pooled_only=True), clip(16, 12, pooled_only=True), t5(32)),
    ),
    "flux": Tiny(
        {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "guidance_embeds": True}
        | {"num_attention_heads": 4, "joint_attention_dim": 32, "pooled_projection_dim": 24}
        | {"axes_dims_rope": [4, 6, 6]},
        KL | DOWN_UP | {"scaling_factor": 0.3611, "shift_factor": 0.1159},
        {"use_dynamic_shifting": True},
        (clip(24, 24), t5(32)),
    ),
    "sana": Tiny(
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2}
        | {"num_cross_attention_heads": 3, "cross_attention_head_dim": 16, "cross_attention_dim": 48}
        | {"caption_channels": 24, "sample_size": 8},
        DC | {"scaling_factor": 0.41407},
        FLOW | {"flow_shift": 3.0},
        (("Gemma2Model", SMALL | {"hidden_size": 24, "num_key_value_heads": 1, "head_dim": 12}),),
    ),
    "wan": Tiny(
        {"num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "text_dim": 24}
        | {"ffn_dim": 80, "num_layers": 2, "freq_dim": 32, "rope_max_seq_len": 64},
        {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
        | {"temperal_downsample": [False, True, True]}
        | {"latents_mean": [0.1, -0.3, 0.0, 0.7], "latents_std": [1.5, 0.6, 2.0, 1.0]},
        FLOW | {"flow_shift": 3.0},
        (t5(24, "UMT5EncoderModel"),),
    ),
    "ltx": Tiny(
        {"in_channels": 8, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
        | {"cross_attention_dim": 64, "caption_channels": 24},
        {"latent_channels": 8, "block_out_channels": (4,) * 4, "decoder_block_out_channels": (4,) * 4}
        | {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5},
        {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024}
        | {"shift_terminal": 0.1},
        (t5(24),),
    ),
    "cogvideox": Tiny(
        {"num_attention_heads": 3, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "num_layers": 2}
        | {"time_embed_dim": 24, "text_embed_dim": 20, "sample_width": 12, "sample_height": 8, "sample_frames": 9}
        | {"max_text_seq_length": 7, "use_rotary_positional_embeddings": True},
        {"block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
        | {f"{way.lower()}_block_types": (f"CogVideoX{way}Block3D",) * 4 for way in ("Down", "Up")}
        | {"scaling_factor": 0.7},
        {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
        | {"beta_schedule": "scaled_linear", "snr_shift_scale": 1.0},
        (t5(20),),
    ),
    "hunyuan_video": Tiny(
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
        | {"num_single_layers": 2, "text_embed_dim": 32, "pooled_projection_dim": 24, "rope_axes_dim": [4, 6, 6]},
        {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4},
        {"shift": 7.0},
        (("LlamaModel", SMALL | {"hidden_size": 32, "num_hidden_layers": 3}), clip(24, 24)),
    ),
}


def write_tiny(name: str, folder: str | Path, seed: int = 0) -> Path:
    """A whole pipeline's folder as diffusers writes it, of random weights: transformer, VAE, scheduler, text encoders.

    Args:
        name: of the family. seed: of the weights; the same seed writes the same bytes.

    Raises:
        ValueError: an unknown family.
    """
    if name not in FAMILIES:
        raise ValueError(f"family {name!r} is unknown; try {', '.join(FAMILIES)}")
    import diffusers
    import transformers

    for library in (diffusers.utils, transformers):  # they complain of every part that is absent
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
    family, sizes = FAMILIES[name], TINY[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = {"transformer": getattr(diffusers, family.transformer)(**sizes.transformer)}
        parts |= {"vae": getattr(diffusers, family.vae)(**sizes.vae)}
        for number, (kind, entries) in enumerate(sizes.encoders, start=1):
            tail, model = "" if number == 1 else f"_{number}", getattr(transformers, kind)
            parts[f"text_encoder{tail}"] = model(model.config_class(**entries))
            parts[f"tokenizer{tail}"] = _tokenizer(CLIP_LENGTH if kind.startswith("CLIP") else 512)
        for part in parts.values():
            if isinstance(part, torch.nn.Module):
                draw_weights(part)
    parts["scheduler"] = getattr(diffusers, family.scheduler)(**sizes.scheduler)
    kind = getattr(diffusers, family.pipeline)
    names = [p.name for p in inspect.signature(kind).parameters.values() if p.default in (p.empty, None)]
    kind(**dict.fromkeys(names) | parts).save_pretrained(folder)
    return Path(folder)


def draw_weights(module: torch.nn.Module) -> None:
    """Every weight anew from the global generator, outputs of order one: a fresh model has zeros, which hide faults."""
    for weight in module.requires_grad_(False).parameters():
        weight.copy_(torch.randn(weight.shape) / (weight[0].numel() if weight.ndim > 1 else 4) ** 0.5)


def _tokenizer(length: int) -> Any:
    """The shipped tokenizer under transformers' interface, with a token for the beginning, cut at ``length`` tokens."""
    import transformers

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>", "eos_token": "<s>", "pad_token": "<pad>", "unk_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **special)

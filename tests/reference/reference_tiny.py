"""Tiny random checkpoints of every real family, written by diffusers' own ``save_pretrained``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiny:
    """One variant of a family.

    Args:
        module: of ``diffusion_engine.reference``.
        kind: diffusers' class.
        config: its sizes, as small as they go.
        calls: a generator → several calls in diffusers' arguments: not square, batch 2, padded text, several frames.
    """

    module: str
    kind: str
    config: dict
    calls: Callable[[torch.Generator], list[dict]]


def draw(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng)


def sd3_calls(rng: torch.Generator) -> list[dict]:
    return [
        {
            "hidden_states": draw(rng, b, 4, h, w),
            "encoder_hidden_states": draw(rng, b, m, 32),
            "pooled_projections": draw(rng, b, 24),
            "timestep": torch.tensor([937.5, 3.25][:b]),
        }
        for b, h, w, m in ((2, 8, 12, 7), (1, 20, 4, 1), (2, 24, 24, 11))
    ]


SD3 = {"sample_size": 16, "num_layers": 3, "attention_head_dim": 16, "num_attention_heads": 4, "pos_embed_max_size": 12}
SD3 |= {"in_channels": 4, "out_channels": 4, "joint_attention_dim": 32, "caption_projection_dim": 64}
SD3 |= {"pooled_projection_dim": 24}


def flux_calls(rng: torch.Generator, guidance: bool) -> list[dict]:
    calls = []
    for b, h, w, m in ((2, 3, 5, 7), (1, 6, 2, 1), (2, 4, 4, 9)):
        ids = torch.stack([torch.zeros(h, w), *torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")], dim=-1)
        call = {
            "hidden_states": draw(rng, b, h * w, 16),
            "encoder_hidden_states": draw(rng, b, m, 32),
            "pooled_projections": draw(rng, b, 24),
            "timestep": torch.tensor([0.9375, 0.003][:b]),
            "img_ids": ids.reshape(-1, 3),
            "txt_ids": torch.zeros(m, 3),
        }
        calls.append(call | ({"guidance": torch.tensor([3.5, 1.0][:b])} if guidance else {}))
    return calls


FLUX = {"in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4}
FLUX |= {"joint_attention_dim": 32, "pooled_projection_dim": 24, "axes_dims_rope": [4, 6, 6]}


def sana_calls(rng: torch.Generator, guidance: bool = False) -> list[dict]:
    calls = []
    for b, h, w, m in ((2, 4, 6, 7), (1, 5, 3, 1), (2, 8, 2, 9)):
        call = {
            "hidden_states": draw(rng, b, 4, h, w),
            "encoder_hidden_states": draw(rng, b, m, 24),
            "timestep": torch.tensor([937.5, 3.25][:b]),
            "encoder_attention_mask": (torch.arange(m) < torch.tensor([[m], [max(1, m - 3)]][:b])).long(),
        }
        calls.append(call | ({"guidance": torch.tensor([0.45, 0.1][:b])} if guidance else {}))
    return calls


SANA = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2}
SANA |= {"num_cross_attention_heads": 3, "cross_attention_head_dim": 16, "cross_attention_dim": 48}
SANA |= {"caption_channels": 24, "sample_size": 8}
SPRINT = {"qk_norm": "rms_norm_across_heads", "guidance_embeds": True, "timestep_scale": 1000.0}


def wan_calls(rng: torch.Generator, channels: int = 4, image: bool = False) -> list[dict]:
    """Text ends in zeros, as Wan's pipeline pads it; with an image diffusers wants 512 text tokens."""
    calls = []
    for b, f, h, w, m in ((2, 3, 4, 6, 7), (1, 1, 8, 2, 2), (2, 5, 2, 4, 9)):
        m = 512 if image else m
        text = draw(rng, b, m, 24)
        text[-1, m // 2 :] = 0
        call = {
            "hidden_states": draw(rng, b, channels, f, h, w),
            "timestep": torch.tensor([937.5, 3.25][:b]),
            "encoder_hidden_states": text,
        }
        calls.append(call | ({"encoder_hidden_states_image": draw(rng, b, 5, 20)} if image else {}))
    return calls


def wan22_calls(rng: torch.Generator) -> list[dict]:
    """One time a token: the first frame is clean."""
    times = torch.tensor([[0.0] * 6 + [937.5] * 12, [0.0] * 6 + [3.25] * 12])
    return [wan_calls(rng)[0] | {"timestep": times}]


WAN = {"num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "text_dim": 24}
WAN |= {"ffn_dim": 80, "num_layers": 2, "freq_dim": 32, "rope_max_seq_len": 32}
WAN14 = WAN | {"num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 172, "num_layers": 3}
WAN_IMAGE = WAN | {"in_channels": 12, "image_dim": 20, "added_kv_proj_dim": 48}


def hunyuan_video_calls(rng: torch.Generator) -> list[dict]:
    """Guidance is always passed, as the pipeline does, 1000 times the scale; padding stands on the right."""
    return [
        {
            "hidden_states": draw(rng, b, 4, f, h, w),
            "timestep": torch.tensor([937.5, 3.25][:b]),
            "encoder_hidden_states": draw(rng, b, m, 32),
            "encoder_attention_mask": (torch.arange(m) < torch.tensor([[max(1, m - 2)], [max(1, m - 5)]][:b])).long(),
            "pooled_projections": draw(rng, b, 24),
            "guidance": torch.tensor([6000.0, 1000.0][:b]),
        }
        for b, f, h, w, m in ((2, 3, 4, 6, 9), (1, 1, 8, 2, 7), (2, 5, 2, 4, 1))
    ]


HUNYUAN = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
HUNYUAN |= {"num_single_layers": 2, "text_embed_dim": 32, "pooled_projection_dim": 24, "rope_axes_dim": [4, 6, 6]}


def cogvideox_calls(rng: torch.Generator, rotary: bool, frames: int = 1) -> list[dict]:
    """Frames first; 2B wants its full 7 text tokens; the rotations are the pipeline's own, for 16 pixels a token.

    Args:
        frames: latent frames a token covers, 2 for the 1.5 model.
    """
    calls = []
    for b, f, h, w, m in ((2, 3, 4, 6, 7), (1, 2, 8, 2, 7), (2, 4, 6, 20 if frames == 1 else 10, 7), (2, 3, 8, 12, 7)):
        call = {
            "hidden_states": draw(rng, b, f * frames, 4, h, w),
            "encoder_hidden_states": draw(rng, b, m - 3 * (rotary and f == 4), 20),
            "timestep": torch.tensor([937, 3][:b]),
        }
        calls.append(call | ({"image_rotary_emb": cogvideox_rotations(f * frames, h, w, frames)} if rotary else {}))
    return calls


def cogvideox_rotations(f: int, h: int, w: int, frames: int) -> tuple[Tensor, Tensor]:
    from diffusers import CogVideoXPipeline

    sizes = SimpleNamespace(**COGVIDEOX, patch_size=2, patch_size_t=None if frames == 1 else frames)
    pipe = SimpleNamespace(vae_scale_factor_spatial=8, transformer=SimpleNamespace(config=sizes))
    return CogVideoXPipeline._prepare_rotary_positional_embeddings(pipe, 8 * h, 8 * w, f, "cpu")


COGVIDEOX = {"num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "num_layers": 2}
COGVIDEOX |= {"time_embed_dim": 24, "text_embed_dim": 20, "sample_width": 12, "sample_height": 8, "sample_frames": 9}
COGVIDEOX |= {"max_text_seq_length": 7}
COG5 = COGVIDEOX | {"use_rotary_positional_embeddings": True, "num_attention_heads": 3, "num_layers": 3}
COG15 = COG5 | {"patch_size_t": 2, "patch_bias": False}


def ltx_calls(rng: torch.Generator) -> list[dict]:
    """Grid and scale as the text pipeline gives them; coordinates and a time a token, as the newer ones do."""
    calls = []
    for b, f, h, w, m, rate in ((2, 3, 2, 4, 7, 24), (1, 1, 5, 3, 1, 25), (2, 4, 3, 1, 9, 30)):
        call = {
            "hidden_states": draw(rng, b, f * h * w, 8),
            "encoder_hidden_states": draw(rng, b, m, 24),
            "timestep": torch.tensor([937.5, 3.25][:b]),
            "encoder_attention_mask": (torch.arange(m) < torch.tensor([[m], [max(1, m - 3)]][:b])).long(),
            "num_frames": f,
            "height": h,
            "width": w,
            "rope_interpolation_scale": (8 / rate, 32, 32),
        }
        calls.append(call)
    coords = torch.rand(2, 3, 24, generator=rng) * torch.tensor([7.0, 512.0, 704.0]).reshape(3, 1)
    times = torch.rand(2, 24, generator=rng) * 1000
    kept = {name: calls[0][name] for name in ("hidden_states", "encoder_hidden_states", "encoder_attention_mask")}
    return [*calls, kept | {"timestep": times, "video_coords": coords}]


LTX = {"in_channels": 8, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
LTX |= {"cross_attention_dim": 64, "caption_channels": 24}
LTX_NARROW = LTX | {"num_attention_heads": 5, "attention_head_dim": 4, "cross_attention_dim": 20}

TINY = {
    "sd3": Tiny("sd3", "SD3Transformer2DModel", SD3, sd3_calls),
    "sd3.5-large": Tiny("sd3", "SD3Transformer2DModel", SD3 | {"qk_norm": "rms_norm"}, sd3_calls),
    "sd3.5-medium": Tiny(
        "sd3", "SD3Transformer2DModel", SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": [0, 1]}, sd3_calls
    ),
    "flux-dev": Tiny(
        "flux", "FluxTransformer2DModel", FLUX | {"guidance_embeds": True}, lambda rng: flux_calls(rng, guidance=True)
    ),
    "sana": Tiny("sana", "SanaTransformer2DModel", SANA, sana_calls),
    "sana-sprint": Tiny("sana", "SanaTransformer2DModel", SANA | SPRINT, lambda rng: sana_calls(rng, guidance=True)),
    "wan-1.3b": Tiny("wan", "WanTransformer3DModel", WAN, wan_calls),
    "wan-14b": Tiny("wan", "WanTransformer3DModel", WAN14, wan_calls),
    "wan-image": Tiny("wan", "WanTransformer3DModel", WAN_IMAGE, lambda rng: wan_calls(rng, channels=12, image=True)),
    "wan-2.2-5b": Tiny("wan", "WanTransformer3DModel", WAN | {"cross_attn_norm": False}, wan22_calls),
    "hunyuan-video": Tiny("hunyuan_video", "HunyuanVideoTransformer3DModel", HUNYUAN, hunyuan_video_calls),
    "hunyuan-video-plain": Tiny(
        "hunyuan_video", "HunyuanVideoTransformer3DModel", HUNYUAN | {"guidance_embeds": False}, hunyuan_video_calls
    ),
    "cogvideox-2b": Tiny(
        "cogvideox", "CogVideoXTransformer3DModel", COGVIDEOX, lambda rng: cogvideox_calls(rng, rotary=False)
    ),
    "cogvideox-5b": Tiny(
        "cogvideox", "CogVideoXTransformer3DModel", COG5, lambda rng: cogvideox_calls(rng, rotary=True)
    ),
    "cogvideox-1.5": Tiny(
        "cogvideox", "CogVideoXTransformer3DModel", COG15, lambda rng: cogvideox_calls(rng, rotary=True, frames=2)
    ),
    "ltx": Tiny("ltx", "LTXVideoTransformer3DModel", LTX, ltx_calls),
    "ltx-narrow": Tiny("ltx", "LTXVideoTransformer3DModel", LTX_NARROW | {"attention_bias": False}, ltx_calls),
    "flux-schnell": Tiny("flux", "FluxTransformer2DModel", FLUX, lambda rng: flux_calls(rng, guidance=False)),
}


def redraw(model: torch.nn.Module, seed: int = 0) -> None:
    """Every parameter anew: a fresh model hides faults behind ones and zeros. Outputs stay of order one."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            fan_in = weight[0].numel() if weight.ndim > 1 else 4
            weight.copy_(torch.randn(weight.shape, generator=rng) / fan_in**0.5)


def their_model(tiny: Tiny):
    """diffusers' own model with random weights."""
    import diffusers

    model = getattr(diffusers, tiny.kind)(**tiny.config).eval().requires_grad_(False)
    redraw(model)
    return model


def save(tiny: Tiny, folder: Path, **options) -> Path:
    """The checkpoint in ``folder/transformer``, as diffusers writes it."""
    their_model(tiny).save_pretrained(folder / "transformer", **options)
    return folder

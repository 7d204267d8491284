"""Tiny random checkpoints of every real family, written by diffusers' own ``save_pretrained``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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

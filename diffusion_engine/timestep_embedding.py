# Generated from notebooks/source/03_timestep_embedding.py by `course export`.
# Do not edit: change the chapter and export again.

import math

import torch
from torch import Tensor, nn


def timestep_embedding(t: Tensor, dim: int, max_period: float = 10_000.0) -> Tensor:
    """Sinusoidal embedding e(t) = [cos(ω t), sin(ω t)] with ω_i = max_period^(-i / (dim/2)).

    Args:
        t: times in 0…1000, shape (B,); float32, float64 or integers, computed in fp32.
        dim: embedding width D, even.
        max_period: P, the scale of the slowest hand.

    Returns:
        (B, D), fp32, cosines first (the order that DiT, SD3 and FLUX use).

    Raises:
        ValueError: ``dim`` is no positive even number, ``t`` is not one-dimensional, or it is a half-precision
            tensor, which has lost the time's last digits already.

    Source: Vaswani et al. 2017, §3.5; Peebles & Xie 2023 (DiT), ``models.py``.
    """
    if dim < 2 or dim % 2:
        low = max(2, dim // 2 * 2)
        raise ValueError(f"dim {dim} is no positive even number; try {low} or {low + 2}")
    if t.ndim != 1:
        raise ValueError(f"t has shape {tuple(t.shape)}; expected (B,), one time a sample")
    if t.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(f"t is {t.dtype}, which cannot hold every time in 0…1000; keep it torch.float32")
    half = dim // 2
    omega = torch.exp(-math.log(max_period) * torch.arange(half, device=t.device) / half)  # (D/2,)
    angle = t.float()[:, None] * omega  # (B, D/2)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)  # (B, D)


class TimestepEmbedder(nn.Module):
    """Sinusoid, then Linear → SiLU → Linear: times (B,) to conditions (B, width).

    Args:
        width: model width.
        frequency_dim: width D of the sinusoid, even.

    Raises:
        ValueError: what `timestep_embedding` raises, at the first call.

    Source: Peebles & Xie 2023 (DiT), ``TimestepEmbedder``; the same two layers in SD3, FLUX and Wan.
    """

    def __init__(self, width: int, frequency_dim: int = 256):
        super().__init__()
        self.frequency_dim = frequency_dim
        self.mlp = nn.Sequential(nn.Linear(frequency_dim, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        features = timestep_embedding(t, self.frequency_dim)  # (B, D) fp32
        return self.mlp(features.to(self.mlp[0].weight.dtype))  # (B, width)

# Generated from notebooks/source/05_transformer_block.py by `course export`.
# Do not edit: change the chapter and export again.

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_engine.attention import (
    Heads,
    JointAttention,
    QKNorm,
    Rope,
    SelfAttention,
    attention,
    rms_normalize,
)


class Mod(NamedTuple):
    """What the condition says to one sub-layer: shift β, scale γ and gate α, each (B, 1, D), or (B, N, D) per token.

    ``gate`` is None where nothing is added back to a residual stream.
    """

    shift: Tensor
    scale: Tensor
    gate: Tensor | None = None


def normalize(x: Tensor, kind: str = "layer") -> Tensor:
    """LayerNorm or RMSNorm over the last axis, without weights, computed in fp32, ε = 1e-6.

    Args:
        x: (…, D), any float dtype; the result has the same.
        kind: "layer", (x − μ) / sqrt(σ² + ε), or "rms", x / sqrt(mean(x²) + ε) (LTX-Video).

    Raises:
        ValueError: another kind.
    """
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], eps=1e-6)  # fp32 inside, whatever x is
    if kind == "rms":
        return rms_normalize(x)
    raise ValueError(f"norm {kind!r} is unknown; try 'layer' or 'rms'")


def modulate(x: Tensor, mod: Mod, norm: str = "layer") -> Tensor:
    """(1 + γ) · norm(x) + β: tokens x (B, N, D) → (B, N, D). Zero shift and scale give the plain norm.

    Source: Perez et al. 2017 (FiLM); Peebles & Xie 2023 (DiT), §3.2.
    """
    return torch.addcmul(mod.shift, normalize(x, norm), 1 + mod.scale)  # β + norm(x) · (1 + γ), in one pass


def split_mods(flat: Tensor, n: int, gate: bool = True) -> list[Mod]:
    """Cut knobs (B, k·n·D), or (B, N, k·n·D) per token, into n `Mod`s in the order shift, scale, gate; k = 3 or 2."""
    k = 3 if gate else 2
    flat = flat.unsqueeze(1) if flat.ndim == 2 else flat  # (B, 1, k·n·D): one set for all tokens of a sample
    parts = flat.chunk(k * n, dim=-1)
    return [Mod(*parts[k * i : k * i + k]) for i in range(n)]


class Modulation(nn.Module):
    """Linear(SiLU(c)): condition (B, D) → n × `Mod`; all zero at init, so every gate starts closed.

    Args:
        width: D. n: sub-layers to steer.
        gate: whether each gets a gate, too (without one: AdaLN, as before a final layer).

    forward(c) → n × `Mod`; knobs that were made before, a list of `Mod`, pass unchanged.

    Raises:
        ValueError: the condition is not (B, D), or (B, N, D) for knobs per token.

    Source: Peebles & Xie 2023 (DiT), AdaLN-Zero.
    """

    def __init__(self, width: int, n: int, gate: bool = True):
        super().__init__()
        self.n, self.gate = n, gate
        self.linear = nn.Linear(width, (3 if gate else 2) * n * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, cond: Tensor | list[Mod]) -> list[Mod]:
        if isinstance(cond, list):
            return cond
        if cond.ndim not in (2, 3) or cond.shape[-1] != self.linear.in_features:
            raise ValueError(f"condition has shape {tuple(cond.shape)}; expected (B, {self.linear.in_features})")
        return split_mods(self.linear(F.silu(cond)), self.n, self.gate)


def gelu(hidden: Tensor, approximate: str = "tanh") -> Tensor:
    """GELU of what a layer has just made; in its place unless a gradient needs it: nothing in a block is as wide."""
    if hidden.requires_grad:
        return F.gelu(hidden, approximate=approximate)
    return torch.ops.aten.gelu_(hidden, approximate=approximate)


class FeedForward(nn.Sequential):
    """Linear → GELU (tanh form) → Linear on every token alone: width → hidden → width.

    Args:
        width: D. ratio: hidden = ratio · width.
        hidden: the hidden width itself, where a model does not use a whole ratio (Wan2.1: 1536 → 8960).
    """

    def __init__(self, width: int, ratio: int = 4, hidden: int | None = None):
        hidden = ratio * width if hidden is None else hidden
        super().__init__(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return self[2](gelu(self[0](x), self[1].approximate))


class DiTBlock(nn.Module):
    """x ← x + α₁ · attn(modulate(x)); x ← x + α₂ · ff(modulate(x)): the AdaLN-Zero block, (B, N, D) → (B, N, D).

    Args:
        width: D. heads: H. qk_norm: as in `SelfAttention`.
        norm: "layer" or "rms", see `normalize`.
        table: knobs from a `ModulationTable` on a shared vector instead of a `Modulation` of its own.
        cross: a module called as cross(x, text, text_mask); added between the two sub-layers, without a gate.
        cross_norm: whether a LayerNorm with weights stands before it (Wan2.1: yes; Sana, LTX-Video: no).
        ff: a feed-forward network in place of `FeedForward(width)`.
        options: ``bias``, ``head_dim``, ``eps`` of `Heads`.

    forward(x (B, N, D), cond (B, D), or (B, 6·D) with a table; mask, rope and chunk as in `SelfAttention`; text, text_mask
    as ``cross`` takes them). Source: Peebles & Xie 2023 (DiT); Chen et al. 2023 (PixArt-α) for table and cross.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        qk_norm: QKNorm = True,
        *,
        norm: str = "layer",
        table: bool = False,
        cross: nn.Module | None = None,
        cross_norm: bool = False,
        ff: nn.Module | None = None,
        **options,
    ):
        super().__init__()
        self.norm = norm
        self.modulation = ModulationTable(width, 2) if table else Modulation(width, 2)
        self.attn = SelfAttention(width, heads, qk_norm, **options)
        self.ff = FeedForward(width) if ff is None else ff
        self.cross, self.cross_norm = cross, nn.LayerNorm(width, eps=1e-6) if cross_norm else nn.Identity()

    def forward(self, x, cond, mask=None, rope: Rope | None = None, chunk=None, text=None, text_mask=None) -> Tensor:
        for_attn, for_ff = self.modulation(cond)
        x = torch.addcmul(x, for_attn.gate, self.attn(modulate(x, for_attn, self.norm), mask, rope, chunk))
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), text, text_mask)
        return torch.addcmul(x, for_ff.gate, self.ff(modulate(x, for_ff, self.norm)))


class JointBlock(nn.Module):
    """MMDiT block: image and text tokens have weights and knobs of their own and meet in one attention.

    Args:
        width: D. heads: H. qk_norm: as in `JointAttention`.
        last: the text only feeds keys and values and goes no further; its knobs have no gate then.
        options: ``text_first``, ``bias``, ``head_dim``, ``eps`` of `JointAttention`.

    forward(x (B, N, D), text (B, M, D), cond (B, D), text_mask (B, M) bool, rope over N + M tokens) → image tokens and text
    tokens, None for the text of a last block. cond may also be a pair, one for the image and one for the text. Source: Esser et al. 2024 (SD3), figure 2; FLUX.1's double blocks.
    """

    def __init__(self, width: int, heads: int, qk_norm: QKNorm = True, last: bool = False, **options):
        super().__init__()
        self.last = last
        self.image_modulation = Modulation(width, 2)
        self.text_modulation = Modulation(width, 1, gate=False) if last else Modulation(width, 2)
        self.attn = JointAttention(width, heads, qk_norm, text_out=not last, **options)
        self.image_ff, self.text_ff = FeedForward(width), None if last else FeedForward(width)

    def forward(self, x, text, cond, text_mask=None, rope: Rope | None = None, chunk: int | None = None):
        for_image, for_text = cond if isinstance(cond, tuple) else (cond, cond)
        image_mods, text_mods = self.image_modulation(for_image), self.text_modulation(for_text)
        a, b = self.attn(modulate(x, image_mods[0]), modulate(text, text_mods[0]), text_mask, rope, chunk)
        x = torch.addcmul(x, image_mods[0].gate, a)
        text = text if self.last else torch.addcmul(text, text_mods[0].gate, b)
        del a, b  # nothing below reads them, and the widest tensors come next
        x = torch.addcmul(x, image_mods[1].gate, self.image_ff(modulate(x, image_mods[1])))
        if self.last:
            return x, None
        return x, torch.addcmul(text, text_mods[1].gate, self.text_ff(modulate(text, text_mods[1])))


class ParallelBlock(nn.Module):
    """x ← x + α · W [attn(h), GELU(W_in h)] with h = modulate(x): FLUX's single-stream block, (B, N, D) → (B, N, D).

    Args:
        width: D. heads: H. qk_norm: as in `SelfAttention`. ratio: hidden width of the MLP over D.
        eps: of the norms of queries and keys.

    forward(x (B, N, D), cond (B, D), mask, rope, chunk). Source: Dehghani et al. 2023 (ViT-22B); FLUX.1 `SingleStreamBlock`.
    """

    def __init__(self, width: int, heads: int, qk_norm: QKNorm = True, ratio: int = 4, eps: float = 1e-6):
        super().__init__()
        self.modulation = Modulation(width, 1)
        self.stream = Heads(width, heads, qk_norm, out=False, eps=eps)
        self.ff_in = nn.Linear(width, ratio * width)
        self.out = nn.Linear(width + ratio * width, width)

    def forward(self, x: Tensor, cond: Tensor, mask=None, rope: Rope | None = None, chunk: int | None = None) -> Tensor:
        (mod,) = self.modulation(cond)
        h = modulate(x, mod)
        q, k, v = self.stream.split(h, rope)
        attended = self.stream.merge(attention(q, k, v, mask, chunk))  # (B, N, D)
        del q, k, v  # nothing below reads them, and the widest tensors come next
        return torch.addcmul(x, mod.gate, self.out(torch.cat([attended, gelu(self.ff_in(h))], dim=-1)))


class ModulationTable(nn.Module):
    """Knobs of one block = shared knobs + a table of the block's own: (B, 3·n·D) → n × `Mod`.

    The shared knobs are made once for all blocks, Linear(SiLU(c)), or per token (B, N, 3·n·D). The table starts at zero.
    Knobs that were made before, a list of `Mod`, pass unchanged.

    Raises:
        ValueError: the shared vector does not have 3·n·D entries.

    Source: Chen et al. 2023 (PixArt-α), "AdaLN-single"; also Sana, Wan2.1, LTX-Video.
    """

    def __init__(self, width: int, n: int):
        super().__init__()
        self.n = n
        self.table = nn.Parameter(torch.zeros(3 * n, width))

    def forward(self, shared: Tensor | list[Mod]) -> list[Mod]:
        if isinstance(shared, list):
            return shared
        if shared.ndim not in (2, 3) or shared.shape[-1] != self.table.numel():
            rows, width = self.table.shape
            raise ValueError(f"shared knobs have shape {tuple(shared.shape)}; expected (B, {rows} · {width})")
        return split_mods(shared + self.table.flatten(), self.n)

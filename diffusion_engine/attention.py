# Generated from notebooks/source/04_attention.py by `course export`.
# Do not edit: change the chapter and export again.

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def score_bytes(batch: int, heads: int, queries: int, keys: int, itemsize: int = 2) -> int:
    """Bytes of one layer's naive scores: B · H · N · M · itemsize (2 for bf16, 4 for fp32)."""
    return batch * heads * queries * keys * itemsize


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, chunk: int | None = None, scale: float | None = None
) -> Tensor:
    """softmax(scale · q kᵀ) v in every head; full: each query sees every key that the mask leaves, never causal.

    Args:
        q: queries (B, H, N, Dh).
        k: keys (B, H, M, Dh).
        v: values (B, H, M, Dh).
        mask: bool with four axes, True where a key may be seen. (B, 1, 1, M) hides padding (see `key_mask`);
            (B, 1, N, M) is general and costs N · M. A query that may see nothing gets zeros.
        chunk: queries handled at a time: exact, at most chunk · M scores a head; None makes one fused call.
        scale: factor on the scores; None is 1 / sqrt(Dh).

    Returns:
        (B, H, N, Dh).

    Raises:
        ValueError: not a value for each key, or queries not as wide as keys; a mask that is not bool or has not four
            axes; a ``chunk`` that is no positive whole number.

    Source: Vaswani et al. 2017, §3.2; Rabe & Staats 2021 (chunks); Dao et al. 2022 (fused).
    """
    if k.shape[-2] != v.shape[-2] or q.shape[-1] != k.shape[-1]:
        found = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"{found} do not fit; a value for each key, and queries as wide as keys")
    if mask is not None and (mask.dtype != torch.bool or mask.ndim != 4):
        found = f"{mask.dtype} {tuple(mask.shape)}"
        raise ValueError(f"mask is {found}; expected torch.bool (B, 1, 1, M), True where a key may be seen")
    if chunk is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk {chunk} is no positive number of queries; try 64 or None")
    out = torch.empty_like(q)
    for start in range(0, q.shape[-2], chunk):
        rows = slice(start, start + chunk)
        row_mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        out[..., rows, :] = F.scaled_dot_product_attention(q[..., rows, :], k, v, attn_mask=row_mask, scale=scale)
    return out


def key_mask(real: Tensor) -> Tensor:
    """Which tokens are real, (B, M) bool, as a mask on keys (B, 1, 1, M): one row for all heads and queries.

    Raises:
        ValueError: ``real`` is not bool or not (B, M).
    """
    if real.dtype != torch.bool or real.ndim != 2:
        found = f"{real.dtype} {tuple(real.shape)}"
        raise ValueError(f"token mask is {found}; expected torch.bool (B, M), True where a token is real; try .bool()")
    return real[:, None, None, :]


def joint_mask(text_mask: Tensor | None, num_image_tokens: int, text_first: bool = False) -> Tensor | None:
    """Key mask (B, 1, 1, N + M) for image and text in one sequence: every image token may be seen, text where real.

    Args:
        text_mask: (B, M) bool, True where a text token is real; None hides nothing and returns None.
        num_image_tokens: N.
        text_first: the text stands before the image, as in FLUX and CogVideoX.

    Raises:
        ValueError: see `key_mask`.
    """
    if text_mask is None:
        return None
    sides = (0, num_image_tokens) if text_first else (num_image_tokens, 0)
    return F.pad(key_mask(text_mask), sides, value=True)


def rms_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last axis, computed in fp32: (…, D) → the same, in x's dtype."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return (x * torch.rsqrt(length.square() / x.shape[-1] + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """y = w · x / sqrt(mean(x²) + eps) over the last axis; all but w in fp32, see `rms_normalize`.

    The normalised x has x's dtype again before w multiplies it (Zhang & Sennrich 2019)."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalize(x, self.eps) * self.weight


class RMSNormAcrossHeads(RMSNorm):
    """RMSNorm with one mean for all heads of a token: x (B, H, N, Dh), dim = H · Dh weights, head by head."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2).flatten(-2)).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)


QKNorm = str | bool | None  # "rms" or True, "rms_across", "layer"; None or False for none
QK_NORMS = {None: nn.Identity, "rms": RMSNorm, "rms_across": RMSNormAcrossHeads, "layer": nn.LayerNorm}


def qk_norm_layer(kind: QKNorm, heads: int, head_dim: int, eps: float = 1e-6) -> nn.Module:
    """The norm of queries or keys (B, H, N, Dh), H = heads, Dh = head_dim, with ``eps`` inside every kind's root.

    Args:
        kind: "rms" or True, Dh weights, per head; "rms_across", H · Dh weights, over all heads; "layer", LayerNorm, Dh,
            per head; None or False, none.

    Raises:
        ValueError: another kind.
    """
    if (kind := "rms" if kind is True else kind or None) not in QK_NORMS:
        raise ValueError(f'qk_norm {kind!r} is unknown; try "rms", "rms_across", "layer" or None')
    return QK_NORMS[kind](heads * head_dim if kind == "rms_across" else head_dim, eps)


class Rope(NamedTuple):
    """The turn of every token, as cosines and sines: (N, Dh/2) fp32; axes before these may broadcast to B and H.

    Pair i is components 2i and 2i + 1 (FLUX, Wan, HunyuanVideo); with ``halves`` it is i and i + Dh/2.
    """

    cos: Tensor
    sin: Tensor
    halves: bool = False


def grid_positions(*sizes: int) -> Tensor:
    """Position of every token of a grid, row by row, the last axis fastest: whole numbers (N, A) from 0.

    Args:
        sizes: any number A of axes, such as (h, w) or (t, h, w); N is their product.
    """
    axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    return torch.stack(axes, dim=-1).flatten(0, -2)


def axial_rope(positions: Tensor, axes_dim: tuple[int, ...], theta: float = 10_000.0, halves: bool = False) -> Rope:
    """Angles ω_i · p with ω_i = theta^(-2i / dim), i = 0 … dim/2 − 1, axis after axis; in fp64, kept in fp32.

    Args:
        positions: (N, A), one column an axis, whole or fractional.
        axes_dim: dim of each axis, the components of a head that it turns, all even; their sum is Dh (FLUX: 16, 56, 56).
        theta: the larger, the slower the slow turns (HunyuanVideo: 256).
        halves: see `Rope`.

    Raises:
        ValueError: positions and ``axes_dim`` disagree, or an entry is no positive even number.

    Source: Su et al. 2021; Black Forest Labs, flux ``math.py``.
    """
    if positions.ndim != 2 or positions.shape[-1] != len(axes_dim):
        raise ValueError(f"positions are {tuple(positions.shape)}; axes_dim {axes_dim} wants (N, {len(axes_dim)})")
    angles = []
    for axis, dim in enumerate(axes_dim):
        if dim < 2 or dim % 2:
            low = max(2, dim // 2 * 2)
            raise ValueError(f"axes_dim {axes_dim} has {dim}, no positive even number; try {low} or {low + 2}")
        omega = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # (dim/2,)
        angles.append(positions[:, axis, None].cpu().double() * omega)  # (N, dim/2)
    angle = torch.cat(angles, dim=-1)  # (N, Dh/2)
    return Rope(angle.cos().float().to(positions.device), angle.sin().float().to(positions.device), halves)


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Turn every pair of every head by its token's angle, in fp32: x (B, H, N, Dh) → the same shape and dtype.

    Raises:
        ValueError: the last two axes of the turns are not (N, Dh/2).
    """
    tokens, pairs = rope.cos.shape[-2:]
    if x.shape[-2:] != (tokens, 2 * pairs):
        found = f"{x.shape[-2]} tokens of {x.shape[-1]}"
        raise ValueError(f"x has {found} but rope turns {tokens} of {2 * pairs}; pad_rope adds tokens that stay")
    y = x.float()
    if rope.halves:
        y0, y1 = y.chunk(2, dim=-1)  # (B, H, N, Dh/2) each
        return torch.cat([y0 * rope.cos - y1 * rope.sin, y1 * rope.cos + y0 * rope.sin], dim=-1).to(x.dtype)
    if y.stride(-1) != 1 or y.storage_offset() % 2 or any(step % 2 for step in y.stride()[:-1]):
        y = y.clone(memory_format=torch.contiguous_format)  # pairs must lie side by side, from an even place on
    turned = torch.view_as_complex(y.unflatten(-1, (-1, 2))) * torch.complex(rope.cos, rope.sin)  # (y0 + i·y1) · e^iωp
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def pad_rope(rope: Rope, before: int = 0, after: int = 0) -> Rope:
    """Add tokens with angle zero, which stay as they are: text before or after the image's tokens."""
    sides = (0, 0, before, after)
    return rope._replace(cos=F.pad(rope.cos, sides, value=1.0), sin=F.pad(rope.sin, sides))


def head_width(width: int, heads: int) -> int:
    """Dh = width / heads.

    Raises:
        ValueError: it is no whole number, or one of them is not positive.
    """
    if heads < 1 or width < 1 or width % heads:
        near = min((h for h in range(1, width + 1) if width % h == 0), key=lambda h: abs(h - heads), default=1)
        raise ValueError(f"width {width} is not a multiple of heads {heads}; try {near} heads, or give head_dim")
    return width // heads


class Stacked(nn.Linear):
    """Several linear layers of one input, their rows stacked in one matrix and asked one at a time.

    Args:
        width: of the input. out: of each layer's output. parts: how many. bias: as in ``nn.Linear``.

    forward(x (…, width), part from 0) → (…, out).
    """

    def __init__(self, width: int, out: int, parts: int, bias: bool = True):
        super().__init__(width, parts * out, bias)
        self.parts = parts

    def forward(self, x: Tensor, part: int) -> Tensor:
        bias = None if self.bias is None else self.bias.chunk(self.parts)[part]
        return F.linear(x, self.weight.chunk(self.parts)[part], bias)


class Heads(nn.Module):
    """One stream's way into attention and out: tokens (B, N, D) → q, k, v (B, H, N, Dh); heads → (B, N, D).

    Args:
        width: D.
        heads: H.
        qk_norm: norm of queries and keys, see `qk_norm_layer`.
        out: whether the stream reads the result (an output projection exists).
        bias: whether q, k and v have a bias.
        head_dim: Dh where it is not D / H.
        eps: of the norms.

    Raises:
        ValueError: D is no multiple of H, or an unknown norm.
    """

    def __init__(self, width: int, heads: int, qk_norm: QKNorm = True, out=True, bias=True, head_dim=None, eps=1e-6):
        super().__init__()
        head_dim = head_dim or head_width(width, heads)
        self.heads = heads
        self.qkv = Stacked(width, heads * head_dim, 3, bias)
        self.norm_q, self.norm_k = (qk_norm_layer(qk_norm, heads, head_dim, eps) for _ in "qk")
        self.out = nn.Linear(heads * head_dim, width) if out else None

    def split(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, N, D) → q and k, normalised and turned by ``rope``, and v: (B, H, N, Dh) each."""
        parts, turn = self.parts(x), nn.Identity() if rope is None else partial(apply_rope, rope=rope)
        return turn(next(parts)), turn(next(parts)), next(parts)

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        """Normalised q and k, and v, one after the other: each is projected when its turn comes, to hold less at once.

        The 3 · H · Dh rows of ``qkv`` are all of q, then k, then v, each of them head by head.
        """
        for part, norm in enumerate((self.norm_q, self.norm_k, nn.Identity())):
            yield norm(self.qkv(x, part).unflatten(-1, (self.heads, -1)).transpose(1, 2))

    def merge(self, heads: Tensor) -> Tensor:
        """Heads (B, H, N, Dh) → tokens (B, N, D); without an output projection (B, N, H · Dh)."""
        joined = heads.transpose(1, 2).flatten(-2)  # (B, N, H · Dh)
        return joined if self.out is None else self.out(joined)


class SelfAttention(nn.Module):
    """Every token sees every token, itself included; never causal: (B, N, D) → (B, N, D).

    Args:
        width: D.
        heads: H.
        qk_norm: see `qk_norm_layer`.
        options: ``bias``, ``head_dim``, ``eps`` of `Heads`.
    """

    def __init__(self, width: int, heads: int, qk_norm: QKNorm = True, **options):
        super().__init__()
        self.stream = Heads(width, heads, qk_norm, **options)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, rope: Rope | None = None, chunk: int | None = None
    ) -> Tensor:
        """Tokens x (B, N, D); ``mask``, ``chunk`` as in `attention`; ``rope`` turns all N tokens."""
        q, k, v = self.stream.split(x, rope)
        heads = attention(q, k, v, mask, chunk)
        del q, k, v  # nothing below reads them
        return self.stream.merge(heads)


class JointAttention(nn.Module):
    """Image and text tokens, each with its own projections, in one attention (MMDiT, Esser et al. 2024).

    Args:
        width: D of both streams.
        heads: H.
        qk_norm: see `qk_norm_layer`.
        text_out: whether the text reads the result; in SD3's last block it only feeds keys and values.
        text_first: order in the common sequence; matters to ``rope`` alone (FLUX: True).
        options: ``bias``, ``head_dim``, ``eps`` of `Heads`.
    """

    def __init__(
        self, width: int, heads: int, qk_norm: QKNorm = True, text_out: bool = True, text_first: bool = False, **options
    ):
        super().__init__()
        self.text_first = text_first
        self.image = Heads(width, heads, qk_norm, **options)
        self.text = Heads(width, heads, qk_norm, out=text_out, **options)

    def forward(
        self,
        x: Tensor,
        text: Tensor,
        text_mask: Tensor | None = None,
        rope: Rope | None = None,
        chunk: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Image tokens x (B, N, D) and text (B, M, D) → both anew; None for the text without ``text_out``.

        ``text_mask`` (B, M) bool is True where a text token is real; ``rope`` turns all N + M tokens in the common
        order (`pad_rope` makes it from the image's); ``chunk`` as in `attention`.
        """
        order = -1 if self.text_first else 1
        streams = ((self.image, x), (self.text, text))[::order]
        # (B, H, N + M, Dh) each, joined one after the other: no name keeps the parts, so their memory ends here
        q, k, v = map(lambda *p: torch.cat(p, dim=-2), *(stream.parts(tokens) for stream, tokens in streams))
        if rope is not None:
            q = apply_rope(q, rope)
            k = apply_rope(k, rope)
        sizes = [x.shape[1], text.shape[1]][::order]
        heads = attention(q, k, v, joint_mask(text_mask, x.shape[1], self.text_first), chunk)
        del q, k, v  # nothing below reads them
        for_image, for_text = heads.split(sizes, dim=-2)[::order]
        return self.image.merge(for_image), self.text.merge(for_text) if self.text.out is not None else None


class CrossAttention(nn.Module):
    """Image tokens ask, text tokens answer: x (B, N, D), text (B, M, Dt) → (B, N, D).

    Args:
        width: D.
        heads: H.
        text_width: Dt where it is not D.
        qk_norm, bias, head_dim, eps: see `Heads`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        text_width: int | None = None,
        qk_norm: QKNorm = True,
        bias: bool = True,
        head_dim: int | None = None,
        eps: float = 1e-6,
    ):
        super().__init__()
        head_dim = head_dim or head_width(width, heads)
        self.heads = heads
        self.q = nn.Linear(width, heads * head_dim, bias=bias)
        self.kv = nn.Linear(text_width or width, 2 * heads * head_dim, bias=bias)
        self.norm_q = qk_norm_layer(qk_norm, heads, head_dim, eps)
        self.norm_k = qk_norm_layer(qk_norm, heads, head_dim, eps)
        self.out = nn.Linear(heads * head_dim, width)

    def keys_values(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, M, Dh) of text (B, M, Dt): the same at every denoising step.

        The outputs of ``kv`` are all of k, then v, each head by head; k is normalised.
        """
        k, v = self.kv(text).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.norm_k(k), v

    def attend(
        self, x: Tensor, k: Tensor, v: Tensor, text_mask: Tensor | None = None, chunk: int | None = None
    ) -> Tensor:
        """Ask keys and values that `keys_values` made; ``text_mask`` (B, M) bool, True where a token is real."""
        q = self.norm_q(self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2))  # (B, H, N, Dh)
        heads = attention(q, k, v, None if text_mask is None else key_mask(text_mask), chunk)
        del q
        return self.out(heads.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor, text, text_mask: Tensor | None = None, chunk: int | None = None) -> Tensor:
        """x (B, N, D) asks text (B, M, Dt), or what `keys_values` made of it, a tuple."""
        keys, values = text if isinstance(text, tuple) else self.keys_values(text)
        return self.attend(x, keys, values, text_mask, chunk)

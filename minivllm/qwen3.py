# Generated from notebooks/source/A1_qwen3.py by `course export`.
# Do not edit: change the chapter and export again.

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Qwen3Config:
    """Sizes of a Qwen3, under the names of Hugging Face's ``config.json``.

    Raises:
        ValueError: a size below 1, query heads that key heads do not divide, or an odd ``head_dim``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    max_position_embeddings: int = 32_768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    tie_word_embeddings: bool = False
    eos_token_id: tuple[int, ...] = ()

    def __post_init__(self):
        for name in list(self.__dataclass_fields__)[:8]:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not a positive number; try 1")
        heads, keys = self.num_attention_heads, self.num_key_value_heads
        if heads % keys:
            near = max(k for k in range(1, keys) if heads % k == 0)
            raise ValueError(f"num_attention_heads {heads} is not a multiple of {keys} key heads; try {near} key heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, and RoPE turns pairs; try {self.head_dim + 1}")


FIXED = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def read_config(entries: dict) -> Qwen3Config:
    """A Hugging Face ``config.json`` as a `Qwen3Config`; what is not built here is refused, never ignored.

    Args:
        entries: the file's; θ stands in ``rope_parameters`` (transformers 5) or beside the others (4).

    Raises:
        ValueError: another model, activation or kind of RoPE; biases; a sliding window; a size that is missing.
    """
    for name, value in FIXED.items():
        if entries.get(name, value) != value:
            raise ValueError(f"{name} {entries[name]!r} is not built here; expected {value!r}")
    rope = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type {kind!r} is not built here; expected 'default'")
    names = list(Qwen3Config.__dataclass_fields__)
    sizes = {name: value for name, value in {**entries, **rope}.items() if name in names and value is not None}
    if missing := [name for name in names[:6] if name not in sizes]:
        raise ValueError(f"the config lacks {', '.join(missing)}")
    ends = sizes.get("eos_token_id", ())
    return Qwen3Config(**sizes | {"eos_token_id": (ends,) if isinstance(ends, int) else tuple(ends)})


@cache
@torch.inference_mode(False)  # so that training may keep it, too
def number(value: float, device: torch.device) -> Tensor:
    """A number as an fp32 tensor without axes, made once: operations on short rows take it faster than a Python number."""
    return torch.tensor(value, dtype=torch.float32, device=device)


class RMSNorm(nn.Module):
    """y = w · x / sqrt(mean(x²) + ε) over the last axis, in fp32 (Zhang & Sennrich 2019).

    The root is the hypotenuse of |x| / sqrt(D) and sqrt(ε).
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True) * number(x.shape[-1] ** -0.5, x.device)
        return (x.float() / torch.hypot(size, number(self.eps**0.5, x.device))).to(x.dtype) * self.weight


class Rope(NamedTuple):
    """cos and sin of every token's turns, (N, 1, Dh) or (B, N, 1, Dh); the first half of sin is negative."""

    cos: Tensor
    sin: Tensor


@cache
def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """ω_i = θ^(−2i / Dh), fp32, (Dh/2,)."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def rope_table(positions: Tensor, head_dim: int, theta: float) -> Rope:
    """Turns p · ω_i of positions (N,) or (B, N), each for components i and i + Dh/2 of a head."""
    angle = positions[..., None].float() * rope_frequencies(head_dim, theta).to(positions.device)  # (…, N, Dh/2)
    cos, sin = angle.cos(), angle.sin()
    return Rope(torch.cat([cos, cos], dim=-1).unsqueeze(-2), torch.cat([-sin, sin], dim=-1).unsqueeze(-2))


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn the pair (i, i + Dh/2) of every head by its token's angle: x (B, N, H, Dh) → the same shape (Su et al. 2021)."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # the halves change places
    return torch.addcmul(x * rope.cos, swapped, rope.sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(q kᵀ / sqrt(Dh)) v with grouped heads: query head h reads key head h // (H / K).

    Args:
        q: (B, N, H, Dh). k, v: (B, M, K, Dh), H a multiple of K.
        mask: bool, broadcast to (B, 1, N, M), True where a key may be seen.
        causal: token n sees keys 0 … n; needs N = M.

    Returns:
        (B, N, H, Dh).

    Source: Ainslie et al. 2023 (GQA).
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H or K, N or M, Dh)
    heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return heads.transpose(1, 2)


class NoPast:
    """What the network asks of a memory, answered by one that remembers nothing: causal attention over what is given."""

    def begin(self, ids: Tensor) -> Tensor:
        """Positions of new tokens ids (B, N): (N,). Called once, before all layers."""
        return torch.arange(ids.shape[1], device=ids.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """New q (B, N, H, Dh) over all keys so far: here the new k and v (B, N, K, Dh). Called once a layer."""
        return attend(q, k, v, causal=True)

    def end(self) -> None:
        """From now on the new tokens are past. Called once, after all layers."""
        return None  # nothing is kept


class Attention(nn.Module):
    """Causal attention with grouped heads; q and k are normalised per head, then turned: (B, N, D) → (B, N, D)."""

    def __init__(self, c: Qwen3Config, layer: int):
        super().__init__()
        self.layer, keys = layer, c.num_key_value_heads
        self.heads = c.num_attention_heads, keys, keys  # of q, k, v
        self.qkv_proj = nn.Linear(c.hidden_size, sum(self.heads) * c.head_dim, bias=False)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps), RMSNorm(c.head_dim, c.rms_norm_eps)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: Rope, past: NoPast) -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (sum(self.heads), -1)).split(self.heads, dim=2)  # (B, N, H or K, Dh)
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        return self.o_proj(past.attend(self.layer, q, k, v).flatten(2))


class SiluAndMul(nn.Module):
    """silu(a) · b of [a, b], the two halves of the last axis: (…, 2 F) → (…, F)."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return F.silu(a) * b


class MLP(nn.Module):
    """W_down (silu(W_gate x) · W_up x): (B, N, D) → (B, N, D) (Shazeer 2020, SwiGLU)."""

    def __init__(self, c: Qwen3Config):
        super().__init__()
        self.gate_up_proj = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.act = SiluAndMul()
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class Block(nn.Module):
    """x ← x + attention(norm(x)); x ← x + mlp(norm(x)): (B, N, D) → (B, N, D)."""

    def __init__(self, c: Qwen3Config, layer: int):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(c.hidden_size, c.rms_norm_eps), Attention(c, layer)
        self.post_attention_layernorm, self.mlp = RMSNorm(c.hidden_size, c.rms_norm_eps), MLP(c)

    def forward(self, x: Tensor, rope: Rope, past: NoPast) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, past)
        return x + self.mlp(self.post_attention_layernorm(x))


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fuse(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's names to ours: q, k, v become one matrix, gate and up another; the prefix ``model.`` goes."""
    own = {name.removeprefix("model."): weight for name, weight in weights.items()}
    for fused, parts in FUSED.items():
        for first in [name for name in own if parts[0] in name.split(".")]:
            names = [first.replace(parts[0], part) for part in parts]
            if all(name in own for name in names):
                own[first.replace(parts[0], fused)] = torch.cat([own.pop(name) for name in names])
    return own


class Qwen3(nn.Module):
    """Token ids (B, N) → logits (B, N, V), as Hugging Face's ``Qwen3ForCausalLM``.

    Source: Qwen team 2025, Qwen3 Technical Report; transformers ``modeling_qwen3.py``.
    """

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config = c = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, layer) for layer in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor, past: NoPast | None = None, last: bool = False) -> Tensor:
        """Logits of the token after each of ids (B, N).

        Args:
            past: a memory of earlier tokens; None is `NoPast`, so that every call begins a text.
            last: only the last token's logits, (B, 1, V).

        Raises:
            ValueError: ids that are not whole numbers (B, N), N ≥ 1, or more tokens than the model has places.
        """
        if ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
            raise ValueError(f"ids are {ids.dtype} {tuple(ids.shape)}; expected whole numbers (B, N), N ≥ 1")
        if ids.shape[1] > self.config.max_position_embeddings:
            raise ValueError(f"{ids.shape[1]} tokens are too many; try {self.config.max_position_embeddings}")
        past = past or NoPast()
        rope = rope_table(past.begin(ids), self.config.head_dim, self.config.rope_theta)
        x = self.embed_tokens(ids)  # (B, N, D)
        for layer in self.layers:
            x = layer(x, rope, past)
        past.end()
        return self.lm_head(self.norm(x[:, -1:] if last else x))

    @classmethod
    def from_pretrained(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> Self:
        """The model in a Hugging Face folder: ``config.json`` and safetensors, in one file or in several.

        Raises:
            ValueError: a file or weight that is missing, left over or misshapen; see `read_config`.
        """
        return load_weights(cls, Path(folder), dtype)


def load_weights(kind: type[Qwen3], folder: Path, dtype: torch.dtype) -> Qwen3:
    """See `Qwen3.from_pretrained`."""
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not files:
        raise ValueError(f"{folder} holds no config.json with *.safetensors; try the folder of a Qwen3 checkpoint")
    with torch.device("meta"):  # no memory yet, and no random numbers
        model = kind(read_config(json.loads((folder / "config.json").read_text(encoding="utf-8"))))
    weights = fuse({name: weight.to(dtype) for file in files for name, weight in load_file(file).items()})
    if model.config.tie_word_embeddings and "embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    wanted, found = ({name: w.shape for name, w in some.items()} for some in (model.state_dict(), weights))
    if wrong := sorted(name for name, _ in wanted.items() ^ found.items()):
        raise ValueError(f"{folder}: weights are missing, left over or misshapen, such as {', '.join(wrong[:3])}")
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)

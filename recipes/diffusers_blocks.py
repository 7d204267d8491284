"""The shipped DiT with its blocks taken from diffusers, on the same weights: the other runner in `recipes.bench`.

`JointBlock` is diffusers' `JointTransformerBlock` (SD3.5), `ParallelBlock` its `FluxSingleTransformerBlock`; embeddings and
final layer stay ours. Adapters only turn one call signature into the other.
"""

import copy

from diffusers.models.attention import JointTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from torch import Tensor, nn

from diffusion_engine.attention import Heads
from diffusion_engine.dit import DiT


def assemble(dit: DiT) -> DiT:
    """A copy of the DiT whose blocks are diffusers'. They know no padding mask: give prompts of one length."""
    width, heads = dit.config.width, dit.config.heads
    twin = copy.deepcopy(dit)
    twin.joint_blocks = nn.ModuleList(Joint(block, width, heads) for block in dit.joint_blocks)
    twin.parallel_blocks = nn.ModuleList(Parallel(block, width, heads) for block in dit.parallel_blocks)
    return twin.eval().requires_grad_(False)


def copy_linear(target: nn.Linear, source: nn.Linear) -> None:
    target.load_state_dict(source.state_dict())


def copy_qkv(targets: list[nn.Linear], stream: Heads) -> None:
    """Our one fused projection into three."""
    weights, biases = stream.qkv.weight.chunk(3), stream.qkv.bias.chunk(3)
    for target, weight, bias in zip(targets, weights, biases):
        target.load_state_dict({"weight": weight, "bias": bias})


class Joint(nn.Module):
    """`JointTransformerBlock` with our `JointBlock`'s weights and call."""

    def __init__(self, ours, width: int, heads: int):
        super().__init__()
        self.block = block = JointTransformerBlock(width, heads, width // heads, qk_norm="rms_norm")
        a = block.attn
        copy_linear(block.norm1.linear, ours.image_modulation.linear)
        copy_linear(block.norm1_context.linear, ours.text_modulation.linear)
        copy_qkv([a.to_q, a.to_k, a.to_v], ours.attn.image)
        copy_qkv([a.add_q_proj, a.add_k_proj, a.add_v_proj], ours.attn.text)
        for norm, source in (
            (a.norm_q, ours.attn.image.norm_q),
            (a.norm_k, ours.attn.image.norm_k),
            (a.norm_added_q, ours.attn.text.norm_q),
            (a.norm_added_k, ours.attn.text.norm_k),
        ):
            norm.load_state_dict(source.state_dict())
        copy_linear(a.to_out[0], ours.attn.image.out)
        copy_linear(a.to_add_out, ours.attn.text.out)
        for ff, source in ((block.ff, ours.image_ff), (block.ff_context, ours.text_ff)):
            copy_linear(ff.net[0].proj, source[0])
            copy_linear(ff.net[2], source[2])

    def forward(self, x: Tensor, text: Tensor, cond: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        text, x = self.block(hidden_states=x, encoder_hidden_states=text, temb=cond)
        return x, text


class Parallel(nn.Module):
    """`FluxSingleTransformerBlock` with our `ParallelBlock`'s weights and call; without RoPE the order of tokens is free."""

    def __init__(self, ours, width: int, heads: int):
        super().__init__()
        self.block = block = FluxSingleTransformerBlock(width, heads, width // heads)
        copy_linear(block.norm.linear, ours.modulation.linear)
        copy_qkv([block.attn.to_q, block.attn.to_k, block.attn.to_v], ours.stream)
        block.attn.norm_q.load_state_dict(ours.stream.norm_q.state_dict())
        block.attn.norm_k.load_state_dict(ours.stream.norm_k.state_dict())
        copy_linear(block.proj_mlp, ours.ff_in)
        copy_linear(block.proj_out, ours.out)

    def forward(self, x: Tensor, cond: Tensor, *_, **__) -> Tensor:
        return self.block(hidden_states=x, encoder_hidden_states=x[:, :0], temb=cond)[1]

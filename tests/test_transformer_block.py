"""Chapter 05 under harder conditions: parity with four families, dtypes, bad input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from diffusion_engine.attention import CrossAttention, JointAttention, Rope
from diffusion_engine.transformer_block import (
    DiTBlock,
    FeedForward,
    JointBlock,
    Mod,
    Modulation,
    ModulationTable,
    ParallelBlock,
    modulate,
    normalize,
    split_mods,
)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def opened(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every weight random, so that nothing hides behind a closed gate; no gradients."""
    generator = rng(seed)
    for p in module.parameters():
        nn.init.normal_(p, std=0.15, generator=generator)
    return module.eval().requires_grad_(False)


def poured(theirs: nn.Module, names: dict[str, str]) -> dict:
    state = theirs.state_dict()
    return {
        f"{ours}.{kind}": torch.cat([state[f"{name}.{kind}"] for name in group.split()])
        for ours, group in names.items()
        for kind in ("weight", "bias")
        if f"{group.split()[0]}.{kind}" in state
    }


def angles(tokens: int, pairs: int = 8) -> torch.Tensor:
    return torch.randn(tokens, pairs, generator=rng(9))


SD3 = {
    "image_modulation.linear": "norm1.linear",
    "text_modulation.linear": "norm1_context.linear",
    "attn.image.qkv": "attn.to_q attn.to_k attn.to_v",
    "attn.image.out": "attn.to_out.0",
    "attn.text.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
    "attn.text.out": "attn.to_add_out",
    "image_ff.0": "ff.net.0.proj",
    "image_ff.2": "ff.net.2",
    "text_ff.0": "ff_context.net.0.proj",
    "text_ff.2": "ff_context.net.2",
    **{f"attn.image.norm_{a}": f"attn.norm_{a}" for a in "qk"},
    **{f"attn.text.norm_{a}": f"attn.norm_added_{a}" for a in "qk"},
}
CROSS = {
    "attn.stream.qkv": "attn1.to_q attn1.to_k attn1.to_v",
    "attn.stream.out": "attn1.to_out.0",
    "cross.q": "attn2.to_q",
    "cross.kv": "attn2.to_k attn2.to_v",
    "cross.out": "attn2.to_out.0",
    "cross_norm": "norm2",
    **{f"attn.stream.norm_{a}": f"attn1.norm_{a}" for a in "qk"},
    **{f"cross.norm_{a}": f"attn2.norm_{a}" for a in "qk"},
}


@pytest.fixture
def inputs():
    return (
        torch.randn(3, 10, 64, generator=rng(1)),
        torch.randn(3, 7, 64, generator=rng(2)),
        torch.randn(3, 64, generator=rng(3)),
    )


# ---- parity ----


@pytest.mark.parametrize("norm", [None, "rms_norm"])
@pytest.mark.parametrize("last", [False, True])
def test_joint_block_is_sd3s(inputs, norm, last):
    from diffusers.models.attention import JointTransformerBlock

    x, text, cond = inputs
    theirs = opened(JointTransformerBlock(64, 4, 16, qk_norm=norm, context_pre_only=last))
    state = poured(theirs, SD3)
    if last:  # (scale, shift) there, (shift, scale) here
        state = {k: v.roll(64, 0) if k.startswith("text_modulation") else v for k, v in state.items()}
    ours = JointBlock(64, 4, qk_norm=norm is not None, last=last).requires_grad_(False)
    ours.load_state_dict(state)
    (text_out, image_out), (image, words) = theirs(x, text, cond), ours(x, text, cond)
    assert torch.allclose(image, image_out, atol=1e-5, rtol=1e-5)
    assert words is None and text_out is None if last else torch.allclose(words, text_out, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("text_first", [False, True])
def test_joint_block_is_fluxs_double_block(inputs, text_first):
    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    x, text, cond = inputs
    theirs = opened(FluxTransformerBlock(64, 4, 16))
    ours = JointBlock(64, 4, text_first=text_first).requires_grad_(False)
    ours.load_state_dict(poured(theirs, SD3))
    turn = angles(17)
    full = [f(turn).repeat_interleave(2, dim=-1) for f in (torch.cos, torch.sin)]
    their_text, their_image = theirs(x, text, cond, image_rotary_emb=full)
    turn = turn if text_first else torch.cat([turn[7:], turn[:7]])
    image, words = ours(x, text, cond, rope=Rope(turn.cos(), turn.sin()))
    assert torch.allclose(image, their_image, atol=1e-5, rtol=1e-5)
    assert torch.allclose(words, their_text, atol=1e-5, rtol=1e-5)


def test_parallel_block_is_fluxs_single_block(inputs):
    from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock

    x, text, cond = inputs
    theirs, ours = opened(FluxSingleTransformerBlock(64, 4, 16)), ParallelBlock(64, 4).requires_grad_(False)
    names = {"modulation.linear": "norm.linear", "stream.qkv": "attn.to_q attn.to_k attn.to_v", "ff_in": "proj_mlp"}
    names |= {"stream.norm_q": "attn.norm_q", "stream.norm_k": "attn.norm_k", "out": "proj_out"}
    ours.load_state_dict(poured(theirs, names))
    turn = angles(17)
    full = [f(turn).repeat_interleave(2, dim=-1) for f in (torch.cos, torch.sin)]
    expected = torch.cat(theirs(x, text, cond, image_rotary_emb=full), dim=1)
    out = ours(torch.cat([text, x], dim=1), cond, rope=Rope(turn.cos(), turn.sin()))
    assert torch.allclose(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("cross_norm", [False, True])
def test_dit_block_with_table_is_wans(inputs, cross_norm, per_token):
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    x, text, _ = inputs
    theirs = opened(WanTransformerBlock(64, 96, 4, cross_attn_norm=cross_norm))
    cross, ff = CrossAttention(64, 4, qk_norm="rms_across"), FeedForward(64, hidden=96)
    ours = DiTBlock(64, 4, "rms_across", table=True, cross=cross, cross_norm=cross_norm, ff=ff).requires_grad_(False)
    state = poured(theirs, CROSS | {"ff.0": "ffn.net.0.proj", "ff.2": "ffn.net.2"})
    ours.load_state_dict(state | {"modulation.table": theirs.scale_shift_table[0]})
    shared = torch.randn(3, 10, 6, 64, generator=rng(4)) if per_token else torch.randn(3, 6, 64, generator=rng(4))
    expected = theirs(x, text, shared, None)
    assert torch.allclose(ours(x, shared.flatten(-2), text=text), expected, atol=1e-5, rtol=1e-5)


def test_dit_block_with_rms_norm_is_ltxs(inputs):
    from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock

    x, text, _ = inputs
    theirs = opened(LTXVideoTransformerBlock(64, 4, 16, 64))
    cross = CrossAttention(64, 4, qk_norm="rms_across", eps=1e-5)
    ours = DiTBlock(64, 4, "rms_across", norm="rms", table=True, cross=cross, eps=1e-5).requires_grad_(False)
    state = poured(theirs, CROSS | {"ff.0": "ff.net.0.proj", "ff.2": "ff.net.2"})
    ours.load_state_dict(state | {"modulation.table": theirs.scale_shift_table})
    shared, mask = torch.randn(3, 1, 384, generator=rng(4)), torch.arange(7) < torch.tensor([[7], [4], [2]])
    bias = torch.zeros(3, 1, 7).masked_fill(~mask[:, None], -10000.0)
    expected = theirs(x, text, shared, None, bias)
    assert torch.allclose(ours(x, shared, text=text, text_mask=mask), expected, atol=1e-4, rtol=1e-4)


# ---- properties ----


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 4),
    tokens=st.integers(1, 9),
    loudness=st.sampled_from([0.0, 1e-3, 1.0, 1e4]),
    kind=st.sampled_from(["dit", "joint", "last", "parallel"]),
    seed=st.integers(0, 2**31),
)
def test_every_block_is_born_as_the_identity(batch, tokens, loudness, kind, seed):
    generator = rng(seed)
    x, text = (torch.randn(batch, n, 16, generator=generator) * 10 for n in (tokens, 3))
    cond = loudness * torch.randn(batch, 16, generator=generator)
    if kind in ("joint", "last"):
        out, words = JointBlock(16, 2, last=kind == "last")(x, text, cond)
        assert words is None if kind == "last" else torch.equal(words, text)
    else:
        out = (DiTBlock if kind == "dit" else ParallelBlock)(16, 2)(x, cond)
    assert torch.equal(out, x)


@settings(max_examples=25, deadline=None)
@given(shift=st.floats(-5, 5), scale=st.floats(-5, 5), factor=st.floats(0.5, 100), offset=st.floats(-50, 50))
def test_modulate_sets_mean_and_deviation_whatever_came_in(shift, scale, factor, offset):
    x = factor * torch.randn(2, 3, 128, generator=rng(0)) + offset
    out = modulate(x, Mod(torch.tensor(shift), torch.tensor(scale)))
    assert torch.allclose(out.mean(-1), torch.full((2, 3), shift), atol=2e-3)
    assert torch.allclose(out.std(-1, correction=0), torch.full((2, 3), abs(1 + scale)), atol=2e-3)


def test_norm_is_fp32_inside_half_precision():
    x = 300 * torch.randn(2, 4, 512, generator=rng(0))  # squares overflow fp16
    for kind in ("layer", "rms"):
        half = normalize(x.half(), kind)
        assert half.dtype == torch.float16 and half.isfinite().all()
        assert torch.allclose(half.float(), normalize(x.half().float(), kind), atol=2e-3)


@pytest.mark.parametrize("build", [lambda: DiTBlock(32, 4), lambda: ParallelBlock(32, 4)])
def test_chunks_masks_and_batches_change_nothing(build):
    block, x, cond = opened(build()), torch.randn(4, 9, 32, generator=rng(1)), torch.randn(4, 32, generator=rng(2))
    mask = (torch.arange(9) < torch.tensor([[9], [7], [4], [1]]))[:, None, None, :]
    full = block(x, cond, mask)
    assert torch.allclose(block(x, cond, mask, chunk=4), full, atol=1e-5)
    for i in range(4):
        keep = int(mask[i].sum())
        alone = block(x[i : i + 1, :keep], cond[i : i + 1])
        assert torch.allclose(full[i : i + 1, :keep], alone, atol=1e-5)


def test_text_first_and_image_first_agree_without_rope(inputs):
    x, text, cond = inputs
    a, b = JointBlock(64, 4), JointBlock(64, 4, text_first=True)
    b.load_state_dict(opened(a).state_dict())
    assert isinstance(b.attn, JointAttention)
    for one, other in zip(a(x, text, cond), b(x, text, cond)):
        assert torch.allclose(one, other, atol=1e-5)


def test_last_block_carries_no_idle_weights():
    last, full = JointBlock(64, 4, last=True), JointBlock(64, 4)
    assert last.text_modulation.linear.out_features == 2 * 64
    assert sum(p.numel() for p in full.parameters()) - sum(p.numel() for p in last.parameters()) == (
        4 * (64 * 64 + 64) + (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64)
    )


def test_per_token_condition_equals_per_sample_where_all_tokens_agree(inputs):
    x, _, cond = inputs
    block = opened(DiTBlock(64, 4))
    assert torch.allclose(block(x, cond[:, None].expand(-1, 10, -1)), block(x, cond), atol=1e-5)


def test_split_mods_keeps_the_order_shift_scale_gate():
    first, second = split_mods(torch.arange(6.0)[None], 2)
    assert [k.item() for k in (*first, *second)] == [0, 1, 2, 3, 4, 5]
    (only,) = split_mods(torch.arange(2.0)[None], 1, gate=False)
    assert (only.shift.item(), only.scale.item(), only.gate) == (0, 1, None)


def test_keys_of_shipped_blocks_are_fixed():
    joint, parallel = set(JointBlock(16, 2).state_dict()), set(ParallelBlock(16, 2).state_dict())
    assert {"image_modulation.linear.weight", "attn.text.norm_q.weight", "text_ff.2.bias"} <= joint and len(joint) == 24
    assert parallel == {
        *(f"{n}.{k}" for n in ("modulation.linear", "stream.qkv", "ff_in", "out") for k in ("weight", "bias")),
        "stream.norm_q.weight",
        "stream.norm_k.weight",
    }


# ---- bad input ----


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Modulation(8, 1)(torch.zeros(2, 7)), r"\(2, 7\); expected \(B, 8\)"),
        (lambda: Modulation(8, 1)(torch.zeros(8)), r"\(8,\); expected \(B, 8\)"),
        (lambda: ModulationTable(8, 2)(torch.zeros(2, 8)), r"\(2, 8\); expected \(B, 6 · 8\)"),
        (
            lambda: DiTBlock(16, 2, norm="group")(torch.zeros(1, 2, 16), torch.zeros(1, 16)),
            "'group' is unknown; try 'layer'",
        ),
        (lambda: DiTBlock(16, 3), "16 is not a multiple of heads 3"),
        (lambda: JointBlock(16, 2, qk_norm="batch"), "'batch' is unknown"),
    ],
)
def test_bad_input_is_refused_in_words(call, words):
    with pytest.raises(ValueError, match=words):
        call()

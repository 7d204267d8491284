"""Chapter 04 pressed harder: exactness over random shapes, masks, precision, bad input, the real families' attention with
copied weights, and faults that keep every shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from diffusion_engine.attention import (
    CrossAttention,
    Heads,
    JointAttention,
    RMSNorm,
    Rope,
    SelfAttention,
    apply_rope,
    attention,
    axial_rope,
    grid_positions,
    head_width,
    joint_mask,
    key_mask,
    pad_rope,
    qk_norm_layer,
    score_bytes,
)

quick = settings(max_examples=40, deadline=None)
sizes = st.integers(1, 9)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def slowly(q, k, v, mask=None, scale=None):
    """Attention one query at a time, in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    for b, h, n in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        seen = torch.ones(k.shape[-2], dtype=torch.bool)
        if mask is not None:
            seen = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])[b, h, n]
        if seen.any():
            out[b, h, n] = torch.softmax(scale * k[b, h, seen] @ q[b, h, n], dim=0) @ v[b, h, seen]
    return out.float()


# --- attention -------------------------------------------------------------------------------------------------------


@quick
@given(
    seed=st.integers(0, 2**16),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), sizes, sizes, st.integers(1, 8)),
    chunk=st.none() | st.integers(1, 12),
    masked=st.sampled_from(["none", "keys", "pairs"]),
    scale=st.none() | st.floats(0.1, 2),
)
def test_every_way_gives_the_same_numbers(seed, shape, chunk, masked, scale):
    b, h, n, m, d = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(b, h, size, d, generator=generator) for size in (n, m, m))
    mask = torch.rand(b, 1, 1 if masked == "keys" else n, m, generator=generator) > 0.4
    mask = None if masked == "none" else mask  # a row may hide every key
    assert torch.allclose(attention(q, k, v, mask, chunk, scale), slowly(q, k, v, mask, scale), atol=2e-5)


@quick
@given(seed=st.integers(0, 2**16), n=st.integers(2, 9))
def test_tokens_are_a_set(seed, n):
    generator = torch.Generator().manual_seed(seed)
    x, order = torch.randn(1, n, 8, generator=generator), torch.randperm(n, generator=generator)
    layer = SelfAttention(8, 2)
    assert torch.allclose(layer(x[:, order]), layer(x)[:, order], atol=1e-5)


def test_a_query_that_may_see_nothing_gets_zeros_and_no_nan():
    q, k, v = torch.randn(3, 2, 2, 5, 4).unbind(0)
    mask = key_mask(torch.tensor([[True] * 5, [False] * 5]))
    for chunk in (None, 2):
        out = attention(q, k, v, mask, chunk)
        assert out.isfinite().all() and not out[1].any()


def test_huge_scores_do_not_overflow():
    q, k, v = (1e4 * torch.randn(1, 1, 6, 4) for _ in range(3))
    assert attention(q, k, v).isfinite().all()


def test_chunks_have_the_same_gradient():
    q, k, v = torch.randn(3, 1, 2, 7, 4).unbind(0)
    grads = []
    for chunk in (None, 3):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        attention(*leaves, chunk=chunk).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for fused, chunked in zip(*grads):
        assert torch.allclose(fused, chunked, atol=1e-5)


@pytest.mark.parametrize(("keys", "values", "width"), [(5, 4, 8), (1, 5, 8), (4, 4, 6)])
def test_keys_values_and_queries_that_do_not_fit_are_refused(keys, values, width):
    q, k, v = (torch.zeros(1, 2, *size) for size in ((3, 8), (keys, width), (values, width)))
    with pytest.raises(ValueError, match="a value for each key, and queries as wide as keys"):
        attention(q, k, v)


@pytest.mark.parametrize("chunk", [0, -3, 1.5, "64"])
def test_bad_chunks_are_refused(chunk):
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match="no positive number of queries; try 64 or None"):
        attention(x, x, x, chunk=chunk)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 4, dtype=torch.bool),  # (B, M) would be read as (N, M) when B = N
        torch.ones(2, 1, 1, 4),  # 1.0 and 0.0 would be added to the scores
        torch.ones(2, 1, 1, 4, dtype=torch.int64),
    ],
)
def test_masks_that_would_hide_nothing_are_refused(mask):
    x = torch.zeros(2, 1, 2, 4)
    keys = torch.zeros(2, 1, 4, 4)
    with pytest.raises(ValueError, match=r"expected torch.bool \(B, 1, 1, M\)"):
        attention(x, keys, keys, mask)


@pytest.mark.parametrize("real", [torch.ones(2, 4), torch.ones(4, dtype=torch.bool), torch.ones(2, 4, 1).bool()])
def test_token_masks_are_bool_and_two_dimensional(real):
    with pytest.raises(ValueError, match=r"expected torch.bool \(B, M\)"):
        key_mask(real)


def test_joint_mask_hides_text_only_on_either_side():
    real = torch.tensor([[True, False, False]])
    assert joint_mask(real, 2).tolist() == [[[[True, True, True, False, False]]]]
    assert joint_mask(real, 2, text_first=True).tolist() == [[[[True, False, False, True, True]]]]
    assert joint_mask(None, 2) is None


def test_score_bytes_are_what_naive_scores_take():
    q, k = torch.randn(2, 3, 5, 4).bfloat16(), torch.randn(2, 3, 7, 4).bfloat16()
    assert (q @ k.mT).nbytes == score_bytes(2, 3, 5, 7)


# --- QK-norm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rms", "rms_across", "layer"])
def test_norms_survive_half_precision(kind):
    x = torch.full((1, 2, 3, 64), 300.0)  # 300² is over fp16's largest number
    x[..., ::2] *= -1
    for dtype in (torch.float16, torch.bfloat16):
        out = qk_norm_layer(kind, 2, 64).to(dtype)(x.to(dtype))
        assert out.dtype == dtype
        assert torch.allclose(out.float(), x / 300, atol=1e-2)


def test_norm_of_nothing_is_nothing():
    for kind in ("rms", "rms_across", "layer"):
        assert not qk_norm_layer(kind, 2, 4)(torch.zeros(1, 2, 3, 4)).any()


def test_kinds_have_aliases():
    x = torch.randn(1, 2, 3, 4)
    assert torch.equal(qk_norm_layer(True, 2, 4)(x), qk_norm_layer("rms", 2, 4)(x))
    assert qk_norm_layer(None, 2, 4)(x) is x and qk_norm_layer(False, 2, 4)(x) is x
    with pytest.raises(ValueError, match="'l2' is unknown; try"):
        SelfAttention(8, 2, qk_norm="l2")


def test_across_heads_weighs_head_by_head():
    norm = qk_norm_layer("rms_across", 2, 3)
    nn.init.normal_(norm.weight)
    x = torch.randn(1, 2, 4, 3)
    tokens = x.transpose(1, 2).reshape(1, 4, 6)
    theirs = nn.RMSNorm(6, eps=1e-6)
    theirs.load_state_dict(norm.state_dict())
    assert torch.allclose(norm(x).transpose(1, 2).reshape(1, 4, 6), theirs(tokens), atol=1e-6)


# --- RoPE ------------------------------------------------------------------------------------------------------------

places = st.lists(st.integers(-20, 60), min_size=2, max_size=2)


@quick
@given(a=places, b=places, shift=places, halves=st.booleans(), theta=st.sampled_from([256.0, 1e4]))
def test_only_the_offset_counts(a, b, shift, halves, theta):
    q, k = torch.randn(2, 1, 1, 1, 12).unbind(0)
    scores = []
    for move in (torch.zeros(2), torch.tensor(shift)):
        rows = [torch.tensor([place]) + move for place in (a, b)]
        turned = [apply_rope(x, axial_rope(row, (4, 8), theta, halves)) for x, row in zip((q, k), rows)]
        scores.append((turned[0] * turned[1]).sum())
    assert torch.allclose(*scores, atol=1e-4)


def test_axes_turn_their_own_components():
    x, still = torch.randn(1, 1, 1, 12), torch.zeros(1, 3)
    for axis, (start, stop) in enumerate([(0, 2), (2, 6), (6, 12)]):
        moved = still.clone()
        moved[0, axis] = 1.5
        changed = apply_rope(x, axial_rope(moved, (2, 4, 6)))[0, 0, 0] != x[0, 0, 0]
        assert changed[start:stop].all() and not changed[:start].any() and not changed[stop:].any()


def test_positions_run_row_by_row():
    assert grid_positions(2, 3).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert grid_positions(3).tolist() == [[0], [1], [2]]
    assert grid_positions(2, 2, 2)[5].tolist() == [1, 0, 1]


def test_far_positions_keep_their_digits():
    rope = axial_rope(torch.tensor([[100_000]]), (2,))
    assert abs(rope.cos.item() - torch.tensor(100_000.0, dtype=torch.float64).cos().item()) < 1e-6
    assert rope.cos.dtype == torch.float32


def test_turns_keep_the_dtype_and_the_length_in_half_precision():
    x = torch.randn(1, 2, 6, 8).bfloat16()
    turned = apply_rope(x, axial_rope(grid_positions(2, 3), (4, 4)))
    assert turned.dtype == torch.bfloat16
    assert torch.allclose(turned.float().norm(dim=-1), x.float().norm(dim=-1), rtol=2e-2)


def test_padding_keeps_the_kind_of_pairs():
    rope = pad_rope(axial_rope(grid_positions(2), (4,), halves=True), before=1, after=2)
    assert rope.halves and rope.cos.shape == (5, 2)
    assert rope.cos[[0, 3, 4]].eq(1).all() and rope.sin[[0, 3, 4]].eq(0).all()


@pytest.mark.parametrize(
    ("positions", "axes_dim", "message"),
    [
        (torch.zeros(4, 2), (4, 4, 4), r"wants \(N, 3\)"),
        (torch.zeros(4), (4,), r"wants \(N, 1\)"),
        (torch.zeros(4, 2), (4, 5), "has 5, no positive even number; try 4 or 6"),
        (torch.zeros(4, 1), (0,), "has 0, no positive even number; try 2 or 4"),
    ],
)
def test_bad_axes_are_refused(positions, axes_dim, message):
    with pytest.raises(ValueError, match=message):
        axial_rope(positions, axes_dim)


@pytest.mark.parametrize("shape", [(1, 1, 5, 8), (1, 1, 4, 6), (1, 1, 1, 8)])
def test_turns_for_other_tokens_are_refused(shape):
    with pytest.raises(ValueError, match="rope turns 4 of 8; pad_rope"):
        apply_rope(torch.zeros(shape), axial_rope(torch.zeros(4, 1), (8,)))


# --- modules ---------------------------------------------------------------------------------------------------------


def test_weights_keep_their_names():
    stream = {f"{part}.{kind}" for part in ("qkv", "out") for kind in ("weight", "bias")}
    stream |= {"norm_q.weight", "norm_k.weight"}
    assert set(SelfAttention(8, 2).state_dict()) == {f"stream.{name}" for name in stream}
    both = {f"{side}.{name}" for side in ("image", "text") for name in stream}
    assert set(JointAttention(8, 2).state_dict()) == both
    assert set(JointAttention(8, 2, text_out=False).state_dict()) == both - {"text.out.weight", "text.out.bias"}


def test_sizes_that_families_need():
    wide = SelfAttention(12, 2, head_dim=10, bias=False)  # Dh ≠ D / H, as in LTX-like and Qwen-like models
    assert wide.stream.qkv.weight.shape == (60, 12) and wide.stream.qkv.bias is None
    assert wide(torch.randn(1, 3, 12)).shape == (1, 3, 12)
    cross = CrossAttention(12, 2, text_width=7, head_dim=10)
    assert cross(torch.randn(1, 3, 12), torch.randn(1, 5, 7)).shape == (1, 3, 12)
    assert Heads(12, 2, out=False, head_dim=10).merge(torch.randn(1, 2, 3, 10)).shape == (1, 3, 20)


@pytest.mark.parametrize(("width", "heads", "near"), [(100, 8, 10), (64, 0, 1), (64, -4, 1), (7, 3, 1), (64, 65, 64)])
def test_widths_that_heads_do_not_divide(width, heads, near):
    for make in (head_width, SelfAttention, JointAttention, CrossAttention):
        with pytest.raises(ValueError, match=f"width {width} is not a multiple of heads {heads}; try {near} heads"):
            make(width, heads)


def test_text_that_reads_nothing_returns_none():
    image, text = JointAttention(8, 2, text_out=False)(torch.randn(1, 4, 8), torch.randn(1, 3, 8))
    assert image.shape == (1, 4, 8) and text is None


def test_text_keys_and_values_can_be_kept_between_steps():
    cross, text, real = CrossAttention(8, 2), torch.randn(2, 5, 8), torch.arange(5) < torch.tensor([[5], [2]])
    kept = cross.keys_values(text)
    for _ in range(3):
        x = torch.randn(2, 4, 8)
        assert torch.equal(cross.attend(x, *kept, real), cross(x, text, real))


@pytest.mark.parametrize("text_first", [False, True])
@pytest.mark.parametrize("qk_norm", [None, "rms", "rms_across", "layer"])
def test_joint_attention_is_self_attention_over_both(qk_norm, text_first):
    joint, alone = JointAttention(16, 2, qk_norm, text_first=text_first), SelfAttention(16, 2, qk_norm)
    for stream in (joint.image, joint.text):
        stream.load_state_dict(alone.stream.state_dict())
    x, text, real = torch.randn(2, 6, 16), torch.randn(2, 5, 16), torch.arange(5) < torch.tensor([[5], [2]])
    rope = pad_rope(axial_rope(grid_positions(2, 3), (4, 4)), **{"before" if text_first else "after": 5})
    parts = [text, x] if text_first else [x, text]
    whole = alone(torch.cat(parts, 1), joint_mask(real, 6, text_first), rope)
    ours = joint(x, text, real, rope, chunk=4)
    assert torch.allclose(torch.cat(ours[::-1] if text_first else ours, 1), whole, atol=1e-6)


def test_the_same_call_twice_is_bit_identical_and_changes_nothing():
    joint, x, text = JointAttention(16, 2), torch.randn(2, 6, 16), torch.randn(2, 5, 16)
    x0, text0 = x.clone(), text.clone()
    first, second = joint(x, text), joint(x, text)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert torch.equal(x, x0) and torch.equal(text, text0)


# --- the real families, weights copied -------------------------------------------------------------------------------

D, H, DH, N, M = 48, 4, 12, 6, 5
AXES = (4, 4, 4)


def shake(module):
    """Random norm weights: at their initial ones a forgotten weight would not show."""
    for name, weight in module.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight, mean=1.0, std=0.3)
    return module.eval()


def fill(stream, projections, out=None, norms=(None, None)):
    weight, bias = (torch.cat([getattr(p, part) for p in projections]) for part in ("weight", "bias"))
    stream.qkv.load_state_dict({"weight": weight, "bias": bias})
    if out is not None:
        stream.out.load_state_dict(out.state_dict())
    for ours, theirs in zip((stream.norm_q, stream.norm_k), norms):
        ours.load_state_dict({} if theirs is None else theirs.state_dict())


def fill_cross(ours, theirs):
    ours.q.load_state_dict(theirs.to_q.state_dict())
    for part in ("weight", "bias"):
        getattr(ours.kv, part).data = torch.cat([getattr(p, part).data for p in (theirs.to_k, theirs.to_v)])
    ours.out.load_state_dict(theirs.to_out[0].state_dict())
    for mine, other in ((ours.norm_q, theirs.norm_q), (ours.norm_k, theirs.norm_k)):
        mine.load_state_dict(other.state_dict())


def interleaved(rope):
    """Our turns as diffusers' (N, Dh) tables."""
    return rope.cos.repeat_interleave(2, -1), rope.sin.repeat_interleave(2, -1)


def streams():
    return torch.randn(2, N, D), torch.randn(2, M, D)


def own(a):
    return (a.to_q, a.to_k, a.to_v), a.to_out[0], (a.norm_q, a.norm_k)


def added(a):
    return (a.add_q_proj, a.add_k_proj, a.add_v_proj), a.to_add_out, (a.norm_added_q, a.norm_added_k)


def test_sd3_last_block_whose_text_is_only_read():
    from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0

    theirs = shake(
        Attention(
            D, heads=H, dim_head=DH, bias=True, added_kv_proj_dim=D, context_pre_only=True, qk_norm="rms_norm",
            eps=1e-6, processor=JointAttnProcessor2_0(),
        )
    )  # fmt: skip
    ours = JointAttention(D, H, text_out=False)
    fill(ours.image, *own(theirs))
    fill(ours.text, added(theirs)[0], None, added(theirs)[2])
    x, text = streams()
    assert torch.allclose(ours(x, text)[0], theirs(x, text)[0], atol=1e-5)


def test_flux_text_first_turns_on_three_axes():
    from diffusers.models.transformers.transformer_flux import FluxAttention, FluxPosEmbed

    theirs = shake(
        FluxAttention(D, heads=H, dim_head=DH, added_kv_proj_dim=D, context_pre_only=False, bias=True, eps=1e-6)
    )
    ours = JointAttention(D, H, text_first=True)
    fill(ours.image, *own(theirs))
    fill(ours.text, *added(theirs))
    x, text = streams()
    table = FluxPosEmbed(10_000, list(AXES))(torch.cat([torch.zeros(M, 3), grid_positions(1, 2, 3)]))
    rope = pad_rope(axial_rope(grid_positions(1, 2, 3), AXES), before=M)
    for mine, other in zip(ours(x, text, rope=rope), theirs(x, text, image_rotary_emb=table)):
        assert torch.allclose(mine, other, atol=1e-5)


def test_hunyuan_image_first_turned_alone_text_masked():
    from diffusers.models.attention_processor import Attention
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0

    theirs = shake(
        Attention(
            D, heads=H, dim_head=DH, bias=True, added_kv_proj_dim=D, added_proj_bias=True, out_dim=D,
            context_pre_only=False, qk_norm="rms_norm", eps=1e-6, processor=HunyuanVideoAttnProcessor2_0(),
        )
    )  # fmt: skip
    ours = JointAttention(D, H)
    fill(ours.image, *own(theirs))
    fill(ours.text, *added(theirs))
    x, text = streams()
    rope, real = axial_rope(grid_positions(1, 2, 3), AXES, theta=256), torch.arange(M) < torch.tensor([[M], [2]])
    other = theirs(x, text, attention_mask=joint_mask(real, N), image_rotary_emb=interleaved(rope))
    mine = ours(x, text, real, pad_rope(rope, after=M))
    assert torch.allclose(mine[0], other[0], atol=1e-5) and torch.allclose(mine[1], other[1], atol=1e-5)


def test_cogvideox_shared_weights_layer_norm_video_turned_alone():
    from diffusers.models.attention_processor import Attention, CogVideoXAttnProcessor2_0

    theirs = shake(
        Attention(
            D, heads=H, dim_head=DH, bias=True, out_bias=True, qk_norm="layer_norm", eps=1e-6,
            processor=CogVideoXAttnProcessor2_0(),
        )
    )  # fmt: skip
    ours = SelfAttention(D, H, qk_norm="layer")
    fill(ours.stream, *own(theirs))
    x, text = streams()
    rope = axial_rope(grid_positions(1, 2, 3), AXES)
    video, words = theirs(x, text, image_rotary_emb=interleaved(rope))
    mine = ours(torch.cat([text, x], 1), rope=pad_rope(rope, before=M))
    assert torch.allclose(mine, torch.cat([words, video], 1), atol=1e-5)


def test_wan_norm_across_heads_self_and_cross():
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    theirs = shake(WanAttention(D, heads=H, dim_head=DH, eps=1e-6, processor=WanAttnProcessor()))
    ours = SelfAttention(D, H, qk_norm="rms_across")
    fill(ours.stream, *own(theirs))
    x, text = streams()
    rope = axial_rope(grid_positions(1, 2, 3), AXES)
    table = [part[None, :, None] for part in interleaved(rope)]  # (1, N, 1, Dh)
    assert torch.allclose(ours(x, rope=rope), theirs(x, rotary_emb=table), atol=1e-5)

    theirs = shake(
        WanAttention(D, heads=H, dim_head=DH, eps=1e-6, cross_attention_dim_head=DH, processor=WanAttnProcessor())
    )
    ours = CrossAttention(D, H, qk_norm="rms_across")
    fill_cross(ours, theirs)
    assert torch.allclose(ours(x, text), theirs(x, text), atol=1e-5)


def test_ltx_turns_of_its_own_in_every_head_and_masked_cross():
    from diffusers.models.transformers.transformer_ltx import LTXAttention, LTXVideoRotaryPosEmbed

    theirs = shake(LTXAttention(D, heads=H, kv_heads=H, dim_head=DH))
    ours = SelfAttention(D, H, qk_norm="rms_across", eps=1e-5)
    fill(ours.stream, *own(theirs))
    x, text = streams()
    table = LTXVideoRotaryPosEmbed(D)(x[:1], 1, 2, 3)  # (1, N, D): the whole width, before heads are split
    rope = Rope(*(part[0, :, ::2].unflatten(-1, (H, -1)).transpose(0, 1) for part in table))  # (H, N, Dh/2)
    assert torch.allclose(ours(x, rope=rope), theirs(x, image_rotary_emb=table), atol=1e-5)

    theirs = shake(LTXAttention(D, heads=H, kv_heads=H, dim_head=DH, cross_attention_dim=20))
    ours = CrossAttention(D, H, text_width=20, qk_norm="rms_across", eps=1e-5)
    fill_cross(ours, theirs)
    real = torch.arange(M) < torch.tensor([[M], [2]])
    text = text[..., :20]
    bias = torch.where(real, 0.0, -10_000.0)[:, None].repeat_interleave(H, 0)  # (B · H, 1, M)
    theirs.prepare_attention_mask = lambda mask, *_: mask
    assert torch.allclose(ours(x, text, real), theirs(x, text, attention_mask=bias), atol=1e-5)


def test_rms_norm_is_the_published_formula():
    norm = RMSNorm(8, eps=1e-2)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 8)
    assert torch.allclose(norm(x), norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt(), atol=1e-6)


@pytest.mark.parametrize("halves", [False, True])
def test_turns_do_not_care_how_the_numbers_lie(halves):
    """Heads as views of wider rows, turned around, or cut from an odd place: the same numbers, the same turn."""
    rope = axial_rope(grid_positions(2, 3), (4, 4), halves=halves)
    x = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    expected = apply_rope(x, rope)
    wide = torch.zeros(2, 3, 6, 9)
    wide[..., 1:] = x
    odd = torch.zeros(2 * 3 * 6 * 8 + 1)[1:].view(2, 3, 6, 8).copy_(x)
    across, tokens = x.mT.contiguous().mT, x.transpose(1, 2).contiguous().transpose(1, 2)
    for same in (wide[..., 1:], odd, across, tokens):
        assert torch.equal(same, x) and torch.allclose(apply_rope(same, rope), expected, atol=1e-6)

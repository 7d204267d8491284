"""Chapter 14 harder: causality of every layer, streams cut anywhere, rotations and patches against slower forms, bad input."""

import itertools
import json
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from diffusion_engine import attention as attention_module
from diffusion_engine.attention import SelfAttention, apply_rope, axial_rope, grid_positions
from diffusion_engine.dit import patchify
from diffusion_engine.model_folder import SHIPPED_CLIP_MODEL
from diffusion_engine.optimizations import StepCache, compiled_blocks
from diffusion_engine.text_conditioning import PromptEmbeds, TextEncoderConfig
from diffusion_engine.video import (
    AcceleratedVideo,
    CausalConv3d,
    CausalResBlock,
    CausalSequential,
    Fold,
    FrameNorm,
    TextRefiner,
    Unfold,
    VideoBlock,
    VideoDiT,
    VideoDiTConfig,
    VideoVAE,
    VideoVAEConfig,
    attend_along,
    hoist_video,
    latent_frames,
    rope_axes,
    video_decoder,
    video_encoder,
    video_flops,
    video_grid,
    video_patchify,
    video_unpatchify,
)

TINY = VideoVAEConfig(latent_channels=3, width=8, narrow=4, depth=1)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def shaken(module: nn.Module, std: float = 0.3) -> nn.Module:
    """Every weight random, in fp64: nothing is zero as it is at init."""
    generator = torch.Generator().manual_seed(1)
    module = module.double().requires_grad_(False)
    for p in module.parameters():
        p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * std)
    return module


@pytest.fixture(scope="module")
def vae() -> VideoVAE:
    vae = shaken(VideoVAE(TINY))
    vae.shift.copy_(torch.linspace(-1, 1, 3))
    vae.scale.copy_(torch.linspace(0.5, 2, 3))
    return vae


@pytest.fixture(scope="module")
def clip() -> torch.Tensor:
    return random(1, 3, 17, 8, 12).clamp(-1, 1)


# Lengths


@given(st.integers(1, 400), st.sampled_from([1, 4, 8]))
def test_a_length_is_accepted_or_its_neighbours_are_named(frames, factor):
    if (frames - 1) % factor == 0:
        assert latent_frames(frames, factor) == 1 + (frames - 1) // factor
        return
    with pytest.raises(ValueError) as error:
        latent_frames(frames, factor)
    near = [int(word) for word in str(error.value).rpartition("try ")[2].split(" or ")]
    assert near[0] < frames < near[1] and near[1] - near[0] == factor
    assert all((n - 1) % factor == 0 for n in near)


@pytest.mark.parametrize("frames", [0, -3])
def test_no_frames(frames):
    with pytest.raises(ValueError, match=r"are not 4k \+ 1; try 1$"):
        latent_frames(frames)


@pytest.mark.parametrize(("frames", "near"), [(2, "1 or 5"), (4, "1 or 5"), (16, "13 or 17"), (18, "17 or 21")])
def test_the_vae_refuses_other_lengths(vae, frames, near):
    with pytest.raises(ValueError, match=f"{frames} frames are not 4k \\+ 1; try {near}"):
        vae.encode(torch.zeros(1, 3, frames, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 17, 8, 8), r"expected \(B, 3, T, H, W\)"),
        ((1, 4, 5, 8, 8), r"expected \(B, 3, T, H, W\)"),
        ((1, 3, 5, 6, 8), "height 6 is not a positive multiple of 4; try 4 or 8"),
        ((1, 3, 5, 8, 10), "width 10 is not a positive multiple of 4; try 8 or 12"),
    ],
)
def test_clips_of_other_shapes(vae, shape, message):
    with pytest.raises(ValueError, match=message):
        vae.encode(torch.zeros(shape, dtype=torch.float64))


def test_latents_of_other_shapes(vae):
    for shape in ((1, 3, 8, 8), (1, 4, 2, 2, 2)):
        with pytest.raises(ValueError, match=r"expected \(B, 3, F, h, w\)"):
            vae.decode(torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match="chunk 0 is not a positive number"):
        vae.decode(torch.zeros(1, 3, 2, 2, 2, dtype=torch.float64), chunk=0)
    with pytest.raises(ValueError, match="factor 3 is not a positive even number; try 2"):
        VideoVAEConfig(factor=3)


# Causality


@pytest.mark.parametrize("time", [1, 2, 3, 5])
def test_a_causal_layer_hears_exactly_its_kernel(time):
    layer, x = shaken(CausalConv3d(2, 2, time, 1)), random(1, 2, 9, 2, 2)
    for s in range(9):
        pushed = x.clone()
        pushed[:, :, s] += 1
        changed = (layer(pushed) != layer(x)).any(dim=4).any(dim=3).any(dim=1)[0]
        assert changed.tolist() == [s <= t < s + time for t in range(9)]


def test_perturbing_any_frame_leaves_all_earlier_ones_bit_identical(vae, clip):
    z, back = vae.encode(clip), vae.decode(vae.encode(clip))
    for t in range(17):
        pushed = clip.clone()
        pushed[:, :, t] += 1
        first = -(-t // 4)  # the latent that frame t belongs to
        z_pushed = vae.encode(pushed)
        assert torch.equal(z_pushed[:, :, :first], z[:, :, :first])
        assert not torch.equal(z_pushed[:, :, first], z[:, :, first])
        again, start = vae.decode(z_pushed), 4 * first - 3 if first else 0
        assert torch.equal(again[:, :, :start], back[:, :, :start])
        assert not torch.equal(again[:, :, start], back[:, :, start])


def test_every_prefix_is_a_clip_of_its_own(vae, clip):
    z = vae.encode(clip)
    for count in range(1, 6):
        assert torch.allclose(vae.encode(clip[:, :, : 4 * count - 3]), z[:, :, :count], atol=1e-10)
        assert torch.allclose(vae.decode(z[:, :, :count]), vae.decode(z)[:, :, : 4 * count - 3], atol=1e-10)


def test_frames_have_an_order(vae, clip):
    shuffled = clip[:, :, [0, 4, 3, 2, 1, *range(5, 17)]]
    assert not torch.allclose(vae.encode(shuffled)[:, :, 1], vae.encode(clip)[:, :, 1], atol=1e-3)
    assert torch.equal(vae.encode(shuffled)[:, :, :1], vae.encode(clip)[:, :, :1])


def test_the_norm_looks_at_one_position():
    norm, x = FrameNorm(4).double(), random(1, 4, 3, 2, 5)
    pushed = x.clone()
    pushed[0, :, 1, 1, 2] *= -7
    changed = (norm(pushed) != norm(x)).any(dim=1)[0]
    assert changed.sum() == 1 and changed[1, 1, 2]
    assert torch.allclose(norm(x).square().mean(dim=1), torch.ones(1, 3, 2, 5, dtype=torch.float64), atol=1e-4)


def test_a_block_begins_as_the_identity():
    x = random(1, 4, 3, 4, 4, dtype=torch.float32)
    assert torch.equal(CausalResBlock(4)(x), x)


# Streams


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_a_stream_cut_anywhere_decodes_to_the_same_clip(pieces):
    decoder, z = shaken(video_decoder(TINY)), random(1, 3, sum(pieces), 2, 2)
    memory: dict = {}
    parts = torch.cat([decoder(part, memory) for part in z.split(pieces, dim=2)], dim=2)
    assert torch.allclose(parts, decoder(z), atol=1e-5)  # the norm's mean is fp32


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_a_stream_cut_at_groups_of_four_encodes_to_the_same_latents(pieces):
    encoder, lengths = shaken(video_encoder(TINY)), [4 * piece for piece in pieces]
    lengths[0] -= 3
    x, memory = random(1, 3, sum(lengths), 4, 4), {}
    parts = torch.cat([encoder(part, memory) for part in x.split(lengths, dim=2)], dim=2)
    assert torch.allclose(parts, encoder(x), atol=1e-5)


def test_chunks_of_every_size_and_two_calls_do_not_meet(vae, clip):
    z, other = vae.encode(clip), vae.encode(-clip)
    whole = vae.decode(z)
    for chunk in (1, 2, 3, 4, 5, 99):
        assert torch.allclose(vae.decode(z, chunk), whole, atol=1e-5)
        vae.decode(other, chunk)  # a module-level memory would leak into the next call
        assert torch.allclose(vae.decode(z, chunk), whole, atol=1e-5)


def test_without_a_memory_every_call_is_a_beginning():
    layer, x = shaken(CausalConv3d(2, 2)), random(1, 2, 4, 3, 3)
    assert torch.equal(layer(x), layer(x, {}))
    net = CausalSequential(Fold(4, 1), Unfold(4, 1))
    assert net(random(1, 1, 5, 1, 1)).shape[2] == 5


# Folding


@pytest.mark.parametrize(("time", "space", "frames"), [(4, 4, 17), (4, 2, 5), (2, 4, 3), (1, 2, 3), (4, 1, 1)])
def test_fold_and_unfold_are_inverse_and_move_numbers_only(time, space, frames):
    x = torch.arange(2 * 3 * frames * 8 * 12.0).reshape(2, 3, frames, 8, 12)
    folded = Fold(time, space)(x)
    assert torch.equal(Unfold(time, space)(folded), x)
    channels = [(c, t, i, j) for c in range(3) for t in range(time) for i in range(space) for j in range(space)]
    for k, (c, t, i, j) in enumerate(channels):
        for latent, row, column in itertools.product(range(folded.shape[2]), (0, 1), (0, 1)):
            frame = max(0, time * (latent - 1) + 1 + t) if latent else 0
            assert folded[1, k, latent, row, column] == x[1, c, frame, space * row + i, space * column + j]


# Patches and positions


@settings(max_examples=30, deadline=None)
@given(*(st.integers(1, 3) for _ in range(6)))
def test_patches_round_trip_on_any_box(f, h, w, pt, ph, pw):
    x = random(2, 3, f * pt, h * ph, w * pw)
    tokens, patch = video_patchify(x, (pt, ph, pw)), (pt, ph, pw)
    assert tokens.shape == (2, f * h * w, pt * ph * pw * 3)
    assert torch.equal(video_unpatchify(tokens, patch, (f, h, w)), x)
    assert torch.equal(tokens, tokens[:, torch.arange(f * h * w)])
    n, inside = f * h * w - 1, (pt - 1, ph - 1, pw - 1)  # the last number of the last token, channel 1
    place = ((inside[0] * ph + inside[1]) * pw + inside[2]) * 3 + 1
    assert torch.equal(tokens[:, n, place], x[:, 1, -1, -1, -1])


def test_with_patches_of_one_frame_each_frame_is_patched_as_a_picture():
    x = random(1, 3, 4, 4, 6)
    frames = torch.cat([patchify(x[:, :, t], 2) for t in range(4)], dim=1)
    assert torch.equal(video_patchify(x, (1, 2, 2)), frames)


def test_bad_patches():
    with pytest.raises(ValueError, match=r"latents of a clip are \(B, C, F, H, W\)"):
        video_patchify(torch.zeros(1, 3, 4, 4), (1, 2, 2))
    with pytest.raises(ValueError, match="latent frames 5 is not a multiple of patch 2; try 4 or 6"):
        video_grid((5, 4, 4), (2, 2, 2))
    with pytest.raises(ValueError, match="latent width 1 is not a multiple of patch 2; try 2"):
        video_grid((4, 4, 1), (2, 2, 2))
    with pytest.raises(ValueError, match=r"sizes \(4, 4\) are not \(F, H, W\)"):
        video_grid((4, 4), (2, 2, 2))
    with pytest.raises(ValueError, match="5 tokens do not fill a grid of 1×2×3 = 6"):
        video_unpatchify(torch.zeros(1, 5, 12), (1, 2, 2), (1, 2, 3))
    for head_dim in (4, 7):
        with pytest.raises(ValueError, match="is not an even number from 6 on; try 6"):
            rope_axes(head_dim)


@pytest.mark.parametrize("head_dim", range(6, 130, 2))
def test_the_axes_share_a_head(head_dim):
    time, rows, columns = rope_axes(head_dim)
    assert time + rows + columns == head_dim and rows == columns <= time <= rows + 4
    assert not time % 2 and not rows % 2 and min(time, rows) >= 2


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scores_depend_on_differences_along_each_axis(axis):
    q, k = random(1, 1, 1, 32), random(1, 1, 1, 32, seed=1)
    score = lambda a, b: float(  # noqa: E731
        (apply_rope(q, axial_rope(a, rope_axes(32))) * apply_rope(k, axial_rope(b, rope_axes(32)))).sum()
    )
    a, b = torch.tensor([[2, 1, 3]]), torch.tensor([[0, 2, 1]])
    moved = torch.zeros(1, 3, dtype=torch.int64)
    moved[0, axis] = 5
    assert abs(score(a, b) - score(a + moved, b + moved)) < 1e-5
    assert abs(score(a, b) - score(a + moved, b)) > 1e-3


# Attention and the network


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_factorised_attention_is_full_attention_under_a_mask(f, h, w):
    attn, x, grid = shaken(SelfAttention(16, 2)), random(2, f * h * w, 16), (f, h, w)
    positions = grid_positions(*grid)
    rope = axial_rope(positions, rope_axes(8))
    same = {"full": torch.ones(len(positions), len(positions), dtype=torch.bool)}
    same["space"] = positions[:, None, 0] == positions[None, :, 0]
    same["time"] = (positions[:, None, 1:] == positions[None, :, 1:]).all(dim=-1)
    q, k, v = attn.stream.split(x)
    q, k = apply_rope(q, rope), apply_rope(k, rope)
    for axes, pairs in same.items():
        slow = attn.stream.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=pairs))
        assert torch.allclose(attend_along(axes, attn, x, grid, rope), slow, atol=1e-6)


def test_unknown_axes():
    with pytest.raises(ValueError, match="axes 'rows' are unknown; try 'full', 'space' or 'time'"):
        attend_along("rows", SelfAttention(12, 2), torch.zeros(1, 4, 12), (1, 2, 2), None)


def small(**settings) -> VideoDiT:
    values = {"latent_channels": 2, "patch": (1, 2, 2), "width": 24, "heads": 2, "depth": 2, "text_width": 8}
    return VideoDiT(VideoDiTConfig(**(values | settings)))


def inputs(f: int = 3, h: int = 4, w: int = 6, b: int = 2) -> tuple:
    text, mask = random(b, 3, 8), torch.ones(b, 3, dtype=torch.bool)
    return (
        random(b, 2, f, h, w),
        torch.tensor([700.0, 300.0][:b], dtype=torch.float64),
        text,
        mask,
        random(b, 8, seed=2),
    )


@pytest.mark.parametrize("factorised", [False, True])
def test_the_network(factorised):
    net = small(factorised=factorised).double()
    assert not net(*inputs()).any()  # v = 0 at birth
    net, (x, t, text, mask, pooled) = shaken(net), inputs()
    v = net(x, t, text, mask, pooled)
    assert v.shape == x.shape and v.isfinite().all()
    for i in range(2):  # batch[i] == single(i)
        alone = net(x[i : i + 1], t[i : i + 1], text[i : i + 1], mask[i : i + 1], pooled[i : i + 1])
        assert torch.allclose(v[i : i + 1], alone, atol=1e-8)
    for order in ([2, 1, 0], [1, 0, 2]):
        assert not torch.allclose(net(x[:, :, order], t, text, mask, pooled), v[:, :, order], atol=1e-3)
    assert [block.axes for block in net.blocks] == (["space", "time"] if factorised else ["full", "full"])


def test_without_positions_the_order_of_frames_would_not_matter():
    """What makes the permutation check mean something: the same network with every turn zero is equivariant."""
    net, (x, t, text, mask, pooled) = shaken(small()), inputs()
    still = axial_rope(torch.zeros(18, 3), rope_axes(12))
    tokens, cond = net.patch_in(video_patchify(x, (1, 2, 2))), net.time_in(t) + net.pooled_in(pooled)
    frames = torch.tensor([2, 0, 1])
    order = (6 * frames[:, None] + torch.arange(6)).flatten()

    def run(tokens):
        for block in net.blocks:
            tokens = block(tokens, cond, (3, 2, 3), still, net.text_in(text), mask)
        return tokens

    assert torch.allclose(run(tokens[:, order]), run(tokens)[:, order], atol=1e-8)


def test_padding_of_prompts_is_never_seen():
    net, (x, t, text, mask, pooled) = shaken(small()), inputs()
    longer = torch.cat([text, 50 * random(2, 2, 8, seed=5)], dim=1)
    wide = torch.cat([mask, torch.zeros(2, 2, dtype=torch.bool)], dim=1)
    assert torch.allclose(net(x, t, longer, wide, pooled), net(x, t, text, None, pooled), atol=1e-8)
    refiner = shaken(TextRefiner(TextEncoderConfig(width=8, heads=2, depth=2)))
    long, short = refiner(PromptEmbeds(longer, wide, pooled)), refiner(PromptEmbeds(text, mask, pooled))
    assert torch.allclose(long.tokens[:, :3], short.tokens, atol=1e-8)
    assert torch.allclose(long.pooled, short.tokens[:, 0], atol=1e-8)


def test_channels_that_do_not_fit():
    x, *rest = inputs()
    for other in (torch.cat([x, x[:, :1]], dim=1), x[:, :, 0]):
        with pytest.raises(
            ValueError, match=rf"shape {re.escape(str(tuple(other.shape)))}; expected \(B, 2, F, H, W\)"
        ):
            small().double()(other, *rest)


# Conditions made ahead, and the switches of chapter 13


LEVELS = torch.tensor([1.0, 0.7, 0.3])


@pytest.fixture(scope="module", params=[False, True], ids=["full", "factorised"])
def trained(request) -> VideoDiT:
    """A network in fp32 in which nothing is zero."""
    return shaken(small(factorised=request.param, depth=3)).float()


def embeds(seed: int = 0, b: int = 2, hidden: int = 0) -> PromptEmbeds:
    mask = torch.ones(b, 4, dtype=torch.bool)
    mask[:, 4 - hidden :] = False
    return PromptEmbeds(random(b, 4, 8, seed=seed).float(), mask, random(b, 8, seed=seed + 1).float())


def at(sigma: torch.Tensor, b: int = 2) -> torch.Tensor:
    return 1000 * sigma.expand(b)


@pytest.mark.parametrize("hidden", [0, 2])
def test_conditions_and_velocity_are_the_two_halves_of_forward(trained, hidden):
    x, prompt = random(2, 2, 3, 4, 6).float(), embeds(hidden=hidden)
    given = trained.conditions((3, 2, 3), at(LEVELS[1]), *prompt)
    assert torch.equal(trained.velocity(x, given), trained(x, at(LEVELS[1]), *prompt))
    for sigma, ahead in zip(LEVELS, hoist_video(trained, (3, 2, 3), LEVELS, prompt), strict=True):
        assert torch.allclose(trained.velocity(x, ahead), trained(x, at(sigma), *prompt), atol=1e-4)
        assert (ahead.text_mask is None) == (hidden == 0)


@pytest.mark.parametrize("chunk", [1, 4, 7, 99])
def test_chunks_change_nothing(trained, chunk, monkeypatch):
    x, prompt, attention, seen = random(2, 2, 3, 4, 6).float(), embeds(), attention_module.attention, []
    whole = trained(x, at(LEVELS[0]), *prompt)
    monkeypatch.setattr(attention_module, "attention", lambda *args: seen.append(args[4]) or attention(*args))
    assert torch.allclose(trained(x, at(LEVELS[0]), *prompt, chunk=chunk), whole, atol=1e-5)
    assert seen == [chunk] * 6  # self- and cross-attention of each block
    with pytest.raises(ValueError, match="chunk 0 is no positive number"):
        trained(x, at(LEVELS[0]), *prompt, chunk=0)


def test_every_block_goes_through_run_block(trained):
    seen, x, prompt = [], random(2, 2, 3, 4, 6).float(), embeds()
    run = lambda block, *rest: seen.append(block) or block(*rest)  # noqa: E731
    assert torch.equal(trained(x, at(LEVELS[0]), *prompt, run_block=run), trained(x, at(LEVELS[0]), *prompt))
    assert seen == list(trained.blocks) == list(trained.parallel_blocks)
    kinds = []
    run_block = compiled_blocks(lambda forward: kinds.append(forward) or forward)
    trained(x, at(LEVELS[0]), *prompt, run_block=run_block)
    assert kinds == [VideoBlock.forward]  # one kind, compiled once


@pytest.mark.parametrize("hoisted", [False, True])
def test_a_step_cache_of_a_clip(trained, hoisted):
    x, prompt, sigmas = random(2, 2, 3, 4, 6).float(), embeds(), LEVELS if hoisted else None
    strict, loose = AcceleratedVideo(trained, sigmas, StepCache(0.0)), AcceleratedVideo(trained, sigmas, StepCache(9.0))
    for sigma in LEVELS:
        assert torch.allclose(strict(x, at(sigma), prompt), trained(x, at(sigma), *prompt), atol=1e-4)
        loose(x, at(sigma), prompt)
    assert (strict.cache.full, strict.cache.reused, loose.cache.full, loose.cache.reused) == (3, 0, 1, 2)
    other = embeds(seed=5)
    assert torch.allclose(
        loose(x, at(LEVELS[0]), other), trained(x, at(LEVELS[0]), *other), atol=1e-4
    )  # its own memory


def test_a_time_that_was_not_hoisted():
    net = shaken(small()).float()
    with pytest.raises(ValueError, match="t = 500 is not a time of this schedule"):
        AcceleratedVideo(net, LEVELS)(random(1, 2, 3, 4, 6).float(), torch.tensor([500.0]), embeds(b=1))


def test_a_stream_keeps_two_frames_of_each_layer_and_no_more(vae, clip):
    from diffusion_engine.memory_manager import tensor_bytes

    memory: dict = {}
    vae.decoder(vae.encode(clip), memory)
    layers = [layer for layer in vae.decoder.modules() if isinstance(layer, CausalConv3d) and layer.kernel_size[0] > 1]
    places = [6 if layer.in_channels != 4 else 24 for layer in layers]  # of 8 × 12 pixels: latents, half the pixels
    assert tensor_bytes(memory) == sum(8 * 2 * n * layer.in_channels for layer, n in zip(layers, places))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_operations_are_counted_exactly(f, h, w, depth, factorised):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    net = small(depth=depth, factorised=factorised).double()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        net(*inputs(f, 2 * h, 2 * w))
    assert counter.get_total_flops() == sum(video_flops(net.config, (f, h, w), 3, batch=2))


def test_the_bill_of_real_sizes():
    grid = video_grid((latent_frames(81), 60, 104), (1, 2, 2))
    assert grid == (21, 30, 52)
    full, turns = (
        video_flops(VideoDiTConfig(16, (1, 2, 2), 1536, 12, 30, 4096, factorised), grid, 512)
        for factorised in (False, True)
    )
    assert full[0] == 4 * 32_760**2 * 1536 * 30 and full[1] == turns[1]
    assert turns[0] == 4 * 32_760 * 1536 * 15 * (30 * 52 + 21)


def test_a_block_is_the_chapters_block_with_its_attention_along_axes():
    block, rope = shaken(VideoBlock(12, 2, "space")), axial_rope(grid_positions(2, 1, 2), rope_axes(6))
    x, cond, text = random(1, 4, 12), random(1, 12, seed=1), random(1, 2, 12, seed=2)
    pushed = x.clone()
    pushed[:, 0] += 1  # a token of the first frame
    changed = (block(pushed, cond, (2, 1, 2), rope, text) != block(x, cond, (2, 1, 2), rope, text)).any(dim=-1)[0]
    assert changed.tolist() == [True, True, False, False]


# What ships


@pytest.fixture(scope="module")
def shipped():
    from safetensors.torch import load_file

    return {p.stem: {k: v.float() for k, v in load_file(p).items()} for p in SHIPPED_CLIP_MODEL.glob("*.safetensors")}


def test_the_shipped_weights_fit_the_default_sizes_and_the_limit(shipped):
    config = json.loads((SHIPPED_CLIP_MODEL / "config.json").read_text(encoding="utf-8"))
    VideoVAE(VideoVAEConfig(**config["vae"])).load_state_dict(shipped["vae"])
    VideoDiT(VideoDiTConfig(**config["dit"])).load_state_dict(shipped["dit"])
    TextRefiner(TextEncoderConfig(**config["refiner"])).load_state_dict(shipped["refiner"])
    assert VideoDiTConfig(**config["dit"]) == VideoDiTConfig()
    assert sum(p.stat().st_size for p in SHIPPED_CLIP_MODEL.glob("*.safetensors")) < 30e6
    assert sum(p.stat().st_size for p in (SHIPPED_CLIP_MODEL.parent / "clips").iterdir()) < 12e6


def test_the_shipped_vae_is_causal_too(shipped):
    vae = VideoVAE().requires_grad_(False)
    vae.load_state_dict(shipped["vae"])
    clip = random(1, 3, 17, 16, 16, dtype=torch.float32).clamp(-1, 1)
    late = clip.clone()
    late[:, :, 12] = 0
    z = vae.encode(clip)
    assert torch.equal(vae.encode(late)[:, :, :3], z[:, :, :3])
    assert torch.allclose(vae.decode(z, 2), vae.decode(z), atol=1e-5)
    assert torch.allclose(vae.encode(clip[:, :, :1]), z[:, :, :1], atol=1e-5)

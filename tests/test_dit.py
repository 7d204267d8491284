"""Chapter 06 under harder conditions: any rectangle, parity with three libraries, exact counts, bad input."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion_engine.dit import (
    DiT,
    DiTConfig,
    FinalLayer,
    flop_count,
    parameter_count,
    patch_grid,
    patchify,
    sincos_2d,
    unpatchify,
)

SMALL = DiTConfig(latent_channels=3, patch=2, width=32, heads=4, joint_depth=1, parallel_depth=1, text_width=16)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def opened(config: DiTConfig = SMALL, seed: int = 0) -> DiT:
    """A DiT whose every weight is random: nothing hides behind a zero."""
    model = DiT(config).requires_grad_(False)
    generator = rng(seed)
    for p in model.parameters():
        nn.init.normal_(p, std=0.2, generator=generator)
    return model


def inputs(config: DiTConfig = SMALL, batch: int = 2, height: int = 6, width: int = 4, words: int = 5):
    g, c = rng(1), config
    latents = torch.randn(batch, c.latent_channels, height, width, generator=g)
    text, pooled = torch.randn(batch, words, c.text_width, generator=g), torch.randn(batch, c.text_width, generator=g)
    return latents, torch.linspace(900, 50, batch), text, torch.ones(batch, words, dtype=torch.bool), pooled


# ---- patches ----

sizes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, channels_first=st.booleans())
def test_round_trip_on_any_rectangle(sizes, channels_first):
    b, c, h, w, p = sizes
    x = torch.randn(b, c, h * p, w * p, generator=rng(0))
    tokens = patchify(x, p, channels_first)
    assert tokens.shape == (b, h * w, p * p * c)
    assert torch.equal(unpatchify(tokens, p, (h, w), channels_first), x)
    i, j = h - 1, w // 2  # one token against a plain slice
    block = x[:, :, i * p : (i + 1) * p, j * p : (j + 1) * p]
    block = block if channels_first else block.permute(0, 2, 3, 1)
    assert torch.equal(tokens[:, i * w + j], block.flatten(1))


def test_orders_are_those_of_flux_and_sd3():
    from diffusers import FluxPipeline

    x = torch.randn(2, 16, 6, 10, generator=rng(0))
    assert torch.equal(patchify(x, 2, channels_first=True), FluxPipeline._pack_latents(x, 2, 16, 6, 10))
    tokens = torch.randn(2, 15, 64, generator=rng(1))  # as SD3Transformer2DModel puts its output back
    theirs = torch.einsum("nhwpqc->nchpwq", tokens.reshape(2, 3, 5, 2, 2, 16)).reshape(2, 16, 6, 10)
    assert torch.equal(unpatchify(tokens, 2, (3, 5)), theirs)


def test_patch_embedding_is_a_convolution():
    conv, x = nn.Conv2d(3, 8, 4, stride=4), torch.randn(2, 3, 8, 12, generator=rng(0))
    expected = conv(x).flatten(2).transpose(1, 2)
    assert torch.allclose(
        F.linear(patchify(x, 4, channels_first=True), conv.weight.flatten(1), conv.bias), expected, atol=1e-5
    )


# ---- positions ----


@settings(max_examples=30, deadline=None)
@given(h=st.integers(1, 9), w=st.integers(1, 9), quarter=st.integers(1, 16))
def test_every_place_has_its_own_position_and_rows_are_not_columns(h, w, quarter):
    table = sincos_2d((h, w), 4 * quarter).reshape(h, w, -1)
    row, column = table.chunk(2, dim=-1)
    assert torch.equal(row, row[:, :1].expand_as(row)) and torch.equal(column, column[:1].expand_as(column))
    flat = table.flatten(0, 1)
    distance = torch.cdist(flat, flat) + torch.eye(h * w)
    assert distance.min() > 0.1
    assert torch.allclose(flat.norm(dim=-1), torch.full((h * w,), (2 * quarter) ** 0.5))


@pytest.mark.parametrize(
    ("size", "largest", "grid"), [(16, 24, (6, 10)), (64, 96, (64, 64)), (16, 16, (3, 5)), (8, 12, (12, 1))]
)
def test_positions_are_sd3s_centre_crop(size, largest, grid):
    from diffusers.models.embeddings import PatchEmbed

    theirs = PatchEmbed(2 * size, 2 * size, 2, 4, 64, pos_embed_max_size=largest)
    theirs = theirs.cropped_pos_embed(2 * grid[0], 2 * grid[1])[0]
    origin = tuple((largest - side) // 2 for side in grid)
    table = sincos_2d(grid, 64, origin, scale=size / largest)
    assert torch.allclose(table.unflatten(-1, (4, -1)).flip(-2).flatten(-2), theirs, atol=1e-5)


# ---- the network ----


@pytest.mark.parametrize("depths", [(1, 1), (2, 0), (0, 2)])
@pytest.mark.parametrize("grid", [(2, 3), (3, 2), (1, 1), (1, 7)])
def test_new_network_answers_zero_and_every_rectangle_fits(grid, depths):
    config = replace(SMALL, joint_depth=depths[0], parallel_depth=depths[1])
    arguments = inputs(config, height=2 * grid[0], width=2 * grid[1])
    assert (DiT(config)(*arguments) == 0).all()
    v = opened(config)(*arguments)
    assert v.shape == arguments[0].shape and v.isfinite().all() and v.abs().max() > 0


@pytest.mark.parametrize("depths", [(1, 1), (2, 0), (0, 2)])
def test_padding_and_batch_change_nothing(depths):
    config = replace(SMALL, joint_depth=depths[0], parallel_depth=depths[1])
    model, (latents, t, text, mask, pooled) = opened(config), inputs(config, batch=3)
    lengths = [5, 3, 1]
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    noisy = torch.where(mask[..., None], text, 50 * torch.randn(text.shape, generator=rng(7)))
    v = model(latents, t, noisy, mask, pooled)
    for i, n in enumerate(lengths):
        alone = model(latents[i : i + 1], t[i : i + 1], text[i : i + 1, :n], None, pooled[i : i + 1])
        assert torch.allclose(v[i : i + 1], alone, atol=1e-4)


def test_every_input_is_heard():
    model, (latents, t, text, mask, pooled) = opened(), inputs()
    base = model(latents, t, text, mask, pooled)
    for other in (
        (latents.flip(-1), t, text, mask, pooled),
        (latents, t + 20, text, mask, pooled),
        (latents, t, text.flip(0), mask, pooled),
        (latents, t, text, mask & (torch.arange(5) < 4), pooled),
        (latents, t, text, mask, pooled.flip(0)),
    ):
        assert (model(*other) - base).abs().max() > 1e-3
    assert torch.allclose(model(latents, t, text.flip(1), mask, pooled), base, atol=1e-4)  # words are a set here


def test_a_step_of_training_moves_every_weight_in_the_end():
    torch.manual_seed(0)
    model, arguments = DiT(SMALL), inputs()
    target = torch.randn_like(arguments[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):  # final layer, then gates, then everything behind them
        optimizer.zero_grad()
        F.mse_loss(model(*arguments), target).backward()
        optimizer.step()
    idle = [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    assert idle == []


def test_last_joint_block_has_no_idle_weights_without_parallel_blocks():
    model = DiT(replace(SMALL, joint_depth=2, parallel_depth=0))
    assert [block.last for block in model.joint_blocks] == [False, True]
    assert not any(block.last for block in DiT(SMALL).joint_blocks)


def test_final_layer_is_a_modulated_norm():
    layer, x, cond = (
        FinalLayer(16, 6),
        9 * torch.randn(2, 3, 16, generator=rng(0)) + 4,
        torch.randn(2, 16, generator=rng(1)),
    )
    assert (layer(x, cond) == 0).all()
    nn.init.normal_(layer.linear.weight, generator=rng(2))
    assert torch.allclose(layer(x, cond), F.layer_norm(x, (16,), eps=1e-6) @ layer.linear.weight.T, atol=1e-4)
    layer.modulation.bias.data[:16] = 3.0  # the first half is the shift
    expected = (F.layer_norm(x, (16,), eps=1e-6) + 3) @ layer.linear.weight.T
    assert torch.allclose(layer(x, cond), expected, atol=1e-4)


def test_keys_and_size_of_the_shipped_network_are_fixed():
    with torch.device("meta"):
        model = DiT()
    keys = set(model.state_dict())
    tops = {key.split(".")[0] for key in keys}
    assert tops == {"image_in", "text_in", "time_in", "pooled_in", "joint_blocks", "parallel_blocks", "final"}
    assert {"final.modulation.weight", "final.linear.bias", "pooled_in.2.weight", "time_in.mlp.0.weight"} <= keys
    assert parameter_count(DiTConfig()) == sum(p.numel() for p in model.parameters()) == 10_157_440
    assert model.min_multiple == 4


# ---- counts ----


@settings(max_examples=12, deadline=None)
@given(
    channels=st.integers(1, 5),
    patch=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 4]),
    joint=st.integers(0, 2),
    parallel=st.integers(0, 2),
    text_width=st.integers(1, 20),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    words=st.integers(1, 6),
    batch=st.integers(1, 3),
)
def test_formulas_equal_the_counters(channels, patch, heads, joint, parallel, text_width, grid, words, batch):
    if joint + parallel == 0:
        joint = 1
    config = DiTConfig(channels, patch, 16, heads, joint, parallel, text_width)
    model = DiT(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    arguments = inputs(config, batch, grid[0] * patch, grid[1] * patch, words)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*arguments)
    assert counter.get_total_flops() == flop_count(config, grid, words, batch)


# ---- bad input ----


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: patch_grid(15, 16, 4), "latent height 15 is not a multiple of patch 4; try 12 or 16"),
        (lambda: patch_grid(16, 2, 4), "latent width 2 is not a multiple of patch 4; try 4$"),
        (lambda: patch_grid(0, 4, 4), "latent height 0 .* try 4$"),
        (lambda: patchify(torch.zeros(3, 8, 8), 2), r"\(3, 8, 8\); expected \(B, C, H, W\)"),
        (lambda: unpatchify(torch.zeros(1, 6, 12), 2, (2, 2)), "6 tokens do not fill a grid of 2×2 = 4"),
        (lambda: unpatchify(torch.zeros(1, 6, 10), 2, (2, 3)), "tokens of 10 numbers are not whole 2×2 patches; try 8"),
        (lambda: sincos_2d((2, 2), 30), "width 30 is not a multiple of 4; try 28 or 32"),
        (lambda: sincos_2d((2, 2), 0), "width 0 is not a multiple of 4; try 4"),
        (lambda: sincos_2d((0, 2), 32), "grid 0×2 is empty; try 1×2"),
        (lambda: DiTConfig(width=100, heads=8), r"width 100 is not a multiple of 8 \(heads 8, 4\); try 96 or 104"),
        (lambda: DiTConfig(width=30, heads=3), r"width 30 is not a multiple of 12 \(heads 3, 4\); try 24 or 36"),
        (lambda: DiTConfig(joint_depth=0, parallel_depth=0), "a DiT needs a block; try 1 and 0"),
        (lambda: DiTConfig(joint_depth=-1), "depths -1 and 5"),
        (lambda: DiTConfig(patch=0), "patch 0 is not a positive number; try 1"),
    ],
)
def test_bad_sizes_are_refused_in_words(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        (0, torch.zeros(2, 4, 6, 4), r"latents have shape \(2, 4, 6, 4\); expected \(B, 3, H, W\)"),
        (0, torch.zeros(3, 6, 4), r"latents have shape \(3, 6, 4\)"),
        (0, torch.zeros(2, 3, 7, 4), "latent height 7 is not a multiple of patch 2; try 6 or 8"),
        (1, torch.zeros(1), r"t has shape \(1,\); expected \(2,\)"),
        (1, torch.tensor(3.0), r"t has shape \(\); expected \(2,\)"),
        (2, torch.zeros(1, 5, 16), r"text has shape \(1, 5, 16\); expected \(2, 5, 16\)"),
        (2, torch.zeros(2, 16), r"text has shape \(2, 16\)"),
        (3, torch.ones(2, 4, dtype=torch.bool), r"text_mask has shape \(2, 4\); expected \(2, 5\)"),
        (3, torch.ones(2, 5), "torch.float32"),
        (4, torch.zeros(2, 5, 16), r"pooled has shape \(2, 5, 16\); expected \(2, 16\)"),
    ],
)
def test_bad_inputs_are_refused_in_words(place, wrong, words):
    arguments = list(inputs())
    arguments[place] = wrong
    with pytest.raises(ValueError, match=words):
        DiT(SMALL)(*arguments)


@pytest.mark.parametrize("patch", [0, -2])
def test_a_patch_below_one_is_refused(patch):
    for call in (
        lambda: patchify(torch.zeros(1, 4, 4, 4), patch),
        lambda: unpatchify(torch.zeros(1, 4, 4), patch, (2, 2)),
    ):
        with pytest.raises(ValueError, match=f"patch {patch} is below 1; try 1"):
            call()

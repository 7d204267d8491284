"""Chapter 09 harder: tiling over many sizes, the reach of every layer, mistakes that keep all shapes, and diffusers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from diffusion_engine import vae as module
from diffusion_engine.vae import (
    VAE,
    ChannelNorm,
    Decoder,
    Encoder,
    Gaussian,
    ResBlock,
    VAEConfig,
    calibrate,
    even_tiles,
    psnr,
    receptive_radius,
    tile_weight,
    tiled,
    tiled_decode,
    tiled_encode,
    vae_loss,
)

TINY = VAEConfig(width=8, encoder_depth=1, decoder_depth=1)


def random_vae(config: VAEConfig = TINY, dtype: torch.dtype = torch.float64) -> VAE:
    """A VAE whose every layer matters: nothing is zero as it is at init."""
    torch.manual_seed(0)
    vae = VAE(config).to(dtype).requires_grad_(False)
    for parameter in vae.parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1))
    vae.shift.copy_(torch.linspace(-1, 1, config.latent_channels))
    vae.scale.copy_(torch.linspace(0.5, 2, config.latent_channels))
    return vae


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- the draft that the shipped weights were trained on -------------------------------------------------------------------


def test_keys_and_sizes_of_the_shipped_vae():
    """The weights in the package need exactly these names."""
    vae = VAE()
    keys = list(vae.state_dict())
    assert keys[:2] == ["shift", "scale"] and len(keys) == 54
    assert {"encoder.2.norm.weight", "encoder.5.weight", "decoder.4.conv2.bias", "decoder.9.weight"} <= set(keys)
    assert sum(p.numel() for p in vae.parameters()) == 1_177_172
    assert vae.encode(torch.zeros(2, 3, 64, 64)).shape == (2, 4, 16, 16)
    assert vae.decode(torch.zeros(2, 4, 16, 16)).shape == (2, 3, 64, 64)
    assert vae.encode(torch.zeros(1, 3, 32, 96)).shape == (1, 4, 8, 24)  # any rectangle


def test_norm_is_finite_on_zeros_and_computes_in_fp32():
    norm = ChannelNorm(4)
    assert torch.equal(norm(torch.zeros(1, 4, 2, 2)), torch.zeros(1, 4, 2, 2))
    large = torch.full((1, 4, 2, 2), 300.0, dtype=torch.float16)  # 300² overflows fp16
    assert torch.allclose(norm.half()(large).float(), torch.ones(1, 4, 2, 2), atol=1e-2)


def test_encode_and_decode_undo_each_others_scale():
    vae = random_vae()
    latents = randn(2, 4, 6, 5)
    plain = latents * vae.scale.reshape(-1, 1, 1) + vae.shift.reshape(-1, 1, 1)
    assert torch.allclose(vae.decode(latents), vae.decoder(plain))
    images = randn(2, 3, 24, 20)
    assert torch.allclose(vae.encode(images) * vae.scale.reshape(-1, 1, 1) + vae.shift.reshape(-1, 1, 1), vae.posterior(images).mean)  # fmt: skip


def test_calibrate_does_not_depend_on_the_batch():
    images = randn(10, 3, 16, 16)
    a, b = calibrate(random_vae(), images, batch=3), calibrate(random_vae(), images, batch=64)
    assert torch.allclose(a.scale, b.scale) and torch.allclose(a.shift, b.shift)
    latents = a.encode(images)
    assert torch.allclose(latents.std(dim=(0, 2, 3)), torch.ones(4, dtype=torch.float64))


# --- the Gaussian ---------------------------------------------------------------------------------------------------------


@given(mean=st.floats(-4, 4), logvar=st.floats(-6, 4))
@settings(max_examples=50, deadline=None)
def test_kl_is_that_of_torch(mean, logvar):
    gaussian = Gaussian(torch.tensor([mean], dtype=torch.float64), torch.tensor([logvar], dtype=torch.float64))
    theirs = torch.distributions.kl_divergence(
        torch.distributions.Normal(gaussian.mean, (gaussian.logvar / 2).exp()), torch.distributions.Normal(0.0, 1.0)
    )
    assert math.isclose(gaussian.kl().item(), theirs.item(), rel_tol=1e-6, abs_tol=1e-9) and gaussian.kl() >= -1e-12


def test_gaussian_against_diffusers_also_where_it_clamps():
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    vae, images = random_vae(), randn(2, 3, 16, 16) * 50
    ours, theirs = vae.posterior(images), DiagonalGaussianDistribution(vae.encoder(images))
    assert ours.logvar.max() <= 20 and ours.logvar.min() >= -30
    noise = randn(*ours.mean.shape, seed=1)
    assert torch.equal(ours.mean, theirs.mean) and torch.equal(ours.logvar, theirs.logvar)
    assert torch.allclose(ours.sample(noise), theirs.mean + theirs.std * noise)
    assert torch.allclose(ours.kl(), theirs.kl().mean() / ours.mean[0].numel())


def test_norm_against_wan():
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm

    ours, theirs = ChannelNorm(16), WanRMS_norm(16, images=False)
    nn.init.normal_(theirs.gamma)
    ours.weight.data = theirs.gamma.data.flatten()
    x = randn(2, 16, 5, 3).float()
    assert torch.allclose(ours(x), theirs(x.unsqueeze(2)).squeeze(2), atol=1e-5)


# --- the loss -------------------------------------------------------------------------------------------------------------


def test_loss_term_by_term():
    vae, images, noise = random_vae(), randn(2, 3, 16, 16), randn(2, 4, 4, 4, seed=1)
    posterior = vae.posterior(images)
    redrawn = vae.decoder(posterior.sample(noise))
    error = redrawn - images
    lines = (redrawn[..., 1:, :] - redrawn[..., :-1, :] - images[..., 1:, :] + images[..., :-1, :]).abs().mean()
    lines += (redrawn[..., 1:] - redrawn[..., :-1] - images[..., 1:] + images[..., :-1]).abs().mean()
    expected = error.abs().mean() + 2 * (error**2).mean() + lines / 4 + 1e-3 * posterior.kl()
    assert torch.allclose(vae_loss(vae, images, noise), expected)


def test_loss_reads_unscaled_latents():
    """While it trains, a VAE has no scale; shift and scale must not enter the loss."""
    vae, images, noise = random_vae(), randn(1, 3, 16, 16), randn(1, 4, 4, 4, seed=1)
    before = vae_loss(vae, images, noise)
    vae.scale.mul_(3)
    assert torch.equal(vae_loss(vae, images, noise), before)


def test_psnr():
    a = torch.zeros(2, 3, 4, 4)
    assert torch.allclose(
        psnr(a + torch.tensor([0.2, 0.02]).reshape(2, 1, 1, 1), a), torch.tensor([20.0, 40.0]), atol=1e-3
    )
    assert psnr(a + 5, a + 1).tolist() == [100.0, 100.0]  # what is shown is clamped


# --- how far a layer reaches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depths", [(0, 0), (1, 1), (2, 4), (3, 2)])
def test_radius_by_dye(depths):
    """NaN is a perfect dye: it colours every output that reads it. float64, so that no fast convolution spreads it."""
    config = VAEConfig(width=4, encoder_depth=depths[0], decoder_depth=depths[1])
    vae = random_vae(config)
    side = 33
    for network, cells, per_input, per_output in ((vae.decoder, 4, 1, 4), (vae.encoder, 3, 4, 1)):
        radius = receptive_radius(network)
        dye = torch.zeros(1, cells, side * per_input, side * per_input, dtype=torch.float64)
        dye[..., 16 * per_input : 17 * per_input, 16 * per_input : 17 * per_input] = torch.nan
        coloured = network(dye).isnan().any(dim=1)[0]
        reached = coloured.any(dim=0).nonzero().flatten()
        assert reached.min() == per_output * (16 - radius) and reached.max() + 1 == per_output * (17 + radius)
        assert torch.equal(coloured.any(dim=1), coloured.any(dim=0))


def test_group_norm_colours_everything():
    """Why the VAE has none: with it no overlap would ever be enough."""
    dye = torch.zeros(1, 8, 9, 9)
    dye[..., 4, 4] = torch.nan
    assert nn.GroupNorm(2, 8)(dye).isnan().all() and ChannelNorm(8)(dye).isnan().sum() == 8


# --- even tiles -----------------------------------------------------------------------------------------------------------


@given(length=st.integers(1, 300), tile=st.integers(1, 80), data=st.data())
@settings(max_examples=200, deadline=None)
def test_even_tiles_cover_share_and_are_few(length, tile, data):
    overlap = data.draw(st.integers(0, tile - 1))
    tiles = even_tiles(length, tile, overlap)
    sizes = {stop - start for start, stop in tiles}
    assert len(sizes) == 1 and max(sizes) <= tile and tiles[0][0] == 0 and tiles[-1][1] == length
    assert all(stop - start_next >= overlap for (_, stop), (start_next, _) in zip(tiles, tiles[1:]))
    assert all(a < b for (a, _), (b, _) in zip(tiles, tiles[1:]))
    if len(tiles) > 1:  # one fewer could not reach
        assert (len(tiles) - 1) * tile - (len(tiles) - 2) * overlap < length


@pytest.mark.parametrize("tile, overlap", [(0, 0), (8, 8), (8, -1), (-3, 0), (4, 9)])
def test_bad_tiles(tile, overlap):
    with pytest.raises(ValueError, match="overlap"):
        even_tiles(64, tile, overlap)
    with pytest.raises(ValueError, match="overlap"):
        tiled_decode(random_vae(), randn(1, 4, 16, 16), tile, overlap)


@given(overlap=st.integers(1, 12), ramp=st.floats(1, 12), per_cell=st.sampled_from([1, 4]))
@settings(max_examples=60, deadline=None)
def test_weights_of_neighbours_sum_to_one(overlap, ramp, per_cell):
    ramp = min(ramp, float(overlap))
    left = tile_weight((0, 20), 40 - overlap, overlap, ramp, per_cell)[-overlap * per_cell :]
    right = tile_weight((20 - overlap, 40 - overlap), 40 - overlap, overlap, ramp, per_cell)[: overlap * per_cell]
    assert torch.allclose(left + right, torch.ones(overlap * per_cell), atol=1e-5)
    assert (right.diff() >= -1e-6).all() and torch.allclose(left, right.flip(0), atol=1e-6)


# --- tiling ---------------------------------------------------------------------------------------------------------------

REACH = int(2 * receptive_radius(Decoder(TINY)) + 1)  # 8
REACH_BACK = int(2 * receptive_radius(Encoder(TINY)) + 1)  # 7


@given(height=st.integers(1, 40), width=st.integers(1, 40), tile=st.integers(REACH + 1, 30), extra=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_tiled_decode_is_exact_when_the_overlap_covers_the_rim(height, width, tile, extra):
    vae, latents = random_vae(), randn(1, 4, height, width)
    overlap = min(REACH + extra, tile - 1)
    assert torch.allclose(tiled_decode(vae, latents, tile, overlap), vae.decode(latents), atol=1e-6)


@given(height=st.integers(1, 30), width=st.integers(1, 30), tile=st.integers(REACH_BACK + 1, 20))
@settings(max_examples=15, deadline=None)
def test_tiled_encode_is_exact_when_the_overlap_covers_the_rim(height, width, tile):
    vae, images = random_vae(), randn(2, 3, 4 * height, 4 * width)
    assert torch.allclose(tiled_encode(vae, images, tile, REACH_BACK), vae.encode(images), atol=1e-6)


def test_one_latent_less_is_not_exact():
    vae, latents = random_vae(), randn(1, 4, 30, 30)
    errors = [(tiled_decode(vae, latents, 14, o) - vae.decode(latents)).abs().max() for o in (0, 2, 4, 6, REACH)]
    assert errors[-1] < 1e-6 < errors[-2] and errors == sorted(errors, reverse=True)


def test_dtype_device_and_input_stay():
    vae, latents = random_vae().to(torch.bfloat16), randn(1, 4, 20, 20).bfloat16()
    before = latents.clone()
    out = tiled_decode(vae, latents, 12, 8)
    assert out.dtype == torch.bfloat16 and out.shape == (1, 3, 80, 80) and torch.equal(latents, before)
    assert torch.equal(out, tiled_decode(vae, latents, 12, 8))  # the same call, the same bits


def test_a_tile_as_large_as_the_picture_is_one_call():
    calls = []
    out = tiled(lambda x: calls.append(x.shape) or x.repeat(1, 1, 4, 4), randn(1, 4, 10, 12), 12, 4, 2.0, 4)
    assert calls == [(1, 4, 10, 12)] and out.shape == (1, 4, 40, 48)


def test_peak_memory_follows_the_tile():
    """Largest tensor that the decoder makes, by hooks: proportional to the tile's area, whatever the picture."""
    vae, sizes = random_vae(VAEConfig(width=16, encoder_depth=1, decoder_depth=1)), []
    for layer in vae.decoder.modules():
        layer.register_forward_hook(lambda _, __, out: sizes.append(out.numel()))
    largest = []
    for decode in (vae.decode, lambda z: tiled_decode(vae, z, 16, 8)):
        sizes.clear()
        decode(randn(1, 4, 64, 64))
        largest.append(max(sizes))
    assert largest[1] / largest[0] == (16 / 64) ** 2


@pytest.mark.parametrize("overlap", [4, 8, 12])
def test_closer_to_the_whole_than_diffusers_with_the_same_overlap(overlap):
    from types import SimpleNamespace

    from diffusers import AutoencoderKL

    vae = random_vae(VAEConfig(width=8, encoder_depth=1, decoder_depth=3))
    latents = randn(1, 4, 40, 40)
    grid = SimpleNamespace(tile_latent_min_size=16, tile_sample_min_size=64, tile_overlap_factor=overlap / 16)
    grid.decoder, grid.config = vae.decode, SimpleNamespace(use_post_quant_conv=False)
    grid.blend_v = lambda *args: AutoencoderKL.blend_v(None, *args)
    grid.blend_h = lambda *args: AutoencoderKL.blend_h(None, *args)
    theirs = AutoencoderKL.tiled_decode(grid, latents, return_dict=False)[0]
    ours, whole = tiled_decode(vae, latents, 16, overlap), vae.decode(latents)
    rms = [(picture - whole).square().mean().sqrt() for picture in (ours, theirs)]
    assert theirs.shape == whole.shape and rms[0] < rms[1] / 2


# --- mistakes that keep all shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", ["norm over the picture", "no rim", "rows and columns swapped", "uneven starts"])
def test_typical_mistakes_break_exactness(monkeypatch, mistake):
    """The chapter's exactness check (a wide picture, an overlap that covers the rim) turns red for each."""
    if mistake == "norm over the picture":

        def over_space(self, x):
            return (
                x * torch.rsqrt(x.square().mean(dim=(1, 2, 3), keepdim=True) + self.eps) * self.weight.reshape(-1, 1, 1)
            )

        monkeypatch.setattr(ChannelNorm, "forward", over_space)
    elif mistake == "no rim":
        monkeypatch.setattr(module, "receptive_radius", lambda network: 0.0)
    elif mistake == "rows and columns swapped":
        right = module.tile_weight
        monkeypatch.setattr(module, "tile_weight", lambda tile, *rest: right(tile, *rest).flip(0))
    else:
        right_tiles = module.even_tiles
        shifted = lambda *args: [(max(a - 2, 0), max(a - 2, 0) + b - a) for a, b in right_tiles(*args)]  # noqa: E731
        monkeypatch.setattr(module, "even_tiles", shifted)
    vae, latents = random_vae(), randn(1, 4, 24, 40)
    close = torch.allclose(tiled_decode(vae, latents, 14, REACH), vae.decode(latents), atol=1e-5)
    assert not close


@pytest.mark.parametrize("mistake", ["scale multiplied", "shift forgotten", "std is not squared"])
def test_typical_mistakes_of_scale_and_gaussian(mistake):
    vae, images = random_vae(), randn(4, 3, 32, 32)
    calibrate(vae, images)
    mean = vae.posterior(images).mean
    shift, scale = vae.shift.reshape(-1, 1, 1), vae.scale.reshape(-1, 1, 1)
    if mistake == "std is not squared":
        gaussian = Gaussian(mean, torch.full_like(mean, 0.7))
        wrong = 0.5 * (mean.square() + (0.5 * gaussian.logvar).exp() - 1 - gaussian.logvar).mean()
        assert not torch.allclose(wrong, gaussian.kl(), rtol=1e-2)
        return
    wrong = (mean - shift) * scale if mistake == "scale multiplied" else mean / scale
    unit = torch.allclose(wrong.std(dim=(0, 2, 3)), torch.ones(4, dtype=torch.float64), atol=1e-4)
    centred = torch.allclose(wrong.mean(dim=(0, 2, 3)), torch.zeros(4, dtype=torch.float64), atol=1e-4)
    assert not (unit and centred)


# --- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, word",
    [((1, 3, 64, 66), "width 66.*64 or 68"), ((1, 3, 30, 64), "height 30.*28 or 32"), ((1, 4, 64, 64), r"\(1, 4, 64, 64\)"),
     ((3, 64, 64), r"\(3, 64, 64\)"), ((1, 3, 0, 64), "height 0.*4 or 8"), ((1, 3, 3, 64), "height 3.*4 or 8")],
)  # fmt: skip
def test_pictures_that_do_not_fit(shape, word):
    vae = random_vae(dtype=torch.float32)
    for encode in (vae.encode, vae.posterior, lambda x: tiled_encode(vae, x)):
        with pytest.raises(ValueError, match=word):
            encode(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(1, 3, 16, 16), (4, 16, 16), (1, 4, 2, 16, 16)])
def test_latents_that_do_not_fit(shape):
    with pytest.raises(ValueError, match="latents have shape"):
        random_vae(dtype=torch.float32).decode(torch.zeros(shape))


@pytest.mark.parametrize("settings_", [{"factor": 8}, {"width": 7}, {"width": 0}])
def test_sizes_that_cannot_be_built(settings_):
    with pytest.raises(ValueError, match="cannot be built"):
        VAEConfig(**settings_)


def test_blocks_begin_as_the_identity():
    torch.manual_seed(0)
    x = randn(2, 8, 5, 7).float()
    assert torch.equal(ResBlock(8)(x), x)


def test_psnr_compares_like_with_like():
    picture = torch.zeros(2, 3, 4, 4)
    with pytest.raises(ValueError, match="differ in shape"):
        psnr(picture, picture[:1])
    with pytest.raises(ValueError, match="bytes / 127.5 − 1"):
        psnr(picture.to(torch.uint8), picture.to(torch.uint8))

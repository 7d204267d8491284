"""Chapter 03 pressed harder: geometry over all times and widths, precision, bad input, and faults that keep every shape."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_engine.timestep_embedding import TimestepEmbedder, timestep_embedding

widths = st.integers(1, 160).map(lambda half: 2 * half)
moments = st.floats(0, 1000, width=32)
quick = settings(max_examples=40, deadline=None)


@quick
@given(t=moments, dim=widths, period=st.floats(10, 1e5))
def test_every_component_is_its_formula(t, dim, period):
    got = timestep_embedding(torch.tensor([t]), dim, period)[0].double()
    half = dim // 2
    omega = torch.tensor([period ** (-i / half) for i in range(half)], dtype=torch.float64)
    assert torch.allclose(got, torch.cat([(omega * t).cos(), (omega * t).sin()]), atol=5e-4)


@quick
@given(a=moments, b=moments, gap=st.floats(-300, 300, width=32), dim=widths)
def test_likeness_depends_on_the_gap_alone(a, b, gap, dim):
    one, two = (timestep_embedding(torch.tensor([t, t + gap]), dim) for t in (a, b))
    assert abs(one[0] @ one[1] - two[0] @ two[1]) < 1e-3 * dim
    assert torch.allclose(one.norm(dim=-1), torch.full((2,), math.sqrt(dim / 2)), rtol=1e-5)


def test_a_thousand_integer_times_are_all_different():
    codes = timestep_embedding(torch.arange(1001), 256)
    distance = torch.cdist(codes, codes) + 1e9 * torch.eye(1001)
    assert distance.min() > 0.5


def test_precision_of_the_input_does_not_matter_as_long_as_it_holds_the_time():
    times = torch.tensor([0, 1, 751, 1000])
    truth = timestep_embedding(times.float(), 64)
    for dtype in (torch.int64, torch.int32, torch.float64):
        assert torch.equal(timestep_embedding(times.to(dtype), 64), truth)
    assert truth.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_times_are_refused(dtype):
    with pytest.raises(ValueError, match="keep it torch.float32"):
        TimestepEmbedder(8)(torch.tensor([750.0], dtype=dtype))


@pytest.mark.parametrize(
    ("dim", "advice"), [(63, "62 or 64"), (1, "2 or 4"), (0, "2 or 4"), (-2, "2 or 4"), (257, "256 or 258")]
)
def test_bad_widths_name_the_nearest_good_ones(dim, advice):
    with pytest.raises(ValueError, match=f"dim {dim} .*try {advice}"):
        timestep_embedding(torch.zeros(1), dim)


@pytest.mark.parametrize("shape", [(), (2, 1), (1, 2, 3)])
def test_bad_shapes_name_themselves(shape):
    with pytest.raises(ValueError, match=r"expected \(B,\)"):
        timestep_embedding(torch.zeros(shape), 8)


def test_weights_keep_their_names_and_their_dtype():
    embedder = TimestepEmbedder(12, frequency_dim=10)
    shapes = {name: tuple(weight.shape) for name, weight in embedder.state_dict().items()}
    assert shapes == {"mlp.0.weight": (12, 10), "mlp.0.bias": (12,), "mlp.2.weight": (12, 12), "mlp.2.bias": (12,)}
    assert embedder.bfloat16()(torch.tensor([3.0])).dtype == torch.bfloat16


def test_no_time_of_the_batch_leaks_into_another():
    embedder, t = TimestepEmbedder(16), torch.tensor([3.0, 500.0, 999.0])
    together = embedder(t)
    for i in range(3):
        assert torch.allclose(embedder(t[i : i + 1])[0], together[i], atol=1e-6)


@pytest.mark.parametrize("width", [64, 320, 1920])
def test_equal_to_diffusers_as_the_models_call_it(width):
    from diffusers.models.embeddings import TimestepEmbedding, Timesteps

    ours, theirs = TimestepEmbedder(width, frequency_dim=width), TimestepEmbedding(width, width)
    theirs.linear_1.load_state_dict(ours.mlp[0].state_dict())
    theirs.linear_2.load_state_dict(ours.mlp[2].state_dict())
    t = torch.linspace(0, 1000, 101)
    sinusoid = Timesteps(width, flip_sin_to_cos=True, downscale_freq_shift=0)(t)
    assert torch.equal(timestep_embedding(t, width), sinusoid)
    assert torch.allclose(ours(t), theirs(sinusoid), atol=1e-6)

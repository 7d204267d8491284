"""Requests: what a model recommends, what is refused, and the nearest valid value."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion_engine import request
from diffusion_engine.request import SOLVERS, make_request

CONFIG = {"dit": {"patch": 4}, "vae": {"factor": 4}, "recommended": {"guidance_scale": 5.0, "height": 48, "width": 64}}


def test_names_of_solvers_are_the_schedulers():
    from diffusion_engine import scheduler

    assert set(SOLVERS) == set(scheduler.SOLVERS)


def test_a_request_takes_the_models_recommendations():
    request = make_request(CONFIG, "red apple")
    assert (request.guidance_scale, request.shift, request.height, request.width) == (5.0, 1.0, 48, 64)
    assert request.num_inference_steps == 28 and request.seeds == (0,) and request.negative_prompts == ()


def test_pictures_are_prompt_major():
    request = make_request(CONFIG, ["a", "b"], "no", seed=5, num_images_per_prompt=2)
    assert request.every_prompt == ["a", "a", "b", "b"] and request.seeds == (5, 6, 7, 8)
    assert request.every_negative == ["no"] * 4
    assert make_request(CONFIG, ["a", "b"], ["x", ""]).every_negative == ["x", ""]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_inference_steps": 0}, "try 1"),
        ({"num_inference_steps": -3}, "try 1"),
        ({"num_inference_steps": 2.5}, "try 2"),
        ({"num_inference_steps": True}, "whole number"),
        ({"num_inference_steps": 1001}, "try 1000"),
        ({"num_inference_steps": float("inf")}, "whole number"),
        ({"guidance_scale": float("nan")}, "finite"),
        ({"guidance_scale": float("inf")}, "finite"),
        ({"guidance_scale": -1}, "try 0"),
        ({"guidance_scale": "much"}, "number"),
        ({"seed": 2**64}, f"try {2**64 - 1}"),
        ({"seed": -1}, "try 0"),
        ({"seed": 0.5}, "64-bit"),
        ({"seed": None}, "64-bit"),
        ({"seed": 2**64 - 2, "num_images_per_prompt": 3}, f"try {2**64 - 3}"),
        ({"num_images_per_prompt": 0}, "try 1"),
        ({"num_images_per_prompt": 10**9}, "try 1000"),
        ({"solver": "eular"}, "did you mean euler"),
        ({"solver": 3}, "euler, heun, multistep"),
        ({"height": 70}, "try 64 or 80"),
        ({"height": 16}, "try 32"),
        ({"width": 144}, "try 128"),
        ({"width": 0}, "try 32"),
        ({"shift": 0}, "try 1"),
        ({"shift": float("nan")}, "finite"),
        ({"prompt": []}, "no prompt"),
        ({"prompt": 3}, "not text"),
        ({"prompt": ["a", None]}, "not text"),
        ({"prompt": "\udcff"}, "UTF-8"),
        ({"prompt": ["a", "b"], "negative_prompt": ["x"]}, "1 negative prompts for 2"),
        ({"negative_prompt": 5}, "not text"),
    ],
)
def test_bad_settings_are_refused_with_the_nearest_valid_value(settings, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        make_request(CONFIG, **({"prompt": "a"} | settings))


@given(st.integers(-(10**30), 10**30), st.integers(1, 50), st.integers(0, 1000))
def test_the_whole_number_that_an_error_suggests_is_valid(value, low, span):
    for given_as in (value, str(value), value + 0.5, float(value)):
        try:
            assert request.whole_number("n", given_as, low, low + span) == value
        except ValueError as error:
            near = int(str(error).rpartition("try ")[2])
            assert low <= near <= low + span


@given(st.integers(-200, 400))
def test_a_suggested_size_can_be_drawn(side):
    try:
        assert request.check_size("height", side, 16, 32, 128) == side and side % 16 == 0
    except ValueError as error:
        for near in re.findall(r"\d+", str(error).partition("try ")[2]):
            assert request.check_size("height", int(near), 16, 32, 128) == int(near)


def test_a_long_value_is_quoted_short():
    with pytest.raises(ValueError) as caught:
        make_request(CONFIG, "a", solver="x" * 500)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("prompt", [{"red", "blue"}, {"red": 1}, b"red", 3])
def test_prompts_are_a_text_or_a_list_of_texts(prompt):
    with pytest.raises(ValueError, match="nor a list of texts"):
        request.texts("prompt", prompt)

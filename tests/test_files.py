"""Requests, records, atomic writes, and a model folder damaged in every way."""

import json
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save, save_file

from diffusion_engine import files, model_folder, request
from diffusion_engine.files import check_output, read_record, save_picture, write_files
from diffusion_engine.model_folder import WEIGHTS, load_model
from diffusion_engine.request import SOLVERS, Request, make_request

CONFIG = {"dit": {"patch": 4}, "vae": {"factor": 4}, "recommended": {"guidance_scale": 5.0, "height": 48, "width": 64}}


def test_names_of_solvers_are_the_schedulers():
    from diffusion_engine import scheduler

    assert set(SOLVERS) == set(scheduler.SOLVERS)


# Requests


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


# Writing


def test_all_files_or_none(tmp_path):
    with pytest.raises(OSError):
        write_files({tmp_path / "a.png": b"1", tmp_path / "missing" / "b.png": b"2"})
    assert list(tmp_path.iterdir()) == []
    write_files({tmp_path / "a.png": b"1", tmp_path / "b.png": b"2"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_an_interrupt_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "a.png"
    target.write_bytes(b"old")
    monkeypatch.setattr(files.os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_files({target: b"new"})
    assert target.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["a.jpg", "a", "a.png.txt", ".png", ".", "missing/a.png"])
def test_outputs_that_cannot_be(tmp_path, name):
    with pytest.raises(ValueError):
        check_output(tmp_path / name, ".png")
    assert list(tmp_path.iterdir()) == []


def test_output_that_is_a_folder(tmp_path):
    (tmp_path / "a.png").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        check_output(tmp_path / "a.png", ".png")


def test_read_only_folder(tmp_path, monkeypatch):
    """The superuser may write anywhere, so the refusal itself is planted."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.Path, "open", refuse)
    with pytest.raises(ValueError, match="cannot be written"):
        check_output(tmp_path / "a.png", ".png")


def test_the_probe_leaves_nothing(tmp_path):
    check_output(tmp_path / "a.PNG", ".png")
    assert list(tmp_path.iterdir()) == []


# Records


def drawn(record) -> Image.Image:
    image = Image.new("RGB", (4, 4))
    image.info[files.RECORD] = record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)
    return image


def test_a_record_survives_the_file(tmp_path):
    request = make_request(CONFIG, ["戴帽子的猫", 'quotes " and \\ and \n'], "模糊", seed=2**64 - 9, guidance_scale=0.1)
    record = {"request": asdict(request), "index": 1, "model": "0" * 16}
    read = read_record(save_picture(drawn(record), tmp_path / "猫.png"))
    assert files.request_of(read) == request and read["index"] == 1


@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[]",
        "{}",
        {"request": {"prompts": ["a"]}},
        {"request": {"prompts": ["a"]}, "index": 1},
        {"request": {"prompts": []}, "index": 0},
        {"request": {"prompts": ["a"], "seed": "x"}, "index": 0},
        {"request": 3, "index": 0},
        "[" * 100_000,
    ],
)
def test_damaged_records(tmp_path, record):
    path = tmp_path / "a.png"
    path.write_bytes(files.png(drawn(record)))
    with pytest.raises(ValueError, match="damaged record"):
        read_record(path)


def test_many_threads_may_write_one_file(tmp_path):
    images = [Image.new("RGB", (64, 64), (i, 0, 0)) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda image: save_picture(image, tmp_path / "a.png"), images * 8))
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    with Image.open(tmp_path / "a.png") as image:
        assert image.getpixel((0, 0))[1:] == (0, 0)


@pytest.mark.parametrize("prompt", [{"red", "blue"}, {"red": 1}, b"red", 3])
def test_prompts_are_a_text_or_a_list_of_texts(prompt):
    with pytest.raises(ValueError, match="nor a list of texts"):
        request.texts("prompt", prompt)


def test_pictures_without_a_record(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.gif")
    (tmp_path / "b.png").write_bytes(b"no picture")
    (tmp_path / "c.png").write_bytes((tmp_path / "a.png").read_bytes()[:20])
    for name in ("a.png", "a.gif", "b.png", "c.png", "none.png", "."):
        with pytest.raises(ValueError, match="diffusion-engine wrote"):
            read_record(tmp_path / name)


# The model folder


def rewrite(folder, name, change):
    """Change the tensors of a file and make its hash right again: only the content is wrong."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)
    rehash(folder, name)


def rehash(folder, name):
    config = json.loads((folder / "config.json").read_text())
    config["sha256"][name] = files.sha256((folder / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(config))


def test_fp16_files_become_fp32_modules_without_a_random_number(tiny_model, tiny_parts):
    before = torch.get_rng_state()
    model = load_model(tiny_model)
    assert torch.equal(torch.get_rng_state(), before)
    for part in ("dit", "vae", "text_encoder"):
        ours, theirs = getattr(model, part).state_dict(), tiny_parts[part].state_dict()
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value.dtype == torch.float32 and torch.equal(value, theirs[name].half().float())


def test_an_untouched_copy_loads(tiny_model_folder, tiny_model):
    assert load_model(tiny_model_folder).fingerprint == load_model(tiny_model).fingerprint


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", *WEIGHTS.values()])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "one byte short", "one byte more", "folder", "garbage"])
def test_a_damaged_file_is_named(tiny_model_folder, name, damage):
    path = tiny_model_folder / name
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        forms = {
            "empty": b"",
            "half": data[: len(data) // 2],
            "one byte short": data[:-1],
            "garbage": b"\x07" * len(data),
        }
        path.write_bytes(forms.get(damage, data + b"}"))
    if (name, damage) == ("config.json", "one byte short"):
        return  # the last byte is a newline
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        load_model(tiny_model_folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [*WEIGHTS.values(), "tokenizer.json"])
def test_one_flipped_bit_is_seen(tiny_model_folder, name):
    data = bytearray((tiny_model_folder / name).read_bytes())
    place = data.rindex(b"a") if name == "tokenizer.json" else len(data) - 100
    data[place] ^= 2
    (tiny_model_folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{re.escape(name)} was altered"):
        load_model(tiny_model_folder)


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was opened')",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5, "torch"])
def test_a_pickle_is_never_opened(tiny_model_folder, protocol):
    path = tiny_model_folder / "dit.safetensors"
    if protocol == "torch":
        torch.save({"weight": torch.ones(3)}, path)
    else:
        path.write_bytes(pickle.dumps([Bomb()] * 3, protocol=protocol))
    with pytest.raises(ValueError, match="dit.safetensors is (a pickle|not a safetensors file)"):
        load_model(tiny_model_folder)


def test_a_pickle_beside_a_missing_file_is_mentioned(tiny_model_folder):
    (tiny_model_folder / "vae.safetensors").rename(tiny_model_folder / "vae.pt")
    with pytest.raises(ValueError, match=r"vae\.safetensors is missing; vae\.pt is a pickle"):
        load_model(tiny_model_folder)


def test_a_wrong_shape_names_the_tensor_also_when_the_hash_is_right(tiny_model_folder):
    def change(tensors):
        tensors["image_in.weight"] = torch.zeros(3, 3)

    rewrite(tiny_model_folder, "dit.safetensors", change)
    with pytest.raises(
        ValueError, match=r"dit\.safetensors does not fit config\.json: image_in\.weight has shape \[3, 3\]"
    ):
        load_model(tiny_model_folder)


def test_a_wrong_shape_comes_before_a_wrong_hash(tiny_model_folder):
    (tiny_model_folder / "vae.safetensors").write_bytes(save({"shift": torch.zeros(4)}))
    with pytest.raises(ValueError, match=r"vae\.safetensors lacks"):
        load_model(tiny_model_folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("image_in.bias"), "lacks 1 of"),
        (lambda t: t.update(extra=torch.zeros(1)), "has 1 tensors that the model lacks, extra"),
        (lambda t: t.update({"image_in.bias": t["image_in.bias"].to(torch.int32)}), "holds I32"),
        (lambda t: t.clear(), "lacks"),
    ],
)
def test_foreign_tensors(tiny_model_folder, change, says):
    rewrite(tiny_model_folder, "dit.safetensors", change)
    with pytest.raises(ValueError, match=says):
        load_model(tiny_model_folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("dit"),
        lambda c: c.update(dit=[]),
        lambda c: c["dit"].update(colour=3),
        lambda c: c["dit"].update(heads=0),
        lambda c: c["dit"].update(heads=5),
        lambda c: c["dit"].update(width="wide"),
        lambda c: c["vae"].update(width=-1),
        lambda c: c["text_encoder"].update(max_length=0),
        lambda c: c["text_encoder"].update(vocab_size=100),
        lambda c: c.pop("sha256"),
        lambda c: c["sha256"].pop("tokenizer.json"),
        lambda c: c["sha256"].update({"vae.safetensors": 7}),
        lambda c: c.update(sizes="large"),
        lambda c: c.update(sizes=[64, 32]),
        lambda c: c.update(recommended=[]),
        lambda c: c["recommended"].update(guidance_scale="strong"),
    ],
)
def test_a_wrong_configuration_is_named(tiny_model_folder, change):
    path = tiny_model_folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json|altered"):
        load_model(tiny_model_folder)


def test_no_folder():
    with pytest.raises(ValueError, match="does not exist"):
        load_model("/nowhere/at/all")


def test_looking_a_folder_over_finds_the_same_damage_without_loading(tiny_model_folder):
    assert model_folder.check_model_folder(tiny_model_folder)["recommended"]["guidance_scale"] == 3.0
    path = tiny_model_folder / "vae.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"vae\.safetensors is truncated"):
        model_folder.check_model_folder(tiny_model_folder)


def test_the_shipped_model(shipped_model):
    model = load_model()
    count = sum(p.numel() for part in model[:3] for p in part.parameters())
    size = sum(path.stat().st_size for path in shipped_model.iterdir())
    assert count > 5e6 and size < 31e6
    assert model.tokenizer.vocab_size <= model.text_encoder.config.vocab_size
    assert Request(prompts=("red apple",), guidance_scale=request.recommended(model.config)["guidance_scale"])

"""Atomic writes, outputs that cannot be, and records in pictures."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
from PIL import Image

from diffusion_engine import files
from diffusion_engine.files import check_output, read_record, save_picture, write_files
from diffusion_engine.request import make_request

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
    config = {"dit": {"patch": 4}, "vae": {"factor": 4}}
    request = make_request(config, ["戴帽子的猫", 'quotes " and \\ and \n'], "模糊", seed=2**64 - 9, guidance_scale=0.1)
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


def test_pictures_without_a_record(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.gif")
    (tmp_path / "b.png").write_bytes(b"no picture")
    (tmp_path / "c.png").write_bytes((tmp_path / "a.png").read_bytes()[:20])
    for name in ("a.png", "a.gif", "b.png", "c.png", "none.png", "."):
        with pytest.raises(ValueError, match="diffusion-engine wrote"):
            read_record(tmp_path / name)

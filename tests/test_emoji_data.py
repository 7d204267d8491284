"""The shipped emoji data set: that pictures and captions are right, and belong to each other."""

import json
import re
import shutil

import numpy as np
import pytest

from recipes import emoji_data
from recipes.emoji_data import ASSETS, CAPTIONS, IMAGES, EmojiData, load_emoji


@pytest.fixture(scope="module")
def emoji() -> EmojiData:
    return load_emoji()


@pytest.fixture(scope="module")
def index(emoji: EmojiData) -> dict[str, int]:
    return {record.label_en: i for i, record in enumerate(emoji.records)}


def test_shapes_and_size(emoji):
    assert emoji.images.shape == (1911, 64, 64, 3) and emoji.images.dtype == np.uint8
    assert len(emoji.records) == 1911
    assert emoji.images.flags.writeable and emoji.images.flags.c_contiguous
    assert sum(file.stat().st_size for file in ASSETS.iterdir()) <= 8_000_000


def test_the_background_is_white(emoji):
    corners = emoji.images[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 255).all()
    white = (emoji.images == 255).all(axis=-1).mean(axis=(1, 2))
    assert white.min() > 0.05 and white.max() < 0.95  # no picture is empty, none has lost its background


def test_over_white():
    rgba = np.array([[10, 20, 30, 0], [10, 20, 30, 255], [0, 0, 0, 128], [255, 255, 255, 77]], np.uint8)
    assert emoji_data.over_white(rgba).tolist() == [[255] * 3, [10, 20, 30], [127] * 3, [255] * 3]


def test_every_record_has_both_captions(emoji):
    for record in emoji.records:
        assert record.label_en.isascii() or re.search("[a-zA-Z]", record.label_en)
        assert record.label_zh and record.label_en != record.label_zh, record
        assert record.tags_en and record.tags_zh and all(record.tags_en) and all(record.tags_zh), record
    chinese = [bool(re.search("[\u4e00-\u9fff]", record.label_zh)) for record in emoji.records]
    assert np.mean(chinese) > 0.99
    for column in ("hexcode", "emoji", "label_en", "label_zh"):
        assert len({getattr(record, column) for record in emoji.records}) == 1911


def test_chinese_is_simplified(emoji):
    text = "".join(record.label_zh + "".join(record.tags_zh) for record in emoji.records)
    assert "红" in text and "龙" in text and "车" in text
    assert not set("紅龍車馬鳥魚臉貓頭門開關") & set(text)


def test_order_and_absence_of_skin_tones(emoji):
    orders = [record.order for record in emoji.records]
    assert orders == sorted(set(orders)) and emoji.records[0].label_en == "grinning face"
    toned = [record for record in emoji.records if re.search("-1F3F[B-F]", record.hexcode)]
    assert toned == []


@pytest.mark.parametrize(
    ("label", "label_zh", "strongest"),
    [
        ("red heart", "红心", 0),
        ("green heart", "绿心", 1),
        ("blue heart", "蓝心", 2),
        ("flag: Japan", "旗: 日本", 0),
        ("green circle", "绿色圆", 1),
    ],
)
def test_picture_and_caption_belong_together(emoji, index, label, label_zh, strongest):
    """A shift by one picture, or swapped colour channels, would show here."""
    i = index[label]
    assert emoji.records[i].label_zh == label_zh
    centre = emoji.images[i, 30:34, 30:34].mean(axis=(0, 1))
    others = np.delete(centre, strongest)
    assert centre[strongest] > others.max() + 40


def test_duplicates(emoji, index):
    """`same_as` against a slower form: np.unique over whole pictures."""
    flat = emoji.images.reshape(1911, -1)
    _, first, inverse = np.unique(flat, axis=0, return_index=True, return_inverse=True)
    assert [record.same_as for record in emoji.records] == first[inverse.ravel()].tolist()
    same_as = {label: emoji.records[i].same_as for label, i in index.items()}
    assert same_as["flag: Norway"] == same_as["flag: Svalbard & Jan Mayen"] == index["flag: Bouvet Island"]
    assert same_as["red heart"] == index["red heart"]


def test_first_equal():
    a, b = np.zeros((2, 64, 64, 3), np.uint8)
    b[63, 63, 2] = 1
    assert emoji_data.first_equal(np.stack([a, b, a, b, b])) == [0, 1, 0, 1, 1]


def test_kinds(emoji):
    clocks = {record.label_en for record in emoji.records if record.kind == "clock"}
    hours = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    assert clocks == {f"{hour} o’clock" for hour in hours} | {f"{hour}-thirty" for hour in hours}
    flags = {record.label_en for record in emoji.records if record.kind == "flag"}
    assert flags == {record.label_en for record in emoji.records if record.group == "flags"}
    pairs = {record.label_en for record in emoji.records if re.fullmatch("[\U0001f1e6-\U0001f1ff]{2}", record.emoji)}
    assert len(flags) == 270 and len(pairs) == 259 and pairs < flags


def test_loader_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"images\.webp is missing.*python -m recipes\.emoji_data"):
        load_emoji(tmp_path)
    shutil.copy(ASSETS / IMAGES, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"captions\.json is missing"):
        load_emoji(tmp_path)
    captions = json.loads((ASSETS / CAPTIONS).read_text(encoding="utf-8"))
    captions["records"].pop()
    (tmp_path / CAPTIONS).write_text(json.dumps(captions), encoding="utf-8")
    with pytest.raises(ValueError, match="does not hold the pictures"):
        load_emoji(tmp_path)


def test_a_sheet_that_is_too_small():
    sheet = emoji_data.encode_sheet(np.zeros((2, 64, 64, 3), np.uint8), columns=1)
    with pytest.raises(ValueError, match="64×128 pixels cannot hold 3 pictures"):
        emoji_data.split_sheet(sheet, 3)


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (5, 3), (6, 3)])
def test_the_sheet_is_lossless_and_deterministic(count, columns):
    images = np.random.default_rng(0).integers(0, 256, (count, 64, 64, 3), dtype=np.uint8)
    sheet = emoji_data.encode_sheet(images, columns)
    assert np.array_equal(emoji_data.split_sheet(sheet, count), images)
    assert emoji_data.encode_sheet(images, columns) == sheet


def test_a_corrupt_download_is_refused(tmp_path):
    package = emoji_data.CAPTIONS_PACKAGE
    (tmp_path / package.tarball).write_bytes(b"not a package")
    with pytest.raises(ValueError, match="has SHA-256 .* expected d01d0e2c"):
        emoji_data.fetch_package(package, tmp_path)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(emoji_data.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        emoji_data.write_atomic(target, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and target.read_bytes() == b"old"


def test_the_shipped_files_come_from_the_packages(emoji):
    """Where the tarballs are cached: building again gives the shipped records and pixels."""
    tarballs = [emoji_data.CACHE / p.tarball for p in (emoji_data.PICTURES_PACKAGE, emoji_data.CAPTIONS_PACKAGE)]
    if not all(tarball.is_file() for tarball in tarballs):
        pytest.skip("the npm tarballs are not in the cache")
    again = emoji_data.collect(*tarballs)
    assert np.array_equal(again.images, emoji.images)
    assert emoji_data.encode_captions(again) == (ASSETS / CAPTIONS).read_bytes()

"""The clip data: what the seven rules do to a picture, the drawn clips as they ship, and captions in both languages."""

import json
import shutil

import numpy as np
import pytest
import torch

from recipes.clip_data import (
    ANIMATED,
    ASSETS,
    FRAMES,
    LIST,
    MOTIONS,
    SHEET,
    SIZE,
    STILLS,
    Clip,
    as_floats,
    caption,
    clip_data,
    clips_of,
    key_of,
    load_animated,
    render,
    to_bytes,
)
from recipes.emoji_data import join_key, load_emoji

RULES = {motion.name: motion for motion in MOTIONS}


def ink(name: str) -> torch.Tensor:
    """A black square in the middle of white, moved: ink per pixel, (T, H, W)."""
    picture = torch.ones(1, 3, 64, 64)
    picture[..., 20:44, 20:44] = -1
    return (1 - render(picture, RULES[name])[0, 0]) / 2


def centre(frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of the ink's centre, frame by frame."""
    mass, axis = frames.sum(dim=(1, 2)), torch.arange(SIZE) + 0.5
    return (frames.sum(dim=2) @ axis) / mass, (frames.sum(dim=1) @ axis) / mass


@pytest.mark.parametrize(("name", "rows", "columns"), [("left", 0, -9), ("right", 0, 9), ("up", -9, 0)])
def test_what_moves_moves_that_way(name, rows, columns):
    row, column = centre(ink(name))
    assert abs(row[-1] - row[0] - rows) < 0.4 and abs(column[-1] - column[0] - columns) < 0.4
    steps = (column if columns else row).diff()
    assert torch.allclose(steps, steps.mean().expand(FRAMES - 1), atol=0.3)  # at one speed, up to sampling


def test_what_stays_stays():
    for name in ("spin", "zoom", "blink"):
        row, column = centre(ink(name))
        assert (row - SIZE / 2).abs().max() < 0.1 and (column - SIZE / 2).abs().max() < 0.1


def test_bounce_zoom_and_blink():
    row, _ = centre(ink("bounce"))
    assert (
        row.argmin() in (4, 12) and abs(row[4] - row[12]) < 0.1 and row[0] > row[4] + 8 and abs(row[8] - row[0]) < 0.4
    )
    sizes = ink("zoom").sum(dim=(1, 2)).sqrt()
    assert (sizes.diff() >= 0).all() and 2.5 < sizes[-1] / sizes[0] < 3.2
    brightness = ink("blink").amax(dim=(1, 2))
    assert brightness[0] > 0.95 and brightness[4] < 0.2 and abs(brightness[8] - brightness[0]) < 0.01


def test_spin_is_one_turn_clockwise():
    picture = torch.ones(1, 3, 64, 64)
    picture[..., 8:20, 28:36] = -1  # a mark at the top
    row, column = centre((1 - render(picture, RULES["spin"])[0, 0]) / 2)
    assert row[0] < 12 and column[4] > 20 and row[8] > 20 and column[12] < 12 and abs(row[16] - row[0]) < 0.1


def test_the_whole_data_set():
    clips, told = clip_data()
    assert len(clips) == len(told) == 7 * len(STILLS) + len(ANIMATED) and clips.dtype == torch.uint8
    assert clips.shape[1:] == (3, FRAMES, SIZE, SIZE)
    assert len({(clip.record.hexcode, clip.motion) for clip in told}) == len(told)
    assert torch.equal(to_bytes(as_floats(clips[:3])), clips[:3])
    row = next(i for i, c in enumerate(told) if c.motion == "spin" and join_key(c.record.hexcode) == key_of("🐱"))
    assert torch.equal(clips[row], clips_of(["🐱"], ["spin"])[0])
    assert set(ANIMATED) <= set(STILLS) and len(set(STILLS)) == len(STILLS)


def test_captions():
    records = load_emoji().records
    cat = next(r for r in records if r.label_en == "cat face")
    spin, drawn = Clip(cat, "spin"), Clip(cat, "animated")
    assert [caption(spin, "en"), caption(spin, "en", 1)] == ["cat face, spinning", "spinning cat face"]
    assert [caption(spin, "zh"), caption(spin, "zh", 1)] == ["猫脸，旋转", "旋转的猫脸"]
    assert caption(drawn, "en") == "cat face, animated"


def test_the_drawn_clips_are_whole(tmp_path):
    clips, hexcodes = load_animated()
    assert clips.shape == (len(ANIMATED), FRAMES, SIZE, SIZE, 3) and hexcodes == [key_of(e) for e in ANIMATED]
    assert all(np.abs(np.diff(clip.astype(int), axis=0)).sum() > 0 for clip in clips)  # each of them moves
    folder = shutil.copytree(ASSETS, tmp_path / "clips")
    listed = json.loads((folder / LIST).read_text())
    (folder / LIST).write_text(json.dumps(listed | {"hexcodes": listed["hexcodes"][1:]}))
    with pytest.raises(ValueError, match="does not hold the clips"):
        load_animated(folder)
    (folder / SHEET).unlink()
    with pytest.raises(FileNotFoundError, match="build it with"):
        load_animated(folder)

"""Clips on the site: files of their own, playing on the screen, their first frame on paper."""

import re
from pathlib import Path

import torch
from PIL import Image
from small_site import code, foreign, small_site

from course.clips import frames_of, markup, sheets
from course.site import build_site


def test_a_clip_plays_from_a_file_and_prints_its_first_frame(tmp_path):
    clip = torch.rand(3, 5, 8, 8, generator=torch.Generator().manual_seed(0))
    html = markup(sheets([frames_of(clip)], None, None, 16), "Five frames of noise", 90)
    small_site(tmp_path, code("01-x-01", "play([clip])", foreign(html)))
    build_site(tmp_path)
    text = (tmp_path / "site" / "build" / "en" / "01_small.html").read_text(encoding="utf-8")
    assert "base64" not in text and text.count('alt="Five frames of noise"') == 2
    moving = re.search(r'class="clip-moving" src="([^"]+)"', text).group(1)
    still = re.search(r'class="clip-still" hidden src="([^"]+)"', text).group(1)
    folder = tmp_path / "site" / "build" / "en"
    with Image.open(folder / moving) as a, Image.open(folder / still) as b:
        assert a.n_frames == 5 and getattr(b, "n_frames", 1) == 1 and a.size == b.size
    styles = (Path(__file__).resolve().parents[2] / "site" / "assets" / "site.css").read_text(encoding="utf-8")
    rule = styles[styles.index("@media print, (prefers-reduced-motion: reduce)") :].partition("\n}")[0]
    assert ".clip-moving { display: none" in rule and ".clip-still { display: block" in rule

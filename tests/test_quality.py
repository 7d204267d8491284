"""The measures behind the model card, on data whose right answer is known."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipes import quality
from recipes.emoji_data import EmojiRecord
from recipes.model_card import render


def record(index: int, kind: str = "other", same_as: int | None = None) -> EmojiRecord:
    return EmojiRecord(
        f"{index:x}",
        "x",
        index,
        "g",
        kind,
        f"label {index}",
        f"标签 {index}",
        [],
        [],
        index if same_as is None else same_as,
    )


def test_psnr_is_the_textbook_one():
    pictures = np.full((3, 8, 8, 3), 100, np.uint8)
    others = pictures.copy()
    others[1] += 10  # mean squared difference 100
    others[2, :4] += 20  # half of it differs by 20: 200
    found = quality.decibels(pictures, others)
    assert found[0] == pytest.approx(100)  # the cap: equal
    assert np.allclose(found[1:], [10 * np.log10(255**2 / 100), 10 * np.log10(255**2 / 200)], atol=1e-3)


def test_psnr_does_not_wrap_around():
    """In uint8, 0 − 255 is 1: the plain difference would call black and white alike."""
    black, white = np.zeros((1, 4, 4, 3), np.uint8), np.full((1, 4, 4, 3), 255, np.uint8)
    assert quality.decibels(black, white)[0] == pytest.approx(0, abs=1e-3)


def test_the_nearest_is_euclidean_and_in_order():
    bank = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    distances, places = quality.ranking(torch.tensor([[0.0, 1.0]]), bank, top=3)
    assert places.tolist() == [[0, 1, 2]]
    assert torch.allclose(distances, torch.tensor([[1.0, 10**0.5, 4.0]], dtype=torch.float64))


def test_a_perfect_model_scores_one_and_a_shifted_one_nothing():
    records = [record(0), record(1, "flag"), record(2, "clock"), record(3)]
    bank = torch.eye(4).reshape(4, 1, 2, 2)
    perfect = quality.retrieval(bank, records, bank, records, "label_en")
    assert [perfect[kind]["top1"] for kind in ("all", "other", "flag", "clock")] == [1, 1, 1, 1]
    assert perfect["all"]["count"] == 4 and not perfect["misses"]
    shifted = quality.retrieval(bank.roll(1, 0), records, bank, records, "label_zh")
    assert shifted["all"]["top1"] == 0 and shifted["all"]["top5"] == 1  # four pictures: the right one is among five
    assert ["标签 0", "标签 3"] in shifted["misses"]


def test_a_pixel_identical_picture_counts_and_takes_one_place():
    records = [record(0), record(1, same_as=0), *(record(i) for i in range(2, 9))]
    bank = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    bank[1] = bank[0]
    found = quality.retrieval(bank[1:2], records[1:2], bank, records, "label_en")
    assert found["all"]["top1"] == 1 and found["right_through_a_pixel_identical_picture"] == 1
    far = torch.full((1, 2), 50.0)  # ranks are over distinct pictures
    _, places = quality.ranking(far, bank[[0, *range(2, 9)]])
    assert len(set(places[0].tolist())) == quality.TOP


def test_a_flag_taken_for_another_flag_is_wrong_but_a_flag():
    records = [record(0, "flag"), record(1, "flag"), record(2)]
    bank = torch.eye(3)
    found = quality.retrieval(bank[[1]], records[:1], bank, records, "label_en")
    assert found["flag"]["top1"] == 0 and found["right_kind"] == {"flag": 1.0}


def test_a_limit_spreads_over_the_data():
    records = [record(i) for i in range(100)]
    assert [r.order for r in quality.chosen_records(records, 4)] == [0, 25, 50, 75]
    assert quality.chosen_records(records, None) == quality.chosen_records(records, 1_000) == records
    with pytest.raises(Exception, match="--limit 0"):
        quality.chosen_records(records, 0)


class FakeEngine:
    """Answers each prompt with its own latents, and notes what it was asked."""

    def __init__(self, answers: dict[str, torch.Tensor]):
        self.answers, self.calls = answers, []

    def __call__(self, prompts, **options):
        self.calls.append((list(prompts), options))
        return SimpleNamespace(latents=torch.stack([self.answers[prompt] for prompt in prompts]))


def test_every_label_is_drawn_once_in_order_from_the_noise_of_seed_0():
    answers = {f"label {i}": torch.full((4, 2, 2), float(i)) for i in range(7)}
    engine = FakeEngine(answers)
    drawn = quality.draw_latents(engine, list(answers), (4, 2, 2), batch=3, name="en")
    assert drawn[:, 0, 0, 0].tolist() == list(range(7))
    assert [len(prompts) for prompts, _ in engine.calls] == [3, 3, 1]
    seed_0 = quality.initial_noise([0], (4, 2, 2))[0]
    for prompts, options in engine.calls:
        assert options["num_inference_steps"] == 28 and len(options["latents"]) == len(prompts)
        assert all(torch.equal(noise, seed_0) for noise in options["latents"])


def made_up(top1: float) -> tuple[dict, dict, dict]:
    """A config, a quality report and a training log with all that the card reads."""
    row = {"count": 1911, "right": 1, "top1": top1, "top5": 0.99}
    scores = {kind: row for kind in ("all", *quality.KINDS)}
    scores |= {"right_through_a_pixel_identical_picture": 7, "right_kind": {"flag": 0.98, "clock": 0.97}}
    report = {
        "settings": {"steps": 28, "guidance": 4.0, "seed": 0, "labels": 1911},
        "vae": {"mean_psnr_db": 33.21, "fifth_percentile_db": 28.5, "worst_db": 20.1, "worst_picture": "map of Japan"},
        "retrieval": {"en": scores, "zh": scores},
        "unseen": [{"prompt": "戴帽子的猫", "is_a_label_of_the_data": False, "nearest": ["cat", "top hat"]}],
    }
    part = {"name": "VAE", "what": {"en": "L1", "zh": "L1"}, "seed": 0, "steps": 2000, "batch": 32, "hours": 1.5}
    training = {
        "parts": [part | {"parameters": 1_180_000, "curve": [[1, 0.5], [2000, 0.03]]}],
        "tried": [{"en": "E.", "zh": "中。"}],
    }
    return {"sha256": {"vae.safetensors": "ab" * 32}, "recommended": {}}, report, training


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_card_tells_the_numbers_and_admits_a_miss(language):
    good, bad = render(language, *made_up(0.956)), render(language, *made_up(0.5))
    for piece in ("33.21 dB", "95.6%", "戴帽子的猫", "cat, top hat", "1.18 M", "98.0% / 98.0%", "ab" * 8):
        assert piece in good, piece
    assert "{" not in good
    missed = {"en": "**not met**", "zh": "**未达到**"}[language]
    assert missed not in good and bad.count(missed) == 2


def test_the_bars_are_the_promised_ones():
    _, report, _ = made_up(0.76)
    assert quality.passed(json.loads(json.dumps(report))) == {"vae_psnr_db": True, "en": False, "zh": True}

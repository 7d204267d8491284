"""The clip model's card, in English and Chinese, rendered from what was measured: no number in it is typed by hand.

    python -m recipes.clip_card

It reads ``config.json``, ``quality.json`` (`recipes.clip_quality`) and ``training.json`` (`recipes.train_clip`) in
``diffusion_engine/assets/clip_model/`` and writes ``MODEL_CARD.md``, ``MODEL_CARD.zh.md`` and ``training.png`` beside them.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from diffusion_engine.files import read_header, write_files
from diffusion_engine.model_folder import CLIP_WEIGHTS, SHIPPED_CLIP_MODEL
from recipes.clip_quality import BARS, LANGUAGES
from recipes.model_card import NAMES, YES, curves, recipe, tried

MOTION_NAMES = {
    "en": {n: n for n in ("left", "right", "up", "bounce", "spin", "zoom", "blink")},
    "zh": {
        "left": "向左",
        "right": "向右",
        "up": "向上",
        "bounce": "弹跳",
        "spin": "旋转",
        "zoom": "放大",
        "blink": "闪烁",
    },
}


def bars(quality: dict, language: str) -> str:
    """The bars, what was measured, and whether each is met."""
    psnr, words = quality["vae"]["mean_psnr_db"], {"en": ("emoji", "motion"), "zh": ("表情", "动作")}[language]
    met = YES[language][psnr >= BARS["vae_psnr_db"]]
    rows = [f"| VAE PSNR | {BARS['vae_psnr_db']:.0f} dB | {psnr:.2f} dB | {met} |"]
    for key, word in zip(("emoji", "motion"), words):
        for prompts in LANGUAGES:
            rate = quality["retrieval"][prompts][key]
            name = f"{word}, {NAMES[language][prompts]}" if language == "en" else f"{word}，{NAMES[language][prompts]}"
            rows.append(f"| {name} | {BARS[key]:.0%} | {rate:.1%} | {YES[language][rate >= BARS[key]]} |")
    return "\n".join(rows)


def motions(quality: dict, language: str) -> str:
    """One row a motion: share of right emoji and right motions, both languages together."""
    rows = []
    for name, shown in MOTION_NAMES[language].items():
        found = [quality["retrieval"][prompts]["by_motion"][name] for prompts in LANGUAGES]
        count = sum(f["count"] for f in found)
        emoji, motion = (sum(f[key] * f["count"] for f in found) / count for key in ("emoji", "motion"))
        rows.append(f"| {shown} | {count} | {emoji:.1%} | {motion:.1%} | {quality['vae']['by_motion'][name]:.1f} dB |")
    return "\n".join(rows)


def render(language: str, folder: Path, config: dict, quality: dict, training: dict) -> str:
    """The card of one language."""
    best, data, vae, smooth = config["recommended"], quality["data"], quality["vae"], quality["smoothness"]
    headers = [read_header(folder / name) for name in CLIP_WEIGHTS.values()]
    values = {
        "parameters": f"{sum(_count(h) for h in headers) / 1e6:.1f}",
        "megabytes": f"{sum((folder / name).stat().st_size for name in CLIP_WEIGHTS.values()) / 1e6:.1f}",
        "guidance": f"{best['guidance_scale']:g}",
        "steps": best["num_inference_steps"],
        **{name: data[name] for name in ("clips", "stills", "motions", "drawn")},
        "recipe": recipe(training, language),
        "tried": tried(training, language),
        "hours": f"{sum(part['hours'] for part in training['parts']):.1f}",
        "measured_steps": quality["settings"]["steps"],
        "seed": quality["settings"]["seed"],
        "bars": bars(quality, language),
        "by_motion": motions(quality, language),
        "both_en": f"{quality['retrieval']['en']['both']:.1%}",
        "both_zh": f"{quality['retrieval']['zh']['both']:.1%}",
        "drawn_en": f"{quality['drawn_clips']['en']['emoji']:.1%}",
        "drawn_zh": f"{quality['drawn_clips']['zh']['emoji']:.1%}",
        "psnr_low": f"{vae['fifth_percentile_db']:.1f}",
        "psnr_worst": f"{vae['worst_db']:.1f}",
        "worst_clip": vae["worst_clip"],
        "step": smooth["drawn"]["step"],
        "step_data": smooth["data"]["step"],
        "jerk": smooth["drawn"]["jerk"],
        "jerk_data": smooth["data"]["jerk"],
        "hashes": "\n".join(f"| `{name}` | `{value[:16]}…` |" for name, value in config["sha256"].items()),
    }
    return CARDS[language].format(**values)


def _count(header: dict) -> int:
    total = 0
    for entry in header.values():
        size = 1
        for side in entry["shape"]:
            size *= side
        total += size
    return total


CARDS = {
    "en": """\
<!-- Rendered by recipes/clip_card.py from config.json, quality.json and training.json. Do not edit. -->

# The shipped text-to-clip model

English · [中文](MODEL_CARD.zh.md)

A small model that draws clips of 17 frames, 32×32 pixels, from English and Chinese text on two CPU cores. It exists to be read: every
part is a chapter of the course, and every number below was measured by a script of this repository.

It **memorises**: it was trained on {clips} clips and is measured on the captions of the same clips.

## What it is

{parameters} M parameters, {megabytes} MB in fp16: a causal video VAE (17×32×32×3 ↔ 5×8×8×8, time and space by 4, the first frame alone), a
refiner of one block over the picture model's frozen text encoder (which it needs beside it), and a rectified-flow diffusion
transformer over 20 video tokens with three-axis rotary positions, full attention, and text through cross-attention, as in Wan.
Recommended: {steps} steps, guidance {guidance}.

## Data and licence

- Procedural clips: {stills} still emoji (Noto Emoji by Google, Apache-2.0), each moved by {motions} rules: left, right, up, bounce, spin, zoom,
  blink. They are rendered when needed (`recipes/clip_data.py`).
- Drawn clips: {drawn} animations of Fluent Emoji by Microsoft (MIT), npm `@lobehub/fluent-emoji-anim-1` and `-2`, 17 frames of each.
- Captions: npm `emojibase-data@17.0.0` (MIT), text from Unicode CLDR (Unicode License), with the words of the motion.
- Weights: Apache-2.0, like this repository. No other data and no other weights were used.

## How it was trained

| part | parameters | what | seed | steps | batch | hours | last loss |
| --- | --- | --- | --- | --- | --- | --- | --- |
{recipe}

{hours} hours in all, on shared CPU cores. `recipes/train_clip.py` repeats it.

![Loss against steps for every part](training.png)

**Tried on the way:**

{tried}

## How good it is

`python -m recipes.clip_quality`: every still once in each language, the seven motions in turn, {measured_steps} steps, seed {seed}. The nearest of all {clips} clips
in the VAE's latent space answers: is it this emoji, is it this motion?

| | bar | measured | |
| --- | --- | --- | --- |
{bars}

| motion | captions | emoji right | motion right | VAE |
| --- | --- | --- | --- | --- |
{by_motion}

Both right at once: {both_en} in English, {both_zh} in Chinese. Captions of drawn clips give the right emoji in {drawn_en} (English) and {drawn_zh}
(Chinese) of cases.

Smoothness, values in −1…1: neighbouring frames differ by {step} on average (the data: {step_data}), their differences by {jerk} (the data: {jerk_data}).

The VAE alone: 95 % of the clips come back at {psnr_low} dB or better; the worst is "{worst_clip}" at {psnr_worst} dB.

## Limits

- 17 frames of 32×32, one thing on white. Other lengths and sizes can be asked for, but it was never trained on them.
- {stills} emoji and seven motions; other words are spelled in pieces that it may never have seen.
- A caption without a motion leaves the motion to the seed.

## Files

| file | SHA-256 |
| --- | --- |
{hashes}
""",
    "zh": """\
<!-- 由 recipes/clip_card.py 根据 config.json、quality.json 和 training.json 生成，不要手改。 -->

# 自带的文生短片模型

[English](MODEL_CARD.md) · 中文

一个小模型：给它中文或英文，它在两个 CPU 核上画出 17 帧、32×32 像素的短片。它是拿来读的：每个部件都是课程的一章，下面每个数都由仓库里的脚本测出来。

它在**背书**：训练用了 {clips} 段短片，测的也是这些短片自己的说明。

## 它是什么

共 {parameters} M 参数，fp16 占 {megabytes} MB：一个因果视频 VAE（17×32×32×3 ↔ 5×8×8×8，时间、空间各缩 4 倍，第一帧独占一帧）；一个单块的精炼器，接在图像模型冻结的文本编码器后面（缺了它不能用）；一个整流流扩散变换器，处理 20 个视频词元，三轴旋转位置编码，全注意力，文本像 Wan 那样从交叉注意力进来。建议设置：{steps} 步，引导强度 {guidance}。

## 数据与许可

- 按规则动的短片：{stills} 个静止的表情（Google 的 Noto Emoji，Apache-2.0），每个按 {motions} 条规则移动：向左、向右、向上、弹跳、旋转、放大、闪烁；用时现画（`recipes/clip_data.py`）。
- 人画的短片：{drawn} 段微软 Fluent Emoji 的动画（MIT），npm `@lobehub/fluent-emoji-anim-1` 与 `-2`，各取 17 帧。
- 说明：npm `emojibase-data@17.0.0`（MIT）的标签，文字来自 Unicode CLDR（Unicode License），再加上动作的词。
- 权重：Apache-2.0，和本仓库相同。没有用过别的数据，也没有用过别人的权重。

## 怎样训练的

| 部件 | 参数 | 做了什么 | 种子 | 步数 | 批 | 小时 | 最后的损失 |
| --- | --- | --- | --- | --- | --- | --- | --- |
{recipe}

合计 {hours} 小时，与别人共用的 CPU 核。`recipes/train_clip.py` 能重做一遍。

![每个部件的损失随步数的变化](training.png)

**路上试过的：**

{tried}

## 画得怎么样

`python -m recipes.clip_quality`：每种语言把每个静止的表情画一次，七种动作轮流，{measured_steps} 步，种子 {seed}。在 VAE 的潜空间里，从全部 {clips} 段中找最近的一段：是这个表情吗？是这个动作吗？

| | 及格线 | 实测 | |
| --- | --- | --- | --- |
{bars}

| 动作 | 说明数 | 表情对 | 动作对 | VAE |
| --- | --- | --- | --- | --- |
{by_motion}

两样同时对：英文 {both_en}，中文 {both_zh}。人画的短片，说明画出对的表情：英文 {drawn_en}，中文 {drawn_zh}。

平滑程度（数值在 −1…1）：相邻两帧平均差 {step}（数据自己是 {step_data}），这些差之间又差 {jerk}（数据自己是 {jerk_data}）。

只看 VAE：95 % 的短片还原后不低于 {psnr_low} dB；最差的是「{worst_clip}」，{psnr_worst} dB。

## 它的边界

- 17 帧、32×32 像素，白底上的一件东西。可以要别的长度和尺寸，但它没有在那上面训练过。
- {stills} 个表情，七种动作；别的词会被拆成几片，这些片它也许没见过。
- 说明里没写动作，动作就由种子决定。

## 文件

| 文件 | SHA-256 |
| --- | --- |
{hashes}
""",
}


def main(folder: Annotated[Path, typer.Option(help="the clip model's folder")] = SHIPPED_CLIP_MODEL) -> None:
    """Render both cards and the curves."""
    config, quality, training = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("config", "quality", "training")
    )
    files = {
        folder / "MODEL_CARD.md": render("en", folder, config, quality, training).encode(),
        folder / "MODEL_CARD.zh.md": render("zh", folder, config, quality, training).encode(),
        folder / "training.png": curves(training),
    }
    write_files(files)
    for path in files:
        typer.echo(f"{path}")


if __name__ == "__main__":
    typer.run(main)

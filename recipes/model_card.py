"""The model card, in English and Chinese, rendered from what was measured: no number in it is typed by hand.

    python -m recipes.model_card

It reads, in ``diffusion_engine/assets/model/``:

* ``config.json``: sizes, recommended settings, hashes;
* ``quality.json``, from `recipes.quality`;
* ``training.json``, the log of the recipes: ``{"parts": [{"name", "what", "seed", "steps", "batch", "hours", "parameters",
  "curve": [[step, loss], …]}, …], "tried": [{"en", "zh"}, …]}``; each entry of ``tried`` is one sentence on what was tried.

and writes ``MODEL_CARD.md``, ``MODEL_CARD.zh.md`` and ``training.png`` (the curves) beside them. Rendering twice changes no byte.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from diffusion_engine.files import write_files
from diffusion_engine.model_folder import SHIPPED_MODEL
from diffusion_engine.request import recommended
from recipes.quality import BARS, KINDS, LANGUAGES

NAMES = {
    "en": {
        "en": "English",
        "zh": "Chinese",
        "all": "all",
        "other": "other pictures",
        "flag": "flags",
        "clock": "clock faces",
    },
    "zh": {"en": "英文", "zh": "中文", "all": "全部", "other": "其余图片", "flag": "旗帜", "clock": "钟面"},
}
YES = {"en": {True: "met", False: "**not met**"}, "zh": {True: "达到", False: "**未达到**"}}


def scores(quality: dict, language: str) -> str:
    """The retrieval table: one row a prompt language and kind."""
    names, rows = NAMES[language], []
    for prompts in LANGUAGES:
        found = quality["retrieval"][prompts]
        for kind in ("all", *KINDS):
            if kind in found:
                row = found[kind]
                rows.append(
                    f"| {names[prompts]} | {names[kind]} | {row['count']} | {row['top1']:.1%} | {row['top5']:.1%} |"
                )
    return "\n".join(rows)


def bars(quality: dict, language: str) -> str:
    """The three bars, what was measured, and whether each is met."""
    names, rows = NAMES[language], []
    psnr = quality["vae"]["mean_psnr_db"]
    rows.append(
        f"| VAE PSNR | {BARS['vae_psnr_db']:.0f} dB | {psnr:.2f} dB | {YES[language][psnr >= BARS['vae_psnr_db']]} |"
    )
    for prompts in LANGUAGES:
        rate = quality["retrieval"][prompts]["all"]["top1"]
        rows.append(f"| {names[prompts]} | {BARS[prompts]:.0%} | {rate:.1%} | {YES[language][rate >= BARS[prompts]]} |")
    return "\n".join(rows)


def unseen(quality: dict, language: str) -> str:
    """What prompts outside the labels came closest to."""
    yes, no = ("yes", "no") if language == "en" else ("是", "否")
    rows = []
    for entry in quality["unseen"]:
        nearest = ", ".join(entry["nearest"])
        rows.append(f"| {entry['prompt']} | {yes if entry['is_a_label_of_the_data'] else no} | {nearest} |")
    return "\n".join(rows)


def recipe(training: dict, language: str) -> str:
    """One row a trained part."""
    rows = []
    for part in training["parts"]:
        final = f"{part['curve'][-1][1]:.4g}" if part.get("curve") else "–"
        what = part["what"][language] if isinstance(part["what"], dict) else part["what"]
        cells = (
            part["name"],
            f"{part['parameters'] / 1e6:.2f} M",
            what,
            part["seed"],
            f"{part['steps']:,}",
            part["batch"],
        )
        rows.append(f"| {' | '.join(map(str, cells))} | {part['hours']:.1f} | {final} |")
    return "\n".join(rows)


def tried(training: dict, language: str) -> str:
    """What was tried, a sentence each."""
    return "\n".join(f"- {entry[language]}" for entry in training.get("tried", [])) or "–"


def render(language: str, config: dict, quality: dict, training: dict) -> str:
    """The card of one language."""
    best, settings, vae = recommended(config), quality["settings"], quality["vae"]
    values = {
        "parameters": f"{sum(part['parameters'] for part in training['parts']) / 1e6:.1f}",
        "guidance": f"{best['guidance_scale']:g}",
        "shift": f"{best['shift']:g}",
        "steps": best.get("num_inference_steps", settings["steps"]),
        "recipe": recipe(training, language),
        "tried": tried(training, language),
        "hours": f"{sum(part['hours'] for part in training['parts']):.1f}",
        "labels": settings["labels"],
        "measured_steps": settings["steps"],
        "seed": settings["seed"],
        "measured_guidance": f"{settings['guidance']:g}",
        "bars": bars(quality, language),
        "scores": scores(quality, language),
        "unseen": unseen(quality, language),
        "psnr_low": f"{vae['fifth_percentile_db']:.1f}",
        "psnr_worst": f"{vae['worst_db']:.1f}",
        "psnr_worst_picture": vae["worst_picture"],
        "twins": quality["retrieval"]["en"]["right_through_a_pixel_identical_picture"],
        "flag_kind": _share(quality, "flag"),
        "clock_kind": _share(quality, "clock"),
        "hashes": "\n".join(f"| `{name}` | `{value[:16]}…` |" for name, value in config["sha256"].items()),
    }
    return CARDS[language].format(**values)


def _share(quality: dict, kind: str) -> str:
    """How often a drawing of this kind came out as a picture of this kind, English and Chinese."""
    shares = [quality["retrieval"][prompts]["right_kind"].get(kind) for prompts in LANGUAGES]
    return " / ".join("–" if share is None else f"{share:.1%}" for share in shares)


def curves(training: dict) -> bytes:
    """The loss curves of all parts side by side, as a PNG."""
    import matplotlib.pyplot as plt

    from course.figures import png

    parts = [part for part in training["parts"] if part.get("curve")]
    fig, axes = plt.subplots(1, max(1, len(parts)), figsize=(3.2 * max(1, len(parts)), 2.6), squeeze=False)
    for ax, part in zip(axes.flat, parts):
        steps, losses = zip(*part["curve"])
        ax.plot(steps, losses)
        ax.set(title=f"{part['name']}: {losses[0]:.3g} → {losses[-1]:.3g}", xlabel="step", ylabel="loss", yscale="log")
    data = png(fig)
    plt.close(fig)
    return data


CARDS = {
    "en": """\
<!-- Rendered by recipes/model_card.py from config.json, quality.json and training.json. Do not edit. -->

# The shipped text-to-image model

English · [中文](MODEL_CARD.zh.md)

A small model that draws 64×64 emoji from English and Chinese text on two CPU cores. It exists to be read: every part is a chapter
of the course, and every number below was measured by a script of this repository.

It **memorises**. It was trained on 1,911 pictures and is measured on the captions of the same pictures. Nothing here says that it
can draw what it has not seen, and the section on unseen prompts shows that mostly it cannot.

## What it is

{parameters} M parameters in three parts: a convolutional VAE (64×64×3 ↔ 16×16×4), a text encoder over a byte-level BPE of the captions, and a
rectified-flow diffusion transformer (joint blocks as in SD3, then parallel blocks as in FLUX) over 16 image tokens. Weights are fp16
safetensors and are computed with in fp32. Recommended: {steps} steps, guidance {guidance}, shift {shift}.

## Data and licence

- Pictures: Noto Emoji by Google, Apache-2.0 (npm `emoji-datasource-google@16.0.0`), over white.
- Captions: labels and tags from npm `emojibase-data@17.0.0` (MIT), text from Unicode CLDR (Unicode License).
- Weights: Apache-2.0, like this repository. No other data and no other weights were used.

## How it was trained

| part | parameters | what | seed | steps | batch | hours | last loss |
| --- | --- | --- | --- | --- | --- | --- | --- |
{recipe}

{hours} hours in all, on two shared CPU cores. `recipes/` repeats it; the loop is chapter 11.

![Loss against steps for every part](training.png)

**Tried on the way:**

{tried}

## How good it is

`make quality`: {labels} labels in each language, one picture each at {measured_steps} steps, seed {seed}, guidance {measured_guidance}. A label is right when, among all
1,911 pictures, the one nearest to the drawing in the VAE's latent space is its own, or equals its own pixel for pixel (so it was for
{twins} of the right English labels).

| | bar | measured | |
| --- | --- | --- | --- |
{bars}

| prompt | pictures | labels | nearest is right | among the nearest five |
| --- | --- | --- | --- | --- |
{scores}

Flags and clock faces differ from each other in few pixels. As groups they are told from everything else: a flag's label gives some
flag in {flag_kind} of cases (English / Chinese), a clock's label some clock in {clock_kind}.

The VAE alone: 95 % of the pictures come back at {psnr_low} dB or better; the worst is "{psnr_worst_picture}" at {psnr_worst} dB.

## Prompts outside the captions

![Drawings for prompts that are mostly no caption of the data, four seeds each](unseen.png)

| prompt | a label of the data? | nearest picture, seeds 0–3 |
| --- | --- | --- |
{unseen}

## Limits

- 64×64 pixels, one object on white. Other sizes can be asked for, but it was never trained on them.
- It knows the words of its captions. Any other word is spelled in pieces that it may never have seen together.
- Counting, colours and combinations that no caption holds mostly fail.
- Emoji carry the views of those who drew and named them; the model repeats them.

## Files

| file | SHA-256 |
| --- | --- |
{hashes}
""",
    "zh": """\
<!-- 由 recipes/model_card.py 根据 config.json、quality.json 和 training.json 生成，不要手改。 -->

# 自带的文生图模型

[English](MODEL_CARD.md) · 中文

一个小模型：给它中文或英文，它在两个 CPU 核上画出 64×64 的 emoji。它是拿来读的：每个部件都是课程的一章，下面每个数都由仓库里的脚本测出来。

它在**背书**。训练用的是 1,911 张图，测的也是这些图自己的说明。这里没有一个数字能说明它会画没见过的东西；「没见过的提示词」一节会让你看到，它多半不会。

## 它是什么

三个部件，共 {parameters} M 参数：一个卷积变分自编码器（64×64×3 ↔ 16×16×4）；一个文本编码器，分词用的是在说明文字上训练的字节级 BPE；一个整流流扩散变换器（先是 SD3 式的联合块，再是 FLUX 式的并行块），处理 16 个图像词元。权重存成 fp16 的 safetensors，用 fp32 计算。建议设置：{steps} 步，引导强度 {guidance}，shift {shift}。

## 数据与许可

- 图片：Google 的 Noto Emoji，Apache-2.0（npm `emoji-datasource-google@16.0.0`），铺在白底上。
- 说明：npm `emojibase-data@17.0.0`（MIT）的标签和关键词，文字来自 Unicode CLDR（Unicode License）。
- 权重：Apache-2.0，和本仓库相同。没有用过别的数据，也没有用过别人的权重。

## 怎样训练的

| 部件 | 参数 | 做了什么 | 种子 | 步数 | 批 | 小时 | 最后的损失 |
| --- | --- | --- | --- | --- | --- | --- | --- |
{recipe}

合计 {hours} 小时，两个与别人共用的 CPU 核。`recipes/` 能重做一遍；训练循环在第 11 章。

![每个部件的损失随步数的变化](training.png)

**路上试过的：**

{tried}

## 画得怎么样

`make quality`：每种语言 {labels} 个标签，每个画一张，{measured_steps} 步，种子 {seed}，引导强度 {measured_guidance}。在 VAE 的潜空间里，从全部 1,911 张图中找离画最近的一张：是它自己那张，或者与那张逐像素相同，就算对（英文标签里有 {twins} 个是这样算对的）。

| | 及格线 | 实测 | |
| --- | --- | --- | --- |
{bars}

| 提示词 | 图片 | 标签数 | 最近的一张就对 | 最近五张里有 |
| --- | --- | --- | --- | --- |
{scores}

旗帜之间、钟面之间只差几个像素。把它们当作一组来看：旗帜的标签有 {flag_kind}（英文 / 中文）画出了某一面旗，钟面的标签有 {clock_kind} 画出了某一个钟面。

只看 VAE：95 % 的图还原后不低于 {psnr_low} dB；最差的是「{psnr_worst_picture}」，{psnr_worst} dB。

## 没见过的提示词

![大多不是数据里的说明的提示词，每句四个种子](unseen.png)

| 提示词 | 是数据里的标签吗？ | 最近的图，种子 0–3 |
| --- | --- | --- |
{unseen}

## 它的边界

- 64×64 像素，白底上的一件东西。可以要别的尺寸，但它没有在那上面训练过。
- 它认得说明里的词。别的词会被拆成几片，这些片也许从没一起出现过。
- 数数、颜色、没有哪条说明写过的组合，大多会失败。
- emoji 带着画它、给它起名的人的看法；模型只是照着重复。

## 文件

| 文件 | SHA-256 |
| --- | --- |
{hashes}
""",
}


def main(folder: Annotated[Path, typer.Option(help="the model folder")] = SHIPPED_MODEL) -> None:
    """Render both cards and the curves."""
    config, quality, training = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("config", "quality", "training")
    )
    files = {
        folder / "MODEL_CARD.md": render("en", config, quality, training).encode(),
        folder / "MODEL_CARD.zh.md": render("zh", config, quality, training).encode(),
        folder / "training.png": curves(training),
    }
    write_files(files)
    for path in files:
        typer.echo(f"{path}")


if __name__ == "__main__":
    typer.run(main)

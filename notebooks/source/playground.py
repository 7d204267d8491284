# ---
# jupyter:
#   course:
#     minutes: 10
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 试验台
#
# 在 JupyterLab 里运行下面这一格：写提示词，拧旋钮，按「画」。图的旁边是它一路上的预览。在网页或 GitHub 上读到这里，你看到的是第一次运行的结果。

# %% [markdown] lang="en" twin="7d67ce25"
# # Playground
#
# Run the cell below in JupyterLab: write a prompt, turn the knobs, press Draw. Beside the picture stand the previews on its way. If you read this on the site or on GitHub, you see the result of the first run.

# %%
from course.playground import Playground

Playground()

# %% [markdown] lang="zh"
# ## 先猜，再试
#
# - 引导强度调到 $0$：提示词还有用吗？调到 $10$ 呢？（[第 08 章](zh/08_guidance.ipynb)）
# - 步数改成 $1$、$2$、$4$：哪一步起就认得出来？换成 `heun`，同样的步数会好一些吗？（[第 02 章](zh/02_scheduler.ipynb)）
# - 同一句话换几颗种子：什么变了，什么没变？（[第 10 章](zh/10_pipeline.ipynb)）
# - 写一个模型没见过的组合，比如「戴帽子的猫」。它会画什么？（[模型卡](../diffusion_engine/assets/model/MODEL_CARD.md)）
# - 故意写错：步数 $0$，种子 $-1$。引擎怎么说？

# %% [markdown] lang="en" twin="1b266352"
# ## Guess first, then try
#
# - Guidance at $0$: does the prompt still matter? And at $10$? ([Chapter 08](en/08_guidance.ipynb))
# - One, two, four steps: from when on can you tell what it is? Does `heun` do better with as many? ([Chapter 02](en/02_scheduler.ipynb))
# - The same words with other seeds: what changes, what stays? ([Chapter 10](en/10_pipeline.ipynb))
# - Ask for a mixture that the model has never seen, "cat with a hat" say. What does it draw? ([Model card](../diffusion_engine/assets/model/MODEL_CARD.md))
# - Make mistakes on purpose: $0$ steps, seed $-1$. What does the engine say?

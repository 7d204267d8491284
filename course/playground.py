"""The playground: a panel for JupyterLab in which the shipped model draws what you ask for and shows how it got there.

The notebooks ``notebooks/playground.zh.ipynb`` and ``.en.ipynb`` show it; where no kernel runs, the picture of its first
run stands there instead.
"""

import base64
import html
import io
import os
import time
import warnings
from typing import Any

import ipywidgets as widgets
from PIL import Image

from course.sliders import tiles
from diffusion_engine import TextToImage
from diffusion_engine.pipeline import StepInfo
from diffusion_engine.scheduler import SOLVERS

WORDS = {
    "zh": {
        "prompt": "提示词",
        "negative": "负面提示词",
        "seed": "种子",
        "guidance": "引导强度",
        "steps": "步数",
        "solver": "求解器",
        "draw": "画",
        "another": "换一颗种子",
        "done": "{steps} 步，{seconds:.1f} 秒",
        "busy": "正在画……",
        "trace": "路上的预览：噪声水平 σ 越低，剩下的可能越少",
    },
    "en": {
        "prompt": "prompt",
        "negative": "negative prompt",
        "seed": "seed",
        "guidance": "guidance",
        "steps": "steps",
        "solver": "solver",
        "draw": "Draw",
        "another": "Another seed",
        "done": "{steps} steps, {seconds:.1f} s",
        "busy": "drawing …",
        "trace": "Previews on the way: the lower the noise level σ, the fewer pictures remain possible",
    },
}
STATIONS = 8  # previews in the trace
SHOWN, SMALL = 256, 92  # pixels on the page: the picture, a preview
FIRST = {"prompt": "red apple", "seed": 0, "num_inference_steps": 28}
ALT = "The picture for “red apple” with seed 0, and eight previews on its way from a rough apple to the finished one."


def session_language(session: str | None = None) -> str:
    """``zh`` in a notebook whose name ends in ``.zh.ipynb``, else ``en``; Jupyter tells a kernel the notebook's name."""
    name = os.environ.get("JPY_SESSION_NAME", "") if session is None else session
    return "zh" if name.endswith(".zh.ipynb") else "en"


class Playground:
    """The panel: what to draw on top, then the picture, its trace, or the engine's own words about a mistake.

    Args:
        language: ``zh`` or ``en``; by default the notebook's, see `session_language`.
        engine: by default the shipped model on the CPU.

    Attributes:
        prompt, negative, seed, guidance, steps, solver: the controls. message: what the engine said. picture, trace: HTML.

    Raises:
        ValueError: another language.
    """

    def __init__(self, language: str | None = None, engine: TextToImage | None = None):
        language = session_language() if language is None else language
        if language not in WORDS:
            raise ValueError(f"language {language!r} is unknown; try {' or '.join(WORDS)}")
        self.words, self.engine = WORDS[language], engine or TextToImage.from_pretrained(device="cpu")
        self.prompt = self._control(widgets.Text, "prompt", value=FIRST["prompt"])
        self.negative = self._control(widgets.Text, "negative")
        self.seed = self._control(widgets.IntText, "seed", value=FIRST["seed"])
        self.steps = self._control(widgets.IntText, "steps", value=FIRST["num_inference_steps"])
        self.guidance = self._control(
            widgets.FloatSlider, "guidance", value=self.engine.guidance_scale, min=0, max=10, step=0.5
        )
        self.solver = self._control(widgets.Dropdown, "solver", options=list(SOLVERS))
        self.button = widgets.Button(description=self.words["draw"], button_style="primary")
        self.another = widgets.Button(description=self.words["another"])
        self.progress = widgets.IntProgress(layout=widgets.Layout(width="12em", visibility="hidden"))
        self.message, self.picture, self.trace = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.button.on_click(self.draw)
        self.another.on_click(self._another)
        self.panel = widgets.VBox(
            [
                widgets.HBox([self.prompt, self.negative], layout=_WRAP),
                widgets.HBox([self.seed, self.steps, self.guidance, self.solver], layout=_WRAP),
                widgets.HBox([self.button, self.another, self.progress], layout=_WRAP),
                self.message,
                widgets.HBox([self.picture, self.trace], layout=_WRAP),
            ]
        )

    def _control(self, kind: type, name: str, **options: Any) -> widgets.Widget:
        """A control under the course's word for it."""
        wide = "26em" if kind is widgets.Text else "21em" if kind is widgets.FloatSlider else "13em"
        layout = widgets.Layout(width=wide, max_width="100%")
        return kind(description=self.words[name], layout=layout, style={"description_width": "initial"}, **options)

    def request(self) -> dict[str, Any]:
        """What the controls ask the engine for."""
        return {
            "prompt": self.prompt.value,
            "negative_prompt": self.negative.value.strip() or None,
            "seed": self.seed.value,
            "num_inference_steps": self.steps.value,
            "guidance_scale": self.guidance.value,
            "solver": self.solver.value,
        }

    def draw(self, _: Any = None) -> None:
        """Draw what the controls say. A refusal is shown in the panel, word for word; the last picture stays."""
        request, previews = self.request(), []
        self._begin(request)

        def watch(info: StepInfo) -> None:
            self.progress.value = info.step
            previews.append((info.sigma, info.data.clone()))

        begun = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                result = self.engine(**request, callback=watch)
        except (ValueError, ArithmeticError) as error:
            self._say(str(error), "#c53030")
        else:
            done = self.words["done"].format(steps=len(previews), seconds=time.perf_counter() - begun)
            self._say(" · ".join([done, *(str(warning.message) for warning in said)]), "#b7791f" if said else "inherit")
            self.picture.value = _image(result.images[0], SHOWN, request["prompt"])
            self.trace.value = self._trace(previews)
        finally:
            self.button.disabled = self.another.disabled = False
            self.progress.layout.visibility = "hidden"

    def _begin(self, request: dict[str, Any]) -> None:
        self.button.disabled = self.another.disabled = True
        self.progress.max, self.progress.value = max(1, request["num_inference_steps"]), 0
        self.progress.layout.visibility = "visible"
        self._say(self.words["busy"], "inherit")

    def _say(self, text: str, colour: str) -> None:
        self.message.value = f'<span style="color:{colour}">{html.escape(text)}</span>'

    def _another(self, _: Any) -> None:
        self.seed.value += 1
        self.draw()

    def _trace(self, previews: list) -> str:
        """Previews in a row, each over its noise level."""
        chosen = stations(len(previews))
        figures = []
        for place in chosen:
            sigma, data = previews[place]
            shown = _image(self.engine.decode(data)[0], SMALL, f"preview after step {place + 1}")
            figures.append(
                f'<figure style="margin:0;text-align:center">{shown}<figcaption>σ {sigma:.2f}</figcaption></figure>'
            )
        columns = f"display:grid;grid-template-columns:repeat(4,{SMALL}px);gap:6px"
        return f'<div style="{columns}">{"".join(figures)}</div><small>{self.words["trace"]}</small>'

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict, dict]:
        """The live panel, and for readers without a kernel the picture of the first run with its trace."""
        self.draw()
        data = {
            **self.panel._repr_mimebundle_(),
            "image/png": base64.b64encode(first_run(self.engine)).decode(),
            "text/plain": "the playground: run this cell in JupyterLab",
        }
        return data, {"image/png": {"alt": ALT}}


_WRAP = widgets.Layout(flex_flow="row wrap", grid_gap="4px 14px")


def stations(steps: int) -> list[int]:
    """Places of up to eight previews, evenly spread from the first to the last."""
    count = min(steps, STATIONS)
    return [round(place * (steps - 1) / max(count - 1, 1)) for place in range(count)]


def first_run(engine: TextToImage) -> bytes:
    """A PNG of the first request's picture, large, and its previews in two rows beside it."""
    previews: list = []
    result = engine(**FIRST, callback=lambda info: previews.append(info.data.clone()))
    decoded = [engine.decode(previews[place])[0] for place in stations(len(previews))]
    trace = tiles(decoded, columns=STATIONS // 2)
    side = trace.height
    sheet = Image.new("RGB", (side + 8 + trace.width, side), "white")
    sheet.paste(result.images[0].convert("RGB").resize((side, side), Image.Resampling.LANCZOS))
    sheet.paste(trace, (side + 8, 0))
    buffer = io.BytesIO()
    twice = sheet.resize((2 * sheet.width, 2 * sheet.height), Image.Resampling.LANCZOS)
    twice.quantize(256, dither=Image.Dither.NONE).save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def _image(picture: Image.Image, width: int, alt: str) -> str:
    """A picture as HTML, shown ``width`` pixels wide."""
    buffer = io.BytesIO()
    picture.save(buffer, format="png")
    source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return f'<img src="{source}" alt="{html.escape(alt, quote=True)}" width="{width}">'

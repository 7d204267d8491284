"""TeX to HTML with the vendored KaTeX, once per formula, while the site is built; TeX that does not parse stops the build."""

import html
import json
import re
from collections.abc import Iterable
from pathlib import Path

from py_mini_racer import MiniRacer

from course.files import CourseError

# KaTeX looks for a module system first; none of these, and it puts itself on `self`.
PRELUDE = "var module=undefined,exports=undefined,self=globalThis;"
# Everything that TeX accepts or KaTeX accepts beyond it passes, except letters outside \text, which no font of KaTeX has.
RENDER = """
function renderAll(jobs) {
  var strict = function (code) { return code === "unicodeTextInMathMode" ? "error" : "ignore"; };
  return JSON.stringify(JSON.parse(jobs).map(function (job) {
    try {
      return [katex.renderToString(job[0], {displayMode: job[1], throwOnError: true, strict: strict}), ""];
    } catch (error) { return ["", String(error.message)]; }
  }));
}
"""
MATHML = re.compile(r"<math.*?</math>", re.DOTALL)
ANNOTATION = re.compile(r"<annotation.*?</annotation>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")


class Formulas:
    """Rendered formulas by (TeX, display).

    Args:
        script: ``katex.min.js``.
    """

    def __init__(self, script: Path):
        self.script = script
        self.done: dict[tuple[str, bool], tuple[str, str]] = {}

    def prepare(self, wanted: Iterable[tuple[str, bool]]) -> None:
        """Render many formulas in one go: one call into the JavaScript engine, which is then closed."""
        jobs = [job for job in dict.fromkeys(wanted) if job not in self.done]
        if not jobs:
            return
        engine = MiniRacer()
        try:
            engine.eval(PRELUDE + self.script.read_text(encoding="utf-8") + RENDER)
            results = json.loads(engine.call("renderAll", json.dumps(jobs)))
        finally:
            engine.close()  # else the interpreter waits for the engine's thread when it exits
        self.done.update({job: tuple(result) for job, result in zip(jobs, results, strict=True)})

    def html(self, tex: str, display: bool, where: str) -> str:
        """One formula as HTML with MathML inside.

        Raises:
            CourseError: KaTeX does not read it.
        """
        self.prepare([(tex, display)])
        rendered, error = self.done[tex, display]
        if error:
            raise CourseError(f"{where}: the formula {tex!r} does not parse: {error}")
        return rendered

    def plain(self, tex: str, display: bool = False) -> str:
        """One formula as the characters that a reader sees, for search and for titles."""
        self.prepare([(tex, display)])
        found = MATHML.search(self.done[tex, display][0])
        return html.unescape(TAG.sub("", ANNOTATION.sub("", found.group()))) if found else tex

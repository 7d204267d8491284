"""Outputs made the same on every machine: no paths, process numbers, addresses or widget state."""

import re
import sys
import tempfile
from pathlib import Path

WIDGET = "application/vnd.jupyter.widget"
IMAGE = re.compile(r"<img\b[^>]*>", re.IGNORECASE)
ALT = re.compile(r"""\balt=("[^"]+"|'[^']+')""", re.IGNORECASE)
PICTURE = re.compile(r"(data:image/[^\s\"']+)")  # a picture's bytes may look like anything; they stay as they are
PATTERNS = [
    (re.compile(r"/\S*?ipykernel_\d+/\d+\.py"), "<cell>"),
    (re.compile(r"\bipykernel_\d+\b"), "ipykernel"),
    (re.compile(r"\b0x[0-9a-fA-F]{6,}\b"), "0x…"),
    (re.compile(r"\b(pid|process)([ =:]+)\d+\b", re.IGNORECASE), r"\1\2…"),
]


def scrub(text: str, root: Path) -> str:
    """Text with the machine taken out: paths, process numbers, memory addresses. Pictures inside it stay."""
    return "".join(part if place % 2 else _scrub(part, root) for place, part in enumerate(PICTURE.split(text)))


def _scrub(text: str, root: Path) -> str:
    for pattern, replacement in PATTERNS[:1]:
        text = pattern.sub(replacement, text)
    places = {root: "./", Path(sys.prefix): "<environment>/", Path(tempfile.gettempdir()): "<tmp>/", Path.home(): "~/"}
    for place, replacement in sorted(places.items(), key=lambda pair: -len(str(pair[0]))):
        if place != Path(place.anchor):
            text = re.sub(rf"{re.escape(str(place))}(?:/|(?![\w.-]))", replacement, text)
    for pattern, replacement in PATTERNS[1:]:
        text = pattern.sub(replacement, text)
    return text


def clean(outputs: list[dict], root: Path) -> list[dict]:
    """A cell's outputs as they are stored: scrubbed, without live widgets (an output that was only a widget goes)."""
    kept = []
    for output in outputs:
        output = dict(output)
        if "text" in output:
            output["text"] = scrub("".join(output["text"]), root)
        if "data" in output:
            data = {mime: value for mime, value in output["data"].items() if not mime.startswith(WIDGET)}
            if len(data) < len(output["data"]) and set(data) <= {"text/plain"}:
                continue
            output["data"] = {mime: scrub(v, root) if mime.startswith("text/") else v for mime, v in data.items()}
        if "traceback" in output:
            output["traceback"] = [scrub(line, root) for line in output["traceback"]]
        kept.append(output)
    return kept

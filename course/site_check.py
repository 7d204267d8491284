"""The finished site, looked at once before it is written: every link and anchor resolves, nothing comes from elsewhere."""

import html
import os
import re
from urllib.parse import unquote

TAG = re.compile(r"<([a-zA-Z][\w-]*)(\s[^<>]*)?>")
ATTRIBUTE = re.compile(
    r"""\s(id|href|src|srcset|poster|data|data-frames|action|xlink:href)=("[^"]*"|'[^']*'|[^\s"'>]+)"""
)
REMOTE = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
STYLE = re.compile(r"""url\(\s*['"]?(?:https?:)?//|@import\s""", re.IGNORECASE)
FOLLOWED = ("a", "area")  # a reader clicks these; everything else is loaded by itself


def site_faults(files: dict[str, bytes]) -> list[str]:
    """What would not work from disk, as sentences.

    Args:
        files: the site's files by path from its root.
    """
    faults, anchors, wanted = [], {}, []
    for path, data in files.items():
        if path.endswith((".html", ".css")) and STYLE.search(text := data.decode("utf-8")):
            if path.endswith(".css") or re.search(r"<style\b|\bstyle=", text):
                faults += [f"{path}: a style loads something from elsewhere"] if _remote_style(path, text) else []
        if path.endswith(".html"):
            anchors[path], links, loads = read_page(data.decode("utf-8"))
            faults += [f"{path}: loads {target} from elsewhere" for target in loads if REMOTE.match(target)]
            wanted += [(path, target) for target in [*links, *loads]]
    for path, target in wanted:
        faults += _link_faults(path, target, files, anchors)
    return faults


def read_page(text: str) -> tuple[set[str], list[str], list[str]]:
    """The anchors of a page, the links that a reader may follow, and the files that it loads."""
    anchors, links, loads = set(), [], []
    for tag, attributes in TAG.findall(text):
        for name, value in ATTRIBUTE.findall(attributes):
            value = html.unescape(value.strip("\"'"))
            if name == "id":
                anchors.add(value)
            elif tag.lower() in FOLLOWED:
                links.append(value)
            elif name == "data-frames":
                loads += value.split("|")
            elif name != "data" or tag.lower() == "object":
                loads.append(value)
    return anchors, links, loads


def _remote_style(path: str, text: str) -> bool:
    if path.endswith(".css"):
        return True
    styles = re.findall(r"<style\b[^>]*>(.*?)</style>", text, re.DOTALL) + re.findall(r'\sstyle="([^"]*)"', text)
    return any(STYLE.search(style) for style in styles)


def _link_faults(path: str, target: str, files: dict[str, bytes], anchors: dict[str, set[str]]) -> list[str]:
    if REMOTE.match(target) or re.match(r"(mailto|data|javascript):", target):
        return []
    place, _, anchor = target.partition("#")
    place = (
        os.path.normpath(os.path.join(os.path.dirname(path), unquote(place))).replace(os.sep, "/") if place else path
    )
    if place not in files:
        return [f"{path}: {target} leads nowhere"]
    if anchor and place.endswith(".html") and unquote(anchor) not in anchors.get(place, ()):
        return [f"{path}: {target}: no such anchor"]
    return []

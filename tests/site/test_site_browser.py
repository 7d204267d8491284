"""The site in headless Chromium, opened from disk, the network off: what a reader meets on every page."""

import json
import re
from pathlib import Path

import pytest
from small_site import ROOT

HERE = Path(__file__).parent
LANGUAGES = ("zh", "en")
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks" / "zh").glob("*.ipynb"))
CHAPTER = "03_timestep_embedding"
PHONE = {"width": 390, "height": 844}
# Prose as a reader sees it: code, formulas and what cells printed are left out.
PROSE = """() => {
  const copy = document.body.cloneNode(true);
  copy.querySelectorAll("pre, code, .katex, .doc, script, dialog").forEach(e => e.remove());
  return copy.textContent;
}"""
LOOK = """() => {
  const all = (s) => [...document.querySelectorAll(s)];
  const ids = all("[id]").map(e => e.id);
  return {
    language: document.documentElement.lang,
    title: document.title,
    headings: all("h1").length,
    twice: ids.filter((id, i) => ids.indexOf(id) !== i),
    ids: ids,
    links: all("a[href]").map(a => a.href),
    noAlt: all("img").filter(i => !i.alt.trim()).map(i => i.src),
    pictures: all("img").length,
    wide: document.documentElement.scrollWidth - innerWidth,
    copies: all(".source .copy").length, sources: all(".source").length,
    open: all("main details.fold[open]").length,
    footer: document.querySelector(".bottom").innerText,
  };
}"""


def pages(folder: Path, language: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in (folder / language).rglob("*.html"))


@pytest.mark.parametrize("language", ["", *LANGUAGES])
def test_every_page(built, visit, language):
    """No request elsewhere, no console error (`visit`); links, anchors, alt texts, leftovers, width, footer."""
    folder = built.output
    paths = pages(folder, language) if language else ["index.html"]
    page = visit(folder, paths[0], viewport=PHONE)
    wanted: dict[str, set[str]] = {}
    ids: dict[str, set[str]] = {}
    for path in paths:
        page.goto((folder / path).as_uri())
        page.evaluate("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
        page.wait_for_function("[...document.images].every(i => i.complete)")
        assert page.evaluate("[...document.images].every(i => i.naturalWidth > 0)"), path
        seen = page.evaluate(LOOK)
        assert seen["wide"] <= 0, f"{path} scrolls sideways"
        assert seen["headings"] == 1 and not seen["twice"] and not seen["noAlt"] and seen["title"], path
        assert seen["copies"] == seen["sources"] and seen["open"] == 0, path
        assert re.search(r"[0-9a-f]{7}|尚未提交|not committed", seen["footer"]), path
        if language:
            assert seen["language"] == {"zh": "zh-CN", "en": "en"}[language]
            stem = Path(path).stem
            chapter = stem in CHAPTERS and path == f"{language}/{stem}.html"
            assert not chapter or f"notebooks/source/{stem}.py" in seen["footer"]
        prose = page.evaluate(PROSE)
        for leftover in ("$", r"\begin{", "**", "\ufffc"):
            assert leftover not in prose, (
                f"{path}: a literal {leftover} in …{prose[max(0, prose.find(leftover) - 40) :][:80]}"
            )
        ids[path] = set(seen["ids"])
        for link in seen["links"]:
            if link.startswith("file:"):
                place, _, anchor = link.partition("#")
                wanted.setdefault(place.removeprefix(folder.as_uri() + "/"), set()).add(anchor)
    for place, anchors in wanted.items():
        assert (folder / place).is_file(), f"{place} is linked but not there"
        for anchor in anchors - {""}:
            assert anchor in ids.get(place, {anchor} if place not in ids else set()), f"{place}#{anchor}"


@pytest.mark.parametrize("language", LANGUAGES)
def test_formulas_stand_without_scripts(built, visit, language):
    page = visit(built.output, f"{language}/{CHAPTER}.html", java_script_enabled=False)
    formula = page.locator(".katex-display").first
    assert formula.bounding_box()["height"] > 20
    assert page.locator(".katex-mathml math").count() > 10
    assert not page.locator(".needs-js").first.is_visible()
    text = page.locator("main").inner_text()
    assert "$" not in re.sub(r"(?s)<pre.*?</pre>", "", text)


def test_formulas_have_their_fonts(built, visit):
    page = visit(built.output, f"zh/{CHAPTER}.html")
    page.evaluate("document.fonts.ready")
    assert page.evaluate("[...document.fonts].some(f => f.family.includes('KaTeX') && f.status === 'loaded')")


# --- search ----------------------------------------------------------------------------------------------------------


def ask(page, query: str) -> list[str]:
    box = page.locator(".finder input")
    if not box.is_visible():
        page.keyboard.press("/")
    page.wait_for_function("window.SITE_INDEX")
    box.fill(query)
    page.wait_for_function(
        "q => document.querySelector('.finder .status').textContent.match(/\\d|没有|Nothing/)", arg=query
    )
    return page.locator("#found a").all_inner_texts()


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    "query", ["注意力", "时间步", "引导", "AdaLN", "euler", "速度 velocity", "adaln 门控", "sigma 步"]
)
def test_search_finds_with_a_snippet(built, visit, language, query):
    page = visit(built.output, f"{language}/index.html")
    hits = ask(page, query)
    assert hits
    for hit in hits[:3]:
        assert len(hit.splitlines()) >= 2
    assert page.locator("#found mark").count() > 0


def test_search_finds_sections_by_their_words(built, visit):
    page = visit(built.output, "zh/index.html")
    assert any("时间步嵌入" in hit for hit in ask(page, "时间步")[:3])
    assert any("注意力" in hit for hit in ask(page, "注意力")[:3])
    assert ask(page, "euler_step")  # code
    english = visit(built.output, "en/index.html")
    assert any("Attention" in hit for hit in ask(english, "注意力")[:5])  # the other language's words lead here too


@pytest.mark.parametrize(("language", "said"), [("zh", "没有找到"), ("en", "Nothing found")])
def test_search_says_when_nothing_is_found(built, visit, language, said):
    page = visit(built.output, f"{language}/index.html")
    assert ask(page, "qwertzuiop") == []
    assert said in page.locator(".finder .status").inner_text()
    assert "qwertzuiop" in page.locator(".finder .status").inner_text()
    ask(page, '<img src=x onerror="alert(1)">')
    assert page.locator(".finder img").count() == 0


def test_search_waits_for_the_input_method(built, visit):
    page = visit(built.output, "zh/index.html")
    ask(page, "qwertzuiop")
    page.locator(".finder input").fill("")
    method = page.context.new_cdp_session(page)
    method.send("Input.imeSetComposition", {"text": "zhu yi", "selectionStart": 6, "selectionEnd": 6})
    assert page.locator("#found a").count() == 0  # half-typed letters are no query
    enter = {"type": "rawKeyDown", "windowsVirtualKeyCode": 229, "key": "Process", "code": "Enter"}
    method.send("Input.dispatchKeyEvent", enter)  # belongs to the input method
    assert page.url.endswith("zh/index.html")
    method.send("Input.imeSetComposition", {"text": "注意力", "selectionStart": 3, "selectionEnd": 3})
    method.send("Input.insertText", {"text": "注意力"})
    page.wait_for_selector("#found a")
    assert page.locator(".finder input").input_value() == "注意力"


def test_search_by_keyboard(built, visit):
    page = visit(built.output, f"en/{CHAPTER}.html")
    hits = ask(page, "geometry")
    assert hits and page.locator('#found a[aria-selected="true"]').count() == 1
    if len(hits) > 1:
        page.keyboard.press("ArrowDown")
        assert page.locator("#hit-1").get_attribute("aria-selected") == "true"
        page.keyboard.press("ArrowUp")
    assert page.locator(".finder input").get_attribute("aria-activedescendant") == "hit-0"
    page.keyboard.press("Enter")
    page.wait_for_url("**#*")
    assert not page.locator(".finder").is_visible()
    target = page.evaluate(
        "document.getElementById(decodeURIComponent(location.hash.slice(1))).getBoundingClientRect().top"
    )
    assert 0 <= target < 900
    page.keyboard.press("/")
    page.keyboard.press("Escape")
    assert not page.locator(".finder").is_visible()


# --- finding one's way -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("language", "other"), [("zh", "en"), ("en", "zh")])
def test_the_language_switch_stays_on_the_section(built, visit, language, other):
    page = visit(built.output, f"{language}/{CHAPTER}.html")
    anchors = page.evaluate("[...document.querySelectorAll('main h2[id]')].map(h => h.id)")
    for anchor in anchors[:: len(anchors) - 1] + [anchors[2]]:
        page.goto((built.output / language / f"{CHAPTER}.html").as_uri() + f"#{anchor}")
        page.wait_for_function("a => document.querySelector('.switch').href.endsWith('#' + a)", arg=anchor)
        page.locator(".switch").focus()
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/{other}/{CHAPTER}.html#{anchor}")
        top = page.evaluate("a => document.getElementById(a).getBoundingClientRect().top", anchor)
        assert -1 <= top < 900
    page.goto((built.output / language / f"{CHAPTER}.html").as_uri())
    assert page.locator(".switch").get_attribute("href") == f"../{other}/{CHAPTER}.html"


def test_the_outline_follows_the_reader(built, visit):
    page = visit(built.output, f"en/{CHAPTER}.html")
    links = page.locator(".outline a")
    headings = page.evaluate("[...document.querySelectorAll('main :is(h2, h3)[id]')].map(h => h.id)")
    assert [link.get_attribute("href") for link in links.all()] == [f"#{anchor}" for anchor in headings]
    links.nth(2).click()
    page.wait_for_function("a => document.querySelector('.outline .here')?.hash === '#' + a", arg=headings[2])
    phone = visit(built.output, f"en/{CHAPTER}.html", viewport=PHONE)
    assert not phone.locator(".outline a").first.is_visible()
    phone.locator(".outline summary").click()
    assert phone.locator(".outline a").first.is_visible()


def test_the_map_names_every_chapter_with_its_promise(built, visit):
    page = visit(built.output, "en/index.html")
    rows = page.locator(".chapters li, .appendix li").all()
    assert [Path(row.locator("a").first.get_attribute("href")).stem for row in rows] == CHAPTERS
    assert all(len(row.locator(".about p").inner_text()) > 30 for row in rows)
    page.locator(".menu summary").click()
    assert page.locator(".menu [data-chapter]").count() == len(CHAPTERS)
    page.keyboard.press("Escape")
    assert not page.locator(".panel").is_visible()


# --- using a page ----------------------------------------------------------------------------------------------------


def test_copy_buttons_copy_the_code(built, visit):
    page = visit(built.output, f"zh/{CHAPTER}.html")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    block = page.locator(".cell.code.demo .source").first
    block.hover()
    block.locator(".copy").click()
    page.wait_for_function("document.querySelector('.cell.code.demo .copy').textContent === '已复制'")
    assert page.evaluate("navigator.clipboard.readText()") == block.locator("code").text_content() + "\n"
    assert "复制" not in block.locator("code").text_content()


def test_plumbing_and_solutions_are_folded(built, visit):
    page = visit(built.output, f"en/{CHAPTER}.html")
    plumbing, solution = page.locator(".cell.hide").first, page.locator(".cell.solution").first
    assert not plumbing.locator("pre").first.is_visible() and plumbing.locator("img").first.is_visible()
    assert not solution.locator("pre").first.is_visible()
    solution.locator("summary").focus()
    page.keyboard.press("Enter")
    assert solution.locator("pre").first.is_visible()


def test_chapters_read_are_remembered_in_both_languages(built, visit):
    page = visit(built.output, f"zh/{CHAPTER}.html")
    page.locator(".mark").click()
    assert page.locator(".mark").get_attribute("aria-pressed") == "true"
    for language in LANGUAGES:
        course = visit(built.output, f"{language}/index.html", context=page.context)
        assert course.locator(f'.rows [data-chapter="{CHAPTER}"].read').count() == 1
        assert course.locator(".rows .read").count() == 1
        assert (
            f"1 {'/' if language == 'zh' else 'of'} {len(CHAPTERS)}" in course.locator(".progress .said").inner_text()
        )
        assert course.locator(".go-on").get_attribute("href") == f"{CHAPTER}.html"
    page.locator(".mark").click()
    course.reload()
    assert course.locator(".rows .read").count() == 0


def test_everything_works_when_storage_is_forbidden(built, visit):
    page = visit(built.output, "zh/index.html")
    page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError'); } })"
    )
    page.goto((built.output / "zh" / f"{CHAPTER}.html").as_uri())
    page.locator(".theme").click()
    page.locator(".mark").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert ask(page, "注意力")


# --- sliders ---------------------------------------------------------------------------------------------------------

SLIDER = """figure => {
  const image = figure.querySelector("img"), input = figure.querySelector("input");
  return {
    source: image.getAttribute("src"), alt: image.alt, place: +input.value, said: figure.querySelector("output").textContent,
    spoken: input.getAttribute("aria-valuetext"), label: input.labels[0].textContent.trim(),
    frames: input.dataset.frames.split("|"), alts: input.dataset.alts.split("|"), texts: input.dataset.texts.split("|"),
  };
}"""


def with_sliders(folder: Path, language: str) -> list[str]:
    return [path for path in pages(folder, language) if '<figure class="slider"' in (folder / path).read_text()]


def shows(figure, place: int) -> None:
    """The slider stands at a frame: picture, alt text, value, and what a screen reader says."""
    seen = figure.evaluate(SLIDER)
    assert seen["place"] == place and seen["source"] == seen["frames"][place]
    assert seen["alt"] == seen["alts"][place] and seen["label"]
    assert seen["said"] == seen["spoken"] == seen["texts"][place]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_slider_moves_by_keyboard(built, visit, language):
    paths = with_sliders(built.output, language)
    page, count = visit(built.output, paths[0]), 0
    for path in paths:
        page.goto((built.output / path).as_uri())
        for figure in page.locator(".slider").all():
            first = figure.evaluate(SLIDER)
            assert len(set(first["frames"])) == len(first["frames"]) and "base64" not in "".join(first["frames"])
            shows(figure, first["place"])
            figure.locator("input").focus()
            page.keyboard.press("Home")
            shows(figure, 0)
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowUp")
            shows(figure, min(2, len(first["frames"]) - 1))
            page.keyboard.press("ArrowLeft")
            shows(figure, min(2, len(first["frames"]) - 1) - 1)
            page.keyboard.press("End")
            shows(figure, len(first["frames"]) - 1)
            page.wait_for_function(
                "f => f.querySelector('img').complete && f.querySelector('img').naturalWidth",
                arg=figure.element_handle(),
            )
            count += 1
    assert count >= 8


def test_a_slider_moves_by_mouse_and_its_pictures_are_there(built, visit):
    page = visit(built.output, f"en/{CHAPTER}.html")
    figure = page.locator(".slider").first
    figure.scroll_into_view_if_needed()
    box, last = figure.locator("input").bounding_box(), len(figure.evaluate(SLIDER)["frames"]) - 1
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 4, middle)
    page.mouse.down()
    shows(figure, 0)
    page.mouse.move(box["x"] + box["width"] / 2, middle, steps=4)
    assert 0 < figure.evaluate(SLIDER)["place"] < last
    page.mouse.move(box["x"] + box["width"] - 2, middle, steps=4)
    page.mouse.up()
    shows(figure, last)
    height = figure.bounding_box()["height"]
    page.keyboard.press("Home")
    assert figure.bounding_box()["height"] == height  # nothing jumps


def test_a_slider_fits_a_phone_and_both_themes(built, visit):
    page = visit(built.output, f"zh/{CHAPTER}.html", viewport=PHONE, color_scheme="dark")
    figure = page.locator(".slider").first
    for part in ("img", "input", "output"):
        box = figure.locator(part).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
    assert figure.locator("input").bounding_box()["height"] >= 24  # a finger's target
    colour = "e => getComputedStyle(e).color"
    dark = figure.locator("output").evaluate(colour)
    page.locator(".theme").click()
    assert figure.locator("output").evaluate(colour) != dark
    assert figure.locator(".card").evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"


def test_without_scripts_and_on_paper_the_first_frame_stands_alone(built, visit):
    page = visit(built.output, f"zh/{CHAPTER}.html", java_script_enabled=False)
    figure = page.locator(".slider").first
    assert figure.locator("img").is_visible() and not figure.locator("input").is_visible()
    assert "脚本" in figure.inner_text()
    paper = visit(built.output, f"zh/{CHAPTER}.html")
    paper.emulate_media(media="print")
    figure = paper.locator(".slider").first
    assert figure.locator("img").is_visible() and not figure.locator("input").is_visible()
    assert figure.locator("output").is_visible()


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_playground_has_a_page_with_the_picture_of_its_first_run(built, visit, language):
    page = visit(built.output, f"{language}/10_pipeline.html")
    page.locator('a[href$="playground.html"]').first.click()
    page.wait_for_url(f"**/{language}/files/notebooks/playground.html")
    assert page.locator(".card img").first.is_visible()
    assert "Playground()" in page.locator("main").inner_text()


# --- light, dark, paper ----------------------------------------------------------------------------------------------


def paper(page) -> list[int]:
    """The page's background as drawn."""
    return [int(n) for n in re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]]


def test_themes(built, visit):
    dark = visit(built.output, f"zh/{CHAPTER}.html", color_scheme="dark")
    assert max(paper(dark)) < 50
    card = dark.locator(".card").first
    assert card.evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"
    dark.locator(".theme").click()
    assert min(paper(dark)) > 230
    again = visit(built.output, f"en/{CHAPTER}.html", context=dark.context)
    assert min(paper(again)) > 230  # remembered against the system's wish
    again.goto((built.output / "index.html").as_uri())
    assert min(paper(again)) > 230


def test_the_stored_theme_is_set_before_anything_is_drawn(built):
    for path in ("index.html", "zh/index.html", f"en/{CHAPTER}.html"):
        head = (built.output / path).read_text().partition("</head>")[0]
        assert head.index('localStorage.getItem("course.theme")') < head.index('rel="stylesheet"')


def test_paper(built, visit):
    page = visit(built.output, f"zh/{CHAPTER}.html", color_scheme="dark")
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.emulate_media(media="print")
    assert paper(page) == [255, 255, 255]
    for gone in (".top", ".outline", ".done", ".neighbours"):
        assert not page.locator(gone).is_visible(), gone
    assert page.locator(".card img").first.is_visible()
    rule = page.evaluate("getComputedStyle(document.querySelector('.card')).breakInside")
    assert rule == "avoid"
    assert page.evaluate("getComputedStyle(document.querySelector('.source pre')).whiteSpace") == "pre-wrap"
    assert page.pdf(format="A4").startswith(b"%PDF")


# --- accessibility ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    ("site", "path"),
    [
        ("built", "index.html"),
        ("built", "zh/index.html"),
        ("built", f"zh/{CHAPTER}.html"),
        ("small_built", "en/api.html"),
        ("small_built", "en/papers/01_small.html"),
    ],
)
def test_axe_finds_nothing_serious(request, visit, site, path, theme):
    page = visit(request.getfixturevalue(site).output, path, color_scheme=theme)
    page.evaluate("document.querySelectorAll('details').forEach(d => { if (!d.closest('.top')) d.open = true; })")
    page.add_script_tag(path=HERE / "vendor" / "axe.min.js")
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'], preload: false }).then(r => r.violations)")
    serious = [
        (v["id"], [node["html"][:160] for node in v["nodes"]][:3])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
    assert not serious, json.dumps(serious, ensure_ascii=False, indent=1)


def test_axe_likes_the_search(built, visit):
    page = visit(built.output, "zh/index.html")
    ask(page, "注意力")
    page.add_script_tag(path=HERE / "vendor" / "axe.min.js")
    found = page.evaluate("axe.run('.finder', { resultTypes: ['violations'], preload: false }).then(r => r.violations)")
    assert not [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]

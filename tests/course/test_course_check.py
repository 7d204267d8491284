"""For every drift rule: plant the fault, and the check names file, cell and rule."""

import json

import pytest
from small_course import LONG_EN, LONG_ZH, chapter_text, code, edit, prose, stamp_all
from typer.testing import CliRunner

from course.check import check_all
from course.cli import app

SOURCE = "notebooks/source/01_first.py"
SECOND = "notebooks/source/02_second.py"
ZH, EN = "notebooks/zh/01_first.ipynb", "notebooks/en/01_first.ipynb"
MODULE = "diffusion_engine/first.py"


def change(file, old, new):
    """A fault that is one replacement."""
    return lambda root: edit(root / file, old, new)


def extra(*cells, number="01", name="first"):
    """A fault that is made of further cells, in a chapter written anew and stamped."""

    def plant(root):
        path = root / "notebooks" / "source" / f"{number}_{name}.py"
        path.write_text(chapter_text(number, name, list(cells)), encoding="utf-8")
        stamp_all(root)

    return plant


def in_notebook(file, alter):
    """A fault in a notebook's JSON."""

    def plant(root):
        notebook = json.loads((root / file).read_text(encoding="utf-8"))
        alter(notebook)
        (root / file).write_text(
            json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )

    return plant


def cell_of(notebook, key):
    return next(cell for cell in notebook["cells"] if cell["id"] == key)


def set_output(key, output):
    return lambda notebook: cell_of(notebook, key).update(outputs=[output])


def new_file(name, text):
    def plant(root):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")

    return plant


def both(*plants):
    return lambda root: [plant(root) for plant in plants]


def pair(zh, en):
    return extra(prose(f"{LONG_ZH}{zh}", f"{LONG_EN} {en}"))


ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "x", "traceback": []}
WIDGET = {"output_type": "display_data", "metadata": {}, "data": {"application/vnd.jupyter.widget-view+json": {}}}
MUTE = {"output_type": "display_data", "metadata": {}, "data": {"image/png": "aaaa"}}
BIG = {"output_type": "stream", "name": "stdout", "text": ["x" * 400_000]}
TWENTY = "\n".join(f"x{i} = {i}" for i in range(20))
MAGIC = "!" + "ls"
ADDED = "01-doubling-15"  # the first cell after the twins that every chapter has
HAND = "from diffusion_engine.second import second\n"

FAULTS = {
    # header and form
    "unknown header entry": (change(SOURCE, "minutes: 5", "minutes: 5\n#     colour: red"), SOURCE, "", "header"),
    "no minutes": (change(SOURCE, "#     minutes: 5\n", ""), SOURCE, "", "header"),
    "no kernelspec": (change(SOURCE, "name: python3", "name: julia"), SOURCE, "", "header"),
    "no module for its exports": (change(SOURCE, "#     module: first\n", ""), SOURCE, "", "header"),
    "two chapters, one module": (change(SECOND, "module: second", "module: first"), SECOND, "", "header"),
    "two chapters, one number": (
        new_file("notebooks/source/01_zero.py", chapter_text("01", "zero")),
        None,
        "",
        "header",
    ),
    "a form that a save rewrites": (
        change(SOURCE, "#     minutes: 5\n#     module: first", "#     module: first\n#     minutes: 5"),
        SOURCE,
        "",
        "form",
    ),
    "code outside cells": (
        change(SOURCE, '# %% [markdown] lang="zh"', 'x = 1\n\n# %% [markdown] lang="zh"'),
        SOURCE,
        "",
        "source",
    ),
    "wrong number in the title": (
        change(SOURCE, "# # 01 · 小章", "# # 02 · 小章"),
        SOURCE,
        "01-small-chapter-01",
        "title",
    ),
    "title without table": (change(SOURCE, "# | --- | --- |\n", ""), SOURCE, "01-small-chapter-01", "title"),
    # tags
    "unknown tag": (change(SOURCE, "# %%\nprint", '# %% tags=["fancy"]\nprint'), SOURCE, "01-doubling-03", "tag"),
    "nbval-skip": (change(SOURCE, "# %%\nprint", '# %% tags=["nbval-skip"]\nprint'), SOURCE, "01-doubling-03", "tag"),
    "prose of no language": (
        change(SOURCE, '# %% [markdown] lang="zh"\n# ## 小结', "# %% [markdown]\n# ## 小结"),
        SOURCE,
        "",
        "tag",
    ),
    "unknown option": (
        change(SOURCE, '# %% tags=["hide"]', '# %% tags=["hide"] width="3"'),
        SOURCE,
        "01-small-chapter-03",
        "tag",
    ),
    "two roles": (extra(code("assert True", "check", "solution")), SOURCE, ADDED, "tag"),
    "a check that cannot fail": (extra(code("first(1)", "check")), SOURCE, ADDED, "check"),
    # rhythm
    "too few cells": (lambda root: _drop(root, LONG_ZH, 4), SOURCE, "", "cells"),
    "too many cells": (extra(*[code("first(1)")] * 25), SOURCE, "", "cells"),
    "too few checks": (change(SOURCE, '# %% tags=["check"]', "# %%"), SOURCE, "", "checks"),
    "too few solutions": (change(SOURCE, '# %% tags=["solution"]', "# %%"), SOURCE, "", "checks"),
    "no picture": (change(SOURCE, "show(base64", "shown(base64"), SOURCE, "", "picture"),
    "long median": (extra(*[code(TWENTY[:80])] * 18), SOURCE, "", "code"),
    "many long cells": (extra(*[code(TWENTY)] * 4), SOURCE, "", "code"),
    "one cell over forty lines": (extra(code(TWENTY + "\n" + TWENTY + "\nx = 1")), SOURCE, ADDED, "code"),
    # imports
    "magic": (extra(code(f"x = (\n{MAGIC}")), SOURCE, ADDED, "syntax"),
    "a later module": (extra(code("from diffusion_engine.second import second")), SOURCE, ADDED, "import"),
    "a later module, as a name": (extra(code("from diffusion_engine import second")), SOURCE, ADDED, "import"),
    "its own module": (extra(code("import diffusion_engine.first")), SOURCE, ADDED, "import"),
    "a module that nobody builds": (extra(code("import diffusion_engine.nothing")), SOURCE, ADDED, "import"),
    "the package as a whole": (extra(code("import diffusion_engine")), SOURCE, ADDED, "import"),
    "a hand-written module that uses a later one": (
        both(new_file("diffusion_engine/hand.py", HAND), extra(code("import diffusion_engine.hand"))),
        SOURCE,
        ADDED,
        "import",
    ),
    "diffusers outside a check": (extra(code("def f():\n    import diffusers")), SOURCE, ADDED, "import"),
    "a strange dependency in the module": (extra(code("import matplotlib", "export")), SOURCE, ADDED, "import"),
    "the tools in the module": (extra(code("from course.figures import show", "export")), SOURCE, ADDED, "import"),
    "the other package in the module": (extra(code("import minivllm.qwen3", "export")), SOURCE, ADDED, "import"),
    "a tool that does not exist": (extra(code("from course.paint import show")), SOURCE, ADDED, "import"),
    # twins
    "no en twin": (lambda root: _drop(root, LONG_EN, 1), SOURCE, "", "twin"),
    "no zh twin": (lambda root: _drop(root, LONG_ZH, 1), SOURCE, "", "twin"),
    "zh changed alone": (change(SOURCE, "一个函数", "两个函数"), SOURCE, "01-small-chapter-01", "stamp"),
    "en changed alone": (
        change(SOURCE, "You build a small", "You write a small"),
        SOURCE,
        "01-small-chapter-01",
        "stamp",
    ),
    "no stamp": (lambda root: _unstamp(root), SOURCE, "01-small-chapter-01", "stamp"),
    "headings differ": (pair("\n\n### 小节", "\n\nSection"), SOURCE, ADDED, "parity"),
    "heading levels differ": (pair("\n\n### 小节", "\n\n#### Section"), SOURCE, ADDED, "parity"),
    "a formula has another operator": (pair("$a + b$", "$a - b$"), SOURCE, ADDED, "parity"),
    "a formula is missing": (pair("$$a = b$$", ""), SOURCE, ADDED, "parity"),
    "links differ": (pair("[词](../../notes/terms.csv)", "[term](01_first.ipynb)"), SOURCE, ADDED, "parity"),
    "figures differ": (pair("![图](../../notes/terms.csv)", ""), SOURCE, ADDED, "parity"),
    "tables differ": (pair("\n\n| a |\n| --- |\n| b |", "\n\n| a |\n| --- |"), SOURCE, ADDED, "parity"),
    "lists differ": (pair("\n\n- a\n- b", "\n\n- a"), SOURCE, ADDED, "parity"),
    # prose
    "bold left literal": (pair("**重点。**后文", "**point** after"), SOURCE, ADDED, "bold"),
    "money becomes maths": (pair("`x` $5 到 $10", "`x` $5 到 $10"), SOURCE, ADDED, "math"),
    "a bar splits a formula": (pair("\n\n| a | b |\n| --- | --- |\n| $p(a|b)$ | c |", ""), SOURCE, ADDED, "math"),
    "align": (pair("$$\\begin{align}a\\end{align}$$", "$$\\begin{align}a\\end{align}$$"), SOURCE, ADDED, "math"),
    "a figure without alt text": (
        pair("![](../../notes/terms.csv)", "![](../../notes/terms.csv)"),
        SOURCE,
        ADDED,
        "alt",
    ),
    "a dangling link": (pair("[x](../../notes/gone.md)", "[x](../../notes/gone.md)"), SOURCE, ADDED, "link"),
    "a dangling HTML figure": (pair('<img src="gone.png">', '<img src="gone.png">'), SOURCE, ADDED, "link"),
    "an absolute link": (pair("[x](/tmp)", "[x](/tmp)"), SOURCE, ADDED, "link"),
    "a forbidden zh term": (pair("噪音", "noise"), SOURCE, ADDED, "term"),
    "a forbidden en term": (pair("噪声", "Hisses and hiss"), SOURCE, ADDED, "term"),
    "a long zh cell": (pair(LONG_ZH * 4, ""), SOURCE, ADDED, "prose"),
    "a long en cell": (pair("", f"{LONG_EN} " * 4), SOURCE, ADDED, "prose"),
    "a short cell": (extra(prose("太短。", "Too short.")), SOURCE, ADDED, "prose"),
    "a short median": (
        extra(*[prose("只有十来个字的一个小格子。", "Only these eight small words stand in here.")] * 10),
        SOURCE,
        "",
        "prose",
    ),
    # generated files
    "an edited module": (change(MODULE, "return 2 * x", "return 3 * x"), MODULE, "", "module"),
    "a missing module": (lambda root: (root / MODULE).unlink(), MODULE, "", "module"),
    "a module older than its source": (change(SOURCE, "return 2 * x", "return x + x"), MODULE, "", "module"),
    "a missing notebook": (lambda root: (root / EN).unlink(), EN, "", "notebook"),
    "an edited cell": (
        in_notebook(ZH, lambda n: cell_of(n, "01-doubling-03").update(source=["1"])),
        ZH,
        "01-doubling-03",
        "notebook",
    ),
    "a prose cell older than its source": (
        change(SOURCE, "You build a small", "You write a small"),
        EN,
        "01-small-chapter-01",
        "notebook",
    ),
    "a deleted cell": (in_notebook(ZH, lambda n: n["cells"].pop()), ZH, "01-recap-02", "notebook"),
    "a new cell": (in_notebook(ZH, lambda n: n["cells"].append({**n["cells"][0], "id": "new"})), ZH, "new", "notebook"),
    "a moved cell": (in_notebook(ZH, lambda n: n["cells"].append(n["cells"].pop(5))), ZH, "01-doubling-02", "notebook"),
    "changed tags": (
        in_notebook(ZH, lambda n: cell_of(n, "01-doubling-04")["metadata"].clear()),
        ZH,
        "01-doubling-04",
        "notebook",
    ),
    "changed metadata": (in_notebook(ZH, lambda n: n["metadata"].update(toc=1)), ZH, "", "notebook"),
    "broken JSON": (new_file(ZH, "<<<<<<< ours"), SOURCE, "", "module"),
    "outputs never stored": (in_notebook(ZH, lambda n: n["metadata"]["course"].pop("run")), ZH, "", "outputs"),
    "outputs older than the code": (change(SOURCE, "\nfirst(1)\n", "\nfirst(1) + 1\n"), ZH, "", "outputs"),
    "outputs older than a module": (
        change(MODULE, "return 2 * x", "return 3 * x"),
        "notebooks/zh/02_second.ipynb",
        "",
        "outputs",
    ),
    "outputs cleared": (in_notebook(ZH, lambda n: cell_of(n, "01-doubling-03").update(outputs=[])), ZH, "", "outputs"),
    "outputs of two runs": (in_notebook(EN, set_output("01-doubling-03", BIG)), EN, "01-doubling-03", "outputs"),
    "a stored error": (in_notebook(ZH, set_output("01-doubling-03", ERROR)), ZH, "01-doubling-03", "outputs"),
    "a live widget": (in_notebook(ZH, set_output("01-doubling-03", WIDGET)), ZH, "01-doubling-03", "outputs"),
    "saved widget state": (in_notebook(ZH, lambda n: n["metadata"].update(widgets={})), ZH, "", "outputs"),
    "a picture without alt text": (in_notebook(ZH, set_output("01-doubling-04", MUTE)), ZH, "01-doubling-04", "alt"),
    "a large notebook": (in_notebook(ZH, set_output("01-doubling-03", BIG)), ZH, "", "size"),
    "a notebook without source": (
        new_file("notebooks/zh/09_gone.ipynb", "{}"),
        "notebooks/zh/09_gone.ipynb",
        "",
        "orphan",
    ),
    "a module without chapter": (
        new_file("diffusion_engine/gone.py", "# Generated from notebooks/source/09_gone.py\n"),
        "diffusion_engine/gone.py",
        "",
        "orphan",
    ),
    "a source with an odd name": (new_file("notebooks/source/Draft.py", ""), "notebooks/source/Draft.py", "", "orphan"),
    # documents
    "a note in one language": (lambda root: (root / "notes/01_flow.en.md").unlink(), "notes/01_flow.en.md", "", "twin"),
    "a card in one language": (new_file("papers/01_x.en.md", "# X\n"), "papers/01_x.zh.md", "", "twin"),
    "a note's zh changed alone": (change("notes/01_flow.zh.md", "# 流", "# 河"), "notes/01_flow.en.md", "", "stamp"),
    "a note's en changed alone": (
        change("notes/01_flow.en.md", "# Flow", "# River"),
        "notes/01_flow.en.md",
        "",
        "stamp",
    ),
    "a note's formulas differ": (change("notes/01_flow.en.md", "$a+b$", "$a-b$"), "notes/01_flow.en.md", "", "parity"),
    "a note's dangling link": (
        change("notes/01_flow.zh.md", "(terms.csv)", "(gone.csv)"),
        "notes/01_flow.zh.md",
        "",
        "link",
    ),
    "a note's literal bold": (change("notes/01_flow.zh.md", "见", "**见。**见"), "notes/01_flow.zh.md", "", "bold"),
    "a note's forbidden term": (change("notes/01_flow.zh.md", "见", "噪音"), "notes/01_flow.zh.md", "", "term"),
}


def _drop(root, text, count):
    """Take whole prose cells that hold ``text`` out of the first chapter."""
    path = root / SOURCE
    parts = path.read_text(encoding="utf-8").split("# %%")
    plain = [part for part in parts if text in part and "##" not in part][:count]
    assert len(plain) == count
    for part in plain:
        parts.remove(part)
    path.write_text("# %%".join(parts), encoding="utf-8")


def _unstamp(root):
    path = root / SOURCE
    head, tail = path.read_text(encoding="utf-8").split(' twin="', 1)
    path.write_text(head + tail[tail.index('"') + 1 :], encoding="utf-8")


def test_the_clean_tree_is_clean(root):
    assert check_all(root) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_named_by_file_cell_and_rule(root, fault):
    plant, file, cell, rule = FAULTS[fault]
    plant(root)
    found = [
        f
        for f in check_all(root)
        if f.rule == rule and (file is None or f.file == file) and (not cell or f.cell == cell)
    ]
    assert found, [f.text() for f in check_all(root)]
    assert all(f.message for f in found)


def test_rules_have_no_fault_left_unplanted():
    planted = {rule for _, _, _, rule in FAULTS.values()}
    assert planted >= {
        "header",
        "form",
        "source",
        "title",
        "tag",
        "check",
        "cells",
        "checks",
        "picture",
        "code",
        "syntax",
    }
    assert planted >= {"import", "twin", "stamp", "parity", "bold", "math", "alt", "link", "term", "prose"}
    assert planted >= {"module", "notebook", "outputs", "size", "orphan"}


@pytest.mark.parametrize(
    ("zh", "en"),
    [
        ("`**` 与 \\*\\*", "`**` and \\*\\*"),
        ("\\$5 到 \\$10", "\\$5 to \\$10"),
        ("`papers/03_dit`", "`papers/03_dit`"),
        ("$x$ 两次 $x$ 与 $\\mu, s_0$", "once $0.5$"),
        ("$a = b \\text{ 当 } c$", "$a = b \\text{ if } c$"),
        ("[外](https://zh.example.org/zh/)", "[out](https://en.example.org/en/)"),
        ("`噪音`", "`hiss`"),
    ],
)
def test_what_is_right_stays_green(root, zh, en):
    pair(zh, en)(root)
    ours = {"parity", "bold", "math", "link", "term", "prose", "stamp", "twin"}
    assert [f.text() for f in check_all(root) if f.rule in ours] == []


def test_a_longer_term_may_hold_a_forbidden_one(root):
    edit(root / "notes" / "terms.csv", "噪声,noise,噪音,hiss\n", "噪声,noise,噪音,hiss\n降噪音箱,quiet box,,\n")
    pair("降噪音箱", "quiet box")(root)
    assert not [f for f in check_all(root) if f.rule == "term"]
    pair("降噪音箱里有噪音", "quiet box")(root)
    assert [f for f in check_all(root) if f.rule == "term"]


def test_the_overview_may_import_everything_and_the_borrower_its_references(root):
    overview = chapter_text("00", "overview", [code("from diffusion_engine import second\nimport diffusion_engine")])
    overview = overview.replace("#     module: overview\n", "").replace(' tags=["export"]', "")
    (root / "notebooks" / "source" / "00_overview.py").write_text(overview, encoding="utf-8")
    last = chapter_text("24", "run", [code("import diffusers", "export")]).replace(
        "module: run", "module: reference/run"
    )
    (root / "notebooks" / "source" / "24_run.py").write_text(last, encoding="utf-8")
    found = [f.text() for f in check_all(root) if f.rule in ("import", "header", "checks", "cells")]
    assert [text for text in found if "00_overview" in text] == []
    assert [text for text in found if "outside a check" in text] == []


def test_the_command_is_red_in_plain_lines_and_green_in_one(root):
    invoke = lambda *numbers: CliRunner().invoke(app, ["--root", str(root), "check", *numbers])  # noqa: E731
    green = invoke()
    assert green.exit_code == 0 and green.output == "nothing drifted\n"
    edit(root / SOURCE, "一个函数", "两个函数")
    red = invoke()
    assert red.exit_code == 1 and "\x1b" not in red.output
    assert any(line.startswith(f"{SOURCE}:21 [01-small-chapter-01] stamp: ") for line in red.output.splitlines()), (
        red.output
    )
    assert invoke("02").exit_code == 0


def test_a_broken_term_list_is_an_error_that_teaches(root):
    edit(root / "notes" / "terms.csv", "噪声,noise,噪音,hiss", "噪声,noise,噪声,hiss")
    result = CliRunner().invoke(app, ["--root", str(root), "check"])
    assert result.exit_code == 2 and "both a term and forbidden" in result.output


def test_twins_are_green_after_a_look(root):
    edit(root / SOURCE, "一个函数", "两个函数")
    edit(root / "notes/01_flow.zh.md", "# 流", "# 河")
    result = CliRunner().invoke(app, ["--root", str(root), "twins", "01", "notes/01_flow"])
    assert result.exit_code == 0 and "01-small-chapter-01" in result.output and "2 stamped anew" in result.output
    assert not [f for f in check_all(root) if f.rule in ("stamp", "form")]

"""The site built once, and a headless Chromium without a network that looks at it from disk."""

import os
import shutil
from pathlib import Path

import pytest
from small_site import ROOT, small_site

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60_000  # milliseconds; a busy machine is slow, not broken


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The real course as a site, in a temporary folder."""
    from course.site import build_site

    return build_site(ROOT, tmp_path_factory.mktemp("site") / "build")


@pytest.fixture(scope="session")
def small_built(tmp_path_factory):
    """The small repository as a site: it has a card whether the course has one yet or not."""
    from course.site import build_site

    return build_site(small_site(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="session")
def chromium():
    """A running browser; skips without one, and fails then on CI."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        reason = "no Chromium here: apt-get install chromium fonts-noto-cjk"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """visit(folder, path, **context): an open page; it fails the test on any request elsewhere and any console error."""
    contexts, faults = [], []

    def go(folder: Path, path: str, **options):
        options.setdefault("viewport", {"width": 1280, "height": 900})
        context = options.pop("context", None)
        if context is None:
            context = chromium.new_context(offline=True, **options)
            context.set_default_timeout(PATIENCE)
            contexts.append(context)
        page = context.new_page()
        home = folder.as_uri() + "/"
        page.on("request", lambda r: faults.append(r.url) if not r.url.startswith((home, "data:")) else None)
        page.on(
            "requestfailed", lambda r: faults.append(f"failed: {r.url}") if r.failure != "net::ERR_ABORTED" else None
        )
        page.on("console", lambda m: faults.append(f"{path}: {m.text}") if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: faults.append(f"{path}: {e}"))
        page.goto(home + path, timeout=PATIENCE)
        return page

    yield go
    for context in contexts:
        context.close()
    assert not faults

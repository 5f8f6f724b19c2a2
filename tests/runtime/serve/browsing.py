"""A browser for tests of the page; whatever goes wrong in it fails the test that used it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS = 120_000  # only a broken page waits so long
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 760},
    "has_touch": True,
    "is_mobile": True,
}


@contextmanager
def browsing() -> Iterator[Browser]:
    """Chromium without a window; skips where there is none, or nothing to drive it with."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("needs chromium")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses root
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, base: str, *, wait: bool = True, excused: str = "", **settings: Any
) -> Iterator[Page]:
    """The page of the server at ``base`` in a profile of its own.

    Fails for a script error, for a complaint of the browser (a breach of the policy is one) and for
    a request to anywhere else. An answer that is an error is none: tests ask for some. So is what
    holds the words ``excused``.
    """
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | settings))
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    wrong: list[str] = []

    def console(message: ConsoleMessage) -> None:
        expected = "Failed to load resource" in message.text or (
            excused and excused in message.text
        )
        if message.type in ("error", "warning") and not expected:
            wrong.append(message.text)

    def request(asked: Request) -> None:
        if not asked.url.startswith((base, "blob:")):
            wrong.append(f"asks {asked.url}")

    page.on("console", console)
    page.on("request", request)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}"))
    try:
        page.goto(base)
        if wait:
            page.locator('#state[data-state="ready"]').wait_for()
        yield page
        assert wrong == []
    finally:
        context.close()


def ask(page: Page, text: str = "hi") -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def ended(page: Page) -> None:
    """Return when no answer is under way."""
    page.get_by_role("button", name="Send", exact=True).wait_for()


def thinking(page: Page, on: bool) -> None:
    page.get_by_role("checkbox", name="Think first").set_checked(on)


def answer(page: Page) -> str:
    return page.locator(".answer .prose").last.inner_text()


def sent(page: Page, act: Callable[[], None]) -> dict[str, Any]:
    """The body of the question that ``act`` asks."""
    with page.expect_request("**/v1/chat/completions") as request:
        act()
    body = request.value.post_data_json
    ended(page)
    assert isinstance(body, dict)
    return body

"""The page in a real browser, against a real server: chat, live view, keyboard, phone, safety."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import LogitsError
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.serve import page as files
from tests.runtime.serve.browsing import (
    PHONE,
    answer,
    ask,
    browsing,
    ended,
    opened,
    sent,
    thinking,
)
from tests.runtime.serve.scripted import ScriptedEngine
from tests.runtime.serve.served import PATIENCE_S, Served, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

THINK, THINK_END = 260, 261
ROOT = Path(files.__file__).parent


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as made:
        yield made


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    served.engine.forwards.clear()
    with opened(browser, served.base) as made:
        yield made


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


# ------------------------------------------------------------------ files


def test_every_file_is_served_with_its_type_and_policy(served: Served) -> None:
    for name, media_type in files.FILES.items():
        path = "/" if name == "index.html" else f"/page/{name}"
        response = served.http.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"] == media_type
        assert response.headers["content-security-policy"] == files.POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.content == files.read(name)
    assert served.http.get("/page/..%2f__init__.py").status_code == 404
    assert served.http.get("/page/__init__.py").status_code == 404


def test_every_file_of_the_folder_is_a_part_of_the_page() -> None:
    held = {path.name for path in ROOT.iterdir() if path.is_file() and path.suffix != ".py"}
    assert held == set(files.FILES)
    text = "".join((ROOT / name).read_text("utf-8") for name in held)
    assert set(re.findall(r'"/page/([\w.]+)"', text)) == held - {"index.html"}


def test_other_names_are_no_part_of_it() -> None:
    with pytest.raises(KeyError):
        files.read("__init__.py")


INLINE = """() => new Promise((resolve) => {
    const script = document.createElement("script");
    script.textContent = "window.ran = true";
    document.addEventListener("securitypolicyviolation", () => resolve(false));
    document.body.append(script);
    if (window.ran) resolve(true);
})"""


def test_the_policy_lets_nothing_inline_run(browser: Browser, served: Served) -> None:
    with opened(browser, served.base, excused="Content Security Policy") as page:
        assert page.evaluate(INLINE) is False


# ------------------------------------------------------------------ chat


def test_an_answer_appears_while_it_is_made(page: Page, served: Served) -> None:
    served.script("Hello **world**")
    thinking(page, False)
    with served.engine.held():
        ask(page, "who?")
        served.engine.await_held()
        for _ in "Hello ":
            served.engine.step()
        page.locator(".answer .prose", has_text="Hello").wait_for()
        assert page.locator(".answer strong").count() == 0
        assert page.get_by_role("button", name="Stop").is_visible()
        assert page.locator("#log").get_attribute("aria-busy") == "true"
    ended(page)
    assert page.locator(".bubble").inner_text() == "who?"
    assert answer(page) == "Hello world"
    assert page.locator(".answer strong").inner_text() == "world"
    assert page.locator("#log").get_attribute("aria-busy") is None
    assert "16 tokens" in page.locator(".answer .foot").inner_text()


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_answer_on_the_server(page: Page, served: Served, how: str) -> None:
    served.script("a" * 2000)
    thinking(page, False)
    with served.engine.held():
        ask(page)
        served.engine.await_held()
        for _ in range(5):
            served.engine.step()
        page.locator(".answer .prose", has_text="aaa").wait_for()
        if how == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        ended(page)
    assert "Stopped." in page.locator(".answer .foot").inner_text()
    until(lambda: served.service.scheduler.stats().running == 0)  # type: ignore[union-attr]
    assert len(served.engine.forwards) < 1000
    assert 3 <= len(answer(page)) < 1000
    served.script("again")
    ask(page)
    ended(page)
    assert answer(page) == "again"


def test_thinking_is_folded_and_opens_by_keyboard(page: Page, served: Served) -> None:
    served.script("because it is so</think>Yes.")
    with served.engine.held():
        ask(page)
        served.engine.await_held()
        for _ in range(6):
            served.engine.step()
        page.locator(".thoughts.live", has_text="Thinking").wait_for()
        assert not page.locator(".reasoning").is_visible()
    ended(page)
    assert answer(page) == "Yes."
    summary = page.locator(".thoughts summary")
    assert re.fullmatch(r"Thought for [\d.]+ s", summary.inner_text())
    assert not page.locator(".reasoning").is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator(".reasoning").inner_text() == "because it is so"


@pytest.mark.parametrize(("on", "token"), [(True, THINK), (False, THINK_END)])
def test_the_switch_says_whether_the_model_thinks(
    page: Page, served: Served, on: bool, token: int
) -> None:
    served.script("</think>ok" if on else "ok")
    thinking(page, on)
    ask(page)
    ended(page)
    # All but what is never kept of a prompt may come from the prefix cache.
    fed = [fed for forward in served.engine.forwards for _, ids in forward for fed in ids]
    assert (THINK in fed, THINK_END in fed) == (token == THINK, token == THINK_END)
    assert answer(page) == "ok"


def test_a_conversation_goes_on_and_begins_anew(page: Page, served: Served) -> None:
    thinking(page, False)
    for question, reply in (("one", "first"), ("two", "second")):
        served.script(reply)
        ask(page, question)
        ended(page)
    assert page.locator(".turn").count() == 4
    assert "cached" in page.locator(".answer .foot").last.inner_text()
    page.reload()
    assert page.locator(".answer .prose").all_inner_texts() == ["first", "second"]
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    page.reload()
    assert page.locator(".turn").count() == 0
    body = sent(page, lambda: ask(page, "three"))
    assert body["messages"] == [{"role": "user", "content": "three"}]


def test_the_newest_text_is_followed_until_the_reader_scrolls_up(
    page: Page, served: Served
) -> None:
    served.script("line\n\n" * 60)
    thinking(page, False)
    at_end = "log => log.scrollHeight - log.scrollTop - log.clientHeight < 2"
    log = page.locator("#log")
    ask(page)
    ended(page)
    assert log.evaluate(at_end)
    log.evaluate("log => { log.scrollTop = 0; }")
    latest = page.get_by_role("button", name="Go to the newest text")
    latest.wait_for()
    latest.click()
    assert log.evaluate(at_end)
    assert not latest.is_visible()


def test_again_asks_the_same_question(page: Page, served: Served) -> None:
    served.script("one")
    thinking(page, False)
    ask(page, "what?")
    ended(page)
    served.script("two")
    body = sent(page, page.get_by_role("button", name="Again").click)
    assert body["messages"] == [{"role": "user", "content": "what?"}]
    assert page.locator(".answer .prose").all_inner_texts() == ["two"]


def test_shift_enter_breaks_the_line(page: Page, served: Served) -> None:
    served.script("ok")
    thinking(page, False)
    field = page.get_by_role("textbox", name="Message")
    field.press_sequentially("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    assert page.locator(".question").count() == 0
    body = sent(page, lambda: page.keyboard.press("Enter"))
    assert body["messages"][0]["content"] == "a\nb"
    assert field.input_value() == ""


def test_nothing_is_sent_without_text(page: Page) -> None:
    assert page.get_by_role("button", name="Send", exact=True).is_disabled()
    page.get_by_role("textbox", name="Message").fill("  ")
    page.keyboard.press("Enter")
    assert page.locator(".turn").count() == 0


def test_a_failure_is_told_and_can_be_tried_again(page: Page, served: Served) -> None:
    served.script("fine")
    thinking(page, False)
    error = LogitsError(expected="finite numbers", found="nan")
    served.engine.fails = lambda ids: error
    try:
        ask(page)
        alert = page.get_by_role("alert")
        assert "nan" in alert.inner_text()
    finally:
        served.engine.fails = lambda ids: None
    page.get_by_role("button", name="Try again").click()
    page.locator(".prose", has_text="fine").wait_for()
    assert page.get_by_role("alert").count() == 0


def test_a_full_queue_says_when_to_come_back(browser: Browser) -> None:
    with serving(queue=1, concurrent=1) as busy, opened(browser, busy.base) as page:
        busy.script("ok")
        with busy.engine.held():
            others = [threading.Thread(target=busy.chat, daemon=True) for _ in range(2)]
            for other in others:
                other.start()
            until(lambda: _asked(busy) == 2)
            page.locator("#waiting", has_text="1").wait_for()
            ask(page)
            assert re.search(r"Try again in \d+ s\.", page.get_by_role("alert").inner_text())
        for other in others:
            other.join()


def _asked(busy: Served) -> int:
    assert busy.service.scheduler is not None
    stats = busy.service.scheduler.stats()
    return stats.running + stats.waiting


# ------------------------------------------------------------------ what an answer may hold


def test_an_answer_is_text_and_never_markup(page: Page, served: Served) -> None:
    evil = '<img src=x onerror="alert(1)"><script>alert(2)</script> [x](javascript:alert(3)) '
    evil += "**b** <b>i"
    served.script(evil)
    thinking(page, False)
    ask(page, '<b onclick="alert(4)">bold</b>')
    ended(page)
    assert page.locator(".bubble").inner_text() == '<b onclick="alert(4)">bold</b>'
    assert answer(page) == evil.replace("**", "")
    assert page.locator(".turn :is(img, script, iframe, a, [onclick])").count() == 0


def test_markdown_is_set(page: Page, served: Served) -> None:
    served.script(
        "# Head\n\ntext `code` *em* [site](https://example.org/a) \\*not\\*\n\n"
        "- one\n- two\n  1. deep\n\n> quoted\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        "```python\nif x < 1:\n    **pass**\n```\n"
    )
    thinking(page, False)
    ask(page)
    ended(page)
    prose = page.locator(".prose")
    assert prose.locator("h3").inner_text() == "Head"
    assert prose.locator("p > code").inner_text() == "code"
    assert prose.locator("em").inner_text() == "em"
    assert "*not*" in prose.inner_text()
    link = prose.get_by_role("link", name="site")
    assert link.get_attribute("href") == "https://example.org/a"
    assert "noopener" in (link.get_attribute("rel") or "")
    assert prose.locator("ul > li").count() == 2
    assert prose.locator("ul > li > ol > li").inner_text() == "deep"
    assert prose.locator("blockquote").inner_text() == "quoted"
    assert prose.locator("tbody td").all_inner_texts() == ["1", "2"]
    assert prose.locator("pre code").text_content() == "if x < 1:\n    **pass**"


def test_no_text_breaks_the_page(page: Page) -> None:
    marks = ["> ", "- ", "*", "**", "_", "`", "|", "[", "<", "# ", "~~~", "1. ", "\n", "\\", "> - "]
    texts = [mark * (20_000 if mark in ("> ", "- ") else 3000) + "end" for mark in marks]
    shown = page.evaluate(SHOW, texts)
    assert [mark for mark, (_, text) in zip(marks, shown, strict=True) if "end" not in text] == []
    assert max(deep for deep, _ in shown) < 40  # a browser lays out no element in 20,000 others


def test_text_that_grows_is_shown_as_text_that_is_whole(page: Page) -> None:
    text = (
        "# a\n\nb `c\n\n```py\nd\n\ne\n```\n\n1. f\n   - g\n\n   h\n2. i\n\n"
        "| j |\n|---|\n| k |\n\n> m\n\n**l**"
    )
    whole = page.evaluate(SHOW, [text])
    assert page.evaluate(GROW, text) == whole[0][1]


SHOW = """async (texts) => {
    const { show } = await import("/page/markdown.js");
    return texts.map((text) => {
        const target = document.createElement("div");
        show(target, text);
        let deep = 0;
        for (let at = target; at; at = at.lastElementChild) deep += 1;
        return [deep, target.textContent.trim()];
    });
}"""
GROW = """async (text) => {
    const { show } = await import("/page/markdown.js");
    const target = document.createElement("div");
    for (let length = 1; length <= text.length; length += 1) show(target, text.slice(0, length));
    return target.textContent.trim();
}"""


def test_code_is_copied(browser: Browser, served: Served) -> None:
    served.script("```\nx = 1\n```")
    permissions = ["clipboard-read", "clipboard-write"]
    with opened(browser, served.base, permissions=permissions) as page:
        thinking(page, False)
        ask(page)
        ended(page)
        page.locator(".code").get_by_role("button", name="Copy").click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == "x = 1"


# ------------------------------------------------------------------ settings and key


def test_sampling_controls_reach_the_server_and_stay(page: Page, served: Served) -> None:
    served.script("ok")
    thinking(page, False)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("slider", name="Temperature").fill("0.6")
    page.get_by_role("slider", name="Top p").fill("0.9")
    page.get_by_label("Most new tokens").fill("7")
    page.get_by_label("Seed").fill("3")
    page.get_by_role("button", name="Close").click()
    page.reload()
    body = sent(page, lambda: ask(page))
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    wanted = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 7, "seed": 3, "stream": True}
    assert {name: body[name] for name in wanted} == wanted
    assert body["thinking"] == {"type": "disabled"}
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Defaults").click()
    assert page.get_by_role("slider", name="Temperature").input_value() == "0"  # the model's own
    body = sent(page, lambda: ask(page))
    assert "seed" not in body
    assert body["temperature"] == 0


def test_the_key_is_asked_for_until_it_is_right(browser: Browser) -> None:
    with (
        serving(api_key="sesame") as locked,
        opened(browser, locked.base, wait=False) as page,
    ):
        locked.script("</think>open")
        field = page.get_by_label("API key")
        field.fill("geheim…")  # which a header cannot hold
        page.keyboard.press("Enter")
        page.get_by_text("a character that no key can have").wait_for()
        field.fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("That key was not accepted.").wait_for()
        field.fill(" sesame ")
        page.keyboard.press("Enter")
        page.locator('#state[data-state="ready"]').wait_for()
        ask(page)
        ended(page)
        assert answer(page) == "open"
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")


# ------------------------------------------------------------------ state and live view


def test_loading_is_shown_as_it_goes_on(browser: Browser) -> None:
    go_on = [threading.Event(), threading.Event()]

    def load(report: Callable[[int, int], None]) -> ScriptedEngine:
        report(40, 100)
        assert go_on[0].wait(300)
        report(90, 100)
        assert go_on[1].wait(300)
        return engine

    engine = ScriptedEngine()
    with (
        serving(engine, load=load, wait=False) as slow,
        opened(browser, slow.base, wait=False) as page,
    ):
        bar = page.locator("#loading-bar")
        page.locator("#state", has_text="loading, 40 %").wait_for()
        assert bar.evaluate("bar => bar.value") == pytest.approx(0.4)
        page.get_by_role("textbox", name="Message").fill("early")
        assert page.get_by_role("button", name="Send", exact=True).is_disabled()
        go_on[0].set()
        page.locator("#state", has_text="loading, 90 %").wait_for()
        go_on[1].set()
        page.locator('#state[data-state="ready"]').wait_for()
        assert not bar.is_visible()
        assert page.get_by_role("button", name="Send", exact=True).is_enabled()


def test_a_server_that_is_gone_is_said(browser: Browser) -> None:
    with serving() as leaving:
        base = leaving.base
        with opened(browser, base) as page:
            leaving.server.should_exit = True
            page.locator("#state", has_text="no connection").wait_for()
            page.get_by_role("textbox", name="Message").fill("hello?")
            assert page.get_by_role("button", name="Send", exact=True).is_disabled()


def test_the_live_view_counts(page: Page, served: Served) -> None:
    before = served.http.get("/live").json()
    served.script("abc")
    thinking(page, False)
    ask(page)
    ended(page)
    written = before["completion_tokens"] + 4
    page.locator("#written", has_text=f"{written:,}").wait_for()
    after = served.http.get("/live?experts=0").json()
    assert (after["completion_tokens"], after["running"], after["waiting"]) == (written, 0, 0)
    assert page.locator("#running").inner_text() == "0"
    assert page.get_by_text("the choice of experts is not told").is_visible()
    entries = after["prefix"]["entries"]
    page.locator("#prefix-text", has_text=f"{entries} snapshot").wait_for()


@pytest.fixture(scope="module")
def paged(tiny_artifact: Path) -> Iterator[Served]:
    """ds4-tiny with room for a quarter of its experts."""
    engine = Engine.load(tiny_artifact, threads=1, cache=CacheOptions(slots=4))
    with serving(load=lambda report: engine) as made:
        yield made


def test_the_heat_map_moves_with_the_model(browser: Browser, paged: Served) -> None:
    with opened(browser, paged.base, reduced_motion="reduce") as page:
        canvas = page.locator("#map")
        page.locator("#map-summary", has_text="of 64 in memory").wait_for()
        before = canvas.evaluate("canvas => canvas.toDataURL()")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Most new tokens").fill("12")
        ask(page, "def f(")
        ended(page)
        view = paged.http.get("/live").json()["experts"]
        most = max(max(row) for row in view["routed"])
        page.locator("#map-summary", has_text=f"{most} times").wait_for()
        assert canvas.evaluate("canvas => canvas.toDataURL()") != before
        assert "16 of 64 in memory" in page.locator("#map-summary").inner_text()
        hits, missed = view["hits"], view["misses"] + view["compulsory"]
        share = page.locator("#experts-facts dd").first.inner_text()
        assert float(share.removesuffix(" %")) == pytest.approx(
            100 * hits / (hits + missed), abs=0.51
        )
        _check_cells(page, view)


def _check_cells(page: Page, view: dict[str, Any]) -> None:
    """Pointer and arrow keys tell each expert's own numbers."""
    canvas, told = page.locator("#map"), page.locator("#map-cell")

    def words(layer: int, expert: int) -> str:
        count = view["routed"][layer][expert]
        where = "in memory" if view["resident"][layer][expert] else "not in memory"
        times = f"{count} time" + ("" if count == 1 else "s")
        return f"Layer {layer}, expert {expert}: chosen {times}, {where}"

    canvas.focus()
    for key, layer, expert in (("End", 0, 0), ("End", 0, 15), ("ArrowDown", 1, 15)):
        page.keyboard.press(key)
        assert told.inner_text() == words(layer, expert)
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 5.5 / 16, box["y"] + box["height"] * 2.5 / 4)
    assert told.inner_text() == words(2, 5)
    page.get_by_text("By layer").click()
    for layer, row in enumerate(page.locator("#layers tr").all()):
        cells = row.locator("th, td").all_inner_texts()
        assert cells[:3] == [str(layer), "4 of 16", str(sum(view["routed"][layer]))]


def test_an_expert_in_memory_looks_unlike_one_that_is_not(browser: Browser, paged: Served) -> None:
    paged.chat("def f(", max_tokens=2)
    view = paged.http.get("/live").json()["experts"]
    excused = "willReadFrequently"
    with opened(browser, paged.base, reduced_motion="reduce", excused=excused) as page:
        page.locator("#map-summary", has_text="16 of 64 in memory").wait_for()
        grey = page.evaluate(
            """view => {
                const canvas = document.getElementById("map");
                const brush = canvas.getContext("2d");
                const wide = canvas.width / view.experts;
                const tall = canvas.height / view.layers;
                return view.routed.map((row, layer) => row.map((_, expert) => {
                    const at = [(expert + 0.5) * wide, (layer + 0.5) * tall];
                    const [red, , blue] = brush.getImageData(...at, 1, 1).data;
                    return Math.abs(red - blue) < 20;
                }));
            }""",
            view,
        )
    assert [[not cell for cell in row] for row in grey] == [
        [bool(cell) for cell in row] for row in view["resident"]
    ]


def test_a_hidden_live_view_asks_for_no_map(browser: Browser, served: Served) -> None:
    with opened(browser, served.base) as page:
        page.get_by_role("button", name="Live").click()
        assert not page.locator("#live").is_visible()
        with page.expect_request("**/live*") as request:
            pass
        assert request.value.url.endswith("/live?experts=0")
        page.reload()
        assert not page.locator("#live").is_visible()
        with page.expect_request(re.compile("/live$")):
            page.get_by_role("button", name="Live").click()


# ------------------------------------------------------------------ everybody's


def test_all_of_it_is_reached_by_keyboard(page: Page) -> None:
    skip = page.get_by_role("link", name="Skip to the message field")
    assert page.locator("a, button, input, textarea, select").first.get_attribute("class") == "skip"
    skip.focus()
    assert skip.evaluate("link => link.getBoundingClientRect().top") >= 0
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    wanted = ["fresh", "tune", "watch", "ask", "thinking"]
    assert [each for each in reached if each in wanted][: len(wanted)] == wanted
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "system"
    page.keyboard.press("Escape")
    assert not page.locator("#settings").is_visible()
    assert page.evaluate("document.activeElement.id") == "tune"


@pytest.mark.parametrize("settings", [PHONE, {"viewport": {"width": 320, "height": 500}}])
def test_it_fits_a_phone(browser: Browser, served: Served, settings: dict[str, Any]) -> None:
    served.script("a long `" + "word" * 60 + "` and\n\n```\n" + "x" * 300 + "\n```")
    with opened(browser, served.base, **settings) as page:
        width, height = settings["viewport"].values()
        thinking(page, False)
        page.get_by_role("textbox", name="Message").fill("q" * 200)
        page.get_by_role("button", name="Send", exact=True).click()
        ended(page)

        def fits() -> bool:
            return bool(page.evaluate("document.scrollingElement.scrollWidth <= innerWidth"))

        assert fits()
        box = page.locator("#composer").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert height / 2 < box["y"] + box["height"] <= height
        assert not page.locator("#live").is_visible()
        page.get_by_role("button", name="Live").click()
        assert page.locator("#rate").is_visible()
        assert not page.locator("#composer").is_visible()
        assert fits()
        page.get_by_role("button", name="Live").click()
        page.get_by_role("button", name="Settings").click()
        assert page.get_by_role("slider", name="Temperature").is_visible()
        assert fits()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(browser: Browser, served: Served, scheme: Any) -> None:
    served.script("because</think>Some `code`, a [link](https://example.org) and **more**.")
    with opened(browser, served.base, color_scheme=scheme) as page:
        ask(page)
        ended(page)
        page.get_by_role("button", name="Settings").click()
        weak = page.evaluate(CONTRAST)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert weak == []
    assert (sum(map(int, re.findall(r"\d+", ground))) > 380) == (scheme == "light")


# The text elements whose contrast with what is behind them is below 4.5 (WCAG 2.2, 1.4.3); a
# disabled control need not have it.
CONTRAST = """() => {
    const part = (value) => {
        value /= 255;
        return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    };
    const rgba = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
    const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const colour = rgba(getComputedStyle(at).backgroundColor);
            if (colour[3] !== 0) return colour;
        }
        return [255, 255, 255];
    };
    const OTHERS = ":disabled, .unseen, script";
    const weak = [];
    for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!own || !element.checkVisibility() || element.closest(OTHERS)) continue;
        const [a, b] = [light(rgba(getComputedStyle(element).color)), light(behind(element))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) weak.push(`${element.tagName}.${element.className}: ${ratio.toFixed(2)}`);
    }
    return weak;
}"""

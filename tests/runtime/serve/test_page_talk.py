"""What becomes of a conversation on the page: refused, cut off, kept, copied; and its settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.serve.browsing import answer, ask, browsing, ended, opened, sent, thinking
from tests.runtime.serve.served import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

ASKED = "**/v1/chat/completions"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as made:
        yield made


@pytest.fixture(scope="module")
def tab(browser: Browser, shared: Served) -> Iterator[Page]:
    with opened(browser, shared.base) as made:
        yield made


@pytest.fixture
def page(tab: Page, served: Served) -> Page:
    """The module's tab, as new: what the browser kept is forgotten."""
    tab.evaluate("localStorage.clear(), sessionStorage.clear()")
    tab.reload()
    tab.locator('#state[data-state="ready"]').wait_for()
    thinking(tab, False)
    return tab


def talk(page: Page, served: Served, question: str, reply: str) -> list[dict[str, Any]]:
    """Ask and be answered; returns the messages that were sent."""
    served.script(reply)
    messages: list[dict[str, Any]] = sent(page, lambda: ask(page, question))["messages"]
    return messages


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# ------------------------------------------------------------------ questions and answers


def test_only_the_last_answer_is_made_again(page: Page, served: Served) -> None:
    assert talk(page, served, "    if x:\n  y\n\n", "one") == [user("    if x:\n  y")]
    again = page.get_by_role("button", name="Again")
    assert again.count() == 1
    served.script("two")
    with served.engine.held():
        ask(page, "next")
        served.engine.await_held()
        page.get_by_role("button", name="Stop").wait_for()
        assert again.count() == 0
    ended(page)
    assert again.count() == 1
    served.script("three")
    messages = sent(page, again.click)["messages"]
    assert messages == [user("    if x:\n  y"), model("one"), user("next")]
    assert page.locator(".answer .prose").all_inner_texts() == ["one", "three"]


# Once what changed has been laid out.
AT_END = """async (log) => {
    for (let frame = 0; frame < 2; frame += 1) await new Promise(requestAnimationFrame);
    return log.scrollHeight - log.scrollTop - log.clientHeight < 2;
}"""


def test_a_refused_question_is_told_and_never_sent_again(page: Page, served: Served) -> None:
    long = "x" * 5000
    talk(page, served, "one", "first")
    ask(page, long)
    alert = page.get_by_role("alert")
    assert "4096" in alert.inner_text().replace(",", "")
    field = page.get_by_role("textbox", name="Message")
    assert field.input_value() == long
    page.get_by_role("button", name="Settings").click()  # takes room from the conversation
    assert page.locator("#log").evaluate(AT_END)
    page.keyboard.press("Escape")
    assert page.get_by_role("button", name="Send", exact=True).is_enabled()
    assert page.locator(".question", has_text="Not sent").count() == 1
    assert page.get_by_role("button", name="Try again").count() == 0
    assert talk(page, served, "two", "second") == [user("one"), model("first"), user("two")]
    # What was written meanwhile is not replaced.
    page.evaluate(
        """text => {
            const field = document.getElementById("ask");
            field.value = text;
            document.getElementById("composer").requestSubmit();
            field.value = "written meanwhile";
        }""",
        long,
    )
    page.get_by_role("alert").nth(1).wait_for()
    assert field.input_value() == "written meanwhile"
    page.reload()
    assert page.locator(".question", has_text="Not sent").count() == 2
    before = [user("one"), model("first"), user("two"), model("second")]
    assert talk(page, served, "three", "third") == [*before, user("three")]


@pytest.mark.parametrize("steps", [0, 8])
def test_a_reload_keeps_the_question_and_says_that_the_answer_is_cut(
    page: Page, served: Served, steps: int
) -> None:
    served.script("a" * 1500)
    with served.engine.held():
        ask(page, "a question of worth")
        served.engine.await_held()
        for _ in range(steps):
            served.engine.step()
        if steps:
            page.locator(".answer .prose", has_text="aaa").wait_for()
        page.reload()
    page.locator('#state[data-state="ready"]').wait_for()
    assert page.locator(".bubble").inner_text() == "a question of worth"
    assert page.get_by_role("alert").inner_text() == "The answer was cut off."
    assert ("aaa" in answer(page)) == bool(steps)
    served.script("whole")
    messages = sent(page, page.get_by_role("button", name="Try again").click)["messages"]
    assert messages == [user("a question of worth")]
    assert page.locator(".answer .prose").all_inner_texts() == ["whole"]


def test_an_answer_without_text_says_so(page: Page, served: Served) -> None:
    foot = page.locator(".answer .foot")
    talk(page, served, "one", "")
    assert "No answer." in foot.last.inner_text()
    thinking(page, True)
    talk(page, served, "two", "only thoughts")
    assert "Only thoughts, no answer." in foot.last.inner_text()
    talk(page, served, "three", "hm</think>yes")
    assert "nswer" not in foot.last.inner_text()


BROKEN_STREAMS = {
    "data: {broken\n\n": "The server's answer is broken.",
    "data: null\n\n": "The server's answer is broken.",
    'data: {"choices": [{}]}\n\n': "The server's answer is broken.",
    'data: {"error": {"message": "out of luck"}}\n\n': "out of luck",
    ": nothing\n\n": "The answer was cut off: the connection ended.",
}


def test_a_broken_answer_is_told_in_words(page: Page) -> None:
    streams = iter(BROKEN_STREAMS)
    page.route(
        ASKED,
        lambda route: route.fulfill(content_type="text/event-stream", body=next(streams)),
        times=len(BROKEN_STREAMS),
    )
    for number, told in enumerate(BROKEN_STREAMS.values()):
        ask(page)
        assert page.get_by_role("alert").nth(number).inner_text() == told
        ended(page)
        assert page.get_by_role("button", name="Try again").is_visible()


def test_a_new_conversation_has_no_newer_text_to_go_to(page: Page, served: Served) -> None:
    talk(page, served, "one", "line\n\n" * 60)
    page.locator("#log").evaluate("log => { log.scrollTop = 0; }")
    latest = page.get_by_role("button", name="Go to the newest text")
    latest.wait_for()
    page.get_by_role("button", name="New chat").click()
    latest.wait_for(state="hidden")


def test_it_copies_where_a_page_has_no_clipboard(page: Page, served: Served) -> None:
    talk(page, served, "one", "- do:\n  ```\n  if a:\n      b\n  ```")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    copy = page.locator(".code button")
    copy.click()
    page.get_by_role("button", name="Copied").wait_for()
    page.get_by_role("textbox", name="Message").focus()
    page.keyboard.press("Control+V")
    assert page.get_by_role("textbox", name="Message").input_value() == "if a:\n    b"
    page.evaluate("document.execCommand = () => false")
    page.locator(".foot").get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Not copied").wait_for()
    assert "select the text" in page.locator("#said").inner_text()


# ------------------------------------------------------------------ settings


def written(field: Locator, text: str) -> None:
    """Type a value in place of a field's own."""
    field.press("Control+a")
    field.press_sequentially(text)


def test_a_number_that_is_none_is_told_and_not_used(page: Page, served: Served) -> None:
    served.script("ok")
    page.get_by_role("button", name="Settings").click()
    most, seed = page.get_by_label("Most new tokens"), page.get_by_label("Seed")
    assert most.get_attribute("placeholder") == "4,096, or what fits"
    written(most, "7")
    most.press("Tab")
    for field, name, texts in (
        (most, "max_tokens", ("10.5", "-3", "0", "e")),
        (seed, "seed", ("9007199254740993", "1.5", "-1")),
    ):
        for text in texts:
            written(field, text)
            told = page.locator("#" + (field.get_attribute("aria-describedby") or "none"))
            assert "Not used" in told.inner_text()
            assert field.get_attribute("aria-invalid") == "true"
            body = sent(page, lambda: ask(page))
            assert body.get(name) == {"max_tokens": 7, "seed": None}[name]
    written(seed, "5")
    assert seed.get_attribute("aria-invalid") == "false"
    page.keyboard.press("Escape")
    stored = json.loads(page.evaluate("localStorage.getItem('ds4q.settings')"))
    assert (stored["max_tokens"], stored["seed"]) == ("7", "5")
    page.get_by_role("button", name="Settings").click()
    assert (most.input_value(), most.get_attribute("aria-invalid")) == ("7", "false")
    assert page.locator(".wrong").all_inner_texts() == ["", ""]


def test_two_tabs_keep_each_others_settings(page: Page, served: Served) -> None:
    served.script("ok")
    other = page.context.new_page()
    other.goto(served.base)
    for each, name, value in ((page, "Most new tokens", "50"), (other, "Seed", "8")):
        each.bring_to_front()
        each.get_by_role("button", name="Settings").click()
        each.get_by_label(name).fill(value)
        each.get_by_role("button", name="Close").click()
    page.bring_to_front()
    body = sent(page, lambda: ask(page))
    assert (body["max_tokens"], body["seed"]) == (50, 8)
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Defaults").click()
    other.bring_to_front()
    body = sent(other, lambda: ask(other))
    assert ("max_tokens" in body, "seed" in body) == (False, False)
    other.close()


BROKEN = ("{bad", "null", '"text"', "[1]", '{"max_tokens": "0.5", "top_p": "7", "seed": {}}')


def test_what_a_browser_keeps_may_be_broken(page: Page, served: Served) -> None:
    served.script("ok")
    for text in BROKEN:
        page.evaluate(
            """text => {
                localStorage.setItem("ds4q.settings", text);
                localStorage.setItem("ds4q.live", text);
                sessionStorage.setItem("ds4q.conversation", text);
                sessionStorage.setItem("ds4q.key", text);
            }""",
            text,
        )
        page.reload()
        page.locator('#state[data-state="ready"]').wait_for()
        assert page.locator(".turn").count() == 0
    thinking(page, False)
    body = sent(page, lambda: ask(page))
    assert (body["top_p"], "max_tokens" in body, "seed" in body) == (1, False, False)
    assert answer(page) == "ok"


def test_a_browser_may_keep_nothing(page: Page, served: Served) -> None:
    served.script("ok")
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
    thinking(page, True)
    thinking(page, False)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Seed").fill("8")
    page.get_by_label("Most new tokens").fill("9")
    body = sent(page, lambda: ask(page))
    assert (body["seed"], body["max_tokens"], body["thinking"]["type"]) == (8, 9, "disabled")
    assert answer(page) == "ok"

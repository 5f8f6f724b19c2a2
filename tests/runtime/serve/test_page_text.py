"""How the page sets what a model says: Markdown of every kind, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.serve.browsing import browsing, opened
from tests.runtime.serve.served import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browsing() as browser, serving() as served, opened(browser, served.base) as made:
        yield made


SHOWN = """async (texts) => {
    const { show } = await import("/page/markdown.js");
    return texts.map((text) => {
        const target = document.createElement("div");
        show(target, text);
        for (const copy of target.querySelectorAll("button")) copy.remove();
        for (const link of target.querySelectorAll("a")) {
            link.removeAttribute("target");
            link.removeAttribute("rel");
        }
        return target.innerHTML;
    });
}"""


def shown(page: Page, *texts: str) -> list[str]:
    """The elements of each text; links without what they all have, code without its button."""
    made: list[str] = page.evaluate(SHOWN, list(texts))
    return made


def code(page: Page, text: str) -> list[str]:
    """What the copy buttons of a text's blocks of code copy."""
    found: list[str] = page.evaluate(CODE, text)
    return found


CODE = """async (text) => {
    const { show } = await import("/page/markdown.js");
    const target = document.createElement("div");
    show(target, text);
    return [...target.querySelectorAll(".code code")].map((each) => each.textContent);
}"""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("- do:\n  ```python\n  def f():\n      if x:\n          return 1\n  ```", None),
        ("1. do:\n\n   ```python\n   def f():\n       if x:\n           return 1\n   ```", None),
        ("10. do:\n    ```\n    def f():\n        if x:\n            return 1\n    ```", None),
        ("- do:\n    ```\n    def f():\n        if x:\n            return 1\n    ```", None),
        ("1. do:\n  ```\n  def f():\n      if x:\n          return 1\n  ```", None),
        ("- a\n  - b\n    ```\n    def f():\n        if x:\n            return 1\n    ```", None),
        ("- do:\n  ```go\n  if x {\n  \treturn\n  }\n  ```", "if x {\n\treturn\n}"),
        ("- do:\n\t```go\n\tif x {\n\t\treturn\n\t}\n\t```", "if x {\n\treturn\n}"),
        ("- do:\n  ```\n  a = 1\n\n\n  b = 2\n  ```\n- on", "a = 1\n\n\nb = 2"),
        (
            "1. do:\n   ```yaml\n   a:\n     - b:\n         c\n   - d\n   ```\n2. on",
            "a:\n  - b:\n      c\n- d",
        ),
        ("  ```\n  a\n    b\n  ```", "a\n  b"),
    ],
)
def test_code_in_a_list_loses_the_indent_of_its_item_and_no_more(
    page: Page, text: str, wanted: str | None
) -> None:
    assert code(page, text) == [wanted or "def f():\n    if x:\n        return 1"]


def test_three_backticks_within_a_line_are_no_fence(page: Page) -> None:
    first, fenced, tilded = shown(
        page,
        "```print(1)``` prints one.\n\nAnd **this** follows.",
        "````md\n```py\nx\n```\n````\nafter",
        "~~~ a`b\nx\n~~~",
    )
    assert first == (
        "<p><code>print(1)</code> prints one.</p><p>And <strong>this</strong> follows.</p>"
    )
    assert "<code>```py\nx\n```</code>" in fenced
    assert fenced.endswith("<p>after</p>")
    assert "<code>x</code>" in tilded


def test_marks_within_a_text(page: Page) -> None:
    cases = {
        "**a *b* c** and ***d***": (
            "<strong>a <em>b</em> c</strong> and <strong><em>d</em></strong>"
        ),
        "*a **b*** ~~c~~ _d_ a_b_c": (
            "<em>a <strong>b</strong></em> <del>c</del> <em>d</em> a_b_c"
        ),
        "2 * 3 * 4, **a, *b": "2 * 3 * 4, **a, *b",
        "**a *b**": "<strong>a *b</strong>",
        "`` a`b `` `c` `d\\` \\`e\\` `f": "<code>a`b</code> <code>c</code> <code>d\\</code> `e` `f",
        "`**a**` **`b`**": "<code>**a**</code> <strong><code>b</code></strong>",
        "a[0] and [b] [c](ftp://d)": "a[0] and [b] [c](ftp://d)",
        "\\*a\\* \\[b](c)": "*a* [b](c)",
    }
    assert shown(page, *cases) == [f"<p>{wanted}</p>" for wanted in cases.values()]


def test_addresses_keep_their_brackets(page: Page) -> None:
    wiki = "https://example.org/A_(b)"
    cases = {
        f"[t]({wiki})": f'<a href="{wiki}">t</a>',
        f"([**t** `u`]({wiki}).)": f'(<a href="{wiki}"><strong>t</strong> <code>u</code></a>.)',
        f"{wiki}, ({wiki}).": f'<a href="{wiki}">{wiki}</a>, (<a href="{wiki}">{wiki}</a>).',
        f"**{wiki}**": f'<strong><a href="{wiki}">{wiki}</a></strong>',
        f"[{wiki}]({wiki})": f'<a href="{wiki}">{wiki}</a>',
        "https://. [](https://a.b)": 'https://. [](<a href="https://a.b">https://a.b</a>)',
    }
    assert shown(page, *cases) == [f"<p>{wanted}</p>" for wanted in cases.values()]


def test_headings_keep_their_text(page: Page) -> None:
    cases = {
        "# a  b ##": "<h3>a  b</h3>",
        "## About C#": "<h4>About C#</h4>",
        "#a": "<p>#a</p>",
        "* * *": "<hr>",
    }
    assert shown(page, *cases) == list(cases.values())


def test_lists_within_lists(page: Page) -> None:
    deep = "<ul><li><p>a</p><ul><li><p>b</p><ul><li>c</li></ul></li></ul></li></ul>"
    flat = "<ul><li>a</li></ul><ol><li>b</li></ol>"
    cases = {
        "- a\n\t- b\n\t\t- c": deep,
        "- a\n  - b\n    - c": deep,
        "- a\n    - b\n        - c": deep,
        "1. a\n  - b\n    - c": deep.replace("ul", "ol", 1)[:-5] + "</ol>",
        "- a\r\n\r\n  - b\r\n    - c\r\n": deep,
        "- a\n1. b": flat.replace("<ol>", '<ol start="1">'),
    }
    found = [each.replace(' start="1"', "") for each in shown(page, *cases)]
    assert found == [wanted.replace(' start="1"', "") for wanted in cases.values()]


def test_a_table_may_follow_a_line_of_text(page: Page) -> None:
    first, marked, none = shown(
        page,
        "Here:\n| a | b |\n|---|:-:|\n| 1 \\| 2 | `x` |\n\nafter",
        "- a\n- | b |\n  |---|\n  | c |",
        "a | b\n---\nc",
    )
    assert first.startswith("<p>Here:</p>")
    assert "<th>a</th><th>b</th>" in first
    assert "<td>1 | 2</td><td><code>x</code></td>" in first
    assert first.endswith("<p>after</p>")
    assert "<th>b</th>" in marked
    assert none == "<p>a | b</p><hr><p>c</p>"


TIMES = """async (pairs) => {
    const { show } = await import("/page/markdown.js");
    const took = (text) => Math.min(...[1, 2, 3].map(() => {
        const begun = performance.now();
        show(document.createElement("div"), text);
        return performance.now() - begun;
    }));
    return pairs.map(([text, like]) => took(text) / (took(like) + 1));
}"""


def test_no_text_takes_longer_than_others_of_its_length(page: Page) -> None:
    many = 8000
    closed = "**a** " * many
    wide = "a" + " " * 20_000
    texts: dict[str, Any] = {
        "heading": (f"# {wide}b", closed),
        "heading's end": (f"# {wide}#b", closed),
        "item": (f"- {wide}b", closed),
        "divider": (f"a|b\n-{wide[1:]}x", closed),
        "rule": (f"-{wide[1:]}x", closed),
        **{
            mark: (f"{mark}a " * many, closed)
            for mark in ("**", "*", "_", "~~", "[", "`", "``", "](http://")
        },
        "runs": ("".join(f"{'`' * (n % 90 + 1)} " for n in range(many // 10)), closed),
        "brackets": ("[" * many + "]" * many, closed),
        "addresses": ("http://" * many, closed),
        "parts": ("[a](http://b(" * many, closed),
        "lines": ("- a\n\n" + "\n" * many + "b", closed),
    }
    times = dict(zip(texts, page.evaluate(TIMES, list(texts.values())), strict=True))
    assert {name: time for name, time in times.items() if time > 10} == {}

"""Owns the pictures of the page in docs/images: a real server, browser and paged model (ds4-tiny).

The model of the tests knows no English: it computes every token, experts, cache and all, and what
it then says is replaced by a script.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ds4q.artifact.hfq import Reader
from ds4q.runtime.engine import Engine
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.serve.app import make_app
from ds4q.runtime.serve.listening import listen, url
from ds4q.runtime.serve.scheduler import Scheduler
from ds4q.runtime.serve.server import Server
from ds4q.runtime.serve.service import Service
from ds4q.runtime.text.pieces import ASSISTANT, EOS, THINK, THINK_END
from ds4q.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tests" / "data" / "ds4-tiny"
IMAGES = ROOT / "docs" / "images"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COLOURS = 256  # of a palette: a page has few, and the files stay small
SLOTS = 6
WINDOW = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 760}

TURNS = (
    (
        "What does an expert cache do?",
        "They ask about paging. Keep it short: what is kept, what is read, what stays the same.",
        "It keeps the experts that were used lately **in memory** and reads the others when a "
        "router asks for them.\n\n- A *hit* costs nothing.\n- A *miss* costs one read of the "
        "disk.\n- The text is the same either way.\n",
    ),
    (
        "And how large should it be?",
        "A size in bytes, or auto. Show the command.",
        "Let it take what memory leaves, or name a size:\n\n```sh\nds4q serve model.hfq "
        "--expert-cache auto\nds4q serve model.hfq --expert-cache 24GiB\n```\n\nThe map beside "
        "this shows which experts are in memory, and how often each was chosen.",
    ),
)


class Scripted:
    """A loaded model whose words are those of ``TURNS``, whatever it computes."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._fed: dict[int, list[int]] = {}  # by the identity of a sequence or snapshot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def new_state(self) -> Any:
        return self._knowing(self._engine.new_state(), [])

    def restore(self, snapshot: Any) -> Any:
        return self._knowing(self._engine.restore(snapshot), self._fed[id(snapshot)])

    def snapshot(self, state: Any) -> Any:
        return self._knowing(self._engine.snapshot(state), self._fed[id(state)])

    def forward_many(self, parts: Sequence[tuple[Any, Sequence[int]]]) -> npt.NDArray[np.float32]:
        logits = self._engine.forward_many(parts)
        for row, (state, ids) in zip(logits, parts, strict=True):
            self._fed[id(state)].extend(ids)
            row[self._next(self._fed[id(state)])] = row.max() + 100
        return logits

    def _knowing(self, held: Any, ids: list[int]) -> Any:
        self._fed[id(held)] = list(ids)
        return held

    def _next(self, ids: list[int]) -> int:
        assistant, think_end = (self._tokenizer.control(text) for text in (ASSISTANT, THINK_END))
        if assistant not in ids or ids[-1] == assistant:
            return think_end  # a part of the prompt: nobody takes it
        last = len(ids) - ids[::-1].index(assistant)
        _, reasoning, content = TURNS[(ids.count(assistant) - 1) % len(TURNS)]
        script = self._tokenizer.encode(content)
        if ids[last] == self._tokenizer.control(THINK):
            script = [*self._tokenizer.encode(reasoning), think_end, *script]
        said = len(ids) - last - 1
        return script[said] if said < len(script) else self._tokenizer.control(EOS)


@contextmanager
def serving(artifact: Path) -> Iterator[str]:
    """The address of a server of ``artifact``."""
    with Reader(artifact) as reader:
        metadata = reader.metadata
    tokenizer = Tokenizer.from_metadata(metadata)
    if tokenizer is None:
        raise ValueError(f"{artifact}: no tokenizer")

    def load(report: Callable[[int, int], None]) -> Any:
        engine = Engine.load(artifact, threads=1, progress=report, cache=CacheOptions(slots=SLOTS))
        return Scripted(engine, tokenizer)

    service = Service(
        load, lambda engine, told: Scheduler(engine, prefix_cache_bytes=1 << 30, told=told)
    )
    app = make_app(
        service,
        model_name="ds4-tiny",
        tokenizer=tokenizer,
        metadata=metadata,
        about={"device": "cpu"},
    )
    server = Server(app, service)
    socket = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([socket],))
    service.start()
    thread.start()
    try:
        yield url(socket)
    finally:
        server.should_exit = True
        thread.join()
        service.close()


def ask(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_role("button", name="Send", exact=True).wait_for()


def opened(browser: Browser, base: str, viewport: dict[str, int], scheme: Any) -> Page:
    """The page after two turns."""
    context = browser.new_context(
        viewport=viewport,  # type: ignore[arg-type]  # a typed dict of the same keys
        color_scheme=scheme,
        device_scale_factor=2 if viewport is PHONE else 1.5,
    )
    page = context.new_page()
    page.goto(base)
    page.locator('#state[data-state="ready"]').wait_for()
    for question, _, _ in TURNS:
        ask(page, question)
    return page


def save(name: str, png: bytes) -> None:
    image = Image.open(io.BytesIO(png)).convert("RGB")
    path = IMAGES / f"{name}.png"
    few = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"wrote {path}: {path.stat().st_size:,} bytes")


def draw(browser: Browser, base: str) -> None:
    """Every picture, one after another."""
    for scheme in ("light", "dark"):
        page = opened(browser, base, WINDOW, scheme)
        if scheme == "dark":
            page.locator(".thoughts summary").last.click()
        page.locator("#map").scroll_into_view_if_needed()
        page.locator("#map").hover(position={"x": 130, "y": 30})
        save(f"page-{scheme}", page.screenshot())
        if scheme == "light":
            page.mouse.move(10, 10)
            page.set_viewport_size({"width": 1280, "height": 1000})
            ask(page, TURNS[0][0])
            page.locator(".experts").evaluate("box => { box.style.padding = '14px 22px'; }")
            save("page-experts", page.locator(".experts").screenshot())
        page.context.close()
    page = opened(browser, base, PHONE, "light")
    save("page-phone", page.screenshot())
    page.context.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        sys.exit("there is no chromium on the path")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        artifact = Path(folder) / "ds4-tiny.hfq"
        quantize = ["quantize", str(SOURCE), "-o", str(artifact), "--quiet"]
        subprocess.run([sys.executable, "-m", "ds4q", *quantize], check=True)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        with serving(artifact) as base:
            draw(browser, base)
        browser.close()


if __name__ == "__main__":
    main()

"""A headless browser for tests of the page."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser of the system; skips the test where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


class Watched:
    """An open page, with all its errors and all the requests it has made."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.faults: list[str] = []
        self.asked: set[str] = set()
        self.page: Page = browser.new_page(viewport={"width": 1280, "height": 800})
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.page.on("console", self._hear)
        self.page.goto(url)
        self.page.wait_for_selector("#tiles dd")
        # Every state of the texts of the answers, in the order seen.
        self.page.evaluate(
            """() => {
                window.seen = [];
                const look = () => window.seen.push(
                    [...document.querySelectorAll(".assistant")].map((e) => e.textContent).join());
                new MutationObserver(look).observe(
                    document.getElementById("log"),
                    {subtree: true, childList: true, characterData: true});
            }"""
        )

    def _hear(self, message: ConsoleMessage) -> None:
        """Errors and warnings are faults, but not that a server is not ready: where the browser
        takes the cores, a rank may answer late for a moment, and the page shows that.
        """
        is_not_ready = message.location["url"].endswith("/health") and " 503 " in message.text
        if message.type in ("error", "warning") and not is_not_ready:
            self.faults.append(message.text)

    def seen(self) -> list[str]:
        """The states of the texts of the answers so far."""
        found: list[str] = self.page.evaluate("() => window.seen")
        return found

    def send(self, text: str) -> None:
        """Write a message and press Enter."""
        self.page.focus("#text")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def tile(self, name: str) -> str:
        """The text of a tile, which shows one of the engine's numbers."""
        return self.page.locator(f"#tiles div:has(dt:text-is('{name}')) dd").inner_text()

"""The page in a real browser, over a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from cluster.api.admission import ApiLimits
from cluster.api.page import FILES
from scheduler.messages import Request
from tests.cluster.api.browser import Watched, browser
from tests.cluster.api.scripted import TOKENIZER, Server, serve, wait_until

WORDS = " ".join(f"word{i}" for i in range(20))
PROMPTS: list[str] = []


def script(request: Request) -> str:
    PROMPTS.append(TOKENIZER.decode(request.token_ids[: request.num_prompt_tokens]))
    if "markup" in PROMPTS[-1]:
        return "<img src=x onerror=alert(1)> & <b>bold</b>"
    return f"<think>\nhm, ä\n</think>\n\n{WORDS}"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(script, step_s=0.02) as running:
        yield running


def test_a_chat_streams_and_the_engine_is_shown(chromium: Browser, server: Server) -> None:
    watched = Watched(chromium, server.url)
    page = watched.page
    expect(page.locator("#state")).to_have_text("serving")
    expect(page.locator("#model")).to_have_text("tiny")
    watched.send("What is 47 + 38?")
    expect(page.locator(".assistant small")).to_contain_text("tokens in", timeout=10_000)
    answer = page.locator(".assistant > span").last
    expect(answer).to_have_text(WORDS)
    assert page.locator(".assistant details").text_content() == "Thinkinghm, ä"
    seen = watched.seen()
    assert len(set(seen)) > 15 and all(now in seen[-1] for now in seen if "word5" not in now)
    assert sorted(map(len, seen)) == [*map(len, seen)], "an answer only grows"
    expect(page.locator("#ranks tr")).to_have_count(2)
    assert page.locator("#ranks tr").nth(1).inner_text().split() == ["rank", "1", "600.0", "ms"]
    assert (watched.tile("Recoveries"), watched.tile("KV cache in use")) == ("0", "0% of 10 blocks")
    assert watched.tile("Time to first token") != "– mean"
    watched.send("And now?")
    expect(page.locator(".assistant small")).to_have_count(2, timeout=10_000)
    for part in ("What is 47 + 38?", "hm, ä", "word19", "And now?"):
        assert part in PROMPTS[-1], "the conversation is sent whole"
    assert watched.faults == []
    assert {url for url in watched.asked if not url.startswith(("data:", server.url))} == set()


def test_what_the_model_writes_is_never_markup(chromium: Browser, server: Server) -> None:
    watched = Watched(chromium, server.url)
    watched.send("markup")
    answer = watched.page.locator(".assistant > span").last
    expect(answer).to_have_text("<img src=x onerror=alert(1)> & <b>bold</b>")
    assert watched.page.locator("#log img, #log b").count() == 0 and watched.faults == []


def test_everything_can_be_done_with_the_keyboard(chromium: Browser) -> None:
    with serve(script, step_s=0.2) as slow:
        watched = Watched(chromium, slow.url)
        page = watched.page

        def focused() -> Any:
            return page.evaluate(
                "() => document.activeElement.id || document.activeElement.tagName"
            )

        assert focused() == "text"
        watched.send("Hi")
        expect(page.locator("#stop")).to_be_enabled()
        order = [focused()]
        for _ in range(3):
            page.keyboard.press("Tab")
            order.append(focused())
        assert order == ["text", "stop", "clear", "SUMMARY"], "a message cannot be sent meanwhile"
        page.keyboard.press("Enter")
        expect(page.locator("#temperature")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(".assistant small")).to_have_text("stopped")
        wait_until(lambda: len(slow.engine.aborted) == 1)
        expect(page.locator("#send")).to_be_enabled()
        page.focus("#clear")
        page.keyboard.press("Enter")
        expect(page.locator(".turn")).to_have_count(0)
        assert focused() == "text" and watched.faults == []


def test_a_silent_server_is_waited_for(chromium: Browser) -> None:
    limits = ApiLimits(ping_interval_s=0.05)
    with serve(lambda request: "so it is", step_s=0.3, limits=limits) as silent:
        watched = Watched(chromium, silent.url)
        watched.send("Hi")
        expect(watched.page.locator(".assistant small")).to_contain_text(
            "tokens in", timeout=10_000
        )
        expect(watched.page.locator(".assistant > span").last).to_have_text("so it is")
        assert watched.page.locator(".error").count() == 0 and watched.faults == []


def test_errors_are_shown_where_they_belong(chromium: Browser) -> None:
    with serve(script, step_s=0.05) as running:
        watched = Watched(chromium, running.url)
        page = watched.page
        watched.send("Hi")
        expect(page.locator(".assistant > span").last).to_contain_text("word0")
        running.engine.die("rank 1 is gone")
        expect(page.locator(".assistant .error")).to_contain_text("rank 1 is gone")
        expect(page.locator("#state")).to_contain_text("rank 1 is gone", timeout=5000)
        expect(page.locator("#state")).to_have_class("bad")
        page.click("summary:text-is('Options')")
        page.fill("#tokens", "0")
        watched.send("Again")
        expect(page.locator(".assistant .error").last).to_contain_text("max_tokens must be")
    expect(page.locator("#state")).to_have_text("the server does not answer", timeout=5000)


def test_a_key_is_asked_for_and_sent(chromium: Browser) -> None:
    with serve(script, api_key="secret") as locked:
        watched = Watched(chromium, locked.url)
        page = watched.page
        watched.send("Hi")
        expect(page.locator(".assistant .error")).to_contain_text("missing API key")
        page.click("summary")
        page.fill("#key", "secret")
        watched.send("Hi again")
        expect(page.locator(".assistant > span").last).to_have_text(WORDS)
        expect(page.locator("#model")).to_have_text("tiny")
        assert "Hi again" in PROMPTS[-1] and "user\nHi\n" not in PROMPTS[-1]


def test_it_can_be_read_in_the_dark_and_on_a_small_screen(
    chromium: Browser, server: Server
) -> None:
    page = Watched(chromium, server.url).page
    shade = "() => getComputedStyle(document.body)[%r].match(/\\d+/g).map(Number)"
    brightness = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for what in ("backgroundColor", "color"):
            brightness[scheme, what] = sum(page.evaluate(shade % what)) / 3
    assert brightness["light", "backgroundColor"] > 200 > 100 > brightness["light", "color"]
    assert brightness["dark", "backgroundColor"] < 50 < 200 < brightness["dark", "color"]
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360


@pytest.mark.parametrize("path", FILES)
def test_its_files_need_no_key_and_load_nothing_from_elsewhere(path: str) -> None:
    with serve(script, api_key="secret") as locked:
        answer = httpx.get(locked.url + path)
        assert httpx.post(locked.url + path).status_code == 405
    assert answer.status_code == 200 and answer.headers["content-type"] == FILES[path][1]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    text = answer.text.replace("http://www.w3.org/2000/svg", "")
    assert "http:" not in text and "https:" not in text and "//" not in text.replace("// ", "")

"""The Grafana dashboard over an engine at work: Prometheus answers its queries, a browser draws."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.paths import SOURCE_ROOT
from tests.cluster.api.browser import browser
from tests.cluster.serve.served import free_port

pytestmark = [pytest.mark.engine, pytest.mark.programs]

DASHBOARD = json.loads((SOURCE_ROOT / "configs" / "grafana.json").read_text())
PAGE = Path(__file__).with_name("dashboard.html")
RATE_INTERVAL = "5s"


@contextlib.contextmanager
def prometheus(url: str, folder: Path) -> Iterator[str]:
    """URL of a Prometheus that watches this API; skips where there is none."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed")
    targets = [{"targets": [url.removeprefix("http://")]}]
    jobs = [{"job_name": "eagleray", "static_configs": targets}]
    config = {"global": {"scrape_interval": "500ms"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        running.terminate()
        running.wait(20)


@contextlib.contextmanager
def clients(url: str, number: int) -> Iterator[None]:
    """Clients that send one request after another, every other one as a stream."""
    leave = threading.Event()

    def ask(client: int) -> None:
        turn = client
        while not leave.is_set():
            turn += 1
            asked = {
                "prompt": f"<|im_start|>user\nCount on from {turn % 7}.",
                "max_tokens": 10 + 37 * turn % 80,
                "ignore_eos": True,
                "stream": turn % 2 == 0,
            }
            httpx.post(f"{url}/v1/completions", json=asked, timeout=60).raise_for_status()
            leave.wait(0.05 * (turn % 11))

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        leave.set()
        for thread in threads:
            thread.join()


def test_the_dashboard_shows_the_engine(served: tuple[str, Any], tmp_path: Path) -> None:
    """`make screenshots` keeps the picture, which covers a minute."""
    pictures = os.environ.get("EAGLERAY_SCREENSHOTS")
    picture = Path(pictures or tmp_path) / "dashboard.png"
    url, _ = served
    with browser() as chromium, prometheus(url, tmp_path) as source, clients(url, 6):
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(PAGE.as_uri())
        seconds = 60 if pictures else 15
        time.sleep(seconds if pictures else 0)
        missing, until = ["all"], time.monotonic() + 30
        while missing:
            assert time.monotonic() < until, (missing, faults)
            time.sleep(1)
            with contextlib.suppress(httpx.TransportError):  # it is starting
                httpx.get(f"{source}/-/ready").raise_for_status()
                given = [DASHBOARD, source, seconds, RATE_INTERVAL]
                missing = page.evaluate("(given) => draw(...given)", given)
        page.screenshot(path=picture, full_page=True)
    assert faults == [] and picture.stat().st_size > 10_000

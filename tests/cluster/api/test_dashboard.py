"""The Grafana dashboard asks for metrics that exist, in queries that Prometheus answers."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.paths import CHECKOUT
from tests.cluster.api.scripted import serve

DASHBOARD = json.loads((Path(CHECKOUT) / "configs" / "grafana.json").read_text())
QUERIES = [
    (panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]
]


def use(url: str) -> None:
    """A request of each kind that is counted apart."""
    asked = {"prompt": "a", "max_tokens": 5, "logprobs": 0}
    for stream in (True, False):
        httpx.post(f"{url}/v1/completions", json=asked | {"stream": stream}).raise_for_status()


def test_every_query_names_a_metric_that_exists() -> None:
    with serve() as server:
        use(server.url)
        text = httpx.get(f"{server.url}/metrics").text
    known = set(re.findall(r"^(eagleray_\w+)", text, flags=re.MULTILINE))
    assert len(QUERIES) > 20
    for title, query in QUERIES:
        named = set(re.findall(r"\b(eagleray_\w+)", query))
        assert named and named <= known, f"{title}: {named - known} is no metric"


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        assert panel["description"], panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, (panel["title"], taken[x, y])
                taken[x, y] = panel["title"]


def test_prometheus_answers_every_query(tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with serve() as server:
        target = server.url.removeprefix("http://")
        jobs = [{"job_name": "eagleray", "static_configs": [{"targets": [target]}]}]
        config: dict[str, Any] = {"global": {"scrape_interval": "200ms"}, "scrape_configs": jobs}
        path = tmp_path / "prometheus.yml"
        path.write_text(json.dumps(config))  # JSON is YAML
        command = [program, f"--config.file={path}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        with (tmp_path / "log").open("w") as log:
            running = subprocess.Popen(
                [*command, f"--web.listen-address={address}"], stdout=log, stderr=log
            )
        try:
            missing = _missing(server.url, f"http://{address}", until_s=time.monotonic() + 30)
        finally:
            running.terminate()
            running.wait(20)
    assert not missing, (missing, (tmp_path / "log").read_text()[-2000:])


def _missing(url: str, prometheus: str, until_s: float) -> dict[str, Any]:
    """The queries that find nothing while requests run."""
    missing: dict[str, Any] = {"all": "prometheus does not answer"}
    while missing and time.monotonic() < until_s:
        use(url)
        time.sleep(0.3)
        found: dict[str, Any] = {}
        for title, query in QUERIES:
            asked = {"query": query.replace("$__rate_interval", "5s")}
            try:
                answer = httpx.get(f"{prometheus}/api/v1/query", params=asked).json()
            except (httpx.TransportError, ValueError):
                break
            if answer["status"] != "success" or not answer["data"]["result"]:
                found[f"{title}: {query}"] = answer
        else:
            missing = found
    return missing

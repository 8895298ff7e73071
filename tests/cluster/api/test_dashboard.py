"""The Grafana dashboard queries metrics that exist, in panels that do not overlap."""

from __future__ import annotations

import json
import re

import httpx

from configs.paths import SOURCE_ROOT
from tests.cluster.api.scripted import serve

DASHBOARD = json.loads((SOURCE_ROOT / "configs" / "grafana.json").read_text())
QUERIES = [
    (panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]
]


def use(url: str) -> None:
    """Make a request of each kind that is counted separately."""
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

"""A server on a port of loopback, whose requests are recorded."""

from __future__ import annotations

import contextlib
import functools
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import uvicorn

from cluster import LLM
from cluster.api.access import Access
from cluster.api.app import Api
from cluster.api.connections import server_config
from cluster.api.endpoints import ServedModel
from cluster.client.client import Client
from cluster.client.requests import RequestBuilder
from cluster.client.tokenizer import Tokenizer
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.params import SamplingParams
from tests.clients.recording import Recorder
from tests.clients.scripts import script, write_tokenizer
from tests.cluster.api.scripted import LIMITS, MODEL, ScriptedEngine

MODEL_NAME = "tiny"
API_KEY = "sk-none"
# Agents send tens of thousands of tokens.
SIZES = replace(LIMITS, max_model_len=262_144, num_blocks=100_000)


@contextlib.contextmanager
def scripted_api() -> Iterator[Api]:
    """An API whose answers are as `scripts.py` says."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(Path(folder))
        engine = ScriptedEngine(functools.partial(script, tokenizer), step_s=0.001, per_step=4)
        builder = RequestBuilder(MODEL, tokenizer, SamplingParams(), SIZES, 0)
        try:
            yield _api(Client(builder, engine), tokenizer)
        finally:
            engine.close()


@contextlib.contextmanager
def model_api() -> Iterator[Api]:
    """An API over an engine with the default model."""
    with LLM() as llm:
        yield _api(llm.client, Tokenizer(Path(DEFAULT_MODEL_DIR)))


def _api(client: Client, tokenizer: Tokenizer) -> Api:
    access = Access(api_key=API_KEY)
    served = ServedModel(name=MODEL_NAME, builder=client.builder, tokenizer=tokenizer)
    return Api(client, served, version="0", access=access)


@contextlib.contextmanager
def serve(recorder: Recorder) -> Iterator[str]:
    """Yields the address of a server of what is recorded."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = server_config(recorder.api, log_level="error")
        config.app = recorder
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)

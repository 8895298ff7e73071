"""What an API process that listens itself does with answers that clients take slowly."""

from __future__ import annotations

import asyncio
import socket

import pytest

from cluster.serve import listener
from cluster.serve.listener import HttpListener
from configs.serve import ServeConfig
from tests.cluster.api.scripted import ScriptedEngine, make_api
from tests.cluster.api.test_connections import HEAD, LARGE


def test_a_drain_waits_until_clients_have_taken_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def drain_while_a_client_reads(listening: socket.socket, client: socket.socket) -> bytes:
        engine = ScriptedEngine(lambda _: "word " * 300, 0.0)
        api = make_api(engine)
        http = HttpListener(api, ServeConfig(listen_address=listening.getsockname()))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, listening.getsockname())
        head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(LARGE)
        await loop.sock_sendall(client, head + LARGE)
        answer = await loop.sock_recv(client, 1)  # all of it is written
        assert api.admission.num_open_outputs == 0
        assert await api.drain(0.1) == 1
        drain_task = asyncio.create_task(api.drain(20.0))
        await asyncio.sleep(0.2)
        assert not drain_task.done()
        while part := await loop.sock_recv(client, 65_536):
            answer += part
        assert await drain_task == 0
        engine.close()
        http._server.should_exit = True
        await http._serve_task
        return answer

    with socket.socket() as listening, socket.socket() as client:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setattr(listener, "bound_sockets", lambda *_: [listening])
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        answer = asyncio.run(drain_while_a_client_reads(listening, client))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"

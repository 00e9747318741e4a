"""A small OpenAI-compatible server for tests: it answers a dialogue with words that say what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeOpenAI:
    """`asked`: the body of each request. `most_turns`: longer dialogues are refused, as vLLM does. `key`: the one that
    requests must bring. `endless`: a reply goes on until the client hangs up; `hung_up` is set then."""

    def __init__(self, model: str = "actor", key: str = "", most_turns: int = 1000, endless: bool = False) -> None:
        self.model, self.key, self.most_turns, self.endless = model, key, most_turns, endless
        self.asked: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[FakeOpenAI]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _handler(fake) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - `self` is the handler's
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.known():
                    self.json(200, {"object": "list", "data": [{"id": fake.model, "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not self.known():
                    return
                fake.asked.append(body)
                if len(body["messages"]) > fake.most_turns:
                    message = "This model's maximum context length is 64 tokens. However, you requested more."
                    self.json(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.event({"role": "assistant", "content": ""})
                    for piece in (" ", fake.model, " heard ", body["messages"][-1]["content"]):
                        self.event({"content": piece})
                    while fake.endless:
                        self.event({"content": " more"})
                    self.wfile.write(b"data: [DONE]\n\n")
                    return
                fake.hung_up.set()

            def known(self) -> bool:
                good = not fake.key or self.headers.get("Authorization") == f"Bearer {fake.key}"
                if not good:
                    self.json(401, {"error": "Unauthorized"})
                return good

            def event(self, delta: dict[str, str]) -> None:
                document = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}
                self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())
                self.wfile.flush()

            def json(self, status: int, document: Any) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        return Handler

"""An S3 server on loopback that fails when it is told to: moto's, behind a few lines that every request passes."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Deed = Literal["serve", "fail", "fail after", "drop", "drop after"]
"""Serve; answer 500; do as asked and answer 500; close the connection; do as asked and close the connection."""

BUCKET = "bucket"


@dataclass(frozen=True)
class Request:
    method: str
    path: str


class S3Server:
    """`deed` decides, for each request, what becomes of it; `after` is called when it was carried out and before it is
    answered. Both may wait. `seen` are all requests so far. With `ignores_conditions` a name that is taken is
    overwritten, as older servers do.

    One request is carried out at a time: moto looks and then writes, and S3 promises that nobody comes between.
    """

    def __init__(self) -> None:
        self.deed: Callable[[Request], Deed] = lambda _: "serve"
        self.after: Callable[[Request], object] = lambda _: None
        self.seen: list[Request] = []
        self.ignores_conditions = False
        self._lock = threading.Lock()
        self._app: Any = DomainDispatcherApplication(create_backend_app)
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def options(self) -> dict[str, Any]:
        """For fsspec. The library's own retries are off, so that ours are seen."""
        config = {"retries": {"max_attempts": 0}, "connect_timeout": 5, "read_timeout": 20}
        return {"endpoint_url": self.endpoint, "key": "test", "secret": "test", "config_kwargs": config}

    def environment(self) -> dict[str, str]:
        """The same for another process, by fsspec's own variables and AWS's."""
        own = {"AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        return {**os.environ, **own, "AWS_MAX_ATTEMPTS": "1"}

    @contextlib.contextmanager
    def doing(
        self, deed: Callable[[Request], Deed] = lambda _: "serve", after: Callable[[Request], object] = lambda _: None
    ) -> Iterator[None]:
        before = self.deed, self.after
        self.deed, self.after = deed, after
        try:
            yield
        finally:
            self.deed, self.after = before

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        self.seen.append(request)
        deed = self.deed(request)
        if deed == "fail":
            return _broken(start_response)
        if deed == "drop":
            return _dropped(environ)
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        answers: list[Any] = []
        with self._lock:
            body = [*self._app(environ, lambda *answer: answers.append(answer))]
        self.after(request)
        if deed == "fail after":
            return _broken(start_response)
        if deed == "drop after":
            return _dropped(environ)
        start_response(*answers[0])
        return body


def _broken(start_response: Any) -> Iterable[bytes]:
    body = b"<Error><Code>InternalError</Code><Message>made to fail</Message></Error>"
    start_response("500 Internal Server Error", [("Content-Length", str(len(body))), ("Content-Type", "text/xml")])
    return [body]


def _dropped(environ: dict[str, Any]) -> Iterable[bytes]:
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError("made to drop")

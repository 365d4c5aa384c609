"""Serves the pages of a store to this machine: http.server and nothing else, since one person looks at a time."""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from rollstore.errors import DuplicateError, NotFoundError, RollstoreError
from rollstore.view import markup
from rollstore.view.listing import ORDERS, Listing, read_filter
from rollstore.view.lists import problem_page, rollouts_page, trend_page
from rollstore.view.pages import diff_page, group_page, rollout_page
from rollstore.view.reading import Reader, members

IDLE_SECONDS = 30
"""A connection on which nothing comes so long is closed."""


class Pages(ThreadingHTTPServer):
    """The server. `against`: where /diff takes its second rollout from, the same store unless given."""

    daemon_threads = True

    def __init__(
        self, reader: Reader, listing: Listing, *, host: str = "127.0.0.1", port: int = 0, against: Reader | None = None
    ) -> None:
        """Listens at once; port 0 takes a free one. Raises ValueError where it cannot."""
        self.reader, self.listing, self.against, self.host = reader, listing, against, host
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise ValueError(f"{host} port {port}: wanted an address to listen on, got: {error.strerror}") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.server_address[1]}"

    def knows(self, host: str | None) -> bool:
        """Whether a request is for this server by a name that no one else can point at it.

        A page elsewhere can make its own name lead to this machine, and its browser then sends that name. Addresses in
        digits, `localhost` and the name that the server was given are no such names.
        """
        name = urlsplit(f"//{host or ''}").hostname
        if name is None:
            return False
        if name in ("localhost", self.host.lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD; everything else is refused by http.server."""

    server: Pages  # pyright: ignore[reportIncompatibleVariableOverride]  # the only server that has this handler
    server_version = "rollstore"
    sys_version = ""
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        status, page = self._answer()
        self._send(status, page)

    def do_HEAD(self) -> None:
        status, page = self._answer()
        self._send(status, page, body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: stderr is for what goes wrong."""

    def _answer(self) -> tuple[int, str]:
        try:
            hosts = self.headers.get_all("Host") or [None]
            if len(hosts) != 1 or not self.server.knows(hosts[0]):
                return HTTPStatus.FORBIDDEN, problem_page(403, "wanted a request to this server by its address")
            if self.headers.get("Sec-Fetch-Site") == "cross-site" and self.headers.get("Sec-Fetch-Mode") != "navigate":
                return HTTPStatus.FORBIDDEN, problem_page(403, "wanted a request of this server's own pages")
            return self._page()
        except NotFoundError as error:
            return HTTPStatus.NOT_FOUND, problem_page(404, str(error))
        except ValueError as error:
            return HTTPStatus.BAD_REQUEST, problem_page(400, str(error))
        except DuplicateError as error:
            return HTTPStatus.CONFLICT, problem_page(409, str(error))
        except (RollstoreError, OSError) as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, problem_page(500, str(error))

    def _page(self) -> tuple[int, str]:
        asked = urlsplit(self.path)
        given = dict(parse_qsl(asked.query, errors="surrogatepass", max_num_fields=40))
        serve = _PAGES.get(asked.path)
        if serve is None:
            return HTTPStatus.NOT_FOUND, problem_page(404, f"no page {asked.path}")
        for name in ("page", "step", "first"):  # also where the page does not look at them
            _whole(given, name)
        if _whole(given, "page") and serve is not _rollouts:
            raise NotFoundError(f"page: wanted none, since {asked.path} is one page, got {given['page']}")
        return HTTPStatus.OK, serve(self.server, given)

    def _send(self, status: int, page: str, *, body: bool = True) -> None:
        content = page.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", f"{markup.policy(served=True)}; frame-ancestors 'none'"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


def _wanted(given: dict[str, str], name: str) -> str:
    if not given.get(name):
        raise ValueError(f"{name}: wanted one in the address, got none")
    return given[name]


def _whole(given: dict[str, str], name: str) -> int | None:
    value = given.get(name)
    if not value:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise ValueError(f"{name}: wanted a whole number, got {value!r}")
    return int(value)


def _rollouts(server: Pages, given: dict[str, str]) -> str:
    order = given.get("order") or "newest"
    if order not in ORDERS:
        raise ValueError(f"order: wanted one of {'; '.join(ORDERS)}, got {order!r}")
    return rollouts_page(server.listing, read_filter(given), order=order, page=_whole(given, "page") or 0)


def _rollout(server: Pages, given: dict[str, str]) -> str:
    other = None if server.against is None else server.against.store.path
    return rollout_page(server.reader, _wanted(given, "id"), served=True, against=other)


def _group(server: Pages, given: dict[str, str]) -> str:
    first = _whole(given, "first") or 0
    found = members(
        server.reader.store, _wanted(given, "group"), run=given.get("run"), step=_whole(given, "step"), first=first
    )
    return group_page(server.reader, found, first=first, served=True)


def _diff(server: Pages, given: dict[str, str]) -> str:
    return diff_page(
        server.reader, server.against or server.reader, (_wanted(given, "a"), _wanted(given, "b")), served=True
    )


def _refresh(server: Pages, given: dict[str, str]) -> str:
    server.listing.read()
    return trend_page(server.listing, read_filter(given))


_PAGES: dict[str, Callable[[Pages, dict[str, str]], str]] = {
    "/": lambda server, given: trend_page(server.listing, read_filter(given)),
    "/rollouts": _rollouts,
    "/rollout": _rollout,
    "/group": _group,
    "/diff": _diff,
    "/refresh": _refresh,
}


def serve(pages: Pages, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `ready` gets the address once it can be connected to."""

    def stop(*_: object) -> None:
        # From another thread: the one that the signal interrupts is the one that has to stop.
        threading.Thread(target=pages.shutdown, daemon=True).start()

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ready(pages.address)
        pages.serve_forever(poll_interval=0.1)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        pages.server_close()

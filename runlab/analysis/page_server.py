"""One page for the browser of this user: served from memory at one path, which only this user knows.

Other users of the machine can connect, and so can pages of other sites through the user's browser, also under
a name that they let point here (DNS rebinding). So the path has a random token in it, and a request must name
this server as its host and come from no other origin. No file is ever served.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_ADDRESS = "127.0.0.1"
_NOTHING = b"Only the report is served here. Its films open from the file of the report.\n"


class PageServer(ThreadingHTTPServer):
    """Serves a page until its block ends. The script of the page loads it again when it has changed."""

    def __init__(self) -> None:
        super().__init__((_ADDRESS, 0), _Handler)
        self.token = secrets.token_urlsafe(24)
        self.hosts = {f"{name}:{self.server_port}" for name in (_ADDRESS, "localhost")}
        self.page, self.changed = b"", ""

    @property
    def url(self) -> str:
        return f"http://{_ADDRESS}:{self.server_port}/{self.token}"

    def __enter__(self) -> PageServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def show(self, html: str) -> None:
        """Serve this page from now on."""
        self.page, self.changed = html.encode(), formatdate(usegmt=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that has gone away."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10  # seconds for a request

    def do_GET(self) -> None:
        server = self.server
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        named = len(hosts) == 1 and hosts[0] in server.hosts
        if not (named and {*origins} <= {f"http://{host}" for host in server.hosts}):
            self._answer(403, _NOTHING)
        elif hmac.compare_digest(self.path.encode(), f"/{server.token}".encode()):
            self._answer(200, server.page)
        else:
            self._answer(404, _NOTHING)

    do_HEAD = do_GET

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"text/{'html' if status == 200 else 'plain'}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Last-Modified": self.server.changed,
            "Referrer-Policy": "no-referrer",  # whoever knows the address may read the page
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

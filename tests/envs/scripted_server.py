"""A real HTTP server that misbehaves as its script has it."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Scripted(ThreadingHTTPServer):
    """Replies the next of its script: status and content, and further headers.

    Instead of a status there may be "drop", "sleep", "cut", "raw" and "trickle".
    With ``closes`` it closes each connection after its reply, and does not say so.
    """

    daemon_threads = True

    def __init__(self, *script, closes=False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.seen, self.connections, self.times, self.headers = list(script), [], 0, [], []
        self.closes = closes
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request, address):
        self.connections += 1
        super().process_request(request, address)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.command, self.path, self.headers.get("Content-Type"), body))
        self.server.times.append(time.monotonic())
        self.server.headers.append(self.headers)
        status, content, *more = self.server.script.pop(0)
        if status in ("drop", "raw"):
            self.wfile.write(content if status == "raw" else b"")
            self.close_connection = True
            return
        if status == "trickle":  # pieces, and seconds between them
            for piece in content:
                self.wfile.write(piece)
                time.sleep(*more)
            self.close_connection = True
            return
        if status == "sleep":
            time.sleep(content)
            status, content = 200, "late"
        cut, status = status == "cut", 200 if status == "cut" else status
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in [*more, ("Content-Length", str(len(data)))]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection |= cut or self.server.closes

    do_GET = do_POST

    def log_message(self, *arguments):
        pass

"""Stands in for a student's JupyterLab: tells the hub its port, and answers. It takes 0.1 s."""

import json
import os
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answers(BaseHTTPRequestHandler):
    """Says yes to everything."""

    def do_GET(self) -> None:
        """What the hub asks of a server."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Nothing."""


server = ThreadingHTTPServer(("0.0.0.0", 0), Answers)
request = urllib.request.Request(
    f"{os.environ['JUPYTERHUB_API_URL']}/batchspawner",
    json.dumps({"port": server.server_port}).encode(),
    {"Authorization": f"token {os.environ['JUPYTERHUB_API_TOKEN']}"},
)
urllib.request.urlopen(request, timeout=60).close()
server.serve_forever()

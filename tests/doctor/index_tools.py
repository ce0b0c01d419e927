"""Package indexes at the loopback address, with wheels that are made up."""

from __future__ import annotations

import contextlib
import http.server
import io
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote


def wheel(name: str, version: str, *requires: str, tag: str = "py3-none-any") -> dict[str, bytes]:
    """The file name of a wheel, and its bytes: a module without content."""
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    files = {
        f"{name}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return {f"{name}-{version}-{tag}.whl": packed.getvalue()}


@dataclass
class Index:
    """A package index; `asked` are the paths that were asked for."""

    files: dict[str, bytes]
    url: str = ""
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str) -> bytes:
        """The page of a package, or a file; empty where there is none."""
        self.asked.append(path)
        name = unquote(path).strip("/").split("/")[-1]
        found = [file for file in self.files if file.startswith(f"{name.replace('-', '_')}-")]
        page = "".join(f'<a href="/files/{file}">{file}</a>\n' for file in found)
        return self.files.get(name) or page.encode()


@contextlib.contextmanager
def serving(files: dict[str, bytes], folder: str = "simple") -> Iterator[Index]:
    """Serve files as a package index in a folder of a server."""
    index = Index(files)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = index.answer(self.path)
            self.send_response(200 if content else 404)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        index.url = f"http://127.0.0.1:{server.server_address[1]}/{folder}"
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield index
        finally:
            server.shutdown()

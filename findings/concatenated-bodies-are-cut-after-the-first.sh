#!/usr/bin/env bash
# httpx drops everything after the first member of a gzip body, without an error.
#
# RFC 1952 allows several members in a row, and says that they decompress to one text. Servers and
# caches that compress piece by piece send such bodies. The same holds for the frames of zstd.
# Seen: a body of two gzip members, announced and received completely, is "first" for httpx 0.28.1
# and "first second" for requests 2.34.2 and aiohttp 3.14.5. With two zstd frames, httpx gives both,
# but zstandard.decompress of zstandard 0.25.0 gives the first one only.
# Why it matters: a CAR file has no length and no end mark. If the cut is between two blocks, the
# export looks complete, and the records after the cut look deleted.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    httpx==0.28.1 requests==2.34.2 aiohttp==3.14.5 zstandard==0.25.0
cat > see.py << 'END'
import asyncio
import gzip
import http.server
import threading

import aiohttp
import httpx
import requests
import zstandard

BODIES = {
    "gzip": gzip.compress(b"first ") + gzip.compress(b"second"),
    "zstd": zstandard.compress(b"first ") + zstandard.compress(b"second"),
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        coding = self.path[1:]
        self.send_response(200)
        self.send_header("Content-Encoding", coding)
        self.send_header("Content-Length", str(len(BODIES[coding])))
        self.end_headers()
        self.wfile.write(BODIES[coding])

    def log_message(self, *_):
        pass


async def with_aiohttp(url):
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return await answer.read()


with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    print("gzip, httpx:", httpx.get(address + "gzip", trust_env=False).text)
    print("gzip, requests:", requests.get(address + "gzip").text)
    print("gzip, aiohttp:", asyncio.run(with_aiohttp(address + "gzip")).decode())
    print("zstd, httpx:", httpx.get(address + "zstd", trust_env=False).text)
    print("zstd, zstandard.decompress:", zstandard.decompress(BODIES["zstd"]).decode())
    server.shutdown()
END
seen=$(venv/bin/python see.py)
printf '%s\n' "$seen"
[ "$seen" = "gzip, httpx: first 
gzip, requests: first second
gzip, aiohttp: first second
zstd, httpx: first second
zstd, zstandard.decompress: first " ] || {
    echo "CHANGED: these packages treat concatenated members differently" >&2
    exit 1
}

"""Random invalid requests: malformed ones, unusual hosts and types, truncated bodies, broken images."""

import io
import json
import random
import re
import struct
import zlib
from collections.abc import Callable

from PIL import Image

TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
_OTHER_TYPES = (
    "",
    "text/html",
    "image/svg+xml",
    "application/json",
    "image/png, image/gif",
    "multipart/form-data; boundary=a",
)
_HOSTS = ("evil.example", "127.0.0.1:1", "localhost.evil.example", "", "[::1]", "127.0.0.1:{port}@evil.example")


def malformed(draws: random.Random, port: int) -> bytes:
    """Return a malformed request."""
    host = f"Host: localhost:{port}\r\n"
    noise = draws.randbytes(draws.randrange(1, 400))
    return draws.choice(
        [
            noise,
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/9.9\r\n" + host.encode() + b"\r\n",
            b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n",
            f"POST /image HTTP/1.1\r\n{host}Content-Length: -1\r\n\r\n".encode(),
            f"POST /image HTTP/1.1\r\n{host}Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello".encode(),
            f"POST /image HTTP/1.1\r\n{host}Content-Type: image/png\r\nContent-Length: 999\r\n\r\n".encode() + noise,
            f"POST /image HTTP/1.1\r\n{host}Content-Type: image/png\r\nContent-Length: {len(noise)}\r\n\r\n".encode()
            + noise,
            f"POST /image HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
            f"GET /payload HTTP/1.1\r\n{host}{host}\r\n".encode(),
            f"GET /payload HTTP/1.1\r\n{host}Origin: {noise.hex()}\r\n\r\n".encode(),
            f"GET /%{noise.hex()} HTTP/1.1\r\n{host}\r\n".encode(),
        ]
    )


def hostile(draws: random.Random, port: int) -> bytes:
    """Return a random request: malformed, with an unusual host or type, a wrong body length, or a broken image."""
    kinds: list[Callable[[random.Random, int], bytes]] = [malformed, _odd_heads, _odd_body, _json, _broken_picture]
    return draws.choices(kinds, (3, 2, 2, 1, 4))[0](draws, port)


def request(port: int, body: bytes, kind: str, *, length: int | None = None, extra: str = "") -> bytes:
    """Return an upload whose `Content-Length` may be wrong."""
    head = f"POST /image HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: {kind}\r\n{extra}"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode("latin-1") + body


def is_cut(content: bytes) -> bool:
    """Return whether a server may wait for more bytes of a request."""
    head, end, body = content.partition(b"\r\n\r\n")
    if b"Transfer-Encoding" in head:
        return not body.endswith(b"\r\n0\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    return not end or (length is not None and int(length[1]) > len(body))


def picture(draws: random.Random, form: str) -> bytes:
    """Return a small valid image in the given format and a random mode."""
    mode = draws.choice({"PNG": ["RGB", "RGBA", "L", "LA", "P", "1"], "JPEG": ["RGB", "L", "CMYK"]}.get(form, ["RGB"]))
    image = Image.linear_gradient("L").resize((draws.randrange(2, 80), draws.randrange(2, 80))).convert("RGB")
    file = io.BytesIO()
    image.convert(mode).save(file, form, **({"progressive": draws.random() < 0.5} if form == "JPEG" else {}))
    return file.getvalue()


def _odd_heads(draws: random.Random, port: int) -> bytes:
    host = draws.choice(_HOSTS).format(port=port)
    path = draws.choice(["/", "/payload", "/image", "/../secret", "//", "*", "http://evil.example/", "/%00"])
    method = draws.choice(["GET", "POST", "HEAD", "OPTIONS", "CONNECT", "TRACE", "G" * 200])
    lines = [
        f"Host: {host}",
        f"Origin: http://{draws.choice(_HOSTS).format(port=port)}",
        *(f"X-{place}: {'a' * draws.randrange(400)}" for place in range(draws.choice([0, 1, 300]))),
        draws.choice(
            ["Connection: close", "Upgrade: websocket\r\nConnection: Upgrade", "Expect: 100-continue", "A: b\x7f"]
        ),
    ]
    draws.shuffle(lines)
    kept = lines[draws.randrange(2) :]
    return (f"{method} {path} HTTP/1.{draws.randrange(2)}\r\n" + "\r\n".join(kept) + "\r\n\r\n").encode("latin-1")


def _odd_body(draws: random.Random, port: int) -> bytes:
    form = draws.choice(list(TYPES))
    content = picture(draws, form)
    kind = draws.choice([TYPES[form], *TYPES.values(), *_OTHER_TYPES])
    chunked = (
        f"POST /image HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    whole = f"{len(content):x}\r\n".encode() + content + b"\r\n0\r\n\r\n"
    return draws.choice(
        [
            request(port, content, kind, length=len(content) + draws.choice([1, 10_000, 19_000_000])),
            request(port, content, kind, length=draws.choice([0, 1, 20_000_001, 10**18, 10**40])),
            request(port, content * draws.randrange(2, 5), kind),
            request(port, content, kind, extra="Expect: 100-continue\r\n"),
            request(port, content, kind, extra="Content-Encoding: gzip\r\n"),
            request(port, content, kind, extra="Transfer-Encoding: chunked\r\n"),
            request(port, content, kind) * 3,  # pipelined
            chunked.encode() + whole[: draws.randrange(len(whole))],
            chunked.encode() + b"fffffffffff\r\n" + content,
            chunked.encode() + (b"10000\r\n" + bytes(0x10000) + b"\r\n") * draws.choice([1, 1, 1, 1, 320]),
        ]
    )


def _json(draws: random.Random, port: int) -> bytes:
    depth = draws.choice([10, 1000, 100_000])
    body = draws.choice(
        [b"[" * depth, b'{"a":' * depth + b"1" + b"}" * depth, json.dumps(["a" * 1000] * depth).encode()[: 10**6]]
    )
    return request(port, body, draws.choice(["application/json", "image/png"]))


def _broken_picture(draws: random.Random, port: int) -> bytes:
    """Return an upload of an image with random bytes changed, or of a PNG with a wrong size in its header."""
    form = draws.choice(list(TYPES))
    content = bytearray(picture(draws, form))
    if form == "PNG" and draws.random() < 0.4:
        sizes = [draws.choice([0, 1, 50, 60_000, 70_000, 7000, 2**31 - 1, 2**32 - 1]) for _ in range(2)]
        head = struct.pack(">II", *sizes) + bytes(
            [draws.choice([1, 8, 16]), draws.choice([0, 2, 3, 4, 6, 7]), 0, 0, draws.randrange(2)]
        )
        content[16:33] = head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    else:
        for _ in range(draws.choice([1, 1, 2, 5, 50])):
            place = draws.randrange(len(content))
            content[place : place + draws.choice([0, 1, 4])] = draws.choice(
                [b"", b"\xff", draws.randbytes(4), content[:20]]
            )
    return request(port, bytes(content), TYPES[form])

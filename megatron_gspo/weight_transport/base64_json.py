"""JSON with binary data in base64, made in pieces."""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterable, Iterator

from megatron_gspo.servers.http_client import JsonObject

_PIECE = 3 << 18  # bytes encoded at a time; a multiple of 3, so that the encodings join


def json_with_base64(
    fields: JsonObject, key: str, payloads: Iterable[Iterable[bytes | memoryview]]
) -> Iterator[bytes]:
    """The JSON object `fields` plus `key`: a list of the payloads in base64; in pieces of about
    a megabyte.
    """
    opened = json.dumps(fields).removesuffix("}")
    if fields:
        opened += ","
    yield f"{opened}{json.dumps(key)}:[".encode()
    for number, payload in enumerate(payloads):
        yield b'"' if number == 0 else b',"'
        yield from base64_pieces(payload)
        yield b'"'
    yield b"]}"


def base64_pieces(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """The base64 of the pieces joined, without joining them."""
    unencoded = b""  # fewer than the three bytes that are encoded together
    for piece in pieces:
        view = memoryview(piece).cast("B")
        if unencoded:
            missing = 3 - len(unencoded)
            unencoded += bytes(view[:missing])
            view = view[missing:]
            if len(unencoded) < 3:
                continue
            yield binascii.b2a_base64(unencoded, newline=False)
        whole = len(view) - len(view) % 3
        for start in range(0, whole, _PIECE):
            yield binascii.b2a_base64(view[start : min(start + _PIECE, whole)], newline=False)
        unencoded = bytes(view[whole:])
    if unencoded:
        yield binascii.b2a_base64(unencoded, newline=False)

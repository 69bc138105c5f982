"""Where a server is, and what it says of itself before anything is measured."""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from overlap_bench.engines import api
from overlap_bench.engines.openai import lenient

KEY = "OPENAI_API_KEY"
ASK_S = 10.0  # for what is asked before a round
PORTS = {"http": 80, "https": 443}
WRITABLE = re.compile("[!-~]+")  # what a request's head can hold
UNKNOWN_CONTEXT = 1 << 30  # tokens, where the server does not say: its own limit will refuse


class Unreachable(api.EngineError):
    """No connection to a server; the message is its cause."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`path` is what stands before "/completions": "/v1"."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """For the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Model:
    """`context`: tokens of prompt and output together."""

    name: str
    context: int


def parse(url: str) -> Endpoint:
    """An endpoint from a server's address; "/v1" is added where it is left out. Raises BadSetting."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # of the port, or of brackets that are no IPv6 address
        raise api.BadSetting(f"url={url} is not a server's address: {error}") from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise api.BadSetting(f"url={url} is not a server's address; give one such as http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise api.BadSetting(f"a url with a password would be stored with the run: give a key in {KEY}")
    if parts.query or parts.fragment:  # not shown: it may hold a key
        raise api.BadSetting(
            "url has something behind its path (? or #), which would not be sent: leave it out; "
            f"a key goes into {KEY}"
        )
    if port == 0:
        raise api.BadSetting(f"url={url} names port 0, at which no server listens: give the server's own")
    path = parts.path.rstrip("/")
    if path.endswith("/completions"):
        raise api.BadSetting(
            f"url={url} names a path; give the server's address, and api=completions or chat"
        )
    if not path.endswith("/v1"):
        path += "/v1"
    try:
        host = parts.hostname.encode("idna").decode()
    except UnicodeError:
        host = ""
    if not WRITABLE.fullmatch(host):
        raise api.BadSetting(
            f"url={url} is not a server's address: no host is called {parts.hostname}; between its dots "
            "a name has 1 to 63 characters, and no blanks"
        )
    if not WRITABLE.fullmatch(path):
        raise api.BadSetting(
            f"url={url} has a path that no request can hold: percent-encode what is not ASCII, and blanks"
        )
    return Endpoint(parts.scheme, host, port or PORTS[parts.scheme], path)


def key() -> str:
    """The key of the environment, "" where there is none. It is sent, and goes nowhere else: not even into
    the message of the BadSetting for one that no header can hold."""
    found = os.environ.get(KEY, "").strip()
    if not (found.isascii() and found.isprintable()):
        raise api.BadSetting(f"{KEY} holds a line end or another character that no key has")
    return found


def tls() -> ssl.SSLContext:
    """Certificates are verified, by the system's authorities or those of SSL_CERT_FILE."""
    return ssl.create_default_context()


def why(error: OSError) -> str:
    """What went wrong on a connection, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: the certificate can't be verified: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return (error.strerror or str(error)).lower()


def address(endpoint: Endpoint) -> tuple[int, tuple[Any, ...]]:
    """Family and address of the server: of its name's addresses the first at which something listens (for
    "localhost" it may be either of two); the first of all where nothing does. Raises Unreachable."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"no server at {endpoint.url}: {why(error)}") from error
    for family, _, _, _, where in found if len(found) > 1 else ():
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(ASK_S)
            if probe.connect_ex(where) == 0:
                return family, where
    return found[0][0], found[0][4]


def get(endpoint: Endpoint, path: str, seconds: float = ASK_S) -> tuple[int, bytes]:
    """Status and body of one GET. Raises Unreachable."""
    headers = {"Authorization": f"Bearer {key()}"} if key() else {}
    connection = (
        http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=seconds)
        if endpoint.scheme == "http"
        else http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=seconds, context=tls())
    )
    try:
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    except OSError as error:
        raise Unreachable(f"no server at {endpoint.url}: {why(error)}") from error
    except http.client.HTTPException as error:
        raise Unreachable(f"what answers at {endpoint.url} is not an HTTP server: {error!r}") from error
    finally:
        connection.close()


def model(endpoint: Endpoint, wanted: str) -> Model:
    """The model that is to be asked, or the first that the server names. A server that lists none serves
    what it is asked for by name. Raises EngineError where there is no name."""
    path = f"{endpoint.path}/models"
    contexts: dict[str, int | None] = {}
    try:
        status, body = get(endpoint, path)
        said = f"HTTP {status}" if status != 200 else "no list of models"
        contexts = _contexts(lenient.decode(body)) if status == 200 else {}
    except Unreachable as error:
        if not wanted:
            raise
        said = str(error)  # the requests will tell
    except ValueError:
        pass
    if not wanted and said in ("HTTP 401", "HTTP 403"):
        which = "refuses the key" if key() else "wants a key"
        raise api.EngineError(f"the server {which}: GET {path} gives {said}; give one in {KEY}, or a --model")
    if not wanted and not contexts:
        raise api.EngineError(f"the server names no model: GET {path} gives {said}; name one with --model")
    name = wanted or next(iter(contexts))
    return Model(name, contexts.get(name) or UNKNOWN_CONTEXT)


def _contexts(listed: Any) -> dict[str, int | None]:
    """The models of a list, each with its context where it says. A name that can't be read is none."""
    found: dict[str, int | None] = {}
    for card in lenient.members(listed, "data"):
        (name,) = lenient.whole_characters([lenient.text(card.get("id"))])
        if name and "\N{REPLACEMENT CHARACTER}" not in name:
            found.setdefault(name, lenient.count(card.get("max_model_len")))
    return found

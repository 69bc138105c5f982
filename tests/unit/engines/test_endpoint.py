"""What is made of a server's answers before anything is measured."""

import pytest

from overlap_bench.engines import api
from overlap_bench.engines.openai import endpoint

SERVER = endpoint.Endpoint(scheme="http", host="localhost", port=80, path="/v1")


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://bücher.example:8000/a%20b/", "http://xn--bcher-kva.example:8000/a%20b/v1"),
        ("http://[fe80::1%eth0]", "http://[fe80::1%eth0]/v1"),
        ("https://localhost./v1", "https://localhost./v1"),
    ],
)
def test_an_address_is_as_requests_write_it(url: str, found: str) -> None:
    assert endpoint.parse(url).url == found


@pytest.mark.parametrize("body", [b"{", b'{"data": [{"id": "\xff"}]}', b'{"data": ' + b"[" * 100_000])
def test_a_list_of_models_that_can_not_be_read_is_none(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(endpoint, "get", lambda server, path: (200, body))
    with pytest.raises(api.EngineError, match="names no model: GET /v1/models gives no list of models"):
        endpoint.model(SERVER, "")
    assert endpoint.model(SERVER, "mine").name == "mine"

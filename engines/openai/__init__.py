"""Any OpenAI-compatible server: an engine that is the client of one.

    endpoint.py     where the server is, and what it says of itself before anything is measured
    server.py       a server that is started by a command, and stopped
    requests.py     what a request looks like on the wire
    connections.py  the sockets: sends, reads, and the kernel's arrival stamps
    events.py       server-sent events out of what was read
    replies.py      from the events of a reply to chunks with tokens and stamps
    counting.py     how many tokens there are, by what the server says
    lenient.py      JSON as it comes
    turns.py        a server of our own that runs a few steps and is stopped, while others have the machine
    engine.py       all of it behind the engine protocol

While a stream is read, its bytes are only kept, with their stamps; they are parsed when it has ended and
what was waiting to be read has been. No request of a round is ever sent twice, and nothing imports torch.
"""

from __future__ import annotations

from overlap_bench.engines import api

SPEC = api.EngineSpec(
    name="openai",
    summary="any OpenAI-compatible server, at an address or started by a command",
    toggles=(
        api.Toggle(
            "api",
            ("completions", "chat"),
            "which endpoint is asked: /v1/completions or /v1/chat/completions",
            "OpenAI's API",
            {},
        ),
        api.Toggle(
            "count",
            ("usage", "ids", "logprobs"),
            "what to ask the server for to count the tokens of a chunk: usage, return_token_ids (vLLM, and "
            "SGLang's completions), or logprobs, which cost it something",
            "OpenAI's API, vLLM, SGLang",
            {},
        ),
    ),
    settings=(
        api.Setting("url", "address of a running server, such as http://127.0.0.1:8000; one boot"),
        api.Setting("cmd", "command that starts a server, with {port} for its port; a fresh one per boot"),
        api.Setting("tokenizer", "tokenizer.json: for --pretok, --input-tokens, and to count tokens with"),
        api.Setting("timeout_s", "a request fails when nothing arrives for this long", "60"),
        api.Setting("start_timeout_s", "how long cmd's server may take to answer", "600"),
    ),
    build=f"{__name__}.engine:build",
    packages=("overlap_bench.engines",),
    samples=True,
    takes_turns=True,  # where it started the server
    turn_steps=8,
    overlapping={"api": ("completions", "chat")},  # for all that can be known of it
    starts_alone=True,
    boots_long=True,
    defaults={"model": ""},  # the first that the server names
    paced={},  # vLLM's, where cmd starts it
    asks_text=True,
    device_holds=None,
)

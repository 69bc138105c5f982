"""`bench serve` by real HTTP: the built-in engine behind it, and a third party's where an engine is to be
quick, to refuse, or to die."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines import api
from engines.overlap.presets import load_tokenizer, tokenizer_file
from experiments.common.bench_command import PATIENCE_S, last_line, start
from harness.common import processes
from harness.plan.design import Arm
from harness.serve.asking import make_served
from harness.serve.engine_process import EngineProcess
from harness.serve.meters import Meters
from harness.serve.parsing import NEUTRAL, Refused
from harness.serve.prompting import Prompting
from tests.support.clockwork import installed
from tests.support.in_process import bench
from tests.support.served import Server, ids_of, serving, text_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}
HELLO = {"prompt": "Hello, world. The scheduler", "max_tokens": 12, **GREEDY}
CLOCKWORK = ("--engine", "clockwork")
ARM = Arm(name="the server", engine="overlap", options=api.EngineOptions(), toggles={})
LONG = {"prompt": [1, 2, 3], "max_tokens": 500}  # a second of clockwork


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The built-in engine, with few enough blocks to notice one that is lost."""
    folder = tmp_path_factory.mktemp("serve")
    options = ("--set", "num_blocks=129", "--set", "max_batch_size=16")
    with serving(installed(folder), folder, "--device", "emulated", *options) as found:
        yield found


def idle(server: Server) -> dict[str, float]:
    """The server's meters, once nothing is in flight, and no step that was: its blocks are free behind it."""
    for _ in range(200):
        meters = server.meters()
        if not (meters["bench_requests_in_flight"] or meters["bench_engine_requests_running"]):
            return meters
        time.sleep(0.05)
    raise AssertionError("requests are in flight for ever")


# -- answers ---------------------------------------------------------------------------------------------


def test_a_stream_says_what_a_whole_answer_says(server: Server) -> None:
    events = server.events(COMPLETIONS, {**HELLO, "stream_options": {"include_usage": True}})
    status, whole = server.post(COMPLETIONS, HELLO)
    assert status == 200
    assert text_of(events) == whole["choices"][0]["text"]
    assert events[-1] is None
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 12
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-2]]
    assert reasons == [None] * 11 + ["length"]  # the reason comes with the last token, in no event of its own


def test_text_is_the_same_prompt_as_its_ids(server: Server) -> None:
    asked = {**HELLO, "return_token_ids": True}
    by_text = server.post(COMPLETIONS, asked)[1]
    ids = load_tokenizer("tiny-gpt2", 4096).encode(str(HELLO["prompt"])).ids
    for prompt in (ids, [ids], [HELLO["prompt"]]):
        by_ids = server.post(COMPLETIONS, {**asked, "prompt": prompt})[1]
        assert by_ids["choices"] == by_text["choices"]
        assert by_ids["usage"]["prompt_tokens"] == len(ids)
    assert ids_of(server.events(COMPLETIONS, asked)) == by_text["choices"][0]["token_ids"]


@pytest.mark.parametrize(("engine", "sampling"), [("overlap", True), ("transformers", False)])
def test_an_engine_is_asked_for_sampling_where_it_has_it(engine: str, sampling: bool) -> None:
    assert make_served({"engine": engine}).options.sampling is sampling


def test_a_chat_is_its_rendered_text_and_begins_with_a_role(server: Server) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rendered = "system: Be brief.\nuser: Hello\nassistant:"
    whole = server.post(COMPLETIONS, {**HELLO, "prompt": rendered})[1]
    events = server.events(CHAT, {"messages": messages, "max_completion_tokens": 12, **GREEDY})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == whole["choices"][0]["text"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    chat = server.post(CHAT, {"messages": [messages[0], *parts], "max_tokens": 12, **GREEDY})[1]
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": whole["choices"][0]["text"]}


def test_a_model_with_a_chat_template_is_asked_by_it(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file("tiny-gpt2")))
    made.chat_template = (
        "{% for each in messages %}{% if each.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "<{{ each.role }}>{{ each.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    made.save_pretrained(tmp_path)
    prompting = Prompting(
        {"name": str(tmp_path), "tokenizer": str(tmp_path / "tokenizer.json"), "context": 64}
    )
    ids = load_tokenizer("tiny-gpt2", 4096).encode("<user>Hi<assistant>").ids
    assert prompting.has_template
    assert prompting.prompt([{"role": "user", "content": "Hi"}]) == ids
    with pytest.raises(Refused, match="no tools"):
        prompting.prompt([{"role": "tool", "content": "Hi"}])


def test_a_chat_gets_what_the_context_has_room_for(server: Server) -> None:
    messages = [{"role": "user", "content": "word " * 480}]
    status, chat = server.post(CHAT, {"messages": messages, **GREEDY})
    assert status == 200
    assert chat["usage"]["total_tokens"] == 512


def test_text_ends_before_a_stop_string(server: Server) -> None:
    text = server.post(COMPLETIONS, HELLO)[1]["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    choice = server.post(COMPLETIONS, {**HELLO, "stop": stop})[1]["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == text[: text.index(stop)]


def test_a_seed_draws_the_same_again_and_none_draws_anew(server: Server) -> None:
    def drawn(**more: Any) -> str:
        asked = {"prompt": "Hello", "max_tokens": 12, "ignore_eos": True, **more}
        text: str = server.post(COMPLETIONS, asked)[1]["choices"][0]["text"]
        return text

    assert drawn(seed=7) == drawn(seed=7)
    assert drawn(seed=7, top_p=0.9) == drawn(seed=7, top_p=0.9)
    assert drawn() != drawn()  # without a temperature it is 1, as in OpenAI's API
    assert drawn(top_k=1) == drawn(temperature=0)


def test_usage_so_far_counts_each_chunk(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(COMPLETIONS, {**HELLO, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [*range(1, 13), 12]


def test_many_at_once_get_what_each_gets_alone(server: Server) -> None:
    asked = [{**HELLO, "prompt": f"{number} Hello", "max_tokens": 8 + number} for number in range(24)]
    alone = [server.post(COMPLETIONS, each)[1]["choices"] for each in asked[::6]]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda each: server.post(COMPLETIONS, each)[1]["choices"], asked))
    assert together[::6] == alone


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (COMPLETIONS, b"{", 400, "the body is not a JSON object: Input data was truncated"),
        (COMPLETIONS, {"max_tokens": 3}, 400, "missing required field `prompt`"),
        (COMPLETIONS, {**HELLO, "max_tokens": "many"}, 400, "Expected `int | null`, got `str`"),
        (COMPLETIONS, {**HELLO, "max_tokens": 0}, 400, "Expected `int` >= 1 - at `$.max_tokens`"),
        (COMPLETIONS, {**HELLO, "tempratur": 1}, 400, "unknown field 'tempratur'; did you mean temperature?"),
        (COMPLETIONS, {**HELLO, "n": 2}, 400, "n=2 is not supported"),
        (COMPLETIONS, {**HELLO, "logprobs": 0}, 400, "logprobs=0 is not supported"),
        (COMPLETIONS, {**HELLO, "echo": True}, 400, "echo=true is not supported"),
        (COMPLETIONS, {**HELLO, "min_tokens": 3, "ignore_eos": False}, 400, "min_tokens needs ignore_eos"),
        (COMPLETIONS, {**HELLO, "prompt": ["a", "b"]}, 400, "several prompts"),
        (COMPLETIONS, {**HELLO, "prompt": [[1], [2]]}, 400, "several prompts"),
        (COMPLETIONS, {**HELLO, "prompt": ["a", 1]}, 400, "prompt: Expected `str`, got `int` - at `$[1]`"),
        (COMPLETIONS, {**HELLO, "prompt": []}, 400, "the prompt is empty"),
        (COMPLETIONS, {**HELLO, "prompt": [5000]}, 400, "beyond the model's vocabulary"),
        (COMPLETIONS, {**HELLO, "temperature": -1}, 400, "Expected `float` >= 0.0 - at `$.temperature`"),
        (COMPLETIONS, {**HELLO, "top_p": 0, "stream": True}, 400, "Expected `float` > 0.0 - at `$.top_p`"),
        (COMPLETIONS, {**HELLO, "stop": [""], "stream": True}, 400, "a stop string is empty"),
        (COMPLETIONS, {**HELLO, "max_tokens": 512}, 400, "this model's context is 512 tokens"),
        (
            COMPLETIONS,
            {**HELLO, "model": "gpt-9"},
            404,
            "the model 'gpt-9' does not exist; there is tiny-gpt2",
        ),
        (CHAT, {"messages": []}, 400, "messages is empty"),
        (CHAT, {"messages": [{"content": "a"}]}, 400, "missing required field `role`"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "'image_url' is not",
        ),
        ("/v1/embeddings", {}, 404, "POST /v1/embeddings: Not Found"),
        ("/v1/models", {}, 405, "POST /v1/models: Method Not Allowed"),
    ],
)
def test_what_can_not_be_done_is_refused_as_openai_does(
    server: Server, path: str, body: Any, status: int, message: str
) -> None:
    got, content = server.post(path, body)
    assert (got, content["error"]["type"]) == (status, "invalid_request_error")
    assert message in content["error"]["message"]


def test_fields_that_ask_for_nothing_are_no_reason_to_refuse(server: Server) -> None:
    """What benchmark clients send by habit."""
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    nothing = dict.fromkeys(NEUTRAL)
    habits = {"user": "me", "stop": None, "min_tokens": 12, "top_k": -1, "model": "tiny-gpt2"}
    expected = server.post(COMPLETIONS, HELLO)[1]["choices"]
    assert server.post(COMPLETIONS, {**HELLO, **neutral, **habits})[1]["choices"] == expected
    assert server.post(COMPLETIONS, {**HELLO, **nothing})[1]["choices"] == expected


# -- clients that hang up --------------------------------------------------------------------------------


def test_clients_that_hang_up_lose_no_block_and_change_no_other_stream(server: Server) -> None:
    """The large version: experiments/validation/disconnects.py."""
    lasting = [
        {**HELLO, "prompt": f"Stay {n}", "max_tokens": 120, "return_token_ids": True} for n in range(3)
    ]
    alone = [ids_of(server.events(COMPLETIONS, each)) for each in lasting]
    before = idle(server)

    def hang_up(number: int) -> None:
        asked = {**HELLO, "prompt": f"Leave {number}", "max_tokens": 200}
        with server.stream(COMPLETIONS, asked) as leaving:
            events = iter(leaving)
            for _ in range(number % 7):
                next(events)
            if number % 2:
                leaving.reset()

    with ThreadPoolExecutor(10) as pool:
        staying = [pool.submit(server.events, COMPLETIONS, each) for each in lasting]
        list(pool.map(hang_up, range(30)))
        assert [ids_of(each.result()) for each in staying] == alone
    after = idle(server)
    outcome = 'bench_requests_total{endpoint="completions",outcome="cancelled"}'
    assert after[outcome] - before.get(outcome, 0) == 30
    assert after["bench_engine_kv_blocks_used"] == 0
    assert after["bench_engine_kv_blocks_free"] == 128
    assert after["bench_engine_requests_waiting"] == 0


def test_a_client_that_hangs_up_on_a_whole_answer_is_noticed_too(server: Server) -> None:
    before = idle(server)["bench_generated_tokens_total"]
    body = json.dumps({**HELLO, "max_tokens": 480}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(server.address, timeout=PATIENCE_S) as client:
        client.sendall(head + body)
        while not server.meters()["bench_requests_in_flight"]:
            pass
    after = idle(server)
    assert after["bench_generated_tokens_total"] - before < 480
    assert after["bench_engine_kv_blocks_used"] == 0


def test_what_an_engine_does_not_tell_any_more_is_left_out() -> None:
    meters = Meters()
    assert b"bench_engine_kv_blocks_used 3.0" in meters.text({"kv_blocks_used": 3})
    assert b"bench_engine_" not in meters.text({})  # a dead one's last value would look like today's
    assert b"bench_engine_kv_blocks_used 2.0" in meters.text({"kv_blocks_used": 2})


def test_meters_count_what_was_served(server: Server) -> None:
    before = idle(server)
    server.events(COMPLETIONS, HELLO)
    after = idle(server)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("bench_generated_tokens_total") == 12
    assert grown("bench_time_to_first_token_seconds_count") == 1
    assert grown("bench_inter_token_latency_seconds_count") == 11
    assert grown("bench_request_seconds_count") == 1
    assert grown('bench_requests_total{endpoint="completions",outcome="length"}') == 1


# -- the official client ---------------------------------------------------------------------------------


def test_the_official_client_understands_every_answer(server: Server) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny-gpt2"]
    whole = client.completions.create(
        model="tiny-gpt2", prompt="Hello", max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
    )
    pieces = client.completions.create(
        model="tiny-gpt2",
        prompt="Hello",
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    seen = list(pieces)
    assert "".join(piece.choices[0].text for piece in seen[:-1]) == whole.choices[0].text
    assert seen[-1].usage == whole.usage
    messages = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(
        model="tiny-gpt2", messages=messages, max_completion_tokens=6, temperature=0
    )
    stream = client.chat.completions.create(
        model="tiny-gpt2", messages=messages, max_completion_tokens=6, temperature=0, stream=True
    )
    assert "".join(p.choices[0].delta.content or "" for p in stream) == chat.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-9", prompt="Hello")
    with pytest.raises(openai.BadRequestError, match="n=2 is not supported"):
        client.completions.create(model="tiny-gpt2", prompt="Hello", n=2)


# -- who is let in, and the end --------------------------------------------------------------------------


def test_a_key_and_a_number_of_requests_keep_others_out(tmp_path: Path) -> None:
    environment = {**installed(tmp_path), "BENCH_API_KEY": "sesame"}
    key = {"Authorization": "Bearer sesame"}
    with serving(environment, tmp_path, *CLOCKWORK, "--max-requests", "2") as server:
        for headers in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "sesame"}):
            status, found, body = server.ask("POST", COMPLETIONS, LONG, **headers)
            assert (status, found["www-authenticate"]) == (401, "Bearer")
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert server.get("/v1/models")[0] == 401
        assert server.get("/health") == (200, {"status": "ok"})

        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(server.post, COMPLETIONS, LONG, **key) for _ in range(2)]
            while server.meters()["bench_requests_in_flight"] < 2:
                pass
            status, found, body = server.ask("POST", COMPLETIONS, LONG, **key)
            assert (status, found["retry-after"]) == (429, "1")
            assert json.loads(body)["error"]["type"] == "rate_limit_error"
            assert [each.result()[0] for each in running] == [200, 200]
        assert server.post(COMPLETIONS, {**LONG, "max_tokens": 1}, **key)[0] == 200


def test_told_to_stop_it_ends_what_runs_and_lets_nobody_in(tmp_path: Path) -> None:
    with serving(installed(tmp_path), tmp_path, *CLOCKWORK) as server:
        with server.stream(COMPLETIONS, LONG) as streaming:
            events = iter(streaming)
            next(events)
            server.bench.popen.send_signal(signal.SIGTERM)
            server.bench.wait_for("shutting down")
            status, body = server.post(COMPLETIONS, LONG)
            assert (status, body["error"]["message"]) == (503, "the server is shutting down")
            assert server.get("/health")[0] == 503
            assert list(events)[-1] is None  # [DONE]
        assert server.bench.end()[0] == 0
        assert not server.bench.left()


def test_ctrl_c_without_grace_tells_clients_and_exits_with_130(tmp_path: Path) -> None:
    with serving(installed(tmp_path), tmp_path, *CLOCKWORK, "--grace-s", "0") as server:
        with server.stream(COMPLETIONS, LONG) as streaming:
            events = iter(streaming)
            next(events)
            server.bench.popen.send_signal(signal.SIGINT)
            last = list(events)[-1]
        assert last["error"] == {
            "message": "the server is shutting down", "type": "server_error", "param": None,
            "code": "engine_lost",
        }  # fmt: skip
        code, _, stderr = server.bench.end()
        assert (code, last_line(stderr)) == (130, "bench: interrupted")
        assert not server.bench.left()


def test_an_engine_that_failed_is_named_with_what_had_died_before_it_ended_the_rest(tmp_path: Path) -> None:
    """An output process that was killed: the host says so, and closes its device."""
    with EngineProcess(ARM) as engine, ExitStack() as ended:
        for role in ("device process", "output process"):
            started = ended.enter_context(subprocess.Popen(["sleep", "600"]))
            child = processes.adopt(role, started.pid)
            assert child is not None
            engine._children.append(child)
            started.kill()
        assert processes.wait(engine._children, PATIENCE_S)
        pid = engine._children[1].pid
        failed = api.Failed("the server", "Broken pipe", False, "", [pid])
        assert engine._obituary(failed).startswith(f"the output process (pid {pid}) ")
        own = msgspec.structs.replace(failed, died=[])
        assert engine._obituary(own) == "the engine failed: Broken pipe"


@pytest.mark.parametrize(("which", "who"), [("engines.host", "engine host"), ("sleep", "device process")])
def test_a_dead_engine_is_named_to_everybody(tmp_path: Path, which: str, who: str) -> None:
    with serving(installed(tmp_path), tmp_path, *CLOCKWORK) as server:
        with server.stream(COMPLETIONS, LONG) as streaming:
            events = iter(streaming)
            next(events)
            os.kill(server.bench.find(which).pid, signal.SIGKILL)
            last = list(events)[-1]
        assert f"the {who} (pid " in last["error"]["message"]
        assert last["error"]["type"] == "server_error"
        for status, body in (server.get("/health"), server.post(COMPLETIONS, LONG)):
            assert status == 503
            assert body["error"]["message"] == last["error"]["message"]
        assert "bench_requests_in_flight 0.0" in server.ask("GET", "/metrics")[2].decode()
        server.bench.popen.send_signal(signal.SIGTERM)
        code, _, stderr = server.bench.end()
        assert code == 4
        assert f"bench: the {who} (pid " in last_line(stderr)
        assert not server.bench.left()


def test_what_the_engine_refuses_is_a_400_before_any_event(tmp_path: Path) -> None:
    with serving(installed(tmp_path), tmp_path, *CLOCKWORK, "--set", "service=none") as server:
        for streamed in (False, True):
            status, body = server.post(COMPLETIONS, {**LONG, "stream": streamed})
            assert (status, body["error"]["message"]) == (400, "out of order")


# -- the command line ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("serve --ttft-ms 5", "--ttft-ms applies only with --mock"),
        ("serve --mock --model tiny-gpt2", "--model does not apply with --mock"),
        ("serve --mock --itl-ms -1", "--itl-ms must be at least 0, not -1"),
        ("serve --mock --max-tokens-per-chunk 0", "--max-tokens-per-chunk must be at least 1, not 0"),
        ("serve --mock --port 99999", "--port must lie between 0 and 65535, not 99999"),
        ("serve --mock --port 0 --host 203.0.113.7", "can't listen on 203.0.113.7"),
        (f"serve --mock --port 0 --host {'a' * 64}", "it is no host's name"),
        ("serve --mock --port 0 --host a..b", "it is no host's name"),
        ("serve --engine overlap --variant overlap", "--variant brings its engine"),
        ("serve --variant overlop", "unknown variant 'overlop'; did you mean overlap?"),
        ("serve --set h2b=packed", "unknown setting 'h2b'; did you mean h2d?"),
        ("serve --max-requests 0", "--max-requests must be at least 1, not 0"),
        ("serve --grace-s -1", "--grace-s must be at least 0, not -1"),
        ("serve --grace-s nan", "--grace-s must be a number of seconds, not nan"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert bench(monkeypatch, *arguments.split()) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert message in output.err


@pytest.mark.parametrize(("boot", "code"), [("refuses", 2), ("breaks", 4)])
def test_an_engine_that_does_not_start_ends_the_command(tmp_path: Path, boot: str, code: int) -> None:
    server = start(installed(tmp_path), tmp_path, "serve", "--port", "0", *CLOCKWORK, "--set", f"boot={boot}")
    ended, stdout, stderr = server.end()
    assert (ended, stdout, stderr.count("\n")) == (code, "", 1)
    assert stderr.startswith("bench: ")


@pytest.mark.parametrize(("package", "arguments"), [("httptools", ["--mock"]), ("uvicorn", [])])
def test_a_missing_extra_is_one_line_that_says_how_to_add_it(package: str, arguments: list[str]) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from harness.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", "--port", "0", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"bench: bench serve needs {package}, which the extra `serve` brings: pip install -e '.[serve]'\n"
    )

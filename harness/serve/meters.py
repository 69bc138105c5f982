"""What GET /metrics says, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter_ns

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from engines import api

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
TTFT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
ITL_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
LATENCY_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
ENGINE = {
    "requests_running": "Requests that the engine decodes",
    "requests_waiting": "Requests that wait in the engine",
    "kv_blocks_used": "KV blocks that requests own",
    "kv_blocks_free": "KV blocks that can be handed out",
}


class Meters:
    """Counts and times of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._engine: dict[str, Gauge] = {}
        self.requests = Counter(
            "bench_requests", "Requests by how they ended", ["endpoint", "outcome"], registry=registry
        )
        self.preparing = Gauge(
            "bench_requests_preparing", "Requests that are read, checked or tokenized", registry=registry
        )
        self.waiting = Gauge("bench_prompts_waiting", "Prompts that wait to be tokenized", registry=registry)
        self.tokenizing = Gauge("bench_prompts_tokenizing", "Prompts that are tokenized", registry=registry)
        self.in_flight = Gauge("bench_requests_in_flight", "Requests in the engine", registry=registry)
        self.connections = Gauge("bench_connections", "Connections that are open", registry=registry)
        self.dropped = Counter(
            "bench_connections_dropped",
            "Connections ended because a request on them was too large, or too slow to come",
            ["why"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "bench_prompt_tokens", "Prompt tokens of ended requests", registry=registry
        )
        self.generated_tokens = Counter("bench_generated_tokens", "Tokens generated", registry=registry)
        self.ttft = Histogram(
            "bench_time_to_first_token_seconds",
            "From a request's arrival to its first token in the server",
            buckets=TTFT_S,
            registry=registry,
        )
        self.itl = Histogram(
            "bench_inter_token_latency_seconds",
            "Between two tokens of a request, as the engine had them on the host",
            buckets=ITL_S,
            registry=registry,
        )
        self.latency = Histogram(
            "bench_request_seconds",
            "From a request's arrival to its last token in the server",
            buckets=LATENCY_S,
            registry=registry,
        )

    def text(self, gauges: Mapping[str, int]) -> bytes:
        """All of it, with what the engine holds. What it does not tell now is left out: of an engine that no
        longer answers, the last value would look like today's."""
        for name in self._engine.keys() - gauges.keys():
            self._registry.unregister(self._engine.pop(name))
        for name, value in gauges.items():
            if name not in self._engine:
                self._engine[name] = Gauge(
                    f"bench_engine_{name}", ENGINE.get(name, name), registry=self._registry
                )
            self._engine[name].set(value)
        return generate_latest(self._registry)


class Meter:
    """One request's part in them."""

    def __init__(self, meters: Meters, endpoint: str) -> None:
        self._meters = meters
        self._endpoint = endpoint
        self._arrived_ns = perf_counter_ns()
        self._last_ns = 0  # when the engine had the newest token
        self._ended = False

    def chunk(self, chunk: api.Chunk) -> None:
        if not self._last_ns:
            self._meters.ttft.observe((perf_counter_ns() - self._arrived_ns) / 1e9)
        self._meters.generated_tokens.inc(len(chunk.token_ids))
        for token_ns in chunk.token_ns:
            if self._last_ns:
                self._meters.itl.observe((token_ns - self._last_ns) / 1e9)
            self._last_ns = token_ns

    def finish(self, finish: api.Finish) -> None:
        self._meters.prompt_tokens.inc(finish.prompt_tokens)
        self._meters.latency.observe((perf_counter_ns() - self._arrived_ns) / 1e9)
        self.end(finish.reason)

    def end(self, outcome: str) -> None:
        """The first outcome is the one that counts."""
        if not self._ended:
            self._ended = True
            self._meters.requests.labels(self._endpoint, outcome).inc()

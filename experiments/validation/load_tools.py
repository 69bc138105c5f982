"""Our client beside guidellm and aiperf: the same server, prompts and load, do they read the same?

    python -m experiments.validation.load_tools --guidellm PYTHON --aiperf PYTHON [--rounds 5]

`bench serve` with tiny-gpt2 stays up, and a mock server that answers after a known time and computes
nothing; each round every tool asks each for the same, in an order drawn for the round: one request at a time,
then RATE requests a second. PYTHON is an interpreter that has the tool; one that is not given or does not
have it is left out, which is said. The tools' files are read as `bench import` reads them, and what the tools
print themselves stands beside it. A difference is of one round, tool less ours; the table has its median, and
whether that is within 5% or 1 ms. The last columns tell a server that was slower from a client that read
later: what the server itself says of its TTFT, warming up included (of bench serve the mean, from /metrics;
of the mock the median, from /lateness), and how much more than that the client read.

Where they differ by definition:

- TTFT: ours begins just before the send and ends with the kernel's stamp on the first chunk. Theirs end when
  their event loop has read and parsed it: they add what we tell apart as client lag. guidellm begins with the
  first write of the header, aiperf before it looks for a connection.
- TPOT: guidellm prints it as inter-token latency, weighed by tokens; aiperf as inter-token latency too, up to
  the last response, which is the usage behind the last token. Imported from requests both end with the last
  chunk that has text.
- ITL, by chunk: guidellm tells none. aiperf's chunks that were read together are 0 ms apart.
- All share the cores with the server, and aiperf is several processes: on few cores a client may slow what it
  measures, which no definition corrects, and the server's own TTFT shows.

So found on two cores: against the mock all agree within 5%, the tools reading a TTFT about 1 ms late; against
bench serve they differ by more, two thirds of it because the server itself is slower beside them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import pandas as pd
from prometheus_client.parser import text_string_to_metric_families

from engines.overlap.models.published import save
from engines.overlap.presets import PRESETS
from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.server import serving
from harness.analysis.result import to_plain
from harness.studies.imports.run import bring

TOKENS = 32
WORDS = ("cat", "dog", "runs", "house", "tree", "water", "stone", "light", "green", "over", "under", "river")
RATE = 10
REQUESTS = {"1 at a time": 30, f"{RATE} a second": 80}
WARMUP = 4
OURS = "ours"
SERVE, MOCK = "bench serve", "mock"
MOCK_TTFT_MS, MOCK_ITL_MS = 50.0, 10.0
METRICS = {"TTFT": "ttft_ms_p50", "TPOT": "tpot_ms_p50", "ITL": "itl_chunk_ms_p50"}
PATIENCE_S = 240


def write_prompts(folder: Path, load: str, seed: int) -> None:
    """As lines of text for us, as JSON for them; some more, for warming up."""
    draw = random.Random(seed)
    prompts = [" ".join(draw.choices(WORDS, k=16)) for _ in range(REQUESTS[load] + WARMUP)]
    (folder / "prompts").write_text("".join(f"{each}\n" for each in prompts))
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps({'text': each})}\n" for each in prompts))


def values(result: dict[str, Any]) -> dict[str, float]:
    return {name: row["before"] for name, row in result["comparisons"][0]["metrics"].items()}


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What it prints. Its last lines where it fails."""
    # aiperf takes an empty variable for none, and offline it finds no tokenizer by a path.
    variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        command, cwd=folder, env=variables | environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command[:4])}: exit {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


def imported(file: Path, folder: Path) -> dict[str, float]:
    """A tool's file by our names, after a look at whether all that was asked for came."""
    run_folder, result = bring([str(file)], folder / "imported", name=None, engine=None, fresh_boots=False)
    requests = pd.read_parquet(run_folder / "blocks" / "000" / "requests.parquet")
    if not (requests["completion_tokens"] == TOKENS).all():
        raise SystemExit(f"{file.name}: not every request got {TOKENS} tokens")
    return values(to_plain(result))


def ask_ours(url: str, model: Path, load: str, folder: Path, _: str) -> dict[str, float]:
    arrival = ["fixed", "--interval-ms", str(1000 / RATE)]
    if load == "1 at a time":
        arrival = ["closed", "--concurrency", "1"]
    command = [sys.executable, "-m", "harness", "run", "--engine", "openai", "--before", f"url={url}"]
    command += ["--prompts", "prompts", "--num-requests", str(REQUESTS[load]), "--arrival", *arrival]
    command += ["--max-new-tokens", str(TOKENS), "--rounds", "1", "--out", "results", "--format", "json"]
    return values(json.loads(run(command, folder)))


def ask_guidellm(url: str, model: Path, load: str, folder: Path, python: str) -> dict[str, float]:
    profile = "concurrent,streams=1" if load == "1 at a time" else f"constant,rate={RATE}"
    backend = f"kind=openai_http,target={url},request_format=/v1/completions,http2=false,max_tokens={TOKENS}"
    backend += ",extras.body.ignore_eos=true"
    command = [python, "-m", "guidellm", "run", "--disable-console", "--backend", backend]
    command += ["--profile", f"kind={profile}", "--constraint", f"kind=max_requests,count={REQUESTS[load]}"]
    command += ["--data", "kind=json_file,path=prompts.jsonl", "--output", "kind=json,path=guidellm.json"]
    run(command, folder, HF_HUB_OFFLINE="1")
    found = imported(folder / "guidellm.json", folder)
    said = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    return found | {
        "said_ttft_ms": said["time_to_first_token_ms"]["successful"]["median"],
        "said_itl_ms": said["inter_token_latency_ms"]["successful"]["median"],
    }


def ask_aiperf(url: str, model: Path, load: str, folder: Path, python: str) -> dict[str, float]:
    shape = ["--concurrency", "1"]
    if load != "1 at a time":
        shape = ["--request-rate", str(RATE), "--arrival-pattern", "constant"]
    command = [
        python,
        "-m",
        "aiperf",
        "profile",
        "--model",
        str(model),
        "--tokenizer",
        str(model),
        "--url",
        url,
    ]
    command += ["--endpoint-type", "completions", "--streaming", "--use-legacy-max-tokens"]
    command += ["--use-server-token-count", "--extra-inputs", f"max_tokens:{TOKENS}"]
    command += ["--extra-inputs", "ignore_eos:true", "--input-file", "prompts.jsonl"]
    command += ["--custom-dataset-type", "single_turn", *shape, "--request-count", str(REQUESTS[load])]
    command += ["--warmup-request-count", str(WARMUP), "--artifact-dir", "aiperf", "--ui", "none"]
    run(command, folder)
    found = imported(folder / "aiperf" / "profile_export.jsonl", folder)
    said = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return found | {
        "said_ttft_ms": said["time_to_first_token"]["p50"],
        "said_itl_ms": said["inter_token_latency"]["p50"],
    }


TOOLS = {OURS: ask_ours, "guidellm": ask_guidellm, "aiperf": ask_aiperf}


def version_of(tool: str, python: str | None) -> str | None:
    """None where it is not there, which is said."""
    if python is None:
        print(f"no --{tool} PYTHON: {tool} is left out", file=sys.stderr)
        return None
    asked = f"from importlib.metadata import version; print(version({tool!r}))"
    try:
        done = subprocess.run([python, "-c", asked], capture_output=True, text=True)
    except OSError as error:
        print(f"{python}: {error.strerror}: {tool} is left out", file=sys.stderr)
        return None
    if done.returncode:
        print(f"{python} has no {tool}: it is left out", file=sys.stderr)
        return None
    return done.stdout.strip()


def server_ttft_ms(server: str, url: str, before: tuple[float, float]) -> float:
    """By the server's own word, of what it was asked since."""
    if server == MOCK:
        with urlopen(f"{url}/lateness") as reply:
            late: float = json.load(reply)["first_token"]["p50"]
        return MOCK_TTFT_MS + late / 1e3
    seconds, count = (after - since for after, since in zip(since_start(server, url), before, strict=True))
    return seconds / count * 1e3


def since_start(server: str, url: str) -> tuple[float, float]:
    """Seconds of all TTFTs of `bench serve`, and their count. The mock forgets what it counted."""
    if server == MOCK:
        with urlopen(Request(f"{url}/lateness", method="DELETE")):
            return 0.0, 0.0
    with urlopen(f"{url}/metrics") as reply:
        families = text_string_to_metric_families(reply.read().decode())
    found = {sample.name: sample.value for family in families for sample in family.samples}
    name = "bench_time_to_first_token_seconds"
    return found[f"{name}_sum"], found[f"{name}_count"]


def row(
    server: str, load: str, tool: str, rounds: list[dict[str, float]], ours: list[dict[str, float]]
) -> list[str]:
    cells = [server, load, tool]
    within = True
    for metric in METRICS.values():
        if metric not in rounds[0]:
            cells += ["not told", ""]
            continue
        middle = median(each[metric] for each in rounds)
        difference = median(each[metric] - own[metric] for each, own in zip(rounds, ours, strict=True))
        share = difference / median(own[metric] for own in ours)
        within = within and (abs(difference) <= 1 or abs(share) <= 0.05)
        cells += [f"{middle:.2f}", "" if tool == OURS else f"{difference:+.2f} ({share:+.1%})"]
    said = [median(each[name] for each in rounds) for name in ("said_ttft_ms", "said_itl_ms") if tool != OURS]
    statistic = "ttft_ms_p50" if server == MOCK else "ttft_ms_mean"
    return [
        *cells,
        "" if tool == OURS else "yes" if within else "no",
        " / ".join(f"{each:.2f}" for each in said),
        f"{median(each['server_ttft_ms'] for each in rounds):.2f}",
        f"{median(each[statistic] - each['server_ttft_ms'] for each in rounds):+.2f}",
    ]


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--guidellm", metavar="PYTHON")
    parser.add_argument("--aiperf", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    pythons = {OURS: sys.executable}
    versions = {}
    for tool in ("guidellm", "aiperf"):
        python = getattr(given, tool)
        version = version_of(tool, python)
        if version is not None:
            pythons[tool], versions[tool] = os.path.abspath(python), version
    found: dict[tuple[str, str], dict[str, list[dict[str, float]]]] = {
        (server, load): {tool: [] for tool in pythons} for server in (SERVE, MOCK) for load in REQUESTS
    }
    timing = ["--ttft-ms", str(MOCK_TTFT_MS), "--itl-ms", str(MOCK_ITL_MS)]
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        model.mkdir()
        save(PRESETS["tiny-gpt2"], model)
        serve = ["serve", "--model", str(model), "--device", given.device]
        with serving("harness", *serve) as real, serving("harness.serve.mock", *timing) as mock:
            urls = {SERVE: real, MOCK: mock}
            for number in range(given.rounds):
                for server, load in found:
                    order = random.Random(f"{number} {server} {load}").sample(list(pythons), len(pythons))
                    for tool in order:
                        before = since_start(server, urls[server])
                        with tempfile.TemporaryDirectory(dir=directory) as folder:
                            write_prompts(Path(folder), load, number)
                            read = TOOLS[tool](urls[server], model, load, Path(folder), pythons[tool])
                        read["server_ttft_ms"] = server_ttft_ms(server, urls[server], before)
                        found[server, load][tool].append(read)
                        print(
                            number,
                            server,
                            load,
                            tool,
                            {name: read.get(each) for name, each in METRICS.items()},
                            file=sys.stderr,
                        )
    named = {OURS: OURS, **{tool: f"{tool} {version}" for tool, version in versions.items()}}
    write_result(
        __file__,
        title="One server as three clients read it (tiny-gpt2 by bench serve; a mock of "
        f"{MOCK_TTFT_MS:.0f} and {MOCK_ITL_MS:.0f} ms): medians in ms, of {given.rounds} interleaved rounds",
        header=[
            "server",
            "load",
            "client",
            *(cell for metric in METRICS for cell in (f"{metric} p50", "less ours")),
            "within 5% or 1 ms",
            "as it prints TTFT / ITL",
            "server's own TTFT",
            "client's beyond it",
        ],
        rows=[
            [*cells[:2], named[tool], *cells[3:]]
            for (server, load), tools in found.items()
            for tool, rounds in tools.items()
            for cells in [row(server, load, tool, rounds, tools[OURS])]
        ],
        data={
            "versions": versions,
            "rounds": {f"{server}, {load}": tools for (server, load), tools in found.items()},
        },
    )


if __name__ == "__main__":
    main()

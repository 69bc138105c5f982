"""The requests of one round, in the order in which they are sent: what each asks, and when.
And what can't be asked: every option of a workload, and how they go together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from overlap_bench.engines.api import BadSetting, pick
from overlap_bench.harness.common.text_files import SURROGATE
from overlap_bench.harness.workload import lengths
from overlap_bench.harness.workload import prompts as source
from overlap_bench.harness.workload.arrivals import ARRIVALS, SCHEDULES, TIMING_OPTIONS, parse_ramp, using
from overlap_bench.harness.workload.lengths import stream
from overlap_bench.harness.workload.workload import DEFAULT, Workload

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompt = str | list[int]
AT_LEAST_1 = ("num_requests", "concurrency", "prompt_repeats")
MOST_REQUESTS = 1_000_000
DAY_MS = 24 * 3600e3
PLACES_FILLED = 2  # requests per place of a closed loop, at least
ABOVE_0 = ("interval_ms", "rate", "burstiness", "trace_scale")
# What a trace says itself, or has not got.
NOT_WITH_TRACE = ("prompts", "prompt_repeats", "unique_prompts", "input_tokens", "max_new_tokens")


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """One request of a round, and when it is due: `offset_ns` after the round's start, or UNTIMED (-1)."""

    id: int
    offset_ns: int
    prompt: Prompt
    max_new_tokens: int
    stop_on_eos: bool
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # of its samples
    stop: list[str] = []


def plan(workload: Workload, seed: int, tokenizer_path: str, context: int) -> list[Planned]:
    """The requests of one round; the same for the same arguments. Raises BadSetting.

    `workload` is a checked one. `tokenizer_path` names a tokenizer.json, and may be empty where nothing
    needs one (text as it is). Prompt and output together must fit `context` tokens; without a tokenizer that
    is left to the engine."""
    asked = ask(workload, seed, tokenizer_path, context).requests
    offsets = ARRIVALS[workload.arrival].offsets(workload, stream(seed, "arrivals"))
    return [
        Planned(
            id=index,
            offset_ns=offset,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            stop_on_eos=workload.stop_on_eos,
            temperature=workload.temperature,
            top_k=workload.top_k,
            top_p=workload.top_p,
            seed=request_seed(seed, index),
            stop=workload.stop,
        )
        for index, (offset, (prompt, max_new_tokens)) in enumerate(zip(offsets, asked, strict=True))
    ]


def skipped(workload: Workload, seed: int, tokenizer_path: str, context: int) -> dict[str, int]:
    """What `plan` passes over, by reason: conversations too "short" or too "long", requests of a trace that
    "failed". Nothing is ever skipped of other prompts."""
    if workload.trace is None and not source.are_conversations(workload.prompts):
        return {}
    return dict(ask(workload, seed, tokenizer_path, context).skipped)


def request_seed(seed: int, request: int) -> int:
    """The seed of a request's samples, from the round's: 63 bits."""
    digest = blake2b(f"{seed}/{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# ---------------------------------------------------------------------------------------------------------
# What is asked


class Asked(NamedTuple):
    """(prompt, max_new_tokens) of each request, and what was passed over on the way, by reason."""

    requests: list[tuple[Prompt, int]]
    skipped: Mapping[str, int] = {}


def ask(workload: Workload, seed: int, tokenizer_path: str, context: int) -> Asked:
    """What a round asks, in the order in which it is sent. Raises BadSetting; see `plan`."""
    tokenizer = source.load_tokenizer(tokenizer_path) if tokenizer_path else None
    if tokenizer is None:
        _refuse_without_tokenizer(workload)
    if workload.trace is not None:
        assert tokenizer is not None
        return _from_trace(workload, workload.trace, seed, tokenizer, context)
    if tokenizer is not None and source.are_conversations(workload.prompts) and workload.input_tokens is None:
        return _from_conversations(workload, seed, tokenizer, context)
    return Asked(_from_texts(workload, seed, tokenizer, context))


def _refuse_without_tokenizer(workload: Workload) -> None:
    needing = {
        "pretok": workload.pretok,
        "input_tokens": workload.input_tokens is not None,
        "unique_prompts": workload.unique_prompts,
        "max_new_tokens as in the conversations": workload.max_new_tokens is None,
    }
    for option, needed in needing.items():
        if needed:
            without = ": ask with text by --no-pretok, or by asks_text in its EngineSpec"
            without = without if option == "pretok" else ""
            raise BadSetting(f"{option} needs the engine's tokenizer, and the engine names none{without}")


def _from_trace(workload: Workload, path: str, seed: int, tokenizer: Tokenizer, context: int) -> Asked:
    from overlap_bench.harness.workload import traces

    trace = traces.read(path, workload.num_requests)
    traces.check_fit(trace, workload.trace_scale, context)
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    ordinary = [token for token in range(tokenizer.get_vocab_size()) if token not in special]
    prompts = traces.prompts(trace, workload.trace_scale, seed, ordinary)
    outputs = [traces.scaled(entry.output_tokens, workload.trace_scale) for entry in trace.entries]
    return Asked(list(zip(prompts, outputs, strict=True)), {"failed": trace.failed})


# ---------------------------------------------------------------------------------------------------------
# Texts


def _from_texts(
    workload: Workload, seed: int, tokenizer: Tokenizer | None, context: int
) -> list[tuple[Prompt, int]]:
    """Texts in turn, from the start again when there are too few, in the wanted form and length."""
    texts = source.texts(workload.prompt, workload.prompts, stream(seed, "prompts"))
    count = different(workload, len(texts))
    if tokenizer is None:
        prompts: list[Prompt] = [texts[index % len(texts)] for index in range(count)]
    else:
        prompts = _sized(workload, texts, count, seed, tokenizer, context)
    assert workload.max_new_tokens is not None
    outputs = lengths.parse(workload.max_new_tokens, "max_new_tokens").draw(
        workload.num_requests, stream(seed, "max_new_tokens")
    )
    return [(prompts[index % count], output) for index, output in enumerate(outputs)]


def different(workload: Workload, texts: int) -> int:
    """How many different prompts a round has. Raises BadSetting where repeats need more than there are."""
    requests = workload.num_requests
    if workload.prompt_repeats is not None:
        count = -(-requests // workload.prompt_repeats)
        if count > texts and not workload.unique_prompts:
            raise BadSetting(
                f"prompt_repeats={workload.prompt_repeats} of {requests} requests needs {count} different "
                f"prompts, and there are {texts}; give more, or ask for unique prompts"
            )
        return count
    drawn = workload.input_tokens is not None and not lengths.is_number(workload.input_tokens)
    return requests if workload.unique_prompts or drawn else min(texts, requests)


def _sized(
    workload: Workload, texts: list[str], count: int, seed: int, tokenizer: Tokenizer, context: int
) -> list[Prompt]:
    """`count` prompts, none of which can be too long for the context."""
    assert workload.max_new_tokens is not None
    leads = _leads(workload, count, seed, tokenizer)
    output = lengths.parse(workload.max_new_tokens, "max_new_tokens").most
    if workload.input_tokens is None:
        found = [_as_it_is(workload, leads[index], texts[index % len(texts)], tokenizer)
                 for index in range(count)]  # fmt: skip
        _check_room(workload, (tokens for _, tokens in found), output, context)
        return [prompt for prompt, _ in found]
    inputs = lengths.parse(workload.input_tokens, "input_tokens")
    _check_room(workload, [inputs.most], output, context)
    find = source.ids_of_length if workload.pretok else source.text_of_length
    return [
        find(leads[index], texts, index % len(texts), length, tokenizer)
        for index, length in enumerate(inputs.draw(count, stream(seed, "input_tokens")))
    ]


def _leads(workload: Workload, count: int, seed: int, tokenizer: Tokenizer) -> list[str]:
    """What stands in front of each prompt: nothing, or what makes it unique."""
    return source.leads(count, tokenizer, stream(seed, "leads")) if workload.unique_prompts else [""] * count


def _as_it_is(workload: Workload, lead: str, text: str, tokenizer: Tokenizer) -> tuple[Prompt, int]:
    """A prompt uncut, as it is sent, and its number of tokens."""
    whole = f"{lead} {text}" if lead else text
    ids: list[int] = tokenizer.encode(whole).ids
    return (ids if workload.pretok else whole), len(ids)


def _check_room(workload: Workload, inputs: Iterable[int], output: int, context: int) -> None:
    longest, room = max(inputs), context - output
    if longest > room:
        raise BadSetting(
            f"a prompt of {longest} tokens is too long: the context of {context} tokens leaves "
            f"{max(0, room)} beside max_new_tokens={workload.max_new_tokens}"
        )


# ---------------------------------------------------------------------------------------------------------
# Conversations


def _from_conversations(workload: Workload, seed: int, tokenizer: Tokenizer, context: int) -> Asked:
    """Conversations in random order, from the start again when there are too few, without those that are too
    short or too long."""
    outputs = None
    if workload.max_new_tokens is not None:
        draw = lengths.parse(workload.max_new_tokens, "max_new_tokens").draw
        outputs = draw(workload.num_requests, stream(seed, "max_new_tokens"))
    chosen, skipped = _choose(workload, seed, tokenizer, max(outputs) if outputs else None, context)
    return Asked(
        [
            (chosen[index % len(chosen)][0], outputs[index] if outputs else chosen[index % len(chosen)][1])
            for index in range(workload.num_requests)
        ],
        skipped,
    )


def _choose(
    workload: Workload, seed: int, tokenizer: Tokenizer, output: int | None, context: int
) -> tuple[list[tuple[Prompt, int]], Counter[str]]:
    """As many different prompts as a round needs or the file has, each with the length of its answer, and
    what was skipped, by reason. `output`: the most that is generated, None: as many as the answer has."""
    from overlap_bench.harness.workload import prompt_files

    found = prompt_files.read(str(workload.prompts)).asked
    order = stream(seed, "prompts").permutation(len(found)).tolist()
    count = different(workload, len(found))
    leads = _leads(workload, count, seed, tokenizer)
    chosen: list[tuple[Prompt, int]] = []
    skipped: Counter[str] = Counter()
    in_vain: Counter[str] = Counter()  # since one was chosen: with a longer lead none may fit any more
    for looked, index in enumerate(cycle(order)):
        more = workload.unique_prompts and chosen and in_vain.total() < len(found)
        if len(chosen) == count or (looked >= len(found) and not more):
            break
        prompt, tokens = _as_it_is(workload, leads[len(chosen)], found[index].prompt, tokenizer)
        answer = len(tokenizer.encode(found[index].reply or "").ids)
        reason = prompt_files.why_skipped(tokens, answer, output, context)
        if reason is None:
            chosen.append((prompt, answer))
            in_vain.clear()
            continue
        in_vain[reason] += 1
        if looked < len(found):
            skipped[reason] += 1
    all_needed = workload.prompt_repeats is not None or workload.unique_prompts
    if not chosen or (len(chosen) < count and all_needed):
        why = in_vain if workload.unique_prompts else skipped
        raise BadSetting(
            f"{workload.prompts} has {len(chosen)} of {count} conversations needed: {why['short']} are "
            f"too short, {why['long']} too long for vLLM's limits or the context of {context} tokens"
        )
    return chosen, skipped


def with_enough_requests(workload: Workload, asked: Mapping[str, object]) -> Workload:
    """A closed loop of more places than requests would never have as many in flight as it says: it gets
    PLACES_FILLED times as many, unless their number was `asked` for, too. Raises BadSetting then."""
    places = workload.concurrency
    if "concurrency" not in asked or places is None or workload.num_requests >= places:
        return workload
    if "num_requests" in asked:
        raise BadSetting(
            f"num_requests={workload.num_requests} leaves some of {places} places empty; leave it out, or "
            f"ask for {PLACES_FILLED * places}"
        )
    return msgspec.structs.replace(workload, num_requests=PLACES_FILLED * places)


def checked(workload: Workload) -> Workload:
    """The workload; one of a trace has as many requests as there are in it, since what failed, say, is
    counted in shares of them. Raises BadSetting, one line, where this is no workload."""
    check(workload)
    if workload.trace is None:
        return workload
    from overlap_bench.harness.workload import traces

    entries = traces.read(workload.trace, workload.num_requests).entries
    return msgspec.structs.replace(workload, num_requests=len(entries))


def check(workload: Workload) -> None:
    """Raises BadSetting, one line, where this is no workload."""
    for name in AT_LEAST_1:
        count = getattr(workload, name)
        if count is not None and not 1 <= count <= MOST_REQUESTS:
            bound = "at least 1" if count < 1 else f"at most {MOST_REQUESTS:,}"
            raise BadSetting(f"{name} must be {bound}, not {count}")
    for name in ABOVE_0:
        value = getattr(workload, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise BadSetting(f"{name} must be above 0, not {value:g}")
    for name in ("input_tokens", "max_new_tokens"):
        value = getattr(workload, name)
        if value is not None and lengths.parse(value, name).most >= 1 << 31:
            raise BadSetting(f"{name} must fit into 32 bits, not be {value}")
    _check_timing(workload)
    _check_length(workload)
    _check_sampling(workload)
    if "" in workload.stop:
        raise BadSetting("a stop string is empty: it would end every request at once")
    for name, texts in (("prompt", [workload.prompt or ""]), ("stop", workload.stop)):
        if any(map(SURROGATE.search, texts)):
            raise BadSetting(f"{name} is not UTF-8 text")
    if workload.arrival == "trace":
        _check_trace(workload)
    else:
        _check_prompts(workload)


def _check_sampling(workload: Workload) -> None:
    if not (math.isfinite(workload.temperature) and workload.temperature >= 0):
        raise BadSetting(f"temperature must be 0 (greedy) or above, not {workload.temperature:g}")
    if workload.top_k < 0:
        raise BadSetting(f"top_k must be 0 (all) or above, not {workload.top_k}")
    if workload.top_k >= 1 << 31:
        raise BadSetting(f"top_k must fit into 32 bits, not be {workload.top_k}; 0 samples from all")
    if not 0 < workload.top_p <= 1:
        raise BadSetting(f"top_p must be above 0 and at most 1 (all), not {workload.top_p:g}")
    if workload.temperature == 0 and (workload.top_k, workload.top_p) != (0, 1):
        raise BadSetting("top_k and top_p apply only with a temperature above 0")


def _check_timing(workload: Workload) -> None:
    """An option that the arrival does not look at would silently change nothing, so it is refused."""
    pick(workload.arrival_schedule, {schedule: schedule for schedule in SCHEDULES}, "arrival_schedule")
    arrival = pick(workload.arrival, ARRIVALS, "arrival")
    for name in TIMING_OPTIONS:
        if name not in arrival.options and getattr(workload, name) != getattr(DEFAULT, name):
            raise BadSetting(f"{name} applies only with arrival={using(name)}, not {workload.arrival}")
    for name in arrival.needs:
        if getattr(workload, name) is None:
            raise BadSetting(f"arrival={workload.arrival} needs a {name} (--{name})")
    if workload.ramp_up is not None:
        _, requests = parse_ramp(workload.ramp_up)
        if requests is not None and requests > workload.num_requests:
            raise BadSetting(
                f"ramp_up={workload.ramp_up} is longer than num_requests={workload.num_requests}"
            )


def _check_length(workload: Workload) -> None:
    """Refuses a round whose last request is not due within a day: a slip of the unit, most likely. A ramp
    starts slower than its rate, so it is bounded by that."""
    slowest = workload.rate
    if slowest is not None and workload.ramp_up is not None:
        slowest = min(slowest, parse_ramp(workload.ramp_up)[0])
    timed = "interval_ms" in ARRIVALS[workload.arrival].options
    gap_ms = 1e3 / slowest if slowest is not None else workload.interval_ms if timed else 0.0
    if gap_ms * workload.num_requests > DAY_MS:
        every = f"one every {gap_ms / 1e3:g} s"
        raise BadSetting(f"{workload.num_requests} requests, {every}, are not all due within a day")


def _check_prompts(workload: Workload) -> None:
    if workload.prompts is not None and workload.prompt not in (None, DEFAULT.prompt):
        raise BadSetting("prompt and prompts exclude each other: give one of them")
    if workload.prompt_repeats is not None and workload.prompt_repeats > workload.num_requests:
        raise BadSetting(
            f"prompt_repeats={workload.prompt_repeats} is more than num_requests={workload.num_requests}"
        )
    if workload.max_new_tokens is None and not (
        source.are_conversations(workload.prompts) and workload.input_tokens is None
    ):
        raise BadSetting("max_new_tokens is needed: only a trace, or whole conversations, go without")
    different(workload, len(source.texts(workload.prompt, workload.prompts, stream(0, "prompts"))))


def _check_trace(workload: Workload) -> None:
    from overlap_bench.harness.workload import traces

    assert workload.trace is not None
    for name in NOT_WITH_TRACE:
        if getattr(workload, name) not in (None, False):
            raise BadSetting(f"{name} does not apply to a trace, which says how long each request is")
    if workload.prompt not in (None, DEFAULT.prompt):
        raise BadSetting("prompt does not apply to a trace, whose prompts are random tokens")
    if not workload.pretok:
        raise BadSetting("a trace has no text, only numbers of tokens: it needs pretok")
    entries = traces.read(workload.trace, workload.num_requests).entries
    if entries[-1].at_ms - entries[0].at_ms > DAY_MS and workload.rate is None:
        raise BadSetting(f"the {len(entries)} requests of the trace are not all due within a day")
    if workload.rate is not None and entries[0].at_ms == entries[-1].at_ms:
        raise BadSetting(f"rate does not apply here: all {len(entries)} of the trace come at once")

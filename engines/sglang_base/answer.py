"""An answer as it grows: what SGLang's messages say of it, as events."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from overlap_bench.engines import api
from overlap_bench.engines.requests import Taken, reason_of


@dataclass(slots=True, eq=False)
class Active(Taken):
    """A request that was taken in, with what SGLang is to answer, and what was said of that."""

    answer: Any = ()
    stamped: int = 0  # of its tokens
    text: Text = field(init=False)

    def __post_init__(self) -> None:
        self.text = Text(max(map(len, self.request.stop), default=1) - 1)

    def events(
        self, ids: list[int], total: int, finished: dict[str, Any] | None, tokenizer: Any
    ) -> list[api.Event]:
        """Events of one more message: its `ids` end with what is new, by the number of tokens in all."""
        new = ids[len(ids) - (total - self.count) :]
        # When each of several came is not known, and what comes behind them has none either (api.Chunk).
        stamps = [perf_counter_ns()] if len(new) == 1 and self.stamped == self.count else []
        self.stamped += len(stamps)
        self.count = total
        self.text.add(new, tokenizer)
        text = self.text.say() if finished is None else self.text.end(finished.get("matched"))
        said: list[api.Event] = []
        if new or text:
            said.append(api.Chunk(self.request.id, new, text, stamps))
        if finished is not None:
            said.append(self.finish(reason_of(finished["type"], finished.get("matched"))))
        return said


class Text:
    """An answer's text as it grows. Its last `kept` characters may be the beginning of a stop string, and are
    not said before the end."""

    def __init__(self, kept: int) -> None:
        from tokenizers.decoders import DecodeStream

        self._kept = kept
        self._unsaid = ""
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, ids: list[int], tokenizer: Any) -> None:
        self._unsaid += "".join(self._stream.step(tokenizer, each) or "" for each in ids)

    def say(self) -> str:
        """What can be said before the end."""
        said = self._unsaid[: max(0, len(self._unsaid) - self._kept)]
        self._unsaid = self._unsaid[len(said) :]
        return said

    def end(self, matched: object) -> str:
        """The rest, without the stop string that it ends with, if it does."""
        return self._unsaid.partition(matched)[0] if isinstance(matched, str) else self._unsaid

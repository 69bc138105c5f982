"""An engine as a language model of lm-eval.

A log-likelihood is made of forced tokens: the engine prefills the context, and from there on is fed what it
is to score, one decode step a token, under its toggles. An answer of one letter would never see a decode
step, so the last tokens of the context are forced as well (LEAD), and only the answer's own are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer

from overlap_bench.engines import api
from overlap_bench.harness.analysis.accuracy import Answers, Likelihood
from overlap_bench.harness.run.scoring import Client

LEAD = 8  # tokens of a context that are decoded rather than prefilled
MOST_NEW_TOKENS = 256  # of a generation, where the task does not say


class EngineModel(TemplateLM):  # type: ignore[misc]  # lm-eval carries no types
    """What lm-eval asks. `answers` keeps all that was said, in the order in which it was asked."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        model = client.description.model
        self._client = client
        self._tokenizer = Tokenizer.from_file(str(model["tokenizer"]))
        self._end_of_text = int(model.get("eos", 0))
        self.max_length = int(model["context"])
        self.answers = Answers()

    @property
    def eot_token_id(self) -> int:
        return self._end_of_text

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        """Without special tokens. lm-eval's own model for causal transformers adds those that the tokenizer
        adds by itself, such as Llama's first one: its accuracies may be others, equally so in both arms."""
        ids: list[int] = self._tokenizer.encode(string, add_special_tokens=False).ids
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy) of each (name, context, continuation)."""
        found = self._likelihoods([(context, continuation) for _, context, continuation in requests])
        self.answers.likelihoods += found
        return [(each.logprob, each.greedy) for each in found]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows of the context, each token scored once."""
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scored = iter(self._likelihoods([pair for each in windows for pair in each]))
        found = [_sum(next(scored) for _ in each) for each in windows]
        self.answers.likelihoods += found
        return [each.logprob for each in found]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedily. Raises BadSetting for a task that samples: chance is no accuracy."""
        texts = [each.text for each in self._client.ask([self._generation(*each.args) for each in requests])]
        self.answers.texts += texts
        return texts

    def _likelihoods(self, pairs: Iterable[tuple[list[int], list[int]]]) -> list[Likelihood]:
        pairs = list(pairs)
        answers = self._client.ask([self._forced(*pair) for pair in pairs])
        return [
            Likelihood.of(answer.finish.scores[len(answer.finish.scores) - len(continuation) :])
            for answer, (_, continuation) in zip(answers, pairs, strict=True)
        ]

    def _forced(self, context: list[int], continuation: list[int]) -> api.Request:
        """Raises BadSetting for a continuation that does not fit."""
        if len(continuation) >= self.max_length:
            raise api.BadSetting(
                f"a task asks for the likelihood of {len(continuation)} tokens at once, and "
                f"max_context={self.max_length}: give --set max_context=N"
            )
        ids = [*context, *continuation]
        if len(ids) > self.max_length:
            self.answers.cut += 1
            ids = ids[-self.max_length :]
        prompt = len(ids) - len(continuation)
        prompt -= min(LEAD, prompt - 1)
        if not ids[prompt:]:  # nothing to score, and nothing to wait for
            return api.Request(0, ids[:-1] or ids, 1, forced=ids[-1:])
        return api.Request(0, ids[:prompt], len(ids) - prompt, forced=ids[prompt:])

    def _generation(self, context: str, asked: dict[str, Any]) -> api.Request:
        if asked.get("do_sample") or asked.get("temperature"):
            raise api.BadSetting("a task asks for samples, and an accuracy that is drawn can't be compared")
        until = asked.get("until") or []
        until = [until] if isinstance(until, str) else until
        most = min(int(asked.get("max_gen_toks", MOST_NEW_TOKENS)), self.max_length - 1)
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        room = self.max_length - most
        if len(prompt) > room:
            self.answers.cut += 1
            prompt = prompt[-room:]
        return api.Request(0, prompt, most, stop_on_eos=True, stop=[each for each in until if each])


def _sum(parts: Iterable[Likelihood]) -> Likelihood:
    parts = list(parts)
    return Likelihood(
        sum(part.logprob for part in parts),
        all(part.greedy for part in parts),
        sum(part.tokens for part in parts),
    )

"""The questions of offline-arithmetic, the same wherever they are made."""

from __future__ import annotations

import random
from typing import Any

SEED, QUESTIONS = 6, 200


def questions() -> list[dict[str, object]]:
    """{"question", "choices" (four, different), "answer" (an index)}."""
    draw = random.Random(SEED)
    made: list[dict[str, object]] = []
    for _ in range(QUESTIONS):
        first, second = draw.randrange(10, 100), draw.randrange(10, 100)
        if draw.random() < 0.5 or first < second:
            text, right = f"{first} + {second}", first + second
        else:
            text, right = f"{first} - {second}", first - second
        # What is got by a slip: a carry forgotten, a digit off, the other operation.
        wrong = [right + slip for slip in (-10, 10, -1, 1, 2, 11) if right + slip >= 0]
        choices = [right, *draw.sample(wrong, 3)]
        draw.shuffle(choices)
        answer = choices.index(right)
        made.append({"question": f"{text} =", "choices": [*map(str, choices)], "answer": answer})
    return made


def dataset(**_: Any) -> Any:
    """As lm-eval takes it."""
    from datasets import Dataset

    return {"test": Dataset.from_list(questions())}

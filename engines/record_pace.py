"""What a card and its host take, as a profile for `--pace`."""

from __future__ import annotations

from time import perf_counter_ns


class _Request:
    def __init__(self, name: str, prompt: int) -> None:
        self.name = name
        self.tokens = list(range(prompt))
        self.blocks: list[int] = []
        self.computed = 0
        self.finished = False


def _schedule(steps: int) -> int:
    """What a scheduler does with its requests, in small: attributes, dicts, lists, small objects."""
    free = list(range(2048))
    running = [_Request(f"r{index}", 24 + index % 16) for index in range(32)]
    by_name = {each.name: each for each in running}
    sent = 0
    for step in range(steps):
        scheduled: dict[str, int] = {}
        for request in running:
            new = len(request.tokens) - request.computed
            while len(request.blocks) * 16 < len(request.tokens):
                request.blocks.append(free.pop())
            scheduled[request.name] = new
        outputs = [(name, (hash(count) + step) % 4096) for name, count in scheduled.items()]
        for name, token in outputs:
            request = by_name[name]
            request.computed += scheduled[name]
            request.tokens.append(token)
            if len(request.tokens) > 120:
                request.finished = True
                free.extend(reversed(request.blocks))
                request.blocks = []
            sent += len({"id": name, "token": token, "finished": request.finished})
        running = [each for each in running if not each.finished] or running
    return sent


def probe() -> float:
    """Nanoseconds that a fixed piece of Python takes here, which is like a scheduler's: the least of 200."""
    taken = []
    for _ in range(200):
        begin = perf_counter_ns()
        _schedule(40)
        taken.append(perf_counter_ns() - begin)
    return float(min(taken))

"""The process that a server's prompts are tokenized in: `python -m harness.serve.tokenizing_process TASK`.

A client decides what is in a prompt, and neither a template nor a tokenizer can be stopped half way. A
process can: it is killed, and its memory is free again. By its stdin come questions, by its stdout go
answers: msgpack, each behind its length.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import BinaryIO

import msgspec

from engines.processes import die_with_parent
from harness.serve.parsing import Refused
from harness.serve.prompting import Messages, Prompting

LENGTH = struct.Struct("<I")
LARGE = 1 << 20  # bytes of a prompt; behind one the allocator would keep a hundred times as many for the next


class Task(msgspec.Struct, frozen=True):
    """What the process is started with."""

    model: dict[str, str | int | float]  # Description.model
    parent: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    most_bytes: int | None  # of a text that may fit
    has_template: bool


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    message: str


class Refusal(msgspec.Struct, frozen=True, tag="refused"):
    status: int
    message: str
    code: str | None


Question = str | Messages
Answer = str | list[int] | Ready | Failed | Refusal


def frame(message: Question | Answer) -> bytes:
    content = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(content)) + content


def answer(prompting: Prompting, question: bytes) -> bytes:
    try:
        return frame(prompting.prompt(msgspec.msgpack.decode(question, type=Question)))
    except Refused as refused:
        return frame(Refusal(refused.status, refused.message, refused.code))


def serve(prompting: Prompting, questions: BinaryIO, answers: BinaryIO) -> None:
    """Until there are no more questions."""
    while head := questions.read(LENGTH.size):
        (size,) = LENGTH.unpack(head)
        answers.write(answer(prompting, questions.read(size)))
        answers.flush()
        if size > LARGE:
            ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    die_with_parent(task.parent)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        prompting = Prompting(task.model)
    except Exception as error:  # the process boundary: the libraries raise what they like
        answers.write(frame(Failed(f"{type(error).__name__}: {error}")))
        return
    answers.write(frame(Ready(prompting.most_bytes, prompting.has_template)))
    answers.flush()
    serve(prompting, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()

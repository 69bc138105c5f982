"""The vllm engine where there is no vLLM: what it declares, how light that is, and what it says then.

What needs vLLM is an experiment: experiments/validation/engines.py.
"""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from overlap_bench.engines import api
from overlap_bench.engines.vllm import SPEC
from overlap_bench.engines.vllm.engine import build
from tests.support.refusals import refusal

needs_none = pytest.mark.skipif(find_spec("vllm") is not None, reason="says what happens without vLLM")
HEAVY = "{'torch', 'transformers', 'tokenizers', 'numpy', 'vllm', 'harness', 'pandas', 'zmq'}"


def test_its_switches_are_toggles_whose_first_choices_stand_together() -> None:
    assert SPEC.check({}) == {
        "async_scheduling": "off",
        "enforce_eager": "on",
        "chunked_prefill": "off",
        "multiprocessing": "on",
    }
    assert len(SPEC.every_setting()) == 16


@pytest.mark.parametrize(
    ("module", "has"),
    [
        *((f"overlap_bench.engines.{name}", set()) for name in ("vllm", "transformers", "overlap")),
        ("engines.host", {"zmq"}),  # it starts under vLLM's interpreter, which has msgspec and pyzmq
    ],
)
def test_a_declaration_and_the_host_import_nothing_heavy(module: str, has: set[str]) -> None:
    code = f"import sys, {module}; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(sorted(has))


@needs_none
def test_without_vllm_one_line_says_what_to_install() -> None:
    message = refusal(lambda: build(api.EngineOptions(), SPEC.check({})))
    assert message.startswith(f"{sys.executable} has no vLLM: pip install vllm llguidance ")
    assert "--set python=PATH" in message
    assert "\n" not in message

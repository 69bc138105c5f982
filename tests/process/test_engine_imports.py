"""What an engine of somebody else's needs to be one."""

import subprocess
import sys


def test_the_contract_needs_nothing_but_msgspec() -> None:
    code = (
        "import sys; before = set(sys.modules); from overlap_bench import Engine, Toggle, profiles\n"
        "new = set(sys.modules) - before; assert 'overlap_bench.harness' not in new\n"
        "print(*sorted({name.partition('.')[0] for name in new} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    besides = {"typing_extensions"}  # msgspec takes it where it is there
    assert set(done.stdout.split()) <= {"overlap_bench", "msgspec"} | besides

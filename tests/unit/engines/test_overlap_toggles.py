"""Our engine's toggles: what each choice is stands in the toggle's own file."""

import pytest

from overlap_bench.engines.overlap import TOGGLES

# Of choices: to functions, classes or facts of them.
TABLES = (
    "CHOICES",
    "COMPOSE",
    "DRAFTS",
    "KEPT",
    "LOOPS",
    "MIXES",
    "POLICIES",
    "PREPARE",
    "RECEIVERS",
    "SERVING",
)


@pytest.mark.parametrize("name", TOGGLES)
def test_each_choice_of_a_toggle_is_in_all_of_its_tables(name: str) -> None:
    module = TOGGLES[name]
    found = {table: set(getattr(module, table)) for table in TABLES if hasattr(module, table)}
    assert all(keys == set(module.TOGGLE.choices) for keys in found.values()), found
    assert module.TOGGLE.module == module.__name__
    assert found or name in {"output", "steps"}  # made by a function; a number

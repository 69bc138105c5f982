"""What `bench doctor` finds of a machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from overlap_bench.harness.analysis import noise_floor
from overlap_bench.harness.common import machine
from overlap_bench.harness.common.formatting import between, duration
from overlap_bench.harness.run.hosts import bytecode_in
from overlap_bench.harness.stats import planning
from overlap_bench.harness.studies import doctor
from tests.support.in_process import bench
from tests.support.made_blocks import manifest, result


def test_every_check_finds_something_and_says_what_to_do_where_it_is_not_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = doctor.examine(tmp_path)
    assert len({each.what for each in found}) == len(found)
    assert all(each.found for each in found)
    assert all(each.fine == (not each.remedy) for each in found)
    monkeypatch.setattr(doctor, "examine", lambda results: found)
    monkeypatch.setenv("COLUMNS", "120")
    report = bench("doctor").out
    assert all(each.what in report for each in found)
    for what in ("device", "versions", "nsys", "cores", "governor", "turbo", "load average", "steal",
                 "other processes", "huge pages", "swap", "memory", "scheduler slice"):  # fmt: skip
        assert what in report


def test_how_long_a_change_of_1_percent_takes_to_be_seen_is_told_by_the_newest_floor_of_this_machine(
    tmp_path: Path,
) -> None:
    assert "bench aa" in doctor.decides(tmp_path).found
    equal = replace(manifest(against_itself=True), machine=machine.fingerprint())
    floor = noise_floor.floor_of(equal, result(1.0, equal, noise=0.005).comparisons[0], seconds=20.0)
    elsewhere = replace(floor.of, machine=manifest().machine, rounds=7)
    noise_floor.keep(tmp_path, replace(floor, of=elsewhere, created="2027-01-01T00:00:00+00:00", seconds=1e6))
    assert "bench aa" in doctor.decides(tmp_path).found
    noise_floor.keep(tmp_path, floor)
    spread = floor.metrics["tpot_ms_p50"]
    low, high = planning.blocks_needed(spread.sd, 6, 0.01)
    told = doctor.decides(tmp_path).found
    assert told.startswith(f"in {between(duration(20 * low), duration(20 * high))} (tpot_ms_p50 of e,")
    noise_floor.keep(tmp_path, replace(floor, seconds=20_000.0))
    assert doctor.decides(tmp_path).found.startswith("not feasible: ")


def test_all_cores_are_kept_busy_while_it_is_looked_at_what_is_stolen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "BUSY_S", 0.3)
    spent = [sum(psutil.cpu_times()[:3])]
    busy = doctor.keep_busy()
    spent.append(sum(psutil.cpu_times()[:3]))
    assert 0 <= busy.stolen < 1
    assert all(each > 0 for each in busy.loops_us)
    assert spent[1] - spent[0] > 0.05


@pytest.mark.parametrize(
    ("check", "fine", "spoils", "told"),
    [
        (doctor.steal, doctor.Busy(0.005, []), doctor.Busy(0.2, []), "20.0% of the time of busy cores"),
        (
            doctor.speed,
            doctor.Busy(0, [150.0] * 95 + [900.0] * 5),  # interrupted, now and then
            doctor.Busy(0, [150.0] * 80 + [225.0] * 20),
            "the same loop takes 150 to 225 us",
        ),
    ],
)
def test_stolen_time_and_cores_that_are_half_as_fast_again_at_times_are_told_of(
    check: Callable[[doctor.Busy], doctor.Finding], fine: doctor.Busy, spoils: doctor.Busy, told: str
) -> None:
    assert check(fine).fine
    found = check(spoils)
    assert not found.fine
    assert found.found == told


def test_a_core_that_is_late_to_return_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SLEEPS", 50)
    monkeypatch.setattr(doctor.time, "sleep", lambda _, sleep=time.sleep: sleep(0.002))
    assert not doctor.wake_ups().fine


@pytest.mark.parametrize("told_not_to", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_bytecode_that_nobody_keeps_is_told_of_and_kept_by_the_run(
    told_not_to: bool, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    if compiled:
        monkeypatch.setattr(sys, "pycache_prefix", None)
        cached = package.parent / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
        cached.parent.mkdir()
        cached.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # which is what find_spec looks at first
    monkeypatch.setattr(sys, "dont_write_bytecode", told_not_to)
    kept = compiled or not told_not_to
    assert doctor.bytecode().fine == kept
    assert (bytecode_in(tmp_path) == {}) == kept


def test_what_a_run_keeps_its_bytecode_in_is_filled_and_read(tmp_path: Path) -> None:
    told = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    importing = [sys.executable, "-c", "import engines.pace; print(engines.pace.__cached__)"]
    kept = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    for environment, written in ((told, False), ({**told, **kept}, True)):
        said = subprocess.run(importing, env=environment, capture_output=True, text=True, check=True)
        assert said.stdout.startswith(str(tmp_path)) == written
        assert any(tmp_path.rglob("pace.*.pyc")) == written

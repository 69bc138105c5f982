"""What `bench serve` was asked for, checked, and carried out. `asked` holds only what was given, by the names
of the options."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from engines import api
from harness.plan.design import Arm
from harness.plan.settings import make_arm, parse_changes
from harness.plan.variants import load_variants
from harness.serve import needs_extra

VARIANT = "all"
TTFT_MS, ITL_MS = 50.0, 10.0
MOST_REQUESTS = 1024
GRACE_S = 30.0


def serve_engine(asked: Mapping[str, Any], of_mock: Mapping[str, Any], host: str, port: int) -> None:
    """Serve an engine until told to stop. Raises BadSetting and RunFailed."""
    for name in of_mock:
        raise api.BadSetting(f"{_flag(name)} applies only with --mock")
    arm = make_served(asked)
    most, grace_s = asked.get("max_requests", MOST_REQUESTS), asked.get("grace_s", GRACE_S)
    if most < 1:
        raise api.BadSetting(f"--max-requests must be at least 1, not {most}")
    if not math.isfinite(grace_s):
        raise api.BadSetting(f"--grace-s must be a number of seconds, not {grace_s:g}")
    if grace_s < 0:
        raise api.BadSetting(f"--grace-s must be at least 0, not {grace_s:g}")
    with needs_extra():
        from harness.serve.app import Rules
        from harness.serve.server import serve

    key = asked.get("api_key")
    if key is None and not _loopback(host):
        sys.stderr.write(f"bench: whoever reaches {host} may use this server; --api-key sets a key\n")
    temperature = 1.0 if arm.options.sampling else 0.0
    serve(arm, host, port, Rules(key, most, temperature), grace_s)


def serve_mock(asked: Mapping[str, Any], of_engine: Mapping[str, Any], host: str, port: int) -> None:
    """Serve known timing until told to stop. Raises BadSetting."""
    for name in of_engine.keys() - {"api_key"}:  # a key may come from the environment
        raise api.BadSetting(f"{_flag(name)} does not apply with --mock: there is no engine")
    with needs_extra():
        from harness.serve import mock

    timing = mock.make_timing(
        asked.get("ttft_ms", TTFT_MS), asked.get("itl_ms", ITL_MS), asked.get("max_tokens_per_chunk", 1)
    )
    mock.run(timing, host, port)


def make_served(asked: Mapping[str, Any]) -> Arm:
    """The engine and its settings: of a variant the after arm, of an engine its first choices; then what was
    asked for besides. Raises BadSetting."""
    if "variant" in asked and "engine" in asked:
        raise api.BadSetting("--variant brings its engine: give --variant or --engine, not both")
    options: dict[str, Any] = {}
    toggles: Mapping[str, str] = {}
    engine = asked.get("engine", "")
    if not engine:
        variant = api.pick(asked.get("variant", VARIANT), load_variants(), "variant")
        engine, toggles = variant.engine, variant.after
        options |= variant.options | variant.after_options
    engines = api.find_engines()
    # As servers do, unlike `bench run`: each token goes out at once, and requests may ask for a temperature.
    served = {"stream_interval": 1, "sampling": api.pick(engine, engines, "engine").samples}
    options = served | options | {name: asked[name] for name in ("model", "device") if name in asked}
    changes = parse_changes(asked.get("both", ()), "--set")
    return make_arm(engines, "the server", engine, options, toggles, changes)


def _flag(name: str) -> str:
    return "--set" if name == "both" else f"--{name.replace('_', '-')}"


def _loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")

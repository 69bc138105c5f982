"""Whether a stored run may say what is started: where it was asked for here, or where a person allows it.

A results folder is data that people pass on. But its manifest names interpreters, commands, addresses,
files, variables and git repositories, which `bench rerun` and `--resume` start, ask, read, set and check
out. So what a command line of this machine asked for is signed: by an HMAC over the designs, with a secret
that lies outside of every results folder (overlap-bench/secret in $XDG_STATE_HOME, or in ~/.local/state)
and that its owner alone can read. All else in a manifest, its machine's fingerprint included, can be
copied or made up, and proves nothing. What is not signed is listed, and needs --trust.

This protects from whoever made or edited a folder. The signature of a run that names something of its own
holds in the folder where bench ran: elsewhere, its `cmd="python server.py"` would start somebody else's
server.py. With --trust, what is started runs as you, but gets no key out of the environment, unless you
name its address again. What it measures is not signed either: going on with that needs --trust again.

This does not protect from whoever can read the secret: root, and whoever has an image of this disk, or of
a container in which bench has run. Nor from a change of what a signed run names: the files of a model, the
server at an address. Nor from what you allow: an interpreter may do all that you may do.

Where no secret can be kept (a container's user without a home), nothing is signed: runs go as ever, and
each rerun or --resume needs --trust.
"""

from __future__ import annotations

import errno
import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.common import names
from overlap_bench.harness.plan.design import Arm, Design

SECRET_BYTES = 32
SERVERS = {"cmd": "start the command", "url": "contact"}  # the settings of an engine that is a client
KEYS = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")  # names of variables of the environment
KEY, ADDRESS = "OPENAI_API_KEY", "OPENAI_BASE_URL"  # the one goes with the other, as everywhere
NO_TOKEN = "HF_HUB_DISABLE_IMPLICIT_TOKEN"  # else Hugging Face's library sends one that it finds in a file

Admit = Callable[[Path, Sequence[Design], str], bool]  # `admit`, the person's answer filled in


def signature(designs: Sequence[Design]) -> str:
    """The signature that these were asked for here; "" where no secret can be kept."""
    try:
        return _signed(designs)
    except OSError:
        return ""


def holds(designs: Sequence[Design], signed: str) -> bool:
    """Whether these were asked for here, as far as a signature says."""
    return not _doubt(designs, signed)


def admit(
    what: Path, designs: Sequence[Design], signed: str, *, trusted: bool, say: Callable[[str], object]
) -> bool:
    """Whether these designs, which a file says, were asked for here. If not, `say` what they would do; raise
    BadSetting unless the person has `trusted` them, and keep the environment's keys from them."""
    doubt = _doubt(designs, signed)
    if not doubt:
        return True
    say(f"{what} {doubt}. It would:")
    arms = [arm for design in designs for arm in design.arms]
    for line in [*dict.fromkeys(f"run the engine {arm.engine!r}" for arm in arms), *named(designs)]:
        say(f"  {line}")
    if not trusted:
        raise api.BadSetting(f"{what} {doubt}: if it may do all this, give --trust")
    if withheld := _withhold_keys(arms):
        only = f" (that goes to the address in {ADDRESS} alone)" if KEY in withheld else ""
        say(f"it gets no {' and no '.join(withheld)}{only}")
    return False


def named(designs: Sequence[Design]) -> list[str]:
    """What these would start, contact, read or set besides installed engines and built-in models, one line
    each. All text is quoted, so that none can move the cursor, or pass for another line."""
    engines = api.find_engines()
    lines = [
        line for design in designs for arm in design.arms for line in _of_arm(arm, engines.get(arm.engine))
    ]
    files = (path for design in designs for path in design.workload.files)
    lines += [f"read {path!r}, and send the engine what it says" for path in files]
    return list(dict.fromkeys(lines))


def _of_arm(arm: Arm, spec: api.EngineSpec | None) -> Iterator[str]:
    if arm.python is not None:
        yield f"start the interpreter {arm.python!r}"
    for name, value in arm.env.items():
        yield f"set the environment's {f'{name}={value}'!r}"
    if arm.ref is not None:
        yield (
            f"check out commit {arm.ref.commit!r} of the git repository {arm.ref.repository!r}, with the "
            "filters that are configured there, and run its code"
        )
    if arm.patch is not None:
        yield f"run a copy of {arm.engine!r} with other code in {', '.join(map(repr, arm.patch.files))}"
    for name, value in arm.toggles.items():
        if name in SERVERS:
            yield f"{SERVERS[name]} {value!r}"
        elif not _is_choice(spec, name, value):
            yield f"set the engine's setting {f'{name}={value}'!r}"
    model = arm.options.model
    if "/" in model or model.startswith("~") or (model and Path(model).is_dir()):
        yield f"ask for the model {model!r}: a folder here, or one of Hugging Face's hub"


def _is_choice(spec: api.EngineSpec | None, name: str, value: str) -> bool:
    """Whether the engine declares this itself: one of a few things that its author thought of."""
    if spec is None:
        return False
    choices: Mapping[str, tuple[str, ...]] = {
        **{toggle.name: toggle.choices for toggle in spec.toggles},
        **{setting.name: (setting.default,) for setting in spec.settings},
    }
    return value in choices.get(name, ())


# ---------------------------------------------------------------------------------------------------------
# Keys


def _withhold_keys(arms: Sequence[Arm]) -> list[str]:
    """Take every key out of the environment that this process's children get; the names of those there were.
    One stays: that of the address that the person gave with it, where that is all there is to contact."""
    address = os.environ.get(ADDRESS, "")
    alone = bool(address) and all(_is_only(arm, address) for arm in arms)
    names = [name for name in os.environ if KEYS.search(name) and not (name == KEY and alone)]
    for name in names:
        del os.environ[name]
    os.environ[NO_TOKEN] = "1"
    return sorted(names)


def _is_only(arm: Arm, address: str) -> bool:
    """Whether an arm is the server at that address, and starts nothing that could pass a key on."""
    own = arm.python is not None or arm.env or arm.ref is not None or arm.patch is not None
    return not own and _base(arm.toggles.get("url", "")) == _base(address)


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


# ---------------------------------------------------------------------------------------------------------
# The secret


def _doubt(designs: Sequence[Design], signed: str) -> str:
    """Why these may not have been asked for here; "" where they were."""
    try:
        expected = _signed(designs)
    except OSError as error:
        return f"can't be verified ({error.filename or 'no secret'}: {error.strerror})"
    if not signed:
        return "is not signed by this machine"
    if not hmac.compare_digest(expected.encode(), signed.encode()):
        return "was signed by another machine, or in another folder, or edited"
    return ""


def _signed(designs: Sequence[Design]) -> str:
    """Raises OSError where no secret can be had. Relative paths start from the current folder, which means
    nothing to a run that names nothing of its own."""
    what = {"folder": os.getcwd() if named(designs) else "", "designs": designs}
    signed = names.as_before(msgspec.json.encode(what, order="sorted").decode()).encode()
    return hmac.digest(_secret(), signed, "sha256").hex()


def _secret() -> bytes:
    """This machine's secret, made where there is none yet. Whoever comes second at that gets the first one's:
    a link is there with its whole file, or not at all."""
    path = _file()
    with suppress(FileNotFoundError):
        return _read(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent)  # its owner's alone, whatever the umask
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        os.unlink(partial)
    return _read(path)


def _read(path: Path) -> bytes:
    """Raises OSError, also for a file that somebody else could have written or read: where the home is /tmp,
    anybody can be there first."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EACCES, "it is not your own file, of mode 600", str(path))
        secret = file.read()
    if len(secret) != SECRET_BYTES:
        raise OSError(errno.EINVAL, "it is damaged: remove it", str(path))
    return secret


def _file() -> Path:
    """By the XDG specification, which has a relative path ignored."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state, "overlap-bench", "secret")
    try:
        return Path.home() / ".local" / "state" / "overlap-bench" / "secret"
    except RuntimeError:
        raise OSError(errno.ENOENT, "this user has no home; set XDG_STATE_HOME", "~") from None

"""Read te-bench.toml: the commands that a gate times in any repository, and the setup of both revisions."""

import difflib
import math
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from te_bench import plugins

JSON, ROOT = "{json}", "{root}"  # in a command: the file that it writes; the root of the revision's files
STATISTICS = ("min", "median")
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""")
# [ is left out: it is more often part of a pytest test's name than of a pattern, and needs no shell there.
_OF_A_SHELL = re.compile(r"\A\s*[A-Za-z_]\w*=|&&|\|\|?|>>?|[;<&`*?]|(?<!\S)[~#]|\$(?=[\w{(])")
_PLACE = re.compile(r"\{(\w+)\}")
_KEYS = ("bench", "setup", "directory", "env", "warmup", "margin", "budget", "timeout")
_KEYS_OF_BENCH = ("command", "statistic")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command to time: the whole process or, if its words contain JSON, the benchmark times that it writes."""

    name: str
    words: tuple[str, ...]
    statistic: str = "min"  # over the times that one run writes of one benchmark

    @property
    def writes(self) -> bool:
        return any(JSON in word for word in self.words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """The content of a te-bench.toml. margin and budget are text as on the command line; None: not given."""

    file: str
    commands: tuple[Command, ...]
    setup: tuple[tuple[str, ...], ...] = ()
    directory: str = "."
    env: Mapping[str, str] = field(default_factory=dict)
    warmup: int = 1  # untimed first runs of each command by each revision
    margin: str | None = None
    budget: str | None = None
    timeout: float | None = None  # seconds of one run, also of a setup command


def read(path: Path) -> Commands:
    """Return the commands in a file. Raise ValueError, with the file and the key, for a wrong entry."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; --config takes the path of a te-bench.toml") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are
        raise ValueError(f"{path} is not TOML: {error}") from error
    _check_keys(str(path), "", found, _KEYS)
    benches = found.get("bench")
    if not isinstance(benches, dict) or not benches:
        raise ValueError(f'{path}: bench: give a table for each command to time: [bench.NAME], command = "..."')
    take = _Taker(str(path), found)
    return Commands(
        file=path.name,
        commands=tuple(_command(str(path), name, table) for name, table in benches.items()),
        setup=tuple(
            take.words(f"setup[{n}]", one) for n, one in enumerate(take("setup", list, "a list of commands", []))
        ),
        directory=take.directory(),
        env=take.env(),
        warmup=take("warmup", int, "a whole number from 1: the first run shows whether a command works", 1, least=1),
        margin=take("margin", str, 'a share as a string, such as "5%"', None),
        budget=take("budget", str, 'a time as a string, such as "10min"', None),
        timeout=take("timeout", float, "seconds, more than 0", None, least=1e-3),
    )


def _check_keys(file: str, prefix: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key in known:
            continue
        hint = plugins.suggestion(key, known)
        if prefix and key in _KEYS:
            hint = f" {key} goes above the first [bench.NAME]: in TOML a table lasts to the next one."
        raise ValueError(f"{file}: {prefix}{key} is no key.{hint} Known: {', '.join(prefix + one for one in known)}.")


def _command(file: str, name: str, table: Any) -> Command:
    key = f"bench.{name}"
    if not isinstance(table, dict) and name in _KEYS_OF_BENCH:
        raise ValueError(f"{file}: [bench] needs a name: [bench.start]")
    if not isinstance(table, dict):
        raise ValueError(f'{file}: {key}: give a table: [{key}], command = "..."')
    _check_keys(file, f"{key}.", table, _KEYS_OF_BENCH)
    take = _Taker(file, table, f"{key}.")
    if "command" not in table:
        raise ValueError(f"{file}: {key}.command is missing: the command to time")
    statistic = take("statistic", str, f"one of {', '.join(STATISTICS)}", "min", among=STATISTICS)
    command = Command(name=name, words=take.words("command", table["command"]), statistic=statistic)
    if "statistic" in table and not command.writes:
        raise ValueError(
            f"{file}: {key}.statistic: only figures that a command writes to {JSON} have one; leave it out"
        )
    return command


@dataclass(frozen=True, slots=True)
class _Taker:
    file: str
    table: Mapping[str, Any]
    prefix: str = ""

    def __call__(
        self, key: str, kind: type, legal: str, default: Any, *, least: float = -math.inf, among: Sequence[str] = ()
    ) -> Any:
        if key not in self.table:
            return default
        value = self.table[key]
        sound = isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
        sound = sound and (not among or value in among) and (kind not in (int, float) or least <= value < math.inf)
        if not sound:
            raise self._refused(key, value, legal)
        return value

    def words(self, key: str, value: Any) -> tuple[str, ...]:
        """Return a command's words, split as a POSIX shell does. Refuse other shell syntax."""
        try:
            words = tuple(shlex.split(value)) if isinstance(value, str) else ()
        except ValueError as error:  # an open quotation
            raise self._refused(key, value, f"a command as a string ({error})") from None
        if not words:
            raise self._refused(key, value, "a command as a string")
        bare = _QUOTED.sub("''", value)
        if found := _OF_A_SHELL.search(bare):
            taken = found[0].strip()
            other = f'by env = {{ {taken[:-1]} = "..." }}' if taken.endswith("=") else f"with {taken} in quotes,"
            raise self._refused(
                key, value, f"the command without {taken}, {other} or as sh -c '...', because no shell runs it"
            )
        self.check_places(key, value, bare)
        return words

    def check_places(self, key: str, value: str, bare: str = "") -> None:
        """Refuse unknown {names}: any in `bare` (the text outside quotes), and near-misspellings anywhere."""
        known = [place.strip("{}") for place in (JSON, ROOT)]
        for name in _PLACE.findall(value):
            if name not in known and (f"{{{name}}}" in bare or difflib.get_close_matches(name.lower(), known)):
                raise self._refused(key, value, f"{JSON} or {ROOT} in place of {{{name}}}, which stands for nothing")

    def directory(self) -> str:
        found: str = self("directory", str, "a folder of the repository, relative to its root", ".")
        if PurePath(found).is_absolute() or ".." in PurePath(found).parts:
            raise self._refused("directory", found, "a folder of the repository, relative to its root")
        return found

    def env(self) -> dict[str, str]:
        found: dict[str, str] = self("env", dict, 'a table of strings, such as { OMP_NUM_THREADS = "1" }', {})
        for name, value in found.items():
            if not name or "=" in name or "\0" in name:
                raise self._refused("env", name, "the variable a name that is not empty and holds no = and no NUL")
            if not isinstance(value, str) or "\0" in value:
                raise self._refused(f"env.{name}", value, "a string without NUL")
            self.check_places(f"env.{name}", value)
        return found

    def _refused(self, key: str, value: Any, legal: str) -> ValueError:
        return ValueError(f"{self.file}: {self.prefix}{key}: {value!r}; give {legal}")

"""The rule language: what is said (`Rule`) about what an agent wants (`Call`), and who wins (`Policy`).

Pure: nothing is asked, read from disk or remembered here; that is `Permissions`' (`_permissions`).
How a call is read from what an agent says is left to `_call`.
A decision is a function of the rules and the call alone, so it can be tried out (`antiphon policy test`).

What a call says of itself is an agent's word. Two principles keep a lie from widening anything:

* A rule that allows has to fit everything that the call says and shows: all its paths, every kind that
  its content makes it. A rule that denies or asks has to fit any of it.
* What is unclear is never allowed: where a rule that denies or asks could not be excluded because the
  call does not say what the rule is about, and where the call cannot be taken at its word (`Call.doubt`),
  an allowance becomes a question.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

import msgspec

from antiphon.services._call import KINDS, SHELLS, Call, below, normalised
from antiphon.services._globs import GlobError, PathGlob, names_of, outside_sets, text_glob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


__all__ = ["Policy", "PolicyError", "Rule", "Verdict", "Word", "check_deadline"]

Word: TypeAlias = Literal["allow", "deny", "ask"]

WORDS: Final = ("allow", "deny", "ask")
#: Rules of one policy: each is tried for each call.
MAX_RULES: Final = 1000

#: Where two spellings can be one file, a rule that must not be slipped past takes them for one.
_CASE_IS_NOTHING: Final = sys.platform in {"darwin", "win32"}

#: What a kind is sometimes called: by this library's services, or by agents.
_CALLED: Final = {"write": "edit", "run": "execute", "command": "execute", "bash": "execute"}

_FILE_KINDS: Final = frozenset({"read", "edit", "delete", "move", "search", "other"})
_COMMAND_KINDS: Final = frozenset({"execute", "other"})
# Programs that run what their arguments say: what a line of theirs does, its first word does not tell.
_RUNNERS: Final = SHELLS.union(
    ("env", "sudo", "doas", "su", "nice", "ionice", "nohup", "timeout", "time", "setsid", "stdbuf"),
    ("xargs", "parallel", "find", "command", "exec", "eval", "busybox", "script", "unshare"),
    ("chroot", "watch", "strace"),
)
# A kind that is written out; the protocol leaves words with "_" before them to extensions.
_PLAIN_KIND: Final = re.compile(r"[A-Za-z]\w*")
_BLANK: Final = re.compile(r"\s")


class PolicyError(ValueError):
    """A policy that cannot be used as it is written.

    Attributes:
        file: where it stands, None if it is not from a file.
        rule: which rule: its number, from 1, and its name if it has one; "" for the policy itself.
        key: which key of it; "" if it is about none.
    """

    def __init__(
        self, problem: str, *, file: str | None = None, rule: str = "", key: str = ""
    ) -> None:
        where = ", ".join(part for part in (file, rule, key) if part)
        super().__init__(f"{where}: {problem}" if where else problem)
        self.problem = problem
        self.file = file
        self.rule = rule
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.problem, self.file, self.rule, self.key)


def _again(problem: str, file: str | None, rule: str, key: str) -> PolicyError:
    return PolicyError(problem, file=file, rule=rule, key=key)


class Rule(msgspec.Struct, frozen=True):
    """One rule. Every key that is given has to match; several globs in a key are alternatives.

    Args:
        decision: "allow", "deny" or "ask".
        name: what it is called where it decides.
        kind: globs of the call's kind.
        title: globs of its title.
        path: path globs. One that allows needs a path and all of them to match, others one of them.
        command: globs of the program. Without a slash they match a bare name only (for rules that
            deny or ask, the last component of a path too); with one, the program's whole path.
        args: globs of the arguments, one each; a last "**" takes any number. [] means none.
        cwd: path globs of the directory that a command runs in.
        session: globs of the session's id.
        env: globs of names of environment variables that the agent adds: one that allows needs all
            of them to match, others one. A rule that allows a `command` and has no `env` does not
            match if there are any.
        deadline: of a rule that asks: seconds for the answer, instead of the policy's.

    Raises:
        PolicyError: a value that means nothing.
    """

    decision: Word
    name: str = ""
    kind: str | Sequence[str] = ()
    title: str | Sequence[str] = ()
    path: str | Sequence[str] = ()
    command: str | Sequence[str] = ()
    args: Sequence[str] | None = None
    cwd: str | Sequence[str] = ()
    session: str | Sequence[str] = ()
    env: str | Sequence[str] = ()
    deadline: float | None = None

    def __post_init__(self) -> None:
        _Matcher(self)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules say about a call.

    Attributes:
        decision: "allow", "deny" or "ask".
        rule: the rule that decided, None if it was `default` or `reads`.
        number: its place, from 1.
        why: in words.
        deadline: seconds for the answer that the rule gives, None if it gives none.
    """

    decision: Word
    rule: Rule | None = None
    number: int | None = None
    why: str = ""
    deadline: float | None = None


class Policy:
    """Rules in their order, and what is decided where none matches.

    Args:
        rules: the first that matches decides.
        default: what no rule matches.
        reads: what no rule matches and is nothing but a read.

    Raises:
        PolicyError: another word, no rule, or more than 1000 of them.
    """

    def __init__(
        self, rules: Iterable[Rule] = (), *, default: Word = "ask", reads: Word = "allow"
    ) -> None:
        for key, word in (("default", default), ("reads", reads)):
            if word not in WORDS:
                raise PolicyError(f"{_one_of(WORDS)}, not {word!r}", key=key)
        self.rules = tuple(rules)
        if len(self.rules) > MAX_RULES:
            raise PolicyError(f"{len(self.rules)} rules; at most {MAX_RULES} are tried in order")
        for number, rule in enumerate(self.rules, 1):
            if not isinstance(cast("object", rule), Rule):
                raise PolicyError(f"a Rule, not {_shown(rule)}", rule=f"rule {number}")
        self.default: Word = default
        self.reads: Word = reads
        self._matchers = [_Matcher(rule) for rule in self.rules]

    @property
    def concerns_reads(self) -> bool:
        """Whether anything but an allowance could come of a read."""
        return self.reads != "allow" or any(matcher.concerns_reads for matcher in self._matchers)

    def judge(self, call: Call) -> Verdict:
        """What the rules say; asks nobody."""
        unclear: tuple[int, Rule] | None = None
        facts = _Facts(call)
        for number, matcher in enumerate(self._matchers, 1):
            matched = matcher.match(facts)
            if matched is None and unclear is None:
                unclear = number, matcher.rule
            if matched:
                rule = matcher.rule
                return self._clear(
                    Verdict(
                        decision=rule.decision,
                        rule=rule,
                        number=number,
                        why=f"{_named(number, rule)} matches",
                        deadline=rule.deadline,
                    ),
                    call,
                    unclear,
                )
        key = "reads" if call.kinds == ("read",) else "default"
        word = self.reads if key == "reads" else self.default
        return self._clear(
            Verdict(decision=word, why=f"no rule matches: {key} = {word!r}"), call, unclear
        )

    def _clear(self, verdict: Verdict, call: Call, unclear: tuple[int, Rule] | None) -> Verdict:
        if verdict.decision != "allow" or not self.rules:
            return verdict
        if call.doubt:
            return Verdict(
                decision="ask",
                rule=verdict.rule,
                number=verdict.number,
                why=f"{verdict.why}, but {call.doubt}",
            )
        if unclear is not None:
            number, rule = unclear
            return Verdict(
                decision="ask",
                rule=rule,
                number=number,
                why=f"{_named(number, rule)} ({rule.decision}) cannot be excluded: "
                "the call does not say enough",
                deadline=rule.deadline,
            )
        return verdict


def _named(number: int, rule: Rule) -> str:
    return f"rule {number} ({rule.name!r})" if rule.name else f"rule {number}"


def _one_of(words: Iterable[str]) -> str:
    return "one of " + ", ".join(repr(word) for word in words)


# ---------------------------------------------------------------------- matching


class _Facts:
    """A call as matchers want it: worked out once, not for each rule."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.kinds = call.kinds
        self.paths = [_Location(path, call) for path in call.paths]
        self.cwd = None if call.cwd is None else _Location(call.cwd, call)
        self.program: _Location | None = None
        #: Whether nobody can say which file the program is: `link/../x` is not what its text says.
        self.elsewhere = False
        self.runs_others = False
        if call.command:
            program = call.command[0]
            if "/" in program:
                at = call.cwd or (call.roots[0] if call.roots else "/")
                self.program = _Location(posixpath.join(at, program), call)
                self.elsewhere = ".." in program.split("/")
            self.runs_others = posixpath.basename(program) in _RUNNERS


class _Location:
    """A path by all its names: absolute, through the spelling of a root, and below each root."""

    __slots__ = ("names", "relative")

    def __init__(self, path: str, call: Call) -> None:
        path = normalised(path)
        spellings = {path: names_of(path)}
        for one, other in call.aliases:
            for here, there in ((one, other), (other, one)):
                if (rest := below(path, here)) is not None:
                    moved = normalised(f"{there}/{rest}")
                    spellings[moved] = names_of(moved)
        self.names = list(spellings.values())
        self.relative: list[list[str]] = []
        for root in map(names_of, map(normalised, call.roots)):
            self.relative += [
                names[len(root) :] for names in self.names if names[: len(root)] == root
            ]


class _Matcher:
    """A rule, compiled.

    `match` gives True, False, or None: a rule that denies or asks could match, but the call does not
    say what the rule is about.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        if rule.decision not in WORDS:
            raise PolicyError(f"{_one_of(WORDS)}, not {rule.decision!r}", key="decision")
        if not isinstance(cast("object", rule.name), str):
            raise PolicyError(f"a text, not {_shown(rule.name)}", key="name")
        self._allows = rule.decision == "allow"
        self._kind = _texts("kind", rule.kind)
        for kind in _strings("kind", rule.kind):
            if kind not in KINDS and _PLAIN_KIND.fullmatch(kind):
                meant = _CALLED.get(kind.lower(), kind.lower())
                hint = f"{meant!r} is meant?" if meant in KINDS else f"there are {', '.join(KINDS)}"
                raise PolicyError(
                    f"no such kind: {kind!r}; {hint}"
                    f" ('[{kind[0]}]{kind[1:]}' for an agent's own word)",
                    key="kind",
                )
        self._title = _texts("title", rule.title)
        self._session = _texts("session", rule.session)
        self._env = _texts("env", rule.env)
        folding = _CASE_IS_NOTHING and not self._allows
        home = os.path.expanduser("~")
        self._path = _paths("path", rule.path, home, folding=folding)
        self._cwd = _paths("cwd", rule.cwd, home, folding=folding)
        commands = _strings("command", rule.command)
        self._command = bool(commands)
        named = [glob for glob in commands if "/" not in glob]
        placed = [glob for glob in commands if "/" in glob]
        self._names = _texts("command", named, folding=folding)
        for command in named:
            if "\\" not in command and _BLANK.search(outside_sets(command)):
                raise PolicyError(
                    f"{command!r} would be one word, the program's name: its arguments go into args"
                    ", one each ([ ] for a blank in a name)",
                    key="command",
                )
        self._programs = _paths("command", placed, home, folding=folding)
        # Which bare names could be one of these programs, where a shell or the system finds it.
        self._found = _texts(
            "command", [glob.rpartition("/")[2] for glob in placed], folding=folding
        )
        self._args: list[Callable[[str], bool]] | None = None
        self._any_rest = False
        if rule.args is not None:
            if isinstance(rule.args, str):
                raise PolicyError("a list, one glob for each argument", key="args")
            args = _strings("args", rule.args)
            self._any_rest = bool(args) and args[-1] == "**"
            self._args = [
                # An empty argument is one that can be meant.
                "".__eq__ if arg == "" else _texts("args", arg)[0]
                for arg in (args[:-1] if self._any_rest else args)
            ]
        seconds: object = rule.deadline
        if seconds is not None:
            check_deadline(seconds)
            if rule.decision != "ask":
                raise PolicyError("only a rule that asks has one", key="deadline")

    @property
    def concerns_reads(self) -> bool:
        """Whether it could keep a read from being allowed."""
        about_commands = self._command or self._args is not None or self._cwd or self._env
        if self._allows or about_commands:
            return False
        return not self._kind or any(glob("read") for glob in self._kind)

    def match(self, facts: _Facts) -> bool | None:
        """See the class."""
        call, allows = facts.call, self._allows
        unclear = False
        enough = all if allows else any
        if self._kind and not enough(
            any(glob(kind) for glob in self._kind) for kind in facts.kinds
        ):
            return False
        if self._title and not any(glob(call.title) for glob in self._title):
            return False
        if self._session and not any(glob(call.session_id) for glob in self._session):
            return False
        if self._path:
            if facts.paths:
                if not enough(_fits_any(self._path, path) for path in facts.paths):
                    return False
            elif allows or _FILE_KINDS.isdisjoint(facts.kinds):
                return False
            else:
                unclear = True
        if self._command or self._args is not None:
            if call.command is None:
                if allows or _COMMAND_KINDS.isdisjoint(facts.kinds):
                    return False
                unclear = True
            elif not self._fits_command(facts):
                # A line may do anything, whatever it begins with; a bare name may be any program.
                may_be = facts.runs_others or self._could_be(facts)
                if allows or not may_be:
                    return False
                unclear = True
        if self._cwd:
            if facts.cwd is None:
                if allows or call.command is None:
                    return False
                unclear = True
            elif not _fits_any(self._cwd, facts.cwd):
                return False
        if not self._fits_env(call):
            return False
        return None if unclear else True

    def _fits_command(self, facts: _Facts) -> bool:
        words = facts.call.command
        if not words:
            return False
        if self._command:
            name = words[0] if self._allows else posixpath.basename(words[0])
            # A bare name is looked for on the PATH; a path says which.
            named = (not self._allows or "/" not in words[0]) and any(
                glob(name) for glob in self._names
            )
            placed = facts.program is not None and _fits_any(self._programs, facts.program)
            if not named and (not placed or (self._allows and facts.elsewhere)):
                return False
        if self._args is None:
            return True
        given = words[1:]
        if len(given) < len(self._args) or (len(given) > len(self._args) and not self._any_rest):
            return False
        return all(glob(word) for glob, word in zip(self._args, given, strict=False))

    def _could_be(self, facts: _Facts) -> bool:
        """Whether it may be one of the programs that are given by a path."""
        words = facts.call.command
        if not words or not self._found:
            return False
        bare = words[0] if facts.program is None else posixpath.basename(words[0])
        return (facts.program is None or facts.elsewhere) and any(
            glob(bare) for glob in self._found
        )

    def _fits_env(self, call: Call) -> bool:
        if not self._env:
            return not (self._allows and self._command and call.env)
        enough = all if self._allows else any
        return enough(any(glob(name) for glob in self._env) for name in call.env)


def _fits_any(globs: Iterable[PathGlob], location: _Location) -> bool:
    return any(
        glob.matches(names)
        for glob in globs
        for names in (location.relative if glob.relative else location.names)
    )


def _strings(key: str, value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise PolicyError(f"a glob or a list of globs, not {_shown(value)}", key=key)
    found = list(cast("Sequence[object]", value))
    for item in found:
        if not isinstance(item, str):
            raise PolicyError(f"a list of globs, and {_shown(item)} is none", key=key)
    return cast("list[str]", found)


def _texts(key: str, value: object, *, folding: bool = False) -> list[Callable[[str], bool]]:
    try:
        return [text_glob(glob, ignore_case=folding) for glob in _strings(key, value)]
    except GlobError as error:
        raise PolicyError(str(error), key=key) from error


def _paths(key: str, value: object, home: str, *, folding: bool) -> list[PathGlob]:
    try:
        return [PathGlob(glob, home=home, ignore_case=folding) for glob in _strings(key, value)]
    except GlobError as error:
        raise PolicyError(str(error), key=key) from error


def check_deadline(seconds: object) -> float:
    """A deadline that can be kept.

    Raises:
        PolicyError: no positive, finite number.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise PolicyError(f"a number of seconds, not {_shown(seconds)}", key="deadline")
    # A year: beyond, a loop's clock may not take it.
    if not 0 < seconds <= 366 * 86400:
        raise PolicyError(f"more than 0 seconds and at most a year, not {seconds}", key="deadline")
    return float(seconds)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:59] + '…'}"

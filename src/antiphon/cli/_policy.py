"""`antiphon policy test`, and the policy that `antiphon prompt` is given on its command line.

What rules mean, `antiphon.services` knows; here what was typed becomes a policy or a call, and a
verdict becomes lines for people or for scripts. Nothing is asked, started or changed.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from antiphon.cli._arguments import UsageError
from antiphon.cli._output import Output, as_line
from antiphon.cli._prompt import folders
from antiphon.schema import v1_unstable as v1
from antiphon.services import Call, Permissions, PolicyError, Rule

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from antiphon.services import Verdict

__all__ = ["make_policy", "read_call", "run"]

#: Exit codes, from the mildest; what is worse wins.
ALLOWED: Final = 0
DENIED: Final = 1
ASKED: Final = 3

_FILE_KINDS: Final = ("read", "edit", "delete", "move", "search")
_KINDS: Final = (*_FILE_KINDS, "execute", "fetch", "think", "switch_mode", "other")
_SHORTHAND: Final = re.compile(r"([A-Za-z_]+):(.*)", re.DOTALL)
_EXAMPLES: Final = "such as 'execute:git status', 'edit:src/a.py' or '{\"kind\": \"read\", …}'"
#: What a kind is sometimes called: by this library's services, or by agents.
_CALLED: Final = {"write": "edit", "run": "execute", "command": "execute", "bash": "execute"}
#: Keys of a rule that are looked at one by one; what a command is, two of them say together.
_KEYS: Final = ("kind", "title", "session", "path", "cwd", "env")


def run(options: argparse.Namespace) -> int:
    """Judge each call; 0: all allowed, 1: one is denied, 3: one is asked about and none denied."""
    cwd, lent = folders(options)
    # As in a run: the session's own folder first, then what is lent in its place.
    roots = tuple(dict.fromkeys((cwd, *lent)))
    policy = make_policy(options, options.file)
    calls = [(text, read_call(text, roots)) for text in options.call]
    output = Output()
    found: set[str] = set()
    for text, call in calls:
        verdict = policy.judge(call)
        if verdict.decision == "ask" and verdict.deadline is None:
            verdict = msgspec.structs.replace(verdict, deadline=policy.deadline)
        found.add(verdict.decision)
        earlier = list(_earlier(policy, call, verdict)) if options.verbose else None
        if options.json:
            output.line(_as_json(text, call, verdict, earlier))
        else:
            lines = _for_people(text, call, verdict, options.file, lent or roots, earlier or [])
            output.text("".join(f"{as_line(line)}\n" for line in lines))
    return DENIED if "deny" in found else ASKED if "ask" in found else ALLOWED


def make_policy(
    options: argparse.Namespace, file: str | None, default: str | None = None
) -> Permissions:
    """The policy of a command line: the file's rules, then `--allow-write`, then `--permissions`.

    Args:
        options: with `permissions` and `allow_write`.
        file: the policy's file, if there is one.
        default: what no rule matches, where neither `--permissions` nor a file says it.

    Raises:
        UsageError: the file cannot be read or is no policy; says where.
    """
    try:
        loaded = Permissions(default=cast("Any", default or "ask"))
        if file is not None:
            loaded = Permissions.load(file)
        word = options.permissions or loaded.policy.default
        # Where all is allowed that no rule matches, there is nothing to add.
        more = [] if not options.allow_write or word == "allow" else [_ALLOW_WRITE]
        return Permissions(
            [*loaded.rules, *more],
            default=word,
            reads=loaded.policy.reads,
            deadline=loaded.deadline,
        )
    except PolicyError as error:
        raise UsageError(f"antiphon: {error}") from None


_ALLOW_WRITE: Final = Rule("allow", name="--allow-write", kind="edit")


# -- what was typed


class _Typed(msgspec.Struct, forbid_unknown_fields=True):
    """A call as a JSON object: what is not said is what an agent would leave out."""

    kind: str = ""
    title: str = ""
    path: str = ""
    paths: list[str] = []
    changes: list[str] = []
    command: str | list[str] | None = None
    args: list[str] | None = None
    cwd: str = ""
    env: dict[str, str] = {}
    session_id: str = "test"


def read_call(text: str, roots: Sequence[str]) -> Call:
    """What `--call` means: a JSON object of a call's fields, or KIND:WHAT.

    It is read as a permission request of an agent would be, so that a line for a shell becomes
    what would run.

    Raises:
        UsageError: neither; says which part of it.
    """
    if text.lstrip().startswith("{"):
        try:
            typed = msgspec.json.decode(text.encode("utf-8", "replace"), type=_Typed)
        except msgspec.MsgspecError as error:
            keys = ", ".join(_Typed.__struct_fields__)
            raise _wrong(text, f"{error}; its keys are {keys}") from None
    else:
        typed = _shorthand(text)
    if typed.kind and typed.kind not in _KINDS:
        meant = _CALLED.get(typed.kind.lower(), typed.kind.lower())
        hint = f"; {meant!r} is meant?" if meant in _KINDS else f"; there are {', '.join(_KINDS)}"
        raise _wrong(text, f"no such kind: {typed.kind!r}{hint}")
    if typed.command is not None and not "".join(typed.command).strip():
        raise _wrong(text, "the command is empty")
    if typed.args is not None and typed.command is None:
        raise _wrong(text, "args without a command")
    if "" in (*typed.paths, *typed.changes):
        raise _wrong(text, "a path is empty")
    if typed.cwd:
        typed.cwd = _absolute(typed.cwd, roots)
    paths = [_absolute(path, roots) for path in (*filter(None, [typed.path]), *typed.paths)]
    changes = [_absolute(path, roots) for path in typed.changes]
    raw = {"command": typed.command, "args": typed.args, "cwd": typed.cwd, "env": typed.env}
    tool = v1.ToolCallUpdate(
        tool_call_id="test",
        kind=cast("Any", typed.kind) or msgspec.UNSET,
        title=typed.title,
        locations=[v1.ToolCallLocation(path=path) for path in paths],
        content=[v1.Diff(path=path, new_text="") for path in changes],
        raw_input={key: value for key, value in raw.items() if value},
    )
    request = v1.RequestPermissionRequest(session_id=typed.session_id, tool_call=tool, options=[])
    return Call.of_request(request, roots)


def _shorthand(text: str) -> _Typed:
    found = _SHORTHAND.fullmatch(text.strip())
    if found is None:
        raise _wrong(text, f"neither KIND:WHAT nor a JSON object, {_EXAMPLES}")
    kind, what = found[1], found[2].strip()
    if kind in _KINDS and not what:
        raise _wrong(text, f"nothing after {kind}:")
    if kind in _FILE_KINDS:
        return _Typed(kind=kind, path=what)
    if kind == "execute":
        return _Typed(kind=kind, title=what, command=what)
    return _Typed(kind=kind, title=what)


def _absolute(path: str, roots: Sequence[str]) -> str:
    # A quoted "~/" is no longer the shell's business, and a person means it. What a path with ".."
    # means is left as it is: that it is doubted is part of the answer.
    if path == "~" or path.startswith("~/"):
        path = os.path.expanduser(path)  # noqa: PTH111  (text, as it was typed)
    return path if os.path.isabs(path) else os.path.join(roots[0], path)  # noqa: PTH117, PTH118  (as above)


def _wrong(text: str, problem: str) -> UsageError:
    return UsageError(f"antiphon policy test: --call {text!r}: {problem}")


# -- what is told


def _for_people(
    text: str,
    call: Call,
    verdict: Verdict,
    file: str,
    lent: Sequence[str],
    earlier: list[dict[str, Any]],
) -> Iterator[str]:
    yield f"{verdict.decision:<5}  {text}"
    yield f"       {verdict.why} ({file})"
    if verdict.decision == "ask":
        seconds = "" if verdict.deadline is None else f" within {verdict.deadline:g} s"
        yield f"       a person has to say yes{seconds}; where there is none it is refused"
    if call.command is not None and call.command[:2] == ("/bin/sh", "-c"):
        yield f"       as a command: {shlex.join(call.command)}"
    for path in call.paths:
        real = os.path.realpath(path)
        if real != path:
            yield f"       {path} leads to {real}: of a file that is lent, that is what is judged"
        if not any(f"{real}/".startswith(root.rstrip("/") + "/") for root in lent):
            yield f"       {path} lies outside of what is lent: there is no reading or writing it"
            yield "       through the client, whatever the policy says"
    for rule in earlier:
        name = f" ({rule['name']!r})" if rule["name"] else ""
        yield f"       rule {rule['number']}{name}, {rule['decision']}: {rule['why']}"


def _as_json(
    text: str, call: Call, verdict: Verdict, earlier: list[dict[str, Any]] | None
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "type": "verdict",
        "call": _text(text),
        "decision": verdict.decision,
        "rule": None if verdict.rule is None else verdict.rule.name or None,
        "number": verdict.number,
        "why": _text(verdict.why),
        "deadline": verdict.deadline,
        "kind": call.kind,
        "paths": [_text(path) for path in call.paths],
        "command": None if call.command is None else [_text(word) for word in call.command],
    }
    return line if earlier is None else {**line, "earlier": earlier}


def _text(text: str) -> str:
    # Arguments that are no UTF-8 hold lone surrogates, which no line can carry.
    return text.encode("utf-8", "replace").decode()


def _earlier(policy: Permissions, call: Call, verdict: Verdict) -> Iterator[dict[str, Any]]:
    """The rules before the one that decided, and which of their keys does not match."""
    end = len(policy.rules) if verdict.number is None else verdict.number - 1
    for number, rule in enumerate(policy.rules[:end], 1):
        yield {
            "number": number,
            "name": rule.name,
            "decision": rule.decision,
            "why": _why_not(rule, call),
        }


def _why_not(rule: Rule, call: Call) -> str:
    """Which keys of a rule do not match: each is tried alone, as a rule of its own."""
    failed: list[str] = []
    unclear: list[str] = []
    for words, part in _parts(rule):
        alone = _judge_alone(part, call)
        if alone is False:
            failed.append(f"{words} ({_has(words, call)})")
        elif alone is None:
            unclear.append(words)
    if failed:
        return "does not match by " + ", ".join(failed)
    if unclear:
        return f"cannot be excluded: the call does not say its {' and '.join(unclear)}"
    if call.env:
        names = ", ".join(sorted(call.env))
        return f"does not match: the call adds to the environment ({names})"
    return "does not match: its keys fit one by one, but not together"


def _parts(rule: Rule) -> Iterator[tuple[str, Rule]]:
    for key in _KEYS:
        value = getattr(rule, key)
        if value:
            yield key, Rule(rule.decision, **{key: value})
    if rule.command or rule.args is not None:
        # Whatever is added to the environment is a key of its own.
        env = "*" if rule.decision == "allow" else ()
        words = "command" if rule.args is None else "command and args" if rule.command else "args"
        yield words, Rule(rule.decision, command=rule.command, args=rule.args, env=env)


def _judge_alone(part: Rule, call: Call) -> bool | None:
    """Whether a rule matches; None: the call does not say."""
    strict = Permissions([part], default="deny", reads="deny").judge(call)
    if strict.rule is not None:
        return True
    lax = Permissions([part], default="allow", reads="allow").judge(call)
    return None if lax.rule is not None else False


def _has(words: str, call: Call) -> str:
    """What the call has in the place of these keys."""
    match words:
        case "kind":
            return " and ".join(call.kinds)
        case "title":
            return repr(call.title) if call.title else "it has no title"
        case "session":
            return repr(call.session_id)
        case "path":
            return ", ".join(call.paths) or "it names no path"
        case "cwd":
            return call.cwd or "it has none"
        case "env":
            return ", ".join(sorted(call.env)) or "it adds none"
        case _:
            return "it runs none" if call.command is None else shlex.join(call.command)

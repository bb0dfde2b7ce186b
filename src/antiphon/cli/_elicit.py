"""Forms and addresses from an agent, put to a person on the terminal.

Responsible for what is said and in which order: who asks and why, one field after the other with its
default, a review before anything is sent, an address in full before it is opened; and a way to
decline and one to cancel everywhere. What fits is `antiphon.services`' knowledge; reading and writing
are the asker's (`_ask` with nothing, `_pleasant` with the extra `cli`). Used only where there is a
terminal: else nothing is offered to the agent.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Protocol, cast

from antiphon.cli._output import harmless
from antiphon.cli._view import Question, ToolView
from antiphon.services import Elicitation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.cli._view import Display
    from antiphon.services import Field, Form, UrlRequest

__all__ = ["Elicit", "Person", "open_page"]

MAX_CHOICES = 40
MAX_FIELDS = 100
#: What a browser may take to say that it cannot be opened.
BROWSER_SECONDS = 5.0

_WARNINGS = {
    "http": "The connection is not encrypted (http).",
    "punycode": "The host is written in punycode; it may imitate a name that you know.",
    "credentials": "There is a user name before the host, which may look like a host itself.",
    "ip-address": "The host is a number, not a name.",
    "local": "It leads to this machine.",
}
_DECLINE = ("decline", "Decline: tell the agent no", "reject_once")
_CANCEL = ("cancel", "Cancel: close the question without an answer", "reject_once")


class Person(Protocol):
    """Somebody at a terminal."""

    async def choose(self, question: Question) -> str | None:
        """The key of the chosen option; None for no choice at all. Cancellable."""
        ...

    async def line(self, default: str, *, fresh: bool) -> str | None:
        """A typed line, with `default` filled in beforehand; None at end of input. Cancellable.

        `fresh`: what was typed before this is no answer.
        """
        ...

    def show(self, text: str, style: str = "") -> None:
        """Lines above what is asked; `style` as rich has it, where there are any."""


class Elicit:
    """Asks one person, one question at a time.

    Args:
        display: what shows the turn; it is suspended meanwhile.
        person: reads and writes.
        turn: held while anything is asked.
        command: how the agent was started, shown with the name that it gives itself.
    """

    def __init__(self, display: Display, person: Person, turn: asyncio.Lock, command: str) -> None:
        self._display = display
        self._person = person
        self._turn = turn
        self._command = command
        self._notes: set[asyncio.Task[None]] = set()

    def service(self) -> Elicitation:
        """For `Client(elicitation=…)`."""
        return Elicitation(form=self.form, url=self.url)

    async def form(self, form: Form, ctx: Any) -> Mapping[str, object] | bool | None:
        """Have a form filled in."""
        del ctx
        async with self._turn:
            self._begin("to fill in a form", form.message, form.agent)
            try:
                return await _Filling(self._person, form).run()
            finally:
                self._display.resume()

    async def url(self, request: UrlRequest, ctx: Any) -> bool | None:
        """Ask whether an address may be opened, and open it."""
        del ctx
        async with self._turn:
            self._begin("to open a web page", request.message, request.agent)
            try:
                answer = await self._consent(request)
            finally:
                self._display.resume()
        if answer:
            task = asyncio.create_task(self._tell_of_end(request))
            self._notes.add(task)
            task.add_done_callback(self._notes.discard)
        return answer

    def _begin(self, what: str, message: str, agent: str) -> None:
        tool = ToolView(id="elicitation", title=what)
        self._display.suspend(Question(kind="permission", tool=tool, options=()))
        name = f"{harmless(agent, 80, one_line=True)}, " if agent else ""
        self._person.show(f"  asked by {name}started as: {self._command}", "dim")
        self._person.show(_said(message or "(no message)"))

    async def _consent(self, request: UrlRequest) -> bool | None:
        person = self._person
        person.show("It wants this page opened in your browser:")
        person.show(f"  {request.ascii_url}")
        person.show(f"  host: {request.host}", "bold yellow")
        if request.unicode_host:
            person.show(f"  which reads: {harmless(request.unicode_host, 300, one_line=True)}")
        for reason in request.suspicious:
            person.show(f"  ! {_WARNINGS[reason]}", "bold red")
        options = [
            ("open", "Open it in the browser", "allow_once"),
            ("self", "Yes, but I open it myself", "allow_once"),
            _DECLINE,
            _CANCEL,
        ]
        key = await self._choose(options)
        if key == "open" and not await open_page(request.ascii_url):
            person.show("No browser could be opened here. Open the address yourself:")
            person.show(f"  {request.ascii_url}")
            key = await self._choose(options[1:])
        return {"open": True, "self": True, "decline": False}.get(key or "cancel")

    async def _choose(self, options: list[tuple[str, str, str]]) -> str | None:
        return await _choose(self._person, options)

    async def _tell_of_end(self, request: UrlRequest) -> None:
        if await request.completed():
            self._display.note(f"the agent says that it is done at {request.host}")


class _Filling:
    """One form, being filled in."""

    def __init__(self, person: Person, form: Form) -> None:
        self._person = person
        self._form = form
        self._values: dict[str, Any] = dict(form.defaults())
        self._fresh = True

    async def run(self) -> Mapping[str, object] | bool | None:
        form, person = self._form, self._person
        for text in (form.title, form.description):
            if text:
                person.show(_said(text))
        if not form.answerable or len(form.fields) > MAX_FIELDS:
            person.show(
                f"It has more than {MAX_FIELDS} fields; that is no form for a person."
                if form.answerable
                else "It requires an answer of a kind that is not known here."
            )
            return {"decline": False}.get(await _choose(person, [_DECLINE, _CANCEL]) or "")
        if form.fields:
            person.show(
                "  Enter takes what is filled in, Ctrl-D stops. Never type a password or key here.",
                "dim",
            )
        todo = [field for field in form.fields if field.kind != "other"]
        while True:
            done = await self._ask(todo)
            match await self._review(done=done):
                case "send":
                    return form.check(self._values)
                case "change":
                    number = await self._which()
                    todo = [form.fields[number]] if number is not None else []
                case "on":
                    todo = [field for field in todo if field.name in self._missing] or todo
                case "decline":
                    return False
                case _:
                    return None

    @property
    def _missing(self) -> list[str]:
        return [f.name for f in self._form.fields if f.required and f.name not in self._values]

    async def _ask(self, fields: list[Field]) -> bool:
        """Ask for these; False if the person stopped before the end."""
        for field in fields:
            if not await self._ask_one(field):
                return False
        return True

    async def _ask_one(self, field: Field) -> bool:
        person = self._person
        person.show(f"{_title(field)}{' (required)' if field.required else ''}", "bold")
        if field.description:
            person.show(_said(field.description))
        for number, choice in enumerate(field.choices[:MAX_CHOICES], 1):
            about = (
                f": {harmless(choice.description, 200, one_line=True)}"
                if choice.description
                else ""
            )
            person.show(f"  {number}. {harmless(choice.title, 200, one_line=True)}{about}")
        if len(field.choices) > MAX_CHOICES:
            person.show(f"  … and {len(field.choices) - MAX_CHOICES} more")
        person.show(f"  {_hint(field)}", "dim")
        while True:
            shown = harmless(_typed(field, self._values.get(field.name)), 500, one_line=True)
            line = await person.line(shown, fresh=self._fresh)
            self._fresh = False
            if line is None:
                return False
            if shown and line == shown:
                return True  # as it is, which may be more than can be shown on a line
            if not line.strip() and field.kind != "choices":
                self._values.pop(field.name, None)
                if not field.required:
                    return True
                person.show("  An answer is required.", "red")
                continue
            try:
                self._values[field.name] = field.parse(line)
            except ValueError as error:
                person.show(f"  What you typed {error}.", "red")
            else:
                return True

    async def _review(self, *, done: bool) -> str | None:
        person = self._person
        person.show("Your answers:", "bold")
        for number, field in enumerate(self._form.fields, 1):
            value = self._values.get(field.name)
            shown = "(left out)" if value is None else _typed(field, value)
            person.show(f"  {number}. {_title(field)}: {harmless(shown, 500, one_line=True)}")
        options: list[tuple[str, str, str]] = []
        if self._missing:
            options.append(("on", "Go on filling in", "allow_once"))
        else:
            options.append(("send", "Send these answers", "allow_once"))
        if self._form.fields and done:
            options.append(("change", "Edit an answer", "allow_once"))
        elif not self._missing:
            options.append(("on", "Go on filling in", "allow_once"))
        return await _choose(person, [*options, _DECLINE, _CANCEL])

    async def _which(self) -> int | None:
        self._person.show(f"Which one, 1 to {len(self._form.fields)}?")
        line = await self._person.line("", fresh=True)
        word = "" if line is None else line.strip()
        if word.isascii() and word.isdigit() and len(word) < 9:
            number = int(word) - 1
            if 0 <= number < len(self._form.fields):
                if self._form.fields[number].kind != "other":
                    return number
                self._person.show("  It is of a kind that is not known here.", "red")
        return None


async def _choose(person: Person, options: list[tuple[str, str, str]]) -> str | None:
    tool = ToolView(id="elicitation")
    return await person.choose(Question(kind="permission", tool=tool, options=tuple(options)))


def _said(text: str) -> str:
    """An agent's words, marked on each line: none of them passes for one of ours."""
    return "\n".join(f"  | {line}" for line in harmless(text).splitlines())


def _title(field: Field) -> str:
    return harmless(field.title, 200, one_line=True)


def _hint(field: Field) -> str:
    """What may be typed, in a few words."""
    words = {
        "string": "text",
        "integer": "a whole number",
        "number": "a number",
        "boolean": "yes or no",
        "choice": "a number or a name from the list",
        "choices": "numbers or names from the list, with commas between",
    }
    parts = [words.get(field.kind, field.kind)]
    of = "" if field.kind == "choices" else " characters"
    if field.format:
        parts[0] = harmless(field.format, 30, one_line=True)
    if field.minimum is not None:
        parts.append(f"at least {field.minimum}")
    if field.maximum is not None:
        parts.append(f"at most {field.maximum}")
    if field.min_length:
        parts.append(f"at least {field.min_length}{of}")
    if field.max_length is not None:
        parts.append(f"at most {field.max_length}{of}")
    if field.pattern is not None:
        parts.append(f"of the form {harmless(field.pattern, 100, one_line=True)}")
    return ", ".join(parts)


def _typed(field: Field, value: Any) -> str:
    """A value as a person would type it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_chosen(field, item) for item in cast("list[str]", value))
    return _chosen(field, str(value)) if field.kind == "choice" else str(value)


def _chosen(field: Field, value: str) -> str:
    """The title of a choice, or its number where that would not be understood."""
    number = next(n for n, choice in enumerate(field.choices, 1) if choice.value == value)
    title = field.choices[number - 1].title
    for word in (title, value, str(number)):
        means = [c for c in field.choices if word in {c.value, c.title}]
        if "," not in word and (not means or all(c.value == value for c in means)):
            return word
    return str(number)


async def open_page(url: str) -> bool:
    """Open an address in the person's browser; False if there is none.

    In a process of its own, without our streams and out of our terminal's reach: browsers print, and
    some run in the terminal. `BROWSER` says which one, as usual.
    """
    code = "import sys, webbrowser; sys.exit(not webbrowser.open(sys.argv[1]))"
    # Without TERM no browser is chosen that would need our terminal.
    env = {name: value for name, value in os.environ.items() if name != "TERM"}

    def start() -> bool:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", code, url],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=env,
            )
            return process.wait(BROWSER_SECONDS) == 0
        except subprocess.TimeoutExpired:
            return True  # a browser that was not running before, and stays
        except OSError:
            return False

    return await asyncio.to_thread(start)

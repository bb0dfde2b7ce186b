"""The question a service asks before it acts, and the errors it answers with."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from antiphon import _errors
from antiphon.services._context import Operation, denied, given, permit, refusal

OPERATION = Operation(kind="write", session_id="s", title="Write /w/f", path="/w/f")


def test_what_is_absent_or_null_was_not_given() -> None:
    assert [given(value, 7) for value in (UNSET, None, 0, 1)] == [7, 7, 0, 1]


def test_a_refusal_names_its_reason_and_the_facts() -> None:
    error = refusal("path_traversal", path="/etc/passwd")
    assert isinstance(error, _errors.InvalidParams)
    assert (error.code, error.message) == (-32602, "Invalid params")
    assert error.data == {"reason": "path_traversal", "path": "/etc/passwd"}


def test_a_denial_is_no_fault_of_the_parameters() -> None:
    error = denied()
    assert isinstance(error, _errors.InternalError)
    assert (error.code, error.message) == (-32603, "Permission denied")
    assert error.data == {"reason": "permission_denied"}


async def test_without_a_guard_everything_is_permitted() -> None:
    await permit(None, OPERATION)


async def test_a_guard_is_given_the_operation_and_its_true_permits() -> None:
    asked: list[Operation] = []

    async def guard(operation: Operation) -> bool:
        asked.append(operation)
        return True

    await permit(guard, OPERATION)
    assert asked == [OPERATION]


async def test_a_plain_guard_decides_as_an_async_one_does() -> None:
    await permit(lambda operation: operation is OPERATION, OPERATION)


@pytest.mark.parametrize("answer", [False, None, 1, "allow", object()])
async def test_every_other_answer_denies(answer: Any) -> None:
    async def guard(operation: Operation) -> bool:
        return answer  # type: ignore[no-any-return]

    def plain(operation: Operation) -> bool:
        return answer  # type: ignore[no-any-return]

    for asked in (guard, plain):
        with pytest.raises(_errors.InternalError, match="Permission denied"):
            await permit(asked, OPERATION)


async def test_what_a_guard_raises_passes_through() -> None:
    async def guard(operation: Operation) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await permit(guard, OPERATION)


def test_an_operation_says_what_it_is_not() -> None:
    assert OPERATION.requested is None
    assert OPERATION.command is None
    assert OPERATION.cwd is None
    assert OPERATION.env == {}
    with pytest.raises(AttributeError):
        OPERATION.path = "/etc/passwd"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]

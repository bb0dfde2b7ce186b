"""Rows of records: text for everybody, and a checksum that tells any change."""

from __future__ import annotations

import json
from struct import unpack
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.journal import Entry, JournalError, Record
from antiphon.journal._sqlite_format import (
    RUN_BYTES,
    RUN_RECORDS,
    Broken,
    Index,
    Row,
    base,
    pack_runs,
    unpack_plain,
    unpack_run,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)


def packed(*entries: Entry, index: Index | None = None) -> tuple[list[Row], list[Record], Index]:
    return pack_runs("s-1", 3, index or Index(), entries, 1000)


def unpacked(rows: list[Row]) -> list[Record | Broken]:
    found: list[Record | Broken] = []
    for row in rows:
        found += unpack_run("s-1", row.key - base(3), row.checks, row.body)
    return found


def update(payload: bytes) -> Entry:
    return Entry("session_update", payload, "agent")


@given(st.lists(st.tuples(st.text(), OBJECTS, st.text(), st.sampled_from([None, 1])), min_size=1))
def test_records_are_read_as_they_were_written(
    told: list[tuple[str, dict[str, object], str, int | None]],
) -> None:
    entries = [
        Entry(kind, json.dumps(value, indent=indent).encode(), taint)
        for kind, value, taint, indent in told
    ]

    rows, records, index = packed(*entries)

    assert unpacked(rows) == records
    assert [record.offset for record in records] == list(range(1, len(told) + 1))
    assert [json.loads(record.payload) for record in records] == [value for _, value, _, _ in told]
    assert [(record.kind, record.taint) for record in records] == [(k, t) for k, _, t, _ in told]
    assert index.records == len(told)


#: What is packed at once, and what among it has to be looked at more closely.
PLAIN = [
    update(b'{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"Hello"}}'),
    update('{"sessionUpdate":"plan","entries":[],"x":"\u00e9"}'.encode()),
    Entry("session_update", b' {"a":1,"sessionUpdate":"tool_call"} ', "external"),
    Entry("session_update", b'{"sessionUpdate":"tool_call_update"}', "t\udfff"),
]
ODD = [
    update(b'{"sessionUpdate":"current_mode_update","currentModeId":"m"}'),
    update(b'{"sessionUpdate":"usage_upd\\u0061te"}'),
    update(b'{"sessionUpdate":"plan","sessionUpdate":"usage_update"}'),
    update(b'{"sessionUpdate":"usage_update","sessionUpdate":"plan"}'),
    update(b'{"sessionUpdate":"session_info_update","title":"A"}'),
    update(b'{"sessionUpdate":"plan",\n"entries":[]}'),
    update(b'{"sessionUpdate":"plan",\r"entries":[]}'),
    update(b'{"sessionUpdate":"plan","x":"%b"}' % (b"x" * RUN_BYTES)),
    update(b'{"sessionUpdate":"of_later"}'),
    update(b"{}"),
    Entry("session_created", b'{"sessionUpdate":"plan"}', "agent"),
    Entry("turn_started", b'{"turnId":1}', "user"),
    Entry("k\ud800", b'{"sessionUpdate":"plan"}', "agent"),
]


def alone(entries: list[Entry], index: Index) -> tuple[list[Row], list[Record], Index]:
    """The same, one by one."""
    rows: list[Row] = []
    records: list[Record] = []
    for entry in entries:
        row, record, index = packed(entry, index=index)
        rows += row
        records += record
    return rows, records, index


def assert_alike(entries: list[Entry], start: Index) -> None:
    rows, records, index = packed(*entries, index=start)
    each, single, after = alone(entries, start)
    assert b"\n".join(row.body for row in rows) == b"\n".join(row.body for row in each)
    assert b"".join(row.checks for row in rows) == b"".join(row.checks for row in each)
    assert records == single == unpacked(rows)
    assert index == after
    assert all(len(row.checks) <= 4 * RUN_RECORDS for row in rows)
    assert all(len(row.body) < RUN_BYTES + RUN_RECORDS or len(row.checks) == 4 for row in rows)


@given(
    before=st.sampled_from([0, 1, 990, 999, 1000, 1990, 2**39]),
    each=st.lists(
        st.tuples(st.sampled_from(PLAIN + ODD), st.sampled_from([1, 2, 11, 12, 200, 600])),
        min_size=1,
        max_size=4,
    ),
)
def test_many_records_are_packed_like_each_by_itself(
    before: int, each: list[tuple[Entry, int]]
) -> None:
    entries = [entry for entry, count in each for _ in range(count if entry in PLAIN else 1)]
    start = Index(before, 5, 6, latest={"turn_started": 1}) if before else Index()

    assert_alike(entries, start)


@pytest.mark.parametrize("odd", [*PLAIN, *ODD, update(PLAIN[0].payload.replace(b"H", b"H" * 2000))])
def test_one_of_another_sort_among_many_is_packed_like_by_itself(odd: Entry) -> None:
    assert_alike([*PLAIN[:1] * 20, odd, *PLAIN[:1] * 300], Index())
    assert_alike([odd] * 200, Index())


@pytest.mark.parametrize(
    "payload",
    [
        b'{"sessionUpdate":"plan"',
        b'{"sessionUpdate":"plan"}{}',
        b'{"sessionUpdate":"plan","a":"\xff"}',
    ],
)
def test_one_that_is_no_json_is_found_among_many(payload: bytes) -> None:
    with pytest.raises(JournalError, match="payload"):
        packed(*PLAIN[:1] * 300, update(payload), *PLAIN[:1] * 20)


def test_a_row_is_lines_of_json_and_their_checksums() -> None:
    (row,), _, _ = packed(update(b'{"a":\n1}'), update(b'{"b":"\xc3\xa9"}'))

    lines = row.body.split(b"\n")
    assert [json.loads(line) for line in lines] == [
        {"offset": n, "kind": "session_update", "taint": "agent", "ts": 1000, "payload": payload}
        for n, payload in enumerate([{"a": 1}, {"b": "é"}], 1)
    ]
    assert list(unpack("<2I", row.checks)) == [crc32(b"s-1" + line) for line in lines]
    assert row.key == (3 << 40) + 1


@given(
    before=st.sampled_from([0, 90, 995, 2000]),
    odd=st.none() | st.sampled_from(ODD),
    part=st.tuples(st.integers(0, 39), st.integers(0, 39)).map(sorted),
    spoiled=st.none() | st.integers(0, 39),
)
def test_a_part_of_a_row_is_read_at_once_if_it_is_whole_and_all_alike(
    before: int, odd: Entry | None, part: list[int], spoiled: int | None
) -> None:
    low, high = part
    entries = [PLAIN[0]] * 40
    if odd is not None and len(odd.payload) < RUN_BYTES:
        entries[20] = odd
    (row,), records, _ = packed(*entries, index=Index(before))
    checks = bytearray(row.checks)
    if spoiled is not None:
        checks[4 * spoiled] ^= 1
    first = before + 1

    found = unpack_plain("s-1", first, bytes(checks), row.body, first + low, first + high)

    alike = len({(record.kind, record.taint) for record in records[low : high + 1]}) == 1
    whole = spoiled is None or not low <= spoiled <= high
    assert found == (records[low : high + 1] if alike and whole else None)
    rest = list(unpack_run("s-1", first, bytes(checks), row.body, first + low))
    assert rest == [
        Broken(record.offset, "the checksum does not fit") if at == spoiled else record
        for at, record in enumerate(records)
        if at >= low
    ]
    assert unpack_plain("s-1", first, row.checks, row.body, first + 40, first + 50) == []
    assert unpack_plain("s-1", first + 1, row.checks, row.body, first + 1, first + 5) is None
    assert unpack_plain("s-2", first, row.checks, row.body, first, first + 5) is None
    assert unpack_plain("s-1", first, row.checks[4:], row.body, first, first + 5) is None


@pytest.mark.parametrize("spoiled", [b"agent", b"session_update", b"1000", b'{"offset"'])
@pytest.mark.parametrize("by", [b"\xff", b"[" * 5000, b"9" * 5000, b""])
def test_a_head_that_was_spoiled_is_told_whatever_is_there_now(spoiled: bytes, by: bytes) -> None:
    (row,), records, _ = packed(*[PLAIN[0]] * 20)

    found = unpacked([row._replace(body=row.body.replace(spoiled, by, 1))])

    assert found == [Broken(1, "the checksum does not fit"), *records[1:]]


def test_a_run_of_a_later_writer_may_be_longer_and_is_read_whole() -> None:
    rows, records, _ = packed(*[PLAIN[0]] * (RUN_RECORDS + 10))
    checks = b"".join(row.checks for row in rows)
    body = b"\n".join(row.body for row in rows)

    assert list(unpack_run("s-1", 1, checks, body)) == records


@given(st.data())
def test_any_change_of_a_row_is_told_and_hides_no_other_record(data: st.DataObject) -> None:
    (row,), records, _ = packed(*(update(b'{"n":%d}' % n) for n in range(4)))
    at = data.draw(st.integers(0, len(row.body) - 1))
    body = bytearray(row.body)
    body[at] ^= data.draw(st.integers(1, 255))

    found = unpacked([row._replace(body=bytes(body))])

    assert len(found) == 4
    broken = [record for record in found if isinstance(record, Broken)]
    assert broken
    assert all(
        what == record or what in broken for what, record in zip(found, records, strict=True)
    )
    line_end = bytes(body)[at] == 10 or row.body[at] == 10
    assert len(broken) <= (2 if line_end else 1)


def test_a_record_in_the_place_of_another_is_told() -> None:
    (row,), _, _ = packed(update(b"{}"))

    assert unpacked([row._replace(key=row.key + 1)]) == [
        Broken(2, "is record 1 in the wrong place")
    ]


def test_runs_are_bounded_by_records_and_by_bytes() -> None:
    many, _, _ = packed(*(update(b"{}") for _ in range(RUN_RECORDS + 1)))
    large = update(b'{"x":"%b"}' % (b"x" * (RUN_BYTES // 2)))
    heavy, _, _ = packed(*(large for _ in range(3)))
    huge, _, _ = packed(update(b"{}"), update(b'{"x":"%b"}' % (b"x" * RUN_BYTES)), update(b"{}"))

    assert [len(row.checks) // 4 for row in many] == [RUN_RECORDS, 1]
    assert [len(row.checks) // 4 for row in heavy] == [1, 1, 1]
    assert [row.key - base(3) for row in huge] == [1, 2, 3]


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"1", b"{", b'{"a":1', b"{}{}", b'{"a":"\xff"}', b'{"a":"\n"}', b"\xff", b"null"],
)
def test_what_could_not_be_read_again_is_refused(payload: bytes) -> None:
    with pytest.raises(JournalError, match="payload"):
        packed(update(payload))


@pytest.mark.parametrize(
    "payload",
    [
        b'{"sessionUpdate":7}',
        b'{"a":"\\ud800"}',
        b'{"a":1e400,"b":123456789012345678901234567890}',
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b' \r\n{ "a" : 1 } \n',
        b'{"a":1,"a":2}',
    ],
)
def test_odd_payloads_are_kept_as_they_are(payload: bytes) -> None:
    rows, (record,), _ = packed(update(payload))

    assert record.payload == payload.replace(b"\n", b" ").replace(b"\r", b" ")
    assert unpacked(rows) == [record]


def test_an_unknown_member_of_a_record_is_passed_over() -> None:
    line = b'{"offset":1,"kind":"k","taint":"t","ts":5,"later":{"x":[1]},"payload":{"a":1}}'
    checks = crc32(b"s-1" + line).to_bytes(4, "little")

    assert list(unpack_run("s-1", 1, checks, line)) == [Record(1, "s-1", "k", b'{"a":1}', "t", 5)]


def test_the_index_follows_the_records() -> None:
    _, _, first = packed(
        Entry("session_created", b'{"cwd":"/x"}', "system"),
        Entry("turn_started", b'{"turnId":1}', "user"),
        update(b'{"sessionUpdate":"session_info_update","title":"A"}'),
    )
    _, _, second = packed(
        update(b'{"sessionUpdate":"session_info_update","updatedAt":"x"}'),
        update(b'{"sessionUpdate":"current_mode_update","currentModeId":"m"}'),
        Entry("turn_completed", b'{"turnId":1}', "system"),
        index=first,
    )
    _, _, third = packed(
        update(b'{"sessionUpdate":"session_info_update","title":null}'), index=second
    )

    assert first.title == second.title == "A"
    assert third.title is None
    assert third.meta == '{"cwd":"/x"}'
    assert third.latest == {
        "session_created": 1,
        "turn_started": 2,
        "current_mode_update": 5,
        "turn_completed": 6,
        "session_info_update": 7,
    }
    assert first.latest["session_info_update"] == 3


def test_text_that_cannot_be_written_is_mended_alike_for_both() -> None:
    rows, records, _ = packed(Entry("k\ud800", b"{}", "t\udfff"))

    assert unpacked(rows) == records
    assert records[0].kind == "k\ufffd"

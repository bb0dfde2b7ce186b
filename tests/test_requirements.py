"""Every requirement is proved by a test or says why not, and no test proves what does not exist.

`FAMILIES` says which ids there are; a test names those it proves in `@pytest.mark.covers(...)`, and
docs/conformance.md is made of both.
"""

from __future__ import annotations

import functools

from generate_conformance import families, family_of, listed, proofs, reasons


@functools.cache
def covered() -> dict[str, list[str]]:
    return {name: [marker.place for marker in found] for name, found in proofs().items()}


#: (how an id is written, first number, last number, numbers that were never given), in the list's order.
FAMILIES: list[tuple[str, int, int, set[int]]] = [
    ("R1-{}", 1, 160, set()),
    ("F{}", 1, 6, set()),
    ("FF-{:02}", 1, 50, {4, 11, 22, 23, 30, 33, 38, 40, 45, 48}),
    ("ACPX-{:03}", 1, 21, set()),
    ("I{}", 2, 19, {10}),
    ("Inv-{}", 1, 21, set()),
    ("IC-{}", 1, 8, set()),
    ("D{}", 1, 9, {4, 8}),
    ("C-{:02}", 1, 24, set()),
    ("Q-{:02}", 1, 28, set()),
    ("J{}", 1, 12, set()),
    ("P-BUS{}", 1, 7, set()),
    ("AP{}", 1, 20, {2, 19}),
    ("CDI-{}", 1, 6, set()),
]


def test_the_list_is_complete_and_has_no_id_twice() -> None:
    expected = [
        form.format(number)
        for form, first, last, missing in FAMILIES
        for number in range(first, last + 1)
        if number not in missing
    ]

    assert listed() == expected


def test_every_requirement_is_covered_or_says_why_not() -> None:
    assert not [name for name in listed() if name not in covered() and name not in reasons()]


def test_what_proves_a_requirement_is_a_test_that_runs_without_other_programs() -> None:
    found = [marker for each in proofs().values() for marker in each]

    assert not {
        m.test for m in found if not m.test.rpartition("::")[2].startswith(("test_", "Test"))
    }
    # `make interop` needs programs that are fetched first: what it proves, others prove as well.
    alone = {m.name for m in found} - {m.name for m in found if not m.test.startswith("interop/")}
    assert not alone


def test_no_requirement_is_covered_and_excused() -> None:
    assert not {name: covered()[name] for name in reasons() if name in covered()}


def test_every_id_that_is_named_exists() -> None:
    known = set(listed())

    assert not {name: places for name, places in covered().items() if name not in known}
    assert not set(reasons()) - known


def test_every_reason_is_a_sentence() -> None:
    assert not {name: text for name, text in reasons().items() if len(text.split()) < 4}


def test_every_title_is_of_an_id_and_every_family_has_its_head() -> None:
    known = families()

    assert list(known) == list(dict.fromkeys(family_of(name) for name in listed()))
    for family in known.values():
        assert not set(family.titles) - set(listed())
        assert family.head
        assert family.about
    titled = [name for name in listed() if not name.startswith("R1-")]
    assert not [name for name in titled if not known[family_of(name)].titles.get(name)]

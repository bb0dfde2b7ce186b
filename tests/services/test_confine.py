"""Walking a path inside lent directories: what is reached, what is refused, and that races lose."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import _errors
from antiphon.services import Files
from antiphon.services._confine import MAX_DEPTH, MAX_LINKS, Pins, Place, Roots, not_found

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "path_reject_vectors.json").read_text("utf-8")
)["vectors"]
OURS = [vector for vector in VECTORS if "ref_format" not in vector]
SECRET = "TOP SECRET"


def reason(error: _errors.RequestError) -> str:
    assert error.code == -32602
    assert error.message == "Invalid params"
    return str(error.data["reason"])


def refused(roots: Roots, path: str | Path) -> str:
    with pytest.raises(_errors.InvalidParams) as caught, roots.locate(str(path)):
        pass
    assert caught.value.data["path"] == str(path)[:4096]
    return reason(caught.value)


def reached(roots: Roots, path: str | Path) -> str:
    with roots.locate(str(path)) as place:
        return place.path


def identity(place: Place) -> tuple[int, int]:
    name = place.leaf if place.leaf is not None else b"."
    status = os.stat(name, dir_fd=place.directory, follow_symlinks=False)
    return status.st_dev, status.st_ino


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "r" / "w"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "out"
    folder.mkdir()
    (folder / "secret.txt").write_text(SECRET)
    return folder


# --- refusals -----------------------------------------------------------------------------------


def test_the_vectors_hold_some_for_us_and_some_for_others() -> None:
    assert len(OURS) == 12
    assert len(VECTORS) == 16


@pytest.mark.covers("FF-42")
@pytest.mark.parametrize("vector", OURS, ids=[vector["name"] for vector in OURS])
def test_a_reject_vector_is_refused_with_its_reason(vector: dict[str, Any], tmp_path: Path) -> None:
    for kind in ("dir", "file", "symlink"):
        for entry in vector["setup"]:
            if kind not in entry:
                continue
            path = tmp_path / entry[kind]
            if kind == "dir":
                path.mkdir(parents=True)
            elif kind == "file":
                path.write_text(entry["content"])
            else:
                path.symlink_to(entry["target"])
    before = sorted(tmp_path.rglob("*"))
    root = tmp_path / vector["root"]
    assert refused(Roots([root]), f"{root}/{vector['requested']}") == vector["expect"]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", "path_not_absolute"),
        ("a.txt", "path_not_absolute"),
        ("./a.txt", "path_not_absolute"),
        ("~", "path_not_absolute"),
        ("~/a.txt", "path_not_absolute"),
        ("c:/a.txt", "path_not_absolute"),
        ("\\\\host\\share", "path_not_absolute"),
        ("x" * 5000, "path_not_absolute"),
        ("{root}/a\0.txt", "path_not_text"),
        ("{root}/" + "d/" * 3000, "path_too_long"),
        ("{root}/" + "x" * 300, "path_too_long"),
        ("{root}/new/" + "x" * 300, "path_too_long"),
        ("/", "path_traversal"),
        ("/etc/passwd", "path_traversal"),
        ("{root}2/a.txt", "path_traversal"),  # a twin by prefix
        ("{root}/..", "path_traversal"),
        ("{root}/../w2/a.txt", "path_traversal"),
        ("{root}/d/../../w2/a.txt", "path_traversal"),
        ("{root}/../../../../../../../../etc/passwd", "path_traversal"),
        ("/{root}/a.txt", "path_traversal"),  # a host, on some systems
        ("{ROOT}/a.txt", "path_traversal"),
        ("{root}/a.txt/b", "not_a_directory"),
        ("{root}/a.txt/", "not_a_directory"),
        ("{root}/a.txt/..", "not_a_directory"),
    ],
)
@pytest.mark.covers("R1-109")
def test_a_path_outside_or_malformed_is_refused(root: Path, path: str, expected: str) -> None:
    (root / "a.txt").touch()
    (root / "d").mkdir()
    twin = root.parent / "w2"
    twin.mkdir()
    (twin / "a.txt").write_text(SECRET)
    path = path.replace("{root}", str(root)).replace("{ROOT}", str(root).upper())
    assert refused(Roots([root]), path) == expected


def test_a_lone_surrogate_is_refused_and_not_echoed(root: Path) -> None:
    with pytest.raises(_errors.InvalidParams) as caught:
        Roots([root]).locate(f"{root}/\udc80")
    assert caught.value.data == {"reason": "path_not_text", "path": f"{root}/?"}


def test_a_link_out_is_refused_alike_whether_its_target_exists(root: Path, outside: Path) -> None:
    roots = Roots([root])
    answers: list[object] = []
    for target in (outside / "secret.txt", outside / "missing", outside, "/proc/self/root/etc"):
        (root / "l").symlink_to(target)
        with pytest.raises(_errors.InvalidParams) as caught:
            roots.locate(f"{root}/l")
        answers.append(caught.value.data)
        (root / "l").unlink()
    assert answers == [{"reason": "symlink_escape", "path": f"{root}/l"}] * 4


@pytest.mark.parametrize(
    "target", ["c:", "C:", "c:/x", "z:\\x", "//host/share", "///x", "\\\\host", "\\x"]
)
def test_a_target_that_is_absolute_on_any_system_is_refused(root: Path, target: str) -> None:
    (root / "l").symlink_to(target)
    (root / "d").symlink_to(target)
    assert refused(Roots([root]), root / "l") == "symlink_escape"
    assert refused(Roots([root]), root / "d" / "x") == "symlink_escape"


def test_a_target_that_only_looks_like_a_drive_is_a_name(root: Path) -> None:
    (root / "l").symlink_to("c:x")
    assert reached(Roots([root]), root / "l") == f"{root}/c:x"


def test_parent_of_a_linked_directory_is_its_real_parent(root: Path) -> None:
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "t").write_text("kernel's")
    (root / "t").write_text("text's")
    (root / "a").symlink_to("deep/er")
    with Roots([root]).locate(f"{root}/a/../t") as place:
        assert place.path == f"{root}/deep/t"
        status = (root / "a" / ".." / "t").stat()
        assert identity(place) == (status.st_dev, status.st_ino)


def test_parent_of_a_directory_linked_from_outside_is_refused(root: Path, outside: Path) -> None:
    (root / "a").symlink_to(outside)
    assert refused(Roots([root]), f"{root}/a/../t") == "symlink_escape"


def test_without_any_root_everything_is_refused(root: Path) -> None:
    assert not Roots([])
    assert refused(Roots([]), root) == "path_traversal"
    assert refused(Roots([]), "/") == "path_traversal"


def test_a_depth_that_would_use_up_descriptors_is_refused(root: Path) -> None:
    here = os.open(root, os.O_RDONLY)
    for _ in range(MAX_DEPTH + 1):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    assert refused(Roots([root]), str(root) + "/d" * (MAX_DEPTH + 1)) == "path_too_deep"


# --- acceptance ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "real"),
    [
        ("/f", "/f"),
        ("//f", "/f"),
        ("/./f", "/f"),
        ("/a/../f", "/f"),
        ("/a/../a/./../f", "/f"),
        ("/none/../f", "/f"),
        ("/none", "/none"),
        ("/none/deeper/leaf", "/none/deeper/leaf"),
        ("/none/deeper/../leaf", "/none/leaf"),
        ("/in", "/a/inner"),
        ("/abs", "/a/inner"),
        ("/dir/inner", "/a/inner"),
        ("/dir/../f", "/f"),
        ("/chain", "/a/inner"),
        ("/round", "/f"),
        ("/dangling", "/a/new"),
        ("/dangling/deeper", "/a/new/deeper"),
        ("/a", "/a"),
        ("/a/", "/a"),
        ("", ""),
        ("/", ""),
        ("/self/self/f", "/f"),
        ("/c:/x", "/c:/x"),
        ("/..\\x", "/..\\x"),
        ("/é漢😀", "/é漢😀"),
    ],
)
def test_a_path_inside_leads_to_its_real_place(root: Path, path: str, real: str) -> None:
    (root / "f").touch()
    (root / "a").mkdir()
    (root / "a" / "inner").touch()
    links: dict[str, str | Path] = {
        "in": "a/inner",
        "abs": root / "a" / "inner",
        "dir": "a",
        "chain": "dir/../chain2",
        "chain2": "abs",
        "round": "../w/f",  # out by its text, but only past the root's own ancestors
        "dangling": "a/new",
        "self": ".",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    assert reached(Roots([root]), f"{root}{path}") == f"{root}{real}"


def test_sixty_nested_directories_are_reached(root: Path) -> None:
    path = root.joinpath(*["d"] * 60)
    path.mkdir(parents=True)
    (path / "f").touch()
    assert reached(Roots([root]), path / "f") == str(path / "f")


def test_as_many_links_as_the_system_follows_are_followed(root: Path) -> None:
    (root / "0").touch()
    for number in range(1, MAX_LINKS + 2):
        (root / str(number)).symlink_to(str(number - 1))
    assert reached(Roots([root]), root / str(MAX_LINKS)) == f"{root}/0"
    assert (root / str(MAX_LINKS)).exists()
    assert refused(Roots([root]), root / str(MAX_LINKS + 1)) == "too_many_symlinks"


def test_links_that_lead_round_and_round_end_before_they_take_long(root: Path) -> None:
    (root / "d").mkdir()
    (root / "f").touch()
    (root / "0").symlink_to("f")
    for number in range(1, MAX_LINKS):
        (root / str(number)).symlink_to("d/../" * 600 + str(number - 1))
    roots = Roots([root])
    assert reached(roots, root / "3") == f"{root}/f"
    assert (root / "30").exists()  # the kernel has more time
    assert refused(roots, root / "30") == "too_many_symlinks"
    # A path alone may be as long as its bytes allow.
    assert reached(roots, f"{root}/" + "./" * 1900 + "f") == f"{root}/f"


def test_a_root_reached_through_a_link_is_known_by_both_names(root: Path, tmp_path: Path) -> None:
    alias = tmp_path / "alias"
    alias.symlink_to(root)
    (root / "f").touch()
    (root / "l").symlink_to(alias / "f")
    roots = Roots([alias])
    for path in (alias / "f", root / "f", alias / "l", root / "l"):
        assert reached(roots, path) == f"{root}/f"
    assert refused(roots, alias / ".." / "f") == "path_traversal"


def test_a_root_keeps_the_place_it_had_when_it_was_lent(root: Path, tmp_path: Path) -> None:
    alias = tmp_path / "alias"
    alias.symlink_to(root)
    roots = Roots([alias])
    other = tmp_path / "other"
    other.mkdir()
    (other / "f").write_text(SECRET)
    alias.unlink()
    alias.symlink_to(other)
    with roots.locate(f"{alias}/f") as place:
        assert not place.exists
        assert place.path == f"{root}/f"


def test_an_ancestor_of_the_root_turned_into_a_link_ends_the_lending(root: Path) -> None:
    roots = Roots([root])
    moved = root.parent.with_name("moved")
    root.parent.rename(moved)
    root.parent.symlink_to(moved)
    with pytest.raises(_errors.InternalError) as caught:
        roots.locate(f"{root}/f")
    assert caught.value.data["reason"] == "io_error"


def test_links_between_two_roots_are_followed(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (two / "f").touch()
    (one / "l").symlink_to("../two/f")
    (one / "m").symlink_to(two)
    roots = Roots([one, two])
    assert reached(roots, one / "l") == str(two / "f")
    assert reached(roots, one / "m" / ".." / "one" / "m" / "f") == str(two / "f")
    assert refused(Roots([one]), one / "l") == "symlink_escape"


def test_out_of_an_inner_root_into_the_outer_one(root: Path) -> None:
    inner = root / "a" / "b"
    inner.mkdir(parents=True)
    (root / "a" / "f").touch()
    (root / "l").symlink_to(inner)
    (inner / "up").symlink_to("../f")
    alias = root.parent / "alias"
    alias.symlink_to(inner)
    for roots in (Roots([root, alias]), Roots([alias, root])):
        assert reached(roots, f"{root}/l/../f") == f"{root}/a/f"
        assert reached(roots, f"{alias}/up") == f"{root}/a/f"
    assert refused(Roots([alias]), f"{alias}/up") == "symlink_escape"


def test_the_whole_file_system_can_be_lent(root: Path) -> None:
    (root / "f").touch()
    (root / "l").symlink_to("/../.." + str(root / "f"))
    roots = Roots(["/"])
    assert reached(roots, root / "f") == f"{root}/f"
    assert reached(roots, root / "l") == f"{root}/f"
    assert reached(roots, "/") == "/"
    assert reached(roots, "/../..") == "/"


def test_a_relative_root_is_taken_from_the_working_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    roots = Roots(["."])
    monkeypatch.chdir("/")
    assert reached(roots, root / "f") == f"{root}/f"


def test_a_spelling_with_the_parent_of_a_link_names_what_the_system_means(
    root: Path, outside: Path
) -> None:
    (outside / "w").mkdir()
    (root / "x").mkdir()
    (root / "l").symlink_to(outside / "w")
    roots = Roots([f"{root}/l/../w"])  # by its text <root>/w, which is something else
    (root / "w").mkdir()
    assert reached(roots, outside / "w" / "f") == f"{outside}/w/f"
    assert refused(roots, root / "w" / "f") == "path_traversal"


@pytest.mark.parametrize(
    ("name", "error"), [("f", NotADirectoryError), ("none", FileNotFoundError)]
)
def test_a_root_that_is_no_directory_is_an_error_at_once(
    root: Path, name: str, error: type[OSError]
) -> None:
    (root / "f").touch()
    with pytest.raises(error) as caught:
        Roots([root / name])
    assert caught.value.filename == str(root / name)
    assert not Roots([root / name], skip_missing=True)


def test_a_system_without_directory_descriptors_lends_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "supports_dir_fd", frozenset[Any]())
    monkeypatch.setattr("sys.platform", "win32")
    why = "win32 has no directory descriptors: .* neither files nor terminals are lent"
    with pytest.raises(NotImplementedError, match=why):
        Roots([root])
    with pytest.raises(NotImplementedError, match=why):
        Files(root)


# --- places -------------------------------------------------------------------------------------


def test_a_place_tells_what_is_there_and_what_is_missing(root: Path) -> None:
    (root / "f").touch()
    roots = Roots([root])
    with roots.locate(f"{root}/f") as place:
        assert (place.exists, place.missing, place.leaf) == (True, [], b"f")
    with roots.locate(f"{root}/a/b/c") as place:
        assert (place.exists, place.missing, place.leaf) == (False, [b"a", b"b"], b"c")
        assert not place.wants_directory
    with roots.locate(f"{root}/a/") as place:
        assert (place.exists, place.missing, place.leaf) == (False, [], b"a")
        assert place.wants_directory
    with roots.locate(str(root)) as place:
        assert (place.exists, place.missing, place.leaf) == (True, [], None)
    place.close()


def test_missing_parents_are_made_and_entered(root: Path) -> None:
    roots = Roots([root])
    with roots.locate(f"{root}/a/b/c") as place:
        (root / "a").mkdir()  # somebody else is faster
        place.make_parents()
        assert os.fstat(place.directory).st_ino == (root / "a" / "b").stat().st_ino
        assert not place.missing


def test_a_link_put_where_a_parent_was_missing_is_not_followed(root: Path, outside: Path) -> None:
    with Roots([root]).locate(f"{root}/a/b/c") as place:
        (root / "a").symlink_to(outside)
        with pytest.raises(OSError, match=r"."):
            place.make_parents()
    assert os.listdir(outside) == ["secret.txt"]


def test_the_uri_of_a_missing_file_is_escaped() -> None:
    error = not_found("/a b/é")
    assert error.code == -32002
    assert error.data == {"uri": "file:///a%20b/%C3%A9"}


def test_no_permission_to_pass_is_a_failure_of_the_system(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "a").mkdir()
    real_open = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if path == b"f":
            raise PermissionError(13, "no")
        return real_open(path, flags, *args, **kwargs)

    roots = Roots([root])
    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(os, "supports_dir_fd", {refusing, os.readlink})
    with pytest.raises(_errors.InternalError) as caught:
        roots.locate(f"{root}/a/f")
    facts = {"reason": "io_error", "path": f"{root}/a/f", "errno": "EACCES"}
    assert caught.value.data == facts


# --- pins ---------------------------------------------------------------------------------------


class Ctx:
    def __init__(self, session_id: str, *roots: str | Path) -> None:
        self.session_id = session_id
        self.roots = [str(root) for root in roots]


def test_each_session_has_its_own_roots(tmp_path: Path) -> None:
    one, two, extra = tmp_path / "one", tmp_path / "two", tmp_path / "extra"
    for folder in (one, two, extra):
        folder.mkdir()
    pins = Pins(())
    assert reached(pins.roots(Ctx("1", one, extra)), extra / "f") == str(extra / "f")
    assert refused(pins.roots(Ctx("2", two)), one / "f") == "path_traversal"
    assert refused(pins.roots(Ctx("1", one)), extra / "f") == "path_traversal"


def test_sessions_that_are_not_known_have_no_roots_and_leave_nothing(tmp_path: Path) -> None:
    pins = Pins(())
    for number in range(1000):
        assert refused(pins.roots(Ctx(f"made up {number}")), tmp_path) == "path_traversal"
    assert not pins._sessions


def test_a_service_with_roots_of_its_own_ignores_those_of_sessions(tmp_path: Path) -> None:
    own, session = tmp_path / "own", tmp_path / "session"
    own.mkdir()
    session.mkdir()
    roots = Pins((own,)).roots(Ctx("1", session))
    assert refused(roots, session / "f") == "path_traversal"
    assert reached(roots, own / "f") == str(own / "f")


def test_a_session_stays_where_it_was_first_seen_until_it_is_released(tmp_path: Path) -> None:
    one, two, alias = tmp_path / "one", tmp_path / "two", tmp_path / "alias"
    one.mkdir()
    two.mkdir()
    alias.symlink_to(one)
    ctx = Ctx("1", alias, tmp_path / "none")
    pins = Pins(())
    assert reached(pins.roots(ctx), alias) == str(one)
    alias.unlink()
    alias.symlink_to(two)
    assert reached(pins.roots(ctx), alias) == str(one)
    pins.release("1")
    pins.release("1")
    assert reached(pins.roots(ctx), alias) == str(two)


# --- against the system, and against an attacker ------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=6)
TREES = st.lists(
    st.tuples(
        st.lists(NAMES, min_size=1, max_size=3),
        st.one_of(
            st.just("dir"),
            st.just("file"),
            STEPS.map("/".join),
            STEPS.map(lambda steps: "{root}/" + "/".join(steps)),
        ),
    ),
    max_size=8,
)


def plant(root: Path, tree: list[tuple[list[str], str]]) -> None:
    for names, kind in tree:
        path = root.joinpath(*names)
        with contextlib.suppress(OSError):  # a name that is taken, or leads through a file
            if kind == "dir":
                path.mkdir(parents=True)
            elif kind == "file":
                path.write_text("inside")
            else:
                path.symlink_to(kind.replace("{root}", str(root)))


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


@pytest.mark.covers("FF-42")
@settings(max_examples=300)
@given(tree=TREES, steps=STEPS)
def test_what_is_reached_is_what_the_system_means(
    trees: Path, tree: list[tuple[list[str], str]], steps: list[str]
) -> None:
    base = trees / os.urandom(8).hex()
    root = base.resolve() / "w"
    root.mkdir(parents=True)
    plant(root, tree)
    path = f"{root}/" + "/".join(steps)
    real = os.path.realpath(path)
    inside = real == str(root) or real.startswith(f"{root}/")
    try:
        with Roots([root]).locate(path) as place:
            assert place.path == real
            assert inside
            if place.exists:
                # By the real path: past names that do not exist, the system would stop.
                status = Path(real).stat()
                assert identity(place) == (status.st_dev, status.st_ino)
            elif not place.wants_directory:
                # Names that do not exist cancel `..` here; for the system they do not exist.
                assert not os.access(path, os.F_OK)
    except _errors.InvalidParams as error:
        why = reason(error)
        if why in {"too_many_symlinks", "not_a_directory"}:
            assert not os.access(path, os.F_OK)
        elif why == "path_traversal":
            # By its text or, past names that do not exist, on the way.
            text = os.path.normpath(path)
            assert not inside or not (text == str(root) or text.startswith(f"{root}/"))
        else:
            assert why == "symlink_escape"
            assert not inside


class Model:
    """What is inside, told from the plan of a tree alone: no system, nothing of `_confine`.

    `nodes` has everything by its absolute path: None for a directory, a text for a file, and a
    target, after "->", for a link. Outside the roots and what is above them, nothing is known.
    """

    def __init__(self, roots: list[str], nodes: dict[str, str | None]) -> None:
        self.roots = roots
        self.nodes = nodes

    def inside(self, path: str) -> bool:
        return any(path == root or path.startswith(f"{root}/") for root in self.roots)

    def passable(self, path: str) -> bool:
        """Whether a way may lead through here: a root, inside, or a directory above a root."""
        above = path.rstrip("/") + "/"
        return self.inside(path) or any(root.startswith(above) for root in self.roots)

    def resolve(self, path: str) -> str:
        """The real path, or "!" and a reason."""
        if not self.inside(os.path.normpath(path)):
            return "!path_traversal"
        here, links = "/", 0
        steps = path.split("/")
        gone = 0  # how many of the last names of `here` do not exist
        while steps:
            step = steps.pop(0)
            if step in {"", "."}:
                continue
            if step == "..":
                here = here.rpartition("/")[0] or "/"
                gone = max(gone - 1, 0)
                continue
            there = f"{here.rstrip('/')}/{step}"
            if not self.passable(there):
                return "!symlink_escape" if links else "!path_traversal"
            node = self.nodes.get(there, "missing")
            if gone or node == "missing":
                gone += self.inside(there)
            elif node is not None and node.startswith("->"):
                links += 1
                if links > MAX_LINKS:
                    return "!too_many_symlinks"
                target = node.removeprefix("->")
                steps = target.split("/") + steps
                if target.startswith("/"):
                    here = "/"
                continue
            elif node is not None and steps:
                return "!not_a_directory"
            here = there
        if not self.inside(here):
            return "!symlink_escape" if links else "!path_traversal"
        return here


FAR_STEPS = st.lists(
    st.sampled_from(["a", "b", "..", ".", "out", "w", "v", "../..", "../out", "../v"]),
    min_size=1,
    max_size=5,
)
FAR_TREES = st.lists(
    st.tuples(
        st.sampled_from(["w", "v", "out"]),
        st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=3),
        st.one_of(
            st.sampled_from(["dir", "file"]),
            FAR_STEPS.map("/".join),
            FAR_STEPS.map(lambda steps: "{base}/" + "/".join(steps)),
        ),
    ),
    max_size=10,
)


def plant_far(base: Path, tree: list[tuple[str, list[str], str]]) -> dict[str, str | None]:
    """Make what can be made of a plan, and say what that was."""
    nodes: dict[str, str | None] = {}
    for above in (base, *base.parents):
        nodes[str(above)] = None
    for name in ("w", "v", "out"):
        nodes[f"{base}/{name}"] = None
        (base / name).mkdir(parents=True)
    for top, names, kind in tree:
        path = f"{base}/{top}"
        for name in names[:-1]:
            path += f"/{name}"
            if nodes.setdefault(path, None) is not None:
                break
            Path(path).mkdir(exist_ok=True)
        else:
            path += f"/{names[-1]}"
            if path in nodes:
                continue
            if kind == "dir":
                Path(path).mkdir()
                nodes[path] = None
            elif kind == "file":
                Path(path).write_text(SECRET if top == "out" else "inside")
                nodes[path] = "file"
            else:
                target = kind.replace("{base}", str(base))
                Path(path).symlink_to(target)
                nodes[path] = f"->{target}"
    return nodes


@pytest.mark.covers("FF-42")
@settings(max_examples=400)
@given(tree=FAR_TREES, top=st.sampled_from(["w", "v", "out"]), steps=FAR_STEPS)
def test_of_a_tree_of_links_that_is_reached_which_a_model_says_is_inside(
    trees: Path, tree: list[tuple[str, list[str], str]], top: str, steps: list[str]
) -> None:
    base = trees.resolve() / os.urandom(8).hex()
    nodes = plant_far(base, tree)
    model = Model([f"{base}/w", f"{base}/v"], nodes)
    path = f"{base}/{top}/" + "/".join(steps)
    expected = model.resolve(path)
    try:
        with Roots([base / "w", base / "v"]).locate(path) as place:
            found = place.path
            assert place.exists == (found in nodes)
            if place.leaf is not None and place.exists:
                fd = os.open(place.leaf, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=place.directory)
                with os.fdopen(fd) as file:
                    assert file.read() == "inside"
    except _errors.InvalidParams as error:
        found = "!" + reason(error)
    assert found == expected


@pytest.mark.covers("FF-42")
def test_directories_swapped_for_links_never_lead_out(root: Path, outside: Path) -> None:
    """The attack that a check before an open loses; `naive` proves that it works."""
    (outside / "f").write_text(SECRET)
    (root / "d").mkdir()
    (root / "d" / "f").write_text("inside")
    (root / "l").symlink_to(outside)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            (root / "d").rename(root / "t")
            (root / "l").rename(root / "d")
            (root / "d").rename(root / "l")
            (root / "t").rename(root / "d")

    def naive(path: str) -> str:
        real = os.path.realpath(path)
        return Path(path).read_text() if real.startswith(f"{root}/") else ""

    def confined(roots: Roots, path: str) -> str:
        with roots.locate(path) as place:
            if place.leaf is None or not place.exists:
                return ""
            fd = os.open(place.leaf, os.O_NOFOLLOW, dir_fd=place.directory)
            with os.fdopen(fd) as file:
                return file.read()

    roots = Roots([root])
    seen: set[str] = set()
    lost = False
    attacker = threading.Thread(target=swap)
    attacker.start()
    try:
        rounds = 0
        # Longer, by other processes, and writes and starts as well: tests/attacks.
        while rounds < 300 or (not (lost and seen >= {"inside"}) and rounds < 200_000):
            rounds += 1
            with contextlib.suppress(OSError):
                lost = lost or naive(f"{root}/d/f") == SECRET
            with contextlib.suppress(_errors.RequestError, OSError):
                seen.add(confined(roots, f"{root}/d/f"))
    finally:
        stop.set()
        attacker.join()
    assert SECRET not in seen
    assert "inside" in seen
    assert lost, "the attack never succeeded, so this test proves nothing"

import os
from pathlib import Path

from modelserver.repository.fingerprint import TreeFingerprint, fingerprint_tree


def paths(tree: TreeFingerprint) -> list[str]:
    return [file.path for file in tree.files]


def test_lists_files_and_directories_sorted(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_text("12345")
    (tmp_path / "a").write_text("")
    tree = fingerprint_tree(tmp_path)
    assert paths(tree) == ["a", "b/", "b/file"]
    assert tree.files[2].size_bytes == 5
    assert tree.latest_mtime_ns == max((tmp_path / "a").stat().st_mtime_ns, (tmp_path / "b/file").stat().st_mtime_ns)


def test_hidden_files_and_python_caches_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    before = fingerprint_tree(tmp_path)
    for hidden in (".git", "__pycache__"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "x").write_text("x")
    (tmp_path / ".model.py.swp").write_text("x")
    assert fingerprint_tree(tmp_path) == before


def test_size_time_and_names_are_changes(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_text("1")
    states = {fingerprint_tree(tmp_path)}
    file.write_text("22")
    states.add(fingerprint_tree(tmp_path))
    os.utime(file, ns=(1, 1))
    states.add(fingerprint_tree(tmp_path))
    file.rename(tmp_path / "renamed")
    states.add(fingerprint_tree(tmp_path))
    (tmp_path / "empty").mkdir()
    states.add(fingerprint_tree(tmp_path))
    assert len(states) == 5


def test_links_are_followed_to_files_and_directories(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "weights").write_text("1")
    tree = tmp_path / "model"
    tree.mkdir()
    (tree / "data").symlink_to(target)
    (tree / "file").symlink_to(target / "weights")
    before = fingerprint_tree(tree)
    assert paths(before) == ["data/", "data/weights", "file"]
    (target / "weights").write_text("changed")
    assert fingerprint_tree(tree) != before


def test_the_swap_of_a_kubernetes_config_map_is_one_change(tmp_path: Path) -> None:
    for time_ns, version in enumerate(("old", "new")):
        (tmp_path / f"..{version}").mkdir()
        (tmp_path / f"..{version}" / "model.py").write_text(version)
        os.utime(tmp_path / f"..{version}" / "model.py", ns=(time_ns, time_ns))
    (tmp_path / "..data").symlink_to("..old")
    (tmp_path / "model.py").symlink_to("..data/model.py")
    before = fingerprint_tree(tmp_path)
    assert paths(before) == ["model.py"]
    (tmp_path / "..tmp").symlink_to("..new")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    assert fingerprint_tree(tmp_path) != before


def test_a_dangling_link_is_seen_and_its_mending_is_a_change(tmp_path: Path) -> None:
    (tmp_path / "weights").symlink_to(tmp_path / "missing")
    before = fingerprint_tree(tmp_path)
    assert before.files[0].size_bytes == -1
    (tmp_path / "missing").write_text("")
    assert fingerprint_tree(tmp_path, skip={"missing"}) != before


def test_a_link_to_itself_is_seen_like_a_dangling_one(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert fingerprint_tree(tmp_path).files[0].size_bytes == -1


def test_a_link_to_its_own_parent_does_not_recurse_for_ever(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert paths(fingerprint_tree(tmp_path)) == ["a/", "a/loop/"]


def test_containment_allows_new_files_only(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("1")
    before = fingerprint_tree(tmp_path)
    (tmp_path / "cache").write_text("2")
    assert before.is_still_in(tmp_path)
    (tmp_path / "model").write_text("changed")
    assert not before.is_still_in(tmp_path)
    (tmp_path / "model").unlink()
    assert not before.is_still_in(tmp_path)

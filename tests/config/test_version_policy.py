import pytest

from modelserver.config.pbtxt import parse_pbtxt
from modelserver.repository.layout import missing_versions, served_versions


@pytest.mark.parametrize(
    ("policy", "served", "missing"),
    [
        ("", (12,), ()),
        ("version_policy { }", (12,), ()),
        ("version_policy { latest { } }", (12,), ()),
        ("version_policy { latest { num_versions: 2 } }", (3, 12), ()),
        ("version_policy { latest { num_versions: 9 } }", (1, 3, 12), ()),
        ("version_policy { all { } }", (1, 3, 12), ()),
        ("version_policy { specific { versions: [ 12, 1, 1 ] } }", (1, 12), ()),
        ("version_policy { specific { versions: [ 7, 3, 2 ] } }", (3,), (2, 7)),
    ],
)
def test_served_versions(policy: str, served: tuple[int, ...], missing: tuple[int, ...]) -> None:
    version_policy = parse_pbtxt(policy).config.version_policy
    assert served_versions(version_policy, [3, 12, 1]) == served
    assert missing_versions(version_policy, [3, 12, 1]) == missing
    assert served_versions(version_policy, []) == ()

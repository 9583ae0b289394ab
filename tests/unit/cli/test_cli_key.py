"""``dynamo key add``: the key is printed once, the file gets its digest."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dynamo.cli import main as cli
from dynamo.http.api_keys import ApiKeys, Grants


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the variable names; it does not exist yet."""
    monkeypatch.setenv("DYN_API_KEY_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    return tmp_path / "keys"


def test_keys_are_added(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["key", "add", "alice"]) == 0
    first, note = capsys.readouterr()
    assert cli.main(["key", "add", "bob", "--role", "operator"]) == 0
    second, _ = capsys.readouterr()
    assert first.startswith("dyn-") and len(first.strip()) > 40 and first != second
    assert f"added alice (user) to {file}" in note and first.strip() not in note
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert first.strip() not in file.read_text()
    keys = ApiKeys(str(file))
    alice = keys.take({"authorization": f"Bearer {first.strip()}"})
    bob = keys.take({"x-api-key": second.strip()})
    assert alice is not None and (alice.name, alice.operator) == ("alice", False)
    assert bob is not None and (bob.name, bob.operator) == ("bob", True)


def test_a_removal_leaves_names_that_begin_alike(file: Path) -> None:
    for name in ("ann", "anna", "bob"):
        assert cli.main(["key", "add", name]) == 0
    assert cli.main(["key", "remove", "ann"]) == 0
    assert {one.name for one in ApiKeys(str(file)).entries.values()} == {"anna", "bob"}


def test_a_last_line_without_its_end(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("# keys")
    file.chmod(0o600)
    assert cli.main(["key", "add", "alice"]) == 0
    assert len(ApiKeys(str(file)).entries) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to do; try: dynamo key add NAME"),
        (["add"], "the name must be 1 to 64 letters"),
        (["add", "a:b"], "got 'a:b'"),
        (["add", "a", "--api-key-file", "/nowhere/keys"], "cannot write /nowhere/keys: No such"),
        (["add", "a", "--api-key-file", ""], "no deployment runs: name the file"),
        (["remove", "a:b"], "try: dynamo key remove NAME"),
        (["add", "taken"], "has a key of the name taken; choose another name"),
    ],
)
def test_what_is_wrong_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["key", "add", "taken"]) == 0
    capsys.readouterr()
    assert cli.main(["key", *words]) == 2
    out, shown = capsys.readouterr()
    assert message in shown and not out


def test_a_file_that_others_may_read(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("")
    file.chmod(0o644)
    assert cli.main(["key", "add", "a"]) == 2
    assert "run: chmod 600" in capsys.readouterr().err and not file.read_text()


def test_other_actions_and_roles(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["drop", "a"], ["add", "a", "--role", "admin"]):
        with pytest.raises(SystemExit):
            cli.main(["key", *words])
        assert "must be one of" in capsys.readouterr().err


def test_grants(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--grants", "all"], ["--grants", "routing", "--role", "operator"]):
        assert cli.main(["key", "add", "a", *words]) == 2
        assert "grants" in capsys.readouterr().err and not file.exists()
    assert cli.main(["key", "add", "a", "--grants", "strict-priority=1,classes"]) == 0
    (key,) = ApiKeys(str(file)).entries.values()
    assert key.grants == Grants(strict_priority=1, classes=True)


def test_keys_are_listed_and_removed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grants = ["carl", "--grants", "routing,strict-priority=0,priority=10"]
    for words in (["alice"], ["bob", "--role", "operator"], grants):
        assert cli.main(["key", "add", *words]) == 0
    file.write_text("# our keys\n" + file.read_text())
    capsys.readouterr()
    assert cli.main(["key", "list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["NAME", "ROLE", "GRANTS"],
        ["alice", "user", "-"],
        ["bob", "operator", "all"],
        ["carl", "user", "priority=10,routing"],
    ]
    assert cli.main(["key", "remove", "carol"]) == 2
    assert cli.main(["key", "remove", "carl"]) == 0
    assert cli.main(["key", "remove", "alice"]) == 0
    assert [one.name for one in ApiKeys(str(file)).entries.values()] == ["bob"]
    assert file.read_text().startswith("# our keys\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert cli.main(["key", "remove", "bob"]) == 2 and "only key" in capsys.readouterr().err
    assert len(ApiKeys(str(file)).entries) == 1

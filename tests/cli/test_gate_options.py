"""te-bench gate: what its options become before anything is measured."""

from typing import Any

import pytest
from in_process import Command

from te_bench.gate import revisions


class Asked(BaseException):  # the command line answers every Exception
    pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments that a gate on two revisions would have been measured with."""
    found: list[Any] = []

    def run(*arguments: Any, **options: Any) -> None:
        found.extend(arguments)
        raise Asked

    monkeypatch.setattr(revisions, "run", run)
    monkeypatch.setattr("te_bench.gate.checkouts.repository", lambda inside: inside)
    monkeypatch.setattr("te_bench.gate.checkouts.dirty", lambda root: False)
    return found


def test_paths_are_whole_for_revisions_work_in_folders_of_their_own(command, asked, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "rows").mkdir()
    given = {
        "": ("text:a.txt", f"text:{tmp_path}/a.txt"),
        "gpt2": ("text:/b.txt", "text:/b.txt"),
        "home": ("text:~/c.txt", f"text:{tmp_path}/home/c.txt"),
        "nobody": ("text:~no-such-user/d.txt", f"text:{tmp_path}/~no-such-user/d.txt"),
        "tiny": ("stdlib", "stdlib"),
        "folder": ("hf:rows", f"hf:{tmp_path}/rows"),
        "column": ("hf-stream:./rows:plain:text", f"hf-stream:{tmp_path}/rows:plain:text"),
        "hub": ("hf:wikitext:wikitext-2-raw-v1", "hf:wikitext:wikitext-2-raw-v1"),
    }
    data = [word for model, (spec, _) in given.items() for word in ("--data", f"{model}={spec}" if model else spec)]
    with pytest.raises(Asked):
        command("gate", "--base", "main", "--device", "cpu", "--cache", "tokens", *data)
    question, out, _ = asked
    assert out == tmp_path / "runs" / "gate"
    assert question.cache == tmp_path / "tokens"
    assert question.options["cache"] == str(tmp_path / "tokens")
    assert question.options["data"] == {model: whole for model, (_, whole) in given.items()}


@pytest.mark.parametrize("slower", ["1%,1%", "10%,5%,10.0 %"])
def test_a_slow_down_is_planted_once(command: Command, slower: str) -> None:
    done = command("gate", "--self-test", "--device", "cpu", "--slower", slower)
    assert (done.code, f"--slower {slower}: give each slow-down once" in done.err) == (2, True)


ON_CPU = ("--device", "cpu")
VERBS = [("gate", "--base", "main", *ON_CPU), ("advise", "--model", "tiny", *ON_CPU)]
VERBS += [("plan", "curves", *ON_CPU, "--data", "random")]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_a_budget_without_its_unit_is_refused_by_every_verb(command, asked, verb):
    done = command(*verb, "--budget", "10")
    assert (done.code, done.err) == (2, "te-bench: --budget 10: say the unit, 10min or 10s\n"), done
    for wrong in ("0s", "soon", "-1min", "nans", "10d"):
        done = command(*verb, f"--budget={wrong}")
        expected = f"te-bench: --budget {wrong}: give a time greater than 0 with its unit: 90s, 10min or 2h\n"
        assert (done.code, done.err) == (2, expected)
    assert not asked

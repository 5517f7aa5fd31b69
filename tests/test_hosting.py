"""What a host of the repository reads: its workflow runs what a person does, and its pages name what is there."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from tools.bounds import ENDS, USERS_EXTRAS, requirements

HOST = Path(__file__).parents[1] / ".github"


def test_the_workflow_runs_the_whole_check_on_every_python_that_the_package_names() -> None:
    # YAML 1.1 reads the key "on" as true.
    workflow = yaml.safe_load((HOST / "workflows/check.yml").read_text())
    assert {"push", "pull_request"} <= set(workflow[True])
    job, bounds = workflow["jobs"]["check"], workflow["jobs"]["bounds"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    project = tomllib.loads((HOST.parent / "pyproject.toml").read_text())["project"]
    named = [words.rpartition(" ")[2] for words in project["classifiers"] if "Python :: 3." in words]
    assert job["strategy"]["matrix"]["python"] == named
    assert f">={named[0]}" == project["requires-python"]
    assert [step["run"] for step in bounds["steps"] if "run" in step] == ["make test-${{ matrix.end }}"]
    pythons = {case["end"]: case["python"] for case in bounds["strategy"]["matrix"]["include"]}
    assert pythons == {"oldest": named[0], "newest": named[-1]}
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("end", ENDS)
def test_an_environment_of_either_end_takes_each_package_of_a_user_there(end: str) -> None:
    make = ["make", "-n", "-B", f"test-{end}"]
    commands = subprocess.run(make, cwd=HOST.parent, capture_output=True, text=True).stdout
    assert f"tools/bounds.py {end} > .venv-{end}/requirements.txt" in commands
    assert f".venv-{end}/bin/python -m pytest" in commands
    taken = {one.name: one.specifier for one in map(Requirement, requirements(end))}
    project = tomllib.loads((HOST.parent / "pyproject.toml").read_text())["project"]
    extras = [text for name in USERS_EXTRAS for text in project["optional-dependencies"][name]]
    for one in map(Requirement, [*project["dependencies"], *extras]):
        lowest = next(bound.version for bound in one.specifier if bound.operator == ">=")
        assert taken[one.name] == (SpecifierSet(f"=={lowest}") if end == "oldest" else one.specifier)


def test_what_is_installed_here_lies_within_the_bounds() -> None:
    lines = (HOST.parent / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    for one in map(Requirement, requirements("newest")):
        assert pinned[one.name] in one.specifier, one


def test_each_report_of_others_is_held_by_a_test_that_is_there() -> None:
    text = (HOST.parent / "docs/testing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w.-]+/[\w.-]+#\d+) \| .+ \| (`.+::.+`) \|$", text, re.MULTILINE)
    assert len({report for report, _ in rows}) == len(rows) >= 40
    for _, tests in rows:
        for file, test in (one.strip("`").split("::") for one in tests.split(", ")):
            assert f"\ndef {test}(" in (HOST.parent / "tests" / file).read_text(encoding="utf-8"), (file, test)


def test_templates_have_what_their_forms_need() -> None:
    forms = [yaml.safe_load(path.read_text()) for path in (HOST / "ISSUE_TEMPLATE").glob("*.yml")]
    with_fields = [form for form in forms if "body" in form]
    assert len(with_fields) == 2
    for form in with_fields:
        assert form["name"] and form["description"]
        assert len({field["id"] for field in form["body"]}) == len(form["body"])
        assert any(field.get("validations", {}).get("required") for field in form["body"])
    assert (HOST / "PULL_REQUEST_TEMPLATE.md").is_file()

"""What a host of the repository reads: its workflow runs the same check as a person does."""

import tomllib
from pathlib import Path

import yaml

HOST = Path(__file__).parents[1] / ".github"


def test_the_workflow_runs_the_whole_check_on_every_python_that_the_package_names() -> None:
    # YAML 1.1 reads the key "on" as true.
    workflow = yaml.safe_load((HOST / "workflows/check.yml").read_text())
    assert {"push", "pull_request"} <= set(workflow[True])
    job, oldest = workflow["jobs"]["check"], workflow["jobs"]["oldest"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    project = tomllib.loads((HOST.parent / "pyproject.toml").read_text())["project"]
    named = [words.rpartition(" ")[2] for words in project["classifiers"] if "Python :: 3." in words]
    assert job["strategy"]["matrix"]["python"] == named
    assert f">={named[0]}" == project["requires-python"]
    assert [step["run"] for step in oldest["steps"] if "run" in step] == ["make test-oldest"]
    assert [step["with"]["python-version"] for step in oldest["steps"] if "with" in step] == named[:1]
    assert workflow["permissions"] == {"contents": "read"}


def test_templates_have_what_their_forms_need() -> None:
    forms = [yaml.safe_load(path.read_text()) for path in (HOST / "ISSUE_TEMPLATE").glob("*.yml")]
    with_fields = [form for form in forms if "body" in form]
    assert len(with_fields) == 2
    for form in with_fields:
        assert form["name"] and form["description"]
        assert len({field["id"] for field in form["body"]}) == len(form["body"])
        assert any(field.get("validations", {}).get("required") for field in form["body"])
    assert (HOST / "PULL_REQUEST_TEMPLATE.md").is_file()

"""The report's data files."""

import json

from tests.tools.compare.conftest import NAMES


def test_the_json_holds_everything(report):
    content = json.loads((report[0] / "report.json").read_text())
    assert len(content["runs"]) == 34 and len(content["search"]["trials"]) == 18
    run = content["runs"][0]
    assert run["series"]["eval/accuracy"][0] == [0, 5, 10]
    base = content["settings"][0]
    assert base["rows"][0]["measures"]["final_accuracy"]["count"] == 2
    assert set(base["differences"]["final_accuracy"]) == {*NAMES} - {"grpo"}

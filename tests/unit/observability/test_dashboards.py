"""deploy/grafana: each query names metrics and labels that exist, and no panel covers another."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from boxes import binary, needs
from metric_specs import AnySpec, declarations, kind_of
from promql import Use, uses

from dynamo.planner.reports import metrics as planner

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy/grafana"
ADDED = {"job", "instance", "le", "namespace"}  # by Prometheus and its configuration
FOREIGN = {
    "up": {"job", "instance", "namespace"},
    "process_cpu_seconds_total": {"job", "instance"},
}
WORKERS = {  # the mocker and vLLM workers add the name of their model to these
    "dynamo_component_requests_total",
    "dynamo_component_cancellation_total",
    "dynamo_component_errors_total",
    "dynamo_component_request_duration_seconds",
}
UPSTREAM = [
    [*line.split("\t"), ""][:4]
    for line in Path(__file__).with_name("dynamo_dashboards.tsv").read_text().splitlines()
    if not line.startswith("#")
]
NAMES = ("frontend", "planner", "router", "workers")


@functools.cache
def specs() -> dict[str, AnySpec]:
    return {spec.name: spec for spec in [*declarations(), *planner._GAUGES]}


def dashboard(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def known(use: Use) -> set[str]:
    """The labels that a metric may have. KeyError for a metric that does not exist."""
    if use.metric in FOREIGN:
        return FOREIGN[use.metric]
    name = use.metric
    if name not in specs():
        name, _, suffix = use.metric.rpartition("_")
        assert suffix in ("bucket", "sum", "count"), f"no metric {use.metric}"
        assert kind_of(specs()[name]) == "histogram", f"{name} is no histogram"
    else:
        assert kind_of(specs()[name]) != "histogram", f"{name} needs _bucket, _sum or _count"
    return set(specs()[name].labels) | ADDED


def queries(name: str) -> Iterator[tuple[str, str, str]]:
    """(panel, legend, expression) of each query."""
    for panel in dashboard(name)["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["legendFormat"], target["expr"]


def check(expression: str) -> None:
    found = uses(expression)
    assert found, f"no metric in {expression}"
    for use in found:
        assert use.labels <= known(use), f"{use.metric} has no {use.labels - known(use)}"


@pytest.mark.parametrize("name", NAMES)
def test_metrics_and_labels_exist(name: str) -> None:
    rows = list(queries(name))
    assert len(rows) > 12
    for panel, legend, expression in rows:
        check(expression)
        grouped = {
            one for text in re.findall(r"by \(([^)]*)\)", expression) for one in text.split(", ")
        }
        shown = set(re.findall(r"{{(\w+)}}", legend))
        plain = " by " not in expression  # then every label of the metric is there
        allowed = {label for use in uses(expression) for label in known(use)} if plain else grouped
        assert shown <= allowed, f"{panel}: {legend!r} of {expression}"
        opened = [sum(expression.count(one) for one in pair) for pair in ("()", "{}", "[]")]
        assert not any(count % 2 for count in opened), expression


@pytest.mark.parametrize("name", NAMES)
def test_variables_list_labels_that_exist(name: str) -> None:
    made = dashboard(name)
    variables = [one for one in made["templating"]["list"] if one["type"] == "query"]
    for one in variables:
        query = one["query"]["query"]
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        check(f'{metric}{{{label}="x"}}')
    text = json.dumps([panel.get("targets", []) for panel in made["panels"]])
    used = set(re.findall(r"\$(\w+)", text)) - {"__rate_interval", "datasource"}
    assert used == {one["name"] for one in variables}


@pytest.mark.parametrize("name", NAMES)
def test_panels_neither_overlap_nor_leave_the_grid(name: str) -> None:
    panels = dashboard(name)["panels"]
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns = range(place["x"], place["x"] + place["w"])
        taken = set(itertools.product(columns, range(place["y"], place["y"] + place["h"])))
        assert not cells & taken, panel["title"]
        cells |= taken
    assert len({panel["id"] for panel in panels}) == len(panels)
    rows = [panel for panel in panels if panel["type"] == "row"]
    required = {"id", "type", "title", "collapsed", "panels", "gridPos"}  # by Grafana's schema
    assert rows and all(row.keys() == required for row in rows)


def test_the_files_are_those_that_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboards", FOLDER / "make_dashboards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.documents()) == set(NAMES)
    for name, document in module.documents().items():
        assert document == dashboard(name), "run: python deploy/grafana/make_dashboards.py"
    assert module.alerts() == (FOLDER / "alerts.yml").read_text(), "run it"


def test_alerts_name_metrics_that_exist_and_say_what_to_do() -> None:
    rules = [
        rule
        for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    assert len(rules) >= 5
    for rule in rules:
        check(rule["expr"])
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert shown <= {label for use in uses(rule["expr"]) for label in known(use)}


def test_the_prometheus_config_has_the_jobs_that_queries_name() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert set(config) == {"global", "rule_files", "scrape_configs"}
    jobs = {one["job_name"] for one in config["scrape_configs"]}
    texts = [expression for name in NAMES for _, _, expression in queries(name)]
    texts.append((FOLDER / "alerts.yml").read_text())
    named = {job for text in texts for job in re.findall(r'job="([^"]+)"', text)}
    assert named and named <= jobs
    for file in config["rule_files"]:
        assert (FOLDER / file).exists()
    for job in config["scrape_configs"]:
        followed = [file for one in job.get("file_sd_configs", ()) for file in one["files"]]
        assert not [file for file in followed if (FOLDER / file).exists()]  # not a dashboard
        assert set(job) <= {"job_name", "static_configs", "file_sd_configs"}


@pytest.mark.parametrize("row", UPSTREAM, ids=lambda row: f"{row[0]}-{row[1]}")
def test_dashboards_of_dynamo_show_data(row: list[str]) -> None:
    """Each metric and label of their queries is here, or the documentation says why not."""
    _, metric, labels, why = row
    named = set(filter(None, labels.split(",")))
    found = set(specs()[metric].labels) if metric in specs() else None
    if found is not None and metric in WORKERS:
        found |= {"model"}
    assert (found is not None and named <= found) == (not why)
    if why:
        assert f"`{metric}`" in (ROOT / "docs/observability.md").read_text()


@needs("promtool", "prometheus")
@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", str(FOLDER / "prometheus.yml")),
        ("test", "rules", str(Path(__file__).with_name("alerts_test.yml"))),
    ],
    ids=lambda words: words[0],
)
def test_promtool_accepts_config_and_rules(words: tuple[str, ...]) -> None:
    promtool = binary("promtool")
    assert promtool is not None
    done = subprocess.run([promtool, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case_that_fires() -> None:
    cases = yaml.safe_load(Path(__file__).with_name("alerts_test.yml").read_text())["tests"]
    rows = [row for case in cases for row in case["alert_rule_test"]]
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    fired = {row["alertname"] for row in rows if row.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in rules}


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("sum (rate(dynamo_frontend_requests_totals[5m]))", "no metric"),
        ('dynamo_frontend_requests_total{moddel="a"}', "has no"),
        ("sum by (worker) (dynamo_frontend_active_requests)", "has no"),
        ("rate(dynamo_frontend_request_duration_seconds[5m])", "needs _bucket"),
    ],
)
def test_wrong_queries_are_found(expression: str, reason: str) -> None:
    with pytest.raises((AssertionError, KeyError), match=reason):
        check(expression)

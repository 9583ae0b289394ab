"""Write dashboards and alerts beside this file: ``python deploy/grafana/make_dashboards.py``.

``panels.yaml`` has what a person decides: rows, panels, queries. The layout, and all that Grafana
repeats in its JSON, is added here. ``alert_queries.yaml`` has the queries of alerts; the rules of
``dynamo.doctor.alerts`` add durations and limits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from dynamo.doctor.alerts import FAILING_SHARE, RULES
from dynamo.doctor.deployment import MOST_ERROR

__all__ = ["alerts", "documents", "main"]

HERE = Path(__file__).parent
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SIZES = {"timeseries": (8, 8), "stat": (4, 4)}  # width, height
LIMITS = {"FAILING_SHARE": FAILING_SHARE, "MOST_ERROR": MOST_ERROR}


def documents() -> dict[str, dict[str, Any]]:
    """Return the JSON of each dashboard, by its file name without suffix."""
    given = yaml.safe_load((HERE / "panels.yaml").read_text())
    return {name: _dashboard(name, spec) for name, spec in given.items()}


def main() -> None:
    """Write all of them, and the alerts."""
    (HERE / "alerts.yml").write_text(alerts())
    for name, document in documents().items():
        (HERE / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def alerts() -> str:
    """Return ``alerts.yml``, the rules of Prometheus."""
    durations = {rule.name: f"{rule.for_s / 60:g}m" for rule in RULES}
    rules = []
    for name, spec in yaml.safe_load((HERE / "alert_queries.yaml").read_text()).items():
        expression = spec["expr"]
        for limit, value in LIMITS.items():
            expression = expression.replace(limit, str(value))
        rules.append(
            {
                "alert": name,
                "expr": expression,
                "for": spec.get("for") or durations[name],
                "labels": {"severity": spec["severity"]},
                "annotations": {"summary": spec["summary"]},
            }
        )
    document = {"groups": [{"name": "dynamo", "rules": rules}]}
    head = "# Written by make_dashboards.py from alert_queries.yaml and dynamo/doctor/alerts.py.\n"
    return head + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)


def _dashboard(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    variables = [_variable(*one) for one in spec["variables"].items()]
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "source"}
    return {
        "uid": f"dynamo-{name}",
        "title": spec["title"],
        "tags": ["dynamo"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [source, *variables]},
        "annotations": {"list": []},
        "panels": _panels(spec["rows"]),
    }


def _panels(rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Place the panels of each row from left to right, below its title."""
    made: list[dict[str, Any]] = []
    y = 0
    for title, row in rows.items():
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        heading = {
            "type": "row",
            "collapsed": False,
            "title": title,
            "gridPos": place,
            "panels": [],
        }
        made.append({"id": len(made) + 1, **heading})
        x, y, row_height = 0, y + 1, 0
        for spec in row:
            kind = spec.get("kind", "timeseries")
            width, height = SIZES[kind]
            width = spec.get("width", width)
            if x + width > COLUMNS:
                x, y, row_height = 0, y + row_height, 0
            place = {"x": x, "y": y, "w": width, "h": height}
            made.append({"id": len(made) + 1, "type": kind, "gridPos": place, **_panel(spec)})
            x, row_height = x + width, max(row_height, height)
        y += row_height
    return made


def _panel(spec: dict[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": spec["unit"], "min": 0}
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if spec.get("kind") == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    else:
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never"}
    return {
        "title": spec["title"],
        "description": spec.get("text", ""),
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(65 + index),
                "datasource": DATASOURCE,
                "legendFormat": legend,
                "expr": expr,
            }
            for index, (legend, expr) in enumerate(spec["queries"].items())
        ],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "sort": 1,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


if __name__ == "__main__":
    main()

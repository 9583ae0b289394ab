"""Dynamo's own examples of its Python bindings, unchanged, as processes.

``DYNAMO_EXAMPLES`` names the directory ``lib/bindings/python/examples`` of a checkout of Dynamo;
without it these tests skip.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from deployment import ROOT, Deployment

from dynamo.runtime.requests import Annotated

EXAMPLES = {
    "pipeline": (("backend", "middle", "frontend"), "pipeline"),
    "typed": (("server",), "client"),
    "error_handling": (("server",), "client"),
}
"""The modules that serve, and the one that calls them."""
PRINTED = {
    "pipeline": "hello from front-mid-back",
    "typed": "hello world",
    "error_handling": "hello hello earth",
}
ITEM = re.compile(r"^Annotated\(data='(.)', event=None, comment=\[\], id=None\)$|^(.)$", re.M)


def test_an_item_prints_as_in_dynamo() -> None:
    item = Annotated("a", {"event": "delta", "comment": ["x"], "id": "7"})
    assert repr(item) == "Annotated(data='a', event='delta', comment=['x'], id='7')"
    assert repr(Annotated({"n": 1})) == "Annotated(data={'n': 1}, event=None, comment=[], id=None)"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(deployment: Deployment, name: str) -> None:
    given = os.environ.get("DYNAMO_EXAMPLES")
    if not given:
        pytest.skip("DYNAMO_EXAMPLES is not set: name lib/bindings/python/examples of a checkout")
    path = os.pathsep.join((str(Path(given) / name), str(ROOT)))
    servers, client = EXAMPLES[name]

    def start(module: str) -> Path:
        deployment.start(module, PYTHONPATH=path, PYTHONSAFEPATH="1", DYN_REQUEST_PLANE="tcp")
        return deployment.logs / f"{len(deployment.processes) - 1}-{module}.log"

    logs = [start(module) for module in servers]
    deployment.until(lambda: all("Successfully registered" in log.read_text() for log in logs))
    printed = start(client)
    assert deployment.processes[-1].wait(60) == 0, deployment.tail()
    found = "".join(data or plain for data, plain in ITEM.findall(printed.read_text()))
    assert found == PRINTED[name]

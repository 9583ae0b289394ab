"""Names of models that cannot be printed on one line are refused, wherever they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.attach.settings import AttachSettings
from dynamo.config import from_env
from dynamo.config.worker import WorkerSettings
from dynamo.errors import ConfigError, InvalidArgument
from dynamo.llm.model_source import NamedModel
from dynamo.llm.register import encode_card
from dynamo.protocols.control import ModelCard, decode_card
from dynamo.serve.graph.graph import parse_graph
from dynamo.setup.new_graph import InstalledEngine, NewGraph
from dynamo.setup.service_checks import check_services
from dynamo.vllm.arguments import parse_loras

MODEL = Path(__file__).resolve().parents[3] / "examples/model"
BAD = ["a\nb", "a\r", "\x1b[2Ja", "a\x00", "a\u2028b", "a\x85", "a\x7f", "\ud800"]
WHY = "has a line break or another character that cannot be printed; choose another name"


@pytest.mark.parametrize("name", BAD)
def test_a_name_of_several_lines_is_refused(name: str, tmp_path: Path) -> None:
    for group in (WorkerSettings, AttachSettings):
        given: list[dict[str, Any]] = [{"model_name": name}, {"model_path": f"/models/{name}"}]
        for values in given:
            if group is WorkerSettings or "model_name" in values:
                with pytest.raises(ConfigError, match=WHY):
                    from_env(group, **values)
    with pytest.raises(ConfigError, match=f"--lora-modules: .* {WHY}"):
        parse_loras([f"{name}={tmp_path}"], "m")
    source = NamedModel("directory", str(MODEL), name)
    with pytest.raises(ConfigError, match=f"{WHY}: --name NAME"):
        NewGraph(model=source, engine=InstalledEngine("mocker", (), "dynamo")).text()


@pytest.mark.parametrize("field", ["display_name", "lora_name", "model_aliases"])
def test_a_card_with_such_a_name_is_not_published_and_not_read(field: str) -> None:
    """Of workers that users write, and of workers of other versions."""
    card = ModelCard("m", "m", "m", "ns", "c", "e", 7)
    setattr(card, field, ["a\nb"] if field == "model_aliases" else "a\nb")
    with pytest.raises(InvalidArgument, match=WHY):
        encode_card(card)
    with pytest.raises(ValueError, match=WHY):
        decode_card(msgspec.json.encode(card))


def test_a_graph_names_the_service(tmp_path: Path) -> None:
    text = f'W: {{run: dynamo.mocker, model-path: "{MODEL}", served-model-name: "a\\nb"}}\n'
    with pytest.raises(ConfigError, match=rf"W.*served-model-name .*{WHY}"):
        check_services(parse_graph(text, "g.yaml"), tmp_path, {})


@pytest.mark.parametrize("name", ["m", "-m", "org/name:tag", "模型", "Modèle 7B", "a,b"])
def test_other_names_are_taken(name: str) -> None:
    assert from_env(WorkerSettings, model_name=name).model_name == name

"""The JSON Schema says what loading does."""

from __future__ import annotations

import json

from fleetfix.actions import KINDS
from fleetfix.schema import schema
from fleetfix.steps import CONTROLS


def test_the_schema_knows_every_action_and_every_control() -> None:
    step = schema()["properties"]["steps"]["items"]
    assert set(step["properties"]) == {*KINDS, *CONTROLS}
    assert len(step["oneOf"]) == len(KINDS)


def test_the_schema_is_json_and_every_reference_in_it_leads_somewhere() -> None:
    text = json.dumps(schema())
    made = json.loads(text)
    references = {part.split('"')[0] for part in text.split('"$ref": "#/$defs/')[1:]}
    assert references <= set(made["$defs"])

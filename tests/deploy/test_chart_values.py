"""The chart's values, without helm: presets fit the schema, and mistakes do not."""

import copy
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from core.model_settings import ModelSettings
from tests.deploy.conftest import CHART, PRESETS, TWO_MODELS

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def _merged(below: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(below)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def _mistakes(schema: dict[str, Any], values: dict[str, Any]) -> list[str]:
    return [error.message for error in Draft7Validator(schema).iter_errors(values)]


def test_the_schema_is_one(schema):
    Draft7Validator.check_schema(schema)


@pytest.mark.parametrize("preset", ["", *PRESETS, TWO_MODELS])
def test_defaults_and_presets_fit_the_schema(schema, preset: str):
    over = yaml.safe_load((CHART / f"values-{preset}.yaml").read_text()) if preset else {}
    assert _mistakes(schema, _merged(VALUES, over)) == []


@pytest.mark.parametrize(("preset", "prefill", "decode"), [("1p3d", 1, 3), ("2p2d", 2, 2)])
def test_a_preset_takes_four_gpus(preset: str, prefill: int, decode: int):
    values = yaml.safe_load((CHART / f"values-{preset}.yaml").read_text())
    for pool, replicas in (("prefill", prefill), ("decode", decode)):
        assert values[pool]["replicas"] == replicas
        assert values[pool]["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize(
    ("over", "told"),
    [
        ({"gatway": {}}, "'gatway' was unexpected"),
        ({"gateway": {"replcas": 3}}, "'replcas' was unexpected"),
        ({"gateway": {"replicas": 0}}, "0 is less than the minimum of 1"),
        ({"prefill": {"replicas": "two"}}, "'two' is not of type 'integer'"),
        ({"decode": {"replicas": 0}}, "0 is less than the minimum of 1"),
        ({"secret": {"existingSecret": ""}}, "'' should be non-empty"),
        ({"decode": {"resources": {"limits": {"memory": "lots"}}}}, "'lots' does not match"),
        ({"telemetry": {"otlpEndpoint": "collector"}}, "'collector' does not match"),
        ({"settings": {"engine": {"dtype": {"a": 1}}}}, "is not valid under any"),
        ({"ray": {"kind": "RayJob"}}, "'RayJob' is not one of"),
        ({"models": [{"name": "a"}]}, "'model' is a required property"),
        ({"models": [{"name": "A b", "model": "m"}]}, "'A b' does not match"),
        ({"models": [{"name": "a", "model": "m", "decode": {"replica": 1}}]}, "'replica' was unex"),
    ],
)
def test_a_mistake_is_refused_in_words_that_name_it(schema, over: dict[str, Any], told: str):
    assert any(told in message for message in _mistakes(schema, _merged(VALUES, over)))


def test_every_value_is_in_the_schema_and_every_one_of_the_schema_has_a_default(schema):
    def same(values: dict[str, Any], part: dict[str, Any], where: str) -> None:
        if "$ref" in part:
            part = schema["definitions"][part["$ref"].rpartition("/")[2]]
        if "allOf" in part:
            part = schema["definitions"]["workers"]
        if "properties" not in part:
            return
        assert set(values) == set(part["properties"]) - {"global"}, where
        for key, value in values.items():
            if isinstance(value, dict):
                same(value, part["properties"][key], f"{where}.{key}")

    same(VALUES, schema, "values")


def test_a_model_of_the_chart_may_have_every_setting_that_a_model_may_have(schema):
    chart = schema["definitions"]["model"]["properties"]
    # Those that the chart names in its own way.
    renamed = {"model", "served_name", "aliases", "prefill_workers", "decode_workers"}
    assert set(chart["settings"]["properties"]) == set(ModelSettings.model_fields) - renamed

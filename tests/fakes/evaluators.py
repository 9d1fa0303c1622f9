"""Evaluators as the harness makes them."""

from collections.abc import Mapping
from typing import Any

from harness.accuracy.metrics.base import evaluator_params
from harness.plugins import registry


def make_evaluator(use: str, params: Mapping[str, Any], **supplied: Any) -> Any:
    return registry.create_plugin("evaluator", use, evaluator_params(use, params, supplied))

"""What a loaded model registers."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from dynamo.common.discovery import MAX_CARD_BYTES
from dynamo.common.errors import InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.repository.models.loaded import make_card
from tests.support.repositories import X_TO_Y


def test_a_configuration_that_could_not_be_registered_is_refused_with_its_model(tmp_path: Path) -> None:
    """Not by the registration: that of all other models of the worker would fail as well."""
    config = text_format.Parse(X_TO_Y, ModelConfig(name="large", backend="python"))
    assert make_card(config, tmp_path, ("1",)).name == "large"
    config.parameters["text"].string_value = "x" * MAX_CARD_BYTES
    with pytest.raises(InvalidRequest, match=r"the card of model 'large' has \d+ bytes; at most"):
        make_card(config, tmp_path, ("1",))

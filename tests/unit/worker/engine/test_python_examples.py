from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import from_numpy, to_numpy
from dynamo.protos.inference_pb2 import ModelInferRequest
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.python import PythonEngine


async def infer(engine: PythonEngine, inputs: dict[str, Any], **parameters: int) -> list[dict[str, Any]]:
    head = ModelInferRequest()
    raws = []
    for name, array in inputs.items():
        datatype, raw = from_numpy(array)
        head.inputs.add(name=name, datatype=datatype, shape=array.shape)
        raws.append(raw)
    for key, value in parameters.items():
        head.parameters[key].int64_param = value
    return [
        {o.name: to_numpy(raw, o.datatype, list(o.shape)).tolist() for o, raw in zip(a.head.outputs, a.raw_outputs, strict=True)}
        async for a in engine.infer(TensorRequest.build(head, raws), Context("r", version="1"))
    ]


async def test_the_classifier_knows_digits_that_are_noisy_dim_and_off_their_place() -> None:
    engine = PythonEngine.load("examples/classifier.py:Classifier")
    [card] = await engine.start()
    drawn = sys.modules["dynamo_model_classifier"].prototypes()
    noise = np.random.default_rng(7).normal(0, 0.2, drawn.shape)
    for images in (drawn, drawn * 30 + 100, drawn + noise, np.roll(drawn, 1, axis=1), np.roll(drawn, -1, axis=2)):
        [response] = await infer(engine, {"image": images.astype(np.float32)})
        assert response["digit"] == list(range(10))
        assert response["name"][3] == b"three"
        np.testing.assert_allclose(np.sum(response["probability"], axis=1), 1, rtol=1e-5)
    assert card.outputs[0].labels[9] == "nine"
    await engine.close()


async def test_an_image_without_any_contrast_is_every_digit_equally() -> None:
    engine = PythonEngine.load("examples/classifier.py:Classifier")
    await engine.start()
    [response] = await infer(engine, {"image": np.full((1, 8, 8), 3, np.float32)})
    np.testing.assert_allclose(response["probability"], [[0.1] * 10], rtol=1e-5)
    await engine.close()


async def test_the_countdown_gives_one_response_per_number() -> None:
    engine = PythonEngine.load("examples/countdown.py:Countdown")
    [card] = await engine.start()
    assert (card.decoupled, card.backend, bool(card.model_config)) == (True, "python", True)
    responses = await infer(engine, {"start": np.array([3], np.int32)}, pause_ms=1)
    assert [(response["left"], response["done"]) for response in responses] == [
        ([3], [False]),
        ([2], [False]),
        ([1], [False]),
        ([0], [True]),
    ]
    with pytest.raises(InvalidRequest, match="between 0 and 1000"):
        await infer(engine, {"start": np.array([-1], np.int32)})
    await engine.close()


async def test_words_gives_one_response_per_word_and_none_for_no_words() -> None:
    engine = PythonEngine.load("examples/countdown.py:Words")
    await engine.start()
    assert [response["word"] for response in await infer(engine, {"text": np.array([b"a b"], object)})] == [[b"a"], [b"b"]]
    assert await infer(engine, {"text": np.array([b""], object)}) == []
    await engine.close()

"""Recognises handwritten-like digits of 8 × 8 pixels, in numpy alone.

Each digit has a prototype, drawn below. The scores of an image are its correlations with the prototypes, whatever its
brightness and contrast are, tried at nine positions so that a digit may sit a pixel off its place; `probability` is their
softmax. `probability` carries class names, so a client may request the best classes instead of numbers.

    dynamo-worker --model examples/classifier.py:Classifier
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamo.worker.engine.python import Batching, Tensor

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SHARPNESS = 12.0
"""How much better the best prototype must fit before the others hardly count."""

DRAWINGS = """
..####.. ...##... ..####.. ..####.. ....##.. .######. ..####.. .######. ..####.. ..####..
.##..##. ..###... .##..##. .##..##. ...###.. .##..... .##..... .....##. .##..##. .##..##.
.##..##. ...##... .....##. .....##. ..#.##.. .##..... .##..... ....##.. .##..##. .##..##.
.##..##. ...##... ....##.. ...###.. .#..##.. .#####.. .#####.. ....##.. ..####.. ..#####.
.##..##. ...##... ...##... .....##. .######. .....##. .##..##. ...##... .##..##. .....##.
.##..##. ...##... ..##.... .....##. ....##.. .....##. .##..##. ...##... .##..##. .....##.
.##..##. ...##... .##..... .##..##. ....##.. .##..##. .##..##. ..##.... .##..##. ....##..
..####.. ..####.. .######. ..####.. ....##.. ..####.. ..####.. ..##.... ..####.. ..###...
"""


def prototypes() -> NDArray[np.float32]:
    """The ten drawn digits, [10, 8, 8], 1.0 where there is ink."""
    rows = [line.split() for line in DRAWINGS.strip().splitlines()]
    ink = [[[character == "#" for character in row[digit]] for row in rows] for digit in range(10)]
    return np.array(ink, np.float32)


def normalised(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of pixels with mean 0 and length 1; a row without any contrast becomes 0."""
    centred = pixels - pixels.mean(axis=1, keepdims=True)
    length = np.linalg.norm(centred, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = np.divide(centred, length, out=np.zeros_like(centred), where=length > 1e-6)
    return scaled


class Classifier:
    """One image or many at once: `image` [n, 8, 8] of any brightness, to ten probabilities and the best digit."""

    inputs = {"image": Tensor("FP32", [-1, 8, 8])}  # noqa: RUF012
    outputs = {  # noqa: RUF012
        "probability": Tensor("FP32", [-1, 10], labels=NAMES),
        "digit": Tensor("INT64", [-1]),
        "name": Tensor("BYTES", [-1]),
    }
    max_batch_size = 64
    batching = Batching(max_queue_delay_us=500)

    def load(self) -> None:
        drawn = prototypes()
        shifts = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
        shifted = [np.roll(drawn, shift, axis=(1, 2)).reshape(10, 64) for shift in shifts]
        self.weights = normalised(np.concatenate(shifted)).T  # [64, 9 positions of 10 digits]

    def infer(self, image: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        fit = normalised(image.reshape(len(image), 64)) @ self.weights
        scores = fit.reshape(len(image), 9, 10).max(axis=1) * SHARPNESS
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        probability = odds / odds.sum(axis=1, keepdims=True)
        digit = probability.argmax(axis=1)
        return {"probability": probability, "digit": digit, "name": np.array([NAMES[best] for best in digit], object)}

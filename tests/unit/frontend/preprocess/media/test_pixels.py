"""How large images are, by their headers."""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from dynamo.common.config import load
from dynamo.common.errors import InvalidRequest
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.preprocess.media.pixels import PixelBudget, size_of
from tests.support.pictures import huge_png, png_chunk

FRAME = b"\x2c" + struct.pack("<HHHH", 1, 2, 60_000, 50_000)


def encoded(kind: str, **settings: Any) -> bytes:
    file = BytesIO()
    Image.new("RGB", (37, 21), "red").save(file, kind, **settings)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("PNG", {}),
        ("JPEG", {"icc_profile": bytes(100_000), "comment": b"\xff\xc0" * 9}),
        ("JPEG", {"progressive": True}),
        ("GIF", {"comment": b"," * 999}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0"}),
        ("BMP", {}),
    ],
)
def test_the_size_of_an_image_is_read_without_its_pixels(kind: str, settings: dict[str, Any]) -> None:
    image = encoded(kind, **settings)
    assert size_of(image) == (37, 21)
    for end in range(0, min(len(image), 2000), 7):
        assert size_of(image[:end]) in ((0, 0), (37, 21)), "a header that is cut says nothing, or the truth"


@pytest.mark.parametrize(
    ("image", "size"),
    [
        (huge_png(), (100_000, 100_000)),
        (huge_png(before=png_chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))), (100_000, 100_000)),
        (b"\xff\xd8 \xff\xff\xd0\xff\xe0\0\4ab\xff\xc2\0\x0b\x08" + struct.pack(">HH", 65_535, 65_000) + b"\3", (65_000, 65_535)),
        (b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6) + b"\0!\xf9\4abcd\0" + FRAME, (60_001, 50_002)),
        (b"BM" + bytes(12) + struct.pack("<Iii", 40, 70_000, -80_000), (70_000, 80_000)),
        (b"BM" + bytes(12) + struct.pack("<IHH", 12, 7, 8), (7, 8)),
        (b"no image", (0, 0)),
        (b"", (0, 0)),
    ],
)
def test_sizes_are_found_where_decoders_look(image: bytes, size: tuple[int, int]) -> None:
    assert size_of(image) == size


@pytest.mark.parametrize(
    "image",
    [
        b"\x89PNG\r\n\x1a\n" + png_chunk(b"tEXt", b"") * 66_000,
        b"\xff\xd8" + b"\xff\xfe\0\2" * 66_000,
        b"GIF89a" + bytes(7) + b"!\xfe" + b"\1a" * 66_000,
    ],
)
def test_a_header_without_end_is_refused(image: bytes) -> None:
    with pytest.raises(InvalidRequest, match="more than 65536 parts"):
        size_of(image)


def test_the_images_of_a_request_have_their_pixels_together() -> None:
    budget, image = PixelBudget(2 * 37 * 21), encoded("PNG")
    budget.take(image)
    budget.take(image)
    with pytest.raises(InvalidRequest, match=r"37 x 21 pixels makes the images of the request larger than 1554 pixels"):
        budget.take(image)


def test_the_bound_is_an_option() -> None:
    config = load(FrontendConfig, ["--text-max-image-pixels", "1000000"], {}, program="dynamo-frontend")
    assert config.text.limits.max_image_pixels == 1_000_000

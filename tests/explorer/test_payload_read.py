"""Payloads that the page would not open: the reader rejects them too, with a message."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from attnconv import Quadratic
from attnconv.explorer import payload, read_payload
from experiments.small_vit import SmallViT
from tests.explorer.test_payload import altered, images, own, whole


def without_images(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Remove the images from a payload."""
    manifest["images"] = []
    tensors |= {name: tensor[:0] for name, tensor in tensors.items() if name != "0.queries"}


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000], ids=["lists", "objects"])
def test_a_manifest_nested_without_end(text: str) -> None:
    with pytest.raises(ValueError, match=r"payload: .*got .*(recursion|array)"):
        read_payload(save({"x": torch.zeros(1)}, {"attnconv": text}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m, t: m.pop("patch"), "got .*`patch`"),
        (lambda m, t: m.update(patch=[1, 10**7]), r"got .*\$.patch\[1\]"),
        (lambda m, t: m.pop("library"), "got .*`library`"),
        (lambda m, t: m["images"][1].pop("name"), r"got .*`name`.*\$.images\[1\]"),
        (lambda m, t: m["images"][0].update(name=3), r"got .*int.*\$.images\[0\].name"),
        (lambda m, t: m.update(layers=[]), r"got .*\$.layers"),
        (lambda m, t: t.update(images=t["images"][:, :0]), r"images must be .*got .*2, 0, 7, 3"),
        (without_images, "images must be .*got .*none, .*kind content"),
        (lambda m, t: m["layers"][0].update(window=[7]), r"got .*\$.layers\[0\].window"),
        (lambda m, t: m["layers"][0].update(window=[0, 7]), r"got .*\$.layers\[0\].window"),
        (lambda m, t: m["layers"][0].update(window="7x7"), r"got .*\$.layers\[0\].window"),
        (lambda m, t: m["layers"][0].update(heads=10**7), r"got .*\$.layers\[0\].heads"),
    ],
)
def test_entries_of_the_manifest(change: Callable[[dict[str, Any], dict[str, Tensor]], object], words: str) -> None:
    with pytest.raises(ValueError, match=f"payload: .*{words}"):
        read_payload(altered(whole(), change))


@pytest.mark.parametrize(
    ("statistics", "words"),
    [
        (None, r"got .*null.*statistics"),
        ({"heads": {}}, r"got .*`layer`.*statistics"),
        ({"heads": {"a": [1, 2, 3]}, "layer": {}}, r"statistics.heads.a must be .*\[1.0, 2.0, 3.0\]"),
        ({"heads": {"a": "1234"}, "layer": {}}, "got .*str.*statistics.heads"),
        ({"heads": {"a": [1, 2, 3, True]}, "layer": {}}, "got .*bool.*statistics.heads"),
        ({"heads": {"a": [1, 2, 3, float("inf")]}, "layer": {}}, "manifest .*got .*malformed"),
        ({"heads": {}, "layer": {"b": float("nan")}}, "manifest .*got .*malformed"),
        ({"heads": {}, "layer": {"b": 10**400}}, "got .*out of range.*statistics.layer"),
        ({"heads": {}, "layer": {"b": []}}, "got .*array.*statistics.layer"),
    ],
)
def test_statistics(statistics: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"payload: .*{words}"):
        read_payload(altered(whole(), lambda m, t: m["layers"][0].update(statistics=statistics)))


def test_numbers_that_overflow_are_not_finite() -> None:
    content = payload(own(Quadratic(4)))
    altered_text = content.replace(b'content share\\": 0.0,', b'content share\\": 9e9999,', 1)
    length = int.from_bytes(content[:8], "little") + len(altered_text) - len(content)
    with pytest.raises(ValueError, match=r"payload: .*got .*out of range"):
        read_payload(length.to_bytes(8, "little") + altered_text[8:])


@pytest.mark.parametrize("window", [None, [2, 3]])
def test_a_window_may_be_said(window: list[int] | None) -> None:
    found = read_payload(altered(whole(), lambda m, t: m["layers"][0].update(window=window)))
    assert found.layers[0].window == (None if window is None else tuple(window))


def test_null_is_a_statistic() -> None:
    statistics = {"heads": {"a": [1, None, 0.5, -2]}, "layer": {"b": None}}
    found = read_payload(altered(whole(), lambda m, t: m["layers"][0].update(statistics=statistics)))
    assert found.layers[0].statistics == statistics


def test_rows_of_no_image() -> None:
    content = payload(SmallViT(size=16), images(1, 3, (16, 16)))
    with pytest.raises(ValueError, match=r"images must be .*got .*none, .*kind rows"):
        read_payload(altered(content, without_images))


def test_stored_queries_outside_of_the_grid() -> None:
    content = payload(SmallViT(size=16), images(1, 3, (16, 16)))
    with pytest.raises(ValueError, match=r"0\.queries must be"):
        read_payload(altered(content, lambda _, tensors: tensors["0.queries"].fill_(16)))

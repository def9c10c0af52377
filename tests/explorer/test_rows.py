"""Layers stored as rows of probabilities: models of other libraries, other borders and strides, windows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv import Quadratic, SelfAttention1d, SelfAttention3d
from attnconv.explorer import Pictures, attention_row, class_row, payload, read_payload
from attnconv.inspect import visit_attention
from experiments.small_vit import Attention, SmallViT
from tests.explorer.test_payload import all_rows, images, own


class WindowBlock(nn.Module):
    """Attention within windows of 2 x 3 tokens, with the names of Swin's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.window_size, self.shift_size, self.attn = (2, 3), (0, 0), Attention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        cut = x.reshape(batch, height // 2, 2, width // 3, 3, channels).transpose(2, 3)
        mixed: Tensor = self.attn(cut.reshape(-1, 6, channels)).reshape(cut.shape)
        return mixed.transpose(2, 3).reshape(x.shape)


class WindowModel(nn.Module):
    """Model with patches of 4 x 4 pixels and one block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Conv2d(3, 8, 4, stride=4), WindowBlock()

    def forward(self, pixels: Tensor) -> Tensor:
        out: Tensor = self.block(self.embed(pixels).movedim(1, -1)).mean((1, 2))
        return out


class TestRows:
    def test_a_model_of_another_library(self) -> None:
        torch.manual_seed(0)
        model = SmallViT(size=16, prefix=2)
        found = read_payload(payload(model, images(2, 3, (16, 16))))
        assert [(layer.kind, layer.sizes, layer.prefix) for layer in found.layers] == [("rows", (4, 4), 2)] * 2
        assert found.patch == (4, 4)
        exact: dict[str, tuple[Tensor, Tensor]] = {}

        def look(name: str, operator: Any) -> None:
            queries = torch.arange(16)
            exact[name] = (operator.rows(queries), operator.padding_mass(queries))

        visit_attention(model, images(2, 3, (16, 16)), look)
        for index, (rows, elsewhere) in enumerate(exact.values()):
            shown = torch.stack([all_rows(found, index, image=image) for image in range(2)])
            normed = (rows / rows.sum(-1, keepdim=True)).double()
            torch.testing.assert_close(shown, normed, rtol=2**-11, atol=1e-7)
            stored = found.layers[index].tensors["prefix_mass"].float()
            torch.testing.assert_close(stored, elsewhere, rtol=2**-11, atol=1e-7)

    def test_class_tokens_and_registers(self) -> None:
        torch.manual_seed(0)
        model = SmallViT(size=16, prefix=2)
        found = read_payload(payload(model, images(2, 3, (16, 16))))
        exact: list[Tensor] = []

        def look(name: str, operator: Any) -> None:
            exact.append(operator.prefix_rows(torch.arange(2)))

        visit_attention(model, images(2, 3, (16, 16)), look)
        for index, rows in enumerate(exact):
            shown = [
                torch.stack([class_row(found, index, head, token, image=image).flatten() for token in range(2)])
                for image in range(2)
                for head in range(rows.shape[1])
            ]
            total = rows.sum(-1, keepdim=True)
            torch.testing.assert_close(
                torch.stack(shown).unflatten(0, rows.shape[:2]).float(), rows / total, rtol=2**-11, atol=1e-7
            )
            mass = found.layers[index].tensors["class_mass"].float()
            torch.testing.assert_close(mass, 1 - total[..., 0], rtol=2**-10, atol=1e-6)
        with pytest.raises(ValueError, match=r"token: .*got 2"):
            class_row(found, 0, 0, 2)
        without = read_payload(payload(SmallViT(size=16, prefix=0), images(1, 3, (16, 16))))
        with pytest.raises(ValueError, match=r"layer: must .*class tokens"):
            class_row(without, 0, 0)

    def test_large_grids_keep_as_many_queries_as_fit(self) -> None:
        model = SmallViT(size=72, prefix=1)
        content = payload(model, images(1, 3, (72, 72)), budget=300_000)
        found = read_payload(content)
        queries = found.layers[0].tensors["queries"]
        assert 50 < len(queries) <= 300_000 // 2 // (2 * 4 * 324)  # 57 fit; a lattice with fewer has 7 x 8
        assert len(content) < 320_000
        row = attention_row(found, 0, 0, int(queries[5]))
        torch.testing.assert_close(row.sum(), torch.ones(()).double(), rtol=0, atol=1e-3)
        missing = next(token for token in range(324) if token not in queries)
        with pytest.raises(ValueError, match=rf"query: .*got {missing}"):
            attention_row(found, 0, 0, missing)

    def test_the_budget_holds_for_small_grids_as_well(self) -> None:
        model, pictures = SmallViT(size=32, prefix=1), images(1, 3, (32, 32))  # 8 x 8 tokens
        full = 2 * (65 * 2 * 4 * 65 + 64 * 4)  # 64 queries and a class token
        whole = [layer.tensors["queries"] for layer in read_payload(payload(model, pictures, budget=full)).layers]
        assert [queries.tolist() for queries in whole] == [list(range(64))] * 2
        found = read_payload(payload(model, pictures, budget=full // 4 + 1000))
        for layer in found.layers:
            assert sum(tensor.nbytes for tensor in layer.tensors.values()) <= full // 8 + 500
            assert layer.statistics["layer"]["queries stored"] == 16
            rows, columns = layer.tensors["queries"] // 8, layer.tensors["queries"] % 8
            assert rows.unique().tolist() == columns.unique().tolist() == [1, 3, 5, 7]

    @pytest.mark.parametrize("border", ["zero", "circular"])
    def test_other_borders_and_strides(self, border: Any) -> None:
        layer = own(Quadratic(4), border=border, padding=1, stride=2)
        found = read_payload(payload(layer, images()))
        assert found.layers[0].kind == "rows"
        assert found.layers[0].border == {"zero": "zeros"}.get(border, border)
        assert found.layers[0].tensors["probabilities"].shape[0] == 2  # stored for each image, although both are equal
        assert found.layers[0].tensors["queries"].tolist() == [0, 2, 4, 6, 14, 16, 18, 20, 28, 30, 32, 34]
        rows = layer.operator(images()).rows(torch.tensor([5]))[0, :, 0]
        row = attention_row(found, 0, 1, 16).flatten()
        torch.testing.assert_close(row.float(), rows[1] / rows[1].sum(), rtol=1e-3, atol=1e-7)

    def test_one_axis_is_one_row_and_three_are_refused(self) -> None:
        found = read_payload(payload(SelfAttention1d(8, 4, 2), images(sizes=(6,)), pictures=Pictures()))
        assert found.layers[0].sizes == (1, 6)
        with pytest.raises(ValueError, match=r"model: .*got 3"):
            payload(SelfAttention3d(8, 4, 2), images(sizes=(3, 4, 5)), pictures=Pictures())

    def test_rows_without_an_image_have_a_grey_one(self) -> None:
        found = read_payload(payload(own(Quadratic(4), border="zero", padding=1)))
        assert (found.names, found.images.unique().tolist()) == (("no image",), [128])
        assert len(found.layers[0].tensors["probabilities"]) == 1

    def test_the_other_parts_are_refused(self) -> None:
        found = read_payload(payload(SmallViT(size=16), images(1, 3, (16, 16))))
        with pytest.raises(ValueError, match=r"part: .*got 'content'"):
            attention_row(found, 0, 0, 0, part="content")

    @pytest.mark.parametrize(("sizes", "window"), [((4, 6), (2, 3)), ((2, 6), (2, 3)), ((2, 3), None)])
    def test_windows_are_said_unless_one_holds_all(
        self, sizes: tuple[int, int], window: tuple[int, int] | None
    ) -> None:
        torch.manual_seed(0)
        (height, width) = sizes
        found = read_payload(payload(WindowModel(), images(1, 3, (4 * height, 4 * width))))
        (layer,) = found.layers
        assert (layer.kind, layer.sizes, layer.window) == ("rows", sizes, window)
        query = torch.arange(height * width)
        rows, columns = query // width, query % width
        inside = (rows[:, None] // 2 == rows // 2) & (columns[:, None] // 3 == columns // 3)
        assert torch.equal(all_rows(found)[1] > 0, inside)

    def test_layers_without_windows_say_none(self) -> None:
        content = payload(SmallViT(size=16), images(1, 3, (16, 16)))
        assert b"window" not in content[: 8 + int.from_bytes(content[:8], "little")]
        assert [layer.window for layer in read_payload(content).layers] == [None] * 2

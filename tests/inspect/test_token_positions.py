"""Positions of tokens, followed through a model: tokens that hold their own coordinates must be found where they are.

Pixels hold their row and column, and everything before the attention is linear with weights that sum to 1, so that the
content of each query and key is its position. Head h attends to the key at `SHIFTS[h]` of the query, if its sequence
has one, and otherwise to an additional key that is no token.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnconv.inspect import TokenOperator, audit, visit_attention
from attnconv.operators import AttentionOperator

SHIFTS = torch.tensor([[0.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [1.0, -1.0]])  # in tokens
IN_ROWS = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, -1.0], [0.0, 2.0]])
SIZE = 24

Parts = tuple[Tensor, Tensor]  # queries (..., n, 2) and keys (..., m, 2)


def coordinates(count: int = 2, sizes: tuple[int, ...] = (SIZE, SIZE)) -> Tensor:
    grid = torch.stack(torch.meshgrid(*(torch.arange(size, dtype=torch.float64) for size in sizes), indexing="ij"))
    return grid.expand(count, *grid.shape).clone()


def patches(x: Tensor, size: int = 2) -> Tensor:
    """Tokens (b, h, w, c) of patches: a convolution."""
    weight = torch.eye(2, dtype=x.dtype)[:, :, None, None].expand(2, 2, size, size) / size**2
    return F.conv2d(x, weight, stride=size).permute(0, 2, 3, 1)


def partition(x: Tensor, size: tuple[int, int]) -> Tensor:
    b, height, width, c = x.shape
    x = x.reshape(b, height // size[0], size[0], width // size[1], size[1], c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size[0] * size[1], c)


def whole(x: Tensor) -> Parts:
    tokens = patches(x).flatten(1, 2)
    return tokens, tokens


def by_linear(x: Tensor) -> Parts:
    """Patches cut by reshaping, then a linear layer."""
    b, c, height, width = x.shape
    cut = x.reshape(b, c, height // 2, 2, width // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, 4 * c)
    tokens = cut @ torch.eye(2, dtype=x.dtype).repeat(4, 1) / 4
    return tokens, tokens


def merged(x: Tensor) -> Parts:
    """Swin's patch merging."""
    x = patches(x)
    x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
    tokens = F.linear(x, torch.eye(2, dtype=x.dtype).repeat(1, 4) / 4).flatten(1, 2)
    return tokens, tokens


def windows(x: Tensor) -> Parts:
    tokens = partition(patches(x), (4, 6))
    return tokens, tokens


def shifted_windows(x: Tensor) -> Parts:
    """Swin's shifted windows, with padding to whole windows."""
    x = F.pad(patches(x), (0, 0, 0, 3, 0, 3))
    tokens = partition(torch.roll(x, (-2, -2), (1, 2)), (5, 5))
    return tokens, tokens


def blocks_in_an_axis(x: Tensor) -> Parts:
    """NesT's blocks, with heads before blocks."""
    tokens = partition(patches(x), (6, 6)).unflatten(0, (2, -1))
    return tokens, tokens


def grid_attention(x: Tensor) -> Parts:
    """MaxViT's sparse grid: every third token."""
    x = patches(x)
    tokens = x.reshape(2, 4, 3, 4, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(-1, 16, 2)
    return tokens, tokens


def rows_only(x: Tensor) -> Parts:
    tokens = patches(x).flatten(0, 1)
    return tokens, tokens


def halo(x: Tensor) -> Parts:
    """HaloNet's blocks of queries, with keys around them."""
    x = patches(x)
    padded = F.pad(x.permute(0, 3, 1, 2), (2, 2, 2, 2))
    keys = padded.unfold(2, 7, 3).unfold(3, 7, 3)  # (b, c, blocks, blocks, 7, 7)
    return partition(x, (3, 3)), keys.permute(0, 2, 3, 4, 5, 1).reshape(-1, 49, 2)


def pooled_keys(x: Tensor) -> Parts:
    tokens = patches(x).permute(0, 3, 1, 2)
    return tokens.flatten(2).mT, F.avg_pool2d(tokens, 3).flatten(2).mT


def pooled_keys_by_convolution(x: Tensor) -> Parts:
    """MViT's pooling: kernels of size 3 with stride 2 (inside the image only, where they do not move centres)."""
    tokens = patches(x).permute(0, 3, 1, 2)
    weight = torch.eye(2, dtype=x.dtype)[:, :, None, None].expand(2, 2, 3, 3) / 9
    return tokens.flatten(2).mT, F.conv2d(tokens, weight, stride=2).flatten(2).mT


def strided_queries(x: Tensor) -> Parts:
    tokens = patches(x)
    return tokens[:, ::2, ::2].flatten(1, 2), tokens.flatten(1, 2)


LAYOUTS: dict[str, Callable[[Tensor], Parts]] = {
    made.__name__: made
    for made in (
        whole,
        by_linear,
        merged,
        windows,
        shifted_windows,
        blocks_in_an_axis,
        grid_attention,
        rows_only,
        halo,
        pooled_keys,
        pooled_keys_by_convolution,
        strided_queries,
    )
}


class Planted(nn.Module):
    """Attention to the keys at `SHIFTS` times `step` pixels from each query; keeps queries, keys and maps."""

    def __init__(
        self,
        layout: Callable[[Tensor], Parts],
        step: float = 2.0,
        *,
        heads: str = "after",
        fused: bool,
        nearest: bool = False,
        shifts: Tensor = SHIFTS,
    ) -> None:
        super().__init__()
        self.shifts = shifts
        self.layout, self.step, self.heads, self.fused, self.nearest = layout, step, heads, fused, nearest
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(self, images: Tensor) -> Tensor:
        queries, keys = self.layout(images)
        query, key = self.features(queries, keys)
        value = torch.cat([keys, torch.zeros_like(keys[..., :1, :])], -2).unsqueeze(-3).expand(*key.shape[:-1], 2)
        lead = query.shape[:-2]
        if self.heads == "in the batch":
            query, key, value = (each.flatten(0, -3) for each in (query, key, value))
        elif self.heads == "before the batch":
            query, key, value = (each.movedim(-3, 0).flatten(0, -3) for each in (query, key, value))
        maps = (query @ key.mT).softmax(-1)
        if self.heads == "before the batch":
            kept = maps.unflatten(0, (len(SHIFTS), *lead[:-1])).movedim(0, -3)
        else:
            kept = maps.reshape(*lead, *maps.shape[-2:])
        self.seen = queries.detach(), keys.detach(), kept.detach()
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value, scale=1.0)
        return maps @ value

    def features(self, queries: Tensor, keys: Tensor) -> Parts:
        """Factors of the scores -200 |key - query - shift|^2 (in tokens), and -50 for the additional key."""
        sharp = 200 / self.step**2
        shifts = self.step * F.pad(self.shifts, (queries.shape[-1] - 2, 0)).to(queries)[:, None]
        if self.nearest:  # aim from the nearest key, of keys that are `step` apart and start at 2.5
            queries = ((queries - 2.5) / self.step + 0.5).floor() * self.step + 2.5
        aim = queries.unsqueeze(-3) + shifts  # (..., h, n, 2)
        query = torch.cat([2 * sharp * aim, -sharp * (aim**2).sum(-1, keepdim=True), torch.ones_like(aim[..., :1])], -1)
        one = torch.ones_like(keys[..., :1])
        key = torch.cat([keys, one, -sharp * (keys**2).sum(-1, keepdim=True)], -1)
        extra = torch.zeros_like(key[..., :1, :])
        extra[..., -1] = -50
        key = torch.cat([key, extra], -2).unsqueeze(-3)
        return query, key.expand(*query.shape[:-2], *key.shape[-2:])


def operators_of(model: nn.Module, images: Tensor, **more: Any) -> list[tuple[TokenOperator, Tensor, Tensor]]:
    """Return the operators with all of their rows and padding masses."""
    found: list[tuple[TokenOperator, Tensor, Tensor]] = []

    def visit(_: str, operator: AttentionOperator) -> None:
        assert isinstance(operator, TokenOperator)
        every = torch.arange(operator.grid.query_count)
        found.append((operator, operator.rows(every), operator.padding_mass(every)))

    visit_attention(model, images, visit, **more)
    return found


def axis_values(values: Tensor) -> list[float]:
    return sorted({round(value, 6) for value in values.flatten().tolist()})


def expected_rows(queries: Tensor, keys: Tensor, maps: Tensor, images: int) -> Tensor:
    """Sum the maps into rows over the grid of all keys, by the contents of the tokens: a loop over everything."""
    shown_q, shown_k = (each.flatten(0, -3) for each in (queries, keys))
    # Padding holds zeros, as does the pixel at (0, 0), whose patch does not: its centre is at 0.5.
    grids = [[axis_values(each[each.abs().sum(-1) > 0][:, axis]) for axis in range(2)] for each in (shown_q, shown_k)]
    (rows, columns), (key_rows, key_columns) = grids
    maps = maps.movedim(-3, 0).flatten(1, -3)  # (h, s, n, m + 1)
    made = torch.zeros(images, len(SHIFTS), len(rows) * len(columns), len(key_rows) * len(key_columns)).double()
    for sequence in range(len(shown_q)):
        image = sequence * images // len(shown_q)
        for i, query in enumerate(shown_q[sequence].tolist()):
            if query == [0, 0]:
                continue
            at = rows.index(round(query[0], 6)) * len(columns) + columns.index(round(query[1], 6))
            for j, key in enumerate(shown_k[sequence].tolist()):
                if key != [0, 0]:
                    to = key_rows.index(round(key[0], 6)) * len(key_columns) + key_columns.index(round(key[1], 6))
                    made[image, :, at, to] += maps[:, sequence, i, j]
    return made


STEPS = {"merged": 4.0, "pooled_keys": 6.0, "pooled_keys_by_convolution": 4.0, "grid_attention": 6.0}


class TestLayouts:
    @pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
    @pytest.mark.parametrize("heads", ["after", "in the batch", "before the batch"])
    @pytest.mark.parametrize("name", LAYOUTS)
    def test_rows_are_where_the_tokens_say(self, name: str, heads: str, fused: bool) -> None:
        model = Planted(LAYOUTS[name], STEPS.get(name, 2.0), heads=heads, fused=fused)
        ((operator, rows, mass),) = operators_of(model, coordinates())
        assert model.seen is not None
        expected = expected_rows(*model.seen, images=2)
        assert (operator.heads, operator.batch) == (len(SHIFTS), 2)
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(rows.sum(-1) + mass, torch.ones_like(mass), rtol=0, atol=1e-9)

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_exact_shifts_score_one(self, name: str) -> None:
        nearest = name.startswith("pooled_keys")
        shifts = IN_ROWS if name == "rows_only" else SHIFTS
        model = Planted(LAYOUTS[name], STEPS.get(name, 2.0), fused=True, nearest=nearest, shifts=shifts)
        found = audit(model, coordinates()).layers[0].statistics
        assert found.convolution_score == pytest.approx(1, abs=1e-6)


def tokens_of(x: Tensor) -> Tensor:
    return patches(x).flatten(1, 2)


def one_slice(x: Tensor) -> Tensor:
    y = tokens_of(x).clone()
    y[:, 1:] = tokens_of(x)[:, :-1]
    y[:, 0] = tokens_of(x)[:, -1]
    return y


def a_view(x: Tensor) -> Tensor:
    y = tokens_of(x).clone()
    y.view(2, 12, 12, 2).copy_(y.view(2, 12, 12, 2).flip(1))
    return y


def by_index(x: Tensor) -> Tensor:
    y, order = tokens_of(x).clone(), torch.arange(144).flip(0)
    y[:, order] = tokens_of(x)
    return y


def into_zeros(x: Tensor) -> Tensor:
    y = torch.zeros(2, 145, 2, dtype=x.dtype)
    y[:, 1:] = tokens_of(x)
    return y


def no_token(x: Tensor) -> Tensor:
    y = tokens_of(x).clone()
    y[:, :1].zero_()
    return y


class TestWrites:
    """Positions after changes in place are those of the content, also in tensors that share memory."""

    @pytest.mark.parametrize("write", [one_slice, a_view, by_index, into_zeros])
    def test_keys_are_where_their_content_is(self, write: Callable[[Tensor], Tensor]) -> None:
        model = Planted(lambda x: (tokens_of(x), write(x)), fused=True)
        ((_, rows, _),) = operators_of(model, coordinates())
        assert model.seen is not None
        torch.testing.assert_close(rows, expected_rows(*model.seen, images=2), rtol=0, atol=1e-9)

    def test_a_token_that_is_overwritten_is_not_part_of_the_image(self) -> None:
        model = Planted(lambda x: (no_token(x), tokens_of(x)), fused=True)
        with pytest.raises(ValueError, match=r"only a part of a grid|queries equally often"):
            operators_of(model, coordinates())

    def test_outputs_that_are_given_are_not_changed(self) -> None:
        class Given(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                tokens = tokens_of(x)
                out = torch.empty_like(tokens)
                torch.index_select(tokens, 1, torch.arange(144), out=out)
                assert torch.equal(out, tokens)
                return F.scaled_dot_product_attention(tokens, tokens, tokens)

        assert operators_of(Given(), coordinates())[0][0].grid.sizes == (12, 12)


class TestMixtures:
    def test_a_mean_over_the_image_is_no_token(self) -> None:
        class Pooled(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                tokens = patches(x, 8).flatten(1, 2)  # 3 x 3: the mean is at the middle token
                tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1)
                return F.scaled_dot_product_attention(tokens, tokens, tokens)

        ((operator, _, _),) = operators_of(Pooled(), coordinates())
        assert (operator.grid.sizes, operator.prefix) == ((3, 3), 1)

    @pytest.mark.parametrize("first", [True, False])
    def test_sums_over_different_tokens_are_refused(self, first: bool) -> None:
        class Mixed(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                tokens = tokens_of(x)
                mixed = tokens + tokens.flip(1)
                query = mixed + tokens if first else tokens + mixed
                return F.scaled_dot_product_attention(query, tokens, tokens)

        with pytest.raises(ValueError, match="combine different positions"):
            operators_of(Mixed(), coordinates())

    def test_maps_that_follow_each_other_are_one(self) -> None:
        class Twice(nn.Module):
            seen: Tensor

            def forward(self, x: Tensor) -> Tensor:
                tokens = tokens_of(x)
                maps = (tokens @ tokens.mT / 100).softmax(-1)
                self.seen = maps @ maps
                return self.seen @ tokens

        model = Twice()
        ((_, rows, _),) = operators_of(model, coordinates())
        torch.testing.assert_close(rows[:, 0], model.seen)

    def test_masks_of_single_heads(self) -> None:
        class Masked(nn.Module):
            seen: Tensor

            def forward(self, x: Tensor) -> Tensor:
                tokens = tokens_of(x)
                mask = torch.randn(2, 144, 144, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
                self.seen = (tokens @ tokens.mT + mask).softmax(-1)
                return F.scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=mask, scale=1.0)

        model = Masked()
        ((_, rows, _),) = operators_of(model, coordinates())
        torch.testing.assert_close(rows[:, 0], model.seen)

    @pytest.mark.parametrize(
        ("shape", "frames_first"),
        [((3, 6), False), ((6, 3), True), ((4, 3), True), ((4, 6), False), ((4, 16), False), ((16, 4), False)],
    )
    def test_videos(self, shape: tuple[int, int], frames_first: bool) -> None:
        class Video(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                x = x.movedim(1, 2) if frames_first else x
                tokens = F.avg_pool3d(x, 2).flatten(2).mT
                return F.scaled_dot_product_attention(tokens, tokens, tokens)

        frames = shape[0] if frames_first else shape[1]
        assert operators_of(Video(), torch.randn(2, *shape, 8, 10))[0][0].grid.sizes == (frames // 2, 4, 5)

    def test_inference_mode(self) -> None:
        model = Planted(windows, fused=False)
        inner = model.forward
        model.forward = torch.inference_mode()(inner)  # type: ignore[method-assign]
        ((_, rows, _),) = operators_of(model, coordinates())
        assert model.seen is not None
        torch.testing.assert_close(rows, expected_rows(*model.seen, images=2), rtol=0, atol=1e-9)

    def test_images_that_occur_twice_are_no_heads(self) -> None:
        class Twice(nn.Module):
            num_heads = 1

            def forward(self, x: Tensor) -> Tensor:
                tokens = tokens_of(torch.cat([x, x]))
                return F.scaled_dot_product_attention(tokens, tokens, tokens)

        with pytest.raises(ValueError, match=r"2 attention maps per query, .* heads is 1"):
            operators_of(Twice(), coordinates())

"""The attention maps of models of other libraries equal loops over the tensors of their attention calls.

A function mode records the probabilities of every call: the softmax of the model, or that of the queries and keys of a
fused call, sequence by sequence. The position of each token is computed by hand for each family: with an image of token
numbers that is rolled, padded and cut as the family does it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnconv.inspect import visit_attention
from attnconv.operators import AttentionOperator

SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax)
Layout = Callable[[tuple[int, ...], Any], Tensor]  # grid and block to the numbers of the tokens, (windows, tokens)


class Recorded(TorchFunctionMode):
    """Records the probabilities of attention calls."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self.maps.append(by_loops(*args, **(kwargs or {})))
        elif func in SOFTMAX and out.dim() > 2:
            self.maps.append(out)
        return out


def by_loops(query: Tensor, key: Tensor, _value: Tensor, attn_mask: Any = None, scale: Any = None, **_: Any) -> Tensor:
    scores = torch.zeros(*query.shape[:-1], key.shape[-2])
    mask = None if attn_mask is None else attn_mask.expand(scores.shape)
    for place in torch.cartesian_prod(*map(torch.arange, query.shape[:-2])).tolist():
        for number, one in enumerate(query[tuple(place)]):
            row = key[tuple(place)] @ one * (query.shape[-1] ** -0.5 if scale is None else scale)
            if mask is not None:
                more = mask[tuple(place)][number]
                row = row.masked_fill(~more, -torch.inf) if more.dtype == torch.bool else row + more
            scores[tuple(place)][number] = row.softmax(0)
    return scores


def numbered(grid: Sequence[int]) -> Tensor:
    """Return an image of token numbers from 1, (1, height, width, 1); padding with zeros is token 0."""
    return torch.arange(1.0, grid[0] * grid[1] + 1).reshape(1, *grid, 1)


def padded(image: Tensor, size: Sequence[int]) -> Tensor:
    return F.pad(image, (0, 0, 0, -image.shape[2] % size[1], 0, -image.shape[1] % size[0]))


def cut(image: Tensor, size: Sequence[int]) -> Tensor:
    """Cut an image into windows, row by row."""
    down, right = image.shape[1] // size[0], image.shape[2] // size[1]
    return image.reshape(down, size[0], right, size[1]).transpose(1, 2).reshape(down * right, -1)


def whole(grid: Sequence[int], _: Any) -> Tensor:
    return numbered(grid).reshape(1, -1)


def timm_swin(grid: Sequence[int], block: Any) -> Tensor:
    rolled = torch.roll(numbered(grid), tuple(-shift for shift in block.shift_size), (1, 2))
    return cut(padded(rolled, block.window_size), block.window_size)


def torchvision_swin(grid: Sequence[int], block: Any) -> Tensor:
    attention, image = block.attn, padded(numbered(grid), block.attn.window_size)
    shifts = [
        0 if size >= image.shape[1 + axis] else -shift
        for axis, (size, shift) in enumerate(zip(attention.window_size, attention.shift_size, strict=True))
    ]
    return cut(torch.roll(image, shifts, (1, 2)), attention.window_size)


def hugging_face_swin(grid: Sequence[int], block: Any) -> Tensor:
    size = (block.window_size,) * 2
    return cut(torch.roll(padded(numbered(grid), size), (-block.shift_size,) * 2, (1, 2)), size)


def maxvit(grid: Sequence[int], block: Any) -> Tensor:
    image, (down, right) = numbered(grid), block.partition_size
    if block.partition_block:
        return cut(image, block.partition_size)
    spread = image.reshape(down, grid[0] // down, right, grid[1] // right)
    return spread.permute(1, 3, 0, 2).reshape(-1, down * right)


def twins(grid: Sequence[int], block: Any) -> Tensor:
    if not hasattr(block.attn, "ws") or not type(block.attn).__name__.startswith("Locally"):
        return whole(grid, block)
    return cut(padded(numbered(grid), (block.attn.ws,) * 2), (block.attn.ws,) * 2)


def tiny_vit(grid: Sequence[int], block: Any) -> Tensor:
    size = (block.window_size,) * 2
    return whole(grid, block) if tuple(grid) == size else cut(padded(numbered(grid), size), size)


def nest(grid: Sequence[int], block: Any) -> Tensor:
    return cut(numbered(grid), (14, 14))


def sam(grid: Sequence[int], block: Any) -> Tensor:
    size = block.window_size
    return whole(grid, block) if size == 0 else cut(padded(numbered(grid), (size, size)), (size, size))


@dataclass(frozen=True)
class Case:
    """A model, the image size, the class tokens, and how the tokens of its blocks are arranged."""

    make: Callable[[], nn.Module]
    size: tuple[int, int] = (64, 64)
    prefix: int = 0
    layout: Layout = whole
    heads_first: bool = False  # heads before windows
    fused: bool = True


def timm_(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: pytest.importorskip("timm").create_model(name, **settings)


def hugging_face(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 24}
        own = {} if name in ("Swin", "Segformer") else {**sizes, "image_size": 64, "patch_size": 8}
        config = getattr(transformers, f"{name}Config")(**own, **settings)
        model: nn.Module = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="eager")
        return model

    return make


def torchvision_swin_model() -> nn.Module:
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    model: nn.Module = swin.SwinTransformer([4, 4], 12, [2, 2], [2, 2], [5, 5])
    return model


SMALL = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 64}
CASES = {
    "ViT": Case(timm_("vit_tiny_patch16_224", **SMALL, patch_size=8), prefix=1),
    "DeiT": Case(timm_("deit_tiny_distilled_patch16_224", **SMALL, patch_size=8), prefix=2),
    "DINOv2": Case(timm_("vit_small_patch14_reg4_dinov2", **{**SMALL, "img_size": 56}), (56, 56), prefix=5),
    "DINOv3": Case(timm_("vit_small_patch16_dinov3", **{**SMALL, "num_heads": 2}, patch_size=8), prefix=5),
    "EVA-02": Case(timm_("eva02_tiny_patch14_224", **{**SMALL, "img_size": 56, "num_heads": 2}), (56, 56), prefix=1),
    "BEiT": Case(timm_("beit_base_patch16_224", **SMALL, patch_size=8), prefix=1),
    "Swin": Case(
        timm_("swin_tiny_patch4_window7_224", img_size=(64, 72), embed_dim=12, depths=(2, 2), num_heads=(2, 2)),
        (64, 72),
        layout=timm_swin,
    ),
    "Swin V2": Case(
        timm_("swinv2_tiny_window8_256", img_size=64, embed_dim=12, depths=(2, 2), num_heads=(2, 2), window_size=5),
        layout=timm_swin,
    ),
    "MaxViT": Case(timm_("maxvit_tiny_tf_224", img_size=64), layout=maxvit),
    "Twins-SVT": Case(timm_("twins_svt_small", img_size=96), (96, 96), layout=twins),
    "Twins-PCPVT": Case(timm_("twins_pcpvt_small", img_size=64), layout=twins),
    "PVT v2": Case(timm_("pvt_v2_b0")),
    "TinyViT": Case(timm_("tiny_vit_5m_224"), (80, 96), layout=tiny_vit),
    "NesT": Case(timm_("nest_tiny"), (224, 224), layout=nest, heads_first=True),
    "LeViT": Case(timm_("levit_128s"), (224, 224)),
    "MViTv2": Case(timm_("mvitv2_tiny", img_size=64), fused=False),
    "CoAtNet": Case(timm_("coatnet_0_rw_224", img_size=64)),
    "Swin of torchvision": Case(torchvision_swin_model, (64, 72), layout=torchvision_swin),
    "ViT of Hugging Face": Case(hugging_face("ViT"), prefix=1),
    "CLIP": Case(hugging_face("CLIPVision"), prefix=1),
    "DINOv2 with registers": Case(hugging_face("Dinov2WithRegisters", num_register_tokens=4), prefix=5),
    "SigLIP": Case(hugging_face("SiglipVision", vision_use_head=False)),
    "SegFormer": Case(hugging_face("Segformer", hidden_sizes=[8, 8, 8, 8], num_attention_heads=[1, 2, 2, 2])),
    "Swin of Hugging Face": Case(
        hugging_face("Swin", embed_dim=12, depths=[2, 2], num_heads=[2, 2], window_size=5, image_size=64),
        (64, 72),
        layout=hugging_face_swin,
    ),
    "SAM": Case(hugging_face("SamVision", window_size=3, global_attn_indexes=[1], output_channels=8), layout=sam),
}


def sharpen(model: nn.Module) -> nn.Module:
    """Enlarge the weights of queries and keys, so that attention is far from uniform."""
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and any(
            part in name for part in ("qkv", "query", "key", "q_proj", "k_proj", ".q.", ".kv.")
        ):
            weight.data.mul_(4)
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_maps_equal_loops_over_the_model_s_own_tensors(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = sharpen(case.make())
    for module in model.modules():
        if isinstance(getattr(module, "fused_attn", None), bool):
            setattr(module, "fused_attn", case.fused)  # noqa: B010
    images = torch.randn(2, 3, *case.size)
    with torch.no_grad(), Recorded() as recorded:
        model(images)
    read: list[tuple[str, AttentionOperator, Tensor]] = []

    def visit(layer: str, operator: AttentionOperator) -> None:
        read.append((layer, operator, operator.rows(torch.arange(operator.grid.query_count))))

    visit_attention(model, images, visit)
    assert len(read) == len(recorded.maps) > 0
    for (layer, operator, rows), maps in zip(read, recorded.maps, strict=True):
        block = model.get_submodule(layer.rpartition(".")[0])
        queries, keys = (case.layout(sizes, block).long() for sizes in (operator.grid.query_sizes, operator.grid.sizes))
        windows = len(queries)
        one = (
            maps.reshape(2, -1, windows, *maps.shape[-2:])
            if case.heads_first
            else (maps.reshape(2, windows, -1, *maps.shape[-2:]).transpose(1, 2))
        )
        expected = torch.zeros(2, one.shape[1], operator.grid.query_count + 1, operator.grid.key_count + 1)
        for window in range(windows):
            for number, query in enumerate(queries[window].tolist()):
                expected[:, :, query, keys[window]] = one[:, :, window, case.prefix + number, case.prefix :]
        torch.testing.assert_close(rows, expected[:, :, 1:, 1:], rtol=1e-5, atol=1e-5)

"""The attention maps of models of other libraries equal loops over the tensors of their attention calls.

A function mode records the probabilities of every call: the softmax of the model, or that of the queries and keys of a
fused call, sequence by sequence. The position of each token is computed by hand for each family: with an image of token
numbers that is rolled, padded and cut as the family does it. Attention is far from uniform, which each test checks, and
grids are known from the strides of the family.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnconv.inspect import visit_attention
from attnconv.operators import AttentionOperator

SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax)
QUERIES_KEYS = re.compile(r"qkv|query|key|q_proj|k_proj|in_proj|\.q\.|\.kv\.")
RELATIVE = re.compile(r"rel_pos|bias_table|attention_biases")
LARGE = (128, 192)
Layout = Callable[[tuple[int, ...], Any], Tensor]  # grid and block to the numbers of the tokens, (windows, tokens)


class Recorded(TorchFunctionMode):
    """Records the probabilities of attention calls."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:  # its inner calls are not intercepted
            out, maps = func(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})
            assert maps is not None
            self.maps.append(maps)
            return out, None
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self.maps.append(by_loops(*args, **(kwargs or {})))
        elif func in SOFTMAX and out.dim() > 2:
            self.maps.append(out)
        return out


def by_loops(query: Tensor, key: Tensor, _: Tensor, attn_mask: Any = None, *, scale: Any = None, **more: Any) -> Tensor:
    assert not any(more.values())  # neither causal nor with dropout or shared keys
    maps = torch.zeros(*query.shape[:-1], key.shape[-2])
    mask = None if attn_mask is None else attn_mask.expand(maps.shape)
    for place in torch.cartesian_prod(*map(torch.arange, query.shape[:-2])).tolist():
        one = tuple(place)
        scores = query[one] @ key[one].T * (query.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None:
            scores = scores.masked_fill(~mask[one], -torch.inf) if mask.dtype == torch.bool else scores + mask[one]
        maps[one] = scores.softmax(-1)
    return maps


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
    return cut(numbered(grid), (4, 4))


def hiera(grid: Sequence[int], block: Any) -> Tensor:
    """Tokens at the same place of all units of 32 pixels are neighbours; the finest offset comes first."""
    tokens = numbered(grid)[..., 0]
    while tokens.shape[1] > LARGE[0] // 32:
        tokens = torch.stack([tokens[:, i::2, j::2] for i in range(2) for j in range(2)], 1).flatten(0, 1)
    return tokens.flatten(1).T if block.attn.use_mask_unit_attn else tokens.reshape(1, -1)


def sam(grid: Sequence[int], block: Any) -> Tensor:
    size = block.window_size
    return whole(grid, block) if size == 0 else cut(padded(numbered(grid), (size, size)), (size, size))


@dataclass(frozen=True)
class Case:
    """A model, the image size, the strides of queries and keys, and how the tokens of its blocks are arranged."""

    make: Callable[[bool], nn.Module]
    strides: Sequence[tuple[int, int]]  # in pixels; all that occur, in this order
    size: tuple[int, int] = (64, 72)
    prefix: int = 0
    layout: Layout = whole
    heads_first: bool = False  # heads before windows
    options: Mapping[str, object] = field(default_factory=dict)
    paths: Sequence[bool] = (True, False)  # whether attention is fused


def timm_(name: str, **settings: Any) -> Callable[[bool], nn.Module]:
    def make(fused: bool) -> nn.Module:
        model: nn.Module = pytest.importorskip("timm").create_model(name, **settings)
        for module in model.modules():
            if isinstance(getattr(module, "fused_attn", None), bool):
                setattr(module, "fused_attn", fused)  # noqa: B010
        return model

    return make


def hugging_face(name: str, **settings: Any) -> Callable[[bool], nn.Module]:
    def make(fused: bool) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 24}
        own = {} if name in ("Swin", "Segformer") else {**sizes, "image_size": 64, "patch_size": 8}
        config = getattr(transformers, f"{name}Config")(**own, **settings)
        path = "sdpa" if fused else "eager"
        model: nn.Module = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation=path)
        return model

    return make


def torchvision_swin_model(_: bool) -> nn.Module:
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    model: nn.Module = swin.SwinTransformer([4, 4], 12, [2, 2], [2, 2], [5, 5])
    return model


def torchvision_vit(_: bool) -> nn.Module:
    vision = pytest.importorskip("torchvision.models.vision_transformer")
    model: nn.Module = vision.VisionTransformer(64, 8, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=24)
    return model


SMALL = {"depth": 2, "embed_dim": 24, "num_heads": 2, "img_size": (64, 72), "patch_size": 8}
SWIN = {"embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2)}
SWIN_V2 = {**SWIN, "img_size": (64, 72), "window_size": 5}
SMALL_HIERA = {"img_size": LARGE, "stages": (1, 2, 2, 1), "embed_dim": 12}
SEGFORMER = {"hidden_sizes": [8, 8, 8, 8], "num_attention_heads": [1, 2, 2, 2]}
SAM = {"window_size": 3, "global_attn_indexes": [1], "initializer_range": 0.02}
PATCHES, TWO_STAGES, WIDE, ANY_SIZE = [(8, 8)], [(4, 4), (8, 8)], (64, 96), {"interpolate_pos_encoding": True}
PYRAMID = [(4, 32), (8, 32), (16, 32), (32, 32)]
TWINS = [(4, 4), (4, 32), (8, 8), (8, 32), (16, 16), (16, 32), (32, 32)]
LEVIT = [(16, 16), (32, 16), (32, 32), (64, 32), (64, 64)]
MVIT = [(4, 16), (8, 8), (8, 16), (16, 8), (16, 16), (32, 16), (32, 32)]
UNITS = [(4, 4), (8, 4), (8, 8), (16, 8), (16, 16), (32, 16)]
CASES = {
    "ViT": Case(timm_("vit_tiny_patch16_224", **SMALL), PATCHES, prefix=1),
    "DeiT": Case(timm_("deit_tiny_distilled_patch16_224", **SMALL), PATCHES, prefix=2),
    "DINOv2": Case(timm_("vit_small_patch14_reg4_dinov2", **SMALL), PATCHES, prefix=5),
    "DINOv3": Case(timm_("vit_small_patch16_dinov3", **SMALL), PATCHES, prefix=5),
    "EVA-02": Case(timm_("eva02_tiny_patch14_224", **SMALL), PATCHES, prefix=1),
    "BEiT": Case(timm_("beit_base_patch16_224", **SMALL), PATCHES, prefix=1),
    "Swin": Case(timm_("swin_tiny_patch4_window7_224", img_size=(64, 72), **SWIN), TWO_STAGES, layout=timm_swin),
    "Swin V2": Case(timm_("swinv2_tiny_window8_256", **SWIN_V2), TWO_STAGES, layout=timm_swin, paths=[False]),
    "MaxViT": Case(timm_("maxvit_tiny_tf_224", img_size=WIDE), [*TWO_STAGES, (16, 16), (32, 32)], WIDE, layout=maxvit),
    "Twins-SVT": Case(timm_("twins_svt_small", img_size=WIDE), TWINS, WIDE, layout=twins),
    "Twins-PCPVT": Case(timm_("twins_pcpvt_small", img_size=WIDE), PYRAMID, WIDE),
    "PVT v2": Case(timm_("pvt_v2_b0"), PYRAMID, WIDE),
    "TinyViT": Case(timm_("tiny_vit_5m_224"), [(8, 8), (16, 16), (32, 32)], (80, 96), layout=tiny_vit),
    "NesT": Case(timm_("nest_tiny", img_size=64), [*TWO_STAGES, (16, 16)], (64, 64), layout=nest, heads_first=True),
    "Hiera": Case(timm_("hiera_tiny_224", **SMALL_HIERA), UNITS, LARGE, layout=hiera, heads_first=True),
    "LeViT": Case(timm_("levit_128s", img_size=LARGE), LEVIT, LARGE, paths=[False]),
    "MViTv2": Case(timm_("mvitv2_tiny", img_size=64), MVIT, (64, 64), paths=[False]),
    "CoAtNet": Case(timm_("coatnet_0_rw_224", img_size=WIDE), [(16, 16), (32, 32)], WIDE),
    "Swin of torchvision": Case(torchvision_swin_model, TWO_STAGES, layout=torchvision_swin, paths=[False]),
    "ViT of torchvision": Case(torchvision_vit, PATCHES, (64, 64), prefix=1, paths=[True]),
    "ViT of Hugging Face": Case(hugging_face("ViT"), PATCHES, prefix=1, options=ANY_SIZE),
    "CLIP": Case(hugging_face("CLIPVision"), PATCHES, prefix=1, options=ANY_SIZE),
    "DINOv2 with registers": Case(hugging_face("Dinov2WithRegisters", num_register_tokens=4), PATCHES, prefix=5),
    "SigLIP": Case(hugging_face("SiglipVision", vision_use_head=False), PATCHES, options=ANY_SIZE),
    "SegFormer": Case(hugging_face("Segformer", **SEGFORMER), PYRAMID, WIDE),
    "Swin of Hugging Face": Case(hugging_face("Swin", **SWIN, window_size=5), TWO_STAGES, layout=hugging_face_swin),
    "SAM": Case(hugging_face("SamVision", **SAM, output_channels=8), PATCHES, (64, 64), layout=sam),
}


def sharpen(model: nn.Module, images: Tensor, options: Mapping[str, object]) -> None:
    """Draw the weights of queries, keys and relative positions again, so that attention is far from uniform."""
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and QUERIES_KEYS.search(name):
            weight.data.normal_(std=1.5 / weight[0].numel() ** 0.5)
        elif RELATIVE.search(name):
            weight.data.normal_()
    model.eval()
    for module in model.modules():  # running statistics of the images, so that no signal vanishes
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.train()
            module.momentum = 1
    with torch.no_grad():
        model(images, **options)
    model.eval()


@pytest.mark.parametrize(
    ("name", "fused"),
    [pytest.param(name, path, id=name + (", fused" if path else "")) for name in CASES for path in CASES[name].paths],
)
def test_maps_equal_loops_over_the_model_s_own_tensors(name: str, fused: bool) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model, images = case.make(fused), torch.randn(2, 3, *case.size)
    sharpen(model, images, case.options)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), Recorded() as recorded:
            model(images, **case.options)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    read: list[tuple[str, AttentionOperator, Tensor, Tensor]] = []

    def visit(layer: str, operator: AttentionOperator) -> None:
        every = torch.arange(operator.grid.query_count)
        read.append((layer, operator, operator.rows(every), operator.padding_mass(every)))

    visit_attention(model, images, visit, options=case.options)
    assert len(read) == len(recorded.maps) > 0
    grids = dict.fromkeys((operator.grid.query_sizes, operator.grid.sizes) for _, operator, _, _ in read)
    assert list(grids) == [tuple(tuple(-(-n // s) for n in case.size) for s in pair) for pair in case.strides]
    for (layer, operator, rows, mass), maps in zip(read, recorded.maps, strict=True):
        assert float(maps.amax(-1).mean()) * maps.shape[-1] > 1.5, layer
        block = model.get_submodule(layer.rpartition(".")[0])
        queries, keys = (case.layout(sizes, block).long() for sizes in (operator.grid.query_sizes, operator.grid.sizes))
        windows = len(queries)
        split = (-1, windows) if case.heads_first else (windows, -1)
        one = maps.reshape(2, *split, *maps.shape[-2:])
        one = one if case.heads_first else one.transpose(1, 2)
        expected = torch.zeros(2, one.shape[1], operator.grid.query_count + 1, operator.grid.key_count + 1)
        for window in range(windows):
            expected[:, :, queries[window, :, None], keys[window]] = one[:, :, window, case.prefix :, case.prefix :]
        expected = expected[:, :, 1:, 1:]
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mass, 1 - expected.sum(-1), rtol=1e-5, atol=1e-5)

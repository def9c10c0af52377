"""The loader: each form of `spec`, and errors for invalid ones."""

import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnconv
from attnconv.models.checkpoint import save_weights
from attnconv.models.classifiers import AttentionClassifier, build
from attnconv.models.model_loader import RUN_WEIGHTS, Logits, load
from attnconv.models.presets import PRESETS
from attnconv.models.settings import AttentionSettings

TINY = AttentionSettings(layers=1, heads=2, width=8, mlp_width=8, image_size=8, classes=2)


@pytest.fixture
def module_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Working directory for a user's modules, whose imports are undone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("users_"):
            del sys.modules[name]


def checkpoint(path: Path) -> nn.Module:
    model = build(TINY).eval()
    save_weights(path, model, TINY, classes=("a", "b"), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    return model


def test_a_preset() -> None:
    found = load("quadratic-digits")
    assert isinstance(found.model, AttentionClassifier)
    assert (found.settings, found.classes, found.mean) == (PRESETS["quadratic-digits"], (), ())
    assert found.source == "preset quadratic-digits, fresh parameters"
    assert found.random
    assert not found.model.training
    assert attnconv.load is load


def test_a_checkpoint_by_text_and_by_path(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    model = checkpoint(path)
    images = torch.randn(2, 3, 8, 8)
    for spec in (path, str(path)):
        found = load(spec)
        torch.testing.assert_close(found.model(images), model(images), rtol=0, atol=0)
        assert (found.settings, found.classes) == (TINY, ("a", "b"))
        assert (found.mean, found.std, found.source) == ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2), f"checkpoint {path}")
        assert not found.random
        assert not found.model.training


def test_a_checkpoint_keeps_its_dtype_and_the_generator(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.safetensors", build(TINY).double(), TINY)
    state = torch.random.get_rng_state()
    model = load(tmp_path / "w.safetensors").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    torch.testing.assert_close(torch.random.get_rng_state(), state, rtol=0, atol=0)


def test_a_run_folder_gives_its_best_checkpoint_else_its_last_else_its_first(tmp_path: Path) -> None:
    best, last, start, published = (tmp_path / name for name in RUN_WEIGHTS)
    checkpoint(published)
    assert load(tmp_path).source == f"checkpoint {published}"
    checkpoint(start)
    assert load(tmp_path).source == f"checkpoint {start}"
    checkpoint(last)
    assert load(tmp_path).source == f"checkpoint {last}"
    checkpoint(best)
    assert load(str(tmp_path)).source == f"checkpoint {best}"


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"model: .*got {re.escape(str(tmp_path))}"):
        load(tmp_path)


def test_a_presets_name_wins_over_a_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "quadratic-digits" / "checkpoints" / "last.safetensors")
    monkeypatch.chdir(tmp_path)
    assert load("quadratic-digits").source.startswith("preset")
    assert load("./quadratic-digits").settings == TINY


@pytest.mark.parametrize("spec", ["runs/none", "none.safetensors", "none.pt"])
def test_a_path_to_nothing_is_named(spec: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"model: .*got nothing at {spec}"):
        load(spec)


def test_a_misspelt_preset_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(ValueError, match=r"got 'quadratic-digit'\. Did you mean quadratic-digits"):
        load("quadratic-digit")


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    torch.save(build(TINY).state_dict(), tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"checkpoint: .*got a pickle"):
        load(tmp_path / "w.pt")


@pytest.mark.usefixtures("unhooked")
def test_a_spec_that_is_no_name() -> None:
    with pytest.raises(TypeError, match=r"spec: must be a string or a path, got None"):
        load(None)  # type: ignore[arg-type]


def test_a_function(module_folder: Path) -> None:
    (module_folder / "users_models.py").write_text(
        "from torch import nn\ndef small():\n    return nn.Linear(2, 3)\ndef number():\n    return 3\nvalue = 4\n"
    )
    found = load("users_models:small")
    assert isinstance(found.model, nn.Linear)
    assert (found.settings, found.source) == (None, "function users_models:small")
    with pytest.raises(TypeError, match=r"model: .*got int"):
        load("users_models:number")
    with pytest.raises(ValueError, match=r"users_models, got 'smal'\. .* small"):
        load("users_models:smal")
    with pytest.raises(ValueError, match="users_models, got 'value'"):
        load("users_models:value")


def test_a_class_of_an_installed_package_is_a_function_as_well() -> None:
    assert isinstance(load("torch.nn:Identity").model, nn.Identity)


def test_a_module_that_does_not_exist_is_named(module_folder: Path) -> None:
    with pytest.raises(ImportError, match=r"model: .*got 'users_nothing'"):
        load("users_nothing:make")
    with pytest.raises(ImportError, match=r"model: .*got 'torch\.nothing'"):
        load("torch.nothing:make")


def test_what_a_users_module_lacks_is_not_hidden(module_folder: Path) -> None:
    (module_folder / "users_broken.py").write_text("import users_missing_dependency\n")
    (module_folder / "users_late.py").write_text("def make():\n    import users_missing_dependency\n")
    for spec in ("users_broken:make", "users_late:make"):
        with pytest.raises(ModuleNotFoundError, match="No module named 'users_missing_dependency'"):
            load(spec)


def test_a_users_own_error_is_named_with_its_line(module_folder: Path) -> None:
    file = module_folder / "users_errors.py"
    file.write_text(
        "import torch\ndef boom():\n    raise KeyError('my own')\ndef deep():\n    return torch.zeros(2).view(3)\n"
        "def library():\n    return torch.nn.MultiheadAttention(5, 2)\n"
    )
    where = re.escape(str(file))
    words = r"users_errors:boom .*got KeyError: 'my own'\. .* at "
    with pytest.raises(ValueError, match=rf"{words}{where}:3: raise KeyError\('my own'\)$"):
        load("users_errors:boom")
    with pytest.raises(ValueError, match=rf"got RuntimeError: .* raised at {where}:5: return torch.zeros"):
        load("users_errors:deep")
    with pytest.raises(
        ValueError, match=rf"AssertionError: .* at .*activation.py:\d+, called from {where}:7: return t"
    ):
        load("users_errors:library")
    (module_folder / "users_start.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(ValueError, match=r"got ZeroDivisionError: .*users_start.py:2: y = x / 0$"):
        load("users_start:make")


@pytest.mark.parametrize("spec", ["a b:c", ":make", "1x:make"])
def test_words_of_no_form_are_refused_with_the_forms(spec: str) -> None:
    with pytest.raises(ValueError, match=rf"model: .*got '{spec}'"):
        load(spec)


@pytest.mark.parametrize(
    ("spec", "package"), [("timm:vit", "timm"), ("torchvision:resnet18", "torchvision"), ("hf:vit", "transformers")]
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    spec: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"{package}: must be installed.*pip install 'attnconv\[models\]'"
    with pytest.raises(ImportError, match=message):
        load(spec)


def test_a_model_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test with a fake timm; the real one is tested below if it is installed."""

    def create_model(name: str, *, pretrained: bool) -> nn.Module:
        model = nn.Linear(2, 3)
        model.pretrained_cfg = {"mean": (0.1, 0.2), "std": (0.3, 0.4)}  # type: ignore[assignment]
        assert (name, pretrained) == ("vit_tiny.in1k", True)
        return model

    fake: Any = types.ModuleType("timm")
    fake.list_models, fake.create_model = lambda: ["vit_tiny"], create_model
    info = types.SimpleNamespace(label_descriptions=lambda: ["cat", "dog", "frog"])
    fake.data = types.SimpleNamespace(infer_imagenet_subset=lambda model: "some", ImageNetInfo=lambda subset: info)
    monkeypatch.setitem(sys.modules, "timm", fake)
    found = load("timm:vit_tiny.in1k", pretrained=True)
    assert (found.mean, found.std, found.source) == ((0.1, 0.2), (0.3, 0.4), "timm:vit_tiny.in1k, pretrained")
    assert found.classes == ("cat", "dog", "frog")
    with pytest.raises(ValueError, match=r"timm model, got 'vit_tin'\. .* vit_tiny"):
        load("timm:vit_tin")


def test_a_model_of_timm_is_built_for_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_model(name: str, *, pretrained: bool, **more: Any) -> nn.Module:
        if name == "resnet" and more:
            raise TypeError("ResNet.__init__() got an unexpected keyword argument 'img_size'")
        if more.get("img_size") == (1, 1):
            raise AssertionError("no patch fits.\nAt all")
        model = nn.Linear(2, 3)
        model.pretrained_cfg, model.asked = {}, more  # type: ignore[assignment]
        return model

    fake: Any = types.ModuleType("timm")
    fake.list_models, fake.create_model = lambda: ["vit", "resnet"], create_model
    monkeypatch.setitem(sys.modules, "timm", fake)
    assert load("timm:vit", size=(32, 48)).model.asked == {"img_size": (32, 48)}
    assert load("timm:vit").model.asked == {}
    assert load("timm:resnet", size=(32, 48)).model.asked == {}
    with pytest.raises(ValueError, match=r"size: .*got 1 x 1. Error from timm: no patch fits\.$"):
        load("timm:vit", size=(1, 1))


@pytest.mark.parametrize(("size", "asked"), [(None, False), ((4, 4), False), ((4, 6), True)])
def test_a_model_of_transformers_interpolates_to_a_size(
    size: tuple[int, int] | None, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sized(_Network):
        config = types.SimpleNamespace(id2label={}, image_size=4)

        def forward(
            self, pixel_values: torch.Tensor, scale: float = 1.0, interpolate_pos_encoding: bool = False
        ) -> types.SimpleNamespace:
            return types.SimpleNamespace(logits=torch.full((1, 1), float(interpolate_pos_encoding)))

    fake = _transformers()
    fake.AutoModelForImageClassification.from_config = lambda config: Sized()
    monkeypatch.setitem(sys.modules, "transformers", fake)
    model = load("hf:vit", size=size).model
    assert model(torch.zeros(1, 3, 4, 6)).item() == asked
    assert model(torch.zeros(1, 3, 4, 6), interpolate_pos_encoding=False).item() == 0


def test_a_model_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    transform = types.SimpleNamespace(mean=[0.1], std=[0.2])
    best = types.SimpleNamespace(transforms=lambda: transform, meta={"categories": ["cat", "dog"]})
    asked: list[object] = []

    def get_model(name: str, *, weights: object, weights_backbone: object = best) -> nn.Module:
        asked.extend((weights, weights_backbone))
        return nn.Linear(2, 2)

    fake: Any = types.ModuleType("torchvision")
    fake.models = types.SimpleNamespace(
        list_models=lambda: ["resnet18"],
        get_model=get_model,
        get_model_builder=lambda name: get_model,
        get_model_weights=lambda name: types.SimpleNamespace(DEFAULT=best),
    )
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    fresh, trained = load("torchvision:resnet18"), load("torchvision:resnet18", pretrained=True)
    assert asked == [None, None, best, best]
    assert (fresh.classes, fresh.mean, fresh.source) == ((), (), "torchvision:resnet18, fresh parameters")
    assert (fresh.random, trained.random) == (True, False)
    assert (trained.classes, trained.mean, trained.std) == (("cat", "dog"), (0.1,), (0.2,))
    with pytest.raises(ValueError, match="torchvision model, got 'alexnot'"):
        load("torchvision:alexnot")


class _Network(nn.Module):
    """Network with the interface of a transformers model."""

    config = types.SimpleNamespace(id2label={1: "dog", 0: "cat"})

    def forward(self, pixel_values: torch.Tensor, scale: float = 1.0) -> types.SimpleNamespace:
        return types.SimpleNamespace(logits=scale * pixel_values.mean((2, 3)))


def _transformers() -> Any:
    def from_hub(name: str, **_options: object) -> object:
        if name == "nobody/nothing":
            raise OSError("Cannot reach the hub.\nMore lines")
        return name

    def preprocessing(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        if name == "plain/model":
            raise OSError("no preprocessor_config.json")
        return {"image_mean": [0.1], "image_std": [0.2]}, {}

    def pretrained(name: str, *, use_safetensors: bool, trust_remote_code: bool) -> nn.Module:
        assert (use_safetensors, trust_remote_code) == (True, False)
        from_hub(name)
        return _Network()

    fake: Any = types.ModuleType("transformers")
    fake.CONFIG_MAPPING = {"vit": object}
    fake.AutoConfig = types.SimpleNamespace(for_model=lambda name: name, from_pretrained=from_hub)
    fake.AutoModelForImageClassification = types.SimpleNamespace(
        from_config=lambda config: _Network(), from_pretrained=pretrained
    )
    fake.ImageProcessingMixin = types.SimpleNamespace(get_image_processor_dict=preprocessing)
    return fake


def test_a_model_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", _transformers())
    for spec in ("hf:vit", "hf:google/vit"):
        fresh = load(spec)
        assert isinstance(fresh.model, Logits)
        assert (fresh.classes, fresh.mean, fresh.source) == ((), (), f"{spec}, fresh parameters")
        assert fresh.model(torch.zeros(2, 3, 4, 4)).shape == (2, 3)
        assert fresh.model(torch.ones(2, 3, 4, 4), scale=3.0).tolist() == [[3.0] * 3] * 2
    trained = load("hf:google/vit", pretrained=True)
    assert (trained.classes, trained.mean, trained.std) == (("cat", "dog"), (0.1,), (0.2,))
    assert load("hf:plain/model", pretrained=True).mean == ()


@pytest.mark.parametrize("pretrained", [True, False])
def test_a_name_that_the_hub_does_not_give_is_named(pretrained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", _transformers())
    message = r"got hf:nobody/nothing\. Error from transformers: Cannot reach the hub\.$"
    with pytest.raises(ValueError, match=message):
        load("hf:nobody/nothing", pretrained=pretrained)


@pytest.fixture
def torchvision_operators() -> Iterator[None]:
    """Define two operators that torchvision needs if its compiled library does not match the version of torch."""
    if hasattr(torch.ops.torchvision, "nms"):
        yield
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    yield
    library._destroy()


@pytest.mark.parametrize(
    ("package", "spec"),
    [
        ("timm", "timm:vit_tiny_patch16_224"),
        ("timm", "timm:swin_tiny_patch4_window7_224"),
        ("timm", "timm:resnet10t"),
        ("transformers", "hf:vit"),
        ("transformers", "hf:dinov2"),
        ("transformers", "hf:mobilenet_v1"),
    ],
)
@pytest.mark.filterwarnings("default")  # warnings of the library
@pytest.mark.usefixtures("torchvision_operators")
def test_the_real_libraries_at_another_size(package: str, spec: str) -> None:
    pytest.importorskip(package, reason="the extra 'models' is not installed", exc_type=ImportError)
    assert load(spec, size=(128, 160)).model(torch.zeros(1, 3, 128, 160)).shape[0] == 1


@pytest.mark.parametrize(
    ("package", "spec"),
    [
        ("timm", "timm:vit_tiny_patch16_224"),
        ("torchvision", "torchvision:resnet18"),
        ("transformers", "hf:mobilenet_v1"),
    ],
)
@pytest.mark.filterwarnings("default")  # warnings of the library
@pytest.mark.usefixtures("torchvision_operators")
def test_the_real_libraries_where_they_are_installed(package: str, spec: str) -> None:
    pytest.importorskip(package, reason="the extra 'models' is not installed", exc_type=ImportError)
    logits = load(spec).model(torch.zeros(1, 3, 224, 224))
    assert logits.ndim == 2
    assert logits.shape[0] == 1


@pytest.mark.parametrize(("spec", "fix"), [("resnet18", "torchvision:resnet18"), ("tests.nets:small", "")])
def test_only_other_libraries_have_pretrained_weights(spec: str, fix: str) -> None:
    with pytest.raises(ValueError, match=f"pretrained: must be False .* got True with '{spec}'.*{fix}"):
        load(spec, pretrained=True)

"""The page: where it is found, what is inserted into it, and how it is shown without a server."""

import base64
import html
import json
import re
from pathlib import Path

import pytest
import torch

from attnconv import SelfAttention2d
from attnconv.explorer import Explorer, explore, export, find_page, html_page, payload
from attnconv.explorer.html_page import with_payload, with_server
from tests.explorer.pages import PAGE, place_stand_in


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a page to the path where a checkout builds it."""
    return place_stand_in(tmp_path, monkeypatch)


def small() -> bytes:
    return payload(SelfAttention2d(3, 4, heads=2), torch.rand(1, 3, 4, 5), title="<two> & heads")


def embedded(text: str) -> bytes:
    found = re.findall(r'<script type="application/octet-stream" id="attnconv-payload">([^<]*)</script>', text)
    assert len(found) == 1
    return base64.b64decode(found[0], validate=True)


class TestPlaces:
    def test_the_page_of_the_package_comes_first(self, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert find_page() == PAGE
        other = built.with_name("page.html")
        other.write_text("packaged")
        monkeypatch.setattr(html_page, "PACKAGED", other)
        assert find_page() == "packaged"

    def test_without_a_page_it_is_said_how_to_build_it(self, built: Path) -> None:
        built.unlink()
        with pytest.raises(FileNotFoundError, match=r"page: .*got nothing at .*`make page`"):
            find_page()

    def test_the_places_are_those_of_the_wheel_and_the_checkout(self) -> None:
        root = Path(__file__).resolve().parents[2]
        assert root / "web" / "dist" / "index.html" == html_page.BUILT
        assert root / "src" / "attnconv" / "explorer" / "page.html" == html_page.PACKAGED


class TestParts:
    def test_a_payload_goes_before_the_end_of_the_body(self) -> None:
        found = with_payload(PAGE, b"\x00\xff")
        assert embedded(found) == b"\x00\xff"
        assert found.index("attnconv-payload") > found.index("<p>stand-in</p>")
        assert found.index("attnconv-payload") < found.rindex("</body>")

    def test_the_servers_mark_goes_into_the_head(self) -> None:
        found = with_server(PAGE, images=True)
        assert '<head><meta name="attnconv-server" content="images"><meta charset' in found
        assert with_server('<head lang="en">', images=False).endswith('content="payload">')


class TestExport:
    def test_two_files(self, built: Path, tmp_path: Path) -> None:
        content = small()
        path = export(content, tmp_path / "deep" / "out")
        assert path == tmp_path / "deep" / "out" / "index.html"
        assert embedded(path.read_text(encoding="utf-8")) == content
        assert (path.parent / "payload.safetensors").read_bytes() == content
        assert sorted(file.name for file in path.parent.iterdir()) == ["index.html", "payload.safetensors"]
        assert export(content, str(path.parent)) == path

    def test_several_models_are_listed_and_stored_as_scripts(self, built: Path, tmp_path: Path) -> None:
        model = SelfAttention2d(3, 4, heads=2)
        models = {"first": payload(model, title="</script> first"), "nine-heads": payload(model, title="Nine")}
        path = export(None, tmp_path / "out", models=models, about={"nine-heads": "Trained on digits"})
        page = path.read_text(encoding="utf-8")
        listed = re.search(r'<script type="application/json" id="attnconv-models">(.*)</script>\n</body>', page)
        assert listed is not None
        assert "</script>" not in listed[1]
        assert json.loads(listed[1]) == [
            {"title": "</script> first", "file": "models/first.js"},
            {"title": "Nine", "file": "models/nine-heads.js", "about": "Trained on digits"},
        ]
        for name, content in models.items():
            script = (path.parent / "models" / f"{name}.js").read_text(encoding="utf-8")
            found = re.fullmatch(rf'attnconvModel\("{name}", "([A-Za-z0-9+/=]*)"\);\n', script)
            assert found is not None
            assert base64.b64decode(found[1]) == content
        assert sorted(file.name for file in path.parent.iterdir()) == ["index.html", "models"]
        both = export(models["first"], tmp_path / "both", models=models).read_text(encoding="utf-8")
        assert embedded(both) == models["first"]
        assert "attnconv-models" in both

    @pytest.mark.parametrize("name", ["", "../x", "Two", "a b", '"'])
    def test_names_of_models(self, built: Path, tmp_path: Path, name: str) -> None:
        with pytest.raises(ValueError, match=rf"models: .*got {re.escape(repr(name))}"):
            export(None, tmp_path / "out", models={name: small()})
        assert not (tmp_path / "out").exists()

    def test_nothing_to_export(self, built: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"payload: .*got None"):
            export(None, tmp_path / "out")

    def test_nothing_is_written_of_what_is_broken(self, built: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="payload: must be a complete safetensors"):
            export(small()[:-1], tmp_path / "out")
        assert not (tmp_path / "out").exists()
        with pytest.raises(ValueError, match=r"folder: .*got the file"):
            export(small(), built)
        built.unlink()
        with pytest.raises(FileNotFoundError, match="page: "):
            export(small(), tmp_path / "out")
        assert not (tmp_path / "out").exists()


class TestNotebook:
    def test_a_frame_with_the_whole_page(self, built: Path) -> None:
        shown = explore(SelfAttention2d(3, 4, heads=2), torch.rand(1, 3, 4, 5), title='"two" <heads>', height=500)
        frame = shown._repr_html_()
        source = re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts allow-downloads" .*</iframe>', frame)
        assert source is not None
        assert embedded(html.unescape(source[1])) == shown.content
        assert "height: 500px" in frame
        assert 'title="attnconv explorer: &quot;two&quot; &lt;heads&gt;"' in frame
        assert repr(shown).startswith("Explorer('\"two\" <heads>', ")

    def test_wrong_arguments(self, built: Path) -> None:
        with pytest.raises(ValueError, match=r"height: .*got 10"):
            Explorer(small(), height=10)
        with pytest.raises(ValueError, match="payload: must be a complete safetensors"):
            Explorer(b"")

"""Encoders of images under a head of classes, read by Pillow."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roundtable.core import JobConfig, Layout, Site, initial_state
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.foundation.adapters import plain_name
from roundtable.core.foundation.huggingface_classifier import HuggingFaceClassifier
from roundtable.core.foundation.padding_check import check_images
from roundtable.core.foundation.published import Story, load_adapter, publish
from roundtable.core.initial_model import initial_model

LABELS = ["benign", "malignant"]
TINY = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48}


def vit(folder: Path, auto: str = "AutoModel", **settings: Any) -> Path:
    """A tiny random ViT in a folder, as `auto` of transformers saves it, with its image processor."""
    import transformers

    config = transformers.ViTConfig(image_size=16, patch_size=8, **TINY, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        getattr(transformers, auto).from_config(config).save_pretrained(folder)
    told = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 16, "width": 16},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vit(tmp_path_factory.mktemp("bases") / "vit")


def task_of(base: Path, **settings: Any) -> HuggingFaceClassifier:
    return HuggingFaceClassifier(
        str(base), **{"labels": LABELS, "inputs": "images", "targets": "all-linear", **settings}
    )


def scans(folder: Path, *modes: str) -> Path:
    """Images of one colour each and of these modes, and the file that names them."""
    image = pytest.importorskip("PIL.Image")
    folder.mkdir(exist_ok=True)
    lines = []
    for number, mode in enumerate(modes):
        made = image.new("RGB", (20, 12), (40 * number, 90, 200)).convert("L" if mode == "I;16" else mode)
        if mode == "I;16":
            made = image.new("I;16", (20, 12), 40_000)
        made.save(folder / f"{number}.png")
        lines.append({"image": f"{number}.png", "label": LABELS[number % 2]})
    file = folder / "scans.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def test_images_are_read_as_the_bases_processor_has_them(base: Path, tmp_path: Path) -> None:
    task = task_of(base, test_share=0.4)
    file = scans(tmp_path / "a", "RGB", "L", "RGBA", "P", "RGB")
    training, test = task.data(Site("a", options={"file": str(file)}))
    assert (len(training), len(test)) == (3, 2)
    pixels, label = training[0]
    assert pixels.shape == (3, 16, 16)
    # (v / 255 − 0.5) / 0.5 of the one colour of the image.
    torch.testing.assert_close(pixels[:, 3, 3], torch.tensor([0, 90, 200]) / 127.5 - 1, rtol=0, atol=1e-6)
    assert [int(training[place][1]) for place in range(3)] == [0, 1, 0]
    batch = (torch.stack([training[0][0], training[1][0]]), torch.stack([label, training[1][1]]))
    model = task.model()
    task.loss(model.train(), batch).backward()  # type: ignore[no-untyped-call]
    assert task.metrics(model.eval(), batch)["accuracy"][1] == 2


def test_rows_of_parquet_may_hold_the_images(base: Path, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    scans(tmp_path, "RGB", "RGB")
    own = [(tmp_path / f"{number}.png").read_bytes() for number in range(2)]
    task = task_of(base, test_share=0.0)
    for column in (own, [{"bytes": each, "path": "x.png"} for each in own]):
        parquet.write_table(arrow.table({"scan": column, "label": LABELS}), tmp_path / "scans.parquet")
        options = {"file": str(tmp_path / "scans.parquet"), "image": "scan"}
        training, _ = task.data(Site("a", options=options))
        assert torch.equal(training[1][0], task.data(Site("a", options=options))[0][1][0])
        assert float(training[1][0][0, 0, 0]) == pytest.approx(40 / 127.5 - 1)


def test_images_that_would_lose_something_are_refused_without_their_names(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = scans(tmp_path, "RGB", "I;16", "RGBA", "L", "L")
    image = pytest.importorskip("PIL.Image")
    image.new("RGBA", (4, 4), (1, 2, 3, 0)).save(tmp_path / "2.png")
    slices = [image.new("L", (4, 4), grey) for grey in (1, 2, 3)]
    slices[0].save(tmp_path / "3.png", "TIFF", save_all=True, append_images=slices[1:])
    image.new("RGB", (4, 4)).save(tmp_path / "4.png", "EPS")
    training, _ = task_of(base, test_share=0.0).data(Site("a", options={"file": str(file)}))
    for place, why in (
        (1, "mode I;16"),
        (2, "it is transparent in places"),
        (3, "it holds 3 images"),
        (4, "cannot identify"),
    ):
        with (
            caplog.at_level(logging.ERROR),
            pytest.raises(TaskError, match=f"row {place} of the site") as caught,
        ):
            training[place]
        assert why in caplog.text
        assert ".png" not in str(caught.value)
    (tmp_path / "0.png").unlink()
    with pytest.raises(TaskError, match="line 1: 'image' is wanted, an image's file that is there"):
        task_of(base).data(Site("a", options={"file": str(file)}))


def test_a_classifiers_own_head_stays_or_is_drawn_afresh(tmp_path: Path) -> None:
    import transformers

    own = vit(tmp_path / "own", "AutoModelForImageClassification", id2label={0: "cat", 1: "dog", 2: "cow"})
    with pytest.raises(
        TaskError, match=r"classifier already, of the labels cat, dog, cow, .* fresh_head = true"
    ):
        task_of(own).model()
    kept: Any = task_of(own, labels=["cat", "dog", "cow"]).model()
    auto = transformers.AutoModelForImageClassification
    weight = auto.from_pretrained(own).classifier.weight
    assert torch.equal(kept.get_base_model().classifier.modules_to_save["default"].weight, weight)
    fresh: Any = task_of(own, labels=["cat", "dog", "cow"], fresh_head=True).model()
    drawn = fresh.get_base_model().classifier.modules_to_save["default"].weight
    assert not torch.equal(drawn, weight)
    other = initial_state(task_of(own, fresh_head=True), 1)
    names = {spec.name for spec in Layout.of(other).averaged if ".lora_" not in spec.name}
    assert {plain_name(name) for name in names} == {
        "base_model.model.classifier.weight",
        "base_model.model.classifier.bias",
    }


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_comes_out_opens_elsewhere(base: Path, fresh: bool, tmp_path: Path) -> None:
    import peft
    import transformers

    if fresh:
        base = vit(
            tmp_path / "own", "AutoModelForImageClassification", id2label={0: "cat", 1: "dog", 2: "cow"}
        )
    table = {"base": str(base), "labels": LABELS, "inputs": "images", "targets": "all-linear"}
    task_table = {"name": "roundtable:HuggingFaceClassifier", **table, "fresh_head": fresh}
    job = JobConfig.model_validate({"task": task_table, "cohort": {"size": 2}})
    task = HuggingFaceClassifier(**job.task.parameters)
    model = initial_model(job, task)
    step = torch.randn(model.layout.size, generator=torch.Generator().manual_seed(5))
    model = replace(model, vector=model.vector + 0.02 * step)
    own: Any = initial_state(task, job.seed)
    model.layout.load(own, model.vector)
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    def logits(made: Any) -> torch.Tensor:
        with torch.no_grad():
            return made.eval()(pixel_values=pixels).logits  # type: ignore[no-any-return]

    wanted, story = logits(own), Story("scans", 3, ("silo 1",))
    publish(job, task, model, tmp_path / "whole", "transformers", story)
    publish(job, task, model, tmp_path / "adapter", "peft", story)
    auto = transformers.AutoModelForImageClassification
    whole = auto.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(logits(whole), wanted, rtol=1e-4, atol=1e-5)
    assert whole.config.id2label == dict(enumerate(LABELS))
    assert (tmp_path / "whole" / "preprocessor_config.json").is_file()
    plain = auto.from_pretrained(base, id2label=dict(enumerate(LABELS)), ignore_mismatched_sizes=fresh)
    torch.testing.assert_close(
        logits(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")), wanted, rtol=0, atol=0
    )
    torch.testing.assert_close(logits(load_adapter(tmp_path / "adapter", str(base))), wanted, rtol=0, atol=0)
    assert ("ignore_mismatched_sizes" in (tmp_path / "adapter" / "README.md").read_text()) == fresh
    if fresh:
        publish(job, task, model, tmp_path / "traced", "traced", story)


def test_settings_and_processors_that_do_not_fit_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave length out"):
        task_of(base, length=64)
    with pytest.raises(ConfigError, match="choose one of text, pairs, images"):
        task_of(base, inputs="sound")
    with pytest.raises(TaskError, match=r"does not take images of \[3, 24, 24\]"):
        check_images(task_of(base).model(), torch.zeros(3, 24, 24))
    bare = vit(tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(TaskError, match=r"it has no preprocessor_config\.json"):
        task_of(bare).model()
    pins = set(task_of(base).pretrained_base.pins())
    told = json.loads((base / "preprocessor_config.json").read_text())
    other = vit(tmp_path / "other")
    (other / "preprocessor_config.json").write_text(json.dumps({**told, "image_std": [0.2, 0.2, 0.2]}))
    differ = {name.rpartition("_")[0] for name in pins ^ set(task_of(other).pretrained_base.pins())}
    assert differ == {"image_processor"}


def test_averages_that_training_moves_are_in_no_adapter(tmp_path: Path) -> None:
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic"
    )
    transformers.ResNetModel(config).save_pretrained(tmp_path)
    told = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    with pytest.raises(TaskError, match="is a BatchNorm2d, whose averages move in training"):
        task_of(tmp_path, targets=["convolution"]).model()
    task_of(tmp_path, method="full").model()

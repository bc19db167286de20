"""Pictures are drawn from what a run leaves, of the size that was asked for, or one error says what is wrong."""

import json
import struct

import numpy as np
import pytest
from flax import nnx

import flax_transformer as ft
from flax_transformer import pictures
from flax_transformer.pictures import attention_maps, collect_attention, loss_curve

ENTRIES = [{"step": step, "loss": 7.0 / step + 2.0, "grad_norm": 0.3} for step in (1, 5, 9, 13)]


def png_size(path):
    """Width and height, from the header."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def write_metrics(directory, entries):
    path = directory / "metrics.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures = []
    save = pictures.Figure.savefig
    monkeypatch.setattr(
        pictures.Figure, "savefig", lambda self, *args, **kwargs: (figures.append(self), save(self, *args, **kwargs))[1]
    )
    return figures


def test_a_loss_curve_is_a_png_with_all_three_lines_and_units(tmp_path, drawn):
    entries = [*ENTRIES[:-1], {**ENTRIES[-1], "validation_loss": 3.3}]
    loss_curve(write_metrics(tmp_path, entries), tmp_path / "loss.png", baseline=6.4)
    assert png_size(tmp_path / "loss.png") == (1050, 630)
    (axes,) = drawn[0].axes
    curve, validation, baseline = axes.lines
    np.testing.assert_allclose(curve.get_xydata(), [[e["step"], e["loss"]] for e in ENTRIES])
    np.testing.assert_allclose(validation.get_xydata(), [[13, 3.3]])
    assert set(baseline.get_ydata()) == {6.4}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss (nats per token)")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training", "validation", "baseline (6.40)"]


def test_the_legend_says_what_the_training_loss_alone_has(tmp_path, drawn):
    entries = [*ENTRIES[:-1], {**ENTRIES[-1], "validation_loss": 3.3}]
    alone = ["dropout", "label smoothing"]
    loss_curve(write_metrics(tmp_path, entries), tmp_path / "loss.png", in_training_only=alone)
    texts = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert texts == ["training, with dropout and label smoothing", "validation, without"]


def test_one_step_is_enough_for_a_curve(tmp_path):
    loss_curve(write_metrics(tmp_path, ENTRIES[:1]), tmp_path / "loss.png")
    assert png_size(tmp_path / "loss.png") == (1050, 630)


def test_a_late_spike_and_a_nan_leave_the_curve_readable(tmp_path, drawn):
    entries = [{"step": step, "loss": 2.0 + 5.0 / step} for step in range(1, 120)]
    entries[70]["loss"], entries[30]["loss"] = 900.0, float("nan")
    loss_curve(write_metrics(tmp_path, entries), tmp_path / "loss.png")
    low, high = drawn[0].axes[0].get_ylim()
    assert 1.5 < low < 2.1
    assert 7.0 < high < 7.5


def test_the_last_entry_of_a_step_counts(tmp_path, drawn):
    loss_curve(write_metrics(tmp_path, [*ENTRIES, {"step": 9, "loss": 2.5}]), tmp_path / "loss.png")
    assert drawn[0].axes[0].lines[0].get_xydata()[2].tolist() == [9, 2.5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"step": 1, "loss": 2.5}\n{"step": 2, "lo', "line 2: every line must be a JSON object"),
        ('{"step": 1}\n', "line 1: "),
        ('{"step": 1.5, "loss": 2.5}\n', "line 1: "),
        ('{"step": 1, "loss": "low"}\n', "line 1: "),
        ('{"step": 1, "loss": 2.5, "validation_loss": [3]}\n', "line 1: "),
        ("[1, 2]\n", "line 1: "),
        ('{"step": 1, "loss": NaN}\n', "no finite loss"),
        (b"\xff\xfe{", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_bad_metrics_are_one_clear_error_and_no_picture(tmp_path, content, message):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        loss_curve(path, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_attention_of_a_decoder_only_model_is_causal_and_sums_to_one():
    """Of one whose layers are scanned: they are run one by one to be watched."""
    config = ft.DecoderOnlyConfig.small(vocab_size=11, d_model=6, d_ff=10, num_heads=3, num_layers=2, layers="scanned")
    weights = collect_attention(ft.DecoderOnly(config, rngs=nnx.Rngs(0)), np.array([[3, 1, 4, 1, 5]], np.int32))
    assert list(weights) == ["blocks.0.attention", "blocks.1.attention"]
    for layer in weights.values():
        assert layer.shape == (3, 5, 5)
        np.testing.assert_allclose(layer.sum(-1), 1.0, rtol=1e-6)
        assert (np.triu(layer, 1) == 0).all()


def test_attention_of_shared_layers_is_collected_once_for_every_use():
    config = ft.EncoderDecoderConfig.document(
        source_vocab_size=11, target_vocab_size=13, d_model=8, d_ff=10, num_heads=2, num_layers=3
    )
    model = ft.EncoderDecoder(config, rngs=nnx.Rngs(0))
    source, target = np.array([[3, 1, 4, 1, 5, 9, 2]], np.int32), np.array([[2, 7, 1]], np.int32)
    weights = collect_attention(model, source, target, None, ft.masks.causal_mask(3))
    shapes = {name: layer.shape for name, layer in weights.items()}
    assert shapes == {
        f"{stack}.layers.{layer}.{kind}": (2, *axes)
        for layer in range(3)
        for stack, kind, axes in (
            ("encoder", "self_attention", (7, 7)),
            ("decoder", "self_attention", (3, 3)),
            ("decoder", "cross_attention", (3, 7)),
        )
    }
    first, last = (weights[f"decoder.layers.{layer}.cross_attention"] for layer in (0, 2))
    assert not np.allclose(first, last)  # one module, but three calls


def test_attention_is_collected_of_one_example():
    config = ft.DecoderOnlyConfig.small(vocab_size=11, d_model=6, d_ff=10, num_heads=3, num_layers=1)
    with pytest.raises(ValueError, match="one example, got a batch of 2"):
        collect_attention(ft.DecoderOnly(config, rngs=nnx.Rngs(0)), np.ones((2, 5), np.int32))


def random_weights(layers=2, heads=3, rows=3, columns=5):
    random = np.random.default_rng(0)
    return {f"layer.{number}": random.dirichlet(np.ones(columns), (heads, rows)) for number in range(layers)}


def test_attention_maps_have_a_panel_per_layer_and_head_on_one_scale(tmp_path, drawn):
    weights = random_weights()
    attention_maps(weights, rows="abc", columns="vwxyz", output=tmp_path / "maps.png")
    assert min(png_size(tmp_path / "maps.png")) > 300
    images = [image for axes in drawn[0].axes for image in axes.images]
    panels = [panel for layer in weights.values() for panel in layer]
    assert len(images) == len(panels) == 6
    for image, panel in zip(images, panels, strict=True):
        assert image.get_clim() == (0, 1)
        np.testing.assert_allclose(image.norm(0.04), 0.2)  # one token of 25 is told from none
        np.testing.assert_allclose(image.get_array(), panel, rtol=1e-6)


def test_any_token_can_be_a_label(tmp_path, drawn):
    rows = ["\n\t", " the", "$x_$"]
    columns = ["日本", "\ue000", "\ud800", "a" * 40, "\\"]
    attention_maps(random_weights(), rows=rows, columns=columns, output=tmp_path / "maps.png")
    first, last = drawn[0].axes[0], drawn[0].axes[5]
    assert [label.get_text() for label in first.get_yticklabels()] == ["\\n\\t", "·the", "$x_$"]
    labels = [label.get_text() for label in last.get_xticklabels()]
    assert labels[0] in ("日本", "\\u65e5\\u672c")  # as the fonts of the machine have it
    assert labels[1:] == ["\\ue000", "\\ud800", "a" * 13 + "…", "\\"]


@pytest.mark.parametrize(
    ("weights", "rows", "message"),
    [
        ({}, "abc", "at least one layer"),
        (random_weights(), "abcd", r"\(heads, 4 rows, 5 columns\).*layer.0: \(3, 3, 5\); layer.1"),
        (random_weights(), "", "1 to 64 tokens on an axis, got 0 rows and 5 columns"),
        (random_weights(rows=65), "a" * 65, "got 65 rows"),
        ({**random_weights(), **{"odd": np.ones((2, 3, 5))}}, "abc", r"odd: \(2, 3, 5\)"),
    ],
)
def test_weights_that_do_not_fit_the_tokens_are_refused(tmp_path, weights, rows, message):
    with pytest.raises(ValueError, match=message):
        attention_maps(weights, rows=rows, columns="vwxyz", output=tmp_path / "maps.png")

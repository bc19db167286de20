"""`torch_reference` is the two documents: their printed facts, and transcriptions that it equals bit for bit."""

# ruff: noqa: N806 - local variables have the documents' names and the glossary's axis letters

import inspect
import math
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")  # before the imports that need it: the run on the newest JAX has no PyTorch

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812 - as the document imports it

from torch_reference import decoder_only, encoder_decoder
from torch_reference.decoder_only import DecoderOnly, position_embedding, sample_batch, split_tokens
from torch_reference.encoder_decoder import (
    LayerNorm,
    MultiHeadedAttention,
    PositionalEncoding,
    SublayerConnection,
    autoregressive_infer,
    clones,
    create_pad_mask,
    make_standard_transformer,
    subsequent_mask,
)
from torch_reference.walks import decoder_only as decoder_only_walk
from torch_reference.walks import encoder_decoder as encoder_decoder_walk

DOCUMENT_ROWS = (
    (25222, 402, 2935, 1062, 6086, 3692, 4534, 71265, 2012, 5720, 11, 290, 172442, 625, 1606, 84275),
    (5892, 1989, 6028, 316, 1520, 261, 12398, 8660, 52125, 11, 472, 1023, 11747, 12486, 842, 402),
    (395, 7155, 28963, 316, 31454, 69191, 379, 290, 1432, 326, 8808, 328, 290, 17994, 7578, 13),
    (25, 37330, 289, 15193, 67384, 326, 40202, 38086, 198, 3638, 4859, 25, 54315, 13700, 326, 13888),
)


def random_ids(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def shapes_in(printed: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, sizes.split(","))) for sizes in re.findall(r"torch\.Size\(\[(.*?)\]\)", printed)]


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


# The encoder-decoder document


def straight_line_encoder_decoder(seed, sizes, dropout, inputs, train):
    """The probabilities without a class: weights drawn in the document's order, then its arithmetic, one call after another.

    Returns them with the weights, each under the first of its keys in the document's `state_dict`.
    """
    src_vocab, tgt_vocab, d_model, d_ff, h, N = sizes
    src, tgt, src_mask, tgt_mask = inputs
    torch.manual_seed(seed)
    projection, w1, w2 = nn.Linear(d_model, d_model), nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
    source_rows, target_rows = nn.Embedding(src_vocab, d_model), nn.Embedding(tgt_vocab, d_model)
    output = nn.Linear(d_model, tgt_vocab)
    norm_at_first = nn.ParameterDict({"gamma": torch.ones(d_model), "beta": torch.zeros(d_model)})
    drawn = {"generator.proj": output, "src_embed.0.lut": source_rows, "tgt_embed.0.lut": target_rows}
    drawn["decoder.layers.0.src_attn.linears.0"] = projection
    for stack in ("encoder", "decoder"):
        drawn[f"{stack}.layers.0.self_attn.linears.0"] = projection
        drawn |= {f"{stack}.layers.0.feed_forward.w1": w1, f"{stack}.layers.0.feed_forward.w2": w2}
        drawn |= {f"{stack}.layers.0.sublayer.0.norm": norm_at_first, f"{stack}.norm": norm_at_first}
    weights = {
        f"{prefix}.{key}": value.detach().clone().requires_grad_()
        for prefix, module in drawn.items()
        for key, value in module.named_parameters()
    }

    def linear(x, prefix):
        return F.linear(x, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])

    def norm(x, prefix):
        # In the order of making: backward adds in the reverse of it, so another order has other bits in its gradients.
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return weights[f"{prefix}.gamma"] * (x - mean) / (std + 1e-6) + weights[f"{prefix}.beta"]

    def attend(x, memory, mask, prefix):
        query, key, value = (
            linear(y, f"{prefix}.linears.0").view(y.size(0), -1, h, d_model // h).transpose(1, 2)
            for y in (x, memory, memory)
        )
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_model // h)
        attended = F.dropout(torch.softmax(scores.masked_fill(mask.unsqueeze(1) == 0, -1e9), dim=-1), 0.1, train)
        merged = torch.matmul(attended, value).transpose(1, 2).contiguous().view(x.size(0), -1, d_model)
        return linear(merged, f"{prefix}.linears.0")

    def feed_forward(x, prefix):
        return linear(F.dropout(torch.relu(linear(x, f"{prefix}.w1")), dropout, train), f"{prefix}.w2")

    def embed(ids, prefix):
        position = torch.arange(0, 5000).unsqueeze(1)
        angles = position * torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        table = torch.stack([torch.sin(angles), torch.cos(angles)], dim=-1).reshape(1, 5000, d_model)
        rows = F.embedding(ids, weights[f"{prefix}.lut.weight"]) * math.sqrt(d_model)
        return F.dropout(rows + table[:, : ids.size(1)], dropout, train)

    x, layer, inner = embed(src, "src_embed.0"), "encoder.layers.0", "encoder.layers.0.sublayer.0.norm"
    for _ in range(N):
        y = norm(x, inner)
        x = norm(x + F.dropout(attend(y, y, src_mask, f"{layer}.self_attn"), dropout, train), inner)
        x = norm(x + F.dropout(feed_forward(norm(x, inner), f"{layer}.feed_forward"), dropout, train), inner)
    memory = norm(x, "encoder.norm")

    x, layer, inner = embed(tgt, "tgt_embed.0"), "decoder.layers.0", "decoder.layers.0.sublayer.0.norm"
    for _ in range(N):
        y = norm(x, inner)
        x = norm(x + F.dropout(attend(y, y, tgt_mask, f"{layer}.self_attn"), dropout, train), inner)
        x = norm(x + F.dropout(attend(norm(x, inner), memory, src_mask, f"{layer}.src_attn"), dropout, train), inner)
        x = norm(x + F.dropout(feed_forward(norm(x, inner), f"{layer}.feed_forward"), dropout, train), inner)
    return torch.softmax(linear(norm(x, "decoder.norm"), "generator.proj"), dim=-1), weights


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("sizes", "dropout", "seed"), [((11, 13, 8, 20, 2, 3), 0.3, 1), ((17, 5, 12, 7, 3, 1), 0.0, 23)]
)
def test_encoder_decoder_equals_a_straight_line_transcription_bit_for_bit(sizes, dropout, seed, train):
    src, tgt = random_ids(1, sizes[0], 3, 7), random_ids(2, sizes[1], 3, 5)
    src[0, -2:], tgt[1, -3:], src[2] = 0, 0, 0  # the last source row is all padding
    inputs = (src, tgt, create_pad_mask(src), create_pad_mask(tgt) * subsequent_mask(5))
    torch.manual_seed(seed)
    model = make_standard_transformer(*sizes, dropout=dropout).train(train)
    ours = model(*inputs)
    expected, weights = straight_line_encoder_decoder(seed, sizes, dropout, inputs, train)
    assert torch.equal(ours, expected)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    (ours * ours.detach().sin()).sum().backward()
    (expected * expected.detach().sin()).sum().backward()
    for key, weight in weights.items():
        assert torch.equal(parameters[key], weight), key
        assert torch.equal(gradient(parameters[key]), gradient(weight)), key


def test_the_documents_names_come_in_its_order_with_its_signatures():
    defined = [
        (value.__code__.co_firstlineno if inspect.isfunction(value) else inspect.getsourcelines(value)[1], name, value)
        for name, value in vars(encoder_decoder).items()
        if getattr(value, "__module__", None) == encoder_decoder.__name__
    ]
    assert [f"{name}{inspect.signature(value)}" for _, name, value in sorted(defined)] == [
        "Generator(d_model, vocab_size)",
        "subsequent_mask(size)",
        "create_pad_mask(x, pad_idx=0)",
        "clones(module, N)",
        "LayerNorm(features, eps=1e-06)",
        "SublayerConnection(size, dropout)",
        "MultiHeadedAttention(h, d_model, dropout=0.1)",
        "PositionwiseFeedForward(d_model, d_ff, dropout=0.1)",
        "Embeddings(d_model, vocab)",
        "PositionalEncoding(d_model, dropout, max_len=5000)",
        "EncoderLayer(size, self_attn, feed_forward, dropout)",
        "Encoder(layer, N)",
        "DecoderLayer(size, self_attn, src_attn, feed_forward, dropout)",
        "Decoder(layer, N)",
        "Transformer(encoder, decoder, src_embed, tgt_embed, generator)",
        "make_standard_transformer(src_vocab, tgt_vocab, d_model=512, d_ff=2048, h=8, N=6, dropout=0.1)",
        "autoregressive_infer(model, src, src_mask, max_len, start_idx)",
    ]


def test_the_state_has_262_keys_for_26_parameters_of_5165688_numbers_and_two_tables():
    model = make_standard_transformer(100, 120)
    state = model.state_dict()
    assert len(state) == 262
    assert [key for key in state if key.endswith("pe")] == ["src_embed.1.pe", "tgt_embed.1.pe"]
    assert len({value.data_ptr() for key, value in state.items() if not key.endswith("pe")}) == 26
    assert sum(parameter.numel() for parameter in model.parameters()) == 5_165_688
    assert sum(value.numel() for key, value in state.items() if not key.endswith("pe")) == 44_314_744


def test_more_layers_bring_no_parameters():
    counts = {sum(p.numel() for p in make_standard_transformer(3, 5, 4, 7, 2, N).parameters()) for N in (1, 3, 11)}
    assert len(counts) == 1


def test_clones_copies_nothing():
    module = nn.Linear(3, 5)
    assert [clone is module for clone in clones(module, 7)] == [True] * 7


def test_the_three_attentions_are_distinct_but_begin_equal():
    attentions = [
        module
        for module in make_standard_transformer(3, 5, 8, 7, 2).modules()
        if isinstance(module, MultiHeadedAttention)
    ]
    weights = [attention.get_parameter("linears.0.weight") for attention in attentions]
    assert len({weight.data_ptr() for weight in weights}) == 3
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_pad_and_causal_masks_cannot_be_combined_by_and_only_by_a_product():
    ids = torch.tensor([[2, 5, 3, 0], [7, 0, 0, 0]])
    pad, causal = create_pad_mask(ids), subsequent_mask(4)
    assert (pad.dtype, tuple(pad.shape)) == (torch.bool, (2, 1, 4))
    assert (causal.dtype, tuple(causal.shape)) == (torch.float32, (1, 4, 4))
    with pytest.raises((RuntimeError, NotImplementedError), match="bitwise_and"):
        _ = pad & causal
    product = pad * causal
    assert product.dtype == torch.float32
    assert product[0].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]


def test_a_fully_masked_row_attends_uniformly():
    attention = MultiHeadedAttention(2, 8).eval()
    mask = torch.ones(3, 5, 7)
    mask[1, 2] = 0
    attention(torch.randn(3, 5, 8), torch.randn(3, 7, 8), torch.randn(3, 7, 8), mask)
    assert isinstance(attention.attn, torch.Tensor)
    torch.testing.assert_close(attention.attn[1, :, 2], torch.full((2, 7), 1 / 7))
    assert attention.attn[1, :, 1].std() > 0.01


def test_the_model_returns_probabilities_and_proj_the_logits():
    torch.manual_seed(3)
    model = make_standard_transformer(11, 13, 8, 20, 2, 3).eval()
    logits = []
    model.generator.proj.register_forward_hook(lambda module, inputs, output: logits.append(output))
    probabilities = model(random_ids(4, 11, 3, 7), random_ids(5, 13, 3, 5), None, None)
    assert tuple(probabilities.shape) == (3, 5, 13)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(3, 5))
    assert torch.equal(torch.softmax(logits[0], dim=-1), probabilities)


def test_attention_dropout_stays_at_a_tenth_whatever_dropout_is_asked_for():
    model = make_standard_transformer(3, 5, 8, 7, 2, dropout=0.0)
    rates = {name.split(".")[-2]: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    assert rates == {"self_attn": 0.1, "src_attn": 0.1, "feed_forward": 0.0, "0": 0.0, "1": 0.0}


def test_a_sublayer_is_normalised_before_and_after_by_one_norm():
    sublayer = SublayerConnection(8, 0.0)
    x = torch.randn(3, 5, 8)
    assert torch.equal(sublayer(x, torch.sin), sublayer.norm(x + torch.sin(sublayer.norm(x))))
    assert len(list(sublayer.parameters())) == 2


def test_layer_norm_divides_by_the_unbiased_deviation_plus_eps():
    x = torch.randn(3, 7, dtype=torch.float64)
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=True, keepdim=True).sqrt() + 0.25)
    torch.testing.assert_close(LayerNorm(7, eps=0.25).double()(x), expected, rtol=0, atol=1e-15)


def test_the_position_table_keeps_its_float32_values_in_double():
    encoding = PositionalEncoding(8, 0.0, max_len=11)
    before = encoding.pe.clone()
    assert torch.equal(encoding.double().pe, before.double())
    assert encoding.pe.dtype == torch.float64


def test_autoregressive_infer_appends_the_likeliest_word_until_max_len_and_leaves_eval_mode():
    torch.manual_seed(29)  # most random weights say one word for ever; these say six
    model = make_standard_transformer(11, 13, 8, 20, 2, 3).train()
    encoded = []
    model.encoder.register_forward_hook(lambda *_: encoded.append(1))
    src = random_ids(8, 11, 1, 7)
    ids = autoregressive_infer(model, src, create_pad_mask(src), max_len=9, start_idx=2)
    assert len(encoded) == 1
    assert not model.training
    assert len(set(ids[0].tolist())) > 3
    assert (ids.dtype, tuple(ids.shape), ids[0, 0].item()) == (torch.int64, (1, 9), 2)
    for length in range(1, 9):
        probabilities = model(src, ids[:, :length], create_pad_mask(src), subsequent_mask(length))
        assert ids[0, length] == probabilities[0, -1].argmax()
    assert autoregressive_infer(model, src, None, max_len=1, start_idx=5).tolist() == [[5]]


def test_autoregressive_infer_takes_a_batch_of_one():
    model = make_standard_transformer(11, 13, 8, 20, 2, 3)
    src = random_ids(9, 11, 3, 7)
    with pytest.raises(RuntimeError, match="must match"):
        autoregressive_infer(model, src, create_pad_mask(src), max_len=5, start_idx=2)


# The decoder-only document


@pytest.mark.parametrize(
    ("vocab_size", "d_model", "num_heads", "context_len", "batch_size", "seed"),
    [(211, 64, 4, 16, 4, 0), (31, 12, 3, 5, 7, 11), (53, 10, 1, 11, 3, 12345)],
)
def test_decoder_only_equals_the_script_bit_for_bit(vocab_size, d_model, num_heads, context_len, batch_size, seed):
    tokenized_txt = random_ids(seed + 1, vocab_size, 307)
    tokenized_txt[5] = vocab_size - 1

    torch.manual_seed(seed)
    data = tokenized_txt[: int(0.9 * len(tokenized_txt))]
    idxs = torch.randint(0, high=len(data) - context_len, size=(batch_size,))
    x_batch = torch.stack([data[idx : idx + context_len] for idx in idxs])
    y_batch = torch.stack([data[idx + 1 : idx + context_len + 1] for idx in idxs])
    embeddings = nn.Embedding(int(max(tokenized_txt)) + 1, d_model)
    table = torch.zeros(context_len, d_model)
    position = torch.arange(0, context_len, dtype=torch.float).unsqueeze(1)
    temp = torch.pow(10000, torch.arange(0, d_model, 2) / d_model)
    table[:, 0::2] = torch.sin(position / temp)
    table[:, 1::2] = torch.cos(position / temp)
    X = embeddings(x_batch) + table
    Wq = nn.Linear(d_model, d_model)
    Wk = nn.Linear(d_model, d_model)
    Wv = nn.Linear(d_model, d_model)
    query = Wq(X).view(batch_size, context_len, num_heads, d_model // num_heads).permute(0, 2, 1, 3)
    key = Wk(X).view(batch_size, context_len, num_heads, d_model // num_heads).permute(0, 2, 1, 3)
    value = Wv(X).view(batch_size, context_len, num_heads, d_model // num_heads).permute(0, 2, 1, 3)
    scores = query @ key.transpose(-2, -1) / (d_model // num_heads) ** 0.5
    masked = scores.masked_fill(torch.triu(torch.ones(context_len, context_len), diagonal=1).bool(), float("-inf"))
    A = F.softmax(masked, -1) @ value
    A = A.permute(0, 2, 1, 3).reshape(batch_size, context_len, d_model)
    Wo = nn.Linear(d_model, d_model)
    output = Wo(A) + X
    layer_norm = nn.LayerNorm(d_model)
    output_layernorm = layer_norm(output)
    ffn = nn.Sequential(nn.Linear(d_model, d_model * 4), nn.ReLU(), nn.Linear(d_model * 4, d_model))
    output = ffn(output_layernorm) + output_layernorm
    output = layer_norm(output)
    last = nn.Linear(d_model, int(max(tokenized_txt)) + 1)
    expected = F.softmax(last(output), -1)

    torch.manual_seed(seed)
    x, y = sample_batch(split_tokens(tokenized_txt)[0], batch_size, context_len)
    model = DecoderOnly(vocab_size, d_model, num_heads, context_len)
    assert torch.equal(x, x_batch)
    assert torch.equal(y, y_batch)
    assert torch.equal(model.attend(model.input_embedding(x)).masked_scores, masked)
    ours = model(x)
    assert torch.equal(ours, expected)
    script = dict(embeddings=embeddings, Wq=Wq, Wk=Wk, Wv=Wv, Wo=Wo, layer_norm=layer_norm, ffn=ffn, output=last)
    weights = dict(nn.ModuleDict(script).named_parameters())
    parameters = dict(model.named_parameters())
    assert list(parameters) == list(weights) == list(model.state_dict())
    F.nll_loss(expected.log().transpose(1, 2), y_batch).backward()
    F.nll_loss(ours.log().transpose(1, 2), y).backward()
    for name, weight in weights.items():
        assert torch.equal(parameters[name], weight), name
        assert torch.equal(gradient(parameters[name]), gradient(weight)), name
    assert torch.equal(model.eval()(x), expected)


def test_the_decoder_only_walk_prints_the_documents_shapes_in_its_order(capsys):
    ids = random_ids(6, 199_853, 1009).tolist()
    ids[13] = 199_853
    decoder_only_walk.walk("Chapter 1: Building Rapport and", ids, seed=1)
    printed = capsys.readouterr().out
    document = [(4, 16), (199854, 64), (4, 16, 64), (4, 16, 64), (16, 64), (16, 1), (32,)]
    document += [(4, 4, 16, 16), (4, 4, 16, 16), (4, 4, 16, 16), (4, 16, 64)]
    assert shapes_in(printed) == document
    assert re.search(rf"'Chapter'\n.*{re.escape(str(ids[:7]))}\n.* 199853\n", printed)
    table = printed.split("after the mask:\n")[1].splitlines()[:16]
    assert [row.split().count("-inf") for row in table] == list(range(15, -1, -1))


def test_masked_scores_are_minus_infinity_exactly_above_the_diagonal():
    model = DecoderOnly(31, 12, 3, 5)
    attention = model.attend(model.input_embedding(random_ids(7, 31, 7, 5)))
    above = torch.ones(5, 5).triu(1).bool().expand(7, 3, 5, 5)
    assert torch.equal(attention.masked_scores == float("-inf"), above)
    assert attention.masked_scores[~above].isfinite().all()
    assert (attention.weights[above] == 0).all()


def test_labels_are_the_ids_one_place_later():
    x, y = sample_batch(torch.arange(100, 311), 7, 5)
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(5))


def test_another_length_is_refused_with_the_rule_the_value_and_the_remedy():
    model = DecoderOnly(31, 12, 3, 5)
    for shape in [(7, 4), (7, 6), (5,), (2, 7, 5)]:
        with pytest.raises(ValueError, match=rf"\(B, 5\).*got {re.escape(str(shape))}; cut the rows"):
            model(torch.zeros(shape, dtype=torch.long))


def test_the_position_table_is_no_state_entry_and_keeps_its_float32_values_in_double():
    model = DecoderOnly(31, 12, 3, 5)
    assert not [key for key in model.state_dict() if "position" in key]
    assert torch.equal(model.double().position_embedding, position_embedding(5, 12).double())
    assert model(random_ids(8, 31, 3, 5)).dtype == torch.float64


def test_the_documents_first_seven_ids_are_its_books_first_words():
    from flax_transformer.tokenizer import load_o200k_base

    encoding = load_o200k_base()
    assert encoding.encode("Chapter 1: Building Rapport and") == [45990, 220, 16, 25, 22478, 158287, 326]


@pytest.mark.parametrize("row", DOCUMENT_ROWS)
def test_the_documents_printed_rows_are_english_that_encodes_back(row):
    from flax_transformer.tokenizer import load_o200k_base

    text = load_o200k_base().decode(list(row))
    assert re.fullmatch(r"[A-Za-z0-9 .,:;'\"\n-]+", text)
    assert load_o200k_base().encode(text) == list(row)


# The commands


def test_the_decoder_only_command_walks_on_real_text(capsys):
    assert decoder_only_walk.main(["--seed", "3"]) == 0
    printed = capsys.readouterr().out
    largest = re.search(r"max\(tokenized_txt\): (\d+)", printed)
    assert largest
    assert len(shapes_in(printed)) == 11
    assert shapes_in(printed)[1] == (int(largest[1]) + 1, 64)


def test_the_encoder_decoder_command_prints_every_shape_from_ids_to_probabilities(capsys):
    encoder_decoder_walk.main(["--seed", "3"])
    printed = capsys.readouterr().out
    chain = shapes_in(printed.split("4. From token ids")[1].split("5. Autoregressive")[0])
    (_, S), (_, T), V = chain[0], chain[4], chain[-1][-1]
    decoder = [(2, T), (2, T, 512), (2, T, 512), (2, 8, T, T), (2, 8, T, S), (2, T, V), (2, T, V)]
    assert chain == [(2, S), (2, S, 512), (2, S, 512), (2, 8, S, S), *decoder]
    assert "has 5,165,688 parameters, 5,165,688 with N=1" in printed


@pytest.mark.parametrize(
    ("content", "complaint"), [(None, "cannot be read"), (b"\xff\xfe", "not UTF-8"), (b"", "has 0 tokens")]
)
def test_a_file_that_is_missing_or_not_utf8_or_too_short_is_one_line_of_error(tmp_path, capsys, content, complaint):
    path = tmp_path / "own.txt"
    if content is not None:
        path.write_bytes(content)
    assert decoder_only_walk.main(["--data", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert str(path) in captured.err
    assert complaint in captured.err


def test_ones_own_text_is_walked_on(tmp_path, capsys):
    path = tmp_path / "own.txt"
    path.write_bytes("Sie fragte:\r\n\U0001f600 <|endoftext|> ".encode() * 7)
    assert decoder_only_walk.main(["--data", str(path)]) == 0
    assert "text[:7]:           'Sie fra'\n" in capsys.readouterr().out


def test_without_the_tokenizer_the_command_is_one_line_of_error(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flax_transformer.tokenizer", None)
    assert decoder_only_walk.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "flax_transformer" in captured.err


@pytest.mark.parametrize("module", [decoder_only, encoder_decoder])
def test_the_reference_imports_only_torch_and_the_standard_library(module):
    name = module.__name__
    script = (
        f"import sys, torch; before = set(sys.modules); import {name}, {name.replace('.', '.walks.')}; "
        "print(*{m.split('.')[0] for m in set(sys.modules) - before})"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert set(printed.split()) - sys.stdlib_module_names <= {"torch", "torch_reference"}
